"""One rank of a run: `torchrun ... -m torchtitan.train --job.config_file X.toml [--section.key
value ...]`.

Without torchrun it trains as one process. Everything is checked before torch is imported.
"""

import gc
import os
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from torchtitan.config import Resolved, resolve
from torchtitan.train.preflight import Setup, preflight
from torchtitan.utils.errors import DEBUG_ENV, UserError, from_another_rank
from torchtitan.utils.logging import init_logging, log_failure, logger
from torchtitan.utils.process import launcher_reports, rank_and_world
from torchtitan.utils.signals import INTERRUPTED, Stopped, StopRequest
from torchtitan.utils.storage import storage_path
from torchtitan.utils.torch_versions import installed_torch, too_new
from torchtitan.utils.wording import plural, show_loss, show_recent, show_tokens, validation_title

if TYPE_CHECKING:
    from torchtitan.train.state import Progress
    from torchtitan.train.trainer import Trainer

COMMAND_ENV = "TORCHTITAN_COMMAND"
"""The command the user typed, set by launchers that run another one."""
LAUNCHER_ENV = "TORCHTITAN_LAUNCHER"
"""Process id of a launcher that should exit, not restart this rank, after a requested stop."""
_BEFORE = "before the first step"
_RECORDING_SECONDS = 2.0
"""Time limit for recording a second Ctrl-C: a hanging disk may be why it was pressed."""


def main(argv: list[str]) -> int:
    if os.environ.get(DEBUG_ENV) != "1":
        # Else torch prints C++ stacks on every rank when one dies.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Growing one segment loses less memory to fragmentation than many segments; the planner assumes
    # it.
    if not os.environ.get("PYTORCH_ALLOC_CONF"):
        os.environ["PYTORCH_ALLOC_CONF"] = (
            os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "expandable_segments:True"
        )
    rank, world = rank_and_world()
    # The launcher may restart this rank, so a stop is possible before training.
    stop = StopRequest(lambda: os._exit(_report_stop(rank, _BEFORE)))
    stop.listen()
    init_logging(rank)
    resolved = resolve(argv, world, check=False)
    for warning in resolved.warnings:
        logger.warning(warning)
    if note := too_new(installed_torch()):
        logger.warning(note)
    setup = preflight(resolved.config, world=world, sources=resolved.sources)
    for warning in setup.warnings:
        logger.warning(warning)
    job = resolved.config.job
    logger.info(f"{job.description}: {plural(world, 'rank')}, results in {job.dump_folder}")

    try:
        return _run(resolved, setup, stop, rank)
    except BaseException as error:
        log_failure(error)
        raise


def _run(resolved: Resolved, setup: Setup, stop: StopRequest, rank: int) -> int:
    """Train. Returns the exit status."""
    gc.disable()  # the import creates half a million objects, and no garbage
    # imports torch, so only after the configuration is checked
    from torchtitan.train.trainer import Trainer

    gc.enable()
    try:
        trainer = Trainer(resolved.config, setup, stop)
    except Stopped:
        return _leave(stop, rank)
    except Exception as error:
        if not (stop.requested and from_another_rank(error)):
            raise
        return _leave(stop, rank)  # the other rank noticed the request first, or failed
    stop.abandon = lambda: _interrupt(trainer, rank)
    try:
        progress = trainer.train()
    except BaseException as error:
        trainer.close(error)
        raise
    trainer.close()
    if trainer.engine.stops_early:
        return _leave(stop, rank, f"after step {progress.step}")
    if rank == 0:
        _summarize(resolved, progress)
    return 0


def _leave(stop: StopRequest, rank: int, when: str = _BEFORE) -> int:
    """Return the exit status after a stop, and make the launcher stop, too."""
    stop.ignore()
    if launcher := os.environ.get(LAUNCHER_ENV):
        ranks = psutil.Process(int(launcher)).children()
        if len(ranks) < int(os.environ["LOCAL_WORLD_SIZE"]):
            return os.EX_TEMPFAIL  # one has failed, so the request was torchrun's
        os.kill(int(launcher), signal.SIGTERM)
    return _report_stop(rank, when)


