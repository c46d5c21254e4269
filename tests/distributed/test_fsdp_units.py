"""FSDP's units: what each holds, and when it is gathered and reduced beside what is computed."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from tests.rounding import assert_rounds
from tests.runs import arguments, full
from torchtitan.config import resolve
from torchtitan.parallel.collectives import local
from torchtitan.train.build import build
from torchtitan.train.preflight import preflight
from torchtitan.train.step import HostUpdate, forward_backward

P = "--parallelism."
# The rows of the vocabulary are uneven over 4 ranks.
SIZES = ["--model.overrides.n_layers=2", "--model.overrides.vocab_size=2050"]
CHUNKS = "--training.loss_chunks=4"  # the output's weight is used after the forward
TIED = "--model.overrides.tie_embeddings"
EXPERTS = ["--model.name=qwen3_moe", "--model.overrides.expert_dim=64"]
FIRST = "tok_embeddings"
LAST = "norm, output"


def owner(name):
    """The module whose parameters make up a unit, if no other one's do."""
    path = name.split(".")
    if "experts" in path:
        return ".".join(path[: path.index("experts") + 1])
    return ".".join(path[:2] if path[0] == "layers" else path[:1])


def unit(names):
    return ", ".join(sorted(set(map(owner, names))))


def observe(argv):
    """The units of this rank's stages; what happens in its first step; and the step's gradients."""
    config = resolve(argv, dist.get_world_size()).config
    engine = build(config, preflight(config), torch.device("cpu"))
    events = []
    units = []
    saved = {}
    names = {id(p): name for model in engine.models for name, p in model.named_parameters()}

    def unit_of(params):
        return unit(names[id(p.sharded_param)] for p in params)

    for model in engine.models:
        modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        groups = [m._get_fsdp_state()._fsdp_param_group for m in modules]
        units += [unit_of(group.fsdp_params) for group in groups if group]
        saved |= model.state_dict()
        for name, layer in model.layers.items():
            # what the host reads before it sends tokens to experts
            reader = layer.moe.router if hasattr(layer, "moe") else layer.feed_forward
            reader.register_forward_hook(lambda *_, name=name: events.append(f"run layers.{name}"))

    def recorded(function, word):
        def call(params, *args, **kwargs):
            events.append(f"{word} {unit_of(params)}")
            return function(params, *args, **kwargs)

        return call

    gather = recorded(_fsdp_param_group.foreach_all_gather, "gather")
    reduce = recorded(_fsdp_param_group.foreach_reduce, "reduce")
    with patch.multiple(_fsdp_param_group, foreach_all_gather=gather, foreach_reduce=reduce):
        batch = next(iter(engine.loader))
        forward_backward(engine, batch, HostUpdate(engine, 0.0))
    engine.loader.close()
    weights = {n: p for model in engine.models for n, p in model.named_parameters()}
    moved = [n for n, p in weights.items() if local(p).data_ptr() != local(saved[n]).data_ptr()]
    return units, events, {n: full(p.grad).float() for n, p in weights.items()}, moved


def step_of(world, folder, ranks, *extra):
    folder.mkdir(exist_ok=True)
    argv = arguments(folder, *SIZES, *extra, local_batch=8 // world)
    return ranks(world, observe, argv)


DENSE = [
    *(f"gather {FIRST}", "gather layers.0"),
    *("gather layers.1", "run layers.0", f"gather {LAST}", "run layers.1"),
    *(f"reduce {LAST}", "gather layers.0", "reduce layers.1", "reduce layers.0"),
    f"reduce {FIRST}",
]
LAYOUTS = {
    "fsdp": (2, [CHUNKS], DENSE),
    "fsdp, uneven": (4, [], DENSE),
    # The last block is also freed and gathered again; the ends are not.
    "always": (
        2,
        [f"{P}fsdp_reshard_after_forward=always"],
        [*DENSE[:6], "gather layers.1", *DENSE[6:]],
    ),
    # A tied weight is needed first, and its gradient is complete last.
    "tied": (
        2,
        [CHUNKS, TIED],
        [
            *(f"gather norm, {FIRST}", "gather layers.0"),
            *("gather layers.1", "run layers.0", "run layers.1"),
            *("gather layers.0", "reduce layers.1", "reduce layers.0"),
            f"reduce norm, {FIRST}",
        ],
    ),
    # A block's experts are gathered before the block ahead of it waits for the counts of its rows.
    "experts": (
        4,
        [*EXPERTS, f"{P}expert_parallel_degree=2"],
        [
            *(f"gather {FIRST}", "gather layers.0", "gather layers.0.moe.experts"),
            *("gather layers.1", "gather layers.1.moe.experts", "run layers.0"),
            *(f"gather {LAST}", "run layers.1"),
            *(f"reduce {LAST}", "gather layers.0", "gather layers.0.moe.experts"),
            *("reduce layers.1.moe.experts", "reduce layers.1"),
            *("reduce layers.0.moe.experts", "reduce layers.0"),
            f"reduce {FIRST}",
        ],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_order_and_gradients(ranks, tmp_path, layout):
    world, extra, expected = LAYOUTS[layout]
    model = [flag for flag in extra if not flag.startswith(P)]
    ((_, _, whole, _),) = step_of(1, tmp_path / "one", ranks, *model)
    for units, events, gradients, moved in step_of(world, tmp_path, ranks, *extra):
        assert events == expected
        assert sorted(units) == sorted(e.split(" ", 1)[1] for e in events if e[:6] == "reduce")
        assert moved == []  # a checkpoint's tensors from before the first step
        for name, gradient in gradients.items():
            assert_rounds(gradient, whole[name], of=name)


def test_units_of_a_pipeline(ranks, tmp_path):
    """Stages have the ends that they hold; the schedule gathers all units of a stage at once."""
    flags = ["--model.overrides.n_layers=4", f"{P}pipeline_parallel_degree=2"]
    results = step_of(4, tmp_path, ranks, *flags, "--training.local_batch_size=4")
    first, last = (units for units, *_ in results[::2])
    held = [name for name in (*first, *last) if name.startswith("layers")]
    assert first[0] == FIRST
    assert last[-1] == LAST
    assert [*first[1:], *last[:-1]] == held == [f"layers.{i}" for i in range(4)]
