"""From a Trace to a Graph: cut into nodes, apply the rules, and attribute every wait and every gap.

After this, simulating the graph unchanged gives the recorded times back. That proves nothing by itself; what counts
is how little of it is frozen. A gap before a kernel is explained as far as the order of its stream, its launch or an
event explains it; the rest is kept as `frozen`, and reported as unexplained.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lumos.data_files import read_table
from lumos.errors import CycleError
from lumos.graph.graph import Bools, Edges, Floats, Graph, Ints, Rule, Small, Times
from lumos.graph.rules.cpu_device import is_cpu_run, with_cpu_device
from lumos.graph.rules.nodes import Nodes, cut_nodes
from lumos.graph.rules.registry import RULES
from lumos.graph.rules.rendezvous import Rendezvous, clock_offsets, find_rendezvous, rendezvous_edges
from lumos.graph.rules.shared_gpu import shared_gpu_edges
from lumos.trace.steps import StepMarks
from lumos.trace.trace import Trace

_LAGS = read_table("trace_rules.toml")["lags"]
_MEASURED_LAGS = read_table("trace_rules.toml")["usual_lags"]
_USUAL = np.array([_LAGS.get(rule.name.lower(), {"usual": 0.0})["usual"] for rule in Rule])
_TOLERANCE = np.array([_LAGS.get(rule.name.lower(), {"tolerance": np.inf})["tolerance"] for rule in Rule])

RULE_NAMES = (*RULES, "collective", "shared_gpu")

# Rules whose edges are given up, in this order, if clocks disagree so much that dependencies form a cycle.
_DOUBTFUL = (
    (Rule.SHARED_GPU,), (Rule.CHANNEL, Rule.COLLECTIVE), (Rule.THREAD, Rule.EVENT), (Rule.SYNC, Rule.QUEUE),
    (Rule.LAUNCH, Rule.GRAPH),
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Execution:
    """A trace, the graph built from it, and how the two belong together.

    execution = build(read_job(Path("traces")))
    simulated = execution.retime(simulate(execution.graph))  # a Trace again
    """

    trace: Trace  # clocks aligned
    nodes: Nodes
    graph: Graph  # its nodes are `nodes`, and one hub a rendezvous after them
    origin: int  # the graph's time zero, on the trace's clock
    rendezvous: list[Rendezvous]
    warnings: tuple[str, ...]
    before: Trace | None = None  # of a run on CPUs: the trace before its operators became kernels

    def __repr__(self) -> str:
        return f"Execution({self.trace!r}, {self.graph!r})"

    @property
    def recorded(self) -> Trace:
        """The trace with its operators as they were recorded, on the same clock."""
        return self.before or self.trace

    def retime(self, times: Times) -> Trace:
        """The trace at simulated times: the same events, other times."""
        nodes, trace = self.nodes, self.trace
        start, duration = trace.start.copy(), trace.duration.copy()
        present = np.flatnonzero(nodes.last_node >= 0)
        begin = np.rint(times.start[nodes.first_node[present]]).astype(np.int64)
        end = np.rint(times.end[nodes.last_node[present]]).astype(np.int64)
        start[present] = begin + self.origin
        duration[present] = end - begin
        self._retime_the_rest(times, start, duration)
        return trace.with_times(start, duration)

    def _retime_the_rest(self, times: Times, start: Ints, duration: Ints) -> None:
        """Events without nodes of their own (empty ones, Python frames, polling) move with their lane."""
        nodes, trace = self.nodes, self.trace
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


def build(trace: Trace, without: Collection[str] = ()) -> Execution:
    """The execution graph of a trace; `without` some of `RULE_NAMES`, to see what they are worth."""
    recorded, trace = trace, with_cpu_device(trace)
    rendezvous, warnings = find_rendezvous(trace)
    offsets = clock_offsets(trace, rendezvous)
    if offsets:
        trace = trace.shifted(offsets)
        worst = max(offsets.values(), key=abs)
        warnings.append(
            f"clocks of {len(offsets)} ranks were aligned by their collectives, by up to {worst / 1e6:.2f} ms"
        )
    nodes = cut_nodes(trace)
    between_ranks, hubs = rendezvous_edges(nodes, [] if "collective" in without else rendezvous)
    found = [rule(nodes) for name, rule in RULES.items() if name not in without]
    graph, origin = timed_graph(nodes, Edges.join([*found, between_ranks]), hubs)
    if "shared_gpu" not in without:
        waiting_for_room = shared_gpu_edges(nodes, _unexplained(graph))
        if len(waiting_for_room):
            graph, origin = timed_graph(nodes, Edges.join([graph.edges, waiting_for_room]), hubs)
    for doubtful in _DOUBTFUL:
        if _has_order(graph):
            break
        keep = ~(np.isin(graph.edges.rule, doubtful) & (graph.edges.lag <= 0))
        if keep.all():
            continue
        warnings.append(f"{(~keep).sum()} inferred dependencies contradict each other and were dropped")
        graph, origin = timed_graph(nodes, graph.edges.select(keep), hubs)
    before = recorded.shifted(offsets) if is_cpu_run(trace) else None
    return Execution(trace, nodes, graph, origin, rendezvous, (*trace.warnings, *warnings), before)


def _unexplained(graph: Graph) -> Floats:
    """The frozen time before every node, its own and its edges'."""
    waits = graph.frozen.copy()
    np.maximum.at(waits, graph.edges.target, graph.edges.frozen)
    return waits


