"""What a run of a mixture of experts reports, checks and resumes."""

import copy
import json
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.runs import EXPERTS, arguments, train
from torchtitan.config import resolve
from torchtitan.config.sections.parallelism import Compile
from torchtitan.models.moe.moe import Experts
from torchtitan.optim.expert_balance import ExpertBalance
from torchtitan.parallel.compile import compiler
from torchtitan.parallel.experts.shard import _sharded_class
from torchtitan.parallel.memory.regions import replace_method
from torchtitan.train.build import build
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer

EP = "--parallelism.expert_parallel_degree="


def loads(folder):
    lines = map(json.loads, (folder / "expert_load.jsonl").read_text().splitlines())
    return [{key: line[key] for key in ("step", "steps", "rows")} for line in lines]


def counting(argv):
    """Train; how often the host waited for the experts' loads."""
    with mock.patch.object(
        ExpertBalance, "take", autospec=True, side_effect=ExpertBalance.take
    ) as take:
        train(argv)
    return take.call_count


def test_loads_are_reported(ranks, tmp_path):
    """Of all steps since the last record, and all tokens that count, on any number of ranks."""
    extra = [*EXPERTS, "--metrics.log_freq=3"]
    (tmp_path / "two").mkdir()
    waits = ranks(2, counting, arguments(tmp_path / "two", *extra, f"{EP}2", steps=6))
    assert waits == [3, 3], "in logged steps alone"
    argv = arguments(tmp_path, *extra, steps=6)
    run = ranks(1, train, argv)[0]
    assert loads(tmp_path / "two/out") == loads(tmp_path / "out")
    assert [(line["step"], line["steps"]) for line in loads(tmp_path / "out")] == [
        (1, 1),
        (3, 2),
        (6, 3),
    ]
    tokens = 0
    for record, line in zip(run["metrics"], loads(tmp_path / "out"), strict=True):
        routed = 2 * (record["tokens"] - tokens)  # to 2 experts each
        assert [sum(rows) for rows in line["rows"].values()] == [routed, routed]
        peaks = [max(rows) * 8 / routed for rows in line["rows"].values()]
        assert record["expert_load_max"] == pytest.approx(max(peaks))
        assert record["expert_load_max_layer"] == peaks.index(max(peaks))
        assert 0.5 < record["expert_entropy"] < 1
        assert record["auxiliary_loss"] == pytest.approx(2 * 0.01, rel=0.3), (
            "the losses of two layers are 1 if balanced"
        )
        tokens = record["tokens"]


def biases_of_a_model_in_bf16(argv, steps):
    """The routing biases of each layer, from 7 on, after steps in which the experts' rows differ by
    one in a thousand.
    """
    config = resolve(argv, 1).config
    engine = build(config, preflight(config), torch.device("cpu"))
    routers = list(engine.experts.routers.values())
    for router in routers:
        router.expert_bias.fill_(7.0)
    for _ in range(steps):
        for router in routers:
            router.step_load.copy_(torch.tensor([999, 1001, 1000, 1000, 1002, 998, 1000, 1000]))
        engine.experts.step()
    engine.loader.close()
    return [router.expert_bias.clone() for router in routers]


def test_a_large_bias_moves_by_small_differences(ranks, tmp_path):
    """bf16's next number after 7 is 7.03, and it counts only to 256."""
    types = ["--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"]
    argv = arguments(tmp_path, *EXPERTS, *types, "--moe.balance_bias_rate=1e-3")
    moves = torch.tensor([1, -1, 0, 0, -1, 1, 0, 0])
    for bias in ranks(1, biases_of_a_model_in_bf16, argv, 20)[0]:
        assert bias.dtype == torch.float32
        torch.testing.assert_close(bias, 7 + 20 * 1e-3 * moves, rtol=0, atol=1e-5)


# ---- exchanges of rows between ranks


