"""Chooses layouts to propose: unbeaten in speed, memory and simplicity, and distinct.

Speeds are compared by the low ends of their bands, so a layout with a wider band must be faster.
"""

import dataclasses
from dataclasses import dataclass, field
from operator import attrgetter

from torchtitan.config.derive import layout_degrees
from torchtitan.config.sections.schema import Config
from torchtitan.tools.planner.predict import Plan
from torchtitan.tools.planner.workload import Workload
from torchtitan.utils.wording import show_rate

ALIKE = 0.98
"""Relative speed from which two layouts are equally fast: the model can't resolve more."""
_LESS_MEMORY = 0.9
"""Relative memory below which a layout is worth showing for it, if it saves a GiB."""
_MAX_PROPOSALS = 6
_MAX_OTHER_KINDS = 2
"""Layouts shown beyond the frontier, since they stress another part of the hardware."""
_OTHER_KIND_SPEED = 0.9
"""Relative speed from which such a layout is shown."""
WORTHWHILE = 0.6
"""Relative speed below which a layout isn't shown, however little memory it needs."""


@dataclass(frozen=True)
class Proposal:
    """A plan and why it is shown."""

    plan: Plan
    why: str
    baseline: bool = False
    """The layout that the configuration states."""


@dataclass(frozen=True)
class Candidate:
    """A workload that is likely to fit."""

    speed: float
    """Tokens/s per GPU."""
    band: float
    """Relative error of the speed."""
    gib: float
    axes: tuple[str, ...]
    """Axes with more than one rank."""
    workload: Workload

    @property
    def low(self) -> float:
        """The low end of the speed's band."""
        return self.speed * (1 - self.band)

    @property
    def complexity(self) -> int:
        """Axes with more than one rank, a pipeline twice."""
        return len(self.axes) + ("pp" in self.axes)

    def saves(self, gib: float) -> bool:
        """Whether this candidate needs so much less memory that it is worth showing."""
        return self.gib < min(_LESS_MEMORY * gib, gib - 1)

    def beats(self, other: "Candidate") -> bool:
        """Whether this candidate is at least as fast, as small and as simple as the other."""
        return (
            self.low >= other.low and self.gib <= other.gib and self.complexity <= other.complexity
        )


def axes_of(config: Config) -> tuple[str, ...]:
    """Axes with more than one rank."""
    degrees = layout_degrees(config.parallelism)
    return tuple(axis for axis, degree in degrees.items() if degree > 1)


@dataclass
class Frontier:
    """The candidates that no other beats, and the fastest with the same axes."""

    worthwhile: float = WORTHWHILE
    """Relative speed below which a candidate isn't kept."""
    all: list[Candidate] = field(default_factory=list)
    leaders: dict[tuple[str, ...], Candidate] = field(default_factory=dict)
    """The fastest by their axes."""
    low: float = 0.0
    """The highest low end of a band."""

    def wants(self, candidate: Candidate) -> bool:
        """Whether a candidate, or any that it beats, may be worth showing."""
        if self.is_slow(candidate):
            return False
        return self._leads(candidate) or not any(other.beats(candidate) for other in self.all)

    def is_slow(self, candidate: Candidate) -> bool:
        """Whether a candidate is too slow to be worth showing, however little memory it needs."""
        return candidate.low < self.worthwhile * self.low

    def add(self, candidate: Candidate) -> None:
        """Keep a candidate if it is wanted."""
        if not self.wants(candidate):
            return
        self.low = max(self.low, candidate.low)
        if self._leads(candidate):
            self.leaders[candidate.axes] = candidate
        if not any(other.beats(candidate) for other in self.all):
            self.all = [other for other in self.all if not candidate.beats(other)] + [candidate]

    def _leads(self, candidate: Candidate) -> bool:
        leader = self.leaders.get(candidate.axes)
        return leader is None or candidate.speed > leader.speed


def propose(frontier: Frontier) -> list[tuple[Candidate, str]]:
    """Candidates to show, each with a reason. First the smallest of the fastest, or a simpler one
    that is about as small; then ones that are smaller or simpler than all faster ones.
    """
    picks: list[tuple[Candidate, str]] = []
    candidates = [c for c in frontier.all if not frontier.is_slow(c)]
    while candidates and len(picks) < _MAX_PROPOSALS:
        fastest = max(candidates, key=lambda c: c.low)
        as_fast = [c for c in candidates if c.low >= ALIKE * fastest.low]
        smallest = min(as_fast, key=lambda c: c.gib)
        as_small = [c for c in as_fast if not smallest.saves(c.gib)]
        pick = min(as_small, key=lambda c: (c.complexity, -c.low))
        picks.append((pick, _why(pick, picks[0][0]) if picks else _why_first(pick, fastest)))
        gib = min(c.gib for c, _ in picks)
        complexity = min(c.complexity for c, _ in picks)
        candidates = [c for c in candidates if c.saves(gib) or c.complexity < complexity]
    axes = {c.axes for c, _ in picks}
    others = sorted(frontier.leaders.values(), key=lambda c: -c.speed)
    others = [c for c in others if c.speed >= _OTHER_KIND_SPEED * others[0].speed]
    for other in [c for c in others if c.axes not in axes][:_MAX_OTHER_KINDS]:
        picks.append((other, f"the fastest with {' x '.join(other.axes) or 'one rank'}"))
    return picks


def _why_first(pick: Candidate, fastest: Candidate) -> str:
    if pick is fastest:
        return "the fastest"
    merit = "smallest" if pick.saves(fastest.gib) else "simplest"
    return (
        f"the {merit} within {1 - ALIKE:.0%} of the fastest (at least "
        f"{show_rate(fastest.low)} tokens/s)"
    )


def _why(pick: Candidate, first: Candidate) -> str:
    merits = [f"{first.gib - pick.gib:.0f} GiB less"] * pick.saves(first.gib)
    merits += ["simpler"] * (pick.complexity < first.complexity)
    slowdown = 1 - pick.low / first.low
    price = f"for {slowdown:.0%} of the speed" if slowdown >= 0.01 else "at the same speed"
    return f"{' and '.join(merits)} {price}"


def with_baseline(proposals: list[Proposal], baseline: Plan) -> list[Proposal]:
    """The proposals with the configuration's layout among them: marked, or as the last."""
    why = "as configured"
    for i, proposal in enumerate(proposals):
        if _is_same(proposal.plan, baseline):
            marked = dataclasses.replace(proposal, why=f"{proposal.why}; {why}", baseline=True)
            return [*proposals[:i], marked, *proposals[i + 1 :]]
    return [*proposals, Proposal(baseline, why, baseline=True)]


def _is_same(plan: Plan, other: Plan) -> bool:
    """Whether two configurations differ in nothing that matters to a plan."""
    figures = attrgetter("layout", "schedule", "checkpointing", "tokens_per_second", "peak_gib")
    return bool(figures(plan) == figures(other))
