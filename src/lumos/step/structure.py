"""The structure of one training step, apart from its times.

One rank stands for all ranks of a stage that do the same, so the graph has a few lanes a stage, however many GPUs there
are. Structure depends on counts alone (stages, chunks, micro-batches, units), so it is worked out once and kept; a
prediction fills in times by class: `duration = table[node_role]`, `lag = table[lag_class]`. Messages have a class for
every two stages, because some of them leave a node and others do not. A pass, or every unit of it, follows its host by
a lead of its own.

    host s     [F0][F1][B0]…           issues the blocks
    compute s  ──[ F0 ][ F1 ][ B0 ]…   runs them; a turn of the next stage waits for this one and for the link
    network s  ────[gather][reduce]…   gathers weights and reduces gradients beside them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lumos.graph.graph import Edges, Floats, Graph, Rule, make_graph
from lumos.schedules import Phase, Schedule, Turn, Turns, schedule_named
from lumos.trace.names import Kind

Nodes = NDArray[np.int64]

_PHASES = tuple(phase.name.lower() for phase in Phase)
_WHATS = (
    *_PHASES, "gather", "reduce", "reduce rest", "optimizer", "end", "publish",
    *(f"host {name}" for name in (*_PHASES, "optimizer")),
)  # fmt: skip
_KINDS = np.array(
    [Kind.COMPUTE] * 3 + [Kind.COMM] * 3 + [Kind.COMPUTE] * 2 + [Kind.COMM] + [Kind.CPU] * 4, np.uint8
)  # fmt: skip
_GATHER, _REDUCE, _REST, _OPTIMIZER, _END, _PUBLISH, _HOST, _HOST_OPTIMIZER = 3, 4, 5, 6, 7, 8, 9, 12
LAUNCH, LINKS = 1, 2  # classes of lags: of what follows its host, and from here on messages by pairs of stages


class Role(NamedTuple):
    """What a node is; nodes of one role last equally long."""

    what: str  # forward, backward, weights, host …, gather, reduce, optimizer, …
    stage: int
    chunk: int = 0
    unit: int = -1  # of the parts a block is cut into, 0: the first of the model, 1: any other; -1: it is whole
    partner: int = -1  # the chunk whose forward pass a backward pass runs together with, or the reverse; -1: none


class Plan(NamedTuple):
    """The counts that a structure depends on."""

    schedule: str
    pp: int
    vpp: int
    microbatches: int
    units: int  # parts that the blocks of a stage are cut into, where the network runs beside them
    gathers: str  # when divided weights are gathered, unit by unit: "never", "every pass" or "once"
    overlapped: bool  # gradients are reduced beside the backward pass, unit by unit
    hosted: bool  # the host has a lane
    reduces_always: bool = False  # after every micro-batch, not after the last alone
    leads: bool = False  # every unit of a pass waits for its host, not the first only
    in_turn: bool = False  # gathers and reductions wait for compute, and compute for them: nothing runs beside passes

    @property
    def order(self) -> Schedule:
        return schedule_named(self.schedule)

    @property
    def chunks(self) -> int:
        """Of a stage."""
        return int(self.order.virtual_stages(self.pp, self.vpp).shape[1])

    @property
    def tasks(self) -> int:
        """About how many nodes the structure has."""
        turns = self.pp * self.vpp * self.microbatches * (3 if self.order.splits_backward else 2)
        split = self.gathers == "every pass" or (self.overlapped and self.reduces_always)
        return turns * (5 * self.units // 2 if split else 1) + (turns if self.hosted else 0)


@dataclass(frozen=True)
class StepStructure:
    """A graph without times, and the role of every node and lag."""

    graph: Graph
    roles: tuple[Role, ...]
    node_role: NDArray[np.int32]
    lag_class: NDArray[np.int32]  # 0: none, LAUNCH, LINKS + i: a message between the stages of `links[i]`
    links: tuple[tuple[int, int], ...]  # pairs of stages that send each other messages, the lower one first
    turns: Turns
    turn_index: Nodes  # into the turns of all stages; -1 where a node belongs to none
    place: Nodes  # of a node among the units of its turn
    lanes: tuple[tuple[str, int], ...]  # (name, stage)

    @cached_property
    def is_message(self) -> NDArray[np.bool_]:
        """Which edges are messages from one stage to another."""
        return np.asarray(self.lag_class >= LINKS)

    @cached_property
    def roles_of(self) -> dict[tuple[str, int], list[int]]:
        """Roles by (what, stage)."""
        found: dict[tuple[str, int], list[int]] = {}
        for index, role in enumerate(self.roles):
            found.setdefault((role.what, role.stage), []).append(index)
        return found

    @cached_property
    def node_turn(self) -> tuple[Turn | None, ...]:
        """The turn of every node."""
        rows = [Turn(Phase(phase), micro, chunk) for phase, micro, chunk in self.turns.reshape(-1, 3).tolist()]
        return tuple(rows[index] if index >= 0 else None for index in self.turn_index.tolist())

    def filled(self, durations: Floats, leads: Floats | float, messages: Sequence[float]) -> Graph:
        """The graph with times in nanoseconds: of each role, of messages on each of `links`, and of every lead.

        `leads` has a row per role and a column per place, or is the same for all.
        """
        graph = self.graph.with_times(durations[self.node_role], self.graph.gap)
        target = graph.edges.target
        lead = leads[self.node_role[target], self.place[target]] if isinstance(leads, np.ndarray) else leads
        lags = np.array([0.0, 0.0, *messages])[self.lag_class]
        return graph.with_lags(np.where(self.lag_class == LAUNCH, lead, lags))


_WORTH_KEEPING = 60_000  # tasks; larger structures are built when they are asked for, or memory would fill up


def step_structure(plan: Plan) -> StepStructure:
    """The structure for a plan; the usual ones are kept."""
    return _kept(plan) if plan.tasks <= _WORTH_KEEPING else _built(plan)


@lru_cache(maxsize=256)
def _kept(plan: Plan) -> StepStructure:
    return _built(plan)


def _built(plan: Plan) -> StepStructure:
    table = _Table(plan, plan.order.turns(plan.pp, plan.vpp, plan.microbatches))
    draft = _Draft(plan)
    _add_nodes(draft, table)
    _add_edges(draft, table)
    return draft.finish(table)


class _Table:
    """The turns of all stages and the units they are cut into. Every stage has equally many of everything.

    Units are numbered along a stage in the order they are computed; `unit_…` arrays have a row for each of them.
    """

    def __init__(self, plan: Plan, turns: Turns) -> None:
        self.plan, self.turns = plan, turns

    @cached_property
    def phase(self) -> Turns:
        return self.turns[..., 0]

    @cached_property
    def chunk(self) -> Turns:
        return self.turns[..., 2]

    @cached_property
    def reducing(self) -> NDArray[np.bool_]:
        """Turns beside which gradients are reduced: the last of every chunk to complete them, or all that do."""
        plan, final = self.plan, self.plan.order.last_phase
        if not plan.overlapped:
            return np.zeros(self.phase.shape, bool)
        if plan.reduces_always:
            return np.asarray(self.phase == final, bool)
        return self._first_of_chunks(final, backwards=True)

    @cached_property
    def gathering(self) -> NDArray[np.bool_]:
        """Turns whose weights are gathered first: all that compute with them, or the first of every chunk."""
        plan = self.plan
        if plan.gathers == "once":
            return self._first_of_chunks(Phase.FORWARD)
        return np.asarray((plan.gathers == "every pass") & (self.phase != Phase.WEIGHTS), bool)

    def _first_of_chunks(self, phase: Phase, backwards: bool = False) -> NDArray[np.bool_]:
        """The first (or last) turn of a phase, of every chunk on every stage."""
        found, stages = np.zeros(self.phase.shape, bool), np.arange(self.plan.pp)
        for chunk in range(self.plan.chunks):
            mine = (self.phase == phase) & (self.chunk == chunk)
            place = mine.shape[1] - 1 - np.argmax(mine[:, ::-1], axis=1) if backwards else np.argmax(mine, axis=1)
            found[stages, place] = True
        return found

    @cached_property
    def unit_ends(self) -> tuple[Nodes, Nodes]:
        """(stages, turns): the first and the last turn of those that run together with each."""
        plan, count = self.plan, self.phase.shape[1]
        index = np.arange(count)
        if not plan.order.pairs:
            alone = np.broadcast_to(index, self.phase.shape)
            return alone, alone
        joins = plan.order.joined(plan.pp, plan.vpp, plan.microbatches)
        first = np.maximum.accumulate(np.where(joins, 0, index), axis=1)
        goes_on = np.concatenate([joins[:, 1:], np.zeros((plan.pp, 1), bool)], axis=1)
        last = np.minimum.accumulate(np.where(goes_on, count, index)[:, ::-1], axis=1)[:, ::-1]
        return first, last

    @cached_property
    def partner(self) -> Nodes:
        """(stages, turns): the chunk of the pass that runs beside each, forward beside backward; -1: none."""
        first, last = self.unit_ends
        paired = (np.take_along_axis(self.phase, first, axis=1) == Phase.FORWARD) & (first < last)
        forward = np.take_along_axis(self.chunk, first, axis=1)
        backward = np.take_along_axis(self.chunk, last, axis=1)
        return np.where(paired, np.where(self.phase == Phase.FORWARD, backward, forward), -1)

    @cached_property
    def cut(self) -> NDArray[np.bool_]:
        """Turns that are cut into units, be it into one."""
        return np.asarray(self.gathering | self.reducing, bool)

    @cached_property
    def parts(self) -> Turns:
        """Units of every turn."""
        return np.where(self.cut, self.plan.units, 1).astype(np.int32)

    @cached_property
    def first(self) -> Nodes:
        """The first unit of every turn."""
        return np.cumsum(self.parts, axis=1, dtype=np.int64) - self.parts

    @cached_property
    def units(self) -> int:
        """Of a stage."""
        return int(self.parts[0].sum())

    @cached_property
    def unit_turn(self) -> Nodes:
        """(stages, units): the turn that each unit belongs to."""
        return np.repeat(np.arange(self.parts.size) % self.parts.shape[1], self.parts.ravel()).reshape(self.plan.pp, -1)

    def of_unit(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of turns, for every unit."""
        return np.take_along_axis(values, self.unit_turn, axis=1)

    @cached_property
    def unit_cut(self) -> NDArray[np.bool_]:
        return self.of_unit(self.cut)

    @cached_property
    def unit_place(self) -> Nodes:
        """Among the units of its turn."""
        return np.asarray(np.arange(self.units)[None, :] - self.of_unit(self.first))

    @cached_property
    def unit_class(self) -> Nodes:
        """-1: a whole turn, 0: the part that holds the first layers, 1: another. Backward runs from the last part."""
        forward = self.of_unit(self.phase) == Phase.FORWARD
        part = np.where(forward, self.unit_place, self.plan.units - 1 - self.unit_place)
        return np.where(self.unit_cut, np.minimum(part, 1), -1)

    @cached_property
    def gathers(self) -> NDArray[np.bool_]:
        """Units whose weights are gathered first."""
        return self.of_unit(self.gathering)

    @cached_property
    def reduced(self) -> NDArray[np.bool_]:
        """Units whose gradients are reduced afterwards."""
        return self.of_unit(self.reducing)

    @cached_property
    def network_order(self) -> tuple[Nodes, Nodes]:
        """Places of gathers and reductions on the network's lane (-1: none).

        One network serves both, and the next unit is gathered before the last one is reduced, as FSDP does it; what is
        done in turn is reduced first.
        """
        after = 1 if self.plan.in_turn else 3
        cut_before: Nodes = np.cumsum(self.unit_cut, axis=1) - self.unit_cut
        keys = np.stack([2 * cut_before, 2 * cut_before + after], axis=-1).reshape(self.plan.pp, -1)
        there = np.stack([self.gathers, self.reduced], axis=-1).reshape(self.plan.pp, -1)
        order = np.argsort(np.where(there, keys, np.iinfo(np.int64).max), axis=1, kind="stable")
        places = np.empty_like(order)
        np.put_along_axis(places, order, np.arange(order.shape[1])[None, :].repeat(self.plan.pp, 0), axis=1)
        places = np.where(there, places, -1).reshape(self.plan.pp, -1, 2)
        return places[..., 0], places[..., 1]

    @cached_property
    def networked(self) -> int:
        """Nodes on the network's lane of a stage."""
        return int(self.gathers[0].sum() + self.reduced[0].sum())


