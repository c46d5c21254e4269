"""Events of a run that training itself makes: starts, and stages of the data."""

from torchtitan.config.derive import layout_degrees
from torchtitan.config.load.render import to_toml_value
from torchtitan.config.sections.parallelism import Parallelism
from torchtitan.config.sections.schema import Training
from torchtitan.utils.logging import event, logger


def announce_start(step: int, last_step: int, parallelism: Parallelism) -> None:
    """Log from where to where this start trains, in which layout.

    Args:
        step: that of the checkpoint; 0 from scratch.
    """
    degrees = layout_degrees(parallelism).items()
    layout = " x ".join(f"{axis} {degree}" for axis, degree in degrees if degree > 1) or "one rank"
    begins = f"Resuming after step {step}" if step else "Starting"
    message = f"{begins}, to train to step {last_step} on {layout}"
    logger.info(message, extra=event("resumed" if step else "started", step))


def announce_stage(training: Training, step: int) -> None:
    """Log the stage of the data that begins with `step`, if one does."""
    for stage in training.stages:
        if stage.from_step == step <= training.steps:
            changes = stage.model_dump(exclude_defaults=True, exclude={"from_step"})
            listed = ", ".join(f"{key} = {to_toml_value(value)}" for key, value in changes.items())
            logger.info(
                f"A stage of the data begins with step {step}: {listed}",
                extra=event("stage", step, **changes),
            )
