"""Compare a distributed run with one process, and find the mesh axes that cause an error."""

import itertools
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from torchtitan.config import Config, load_config, resolve
from torchtitan.config.derive import (
    DEGREE_KEYS,
    data_parallel_degree,
    gradient_accumulation_steps,
    layout_degrees,
    layout_name,
)
from torchtitan.config.load.render import to_toml
from torchtitan.config.sections.metrics import Metrics
from torchtitan.models.args import DecoderArgs
from torchtitan.models.decoder.traits import is_decoder
from torchtitan.parallel.agree import from_rank_0
from torchtitan.testing.difference import Difference, Tolerances, difference, tolerances_of
from torchtitan.testing.flops import flops_mismatch
from torchtitan.testing.observe import observe, write_corpus
from torchtitan.testing.reference import reference
from torchtitan.train.preflight import Setup, preflight
from torchtitan.utils.wording import plural

STEPS = 3


@dataclass(frozen=True)
class Finding:
    """The result of one comparison; the same on every rank."""

    difference: Difference
    problems: list[str]
    culprit: str | None
    """The parameter whose gradient is wrong and nearest to the loss, where the backward begins; or
    the first wrong routing bias.
    """
    factor: float | None
    """The factor by which the culprit is wrong; None if a factor doesn't explain the difference."""
    untrained: Sequence[str] = ()
    """Parameters that the loss doesn't depend on."""


