"""Search: bound every configuration, then simulate those that may still matter, the most promising first.

What is given up is beaten for certain: by a bound on its time and by its memory, never by luck. Waves have a fixed size
and are settled one after the other, so every engine, with any number of workers, simulates the same configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lumos.prediction.power import energy_of
from lumos.program.memory import footprint
from lumos.search.estimator import Described, Estimator
from lumos.search.front import BOUNDS, Bounds, Found, Front, promising
from lumos.search.journal import Journal
from lumos.search.objective import Objective
from lumos.search.space import Candidate, Space
from lumos.setup.setup import Setup
from lumos.workers import Engine, Job

_WAVE = 64  # configurations that are simulated before what is left is looked at again
_PIECE = 8  # of them at a time, by one worker
_LAYOUTS = 4  # whose variants are bounded at a time, by one worker

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Task:
    """What every worker needs to know."""

    space: Space
    objective: Objective
    estimator: Estimator = field(default_factory=Described)
    memory_gib: float = 0.0  # that a GPU may use, where less than it has
    shard: tuple[int, int] = (0, 1)
    exhaustive: bool = False

    def room(self, setup: Setup) -> float | None:
        """Bytes on the fullest GPU, or None where that is too much."""
        found = footprint(setup)
        allowed = self.memory_gib * 2**30 if self.memory_gib else found.usable
        return found.peak if found.fits and found.peak + found.unseen <= allowed else None

    def mine(self, candidate: Candidate) -> bool:
        index, count = self.shard
        return (candidate.layout + candidate.variant) % count == index


class Bounded(NamedTuple):
    """The configurations of some layouts: how many are valid, how many fit, and the bounds of those."""

    valid: int
    rows: Bounds


def bound_layouts(task: Task, layouts: Sequence[int]) -> Bounded:
    """Bound all configurations of some layouts; a job for an engine."""
    valid, rows = 0, []
    for layout in layouts:
        too_large: tuple[Any, ...] = ()  # a larger micro-batch of the same kind needs more memory
        for candidate in task.space.candidates(layout):
            valid += task.mine(candidate)
            if candidate.kind == too_large or not task.mine(candidate):
                continue
            setup = task.space.setup_of(candidate)
            memory = task.room(setup)
            if memory is None:
                too_large = candidate.kind
            else:
                rows.append(_bounded(task, candidate, setup, memory))
    return Bounded(valid, np.array(rows, BOUNDS))


def _bounded(task: Task, candidate: Candidate, setup: Setup, memory: float) -> tuple[float, ...]:
    bound = task.estimator.bound(setup)
    seconds = bound.us / 1e6
    value = task.objective.value(setup, seconds, bound.joules)
    return candidate.number, value, seconds, memory, task.objective.cost(setup, seconds, bound.joules)


def simulate_numbers(task: Task, numbers: Sequence[tuple[int, float, float]]) -> list[Found]:
    """Simulate configurations, given as (number, memory, bound); a job for an engine."""
    return [_simulated(task, *row) for row in numbers]


def _simulated(task: Task, number: int, memory: float, bound: float) -> Found:
    setup = task.space.setup_of(task.space.candidate(number))
    step = task.estimator.step(setup)
    seconds, joules = task.estimator.us(step) / 1e6, energy_of(step).joules
    value = task.objective.value(setup, seconds, joules)
    return Found(number, value, seconds, memory, task.objective.cost(setup, seconds, joules), joules, bound)


@dataclass
class Search:
    """A search under way: what was bounded, what was simulated, and what matters of it."""

    task: Task
    engine: Engine
    journal: Journal
    top: int = 10
    progress: Progress | None = None
    valid: int = 0
    fitting: int = 0
    least_seconds: float = float("inf")  # that no configuration which fits can be below
    simulated: list[Found] = field(default_factory=list)

    def run(self) -> Search:
        """Do all of it; what the journal has is not done again."""
        self._simulate(self._bound())
        return self

    @cached_property
    def front(self) -> Front:
        return Front(self.top)

    def _bound(self) -> Bounds:
        layouts = len(self.task.space.layouts)
        pieces = [range(i, min(i + _LAYOUTS, layouts)) for i in range(0, layouts, _LAYOUTS)]
        known = self.journal.bounded
        todo = [i for i in range(len(pieces)) if i not in known]
        parts: dict[int, Bounds] = {}
        for index, (valid, rows) in known.items():
            self.valid, parts[index] = self.valid + valid, rows
        answers = self.engine.run(Job(bound_layouts, self.task), [list(pieces[i]) for i in todo])
        for done, (index, found) in enumerate(zip(todo, answers, strict=True), 1):
            self.journal.keep_bounds(index, found.valid, found.rows)
            self.valid, parts[index] = self.valid + found.valid, found.rows
            self._tell(done, len(todo), f"bounding; {self.valid:,} configurations")
        return np.concatenate([parts[i] for i in sorted(parts)]) if parts else np.empty(0, BOUNDS)

    def _simulate(self, rows: Bounds) -> None:
        self.fitting = len(rows)
        self.least_seconds = float(rows["seconds"].min()) if len(rows) else float("inf")
        rows = rows[np.lexsort((rows["number"], rows["value"]))]
        waves = self.journal.waves()
        while len(rows):
            if not self.task.exhaustive:
                rows = rows[self.front.can_matter(rows)]
            first = promising(rows, _WAVE)
            wave, rows = rows[first], rows[~first]
            if not len(wave):
                break
            found = next(waves, None)
            if found is None:
                found = self._wave(wave)
                self.journal.keep_wave(found)
            self.front.add(found)
            self.simulated += found
            self._tell(len(self.simulated), len(self.simulated) + len(rows), f"simulating; best {self._best()}")

    def _wave(self, wave: Bounds) -> list[Found]:
        asked = [(int(row["number"]), float(row["memory"]), float(row["seconds"])) for row in wave]
        pieces = [asked[i : i + _PIECE] for i in range(0, len(asked), _PIECE)]
        return [row for part in self.engine.run(Job(simulate_numbers, self.task), pieces) for row in part]

    def _best(self) -> str:
        return f"{self.front.best[0].seconds * 1e3:,.1f} ms" if self.front.best else "none"

    def _tell(self, done: int, total: int, what: str) -> None:
        if self.progress is not None:
            self.progress(done, total, what)
