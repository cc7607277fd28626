"""Page: a report of any kind as one HTML file.

Everything that comes from a trace or a setup is untrusted: the template escapes it, the data of charts cannot close
their element, and the page's policy lets no script run but the two that were written with it.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import orjson
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from lumos.errors import InputError
from lumos.files import whole_file
from lumos.report.html.charts import Chart
from lumos.report.html.svg import svg_of
from lumos.report.table import Card, Table

_SCRIPT = Path("package_data") / "plotly.min.js"


class Figure(NamedTuple):
    """A chart and what it shows, in words."""

    title: str
    chart: Chart

    @property
    def picture(self) -> Markup:
        """What is seen until the chart is made interactive."""
        return svg_of(self.chart)


@dataclass(frozen=True)
class Section:
    """A part of a page: charts, and tables with the same numbers."""

    title: str
    text: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    texts: Sequence[tuple[str, str]] = ()  # files as they are, each with its name

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
            file.write(part.encode(errors="replace"))


def render(page: Page) -> Iterable[str]:
    """The text of a page, in parts."""
    script = _asset("report.js")
    template = environment().get_template("page.html.j2")
    return template.generate(
        page=page,
        charts=Markup(_json_for_script([figure.chart.as_dict() for figure in page.figures])),
        script=Markup(script),
        style=Markup(_asset("report.css")),
        plotly=Markup(_packed_plotly() if page.figures else ""),
        digests=[_digest(script), _digest(_plotly())],
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


@cache
def _packed_plotly() -> str:
    """Plotly's script as its package ships it, gzip and base64: 4.9 MB become 2, which the page unpacks itself."""
    return base64.b64encode(gzip.compress(_plotly().encode(), 6, mtime=0)).decode()


@cache
def _plotly() -> str:
    spec = find_spec("plotly")  # found, not imported: only the file is wanted
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / _SCRIPT).is_file():
            return (Path(folder) / _SCRIPT).read_bytes().decode("utf-8")
    raise InputError("plotly, which draws the charts of an .html report, is not installed whole: pip install plotly")


@cache
def _digest(script: str) -> str:
    """By which a page's policy knows a script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
