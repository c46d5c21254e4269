"""Mistakes of parallel training, planted for `torchtitan parity` to find."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan.models.decoder.model import Decoder
from torchtitan.models.moe.moe import Experts
from torchtitan.models.moe.router import Router
from torchtitan.optim.expert_balance import ExpertBalance
from torchtitan.parallel.collectives import local
from torchtitan.parallel.experts import shard as expert
from torchtitan.testing import parity
from torchtitan.train import build
from torchtitan.train.forward import Compute

REAL_PARALLELIZE = build.parallelize
REAL_COLUMNS = Compute.local_columns
REAL_ALL_REDUCE = dist.all_reduce
REAL_BALANCE = ExpertBalance.step
REAL_OPTIMIZER = build.build_optimizer
REAL_DECODER = Decoder.__init__


def after_build(change):
    """Let `change(models, mesh)` spoil every model that is built."""

    def spoiled(config, spec, args, stages, mesh, device):
        models = REAL_PARALLELIZE(config, spec, args, stages, mesh, device)
        change(models, mesh)
        return models

    real = build.Builders.__init__
    return mock.patch.object(
        build.Builders, "__init__", lambda self, **options: real(self, models=spoiled, **options)
    )


def doubled_gradient(models, mesh):
    if mesh.size("cp") > 1:
        weight = models[0].layers["1"].attention.wo.weight
        weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))


def dropped_all_reduce(tensor, *args, group=None, calls=[], **options):  # noqa: B006 - counts the calls
    """HSDP's reduction over the replicas is left out for the last block: the second of four in each
    backward, after the output's. Counts of tokens and losses, which are reduced by the same group,
    are small.
    """
    replicas = group is not None and group.group_desc == "mesh_dp_replicate"
    ours = replicas and tensor.numel() > 100
    calls += [None] if ours else []
    if not ours or len(calls) % 4 != 2:
        REAL_ALL_REDUCE(tensor, *args, group=group, **options)


def partial_norm_gradient(models, mesh):
    """A norm's gradient stays the sum over this rank's part of the sequence, as if it were not
    reduced over tp.
    """
    if mesh.size("tp") > 1:
        weight = models[0].layers["1"].ffn_norm.weight

        def spoil(p):
            grad = p.grad
            local = grad.to_local() * (1.0 if mesh.rank("tp") == 0 else 0.5)
            p.grad = DTensor.from_local(local, grad.device_mesh, grad.placements, run_check=False)

        weight.register_post_accumulate_grad_hook(spoil)


def shifted_labels(self, rows, calls=[]):  # noqa: B006 - tokens and labels come in turns
    local = REAL_COLUMNS(self, rows)
    calls.append(None)
    return local.roll(1, 1) if len(calls) % 2 == 0 and local.shape[1] < rows.shape[1] else local


def on_experts(kind, change):
    """Let `change(module)` spoil the modules of a kind where experts are on several ranks."""

    def spoil(models, mesh):
        for module in (module for model in models for module in model.modules()):
            if mesh.ep is not None and isinstance(module, kind):
                change(module)

    return after_build(spoil)


def scaled_experts(experts):
    """As if gradients were summed over ep once more."""
    for weight in experts.parameters():
        weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))


def counted_padding(router):
    """Every token has a weight."""
    router.register_forward_pre_hook(lambda _, args: (args[0], args[1].clamp(min=1e-30)))


def doubled_bias(router):
    """The routing bias is updated twice in each step."""
    router.doubled = True


def balance_twice(self, skip=None):
    before = {layer: router.expert_bias.clone() for layer, router in self.routers.items()}
    REAL_BALANCE(self, skip)
    for layer, router in self.routers.items():
        if hasattr(router, "doubled"):
            router.expert_bias += router.expert_bias - before[layer]


def wrong_inverse(order):
    """Rows return from the experts in the order in which they came to them, instead of its
    inverse.
    """
    return order


def rounding_noise(models, mesh):
    """Noise of the size of rounding, also in elements whose gradient is 0, as in rows of tokens
    that don't occur.
    """
    eps = torch.finfo(torch.float32).eps
    for param in (param for model in models for param in model.parameters()):
        param.register_post_accumulate_grad_hook(
            lambda p: local(p.grad).add_(
                torch.randn_like(local(p.grad)), alpha=eps * local(p.grad).abs().max().item()
            )
        )


def later_gradient(models, mesh, calls=[]):  # noqa: B006 - counts the calls
    """A norm's gradient is wrong in all steps but the first: too little to be seen in loss and
    gradient norm.
    """

    def spoil(p):
        calls.append(None)
        p.grad.mul_(1.0 if len(calls) == 1 else 1.01)

    models[0].layers["0"].ffn_norm.weight.register_post_accumulate_grad_hook(spoil)


def decayed_vectors(models, settings, *args):
    """Norms are in the group with weight decay."""
    optimizer = REAL_OPTIMIZER(models, settings, *args)
    for group in optimizer.param_groups:
        group["weight_decay"] = settings.weight_decay
    return optimizer


def wrong_beta(models, settings, *args):
    return REAL_OPTIMIZER(models, settings.model_copy(update={"beta2": 0.96}), *args)


def unused_parameter(self, args, attend):
    REAL_DECODER(self, args, attend)
    self.norm.unused = torch.nn.Parameter(torch.empty(args.dim))


@contextmanager
def planted(bug):
    with ExitStack() as stack:
        if bug == "shifted labels":
            stack.enter_context(mock.patch.object(Compute, "local_columns", shifted_labels))
        elif bug == "dropped_all_reduce":
            stack.enter_context(mock.patch.object(dist, "all_reduce", dropped_all_reduce))
        elif bug in ("decayed_vectors", "wrong_beta"):
            stack.enter_context(mock.patch.object(build, "build_optimizer", globals()[bug]))
        elif bug == "unused_parameter":
            stack.enter_context(mock.patch.object(Decoder, "__init__", unused_parameter))
        elif bug == "wrong inverse":
            stack.enter_context(mock.patch.object(expert, "inverse_permutation", wrong_inverse))
        elif bug == "scaled experts":
            stack.enter_context(on_experts(Experts, scaled_experts))
        elif bug == "counted padding":
            stack.enter_context(on_experts(Router, counted_padding))
        elif bug == "doubled bias":
            stack.enter_context(on_experts(Router, doubled_bias))
            stack.enter_context(mock.patch.object(ExpertBalance, "step", balance_twice))
        elif bug:
            stack.enter_context(after_build(globals()[bug]))
        yield


def check(argv, bug):
    with planted(bug):
        return parity.check(argv)
