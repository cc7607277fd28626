"""Journal: what a search has done, in a folder, so that an interrupted one goes on where it was.

Every piece is a file of its own, written under another name and renamed: it is whole, or not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path

import numpy as np

from lumos.errors import InputError, OptionError
from lumos.files import whole_file
from lumos.search.front import BOUNDS, Bounds, Found

_LARGEST = 1 << 30  # bytes of one piece
_FOUND = np.dtype([(name, "i8" if name == "number" else "f8") for name in Found._fields])


@dataclass(frozen=True)
class Journal:
    """A folder, or nothing: then nothing is kept."""

    folder: Path | None = None

    @cached_property
    def bounded(self) -> dict[int, tuple[int, Bounds]]:
        """(valid, bounds) of the pieces that are done."""
        found = {}
        for file in sorted(self.folder.glob("bounds-*.npy")) if self.folder else []:
            rows = _read(file, BOUNDS)
            index, valid = (int(part) for part in file.stem.split("-")[1:])
            found[index] = (valid, rows)
        return found

    def keep_bounds(self, index: int, valid: int, rows: Bounds) -> None:
        if self.folder is not None:
            _write(self.folder / f"bounds-{index:07d}-{valid}.npy", rows)

    def waves(self) -> Iterator[list[Found]]:
        """The waves that are done, in order."""
        for file in sorted(self.folder.glob("wave-*.npy")) if self.folder else []:
            yield [Found(int(row[0]), *map(float, list(row)[1:])) for row in _read(file, _FOUND)]

    def keep_wave(self, rows: Sequence[Found]) -> None:
        if self.folder is not None:
            count = sum(1 for _ in self.folder.glob("wave-*.npy"))
            _write(self.folder / f"wave-{count:07d}.npy", np.array(rows, _FOUND))


def journal_in(folder: Path | None, asked: str) -> Journal:
    """The journal of a question; one of another question is refused."""
    if folder is None:
        return Journal()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "question.txt"
        if file.exists():
            if file.read_text("utf-8").strip() != asked:
                raise OptionError(
                    f"{folder} is the journal of another search (other options, or another shard): name another folder"
                )
        elif any(folder.iterdir()):
            raise OptionError(f"{folder} is not empty and not a journal: name another folder")
        else:
            with whole_file(file) as out:
                out.write(asked.encode())
    except OSError as problem:
        raise InputError(f"{folder}: {problem.strerror or problem}; name a folder that can be written") from None
    return Journal(folder)


def _write(path: Path, rows: Bounds) -> None:
    buffer = BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    with whole_file(path) as file:
        file.write(buffer.getvalue())


def _read(path: Path, kind: np.dtype[np.void]) -> Bounds:
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError("too large")
        rows = np.load(path, allow_pickle=False)
        if rows.dtype != kind or rows.ndim != 1:
            raise ValueError("of another kind")
    except (OSError, ValueError, EOFError) as problem:
        raise InputError(f"{path}: not a piece of a journal ({problem}); remove it to have it done again") from None
    return np.asarray(rows)
