"""The cells of the support matrix: layouts, features and pipeline schedules."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchtitan.config import load_config, resolve
from torchtitan.config.derive import AXES, DEGREE_KEYS, layout_name
from torchtitan.config.pipeline_schedules import NAMED_SCHEDULES
from torchtitan.models import get_spec
from torchtitan.testing.difference import Tolerances, tolerances_of
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError

ROWS = 8
"""Rows per step under every layout."""
LEARNING_RATE = 1e-3
MODEL = {"dim": 64, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 96}
EXPERTS = {"n_experts": 8, "experts_per_token": 2, "expert_dim": 48, "head_size": 16}
"""Of the mixture of experts, beside the sizes above."""
BALANCE = {
    "balance_bias_rate": 1e-2,
    "sequence_balance_loss": 1e-2,
    "global_balance_loss": 1e-2,
    "router_z_loss": 1e-3,
}
"""Everything that balances experts, so that all of it is proven."""
LAYOUTS: tuple[tuple[int, int, int, int, int], ...] = (
    # pp, dp_replicate, dp_shard, cp, tp
    (1, 1, 1, 1, 1),
    (1, 1, 2, 1, 1),
    (1, 2, 1, 1, 1),
    (1, 1, 1, 2, 1),
    (1, 1, 1, 1, 2),
    (2, 1, 1, 1, 1),
    (1, 1, 4, 1, 1),
    (1, 2, 2, 1, 1),
    (1, 1, 1, 4, 1),
    (1, 1, 1, 1, 4),
    (4, 1, 1, 1, 1),
    (1, 1, 2, 2, 1),
    (1, 1, 2, 1, 2),
    (1, 2, 1, 2, 1),
    (1, 2, 1, 1, 2),
    (1, 1, 1, 2, 2),
    (2, 1, 2, 1, 1),
    (2, 2, 1, 1, 1),
    (2, 1, 1, 2, 1),
    (2, 1, 1, 1, 2),
    (1, 2, 2, 2, 1),
    (1, 2, 2, 1, 2),
    (1, 1, 2, 2, 2),
    (1, 2, 1, 2, 2),
    (2, 2, 2, 1, 1),
    (2, 1, 2, 2, 1),
    (2, 1, 2, 1, 2),
    (2, 1, 1, 2, 2),
    (4, 1, 2, 1, 1),
    (2, 1, 2, 2, 2),
)
EXPERT_LAYOUTS: tuple[tuple[tuple[int, int, int, int, int], int], ...] = (
    # a layout, and the expert-parallel degree within it
    ((1, 1, 1, 1, 1), 1),
    ((1, 1, 2, 1, 1), 1),
    ((1, 1, 1, 1, 2), 1),
    ((1, 1, 2, 1, 1), 2),
    ((1, 1, 1, 2, 1), 2),
    ((1, 1, 1, 1, 2), 2),
    ((1, 1, 4, 1, 1), 2),
    ((1, 1, 4, 1, 1), 4),
    ((1, 2, 2, 1, 1), 2),
    ((1, 1, 2, 1, 2), 2),
    ((1, 1, 2, 1, 2), 4),
    ((1, 1, 2, 2, 1), 4),
    ((1, 1, 1, 2, 2), 4),
    ((2, 1, 2, 1, 1), 2),
    ((2, 1, 1, 2, 1), 2),
    ((2, 1, 1, 1, 2), 2),
    ((1, 2, 2, 1, 2), 4),
    ((1, 2, 2, 2, 1), 4),
    ((1, 1, 2, 2, 2), 4),
    ((2, 2, 2, 1, 1), 2),
    ((2, 1, 2, 2, 1), 4),
    ((2, 1, 2, 1, 2), 4),
    ((2, 1, 2, 2, 2), 2),
    ((2, 1, 2, 2, 2), 4),
    ((2, 1, 2, 2, 2), 8),
)
EXPERT_SCHEDULE_LAYOUTS = (((2, 1, 2, 1, 1), 2), ((2, 1, 1, 1, 2), 2))
TP = (1, 1, 1, 1, 2)
PP = (2, 1, 1, 1, 1)
SCHEDULE_LAYOUTS = (
    (2, 1, 1, 1, 1),
    (4, 1, 1, 1, 1),
    (2, 1, 2, 1, 1),
    (2, 1, 1, 2, 1),
    (2, 1, 1, 1, 2),
)
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_mtp": 1},
    "glm4_moe": {},
    "qwen3_next": {},
    "gpt_oss": {},
    "olmo3": {},
    "gemma3": {"layer_pattern": ["window", "full"]},
}
"""Families whose blocks are of other kinds than Llama's and Qwen3's, to overrides of their tiny
models.
"""
FAMILY_LAYOUTS = (
    (1, 1, 2, 1, 1),
    (1, 1, 1, 2, 1),
    (1, 1, 1, 1, 2),
    (2, 1, 1, 1, 1),
    (1, 1, 1, 2, 2),
    (1, 1, 2, 1, 2),
    (2, 1, 2, 1, 1),
)
FAMILY_FEATURES = (
    "document mask",
    "AC selective op",
    "AC full",
    "activation offload",
    "compile",
    "chunked loss",
    "float8",
    "Muon",
)
"""Measured for each family with tensor parallelism over two ranks."""
UNMEASURED = {("qwen3_next", "float8")}
"""Rounding to 8 bits changes the gradients of Gated DeltaNet's convolutions, which are small, by
more than would tell a fault from it.
"""


@dataclass(frozen=True)
class Feature:
    """A column of the matrix."""

    arguments: tuple[str, ...]
    """Flags that switch it on."""
    axis: str | None = None
    """It has no effect without this mesh axis. `ep`: none on a dense model."""


_COMPILE = ("--compile.enable",)
_AC_BY_OPERATION = (
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=op",
)
_FLOAT8 = ("--model.converters=float8", "--quantize.linear.float8.emulate")
_FLOAT8_EXPERTS = (
    "--model.converters=float8,quantize.grouped_mm.float8",
    "--quantize.grouped_mm.float8.fqns=experts",
    "--quantize.grouped_mm.float8.emulate",
)
_WIDER = (
    "--model.overrides.dim=128",
    "--model.overrides.ffn_dim=128",
)  # MXFP8 takes multiples of 32 on each rank

FEATURES = {
    "plain": Feature(()),
    "accumulation": Feature(("--training.global_batch_size=16",)),
    "document mask": Feature(("--training.document_mask",)),
    "validation": Feature(("--validation.enable", "--validation.freq=2", "--validation.steps=2")),
    "CPU offload": Feature(("--training.enable_cpu_offload",)),
    "async checkpoint": Feature(
        ("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.async_mode=async")
    ),
    "reshard always": Feature(("--parallelism.fsdp_reshard_after_forward=always",)),
    "optimizer in backward": Feature(
        ("--optimizer.early_step_in_backward", "--training.max_norm=0")
    ),
    "AC selective op": Feature(_AC_BY_OPERATION),
    "AC full": Feature(("--activation_checkpoint.mode=full",)),
    "activation offload": Feature(
        ("--activation_checkpoint.mode=none", "--activation_checkpoint.offload_blocks=-1")
    ),
    "compile": Feature((*_COMPILE, *_AC_BY_OPERATION)),
    "chunked loss": Feature(("--training.loss_chunks=4",)),
    "float8": Feature((*_FLOAT8, "--quantize.linear.float8.recipe_name=rowwise")),
    "float8 all-gather": Feature(
        (
            *_FLOAT8,
            "--quantize.linear.float8.enable_fsdp_float8_all_gather",
            "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
        )
    ),
    "MXFP8": Feature(
        ("--model.converters=mx", "--quantize.linear.mx.recipe_name=mxfp8_emulated", *_WIDER)
    ),
    "Muon": Feature(("--optimizer.name=Muon",)),
    "async TP": Feature((*_COMPILE, "--parallelism.enable_async_tensor_parallel"), "tp"),
    "no loss parallel": Feature(("--parallelism.disable_loss_parallel",), "tp"),
    "no load balance": Feature(("--parallelism.context_parallel_load_balancer=none",), "cp"),
    "all-to-all": Feature(("--parallelism.context_parallel_rotate_method=alltoall",), "cp"),
}
"""Column of the matrix to what it measures."""
EXPERT_FEATURES = {
    "plain": 16,
    "accumulation": 8,
    "document mask": 4,
    "validation": 4,
    "async checkpoint": 4,
    "AC full": 4,
    "AC selective op": 4,
    "activation offload": 4,
    "CPU offload": 4,
    "chunked loss": 4,
    "compile": 4,
    "float8": 4,
    "Muon": 4,
}
"""Columns of the part on experts, to the most ranks that they are measured on."""
PAIRWISE = {
    "AC selective op",
    "AC full",
    "activation offload",
    "compile",
    "chunked loss",
    "float8",
    "float8 all-gather",
    "MXFP8",
    "Muon",
    "async TP",
}
"""Slow features: measured with every pair of axes and with all four, but not with three."""
BAD = ("WRONG", "FAILS")
"""Texts of cells that differ from the reference, and of those whose run fails."""


@dataclass(frozen=True)
class Cell:
    """One combination."""

    layout: tuple[int, ...]
    feature: str = "plain"
    schedule: str = "1F1B"
    ep: int = 0
    """Expert-parallel degree of the mixture of experts; 0: the dense model."""
    family: str = ""
    """One of `FAMILIES`, whose experts are shared by all ranks of a pipeline stage."""

    @property
    def title(self) -> str:
        schedule = self.schedule if self.layout[0] > 1 else "no pipeline"
        model = f"{self.family}, " if self.family else ""
        return f"{model}{name_of(self.layout, self.ep)}, {schedule}, {self.feature}"

    @property
    def world(self) -> int:
        return torch.Size(self.layout).numel()

    @property
    def steps(self) -> int:
        return 10 if self.feature == "plain" else 4

    @property
    def layers(self) -> int:
        """Enough for two stages on each of four ranks."""
        return 8 if self.layout[0] == 4 else 4

    def arguments(self, folder: Path) -> list[str]:
        """Command-line arguments of the run, whose files go to `folder`."""
        degrees = dict(zip(AXES, self.layout, strict=True))
        rows = ROWS // (degrees["dp_replicate"] * degrees["dp_shard"])
        corpus = folder.parent / "corpus.jsonl"
        held_out = folder.parent / "held-out.jsonl"
        sizes = {
            "job.dump_folder": folder,
            "training.dataset": "corpus",
            "training.dataset_path": corpus,
            "validation.dataset_path": held_out,
            "training.steps": self.steps,
            "training.seq_len": 32,
            "validation.seq_len": 32,
            "training.local_batch_size": rows,
            "training.global_batch_size": ROWS,
            "validation.local_batch_size": rows,
            "training.mixed_precision_param": "float32",
            "activation_checkpoint.mode": "none",
            "optimizer.lr": LEARNING_RATE,
            "lr_scheduler.warmup_steps": 2,
            "metrics.log_freq": 1,
            "parallelism.pipeline_parallel_schedule": self.schedule,
            **self._model(),
            **{f"parallelism.{DEGREE_KEYS[axis]}": degree for axis, degree in degrees.items()},
        }
        low = _FLOAT8_EXPERTS if self.ep and self.feature == "float8" else ()
        return [
            *(f"--{key}={value}" for key, value in sizes.items()),
            *FEATURES[self.feature].arguments,
            *low,
        ]

    def _model(self) -> dict[str, Any]:
        if self.family:
            return self._of_family()
        sizes = MODEL | {"n_layers": self.layers}
        own = {f"model.overrides.{name}": value for name, value in sizes.items()}
        return own | (self._experts() if self.ep else {})

    def _of_family(self) -> dict[str, Any]:
        spec = get_spec(self.family)
        args = spec.flavors["debugmodel"]
        sizes = spec.tiny(args, self.layers, 4) | FAMILIES[self.family]
        own = {f"model.overrides.{name}": value for name, value in sizes.items()}
        own["model.name"] = self.family
        if spec.expert_sizes(args):
            own["parallelism.expert_parallel_degree"] = torch.Size(self.layout[2:]).numel()
            own["moe.balance_bias_rate"] = BALANCE["balance_bias_rate"]
        return own

    def _experts(self) -> dict[str, Any]:
        sizes = {f"model.overrides.{name}": value for name, value in EXPERTS.items()}
        balance = {f"moe.{name}": value for name, value in BALANCE.items()}
        own = {"model.name": "qwen3_moe", "parallelism.expert_parallel_degree": self.ep}
        return own | sizes | balance

    @property
    def tolerances(self) -> Tolerances:
        """Allowed difference to the reference."""
        return tolerances_of(load_config(list(FEATURES[self.feature].arguments)).config)

    def refusal(self, folder: Path) -> str | None:
        """The message that refuses the configuration; None if it is supported."""
        try:
            preflight(resolve(self.arguments(folder), self.world).config, output=False)
        except ConfigError as error:
            return str(error)
        return None


def cells() -> Iterator[Cell]:
    """All cells, ordered by number of ranks."""
    every = [
        Cell(layout, feature)
        for layout in LAYOUTS
        for feature in FEATURES
        if _has_effect(layout, feature)
    ]
    every += [
        Cell(layout, schedule=name)
        for layout in SCHEDULE_LAYOUTS
        for name in NAMED_SCHEDULES
        if name != "1F1B"
    ]
    every += [
        Cell(layout, feature, ep=ep)
        for layout, ep in EXPERT_LAYOUTS
        for feature, ranks in EXPERT_FEATURES.items()
        if torch.Size(layout).numel() <= ranks and (ep > 1 or FEATURES[feature].axis != "ep")
    ]
    every += [
        Cell(layout, schedule=s, ep=ep)
        for layout, ep in EXPERT_SCHEDULE_LAYOUTS
        for s in NAMED_SCHEDULES[1:]
    ]
    for family in FAMILIES:
        every += [Cell(layout, family=family) for layout in FAMILY_LAYOUTS]
        every += [
            Cell(TP, feature, family=family)
            for feature in FAMILY_FEATURES
            if (family, feature) not in UNMEASURED
        ]
        every += [Cell(PP, schedule=s, family=family) for s in NAMED_SCHEDULES if s != "1F1B"]
    yield from sorted(every, key=lambda cell: cell.world)


def _has_effect(layout: tuple[int, ...], feature: str) -> bool:
    if feature in PAIRWISE and sum(degree > 1 for degree in layout) == 3:
        return False
    axis = FEATURES[feature].axis
    return axis is None or (axis in AXES and layout[AXES.index(axis)] > 1)


def name_of(layout: tuple[int, ...], ep: int = 0) -> str:
    return layout_name(dict(zip(AXES, layout, strict=True)) | {"ep": ep})
