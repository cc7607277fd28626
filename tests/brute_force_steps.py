"""Steps with all replicas and ranks drawn one by one: what `lumos.risk.monte_carlo` is held to. Slow, and simple."""

from __future__ import annotations

import numpy as np

from lumos.graph.graph import Floats
from lumos.risk.variability import Variability
from lumos.schedules import Turn
from lumos.step.step import Step

PASSES = ("forward", "backward", "weights")
COLLECTIVES = ("gather", "reduce", "reduce rest", "publish")


def brute_force_ms(step: Step, v: Variability, draws: int, seed: int = 1) -> Floats:
    """Lengths of so many steps; every array below has a row a replica and a column a scenario."""
    random, setup, graph = np.random.default_rng(seed), step.setup, step.graph
    p, roles, turns = setup.parallel, step.structure.roles, step.structure.node_turn
    inside, replicas = p.tp * p.cp, p.dp
    shape = (p.pp, replicas, inside, draws)
    own = v.gpu.at(random.random(shape)) * v.step.at(random.random(shape))
    work = v.microbatch.at(random.random((setup.train.microbatches, replicas, draws)))
    within = float(np.mean(v.collective.at((np.arange(100_000) + 0.5) / 100_000)))
    end, took = np.zeros((len(graph), replicas, draws)), np.zeros((len(graph), replicas, draws))
    pause = _pauses(step, v, random, shape)
    experts = _experts(step)
    gathered = step.assembly.layout.sharing[0].size // p.cp
    drawn: dict[tuple[int, Turn | None], Floats] = {}
    for node in graph.order.tolist():
        role, turn = roles[step.structure.node_role[node]], turns[node]
        start = np.zeros((replicas, draws)) if graph.is_first[node] else end[node - 1].copy()
        for edge in range(graph.incoming[node], graph.incoming[node + 1]):
            source, lag = graph.edges.source[edge], graph.edges.lag[edge]
            if step.structure.is_message[edge]:
                lag = lag * v.collective.at(random.random((inside, replicas, draws))).max(axis=0)
            reached = end[source] - took[source] if graph.edges.from_start[edge] else end[source]
            start = np.maximum(start, reached + lag)
        length = np.full((replicas, draws), graph.duration[node])
        if role.what in PASSES or role.what == "optimizer":
            if (role.stage, turn) not in drawn:  # one for all parts of a pass
                drawn = {key: value for key, value in drawn.items() if key[0] != role.stage}
                drawn[role.stage, turn] = (own[role.stage] * v.kernel.at(random.random(shape[1:]))).max(axis=1)
            mine = drawn[role.stage, turn]
            if turn is not None and role.what in PASSES:
                mine = mine * work[turn.microbatch]
            start = start + pause.get(node, 0.0)
            length = length * _pass_factor(step, role, mine, within, v, random, inside)
            if role.what in PASSES and experts > 1:
                start, length = _together(start, experts), _together(length, experts)
        elif role.what.startswith("host"):
            length = length * v.host.at(random.random((inside, replicas, draws))).max(axis=0)
            length = _together(length, experts)
        elif role.what in COLLECTIVES:
            length = length * v.collective.at(random.random((inside, draws))).max(axis=0)
            start = _together(start, gathered if role.what == "gather" else replicas)
        took[node], end[node] = length, start + length
    return np.asarray(end.max(axis=(0, 1)) / 1e6 * v.job.at(random.random(draws)))


def _pass_factor(step, role, mine, within, v, random, inside):  # type: ignore[no-untyped-def]
    if role.what == "optimizer":
        return mine
    block = getattr(step.chunks[role.stage][role.chunk], role.what)
    waited = block.waited_us / block.us if block.us else 0.0
    gpu = min(1 - waited, block.compute_us / block.us) if block.us else 1.0
    host = v.host.at(random.random((inside, *mine.shape))).max(axis=0)
    return gpu * mine + waited * host + (1 - gpu - waited) * within


def _experts(step: Step) -> int:
    """Replicas that exchange tokens in every pass."""
    p, layout = step.setup.parallel, step.assembly.layout
    if not step.setup.model.experts or p.ep == 1:
        return 1
    return max(1, -(-p.ep * layout.expert_tp // (p.tp * p.cp)))


def _together(values: Floats, size: int) -> Floats:
    """The largest among neighbouring replicas, for all of them."""
    if size <= 1:
        return values
    groups = values.reshape(-1, size, values.shape[-1])
    return np.broadcast_to(groups.max(axis=1, keepdims=True), groups.shape).reshape(values.shape)


def _pauses(step: Step, v: Variability, random: np.random.Generator, shape: tuple[int, ...]) -> dict[int, Floats]:
    """By node: how long ranks of each replica pause before it."""
    if v.pauses.is_none:
        return {}
    what = [role.what for role in step.structure.roles]
    stage = np.array([role.stage for role in step.structure.roles])[step.structure.node_role]
    works = np.array([name in PASSES or name == "optimizer" for name in what])[step.structure.node_role]
    found: dict[int, Floats] = {}
    for place in range(shape[0]):
        nodes = np.flatnonzero(works & (stage == place))
        hit = random.random(shape[1:]) < v.pauses.probability
        lengths = hit * v.pauses.spread.at(random.random(shape[1:])) * v.pauses.ms * 1e6
        at = random.choice(nodes, shape[1:])
        for node in nodes.tolist():
            found[node] = np.where(at == node, lengths, 0.0).sum(axis=1)
    return found
