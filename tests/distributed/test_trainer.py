"""Validation, profiling and data position, through the real trainer."""

import json
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.runs import arguments, full, losses, read_metrics, train, write_corpus
from torchtitan.config import resolve
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.models.attention.backend import attention_backend
from torchtitan.parallel.groups import limit_groups
from torchtitan.parallel.mesh import build_mesh
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer


def validation_arguments(folder, *extra):
    held_out = folder / "held-out.jsonl"
    if not held_out.exists():
        write_corpus(held_out, documents=13, seed=5)
    return arguments(
        folder,
        "--validation.enable",
        "--validation.dataset=held-out",
        f"--validation.dataset_path={held_out}",
        "--validation.seq_len=32",
        "--validation.freq=2",
        *extra,
    )


def validations(run):
    return [
        (r["step"], r["validation_loss"], r["validation_tokens"])
        for r in run["metrics"]
        if "validation_loss" in r
    ]


@pytest.mark.parametrize("batch", [1, 3])
def test_validation_is_the_token_weighted_loss_of_the_whole_set(ranks, tmp_path, batch):
    """Against one long pass by hand; 13 documents divide evenly among no number of ranks here."""
    rows = f"--validation.global_batch_size={2 * batch}"
    argv = validation_arguments(tmp_path, f"--validation.local_batch_size={batch}", rows)
    run = ranks(2, train, argv)[0]
    assert [step for step, *_ in validations(run)] == [2, 4]
    setup = preflight(resolve(argv, 1).config)
    model = setup.spec.build(setup.args, attention_backend("cpu"))
    model.load_state_dict(run["weights"])
    rows = ranks(1, all_rows, argv, 2)[0]
    loss = tokens = 0
    with torch.no_grad():
        for inputs, labels in rows:
            loss += F.cross_entropy(
                model(inputs).flatten(0, 1),
                labels.flatten(),
                ignore_index=IGNORE_INDEX,
                reduction="sum",
            ).item()
            tokens += int((labels != IGNORE_INDEX).sum())
    _, measured, counted = validations(run)[-1]
    assert measured == pytest.approx(loss / tokens, rel=1e-5)
    assert counted == tokens
    lines = (tmp_path / "held-out.jsonl").read_text().splitlines()
    documents = [
        build_tokenizer("./tests/assets/tokenizer").encode_document(json.loads(x)["text"])
        for x in lines
    ]
    assert sum(map(len, documents)) - tokens == 8, (
        "only each lane's very first token is not predicted"
    )


def all_rows(argv, world):
    """The batches of the whole set, as one rank of `world` or of one would have them."""
    from torchtitan.train.build import build_data

    config = resolve(argv, world).config
    loader = build_data(config, "validation", preflight(config).tokenizer)
    return [(b.tokens, b.labels) for b in loader]


LAYOUTS = [
    (1, "validation.local_batch_size=4"),
    (4, "parallelism.context_parallel_degree=2"),
    (2, "parallelism.tensor_parallel_degree=2"),
    (2, "parallelism.pipeline_parallel_degree=2"),
]


def test_validation_does_not_depend_on_the_ranks_nor_change_training(ranks, tmp_path):
    """Two sets, of which one is limited to batches that its number of rows makes partly empty."""
    plain = ranks(2, train, arguments(tmp_path, f"--job.dump_folder={tmp_path / 'plain'}"))[0]
    write_corpus(tmp_path / "code.jsonl", documents=40, seed=6)
    validation_arguments(tmp_path)
    sets = f'''[[validation.sets]]
name = "prose"
dataset_path = "{tmp_path / "held-out.jsonl"}"
[[validation.sets]]
name = "code"
dataset_path = "{tmp_path / "code.jsonl"}"
steps = 3
'''
    (tmp_path / "sets.toml").write_text(sets)
    asked = [
        "--validation.enable",
        "--validation.seq_len=32",
        "--validation.freq=2",
        "--validation.local_batch_size=4",
    ]
    found = []
    for i, (world, layout) in enumerate(LAYOUTS):
        argv = arguments(tmp_path, *asked, f"--{layout}", f"--job.dump_folder={tmp_path / str(i)}")
        run = ranks(world, train, [f"--job.config_file={tmp_path / 'sets.toml'}", *argv])[0]
        assert losses(run) == pytest.approx(losses(plain), rel=1e-5)
        found.append([record for record in run["metrics"] if "validation_loss/code" in record])
    for records in found:
        for one, first in zip(records, found[0], strict=True):
            for name in ("prose", "code"):
                assert one[f"validation_tokens/{name}"] == first[f"validation_tokens/{name}"]
                for key in ("loss", "bits_per_byte"):
                    key = f"validation_{key}/{name}"
                    assert one[key] == pytest.approx(first[key], rel=1e-5)
    assert found[0][0]["validation_tokens/code"] == 3 * 8 * 32, (
        "three batches of training.global_batch_size rows"
    )
    assert found[0][0]["validation_tokens/prose"] < 60 * 32


