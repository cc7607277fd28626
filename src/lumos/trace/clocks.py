"""Clocks: the ranks of a job may run on hosts whose clocks differ; a collective ends on all of them at once.

End times of one collective agree across ranks within 2.5–90 µs (median over real jobs), while hosts may be seconds
apart. A rank whose ends are off by more than that is moved by the median of its differences.
"""

from __future__ import annotations

import numpy as np

from lumos.graph.from_trace.rules.rendezvous import Meeting
from lumos.trace.trace import Trace

SMALLEST_OFFSET = 200_000  # ns; below this a difference is the collective's own


def clock_offsets(trace: Trace, meetings: list[Meeting]) -> dict[int, int]:
    """What to add to every rank's times so that the ends of its collectives agree with its neighbours'."""
    differences: dict[tuple[int, int], list[int]] = {}
    for meeting in meetings:
        ends = trace.end[meeting.rows]
        for rank, end in zip(meeting.ranks[1:], ends[1:], strict=True):
            differences.setdefault((meeting.ranks[0], rank), []).append(int(ends[0] - end))
    neighbours: dict[int, list[tuple[int, int]]] = {}
    for (a, b), found in differences.items():
        offset = int(np.median(found))
        neighbours.setdefault(a, []).append((b, offset))
        neighbours.setdefault(b, []).append((a, -offset))
    offsets: dict[int, int] = {}
    for root in trace.ranks:
        if root in offsets:
            continue
        offsets[root] = 0
        waiting = [root]
        while waiting:
            rank = waiting.pop()
            for other, offset in neighbours.get(rank, []):
                if other not in offsets:
                    offsets[other] = offsets[rank] + offset
                    waiting.append(other)
    return {rank: offset for rank, offset in offsets.items() if abs(offset) > SMALLEST_OFFSET}
