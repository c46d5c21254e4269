"""The gated delta rule (Yang et al., arXiv:2412.06464), and the convolution in front of it.

Each head keeps a matrix S that maps keys to values. A token lets it decay, and corrects what it
stores for the token's key:

    S_t = a_t S_{t-1} + k_t b_t (v_t - (a_t S_{t-1})^T k_t)^T        a_t = exp(g_t)
    o_t = S_t^T q_t

`recurrent_delta_rule` does this token by token, for generation. `chunked_delta_rule`, for training,
processes chunks of 64 tokens: within a chunk the corrections solve a triangular system (section 3
of the paper), so only one product per chunk depends on the chunk before.

A document starts with an empty state, and its convolution doesn't see earlier tokens.

Shapes: b batch, s sequence, h value heads, k key heads, d size of keys, e size of values; n chunks
of c tokens. A key head serves h / k consecutive value heads, its group.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from torchtitan.models.delta.args import CHUNK


def causal_convolution(x: Tensor, weight: Tensor, documents: Tensor | None = None) -> Tensor:
    """Each channel's weighted sum of the last `taps` tokens of its document, like `x`.

    Args:
        x: `[b, s, heads, size]`.
        weight: `[heads, size, taps]`; the last tap is the token's own.
        documents: `[b, s]`, the document of each token.
    """
    out = x * weight[..., -1]
    for back in range(1, min(weight.shape[-1], x.shape[1])):
        earlier = x[:, :-back] * weight[..., -1 - back]
        if documents is not None:
            is_other = documents[:, back:] != documents[:, :-back]
            earlier = earlier.masked_fill(is_other[..., None, None], 0.0)
        out = out + F.pad(earlier, (0, 0, 0, 0, back, 0))
    return out


def normalize(x: Tensor) -> Tensor:
    """`x` at length 1 along its last dimension, in fp32 at least."""
    x = x.to(_precision(x))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule token by token.

    Args:
        q, k: `[b, s, k, d]`, normalized by the caller, and q scaled.
        v: `[b, s, h, e]`.
        g: `[b, s, h]`, logarithm of the decay, at most 0.
        beta: `[b, s, h]`, 0 to 1: how much of a correction is stored.
        state: `[b, h, d, e]`, before the first token.

    Returns:
        Outputs `[b, s, h, e]` and the state after the last token, in the type of `state`.
    """
    group = v.shape[2] // k.shape[2]
    q, k = (x.to(state).repeat_interleave(group, dim=2) for x in (q, k))
    v, g, beta = (x.to(state) for x in (v, g, beta))
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        recall = torch.einsum("bhd,bhde->bhe", k[:, t], state)
        correction = beta[:, t, :, None] * (v[:, t] - recall)
        state = state + k[:, t, :, :, None] * correction[:, :, None]
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, t], state))
    return torch.stack(outputs, dim=1), state


def chunked_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`recurrent_delta_rule`, by matrix products over chunks of tokens.

    Args:
        state: before the first token. Default: empty.
        documents: `[b, s]`, the document of each token. Its first token finds an empty state,
            except the row's first token, which finds `state`.

    Returns:
        Outputs `[b, s, h, e]` in the type of `v`, and the last state `[b, h, d, e]` in fp32.
    """
    b, s, heads, d = k.shape
    group = v.shape[2] // heads
    size = min(CHUNK, s)
    input_dtype = v.dtype
    dtype = _precision(v)
    # [n, b, k, group, c, ...]: the chunks first, as they are processed one by one
    q, k, v = (_to_chunks(x.to(dtype), size, heads) for x in (q, k, v))
    g, beta = (_to_chunks(x.to(dtype).unsqueeze(-1), size, heads) for x in (g, beta))
    visible, began_before, continues = _document_masks(documents, size, v.device)

    # Since the chunk's start. In fp64, as differences matter, and a head may add 20 per token.
    decay = g.double().cumsum(-2)
    between = (decay - decay.mT).to(dtype).masked_fill(~visible, -torch.inf).exp()
    since_start = decay.to(dtype).exp()
    if began_before is not None:
        since_start = since_start * began_before
    until_end = (decay[..., -1:, :] - decay).to(dtype).exp()
    if continues is not None:
        until_end = until_end * continues

    # A token stores v less the value that the state before the chunk holds for its key, corrected
    # for the keys of its chunk by a triangular system: `values - reads @ state`.
    system = (k @ k.mT) * between * beta
    rhs = torch.cat([v * beta, (k * (since_start * beta)).expand(*v.shape[:-1], -1)], -1)
    values, reads = torch.linalg.solve_triangular(
        system, rhs, upper=False, unitriangular=True
    ).split([v.shape[-1], d], -1)
    if state is None:
        state = values.new_zeros(b, heads * group, d, values.shape[-1])
    states, writes, last = chunk_states(
        *(x.flatten(1, 3) for x in (reads, values, k * until_end)),
        since_start[..., -1, :].flatten(1),
        state.to(dtype).flatten(0, 1),
    )
    states, writes = (x.unflatten(1, (b, heads, group)) for x in (states, writes))
    out = (q * since_start) @ states + ((q @ k.mT) * between) @ writes
    out = out.permute(1, 0, 4, 2, 3, 5).reshape(b, -1, heads * group, out.shape[-1])
    return out[:, :s].to(input_dtype), last.unflatten(0, (b, -1))


def _precision(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _to_chunks(x: Tensor, size: int, heads: int) -> Tensor:
    """`[b, s, h, d]` as `[n, b, k, group, c, d]`, the last chunk padded with zeros.

    A padding token changes no state: its g, beta, k and v are 0.
    """
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    x = x.unflatten(2, (heads, -1)).unflatten(1, (-1, size))
    return x.permute(1, 0, 3, 4, 2, 5).contiguous()


def _document_masks(
    documents: Tensor | None, size: int, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Masks of documents, within chunks of `size` and beyond them.

    Returns:
        `[n, b, 1, 1, c, c]` (or `[c, c]`): the second token isn't after the first one, and in its
        document. `[n, b, 1, 1, c, 1]` each: the token's document began before its chunk, and
        continues until the chunk's end.
    """
    causal = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    if documents is None:
        return causal, None, None
    changes = documents[:, 1:] != documents[:, :-1]
    index = F.pad(changes.long(), (1, -documents.shape[1] % size)).cumsum(1)
    index = index.unflatten(1, (-1, size)).transpose(0, 1)[:, :, None, None, :, None]
    last = index[..., -1:, :]
    before = torch.cat([index[:1, ..., :1, :], last[:-1]])
    return causal & (index == index.mT), index == before, index == last


