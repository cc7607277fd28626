"""Chakra execution traces (`.et`, or JSON), one file a rank, to the Execution that they describe.

A Chakra file is a graph, not a record of events, so it does not go through the rules that find a graph in a Trace: its
nodes and dependencies are taken as they are. Files that Lumos wrote come back as they were, by the tables in their
metadata; those of other tools state what waits for what but not on which thread or stream, and get lanes by running
them (`foreign_graph`).

The nodes have priority over the tables: a duration that somebody changed, or a dependency that somebody took out,
counts. All of it is checked: a file is data, and may be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lumos.chakra.file_format import LUMOS_VERSION, TABLES, ChakraFile, NodeType, read_chakra_file, read_chakra_json
from lumos.chakra.foreign_graph import foreign_execution
from lumos.chakra.recorded_times import recorded_job
from lumos.chakra.recordings import is_recording
from lumos.errors import InputError
from lumos.graph.graph import Edges, Graph, Rule, Small
from lumos.graph.rules.build import Execution
from lumos.graph.rules.nodes import Nodes
from lumos.graph.rules.rendezvous import Rendezvous
from lumos.read.formats import Form
from lumos.read.job import GraphReader, Progress, read_rank_files
from lumos.trace.names import Category
from lumos.trace.trace import Header, Lane, Message, Syncs, Trace, concatenate

_LONGEST = 1 << 52  # ns, fifty days: times are added up, and must stay exact in a float64
_LATEST = 1 << 62
_BOUNDS = {  # from the first to below the second
    "event.category": (0, len(Category)), "event.name": (0, _LATEST), "event.lane": (0, _LATEST),
    "event.message": (-1, _LATEST), "event.duration": (0, _LONGEST), "event.correlation": (-1, _LATEST),
    "node.lane": (0, _LATEST), "node.id": (0, _LATEST), "node.count": (1, 1 << 20), "edge.rule": (0, len(Rule)),
    **{f"sync.{name}": (-_LATEST, _LATEST) for name in TABLES["sync"]},
}  # fmt: skip
_FRACTIONS = ("node.duration", "node.gap", "node.frozen", "edge.lag", "edge.frozen")
_LISTS = {"event.name": "names", "event.message": "messages", "event.lane": "lanes", "node.lane": "lanes"}


def read_chakra(files: Sequence[ChakraFile]) -> Trace | Execution:
    """The run that the files of some ranks describe; a trace if they are a recording of PyTorch."""
    own = [file for file in files if file.is_own]
    if not own:
        return recorded_job(files) if is_recording(files) else foreign_execution(files)
    if len(own) < len(files):
        other = next(file for file in files if not file.is_own)
        raise InputError(
            f"{other.path}: not written by Lumos, while {own[0].path.name} is: choose one kind with --match"
        )
    try:
        return _own_execution([_Rank(file) for file in files])
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        names = ", ".join(file.path.name for file in files[:2])
        raise InputError(
            f"{files[0].path.parent}: the tables of Lumos in {names} do not fit its nodes ({error}); write them again "
            "with lumos convert"
        ) from None


def read_chakra_files(
    path: Path, match: str = "", rank_pattern: str = "", progress: Progress | None = None
) -> list[ChakraFile]:
    """The Chakra files at a path, by rank, before they become a run; none if something else is there."""
    readers = {Form.CHAKRA: read_chakra_file, Form.CHAKRA_JSON: read_chakra_json}
    return read_rank_files(path, readers, match, rank_pattern, progress)


BINARY, JSON = (GraphReader(read, read_chakra) for read in (read_chakra_file, read_chakra_json))


@dataclass(frozen=True)
class _Rank:
    """The tables in one file. Events and nodes are numbered over all ranks; lanes, names and messages within it."""

    file: ChakraFile

    def head(self, name: str) -> Any:
        """A value of the file."""
        return self.file.head[f"lumos.{name}"]

    @cached_property
    def columns(self) -> dict[str, Any]:
        """The columns of all tables."""
        columns: dict[str, Any] = {}
        for table, names in TABLES.items():
            for name in (f"{table}.{column}" for column in names):
                column = np.array(self.head(name), np.float64 if name in _FRACTIONS else np.int64)
                low, high = _BOUNDS.get(name, (-_LONGEST, _LONGEST))
                _require(bool(((column >= low) & (column < high)).all()), f"{name} is out of range")
                _require(len(column) == len(self.head(f"{table}.{names[0]}")), f"{name} is of another length")
                columns[name] = column
        for name, listed in _LISTS.items():
            _require(bool((columns[name] < len(self.head(listed))).all()), f"{name} is out of range")
        return columns

    @cached_property
    def origin(self) -> int:
        _require(abs(self.head("origin_ns")) < _LATEST, "the origin of its times is out of range")
        return int(self.head("origin_ns"))

    @cached_property
    def trace(self) -> Trace:
        """The events of the rank."""
        lanes = [msgspec.json.decode(text, type=Lane) for text in self.head("lanes")]
        _require(len(set(lanes)) == len(lanes), "a lane is listed twice")
        header = msgspec.json.decode(self.head("header"), type=Header)
        event = {name.removeprefix("event."): c for name, c in self.columns.items() if name.startswith("event.")}
        small = {name: event[name].astype(np.int32) for name in ("name", "lane", "message")}
        syncs = (self.columns[f"sync.{name}"] for name in TABLES["sync"])
        return Trace(
            names=tuple(self.head("names")), lanes=tuple(lane._replace(rank=self.file.rank) for lane in lanes),
            messages=tuple(msgspec.json.decode(text, type=Message) for text in self.head("messages")),
            headers=(header._replace(rank=self.file.rank, path=str(self.file.path)),),
            category=event["category"].astype(np.uint8), start=event["start"] + self.origin,
            duration=event["duration"], correlation=event["correlation"], **small,
            syncs=Syncs(np.zeros(len(self.columns["sync.stream"]), np.int32), *syncs),
        )  # fmt: skip

    @cached_property
    def nodes_by_id(self) -> dict[int, int]:
        """Numbers of nodes by the ids of the file's nodes: all messages of one kernel are that kernel."""
        columns = (self.columns[f"node.{name}"].tolist() for name in ("number", "id", "count"))
        found = {first + i: number for number, first, count in zip(*columns, strict=True) for i in range(count)}
        there = {node.id for node in self.file.nodes if node.type != NodeType.METADATA}
        _require(found.keys() == there, "the nodes of the file are others than those of lumos.node")
        return found

    @cached_property
    def durations(self) -> np.ndarray:
        """Nanoseconds of the nodes: those of the table where they agree with the microseconds of the file."""
        micros = {node.id: node.duration_us for node in self.file.nodes}
        whole = np.array([min(micros[i], _LONGEST // 1000) * 1000.0 for i in self.columns["node.id"].tolist()])
        exact = self.columns["node.duration"]
        return np.where((exact >= 0) & (np.abs(exact - whole) <= 1000), exact, whole)

    def edges(self) -> Edges:
        """The edges of the table that the file still has, and what the file has beyond them."""
        source, target, rule, lag, frozen, from_start = (self.columns[f"edge.{name}"] for name in TABLES["edge"])
        edges = Edges(source, target, rule.astype(np.uint8), lag, frozen, from_start != 0)
        pairs = list(zip(source.tolist(), target.tolist(), strict=True))
        waits = dict.fromkeys(self._waits())
        lane = dict(zip(*(self.columns[f"node.{name}"].tolist() for name in ("number", "lane")), strict=True))
        # What comes from a rendezvous or leads to one is in our tables alone; so is what comes from another rank.
        kept = np.array([min(p) < 0 or p[0] not in lane or p in waits for p in pairs], bool) | edges.from_start
        # Dependencies that the tables do not have, and that do not follow from the order of a lane.
        known = {*pairs, *((s - 1, t) for s, t in pairs if s in lane and lane.get(s - 1) == lane[s])}
        added = [(s, t) for s, t in waits if (s, t) not in known and not (s == t - 1 and lane[s] == lane[t])]
        extra = np.array(added, np.int64).reshape(-1, 2)
        return Edges.join([edges.select(kept), Edges.of(extra[:, 0], extra[:, 1], Rule.EVENT)])

    def _waits(self) -> Iterator[tuple[int, int]]:
        """(node that is waited for, node that waits), as the file has them."""
        first = set(self.columns["node.id"].tolist())
        for node in self.file.nodes:
            for dependency in node.data_deps if node.id in first else ():
                yield self.nodes_by_id[dependency], self.nodes_by_id[node.id]


def _own_execution(ranks: list[_Rank]) -> Execution:
    """The tables of all ranks as one run."""
    for rank in ranks:
        _require(rank.head("version") == LUMOS_VERSION, f"version {rank.head('version')} is not known")
    origin = ranks[0].origin
    if any(rank.origin != origin for rank in ranks):
        folder = ranks[0].file.path.parent
        raise InputError(f"{folder}: these files are of different runs; choose one with --match")
    trace = concatenate([rank.trace for rank in ranks])
    table = {name: np.concatenate([rank.columns[name] for rank in ranks]) for name in ranks[0].columns}
    first_lane = accumulate((len(rank.trace.lanes) for rank in ranks), initial=0)
    lane = np.concatenate([rank.columns["node.lane"] + first for rank, first in zip(ranks, first_lane, strict=False)])
    order = np.lexsort((table["node.number"], lane))
    number, event = table["node.number"][order], table["event.number"]
    nodes = Nodes(
        trace=trace, first=np.concatenate([[0], np.cumsum(np.bincount(lane, minlength=len(trace.lanes)))]),
        row=_places(event, table["node.row"][order]), start=table["node.start"][order] + origin,
        end=table["node.end"][order] + origin, is_return=table["node.is_return"][order] != 0,
        first_node=_places(number, table["event.first_node"]), last_node=_places(number, table["event.last_node"]),
        parent=_places(event, table["event.parent"]),
    )  # fmt: skip
    duration = np.concatenate([rank.durations for rank in ranks])[order]
    times = {"duration": duration, "gap": table["node.gap"][order], "frozen": table["node.frozen"][order]}
    edges = Edges.join([rank.edges() for rank in ranks])
    edges = edges.select((edges.source < 0) | np.isin(edges.source, number))  # of a rank that is not here
    graph = _graph(nodes, times, number, edges)
    warnings = dict.fromkeys(chain.from_iterable(rank.head("warnings") for rank in ranks))
    return Execution(trace, nodes, graph, origin, _rendezvous(ranks, event), tuple(warnings))


def _graph(nodes: Nodes, times: dict[str, np.ndarray], number: np.ndarray, edges: Edges) -> Graph:
    """The graph of these nodes, and of the rendezvous that edges lead to: they are numbered -1, -2 and so on."""
    ends = np.concatenate([edges.source, edges.target])
    hubs = np.unique(-1 - ends[ends < 0])
    source, target = (
        np.where(end < 0, len(nodes) + np.searchsorted(hubs, -1 - end), _places(number, end)).astype(np.int32)
        for end in (edges.source, edges.target)
    )
    return nodes.graph(replace(edges, source=source, target=target), len(hubs), **times)


def _rendezvous(ranks: list[_Rank], event: np.ndarray) -> list[Rendezvous]:
    """The rendezvous of ranks that are here; one of which only a single rank is here is none."""
    kind = tuple[int, str, list[int], tuple[int, ...], bool, Message | None]
    records = (msgspec.json.decode(text, type=kind) for rank in ranks for text in rank.head("rendezvous"))
    known = {number: rest for number, *rest in records}
    present = {rank.head("rank") for rank in ranks}
    found = []
    for _, (collective, rows, members, complete, message) in sorted(known.items()):
        here = [i for i, rank in enumerate(members) if rank in present]
        at = _places(event, np.array(rows)[here])
        if len(here) > 1:
            some = tuple(members[i] for i in here)
            found.append(Rendezvous(collective, at, some, message, complete and len(here) == len(members)))
    return found


def _places(numbers: np.ndarray, wanted: np.ndarray) -> Small:
    """Where these numbers are among all; -1 for those below zero."""
    _require(len(numbers) > 0 or bool((wanted < 0).all()), "an event or node that is pointed at is not there")
    if len(numbers) == 0:
        return np.full(len(wanted), -1, np.int32)
    order = np.argsort(numbers, kind="stable")
    at = order[np.minimum(np.searchsorted(numbers, wanted, sorter=order), len(numbers) - 1)]
    _require(bool((numbers[at] == wanted)[wanted >= 0].all()), "an event or node that is pointed at is not there")
    return np.where(wanted >= 0, at, -1).astype(np.int32)


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
