"""Tensor parallelism with sequence and loss parallelism, from the styles that a model declares.

Weights become DTensors over the `tp` axis (Shoeybi et al., arXiv:1909.08053). Activations outside
attention and feed-forward are sharded over the sequence (Korthikanti et al., arXiv:2205.05198), and
logits over the vocabulary. No rank ever holds either of them whole.
"""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from torchtitan.models.layers.linear import PerHead, TokenLinear
from torchtitan.models.layers.norms import RMSNorm
from torchtitan.models.protocols import Model
from torchtitan.models.spec import ShardingStyle as Style
from torchtitan.parallel.collectives import SumOverRanks, distribute
from torchtitan.parallel.memory.regather import ColumnsOfGathered, gather_sequence
from torchtitan.parallel.precision.dense import SEQUENCE, as_sequence_shard, float8_style
from torchtitan.utils.errors import UserError
from torchtitan.utils.torch_compat import redistribute_and_wait

VOCABULARY = Shard(-1)


class _ShardedEmbedding(nn.Embedding):
    """An embedding sharded over the vocabulary: tokens `[b, s]` -> `[b, s / tp, dim]`.

    Each rank looks up the tokens whose rows it holds; the sum over ranks is reduce-scattered over
    the sequence. DTensor's lookup has the same forward, but its backward allocates the gradient of
    the whole vocabulary on each rank: 8 GiB in fp32 for Llama 405B.
    """

    first_row: int

    def forward(self, tokens: Tensor) -> Tensor:
        assert isinstance(self.weight, DTensor)
        weight = self.weight.to_local()
        row = tokens - self.first_row
        local_row = row % len(
            weight
        )  # also valid for other ranks' tokens: the backward adds by row
        embeddings = F.embedding(local_row, weight).masked_fill(
            (local_row != row).unsqueeze(-1), 0.0
        )
        partial = DTensor.from_local(
            embeddings, self.weight.device_mesh, [Partial()], run_check=False
        )
        return redistribute_and_wait(partial, [SEQUENCE]).to_local()


class _Rows(ParallelStyle):
    """Shards the weight of a module along its first dimension."""

    def __init__(self, whole: type[nn.Module], sharded: type[nn.Module]):
        """
        Args:
            whole: the module's class.
            sharded: replaces it.
        """
        self.whole = whole
        self.sharded = sharded

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert type(module) is self.whole, type(module)
        for name, weight in list(module.named_parameters()):
            distribute(module, name, device_mesh, Shard(0))
            _, offsets = compute_local_shape_and_global_offset(
                weight.shape, device_mesh, [Shard(0)]
            )
            module.first_row = offsets[0]
        module.__class__ = self.sharded
        module.mesh = device_mesh
        return module


