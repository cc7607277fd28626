"""Allocations: memory of the GPUs over time, where the profiler recorded it (`profile_memory=True`).

The replay has no use for these events, so they are read here, from the files that the trace names.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lumos.errors import LumosError
from lumos.graph.graph import Floats
from lumos.read.json_slices import BAD_GZIP, Slices
from lumos.report.html.charts import Line, Lines
from lumos.report.html.page import Figure, Section
from lumos.report.table import Column, Row, Table
from lumos.trace.trace import Header, Trace

_MOST_POINTS = 1500
_MOST_RANKS = 8
_MOST_PACKED, _MOST_PLAIN = 12 << 20, 200 << 20  # bytes to read again: about a second
_GIB = float(1 << 30)
_LATEST = 1e18  # microseconds; what is later is no time
_MOST_MEMORY = 1e15
_UNREADABLE: tuple[type[Exception], ...] = (LumosError, *BAD_GZIP)
_SILENT = "The trace says nothing of memory: record with profile_memory=True, or ask `lumos predict` with a setup."


class _Args(msgspec.Struct, gc=False):
    allocated: Any = msgspec.field(default=None, name="Total Allocated")
    device: Any = msgspec.field(default=None, name="Device Type")


class _Event(msgspec.Struct, gc=False):
    name: Any = ""
    ts: Any = None
    args: _Args | str | int | float | bool | list[Any] | None = None


@dataclass(frozen=True)
class Allocation:
    """What one rank's allocator holds: milliseconds from the start of the run, and GiB."""

    rank: int
    ms: Floats
    gib: Floats


def allocations(trace: Trace, origin: int) -> tuple[list[Allocation], bool]:
    """Of the first ranks, as far as reading their files again is quick; and whether all ranks were looked at."""
    found: list[Allocation] = []
    budget = 1.0
    for count, header in enumerate(trace.headers):
        budget -= _effort(header)
        if budget < 0 or count == _MOST_RANKS:
            return found, False
        ms, gib = _read(header, origin)
        if len(ms):
            found.append(Allocation(header.rank, ms, gib))
    return found, True


def _effort(header: Header) -> float:
    """The share of what may be read again that a file takes; 0 where it is not there any more."""
    try:
        size = Path(header.path).stat().st_size
    except OSError:
        return 0.0
    return size / (_MOST_PACKED if header.path.endswith(".gz") else _MOST_PLAIN)


def _read(header: Header, origin: int) -> tuple[Floats, Floats]:
    """(milliseconds, GiB) of the allocator of one rank's GPU; nothing where its file is gone or has changed."""
    path, rows = Path(header.path), list[tuple[float, float]]()
    slices = Slices(path, _Event)
    if path.is_file():
        with suppress(*_UNREADABLE):
            rows = [row for events in slices for event in events if (row := _row(event))]
    base = slices.header.get("baseTimeNanoseconds", 0) if rows else 0
    table = np.array(rows, np.float64).reshape(-1, 2)
    table = table[np.argsort(table[:, 0], kind="stable")]
    shift = (base if isinstance(base, int) else 0) - origin
    return table[:, 0] / 1e3 + shift / 1e6, table[:, 1] / _GIB


def _row(event: _Event) -> tuple[float, float] | None:
    """(microseconds, bytes) of an event of a GPU's allocator; device types other than 0, the host, are GPUs."""
    if event.name != "[memory]" or not isinstance(event.args, _Args) or event.args.device in (0, None):
        return None
    match event.ts, event.args.allocated:
        case ((int() | float() as ts), (int() | float() as size)) if 0 <= ts < _LATEST and 0 <= size < _MOST_MEMORY:
            return float(ts), float(size)
    return None


def memory_section(trace: Trace, origin: int) -> Section:
    """Memory over time, or why there is none."""
    found, complete = allocations(trace, origin)
    if not found:
        text = _SILENT if complete else "The files are too large to be read again for what they say of memory."
        return Section("Memory over time", text)
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
    if not complete:
        text += f" Of {len(trace.ranks)} ranks the first {len(found)}, whose files could be read again quickly."
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
