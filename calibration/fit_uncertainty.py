"""Fits the parts of a forecast's variance on published runs, and measures how often the interval holds.

    python calibration/fit_uncertainty.py TRUTH_FOLDER

Every run is predicted with constants fitted without its source (calibration/held_out.json). Coverage is measured the
same way: the variance that judges a source is fitted without it. Writes src/lumos/data/uncertainty.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from fit_in_step import HERE, TABLES, factors_with, source_of
from lumos.prediction.interval import PARTS, parts_of
from lumos.score.measured_runs import Run, read_rows, runs_of
from lumos.step.step import simulate_step
from shipped import ship

MOST = 1.5  # of the logarithm of measured over predicted, beyond which an error counts no further
COVERED = 0.83  # of the rows fitted on; the rows held apart are covered a little less often
BY_HAND = {"other_family": 0.03, "power": 0.1}  # no published run on such a GPU, or under such a limit


def residuals(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Run]]:
    """(parts, log of measured over predicted, source) of every pretraining run."""
    held_out = json.loads((HERE / "held_out.json").read_text())
    parts, errors, sources, runs = [], [], [], []
    for table in TABLES:
        for run in runs_of(read_rows(folder / table)):
            if not isinstance(run, Run) or run.row.get("train_mode") != "pretrain" or not run.seconds > 0:
                continue
            step = simulate_step(run.setup, factors_with(run, held_out[source_of(run)]))
            found = parts_of(step, len(run.notes))
            parts.append([found[name] for name in PARTS])
            errors.append(np.log(run.seconds / (step.us / 1e6)))
            sources.append(source_of(run))
            runs.append(run)
    return np.array(parts), np.array(errors), np.array(sources), runs


def fit(parts: np.ndarray, errors: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Variances of the parts by non-negative least squares on absolute errors, and the scale that covers COVERED."""
    from scipy.optimize import minimize

    size = np.minimum(np.abs(errors), MOST)

    def loss(logs: np.ndarray) -> float:
        spread = np.sqrt(parts @ np.exp(logs))
        return float(np.sum(weights * (np.log(spread) + size / spread)))  # a Laplace distribution's likelihood

    start = np.full(parts.shape[1], np.log(0.005))
    best = minimize(loss, start, method="L-BFGS-B", bounds=[(np.log(1e-6), np.log(1.0))] * len(start)).x
    spread = np.sqrt(parts @ np.exp(best))
    order = np.argsort(size / spread)
    reached = np.searchsorted(np.cumsum(weights[order]) / weights.sum(), COVERED)
    return np.exp(best), float((size / spread)[order][reached])


def by_source(sources: np.ndarray) -> np.ndarray:
    """Every source weighs the square root of its rows: many rows of one machine are not many machines."""
    counts = {name: int((sources == name).sum()) for name in set(sources)}
    return np.array([counts[name] ** -0.5 for name in sources])


def main(folder: str) -> None:
    parts, errors, sources, _ = residuals(Path(folder))
    weights = by_source(sources)
    inside = np.zeros(len(errors), bool)
    for name in sorted(set(sources)):
        held = sources == name
        variance, scale = fit(parts[~held], errors[~held], weights[~held])
        inside[held] = np.abs(errors[held]) <= scale * np.sqrt(parts[held] @ variance)
        print(f"{name:36s} {held.sum():5d} rows, inside the interval {100 * inside[held].mean():5.1f} %")
    print(f"all rows {100 * inside.mean():.1f} %, sources weighed {100 * np.average(inside, weights=weights):.1f} %")
    variance, scale = fit(parts, errors, weights)
    fitted = {name: round(float(value), 6) for name, value in zip(PARTS, variance, strict=True)}
    ship("uncertainty.json", {"scale": round(scale, 4), "variance": fitted | BY_HAND})
    print(scale, fitted)


if __name__ == "__main__":
    main(sys.argv[1])
