"""The sections `[metrics]` and `[notifications]`."""

from typing import Annotated, Literal

from pydantic import Field

from torchtitan.config.types import InDumpFolder, LocalPath, Name, Seconds, Section, Steps, Text


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
    textfile: LocalPath = ""
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


NotifiedEvent = Literal["failed", "preempted", "resumed", "spike", "straggler", "finished"]


class Notifications(Section):
    """Messages about events of the run, to a webhook and to a command. They never stop or delay the
    run.
    """

    webhook_env: Name = ""
    """POST each message as JSON to the URL in the environment variable of this name, which Slack
    and compatible services show. The URL itself is no key, because it is a secret, and
    configurations are recorded in checkpoints.
    """
    command: Annotated[list[Text], Field(max_length=100)] = []
    """Run this program with these arguments, without a shell. It gets the event as JSON on standard
    input.
    """
    events: Annotated[list[NotifiedEvent], Field(min_length=1)] = [
        "failed",
        "preempted",
        "resumed",
        "spike",
        "straggler",
        "finished",
    ]
    """Send only these events."""
    interval_seconds: Seconds = 300
    """Send at most one message of each kind in this time. The next one says how many were left out.
    """
    max_per_hour: Annotated[int, Field(ge=1, le=10**6)] = 20
    """Send at most this many messages in an hour, of all kinds together; `failed` and `finished`
    are always sent.
    """
    timeout_seconds: Seconds = 10
    """Give up on the webhook, and kill the command, after this time."""
