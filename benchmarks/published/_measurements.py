"""Published measurements as configurations of this project.

`published.csv` holds those of TorchTitan, `elsewhere.csv` those of other systems and clusters, with
their sources. No row has a constant of its own; what a whole system or cluster does differently is
in the tables below.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from _software import OtherWorkload, Software

from torchtitan.config import load_config
from torchtitan.models import get_spec
from torchtitan.tools.planner.costs import StepTime, step_time
from torchtitan.tools.planner.hardware import Hardware, find_hardware
from torchtitan.tools.planner.predict import derived_workload
from torchtitan.tools.planner.workload import Workload
from torchtitan.utils.errors import ConfigError

FILES = tuple(Path(__file__).with_name(name) for name in ("published.csv", "elsewhere.csv"))
TORCHTITAN = "TorchTitan"
HARDWARE: dict[str, tuple[str, dict[str, Any]]] = {
    "H100-96GB-HBM2e-500W": ("h100-hbm2e", {}),
    "H100-80GB-HBM3-700W": ("h100-sxm", {}),
    "H200-SXM": ("h200", {}),
    "A100-80GB": ("a100", {}),
    "h200 x4 a node": (
        "h200",
        {"gpus_per_node": 4, "mesh": True},
    ),  # wired to each other, without a switch
    "a100, 400 Gb/s a node": ("a100", {"network": 400e9 / 8 / 8}),
    "a100, 800 Gb/s a node": (
        "a100",
        {"network": 800e9 / 8 / 8},
    ),  # no source states InternEvo's; that of its authors' cluster, as published elsewhere
    "h800": ("h100-sxm", {"link": 200e9}),
    "h100-sxm, 800 Gb/s a node": ("h100-sxm", {"network": 800e9 / 8 / 8}),
}
"""Names in the files that are not of this project's hardware: its name, and what is different."""
SYSTEMS: dict[str, dict[str, float]] = {"Megatron": {"host_launch": 1.7}}
"""Factors of a system's kernels on the constants of the hardware, which hold for PyTorch's own.
What the host does for a kernel follows from the two rows marked `host`.
"""
KERNELS: dict[str, dict[str, float]] = {"Megatron": {"gemm_grouped": 1.0}}
"""Constants of a system's own kernels, where those of the hardware are PyTorch's: estimates."""
FAST_ATTENTION = ("Megatron", "modded-nanogpt", "nanochat")
"""Systems with `Software.fast_attention`; TorchTitan has it on Blackwell."""
IN_PLACE = ("Megatron", "Meta", "InternEvo")
"""Systems with `Workload.weights_in_place`."""
Model = tuple[str, dict[str, Any]]
LLAMA_2 = {"n_kv_heads": 8, "vocab_size": 32000, "rope_theta": 10000.0}


def _mpt(dim: int, layers: int, heads: int) -> Model:
    """MPT: two matrices of 4 d in the feed-forward network, as three of 8/3 d, which have as many
    parameters.
    """
    sizes = {"dim": dim, "n_layers": layers, "n_heads": heads, "n_kv_heads": heads}
    return "8B", {**sizes, "ffn_dim": round(8 * dim / 3 / 16) * 16, "vocab_size": 50368}


def _relu2(dim: int, layers: int, heads: int, vocab: int, **more: Any) -> Model:
    """Networks of two matrices of 4 d, as in nanoGPT's descendants and Nemotron-4."""
    sizes = {"dim": dim, "n_layers": layers, "n_heads": heads, "n_kv_heads": heads}
    return "8B", {**sizes, "ffn_dim": 4 * dim, "vocab_size": vocab, "activation": "relu2", **more}


