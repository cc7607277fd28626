"""Chakra files that Lumos wrote, back to the very Execution they were written from.

Structure and times are those of the nodes: whoever changes a duration or takes out a dependency gets what they changed.
The attributes of our own only add what the schema cannot say. All of it is checked: a file is data, and may be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lumos.errors import InputError
from lumos.graph.from_trace.build import Execution
from lumos.graph.from_trace.nodes import Nodes
from lumos.graph.from_trace.rendezvous import Rendezvous
from lumos.graph.graph import Edges, Graph, Ints, Rule, make_graph
from lumos.trace.names import Category, Kind
from lumos.trace.read.chakra import ChakraFile, Node
from lumos.trace.read.chakra_schema import OWN_VERSION, NodeType, Own
from lumos.trace.trace import Header, Lane, Message, Syncs, Trace, concatenate

_LONGEST = 1 << 52  # ns, fifty days: times are added up, and must stay exact in a float64
_LATEST = 1 << 62


class _Edge(NamedTuple):
    """A dependency of a node on another, or on a rendezvous (numbered from zero), as the file has it."""

    source: int
    target: int
    rule: int
    lag: float
    frozen: float
    from_start: bool
    from_hub: bool = False
    to_hub: bool = False


def own_execution(files: Sequence[ChakraFile]) -> Execution:
    """The run that was written."""
    try:
        return _Reading([_OwnFile(file) for file in files]).execution
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        names = ", ".join(file.path.name for file in files[:2])
        raise InputError(
            f"{files[0].path.parent}: the tables of Lumos in {names} do not fit its nodes ({error}); write them again "
            "with lumos convert"
        ) from None


@dataclass(frozen=True)
class _OwnFile:
    """One rank."""

    file: ChakraFile

    @cached_property
    def lanes(self) -> list[Lane]:
        lanes = [msgspec.json.decode(text, type=Lane)._replace(rank=self.file.rank) for text in self._head(Own.LANES)]
        _require(len(set(lanes)) == len(lanes), "a lane stands there twice")
        return lanes

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes of the graph, sorted by lane and by order in it."""
        nodes = [n for n in self.file.nodes if n.type != NodeType.METADATA and Own.PART_OF not in n.values]
        for node in nodes:
            _require(0 <= node.values[Own.LANE] < len(self.lanes), f"node {node.id} is on no lane")
        return sorted(nodes, key=lambda n: (n.values[Own.LANE], n.id))

    @cached_property
    def place(self) -> dict[int, int]:
        """Ids to places among `nodes`; all messages of one kernel are that kernel."""
        place = {node.id: i for i, node in enumerate(self.nodes)}
        for part in self.file.nodes:
            if Own.PART_OF in part.values:
                place[part.id] = place[part.values[Own.PART_OF]]
        return place

    @cached_property
    def origin(self) -> int:
        origin = self._head(Own.ORIGIN)
        _require(abs(origin) < _LATEST, "the origin of its times is out of range")
        return int(origin)

    def _head(self, name: str) -> Any:
        return self.file.head[name]

    def _column(self, name: str, low: int, high: int) -> Ints:
        column = np.array(self._head(name), np.int64)
        _require(bool(((column >= low) & (column < high)).all()), f"{name} points outside")
        return column

    @cached_property
    def trace(self) -> Trace:
        """The events of the rank."""
        names, told = tuple(self._head(Own.NAMES)), list(self._head(Own.MESSAGES))
        place = np.array([i if text else -1 for i, text in enumerate(told)] or [-1], np.int32)
        messages = tuple(msgspec.json.decode(text, type=Message) if text else Message("") for text in told)
        header = msgspec.json.decode(self._head(Own.HEADER), type=Header)
        columns: dict[str, Any] = {
            "category": self._column(Own.EVENT_CATEGORY, 0, max(Category) + 1).astype(np.uint8),
            "name": self._column(Own.EVENT_NAME, 0, len(names)).astype(np.int32),
            "lane": self._column(Own.EVENT_LANE, 0, len(self.lanes)).astype(np.int32),
            "start": self._column(Own.EVENT_START, -_LONGEST, _LONGEST) + self.origin,
            "duration": self._column(Own.EVENT_DURATION, 0, _LONGEST),
            "correlation": self._column(Own.EVENT_CORRELATION, -1, _LATEST),
            "message": place[self._column(Own.EVENT_MESSAGE, 0, max(len(told), 1))],
        }
        _require(len({len(c) for c in columns.values()}) == 1, "its columns of events differ in length")
        return Trace(
            names=names,
            lanes=tuple(self.lanes),
            messages=messages,
            headers=(header._replace(rank=self.file.rank, path=str(self.file.path)),),
            syncs=self._syncs(),
            **columns,
        )

    def _syncs(self) -> Syncs:
        columns = [self._column(name, -_LATEST, _LATEST) for name in Own.SYNCS]
        _require(len({len(c) for c in columns}) == 1, "its columns of synchronisations differ in length")
        return Syncs(np.zeros(len(columns[0]), np.int32), *columns)

    def nodes_of_events(self, name: str) -> Ints:
        """The column of first or last nodes as places among `nodes`; -1 for none."""
        ids = self._column(name, -1, 1 << 62).tolist()
        _require(len(ids) == len(self.trace), "its columns of events differ in length")
        return np.array([self.place[i] if i >= 0 else -1 for i in ids], np.int64)

    @cached_property
    def parent(self) -> Ints:
        parent = self._column(Own.EVENT_PARENT, -1, len(self.trace))
        _require(len(parent) == len(self.trace), "its columns of events differ in length")
        return parent

    @cached_property
    def row(self) -> Ints:
        """The event of every node."""
        rows = np.array([node.values.get(Own.EVENT, -1) for node in self.nodes], np.int64)
        _require(bool(((rows >= -1) & (rows < len(self.trace))).all()), "a node is a piece of no event")
        return rows

    def edges(self) -> list[_Edge]:
        return [edge for place, node in enumerate(self.nodes) for edge in self._edges_of(place, node)]

    def _edges_of(self, target: int, node: Node) -> list[_Edge]:
        """What a node waits for: its `data_deps`, with what our own attributes know of them."""
        values = node.values
        deps = values.get(Own.DEPS, ())
        waits = set(node.data_deps)
        edges, implied = [], set(self._before(target))
        details = zip(
            deps, values.get(Own.DEP_RULES, ()), _times(values, Own.DEP_LAGS, len(deps)),
            _times(values, Own.DEP_FROZEN, len(deps)), values.get(Own.DEP_STARTS) or [False] * len(deps), strict=True,
        )  # fmt: skip
        for source, rule, lag, frozen, starts in details:
            rule = int(Rule(rule))
            if source < 0:
                edges.append(_Edge(-1 - source, target, rule, lag, frozen, False, from_hub=True))
            elif starts or source in waits:
                edges.append(_Edge(self.place[source], target, rule, lag, frozen, bool(starts)))
            implied |= {self.place[source], *self._before(self.place[source])} if source >= 0 else set()
        others = dict.fromkeys(self._found(dep, node) for dep in node.data_deps)
        edges += [_Edge(o, target, Rule.EVENT, 0.0, 0.0, False) for o in others if o not in implied]
        joins = values.get(Own.JOINS, ())
        lags, frozen_parts = (_times(values, name, len(joins)) for name in (Own.JOIN_LAGS, Own.JOIN_FROZEN))
        arrivals = zip(joins, lags, frozen_parts, strict=True)
        edges += [_Edge(target, hub, Rule.COLLECTIVE, lag, frozen, False, to_hub=True) for hub, lag, frozen in arrivals]
        return edges

    def _before(self, place: int) -> tuple[int, ...]:
        """The node before on the lane."""
        lane = self.nodes[place].values[Own.LANE]
        return (place - 1,) if place and self.nodes[place - 1].values[Own.LANE] == lane else ()

    def _found(self, dependency: int, node: Node) -> int:
        if dependency not in self.place:
            raise InputError(
                f"{self.file.path}: node {node.id} ({node.name[:40]}) waits for node {dependency}, which is not there"
            )
        return self.place[dependency]

    def meetings(self) -> list[tuple[int, int, int, str, tuple[int, ...], bool, Message | None]]:
        kind = tuple[int, int, int, str, tuple[int, ...], bool, Message | None]
        return [msgspec.json.decode(text, type=kind) for text in self._head(Own.MEETINGS)]


