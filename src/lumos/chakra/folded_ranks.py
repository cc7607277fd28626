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

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lumos.chakra.communication import Communication, Transfer
from lumos.chakra.file_format import NodeType
from lumos.graph.graph import Bools, Floats, Ints
from lumos.graph.rules.build import Execution
from lumos.graph.simulate import simulate


class Task(NamedTuple):
    """A node of a rank; it waits for others by their places in the rank's list."""

    name: str
    ns: float
    waits_for: tuple[int, ...]
    transfer: Transfer | None = None  # None: work


@dataclass
class Chain:
    """The tasks of one rank while they are put together: work in order of time, and transfers issued on the way."""

    tasks: list[Task] = field(default_factory=list)
    now: float = 0.0  # up to when the rank's own time is written, ns
    _head: tuple[int, ...] = ()  # what the next task waits for

    def work(self, until: float, name: str = "work") -> None:
        """The rank works until then."""
        if until > self.now:
            self.tasks.append(Task(name, until - self.now, self._head))
            self._head, self.now = (len(self.tasks) - 1,), until

    def issue(self, name: str, ns: float, transfers: list[Transfer]) -> list[int]:
        """Transfers begin now, beside what follows; their places."""
        places = list(range(len(self.tasks), len(self.tasks) + len(transfers)))
        self.tasks += [Task(name, ns, self._head, transfer) for transfer in transfers]
        return places

    def wait(self, places: list[int], until: float) -> None:
        """What follows waits for transfers, which end then."""
        self._head = tuple(dict.fromkeys((*self._head, *places)))
        self.now = max(self.now, until)

    def also(self, place: int, others: list[int]) -> None:
        """A transfer waits for others, too."""
        task = self.tasks[place]
        new = tuple(dict.fromkeys((*task.waits_for, *(other for other in others if other != place))))
        self.tasks[place] = task._replace(waits_for=new)


def folded(execution: Execution, plan: Communication) -> dict[int, list[Task]]:
    """The tasks of every rank of a run."""
    folder = Folder(execution, plan)
    return {rank: folder.rank(rank) for rank in execution.trace.ranks}


class _Cut(NamedTuple):
    """A place where the work of a rank is cut; sorted by time, and by a topological order where times are equal."""

    time: float
    position: int
    turn: int  # among what is issued there
    ready: float  # when the rank itself was ready for it
    row: int  # of the communication kernel
    waits: bool  # for it, or issues it


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
        trace, nodes, graph = self.execution.trace, self.execution.nodes, self.execution.graph
        chain, places = Chain(), dict[int, list[int]]()
        for cut in sorted([*self._issues(rank), *self._waits(rank)]):
            chain.work(cut.ready)
            if cut.waits:
                chain.wait(places[cut.row], cut.time)
            else:
                ns = float(graph.duration[nodes.last_node[cut.row]])
                name = trace.names[trace.name[cut.row]]
                places[cut.row] = chain.issue(name, ns, self.plan.transfers[cut.row])
                for place in places[cut.row]:
                    chain.also(place, [p for row in self.before.get(cut.row, ()) for p in places.get(row, ())])
        chain.work(float(self.end[: self.size][nodes.rank == rank].max(initial=0.0)))
        return chain.tasks

    @cached_property
    def before(self) -> dict[int, list[int]]:
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

    def _issues(self, rank: int) -> Iterator[_Cut]:
        mine = self.execution.trace.rank[self.rows] == rank
        for turn, row in enumerate(sorted(self.rows[mine].tolist(), key=lambda row: self._turn[row])):
            time, position = self._issued[row]
            yield _Cut(time, position, turn, time, row, False)

    @cached_property
    def _turn(self) -> dict[int, int]:
        """The order in which transfers are issued."""
        return {row: turn for turn, row in enumerate(self._issued)}

    def _waits(self, rank: int) -> Iterator[_Cut]:
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
            yield _Cut(begin, int(self.position[node]), -1, ready, a_row, True)