QK_NORM = {"qk_norm": True}
TIED = {**QK_NORM, "tie_embeddings": True}
SSSL = {**QK_NORM, "layer_pattern": '["window", "window", "window", "full"]', "window": 1024}
"""nanochat's: three layers of half of the row, and one of all of it."""
MODELS: dict[str, Model] = {
    "DeepSeek-V3": ("671B", {"n_mtp": 1}),
    "DeepSeek-V3 w/o MTP": ("671B", {}),
    "gpt-oss-120b": ("120b", {}),
    "L2-7B": ("8B", {**LLAMA_2, "n_kv_heads": 32, "ffn_dim": 11008}),
    "L2-13B": (
        "8B",
        {**LLAMA_2, "dim": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 40, "ffn_dim": 13824},
    ),
    "L2-34B": ("8B", {**LLAMA_2, "dim": 8192, "n_layers": 48, "n_heads": 64, "ffn_dim": 22016}),
    "L2-70B": ("70B", LLAMA_2),
    "K-13B": (
        "8B",
        {"dim": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 40, "ffn_dim": 13824},
    ),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 48, 64),
    "mpt-70b": _mpt(8192, 80, 64),
    "m124": _relu2(768, 12, 6, 50304, **TIED),
    "m124u": _relu2(768, 12, 6, 50304, **QK_NORM),
    "m1.5B": _relu2(1536, 52, 12, 50304, **TIED),
    "nc20": _relu2(1280, 20, 10, 65536, **QK_NORM),
    "nc24": _relu2(1536, 24, 12, 32768, **SSSL),
    "nc26": _relu2(1664, 26, 13, 32768, **SSSL),
    "n15": _relu2(6144, 32, 48, 256000, n_kv_heads=8),
    "n340": _relu2(18432, 96, 96, 256000, n_kv_heads=8),
    "IL-7B": ("8B", {"n_kv_heads": 32, "ffn_dim": 11008, "vocab_size": 103168}),
    "V2-Lite": ("Lite", {}),
}
"""Names in the files that are not flavors: the flavor they derive from, and its overrides."""
MIXTURES = {
    "30B-A3B": "qwen3_moe",
    "235B-A22B": "qwen3_moe",
    "671B": "deepseek_v3",
    "Kimi-K2": "deepseek_v3",
    "Moonlight-16B-A3B": "deepseek_v3",
    "120b": "gpt_oss",
    "Lite": "deepseek_v2",
}
"""Families of flavors with experts."""
DENSE = {"32B": "qwen3"}
"""Families of others; the rest are of Llama 3."""
UNKNOWN_MODELS = ("nano-1B",)
"""Models whose sizes no source states."""
CHECKPOINTING = {
    "none": ["none"],
    "full": ["full"],
    "sel-op": ["selective", "--activation_checkpoint.selective_ac_option=op"],
    "sel-layer": ["selective", "--activation_checkpoint.selective_ac_option=2"],
    "sel-3": ["selective", "--activation_checkpoint.selective_ac_option=3"],
}
LOSS_COMPILED_SINCE = "2025-05"
"""TorchTitan's earlier tables were measured with a loss that was not compiled."""


@dataclass(frozen=True)
class Row:
    """One published measurement."""

    id: str
    group: str
    """Rows whose errors are stated together."""
    fit: str
    """What saw the row's error: `fit`, the constants; `ratio`, a constant, but only this row's
    speed over another's; `host`, the launches of its system; `seen`, a formula or an input of its
    system, adjusted by hand; or nothing. Of `own experts`, `under 2B` and the two groups of own
    dense rows that came last, every second row in the file's order was marked `fit` before any of
    their errors was computed.
    """
    system: str
    model: str
    hardware: Hardware
    workload: Workload
    tokens_per_second: float | None
    memory_gib: float | None

    def on(self, changed: Mapping[str, Mapping[str, float]]) -> Hardware:
        """The row's hardware, with constants by the hardware's name replaced, as its system uses
        it.
        """
        hw = self.hardware.model_copy(update=dict(changed.get(self.hardware.name, {})))
        factors = SYSTEMS.get(self.system, {})
        scaled = {key: getattr(hw, key) * factor for key, factor in factors.items()}
        return hw.model_copy(update=scaled | KERNELS.get(self.system, {}))

    @cached_property
    def time(self) -> StepTime:
        return step_time(self.workload, self.on({}))

    def predicted(self, changed: Mapping[str, Mapping[str, float]] | None = None) -> float:
        """Tokens per second and GPU."""
        return step_time(self.workload, self.on(changed or {})).tokens_per_second


def load(file: Path) -> list[Row]:
    """The rows of a file in the format of either, except those whose settings no source states."""
    out = []
    for row in csv.DictReader(file.open()):
        if _refusal(row):
            continue
        name, different = HARDWARE.get(row["hw"], (row["hw"], {}))
        system = row.get("system", TORCHTITAN)
        try:
            hw = find_hardware(name).model_copy(update=different)
            config = load_config(_arguments(row)).config
            spec = get_spec(config.model.name)
            make = partial(OtherWorkload, software=_software(row, system, hw))
            workload = derived_workload(config, spec, int(row["gpus"]), make)
        except ConfigError as error:
            raise SystemExit(f"{file}: {row['id']}: {error}") from None
        tps, memory = (float(row[key]) if row[key] else None for key in ("tps_gpu", "mem_gib"))
        names = row["id"], row["group"], row["fit"], system, row["model"]
        out.append(Row(*names, hw, workload, tps, memory))
    return out


def refusals(file: Path) -> dict[str, str]:
    """Rows of a file that can't be planned, and why."""
    rows = list(csv.DictReader(file.open()))
    return {row["id"]: reason for row in rows if (reason := _refusal(row))}


def _refusal(row: dict[str, str]) -> str | None:
    if row["model"] in UNKNOWN_MODELS:
        return "no source states the sizes of the model"
    if not (row.get("local_bs") or row.get("mbs")):
        return "no source states the rows per GPU"
    return None


