"""Load a trained model for evaluation on the ranks of torchrun, in any layout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from torchtitan.config import complete
from torchtitan.config.derive import replace
from torchtitan.config.load.decode import load_config
from torchtitan.config.rules import check
from torchtitan.config.sections.schema import Comm, Config
from torchtitan.data.encode.tokenizer import Tokenizer
from torchtitan.inference.load import ModelSource, load_weights
from torchtitan.models.protocols import Model
from torchtitan.models.spec import Init
from torchtitan.parallel.groups import init_distributed
from torchtitan.parallel.init import materialize
from torchtitan.parallel.mesh import build_mesh
from torchtitan.parallel.parallelize import parallelize
from torchtitan.parallel.pipeline.split import pipeline_stages
from torchtitan.train.build import build_probe, row_unit
from torchtitan.train.logits import Probe
from torchtitan.train.preflight import Setup, split_facts
from torchtitan.utils.device import current_device, tune_cpu, usual_dtype


@contextmanager
def process_group() -> Iterator[None]:
    """A context with the default process group, which it starts and ends unless there is one."""
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
    """Load the model in `source`, to read its logits. The default process group must exist.

    Args:
        layout: flags of the configuration, as on the command line.
        rows: number of texts in a batch of each rank.
        max_seq_len: length of the longest text; None: the longest row of training.
        dtype: dtype of the weights; None: `usual_dtype`.

    Raises:
        ConfigError: the model can't be split in this way.
    """
    device = current_device()
    tune_cpu()
    dtype = dtype or usual_dtype(device)
    longest = max_seq_len or source.args.max_seq_len
    config = _probe_config(source, layout, dtype=dtype, rows=rows, longest=longest)
    args = source.args.model_copy(update={"max_seq_len": config.training.seq_len})
    check(config, split_facts(source.spec, args))
    flops = source.spec.module_flops(args, config.training.seq_len)
    stages = pipeline_stages(config, flops, source.spec.tied_modules(args))
    setup = Setup(source.spec, args, tokenizer, stages)
    mesh = build_mesh(config, device.type, experts=setup.n_experts > 0)
    models = parallelize(
        config, source.spec, args, stages=stages, mesh=mesh, device=device, fill=_allocate
    )
    load_weights(source, models)
    return build_probe(config, setup, mesh, device=device, models=models, longest=longest)


def _probe_config(
    source: ModelSource, layout: list[str], *, dtype: str, rows: int, longest: int
) -> Config:
    """The configuration of a forward of `rows` rows of `longest` tokens, rounded up."""
    sizes = {
        "dtype": dtype,
        "mixed_precision_param": dtype,
        "local_batch_size": rows,
        "seq_len": longest,
    }
    loaded = load_config([*(f"--training.{key}={value}" for key, value in sizes.items()), *layout])
    unit = row_unit(loaded.config)
    loaded.config = replace(loaded.config, "training.seq_len", -(-longest // unit) * unit)
    loaded.config = replace(loaded.config, "activation_checkpoint.mode", "none")
    config = complete(loaded, dist.get_world_size()).config
    config = replace(config, "model.name", source.spec.name)
    return replace(config, "model.flavor", str(source.folder))


def _allocate(
    model: Model,
    device: torch.device,
    buffer_device: torch.device,
    seed: int,
    _: Callable[[str], Init],
) -> None:
    """Allocate weights that are about to be loaded."""
    materialize(model, device, buffer_device, seed, rule=lambda fqn: Init("zeros"))
