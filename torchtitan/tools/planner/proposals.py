"""Chooses layouts to propose: unbeaten in speed, memory and simplicity, and distinct.

Speeds are compared by the low ends of their bands, so a layout with a wider band must be faster.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from torchtitan.config.derive import layout_degrees, layout_name
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
FILE_LAYOUT = "this file's own layout"


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
    low: float
    """The low end of the speed's band."""
    gib: float
    complexity: int
    workload: Workload

    @property
    def kind(self) -> tuple[str, ...]:
        """Mesh axes with more than one rank."""
        degrees = layout_degrees(self.workload.config.parallelism)
        return tuple(axis for axis, degree in degrees.items() if degree > 1)

    def saves(self, gib: float) -> bool:
        """Whether this candidate needs so much less memory that it is worth showing."""
        return self.gib < min(_LESS_MEMORY * gib, gib - 1)

    def beats(self, other: "Candidate") -> bool:
        """Whether this candidate is at least as fast, as small and as simple as the other."""
        return (
            self.low >= other.low and self.gib <= other.gib and self.complexity <= other.complexity
        )


def complexity_of(config: Config) -> int:
    """Axes with more than one rank, a pipeline twice."""
    degrees = layout_degrees(config.parallelism)
    return sum(degree > 1 for degree in degrees.values()) + (degrees["pp"] > 1)


@dataclass
class Frontier:
    """The candidates that no other beats, and the fastest of each kind."""

    only_best: bool = False
    """Keep those that can be proposed first only."""
    all: list[Candidate] = field(default_factory=list)
    kinds: dict[tuple[str, ...], Candidate] = field(default_factory=dict)
    speed: float = 0.0
    """Speed of the fastest candidate."""
    low: float = 0.0
    """The highest low end of a band."""

    def wants(self, candidate: Candidate) -> bool:
        """Whether a candidate, or any that it beats, may be worth showing."""
        if (
            self._leads(candidate)
            and not self.only_best
            and candidate.speed >= _OTHER_KIND_SPEED * self.speed
        ):
            return True
        worthwhile = candidate.low >= (ALIKE if self.only_best else WORTHWHILE) * self.low
        return worthwhile and not any(other.beats(candidate) for other in self.all)

    def add(self, candidate: Candidate) -> None:
        """Keep a candidate that is wanted."""
        self.speed = max(self.speed, candidate.speed)
        self.low = max(self.low, candidate.low)
        if self._leads(candidate):
            self.kinds[candidate.kind] = candidate
        if not any(other.beats(candidate) for other in self.all):
            self.all = [other for other in self.all if not candidate.beats(other)] + [candidate]

    def _leads(self, candidate: Candidate) -> bool:
        """Whether a candidate is the fastest of its kind."""
        fastest = self.kinds.get(candidate.kind)
        return fastest is None or candidate.speed > fastest.speed


def propose(frontier: Frontier) -> list[tuple[Candidate, str]]:
    """Candidates to show, each with a reason; first the simplest of the fastest."""
    picks: list[tuple[Candidate, str]] = []
    candidates = sorted(
        (c for c in frontier.all if c.low >= WORTHWHILE * frontier.low), key=lambda c: -c.low
    )
    fastest = candidates[:1]
    while candidates and len(picks) < _MAX_PROPOSALS:
        as_fast = [c for c in candidates if c.low >= candidates[0].low * ALIKE]
        pick = min(as_fast, key=lambda c: (c.complexity, -c.low, c.gib))
        picks.append((pick, _why(pick, [c for c, _ in picks], fastest[0])))
        candidates = [c for c in candidates if c.saves(pick.gib) or c.complexity < pick.complexity]
    picks[1:] = sorted(picks[1:], key=lambda entry: -entry[0].low)
    kinds = {c.kind for c, _ in picks}
    others = sorted(
        (c for kind, c in frontier.kinds.items() if kind not in kinds), key=lambda c: -c.speed
    )
    for other in [c for c in others if c.speed >= _OTHER_KIND_SPEED * frontier.speed][
        :_MAX_OTHER_KINDS
    ]:
        picks.append((other, f"the fastest with {' x '.join(other.kind) or 'one rank'}"))
    return picks


def _why(pick: Candidate, earlier: Sequence[Candidate], fastest: Candidate) -> str:
    if not earlier:
        if pick is fastest:
            return "the fastest"
        return (
            f"the simplest within {1 - ALIKE:.0%} of the fastest (at least "
            f"{show_rate(fastest.low)} tokens/s)"
        )
    first = earlier[0]
    slowdown = 1 - pick.low / first.low
    price = f"for {slowdown:.0%} of the speed" if slowdown >= 0.01 else "at the same speed"
    less = f"{first.gib - pick.gib:.0f} GiB less"
    smaller = pick.saves(min(c.gib for c in earlier))
    simpler = pick.complexity < min(c.complexity for c in earlier)
    if smaller or simpler:
        return f"{' and '.join([less] * smaller + ['simpler'] * simpler)} {price}"
    rival = [c for c in earlier if not pick.saves(c.gib)][-1]
    return (
        f"{less} {price}, and simpler than "
        f"{layout_name(layout_degrees(rival.workload.config.parallelism))}"
    )


def with_baseline(proposals: list[Proposal], baseline: Plan) -> list[Proposal]:
    """The proposals with the configuration's own layout among them: marked, or as the last."""
    for i, proposal in enumerate(proposals):
        if _is_same(proposal.plan, baseline):
            why = f"{proposal.why}; {FILE_LAYOUT}"
            own_layout = dataclasses.replace(proposal, why=why, baseline=True)
            return [*proposals[:i], own_layout, *proposals[i + 1 :]]
    return [*proposals, Proposal(baseline, FILE_LAYOUT, baseline=True)]


def _is_same(plan: Plan, other: Plan) -> bool:
    """Whether two configurations differ in nothing that matters to a plan."""
    figures = attrgetter(
        *("layout", "schedule", "checkpointing", "tokens_per_second"),
        *("workload.tokens", "workload.microbatches"),
    )
    return bool(figures(plan) == figures(other))
