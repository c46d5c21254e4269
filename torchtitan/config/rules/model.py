"""Rules on the model: its tokenizer, names of parameters, and matrix products in 8 bits."""

import fnmatch
import re
from collections.abc import Iterator

from torchtitan.config.converters import FLOAT8, GROUPED_FLOAT8, GROUPED_MX, MX, names_any, uses
from torchtitan.config.rules.layout import model_name
from torchtitan.config.rules.table import Facts, rule
from torchtitan.config.sections.schema import Config
from torchtitan.utils.errors import did_you_mean
from torchtitan.utils.wording import brief, plural


@rule("model.hf_assets_path", "model.overrides", needs=["tokenizer", "args"])
def vocabulary_holds_the_tokenizer(config: Config, facts: Facts) -> str | None:
    if facts.tokenizer.text_size <= facts.args.vocab_size:
        return None
    entries = facts.tokenizer.vocab_size
    return (
        f"model.hf_assets_path: the tokenizer has {entries} entries, more than vocab_size "
        f"{facts.args.vocab_size} of {config.model.flavor}; set [model.overrides] vocab_size = "
        f"{entries}, or choose another tokenizer"
    )


@rule("sampling.prompts", "sampling.chat", needs=["tokenizer"], refuses=False)
def conversations_have_their_template(config: Config, facts: Facts) -> str | None:
    t, sampling = config.training, config.sampling
    columns = [source.messages_column for source in t.sources] or [t.messages_column]
    if sampling.chat or not sampling.prompts or not all(columns):
        return None
    return (
        "sampling.prompts: the model only learns conversations, and would continue a text; set "
        "sampling.chat = true to let it answer"
    )


@rule("model.overrides", needs=["args", "unused"], refuses=False)
def overrides_have_an_effect(config: Config, facts: Facts) -> Iterator[str]:
    fields = type(facts.args).model_fields
    for key in config.model.overrides:
        lacks = facts.unused.get(key)
        if lacks and getattr(facts.args, key) != fields[key].default:
            yield (
                f"model.overrides.{key} has no effect on {model_name(config)}, without {lacks}; "
                "set that, too, or remove it"
            )


@rule("optimizer.qk_clip", needs=["decoder"])
def heads_can_be_clipped(config: Config, facts: Facts) -> str | None:
    if not config.optimizer.qk_clip:
        return None
    if facts.decoder is None:
        return (
            f"optimizer.qk_clip: the hyper-parameters of {model_name(config)} are no DecoderArgs, "
            "so its heads are unknown; set it to 0"
        )
    if facts.decoder.qk_norm:
        return (
            f"optimizer.qk_clip: {model_name(config)} normalizes queries and keys (qk_norm), which "
            "bounds their products, and undoes a scaling of the projections; set it to 0"
        )
    return None


@rule("optimizer.qk_clip", "training.document_mask", needs=["device"])
def clipping_sees_documents(config: Config, facts: Facts) -> str | None:
    t = config.training
    split = config.parallelism.context_parallel_degree > 1 or t.mixed_precision_param == "float32"
    on_cpu = facts.device.capability == (0, 0)
    if on_cpu or not (config.optimizer.qk_clip and t.document_mask and split):
        return None
    return (
        "optimizer.qk_clip: on GPUs, scores within documents can be recorded only for whole rows "
        "in bf16; set training.document_mask = false, parallelism.context_parallel_degree = 1 or "
        "qk_clip = 0"
    )


@rule("optimizer.param_groups", needs=["parameters"])
def patterns_match(config: Config, facts: Facts) -> Iterator[str]:
    """A pattern that matches nothing is a typo; the parameters meant would train like the rest."""
    names = facts.parameters
    groups = config.optimizer.param_groups
    kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    for group in groups:
        if not fnmatch.filter(names, group.pattern):
            hint = did_you_mean(group.pattern, kinds, cutoff=0.3)
            yield (
                f"optimizer.param_groups: pattern {brief(group.pattern)} matches no parameter{hint}"
            )
    scales = (
        next((g.lr_scale for g in groups if fnmatch.fnmatchcase(name, g.pattern)), 1.0)
        for name in names
    )
    if groups and not any(scales):
        yield "optimizer.param_groups: lr_scale 0 for every parameter trains nothing; raise one"


