"""gloo: a thread that waits for a collective on CPUs pauses until it ends."""

from __future__ import annotations

import numpy as np

from lumos.data_files import read_table
from lumos.graph.from_trace.cpu_device import GLOO
from lumos.graph.from_trace.nodes import Nodes
from lumos.graph.from_trace.rules.thread import long_pauses
from lumos.graph.graph import Edges, Rule
from lumos.trace.names import Category

_LONGEST_WAKE = read_table("trace_rules.toml")["cpu_device"]["longest_wake"]


def gloo_wait_edges(nodes: Nodes) -> Edges:
    """From a collective of gloo to the pause of a thread that ends just after it."""
    trace = nodes.trace
    named = np.array([name.startswith(GLOO) for name in trace.names], bool)
    rows = np.flatnonzero((trace.category == Category.KERNEL) & named[trace.name] & (nodes.last_node >= 0))
    sources, targets = [], []
    for pause in long_pauses(nodes).tolist() if len(rows) else []:
        mine = rows[trace.rank[rows] == nodes.rank[pause]]
        ends, end = nodes.end[nodes.last_node[mine]], nodes.end[pause]
        last = mine[(ends > nodes.start[pause]) & (ends < end) & (end - ends < _LONGEST_WAKE)]
        if len(last):
            sources.append(int(nodes.last_node[last[np.argmax(trace.end[last])]]))
            targets.append(pause)
    return Edges.of(sources, targets, Rule.THREAD)
