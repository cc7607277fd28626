"""What the GPU's board draws while one operator runs in a loop.

The board's counter of energy moves every 20 to 100 ms; a thread notes when, and power is taken between the first and
the last movement of a loop. Boards without such a counter report their power instead, which is averaged.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import mean
from typing import Any

import torch

from lumos.measure.machine import Board
from lumos.measure.time_operators import error_of, prepare

Row = dict[str, Any]
Call = Callable[[], object]

WARM_S, MEASURED_S, SETTLE_S = 0.45, 1.05, 2.0
_POLL_S = 0.004
_SPIN_CYCLES = 1_000_000
_CAPTURED = 200  # short calls in one CUDA graph
NO_COUNTER = "neither NVML nor nvidia-smi tells the power of this GPU"


class Wattmeter:
    """Reads power beside the work of another thread."""

    def __init__(self) -> None:
        self._board = Board.of_this_gpu()
        self._readings: list[tuple[float, float]] = []  # (seconds, joules since the first) or (seconds, watts)
        self._clocks: list[float] = []
        self._counts = self._board is not None and self._board.joules() is not None
        self._watts = self._board.watts if self._board is not None and self._board.watts() is not None else _smi_watts

    def works(self) -> bool:
        return self._counts or self._watts() is not None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read until the end of the block; `answer` has what was read."""
        self._readings, self._clocks = [], []
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def answer(self) -> Row:
        """{"watts": …, "clock_mhz": …}; nothing where too little was read."""
        if len(self._readings) < 3:
            return {}
        if self._counts:
            (begin, first), (end, last) = self._readings[1], self._readings[-1]  # the first was not seen to move
            watts = (last - first) / (end - begin) if end > begin else 0.0
        else:
            watts = mean(value for _, value in self._readings)
        clock = {"clock_mhz": round(mean(self._clocks))} if self._clocks else {}
        return {"watts": round(watts, 2)} | clock

    def _watch(self, done: threading.Event) -> None:
        while not done.is_set():
            value = self._board.joules() if self._counts and self._board is not None else self._watts()
            moved = not self._counts or not self._readings or value != self._readings[-1][1]
            if value is not None and moved:
                self._readings.append((time.perf_counter(), value))
                if self._board is not None:
                    self._clocks.append(self._board.clock_mhz())
            done.wait(_POLL_S)


def _smi_watts() -> float | None:
    """By NVIDIA's command, which takes about 50 ms."""
    command = ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        return float(said.splitlines()[min(torch.cuda.current_device(), len(said.splitlines()) - 1)])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def measured_power(row: Row, meter: Wattmeter) -> Row:
    """What the board draws in the loop of a row, and how long one call of it takes."""
    if not meter.works():
        return {"error": NO_COUNTER}
    try:
        if row["what"] == "idle":
            torch.cuda.synchronize()
            time.sleep(SETTLE_S)  # after work a board takes seconds to come to rest
            with meter.reading():
                time.sleep(MEASURED_S)
            return meter.answer() or {"error": NO_COUNTER}
        call = _call_of(row)
        _loop(call, WARM_S)
        with meter.reading():
            us = _loop(call, MEASURED_S) / (_CAPTURED if row["what"] == "cache" else 1)
    except (RuntimeError, AttributeError, ValueError) as problem:
        return {"error": error_of(problem)}
    finally:
        torch.cuda.empty_cache()
    found = meter.answer()
    return {"us": round(us, 3)} | found if found else {"error": NO_COUNTER}


def _call_of(row: Row) -> Call:
    if row["operator"] == "spin":  # one multiprocessor, as busy as it can be without touching memory
        return lambda: torch.cuda._sleep(_SPIN_CYCLES)
    call = prepare(row | {"op": row["operator"]}, "cuda")
    return _captured(call) if row["what"] == "cache" else call


def _captured(call: Call) -> Call:
    """Many calls as one CUDA graph, replayed: the host cannot launch such short kernels back to back."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CAPTURED):
            call()
    replay: Call = graph.replay
    return replay


def _loop(call: Call, seconds: float) -> float:
    """Microseconds of a call, back to back; the host is never more than two batches ahead of the GPU."""
    ends = [torch.cuda.Event(), torch.cuda.Event()]
    count, batch, begin = 0, 8, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        ends[count % 2].synchronize()
        for _ in range(batch):
            call()
        ends[count % 2].record()
        count += 1
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6 / (count * batch)
