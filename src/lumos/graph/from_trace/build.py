"""From a Trace to a Graph: cut into nodes, apply the rules, and work out what each wait and each gap is worth.

After this, simulating the graph unchanged gives the recorded times back. That proves nothing by itself; what counts
is how little of it is frozen. A gap before a kernel is explained as far as the order of its stream, its launch or an
event explains it; the rest is kept as `frozen`, and reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lumos.errors import CycleError
from lumos.graph.from_trace.nodes import Draft, draft
from lumos.graph.from_trace.rules.channel import channel_edges, communicator_edges
from lumos.graph.from_trace.rules.cpu_device import gloo_wait_edges, with_cpu_device
from lumos.graph.from_trace.rules.event import event_edges
from lumos.graph.from_trace.rules.launch import graph_edges, launch_edges
from lumos.graph.from_trace.rules.queue import queue_edges
from lumos.graph.from_trace.rules.rendezvous import Meeting, collective_edges, find_meetings
from lumos.graph.from_trace.rules.sync import sync_edges
from lumos.graph.from_trace.rules.thread import thread_edges
from lumos.graph.graph import Bools, Edges, Floats, Graph, Ints, Rule, Small, make_graph
from lumos.graph.simulate import Times
from lumos.trace.clocks import clock_offsets
from lumos.trace.names import Kind
from lumos.trace.trace import Trace

RULES: tuple[Callable[[Draft], Edges], ...] = (
    launch_edges,
    graph_edges,
    sync_edges,
    event_edges,
    communicator_edges,
    channel_edges,
    queue_edges,
    thread_edges,
    gloo_wait_edges,
)

# What an edge or a stream's order normally costs, where the trace itself does not show it, and how much more than
# that still counts as normal. Nanoseconds.
_USUAL = {Rule.ORDER: 1_000.0, Rule.LAUNCH: 1_500.0, Rule.EVENT: 2_000.0, Rule.GRAPH: 1_000.0, Rule.CHANNEL: 0.0}
_TOLERANCE = {
    Rule.ORDER: 5_000.0,
    Rule.LAUNCH: 20_000.0,
    Rule.EVENT: 20_000.0,
    Rule.GRAPH: 5_000.0,
    Rule.CHANNEL: 20_000.0,
}


# What to give up, in this order, where clocks disagree so much that dependencies go in a circle.
_DOUBTFUL = (
    (Rule.CHANNEL, Rule.COLLECTIVE),
    (Rule.THREAD, Rule.EVENT),
    (Rule.SYNC, Rule.QUEUE),
    (Rule.LAUNCH, Rule.GRAPH),
)


@dataclass(frozen=True)
class Execution:
    """A trace, the graph built from it, and how the two belong together."""

    trace: Trace  # clocks aligned
    draft: Draft
    graph: Graph
    origin: int  # the graph's time zero, on the trace's clock
    meetings: list[Meeting]
    warnings: tuple[str, ...]

    @cached_property
    def node_kind(self) -> np.ndarray:
        """The kind of every node, hubs included."""
        return self.graph.kind

    def retime(self, times: Times) -> Trace:
        """The trace as the simulator has it: same events, other times."""
        nodes, trace = self.draft, self.trace
        start, duration = trace.start.copy(), trace.duration.copy()
        present = np.flatnonzero(nodes.last_node >= 0)
        begin = np.rint(times.start[nodes.first_node[present]]).astype(np.int64)
        end = np.rint(times.end[nodes.last_node[present]]).astype(np.int64)
        start[present] = begin + self.origin
        duration[present] = end - begin
        self._retime_the_rest(times, start, duration)
        return trace.with_times(start, duration)

    def _retime_the_rest(self, times: Times, start: Ints, duration: Ints) -> None:
        """Events without nodes of their own (empty ones, Python frames, pollers) move with their lane."""
        nodes, trace = self.draft, self.trace
        absent = np.flatnonzero(nodes.last_node < 0)
        absent = absent[np.argsort(trace.lane[absent], kind="stable")]
        for rows in np.split(absent, np.flatnonzero(np.diff(trace.lane[absent])) + 1):
            lane = trace.lane[rows[0]] if len(rows) else 0
            low, high = nodes.first[lane], nodes.first[lane + 1]
            if low == high or len(rows) == 0:
                continue
            recorded = np.concatenate([nodes.start[low:high], nodes.end[high - 1 : high]]) - self.origin
            simulated = np.concatenate([times.start[low:high], times.end[high - 1 : high]])
            begin = np.rint(np.interp(trace.start[rows] - self.origin, recorded, simulated)).astype(np.int64)
            end = np.rint(np.interp(trace.end[rows] - self.origin, recorded, simulated)).astype(np.int64)
            start[rows] = begin + self.origin
            duration[rows] = end - begin


def build(trace: Trace, rules: tuple[Callable[[Draft], Edges], ...] = RULES) -> Execution:
    """The execution graph of a trace."""
    trace = with_cpu_device(trace)
    meetings, warnings = find_meetings(trace)
    offsets = clock_offsets(trace, meetings)
    if offsets:
        trace = trace.shifted(offsets)
        worst = max(offsets.values(), key=abs)
        warnings.append(
            f"clocks of {len(offsets)} ranks were aligned by their collectives, by up to {worst / 1e6:.2f} ms"
        )
    nodes = draft(trace)
    edges = Edges.join([rule(nodes) for rule in rules])
    meeting_edges, hubs = collective_edges(nodes, meetings)
    edges = Edges.join([edges, meeting_edges])
    graph, origin = _time(nodes, edges, hubs)
    for doubtful in _DOUBTFUL:
        if _has_order(graph):
            break
        keep = ~(np.isin(graph.edges.rule, doubtful) & (graph.edges.lag <= 0))
        warnings.append(f"{(~keep).sum()} inferred dependencies contradict each other and were dropped")
        graph, origin = _time(nodes, graph.edges.select(keep), hubs)
    return Execution(trace, nodes, graph, origin, meetings, (*trace.warnings, *warnings))


def _has_order(graph: Graph) -> bool:
    try:
        return len(graph.order) == len(graph)
    except CycleError:
        return False


def _time(nodes: Draft, edges: Edges, hubs: Ints) -> tuple[Graph, int]:
    """Durations, gaps and lags such that the graph, simulated, gives the recorded times."""
    size = len(nodes)
    origin = int(nodes.start.min(initial=np.iinfo(np.int64).max)) if size else 0
    start = (np.concatenate([nodes.start, hubs]) - origin).astype(np.float64)
    end = (np.concatenate([nodes.end, hubs]) - origin).astype(np.float64)
    first = np.concatenate([nodes.first, size + np.arange(1, len(hubs) + 1)])
    kind = np.concatenate([nodes.kind, np.full(len(hubs), Kind.COMM, np.uint8)])
    edges = edges.select(np.argsort(edges.target, kind="stable"))

    elastic = _elastic(nodes, edges, len(hubs))
    begun = _begun(start, end, edges, elastic)
    graph = make_graph(first, end - begun, edges, kind=kind)
    rigid_edges = ~elastic[edges.target]
    lag, frozen = np.zeros(len(edges)), np.zeros(len(edges))
    # Into an elastic node an edge has no lag, unless clocks disagree: then it may not push the node past its end.
    lag[~rigid_edges] = np.minimum(0.0, (end[edges.target] - end[edges.source])[~rigid_edges])
    gap, gap_frozen = _explain_gaps(nodes, graph, edges, begun, end, rigid_edges, lag, frozen)
    edges = replace(edges, lag=lag, frozen=frozen)
    return replace(graph, gap=gap, frozen=gap_frozen, edges=edges), origin


def _elastic(nodes: Draft, edges: Edges, hubs: int) -> Bools:
    """Nodes whose recorded time includes waiting."""
    elastic = np.concatenate([nodes.is_return, np.zeros(hubs, bool)])
    waits = np.isin(edges.rule, (Rule.QUEUE, Rule.THREAD))
    heads = np.zeros(len(elastic), bool)
    heads[nodes.first[:-1][np.diff(nodes.first) > 0]] = True
    targets = edges.target[waits]
    elastic[targets[~heads[targets]]] = True
    return elastic


def _begun(start: Floats, end: Floats, edges: Edges, elastic: Bools) -> Floats:
    """When each node really began: an elastic one after all that it waited for."""
    begun = start.copy()
    into = elastic[edges.target]
    np.maximum.at(begun, edges.target[into], end[edges.source[into]])
    return np.minimum(begun, end)


def _explain_gaps(
    nodes: Draft, graph: Graph, edges: Edges, start: Floats, end: Floats, rigid: Bools, lag: Floats, frozen: Floats
) -> tuple[Floats, Floats]:
    """Give every wait of a rigid node to the lane or edge that decided; fills lag and frozen of the edges in place.

    Host segments follow one another without gaps, so only nodes of streams and the first ones of lanes are looked at.
    """
    on_gpu = np.zeros(len(start), bool)
    on_gpu[: len(nodes)] = nodes.on_gpu
    some = np.flatnonzero(on_gpu | graph.is_first)
    place = np.zeros(len(start), np.int32)
    place[some] = np.arange(len(some))
    head, on_gpu = graph.is_first[some], on_gpu[some]
    usual = _usual_lags(nodes, edges, start, end)

    # The order of the lane.
    before = np.where(head, 0.0, end[some - 1])
    gap = np.where(on_gpu & ~head, np.clip(start[some] - before, 0.0, usual[Rule.ORDER]), 0.0)
    bound = before + gap
    decided_by = np.full(len(some), -1, np.int64)  # the lane

    # The edges.
    at = np.flatnonzero(rigid)
    source, target = edges.source[at], edges.target[at]
    since = np.where(edges.from_start[at], start[source], end[source])
    lag[at] = np.minimum(start[target] - since, usual[edges.rule[at]])
    best = _last_to_reach(since + lag[at], target)
    reached, node = (since + lag[at])[best], place[target[best]]
    wins = reached >= bound[node]
    decided_by[node[wins]] = at[best[wins]]
    bound[node] = np.maximum(bound[node], reached)

    # What is left.
    rest = np.maximum(start[some] - bound, 0.0)
    waits = np.zeros(len(start), bool)
    waits[edges.target[~rigid]] = True
    rest[waits[some]] = 0.0  # an elastic node's wait is in what it waits for
    by_lane = decided_by < 0
    normal = np.where(head, 0.0, np.minimum(rest, np.where(on_gpu, _TOLERANCE[Rule.ORDER], np.inf)))
    edge = decided_by[~by_lane]
    tolerance = np.array([_TOLERANCE.get(Rule(r), np.inf) for r in range(len(Rule))])
    on_edge = np.minimum(rest[~by_lane], tolerance[edges.rule[edge]])
    lag[edge] += on_edge
    frozen[edge] += rest[~by_lane] - on_edge
    all_gaps, all_frozen = np.zeros(len(start)), np.zeros(len(start))
    all_gaps[some] = gap + np.where(by_lane, normal, 0.0)
    all_frozen[some] = np.where(by_lane, rest - normal, 0.0)
    return all_gaps, all_frozen


def _last_to_reach(reached: Floats, target: Small) -> Ints:
    """For every target, which of its edges reaches it last."""
    order = np.lexsort((reached, target))
    last = np.ones(len(order), bool)
    last[:-1] = target[order][1:] != target[order][:-1]
    return order[last]


def _usual_lags(nodes: Draft, edges: Edges, start: Floats, end: Floats) -> Floats:
    """The usual gap between kernels of a busy stream and after a launch to an idle one, from the trace itself."""
    usual = np.zeros(len(Rule))
    for rule, value in _USUAL.items():
        usual[rule] = value
    launch = np.flatnonzero(edges.rule == Rule.LAUNCH)
    source, target = edges.source[launch], edges.target[launch]
    head = nodes.first[nodes.lane[target]] == target
    previous = np.where(head, -np.inf, end[np.maximum(target - 1, 0)])
    gap = start[target] - previous
    queued = (end[source] + 20_000 < previous) & (gap < 20_000)
    if queued.sum() >= 20:
        usual[Rule.ORDER] = float(np.median(gap[queued]))
    latency = start[target] - end[source]
    idle = (previous < start[source]) & (np.abs(latency) < 50_000)
    if idle.sum() >= 20:
        usual[Rule.LAUNCH] = float(np.median(latency[idle]))
    return usual
