"""A Nsight Systems export (`nsys export --type sqlite`) to a Trace.

Nsight writes a table when it first has something to put into it, and its columns differ from release to release, so
both are looked up first. A file may hold several processes; each that used a GPU is a rank. Push-pop ranges of NVTX are
the annotations; one that is called "step 3", "iteration 3" or the like is that step.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from lumos.errors import InputError
from lumos.trace.names import Category
from lumos.trace.read.host_memory import available_bytes
from lumos.trace.trace import Header, Lane, Syncs, Trace

_PUSH_POP = 59  # NvtxPushPopRange; ranges that start and end on their own do not nest
_STREAM_WAIT = 2  # CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT
_KERNEL, _COPY, _SET = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
_SYNC, _EVENT = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
_CALLS = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER")
_DIRECTIONS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device", 6: "Managed"}
_API_VERSION = re.compile(r"_v\d+(_ptsz|_ptds)?$")
_STEP = re.compile(r"(?:train(?:ing)?[ _-]?)?(?:step|iteration|iter)[ _:#-]*(\d+)\s*$", re.IGNORECASE)
_RANK = re.compile(r"MPI Rank (\d+)$")
_PLAIN_TABLE = re.compile(r"\s*CREATE TABLE", re.IGNORECASE)
_LONGEST = 1 << 60
_MEMORY_PER_BYTE = 4
_NONE = -1

Row = dict[str, Any]  # of a table


class _Row(NamedTuple):
    """An event of any table."""

    category: int
    process: int
    is_stream: bool
    owner: str  # the device of a stream, the process of a thread
    label: str
    name: str
    start: int
    end: int
    correlation: int


def read_nsys(path: Path) -> Trace:
    """The trace in an export; the rank of a single process is -1 where the file does not say it."""
    need = path.stat().st_size * _MEMORY_PER_BYTE
    if need > available_bytes():
        raise InputError(f"{path}: about {need / 2**30:.1f} GiB would be needed; export a shorter time with nsys")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)) as database:
            database.text_factory = lambda text: text.decode(errors="replace")
            database.row_factory = sqlite3.Row
            database.execute("PRAGMA trusted_schema = OFF")
            return _Reading(path, database).trace()
    except sqlite3.Error as error:
        raise InputError(f"{path}: not a readable SQLite file ({error}); export it again with nsys export") from None


@dataclass(frozen=True)
class _Reading:
    """An open export."""

    path: Path
    database: sqlite3.Connection

    def trace(self) -> Trace:
        """All processes that used a GPU."""
        if "StringIds" not in self.tables:
            raise InputError(
                f"{self.path}: an SQLite file, but not an export of Nsight Systems (it has no StringIds); give what "
                "nsys export writes, or give a PyTorch profiler trace"
            )
        columns = _Columns(self._ranks())
        for row in self._gpu_rows():
            columns.add(row)
        if not columns.rows:
            raise InputError(
                f"{self.path}: no kernel or copy in it; record with nsys profile --trace=cuda,nvtx, and export it again"
            )
        for row in self._host_rows():
            columns.add(row)
        return columns.trace(self._headers(), self._epoch, self._syncs(columns))

    @cached_property
    def tables(self) -> dict[str, frozenset[str]]:
        """The columns of every table that is one: a view would be a program of the file's author."""
        found = self.database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        plain = [name for name, sql in found if isinstance(sql, str) and _PLAIN_TABLE.match(sql)]
        described = {name: self.database.execute(f"PRAGMA table_info({_quoted(name)})") for name in plain}
        return {name: frozenset(row["name"] for row in rows) for name, rows in described.items()}

    def _select(self, table: str, *columns: str) -> Iterator[Row]:
        """Some columns of a table, None for those it does not have; nothing where there is no such table."""
        if table in self.tables:
            wanted = ", ".join(c if c in self.tables[table] else f"NULL AS {c}" for c in columns)
            for row in self.database.execute(f"SELECT {wanted} FROM {_quoted(table)}"):
                yield dict(row)

    @cached_property
    def strings(self) -> dict[int, str]:
        return {row["id"]: str(row["value"]) for row in self._select("StringIds", "id", "value")}

    @cached_property
    def _epoch(self) -> int:
        """When the recording began, so that several exports share a clock."""
        starts = [_whole(row["utcEpochNs"]) for row in self._select("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")]
        return max([0, *starts])

    @cached_property
    def _processes(self) -> list[int]:
        found: set[int] = set()
        for table in (_KERNEL, _COPY, _SET):
            found.update(_process(row["globalPid"]) for row in self._select(table, "globalPid"))
        return sorted(found)

    def _ranks(self) -> dict[int, int]:
        """Ranks by process: that of the name it gave itself for MPI, else the order of process numbers."""
        named = {}
        for row in self._select("NVTX_EVENTS", "text", "textId", "globalTid"):
            found = _RANK.match(self._text(row["text"], row["textId"]))
            if found:
                named[_process(row["globalTid"])] = int(found.group(1))
        processes = self._processes
        if len(set(named.values())) == len(processes) and set(named) >= set(processes):
            return {process: named[process] for process in processes}
        return {processes[0]: _NONE} if len(processes) == 1 else {process: i for i, process in enumerate(processes)}

    def _headers(self) -> tuple[Header, ...]:
        gpu = next((str(row["name"] or "") for row in self._select("TARGET_INFO_GPU", "name")), "")
        ranks = sorted(self._ranks().values())
        world = len(ranks) if len(ranks) > 1 else -1
        return tuple(Header(rank, str(self.path), world_size=world, gpu=gpu) for rank in ranks)

    def _text(self, text: Any, number: Any) -> str:
        return str(text) if text else self.strings.get(_whole(number), "")

    def _gpu_rows(self) -> Iterator[_Row]:
        """What ran on GPUs."""
        common = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
        for row in self._select(_KERNEL, *common, "demangledName", "shortName"):
            name = self._text("", row["demangledName"]) or self._text("", row["shortName"])
            yield _on_gpu(Category.KERNEL, row, name)
        for row in self._select(_COPY, *common, "copyKind", "srcKind", "dstKind"):
            between = f"{_MEMORIES.get(row['srcKind'], '?')} -> {_MEMORIES.get(row['dstKind'], '?')}"
            yield _on_gpu(Category.COPY, row, f"Memcpy {_DIRECTIONS.get(row['copyKind'], '?')} ({between})")
        for row in self._select(_SET, *common, "memKind"):
            yield _on_gpu(Category.SET, row, f"Memset ({_MEMORIES.get(row['memKind'], 'Device')})")

    def _host_rows(self) -> Iterator[_Row]:
        """Calls and annotations. Older releases list a call twice, within itself: the outer one counts."""
        seen: set[tuple[int, int, str]] = set()
        for table in _CALLS:
            rows = self._select(table, "start", "end", "globalTid", "correlationId", "nameId")
            for row in sorted(rows, key=lambda r: (_whole(r["start"]), -_whole(r["end"]))):
                name = _API_VERSION.sub("", self._text("", row["nameId"]))
                key = (_whole(row["globalTid"]), _whole(row["correlationId"]), name)
                if key not in seen:
                    seen.add(key)
                    yield _on_thread(Category.CALL, row, name, _whole(row["correlationId"]))
        for row in self._select("NVTX_EVENTS", "start", "end", "eventType", "text", "textId", "globalTid"):
            if row["eventType"] == _PUSH_POP and row["end"] is not None:
                name = self._text(row["text"], row["textId"])
                step = _STEP.match(name)
                yield _on_thread(Category.NOTE, row, f"ProfilerStep#{step.group(1)}" if step else name, _NONE)

    def _syncs(self, columns: _Columns) -> Syncs:
        """What synchronising calls waited for; a wait for an event is for its latest record before that."""
        records: dict[tuple[int, int], list[int]] = {}
        for row in self._select(_EVENT, "correlationId", "globalPid", "eventId"):
            key = _process(row["globalPid"]), _whole(row["eventId"])
            records.setdefault(key, []).append(_whole(row["correlationId"]))
        rows = []
        for row in self._select(_SYNC, "streamId", "correlationId", "globalPid", "syncType", "eventId"):
            process, event, call = _process(row["globalPid"]), _whole(row["eventId"]), _whole(row["correlationId"])
            waits = row["syncType"] == _STREAM_WAIT
            before = [r for r in records.get((process, event), []) if r < call] if waits else []
            lane = columns.any_lane(process)
            if lane >= 0:
                rows.append((lane, call, _whole(row["streamId"]), _NONE, max(before, default=_NONE), event))
        table = np.array(rows, np.int64).reshape(-1, 6)
        return Syncs(table[:, 0].astype(np.int32), *(np.ascontiguousarray(c) for c in table[:, 1:].T))


