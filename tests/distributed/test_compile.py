"""Compiled blocks and losses: one graph each, right numbers, also from a warm cache; fused
collectives, counted.
"""

import os
import shutil
from contextlib import nullcontext

import pytest
import torch

from tests.runs import arguments, losses, train
from torchtitan.utils.torch_compat import torch_is_before_2_13

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU"
)

AOT = ["--compile.enable", "--compile.backend=aot_eager"]
INDUCTOR = ["--compile.enable"]
DEEP = ["--model.overrides.n_layers=4"]
# By layers: balanced by FLOPs, the last stage of so small a model is the output projection alone.
PIPELINE = [
    f"--parallelism.pipeline_parallel_{end}_stage_less_layers=0" for end in ("first", "last")
]
PIPELINE += ["--parallelism.pipeline_parallel_degree=2"]
OP = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]


def degrees(**layout):
    keys = {"tp": "tensor_parallel", "cp": "context_parallel", "pp": "pipeline_parallel"}
    return [f"--parallelism.{keys[axis]}_degree={degree}" for axis, degree in layout.items()]


def compared(argv, cache=None):
    """Problems of the run against one process, the number of graphs compiled, and what of tensor
    parallelism fused.
    """
    from torchtitan.testing.difference import Tolerances
    from torchtitan.testing.parity import compare

    if cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch._dynamo.utils.counters.clear()
    finding = compare(argv, Tolerances())
    counters = torch._dynamo.utils.counters
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    report = torch._inductor.config.post_grad_custom_post_pass
    fusion = (report.num_fused, report.unfused) if report else (0, [])
    return (
        finding.problems,
        counters["stats"]["unique_graphs"],
        dict(counters["graph_break"]),
        *fusion,
    )


@pytest.mark.parametrize(
    "extra",
    [
        # The corner of the support matrix compiles with sharding.
        *(
            pytest.param(extra, marks=pytest.mark.slow)
            for extra in ([], degrees(cp=2), [*degrees(cp=2), "--training.document_mask"])
        ),
        degrees(tp=2),
        PIPELINE,
        *(
            pytest.param(
                [
                    *PIPELINE,
                    f"--parallelism.pipeline_parallel_schedule={name}",
                    "--training.local_batch_size=4",
                    *OP,
                ],
                marks=[
                    pytest.mark.skipif(
                        torch_is_before_2_13(), reason="refused with torch before 2.13"
                    ),
                    *marks,
                ],
            )
            for name, marks in (("ZBVZeroBubble", []), ("DualPipeV", [pytest.mark.slow]))
        ),
        pytest.param([*degrees(tp=2), "--activation_checkpoint.mode=full"], marks=pytest.mark.slow),
        pytest.param(
            [
                "--activation_checkpoint.mode=memory_budget",
                "--activation_checkpoint.memory_budget=0.3",
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda extra: " ".join(e.rpartition(".")[2] for e in extra) or "fsdp",
)
def test_four_blocks_and_the_loss_are_two_graphs(ranks, tmp_path, extra):
    results = ranks(2, compared, arguments(tmp_path, *DEEP, *AOT, *extra))
    for problems, _, breaks, *_ in results:
        assert (problems, breaks) == ([], {})
    # A pipeline has its loss on the rank with the last stage only.
    pipelined = any("pipeline" in argument for argument in extra)
    assert sorted(graphs for _, graphs, *_ in results) == ([1, 2] if pipelined else [2, 2])


def test_one_graph_for_every_second_block(ranks, tmp_path):
    argv = arguments(
        tmp_path,
        *DEEP,
        *AOT,
        "--activation_checkpoint.mode=selective",
        "--compile.components=model",
    )
    ((problems, graphs, breaks, *_),) = ranks(1, compared, argv)
    assert (problems, graphs, breaks) == ([], 2, {})


@pytest.mark.slow
def test_a_warm_cache_gives_each_rank_its_own_graph(ranks, tmp_path):
    """The loss of a vocabulary-sharded model has the rank's offset in it, so it is what differs
    between ranks.
    """
    argv = arguments(tmp_path, *INDUCTOR, *degrees(tp=2), "--compile.components=loss")
    for _ in range(2):
        for problems, *_ in ranks(2, compared, argv, str(tmp_path / "cache"), timeout=200):
            assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_every_collective_at_a_matrix_product_is_fused(ranks, tmp_path, rows):
    """Two gathers and two scatters in a block's forward; in its backward, the gathers of wo's and
    w2's gradients.
    """
    argv = arguments(
        tmp_path,
        *INDUCTOR,
        *degrees(tp=2),
        "--parallelism.enable_async_tensor_parallel",
        local_batch=rows,
    )
    for problems, _, breaks, fused, left in ranks(2, compared, argv, timeout=200):
        assert (problems, breaks) == ([], {})
        assert (fused, left) == (4 + 2, [])


def without_the_remedy(argv):
    from unittest import mock

    from torchtitan.parallel.tensor import async_tensor

    with mock.patch.object(async_tensor, "gathers_without_views", nullcontext):
        return compared(argv)


@pytest.mark.slow
def test_what_is_not_fused_is_named(ranks, tmp_path):
    argv = arguments(
        tmp_path,
        *INDUCTOR,
        *degrees(tp=2),
        "--parallelism.enable_async_tensor_parallel",
        local_batch=1,
    )
    *_, left = ranks(2, without_the_remedy, argv, timeout=200)[0]
    if torch.__version__ >= "2.13":
        assert {
            "the all-gather before attention.wq",
            "the all-gather before feed_forward.w1",
        } <= set(left)


def train_and_count(argv, flags):
    """The losses of a compiled run and of an eager one, and the number of graphs compiled."""
    torch._dynamo.utils.counters.clear()
    compiled = losses(train([*argv, *flags]))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return compiled, losses(train(argv)), graphs


def test_each_length_of_rows_compiles_once(ranks, tmp_path):
    """Nine lengths, more than dynamo's limit of eight graphs, and validation with another; the last
    step returns to the first length.
    """
    lengths = [*range(8, 41, 4), 8]
    stages = [
        f"{{from_step={step}, seq_len={length}}}" for step, length in enumerate(lengths[1:], 2)
    ]
    argv = arguments(
        tmp_path,
        f"--training.stages=[{', '.join(stages)}]",
        f"--training.seq_len={lengths[0]}",
        "--validation.enable",
        "--validation.freq=4",
        "--validation.steps=2",
        "--validation.seq_len=16",
        "--validation.local_batch_size=2",
        f"--validation.dataset_path={tmp_path / 'corpus.jsonl'}",
        steps=len(lengths),
        global_batch=4,
    )
    flags = [
        "--compile.enable",
        "--compile.backend=eager",
        f"--job.dump_folder={tmp_path / 'compiled'}",
    ]
    ((compiled, eager, graphs),) = ranks(1, train_and_count, argv, flags)
    assert graphs == 2 * (9 + 1), "block and loss, with gradients and without"
    assert compiled == pytest.approx(eager, rel=1e-6)
