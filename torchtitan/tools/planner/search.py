"""The layouts of a model that are worth a choice: fast ones, small ones and simple ones.

All degrees, microbatch sizes, schedules and their depths, and checkpointing modes are compared by
the closed forms. The model, the row length, the global batch, types, offloads, compilation and
Float8 stay as configured.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.config.derive import data_parallel_degree, divisors
from torchtitan.config.rules import problems, with_ranks
from torchtitan.config.rules.layout import multiples_near
from torchtitan.config.sections.parallelism import ActivationCheckpoint
from torchtitan.config.sections.schema import Config
from torchtitan.models import ModelSpec
from torchtitan.parallel.pipeline.split import PipelinePlan, pipeline_stages
from torchtitan.tools.planner.costs import passes, step_time
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.layouts import PIPELINE_KEYS, layouts, orders
from torchtitan.tools.planner.memory import GIB, memory_of
from torchtitan.tools.planner.predict import Plan, chance_to_fit, predict, speed_band
from torchtitan.tools.planner.proposals import (
    ALIKE,
    WORTHWHILE,
    Candidate,
    Frontier,
    Proposal,
    axes_of,
    propose,
    with_baseline,
)
from torchtitan.tools.planner.workload import Workload
from torchtitan.train.preflight import split_facts
from torchtitan.utils.errors import ConfigError

LIKELY = 0.9
"""Chance to fit that a proposal must have."""
_REASONS = 4
"""Reasons shown if no layout is legal."""
_MODES: tuple[dict[str, Any], ...] = (
    {"mode": "full"},
    {"mode": "selective", "selective_ac_option": "op"},
    {"mode": "none"},
)
"""Values of `activation_checkpoint` to try."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    best: list[Proposal]
    """The first is the smallest of those that are about as fast as the fastest."""
    points: list[tuple[float, float]]
    """(GiB, tokens/s per GPU) of plans that fit, rounded: those that a chart couldn't resolve are
    one point.
    """
    seen: int
    """Configurations that were compared."""
    smallest_gib: float
    """Memory of the leanest; infinite if none is legal."""
    refused: list[str]
    """Why most other layouts are illegal, the most frequent reason first."""


def search(
    config: Config,
    spec: ModelSpec,
    args: Any,
    world: int,
    hardware: Hardware,
    *,
    baseline: Plan | None = None,
    only_best: bool = False,
) -> SearchResult:
    """Compare the layouts of `world` ranks.

    Args:
        config: derived. Its degrees, batch split, schedule and checkpointing mode don't matter.
        baseline: the plan of the layout that the configuration states, to show beside the others.
        only_best: propose nothing but the first, which is several times as fast.
    """
    state = _Search(config, spec, args, world, hardware=hardware)
    state.frontier.worthwhile = ALIKE if only_best else WORTHWHILE
    for layout in layouts(config, spec, args, world):
        state.price_layout(layout)
    picks = propose(state.frontier)[: 1 if only_best else None]
    best = [Proposal(predict(pick.workload, spec, hardware), why) for pick, why in picks]
    if best and baseline is not None:
        best = with_baseline(best, baseline)
    return SearchResult(
        best,
        sorted(state.points),
        state.seen,
        smallest_gib=state.smallest,
        refused=[reason for reason, _ in state.refused.most_common(_REASONS)],
    )


