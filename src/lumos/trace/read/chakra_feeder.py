"""Chakra files of other tools to an Execution: their dependencies as they are, and lanes from running them once.

Such a file states what waits for what and how long each node takes, seldom when it ran, and never on which thread. It
is run as the feeder of ASTRA-sim does: `data_deps` bind; a rank does one thing at a time on its CPU, on every stream,
and of each kind of communication; and of the nodes that could start, the one with the smallest id does (or with the
earliest recorded start). The order in which nodes ran is the order of the lanes, and the times stand in for recorded
ones if there are none.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lumos.errors import InputError
from lumos.graph.from_trace.build import Execution
from lumos.graph.from_trace.nodes import Nodes
from lumos.graph.from_trace.rendezvous import Rendezvous
from lumos.graph.graph import Edges, Rule, make_graph
from lumos.trace.names import Category, Kind, is_step
from lumos.trace.read.chakra_format import COLLECTIVES, ChakraFile, Node, NodeType
from lumos.trace.trace import Header, Lane, Message, Syncs, Trace

_COLLECTIVE_NAMES = {number: name for name, number in COLLECTIVES.items()}
_COMMUNICATION = (NodeType.COMM_COLL, NodeType.COMM_SEND, NodeType.COMM_RECV)
_MEMORY = (NodeType.MEM_LOAD, NodeType.MEM_STORE)
_LONGEST_US = 10**11  # a day


class _Task(NamedTuple):
    """A node of one rank, with what it waits for as places among all tasks."""

    rank: int
    node: Node
    lane: Lane
    category: Category
    waits_for: tuple[int, ...]

    @property
    def communicates(self) -> bool:
        return self.lane.is_stream and self.node.type in _COMMUNICATION

    @property
    def nanoseconds(self) -> int:
        return min(self.node.duration_us, _LONGEST_US) * 1000


def foreign_execution(files: Sequence[ChakraFile]) -> Execution:
    """The run that files of others describe."""
    job = _Job(_tasks(files), tuple(Header(f.rank, str(f.path)) for f in files))
    if not any(task.nanoseconds for task in job.tasks):
        raise InputError(
            f"{files[0].path}: none of its nodes has a duration (a workload for a simulator that prices them itself); "
            "there is nothing to replay"
        )
    return job.execution


def _tasks(files: Sequence[ChakraFile]) -> list[_Task]:
    tasks: list[_Task] = []
    for file in files:
        place = {node.id: len(tasks) + i for i, node in enumerate(file.nodes)}
        by_data = any(node.data_deps for node in file.nodes)
        for node in file.nodes:
            waits = node.data_deps if by_data else node.ctrl_deps
            missing = next((dep for dep in waits if dep not in place), None)
            if missing is not None:
                raise InputError(
                    f"{file.path}: node {node.id} ({node.name[:40]}) waits for node {missing}, which is not there"
                )
            lane, category = _lane(file.rank, node)
            tasks.append(_Task(file.rank, node, lane, category, tuple(dict.fromkeys(place[dep] for dep in waits))))
    return tasks


def _lane(rank: int, node: Node) -> tuple[Lane, Category]:
    """What a node occupies while it runs."""
    if node.type in _COMMUNICATION and not node.values.get("is_cpu_op", False):
        label = {NodeType.COMM_COLL: "collectives", NodeType.COMM_SEND: "sends"}.get(NodeType(node.type), "receives")
        return Lane(rank, True, "gpu", label), Category.KERNEL
    if node.type in _MEMORY:
        return Lane(rank, True, "gpu", "memory"), Category.COPY
    if node.type == NodeType.COMP and not node.values.get("is_cpu_op", True):
        return Lane(rank, True, "gpu", str(node.values.get("stream", "compute"))[:40]), Category.KERNEL
    # A node named after a step is what the step does beside its operators, not the window of the step.
    return Lane(rank, False, "cpu", "cpu"), Category.OTHER if is_step(node.name) else Category.OP


@dataclass(frozen=True)
class _Job:
    """The tasks of all ranks, run once."""

    tasks: list[_Task]
    headers: tuple[Header, ...]

    @cached_property
    def together(self) -> dict[int, list[int]]:
        """For every task that communicates: those that take part with it, itself among them; a send comes first."""
        parts: dict[Any, dict[int, int]] = defaultdict(dict)
        count: Counter[Any] = Counter()
        for place, task in enumerate(self.tasks):
            if task.communicates:
                key = _key(task.node)
                count[task.rank, task.node.type, key] += 1
                parts[key, count[task.rank, task.node.type, key]][task.rank] = place
        members = [sorted(found.values(), key=lambda p: self.tasks[p].node.type) for found in parts.values()]
        return {place: found for found in members if len(found) > 1 for place in found}

    def waits_at_rendezvous(self, place: int) -> list[int]:
        """Who must have come before a task's data moves: a send waits for nobody, a receive for its send."""
        found = self.together.get(place, [place])
        if self.tasks[place].node.type == NodeType.COMM_COLL:
            return found
        return found[:1]

    @cached_property
    def started(self) -> tuple[list[int], list[int], list[int]]:
        """When every task starts and ends, in nanoseconds, and the order in which they started."""
        return _Run(self).run()

    @cached_property
    def lanes(self) -> list[Lane]:
        return sorted({task.lane for task in self.tasks})

    @cached_property
    def order(self) -> list[int]:
        """Places of the tasks, sorted by lane and by order in it."""
        number = {lane: i for i, lane in enumerate(self.lanes)}
        turn = {place: i for i, place in enumerate(self.started[2])}
        return sorted(range(len(self.tasks)), key=lambda p: (number[self.tasks[p].lane], turn[p]))

    @cached_property
    def trace(self) -> Trace:
        """One row a task, in the order of the tasks."""
        names: dict[str, int] = {}
        messages: dict[Message, int] = {}
        number = {lane: i for i, lane in enumerate(self.lanes)}
        start, end, _ = self.started
        told = [self._message(task) for task in self.tasks]
        known = any(task.node.start_us for task in self.tasks)
        begin = [min(t.node.start_us, _LONGEST_US) * 1000 for t in self.tasks] if known else start
        length = [t.nanoseconds for t in self.tasks] if known else [e - s for s, e in zip(start, end, strict=True)]
        return Trace(
            name=np.array([names.setdefault(t.node.name, len(names)) for t in self.tasks], np.int32),
            message=np.array([-1 if m is None else messages.setdefault(m, len(messages)) for m in told], np.int32),
            names=tuple(names),
            lanes=tuple(self.lanes),
            messages=tuple(messages),
            headers=self.headers,
            category=np.array([t.category for t in self.tasks], np.uint8),
            lane=np.array([number[t.lane] for t in self.tasks], np.int32),
            start=np.array(begin, np.int64),
            duration=np.array(length, np.int64),
            correlation=np.full(len(self.tasks), -1, np.int64),
            syncs=Syncs.empty(),
        )

    def _message(self, task: _Task) -> Message | None:
        if not task.communicates:
            return None
        values, kind = task.node.values, task.node.type
        sides = {NodeType.COMM_SEND: "send", NodeType.COMM_RECV: "recv"}
        name = sides.get(NodeType(kind)) or _COLLECTIVE_NAMES.get(_whole(values, "comm_type"), "communication")
        size, group = _whole(values, "comm_size"), str(values.get("pg_name", ""))
        ranks = self._groups.get((task.rank, group), ())
        peers = _whole(values, "comm_src"), _whole(values, "comm_dst")
        return Message(name, "byte", size, size, group, len(ranks) or -1, ranks, source=peers[0], destination=peers[1])

    @cached_property
    def _groups(self) -> dict[tuple[int, str], tuple[int, ...]]:
        """Process groups by rank and name, where a node of metadata describes them."""
        found: dict[tuple[int, str], tuple[int, ...]] = {}
        for task in self.tasks:
            if task.node.inputs[:2] == "['" and task.node.type == NodeType.METADATA:
                try:
                    groups = msgspec.json.decode(task.node.inputs[2:-2], type=list[_Group])
                except msgspec.DecodeError:
                    continue
                found |= {(task.rank, group.pg_name): tuple(group.ranks) for group in groups}
        return found

    @cached_property
    def rendezvous(self) -> list[Rendezvous]:
        unique = {id(found): found for found in self.together.values()}
        return [self._one_rendezvous(found) for found in unique.values()]

    def _one_rendezvous(self, found: list[int]) -> Rendezvous:
        tasks = [self.tasks[place] for place in found]
        message = self._message(tasks[0])
        name = "send_recv" if tasks[0].node.type != NodeType.COMM_COLL else message.collective if message else ""
        size = message.group_size if message else -1
        return Rendezvous(name, np.array(found, np.int32), tuple(t.rank for t in tasks), message, size <= len(found))

    @cached_property
    def nodes(self) -> Nodes:
        """Nodes: one a task, and for communication two: it arrives, then it transfers."""
        trace, order = self.trace, np.array(self.order)
        communicates = np.array([self.tasks[p].communicates for p in self.order], bool)
        row = np.repeat(order, 1 + communicates).astype(np.int32)
        second = np.zeros(len(row), bool)
        second[1:] = row[1:] == row[:-1]
        arrives = np.repeat(communicates, 1 + communicates) & ~second
        lane = trace.lane[row]
        first_node, last_node = np.full(len(trace), -1, np.int32), np.full(len(trace), -1, np.int32)
        last_node[row] = np.arange(len(row))
        first_node[row[::-1]] = np.arange(len(row))[::-1]
        return Nodes(
            trace=trace,
            first=np.concatenate([[0], np.cumsum(np.bincount(lane, minlength=len(self.lanes)))]).astype(np.int64),
            row=row,
            start=trace.start[row],
            end=np.where(arrives, trace.start[row], trace.end[row]),
            is_return=second,
            first_node=first_node,
            last_node=last_node,
            parent=np.full(len(trace), -1, np.int32),
        )

    @cached_property
    def execution(self) -> Execution:
        nodes = self.nodes
        pairs = [(s, t) for t, task in enumerate(self.tasks) for s in task.waits_for]
        tasks = np.array(pairs, np.int64).reshape(-1, 2)
        source, target = nodes.last_node[tasks[:, 0]], nodes.first_node[tasks[:, 1]]
        apart = nodes.lane[source] != nodes.lane[target]
        edges = [Edges.of(source[apart], target[apart], Rule.EVENT), *self._rendezvous_edges()]
        hubs = len(self.rendezvous)
        length = np.array([task.nanoseconds for task in self.tasks], np.float64)[nodes.row]
        arrives = nodes.last_node[nodes.row] > np.arange(len(nodes))
        graph = make_graph(
            first=np.concatenate([nodes.first, len(nodes) + np.arange(1, hubs + 1)]),
            duration=np.concatenate([np.where(arrives, 0.0, length), np.zeros(hubs)]),
            edges=Edges.join(edges),
            kind=np.concatenate([nodes.kind, np.full(hubs, Kind.COMM, np.uint8)]),
        )
        origin = int(self.trace.start.min(initial=0))
        return Execution(self.trace, nodes, graph, origin, self.rendezvous, tuple(self._warnings()))

    def _rendezvous_edges(self) -> list[Edges]:
        nodes, edges = self.nodes, []
        for number, found in enumerate(self.rendezvous):
            hub = len(nodes) + number
            come = [self.waits_at_rendezvous(int(row)) for row in found.rows]
            arrive = nodes.first_node[sorted({place for places in come for place in places})]
            held = [row for row, places in zip(found.rows.tolist(), come, strict=True) if places != [row]]
            edges.append(Edges.of(arrive, np.full(len(arrive), hub), Rule.COLLECTIVE))
            edges.append(Edges.of(np.full(len(held), hub), nodes.last_node[held], Rule.COLLECTIVE))
        return edges

    def _warnings(self) -> list[str]:
        warnings = []
        timeless = sum(task.communicates and not task.nanoseconds for task in self.tasks)
        if timeless:
            warnings.append(f"{timeless} nodes of communication have no duration; they take no time here")
        lonely = sum(task.communicates for task in self.tasks) - len(self.together)
        if lonely and len(self.headers) > 1:
            warnings.append(f"{lonely} nodes of communication have no counterpart in another rank")
        if not any(task.node.start_us for task in self.tasks):
            warnings.append(
                "the file does not say when its nodes ran: the recorded times are those of running its graph"
            )
        return warnings


