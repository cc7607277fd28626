"""Score: predictions against measured runs, as a user judges them: by source, and by rank inside a choice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lumos.errors import LumosError
from lumos.forecast import Forecast, forecast
from lumos.scoring.runs import Run, runs_of

_FEWEST = 3  # configurations of a (model, GPUs) group whose order is judged


@dataclass(frozen=True)
class Scored:
    """A run and its forecast."""

    run: Run
    forecast: Forecast

    @property
    def seconds(self) -> float:
        return self.forecast.step.us / 1e6

    @property
    def error(self) -> float:
        """Relative; nan where nothing was measured."""
        return self.seconds / self.run.seconds - 1


@dataclass(frozen=True)
class Score:
    """All runs of a table that could be predicted, and why the others could not."""

    rows: int
    scored: tuple[Scored, ...]
    refused: tuple[tuple[str, str], ...]  # (id, reason)

    def as_dict(self) -> dict[str, Any]:
        by_source: dict[str, list[Scored]] = defaultdict(list)
        for item in self.scored:
            if item.error == item.error:
                by_source[item.run.source].append(item)
        measured = [item for part in by_source.values() for item in part]
        return {
            "rows": self.rows,
            "predicted": len(self.scored),
            **_summary(measured),
            "inside_interval": _inside(measured),
            "by_source": {name: _summary(part) for name, part in sorted(by_source.items())},
            "refused": [{"id": name, "reason": reason} for name, reason in self.refused],
        }

    def table(self) -> list[dict[str, Any]]:
        """A row for every predicted run."""
        return [
            {
                "id": item.run.id,
                "measured": item.run.seconds if item.run.seconds == item.run.seconds else None,
                "predicted": item.seconds,
                "low": item.forecast.interval_ms[0] / 1e3,
                "high": item.forecast.interval_ms[1] / 1e3,
                "fits": item.forecast.memory.fits,
                "peak_gib": item.forecast.memory.gib()["peak"],
                "notes": "; ".join(item.run.notes),
            }
            for item in self.scored
        ]


def score(rows: list[dict[str, str]], progress: Callable[[int, int, str], None] | None = None) -> Score:
    """Predict every row that describes a run."""
    scored, refused = [], []
    for number, run in enumerate(runs_of(rows), 1):
        if isinstance(run, Run):
            try:
                scored.append(Scored(run, forecast(run.setup, run.notes)))
            except LumosError as problem:
                refused.append((run.id, str(problem).splitlines()[0]))
        else:
            refused.append(run)
        if progress is not None:
            progress(number, len(rows), "predicting")
    return Score(len(rows), tuple(scored), tuple(refused))


def _summary(items: Sequence[Scored]) -> dict[str, Any]:
    if not items:
        return {"n": 0, "mape": None, "median": None, "spearman": None}
    errors = 100 * np.abs([item.error for item in items])
    rank = rank_correlation([(i.run.model, i.run.gpus, i.run.seconds, i.seconds) for i in items])
    return {
        "n": len(items),
        "mape": float(errors.mean()),
        "median": float(np.median(errors)),
        "spearman": rank if rank == rank else None,
    }


def _inside(items: Sequence[Scored]) -> float | None:
    """The share of runs inside their 80 % interval."""
    if not items:
        return None
    return float(
        np.mean([i.forecast.interval_ms[0] <= 1e3 * i.run.seconds <= i.forecast.interval_ms[1] for i in items])
    )


def rank_correlation(rows: Sequence[tuple[str, int, float, float]]) -> float:
    """Spearman's, inside groups of one model and one number of GPUs, as a mean over groups by their size."""
    groups: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for model, gpus, measured, predicted in rows:
        groups[model, gpus].append((measured, predicted))
    values, weights = [], []
    for group in groups.values():
        a, b = (_ranks(np.array(column)) for column in zip(*group, strict=True))
        if len(group) >= _FEWEST and a.std() > 0 and b.std() > 0:
            values.append(float(np.corrcoef(a, b)[0, 1]))
            weights.append(len(group))
    return float(np.average(values, weights=weights)) if values else float("nan")


def _ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Ranks, ties sharing theirs."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: np.ndarray[Any, Any] = ((ends - counts + ends - 1) / 2.0)[where]
    return ranks
