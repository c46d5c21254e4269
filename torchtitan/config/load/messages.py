"""Validation errors in this project's words, with suggestions for misspelt keys and values."""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from torchtitan.config.load.keys import fields_of, prefixes
from torchtitan.utils.errors import MAX_PROBLEMS, did_you_mean
from torchtitan.utils.wording import brief

_TYPES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "tuple": "a list",
    "dict": "a table",
    "model": "a table",
    "finite_number": "a finite number",
    "none_required": "null",
}


_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
}
"""Kind of an error to the bound in its context, and its words."""

OTHER_NAMES = {
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "base_model": "model.name and model.flavor; `torchtitan ckpt from-hf` reads its weights",
    "bf16": 'training.mixed_precision_param = "bfloat16", the default',
    "block_size": "training.seq_len",
    "clip_grad": "training.max_norm",
    "dataloader_num_workers": "training.dataloader.num_workers",
    "eval_interval": "validation.freq",
    "eval_steps": "validation.freq",
    "fp16": "training.mixed_precision_param; float16 would need a scaled loss",
    "fsdp": "parallelism.data_parallel_shard_degree",
    "grad_clip": "training.max_norm",
    "gradient_accumulation_steps": "training.global_batch_size, in rows over all ranks",
    "gradient_checkpointing": "activation_checkpoint.mode",
    "learning_rate": "optimizer.lr",
    "log_interval": "metrics.log_freq",
    "logging_steps": "metrics.log_freq",
    "lr": "optimizer.lr",
    "lr_scheduler_type": "lr_scheduler.name",
    "max_grad_norm": "training.max_norm",
    "max_iters": "training.steps",
    "max_seq_length": "training.seq_len",
    "max_steps": "training.steps",
    "micro_batch_size": "training.local_batch_size",
    "min_lr": "lr_scheduler.min_lr_factor, a fraction of the peak",
    "model_name_or_path": "model.name and model.flavor; `torchtitan ckpt from-hf` reads weights",
    "num_epochs": "training.steps; `torchtitan init` says how often they read the text",
    "num_train_epochs": "training.steps; `torchtitan init` says how often they read the text",
    "optim": "optimizer.name",
    "out_dir": "job.dump_folder",
    "output_dir": "job.dump_folder",
    "per_device_eval_batch_size": "validation.local_batch_size",
    "per_device_train_batch_size": "training.local_batch_size",
    "report_to": "metrics.sinks",
    "resume_from_checkpoint": "checkpoint.enable, which resumes from the newest",
    "sample_packing": "training.packing",
    "save_interval": "checkpoint.interval",
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep_latest_k",
    "sequence_len": "training.seq_len",
    "torch_compile": "compile.enable",
    "train_iters": "training.steps",
    "warmup_iters": "lr_scheduler.warmup_steps",
    "warmup_ratio": "lr_scheduler.warmup_steps, a number of steps",
    "warmup_steps": "lr_scheduler.warmup_steps",
}
"""Keys of the Hugging Face Trainer, axolotl, nanoGPT and Megatron, and what they are here."""


def explain_errors(
    error: ValidationError,
    model: type[BaseModel],
    where: Callable[[str], str],
    extra_keys: Iterable[str] = (),
) -> list[str]:
    """One message per pydantic error: where, what is wrong, what is allowed, what was probably
    meant.

    Args:
        where: maps a dotted key to the start of its message.
        extra_keys: keys to suggest for a misspelt one, besides the keys of `model`.
    """
    keys = [*(key for key, _, _ in fields_of(model)), *extra_keys]
    out = []
    # Suggestions cost milliseconds each, so only problems that are shown get one.
    for number, item in enumerate(error.errors(include_url=False)):
        # The tag of a union, which is written like this, isn't a key.
        key = ".".join(str(step) for step in item["loc"] if not str(step).startswith("<"))
        if item["type"] == "extra_forbidden":
            section = isinstance(item["input"], dict)
            hint = suggest_key(key, keys, section=section) if number < MAX_PROBLEMS else ""
            text = f"unknown {'section' if section else 'key'}{hint}"
        else:
            text = explain_value(item, hints=number < MAX_PROBLEMS)
        start = where(key)
        out.append(f"{start}: {text}" if start else text)
    return out


def explain_value(item: Any, *, hints: bool = True) -> str:
    """The problem with a value, from one entry of `ValidationError.errors()`.

    Args:
        hints: suggest a legal value that is spelt alike.
    """
    context = item.get("ctx", {})
    value = brief(item["input"])
    kind = item["type"]
    if kind == "literal_error":
        legal = re.findall(r"'([^']+)'", context["expected"])
        hint = did_you_mean(str(item["input"])[:100], legal) if hints else ""
        return f"got {value}, must be {context['expected']}{hint}"
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"got {value}, must be {words} {context[bound]}"
    if kind == "missing":
        return "must be set"
    if kind == "value_error":
        return str(context["error"])
    if type_words := _TYPES.get(kind.removesuffix("_type").removesuffix("_parsing")):
        return f"got {value}, must be {type_words}"
    return f"got {value}: {item['msg'][0].lower() + item['msg'][1:]}"


def suggest_key(key: str, keys: list[str], *, section: bool = False) -> str:
    """The end of a message about an unknown key or section: the key of the same meaning, or the
    closest of those with the closest last name.
    """
    name = key.rpartition(".")[2]
    if name in OTHER_NAMES:
        return f"; here it is {OTHER_NAMES[name]}"
    choices = sorted({table for k in keys for table in prefixes(k)[1:]}) if section else keys
    names = {k.rpartition(".")[2] for k in choices}
    last = difflib.get_close_matches(name, names, 1, 0.75)
    same = [k for k in choices if k.rpartition(".")[2] in last]
    near = difflib.get_close_matches(key, same, 1, 0.0)
    return f"; did you mean {near[0]!r}?" if near else ""
