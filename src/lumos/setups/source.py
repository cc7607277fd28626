"""A file that a user names: read whole, up to a size, as text."""

from __future__ import annotations

from pathlib import Path

from lumos.errors import InputError

_LARGEST = 4 << 20  # bytes; what describes a run is a few kilobytes


def place_of(path: Path) -> str:
    """A path as a message has it: one line, whatever is in its name."""
    return str(path) if str(path).isprintable() else repr(str(path))


def text_of(path: Path, largest: int = _LARGEST) -> str:
    """The text of a file up to a size, or InputError."""
    where = place_of(path)
    try:
        if not path.is_file():
            what = "is a folder: name a file in it" if path.is_dir() else "does not exist"
            raise InputError(f"{where}: {what}")
        with path.open("rb") as file:
            content = file.read(largest + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise InputError(f"{where}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(content) > largest:
        raise InputError(f"{where}: larger than {largest >> 20} MiB, which what is expected here never is")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{where}: not a text file in UTF-8") from None
