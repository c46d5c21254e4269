"""How far a run is from the reference, and how far it may be."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from torchtitan.config.schema import Config
from torchtitan.lab.compare import Observation


@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences that fp32 sums in another order explain."""

    loss: float = 1e-5
    grad_norm: float = 1e-5
    gradient: float = 1e-4
    """Largest difference within a parameter's gradient, relative to its largest element."""
    weight: float = 1e-2
    """Largest difference within a weight, relative to the peak learning rate. Adam divides by the gradient's magnitude,
    so an element whose gradient is almost zero moves by a noticeable fraction of it in either direction."""


def tolerances_of(config: Config) -> Tolerances:
    """Tolerances for the dtypes that `config` computes in; the reference uses fp32 throughout."""
    if config.model.converters:  # matrix products have operands with 3 bits of mantissa
        return Tolerances(loss=1e-2, grad_norm=5e-2, gradient=0.5, weight=20)
    if config.optimizer.name == "Muon" or config.optimizer.state_dtype == "bfloat16":  # updates in bf16
        return Tolerances(loss=1e-4, grad_norm=1e-3, weight=0.5)
    return Tolerances()


@dataclass(frozen=True)
class Difference:
    """How far a run is from the reference; relative, as in `Tolerances`."""

    loss: float
    first_loss: float
    """In the first step: before any update, so it depends on the forward alone."""
    grad_norm: float
    gradients: dict[str, float]
    weights: dict[str, float]
    validation_loss: float
    tokens_differ: bool
    flips: int
    """Tokens, at least, that were sent to other experts, over all steps and layers."""
    first_flip: tuple[int, int] | None
    """Step and layer of the first of them."""
    miscount: str | None
    """The first layer and step whose experts counted other numbers of rows together, in words."""
    biases: dict[str, float]
    """Routing bias to its absolute difference after the first step, where all tokens were sent to the same experts.
    It follows from integers, so it is exact."""

    @property
    def gradient(self) -> float:
        return max(self.gradients.values())

    def problems(self, tolerances: Tolerances) -> list[str]:
        """A phrase for each quantity that is out of tolerance."""
        checks = {
            "loss": (max(self.loss, self.validation_loss), tolerances.loss),
            "gradient norm": (self.grad_norm, tolerances.grad_norm),
            "gradients": (self.gradient, tolerances.gradient),
        }
        if not self.flips:  # an expert that gets another token gets another update
            checks["weights"] = max(self.weights.values()), tolerances.weight
        found = [f"{what}: off by {value:.1e}" for what, (value, limit) in checks.items() if not value <= limit]
        if self.tokens_differ:
            found.append("token counts differ")
        if self.miscount is not None:
            found.append(self.miscount)
        return [*found, *(f"{name}: off by {value:.1e} after step 1" for name, value in self.biases.items() if value)]


def difference(run: Observation, expected: Observation, peak_lr: float) -> Difference:
    """How far `run` is from `expected`.

    Args:
        peak_lr: learning rate that differences of weights are relative to.

    Raises:
        AssertionError: the observations are of different models or numbers of steps.
    """
    assert run.gradients.keys() == expected.gradients.keys()
    assert run.weights.keys() == expected.weights.keys()
    first_flip = _first_flip(run.loads, expected.loads)
    assert len(run.losses) == len(expected.losses)
    assert len(run.validation_losses) == len(expected.validation_losses)
    return Difference(
        loss=_worst(run.losses, expected.losses),
        first_loss=_worst(run.losses[:1], expected.losses[:1]),
        grad_norm=_worst(run.grad_norms, expected.grad_norms),
        gradients={
            name: _distance(run.gradients[name], grad) / max(grad.abs().max().item(), 1e-30)
            for name, grad in expected.gradients.items()
        },
        weights={name: _distance(run.weights[name], weight) / peak_lr for name, weight in expected.weights.items()},
        validation_loss=_worst(run.validation_losses, expected.validation_losses),
        tokens_differ=run.tokens != expected.tokens,
        flips=sum(int(_flips(a, b).sum()) for a, b in zip(run.loads, expected.loads, strict=True)),
        first_flip=first_flip,
        miscount=_miscount(run.loads, expected.loads),
        biases={}
        if first_flip is not None and first_flip[0] == 1
        else {name: _distance(run.biases[name], bias) for name, bias in expected.biases.items()},
    )


def _flips(loads: Tensor, expected: Tensor) -> Tensor:
    """`[layers]`, how many rows must be of other experts, at least, if as many were counted."""
    return ((loads - expected).abs().sum(1) - (loads.sum(1) - expected.sum(1)).abs()) / 2


def _first_flip(loads: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[int, int] | None:
    for step, (a, b) in enumerate(zip(loads, expected, strict=True), 1):
        for layer in _flips(a, b).nonzero().flatten().tolist():
            return step, layer
    return None


def _miscount(loads: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    for step, (a, b) in enumerate(zip(loads, expected, strict=True), 1):
        for layer, (got, wanted) in enumerate(zip(a.sum(1).tolist(), b.sum(1).tolist(), strict=True)):
            if got != wanted:
                return f"layers.{layer}.moe.router: counts {got:.0f} rows in step {step} instead of {wanted:.0f}"
    return None


def _worst(values: Iterable[float], expected: Iterable[float]) -> float:
    return max((_or_inf(abs(a - b) / abs(b)) for a, b in zip(values, expected, strict=True)), default=0.0)


def _distance(a: Tensor, b: Tensor) -> float:
    return _or_inf((a - b).abs().max().item())


def _or_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value
