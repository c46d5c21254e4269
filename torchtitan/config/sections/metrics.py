"""The section `[metrics]`."""

from typing import Annotated

from pydantic import Field

from torchtitan.config.types import InDumpFolder, Name, Section, Steps


class Metrics(Section):
    """What is logged, how often, and where. `metrics.jsonl` is always written."""

    log_freq: Steps = 10
    """Steps between logged lines. The first and last steps are always logged."""
    enable_tensorboard: bool = False
    """Write TensorBoard event files. The same as `tensorboard` in `sinks`."""
    save_tb_folder: InDumpFolder = "tb"
    """Write TensorBoard files here, relative to `job.dump_folder`."""
    disable_color_printing: bool = False
    """Print plain lines, without colors or a live progress line."""
    save_for_all_ranks: bool = False
    """Write TensorBoard and W&B records on every rank instead of only rank 0."""
    enable_wandb: bool = False
    """Log to Weights & Biases. The same as `wandb` in `sinks`. Needs the extra `wandb`; set the
    project and entity with `WANDB_PROJECT` and `WANDB_TEAM`.
    """
    sinks: Annotated[list[Name], Field(max_length=100)] = []
    """Also send all records to these: `tensorboard`, `wandb`, and what `experimental.custom_import`
    registers. The first two need the extra of that name.
    """

    @property
    def trackers(self) -> dict[str, str]:
        """Names of the chosen trackers, each with the key that chooses it."""
        names = {name: "metrics.sinks" for name in self.sinks if name != "jsonl"}
        if self.enable_wandb:
            names["wandb"] = "metrics.enable_wandb"
        if self.enable_tensorboard:
            names["tensorboard"] = "metrics.enable_tensorboard"
        return names
