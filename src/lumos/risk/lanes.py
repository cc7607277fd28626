"""Lanes: a step's graph with all that it takes to draw its times, and the ranks that each part of it stands for.

One rank stands for a stage in the graph of a described step. Ranks that meet inside every pass (tensor, context and
expert parallelism, weights that are gathered for every pass) go at the pace of the slowest of them: they stay one lane.
Data-parallel replicas are lanes of their own, which meet in reductions and in gathers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from lumos.analysis.run import TracedRun
from lumos.errors import OptionError
from lumos.graph.graph import Floats, Graph, simulate
from lumos.prediction.prediction import Prediction
from lumos.program.layout import RankLayout
from lumos.setup.setup import Setup
from lumos.setup.slow import Slow
from lumos.step.step import Step
from lumos.trace.names import Kind

_PASSES = ("forward", "backward", "weights")
_COLLECTIVES = ("gather", "reduce", "reduce rest", "publish")
_FEWEST = 4  # lanes that are simulated, however large the graph of one is
MOST_NODES = 60_000  # of all lanes of a step that are simulated one by one
_GATHERS = ("gather", "publish")  # among ranks that divide the weights; reductions are among all replicas
WITHIN, BEFORE, AFTER = 0, 1, 2
"""Rows of `Lanes.apart`."""


@dataclass(frozen=True)
class Lanes:
    """The graph of one replica, or of several that meet inside passes; all replicas are alike but for what is drawn."""

    graph: Graph
    place: NDArray[np.int32]  # the stage of every node
    parts: Floats  # (nodes, 3): shares of its time that GPU, host, and communication inside it take
    fresh: NDArray[np.bool_]  # whether a node begins a pass, or is all of it
    meets: NDArray[np.uint8]  # 0: no collective, 1: one of a lane alone, 2: all lanes meet, 3: neighbouring ones do
    link: NDArray[np.bool_]  # edges that are messages to another stage
    micro: NDArray[np.int32]  # the micro-batch of every node; -1: of none
    gathers: NDArray[np.bool_]  # collectives among those alone who divide the weights
    lanes: int
    merged: int  # replicas in a lane: they meet inside every pass
    inside: int  # ranks of one stage of one replica
    near: int = 1  # neighbouring lanes that gather each other's weights
    gathered: int = 1  # of the replicas in a lane, those that meet because they gather each other's weights
    simulated: int = 1  # lanes that are simulated: all, or those that are likely to be last
    fixed_ms: float = 0.0  # of the step, and not of its graph
    order: str = "tp-cp-dp-pp"
    layout: RankLayout | None = None  # says what leaves a node; None: everything does

    @property
    def stages(self) -> int:
        return int(self.place.max(initial=0)) + 1

    @property
    def ranks(self) -> int:
        """In a lane and stage."""
        return self.merged * self.inside

    @property
    def gpus(self) -> int:
        return self.lanes * self.stages * self.ranks

    def weights(self, part: int, stage: int) -> Floats:
        """What GPU (0) or host (1) take for each pass of a stage."""
        mine = (self.place == stage) & (self.parts[:, part] > 0)
        work = (self.parts[:, part] * self.graph.duration)[mine]
        passes = np.maximum(np.cumsum(self.fresh[mine]) - 1, 0)
        return np.bincount(passes, work).astype(np.float64) if len(work) else np.ones(1)

    def where(self, rank: int) -> tuple[int, int, int]:
        """(lane, stage, place in the lane's stage) of a rank of the job."""
        replicas = self.lanes * self.merged
        rest, inside = divmod(rank, self.inside)
        stage, replica = divmod(rest, replicas)
        if self.order != "tp-cp-dp-pp":
            replica, stage = divmod(rest, self.stages)
        lane, within = divmod(replica, self.merged)
        return min(lane, self.lanes - 1), stage, within * self.inside + inside

    def rank_logs(self, slow: tuple[Slow, ...], spread: bool) -> Floats:
        """(lanes, stages, ranks): logarithms of the factors of slow ranks; of a share of them if it is not drawn."""
        logs = np.zeros((self.lanes, self.stages, self.ranks))
        for one in slow:
            if one.rank is not None:
                logs[self.where(one.rank)] += np.log(one.factor)
            if one.share and spread:
                count = round(one.share * self.gpus)
                for rank in (np.arange(count) * self.gpus // max(count, 1)).tolist():
                    logs[self.where(rank)] += np.log(one.factor)
        return logs

    def apart(self, slow: tuple[Slow, ...]) -> Floats:
        """(3, lanes, stages): factors from slow links.

        On communication inside passes, on messages with the stage before, and on those with the next.
        """
        factors = np.ones((3, self.lanes, self.stages))
        for one in slow:
            if one.rank is not None or one.share:
                continue
            lane, stage, _ = self.where(one.link) if one.link is not None else (slice(None), slice(None), 0)
            leaves = _leaving(self.layout, one.link)
            for row, group in ((WITHIN, "tp"), (BEFORE, "pp"), (AFTER, "pp")):
                if one.group in ("", group) and leaves[row]:
                    factors[row, lane, stage] *= one.factor
        return factors

    def slow_graph(self, slow: tuple[Slow, ...]) -> Graph:
        """The graph with collectives of replicas as slow links make them: all of their ranks wait for the slowest."""
        duration = self.graph.duration.copy()
        for one in slow:
            if one.rank is not None or one.share or one.group not in ("", "dp"):
                continue
            *_, gathers, reduces = _leaving(self.layout, one.link)
            hit = (self.meets > 0) & np.where(self.gathers, gathers, reduces)
            if one.link is not None:
                hit &= self.place == self.where(one.link)[1]
            duration[hit] *= one.factor
        return self.graph.with_times(duration, self.graph.gap)


def lanes_of(step: Step, fixed_ms: float = 0.0, most: int = MOST_NODES) -> Lanes:
    """Of a described or changed step. Replicas that gather weights for every pass become one lane if they are many."""
    structure, setup, size = step.structure, step.setup, len(step.graph)
    roles, node_role = structure.roles, structure.node_role
    merged, near = _merged(step), _near(step)
    near = max(1, near // merged)
    gathered = near if setup.parallel.dp // merged * size > most else 1
    merged, near = merged * gathered, near // gathered
    lanes = max(1, setup.parallel.dp // merged)
    parts = np.array([_parts(step, index) for index in range(len(roles))])[node_role]
    meets = np.array([_meets(role.what, lanes, _near(step), near) for role in roles], np.uint8)[node_role]
    turns = structure.turns.reshape(-1, 3)
    micro = np.where(structure.turn_index >= 0, turns[structure.turn_index, 1], -1).astype(np.int32)
    return Lanes(
        graph=step.graph, place=np.array([role.stage for role in roles], np.int32)[node_role], parts=parts,
        fresh=_fresh(step), meets=meets,
        link=structure.is_message, micro=micro, lanes=lanes, merged=merged,
        inside=setup.parallel.tp * setup.parallel.cp, near=near, gathered=gathered,
        simulated=lanes if lanes * size <= most else min(lanes, max(_FEWEST, most // 2 // size)), fixed_ms=fixed_ms,
        order=setup.parallel.order, layout=step.assembly.layout,
        gathers=np.array([role.what in _GATHERS for role in roles])[node_role],
    )  # fmt: skip


def _fresh(step: Step) -> NDArray[np.bool_]:
    """Parts of one pass follow each other on a lane."""
    turn = step.structure.turn_index
    same = np.concatenate([[False], (turn[1:] == turn[:-1]) & (turn[1:] >= 0)])
    return np.asarray(~same | step.graph.is_first)


def _merged(step: Step) -> int:
    """Replicas that meet inside every pass because they share experts."""
    layout, parallel = step.assembly.layout, step.setup.parallel
    if not step.setup.model.experts or parallel.ep == 1:
        return 1
    return min(max(1, ceil(parallel.ep * layout.expert_tp / (parallel.tp * parallel.cp))), parallel.dp)


def _near(step: Step) -> int:
    """Replicas that gather each other's weights for every pass."""
    if step.assembly.transfers.gathers != "every pass":
        return 1
    return min(max(1, step.assembly.layout.sharing[0].size // step.setup.parallel.cp), step.setup.parallel.dp)


def _meets(what: str, lanes: int, gather: int, near: int) -> int:
    if what not in _COLLECTIVES:
        return 0
    if lanes == 1:
        return 1
    if what == "gather" and gather > 1:
        return 3 if near > 1 else 1
    return 2


def _parts(step: Step, index: int) -> tuple[float, float, float]:
    """What the time of a role consists of."""
    role = step.structure.roles[index]
    if role.what.startswith("host"):
        return 0.0, 1.0, 0.0
    if role.what == "optimizer":
        return 1.0, 0.0, 0.0
    if role.what not in _PASSES:
        return 0.0, 0.0, 0.0
    block = step.assembly.block_of(role)
    if block.us <= 0:
        return 1.0, 0.0, 0.0
    waited = min(1.0, block.waited_us / block.us)
    computed = min(1.0 - waited, block.compute_us / block.us)
    return computed, waited, max(0.0, 1.0 - waited - computed)


def _leaving(layout: RankLayout | None, rank: int | None) -> tuple[bool, bool, bool, bool, bool]:
    """What of a rank's communication goes to other nodes; all of it, if no rank is named.

    That inside passes, messages with the stage before and with the next, weights that are gathered, gradients that are
    reduced.
    """
    if layout is None or rank is None:
        return True, True, True, True, True
    p, experts = layout.parallel, layout.parallel.ep * layout.expert_tp
    inside = [(p.tp, 1), (p.cp, p.tp), (p.ep, layout.expert_tp)]
    gathers = [(layout.sharing[0].size, p.tp)]
    reduces = [(layout.dp.size, p.tp)]
    if layout.model.experts:
        gathers.append((layout.experts_sharing[0].size, experts))
        reduces.append((layout.expert_dp.size, experts))
    within, gather, reduce = (any(layout.leaves(rank, *one) for one in groups) for groups in (inside, gathers, reduces))
    return within, layout.stage_leaves(rank, -1), layout.stage_leaves(rank, 1), gather, reduce


def lanes_of_rank(found: Prediction) -> Lanes:
    """Of a run of which one rank was recorded: all ranks are like it, and meet in its collectives."""
    run = found.run
    if found.setup is None or not isinstance(run, TracedRun) or not found.is_dry:
        raise OptionError("--risk needs a described run, a dry run, or a trace with what is to change (--set)")
    graph = run.graph if run.duration is None else run.graph.with_times(run.duration, run.graph.gap)
    kind, size = graph.kind, len(graph)
    host, collective = kind == Kind.CPU, kind == Kind.COMM
    parts = np.zeros((size, 3))
    parts[:, 0], parts[:, 1] = ~host & ~collective, host
    times = simulate(graph)
    segment = np.searchsorted(np.sort(times.start[collective]), times.start, side="right")
    before = np.concatenate([[-1], segment[:-1]])
    return Lanes(
        graph=graph, place=np.zeros(size, np.int32), parts=parts,
        fresh=np.asarray((segment != before) | graph.is_first),
        meets=collective.astype(np.uint8), link=np.zeros(len(graph.edges), bool), micro=np.full(size, -1, np.int32),
        gathers=np.zeros(size, bool), lanes=1, merged=found.setup.cluster.gpus, inside=1,
        gathered=found.setup.cluster.gpus, fixed_ms=found.step_ms - times.span / 1e6,
    )  # fmt: skip


def whom_words(setup: Setup, lanes: Lanes, one: Slow) -> str:
    """Whom a slow rank delays, or what goes through its adapter."""
    rank = one.rank if one.rank is not None else one.link
    if rank is None:
        return "all ranks"
    p, link = setup.parallel, one.link is not None
    within, before, after, gathers, reduces = _leaving(lanes.layout, one.link)
    inside, stages = p.tp * p.cp, before or after
    stage, replica = divmod(rank // inside, p.dp)
    if p.order != "tp-cp-dp-pp":
        replica, stage = divmod(rank // inside, p.pp)
    found = []
    if inside > 1 and (not link or (within and one.group in ("", "tp"))):
        found.append(f"{_others(inside, 'rank')} of its stage in every pass")
    if p.pp > 1 and (not link or (stages and one.group in ("", "pp"))):
        found.append(f"{_others(p.pp, 'stage')} of replica {replica}")
    if p.dp > 1 and (not link or ((gathers or reduces) and one.group in ("", "dp"))):
        found.append(f"{_others(p.dp, 'replica')} at the end of the step")
    return f"stage {stage}, replica {replica}: delays " + (", ".join(found) or "nobody else")


def _others(count: int, name: str) -> str:
    return f"{count - 1:,} other {name}{'s' * (count - 1 > 1)}"
