"""A plan: the time and memory predicted for one configuration on one hardware."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import NormalDist

from torchtitan.config.derive import axis_degrees, derive, layout_degrees, ranks_of
from torchtitan.config.rules import Facts, check, validate
from torchtitan.config.sections.schema import Config
from torchtitan.models import ModelSpec
from torchtitan.parallel.pipeline.split import pipeline_stages
from torchtitan.tools.planner.costs import StepTime, step_time
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.host_memory import host_memory
from torchtitan.tools.planner.memory import GIB, Memory, memory_of
from torchtitan.tools.planner.workload import Workload
from torchtitan.train.preflight import split_facts
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.wording import listed, show_percent


@dataclass(frozen=True)
class Plan:
    """One configuration on one hardware."""

    workload: Workload
    spec: ModelSpec
    hardware: Hardware
    time: StepTime
    memory: tuple[Memory, ...]
    """Memory of each pipeline rank."""
    notes: tuple[str, ...] = ()
    stages: tuple[tuple[float, "Plan"], ...] = ()
    """The steps and the plan of each stage of the data; empty if all stages are alike."""
    name: str = ""
    """The model's name, unless its family and flavor are."""

    @property
    def config(self) -> Config:
        return self.workload.config

    @property
    def model(self) -> str:
        return self.name or self.config.model.label

    @property
    def tightest(self) -> "Plan":
        """The plan of the stage of the data that `memory` belongs to."""
        stages = (stage for _, stage in self.stages)
        return max(stages, key=lambda stage: stage.peak_gib, default=self)

    @property
    def layout(self) -> dict[str, int]:
        """Degree of each mesh axis, and, for a mixture of experts, of expert parallelism."""
        return (layout_degrees if self.workload.experts else axis_degrees)(self.config.parallelism)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of each GPU."""
        return self.time.tokens_per_second

    @property
    def peak_gib(self) -> float:
        """Memory of the pipeline rank that needs most."""
        return max(memory.reserved for memory in self.memory) / GIB

    @property
    def host_gib(self) -> dict[str, float]:
        """Host memory that the ranks of one host need, by category."""
        ranks = min(self.workload.world, self.hardware.devices_per_host)
        return {
            category: ranks * size / GIB for category, size in host_memory(self.workload).items()
        }

    @property
    def speed_band(self) -> float:
        """Relative error within which 90 % of such plans' throughputs are."""
        return speed_band(self.workload, self.hardware, self.time)

    @property
    def speed_range(self) -> tuple[float, float]:
        """Tokens/s per GPU between which 90 % of such plans are."""
        return ends(self.tokens_per_second, self.speed_band)

    def time_range(self, duration: float) -> tuple[float, float]:
        """`duration`, which is at this plan's speed, at the ends of `speed_range`."""
        return duration / (1 + self.speed_band), duration / (1 - self.speed_band)

    @property
    def memory_band(self) -> float:
        """Relative error within which 90 % of such plans' peaks are."""
        return memory_band(self.workload)

    @property
    def peak_range(self) -> tuple[float, float]:
        """GiB between which 90 % of such plans' peaks are."""
        return ends(self.peak_gib, self.memory_band)

    @property
    def chance_to_fit(self) -> float:
        """Probability that the run fits in memory."""
        return chance_to_fit(self.peak_gib, self.workload, self.hardware)

    @property
    def fits(self) -> bool:
        """Whether the run is more likely to fit than not."""
        return self.chance_to_fit >= 0.5

    @property
    def mfu(self) -> float | None:
        """Share of the bf16 peak, as the trainer logs it. None if another type computes."""
        if self.workload.element != 2:
            return None
        flops = self.spec.flops_per_token(self.workload.args, self.workload.seq_len)
        return flops * self.tokens_per_second / self.hardware.bf16

    @property
    def checkpointing(self) -> str:
        """Mode of activation checkpointing, with its option."""
        ac = self.config.activation_checkpoint
        if ac.mode == "memory_budget":
            return f"{ac.mode} {ac.memory_budget:g}"
        return f"{ac.mode} {ac.selective_ac_option}" if ac.mode == "selective" else ac.mode

    @property
    def schedule(self) -> str | None:
        """Name or CSV file of the pipeline's schedule; None without a pipeline."""
        if (pipeline := self.workload.pipeline) is None:
            return None
        return pipeline.csv_file or self.config.parallelism.pipeline_parallel_schedule

    @property
    def stages_per_rank(self) -> int:
        return len(self.workload.stages) // self.workload.pp

    def noting(self, notes: Iterable[str]) -> "Plan":
        """This plan with more notes."""
        return replace(self, notes=(*self.notes, *notes))


def ends(figure: float, band: float) -> tuple[float, float]:
    """The range of a figure with a relative error."""
    return figure * (1 - band), figure * (1 + band)


