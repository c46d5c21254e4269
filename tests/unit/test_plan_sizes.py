"""How many GPUs a run needs: the curve over their number, and the fewest that are fast enough."""

import json
import re

import pytest

from tests.plans import H100
from torchtitan.commands.plan import main
from torchtitan.tools.planner import sizes
from torchtitan.tools.planner.planner import find_layouts

MODEL = ["--model.flavor=8B", "--training.seq_len=8192", "--training.global_batch_size=64"]
RUN = [*MODEL, "--compile.enable", "--hardware=h100-sxm"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """8B in 80 days: 1e12 tokens at 7,000 to 8,500 tokens/s per GPU take 17 GPUs or more."""
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    days = ["--tokens=1e12", "--days=80", f"--json={file}"]
    assert main([*RUN, *days]) == 0
    return json.loads(file.read_text())


def test_the_fewest_gpus_that_are_fast_enough(data):
    """16 bytes per parameter of 8.03 B are 120 GiB: two GPUs of 80 GB hold them, one doesn't."""
    curve = data["sizes"]
    assert [size["world"] for size in curve] == [2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert [size["world"] for size in curve if size["chosen"]] == [32] == [data["world"]]
    for size in curve:
        speed = size["tokens_per_second_per_gpu"] * size["world"]
        assert size["days"] == pytest.approx(1e12 / speed / 86400)
        assert (size["days"] <= 80) == (size["world"] >= 32)


def test_each_size_has_the_plan_that_a_search_proposes_first(data):
    for size in data["sizes"]:
        if size["world"] in (2, 16):
            found = find_layouts([*MODEL, "--compile.enable"], size["world"], H100)
            plan = found.best[0].plan
            assert size["layout"] == plan.layout
            assert size["tokens_per_second_per_gpu"] == plan.tokens_per_second


def test_without_days_the_fewest_gpus_that_train_in_a_month(capsys, monkeypatch):
    """1e11 tokens at 7,000 to 8,500 tokens/s per GPU take 4.5 to 5.5 GPUs a month."""
    monkeypatch.setattr(sizes, "COMPARED_GPUS", 4)
    assert main([*RUN, "--tokens=1e11"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    answer = re.search(
        r"The fewest that train 100B tokens in 30 days \(--days sets another limit\): "
        r"8 x h100-sxm, ([\d.]+) days \(.* to .*\), ([\d,]+) GPU-hours "
        "llama3 8B on 8 x h100-sxm",
        out,
    )
    days, hours = (float(figure.replace(",", "")) for figure in answer.groups())
    assert 15 < days < 30
    assert hours == pytest.approx(days * 24 * 8, rel=0.01)
    assert "more than any run needs" not in out


def test_a_batch_far_too_small_is_noted(capsys):
    main([*RUN, "--world=64", "--training.local_batch_size=1", "--tokens=4e12"])
    steps = "note: 7,629,395 steps of 524,288 tokens are more than any run needs"
    assert steps in capsys.readouterr().out


def test_too_few_days_are_said(monkeypatch, capsys):
    monkeypatch.setattr(sizes, "COMPARED_GPUS", 4)
    monkeypatch.setattr(sizes, "MAX_GPUS", 16)
    main([*RUN, "--tokens=1e12", "--days=0.1"])
    out = capsys.readouterr().out
    assert "None trains 1.00T tokens in 0.1 days, the fastest is 16 x h100-sxm, " in out


def test_notes_agree_with_the_table(monkeypatch, capsys):
    """Without a global batch there is a row per GPU on each number of them."""
    monkeypatch.setattr(sizes, "COMPARED_GPUS", 4)
    flags = ["--model.flavor=1B", "--training.local_batch_size=1", "--hardware=h100-sxm"]
    main([*flags, "--tokens=1e9"])
    out = capsys.readouterr().out
    rows = re.findall(r"^ *(\d) +(\d) ", out, re.M)
    assert rows == [("1", "1"), ("2", "2"), ("4", "4")]
    assert "training.global_batch_size is not set; on 1 GPU, all layouts train on 1 row" in out


def test_days_choose_the_number_of_gpus(capsys):
    with pytest.raises(SystemExit):
        main([*RUN, "--world=8", "--days=30"])
    assert "--days chooses the number of GPUs; drop it, or --world" in capsys.readouterr().err
