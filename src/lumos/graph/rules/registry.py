"""Dependency rules: each turns one kind of evidence in a trace into edges, and can be tested and removed alone.

A rule is a function from `Nodes` to `Edges`. To add one, write a module here and add its function to RULES. A rule may
only state what the recorded times do not contradict: a node never waits for something that ended after it had to be
done. That alone keeps the graph free of cycles. Thresholds are in `data/trace_rules.toml`. The rendezvous of
collectives across ranks is not in this list, because it adds nodes (see `rendezvous`), and neither is the sharing of a
GPU, because it is judged by what the others leave unexplained (see `shared_gpu`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lumos.graph.graph import Edges
from lumos.graph.rules.channel import channel_edges, communicator_edges
from lumos.graph.rules.event import event_edges
from lumos.graph.rules.launch import graph_edges, launch_edges, queue_edges
from lumos.graph.rules.nodes import Nodes
from lumos.graph.rules.sync import sync_edges
from lumos.graph.rules.thread import gloo_wait_edges, thread_edges

DependencyRule = Callable[[Nodes], Edges]

RULES: Mapping[str, DependencyRule] = MappingProxyType({
    "launch": launch_edges, "graph": graph_edges, "sync": sync_edges, "event": event_edges,
    "communicator": communicator_edges, "channel": channel_edges, "queue": queue_edges, "thread": thread_edges,
    "gloo_wait": gloo_wait_edges,
})  # fmt: skip
