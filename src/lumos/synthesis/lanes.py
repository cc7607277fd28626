"""Drawn steps of all ranks as a run: tasks on lanes, what waits for what, and the events of a trace; simulated."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from lumos.analysis.collectives import bus_factor
from lumos.errors import InputError
from lumos.graph.graph import Edges, Floats, Ints, Rule, simulate
from lumos.graph.rules.build import Execution
from lumos.graph.rules.nodes import Nodes
from lumos.graph.rules.rendezvous import Rendezvous
from lumos.synthesis.draw import MESSAGE, TIMES, DrawnStep
from lumos.synthesis.model import Model
from lumos.synthesis.observe import Group
from lumos.synthesis.ranks import RankDifferences
from lumos.synthesis.vocabulary import PASS_NAMES, SYNC, TAIL, kernel_name
from lumos.trace.names import Category
from lumos.trace.trace import Header, Lane, Message, Trace

_MESSAGE_STREAMS = 4  # of a pipeline: forward and backward, receive and send


class RoleTasks:
    """The tasks of all steps of one role, as columns."""

    def __init__(self, steps: list[DrawnStep]) -> None:
        self.steps = steps
        self.states = [state for step in steps for state in step.states]
        self.step_of = np.repeat(np.arange(len(steps)), [len(step.states) for step in steps])
        before = np.concatenate([[0], np.cumsum([len(step.phases) for step in steps])])
        self.turn = np.concatenate([step.turns + before[i] for i, step in enumerate(steps)])
        self.phases = [phase for step in steps for phase in step.phases]
        self.kind = np.array([state.kind for state in self.states])
        self.stream = np.array([state.stream for state in self.states])
        self.group = np.array([state.group for state in self.states])

    def __len__(self) -> int:
        return len(self.states)

    def phase_of(self, task: int) -> str:
        return self.phases[int(self.turn[task])]

    def drawn(self, generator_of_step: Any) -> dict[str, Floats]:
        """Columns of all tasks, each step with random numbers of its own."""
        drawn = [step.times(generator_of_step(i)) for i, step in enumerate(self.steps)]
        return {name: np.concatenate([one[name] for one in drawn]) for name in (*TIMES, "bytes")}

    @cached_property
    def waits(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Task waited for, task that waits, whether the host does, whether only for its begin."""
        launched: dict[int, list[int]] = defaultdict(list)
        found: list[tuple[int, int, bool, bool]] = []
        posted: list[int] = []
        received = False
        for number, state in enumerate(self.states):
            for stream, ago, begun in state.waits:
                if len(launched[stream]) > ago:
                    found.append((launched[stream][-1 - ago], number, state.kind == SYNC, begun))
            if state.stream == 0:  # what is received is needed now, and what was sent with it went in the same call
                found += [(message, number, False, False) for message in (posted if received else [])]
                posted, received = ([], False) if received else (posted, False)
            elif state.group == MESSAGE:
                posted, received = [*posted[-1:], number], received or state.kind == "recv"
            if state.stream >= 0:
                launched[state.stream].append(number)
        columns = np.array(found, np.int64).reshape(-1, 4).T
        return columns[0], columns[1], columns[2], columns[3]


_LONGEST_NS = 1e17  # three years


