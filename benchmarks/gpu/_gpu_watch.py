"""What `_gpu_speed.py` records of a run: seconds of steps and updates, memory, the GPU's clock, and
a profile.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from _gpu_bench import Bench, Figures
from _gpu_expected import kind_of
from _gpu_load import LOAD, device_uuid, summary, watch

TOP = 12
"""Kernels that are listed."""


class Watched:
    """Follows a run. Its figures are complete once the step after the last timed one is done."""

    def __init__(self, bench: Bench, warm: int, last: int):
        """
        Args:
            warm: the last step that isn't timed.
            last: the last step that is timed; the next one is profiled.
        """
        self.bench = bench
        self.warm = warm
        self.last = last
        self.load = ExitStack()
        """Watches the GPU during the timed steps; to be left after the run."""
        self.tokens = 0.0
        """Of a step, per GPU."""
        self.flops = 0.0
        """Of a token."""
        self.head_flops = 0.0
        """Those of the output projection."""
        self.peak_flops: float | None = None
        self.first = 0.0
        """Seconds of the first step."""
        self.seconds: list[float] = []
        """Of each timed step."""
        self.update_ms: list[float] = []
        """Of the weights' update in each timed step, on the device."""
        self.allocated = 0
        self.retries = 0
        """Of the allocator during the timed steps: it had to free memory first."""
        self.rows: list[dict[str, str]] = []
        """What nvidia-smi said during the timed steps."""
        self.kernels: Sequence[Figures] = ()
        self.kinds: Figures = {}

    def callback(self) -> Any:
        import torch

        from torchtitan.train.callbacks import Callback

        cuda = torch.cuda.is_available()
        wait = torch.cuda.synchronize if cuda else lambda: None
        activity = torch.profiler.ProfilerActivity
        profile = torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU])
        watched = self

        class Following(Callback):
            def on_start(self, run: Any) -> None:
                watched._read_sizes(run.config)
                run.optimizer.step = self.update = _Timed(run.optimizer.step, cuda)
                self.began = time.perf_counter()

            def after_step(self, run: Any, result: Any) -> None:
                step = run.progress.step
                if step in (watched.warm, watched.last):
                    wait()
                now = time.perf_counter()
                if step == 1:
                    watched.first = now - self.began
                if watched.warm < step <= watched.last:
                    watched.seconds.append(now - self.began)
                if cuda:  # before the step's report resets it
                    allocated = torch.cuda.max_memory_allocated()
                    watched.allocated = max(watched.allocated, allocated)
                if step == watched.warm:
                    watched.rows = watched.load.enter_context(watch(device_uuid()))
                    watched.retries = -_retries()
                elif step == watched.last:
                    watched.load.close()
                    watched.retries += _retries()
                    watched.update_ms = self.update.milliseconds()[-len(watched.seconds) :]
                    profile.start()
                elif step == watched.last + 1:
                    profile.stop()
                    took = _took(profile, "device" if cuda else "cpu")
                    watched.kernels = _largest(took)
                    watched.kinds = _by_kind(took)
                    profile.export_chrome_trace(str(watched.bench.kept / "trace.json.gz"))
                self.began = time.perf_counter()

        return Following()

    def _read_sizes(self, config: Any) -> None:
        import torch.distributed as dist

        from torchtitan.telemetry.metrics import peak_flops
        from torchtitan.train.preflight import preflight
        from torchtitan.utils.device import device_name

        training = config.training
        setup = preflight(config, output=False)
        tokens = training.global_batch_size * training.seq_len
        self.tokens = tokens / dist.get_world_size()
        self.flops = setup.spec.flops_per_token(setup.args, training.seq_len)
        self.head_flops = 6.0 * setup.args.dim * setup.args.vocab_size
        self.peak_flops = peak_flops(device_name(), "bfloat16")


class _Timed:
    """Calls a function, and times what it does on the device."""

    def __init__(self, function: Callable[..., Any], cuda: bool):
        self.function = function
        self.cuda = cuda
        self.calls: list[tuple[Any, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = self._now()
        result = self.function(*args, **kwargs)
        self.calls.append((began, self._now()))
        return result

    def _now(self) -> Any:
        import torch

        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self) -> list[float]:
        """Of each call, once the device is done."""
        if self.cuda:
            return [began.elapsed_time(ended) for began, ended in self.calls]
        return [1e3 * (ended - began) for began, ended in self.calls]


def gpu_now() -> Figures:
    """Clock, power and temperature of the GPU; or why they are not known."""
    from torchtitan.utils.accelerators import NoDriver, query

    try:
        return summary(query(LOAD, device_uuid())[:1])
    except NoDriver as reason:
        return {"unknown": str(reason)}


def _retries() -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    stats = torch.cuda.memory_stats()
    return stats["num_alloc_retries"] + stats["num_ooms"]


def _took(profile: Any, where: str) -> dict[str, tuple[float, int]]:
    """Microseconds and calls of each kernel."""
    return {
        event.key: (getattr(event, f"self_{where}_time_total"), event.count)
        for event in profile.key_averages()
    }


def _by_kind(took: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """Milliseconds by kind of kernels."""
    total: Counter[str] = Counter()
    for name, (microseconds, _) in took.items():
        total[kind_of(name)] += microseconds / 1e3
    return {kind: round(milliseconds, 3) for kind, milliseconds in total.items()}


def _largest(took: Mapping[str, tuple[float, int]]) -> list[Figures]:
    """The kernels that took the most time, with their share of all kernels' time."""
    total = sum(time for time, _ in took.values()) or 1
    largest = sorted(took.items(), key=lambda item: -item[1][0])[:TOP]
    return [
        {
            "kernel": name[:100],
            "calls": calls,
            "ms": round(time / 1e3, 3),
            "pct": round(100 * time / total, 1),
        }
        for name, (time, calls) in largest
    ]
