"""Workarounds end where they should."""

import shutil
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch.utils.checkpoint import checkpoint

from torchtitan.config.sections.parallelism import Compile
from torchtitan.config.sections.schema import Config
from torchtitan.parallel.compile import configure_compiler
from torchtitan.utils.distributed_compat import run_gloo_in_order
from torchtitan.utils.torch_compat import (
    attention_without_random_numbers,
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


@pytest.mark.parametrize(
    ("shared_kib", "dim", "fits"),
    [(99, 2048, True), (99, 3072, False), (227, 4096, True), (227, 5120, False), (None, 64, False)],
)
def test_norms_read_rows_ahead_where_shared_memory_holds_them(monkeypatch, shared_kib, dim, fits):
    """Two rows of up to eight tensors with two bytes each, padded to a power of two."""
    options = torch._inductor.config.triton
    gpu = SimpleNamespace()  # ROCm doesn't state the size
    if shared_kib is not None:
        gpu.shared_memory_per_block_optin = shared_kib * 1024
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    config = Config(compile=Compile(enable=True))
    mesh = SimpleNamespace(tp=None)
    with replaced(options, mix_order_reduction_allow_multi_stages=True):
        configure_compiler(config, mesh, torch.device("cuda"), dim)
        assert options.mix_order_reduction_allow_multi_stages == fits
        configure_compiler(config, mesh, torch.device("cpu"), dim)
        assert options.mix_order_reduction_allow_multi_stages


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


def graphs_of_recomputed_attention(dropout):
    """Operators of the forward and of the backward, in which attention is recomputed."""
    graphs = []

    def record(module, _):
        graphs.append({str(node.target) for node in module.graph.nodes})
        return make_boxed_func(module.forward)

    def attend(x):
        return F.scaled_dot_product_attention(x.sin(), x, x, dropout_p=dropout)

    @torch.compile(
        fullgraph=True,
        backend=aot_autograd(
            fw_compiler=record, partition_fn=partitioners.min_cut_rematerialization_partition
        ),
    )
    def recomputed(x):
        return checkpoint(attend, x, use_reentrant=False)

    torch._dynamo.reset()
    recomputed(torch.ones(1, 2, 8, 4, requires_grad=True)).sum().backward()
    return graphs


def test_recomputed_attention_is_random_only_with_dropout():
    """Else torch moves the generator's state around it, in the forward and in the backward."""
    with attention_without_random_numbers():
        for operators in graphs_of_recomputed_attention(0.0):
            assert any("scaled_dot_product" in name for name in operators)
            assert not any("rng_state" in name for name in operators)
        for operators in graphs_of_recomputed_attention(0.5):
            assert any("rng_state" in name for name in operators)


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
