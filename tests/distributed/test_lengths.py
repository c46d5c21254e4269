"""A stage with longer rows and other positions trains as a run that was stopped and started again
with them would.
"""

import json

import pytest

from tests.runs import SAVE, SCHEDULE, TINY, arguments, assert_continues, read_metrics, train
from torchtitan.models import get_spec

YARN = "{type = 'yarn', factor = 2.0, original_max_seq_len = 32}"
STAGE = (
    "[{from_step = 4, seq_len = 64, global_batch_size = 6, local_batch_size = 2, "
    f"rope_theta = 1e5, rope_scaling = {YARN}}}]"
)
P = "--parallelism."
LAYOUTS = {"cp 2": [f"{P}context_parallel_degree=2"], "pp 2": [f"{P}pipeline_parallel_degree=2"]}


def staged(folder, *extra, steps=6):
    """Rows of 64 tokens instead of 32 from step 4 on."""
    folder.mkdir(exist_ok=True)
    flags = [*SAVE, SCHEDULE, "--training.document_mask", f"--training.stages={STAGE}"]
    return arguments(folder, *flags, *extra, steps=steps, local_batch=4)


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """One process, never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    export = "--checkpoint.last_save_in_hf"
    return ranks(1, train, staged(folder, export))[0] | {"folder": folder}


def test_it_is_the_run_that_restarts_with_longer_rows(ranks, tmp_path, whole):
    """Stopped after step 3, and continued by a file that names no stages: bit for bit."""
    ranks(1, train, staged(tmp_path, steps=3))
    flags = [
        "--training.stages=[]",
        "--training.seq_len=64",
        "--training.global_batch_size=6",
        "--training.local_batch_size=2",
        "--model.overrides.rope_theta=1e5",
        f"--model.overrides.rope_scaling={YARN}",
    ]
    run = ranks(1, train, staged(tmp_path, *flags))[0]
    assert [r["loss"] for r in run["metrics"]] == [r["loss"] for r in whole["metrics"]]
    assert_continues(run, whole)


@pytest.mark.parametrize(("first", "second", "stop"), [("cp 2", "pp 2", 4), ("pp 2", "cp 2", 2)])
def test_it_continues_on_another_layout(ranks, tmp_path, whole, first, second, stop):
    """Stopped before or after the change, which either layout makes without a restart."""
    ranks(2, train, staged(tmp_path, *LAYOUTS[first], steps=stop))
    assert_continues(ranks(2, train, staged(tmp_path, *LAYOUTS[second]))[0], whole)


def test_what_is_reported(whole):
    """Tokens, FLOPs by the length of the step's rows, the event, and the position in tokens."""
    out = whole["folder"] / "out"
    records = read_metrics(out)
    assert [r["tokens"] for r in records] == [256, 512, 768, 1152, 1536, 1920]
    spec = get_spec("llama3")
    manifest = json.loads((out / "checkpoint/step-6/manifest.json").read_text())
    args = spec.args("debugmodel", TINY, max_seq_len=64)
    assert manifest["model"]["max_seq_len"] == 64
    assert manifest["model"]["rope_scaling"]["type"] == "yarn"
    early = json.loads((out / "checkpoint/step-3/manifest.json").read_text())["model"]
    assert (early["max_seq_len"], early["rope_scaling"]) == (32, None)
    exported = json.loads((out / "checkpoint/step-6-hf/config.json").read_text())
    assert exported["max_position_embeddings"] == 64
    assert exported["rope_theta"] == 1e5
    assert exported["rope_scaling"]["rope_type"] == "yarn"
    for record in records:
        flops = spec.flops_per_token(args, 32 if record["step"] < 4 else 64)
        found = record["tflops"] * 1e12 / record["tokens_per_second"]
        assert found == pytest.approx(flops, rel=1e-6)
    assert manifest["train_state"]["data"]["sources"]["data"]["tokens"] == 1920
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    (stage,) = (event for event in events if event["kind"] == "stage")
    assert stage["step"] == 4
    assert stage["seq_len"] == 64
