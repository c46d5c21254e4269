"""The coordinate check of muP: do activations keep their size as the model gets wider, and do
updates change them by the same amount (Yang et al., arXiv:2203.03466, appendix D.1)?

A model that passes can be trained, at any width, with the learning rate that was found at a small
one. In the standard parametrization, activations or updates grow with the width to the power of 1/2
or 1.

    python examples/coordinate_check.py 64,128,256 --job.config_file debug_model \\
        --model.overrides.mup_base_dim 256

The model is the configuration's, made small. A module named by `experimental.custom_import` is
found if `PYTHONPATH` has its folder. Exits with 1 if a size moves with the width.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.config import resolve
from torchtitan.config.sections.schema import Config
from torchtitan.models.attention.backend import attention_backend
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.parallel.init import materialize
from torchtitan.train.preflight import Setup, preflight
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.process import run_main

LAYERS = 2
STEPS = 3
SEEDS = 3
ROWS = 4
SEQ_LEN = 32
VOCAB = 256
LIMIT = 0.25
"""Largest slope that passes: half the smallest power of the width that a wrong scale causes."""
LOGITS = "logits"
"""The logits of the next tokens. An update moves them in a direction that the states share; in the
logits of other tokens it is noise, which shrinks with the width.
"""

Sizes = dict[tuple[str, str], float]
"""Size by module and `start` or `change`: the mean absolute output at the start, or the mean
absolute change of it by `STEPS` updates.
"""


@dataclass(frozen=True)
class Trend:
    """The sizes of one module's outputs over the width."""

    module: str
    what: str
    """`start` or `change`."""
    sizes: Sequence[float]
    slope: float
    """Slope of the logarithm of the size over the logarithm of the width."""

    @property
    def passes(self) -> bool:
        # In muP the first logits shrink with the root of the width: output weights start at random.
        shrinks = self.module == LOGITS and self.what == "start"
        return self.slope <= LIMIT and (self.slope >= -LIMIT or shrinks)


