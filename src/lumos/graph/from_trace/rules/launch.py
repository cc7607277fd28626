"""Launch: a kernel starts after the call that launched it."""

from __future__ import annotations

import numpy as np

from lumos.data_files import read_table
from lumos.graph.from_trace.nodes import Nodes
from lumos.graph.graph import Edges, Rule

_CLOCK_SKEW = read_table("trace_rules.toml")["launch"]["clock_skew"]


def launch_edges(nodes: Nodes) -> Edges:
    """From the call to the first node it put on each stream; the rest of a CUDA graph follows by stream order."""
    rows = np.flatnonzero(nodes.launch_row >= 0)
    rows = rows[np.lexsort((nodes.first_node[rows], nodes.trace.lane[rows], nodes.launch_row[rows]))]
    call, lane = nodes.launch_row[rows], nodes.trace.lane[rows]
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