class _Columns:
    """Collects rows of processes that have a rank."""

    def __init__(self, ranks: dict[int, int]) -> None:
        self.ranks = ranks
        self.names: dict[str, int] = {}
        self.lanes: dict[Lane, int] = {}
        self.rows: list[tuple[int, int, int, int, int, int]] = []

    def add(self, row: _Row) -> None:
        """One event; those of other processes and those without a time are left out."""
        if row.process not in self.ranks or not 0 <= row.start <= row.end < _LONGEST:
            return
        lane = Lane(self.ranks[row.process], row.is_stream, row.owner, row.label)
        number = self.lanes.setdefault(lane, len(self.lanes))
        name = self.names.setdefault(row.name, len(self.names))
        self.rows.append((row.category, name, number, row.start, row.end - row.start, row.correlation))

    def any_lane(self, process: int) -> int:
        rank = self.ranks.get(process)
        return next((number for lane, number in self.lanes.items() if lane.rank == rank), -1)

    def trace(self, headers: tuple[Header, ...], epoch: int, syncs: Syncs) -> Trace:
        table = np.array(self.rows, np.int64)
        category, name, lane, start, duration, correlation = (np.ascontiguousarray(c) for c in table.T)
        epoch = epoch if epoch < _LONGEST * 3 else 0
        return Trace(
            names=tuple(self.names),
            lanes=tuple(self.lanes),
            messages=(),
            headers=headers,
            category=category.astype(np.uint8),
            name=name.astype(np.int32),
            lane=lane.astype(np.int32),
            start=start + epoch,
            duration=duration,
            correlation=correlation,
            message=np.full(len(table), -1, np.int32),
            syncs=syncs,
            warnings=("the profiler's cost was measured on PyTorch's profiler; that of Nsight Systems is not known",),
        )


def _on_gpu(category: Category, row: Row, name: str) -> _Row:
    device, stream = str(_whole(row["deviceId"])), str(_whole(row["streamId"]))
    start, end, correlation = (_whole(row[column]) for column in ("start", "end", "correlationId"))
    return _Row(int(category), _process(row["globalPid"]), True, device, stream, name, start, end, correlation)


def _on_thread(category: Category, row: Row, name: str, correlation: int) -> _Row:
    process, thread = _process(row["globalTid"]), _whole(row["globalTid"]) & 0xFFFFFF
    start, end = _whole(row["start"]), _whole(row["end"])
    return _Row(int(category), process, False, str(process), str(thread), name, start, end, correlation)


def _process(global_id: Any) -> int:
    """The process in a global id: hardware and virtual machine above it, the thread below."""
    return _whole(global_id) >> 24 & 0xFFFFFF


def _whole(value: Any) -> int:
    """A number from a column, which in SQLite may hold anything; -1 where it is none."""
    return value if isinstance(value, int) and abs(value) < 1 << 62 else _NONE


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
