"""FSDP's units: what each holds, and when it is gathered and reduced beside what is computed."""

import dataclasses
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rounding import assert_rounds
from tests.runs import arguments, full
from torchtitan.config import resolve
from torchtitan.config.derive import replace
from torchtitan.config.rules import Accelerator, Facts, problems
from torchtitan.parallel.collectives import local
from torchtitan.parallel.precision.copies import WeightCopies
from torchtitan.train.build import build
from torchtitan.train.preflight import preflight
from torchtitan.train.step import HostUpdate, build_update, forward_backward, train_step
from torchtitan.utils.torch_compat import torch_is_before_2_13

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


def train_two_steps(argv):
    """What happens from the first step's update on, if the loss is read after the second step."""
    config = resolve(argv, dist.get_world_size()).config
    engine = build(config, preflight(config), torch.device("cpu"))
    (model,) = engine.models
    names = {id(p): name for name, p in model.named_parameters()}
    events = []
    for name, layer in model.layers.items():
        layer.register_forward_hook(lambda *_, name=name: events.append(f"run layers.{name}"))

    def recorded(function, word):
        def call(*args, **kwargs):
            params = args[0] if word in ("gather", "reduce") else ()
            of = unit(names[id(p.sharded_param)] for p in params)
            events.append(f"{word} {of}".strip())
            return function(*args, **kwargs)

        return call

    gather = recorded(_fsdp_param_group.foreach_all_gather, "gather")
    reduce = recorded(_fsdp_param_group.foreach_reduce, "reduce")
    engine.optimizer.step = recorded(engine.optimizer.step, "update")
    update = build_update(engine)
    with patch.multiple(_fsdp_param_group, foreach_all_gather=gather, foreach_reduce=reduce):
        for batch, _ in zip(engine.loader, range(2), strict=False):
            train_step(engine, batch, update=update)
    engine.loader.close()
    return events[events.index("update") :]


def test_what_no_compute_hides(ranks, tmp_path):
    """After an update, two gathers before the first block; before the next, two reductions."""
    argv = arguments(tmp_path, *SIZES, local_batch=4)
    (events, _) = ranks(2, train_two_steps, argv)
    assert events == ["update", *DENSE, "update"]
    assert DENSE[:2] == [f"gather {FIRST}", "gather layers.0"]
    assert DENSE[-2:] == ["reduce layers.0", f"reduce {FIRST}"]


def option_calls(argv, buffers):
    """Calls of FSDP's experimental options by all units."""
    config = resolve(argv, dist.get_world_size()).config
    setup = preflight(config)
    names = ("set_symm_mem_for_comm", "set_reduce_scatter_max_input_buffers")
    with ExitStack() as stack:
        mocks = [stack.enter_context(patch.object(FSDPModule, name)) for name in names]
        build(replace(config, "parallelism.fsdp_buffers", buffers), setup, torch.device("cpu"))
    return [{str(call) for call in mock.call_args_list} for mock in mocks]


def test_buffers_of_collectives(ranks, tmp_path):
    """Two options, and where they can't work."""
    if torch_is_before_2_13():
        pytest.skip("refused with torch before 2.13")
    argv = arguments(tmp_path, *SIZES)
    calls = {x: ranks(2, option_calls, argv, x)[0] for x in ("symmetric_memory", "two_reductions")}
    assert calls == {
        "symmetric_memory": [{"call()"}, set()],
        "two_reductions": [set(), {"call(2, recurse=False)"}],
    }
    cpu, gpu = Accelerator("a CPU", (0, 0)), Accelerator("an H100", (9, 0))
    config = resolve([f"{P}fsdp_buffers=two_reductions"], 2).config
    facts = Facts(device=gpu, old_torch=False)
    assert not problems(config, facts)
    for change in ({"device": cpu}, {"old_torch": True}):
        (problem,) = problems(config, dataclasses.replace(facts, **change))
        assert 'newer; set it to "default"' in problem


# ---- one rank


class Copied(TorchDispatchMode):
    """Counts operations, and the bytes that copies and sums read and write."""

    def __init__(self):
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name in ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_", "aten::_foreach_add_"):
            target = args[0] if name.endswith("_") else out
            source = args[1] if name.endswith("_") else args[0]
            reads_target = name.endswith("add_")
            self.calls += 1
            self.bytes += size(target) * (1 + reads_target) + size(source)
        return out


def size(tensors):
    return sum(x.nbytes for x in ([tensors] if isinstance(tensors, torch.Tensor) else tensors))


def train_on_one_rank(argv):
    """Losses and weights of two steps; and of the second the calls of copies, and bytes of each
    parameter, outside of modules and the loss.
    """
    engine = build((config := resolve(argv, 1).config), preflight(config), torch.device("cpu"))
    count = Copied()
    owners = [(WeightCopies, name) for name in ("insert", "take_gradients")]
    group = _fsdp_param_group.FSDPParamGroup
    owners += [(group, name) for name in ("wait_for_unshard", "post_backward")]

    def counted(function):
        def run(*args, **kwargs):
            with count:
                return function(*args, **kwargs)

        return run

    results = []
    with ExitStack() as stack:
        for owner, name in owners:
            stack.enter_context(patch.object(owner, name, counted(getattr(owner, name))))
        for batch, _ in zip(engine.loader, range(2), strict=False):
            count.calls = count.bytes = 0
            results.append(train_step(engine, batch).loss)
    engine.loader.close()
    (model,) = engine.models
    weights = {name: full(p).clone() for name, p in model.named_parameters()}
    parameters = sum(x.numel() for x in weights.values())
    return results, weights, count.calls, count.bytes / parameters


@pytest.mark.parametrize(("batches", "calls", "moved"), [(1, 2, 12), (2, 3, 22)])
def test_one_rank_casts_once(ranks, tmp_path, batches, calls, moved):
    """A step casts all weights together (4 + 2 bytes), and each batch's gradients (2 + 4), to whose
    sum the next are added (4 + 2 + 4). FSDP, as with "always", casts and copies each weight before
    its forward and its backward, and copies gradients twice: 12 blocks of 9 weights would be 432
    launches more. The numbers are the same, bit for bit.
    """
    flags = ["--training.mixed_precision_param=bfloat16", *SIZES]
    argv = arguments(tmp_path, *flags, local_batch=8 // batches)
    ((losses, weights, *counts),) = ranks(1, train_on_one_rank, argv)
    assert counts == [calls, moved]
    by_fsdp = [*argv, f"{P}fsdp_reshard_after_forward=always"]
    ((others, reference, fsdp_calls, _),) = ranks(1, train_on_one_rank, by_fsdp)
    assert losses == others
    assert all(torch.equal(weights[name], reference[name]) for name in reference)
    assert fsdp_calls >= batches * 2 * (len(weights) + 2 * 9)  # the counter sees it
