"""Journal: a file of samples. JSON lines, the first of which says the GPU; rows are only ever added.

    {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130", "cuda": "13.0"}
    {"op": "gemm", "m": 4096, "n": 4096, "k": 4096, "layout": "TN", "dtype": "bf16", "us": 204.512}
    {"op": "permute", "t": 65536, "h": 20480, "dtype": "bf16", "error": "out of memory"}

A run that was stopped leaves half a line at most, and the next one goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from lumos.errors import InputError, OptionError

Key = tuple[tuple[str, Any], ...]


class Journal:
    """Rows that are there, and a place for those to come."""

    def __init__(self, file: TextIO, done: set[Key]) -> None:
        self._file, self._done = file, done

    def missing(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of the rows that are not there yet."""
        return [row for row in rows if _key(row) not in self._done]

    def add(self, row: dict[str, Any]) -> None:
        """Write a row; it is on disk when this returns, unless the machine itself dies."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._done.add(_key(row))


@contextmanager
def open_journal(path: Path, about: dict[str, Any]) -> Iterator[Journal]:
    """The samples of the GPU that `about` describes, to be added to; InputError if the file is of anything else."""
    try:
        done = _checked(path, str(about["gpu"])) if path.exists() else set()
        with path.open("a", encoding="utf-8") as file:
            journal = Journal(file, done)
            if file.tell() == 0:
                journal.add(about)
            yield journal
    except OSError as error:
        raise OptionError(f"-o {path}: cannot be written ({error.strerror})") from None


def _checked(path: Path, gpu: str) -> set[Key]:
    """The rows of a file that may be added to; half a line at its end is cut off."""
    done = set()
    for _, row in lines_of(path):
        if "gpu" in row and row["gpu"] != gpu:
            raise InputError(f"{path}: holds samples of {row['gpu']}, and this is {gpu}; name another file with -o")
        done.add(_key(row))
    _cut_half_line(path)
    return done


def lines_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, line) of a file of samples; half a line at its end is left out. InputError if it is none."""
    try:
        lines = path.read_text("utf-8").split("\n")[:-1]
    except UnicodeDecodeError:
        raise InputError(f"{path}: not text; name a file that `lumos sample` wrote") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); name a file that `lumos sample` wrote") from None
    if not lines and path.stat().st_size:
        raise InputError(f"{path}: not a file of samples; name one that `lumos sample` wrote")
    for number, line in enumerate(lines, 1):
        place = f"{path}:{number}"
        row = _parsed(line, place)
        if number == 1 and "gpu" not in row:
            raise InputError(f"{place}: does not say the GPU; name a file that `lumos sample` wrote")
        yield place, row


def _parsed(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f"{place}: not JSON; name a file that `lumos sample` wrote") from None
    if not isinstance(row, dict):
        raise InputError(f"{place}: not a row of samples; name a file that `lumos sample` wrote")
    return row


def _cut_half_line(path: Path) -> None:
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)


def _key(row: dict[str, Any]) -> Key:
    return tuple(sorted((name, repr(value)) for name, value in row.items() if name not in ("us", "error")))
