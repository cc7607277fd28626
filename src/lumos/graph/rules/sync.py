"""Synchronisation: the CPU waits for the device, a stream, an event, or a copy.

A blocking call returns after everything it waits for; its recorded duration is mostly waiting, not its own cost.
"""

from __future__ import annotations

import numpy as np

from lumos.data_files import read_table
from lumos.graph.graph import Edges, Rule
from lumos.graph.rules.nodes import Nodes
from lumos.trace.names import CallKind

_SYNC = read_table("trace_rules.toml")["sync"]
SYNCHRONISING = (CallKind.DEVICE_SYNC, CallKind.STREAM_SYNC, CallKind.EVENT_SYNC)
LONGEST_RETURN: float = _SYNC["return"]  # nanoseconds after what a call waited for


def sync_edges(nodes: Nodes) -> Edges:
    """From the last thing launched before a blocking call to the call's return."""
    streams = _streams_by_call(nodes)
    calls = np.isin(nodes.trace.call, SYNCHRONISING)
    pairs: list[tuple[int, int]] = []
    for row in np.flatnonzero(calls & (nodes.last_node >= 0)).tolist():
        pairs += [(source, int(nodes.last_node[row])) for source in _waited_for(nodes, row, streams.get(row, -1))]
    return Edges.join([_copy_edges(nodes), Edges.of_pairs(pairs, Rule.SYNC)])


def _waited_for(nodes: Nodes, row: int, stream: int) -> list[int]:
    """The nodes that a synchronising call waited for."""
    trace = nodes.trace
    begin, end = int(trace.start[row]), int(trace.end[row])
    candidates = {}
    for lane in nodes.busy_streams.get(int(trace.lane_rank[trace.lane[row]]), []):
        node = nodes.last_ended_by(lane, nodes.last_launched_before(lane, begin), end)
        if node >= 0:
            candidates[lane] = node
    if trace.call[row] == CallKind.DEVICE_SYNC:
        return list(candidates.values())
    if stream >= 0:
        return [node for lane, node in candidates.items() if trace.lanes[lane].label == str(stream)]
    # The stream or event is not recorded: it is the one whose work ended just before the call returned.
    ends = ((int(nodes.end[node]), node) for node in candidates.values())
    close = [(ended, node) for ended, node in ends if begin < ended and end - ended < LONGEST_RETURN]
    return [max(close)[1]] if close else []


def _streams_by_call(nodes: Nodes) -> dict[int, int]:
    """Row of a stream synchronisation → the stream it waits for, if the file has `cuda_sync` rows."""
    trace, syncs = nodes.trace, nodes.trace.syncs
    known = np.flatnonzero(syncs.stream >= 0)
    ranks = trace.lane_rank[syncs.lane[known]].tolist() if len(known) else []
    keys = zip(ranks, syncs.correlation[known].tolist(), strict=True)
    stream = dict(zip(keys, syncs.stream[known].tolist(), strict=True))
    calls = np.flatnonzero(trace.call == CallKind.STREAM_SYNC).tolist()
    return {row: stream.get((int(trace.rank[row]), int(trace.correlation[row])), -1) for row in calls}


def _copy_edges(nodes: Nodes) -> Edges:
    """A copy from or to pageable memory, or by a call that is not asynchronous, returns when the copy is done."""
    trace = nodes.trace
    rows = np.flatnonzero(nodes.trace.launch_row >= 0)
    rows = rows[trace.call[nodes.trace.launch_row[rows]] == CallKind.COPY]
    call = nodes.trace.launch_row[rows]
    pageable = np.array(["Pageable" in n for n in trace.names], bool)
    immediate = np.array(["Async" not in n for n in trace.names], bool)
    blocks = pageable[trace.name[rows]] | immediate[trace.name[call]]
    waited = blocks & (trace.end[call] + _SYNC["clock_skew"] >= trace.end[rows])
    source, target = nodes.last_node[rows[waited]], nodes.last_node[call[waited]]
    known = (source >= 0) & (target >= 0)
    return Edges.of(source[known], target[known], Rule.SYNC)
