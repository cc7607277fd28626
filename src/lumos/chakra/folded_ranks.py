"""A run with the host folded away: every rank as one chain of work, and the communication that hangs on it.

Simulators of networks have no threads and streams. ASTRA-sim runs one piece of work and one transfer at a time on a
rank, starts a node when all it waits for has ended, and knows no gaps. So a rank becomes a chain of work, cut where a
transfer is issued and where something waits for one:

    work   ──[ until it is issued ]──[ until it is waited for ]·····[ after it ]──
                                  └──►[ transfer ]─────────────────►┘

A piece of work is as long as the simulated run took between two cuts, waiting for transfers left out: kernels, host,
gaps and launch delays alike. With transfers as long as in the run, every cut is where it was; with others it moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from lumos.chakra.communication import Communication, plan_communication
from lumos.chakra.file_format import NodeType
from lumos.chakra.rank_files import Workload
from lumos.chakra.tasks import Cut, Task, chained
from lumos.graph.graph import Bools, Floats, Ints, simulate
from lumos.graph.rules.build import Execution
from lumos.program.rank_places import RankPlaces
from lumos.trace.trace import Message


def recorded_workload(execution: Execution, plan: Communication) -> Workload:
    """The tasks of every rank of a run. Ranks count from 0 in them."""
    number = {rank: i for i, rank in enumerate(execution.trace.ranks)}
    folder = Folder(execution, plan)
    tasks = tuple(tuple(_renumbered(task, number) for task in folder.rank(rank)) for rank in number)
    groups = {name: tuple(number[rank] for rank in members) for (_, members), name in plan.groups.items()}
    return Workload(RankPlaces(len(number), 1, 1), tasks, groups)


def _renumbered(task: Task, number: Mapping[int, int]) -> Task:
    """A task whose message is between ranks that have other numbers in the files."""
    sent = task.transfer
    if sent is None or sent.type == NodeType.COMM_COLL:
        return task
    sent = sent._replace(source=number[sent.source], destination=number[sent.destination])
    return task._replace(transfer=sent)


def other_ranks(execution: Execution) -> list[str]:
    """What to say where ranks have other numbers in the files."""
    ranks = execution.trace.ranks
    if list(ranks) == list(range(len(ranks))):
        return []
    return [f"ASTRA-sim counts ranks from 0: the {len(ranks)} ranks from {ranks[0]} to {ranks[-1]} do here"]


class Folder:
    """Folds the ranks of a run."""

    def __init__(self, execution: Execution, plan: Communication) -> None:
        self.execution, self.plan = execution, plan
        graph, self.size = execution.graph, len(execution.nodes)
        self.start, self.end = simulate(graph)
        self.position = np.empty(len(graph), np.int64)
        self.position[graph.order] = np.arange(len(graph))
        self.rows = np.array(sorted(plan.transfers), np.int64)
        self.row_of = np.full(len(graph), -1, np.int64)  # of the nodes that transfer
        self.row_of[execution.nodes.last_node[self.rows]] = self.rows
        self._find_waits()

    def _find_waits(self) -> None:
        """What waits for which transfer, and when every node was ready but for transfers."""
        graph, size = self.execution.graph, self.size
        after = np.flatnonzero(~graph.is_first[:size])
        edges = graph.edges.select((graph.edges.source < size) & (graph.edges.target < size))
        source = np.concatenate([after - 1, edges.source])
        target = np.concatenate([after, edges.target])
        gap = (graph.gap + graph.frozen)[:size]
        begun = np.where(edges.from_start, self.start[edges.source], self.end[edges.source])
        since = np.concatenate([self.end[after - 1] + gap[after], begun + edges.lag + edges.frozen])
        of_transfer = self._is_waiting(source, target)
        self.ready: Floats = np.where(graph.is_first[:size], gap, 0.0)
        np.maximum.at(self.ready, target[~of_transfer], since[~of_transfer])
        self.waiting: Ints = np.stack([self.row_of[source], target])[:, of_transfer]

    def _is_waiting(self, source: Ints, target: Ints) -> Bools:
        rank = self.execution.nodes.rank
        return np.asarray((self.row_of[source] >= 0) & (rank[source] == rank[target]), bool)

    def rank(self, rank: int) -> list[Task]:
        """The tasks of a rank."""
        end = self.end[: self.size][self.execution.nodes.rank == rank].max(initial=0.0)
        return chained([*self._issues(rank), *self._waits(rank)], float(end))

    @cached_property
    def _before(self) -> dict[int, list[int]]:
        """For every transfer those that it waits for without the rank's doing: on its stream, or by an event."""
        row_at = np.full(self.size, -1, np.int64)  # of the nodes that issue a transfer
        row_at[self.execution.nodes.first_node[self.rows]] = self.rows
        found: dict[int, list[int]] = {}
        for row, node in self.waiting.T.tolist():
            if row_at[node] >= 0:
                found.setdefault(int(row_at[node]), []).append(row)
        return found

    @cached_property
    def _issued(self) -> dict[int, tuple[float, int]]:
        """When every transfer is issued, and its place among what happens at the same time.

        Collectives and sends are issued in the order in which they ran, which is the same for all ranks, and so are
        receives. A simulator that does one transfer at a time, the first that is ready, would wait for ever if two
        ranks began with different ones.
        """
        nodes, graph, rank = self.execution.nodes, self.execution.graph, self.execution.trace.rank
        hubs = graph.edges.select((graph.edges.source >= self.size) & (graph.edges.target < self.size))
        meeting = dict(zip(hubs.target.tolist(), hubs.source.tolist(), strict=True))
        lasts = nodes.last_node[self.rows]
        place = self.position[[meeting.get(node, node) for node in lasts.tolist()]] if len(lasts) else lasts
        latest: dict[tuple[int, bool], tuple[float, int]] = {}
        found: dict[int, tuple[float, int]] = {}
        for i in np.lexsort((place, self.start[lasts])).tolist():
            row, first = int(self.rows[i]), int(nodes.first_node[self.rows[i]])
            ready = min(float(self.ready[first]), float(self.start[first])), int(self.position[first])
            key = int(rank[row]), all(t.type == NodeType.COMM_RECV for t in self.plan.transfers[row])
            latest[key] = found[row] = max(ready, latest.get(key, ready))
        return found

    def _issues(self, rank: int) -> Iterator[Cut]:
        trace, graph, last = self.execution.trace, self.execution.graph, self.execution.nodes.last_node
        mine = trace.rank[self.rows] == rank
        for turn, row in enumerate(sorted(self.rows[mine].tolist(), key=lambda row: self._turn[row])):
            time, position = self._issued[row]
            issues = tuple((one, float(graph.duration[last[row]])) for one in self.plan.transfers[row])
            after = tuple((other,) for other in self._before.get(row, ()))
            label = trace.names[trace.name[row]]
            yield Cut(time, position, turn, time, issues=issues, key=(row,), after=after, label=label)

    @cached_property
    def _turn(self) -> dict[int, int]:
        """The order in which transfers are issued."""
        return {row: turn for turn, row in enumerate(self._issued)}

    def _waits(self, rank: int) -> Iterator[Cut]:
        """Where the work of a rank first waits for each of its transfers; what comes later waits for it anyway."""
        nodes = self.execution.nodes
        row, waits = self.waiting[:, nodes.rank[self.waiting[1]] == rank]
        of_work = ~np.isin(waits, nodes.first_node[self.rows])  # transfers wait for transfers without the rank
        row, waits = row[of_work], waits[of_work]
        order = np.lexsort((self.position[waits], self.start[waits], row))
        firsts = order[np.flatnonzero(np.diff(row[order], prepend=-1))]
        for a_row, node in zip(row[firsts].tolist(), waits[firsts].tolist(), strict=True):
            begin = float(self.start[node])
            ready = min(begin, float(self.ready[node]))
            yield Cut(begin, int(self.position[node]), -1, ready, waits=((a_row,),))


