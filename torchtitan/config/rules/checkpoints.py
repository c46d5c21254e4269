"""Rules on checkpoints: retention, storage, and exchange with Hugging Face."""

from collections.abc import Iterator
from pathlib import Path

from torchtitan.config.rules.table import Facts, refuse, rule
from torchtitan.config.sections.schema import Config
from torchtitan.utils.storage import is_url, storage_problem


@rule("checkpoint.keep_latest_k", "checkpoint.keep_every_n")
def retention_is_safe(config: Config, facts: Facts) -> Iterator[str]:
    c = config.checkpoint
    if c.keep_latest_k == 1:
        yield (
            "checkpoint.keep_latest_k: with 1, a failure while the next checkpoint is written "
            "could lose the only one; set 2 or more, or 0 to keep all"
        )
    every = c.keep_every_n
    interval = c.interval
    if every and not c.keep_latest_k:
        yield (
            "checkpoint.keep_every_n: keep_latest_k = 0 keeps all checkpoints; set keep_latest_k "
            "= 2 or more"
        )
    elif every % interval:
        yield (
            f"checkpoint.keep_every_n: {every} is not a multiple of checkpoint.interval = "
            f"{interval}, so few or no checkpoints are made at its multiples; set "
            f"{-(-every // interval) * interval}"
        )


@rule("checkpoint.folder")
def storage_is_shared(config: Config, facts: Facts) -> Iterator[str]:
    c = config.checkpoint
    if c.enable and c.folder.startswith("memory://") and facts.world > 1:
        yield (
            f"checkpoint.folder: each of {facts.world} ranks has its own memory://; set a folder "
            "or URL that all can access"
        )


@rule("checkpoint.enable")
def loading_is_enabled(config: Config, facts: Facts) -> Iterator[str]:
    """Loading weights or exporting them must not be skipped silently.

    Keys on how to save are allowed: files of TorchTitan 0.2 set `last_save_model_only` with
    `enable = false`.
    """
    c = config.checkpoint
    settings = {
        "load_step": c.load_step >= 0,
        "initial_load_path": c.initial_load_path is not None,
        "initial_load_in_hf": c.initial_load_in_hf,
        "last_save_in_hf": c.last_save_in_hf,
    }
    for key, is_set in settings.items():
        if is_set and not c.enable:
            yield f"checkpoint.{key} has no effect without checkpoint.enable = true"


refuse(
    "checkpoint.initial_load_model_only",
    "checkpoint.initial_load_in_hf",
    when=lambda c: c.checkpoint.initial_load_in_hf and not c.checkpoint.initial_load_model_only,
    because=(
        "checkpoint.initial_load_model_only = false needs optimizer state, which Hugging Face "
        "weights (checkpoint.initial_load_in_hf) don't have; change one of the two"
    ),
)


@rule("checkpoint.last_save_in_hf", "moe.balance_bias_rate", needs=["exported_buffers"])
def exports_hold_the_biases_of_routers(config: Config, facts: Facts) -> str | None:
    trains_biases = config.checkpoint.last_save_in_hf and config.moe.balance_bias_rate > 0
    if not trains_biases or facts.exported_buffers:
        return None
    return (
        "checkpoint.last_save_in_hf: Hugging Face's format has no place for the biases that "
        "moe.balance_bias_rate trains, without which the model chooses other experts; set "
        "checkpoint.last_save_in_hf = false, or moe.balance_bias_rate = 0 and balance by "
        "moe.global_balance_loss"
    )


@rule(
    "checkpoint.initial_load_in_hf",
    "checkpoint.last_save_in_hf",
    needs=["export_problems", "has_hf_class"],
)
def hugging_face_has_the_model(config: Config, facts: Facts) -> Iterator[str]:
    c = config.checkpoint
    if c.initial_load_in_hf and not facts.has_hf_class:
        yield f"checkpoint.initial_load_in_hf: {facts.export_problems[0]}"
    if c.last_save_in_hf:
        for problem in facts.export_problems:
            yield (
                f"checkpoint.last_save_in_hf: {problem}; or set checkpoint.last_save_in_hf = false"
            )


@rule("checkpoint.initial_load_path", "checkpoint.folder", needs=["folders"])
def checkpoints_can_be_reached(config: Config, facts: Facts) -> Iterator[str]:
    c = config.checkpoint
    if not c.enable:
        return
    path = c.initial_load_path or ""
    if c.initial_load_in_hf and is_url(path):
        yield (
            f"checkpoint.initial_load_path: safetensors must be in a local folder, got {path!r}; "
            "download them, or convert them to a checkpoint at that URL with `torchtitan ckpt "
            "from-hf`"
        )
    elif path and not is_url(path) and path not in facts.folders:
        yield f"checkpoint.initial_load_path: no folder {path!r} (relative to {Path.cwd()})"
    for key in ("folder", "initial_load_path"):
        if problem := storage_problem(getattr(c, key) or ""):
            yield f"checkpoint.{key}: {problem}"
