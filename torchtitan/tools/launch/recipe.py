"""Turns a request into a configuration whose file states the reason for each value."""

import math
from operator import attrgetter
from typing import Any

from torchtitan.config.derive import divisors
from torchtitan.config.load.command_line import flag_text
from torchtitan.tools.launch.model_choice import ModelChoice
from torchtitan.tools.launch.preparation import has_held_out, prepared_settings
from torchtitan.tools.launch.request import Choice, Choices, Request
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.predict import Plan
from torchtitan.tools.planner.render import run_of
from torchtitan.utils.wording import show_duration, show_tokens

TOKENS_PER_PARAMETER = 20
"""Compute-optimal ratio of Hoffmann et al., "Training Compute-Optimal Large Language Models",
arXiv:2203.15556.
"""
_ROWS = {20e6: 256, 100e6: 1024, 400e6: 2048}
"""Row lengths of models below these numbers of parameters, as in `debug_model.toml`, llama2.c's 42M
(github.com/karpathy/llama2.c), GPT-3 and MobileLLM.
"""
_LONG_ROWS = 4096
_RATES = {
    6.2e6: (1.5e-3, "debug_model.toml"),
    70e6: (1e-3, "Pythia 70M, arXiv:2304.01373, table 1"),
    125e6: (6e-4, "GPT-3 125M, arXiv:2005.14165, table 2.1"),
    350e6: (3e-4, "GPT-3 350M, arXiv:2005.14165, table 2.1"),
    1.24e9: (4e-4, "llama3_1b.toml"),
    8e9: (3e-4, "Llama 3 8B, arXiv:2407.21783, table 3"),
    70e9: (1.5e-4, "Llama 3 70B, arXiv:2407.21783, table 3"),
    405e9: (8e-5, "Llama 3 405B, arXiv:2407.21783, table 3"),
}
"""Peak learning rate and its source, by number of parameters."""
_BATCHES = {
    6.2e6: (2**11, "debug_model.toml"),
    15e6: (2**17, "llama2.c's 15M, github.com/karpathy/llama2.c"),
    125e6: (2**19, "GPT-3 125M, arXiv:2005.14165, table 2.1"),
    760e6: (2**19, "GPT-3 760M, arXiv:2005.14165, table 2.1"),
    1.3e9: (2**20, "GPT-3 1.3B, arXiv:2005.14165, table 2.1"),
    6.7e9: (2**21, "GPT-3 6.7B, arXiv:2005.14165, table 2.1"),
    70e9: (2**22, "Llama 2 70B, arXiv:2307.09288, section 2.2"),
}
"""Tokens of a step and their source, by number of parameters."""
_FEWEST_STEPS = 200
"""Minimum number of optimizer steps; a run that is too short for it gets a smaller batch."""
_FEWEST_ROWS = 4
"""Minimum rows of a step, or one per device: the loss of a single row is noise."""
_ROUGH_EFFICIENCY = 0.6
"""Assumed share of the hardware's matmul rate, for a first guess at the speed."""
_MOST_LOGITS = 2**27
"""Maximum logits in a chunk of one row's loss: half a GiB in fp32."""
_BF16_GAIN = 1.5
"""Minimum speedup of bf16 over fp32 products on a CPU that justifies casts and lost digits."""
_WARMUP = 2000
"""Maximum warm-up steps, as Llama 2, arXiv:2307.09288, section 2.2."""
_SAVE_SECONDS = 1800
_VALIDATION_BATCHES = 8


def default_seq_len(model: ModelChoice) -> int:
    parameters = model.parameters()[0]
    return next((rows for size, rows in _ROWS.items() if parameters < size), _LONG_ROWS)


def suggested_tokens(model: ModelChoice) -> float:
    """A compute-optimal number of tokens, by a mixture's active parameters (an assumption)."""
    return float(TOKENS_PER_PARAMETER * model.parameters()[1])


def _nearest(table: dict[float, tuple[Any, str]], parameters: int) -> tuple[Any, str]:
    return table[min(table, key=lambda size: abs(math.log(size / parameters)))]


def _rows(tokens: int, seq_len: int, devices: int) -> int:
    """Number of rows with about `tokens` in total, divisible by a large divisor of `devices`."""
    nearest = max(1, round(tokens / seq_len))
    unit = divisors(devices, nearest)[-1]
    return unit * round(nearest / unit)


