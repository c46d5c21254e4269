# mypy: disable-error-code="no-untyped-def"
"""`chunk_states` and its gradients as Triton kernels: one launch for all chunks.

A program keeps some columns of one head's state in registers, in fp32, from the first chunk to the
last, or of the state's gradient from the last to the first. Importing this module needs triton,
which comes with torch's builds for CUDA.

Shapes: those of `torchtitan.models.delta.rule`, whose operators call `forward` and `backward`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 32
"""Columns of a state per program: of 128 x 32, each of 128 threads holds 32 elements."""

PRECISION = tl.constexpr("tf32x3")
"""Products of fp32 on tensor cores: each number is the sum of two of TF32, and three of their four
products are added. That is as exact as fp32, within a few roundings; TF32 alone keeps 10 bits.
"""


def forward(
    reads: Tensor, values: Tensor, keys: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`chunk_states`, for fp32."""
    states = state.new_empty(len(decay), *state.shape)
    stored, last = values.new_empty(values.shape), state.new_empty(state.shape)
    strides = reads.stride(), values.stride(), keys.stride()
    inputs = reads, values, keys, decay.contiguous(), state.contiguous()
    _launch(_forward, (*inputs, states, stored, last, *strides), keys, values)
    return states, stored, last


def backward(
    grad_states: Tensor,
    grad_stored: Tensor,
    grad_last: Tensor,
    reads: Tensor,
    keys: Tensor,
    decay: Tensor,
    states: Tensor,
    stored: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`chunk_states_backward`, for fp32.

    The gradients of `reads` and `keys` sum over the columns of all programs, so they are products
    after the kernel, which keeps the gradient of the state after each chunk.
    """
    grad_values, afters = stored.new_empty(stored.shape), states.new_empty(states.shape)
    grad_state = grad_last.new_empty(grad_last.shape)
    grad_decay = decay.new_empty(*decay.shape, triton.cdiv(stored.shape[-1], COLUMNS))
    inputs = grad_states.contiguous(), grad_stored, grad_last.contiguous(), reads, keys
    outputs = grad_values, afters, grad_decay, grad_state
    strides = grad_stored.stride(), reads.stride(), keys.stride()
    arguments = *inputs, decay.contiguous(), states, *outputs, *strides
    _launch(_backward, arguments, keys, stored)
    states, afters = states.flatten(0, 1).mT, afters.flatten(0, 1).mT
    grad_reads = torch.bmm(grad_values.flatten(0, 1), states).neg_().view(keys.shape)
    grad_keys = torch.bmm(stored.flatten(0, 1), afters).view(keys.shape)
    return grad_reads, grad_values, grad_keys, grad_decay.sum(-1), grad_state


def _launch(kernel: Any, arguments: tuple[Any, ...], keys: Tensor, values: Tensor) -> None:
    """Run a program per head and block of columns. Blocks have powers of 2, products at least 16
    rows.
    """
    chunks, heads, c, d = keys.shape
    e = values.shape[-1]
    rows, key = (max(16, triton.next_power_of_2(size)) for size in (c, d))
    grid = heads, triton.cdiv(e, COLUMNS)
    kernel[grid](*arguments, chunks, c, d, e, rows, key, COLUMNS, num_warps=4, num_stages=2)


@triton.jit
def _forward(
    reads,
    values,
    keys,
    decay,
    state,
    states,
    stored,
    last,
    reads_strides,
    values_strides,
    keys_strides,
    chunks,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    KEY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head, heads = tl.program_id(0), tl.num_programs(0)
    c = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, KEY)
    e = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    of_keys = (c < C) & (d < D)[None, :]
    of_values = (c < C) & (e < E)
    of_state = (d < D)[:, None] & (e < E)
    in_state = head * D * E + d[:, None] * E + e

    # Pointers to the chunk at hand
    reads += head * reads_strides[1] + c * reads_strides[2] + d[None, :] * reads_strides[3]
    values += head * values_strides[1] + c * values_strides[2] + e * values_strides[3]
    keys += head * keys_strides[1] + c * keys_strides[2] + d[None, :] * keys_strides[3]
    stored += head * C * E + c * E + e
    states += in_state
    decay += head
    current = tl.load(state + in_state, of_state, other=0.0)
    for _ in range(chunks):
        tl.store(states, current, of_state)
        read = tl.load(reads, of_keys, other=0.0)
        value = tl.load(values, of_values, other=0.0)
        value -= tl.dot(read, current, input_precision=PRECISION)
        tl.store(stored, value, of_values)
        key = tl.load(keys, of_keys, other=0.0)
        current *= tl.load(decay)
        current += tl.dot(tl.trans(key), value, input_precision=PRECISION)
        reads += reads_strides[0]
        values += values_strides[0]
        keys += keys_strides[0]
        stored += heads * C * E
        states += heads * D * E
        decay += heads
    tl.store(last + in_state, current, of_state)


@triton.jit
def _backward(
    grad_states,
    grad_stored,
    grad_last,
    reads,
    keys,
    decay,
    states,
    grad_values,
    afters,
    grad_decay,
    grad_state,
    stored_strides,
    reads_strides,
    keys_strides,
    chunks,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    KEY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head, heads = tl.program_id(0), tl.num_programs(0)
    c = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, KEY)
    e = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    of_keys = (c < C) & (d < D)[None, :]
    of_values = (c < C) & (e < E)
    of_state = (d < D)[:, None] & (e < E)
    in_state = head * D * E + d[:, None] * E + e

    # Pointers to the chunk at hand. All chunks together may exceed 32 bits.
    i = tl.cast(chunks - 1, tl.int64)
    grad_stored += i * stored_strides[0] + head * stored_strides[1]
    grad_stored += c * stored_strides[2] + e * stored_strides[3]
    reads += i * reads_strides[0] + head * reads_strides[1]
    reads += c * reads_strides[2] + d[None, :] * reads_strides[3]
    keys += i * keys_strides[0] + head * keys_strides[1]
    keys += c * keys_strides[2] + d[None, :] * keys_strides[3]
    grad_values += i * heads * C * E + head * C * E + c * E + e
    grad_states += i * heads * D * E + in_state
    states += i * heads * D * E + in_state
    afters += i * heads * D * E + in_state
    decay += i * heads + head
    grad_decay += (i * heads + head) * tl.num_programs(1) + tl.program_id(1)
    after = tl.load(grad_last + in_state, of_state, other=0.0)
    for _ in range(chunks):
        tl.store(afters, after, of_state)
        state = tl.load(states, of_state, other=0.0)
        tl.store(grad_decay, tl.sum(tl.sum(state * after, 1), 0))
        key = tl.load(keys, of_keys, other=0.0)
        grad_value = tl.load(grad_stored, of_values, other=0.0)
        grad_value += tl.dot(key, after, input_precision=PRECISION)
        tl.store(grad_values, grad_value, of_values)
        read = tl.load(reads, of_keys, other=0.0)
        after = after * tl.load(decay) + tl.load(grad_states, of_state, other=0.0)
        after -= tl.dot(tl.trans(read), grad_value, input_precision=PRECISION)
        grad_stored -= stored_strides[0]
        reads -= reads_strides[0]
        keys -= keys_strides[0]
        grad_values -= heads * C * E
        grad_states -= heads * D * E
        states -= heads * D * E
        afters -= heads * D * E
        decay -= heads
        grad_decay -= heads * tl.num_programs(1)
    tl.store(grad_state + in_state, after, of_state)
