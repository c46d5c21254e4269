"""Observe a distributed run and a reference on one process, and measure how they differ.

The reference is plain PyTorch: one module, `F.cross_entropy`, `torch.optim`. It shares with the framework only the
model's definition and initial values, the order of the data, and the learning-rate schedule.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.config import registry, resolve
from torchtitan.config.optim import Optimizer
from torchtitan.config.registry import Custom
from torchtitan.config.schema import Config
from torchtitan.data.rows import IGNORE_INDEX
from torchtitan.models.layers import attention_backend, document_mask
from torchtitan.optim.loss import RowLoss, build_loss
from torchtitan.optim.optimizer import OptimizerInBackward
from torchtitan.optim.schedule import build_shape, lr_factor, stage_scale
from torchtitan.parallel.collectives import unsharded
from torchtitan.parallel.expert import balance_of
from torchtitan.parallel.init import materialize
from torchtitan.train.build import build_data
from torchtitan.train.compute import LocalBatch
from torchtitan.train.preflight import Setup, preflight
from torchtitan.train.step import StepResult
from torchtitan.train.trainer import Trainer


@dataclass
class Observation:
    """What a run computed."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Predicted tokens since the start of training, after each step."""
    validation_losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Parameter to its gradient in the first step, as the optimizer sees it, in the model's order. (Later steps inherit
    earlier errors.) `[copies, *shape]`: more than one copy if ranks disagree on a tensor they share."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Parameter, or routing bias of experts, to its value after the last step, in the same form."""
    loads: list[Tensor] = field(default_factory=list)
    """`[layers, experts]`, the rows of each expert in each step; empty for a dense model."""
    biases: dict[str, Tensor] = field(default_factory=dict)
    """Routing bias of experts to its value after the first step, in the form of `weights`."""


def observe(config: Config, setup: Setup, *, padded: bool = False) -> Observation:
    """Train on all ranks of the default process group. Every rank returns the same observation.

    Args:
        padded: the last quarter of each row doesn't count.
    """
    trainer = Trainer(config, setup)
    if padded:
        own_rows = trainer.parts.compute.own_rows

        def padded_rows(tokens: Tensor, labels: Tensor, sources: Tensor | None = None) -> LocalBatch:
            return own_rows(tokens, _padded(labels), sources)

        trainer.parts.compute.own_rows = padded_rows  # type: ignore[method-assign]
    try:
        gradients = _watch_gradients(trainer)
        loads, biases = _watch_experts(trainer)
        trainer.train()
    finally:
        trainer.close()
    weights = {name: _full(value) for model in trainer.parts.models for name, value in _trained(model).items()}
    order = list(setup.spec.module_flops(setup.args, config.training.seq_len))
    out = Observation(gradients=_of_all_ranks(gradients, order), weights=_of_all_ranks(weights, order), loads=loads)
    out.biases = _of_all_ranks(biases, order)
    for record in _metrics(config):
        if "validation_loss" in record:
            out.validation_losses.append(record["validation_loss"])
        else:
            out.losses.append(record["loss"])
            out.grad_norms.append(record["grad_norm"])
            out.tokens.append(record["tokens"])
    return out


def _metrics(config: Config) -> list[dict[str, Any]]:
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        lines = Path(config.job.dump_folder, "metrics.jsonl").read_text().splitlines()
        box = [[json.loads(line) for line in lines]]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _padded(labels: Tensor) -> Tensor:
    end = labels.shape[1] * 3 // 4
    return F.pad(labels[:, :end], (0, labels.shape[1] - end), value=IGNORE_INDEX)


def _watch_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """A dict that training fills with a copy of the first step's gradients."""
    seen: dict[str, Tensor] = {}
    optimizer = trainer.parts.optimizer
    named = [(name, p) for model in trainer.parts.models for name, p in model.named_parameters()]
    if isinstance(optimizer, OptimizerInBackward):
        for name, param in named:

            def keep(p: Tensor, name: str = name) -> None:
                if name not in seen:
                    seen[name] = _full(p.grad)

            handle = param.register_post_accumulate_grad_hook(keep)
            param._post_accumulate_grad_hooks.move_to_end(handle.id, last=False)  # before the update frees it
        return seen
    step = optimizer.step

    def step_and_keep(**settings: Any) -> None:
        step(**settings)  # may clip the gradients first
        if not seen:
            seen.update({name: _full(torch.zeros_like(p) if p.grad is None else p.grad) for name, p in named})

    optimizer.step = step_and_keep  # type: ignore[method-assign]
    return seen