class _Search:
    """One search.

    A configuration is priced only as far as needed to decide whether it is worth showing: by
    bounds of its layout, by its memory, by its step. Its legality is checked last.
    """

    def __init__(self, config: Config, spec: ModelSpec, args: Any, world: int, hardware: Hardware):
        self.args = args
        self.world = world
        self.hardware = hardware
        self.frontier = Frontier()
        self.points: set[tuple[float, float]] = set()
        self.refused: Counter[str] = Counter()
        self.seen = 0
        self.smallest = math.inf
        self._modes = [config.activation_checkpoint.model_copy(update=mode) for mode in _MODES]
        self._facts = split_facts(spec, args)
        self._flops = spec.module_flops(args, config.training.seq_len)
        self._tied = spec.tied_modules(args)
        self._layers = sum(name.startswith("layers.") for name in self._flops)
        self._block_donors: dict[Hashable, Workload] = {}
        self._speeds: dict[Hashable, float] = {}
        self._pipelines: dict[Hashable, PipelinePlan | None] = {}

    def price_layout(self, layout: Config) -> None:
        """Price the microbatch sizes, modes and schedules of a layout that may be worth showing."""
        total = layout.training.global_batch_size
        rows, remainder = divmod(total, data_parallel_degree(layout))
        if remainder:
            self.refused[
                f"training.global_batch_size: {total} rows can't be divided among the "
                f"data-parallel ranks of any legal layout of {self.world} ranks; set it to a "
                f"multiple of {self.world}, or of a divisor of it (the degrees of the other axes "
                f"make up the rest): {multiples_near(total, self.world)}"
            ] += 1
            return
        pp = layout.parallelism.pipeline_parallel_degree
        if rows < pp:  # too few microbatches
            return
        sizes = divisors(rows, rows // pp)
        schedules = orders(pp, self._layers)
        self.seen += len(self._modes) * len(sizes) * len(schedules)
        leanest = self._leanest(layout, rows, schedules[0])
        if leanest is None or leanest.gib > self.hardware.usable_gib:
            return
        for mode in self._modes:
            speeds: dict[int, float] = {}
            for size in reversed(sizes):
                speed = self._speed_of_blocks(layout, size, mode)
                best_case = replace(leanest, speed=speed)
                if self.frontier.is_slow(best_case):  # so are smaller microbatches
                    break
                if self.frontier.wants(best_case):
                    speeds[size] = speed
            for schedule in schedules:
                for size in sorted(speeds):
                    config = _sized(layout, rows, size, mode, schedule)
                    fits = self._price(config, speeds[size])
                    if pp > 1 and not fits:  # nor do larger microbatches
                        break

    def _leanest(self, layout: Config, rows: int, schedule: Mapping[str, Any]) -> Candidate | None:
        """The configuration of a layout that needs the least memory; None if none is legal."""
        sizes = {1} if schedule else {1, rows}  # one batch may need less than the sum of several
        configs = [_sized(layout, rows, size, self._modes[0], schedule) for size in sizes]
        candidates = filter(None, map(self._candidate, configs))
        leanest = min(candidates, key=lambda c: c.gib, default=None)
        if leanest and leanest.gib < self.smallest and self._is_legal(leanest.workload.config):
            self.smallest = leanest.gib
        return leanest

    def _speed_of_blocks(self, layout: Config, size: int, mode: ActivationCheckpoint) -> float:
        """Tokens/s per GPU of a layout that only computes its blocks: a bound on its speed."""
        p = layout.parallelism
        key = (
            *(p.tensor_parallel_degree, p.context_parallel_degree, p.expert_parallel_degree),
            *(size, mode.mode),
        )
        if key not in self._speeds:
            w = self._workload(_sized(layout, size, size, mode, order={}))
            seconds = passes(w, self.hardware).seconds(w)
            self._speeds[key] = w.tokens_per_step / seconds / self.world
        return self._speeds[key]

    def _price(self, config: Config, bound: float) -> bool:
        """Price a configuration, and keep it if it is worth showing; False if it doesn't fit.

        Args:
            bound: on its speed.
        """
        candidate = self._candidate(config, bound)
        if candidate is None:
            return False
        w = candidate.workload
        if chance_to_fit(candidate.gib, w, self.hardware) < LIKELY:
            return False
        if self.frontier.wants(candidate) and self._is_legal(config):
            time = step_time(w, self.hardware)
            speed = time.tokens_per_second
            self.points.add((round(candidate.gib), float(f"{speed:.2g}")))
            band = speed_band(w, self.hardware, time)
            self.frontier.add(replace(candidate, speed=speed, band=band))
        return True

    def _candidate(self, config: Config, speed: float = 0.0) -> Candidate | None:
        """A configuration with its memory; None if the model can't be split into its stages."""
        pipeline = self._pipeline(config)
        if pipeline is None and config.parallelism.pipeline_parallel_degree > 1:
            return None
        w = self._workload(config, pipeline)
        gib = max(memory_of(w, rank).reserved for rank in w.unlike_ranks) / GIB
        return Candidate(speed, speed_band(w, self.hardware), gib, axes_of(config), workload=w)

    def _workload(self, config: Config, pipeline: PipelinePlan | None = None) -> Workload:
        p = config.parallelism
        key = (
            *(p.tensor_parallel_degree, p.expert_parallel_degree),
            config.activation_checkpoint.mode,
        )
        w = Workload(config, self.args, pipeline, like=self._block_donors.get(key))
        self._block_donors.setdefault(key, w)
        return w

    # ---- legality

    def _pipeline(self, config: Config) -> PipelinePlan | None:
        """The pipeline of a configuration; None if there is none, or it can't be split."""
        p = config.parallelism
        keys = [getattr(p, key) for key in PIPELINE_KEYS]
        key = (p.pipeline_parallel_degree, config.training.local_batch_size, *keys)
        if key not in self._pipelines:
            try:
                self._pipelines[key] = pipeline_stages(config, self._flops, self._tied)
            except ConfigError as error:
                self.refused[error.problems[0]] += 1
                self._pipelines[key] = None
        return self._pipelines[key]

    def _is_legal(self, config: Config) -> bool:
        reasons = problems(config, with_ranks(self._facts, config, self.world))
        self.refused.update(reasons[:1])
        return not reasons


def _sized(
    layout: Config, rows: int, size: int, mode: ActivationCheckpoint, order: Mapping[str, Any]
) -> Config:
    """A layout with a microbatch size, a mode and a schedule.

    Args:
        rows: of a rank in a step. A pipeline runs all of them as one batch.
    """
    p = layout.parallelism
    if order:
        p = p.model_copy(update={**order, "pipeline_parallel_microbatch_size": size})
    t = layout.training.model_copy(update={"local_batch_size": rows if order else size})
    sections = {"parallelism": p, "training": t, "activation_checkpoint": mode}
    return layout.model_copy(update=sections)
