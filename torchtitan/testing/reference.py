"""The reference of a distributed run: the same run on one process.

It is plain PyTorch: one module, `F.cross_entropy`, `torch.optim`. It shares with the framework only
the model's definition and initial values, the order of the data, and the learning-rate schedule.

Adam divides a gradient by its own size, so where a gradient is nothing but rounding, two correct
runs move a weight in opposite directions. The reference of a run therefore begins each step with
the run's weights, computes its own gradients, and updates by the run's gradients. So every step's
loss, gradients and update differ by their own rounding alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.config import registry, resolve
from torchtitan.config.registry import Custom
from torchtitan.config.sections.optim import Optimizer
from torchtitan.config.sections.schema import Config
from torchtitan.data.loader import StepBatch
from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.models.attention.backend import attention_backend, document_mask
from torchtitan.models.attention.interface import reads_documents
from torchtitan.models.spec import is_matrix
from torchtitan.optim.loss import RowLoss, build_loss
from torchtitan.optim.lr_schedule import build_shape, lr_factor, stage_scale
from torchtitan.parallel.experts.shard import build_balance
from torchtitan.parallel.init import materialize
from torchtitan.testing.observe import Observation, pad_labels, trained_tensors
from torchtitan.train.build import build_data
from torchtitan.train.preflight import Setup, preflight


def reference(
    config: Config,
    setup: Setup,
    *,
    padded: bool = False,
    run: Observation | None = None,
    rounding: float = 0.0,
) -> Observation:
    """Train the same run in plain PyTorch on this process, in fp32 on the CPU.

    Args:
        config: resolved for the distributed run; a step here is its global batch.
        padded: the last quarter of each row has no labels.
        run: begin each step with the weights of this run, and update by its gradients and loads.
            None: use the reference's.
        rounding: experts whose scores differ by less, relative to the token's largest, are ties.
    """
    device = torch.device("cpu")
    model: Any = setup.spec.build(setup.args, attention_backend("cpu"))
    materialize(
        model, device, device, config.debug.seed, rule=lambda fqn: setup.spec.init(fqn, setup.args)
    )
    settings = config.optimizer
    training = config.training
    optimizers = _optimizers(model, settings, config.custom, setup.width_ratio)
    row_loss = (
        build_loss(training.loss, config.custom) if registry.losses.find(training.loss) else None
    )
    loader = build_data(config, "training", setup.tokenizer)
    end = setup.tokenizer.eos_id if training.document_mask else None
    experts = _ReferenceExperts(model, setup, config, rounding)
    out = Observation(loads=experts.loads, ties=experts.ties)
    tokens = 0
    for step, batch in zip(range(training.steps), loader, strict=False):
        labels = pad_labels(batch.labels) if padded else batch.labels
        losses = _mean_losses(
            model,
            batch.tokens,
            labels,
            _ends(batch, end),
            train=bool(experts.routers),
            custom_loss=row_loss,
            modules=setup.n_mtp,
            z_loss=training.z_loss,
        )
        loss = losses[0]
        model.zero_grad()
        mtp_loss = torch.stack(losses[1:]).mean() if setup.n_mtp else torch.zeros(())
        (loss + training.mtp_loss_weight * mtp_loss).backward()
        if step == 0:
            out.untrained += [name for name, p in model.named_parameters() if p.grad is None]
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        grads = [p.grad.double().norm() for p in model.parameters()]
        norm = torch.stack(grads).norm().item()
        if training.max_norm > 0:
            nn.utils.clip_grads_with_norm_(
                model.parameters(), training.max_norm, torch.tensor(norm)
            )
        out.gradients.append({name: p.grad.clone()[None] for name, p in model.named_parameters()})
        if run is not None:
            for name, p in model.named_parameters():
                p.grad.copy_(run.gradients[step][name][0])
        _update(optimizers, config, step, batch.stage)
        experts.step(run.loads[step] if run is not None and run.loads else None)
        out.weights.append(
            {name: value.detach().clone()[None] for name, value in trained_tensors(model).items()}
        )
        if run is not None:
            with torch.no_grad():
                for name, value in trained_tensors(model).items():
                    value.copy_(run.weights[step][name][0])
        tokens += int((labels != IGNORE_INDEX).sum())
        out.losses.append(loss.item())
        if setup.n_mtp:
            out.mtp_losses.append(mtp_loss.item())
        out.grad_norms.append(norm)
        out.tokens.append(tokens)
        if config.validation.enable and (
            (step + 1) % config.validation.freq == 0 or step + 1 == training.steps
        ):
            out.validation_losses.append(
                _validate(model, config, setup, end, row_loss, padded=padded)
            )
    loader.close()
    return out


def _update(
    optimizers: Sequence[torch.optim.Optimizer], config: Config, step: int, stage: int
) -> None:
    schedule = config.lr_scheduler
    factor = lr_factor(step, schedule, build_shape(schedule, config.custom))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = config.optimizer.lr * factor * stage_scale(stage, config.training.stages)
            group["lr"] = rate * group["lr_scale"]
        optimizer.step()


class _ReferenceExperts:
    """Counts the rows of each router in each step, and updates the routing biases."""

    def __init__(self, model: Any, setup: Setup, config: Config, rounding: float):
        self.routers = {
            int(i): layer.moe.router for i, layer in model.layers.items() if hasattr(layer, "moe")
        }
        self.blocks = sum(
            name.startswith("layers.") for name in setup.spec.module_flops(setup.args, 1)
        )
        self.rate = config.moe.balance_bias_rate
        self.rounding = rounding
        self.loads: list[Tensor] = []
        self.ties: list[Tensor] = []
        self._ties = torch.zeros(self.blocks)
        for index, router in self.routers.items():
            router.balance = build_balance(config)
            router.register_forward_hook(partial(self._count_ties, index))

    @torch.no_grad()
    def _count_ties(
        self, index: int, router: Any, inputs: tuple[Tensor, Tensor | None], _: Any
    ) -> None:
        x, token_weights = inputs
        if token_weights is None or router.top_k == router.n_experts:
            return
        probabilities = router.gate(x).softmax(-1)
        last, next_best = (
            (probabilities + router.expert_bias).topk(router.top_k + 1).values[..., -2:].unbind(-1)
        )
        is_tie = last - next_best <= self.rounding * probabilities.amax(-1)
        self._ties[index] += (is_tie & (token_weights > 0)).sum()

    def step(self, loads: Tensor | None) -> None:
        """End a step: record its counts, and update the routing biases.

        Args:
            loads: `[layers, experts]`, update by these; None: by the counts.
        """
        if not self.routers:
            return
        step_loads = torch.zeros(
            self.blocks, next(iter(self.routers.values())).n_experts, dtype=torch.float64
        )
        for index, router in self.routers.items():
            step_loads[index] = router.step_load
            router.step_load.zero_()
            counts = (step_loads if loads is None else loads)[index]
            router.expert_bias += (self.rate * torch.sign(counts.mean() - counts)).float()
            router.load.copy_(counts)
        self.loads.append(step_loads)
        self.ties.append(self._ties.clone())
        self._ties.zero_()


def _optimizers(
    model: nn.Module, settings: Optimizer, custom: Custom, width_ratio: Callable[[str], float]
) -> list[torch.optim.Optimizer]:
    groups: list[dict[str, Any]] = []
    muon_groups: list[dict[str, Any]] = []
    for name, param in model.named_parameters():
        matrix = is_matrix(name, param.dim())
        muon = settings.name == "Muon" and matrix and name.startswith("layers.")
        ratio = width_ratio(name) if matrix else 1.0
        scale = ratio**-0.5 if muon else ratio**-1.0
        decay = settings.weight_decay if matrix else 0.0
        if settings.name != "Adam":
            decay /= scale
        group = {"params": [param], "weight_decay": decay, "lr_scale": scale}
        (muon_groups if muon else groups).append(group)
    if make := registry.optimizers.maker(settings.name, custom):
        return [make([{"lr": settings.lr, **group} for group in groups], settings)]
    betas = (settings.beta1, settings.beta2)
    eps = settings.eps
    kind = torch.optim.Adam if settings.name == "Adam" else torch.optim.AdamW
    out: list[torch.optim.Optimizer] = [kind(groups, betas=betas, eps=eps)]
    for group in muon_groups:
        options = {"weight_decay": group["weight_decay"], "momentum": settings.muon_momentum}
        options["ns_steps"] = settings.muon_ns_steps
        optimizer = _StackedMuon(group["params"], adjust_lr_fn="match_rms_adamw", **options)
        optimizer.param_groups[0]["lr_scale"] = group["lr_scale"]
        out.append(optimizer)
    return out


class _StackedMuon(torch.optim.Muon):
    """torch's Muon, applied to matrices and to each matrix of a stack."""

    def __init__(self, params: Sequence[nn.Parameter], **options: Any):
        self._stacks = [
            (p, [nn.Parameter(matrix) for matrix in p.detach()]) for p in params if p.dim() == 3
        ]
        matrices = [p for p in params if p.dim() == 2]
        super().__init__(
            [
                *matrices,
                *(matrix for _, matrices_of_stack in self._stacks for matrix in matrices_of_stack),
            ],
            **options,
        )

    def step(self, closure: Any = None) -> None:
        for stack, matrices in self._stacks:
            assert stack.grad is not None
            for matrix, gradient in zip(matrices, stack.grad, strict=True):
                matrix.grad = gradient
        super().step()


