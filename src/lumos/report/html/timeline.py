"""Timeline: tasks on lanes in a window of time, with so few boxes that a browser draws them at once.

Tasks that are too short to be seen and stand close together become one box, which says how many they are, how long
they work and what they mostly are. What counts as too short grows until the boxes are few enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lumos.graph.graph import Bools, Floats, Ints
from lumos.report.html.charts import LaneView, Timeline
from lumos.report.table import Column, Row, Table, ms_digits

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
            words.append(
                f"neighbours shorter than {self.too_short_ns / 1e3:,.2g} µs share a paler box in the colour of what "
                "takes most of it"
            )
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
    boxes, too_short = _few_boxes(tasks, high - low)
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
        count=boxes.count,
        busy=boxes.busy / 1e6,
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


@dataclass(frozen=True)
class _Boxes:
    lane: Ints
    start: Floats
    end: Floats
    kind: Ints
    name: Ints
    count: Ints
    busy: Floats


def _few_boxes(tasks: Tasks, span: float) -> tuple[_Boxes, float]:
    """Boxes, no more than can be drawn at once, and below what length tasks may share one."""
    too_short = span / _FINEST
    while True:
        first = _first_of_boxes(tasks, too_short)
        if first.sum() <= MOST_BOXES or too_short > span:
            return _merged(tasks, first), too_short
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


def _merged(tasks: Tasks, first: Bools) -> _Boxes:
    """One box for every first task and those that follow it."""
    begins = np.flatnonzero(first)
    box = np.cumsum(first) - 1
    length = tasks.end - tasks.start
    if len(begins) == 0:
        none = np.zeros(0, np.int64)
        return _Boxes(none, length, length, none, none, none, length)
    kinds = int(tasks.kind.max()) + 1
    by_kind = np.bincount(box * kinds + tasks.kind, length, len(begins) * kinds).reshape(-1, kinds)
    kind = by_kind.argmax(axis=1)
    # The longest task of the kind that takes most of the box gives it its name.
    rank = np.lexsort((length, tasks.kind == kind[box], box))
    last = np.append(begins[1:], len(tasks)) - 1
    return _Boxes(
        lane=tasks.lane[begins],
        start=tasks.start[begins],
        end=np.maximum.reduceat(tasks.end, begins),
        kind=kind,
        name=tasks.name[rank[last]],
        count=np.diff(np.append(begins, len(tasks))),
        busy=np.add.reduceat(length, begins),
    )


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
