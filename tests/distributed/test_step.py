"""What a step asks of the device: host waits, passes over gradients, process groups. Traced on a
device without memory.

The numbers of a step are compared to one process elsewhere; here, the update that the host doesn't
wait for is compared to the one that a policy has to approve.
"""

import json
import math
import multiprocessing
import os
import re
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.rounding import assert_rounds, assert_trained_alike
from tests.runs import EXPERTS, LR, arguments, full, read_metrics, weights
from torchtitan.checkpoint.commit import committed_steps
from torchtitan.config import resolve
from torchtitan.config.derive import DEGREE_KEYS, derive
from torchtitan.config.sections.parallelism import Parallelism
from torchtitan.config.sections.schema import Config, Debug
from torchtitan.data.loader import StepLoader
from torchtitan.parallel.mesh import build_mesh
from torchtitan.train import step as steps
from torchtitan.train.build import build, set_determinism
from torchtitan.train.callbacks import Callback
from torchtitan.train.preflight import preflight
from torchtitan.train.step import HostUpdate, build_update, forward_backward, train_step
from torchtitan.train.trainer import Trainer
from torchtitan.utils.device import LateValues
from torchtitan.utils.errors import NonFiniteError
from torchtitan.utils.signals import StopRequest
from torchtitan.utils.torch_compat import replaced

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks/cpu")
P = "--parallelism."
SMALL = ["--training.seq_len=64", "--training.local_batch_size=2"]


@pytest.fixture(scope="module")
def alone():
    """`alone(function, *args)` runs `function` in a process of its own: a fake process group leaves
    traces.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def traced(world, argv, acts):
    sys.path.insert(0, BENCHMARKS)
    from step_trace import trace_step

    warnings.simplefilter("ignore")
    trace = trace_step([*SMALL, *argv], world, acts=acts)
    kernels = {name: dict(phase.kernels) for name, phase in trace.phases.items()}
    return trace.waits, kernels


def test_a_step_of_one_rank_and_of_eight(alone):
    waits, kernels = alone(traced, 1, [], False)
    assert waits == []  # nobody has read the result
    assert "_foreach_mul_" not in kernels["clip"]  # the update divides the gradients itself
    waits, judged = alone(traced, 8, [], True)
    assert len(waits) == 2, waits  # for the vote to stop, and for loss and norm
    assert judged["clip"]["_foreach_mul_"] == 1  # a policy judges the norm before the update
    assert (
        kernels["update"]["_fused_adamw_"] == judged["update"]["_fused_adamw_"] == 2
    )  # with and without decay
    # Where a factor is set, FSDP divides the gradients of a single rank by it in an extra pass per
    # unit, even by 1.
    assert kernels["backward"]["div"] == judged["backward"]["div"]


def test_the_host_waits_once_for_sliced_rows_documents_and_experts(alone):
    """The loads of experts are counted on the device."""
    experts = ["--model.name=qwen3_moe", "--moe.balance_bias_rate=0.001"]
    waits, _ = alone(
        traced, 8, [*experts, "--training.document_mask", f"{P}context_parallel_degree=2"], False
    )
    assert len(waits) == 1, waits
    assert waits[0].startswith("utils/device.py")  # for the vote to stop


def waits_of_parts():
    """Host waits of what happens beside a plain step: `file:line operator` by part."""
    sys.path.insert(0, BENCHMARKS)
    from step_trace import StepCounter, make_device
    from torch._subclasses.fake_tensor import FakeTensorMode

    from torchtitan.models import get_spec
    from torchtitan.models.attention.backend import attention_backend, document_mask
    from torchtitan.optim.qk_clip import QKClip
    from torchtitan.train.forward import LocalBatch

    device = make_device()
    counter = StepCounter()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        args = get_spec("gemma3").args("debugmodel", {}, max_seq_len=16)
        with torch.device(device):
            model = get_spec("gemma3").build(args, attention_backend(device.type))
        clip = QKClip(
            [model],
            100.0,
            layers=args.n_layers,
            heads=args.n_heads,
            tp=(0, 1),
            layout=None,
            device=device,
        )
        documents, tokens = torch.zeros(2, 2, 16, dtype=torch.int64).unbind()
        positions = torch.arange(4, 12, device=device)
        with counter:
            with counter.within("documents"):
                document_mask(documents, positions, torch.bfloat16, with_documents=True)
            with counter.within("copies"):
                LocalBatch(tokens, tokens, None, tokens[:, 0]).pin_memory().to(device)
            with counter.within("scale"):
                model.embed(torch.zeros(2, 16, dtype=torch.int64, device=device))
            with counter.within("clip"):
                clip.step(torch.zeros((), dtype=torch.bool, device=device))
            with counter.within("log"):
                clip.take()
    return {name: phase.waits for name, phase in counter.phases.items()}


def test_the_host_waits_for_no_mask_copy_scale_or_clip(alone):
    waits = alone(waits_of_parts)
    (read,) = waits.pop("log")
    assert read.startswith("optim/qk_clip.py")
    assert waits == {"documents": [], "copies": [], "scale": [], "clip": []}


def group_counts(layouts):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    counts = []
    for world, degrees in layouts:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        config = Config(
            parallelism=Parallelism(
                **{DEGREE_KEYS[axis]: degree for axis, degree in degrees.items()}
            )
        )
        build_mesh(derive(config, world)[0], "cpu")
        ranks = [
            tuple(dist.get_process_group_ranks(group))
            for group in dist.distributed_c10d._world.pg_map
        ]
        assert len(ranks) == len(set(ranks)), f"{degrees}: two groups of the same ranks"
        counts.append(len(ranks))
        dist.destroy_process_group()
    return counts


def test_no_two_process_groups_have_the_same_ranks(alone):
    """The world's included. Before groups were shared: 5, 7, 9, 6, 9 and 9."""
    layouts = [
        (64, {"dp_shard": 64}),
        (64, {"dp_replicate": 8, "dp_shard": 8}),
        (512, {"dp_shard": 64, "tp": 8}),
        (64, {"dp_replicate": 64, "dp_shard": 1}),
        (512, {"pp": 8, "dp_shard": 8, "tp": 8}),
        (512, {"pp": 2, "dp_replicate": 4, "dp_shard": 16, "cp": 2, "tp": 2}),
    ]
    assert alone(group_counts, layouts) == [1, 3, 3, 2, 5, 9]


