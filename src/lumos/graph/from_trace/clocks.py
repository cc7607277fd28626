"""Clocks: the ranks of a job may run on hosts whose clocks differ; a collective ends on all of them at once.

End times of one collective agree across ranks within 2.5–90 µs (median over real jobs), while hosts may be seconds
apart. A rank whose ends are off by more than that is moved by the median of its differences.
"""

from __future__ import annotations

import numpy as np

from lumos.data_files import read_table
from lumos.graph.from_trace.rendezvous import Rendezvous
from lumos.trace.trace import Trace

_SMALLEST_OFFSET = read_table("trace_rules.toml")["rendezvous"]["smallest_offset"]


def clock_offsets(trace: Trace, rendezvous: list[Rendezvous]) -> dict[int, int]:
    """What to add to every rank's times so that the ends of its collectives agree with its neighbours'."""
    differences: dict[tuple[int, int], list[int]] = {}
    for found in rendezvous:
        ends = trace.end[found.rows]
        for rank, end in zip(found.ranks[1:], ends[1:], strict=True):
            differences.setdefault((found.ranks[0], rank), []).append(int(ends[0] - end))
    neighbours: dict[int, list[tuple[int, int]]] = {}
    for (a, b), between in differences.items():
        offset = int(np.median(between))
        neighbours.setdefault(a, []).append((b, offset))
        neighbours.setdefault(b, []).append((a, -offset))
    offsets: dict[int, int] = {}
    for root in trace.ranks:
        waiting = [] if root in offsets else [root]
        offsets.setdefault(root, 0)
        while waiting:
            rank = waiting.pop()
            for other, offset in neighbours.get(rank, []):
                if other not in offsets:
                    offsets[other] = offsets[rank] + offset
                    waiting.append(other)
    return {rank: offset for rank, offset in offsets.items() if abs(offset) > _SMALLEST_OFFSET}
