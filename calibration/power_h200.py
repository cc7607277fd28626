"""What one GPU draws: idle, in steady loops of single operators, at several duty cycles, and in launch-bound training.

PYTHONPATH=src python3 calibration/power_h200.py OUTPUT.jsonl SECONDS

Needs torch, triton and transformers. Another process reads the board's energy counter all the while, so that polling
costs the loops nothing; clocks and power limits are left as they are. Rows that fail are printed and left out.
"""

from __future__ import annotations

import bisect
import ctypes
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any

WARM_S, MEASURED_S, STEPS_S = 0.5, 1.2, 2.5
GRAPH_US = 20_000.0  # of work in one CUDA graph: the host has time to launch the next

Row = dict[str, Any]
Call = Callable[[], object]


class Board:
    """The board's own counters, read through the driver's library."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        self.handle = ctypes.c_void_p()
        self.library.nvmlInit_v2()
        self.library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.handle))

    def millijoules(self) -> int:
        value = ctypes.c_ulonglong()
        self.library.nvmlDeviceGetTotalEnergyConsumption(self.handle, ctypes.byref(value))
        return value.value

    def clock_mhz(self) -> int:
        value = ctypes.c_uint()
        self.library.nvmlDeviceGetClockInfo(self.handle, 1, ctypes.byref(value))  # 1: the multiprocessors'
        return value.value

    def limit_w(self) -> float:
        value = ctypes.c_uint()
        self.library.nvmlDeviceGetEnforcedPowerLimit(self.handle, ctypes.byref(value))
        return value.value / 1e3


def watch(pipe: Connection) -> None:
    """Until told to stop: (seconds, millijoules, clock) whenever the counter has moved."""
    board, found, last = Board(), [], -1
    while not pipe.poll():
        now, energy = time.monotonic(), board.millijoules()
        if energy != last:
            found.append((now, energy, board.clock_mhz()))
            last = energy
        time.sleep(0.002)
    pipe.send(found)


class Recorder:
    """Windows of time by name, and the energy of each once the watch has ended."""

    def __init__(self) -> None:
        self.pipe, other = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=watch, args=(other,), daemon=True)
        self.process.start()
        self.windows: list[tuple[float, float, Row]] = []

    def window(self, begin: float, end: float, row: Row) -> None:
        self.windows.append((begin, end, row))
        print(f"{row['name']}: {row.get('us', 0):.1f} us a call, {end - begin:.2f} s", flush=True)

    def rows(self) -> Iterator[Row]:
        """Every window, with joules read off between the counter's ticks."""
        self.pipe.send("stop")
        seen = self.pipe.recv()
        times = [time for time, _, _ in seen]
        for begin, end, row in self.windows:
            first, last = bisect.bisect_left(times, begin), bisect.bisect_right(times, end) - 1
            if last - first < 3:
                print(f"{row['name']}: too few readings", flush=True)
                continue
            watts = (seen[last][1] - seen[first][1]) / 1e3 / (times[last] - times[first])
            clock = mean(clock for _, _, clock in seen[first : last + 1])
            yield row | {"watts": watts, "clock_mhz": round(clock), "seconds": end - begin}


# ---------------------------------------------------------------------- loops
def steady(recorder: Recorder, row: Row, call: Call, repeats: int, seconds: float = MEASURED_S) -> None:
    """Calls back to back, never more than two ahead of the GPU; `repeats` operators run in one call."""
    import torch

    ends = [torch.cuda.Event(), torch.cuda.Event()]

    def run(until: float) -> int:
        count = 0
        while time.monotonic() < until:
            ends[count % 2].synchronize()
            call()
            ends[count % 2].record()
            count += 1
        torch.cuda.synchronize()
        return count

    run(time.monotonic() + WARM_S)
    begin = time.monotonic()
    count = run(begin + seconds)
    end = time.monotonic()
    recorder.window(begin, end, row | {"us": (end - begin) / (count * repeats) * 1e6})


