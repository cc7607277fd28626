"""Where GPU time goes, by kernel and by operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lumos.graph.rules.nodes import Nodes


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
    return [
        Hotspot(
            trace.names[i], float(count[i]) / share, float(total[i]) / share / 1e6, float(total[i] / count[i]) / 1e3
        )
        for i in order
    ]
