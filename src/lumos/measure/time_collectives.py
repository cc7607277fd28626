"""How long collectives take among the GPUs of a node or of several, with one process per GPU.

`bytes` is the whole tensor, as in lumos.program.operators: what is reduced, what every rank holds after a gather, what
one rank sends to all others. Every repetition starts when all ranks have arrived, also those of other groups that do
the same at that moment; the median of the slowest rank counts. Small messages come from a warm cache, as gradients do
that were just computed. On CPUs gloo takes the place of NCCL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed

from lumos.measure.ranks import Team
from lumos.measure.sample_grid import layout_of
from lumos.measure.time_operators import error_of

Row = dict[str, Any]
Call = Callable[[], object]

_WARM_UP = 3
_LEAD_CYCLES = 1_000_000  # about half a millisecond, in which the host gets ahead of the GPU
_ELEMENT = 4  # bytes of fp32


def measure_collectives(rows: list[Row], team: Team, end: float = float("inf")) -> Iterator[Row]:
    """The rows of one layout with their times, until `end` on the clock of rank 0; every rank calls this."""
    groups = layout_of(rows[0]).members(team.nodes, team.per_node)
    together = _Groups(groups, team)
    try:
        for row in rows:
            if team.shared(time.monotonic() > end):
                return
            yield row | together.measured(row)
    finally:
        together.close()


class _Groups:
    """The groups of a layout as this rank sees them: its own, if it is in one, and that of all ranks at work."""

    def __init__(self, groups: list[list[int]], team: Team) -> None:
        self._team, backend = team, "nccl" if team.device == "cuda" else "gloo"
        self._device = f"cuda:{torch.cuda.current_device()}" if team.device == "cuda" else "cpu"
        self._members: list[int] = next((group for group in groups if team.rank in group), [])
        handles = [distributed.new_group(group, backend=backend) for group in groups]
        busy = sorted(rank for group in groups for rank in group)
        self._everyone = handles[0] if len(groups) == 1 else distributed.new_group(busy, backend=backend)
        self._handles = handles if len(groups) == 1 else [*handles, self._everyone]
        self._group = handles[groups.index(self._members)] if self._members else None
        self._barrier = torch.zeros(1, device=self._device)

    def close(self) -> None:
        for handle in self._handles:
            if handle is not distributed.GroupMember.NON_GROUP_MEMBER:
                distributed.destroy_process_group(handle)

    def measured(self, row: Row) -> Row:
        """{"us": …} of the slowest rank; {"error": …} where any rank has no room for the tensors."""
        call, problem = self._prepared(row)
        problems = [found for found in self._team.gathered(problem) if found]
        if problems:
            return {"error": problems[0]}
        slowest = max(self._team.gathered(self._microseconds(row, call) if call is not None else 0.0))
        return {"us": round(slowest, 3)}

    def _prepared(self, row: Row) -> tuple[Call | None, str]:
        """The call, or why there is none; nothing of both on ranks that are in no group."""
        if self._group is None:
            return None, ""
        try:
            return self._call(row["op"], row["bytes"] // _ELEMENT), ""
        except RuntimeError as problem:
            return None, error_of(problem)

    def _microseconds(self, row: Row, call: Call) -> float:
        for _ in range(_WARM_UP):
            call()
        repetitions = 20 if row["bytes"] <= 16 << 20 else 10 if row["bytes"] <= 256 << 20 else 5
        timed = self._timed_on_gpu if self._team.device == "cuda" else self._timed_on_cpu
        return median(timed(call) for _ in range(repetitions))

    def _tensor(self, size: int) -> Tensor:
        return torch.zeros(size, device=self._device)

    def _call(self, name: str, size: int) -> Call:
        """The collective on a tensor of `size` elements."""
        dist, group, ranks = distributed, self._group, len(self._members)
        part = max(1, size // ranks)
        if name in ("all_reduce", "p2p"):
            whole = self._tensor(size)
            if name == "all_reduce":
                return lambda: dist.all_reduce(whole, group=group)
            sender, receiver = self._members
            if self._team.rank == sender:
                return lambda: dist.send(whole, receiver, group=group)
            return lambda: dist.recv(whole, sender, group=group)
        whole, shard = self._tensor(part * ranks), self._tensor(part)
        if name == "all_gather":  # torch renamed these in 2.13, and warns of the old names
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return lambda: gather(whole, shard, group=group)
        if name == "reduce_scatter":
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            return lambda: scatter(shard, whole, group=group)
        received = self._tensor(part * ranks)
        return lambda: dist.all_to_all_single(received, whole, group=group)

    def _timed_on_gpu(self, call: Call) -> float:
        """Between two events; the sleep and the reduction before them are queued, so that no launch is timed."""
        cuda = torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda._sleep(_LEAD_CYCLES)
        distributed.all_reduce(self._barrier, group=self._everyone)
        start.record()
        call()
        end.record()
        cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def _timed_on_cpu(self, call: Call) -> float:
        distributed.barrier(group=self._everyone)
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6
