"""Timeline: tasks on lanes in a window of time, with so few boxes that a browser draws them at once.

Tasks that are too short to be seen and stand close together become one box, which says how many they are, how long
they work and what they mostly are. What counts as too short grows until the boxes are few enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lumos.analysis.run import Run
from lumos.graph.critical_path import PATH_KINDS, task_kinds
from lumos.graph.graph import Bools, Floats, Ints
from lumos.report.html.charts import LaneView, Timeline
from lumos.report.table import Column, Row, Table, ms_digits

KINDS = (*PATH_KINDS[:6], "wait", "forward", "backward", "optimizer")
_PASSES = {"forward": "forward", "backward": "backward", "weights": "backward", "optimizer": "optimizer"}
MOST_BOXES = 4000
MOST_LANES = 24
_MOST_TURNS = 1500  # of the critical path from lane to lane
_FINEST = 4000  # parts of the window: below that nothing can be seen
_LONGEST = 8  # a box of many tasks is at most so many times what counts as too short


@dataclass(frozen=True)
class Tasks:
    """What may be drawn, as columns sorted by lane and time; times are nanoseconds."""

    lane: Ints
    start: Floats
    end: Floats
    kind: Ints
    name: Ints

    def __len__(self) -> int:
        return len(self.lane)

    def select(self, which: Bools) -> Tasks:
        return Tasks(*(getattr(self, column)[which] for column in ("lane", "start", "end", "kind", "name")))

    def inside(self, low: float, high: float) -> Tasks:
        """What touches a window, cut to it; what takes no time is nothing to see."""
        part = self.select((self.end > low) & (self.start < high) & (self.end > self.start))
        return Tasks(part.lane, np.maximum(part.start, low), np.minimum(part.end, high), part.kind, part.name)


@dataclass(frozen=True)
class Path:
    """The critical path: node by node, on which lane from when to when; lane -1 is none."""

    lane: Ints
    start: Floats
    end: Floats

    def inside(self, low: float, high: float) -> Path:
        part = (self.end >= low) & (self.start <= high) & (self.lane >= 0)
        return Path(self.lane[part], np.clip(self.start[part], low, high), np.clip(self.end[part], low, high))


@dataclass(frozen=True)
class Lanes:
    """All lanes there are: what they are called, whose they are, and which are GPU streams."""

    views: Sequence[LaneView]
    is_stream: Bools
    order: Ints  # the place of each from top to bottom


class LaneUse(NamedTuple):
    """A lane in the window: how many tasks, and milliseconds of work and on the critical path."""

    view: LaneView
    tasks: int
    busy_ms: float
    critical_ms: float


class Drawn(NamedTuple):
    """A timeline, and what it leaves out."""

    chart: Timeline
    uses: list[LaneUse]
    tasks: int
    lanes: int  # that have tasks in the window, shown or not
    too_short_ns: float  # tasks below that may share a box

    @property
    def words(self) -> str:
        boxes = len(self.chart.lane)
        words = [f"{self.tasks:,} tasks in {boxes:,} boxes"]
        if self.tasks > boxes:
            short = self.too_short_ns / 1e3
            shown = f"{float(f'{short:.2g}'):,.0f}" if short >= 10 else f"{short:.2g}"
            words.append(f"neighbours shorter than {shown} µs share a paler box in the colour of what takes most of it")
        if self.lanes > len(self.chart.lanes):
            words.append(f"{len(self.chart.lanes)} of {self.lanes} lanes, those of the critical path first")
        return "; ".join(words) + ". Drag to zoom, double-click to go back."


def draw_timeline(
    tasks: Tasks, path: Path, lanes: Lanes, kinds: Sequence[str], names: Sequence[str], window: tuple[float, float]
) -> Drawn:
    """The boxes of a window, and the critical path through them."""
    low, high = window
    tasks, path = tasks.inside(low, high), path.inside(low, high)
    chosen = _chosen_lanes(tasks, path, lanes)
    used = len(np.unique(tasks.lane))
    shown = np.full(len(lanes.views), -1)
    shown[chosen] = np.arange(len(chosen))
    tasks = tasks.select(shown[tasks.lane] >= 0)
    boxes, count, busy, too_short = _few_boxes(tasks, high - low)
    kept, name = np.unique(boxes.name, return_inverse=True)
    times, at = _turns(path, high - low)
    chart = Timeline(
        lanes=[lanes.views[i] for i in chosen],
        kinds=kinds,
        names=[names[i] for i in kept],
        lane=shown[boxes.lane],
        kind=boxes.kind,
        name=name,
        start=(boxes.start - low) / 1e6,
        length=(boxes.end - boxes.start) / 1e6,
        count=count,
        busy=busy / 1e6,
        path_time=(times - low) / 1e6,
        path_lane=shown[at],
        span_ms=(high - low) / 1e6,
    )
    return Drawn(chart, _uses(tasks, path, lanes, chosen), len(tasks), used, too_short)


def _uses(tasks: Tasks, path: Path, lanes: Lanes, chosen: Ints) -> list[LaneUse]:
    size = len(lanes.views)
    count = np.bincount(tasks.lane, minlength=size)
    busy = np.bincount(tasks.lane, tasks.end - tasks.start, size) / 1e6
    critical = np.bincount(path.lane, path.end - path.start, size) / 1e6
    return [LaneUse(lanes.views[i], int(count[i]), float(busy[i]), float(critical[i])) for i in chosen.tolist()]


def lanes_table(drawn: Drawn) -> Table:
    """The numbers of the drawn lanes."""
    span = drawn.chart.span_ms or 1.0
    digits = ms_digits([span])
    columns = [Column("lane"), Column("tasks", 0), Column("occupied, ms", digits), Column("occupied, %", 1, bar=True),
               Column("on the critical path, ms", digits), Column("of the step, %", 1)]  # fmt: skip
    rows = [
        Row([use.view.label, use.tasks, use.busy_ms, 100 * use.busy_ms / span, use.critical_ms,
             100 * use.critical_ms / span], rank=use.view.rank)
        for use in drawn.uses
    ]  # fmt: skip
    return Table("lanes of the timeline", columns, rows)


def _chosen_lanes(tasks: Tasks, path: Path, lanes: Lanes) -> Ints:
    """Lanes of the critical path, then others of its ranks, then all others, each by their use; top to bottom."""
    size = len(lanes.views)
    on_path = np.bincount(path.lane, path.end - path.start + 1, size)
    work = np.bincount(tasks.lane, tasks.end - tasks.start, size)
    ranks = {lanes.views[i].rank for i in np.flatnonzero(on_path).tolist()}
    on_others = np.array([view.rank not in ranks for view in lanes.views], bool)
    by_use = np.lexsort((-work, ~lanes.is_stream, on_others, -on_path))
    used = by_use[(work[by_use] > 0) | (on_path[by_use] > 0)][:MOST_LANES]
    return used[np.argsort(lanes.order[used], kind="stable")]


def _few_boxes(tasks: Tasks, span: float) -> tuple[Tasks, Ints, Floats, float]:
    """Boxes, no more than can be drawn at once, with the count and the time of their tasks; and which share one."""
    too_short = span / _FINEST
    while True:
        first = _first_of_boxes(tasks, too_short)
        if first.sum() <= MOST_BOXES or too_short > span:
            return *_merged(tasks, first), too_short
        too_short *= 1.5


def _first_of_boxes(tasks: Tasks, too_short: float) -> Bools:
    """Which tasks begin a box."""
    first = np.ones(len(tasks), bool)
    if len(tasks) < 2:
        return first
    small = tasks.end - tasks.start < too_short
    near = tasks.start[1:] - tasks.end[:-1] < too_short
    block = np.floor(tasks.start / (_LONGEST * too_short))
    together = (tasks.lane[1:] == tasks.lane[:-1]) & small[1:] & small[:-1] & near & (block[1:] == block[:-1])
    first[1:] = ~together
    return first


def _merged(tasks: Tasks, first: Bools) -> tuple[Tasks, Ints, Floats]:
    """One box for every first task and those that follow it, with the count and the time of its tasks."""
    begins = np.flatnonzero(first)
    box = np.cumsum(first) - 1
    length = tasks.end - tasks.start
    if len(begins) == 0:
        return tasks, begins, length
    kinds = int(tasks.kind.max()) + 1
    by_kind = np.bincount(box * kinds + tasks.kind, length, len(begins) * kinds).reshape(-1, kinds)
    kind = by_kind.argmax(axis=1)
    # The longest task of the kind that takes most of the box gives it its name.
    rank = np.lexsort((length, tasks.kind == kind[box], box))
    last = np.append(begins[1:], len(tasks)) - 1
    end = np.maximum.reduceat(tasks.end, begins)
    boxes = Tasks(tasks.lane[begins], tasks.start[begins], end, kind, tasks.name[rank[last]])
    return boxes, np.diff(np.append(begins, len(tasks))), np.add.reduceat(length, begins)


def _turns(path: Path, span: float) -> tuple[Floats, Ints]:
    """The path as points (time, lane): the ends of every stay on a lane, without stays too short to be seen."""
    lane, start, end = path.lane, path.start, path.end
    too_short = 0.0
    while True:
        keep = (end - start) >= too_short
        lane, start, end = _stays(lane[keep], start[keep], end[keep])
        if len(lane) <= _MOST_TURNS:
            return np.column_stack([start, end]).ravel(), np.repeat(lane, 2)
        too_short = max(2 * too_short, span / _FINEST)


def _stays(lane: Ints, start: Floats, end: Floats) -> tuple[Ints, Floats, Floats]:
    """Neighbours on one lane become one."""
    if len(lane) == 0:
        return lane, start, end
    begins = np.flatnonzero(np.append(True, lane[1:] != lane[:-1]))
    return lane[begins], start[begins], np.maximum.reduceat(end, begins)


# ---------------------------------------------------------------------- the timeline of a run
class RunTimeline(NamedTuple):
    """The step of median length of a run: its name, its timeline, and the kinds of tasks there."""

    step: str
    drawn: Drawn

    @property
    def kinds(self) -> list[str]:
        """For the page's filter."""
        drawn = set(self.drawn.chart.kind)
        return [*(kind for index, kind in enumerate(KINDS) if index in drawn), "critical path"]


