"""Exchanges of rows that other work of the rank hides: the same numbers, and what a trace shows."""

import json

import pytest
import torch

from tests.runs import EXPERTS, arguments, train
from torchtitan.utils.torch_compat import torch_is_before_2_13

P = "--parallelism.pipeline_parallel_"
PAIRS = [
    f"{P}degree=2",
    f"{P}schedule=DualPipeV",
    f"{P}first_stage_less_layers=0",
    f"{P}last_stage_less_layers=0",
    "--model.overrides.n_layers=8",
    "--model.overrides.shared_expert_dim=32",
    "--parallelism.expert_parallel_degree=2",
]
"""Two blocks per stage, on four ranks."""
PROFILE = [
    "--profiling.enable_profiling",
    "--profiling.profile_freq=2",
    "--profiling.profiler_warmup=1",
    "--profiling.profiler_active=1",
]

pytestmark = pytest.mark.skipif(
    torch_is_before_2_13(), reason="the schedule is refused with experts"
)


def both(argv, other):
    """The run with overlap, and the one without."""
    return train(argv), train([*argv, f"{P}expert_parallel_overlap=false", *other])


def assert_same(ranks, folder, *extra):
    (folder / "apart").mkdir()
    argv = arguments(folder, *EXPERTS, *PAIRS, *extra, steps=2, local_batch=4)
    other = [f"--job.dump_folder={folder / 'apart'}", "--profiling.enable_profiling=false"]
    for run, apart in ranks(4, both, argv, other, timeout=240):
        for key in ("loss", "grad_norm"):
            assert [r[key] for r in run["metrics"]] == [r[key] for r in apart["metrics"]]
        for name, weight in apart["weights"].items():
            assert torch.equal(run["weights"][name], weight), name


def hidden(trace):
    """For each pair of microbatches in a trace: its exchanges, and during how many of them the rank
    multiplied matrices of the same microbatch, of the other, or of either.
    """
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if "ts" in event]
    events.sort(key=lambda event: event["ts"])
    for pair in events:
        if not pair["name"].endswith("OVERLAP_F_B") or pair["ph"] != "X":
            continue
        inside = [x for x in events if 0 <= x["ts"] - pair["ts"] <= pair["dur"]]
        found = []
        for i, event in enumerate(inside):
            sends_rows = event["name"] == "_c10d_functional::all_to_all_single" and (
                event["args"]["Input type"][0] == "float"
            )
            if not sends_rows:
                continue
            during = []
            for later in inside[i + 1 :]:
                if later["name"] == "aten::mm":
                    during.append(later["tid"] == event["tid"])
                elif later["name"].endswith("wait_tensor") and later["tid"] == event["tid"]:
                    break
            found.append((True in during, False in during))
        yield len(found), *(sum(x) for x in zip(*found, strict=True)), sum(map(any, found))


def test_what_hides_an_exchange(ranks, tmp_path):
    """A block exchanges rows to its experts and back, forward and backward. The shared expert
    hides those on the way to the experts; the other microbatch all but the pair's first and last,
    one of which the projection to the vocabulary hides on the ranks that have it.
    """
    assert_same(ranks, tmp_path, *PROFILE)
    pairs = 0
    for rank in (0, 2):  # of each half of the pipeline
        for numbers in hidden(tmp_path / f"out/profile_traces/step_2/rank{rank}_trace.json"):
            assert numbers == (8, 4, 7 if rank == 0 else 6, 8)
            pairs += 1
    assert pairs == 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        ["--activation_checkpoint.mode=full"],
        ["--compile.enable", "--compile.backend=aot_eager", "--training.loss_chunks=2"],
        [
            "--compile.enable",
            "--compile.backend=aot_eager",
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.selective_ac_option=op",
        ],
        ["--parallelism.expert_parallel_exchange=fixed"],
        [f"{P}schedule_csv="],
    ],
    ids=["checkpointed", "compiled", "compiled, by operation", "fixed", "file"],
)
def test_the_numbers_stay_the_same(ranks, tmp_path, extra):
    if "schedule_csv" in extra[0]:  # one pair is of a stage with itself, one splits the backward
        file = tmp_path / "pairs.csv"
        file.write_text(
            "0F0,0F1,3F0,(0F2;3B0)OVERLAP_F_B,(3F1;0B0)OVERLAP_F_B,(0F3;3I1)OVERLAP_F_B,"
            "3W1,0B1,3F2,3B2,0B2,(3F3;3B3)OVERLAP_F_B,0B3\n"
            "1F0,2F0,1F1,(2F1;2B0)OVERLAP_F_B,(1F2;1B0)OVERLAP_F_B,(2F2;2B1)OVERLAP_F_B,"
            "1B1,(1F3;2B2)OVERLAP_F_B,1B2,2F3,2B3,1B3\n"
        )
        extra = [f"{P}schedule_csv={file}"]
    assert_same(ranks, tmp_path, *extra)
