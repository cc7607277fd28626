"""Monte Carlo over a step: thousands of steps whose times are drawn, and what they say of the risk.

What is drawn for every rank and step is drawn for all of them. Where ranks meet in every pass, the slowest of each pass
is drawn from its own distribution (order statistics), not rank by rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lumos.graph.graph import Floats
from lumos.risk.lanes import Lanes
from lumos.risk.slow import Slow
from lumos.risk.variability import PROBABILITIES, SCORES, Spread, Variability

DRAWS = 10_000
_CHUNK = 200  # scenarios whose scalars are drawn together
_WIDTH = 32  # columns that are simulated together, at least
_ENTRIES = 4096  # of a table of factors to draw from: 12 bits
_SHARES = 1024
_RATIO = 1.3  # between the numbers of ranks that have tables
_POINTS = 32
_GPU, _STEP, _JOB, _SHARE, _PAUSES, _MICRO, _SEEDS = range(7)  # kinds of draws, each of its own random numbers


def drawn_ms(
    lanes: Lanes, variability: Variability, slow: tuple[Slow, ...] = (), draws: int = DRAWS, seed: int = 0, same: int = 1
) -> Floats:
    """The lengths of so many steps. GPUs stay the same for `same` of them in a row."""
    engine = _Engine(lanes, variability, slow, seed, same)
    sizes = [min(_CHUNK, draws - first) for first in range(0, draws, _CHUNK)]
    workers = min(len(sizes), os.cpu_count() or 1)
    if workers < 2:
        return np.concatenate([engine.chunk(*one) for one in enumerate(sizes)])
    with ThreadPoolExecutor(workers) as pool:
        return np.concatenate(list(pool.map(engine.chunk, range(len(sizes)), sizes)))


class _Tables:
    """Factors of single passes, collectives and hosts as tables that a random number points into."""

    def __init__(self, lanes: Lanes, variability: Variability) -> None:
        u = (np.arange(_ENTRIES) + 0.5) / _ENTRIES
        self.folded = lanes.merged > 1 and not variability.microbatch.is_none
        self.count = lanes.merged if self.folded else lanes.ranks
        logs = _of_replicas(variability, lanes.inside) if self.folded else variability.kernel.logs
        counts = _counts(self.count)
        passes = [np.exp(np.interp(u ** (1 / n), PROBABILITIES, logs)) for n in counts]
        rows = [*passes, variability.collective.slowest_of(lanes.inside, u), variability.host.slowest_of(lanes.ranks, u)]
        self.rows = np.array(rows)
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
    return np.quantile((kernel[:, None] + work[None, :]).ravel(), PROBABILITIES)


class _Engine:
    """Draws and simulates steps, chunk by chunk; a chunk has its own random numbers, whoever works on it."""

    def __init__(self, lanes: Lanes, variability: Variability, slow: tuple[Slow, ...], seed: int, same: int) -> None:
        self.lanes, self.variability, self.slow, self.seed, self.same = lanes, variability, slow, seed, same
        self.tables = _Tables(lanes, variability)
        self.graph = lanes.slow_graph(slow)
        self.rank_logs = lanes.rank_logs(slow, spread=False)
        self.apart = lanes.apart(slow)
        self.share = next((one for one in slow if one.share), None)
        order = self.graph.order  # worked out here, before threads share it
        edges = self.graph.edges
        self.fixed = (
            order, self.graph.is_first, self.graph.duration, self.graph.gap + self.graph.frozen, self.graph.incoming,
            edges.source, edges.lag + edges.frozen, edges.from_start, lanes.place, lanes.parts, lanes.meets, lanes.link,
            lanes.micro,
        )  # fmt: skip
        works = lanes.parts[:, 0] > 0
        self.passes = [np.flatnonzero(works & (lanes.place == stage)) for stage in range(lanes.stages)]

    def chunk(self, number: int, size: int) -> Floats:
        """Lengths of the steps of one chunk, in milliseconds."""
        paces, rows = self._paces(number, size)
        pauses, paused = self._pauses(number, size)
        work = self._work(number, size)
        states = self._random(number, _SEEDS).integers(0, 1 << 63, (size, self.lanes.lanes + 1), np.uint64)
        block = max(1, _WIDTH // self.lanes.lanes)
        lengths = [
            self._simulated(paces[at], rows[at], pauses[at], paused[at], work[at], states[at])
            for at in (slice(first, first + block) for first in range(0, size, block))
        ]
        job = self.variability.job.at(self._random(number, _JOB).random(size))
        return np.asarray((np.concatenate(lengths) / 1e6 + self.lanes.fixed_ms) * job)

    def _random(self, number: int, kind: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, number, kind])

    def _paces(self, number: int, size: int) -> tuple[Floats, NDArray[np.int32]]:
        """(scenarios, lanes, stages): how slow the ranks of each are, and the row of the table for their passes."""
        lanes, shape = self.lanes, self.rank_logs.shape
        fleets = -(-size // self.same)
        logs = np.repeat(self._drawn(number, _GPU, self.variability.gpu, fleets), self.same, axis=0)[:size]
        logs = logs + self._drawn(number, _STEP, self.variability.step, size) + self.rank_logs
        if self.share is not None:
            hit = self._random(number, _SHARE).random((fleets, *shape)) < self.share.share
            logs = logs + np.repeat(hit, self.same, axis=0)[:size] * np.log(self.share.factor)
        if self.tables.folded:
            logs = logs.reshape(*logs.shape[:-1], lanes.merged, lanes.inside).max(axis=-1)
        flat = np.ascontiguousarray(logs.reshape(-1, logs.shape[-1]))
        pace, row = self.tables.paces(flat)
        return pace.reshape(size, *shape[:2]), row.reshape(size, *shape[:2])

    def _drawn(self, number: int, kind: int, spread: Spread, size: int) -> Floats:
        """Logarithms of the factors of all ranks."""
        if spread.is_none:
            return np.zeros((size, 1, 1, 1))
        scores = self._random(number, kind).standard_normal((size, *self.rank_logs.shape))
        return spread.logs_at_scores(scores)

    def _pauses(self, number: int, size: int) -> tuple[Floats, NDArray[np.int64]]:
        """(scenarios, lanes, stages): how long the ranks of each pause in the step, in nanoseconds, and before which node."""
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

    def _work(self, number: int, size: int) -> Floats:
        """(scenarios, micro-batches, lanes): how much work each micro-batch of a replica is."""
        count = int(self.lanes.micro.max(initial=-1)) + 1
        if self.variability.microbatch.is_none or self.tables.folded:
            return np.ones((size, 1, 1))
        return self.variability.microbatch.at(self._random(number, _MICRO).random((size, count, self.lanes.lanes)))

    def _simulated(
        self, pace: Floats, row: NDArray[Any], pause: Floats, paused: NDArray[Any], work: Floats, states: NDArray[Any]
    ) -> Floats:
        """Lengths of a few scenarios at once, whose lanes are columns."""
        from lumos.risk.drawn_loops import drawn_spans

        scenarios, lanes = len(pace), self.lanes.lanes
        micro = self.fixed[-1] if work.shape[1] > 1 or work.shape[2] > 1 or work.min() != 1 else np.full_like(self.fixed[-1], -1)
        found: Floats = drawn_spans(
            *self.fixed[:-1], micro, _columns(pace), _columns(row),
            np.ascontiguousarray(np.tile(self.apart.transpose(0, 2, 1), (1, 1, scenarios))),
            _columns(pause), _columns(paused),
            np.ascontiguousarray(np.moveaxis(work, 0, 1).reshape(work.shape[1], -1)),
            self.tables.rows, self.tables.inner,
            np.ascontiguousarray(states[:, :lanes]).ravel(), np.ascontiguousarray(states[:, lanes]), lanes,
        )  # fmt: skip
        return found


def _columns(values: NDArray[Any]) -> NDArray[Any]:
    """(scenarios, lanes, stages) as (stages, columns)."""
    return np.ascontiguousarray(values.reshape(-1, values.shape[-1]).T)
