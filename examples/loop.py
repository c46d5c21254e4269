"""The training loop on one screen, by the engine's public functions: no checkpoints, no telemetry,
no preflight.

    python examples/loop.py
    torchrun --nproc_per_node 4 examples/loop.py --parallelism.tensor_parallel_degree=2

Arguments are flags of the configuration.
"""

import sys
from collections.abc import Iterator

import torch.distributed as dist

from torchtitan.config import Config, resolve
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.models import get_spec
from torchtitan.optim.lr_schedule import LRSchedule
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.parallel.groups import init_distributed
from torchtitan.parallel.mesh import build_mesh
from torchtitan.parallel.parallelize import parallelize
from torchtitan.parallel.pipeline.split import pipeline_stages
from torchtitan.train.build import build_compute, build_data, set_determinism
from torchtitan.train.engine import Engine
from torchtitan.train.preflight import Setup
from torchtitan.train.state import seed_step
from torchtitan.train.step import train_step
from torchtitan.utils.device import current_device
from torchtitan.utils.process import rank_and_world

FLAGS = ["--job.config_file=train_configs/debug_model.toml", "--training.steps=10"]


def build(config: Config) -> Engine:
    """Model, optimizer and data of this rank. The default process group must exist."""
    training = config.training
    device = current_device()
    # What to train: a family's hyper-parameters, a tokenizer, and where a pipeline is cut.
    spec = get_spec(config.model.name)
    args = spec.args(config.model.flavor, config.model.overrides, max_seq_len=training.seq_len)
    flops = spec.module_flops(args, training.seq_len)
    stages = pipeline_stages(config, flops, spec.tied_modules(args))
    setup = Setup(spec, args, build_tokenizer(config.model.hf_assets_path), stages)
    # Where each part of it goes: the mesh, this rank's shard of the model, its rows of the data.
    mesh = build_mesh(config, device.type)
    models = parallelize(config, spec, args, stages, mesh, device)
    loader = build_data(config, "training", setup.tokenizer, (mesh.dp_rank, mesh.dp_degree))
    # How to train it: forward and loss, optimizer, schedule.
    compute = build_compute(config, setup, mesh, device, models=models, section=training)
    optimizer = build_optimizer(models, config.optimizer, config.custom, setup.width_ratio)
    schedule = LRSchedule(optimizer, config.optimizer.lr, config.lr_scheduler)
    return Engine(
        config,
        setup,
        mesh,
        device,
        models=models,
        optimizer=optimizer,
        schedule=schedule,
        loader=loader,
        compute=compute,
    )


def train(config: Config) -> Iterator[float | None]:
    """The loss of each step, the same on every rank; None if no token of it is predicted."""
    set_determinism(config.debug)
    engine = build(config)
    for step, batch in zip(range(config.training.steps), engine.loader, strict=False):
        seed_step(config.debug.seed, step, engine.mesh.dp_rank)
        yield train_step(engine, batch).loss
        engine.schedule.advance()
    engine.loader.close()


if __name__ == "__main__":
    rank, world = rank_and_world()
    config = resolve([*FLAGS, *sys.argv[1:]], world).config
    init_distributed(config.comm, current_device())
    for step, loss in enumerate(train(config), 1):
        if rank == 0:
            print(f"step {step}: " + ("no loss" if loss is None else f"loss {loss:.4f}"))
    dist.destroy_process_group()
