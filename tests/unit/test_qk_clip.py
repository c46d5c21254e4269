"""QK-clip: scores as large as the limit after a step, for each kind of head."""

import pytest
import torch

from tests.runs import TINY
from torchtitan.config import resolve
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend, document_mask
from torchtitan.models.attention.packed import pack_documents
from torchtitan.optim.max_logits import max_logits
from torchtitan.optim.qk_clip import QKClip
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError, UserError

KINDS = {
    "keys of their own": {"n_kv_heads": 4},
    "shared keys": {"n_kv_heads": 2, "qkv_bias": True},
    "windows": {"layer_pattern": ("window",), "window": 3, "attention_scale": 0.3},
    "latent": {"n_kv_heads": 4, "kv_lora_rank": 16, "rope_head_size": 8, "head_size": 24},
    "latent queries": {
        "n_kv_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 12,
        "rope_head_size": 8,
        "head_size": 24,
        "value_head_size": 20,
    },
}


def attention_that_tells(found):
    """Attention that appends each head's largest visible score to `found`."""
    attend = attention_backend("cpu")

    def telling(q, k, v, scores, sinks=None):
        scale = scores.scale or q.shape[-1] ** -0.5
        products = scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT
        at = torch.arange(q.shape[2])
        visible = at[:, None] >= at
        if scores.window:
            visible = visible & (at[:, None] - at < scores.window)
        visible = visible if scores.mask is None else visible & scores.mask
        found.append(products.masked_fill(~visible, -torch.inf).amax(dim=(0, 2, 3)).detach())
        return attend(q, k, v, scores, sinks)

    return telling


@pytest.mark.parametrize("kind", KINDS)
def test_scores_above_the_limit_become_the_limit(one_rank, kind):
    """And heads below it keep theirs; also where documents are masked."""
    spec = get_spec("llama3")
    sizes = TINY | {"n_layers": 1} | KINDS[kind]
    args = spec.args("debugmodel", sizes, max_seq_len=32)
    torch.manual_seed(0)
    scores = []
    model = spec.build(args, attention_that_tells(scores))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.25 if param.dim() == 2 else 1.0)
    tokens = torch.randint(0, args.vocab_size, (3, 32))
    documents = (torch.arange(32) // 11).expand(3, -1)
    mask = document_mask(documents, torch.arange(32), torch.float32)
    model(tokens, None, mask)
    before = scores[-1]
    limit = before.sort().values[1:3].mean().item()  # so that some heads are below it, none at it
    sizes = {"layers": 1, "heads": 4, "tp": (0, 1), "layout": None, "device": torch.device("cpu")}
    clip = QKClip([model], limit, **sizes)
    old = {name: param.clone() for name, param in model.named_parameters()}
    model(tokens, None, mask)
    clip.step(torch.tensor(True))  # an update that was skipped scales nothing
    assert all(torch.equal(param, old[name]) for name, param in model.named_parameters())
    model(tokens, None, mask)
    clip.step()
    largest, clipped = clip.take()
    assert largest == pytest.approx(before.max().item(), rel=1e-5)
    assert clipped == (before > limit).sum()
    assert clip.take() == (-torch.inf, 0), "nothing since the last call"
    model(tokens, None, mask)
    torch.testing.assert_close(scores[-1], before.clamp(max=limit), rtol=1e-4, atol=1e-5)
    params = dict(model.named_parameters())
    changed = [name for name, param in params.items() if not torch.equal(param, old[name])]
    projections = ("wq.", "wq_b.", "wk.", "wkv_b.")
    assert changed
    assert all(any(part in name for part in projections) for name in changed)


def test_stages_may_have_no_scores():
    """Of a pipeline, where other stages have some; but blocks of an unknown kind are refused."""
    delta = {"delta_key_heads": 2, "delta_value_heads": 4}
    delta |= {"delta_key_size": 8, "delta_value_size": 8}
    sizes = TINY | {"n_layers": 2, "layer_pattern": ("delta", "full")} | delta
    args = get_spec("llama3").args("debugmodel", sizes, max_seq_len=32)
    model = get_spec("llama3").build(args, attention_backend("cpu"))
    del model.layers["1"]
    sizes = {"layers": 2, "heads": 4, "tp": (0, 1), "layout": None, "device": torch.device("cpu")}
    QKClip([model], 1.0, **sizes)
    model.layers["0"] = torch.nn.Identity()
    with pytest.raises(UserError, match="found no attention in the model"):
        QKClip([model], 1.0, **sizes)


def test_projections_of_other_sizes_are_refused():
    """Families with attention of their own may have them."""
    args = get_spec("llama3").args("debugmodel", TINY, max_seq_len=32)
    model = get_spec("llama3").build(args, attention_backend("cpu"))
    attention = model.layers["0"].attention
    attention.wq = torch.nn.Linear(args.dim, 2 * args.n_heads * args.head_dim, bias=False)
    sizes = {"layers": args.n_layers, "heads": args.n_heads, "tp": (0, 1), "layout": None}
    with pytest.raises(UserError, match=r"optimizer.qk_clip: a projection to .* rows, not"):
        QKClip([model], 1.0, **sizes, device=torch.device("cpu"))


def test_scores_are_recorded_in_blocks(monkeypatch):
    """Of queries, with positions of context parallelism, as from all scores at once."""
    monkeypatch.setattr("torchtitan.optim.max_logits._AT_ONCE", 1)
    torch.manual_seed(0)
    q = torch.randn(2, 4, 20, 8)
    k = torch.randn(2, 2, 40, 8)
    positions = torch.cat([torch.arange(10), torch.arange(30, 40)])
    largest = max_logits(q, k, positions, None, None, 7, 0.5)
    scores = 0.5 * q @ k.repeat_interleave(2, dim=1).mT
    distance = positions[:, None] - torch.arange(40)
    hidden = (distance < 0) | (distance >= 7)
    torch.testing.assert_close(largest, scores.masked_fill(hidden, -9e9).amax(dim=(0, 2, 3)))


def test_packed_documents_hide_what_their_mask_hides():
    torch.manual_seed(0)
    q = torch.randn(2, 4, 24, 8)
    k = torch.randn(2, 4, 24, 8)
    documents = torch.stack([torch.arange(24) // 5, torch.arange(24) // 9])
    mask = document_mask(documents, torch.arange(24), torch.float32)
    starts = pack_documents(documents, torch.device("cpu")).starts
    masked, packed = (
        max_logits(q, k, None, *hides, None, 1.0) for hides in ((mask, None), (None, starts))
    )
    assert torch.equal(masked, packed)
    assert masked.isfinite().all()


def test_normalized_queries_need_no_clipping(tmp_path):
    flags = ["--model.name=qwen3", "--model.flavor=0.6B", "--optimizer.qk_clip=100"]
    config = resolve([f"--job.dump_folder={tmp_path}", *flags], 1).config
    with pytest.raises(ConfigError, match=r"optimizer.qk_clip: .* normalizes queries and keys"):
        preflight(config, output=False)
