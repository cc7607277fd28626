"""A described step as the tasks of its ranks: one list a pipeline stage, which stands for all ranks of the stage.

A stage becomes a chain of work with the transfers that hang on it, as `lumos.chakra.folded_ranks` makes it of a traced
rank: work is cut where a transfer is issued and where it is waited for. Transfers are the collectives inside blocks,
weights that are gathered, gradients that are reduced in buckets, and messages between stages. They have the length
that the prediction gives them, so that the files replay to the predicted step; a simulator has costs of its own.

Which ranks a transfer joins is not yet said: a group is named `SIZExSTRIDE`, and the ends of a message are stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lumos.chakra.file_format import COLLECTIVES, NodeType
from lumos.chakra.tasks import LEAST_BYTES, CommNode, Cut, Task, chained
from lumos.described import transfers
from lumos.graph.graph import Bools, Floats, Ints
from lumos.prediction.described_run import DescribedRun
from lumos.program.operators import Collective
from lumos.step.rows import StepTrace, Track, transfer_of
from lumos.step.step import Step

_PASSES = ("forward", "backward", "weights", "optimizer")
_MOST_BUCKETS = 64  # of one reduction
_LITTLE = 1e-9  # of a pass: what rounding may be


@dataclass(frozen=True)
class StepTasks:
    """The tasks of every stage of a described run; with `operators`, every operator is a piece of work of its own."""

    run: DescribedRun
    operators: bool = False

    @property
    def step(self) -> Step:
        return self.run.step

    @property
    def rows(self) -> StepTrace:
        return self.run.rows

    @cached_property
    def stages(self) -> int:
        return self.step.setup.parallel.pp

    # ------------------------------------------------------------------ the graph
    @cached_property
    def _start(self) -> Floats:
        """Of every node, in whole nanoseconds, so that what happens at the same time does."""
        return np.rint(self.rows.start)

    @cached_property
    def _end(self) -> Floats:
        return np.rint(self.rows.end)

    @cached_property
    def _what(self) -> list[str]:
        """What every node is."""
        roles = [role.what for role in self.rows.roles]
        return [roles[i] for i in self.step.structure.node_role.tolist()]

    @cached_property
    def _position(self) -> Ints:
        order = self.step.graph.order
        found = np.empty(len(order), np.int64)
        found[order] = np.arange(len(order))
        return found

    @cached_property
    def _is_transfer(self) -> Bools:
        return np.array([what in ("gather", "reduce") for what in self._what], bool)

    @cached_property
    def _is_message(self) -> Bools:
        """Edges that are messages from one stage to another: the host's order they follow is no message."""
        edges, stage = self.step.graph.edges, self.rows.node_stage
        hosts = np.array([what.startswith("host") for what in self._what], bool)
        return np.asarray((stage[edges.source] != stage[edges.target]) & ~hosts[edges.source], bool)

    @cached_property
    def _ready(self) -> Floats:
        """When every node was ready but for transfers and messages."""
        graph, rows = self.step.graph, self.rows
        edges, scale = graph.edges, rows.scale
        after = np.flatnonzero(~graph.is_first)
        after = after[~self._is_transfer[after - 1]]
        ready = np.zeros(len(graph))
        ready[after] = self._end[after - 1]
        local = ~self._is_message & ~self._is_transfer[edges.source]
        begun = np.where(edges.from_start, self._start[edges.source], self._end[edges.source]) + edges.lag * scale
        np.maximum.at(ready, edges.target[local], begun[local])
        return np.minimum(np.rint(ready), self._start)

    @cached_property
    def _tags(self) -> Ints:
        """A number for every message between two stages; 0 for other edges."""
        edges, stage = self.step.graph.edges, self.rows.node_stage
        found = np.zeros(len(edges), np.int64)
        at = np.flatnonzero(self._is_message)
        pair = stage[edges.source[at]] * self.stages + stage[edges.target[at]]
        at = at[np.lexsort((self._position[edges.source[at]], pair))]
        pair = stage[edges.source[at]] * self.stages + stage[edges.target[at]]
        begins = np.maximum.accumulate(np.where(np.diff(pair, prepend=-1) != 0, np.arange(len(at)), 0))
        found[at] = np.arange(len(at)) - begins + 1
        return found

    @cached_property
    def _edges_from(self) -> dict[int, list[int]]:
        """Messages by the node that they leave."""
        found: dict[int, list[int]] = {}
        for edge in np.flatnonzero(self._is_message).tolist():
            found.setdefault(int(self.step.graph.edges.source[edge]), []).append(edge)
        return found

    # ------------------------------------------------------------------ the tasks
    def tasks(self, stage: int) -> list[Task]:
        """The tasks of one rank of a stage; parts of one reduction follow each other."""
        return chained(self._cuts(stage), self._end_of(stage), "other", in_turn=True)

    def _end_of(self, stage: int) -> float:
        """When the stage has ended; what a traced run takes beyond its model comes last."""
        ended = float(self._end[self.rows.node_stage == stage].max(initial=0.0))
        return ended + max(0.0, self.run.us * 1e3 - float(self._end.max(initial=0.0)))

    def _cuts(self, stage: int) -> Iterator[Cut]:
        nodes = np.flatnonzero(self.rows.node_stage == stage)
        yield from self._receives(stage)
        for low, high in self._passes(nodes):
            yield from self._pass(low, high)
        latest, before = 0.0, tuple[tuple[int, ...], ...]()
        for node in nodes[self._is_transfer[nodes]].tolist():
            latest = max(latest, float(self._ready[node]))
            place = int(self._position[node])
            yield Cut(latest, place, 0, latest, "work", self._moved(node), (node,), (), before)
            before = ((node,),)
        for node in nodes[~self._is_transfer[nodes]].tolist():
            waits = tuple(self._waits_of(node))
            if waits or self._what[node] in ("reduce rest", "publish"):
                yield from self._node(node, waits)
            for edge in self._edges_from.get(node, ()):
                yield self._send(node, edge)

    def _waits_of(self, node: int) -> Iterator[tuple[int, ...]]:
        """The transfers and messages that a node of the stage waits for."""
        graph = self.step.graph
        for edge in range(graph.incoming[node], graph.incoming[node + 1]):
            if self._is_message[edge]:
                yield (-1, edge)
            elif self._is_transfer[source := int(graph.edges.source[edge])]:
                yield (source,)

    def _node(self, node: int, waits: tuple[tuple[int, ...], ...]) -> Iterator[Cut]:
        """What a node waits for before it starts; one that is communication itself runs while nothing else does."""
        begin, end = float(self._start[node]), float(self._end[node])
        place, what = int(self._position[node]), self._what[node]
        name = what if what in _PASSES else "work"
        yield Cut(begin, place, 0, float(self._ready[node]), name, waits=waits)
        moved = self._moved(node) if what in ("reduce rest", "publish") else ()
        total = sum(ns for _, ns in moved)
        share = (end - begin) / total if what == "publish" and total else 1.0
        if share < 1 and moved:  # updated weights that are gathered behind the first forward pass of the next step
            yield Cut(0.0, -1, 1 << 40, 0.0, name, _parts(moved, 1 - share), (node, 1))
        if share > 0 and moved:
            yield Cut(begin, place, 1, begin, name, _parts(moved, share), (node, 0))
            yield Cut(end, place, 2, begin, name, waits=((node, 0),))

    # ------------------------------------------------------------------ messages between stages
    def _receives(self, stage: int) -> Iterator[Cut]:
        """A stage is ready to receive from the beginning, so that no sender waits for it; in the order of arrival."""
        edges, of_stage = self.step.graph.edges, self.rows.node_stage
        found = np.flatnonzero(self._is_message & (of_stage[edges.target] == stage))
        found = found[np.lexsort((self._position[edges.source[found]], self._end[edges.source[found]]))]
        for order, edge in enumerate(found.tolist()):
            issues = ((self._message(edge, NodeType.COMM_RECV), float(edges.lag[edge]) * self.rows.scale),)
            yield Cut(0.0, -1, order, 0.0, "work", issues, (-1, edge))

    def _send(self, node: int, edge: int) -> Cut:
        end, lag = float(self._end[node]), float(self.step.graph.edges.lag[edge]) * self.rows.scale
        issues = ((self._message(edge, NodeType.COMM_SEND), lag),)
        return Cut(end, int(self._position[node]), 1 << 40, end, self._what[node], issues, (-2, edge))

    def _message(self, edge: int, kind: NodeType) -> CommNode:
        edges, stage, layout = self.step.graph.edges, self.rows.node_stage, self.step.assembly.layout
        ends = int(stage[edges.source[edge]]), int(stage[edges.target[edge]])
        parts = layout.parallel.tp if self.step.assembly.framework.sends_parts and not layout.splits_sequences else 1
        size = max(1, round(layout.residual_bytes / parts))
        return CommNode(kind, size, source=ends[0], destination=ends[1], tag=int(self._tags[edge]))

    # ------------------------------------------------------------------ inside a pass
    def _passes(self, nodes: Ints) -> Iterator[tuple[int, int]]:
        """The first and the last node of every pass, which may be cut into several."""
        part = self.rows._part_of_pass
        named = [node for node in nodes.tolist() if self._what[node] in _PASSES]
        for i, node in enumerate(named):
            if part[node] == 0:
                last = i
                while last + 1 < len(named) and part[named[last + 1]] > 0:
                    last += 1
                yield node, named[last]

    def _pass(self, low: int, high: int) -> Iterator[Cut]:
        """The collectives of a pass, where they start and where they are waited for."""
        role = self.rows.roles[self.step.structure.node_role[low]]
        inside = self.rows.inside(role)
        talks = inside.track != Track.COMPUTE
        if not talks.any() and not self.operators:
            return
        time = _Window(self._start[low : high + 1], self._end[low : high + 1])
        begins, ends = inside.start[~talks], inside.end[~talks]
        names, labels = list(self.rows.labels.names), list(self.rows.labels.rows)
        for row in np.flatnonzero(~talks).tolist() if self.operators else ():
            end, part = time.at(float(inside.end[row])), time.part(float(inside.end[row]))
            name = names[labels[int(inside.label[row])][0]]
            yield Cut(end, int(self._position[low + part]), 2 * row + 2, end, name)
        before: dict[str, tuple[tuple[int, ...], ...]] = {}  # by group
        for row in np.flatnonzero(talks).tolist():
            start, end = float(inside.start[row]), float(inside.end[row])
            begin, ended, place = time.at(start), time.at(end), int(self._position[low + time.part(start)])
            key = (low, row)
            sent = _transfer_of(self.rows.labels.collectives[int(inside.label[row])])
            issues, after = ((sent, ended - begin),), before.get(sent.group, ())
            yield Cut(begin, place, 2 * row + 1, begin, role.what, issues, key, (), after)
            before[sent.group] = (key,)
            idle, until = _waiting(begins, ends, start, end)
            at, ready = time.at(until), time.at(idle)
            place = int(self._position[low + time.part(until)])
            yield Cut(at, place, 2 * row + 2, ready, role.what, waits=(key,))

    # ------------------------------------------------------------------ data parallelism
    def _moved(self, node: int) -> tuple[tuple[CommNode, float], ...]:
        """The collectives of a node of the data-parallel ranks, and how long each takes."""
        role = self.rows.roles[self.step.structure.node_role[node]]
        if role.what == "publish" and self.step.assembly.program.sharding.zero not in (1, 2):
            return ()
        if role.what == "reduce rest" and self._end[node] <= self._start[node]:
            return ()  # all was reduced beside the passes
        transfer = transfer_of(self.step, role, role.unit)
        found = list(self._messages(transfer)) * transfer.times
        length = float(self._end[node] - self._start[node])
        alone = [self.step.costs.collective_us(one) * 1e3 for one in found]
        total = sum(alone) or 1.0
        # What runs beside passes may be slower there; only of gathered updates a part is hidden, and not in the node.
        scale = self.rows.scale if role.what == "publish" else length / total
        return tuple((_transfer_of(one), ns * scale) for one, ns in zip(found, alone, strict=True))

    def _messages(self, transfer: transfers.Transfer) -> Iterator[Collective]:
        """The collectives of a transfer, in whole buckets: the cost of a transfer takes a fraction of the last one."""
        for collective, parts in self.step.assembly.transfers.collectives(transfer):
            if collective.bytes > 0 and collective.group.size > 1:
                count = min(max(1, round(parts)), _MOST_BUCKETS)
                yield from [collective._replace(bytes=collective.bytes * parts / count)] * count


