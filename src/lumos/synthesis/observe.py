"""What one step of a run did, as the tasks of every rank in the order in which its host issued them.

A task is a kernel with the host work and the launch before it, or a wait of the host for the GPU, or what the host does
after its last launch. What the host does before the first task of a step (loading data, or being late) is its *lead*;
it belongs to the rank and not to the task. Times are split so that a graph of the same form gives the same step again:

    host     [ work ][ call ]              work and call: what the host itself needs, without waiting
    stream             └─ latency ─►··[ kernel ]     delay (··): after the launch, the kernel before it on the stream
                                                     and everything else it waits for
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lumos.analysis.collectives import message_bytes
from lumos.analysis.kernel_labels import KernelPhase, RankLabels, label_launches
from lumos.analysis.replay import Replay
from lumos.errors import InputError
from lumos.graph.graph import Floats, Ints, Rule
from lumos.graph.rules.rendezvous import POINT_TO_POINT
from lumos.synthesis.vocabulary import SYNC, TAIL, collective_kind, compute_kind
from lumos.trace.trace import Message

_AGO = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192])  # how far back waits are told apart
_MOST_AGO = 200  # kernels of a stream that are looked back for one that is waited for
_PAUSE = 5.0  # times the usual work
_SHORTEST_PASS = 4  # tasks; shorter ones belong to the pass before
_LATENCY_QUANTILE = 0.1


class Group(NamedTuple):
    """A process group by its form: so many ranks, so far apart."""

    size: int
    stride: int


class Wait(NamedTuple):
    """What a task waits for: the last kernel of a stream, or one before it, to end or only to have begun."""

    stream: int
    ago: int
    begun: bool = False


class State(NamedTuple):
    """What a task is, as far as a model tells tasks apart."""

    kind: str
    stream: int  # 0 is the one that computes most; -1: none
    group: int = -1  # an index into the groups of the run
    waits: tuple[Wait, ...] = ()  # at most one a stream
    pause: bool = False  # the host works much longer than usual before it


class Task(NamedTuple):
    """One task. Times are nanoseconds; bytes are -1 where they are not known."""

    state: State
    work: float
    call: float
    delay: float
    busy: float
    bytes: float
    operators: int  # that the host ran before it, as far as they were recorded
    row: int  # of its kernel; -1: none


@dataclass(frozen=True)
class Block:
    """The tasks between two attentions of a pass, or before the first one, or after the last one."""

    phase: str
    last: bool  # of the last micro-batch of its step
    place: str  # first, middle, last
    tasks: list[Task]
    turn: int = 0  # the pass of its step


@dataclass(frozen=True)
class ObservedRank:
    """One step of one rank."""

    rank: int
    blocks: list[Block]
    passes: tuple[str, ...]  # forward, backward, optimizer, in their order
    layers: int  # attentions of a forward pass; 0 where there are none
    latency: float
    lead: float = 0.0  # what passes on the host between the beginning of the step and its first task
    peers: tuple[int, ...] = ()  # ranks that it exchanges messages with
    begun: float = 0.0  # nanoseconds after the start of the run, by which ranks are apart

    @property
    def tasks(self) -> list[Task]:
        return [task for block in self.blocks for task in block.tasks]


@dataclass(frozen=True)
class Observed:
    """One step of a run."""

    ranks: list[ObservedRank]
    groups: list[Group]
    streams: int
    world: int
    shapes: bool
    warnings: list[str] = field(default_factory=list)


class Job(NamedTuple):
    """The steps of one job that were observed."""

    name: str
    steps: list[Observed]

    @property
    def layers(self) -> int:
        return max((rank.layers for step in self.steps for rank in step.ranks), default=0)


def observe(run: Replay) -> list[Observed]:
    """The tasks of every step."""
    execution = run.execution
    if (execution.trace.launch_row >= 0).sum() == 0:
        path = execution.trace.headers[0].path if execution.trace.headers else "the trace"
        raise InputError(f"{path}: no kernel in it has its launch; record CPU and CUDA activities together")
    observer = _Observer(run)
    headers = execution.trace.headers
    world = max(max(header.world_size, header.rank + 1) for header in headers)
    found = []
    for step, labels in enumerate(label_launches(run)):
        ranks = [observer.rank(one, observer.window(step, column)) for column, one in enumerate(labels)]
        first = min(rank.begun for rank in ranks)
        ranks = [replace(rank, begun=rank.begun - first) for rank in ranks]
        found.append(Observed(ranks, list(observer.groups), observer.most_streams, world, headers[0].shapes))
    if not any(rank.layers or len(rank.tasks) > 1 for step in found for rank in step.ranks):
        raise InputError(f"{headers[0].path}: no kernel was launched inside a step; record whole steps")
    return found


class _Observer:
    """Reads tasks off one simulated run."""

    def __init__(self, run: Replay) -> None:
        self.run, self.execution = run, run.execution
        self.trace, self.nodes, self.graph = self.execution.trace, self.execution.nodes, self.execution.graph
        self.start, self.end = run.times
        self.most_streams = 1
        self.meeting = {int(row): found for found in self.execution.rendezvous for row in found.rows}
        rows = np.flatnonzero(self.trace.is_communication).tolist()
        forms = sorted({self._form(row) for row in rows}, key=lambda group: (group.stride, group.size))
        self.groups = {form: number for number, form in enumerate(forms)}

    def window(self, step: int, column: int) -> tuple[float, float]:
        """From when to when the host of a rank worked on a step."""
        note = int(self.run.marks.note[step, column])
        if note >= 0 and self.nodes.first_node[note] >= 0:
            return float(self.start[self.nodes.first_node[note]]), float(self.end[self.nodes.last_node[note]])
        nodes = np.flatnonzero((self.nodes.rank == self.run.marks.ranks[column]) & ~self.nodes.on_gpu)
        return float(self.start[nodes].min(initial=np.inf)), float(self.end[nodes].max(initial=0.0))

    def rank(self, labels: RankLabels, window: tuple[float, float]) -> ObservedRank:
        """The tasks of one rank, in blocks."""
        streams = self._streams(labels)
        self.most_streams = max(self.most_streams, len(streams))
        issued = self._issued(labels, window)
        latency = self._latency(labels.row)
        tasks: list[Task] = []
        phases: list[int] = []
        marks: list[int] = []
        timeline = _HostTime(self, labels.rank, window)
        launched: dict[int, list[int]] = {}  # arrivals of kernels by stream, in the order of launches
        for moment in issued:
            work, call, operators = timeline.until(moment)
            if moment.kernel < 0:
                waits = tuple(sorted({Wait(streams.get(lane, 0), 0) for lane in moment.lanes}))
                tasks.append(Task(State(SYNC, -1, waits=waits), work, call, 0.0, 0.0, -1.0, operators, -1))
                phases.append(phases[-1] if phases else int(KernelPhase.FORWARD))
                marks.append(0)
                continue
            row = int(labels.row[moment.kernel])
            state, delay = self._state(row, int(labels.work[moment.kernel]), streams, launched, moment, latency)
            busy = self._busy(row)
            size = float(message_bytes(self._message(row))) if state.group >= 0 else -1.0
            tasks.append(Task(state, work, call, delay, busy, size, operators, row))
            phases.append(int(labels.phase[moment.kernel]))
            marks.append(int(labels.attention[moment.kernel]))
            launched.setdefault(streams[int(self.trace.lane[row])], []).append(row)
        work, operators = timeline.rest()
        tasks.append(Task(State(TAIL, -1), work, 0.0, 0.0, 0.0, -1.0, operators, -1))
        phases.append(phases[-1] if phases else 0)
        marks.append(0)
        lead, tasks[0] = tasks[0].work, tasks[0]._replace(work=0.0)
        blocks, passes, layers = _blocks(_with_pauses(tasks), _smooth(phases), marks)
        return ObservedRank(labels.rank, blocks, passes, layers, latency, lead, self._peers(labels), timeline.begun)

    # Streams and their kernels.

    def _streams(self, labels: RankLabels) -> dict[int, int]:
        """The number of every stream: the one that computes most is 0, the others follow by what runs on them."""
        lanes = self.trace.lane[labels.row]
        computing = np.where(self.trace.is_communication[labels.row], 0.0, labels.us)
        found = np.unique(lanes).tolist()
        computed = np.bincount(lanes, computing, len(self.trace.lanes))
        main = max(found, key=lambda lane: float(computed[lane]), default=-1)  # a rank may have none
        by_lane = np.argsort(lanes, kind="stable")
        first = np.searchsorted(lanes[by_lane], [*found, len(self.trace.lanes)])
        rows_of = {lane: labels.row[by_lane[a:b]] for lane, (a, b) in zip(found, pairwise(first), strict=True)}

        def order(lane: int) -> tuple[bool, str, int]:
            rows = rows_of[lane]
            names = [self._kind(int(row), 0) for row in rows[:50]]
            return lane != main, max(set(names), key=names.count), -len(rows)

        return {lane: number for number, lane in enumerate(sorted(found, key=order))}

    def _kind(self, row: int, work: int) -> str:
        if self.trace.is_communication[row]:
            meeting = self.meeting.get(row)
            return collective_kind(meeting.collective if meeting else self.trace.collective_of(row))
        return compute_kind(self.trace.names[self.trace.name[row]], work, int(self.trace.category[row]))

    def _message(self, row: int) -> Message | None:
        meeting = self.meeting.get(row)
        if meeting is not None:
            return meeting.message
        number = int(self.trace.message[row])
        return self.trace.messages[number] if number >= 0 else None

    def _peers(self, labels: RankLabels) -> tuple[int, ...]:
        meetings = (self.meeting.get(row) for row in labels.row.tolist())
        ranks = {r for one in meetings if one is not None and one.collective in POINT_TO_POINT for r in one.ranks}
        return tuple(sorted(ranks - {labels.rank}))

    def _busy(self, row: int) -> float:
        """How long a kernel worked; a collective as long as on its slowest rank, which the others wait for next."""
        meeting = self.meeting.get(row)
        rows = [row] if meeting is None or meeting.collective in POINT_TO_POINT else meeting.rows
        return float(self.graph.duration[self.nodes.last_node[rows]].max())

    def _form(self, row: int) -> Group:
        """The process group of a communication kernel."""
        message, meeting = self._message(row), self.meeting.get(row)
        ranks = message.ranks if message and message.ranks else meeting.ranks if meeting else ()
        if len(ranks) > 1:
            return Group(len(ranks), max(1, ranks[1] - ranks[0]))
        return Group(max(message.group_size if message else 1, 1), 1)

    def _state(
        self, row: int, work: int, streams: dict[int, int], launched: dict[int, list[int]], moment: _Moment,
        latency: float,
    ) -> tuple[State, float]:  # fmt: skip
        """What a kernel is, and how long after everything it waits for it began."""
        nodes, edges, node = self.nodes, self.graph.edges, int(self.nodes.first_node[row])
        own = int(nodes.lane[node])
        could = float(self.start[nodes.first_node[moment.call]]) + latency
        if nodes.first[own] < node:
            could = max(could, float(self.end[node - 1]))
        waits: dict[int, Wait] = {}
        for edge in range(self.graph.incoming[node], self.graph.incoming[node + 1]):
            source = int(edges.source[edge])
            if edges.rule[edge] not in (Rule.EVENT, Rule.CHANNEL, Rule.GRAPH) or source >= len(nodes):
                continue
            lane, source_row = int(nodes.lane[source]), int(nodes.row[source])
            before = launched.get(streams.get(lane, -1), [])[: -_MOST_AGO - 1 : -1]
            if nodes.rank[source] != nodes.rank[node] or source_row not in before:
                continue
            ago = before.index(source_row)
            arrival = source == nodes.first_node[source_row] != nodes.last_node[source_row]
            begun = bool(edges.from_start[edge] or arrival)
            wait = Wait(streams[lane], int(_AGO[np.argmin(np.abs(_AGO - ago))]), begun)
            if wait.stream not in waits or waits[wait.stream].ago > wait.ago:
                waits[wait.stream] = wait
            could = max(could, float(self.start[source] if edges.from_start[edge] else self.end[source]))
        kind = self._kind(row, work)
        group = self.groups[self._form(row)] if self.trace.is_communication[row] else -1
        state = State(kind, streams[own], group, tuple(sorted(waits.values())))
        return state, max(0.0, float(self.start[node]) - could)

    def _latency(self, rows: Ints) -> float:
        """From the start of a launch to that of its kernel, where nothing else delays it."""
        found = []
        for row in rows.tolist():  # the first of a stream may wait for what was not recorded
            node, call = int(self.nodes.first_node[row]), int(self.trace.launch_row[row])
            begun = float(self.start[self.nodes.first_node[call]])
            edges = slice(self.graph.incoming[node], self.graph.incoming[node + 1])
            waits = bool((self.graph.edges.rule[edges] != Rule.LAUNCH).any())
            if not waits and self.nodes.first[self.nodes.lane[node]] < node and self.end[node - 1] < begun:
                found.append(max(0.0, float(self.start[node]) - begun))
        return float(np.quantile(found, _LATENCY_QUANTILE)) if found else 0.0

    # The host.

    def _issued(self, labels: RankLabels, window: tuple[float, float]) -> list[_Moment]:
        """Launches and waits of the host, in the order of time."""
        moments = []
        for number, row in enumerate(labels.row.tolist()):
            call = int(self.trace.launch_row[row])
            first, last = int(self.nodes.first_node[call]), int(self.nodes.last_node[call])
            if first >= 0 and self.nodes.first_node[row] >= 0:
                done = first if self.nodes.is_return[last] else last  # a blocking call has submitted on entry
                lane = int(self.nodes.lane[first])
                moments.append(_Moment(float(self.start[first]), float(self.end[done]), lane, number, call))
        edges, size = self.graph.edges, len(self.nodes)
        waits: dict[int, set[int]] = {}
        for edge in np.flatnonzero((edges.rule == Rule.SYNC) & (edges.target < size) & (edges.source < size)).tolist():
            target, source = int(edges.target[edge]), int(edges.source[edge])
            if self.nodes.rank[target] == labels.rank:
                waits.setdefault(target, set()).add(int(self.nodes.lane[source]))
        for node, lanes in waits.items():
            end = float(self.end[node])
            if window[0] <= end <= window[1]:
                begun = end - float(self.graph.duration[node])
                moments.append(_Moment(begun, end, int(self.nodes.lane[node]), -1, -1, tuple(sorted(lanes))))
        return sorted(moments, key=lambda moment: (moment.start, moment.kernel))


class _Moment(NamedTuple):
    """When the host launched a kernel, or returned from waiting for the GPU."""

    start: float
    end: float
    lane: int
    kernel: int  # its place among the labels; -1: a wait
    call: int = -1
    lanes: tuple[int, ...] = ()  # streams that are waited for


class _HostTime:
    """How much the host worked between moments: waiting is not in it."""

    def __init__(self, observer: _Observer, rank: int, window: tuple[float, float]) -> None:
        self.observer = observer
        self.at, self.end = window
        self.begun = self.at
        self.nodes = np.flatnonzero((observer.nodes.rank == rank) & ~observer.nodes.on_gpu)
        self.lane = int(observer.nodes.lane[self.nodes[0]]) if len(self.nodes) else -1
        trace = observer.trace
        operators = np.flatnonzero((observer.nodes.first_node >= 0) & (trace.rank == rank) & trace.on_host)
        operators = operators[trace.call[operators] == 0]
        self.operators = np.sort(observer.start[observer.nodes.first_node[operators]])

    def until(self, moment: _Moment) -> tuple[float, float, int]:
        """Work since the moment before, the call itself, and the operators that began in between."""
        work = self._worked(self.at, moment.start, {self.lane, moment.lane})
        call = self._worked(max(self.at, moment.start), moment.end, {moment.lane})
        operators = self._begun(self.at, moment.end)
        self.at, self.lane = max(self.at, moment.end), moment.lane
        return work, call, operators

    def rest(self) -> tuple[float, int]:
        """What the host did after the last moment until the end of the step, on its last and its main thread."""
        lanes = {self.lane, self._main}
        return self._worked(self.at, self.end, lanes), self._begun(self.at, self.end)

    @cached_property
    def _main(self) -> int:
        """The thread that ends the step."""
        ends = self.observer.end[self.nodes]
        inside = self.nodes[ends <= self.end]
        return int(self.observer.nodes.lane[inside[np.argmax(self.observer.end[inside])]]) if len(inside) else -1

    def _begun(self, low: float, high: float) -> int:
        return max(0, int(np.searchsorted(self.operators, high) - np.searchsorted(self.operators, low)))

    def _worked(self, low: float, high: float, lanes: set[int]) -> float:
        """How much of a window any of these threads worked."""
        if high <= low:
            return 0.0
        parts = [self._busy[lane] for lane in lanes if lane in self._busy]
        pieces = []
        for begun, ended in parts:
            first, last = np.searchsorted(ended, low, side="right"), np.searchsorted(begun, high)
            pieces.append(np.stack([np.clip(begun[first:last], low, high), np.clip(ended[first:last], low, high)]))
        joined = np.concatenate(pieces, axis=1) if pieces else np.zeros((2, 0))
        if joined.shape[1] == 0:
            return 0.0
        begun, ended = joined[:, np.argsort(joined[0], kind="stable")]
        reached = np.concatenate([[low], np.maximum.accumulate(ended)[:-1]])
        return float(np.maximum(ended - np.maximum(begun, reached), 0.0).sum())

    @cached_property
    def _busy(self) -> dict[int, tuple[Floats, Floats]]:
        """By thread: when its nodes worked, in their order."""
        observer = self.observer
        ended = observer.end[self.nodes]
        begun = ended - observer.graph.duration[self.nodes]
        lanes = observer.nodes.lane[self.nodes]
        return {int(lane): (begun[lanes == lane], ended[lanes == lane]) for lane in np.unique(lanes)}


def _with_pauses(tasks: list[Task]) -> list[Task]:
    """Tasks that say whether the host paused before them: in a pause the GPU catches up, so that its place matters."""
    usual = float(np.median([task.work for task in tasks]))
    return [task._replace(state=task.state._replace(pause=task.work > _PAUSE * usual)) for task in tasks]


def _smooth(phases: list[int]) -> list[int]:
    """Phases without stray tasks: a pass that is too short belongs to the one before it."""
    runs: list[list[int]] = []
    for phase in phases:
        if runs and runs[-1][0] == phase:
            runs[-1][1] += 1
        elif runs and runs[-1][1] < _SHORTEST_PASS and len(runs) > 1:
            stray = runs.pop()[1]
            runs[-1][1] += stray
            if runs[-1][0] == phase:
                runs[-1][1] += 1
            else:
                runs.append([phase, 1])
        else:
            runs.append([phase, 1])
    return [phase for phase, count in runs for _ in range(count)]


def _blocks(tasks: list[Task], phases: list[int], marks: list[int]) -> tuple[list[Block], tuple[str, ...], int]:
    """Blocks in their order, the passes they make up, and the layers of a forward pass."""
    backward = [i for i, phase in enumerate(phases) if phase == KernelPhase.BACKWARD]
    if backward:  # clipping of gradients and the like belong to the update
        phases = [*phases[: backward[-1] + 1], *[int(KernelPhase.OPTIMIZER)] * (len(phases) - backward[-1] - 1)]
    cuts = [0, *(i for i in range(1, len(tasks)) if phases[i] != phases[i - 1]), len(tasks)]
    passes = [KernelPhase(phases[low]).name.lower() for low in cuts[:-1]]
    last = {name: i for i, name in enumerate(passes)}
    blocks, layers = [], []
    for turn, (name, (low, high)) in enumerate(zip(passes, pairwise(cuts), strict=True)):
        wanted = 2 if name == "backward" else 1
        at = [i for i in range(low, high) if marks[i] == wanted and name != "optimizer"]
        if name == "forward":
            layers.append(len(at))
        bounds = [low, *(i + 1 for i in at), high]
        for i, (begin, end) in enumerate(pairwise(bounds)):
            place = "first" if i == 0 else "last" if i == len(at) else "middle"
            blocks.append(Block(name, turn == last[name], place, tasks[begin:end], turn))
    return blocks, tuple(passes), int(np.median(layers)) if layers else 0
