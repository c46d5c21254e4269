"""Stages of `gpu.py` that compare the GPU's numbers with the CPU's, or with higher precision."""

from functools import partial
from typing import Any

from _gpu_bench import (
    SMALL,
    Bench,
    Figures,
    Skip,
    column,
    distance,
    furthest,
    run_ranks,
    train,
    within,
)
from _gpu_fake import copying_collectives

FP32 = "--training.mixed_precision_param=float32"
DOCUMENTS = "--training.document_mask=true"
BF16_LOSS = 1e-2
"""Relative error of a loss in bf16 or Float8: the documentation of Float8 promises 1 %."""


def _on_cpu(bench: Bench, argv: list[str]) -> list[Figures]:
    """`train` in a process that sees no GPU."""
    return run_ranks(bench, 1, train, argv, CUDA_VISIBLE_DEVICES="")[0]


def losses(bench: Bench) -> Figures:
    """Losses and gradient norms of a small model, with and without a document mask: fp32 on the CPU
    is the reference.

    The first gradient norm tests the fp64 norm, attention's backward and the collectives of one
    rank; later losses test the update.
    """
    figures = Figures()
    limits = dict[str, float]()
    kinds = {"": SMALL, "documents_": (*SMALL, DOCUMENTS)}
    steps = f"--training.steps={bench.steps}"
    # The references first: a process that has run a backward can't be forked, as a dry run does.
    references = {
        kind: _on_cpu(bench, bench.flags(*flags, steps, FP32, name=f"{kind}cpu"))
        for kind, flags in kinds.items()
    }
    for kind, flags in kinds.items():
        for dtype, loss_limit, norm_limit in (
            ("float32", 1e-4, 1e-4),
            ("bfloat16", BF16_LOSS, 5e-2),
        ):
            precision = f"--training.mixed_precision_param={dtype}"
            found = train(bench.flags(*flags, steps, precision, name=f"{kind}{dtype}"))
            loss = f"{kind}{dtype}_loss"
            norm = f"{kind}{dtype}_grad_norm"
            figures[loss] = furthest(column(found, "loss"), column(references[kind], "loss"))
            figures[norm] = furthest(
                column(found, "grad_norm")[:1], column(references[kind], "grad_norm")[:1]
            )
            limits |= {loss: loss_limit, norm: norm_limit}
    return within(figures, limits)


def ring(bench: Bench) -> Figures:
    """Ring attention on rank 1 of 4: all kinds of blocks and their merge, against the CPU in fp32.

    The ranks are fake: a gather returns this rank's keys four times, on the GPU as on the CPU.
    """
    import torch
    import torch.distributed as dist

    from torchtitan.parallel.context.attention import ring_attention_backend
    from torchtitan.tools.rehearsal.fake import fake_cluster

    heads, kv_heads, length, size = (4, 2, 64, 32) if bench.dry else (8, 2, 2048, 128)
    figures = Figures()
    limits = dict[str, float]()
    with fake_cluster(4, 1), copying_collectives():
        attend = ring_attention_backend(dist.group.WORLD, "allgather", True)
        for dtype, limit in (("float32", 1e-4), ("bfloat16", 1e-2)):
            torch.manual_seed(0)
            inputs = [
                torch.randn(1, n, length, size).to(getattr(torch, dtype))
                for n in (heads, kv_heads, kv_heads)
            ]
            weight = torch.randn(1, heads, length, size)
            reference = _attention(attend, [x.float() for x in inputs], weight)
            found = _attention(attend, [x.to(bench.device) for x in inputs], weight)
            for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, reference, strict=True):
                figures[f"{dtype}_{name}"] = distance(ours, theirs)
                limits[f"{dtype}_{name}"] = limit
    return within(figures, limits)


