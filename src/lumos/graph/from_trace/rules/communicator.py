"""Communicators: NCCL starts the kernels of one communicator in the order of their launches, on whichever streams."""

from __future__ import annotations

import numpy as np

from lumos.graph.from_trace.nodes import Nodes
from lumos.graph.graph import Edges, Rule
from lumos.trace.names import Kind


def communicator_edges(nodes: Nodes) -> Edges:
    """From one kernel of a communicator to its next one, if that is on another stream."""
    trace = nodes.trace
    arrive = np.flatnonzero((nodes.kind == Kind.COMM) & ~nodes.is_return & (nodes.launch_of_node >= 0))
    arrive = arrive[trace.message[nodes.row[arrive]] >= 0]
    if len(arrive) == 0:
        return Edges.of([], [], Rule.EVENT)
    messages = (trace.messages[m] for m in trace.message[nodes.row[arrive]])
    named = [(rank, m.group, m.ranks) for rank, m in zip(nodes.rank[arrive].tolist(), messages, strict=True)]
    number = {communicator: i for i, communicator in enumerate(dict.fromkeys(named))}
    key = np.array([number[communicator] for communicator in named])
    arrive = arrive[np.lexsort((nodes.launched_at[arrive], key))]
    key = np.sort(key, kind="stable")
    source, target = arrive[:-1] + 1, arrive[1:]  # from the transfer of one to the arrival of the next
    follows = (key[1:] == key[:-1]) & (nodes.lane[source] != nodes.lane[target])
    possible = follows & (nodes.end[source] <= nodes.start[target])
    return Edges.of(source[possible], target[possible], Rule.EVENT)