def check_widths(config: Config, setup: Setup, widths: Sequence[int]) -> tuple[bool, str]:
    """Train small models of the configured kind that differ in width, on this process.

    Returns:
        Whether all pass, and a report.

    Raises:
        ConfigError: the model can't have one of the widths.
    """
    unit = setup.spec.tiny(setup.args, LAYERS, 1)["dim"]
    if invalid_widths := [width for width in widths if width % unit]:
        kind = f"{config.model.name} {config.model.flavor}"
        raise ConfigError(
            [f"width {invalid_widths[0]}: a width of a small {kind} is a multiple of {unit}"]
        )
    by_width = [_sizes(config, setup, width // unit) for width in widths]
    trends = []
    for module, what in by_width[0]:
        sizes = [sizes_of_width[module, what] for sizes_of_width in by_width]
        trends.append(Trend(module, what, sizes, slope(widths, sizes)))
    passes = all(trend.passes for trend in trends)
    return passes, _report(config, widths, trends)


def slope(widths: Sequence[int], sizes: Sequence[float]) -> float:
    """The exponent p of the power law `size ~ width^p` that fits best; infinite if a size isn't
    finite.
    """
    if not any(sizes):
        return 0.0
    if not all(0 < size < math.inf for size in sizes):
        return math.inf
    x = torch.tensor(widths, dtype=torch.float64).log()
    y = torch.tensor(sizes, dtype=torch.float64).log()
    x -= x.mean()
    return ((x * y).sum() / (x * x).sum()).item()


def _sizes(config: Config, setup: Setup, heads: int) -> Sizes:
    """The sizes in a model with this many key-value heads: the mean over seeds."""
    by_seed = [_sizes_for_seed(config, setup, heads, seed) for seed in range(SEEDS)]
    return {key: sum(sizes[key] for sizes in by_seed) / SEEDS for key in by_seed[0]}


def _sizes_for_seed(config: Config, setup: Setup, heads: int, seed: int) -> Sizes:
    spec = setup.spec
    small = spec.tiny(setup.args, LAYERS, heads) | {"vocab_size": VOCAB}
    overrides = {**config.model.overrides, **small}
    args = spec.args(config.model.flavor, overrides, max_seq_len=SEQ_LEN)
    device = torch.device("cpu")
    model: Any = spec.build(args, attention_backend("cpu"))
    materialize(model, device, device, seed, rule=lambda fqn: spec.init(fqn, args))
    optimizer = build_optimizer(
        [model], config.optimizer, config.custom, lambda fqn: spec.width_ratio(fqn, args)
    )
    for group in optimizer.param_groups:
        group["lr"] = config.optimizer.lr * group["lr_scale"]
    tokens = _tokens(seed)
    inputs = tokens[:, :-1]
    labels = tokens[:, 1:]
    observe = _observer(model)
    before = observe(inputs, labels)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = observe(inputs, labels)
    sizes = Sizes()
    for module in before:
        sizes[module, "start"] = before[module].abs().mean().item()
        change = after[module] - before[module]
        sizes[module, "change"] = change.abs().mean().item()
    return sizes


def _tokens(seed: int) -> Tensor:
    """`[ROWS, SEQ_LEN + 1]`, some tokens more frequent than others, as in text."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(ROWS, SEQ_LEN + 1, generator=generator)
    return (VOCAB * uniform**2).long()


def _observer(model: nn.Module) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """A function that returns the outputs of the model's modules by name, in order of execution."""
    outputs: dict[str, Tensor] = {}
    names = ["tok_embeddings"]
    for index, layer in model.get_submodule("layers").named_children():
        names += [f"layers.{index}.{name}" for name, _ in layer.named_children()]
        names.append(f"layers.{index}")
    for name in names:
        if "norm" in name:
            continue

        def keep(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            outputs[name] = (output[0] if isinstance(output, tuple) else output).detach()

        model.get_submodule(name).register_forward_hook(keep)

    @torch.no_grad()
    def observe(tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs.clear()
        logits = model(tokens)
        return {**outputs, LOGITS: logits.gather(-1, labels[..., None])}

    return observe


def _report(config: Config, widths: Sequence[int], trends: Sequence[Trend]) -> str:
    header = " ".join(f"{width:>9}" for width in widths)
    lines = [
        f"{config.model.name} {config.model.flavor}, {LAYERS} blocks, {config.optimizer.name}, "
        f"learning rate {config.optimizer.lr:g}: mean |output| at the start, and its change by "
        f"{STEPS} updates",
        f"  {'module':<24} {'':<6} {header}   slope",
    ]
    for trend in trends:
        sizes = " ".join(f"{size:>9.2e}" for size in trend.sizes)
        mark = "" if trend.passes else "  moves"
        lines.append(f"  {trend.module:<24} {trend.what:<6} {sizes}  {trend.slope:>+6.2f}{mark}")
    failures = [trend for trend in trends if not trend.passes]
    if not failures:
        lines.append(f"PASS: no slope is above {LIMIT}; a learning rate carries over to any width")
        return "\n".join(lines)
    worst = max(failures, key=lambda trend: abs(trend.slope))
    on = "mup_base_dim" in config.model.overrides
    hint = "" if on else " ([model.overrides] mup_base_dim turns muP on)"
    lines.append(
        f"FAIL: {len(failures)} of {len(trends)} sizes move with the width, most of all the "
        f"{worst.what} of {worst.module}, as width^{worst.slope:.2f}; a learning rate doesn't "
        f"carry over{hint}"
    )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    widths = sorted({int(width) for width in argv[0].split(",")})
    resolved = resolve(argv[1:], 1, check=False)
    setup = preflight(resolved.config, world=1, sources=resolved.sources, output=False)
    passed, text = check_widths(resolved.config, setup, widths)
    print(text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
