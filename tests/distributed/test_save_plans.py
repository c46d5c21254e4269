"""What ranks send each other to save: the same number of messages for any number of ranks, and
plans only once.
"""

import contextlib
import pickle
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoints import ABOUT, outcome, save_steps, small_checkpointer, train_state
from torchtitan.checkpoint import Checkpointer, Trained
from torchtitan.checkpoint.save import CommittingWriter, Plans, UnsentMetadata
from torchtitan.config.sections import schema


class Collectives(TorchDispatchMode):
    """Counts collectives of tensors."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in function.namespace and "wait" not in function.name():
            self.count[function.name()] += 1
        return function(*args, **(kwargs or {}))


class Objects:
    """Replaces the exchange of objects on a fake world, whose other ranks have none; keeps rank
    0's.
    """

    def __init__(self):
        self.sent = []

    def gather_object(self, obj, object_gather_list, **_):
        self.sent.append(("gather_object", obj))
        object_gather_list[:] = [obj] * len(object_gather_list)

    def scatter_object_list(self, scatter_object_output_list, scatter_object_input_list, **_):
        self.sent.append(("scatter_object_list", scatter_object_input_list))
        scatter_object_output_list[0] = scatter_object_input_list[0]

    def broadcast_object_list(self, object_list, **_):
        self.sent.append(("broadcast_object_list", object_list[0]))

    def all_gather_object(self, object_list, obj, **_):
        self.sent.append(("all_gather_object", obj))
        object_list[:] = [obj] * len(object_list)


@contextlib.contextmanager
def fake_world(size):
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def saves(folder, world):
    """What rank 0 of a world exchanges in each of three saves: objects, and collectives of
    tensors.
    """
    objects = Objects()
    found = []
    with fake_world(world), contextlib.ExitStack() as stack:
        for name in (
            "gather_object",
            "scatter_object_list",
            "broadcast_object_list",
            "all_gather_object",
        ):
            stack.enter_context(mock.patch.object(dist, name, getattr(objects, name)))
        stack.enter_context(mock.patch.object(dist, "new_group", return_value=None))
        stack.enter_context(mock.patch.object(CommittingWriter, "finish"))
        # Copies of rank 0's parts don't fill the tensors.
        plan = mock.patch.object(
            DefaultSavePlanner,
            "_create_global_plan",
            lambda _, plans: (plans, Metadata({"a" * 10_000: None})),
        )
        stack.enter_context(plan)
        model = nn.Sequential(*(nn.Linear(world, world) for _ in range(3)))
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        optimizer = torch.optim.AdamW(model.parameters())
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        config = schema.Checkpoint(enable=True, folder=str(folder), keep_latest_k=0)
        checkpointer = Checkpointer(config, "", Trained([model], optimizer), ABOUT)
        objects.sent.clear()
        for step in (1, 2, 3):
            with Collectives() as tensors:
                checkpointer.save(step, train_state(step))
            found.append((objects.sent[:], tensors.count))
            objects.sent.clear()
        checkpointer._plans.forget()
    return found


@pytest.mark.parametrize("world", [8, 512])
def test_a_save_costs_the_same_messages_on_any_number_of_ranks(tmp_path, world):
    first, second, third = saves(tmp_path, world)
    for sent, tensors in (first, second, third):
        assert [name for name, _ in sent] == [
            "gather_object",
            "scatter_object_list",
            "gather_object",
            "broadcast_object_list",
        ]
        assert not tensors, "optimizer state is saved as it is sharded"
    plan = first[0][0][1]
    assert len(plan.items) == 6 * 4, (
        "three linear layers with bias: the weights, two moments and a counter"
    )
    assert all(len(plans) == world and plans[0].items for plans in [first[0][1][1]])
    for sent, _ in (second, third):
        assert not sent[0][1].items, "the plan has not changed"
        assert not any(plan.items for plan in sent[1][1])
    for sent, _ in (first, second, third):
        assert isinstance(sent[3][1], Metadata)
        assert len(pickle.dumps(sent[3][1])) < 1000, "nobody needs the metadata but rank 0"


def save_changing(folder):
    """Save states that change in between, with plans that are kept. Called by both ranks."""
    plans = Plans()
    usable = []
    out = []
    create = DefaultSavePlanner.create_global_plan

    def counted(self, all_plans):
        usable.append([plan.usable for plan in all_plans])
        return create(self, all_plans)

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    a, b = (
        dist.tensor.distribute_tensor(torch.rand(5, 3), mesh, [dist.tensor.Shard(0)])
        for _ in range(2)
    )
    c = torch.rand(3)
    own = {f"rank {dist.get_rank()}": torch.rand(2)}
    states = [
        {"a": a, "c": c},
        {"a": a + 1, "c": c},
        {"a": a + 2, "c": c, "b": b},
        {"b": b + 1, "c": c},
    ]
    states += [{"b": b, **own}, {"b": b + 1, **own}, {"b": b, "more": c}, {"b": b, "more": c}]
    if dist.get_rank() == 1:
        states[-1] = states[-1] | {"of rank 1": torch.ones(2)}
    with mock.patch.object(DefaultSavePlanner, "create_global_plan", counted):
        for step, state in enumerate(states, 1):
            writer = CommittingWriter(
                folder / f"step-{step}",
                {"step": step, "model_only": True, "train_state": None, **ABOUT},
            )
            dcp.save({"model": dict(state)}, storage_writer=writer, planner=plans.planner("all"))
            target = {name: torch.zeros_like(value) for name, value in state.items()}
            dcp.load({"model": target}, checkpoint_id=folder / f"step-{step}", no_dist=True)
            out.append(
                [torch.equal(whole(target[name]), whole(value)) for name, value in state.items()]
            )
    plans.forget()
    return usable, out


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, dist.tensor.DTensor) else tensor


def test_plans_follow_what_is_saved(ranks, tmp_path):
    (usable, own), (_, other) = ranks(2, save_changing, tmp_path)
    assert all(map(all, own + other)), "every checkpoint holds what was saved"
    assert usable == [
        [True, True],
        [False, False],  # other values
        [True, True],  # another tensor
        [True, True],  # one less
        [True, True],
        [False, False],
        [True, True],
        [False, True],  # another tensor on rank 1 alone
    ]


def after_a_failure(folder):
    """A save fails after the plans were exchanged; then another run saves in the same processes."""
    checkpointer = small_checkpointer(folder)
    for param in checkpointer.trained.models[0].parameters():
        param.grad = torch.zeros_like(param)
    checkpointer.trained.optimizer.step()
    checkpointer.save(1, train_state(1))
    with (
        mock.patch.object(CommittingWriter, "finish", side_effect=OSError("full")),
        pytest.raises(Exception, match="full"),
    ):
        checkpointer.save(2, train_state(2))
    checkpointer.save(3, train_state(3))
    checkpointer.close()
    save_steps(folder, 4)
    return outcome(folder)


def test_a_failed_save_forgets_the_plans(ranks, tmp_path):
    assert ranks(2, after_a_failure, tmp_path / "checkpoint") == [4, 4]
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == [
        "step-1",
        "step-3",
        "step-4",
    ]


def test_metadata_that_is_not_sent_is_still_written():
    metadata = Metadata({"a": None}, storage_data={"b": 1})
    assert UnsentMetadata.of(metadata).plain() == metadata
    assert pickle.loads(pickle.dumps(UnsentMetadata.of(metadata))) == Metadata({})