def _mean_losses(
    model: Any,
    tokens: Tensor,
    labels: Tensor,
    ends: Tensor | None,
    *,
    train: bool = False,
    custom_loss: RowLoss | None = None,
    modules: int = 0,
    z_loss: float = 0.0,
) -> list[Tensor]:
    """The mean loss of the next token, and of each module of multi-token prediction.

    Args:
        ends: `[batch, seq]`, the tokens that end documents; None: a row is one document.
        train: pass the tokens' weights to a mixture of experts.
        custom_loss: a registered loss; None: cross entropy.
        modules: number of modules of multi-token prediction.
        z_loss: coefficient of the z-loss, which changes gradients only.
    """
    mask = None
    documents = torch.zeros_like(tokens)
    if ends is not None:
        documents = F.pad(ends[:, :-1].long(), (1, 0)).cumsum(1)  # a document starts after an end
        mask = document_mask(
            documents,
            torch.arange(tokens.shape[1]),
            torch.float32,
            with_documents=reads_documents(model),
        )
    inputs, targets = _shift(tokens, labels, documents, modules)
    weights = [(y != IGNORE_INDEX) / (y != IGNORE_INDEX).sum().clamp(min=1) for y in targets]
    if not modules:
        options = {"token_weights": weights[0]} if train else {}
        return [_mean(model(tokens, None, mask, **options), labels, custom_loss, z_loss)]
    options = {"token_weights": torch.stack(weights, -1)} if train else {}
    logits = model(torch.stack(inputs, -1), None, mask, **options)
    return [_mean(logits[:, :, k], y, custom_loss, z_loss) for k, y in enumerate(targets)]


