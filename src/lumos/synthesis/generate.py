"""From a model to a run: tasks drawn for every rank and step, put on lanes with their dependencies, and simulated."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from lumos.analysis.collectives import bus_factor
from lumos.errors import OptionError
from lumos.graph.from_trace.build import Execution
from lumos.graph.from_trace.nodes import Nodes
from lumos.graph.from_trace.rendezvous import Rendezvous
from lumos.graph.graph import Edges, Floats, Ints, Rule
from lumos.graph.simulate import simulate
from lumos.synthesis.draw import TIMES, DrawnStep, draw_step, expected_tasks, normal_scores
from lumos.synthesis.model import Model, StateModel
from lumos.synthesis.observe import Group
from lumos.synthesis.vocabulary import PASS_NAMES, SYNC, TAIL, kernel_name
from lumos.trace.names import Category
from lumos.trace.trace import Header, Lane, Message, Trace

_MOST_TASKS = 20_000_000
_MOST = 100_000


@dataclass(frozen=True)
class Size:
    """What to generate; 0 is what was learned."""

    ranks: int = 0
    steps: int = 0
    layers: int = 0
    micro_batches: int = 0

    def of(self, model: Model) -> Size:
        """The same with what was learned in place of zeros, checked."""
        size = Size(
            self.ranks or model.ranks, self.steps or model.steps, self.layers or model.layers,
            self.micro_batches or model.micro_batches,
        )  # fmt: skip
        if self.layers and not model.layers:
            raise OptionError(f"--layers {self.layers}: the traces have no attention, by which layers are told apart")
        given = {"ranks": self.ranks, "steps": self.steps, "layers": self.layers, "micro-batches": self.micro_batches}
        for name, value in given.items():
            if not 0 <= value <= _MOST:
                raise OptionError(f"--{name} {value}: give a number from 1 to {_MOST:,}")
        return size


def generate(model: Model, size: Size | None = None, seed: int = 0) -> Execution:
    """A synthetic run: simulated, and ready to be written."""
    asked = size or Size()
    wanted = asked.of(model)
    groups = _groups_at(model, asked.ranks)
    if seed < 0:
        raise OptionError(f"--seed {seed}: give a number from 0")
    role = model.roles[0]
    tasks = expected_tasks(model, role, wanted.layers, wanted.micro_batches) * wanted.steps * wanted.ranks
    if not 0 < tasks <= _MOST_TASKS:
        raise OptionError(
            f"{wanted.ranks:,} ranks, {wanted.steps:,} steps, {wanted.layers:,} layers: {tasks:,.0f} tasks; "
            f"at most {_MOST_TASKS:,} are generated at once, so give fewer with --ranks, --steps or --layers"
        )
    steps = [
        draw_step(model, role, wanted.layers, wanted.micro_batches, np.random.default_rng([seed, number]))
        for number in range(wanted.steps)
    ]
    return _Builder(model, wanted, groups, steps, seed).execution()


def _groups_at(model: Model, ranks: int) -> list[Group]:
    """The process groups with another number of ranks: the outermost grows or shrinks, the others stay."""
    groups = [Group(*group) for group in model.groups]
    if not ranks or ranks == model.world or not groups:
        return groups
    outermost = max(range(len(groups)), key=lambda i: groups[i].size * groups[i].stride)
    inner = max(1, model.world // groups[outermost].size)
    if ranks % inner:
        raise OptionError(f"--ranks {ranks}: the learned job has groups of {inner} ranks; give a multiple of {inner}")
    groups[outermost] = groups[outermost]._replace(size=ranks // inner)
    return groups


class _Builder:
    """Puts the tasks of all ranks on lanes. Nodes of a rank: its host, then its streams."""

    def __init__(self, model: Model, size: Size, groups: list[Group], steps: list[DrawnStep], seed: int) -> None:
        self.model, self.size, self.groups, self.steps, self.seed = model, size, groups, steps, seed
        self.states: list[StateModel] = [state for step in steps for state in step.states]
        self.step_of = np.repeat(np.arange(len(steps)), [len(step.states) for step in steps])
        before = np.concatenate([[0], np.cumsum([len(step.phases) for step in steps])])
        self.turn = np.concatenate([step.turns + before[i] for i, step in enumerate(steps)])
        self.phase_of_turn = [phase for step in steps for phase in step.phases]
        self.kind = np.array([state.kind for state in self.states])
        self.stream = np.array([state.stream for state in self.states])
        self.group = np.array([state.group for state in self.states])
        self.factor = self._transfer_factors()
        self.sizes = self._drawn("bytes", 1)
        self.host_speed = _factors(model.spread.host, size.ranks, np.random.default_rng([seed, 5]))
        self.gpu_speed = _factors(model.spread.gpu, size.ranks, np.random.default_rng([seed, 6]))
        late = np.argsort(np.argsort(self.host_speed))  # who is slow also starts late, after the step before
        self.late = 1e3 * model.spread.start_us * (_scores(size.ranks)[late] - _scores(size.ranks)[0])
        self.step_speed = _factors(model.spread.step, len(steps), np.random.default_rng([seed, 7]))
        self.names: dict[str, int] = {}
        self.messages: dict[Message, int] = {}
        self.columns: dict[str, list[Any]] = defaultdict(list)
        self.node_columns: dict[str, list[Any]] = defaultdict(list)
        self.edges: list[Edges] = []
        self.lanes: list[Lane] = []
        self.first = [0]
        self.row_count = 0
        self.waits = self._waits()

    def _transfer_factors(self) -> Floats:
        """How much longer transfers take in groups of another size, by what a ring of that size moves."""
        factor = np.ones(len(self.states))
        for number, group in enumerate(self.groups):
            before = self.model.groups[number][0]
            for kind in set(self.kind[self.group == number].tolist()):
                some = (self.group == number) & (self.kind == kind)
                if before > 1 and group.size > 1:
                    factor[some] = bus_factor(kind, group.size) / bus_factor(kind, before)
        return factor

    @lru_cache(maxsize=64)  # noqa: B019
    def _transfers(self, number: int, leader: int) -> Floats:
        """Microseconds of every transfer of one group, which all its ranks share."""
        return self._drawn("busy", 1, number, leader) * self.factor

    def _drawn(self, name: str, *stream: int) -> Floats:
        """A column of all steps, by a stream of random numbers of its own."""
        drawn = [step.times(np.random.default_rng([self.seed, i, *stream])) for i, step in enumerate(self.steps)]
        return np.concatenate([one[name] for one in drawn])

    def _waits(self) -> list[tuple[int, int, bool, bool]]:
        """(task waited for, task that waits, whether the host does, only for its begin): the same for every rank."""
        launched: dict[int, list[int]] = defaultdict(list)
        found = []
        for number, state in enumerate(self.states):
            for stream, ago, begun in state.waits:
                if len(launched[stream]) > ago:
                    found.append((launched[stream][-1 - ago], number, state.kind == SYNC, begun))
            if state.stream >= 0:
                launched[state.stream].append(number)
        return found

    # One rank after another.

    def execution(self) -> Execution:
        """The run of all ranks."""
        transfers = [self._add_rank(rank) for rank in range(self.size.ranks)]
        rendezvous = self._rendezvous([arrivals for arrivals, _ in transfers])
        node = {name: np.concatenate(parts) for name, parts in self.node_columns.items()}
        hub_edges = self._hub_edges(rendezvous, node)
        nodes, trace = self._parts(node)
        graph = nodes.graph(
            Edges.join([*self.edges, *hub_edges]), len(rendezvous), duration=node["duration"], gap=node["gap"],
            frozen=np.zeros(len(nodes)),
        )  # fmt: skip
        times = simulate(graph)
        start, end = (np.rint(part[: len(nodes)]).astype(np.int64) for part in times)
        bare = Execution(trace, replace(nodes, start=start, end=end), graph, 0, rendezvous, ())
        timed = bare.retime(times)
        return replace(bare, trace=timed, nodes=replace(bare.nodes, trace=timed))

    def _times(self, rank: int) -> dict[str, Floats]:
        """Nanoseconds of every task of a rank."""
        drawn = [step.times(np.random.default_rng([self.seed, i, rank, 3])) for i, step in enumerate(self.steps)]
        columns = {name: 1e3 * np.concatenate([one[name] for one in drawn]) for name in TIMES}
        host, gpu, step = self.host_speed[rank], self.gpu_speed[rank], self.step_speed[self.step_of]
        columns["work"] *= host * step
        columns["call"] *= host * step
        columns["busy"] *= gpu * self._sharded()
        for number, group in enumerate(self.groups):
            shared = 1e3 * self._transfers(number, members_of(group, rank)[0])
            columns["busy"] = np.where(self.group == number, shared, columns["busy"])
        return {name: np.rint(values) for name, values in columns.items()}

    def _sharded(self) -> Floats:
        """What another number of ranks makes of the update of parameters that they share."""
        sharded = {"all_gather", "reduce_scatter"} <= set(self.kind.tolist())
        before = max((size for size, _ in self.model.groups), default=1)
        now = max((group.size for group in self.groups), default=1)
        factor = before / now if sharded else 1.0
        updates = np.array([self.phase_of_turn[turn] == "optimizer" for turn in self.turn])
        return np.where(updates, factor, 1.0)

    def _add_rank(self, rank: int) -> tuple[Ints, Ints]:
        """Add lanes, nodes, events and edges of a rank; rows of its kernels and nodes of their ends, by task."""
        times, count = self._times(rank), len(self.states)
        base = self.first[-1]
        # The host: work, then the call; a wait enters its call and returns from it.
        per_task = np.where(self.kind == SYNC, 3, np.where(self.kind == TAIL, 1, 2))
        work = base + np.cumsum(per_task) - per_task
        call = np.where(self.kind == TAIL, work, work + 1)
        back = work + per_task - 1
        host_nodes = int(per_task.sum())
        duration = np.zeros(host_nodes)
        duration[work - base] = times["work"]
        duration[back - base] += np.where(self.kind == TAIL, 0.0, times["call"])
        is_return = np.zeros(host_nodes, bool)
        is_return[back[self.kind == SYNC] - base] = True
        self.lanes.append(Lane(rank, False, "synthetic", "host"))
        self.first.append(base + host_nodes)
        host_rows = self._host_rows(rank, work, call, back)
        row_of_node = np.full(host_nodes, -1, np.int64)
        row_of_node[call - base], row_of_node[back - base] = host_rows["call"], host_rows["call"]
        row_of_node[work - base] = host_rows["work"]
        gap = np.zeros(host_nodes)
        gap[:1] = np.rint(self.late[rank])
        self._add_nodes(duration, gap, is_return, row_of_node)
        # Streams.
        arrive, end, rows = np.full(count, -1), np.full(count, -1), np.full(count, -1)
        for stream in range(self.model.streams):
            on = np.flatnonzero(self.stream == stream)
            self.lanes.append(Lane(rank, True, "synthetic", str(stream)))
            twice = 1 + (self.group[on] >= 0)
            first = self.first[-1] + np.cumsum(twice) - twice
            arrive[on], end[on] = first, first + twice - 1
            size = int(twice.sum())
            at = self.first[-1]
            busy, gap, transfer = np.zeros(size), np.zeros(size), np.zeros(size, bool)
            busy[end[on] - at] = times["busy"][on]
            gap[first - at] = times["delay"][on]
            transfer[end[on][twice > 1] - at] = True
            rows[on] = self._kernel_rows(rank, on, first, first + twice - 1)
            self._add_nodes(busy, gap, transfer, np.repeat(rows[on], twice))
            self.first.append(at + size)
        self._add_edges(times, call, back, arrive, end)
        return rows, end

    def _add_edges(self, times: dict[str, Floats], call: Ints, back: Ints, arrive: Ints, end: Ints) -> None:
        kernels = np.flatnonzero(arrive >= 0)
        launches = Edges.of(call[kernels], arrive[kernels], Rule.LAUNCH, from_start=True)
        lag = 1e3 * self.model.latency_us + times["delay"][kernels]
        self.edges.append(replace(launches, lag=np.rint(lag)))
        found = np.array(self.waits, np.int64).reshape(-1, 4)
        source, target, host, begun = found[:, 0], found[:, 1], found[:, 2] > 0, found[:, 3] > 0
        for some, from_start in ((~host & ~begun, False), (~host & begun, True)):
            node = arrive if from_start else end
            events = Edges.of(node[source[some]], arrive[target[some]], Rule.EVENT, from_start)
            self.edges.append(replace(events, lag=times["delay"][target[some]]))
        self.edges.append(Edges.of(end[source[host]], back[target[host]], Rule.SYNC))

    def _add_nodes(self, duration: Floats, gap: Floats, is_return: Any, row: Ints) -> None:
        for name, column in (("duration", duration), ("gap", gap), ("is_return", is_return), ("row", row)):
            self.node_columns[name].append(column)

    # Events.

    def _host_rows(self, rank: int, work: Ints, call: Ints, back: Ints) -> dict[str, Ints]:
        """Events of the host: steps, operators, calls. Rows of the calls, and of the first operator before each."""
        lane = len(self.lanes) - 1
        step_start = np.searchsorted(self.step_of, np.arange(len(self.steps)))
        step_end = np.searchsorted(self.step_of, np.arange(len(self.steps)), side="right") - 1
        labels = [f"ProfilerStep#{i}" for i in range(len(self.steps))]
        notes = self._add_rows(Category.NOTE, labels, lane, work[step_start], back[step_end])
        turns = np.unique(self.turn)
        turn_start, turn_end = np.searchsorted(self.turn, turns), np.searchsorted(self.turn, turns, side="right") - 1
        labels = [PASS_NAMES[self.phase_of_turn[turn]] for turn in turns]
        category = [Category.OP if label.startswith("autograd") else Category.NOTE for label in labels]
        passes = self._add_rows(
            category, labels, lane, work[turn_start], back[turn_end], parent=notes[self.step_of[turn_start]]
        )
        parent = passes[np.searchsorted(turns, self.turn)]
        means = np.array([state.operators for state in self.states])
        operators = np.diff(np.floor(np.cumsum(means) + 0.5), prepend=0).astype(np.int64)
        owner = np.repeat(np.arange(len(means)), operators)
        names = [f"host {kind}" for kind in self.kind[owner]]
        rows = self._add_rows(Category.OP, names, lane, work[owner], work[owner], parent=parent[owner])
        first = np.full(len(means), -1, np.int64)
        first[owner[::-1]] = rows[::-1]
        tail = self.kind == TAIL
        at = np.flatnonzero(~tail)
        named = np.where(self.kind[at] == SYNC, "cudaStreamSynchronize", "cudaLaunchKernel")
        calls = np.where(tail, first, -1)
        calls[at] = self._add_rows(
            Category.CALL, named.tolist(), lane, call[at], back[at], self._correlation(at), parent=parent[at]
        )
        return {"call": calls, "work": first}

    def _kernel_rows(self, rank: int, tasks: Ints, first: Ints, last: Ints) -> Ints:
        """Events of kernels on the stream that was added last."""
        category = np.select(
            [self.kind[tasks] == "copy", self.kind[tasks] == "set"], [Category.COPY, Category.SET], Category.KERNEL
        )
        names = [
            kernel_name(str(self.kind[task]), self.phase_of_turn[self.turn[task]], bool(self.group[task] >= 0))
            for task in tasks
        ]
        messages = [self._message(rank, int(task)) for task in tasks]
        return self._add_rows(
            category, names, len(self.lanes) - 1, first, last, self._correlation(tasks), messages=messages
        )

    def _message(self, rank: int, task: int) -> int:
        number = int(self.group[task])
        if number < 0:
            return -1
        kind, size = str(self.kind[task]), int(self.sizes[task])
        group = self.groups[number]
        part = max(1, size // group.size)
        whole = part * group.size if kind in ("all_gather", "reduce_scatter", "all_to_all") else size
        sent = part if kind == "all_gather" else whole
        received = part if kind == "reduce_scatter" else whole
        ranks = members_of(group, rank)
        one = Message(kind, "uint8", sent or -1, received or -1, f"group {number}", group.size, ranks)
        return self.messages.setdefault(one, len(self.messages))

    def _correlation(self, tasks: Ints) -> Ints:
        return tasks + 1

    def _add_rows(
        self, category: Any, names: list[str], lane: int, first: Ints, last: Ints, correlation: Any = -1,
        parent: Any = -1, messages: Any = -1,
    ) -> Ints:  # fmt: skip
        """Add events; their rows."""
        size = len(names)
        rows = np.arange(self.row_count, self.row_count + size)
        self.row_count += size
        ids = np.array([self.names.setdefault(name, len(self.names)) for name in names], np.int64)
        values = {
            "category": category, "name": ids, "lane": lane, "correlation": correlation, "message": messages,
            "first_node": first, "last_node": last, "parent": parent,
        }  # fmt: skip
        for name, value in values.items():
            self.columns[name].append(np.broadcast_to(np.asarray(value, np.int64), (size,)))
        return rows

    def _parts(self, node: dict[str, Any]) -> tuple[Nodes, Trace]:
        """Nodes and events without times."""
        column = {name: np.concatenate(parts) for name, parts in self.columns.items()}
        world = max(self.size.ranks, self.model.world if self.size.ranks == self.model.ranks else 0)
        none = np.zeros(self.row_count, np.int64)
        trace = Trace(
            names=tuple(self.names), lanes=tuple(self.lanes), messages=tuple(self.messages),
            headers=tuple(
                Header(
                    rank, f"synthetic rank {rank}", world, job="synthetic", shapes=self.model.shapes,
                    shapes_left_out=self.model.shapes,
                )
                for rank in range(self.size.ranks)
            ),
            category=column["category"].astype(np.uint8), start=none, duration=none,
            correlation=column["correlation"], name=column["name"].astype(np.int32),
            lane=column["lane"].astype(np.int32), message=column["message"].astype(np.int32),
        )  # fmt: skip
        size = len(node["duration"])
        nodes = Nodes(
            trace=trace, first=np.array(self.first, np.int64), row=node["row"].astype(np.int32),
            start=np.zeros(size, np.int64), end=np.zeros(size, np.int64), is_return=node["is_return"],
            **{name: column[name].astype(np.int32) for name in ("first_node", "last_node", "parent")},
        )  # fmt: skip
        return nodes, trace

    # Communication across ranks.

    def _rendezvous(self, rows: list[Ints]) -> list[Rendezvous]:
        """The collectives of all groups that have more than one rank here, in the order of tasks."""
        messages = list(self.messages)
        message_of = np.concatenate(self.columns["message"])
        found = []
        for task in np.flatnonzero(self.group >= 0).tolist():
            group = self.groups[self.group[task]]
            for ranks in sorted({members_of(group, rank) for rank in range(self.size.ranks)}):
                here = tuple(rank for rank in ranks if rank < self.size.ranks)
                if len(here) < 2:
                    continue
                members = np.array([rows[rank][task] for rank in here], np.int32)
                message = messages[message_of[members[0]]]
                found.append(Rendezvous(str(self.kind[task]), members, here, message, len(here) == len(ranks)))
        return found

    def _hub_edges(self, rendezvous: list[Rendezvous], node: dict[str, Any]) -> list[Edges]:
        if not rendezvous:
            return []
        first, last = (np.concatenate(self.columns[name]) for name in ("first_node", "last_node"))
        size = len(node["duration"])
        rows = np.concatenate([one.rows for one in rendezvous])
        hub = size + np.repeat(np.arange(len(rendezvous)), [len(one.rows) for one in rendezvous])
        return [Edges.of(first[rows], hub, Rule.COLLECTIVE), Edges.of(hub, last[rows], Rule.COLLECTIVE)]


def members_of(group: Group, rank: int) -> tuple[int, ...]:
    """The ranks of the group of this form that a rank is in."""
    base = rank - (rank // group.stride) % group.size * group.stride
    return tuple(base + group.stride * i for i in range(group.size))


def _factors(spread: float, count: int, generator: np.random.Generator) -> Floats:
    """Factors around 1 whose logarithms have this standard deviation, whatever their number, in random order."""
    factors = np.exp(spread * generator.permutation(_scores(count)))
    return np.asarray(factors / factors.mean(), np.float64)


def _scores(count: int) -> Floats:
    """Normal scores, ascending, with a standard deviation of 1."""
    scores = normal_scores((np.arange(count) + 0.5) / count)
    return scores / scores.std() if count > 1 else scores
