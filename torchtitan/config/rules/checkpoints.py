"""Rules for `[checkpoint]`."""

from collections.abc import Callable, Iterator

from torchtitan.config.sections.schema import Config
from torchtitan.utils.storage import is_url
from torchtitan.utils.text import brief


def retention_is_safe(config: Config, world: int) -> Iterator[str]:
    if config.checkpoint.keep_latest_k == 1:
        yield (
            "checkpoint.keep_latest_k: with 1, a failure while the next checkpoint is "
            "written could lose the only one; "
            "set 2 or more, or 0 to keep all"
        )
    every = config.checkpoint.keep_every_n
    interval = config.checkpoint.interval
    if every and not config.checkpoint.keep_latest_k:
        yield (
            "checkpoint.keep_every_n: keep_latest_k = 0 keeps all checkpoints; set "
            "keep_latest_k = 2 or more"
        )
    elif every % interval:
        yield (
            f"checkpoint.keep_every_n: {every} is not a multiple of checkpoint.interval "
            f"= {interval}, so few or no "
            f"checkpoints are made at its multiples; set {-(-every // interval) * interval}"
        )


def storage_is_shared(config: Config, world: int) -> Iterator[str]:
    if config.checkpoint.enable and config.checkpoint.folder.startswith("memory://") and world > 1:
        yield (
            f"checkpoint.folder: each of {world} ranks has its own memory://; set a "
            "folder or URL that all can access"
        )


def uploads_go_elsewhere(config: Config, world: int) -> Iterator[str]:
    c = config.checkpoint
    if c.upload_folder is None:
        return
    if not c.enable:
        yield "checkpoint.upload_folder has no effect without checkpoint.enable = true"
    elif not is_url(c.upload_folder):
        yield (
            f"checkpoint.upload_folder: {brief(c.upload_folder)} is a local folder; set a "
            "URL such as s3://bucket/run"
        )
    elif is_url(c.folder):
        yield (
            "checkpoint.upload_folder: checkpoint.folder is a URL already; remove "
            "upload_folder, or set folder to a "
            "local one, from which checkpoints are copied to upload_folder"
        )
    elif c.upload_folder.startswith("memory://") and world > 1:
        yield (
            f"checkpoint.upload_folder: each of {world} ranks has its own memory://; set a "
            "URL that all can access"
        )


def loading_is_enabled(config: Config, world: int) -> Iterator[str]:
    """Loading weights or exporting them must not be skipped silently.

    Keys that say how to save have no effect and are allowed: convention files set
    `last_save_model_only` with
    `enable = false`.
    """
    c = config.checkpoint
    asked = {
        "load_step": c.load_step >= 0,
        "initial_load_path": c.initial_load_path is not None,
        "initial_load_in_hf": c.initial_load_in_hf,
        "last_save_in_hf": c.last_save_in_hf,
    }
    for key, is_set in asked.items():
        if is_set and not c.enable:
            yield f"checkpoint.{key} has no effect without checkpoint.enable = true"


def hf_weights_have_no_optimizer(config: Config, world: int) -> Iterator[str]:
    c = config.checkpoint
    if c.initial_load_in_hf and not c.initial_load_model_only:
        yield (
            "checkpoint.initial_load_model_only = false needs optimizer state, which "
            "Hugging Face weights "
            "(checkpoint.initial_load_in_hf) don't have; change one of the two"
        )


def hf_weights_have_no_expert_bias(config: Config, world: int) -> Iterator[str]:
    if config.checkpoint.last_save_in_hf and config.moe.balance_bias_rate:
        yield (
            "checkpoint.last_save_in_hf: Hugging Face's format has no place for the "
            "biases that moe.balance_bias_rate "
            "trains, without which the model chooses other experts; set "
            "checkpoint.last_save_in_hf = false, or "
            "moe.balance_bias_rate = 0 and balance by moe.global_balance_loss"
        )


RULES: tuple[Callable[[Config, int], Iterator[str]], ...] = (
    retention_is_safe,
    storage_is_shared,
    uploads_go_elsewhere,
    loading_is_enabled,
    hf_weights_have_no_optimizer,
    hf_weights_have_no_expert_bias,
)
