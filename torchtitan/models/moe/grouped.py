"""Products of groups of rows with one weight each: `torchtitan::grouped_mm` and its backward, as
operations that activation checkpointing, the compiler, FLOP counters and the planner see by name.

On CUDA they are torch's `grouped_mm`: one kernel for all groups. On the CPU a loop over the groups
is 2.6 times as fast as torch's operation, which also has no fake kernel for fp32 before torch 2.14,
and counts no FLOPs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows `[n, inputs]` by the weights `[groups, outputs, inputs]` of their groups: `[n,
    outputs]`.

    Args:
        ends: `[groups]` int32, the index after the last row of each group. The results of rows
            after the last end are undefined on CUDA, and zero on the CPU.
    """
    return torch.ops.torchtitan.grouped_mm(rows, weight, ends)


@torch.library.custom_op("torchtitan::grouped_mm", mutates_args=())
def _grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool = False) -> Tensor:
    """`grouped_mm`; if `transposed`, weights are `[groups, inputs, outputs]`."""
    if rows.device.type == "cuda" and len(rows):  # without rows its kernel can't be launched
        return F.grouped_mm(rows, weight if transposed else weight.transpose(-2, -1), offs=ends)
    out = rows.new_empty(len(rows), weight.shape[2 if transposed else 1])
    if not len(rows):
        return out
    start = 0
    for matrix, end in zip(weight.unbind(), ends.tolist(), strict=True):
        if end > start:
            torch.mm(rows[start:end], matrix if transposed else matrix.t(), out=out[start:end])
        start = end
    out[start:].zero_()
    return out


@torch.library.custom_op("torchtitan::grouped_outer", mutates_args=())
def _grouped_outer(columns: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """The product, for each group, of its columns `[m, n]^T` and rows `[n, k]`: `[groups, m,
    k]`.
    """
    if not len(columns):
        return columns.new_zeros(len(ends), columns.shape[1], rows.shape[1])
    if columns.device.type == "cuda":
        return _without_empty_groups(F.grouped_mm(columns.t(), rows, offs=ends), ends)
    out = columns.new_empty(len(ends), columns.shape[1], rows.shape[1])
    start = 0
    for i, end in enumerate(ends.tolist()):
        torch.mm(
            columns[start:end].t(), rows[start:end], out=out[i]
        )  # zeros for a group without rows
        start = end
    return out


def _without_empty_groups(products: Tensor, ends: Tensor) -> Tensor:
    """`products` with zeros for groups without rows, which Blackwell's kernel leaves unwritten."""
    if torch.cuda.get_device_capability(products.device) < (10, 0):
        return products
    return zero_empty_groups(products, ends)


def zero_empty_groups(products: Tensor, ends: Tensor) -> Tensor:
    """Set the products `[groups, m, k]` of groups without rows to zero."""
    empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return products.masked_fill_(empty.view(-1, 1, 1), 0)


@_grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool = False) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2 if transposed else 1])


@_grouped_outer.register_fake
def _(columns: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return columns.new_empty(ends.shape[0], columns.shape[1], rows.shape[1])


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, ends, ctx.transposed = inputs
    ctx.save_for_backward(rows, weight, ends)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, ends = ctx.saved_tensors
    gradient = gradient.contiguous()  # torch's kernel refuses an expanded one
    grad_rows = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_rows = torch.ops.torchtitan.grouped_mm(gradient, weight, ends, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        pair = (rows, gradient) if ctx.transposed else (gradient, rows)
        grad_weight = torch.ops.torchtitan.grouped_outer(*pair, ends)
    return grad_rows, grad_weight, None, None


_grouped_mm.register_autograd(_backward, setup_context=_save_inputs)


class _SwiGLU(torch.autograd.Function):
    """Keeps the input and two of its products for the backward, which computes the third product's
    input again.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, ends: Tensor) -> Tensor:
        gate = grouped_mm(rows, w1, ends)
        up = grouped_mm(rows, w3, ends)
        ctx.save_for_backward(rows, gate, up, w1, w2, w3, ends)
        return grouped_mm(F.silu(gate).mul_(up), w2, ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, gate, up, w1, w2, w3, ends = ctx.saved_tensors
        mm = torch.ops.torchtitan.grouped_mm
        outer = torch.ops.torchtitan.grouped_outer
        gradient = gradient.contiguous()  # torch's kernel refuses an expanded one
        grad_hidden = mm(gradient, w2, ends, True)
        hidden = F.silu(gate)
        grad_up = grad_hidden * hidden
        grad_w2 = outer(gradient, hidden.mul_(up), ends)
        del hidden, gradient
        grad_gate = torch.ops.aten.silu_backward(grad_hidden.mul_(up), gate)
        del grad_hidden
        grad_rows = mm(grad_gate, w1, ends, True).add_(mm(grad_up, w3, ends, True))
        return grad_rows, outer(grad_gate, rows, ends), grad_w2, outer(grad_up, rows, ends), None


def grouped_swiglu(rows: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, ends: Tensor) -> Tensor:
    """`w2(silu(w1(rows)) * w3(rows))` by grouped products, which keeps half as much for the
    backward.
    """
    return _SwiGLU.apply(rows, w1, w2, w3, ends)


class _Bias(torch.autograd.Function):
    """`grouped_bias`. Its backward is a grouped product, which needs no atomics."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        positions = torch.arange(len(rows), device=rows.device)
        groups = torch.searchsorted(ends, positions, right=True).clamp_(max=len(ends) - 1)
        return rows + bias.index_select(0, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (ends,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        ones = gradient.new_ones(len(gradient), 8)  # torch's kernel needs 8 columns
        grad_bias = torch.ops.torchtitan.grouped_outer(gradient, ones, ends)[:, :, 0]
        return gradient, grad_bias, None


def grouped_bias(rows: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """Add to rows `[n, width]` the biases `[groups, width]` of their groups."""
    return _Bias.apply(rows, bias, ends)


@register_flop_formula(torch.ops.torchtitan.grouped_mm)
def _flops(rows: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.torchtitan.grouped_outer)
def _outer_flops(columns: Any, rows: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * columns[0] * columns[1] * rows[1]
