"""Progress of a command and its answer, on a terminal or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.markup import escape
from rich.progress import Progress
from rich.segment import Segment

from lumos.errors import printable
from lumos.files import Writer, json_of, write_as, write_json

if TYPE_CHECKING:
    from lumos.analysis.slowdown import Reporter

_LONGEST_PART_S = 600.0  # parts that take longer than this show no time remaining


@contextmanager
def progress_bar() -> Iterator[Reporter | None]:
    """A progress bar on a terminal; nothing otherwise."""
    if not sys.stderr.isatty():
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True, speed_estimate_period=_LONGEST_PART_S) as bar:
        task = bar.add_task("reading", total=None)

        def show(done: int, total: int, what: str = "reading") -> None:
            if total != bar.tasks[task].total:  # a new part, perhaps resumed: what was done before shows no rate
                bar.reset(task, completed=done, total=total)
            bar.update(task, completed=done, description=_one_line(what))

        yield show


@contextmanager
def busy(text: str) -> Iterator[None]:
    """A spinner on a terminal; nothing otherwise."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(_one_line(text)):
        yield


def _one_line(text: str) -> str:
    """A text with names of files in it, where a terminal updates one line: no control characters, no markup."""
    return escape(printable(text).replace("\n", " "))


def deliver(
    answer: dict[str, Any],
    show: Callable[[dict[str, Any], Console], None],
    as_json: bool,
    output: Path | None = None,
    writers: Mapping[str, Writer] = MappingProxyType({}),
) -> None:
    """Write an answer to a file, as JSON or by one of the writers, and show it as tables or as JSON."""
    if output is not None:
        write_as(output, {".json": lambda to: write_json(to, answer), **writers})
    if as_json:
        print_json(answer)
    else:
        show(answer, console())


def print_json(answer: dict[str, object]) -> None:
    sys.stdout.buffer.write(json_of(answer) + b"\n")


def console() -> Console:
    """Where answers go. Names from files are printed as they are: brackets and colons are no markup.

    Control characters, which could move the cursor or change the title of a window, become spaces.
    """
    answers = Console(width=None if sys.stdout.isatty() else 140, markup=False, emoji=False)
    answers.push_render_hook(_PrintableOnly())
    return answers


class _PrintableOnly(RenderHook):
    """Cleans everything that is printed, so that no table has to remember it."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Printable(renderable) for renderable in renderables]


class _Printable:
    """Something to print, without control characters in its text; those of colours are not part of it."""

    def __init__(self, inner: ConsoleRenderable) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.inner, options):
            yield Segment(text if control else printable(text), style, control)
