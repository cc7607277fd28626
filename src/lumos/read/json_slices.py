"""The events of a Chrome-trace JSON file, in slices of bounded size.

A profiler's file can be larger than memory once decoded, so it is decompressed, cut and decoded a few megabytes
at a time. A cut is only a guess at the end of an event (`},{` or `}],"`); that it was right is proved by the slice
decoding as JSON: a cut inside an event leaves a bracket or a string open. Where guesses fail, because the text is
unusual or damaged, events are decoded one by one and the broken ones left out.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import msgspec
from isal import igzip, isal_zlib

from lumos.errors import InputError
from lumos.files import open_file

SLICE_BYTES = 8 << 20
_HEAD_BYTES = 4096  # enough to tell what kind of file it is
_HEADER_LIMIT = 64 << 20
_EVENT_LIMIT = 8 << 20  # no event is longer: one whose end is not found within it is broken
_MOST_LOST = 100_000  # events that are not JSON, after which a file is damage rather than damaged
_MOST_UNPACKED = 200  # times the size of a gzip file; profilers' traces unpack to some 10 to 30 times
_ALWAYS_UNPACKED = 256 << 20  # bytes, whatever the size of the file
_PIECE = 1 << 14  # most events are shorter
_TRIES = 8  # guesses at the end of an event
# Blanks are matched possessively (*+): trying fewer of them is of no use, and takes the square of their number.
_BOUNDARY = re.compile(rb"\}\s*+,\s*+\{")
_CUT = re.compile(rb'\}\s*+(?:,\s*+\{|\]\s*+(?:\}\s*+\Z|\Z|,\s*+"))')
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_END_OF_LIST = re.compile(rb'\s*+(?:,\s*+)?\]\s*+(?:\}|,\s*+"|\Z)')
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n,"
_CONTROL_TO_SPACE = bytes.maketrans(bytes(range(32)), b" " * 32)
BAD_GZIP: tuple[type[Exception], ...] = (OSError, EOFError, isal_zlib.error)  # type: ignore[assignment]
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_find_end = json.JSONDecoder(strict=False).raw_decode

Event = TypeVar("Event")


class CannotShareError(Exception):
    """A file that only one reader can read, because its events are not where they seem to be."""


@dataclass
class Slices(Generic[Event]):
    """Iterates over lists of events; afterwards `header` holds the file's other keys, and `notes` what was lost."""

    path: Path
    event_type: type[Event]
    share: tuple[int, int] = (0, 1)  # of several readers of one file: which one, of how many
    header: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._decode = msgspec.json.Decoder(list[self.event_type]).decode  # type: ignore[name-defined]
        self._decode_one = msgspec.json.Decoder(self.event_type).decode
        self._ended = False  # the list of events has
        self._lost = 0
        self._bytes = 0  # read so far
        self._limit = sys.maxsize
        self._size = 0  # unpacked; at least so much where it is packed

    def __iter__(self) -> Iterator[list[Event]]:
        with open_bytes(self.path) as file:
            self._size = size = self.path.stat().st_size
            if not isinstance(file, io.BufferedReader):
                self._limit = max(_ALWAYS_UNPACKED, _MOST_UNPACKED * size)
                self._size = min(_unpacked_bytes(self.path), self._limit)
            buffer = self._read_header(file)
            if self.share[1] > 1:
                yield from self._shared(file, buffer)
                return
            while not self._ended and (chunk := self._read(file)):
                buffer += chunk
                events, used = self._decode_part(buffer)
                if used:
                    yield events
                    del events  # before the next slice is decoded
                    buffer = buffer[used:].lstrip(_BLANK)
                else:
                    self._refuse_endless(buffer)
            yield self._decode_last(buffer, file)
        if self._lost:
            self.notes.append(f"{self._lost} events are not valid JSON and were left out")

    @property
    def portion(self) -> float:
        """How much of the file has been read, or more than that."""
        return min(1.0, self._bytes / max(self._size, 1))

    def _shared(self, file: IO[bytes], buffer: bytes) -> Iterator[list[Event]]:
        """Every n-th slice. Other readers cut the same file at the same positions, so a wrong cut ends the sharing."""
        mine, of = self.share
        turn = 0
        while chunk := self._read(file):
            buffer += chunk
            cut = next(_from_the_end(_BOUNDARY, buffer), 0)
            if cut:
                if turn % of == mine:
                    yield self._decode_or_give_up(buffer[:cut])
                turn += 1
                buffer = buffer[cut:].lstrip(_BLANK)
            else:
                self._refuse_endless(buffer)
        if turn % of == mine:
            yield self._decode_last(buffer, file)

    def _decode_or_give_up(self, text: bytes) -> list[Event]:
        try:
            return self._decode(b"[" + text + b"]")
        except _NOT_JSON:
            raise CannotShareError from None

    def _refuse_endless(self, buffer: bytes) -> None:
        if len(buffer) > 2 * _EVENT_LIMIT:
            raise InputError(f"{self.path}: no trace events found in {len(buffer) >> 20} MB of JSON; {_HINT}")

    def _read(self, file: IO[bytes]) -> bytes:
        try:
            chunk = file.read(SLICE_BYTES)
        except EOFError:
            raise InputError(
                f"{self.path}: the gzip stream ends early (an interrupted copy?); copy the file again, or read "
                f"what is there: gzip -dc {self.path.name} > part.json; lumos replay part.json"
            ) from None
        except BAD_GZIP as error:
            raise InputError(f"{self.path}: not a readable gzip file ({error}); copy or record it again") from None
        self._bytes += len(chunk)
        if self._bytes > self._limit:
            raise InputError(
                f"{self.path}: unpacks to more than {_MOST_UNPACKED} times its size, as no profiler's trace does; if "
                "it is one, unpack it with gzip -d and read that"
            )
        return bytes(chunk)

    def _read_header(self, file: IO[bytes]) -> bytes:
        """Read up to the first event; keep the keys before it; return what follows."""
        buffer = b""
        while len(buffer) < _HEAD_BYTES and (chunk := self._read(file)):
            buffer += chunk
        buffer = buffer.removeprefix(_BYTE_ORDER_MARK).lstrip()
        _refuse_other_formats(buffer, self.path)
        if buffer[:1] == b"[":
            return buffer[1:].lstrip(_BLANK)
        while (found := _EVENTS_KEY.search(buffer)) is None:
            chunk = self._read(file)
            if not chunk or len(buffer) > _HEADER_LIMIT:
                _refuse_json_without_events(buffer, self.path)
            buffer += chunk
        self._keep_header(buffer[: found.start()].rstrip(_BLANK) + b"}", "before")
        return buffer[found.end() :].lstrip(_BLANK)

    def _read_trailer(self, text: bytes, file: IO[bytes]) -> None:
        """Keep the keys after the events."""
        while len(text) < _HEADER_LIMIT and (chunk := self._read(file)):
            text += chunk
        text = text.lstrip(_BLANK + b"]")
        if text[:1] == b'"':
            self._keep_header(b"{" + text, "after")

    def _keep_header(self, text: bytes, where: str) -> None:
        try:
            self.header.update(msgspec.json.decode(_cleaned(text), type=dict[str, Any]))
        except _NOT_JSON:
            self.notes.append(f"the header {where} the events is not valid JSON and was ignored")

    def _decode_part(self, buffer: bytes) -> tuple[list[Event], int]:
        """The whole events of a buffer that more will follow, and the number of bytes they took."""
        return (
            self._decode_to_cut(buffer, bytes)
            or self._decode_to_cut(buffer, _cleaned)
            or self._decode_one_by_one(buffer, last=False)
        )

    def _decode_to_cut(self, buffer: bytes, prepare: Callable[[bytes], bytes]) -> tuple[list[Event], int] | None:
        """The events up to a guessed cut, and its position; None if the guesses are wrong or the text is damaged."""
        cuts = list(_from_the_end(_CUT, buffer))
        while cuts:
            cut = cuts.pop(0)
            try:
                events = self._decode(b"[" + prepare(buffer[:cut]) + b"]")
            except _NOT_JSON as error:
                if trailing := _TRAILING.search(str(error)):  # the list ended before
                    cuts = [buffer.rfind(b"}", 0, buffer.rfind(b"]", 0, int(trailing[1]) - 1)) + 1]
                elif "truncated" not in str(error):
                    return None
                continue
            self._ended = _END_OF_LIST.match(buffer, cut) is not None
            return events, cut
        return None

    def _decode_last(self, buffer: bytes, file: IO[bytes]) -> list[Event]:
        """The last events; the file's other keys follow."""
        events, used = ([], 0) if self._ended else self._decode_one_by_one(buffer, last=True)
        if not self._ended:
            self.notes.append("the file ends in the middle; what was written up to there is used")
        self._read_trailer(buffer[used:], file)
        return events

    def _decode_one_by_one(self, buffer: bytes, last: bool) -> tuple[list[Event], int]:
        """What can be decoded, and the number of bytes that are done with."""
        events: list[Event] = []
        text, at = buffer.decode("latin-1"), 0  # a character a byte, whatever the bytes are
        while True:
            end_of_list = _END_OF_LIST.match(buffer, at)
            self._ended = end_of_list is not None and (last or end_of_list.end() < len(buffer))
            begin = text.find("{", at)
            if self._ended or begin < 0:
                return events, at
            try:
                at = _end_of_event(text, begin)
                events.append(self._decode_one(_cleaned(buffer[begin:at])))
                continue
            except (*_NOT_JSON, ValueError, RecursionError):
                if not last and len(text) - begin < _EVENT_LIMIT:
                    return events, begin  # it may be whole once more of it is there
            cut = _CUT.search(buffer, begin)
            if cut is None:
                return events, len(buffer)
            self._lost += 1
            if self._lost > _MOST_LOST:
                raise InputError(f"{self.path}: more than {_MOST_LOST:,} events are not valid JSON; record it again")
            at = cut.start() + 1


