"""Pipelines through the real trainer: what each rank holds, custom cuts and schedules, what rank 0
reports.
"""

import gc
import weakref
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.pipeline_moments import holds
from tests.pipeline_program import program
from tests.runs import SAVE, SCHEDULE, arguments, assert_continues, losses, train, write_corpus
from tests.zero_bubble import zb_h1
from torchtitan.config import resolve
from torchtitan.config.pipeline_schedules import NAMED_SCHEDULES
from torchtitan.models.attention.backend import attention_backend
from torchtitan.parallel.init import materialize
from torchtitan.parallel.pipeline.stage import Stage
from torchtitan.train.build import build
from torchtitan.train.preflight import preflight
from torchtitan.train.step import HostUpdate, forward_backward
from torchtitan.train.trainer import Trainer
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.torch_compat import replaced

CPU = torch.device("cpu")

P = "--parallelism.pipeline_parallel_"
PP = ["--parallelism.pipeline_parallel_degree=2", "--model.overrides.n_layers=4"]


@pytest.fixture(scope="module")
def one_process(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return ranks(1, train, arguments(folder, "--model.overrides.n_layers=4", local_batch=8))[0]


def assert_same(run, expected):
    assert losses(run) == pytest.approx(losses(expected), rel=1e-5)
    norms = [[r["grad_norm"] for r in x["metrics"] if "loss" in r] for x in (run, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert [r["tokens"] for r in run["metrics"]] == [r["tokens"] for r in expected["metrics"]]
    for name, weight in expected["initial"].items():
        assert torch.equal(run["initial"][name], weight), name


CUTS = {
    "stages by name": [
        '--parallelism.module_fqns_per_model_part=[["tok_embeddings", "layers.0"], '
        '["layers.1", '
        '"layers.2", "layers.3", "norm", "output"]]'
    ],
    "0.1 split points": ["--parallelism.pipeline_parallel_split_points=layers.3"],
    "0.1 microbatches": ["--parallelism.pipeline_parallel_microbatches=2"],
    "one layer per stage": [
        "--parallelism.pipeline_parallel_layers_per_stage=1",
        "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",
        "--parallelism.pipeline_parallel_first_stage_less_layers=0",
        "--parallelism.pipeline_parallel_last_stage_less_layers=0",
    ],
    "three microbatches on two ranks": [
        "--parallelism.pipeline_parallel_schedule=FlexibleInterleaved1F1B",
        "--training.local_batch_size=3",
        "--training.global_batch_size=6",
    ],
    "embedding alone on the first stage": ["--parallelism.module_fqns_per_model_part=layers.0"],
    "both ends alone": [
        "--parallelism.pipeline_parallel_layers_per_stage=1",
        "--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble",
        "--activation_checkpoint.mode=full",
        "--checkpoint.enable",
    ],
}


SLOW = (
    "one layer per stage",
    "three microbatches on two ranks",
    "embedding alone on the first stage",
    "both ends alone",
)  # a cut of each kind stays


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in CUTS]
)
def test_cuts_and_microbatches(ranks, one_process, tmp_path, name):
    run = ranks(2, train, arguments(tmp_path, *PP, *CUTS[name], local_batch=4))[0]
    if "three" in name:
        argv = ["--model.overrides.n_layers=4", f"--job.dump_folder={tmp_path / 'one'}"]
        one_process = ranks(1, train, arguments(tmp_path, *argv, global_batch=6, local_batch=6))[0]
    assert_same(run, one_process)


def test_the_ends_are_alone_where_a_schedule_has_more_stages_than_layers(
    ranks, tmp_path, uninterrupted
):
    """Two layers on four stages of two ranks each, FSDP over both; the steps in between run on one
    process.
    """
    interleaved = ["--parallelism.pipeline_parallel_degree=2", f"{P}schedule=Interleaved1F1B"]
    runs = []
    for world, extra, steps in ((4, interleaved, 3), (1, [], 5), (4, interleaved, 8)):
        argv = arguments(tmp_path, *SAVE, SCHEDULE, *extra, steps=steps, local_batch=4)
        runs.append(ranks(world, train, argv, timeout=120)[0])
    for name, weight in uninterrupted["initial"].items():
        assert torch.equal(runs[0]["initial"][name], weight), name
    assert_continues(runs[-1], uninterrupted)


def test_a_schedule_from_a_file(ranks, one_process, tmp_path):
    """Rank 1 holds the first stage and the last, rank 0 the two in between: no shape a named
    schedule has.
    """
    orders = ["1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1", "0F0,0F1,3F0,3B0,3F1,3I1,3W1,0B0,0B1"]
    file = tmp_path / "mine.csv"
    file.write_text("\n".join(orders))
    extra = [
        f"--parallelism.pipeline_parallel_schedule_csv={file}",
        "--parallelism.pipeline_parallel_microbatch_size=2",
    ]
    run = ranks(2, train, arguments(tmp_path, *PP, *extra, local_batch=4))[0]
    assert_same(run, one_process)


def modules_held(argv):
    config = resolve(argv, dist.get_world_size()).config
    trainer = Trainer(config, preflight(config))
    names = [
        sorted(name for name, _ in model.named_parameters()) for model in trainer.engine.models
    ]
    counted = sum(p.numel() for model in trainer.engine.models for p in model.parameters())
    trainer.close()
    return names, counted


def test_a_rank_holds_only_its_stages(ranks, one_process, tmp_path):
    extra = ["--parallelism.pipeline_parallel_schedule=ZBVZeroBubble", "--validation.enable=false"]
    held = ranks(2, modules_held, arguments(tmp_path, *PP, *extra, local_batch=4))
    every = [name for names, _ in held for stage in names for name in stage]
    assert sorted(every) == sorted(one_process["weights"])
    assert len(held[0][0]) == len(held[1][0]) == 2
    assert all(name.startswith("layers.") for stage in held[1][0] for name in stage), (
        "the V's bottom has no end"
    )
    assert sum(count for _, count in held) == sum(
        w.numel() for w in one_process["weights"].values()
    )


@pytest.mark.parametrize(
    "schedule",
    [
        "1F1B",
        "ZBVZeroBubble",
        pytest.param("GPipe", marks=pytest.mark.slow),
        pytest.param("InterleavedZeroBubble", marks=pytest.mark.slow),
    ],
)
def test_validation_before_between_and_after_steps_changes_nothing(
    ranks, one_process, tmp_path, schedule
):
    """Evaluation has schedules and buffers of its own; rows of other lengths and batches of other
    sizes too.
    """
    held_out = write_corpus(tmp_path / "held-out.jsonl", documents=13, seed=5)
    validation = [
        "--validation.enable",
        "--validation.dataset=held-out",
        f"--validation.dataset_path={held_out}",
        "--validation.seq_len=48",
        "--validation.freq=1",
        "--validation.local_batch_size=3",
    ]
    alone = [f"--job.dump_folder={tmp_path / 'one'}", "--model.overrides.n_layers=4"]
    one = ranks(1, train, arguments(tmp_path, *validation, *alone, local_batch=8))[0]
    pp = [f"--parallelism.pipeline_parallel_schedule={schedule}", *PP]
    run = ranks(2, train, arguments(tmp_path, *validation, *pp, local_batch=4))[0]
    assert losses(run) == pytest.approx(losses(one_process), rel=1e-5)
    measured, expected = (
        [
            (r["validation_loss"], r["validation_tokens"])
            for r in x["metrics"]
            if "validation_loss" in r
        ]
        for x in (run, one)
    )
    assert len(expected) == 4
    assert [m for m, _ in measured] == pytest.approx([e for e, _ in expected], rel=1e-5)
    assert [n for _, n in measured] == [n for _, n in expected]


def one_step(argv, schedules):
    """By number of microbatches: loss and gradient norm of one step, by the pipeline and by the
    plain model.
    """
    out = {}
    for n, flag in schedules.items():
        sizes = [f"--training.local_batch_size={n}", f"--training.global_batch_size={n}"]
        try:
            config = resolve([*argv, *sizes, f"{P}{flag}"], dist.get_world_size()).config
            setup = preflight(config)
        except ConfigError:
            continue
        engine = build(config, setup, CPU)
        batch = next(iter(engine.loader))
        engine.loader.close()
        result = forward_backward(engine, batch, HostUpdate(engine, 0.0))
        model = setup.spec.build(setup.args, attention_backend("cpu"))
        materialize(
            model,
            CPU,
            CPU,
            config.debug.seed,
            lambda fqn, setup=setup: setup.spec.init(fqn, setup.args),
        )
        loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten())
        loss.backward()
        norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
        out[n] = ((result.loss, result.grad_norm), (loss.item(), norm.item()))
    return out