def chance_to_fit(gib: float, w: Workload, hardware: Hardware) -> float:
    """Probability that a planned peak fits, by a normal distribution of its error."""
    deviation = memory_band(w) / NormalDist().inv_cdf(0.95)
    return NormalDist(gib, deviation * gib).cdf(hardware.usable_gib)


def derived_workload(
    config: Config, spec: ModelSpec, world: int, make: Callable[..., Workload] = Workload
) -> Workload:
    """The workload of a configuration that may leave values to be derived.

    Raises:
        ConfigError: the trainer would refuse it.
    """
    config, _ = derive(config, world)
    validate(config, world)
    args = spec.args(
        config.model.flavor, config.model.overrides, max_seq_len=config.training.seq_len
    )
    check(config, split_facts(spec, args))
    stages = pipeline_stages(
        config, spec.module_flops(args, config.training.seq_len), spec.tied_modules(args)
    )
    return make(config, args, stages)


def predict(workload: Workload, spec: ModelSpec, hardware: Hardware) -> Plan:
    """Time and memory by the closed forms.

    Raises:
        ConfigError: the hardware doesn't state a rate that the workload needs.
    """
    hardware.check_ranks(workload.world)
    memory = tuple(memory_of(workload, rank) for rank in range(workload.pp))
    notes = []
    if workload.experts:
        notes.append(
            "all experts are assumed to get equally many tokens; uneven loads take more "
            "time and memory"
        )
    time = step_time(workload, hardware)
    if time.late_host > LATE_HOST_NOTE:
        share = show_percent(100 * time.late_host)
        cure = "use a larger batch" if workload.compiled else "compile, or use a larger batch"
        notes.append(
            f"bound by the host: for {share} of the step the device waits for launches; {cure}"
        )
    if conditions := unmeasured(workload, hardware):
        notes.append(f"no published run had {listed(conditions)}: the ranges may be too narrow")
    return Plan(workload, spec, hardware, time, memory=memory, notes=tuple(notes))


def replan(plan: Plan, config: Config) -> Plan | None:
    """The plan of another configuration, derived already, on the same hardware; None if the trainer
    would refuse it.
    """
    try:
        check(config, Facts(device=plan.hardware.accelerator))
        return predict(
            derived_workload(config, plan.spec, ranks_of(config)), plan.spec, plan.hardware
        )
    except ConfigError:
        return None


# ---- how far off a plan may be

SPEED_DEVIATIONS = {
    "every run": 0.054,
    "unmeasured hardware": 0.35,
    "scaled hardware": 0.080,
    "under 2B": 0.080,
    "tp, eager": 0.155,
    "cp": 0.119,
    "pp": 0.060,
    "8 bits": 0.051,
    "experts": 0.139,
}
"""Relative standard deviation of throughput that a feature adds. Of unmeasured hardware, how far
A100, Blackwell and AMD were off (8, 10 and 60 %) before a constant was fitted to any of them.
"""
LATE_HOST_NOTE = 0.05
"""Share of a step that the device waits for launches from which a note reports it."""
WIDTH = 1.70
"""Deviations of a band on either side."""
MEMORY_BAND = 0.06
MEMORY_BAND_PIPELINE = 0.12
"""Relative error of the peak memory, without and with a pipeline."""


def features(w: Workload, hw: Hardware) -> list[str]:
    """The keys of `SPEED_DEVIATIONS` that apply to a workload."""
    conditions = {
        "every run": True,
        "unmeasured hardware": not hw.measured,
        "scaled hardware": not hw.fitted,
        "under 2B": w.total_params < 2e9,
        "tp, eager": w.tp > 1 and not w.compiled,
        "cp": w.cp > 1,
        "pp": w.pp > 1,
        "8 bits": w.float8 or w.mx,
        "experts": w.experts > 0,
    }
    return [name for name, applies in conditions.items() if applies]


def unmeasured(w: Workload, hw: Hardware) -> list[str]:
    """In what a plan is unlike all published runs that plans are held against."""
    conditions = {
        hw.description: not hw.measured,
        f"experts in this software on {hw.name}": w.experts > 0
        and hw.measured
        and not hw.measured_experts,
        "a model of less than 124M parameters": w.total_params < 0.12e9,
        "less than 4,096 tokens of a batch per GPU": w.tokens < 4096,
    }
    return [name for name, applies in conditions.items() if applies]


def speed_band(w: Workload, hw: Hardware, time: StepTime | None = None) -> float:
    """Relative error of throughput within which 90 % of such plans are.

    Args:
        time: of the plan; None: as if the host were never late.
    """
    deviations = [SPEED_DEVIATIONS[name] for name in features(w, hw)]
    return WIDTH * math.hypot(*deviations, time.host_doubt if time else 0.0)


def memory_band(w: Workload) -> float:
    """Relative error of the peak memory within which 90 % of such plans are."""
    return MEMORY_BAND_PIPELINE if w.pp > 1 else MEMORY_BAND
