"""File formats, recognised by content: users rename files, and tools disagree about extensions."""

from __future__ import annotations

import re
import resource
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from glob import escape
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import psutil

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


# ---------------------------------------------------------------------- memory that a file needs
_MEMORY_PER_EVENT = 330  # bytes: columns and graph; measured on 4 million of the shortest events
_CLEARLY = 1.5  # times the free memory: what is only expected to need so much is refused
_LEAST_PORTION = 1e-3  # of a file, to expect anything of the rest
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def available_bytes() -> int:
    """What this process may still use: free memory of the machine, or the limit it runs under if that is lower."""
    free = int(psutil.virtual_memory().available)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min(free, _container_bytes(), free if soft == resource.RLIM_INFINITY else soft)


def _container_bytes() -> int:
    """The limit of a container, which the machine's own figures do not include."""
    for file in _CONTAINER_LIMITS:
        try:
            return int(file.read_text())
        except (OSError, ValueError):  # no such version of cgroups, or "max"
            continue
    return sys.maxsize


def require_memory(path: Path, need: float, advice: str) -> None:
    """Refuse in one line, instead of making the machine swap, if a path needs more bytes than are free."""
    free = available_bytes()
    if need > free:
        raise InputError(
            f"{path}: about {need / 2**30:.1f} GiB would be needed and {free / 2**30:.1f} GiB are free; {advice}"
        )


def refuse_events(path: Path, events: int, free: int, portion: float = 1.0) -> None:
    """Refuse what has more events than `free` bytes can hold, whatever the size of its file promised.

    `events` are those of this portion of the file: what follows is expected to be like it.
    """
    expected = round(events / max(portion, _LEAST_PORTION))
    if events * _MEMORY_PER_EVENT > free or expected * _MEMORY_PER_EVENT > _CLEARLY * free:
        raise InputError(
            f"{path}: has about {expected:,} events, too many for the {free / 2**30:.1f} GiB of memory that were free; "
            "read fewer ranks with --match, or record fewer steps"
        )


# ---------------------------------------------------------------------- captures in one folder
_CHUNK = re.compile(r"\d+|\D+")
_MOST_OFFERED = 3


class Recorded(NamedTuple):
    """A trace file, the rank it is of, and when it begins, on any clock that all of them share."""

    rank: int
    path: Path
    begin: float


def captures(files: Iterable[Recorded]) -> list[list[Recorded]]:
    """Files as captures, the oldest first, by when they begin, or by their names where that mixes them."""
    ordered = sorted(files, key=lambda file: (file.begin, file.path.name))
    names = [file.path.name for file in ordered]
    by_time = _rounds(ordered)
    by_name = _rounds(sorted(ordered, key=lambda file: (_CHUNK.sub(_padded, file.path.name), file.begin)), in_turn=True)
    return by_name if not _can_be_chosen(by_time, names) and _can_be_chosen(by_name, names) else by_time


def _rounds(files: Iterable[Recorded], in_turn: bool = False) -> list[list[Recorded]]:
    """A new capture begins where a rank comes again; or in turn, with the n-th file of every rank."""
    found: list[list[Recorded]] = []
    seen: Counter[int] = Counter()
    for file in files:
        place = seen[file.rank] if in_turn else max(len(found) - 1, 0)
        if not in_turn and found and any(other.rank == file.rank for other in found[-1]):
            place += 1
        seen[file.rank] += 1
        found += [[] for _ in range(place + 1 - len(found))]
        found[place].append(file)
    return found


def _padded(chunk: re.Match[str]) -> str:
    """Numbers in the order of their values."""
    return chunk[0].zfill(20) if chunk[0].isdecimal() else chunk[0]


def _can_be_chosen(groups: Sequence[Sequence[Recorded]], names: Collection[str]) -> bool:
    return all(match_option([file.path.name for file in group], names) for group in groups[-_MOST_OFFERED:])


def choices(groups: Sequence[Sequence[Path]], names: Collection[str]) -> str:
    """The --match of every group, the newest first; `names` are those of all traces in the folder."""
    latest, more = groups[: -_MOST_OFFERED - 1 : -1], len(groups) - _MOST_OFFERED
    newest, *others = [match_option([path.name for path in group], names) for group in latest]
    words = " or ".join([f"{newest} (the newest)", *others]) + (f", or one of {more} more" if more > 0 else "")
    return words if all([newest, *others]) else "move the files of each into a folder of its own"


def match_option(mine: Sequence[str], names: Collection[str]) -> str:
    """--match with a pattern for these names and none of the others, or ""."""
    for pattern in _patterns(mine):
        if {name for name in {*names, *mine} if fnmatchcase(name, pattern)} == set(mine):
            return f"--match {shlex.quote(pattern)}"
    return ""


def _patterns(names: Sequence[str]) -> Iterator[str]:
    """Simple ones first: the name itself, what names have in common by numbers and words, by their ends."""
    if len(names) == 1:
        yield escape(names[0])
        return
    columns = list(zip(*(_CHUNK.findall(name) for name in names), strict=False))
    if len({len(_CHUNK.findall(name)) for name in names}) == 1:
        for in_common in (_any_end, _any_digits):
            parts = (escape(words[0]) if len(set(words)) == 1 else in_common(words) for words in columns)
            yield re.sub(r"\*+", "*", "".join(parts))
    end = _beginning([name[::-1] for name in names])[::-1]
    yield f"{escape(_beginning(names))}*{escape(end)}"


def _any_end(words: Sequence[str]) -> str:
    return f"{escape(_beginning(words))}*"


def _beginning(words: Sequence[str]) -> str:
    """What all words begin with."""
    columns = zip(*words, strict=False)
    return "".join(letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, columns))


def _any_digits(words: Sequence[str]) -> str:
    """As many digits as all of these numbers have."""
    lengths = {len(word) for word in words}
    return "[0-9]" * lengths.pop() if len(lengths) == 1 and all(word.isdecimal() for word in words) else "*"
