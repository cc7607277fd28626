"""What a launch costs the host: how deep the launch queue is, and what the profiler adds to every call."""

from __future__ import annotations

import ctypes
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.profiler import record_function

from measure import STANDARD, SUFFIX, Options, Save, heat_gpu, profiled_steps, synchronize

Action = Callable[[], object]
Call = tuple[torch.cuda.Stream, Action]
LAUNCHES, SLEEP_MS, BLOCKED_NS, ROUNDS = 3000, 200.0, 1_000_000, 3
TRACED_LAUNCHES, TRACED_SLEEP_MS = 1200, 60.0


# --- how deep the queue is ---


def sleep_cycles_per_ms() -> float:
    """How many cycles of torch.cuda._sleep last a millisecond."""
    heat_gpu()
    cycles = 50_000_000
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return cycles / start.elapsed_time(end)


def cudart_memset(x: torch.Tensor) -> Action:
    """A call of cudaMemsetAsync on the current stream (zero_() launches a kernel instead)."""
    major = (torch.version.cuda or "").split(".")[0]
    memset = ctypes.CDLL(f"libcudart.so.{major}").cudaMemsetAsync  # of the copy that torch has loaded
    memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p]

    def call() -> None:
        status = memset(x.data_ptr(), 0, x.nbytes, torch.cuda.current_stream().cuda_stream)
        if status:
            raise RuntimeError(f"cudaMemsetAsync returned {status}")

    return call


def experiments() -> dict[str, Callable[[], list[Call]]]:
    """For each experiment the function that builds its calls; they are made in turn, over and over."""
    default, side, third = torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    one = torch.zeros(1, device="cuda")
    large, other = torch.zeros(1 << 18, device="cuda"), torch.zeros(1 << 18, device="cuda")
    square = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(square)
    hundred = [torch.zeros(1, device="cuda") for _ in range(100)]
    event = torch.cuda.Event()

    def kernel() -> None:
        one.add_(1)

    def wait() -> None:
        side.wait_event(event)

    return {
        "default": lambda: [(default, kernel)],
        "side": lambda: [(side, kernel)],
        "two_streams": lambda: [(side, kernel), (third, kernel)],
        "zero": lambda: [(default, large.zero_)],
        "memset": lambda: [(default, cudart_memset(large))],
        "copy": lambda: [(default, lambda: other.copy_(large))],
        "matmul": lambda: [(default, lambda: torch.mm(square, square, out=product))],
        "foreach": lambda: [(default, lambda: torch._foreach_add_(hundred, 1.0))],  # 4 KB of arguments a launch
        "event_record": lambda: [(default, event.record)],
        "kernel_record": lambda: [(default, kernel), (default, event.record)],
        "kernel_record_wait": lambda: [(default, kernel), (default, event.record), (side, wait), (side, kernel)],
    }


def call_times(calls: list[Call], count: int, cycles: int) -> list[int]:
    """Nanoseconds of each of `count` calls, made while a sleep occupies every stream they go to."""
    for stream in {stream for stream, _ in calls}:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
    nanoseconds = []
    for index in range(count):
        stream, call = calls[index % len(calls)]
        torch.cuda.set_stream(stream)
        start = time.perf_counter_ns()
        call()
        nanoseconds.append(time.perf_counter_ns() - start)
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()
    return nanoseconds