def graph_of(calls: list[Call]) -> tuple[Call, int]:
    """The calls in turn as one CUDA graph, and how many it holds."""
    import torch

    for call in calls * 3:
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for call in calls:
        call()
    torch.cuda.synchronize()
    us = (time.perf_counter() - began) * 1e6 / len(calls)
    rounds = max(1, min(200, round(GRAPH_US / us / len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph.replay, rounds * len(calls)


def operator_row(recorder: Recorder, row: Row) -> None:
    """One operator in a steady loop; cold operands take turns."""
    from lumos.measure.time_operators import prepare

    calls = [prepare(row, "cuda") for _ in range(row.get("copies", 1))]
    if row["op"] == "adamw_fused":  # keeps its count of steps on the host's side: no graph
        steady(recorder, row, calls[0], 1)
        return
    call, repeats = graph_of(calls)
    steady(recorder, row, call, repeats)


def paced(recorder: Recorder, row: Row, call: Call) -> None:
    """One call every `period_us`: the GPU waits for its host in between."""
    import torch

    period = row["period_us"] / 1e6

    def run(seconds: float) -> int:
        count, began = 0, time.perf_counter()
        while (now := time.perf_counter() - began) < seconds:
            if now >= count * period:
                call()
                count += 1
        torch.cuda.synchronize()
        return count

    run(WARM_S)
    begin = time.monotonic()
    count = run(MEASURED_S)
    end = time.monotonic()
    recorder.window(begin, end, row | {"us": (end - begin) / count * 1e6})


# ---------------------------------------------------------------------- what is measured
def gemm(m: int, n: int, k: int, dtype: str = "bf16", copies: int = 1) -> Row:
    name = f"gemm_{m}_{n}_{k}_{dtype}" + ("_cold" if copies > 1 else "")
    return {"name": name, "op": "gemm", "m": m, "n": n, "k": k, "layout": "TN", "dtype": dtype, "copies": copies}


def attention(op: str, b: int, h: int, s: int, d: int) -> Row:
    return {"name": f"{op}_{b}_{h}_{s}_{d}", "op": op, "b": b, "h": h, "s": s, "d": d, "dtype": "bf16"}


def plane(op: str, t: int, h: int, dtype: str = "bf16", copies: int = 1) -> Row:
    name = f"{op}_{t}_{h}" + ("_cold" if copies > 1 else "")
    return {"name": name, "op": op, "t": t, "h": h, "dtype": dtype, "copies": copies}


OPERATOR_ROWS = [
    gemm(8192, 8192, 8192), gemm(8192, 4096, 4096), gemm(4096, 2048, 2048), gemm(4096, 5632, 2048),
    gemm(2048, 2048, 2048), gemm(2048, 1024, 1024), gemm(1024, 1024, 1024), gemm(512, 512, 512),
    gemm(4096, 2048, 2048, copies=10), gemm(2048, 1024, 1024, copies=30), gemm(1024, 1024, 1024, copies=40),
    gemm(256, 4096, 4096, copies=7), gemm(4096, 32000, 2048),
    gemm(8192, 8192, 8192, "fp8"), gemm(4096, 4096, 4096, "fp8"), gemm(4096, 4096, 4096, "tf32"),
    gemm(4096, 4096, 4096, "fp32"), gemm(4096, 4096, 4096, "fp16"),
    attention("sdpa_fwd", 2, 16, 2048, 128), attention("sdpa_fwd", 1, 16, 8192, 128),
    attention("sdpa_fwd", 1, 16, 1024, 64), attention("sdpa_bwd", 2, 16, 2048, 128),
    attention("sdpa_bwd", 1, 16, 8192, 128),
    plane("copy", 65536, 4096), plane("add", 65536, 4096), plane("mul", 4096, 2048), plane("add", 1024, 1024),
    plane("add", 4096, 2048, copies=5), plane("cast_f32", 65536, 4096), plane("silu", 65536, 4096),
    plane("gelu", 65536, 4096), plane("norm_eager_fwd", 4096, 2048), plane("norm_eager_fwd", 65536, 4096),
    plane("rms_norm", 65536, 4096), plane("norm_eager_bwd", 16384, 4096),
    attention("rotary_fwd", 2, 16, 2048, 128), attention("rotary_fwd", 16, 32, 4096, 128),
    {"name": "cross_entropy_4096_32000", "op": "cross_entropy", "t": 4096, "v": 32000, "dtype": "fp32"},
    {"name": "adamw_fused_400M", "op": "adamw_fused", "n": 400_000_000, "dtype": "bf16"},
    {"name": "adamw_fused_400M_fp32", "op": "adamw_fused", "n": 400_000_000, "dtype": "fp32"},
]  # fmt: skip
PACED = [  # an operator, and every how many microseconds
    (plane("add", 128, 512), 1000), (plane("add", 128, 512), 100), (plane("add", 128, 512), 30),
    (plane("add", 128, 512), 12), (gemm(4096, 2048, 2048), 60), (gemm(4096, 2048, 2048), 100),
    (gemm(4096, 2048, 2048), 200), (gemm(4096, 2048, 2048), 400), (gemm(1024, 1024, 1024), 30),
    (plane("add", 4096, 4096), 60), (plane("add", 4096, 4096), 150),
]  # fmt: skip
STEPS = [  # layers, hidden, ffn, heads, vocab, seq, micro-batch; then what differs
    ("tiny_l4_h512", "llama", (4, 512, 1408, 8, 16000, 512, 1), {}),
    ("l8_h1024_s1024_b2", "llama", (8, 1024, 2816, 16, 32000, 1024, 2), {}),
    ("l8_h1536_s1024_b2", "llama", (8, 1536, 4096, 12, 32000, 1024, 2), {}),
    ("l6_h2048_s512_b2", "llama", (6, 2048, 5632, 16, 32000, 512, 2), {}),
    ("l6_h1280_s1024_b3", "llama", (6, 1280, 3456, 10, 50304, 1024, 3), {}),
    ("l12_h1024_s2048_b2", "llama", (12, 1024, 2816, 16, 32000, 2048, 2), {}),
    ("gpt2_l12_h768_s512_b4", "gpt2", (12, 768, 3072, 12, 50304, 512, 4), {}),
    ("gpt2_l8_h1024_s1024_b2", "gpt2", (8, 1024, 4096, 16, 50304, 1024, 2), {}),
    ("l8_h1024_s1024_b4_ckpt", "llama", (8, 1024, 2816, 16, 32000, 1024, 4), {"checkpoint": True}),
    ("l6_h1024_s1024_b2_accum3", "llama", (6, 1024, 2816, 16, 16000, 1024, 2), {"accum": 3}),
    ("l4_h2560_s1024_b1", "llama", (4, 2560, 6912, 20, 32000, 1024, 1), {}),
    ("l6_h4096_s512_b1", "llama", (6, 4096, 11008, 32, 32000, 512, 1), {}),
    ("gpt2_l6_h1600_s1024_b3", "gpt2", (6, 1600, 6400, 25, 50304, 1024, 3), {}),
    ("l8_h2048_s1024_b3", "llama", (8, 2048, 5632, 16, 32000, 1024, 3), {}),
    ("l8_h2048_s2048_b2", "llama", (8, 2048, 5632, 16, 32000, 2048, 2), {}),
]  # fmt: skip


def few_programs(recorder: Recorder) -> None:
    """Kernels on a few multiprocessors, as those of collectives: spinning, and copying."""
    import torch
    import triton

    from power_kernels import copying, spinning

    x, y = (torch.randn(1 << 28, device="cuda") for _ in range(2))
    for programs in (8, 24, 132):
        call, repeats = graph_of([lambda p=programs: spinning[(p,)](y, 20_000)])
        steady(recorder, {"name": f"spin_{programs}", "op": "spin", "programs": programs}, call, repeats)
    for programs in (8, 24, 132):
        elements = min(x.numel(), programs << 21)
        call, repeats = graph_of(
            [lambda p=programs, n=elements: copying[(p,)](x, y, n, triton.cdiv(n, p), block=4096, num_warps=16)]
        )
        row = {"name": f"copy_{programs}", "op": "few_copy", "programs": programs, "bytes": 8 * elements}
        steady(recorder, row, call, repeats)


def train(recorder: Recorder, name: str, kind: str, sizes: tuple[int, ...], how: dict[str, Any]) -> None:
    """Training steps, each followed by a synchronisation; what calibration/steps_h200.py does, in one process."""
    import torch

    from models import Shape, build_model
    from single import Case, training_step

    case = Case(name, kind, Shape(*sizes), **how)
    model = build_model(case.kind, case.shape, "cuda")
    if case.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    step = training_step(case, model, "cuda")
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    seconds: list[float] = []
    begin = time.monotonic()
    while time.monotonic() - begin < STEPS_S:
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    end = time.monotonic()
    fields = asdict(case)
    fields |= fields.pop("shape")
    kept = ("kind", "layers", "hidden", "ffn", "heads", "kv", "vocab", "seq", "mbs", "accum", "checkpoint", "compile",
            "optimizer")  # fmt: skip
    row = {"name": name, "op": "step", **{key: fields[key] for key in kept}, "step_s_median": median(seconds),
           "steps": len(seconds), "us": (end - begin) / len(seconds) * 1e6}  # fmt: skip
    recorder.window(begin, end, row)


def attempts(recorder: Recorder) -> Iterator[tuple[str, Call]]:
    """Everything to be measured, by name."""
    from lumos.measure.time_operators import prepare

    def calm(name: str, seconds: float) -> None:
        time.sleep(seconds)
        recorder.window(time.monotonic() - 1.0, time.monotonic(), {"name": name, "op": "idle"})

    yield "idle with a context", lambda: calm("idle_context", 2.5)
    yield "few programs", lambda: few_programs(recorder)
    for name, kind, sizes, how in STEPS:
        yield name, lambda n=name, k=kind, s=sizes, h=how: train(recorder, n, k, s, h)
    for row, period in PACED:
        whole = row | {"name": f"{row['name']}_every_{period}", "period_us": period}
        yield whole["name"], lambda r=whole: paced(recorder, r, prepare(r, "cuda"))
    for row in OPERATOR_ROWS:
        yield row["name"], lambda r=row: operator_row(recorder, r)
    yield "idle after work", lambda: calm("idle_after", 3.0)


def main(output: str, seconds: str) -> None:
    end = time.monotonic() + float(seconds)
    recorder = Recorder()
    time.sleep(3.0)
    recorder.window(time.monotonic() - 1.5, time.monotonic(), {"name": "idle_no_context", "op": "idle"})
    import torch

    torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured, and gradients run where values did
    torch.randn(1 << 20, device="cuda").sum().item()
    for name, attempt in attempts(recorder):
        if time.monotonic() > end:
            print(f"{name}: no time left", flush=True)
            break
        try:
            attempt()
        except Exception as error:  # one row that fails must not cost the others
            print(f"{name}: {type(error).__name__} {str(error)[:150]}", flush=True)
        torch.cuda.empty_cache()
    found = list(recorder.rows())
    limit = Board().limit_w()
    Path(output).write_text("".join(json.dumps(row | {"limit_w": limit}) + "\n" for row in found))
    for row in found:
        print(f"{row['name']:40s} {row['watts']:7.1f} W {row['clock_mhz']:5d} MHz {row.get('us', 0):12.1f} us")


if __name__ == "__main__":
    main(*sys.argv[1:])
