"""`python -m tests.cuda.trace WORLD FLAGS...`: two steps of one rank on a fake GPU, as JSON.

Everything is the project's own: configuration, mesh, `parallelize`, `train_step`. Replaced are the
network, the GPU's memory, and the data, which are random tokens. Then follows what else the
configuration asks for: a validation, samples, the staging of a save.
"""

from contextlib import AbstractContextManager

from tests.cuda import gpu  # isort: skip (before torch)

import dataclasses
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.cuda import compiler
from tests.cuda.host import Host
from tests.traced_step.trace import equal_splits
from torchtitan.checkpoint import TrainedModel
from torchtitan.checkpoint.save import build_stager
from torchtitan.config import resolve
from torchtitan.config.sections.schema import Config
from torchtitan.data.loader import StepBatch
from torchtitan.inference.generator import SamplingSettings, continue_prompts
from torchtitan.parallel.experts.shard import count_splits
from torchtitan.parallel.mesh import build_mesh
from torchtitan.parallel.parallelize import parallelize
from torchtitan.tools.rehearsal.fake import aside, fake_cluster, take_fake_memory
from torchtitan.tools.rehearsal.replaced import blank_data
from torchtitan.train.build import Builders, build
from torchtitan.train.engine import Engine
from torchtitan.train.logits import Probe
from torchtitan.train.preflight import Setup, preflight
from torchtitan.train.step import train_step
from torchtitan.utils.torch_compat import replaced


def trace(flags: list[str], world: int) -> dict[str, Any]:
    """Compile and run the steps of rank 0 in this process, which can't be used again."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    compiled = compiler.install()
    host = Host()
    config = resolve(flags, world).config
    setup = preflight(config, output=False)

    def twice(action: Callable[[], object]) -> list[dict[str, Any]]:
        passes = []
        for _ in range(2):
            before = len(compiled.regions)
            host.take()
            action()
            passes.append({"graphs": len(compiled.regions) - before, "waits": host.take()})
        return passes

    with fake_cluster(world, 0) as mode, _fsdp_on_fake_memory(mode), host.watch(mode), mode:
        engine = _build(config, setup, mode)
        steps = twice(partial(_step, engine, setup, config))
        after = {name: twice(action) for name, action in _after(engine, setup, config)}
    return {
        "torch": torch.__version__,
        "steps": steps,
        "after": after,
        "regions": [dataclasses.asdict(region) for region in compiled.regions],
        "kernels": [dataclasses.asdict(kernel) for kernel in compiled.kernels],
    }


def _build(config: Config, setup: Setup, mode: FakeTensorMode) -> Engine:
    def fill(model: nn.Module, *_: Any) -> None:
        take_fake_memory(mode, model, gpu.DEVICE)

    def splits(sent: torch.Tensor, received: torch.Tensor, rows: int) -> Any:
        count_splits(sent, received, rows)  # the host waits
        return equal_splits(sent, received, rows)

    builders = Builders(
        mesh=aside(build_mesh),
        data=blank_data,
        models=aside(partial(parallelize, fill=fill, splits=splits)),
    )
    return build(config, setup, gpu.DEVICE, builders)


def _step(engine: Engine, setup: Setup, config: Config) -> None:
    train_step(engine, _batch(engine, setup))
    if engine.average is not None:
        engine.average.update(config.ema.start_step)


def _after(
    engine: Engine, setup: Setup, config: Config
) -> Iterator[tuple[str, Callable[[], object]]]:
    """What else a run does with its model, as far as the configuration asks for it."""
    if engine.validation is not None:
        yield "validation", engine.validation.run
    if engine.probe is not None:
        yield "samples", partial(_samples, engine.probe, setup, config)
    if config.checkpoint.async_mode != "disabled" and config.checkpoint.interval == 1:
        trained = TrainedModel(engine.models, engine.optimizer, engine.average)
        stager = build_stager(config.checkpoint.async_mode)
        assert stager is not None
        yield "staging of a save", lambda: stager.stage(trained.tensors())


def _samples(probe: Probe, setup: Setup, config: Config) -> None:
    """Three tokens after each prompt, which is also how benchmarks are evaluated."""
    continue_prompts(
        [setup.tokenizer.encode(prompt, bos=True) for prompt in config.sampling.prompts],
        lambda texts, _: probe.next_logits(texts, setup.tokenizer.vocab_size),
        SamplingSettings(temperature=0),  # fake tensors have no random numbers
        stop=[],
        max_new_tokens=3,
        max_seq_len=probe.max_seq_len,
        device=gpu.DEVICE,
    )


def _fsdp_on_fake_memory(mode: FakeTensorMode) -> AbstractContextManager[None]:
    """FSDP's groups of parameters make an empty tensor on the device."""
    initialize = FSDPParamGroup.__init__

    def fake(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> None:
        with mode:
            initialize(group, *args, **kwargs)

    return replaced(FSDPParamGroup, __init__=fake)


def _batch(engine: Engine, setup: Setup) -> StepBatch:
    """Random tokens, with a few ends of documents."""
    batch: StepBatch = engine.loader.blank()
    tokens = torch.randint(1000, batch.tokens.shape)
    tokens[:, 7::19] = setup.tokenizer.eos_id
    return dataclasses.replace(batch, tokens=tokens, labels=tokens.roll(-1, 1))


def main() -> None:
    world, *flags = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        result = trace([f"--job.dump_folder={folder}", *flags], int(world))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
