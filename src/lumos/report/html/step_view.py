"""Step view: a forecast step as tasks, lanes and path of a timeline, and its path in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lumos.graph.critical_path import CriticalPath, critical_path
from lumos.graph.graph import Ints
from lumos.prediction.step import Step
from lumos.report.html.charts import LaneView
from lumos.report.html.timeline import Drawn, Lanes, Path, Tasks, draw_timeline

KINDS = ("forward", "backward", "optimizer", "network", "host")
_KIND_OF = {"forward": "forward", "backward": "backward", "weights": "backward", "optimizer": "optimizer"}
_MOST_NAMED = 50_000  # tasks whose micro-batch is said; a larger step has too many to be looked at one by one
_LANE_ORDER = {"host": 0, "compute": 1, "network": 2}


@dataclass(frozen=True)
class StepView:
    """One described step, one rank of every stage."""

    step: Step

    def timeline(self) -> Drawn:
        return draw_timeline(self._tasks, self._path, self._lanes, KINDS, self._labels[1], (0.0, self.step.times.span))

    @cached_property
    def path(self) -> CriticalPath:
        times = self.step.times
        return critical_path(self.step.graph, times, int(np.argmax(times.end)))

    def path_ms(self) -> tuple[dict[tuple[str, int], float], float]:
        """Milliseconds on the critical path by (what, stage), the longest first; and of links and launches."""
        times, path, structure = self.step.times, self.path, self.step.structure
        spent = times.end[path.node] - times.start[path.node]
        by_edge = np.flatnonzero(path.edge >= 0)
        follows_start = by_edge[self.step.graph.edges.from_start[path.edge[by_edge]]]
        spent[follows_start[follows_start > 0] - 1] = 0.0  # what followed did not wait for the end
        found: dict[tuple[str, int], float] = {}
        for role, ns in enumerate(np.bincount(structure.node_role[path.node], spent, len(structure.roles)).tolist()):
            if ns > 0:
                key = (structure.roles[role].what, structure.roles[role].stage)
                found[key] = found.get(key, 0.0) + ns / 1e6
        return dict(sorted(found.items(), key=lambda item: -item[1])), float((path.lag + path.frozen).sum()) / 1e6

    @cached_property
    def _tasks(self) -> Tasks:
        step = self.step
        kind = np.array([KINDS.index(kind_of(role.what)) for role in step.structure.roles], np.int64)
        lane = step.graph.lane.astype(np.int64)
        order = np.lexsort((step.times.start, lane))
        return Tasks(
            lane=lane[order],
            start=step.times.start[order],
            end=step.times.end[order],
            kind=kind[step.structure.node_role][order],
            name=self._labels[0][order],
        )

    @cached_property
    def _labels(self) -> tuple[Ints, list[str]]:
        """The name of every task, as an index into names."""
        structure = self.step.structure
        if len(structure.node_role) > _MOST_NAMED:
            return structure.node_role.astype(np.int64), [role.what for role in structure.roles]
        names: dict[str, int] = {}
        found = [
            names.setdefault(_label(structure.roles[role].what, turn), len(names))
            for role, turn in zip(structure.node_role.tolist(), structure.node_turn, strict=True)
        ]
        return np.array(found, np.int64), list(names)

    @cached_property
    def _path(self) -> Path:
        node, times = self.path.node, self.step.times
        return Path(self.step.graph.lane[node].astype(np.int64), times.start[node], times.end[node])

    @cached_property
    def _lanes(self) -> Lanes:
        lanes = self.step.structure.lanes
        views = [LaneView(f"stage {stage} {name}", str(stage)) for name, stage in lanes]
        key = sorted((stage, _LANE_ORDER.get(name, 3), i) for i, (name, stage) in enumerate(lanes))
        order = np.empty(len(lanes), np.int64)
        order[[k[-1] for k in key]] = np.arange(len(lanes))
        return Lanes(views, np.array([name == "compute" for name, _ in lanes], bool), order)


def kind_of(what: str) -> str:
    """The kind under which the page shows a role."""
    return "host" if what.startswith("host") else _KIND_OF.get(what, "network")


def _label(what: str, turn: object) -> str:
    return what if turn is None else f"{what} micro-batch {getattr(turn, 'microbatch', 0)}"
