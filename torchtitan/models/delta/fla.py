"""The gated delta rule by the kernels of flash-linear-attention, on CUDA.

Shapes: as in `torchtitan.models.delta.rule`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.compiler.disable
def fla_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor | None
) -> Tensor:
    """A `Rule` of `torchtitan.models.delta.layer`. The compiler can't trace the kernels."""
    # an extra
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    inputs = [q, k, v, g, beta]
    bounds = None
    if documents is not None:  # the kernels need them one after the other, in a batch of one row
        bounds = document_bounds(documents)
        inputs = [x.flatten(0, 1)[None] for x in inputs]
    out, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True)
    return out.reshape(v.shape)


def document_bounds(documents: Tensor) -> Tensor:
    """The index of each document's first token in `[b, s]`, flattened, and b s: `[n + 1]`."""
    starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return F.pad(starts.flatten().nonzero().flatten(), (0, 1), value=documents.numel())