def _global_batch(request: Request) -> tuple[int, str]:
    """Rows of a step and the reason: the published batch, less for short runs."""
    batch, source = _nearest(_BATCHES, request.model.parameters()[0])
    most = max(1.0, _rough_tokens(request) / _FEWEST_STEPS)
    short = most < batch
    tokens = batch
    if short:  # a power of two, since degrees are
        least = min(batch, max(request.devices, _FEWEST_ROWS) * request.seq_len)
        tokens = max(least, 2 ** int(math.log2(most)))
    rows = _rows(tokens, request.seq_len, request.devices)
    why = f"{rows * request.seq_len:,} tokens per step"
    if short:
        return rows, f"{why}, few for a short run; {source}, had {batch:,}"
    return rows, f"{why}, near {batch:,} of {source}"


def _rough_tokens(request: Request) -> float:
    """Tokens of the run, estimated before a plan predicts its speed."""
    if "training.steps" in request.flag_settings:
        return math.inf
    if request.tokens is not None:
        return request.tokens
    hardware = request.hardware
    rate = hardware.fp32 if request.on_cpu else hardware.bf16
    rate *= hardware.gemm_bf16 * _ROUGH_EFFICIENCY * request.devices
    return (request.hours or 0.0) * 3600 * rate / (6 * request.model.parameters()[1])


def draft_settings(request: Request) -> Choices:
    """Settings that a layout search needs."""
    model = request.model
    data = request.data
    parameters, active = model.parameters()
    rate, rate_source = _nearest(_RATES, parameters)
    rows, batch_why = _global_batch(request)
    logits = request.seq_len * model.args.vocab_size
    chunks = next(n for n in divisors(request.seq_len) if logits <= n * _MOST_LOGITS)
    size = f"{show_tokens(parameters)} parameters"
    size += f", {show_tokens(active)} of them active" if active < parameters else ""
    settings = {
        "job.description": Choice(f"{model.name} on {data.dataset}", "for the log and trackers"),
        "job.dump_folder": Choice(
            request.path_inside("run"), "metrics and checkpoints of this run"
        ),
        "model.name": Choice(model.spec.name, "the family"),
        "model.flavor": Choice(
            model.flavor, size if not model.overrides else "the nearest size; see the overrides"
        ),
        "optimizer.lr": Choice(rate, f"as {rate_source}"),
        "lr_scheduler.name": Choice(
            "cosine", "decays from the end of warm-up to the end of the run"
        ),
        "lr_scheduler.min_lr_factor": Choice(
            0.1, "a tenth of the peak at the end, as Llama 2, arXiv:2307.09288"
        ),
        "training.dataset": Choice(data.dataset, data.kind),
        "training.seq_len": Choice(request.seq_len, "tokens per row"),
        "training.global_batch_size": Choice(rows, batch_why),
        "training.loss_chunks": Choice(chunks, "parts of a row's logits"),
        "compile.enable": Choice(not request.on_cpu, "faster; the first steps take longer"),
        "checkpoint.enable": Choice(True, "the same command resumes"),
        "checkpoint.async_mode": Choice(
            "async" if request.on_cpu else "async_with_pinned_mem",
            "training continues while a checkpoint is written",
        ),
    }
    settings |= {
        f"model.overrides.{key}": Choice(value, model.overrides_from)
        for key, value in model.overrides.items()
    }
    if request.on_cpu:
        settings["training.mixed_precision_param"] = _cpu_precision(request.hardware)
    elif not request.hardware.accelerator.has_bf16:
        settings["training.mixed_precision_param"] = Choice(
            "float32", f"{request.hardware.name} has no bfloat16"
        )
    if model.has_weights:
        settings["checkpoint.initial_load_in_hf"] = Choice(
            True, "start from the weights beside the tokenizer"
        )
    settings |= prepared_settings(request) | _validation(request)
    return settings | request.flag_settings


def _cpu_precision(hardware: Hardware) -> Choice:
    """The faster precision by measured products: bf16 instructions of some CPUs are slower."""
    ratio = hardware.bf16 / hardware.fp32
    name = "bfloat16" if ratio >= _BF16_GAIN else "float32"
    return Choice(name, f"products are {ratio:.1f} times as fast in bfloat16 as in float32 here")


