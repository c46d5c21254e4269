"""Fixtures that all tests share."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the figures are those of the CPU
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as a script's `command &` starts; processes of tests inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

_CACHE = os.environ["TORCHTITAN_CACHE"] = tempfile.mkdtemp(prefix="torchtitan-tests-")

from tests.seconds import Seconds
from tests.shares import share_of
from torchtitan.testing.ranks import RankPool
from torchtitan.utils.logging import logger


def pytest_unconfigure() -> None:
    shutil.rmtree(_CACHE, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="I/N", help="run the I-th of N equal shares of the tests")
    parser.addoption("--record", metavar="FILE", help="enter each file's seconds into this table")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.record and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Seconds(Path(config.option.record)))


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    for item in items:
        if "pools" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
    yield  # -m chooses by markers
    if config.option.share:
        items[:] = share_of(items, config.option.share)


def pytest_collection_finish() -> None:
    """Collections needn't scan what the test files import: a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _restored_process() -> Iterator[None]:
    """Commands and runs set up the process that they start in, which the tests share."""
    name = "TORCH_CPP_LOG_LEVEL"
    handlers, propagate, level = [*logger.handlers], logger.propagate, os.environ.get(name)
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    os.environ.pop(name, None)
    if level is not None:
        os.environ[name] = level


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, RankPool]]:
    """Ranks that stay alive from test to test, by their number."""
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def ranks(pools: dict[int, RankPool]) -> Callable[..., list[Any]]:
    """`ranks(world, function, *args)` runs `function` on gloo ranks and returns their results."""

    def run(world: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return pools.setdefault(world, RankPool(world)).run(function, *args, **kwargs)

    return run


@pytest.fixture(scope="session")
def uninterrupted(
    ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """A run of 8 steps on one rank, which those with interruptions must equal."""
    from tests.runs import SCHEDULE, arguments, train

    return ranks(1, train, arguments(tmp_path_factory.mktemp("whole"), SCHEDULE, steps=8))[0]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | None]:
    """The same text in every kind of source."""
    from tests.data_kinds import write_kinds

    return write_kinds(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped vocabulary as a Llama-3 style `original/tokenizer.model`."""
    from tests.hf_folders import write_tiktoken

    folder = tmp_path_factory.mktemp("llama")
    (folder / "original").mkdir()
    write_tiktoken(folder / "original")
    return folder


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`slurm(script, *arguments)` runs a script as a job on three nodes."""
    from tests.slurm_stand_ins import job_runner

    yield from job_runner(tmp_path)


@pytest.fixture
def toml(tmp_path: Path) -> Callable[..., str]:
    """`toml(text)` writes a configuration and returns its path."""

    def write(text: str, name: str = "run.toml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Trackers of a run on one rank, without settings of the environment or sinks of others."""
    import torch.distributed as dist

    from torchtitan.config.registry import metric_sinks

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    for name in (
        "WANDB_PROJECT",
        "WANDB_TEAM",
        "WANDB_RUN_ID",
        "WANDB_NAME",
        "WANDB_RUN_NAME",
        "MLFLOW_TRACKING_URI",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(metric_sinks, "_entries", {})


@pytest.fixture
def working_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Everything that a run writes belongs in its dump folder."""
    folder = tmp_path_factory.mktemp("working")
    monkeypatch.chdir(folder)
    yield
    assert [path.name for path in folder.iterdir()] == []


@pytest.fixture
def init_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`torchtitan init` works in this folder, on a machine without GPUs."""
    from tests.init_runs import CPU
    from torchtitan.commands import init

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "local_gpus", lambda: (None, 0))
    Path("cpu.toml").write_text(CPU)
    return tmp_path


@pytest.fixture
def registered() -> Iterator[None]:
    """Nothing is registered before a test, and what it registers is gone after it."""
    from torchtitan.config import registry

    before = [one._entries for one in registry.REGISTRIES]
    for one in registry.REGISTRIES:
        one._entries = {}
    yield
    for one, entries in zip(registry.REGISTRIES, before, strict=True):
        one._entries = entries
