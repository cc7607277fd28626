"""Chakra files of other tools to an Execution: their dependencies as they are, and lanes from running them once.

Such a file states what waits for what and how long each node takes, seldom when it ran, and never on which thread. It
is run as the feeder of ASTRA-sim does: `data_deps` bind; a rank does one thing at a time on its CPU, on every stream,
and of each kind of communication; and of the nodes that could start, the one with the smallest id does (or with the
earliest recorded start). The order in which nodes ran is the order of the lanes, and the times stand in for recorded
ones if there are none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lumos.chakra.feeder import Feeder
from lumos.chakra.file_format import COLLECTIVE_NAMES, COMMUNICATION, FOLDED, LONGEST_US, ChakraFile, Node, NodeType
from lumos.chakra.process_groups import ProcessGroups
from lumos.errors import InputError
from lumos.graph.graph import Edges, Rule
from lumos.graph.rules.build import Execution
from lumos.graph.rules.nodes import Nodes
from lumos.graph.rules.rendezvous import Rendezvous, clock_offsets
from lumos.trace.names import Category, is_step
from lumos.trace.trace import Header, Lane, Message, Trace


class _Task(NamedTuple):
    """A node of one rank, with the indices of the tasks that it waits for."""

    rank: int
    node: Node
    lane: Lane
    category: Category
    nanoseconds: int
    waits_for: tuple[int, ...]

    @property
    def communicates(self) -> bool:
        return self.lane.is_stream and self.node.type in COMMUNICATION

    @property
    def key(self) -> tuple[Any, ...]:
        """What the participants of a communication share; they are matched in the order of their files."""
        if self.node.type == NodeType.COMM_COLL:
            return ("collective", self.node.group)
        return ("message", *self.peers, self.node.number("comm_tag"))

    @property
    def peers(self) -> tuple[int, int]:
        """The rank that sends and the one that receives; some tools leave out the rank whose file it is."""
        source, destination = self.node.number("comm_src"), self.node.number("comm_dst")
        if self.node.type == NodeType.COMM_SEND:
            return (self.rank if source < 0 else source), destination
        return source, self.rank if self.node.type == NodeType.COMM_RECV and destination < 0 else destination


NodeCost = Callable[[ChakraFile, Node], float]  # microseconds of a node of a file


def foreign_execution(files: Sequence[ChakraFile], cost: NodeCost | None = None) -> Execution:
    """The run that files of other tools describe, at the times of their nodes or at their costs."""
    has_times = any(node.start_us for file in files for node in file.nodes)
    headers = tuple(Header(f.rank, str(f.path), profiled=False, is_graph=not has_times) for f in files)
    tasks: list[_Task] = []
    for file in files:
        tasks += _tasks(file, len(tasks), cost)
    job = _Job(tasks, headers, ProcessGroups(files), all(FOLDED in file.head for file in files))
    if not any(task.nanoseconds for task in job.tasks):
        path = files[0].path if len(files) == 1 else files[0].path.parent
        if cost is not None:
            raise InputError(f"{path}: its nodes state no operations, bytes or messages to estimate times from")
        raise InputError(
            f"{files[0].path}: none of its nodes has a duration (a workload for a simulator with a cost model); "
            f"estimate them for a GPU: lumos predict --from {path} --gpu h100"
        )
    return job.execution


def _tasks(file: ChakraFile, first: int, cost: NodeCost | None) -> Iterator[_Task]:
    """The nodes of a file as tasks, which are numbered from `first`."""
    index = {node.id: first + i for i, node in enumerate(file.nodes)}
    on_cpu = any("is_cpu_op" in node.values for node in file.nodes if node.type == NodeType.COMP)
    side_by_side = FOLDED in file.head or cost is not None
    for node in file.nodes:
        waits_for = tuple(dict.fromkeys(index[dep] for dep in file.waited_for(node)))
        micros = node.duration_us if cost is None else cost(file, node)
        lane, category = _lane(file.rank, node, on_cpu, side_by_side)
        yield _Task(file.rank, node, lane, category, round(min(micros, LONGEST_US) * 1000), waits_for)


def _lane(rank: int, node: Node, on_cpu: bool, side_by_side: bool) -> tuple[Lane, Category]:
    """What a node occupies while it runs.

    `on_cpu`: computation is the CPU's unless a node says otherwise. `side_by_side`: process groups do not wait for one
    another, as in files that Lumos folded or estimated. (Of folded ones, see `_Job.lanes`.)
    """
    if node.type in COMMUNICATION and not node.values.get("is_cpu_op", False):
        label = {NodeType.COMM_COLL: "collectives", NodeType.COMM_SEND: "sends"}.get(NodeType(node.type), "receives")
        if side_by_side and node.type == NodeType.COMM_COLL:
            label += f" {node.values.get('pg_name', '')}"[:20]
        return Lane(rank, True, "gpu", label), Category.KERNEL
    if node.type in (NodeType.MEM_LOAD, NodeType.MEM_STORE):
        return Lane(rank, True, "gpu", "memory"), Category.COPY
    if node.type == NodeType.COMP and not node.values.get("is_cpu_op", on_cpu):
        return Lane(rank, True, "gpu", str(node.values.get("stream", "compute"))[:40]), Category.KERNEL
    # A node named after a step is what the step does beside its operators, not the window of the step.
    return Lane(rank, False, "cpu", "cpu"), Category.OTHER if is_step(node.name) else Category.OP


@dataclass(frozen=True)
class _Job:
    """The tasks of all ranks, run once."""

    tasks: list[_Task]
    headers: tuple[Header, ...]
    groups: ProcessGroups
    folded: bool = False  # written by Lumos: durations hold no waiting

    @cached_property
    def has_times(self) -> bool:
        """Whether the files say when their nodes ran."""
        return not all(header.is_graph for header in self.headers)

    @cached_property
    def members(self) -> list[list[int]]:
        """The tasks of every collective or message that has more than one participant; a send comes first."""
        parts: dict[Any, dict[int, int]] = defaultdict(dict)
        count: Counter[Any] = Counter()
        for index, task in enumerate(self.tasks):
            if task.communicates:
                count[task.rank, task.node.type, task.key] += 1
                parts[task.key, count[task.rank, task.node.type, task.key]][task.rank] = index
        found = (sorted(part.values(), key=lambda i: self.tasks[i].node.type) for part in parts.values())
        return [indices for indices in found if len(indices) > 1]

    @cached_property
    def together(self) -> dict[int, list[int]]:
        """For every task with counterparts: all members of its collective or message."""
        return {index: indices for indices in self.members for index in indices}

    def transfer(self, index: int) -> int:
        """Nanoseconds of a task; of communication, those of the rank that waited the least: the others waited too."""
        if self.folded:
            return self.tasks[index].nanoseconds
        return min(self.tasks[member].nanoseconds for member in self.together.get(index, (index,)))

    def must_arrive(self, index: int) -> list[int]:
        """Which tasks must have started before a task's data moves: a send waits for none, a receive for its send."""
        found = self.together.get(index, [index])
        return found if self.tasks[index].node.type == NodeType.COMM_COLL else found[:1]

    @cached_property
    def started(self) -> tuple[list[float], list[float], list[int]]:
        """When every task starts and ends, in nanoseconds, and the order in which they started."""
        count = range(len(self.tasks))
        beside = [self.folded and task.communicates for task in self.tasks]
        feeder = Feeder(
            waits_for=[task.waits_for for task in self.tasks],
            lanes=[task.lane for task in self.tasks],
            turns=[(task.node.start_us, task.node.id) for task in self.tasks],
            lengths=[self.transfer(index) for index in count],
            together=self.together,
            before={index: self.must_arrive(index) for index in self.together},
            is_beside=beside,
            is_held=[beside[i] and self.tasks[i].node.type == NodeType.COMM_RECV for i in count],
        )
        start, end, order = feeder.run()
        if min(end, default=0) < 0:
            self._refuse(start, end)
        return start, end, order

    def _refuse(self, start: list[float], end: list[float]) -> None:
        """Name a task that never ends; one that started, if there is one: it waits for another rank."""
        stuck = min((i for i, ended in enumerate(end) if ended < 0), key=lambda i: (start[i] < 0, i))
        task = self.tasks[stuck]
        what = (
            "the other ranks never come to it: their collectives differ, or a file is missing"
            if start[stuck] >= 0
            else "the dependencies of its file form a cycle"
        )
        raise InputError(f"rank {task.rank}: node {task.node.id} ({task.node.name[:40]}) never ends: {what}")

    @cached_property
    def lanes(self) -> list[Lane]:
        """What every task occupies. Transfers of folded files get another lane where they run beside each other."""
        lanes = [task.lane for task in self.tasks]
        start, end, order = self.started
        until: dict[Lane, list[float]] = defaultdict(list)  # when each of the lanes beside each other is free
        for index in order if self.folded else ():
            if self.tasks[index].communicates:
                lane = lanes[index]
                free = until[lane]
                place = next((i for i, time in enumerate(free) if time <= start[index]), len(free))
                free[place : place + 1] = [end[index]]
                lanes[index] = lane._replace(label=f"{lane.label} ({place + 1})") if place else lane
        return lanes

    @cached_property
    def lane_numbers(self) -> dict[Lane, int]:
        return {lane: i for i, lane in enumerate(sorted(set(self.lanes)))}

    @cached_property
    def trace(self) -> Trace:
        """One row a task, in the order of the tasks; clocks that recorded them aligned by what ends together."""
        trace = self._unaligned
        offsets = clock_offsets(trace, self.rendezvous) if self.has_times else {}
        return trace.shifted(offsets) if offsets else trace

    @cached_property
    def _unaligned(self) -> Trace:
        tasks, names, messages = self.tasks, dict[str, int](), dict[Message, int]()
        start, end, _ = self.started
        found = [self._message(task) for task in tasks]
        if self.has_times:
            start = [min(task.node.start_us, LONGEST_US) * 1000 for task in tasks]
            end = [begin + task.nanoseconds for begin, task in zip(start, tasks, strict=True)]
        return Trace(
            name=np.array([names.setdefault(t.node.name, len(names)) for t in tasks], np.int32),
            message=np.array([-1 if m is None else messages.setdefault(m, len(messages)) for m in found], np.int32),
            names=tuple(names), lanes=tuple(self.lane_numbers), messages=tuple(messages), headers=self.headers,
            category=np.array([t.category for t in tasks], np.uint8),
            lane=np.array([self.lane_numbers[lane] for lane in self.lanes], np.int32), start=np.array(start, np.int64),
            duration=np.array(end, np.int64) - np.array(start, np.int64), correlation=np.full(len(tasks), -1, np.int64),
        )  # fmt: skip

    def _message(self, task: _Task) -> Message | None:
        if not task.communicates:
            return None
        sides = {NodeType.COMM_SEND: "send", NodeType.COMM_RECV: "recv"}
        name = sides.get(NodeType(task.node.type)) or COLLECTIVE_NAMES.get(
            task.node.number("comm_type"), "communication"
        )
        size, group = task.node.number("comm_size"), task.node.group
        ranks = self.groups.ranks(task.rank, group) if self.groups.is_stated(task.rank, group) else ()
        peers = dict(zip(("source", "destination"), task.peers, strict=True))
        return Message(name, "byte", size, size, group, len(ranks) or -1, ranks, **peers)

    @cached_property
    def rendezvous(self) -> list[Rendezvous]:
        return [self._rendezvous(indices) for indices in self.members]

    def _rendezvous(self, indices: list[int]) -> Rendezvous:
        tasks = [self.tasks[index] for index in indices]
        message = self._message(tasks[0])
        name = "send_recv" if tasks[0].node.type != NodeType.COMM_COLL else message.collective if message else ""
        size = message.group_size if message else -1
        return Rendezvous(name, np.array(indices, np.int32), tuple(t.rank for t in tasks), message, size <= len(tasks))

    @cached_property
    def nodes(self) -> Nodes:
        """One node a task, and for communication two: it arrives, then it transfers."""
        trace = self.trace
        turn = np.empty(len(trace), np.int64)
        turn[self.started[2]] = np.arange(len(trace))
        order = np.lexsort((turn, trace.lane))
        twice = 1 + np.array([self.tasks[i].communicates for i in order], np.int64)
        row = np.repeat(order, twice).astype(np.int32)
        first_node, last_node = np.empty(len(trace), np.int32), np.empty(len(trace), np.int32)
        last_node[order] = np.cumsum(twice) - 1
        first_node[order] = np.cumsum(twice) - twice
        number = np.arange(len(row))
        return Nodes(
            trace=trace,
            first=np.concatenate([[0], np.cumsum(np.bincount(trace.lane[row], minlength=len(trace.lanes)))]), row=row,
            start=trace.start[row], end=np.where(number < last_node[row], trace.start[row], trace.end[row]),
            is_return=number > first_node[row], first_node=first_node, last_node=last_node,
            parent=np.full(len(trace), -1, np.int32),
        )  # fmt: skip

    @cached_property
    def execution(self) -> Execution:
        nodes = self.nodes
        pairs = np.array([(s, t) for t, task in enumerate(self.tasks) for s in task.waits_for], np.int64).reshape(-1, 2)
        source, target = nodes.last_node[pairs[:, 0]], nodes.first_node[pairs[:, 1]]
        apart = nodes.lane[source] != nodes.lane[target]
        edges = [Edges.of(source[apart], target[apart], Rule.EVENT), *self._rendezvous_edges()]
        length = np.array([self.transfer(index) for index in range(len(self.tasks))], np.float64)[nodes.row]
        transfers = nodes.last_node[nodes.row] == np.arange(len(nodes))
        graph = nodes.graph(Edges.join(edges), len(self.members), duration=np.where(transfers, length, 0.0))
        origin = int(self.trace.start.min(initial=0))
        return Execution(self.trace, nodes, graph, origin, self.rendezvous, tuple(self._warnings()))

    def _rendezvous_edges(self) -> Iterator[Edges]:
        nodes = self.nodes
        for hub, indices in enumerate(self.members, len(nodes)):
            before = {index: self.must_arrive(index) for index in indices}
            arrive = nodes.first_node[sorted(set().union(*before.values()))]
            held = nodes.last_node[[index for index in indices if before[index] != [index]]]
            yield Edges.of(arrive, np.full(len(arrive), hub), Rule.COLLECTIVE)
            yield Edges.of(np.full(len(held), hub), held, Rule.COLLECTIVE)

    def _warnings(self) -> Iterator[str]:
        timeless = sum(task.communicates and not task.nanoseconds for task in self.tasks)
        if timeless:
            yield f"{timeless} nodes of communication have no duration; they take no time here"
        lonely = sum(task.communicates for task in self.tasks) - len(self.together)
        if lonely and len(self.headers) > 1:
            yield f"{lonely} nodes of communication have no counterpart in another rank"
        if not self.has_times:
            yield "the file does not say when its nodes ran: the recorded times are those of running its graph"
