"""From observed steps to a model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import NormalDist
from typing import Any

import numpy as np

from lumos.errors import InputError, OptionError
from lumos.graph.graph import Floats
from lumos.synthesis.model import (
    COLUMNS,
    LEVELS,
    MOST_DEVIATION,
    PHASES,
    VERSION,
    BlockModel,
    Learned,
    Marginal,
    Model,
    Pipeline,
    RankModel,
    RoleModel,
    Spread,
    StateModel,
)
from lumos.synthesis.observe import Block, Job, Observed, ObservedRank, State, Task
from lumos.synthesis.pipeline import pipeline_of
from lumos.synthesis.vocabulary import SYNC, TAIL

_LEAST_WIDTH = 0.03  # of the smoothing, in logarithms: no value of a model is nearer to a recorded one by design
_BLUR = 0.02  # of a mean that rests on a single value, in logarithms
_PLACES, _CRITICAL_PLACES = 0.2, 0.05  # smoothing of places, in tasks; what streams wait for keeps its order
_SAME_ROLE = 0.1
_IN_FORWARD = 0.05  # the share of the collectives of a kind from which on they belong to forward passes
_CASES = 8  # fewer tell nothing about what goes together
_KEYS = tuple[str, bool, str]


def learn(jobs: Sequence[Job], seed: int = 0) -> Model:
    """The statistics of some jobs of one kind, which may differ in size and layers."""
    _require_scipy()
    steps = [step for job in jobs for step in job.steps]
    if not any(rank.tasks for step in steps for rank in step.ranks):
        raise InputError("the traces have no tasks to learn from; record CPU and CUDA activities together")
    _require_one_kind(jobs)
    generator = np.random.default_rng(seed)
    pipeline = pipeline_of(jobs)
    if pipeline is not None:
        jobs = [Job(job.name, pipeline.without_messages(job.steps)) for job in jobs]
    numbers = sorted({rank.rank for step in steps for rank in step.ranks})  # runs may have recorded different ranks
    roles_in_order = pipeline.stage_of_rank if pipeline else _roles(jobs)
    role_of = {number: roles_in_order[i % len(roles_in_order)] for i, number in enumerate(numbers)}
    ranks = [rank for step in steps for rank in step.ranks]
    depths = Counter(rank.layers for rank in ranks)
    layers = pipeline.layers if pipeline else depths.most_common(1)[0][0]
    learners = [_Learner(jobs, generator, layers, role_of, role) for role in range(max(role_of.values()) + 1)]
    roles = [learner.role(pipeline is not None) for learner in learners]
    return Model(
        version=VERSION,
        learned_from=Learned(len(jobs), len(steps), sum(len(rank.tasks) for rank in ranks)),
        ranks=len(role_of),
        world=max(step.world for step in steps),
        steps=max(len(job.steps) for job in jobs),
        micro_batches=pipeline.micro_batches if pipeline else roles[0].micro_batches,
        layers=layers,
        streams=max(step.streams for step in steps),
        groups=[(group.size, group.stride) for group in steps[0].groups],
        latency_us=rounded(float(np.median([rank.latency for rank in ranks])) / 1e3),
        shapes=any(step.shapes for step in steps),
        spread=_spreads(jobs, role_of),
        role_of_rank=list(role_of.values()),
        by_rank=_by_rank(steps, role_of, learners[0]),
        pipeline=None if pipeline is None else Pipeline(
            pipeline.stages, pipeline.schedule, learners[0].marginals(pipeline.messages(steps), 1.0)
        ),
        roles=roles,
    )  # fmt: skip


def _by_rank(steps: Sequence[Observed], role_of: Mapping[int, int], learner: _Learner) -> list[RankModel]:
    """What distinguishes every rank from others of its role, whatever the step: when it begins, and its speed."""
    leads: dict[int, list[float]] = defaultdict(list)
    speeds: dict[int, list[Floats]] = defaultdict(list)
    for step in steps:
        logs, roles = _log_totals(step.ranks), np.array([role_of[rank.rank] for rank in step.ranks])
        for rank, role, log in zip(step.ranks, roles, logs, strict=True):
            leads[rank.rank].append(rank.lead / 1e3)
            speeds[rank.rank].append(log - logs[roles == role].mean(axis=0))
    factors = {number: np.exp(np.mean(speeds[number], axis=0)) for number in role_of}
    means = {
        role: np.mean([factors[number] for number in role_of if role_of[number] == role], axis=0)
        for role in set(role_of.values())
    }
    return [
        RankModel(learner.marginal(np.array(leads[number])), *map(rounded, (factors[number] / means[role]).tolist()))
        for number, role in role_of.items()
    ]


def _log_totals(ranks: Sequence[ObservedRank]) -> Floats:
    """Logarithms of the time of the host and of kernels, of every rank."""
    return _logs([(_host(rank), _gpu(rank)) for rank in ranks])


def _logs(totals: Any) -> Floats:
    """Logarithms of nanoseconds; a rank without kernels has none, which is as good as one."""
    return np.asarray(np.log(np.maximum(totals, 1.0)))


def _roles(jobs: Sequence[Job]) -> list[int]:
    """The role of every rank: those with about as many tasks, in the same passes, do the same work."""
    ranks: dict[int, list[ObservedRank]] = defaultdict(list)
    for rank in (rank for job in jobs for step in job.steps for rank in step.ranks):
        ranks[rank.rank].append(rank)
    found: list[float] = []
    roles = []
    for number in sorted(ranks):
        size = float(np.mean([len(rank.tasks) for rank in ranks[number]]))
        known = [i for i, other in enumerate(found) if abs(size / other - 1) < _SAME_ROLE]
        if not known:
            found.append(size)
        roles.append(known[0] if known else len(found) - 1)
    return roles


def _require_scipy() -> None:
    try:
        import scipy.stats  # noqa: F401
    except ImportError:
        raise OptionError("learning from traces needs scipy: pip install 'lumos-sim[fit]'") from None


def _require_one_kind(jobs: Sequence[Job]) -> None:
    """Refuse jobs that communicate differently: their mean would be a job that nobody ran."""
    forms: dict[tuple[Any, ...], str] = {}
    for job in jobs:
        forms.setdefault((tuple(job.steps[0].groups), _kinds_of_communication(job)), job.name)
    if len(forms) > 1:
        (one, other) = list(forms.items())[:2]
        raise InputError(
            f"{other[1]}: its communication ({_form_text(other[0])}) is not that of {one[1]} ({_form_text(one[0])}); "
            "learn from each in a model of its own"
        )


def _kinds_of_communication(job: Job) -> tuple[str, ...]:
    """Collectives, and which of them forward passes have too: by that, replicas differ from shards of a layer."""
    blocks = [block for step in job.steps for rank in step.ranks for block in rank.blocks]
    count: Counter[str] = Counter()
    forward: Counter[str] = Counter()
    for block in blocks:
        kinds = [task.state.kind for task in block.tasks if task.state.group >= 0]
        count.update(kinds)
        forward.update(kinds if block.phase == "forward" else ())
    often = {kind for kind in count if forward[kind] > _IN_FORWARD * count[kind]}
    return tuple(f"{kind} (also in forward passes)" if kind in often else kind for kind in sorted(count))


def _form_text(form: tuple[Any, ...]) -> str:
    groups, kinds = form
    sizes = ", ".join(f"{group.size} ranks" for group in groups)
    return f"{', '.join(kinds)} among {sizes}" if kinds else "none"


def _micro_batches(passes: tuple[str, ...]) -> tuple[list[str], int, list[str]]:
    """Passes as a repeated part, how often, and what follows: forward and backward of micro-batches, the optimizer."""
    body = [name for name in passes if name != "optimizer"]
    final = ["optimizer"] if "optimizer" in passes else []
    for length in range(1, len(body) + 1):
        if len(body) % length == 0 and body == body[:length] * (len(body) // length):
            return body[:length], len(body) // length, final
    return body, 1, final


def _spreads(jobs: Sequence[Job], role_of: Mapping[int, int]) -> Spread:
    """How much ranks differ within a step, in speed (logarithms) and start (microseconds), and steps within a job."""
    found: dict[str, list[float]] = defaultdict(list)
    for job in jobs:
        for step, role in product(job.steps, set(role_of.values())):
            some = [rank for rank in step.ranks if role_of[rank.rank] == role]
            if len(some) > 1:
                host, gpu = _log_totals(some).std(axis=0)
                found["host"].append(float(host))
                found["gpu"].append(float(gpu))
                found["start_us"].append(float(np.std([rank.begun for rank in some])) / 1e3)
        if len(job.steps) > 1:
            totals = [np.mean([(_host(rank), _gpu(rank)) for rank in step.ranks]) for step in job.steps]
            found["step"].append(float(_logs(totals).std()))
    keys = ("host", "gpu", "step", "start_us")
    host, gpu, of_steps, start_us = (rounded(float(np.mean(found[key]))) if found[key] else 0.0 for key in keys)
    return Spread(min(host, MOST_DEVIATION), min(gpu, MOST_DEVIATION), min(of_steps, MOST_DEVIATION), start_us)


def _host(rank: ObservedRank) -> float:
    return sum(task.work + task.call for task in rank.tasks)


def _gpu(rank: ObservedRank) -> float:
    return sum(task.busy for task in rank.tasks if task.state.group < 0)


class _Learner:
    """Statistics of blocks, pooled over jobs, steps, ranks and layers."""

    def __init__(
        self, jobs: Sequence[Job], generator: np.random.Generator, layers: int, role_of: Mapping[int, int], role: int
    ) -> None:
        self.generator = generator
        self.layers = layers  # that counts refer to
        self.blocks: dict[_KEYS, list[tuple[Block, int]]] = defaultdict(list)
        self.depths: dict[_KEYS, list[Floats]] = defaultdict(list)  # where each begins and ends among those of its step
        self.attentions: dict[str, list[int]] = defaultdict(list)
        self.passes: Counter[tuple[str, ...]] = Counter()
        self.starts: list[float] = []
        for job in jobs:
            ranks = (rank for step in job.steps for rank in step.ranks if role_of[rank.rank] == role)
            for rank in ranks:
                self.passes[rank.passes] += 1
                self.starts.append(rank.begun / 1e3)
                for block in rank.blocks:
                    self.blocks[block.phase, block.last, block.place].append((block, rank.layers))
                for key, count in Counter((block.phase, block.last, block.place) for block in rank.blocks).items():
                    self.depths[key] += list(np.stack([np.arange(count), np.arange(1, count + 1)], axis=1) / count)
                for turn in {block.turn for block in rank.blocks}:
                    inside = [block for block in rank.blocks if block.turn == turn]
                    more = job.layers - layers if len(inside) > 1 else 0
                    self.attentions[inside[0].phase].append(len(inside) - 1 - more)
        self.layer_share = self._share_of_layers()

    def role(self, scheduled: bool) -> RoleModel:
        """All blocks; `scheduled` where a schedule, and not the role, says in which order passes come."""
        repeated, count, final = _micro_batches(self.passes.most_common(1)[0][0])
        layers = {phase: int(np.median(self.attentions[phase])) for phase in PHASES if phase in self.attentions}
        blocks = [self._block(key) for key in sorted(self.blocks)]
        start = rounded(float(np.mean(self.starts)))
        return RoleModel([] if scheduled else repeated, 1 if scheduled else count, final, layers, start, blocks)

    def _share_of_layers(self) -> float:
        """The share of parameters that layers have, by the time of forward matmuls.

        What is not in layers is the head, and as much again is the embedding, which multiplies nothing.
        """
        middle, total = 0.0, 0.0
        for (phase, last, place), blocks in self.blocks.items():
            if phase != "forward" or not last:
                continue
            time = sum(t.busy for block, _ in blocks for t in block.tasks if t.state.kind == "matmul")
            total += time
            if place == "middle":
                middle += time * float(np.mean([layers / max(layers - 1, 1) for _, layers in blocks]))
        inside = min(middle, total)
        return inside / (2 * total - inside) if total > 0 and middle > 0 else 1.0

    def _block(self, key: _KEYS) -> BlockModel:
        phase, last, place = key
        found = self.blocks[key]
        values: dict[State, list[tuple[float, ...]]] = defaultdict(list)
        counts: dict[State, Floats] = defaultdict(lambda: np.zeros(len(found)))
        for number, (block, _) in enumerate(found):
            size = len(block.tasks)
            for at, t in enumerate(block.tasks):
                values[t.state].append(((at + 0.5) / size, *values_of(t), float(t.operators)))
                counts[t.state][number] += 1
        layers = np.array([count for _, count in found], float)
        spans = place == "first" and not any(k[:2] == key[:2] and k[2] != "first" for k in self.blocks)
        typical = float(np.mean([len(block.tasks) for block, _ in found]))
        depths = np.array(self.depths[key])
        states = [
            self._state(state, np.array(values[state]), counts[state], layers if spans else None, typical, depths)
            for state in sorted(values)
        ]
        return BlockModel(phase, last, place, states)

    def _state(
        self, state: State, values: Floats, counts: Floats, layers: Floats | None, size: float, depths: Floats
    ) -> StateModel:
        exact = state.stream > 0 or bool(state.waits)
        marginals = self.marginals(values, (_CRITICAL_PLACES if exact else _PLACES) / size)
        once = layers is None or state.kind in (SYNC, TAIL)  # whatever the depth
        per_layer = 0.0 if once or layers is None else self._per_layer(counts, layers)
        count = float(counts.mean()) + (0.0 if layers is None else per_layer * (self.layers - float(layers.mean())))
        depth = float(np.average(depths.mean(axis=1), weights=counts))
        square = float(np.average((depths**2).sum(axis=1) + depths.prod(axis=1), weights=counts)) / 3  # evenly in each
        return StateModel(
            kind=state.kind, stream=state.stream, group=state.group, waits=list(state.waits), pause=state.pause,
            count=rounded(max(count, 0.0), 6), per_layer=rounded(per_layer, 6),
            depth=rounded(depth), depth_spread=rounded(float(np.sqrt(max(square - depth**2, 0.0)))),
            operators=rounded(float(values[:, -1].mean()), 3), columns=marginals,
            correlation=_correlation(values[:, : len(COLUMNS)]),
        )  # fmt: skip

    def marginals(self, values: Floats, width: float) -> dict[str, Marginal]:
        """The distributions of all columns; places are smoothed by a width of their own."""
        return {name: self.marginal(values[:, i], width if name == "place" else None) for i, name in enumerate(COLUMNS)}

    def _per_layer(self, counts: Floats, layers: Floats) -> float:
        """How many tasks a layer adds: by jobs of different depth, or by the share of parameters that layers have."""
        if len(np.unique(layers)) > 1:
            slope = float(np.polyfit(layers, counts, 1)[0])
            return min(max(slope, 0.0), float((counts / np.maximum(layers, 1)).mean()))
        return float(counts.mean()) * self.layer_share / max(float(layers[0]), 1.0) if layers[0] > 0 else 0.0

    def marginal(self, column: Floats, width: float | None = None) -> Marginal:
        """A column smoothed in logarithms, or by a width of its own (places in a block, which are shares)."""
        positive = column[column > 0]
        if len(positive) == 0:
            return Marginal(1.0, 0.0, [])
        nodes = np.array([NormalDist().inv_cdf((i + 0.5) / 9) for i in range(9)])
        logs = np.log(positive)
        if width is None:
            silverman = 0.9 * min(float(logs.std()), 0.2) * len(logs) ** -0.2
            smooth = np.exp(logs[:, None] + max(_LEAST_WIDTH, silverman) * nodes)
        else:
            smooth = np.clip(positive[:, None] + width * nodes, 1e-6, 1.0)
        quantiles = [rounded(float(q)) for q in np.quantile(smooth, LEVELS)]
        blur = float(np.exp(_BLUR * self.generator.standard_normal() / np.sqrt(len(positive))))
        mean = float(column.mean()) * (1.0 if width is not None else blur)
        return Marginal(rounded(1.0 - len(positive) / len(column), 6), rounded(mean, 4), quantiles)


def _correlation(values: Floats) -> list[list[float]]:
    """Correlations of normal scores, from Spearman's, made positive definite."""
    from scipy.stats import spearmanr

    size = values.shape[1]
    found = np.eye(size)
    varies = np.flatnonzero(np.ptp(values, axis=0) > 0)
    if len(values) >= _CASES and len(varies) > 1:
        rank = np.atleast_2d(spearmanr(values[:, varies]).statistic)
        if rank.shape == (1, 1):  # of two columns scipy returns a number
            rank = np.array([[1.0, rank[0, 0]], [rank[0, 0], 1.0]])
        found[np.ix_(varies, varies)] = 2 * np.sin(np.pi / 6 * rank)
    low, vectors = np.linalg.eigh(found)
    found = (vectors * np.maximum(low, 1e-3)) @ vectors.T
    scale = np.sqrt(np.diag(found))
    found = found / scale[:, None] / scale
    return [[min(1.0, max(-1.0, round(float(value), 2))) for value in row] for row in found]


def values_of(task: Task) -> tuple[float, ...]:
    """The columns of a task but its place: microseconds and bytes."""
    return task.work / 1e3, task.call / 1e3, task.delay / 1e3, task.busy / 1e3, max(task.bytes, 0.0)


def rounded(value: float, digits: int = 3) -> float:
    """A number with so many significant digits."""
    return float(f"{value:.{digits}g}")
