"""Charts: what is drawn, as plain values; the page's script hands them to plotly.

A colour is a word ("compute", "idle", …) that the style sheet knows, so that a page can be light or dark.
Text that plotly draws may hold its own mark-up, so the script escapes every label before it is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lumos.report.html.table import short

Numbers = Sequence[float] | np.ndarray

_DIGITS = 6  # that count: more cannot be seen, and make files large


@dataclass(frozen=True)
class Series:
    """Numbers of one name and colour; `kind` is what the page's filter may take away."""

    name: str
    colour: str
    values: Numbers
    kind: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"values": rounded(self.values)}


@dataclass(frozen=True)
class Bars:
    """Stacked bars, one a label; `ranks` lets the page's filter choose among them."""

    labels: Sequence[str]
    series: Sequence[Series]
    unit: str = "ms"
    ranks: Sequence[str] = ()
    grouped: bool = False  # beside each other rather than stacked
    named: bool = False  # labels are names that the page's search looks at

    def as_dict(self) -> dict[str, Any]:
        return {
            "type": "bars",
            "labels": [short(label, 64) for label in self.labels],
            "series": [series.as_dict() for series in self.series],
            "unit": self.unit,
            "ranks": list(self.ranks),
            "grouped": self.grouped,
            "named": self.named,
        }


@dataclass(frozen=True)
class Line:
    """A line, or an area below it; `rank` lets the page's filter choose it."""

    name: str
    colour: str
    x: Numbers
    y: Numbers
    rank: str = ""
    steps: bool = False  # holds its value until the next one
    dashed: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"x": rounded(self.x), "y": rounded(self.y)}


@dataclass(frozen=True)
class Lines:
    """Values over something, mostly time."""

    x_title: str
    y_title: str
    lines: Sequence[Line]

    def as_dict(self) -> dict[str, Any]:
        lines = [line.as_dict() for line in self.lines]
        return {"type": "lines", "x_title": self.x_title, "y_title": self.y_title, "lines": lines}


@dataclass(frozen=True)
class Points:
    """Dots of one name and colour with what is said of each; `joined` draws a line through them."""

    name: str
    colour: str
    x: Numbers
    y: Numbers
    labels: Sequence[str] = ()
    sizes: Numbers = ()
    joined: bool = False
    is_bound: bool = False  # a line that limits the dots, and is none of them

    def as_dict(self) -> dict[str, Any]:
        numbers = {"x": rounded(self.x), "y": rounded(self.y), "sizes": rounded(self.sizes)}
        return asdict(self) | numbers | {"labels": [short(label) for label in self.labels]}


@dataclass(frozen=True)
class Scatter:
    """Dots on two axes."""

    x_title: str
    y_title: str
    points: Sequence[Points]
    logarithmic: bool = False

    def as_dict(self) -> dict[str, Any]:
        points = [part.as_dict() for part in self.points]
        return {"type": "scatter", "x_title": self.x_title, "y_title": self.y_title, "points": points,
                "logarithmic": self.logarithmic}  # fmt: skip


@dataclass(frozen=True)
class LaneView:
    """A lane of a timeline."""

    label: str
    rank: str


@dataclass(frozen=True)
class Timeline:
    """Boxes on lanes, as columns; times are milliseconds from the start of the window."""

    lanes: Sequence[LaneView]
    kinds: Sequence[str]  # a box's kind is an index into these, and the word of its colour
    names: Sequence[str]
    lane: Numbers
    kind: Numbers
    name: Numbers
    start: Numbers
    length: Numbers
    count: Numbers  # tasks in the box; more than one where they were too small to be drawn alone
    busy: Numbers  # milliseconds that its tasks take
    path_time: Numbers  # the critical path as points (time, lane)
    path_lane: Numbers
    span_ms: float = field(default=0.0)

    def as_dict(self) -> dict[str, Any]:
        columns = {
            name: rounded(getattr(self, name))
            for name in ("lane", "kind", "name", "start", "length", "count", "busy", "path_time", "path_lane")
        }
        return columns | {
            "type": "timeline",
            "lanes": [{"label": short(lane.label, 40), "rank": lane.rank} for lane in self.lanes],
            "kinds": list(self.kinds),
            "names": [short(name) for name in self.names],
            "span": self.span_ms,
        }


Chart = Bars | Lines | Scatter | Timeline


def rounded(values: Numbers) -> list[float | int | None]:
    """Plain numbers of few digits; None for what is none."""
    found = np.asarray(values)
    if found.dtype.kind in "iub":
        return [int(value) for value in found]
    return [float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None for value in found.astype(float).tolist()]
