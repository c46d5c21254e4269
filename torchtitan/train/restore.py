"""Restore a run from its newest checkpoint, another run's checkpoint or Hugging Face weights; and
the state that a checkpoint holds besides tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchtitan.checkpoint import Checkpointer
from torchtitan.checkpoint.format.manifest import Manifest
from torchtitan.checkpoint.hf.opening import HFModel
from torchtitan.checkpoint.hf.weights import load_hf
from torchtitan.data.read.contents import FileLists
from torchtitan.health.guard import UpdateGuard
from torchtitan.telemetry.history import History
from torchtitan.telemetry.run_record import changed_settings
from torchtitan.train.callbacks import CallbackStates
from torchtitan.train.engine import Engine
from torchtitan.train.inputs import hf_weights_folder
from torchtitan.utils.logging import logger
from torchtitan.utils.storage import storage_path


@dataclass
class RunState:
    """The state that a checkpoint holds besides tensors. It doesn't depend on the layout."""

    engine: Engine
    guard: UpdateGuard
    callbacks: CallbackStates
    history: History = field(default_factory=History)

    def local_state(self) -> dict[str, Any]:
        """The state to save, with this rank's position in the data; a save joins the positions of
        all ranks.
        """
        engine = self.engine
        state = {
            "progress": engine.progress.state_dict(),
            "lr_scheduler": engine.schedule.state_dict(),
            "data": engine.loader.local_state(engine.progress.data or engine.loader.start),
            "guard": self.guard.spikes.state_dict(),
            "branches": self.history.branches,
        }
        if engine.average is not None:
            state["ema"] = engine.average.state_dict()
        if callbacks := self.callbacks.state_dict():
            state["callbacks"] = callbacks
        return state

    def load(
        self, state: dict[str, Any], exclude: set[str], data_files: Callable[[], FileLists]
    ) -> None:
        """Continue from a saved state.

        Args:
            exclude: `checkpoint.exclude_from_loading`.
            data_files: reads the data sources' lists of files at the time of the save.
        """
        if "train_state" not in exclude:
            self.engine.progress.load_state_dict(state["progress"])
            self.guard.spikes.load_state_dict(state["guard"])
            self.history.branches = state.get("branches", {})
            self.callbacks.load_state_dict(state.get("callbacks", {}))
        elif "dataloader" not in exclude:
            self.guard.spikes.rows = state["guard"]["rows"]  # the data continues
        if "lr_scheduler" not in exclude:
            self.engine.schedule.load_state_dict(state["lr_scheduler"])
        if "dataloader" not in exclude:
            self.engine.loader.seek(state["data"], data_files)
        else:
            self.engine.loader.begin(self.engine.progress.step)
        if self.engine.average is not None and "ema" not in exclude:
            self.engine.average.load_state_dict(state.get("ema"))

    def rewind(self, state: dict[str, Any]) -> None:
        """Return to an earlier step of this run; the data continues where it is."""
        self.engine.progress.load_state_dict(state["progress"])
        self.engine.schedule.load_state_dict(state["lr_scheduler"])
        if self.engine.average is not None:
            self.engine.average.load_state_dict(state.get("ema"))
        self.callbacks.load_state_dict(state.get("callbacks", {}))


def restore(checkpointer: Checkpointer, state: RunState) -> None:
    """Load the checkpoint or weights that the configuration starts from, if any. Called by all
    ranks.

    Raises:
        CheckpointError: it is missing, damaged, or another model's.
        UserError: the data position belongs to other data.
    """
    engine = state.engine
    config = engine.config
    section = config.checkpoint
    origin: Manifest | HFModel | None = None
    if checkpoint := checkpointer.resume():
        origin = checkpoint.manifest
        state.load(checkpoint.train_state, set(section.exclude_from_loading), checkpoint.data_files)
        if changes := changed_settings(checkpoint.manifest.model_dump(), checkpointer.run_info):
            logger.info(f"Changed since step {checkpoint.step}: {', '.join(changes)}")
    elif section.enable and section.initial_load_in_hf:
        folder = hf_weights_folder(config)
        origin = load_hf(engine.models, folder, engine.setup.spec, engine.setup.args)
        start = f"Starting from the Hugging Face weights in {folder}"
        logger.info(". ".join([start, *origin.notes]))
    elif section.enable and section.initial_load_path:
        initial = checkpointer.load_initial(storage_path(section.initial_load_path))
        origin = initial.manifest
        if not section.initial_load_model_only:
            state.load(initial.train_state, set(), initial.data_files)
        logger.info(f"Starting from {section.initial_load_path}")
    else:
        logger.info(f"Starting from scratch, seed {config.debug.seed}")
    if origin:
        tokenizer = engine.setup.tokenizer
        tokenizer.stop_ids += tuple(origin.ends)
        checkpointer.run_info |= {"ends": tokenizer.all_ends, "generation": origin.generation}
