"""Observe a run, to compare it with its reference; and write the corpus that both read."""

import dataclasses
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.config.sections.schema import Config
from torchtitan.data.loader import StepBatch, StepLoader
from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.parallel.agree import from_rank_0
from torchtitan.parallel.collectives import unsharded
from torchtitan.parallel.groups import cpu_group
from torchtitan.train.build import Builders, build_data
from torchtitan.train.callbacks import Callback, Run
from torchtitan.train.preflight import Setup
from torchtitan.train.state import StepResult
from torchtitan.train.trainer import Trainer

ROUTING_BIAS = "expert_bias"
"""Suffix of the names of experts' routing biases."""


@dataclass
class Observation:
    """The losses, gradients, weights and loads that a run computed."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Number of predicted tokens since the start of training, after each step."""
    mtp_losses: list[float] = field(default_factory=list)
    """Empty if no further tokens are predicted."""
    validation_losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """One per step: parameter to its gradient as the optimizer sees it, in the model's order.
    `[copies, *shape]`: more than one copy if ranks disagree on a tensor they share.
    """
    untrained: list[str] = field(default_factory=list)
    """Parameters that the loss doesn't depend on. Only a reference has them."""
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    """One per step: parameter or routing bias of experts to its value after the update, in the
    same form.
    """
    loads: list[Tensor] = field(default_factory=list)
    """`[layers, experts]`, the rows of each expert in each step; empty for a dense model."""
    ties: list[Tensor] = field(default_factory=list)
    """`[layers]`, number of tokens of each step for which the last chosen expert and the next best
    have equal scores up to rounding. Only a reference has them.
    """


def observe(config: Config, setup: Setup, *, padded: bool = False) -> Observation:
    """Train on all ranks of the default process group, and record what they compute.

    Args:
        padded: the last quarter of each row has no labels.

    Returns:
        The observation; on rank 0 with the tensors of all ranks.
    """
    out = Observation()
    order = list(setup.spec.module_flops(setup.args, config.training.seq_len))
    trainer = Trainer(
        config,
        setup,
        callbacks=[_Observer(order, out)],
        builders=Builders(data=_padded_data) if padded else None,
    )
    try:
        trainer.train()
    finally:
        trainer.close()
    for record in _metrics(config):
        if "validation_loss" in record:
            out.validation_losses.append(record["validation_loss"])
        else:
            out.losses.append(record["loss"])
            out.grad_norms.append(record["grad_norm"])
            out.tokens.append(record["tokens"])
            if "mtp_loss" in record:
                out.mtp_losses.append(record["mtp_loss"])
    return out


def _metrics(config: Config) -> list[dict[str, Any]]:
    metrics: list[dict[str, Any]] = []
    if dist.get_rank() == 0:
        lines = Path(config.job.dump_folder, "metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines]
    return from_rank_0(metrics)


def pad_labels(labels: Tensor) -> Tensor:
    end = labels.shape[1] * 3 // 4
    return F.pad(labels[:, :end], (0, labels.shape[1] - end), value=IGNORE_INDEX)


class _PaddedLoader:
    """A loader whose rows end with a quarter without labels."""

    def __init__(self, loader: StepLoader):
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[StepBatch]:
        for batch in self.loader:
            yield dataclasses.replace(batch, labels=pad_labels(batch.labels))


def _padded_data(*args: Any, **kwargs: Any) -> Any:
    return _PaddedLoader(build_data(*args, **kwargs))


class _Observer(Callback):
    """A callback that adds gradients, weights and experts' loads of each step to an observation."""

    def __init__(self, order: list[str], out: Observation):
        """
        Args:
            order: the model's modules, from the input to the output.
        """
        self.order = order
        self.out = out
        self.gradients: dict[str, Tensor] = {}
        self.names: dict[Tensor, str] = {}

    def on_start(self, run: Run) -> None:
        self.names = {p: name for model in run.models for name, p in model.named_parameters()}
        for optimizer in getattr(run.optimizer, "optimizers", [run.optimizer]):
            optimizer.register_step_post_hook(self._keep)

    def _keep(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Runs after the optimizer's step, because that may clip the gradients first."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = self.names[p]
                if p.grad is not None:
                    self.gradients[name] = _full(p.grad)
                elif name not in self.gradients:  # else updated, and freed, in the backward
                    self.gradients[name] = _full(torch.zeros_like(p))

    def after_step(self, run: Run, result: StepResult) -> None:
        self.out.gradients.append(_gather_copies(self.gradients, self.order))
        self.gradients.clear()
        if run.experts is not None:
            self.out.loads.append(run.experts.loads.cpu().clone())
        tensors = {
            name: _full(value)
            for model in run.models
            for name, value in trained_tensors(model).items()
        }
        self.out.weights.append(_gather_copies(tensors, self.order))


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes and the forward uses: parameters and routing biases."""
    biases = {name: value for name, value in model.named_buffers() if name.endswith(ROUTING_BIAS)}
    return {**dict(model.named_parameters()), **biases}


def _full(value: Any) -> Tensor:
    return unsharded(value).detach().cpu().clone()


def _gather_copies(tensors: dict[str, Tensor], order: list[str]) -> dict[str, Tensor]:
    """Gather the distinct copies that ranks hold of each tensor, in the model's order.

    Empty except on rank 0.
    """
    by_rank: list[Any] = [None] * dist.get_world_size()
    is_rank_0 = dist.get_rank() == 0
    dist.gather_object(tensors, by_rank if is_rank_0 else None, group=cpu_group())
    if not is_rank_0:
        return {}
    copies: dict[str, list[Tensor]] = {}
    for name, value in (item for tensors_of_rank in by_rank for item in tensors_of_rank.items()):
        distinct_copies = copies.setdefault(name, [])
        if not any(torch.equal(value, other) for other in distinct_copies):
            distinct_copies.append(value)
    return {
        n: torch.stack(values)
        for m in order
        for n, values in copies.items()
        if n.startswith(f"{m}.")
    }


# ---- data


_WORDS = "a model reads rows of tokens every rank sees its own part one batch"


def write_corpus(path: Path, documents: int = 60, seed: int = 0) -> Path:
    """Write a JSONL file of documents of 3 to 120 words, the same on every machine."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for i in range(documents):
            text = " ".join(rng.choices(_WORDS.split(), k=rng.randint(3, 120)))
            file.write(json.dumps({"text": f"{i}: {text}."}) + "\n")
    return path
