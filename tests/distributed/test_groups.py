"""Which process groups there are on CUDA, and what the CPU's tensors and objects travel over."""

import ast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.import_graph import ROOT
from torchtitan.checkpoint.save import Phases
from torchtitan.config import resolve
from torchtitan.config.sections.schema import Comm
from torchtitan.parallel import agree, groups
from torchtitan.parallel.mesh import build_mesh

AXES = ["pipeline", "tensor", "context", "expert"]


@pytest.fixture
def on_cuda(monkeypatch):
    """Rank 0 of 32 on what torch takes for CUDA. Yields the groups made: their ranks and backend.

    NCCL is the fake backend, which has no CPU then, as NCCL has none.
    """
    made = []
    create = c10d._new_process_group_helper
    init = dist.init_process_group

    def nccl(backend, **others):
        assert backend == "nccl"
        assert "device_id" not in others
        init("cuda:fake", store=FakeStore(), rank=0, world_size=32)

    def created(size, rank, ranks, backend, *args, **kwargs):
        made.append((tuple(ranks or range(size)), str(backend)))
        fake = "cpu:fake" if backend == "gloo" else backend
        return create(size, rank, ranks, fake, *args, **kwargs)

    monkeypatch.setattr(dist, "init_process_group", nccl)
    monkeypatch.setattr(dist, "split_group", mock.Mock(side_effect=AssertionError))
    monkeypatch.setattr(c10d, "split_group", mock.Mock(side_effect=AssertionError))
    monkeypatch.setattr(c10d, "_new_process_group_helper", created)
    for name in ("is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    groups.init_distributed(Comm(), torch.device("cuda", 5))
    yield made
    dist.destroy_process_group()


def test_axes_have_nccl_alone_and_one_group_has_gloo(on_cuda):
    degrees = [f"--parallelism.{axis}_parallel_degree=2" for axis in AXES]
    replicas = "--parallelism.data_parallel_replicate_degree=2"
    config = resolve(
        ["--model.name=qwen3_moe", "--model.flavor=debugmodel", *degrees, replicas], 32
    )
    mesh = build_mesh(config.config, "cuda", experts=True)
    assert dist.group.WORLD.bound_device_id is None
    every = tuple(range(32))
    assert [ranks for ranks, backend in on_cuda if backend == "gloo"] == [every]
    assert {backend for _, backend in on_cuda} == {"gloo", "cuda:fake"}
    axes = [mesh.batch_group, mesh.loss_group, *mesh.expert_fsdp.get_all_groups()]
    axes += [*mesh.ep.get_all_groups(), *mesh.fsdp.get_all_groups(), *mesh.world.get_all_groups()]
    assert {kind.type for group in axes for kind in group._device_types} == {"cuda"}
    assert groups.cpu_group()._device_types == [torch.device("cpu")]
    assert groups.cpu_group() is groups.cpu_group()


def test_a_barrier_names_the_device(on_cuda, monkeypatch):
    barrier = mock.Mock()
    monkeypatch.setattr(dist, "barrier", barrier)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    groups.barrier()
    barrier.assert_called_once_with(device_ids=[5])


def without_cpu():
    """Exchange objects and the CPU's tensors in a world that, as NCCL's, has none."""
    rank = dist.get_rank()
    before = dist.group.WORLD
    c10d._update_default_pg(dist.new_group(backend="cuda:gloo"))
    try:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(()))
        sums = Phases().run(lambda: [rank + 1]).tolist()
        return agree.from_rank_0(f"from {rank}"), agree.from_all(rank), sums
    finally:
        c10d._update_default_pg(before)


def test_objects_and_the_cpus_tensors_need_no_world_with_gloo(ranks):
    zero, one = ranks(2, without_cpu)
    assert zero == one == ("from 0", [0, 1], [3, 0, 0])


COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "barrier", "monitored_barrier", "new_group"),
}


def test_every_exchange_of_objects_names_its_group():
    """All calls of the package: a new one without `cpu_group` would need the GPU, or fail."""
    calls = set()
    for path in (ROOT / "torchtitan").rglob("*.py"):
        if path.is_relative_to(ROOT / "torchtitan/tools/rehearsal"):  # its stand-ins
            continue
        text = path.read_text()
        nodes = ast.walk(ast.parse(text)) if any(name in text for name in COLLECTIVES) else ()
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                name = getattr(node.func, "attr", getattr(node.func, "id", None))
                if name in COLLECTIVES:
                    calls.add(f"{path.relative_to(ROOT / 'torchtitan')}: {ast.unparse(node)}")
    assert calls == {
        "checkpoint/manager.py: dist.new_group(backend='gloo', group_desc=CHECKPOINT_GROUP)",
        "commands/parity.py: barrier()",
        "parallel/agree.py: dist.all_gather_object(values, value, group=group)",
        "parallel/agree.py: dist.broadcast_object_list(box, src=0, group=cpu_group())",
        "parallel/groups.py: barrier()",
        "parallel/groups.py: dist.barrier(cpu_group())",
        "parallel/groups.py: dist.barrier(device_ids=[torch.cuda.current_device()] "
        "if on_cuda else None)",
        "parallel/groups.py: dist.new_group(backend='gloo', timeout=timeout, group_desc='cpu')",
        "testing/observe.py: dist.gather_object(tensors, by_rank if is_rank_0 else None, "
        "group=cpu_group())",
        "testing/ranks.py: dist.barrier()",  # of gloo ranks
        "train/trainer.py: barrier()",
    }