def run_timeline(run: Run) -> RunTimeline:
    """What a page draws of a run, traced or described."""
    steps, node = run.steps, run.path.node
    step = int(np.argsort(steps.milliseconds, kind="stable")[(len(steps.names) - 1) // 2])
    window = float(steps.start[step].min() - run.origin), float(steps.end[step].max() - run.origin)
    path = Path(run.node_lane[node].astype(np.int64), run.times.start[node], run.times.end[node])
    names = [*run.trace.names, "not recorded"]
    return RunTimeline(steps.names[step], draw_timeline(_tasks_of(run), path, _lanes_of(run), KINDS, names, window))


def _tasks_of(run: Run) -> Tasks:
    """Every task, and the waiting of every communication kernel for its peers."""
    nodes, trace = run.nodes, run.trace
    start, end = run.task_times
    seen = np.flatnonzero(nodes.row >= 0)  # what no event covers is Python or waiting: left blank
    same = (nodes.row[:-1] == nodes.row[1:]) & (nodes.row[:-1] >= 0)
    arrivals = np.flatnonzero(same & nodes.on_gpu[:-1] & nodes.is_return[1:])  # the next task is the transfer
    both = np.concatenate([seen, arrivals])
    starts = np.concatenate([start[seen], end[arrivals]])
    ends = np.concatenate([end[seen], start[arrivals + 1]])
    kind = np.concatenate([_kinds_of(run)[seen], np.full(len(arrivals), KINDS.index("wait"))])
    order = np.lexsort((starts, nodes.lane[both]))
    lane, name = nodes.lane[both].astype(np.int64), trace.name[nodes.row[both]].astype(np.int64)
    return Tasks(lane[order], starts[order], ends[order], kind[order], name[order])


def _kinds_of(run: Run) -> Ints:
    nodes, trace = run.nodes, run.trace
    schedule = np.array([lane.label == "schedule" for lane in trace.lanes], bool)[nodes.lane]
    passes = np.array([KINDS.index(_PASSES.get(name.partition(" ")[0], "operator")) for name in trace.names])
    return np.where(schedule & (nodes.row >= 0), passes[trace.name[nodes.row]], task_kinds(nodes))


def _lanes_of(run: Run) -> Lanes:
    lanes, several = run.trace.lanes, len(run.trace.ranks) > 1
    views = [LaneView(f"rank {x.rank} {x.text}" if several else x.text, str(x.rank)) for x in lanes]
    key = [(lane.rank, lane.is_stream, len(lane.label), lane.label, i) for i, lane in enumerate(lanes)]
    order = np.empty(len(lanes), np.int64)
    order[[k[-1] for k in sorted(key)]] = np.arange(len(lanes))
    return Lanes(views, np.array([lane.is_stream for lane in lanes], bool), order)