class _Draft:
    """Nodes stage by stage and lane by lane, and edges between them, while a structure is built."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.chunks = plan, plan.chunks
        self.codes: list[tuple[Nodes, Nodes]] = []  # nodes, and their roles as numbers
        self.turn_of: list[tuple[Nodes, Nodes]] = []
        self.edges: list[tuple[Nodes, Nodes, Nodes | int, bool]] = []  # sources, targets, lag classes, from the start
        self.sizes: tuple[int, int, int] = (0, 0, 0)  # nodes on the lanes of a stage: compute, network, host

    def node(self, lane: int, place: NDArray[Any] | int) -> Nodes:
        """Nodes at places of a lane, of every stage: (stages, places)."""
        begins = np.arange(self.plan.pp)[:, None] * sum(self.sizes) + sum(self.sizes[:lane])
        return np.asarray(begins + np.asarray(place), np.int64)

    def code(self, what: Any, stage: Any, chunk: Any = 0, unit: Any = -1, partner: Any = -1) -> NDArray[Any]:
        """A role as a number."""
        chunk_of = (np.asarray(what) * self.plan.pp + stage) * self.chunks + chunk
        return np.asarray((chunk_of * 3 + unit + 1) * (self.chunks + 1) + partner + 1)

    def role(self, code: int) -> Role:
        rest, partner = divmod(code, self.chunks + 1)
        rest, unit = divmod(rest, 3)
        rest, chunk = divmod(rest, self.chunks)
        what, stage = divmod(rest, self.plan.pp)
        return Role(_WHATS[what], stage, chunk, unit - 1, partner - 1)

    def add(self, nodes: Nodes, what: NDArray[Any] | int, chunk: Any = 0, unit: Any = -1, partner: Any = -1) -> None:
        code = self.code(what, np.arange(self.plan.pp)[:, None], chunk, unit, partner)
        self.codes.append((nodes.ravel(), np.broadcast_to(code, nodes.shape).ravel()))

    def wait(self, targets: Nodes, sources: Nodes, lag: Nodes | int = 0, from_start: bool = False) -> None:
        self.edges.append((sources.ravel(), targets.ravel(), lag, from_start))

    def finish(self, table: _Table) -> StepStructure:
        plan, size = self.plan, sum(self.sizes) * self.plan.pp
        code, turn, place = np.zeros(size, np.int64), np.full(size, -1, np.int64), np.zeros(size, np.int64)
        place[self.node(0, np.arange(table.units))] = table.unit_place
        for nodes, values in self.codes:
            code[nodes] = values
        for nodes, values in self.turn_of:
            turn[nodes] = values
        of_what = plan.pp * self.chunks * 3 * (self.chunks + 1)
        used = np.zeros(len(_WHATS) * of_what, bool)
        used[code] = True
        names = ("compute", "network", "host")
        lanes = tuple((n, s) for s in range(plan.pp) for n, count in zip(names, self.sizes, strict=True) if count)
        counts = [count for count in self.sizes if count] * plan.pp
        graph = make_graph(
            np.concatenate([[0], np.cumsum(counts)]), np.zeros(size), self._edges(),
            kind=_KINDS[code // of_what],
        )  # fmt: skip
        graph.order  # noqa: B018  worked out once, here
        roles = tuple(self.role(int(number)) for number in np.flatnonzero(used))
        node_role = (np.cumsum(used) - 1)[code].astype(np.int32)
        lag_class = graph.edges.lag.astype(np.int32)
        codes = np.unique(lag_class[lag_class >= LINKS])
        lag_class = np.where(lag_class < LINKS, lag_class, LINKS + np.searchsorted(codes, lag_class)).astype(np.int32)
        links = tuple(divmod(code - LINKS, plan.pp) for code in codes.tolist())
        return StepStructure(graph, roles, node_role, lag_class, links, table.turns, turn, place, lanes)

    def link(self, one: Nodes, other: Nodes) -> Nodes:
        """The class of messages between two stages, until it is known which of them there are."""
        return LINKS + np.minimum(one, other) * self.plan.pp + np.maximum(one, other)

    def _edges(self) -> Edges:
        parts = []
        for sources, targets, lag, from_start in self.edges:
            edges = Edges.of(sources, targets, Rule.EVENT, from_start)
            parts.append(replace(edges, lag=np.broadcast_to(np.asarray(lag, np.float64), len(edges))))
        return Edges.join(parts)


def _add_nodes(draft: _Draft, table: _Table) -> None:
    plan, turns = draft.plan, table.phase.shape[1]
    tail = 4 if plan.hosted else 3
    draft.sizes = (table.units + tail, table.networked, turns + 1 if plan.hosted else 0)
    index = np.arange(plan.pp)[:, None] * turns + table.unit_turn
    computed = draft.node(0, np.arange(table.units)[None, :])
    partner = table.of_unit(table.partner)
    draft.add(computed, table.of_unit(table.phase), table.of_unit(table.chunk), table.unit_class, partner)
    draft.turn_of.append((computed.ravel(), index.ravel()))
    for there, places, what in zip(
        (table.gathers, table.reduced), table.network_order, (_GATHER, _REDUCE), strict=True
    ):
        nodes = draft.node(1, places)
        stage = np.nonzero(there)[0]
        chunk, unit = table.of_unit(table.chunk)[there], table.unit_class[there]
        draft.codes.append((nodes[there], draft.code(what, stage, chunk, unit)))
        draft.turn_of.append((nodes[there], index[there]))
    ends = (_REST, _OPTIMIZER, _END, _PUBLISH) if plan.hosted else (_REST, _OPTIMIZER, _PUBLISH)
    draft.add(draft.node(0, table.units + np.arange(len(ends))[None, :]), np.array(ends)[None, :])
    if plan.hosted:
        hosts = draft.node(2, np.arange(turns)[None, :])
        draft.add(hosts, _HOST + table.phase, table.chunk)
        draft.turn_of.append((hosts.ravel(), np.arange(plan.pp * turns)))
        draft.add(draft.node(2, turns), _HOST_OPTIMIZER)


def _add_edges(draft: _Draft, table: _Table) -> None:
    plan, turns = draft.plan, table.phase.shape[1]
    computed = draft.node(0, np.arange(table.units)[None, :])
    gathers, reductions = (draft.node(1, places) for places in table.network_order)
    draft.wait(computed[table.gathers], gathers[table.gathers])
    draft.wait(reductions[table.reduced], computed[table.reduced])
    units = 1 if plan.in_turn else 2  # gathered ahead, at most: memory, as FSDP limits it
    ahead = table.gathers[:, units:]
    draft.wait(gathers[:, units:][ahead], computed[:, :-units][ahead])
    if plan.in_turn:
        before = table.reduced[:, :-1]
        draft.wait(computed[:, 1:][before], reductions[:, :-1][before])
    optimizer = draft.node(0, table.units + 1)
    if table.reduced.any():
        draft.wait(optimizer, np.where(table.reduced, reductions, -1).max(axis=1))
    first = draft.node(0, table.first)
    last = first + table.parts - 1
    hosts = draft.node(2, np.arange(turns)[None, :]) if plan.hosted else None
    if hosts is not None:
        waiting, awaited = (computed, table.of_unit(hosts)) if plan.leads else (first, hosts)
        draft.wait(waiting, awaited, LAUNCH, from_start=True)
        draft.wait(optimizer, draft.node(2, turns), LAUNCH, from_start=True)
        draft.wait(optimizer + 1, draft.node(2, turns))
    _join_stages(draft, table, first, last, hosts)


def _join_stages(draft: _Draft, table: _Table, first: Nodes, last: Nodes, hosts: Nodes | None) -> None:
    """A forward pass waits for the virtual stage before it, a backward pass for the one after it."""
    plan, stages = draft.plan, np.arange(draft.plan.pp)[:, None]
    virtual = np.take_along_axis(plan.order.virtual_stages(plan.pp, plan.vpp), table.chunk.astype(np.int64), axis=1)
    micro, count = table.turns[..., 1], plan.pp * plan.vpp
    begins, ends = table.unit_ends
    first, last = np.take_along_axis(first, begins, axis=1), np.take_along_axis(last, ends, axis=1)
    for phase, step in ((Phase.FORWARD, -1), (Phase.BACKWARD, 1)):
        mine = table.phase == phase
        other = virtual + step
        there = mine & (other >= 0) & (other < count)
        stage_of = np.full((count, plan.microbatches), -1, np.int64)
        stage_of[virtual[mine], micro[mine]] = np.broadcast_to(stages, mine.shape)[mine]
        other_stage = stage_of[other.clip(0, count - 1), micro]
        away = there & (other_stage != stages)
        here = there & ~away  # two chunks of one stage that follow each other
        for lane in (last,) if hosts is None else (last, hosts):
            at = np.full((count, plan.microbatches), -1, np.int64)
            at[virtual[mine], micro[mine]] = lane[mine]
            draft.wait(first[away], at[other[away], micro[away]], draft.link(stages, other_stage)[away])
            draft.wait(first[here], at[other[here], micro[here]])
