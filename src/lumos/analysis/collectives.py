"""Collectives: how long ranks waited, how long data moved, and the bus bandwidth that follows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lumos.dtypes import dtype_called
from lumos.graph.rules.rendezvous import Rendezvous
from lumos.trace.trace import Message, Trace


@dataclass(frozen=True)
class CollectiveTimes:
    """One collective. `wait_ms` is the mean over the ranks, `transfer_ms` what is left after the last one arrives."""

    collective: str
    ranks: int
    bytes: int  # -1 unknown
    start_ms: float
    wait_ms: float
    worst_wait_ms: float
    last_rank: int
    transfer_ms: float
    bus_gb_s: float  # 0 unknown


def collectives(trace: Trace, meetings: Sequence[Rendezvous], origin: int) -> list[CollectiveTimes]:
    """All collectives by the times of a trace (the recorded one or a simulated one), in order of time."""
    return sorted((_one(trace, one, origin) for one in meetings), key=lambda c: c.start_ms)


def _one(trace: Trace, one: Rendezvous, origin: int) -> CollectiveTimes:
    arrive, end = trace.start[one.rows], trace.end[one.rows]
    together = int(arrive.max())
    transfer = max(float(np.median(end - together)), 0.0) / 1e6  # a float64 cannot hold nanoseconds since 1970
    size = message_bytes(one.message)
    wait = np.minimum(together - arrive, end - arrive) / 1e6  # no longer than the kernel, whatever was matched
    return CollectiveTimes(
        collective=one.collective,
        ranks=len(one.rows),
        bytes=size,
        start_ms=float(arrive.min() - origin) / 1e6,
        wait_ms=float(wait.mean()),
        worst_wait_ms=float(wait.max()),
        last_rank=one.ranks[int(np.argmax(arrive))],
        transfer_ms=transfer,
        bus_gb_s=bus_gb_s(one.collective, len(one.rows), size, transfer),
    )


def message_bytes(message: Message | None) -> int:
    """The payload: the larger of what goes in and what comes out; -1 where it is not recorded."""
    if message is None:
        return -1
    dtype, elements = dtype_called(message.dtype), max(message.in_elements, message.out_elements)
    return dtype.size * elements if dtype is not None and elements > 0 else -1


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over payload rate, as nccl-tests defines it (its PERFORMANCE.md)."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


def bus_gb_s(collective: str, ranks: int, size: int, transfer_ms: float) -> float:
    """Bus bandwidth of one transfer; 0 where the size is not known."""
    return bus_factor(collective, ranks) * size / (transfer_ms * 1e6) if size > 0 and transfer_ms > 0 else 0.0


@dataclass(frozen=True)
class CollectiveGroup:
    """Collectives of one kind and size; times are means."""

    collective: str
    ranks: int
    bytes: int
    count: int
    wait_ms: float
    transfer_ms: float
    bus_gb_s: float


def group_collectives(times: list[CollectiveTimes]) -> list[CollectiveGroup]:
    """The same by kind and size, the most expensive first."""
    groups: dict[tuple[str, int, int], list[CollectiveTimes]] = defaultdict(list)
    for c in times:
        groups[c.collective, c.ranks, c.bytes].append(c)
    rows = [
        CollectiveGroup(
            *key,
            len(members),
            float(np.mean([m.wait_ms for m in members])),
            float(np.mean([m.transfer_ms for m in members])),
            float(np.median([m.bus_gb_s for m in members])),
        )
        for key, members in groups.items()
    ]
    return sorted(rows, key=lambda g: -g.count * (g.wait_ms + g.transfer_ms))


def messages_of_rank(trace: Trace, rank: int) -> list[CollectiveGroup]:
    """Collectives of one rank that stands for its peers, as in a step predicted from a setup: there is no waiting."""
    rows = np.flatnonzero(trace.is_communication & (trace.rank == rank) & (trace.message >= 0))
    count = np.bincount(trace.message[rows], minlength=len(trace.messages))
    total = np.bincount(trace.message[rows], trace.duration[rows], len(trace.messages)) / 1e6
    groups = []
    for message, times, ms in zip(trace.messages, count.tolist(), total.tolist(), strict=True):
        if times:
            size, ranks = message_bytes(message), message.group_size
            bus = bus_gb_s(message.collective, ranks, size, ms / times)
            groups.append(CollectiveGroup(message.collective, ranks, size, times, 0.0, ms / times, bus))
    return sorted(groups, key=lambda g: -g.count * g.transfer_ms)
