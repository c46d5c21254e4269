"""Variable-length attention within documents, with the CUDA kernel behind it emulated on the
CPU.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention import inputs, reference
from torchtitan.config.sections.parallelism import ActivationCheckpoint, Compile
from torchtitan.config.sections.schema import Config
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend, document_mask
from torchtitan.models.attention.interface import Scores
from torchtitan.models.attention.packed import attend_documents, pack_documents
from torchtitan.optim.loss import cross_entropy
from torchtitan.parallel.compile import apply_compile
from torchtitan.parallel.memory.checkpoint import apply_activation_checkpoint
from torchtitan.parallel.pipeline.stage import Masks

SPEC = get_spec("llama3")
TINY = {
    "vocab_size": 64,
    "dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 48,
    "max_seq_len": 16,
}
CPU = torch.device("cpu")


def rows(*lengths):
    """`[b, s]` document numbers of rows of documents with these lengths."""
    return torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    )


BATCHES = [
    rows((16,), (16,)),
    rows((3, 1, 9, 3), (1, 1, 14)),
    rows((1,) * 16, (8, 8)),
    rows((7, 9), (16,)),
]


@pytest.fixture
def kernel():
    """aten's flash kernel for sequences of variable length, on the CPU; what its calls were told of
    documents.
    """
    calls = []

    def scores(q, k, scale, left):
        products = torch.einsum("qhd,khd->hqk", q, k) * scale
        visible = torch.ones(products.shape[1:], dtype=torch.bool).tril()
        if left >= 0:
            visible = visible.triu(-left)
        return products.masked_fill(~visible, float("-inf"))

    def repeated(x, q):
        return x.repeat_interleave(q.shape[1] // x.shape[1], 1)

    def forward(
        q,
        k,
        v,
        bounds,
        bounds_k,
        longest,
        longest_k,
        dropout,
        causal,
        debug,
        *,
        scale,
        window_size_left,
        window_size_right,
        **_,
    ):
        assert causal == (window_size_left < 0)
        assert window_size_right == 0
        assert q.shape[-1] % 8 == 0
        assert bounds.dtype == torch.int32
        assert torch.equal(bounds, bounds_k)
        assert (bounds[0], bounds[-1]) == (0, len(q))
        assert bounds.diff().max() <= longest == longest_k
        calls.append((len(bounds) - 1, longest))
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
        for begin, end in bounds.unfold(0, 2, 1).tolist():
            part = scores(q[begin:end], repeated(k[begin:end], q), scale, window_size_left)
            out[begin:end] = torch.einsum(
                "hqk,khd->qhd", part.softmax(-1), repeated(v[begin:end], q)
            )
            lse[:, begin:end] = part.logsumexp(-1)
        return out, lse, q.new_empty(2), q.new_empty(0), q.new_empty(0)

    def backward(grad, q, k, v, out, lse, bounds, *args, scale, window_size_left, **_):
        dq = torch.empty_like(q)
        dk = torch.empty_like(k)
        dv = torch.empty_like(v)
        for begin, end in bounds.unfold(0, 2, 1).tolist():
            g = grad[begin:end]
            queries = q[begin:end]
            keys = repeated(k[begin:end], q)
            values = repeated(v[begin:end], q)
            # What a kernel does with the output and log-sum-exp that it is given.
            own = scores(queries, keys, scale, window_size_left)
            share = torch.exp(own.logsumexp(-1).float() - lse[:, begin:end])  # 1 without sinks
            p = own.softmax(-1) * share[..., None]
            dp = torch.einsum("qhd,khd->hqk", g, values)
            mean = torch.einsum("qhd,qhd->hq", g, out[begin:end])
            ds = p * (dp - mean[..., None]) * scale
            dq[begin:end] = torch.einsum("hqk,khd->qhd", ds, keys)
            for to, of in (
                (dk, torch.einsum("hqk,qhd->khd", ds, queries)),
                (dv, torch.einsum("hqk,qhd->khd", p, g)),
            ):
                to[begin:end] = of.unflatten(1, (k.shape[1], -1)).sum(2)
        return dq, dk, dv

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield calls
    library._destroy()


@pytest.mark.parametrize("documents", BATCHES)
def test_packed_documents_are_the_mask(documents):
    packed = pack_documents(documents, CPU)
    count, longest = packed.sizes.tolist()
    number = (torch.arange(documents.numel())[:, None] >= packed.starts[:count]).sum(
        1
    )  # of each token's document
    causal = torch.ones(documents.numel(), documents.numel(), dtype=torch.bool).tril()
    mask = (number[:, None] == number) & causal
    expected = document_mask(documents, torch.arange(16), torch.float32)[:, 0]
    assert torch.equal(mask, torch.block_diag(*expected).bool())
    assert packed.starts.shape == (documents.numel() + 1,)
    lengths = packed.starts[: count + 1].diff()
    assert lengths.max() <= longest < 2 * lengths.max()
    assert (lengths > 0).sum() <= count < 2 * (lengths > 0).sum()


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.name())
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["none", "selective"])
@pytest.mark.parametrize("compiled", [False, True])
def test_variable_length_attention_is_masked_attention(kernel, compiled, mode):
    """Head size 12 is padded to 16; two query heads share a key head; every batch has the same
    compiled graph.
    """
    torch.manual_seed(0)
    plain = SPEC.build(SPEC.args("8B", TINY), attention_backend("cpu")).double()
    packed = SPEC.build(SPEC.args("8B", TINY), attention_backend("cuda")).double()
    packed.load_state_dict(plain.state_dict())
    for model in (plain, packed):
        model.init_buffers()  # RoPE rounds to fp32 alike only if its tables are fp32
    options = {"selective_ac_option": "op"} if mode == "selective" else {}
    apply_activation_checkpoint(packed, ActivationCheckpoint(mode=mode, **options))
    if compiled:
        apply_compile(packed, Config(compile=Compile(enable=True, backend="aot_eager")))
    tokens = torch.randint(64, (2, 16))
    positions = torch.arange(16)
    torch._dynamo.reset()  # what other tests compiled
    with torch._dynamo.config.patch(error_on_recompile=True):
        for documents in BATCHES:
            results = []
            for model, mask in (
                (plain, document_mask(documents, positions, torch.float64)),
                (packed, pack_documents(documents, CPU)),
            ):
                loss = cross_entropy(model(tokens, None, mask), tokens).sum()
                with Calls() as calls:
                    loss.backward()
                results.append([loss.detach(), *(p.grad for p in model.parameters())])
                model.zero_grad()
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
            names = [name for name in calls.names if "document_attention" in name]
            assert (
                names == ["torchtitan::document_attention_backward"] * TINY["n_layers"]
            )  # nothing is recomputed
    assert len(set(kernel)) > 1  # it got different sizes


@pytest.mark.parametrize("kind", [{"window": 3}, {"sinks": 1}, {"window": 5, "sinks": 1}])
def test_windows_and_sinks_within_documents(kernel, kind):
    """The values are narrower than the keys."""
    *qkv, logits = inputs(s=16, e=6, grad=True)
    sinks = logits if "sinks" in kind else None
    leaves = [*qkv, *([logits] if "sinks" in kind else [])]
    results = []
    packed, dense = (
        Scores(mask, kind.get("window"), 0.4)
        for mask in (
            pack_documents(BATCHES[1], CPU),
            document_mask(BATCHES[1], torch.arange(16), torch.float64),
        )
    )
    for out in (attention_backend("cuda")(*qkv, packed, sinks), reference(*qkv, *dense, sinks)):
        results.append([out, *torch.autograd.grad(out.cos().sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # an fp32 log-sum-exp


def test_a_ranks_stages_share_the_mask_of_a_microbatch():
    made = []
    masks = Masks(lambda microbatch: made.append(microbatch) or object(), users=2)
    first = masks.of(0), masks.of(1)
    assert (masks.of(1), masks.of(0)) == first[::-1]
    assert made == [0, 1]
    assert not masks._masks, "kept longer than it is used"


def test_variable_length_attention_copies_nothing():
    q, k = (torch.empty(2, 16, heads, 16, device="meta").transpose(1, 2) for heads in (4, 2))
    documents = pack_documents(BATCHES[1], CPU)
    with Calls() as calls:
        out = attend_documents(q, k, k, Scores(documents))
    assert out.shape == F.scaled_dot_product_attention(q, k, k, enable_gqa=True).shape
    assert not {"aten::clone", "aten::copy_", "aten::cat", "aten::constant_pad_nd"} & set(
        calls.names
    )