@rule(
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns", needs=["block_matrices"]
)
def recomputed_products_exist(config: Config, facts: Facts) -> Iterator[str]:
    """A name of no matrix is a typo; but a dense model has none of the default."""
    names = facts.block_matrices
    kinds = dict.fromkeys(re.sub(r"^layers\.\d+\.|\.weight$", "", name) for name in names)
    for part in config.activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns:
        if names and not any(part in name for name in names):
            yield (
                "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns: "
                f"{brief(part)} is in the name of no matrix in the blocks of {model_name(config)}"
                f"{did_you_mean(part, kinds, cutoff=0.3)}"
            )


@rule("model.converters", "quantize.grouped_mm", needs=["expert_sizes", "parameters"])
def experts_can_be_converted(config: Config, facts: Facts) -> Iterator[str]:
    """Names of experts to convert match some, and kernels support their sizes."""
    grouped = config.quantize.grouped_mm
    modules = {name.rpartition(".")[0] for name in facts.parameters if ".experts." in name}
    widths = list(facts.expert_sizes.items())[1:]
    for converter, fqns, unit in (("float8", grouped.float8.fqns, 16), ("mx", grouped.mx.fqns, 32)):
        key = f"quantize.grouped_mm.{converter}"
        if key not in config.model.converters:
            continue
        if not facts.expert_sizes:
            yield f"{key}: {model_name(config)} has no experts; remove it from model.converters"
            continue
        if not fqns:
            yield f'{key}.fqns names no experts; set it to ["experts"] for those of all blocks'
        for name in fqns:
            if not any(names_any([name], module) for module in modules):
                yield (
                    f"{key}.fqns: {brief(name)} is in the name of no experts; set it to "
                    '["experts"] for all'
                )
        if sizes := [f"{name} {width}" for name, width in widths if width % unit]:
            yield (
                f"{key}: {', '.join(sizes)} of {model_name(config)} must be a multiple of {unit}; "
                "remove it from model.converters"
            )


@rule("model.overrides", "training.mixed_precision_param", needs=["device", "expert_sizes"])
def experts_are_aligned(config: Config, facts: Facts) -> Iterator[str]:
    """GPUs multiply experts' matrices whose rows begin at multiples of 16 bytes."""
    if facts.device.capability == (0, 0):
        return
    dtype = config.training.mixed_precision_param
    unit = 4 if dtype == "float32" else 8
    for name, width in list(facts.expert_sizes.items())[1:]:
        if width % unit:
            yield (
                f"model.overrides.{name}: GPUs multiply experts in {dtype} only if their widths "
                f"are multiples of {unit}, and {name} of {model_name(config)} is {width}; set it "
                f"to {width + -width % unit}"
            )


@rule("model.converters", "quantize", "training.mixed_precision_param")
def rowwise_products_are_bf16(config: Config, facts: Facts) -> Iterator[str]:
    linear = config.quantize.linear.float8
    per_row = linear.recipe_name in ("rowwise", "rowwise_with_gw_hp")
    experts = config.quantize.grouped_mm.float8
    conflicts = {
        "quantize.linear.float8": uses(config, FLOAT8) and per_row and not linear.emulate,
        "quantize.grouped_mm.float8": uses(config, GROUPED_FLOAT8) and not experts.emulate,
    }
    for key, applies in conflicts.items():
        if applies and config.training.mixed_precision_param != "bfloat16":
            yield (
                f"{key}: results of Float8 products with a scale per row are in bf16, but "
                "training.mixed_precision_param computes in float32; set that to bfloat16, or "
                f"{key}.emulate = true"
            )


@rule("model.converters", "training.seq_len")
def low_precision_blocks_are_full(config: Config, facts: Facts) -> Iterator[str]:
    """Weight gradients sum over the tokens of a rank, in blocks of 32 (MXFP8) or multiples of 16
    (Float8 kernels).
    """
    p = config.parallelism
    rows = config.training.local_batch_size
    if p.pipeline_parallel_degree > 1:
        rows = p.pipeline_parallel_microbatch_size
    tokens = rows * config.training.seq_len // p.context_parallel_degree
    if uses(config, MX) and tokens % 32:
        yield (
            "model.converters: MXFP8 needs a multiple of 32 tokens per rank and microbatch, got "
            f"{tokens}; set training.seq_len so that each rank's part is a multiple of 32"
        )
    if uses(config, FLOAT8) and not config.quantize.linear.float8.emulate and tokens % 16:
        yield (
            "model.converters: Float8 needs a multiple of 16 tokens per rank and microbatch, got "
            f"{tokens}; set training.seq_len so that each rank's part is a multiple of 16"
        )