class Lanes:
    """Puts the tasks of all ranks on lanes. Nodes of a rank: its host, then its streams."""

    def __init__(
        self, model: Model, groups: list[Group], role_of_rank: list[int], steps: list[list[DrawnStep]], seed: int
    ) -> None:
        self.model, self.groups, self.role_of_rank, self.seed = model, groups, role_of_rank, seed
        self.roles = [RoleTasks([step[role] for step in steps]) for role in range(len(model.roles))]
        self.ranks = RankDifferences(model, role_of_rank, len(steps), seed)
        self.events = _Events()
        self.nodes: dict[str, list[Any]] = defaultdict(list)
        self.edges: list[Edges] = []
        self.lanes: list[Lane] = []
        self.first = [0]
        self.rows: list[Ints] = []  # of the kernels of every rank, by task
        self._transfers: dict[tuple[int, int], dict[str, Floats]] = {}
        self._collective_rows: dict[tuple[str, int, int, int], int] = {}

    def execution(self) -> Execution:
        """The run of all ranks."""
        for rank in range(len(self.role_of_rank)):
            self._add_rank(rank)
        rendezvous = [*self._collectives(), *self._messages()]
        node = {name: np.concatenate(parts) for name, parts in self.nodes.items()}
        nodes, trace = self._parts(node)
        edges = Edges.join([*self.edges, *self._hub_edges(rendezvous, nodes)])
        none = np.zeros(len(nodes))
        graph = nodes.graph(edges, len(rendezvous), duration=node["duration"], gap=node["gap"], frozen=none)
        times = simulate(graph)
        if not max(part.max(initial=0.0) for part in times) < _LONGEST_NS:
            raise InputError("the synthetic run would take years: learn from a run whose times are plausible")
        start, end = (np.rint(part[: len(nodes)]).astype(np.int64) for part in times)
        bare = Execution(trace, replace(nodes, start=start, end=end), graph, 0, rendezvous, ())
        timed = bare.retime(times)
        return replace(bare, trace=timed, nodes=replace(bare.nodes, trace=timed))

    # Times.

    def _generator(self, *stream: int) -> Any:
        return lambda step: np.random.default_rng([self.seed, step, *stream])

    def transfers(self, number: int, leader: int) -> dict[str, Floats]:
        """Microseconds and bytes of the collectives of one group, in their order, which all its ranks share."""
        if (number, leader) not in self._transfers:
            tasks = self.roles[self.role_of_rank[min(leader, len(self.role_of_rank) - 1)]]
            columns, mine = tasks.drawn(self._generator(1, number, leader)), tasks.group == number
            sizes = tasks.drawn(self._generator(1))["bytes"][mine]  # the same in all groups of this form
            factor = self._factor(number, tasks.kind[mine])
            self._transfers[number, leader] = {"busy": columns["busy"][mine] * factor, "bytes": sizes}
        return self._transfers[number, leader]

    def _factor(self, number: int, kinds: Any) -> Floats:
        """How much longer transfers take in a group of another size, by what a ring of that size moves."""
        before, now = self.model.groups[number][0], self.groups[number].size
        if before < 2:
            return np.ones(len(kinds))  # nothing is known
        if now < 2:
            return np.zeros(len(kinds))  # nothing moves
        return np.array([bus_factor(kind, now) / bus_factor(kind, before) for kind in kinds.tolist()])

    def _times(self, rank: int) -> dict[str, Floats]:
        """Nanoseconds of every task of a rank."""
        tasks = self.roles[self.role_of_rank[rank]]
        drawn = tasks.drawn(self._generator(rank, 3))
        columns = {name: 1e3 * drawn[name] for name in TIMES}
        host, gpu = self.ranks.host[rank][tasks.step_of], self.ranks.gpu[rank][tasks.step_of]
        columns["work"] *= host
        columns["call"] *= host
        columns["busy"] *= np.where(tasks.group == -1, gpu * self._sharded(tasks), 1.0)
        columns["work"][_bounds(tasks.step_of)[0]] += 1e3 * self.ranks.lead_us[rank]
        for number, group in enumerate(self.groups):
            columns["busy"][tasks.group == number] = 1e3 * self.transfers(number, leader_of(group, rank))["busy"]
        return {name: np.rint(values) for name, values in columns.items()}

    def _sharded(self, tasks: RoleTasks) -> Floats:
        """What another number of ranks makes of the update of parameters that they share."""
        sharded = {"all_gather", "reduce_scatter"} <= set(tasks.kind.tolist())
        before = max((size for size, _ in self.model.groups), default=1)
        now = max((group.size for group in self.groups), default=1)
        updates = np.array([phase == "optimizer" for phase in tasks.phases], bool)[tasks.turn]
        return np.where(updates & sharded, before / now, 1.0)

    # One rank after another.

    def _add_rank(self, rank: int) -> None:
        """Add lanes, nodes, events and edges of a rank."""
        tasks, times = self.roles[self.role_of_rank[rank]], self._times(rank)
        call, back = self._add_host(rank, tasks, times)
        arrive, end, rows = (np.full(len(tasks), -1) for _ in range(3))
        streams = self.model.streams + (_MESSAGE_STREAMS if self.model.pipeline else 0)
        for stream in range(streams):
            on = np.flatnonzero(tasks.stream == stream)
            self.lanes.append(Lane(rank, True, "synthetic", str(stream)))
            low, twice = self.first[-1], 1 + (tasks.group[on] != -1)
            arrive[on] = low + np.cumsum(twice) - twice
            end[on] = arrive[on] + twice - 1
            busy, gap, transfer = (np.zeros(int(twice.sum())) for _ in range(3))
            busy[end[on] - low] = times["busy"][on]
            gap[arrive[on] - low] = times["delay"][on]
            transfer[end[on][twice > 1] - low] = 1
            rows[on] = self._kernel_rows(rank, tasks, on, arrive[on], end[on])
            self._add_nodes(busy, gap, transfer > 0, np.repeat(rows[on], twice))
        self.rows.append(rows)
        self._add_edges(tasks, times, call, back, arrive, end)

    def _add_host(self, rank: int, tasks: RoleTasks, times: dict[str, Floats]) -> tuple[Ints, Ints]:
        """The host: work, then the call; a wait enters its call and returns from it. First and last nodes of calls."""
        sync, tail, base = tasks.kind == SYNC, tasks.kind == TAIL, self.first[-1]
        count = np.where(sync, 3, np.where(tail, 1, 2))
        work = base + np.cumsum(count) - count
        call, back = np.where(tail, work, work + 1), work + count - 1
        size = int(count.sum())
        duration, is_return, gap = np.zeros(size), np.zeros(size, bool), np.zeros(size)
        duration[work - base] = times["work"]
        duration[back - base] += np.where(tail, 0.0, times["call"])
        is_return[back[sync] - base] = True
        gap[:1] = np.rint(1e3 * self.ranks.late_us[rank])
        self.lanes.append(Lane(rank, False, "synthetic", "host"))
        calls, first = self._host_rows(tasks, work, call, back)
        row = np.full(size, -1, np.int64)
        row[call - base], row[back - base] = calls, calls
        row[work - base] = first
        self._add_nodes(duration, gap, is_return, row)
        return call, back

    def _add_edges(
        self, tasks: RoleTasks, times: dict[str, Floats], call: Ints, back: Ints, arrive: Ints, end: Ints
    ) -> None:
        """Launches, waits of streams for streams, and waits of the host."""
        kernels, delay = np.flatnonzero(arrive >= 0), times["delay"]
        launches = Edges.of(call[kernels], arrive[kernels], Rule.LAUNCH, from_start=True)
        self.edges.append(replace(launches, lag=np.rint(1e3 * self.model.latency_us + delay[kernels])))
        source, target, host, begun = tasks.waits
        for some, from_start in (((host == 0) & (begun == 0), False), ((host == 0) & (begun > 0), True)):
            node = arrive if from_start else end
            events = Edges.of(node[source[some]], arrive[target[some]], Rule.EVENT, from_start)
            self.edges.append(replace(events, lag=delay[target[some]]))
        self.edges.append(Edges.of(end[source[host > 0]], back[target[host > 0]], Rule.SYNC))

    def _add_nodes(self, duration: Floats, gap: Floats, is_return: Any, row: Ints) -> None:
        """Add the nodes of the lane that was added last."""
        for name, column in (("duration", duration), ("gap", gap), ("is_return", is_return), ("row", row)):
            self.nodes[name].append(column)
        self.first.append(self.first[-1] + len(duration))

    # Events.

    def _host_rows(self, tasks: RoleTasks, work: Ints, call: Ints, back: Ints) -> tuple[Ints, Ints]:
        """Steps, passes, operators and calls. Rows of the calls, and of the first operator before each."""
        lane, add = len(self.lanes) - 1, self.events.add
        low, high = _bounds(tasks.step_of)
        steps = add(Category.NOTE, [f"ProfilerStep#{i}" for i in range(len(low))], lane, work[low], back[high])
        low, high = _bounds(tasks.turn)
        names = [PASS_NAMES[tasks.phase_of(task)] for task in low.tolist()]
        category = [Category.OP if name.startswith("autograd") else Category.NOTE for name in names]
        passes = add(category, names, lane, work[low], back[high], parent=steps[tasks.step_of[low]])
        parent = passes[np.searchsorted(low, np.arange(len(tasks)), side="right") - 1]
        means = np.array([state.operators for state in tasks.states])
        owner = np.repeat(np.arange(len(means)), np.diff(np.floor(np.cumsum(means) + 0.5), prepend=0).astype(np.int64))
        names = [f"host {kind}" for kind in tasks.kind[owner]]
        rows = add(Category.OP, names, lane, work[owner], work[owner], parent=parent[owner])
        first = np.full(len(means), -1, np.int64)
        first[owner[::-1]] = rows[::-1]
        at = np.flatnonzero(tasks.kind != TAIL)
        names = np.where(tasks.kind[at] == SYNC, "cudaStreamSynchronize", "cudaLaunchKernel").tolist()
        calls = first.copy()
        calls[at] = add(Category.CALL, names, lane, call[at], back[at], correlation=at + 1, parent=parent[at])
        return calls, first

    def _kernel_rows(self, rank: int, tasks: RoleTasks, on: Ints, first: Ints, last: Ints) -> Ints:
        """Events of kernels on the stream that was added last."""
        kind = tasks.kind[on]
        category = np.select([kind == "copy", kind == "set"], [Category.COPY, Category.SET], Category.KERNEL)
        names = [kernel_name(k, tasks.phase_of(i), bool(tasks.group[i] != -1)) for k, i in zip(kind, on, strict=True)]
        messages = np.full(len(on), -1)
        for number in set(tasks.group[on].tolist()) - {-1}:
            some = np.flatnonzero(tasks.group[on] == number)
            messages[some] = self._message_rows(rank, tasks, on[some], number)
        return self.events.add(category, names, len(self.lanes) - 1, first, last, correlation=on + 1, message=messages)

    def _message_rows(self, rank: int, tasks: RoleTasks, on: Ints, number: int) -> list[int]:
        """What is said of communication: kind, size, ranks."""
        if number == MESSAGE:
            return [self.events.message(self._sent(rank, tasks, task)) for task in on.tolist()]
        leader = leader_of(self.groups[number], rank)
        sizes = self.transfers(number, leader)["bytes"]
        place = np.searchsorted(np.flatnonzero(tasks.group == number), on)
        found = zip(tasks.kind[on].tolist(), sizes[place].tolist(), strict=True)
        return [self._collective_row(kind, int(size), number, leader) for kind, size in found]

    def _collective_row(self, kind: str, size: int, number: int, leader: int) -> int:
        """The number of a message, which all ranks of a group share: it names every one of them."""
        key = (kind, size, number, leader)
        if key not in self._collective_rows:
            said = _collective(kind, size, number, self.groups[number], leader)
            self._collective_rows[key] = self.events.message(said)
        return self._collective_rows[key]

    def _sent(self, rank: int, tasks: RoleTasks, task: int) -> Message:
        """A message to or from a neighbouring stage; all of a pipeline are of one size."""
        assert self.model.pipeline is not None
        size = max(1, round(self.model.pipeline.columns["bytes"].mean))
        kind, forward = tasks.states[task].kind, tasks.phase_of(task) == "forward"
        peer = rank + self._stride * (1 if forward == (kind == "send") else -1)
        source, destination = (rank, peer) if kind == "send" else (peer, rank)
        return Message(kind, "uint8", size, size, "pipeline", 2, source=source, destination=destination)

    @cached_property
    def _stride(self) -> int:
        """Ranks between neighbouring stages."""
        return len(self.role_of_rank) // self.model.pipeline.stages if self.model.pipeline else 1

    def _parts(self, node: dict[str, Any]) -> tuple[Nodes, Trace]:
        """Nodes and events without times."""
        ranks, shapes = len(self.role_of_rank), self.model.shapes
        world = max(ranks, self.model.world if ranks == self.model.ranks else 0)
        headers = tuple(
            Header(
                rank, f"synthetic rank {rank}", world, job="synthetic", shapes=shapes, shapes_left_out=shapes,
                profiled=False,
            )
            for rank in range(ranks)
        )  # fmt: skip
        column = self.events.joined()
        trace = self.events.trace(tuple(self.lanes), headers)
        none = np.zeros(len(node["duration"]), np.int64)
        small = {name: column[name].astype(np.int32) for name in ("first_node", "last_node", "parent")}
        first, row = np.array(self.first, np.int64), node["row"].astype(np.int32)
        return Nodes(trace, first, row, none, none, node["is_return"], **small), trace

    # Communication across ranks.

    def _collectives(self) -> list[Rendezvous]:
        """The collectives of all groups that have more than one rank here."""
        found, ranks = [], len(self.role_of_rank)
        message, messages = self.events.joined()["message"], self.events.messages
        for number, group in enumerate(self.groups):
            for leader in sorted({leader_of(group, rank) for rank in range(ranks)}):
                members = members_of(group, leader)
                here = tuple(rank for rank in members if rank < ranks)
                if len(here) < 2:
                    continue
                tasks = [np.flatnonzero(self.roles[self.role_of_rank[rank]].group == number) for rank in here]
                rows = np.stack([self.rows[r][t] for r, t in zip(here, tasks, strict=True)], axis=1).astype(np.int32)
                complete = len(here) == len(members)
                for row in rows:
                    said = messages[message[row[0]]]
                    found.append(Rendezvous(said.collective, row, here, said, complete))
        return found

    def _messages(self) -> list[Rendezvous]:
        """Messages between neighbouring stages: the first sent is the first received."""
        if self.model.pipeline is None:
            return []
        found, said, messages = [], self.events.joined()["message"], self.events.messages
        for low in range(len(self.role_of_rank) - self._stride):
            high = low + self._stride
            for phase, sender, receiver in (("forward", low, high), ("backward", high, low)):
                sent, received = (self._of(rank, kind, phase) for rank, kind in ((sender, "send"), (receiver, "recv")))
                for pair in np.stack([sent, received], axis=1).astype(np.int32):
                    found.append(Rendezvous("send_recv", pair, (sender, receiver), messages[said[pair[0]]], True))
        return found

    def _of(self, rank: int, kind: str, phase: str) -> Ints:
        """Rows of the messages of a rank."""
        tasks = self.roles[self.role_of_rank[rank]]
        stream = self.model.streams + 2 * (phase == "backward") + (kind == "send")
        return self.rows[rank][np.flatnonzero((tasks.group == MESSAGE) & (tasks.stream == stream))]

    def _hub_edges(self, rendezvous: list[Rendezvous], nodes: Nodes) -> list[Edges]:
        if not rendezvous:
            return []
        rows = np.concatenate([one.rows for one in rendezvous])
        hub = len(nodes) + np.repeat(np.arange(len(rendezvous)), [len(one.rows) for one in rendezvous])
        arrive, transfer = nodes.first_node[rows], nodes.last_node[rows]
        return [Edges.of(arrive, hub, Rule.COLLECTIVE), Edges.of(hub, transfer, Rule.COLLECTIVE)]


