"""The museum: mistakes that other frameworks have published, each planted in this one.

An exhibit names the check that catches it: a test of the suite, run again with the mistake planted,
or `torchtitan parity` with flags. Mistakes are planted in ranks, too.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor.parallel import RowwiseParallel

from tests.data_kinds import write_kinds
from tests.planted_mistakes import planted as planted_in_parallel
from tests.runs import EXPERTS
from torchtitan.checkpoint.hf.export import HFExport
from torchtitan.data.loader import StepLoader
from torchtitan.models.attention import backend as attention_backend
from torchtitan.models.attention import dense as attention_dense
from torchtitan.models.delta.layer import GatedDeltaNet
from torchtitan.models.moe.router import Router
from torchtitan.models.rope_scaling import YarnScaling
from torchtitan.optim.expert_balance import ExpertBalance
from torchtitan.parallel import collectives, init
from torchtitan.parallel.context import attention as context
from torchtitan.parallel.parallelize import parallelize
from torchtitan.parallel.tensor import styles as tensor
from torchtitan.testing import parity
from torchtitan.testing.difference import Tolerances
from torchtitan.train import step

ROOT = Path(__file__).parents[2]
Plant = Callable[[], contextlib.AbstractContextManager[Any]]


# ---- routing


def bf16_bias() -> Any:
    """The correction bias is cast with the model."""
    real = Router.init_buffers

    def cast(router: Any) -> None:
        real(router)
        router.expert_bias = router.expert_bias.bfloat16()

    return mock.patch.object(Router, "init_buffers", cast)


def bf16_counts() -> Any:
    """Rows are counted in the type of the model."""
    real = ExpertBalance.__init__

    def counting(balance: Any, *args: Any, **options: Any) -> None:
        real(balance, *args, **options)
        balance._table = balance._table.bfloat16()

    return mock.patch.object(ExpertBalance, "__init__", counting)


def groups_at_zero() -> Any:
    """Experts of other groups get a score of 0, which beats negative ones."""
    real = Router._mask_groups

    def masked(router: Any, choice: Any) -> Any:
        return real(router, choice).clamp(min=-1e30).masked_fill(real(router, choice).isinf(), 0.0)

    return mock.patch.object(Router, "_mask_groups", masked)


# ---- attention


def mscale_once() -> Any:
    """Scores are multiplied by mscale, not by its square."""
    once = property(lambda scaling: scaling.magnitude(scaling.mscale_all_dim or 0.0))
    return mock.patch.object(YarnScaling, "score_factor", once)


def no_mscale() -> Any:
    return mock.patch.object(YarnScaling, "score_factor", 1.0)


def scale_lost() -> Any:
    """`scaled_dot_product_attention` gets no scale, and takes its own."""
    real = attention_backend.F.scaled_dot_product_attention

    def default(*args: Any, scale: Any = None, **options: Any) -> Any:
        return real(*args, **options)

    return mock.patch.object(attention_backend.F, "scaled_dot_product_attention", default)


def no_sink_gradient() -> Any:
    def zeros(grad: Any, out: Any, lse: Any, sinks: Any) -> Any:
        return torch.zeros_like(sinks)

    return mock.patch.object(attention_dense, "sink_gradients", zeros)


def averaged_key_gradients() -> Any:
    """Gradients of keys and values are averaged over the ranks of a row instead of summed."""
    real = context.c10d

    def averaged(buffer: Any, op: str, ranks: int, group: str) -> Any:
        return real.reduce_scatter_tensor(buffer / ranks, op, ranks, group)

    names = ("wait_tensor", "all_gather_into_tensor", "all_to_all_single")
    others = {name: getattr(real, name) for name in names}
    return mock.patch.object(
        context, "c10d", SimpleNamespace(reduce_scatter_tensor=averaged, **others)
    )


def state_across_documents() -> Any:
    """Convolution and state continue from one document to the next."""
    real = GatedDeltaNet.forward
    return mock.patch.object(GatedDeltaNet, "forward", lambda layer, x, *_, **__: real(layer, x))


# ---- initial weights


def rates_in_bf16() -> Any:
    """A is uniform from 0 and sampled in bf16, where one in 256 samples is 0."""
    real = init._block

    def block(fqn: Any, seed: Any, number: Any, shape: Any, init: Any) -> Any:
        if init.kind != "log_uniform":
            return real(fqn, seed, number, shape, init=init)
        values = torch.empty(shape, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(seed)
        return values.uniform_(0, init.high, generator=generator).log_().float()

    return mock.patch.object(init, "_block", block)


@contextlib.contextmanager
def chunks_alike() -> Iterator[None]:
    """A rank numbers the layers of each of its stages from 0."""
    real = init._fill
    first = 0

    def materialize(model: Any, *args: Any) -> None:
        nonlocal first
        first = min((int(i) for i in model.layers), default=0)
        init.materialize(model, *args)

    def fill(param: Any, fqn: str, *args: Any) -> None:
        parts = fqn.split(".")
        if parts[0] == "layers":
            parts[1] = str(int(parts[1]) - first)
        real(param, ".".join(parts), *args)

    with (
        mock.patch.dict(parallelize.__kwdefaults__, fill=materialize),
        mock.patch.object(init, "_fill", fill),
    ):
        yield


# ---- sums over ranks


def bias_of_each_rank() -> Any:
    """Each rank adds the bias of a layer whose inputs are sharded, before the sum over ranks."""

    class OfEachRank(RowwiseParallel):
        def _apply(self, module: Any, device_mesh: Any) -> Any:
            module = super()._apply(module, device_mesh)
            more = device_mesh.size() - 1
            if module.bias is not None:
                module.register_forward_hook(
                    lambda layer, _, out: out + more * layer.bias.to_local()
                )
            return module

    return mock.patch.object(tensor, "RowwiseParallel", OfEachRank)


def expert_gradients_times_ep() -> Any:
    return planted_in_parallel("scaled experts")


def own_experts_in_the_norm() -> Any:
    """The norm by which gradients are clipped counts this rank's experts only."""
    real = collectives._shard_groups

    def sharded_over(mesh: Any = None, placements: Any = ()) -> Any:
        names = mesh.mesh_dim_names if mesh is not None else ()
        groups = real(mesh, placements)
        return () if "ep" in names else groups

    return mock.patch.object(collectives, "_shard_groups", sharded_over)


