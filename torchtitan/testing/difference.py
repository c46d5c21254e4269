"""The differences between a run and its reference, and their tolerances."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.config.sections.optim import Optimizer
from torchtitan.config.sections.schema import Config
from torchtitan.models.spec import is_matrix
from torchtitan.testing.observe import ROUTING_BIAS, Observation

EPS = torch.finfo(torch.float32).eps
BF16_EPS = torch.finfo(torch.bfloat16).eps


def rounding(terms: int, chain: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """Largest relative difference of results that add the same numbers in other orders.

    Rounding errors of a sum are nearly random, so they grow like the root of their number
    (Higham and Mary, 2019).

    Args:
        terms: number of terms of the longest sum.
        chain: number of sums that follow each other.
    """
    return 4 * math.sqrt(terms * chain) * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences that fp32 sums in another order explain."""

    # the terms are a vocabulary or the tokens of a step, the chain is some layers
    gradient: float = rounding(terms=4096, chain=12)
    """Largest difference within a parameter's gradient, relative to its largest element."""
    loss: float = 1e-5
    """Smaller, because the loss is a mean over tokens, whose errors cancel."""
    grad_norm: float = 1e-5
    """Smaller, because the norm sums over all elements."""


def tolerances_of(config: Config) -> Tolerances:
    """Tolerances for the dtypes that `config` computes in; the reference uses fp32 throughout."""
    if config.model.converters:  # operands have 3 bits of mantissa, eps is 2^-3
        return Tolerances(loss=1e-2, grad_norm=5e-2, gradient=0.5)
    return Tolerances()


@dataclass(frozen=True)
class Difference:
    """Relative differences between a run and its reference, as in `Tolerances`.

    Loss, norm and gradients cover the steps that can be compared. A step in which a token went to
    another expert, because two experts' scores were equal up to rounding, can't.
    """

    loss: float
    first_loss: float
    """Difference in the first step: before any update, so it depends on the forward alone."""
    grad_norm: float
    step: int
    """The first step that can be compared, from 0."""
    gradients: dict[str, float]
    """Difference of each parameter's gradient in that step."""
    later_gradients: dict[str, float]
    """The largest difference in later steps; empty if there are none."""
    weights: dict[str, float]
    """The largest difference of an update by the same gradients, as a multiple of the difference
    that rounding explains, which depends on the optimizer.
    """
    mtp_loss: float
    validation_loss: float
    tokens_differ: bool
    flips: int
    """Lower bound of the tokens that were sent to other experts, over all steps and layers."""
    first_flip: tuple[int, int] | None
    """Step and layer in which tokens were first sent to other experts."""
    miscount: str | None
    """A sentence on the first layer and step whose experts counted a different total of rows."""
    biases: dict[str, float]
    """Absolute difference of each routing bias after the first step. Biases follow from integer
    counts, so the difference should be 0.
    """

    @property
    def gradient(self) -> float:
        return max(self.gradients.values())

    def problems(self, tolerances: Tolerances) -> list[str]:
        """A phrase for each quantity that is out of tolerance."""
        checks = {
            "loss": (max(self.loss, self.validation_loss), tolerances.loss),
            "loss of further tokens": (self.mtp_loss, tolerances.loss),
            "gradient norm": (self.grad_norm, tolerances.grad_norm),
            "gradients": (self.gradient, tolerances.gradient),
        }
        phrases = [
            f"{what}: off by {value:.1e}"
            for what, (value, limit) in checks.items()
            if not value <= limit
        ]
        later, error = _largest(self.later_gradients)
        if not error <= tolerances.gradient:
            phrases.append(f"{later}: gradient off by {error:.1e} in a later step")
        weight, error = _largest(self.weights)
        if not error <= 1:
            phrases.append(f"{weight}: update off by {error:.1e} times its rounding")
        if self.tokens_differ:
            phrases.append("token counts differ")
        if self.miscount is not None:
            phrases.append(self.miscount)
        return [
            *phrases,
            *(
                f"{name}: off by {value:.1e} after step 1"
                for name, value in self.biases.items()
                if value
            ),
        ]


def difference(run: Observation, expected: Observation, optimizer: Optimizer) -> Difference:
    """Compare a run with its reference.

    Args:
        expected: the reference of this run.

    Raises:
        AssertionError: the observations are of different models or numbers of steps.
    """
    assert len(run.losses) == len(expected.losses) == len(run.gradients) == len(expected.gradients)
    assert len(run.mtp_losses) == len(expected.mtp_losses)
    assert len(run.validation_losses) == len(expected.validation_losses)
    assert len(run.weights) == len(expected.weights)
    steps = _comparable(run, expected)
    first, *later = (
        _gradient_differences(run.gradients[step], expected.gradients[step]) for step in steps
    )
    return Difference(
        loss=_worst(run.losses, expected.losses, steps),
        first_loss=_worst(run.losses, expected.losses, [0]),
        grad_norm=_worst(run.grad_norms, expected.grad_norms, steps),
        step=steps[0],
        gradients=first,
        later_gradients={name: max(distances[name] for distances in later) for name in first}
        if later
        else {},
        weights=_update_differences(run.weights, expected.weights, optimizer),
        mtp_loss=_worst(run.mtp_losses, expected.mtp_losses, steps) if run.mtp_losses else 0.0,
        validation_loss=_worst(run.validation_losses, expected.validation_losses),
        tokens_differ=run.tokens != expected.tokens,
        flips=sum(int(_flips(a, b).sum()) for a, b in zip(run.loads, expected.loads, strict=True)),
        first_flip=_first_flip(run.loads, expected.loads),
        miscount=_miscount(run.loads, expected.loads),
        biases={
            name: _distance(run.weights[0][name], bias)
            for name, bias in expected.weights[0].items()
            if name.endswith(ROUTING_BIAS)
        },
    )


