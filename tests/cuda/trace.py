"""`python -m tests.cuda.trace WORLD FLAGS...`: steps of one rank on a fake GPU, as JSON.

Everything is the project's own: configuration, mesh, `parallelize`, `train_step`. Replaced are the
network, the GPU's memory, and the data, which are random tokens. After two equal steps follows
what else the configuration asks for: steps with other documents, splits of experts and stages of
the data, validation, samples, the staging of a save.
"""

from contextlib import AbstractContextManager

from tests.cuda import gpu  # isort: skip (before torch)

import dataclasses
import itertools
import json
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.cuda import compiler
from tests.cuda.host import Host
from tests.traced_step.trace import equal_splits
from torchtitan.checkpoint import TrainedModel
from torchtitan.checkpoint.save import build_stager
from torchtitan.config import resolve
from torchtitan.config.derive import data_parallel_degree, stages_of
from torchtitan.config.sections.schema import Config
from torchtitan.inference.generator import SamplingSettings, continue_prompts
from torchtitan.parallel.experts.shard import count_splits
from torchtitan.parallel.mesh import build_mesh
from torchtitan.parallel.parallelize import parallelize
from torchtitan.tools.rehearsal.fake import aside, fake_cluster, take_fake_memory
from torchtitan.tools.rehearsal.replaced import blank_data
from torchtitan.train.build import Builders, build
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
    with fake_cluster(world, 0) as mode, _fsdp_on_fake_memory(mode), host.watch(mode), mode:
        run = _Run(config, setup, mode)
        passes = []
        for name, action in run.passes():
            before = len(compiled.regions), len(compiled.kernels)
            host.take()
            action()
            passes.append(
                {
                    "name": name,
                    "graphs": len(compiled.regions) - before[0],
                    "kernels": len(compiled.kernels) - before[1],
                    "waits": host.take(),
                }
            )
    of_function = Counter(id.partition("/")[0] for id in {region.id for region in compiled.regions})
    return {
        "torch": torch.__version__,
        "shared_memory": gpu.SHARED_MEMORY,
        "graphs_of_a_function": max(of_function.values()),
        "graph_limit": torch._dynamo.config.recompile_limit,
        "passes": passes,
        "regions": [dataclasses.asdict(region) for region in compiled.regions],
        "kernels": [dataclasses.asdict(kernel) for kernel in compiled.kernels],
    }


class _Run:
    """A run without a network, weights and data."""

    def __init__(self, config: Config, setup: Setup, mode: FakeTensorMode):
        self.config = config
        self.setup = setup
        self.arrivals: Iterator[int] | None = None
        """Rows that each rank sends to this rank's experts, layer by layer; None: all alike."""

        def fill(model: nn.Module, *_: Any) -> None:
            take_fake_memory(mode, model, gpu.DEVICE)

        builders = Builders(
            mesh=aside(build_mesh),
            data=blank_data,
            models=aside(partial(parallelize, fill=fill, splits=self._splits)),
        )
        self.engine = build(config, setup, gpu.DEVICE, builders)

    def _splits(self, sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
        count_splits(sent, received, rows)  # the host waits
        to_ranks, from_ranks = equal_splits(sent, received, rows)
        if self.arrivals is not None:
            from_ranks = [next(self.arrivals)] + [0] * (len(sent) - 1)
        return to_ranks, from_ranks

    def passes(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """What the run does, with names. Steps are equal unless the name says otherwise."""
        config = self.config
        yield "first step", self._step
        yield "another step", self._step
        if config.training.document_mask:
            for every in (3, 10**6):
                yield (
                    f"an end of a document every {every:,} tokens",
                    partial(self._step, every=every),
                )
        if config.parallelism.expert_parallel_degree > 1:
            yield "other rows for experts", partial(self._step, arrivals=itertools.count(100, 7))
            yield "0, 1, 2, 3 rows for experts", partial(self._step, arrivals=itertools.count())
        for number, stage in enumerate(stages_of(config)[1:], 1):
            t = stage.training
            name = f"{t.global_batch_size} rows of {t.seq_len} tokens"
            yield name, partial(self._step, stage=number)
        if config.training.stages:
            yield "the first stage again", self._step
        for name, action in self._after():
            yield f"first {name}", action
            yield f"another {name}", action
            yield f"a step after {name}", self._step

    def _step(self, stage: int = 0, every: int = 19, arrivals: Iterator[int] | None = None) -> None:
        """Train on random tokens.

        Args:
            every: tokens between the ends of documents.
        """
        self.arrivals = arrivals
        engine = self.engine
        training = stages_of(self.config)[stage].training
        size = training.local_batch_size
        batches = -(-training.global_batch_size // (data_parallel_degree(self.config) * size))
        tokens = torch.randint(1000, (batches * size, training.seq_len))
        tokens[:, 7::every] = self.setup.tokenizer.eos_id
        batch = dataclasses.replace(
            engine.loader.blank(),
            tokens=tokens,
            labels=tokens.roll(-1, 1),
            count=training.global_batch_size,
            sources=torch.zeros(len(tokens), dtype=torch.int64),
            stage=stage,
        )
        train_step(engine, batch).judge()
        if engine.average is not None:
            engine.average.update(self.config.ema.start_step)

    def _after(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """What else a run does with its model, as far as the configuration asks for it."""
        config, engine = self.config, self.engine
        if engine.validation is not None:
            yield "validation", engine.validation.run
        if engine.probe is not None:
            yield "samples", partial(_samples, engine.probe, self.setup, config)
        if config.checkpoint.async_mode != "disabled" and config.checkpoint.interval == 1:
            trained = TrainedModel(engine.models, engine.optimizer, engine.average)
            stager = build_stager(config.checkpoint.async_mode)
            assert stager is not None
            # A step beside it, in another thread, would use the same fake mode.
            yield "staging of a save", lambda: stager.stage(trained.tensors()).result()


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


def main() -> None:
    world, *flags = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        result = trace([f"--job.dump_folder={folder}", *flags], int(world))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
