"""Synchronisation: the CPU waits for the device, a stream, an event, or a copy.

A blocking call returns after everything it waits for; how long it was recorded says nothing of its own cost.
"""

from __future__ import annotations

import numpy as np

from lumos.graph.from_trace.nodes import Draft
from lumos.graph.graph import Edges, Rule
from lumos.trace.names import CallKind

_CLOCK_SKEW = 50_000  # ns by which the GPU's clock may be ahead of the CPU's
_TIGHT = 200_000  # ns: a call returns at most this long after what it waited for


def sync_edges(draft: Draft) -> Edges:
    """From the last thing launched before a blocking call to the call's return."""
    edges = [_copy_edges(draft)]
    streams = _streams_by_call(draft)
    pairs: list[tuple[int, int]] = []
    calls = np.isin(draft.call, (CallKind.DEVICE_SYNC, CallKind.STREAM_SYNC, CallKind.EVENT_SYNC))
    for row in np.flatnonzero(calls & (draft.last_node >= 0)):
        pairs += _waited_for(draft, int(row), streams.get(int(row), -1))
    source, target = zip(*pairs, strict=True) if pairs else ((), ())
    return Edges.join([*edges, Edges.of(source, target, Rule.SYNC)])


def _waited_for(draft: Draft, row: int, stream: int) -> list[tuple[int, int]]:
    begin, end = int(draft.trace.start[row]), int(draft.trace.end[row])
    exit_node = int(draft.last_node[row])
    candidates = []
    for lane in draft.lanes_of_rank.get(int(draft.lane_rank[draft.trace.lane[row]]), []):
        node = draft.last_ended_by(lane, draft.last_launched_before(lane, begin), end)
        if node >= 0:
            candidates.append((lane, node))
    if draft.call[row] == CallKind.DEVICE_SYNC:
        return [(node, exit_node) for _, node in candidates]
    if stream >= 0:
        return [(n, exit_node) for lane, n in candidates if draft.trace.lanes[lane].label == str(stream)]
    # The stream or event is not recorded: it is the one whose work ended just before the call returned.
    close = [(int(draft.end[n]), n) for _, n in candidates if begin < draft.end[n] and end - draft.end[n] < _TIGHT]
    return [(max(close)[1], exit_node)] if close else []


def _streams_by_call(draft: Draft) -> dict[int, int]:
    """Row of a Stream Sync call → the stream it waits for, where the file has `cuda_sync` rows."""
    syncs, trace = draft.trace.syncs, draft.trace
    told = np.flatnonzero(syncs.stream >= 0)
    calls = np.flatnonzero(draft.call == CallKind.STREAM_SYNC)
    if len(told) == 0 or len(calls) == 0:
        return {}
    rank_of = draft.lane_rank
    by_key = {(int(rank_of[syncs.lane[i]]), int(syncs.correlation[i])): int(syncs.stream[i]) for i in told}
    found = ((int(r), by_key.get((int(rank_of[trace.lane[r]]), int(trace.correlation[r])), -1)) for r in calls)
    return {row: stream for row, stream in found if stream >= 0}


def _copy_edges(draft: Draft) -> Edges:
    """A copy from or to pageable memory, or by a call that is not asynchronous, returns when the copy is done."""
    trace = draft.trace
    rows = np.flatnonzero(draft.launch_row >= 0)
    rows = rows[draft.call[draft.launch_row[rows]] == CallKind.COPY]
    call = draft.launch_row[rows]
    pageable = np.array(["Pageable" in n for n in trace.names], bool)
    immediate = np.array(["Async" not in n for n in trace.names], bool)
    blocks = pageable[trace.name[rows]] | immediate[trace.name[call]]
    waited = blocks & (trace.end[call] + _CLOCK_SKEW >= trace.end[rows])
    source, target = draft.last_node[rows[waited]], draft.last_node[call[waited]]
    known = (source >= 0) & (target >= 0)
    return Edges.of(source[known], target[known], Rule.SYNC)
