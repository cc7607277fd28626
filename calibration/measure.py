"""Timing steps with and without the profiler, and saving the trace."""

from __future__ import annotations

import gzip
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

Step = Callable[[], object]
Save = Callable[[dict[str, Any]], None]
SUFFIX = ".pt.trace.json.gz"
WARMUP, ACTIVE = 2, 2


@dataclass(frozen=True)
class Options:
    """The profiler's options that change what a step costs."""

    shapes: bool = True
    stack: bool = False
    sync_events: bool = True

    def profiler(self, **more: Any) -> AbstractContextManager[profile]:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        config = _ExperimentalConfig(enable_cuda_sync_events=True) if self.sync_events else None
        return profile(
            activities=activities, record_shapes=self.shapes, with_stack=self.stack, experimental_config=config, **more
        )


STANDARD = Options()


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def timed(step: Step) -> float:
    """Seconds of one step, the device's work included."""
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start


def clean_steps(step: Step, count: int, warmup: int = 0) -> list[float]:
    """Seconds of each of `count` steps without the profiler."""
    for _ in range(warmup):
        timed(step)
    return [timed(step) for _ in range(count)]


def profiled_steps(step: Step, trace: Path, options: Options = STANDARD) -> list[float]:
    """Seconds of two warm-up steps, two recorded ones and one after; the recorded ones are saved as `trace`."""
    plan = schedule(wait=0, warmup=WARMUP, active=ACTIVE, repeat=1)
    seconds = []
    with options.profiler(schedule=plan) as profiler:
        for _ in range(WARMUP + ACTIVE + 1):
            seconds.append(timed(step))
            profiler.step()
    save_trace(profiler, trace)
    return seconds


def save_trace(profiler: profile, trace: Path) -> None:
    """Write the trace gzipped, with its own name in place of the temporary path that the profiler notes in it."""
    trace.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(raw))
        text = raw.read_bytes().replace(str(raw).encode(), trace.name.removesuffix(".gz").encode())
    partial = trace.with_suffix(".partial")
    partial.write_bytes(gzip.compress(text, compresslevel=9, mtime=0))
    partial.replace(trace)


def summary(name: str, seconds: list[float]) -> dict[str, Any]:
    """The list and its median, minimum and maximum, under keys that start with `name`."""
    return {
        name: seconds,
        f"{name}_median": statistics.median(seconds),
        f"{name}_min": min(seconds),
        f"{name}_max": max(seconds),
    }


def heat_gpu(seconds: float = 0.3) -> None:
    """Keep the GPU busy for a moment, so that its clocks have left their idle state before anything is timed."""
    x = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            torch.mm(x, x)
        torch.cuda.synchronize()
