"""Launches: a kernel starts after the call that launched it, which may have to wait for a place in the launch queue.

One call launches all kernels of a CUDA graph, on several streams, which wait for one another inside the graph. A stream
holds about a thousand pending launches; one more blocks the CPU until a kernel retires.
"""

from __future__ import annotations

import numpy as np

from lumos.data_files import read_table
from lumos.graph.graph import Edges, Rule
from lumos.graph.rules.nodes import Nodes
from lumos.trace.names import CallKind

_LIMITS = read_table("trace_rules.toml")
_CLOCK_SKEW, _RELEASE, _QUEUE = _LIMITS["launch"]["clock_skew"], _LIMITS["graph"]["release"], _LIMITS["queue"]


def launch_edges(nodes: Nodes) -> Edges:
    """From the call to the first node it put on each stream; the rest of a CUDA graph follows by stream order."""
    rows = np.flatnonzero(nodes.trace.launch_row >= 0)
    rows = rows[np.lexsort((nodes.first_node[rows], nodes.trace.lane[rows], nodes.trace.launch_row[rows]))]
    call, lane = nodes.trace.launch_row[rows], nodes.trace.lane[rows]
    again = np.zeros(len(rows), bool)
    again[1:] = (call[1:] == call[:-1]) & (lane[1:] == lane[:-1])
    rows, call = rows[~again], call[~again]
    # A blocking call submits on entry and returns when the copy is done; any other returns once it has submitted.
    blocking = nodes.is_return[nodes.last_node[call]]
    source = np.where(blocking, nodes.first_node[call], nodes.last_node[call])
    target = nodes.first_node[rows]
    early = nodes.start[np.maximum(source, 0)] - nodes.start[target]
    known = (source >= 0) & (target >= 0) & (early < _CLOCK_SKEW)
    return Edges.of(source[known], target[known], Rule.LAUNCH)


def graph_edges(nodes: Nodes) -> Edges:
    """Between the streams of one graph launch: to a node that starts right after one of another stream ended."""
    rows = np.flatnonzero(nodes.trace.launch_row >= 0)
    rows = rows[nodes.trace.call[nodes.trace.launch_row[rows]] == CallKind.GRAPH_LAUNCH]
    rows = rows[np.argsort(nodes.trace.launch_row[rows], kind="stable")]
    found = [np.zeros((2, 0), np.int32)]
    for members in np.split(rows, np.flatnonzero(np.diff(nodes.trace.launch_row[rows])) + 1):
        if len(np.unique(nodes.trace.lane[members])) > 1:
            found.append(_across_streams(nodes, nodes.first_node[members], nodes.last_node[members]))
    source, target = np.concatenate(found, axis=1)
    return Edges.of(source, target, Rule.GRAPH)


def _across_streams(nodes: Nodes, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """(source, target): the node that ended last before each node, if on another stream and later than its own."""
    by_end = last[np.argsort(nodes.end[last], kind="stable")]
    at = np.searchsorted(nodes.end[by_end], nodes.start[first], side="right") - 1
    previous = by_end[np.maximum(at, 0)]
    waited = (at >= 0) & (nodes.lane[previous] != nodes.lane[first])
    waited &= (nodes.start[first] - nodes.end[previous] < _RELEASE) & (nodes.end[previous] > nodes.previous_end[first])
    return np.stack([previous[waited], first[waited]])


def queue_edges(nodes: Nodes, depth: int = _QUEUE["depth"]) -> Edges:
    """From the node `depth` positions earlier on a stream to the launch call, if the recorded times allow it.

    Without this rule a GPU-bound step looks CPU-bound, because the time that the CPU spends waiting for the queue looks
    like its own.
    """
    sources, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for lane in (lane for lanes in nodes.streams.values() for lane in lanes):
        low = int(nodes.first[lane])
        launch = nodes.launch_of_node[low : nodes.first[lane + 1]]
        submitted = np.flatnonzero(launch >= 0)
        submitted = submitted[np.diff(launch[submitted], prepend=-1) != 0]
        if len(submitted) <= depth:
            continue
        source = submitted[:-depth] + low
        target = nodes.last_node[launch[submitted[depth:]]]
        possible = (target >= 0) & (nodes.end[source] <= nodes.end[np.maximum(target, 0)])
        if possible.mean() >= _QUEUE["agreement"]:  # else launches went on beyond this depth: the queue is deeper
            sources.append(source[possible])
            targets.append(target[possible])
    return Edges.of(np.concatenate(sources), np.concatenate(targets), Rule.QUEUE)