class _Inputs(ParallelStyle):
    """Changes the inputs of a module, not its weights."""

    def change(self, x: Any, *others: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.mesh = device_mesh
        self.rank = device_mesh.get_local_rank()
        module.register_forward_pre_hook(lambda _, inputs: self.change(*inputs))
        return module


class _GatherSequence(_Inputs):
    """All-gathers the first input along the sequence, once for all linear layers in the module."""

    def change(self, x: Any, *others: Any) -> tuple[Any, ...]:
        return gather_sequence(as_sequence_shard(x, self.mesh)), *others


class _TiedOutput(_GatherSequence):
    """An output projection whose weight is an input, already sharded over the vocabulary."""

    def __init__(self, keep_sharded: bool):
        self.keep_sharded = keep_sharded

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        if not self.keep_sharded:
            module.register_forward_hook(lambda _, inputs, logits: logits.full_tensor())
        return module


class _Router(_Inputs):
    """Cuts the second input, the tokens' weights, to the rank's part of the sequence."""

    def change(self, x: Any, *others: Any) -> tuple[Any, ...]:
        (weights,) = others
        return x, None if weights is None else weights.chunk(self.mesh.size(), dim=1)[self.rank]


class _LocalTokenLinear(TokenLinear):
    """A layer with replicated parameters, for this rank's part of the sequence.

    DTensor's linear layer gathers the sequence first on torch 2.11.
    """

    def forward(self, x: Tensor) -> Tensor:
        weights = []
        for parameter in self.parameters():
            assert isinstance(parameter, DTensor)
            # The gradient on this rank is the sum over its tokens only.
            weights.append(parameter.to_local(grad_placements=[Partial()]))
        return self.compute(x, *weights)


@cache
def _local_token_linear(kind: type) -> type:
    return type(f"{kind.__name__}OnLocalTokens", (_LocalTokenLinear, kind), {})


class _Gate(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, TokenLinear), type(module)
        for name, _ in list(module.named_parameters()):
            distribute(module, name, device_mesh, Replicate())
        # mypy doubts that classes are hashable
        module.__class__ = _local_token_linear(type(module))  # type: ignore[arg-type]
        return module


class _SharedKey(_Inputs):
    """Turns a gathered input into a plain tensor, which each rank's heads use."""

    def change(self, x: Any, *others: Any) -> tuple[Any, ...]:
        return x.to_local(grad_placements=[Partial()]), *others


class _WholeNorm(RMSNorm):
    """A norm over features that the ranks of `mesh` share: `[b, s, features / tp]`."""

    mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        x_fp32 = x.float()
        squares = x_fp32.square().sum(-1, keepdim=True)
        total = SumOverRanks.apply(squares, self.mesh.get_group())
        out = (x_fp32 * torch.rsqrt(total / self.normalized_shape[0] + self.eps)).type_as(x)
        return out * self.weight.to_local() if isinstance(self.weight, DTensor) else out


class _ShardedPerHead(PerHead):
    """A weight per head, sharded over the heads; returns this rank's as a plain tensor."""

    def forward(self) -> Tensor:
        assert isinstance(self.weight, DTensor)
        return self.weight.to_local()


class _Whole(ParallelStyle):
    """Leaves a module as it is."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


def _parallel_style(
    style: Style, module: nn.Module, sharded_loss: bool, float8: bool
) -> ParallelStyle:
    in_float8 = float8_style(style, module) if float8 else None
    if in_float8 is not None:
        return in_float8
    if style is Style.OUTPUT and not isinstance(module, nn.Linear):
        return _TiedOutput(sharded_loss)
    styles: dict[Style, ParallelStyle] = {
        Style.EMBEDDING: _Rows(nn.Embedding, _ShardedEmbedding),
        Style.NORM: SequenceParallel(use_local_output=True),
        Style.HEAD_NORM: SequenceParallel(sequence_dim=2, use_local_output=True),
        Style.PER_HEAD: _Rows(PerHead, _ShardedPerHead),
        Style.GATHER_SEQUENCE: _GatherSequence(),
        Style.ROUTER: _Router(),
        Style.GATE: _Gate(),
        Style.EXPERTS: _Whole(),
        Style.COLUMNS: ColumnsOfGathered(ColwiseParallel()),
        Style.COLUMNS_OF_SEQUENCE: ColumnsOfGathered(ColwiseParallel(), _GatherSequence()),
        Style.SHARED_KEY: _SharedKey(),
        Style.WHOLE_NORM: _Rows(RMSNorm, _WholeNorm),
        Style.ROWS: RowwiseParallel(output_layouts=SEQUENCE),
        Style.OUTPUT: ColwiseParallel(
            input_layouts=SEQUENCE,
            output_layouts=VOCABULARY if sharded_loss else Replicate(),
            use_local_output=not sharded_loss,
        ),
    }
    return styles[style]


def apply_tensor_parallel(
    model: Model,
    mesh: DeviceMesh | None,
    styles: Mapping[str, Style],
    *,
    sharded_loss: bool,
    float8: bool,
) -> None:
    """Shard `model`, or a pipeline stage of it, over `mesh` in place. Does nothing without a mesh.

    Args:
        styles: `ModelSpec.tensor_parallel_styles`.
        sharded_loss: leave the logits a DTensor, sharded over the vocabulary, for a loss under
            `loss_context`.
        float8: communicate in Float8 where torchao's layers can.

    Raises:
        UserError: a weight has no style.
    """
    if mesh is None:
        return
    plan = {}
    for name, module in model.named_modules():
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if pattern in styles:
            plan[name] = _parallel_style(Style(styles[pattern]), module, sharded_loss, float8)
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        style = plan.get(owner)
        if style is None or isinstance(style, _Inputs):
            pattern = re.sub(r"\.\d+(?=\.|$)", ".*", owner)
            raise UserError(
                f"tensor parallelism: the model family's tensor_parallel_styles has no style that "
                f"shards {name}; add one for {pattern!r}, such as ShardingStyle.COLUMNS for the "
                "rows of each rank's heads (torchtitan.models.spec lists them). A parameter needs "
                "a module that has no other parts"
            )
    parallelize_module(model, mesh, plan)


def loss_context(sharded_loss: bool) -> AbstractContextManager[None]:
    """The context for the loss of vocabulary-sharded logits and its backward."""
    return loss_parallel() if sharded_loss else nullcontext()