class _Group(msgspec.Struct):
    pg_name: str = ""
    ranks: list[int] = []


def _key(node: Node) -> tuple[Any, ...]:
    """What the participants of a communication share; they meet in the order of their files."""
    if node.type == NodeType.COMM_COLL:
        return ("collective", node.values.get("pg_name", ""))
    return ("message", *(_whole(node.values, name) for name in ("comm_src", "comm_dst", "comm_tag")))


def _whole(values: dict[str, Any], name: str) -> int:
    value = values.get(name, -1)
    return value if isinstance(value, int) and -1 <= value < 1 << 62 else -1


class _Run:
    """Runs the tasks of a job as the feeder does; a heap of events, as this is done once."""

    def __init__(self, job: _Job) -> None:
        self.job, self.tasks = job, job.tasks
        self.waiting = [len(task.waits_for) for task in self.tasks]
        self.next: list[list[int]] = [[] for _ in self.tasks]
        for place, task in enumerate(self.tasks):
            for source in task.waits_for:
                self.next[source].append(place)
        self.ready: dict[Lane, list[tuple[int, int, int]]] = defaultdict(list)
        self.busy: set[Lane] = set()
        self.start = [-1] * len(self.tasks)
        self.end = [-1] * len(self.tasks)
        self.order: list[int] = []
        self.events: list[tuple[int, int]] = []  # (time, task that ends then)

    def run(self) -> tuple[list[int], list[int], list[int]]:
        for place, waiting in enumerate(self.waiting):
            if waiting == 0:
                self._make_ready(place)
        for lane in list(self.ready):
            self._start_next(lane, 0)
        while self.events:
            time, place = heapq.heappop(self.events)
            self._finish(place, time)
        if len(self.order) < len(self.tasks) or min(self.end, default=0) < 0:
            self._refuse()
        return self.start, self.end, self.order

    def _make_ready(self, place: int) -> None:
        task = self.tasks[place]
        heapq.heappush(self.ready[task.lane], (task.node.start_us, task.node.id, place))

    def _start_next(self, lane: Lane, time: int) -> None:
        if lane in self.busy or not self.ready[lane]:
            return
        *_, place = heapq.heappop(self.ready[lane])
        self.busy.add(lane)
        self.start[place] = time
        self.order.append(place)
        for member in self.job.together.get(place, [place]):
            self._end_if_all_came(member)

    def _end_if_all_came(self, place: int) -> None:
        came = [self.start[p] for p in {place, *self.job.waits_at_rendezvous(place)}]
        if min(came) >= 0 and self.end[place] < 0:
            self.end[place] = max(came) + self.tasks[place].nanoseconds
            heapq.heappush(self.events, (self.end[place], place))

    def _finish(self, place: int, time: int) -> None:
        lane = self.tasks[place].lane
        self.busy.discard(lane)
        lanes = {lane: None}
        for target in self.next[place]:
            self.waiting[target] -= 1
            if self.waiting[target] == 0:
                self._make_ready(target)
                lanes[self.tasks[target].lane] = None
        for some in lanes:
            self._start_next(some, time)

    def _refuse(self) -> None:
        stuck = next(p for p, end in enumerate(self.end) if end < 0)
        for place, end in enumerate(self.end):  # rather one that began and never ended: it waits for another rank
            if end < 0 and self.start[place] >= 0:
                stuck = place
                break
        task = self.tasks[stuck]
        what = (
            "the other ranks never come to it: their collectives differ, or a file is missing"
            if self.start[stuck] >= 0
            else "the dependencies of its file go in a circle"
        )
        raise InputError(f"rank {task.rank}: node {task.node.id} ({task.node.name[:40]}) never ends: {what}")
