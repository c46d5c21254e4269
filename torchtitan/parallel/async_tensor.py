"""Asynchronous tensor parallelism: communication hidden behind the matrix product it belongs to.

Inductor's micro-pipeline pass fuses each all-gather with the products that follow, and each reduce-scatter with the
product before it, into symmetric-memory kernels that work piece by piece (Wang et al., ASPLOS 2023,
doi:10.1145/3567955.3567959). What it doesn't recognize it leaves alone without a word: hence the report.
"""

import logging
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed._symmetric_memory as symmetric_memory
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, Node

from torchtitan.utils.logging import logger

_FUSED = (
    "symm_mem::fused_all_gather_matmul",
    "symm_mem::fused_matmul_reduce_scatter",
    "symm_mem::fused_all_gather_scaled_matmul",
    "symm_mem::fused_scaled_matmul_reduce_scatter",
)
_MATMULS = ("aten::mm", "aten::_scaled_mm", "aten::bmm")
_RESHAPES = (
    "_c10d_functional::wait_tensor",
    "aten::split",
    "aten::cat",
    "aten::slice",
    "aten::view",
    "aten::_unsafe_view",
    "aten::reshape",
    "getitem",
)
_VIEWED_OR_CONCATENATED = collectives._maybe_view_chunk_cat
_entered = ExitStack()
# Warns of every graph without such collectives, as the loss has; what counts is in the report.
logging.getLogger("torch._inductor.fx_passes.micro_pipeline_tp").setLevel(logging.ERROR)


class FusionReport(CustomGraphPass):
    """Called on every graph that inductor compiles; counts what is fused and names what isn't."""

    def __init__(self) -> None:
        self.fused = 0
        self.left: list[str] = []

    def __call__(self, graph: Graph) -> None:
        fused = sum(_name(node) in _FUSED for node in graph.nodes)
        left = [text for node in graph.nodes if (text := _unfused(node))]
        self.fused += fused
        self.left += left
        logger.info(f"Asynchronous tensor parallelism: {fused} of {fused + len(left)} collectives of a graph are fused")
        for text in left:
            logger.warning(f"Asynchronous tensor parallelism: {text} is not fused, and waits")

    def uuid(self) -> None:
        """None: graphs are not taken from inductor's cache, which would skip the report."""
        return


def configure_async_tensor_parallel(mesh: DeviceMesh, *, enable: bool) -> None:
    """Switch the fusion over `mesh` on or off for what is compiled from now on."""
    inductor: Any = torch._inductor.config
    inductor._micro_pipeline_tp = enable
    inductor.post_grad_custom_post_pass = FusionReport() if enable else None
    collectives._maybe_view_chunk_cat = _concatenated if enable else _VIEWED_OR_CONCATENATED
    if not enable:
        return
    if mesh.device_type == "cpu":
        _use_cpu_kernels()
    else:
        symmetric_memory.enable_symm_mem_for_group(mesh.get_group().group_name)


@cache
def _use_cpu_kernels() -> None:
    """torch's own unfused fallbacks under the fused names: the same graphs and numbers, without the speed."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name in _FUSED:
        bare = name.removeprefix("symm_mem::")
        library.impl(bare, getattr(symmetric_memory, f"_{bare}_fallback"), "CPU")
    _entered.callback(library._destroy)
    _entered.enter_context(symmetric_memory._test_mode())
    # Wheels for the CPU lack NCCL, and without it the pass gives up before it looks at the graph.
    dist.is_nccl_available = lambda: True


def _concatenated(gathered: torch.Tensor, ranks: int, dim: int) -> torch.Tensor:
    """The ranks' parts, which a gather stacks along axis 0, along `dim`.

    torch gives a view instead where it can, which is at batch size 1, and then inductor doesn't see the gather.
    """
    return torch.cat(torch.chunk(gathered, ranks, dim=0), dim=dim)


def _name(node: Node) -> str:
    target: Any = node.target
    return target.name().partition(".")[0] if hasattr(target, "name") else getattr(target, "__name__", str(target))


def _unfused(node: Node) -> str | None:
    """What `node` is, if it is a collective at a matrix product that could have been fused with it."""
    if _name(node) == "_c10d_functional::all_gather_into_tensor":
        if product := _product_after(node):
            return f"the all-gather before {_where(product)}"
    elif _name(node) == "_c10d_functional::reduce_scatter_tensor" and (product := _product_before(node)):
        return f"the reduce-scatter after {_where(product)}"
    return None


def _product_after(node: Node) -> Node | None:
    """The matrix product whose left operand is the gathered tensor."""
    for user in node.users:
        if _name(user) in _MATMULS and user.args[0] is node:
            return user
        if _name(user) in _RESHAPES and (found := _product_after(user)):
            return found
    return None


def _product_before(node: Node) -> Node | None:
    """The matrix product whose result, and nothing else, is scattered."""
    for source in node.all_input_nodes[:1]:
        if _name(source) in _MATMULS:
            return source
        if _name(source) in _RESHAPES:
            return _product_before(source)
    return None


def _where(node: Node) -> str:
    """The module that `node` computes a part of."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else node.name
    return str(path).removeprefix("L['block'].").removeprefix("L['self'].")
