"""What joining the matrix products of one input would save: `python benchmarks/cpu/products.py`.

A block multiplies one input by wq, wk and wv, another by w1 and w3. Counted for a block of Llama
3 8B at 8,192 tokens in bf16, forward and backward, on tensors without memory: kernels (operators
that compute), products among them, and the bytes that they read and write. The ways:

separate        as the model does it
concatenated    weights are concatenated at each use, and the result is split
stored          one parameter holds them, and the result is split
accumulated     separate, but the backward adds each product to the input's gradient in place

Then the same block small, compiled by inductor for the CPU: its kernels, and calls of products; by
default and with the options of inductor that join kernels. Last, whether outputs and gradients are
those of `separate`, bit for bit, and how far both are from fp64.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from attention_trace import Kernels
from step_trace import _attention
from torch import Tensor, nn

DIM, QUERIES, KEYS, HIDDEN = 4096, 4096, 1024, 14336
TOKENS = 8192
SMALL = 32
"""What widths are divided by where they are computed."""
PRODUCTS = ("mm", "addmm", "bmm")
Products = Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]]


class Accumulated(torch.autograd.Function):
    """Products of one input, whose gradient is summed by the products of the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(x @ weight.t() for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        first, *rest = zip(gradients, weights, strict=True)
        total = first[0] @ first[1]
        for gradient, weight in rest:
            total = torch.addmm(total, gradient, weight)
        return total, *(gradient.t() @ x for gradient in gradients)


def separate(x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    return [F.linear(x, weight) for weight in weights]


def concatenated(x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    return F.linear(x, torch.cat(list(weights))).split([len(w) for w in weights], dim=-1)


def stored(x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """`weights` are the parts of the stored parameter, which comes last."""
    *parts, whole = weights
    return F.linear(x, whole).split([len(w) for w in parts], dim=-1)


def accumulated(x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    return Accumulated.apply(x, *weights)


WAYS: dict[str, Products] = {
    "separate": separate,
    "concatenated": concatenated,
    "stored": stored,
    "accumulated": accumulated,
}


class Block(nn.Module):
    def __init__(self, products: Products, scale: int, **kind: Any):
        super().__init__()
        self.products = products
        dim, queries, keys, hidden = (x // scale for x in (DIM, QUERIES, KEYS, HIDDEN))

        def weights(*rows: int) -> nn.ParameterList:
            torch.manual_seed(sum(rows))
            parts = [0.02 * torch.randn(n, dim, **kind) for n in rows]
            if products is not stored:
                return nn.ParameterList(parts)
            empty = [torch.empty(n, 0, device="meta") for n in rows]
            return nn.ParameterList([*(nn.Parameter(x, False) for x in empty), torch.cat(parts)])

        self.qkv = weights(queries, keys, keys)
        self.gate_up = weights(hidden, hidden)
        self.wo = nn.Linear(queries, dim, bias=False, **kind)
        self.w2 = nn.Linear(hidden, dim, bias=False, **kind)
        nn.init.constant_(self.wo.weight, 0.01)
        nn.init.constant_(self.w2.weight, 0.01)
        self.norms = nn.ParameterList(torch.ones(dim, **kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        eps = 1e-5
        h = F.rms_norm(x, self.norms[0].shape, self.norms[0], eps)
        q, k, v = self.products(h, list(self.qkv))
        x = x + self.wo(_mixed(q, k, v))
        h = F.rms_norm(x, self.norms[1].shape, self.norms[1], eps)
        gate, up = self.products(h, list(self.gate_up))
        return x + self.w2(F.silu(gate) * up)


def _mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In place of attention, with its inputs' shapes: its kernel isn't what is counted."""
    if q.device.type == "meta":
        return _attention(q, k, v)
    repeats = q.shape[-1] // k.shape[-1]
    return q * torch.tanh(k.repeat(1, repeats)) + v.repeat(1, repeats)


def run(block: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Output, gradient of the input, and gradients of the weights."""
    x = x.detach().requires_grad_()
    out = block(x)
    out.backward(torch.ones_like(out))
    grads = [p.grad for p in block.parameters() if p.grad is not None]
    return out.detach(), x.grad, *grads  # type: ignore[return-value]


def eager() -> Iterator[dict[str, Any]]:
    kind = {"device": "meta", "dtype": torch.bfloat16}
    for name, way in WAYS.items():
        block = Block(way, 1, **kind)
        x = torch.empty(TOKENS, DIM, **kind, requires_grad=True)
        with Kernels() as forward:
            out = block(x)
        gradient = torch.empty_like(out)
        with Kernels() as backward:
            out.backward(gradient)
        for phase, found in (("forward", forward), ("backward", backward)):
            yield {
                "way": name,
                "phase": phase,
                "kernels": len(found.names),
                "products": sum(n in PRODUCTS for n in found.names),
                "adds": sum(n in ("add", "add_") for n in found.names),
                "copies": sum(n in ("cat", "copy_", "clone", "_to_copy") for n in found.names),
                "GiB": round(found.bytes / 2**30, 2),
            }


def compiled() -> Iterator[dict[str, Any]]:
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache, run_and_get_code

    x = torch.randn(64, DIM // SMALL)
    options: dict[str, dict[str, Any]] = {
        "default": {},
        "combo_kernels": {"combo_kernels": True},
        "batch_linear_lhs": {
            "pre_grad_fusion_options": {"batch_linear_lhs": {"min_fuse_set_size": 2}}
        },
        "b2b_gemm_pass": {"b2b_gemm_pass": True},
    }
    runs = [(name, "default") for name in WAYS] + [("separate", o) for o in options][1:]
    for name, option in runs:
        torch._dynamo.reset()
        block = Block(WAYS[name], SMALL)
        with config.patch(options[option]), fresh_cache():
            _, codes = run_and_get_code(run, torch.compile(block), x)
        calls = [re.findall(r"extern_kernels\.(\w+)\(|\b(cpp_fused\w*)\(", code) for code in codes]
        for phase, code in zip(("forward", "backward"), calls, strict=False):
            yield {
                "way": name,
                "phase": phase,
                "compiled": option,
                "kernels": sum(bool(kernel) for _, kernel in code),
                "products": sum(product in PRODUCTS for product, _ in code),
                "addmm": sum(product == "addmm" for product, _ in code),
            }


def equality() -> Iterator[dict[str, Any]]:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(256, DIM // SMALL, generator=torch.Generator().manual_seed(1))
        exact = run(Block(separate, SMALL).double(), x.double())[1]
        found = {name: run(Block(way, SMALL).to(dtype), x.to(dtype)) for name, way in WAYS.items()}
        for name, values in found.items():
            pairs = zip(found["separate"][:2], values[:2], strict=True)
            yield {
                "way": name,
                "dtype": str(dtype),
                "output, input's gradient equal": [torch.equal(a, b) for a, b in pairs],
                "error of the gradient": float((values[1] - exact).norm() / exact.norm()),
            }


if __name__ == "__main__":
    for part in (eager, equality, compiled):
        for line in part():
            print(json.dumps(line), flush=True)
