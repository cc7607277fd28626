"""CUDA graphs: one call launches kernels on several streams, which wait for one another inside the graph."""

from __future__ import annotations

import numpy as np

from lumos.data_files import read_table
from lumos.graph.from_trace.nodes import Nodes
from lumos.graph.graph import Edges, Rule
from lumos.trace.names import CallKind

_RELEASE = read_table("trace_rules.toml")["graph"]["release"]


def graph_edges(nodes: Nodes) -> Edges:
    """Between the streams of one graph launch: to a node that starts right after one of another stream ended."""
    rows = np.flatnonzero(nodes.launch_row >= 0)
    rows = rows[nodes.trace.call[nodes.launch_row[rows]] == CallKind.GRAPH_LAUNCH]
    rows = rows[np.argsort(nodes.launch_row[rows], kind="stable")]
    found = [np.zeros((2, 0), np.int32)]
    for members in np.split(rows, np.flatnonzero(np.diff(nodes.launch_row[rows])) + 1):
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
