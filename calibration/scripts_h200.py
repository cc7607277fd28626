"""Runs the training scripts of calibration/scripts on one GPU, unchanged: clean steps, peak memory, GPU time.

    python3 calibration/scripts_h200.py OUT.json SECONDS development|blind

Each script is a process of its own, started through `runpy` with two functions wrapped: `torch.cuda.synchronize`, which
every script calls once at the end of a step, marks the steps, and `statistics.median`, which it calls last, is handed
the times of its steps. One late step runs under the profiler and is left out of the clean steps. The scripts under
`development` may be looked at to improve predictions; the results of those under `blind` are kept apart from fitting.
"""

from __future__ import annotations

import json
import runpy
import statistics
import subprocess
import sys
import time
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


def run_script(path: str) -> dict[str, Any]:
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
        if len(waits) == PROFILED:
            profiler.start()
        elif len(waits) == PROFILED + 1:
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
        **summary_of(profiler),
    }


def main(output: str, seconds: str, which: str) -> None:
    """Runs all scripts of a folder, one process each, and writes what is there after each."""
    stop = time.monotonic() + float(seconds)
    found: list[dict[str, Any]] = []
    for path in sorted((HERE / "scripts" / which).glob("*.py")):
        left = stop - time.monotonic()
        part = Path(output).with_suffix(".part")
        part.unlink(missing_ok=True)
        command = [sys.executable, __file__, "--one", str(path), str(part)]
        try:
            done = subprocess.run(command, timeout=min(LIMIT_S, max(left, 1.0)), capture_output=True, text=True)
            error = "" if done.returncode == 0 else done.stderr[-1500:]
        except subprocess.TimeoutExpired:
            error = f"ran past its time ({left:.0f} s were left for all)"
        row = json.loads(part.read_text()) if part.exists() else {"script": f"{which}/{path.name}", "error": error}
        part.unlink(missing_ok=True)
        found.append(row)
        if "error" in row:
            print(row["script"], "FAILED", row["error"], flush=True)
        elif which == "blind":
            print(row["script"], "measured", row["run_s"], "s", flush=True)
        else:
            print(
                f"{row['script']:42s} {1e3 * row['step_s']:8.2f} ms, waits {1e3 * row['wait_s']:7.2f} ms, "
                f"{row['peak'] / 2**30:6.2f} GiB, {row['kernel_count']} kernels, "
                f"busy {row['gpu_busy_us'] / 1e3:7.2f} ms, {row['run_s']} s",
                flush=True,
            )
        Path(output).write_text(json.dumps({"about": about(), "results": found}))


def about() -> dict[str, str]:
    """The machine and the versions."""
    import torch
    import transformers

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "cpu": cpu, "torch": torch.__version__, "transformers": transformers.__version__}


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        Path(sys.argv[3]).write_text(json.dumps(run_script(sys.argv[2])))
    else:
        main(*sys.argv[1:])
