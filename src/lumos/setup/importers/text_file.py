"""A file that a user names: read whole, up to a size, as text."""

from __future__ import annotations

import codecs
from pathlib import Path

from lumos.errors import InputError

_LARGEST = 4 << 20  # bytes; what describes a run is a few kilobytes


def place_of(path: Path) -> str:
    """A path as a message has it: one line, whatever is in its name."""
    return str(path) if str(path).isprintable() else repr(str(path))


def text_of(path: Path, largest: int = _LARGEST) -> str:
    """The text of a file up to a size, or InputError."""
    text, whole = beginning_of(path, largest)
    if not whole:
        raise InputError(f"{place_of(path)}: larger than {largest >> 20} MiB, which what is expected here never is")
    return text


def beginning_of(path: Path, largest: int = _LARGEST) -> tuple[str, bool]:
    """The first bytes of a file as text, and whether they are all of it."""
    where = place_of(path)
    try:
        if not path.is_file():
            what = "is a folder: name a file in it" if path.is_dir() else "does not exist"
            raise InputError(f"{where}: {what}")
        with path.open("rb") as file:
            content = file.read(largest + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise InputError(f"{where}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    whole = len(content) <= largest
    try:
        return codecs.getincrementaldecoder("utf-8-sig")().decode(content[:largest], final=whole), whole
    except UnicodeDecodeError:
        raise InputError(f"{where}: not a text file in UTF-8") from None