@dataclass(frozen=True)
class _Reading:
    """All ranks."""

    files: list[_OwnFile]

    @cached_property
    def execution(self) -> Execution:
        origins = {f.origin for f in self.files}
        for f in self.files:
            _require(f.file.head[Own.VERSION] == OWN_VERSION, f"version {f.file.head[Own.VERSION]} is not known")
        if len(origins) > 1:
            folder = self.files[0].file.path.parent
            raise InputError(f"{folder}: these files are of different runs; choose one with --match")
        warnings = dict.fromkeys(w for f in self.files for w in f.file.head.get(Own.WARNINGS, ()))
        return Execution(self.trace, self.draft, self.graph, origins.pop(), self.meetings, tuple(warnings))

    @cached_property
    def trace(self) -> Trace:
        return concatenate([f.trace for f in self.files])

    @cached_property
    def nodes(self) -> list[Node]:
        return list(chain.from_iterable(f.nodes for f in self.files))

    @cached_property
    def first_node(self) -> list[int]:
        """The first node of every file among all, and their number."""
        return [0, *np.cumsum([len(f.nodes) for f in self.files]).tolist()]

    @cached_property
    def first_row(self) -> list[int]:
        return [0, *np.cumsum([len(f.trace) for f in self.files]).tolist()]

    def _shifted(self, columns: list[Ints], by: list[int]) -> Any:
        """Columns of pointers of all files as one; -1 stays."""
        shifted = [np.where(c >= 0, c + shift, -1) for c, shift in zip(columns, by, strict=False)]
        return np.concatenate(shifted).astype(np.int32)

    @cached_property
    def duration(self) -> np.ndarray:
        return np.array([_duration(node) for node in self.nodes], np.float64)

    @cached_property
    def draft(self) -> Nodes:
        lanes = np.concatenate([
            np.array([n.values[Own.LANE] for n in f.nodes], np.int64) + shift
            for f, shift in zip(self.files, [0, *np.cumsum([len(f.lanes) for f in self.files]).tolist()], strict=False)
        ])  # fmt: skip
        start = np.array([n.values[Own.START] for n in self.nodes], np.int64)
        _require(bool((np.abs(start) < _LONGEST).all()), "the start of a node is out of range")
        start += self.files[0].origin
        waited = np.array([_time(n.values.get(Own.WAITED, 0)) for n in self.nodes])
        return Nodes(
            trace=self.trace,
            first=np.concatenate([[0], np.cumsum(np.bincount(lanes, minlength=len(self.trace.lanes)))]),
            row=self._shifted([f.row for f in self.files], self.first_row),
            start=start,
            end=start + np.rint(np.maximum(self.duration + waited, 0)).astype(np.int64),
            is_return=np.array([n.values.get(Own.RETURNS, False) is True for n in self.nodes], bool),
            first_node=self._shifted([f.nodes_of_events(Own.EVENT_FIRST) for f in self.files], self.first_node),
            last_node=self._shifted([f.nodes_of_events(Own.EVENT_LAST) for f in self.files], self.first_node),
            parent=self._shifted([f.parent for f in self.files], self.first_row),
        )

    @cached_property
    def graph(self) -> Graph:
        edges = [(edge, shift) for f, shift in zip(self.files, self.first_node, strict=False) for edge in f.edges()]
        numbers = {e.source if e.from_hub else e.target for e, _ in edges if e.from_hub or e.to_hub}
        size = len(self.nodes)
        hubs = {number: size + i for i, number in enumerate(sorted(numbers))}
        columns = Edges(
            np.array([hubs[e.source] if e.from_hub else e.source + shift for e, shift in edges], np.int32),
            np.array([hubs[e.target] if e.to_hub else e.target + shift for e, shift in edges], np.int32),
            np.array([e.rule for e, _ in edges], np.uint8),
            np.array([e.lag for e, _ in edges], np.float64),
            np.array([e.frozen for e, _ in edges], np.float64),
            np.array([e.from_start for e, _ in edges], bool),
        )
        none = np.zeros(len(hubs))
        gap, frozen = (
            np.concatenate([np.array([_time(n.values.get(name, 0)) for n in self.nodes]), none])
            for name in (Own.GAP, Own.FROZEN)
        )
        return make_graph(
            first=np.concatenate([self.draft.first, size + np.arange(1, len(hubs) + 1)]),
            duration=np.concatenate([self.duration, none]),
            edges=columns,
            gap=gap,
            frozen=frozen,
            kind=np.concatenate([self.draft.kind, np.full(len(hubs), Kind.COMM, np.uint8)]),
        )

    @cached_property
    def meetings(self) -> list[Rendezvous]:
        """Meetings of ranks that are here; one of which only a single rank is here is none."""
        members: dict[int, dict[int, int]] = {}
        known: dict[int, tuple[str, tuple[int, ...], bool, Message | None]] = {}
        for f, shift, rows in zip(self.files, self.first_row, (len(f.trace) for f in self.files), strict=False):
            for number, place, event, *rest in f.meetings():
                _require(0 <= event < rows, "a meeting is of no event")
                members.setdefault(number, {})[place] = event + shift
                known[number] = tuple(rest)  # type: ignore[assignment]
        return [self._meeting(members[n], *known[n]) for n in sorted(members) if len(members[n]) > 1]

    def _meeting(
        self, rows: dict[int, int], collective: str, ranks: tuple[int, ...], complete: bool, message: Message | None
    ) -> Rendezvous:
        places = sorted(rows)
        here = tuple(ranks[place] for place in places)
        found = np.array([rows[place] for place in places], np.int32)
        return Rendezvous(collective, found, here, message, complete and len(here) == len(ranks))


def _duration(node: Node) -> float:
    """In nanoseconds; where somebody changed the microseconds, those."""
    exact = _time(node.values.get(Own.DURATION, -1))
    whole = min(node.duration_us, _LONGEST // 1000) * 1000.0
    return exact if exact >= 0 and abs(exact - whole) <= 1000 else whole


def _time(value: Any) -> float:
    number = float(value)
    _require(abs(number) < _LONGEST, "a time is out of range")
    return number


def _times(values: dict[str, Any], name: str, count: int) -> list[float]:
    found = values.get(name)
    return [0.0] * count if found is None else [_time(v) for v in found]


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