_NO_GROUPED = (11, 0)
"""Capability from which on PyTorch and torchao have no grouped products in 8 bits."""


@rule("model.converters", "quantize", needs=["device"])
def device_has_the_types(config: Config, facts: Facts) -> Iterator[str]:
    """Refused alike by the trainer on the device, and by the planner for it."""
    capability = facts.device.capability
    if capability is None:
        return
    for key, minimum, gpu, emulation in _needs(config):
        grouped = ".grouped_mm." in key
        if capability < minimum or (grouped and capability >= _NO_GROUPED):
            newest = ", but not of 12.0 (GeForce)" if grouped else ""
            yield (
                f"{key}: needs an NVIDIA GPU of compute capability {minimum[0]}.{minimum[1]} "
                f"({gpu}) or newer{newest}, this is {facts.device.name}; set {key}.{emulation} to "
                "try it without one"
            )


def _needs(config: Config) -> Iterator[tuple[str, tuple[int, int], str, str]]:
    """Each section of a converter that isn't emulated, with the compute capability it needs, the
    GPU that has it, and what would emulate it.
    """
    linear = config.quantize.linear
    grouped = config.quantize.grouped_mm
    float8 = "emulate = true"
    mx = 'recipe_name = "mxfp8_emulated"'
    if uses(config, FLOAT8) and not linear.float8.emulate:
        if linear.float8.recipe_name in (None, "tensorwise"):
            yield "quantize.linear.float8", (8, 9), "Ada or Hopper", float8
        else:
            yield "quantize.linear.float8", (9, 0), "Hopper", float8
    if uses(config, GROUPED_FLOAT8) and not grouped.float8.emulate:
        yield "quantize.grouped_mm.float8", (9, 0), "Hopper", float8
    if uses(config, GROUPED_MX) and grouped.mx.recipe_name != "mxfp8_emulated":
        yield "quantize.grouped_mm.mx", (10, 0), "Blackwell", mx
    if uses(config, MX) and linear.mx.recipe_name != "mxfp8_emulated":
        yield "quantize.linear.mx", (10, 0), "Blackwell", mx


@rule("moe.global_balance_loss", "model.overrides", needs=["decoder"], refuses=False)
def router_can_learn(config: Config, facts: Facts) -> str | None:
    decoder = facts.decoder
    has_balance_loss = config.moe.global_balance_loss or config.moe.sequence_balance_loss
    if has_balance_loss or decoder is None or decoder.experts_per_token != 1:
        return None
    if not decoder.normalize_expert_weights:
        return None
    return (
        "model.overrides.normalize_expert_weights: with one expert per token its weight is always "
        "1, so without a balance loss the router learns nothing; set it to false, or "
        "moe.global_balance_loss above 0"
    )


@rule("training.seq_len", "training.stages", "model.overrides", needs=["mtp_modules"])
def rows_have_further_tokens(config: Config, facts: Facts) -> str | None:
    modules = facts.mtp_modules
    training = config.training
    length = min([training.seq_len, *(stage.seq_len or modules + 1 for stage in training.stages)])
    if modules < length:
        return None
    return (
        f"training.seq_len: rows of {plural(length, 'token')} have no token for the last of "
        f"{plural(modules, 'module')} that predict further tokens; raise it above "
        "model.overrides.n_mtp, or lower that"
    )


@rule("training.mtp_loss_weight", "model.overrides", needs=["mtp_modules"])
def further_tokens_are_predicted(config: Config, facts: Facts) -> str | None:
    default = type(config.training).model_fields["mtp_loss_weight"].default
    if config.training.mtp_loss_weight == default or facts.mtp_modules:
        return None
    return (
        "training.mtp_loss_weight has no effect on a model without modules that predict further "
        "tokens; set [model.overrides] n_mtp = 1, or remove the weight"
    )


@rule("training.mtp_loss_weight", "model.overrides", needs=["mtp_modules"], refuses=False)
def further_tokens_are_learnt(config: Config, facts: Facts) -> str | None:
    if config.training.mtp_loss_weight or not facts.mtp_modules:
        return None
    return (
        "training.mtp_loss_weight: with 0 the modules of model.overrides.n_mtp are computed, but "
        "learn nothing; raise it, or set n_mtp to 0"
    )