def _family(flavor: str) -> str:
    return (MIXTURES | DENSE).get(flavor, "llama3")


def _software(row: dict[str, str], system: str, hw: Hardware) -> Software:
    blackwell = system == TORCHTITAN and hw.capability == (10, 0)
    fast = system in FAST_ATTENTION or blackwell
    return Software(
        fast_attention=fast,
        weights_in_place=system in IN_PLACE,
        kv_repeated=system == TORCHTITAN,
        ends_in_one_unit=system == TORCHTITAN,
        fused_dispatch=row.get("dispatch") == "fused",
        launches_alone=system == "Megatron",
        overlaps_experts=row.get("overlap") == "1",
    )


def _arguments(row: dict[str, str]) -> list[str]:
    """The row's settings as flags of this project."""
    pp = int(row["pp"])
    replicas = int(row["dp_rep"]) * int(row["fsdp"])
    local = int(row.get("local_bs") or 0) or (
        int(row["global_bs"]) // replicas if pp > 1 else int(row["mbs"])
    )
    mode, *more = CHECKPOINTING[row["ac"]]
    flavor, overrides = MODELS.get(row["model"], (row["model"], {}))
    own = row.get("system", TORCHTITAN) == TORCHTITAN
    loss = row.get("date", "") >= LOSS_COMPILED_SINCE or not own
    moe = flavor in MIXTURES
    settings: dict[str, Any] = {
        "model.name": _family(flavor),
        "model.flavor": flavor,
        **{f"model.overrides.{key}": value for key, value in overrides.items()},
        "parallelism.data_parallel_replicate_degree": row["dp_rep"],
        "parallelism.data_parallel_shard_degree": row["fsdp"],
        "parallelism.context_parallel_degree": row["cp"],
        "parallelism.tensor_parallel_degree": row["tp"],
        "parallelism.expert_parallel_degree": row.get("ep", "1"),
        "parallelism.pipeline_parallel_degree": pp,
        "parallelism.enable_async_tensor_parallel": row["async_tp"] == "1" and row["tp"] != "1",
        "parallelism.context_parallel_rotate_method": "alltoall",  # how TorchTitan sent gradients
        "training.seq_len": row["seq"],
        "training.local_batch_size": local,
        "training.global_batch_size": row["global_bs"],
        "activation_checkpoint.mode": mode,
        "compile.enable": row["compile"] == "1",
        "compile.components": "model,loss" if loss else "model",
    }
    if pp > 1:
        microbatch = int(row["mbs"]) if row.get("mbs") else local // int(row["microbatches"])
        settings |= {
            "parallelism.pipeline_parallel_schedule": row["schedule"],
            "parallelism.pipeline_parallel_microbatch_size": microbatch,
            **_stages(flavor, overrides, pp, row.get("lps", "")),
        }
    settings |= _eight_bit(row, moe)
    return [
        *(
            f"--{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in settings.items()
        ),
        *more,
        *row.get("extra", "").split(),
    ]


def _stages(flavor: str, overrides: Mapping[str, Any], pp: int, per_stage: str) -> dict[str, Any]:
    """Layers per stage; the embedding and the output count as a layer where only then the stages
    come out even. What predicts further tokens is a layer.
    """
    args: Any = get_spec(_family(flavor)).flavors[flavor]
    layers = args.n_layers + overrides.get("n_mtp", 0)
    even = bool(per_stage) and (layers % (int(per_stage) * pp) == 0 or flavor == "8B")
    key = "parallelism.pipeline_parallel_"
    less = {
        f"{key}first_stage_less_layers": int(not even),
        f"{key}last_stage_less_layers": int(not even),
    }
    return less | ({f"{key}layers_per_stage": per_stage} if per_stage else {})


def _eight_bit(row: dict[str, str], moe: bool) -> dict[str, Any]:
    recipe = row["float8"]
    if recipe == "none":
        return {}
    kind = "mx" if recipe == "mx" else "float8"
    settings: dict[str, Any] = {
        "model.converters": f"{kind},quantize.grouped_mm.{kind}" if moe else kind,
        f"quantize.linear.{kind}.filter_fqns": "output,router" if moe else "output",
    }
    if moe:
        settings[f"quantize.grouped_mm.{kind}.fqns"] = "experts"
    if kind == "float8":
        gathers = recipe == "tensorwise" and row.get("f8gather", "1") != "0"
        float8 = "quantize.linear.float8."
        settings |= {
            f"{float8}recipe_name": recipe,
            f"{float8}enable_fsdp_float8_all_gather": gathers,
            f"{float8}precompute_float8_dynamic_scale_for_fsdp": gathers,
        }
    return settings