# ---- the states between chunks


@torch.library.custom_op("torchtitan::chunk_states", mutates_args=())
def chunk_states(
    reads: Tensor, values: Tensor, keys: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence of the chunked rule, from chunk to chunk:

        writes_i = values_i - reads_i S_i        S_i+1 = decay_i S_i + keys_i^T writes_i

    A custom operator, because the compiler would unroll the loop.

    Args:
        reads, keys: `[n, heads, c, d]`.
        values: `[n, heads, c, e]`.
        decay: `[n, heads]`.
        state: `[heads, d, e]`, S_0.

    Returns:
        The state before each chunk `[n, heads, d, e]`, `writes` `[n, heads, c, e]`, and the state
        after the last chunk `[heads, d, e]`.
    """
    states, writes, _ = _allocate(values, decay, state)
    state = state.contiguous()
    for i in range(len(decay)):
        states[i] = state
        torch.baddbmm(values[i], reads[i], state, alpha=-1, out=writes[i])
        state = (state * decay[i, :, None, None]).baddbmm_(keys[i].mT, writes[i])
    return states, writes, state


@chunk_states.register_fake
def _(
    reads: Tensor, values: Tensor, keys: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _allocate(values, decay, state)


def _allocate(values: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors for the results, contiguous whatever the inputs are: the compiler relies on it."""
    states = state.new_empty(len(decay), *state.shape)
    return states, values.new_empty(values.shape), state.new_empty(state.shape)


@torch.library.custom_op("torchtitan::chunk_states_backward", mutates_args=())
def chunk_states_backward(
    grad_states: Tensor,
    grad_writes: Tensor,
    grad_last: Tensor,
    reads: Tensor,
    keys: Tensor,
    decay: Tensor,
    states: Tensor,
    writes: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `chunk_states`, from the last chunk to the first."""
    grad_values = writes.new_empty(writes.shape)
    grad_keys = keys.new_empty(keys.shape)
    grad_decay = decay.new_empty(decay.shape)
    after = grad_last.contiguous()
    for i in reversed(range(len(decay))):
        torch.baddbmm(grad_writes[i], keys[i], after, out=grad_values[i])
        torch.bmm(writes[i], after.mT, out=grad_keys[i])
        grad_decay[i] = torch.linalg.vecdot(states[i].flatten(1), after.flatten(1))
        before = (after * decay[i, :, None, None]).add_(grad_states[i])
        after = before.baddbmm_(reads[i].mT, grad_values[i], alpha=-1)
    grad_reads = (
        torch.bmm(grad_values.flatten(0, 1), states.flatten(0, 1).mT).neg_().view(keys.shape)
    )
    return grad_reads, grad_values, grad_keys, grad_decay, after


@chunk_states_backward.register_fake
def _(
    grad_states: Tensor,
    grad_writes: Tensor,
    grad_last: Tensor,
    reads: Tensor,
    keys: Tensor,
    decay: Tensor,
    states: Tensor,
    writes: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = (reads, writes, keys, decay, grad_last)
    grad_reads, grad_values, grad_keys, grad_decay, grad_state = (
        x.new_empty(x.shape) for x in like
    )
    return grad_reads, grad_values, grad_keys, grad_decay, grad_state


def _save_states(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    reads, _, keys, decay, _ = inputs
    states, writes, _ = output
    ctx.save_for_backward(reads, keys, decay, states, writes)


def _differentiate_states(
    ctx: Any, grad_states: Tensor, grad_writes: Tensor, grad_last: Tensor
) -> tuple[Tensor, ...]:
    return chunk_states_backward(grad_states, grad_writes, grad_last, *ctx.saved_tensors)


chunk_states.register_autograd(_differentiate_states, setup_context=_save_states)


@register_flop_formula(torch.ops.torchtitan.chunk_states)
def _flops(reads: Any, values: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    chunks, heads, size, d = reads
    return 2 * 2 * chunks * heads * size * d * values[-1]


@register_flop_formula(torch.ops.torchtitan.chunk_states_backward)
def _backward_flops(
    grad_states: Any, grad_writes: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    chunks, heads, d, e = grad_states
    return 2 * 4 * chunks * heads * grad_writes[2] * d * e


def _system_flops(system: Any, right: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """FLOPs of a triangular system. Its masked half counts, as attention's does."""
    *batch, size, columns = right
    return 2 * math.prod(batch) * size * size * columns


if torch.ops.aten.linalg_solve_triangular not in flop_registry:  # torch has no formula so far
    register_flop_formula(torch.ops.aten.linalg_solve_triangular)(_system_flops)
