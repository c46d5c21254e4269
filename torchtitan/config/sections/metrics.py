"""The section `[metrics]`."""

from typing import Annotated

from pydantic import Field

from torchtitan.config.types import InDumpFolder, LocalPathOrEmpty, Name, Section, Steps


class Prometheus(Section):
    """The metric sink `prometheus`, which serves the newest values to a Prometheus server. Needs
    the extra `prometheus`.
    """

    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """Serve `/metrics` on this port, on rank 0. 0: don't listen, only write `textfile`."""
    host: Name = "127.0.0.1"
    """Listen on this address. The default is reachable only from this machine; `0.0.0.0` is
    reachable from any, without a password.
    """
    textfile: LocalPathOrEmpty = ""
    """Also write the values to this file, for the textfile collector of `node_exporter`. Its name
    must end in `.prom`.
    """


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
    """Also send all records to these: `tensorboard`, `wandb`, `mlflow`, `trackio`, `prometheus`,
    and what `experimental.custom_import` registers. All but the last need the extra of that name.
    """
    prometheus: Prometheus = Prometheus()

    @property
    def trackers(self) -> dict[str, str]:
        """Names of the chosen trackers, each with the key that chooses it."""
        names = {name: "metrics.sinks" for name in self.sinks if name != "jsonl"}
        if self.enable_wandb:
            names["wandb"] = "metrics.enable_wandb"
        if self.enable_tensorboard:
            names["tensorboard"] = "metrics.enable_tensorboard"
        return names