class _Events:
    """The events of a trace, added lane by lane."""

    def __init__(self) -> None:
        self.count = 0
        self.names: dict[str, int] = {}
        self._numbers: dict[Message, int] = {}
        self.columns: dict[str, list[Ints]] = defaultdict(list)

    def add(
        self, category: Any, names: list[str], lane: int, first: Ints, last: Ints, correlation: Any = -1,
        parent: Any = -1, message: Any = -1,
    ) -> Ints:  # fmt: skip
        """Add events with their first and last nodes; their rows."""
        size = len(names)
        rows = np.arange(self.count, self.count + size)
        self.count += size
        name = np.array([self.names.setdefault(name, len(self.names)) for name in names], np.int64)
        values = {
            "category": category, "name": name, "lane": lane, "correlation": correlation, "message": message,
            "first_node": first, "last_node": last, "parent": parent,
        }  # fmt: skip
        for key, value in values.items():
            self.columns[key].append(np.broadcast_to(np.asarray(value, np.int64), (size,)))
        return rows

    def message(self, one: Message) -> int:
        """The number of a message."""
        return self._numbers.setdefault(one, len(self._numbers))

    @property
    def messages(self) -> list[Message]:
        return list(self._numbers)

    def joined(self) -> dict[str, Ints]:
        return {name: np.concatenate(parts) for name, parts in self.columns.items()}

    def trace(self, lanes: tuple[Lane, ...], headers: tuple[Header, ...]) -> Trace:
        """All events at time zero."""
        column, none = self.joined(), np.zeros(self.count, np.int64)
        name, lane, message = (column[key].astype(np.int32) for key in ("name", "lane", "message"))
        return Trace(
            tuple(self.names), lanes, tuple(self._numbers), headers, column["category"].astype(np.uint8), name, lane,
            none, none, column["correlation"], message,
        )  # fmt: skip


def leader_of(group: Group, rank: int) -> int:
    """The first rank of the group of this form that a rank is in."""
    return rank - (rank // group.stride) % group.size * group.stride


def members_of(group: Group, leader: int) -> tuple[int, ...]:
    """The ranks of the group of this form that begins with a rank."""
    return tuple(leader + group.stride * i for i in range(group.size))


def _collective(kind: str, size: int, number: int, group: Group, leader: int) -> Message:
    """What every rank puts in and gets out."""
    part = max(1, size // group.size)
    divided = kind in ("all_gather", "reduce_scatter", "all_to_all")
    whole = part * group.size if divided else max(size, 1)
    sent = part if kind == "all_gather" else whole
    received = part if kind == "reduce_scatter" else whole
    known = size > 0
    ranks = members_of(group, leader)
    return Message(
        kind, "uint8", sent if known else -1, received if known else -1, f"group {number}", group.size, ranks
    )


def _bounds(numbers: Ints) -> tuple[Ints, Ints]:
    """The first and the last place of each number in a sorted column."""
    found = np.unique(numbers)
    return np.searchsorted(numbers, found), np.searchsorted(numbers, found, side="right") - 1
