"""Attention with windows, sinks and narrow values, against an explicit softmax."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.attention import documents, inputs, reference
from torchtitan.models import get_spec
from torchtitan.models.attention import backend
from torchtitan.models.attention import dense as attention_dense
from torchtitan.models.attention import kernels as attention_kernel
from torchtitan.models.attention.backend import attention_backend, document_mask, window_masks
from torchtitan.models.attention.dense import (
    attend_variant,
    attention,
    band_backward,
    band_forward,
    flop_pairs,
    visible_block,
)
from torchtitan.models.attention.interface import Scores, windows_of
from torchtitan.models.attention.kernels import BlockScores

CASES = [
    {"scale": 0.3},
    {"window": 5},
    {"window": 1, "scale": 0.7},
    {"sinks": True},
    {"e": 8},
    {"e": 8, "window": 9, "sinks": True, "scale": 0.3, "mask": True},
    {"e": 16, "kv_heads": 4, "sinks": True, "mask": True},
    {"kv_heads": 1, "window": 33, "mask": True},
]


@pytest.mark.parametrize(
    ("case", "compiled"),
    [*((case, False) for case in CASES), (CASES[3], True), (CASES[5], True)],
    ids=str,
)
def test_attention_is_the_softmax_spelled_out(case, compiled, monkeypatch):
    """Queries are split into parts of 16, so that windows begin within, before and at a part."""
    monkeypatch.setattr(attention_dense, "_QUERIES", 16)
    *qkv, logits = inputs(e=case.get("e", 12), kv_heads=case.get("kv_heads", 2), grad=True)
    mask = document_mask(documents(40), torch.arange(40), torch.float64)
    mask = mask if case.get("mask") else None
    scores = Scores(mask, case.get("window"), case.get("scale"))
    sinks = logits if case.get("sinks") else None
    attend = attention_backend("cpu")
    if compiled:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    leaves = [*qkv, *([logits] if case.get("sinks") else [])]
    results = []
    for out in (attend(*qkv, scores, sinks), reference(*qkv, *scores, sinks)):
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        results.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_the_types_of_training(dtype):
    *qkv, sinks = inputs(dtype, s=300, grad=True)
    exact = [x.detach().double().requires_grad_() for x in (*qkv, sinks)]
    ours = attend_variant(*qkv, Scores(window=100), sinks)
    expected = reference(*exact[:3], window=100, sinks=exact[3])
    assert ours.dtype == dtype
    gradients = torch.autograd.grad(ours.sum(), [*qkv, sinks])
    exact_gradients = torch.autograd.grad(expected.sum(), exact)
    limit = 5e-6 if dtype == torch.float32 else 2e-2
    for a, b in zip([ours, *gradients], [expected, *exact_gradients], strict=True):
        assert a.dtype == dtype
        assert (a - b).abs().max() < limit * b.abs().max()


@pytest.mark.parametrize("s", [257, 1024])
def test_rows_of_any_length_on_the_cpu(s):
    qkv = inputs(s=s, grad=True)[:3]
    out = attention_backend("cpu")(*qkv)
    expected = reference(*qkv)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    results = [[x, *torch.autograd.grad((x * weights).sum(), qkv)] for x in (out, expected)]
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", [{}, {"window": 5}, {"mask": True}], ids=str)
def test_the_cpu_attends_in_fp32(kind):
    """In bf16 the kernel's backward takes 2 to 3 times as long on some CPUs."""
    q, k, v, _ = inputs(torch.bfloat16, s=40, grad=True)
    mask = document_mask(documents(40), torch.arange(40), q.dtype) if "mask" in kind else None
    kernels = attention_kernel._cpu_forward, attention_kernel._cpu_backward
    with (
        patch.object(attention_kernel, "_cpu_forward", wraps=kernels[0]) as forward,
        patch.object(attention_kernel, "_cpu_backward", wraps=kernels[1]) as backward,
    ):
        out = attention_backend("cpu")(q, k, v, Scores(mask, kind.get("window")))
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert {x.dtype for x in (out, *grads)} == {torch.bfloat16}
    assert [call.args[0].dtype for call in forward.mock_calls] == [torch.float32]
    assert [call.args[0].dtype for call in backward.mock_calls] == [torch.float32]


def test_gradients_are_derivatives():
    *qkv, sinks = inputs(s=6, heads=2, kv_heads=1, d=4, e=2, grad=True)

    def attended(q, k, v, sinks):
        return attend_variant(q, k, v, Scores(window=3, scale=0.5), sinks)

    assert gradcheck(attended, (*qkv, sinks))


