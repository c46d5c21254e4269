"""The layouts of a model that are worth a choice: fast ones, small ones and simple ones.

Every legal layout of the ranks is compared by the closed forms: all degrees, microbatch sizes,
schedules and their depths, and checkpointing modes. The model, the row length, the global batch,
types, offloads, compilation and Float8 stay as configured.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.config.derive import data_parallel_degree, divisors
from torchtitan.config.rules import validate
from torchtitan.config.sections.parallelism import ActivationCheckpoint
from torchtitan.config.sections.schema import Config
from torchtitan.models import ModelSpec
from torchtitan.parallel.pipeline.split import PipelinePlan, pipeline_stages
from torchtitan.tools.planner.costs import passes, step_time
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.layouts import PIPELINE_KEYS, layouts, orders
from torchtitan.tools.planner.memory import GIB, Memory, memory_of, state_bytes
from torchtitan.tools.planner.predict import Plan, predict, speed_band
from torchtitan.tools.planner.proposals import (
    Candidate,
    Frontier,
    Proposal,
    complexity_of,
    propose,
    with_baseline,
)
from torchtitan.tools.planner.workload import Workload
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
"""Values of `activation_checkpoint` to try; the first keeps the least."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    best: list[Proposal]
    """The first is the simplest of those that are about as fast as the fastest."""
    points: list[tuple[float, float]]
    """(GiB, tokens/s per GPU) of plans that fit; those that a chart couldn't resolve are one
    point.
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
    """Price every legal layout of `world` ranks.

    Args:
        config: derived. Its degrees, batch split, schedule and checkpointing mode don't matter.
        baseline: the plan of the layout that the configuration states, to show beside the others.
        only_best: propose nothing but the first, which is several times as fast.
    """
    state = _Search(config, spec, args, world, hardware=hardware)
    state.frontier.only_best = only_best
    state.run()
    best = []
    for candidate, why in propose(state.frontier)[: 1 if only_best else None]:
        validate(candidate.workload.config, world)
        best.append(Proposal(predict(candidate.workload, spec, hardware), why))
    if best and baseline is not None:
        best = with_baseline(best, baseline)
    return SearchResult(
        best,
        sorted(state.points.values()),
        state.seen,
        smallest_gib=state.smallest / GIB,
        refused=[reason for reason, _ in state.refused.most_common(_REASONS)],
    )


class _Search:
    """One search.

    Layouts are priced from the one with the fastest blocks on, and only as far as needed to decide
    whether a configuration is worth showing: by a bound on its speed, by its memory, by its step.
    Its legality is checked last.
    """

    def __init__(self, config: Config, spec: ModelSpec, args: Any, world: int, hardware: Hardware):
        self.config = config
        self.spec = spec
        self.args = args
        self.world = world
        self.hardware = hardware
        self.frontier = Frontier()
        self.points: dict[tuple[int, int], tuple[float, float]] = {}
        """By GiB and percent of speed."""
        self.refused: Counter[str] = Counter()
        self.seen = 0
        self.smallest = math.inf
        self._modes = [config.activation_checkpoint.model_copy(update=mode) for mode in _MODES]
        self._flops = spec.module_flops(args, config.training.seq_len)
        self._tied = spec.tied_modules(args)
        self._layers = sum(name.startswith("layers.") for name in self._flops)
        self._block_donors: dict[Hashable, Workload] = {}
        self._bounds: dict[Hashable, float] = {}
        self._pipelines: dict[Hashable, PipelinePlan | None] = {}

    def run(self) -> None:
        legal_layouts = layouts(self.config, self.spec, self.args, self.world)
        for layout in sorted(legal_layouts, key=self._fastest, reverse=True):
            microbatches = self._microbatches(layout)
            for order in orders(layout.parallelism, self._layers):
                self._price_schedule(layout, order, microbatches)

    def _rows(self, layout: Config) -> int:
        """Rows of a data-parallel rank in a step; 0 if the batch can't be divided."""
        total = layout.training.global_batch_size
        rows, remainder = divmod(total, data_parallel_degree(layout))
        if not remainder:
            return rows
        self.refused[
            f"training.global_batch_size: {total} rows can't be divided among the "
            f"data-parallel ranks of any legal layout of {self.world} ranks; set it to a "
            f"multiple of {self.world}, or of a divisor of it (the degrees of the other axes "
            f"make up the rest): {_near(total, self.world)}"
        ] += 1
        return 0

    def _fastest(self, layout: Config) -> float:
        """A bound on the speed of a layout, from its largest microbatch."""
        size = self._rows(layout) // layout.parallelism.pipeline_parallel_degree
        return self._bound(layout, size, self._modes[-1]) if size else 0.0

    def _microbatches(self, layout: Config) -> dict[int, list[ActivationCheckpoint]]:
        """Microbatch sizes of a layout, ascending, each with the modes of checkpointing that may be
        worth showing: by the speed of their blocks, and the memory of the average rank's state.
        """
        rows = self._rows(layout)
        pp = layout.parallelism.pipeline_parallel_degree
        if not rows:
            return {}
        leanest = self._workload(layout, None)
        on_device = not layout.training.enable_cpu_offload
        state = on_device * sum(state_bytes(leanest, leanest.stages).values()) / pp / GIB
        if self.frontier.all and state > self.hardware.usable_gib:
            return {}
        low_end = 1 - speed_band(leanest, self.hardware)
        complexity = complexity_of(layout)
        microbatches: dict[int, list[ActivationCheckpoint]] = {}
        for size in divisors(rows):
            if rows // size < pp > 1:  # too few microbatches
                break
            microbatches[size] = []
            for mode in self._modes:
                bound = self._bound(layout, size, mode)
                best_case = Candidate(bound, bound * low_end, state, complexity, workload=leanest)
                if self.frontier.wants(best_case):
                    microbatches[size].append(mode)
        return microbatches

    def _bound(self, layout: Config, size: int, mode: ActivationCheckpoint) -> float:
        """Tokens/s per GPU of a layout that only computes its blocks."""
        p = layout.parallelism
        key = (
            *(p.tensor_parallel_degree, p.context_parallel_degree, p.expert_parallel_degree),
            *(size, mode.mode, mode.selective_ac_option, mode.memory_budget),
        )
        if key not in self._bounds:
            w = self._workload(self._sized(layout, size, {}, mode), None)
            seconds = passes(w, self.hardware).seconds(w)
            self._bounds[key] = w.tokens_per_step / seconds / self.world
        return self._bounds[key]

    def _price_schedule(
        self,
        layout: Config,
        order: Mapping[str, Any],
        microbatches: Mapping[int, Sequence[ActivationCheckpoint]],
    ) -> None:
        """Price a layout with a schedule and depth.

        Args:
            microbatches: from `_microbatches`.
        """
        pipelined = layout.parallelism.pipeline_parallel_degree > 1
        leanest = self._modes[0]
        too_large: list[ActivationCheckpoint] = []
        for size, modes in microbatches.items():
            self.seen += len(self._modes)
            for mode in modes:
                if mode in too_large:
                    continue
                if self._price(self._sized(layout, size, order, mode)):
                    continue
                if pipelined:  # nor do larger microbatches fit
                    too_large.append(mode)
                if mode is leanest:  # nor do modes that keep more
                    too_large += modes if pipelined else ()
                    break

    def _sized(
        self, layout: Config, size: int, order: Mapping[str, Any], mode: ActivationCheckpoint
    ) -> Config:
        """A layout with a microbatch size, a schedule and a mode. A pipeline runs all rows of a
        rank as one batch.
        """
        p = layout.parallelism
        local = size
        if order:
            p = p.model_copy(update={**order, "pipeline_parallel_microbatch_size": size})
            local = self._rows(layout)
        t = layout.training.model_copy(update={"local_batch_size": local})
        sections = {"parallelism": p, "training": t, "activation_checkpoint": mode}
        return layout.model_copy(update=sections)

    def _price(self, config: Config) -> bool:
        """Price a configuration, and keep it if it is likely to fit; False if it doesn't."""
        pipeline = self._pipeline(config)
        if pipeline is None and config.parallelism.pipeline_parallel_degree > 1:
            return False
        w = self._workload(config, pipeline)
        memory = self._memory(w)
        if memory is None:
            return False
        low_end = 1 - speed_band(w, self.hardware)
        size = pipeline.microbatch_size if pipeline else config.training.local_batch_size
        bound = self._bound(config, size, config.activation_checkpoint)
        gib = max(rank_memory.reserved for rank_memory in memory) / GIB
        complexity = complexity_of(config)
        if not self.frontier.wants(Candidate(bound, bound * low_end, gib, complexity, workload=w)):
            return True
        time = step_time(w, self.hardware)
        plan = Plan(w, self.spec, self.hardware, time, memory=memory)
        speed = time.tokens_per_second
        low = speed * (1 - plan.speed_band)
        candidate = Candidate(speed, low, gib, complexity, workload=w)
        proposable = plan.chance_to_fit >= LIKELY and self.frontier.wants(candidate)
        cell = round(gib), round(100 * math.log(speed))
        adds_point = proposable or (cell not in self.points and not self.frontier.only_best)
        if adds_point and self._is_legal(config):
            self.points.setdefault(cell, (round(gib, 1), float(f"{speed:.3g}")))
            if proposable:
                self.frontier.add(candidate)
        return True

    def _memory(self, w: Workload) -> tuple[Memory, ...] | None:
        """Memory of the pipeline ranks that differ; None as soon as one doesn't fit."""
        memories = []
        limit = self.hardware.usable_gib * GIB
        for rank in w.unlike_ranks:
            memories.append(memory_of(w, rank))
            if memories[-1].reserved > limit:
                break
        most = max(memory.reserved for memory in memories)
        if most < self.smallest and self._is_legal(w.config):
            self.smallest = most
        return tuple(memories) if most <= limit else None

    def _workload(self, config: Config, pipeline: PipelinePlan | None) -> Workload:
        p = config.parallelism
        ac = config.activation_checkpoint
        key = (
            *(p.tensor_parallel_degree, p.expert_parallel_degree),
            *(ac.mode, ac.selective_ac_option, ac.memory_budget),
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
        try:
            validate(config, self.world)
            pipeline_stages(config, self._flops, self._tied)
        except ConfigError as error:
            self.refused[error.problems[0]] += 1
            return False
        return True


def _near(rows: int, unit: int) -> str:
    """Multiples of `unit` next to `rows`."""
    below = rows // unit * unit
    return " or ".join(str(n) for n in (below, below + unit) if n)
