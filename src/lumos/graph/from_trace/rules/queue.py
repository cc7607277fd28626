"""The launch queue: a stream holds about a thousand pending launches; one more blocks the CPU until a kernel retires.

Without this rule a GPU-bound step looks CPU-bound, because the time the CPU spends in full queues looks like its own.
"""

from __future__ import annotations

import numpy as np

from lumos.graph.from_trace.nodes import Draft
from lumos.graph.graph import Edges, Rule

DEPTH = 1022  # pending launches of one stream; measured on H200 by calibration/record_h200.py
_AGREEMENT = 0.98  # share of launches that must have obeyed the depth


def queue_edges(draft: Draft, depth: int = DEPTH) -> Edges:
    """From the node `depth` places earlier on a stream to the launch call, where the recorded times allow it."""
    sources, targets = [], []
    for lane in (lane for lanes in draft.lanes_of_rank.values() for lane in lanes):
        launch = draft.launch_row[draft.row[draft.first[lane] : draft.first[lane + 1]]]
        submitted = np.flatnonzero(launch >= 0)
        submitted = (
            submitted[np.concatenate([[True], np.diff(launch[submitted]) != 0])] if len(submitted) else submitted
        )
        if len(submitted) <= depth:
            continue
        source = submitted[:-depth] + int(draft.first[lane])
        target = draft.last_node[launch[submitted[depth:]]]
        possible = (target >= 0) & (draft.end[source] <= draft.end[np.maximum(target, 0)])
        if possible.mean() < _AGREEMENT:
            continue  # launches went on while that many were pending: this queue is deeper
        sources.append(source[possible])
        targets.append(target[possible])
    return Edges.of(np.concatenate(sources or [[]]), np.concatenate(targets or [[]]), Rule.QUEUE)
