"""What a run says of its plan, and the plan that its launcher makes."""

import os

import pytest

from tests.plans import CPU_HARDWARE
from torchtitan.commands import train as command
from torchtitan.config import resolve
from torchtitan.telemetry.planned import ENV, Planned, Taken, figures, off_plan, planned_for
from torchtitan.tools.planner import run_plan
from torchtitan.tools.planner.corrections import correct, correction_file
from torchtitan.tools.planner.hardware import find_hardware
from torchtitan.tools.planner.planner import make_plan
from torchtitan.tools.planner.run_plan import plan_of_run
from torchtitan.train.preflight import preflight

PLANNED = Planned(
    hardware="h100-sxm",
    devices=("H100",),
    step_s=1.0,
    band=0.07,
    peak_gib=45.0,
    memory_band=0.06,
    save_s=0.4,
    memory_gib={"parameters": 5.0, "gradients": 5.0, "optimizer": 10.0, "activations": 25.0},
)
STATE = {"parameters": 5.0, "gradients": 5.0, "optimizer": 10.0}


@pytest.mark.parametrize(
    ("step", "data", "peak", "band", "text"),
    [
        (1.19, 0.0, 50.0, 0.07, None),
        (
            1.3,
            0.1,
            50.0,
            0.07,
            "steps take 1.3 s (1.2 s computing and communicating), 30.0% more than the 1.0 s "
            "planned for h100-sxm",
        ),
        (
            1.5,
            0.4,
            None,
            0.07,
            "steps take 1.5 s (0.4 s of each waiting for data), 50.0% more than the 1.0 s planned "
            "for h100-sxm",
        ),
        (
            0.5,
            0.3,
            50.0,
            0.07,
            "steps take 0.5 s (0.2 s computing and communicating), 50.0% less than the 1.0 s "
            "planned for h100-sxm",
        ),
        (1.3, 0.0, 50.0, 0.64, None),
        (
            1.0,
            0.0,
            60.0,
            0.07,
            "peak memory 60.0 GiB, 33.3% more than the 45.0 GiB planned; activations and others "
            "40.0 GiB, 60.0% more than the 25.0 GiB planned",
        ),
    ],
)
def test_a_run_that_is_20_percent_off_says_by_which_part(step, data, peak, band, text):
    planned = PLANNED.model_copy(update={"band": band})
    said = off_plan(planned, Taken(step, data, peak, state_gib=STATE))
    assert said == (text and f"Off its plan: {text}")


def test_state_that_is_off_is_named_whatever_the_peak():
    taken = Taken(1.0, 0.0, 50.0, state_gib=STATE | {"gradients": 10.0})  # and 25 others
    text = "Off its plan: gradients 10.0 GiB, 100.0% more than the 5.0 GiB planned"
    assert off_plan(PLANNED, taken) == text
    # The peak is 11 % more than planned: outside its range, though no run would say so.
    more = "; peak memory 50.0 GiB, 11.1% more than the 45.0 GiB planned"
    assert off_plan(PLANNED, taken, least=0.0) == text + more


def test_figures_are_those_that_were_measured():
    steps = pytest.approx((1 / 1.07, 1 / 0.93))
    rows = [tuple(figure) for figure in figures(PLANNED, Taken(1.25, 0.25, None, 0.5))]
    assert rows == [
        ("step, s", 1.0, 1.25, steps),
        ("waiting for data, s", 0.0, 0.25, None),
        ("computing and communicating, s", 1.0, 1.0, steps),
        ("a save, s", 0.4, 0.5, None),
    ]


def test_the_band_of_the_peak_is_that_of_what_is_not_state():
    rows = {each.name: each for each in figures(PLANNED, Taken(1.0, 0.0, 47.0, state_gib=STATE))}
    band = 0.06 * 45
    expected = {
        "parameters, GiB": (5.0, 5.0, (4.7, 5.3)),
        "optimizer, GiB": (10.0, 10.0, (9.4, 10.6)),
        "peak memory, GiB": (45.0, 47.0, (45 - band, 45 + band)),
        "activations and others, GiB": (25.0, 27.0, (25 - band, 25 + band)),
    }
    for name, (planned, measured, ends) in expected.items():
        assert rows[name][1:3] == (planned, measured)
        assert rows[name].range == pytest.approx(ends)
        assert not rows[name].outside


@pytest.mark.parametrize(
    ("device", "text", "found"),
    [
        ("H100", PLANNED.model_dump_json(), True),
        ("cpu", PLANNED.model_dump_json(), False),
        ("H100", "{}", False),
        ("H100", "", False),
    ],
)
def test_a_plan_counts_on_its_hardware(monkeypatch, device, text, found):
    monkeypatch.setenv(ENV, text)
    assert (planned_for(device) == PLANNED) is found


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A run on a machine without a GPU, whose CPU no run has corrected."""
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(run_plan, "_GPUS", tmp_path / "gpus")
    return [
        "--training.dataset=demo",
        "--checkpoint.enable",
        f"--job.dump_folder={tmp_path / 'out'}",
    ]


def plan(argv, world=1):
    config = resolve(argv, world).config
    return plan_of_run(config, preflight(config, world=world, output=False), world)


def test_a_cpu_has_a_plan_once_a_run_has_corrected_it(run):
    assert plan(run) is None
    file = correct("cpu", CPU_HARDWARE)
    assert file == correction_file("cpu")
    found = plan(run)
    by_file = make_plan(run, 1, find_hardware(str(file)))
    assert found.step_s == by_file.time.seconds
    assert found.time_s == by_file.time.parts
    assert (found.hardware, found.devices, found.peak_gib) == ("cpu", ("cpu",), None)
    assert plan(run, world=2) is None  # the CPU's network isn't known


def test_gpus_have_the_plan_of_their_table(run, tmp_path, monkeypatch):
    gpu = tmp_path / "gpus" / "0000:1b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 16\n")
    found = plan([*run, "--checkpoint.async_mode=async"], world=8)
    expected = make_plan(run, 8, find_hardware("h100-sxm"))
    assert (found.hardware, found.step_s) == ("h100-sxm", expected.time.seconds)
    assert found.peak_gib == expected.peak_gib
    assert sum(found.memory_gib.values()) == pytest.approx(expected.peak_gib)
    # AdamW in fp32: 12 bytes of state per parameter, an eighth on each rank, over PCIe at 25 GB/s.
    parameters = 12 * 8 * found.memory_gib["parameters"] * 2**30 / 4
    assert found.save_s == pytest.approx(parameters / 8 / 25e9)
    assert plan(run, world=8).save_s is None  # it depends on the storage
    longer = ["--training.stages=[{from_step = 3, seq_len = 512}]"]
    assert plan([*run, *longer], world=8) is None
    (gpu / "information").write_text("Model: Something else\n")
    assert plan(run, world=8) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (gpu / "information").write_text("Model: NVIDIA H100 80GB HBM3\n")
    assert plan(run, world=8) is None


def test_the_launcher_gives_the_plan_to_the_ranks(run, monkeypatch):
    given = []
    monkeypatch.setattr(command, "train", lambda argv: given.append(os.environ.get(ENV)) or 0)
    monkeypatch.setenv(ENV, "of another run")
    command.main([*run, "--nproc-per-node=1"])
    correct("cpu", CPU_HARDWARE)
    command.main([*run, "--nproc-per-node=1"])
    assert given[0] is None
    assert Planned.model_validate_json(given[1]) == plan(run)
