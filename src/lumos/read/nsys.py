"""Reads a Nsight Systems export (`nsys export --type sqlite`) as a Trace.

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
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from lumos.data_files import read_table
from lumos.errors import InputError
from lumos.read.formats import require_memory
from lumos.trace.names import Category
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
_MEMORY_PER_BYTE = read_table("trace_rules.toml")["reading"]["memory_per_sqlite_byte"]
_NONE = -1
_WARNING = "the profiler's cost was measured on PyTorch's profiler; that of Nsight Systems is not known"

Row = dict[str, Any]  # of a table
Event = tuple[Category, Row, Lane | None, str]  # its lane and its name; no lane: of a process without a rank


def read_nsys(path: Path) -> Trace:
    """The trace in an export; the rank of a single process is -1 if the file does not name it."""
    require_memory(path, path.stat().st_size * _MEMORY_PER_BYTE, "export a shorter time with nsys")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)) as database:
            database.text_factory = lambda text: text.decode(errors="replace")
            database.row_factory = sqlite3.Row
            database.execute("PRAGMA trusted_schema = OFF")
            return _Export(path, database).trace()
    except (sqlite3.Error, UnicodeDecodeError) as error:  # a table's name, or a message about it, is no UTF-8
        raise InputError(f"{path}: not a readable SQLite file ({error}); export it again with nsys export") from None


@dataclass(frozen=True)
class _Export:
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
        names, lanes = dict[str, int](), dict[Lane, int]()
        rows = []
        for event, row, lane, text in chain(self._gpu_events(), self._calls(), self._annotations()):
            begin, end = _whole(row["start"]), _whole(row["end"])
            if lane is not None and 0 <= begin <= end < _LONGEST:
                numbers = names.setdefault(text, len(names)), lanes.setdefault(lane, len(lanes))
                rows.append((int(event), *numbers, begin, end - begin, _whole(row.get("correlationId"))))
        columns = map(np.ascontiguousarray, np.array(rows, np.int64).reshape(-1, 6).T)
        category, name, place, start, duration, correlation = columns
        if not any(lane.is_stream for lane in lanes):
            raise InputError(
                f"{self.path}: no kernel or copy in it; record with nsys profile --trace=cuda,nvtx, and export it again"
            )
        return Trace(
            names=tuple(names), lanes=tuple(lanes), messages=(), headers=self._headers(),
            category=category.astype(np.uint8), name=name.astype(np.int32), lane=place.astype(np.int32),
            start=start + (self._epoch if self._epoch < _LONGEST * 3 else 0), duration=duration,
            correlation=correlation, message=np.full(len(start), -1, np.int32), syncs=self._syncs(lanes),
            warnings=(_WARNING,),
        )  # fmt: skip

    @cached_property
    def tables(self) -> dict[str, frozenset[str]]:
        """The columns of every table; views are left out, since a view would be a program of the file's author."""
        found = self.database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        plain = [name for name, sql in found if isinstance(sql, str) and _PLAIN_TABLE.match(sql)]
        described = {name: self.database.execute(f"PRAGMA table_info({_quoted(name)})") for name in plain}
        return {name: frozenset(row["name"] for row in rows) for name, rows in described.items()}

    def _select(self, table: str, *columns: str) -> Iterator[Row]:
        """Some columns of a table, None for those it does not have; nothing if there is no such table."""
        if table in self.tables:
            wanted = ", ".join(c if c in self.tables[table] else f"NULL AS {c}" for c in columns)
            for row in self.database.execute(f"SELECT {wanted} FROM {_quoted(table)}"):
                yield dict(row)

    @cached_property
    def _strings(self) -> dict[int, str]:
        return {row["id"]: str(row["value"]) for row in self._select("StringIds", "id", "value")}

    def _text(self, number: Any, text: Any = None) -> str:
        return str(text) if text else self._strings.get(_whole(number), "")

    @cached_property
    def _epoch(self) -> int:
        """When the recording began, so that several exports share a clock."""
        starts = [_whole(row["utcEpochNs"]) for row in self._select("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")]
        return max([0, *starts])

    @cached_property
    def _ranks(self) -> dict[int, int]:
        """Ranks by process: those in the names they gave themselves for MPI, else the order of process numbers."""
        tables = (_KERNEL, _COPY, _SET)
        processes = sorted({_process(row["globalPid"]) for t in tables for row in self._select(t, "globalPid")})
        named = {}
        for row in self._select("NVTX_EVENTS", "text", "textId", "globalTid"):
            found = _RANK.match(self._text(row["textId"], row["text"]))
            if found:
                named[_process(row["globalTid"])] = int(found.group(1))
        if len(set(named.values())) == len(processes) and set(named) >= set(processes):
            return {process: named[process] for process in processes}
        return {processes[0]: _NONE} if len(processes) == 1 else {process: i for i, process in enumerate(processes)}

    def _headers(self) -> tuple[Header, ...]:
        gpu = next((str(row["name"] or "") for row in self._select("TARGET_INFO_GPU", "name")), "")
        ranks = sorted(self._ranks.values())
        world = len(ranks) if len(ranks) > 1 else -1
        return tuple(Header(rank, str(self.path), world_size=world, gpu=gpu) for rank in ranks)

    def _stream(self, row: Row) -> Lane | None:
        """The stream of a row; None if its process has no rank."""
        rank = self._ranks.get(_process(row["globalPid"]))
        return None if rank is None else Lane(rank, True, str(_whole(row["deviceId"])), str(_whole(row["streamId"])))

    def _thread(self, row: Row) -> Lane | None:
        """The thread of a row; None if its process has no rank."""
        process = _process(row["globalTid"])
        rank, thread = self._ranks.get(process), _whole(row["globalTid"]) & 0xFFFFFF
        return None if rank is None else Lane(rank, False, str(process), str(thread))

    def _gpu_events(self) -> Iterator[Event]:
        common = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
        for row in self._select(_KERNEL, *common, "demangledName", "shortName"):
            name = self._text(row["demangledName"]) or self._text(row["shortName"])
            yield Category.KERNEL, row, self._stream(row), name
        for row in self._select(_COPY, *common, "copyKind", "srcKind", "dstKind"):
            between = f"{_MEMORIES.get(row['srcKind'], '?')} -> {_MEMORIES.get(row['dstKind'], '?')}"
            name = f"Memcpy {_DIRECTIONS.get(row['copyKind'], '?')} ({between})"
            yield Category.COPY, row, self._stream(row), name
        for row in self._select(_SET, *common, "memKind"):
            yield Category.SET, row, self._stream(row), f"Memset ({_MEMORIES.get(row['memKind'], 'Device')})"

    def _calls(self) -> Iterator[Event]:
        """Runtime and driver calls. Older releases list a call twice, within itself: the outer one counts."""
        seen: set[tuple[int, int, str]] = set()
        for table in _CALLS:
            rows = self._select(table, "start", "end", "globalTid", "correlationId", "nameId")
            for row in sorted(rows, key=lambda r: (_whole(r["start"]), -_whole(r["end"]))):
                name = _API_VERSION.sub("", self._text(row["nameId"]))
                key = (_whole(row["globalTid"]), _whole(row["correlationId"]), name)
                if key not in seen:
                    seen.add(key)
                    yield Category.CALL, row, self._thread(row), name

    def _annotations(self) -> Iterator[Event]:
        for row in self._select("NVTX_EVENTS", "start", "end", "eventType", "text", "textId", "globalTid"):
            if row["eventType"] == _PUSH_POP and row["end"] is not None:
                name = self._text(row["textId"], row["text"])
                step = _STEP.match(name)
                yield Category.NOTE, row, self._thread(row), f"ProfilerStep#{step.group(1)}" if step else name

    def _syncs(self, lanes: dict[Lane, int]) -> Syncs:
        """What synchronising calls waited for; a wait for an event is for its latest record before that."""
        records: dict[tuple[int, int], list[int]] = {}
        for row in self._select(_EVENT, "correlationId", "globalPid", "eventId"):
            key = _process(row["globalPid"]), _whole(row["eventId"])
            records.setdefault(key, []).append(_whole(row["correlationId"]))
        lane_of_rank = {lane.rank: i for lane, i in reversed(lanes.items())}
        rows = []
        for row in self._select(_SYNC, "streamId", "correlationId", "globalPid", "syncType", "eventId"):
            process, event, call = _process(row["globalPid"]), _whole(row["eventId"]), _whole(row["correlationId"])
            waits = row["syncType"] == _STREAM_WAIT
            before = [r for r in records.get((process, event), []) if r < call] if waits else []
            lane = lane_of_rank.get(self._ranks[process], _NONE) if process in self._ranks else _NONE
            if lane >= 0:
                rows.append((lane, call, _whole(row["streamId"]), _NONE, max(before, default=_NONE), event))
        waiting, *columns = map(np.ascontiguousarray, np.array(rows, np.int64).reshape(-1, 6).T)
        return Syncs(waiting.astype(np.int32), *columns)


def _process(global_id: Any) -> int:
    """The process in a global id: hardware and virtual machine above it, the thread below."""
    return _whole(global_id) >> 24 & 0xFFFFFF


def _whole(value: Any) -> int:
    """A number from a column, which in SQLite may hold anything; -1 if it is none."""
    return value if isinstance(value, int) and abs(value) < 1 << 62 else _NONE


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