def _has_order(graph: Graph) -> bool:
    try:
        return len(graph.order) == len(graph)
    except CycleError:
        return False


def timed_graph(nodes: Nodes, edges: Edges, hubs: Ints) -> tuple[Graph, int]:
    """Durations, gaps and lags such that the graph, simulated, gives the recorded times."""
    size = len(nodes)
    begins = nodes.start if size else nodes.trace.start  # a trace of nothing but annotations has no nodes
    origin = int(begins.min()) if len(begins) else 0
    start = (np.concatenate([nodes.start, hubs]) - origin).astype(np.float64)
    end = (np.concatenate([nodes.end, hubs]) - origin).astype(np.float64)
    edges = edges.select(np.argsort(edges.target, kind="stable"))

    elastic = _elastic(nodes, edges, len(hubs))
    begun = _begun(start, end, edges, elastic)
    graph = nodes.graph(edges, len(hubs), duration=(end - begun)[:size])
    rigid_edges = ~elastic[edges.target]
    lag, frozen = np.zeros(len(edges)), np.zeros(len(edges))
    # Into an elastic node an edge has no lag, unless clocks disagree: then it may not push the node past its end.
    lag[~rigid_edges] = np.minimum(0.0, (end[edges.target] - end[edges.source])[~rigid_edges])
    gap, gap_frozen = _explain_gaps(nodes, graph, edges, begun, end, rigid_edges, lag, frozen)
    edges = replace(edges, lag=lag, frozen=frozen)
    return replace(graph, gap=gap, frozen=gap_frozen, edges=edges), origin


def _elastic(nodes: Nodes, edges: Edges, hubs: int) -> Bools:
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
    nodes: Nodes, graph: Graph, edges: Edges, start: Floats, end: Floats, rigid: Bools, lag: Floats, frozen: Floats
) -> tuple[Floats, Floats]:
    """Attribute every wait of a rigid node to the lane or edge that decided it; fills the edges' lag and frozen.

    Host segments follow one another without gaps, so only nodes of streams and the first ones of lanes matter.
    """
    on_gpu = np.zeros(len(start), bool)
    on_gpu[: len(nodes)] = nodes.on_gpu
    some = np.flatnonzero(on_gpu | graph.is_first)
    index = np.zeros(len(start), np.int32)
    index[some] = np.arange(len(some))
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
    reached, node = (since + lag[at])[best], index[target[best]]
    wins = reached >= bound[node]
    decided_by[node[wins]] = at[best[wins]]
    bound[node] = np.maximum(bound[node], reached)

    # What is left.
    rest = np.maximum(start[some] - bound, 0.0)
    waits = np.zeros(len(start), bool)
    waits[edges.target[~rigid]] = True
    rest[waits[some]] = 0.0  # an elastic node's wait is in its duration
    by_lane = decided_by < 0
    normal = np.where(head, 0.0, np.minimum(rest, np.where(on_gpu, _TOLERANCE[Rule.ORDER], np.inf)))
    edge = decided_by[~by_lane]
    on_edge = np.minimum(rest[~by_lane], _TOLERANCE[edges.rule[edge]])
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