def test_the_operator_keeps_torchs_rules():
    *qkv, sinks = inputs(torch.float32, grad=True)
    mask = document_mask(documents(40), torch.arange(40), torch.float32)
    for arguments in ((None, None, None), (sinks, None, 5), (sinks, mask, 5)):
        torch.library.opcheck(attention, (*qkv, *arguments, 0.5, 0))


@pytest.mark.parametrize(("offset", "window"), [(0, 9), (24, 9), (24, 30), (20, None)])
def test_queries_may_begin_within_the_keys(offset, window):
    *qkv, sinks = inputs(s=16, keys=40)
    ours = attend_variant(*qkv, Scores(window=window, offset=offset), sinks)
    expected = reference(*qkv, window=window, sinks=sinks, offset=offset)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("offset", [-9, -8, -3, 0, 2, 5, 7, 9, 14])
def test_what_a_window_leaves_of_a_block(offset, window):
    distance = torch.arange(8)[:, None] + offset - torch.arange(6)
    visible = (distance >= 0) & (distance < (window or 1000))
    block = visible_block(8, 6, offset, window)
    if block is None:
        assert not visible.any()
        return
    rows, columns, within = block
    assert visible[rows, columns].sum() == visible.sum()
    assert visible[rows, columns].any(1).all()
    assert visible[rows, columns].any(0).all()
    assert within == rows.start + offset - columns.start


def test_what_is_plain_stays_sdpa():
    q, k, v, _ = inputs(torch.float32, e=12)
    with patch("torchtitan.models.attention.backend.attend_variant") as variant:
        attention_backend("cpu")(q, k, v, Scores(window=40))
        attention_backend("cpu")(q, k, v, Scores(scale=0.5))
        assert not variant.called
        attention_backend("cpu")(q, k, v, Scores(window=39))
        assert variant.called


def test_a_window_costs_what_it_sees():
    q, k, v, _ = inputs(torch.float32, s=4096, heads=1, kv_heads=1, d=8)
    computed = []
    forward = attention_kernel._cpu_forward

    def noting(q, k, *rest):
        computed.append(q.shape[2] * k.shape[2])
        return forward(q, k, *rest)

    with patch.object(attention_kernel, "_cpu_forward", noting):
        attend_variant(q, k, v, Scores(window=128))
    assert sum(computed) < 4096 * (128 + 256)


@pytest.mark.parametrize("window", [None, 1, 20, 39])
def test_flops_are_twice_the_visible_pairs(window):
    q, k, v, sinks = inputs(torch.float32, grad=True)
    with FlopCounterMode(display=False) as counter:
        attend_variant(q, k, v, Scores(window=window), sinks).sum().backward()
    distance = torch.arange(40)[:, None] - torch.arange(40)
    visible = ((distance >= 0) & (distance < (window or 40))).sum().item()
    assert flop_pairs(40, window) == pytest.approx(2 * visible, abs=40)
    assert counter.get_total_flops() == 6 * 2 * 4 * flop_pairs(40, window) * (12 + 8)
    with FlopCounterMode(display=False) as spelled_out, sdpa_kernel(SDPBackend.MATH):
        attention_backend("cpu")(q, k, k).sum().backward()
    if window is None:
        ratio = spelled_out.get_total_flops() / counter.get_total_flops()
        assert ratio == pytest.approx(24 / 20)


@pytest.mark.parametrize("window", [None, 13])
def test_flops_of_parts_add_up_to_the_row(window):
    """But for one pair per part with a window, which is nothing in a real row."""
    q, k, v, _ = inputs(torch.float32)
    with FlopCounterMode(display=False) as whole:
        attend_variant(q, k, v, Scores(window=window))
    with FlopCounterMode(display=False) as parts:
        for first in (0, 8, 24):
            last = {0: 8, 8: 24, 24: 40}[first]
            begin = 0 if window is None else max(0, first - window + 1)
            keys = (x[:, :, begin:last] for x in (k, v))
            queries = q[:, :, first:last]
            attend_variant(queries, *keys, Scores(window=window, offset=first - begin))
    pair = 2 * 2 * 4 * (12 + 8)
    left = whole.get_total_flops() - parts.get_total_flops()
    assert 0 <= left <= (0 if window is None else 2 * pair)


