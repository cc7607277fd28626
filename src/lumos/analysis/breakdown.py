"""Breakdown of a step: exposed compute, exposed communication, both at once, and neither. They add up to the step.

    compute  ████████        ████
    comm         ████████
             ‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾
             exposed  over-  exposed  other
             compute  lapped comm     (idle)

A communication kernel counts from its arrival, so waiting for other ranks is communication here; the table of
collectives separates the two. Copies and memsets count as compute.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from lumos.graph.graph import Floats
from lumos.trace.names import Kind
from lumos.trace.steps import Steps
from lumos.trace.trace import Ints, Trace

_MATTERS = 0.01  # of the step


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

    @property
    def step_ms(self) -> float:
        return self.exposed_compute_ms + self.exposed_comm_ms + self.overlapped_ms + self.other_ms

    def times(self, factor: float) -> Breakdown:
        """All parts, longer by a factor."""
        return Breakdown(*(value * factor for value in asdict(self).values()))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def breakdown_by_rank(trace: Trace, steps: Steps, weights: Floats | None = None) -> dict[int, Breakdown]:
    """For every rank, the mean over the steps; `weights` for another mean, as `typical_weights`."""
    gpu = trace.rows_by_rank(trace.on_gpu)
    answer = {}
    for column, r in enumerate(steps.ranks):
        rows = gpu[r][np.argsort(trace.start[gpu[r]], kind="stable")]
        ended = np.maximum.accumulate(trace.end[rows]) if len(rows) else trace.end[rows]
        parts = []
        for low, high in zip(steps.start[:, column].tolist(), steps.end[:, column].tolist(), strict=True):
            first, last = np.searchsorted(ended, low, side="right"), np.searchsorted(trace.start[rows], high)
            parts.append(_one(trace, rows[first:last], low, high))
        answer[r] = Breakdown(*np.average(parts, axis=0, weights=weights).tolist())
    return answer


def typical_weights(steps: Steps) -> Floats:
    """How much every step counts in `steps.typical`: a breakdown with these weights adds up to that step."""
    order = np.argsort(steps.milliseconds, kind="stable")
    place = 0.25 * (len(order) - 1)  # of the lower quartile, between two steps
    low = int(place)
    weights = np.zeros(len(order))
    weights[order[low]] = 1 - (place - low)
    if place > low:
        weights[order[low + 1]] = place - low
    return weights


def mean_breakdown(parts: list[Breakdown]) -> Breakdown:
    """The mean of several."""
    return Breakdown(*np.mean([list(asdict(p).values()) for p in parts], axis=0).tolist())


def moved_breakdown(recorded: Breakdown, modelled: Breakdown, target: Breakdown) -> Breakdown:
    """A recorded breakdown, changed as a model changes its own from `modelled`, of the same run, to `target`.

    Parts that matter change by their ratio, others by their difference; idle time makes them add up to the target.
    """
    busy = []
    for key in ("exposed_compute_ms", "exposed_comm_ms", "overlapped_ms"):
        was, base, becomes = (getattr(one, key) for one in (recorded, modelled, target))
        by_ratio = base > _MATTERS * modelled.step_ms
        busy.append(was * becomes / base if by_ratio else max(0.0, was + becomes - base))
    step = target.step_ms
    share = min(1.0, step / sum(busy)) if sum(busy) else 1.0
    compute, comm, both = (share * part for part in busy)
    return Breakdown(compute, comm, both, max(0.0, step - compute - comm - both))


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
