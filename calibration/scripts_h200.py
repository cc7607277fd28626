"""Runs the training scripts of calibration/scripts on one GPU, unchanged: clean steps, peak memory, GPU time.

    python3 calibration/scripts_h200.py OUT.json SECONDS development|blind [SCRIPT.py ...]

Each script is a process of its own, started through `runpy` with two functions wrapped: `torch.cuda.synchronize`, which
every script calls once at the end of a step, marks the steps, and `statistics.median`, which it calls last, is handed
the times of its steps. The scripts under `development` may be looked at to improve predictions: one late step of them
runs under the profiler and is left out of the clean steps. Those under `blind` are kept apart from fitting.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROFILED = 11  # the step (counted from 1) after which the profiler starts; it stops one step later
FIRST = 4  # steps that warm up: the scripts hand `times[4:]` to the median
LIMIT_S = 75.0  # of one script


def summary_of(found: Any) -> dict[str, Any]:
    """What a profile of one step tells: GPU time by operator and by kernel, kernels, busy time, calls on the host."""
    rows = [
        {"op": e.key, "shapes": str(e.input_shapes), "calls": e.count, "us": round(e.self_device_time_total, 1)}
        for e in found.key_averages(group_by_input_shape=True)
        if e.self_device_time_total > 0 and "CUDA" not in str(e.device_type)
    ]
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    spans: list[tuple[float, float]] = []
    host: Counter[str] = Counter()
    for event in found.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()) and not event.is_user_annotation():
            us = event.duration_ns() / 1e3
            kernels[event.name()[:90]][0] += 1
            kernels[event.name()[:90]][1] += us
            spans.append((event.start_ns() / 1e3, event.start_ns() / 1e3 + us))
        elif "CPU" in str(event.device_type()):
            host[event.name()[:60]] += 1
    by_time = sorted(kernels.items(), key=lambda item: -item[1][1])
    return {
        "operators": sorted(rows, key=lambda row: -row["us"])[:200],
        "kernels": [[name, int(calls), round(us, 1)] for name, (calls, us) in by_time[:80]],
        "kernel_count": len(spans),
        "gpu_busy_us": round(covered(spans), 1),
        "gpu_span_us": round(max(e for _, e in spans) - min(b for b, _ in spans), 1) if spans else 0.0,
        "host_calls": dict(host.most_common(120)),
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """The time that at least one of the spans covers."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def forked(task: Callable[[], dict[str, Any]], limit_s: float) -> dict[str, Any]:
    """The result of `task` in a fork of this process, which has imported what takes long and has not touched the GPU.

    What the task prints is kept back; its end is the error where it fails or takes longer than `limit_s`.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        child = os.fork()
        if child == 0:
            os.setsid()  # so that what it starts ends with it
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                try:
                    result.write_text(json.dumps({"about": about(), **task()}))
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                os._exit(0)
        stop = time.monotonic() + limit_s
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > stop:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return {"error": f"took longer than {limit_s:.0f} s"}
            time.sleep(0.02)
        return json.loads(result.read_text()) if result.exists() else {"error": log.read_text()[-1500:]}


def run_script(path: str, profiled: bool = True) -> dict[str, Any]:
    """Runs one script in this process as `python3 path` would, and returns what was measured."""
    import torch

    cpu_and_gpu = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profiler = torch.profiler.profile(activities=cpu_and_gpu, record_shapes=True)
    synchronize: Callable[..., None] = torch.cuda.synchronize
    median = statistics.median
    waits: list[float] = []
    times: list[float] = []

    def marked(*args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        synchronize(*args, **kwargs)
        waits.append(time.perf_counter() - begin)
        if profiled and len(waits) == PROFILED:
            profiler.start()
        elif profiled and len(waits) == PROFILED + 1:
            profiler.stop()

    def recorded(data: list[float]) -> float:
        times.extend(data)
        return median(data)

    torch.cuda.synchronize, statistics.median = marked, recorded
    began = time.perf_counter()
    runpy.run_path(path, run_name="__main__")
    clean = times[: PROFILED - FIRST - 1]
    return {
        "script": "/".join(Path(path).parts[-2:]),
        "step_s": median(clean),
        "steps_s": [round(t, 6) for t in clean],
        "wait_s": round(median(waits[FIRST : PROFILED - 1]), 6),  # of the host for the GPU, at the end of a step
        "peak": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "run_s": round(time.perf_counter() - began, 1),
        **(summary_of(profiler) if profiled else {}),
    }


def report(name: str, row: dict[str, Any]) -> None:
    """Prints a line; of a step that was not profiled, because it is kept apart, no numbers."""
    if "error" in row:
        print(name, "FAILED", row["error"], flush=True)
    elif "kernel_count" not in row:
        print(name, "measured in", row["run_s"], "s", flush=True)
    else:
        print(
            f"{name:30s} {1e3 * row['step_s']:8.2f} ms, waits {1e3 * row['wait_s']:7.2f} ms, "
            f"{row['peak'] / 2**30:6.2f} GiB, {row['kernel_count']} kernels, "
            f"busy {row['gpu_busy_us'] / 1e3:7.2f} ms, {row['run_s']} s",
            flush=True,
        )


def write(output: str, rows: list[dict[str, Any]]) -> None:
    """Writes the rows, and once what they were measured on."""
    machine = next((row["about"] for row in rows if "about" in row), None)
    kept = [{key: value for key, value in row.items() if key != "about"} for row in rows]
    Path(output).write_text(json.dumps({"about": machine, "results": kept}))


def main(output: str, seconds: str, which: str, *names: str) -> None:
    """Runs the scripts of a folder, or some of them, and writes what is there after each."""
    import transformers  # noqa: F401

    stop = time.monotonic() + float(seconds)
    found: list[dict[str, Any]] = []
    for path in sorted((HERE / "scripts" / which).glob("*.py")):
        if names and path.name not in names:
            continue
        task = functools.partial(run_script, str(path), which == "development")
        row = {"script": f"{which}/{path.name}", **forked(task, min(LIMIT_S, max(stop - time.monotonic(), 1.0)))}
        report(path.name, row)
        found.append(row)
        write(output, found)


def about() -> dict[str, str]:
    """The machine and the versions."""
    import torch
    import transformers

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "cpu": cpu, "torch": torch.__version__, "transformers": transformers.__version__}


if __name__ == "__main__":
    main(*sys.argv[1:])
