"""The critical path: the chain of tasks and waits that decided when the last step ended.

It runs across ranks, from the start of the first one to the end of the last one, so that over several steps it is a
little longer than the mean step of a rank. Its parts add up to its own length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from lumos.graph.from_trace.build import Execution
from lumos.graph.from_trace.nodes import Nodes
from lumos.graph.graph import Floats, Graph, Ints
from lumos.graph.loops import loops_for
from lumos.graph.simulate import Times
from lumos.trace.names import Category, Kind
from lumos.trace.steps import StepMarks, Steps

PATH_KINDS = ("compute", "comm", "copy", "operator", "call", "python", "latency", "unexplained")
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
    """Walk back from a node along whatever decided each start, to a point in time."""
    edges = graph.edges
    node, edge = loops_for(len(graph)).walk_back(
        last, since, times.start, times.end, graph.is_first, graph.gap + graph.frozen, graph.incoming,
        edges.source, edges.lag + edges.frozen, edges.from_start,
    )  # fmt: skip
    lag, frozen = graph.gap[node], graph.frozen[node]
    by_edge = np.flatnonzero(edge >= 0)
    lag[by_edge], frozen[by_edge] = edges.lag[edge[by_edge]], edges.frozen[edge[by_edge]]
    lag[:1], frozen[:1] = 0.0, 0.0  # the path begins with its first node
    spent = times.end[node] - times.start[node]
    follows_start = by_edge[edges.from_start[edge[by_edge]]]
    spent[follows_start[follows_start > 0] - 1] = 0.0
    return CriticalPath(node, edge, spent, lag, frozen)


def last_node(execution: Execution, marks: StepMarks, steps: Steps) -> int:
    """The node at which the last step ends, on the rank where it ends last; -1 where there is nothing at all."""
    nodes = execution.nodes
    column = int(np.argmax(steps.end[-1]))
    rows = [r for r in (marks.note[-1, column], marks.last_on_gpu[-1, column]) if r >= 0]
    found = [int(nodes.last_node[r]) for r in rows if nodes.last_node[r] >= 0]
    if not found:
        return int(np.argmax(nodes.end)) if len(nodes) else -1
    return max(found, key=lambda n: int(nodes.end[n]))


@dataclass(frozen=True)
class PathSummary:
    """Milliseconds of the critical path per step."""

    by_kind: dict[str, float]
    by_operator: list[tuple[str, str, float]]  # (kind, name, ms), longest first
    by_block: list[tuple[str, int, float]] = field(default_factory=list)  # (block, rank, ms); of described steps

    @property
    def total_ms(self) -> float:
        """The whole path."""
        return sum(self.by_kind.values())

    @property
    def unexplained_ms(self) -> float:
        return self.by_kind["unexplained"]

    @staticmethod
    def of(
        parts: Iterable[tuple[str, str, float]], latency: float, unexplained: float, steps: int = 1,
        blocks: Iterable[tuple[str, int, float]] = (),
    ) -> PathSummary:  # fmt: skip
        """From (kind, name, nanoseconds) of what is on the path of all steps."""
        scale = 1e-6 / max(steps, 1)
        by_kind = dict.fromkeys(PATH_KINDS, 0.0)
        operators = []
        for kind, name, ns in parts:
            by_kind[kind] += float(ns) * scale
            operators.append((kind, name, float(ns) * scale))
        by_kind["latency"], by_kind["unexplained"] = latency * scale, unexplained * scale
        ranked = sorted((item for item in operators if item[2] > 0), key=lambda item: (-item[2], item[:2]))
        in_blocks = sorted(((what, rank, ns * scale) for what, rank, ns in blocks), key=lambda item: -item[2])
        return PathSummary(by_kind, ranked[:_MOST_OPERATORS], in_blocks)


def summarise(execution: Execution, path: CriticalPath, steps: int) -> PathSummary:
    """What the path of a traced run is made of, per step."""
    kind, name, names = _labels(execution, path.node)
    pair, which = np.unique(kind * len(names) + name, return_inverse=True)
    spent = np.bincount(which, path.spent, len(pair))
    parts = (
        (PATH_KINDS[code // len(names)], names[code % len(names)], ns)
        for code, ns in zip(pair.tolist(), spent.tolist(), strict=True)
    )
    return PathSummary.of(parts, float(path.lag.sum()), float(path.frozen.sum()), steps)


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
