"""Run view: a simulated run, traced or described, as tasks, lanes and critical path of a timeline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lumos.analysis.run import Run
from lumos.graph.graph import Ints
from lumos.report.html.charts import LaneView
from lumos.report.html.timeline import Drawn, Lanes, Path, Tasks, draw_timeline
from lumos.trace.names import Category, Kind

KINDS = (
    "compute", "comm", "wait", "copy", "operator", "call", "python", "forward", "backward", "optimizer",
)  # fmt: skip
_WAIT, _CALL, _PYTHON, _OPERATOR = (KINDS.index(kind) for kind in ("wait", "call", "python", "operator"))
_PASSES = {"forward": "forward", "backward": "backward", "weights": "backward", "optimizer": "optimizer"}


@dataclass(frozen=True)
class RunView:
    """What a page draws of a run."""

    run: Run

    @cached_property
    def shown(self) -> tuple[str, Drawn]:
        """The name of the step that is shown, the one of median length, and its timeline."""
        steps, origin = self.run.steps, self.run.origin
        step = int(np.argsort(steps.milliseconds, kind="stable")[(len(steps.names) - 1) // 2])
        window = float(steps.start[step].min() - origin), float(steps.end[step].max() - origin)
        names = [*self.run.trace.names, "not recorded"]
        return steps.names[step], draw_timeline(self._tasks, self._path, self._lanes, KINDS, names, window)

    @property
    def kinds(self) -> list[str]:
        """Kinds of tasks that are drawn, for the page's filter."""
        drawn = self.shown[1].chart
        return [*(kind for index, kind in enumerate(KINDS) if index in set(drawn.kind)), "critical path"]

    @cached_property
    def _tasks(self) -> Tasks:
        """Every task, and the waiting of every communication kernel for its peers."""
        nodes, trace = self.run.nodes, self.run.trace
        start, end = self.run.task_times
        seen = np.flatnonzero(nodes.row >= 0)  # what no event covers is Python or waiting: left blank
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
        """Tasks at which a communication kernel arrives; the next task is its transfer."""
        nodes = self.run.nodes
        same = (nodes.row[:-1] == nodes.row[1:]) & (nodes.row[:-1] >= 0)
        return np.flatnonzero(same & nodes.on_gpu[:-1] & nodes.is_return[1:])

    def _kinds(self) -> Ints:
        nodes, trace = self.run.nodes, self.run.trace
        category = trace.category[nodes.row]
        host = np.select(
            [(nodes.row < 0) | (category == Category.NOTE), category == Category.CALL], [_PYTHON, _CALL], _OPERATOR
        )
        on_gpu = np.zeros(max(Kind) + 1, np.int64)
        for kind, word in ((Kind.COMPUTE, "compute"), (Kind.COMM, "comm"), (Kind.COPY, "copy")):
            on_gpu[kind] = KINDS.index(word)
        found = np.where(nodes.on_gpu, on_gpu[nodes.kind], host)
        schedule = np.array([lane.label == "schedule" for lane in trace.lanes], bool)[nodes.lane]
        passes = np.array([KINDS.index(_PASSES.get(name.partition(" ")[0], "operator")) for name in trace.names])
        return np.where(schedule & (nodes.row >= 0), passes[trace.name[nodes.row]], found)

    @cached_property
    def _path(self) -> Path:
        node, times = self.run.path.node, self.run.times
        return Path(self.run.node_lane[node].astype(np.int64), times.start[node], times.end[node])

    @cached_property
    def _lanes(self) -> Lanes:
        lanes = self.run.trace.lanes
        several = len(self.run.trace.ranks) > 1
        views = [LaneView(f"rank {x.rank} {x.text}" if several else x.text, str(x.rank)) for x in lanes]
        key = [(lane.rank, lane.is_stream, len(lane.label), lane.label, i) for i, lane in enumerate(lanes)]
        order = np.empty(len(lanes), np.int64)
        order[[k[-1] for k in sorted(key)]] = np.arange(len(lanes))
        return Lanes(views, np.array([lane.is_stream for lane in lanes], bool), order)