def blocked_calls(nanoseconds: list[int], calls_in_turn: int) -> dict[str, Any]:
    """Which calls waited for a place in the queue."""
    blocked = [index for index, duration in enumerate(nanoseconds) if duration > BLOCKED_NS]
    ordered = sorted(nanoseconds)
    return {
        "first_blocked": blocked[0] if blocked else None,
        "longest": nanoseconds.index(ordered[-1]),  # a full queue waits longer than a host that lost its core
        "blocked": len(blocked),
        "blocks": [{"index": i, "call": i % calls_in_turn, "ms": nanoseconds[i] / 1e6} for i in blocked[:20]],
        "median_us": statistics.median(nanoseconds) / 1e3,
        "p99_us": ordered[len(ordered) * 99 // 100] / 1e3,
        "total_ms": sum(nanoseconds) / 1e6,  # beyond sleep_ms nothing can block any more
    }


def measure_queue(build: Callable[[], list[Call]], cycles: int) -> dict[str, Any]:
    calls = build()
    call_times(calls, 50 * len(calls), cycles=1000)
    rounds = [blocked_calls(call_times(calls, LAUNCHES, cycles), len(calls)) for _ in range(ROUNDS)]
    return {"calls_in_turn": len(calls), "launches": LAUNCHES, "sleep_ms": SLEEP_MS, "rounds": rounds}


def run_queue(folder: Path, save: Save) -> None:
    """Hand what queue.json holds to `save`, as it grows, and record a trace of the first experiment."""
    per_ms = sleep_cycles_per_ms()
    record: dict[str, Any] = {"sleep_cycles_per_ms": per_ms, "experiments": {}}
    known = experiments()
    for name, build in known.items():
        try:
            record["experiments"][name] = measure_queue(build, int(SLEEP_MS * per_ms))
        except Exception:
            record["experiments"][name] = {"error": traceback.format_exc(limit=-3)}
        save(record)
    calls, cycles = known["default"](), int(TRACED_SLEEP_MS * per_ms)
    trace = folder / f"queue_default{SUFFIX}"
    record["traced"] = {"launches": TRACED_LAUNCHES, "sleep_ms": TRACED_SLEEP_MS, "trace": trace.name}
    record["traced"]["profiled_step_s"] = profiled_steps(lambda: call_times(calls, TRACED_LAUNCHES, cycles), trace)
    save(record)


# --- what the profiler adds to a call ---

MODES = {
    "off": None,
    "noshapes": Options(shapes=False, sync_events=False),
    "shapes": Options(sync_events=False),
    "shapes_syncevents": STANDARD,
    "off_again": None,
}
REPEATS, CALLS, CALLS_PER_SYNC = 5, 1000, 200
KERNELS, KERNEL_SLEEP_CYCLES = 500, 100_000_000


def host_loops(device: str) -> dict[str, Action]:
    """The calls whose time on the host is measured."""
    a, b, c = torch.ones(1), torch.ones(1), torch.ones(1)
    x, weight, bias = torch.ones(2, 4), torch.ones(4, 4), torch.ones(4)

    def scope() -> None:
        with record_function("scope"):
            pass

    loops: dict[str, Action] = {
        "nothing": lambda: None,
        "cpu_add": lambda: torch.add(a, b, out=c),
        "cpu_linear": lambda: functional.linear(x, weight, bias),
        "scope": scope,
    }
    if device == "cuda":
        one, event = torch.ones(1, device="cuda"), torch.cuda.Event()
        square = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
        side = torch.cuda.Stream()
        loops |= {
            "cuda_add": lambda: one.add_(1),
            "cuda_linear": lambda: functional.linear(square, square),
            "event_record": event.record,
            "wait_event": lambda: side.wait_event(event),
            "synchronize_idle": torch.cuda.synchronize,
        }
    return loops


def microseconds_per_call(call: Action, calls: int = CALLS) -> float:
    """Time of a call on the host; the device is let catch up in between, so that the queue never fills."""
    total = 0
    for _ in range(calls // CALLS_PER_SYNC):
        start = time.perf_counter_ns()
        for _ in range(CALLS_PER_SYNC):
            call()
        total += time.perf_counter_ns() - start
        synchronize()
    return total / calls / 1e3


def microseconds_per_kernel(kernel: Action) -> float:
    """Time of a kernel on the device, from start to start, when all of them wait behind a sleep."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(KERNEL_SLEEP_CYCLES)
    start.record()
    for _ in range(KERNELS):
        kernel()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / KERNELS


def repeated(measure: Callable[[Action], float], call: Action) -> dict[str, Any]:
    measure(call)
    values = [measure(call) for _ in range(REPEATS)]
    return {"us": values, "us_median": statistics.median(values)}


def gpu_kernels() -> dict[str, Action]:
    """Kernels of about 2, 20 and, as a spin of one block, 20 microseconds."""
    one, large = torch.ones(1, device="cuda"), torch.ones(11_000_000, device="cuda")
    return {
        "add_1": lambda: one.add_(1),
        "add_large": lambda: large.add_(1),
        "spin": lambda: torch.cuda._sleep(38_000),
    }


def run_micro(device: str, save: Save) -> None:
    """Hand what results.json holds under "micro" to `save`, as it grows."""
    if device == "cuda":
        heat_gpu()
    loops, kernels = host_loops(device), gpu_kernels() if device == "cuda" else {}
    record: dict[str, Any] = {"calls": CALLS, "kernels": KERNELS, "host_us_per_call": {}, "gpu_us_per_kernel": {}}
    for mode, options in MODES.items():
        with options.profiler() if options else nullcontext():
            record["host_us_per_call"][mode] = {
                name: repeated(microseconds_per_call, call) for name, call in loops.items()
            }
            record["gpu_us_per_kernel"][mode] = {
                name: repeated(microseconds_per_kernel, call) for name, call in kernels.items()
            }
        save(record)
