"""The events of a Chrome-trace JSON file, in slices of bounded size.

A profiler's file can be larger than memory once decoded, so it is decompressed, cut and decoded a few megabytes
at a time. A cut is only a guess at a boundary between two events (`},{`); that it was right is proved by the
slice decoding as JSON: a cut inside an event leaves a bracket or a string open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import msgspec
from isal import igzip

from lumos.errors import InputError

SLICE_BYTES = 8 << 20
_HEADER_LIMIT = 64 << 20
_EVENT_LIMIT = 128 << 20  # no single event is that long
_BOUNDARY = re.compile(rb"\}\s*,\s*\{")
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_CONTROL = bytes(range(32)).replace(b"\n", b"").replace(b"\r", b"").replace(b"\t", b"")
_CONTROL_TO_SPACE = bytes.maketrans(bytes(range(32)), b" " * 32)
_TRIES = 40

Event = TypeVar("Event")
Progress = Callable[[int], None]


@dataclass
class Slices(Generic[Event]):
    """Iterates over lists of events; after that, `header` holds the file's other keys and `notes` what was lost."""

    path: Path
    event_type: type[Event]
    progress: Progress | None = None
    header: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[list[Event]]:
        decode = msgspec.json.Decoder(list[self.event_type]).decode  # type: ignore[name-defined]
        with open_bytes(self.path) as file:
            buffer = self._read_header(file)
            while chunk := self._read(file):
                buffer += chunk
                events, used = self._decode_up_to_boundary(buffer, decode)
                if used:
                    yield events
                    buffer = buffer[used:]
            yield self._decode_tail(buffer, decode)

    def _read(self, file: IO[bytes]) -> bytes:
        try:
            chunk = file.read(SLICE_BYTES)
        except EOFError:
            raise InputError(
                f"{self.path}: the gzip stream ends early (an interrupted copy?); copy the file again, or read "
                f"what is there: gzip -dc {self.path.name} > part.json; lumos replay part.json"
            ) from None
        except (OSError, igzip.IsalError) as error:
            raise InputError(f"{self.path}: not a readable gzip file ({error}); copy or record it again") from None
        if self.progress is not None and chunk:
            self.progress(len(chunk))
        return chunk

    def _read_header(self, file: IO[bytes]) -> bytes:
        """Read up to the first event; keep the keys before it; return what follows."""
        buffer = self._read(file)
        _refuse_other_formats(buffer, self.path)
        if buffer.lstrip()[:1] == b"[":
            return buffer.lstrip()[1:]
        while (found := _EVENTS_KEY.search(buffer)) is None:
            chunk = self._read(file)
            if not chunk or len(buffer) > _HEADER_LIMIT:
                _refuse_json_without_events(buffer, self.path)
            buffer += chunk
        text = buffer[: found.start()].rstrip().rstrip(b",") + b"}"
        try:
            self.header.update(msgspec.json.decode(_without_control_characters(text)))
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.notes.append("the header is not valid JSON and was ignored")
        return buffer[found.end() :]

    def _decode_up_to_boundary(
        self, buffer: bytes, decode: Callable[[bytes], list[Event]]
    ) -> tuple[list[Event], int]:
        """Decode all whole events of the buffer; return them and the number of bytes they took."""
        for cut, following in _boundaries_from_the_end(buffer):
            try:
                return decode(b"[" + buffer[:cut] + b"]"), following
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
        for cut, following in _boundaries_from_the_end(buffer):
            if events := self._decode_one_by_one(buffer[:cut]):
                return events, following
            break
        if len(buffer) > _EVENT_LIMIT:
            raise InputError(f"{self.path}: no trace events found in {len(buffer) >> 20} MB of JSON; {_HINT}")
        return [], 0

    def _decode_tail(self, buffer: bytes, decode: Callable[[bytes], list[Event]]) -> list[Event]:
        """Decode the last events and the keys after them."""
        body = buffer.strip()
        end = body.rfind(b"]")
        for _ in range(_TRIES):
            if end < 0:
                break
            try:
                events = decode(b"[" + body[:end].rstrip().rstrip(b",") + b"]")
            except (msgspec.DecodeError, UnicodeDecodeError):
                end = body.rfind(b"]", 0, end)
                continue
            self._read_trailer(body[end + 1 :])
            return events
        events = self._decode_one_by_one(body[: body.rfind(b"}") + 1])
        if not body.endswith((b"]", b"}")) or end < 0:
            self.notes.append("the file ends in the middle; what was written up to there is used")
        return events

    def _read_trailer(self, text: bytes) -> None:
        inner = text.strip().lstrip(b",").rstrip(b"}")
        if not inner:
            return
        try:
            self.header.update(msgspec.json.decode(b"{" + _without_control_characters(inner) + b"}"))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return  # names and comments after the events; nothing that is needed

    def _decode_one_by_one(self, text: bytes) -> list[Event]:
        """Decode what can be decoded, for text that breaks the rules of JSON somewhere."""
        clean = _without_control_characters(text)
        whole = msgspec.json.Decoder(list[self.event_type])  # type: ignore[name-defined]
        try:
            return whole.decode(b"[" + clean + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        one = msgspec.json.Decoder(self.event_type)
        events, lost, piece = [], 0, b""
        for part in _BOUNDARY.split(clean):
            piece = (piece + b"},{" + part) if piece else part.strip().lstrip(b"{")
            try:
                events.append(one.decode(b"{" + piece.strip().removesuffix(b"}") + b"}"))
            except (msgspec.DecodeError, UnicodeDecodeError):
                if piece.count(b'{') > piece.count(b'}') + 1 and len(piece) < 1 << 16:
                    continue  # the boundary lay inside the event: join it with the next part
                lost += 1
            piece = b""
        if lost:
            self.notes.append(f"{lost} events are not valid JSON and were left out")
        return events


def open_bytes(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed where they are gzip's, whatever the file is called."""
    try:
        with path.open("rb") as file:
            magic = file.read(2)
        return igzip.open(path, "rb") if magic == b"\x1f\x8b" else path.open("rb")  # type: ignore[no-any-return]
    except OSError as error:
        raise InputError(f"{path}: cannot be opened ({error.strerror}); check the path and its permissions") from None


def _boundaries_from_the_end(buffer: bytes) -> Iterator[tuple[int, int]]:
    """(end of one event, start of the next), the last ones first."""
    for window in (1 << 16, 1 << 20, len(buffer)):
        if window > len(buffer) and window != len(buffer):
            continue
        offset = len(buffer) - window
        found = list(_BOUNDARY.finditer(buffer, offset))
        if found:
            yield from ((m.start() + 1, m.end() - 1) for m in reversed(found[-_TRIES:]))
            return


def _without_control_characters(text: bytes) -> bytes:
    """JSON forbids raw control characters in strings; profilers write them. Newlines outside strings survive as spaces."""
    try:
        text.decode()
    except UnicodeDecodeError:
        text = text.decode(errors="replace").encode()
    return text.translate(_CONTROL_TO_SPACE)


_HINT = "give a PyTorch profiler trace (torch.profiler's export_chrome_trace)"


def _refuse_other_formats(start: bytes, path: Path) -> None:
    """Say what the file is, where its first bytes tell, rather than that it is not JSON."""
    head = start[:4096].lstrip()
    if not head:
        raise InputError(f"{path}: the file is empty; {_HINT}")
    if head.startswith(b"SQLite format 3"):
        raise InputError(f"{path}: an SQLite file (Nsight Systems?), not a Kineto trace; {_HINT}")
    if head[:1] == b"\x80" or head[:2] == b"PK":
        raise InputError(f"{path}: a pickle or zip file (a memory snapshot or checkpoint?), not a Kineto trace; {_HINT}")
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
