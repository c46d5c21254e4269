"""A trained model on the ranks of torchrun, in any layout, without what training needs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from torchtitan.config import complete
from torchtitan.config.derive import replace
from torchtitan.config.load.decode import load_config
from torchtitan.config.rules import check
from torchtitan.config.sections.schema import Comm
from torchtitan.data.text.tokenizer import Tokenizer
from torchtitan.inference.load import ModelSource, load_weights
from torchtitan.models.spec import Init
from torchtitan.parallel.groups import init_distributed
from torchtitan.parallel.init import materialize
from torchtitan.parallel.mesh import build_mesh
from torchtitan.parallel.parallelize import parallelize
from torchtitan.parallel.pipeline_stages import pipeline_stages
from torchtitan.train.build import build_probe, row_unit
from torchtitan.train.logits import Probe
from torchtitan.train.preflight import Setup, split_facts
from torchtitan.utils.device import current_device, tune_cpu, usual_dtype


@contextmanager
def process_group() -> Iterator[None]:
    """The default process group, ended with the context unless it existed before."""
    owns = not dist.is_initialized()
    if owns:
        init_distributed(Comm(), current_device())
    try:
        yield
    finally:
        if owns:
            dist.destroy_process_group()


def load_probe(
    source: ModelSource,
    tokenizer: Tokenizer,
    layout: list[str],
    *,
    rows: int,
    max_seq_len: int | None = None,
    dtype: str | None = None,
) -> Probe:
    """What reads the logits of the model in `source`. The default process group must exist.

    Args:
        layout: keys of the configuration, as on the command line.
        rows: texts of a batch on each rank.
        max_seq_len: longest text; None: what the model was trained with.
        dtype: of the weights; None: `usual_dtype`.

    Raises:
        ConfigError: the model can't be split in this way.
    """
    device = current_device()
    world = dist.get_world_size()
    longest = max_seq_len or source.args.max_seq_len
    tune_cpu()
    dtype = dtype or usual_dtype(device)
    sizes = {
        "dtype": dtype,
        "mixed_precision_param": dtype,
        "local_batch_size": rows,
        "seq_len": longest,
    }
    loaded = load_config([*(f"--training.{key}={value}" for key, value in sizes.items()), *layout])
    unit = row_unit(loaded.config)
    longest_row = -(-longest // unit) * unit
    loaded.config = replace(loaded.config, "training.seq_len", longest_row)
    loaded.config = replace(loaded.config, "activation_checkpoint.mode", "none")
    config = complete(loaded, world).config
    config = replace(
        replace(config, "model.name", source.spec.name), "model.flavor", str(source.folder)
    )
    args = source.args.model_copy(update={"max_seq_len": longest_row})
    check(config, split_facts(source.spec, args))
    stages = pipeline_stages(
        config, source.spec.module_flops(args, longest_row), source.spec.tied_modules(args)
    )
    setup = Setup(source.spec, args, tokenizer, stages)
    mesh = build_mesh(config, device.type, experts=setup.n_experts > 0)
    models = parallelize(
        config,
        source.spec,
        args,
        stages,
        mesh,
        device,
        fill=lambda model, home, place, seed, _: materialize(
            model, home, place, seed, lambda fqn: Init("zeros")
        ),
    )
    load_weights(source, models)
    return build_probe(config, setup, mesh, device, models, longest=longest)
