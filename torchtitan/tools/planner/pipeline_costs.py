"""The cost of a pipeline's schedule in closed form: the wait of its ranks, and their activations.

p ranks with v stages each run m microbatches. A schedule from a file is executed instead. Tests
hold the formulas to the orders of computations that the trainer runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean

from torchtitan.config.pipeline_schedules import SCHEDULES
from torchtitan.parallel.pipeline.schedules import Entry, execute, orders_of
from torchtitan.parallel.pipeline.split import PipelinePlan


@dataclass(frozen=True)
class InFlight:
    """The activations that a rank keeps at a moment that can need the most memory."""

    microbatches: dict[int, int]
    """Microbatches by stage that wait for their backward, or for its end."""
    transfers: int
    """Hidden states and gradients that are received ahead, or being sent."""
    postponed: dict[int, int] = field(default_factory=dict)
    """Microbatches by stage that wait for their weights' backward only."""


def in_flight(pipeline: PipelinePlan, microbatches: int, rank: int) -> list[InFlight]:
    """The activations that a pipeline rank keeps, at one moment or, if the backward is split, two.

    1F1B keeps a microbatch for each rank from here on; interleaving runs ahead by the rounds of all
    stages but the last (Narayanan et al., arXiv:2104.04473, section 2.2). The V-shaped schedules
    keep 2 p stages' worth on every rank (Qi et al., arXiv:2405.15362).
    """
    p = max(pipeline.ranks) + 1
    m = microbatches
    stages = pipeline.stages_of(rank)
    v = len(stages)
    neighbours = 2 * any(stages), any(stage < len(pipeline.ranks) - 1 for stage in stages)
    transfers = sum(neighbours)
    postponed: dict[int, int] = {}
    if pipeline.csv_file:
        return [_in_flight_of_file(pipeline, rank, transfers)]
    schedule = SCHEDULES[pipeline.schedule or "1F1B"]
    if schedule.torch_class == "ScheduleLoopedBFS":
        counts = [m] * v
        transfers = 1
    elif pipeline.schedule == "1F1B":
        counts = [min(m, p - rank)]
    elif pipeline.schedule == "InterleavedZeroBubble":
        counts = [min(m, p)] * v
        postponed[stages[-1]] = min(m, rank + 1)
    elif schedule.splits_backward:
        less = pipeline.schedule == "ZBVZeroBubble"
        counts = [min(m, 2 * p - rank - less), min(m, rank + 1)]
        postponed[stages[-1]] = 1
    else:
        per_round = m // max(1, m // p)
        ahead = min(v * m, (v - 1) * per_round + 2 * (p - rank) - 1)
        rounds, remainder = divmod(ahead, v * per_round)
        counts = [
            rounds * per_round + min(max(remainder - chunk * per_round, 0), per_round)
            for chunk in range(v)
        ]
    moments = [InFlight(dict(zip(stages, counts, strict=True)), transfers, postponed)]
    if pipeline.schedule == "ZBVZeroBubble" and rank:  # the batch's end: only weights wait
        first, second = stages
        waiting = {first: min(m, rank + 1), second: min(m, rank)}
        unfinished = {first: min(m, p), second: min(m, rank)}
        moments.append(InFlight(unfinished, transfers, waiting))
    return moments


def _in_flight_of_file(pipeline: PipelinePlan, rank: int, transfers: int) -> InFlight:
    """The moment of a file's order with the most microbatches, then the most of them postponed."""
    unfinished = dict.fromkeys(pipeline.stages_of(rank), 0)
    postponed = dict.fromkeys(unfinished, 0)
    moments = []
    for (action,) in _orders(pipeline.csv_file)[rank]:
        unfinished[action.stage] += action.kind == "F"
        moments.append(InFlight(dict(unfinished), transfers, dict(postponed)))
        if action.stage:
            postponed[action.stage] += (action.kind == "I") - (action.kind == "W")
        unfinished[action.stage] -= action.kind in "BW"
    return max(moments, key=lambda m: (sum(m.microbatches.values()), sum(m.postponed.values())))


@dataclass(frozen=True)
class BatchTime:
    """Seconds of one batch."""

    length: float
    busy: tuple[float, ...]
    """Seconds that each rank computes."""

    @property
    def bubble(self) -> float:
        """Seconds that the average rank waits."""
        return self.length - fmean(self.busy)


