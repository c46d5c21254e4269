"""Rules on CUDA graphs of blocks: what a graph has recorded must be there when it is replayed."""

from collections.abc import Iterator
from operator import attrgetter

from torchtitan.config.derive import gradient_accumulation_steps, sums_whole_gradients
from torchtitan.config.features import compiles_blocks, selects_operations
from torchtitan.config.rules.table import Facts, refuse, rule
from torchtitan.config.sections.schema import Config

_KEY = "compile.cuda_graphs"
_OFF = "or cuda_graphs = false"
_MUST_BE_OFF = {
    "training.document_mask": "the number of documents differs from batch to batch",
    "training.enable_cpu_offload": "weights come from host memory",
    "activation_checkpoint.offload_blocks": (
        "the next graph overwrites activations while they are copied to the host"
    ),
    "optimizer.qk_clip": "a block records the largest scores outside of what it returns",
    "quantize.linear.float8.enable_fsdp_float8_all_gather": "weights gathered in Float8 move",
}
"""Key to why."""


@rule(
    _KEY,
    "compile",
    "parallelism",
    "training",
    "activation_checkpoint",
    "optimizer.qk_clip",
    "quantize.linear.float8.enable_fsdp_float8_all_gather",
)
def graphs_find_what_they_recorded(config: Config, facts: Facts) -> Iterator[str]:
    if not config.compile.cuda_graphs:
        return
    p = config.parallelism
    ac = config.activation_checkpoint
    if not compiles_blocks(config) or config.compile.backend != "inductor":
        yield (
            f"{_KEY} are recorded by inductor; set compile.enable = true, with "
            f'"model" in compile.components and backend = "inductor", {_OFF}'
        )
    if p.fsdp_reshard_after_forward != "never":
        yield (
            f"{_KEY}: graphs read weights where they were gathered first, so they stay allocated; "
            f'set parallelism.fsdp_reshard_after_forward = "never", {_OFF}'
        )
    for key in ("pipeline_parallel_degree", "tensor_parallel_degree", "context_parallel_degree"):
        if getattr(p, key) > 1:
            why = "would record a block's collectives, which is not proven"
            if key.startswith("pipeline"):
                why = "would be needed for each microbatch that is under way"
            yield f"{_KEY}: graphs {why}; set parallelism.{key} = 1, {_OFF}"
    if p.expert_parallel_degree > 1 and p.expert_parallel_exchange == "counted":
        yield (
            f"{_KEY}: experts on other ranks get another number of rows each time; set "
            f'parallelism.expert_parallel_exchange = "fixed", {_OFF}'
        )
    if ac.mode != "none" and not selects_operations(ac):
        yield (
            f"{_KEY}: attention would be recomputed with a saved state of the random generator, "
            'which a graph doesn\'t record; set activation_checkpoint.mode = "none", or '
            f'"selective" with selective_ac_option = "op", {_OFF}'
        )
    for key, why in _MUST_BE_OFF.items():
        if value := attrgetter(key)(config):
            yield f"{_KEY}: {why}; set {key} = {'false' if value is True else 0}, {_OFF}"


refuse(
    _KEY,
    "training.global_batch_size",
    "training.mixed_precision_param",
    when=lambda c: (
        c.compile.cuda_graphs
        and sums_whole_gradients(c)
        and c.training.mixed_precision_param == c.training.mixed_precision_reduce
        and gradient_accumulation_steps(c) > 1
    ),
    because=(
        f"{_KEY}: whole gradients of a step's batches would add up in memory that the next batch's "
        'graphs overwrite; set training.mixed_precision_param = "bfloat16" and '
        'training.mixed_precision_reduce = "float32", or raise training.local_batch_size until one '
        f"batch covers global_batch_size, {_OFF}"
    ),
    needs=["layout"],
)


@rule(_KEY, needs=["device"])
def graphs_need_cuda(config: Config, facts: Facts) -> str | None:
    if not config.compile.cuda_graphs or facts.device.capability != (0, 0):
        return None
    return f"{_KEY} need CUDA, this is {facts.device.name}; set it to false"
