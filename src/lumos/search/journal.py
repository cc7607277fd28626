"""Journal: the progress of a search, in a folder, so that an interrupted search can be resumed.

Every finished piece is a file of its own, written under a temporary name and then renamed. Its name says which piece it
is, and its first line is a checksum of the search, the name and the content. A piece that is missing, damaged or not of
this search has no checksum that fits: that piece is done again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import numpy as np

from lumos.errors import InputError, LumosError, OptionError
from lumos.files import whole_file
from lumos.search.ranking import BOUNDS, Bounds, Simulated

_MOST_BYTES = 1 << 30  # of one file
_QUESTION, _QUESTION_BYTES = "question.txt", 200
_PIECE = re.compile(r"\.?(bounds|wave)-[0-9a-f]+\..*|\.?question\.txt.*")  # and what an interrupted write leaves
_SIMULATED = np.dtype([(name, "i8" if name == "number" else "f8") for name in Simulated._fields])


@dataclass
class Journal:
    """The journal of one search in a folder; without a folder nothing is kept."""

    folder: Path | None = None
    question: str = ""
    damaged: list[str] = field(default_factory=list)  # names of the pieces that could not be used

    def bounds(self, index: int) -> tuple[int, Bounds] | None:
        """(valid configurations, bounds of those that fit) of a chunk of layouts, if that is finished."""
        found = self._read(_bounds_name(index), BOUNDS)
        return None if found is None else (found[0], found[1])

    def keep_bounds(self, index: int, valid: int, rows: Bounds) -> None:
        self._write(_bounds_name(index), valid, rows)

    def wave(self, asked: Bounds) -> list[Simulated] | None:
        """The simulations of these configurations, if they are finished."""
        found = self._read(_wave_name(asked), _SIMULATED)
        return None if found is None else [Simulated(*row) for row in found[1].tolist()]

    def keep_wave(self, asked: Bounds, rows: Sequence[Simulated]) -> None:
        self._write(_wave_name(asked), len(rows), np.array(rows, _SIMULATED))

    def _read(self, name: str, dtype: np.dtype[np.void]) -> tuple[int, Bounds] | None:
        if self.folder is None:
            return None
        path = self.folder / name
        try:
            if not path.is_file():  # nor a pipe, which would never end
                return None
            with path.open("rb") as file:
                checksum, _, content = file.read(_MOST_BYTES).partition(b"\n")
            if checksum != self._checksum(name, content):
                raise ValueError("another checksum")
            count, _, table = content.partition(b"\n")
            rows = np.load(BytesIO(table), allow_pickle=False)
            if rows.dtype != dtype or rows.ndim != 1:
                raise ValueError("another type of table")
            return int(count), np.asarray(rows)
        except (OSError, ValueError, EOFError):
            self.damaged.append(name)
            return None

    def _write(self, name: str, count: int, rows: Bounds) -> None:
        if self.folder is None:
            return
        buffer = BytesIO()
        np.save(buffer, rows, allow_pickle=False)
        content = f"{count}\n".encode() + buffer.getvalue()
        try:
            with whole_file(self.folder / name, follow=False) as file:
                file.write(self._checksum(name, content) + b"\n" + content)
        except LumosError as problem:
            raise InputError(f"--journal {self.folder}: {str(problem).removeprefix('-o ')}") from None

    def _checksum(self, name: str, content: bytes) -> bytes:
        return sha256(f"{self.question}\n{name}\n".encode() + content).hexdigest().encode()


def _bounds_name(index: int) -> str:
    return f"bounds-{index:07d}.npy"


def _wave_name(asked: Bounds) -> str:
    """A wave is known by the configurations that it simulates."""
    return f"wave-{sha256(np.ascontiguousarray(asked).tobytes()).hexdigest()[:24]}.npy"


def open_journal(folder: Path | None, question: str) -> Journal:
    """The journal of a search with this fingerprint; a folder that holds anything else is refused."""
    if folder is None:
        return Journal()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stated = _question_of(folder)
        if stated and stated != question:
            raise OptionError(
                f"{folder} is the journal of another search (other options, or another shard): name another folder"
            )
        if not stated:
            if not all(_PIECE.fullmatch(file.name) for file in folder.iterdir()):
                raise OptionError(f"{folder} is not empty and not a journal: name another folder")
            with whole_file(folder / _QUESTION, follow=False) as out:
                out.write(question.encode())
    except (OSError, ValueError) as problem:  # ValueError: a path with a zero byte
        reason = getattr(problem, "strerror", None) or problem
        raise InputError(f"--journal {folder}: {reason}; name a folder that can be written") from None
    return Journal(folder, question)


def _question_of(folder: Path) -> str:
    """The fingerprint in a folder; "" where there is none, or what is there is damaged."""
    file = folder / _QUESTION
    if not file.is_file():
        return ""
    with file.open("rb") as opened:
        text = opened.read(_QUESTION_BYTES).decode("utf-8", "replace").strip()
    return text if re.fullmatch(r"[0-9a-f]{32} \(\d+, \d+\)", text) else ""
