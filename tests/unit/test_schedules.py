"""The schedules that this project generates: legal, and with the memory and the bubble of their
papers.
"""

import itertools
import sys
from pathlib import Path

import pytest

from torchtitan.commands import pipeline_schedule
from torchtitan.parallel.pipeline_csv import Action, order_problems, read_orders
from torchtitan.tools.planner.pipeline_orders import NAMES, most_kept, orders_of
from torchtitan.tools.planner.pipeline_timeline import Program, simulate
from torchtitan.utils.errors import UserError
from torchtitan.utils.limits import PIPELINE_SCHEDULE_BYTES

ROOT = Path(__file__).parents[2]


def run(orders, *, forward=1.0, inputs=1.0, weights=1.0):
    seconds = {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}
    return simulate(Program(orders, ()), lambda stage, kind: seconds[kind], 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_legal(name):
    for degree, microbatches in itertools.product((2, 3, 4, 5, 8), (1, 2, 3, 7, 16)):
        orders = orders_of(name, degree, microbatches)
        stages = degree if name == "zb-h1" else 2 * degree
        assert list(order_problems("file", orders, stages)) == []
        for rank, order in enumerate(orders):
            assert {action.stage for action in order} == {
                rank,
                stages - 1 - rank if name != "zb-h1" else rank,
            }


@pytest.mark.parametrize(("degree", "microbatches"), [(2, 4), (4, 8), (8, 32)])
@pytest.mark.parametrize("weights", [0.7, 1.0])
def test_zb_h1(degree, microbatches, weights):
    """Bubble (p - 1)(F + I - W), and the activations of 1F1B's first rank on all: arXiv:2401.10241,
    table 2.
    """
    orders = orders_of("zb-h1", degree, microbatches)
    work = microbatches * (1 + 1.2 + weights)
    length = run(orders, inputs=1.2, weights=weights).length
    assert length == pytest.approx(work + (degree - 1) * (1 + 1.2 - weights))
    assert [most_kept([order]) for order in orders] == [degree] * degree


@pytest.mark.parametrize("degree", [4, 6, 8, 12])
def test_v_shapes_keep_a_half_and_a_third(degree):
    """Of 2 p, and a constant more: arXiv:2405.15362. Equally much on all ranks, and never more for
    a longer batch.
    """
    for name, share, extra in ("v-half", 1 / 2, 2), ("v-min", 1 / 3, 3):
        orders = orders_of(name, degree, 4 * degree)
        kept = [most_kept([order]) for order in orders]
        assert 2 * degree * share <= max(kept) <= 2 * degree * share + extra
        assert min(kept) >= max(kept) - 3
        assert most_kept(orders_of(name, degree, 8 * degree)) == max(kept)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_bubbles(degree):
    """If passes are equally long, all idle less than 1F1B. Where they aren't, V-Min's small memory
    stalls it.
    """
    plain = (degree - 1) / (5 * degree - 1)
    idle = {name: run(orders_of(name, degree, 4 * degree)).idle for name in NAMES}
    assert idle["zb-h1"] <= idle["v-half"] <= idle["v-min"] < plain
    assert idle["v-half"] < 0.7 * plain
    uneven = {
        name: run(orders_of(name, degree, 4 * degree), inputs=1.3, weights=0.9).idle
        for name in NAMES
    }
    assert uneven["v-half"] < plain
    assert uneven["v-min"] > idle["v-min"] + 0.05


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


@pytest.mark.parametrize("name", NAMES)
def test_the_command_writes_what_the_trainer_reads(name, tmp_path, capsys):
    file = tmp_path / "new" / "file.csv"
    assert (
        pipeline_schedule.main([name, "--pp", "4", "--microbatches", "8", "--output", str(file)])
        == 0
    )
    assert read_orders(str(file), 4) == (orders_of(name, 4, 8), [])
    said = capsys.readouterr().out
    kept = {"zb-h1": "4", "v-half": "3", "v-min": "2"}[name]
    assert f"keeps the activations of at most {kept} microbatches on a rank (1F1B: 4)" in said
    assert "(1F1B: 27.3%)" in said
    assert f"--parallelism.pipeline_parallel_schedule_csv={file}" in said


def test_the_command_refuses_what_the_trainer_could_not_read(tmp_path, capsys):
    with pytest.raises(
        UserError,
        match=f"--microbatches 9000: a schedule file may have {PIPELINE_SCHEDULE_BYTES:,} bytes",
    ):
        pipeline_schedule.main(
            ["v-min", "--pp=64", "--microbatches=9000", f"--output={tmp_path / 'x.csv'}"]
        )
    with pytest.raises(SystemExit):
        pipeline_schedule.main(
            ["v-min", "--pp=1", "--microbatches=4", f"--output={tmp_path / 'x.csv'}"]
        )
    assert "must be 2 or more" in capsys.readouterr().err
    with pytest.raises(UserError, match="can't write"):
        pipeline_schedule.main(["v-min", "--pp=2", "--microbatches=4", f"--output={tmp_path}"])


def test_published_table():
    """Of the four rows whose memory nothing was fitted to, and the five relative to 1F1B; the
    fastest stay so.
    """
    sys.path.insert(0, str(ROOT / "benchmarks/published"))
    import plan_schedules

    rows = plan_schedules.rows()
    speed = [abs(row.planned / row.published - 1) for row in rows[1:]]
    space = [abs(row.planned_gib / row.published_gib - 1) for row in rows if not row.fit]
    assert (len(speed), len(space)) == (5, 4)
    assert max(speed) < 0.06
    assert sorted(space)[-2] < 0.06  # published v-min keeps more on its first rank
    assert max(space) < 0.15
    fastest = sorted(rows, key=lambda row: -row.published)
    assert {row.schedule for row in fastest[:2]} == {"zb-h1", "ZBVZeroBubble"}
    assert max(rows, key=lambda row: row.planned).schedule in ("zb-h1", "ZBVZeroBubble")
    assert min(rows, key=lambda row: row.planned) == min(rows, key=lambda row: row.published)
