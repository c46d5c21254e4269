"""Workarounds end where they should."""

import shutil
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchtitan.utils.distributed_compat import run_gloo_in_order
from torchtitan.utils.torch_compat import (
    gathers_without_views,
    micro_pipeline_without_nccl,
    replaced,
)


def test_replaced_values_are_restored_after_an_error():
    from torch._functorch import config

    before = config.donated_buffer

    def fail():
        assert config.donated_buffer is not before
        raise RuntimeError

    with pytest.raises(RuntimeError), replaced(config, donated_buffer=not before):
        fail()
    assert config.donated_buffer is before


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
def test_torch_claims_nccl_only_while_the_micro_pipeline_pass_runs(monkeypatch):
    from torch._inductor.fx_passes import post_grad

    seen = []
    monkeypatch.setattr(
        post_grad, "micro_pipeline_tp_pass", lambda graph: seen.append(dist.is_nccl_available())
    )
    truth = dist.is_nccl_available()
    original = post_grad.micro_pipeline_tp_pass
    with micro_pipeline_without_nccl():
        assert dist.is_nccl_available() == truth
        post_grad.micro_pipeline_tp_pass(torch.fx.Graph())
        assert dist.is_nccl_available() == truth
    assert seen == [True]
    assert post_grad.micro_pipeline_tp_pass is original


def test_gathers_are_concatenated_only_within():
    from torch.distributed import _functional_collectives as collectives

    gathered = torch.arange(8.0).view(4, 1, 2)
    with gathers_without_views():
        parts = collectives._maybe_view_chunk_cat(gathered, 4, 1)
    assert torch.equal(parts, gathered.view(1, 4, 2))
    assert parts.untyped_storage().data_ptr() != gathered.untyped_storage().data_ptr()
    before = collectives._maybe_view_chunk_cat(gathered, 4, 1)
    assert torch.equal(before, parts)


def threads_for_collectives():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop")


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize("interfaces", ["", "lo"])
def test_a_gloo_group_has_one_thread_for_its_collectives(monkeypatch, interfaces):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    run_gloo_in_order()
    timeout = timedelta(seconds=7)
    before = threads_for_collectives()
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timeout)
    assert group.options._timeout == timeout
    total = torch.ones(2)
    for _ in range(100):
        group.allreduce([total]).wait()  # a thread names itself once it runs
    assert threads_for_collectives() == before + 1
    assert total.tolist() == [1, 1]