def repeated_rank(execution: Execution, world: int) -> tuple[Workload, list[str]]:
    """The tasks of a job of which one rank was recorded, in a dry run or a trace, and what is to be said about them.

    All ranks do what this one does, in groups that are laid out as its own: as many ranks, as far apart. A group whose
    ranks are not equally far apart cannot be laid out for the others, and its collectives are plain work.
    """
    execution = replace(execution, trace=replace(execution.trace, messages=_as_sent(execution.trace.messages)))
    places, plan = RankPlaces(1, world, world), plan_communication(execution)
    rank = execution.trace.ranks[0]
    kinds = {name: _kind(places, rank, ranks) for (_, ranks), name in plan.groups.items()}
    for row, transfers in list(plan.transfers.items()):
        if any(not kinds.get(transfer.group, "") for transfer in transfers):
            plan.plain["their ranks are not equally far apart, so those of other ranks are not known"].add(row)
            del plan.transfers[row]
    tasks = [
        task
        if task.transfer is None
        else task._replace(transfer=task.transfer._replace(group=kinds[task.transfer.group]))
        for task in Folder(execution, plan).rank(rank)
    ]
    note = f"one rank was recorded: all {world:,} do what rank {rank} does, in groups laid out like its own"
    return Workload(places, (tuple(tasks),)), [note, *plan.warnings]


def _as_sent(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Messages whose inputs do not count an output that was also passed in."""
    found = []
    for message in messages:
        read, written, ranks = message.in_elements, message.out_elements, max(message.group_size, 1)
        if read in (written + written // ranks, written * (ranks + 1)) and ranks > 1:
            read -= written
        found.append(message._replace(in_elements=read))
    return tuple(found)


def _kind(places: RankPlaces, rank: int, ranks: tuple[int, ...]) -> str:
    """A group as SIZExSTRIDE; empty if its ranks are not equally far apart."""
    if len(ranks) < 2:
        return ""
    size, stride = len(ranks), ranks[1] - ranks[0]
    fits = stride > 0 and places.of_stage % (size * stride) == 0
    return f"{size}x{stride}" if fits and places.members(rank, size, stride) == tuple(sorted(ranks)) else ""