def mtp_of_each_rank() -> Any:
    """Each rank divides the loss of further tokens by its own tokens."""
    over_ranks = step.all_reduce

    def all_reduce(value: Any, *args: Any, **options: Any) -> Any:
        if value.ndim == 1 and not value.is_floating_point():  # the numbers of tokens
            value[:1] = over_ranks(value[:1].clone(), *args, **options)
            return value
        return over_ranks(value, *args, **options)

    return mock.patch.object(step, "all_reduce", all_reduce)


# ---- files


def zero_bias_in_export() -> Any:
    real = HFExport._read

    def read(export: Any, tensor: Any) -> Iterator[Any]:
        for box, value in real(export, tensor):
            bias = any("bias" in source.ours for source in tensor.sources)
            yield box, value.zero_() if bias else value

    return mock.patch.object(HFExport, "_read", read)


def data_from_the_beginning() -> Any:
    """A resume doesn't restore the position in the data."""
    return mock.patch.object(StepLoader, "seek", return_value=None)


def data_of_the_next_step() -> Any:
    """A checkpoint records what was read ahead, not what was trained on."""
    real = StepLoader.seek

    def seek(loader: Any, *args: Any) -> None:
        real(loader, *args)
        rows = iter(loader)
        loader.start = next(rows).position
        rows.close()

    return mock.patch.object(StepLoader, "seek", seek)


# ---- the exhibits


@dataclass(frozen=True)
class Exhibit:
    """A published mistake."""

    plant: Plant
    published: str
    check: str
    """A test, or `parity: ` and part of what it reports."""
    flags: tuple[str, ...] = ()
    """Of the run that parity compares."""
    slow: bool = False

    @property
    def name(self) -> str:
        return self.plant.__name__


