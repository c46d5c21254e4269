"""Keys of the TorchTitan 0.1 and 0.2 convention that this version spells differently or doesn't
support yet.

No key is ignored: it is renamed with a warning, accepted where its value means "off", or refused
with the reason.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from torchtitan.config.load.keys import FIELDS, Setting, message_start, prefixes
from torchtitan.config.load.messages import NAMES, explain_value, suggest_key
from torchtitan.config.sections.schema import Config
from torchtitan.utils.errors import MAX_PROBLEMS
from torchtitan.utils.wording import brief

RENAMED: dict[str, str] = NAMES["torchtitan_0_1"]
"""0.1 spelling to 0.2 spelling."""

MICROBATCHES = "parallelism.pipeline_parallel_microbatches"
"""0.1 counted the microbatches; 0.2 has `parallelism.pipeline_parallel_microbatch_size`."""

RENAMED_SECTIONS = {"float8": "quantize.linear.float8", "mx": "quantize.linear.mx"}


@dataclass(frozen=True)
class NotSupported:
    """A key for something that this version lacks."""

    what: str
    off: tuple[Any, ...] = ()
    """Values that don't ask for it; they are accepted."""


@dataclass(frozen=True)
class NoEffect:
    """A key that changes no result, or only refines what is always off. Its value must still have
    the right type.
    """

    kind: Any
    """Type of the value."""
    warning: str = ""
    """Logged if the value is true."""