def _report_stop(rank: int, when: str) -> int:
    """Print how to resume. Returns the exit status."""
    if rank == 0:
        why = f"as asked. To resume:\n  {command_line()}"
        if launcher_reports() and LAUNCHER_ENV not in os.environ:  # in a range of nodes
            why = "to restart on the nodes that join or remain"
        # In one write, since the launcher announces its own stop at this moment. print writes the
        # end of a text with several lines by itself.
        print(f"Stopped {when}, {why}\n", end="", file=sys.stderr, flush=True)
    return os.EX_TEMPFAIL


def _interrupt(trainer: "Trainer", rank: int) -> None:
    """Exit at once, whatever the main thread does, after a second Ctrl-C."""
    step = trainer.progress.step
    if rank == 0:
        newest = trainer.checkpointer.newest_step if trainer.checkpointer.saving else None
        print(
            f"interrupted: {_resume_hint(step, newest)}\n  {command_line()}\n",
            end="",
            file=sys.stderr,
            flush=True,
        )

    def record() -> None:
        telemetry = trainer.telemetry
        reason = telemetry.run_record.end(step, trainer.config.training.steps, KeyboardInterrupt())
        telemetry.events.end(step, reason)

    recording = threading.Thread(target=record, daemon=True)
    recording.start()
    recording.join(_RECORDING_SECONDS)
    os._exit(INTERRUPTED)


def _resume_hint(step: int, newest: int | None) -> str:
    """A sentence: the steps that a run loses by exiting after `step`, and where it would continue.

    Args:
        newest: the newest checkpoint's step, 0 if there is none; None if the run doesn't save.
    """
    first = (newest or 0) + 1
    what = f"step {step} is lost" if step == first else f"steps {first} to {step} are lost"
    if step < first:
        what = "no finished step is lost"
    elif newest is None:
        what += ", as checkpoint.enable = false or load_only = true"
    return f"{what}. To resume after step {newest}:" if newest else f"{what}. To start again:"


def command_line() -> str:
    """The command line that starts this run again."""
    if command := os.environ.get(COMMAND_ENV):
        return command
    if (
        "TORCHELASTIC_RUN_ID" in os.environ
        and (agent := Path(f"/proc/{os.getppid()}/cmdline")).exists()
    ):
        return shlex.join(agent.read_text().rstrip("\0").split("\0"))
    return shlex.join(sys.orig_argv)


def _summarize(resolved: Resolved, progress: "Progress") -> None:
    """Log what the run produced and what to do next."""
    config = resolved.config
    step = progress.step
    dump = config.job.dump_folder
    if progress.data is None:
        logger.info(
            f"Nothing to do: this run is at step {step}, and training.steps = "
            f"{config.training.steps}. Raise it to continue, or go back with checkpoint.load_step"
        )
        return
    loss = "no loss: no token was predicted"
    if losses := progress.losses:
        loss = f"loss {show_loss(losses[0])} -> {show_recent(losses, 'step')}"
    for name, held_out in progress.validation.items():
        loss += "" if held_out is None else f", {validation_title(name)} {show_loss(held_out)}"
    logger.info(f"Done: step {step}, {show_tokens(progress.tokens)} tokens, {loss}")
    results = {"metrics": f"{dump}/metrics.jsonl", "config": f"{dump}/config.toml"}
    section = config.checkpoint
    saves = section.enable and not section.load_only
    checkpoint = storage_path(section.folder, dump) / f"step-{step}"
    if saves:
        results["checkpoint"] = str(checkpoint)
    for name, path in results.items():
        note = "" if storage_path(path).exists() else " (missing)"
        logger.info(f"  {name:<11} {path}{note}")
    if not saves:
        logger.info("No checkpoint was saved: set checkpoint.enable = true to keep the model")
    elif not checkpoint.exists():
        raise UserError(f"{checkpoint}: deleted while the run was writing to it")
    elif not section.last_save_model_only:
        more = config.training.steps * 2
        logger.info(f"To continue training: the same command with --training.steps {more}")