def shrink(argv: Sequence[str], config: Config, setup: Setup, folder: Path) -> list[str]:
    """Arguments for the same run with a tiny model and few short rows, in fp32, which writes to
    `folder`.
    """
    p = config.parallelism
    training = config.training
    degrees = layout_degrees(p)
    cp = degrees["cp"]
    tp = degrees["tp"]
    pp = degrees["pp"]
    unit = math.lcm(2 * cp, cp * tp)
    seq_len = unit * max(1, 32 // unit)
    rows = training.local_batch_size // p.pipeline_parallel_microbatch_size if pp > 1 else 2
    accumulation = min(2, gradient_accumulation_steps(config))
    split_by_hand = (
        p.module_fqns_per_model_part
        or p.pipeline_parallel_layers_per_stage
        or p.pipeline_parallel_first_stage_less_layers
        or p.pipeline_parallel_last_stage_less_layers
    )
    layers = 2
    if setup.stages is not None:
        with_layers = sum(
            any(name.startswith("layers.") for name in stage) for stage in setup.stages.modules
        )
        layers = setup.args.n_layers if split_by_hand else max(2, with_layers)
    splits_heads = p.context_parallel_method == "ulysses"
    splits_heads = splits_heads or bool(setup.spec.context_parallel_sizes(setup.args))
    ranks = tp * cp if splits_heads else tp
    tiny = setup.spec.tiny(setup.args, layers, ranks if ranks > 1 else 2)
    if "n_experts" in tiny:
        tiny["n_experts"] = math.lcm(
            tiny["n_experts"], dist.get_world_size()
        )  # divides under every layout tried
    if isinstance(setup.args, DecoderArgs) and setup.args.mup_base_dim:
        tiny["mup_base_dim"] = tiny["dim"] // 2  # wider than its base, as the model may be
    corpus = write_corpus(folder / "corpus.jsonl")
    # The flags are written to a file, because one in an old spelling would clash with those below.
    config_file = folder / "config.toml"
    quiet_sections = {"metrics": Metrics(log_freq=1)}
    config_file.write_text(
        to_toml(load_config(list(argv)).config.model_copy(update=quiet_sections)), encoding="utf-8"
    )
    sizes = {
        **{f"model.overrides.{name}": value for name, value in tiny.items()},
        "training.dataset": "corpus",
        "training.dataset_path": corpus,
        "training.text_column": "text",
        "training.messages_column": "none",
        "training.sources": "[]",
        "training.stages": "[]",
        "training.seq_len": seq_len,
        "training.local_batch_size": rows,
        "training.global_batch_size": rows * data_parallel_degree(config) * accumulation,
        "training.steps": STEPS,
        "training.max_norm": 0,
        "training.callbacks": "[]",
        "training.dtype": "float32",
        "training.mixed_precision_param": "float32",
        "parallelism.pipeline_parallel_microbatch_size": 1,
        "optimizer.state_dtype": "float32",
        "optimizer.param_groups": "[]",
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.total_steps": "none",
        "lr_scheduler.decay_ratio": "none",
    }
    off = {
        "job.dump_folder": folder / "out",
        "profiling.enable_profiling": "false",
        "profiling.enable_memory_snapshot": "false",
        "validation.enable": "false",
        "checkpoint.enable": "false",
        "checkpoint.load_step": -1,
        "checkpoint.initial_load_path": "none",
        "checkpoint.initial_load_in_hf": "false",
        "checkpoint.last_save_in_hf": "false",
    }
    return [
        f"--job.config_file={config_file}",
        *(f"--{key}={value}" for key, value in {**sizes, **off}.items()),
    ]


def compare(argv: Sequence[str], tolerances: Tolerances) -> Finding:
    """Run on all ranks, and compare with the reference, which rank 0 runs."""
    config = resolve(list(argv), dist.get_world_size()).config
    setup = preflight(config)
    padded = bool(setup.spec.expert_sizes(setup.args))  # padding is routed, but must not count
    run = observe(config, setup, padded=padded)
    finding = None
    if dist.get_rank() == 0:
        expected = reference(config, setup, padded=padded, run=run, rounding=tolerances.gradient)
        delta = difference(run, expected, config.optimizer)
        wrong_names = [
            name for name, value in delta.gradients.items() if not value <= tolerances.gradient
        ]
        biases = [name for name, value in delta.biases.items() if value]
        culprit = wrong_names[-1] if wrong_names else next(iter(biases), None)
        step = delta.step if wrong_names else 0
        actual, targets = (
            (run.gradients, expected.gradients) if wrong_names else (run.weights, expected.weights)
        )
        factor = _factor(actual[step][culprit], targets[step][culprit]) if culprit else None
        finding = Finding(
            delta, delta.problems(tolerances), culprit, factor, untrained=expected.untrained
        )
    finding = from_rank_0(finding)
    assert finding is not None
    return finding


def _factor(copies: Tensor, expected: Tensor) -> float | None:
    reference = expected[0].double()
    worst = max(copies.double(), key=lambda copy: (copy - reference).abs().max().item())
    factor = ((worst * reference).sum() / (reference * reference).sum()).item()
    fits = (worst - factor * reference).norm() <= 1e-3 * worst.norm()
    return factor if fits else None


def find_axes(
    argv: Sequence[str], degrees: dict[str, int], rows: int, tolerances: Tolerances
) -> list[str]:
    """Find the mesh axes that cause the error: one, or several that cause it only in combination.
    Empty if none is found.

    Each axis is tried alone. A data-parallel axis that is right fills up the remaining ranks.
    Expert parallelism isn't an axis of the mesh: it uses as many of these ranks as it can.

    Args:
        degrees: degrees of the mesh axes and of ep.
        rows: number of rows of each data-parallel rank.
    """
    world = math.prod(degrees[axis] for axis in DEGREE_KEYS)

    def wrong(active: dict[str, int], filler: str) -> bool:
        trial = {axis: active.get(axis, 1) for axis in DEGREE_KEYS}
        trial[filler] *= world // math.prod(trial.values())
        data_parallel = trial["dp_replicate"] * trial["dp_shard"]
        ep = math.gcd(active.get("ep", 1), trial["dp_shard"] * trial["cp"] * trial["tp"])
        if "ep" in active and ep == 1:
            return False
        sizes = [f"--parallelism.{DEGREE_KEYS[axis]}={degree}" for axis, degree in trial.items()]
        sizes.append(f"--parallelism.expert_parallel_degree={ep}")
        sizes.append(f"--training.global_batch_size={rows * data_parallel}")
        return bool(compare([*argv, *sizes], tolerances).problems)

    bad_fillers = [filler for filler in ("dp_shard", "dp_replicate") if wrong({}, filler)]
    if len(bad_fillers) == 2:
        return ["dp_replicate or dp_shard"]
    active_axes = [axis for axis, degree in degrees.items() if degree > 1]
    if bad_fillers and bad_fillers[0] in active_axes:
        return bad_fillers
    filler = "dp_replicate" if bad_fillers == ["dp_shard"] else "dp_shard"
    for count in range(1, len(active_axes) + 1):
        for axes in itertools.combinations(active_axes, count):
            if set(axes) != {filler} and wrong({axis: degrees[axis] for axis in axes}, filler):
                return list(axes)
    return []


def verdict(finding: Finding, axes: list[str], tolerances: Tolerances) -> str:
    """One sentence: what differs, by how much, along which axes."""
    delta = finding.difference
    if finding.untrained:
        names = ", ".join(finding.untrained[:6])
        return f"FAIL: forward gives no gradient to {names}; it must use every parameter"
    if not finding.problems:
        return "PASS: the distributed run computes what one process does"
    along = f", along {' and '.join(axes)}" if axes else ", in this combination of axes only"
    if len(axes) > 1:
        along += " together"
    if delta.miscount is not None:  # biases and auxiliary losses follow from the counts
        return f"FAIL: {delta.miscount}{along}"
    if finding.culprit is None:
        return f"FAIL: {'; '.join(finding.problems)}{along} (the first step's gradients are right)"
    error = (delta.gradients | delta.biases)[finding.culprit]
    how = f"is {finding.factor:.2f}x" if finding.factor is not None else f"is off by {error:.1e}"
    if finding.culprit in delta.biases:
        return (
            f"FAIL: {finding.culprit}: {how} after step 1{along} (the first step's gradients "
            "and loads are right)"
        )
    count = sum(not value <= tolerances.gradient for value in delta.gradients.values())
    loss = delta.first_loss
    also = (
        ""
        if loss <= tolerances.loss
        else f"; the loss is off by {loss:.1e}, so the forward is wrong too"
    )
    if also and delta.first_flip is not None and delta.first_flip[0] == 1:
        also += f", and from layer {delta.first_flip[1]} on tokens are sent to other experts"
    return (
        f"FAIL: {finding.culprit}: gradient {how}{along} ({count} of {len(delta.gradients)} "
        f"parameters diverge, this one nearest to the loss{also})"
    )


def _table(delta: Difference, tolerances: Tolerances, mixture: bool) -> str:
    largest = {
        name: max(value, delta.later_gradients.get(name, 0.0))
        for name, value in delta.gradients.items()
    }
    worst = max(largest, key=lambda name: largest[name])
    rows = [
        ("loss", delta.loss, tolerances.loss, ""),
        ("gradient norm", delta.grad_norm, tolerances.grad_norm, ""),
        ("gradients", largest[worst], tolerances.gradient, f"  largest: {worst}"),
        ("weights", max(delta.weights.values()), 1.0, "  of an update's rounding"),
    ]
    lines = [
        f"  {name:<14} {value:.1e}  (at most {limit:.0e}){note}"
        for name, value, limit, note in rows
    ]
    lines.append(f"  {'tokens':<14} {'differ' if delta.tokens_differ else 'equal'}")
    if mixture:
        first = (
            ""
            if delta.first_flip is None
            else ", the first in step {} and layer {}".format(*delta.first_flip)
        )
        lines.append(f"  {'experts':<14} {plural(delta.flips, 'token')} sent to others{first}")
    return "\n".join(lines)


def check(argv: Sequence[str], tolerances: Tolerances | None = None) -> tuple[bool, str]:
    """Compare the run that `argv` configures, on the ranks that call this together.

    Returns:
        Whether it passes, and a report.
    """
    world = dist.get_world_size()
    config = resolve(list(argv), world).config
    tolerances = tolerances or tolerances_of(config)
    setup = preflight(config, output=False)
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        small = shrink(argv, config, setup, Path(folder))
        small_config = resolve(small, world).config
        degrees = layout_degrees(small_config.parallelism)
        mixture = bool(setup.spec.expert_sizes(setup.args))
        finding = compare(small, tolerances)
        rows = small_config.training.local_batch_size
        axes = []
        if finding.problems and not finding.untrained:
            axes = find_axes(small, degrees, rows, tolerances)
    layout = layout_name(degrees)
    schedule = (
        f", schedule {config.parallelism.pipeline_parallel_schedule}" if degrees["pp"] > 1 else ""
    )
    t = small_config.training
    table = _table(finding.difference, tolerances, mixture)
    text = (
        f"{plural(world, 'rank')}, {layout}{schedule}, against one process; {STEPS} steps of "
        f"{t.global_batch_size} x {t.seq_len} tokens, "
        f"fp32\n{table}\n{verdict(finding, axes, tolerances)}"
    )
    if not is_decoder(setup.spec):
        mismatch = flops_mismatch(setup.spec, setup.args, config.training.seq_len)
        text += f"\nwarning: {mismatch}" if mismatch else ""
    return not (finding.problems or finding.untrained), text
