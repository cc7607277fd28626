"""The critical path: the chain of tasks and waits that decided when the last step ended."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from lumos.build import Execution
from lumos.graph import Graph, Rule
from lumos.rules.draft import Draft
from lumos.simulate import Times
from lumos.steps import StepMarks, Steps
from lumos.vocabulary import Category, Kind


@dataclass(frozen=True)
class CriticalPath:
    """Nodes from first to last, and for each the rule, edge, lag and frozen time by which it followed."""

    node: np.ndarray
    rule: np.ndarray
    edge: np.ndarray  # -1 where the order of the lane decided
    lag: np.ndarray
    frozen: np.ndarray


def critical_path(graph: Graph, times: Times, last: int, since: float = 0.0) -> CriticalPath:
    """Walk back from a node along whatever decided each start, to a point in time."""
    found = []
    node = last
    while node >= 0 and times.end[node] > since:
        before, edge = _decided_by(graph, times, node)
        if edge >= 0:
            rule, lag, frozen = graph.edges.rule[edge], graph.edges.lag[edge], graph.edges.frozen[edge]
        else:
            rule, lag, frozen = Rule.ORDER, graph.gap[node], graph.frozen[node]
        if before < 0:
            lag, frozen = 0.0, 0.0  # the start of the run is where it is
        found.append((node, rule, edge, lag, frozen))
        node = before
    columns = list(zip(*reversed(found), strict=True)) or [()] * 5
    return CriticalPath(
        np.array(columns[0], np.int64), np.array(columns[1], np.int64), np.array(columns[2], np.int64),
        np.array(columns[3], np.float64), np.array(columns[4], np.float64),
    )  # fmt: skip


def _decided_by(graph: Graph, times: Times, node: int) -> tuple[int, int]:
    """(the node that decided a start, the edge); the edge is -1 for the order of the lane, both for the origin."""
    head = bool(graph.is_first[node])
    best = graph.gap[node] + graph.frozen[node] + (0.0 if head else times.end[node - 1])
    before, chosen = (-1 if head else node - 1), -1
    edges = graph.edges
    for edge in range(graph.incoming[node], graph.incoming[node + 1]):
        source = int(edges.source[edge])
        since = times.start[source] if edges.from_start[edge] else times.end[source]
        reached = since + edges.lag[edge] + edges.frozen[edge]
        if reached > best or (reached == best and chosen < 0):
            best, before, chosen = reached, source, edge
    return before, chosen


def last_node(execution: Execution, marks: StepMarks, steps: Steps) -> int:
    """The node at which the last step ends, on the rank where it ends last; -1 where there is nothing at all."""
    nodes = execution.draft
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
    unexplained_ms: float


def summarise(execution: Execution, times: Times, path: CriticalPath, steps: int) -> PathSummary:
    """What the path is made of, per step."""
    on_path = times.end[path.node] - times.start[path.node]
    by_edge = np.flatnonzero(path.edge >= 0)
    follows_start = by_edge[execution.graph.edges.from_start[path.edge[by_edge]]]
    on_path[follows_start[follows_start > 0] - 1] = 0.0  # what followed did not wait for the end
    kinds: dict[str, float] = defaultdict(float)
    operators: dict[tuple[str, str], float] = defaultdict(float)
    for node, time in zip(path.node.tolist(), on_path.tolist(), strict=True):
        kind, name = _label(execution.draft, node)
        kinds[kind] += time
        operators[kind, name] += time
    kinds["latency"] += float(path.lag.sum())
    kinds["unexplained"] += float(path.frozen.sum())
    scale = 1e6 * max(steps, 1)
    ranked = sorted(((k, n, v / scale) for (k, n), v in operators.items()), key=lambda item: -item[2])
    return PathSummary(
        {k: kinds.get(k, 0.0) / scale for k in PATH_KINDS},
        [item for item in ranked if item[2] > 0][:50],
        float(path.frozen.sum()) / scale,
    )


PATH_KINDS = ("compute", "comm", "copy", "operator", "call", "python", "latency", "unexplained")


def _label(nodes: Draft, node: int) -> tuple[str, str]:
    trace = nodes.trace
    if node >= len(nodes) or nodes.row[node] < 0:
        return ("comm", "rendezvous") if node >= len(nodes) else ("python", "not recorded")
    row = int(nodes.row[node])
    name = trace.names[trace.name[row]]
    if nodes.on_gpu[node]:
        kind = Kind(nodes.kind[node])
        if kind == Kind.COMM:
            return "comm", trace.collective_of(row)
        around = nodes.operator_row[row]
        return kind.name.lower(), trace.names[trace.name[around]] if around >= 0 else name
    category = trace.category[row]
    if category == Category.NOTE:
        return "python", name
    return ("call" if category == Category.CALL else "operator"), name
