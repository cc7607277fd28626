"""Journal: the progress of a search, in a folder, so that an interrupted search can be resumed.

Every finished chunk is a file of its own, written under a temporary name and then renamed: it is complete or absent.
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
from lumos.search.ranking import BOUNDS, Bounds, Simulated

_MOST_BYTES = 1 << 30  # of one file
_SIMULATED = np.dtype([(name, "i8" if name == "number" else "f8") for name in Simulated._fields])


@dataclass(frozen=True)
class Journal:
    """The journal in a folder; without a folder nothing is kept."""

    folder: Path | None = None

    @cached_property
    def bounded(self) -> dict[int, tuple[int, Bounds]]:
        """(valid configurations, bounds of those that fit) of the finished chunks of layouts."""
        found = {}
        for file in self._files("bounds"):
            index, valid = (int(part) for part in file.stem.split("-")[1:])
            found[index] = (valid, _read(file, BOUNDS))
        return found

    def keep_bounds(self, index: int, valid: int, rows: Bounds) -> None:
        self._write(f"bounds-{index:07d}-{valid}.npy", rows)

    def waves(self) -> Iterator[list[Simulated]]:
        """The finished waves of simulations, in order."""
        for file in self._files("wave"):
            yield [Simulated(*row) for row in _read(file, _SIMULATED).tolist()]

    def keep_wave(self, rows: Sequence[Simulated]) -> None:
        self._write(f"wave-{len(self._files('wave')):07d}.npy", np.array(rows, _SIMULATED))

    def _files(self, kind: str) -> list[Path]:
        return sorted(self.folder.glob(f"{kind}-*.npy")) if self.folder else []

    def _write(self, name: str, rows: Bounds) -> None:
        if self.folder is not None:
            buffer = BytesIO()
            np.save(buffer, rows, allow_pickle=False)
            with whole_file(self.folder / name) as file:
                file.write(buffer.getvalue())


def open_journal(folder: Path | None, question: str) -> Journal:
    """The journal of a search with this fingerprint; a folder that holds anything else is refused."""
    if folder is None:
        return Journal()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "question.txt"
        if file.exists():
            if file.read_text("utf-8").strip() != question:
                raise OptionError(
                    f"{folder} is the journal of another search (other options, or another shard): name another folder"
                )
        elif any(folder.iterdir()):
            raise OptionError(f"{folder} is not empty and not a journal: name another folder")
        else:
            with whole_file(file) as out:
                out.write(question.encode())
    except OSError as problem:
        raise InputError(f"{folder}: {problem.strerror or problem}; name a folder that can be written") from None
    return Journal(folder)


def _read(path: Path, dtype: np.dtype[np.void]) -> Bounds:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("too large")
        rows = np.load(path, allow_pickle=False)
        if rows.dtype != dtype or rows.ndim != 1:
            raise ValueError("another type of table")
    except (OSError, ValueError, EOFError) as problem:
        raise InputError(f"{path}: not part of a journal ({problem}); remove it to repeat that work") from None
    return np.asarray(rows)