def _usual_lags(nodes: Nodes, edges: Edges, start: Floats, end: Floats) -> Floats:
    """The usual lag of every rule; between kernels of a busy stream and after a launch, the trace's own medians."""
    usual, limits = _USUAL.copy(), _MEASURED_LAGS
    launch = np.flatnonzero(edges.rule == Rule.LAUNCH)
    source, target = edges.source[launch], edges.target[launch]
    head = nodes.first[nodes.lane[target]] == target
    previous = np.where(head, -np.inf, end[np.maximum(target - 1, 0)])
    gap = start[target] - previous
    queued = (end[source] + limits["queued_ahead"] < previous) & (gap < limits["longest_gap"])
    latency = start[target] - end[source]
    idle = (previous < start[source]) & (np.abs(latency) < limits["longest_launch"])
    for rule, times in ((Rule.ORDER, gap[queued]), (Rule.LAUNCH, latency[idle])):
        if len(times) >= limits["cases"]:
            usual[rule] = float(np.median(times))
    return usual


class Windows(NamedTuple):
    """Steps as (steps, ranks): when each starts and ends, in nanoseconds, and the node that ends it (-1: none)."""

    start: Floats
    end: Floats
    last: Ints

    @property
    def mean(self) -> float:
        """The mean step, in nanoseconds."""
        return float((self.end - self.start).mean())


@dataclass(frozen=True)
class StepNodes:
    """Where the steps of an execution begin and end."""

    execution: Execution
    marks: StepMarks

    def windows(self, times: Times) -> Windows:
        """The steps at these times, as `StepMarks.read` defines them."""
        if self._marked is not None:
            return self._by_marks(times, *self._marked)
        if all(len(nodes) for nodes in self._of_rank) and (self.marks.note < 0).all():
            return self._whole(times)
        steps, origin = self.marks.read(self.execution.retime(times)), self.execution.origin
        start, end = ((value - origin).astype(np.float64) for value in (steps.start, steps.end))
        return Windows(start, end, self._last_before(times, end))

    @cached_property
    def _marked(self) -> tuple[Ints, Ints, Ints] | None:
        """First and last nodes of the marks, and the last node on a GPU; None if a mark is missing or has no nodes."""
        nodes, note = self.execution.nodes, self.marks.note
        if not len(nodes) or (note < 0).any() or (nodes.last_node[note] < 0).any():
            return None
        last = nodes.last_node[note]
        on_gpu = np.where(self.marks.last_on_gpu >= 0, nodes.last_node[self.marks.last_on_gpu], -1)
        return nodes.first_node[note].astype(np.int64), last.astype(np.int64), np.where(on_gpu >= 0, on_gpu, last)

    @staticmethod
    def _by_marks(times: Times, first: Ints, last: Ints, gpu: Ints) -> Windows:
        last = np.where(times.end[gpu] > times.end[last], gpu, last)
        start, end = times.start[first], times.end[last]
        start[1:] = np.maximum(start[1:], np.minimum(end[:-1], end[1:]))
        return Windows(start, end, last)

    @cached_property
    def _of_rank(self) -> list[Ints]:
        """The nodes of every rank that a trace without marks begins and ends with."""
        nodes, trace, found = self.execution.nodes, self.execution.trace, []
        everything = trace.rows_by_rank(np.ones(len(trace), bool))
        for rank, rows in trace.rows_by_rank(self.marks.works).items():
            rows = rows if len(rows) else everything[rank]
            rows = rows[nodes.last_node[rows] >= 0]
            found.append(np.concatenate([nodes.first_node[rows], nodes.last_node[rows]]).astype(np.int64))
        return found

    def _whole(self, times: Times) -> Windows:
        start = np.array([[times.start[nodes].min() for nodes in self._of_rank]])
        last = np.array([[nodes[np.argmax(times.end[nodes])] for nodes in self._of_rank]])
        end = times.end[last]
        if self.marks.together:
            start, last = np.full_like(start, start.min()), np.full_like(last, last[0, np.argmax(end)])
        return Windows(start, times.end[last], last)

    def _last_before(self, times: Times, end: Floats) -> Ints:
        """The last node of each rank that ends within each step."""
        rank, size = self.execution.nodes.rank, len(self.execution.nodes)
        last = np.full(end.shape, -1, np.int64)
        for column, mine in enumerate(self.marks.ranks):
            nodes: Ints = np.flatnonzero(rank == mine)
            for step in range(len(end)):
                inside: Bools = times.end[:size][nodes] <= end[step, column] + 1
                if inside.any():
                    last[step, column] = nodes[inside][np.argmax(times.end[nodes[inside]])]
        return last
