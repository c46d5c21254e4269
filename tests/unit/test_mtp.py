"""Modules that predict further tokens, against transformers; and what they read and predict."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.families import as_ours, build, count, twin
from tests.rounding import assert_rounds
from torchtitan.config import resolve
from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.models import get_spec, parameter_names
from torchtitan.models.args import DecoderArgs
from torchtitan.models.decoder.model import Decoder
from torchtitan.models.decoder.traits import module_flops
from torchtitan.parallel.pipeline.split import pipeline_stages
from torchtitan.train.mtp_loss import stack_next_tokens

MODULES = 2


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def mtp_twin(theirs: Any) -> Any:
    """transformers' modules behind one of its models, with random weights."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this release of transformers has no multi-token prediction")
    theirs.config.num_mtp_layers = MODULES
    theirs.config.mtp_layer_types = ["full_attention"] * MODULES
    theirs.config.mlp_only_layers = []  # theirs count from 0 again
    modules = layers.MtpModel(theirs, MODULES)
    with torch.no_grad():
        for param in modules.layers.parameters():
            param.normal_(std=0.08) if param.dim() > 1 else param.uniform_(0.5, 1.5)
    return modules


def module_tensors(
    ours: Any, modules: Any, names: dict[str, Any], *, gradients: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """transformers' weights of the modules by our names, or their gradients."""
    last = f"layers.{ours.args.n_layers - 1}."
    for k, module in enumerate(modules.layers):
        values = {n: p.grad if gradients else p for n, p in module.named_parameters()}
        place = f"layers.{ours.args.n_layers + k}."
        for name in ("enorm", "hnorm", "eh_proj"):
            yield f"{place}{name}.weight", values[f"{name}.weight"]
        yield f"{place}output_norm.weight", values["post_norm.weight"]
        for name, their in names.items():
            if name.startswith(last) and isinstance(their, str):
                yield (
                    name.replace(last, place),
                    values[their.replace(f"model.{last}", "mtp_block.")],
                )
        if ours.args.n_experts:
            of_experts = "mtp_block.mlp.experts."
            w1, w3 = values[f"{of_experts}gate_up_proj"].chunk(2, dim=1)
            w2 = values[f"{of_experts}down_proj"]
            for name, value in {"w1": w1, "w2": w2, "w3": w3}.items():
                yield f"{place}moe.experts.{name}", value


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_logits_losses_and_gradients_equal_transformers(family):
    torch.manual_seed(0)
    main = build(family)
    theirs = twin(family, main)
    modules = mtp_twin(theirs)
    names = get_spec(family).hf.names(main.args)
    ours = build(family, n_mtp=MODULES)
    weights = {**main.state_dict(), **dict(module_tensors(ours, modules, names))}
    ours.load_state_dict(weights, strict=False)
    assert {name for name, _ in ours.named_parameters()} <= weights.keys()
    assert set(parameter_names(get_spec(family), ours.args)) <= weights.keys()

    ids = torch.randint(0, ours.args.vocab_size, (2, 40))
    tokens, labels = stack_next_tokens(ids[:, :-1], ids[:, 1:].contiguous(), None, MODULES)
    places = torch.arange(tokens.shape[1])[None]
    hidden = theirs.model(tokens[..., 0]).last_hidden_state
    wanted = [theirs.lm_head(hidden)]
    for k in range(MODULES):
        hidden = modules.forward_layer(k, hidden, places, None, input_ids=tokens[..., k + 1])
        wanted.append(theirs.lm_head(hidden))
    logits = ours(tokens)
    for k in range(1 + MODULES):
        assert_rounds(logits[:, :, k], wanted[k], of=f"logits {k}")
    assert torch.equal(logits[:, :, 0], ours(tokens[..., 0])), "the modules change the model"

    for found in (logits.unbind(2), wanted):
        losses = [mean(found[k], labels[..., k]) for k in range(1 + MODULES)]
        (losses[0] + 0.3 * sum(losses[1:]) / MODULES).backward()
    gradients = as_ours(names, theirs, gradients=True)
    gradients |= dict(module_tensors(ours, modules, names, gradients=True))
    for name, param in ours.named_parameters():
        assert gradients[name].abs().max() > 0, f"{name} has no gradient in transformers"
        assert_rounds(param.grad, gradients[name], of=name)


def test_next_tokens_end_with_their_document_and_row():
    tokens = torch.tensor([[5, 6, 1, 7, 8, 9]])  # 1 ends a document
    labels = torch.tensor([[6, 1, 7, 8, 9, 4]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    no = IGNORE_INDEX
    ahead, wanted = stack_next_tokens(tokens, labels, documents, 2)
    assert torch.equal(ahead[..., 0], tokens)
    assert torch.equal(wanted[..., 0], labels)
    # The token that a document's last prediction is of may be the first of the next one, as it may
    # for the next token; but nothing is read from there.
    assert wanted[..., 1].tolist() == [[1, 7, no, 9, 4, no]]
    assert wanted[..., 2].tolist() == [[7, no, no, 4, no, no]]
    for k in (1, 2):
        counted = wanted[..., k] != no
        assert torch.equal(ahead[..., k][counted], tokens.roll(-k, 1)[counted])
    _, whole = stack_next_tokens(tokens, labels, None, 1)
    assert whole[..., 1].tolist() == [[1, 7, 8, 9, 4, no]]
    _, padded = stack_next_tokens(tokens, labels.masked_fill(labels == 4, no), None, 1)
    assert padded[..., 1].tolist() == [[1, 7, 8, 9, no, no]]


V3 = DecoderArgs(
    vocab_size=129280,
    dim=7168,
    n_layers=61,
    n_heads=128,
    n_kv_heads=128,
    head_size=192,
    kv_lora_rank=512,
    q_lora_rank=1536,
    rope_head_size=64,
    value_head_size=128,
    ffn_dim=18432,
    n_experts=256,
    experts_per_token=8,
    expert_dim=2048,
    shared_expert_dim=2048,
    n_dense_layers=3,
    n_mtp=1,
)


def test_the_module_of_deepseek_v3_has_the_published_size():
    with torch.device("meta"):
        model = Decoder(V3.model_copy(update={"n_layers": 4}), attend=None)
    parts = {
        "attention": 11_413_547_008 // 61,
        "experts": (653_908_770_816 + 2_554_331_136 + 106_430_464) // 58,
        "eh_proj": 2 * 7168**2,
        "norms": 5 * 7168,
    }
    assert count(model.layers["4"]) == sum(parts.values()) == 11_610_067_968


def test_flops_of_a_module_are_those_of_a_block_and_of_an_output_projection():
    length = 4096
    whole = module_flops(V3, length)
    alone = module_flops(V3.model_copy(update={"n_mtp": 0}), length)
    assert list(whole)[-3:] == ["norm", "layers.61", "output"]
    masked_half = 3 * 128 * (192 + 128) * length
    added = sum(whole.values()) - sum(alone.values()) - masked_half
    assert added == pytest.approx(10.2e9, rel=2e-3)


def test_stages_by_layers_keep_the_final_norm_with_the_first_module():
    flops = module_flops(V3.model_copy(update={"n_layers": 3, "n_mtp": 1}), 64)
    flags = ["pipeline_parallel_degree=2", "pipeline_parallel_first_stage_less_layers=0"]
    flags += ["pipeline_parallel_last_stage_less_layers=2"]
    config = resolve([f"--parallelism.{flag}" for flag in flags], 2).config
    stages = pipeline_stages(config, flops, ())
    assert stages.modules[1] == ("norm", "layers.3", "output")