@pytest.mark.parametrize(
    "schedule",
    [
        x if x in ("1F1B", "ZBVZeroBubble") else pytest.param(x, marks=pytest.mark.slow)
        for x in NAMED_SCHEDULES
    ],
)
def test_every_count_of_microbatches_that_is_accepted_is_right(ranks, tmp_path, schedule):
    schedules = dict.fromkeys(range(1, 8), f"schedule={schedule}")
    for results in ranks(2, one_step, arguments(tmp_path, *PP), schedules):
        assert len(results) >= 4
        for n, (measured, expected) in results.items():
            assert measured == pytest.approx(expected, rel=1e-5), n


@contextmanager
def watched():
    """The most that is alive, whenever a stage computes, of what it has received and of the
    gradients it has sent.

    And of the last stage's outputs, whenever their backward or the next forward begins.
    """
    alive = {"transfers": [], "outputs": []}
    most = dict.fromkeys(alive, 0)

    def see(kind, tensors):
        alive[kind] += [weakref.ref(tensor.untyped_storage()) for tensor in tensors]

    def measure(kind):
        most[kind] = max(most[kind], sum(reference() is not None for reference in alive[kind]))

    def spied(method, before=lambda stage: None, after=lambda stage, out: None):
        original = getattr(Stage, method)

        def spy(stage, *args, **kwargs):
            before(stage)
            out = original(stage, *args, **kwargs)
            after(stage, out)
            return out

        return {method: spy}

    def operations(_, out):
        see("transfers", [operation.tensor for operation in out])

    def computes(stage):
        measure("transfers")
        if stage.is_last:
            measure("outputs")

    spies = {
        **spied("get_fwd_recv_ops", after=operations),
        **spied("get_bwd_recv_ops", after=operations),
        **spied("get_bwd_send_ops", after=operations),
        **spied(
            "forward_maybe_with_nosync",
            computes,
            lambda stage, out: stage.is_last and see("outputs", [out]),
        ),
        **spied("backward_maybe_with_nosync", computes),
    }
    gc.disable()  # as in training
    with replaced(Stage, **spies):
        yield most
    gc.enable()
    for kind in alive:
        assert not any(reference() is not None for reference in alive[kind]), (
            f"{kind} outlive the batch"
        )


