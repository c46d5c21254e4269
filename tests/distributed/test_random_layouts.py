"""Random legal configurations: each trains two steps on gloo ranks, and must compute what plain
PyTorch on one process does, or be refused.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.support_matrix.cells import NAMED_SCHEDULES
from torchtitan.config import resolve
from torchtitan.config.derive import AXES, DEGREE_KEYS, divisors
from torchtitan.config.pipeline_schedules import SCHEDULES
from torchtitan.testing.difference import tolerances_of
from torchtitan.testing.observe import write_corpus
from torchtitan.testing.parity import compare
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError

Flags = dict[str, Any]
"""Key to value, as on the command line."""
VOCABULARY = 2048
"""At least the tokenizer's."""


def pick(draw, *choices):
    return draw(st.sampled_from(choices))


def sometimes(draw, flags: Flags) -> Flags:
    """The flags, or in three of four cases none."""
    return pick(draw, flags, {}, {}, {})


@st.composite
def runs(draw, world: int) -> Flags:
    """The flags of a run on `world` ranks. Most are legal."""
    layouts = [
        layout
        for layout in itertools.product(divisors(world), repeat=5)
        if math.prod(layout) == world
    ]
    degrees = dict(zip(AXES, draw(st.sampled_from(layouts)), strict=True))
    flags: Flags = {f"parallelism.{DEGREE_KEYS[axis]}": degree for axis, degree in degrees.items()}
    flags |= draw(models(degrees["tp"], degrees["pp"])) | draw(low_precision(degrees["tp"]))
    flags |= draw(batches(degrees, block=32 if flags.get("model.converters") == "mx" else 1))
    flags |= draw(memory(degrees["pp"])) | draw(optimizers()) | draw(communication())
    if degrees["pp"] > 1:
        flags |= draw(pipelines(degrees["pp"]))
    elif not flags.get("fault_tolerance.elastic") and pick(draw, True, *[False] * 4):
        flags |= {"optimizer.early_step_in_backward": True, "training.max_norm": 0}
        flags["training.global_batch_size"] = -1
    return flags


