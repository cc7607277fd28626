"""Launch: a kernel starts after the call that launched it; one call of a CUDA graph launches many."""

from __future__ import annotations

import numpy as np

from lumos.graph.from_trace.nodes import Draft
from lumos.graph.graph import Edges, Rule
from lumos.trace.names import CallKind

_CLOCK_SKEW = (
    1_000_000  # ns by which the GPU's clock may lag the CPU's, so that a kernel seems to start before its launch
)
_WITHIN_GRAPH = 20_000  # ns: a kernel of a CUDA graph that starts this soon after another stream's was waiting for it


def launch_edges(draft: Draft) -> Edges:
    """From the call to the first node it put on each stream; the rest of a CUDA graph follows by stream order."""
    rows = np.flatnonzero(draft.launch_row >= 0)
    rows = rows[np.lexsort((draft.first_node[rows], draft.trace.lane[rows], draft.launch_row[rows]))]
    call, lane = draft.launch_row[rows], draft.trace.lane[rows]
    again = np.zeros(len(rows), bool)
    again[1:] = (call[1:] == call[:-1]) & (lane[1:] == lane[:-1])
    rows, call = rows[~again], call[~again]
    # A blocking call submits on entry and returns when the copy is done; any other returns once it has submitted.
    blocking = draft.is_return[draft.last_node[call]]
    source = np.where(blocking, draft.first_node[call], draft.last_node[call])
    target = draft.first_node[rows]
    early = draft.start[np.maximum(source, 0)] - draft.start[target]
    known = (source >= 0) & (target >= 0) & (early < _CLOCK_SKEW)
    return Edges.of(source[known], target[known], Rule.LAUNCH)


def graph_edges(draft: Draft) -> Edges:
    """Between the streams of one CUDA graph: a node that starts right after another stream's, and not its own's."""
    rows = np.flatnonzero(draft.launch_row >= 0)
    rows = rows[draft.call[draft.launch_row[rows]] == CallKind.GRAPH_LAUNCH]
    sources: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    if len(rows) == 0:
        return Edges.of([], [], Rule.GRAPH)
    rows = rows[np.argsort(draft.launch_row[rows], kind="stable")]
    for members in np.split(rows, np.flatnonzero(np.diff(draft.launch_row[rows])) + 1):
        if len(np.unique(draft.trace.lane[members])) < 2:
            continue
        source, target = _across_streams(draft, draft.first_node[members], draft.last_node[members])
        sources.append(source)
        targets.append(target)
    none = np.zeros(0, np.int32)
    return Edges.of(np.concatenate([none, *sources]), np.concatenate([none, *targets]), Rule.GRAPH)


def _across_streams(draft: Draft, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Within one graph launch: the node of another stream that ended last before a node which its stream had freed."""
    by_end = last[np.argsort(draft.end[last], kind="stable")]
    ends = draft.end[by_end]
    at = np.searchsorted(ends, draft.start[first], side="right") - 1
    previous = by_end[np.maximum(at, 0)]
    lag = draft.start[first] - draft.end[previous]
    head = draft.first[draft.lane[first]] == first
    own = np.where(head, np.iinfo(np.int64).min, draft.end[np.maximum(first - 1, 0)])
    told = (at >= 0) & (draft.lane[previous] != draft.lane[first]) & (lag < _WITHIN_GRAPH) & (draft.end[previous] > own)
    return previous[told], first[told]