@pytest.mark.parametrize("kind", ["flash", "efficient", "choice"])
def test_cuda_kernels_of_a_window_get_what_their_signatures_ask(kind):
    """On tensors without memory: no CUDA kernel can run here, but their shape functions do."""
    dtype = torch.float32 if kind == "efficient" else torch.bfloat16
    sizes = ((8, 300, 192), (2, 300, 192), (2, 300, 128))
    q, k, v = (torch.empty(2, *size, dtype=dtype, device="meta") for size in sizes)
    window = None if kind == "choice" else 100
    choice = SDPBackend.FLASH_ATTENTION.value
    with patch.object(attention_kernel, "chosen_kernel", return_value=choice):
        scores = Scores(window=window, scale=0.1)
        out, lse = band_forward(q, k, v, scores)
        grads = band_backward(out, q, k, v, out, lse, scores)
    assert (out.shape, out.dtype) == ((2, 8, 300, 128), dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    assert [x.dtype for x in grads] == [dtype] * 3


@pytest.mark.parametrize(
    ("queries", "keys", "offset", "window", "expected"),
    [(8, 8, 0, 3, (2, 0)), (8, 8, 8, 12, (3, 8)), (4, 8, 4, 5, (4, 0)), (4, 8, 4, None, (-1, 0))],
)
def test_flash_attentions_window_is_counted_from_the_last_key(
    queries, keys, offset, window, expected
):
    q, k = (torch.empty(1, 1, length, 8) for length in (queries, keys))
    sides = attention_dense._flash_window(q, k, Scores(window=window, offset=offset))
    assert tuple(sides.values()) == expected
    left, right = sides.values()
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    flash = (distance >= -right) & ((distance <= left) | (left < 0))
    ours = torch.arange(queries)[:, None] + offset - torch.arange(keys)
    assert torch.equal(flash, (ours >= 0) & (ours < (window or 1000)))


@pytest.fixture
def flash():
    """aten's flash kernel on the CPU. Its window is counted from the last key, as is
    FlashAttention's.
    """

    def scores(q, k, options):
        distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        distance = distance - torch.arange(k.shape[1])
        visible = distance >= -options["window_size_right"]
        if options["window_size_left"] >= 0:
            visible &= distance <= options["window_size_left"]
        products = torch.einsum("bqhd,bkhd->bhqk", q, k) * options["scale"]
        return products.masked_fill(~visible, float("-inf"))

    def repeated(x, q):
        return x.repeat_interleave(q.shape[2] // x.shape[2], 2)

    def forward(q, k, v, *_, **options):
        assert q.shape[-1] == v.shape[-1] == 16, "not padded"
        own = scores(q, repeated(k, q), options)
        out = torch.einsum("bhqk,bkhd->bqhd", own.softmax(-1), repeated(v, q))
        return out, own.logsumexp(-1), q.new_empty(2), q.new_empty(0), q.new_empty(0)

    def backward(grad, q, k, v, out, lse, *_, **options):
        keys, values = repeated(k, q), repeated(v, q)
        p = torch.exp(scores(q, keys, options) - lse[..., None])
        mean = (grad * out).sum(-1).transpose(1, 2)[..., None]
        ds = p * (torch.einsum("bqhd,bkhd->bhqk", grad, values) - mean) * options["scale"]
        dk = torch.einsum("bhqk,bqhd->bkhd", ds, q).unflatten(2, (k.shape[2], -1)).sum(3)
        dv = torch.einsum("bhqk,bqhd->bkhd", p, grad).unflatten(2, (k.shape[2], -1)).sum(3)
        return torch.einsum("bhqk,bkhd->bqhd", ds, keys), dk, dv

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    with patch.object(attention_dense, "_has_windows", return_value=True):
        yield
    library._destroy()


@pytest.mark.parametrize(
    ("queries", "offset", "window"), [(40, 0, 7), (16, 24, 9), (16, 6, 9), (12, 20, None)]
)
def test_flash_attentions_window_with_sinks(flash, queries, offset, window):
    *qkv, sinks = inputs(s=queries, keys=offset + queries, grad=True)
    scores = Scores(None, window, 0.4, offset)
    results = []
    for out in (attend_variant(*qkv, scores, sinks), reference(*qkv, *scores, sinks)):
        results.append([out, *torch.autograd.grad(out.cos().sum(), [*qkv, sinks])])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.fixture
def narrow_flash():
    """aten's flash kernel without windows, on the CPU, which asks for CUDA's widths."""
    cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def forward(q, k, v, dropout, causal, return_mask=False, *, scale):
        assert {x.shape[-1] for x in (q, k, v)} == {16}
        out, lse = cpu(q, k, v, dropout, causal, scale=scale)
        return out, lse, *[q.new_empty(0)] * 2, 0, 0, *[q.new_empty(0)] * 3

    def backward(grad, q, k, v, out, lse, *rest, scale):
        assert {x.shape[-1] for x in (grad, q, k, v, out)} == {16}
        return cpu_backward(grad, q, k, v, out, lse, 0.0, rest[5], scale=scale)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    choice = SDPBackend.FLASH_ATTENTION.value
    with patch.object(attention_kernel, "chosen_kernel", return_value=choice):
        yield
    library._destroy()


@pytest.mark.parametrize(("d", "e"), [(12, 12), (12, 9), (16, 12)])
def test_widths_that_flash_does_not_know_are_padded(narrow_flash, d, e):
    q, k, v, _ = inputs(d=d, e=e, grad=True)
    scores = BlockScores(0.3, causal=True)
    out, lse = attention_kernel._cuda_forward(q, k, v, scores)
    expected = reference(q, k, v, scale=0.3)
    upstream = expected.cos().detach()
    gradients = attention_kernel._cuda_backward(upstream, q, k, v, out=out, lse=lse, scores=scores)
    theirs = torch.autograd.grad(expected, (q, k, v), upstream)
    for a, b in zip([out, *gradients], [expected, *theirs], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_heads_are_repeated_where_the_kernel_knows_no_groups(monkeypatch):
    assert not backend._repeats_heads("cuda", torch.bfloat16)
    assert not backend._repeats_heads("cpu", torch.float32)
    assert backend._repeats_heads("cuda", torch.float32)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not backend._repeats_heads("cuda", torch.float32)

    *qkv, _ = inputs(e=12, grad=True)
    results = []
    for repeats in (False, True):
        monkeypatch.setattr(backend, "_repeats_heads", lambda *_, repeats=repeats: repeats)
        sdpa = F.scaled_dot_product_attention
        with patch.object(F, "scaled_dot_product_attention", wraps=sdpa) as seen:
            out = attention_backend("cpu")(*qkv)
        assert seen.call_args.kwargs["enable_gqa"] is not repeats
        results.append([out, *torch.autograd.grad(out.cos().sum(), qkv)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options", [{"window": 5}, {"sinks": True}, {"window": 9, "sinks": True}])
def test_attention_under_a_block_mask(options):
    """FlexAttention has no backward on the CPU but in its slow implementation."""
    from torch.nn.attention import flex_attention

    from torchtitan.models.attention import flex

    positions = torch.cat([torch.arange(10), torch.arange(30, 40)])  # of one rank
    *qkv, logits = inputs(grad=True)
    qkv[0] = qkv[0].detach()[:, :, positions].requires_grad_()
    sinks = logits if "sinks" in options else None
    window = options.get("window")
    leaves = [*qkv, *([logits] if "sinks" in options else [])]
    masks = window_masks(documents(40), positions, (None, 5, 9), flex_attention.create_block_mask)
    with (
        patch.object(flex_attention, "_validate_device"),
        patch.object(flex, "_flex_attention", lambda: flex_attention.flex_attention),
    ):
        out = flex.attend_blocks(*qkv, Scores(masks, window, 0.3), sinks)
        results = [out, *torch.autograd.grad(out.cos().sum(), leaves)]
    dense = document_mask(documents(40), torch.arange(40), torch.float32)
    all_queries = qkv[0].new_zeros(2, 4, 40, 12).index_copy(2, positions, qkv[0])
    expected = reference(all_queries, *qkv[1:], dense, window, 0.3, sinks=sinks)[:, :, positions]
    gradients = torch.autograd.grad(expected.cos().sum(), leaves)
    for ours, theirs in zip(results, [expected, *gradients], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def test_blocks_outside_of_a_window_are_skipped():
    from torch.nn.attention.flex_attention import create_block_mask

    from torchtitan.models.attention import flex

    whole = torch.zeros(1, 1024, dtype=torch.int64)
    masks = window_masks(whole, torch.arange(1024), (None, 100, 2048), create_block_mask)
    assert masks.windows == (None, 100)  # a longer one than the row is none
    computed = [int(x.kv_num_blocks.sum() + x.full_kv_num_blocks.sum()) for x in masks.masks]
    assert computed == [36, 15]  # of 64: each 128 queries see their own keys, and 128 before
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match="a window of 7; list the windows"):
        flex.attend_blocks(q, k, v, Scores(masks, 7))


def test_a_model_lists_its_windows():
    gemma = get_spec("gemma3")
    with torch.device("meta"):
        model = gemma.build(gemma.args("debugmodel", {}), attention_backend("cpu"))
    assert set(windows_of([model, torch.nn.Linear(1, 1)])) == {None, model.args.window}
