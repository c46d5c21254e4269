"""torch profiler traces and CUDA memory snapshots, on a schedule."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import _ExperimentalConfig

from torchtitan.config.sections.schema import Profiling
from torchtitan.utils.logging import logger

MAX_ALLOCATIONS = 100_000


class Profiler:
    """Writes traces and snapshots on schedule: call `step(n)` after each step, and train inside
    `capture_oom`.
    """

    def __init__(self, config: Profiling, dump_folder: str):
        self.config = config
        self.folder = Path(dump_folder)
        self.last_step = 0
        self.profile: torch.profiler.profile | None = None
        if config.enable_profiling:
            self.profile = self._start_profile()
        self.snapshots = config.enable_memory_snapshot and torch.cuda.is_available()
        if self.snapshots:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
        elif config.enable_memory_snapshot:
            logger.info("profiling.enable_memory_snapshot has no effect: there is no CUDA device")

    def _start_profile(self) -> torch.profiler.profile:
        config = self.config
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        schedule = torch.profiler.schedule(
            wait=config.profile_freq - config.profiler_warmup - config.profiler_active,
            warmup=config.profiler_warmup,
            active=config.profiler_active,
        )
        profile = torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self._write_trace,
            record_shapes=True,
            # Overlapping microbatches have a thread each.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        profile.start()
        return profile

    def _target(self, folder: str, name: str) -> Path:
        path = self.folder / folder / f"step_{self.last_step}" / f"rank{dist.get_rank()}_{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _write_trace(self, profile: torch.profiler.profile) -> None:
        path = self._target(self.config.save_traces_folder, "trace.json")
        profile.export_chrome_trace(str(path))
        logger.info(f"Profiler trace: {path}")

    def _write_snapshot(self, name: str) -> None:
        path = self._target(self.config.save_memory_snapshot_folder, name)
        torch.cuda.memory._dump_snapshot(str(path))
        logger.info(f"Memory snapshot: {path}")

    def step(self, step: int) -> None:
        """Advance the schedule after `step`."""
        self.last_step = step
        if self.profile is not None:
            self.profile.step()
        if self.snapshots and step % self.config.profile_freq == 0:
            self._write_snapshot("memory_snapshot.pickle")

    @contextmanager
    def capture_oom(self) -> Iterator[None]:
        """Within, write a memory snapshot if CUDA memory runs out."""
        try:
            yield
        except torch.OutOfMemoryError:
            if self.snapshots:
                self._write_snapshot("oom_snapshot.pickle")
            raise

    def close(self) -> None:
        if self.profile is not None:
            self.profile.stop()
