"""Branch and bound: bounds for every configuration, then simulations of those that may still matter.

A configuration is skipped only where bounds on its time and its exact memory prove that others beat it. Waves of
simulations have a fixed size and are finished one after the other, so that every engine, with any number of workers,
simulates the same configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from lumos.data_files import read_table
from lumos.described.described import Program
from lumos.memory.memory import Memory, memory_of
from lumos.prediction.power import energy_of
from lumos.search.estimator import Estimator
from lumos.search.journal import Journal
from lumos.search.pace import Pace, slow_us
from lumos.search.ranking import BOUNDS, Bounds, Front, Objective, Simulated, promising
from lumos.search.space import VARIANT_BITS, Candidate, Space
from lumos.setup.setup import Setup
from lumos.setup.slow import read_slow
from lumos.step.step import StepTooLargeError
from lumos.workers import Engine, Job

_BY_MEMORY, _BY_FAR = ("full", "selective", "none"), 1.05  # recomputation; more than any of them needs over the next
_LAYOUTS_PER_CHUNK = 4
_SIMULATIONS_PER_WAVE, _SIMULATIONS_PER_CHUNK = 64, 8
_DRAWN_PER_CHUNK = 2

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Task:
    """What every worker needs to evaluate configurations."""

    space: Space
    objective: Objective
    estimator: Estimator = field(default_factory=Estimator)
    memory_gib: float = 0.0  # usable on a GPU, where that is less than it has
    shard: tuple[int, int] = (0, 1)
    exhaustive: bool = False  # simulate everything that fits, whatever its bound

    def is_in_shard(self, layout: int) -> bool:
        """Families are dealt out whole, so that what is said of one is known to one shard."""
        index, count = self.shard
        return int(self.space.families[layout]) % count == index

    def needed(self, memory: Memory) -> float:
        """The memory that a configuration needs, over what it may use."""
        usable = min(memory.usable, self.memory_gib * 2**30 if self.memory_gib else inf)
        return (memory.peak + memory.reserve) / usable

    def bounds(self, number: int, setup: Setup, program: Program, memory: float) -> tuple[float, ...]:
        """A row of BOUNDS."""
        seconds, joules = self.estimator.bound(setup, program)
        seconds *= min([1.0, *(one.factor for one in read_slow(setup.variability.slow, setup.cluster.gpus))])
        pace = Pace.least(setup, seconds, self.objective.steps(setup))
        value, cost = self.objective.value(setup, pace, joules), self.objective.cost(setup, pace.run, joules)
        return number, value, seconds, memory, cost

    def simulated(self, number: int, memory: float, bound: float) -> Simulated:
        """A configuration whose step has more tasks than can be simulated takes inf seconds."""
        setup = self.space.setup_of(self.space.candidate(number))
        try:
            step = self.estimator.step(setup)
        except StepTooLargeError:
            return Simulated(number, inf, inf, memory, inf, inf, bound, inf, inf)
        seconds = (self.estimator.us(step) + slow_us(step)) / 1e6
        joules = energy_of(step, seconds).joules
        pace = Pace.of(step, seconds, self.objective.steps(setup))
        value, cost = self.objective.value(setup, pace, joules), self.objective.cost(setup, pace.run, joules)
        return Simulated(number, value, seconds, memory, cost, joules, bound, pace.p90, pace.run)

    def drawn(self, row: Simulated) -> Simulated:
        """The same configuration by risk: its step and its run are drawn."""
        setup = self.space.setup_of(self.space.candidate(row.number))
        pace = Pace.drawn(self.estimator.step(setup), row.seconds, self.objective.steps(setup))
        value, cost = self.objective.value(setup, pace, row.joules), self.objective.cost(setup, pace.run, row.joules)
        return row._replace(value=value, cost=cost, p90=pace.p90, run=pace.run)


def bound_layouts(task: Task, layouts: Sequence[int]) -> tuple[int, Bounds]:
    """(valid configurations, bounds of those that fit) of some layouts; a job for an engine.

    Larger micro-batches need more memory, and those that recompute less need about as much or more: where one does not
    fit, or by far not, the others need not be asked about.
    """
    valid, rows = 0, []
    for layout in filter(task.is_in_shard, layouts):
        too_large: dict[tuple[Any, ...], int] = {}  # the least micro-batch that does not fit, for all other values
        for candidate, setup in sorted(task.space.candidates(layout), key=_least_memory_first):
            valid += 1
            *others, recompute, micro_batch = candidate.values
            same, less = (*others, recompute), tuple(others)
            if micro_batch >= min(too_large.get(same, inf), too_large.get(less, inf)):
                continue
            program = Program(setup)
            memory = memory_of(setup, program)
            needed = task.needed(memory)
            if needed > 1:
                too_large[same] = micro_batch
                if needed > _BY_FAR:
                    too_large.setdefault(less, micro_batch)
            else:
                rows.append(task.bounds(candidate.number, setup, program, memory.peak))
    return valid, np.array(sorted(rows), BOUNDS)


def _least_memory_first(found: tuple[Candidate, Setup]) -> tuple[int, int]:
    *_, recompute, micro_batch = found[0].values
    return _BY_MEMORY.index(recompute), micro_batch


def simulate_candidates(task: Task, rows: Sequence[tuple[int, float, float]]) -> list[Simulated]:
    """Simulate configurations, given as (number, memory, bound); a job for an engine."""
    return [task.simulated(*row) for row in rows]


def draw_candidates(task: Task, rows: Sequence[Simulated]) -> list[Simulated]:
    """Simulated configurations by risk; a job for an engine."""
    return [task.drawn(row) for row in rows]


@dataclass
class Search:
    """A search under way."""

    task: Task
    engine: Engine
    journal: Journal
    front: Front
    progress: Progress | None = None
    valid: int = 0
    fitting: int = 0
    least_seconds: float = inf  # lower bound on the step of any configuration that fits
    on_clusters: list[tuple[int, float]] = field(default_factory=list)  # how many fit, and the least seconds a sequence
    simulated: list[Simulated] = field(default_factory=list)
    drawn: frozenset[int] = frozenset()  # numbers of the configurations whose steps were drawn, by risk

    @property
    def too_large(self) -> list[Simulated]:
        """What could not be simulated, as its step has too many tasks."""
        return [row for row in self.simulated if row.seconds == inf]

    def run(self) -> Search:
        """Do everything that the journal does not have yet."""
        rows = self._bounds()
        self.fitting, self.least_seconds = len(rows), float(rows["seconds"].min(initial=inf))
        self.on_clusters = self._by_cluster(rows)
        self._simulate(rows[np.lexsort((rows["number"], rows["value"]))])
        if self.task.objective.risk:
            self._draw()
        return self

    def _by_cluster(self, rows: Bounds) -> list[tuple[int, float]]:
        """For every GPU type and number: configurations that fit, and a lower bound on their time per sequence."""
        space = self.task.space
        layouts = rows["number"] >> VARIANT_BITS
        clusters, paces = space.cluster_of[layouts], rows["seconds"] / space.batch_of[layouts]
        found = [paces[clusters == index] for index in range(len(space.clusters))]
        return [(len(mine), float(mine.min(initial=inf))) for mine in found]

    def _bounds(self) -> Bounds:
        """The bounds of all configurations that fit, in the order of the space."""
        chunks = _chunks(range(len(self.task.space.layouts)), _LAYOUTS_PER_CHUNK)
        kept = ((index, self.journal.bounds(index)) for index in range(len(chunks)))
        parts = {index: found for index, found in kept if found is not None}
        self.valid = sum(valid for valid, _ in parts.values())
        todo = [index for index in range(len(chunks)) if index not in parts]
        answers = self.engine.run(Job(bound_layouts, self.task), [list(chunks[index]) for index in todo])
        for done, (index, (valid, rows)) in enumerate(zip(todo, answers, strict=True), 1):
            self.journal.keep_bounds(index, valid, rows)
            self.valid, parts[index] = self.valid + valid, (valid, rows)
            self._report(done, len(todo), f"bounding; {self.valid:,} configurations")
        return np.concatenate([np.empty(0, BOUNDS), *(parts[index][1] for index in sorted(parts))])

    def _simulate(self, rows: Bounds) -> None:
        """Simulate wave after wave until no remaining row can matter; `rows` are sorted by their objective."""
        while len(rows):
            if not self.task.exhaustive:
                rows = rows[self.front.can_matter(rows)]
            chosen = promising(rows, _SIMULATIONS_PER_WAVE)
            wave, rows = rows[chosen], rows[~chosen]
            if not len(wave):
                break
            found = self.journal.wave(wave)
            if found is None:
                found = self._simulate_wave(wave)
                self.journal.keep_wave(wave, found)
            self.front.add(found)
            self.simulated += found
            best = f"{self.front.best[0].seconds * 1e3:,.1f} ms" if self.front.best else "none"
            self._report(len(self.simulated), len(self.simulated) + len(rows), f"simulating; best {best}")

    def _draw(self) -> None:
        """Rank by risk: of all that are typically near the best, and of the Pareto front, steps are drawn."""
        limits, front = read_table("search.toml")["risk"], self.front
        ranked = sorted((row for row in self.simulated if row.value < inf), key=lambda row: (row.value, row.number))
        worst = ranked[0].value * (1 + limits["slack"]) if ranked else 0.0
        near = [row for index, row in enumerate(ranked) if row.value <= worst or index < front.top]
        most = limits["most"]
        chosen = list(dict.fromkeys([*near[:most], *front.pareto[:most], *front.leaders.values()]))
        found: list[Simulated] = []
        for part in self.engine.run(Job(draw_candidates, self.task), _chunks(chosen, _DRAWN_PER_CHUNK)):
            found += part
            self._report(len(found), len(chosen), "drawing steps")
        by_number = {row.number: row for row in found}
        self.drawn = frozenset(by_number)
        self.simulated = [by_number.get(row.number, row) for row in self.simulated]
        self.front = Front(front.top, front.family_of, front.cluster_of)
        self.front.add(found)

    def _simulate_wave(self, wave: Bounds) -> list[Simulated]:
        chunks = _chunks(wave[["number", "memory", "seconds"]].tolist(), _SIMULATIONS_PER_CHUNK)
        return [row for part in self.engine.run(Job(simulate_candidates, self.task), chunks) for row in part]

    def _report(self, done: int, total: int, what: str) -> None:
        if self.progress is not None:
            self.progress(done, total, what)


def _chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