def test_bits_per_byte_are_those_of_the_text(ranks, tmp_path):
    """The whole set's loss in bits, over the bytes of its files; only each lane's first token isn't
    predicted.
    """
    argv = validation_arguments(tmp_path, "--validation.global_batch_size=1")
    record = next(r for r in ranks(1, train, argv)[0]["metrics"] if "validation_loss" in r)
    texts = [
        json.loads(line)["text"] for line in (tmp_path / "held-out.jsonl").read_text().splitlines()
    ]
    bits = record["validation_loss"] * record["validation_tokens"] / math.log(2)
    assert record["validation_bits_per_byte"] == pytest.approx(
        bits / sum(len(t.encode()) for t in texts), rel=1e-9
    )


def test_a_save_after_validation_holds_whole_weights(ranks, tmp_path):
    """Gathered weights that a forward leaves behind must not reach a checkpoint."""
    extra = ["--checkpoint.enable", "--checkpoint.interval=2"]
    whole = ranks(
        2, train, validation_arguments(tmp_path, *extra, f"--job.dump_folder={tmp_path / 'a'}")
    )[0]
    again = ["--checkpoint.load_step=2", f"--job.dump_folder={tmp_path / 'a'}"]
    run = ranks(
        4, train, validation_arguments(tmp_path, *extra, *again, "--training.local_batch_size=1")
    )[0]
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)


def test_profiler_traces_are_written_on_schedule(ranks, tmp_path):
    extra = [
        "--profiling.enable_profiling",
        "--profiling.profile_freq=3",
        "--profiling.profiler_warmup=1",
    ]
    ranks(2, train, arguments(tmp_path, *extra, steps=6))
    traces = sorted(
        str(p.relative_to(tmp_path / "out/profile_traces")) for p in tmp_path.rglob("*trace.json")
    )
    assert traces == [f"step_{s}/rank{r}_trace.json" for s in (3, 6) for r in (0, 1)]
    events = json.loads((tmp_path / "out/profile_traces/step_3/rank0_trace.json").read_text())[
        "traceEvents"
    ]
    assert any("scaled_dot_product" in str(event.get("name")) for event in events)


def gradients_after_one_backward(argv, max_norm):
    from torchtitan.train.step import HostUpdate, forward_backward

    config = resolve(argv, dist.get_world_size()).config
    trainer = Trainer(config, preflight(config))
    engine = trainer.engine
    result = forward_backward(engine, next(iter(engine.loader)), HostUpdate(engine, max_norm))
    grads = {name: full(param.grad) for name, param in engine.models[0].named_parameters()}
    trainer.close()
    return result.grad_norm, grads


@pytest.mark.parametrize("world", [1, 2, 4])
def test_gradient_norm_and_clipping_are_global(ranks, tmp_path, world):
    argv = arguments(tmp_path, "--training.local_batch_size=2")
    norm, raw = ranks(world, gradients_after_one_backward, argv, 0.0)[0]
    assert norm == pytest.approx(
        torch.cat([g.flatten() for g in raw.values()]).double().norm().item(), rel=1e-5
    )
    _, clipped = ranks(world, gradients_after_one_backward, argv, norm / 4)[0]
    for name, grad in raw.items():
        torch.testing.assert_close(clipped[name], grad / 4, rtol=1e-4, atol=1e-8)


def test_effective_config_reproduces_the_run(ranks, tmp_path):
    first = ranks(2, train, arguments(tmp_path))[0]
    again = [
        "--config",
        str(tmp_path / "out/config.toml"),
        f"--job.dump_folder={tmp_path / 'again'}",
    ]
    assert losses(ranks(2, train, again)[0]) == losses(first)
    assert [r["step"] for r in read_metrics(tmp_path / "again")] == [1, 2, 3, 4]


def limits_of_groups():
    """Of the default process group and a mesh's, before and after, in seconds."""
    earlier = set(dist.distributed_c10d._world.pg_map) - {dist.group.WORLD}  # of other tests
    build_mesh(resolve(["--parallelism.tensor_parallel_degree=2"], 2).config, "cpu")
    found = []
    for seconds in (77, 300):
        limit_groups(seconds)
        groups = set(dist.distributed_c10d._world.pg_map) - earlier
        found.append(
            {g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups}
        )
    return found


def test_every_group_has_the_time_limit(ranks):
    """A mesh's groups don't take it from the default group."""
    assert ranks(2, limits_of_groups)[0] == [{77}, {300}]
