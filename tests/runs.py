"""Small training runs for tests: a tiny Llama on text made here, started through the real
trainer.
"""

import gc
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.rounding import assert_trained_alike
from torchtitan.config import resolve
from torchtitan.testing.observe import write_corpus
from torchtitan.train.callbacks import Callback

__all__ = [
    "arguments",
    "free_ports",
    "full",
    "losses",
    "read_metrics",
    "storages",
    "train",
    "weights",
    "write_corpus",
]

SAVE = ["--checkpoint.enable", "--checkpoint.interval=3"]
SCHEDULE = "--lr_scheduler.total_steps=8"
"""Of a run of 8 steps, also if it is stopped before."""

EXPERTS = [
    "--model.name=qwen3_moe",
    *(
        f"--model.overrides.{key}={value}"
        for key, value in {
            "n_experts": 8,
            "experts_per_token": 2,
            "expert_dim": 32,
            "head_size": 16,
        }.items()
    ),
    "--moe.balance_bias_rate=0.01",
    "--moe.sequence_balance_loss=0.01",
]
"""Flags of a tiny mixture of experts."""
LR = 1e-2
TINY = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96}
CHAIN: dict[str, tuple[int, list[str]]] = {
    "dp 4": (4, ["--training.local_batch_size=2"]),
    "pp 2 x tp 2": (
        4,
        ["--parallelism.pipeline_parallel_degree=2", "--parallelism.tensor_parallel_degree=2"],
    ),
    "cp 2 x dp_replicate 2": (
        4,
        [
            "--parallelism.context_parallel_degree=2",
            "--parallelism.data_parallel_replicate_degree=2",
        ],
    ),
    "one process": (1, []),
    "pp 2 x dp_shard 2": (
        4,
        [
            "--parallelism.pipeline_parallel_degree=2",
            "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
        ],
    ),
}
"""Layouts of four layers that a run passes through: ranks and flags."""


def arguments(
    folder: Path, *extra: str, steps: int = 4, global_batch: int = 8, local_batch: int = 2
) -> list[str]:
    """Command-line arguments of a tiny run whose files are in `folder`."""
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        write_corpus(corpus)
    overrides = [f"--model.overrides.{key}={value}" for key, value in TINY.items()]
    return [
        f"--job.dump_folder={folder / 'out'}",
        "--training.dataset=corpus",
        f"--training.dataset_path={corpus}",
        f"--training.steps={steps}",
        f"--training.global_batch_size={global_batch}",
        f"--training.local_batch_size={local_batch}",
        "--training.seq_len=32",
        "--training.mixed_precision_param=float32",
        "--activation_checkpoint.mode=none",
        f"--optimizer.lr={LR}",
        "--lr_scheduler.warmup_steps=2",
        "--metrics.log_freq=1",
        *overrides,
        *extra,
    ]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def storages() -> dict[int, int]:
    """Address and bytes of every tensor that Python knows of."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    plain = [tensor.to_local() if type(tensor) is DTensor else tensor for tensor in tensors]
    real = [
        tensor.untyped_storage()
        for tensor in plain
        if type(tensor) in (torch.Tensor, torch.nn.Parameter)
    ]
    return {
        storage.data_ptr(): storage.nbytes() for storage in real if storage.device.type == "cpu"
    }


def weights(models) -> dict[str, torch.Tensor]:
    """The full weights of the whole model, on every rank; under pipeline parallelism each has only
    some.

    With the routing biases of experts, and their loads in the last step.
    """
    own = {name: full(p) for model in models for name, p in model.named_parameters()}
    routers = ("router.expert_bias", "router.load")
    own |= {
        name: full(b)
        for model in models
        for name, b in model.named_buffers()
        if name.endswith(routers)
    }
    return _gathered(own)


def average_of(trainer) -> dict[str, torch.Tensor]:
    """The full average of the weights, on every rank; empty if the run keeps none."""
    average = trainer.engine.average
    return _gathered(
        {name: full(value) for name, value in average.current().items()} if average else {}
    )


def _gathered(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return {name: weight for part in parts for name, weight in part.items()}


def train(argv: list[str]) -> dict[str, Any]:
    """Run to the end on the ranks that call this; returns rank 0's metrics and every rank's full
    weights.
    """
    from torchtitan.train.preflight import preflight
    from torchtitan.train.trainer import Trainer

    config = resolve(argv, dist.get_world_size()).config
    trainer = Trainer(config, preflight(config))
    initial = weights(trainer.engine.models)
    try:
        progress = trainer.train()
    finally:
        trainer.close()
    return {
        "initial": initial,
        "weights": weights(trainer.engine.models),
        "average": average_of(trainer),
        "metrics": read_metrics(Path(config.job.dump_folder)),
        "progress": progress.state_dict(),
    }


class After(Callback):
    """Calls a function with the result of each step."""

    def __init__(self, function):
        self.function = function

    def after_step(self, run, result):
        self.function(result)


def first(function):
    """To arrange a trainer's callbacks: `function(result)` before all others."""
    return lambda callbacks: (After(function), *callbacks)


def last(function):
    """The same after all others, the save included."""
    return lambda callbacks: (*callbacks, After(function))


class TorchAverage:
    """`torch.optim.swa_utils.AveragedModel` of full tensors."""

    def __init__(self, decay):
        self.parameters = torch.nn.ParameterDict()
        self.average = None
        self.function = get_ema_multi_avg_fn(decay)

    def update(self, values):
        self.parameters = torch.nn.ParameterDict(
            {name.replace(".", "/"): value.float() for name, value in values.items()}
        )
        if self.average is None:
            self.average = AveragedModel(self.parameters, multi_avg_fn=self.function)
        self.average.update_parameters(self.parameters)

    def values(self):
        return {
            name.replace("/", "."): value.detach() for name, value in self.average.module.items()
        }


def assert_averages(average, expected):
    assert average.keys() == expected.keys() != set()
    for name, value in expected.items():
        assert average[name].dtype == torch.float32
        assert torch.equal(average[name], value), name


def read_metrics(dump_folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    lines = (dump_folder / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(run: dict[str, Any]) -> list[float]:
    return [record["loss"] for record in run["metrics"] if "loss" in record]


def assert_continues(run: dict[str, Any], uninterrupted: dict[str, Any]) -> None:
    """A run that was stopped and went on is the one that never stopped."""
    assert losses(run) == pytest.approx(losses(uninterrupted), rel=1e-5)
    assert [r["step"] for r in run["metrics"]] == [r["step"] for r in uninterrupted["metrics"]]
    assert [r["lr"] for r in run["metrics"]] == pytest.approx(
        [r["lr"] for r in uninterrupted["metrics"]]
    )
    assert run["progress"] == uninterrupted["progress"]
    for name, value in uninterrupted["weights"].items():
        assert_trained_alike(run["weights"][name], value, LR, len(uninterrupted["metrics"]), name)


def free_ports(number):
    """Ports of this machine that nothing listened on a moment ago."""
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