def _end_of_event(text: str, begin: int) -> int:
    """Where the JSON value ends that begins there; ValueError if it is broken.

    A short piece is tried first: the message of an error counts the lines of all that was given.
    """
    piece = text[begin : begin + _PIECE]
    try:
        return begin + _find_end(piece)[1]
    except json.JSONDecodeError as error:
        may_go_on = error.msg.startswith("Unterminated string") or error.pos > len(piece) - 16
        if len(piece) < _PIECE or not may_go_on:
            raise
    return _find_end(text, begin)[1]


def open_bytes(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed if they are gzip's, whatever the file is called."""
    advice = "check the path and its permissions"
    try:
        with open_file(path, advice) as file:
            magic = file.read(2)
        return igzip.open(path, "rb") if magic == b"\x1f\x8b" else path.open("rb")  # type: ignore[no-untyped-call]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {advice}") from None


def _unpacked_bytes(path: Path) -> int:
    """What a gzip file says at its end of its size: the remainder by 4 GiB, of its last part."""
    with path.open("rb") as file:
        file.seek(-min(4, path.stat().st_size), os.SEEK_END)
        return int.from_bytes(file.read(4), "little")


def _from_the_end(pattern: re.Pattern[bytes], buffer: bytes) -> Iterator[int]:
    """Where events seem to end, the last ones first."""
    for window in (1 << 16, 1 << 20, len(buffer)):
        found = list(pattern.finditer(buffer, max(0, len(buffer) - window)))
        if found:
            yield from (match.start() + 1 for match in reversed(found[-_TRIES:]))
            return


def _cleaned(text: bytes) -> bytes:
    """Without what JSON forbids and profilers write: control characters and bad UTF-8."""
    return text.decode(errors="replace").encode().translate(_CONTROL_TO_SPACE)


_HINT = "give a PyTorch profiler trace (torch.profiler's export_chrome_trace)"


_OTHER_FORMATS = (  # how files begin that are none of ours
    (rb"\Z", "the file is empty"),
    (rb"SQLite format 3", "an SQLite file (Nsight Systems?), not a Kineto trace"),
    (rb"\x80|PK", "a pickle or zip file (a memory snapshot?), not a Kineto trace"),
    (rb"[^{\[]", "not JSON, so not a Kineto trace"),
    (rb"\[[A-Za-z_][\w.]*\]\s*[\w#]", "a TOML file (a setup?), not a Kineto trace"),
    (rb"\[\s*[^\s{\]]", "a JSON list, but not of trace events (a memory timeline?)"),
)


def _refuse_other_formats(start: bytes, path: Path) -> None:
    """Name the format of a file that is not JSON, if its first bytes show it."""
    for beginning, what in _OTHER_FORMATS:
        if re.match(beginning, start):
            raise InputError(f"{path}: {what}; {_HINT}")


def _refuse_json_without_events(text: bytes, path: Path) -> None:
    head = text[: 1 << 20]
    if re.match(rb'\s*\{"format": "lumos dry run', head):
        raise InputError(f"{path}: a dry run of lumos capture --dry, not a trace; ask lumos predict --from {path}")
    if b'"nodes"' in head and (b'"schema"' in head or b'"ctrl_deps"' in head):
        raise InputError(
            f"{path}: a PyTorch execution trace (it has nodes, not times); give the Kineto trace of the same run"
        )
    if b'"segments"' in head or b'"device_traces"' in head:
        raise InputError(f"{path}: a CUDA memory snapshot, not a Kineto trace; {_HINT}")
    raise InputError(f'{path}: JSON without "traceEvents", so not a Kineto trace; {_HINT}')
