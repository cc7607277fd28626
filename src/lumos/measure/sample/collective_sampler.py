"""Collectives: how long the GPUs of this machine take to do something together, one process a GPU.

`bytes` is the whole tensor, as in lumos.program.collective: what is reduced, what everybody holds after gathering, what
one rank hands out to all. Every repetition starts when all ranks have arrived; the median of the repetitions counts,
and that of the slowest rank. Small messages come from a warm cache, as gradients do that were just computed.
"""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

from lumos.errors import OptionError

Row = dict[str, Any]
Call = Callable[[], object]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
SIZES = tuple(1 << power for power in range(10, 31))  # 1 KiB to 1 GiB

_WARM_UP = 3
_LEAD_CYCLES = 1_000_000  # about half a millisecond, in which the host gets ahead of the GPU
_PATIENCE = timedelta(minutes=3)  # with a rank that does not answer
_POLL_S = 0.1
_ELEMENT = 4  # bytes of fp32
_ERROR = re.compile(r"[\w.]+(Error|Exception): ")


def collective_rows(
    gpus: int, sizes: Iterable[int] = SIZES, only: frozenset[str] = frozenset(COLLECTIVES)
) -> list[Row]:
    """What to measure on so many GPUs: all of them, and every power of two below."""
    teams = sorted({gpus, *(1 << power for power in range(1, gpus.bit_length()) if 1 << power <= gpus)} - {0, 1})
    return [
        {"op": name, "bytes": size, "ranks": ranks}
        for ranks in teams
        for size in sizes
        for name in COLLECTIVES
        if name in only and (name != "p2p" or ranks == 2)
    ]


def measure_collectives(rows: list[Row], end: float = float("inf"), backend: str = "nccl") -> Iterator[Row]:
    """The rows with their times, as they come, until `end` on the monotonic clock."""
    for ranks, members in groupby(rows, key=lambda row: int(row["ranks"])):
        left = end - time.monotonic()
        if left > 0:
            yield from _measure_together(list(members), ranks, left, backend)


class _Team(NamedTuple):
    """What every process of a team is told."""

    rows: list[Row]
    ranks: int
    seconds: float
    backend: str
    meeting: str  # a file by which they find each other
    answers: Any  # a queue


def _measure_together(rows: list[Row], ranks: int, seconds: float, backend: str) -> Iterator[Row]:
    from torch import multiprocessing

    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        team = _Team(rows, ranks, seconds, backend, f"file://{folder}/meeting", answers)
        processes = multiprocessing.spawn(_take_part, (team,), nprocs=ranks, join=False)
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
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

    try:
        return bool(processes.join(timeout=_POLL_S))
    except (ProcessExitedException, ProcessRaisedException) as problem:
        told = str(problem).strip().splitlines()  # a traceback; hints may follow the error itself
        why = next((line for line in reversed(told) if _ERROR.match(line)), told[-1])[:200]
        raise OptionError(f"collectives of {ranks} ranks failed ({why}); leave them out: --no-collectives") from None


def _take_part(rank: int, team: _Team) -> None:
    """One process of a team: measure every row with the others; rank 0 answers."""
    import torch
    from torch import distributed

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started us ends us
    if team.backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        team.backend, init_method=team.meeting, rank=rank, world_size=team.ranks, timeout=_PATIENCE
    )
    member = _Member(rank, team)
    for row in team.rows:
        if member.time_is_up():
            break
        us = member.microseconds(row)
        if rank == 0:
            team.answers.put(row | {"us": round(us, 3)})
    distributed.destroy_process_group()


class _Member:
    """One rank: its tensors, its clock, and how it waits for the others."""

    def __init__(self, rank: int, team: _Team) -> None:
        import torch
        from torch import distributed

        self._torch, self._distributed = torch, distributed
        self._rank, self._ranks = rank, team.ranks
        self._end = time.monotonic() + team.seconds
        self._on_gpu = team.backend == "nccl"
        self._device = f"cuda:{rank}" if self._on_gpu else "cpu"
        self._here = self._tensor(1)

    def time_is_up(self) -> bool:
        """Whether to stop: rank 0 says it, because all must do the same."""
        flag = self._tensor(1).fill_(float(time.monotonic() > self._end))
        self._distributed.broadcast(flag, 0)
        return bool(flag.item())

    def microseconds(self, row: Row) -> float:
        """The median time of a row, on the slowest rank."""
        call = self._call(row["op"], row["bytes"] // _ELEMENT)
        for _ in range(_WARM_UP):
            call()
        times = [self._timed(call) for _ in range(_repetitions(row["bytes"]))]
        slowest = self._tensor(1).fill_(median(times))
        self._distributed.all_reduce(slowest, self._distributed.ReduceOp.MAX)
        return float(slowest.item())

    def _tensor(self, size: int) -> Any:
        return self._torch.zeros(size, device=self._device)

    def _call(self, name: str, size: int) -> Call:
        """The collective on a tensor of `size` numbers."""
        dist, part = self._distributed, max(1, size // self._ranks)
        if name == "all_reduce":
            whole = self._tensor(size)
            return lambda: dist.all_reduce(whole)
        if name == "p2p":
            return self._pass_on(self._tensor(size))
        whole, piece = self._tensor(part * self._ranks), self._tensor(part)
        if name == "all_gather":
            gather = _by_either_name(dist, "all_gather_single", "all_gather_into_tensor")
            return lambda: gather(whole, piece)
        if name == "reduce_scatter":
            scatter = _by_either_name(dist, "reduce_scatter_single", "reduce_scatter_tensor")
            return lambda: scatter(piece, whole)
        received = self._tensor(part * self._ranks)
        return lambda: dist.all_to_all_single(received, whole)

    def _pass_on(self, message: Any) -> Call:
        if self._rank == 0:
            return lambda: self._distributed.send(message, 1)
        return lambda: self._distributed.recv(message, 0)

    def _timed(self, call: Call) -> float:
        return self._timed_on_gpu(call) if self._on_gpu else self._timed_on_cpu(call)

    def _timed_on_gpu(self, call: Call) -> float:
        """Between two events; the sleep and the reduction before them are queued, so no launch is timed."""
        cuda = self._torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda._sleep(_LEAD_CYCLES)
        self._distributed.all_reduce(self._here)
        start.record()
        call()
        end.record()
        cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def _timed_on_cpu(self, call: Call) -> float:
        self._distributed.barrier()
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6


def _by_either_name(module: Any, new: str, old: str) -> Callable[[Any, Any], object]:
    """What torch calls differently from 2.13 on, where the old name warns."""
    function: Callable[[Any, Any], object] = getattr(module, new, None) or getattr(module, old)
    return function


def _repetitions(size: int) -> int:
    return 20 if size <= 16 << 20 else 10 if size <= 256 << 20 else 5
