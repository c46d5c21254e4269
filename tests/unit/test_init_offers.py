"""All that `torchtitan init` offers, every model and hardware, is legal; and its questions on a
terminal.
"""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.init_runs import CPU, DEBUG, SMALL, written
from torchtitan.commands.init import main
from torchtitan.config import complete, load_config, rules
from torchtitan.config.load.decode import LoadedConfig
from torchtitan.config.rules import Facts
from torchtitan.tools.launch.data_choice import find_data
from torchtitan.tools.launch.model_choice import find_model, offered
from torchtitan.tools.launch.recipe import Request, as_flags, draft_settings
from torchtitan.tools.planner.hardware import find_hardware, load_hardware
from torchtitan.tools.planner.planner import any_layout, without_missing_files
from torchtitan.train.preflight import preflight

pytestmark = pytest.mark.usefixtures("init_folder")


# ---- everything that is offered


def check(name: str, hardware_name: str) -> None:
    """The settings of a model on a hardware, before there is a layout: the trainer takes them on
    one rank.
    """
    hardware = find_hardware(hardware_name)
    request = Request(find_model(name), find_data("c4"), hardware, 8, 4096, Path("p"), tokens=1e9)
    loaded = load_config(as_flags(draft_settings(request)))
    start = LoadedConfig(any_layout(loaded.config, 8), loaded.sources)
    here, _ = without_missing_files(complete(start, 1).config)
    preflight(here, output=False)
    rules.check(here, Facts(device=hardware.accelerator))


OF_TESTS = ("_gated", "_capped", "_relu2")
"""Endings of families that other tests register where they run before."""
SHIPPED = [model.name for model in offered() if not model.name.split("/")[0].endswith(OF_TESTS)]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_model(name):
    check(name, "h100-sxm")


@pytest.mark.parametrize("name", load_hardware())
def test_every_hardware(name):
    check("llama3/8B", name)


@pytest.mark.parametrize(("bf16", "chosen"), [("1.4e11", "float32"), ("2.5e11", "bfloat16")])
def test_cpu(capsys, bf16, chosen):
    """The precision follows from measured products: not every CPU with bf16 units is faster."""
    Path("own.toml").write_text(CPU.replace("\nbf16 = 1e11", f"\nbf16 = {bf16}"))
    load_hardware.cache_clear()  # by name, which another test's folder has, too
    main([DEBUG, "a", *SMALL, "--hardware=own.toml"])
    training = load_config(["--config=a/train.toml"]).config.training
    assert training.mixed_precision_param == chosen
    tables = written("a")[1]
    assert "compile" not in tables
    said = capsys.readouterr().out
    assert f"{chosen}: products are {float(bf16) / 1e11:.1f} times as fast" in said
    assert "torchtitan train a/train.toml\n" in said


PAIRS = [(model.name, "h100-sxm") for model in offered()]
PAIRS += [
    (model, hardware)
    for hardware in load_hardware()
    if hardware != "h100-sxm"
    for model in ("llama3/8B", "qwen3_moe/30B-A3B")
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "hardware"), PAIRS)
def test_everything_written_is_legal(model, hardware):
    """With a layout, on as many devices as the model is likely to need."""
    total, _ = find_model(model).parameters()
    fixed = ["--training.global_batch_size=64", "--seq-len=2048"]
    for devices in (1, 8, 64, 512):
        if total * 18 < devices * find_hardware(hardware).usable_gib * 2**30 * 0.8:
            break
    host = find_hardware(hardware).devices_per_host
    argv = [
        model,
        "a",
        "--data=demo",
        f"--hardware={hardware}",
        f"--devices={devices}",
        "--tokens=1e9",
    ]
    assert main([*argv, f"--gpus-per-node={host}", *fixed]) == 0
    config = complete(load_config(["--config=a/train.toml"]), devices).config
    here, _ = without_missing_files(config)
    preflight(here, output=False)


# ---- a terminal


@pytest.mark.slow
def test_answers_on_a_terminal(tmp_path):
    """Wrong answers are asked again, and the result trains."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "torchtitan", "init"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=subprocess.STDOUT, env=env
    )
    os.close(follower)
    shown = ""

    def until(*texts: str) -> None:
        nonlocal shown
        while not any(text in shown for text in texts):
            try:
                shown += os.read(leader, 4096).decode()
            except OSError:  # it has ended
                pytest.fail(shown)

    def answer(*answers: str) -> None:
        os.write(leader, "".join(f"{each}\n" for each in answers).encode())

    until("MODEL: ")
    answer("llama3/9B", "qwen3/debugmodel", "", "cpu")
    until("--tokens N or --hours N: ")
    answer("0", "2M")
    until("Wrote")
    while process.poll() is None or not shown.endswith("\n"):
        try:
            shown += os.read(leader, 4096).decode()
        except OSError:
            break
    assert process.wait(timeout=60) == 0, shown
    for text in ("no size '9B'", "neither a number of tokens", "Next:"):
        assert text in shown
    folder = Path("qwen3-debugmodel")
    command_line = (folder / "train.toml").read_text().splitlines()[1]
    answers = "qwen3/debugmodel --data demo --hardware cpu --tokens 2M"
    assert command_line == f"#   torchtitan init {answers}"
    assert (folder / "hardware.toml").is_file()
    steps = ["--training.steps=2", "--validation.steps=1", "--metrics.log_freq=1"]
    done = subprocess.run(
        [*command[:3], "train", str(folder / "train.toml"), *steps],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len((folder / "run/metrics.jsonl").read_text().splitlines()) >= 2