def exchanges(trace):
    """For each exchange of rows in a trace, whether matrices were multiplied meanwhile."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if "ts" in event]
    events.sort(key=lambda event: event["ts"])
    for i, event in enumerate(events):
        sends_rows = event["name"] == "_c10d_functional::all_to_all_single" and (
            event["args"]["Input type"][0] == "float"
        )
        if sends_rows:
            later = [x["name"] for x in events[i + 1 :] if x["tid"] == event["tid"]]
            until = next(n for n, name in enumerate(later) if name.endswith("wait_tensor"))
            yield "aten::mm" in later[:until]


def test_the_shared_expert_hides_the_way_to_the_experts(ranks, tmp_path):
    """A block exchanges rows to its experts and back, forward and backward."""
    profile = ["--profiling.enable_profiling", "--profiling.profile_freq=2"]
    profile += ["--profiling.profiler_warmup=1", "--profiling.profiler_active=1"]
    shared = "--model.overrides.shared_expert_dim=32"
    argv = arguments(tmp_path, *EXPERTS, shared, f"{EP}2", *profile, steps=2)
    ranks(2, train, argv)
    layers, batches = 2, 2
    for rank in range(2):
        hidden = list(exchanges(tmp_path / f"out/profile_traces/step_2/rank{rank}_trace.json"))
        forward = batches * layers * 2
        assert (len(hidden), sum(hidden)) == (2 * forward, forward)


def waits(argv, layers):
    """Places where the host reads tensors in the third step of a run, but for the loops over groups
    that stand for CUDA's kernels.
    """
    places = []

    def reading(name):
        read = getattr(torch.Tensor, name)

        def counted(self, *args):
            frame = sys._getframe(1)
            if not frame.f_code.co_filename.endswith("models/moe/grouped.py"):
                places.append(f"{name} in {frame.f_code.co_qualname}")
            return read(self, *args)

        return mock.patch.object(torch.Tensor, name, counted)

    config = resolve([*argv, f"--model.overrides.n_layers={layers}"], 2).config
    trainer = Trainer(config, preflight(config))
    batches = iter(trainer.engine.loader)
    for _ in range(2):
        trainer._train_step(batches)
    with reading("tolist"), reading("item"), reading("__bool__"), reading("cpu"):
        trainer._train_step(batches)
    trainer.close()
    return places


def test_the_host_waits_once_for_each_exchange_and_once_for_a_step(ranks, tmp_path):
    for layers in (2, 6):  # of two batches each
        argv = arguments(tmp_path, *EXPERTS, f"{EP}2", "--metrics.log_freq=100")
        exchanges = 2 * layers * ["tolist in count_splits"]
        vote_and_result = 2 * ["tolist in LateValues.numbers"]  # of the step before, so it is there
        assert ranks(2, waits, argv, layers)[0] == exchanges + vote_and_result


def sharded_and_whole(counts):
    """Outputs and gradients of compiled experts on one rank for each number of rows, of the same
    experts unsharded, and the number of graphs.
    """
    torch.manual_seed(0)
    experts = Experts(4, 8, 16)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight)
    sharded = copy.deepcopy(experts)
    sharded.__class__ = _sharded_class(Experts)
    sharded.group = dist.group.WORLD
    replace_method(sharded, "compute", compiler(Compile(backend="eager")))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    results = []
    for count in counts:
        values = torch.randn(count, 8)
        ends = torch.tensor([count // 2, count // 2, count, count], dtype=torch.int32)
        for module in (sharded, experts):
            rows = values.clone().requires_grad_()
            module.zero_grad()
            out = module(rows, ends)
            out.square().sum().backward()
            results.append([out.detach(), rows.grad, *(w.grad for w in module.parameters())])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return list(zip(results[::2], results[1::2], strict=True)), graphs


def test_a_rank_with_few_rows_compiles_nothing(ranks):
    ((results, graphs),) = ranks(1, sharded_and_whole, (0, 8, 1, 0, 13))
    assert graphs == 1
    for ours, theirs in results:
        torch.testing.assert_close(ours, theirs)
