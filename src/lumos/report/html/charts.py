"""Charts: what is drawn, as plain values; the page's script hands them to plotly.

A colour is a word ("compute", "idle", …) that the style sheet knows, so that a page can be light or dark.
Text that plotly draws may hold its own mark-up, so the script escapes every label before it is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from lumos.report.table import LONGEST, short

Numbers = Sequence[float] | np.ndarray

_DIGITS = 6  # that count: more cannot be seen, and make files large
_LONGEST = {"labels": 64, "label": 40}  # characters of what stands beside a chart; of points, in their own window


class Drawn:
    """A chart or a part of one; its fields are what the page's script reads."""

    def as_dict(self) -> dict[str, Any]:
        return {field.name: _plain(field.name, getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Drawn):
        return value.as_dict()
    if isinstance(value, str):
        return short(value, _LONGEST.get(name, LONGEST))
    if not isinstance(value, Sequence | np.ndarray):
        return value
    parts = len(value) == 0 or isinstance(value[0], str | Drawn)
    return [_plain(name, one) for one in value] if parts else rounded(value)


@dataclass(frozen=True)
class Series(Drawn):
    """Numbers of one name and colour; `kind` is what the page's filter may take away."""

    name: str
    colour: str
    values: Numbers
    kind: str = ""


@dataclass(frozen=True)
class Bars(Drawn):
    """Stacked bars, one a label; `ranks` lets the page's filter choose among them."""

    labels: Sequence[str]
    series: Sequence[Series]
    unit: str = "ms"
    ranks: Sequence[str] = ()
    grouped: bool = False  # beside each other rather than stacked
    named: bool = False  # labels are names that the page's search looks at
    type: str = "bars"


@dataclass(frozen=True)
class Line(Drawn):
    """A line, or an area below it; `rank` lets the page's filter choose it."""

    name: str
    colour: str
    x: Numbers
    y: Numbers
    rank: str = ""
    steps: bool = False  # holds its value until the next one
    dashed: bool = False


@dataclass(frozen=True)
class Lines(Drawn):
    """Values over something, mostly time."""

    x_title: str
    y_title: str
    lines: Sequence[Line]
    type: str = "lines"


@dataclass(frozen=True)
class Points(Drawn):
    """Dots of one name and colour with a text for each; `joined` draws a line through them."""

    name: str
    colour: str
    x: Numbers
    y: Numbers
    texts: Sequence[str] = ()
    sizes: Numbers = ()
    joined: bool = False
    is_bound: bool = False  # a line that limits the dots, and is none of them


@dataclass(frozen=True)
class Scatter(Drawn):
    """Dots on two axes."""

    x_title: str
    y_title: str
    points: Sequence[Points]
    logarithmic: bool = False
    type: str = "scatter"


@dataclass(frozen=True)
class HeatMap(Drawn):
    """Cells in rows and columns, the darker the higher; `values` are row by row."""

    x_title: str
    y_title: str
    columns: Sequence[str]
    labels: Sequence[str]  # of the rows
    values: Numbers
    low: float  # at this and below, a cell is empty
    high: float
    unit: str = ""
    type: str = "heat"


@dataclass(frozen=True)
class LaneView(Drawn):
    """A lane of a timeline."""

    label: str
    rank: str


@dataclass(frozen=True)
class Timeline(Drawn):
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
    span_ms: float = 0.0
    type: str = "timeline"


Chart = Bars | Lines | Scatter | HeatMap | Timeline


def rounded(values: Numbers) -> list[float | int | None]:
    """Plain numbers of few digits; None for what is none."""
    found = np.asarray(values)
    if found.dtype.kind in "iub":
        return [int(value) for value in found]
    return [float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None for value in found.astype(float).tolist()]
