"""Where a run starts: its own newest checkpoint, another run's, Hugging Face weights, or
scratch.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from torchtitan.checkpoint import Checkpointer
from torchtitan.checkpoint.hf.weights import load_hf
from torchtitan.config.sections.schema import Config
from torchtitan.models import hf_map
from torchtitan.telemetry.run_record import changed_settings
from torchtitan.train.preflight import Setup
from torchtitan.train.state import RunState
from torchtitan.utils.assets import find_asset
from torchtitan.utils.logging import logger
from torchtitan.utils.storage import storage_path


def restore(
    config: Config,
    setup: Setup,
    models: Sequence[nn.Module],
    checkpointer: Checkpointer,
    state: RunState,
) -> None:
    """Load what the configuration says to start from. Called by all ranks.

    Raises:
        CheckpointError: it is missing, damaged, or another model's.
        UserError: the data position belongs to other data.
    """
    section = config.checkpoint
    if resumed := checkpointer.resume():
        state.load(resumed.train_state, set(section.exclude_from_loading), resumed.data_files)
        if changed := changed_settings(resumed.manifest.model_dump(), checkpointer.about):
            logger.info(f"Changed since step {resumed.step}: {', '.join(changed)}")
    elif section.enable and section.initial_load_in_hf:
        folder = Path(section.initial_load_path or find_asset(config.model.hf_assets_path))
        load_hf(models, folder, hf_map(setup.spec).names(setup.args))
        logger.info(f"Starting from the Hugging Face weights in {folder}")
    elif section.enable and section.initial_load_path:
        if initial := checkpointer.load_initial(storage_path(section.initial_load_path)):
            state.load(initial.train_state, set(), initial.data_files)
        logger.info(f"Starting from {section.initial_load_path}")
    else:
        logger.info(f"Starting from scratch, seed {config.debug.seed}")