UNSUPPORTED: dict[str, NotSupported | NoEffect] = {
    "job.custom_config_module": NotSupported("configuration modules in Python", ("",)),
    "experimental.custom_args_module": NotSupported("configuration modules in Python", ("",)),
    "parallelism.expert_tensor_parallel_degree": NotSupported(
        "tensor parallelism within an expert (tensor-parallel ranks have different tokens, so "
        "expert_parallel_degree splits the experts over them too)",
        (1,),
    ),
    "parallelism.expert_parallel_comm_backend": NotSupported(
        "DeepEP, whose kernels need NVSHMEM and can't be proven without GPUs", ("standard",)
    ),
    "parallelism.pipeline_parallel_expert_parallel_overlap": NoEffect(
        bool,
        "nothing is overlapped: a microbatch's exchanges of experts' rows don't run beside the "
        "computation of another; results are the same",
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": NoEffect(bool),
    # Quantized weights are recognized by their config.json.
    "checkpoint.initial_load_in_hf_quantized": NoEffect(bool),
    "checkpoint.create_seed_checkpoint": NotSupported(
        "seed checkpoints (not needed: initial weights are the same under every layout)", (False,)
    ),
    "comm.mode": NotSupported("communication without a real backend", ("default",)),
    "memory_estimation.enable": NotSupported("memory estimation", (False,)),
    "memory_estimation.disable_fake_mode": NoEffect(bool),
    "fault_tolerance.enable": NotSupported("torchft's fault tolerance", (False,)),
    "fault_tolerance.process_group": NoEffect(str),
    "fault_tolerance.process_group_timeout_ms": NoEffect(int),
    "fault_tolerance.replica_id": NoEffect(int),
    "fault_tolerance.group_size": NoEffect(int),
    "fault_tolerance.min_replica_size": NoEffect(int),
    "fault_tolerance.semi_sync_method": NoEffect(str | None),
}
"""Every key of the 0.2 convention that the schema lacks."""


REMOVED = {
    "notifications": "examples/notify.py sends such messages: name it in training.callbacks",
    "metrics.prometheus": "register a sink that serves the records (docs/guides/monitoring.md)",
    "checkpoint.upload_folder": "set checkpoint.folder to the URL, or copy the folder with another "
    "program, such as rclone, while the run trains",
}
"""What to do instead of a removed section or key."""


_FOREIGN = {key.split(".")[0] for key in UNSUPPORTED} - Config.model_fields.keys()
"""Sections of the convention that the schema lacks."""


def current_key(key: str) -> str | None:
    """Today's spelling of an old key; None if `key` isn't one."""
    if key in RENAMED:
        return RENAMED[key]
    section, _, name = key.partition(".")
    if section in RENAMED_SECTIONS and name:
        return f"{RENAMED_SECTIONS[section]}.{name}"
    return None


def rename_old_keys(
    layer: dict[str, Setting], problems: list[str], warnings: list[str]
) -> dict[str, Setting]:
    """The settings of one file or the command line under today's names.

    Must run before layers are merged, so that a later layer overrides an earlier one under either
    name.
    """
    out: dict[str, Setting] = {}
    for old, setting in layer.items():
        key = current_key(old)
        if key is not None:
            warnings.append(f"{setting.where}: {old} is called {key} now")
            if key in layer:
                problems.append(
                    f"{message_start(setting.where, old)}: {key} is set too ({layer[key].where}); "
                    f"remove {old}"
                )
                continue
        out[key or old] = setting
    return out


def convert_microbatch_count(
    settings: dict[str, Setting], problems: list[str], warnings: list[str]
) -> None:
    """Replace 0.1's number of pipeline microbatches in `settings` by the size of one."""
    if (count := settings.pop(MICROBATCHES, None)) is None or count.value is None:
        return
    key = "parallelism.pipeline_parallel_microbatch_size"
    rows_key = "training.local_batch_size"
    rows = settings[rows_key].value if rows_key in settings else FIELDS[rows_key].default
    start = message_start(count.where, MICROBATCHES)
    if key in settings:
        problems.append(f"{start}: {key} is set too ({settings[key].where}); remove {MICROBATCHES}")
    elif not _divides(count.value, rows):
        problems.append(
            f"{start}: got {brief(count.value)}, must divide {rows_key} {brief(rows)}; better set "
            f"{key}"
        )
    else:
        warnings.append(
            f"{count.where}: {MICROBATCHES} is {key} now, {rows_key} {rows} / {count.value}"
        )
        settings[key] = Setting(rows // count.value, count.where)


def _divides(count: Any, rows: Any) -> bool:
    """Whether both are integers, and `count` is a divisor."""
    if type(count) is not int or type(rows) is not int:
        return False
    return count >= 1 and rows % count == 0


_MOVED = {
    ("deepseek_v3", "16B"): ("deepseek_v2", "Lite"),
    ("qwen3", "debugmodel_moe"): ("qwen3_moe", "debugmodel"),
    ("qwen3", "30B-A3B"): ("qwen3_moe", "30B-A3B"),
    ("qwen3", "235B-A22B"): ("qwen3_moe", "235B-A22B"),
}
"""Family and flavor of 0.2 to the family that has the model here, and its flavor."""


def convert_flavor(settings: dict[str, Setting], warnings: list[str]) -> None:
    """Replace 0.2's flavors of what is another family here, and those that name an attention kernel
    by the flavor and a document mask.
    """
    name = settings.get("model.name", Setting(FIELDS["model.name"].default, ""))
    flavor = settings.get("model.flavor")
    if flavor is None or not isinstance(flavor.value, str) or not isinstance(name.value, str):
        return
    start = f"{flavor.where}: model.flavor {brief(flavor.value)} is "
    if (name.value, flavor.value) in _MOVED:
        family, size = _MOVED[name.value, flavor.value]
        settings |= {
            "model.name": Setting(family, name.where or flavor.where),
            "model.flavor": Setting(size, flavor.where),
        }
        warnings.append(f"{start}{brief(size)} of {brief(family)} now")
    match = re.fullmatch(r"(.+)_(?:flex|varlen)(?:_attn)?", flavor.value)
    if match and name.value in ("llama3", "deepseek_v3"):
        settings["model.flavor"] = Setting(match[1], flavor.where)
        mask = settings.setdefault("training.document_mask", Setting(True, flavor.where))
        text = f"{start}{brief(match[1])} now, "
        if mask.value is False:
            text += (
                "without the mask it stands for, because training.document_mask is false "
                f"({mask.where})"
            )
        else:
            text += "with training.document_mask = true"
        warnings.append(text)


def drop_unsupported(
    settings: dict[str, Setting], suggestions: list[str], problems: list[str], warnings: list[str]
) -> dict[str, Setting]:
    """The settings without the keys that the schema lacks, whose values are checked here.

    Args:
        suggestions: keys to suggest for an unknown one.
    """
    out: dict[str, Setting] = {}
    for key, setting in settings.items():
        texts: list[str] = []
        entry = UNSUPPORTED.get(key)
        if isinstance(entry, NoEffect):
            try:
                TypeAdapter(entry.kind).validate_python(setting.value, strict=True)
            except ValidationError as error:
                texts = [explain_value(error.errors()[0])]
            if entry.warning and setting.value is True:
                warnings.append(f"{message_start(setting.where, key)}: {entry.warning}")
        elif entry is not None:
            texts = list(_refusals(entry, setting.value))
        elif removed := next((name for name in prefixes(key) if name in REMOVED), None):
            texts = [f"no `{removed}` any more: {REMOVED[removed]}"]
        elif key.split(".")[0] in _FOREIGN:
            texts = [
                "unknown key"
                + (suggest_key(key, suggestions) if len(problems) < MAX_PROBLEMS else "")
            ]
        else:
            out[key] = setting
        problems += [f"{message_start(setting.where, key)}: {text}" for text in texts]
    return out


def _refusals(entry: NotSupported, value: Any) -> Iterator[str]:
    if not any(value == off and type(value) is type(off) for off in entry.off):
        legal_values = " or ".join(map(json.dumps, entry.off))
        yield f"not supported yet: {entry.what}; remove the key or set it to {legal_values}"
