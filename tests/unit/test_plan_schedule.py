"""Pipeline schedules in the planner: formulas against published ones, and against the order of
computations that the trainer runs.
"""

from statistics import fmean

import pytest

from tests.pipeline_moments import Held, held
from tests.pipeline_program import Program, program, simulate
from tests.zero_bubble import zb_h1
from torchtitan.parallel.pipeline.schedules import Action
from torchtitan.parallel.pipeline.split import PipelinePlan
from torchtitan.tools.planner.pipeline_costs import batch_time, in_flight


def stages(name, degree, per_rank=1, csv_file=None):
    count = degree * per_rank
    v_shaped = name in ("ZBVZeroBubble", "DualPipeV")
    owners = tuple(
        2 * degree - 1 - s if v_shaped and s >= degree else s % degree for s in range(count)
    )
    return PipelinePlan(tuple(((),) * count), owners, None if csv_file else name, csv_file, 1)


def seconds_of(forward=1.0, backward=2.0, weights=1.0):
    return {"F": forward, "B": backward, "I": backward - weights, "W": weights}


def run(pipeline, microbatches, **seconds):
    """The schedule as the trainer runs it."""
    per_rank = len(pipeline.ranks) / (max(pipeline.ranks) + 1)
    seconds = seconds_of(**seconds)
    return simulate(
        program(pipeline, microbatches), lambda stage, kind: seconds[kind] / per_rank, 0.0
    )


def formula(pipeline, microbatches, transfer=0.0, **seconds):
    per_rank = len(pipeline.ranks) / (max(pipeline.ranks) + 1)
    seconds = seconds_of(**seconds)
    return batch_time(
        pipeline, microbatches, lambda stage, kind: seconds[kind] / per_rank, transfer
    )


def idle(batch):
    return batch.bubble / batch.length


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("degree", "microbatches"), [(2, 2), (4, 8), (8, 32)])
def test_bubble_of_one_stage_per_rank(name, degree, microbatches):
    """(P - 1) / (m + P - 1), Huang et al., arXiv:1811.06965."""
    assert idle(formula(stages(name, degree), microbatches)) == pytest.approx(
        (degree - 1) / (microbatches + degree - 1)
    )


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS"])
def test_bubble_of_interleaved_stages(name):
    """(P - 1) / (v m + P - 1), Narayanan et al., arXiv:2104.04473."""
    assert idle(formula(stages(name, 4, 2), 8)) == pytest.approx(3 / (2 * 8 + 3))


NAMED = [
    ("GPipe", 1),
    ("1F1B", 1),
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 8),
    ("LoopedBFS", 2),
    ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
]


@pytest.mark.parametrize(("name", "per_rank"), NAMED)
@pytest.mark.parametrize(("degree", "microbatches"), [(2, 8), (4, 8), (4, 32), (8, 32)])
def test_the_formula_is_the_time_of_the_schedule(name, per_rank, degree, microbatches):
    """Executed as torch orders it: with equal parts of the backward, unequal ones, and parts that
    each take as long as the whole, as those of compiled blocks do.
    """
    pipeline = stages(name, degree, per_rank)
    for weights, again in ((1.0, 0.0), (0.7, 0.0), (1.0, 1.0)):
        seconds = seconds_of(weights=weights)
        seconds |= {"I": seconds["I"] + again, "W": seconds["W"] + again}
        times = (lambda stage, kind, seconds=seconds: seconds[kind] / per_rank), 0.02
        executed = simulate(program(pipeline, microbatches), *times)
        planned = batch_time(pipeline, microbatches, *times)
        assert planned.length == pytest.approx(executed.length, rel=0.05)
        assert sum(planned.busy) == pytest.approx(sum(executed.busy), rel=0.03)


@pytest.mark.parametrize(("name", "per_rank"), [n for n in NAMED if n[0] not in ("DualPipeV",)])
def test_the_slowest_stage_sets_the_pace(name, per_rank):
    """The last of 4 ranks has a stage that takes half as long again."""
    pipeline = stages(name, 4, per_rank)
    last = len(pipeline.ranks) - 1
    seconds = seconds_of()
    times = (lambda stage, kind: seconds[kind] * (1.5 if stage == last else 1.0)), 0.0
    executed = simulate(program(pipeline, 16), *times)
    planned = batch_time(pipeline, 16, *times)
    assert planned.length == pytest.approx(executed.length, rel=0.05)
    assert planned.busy == pytest.approx(executed.busy, rel=0.03)


@pytest.mark.parametrize(("name", "per_rank"), NAMED)
@pytest.mark.parametrize(("degree", "microbatches"), [(2, 8), (4, 8), (4, 32), (8, 32)])
def test_the_formula_is_what_the_schedule_keeps(name, per_rank, degree, microbatches):
    """The most microbatches of each rank, in the order that the trainer runs."""
    pipeline = stages(name, degree, per_rank)
    executed = held(program(pipeline, microbatches))
    for rank, moments in enumerate(executed):
        planned, *others = in_flight(pipeline, microbatches, rank)
        most = max(sum(moment.microbatches.values()) for moment in moments)
        assert sum(planned.microbatches.values()) == most
        kept = [m.microbatches for m in moments if sum(m.microbatches.values()) == most]
        off = [max(abs(n - planned.microbatches[stage]) for stage, n in m.items()) for m in kept]
        assert min(off) <= 1
        for moment in others:
            assert (moment.microbatches, moment.postponed) in [
                (m.microbatches, m.postponed) for m in moments
            ]


