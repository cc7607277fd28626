"""Page: a report of any kind as one HTML file.

Everything that comes from a trace or a setup is untrusted: the template escapes it, the data of charts cannot close
their element, and the page's policy lets no script run but the two that were written with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import orjson
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from lumos.files import whole_file
from lumos.report.html.bundle import digest, packed_plotly, plotly_digest
from lumos.report.html.charts import Chart
from lumos.report.html.table import Table


class Card(NamedTuple):
    """One number that matters, and what to know about it."""

    label: str
    value: str
    note: str = ""


class Figure(NamedTuple):
    """A chart and what it shows, in words."""

    title: str
    chart: Chart


@dataclass(frozen=True)
class Section:
    """A part of a page: charts, and tables with the same numbers."""

    title: str
    text: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()

    @property
    def anchor(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())


@dataclass(frozen=True)
class Page:
    """A report; `ranks` and `kinds` are what its filters offer."""

    title: str
    subtitle: str
    cards: Sequence[Card]
    sections: Sequence[Section]
    notes: Sequence[str] = ()
    ranks: Sequence[str] = ()
    rank_word: str = "rank"
    kinds: Sequence[str] = ()

    @property
    def figures(self) -> list[Figure]:
        return [figure for section in self.sections for figure in section.figures]


def write_page(path: Path, page: Page) -> None:
    """The whole file, or none."""
    with whole_file(path) as file:
        for part in render(page):
            file.write(part.encode())


def render(page: Page) -> Iterable[str]:
    """The text of a page, in parts."""
    script = _asset("report.js")
    template = environment().get_template("page.html.j2")
    return template.generate(
        page=page,
        charts=Markup(_json_for_script([figure.chart.as_dict() for figure in page.figures])),
        script=Markup(script),
        style=Markup(_asset("report.css")),
        plotly=Markup(packed_plotly() if page.figures else ""),
        digests=[digest(script), plotly_digest()],
        version=_version(),
    )


@cache
def environment() -> Environment:
    """Templates of the package, which escape everything that is not marked as safe."""
    return Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


@cache
def _asset(name: str) -> str:
    return files("lumos").joinpath(f"data/html/{name}").read_text("utf-8")


def _json_for_script(value: object) -> str:
    """JSON that cannot end the element it stands in, whatever names are in it."""
    text = orjson.dumps(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _version() -> str:
    try:
        return version("lumos-sim")
    except PackageNotFoundError:
        return ""
