"""How long collectives take among the GPUs of this machine, with one process per GPU.

`bytes` is the whole tensor, as in lumos.program.operators: what is reduced, what every rank holds after a gather, what
one rank sends to all others. Every repetition starts when all ranks have arrived; the median of the slowest rank
counts. Small messages come from a warm cache, as gradients do that were just computed.
"""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, multiprocessing

from lumos.errors import OptionError

Row = dict[str, Any]
Call = Callable[[], object]

_WARM_UP = 3
_LEAD_CYCLES = 1_000_000  # about half a millisecond, in which the host gets ahead of the GPU
_TIMEOUT = timedelta(minutes=3)  # for a rank that does not answer
_POLL_S = 0.1
_ELEMENT = 4  # bytes of fp32
_ERROR = re.compile(r"[\w.]+(Error|Exception): ")


def measure_collectives(rows: list[Row], end: float = float("inf"), backend: str = "nccl") -> Iterator[Row]:
    """The rows with their times, as they are measured, until `end` on the monotonic clock."""
    for ranks, members in groupby(rows, key=lambda row: int(row["ranks"])):
        left = end - time.monotonic()
        if left > 0:
            yield from _measure_group(list(members), ranks, left, backend)


class _Group(NamedTuple):
    """What every process of a group needs to know."""

    rows: list[Row]
    ranks: int
    seconds: float
    backend: str
    init_method: str  # a file by which the processes find each other
    answers: Any  # a queue


def _measure_group(rows: list[Row], ranks: int, seconds: float, backend: str) -> Iterator[Row]:
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        group = _Group(rows, ranks, seconds, backend, f"file://{folder}/meeting", answers)
        processes = multiprocessing.spawn(_run_rank, (group,), nprocs=ranks, join=False)
        try:
            finished = False
            while not finished:
                finished = _has_finished(processes, ranks)
                while not answers.empty():
                    yield answers.get()
        finally:
            for process in processes.processes:
                process.terminate()


def _has_finished(processes: Any, ranks: int) -> bool:
    try:
        return bool(processes.join(timeout=_POLL_S))
    except (multiprocessing.ProcessExitedException, multiprocessing.ProcessRaisedException) as problem:
        lines = str(problem).strip().splitlines()  # a traceback; hints may follow the error itself
        why = next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])[:200]
        raise OptionError(f"collectives of {ranks} ranks failed ({why}); leave them out: --no-collectives") from None


def _run_rank(rank: int, group: _Group) -> None:
    """One process of a group: measure every row together with the others; rank 0 reports."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    if group.backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        group.backend, init_method=group.init_method, rank=rank, world_size=group.ranks, timeout=_TIMEOUT
    )
    member = _Rank(rank, group)
    for row in group.rows:
        if member.time_is_up():
            break
        us = member.microseconds(row)
        if rank == 0:
            group.answers.put(row | {"us": round(us, 3)})
    distributed.destroy_process_group()


class _Rank:
    """One rank: its tensors, its clock, and how it waits for the others."""

    def __init__(self, rank: int, group: _Group) -> None:
        self._rank, self._ranks = rank, group.ranks
        self._end = time.monotonic() + group.seconds
        self._on_gpu = group.backend == "nccl"
        self._device = f"cuda:{rank}" if self._on_gpu else "cpu"
        self._barrier = self._tensor(1)

    def time_is_up(self) -> bool:
        """Whether to stop: rank 0 decides, because all ranks must do the same."""
        flag = self._tensor(1).fill_(float(time.monotonic() > self._end))
        distributed.broadcast(flag, 0)
        return bool(flag.item())

    def microseconds(self, row: Row) -> float:
        """The median time of a row, on the slowest rank."""
        call, size = self._call(row["op"], row["bytes"] // _ELEMENT), row["bytes"]
        for _ in range(_WARM_UP):
            call()
        repetitions = 20 if size <= 16 << 20 else 10 if size <= 256 << 20 else 5
        timed = self._timed_on_gpu if self._on_gpu else self._timed_on_cpu
        slowest = self._tensor(1).fill_(median(timed(call) for _ in range(repetitions)))
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
        return float(slowest.item())

    def _tensor(self, size: int) -> Tensor:
        return torch.zeros(size, device=self._device)

    def _call(self, name: str, size: int) -> Call:
        """The collective on a tensor of `size` elements."""
        dist, part = distributed, max(1, size // self._ranks)
        if name in ("all_reduce", "p2p"):
            whole = self._tensor(size)
            if name == "all_reduce":
                return lambda: dist.all_reduce(whole)
            return (lambda: dist.send(whole, 1)) if self._rank == 0 else (lambda: dist.recv(whole, 0))
        whole, shard = self._tensor(part * self._ranks), self._tensor(part)
        if name == "all_gather":  # torch renamed these in 2.13, and warns of the old names
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return lambda: gather(whole, shard)
        if name == "reduce_scatter":
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            return lambda: scatter(shard, whole)
        received = self._tensor(part * self._ranks)
        return lambda: dist.all_to_all_single(received, whole)

    def _timed_on_gpu(self, call: Call) -> float:
        """Between two events; the sleep and the reduction before them are queued, so that no launch is timed."""
        cuda = torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda._sleep(_LEAD_CYCLES)
        distributed.all_reduce(self._barrier)
        start.record()
        call()
        end.record()
        cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def _timed_on_cpu(self, call: Call) -> float:
        distributed.barrier()
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6