def _attention(attend: Any, inputs: list[Any], weight: Any) -> list[Any]:
    """Output and gradients of attention, the output's gradient being `weight`."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs)
    out = attend(q, k, v)
    out.backward(weight.to(out))
    return [out, q.grad, k.grad, v.grad]


def attention(bench: Bench) -> Figures:
    """cuDNN's attention and FlashAttention 2, each alone, and what torch chooses: errors and speed
    in bf16.

    Lengths that 128 does not divide are those at which older cuDNN made memory errors.
    """
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    lengths, heads, size = (
        ((64, 72, 37), (4, 2), 32) if bench.dry else ((8192, 8256, 261), (32, 8), 128)
    )
    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "chosen": None}
    kernels |= {} if bench.dry else {"cudnn": SDPBackend.CUDNN_ATTENTION}
    figures = Figures()
    limits = dict[str, float]()
    for length in lengths:
        torch.manual_seed(0)
        inputs = [
            torch.randn(1, n, length, size, device=bench.device).bfloat16()
            for n in (heads[0], heads[1], heads[1])
        ]
        weight = torch.randn(1, heads[0], length, size, device=bench.device)
        exact = _exact_attention(inputs, weight)
        for name, backend in kernels.items():

            def attend(q: Any, k: Any, v: Any, backend: Any = backend) -> Any:
                if backend is None:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                with sdpa_kernel([backend]):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            key = f"{name}_{length}"
            try:
                found = _attention(attend, inputs, weight)
            except RuntimeError as error:  # torch refuses a kernel that it knows to be unsafe
                figures[f"{key}_refused"] = str(error).splitlines()[0][:200]
                continue
            figures[f"{key}_error"] = max(distance(a, b) for a, b in zip(found, exact, strict=True))
            limits[f"{key}_error"] = 1e-2
            if not bench.dry:
                took = _milliseconds(partial(_attention, attend, inputs, weight))
                figures[f"{key}_ms"] = took
                # Half of 4 (forward) and 10 (backward) operations per score and feature: the mask
                # is causal.
                figures[f"{key}_tflops"] = 7 * length**2 * heads[0] * size / took / 1e9
    return within(figures, limits)


def _exact_attention(inputs: list[Any], weight: Any) -> list[Any]:
    """Output and gradients in fp64, one key-value head at a time: the scores of all would not
    fit.
    """
    import torch

    parts = []
    group = inputs[0].shape[1] // inputs[1].shape[1]
    for i in range(inputs[1].shape[1]):
        q = inputs[0][:, i * group : (i + 1) * group]
        k = inputs[1][:, i : i + 1]
        v = inputs[2][:, i : i + 1]
        parts.append(
            _attention(
                _plain_attention, [q.double(), k.double(), v.double()], weight.split(group, 1)[i]
            )
        )
    return [torch.cat(list(each), 1) for each in zip(*parts, strict=True)]


def _plain_attention(q: Any, k: Any, v: Any) -> Any:
    import torch

    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


def _milliseconds(work: Any, times: int = 10) -> float:
    """The median of several calls on the GPU, after two that don't count."""
    import torch

    took = []
    for _ in range(times + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end))
    return sorted(took[2:])[times // 2]


def norm(bench: Bench) -> Figures:
    """The norm of many gradients in fp64, by torch's multi-tensor kernel and by the trainer,
    against the CPU's.
    """
    import torch

    shapes = (
        [(64, 32), (33,), (7, 5)] * 4 if bench.dry else [(4096, 4096), (14336, 1024), (4096,)] * 24
    )
    torch.manual_seed(0)
    figures = Figures()
    limits = dict[str, float]()
    for dtype in (torch.float32, torch.bfloat16):
        grads = [torch.randn(shape, device=bench.device).to(dtype) for shape in shapes]
        exact = torch.stack([torch.linalg.vector_norm(grad.cpu().double()) for grad in grads])
        norms = torch.stack(torch._foreach_norm(grads, 2.0, dtype=torch.float64))
        name = f"{dtype}".removeprefix("torch.")
        figures[name] = distance(norms, exact)
        limits[name] = 1e-12
        if not bench.dry:
            figures[f"{name}_ms"] = _milliseconds(
                partial(torch._foreach_norm, grads, 2.0, dtype=torch.float64)
            )
    return within(figures, limits)


def deterministic(bench: Bench) -> Figures:
    """`debug.deterministic` twice: the same losses and gradient norms, bit for bit, also with a
    document mask.
    """
    figures = Figures()
    limits = dict[str, float]()
    for mask in ([], [DOCUMENTS]):
        name = "documents" if mask else "plain"
        flags = [*SMALL, *mask, "--debug.deterministic=true", f"--training.steps={bench.steps}"]
        runs = [train(bench.flags(*flags, name=f"{name}-{i}")) for i in range(2)]
        a, b = ([(record["loss"], record["grad_norm"]) for record in run] for run in runs)
        figures[f"{name}_steps_that_differ"] = sum(x != y for x, y in zip(a, b, strict=True))
        limits[f"{name}_steps_that_differ"] = 0
    return within(figures, limits)


def float8(bench: Bench) -> Figures:
    """Losses with Float8 against bf16's, and the kernels against their emulation."""
    import torch

    if not bench.dry and torch.cuda.get_device_capability() < (9, 0):
        raise Skip("needs a GPU of compute capability 9.0 or newer")
    figures = Figures()
    limits = dict[str, float]()
    steps = f"--training.steps={bench.steps}"
    reference = column(train(bench.flags(*SMALL, steps, name="bf16")), "loss")
    for recipe in ("tensorwise", "rowwise"):
        flags = [
            *SMALL,
            steps,
            "--model.converters=float8",
            f"--quantize.linear.float8.recipe_name={recipe}",
        ]
        ours = column(train(bench.flags(*flags, name=recipe)), "loss")
        emulated = [*flags, "--quantize.linear.float8.emulate=true"]
        theirs = column(train(bench.flags(*emulated, name=f"{recipe}-emulated")), "loss")
        figures[f"{recipe}_to_bf16"] = furthest(ours, reference)
        figures[f"{recipe}_to_emulation"] = furthest(ours, theirs)
        limits |= {f"{recipe}_to_bf16": BF16_LOSS, f"{recipe}_to_emulation": BF16_LOSS}
    return within(figures, limits)
