"""Progress of a command and its answer, on a terminal or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import orjson
from rich.console import Console
from rich.progress import Progress


class Reporter(Protocol):
    """Shows how much is done, of how much, and of what."""

    def __call__(self, done: int, total: int, what: str = "reading") -> None: ...


@contextmanager
def progress_bar() -> Iterator[Reporter | None]:
    """A progress bar on a terminal; nothing otherwise."""
    if not sys.stderr.isatty():
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def show(done: int, total: int, what: str = "reading") -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield show


@contextmanager
def busy(text: str) -> Iterator[None]:
    """A spinner on a terminal; nothing otherwise."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(text):
        yield


def print_json(answer: dict[str, object]) -> None:
    sys.stdout.buffer.write(orjson.dumps(answer, option=orjson.OPT_INDENT_2) + b"\n")


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140)