def _comparable(run: Observation, expected: Observation) -> list[int]:
    """The steps that can be compared: every token went to the same experts, or to others without a
    tie that explains it. All steps if no step can.
    """
    steps = range(len(run.losses))
    if not run.loads:
        return list(steps)
    return [
        step
        for step in steps
        if not _tied(run.loads[step], expected.loads[step], expected.ties[step])
    ] or [*steps]


def _tied(loads: Tensor, expected: Tensor, ties: Tensor) -> bool:
    """Whether tokens were sent to other experts, and ties explain it. Only the first such layer
    is judged, because after it all tokens differ.
    """
    flips = _flips(loads, expected)
    layers = flips.nonzero().flatten().tolist()
    return bool(layers) and bool(flips[layers[0]] <= ties[layers[0]])


def _gradient_differences(
    gradients: dict[str, Tensor], expected: dict[str, Tensor]
) -> dict[str, float]:
    assert gradients.keys() == expected.keys()
    return {
        name: _distance(gradients[name], value) / max(value.abs().max().item(), 1e-30)
        for name, value in expected.items()
    }


def _update_differences(
    weights: Sequence[dict[str, Tensor]],
    expected: Sequence[dict[str, Tensor]],
    optimizer: Optimizer,
) -> dict[str, float]:
    distances = dict.fromkeys(expected[0], 0.0)
    for step, values in enumerate(expected):
        assert weights[step].keys() == values.keys()
        for name, value in values.items():
            matrix = is_matrix(name, value[0].dim()) and name.startswith("layers.")
            by_muon = optimizer.name == "Muon" and matrix
            distance = _muon_distance if by_muon else _adam_distance
            distances[name] = max(
                distances[name], _or_inf(distance(weights[step][name], value, optimizer, step + 1))
            )
    return distances


def _adam_distance(weights: Tensor, expected: Tensor, optimizer: Optimizer, step: int) -> float:
    """The largest difference of an update, as a multiple of the difference that rounding explains.
    It holds for all element-wise optimizers.

    With equal gradients nothing is amplified: an update is at most about the learning rate, and
    some 16 operations on an element round by half an eps each. Then the weight is decayed and added
    to, which rounds itself twice. Moments stored in bf16 are rounded once per step. All of it on
    both sides.
    """
    moments = step * BF16_EPS if optimizer.state_dtype == "bfloat16" else 0.0
    limit = optimizer.lr * (16 * EPS + moments) + 2 * EPS * expected.abs()
    return ((weights - expected).abs() / limit).max().item()


def _muon_distance(weights: Tensor, expected: Tensor, optimizer: Optimizer, step: int) -> float:
    """The root mean square difference of an update of matrices, as a multiple of its rounding.

    Muon divides a matrix by its norm, and rounds to bf16, on both sides: that adds singular values
    up to about eps / 2 * (rows^-1/2 + columns^-1/2). Each iteration multiplies those near 0 by
    3.4445. The result, whose singular values are near 1, is scaled to a root mean square of 0.2.
    """
    rows, columns = expected.shape[-2:]
    noise = BF16_EPS / 2 * (rows**-0.5 + columns**-0.5)
    limit = optimizer.lr * 0.2 * noise * 3.4445**optimizer.muon_ns_steps
    error = (weights - expected).square().mean((-2, -1)).sqrt()
    return (error / limit).max().item()


def _flips(loads: Tensor, expected: Tensor) -> Tensor:
    """`[layers]`, lower bound of the rows that went to other experts, if the totals are equal."""
    return ((loads - expected).abs().sum(1) - (loads.sum(1) - expected.sum(1)).abs()) / 2


def _first_flip(loads: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[int, int] | None:
    for step, (a, b) in enumerate(zip(loads, expected, strict=True), 1):
        for layer in _flips(a, b).nonzero().flatten().tolist():
            return step, layer
    return None


def _miscount(loads: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    for step, (a, b) in enumerate(zip(loads, expected, strict=True), 1):
        for layer, (count, target) in enumerate(
            zip(a.sum(1).tolist(), b.sum(1).tolist(), strict=True)
        ):
            if count != target:
                return (
                    f"layers.{layer}.moe.router: counts {count:.0f} rows in step {step} "
                    f"instead of {target:.0f}"
                )
    return None


def _worst(
    values: Sequence[float], expected: Sequence[float], steps: Iterable[int] | None = None
) -> float:
    indices = range(len(expected)) if steps is None else steps
    return max(
        (_or_inf(abs(values[i] - expected[i]) / abs(expected[i])) for i in indices), default=0.0
    )


def _distance(a: Tensor, b: Tensor) -> float:
    return _or_inf((a - b).abs().max().item())


def _largest(values: dict[str, float]) -> tuple[str, float]:
    return max(values.items(), key=lambda item: item[1], default=("", 0.0))


def _or_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value
