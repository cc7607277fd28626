"""The example trace that comes with the package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path


@contextmanager
def example_path() -> Iterator[Path]:
    """The folder of the example's ranks, for as long as it is used."""
    with resources.as_file(resources.files("lumos").joinpath("data/example")) as path:
        yield path
