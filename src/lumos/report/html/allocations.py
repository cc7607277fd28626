"""Allocations: memory of the GPUs over time, if the profiler recorded it (`profile_memory=True`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lumos.graph.graph import Floats
from lumos.report.html.charts import Line, Lines
from lumos.report.html.page import Figure, Section
from lumos.report.table import Column, Row, Table
from lumos.trace.trace import Trace

_MOST_POINTS = 1500
_MOST_RANKS = 8
_GIB = float(1 << 30)
_SILENT = "The trace says nothing of memory: record with profile_memory=True, or ask `lumos predict` with a setup."


@dataclass(frozen=True)
class Allocation:
    """What one rank's allocator holds: milliseconds from the start of the run, and GiB."""

    rank: int
    ms: Floats
    gib: Floats


def allocations(trace: Trace, origin: int) -> list[Allocation]:
    """Those of the first ranks that have any."""
    found, held = [], trace.allocations
    rank_of = trace.lane_rank[held.lane]
    for rank in trace.ranks[:_MOST_RANKS]:
        rows = np.flatnonzero(rank_of == rank)
        rows = rows[np.argsort(held.time[rows], kind="stable")]
        if len(rows):
            found.append(Allocation(rank, (held.time[rows] - origin) / 1e6, held.bytes[rows] / _GIB))
    return found


def memory_section(trace: Trace, origin: int) -> Section:
    """Memory over time, or why there is none."""
    found = allocations(trace, origin)
    if not found:
        return Section("Memory over time", _SILENT)
    lines = [
        Line(f"rank {part.rank}", f"series-{i % 8}", *thinned(part.ms, part.gib), rank=str(part.rank), steps=True)
        for i, part in enumerate(found)
    ]
    columns = [Column("rank"), Column("at the start, GiB", 3), Column("peak, GiB", 3, bar=True),
               Column("peak at, ms", 2), Column("at the end, GiB", 3), Column("events", 0)]  # fmt: skip
    rows = [
        Row([str(p.rank), float(p.gib[0]), float(p.gib.max()), float(p.ms[p.gib.argmax()]), float(p.gib[-1]),
             len(p.ms)], rank=str(p.rank))
        for p in found
    ]  # fmt: skip
    text = "What torch's allocator held on the GPU, as recorded; stage and rank are one here."
    if len(trace.ranks) > _MOST_RANKS:
        text += f" Of {len(trace.ranks)} ranks, the first {_MOST_RANKS}."
    figure = Figure("allocated memory over time", Lines("ms", "GiB", lines))
    return Section("Memory over time", text, [figure], [Table("allocated memory", columns, rows)])


def thinned(x: Floats, y: Floats, most: int = _MOST_POINTS) -> tuple[Floats, Floats]:
    """Fewer points that still show every peak: of each stretch the first, and the largest."""
    if len(x) <= most:
        return x, y
    bounds = np.linspace(0, len(x), most // 2 + 1).astype(int)
    largest = [low + int(y[low:high].argmax()) for low, high in pairwise(bounds.tolist())]
    keep = np.unique(np.concatenate([bounds[:-1], largest, [len(x) - 1]]))
    return x[keep], y[keep]
