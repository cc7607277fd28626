"""Chakra execution traces (`.et`, or JSON), one file a rank, to the Execution that they describe.

A Chakra file is a graph, not a record of events, so it does not go through the rules that find a graph in a Trace: its
nodes and dependencies are taken as they are. Files that Lumos wrote come back as they were, by the tables in their
metadata; those of other tools state what waits for what but not on which thread or stream, and get lanes by running
them (`chakra_feeder`).

The nodes have priority over the tables: a duration that somebody changed, or a dependency that somebody took out,
counts. All of it is checked: a file is data, and may be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from lumos.errors import InputError
from lumos.graph.from_trace.build import Execution
from lumos.graph.from_trace.nodes import Nodes
from lumos.graph.from_trace.rendezvous import Rendezvous
from lumos.graph.graph import Edges, Floats, Graph, Ints, Rule, make_graph
from lumos.trace.names import Category, Kind
from lumos.trace.read.chakra_feeder import foreign_execution
from lumos.trace.read.chakra_format import LUMOS_VERSION, SYNC_COLUMNS, ChakraFile, Node, NodeType
from lumos.trace.trace import Header, Lane, Message, Syncs, Trace, concatenate

_LONGEST = 1 << 52  # ns, fifty days: times are added up, and must stay exact in a float64
_LATEST = 1 << 62


def read_chakra(files: Sequence[ChakraFile]) -> Execution:
    """The run that the files of some ranks describe."""
    own = [file for file in files if file.is_own]
    if not own:
        return foreign_execution(files)
    if len(own) < len(files):
        other = next(file for file in files if not file.is_own)
        raise InputError(
            f"{other.path}: not written by Lumos, while {own[0].path.name} is: choose one kind with --match"
        )
    try:
        return _Job([_Rank(file) for file in files]).execution
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        names = ", ".join(file.path.name for file in files[:2])
        raise InputError(
            f"{files[0].path.parent}: the tables of Lumos in {names} do not fit its nodes ({error}); write them again "
            "with lumos convert"
        ) from None


@dataclass(frozen=True)
class _Rank:
    """The tables in one file; nodes, events and lanes are numbered within it."""

    file: ChakraFile

    def _head(self, name: str) -> Any:
        return self.file.head[f"lumos.{name}"]

    def _column(self, name: str, low: int = -_LATEST, high: int = _LATEST, count: int = -1) -> Ints:
        """A column of numbers from `low` to below `high`."""
        column = np.array(self._head(name), np.int64)
        _require(bool(((column >= low) & (column < high)).all()), f"{name} is out of range")
        _require(count in (-1, len(column)), f"{name} has {len(column)} rows instead of {count}")
        return column

    def _times(self, name: str, count: int) -> Floats:
        times = np.array(self._head(name), np.float64)
        _require(bool((np.abs(times) < _LONGEST).all()), f"{name} is out of range")
        _require(len(times) == count, f"{name} has {len(times)} rows instead of {count}")
        return times

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        found = (msgspec.json.decode(text, type=Lane) for text in self._head("lanes"))
        lanes = tuple(lane._replace(rank=self.file.rank) for lane in found)
        _require(len(set(lanes)) == len(lanes), "a lane is listed twice")
        return lanes

    @cached_property
    def origin(self) -> int:
        _require(abs(self._head("origin_ns")) < _LATEST, "the origin of its times is out of range")
        return int(self._head("origin_ns"))

    @cached_property
    def trace(self) -> Trace:
        """The events of the rank."""
        names, texts = tuple(self._head("names")), list(self._head("messages"))
        index = np.array([i if text else -1 for i, text in enumerate(texts)] or [-1], np.int32)
        header = msgspec.json.decode(self._head("header"), type=Header)
        category = self._column("event.category", 0, max(Category) + 1).astype(np.uint8)
        count = len(category)
        syncs = [self._column(f"sync.{name}") for name in SYNC_COLUMNS]
        _require(len({len(column) for column in syncs}) == 1, "the columns of lumos.sync differ in length")
        return Trace(
            names=names, lanes=self.lanes,
            messages=tuple(msgspec.json.decode(text, type=Message) if text else Message("") for text in texts),
            headers=(header._replace(rank=self.file.rank, path=str(self.file.path)),), category=category,
            name=self._column("event.name", 0, len(names), count).astype(np.int32),
            lane=self._column("event.lane", 0, len(self.lanes), count).astype(np.int32),
            start=self._column("event.start_ns", -_LONGEST, _LONGEST, count) + self.origin,
            duration=self._column("event.duration_ns", 0, _LONGEST, count),
            correlation=self._column("event.correlation", -1, _LATEST, count),
            message=index[self._column("event.message", 0, max(len(texts), 1), count)],
            syncs=Syncs(np.zeros(len(syncs[0]), np.int32), *syncs),
        )  # fmt: skip

    @cached_property
    def ids(self) -> list[int]:
        """The id of every node of the graph."""
        return list(self._column("node.id", 0).tolist())

    @cached_property
    def index(self) -> dict[int, int]:
        """Nodes of the graph by the ids of the file's nodes: all messages of one kernel are that kernel."""
        counts = self._column("node.count", 1, 1 << 20, len(self.ids)).tolist()
        index = {first + i: node for node, first in enumerate(self.ids) for i in range(counts[node])}
        there = {node.id for node in self.file.nodes if node.type != NodeType.METADATA}
        _require(index.keys() == there, "the nodes of the file are others than those of lumos.node")
        return index

    def nodes(self) -> dict[str, Any]:
        """The columns of `Nodes`, and of the graph: `duration`, `gap` and `frozen`."""
        count, rows = len(self.ids), len(self.trace)
        lane = self._column("node.lane", 0, len(self.lanes), count)
        _require(bool((np.diff(lane) >= 0).all()), "lumos.node is not sorted by lane")
        micros = {node.id: node.duration_us for node in self.file.nodes}
        whole = np.array([min(micros[i], _LONGEST // 1000) * 1000.0 for i in self.ids])
        exact = self._times("node.duration_ns", count)
        duration = np.where((exact >= 0) & (np.abs(exact - whole) <= 1000), exact, whole)
        start = self._column("node.start_ns", -_LONGEST, _LONGEST, count) + self.origin
        waited = np.maximum(duration + self._times("node.waited_ns", count), 0)
        of_event = (self._column(f"event.{end}_node", -1, _LATEST, rows).tolist() for end in ("first", "last"))
        first, last = (np.array([self.index[i] if i >= 0 else -1 for i in ids], np.int64) for ids in of_event)
        return {
            "lane": lane,
            "row": self._column("node.event", -1, rows, count),
            "start": start,
            "end": start + np.rint(waited).astype(np.int64),
            "is_return": self._column("node.is_return", 0, 2, count).astype(bool),
            "first_node": first,
            "last_node": last,
            "parent": self._column("event.parent", -1, rows, rows),
            "duration": duration,
            "gap": self._times("node.gap_ns", count),
            "frozen": self._times("node.frozen_ns", count),
        }

    def edges(self, lane: Ints) -> Edges:
        """Edges between nodes of this rank; below zero are rendezvous, -1 being the first."""
        ends = [self._column(f"edge.{end}").tolist() for end in ("source", "target")]
        pairs = [tuple(self.index[i] if i >= 0 else i for i in pair) for pair in zip(*ends, strict=True)]
        source, target = np.array(pairs, np.int32).reshape(-1, 2).T
        count = len(pairs)
        edges = Edges(
            source, target, self._column("edge.rule", 0, len(Rule), count).astype(np.uint8),
            self._times("edge.lag_ns", count), self._times("edge.frozen_ns", count),
            self._column("edge.from_start", 0, 2, count).astype(bool),
        )  # fmt: skip
        first = set(self.ids)
        waiting = [node for node in self.file.nodes if node.id in first]
        waits = {(self._waited_for(dep, n), self.index[n.id]): None for n in waiting for dep in n.data_deps}
        kept = np.array([min(pair) < 0 or pair in waits for pair in pairs], bool) | edges.from_start
        # Dependencies that the tables do not have, and that do not follow from the order of a lane.
        known = {*pairs, *((s - 1, t) for s, t in pairs if s > 0 and lane[s - 1] == lane[s])}
        added = [(s, t) for s, t in waits if (s, t) not in known and not (s == t - 1 and lane[s] == lane[t])]
        extra = np.array(added, np.int32).reshape(-1, 2)
        return Edges.join([edges.select(kept), Edges.of(extra[:, 0], extra[:, 1], Rule.EVENT)])

    def _waited_for(self, dependency: int, node: Node) -> int:
        if dependency not in self.index:
            raise InputError(
                f"{self.file.path}: node {node.id} ({node.name[:40]}) waits for node {dependency}, which is not there"
            )
        return self.index[dependency]

    def rendezvous(self) -> list[tuple[int, int, int, str, tuple[int, ...], bool, Message | None]]:
        """(number, place of this rank in it, event, collective, ranks, complete, message)"""
        kind = tuple[int, int, int, str, tuple[int, ...], bool, Message | None]
        return [msgspec.json.decode(text, type=kind) for text in self._head("rendezvous")]


@dataclass(frozen=True)
class _Job:
    """The tables of all ranks."""

    ranks: list[_Rank]

    @cached_property
    def execution(self) -> Execution:
        for rank in self.ranks:
            _require(rank._head("version") == LUMOS_VERSION, f"version {rank._head('version')} is not known")
        origins = {rank.origin for rank in self.ranks}
        if len(origins) > 1:
            folder = self.ranks[0].file.path.parent
            raise InputError(f"{folder}: these files are of different runs; choose one with --match")
        trace = concatenate([rank.trace for rank in self.ranks])
        tables = [rank.nodes() for rank in self.ranks]
        nodes = self._nodes(trace, tables)
        warnings = dict.fromkeys(chain.from_iterable(rank._head("warnings") for rank in self.ranks))
        return Execution(
            trace, nodes, self._graph(nodes, tables), origins.pop(), self._rendezvous(), tuple(warnings)
        )

    @cached_property
    def first_row(self) -> list[int]:
        """The first event of every rank among all, and their number."""
        return [0, *np.cumsum([len(rank.trace) for rank in self.ranks]).tolist()]

    @cached_property
    def first_node(self) -> list[int]:
        return [0, *np.cumsum([len(rank.ids) for rank in self.ranks]).tolist()]

    def _nodes(self, trace: Trace, tables: list[dict[str, Any]]) -> Nodes:
        first_lane = [0, *np.cumsum([len(rank.lanes) for rank in self.ranks]).tolist()]

        def shifted(name: str, by: list[int]) -> Any:
            columns = (np.where(t[name] >= 0, t[name] + shift, -1) for t, shift in zip(tables, by, strict=False))
            return np.concatenate(list(columns)).astype(np.int32)

        lane = shifted("lane", first_lane)
        return Nodes(
            trace=trace, first=np.concatenate([[0], np.cumsum(np.bincount(lane, minlength=len(trace.lanes)))]),
            row=shifted("row", self.first_row), first_node=shifted("first_node", self.first_node),
            last_node=shifted("last_node", self.first_node), parent=shifted("parent", self.first_row),
            **{name: np.concatenate([t[name] for t in tables]) for name in ("start", "end", "is_return")},
        )  # fmt: skip

    def _graph(self, nodes: Nodes, tables: list[dict[str, Any]]) -> Graph:
        edges = Edges.join([
            _shift_edges(rank.edges(table["lane"]), shift)
            for rank, table, shift in zip(self.ranks, tables, self.first_node, strict=False)
        ])  # fmt: skip
        ends = np.concatenate([edges.source, edges.target])
        numbers = np.unique(-1 - ends[ends < 0])  # of the rendezvous that are here
        source, target = (
            np.where(end < 0, len(nodes) + np.searchsorted(numbers, -1 - end), end).astype(np.int32)
            for end in (edges.source, edges.target)
        )
        none = np.zeros(len(numbers))
        times = {c: np.concatenate([*(t[c] for t in tables), none]) for c in ("duration", "gap", "frozen")}
        return make_graph(
            first=np.concatenate([nodes.first, len(nodes) + np.arange(1, len(numbers) + 1)]),
            edges=Edges(source, target, edges.rule, edges.lag, edges.frozen, edges.from_start),
            kind=np.concatenate([nodes.kind, np.full(len(numbers), Kind.COMM, np.uint8)]), **times,
        )  # fmt: skip

    def _rendezvous(self) -> list[Rendezvous]:
        """The rendezvous of ranks that are here; one of which only a single rank is here is none."""
        members: dict[int, dict[int, int]] = {}
        known: dict[int, Any] = {}
        for rank, shift in zip(self.ranks, self.first_row, strict=False):
            for number, place, event, *rest in rank.rendezvous():
                _require(0 <= event < len(rank.trace), "a rendezvous is of no event")
                members.setdefault(number, {})[place] = event + shift
                known[number] = rest
        found = []
        for number in sorted(n for n in members if len(members[n]) > 1):
            collective, ranks, complete, message = known[number]
            places = sorted(members[number])
            rows = np.array([members[number][place] for place in places], np.int32)
            here = tuple(ranks[place] for place in places)
            found.append(Rendezvous(collective, rows, here, message, complete and len(here) == len(ranks)))
        return found


def _shift_edges(edges: Edges, shift: int) -> Edges:
    """Edges of one rank among those of all; rendezvous keep their numbers."""
    source, target = (np.where(end >= 0, end + shift, end) for end in (edges.source, edges.target))
    return Edges(source, target, edges.rule, edges.lag, edges.frozen, edges.from_start)


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
