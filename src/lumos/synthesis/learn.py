"""From observed steps to a model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from lumos.errors import InputError, OptionError
from lumos.graph.graph import Floats
from lumos.synthesis.model import (
    COLUMNS,
    LEVELS,
    PHASES,
    VERSION,
    BlockModel,
    Marginal,
    Model,
    RoleModel,
    Spread,
    StateModel,
)
from lumos.synthesis.observe import Block, Observed, ObservedRank, State
from lumos.synthesis.vocabulary import COLLECTIVE_KINDS, MESSAGE_KINDS

_LEAST_WIDTH = 0.03  # of the smoothing, in logarithms: no value of a model is nearer to a recorded one by design
_BLUR = 0.02  # of a mean that rests on a single value, in logarithms
_PLACES, _CRITICAL_PLACES = 0.2, 0.05  # smoothing of places, in tasks; what streams wait for keeps its order
_CASES = 8  # fewer tell nothing about what goes together
_KEYS = tuple[str, bool, str]


class Job(NamedTuple):
    """The steps of one job that were observed."""

    name: str
    steps: list[Observed]

    @property
    def layers(self) -> int:
        return max((rank.layers for step in self.steps for rank in step.ranks), default=0)


def learn(jobs: Sequence[Job], seed: int = 0) -> Model:
    """The statistics of some jobs of one kind, which may differ in size and layers."""
    _require_scipy()
    steps = [step for job in jobs for step in job.steps]
    if not any(rank.tasks for step in steps for rank in step.ranks):
        raise InputError("the traces have no tasks to learn from; record CPU and CUDA activities together")
    _require_one_kind(jobs)
    first = jobs[0].steps[0]
    learner = _Learner(jobs, np.random.default_rng(seed))
    ranks = [rank for step in steps for rank in step.ranks]
    layers = Counter(rank.layers for rank in ranks).most_common(1)[0][0]
    repeated, count, final = _micro_batches(Counter(rank.passes for rank in ranks).most_common(1)[0][0])
    return Model(
        version=VERSION,
        learned_from={"jobs": len(jobs), "steps": len(steps), "tasks": sum(len(rank.tasks) for rank in ranks)},
        ranks=max(len(step.ranks) for step in steps),
        world=max(step.world for step in steps),
        steps=max(len(job.steps) for job in jobs),
        micro_batches=count,
        layers=layers,
        streams=max(step.streams for step in steps),
        groups=[(group.size, group.stride) for group in first.groups],
        latency_us=_rounded(float(np.median([rank.latency for rank in ranks])) / 1e3),
        shapes=any(step.shapes for step in steps),
        spread=_spreads(jobs),
        roles=[learner.role(repeated, final)],
    )


def _require_scipy() -> None:
    try:
        import scipy.stats  # noqa: F401
    except ImportError:
        raise OptionError("learning from traces needs scipy: pip install 'lumos-sim[fit]'") from None


def _require_one_kind(jobs: Sequence[Job]) -> None:
    """Refuse jobs that communicate differently: their mean would be a job that nobody ran."""
    forms: dict[tuple[Any, ...], str] = {}
    for job in jobs:
        kinds: set[str] = set()
        for step in job.steps:
            kinds |= {task.state.kind for rank in step.ranks for task in rank.tasks if task.state.group >= 0}
            messages = kinds & set(MESSAGE_KINDS)
            if messages:
                raise InputError(
                    f"{job.name}: it sends messages between pipeline stages, which synthetic runs do not have; "
                    "use lumos convert --anonymise for it"
                )
        forms.setdefault((tuple(job.steps[0].groups), tuple(sorted(kinds & set(COLLECTIVE_KINDS)))), job.name)
    if len(forms) > 1:
        (one, other) = list(forms.items())[:2]
        raise InputError(
            f"{other[1]}: its communication ({_form_text(other[0])}) is not that of {one[1]} ({_form_text(one[0])}); "
            "learn from each in a model of its own"
        )


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


def _spreads(jobs: Sequence[Job]) -> Spread:
    """How much ranks differ within a step, in speed (logarithms) and start (microseconds), and steps within a job."""
    found: dict[str, list[float]] = defaultdict(list)
    for job in jobs:
        totals = [[(_host(rank), _gpu(rank)) for rank in step.ranks] for step in job.steps]
        for step in totals:
            if len(step) > 1:
                logs = np.log(np.maximum(step, 1.0))
                found["host"].append(float(logs[:, 0].std()))
                found["gpu"].append(float(logs[:, 1].std()))
        found["start_us"] += [float(np.std([r.begun for r in step.ranks])) / 1e3 for step in job.steps]
        if len(totals) > 1:
            found["step"].append(float(np.log([np.mean(step) for step in totals]).std()))
    keys = ("host", "gpu", "step", "start_us")
    return Spread(*(_rounded(float(np.mean(found[key]))) if found[key] else 0.0 for key in keys))


def _host(rank: ObservedRank) -> float:
    return sum(task.work + task.call for task in rank.tasks)


def _gpu(rank: ObservedRank) -> float:
    return sum(task.busy for task in rank.tasks if task.state.group < 0)


class _Learner:
    """Statistics of blocks, pooled over jobs, steps, ranks and layers."""

    def __init__(self, jobs: Sequence[Job], generator: np.random.Generator) -> None:
        self.generator = generator
        self.blocks: dict[_KEYS, list[tuple[Block, int]]] = defaultdict(list)
        self.attentions: dict[str, list[int]] = defaultdict(list)
        for job in jobs:
            for rank in (rank for step in job.steps for rank in step.ranks):
                for block in rank.blocks:
                    self.blocks[block.phase, block.last, block.place].append((block, rank.layers))
                passes = Counter(rank.passes)
                for phase in set(rank.passes):
                    inside = sum(block.phase == phase and block.place != "first" for block in rank.blocks)
                    self.attentions[phase].append(round(inside / passes[phase]))
        self.layer_share = self._share_of_layers()

    def role(self, repeated: list[str], final: list[str]) -> RoleModel:
        layers = {phase: int(np.median(self.attentions[phase])) for phase in PHASES if phase in self.attentions}
        blocks = [self._block(key) for key in sorted(self.blocks)]
        return RoleModel(repeated, final, layers, blocks)

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
                row = ((at + 0.5) / size, t.work / 1e3, t.call / 1e3, t.delay / 1e3, t.busy / 1e3, max(t.bytes, 0.0))
                values[t.state].append((*row, float(t.operators)))
                counts[t.state][number] += 1
        layers = np.array([count for _, count in found], float)
        spans = place == "first" and not any(k[:2] == key[:2] and k[2] != "first" for k in self.blocks)
        typical = float(np.mean([len(block.tasks) for block, _ in found]))
        states = [
            self._state(state, np.array(values[state]), counts[state], layers if spans else None, typical)
            for state in sorted(values)
        ]
        return BlockModel(phase, last, place, states)

    def _state(self, state: State, values: Floats, counts: Floats, layers: Floats | None, size: float) -> StateModel:
        exact = state.stream > 0 or bool(state.waits)
        widths = {"place": (_CRITICAL_PLACES if exact else _PLACES) / size}
        marginals = {name: self._marginal(values[:, i], widths.get(name)) for i, name in enumerate(COLUMNS)}
        per_layer = 0.0 if layers is None else self._per_layer(counts, layers)
        return StateModel(
            kind=state.kind, stream=state.stream, group=state.group, waits=list(state.waits),
            count=_rounded(float(counts.mean()), 6), per_layer=_rounded(per_layer, 6),
            operators=_rounded(float(values[:, -1].mean()), 3), columns=marginals,
            correlation=_correlation(values[:, : len(COLUMNS)]),
        )  # fmt: skip

    def _per_layer(self, counts: Floats, layers: Floats) -> float:
        """How many tasks a layer adds: by jobs of different depth, or by the share of parameters that layers have."""
        if len(np.unique(layers)) > 1:
            slope = float(np.polyfit(layers, counts, 1)[0])
            return min(max(slope, 0.0), float((counts / np.maximum(layers, 1)).mean()))
        return float(counts.mean()) * self.layer_share / max(float(layers[0]), 1.0) if layers[0] > 0 else 0.0

    def _marginal(self, column: Floats, width: float | None = None) -> Marginal:
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
        quantiles = [_rounded(float(q)) for q in np.quantile(smooth, LEVELS)]
        blur = float(np.exp(_BLUR * self.generator.standard_normal() / np.sqrt(len(positive))))
        mean = float(column.mean()) * (1.0 if width is not None else blur)
        return Marginal(_rounded(1.0 - len(positive) / len(column), 6), _rounded(mean, 4), quantiles)


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


def _rounded(value: float, digits: int = 3) -> float:
    """A number with so many significant digits."""
    return float(f"{value:.{digits}g}")
