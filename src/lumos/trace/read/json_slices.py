"""The events of a Chrome-trace JSON file, in slices of bounded size.

A profiler's file can be larger than memory once decoded, so it is decompressed, cut and decoded a few megabytes
at a time. A cut is only a guess at a boundary between two events (`},{`); that it was right is proved by the
slice decoding as JSON: a cut inside an event leaves a bracket or a string open. Where guesses fail, brackets are
counted; where the text is damaged, events are decoded one by one and the broken ones left out.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import msgspec
from isal import igzip, isal_zlib

from lumos.errors import InputError

SLICE_BYTES = 8 << 20
_HEAD_BYTES = 4096  # enough to tell what kind of file it is
_HEADER_LIMIT = 64 << 20
_EVENT_LIMIT = 128 << 20  # no single event is that long
_DAMAGE_LIMIT = 1 << 20  # how far the end of an event is looked for in damaged text
_TRIES = 8  # guesses at a boundary before brackets are counted
_BOUNDARY = re.compile(rb"\}\s*,\s*\{")
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_END_OF_LIST = re.compile(rb'\s*,?\s*\]\s*(?:\}|,\s*"|\Z)')
_CLOSING = re.compile(rb'\}\s*\]\s*(?:\}\s*\Z|\Z|,\s*")')
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n,"
_CONTROL_TO_SPACE = bytes.maketrans(bytes(range(32)), b" " * 32)
BAD_GZIP: tuple[type[Exception], ...] = (OSError, EOFError, isal_zlib.error)  # type: ignore[assignment]
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError)

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

    def __iter__(self) -> Iterator[list[Event]]:
        with open_bytes(self.path) as file:
            buffer = self._read_header(file)
            if self.share[1] > 1:
                yield from self._shared(file, buffer)
                return
            while not self._ended and (chunk := self._read(file)):
                buffer += chunk
                events, used = self._decode_part(buffer)
                if used:
                    yield events
                    buffer = buffer[used:].lstrip(_BLANK)
                elif len(buffer) > _EVENT_LIMIT:
                    raise InputError(f"{self.path}: no trace events found in {len(buffer) >> 20} MB of JSON; {_HINT}")
            events, used = ([], 0) if self._ended else self._decode_last(buffer)
            yield events
            self._read_trailer(buffer[used:], file)
        if self._lost:
            self.notes.append(f"{self._lost} events are not valid JSON and were left out")

    def _shared(self, file: IO[bytes], buffer: bytes) -> Iterator[list[Event]]:
        """Every n-th slice. Other readers cut the same file at the same positions, so a wrong cut ends the sharing."""
        mine, of = self.share
        turn = 0
        while chunk := self._read(file):
            buffer += chunk
            cut, following = next(_boundaries_from_the_end(buffer), (0, 0))
            if cut:
                if turn % of == mine:
                    yield self._decode_or_give_up(buffer[:cut])
                turn += 1
                buffer = buffer[following:].lstrip(_BLANK)
        if turn % of == mine:
            events, used = self._decode_last(buffer)
            yield events
            self._read_trailer(buffer[used:], file)

    def _decode_or_give_up(self, text: bytes) -> list[Event]:
        try:
            return self._decode(b"[" + text + b"]")
        except _NOT_JSON:
            raise CannotShareError from None

    def _read(self, file: IO[bytes]) -> bytes:
        try:
            return file.read(SLICE_BYTES)
        except EOFError:
            raise InputError(
                f"{self.path}: the gzip stream ends early (an interrupted copy?); copy the file again, or read "
                f"what is there: gzip -dc {self.path.name} > part.json; lumos replay part.json"
            ) from None
        except BAD_GZIP as error:
            raise InputError(f"{self.path}: not a readable gzip file ({error}); copy or record it again") from None

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
            self._decode_whole_events(buffer)
            or self._decode_whole_events(cleaned := _cleaned(buffer))
            or self._decode_one_by_one(cleaned, last=False)
        )

    def _decode_whole_events(self, buffer: bytes) -> tuple[list[Event], int] | None:
        """The same for text without damage; None where there is some."""
        for cut, following in _boundaries_from_the_end(buffer):
            try:
                return self._decode(b"[" + buffer[:cut] + b"]"), following
            except _NOT_JSON as error:
                if not _is_truncated(error):
                    return self._decode_to_end_of_list(buffer, error)
        cut = _end_of_last_event(buffer)
        try:
            return self._decode(b"[" + buffer[:cut] + b"]"), cut
        except _NOT_JSON:
            return None

    def _decode_last(self, buffer: bytes) -> tuple[list[Event], int]:
        """The last events, and the number of bytes they took: the file's other keys follow."""
        for prepared in (bytes, _cleaned):  # as it is, and only if that fails without what JSON forbids
            text = prepared(buffer)
            try:
                return self._decode(b"[" + text), len(text)
            except _NOT_JSON as error:
                answer = self._decode_to_end_of_list(text, error)
            if answer is not None:
                return answer
        events, used = self._decode_one_by_one(text, last=True)
        if not self._ended:
            self.notes.append("the file ends in the middle; what was written up to there is used")
        return events, used

    def _decode_to_end_of_list(self, buffer: bytes, error: Exception) -> tuple[list[Event], int] | None:
        """The events up to the end of the list, if the decoder stopped because the list ends; else None."""
        used = _complete_before(error) - 1  # without the bracket that was put before
        if used < 0:
            return None
        if _END_OF_LIST.match(buffer, buffer.rindex(b"]", 0, used)) is None:
            return None
        self._ended = True
        return self._decode(b"[" + buffer[:used]), used

    def _decode_one_by_one(self, text: bytes, last: bool) -> tuple[list[Event], int]:
        """What can be decoded of damaged text."""
        events: list[Event] = []
        at = text.find(b"{")
        while at >= 0:
            event, end = self._decode_event(text, at)
            if event is not None:
                events.append(event)
                self._ended = _END_OF_LIST.match(text, end) is not None
                if self._ended:
                    return events, end
            elif not last and len(text) - at < _DAMAGE_LIMIT:
                return events, at  # it may be whole once more of it is there
            elif not last or end < len(text):
                self._lost += 1
            elif closing := _CLOSING.search(text, at):
                self._lost, self._ended = self._lost + 1, True
                return events, closing.start() + 1
            at = text.find(b"{", end)
        return events, len(text)

    def _decode_event(self, text: bytes, at: int) -> tuple[Event | None, int]:
        """The event that begins at a position, and its end; for a broken one None, and where the next may begin."""
        boundary = _BOUNDARY.search(text, at)
        end = boundary.start() + 1 if boundary else len(text)
        for _ in range(2):
            try:
                return self._decode_one(text[at:end]), end
            except _NOT_JSON as error:
                if (complete := _complete_before(error)) > 0:
                    end = at + complete
                elif _is_truncated(error):
                    end = _end_of_event(text, at)
                else:
                    break
        return None, boundary.end() - 1 if boundary else len(text)


