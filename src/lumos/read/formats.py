"""File formats, recognised by content: users rename files, and tools disagree about extensions."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import TypeVar

import msgspec

from lumos.errors import InputError
from lumos.files import open_file
from lumos.read.json_slices import BAD_GZIP, open_bytes

HEAD_BYTES = 1 << 18
_SQLITE = b"SQLite format 3\x00"
MOST_VARINT_BYTES = 5  # a length fits 32 bits
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TAR = slice(257, 262)  # where a tar file says so

Content = TypeVar("Content")


class Form(Enum):
    """The formats that are recognised."""

    KINETO = "a Kineto trace"
    CHAKRA = "a Chakra execution trace"
    CHAKRA_JSON = "a Chakra graph as JSON"
    NSYS = "an export of Nsight Systems"
    TIMELINE = "a timeline that Lumos wrote"
    EXECUTION = "a PyTorch execution trace"
    ARCHIVE = "an archive"
    JSON_LIST = "a JSON list"
    OTHER = "something else"


def head_of(path: Path) -> bytes | None:
    """The first bytes of a file, decompressed; None if it cannot be read."""
    try:
        with open_bytes(path) as file:
            return file.read(HEAD_BYTES).removeprefix(_BYTE_ORDER_MARK).lstrip()
    except (InputError, *BAD_GZIP):  # type: ignore[misc]
        return None


def decode_file(path: Path, content: type[Content], most: int, what: str, advice: str) -> Content:
    """A JSON file of at most so many bytes, decompressed, as a type of msgspec; `what` says what it should be."""
    try:
        with open_bytes(path) as file:
            text = file.read(most + 1)
        if len(text) > most:
            raise InputError(f"{path}: more than {most >> 20} MiB of JSON; {advice}")
        return msgspec.json.decode(text, type=content)
    except BAD_GZIP as error:
        raise InputError(f"{path}: not a readable file ({error}); copy or record it again") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not {what} ({error})") from None


def is_gzip(path: Path) -> bool:
    """Whether a file begins as gzip does; an unreadable one does not, and reading it will say what is wrong."""
    try:
        with open_file(path, "") as file:
            return file.read(2) == b"\x1f\x8b"
    except (OSError, InputError):
        return False


def form_of(path: Path, head: bytes | None) -> Form:
    """The format of a file from its first bytes; for an unreadable file, the Kineto reader reports the error."""
    if head is None:
        return Form.KINETO
    if head.startswith(_SQLITE):
        return Form.NSYS
    if head[_TAR] == b"ustar":
        return Form.ARCHIVE
    if head[:1] in (b"{", b"["):
        return _form_of_json(head)
    return Form.CHAKRA if path.name.endswith(".et") or _looks_like_chakra(head, path.stat().st_size) else Form.OTHER


def _form_of_json(head: bytes) -> Form:
    if b'"lumosTimeline"' in head[:1000]:
        return Form.TIMELINE
    if b'"traceEvents"' in head or (head[:1] == b"[" and b'"ph"' in head):
        return Form.KINETO
    if b'"workload_graph"' in head:
        return Form.CHAKRA_JSON
    if b'"nodes"' in head:
        return Form.EXECUTION if b'"rf_id"' in head or b'"schema"' in head else Form.OTHER
    if head[:1] == b"[" and re.match(rb"\[\s*\{", head):
        return Form.JSON_LIST
    return Form.KINETO if head[:1] == b"{" and len(head) > HEAD_BYTES // 2 else Form.OTHER


def _looks_like_chakra(head: bytes, file_size: int) -> bool:
    """Whether a file begins as a Chakra trace does: a length, then metadata whose first field is one of its two."""
    try:
        size, start = varint(head)
        if size == 0:
            return head[start + 1 : start + 2] in (b"\x08", b"\x12")  # no metadata; then a node
        inside, used = varint(head[start + 1 :])
    except ValueError:
        return False
    fits = size <= file_size - start and 1 + used + inside <= size
    return fits and head[start : start + 1] in (b"\x0a", b"\x12")


def varint(head: bytes) -> tuple[int, int]:
    """A varint of at most 32 bits, and how many bytes it took."""
    value = 0
    for place, byte in enumerate(head[:MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            if value >= 1 << 32:
                break
            return value, place + 1
    raise ValueError("no length")