UNIT = "tests/unit"
RANKS = "tests/distributed"
UNCLIPPED = "--training.max_norm=0"
EP = (*EXPERTS, UNCLIPPED, "--parallelism.expert_parallel_degree=2")
BIASES = ("--model.overrides.wo_bias=true", "--model.overrides.ffn_bias=true")
TP = (*BIASES, UNCLIPPED, "--parallelism.tensor_parallel_degree=2")
EXHIBITS = [
    Exhibit(
        bf16_bias,
        "Megatron-LM #1482, sglang #37133",
        f"{RANKS}/test_experts.py::test_a_large_bias_moves_by_small_differences",
    ),
    Exhibit(
        bf16_counts,
        "Megatron-LM #7081",
        f"{RANKS}/test_experts.py::test_a_large_bias_moves_by_small_differences",
    ),
    Exhibit(
        groups_at_zero,
        "transformers #45440, #45441",
        f"{UNIT}/test_moe.py::test_groups_are_those_of_transformers",
    ),
    Exhibit(
        no_mscale,
        "Megatron-LM #1429",
        f"{UNIT}/test_model.py::test_latent_scores_are_scaled_as_in_transformers[1.0]",
    ),
    Exhibit(
        mscale_once,
        "Megatron-LM #1429",
        f"{UNIT}/test_model.py::test_latent_scores_are_scaled_as_in_transformers[1.0]",
    ),
    Exhibit(
        scale_lost,
        "mobius #548, optimum-intel #1877",
        f"{UNIT}/test_attention_op.py::test_attention_is_the_softmax_spelled_out["
        "{'scale': 0.3}-False]",
    ),
    Exhibit(
        bias_of_each_rank,
        "torchtitan #4245",
        "parity: first wrong: layers.1.feed_forward.w2.bias",
        TP,
    ),
    Exhibit(
        expert_gradients_times_ep,
        "torchtitan #2387, #1878, #4054",
        "parity: first wrong: layers.1.moe.experts.w3; 2.00x",
        EP,
    ),
    Exhibit(own_experts_in_the_norm, "torchtitan #4154", "parity: gradient norm", EP),
    Exhibit(
        mtp_of_each_rank,
        "Megatron-LM #1532",
        f"{RANKS}/test_mtp.py::test_losses_and_gradients_equal_one_process[cp 2 with experts]",
        slow=True,
    ),
    Exhibit(
        averaged_key_gradients,
        "Megatron-LM #1464",
        f"{RANKS}/test_context_kinds.py::test_every_kind_is_that_of_one_process[allgather-True-2]",
    ),
    Exhibit(
        state_across_documents,
        "Automodel #2147, torchtitan #3892",
        f"{UNIT}/test_delta.py::test_documents_are_computed_as_if_alone",
    ),
    Exhibit(
        rates_in_bf16,
        "transformers #47842, torchtitan #4178",
        f"{RANKS}/test_init.py::test_logarithms_are_finite_in_bf16",
    ),
    Exhibit(
        no_sink_gradient,
        "torchtitan #3814",
        f"{UNIT}/test_attention_op.py::test_attention_is_the_softmax_spelled_out["
        "{'sinks': True}-False]",
    ),
    Exhibit(
        zero_bias_in_export,
        "prime-rl #2681",
        f"{UNIT}/test_hf_parts.py::test_every_arrangement_goes_both_ways[dtype0]",
    ),
    Exhibit(
        chunks_alike,
        "OLMo-core's changelog",
        f"{RANKS}/test_pipeline.py::test_cuts_and_microbatches[one layer per stage]",
        slow=True,
    ),
    Exhibit(
        data_from_the_beginning,
        "torchtitan #811",
        f"{UNIT}/test_data.py::test_resume_at_any_step_under_another_degree[1-4-1-jsonl]",
    ),
    Exhibit(
        data_of_the_next_step,
        "torchtitan #3908",
        f"{UNIT}/test_data.py::test_resume_at_any_step_under_another_degree[1-4-1-jsonl]",
    ),
]
BY_NAME = {exhibit.name: exhibit for exhibit in EXHIBITS}


def with_mistake(name: str, function: Any, *args: Any, **options: Any) -> Any:
    """Call a function with a mistake planted; on every rank."""
    with BY_NAME[name].plant():
        return function(*args, **options)


class Planted:
    """A plugin of pytest that plants a mistake in a test, and in the ranks that it uses."""

    def __init__(self, name: str, outer: Callable[..., Any], folder: Path):
        self.name = name
        self.outer = outer
        self.folder = folder
        self.outcomes: list[tuple[str, str]] = []
        """Of each phase of the tests: what happened, and why it failed."""

    @pytest.fixture(scope="session")
    def ranks(self) -> Callable[..., list[Any]]:
        def run(world: int, function: Any, *args: Any, **options: Any) -> list[Any]:
            return self.outer(world, with_mistake, self.name, function, *args, **options)

        return run

    @pytest.fixture(scope="module")
    def corpora(self) -> dict[str, Path | None]:
        return write_kinds(self.folder)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        with BY_NAME[self.name].plant():
            return (yield)

    def pytest_runtest_logreport(self, report: Any) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        self.outcomes.append((f"{report.when} {report.outcome}", crash.message if crash else ""))


def outcomes(name: str, ranks: Callable[..., Any], folder: Path) -> list[tuple[str, str]]:
    """Run the test that an exhibit names, with its mistake."""
    plugin = Planted(name, ranks, folder)
    off = [f"-pno:{plugin}" for plugin in ("terminal", "cacheprovider", "timeout", "xdist")]
    node = f"{ROOT / BY_NAME[name].check}"
    options = [*off, "--noconftest", "--capture=no", "-oaddopts=", f"--basetemp={folder / 'base'}"]
    pytest.main([*options, f"--rootdir={ROOT}", node], plugins=[plugin])
    return plugin.outcomes


def compared(argv: list[str]) -> str:
    """What `torchtitan parity` finds, without its search for the axis; called by every rank."""
    found = parity.compare(argv, Tolerances())
    problems = list(found.problems)
    if found.culprit:
        problems.append(f"first wrong: {found.culprit}")
    if found.factor:
        problems.append(f"{found.factor:.2f}x")
    return "; ".join(problems)
