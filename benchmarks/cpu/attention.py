"""Time of attention with a window, sinks and narrow values, against a dense mask.

    python benchmarks/cpu/attention.py [--seq-len 4096]

CPU time of one layer's forward and backward, the best of a few runs. `of plain` is relative to
causal attention without any of these.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.models.attention.backend import attention_backend
from torchtitan.models.attention.interface import CAUSAL, Scores

HEADS = 4
KV_HEADS = 2
SIZE = 64
REPEATS = 5


def seconds(run: Callable[[], Tensor], leaves: list[Tensor]) -> float:
    """CPU time of a forward and backward."""
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.process_time()
        out = run()
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        best = min(best, time.process_time() - begin)
    return best


def dense_window(seq_len: int, window: int) -> Tensor:
    return torch.ones(seq_len, seq_len, dtype=torch.bool).tril_().triu_(1 - window)


def cases(seq_len: int) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """What to run, and the tensors whose gradients are computed."""

    def make(heads: int, size: int = SIZE) -> Tensor:
        return torch.randn(1, heads, seq_len, size, requires_grad=True)

    attend = attention_backend("cpu")
    q, k, v = make(HEADS), make(KV_HEADS), make(KV_HEADS)
    sinks = torch.zeros(HEADS, requires_grad=True)
    qkv = [q, k, v]
    out: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        "plain": (lambda: attend(q, k, v), qkv),
        "sinks": (lambda: attend(q, k, v, CAUSAL, sinks), [*qkv, sinks]),
    }
    for window in (128, 1024):
        scores = Scores(window=window)
        mask = dense_window(seq_len, window)
        out[f"window {window}, dense mask"] = (
            lambda mask=mask: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True),
            qkv,
        )
        out[f"window {window}"] = (lambda scores=scores: attend(q, k, v, scores), qkv)
        out[f"window {window}, sinks"] = (
            lambda scores=scores: attend(q, k, v, scores, sinks),
            [*qkv, sinks],
        )
    wide_q, wide_k, narrow = make(HEADS, 192), make(HEADS, 192), make(HEADS, 128)
    wide = [wide_q, wide_k, make(HEADS, 192)]
    out["widths 192, 192"] = (lambda: attend(*wide), wide)
    out["widths 192, 128"] = (lambda: attend(wide_q, wide_k, narrow), [wide_q, wide_k, narrow])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=4096)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = 0.0
    for name, (run, leaves) in cases(arguments.seq_len).items():
        elapsed = seconds(run, leaves)
        plain = plain or elapsed
        print(
            json.dumps(
                {"what": name, "ms": round(1e3 * elapsed, 1), "of plain": round(elapsed / plain, 2)}
            )
        )


if __name__ == "__main__":
    main()