@st.composite
def mixtures(draw, world: int) -> Flags:
    """As `runs`, of a model with experts, often of more than FSDP's ranks can divide evenly.

    Low precision is left out: it sends tokens to other experts.
    """
    found = [
        (layout, ep)
        for layout in itertools.product(divisors(world), repeat=5)
        if math.prod(layout) == world
        for ep in divisors(math.prod(layout[2:]))
    ]
    split = [
        (layout, ep) for layout, ep in found if 1 < ep < math.prod(layout[2:])
    ]  # FSDP shards what is left
    layout, ep = draw(st.sampled_from(pick(draw, split, split, split, found) or found))
    degrees = dict(zip(AXES, layout, strict=True))
    flags: Flags = {f"parallelism.{DEGREE_KEYS[axis]}": degree for axis, degree in degrees.items()}
    flags |= draw(models(degrees["tp"], degrees["pp"]))
    flags |= draw(experts(ep, shards=math.prod(layout[2:]) // ep))
    flags |= draw(batches(degrees, shortest=3)) | draw(memory(degrees["pp"])) | draw(optimizers())
    flags |= draw(communication()) | (draw(pipelines(degrees["pp"])) if degrees["pp"] > 1 else {})
    several = flags["model.overrides.n_layers"] > 1
    return flags | {"model.overrides.n_dense_layers": pick(draw, 0, 0, 1) if several else 0}


@st.composite
def kinds(draw, world: int) -> Flags:
    """As `mixtures`, with blocks of other kinds."""
    flags = draw(mixtures(world))
    tp = flags["parallelism.tensor_parallel_degree"]
    cp = flags["parallelism.context_parallel_degree"]
    sizes = {
        "activation": pick(draw, "swiglu", "geglu", "relu2", "clamped_swiglu"),
        "ffn_bias": pick(draw, False, True),
        "norm_placement": pick(draw, "before", "after", "both"),
        "norm_plus_one": pick(draw, False, True),
        "embedding_scale": pick(draw, 1.0, 4.0),
        "logit_softcap": pick(draw, "none", 15.0),
        "router_scores": pick(draw, "softmax", "sigmoid"),
        "router_bias": pick(draw, False, True),
        "route_scale": pick(draw, 1.0, 2.5),
        "shared_expert_dim": tp * pick(draw, 0, 3, 8),
        "rope_interleaved": pick(draw, False, True),
        "head_size": 8,
        "init_std": 0.1,
    }
    sizes["shared_expert_gate"] = sizes["shared_expert_dim"] > 0 and pick(draw, False, True)
    if pick(draw, False, True):
        heads = flags["model.overrides.n_heads"]
        sizes |= {
            "n_kv_heads": heads,
            "kv_lora_rank": pick(draw, 5, 16),
            "q_lora_rank": pick(draw, 0, 7),
            "rope_head_size": pick(draw, 2, 4),
            "value_head_size": pick(draw, 6, 8),
        }
        pattern = pick(draw, ["full"], ["window", "full"], ["nope", "delta"])
    else:
        sizes |= {
            "sinks": pick(draw, False, True),
            "gated_attention": pick(draw, False, True),
            "qk_norm": pick(draw, False, True),
            "qkv_bias": pick(draw, False, True),
            "wo_bias": pick(draw, False, True),
            "rope_fraction": pick(draw, 1.0, 0.5),
        }
        sizes["qk_norm_whole"] = sizes["qk_norm"] and pick(draw, False, True)
        pattern = pick(draw, ["window"], ["window", "full"], ["delta", "window"], ["full", "nope"])
    # A token that sees itself alone has no gradient but rounding errors.
    sizes |= {"layer_pattern": pattern, "window": pick(draw, 2, 3, 8, 40)}
    if "delta" in pattern:
        sizes |= {
            "delta_key_heads": tp * cp,
            "delta_value_heads": tp * cp * pick(draw, 1, 2),
            "delta_key_size": pick(draw, 4, 6),
            "delta_value_size": pick(draw, 4, 8),
        }
    return flags | {f"model.overrides.{name}": size for name, size in sizes.items()}


@st.composite
def experts(draw, ep: int, shards: int) -> Flags:
    """Experts of which each of `ep` ranks has some, which FSDP shards.

    Args:
        shards: ranks that hold the same experts. They divide the number of experts or the sizes of
        their matrices.
    """
    own = pick(draw, shards + 1, 1, 2, 3, 5)
    experts = max(2, own * ep)
    chosen = pick(draw, *range(1, min(experts, 3) + 1))
    sizes = {
        "n_experts": experts,
        "experts_per_token": chosen,
        # The normalized weight of a single expert is 1, and its router has no gradient but rounding
        # errors.
        "normalize_expert_weights": chosen > 1 and pick(draw, True, False),
        "head_size": pick(draw, 2, 6, 8, 16),
        "dim": shards * pick(draw, 4, 6, 16),
        "expert_dim": shards * pick(draw, 1, 3, 8),
    }
    flags: Flags = {f"model.overrides.{name}": size for name, size in sizes.items()}
    balance = {
        "balance_bias_rate": pick(draw, 0.01, 0.0),
        "sequence_balance_loss": pick(draw, 0.01, 0.0),
        "global_balance_loss": pick(draw, 0.1, 0.0),  # it begins in the second step
        "router_z_loss": pick(draw, 0.001, 0.0),
    }
    flags |= {f"moe.{name}": value for name, value in balance.items()}
    return flags | {"model.name": "qwen3_moe", "parallelism.expert_parallel_degree": ep}


@st.composite
def models(draw, tp: int, pp: int) -> Flags:
    """Heads, widths and vocabularies that the ranks divide unevenly, if at all."""
    kv_heads = tp * pick(draw, 1, 2, 3)
    groups = pick(draw, 1, 2, 3)
    head = pick(draw, 2, 6, 8, 16)
    original = pick(draw, 8, 8192)
    scaling = (
        f"{{factor = 4.0, low_freq_factor = 1.0, high_freq_factor = 4.0, "
        f"original_max_seq_len = {original}}}"
    )
    sizes = {
        "n_kv_heads": kv_heads,
        "n_heads": kv_heads * groups,
        "dim": kv_heads * groups * head,
        "ffn_dim": tp * pick(draw, 1, 7, 16, 48),
        "vocab_size": tp * (-(-VOCABULARY // tp) + pick(draw, 0, 1, 50)),
        "n_layers": pick(draw, 1, 2, 3),
        "rope_scaling": pick(draw, "none", scaling),
        "rope_theta": pick(draw, 10_000.0, 500_000.0),
        "tie_embeddings": pp == 1 and pick(draw, True, False, False),
        "n_mtp": pick(draw, 0, 0, 1),  # the shortest rows have one token after the next
    }
    return {f"model.overrides.{name}": size for name, size in sizes.items()}


@st.composite
def batches(draw, degrees: dict[str, int], block: int = 1, shortest: int = 2) -> Flags:
    """Rows, their lengths, accumulation, loss chunks, masks, validation.

    Args:
        block: the tokens of a row on each context-parallel rank are a multiple of this.
        shortest: row. Over a single token attention has no gradient, only rounding errors; and of a
        mixture's rows the
            last quarter doesn't count.
    """
    cp = degrees["cp"]
    tp = degrees["tp"]
    pp = degrees["pp"]
    replicas = degrees["dp_replicate"] * degrees["dp_shard"]
    balancer = pick(draw, "headtail", "headtail", "none")
    unit = math.lcm(2 * cp if cp > 1 and balancer == "headtail" else cp, cp * tp, cp * block)
    lengths = [length for length in range(unit, max(unit, 64) + 1, unit) if length >= shortest]
    seq_len = draw(st.sampled_from(lengths))
    rows = pick(draw, 1, 2, 3, 4) * (pp if pp > 1 else 1)
    flags: Flags = {
        "parallelism.context_parallel_load_balancer": balancer,
        "training.seq_len": seq_len,
        "training.local_batch_size": rows,
        "training.global_batch_size": rows * replicas * pick(draw, 1, 1, 2, 3),
        "training.loss_chunks": pick(draw, 1, 1, *divisors(seq_len // (cp * tp))),
        "training.document_mask": pick(draw, False, True),
        "debug.seed": pick(draw, 0, 7),
    }
    flags |= sometimes(
        draw,
        {
            "validation.enable": True,
            "validation.seq_len": draw(st.sampled_from(lengths))
            if flags["training.loss_chunks"] == 1
            else seq_len,
            "validation.local_batch_size": rows * pick(draw, 1, 2),
            "validation.freq": 1,
            "validation.steps": pick(draw, 1, 3),
        },
    )
    if pick(draw, *[False] * 7, True):  # rows that the ranks don't divide
        flags |= {"fault_tolerance.elastic": True, "checkpoint.enable": True}
        flags["training.global_batch_size"] = replicas + pick(draw, 0, 1, 2, 3, 4)
    return flags


@st.composite
def memory(draw, pp: int) -> Flags:
    """What is recomputed, freed, offloaded, compiled, saved."""
    reshard = ["default", "never"] + ["always"] * (pp == 1)
    recomputed = pick(draw, "none", "none", "full", "op", "1", "2")
    by_block = {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": recomputed,
    }
    compiled = {"compile.enable": True, "compile.backend": "eager"}
    saved = {"checkpoint.enable": True, "checkpoint.interval": 1}
    return (
        {"parallelism.fsdp_reshard_after_forward": pick(draw, *reshard)}
        | (
            {"activation_checkpoint.mode": recomputed}
            if recomputed in ("none", "full")
            else by_block
        )
        | sometimes(draw, {"activation_checkpoint.early_stop": True})
        | sometimes(draw, {"training.enable_cpu_offload": True})
        | sometimes(
            draw, {**compiled, "compile.components": pick(draw, "model", "loss", "model,loss")}
        )
        | sometimes(draw, {**saved, "checkpoint.async_mode": pick(draw, "disabled", "async")})
    )


@st.composite
def optimizers(draw) -> Flags:
    return {
        "optimizer.name": pick(draw, "AdamW", "AdamW", "Adam", "Muon"),
        "optimizer.implementation": pick(draw, "fused", "foreach", "for-loop"),
        "optimizer.weight_decay": pick(draw, 0.1, 0.0),
        "optimizer.beta1": pick(draw, 0.9, 0.9, 0.0),
        "training.max_norm": pick(draw, 1.0, 0.1, 0),
        "guard.weight_hash_freq": pick(draw, 0, 1),
        "guard.policy": pick(draw, "off", "off", "warn"),
    } | sometimes(draw, {"optimizer.name": "AdamW", "optimizer.state_dtype": "bfloat16"})


@st.composite
def low_precision(draw, tp: int) -> Flags:
    """Mostly none. Else sizes of which most layers can be converted."""
    kind = pick(draw, *["none"] * 4, "float8", "gather", "mx")
    if kind == "none":
        return {}
    heads = 2 * tp
    unit = 32 if kind == "mx" else 16
    sizes = {
        "n_heads": heads,
        "n_kv_heads": heads,
        "dim": heads * unit,
        "ffn_dim": tp * unit * pick(draw, 1, 3),
    }
    flags: Flags = {f"model.overrides.{name}": size for name, size in sizes.items()}
    if kind == "mx":
        return flags | {
            "model.converters": "mx",
            "quantize.linear.mx.recipe_name": "mxfp8_emulated",
        }
    flags |= {"model.converters": "float8", "quantize.linear.float8.emulate": True}
    if kind == "gather":
        precompute = "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
        return flags | {
            "quantize.linear.float8.enable_fsdp_float8_all_gather": True,
            precompute: pick(draw, True, False),
        }
    return flags | {
        "quantize.linear.float8.recipe_name": pick(
            draw, "tensorwise", "rowwise", "rowwise_with_gw_hp"
        )
    }


@st.composite
def communication(draw) -> Flags:
    return {
        "parallelism.disable_loss_parallel": pick(draw, False, False, True),
        "parallelism.context_parallel_method": pick(draw, "ring", "ring", "ulysses"),
        "parallelism.context_parallel_rotate_method": pick(draw, "allgather", "alltoall"),
    }


@st.composite
def pipelines(draw, degree: int) -> Flags:
    """A schedule, how many layers there are, and how they are put on stages."""
    name = draw(st.sampled_from(NAMED_SCHEDULES))
    per_rank = {"one": [1], "two in a V": [2], "several": [2, 2, 3]}[
        SCHEDULES[name].stages_per_rank
    ]
    stages = degree * pick(draw, *per_rank)
    layers = stages - 1 + pick(draw, *range(4))
    flags: Flags = {"schedule": name}
    by_hand = pick(draw, "no", "no", "less", "per stage", "modules")
    if by_hand == "less":
        flags |= {
            "first_stage_less_layers": pick(draw, 0, 1),
            "last_stage_less_layers": pick(draw, 0, 1),
        }
    elif by_hand == "per stage":
        flags |= {"layers_per_stage": pick(draw, 1, 2)}
        layers = stages * flags["layers_per_stage"] - 2
    flags = {f"parallelism.pipeline_parallel_{key}": value for key, value in flags.items()}
    if by_hand == "modules":
        starts = [*(f"layers.{i}" for i in range(layers)), "norm", "output"]
        cuts = draw(
            st.sets(st.sampled_from(range(len(starts))), min_size=stages - 1, max_size=stages - 1)
        )
        flags["parallelism.module_fqns_per_model_part"] = ",".join(starts[i] for i in sorted(cuts))
    return flags | {"model.overrides.n_layers": max(1, layers)}


def arguments(flags: Flags, folder) -> list[str]:
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        write_corpus(corpus)
    number = len(list(folder.iterdir()))
    (folder / f"run-{number}").mkdir()
    fixed = {
        "job.dump_folder": folder / f"run-{number}",
        "training.dataset": "corpus",
        "training.dataset_path": corpus,
        "validation.dataset_path": corpus,
        "training.steps": 2,
        "training.mixed_precision_param": "float32",
        "lr_scheduler.warmup_steps": 0,
        "metrics.log_freq": 1,
    }
    return [f"--{key}={value}" for key, value in {**fixed, **flags}.items()]


def outcome(ranks, world: int, argv: list[str], timeout: float = 200) -> str:
    """`equal`, or why it is refused, or how it differs.

    Raises:
        RankFailure: a rank failed or hung.
    """
    try:
        config = resolve(argv, world).config
        preflight(config, output=False)
    except ConfigError as error:
        return f"refused: {error}"
    tolerances = tolerances_of(config)
    if "delta" in config.model.overrides.get("layer_pattern", ()):
        # Queries are normalized, so the rows' gradients of their convolution nearly cancel: a
        # process that accumulates row by row is off by 8e-4.
        tolerances = replace(tolerances, gradient=5e-3)
    problems = ranks(world, compare, argv, tolerances, timeout=timeout)[0].problems
    return f"differs: {problems}" if problems else "equal"


SUITE = [(runs, 3, 2), (runs, 4, 2), (mixtures, 4, 2), (kinds, 4, 1)]
REST = [(kind, world, 30) for kind in (runs, mixtures, kinds) for world in range(2, 9)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "world", "examples"),
    [*SUITE, *REST],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_random_layout_equals_one_process_or_is_refused(ranks, tmp_path, kind, world, examples):
    seen: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # a run takes seconds, too long to shrink it
        suppress_health_check=list(HealthCheck),
    )
    @given(kind(world))
    def check(flags):
        argv = arguments(flags, tmp_path)
        note(" ".join(argv))
        result = outcome(ranks, world, argv)
        assert not result.startswith("differs"), result
        seen[result.partition(":")[0]] += 1

    check()
    assert seen["equal"] > examples / 2, seen