def _watch_experts(trainer: Trainer) -> tuple[list[Tensor], dict[str, Tensor]]:
    """A list that training fills with the experts' loads of each step; a dict, with their biases after the first."""
    loads: list[Tensor] = []
    biases: dict[str, Tensor] = {}

    def keep(_: StepResult) -> None:
        if (experts := trainer.parts.experts) is not None:
            loads.append(experts.loads.cpu().clone())
        if not biases:
            biases.update({name: _full(b) for model in trainer.parts.models for name, b in _biases(model).items()})

    trainer.after_step += (keep,)
    return loads, biases


def _biases(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.named_buffers() if name.endswith("expert_bias")}


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, and the buffers that training changes and the forward uses."""
    return {**dict(model.named_parameters()), **_biases(model)}


def _full(value: Any) -> Tensor:
    return unsharded(value).detach().cpu().clone()


def _of_all_ranks(own: dict[str, Tensor], order: list[str]) -> dict[str, Tensor]:
    """The distinct copies that ranks hold of each tensor, in the model's order; a pipeline stage holds only some."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    copies: dict[str, list[Tensor]] = {}
    for name, value in (item for part in parts for item in part.items()):
        known = copies.setdefault(name, [])
        if not any(torch.equal(value, other) for other in known):
            known.append(value)
    return {n: torch.stack(values) for m in order for n, values in copies.items() if n.startswith(f"{m}.")}


# ---- the reference


