"""The layouts of a model that are worth a choice: fast ones, small ones and simple ones.

Every legal layout of the ranks is priced by the closed forms: all degrees, microbatch sizes,
schedules and checkpointing modes. The model, the row length, the global batch and what computes
(types, compilation, Float8) stay as configured, unless an axis of `axes.py` is asked for.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.config.derive import divisors, replace
from torchtitan.config.rules import validate
from torchtitan.config.sections.schema import Config
from torchtitan.models import ModelSpec
from torchtitan.parallel.pipeline.split import pipeline_stages
from torchtitan.tools.planner.axes import (
    Settings,
    applied,
    batches,
    checkpointing_modes,
    settings_of,
)
from torchtitan.tools.planner.costs import step_time
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.layouts import layouts
from torchtitan.tools.planner.memory import GIB, Memory, memory_of
from torchtitan.tools.planner.predict import Plan, predict
from torchtitan.tools.planner.proposals import (
    Candidate,
    Frontier,
    Proposal,
    complexity,
    propose,
    with_baseline,
)
from torchtitan.tools.planner.workload import Workload
from torchtitan.utils.errors import ConfigError

LIKELY = 0.9
"""Chance to fit that a proposal must have."""
_WORTHWHILE = 0.6
"""Relative speed below which a layout isn't proposed, however little memory it takes."""
SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
"""Schedules to try."""
_REASONS = 4
"""Reasons shown if no layout is legal."""
_MAX_EXPANDED = 200
"""Layouts and batches for which all combinations of the requested axes are priced: those with the
highest bounds.
"""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    best: list[Proposal]
    """The first is the simplest of those that are about as fast as the fastest."""
    points: list[tuple[float, float]]
    """(GiB, tokens/s per GPU) of plans that fit; those that a chart couldn't tell apart are one
    point.
    """
    seen: int
    """Legal configurations."""
    limit_gib: float
    """Memory that a plan may take."""
    smallest_gib: float
    """Memory that the leanest takes."""
    refused: list[str]
    """Why most other layouts are illegal, the most frequent reason first."""


def search(
    config: Config,
    spec: ModelSpec,
    args: Any,
    world: int,
    hardware: Hardware,
    *,
    axes: tuple[str, ...] = (),
    baseline: Plan | None = None,
) -> SearchResult:
    """Price every legal layout of `world` ranks.

    Args:
        config: derived. Its degrees, batch split, schedule and checkpointing mode don't matter.
        axes: names from `axes.AXES` to vary, too.
        baseline: the plan of the layout that the configuration states, to show beside the others.
    """
    state = _Search(config, spec, args, world, hardware=hardware, axes=axes)
    state.run()
    best = []
    for candidate, why in propose(state.frontier, _WORTHWHILE):
        validate(candidate.workload.config, world)
        best.append(Proposal(predict(candidate.workload, spec, hardware), why))
    if best and baseline is not None:
        best = with_baseline(best, baseline)
    return SearchResult(
        best,
        sorted(state.points),
        state.seen,
        hardware.usable_gib,
        smallest_gib=state.smallest / GIB,
        refused=[reason for reason, _ in state.refused.most_common(_REASONS)],
    )


