"""What is recomputed, counted operation by operation; and that it changes nothing."""

from collections import Counter as Counts

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.config import resolve
from torchtitan.config.derive import replace
from torchtitan.config.sections.parallelism import ActivationCheckpoint, Compile
from torchtitan.config.sections.schema import Config
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.optim.loss import cross_entropy
from torchtitan.parallel.compile import apply_compile
from torchtitan.parallel.memory.checkpoint import (
    _ATTENTION,
    _COMMUNICATION,
    _MATMULS,
    apply_activation_checkpoint,
    memory_budget,
)
from torchtitan.parallel.record import Record
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError

SPEC = get_spec("llama3")
TINY = {
    "vocab_size": 64,
    "dim": 32,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 48,
    "max_seq_len": 16,
}
TOKENS = torch.arange(32).view(2, 16)
PER_BLOCK = 7  # wq, wk, wv, wo, w1, w2, w3


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.matmuls = self.attentions = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.matmuls += operation is torch.ops.aten.mm.default
        name = str(operation)
        attention = "scaled_dot_product" in name or "torchtitan.attention" in name
        self.attentions += attention and "backward" not in name
        return operation(*args, **(kwargs or {}))


def build(overrides=TINY, **options):
    torch.manual_seed(0)
    model = SPEC.build(SPEC.args("8B", overrides), attention_backend("cpu"))
    apply_activation_checkpoint(model, ActivationCheckpoint(**options))
    return model


def run(model):
    """Loss, gradients, and what the backward computed once more."""
    loss = cross_entropy(model(TOKENS), TOKENS).sum()
    with Counter() as counter:
        loss.backward()
    own = 2 * (PER_BLOCK * TINY["n_layers"] + 1)  # of each product: by its input, by its weight
    return (
        loss.detach(),
        [p.grad for p in model.parameters()],
        counter.matmuls - own,
        counter.attentions,
    )


def test_generators_are_read_only_for_modules_that_may_be_random(monkeypatch):
    """Each block would read and restore the generators of the host and of the device."""
    reads = []
    read = torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: (reads.append(1), read())[1])
    run(build(mode="full"))
    assert not reads

    class Users(torch.nn.Linear):
        pass

    for module in (torch.nn.Dropout(), Users(1, 1)):
        model = SPEC.build(SPEC.args("8B", TINY), attention_backend("cpu"))
        model.layers["1"].extra = module
        apply_activation_checkpoint(model, ActivationCheckpoint(mode="full"))
        reads.clear()
        run(model)
        assert len(reads) >= TINY["n_layers"]


@pytest.mark.parametrize(
    ("options", "matmuls", "attentions"),
    [
        ({"mode": "none"}, 0, 0),
        ({"mode": "full"}, 4 * PER_BLOCK, 4),
        ({"mode": "selective", "selective_ac_option": "1"}, 4 * PER_BLOCK, 4),
        ({"mode": "selective", "selective_ac_option": "2"}, 2 * PER_BLOCK, 2),
        ({"mode": "selective", "selective_ac_option": "3"}, PER_BLOCK, 1),
        # Kept are the first, third, fifth and seventh.
        ({"mode": "selective", "selective_ac_option": "op"}, 4 * 3, 0),
        # w1 and w3 have a shape of their own; of the kept ones, w1 isn't any more.
        (
            {
                "mode": "selective",
                "selective_ac_option": "op",
                "per_op_sac_force_recompute_mm_shapes_by_fqns": ["feed_forward.w1"],
            },
            4 * (2 + 2),
            0,
        ),
        # The last product of a block is needed by no backward within it.
        ({"mode": "full", "early_stop": True}, 4 * (PER_BLOCK - 1), 4),
    ],
)
def test_what_is_recomputed(options, matmuls, attentions):
    loss, gradients, *_ = run(build(mode="none"))
    own_loss, own_gradients, *recomputed = run(build(**options))
    assert recomputed == [matmuls, attentions]
    assert torch.equal(own_loss, loss)
    for ours, theirs in zip(own_gradients, gradients, strict=True):
        assert torch.equal(ours, theirs)