def sharded_weights(argv):
    config = resolve(argv, 1).config
    (model,) = build(config, preflight(config), torch.device("cpu")).models
    return {isinstance(weight, DTensor) for weight in model.parameters()}


def test_fsdp_leaves_the_weights_of_one_rank_alone(ranks, tmp_path):
    """Unless it accumulates in another type, offloads them, or casts them and must not keep copies
    for the step.
    """
    bf16 = "--training.mixed_precision_param=bfloat16"
    for managed, flags in (
        (False, []),
        (False, [bf16]),
        (True, [bf16, "--training.dtype=bfloat16"]),
        (True, ["--training.enable_cpu_offload"]),
        (True, [bf16, f"{P}fsdp_reshard_after_forward=always"]),
        (True, [bf16, "--optimizer.early_step_in_backward", "--training.max_norm=0"]),
    ):
        argv = arguments(tmp_path, *flags, steps=1, global_batch=2)
        assert ranks(1, sharded_weights, argv)[0] == {managed}, flags


MAX_NORM = 0.05
POISON = {3: "forward", 5: "gradients"}
"""What is NaN on rank 1, by step. With NaN in the gradients alone, the loss is finite."""


def advance(argv, agree):
    """Loss, norm and whether weights changed, weights, experts' biases and loads, and optimizer
    state of each step.
    """
    config = resolve(argv, dist.get_world_size()).config
    engine = build(config, preflight(config), torch.device("cpu"))
    update = build_update(engine, agree=agree)
    (model,), batches, seen = engine.models, iter(engine.loader), []

    def poison(_, args):
        hidden = args[0]
        what = POISON.get(len(seen) + 1) if dist.get_rank() == 1 else None
        if what == "gradients":
            hidden.register_hook(lambda gradient: torch.full_like(gradient, math.nan))
        return (torch.full_like(hidden, math.nan) if what == "forward" else hidden, *args[1:])

    model.layers["1"].ffn_norm.register_forward_pre_hook(poison)
    while len(seen) < config.training.steps:
        result = train_step(engine, next(batches), update=update)
        engine.schedule.advance()
        states = {name: engine.optimizer.state[param] for name, param in model.named_parameters()}
        tensors = {
            f"{name}.{slot}": full(value)
            for name, state in states.items()
            for slot, value in state.items()
        }
        tensors |= {name: full(value) for name, value in model.state_dict().items()}
        seen.append((result.loss, result.grad_norm, result.updated, tensors))
    engine.loader.close()
    return seen


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param([], id="fsdp"),
        pytest.param([f"{P}tensor_parallel_degree=2"], id="tp", marks=pytest.mark.slow),
        pytest.param(EXPERTS, id="experts", marks=pytest.mark.slow),
    ],
)
def test_update_before_the_host_knows_the_norm(ranks, tmp_path, extra):
    """The same as after a policy has judged it. Every step is clipped; one that isn't finite
    changes nothing: neither weights and optimizer state nor the biases and loads of experts.
    """
    argv = arguments(tmp_path, f"--training.max_norm={MAX_NORM}", *extra, steps=6)
    (ahead, _), (judged, _) = ranks(2, advance, argv, False), ranks(2, advance, argv, True)
    first = torch.stack([x.norm() for name, x in ahead[0][-1].items() if name.endswith("exp_avg")])
    assert first.norm().item() == pytest.approx(
        0.1 * MAX_NORM, rel=1e-4
    )  # (1 - beta1) times the clipped gradient
    for step, (mine, theirs) in enumerate(zip(ahead, judged, strict=True), 1):
        assert mine[:2] == pytest.approx(theirs[:2], rel=1e-6, nan_ok=True)
        assert mine[2] is theirs[2] is (step not in POISON)
        assert math.isnan(mine[0]) is (POISON.get(step) == "forward")
        assert step in POISON or mine[1] > 2 * MAX_NORM
        for name, value in mine[-1].items():
            of_experts = name.endswith(
                (".expert_bias", ".router.load")
            )  # a token may go to another expert
            if name.endswith((".exp_avg", ".exp_avg_sq", ".step")):
                assert_rounds(value, theirs[-1][name], of=f"step {step}: {name}")
            elif not of_experts:
                assert_trained_alike(value, theirs[-1][name], LR, step, name)
            for run in (ahead, judged):
                kept = step > 1 and torch.equal(run[step - 1][-1][name], run[step - 2][-1][name])
                assert kept or step not in POISON, f"step {step}: {name}"
                assert not kept or step in POISON or "expert_bias" not in name