class _Search:
    """One search."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        args: Any,
        world: int,
        hardware: Hardware,
        axes: tuple[str, ...],
    ):
        self.config = config
        self.spec = spec
        self.args = args
        self.world = world
        self.hardware = hardware
        self.axes = axes
        self.frontier = Frontier()
        self.points: set[tuple[float, float]] = set()
        self.refused: Counter[str] = Counter()
        self.seen = 0
        self.smallest = math.inf
        self._modes = checkpointing_modes(axes)
        self._settings = settings_of(config, axes)
        self._flops = spec.module_flops(args, config.training.seq_len)
        self._tied = spec.tied_modules(args)
        self._expandable: list[tuple[float, Config]] = []
        """With axes: a layout and batch, and the speed that it has with the fastest settings."""

    def run(self) -> None:
        for rows in batches(self.config, self.axes):
            resized = replace(self.config, "training.global_batch_size", rows)
            for layout in layouts(resized, self.spec, self.args, self.world):
                for batch in self._batches(layout):
                    self._price_schedules(batch)
        for bound, config in sorted(self._expandable, key=lambda entry: -entry[0])[:_MAX_EXPANDED]:
            if bound < _WORTHWHILE * self.frontier.speed:
                break
            for settings in self._settings[1:]:
                self._price(applied(config, settings))

    def _batches(self, layout: Config) -> Iterator[Config]:
        """Ways to cut the global batch: rows at a time, or the size of microbatches."""
        p = layout.parallelism
        total = layout.training.global_batch_size
        ranks = p.data_parallel_replicate_degree * p.data_parallel_shard_degree
        rows, remainder = divmod(total, ranks)
        if remainder:
            self.refused[
                f"training.global_batch_size: {total} rows can't be divided among the "
                f"data-parallel ranks of any legal layout of {self.world} ranks; set it to a "
                f"multiple of {self.world}, or of a divisor of it (the degrees of the other axes "
                f"make up the rest): {_near(total, self.world)}"
            ] += 1
            return
        pp = p.pipeline_parallel_degree
        for size in divisors(rows):
            if pp == 1:
                yield replace(layout, "training.local_batch_size", size)
            elif rows // size >= pp:  # one batch of as many microbatches as there are
                sized = replace(layout, "parallelism.pipeline_parallel_microbatch_size", size)
                yield replace(sized, "training.local_batch_size", rows)

    def _price_schedules(self, batch: Config) -> None:
        """All schedules and checkpointing modes of a layout and batch."""
        pipelined = batch.parallelism.pipeline_parallel_degree > 1
        key = "parallelism.pipeline_parallel_schedule"
        for schedule in SCHEDULES if pipelined else (None,):
            ordered = replace(batch, key, schedule) if schedule else batch
            for mode in self._modes:
                config = applied(_checkpointed(ordered, mode), self._settings[0])
                self._price(config, leanest=self._settings[-1])

    def _price(self, config: Config, leanest: Settings | None = None) -> None:
        """Price a configuration, and keep it if it is likely to fit.

        Args:
            leanest: settings by which a configuration that doesn't fit may do so; it is then kept
            for `_expandable`.
        """
        w = self._workload(config)
        if w is None:
            return
        self.seen += 1
        memory = self._memory(w)
        several = leanest is not None and len(self._settings) > 1
        if memory is None and not (several and self._fits_with(config, leanest or {})):
            return
        time = step_time(w, self.hardware)
        speed = time.tokens_per_second
        if several:
            self._expandable.append((speed, config))
        if memory is not None:
            plan = Plan(w, self.spec, self.hardware, time, memory=memory)
            self.points.add((round(plan.peak_gib, 1), float(f"{speed:.3g}")))
            if plan.chance_to_fit >= LIKELY:
                low = speed * (1 - plan.speed_band)
                burden = complexity(config, self.config)
                self.frontier.add(Candidate(speed, low, plan.peak_gib, burden, workload=w))

    def _fits_with(self, config: Config, settings: Settings) -> bool:
        w = self._workload(applied(config, settings))
        return w is not None and self._memory(w) is not None

    def _memory(self, w: Workload) -> tuple[Memory, ...] | None:
        """Memory of each pipeline rank; None as soon as one doesn't fit."""
        memories = []
        for rank in range(w.pp):
            memories.append(memory_of(w, rank))
            if memories[-1].reserved > self.hardware.usable_gib * GIB:
                self.smallest = min(self.smallest, memories[-1].reserved)
                return None
        self.smallest = min(self.smallest, max(memory.reserved for memory in memories))
        return tuple(memories)

    # ---- legality

    def _workload(self, config: Config) -> Workload | None:
        """The workload of a configuration; None if it is illegal."""
        try:
            validate(config, self.world)
            stages = pipeline_stages(config, self._flops, self._tied)
        except ConfigError as error:
            self.refused[error.problems[0]] += 1
            return None
        return Workload(config, self.args, stages)


def _checkpointed(config: Config, mode: Settings) -> Config:
    ac = config.activation_checkpoint.model_copy(update=mode)
    return config.model_copy(update={"activation_checkpoint": ac})


def _near(rows: int, unit: int) -> str:
    """Multiples of `unit` next to `rows`."""
    below = rows // unit * unit
    return " or ".join(str(n) for n in (below, below + unit) if n)
