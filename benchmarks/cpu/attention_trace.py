"""What attention's helpers ask of the device, before and after: `python
benchmarks/cpu/attention_trace.py`.

Counted on tensors without memory: kernels (operators that compute; views and allocations are free)
and the bytes they read and write, for a layer of Llama 3 8B at 131,072 tokens with context
parallelism 8, and the memory of masks. For compiled functions, the kernels that inductor generates
on the CPU. No GPU is needed, and none is timed.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan.models.attention.backend import block_mask, document_mask
from torchtitan.models.attention.packed import pack_documents
from torchtitan.parallel.context.attention import merge_blocks
from torchtitan.parallel.context.layout import RowLayout

SEQ_LEN = 131_072
RANKS = 8
HEADS = 32
KV_HEADS = 8
SIZE = 128


class Kernels(TorchDispatchMode):
    """Operators that compute, and the bytes they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = self.largest = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = operation(*args, **(kwargs or {}))
        if not operation.is_view and "empty" not in operation.name():
            outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            self.names.append(operation.overloadpacket.__name__)
            self.bytes += sum(
                x.nbytes for x in tree_leaves((args, kwargs, outputs)) if isinstance(x, Tensor)
            )
            self.largest = max([self.largest, *(x.nbytes for x in outputs)])
        return out


def counted(name: str, run: Callable[[], Any]) -> dict[str, Any]:
    with Kernels() as kernels:
        run()
    return {
        "what": name,
        "kernels": len(kernels.names),
        "GiB": round(kernels.bytes / 2**30, 2),
        "by": kernels.names,
    }


def merge_step_by_step(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """How blocks were merged before."""
    part = part.float()
    part_lse = part_lse.float().unsqueeze(-1)
    lse = lse.unsqueeze(-1)
    out -= torch.sigmoid(part_lse - lse) * (out - part)
    lse -= F.logsigmoid(lse - part_lse)


def merges() -> Iterator[dict[str, Any]]:
    """One block of the ring: half of the rank's queries, in bf16, with the balanced order."""
    rows = SEQ_LEN // RANKS // 2
    out, part = (
        torch.empty(1, HEADS, rows, SIZE, device="meta", dtype=t)
        for t in (torch.float32, torch.bfloat16)
    )
    lse = torch.empty(1, HEADS, rows, device="meta")
    yield counted("merge of a block, before", lambda: merge_step_by_step(out, lse, part, lse))
    yield counted("merge of a block, eager", lambda: merge_blocks(out, lse, part, lse))
    from torch._inductor import metrics

    metrics.reset()
    whole = torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8)
    halves = (x[:, :, 4:] for x in whole)
    torch.compile(merge_blocks, dynamic=False)(
        *halves, torch.ones(1, 2, 4, 8).bfloat16(), torch.ones(1, 2, 4)
    )
    moved = 2 * out.nbytes + part.nbytes + 4 * lse.nbytes  # out and lse are read and written
    count = metrics.generated_kernel_count
    yield {"what": "merge of a block, compiled", "kernels": count, "GiB": round(moved / 2**30, 2)}


def unpermutations() -> Iterator[dict[str, Any]]:
    """Gathered keys and values brought into the order of the row, for a document mask, and the
    backward of that.
    """
    width = 2 * SIZE  # keys and values

    def run(shape: tuple[int, ...], reorder: Callable[[Tensor], list[Tensor]]) -> None:
        gathered = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        whole = reorder(gathered)
        torch.autograd.backward(whole, [torch.empty_like(x) for x in whole])

    def by_index(x: Tensor) -> list[Tensor]:
        rows = torch.cat(
            x.chunk(RANKS), dim=3
        )  # as `all_gather_tensor` does for a dimension other than 0
        order = torch.empty(SEQ_LEN, dtype=torch.int64, device="meta").argsort()
        return list(rows[:, :, :, order].unbind(0))

    def by_chunk(x: Tensor) -> list[Tensor]:
        layout = RowLayout("", RANKS, 0, balanced=True)
        return list(layout.join_shards(x.chunk(RANKS), dim=2).split(SIZE, dim=-1))

    before = (2 * RANKS, 1, KV_HEADS, SEQ_LEN // RANKS, SIZE)
    now = (RANKS, KV_HEADS, SEQ_LEN // RANKS, width)
    yield counted("un-permutation and its backward, before", lambda: run(before, by_index))
    yield counted("un-permutation and its backward", lambda: run(now, by_chunk))


@contextmanager
def largest_allocation(found: dict[str, int]) -> Iterator[None]:
    with torch.profiler.profile(profile_memory=True) as profile:
        yield
    allocations = [
        e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    found["largest allocation, MiB"] = max(allocations) // 2**20


def masks(seq_len: int = 4096) -> Iterator[dict[str, Any]]:
    """Masks of one row; the memory of making them is measured on the CPU."""
    from torch.nn.attention.flex_attention import create_block_mask

    documents = (torch.arange(seq_len) // 500)[None]
    positions = torch.arange(seq_len)
    dense = document_mask(documents, positions, torch.bfloat16)
    yield {"what": f"boolean mask at {seq_len:,}", "bytes": dense.nbytes}
    packed = pack_documents(documents, torch.device("cpu"))
    yield {
        "what": f"packed documents at {seq_len:,}",
        "bytes": packed.starts.nbytes + packed.sizes.nbytes,
    }
    for name, create in (
        ("", create_block_mask),
        (", compiled", torch.compile(create_block_mask, dynamic=False)),
    ):
        mask = block_mask(documents, positions, create)
        found: dict[str, int] = {}
        with largest_allocation(found):
            block_mask(documents, positions, create)
        size = sum(x.nbytes for x in vars(mask).values() if isinstance(x, Tensor))
        yield {"what": f"BlockMask at {seq_len:,}{name}", "bytes": size, **found}


if __name__ == "__main__":
    for line in (*merges(), *unpermutations(), *masks()):
        print(json.dumps(line))
