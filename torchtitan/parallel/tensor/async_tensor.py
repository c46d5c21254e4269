"""Asynchronous tensor parallelism: each collective overlaps with the product it feeds or follows.

Inductor's micro-pipeline pass fuses each all-gather with the products after it, and each
reduce-scatter with the product before it, into symmetric-memory kernels that communicate and
compute piece by piece (Wang et al., ASPLOS 2023, doi:10.1145/3567955.3567959). The pass silently
skips collectives it doesn't recognize, so `FusionReport` lists them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, Node

from torchtitan.utils.logging import logger
from torchtitan.utils.torch_compat import (
    gathers_without_views,
    micro_pipeline_without_nccl,
    replaced,
)

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


class FusionReport(CustomGraphPass):
    """Inspects all graphs that inductor compiles: counts fused collectives and lists the others."""

    def __init__(self) -> None:
        self.num_fused = 0
        self.unfused: list[str] = []

    def __call__(self, graph: Graph) -> None:
        count = sum(_name(node) in _FUSED for node in graph.nodes)
        unfused = list(filter(None, map(_describe_unfused, graph.nodes)))
        self.num_fused += count
        self.unfused += unfused
        total = count + len(unfused)
        logger.info(
            f"Asynchronous tensor parallelism: {count} of {total} collectives of a graph are fused"
        )
        for text in unfused:
            logger.warning(
                f"Asynchronous tensor parallelism: {text} is not fused and will not overlap"
            )

    def uuid(self) -> None:
        """None keeps graphs out of inductor's cache, which would bypass the report."""
        return


@contextmanager
def fused_collectives(mesh: DeviceMesh) -> Iterator[None]:
    """Fuse the collectives over `mesh` in all graphs compiled and run in this context."""
    with ExitStack() as stack:
        stack.enter_context(
            replaced(
                torch._inductor.config,
                _micro_pipeline_tp=True,
                post_grad_custom_post_pass=FusionReport(),
            )
        )
        stack.enter_context(gathers_without_views())
        if mesh.device_type == "cpu":
            stack.enter_context(_cpu_kernels())
            stack.enter_context(micro_pipeline_without_nccl())
        else:
            symmetric_memory.enable_symm_mem_for_group(mesh.get_group().group_name)
        yield


@contextmanager
def _cpu_kernels() -> Iterator[None]:
    """Run torch's fallbacks for the fused operators: the same graphs and numbers, no overlap."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name in _FUSED:
        bare = name.removeprefix("symm_mem::")
        library.impl(bare, getattr(symmetric_memory, f"_{bare}_fallback"), "CPU")
    try:
        with symmetric_memory._test_mode():
            yield
    finally:
        library._destroy()


def _name(node: Node) -> str:
    target: Any = node.target
    if hasattr(target, "name"):
        return target.name().partition(".")[0]
    return getattr(target, "__name__", str(target))


def _describe_unfused(node: Node) -> str | None:
    """Describes `node` if it is a collective that could have been fused with a matrix product."""
    product = None
    what = ""
    if _name(node) == "_c10d_functional::all_gather_into_tensor":
        product = _product_after(node)
        what = "all-gather before"
    elif _name(node) == "_c10d_functional::reduce_scatter_tensor":
        product = _product_before(node)
        what = "reduce-scatter after"
    return f"the {what} {_where(product)}" if product else None


def _product_after(node: Node) -> Node | None:
    """The matrix product whose left operand is the gathered tensor."""
    for user in node.users:
        if _name(user) in _MATMULS and user.args[0] is node:
            return user
        product = _product_after(user) if _name(user) in _RESHAPES else None
        if product:
            return product
    return None


def _product_before(node: Node) -> Node | None:
    """The matrix product whose result is scattered."""
    for source in node.all_input_nodes[:1]:
        if _name(source) in _MATMULS:
            return source
        if _name(source) in _RESHAPES:
            return _product_before(source)
    return None


def _where(node: Node) -> str:
    """Name of the module that `node` belongs to."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    path = node.name
    if stack:
        path, _ = list(stack.values())[-1]
    return str(path).removeprefix("L['block'].").removeprefix("L['self'].")
