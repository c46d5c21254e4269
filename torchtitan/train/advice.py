"""One-time hints about settings that slow a run for nothing."""

from torchtitan.config.sections.schema import Config
from torchtitan.models.args import DecoderArgs
from torchtitan.parallel.record import Record
from torchtitan.train.preflight import Setup
from torchtitan.utils.accelerators import missing_for_kernels
from torchtitan.utils.errors import UserError

_COMPILES_FROM = 600
"""Seconds of a run from which compilation, a minute or two, is worth its while."""


def unneeded_recomputation(config: Config, setup: Setup, free: float) -> str | None:
    """A sentence on recomputed activations that fit in memory, or None.

    Args:
        free: memory that nothing uses in a training step, in GiB for each rank.
    """
    ac = config.activation_checkpoint
    is_planned = isinstance(setup.args, DecoderArgs) and not setup.stages
    if ac.mode == "none" or ac.offload_blocks or not is_planned:
        return None
    try:
        w = Record(config, setup.args, None)
    except UserError:  # a part of the model declares no cost
        return None
    blocks = w.block_counts(w.stages)
    more = w.tokens * sum(n * (b.block_bytes - b.saved_bytes) for b, n in blocks) / 2**30
    if not 0 < more < free / 2:
        return None
    products = 3 * sum(x.flops for x in w.linears)  # a backward has two of each
    repeated = sum(x.flops * x.recompute_share for x in w.linears)
    percent = 100 * repeated / (products + repeated)
    return (
        f"Recomputing activations takes about {percent:.0f} % of a step and saves {more:.2g} GiB, "
        f'and {free:.1f} GiB are free: activation_checkpoint.mode = "none" gives the same '
        "numbers faster"
    )


def unneeded_launches(config: Config, seconds: float) -> str | None:
    """A sentence on a GPU's kernels that this machine could fuse, or None.

    Args:
        seconds: time that the run still needs.
    """
    if config.compile.enable or seconds < _COMPILES_FROM or missing_for_kernels():
        return None
    return (
        "The host launches each operation alone: compile.enable = true fuses them, which is "
        "faster, with other rounding, after a first step of about a minute"
    )
