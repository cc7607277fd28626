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

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lumos.export.chakra_communication import Communication, Transfer
from lumos.graph.from_trace.build import Execution
from lumos.graph.graph import Bools, Floats, Ints
from lumos.graph.simulate import simulate
from lumos.trace.read.chakra_format import NodeType


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


class _Cut(NamedTuple):
    """A place where the work of a rank is cut; sorted by time, and by a topological order where times are equal."""

    time: float
    position: int
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
        for cut in sorted(self._cuts(rank)):
            chain.work(cut.ready)
            if cut.waits:
                chain.wait(places[cut.row], cut.time)
            else:
                ns = float(graph.duration[nodes.last_node[cut.row]])
                name = trace.names[trace.name[cut.row]]
                places[cut.row] = chain.issue(name, ns, self.plan.transfers[cut.row])
        chain.work(float(self.end[: self.size][nodes.rank == rank].max(initial=0.0)))
        self._put_in_order(rank, chain, places)
        return chain.tasks

    def _cuts(self, rank: int) -> list[_Cut]:
        nodes, trace = self.execution.nodes, self.execution.trace
        mine = self.rows[trace.rank[self.rows] == rank]
        issued = nodes.first_node[mine]
        ready = np.minimum(self.ready[issued], self.start[issued])
        found = [
            _Cut(time, position, time, row, False)
            for time, position, row in zip(ready.tolist(), self.position[issued].tolist(), mine.tolist(), strict=True)
        ]
        row, waits = self.waiting[:, nodes.rank[self.waiting[1]] == rank]
        of_work = ~np.isin(waits, issued)  # transfers that wait for transfers do so without the rank
        row, waits = row[of_work], waits[of_work]
        order = np.lexsort((self.position[waits], self.start[waits], row))
        firsts = order[np.flatnonzero(np.diff(row[order], prepend=-1))]  # what comes later waits for it anyway
        for a_row, node in zip(row[firsts].tolist(), waits[firsts].tolist(), strict=True):
            begin = float(self.start[node])
            own = min(begin, float(self.ready[node]))
            found.append(_Cut(begin, int(self.position[node]), own, a_row, True))
        return found

    def _put_in_order(self, rank: int, chain: Chain, places: dict[int, list[int]]) -> None:
        """Collectives and sends run one after the other, in the order of the run, and so do receives.

        A simulator that does one transfer at a time would wait for ever if two ranks began with different ones.
        """
        nodes, graph = self.execution.nodes, self.execution.graph
        hubs = graph.edges.select((graph.edges.source >= self.size) & (graph.edges.target < self.size))
        meeting = dict(zip(hubs.target.tolist(), hubs.source.tolist(), strict=True))
        lasts = {row: int(nodes.last_node[row]) for row in places}
        ordered = sorted(
            places, key=lambda row: (self.start[lasts[row]], self.position[meeting.get(lasts[row], lasts[row])])
        )
        before: dict[bool, list[int]] = {True: [], False: []}
        for row in ordered:
            for place in places[row]:
                transfer = chain.tasks[place].transfer
                receives = transfer is not None and transfer.type == NodeType.COMM_RECV
                chain.also(place, before[receives])
                before[receives] = [place]
