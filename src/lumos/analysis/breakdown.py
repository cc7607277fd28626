"""Breakdown of a step: exposed compute, exposed communication, overlapped, and other. They add up to the step.

    compute  ████████        ████
    comm         ████████
             ‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾
             exposed  over-  exposed  other
             compute  lapped comm     (idle)

A communication kernel counts from its arrival, so waiting for other ranks is communication here; the table of
collectives separates the two. Copies and memsets count as compute.

GPU time by kernel and by operator are `hotspots`; how busy GPUs are in the course of a run is `utilisation`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from lumos.data_files import read_table
from lumos.graph.graph import Floats
from lumos.graph.rules.nodes import Nodes
from lumos.trace.names import Kind
from lumos.trace.steps import Steps
from lumos.trace.trace import Ints, Trace

_MATTERS: float = read_table("analysis.toml")["breakdown"]["matters"]  # of the step
_BIN_NS = 1_000_000
_FEWEST_BINS, _MOST_BINS = 20, 400  # in short and in long runs


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


@dataclass(frozen=True)
class Hotspot:
    """One kernel or operator: milliseconds a step, mean over ranks."""

    name: str
    calls: float
    ms: float
    mean_us: float


def hotspots(nodes: Nodes, steps: int, by_operator: bool) -> list[Hotspot]:
    """Kernels by the time they take, or operators by that of what they launched, the longest first.

    Communication is in the table of collectives.
    """
    trace = nodes.trace
    rows = np.flatnonzero(trace.on_gpu & ~trace.is_communication)
    named = nodes.operator_row[rows] if by_operator else rows
    rows, named = rows[named >= 0], named[named >= 0]
    total = np.bincount(trace.name[named], trace.duration[rows], len(trace.names))
    count = np.bincount(trace.name[named], minlength=len(trace.names))
    share = max(steps, 1) * max(len(trace.ranks), 1)
    order = [int(i) for i in np.argsort(-total, kind="stable") if count[i]]
    mean_us = total / np.maximum(count, 1) / 1e3
    return [
        Hotspot(trace.names[i], float(count[i]) / share, float(total[i]) / share / 1e6, float(mean_us[i]))
        for i in order
    ]


@dataclass(frozen=True)
class Utilisation:
    """Busy shares between 0 and 1, (ranks, bins)."""

    bin_ms: float
    ranks: tuple[int, ...]
    share: np.ndarray

    @property
    def mean(self) -> float:
        return float(self.share.mean()) if self.share.size else 0.0


def utilisation(trace: Trace, steps: Steps) -> Utilisation:
    """Busy share of every rank's GPU, from the start of the first step to the end of the last."""
    low, high = int(steps.start.min()), int(steps.end.max())
    span = max(high - low, 1)
    bins = min(max(-(-span // _BIN_NS), _FEWEST_BINS), _MOST_BINS, span)
    at = np.arange(bins + 1)
    edges = low + span // bins * at + span % bins * at // bins  # times since 1970 exceed the precision of floats
    gpu = trace.rows_by_rank(trace.on_gpu)
    return Utilisation(span / bins / 1e6, steps.ranks, np.array([_busy(trace, gpu[r], edges) for r in steps.ranks]))


def _busy(trace: Trace, rows: np.ndarray, edges: np.ndarray) -> np.ndarray:
    if len(rows) == 0:
        return np.zeros(len(edges) - 1)
    order = np.argsort(trace.start[rows], kind="stable")
    start, end = trace.start[rows][order], np.maximum.accumulate(trace.end[rows][order])
    start = np.maximum(start, np.concatenate([[start[0]], end[:-1]]))
    length = np.maximum(end - start, 0)
    # Busy time up to each edge: whole intervals before it plus the part of the one it cuts.
    done = np.concatenate([[0], np.cumsum(length)])
    at = np.searchsorted(start, edges, side="right")
    part = np.where(at > 0, np.minimum(edges - start[np.maximum(at - 1, 0)], length[np.maximum(at - 1, 0)]), 0)
    busy = done[np.maximum(at - 1, 0)] + np.maximum(part, 0)
    return np.asarray(np.diff(busy) / np.diff(edges))
