"""Descriptions of a run: in every checkpoint's manifest, in `run.json`, and as `config.toml`."""

import hashlib
import socket
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.checkpoint.commit import versions
from torchtitan.config.derive import layout_degrees, longest_row
from torchtitan.config.load.render import to_toml
from torchtitan.config.sections.parallelism import Parallelism
from torchtitan.config.sections.schema import Config
from torchtitan.data.loader import StepLoader
from torchtitan.data.read.documents import show_bad_documents
from torchtitan.data.read.positions import DataFingerprint, DataPosition, merge_positions
from torchtitan.parallel import agree
from torchtitan.telemetry.run_record import git_revision
from torchtitan.train.preflight import Setup
from torchtitan.utils.device import device_name
from torchtitan.utils.logging import logger
from torchtitan.utils.run_files import RunFile


def describe_run(config: Config, setup: Setup, data: DataFingerprint) -> dict[str, Any]:
    """The description of the run in every checkpoint's manifest.

    Args:
        data: the loader's fingerprint.
    """
    training = config.training
    mixture: dict[str, Any] = {}
    if training.sources:
        mixture["weights"] = {source.name: source.weight for source in training.sources}
    if training.stages:
        mixture["stages"] = [stage.model_dump(exclude_defaults=True) for stage in training.stages]
    return {
        "versions": versions(),
        "model": describe_model(config, setup, 0),
        "git": git_revision() if dist.get_rank() == 0 else None,
        "ranks": dist.get_world_size(),
        "data": data.model_dump() | mixture,
        "ends": setup.tokenizer.all_ends,
        "config": to_toml(config),
    }


def describe_model(config: Config, setup: Setup, stage: int) -> dict[str, Any]:
    """The description of the model in a checkpoint's manifest, for a stage of the data."""
    return {"name": setup.spec.name, **trained_args(config, setup, stage).model_dump()}


def trained_args(config: Config, setup: Setup, stage: int) -> Any:
    """Hyper-parameters up to a stage of the data: `max_seq_len` is the longest row so far."""
    longest = longest_row(config, stage)
    return setup.args_of(stage).model_copy(update={"max_seq_len": longest})


def describe_start(run: Mapping[str, Any], parallelism: Parallelism) -> dict[str, Any]:
    """The description of this start in `run.json`. Called by all ranks.

    Args:
        run: from `describe_run`.
    """
    machines = agree.from_all((socket.gethostname(), device_name()))
    return {
        "ranks": dist.get_world_size(),
        "layout": {
            axis: degree for axis, degree in layout_degrees(parallelism).items() if degree > 1
        },
        "hosts": dict(Counter(host for host, _ in machines)),
        "devices": dict(Counter(device for _, device in machines)),
        "config": {
            "path": "config.toml",
            "sha256": hashlib.sha256(run["config"].encode()).hexdigest(),
        },
        **{key: run[key] for key in ("git", "versions", "data")},
    }


def skipped_documents(loader: StepLoader, position: DataPosition | None) -> dict[str, int]:
    """Count and log the bad documents that were left out, by kind. Called by all ranks.

    Args:
        position: the position of this rank's lanes, up to which documents of streams are counted;
            None before the first step.
    """
    positions = agree.from_all(position or loader.start)
    skipped = loader.skip_counts(merge_positions(positions))
    if dist.get_rank() == 0:
        logger.info(f"Left out {show_bad_documents(skipped)}")
    return dict(skipped.most_common())


def write_config(config: Config) -> None:
    """Write the effective configuration to the dump folder, and print it if asked."""
    folder = Path(config.job.dump_folder)
    text = to_toml(config)
    if dist.get_rank() == 0:
        for name in ("config.toml", config.job.save_config_file):
            if name:
                RunFile(folder / name).replace(text)
    if config.job.print_config:
        logger.info(f"Configuration:\n{text}")
