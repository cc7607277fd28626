"""Skeleton: the structure of one training step, apart from its times.

One rank stands for all ranks of a stage that do the same, so the graph has a few lanes a stage, however many GPUs there
are. Structure depends on counts alone (stages, chunks, micro-batches, units), so it is worked out once and kept; a
prediction fills in times by class: `duration = table[duration_class]`, `lag = table[lag_class]`.

    host s     [F0][F1][B0]…           issues the blocks
    compute s  ──[ F0 ][ F1 ][ B0 ]…   runs them; a turn of the next stage waits for this one and for the link
    network s  ────[gather][reduce]…   gathers weights and reduces gradients beside them
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lumos.graph import Edges, Floats, Graph, Rule, make_graph
from lumos.schedules import Phase, Turn, order_of
from lumos.vocabulary import Kind

Places = dict[tuple[Phase, int, int], int]
"""The node of a (phase, micro-batch, virtual stage)."""

_NAMES = {phase: phase.name.lower() for phase in Phase}


class Role(NamedTuple):
    """What a node is; nodes of one role last equally long."""

    what: str  # forward, backward, weights, host_…, gather, reduce, optimizer, regather, …
    stage: int
    chunk: int = 0
    unit: int = -1  # which of the parts a block is cut into; -1 where it is whole


class Plan(NamedTuple):
    """The counts that a structure depends on."""

    schedule: str
    pp: int
    vpp: int
    microbatches: int
    units: int  # parts that the blocks of a stage are cut into, where the network runs beside them
    sharded: bool  # weights are gathered for every unit (ZeRO-3)
    regathers: bool  # … and again for the backward pass
    overlapped: bool  # gradients are reduced beside the last backward pass
    hosted: bool  # the host has a lane
    reduces_always: bool = False  # after every micro-batch

    @property
    def tasks(self) -> int:
        """About how many nodes the structure has."""
        turns = self.pp * self.vpp * self.microbatches * (3 if self.schedule == "zero-bubble" else 2)
        split = self.sharded or (self.overlapped and self.reduces_always)
        return turns * (5 * self.units // 2 if split else 1) + (turns if self.hosted else 0)


@dataclass(frozen=True)
class Skeleton:
    """A graph without times, and the role of every node and lag."""

    graph: Graph
    roles: tuple[Role, ...]
    node_role: NDArray[np.int32]
    lag_class: NDArray[np.int32]  # 0: none, 1: to the next stage, 2: a launch
    node_turn: tuple[Turn | None, ...]
    lanes: tuple[tuple[str, int], ...]  # (name, stage)

    @cached_property
    def roles_of(self) -> dict[tuple[str, int], list[int]]:
        """Roles by (what, stage)."""
        found: dict[tuple[str, int], list[int]] = {}
        for index, role in enumerate(self.roles):
            found.setdefault((role.what, role.stage), []).append(index)
        return found

    def filled(self, durations: Floats, lags: Floats) -> Graph:
        """The graph with the durations of each role and the lags of each class, in nanoseconds."""
        graph = self.graph.with_times(durations[self.node_role], self.graph.gap)
        return graph.with_lags(lags[self.lag_class])


class _Draft:
    """Nodes lane by lane and edges between them, while a skeleton is built."""

    def __init__(self) -> None:
        self.roles: dict[Role, int] = {}
        self.lanes: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.role_of: list[int] = []
        self.kind_of: list[int] = []
        self.turn_of: list[Turn | None] = []
        self.edges: list[int] = []  # source, target, lag class, from start, of one edge after the other

    def add(self, lane: str, role: Role, kind: Kind, turn: Turn | None = None) -> int:
        node = len(self.role_of)
        self.role_of.append(self.roles.setdefault(role, len(self.roles)))
        self.kind_of.append(kind)
        self.turn_of.append(turn)
        self.lanes[lane, role.stage].append(node)
        return node

    def wait(self, target: int, source: int, lag: int = 0, from_start: bool = False) -> None:
        self.edges += (source, target, lag, from_start)

    def finish(self) -> Skeleton:
        order = [node for lane in self.lanes.values() for node in lane]
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        table = np.array(self.edges, np.int64).reshape(-1, 4)
        edges = Edges.of(place[table[:, 0]], place[table[:, 1]], Rule.EVENT)
        edges = replace(edges, from_start=table[:, 3].astype(bool), lag=table[:, 2].astype(np.float64))
        first = np.concatenate([[0], np.cumsum([len(lane) for lane in self.lanes.values()])])
        graph = make_graph(first, np.zeros(len(order)), edges, kind=np.array(self.kind_of, np.uint8)[order])
        graph.order  # noqa: B018  worked out once, here
        lag_class = graph.edges.lag.astype(np.int32)
        roles = np.array(self.role_of, np.int32)[order]
        return Skeleton(
            graph, tuple(self.roles), roles, lag_class, tuple(self.turn_of[i] for i in order), tuple(self.lanes)
        )


_WORTH_KEEPING = 60_000  # tasks; larger structures are built when they are asked for, or memory would fill up


def skeleton(plan: Plan) -> Skeleton:
    """The structure for a plan; the usual ones are kept."""
    return _kept(plan) if plan.tasks <= _WORTH_KEEPING else _built(plan)


@lru_cache(maxsize=256)
def _kept(plan: Plan) -> Skeleton:
    return _built(plan)


def _built(plan: Plan) -> Skeleton:
    draft = _Draft()
    starts: Places = {}
    ends: Places = {}
    hosts: Places = {}
    for stage in range(plan.pp):
        _Stage(draft, plan, stage, starts, ends, hosts).build()
    _join_stages(draft, plan, starts, ends, hosts)
    return draft.finish()


class _Stage:
    """The nodes of one stage."""

    def __init__(self, draft: _Draft, plan: Plan, stage: int, starts: Places, ends: Places, hosts: Places) -> None:
        self.draft, self.plan, self.stage = draft, plan, stage
        self.starts, self.ends, self.hosts = starts, ends, hosts
        self.reductions: list[int] = []
        self.computed: list[int] = []
        self.to_reduce: list[tuple[int, Role, Turn]] = []  # the gradients of the unit before, and the node they follow
        self.roles: dict[tuple[str, int, int], Role] = {}

    def build(self) -> None:
        plan = self.plan
        turns = order_of(plan.schedule, self.stage, plan.pp, plan.vpp, plan.microbatches)
        last_backward = _last_turns(turns)
        for turn in turns:
            key = (turn.phase, turn.microbatch, turn.chunk * plan.pp + self.stage)
            always = plan.reduces_always and turn.phase == Phase.BACKWARD
            nodes = self._turn(turn, reduces=always or turn in last_backward)
            self.starts[key], self.ends[key] = nodes[0], nodes[-1]
            if plan.hosted:
                self._host(turn, key, nodes[0])
        self._finish()

    def _role(self, what: str, chunk: int, unit: int = -1) -> Role:
        role = self.roles.get((what, chunk, unit))
        if role is None:
            role = self.roles[what, chunk, unit] = Role(what, self.stage, chunk, unit)
        return role

    def _turn(self, turn: Turn, reduces: bool) -> list[int]:
        plan, name = self.plan, _NAMES[turn.phase]
        split = plan.sharded or (reduces and plan.overlapped)
        if not split or turn.phase == Phase.WEIGHTS:
            return [self._compute(name, turn, -1)]
        units = range(plan.units) if turn.phase == Phase.FORWARD else range(plan.units - 1, -1, -1)
        return [self._unit(name, turn, unit, reduces) for unit in units]

    def _compute(self, name: str, turn: Turn, unit: int) -> int:
        node = self.draft.add("compute", self._role(name, turn.chunk, unit), Kind.COMPUTE, turn)
        self.computed.append(node)
        return node

    def _unit(self, name: str, turn: Turn, unit: int, reduces: bool) -> int:
        draft, plan = self.draft, self.plan
        gather = -1
        if plan.sharded and (turn.phase == Phase.FORWARD or plan.regathers):
            gather = draft.add("network", self._role("gather", turn.chunk, unit), Kind.COMM, turn)
            if len(self.computed) >= 2:  # at most two gathered units ahead: memory, as FSDP limits it
                draft.wait(gather, self.computed[-2])
        self._reduce()
        node = self._compute(name, turn, unit)
        if gather >= 0:
            draft.wait(node, gather)
        if turn.phase == Phase.BACKWARD and (plan.sharded or reduces):
            self.to_reduce.append((node, self._role("reduce", turn.chunk, unit), turn))
        return node

    def _reduce(self) -> None:
        """Reduce what waits for it: one network serves both, and the next unit is gathered first, as FSDP does it."""
        for node, role, turn in self.to_reduce:
            reduction = self.draft.add("network", role, Kind.COMM, turn)
            self.draft.wait(reduction, node)
            self.reductions.append(reduction)
        self.to_reduce.clear()

    def _host(self, turn: Turn, key: tuple[Phase, int, int], first: int) -> None:
        node = self.draft.add("host", self._role(f"host {_NAMES[turn.phase]}", turn.chunk), Kind.CPU, turn)
        self.draft.wait(first, node, lag=2, from_start=True)
        self.hosts[key] = node

    def _finish(self) -> None:
        """What is left of the reduction, the optimizer, and the weights for everybody."""
        draft, plan = self.draft, self.plan
        self._reduce()
        draft.add("compute", self._role("reduce rest", 0), Kind.COMM)
        node = draft.add("compute", self._role("optimizer", 0), Kind.COMPUTE)
        for reduction in self.reductions[-1:]:
            draft.wait(node, reduction)
        if plan.hosted:
            host = draft.add("host", self._role("host optimizer", 0), Kind.CPU)
            draft.wait(node, host, lag=2, from_start=True)
            end = draft.add("compute", self._role("end", 0), Kind.COMPUTE)
            draft.wait(end, host)
        draft.add("compute", self._role("publish", 0), Kind.COMM)


def _last_turns(turns: list[Turn]) -> set[Turn]:
    """The last backward of every chunk: gradients are whole after it."""
    final = Phase.WEIGHTS if any(t.phase == Phase.WEIGHTS for t in turns) else Phase.BACKWARD
    last = {turn.chunk: turn for turn in turns if turn.phase == final}
    return set(last.values())


def _join_stages(draft: _Draft, plan: Plan, starts: Places, ends: Places, hosts: Places) -> None:
    """A forward waits for the stage before it, a backward for the one after it."""
    virtual = plan.pp * plan.vpp
    for (phase, micro, stage), node in starts.items():
        if phase == Phase.WEIGHTS:
            continue
        other = stage - 1 if phase == Phase.FORWARD else stage + 1
        before = (phase, micro, other) if 0 <= other < virtual else None
        if before is None:
            continue
        draft.wait(node, ends[before], lag=1)
        if plan.hosted:
            draft.wait(node, hosts[before], lag=1)