def held_by_every_schedule(argv, orders, rows):
    out = {}
    for name, extra in orders.items():
        sizes = [f"--training.local_batch_size={rows}", f"--training.global_batch_size={rows}"]
        config = resolve([*argv, *sizes, *extra], 2).config
        setup = preflight(config)
        engine = build(config, setup, CPU)
        batch = next(iter(engine.loader))
        engine.loader.close()
        with watched() as trained:
            forward_backward(engine, batch, HostUpdate(engine, 0.0))
        with watched() as evaluated:
            engine.compute.forward(engine.compute.local_rows(batch.tokens, batch.labels))
        remote = [s for s, (a, b) in enumerate(pairwise(setup.stages.ranks), 1) if a != b]
        expected = max(
            sum(count for stage, count in held.microbatches.items() if stage in remote)
            + held.transfers
            for held in holds(program(setup.stages, rows), dist.get_rank())
        )
        out[name] = trained, evaluated, expected
    return out


def test_a_stage_holds_what_its_schedule_keeps_in_flight(ranks, tmp_path):
    """As many tensors as the planner counts, not one per microbatch and direction; and no logits
    beyond their loss.
    """
    orders = {name: [f"{P}schedule={name}"] for name in NAMED_SCHEDULES}
    file = tmp_path / "mine.csv"
    file.write_text(
        "\n".join(",".join(f"{stage}F{m},{stage}B{m}" for m in range(6)) for stage in range(2))
    )
    orders["file"] = [f"{P}schedule_csv={file}"]
    (tmp_path / "zb-h1.csv").write_text(zb_h1(2, 6))
    orders["zb-h1"] = [f"{P}schedule_csv={tmp_path / 'zb-h1.csv'}"]
    for results in ranks(2, held_by_every_schedule, arguments(tmp_path, *PP), orders, 6):
        measured = {name: trained["transfers"] for name, (trained, _, _) in results.items()}
        assert measured == {name: expected for name, (_, _, expected) in results.items()}
        for trained, evaluated, _ in results.values():
            assert trained["outputs"] == evaluated["outputs"] == 0
