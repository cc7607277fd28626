"""How the ranks of a generated run differ: in speed, in when they begin, and in what passes before their first task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lumos.graph.graph import Floats
from lumos.synthesis.draw import normal_scores, stratified
from lumos.synthesis.model import Model


class RankDifferences:
    """Of every rank and step of a run.

    As many ranks as were learned from keep their numbers, so that a slow rank stays the slow one; of what a rank does
    otherwise in one step than in another, only how much it is was learned.
    """

    def __init__(self, model: Model, role_of_rank: Sequence[int], steps: int, seed: int) -> None:
        ranks = len(role_of_rank)
        self.host, self.gpu, self.late_us = np.ones((ranks, steps)), np.ones((ranks, steps)), np.zeros(ranks)
        for role in set(role_of_rank):
            same = np.flatnonzero(np.array(role_of_rank) == role)
            known = [model.by_rank[i] for i in same] if ranks == len(model.by_rank) else []
            for speeds, spread, kept, stream in (
                (self.host, model.spread.host, [rank.host for rank in known], 5),
                (self.gpu, model.spread.gpu, [rank.gpu for rank in known], 6),
            ):
                generator = np.random.default_rng([seed, stream, role])
                speeds[same] = _speeds(spread, np.array(kept), (len(same), steps), generator)
            order = np.argsort(np.argsort(self.host[same].mean(axis=1)))  # who is slow starts late, too
            self.late_us[same] = model.roles[role].start_us + model.spread.start_us * _scores(len(same))[order]
        self.late_us -= self.late_us.min()
        self.host *= _factors(model.spread.step, steps, np.random.default_rng([seed, 7]))
        self.lead_us = np.stack([_leads(model, rank, ranks, steps, seed) for rank in range(ranks)])


def _leads(model: Model, rank: int, ranks: int, steps: int, seed: int) -> Floats:
    """What passes before the first task of a rank in every step; with other numbers of ranks, as in proportion."""
    generator = np.random.default_rng([seed, 8, rank])
    lead = model.by_rank[rank * len(model.by_rank) // ranks].lead
    return lead.at(stratified(generator.standard_normal(steps), generator))


def _speeds(spread: float, kept: Floats, shape: tuple[int, int], generator: np.random.Generator) -> Floats:
    """Factors of ranks and steps: those that a rank keeps, and what is left of the spread anew in every step."""
    ranks, steps = shape
    if not len(kept):
        return np.repeat(_factors(spread, ranks, generator)[:, None], steps, axis=1)
    rest = float(np.sqrt(max(spread**2 - float(np.log(kept).var()), 0.0)))
    return np.stack([kept * _factors(rest, ranks, generator) for _ in range(steps)], axis=1)


def _factors(spread: float, count: int, generator: np.random.Generator) -> Floats:
    """Factors around 1 whose logarithms have this standard deviation, whatever their number, in random order."""
    factors = np.exp(spread * generator.permutation(_scores(count)))
    return np.asarray(factors / factors.mean(), np.float64)


def _scores(count: int) -> Floats:
    """Normal scores, ascending, with a standard deviation of 1."""
    scores = normal_scores((np.arange(count) + 0.5) / count)
    return scores / scores.std() if count > 1 else scores
