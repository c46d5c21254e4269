"""The section `[ema]`: an exponential moving average of the weights."""

from torchtitan.config.sections.section import Section
from torchtitan.config.sections.types import Decay, Steps


class EMA(Section):
    """An exponential moving average of the weights, kept beside them in fp32 and sharded like
    them.
    """

    enable: bool = False
    """Keep the average. Takes 4 bytes per parameter of a rank's shard."""
    decay: Decay = 0.999
    """Share of the average that an update keeps; the rest comes from the weights."""
    warmup: bool = True
    """Keep at most (1 + n) / (10 + n) in update n, so that the average soon forgets the first
    weights.
    """
    start_step: Steps = 1
    """First step whose weights count. Until then the average is the weights."""
    every: Steps = 1
    """Update the average after every this many updates of the weights. Skipped steps don't count.
    """
    validation: bool = False
    """Validate the average too: `validation_loss_ema`."""
    export: bool = False
    """Write the average instead of the weights where `checkpoint.last_save_model_only` and
    `checkpoint.last_save_in_hf` say so."""
