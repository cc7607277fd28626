"""Charts as SVG: what a page shows at once, before and without any script.

Colours are variables of the style sheet, so that a picture follows the page into the dark. Bars and dots have titles,
which browsers show under the mouse. Every text is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil, floor, isfinite, log10
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from lumos.report.html.charts import Bars, Chart, HeatMap, Lines, Points, Scatter, Series, Timeline
from lumos.report.table import short
from lumos.report.wording import rate_text

WIDTH = 1100.0
_RIGHT, _LETTER = 16.0, 6.4  # pixels: margin, and the width of a letter of 12 pixels on average
_LONGEST_LABEL, _MOST_FLAT = 44, 40
_MOST_TITLES = 2000


class Scale(NamedTuple):
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        if self.logarithmic:
            share = log10(max(value, self.low) / self.low) / (log10(self.high / self.low) or 1.0)
        else:
            share = (value - self.low) / ((self.high - self.low) or 1.0)
        return round(self.start + (self.end - self.start) * share, 1)

    @property
    def ticks(self) -> list[float]:
        """Some five round numbers, or powers of ten."""
        if self.logarithmic:
            return [10.0**n for n in range(ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9) + 1)]
        step = _round_step((self.high - self.low) / 6 or 1.0)
        first = ceil(self.low / step - 1e-9)
        return [step * n for n in range(first, floor(self.high / step + 1e-9) + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** floor(log10(rough))
    return next(size * power for size in (1.0, 2.0, 2.5, 5.0, 10.0) if size * power >= rough * 0.999)


def svg_of(chart: Chart) -> Markup:
    """The picture of a chart."""
    if isinstance(chart, Bars):
        return _flat_bars(chart) if len(chart.labels) <= _MOST_FLAT else _upright_bars(chart)
    if isinstance(chart, Lines):
        return _lines(chart)
    if isinstance(chart, HeatMap):
        return _heat_map(chart)
    return _scatter(chart) if isinstance(chart, Scatter) else _timeline(chart)


class _Picture:
    """Shapes and texts of one picture; `top` is where its plot begins, below the legend."""

    def __init__(self, entries: Sequence[tuple[str, str]]) -> None:
        self.parts: list[Markup] = []
        self.top = 12.0
        if len(entries) > 1:
            self._legend(entries)

    def _legend(self, entries: Sequence[tuple[str, str]]) -> None:
        x = 0.0
        for name, colour in entries:
            label = short(name, 40)
            room = 24 + _LETTER * len(label)
            if x + room > WIDTH:
                x, self.top = 0.0, self.top + 21
            self.rect(x, self.top, 11, 11, colour)
            self.text(x + 16, self.top + 10, label)
            x += room + 12
        self.top += 28

    def rect(self, x: float, y: float, width: float, height: float, colour: str, title: str = "") -> None:
        inner = Markup("<title>{}</title>").format(title) if title else ""
        self.parts.append(
            Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" style="fill:{}">{}</rect>').format(
                x, y, max(width, 0.0), max(height, 0.0), _variable(colour), inner
            )
        )

    def cell(self, x: float, y: float, width: float, height: float, strength: float, title: str) -> None:
        """A cell of a heat map, from the colour of the grid to that of what is worse."""
        self.rect(x, y, width, height, "grid", "" if strength > 0 else title)
        if strength > 0:
            inner = Markup("<title>{}</title>").format(title) if title else ""
            place = Markup('x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"').format(x, y, width, height)
            shape = Markup('<rect {} style="fill:{};fill-opacity:{:.2f}">{}</rect>')
            self.parts.append(shape.format(place, _variable("worse"), strength, inner))

    def text(self, x: float, y: float, text: str, anchor: str = "start", turned: bool = False) -> None:
        turn = Markup(' transform="rotate(-90 {:.1f} {:.1f})"').format(x, y) if turned else ""
        shape = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}"{}>{}</text>')
        self.parts.append(shape.format(x, y, anchor, turn, text))

    def path(self, points: str, colour: str, style: str = "fill:none;stroke-width:1.6") -> None:
        kind = "fill" if "fill:none" not in style else "stroke"
        self.parts.append(Markup('<path d="{}" style="{}:{};{}"/>').format(points, kind, _variable(colour), style))

    def across(self, scale: Scale, top: float, bottom: float, title: str) -> None:
        """A horizontal axis below, with its grid."""
        for tick in scale.ticks:
            x = scale.at(tick)
            self.path(f"M{x} {top:.1f}V{bottom:.1f}", "grid", "fill:none;stroke-width:1")
            self.text(x, bottom + 16, _tick_text(tick), "middle")
        self.text((scale.start + scale.end) / 2, bottom + 34, title, "middle")

    def up(self, scale: Scale, left: float, right: float, title: str) -> None:
        """A vertical axis on the left, with its grid."""
        for tick in scale.ticks:
            y = scale.at(tick)
            self.path(f"M{left:.1f} {y}H{right:.1f}", "grid", "fill:none;stroke-width:1")
            self.text(left - 6, y + 4, _tick_text(tick), "end")
        self.text(14, (scale.start + scale.end) / 2, title, "middle", turned=True)

    def done(self, height: float) -> Markup:
        head = Markup('<svg viewBox="0 0 {:.0f} {:.0f}" class="static" role="img">').format(WIDTH, height)
        return head + Markup("").join(self.parts) + Markup("</svg>")


def _variable(colour: str) -> Markup:
    """A word of ours as a variable of the style sheet."""
    word = "".join(c if c.isalnum() or c == "-" else "-" for c in colour)
    return Markup("var(--{}, var(--plain))").format(word)


def _tick_text(value: float) -> str:
    return f"{value:,.10g}".replace("-", "−")


def _bounds(values: Iterable[float]) -> tuple[float, float]:
    """The least and the largest value, zero among them."""
    found = [float(value) for value in values if value is not None and isfinite(value)]
    low, high = min([0.0, *found]), max([0.0, *found])
    return (low, high) if high > low else (0.0, 1.0)


# ---------------------------------------------------------------------- bars
def _extent(chart: Bars) -> tuple[float, float]:
    """The ends of the longest bars, stacked or beside each other."""
    values = np.nan_to_num(np.atleast_2d([np.asarray(part.values, float) for part in chart.series]))
    if chart.grouped:
        return _bounds(values.ravel().tolist())
    return _bounds([*np.where(values > 0, values, 0).sum(0).tolist(), *np.where(values < 0, values, 0).sum(0).tolist()])


def _stack(chart: Bars, index: int) -> Iterable[tuple[Series, float, float]]:
    """(series, from, to) of the bars of one label."""
    above = below = 0.0
    for part in chart.series:
        value = float(part.values[index]) if index < len(part.values) else 0.0
        value = value if isfinite(value) else 0.0
        if chart.grouped:
            yield part, 0.0, value
        elif value >= 0:
            yield part, above, above + value
            above += value
        else:
            yield part, below, below + value
            below += value


def _hue(part: Series, value: float) -> str:
    return ("worse" if value > 0 else "better") if part.colour == "change" else part.colour


def _flat_bars(chart: Bars) -> Markup:
    picture = _Picture([(part.name, part.colour) for part in chart.series])
    labels = [short(label, _LONGEST_LABEL) for label in chart.labels]
    left = 18 + _LETTER * max((len(label) for label in labels), default=0)
    beside = len(chart.series) if chart.grouped else 1
    row = 14.0 + 12 * beside
    bottom = picture.top + row * max(len(labels), 1)
    low, high = _extent(chart)
    scale = Scale(low, high, left, WIDTH - _RIGHT)
    picture.across(scale, picture.top, bottom, chart.unit)
    for index, label in enumerate(labels):
        y = picture.top + index * row
        picture.text(left - 8, y + row / 2 + 4, label, "end")
        thick = row * 0.72 / beside
        for place, (part, begin, end) in enumerate(_stack(chart, index)):
            x = scale.at(min(begin, end))
            over = y + row * 0.14 + (place * thick if chart.grouped else 0.0)
            title = f"{label}: {part.name} {rate_text(end - begin)} {chart.unit}"
            picture.rect(x, over, scale.at(max(begin, end)) - x, thick, _hue(part, end - begin), title)
    return picture.done(bottom + 42)


def _upright_bars(chart: Bars) -> Markup:
    """Too many labels to be read beside each other: some stand below, and all are in the titles of the bars."""
    picture = _Picture([(part.name, part.colour) for part in chart.series])
    left, bottom = 64.0, picture.top + 250
    low, high = _extent(chart)
    scale = Scale(low, high, bottom, picture.top)
    picture.up(scale, left, WIDTH - _RIGHT, chart.unit)
    room = (WIDTH - _RIGHT - left) / len(chart.labels)
    labels = [short(label, 24) for label in chart.labels]
    every = ceil((20 + _LETTER * max(map(len, labels))) / room)
    for index in range(0, len(labels), every):
        if left + index * room + _LETTER * len(labels[index]) <= WIDTH:
            picture.text(left + index * room, bottom + 16, labels[index])
    for index, label in enumerate(chart.labels):
        for part, begin, end in _stack(chart, index):
            y = scale.at(max(begin, end))
            titled = len(chart.labels) * len(chart.series) <= _MOST_TITLES
            title = f"{short(label, _LONGEST_LABEL)}: {part.name} {rate_text(end - begin)} {chart.unit}"
            height, hue = scale.at(min(begin, end)) - y, _hue(part, end - begin)
            picture.rect(left + index * room, y, 0.72 * room, height, hue, title if titled else "")
    return picture.done(bottom + 26)


# ---------------------------------------------------------------------- lines and dots
def _lines(chart: Lines) -> Markup:
    picture = _Picture([(line.name, line.colour) for line in chart.lines])
    left, bottom = 64.0, picture.top + 240
    xs = Scale(*_bounds(x for line in chart.lines for x in np.asarray(line.x).tolist()), left, WIDTH - _RIGHT)
    ys = Scale(*_bounds(y for line in chart.lines for y in np.asarray(line.y).tolist()), bottom, picture.top)
    picture.across(xs, picture.top, bottom, chart.x_title)
    picture.up(ys, left, WIDTH - _RIGHT, chart.y_title)
    for line in chart.lines:
        dash = ";stroke-dasharray:6 4" if line.dashed else ""
        points = _polyline(
            zip(np.asarray(line.x).tolist(), np.asarray(line.y).tolist(), strict=True), xs, ys, line.steps
        )
        picture.path(points, line.colour, f"fill:none;stroke-width:1.8{dash}")
    return picture.done(bottom + 42)


def _polyline(points: Iterable[tuple[float, float]], xs: Scale, ys: Scale, steps: bool = False) -> str:
    words, pen = [], "M"
    for x, y in points:
        if x is None or y is None or not isfinite(x) or not isfinite(y):
            pen = "M"
            continue
        words.append(f"H{xs.at(x)}V{ys.at(y)}" if steps and pen == "L" else f"{pen}{xs.at(x)} {ys.at(y)}")
        pen = "L"
    return "".join(words)


def _scatter(chart: Scatter) -> Markup:
    picture = _Picture([(part.name, part.colour) for part in chart.points])
    left, bottom = 64.0, picture.top + 350
    xs = _axis(chart, lambda part: part.x, left, WIDTH - _RIGHT)
    ys = _axis(chart, lambda part: part.y, bottom, picture.top)
    picture.across(xs, picture.top, bottom, chart.x_title)
    picture.up(ys, left, WIDTH - _RIGHT, chart.y_title)
    for part in chart.points:
        pairs = list(zip(np.asarray(part.x).tolist(), np.asarray(part.y).tolist(), strict=True))
        if part.is_bound or part.joined:
            dash = ";stroke-dasharray:2 3" if part.is_bound else ""
            picture.path(_polyline(pairs, xs, ys), part.colour, f"fill:none;stroke-width:1.5{dash}")
        if not part.is_bound:
            _dots(picture, part, pairs, xs, ys)
    return picture.done(bottom + 42)


def _axis(chart: Scatter, of: Callable[[Points], Sequence[float] | np.ndarray], start: float, end: float) -> Scale:
    values = [float(v) for part in chart.points for v in np.asarray(of(part)).tolist() if v is not None and isfinite(v)]
    if not chart.logarithmic:
        low, high = min(values, default=0.0), max(values, default=1.0)
        room = 0.05 * (high - low) or 0.5
        return Scale(low - room, high + room, start, end)
    values = [value for value in values if value > 0] or [1.0]
    return Scale(min(values) / 1.5, max(values) * 1.5, start, end, logarithmic=True)


def _dots(picture: _Picture, part: Points, pairs: list[tuple[float, float]], xs: Scale, ys: Scale) -> None:
    sizes = np.asarray(part.sizes).tolist() or [8.0] * len(pairs)
    titled = len(pairs) <= _MOST_TITLES and len(part.texts) == len(pairs)
    for index, ((x, y), size) in enumerate(zip(pairs, sizes, strict=True)):
        if not isfinite(x) or not isfinite(y) or (xs.logarithmic and (x <= 0 or y <= 0)):
            continue
        title = Markup("<title>{}</title>").format(part.texts[index].replace(" | ", "\n")) if titled else ""
        shape = Markup('<circle cx="{}" cy="{}" r="{:.1f}" style="fill:{};fill-opacity:.75">{}</circle>')
        picture.parts.append(shape.format(xs.at(x), ys.at(y), size / 2, _variable(part.colour), title))


# ---------------------------------------------------------------------- cells
def _heat_map(chart: HeatMap) -> Markup:
    """Cells over one another: what is high is strong in colour, what is not known is left out."""
    picture = _Picture([])
    labels = [short(label, _LONGEST_LABEL) for label in chart.labels]
    left = 40 + _LETTER * max((len(label) for label in labels), default=0)
    wide = (WIDTH - _RIGHT - left) / max(len(chart.columns), 1)
    row = min(22.0, max(8.0, 640 / max(len(labels), 1)))
    values = np.asarray(chart.values, float).reshape(len(labels), len(chart.columns))
    titled = values.size <= _MOST_TITLES
    for i, label in enumerate(labels):
        y = picture.top + i * row
        if row >= 11:
            picture.text(left - 8, y + row / 2 + 4, label, "end")
        for j in np.flatnonzero(np.isfinite(values[i])).tolist():
            strength = min(max((values[i, j] - chart.low) / ((chart.high - chart.low) or 1.0), 0.0), 1.0)
            title = f"{label}, {chart.columns[j]}: {rate_text(float(values[i, j]))} {chart.unit}".rstrip()
            picture.cell(left + j * wide, y, wide - 0.6, row - 0.6, strength, title if titled else "")
    bottom = picture.top + row * max(len(labels), 1)
    every = max(1, ceil(len(chart.columns) * (12 + _LETTER * max(map(len, chart.columns), default=1)) / (WIDTH - left)))
    for j in range(0, len(chart.columns), every):
        picture.text(left + (j + 0.5) * wide, bottom + 16, short(chart.columns[j], 24), "middle")
    picture.text((left + WIDTH - _RIGHT) / 2, bottom + 34, chart.x_title, "middle")
    picture.text(14, (picture.top + bottom) / 2, chart.y_title, "middle", turned=True)
    return picture.done(bottom + 42)


# ---------------------------------------------------------------------- the timeline
def _timeline(chart: Timeline) -> Markup:
    """Boxes of one kind are one path: a picture of thousands of boxes stays small."""
    drawn = [(kind, kind) for index, kind in enumerate(chart.kinds) if (np.asarray(chart.kind) == index).any()]
    picture = _Picture([*drawn, ("critical path", "critical path")])
    labels = [short(lane.label, 40) for lane in chart.lanes]
    left = 18 + _LETTER * max((len(label) for label in labels), default=0)
    bottom = picture.top + 26.0 * max(len(labels), 2)
    xs = Scale(0.0, chart.span_ms or 1.0, left, WIDTH - _RIGHT)
    picture.across(xs, picture.top, bottom, "ms")
    for index, label in enumerate(labels):
        picture.text(left - 8, picture.top + 26 * index + 17, label, "end")
    starts, lengths = np.asarray(chart.start, float), np.asarray(chart.length, float)
    for number, kind in enumerate(chart.kinds):
        boxes = np.flatnonzero(np.asarray(chart.kind) == number)
        words = []
        for box in boxes.tolist():
            x, y = xs.at(starts[box]), picture.top + 26 * int(chart.lane[box]) + 3
            width = max(xs.at(starts[box] + lengths[box]) - x, 0.3)
            words.append(f"M{x:.1f} {y:.0f}h{width:.1f}v19h-{width:.1f}z")
        if words:
            picture.path("".join(words), kind, "stroke:none")
    middle = Scale(0.0, 1.0, picture.top + 13, picture.top + 39)
    lanes = [float(lane) if 0 <= lane < len(labels) else float("nan") for lane in np.asarray(chart.path_lane).tolist()]
    picture.path(_polyline(zip(np.asarray(chart.path_time).tolist(), lanes, strict=True), xs, middle), "critical path")
    return picture.done(bottom + 42)
