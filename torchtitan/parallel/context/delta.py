"""Context parallelism of Gated DeltaNet: each rank mixes whole rows of some key heads.

A state depends on all earlier tokens, so ranks that hold parts of a row would compute one after the
other, and a balanced rank's two chunks aren't even consecutive. Heads, though, don't depend on each
other. One all-to-all of projections gives each rank the whole row of its heads, where convolution,
state and documents work as on one device; another returns the outputs. A rank sends
2d + group (e + 2) elements per token and key head, and gets group e back.

Shapes: b batch, k key heads, d size of keys, e size of values, group of value heads per key head.
"""

from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor

from torchtitan.config.sections.parallelism import Parallelism
from torchtitan.models.delta.layer import DeltaWeights, GatedDeltaNet, Mix
from torchtitan.models.protocols import Model
from torchtitan.parallel.context.attention import build_row_layout
from torchtitan.parallel.context.layout import RowLayout
from torchtitan.parallel.context.ulysses import to_heads, to_sequence
from torchtitan.parallel.mesh import Mesh


def apply_delta_context(model: Model, mesh: Mesh, p: Parallelism) -> None:
    """Make the Gated DeltaNet layers of `model` work on rows that the ranks of `cp` share."""
    group = mesh.group("cp")
    if group is None:
        return
    layout = build_row_layout(group, bool(p.context_parallel_load_balancer))
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            module.mix = mix_across(module.mix, layout)


def mix_across(mix: Mix, layout: RowLayout) -> Mix:
    """Adapt `mix`, which needs whole rows, to the part of each row that a rank holds.

    The ranks of `layout` must divide the key heads.
    """

    def mix_some_heads(
        qkv: Tensor, ba: Tensor, weights: DeltaWeights, documents: Tensor | None
    ) -> Tensor:
        local_weights = DeltaWeights(
            *(weight.chunk(layout.ranks)[layout.rank] for weight in weights)
        )
        if documents is not None:
            shards = all_gather_tensor(documents, 0, layout.group_name).chunk(layout.ranks)
            documents = layout.join_shards(shards, dim=1)
        qkv, ba = to_heads((qkv.transpose(1, 2), ba.transpose(1, 2)), layout)
        out = mix(qkv.transpose(1, 2), ba.transpose(1, 2), local_weights, documents)
        return to_sequence(out.transpose(1, 2), layout).transpose(1, 2)

    return mix_some_heads
