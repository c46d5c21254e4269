"""Workarounds for faults in torchao, one function each, as in `torch_compat`."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torchtitan.utils.torch_compat import replaced

if TYPE_CHECKING:
    from torch import nn


def import_expert_kernels() -> None:
    """Import torchao's 8-bit kernels, two of which fail with Triton 3.9, of torch 2.15.

    1. A key of autotuning is an argument that the kernel lacks, so the import fails.
    2. The kernel that casts experts' weights to Float8 for the backward indexes a scalar. torchao
       has an equivalent kernel, which reduces in one kernel, without atomics.

    Changes torchao's module for good, if there is Triton.

    torch 2.15 with Triton, torchao 0.18. Delete once the import and Float8 experts work with both.
    """
    if find_spec("triton") is not None:
        import triton

        autotune = triton.autotune

        def tune_by_arguments(configs: Any, key: list[str], **options: Any) -> Any:
            def decorate(kernel: Any) -> Any:
                names = [name for name in key if name in kernel.arg_names]
                return autotune(configs, names, **options)(kernel)

            return decorate

        with replaced(triton, autotune=tune_by_arguments):
            from torchao.prototype.moe_training import fp8_grouped_mm
            from torchao.prototype.moe_training.kernels import float8_rowwise as kernels
        reducing = kernels.triton_fp8_rowwise_3d_transpose_rhs_fused_reduction
        fp8_grouped_mm.triton_fp8_rowwise_3d_transpose_rhs = reducing


def gather_float8_as_bytes() -> None:
    """gloo can't gather Float8 tensors, because it has no such type.

    Changes torchao's table of operations for good, but only for tensors on the CPU, for which the
    original fails.

    torch 2.11 to 2.15, torchao 0.18. Delete once gloo gathers `float8_e4m3fn`.
    """
    import torch
    from torchao.float8 import float8_ops
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    table = float8_ops.FLOAT8_OPS_TABLE
    for operation in (
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops.c10d_functional.all_gather_into_tensor.default,
    ):
        original = table.get(operation)
        if original is None or hasattr(original, "gathers_bytes"):
            continue

        def gather(op: Any, args: Any, kwargs: Any = None, original: Any = original) -> Any:
            x = args[0]
            if x._data.device.type != "cpu":
                return original(op, args, kwargs)
            out = op(x._data.contiguous().view(torch.uint8), *args[1:], **(kwargs or {}))
            out = torch.ops._c10d_functional.wait_tensor(
                out
            )  # bytes can be reinterpreted only once they have arrived
            data = out.view(x._data.dtype)
            return Float8TrainingTensor(
                data, x._scale, x._orig_dtype, x._linear_mm_config, x._gemm_input_role
            )

        gather.gathers_bytes = True  # type: ignore[attr-defined]
        table[operation] = gather


def send_padded_float8_shards() -> None:
    """torchao gathers a rank's rows without FSDP2's padding, so ranks with fewer rows send less.

    Then gloo aborts, and NCCL may hang. Also, a rank without rows has no maximum to derive a scale
    from. FSDP2's padding consists of zeros, which change no scale, and FSDP2 removes them again. On
    the CPU weights are sent as bytes, because gloo has no Float8: FSDP2 does that itself only if
    weights of another type are gathered with them.

    Changes torchao's class for good.

    torch 2.11 to 2.15, torchao 0.18. Delete once `fsdp_pre_all_gather` of torchao returns shards of
    equal size, and gloo gathers `float8_e4m3fn`.
    """
    import torch
    from torch.nn.functional import pad
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Weight

    send = Weight.fsdp_pre_all_gather
    receive = Weight.fsdp_post_all_gather
    if hasattr(send, "pads"):
        return

    def send_padded(
        self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        rows = -(-outer_size[0] // mesh.size())
        if padding := rows - len(self):
            tensor = pad(self._tensor, (0, 0, 0, padding))
            self = Weight(tensor, self._linear_mm_config, self._dtype, self._precomputed_scale)
        (data,), scale = send(self, mesh)
        return (data.view(torch.uint8) if data.device.type == "cpu" else data,), scale

    def receive_bytes(
        self: Any, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        return receive(
            self, tuple(data.view(self._dtype) for data in gathered), metadata, param_dtype, out=out
        )

    send_padded.pads = True  # type: ignore[attr-defined]
    Weight.fsdp_pre_all_gather = send_padded
    Weight.fsdp_post_all_gather = receive_bytes


@contextmanager
def rows_for_empty_float8_shards(models: "Iterable[nn.Module]") -> Iterator[None]:
    """torchao computes scales from every shard's maximum, which a shard without rows doesn't have.

    Within, such shards hold a row of zeros.

    torch 2.11 to 2.15, torchao 0.18. Delete once `precompute_float8_dynamic_scale_for_fsdp` accepts
    empty shards.
    """
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Weight

    with ExitStack() as stack:
        for weight in (weight for model in models for weight in model.parameters()):
            shard = getattr(weight, "_local_tensor", None)
            if isinstance(shard, Weight) and len(shard) == 0:
                stack.enter_context(
                    replaced(shard, _tensor=shard._tensor.new_zeros(1, *shard.shape[1:]))
                )
        yield
