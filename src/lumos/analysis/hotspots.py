"""Where GPU time goes, by kernel and by operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lumos.graph.from_trace.nodes import Nodes
from lumos.trace.trace import Ints


@dataclass(frozen=True)
class Hotspot:
    """One kernel or operator: milliseconds a step, mean over ranks."""

    name: str
    calls: float
    ms: float
    mean_us: float


def top_kernels(nodes: Nodes, steps: int, most: int = 15) -> list[Hotspot]:
    """Kernels by the time they take; communication is in the table of collectives."""
    rows = _compute_rows(nodes)
    return _top(nodes, nodes.trace.name[rows], rows, steps, most)


def top_operators(nodes: Nodes, steps: int, most: int = 15) -> list[Hotspot]:
    """Operators by the GPU time of what they launched."""
    rows = _compute_rows(nodes)
    around = nodes.operator_row[rows]
    rows = rows[around >= 0]
    return _top(nodes, nodes.trace.name[around[around >= 0]], rows, steps, most)


def _compute_rows(nodes: Nodes) -> np.ndarray:
    return np.flatnonzero(nodes.trace.on_gpu & ~nodes.trace.is_communication)


def _top(nodes: Nodes, key: np.ndarray, rows: np.ndarray, steps: int, most: int) -> list[Hotspot]:
    trace = nodes.trace
    duration: Ints = trace.duration[rows]
    total = np.bincount(key, duration, len(trace.names)) if len(rows) else np.zeros(0)
    count = np.bincount(key, minlength=len(trace.names)) if len(rows) else np.zeros(0, int)
    share = max(steps, 1) * max(len(trace.ranks), 1)
    order = [int(i) for i in np.argsort(-total)[:most] if count[i]]
    return [
        Hotspot(
            trace.names[i], float(count[i]) / share, float(total[i]) / share / 1e6, float(total[i] / count[i]) / 1e3
        )
        for i in order
    ]
