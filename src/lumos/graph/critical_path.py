"""The critical path: the chain of tasks and waits that decides when a step ends.

A path runs across ranks. Each rank has its own, which ends with its last step; `step_path` is their mean, whose parts
add up to the mean step. Work that becomes faster by a factor f shortens the step by at most (1 - 1/f) of its share of
the path, because the step is the longest of all paths and this is one of them. It shortens the step by less if another
path is nearly as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from lumos.graph.graph import Bools, Floats, Graph, Ints, Times
from lumos.graph.loops import loops_for
from lumos.graph.rules.build import Execution, Windows
from lumos.graph.rules.nodes import Nodes
from lumos.trace.names import Category, Kind
from lumos.trace.steps import StepMarks, Steps

SLOW_PARTS = "slow parts"  # of the cluster: what they add to a predicted step
PATH_KINDS = ("compute", "comm", "copy", "operator", "call", "python", "contention", "latency", "unexplained")
_COMPUTE, _COMM, _COPY, _OPERATOR, _CALL, _PYTHON = range(6)
_MOST_OPERATORS = 50


@dataclass(frozen=True)
class CriticalPath:
    """Nodes from first to last, and for each the edge, lag and frozen time by which it followed the one before."""

    node: Ints
    edge: Ints  # -1 where the order of the lane decided
    spent: Floats  # nanoseconds of the node itself; 0 where the next node did not wait for its end
    lag: Floats
    frozen: Floats


def critical_path(graph: Graph, times: Times, last: int, since: float = 0.0) -> CriticalPath:
    """Walk back from a node along whatever decided each start, to a point in time.

    The parts of the path add up to the time from `since` to the end of `last`, and none is negative: if a node starts
    before the one that it follows has ended, the latter counts up to that moment.
    """
    edges = graph.edges
    node, edge = loops_for(len(graph)).walk_back(
        last, since, times.start, times.end, graph.is_first, graph.gap + graph.frozen, graph.incoming,
        edges.source, edges.lag + edges.frozen, edges.from_start,
    )  # fmt: skip
    if not len(node):
        none = np.zeros(0)
        return CriticalPath(node, edge, none, none, none)
    bounds = np.append(times.start[node], times.end[node[-1]])
    bounds = np.maximum(np.minimum.accumulate(bounds[::-1])[::-1], since)
    spent = np.clip(np.minimum(times.end[node], bounds[1:]) - bounds[:-1], 0.0, None)
    by_edge = np.flatnonzero(edge >= 0)
    follows_start = by_edge[edges.from_start[edge[by_edge]]]
    spent[follows_start[follows_start > 0] - 1] = 0.0
    waited = np.concatenate([[bounds[0] - since], (np.diff(bounds) - spent)[:-1]])  # before each node
    frozen = graph.frozen[node]
    frozen[by_edge] = edges.frozen[edge[by_edge]]
    frozen = np.minimum(frozen, waited)
    frozen[0] = waited[0]  # nothing before the first node of the path explains its start
    return CriticalPath(node, edge, spent, waited - frozen, frozen)


@dataclass(frozen=True)
class StepPath:
    """Nanoseconds of the mean step that the critical paths of all ranks spend in each node and between nodes.

    Each rank has a path from the end of its last step back to the start of its first one. Their mean adds up to the
    mean step, and is the derivative of the mean step with respect to the duration of each node.
    """

    spent: Floats
    slowed: Floats  # the part of `spent` that a kernel loses to communication beside it
    latency: float
    unexplained: float

    def share(self, nodes: Bools) -> float:
        """The share of the step that the path spends in some nodes."""
        return float(self.spent[nodes].sum()) / self.total if self.total else 0.0

    @property
    def total(self) -> float:
        return float(self.spent.sum()) + self.latency + self.unexplained

    @property
    def contention(self) -> float:
        """The share of the step that kernels lose to communication beside them."""
        return float(self.slowed.sum()) / self.total if self.total else 0.0


def step_path(graph: Graph, times: Times, windows: Windows, slowed: Floats | None = None) -> StepPath:
    """The mean critical path of all ranks and steps; steps that follow one another have one path.

    `slowed` is the share of each duration that a kernel loses to communication beside it.
    """
    spent, latency, unexplained = np.zeros(len(graph)), 0.0, 0.0
    ends = np.ones(windows.last.shape, bool)
    ends[:-1] = windows.start[1:] > windows.end[:-1]
    walks: dict[tuple[int, float], int] = {}
    for column in range(windows.last.shape[1]):
        begin = 0
        for step in np.flatnonzero(ends[:, column]).tolist():
            key = int(windows.last[step, column]), float(windows.start[begin, column])
            walks[key] = walks.get(key, 0) + 1
            begin = step + 1
    for (last, since), count in walks.items():
        if last >= 0:
            path, weight = critical_path(graph, times, last, since), count / windows.last.size
            np.add.at(spent, path.node, path.spent * weight)
            latency += float(path.lag.sum()) * weight
            unexplained += float(path.frozen.sum()) * weight
    return StepPath(spent, spent * (0.0 if slowed is None else slowed), latency, unexplained)


def last_node(execution: Execution, marks: StepMarks, steps: Steps) -> int:
    """The node at which the last step ends, on the rank where it ends last; -1 where there is nothing at all."""
    nodes = execution.nodes
    column = int(np.argmax(steps.end[-1]))
    rows = [r for r in (marks.note[-1, column], marks.last_on_gpu[-1, column]) if r >= 0]
    found = [int(nodes.last_node[r]) for r in rows if nodes.last_node[r] >= 0]
    if not found:
        return int(np.argmax(nodes.end)) if len(nodes) else -1
    return max(found, key=lambda n: int(nodes.end[n]))


@dataclass(frozen=True, repr=False)
class PathSummary:
    """Milliseconds of the critical path per step."""

    by_kind: dict[str, float]  # "contention": what kernels lose to communication beside them
    by_operator: list[tuple[str, str, float]]  # (kind, name, ms), longest first
    by_block: list[tuple[str, int, float]] = field(default_factory=list)  # (block, rank, ms); of described steps

    def __repr__(self) -> str:
        parts = [f"{kind} {ms:,.2f}" for kind, ms in self.by_kind.items() if ms]
        return f"PathSummary({', '.join([f'{self.total_ms:,.2f} ms', *parts])})"

    @property
    def total_ms(self) -> float:
        """The whole path."""
        return sum(self.by_kind.values())

    @property
    def unexplained_ms(self) -> float:
        return self.by_kind["unexplained"]

    @staticmethod
    def of(
        parts: Iterable[tuple[str, str, float]], latency: float, unexplained: float,
        blocks: Iterable[tuple[str, int, float]] = (), contention: float = 0.0, slow: float = 0.0,
    ) -> PathSummary:  # fmt: skip
        """From (kind, name, nanoseconds) of what is on the path of a step."""
        scale = 1e-6
        by_kind = dict.fromkeys(PATH_KINDS, 0.0)
        operators = []
        for kind, name, ns in parts:
            by_kind[kind] += float(ns) * scale
            operators.append((kind, name, float(ns) * scale))
        for kind, ns in (("contention", contention), ("latency", latency), ("unexplained", unexplained)):
            by_kind[kind] = ns * scale
        if slow > 0:
            by_kind[SLOW_PARTS] = slow * scale
        ranked = sorted((item for item in operators if item[2] > 0), key=lambda item: (-item[2], item[:2]))
        in_blocks = sorted(((what, rank, ns * scale) for what, rank, ns in blocks), key=lambda item: -item[2])
        return PathSummary(by_kind, ranked[:_MOST_OPERATORS], in_blocks)


def summarise(execution: Execution, path: StepPath, scale: float = 1.0) -> PathSummary:
    """What the path of a traced step is made of; all times are multiplied by `scale`."""
    node = np.flatnonzero(path.spent)
    kind, name, names = _labels(execution, node)
    pair, which = np.unique(kind * len(names) + name, return_inverse=True)
    spent = np.bincount(which, (path.spent - path.slowed)[node] * scale, len(pair))
    parts = (
        (PATH_KINDS[code // len(names)], names[code % len(names)], ns)
        for code, ns in zip(pair.tolist(), spent.tolist(), strict=True)
    )
    contention = float(path.slowed.sum()) * scale
    return PathSummary.of(parts, path.latency * scale, path.unexplained * scale, contention=contention)


def task_kinds(nodes: Nodes) -> Ints:
    """What every task of a trace is, as an index into PATH_KINDS."""
    category = nodes.trace.category[nodes.row]
    host = np.select(
        [(nodes.row < 0) | (category == Category.NOTE), category == Category.CALL], [_PYTHON, _CALL], _OPERATOR
    )
    on_gpu = np.full(max(Kind) + 1, _OPERATOR)
    on_gpu[[Kind.COMPUTE, Kind.COMM, Kind.COPY]] = _COMPUTE, _COMM, _COPY
    return np.where(nodes.on_gpu, on_gpu[nodes.kind], host)


def _labels(execution: Execution, path: Ints) -> tuple[Ints, Ints, list[str]]:
    """Kind (an index into PATH_KINDS) and name of nodes: kernels by their operator, host segments by their own."""
    nodes, trace = execution.nodes, execution.trace
    names = [*trace.names, "not recorded", "rendezvous"]
    kind = np.append(task_kinds(nodes), _COMM)[np.minimum(path, len(nodes))]
    inside = path < len(nodes)
    at = np.minimum(path, len(nodes) - 1)
    row = np.where(inside, nodes.row[at], -1)
    around = np.where(nodes.on_gpu[at], nodes.operator_row[row], -1)
    name = np.where(inside, trace.name[np.where(around >= 0, around, row)], len(names) - 1)
    name[inside & (row < 0)] = len(names) - 2
    for i in np.flatnonzero(inside & (kind == _COMM)):
        collective = trace.collective_of(int(row[i]))
        if collective not in names[len(trace.names) :]:
            names.append(collective)
        name[i] = names.index(collective, len(trace.names))
    return kind, name, names
