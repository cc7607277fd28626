"""The critical path: the chain of tasks and waits that decided when the last step ended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lumos.graph.from_trace.build import Execution
from lumos.graph.graph import Graph
from lumos.graph.simulate import Times
from lumos.trace.names import Category, Kind
from lumos.trace.steps import StepMarks, Steps


@dataclass(frozen=True)
class CriticalPath:
    """Nodes from first to last, and for each the edge, lag and frozen time by which it followed the one before."""

    node: np.ndarray
    edge: np.ndarray  # -1 where the order of the lane decided
    lag: np.ndarray
    frozen: np.ndarray


def critical_path(graph: Graph, times: Times, last: int, since: float = 0.0) -> CriticalPath:
    """Walk back from a node along whatever decided each start, to a point in time."""
    from lumos.graph.compiled_loops import walk_back

    edges = graph.edges
    node, edge = walk_back(
        last, since, times.start, times.end, graph.is_first, graph.gap + graph.frozen, graph.incoming,
        edges.source, edges.lag + edges.frozen, edges.from_start,
    )  # fmt: skip
    lag, frozen = graph.gap[node], graph.frozen[node]
    by_edge = edge >= 0
    lag[by_edge], frozen[by_edge] = edges.lag[edge[by_edge]], edges.frozen[edge[by_edge]]
    lag[:1], frozen[:1] = 0.0, 0.0  # the start of the run is where it is
    return CriticalPath(node, edge, lag, frozen)


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
    unexplained_ms: float


def summarise(execution: Execution, times: Times, path: CriticalPath, steps: int) -> PathSummary:
    """What the path is made of, per step."""
    on_path = times.end[path.node] - times.start[path.node]
    by_edge = np.flatnonzero(path.edge >= 0)
    follows_start = by_edge[execution.graph.edges.from_start[path.edge[by_edge]]]
    on_path[follows_start[follows_start > 0] - 1] = 0.0  # what followed did not wait for the end
    kind, name, names = _labels(execution, path.node)
    pair, which = np.unique(kind * len(names) + name, return_inverse=True)
    spent = np.bincount(which, on_path, len(pair)) / (1e6 * max(steps, 1))
    by_kind = dict.fromkeys(PATH_KINDS, 0.0)
    operators = []
    for code, time in zip(pair.tolist(), spent.tolist(), strict=True):
        label = PATH_KINDS[code // len(names)]
        by_kind[label] += time
        operators.append((label, names[code % len(names)], time))
    by_kind["latency"] = float(path.lag.sum()) / (1e6 * max(steps, 1))
    by_kind["unexplained"] = float(path.frozen.sum()) / (1e6 * max(steps, 1))
    ranked = sorted((item for item in operators if item[2] > 0), key=lambda item: (-item[2], item[:2]))
    return PathSummary(by_kind, ranked[:50], by_kind["unexplained"])


PATH_KINDS = ("compute", "comm", "copy", "operator", "call", "python", "latency", "unexplained")


def _labels(execution: Execution, path: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Kind (an index into PATH_KINDS) and name of nodes: kernels by their operator, host segments by their own."""
    nodes, trace = execution.nodes, execution.trace
    names = [*trace.names, "not recorded", "rendezvous"]
    kind = np.full(len(path), PATH_KINDS.index("comm"))
    name = np.full(len(path), len(names) - 1)
    inside = path < len(nodes)
    row = np.where(inside, nodes.row[np.minimum(path, len(nodes) - 1)], -1)
    on_gpu = inside & nodes.on_gpu[np.minimum(path, len(nodes) - 1)]
    host = inside & ~on_gpu

    category = trace.category[row]
    kind[host] = np.select(
        [row[host] < 0, category[host] == Category.NOTE, category[host] == Category.CALL],
        [PATH_KINDS.index("python"), PATH_KINDS.index("python"), PATH_KINDS.index("call")],
        PATH_KINDS.index("operator"),
    )
    name[host] = np.where(row[host] < 0, len(names) - 2, trace.name[row[host]])
    around = nodes.operator_row[row[on_gpu]]
    name[on_gpu] = trace.name[np.where(around >= 0, around, row[on_gpu])]
    kind[on_gpu] = np.array([_KIND_ON_GPU[k] for k in Kind])[nodes.kind[path[on_gpu]]]
    for i in np.flatnonzero(on_gpu & (kind == PATH_KINDS.index("comm"))):
        collective = trace.collective_of(int(row[i]))
        name[i] = names.index(collective) if collective in names[len(trace.names) :] else len(names)
        if name[i] == len(names):
            names.append(collective)
    return kind, name, names


_KIND_ON_GPU = {
    Kind.CPU: PATH_KINDS.index("operator"),
    Kind.COMPUTE: PATH_KINDS.index("compute"),
    Kind.COMM: PATH_KINDS.index("comm"),
    Kind.COPY: PATH_KINDS.index("copy"),
}