def _validation(request: Request) -> Choices:
    if not has_held_out(request):
        return {}
    return {
        "validation.enable": Choice(True, "loss on text that training never sees"),
        "validation.steps": Choice(_VALIDATION_BATCHES, "global batches per validation"),
    }


# ---- with a layout


def final_settings(settings: Choices, plan: Plan, request: Request) -> Choices:
    """The settings with a plan's layout, and with steps, warm-up and saves from its speed."""
    steps = steps_of(plan, request)
    per_save = max(1, min(round(_SAVE_SECONDS / plan.time.seconds), steps // 10))
    warmup = min(_WARMUP, max(1, steps // 10))
    from_plan = _layout(plan) | {
        "training.steps": Choice(steps, _length(plan, request, steps)),
        "lr_scheduler.warmup_steps": Choice(
            warmup, "a tenth of the steps, at most 2,000 as Llama 2"
        ),
        "checkpoint.interval": Choice(
            per_save, "half an hour by the plan's speed, at most a tenth of the run"
        ),
    }
    if has_held_out(request):
        from_plan["validation.freq"] = Choice(per_save, "when a checkpoint is saved")
    return settings | from_plan | request.flag_settings


def steps_of(plan: Plan, request: Request) -> int:
    """Number of steps, from the requested tokens or from hours at the planned speed."""
    if steps := request.flag_settings.get("training.steps"):
        return int(steps.value)
    if request.tokens is not None:
        return max(1, math.ceil(request.tokens / plan.workload.tokens_per_step))
    return max(1, round((request.hours or 0.0) * 3600 / plan.time.seconds))


def _length(plan: Plan, request: Request, steps: int) -> str:
    tokens = float(steps * plan.workload.tokens_per_step)
    ratio = tokens / request.model.parameters()[1]
    kind = "active parameter" if plan.workload.experts else "parameter"
    duration = show_duration(run_of(plan, tokens).hours * 3600)
    return f"{show_tokens(tokens)} tokens, {ratio:.3g} per {kind}; {duration} by the plan's speed"


def _layout(plan: Plan) -> Choices:
    """Settings of the layout that a search chose."""
    p = plan.config.parallelism
    ac = plan.config.activation_checkpoint
    shard_degree = "parallelism.data_parallel_shard_degree"
    keys = {
        "parallelism.pipeline_parallel_degree": "parts of the layers",
        "parallelism.data_parallel_replicate_degree": "copies of the model",
        shard_degree: "FSDP: ranks that share parameters and optimizer state",
        "parallelism.context_parallel_degree": "parts of each row",
        "parallelism.tensor_parallel_degree": "parts of each matrix",
        "parallelism.expert_parallel_degree": "ranks that the experts are divided among",
        "parallelism.enable_async_tensor_parallel": "hides communication behind the products",
        "activation_checkpoint.mode": {
            "none": "everything fits; nothing is recomputed",
            "selective": "recomputes what is cheap, to fit",
            "full": "recomputes each block in the backward, to fit",
        }.get(ac.mode, "to fit"),
        "activation_checkpoint.selective_ac_option": "keeps attention and every second product",
        "training.local_batch_size": "rows of a rank at a time"
        + (
            f", {plan.workload.accumulation} times per step"
            if plan.workload.accumulation > 1
            else ""
        ),
        "training.loss_chunks": "parts of a row's logits",
    }
    if p.pipeline_parallel_degree > 1:
        keys |= {
            "parallelism.pipeline_parallel_schedule": f"idle for {plan.time.bubble:.1%} of a step",
            "parallelism.pipeline_parallel_microbatch_size": "rows of a microbatch",
        }
    if p.pipeline_parallel_layers_per_stage:
        keys |= {
            "parallelism.pipeline_parallel_layers_per_stage": f"{plan.stages_per_rank} stages "
            "per rank, which wait less for each other",
            "parallelism.pipeline_parallel_first_stage_less_layers": "for the embedding",
            "parallelism.pipeline_parallel_last_stage_less_layers": "for the output projection",
        }
    if plan.workload.world == 1:
        del keys[shard_degree]
    return {
        key: Choice(attrgetter(key)(plan.config), f"{text} (planned)") for key, text in keys.items()
    }


# ---- as a configuration


def as_flags(settings: Choices) -> list[str]:
    """The settings as flags of the command line."""
    return [f"--{key}={flag_text(key, setting.value)}" for key, setting in settings.items()]