def batch_time(
    pipeline: PipelinePlan,
    microbatches: int,
    duration: Callable[[int, str], float],
    transfer: float,
) -> BatchTime:
    """Seconds of one batch.

    Beside its own work the slowest rank waits for one microbatch to pass the others: their forward
    and backward, a stage's worth of it if stages are interleaved. Where the backward is split, work
    on weights fills the wait (Qi et al., arXiv:2401.10241, table 2).

    Args:
        duration: seconds of a computation, by stage and kind (`F`, `B`, `I`, `W`).
        transfer: seconds to send the result of a computation to another rank.
    """
    if pipeline.csv_file:
        return execution_time(_orders(pipeline.csv_file), duration, transfer)
    p = max(pipeline.ranks) + 1
    m = microbatches
    count = len(pipeline.ranks)
    stage_seconds = [duration(stage, "F") + duration(stage, "B") for stage in range(count)]
    share = _split_share(pipeline.schedule, p, m)
    if share:
        for stage in range(1, count):  # no stage waits for the first one's inputs: it isn't split
            split_seconds = duration(stage, "I") + duration(stage, "W")
            stage_seconds[stage] += share * (split_seconds - duration(stage, "B"))
    busy = [0.0] * p
    for stage, rank in enumerate(pipeline.ranks):
        busy[rank] += m * stage_seconds[stage]
    hops = 2.0 * (count - 1)
    if SCHEDULES[pipeline.schedule or "1F1B"].splits_backward:
        waits = [_wait_of_split(pipeline.schedule, duration, stage) for stage in range(1, count)]
        wait = (p - 1) * fmean(waits)
    else:
        slowest = max(range(p), key=busy.__getitem__)
        others = [rank != slowest for rank in pipeline.ranks]
        wait = sum(duration(stage, "F") * others[stage] for stage in range(p))
        wait += sum(duration(stage, "B") * others[stage] for stage in range(count - p, count))
        if pipeline.schedule == "1F1B":
            # A transfer arrives just as it is needed, so it delays ranks that are equally busy.
            slack = max(busy) - fmean(busy)
            wait += max(0.0, 2 * transfer * (p - 1) / p * m - slack)
    return BatchTime(max(busy) + wait + hops * transfer, tuple(busy))


def _split_share(schedule: str | None, ranks: int, microbatches: int) -> float:
    """Share of the backwards that a schedule splits. DualPipeV does so at the batch's ends only."""
    if schedule == "DualPipeV":
        return min(1.0, (3 * ranks - 1) / (4 * microbatches))
    return float(SCHEDULES[schedule or "1F1B"].splits_backward)


def _wait_of_split(
    schedule: str | None, duration: Callable[[int, str], float], stage: int
) -> float:
    """Seconds that a stage adds to the wait of a schedule that splits the backward. ZBVZeroBubble
    would wait for nothing, but the whole backward of the first stage delays its last rounds.
    """
    if schedule == "ZBVZeroBubble":
        return duration(stage, "I")
    return max(0.0, duration(stage, "F") + duration(stage, "I") - duration(stage, "W"))


@cache
def _orders(csv_file: str) -> list[list[Entry]]:
    """Each rank's computations, one by one: those of a pair run one after the other."""
    return [[(action,) for entry in order for action in entry] for order in orders_of(csv_file)]


def execution_time(
    orders: Sequence[Sequence[Entry]], duration: Callable[[int, str], float], transfer: float
) -> BatchTime:
    """Seconds of a batch in which each rank starts every computation as soon as it can.

    No stage waits for the gradients of the first one's inputs: of a split backward, torch runs all
    in `W` there.

    Args:
        orders: of each rank.
        duration: as for `batch_time`.
        transfer: as for `batch_time`.
    """
    first_stage = {"F": duration(0, "F"), "B": duration(0, "B"), "I": 0.0, "W": duration(0, "B")}
    clock = [0.0] * len(orders)
    busy = [0.0] * len(orders)
    ends: list[float] = []
    for rank, action, source, remote in execute(orders):
        inputs_ready = ends[source] + transfer * remote if source >= 0 else 0.0
        length = duration(action.stage, action.kind) if action.stage else first_stage[action.kind]
        clock[rank] = max(clock[rank], inputs_ready) + length
        busy[rank] += length
        ends.append(clock[rank])
    return BatchTime(max(clock), tuple(busy))
