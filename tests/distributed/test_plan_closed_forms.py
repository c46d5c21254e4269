"""The planner on top of the traced step: closed forms that agree with it, and a written file that
trains.
"""

import pytest

from tests.plan_counts import collectives, hardware_flops
from tests.plans import FULL, OP
from tests.runs import arguments, train
from tests.traced_step.trace import trace_ranks
from tests.zero_bubble import zb_h1
from torchtitan.commands.plan import main
from torchtitan.config import resolve
from torchtitan.tools.planner.memory import LOGIT_HOLE_BYTES, memory_of
from torchtitan.tools.planner.workload import Workload
from torchtitan.train.preflight import preflight

P = "--parallelism."


@pytest.fixture(autouse=True)
def _as_replayed(monkeypatch):
    """Without the hole of a compiled loss, which only published runs have."""
    monkeypatch.setitem(LOGIT_HOLE_BYTES, "compiled", 0)


@pytest.mark.parametrize(
    ("argv", "world"),
    [
        (
            [
                "--training.local_batch_size=1",
                "--training.loss_chunks=8",
                "--training.global_batch_size=16",
            ],
            8,
        ),
        # Meant for 8 ranks, on 3, which 16 rows don't divide: three batches, padded to 18.
        pytest.param(
            [
                "--training.local_batch_size=2",
                "--training.global_batch_size=16",
                f"{P}data_parallel_replicate_degree=2",
                "--fault_tolerance.elastic",
                "--checkpoint.enable",
            ],
            3,
            marks=pytest.mark.slow,
        ),
        (["--training.local_batch_size=4", f"{P}tensor_parallel_degree=4"], 8),
        pytest.param(
            ["--training.local_batch_size=4", f"{P}pipeline_parallel_degree=2"],
            4,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_closed_forms_agree_with_a_trace(argv, world):
    """For 4 layers of the 8B model: reserved memory nearly, FLOPs exactly."""
    shape = ["--model.flavor=8B", "--model.overrides.n_layers=4", "--training.seq_len=8192"]
    config = resolve([*shape, FULL, *argv], world).config
    setup = preflight(config, output=False)
    w = Workload(config, setup.args, setup.stages)
    (trace,) = trace_ranks(config, world, [0])
    assert memory_of(w, 0).reserved == pytest.approx(trace.peak_reserved, rel=0.10)
    if w.pp == 1:
        assert hardware_flops(w) == pytest.approx(trace.flops, rel=1e-3)


@pytest.mark.parametrize("mode", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_closed_forms_agree_with_a_trace_of_postponed_backwards(tmp_path, mode):
    """The third of four ranks under ZB-H1 keeps two microbatches until their weights' backward."""
    file = tmp_path / "zb-h1.csv"
    file.write_text(zb_h1(4, 8))
    shape = ["--model.flavor=8B", "--model.overrides.n_layers=8", "--training.seq_len=4096"]
    pipeline = [f"{P}pipeline_parallel_degree=4", f"{P}pipeline_parallel_schedule_csv={file}"]
    split = [f"{P}pipeline_parallel_{end}_stage_less_layers=0" for end in ("first", "last")]
    argv = [
        *shape,
        *pipeline,
        *split,
        "--training.local_batch_size=8",
        f"--activation_checkpoint.mode={mode}",
    ]
    config = resolve(argv, 4).config
    setup = preflight(config, output=False)
    (trace,) = trace_ranks(config, 4, [2])
    assert memory_of(Workload(config, setup.args, setup.stages), 2).reserved == pytest.approx(
        trace.peak_reserved, rel=0.10
    )


@pytest.mark.parametrize(
    "extra",
    [
        [*OP, "--training.local_batch_size=4", f"{P}expert_parallel_degree=8"],
        pytest.param(
            ["--training.local_batch_size=4", f"{P}expert_parallel_degree=8"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                *OP,
                "--training.local_batch_size=4",
                f"{P}expert_parallel_degree=4",
                f"{P}tensor_parallel_degree=2",
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param([*OP, "--training.local_batch_size=4"], marks=pytest.mark.slow),
    ],
)
def test_closed_forms_of_experts_agree_with_a_trace(extra):
    """For 4 layers of Qwen3 30B-A3B: reserved memory nearly, FLOPs and collectives exactly.
    Checkpointing by operation keeps rows before and after an exchange, no third copy of them.
    """
    shape = ["--model.name=qwen3_moe", "--model.flavor=30B-A3B", "--model.overrides.n_layers=4"]
    config = resolve(
        [*shape, "--training.seq_len=4096", FULL, "--compile.enable", *extra], 16
    ).config
    setup = preflight(config, output=False)
    w = Workload(config, setup.args, setup.stages)
    (trace,) = trace_ranks(config, 16, [0])
    memory = memory_of(w, 0)
    assert memory.reserved == pytest.approx(trace.peak_reserved, rel=0.10)
    if OP[0] in extra:
        assert memory.by_category["activations"] == pytest.approx(
            trace.memory["activations"], rel=0.08
        )
    assert hardware_flops(w) == pytest.approx(trace.flops, rel=1e-3)
    made = collectives(w)
    for (axis, operation), calls in made.calls.items():
        size = made.bytes[axis, operation]
        assert trace.collectives[axis][operation] == pytest.approx((calls, size), rel=1e-3), (
            axis,
            operation,
        )


MLA = [
    "--model.name=deepseek_v3",
    "--model.flavor=Moonlight-16B-A3B",
    "--model.overrides.n_layers=3",
    f"{P}expert_parallel_degree=8",
]
OSS = ["--model.name=gpt_oss", "--model.flavor=20b", "--model.overrides.n_layers=2"]
GEMMA = ["--model.name=gemma3", "--model.flavor=4b", "--model.overrides.n_layers=6"]
OLMO = ["--model.name=olmo3", "--model.flavor=7B", "--model.overrides.n_layers=4"]
DELTA = [
    "--model.name=qwen3_moe",
    "--model.flavor=30B-A3B",
    "--model.overrides.n_layers=4",
    "--model.overrides.layer_pattern=['delta', 'delta', 'delta', 'full']",
    "--model.overrides.delta_key_heads=16",
    "--model.overrides.delta_value_heads=32",
    "--model.overrides.delta_key_size=128",
    "--model.overrides.delta_value_size=128",
    "--model.overrides.gated_attention=true",
    "--model.overrides.shared_expert_dim=512",
    "--model.overrides.shared_expert_gate=true",
]
NONE = "--activation_checkpoint.mode=none"


@pytest.mark.parametrize(
    "argv",
    [
        [*MLA, FULL],
        [*OSS, NONE, f"{P}expert_parallel_degree=8"],
        *(
            pytest.param(argv, marks=pytest.mark.slow)
            for argv in (
                [*MLA, NONE],
                [*MLA, *OP],
                [*OSS, FULL],
                [*GEMMA, NONE],
                [*OLMO, NONE],
                [*OLMO, *OP, f"{P}tensor_parallel_degree=2"],
                [*DELTA, NONE],
                [*DELTA, FULL],
            )
        ),
    ],
)
def test_closed_forms_of_other_kinds_agree_with_a_trace(argv):
    """Latent attention and first dense layers, windows and sinks, norms after, Gated DeltaNet."""
    shape = ["--training.seq_len=4096", "--training.local_batch_size=2"]
    config = resolve([*shape, *argv], 8).config
    setup = preflight(config, output=False)
    w = Workload(config, setup.args, setup.stages)
    (trace,) = trace_ranks(config, 8, [0])
    assert memory_of(w, 0).reserved == pytest.approx(trace.peak_reserved, rel=0.10)
    predicted = hardware_flops(w)
    if "delta" in setup.args.kinds:  # nothing counts the triangular systems
        assert predicted.pop(("matmul", "float32")) == pytest.approx(
            trace.flops.pop(("matmul", "float32")), rel=0.2
        )
    assert predicted == pytest.approx(trace.flops, rel=1e-3)
    made = collectives(w)
    for (axis, operation), calls in made.calls.items():
        size = made.bytes[axis, operation]
        assert trace.collectives[axis][operation] == pytest.approx((calls, size), rel=1e-3)


def test_written_file_trains_as_it_is(ranks, tmp_path):
    """The best layout of two ranks for a tiny model: planned, written, and trained."""
    file = tmp_path / "best.toml"
    argv = [
        *arguments(tmp_path, steps=2, global_batch=4),
        "--world=2",
        "--hardware=h100-sxm",
        "--search",
    ]
    assert main([*argv, "--write", str(file)]) == 0
    metrics = ranks(2, train, ["--job.config_file", str(file)])[0]["metrics"]
    assert [record["step"] for record in metrics if "loss" in record] == [1, 2]
