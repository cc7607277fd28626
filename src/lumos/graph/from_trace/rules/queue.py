"""The launch queue: a stream holds about a thousand pending launches; one more blocks the CPU until a kernel retires.

Without this rule a GPU-bound step looks CPU-bound, because the time that the CPU spends waiting for the queue looks
like its own.
"""

from __future__ import annotations

import numpy as np

from lumos.data_files import read_table
from lumos.graph.from_trace.nodes import Nodes
from lumos.graph.graph import Edges, Rule

_QUEUE = read_table("trace_rules.toml")["queue"]


def queue_edges(nodes: Nodes, depth: int = _QUEUE["depth"]) -> Edges:
    """From the node `depth` positions earlier on a stream to the launch call, if the recorded times allow it."""
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
