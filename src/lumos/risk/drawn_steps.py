"""Drawn steps: thousands of steps of one run whose times are drawn.

What is drawn for every rank and step is drawn for all of them. Where ranks meet in every pass, the slowest of each pass
is drawn from its own distribution (order statistics), not rank by rank.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lumos.graph.graph import Floats, simulate
from lumos.risk.lanes import Lanes
from lumos.risk.variability import PROBABILITIES, SCORES, Spread, Variability
from lumos.setup.slow import Slow

DRAWS = 10_000
_CHUNK = 200  # scenarios whose scalars are drawn together, at most
_MOST_DRAWN, _MOST_HELD = 4_000_000, 4_000_000  # numbers in memory at once: of ranks in a chunk, of nodes in a block
_WIDTH = 32  # columns that are simulated together, at least
_ENTRIES = 4096  # of a table of factors to draw from: 12 bits
_SHARES = 1024
_FIRST_CHOICE = 3  # times as many lanes as are simulated: chosen by their slowest ranks alone
_RATIO = 1.3  # between the numbers of ranks that have tables
_POINTS = 32
_GPU, _STEP, _JOB, _SHARE, _PAUSES, _MICRO, _SEEDS, _HOST, _SHARED, _MEANS = range(10)  # draws with own random numbers

# The nodes and edges of a run as tables, which the compiled loops read row by row.
_TASK = np.dtype(
    [
        ("is_first", "?"),  # of a lane of the graph
        ("gap", "f8"),
        ("length", "f8"),
        ("stage", "i8"),
        ("gpu", "f8"),  # share of its time; that of none of the three: a collective
        ("host", "f8"),
        ("within", "f8"),  # communication inside it
        ("fresh", "?"),  # it begins a pass: what is drawn for a pass holds for all its parts
        ("meets", "i8"),  # who meets in it, 1: nobody, 2: all lanes, 3: `near` neighbouring ones
        ("micro", "i8"),  # its micro-batch, or -1
    ],
    align=True,
)
_EDGE = np.dtype([("source", "i8"), ("lag", "f8"), ("from_start", "?"), ("is_message", "?")], align=True)


def drawn_ms(
    lanes: Lanes,
    variability: Variability,
    slow: tuple[Slow, ...] = (),
    draws: int = DRAWS,
    seed: int = 0,
    same: int = 1,
) -> Floats:
    """The lengths of so many steps. GPUs stay the same for `same` of them in a row."""
    engine = _Engine(lanes, variability, slow, seed, same)
    chunk = max(1, min(_CHUNK, _MOST_DRAWN // lanes.gpus) // same) * same
    sizes = [min(chunk, draws - first) for first in range(0, draws, chunk)]
    workers = min(len(sizes), os.cpu_count() or 1)
    if workers < 2:
        return np.concatenate([engine.chunk(*one) for one in enumerate(sizes)])
    with ThreadPoolExecutor(workers) as pool:
        return np.concatenate(list(pool.map(engine.chunk, range(len(sizes)), sizes)))


def typical_ms(lanes: Lanes, slow: tuple[Slow, ...] = ()) -> float:
    """The step in which nothing differs but what is slow; a share of slow GPUs is spread evenly over the ranks."""
    engine = _Engine(lanes, Variability(), slow, 0, 1, spread=True)
    return float(engine.chunk(0, 1)[0])


class _Tables:
    """Factors of single passes, collectives and hosts as tables that a random number points into."""

    def __init__(self, lanes: Lanes, variability: Variability) -> None:
        u = (np.arange(_ENTRIES) + 0.5) / _ENTRIES
        self.folded = lanes.merged > 1 and not variability.microbatch.is_none and lanes.micro.max(initial=-1) >= 0
        self.count = lanes.merged if self.folded else lanes.ranks
        logs = _of_replicas(variability, lanes.inside) if self.folded else variability.kernel.logs
        counts = _counts(self.count)
        passes = [np.exp(np.interp(u ** (1 / n), PROBABILITIES, logs)) for n in counts]
        collective = variability.collective.slowest_of(lanes.inside, u)
        host = variability.host.slowest_of(lanes.ranks // lanes.gathered, u)
        chosen = lanes.gathered > 1 or lanes.simulated < lanes.lanes  # hosts are drawn by their mean, not by pass
        self.host = _Mean.of(host, lanes.weights(1, 0)) if chosen else None
        same = np.ones(_ENTRIES)
        self.rows = np.array([*passes, same, collective, host if self.host is None else same])
        self.most = len(counts) - 1
        self.mean = self.rows.mean(axis=1)
        self.cv = self.rows.std(axis=1) / self.mean
        self.low, self.high = float(logs[0]), float(logs[-1])
        at = np.linspace(self.low, self.high, _SHARES)
        self.log_share = np.log(np.maximum(np.interp(at, logs, PROBABILITIES), 1e-300))
        bottom, top = np.interp([-4.0, 5.0], SCORES, logs)
        self.points = np.linspace(bottom, top, _POINTS)
        self.inner = float(np.mean(variability.collective.at(u)))

    def paces(self, logs: Floats) -> tuple[Floats, NDArray[np.int32]]:
        """Of groups of ranks with these factors, (groups, ranks): factor and row."""
        from lumos.risk.drawn_loops import slowest_paces

        found: tuple[Floats, NDArray[np.int32]] = slowest_paces(
            logs, self.most, self.log_share, self.low, self.high, self.points, self.mean, self.cv
        )
        return found


@dataclass(frozen=True)
class _Mean:
    """A weighted mean of independent factors, about lognormal: exactly so for one, and for many."""

    mean: float
    sigma: float

    @classmethod
    def of(cls, factors: Floats, weights: Floats) -> _Mean:
        """Of factors as a table has them."""
        mean, total = float(factors.mean()), float(weights.sum())
        share = float((weights**2).sum()) / total**2 if total else 1.0
        sigma = float(np.sqrt(np.log1p(share * (factors.std() / mean) ** 2)))
        return cls(mean, sigma)

    def at(self, scores: Floats) -> Floats:
        """Drawn from normal numbers."""
        return np.asarray(self.mean * np.exp(self.sigma * scores - self.sigma**2 / 2))

    def slowest_of(self, count: int, u: Floats) -> Floats:
        return self.at(np.interp(u ** (1 / count), PROBABILITIES, SCORES))


def _counts(most: int) -> list[float]:
    """Numbers of ranks that have tables: 1, and so on to the most."""
    found = [1.0]
    while found[-1] * _RATIO < most:
        found.append(found[-1] * _RATIO)
    return [*found, float(most)] if most > 1 else found


def _of_replicas(variability: Variability, inside: int) -> Floats:
    """Of a replica: the slowest of its ranks in a pass, times the work of the micro-batch; logarithms of quantiles."""
    u = (np.arange(_SHARES) + 0.5) / _SHARES
    kernel = np.log(variability.kernel.slowest_of(inside, u))
    work = np.log(variability.microbatch.at(u))
    return np.asarray(np.quantile((kernel[:, None] + work[None, :]).ravel(), PROBABILITIES))


class _Engine:
    """Draws and simulates steps, chunk by chunk; a chunk has its own random numbers, whoever works on it."""

    def __init__(
        self, lanes: Lanes, variability: Variability, slow: tuple[Slow, ...], seed: int, same: int, spread: bool = False
    ) -> None:
        self.lanes, self.variability, self.slow, self.seed, self.same = lanes, variability, slow, seed, same
        self.tables = _Tables(lanes, variability)
        self.graph = lanes.slow_graph(slow)
        self.rank_logs = lanes.rank_logs(slow, spread)
        self.apart = lanes.apart(slow)
        self.share = next((one for one in slow if one.share and not spread), None)
        order = self.graph.order  # worked out here, before threads share it
        edges = self.graph.edges
        gpu, host, within = lanes.parts.T
        tasks = _table(
            _TASK, is_first=self.graph.is_first, gap=self.graph.gap + self.graph.frozen, length=self.graph.duration,
            stage=lanes.place, gpu=gpu, host=host, within=within, fresh=lanes.fresh, meets=lanes.meets,
            micro=lanes.micro,
        )  # fmt: skip
        waits = _table(
            _EDGE, source=edges.source, lag=edges.lag + edges.frozen, from_start=edges.from_start, is_message=lanes.link
        )
        self.fixed = order, tasks, self.graph.incoming, waits
        works = lanes.parts[:, 0] > 0
        self.microbatches = int(lanes.micro.max(initial=-1)) + 1
        weights = [lanes.weights(0, stage) for stage in range(lanes.stages)]
        self.busy = np.array([one.sum() for one in weights])
        self.shares = np.array([(one**2).sum() / max(one.sum(), 1e-9) ** 2 for one in weights])
        self.issued = np.array([lanes.weights(1, stage).sum() for stage in range(lanes.stages)])  # by hosts
        self.idle = max(0.0, simulate(self.graph).span - self.busy.max())
        u = (np.arange(_ENTRIES) + 0.5) / _ENTRIES
        self.loads = _Mean.of(variability.microbatch.at(u), np.ones(max(1, self.microbatches)))
        self.passes = [np.flatnonzero(works & (lanes.place == stage)) for stage in range(lanes.stages)]

    def chunk(self, number: int, size: int) -> Floats:
        """Lengths of the steps of one chunk, in milliseconds."""
        drawn = self._scalars(number, size)
        simulated = self.lanes.simulated
        if simulated < self.lanes.lanes:
            drawn = self._likely_last(number, drawn)
        else:
            self._set_paces(drawn)
        drawn.work = self._work(number, drawn)
        block = max(1, min(_WIDTH // simulated, _MOST_HELD // (simulated * len(self.graph))))
        blocks = (slice(first, first + block) for first in range(0, size, block))
        lengths = np.concatenate([self._simulated(drawn, at) for at in blocks])
        job = self.variability.job.at(self._random(number, _JOB).random(size))
        return np.asarray((lengths / 1e3 / 1e3 + self.lanes.fixed_ms) * job)

    def _scalars(self, number: int, size: int) -> _Drawn:
        """What is drawn once a step for every lane and stage."""
        pause, paused = self._pauses(number, size)
        states = self._random(number, _SEEDS).integers(0, 1 << 63, (size, self.lanes.lanes, 2), np.uint64)
        shared = self._random(number, _SHARED).integers(0, 1 << 63, size, np.uint64)
        apart = np.broadcast_to(self.apart, (size, *self.apart.shape))
        return _Drawn(self._logs(number, size), pause, paused, self._hosted(number, size), apart, states, shared)

    def _likely_last(self, number: int, drawn: _Drawn) -> _Drawn:
        """The lanes alone that are likely to be the last, by all that is known before their passes are drawn.

        What the passes of a lane differ by on average is drawn first, for all lanes; single passes of those that are
        kept are drawn later, and moved to this average.
        """
        random, shape = self._random(number, _MEANS), drawn.logs.shape[:3]
        drawn.scores, drawn.load = random.standard_normal(shape), np.ones(shape[:2])
        if self.tables.folded:  # micro-batches differ, and a micro-batch is the same on all stages
            drawn.scores = np.repeat(drawn.scores[..., :1], shape[2], axis=2)
        elif not self.variability.microbatch.is_none:
            drawn.load = self.loads.at(random.standard_normal(shape[:2]))
        few, some = self.lanes.simulated, _FIRST_CHOICE * self.lanes.simulated
        if some < shape[1]:  # by their slowest ranks, for a start
            drawn.pace, drawn.row = np.exp(drawn.logs.max(axis=-1)), np.zeros(shape, np.int32)
            drawn = drawn.kept(self._last(drawn, some))
        self._set_paces(drawn)
        drawn.mean = self._means(drawn)
        return drawn.kept(self._last(drawn, few))

    def _means(self, drawn: _Drawn) -> Floats:
        """What the passes of every lane and stage differ by on average."""
        shares = 1 / max(1, self.microbatches) if self.tables.folded else self.shares
        sigma = np.sqrt(np.log1p(shares * self.tables.cv[drawn.row] ** 2))
        return np.asarray(np.exp(sigma * drawn.scores - sigma**2 / 2))

    def _last(self, drawn: _Drawn, few: int) -> NDArray[np.int64]:
        """The lanes of every scenario that are likely to be last."""
        slow = self.busy * drawn.pace * self.tables.mean[drawn.row] * self._means(drawn)
        idle = self.idle * (slow / np.maximum(self.busy, 1.0)).mean(axis=-1)
        issued = (self.issued * drawn.hosted).max(axis=-1)
        score = np.maximum((slow.max(axis=-1) + idle) * drawn.load, issued) + drawn.pause.sum(axis=-1)
        score = np.where((drawn.apart != 1).any(axis=(-3, -1)), np.inf, score)
        return np.argpartition(-score, few - 1, axis=1)[:, :few]

    def _random(self, number: int, kind: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, number, kind])

    def _logs(self, number: int, size: int) -> Floats:
        """(scenarios, lanes, stages, ranks): logarithms of the factors of ranks, or of replicas that meet in passes."""
        lanes, shape, v = self.lanes, self.rank_logs.shape, self.variability
        logs = np.repeat(self.rank_logs.reshape(1, -1), size, axis=0)
        self._add(logs, number, _GPU, v.gpu, self.same)
        self._add(logs, number, _STEP, v.step, 1)
        if self.share is not None:
            hit = self._random(number, _SHARE).random((-(-size // self.same), logs.shape[1])) < self.share.share
            logs += np.repeat(hit, self.same, axis=0)[:size] * np.log(self.share.factor)
        if not self.tables.folded:
            return logs.reshape(size, *shape)
        return np.asarray(logs.reshape(size, *shape[:2], lanes.merged, lanes.inside).max(axis=-1))

    def _add(self, logs: Floats, number: int, kind: int, spread: Spread, times: int) -> None:
        """What is drawn for every rank, once for so many steps."""
        from lumos.risk.drawn_loops import add_drawn

        if not spread.is_none:
            rows = -(-len(logs) // times)
            scores = self._random(number, kind).standard_normal((rows, logs.shape[1]), np.float32)
            add_drawn(logs, scores, spread.logs, SCORES[-1], times)

    def _set_paces(self, drawn: _Drawn) -> None:
        """How slow the ranks of every lane and stage are together, and the row of the table for their passes."""
        shape = drawn.logs.shape
        pace, row = self.tables.paces(np.ascontiguousarray(drawn.logs.reshape(-1, shape[-1])))
        drawn.pace, drawn.row = pace.reshape(shape[:3]), row.reshape(shape[:3])

    def _pauses(self, number: int, size: int) -> tuple[Floats, NDArray[np.int64]]:
        """(scenarios, lanes, stages): how long the ranks of each pause, in nanoseconds, and before which node."""
        shape = (size, *self.rank_logs.shape[:2])
        pauses, nanoseconds = self.variability.pauses, np.zeros(shape)
        if pauses.is_none:
            return nanoseconds, np.full(shape, -1, np.int64)
        random = self._random(number, _PAUSES)
        count = random.binomial(self.lanes.ranks, min(1.0, pauses.probability), shape)
        places = random.random(shape)
        for index in range(int(count.max(initial=0))):
            nanoseconds += (count > index) * pauses.spread.at(random.random(shape)) * pauses.ms * 1e6
        nodes = [nodes[(places[..., stage] * len(nodes)).astype(int)] for stage, nodes in enumerate(self.passes)]
        return nanoseconds, np.stack(nodes, axis=-1)

    def _work(self, number: int, drawn: _Drawn) -> Floats:
        """(scenarios, lanes, micro-batches): how much work each micro-batch is; nothing where all are alike."""
        size, lanes = drawn.pace.shape[:2]
        if self.variability.microbatch.is_none or not self.microbatches:
            return np.ones((size, lanes, 0))
        if self.tables.folded:
            return self._folded(number, drawn)
        work = self.variability.microbatch.at(self._random(number, _MICRO).random((size, lanes, self.microbatches)))
        if drawn.load.size:
            work = work * (drawn.load / work.mean(axis=-1))[..., None]
        return work

    def _folded(self, number: int, drawn: _Drawn) -> Floats:
        """The same where replicas meet in every pass: the slowest decides, by its ranks and by its work together."""
        size, lanes = drawn.pace.shape[:2]
        row = drawn.row.max(axis=-1)[..., None]
        index = self._random(number, _MICRO).integers(0, _ENTRIES, (size, lanes, self.microbatches))
        work: Floats = self.tables.rows[row, index]
        if drawn.mean is not None:
            work = work * self.tables.mean[row] * drawn.mean[..., :1] / work.mean(axis=-1, keepdims=True)
        drawn.row = np.full_like(drawn.row, len(self.tables.rows) - 3)  # nothing is left to draw for single passes
        drawn.mean = None
        return work

    def _hosted(self, number: int, size: int) -> Floats:
        """(scenarios, lanes, stages): how slow the slowest of the hosts is that run ahead of each other in a lane."""
        shape = (size, *self.rank_logs.shape[:2])
        if self.tables.host is None:
            return np.ones(shape)
        u = self._random(number, _HOST).random(shape)
        return self.tables.host.slowest_of(self.lanes.gathered, u)

    def _simulated(self, drawn: _Drawn, at: slice) -> Floats:
        """Lengths of a few scenarios at once, whose lanes are columns."""
        from lumos.risk.drawn_loops import drawn_spans, pass_sums

        tables, states = self.tables, drawn.states[at]
        pace, row = _columns(drawn.pace[at]), _columns(drawn.row[at])
        inside, before, following = (_columns(drawn.apart[at, part]) for part in range(3))
        passes, messages = states[..., 0].ravel(), states[..., 1].ravel()
        if drawn.mean is not None:
            sums = pass_sums(*self.fixed[:2], row, tables.rows, passes)
            pace = pace * tables.mean[row] * _columns(drawn.mean[at]) / sums
        factors = np.stack([pace, _columns(drawn.hosted[at]), inside, before, following, _columns(drawn.pause[at])])
        chosen = np.stack([row, _columns(drawn.paused[at])])
        found: Floats = drawn_spans(
            *self.fixed, factors, chosen, _columns(drawn.work[at]), tables.rows, tables.inner, passes, messages,
            drawn.shared[at].copy(), self.lanes.simulated, self.lanes.near,
        )  # fmt: skip
        return found


def _table(kind: np.dtype[Any], **columns: NDArray[Any]) -> NDArray[Any]:
    """Columns as a table with a field for each."""
    table = np.empty(next(iter(columns.values())).shape, kind)
    for name, values in columns.items():
        table[name] = values
    return table


def _nothing() -> NDArray[Any]:
    return np.zeros(0)


@dataclass
class _Drawn:
    """What was drawn for the steps of a chunk: (scenarios, lanes, stages), or as noted."""

    logs: Floats  # (scenarios, lanes, stages, ranks): of the factors of ranks
    pause: Floats
    paused: NDArray[np.int64]
    hosted: Floats
    apart: Floats  # (scenarios, 3, lanes, stages)
    states: NDArray[np.uint64]  # (scenarios, lanes, 2)
    shared: NDArray[np.uint64]  # (scenarios,)
    pace: Floats = field(default_factory=_nothing)
    row: NDArray[np.int32] = field(default_factory=_nothing)
    scores: Floats = field(default_factory=_nothing)  # that the means of passes are drawn from
    load: Floats = field(default_factory=_nothing)  # (scenarios, lanes): mean work of the micro-batches
    mean: Floats | None = None  # of the passes; None: as they are drawn
    work: Floats = field(default_factory=_nothing)  # (scenarios, lanes, micro-batches)

    def kept(self, lanes: NDArray[np.int64]) -> _Drawn:
        """Some of the lanes of every scenario."""
        found: dict[str, Any] = {"apart": np.take_along_axis(self.apart, lanes[:, None, :, None], axis=2)}
        for name in ("logs", "pause", "paused", "hosted", "states", "pace", "row", "scores", "load", "mean"):
            values = getattr(self, name)
            if values is not None and values.size:
                index = lanes.reshape(*lanes.shape, *(1,) * (values.ndim - 2))
                found[name] = np.take_along_axis(values, index, axis=1)
        return replace(self, **found)


def _columns(values: NDArray[Any]) -> NDArray[Any]:
    """(scenarios, lanes, stages) as (stages, columns)."""
    scenarios, lanes, stages = values.shape
    return np.ascontiguousarray(values.reshape(scenarios * lanes, stages).T)