def _ends(batch: StepBatch, end: int | None) -> Tensor | None:
    """The argument `ends` of `_mean_losses`."""
    if end is None:
        return None
    assert batch.continues is not None
    return (batch.tokens == end) & ~batch.continues


def _shift(
    tokens: Tensor, labels: Tensor, documents: Tensor, modules: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and labels shifted by k = 0, 1, ...; without labels beyond a token's document."""
    inputs = []
    targets = []
    for k in range(1 + modules):
        position = torch.arange(k, k + tokens.shape[1])
        is_beyond = position >= tokens.shape[1]
        position = position.clamp(max=tokens.shape[1] - 1)
        is_foreign = documents[:, position] != documents
        inputs.append(tokens[:, position])
        targets.append(labels[:, position].masked_fill(is_beyond | is_foreign, IGNORE_INDEX))
    return inputs, targets


def _mean(logits: Tensor, labels: Tensor, custom_loss: RowLoss | None, z_loss: float) -> Tensor:
    """The mean loss of the tokens that have a label; 0 if none has."""
    has_label = labels != IGNORE_INDEX
    num_labels = has_label.sum().clamp(min=1)
    squares = torch.logsumexp(logits[has_label].float(), dim=-1) ** 2
    z_term = z_loss * squares.sum() / num_labels
    z_gradients = z_term - z_term.detach()
    if custom_loss is not None:
        return custom_loss(logits, labels).sum() / num_labels + z_gradients
    loss_sum = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return loss_sum / num_labels + z_gradients


@torch.no_grad()
def _validate(
    model: nn.Module,
    config: Config,
    setup: Setup,
    end: int | None,
    custom_loss: RowLoss | None,
    *,
    padded: bool,
) -> float:
    loader = build_data(config, "validation", setup.tokenizer)
    total = count = 0.0
    for i, batch in enumerate(loader):
        if i == config.validation.steps:
            break
        labels = pad_labels(batch.labels) if padded else batch.labels
        num_labels = int((labels != IGNORE_INDEX).sum())
        (loss,) = _mean_losses(
            model, batch.tokens, labels, _ends(batch, end), custom_loss=custom_loss
        )
        total += loss.item() * num_labels
        count += num_labels
    loader.close()
    return total / count


def run_reference(argv: list[str]) -> Observation:
    """Run the reference for the run that `argv` configures for one rank."""
    config = resolve(argv, 1, check=False).config
    return reference(config, preflight(config, world=1))