def reference(config: Config, setup: Setup, *, padded: bool = False) -> Observation:
    """The same run in plain PyTorch on this process, in fp32 on the CPU.

    Args:
        config: resolved for the distributed run; a step here is its global batch.
        padded: the last quarter of each row doesn't count.
    """
    device = torch.device("cpu")
    model: Any = setup.spec.build(setup.args, attention_backend("cpu"))
    materialize(model, device, device, config.debug.seed, lambda fqn: setup.spec.init(fqn, setup.args))
    settings, training = config.optimizer, config.training
    optimizers = _optimizers(model, settings, config.custom)
    shape = build_shape(config.lr_scheduler, config.custom)
    of_row = build_loss(training.loss, config.custom) if registry.losses.find(training.loss) else None
    loader = build_data(config, "training", setup.tokenizer)
    end = setup.tokenizer.eos_id if training.document_mask else None
    routers = {i: layer.moe.router for i, layer in model.layers.items() if hasattr(layer, "moe")}
    for router in routers.values():
        router.balance = balance_of(config)
    out, tokens = Observation(), 0
    for step, batch in zip(range(training.steps), loader, strict=False):
        labels = _padded(batch.labels) if padded else batch.labels
        loss = _mean_loss(model, batch.tokens, labels, end, train=bool(routers), registered=of_row)
        model.zero_grad()
        loss.backward()
        grads = [p.grad.double().norm() for p in model.parameters()]
        norm = torch.stack(grads).norm().item()
        if training.max_norm > 0:
            nn.utils.clip_grads_with_norm_(model.parameters(), training.max_norm, torch.tensor(norm))
        if step == 0:
            out.gradients = {name: p.grad.clone()[None] for name, p in model.named_parameters()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                scale = stage_scale(step, config.training.stages)
                group["lr"] = settings.lr * lr_factor(step, config.lr_scheduler, shape) * scale
            optimizer.step()
        if routers:
            out.loads.append(_balance(routers, setup, config.moe.balance_bias_rate))
        if step == 0:
            out.biases = {name: value.clone()[None] for name, value in _biases(model).items()}
        tokens += int((labels != IGNORE_INDEX).sum())
        out.losses.append(loss.item())
        out.grad_norms.append(norm)
        out.tokens.append(tokens)
        if config.validation.enable and ((step + 1) % config.validation.freq == 0 or step + 1 == training.steps):
            out.validation_losses.append(_validate(model, config, setup, end, of_row))
    loader.close()
    out.weights = {name: value.detach().clone()[None] for name, value in _trained(model).items()}
    return out


def _balance(routers: Mapping[str, Any], setup: Setup, rate: float) -> Tensor:
    """Update routing biases by the loads of a step, and return these."""
    blocks = [name for name in setup.spec.module_flops(setup.args, 1) if name.startswith("layers.")]
    loads = torch.zeros(len(blocks), setup.args.n_experts, dtype=torch.float64)
    for index, router in routers.items():
        counts = router.step_load.tolist()
        loads[int(index)] = torch.tensor(counts)
        mean = sum(counts) / len(counts)
        for expert, count in enumerate(counts):
            router.expert_bias[expert] += rate * ((mean > count) - (mean < count))
        router.load.copy_(router.step_load)
        router.step_load.zero_()
    return loads


def _optimizers(model: nn.Module, settings: Optimizer, custom: Custom) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    of_blocks = [p for name, p in named.items() if p.dim() > 1 and name.startswith("layers.")]
    by_muon = of_blocks if settings.name == "Muon" else []
    matrices = [p for p in named.values() if p.dim() > 1 and not any(p is other for other in by_muon)]
    vectors = [p for p in named.values() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if registered := registry.optimizers.chosen(settings.name, custom):
        return [registered([{"lr": settings.lr, "lr_scale": 1.0, **group} for group in groups], settings)]
    betas, eps = (settings.beta1, settings.beta2), settings.eps
    kind = torch.optim.Adam if settings.name == "Adam" else torch.optim.AdamW
    out: list[torch.optim.Optimizer] = [kind(groups, betas=betas, eps=eps)]
    if by_muon:
        options = {"weight_decay": settings.weight_decay, "momentum": settings.muon_momentum}
        options["ns_steps"] = settings.muon_ns_steps
        out += [_MuonOfEach(by_muon, adjust_lr_fn="match_rms_adamw", **options)]
    return out


class _MuonOfEach(torch.optim.Muon):
    """torch's Muon of matrices, and of each matrix of a stack."""

    def __init__(self, params: Sequence[nn.Parameter], **options: Any):
        self._stacks = [(p, [nn.Parameter(matrix) for matrix in p.detach()]) for p in params if p.dim() == 3]
        matrices = [p for p in params if p.dim() == 2]
        super().__init__([*matrices, *(matrix for _, parts in self._stacks for matrix in parts)], **options)

    def step(self, closure: Any = None) -> None:
        for stack, matrices in self._stacks:
            assert stack.grad is not None
            for matrix, gradient in zip(matrices, stack.grad, strict=True):
                matrix.grad = gradient
        super().step()


def _mean_loss(
    model: nn.Module,
    tokens: Tensor,
    labels: Tensor,
    end: int | None,
    *,
    train: bool = False,
    registered: RowLoss | None = None,
) -> Tensor:
    """
    Args:
        train: tell a mixture of experts which tokens count.
        registered: instead of cross entropy.
    """
    mask = None
    if end is not None:
        before = F.pad(tokens, (1, 0), value=-1)[:, :-1]  # a document starts after an end-of-text token
        mask = document_mask((before == end).cumsum(1), torch.arange(tokens.shape[1]), torch.float32)
    counted = labels != IGNORE_INDEX
    logits = model(tokens, None, mask, counted / counted.sum()) if train else model(tokens, None, mask)
    if registered is not None:
        return registered(logits, labels).sum() / counted.sum()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


@torch.no_grad()
def _validate(model: nn.Module, config: Config, setup: Setup, end: int | None, registered: RowLoss | None) -> float:
    loader = build_data(config, "validation", setup.tokenizer)
    total = count = 0.0
    for i, batch in enumerate(loader):
        if i == config.validation.steps:
            break
        predicted = int((batch.labels != IGNORE_INDEX).sum())
        total += _mean_loss(model, batch.tokens, batch.labels, end, registered=registered).item() * predicted
        count += predicted
    loader.close()
    return total / count


def run_reference(argv: list[str]) -> Observation:
    """The reference for the run that `argv` configures for one rank."""
    config = resolve(argv, 1).config
    return reference(config, preflight(config))


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