class Shapes(TorchDispatchMode):
    """Shapes of the second operands of products, but of experts' backwards."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        grouped = operation is torch.ops.torchtitan.grouped_mm.default and args[3:] != (True,)
        if grouped or operation is torch.ops.aten.mm.default:
            self.shapes.append(tuple(args[1].shape))
        return operation(*args, **(kwargs or {}))


MIXTURE = dict.fromkeys(("n_expert_groups", "expert_groups_per_token", "n_mtp"), 1) | {
    "dim": 24,
    "n_layers": 2,
    "n_dense_layers": 0,
    "n_heads": 4,
    "head_size": 18,
    "value_head_size": 10,
    "rope_head_size": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "n_experts": 6,
    "experts_per_token": 2,
    "expert_dim": 40,
    "shared_expert_dim": 44,
    "shared_expert_gate": True,
    "vocab_size": 64,
    "max_seq_len": 16,
}


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("moe.router.gate", {(24, 6): 3}),  # the default
        ("shared_gate", {(24, 1): 3}),
        ("wkv_a", {(24, 28): 3}),
        ("wq_a", {(24, 12): 3}),
        ("eh_proj", {(48, 24): 1}),
        ("moe.experts.w1", {(6, 40, 24): 6}),  # with w3, which has its shape
    ],
)
def test_products_are_recomputed_by_name(name, shapes):
    """Those of every layer with a matrix, whatever its class; the plan counts the same."""
    spec = get_spec("deepseek_v3")
    args = spec.args("debugmodel", MIXTURE)
    options = ["--activation_checkpoint.mode=selective"]
    options += ["--activation_checkpoint.selective_ac_option=op"]
    if name != "moe.router.gate":
        key = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
        options.append(f"--{key}={name}")
    config = resolve(options, 1).config
    model = spec.build(args, attention_backend("cpu"))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    apply_activation_checkpoint(model, config.activation_checkpoint)
    tokens = torch.stack([TOKENS, TOKENS.roll(1)], dim=-1)
    loss = model(tokens, token_weights=torch.ones(tokens.shape)).square().sum()
    with Shapes() as counter:
        loss.backward()
    assert {shape: counter.shapes.count(shape) for shape in shapes} == shapes
    record = Record(replace(config, "model.name", "deepseek_v3"), args, None)
    linears = [
        linear
        for block, count in record.block_counts(record.stages)
        for linear in block.linears * count
        if ".shared." not in linear.name  # its backwards multiply matrices of the same shapes
    ]
    recomputed = Counts(
        (x.experts, x.outputs, x.inputs) if x.experts else (x.inputs, x.outputs)
        for x in linears
        if x.recompute_share
    )
    assert {shape: counter.shapes.count(shape) for shape in recomputed} == recomputed


@pytest.mark.parametrize("compiled", [False, True])
def test_attention_of_other_kinds_is_kept_by_operation(compiled):
    kinds = {"layer_pattern": ["window", "full"], "window": 5, "sinks": True}
    plain = build(TINY | kinds, mode="none")
    kept = build(TINY | kinds, mode="selective", selective_ac_option="op")
    for model in (plain, kept):
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.linspace(-0.2, 0.2, param.numel()).view(param.shape))
    if compiled:
        apply_compile(kept, Config(compile=Compile(enable=True, backend="aot_eager")))
    loss, gradients, *_ = run(plain)
    own_loss, own_gradients, _, attentions = run(kept)
    assert attentions == 0
    torch.testing.assert_close(own_loss, loss)
    for ours, theirs in zip(own_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_is_kept_by_name_exists_under_that_name():
    """A misspelt operation would be recomputed without a word, and most of these never run on the
    CPU.
    """
    import torch.distributed._functional_collectives
    import torch.nn.attention.flex_attention
    import torch.nn.attention.varlen

    import torchtitan.parallel.context.attention  # noqa: F401

    known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    known.add(torch.ops.higher_order.flex_attention.name())
    assert {*_ATTENTION, *_COMMUNICATION, *_MATMULS} <= known


def saved_bytes(model):
    """Of what the backward gets from the forward, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = cross_entropy(model(TOKENS), TOKENS).sum()
    return sum(sizes.values()), loss


def test_the_memory_budget_is_a_share_of_the_activations(tmp_path):
    sizes = []
    for budget in (1.0, 0.5, 0.0):
        ac = ActivationCheckpoint(mode="memory_budget", memory_budget=budget)
        config = Config(activation_checkpoint=ac, compile=Compile(enable=True, backend="aot_eager"))
        torch._dynamo.reset()
        model = build(mode="memory_budget", memory_budget=budget)
        apply_compile(model, config)
        with memory_budget(ac, str(tmp_path)):
            size, loss = saved_bytes(model)
        sizes.append(size)
        assert loss.item() == pytest.approx(run(build(mode="none"))[0].item(), rel=1e-5)
    assert sizes[0] > sizes[1] > sizes[2]


def test_names_of_no_product_are_refused(tmp_path):
    """With the nearest; but a dense model has nothing of the default's name."""
    key = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"

    def check(model, *extra):
        arguments = [f"--model.name={model}", "--model.flavor=debugmodel", *extra]
        config = resolve([f"--job.dump_folder={tmp_path}", *arguments], 1).config
        preflight(config, output=False)

    check("llama3")
    check("qwen3_moe", f"--{key}=router.gate,experts.w2,layers.1.attention.wo")
    with pytest.raises(ConfigError, match=rf"{key}: 'router.gait' .*'moe.router.gate'"):
        check("qwen3_moe", f"--{key}=router.gait")
    for without_product in ("attention_norm", "output", "tok_embeddings"):
        with pytest.raises(ConfigError, match=f"'{without_product}' is in the name of no matrix"):
            check("llama3", f"--{key}=feed_forward.w1,{without_product}")
