"""What torch.profiler costs the run that it records.

| what | microseconds |
|---|---|
| operator | more for one operator without a kernel, while it is recorded with its shapes |
| call | more for one call of CUDA's runtime, such as a launch |
| kernel | more from the start of one kernel to the start of the next, back to back |
| step_fresh | a launch-bound training step in a process that was never profiled |
| step_recorded, step_recorded_no_shapes | the same while it is recorded, with and without shapes |
| step_stopped | the same after the profiler has stopped; CUPTI stays attached and goes on costing |

All in a process of its own, so that the process that samples stays as fast as it was.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from lumos.safe_path import safe_path

Row = dict[str, Any]
Call = Callable[[], object]

_TURNS, _ROUNDS, _CALLS, _STEPS, _KERNELS = 2, 5, 200, 10, 300
_SLEEP_CYCLES = 60_000_000  # about 30 ms, in which the host queues all kernels
_LONGEST_S = 120.0


def measured_profiler(rows: list[Row], model: Row, device: str) -> list[Row]:
    """The rows with their times; `model` has the sizes of the decoder whose steps are recorded."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_measure, args=(there, model, device), daemon=True)
    with safe_path():
        process.start()
    there.close()
    try:
        found = here.recv() if here.poll(_LONGEST_S) else "took too long"
    except EOFError:
        found = "the process that was profiled died"
    process.join(timeout=5.0)
    process.terminate()
    if isinstance(found, str):
        return [row | {"error": found} for row in rows]
    return [row | ({"us": round(found[row["what"]], 3)} if row["what"] in found else {"error": "none"}) for row in rows]


def _measure(pipe: Connection, model: Row, device: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    warnings.simplefilter("ignore")  # torch's, about events that are thrown away here
    try:
        pipe.send(_all(model, device))
    except (RuntimeError, AttributeError, ValueError, ImportError) as problem:
        pipe.send((str(problem).splitlines() or [type(problem).__name__])[0][:120])


def _all(model: Row, device: str) -> dict[str, float]:
    from lumos.measure.time_steps import TrainingStep

    step = TrainingStep(model, device)
    _step_us(step)
    found = {"step_fresh": _step_us(step)}
    before = during = _micro(device)
    recorded: dict[bool, list[float]] = {True: [], False: []}
    for shapes in (True, False) * _TURNS:  # in turns: the host is not always equally fast
        with _profiler(device, shapes):
            recorded[shapes].append(_step_us(step))
            during = _micro(device) if shapes else during
    found |= {"step_recorded": median(recorded[True]), "step_recorded_no_shapes": median(recorded[False])}
    found["step_stopped"] = _step_us(step)
    more = {name: max(0.0, during[name] - before[name]) for name in before}
    if "launch" in more:  # an operator and the call in it
        more["call"] = max(0.0, more.pop("launch") - more["operator"])
    return found | more


def _profiler(device: str, shapes: bool) -> AbstractContextManager[Any]:
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    recording: AbstractContextManager[Any] = profile(activities=kinds, record_shapes=shapes)
    return recording


def _step_us(step: Any) -> float:
    times = []
    for _ in range(_STEPS):
        step.wait()
        begin = time.perf_counter()
        step()
        step.wait()
        times.append((time.perf_counter() - begin) * 1e6)
    return median(times[2:])


def _micro(device: str) -> dict[str, float]:
    """Microseconds of one operator, of one that launches a kernel, and from kernel to kernel, as things are now."""
    import torch

    one, two, out = (torch.ones(1) for _ in range(3))
    found = {"operator": _call_us(lambda: torch.add(one, two, out=out))}
    if device == "cuda":
        small = torch.ones(1, device="cuda")
        found |= {"launch": _call_us(lambda: small.add_(1)), "kernel": _kernel_us(lambda: small.add_(1))}
        torch.cuda.synchronize()
    return found


def _call_us(call: Call) -> float:
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        times.append((time.perf_counter() - begin) * 1e6 / _CALLS)
    return median(times)


def _kernel_us(call: Call) -> float:
    """From start to start, when all kernels wait behind a sleep."""
    import torch

    times = []
    for _ in range(_ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_SLEEP_CYCLES)
        start.record()
        for _ in range(_KERNELS):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3 / _KERNELS)
    return median(times)
