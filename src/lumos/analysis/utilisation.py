"""GPU utilisation over time: the busy share of equal bins of about a millisecond."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lumos.trace.steps import Steps
from lumos.trace.trace import Trace

_BIN_NS = 1_000_000
_FEWEST_BINS, _MOST_BINS = 20, 400  # in short and in long runs


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
