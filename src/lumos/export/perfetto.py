"""A run as a Chrome trace, which Perfetto opens: one process a rank, one track a thread or stream.

Arrows show the dependencies between lanes that decided when a task started; those on the critical path are named so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lumos.files import whole_file
from lumos.graph.critical_path import CriticalPath
from lumos.graph.from_trace.build import Execution
from lumos.graph.graph import Graph, Rule
from lumos.graph.simulate import Times
from lumos.trace.names import Category
from lumos.trace.trace import Trace

_CHUNK = 20_000
_CATEGORIES = {
    Category.OP: "cpu_op", Category.CALL: "cuda_runtime", Category.NOTE: "user_annotation", Category.KERNEL: "kernel",
    Category.COPY: "gpu_memcpy", Category.SET: "gpu_memset",
}  # fmt: skip


def write_perfetto(
    path: Path, execution: Execution, graph: Graph, times: Times, trace: Trace, critical: CriticalPath | None = None
) -> None:
    """Write the simulated run with its deciding arrows."""
    import orjson
    from isal import igzip

    events = _events(execution, graph, times, trace, critical)
    with whole_file(path) as file:
        if path.name.endswith(".gz"):
            with igzip.IGzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed:  # type: ignore[no-untyped-call]
                _write(packed, events, orjson.dumps)
        else:
            _write(file, events, orjson.dumps)


def _write(file: Any, events: Iterator[list[dict[str, Any]]], dumps: Any) -> None:
    file.write(b'{"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": [\n')
    first = True
    for chunk in events:
        if chunk:
            file.write((b"" if first else b",\n") + b",\n".join(map(dumps, chunk)))
            first = False
    file.write(b"\n]}\n")


def _events(
    execution: Execution, graph: Graph, times: Times, trace: Trace, critical: CriticalPath | None
) -> Iterator[list[dict[str, Any]]]:
    yield list(_tracks(trace))
    rows = np.flatnonzero(execution.nodes.last_node >= 0)
    for low in range(0, len(rows), _CHUNK):
        yield [_span(trace, int(r), execution.origin) for r in rows[low : low + _CHUNK]]
    on_path = set() if critical is None else set(critical.edge[critical.edge >= 0].tolist())
    deciding = deciding_edges(graph, times)
    for low in range(0, len(deciding), _CHUNK):
        part = deciding[low : low + _CHUNK].tolist()
        yield [arrow for edge in part for arrow in _arrow(execution, graph, times, edge, edge in on_path)]


def deciding_edges(graph: Graph, times: Times) -> np.ndarray:
    """Edges at which their target started, rather than by the order of its lane."""
    edges = graph.edges
    since = np.where(edges.from_start, times.start[edges.source], times.end[edges.source])
    reached = since + edges.lag + edges.frozen
    before = np.where(graph.is_first, 0.0, np.concatenate([[0.0], times.end[:-1]])) + graph.gap + graph.frozen
    start = times.start[edges.target]
    return np.flatnonzero((np.abs(reached - start) < 0.5) & (before[edges.target] < start - 0.5))


def _tracks(trace: Trace) -> Iterator[dict[str, Any]]:
    for rank in trace.ranks:
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for index, lane in enumerate(trace.lanes):
        yield {"ph": "M", "name": "thread_name", "pid": lane.rank, "tid": index, "args": {"name": lane.text}}


def _span(trace: Trace, row: int, origin: int) -> dict[str, Any]:
    lane = int(trace.lane[row])
    return {
        "ph": "X",
        "cat": _CATEGORIES.get(Category(trace.category[row]), "other"),
        "name": trace.names[trace.name[row]],
        "pid": trace.lanes[lane].rank,
        "tid": lane,
        "ts": (int(trace.start[row]) - origin) / 1e3,
        "dur": int(trace.duration[row]) / 1e3,
    }


def _arrow(execution: Execution, graph: Graph, times: Times, edge: int, critical: bool) -> Iterator[dict[str, Any]]:
    source, target = int(graph.edges.source[edge]), int(graph.edges.target[edge])
    nodes = execution.nodes
    if max(source, target) >= len(nodes):
        return  # a rendezvous has no lane; the arrivals around it are visible as they are
    name = "critical path" if critical else Rule(graph.edges.rule[edge]).name.lower()
    since = times.start[source] if graph.edges.from_start[edge] else times.end[source]
    for phase, node, time in (("s", source, since), ("f", target, times.start[target])):
        lane = int(nodes.lane[node])
        yield {
            "ph": phase, "id": edge, "cat": "dependency", "name": name, "bp": "e",
            "pid": execution.trace.lanes[lane].rank, "tid": lane, "ts": float(time) / 1e3,
        }  # fmt: skip
