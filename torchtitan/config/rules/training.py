"""Rules on precision, schedules, checks during training, averages, and reports."""

import re
from collections.abc import Iterator

from torchtitan.config.derive import SHAPES
from torchtitan.config.rules.table import Facts, refuse, rule
from torchtitan.config.sections.schema import Config
from torchtitan.utils.wording import brief

refuse(
    "debug.deterministic_warn_only",
    "debug.deterministic",
    when=lambda c: c.debug.deterministic_warn_only and not c.debug.deterministic,
    because="debug.deterministic_warn_only has no effect without debug.deterministic = true",
)

refuse(
    "eval.tasks",
    "eval.enable",
    when=lambda c: c.eval.enable and not c.eval.tasks,
    because="eval.tasks: eval.enable = true needs the name of at least one task",
)


@rule("training.mixed_precision_param", needs=["device"])
def device_computes_in_bf16(config: Config, facts: Facts) -> str | None:
    if config.training.mixed_precision_param != "bfloat16" or facts.device.has_bf16:
        return None
    return (
        'training.mixed_precision_param: "bfloat16" needs an NVIDIA GPU of compute capability 8.0 '
        f'(Ampere) or newer, this is {facts.device.name}; set it to "float32" (float16 would need '
        "a scaled loss, which training here doesn't have)"
    )


@rule("activation_checkpoint.selective_ac_option")
def checkpointing_option_is_known(config: Config, facts: Facts) -> Iterator[str]:
    option = config.activation_checkpoint.selective_ac_option
    if option != "op" and not re.fullmatch(r"0*[1-9][0-9]{0,3}", option):
        yield (
            f'activation_checkpoint.selective_ac_option: got {brief(option)}, must be "op" or a '
            "positive number k below 10000 (every k-th block)"
        )


@rule("lr_scheduler.name", "lr_scheduler.decay_ratio", "lr_scheduler.decay_type")
def schedule_keys_agree(config: Config, facts: Facts) -> Iterator[str]:
    """Keys that `lr_scheduler.name` excludes. The values it stands for are accepted, because
    `config.toml` has them.
    """
    s = config.lr_scheduler
    if s.name is None or s.name == "wsd":
        return
    name = f'lr_scheduler.name = "{s.name}"'
    if s.name in SHAPES:
        if s.decay_type != s.name:
            yield (
                f'lr_scheduler.decay_type: "{s.decay_type}" contradicts {name}; remove one of the '
                'two, or set lr_scheduler.name = "wsd"'
            )
        if s.decay_ratio is not None:
            yield (
                f"lr_scheduler.decay_ratio: {name} decays from the end of warm-up on; remove "
                f'decay_ratio, or set lr_scheduler.name = "wsd" and decay_type = "{s.name}"'
            )
        return
    what = "never decays" if s.name == "constant" else "has a decay of its own"
    settings = {"decay_ratio": s.decay_ratio or None, "decay_type": s.decay_type}
    if s.name == "constant":
        settings["min_lr_factor"] = s.min_lr_factor or None
    for key, value in settings.items():
        if value is not None:
            yield (
                f'lr_scheduler.{key}: {name} {what}; remove {key}, or set lr_scheduler.name = "wsd"'
            )


@rule("lr_scheduler.total_steps", "training.steps")
def every_step_trains(config: Config, facts: Facts) -> str | None:
    """Built-in schedules stay at their floor behind their end."""
    s = config.lr_scheduler
    steps = config.training.steps
    total = s.total_steps or steps
    ratio = 1 - s.warmup_steps / total if s.decay_ratio is None else s.decay_ratio
    is_built_in = s.name in (None, "wsd", *SHAPES)
    if total >= steps or not is_built_in or s.min_lr_factor or not round(total * ratio):
        return None
    return (
        f"lr_scheduler.total_steps: the learning rate is 0 after step {total} of training.steps "
        f"{steps}; set it to {steps}, or lr_scheduler.min_lr_factor above 0"
    )


@rule("profiling.profile_freq")
def profile_fits_its_period(config: Config, facts: Facts) -> Iterator[str]:
    p = config.profiling
    steps = p.profiler_warmup + p.profiler_active
    if p.enable_profiling and steps > p.profile_freq:
        yield (
            f"profiling.profile_freq: {p.profile_freq} steps are fewer than profiler_warmup "
            f"{p.profiler_warmup} + profiler_active {p.profiler_active}; set it to {steps} or "
            "more"
        )


@rule("guard.policy", "guard.straggler_factor")
def guard_can_act(config: Config, facts: Facts) -> Iterator[str]:
    g = config.guard
    c = config.checkpoint
    if g.policy == "rewind" and (not c.enable or c.load_only):
        key = "checkpoint.load_only = false" if c.enable else "checkpoint.enable = true"
        yield (
            f'guard.policy: "rewind" goes back to a checkpoint of this run; set {key}, or '
            'guard.policy = "skip"'
        )
    if 0 < g.straggler_factor <= 1:
        yield (
            f"guard.straggler_factor: {g.straggler_factor:g} would report ranks of median speed; "
            "set it above 1, for example 1.3, or to 0 (off)"
        )


@rule("ema.validation", "ema.export", "ema.start_step")
def average_has_a_use(config: Config, facts: Facts) -> Iterator[str]:
    ema = config.ema
    c = config.checkpoint
    steps = config.training.steps
    for key in ("validation", "export"):
        if getattr(ema, key) and not ema.enable:
            yield f"ema.{key} has no effect without ema.enable = true"
    if ema.validation and not config.validation.enable:
        yield "ema.validation has no effect without validation.enable = true"
    if ema.export and not (c.enable and (c.last_save_model_only or c.last_save_in_hf)):
        yield (
            "ema.export: nothing is exported; set checkpoint.enable = true, and "
            "checkpoint.last_save_model_only or last_save_in_hf, or ema.export = false "
            "(`torchtitan ckpt to-hf --ema` exports any step)"
        )
    if ema.enable and ema.start_step > steps:
        yield (
            f"ema.start_step: {ema.start_step} is after the last step; set it to at most "
            f"training.steps {steps}"
        )
