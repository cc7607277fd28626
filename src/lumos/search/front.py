"""Front: which of the configurations found so far matter, and whether one that is only bounded still can."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Found(NamedTuple):
    """A simulated configuration: its number, the objective, and what the Pareto front is drawn by."""

    number: int
    value: float  # of the objective
    seconds: float  # of a step
    memory: float  # bytes on the fullest GPU
    cost: float  # of a token: money, or GPU-hours where GPUs have no price
    joules: float  # of a step, all GPUs
    bound: float  # seconds that it cannot be below


Bounds = NDArray[np.void]
BOUNDS = np.dtype([("number", "i8"), ("value", "f8"), ("seconds", "f8"), ("memory", "f8"), ("cost", "f8")])
"""A configuration that was not simulated: all but its memory are lower bounds."""


class Front:
    """The best so far, and those that nothing beats in time, memory and cost at once. Both do not depend on the order
    in which configurations are added."""

    def __init__(self, top: int) -> None:
        self.top = top
        self.best: list[Found] = []
        self.pareto: list[Found] = []

    def add(self, rows: Iterable[Found]) -> None:
        fresh = list(rows)
        there = [row for row in [*self.best, *fresh] if row.value < float("inf")]
        self.best = sorted(set(there), key=lambda row: (row.value, row.number))[: self.top]
        self.pareto = _undominated([*self.pareto, *(row for row in fresh if row.value < float("inf"))])

    @property
    def worst(self) -> float:
        """What a configuration must beat to be among the best."""
        return self.best[-1].value if len(self.best) == self.top else float("inf")

    def can_matter(self, rows: Bounds) -> NDArray[np.bool_]:
        """Which of the bounded configurations may still be among the best or on the front.

        A configuration is given up only where it certainly is beaten, also if its times were equal to their bounds.
        """
        among_best = (rows["value"] <= self.worst) & np.isfinite(rows["value"])
        on_front = np.isfinite(rows["value"])
        for row in self.pareto:
            beaten = (row.seconds < rows["seconds"]) & (row.cost <= rows["cost"]) & (row.memory <= rows["memory"])
            on_front &= ~beaten
        matters: NDArray[np.bool_] = among_best | on_front
        return matters


def promising(rows: Bounds, most: int) -> NDArray[np.bool_]:
    """Of rows sorted by their objective: the first quarter of `most`, then those that by their bounds nothing beats.

    Bounds are close to the times, so these are most of what will matter, and give up most of the rest.
    """
    chosen = np.zeros(len(rows), bool)
    chosen[: most // 4] = True
    by_time = np.lexsort((rows["number"], rows["memory"], rows["seconds"]))
    memory, cost = rows["memory"][by_time], rows["cost"][by_time]
    least = np.minimum.accumulate(np.concatenate([[np.inf], memory[:-1]]))
    cheapest = np.minimum.accumulate(np.concatenate([[np.inf], cost[:-1]]))
    ahead = by_time[(memory < least) | (cost < cheapest)]
    chosen[ahead[: most - int(chosen.sum())]] = True
    if len(rows) > most // 4 and not chosen[most // 4 :].any():
        chosen[: most] = True
    return chosen


def _undominated(rows: Sequence[Found]) -> list[Found]:
    """Sorted by time; of equals in everything, the first."""
    kept: list[Found] = []
    for row in sorted(set(rows), key=lambda r: (r.seconds, r.memory, r.cost, r.number)):
        if not any(other.memory <= row.memory and other.cost <= row.cost for other in kept):
            kept.append(row)
    return kept