class Watch(Callback):
    """Records what happens in which order, and the results of all steps, unread."""

    def __init__(self, at_once, stop):
        self.at_once = at_once
        self.stop = stop
        self.events, self.results, self.reads = [], [], 0

    def note(self, event):
        if event not in self.events[-1:]:
            self.events.append(event)

    def before_update(self, run):
        self.note(f"queue {run.progress.step + 1}")

    def after_step(self, run, result):
        self.results.append(result)
        if self.at_once:
            run.progress.settle()
        if run.progress.step == self.stop.step:
            self.stop.requested = dist.get_rank() == 1


def watched(argv, at_once, stop_after=None):
    """Train, with NaN on rank 1 in step 5, and without data read ahead for step 4."""
    config = resolve(argv, dist.get_world_size()).config
    stop = StopRequest()
    stop.step = stop_after
    watch = Watch(at_once, stop)
    trainer = Trainer(config, preflight(config), stop, callbacks=[watch])
    (model,), progress = trainer.engine.models, trainer.progress

    def poison(_, args):
        number = progress.step + 1
        watch.note(f"forward {number}")
        hidden = args[0]
        is_bad = number == 5 and dist.get_rank() == 1
        return torch.full_like(hidden, math.nan) if is_bad else hidden, *args[1:]

    class Recorded(LateValues):
        @cached_property
        def numbers(self):
            watch.reads += 1
            watch.note(f"read {watch.reads}")
            return super().numbers

    model.layers["1"].ffn_norm.register_forward_pre_hook(poison)
    ready = property(lambda _: progress.step != 3)
    try:
        with replaced(steps, LateValues=Recorded), replaced(StepLoader, is_ready=ready):
            trainer.train()
        outcome = None
    except NonFiniteError as error:
        outcome = str(error)
    finally:
        trainer.close()
    numbers = [
        (x.loss, x.grad_norm, x.tokens, x.local_loss, x.updated, x.learning_rate, x.stop)
        for x in watch.results
    ]
    return outcome, watch.events, numbers, weights(trainer.engine.models)


def records(folder):
    """The metrics but for times and memory, and what the checkpoints hold besides tensors."""
    measured = re.compile("time|second|tflops|mfu|memory|pct|branch")
    lines = [
        {key: value for key, value in line.items() if not measured.search(key)}
        for line in read_metrics(folder)
    ]
    states = {}
    for step in committed_steps(folder / "checkpoint"):
        manifest = json.loads((folder / f"checkpoint/step-{step}/manifest.json").read_text())
        states[step] = manifest["train_state"] | {"branches": None}
    return lines, states


