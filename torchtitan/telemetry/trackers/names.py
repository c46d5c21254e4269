"""Names of metrics in trackers: the keys of `metrics.jsonl`, in groups."""

from torchtitan.telemetry.trackers.base import Record

STEP = "train/step"
_PERF = {
    "tokens_per_second",
    "tflops",
    "mfu",
    "memory_gib",
    "memory_pct",
    "data_loading_pct",
    "step_time_s",
}
_EXPERTS = {
    "expert_load_max": "load_max",
    "expert_load_max_layer": "load_max_layer",
    "expert_entropy": "entropy",
    "auxiliary_loss": "auxiliary_loss",
    "dead_experts": "dead",
}
_OF_SOURCES = ("loss/", "tokens/", "epochs/", "bytes_per_token/")


def grouped(key: str) -> str:
    """The name of a key of `metrics.jsonl` in trackers: below `train/`, `val/`, `perf/`, `eval/`,
    `experts/` or `sources/`.
    """
    if key in _PERF:
        return f"perf/{key}"
    if key in _EXPERTS:
        return f"experts/{_EXPERTS[key]}"
    if key.startswith("validation_"):
        return f"val/{key.removeprefix('validation_')}"
    if key.startswith("eval/"):
        return key
    return f"sources/{key}" if key.startswith(_OF_SOURCES) else f"train/{key}"


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record by grouped name, without its step and time."""
    return {
        grouped(key): value
        for key, value in record.items()
        if key not in ("step", "time") and isinstance(value, int | float)
    }