def open_bytes(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed if they are gzip's, whatever the file is called."""
    try:
        with path.open("rb") as file:
            magic = file.read(2)
        return igzip.open(path, "rb") if magic == b"\x1f\x8b" else path.open("rb")  # type: ignore[no-untyped-call]
    except OSError as error:
        raise InputError(f"{path}: cannot be opened ({error.strerror}); check the path and its permissions") from None


def _boundaries_from_the_end(buffer: bytes) -> Iterator[tuple[int, int]]:
    """(end of one event, start of the next), the last ones first; guesses."""
    for window in (1 << 16, 1 << 20, len(buffer)):
        found = list(_BOUNDARY.finditer(buffer, max(0, len(buffer) - window)))
        if found:
            yield from ((m.start() + 1, m.end() - 1) for m in reversed(found[-_TRIES:]))
            return


def _end_of_last_event(buffer: bytes) -> int:
    """The end of the last whole event, by counting brackets; 0 if there is none."""
    end = depth = 0
    for token in _TOKEN.finditer(buffer):
        depth += _STEP.get(token.group(), 0)
        if depth < 0:
            break  # the list ends
        if depth == 0 and token.group() == b"}":
            end = token.end()
    return end


def _end_of_event(text: bytes, at: int) -> int:
    """The end of the event that begins at a position, by counting brackets; that position if it does not end."""
    depth = 0
    for token in _TOKEN.finditer(text, at, at + _DAMAGE_LIMIT):
        depth += _STEP.get(token.group(), 0)
        if depth == 0:
            return token.end()
    return at


_STEP = {b"{": 1, b"[": 1, b"}": -1, b"]": -1}


def _is_truncated(error: Exception) -> bool:
    return "truncated" in str(error)


def _complete_before(error: Exception) -> int:
    """The position at which a complete value is followed by something else; 0 for other errors."""
    found = _TRAILING.search(str(error))
    return int(found.group(1)) - 1 if found else 0


def _question_marks(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "?" * (error.end - error.start), error.end


codecs.register_error("lumos.question_marks", _question_marks)


def _cleaned(text: bytes) -> bytes:
    """Text of the same length without what JSON forbids and profilers write: control characters and bad UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        text = text.decode(errors="lumos.question_marks").encode()
    return text.translate(_CONTROL_TO_SPACE)


_HINT = "give a PyTorch profiler trace (torch.profiler's export_chrome_trace)"


def _refuse_other_formats(start: bytes, path: Path) -> None:
    """Name the format of a file that is not JSON, if its first bytes show it."""
    head = start[:4096].lstrip()
    if not head:
        raise InputError(f"{path}: the file is empty; {_HINT}")
    if head.startswith(b"SQLite format 3"):
        raise InputError(f"{path}: an SQLite file (Nsight Systems?), not a Kineto trace; {_HINT}")
    if head[:1] == b"\x80" or head[:2] == b"PK":
        raise InputError(f"{path}: a pickle or zip file (a memory snapshot?), not a Kineto trace; {_HINT}")
    if head[:1] not in b"{[":
        raise InputError(f"{path}: not JSON, so not a Kineto trace; {_HINT}")
    if head[:1] == b"[" and head[1:].lstrip()[:1] not in (b"{", b"]"):
        raise InputError(f"{path}: a JSON list, but not of trace events (a memory timeline?); {_HINT}")


def _refuse_json_without_events(text: bytes, path: Path) -> None:
    head = text[: 1 << 20]
    if b'"nodes"' in head and (b'"schema"' in head or b'"ctrl_deps"' in head):
        raise InputError(
            f"{path}: a PyTorch execution trace (it has nodes, not times); give the Kineto trace of the same run"
        )
    if b'"segments"' in head or b'"device_traces"' in head:
        raise InputError(f"{path}: a CUDA memory snapshot, not a Kineto trace; {_HINT}")
    raise InputError(f'{path}: JSON without "traceEvents", so not a Kineto trace; {_HINT}')
