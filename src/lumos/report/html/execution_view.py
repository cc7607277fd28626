"""Execution view: a simulated run of a trace as tasks, lanes and path of a timeline, and its path in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lumos.graph.critical_path import CriticalPath
from lumos.graph.from_trace.build import Execution
from lumos.graph.graph import Graph, Ints
from lumos.graph.simulate import Times
from lumos.report.html.charts import LaneView
from lumos.report.html.timeline import Drawn, Lanes, Path, Tasks, draw_timeline
from lumos.trace.names import Category, Kind
from lumos.trace.steps import Steps

KINDS = ("compute", "comm", "wait", "copy", "operator", "call", "python")
_WAIT = KINDS.index("wait")


@dataclass(frozen=True)
class ExecutionView:
    """One simulated run: recorded, or changed by a what-if."""

    execution: Execution
    graph: Graph
    times: Times
    steps: Steps
    path: CriticalPath

    def timeline(self) -> tuple[str, Drawn]:
        """The name of the step that is shown, the one of median length, and its timeline."""
        step = int(np.argsort(self.steps.milliseconds, kind="stable")[(len(self.steps.names) - 1) // 2])
        low, high = float(self.steps.start[step].min()), float(self.steps.end[step].max())
        window = (low - self.execution.origin, high - self.execution.origin)
        names = [*self.execution.trace.names, "not recorded"]
        return self.steps.names[step], draw_timeline(self._tasks, self._path, self._lanes, KINDS, names, window)

    @cached_property
    def _tasks(self) -> Tasks:
        """Every node, and the waiting of every communication kernel for its peers."""
        nodes, trace = self.execution.nodes, self.execution.trace
        size = len(nodes)
        seen = np.flatnonzero(nodes.row >= 0)  # what no event covers is Python or waiting: left blank
        start, end = self.times.start[:size], self.times.end[:size]
        arrivals = self._arrivals()
        lane = np.concatenate([nodes.lane[seen], nodes.lane[arrivals]]).astype(np.int64)
        starts = np.concatenate([start[seen], end[arrivals]])
        kind = np.concatenate([self._kinds()[seen], np.full(len(arrivals), _WAIT)])
        order = np.lexsort((starts, lane))
        return Tasks(
            lane=lane[order],
            start=starts[order],
            end=np.concatenate([end[seen], start[arrivals + 1]])[order],
            kind=kind[order],
            name=trace.name[nodes.row[np.concatenate([seen, arrivals])]].astype(np.int64)[order],
        )

    def _arrivals(self) -> Ints:
        """Nodes at which a communication kernel arrives; the next node is its transfer."""
        nodes = self.execution.nodes
        same = (nodes.row[:-1] == nodes.row[1:]) & (nodes.row[:-1] >= 0)
        return np.flatnonzero(same & nodes.on_gpu[:-1] & nodes.is_return[1:])

    def _kinds(self) -> Ints:
        nodes, trace = self.execution.nodes, self.execution.trace
        category = trace.category[nodes.row]
        host = np.select(
            [(nodes.row < 0) | (category == Category.NOTE), category == Category.CALL],
            [KINDS.index("python"), KINDS.index("call")],
            KINDS.index("operator"),
        )
        on_gpu = np.zeros(max(Kind) + 1, np.int64)
        for kind, word in ((Kind.COMPUTE, "compute"), (Kind.COMM, "comm"), (Kind.COPY, "copy")):
            on_gpu[kind] = KINDS.index(word)
        return np.where(nodes.on_gpu, on_gpu[nodes.kind], host)

    @cached_property
    def _path(self) -> Path:
        nodes, node = self.execution.nodes, self.path.node
        inside = node < len(nodes)  # a rendezvous is on no lane
        lane = np.where(inside, nodes.lane[np.minimum(node, max(len(nodes) - 1, 0))], -1).astype(np.int64)
        return Path(lane, self.times.start[node], self.times.end[node])

    @cached_property
    def _lanes(self) -> Lanes:
        lanes = self.execution.trace.lanes
        several = len(self.execution.trace.ranks) > 1
        views = [LaneView(f"rank {x.rank} {x.text}" if several else x.text, str(x.rank)) for x in lanes]
        key = [(lane.rank, lane.is_stream, len(lane.label), lane.label, i) for i, lane in enumerate(lanes)]
        order = np.empty(len(lanes), np.int64)
        order[[k[-1] for k in sorted(key)]] = np.arange(len(lanes))
        return Lanes(views, np.array([lane.is_stream for lane in lanes], bool), order)