def test_a_file_keeps_what_its_order_says(tmp_path):
    """Under ZB-H1, the last of 4 ranks postpones all 4 microbatches that it keeps."""
    file = tmp_path / "zb-h1.csv"
    file.write_text(zb_h1(4, 8))
    pipeline = stages("1F1B", 4, csv_file=str(file))
    first, *_, last = (in_flight(pipeline, 8, rank)[0] for rank in range(4))
    assert (first.microbatches, sum(first.postponed.values())) == ({0: 4}, 0)
    assert (last.microbatches, last.postponed) == ({3: 4}, {3: 4})


def test_splitting_the_backward_fills_the_bubble():
    zero = run(stages("ZBVZeroBubble", 4, 2), 8)
    whole = run(stages("Interleaved1F1B", 4, 2), 8)
    assert _idle(zero) < 0.4 * _idle(whole)


def _idle(timeline):
    """Share of the ranks' time that they wait for each other."""
    return 1 - fmean(timeline.busy) / timeline.length


def test_a_transfer_delays_what_waits_for_it():
    pipeline = stages("GPipe", 2)
    slow = simulate(program(pipeline, 1), lambda stage, kind: 1.0, 0.5)
    assert slow.length == 4 + 2 * 0.5  # there and back


def test_a_schedule_file_is_run_as_written(tmp_path):
    file = tmp_path / "s.csv"
    orders = program(stages("1F1B", 3), 6).orders
    file.write_text(
        "\n".join(",".join(f"{a.stage}{a.kind}{a.microbatch}" for a in order) for order in orders)
    )
    pipeline = stages("1F1B", 3, csv_file=str(file))
    assert program(pipeline, 6).orders == orders
    assert run(pipeline, 6).length == run(stages("1F1B", 3), 6).length


@pytest.mark.parametrize(
    "name",
    ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "LoopedBFS"],
)
def test_every_named_schedule_computes_everything_once(name):
    pipeline = stages(name, 4, 1 if name == "1F1B" else 2)
    made = [action for order in program(pipeline, 8).orders for action in order]
    assert len(made) == len(set(made))
    assert {(a.stage, a.microbatch) for a in made if a.kind == "F"} == {
        (s, m) for s in range(len(pipeline.ranks)) for m in range(8)
    }


def test_microbatches_in_flight():
    most = [
        max(moments, key=lambda h: h.microbatches[rank])
        for rank, moments in enumerate(held(program(stages("1F1B", 4), 8)))
    ]
    assert [moment.microbatches for moment in most] == [{0: 4}, {1: 3}, {2: 2}, {3: 1}]
    assert held(program(stages("GPipe", 4), 8))[0] == (
        Held({0: 8}, 1),
    )  # and the gradient of the first to come back
    assert Action(0, "F", 0) in program(stages("GPipe", 2), 1).orders[0]


def test_the_first_stage_runs_its_whole_backward_with_the_weights():
    """As torch does (`backward_one_chunk` of a first stage), so a split backward of it costs one
    backward.
    """
    program = Program([[Action(0, kind, 0) for kind in "FIW"]], ())
    assert (
        simulate(
            program, lambda stage, kind: {"F": 1.0, "B": 2.0, "I": 2.0, "W": 2.0}[kind], 0.0
        ).length
        == 3
    )


def test_microbatches_that_wait_for_their_weights_only(tmp_path):
    """Under ZB-H1, the last of 4 ranks postpones all 4 microbatches that it keeps; the first
    postpones none, since no stage waits for its inputs' gradients.
    """
    file = tmp_path / "zb-h1.csv"
    file.write_text(zb_h1(4, 8))
    first, *_, last = held(program(stages("1F1B", 4, csv_file=str(file)), 8))
    assert [(moment.microbatches, moment.postponed) for moment in last] == [({3: 4}, {3: 4})]
    assert not any(moment.postponed for moment in first)


@pytest.mark.parametrize(("degree", "microbatches"), [(2, 4), (4, 8), (8, 32)])
@pytest.mark.parametrize("weights", [0.7, 1.0])
def test_bubble_of_zb_h1(tmp_path, degree, microbatches, weights):
    """(p - 1)(F + I - W): arXiv:2401.10241, table 2."""
    file = tmp_path / "zb-h1.csv"
    file.write_text(zb_h1(degree, microbatches))
    pipeline = stages("1F1B", degree, csv_file=str(file))
    length = run(pipeline, microbatches, backward=1.2 + weights, weights=weights).length
    work = microbatches * (1 + 1.2 + weights)
    assert length == pytest.approx(work + (degree - 1) * (1 + 1.2 - weights))
