"""Breakdown of a step: exposed compute, exposed communication, both at once, and neither.

    compute  ████████        ████
    comm         ████████
             ‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾
             exposed  over-  exposed  other
             compute  lapped comm     (idle)

A communication kernel counts from its arrival, so waiting for other ranks is communication here; the table of
collectives tells the two apart. Copies and memsets count as compute.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from lumos.trace.names import Kind
from lumos.trace.steps import Steps
from lumos.trace.trace import Ints, Trace


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds of one step; they add up to it."""

    exposed_compute_ms: float
    exposed_comm_ms: float
    overlapped_ms: float
    other_ms: float

    @property
    def compute_ms(self) -> float:
        return self.exposed_compute_ms + self.overlapped_ms

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def breakdown_by_rank(trace: Trace, steps: Steps) -> dict[int, Breakdown]:
    """For every rank, the mean over the steps."""
    gpu = trace.rows_by_rank(trace.on_gpu)
    answer = {}
    for column, r in enumerate(steps.ranks):
        rows = gpu[r][np.argsort(trace.start[gpu[r]], kind="stable")]
        ended = np.maximum.accumulate(trace.end[rows]) if len(rows) else trace.end[rows]
        parts = []
        for low, high in zip(steps.start[:, column].tolist(), steps.end[:, column].tolist(), strict=True):
            first, last = np.searchsorted(ended, low, side="right"), np.searchsorted(trace.start[rows], high)
            parts.append(_one(trace, rows[first:last], low, high))
        answer[r] = mean_breakdown([Breakdown(*p) for p in parts])
    return answer


def mean_breakdown(parts: list[Breakdown]) -> Breakdown:
    """The mean of several."""
    values = np.array([list(asdict(p).values()) for p in parts])
    return Breakdown(*(float(v) for v in values.mean(axis=0)))


def _one(trace: Trace, rows: np.ndarray, low: int, high: int) -> tuple[float, ...]:
    comm = trace.kind[rows] == Kind.COMM
    a, b, union = (covered(trace.start[x], trace.end[x], low, high) for x in (rows[~comm], rows[comm], rows))
    return tuple(x / 1e6 for x in (union - b, union - a, a + b - union, high - low - union))


def covered(start: Ints, end: Ints, low: int, high: int) -> int:
    """How much of a window any of these intervals covers."""
    start, end = np.clip(start, low, high), np.clip(end, low, high)
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order]) if len(end) else end
    if len(start) == 0:
        return 0
    before = np.concatenate([[start[0]], end[:-1]])
    return int(np.maximum(end - np.maximum(start, before), 0).sum())