class _Window(NamedTuple):
    """A pass that is cut into equal parts, each with its own time: shares of the pass to nanoseconds."""

    start: Floats
    end: Floats

    def part(self, share: float) -> int:
        return max(0, min(len(self.start) - 1, int(share * len(self.start) + _LITTLE)))

    def at(self, share: float) -> float:
        part = self.part(share)
        length = float(self.end[part] - self.start[part])
        return float(self.start[part]) + round((share * len(self.start) - part) * length)


def _waiting(begins: Floats, ends: Floats, start: float, end: float) -> tuple[float, float]:
    """Until when operators run before a collective is waited for, and until when it is: shares of the pass.

    If no operator runs when it ends, it is waited for; otherwise the next operator that starts does.
    """
    running = int(np.searchsorted(begins, end - _LITTLE))  # operators that have started
    busy = running > 0 and ends[running - 1] > end - _LITTLE
    if not busy:
        done = max(start, float(ends[running - 1])) if running else start
        return done, end
    after = float(begins[running]) if running < len(begins) else 1.0
    return min(float(ends[running - 1]), after), after


def _parts(moved: tuple[tuple[CommNode, float], ...], share: float) -> tuple[tuple[CommNode, float], ...]:
    """A share of every transfer."""
    return tuple((one._replace(bytes=max(LEAST_BYTES, round(one.bytes * share))), ns * share) for one, ns in moved)


def _transfer_of(collective: Collective) -> CommNode:
    """A collective of one rank: simulators count what every rank puts in."""
    size = collective.bytes / (collective.group.size if collective.kind == "all_gather" else 1)
    group = f"{collective.group.size}x{collective.group.stride}"
    return CommNode(NodeType.COMM_COLL, max(round(size), LEAST_BYTES), COLLECTIVES[collective.kind], group)