def test_the_host_reads_a_step_after_it_has_queued_the_next(ranks, tmp_path):
    """Unless something is due: the first step, a save, the end; or data must be waited for. All
    numbers are as if each step was read at once, also after a stop.
    """
    guard = ["--guard.policy=warn", "--guard.warmup_steps=0", "--training.on_nonfinite=skip"]
    save = ["--checkpoint.enable", "--checkpoint.interval=4", "--checkpoint.keep_latest_k=0"]
    argv = arguments(tmp_path, *guard, *save, "--metrics.log_freq=100", steps=8)

    def run(name, *args, extra=()):
        folder = tmp_path / name
        return ranks(2, watched, [*argv, f"--job.dump_folder={folder}", *extra], *args), folder

    late, folder = run("late", False)
    at_once, reference = run("at once", True)
    order = "f1 q1 r1 f2 q2 f3 q3 r2 r3 f4 q4 r4 f5 q5 f6 q6 r5 f7 q7 r6 f8 q8 r7 r8"
    assert [event[0] + event[-1] for event in late[0][1]] == order.split()
    order = [f"{kind}{step}" for step in range(1, 9) for kind in "fqr"]
    assert [event[0] + event[-1] for event in at_once[0][1]] == order
    for mine, theirs in zip(late, at_once, strict=True):
        assert str(mine[2]) == str(theirs[2])  # NaN equals NaN
        assert [numbers[4] for numbers in mine[2]] == [step != 5 for step in range(1, 9)]
        assert all(torch.equal(weight, theirs[3][name]) for name, weight in mine[3].items())
    lines, states = records(folder)
    assert (lines, states) == records(reference)
    assert states[8]["progress"]["skipped"] == 1
    assert [line["step"] for line in lines] == [1, 8]
    assert len(states[8]["guard"]["windows"]["loss"]) == 7

    run("stopped", False, 5)
    stopped, folder = records(tmp_path / "stopped"), tmp_path / "stopped"
    assert list(stopped[1]) == [4, 6]
    assert stopped[1][6]["progress"] == {"step": 6, "tokens": 6 * 256, "skipped": 1}
    rest, _ = run("stopped", False)
    assert str(rest[0][2]) == str(late[0][2][6:])
    assert records(folder)[1][8] == states[8]

    failed, folder = run("failed", False, extra=["--training.on_nonfinite=stop"])
    for message, *_ in failed:
        assert message.startswith("step 5: loss nan, gradient norm nan. Its update was skipped; ")
        assert "step-4" in message
    assert list(records(folder)[1]) == [4]
    assert json.loads((folder / "run.json").read_text())["starts"][0]["step"] == 4


def gradients(argv):
    config = resolve(argv, dist.get_world_size()).config
    trainer = Trainer(config, preflight(config))
    engine = trainer.engine
    forward_backward(engine, next(iter(engine.loader)), HostUpdate(engine, 0.0))
    found = {name: full(param.grad) for name, param in trainer.engine.models[0].named_parameters()}
    trainer.close()
    return found


@pytest.fixture(scope="module")
def exact(ranks, tmp_path_factory):
    """Gradients of one batch on one rank, in fp32."""
    return ranks(1, gradients, arguments(tmp_path_factory.mktemp("exact"), local_batch=8))[0]


@pytest.mark.parametrize(
    "layout", [[], [f"{P}data_parallel_replicate_degree=2"]], ids=["fsdp", "ddp"]
)
@pytest.mark.parametrize("batches", [1, 4])
def test_reduction_in_bfloat16(ranks, exact, tmp_path, layout, batches):
    """One batch is rounded to bf16. Several add up in fp32, so most sums don't fit into bf16."""
    extra = ["--training.mixed_precision_reduce=bfloat16", *layout]
    found = ranks(2, gradients, arguments(tmp_path, *extra, local_batch=4 // batches))[0]
    for name, gradient in found.items():
        assert 0 < (gradient - exact[name]).norm() / exact[name].norm() < 2**-8
    blocks = torch.cat(
        [gradient.flatten() for name, gradient in found.items() if name.startswith("layers.")]
    )
    representable = (blocks == blocks.bfloat16()).float().mean()
    assert representable == 1 if batches == 1 else representable < 0.5, representable


def test_deterministic_mode_fills_no_memory(monkeypatch):
    """torch would fill all that is allocated, by a kernel each."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", "")
    allowed = mock.Mock()
    monkeypatch.setattr(torch, "use_deterministic_algorithms", allowed)
    for name in ("deterministic", "benchmark"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    set_determinism(Debug(deterministic=True))
    allowed.assert_called_once_with(True, warn_only=False)
    assert not torch.utils.deterministic.fill_uninitialized_memory
