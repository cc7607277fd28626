"""Fits the 80 % interval of described steps on published runs, and measures how often it holds.

    python calibration/fit_uncertainty.py TRUTH_FOLDER

The logarithm of measured over predicted time is modelled as a spread with two causes. What makes a run hard to predict
(`PARTS`) adds up to a variance. Framework and family of GPUs multiply the spread by a width each, drawn towards the
usual one the more the fewer publications there are; where there are none, it is the largest of all. The ends of the
interval, in units of that spread, are quantiles over runs whose publication was left out of the fit: so they hold what
a fit cannot know of machines that it has not seen. Every run is predicted with constants fitted without its publication
(held_out.json). Runs that their own repetition does not confirm are judged by the interval, but not fitted on.

Writes src/lumos/data/uncertainty.json, and prints how often the interval holds for publications that were left out, and
whether it would help to correct predictions by the mean error of their framework.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lumos.prediction.interval import PARTS, UNKNOWN, Spread, framework_of, size_of, spread_of
from published import Predicted, predictions
from shipped import ship, shipped

MOST = 0.3  # of the logarithm of measured over predicted, beyond which an error counts no further
LIKE = 2.0  # for how many publications the usual width counts
FEW = 5.0  # rows with which a publication counts half
BIAS = 3.0  # the same as LIKE, for the mean error of a framework
ENDS = (0.1, 0.9)
# No published run on such a GPU, or under such a limit; other accelerators: see `sources`.
BY_HAND = {"other_family": 0.03, "other_accelerator": 0.36, "power": 0.1}
LEAST = {"assumed": 0.005}  # published runs lack little but the name of a usual network; other values matter more
FEWEST = {"frameworks": 1, "families": 2}  # publications from which one is known

Table = dict[str, Any]


class Residual(NamedTuple):
    """How far off the prediction of a published run was."""

    publication: str
    framework: str
    family: str
    parts: dict[str, float]
    log_error: float  # of measured over predicted
    is_erratic: bool = False  # no other run of it agrees: it says more about that day than about the prediction


def residuals(rows: Sequence[Predicted]) -> list[Residual]:
    found = []
    for row in rows:
        framework = framework_of(row.run.setup, row.run.notes)
        family = row.run.setup.cluster.accelerator.family
        found.append(Residual(row.publication, framework, family, row.parts, row.log_error, row.is_erratic))
    return found


def fit(rows: Sequence[Residual]) -> Table:
    """The table of intervals: variances, widths, and the ends in units of the spread; erratic runs are left out."""
    rows = [row for row in rows if not row.is_erratic]
    scaled: list[float] = []
    for name in _publications(rows):
        table = _spreads([row for row in rows if row.publication != name])
        scaled += [row.log_error / _size(table, row) for row in rows if row.publication == name]
    ordered = [row for name in _publications(rows) for row in rows if row.publication == name]
    low, high = _quantiles(np.array(scaled), _weights(ordered), ENDS)
    return _spreads(rows) | {"low": round(min(low, -0.1), 4), "high": round(max(high, 0.1), 4)}


def held_out(rows: Sequence[Residual]) -> list[Spread]:
    """The interval of every run, fitted without its publication."""
    tables = {name: fit([row for row in rows if row.publication != name]) for name in _publications(rows)}
    return [spread_of(tables[row.publication], row.parts, row.framework, row.family) for row in rows]


def bias_of(rows: Sequence[Residual]) -> dict[str, float]:
    """By framework, the mean over publications of their median error, drawn towards none."""
    found = {}
    for framework, groups in _grouped([row for row in rows if row.framework != UNKNOWN], "frameworks").items():
        counted = [(float(np.median([row.log_error for row in group])), _weight(group)) for group in groups]
        found[framework] = sum(value * weight for value, weight in counted) / (BIAS + sum(w for _, w in counted))
    return found


def corrected(rows: Sequence[Residual]) -> list[Residual]:
    """The residuals that would be left if predictions were corrected by framework, fitted without the publication."""
    bias = {name: bias_of([row for row in rows if row.publication != name]) for name in _publications(rows)}
    return [row._replace(log_error=row.log_error - bias[row.publication].get(row.framework, 0.0)) for row in rows]


def _spreads(rows: Sequence[Residual]) -> Table:
    """Variances of the parts, then the width of every framework, then that of every family of GPUs."""
    table: Table = {"variance": _variances(rows), "unseen": {}}
    for kind in FEWEST:
        table[kind], table["unseen"][kind] = {}, 1.0
    for kind in FEWEST:
        table[kind] = _widths(table, rows, kind)
        table["unseen"][kind] = max((known["width"] for known in table[kind].values()), default=1.0)
    return table


def _widths(table: Table, rows: Sequence[Residual], kind: str) -> dict[str, dict[str, float]]:
    """How much more than usual the runs under every framework, or on every family of GPUs, spread."""
    sizes = {
        name: [(log(_middle(table, group)), _weight(group)) for group in groups]
        for name, groups in _grouped(rows, kind).items()
    }
    usual = float(np.mean([size for found in sizes.values() for size, _ in found]))
    return {
        name: {
            "width": round(exp(sum((size - usual) * w for size, w in found) / (LIKE + sum(w for _, w in found))), 3),
            "publications": len(found),
        }
        for name, found in sizes.items()
        if len(found) >= FEWEST[kind] and name != UNKNOWN
    }


def _variances(rows: Sequence[Residual]) -> dict[str, float]:
    """Variances by the likelihood of a Laplace distribution, whose tails are as heavy as those of measured runs."""
    from scipy.optimize import minimize

    fitted = [name for name in PARTS if name not in BY_HAND]
    parts = np.array([[row.parts[name] for name in fitted] for row in rows])
    fixed = np.array([sum(value * row.parts[name] for name, value in BY_HAND.items()) for row in rows])
    errors, weights = np.minimum(np.abs([row.log_error for row in rows]), MOST), _weights(rows)

    def loss(logs: np.ndarray) -> tuple[float, np.ndarray]:
        spread = np.sqrt(parts @ np.exp(logs) + fixed)
        slope = weights * (1 / spread - errors / spread**2) / (2 * spread)
        return float(np.sum(weights * (np.log(spread) + errors / spread))), (slope @ parts) * np.exp(logs)

    bounds = [(np.log(LEAST.get(name, 1e-6)), 0.0) for name in fitted]
    best = minimize(loss, np.full(len(fitted), np.log(0.005)), jac=True, method="L-BFGS-B", bounds=bounds).x
    found = dict(zip(fitted, (round(float(value), 6) for value in np.exp(best)), strict=True)) | BY_HAND
    return {name: found[name] for name in PARTS}


def _middle(table: Table, group: Sequence[Residual]) -> float:
    """What 80 % of the errors of a group are below, in units of its spread."""
    scaled = [min(abs(row.log_error), MOST) / _size(table, row) for row in group]
    return max(float(np.quantile(scaled, 0.8)), 0.01)


def _size(table: Table, row: Residual) -> float:
    return size_of(table, row.parts, row.framework, row.family)


def _publications(rows: Sequence[Residual]) -> list[str]:
    return sorted({row.publication for row in rows})


def _grouped(rows: Sequence[Residual], kind: str) -> dict[str, list[list[Residual]]]:
    """The runs of every framework or family, one group for each publication."""
    groups: dict[tuple[str, str], list[Residual]] = {}
    for row in rows:
        name = row.framework if kind == "frameworks" else row.family
        groups.setdefault((name, row.publication), []).append(row)
    found: dict[str, list[list[Residual]]] = {}
    for (name, _), group in sorted(groups.items()):
        found.setdefault(name, []).append(group)
    return found


def _weight(group: Sequence[Residual]) -> float:
    """For how many publications one counts: a few rows are less than one."""
    return len(group) / (len(group) + FEW)


def _weights(rows: Sequence[Residual]) -> np.ndarray:
    """Every publication weighs the square root of its rows: many rows of one machine are not many machines."""
    counts = Counter(row.publication for row in rows)
    return np.array([counts[row.publication] ** -0.5 for row in rows])


def _quantiles(values: np.ndarray, weights: np.ndarray, shares: tuple[float, ...]) -> list[float]:
    order = np.argsort(values)
    reached = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return [float(np.interp(share, reached, values[order])) for share in shares]


def show(rows: Sequence[Predicted], found: Sequence[Residual]) -> None:
    """How often intervals hold, and what correcting predictions would do, by source."""
    spreads, better = held_out(found), corrected(found)
    print(f"{'source':40s} rows  inside, %  mean error, %  corrected by framework, %")
    by_source: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        by_source.setdefault(row.source, []).append(index)
    means = []
    for name, indices in sorted(by_source.items()):
        inside = np.mean([spreads[i].low <= exp(found[i].log_error) <= spreads[i].high for i in indices])
        kept = [i for i in indices if not rows[i].is_erratic]
        pair = [100 * np.mean([abs(exp(-some[i].log_error) - 1) for i in kept]) for some in (found, better)]
        means.append(pair)
        print(f"{name:40s} {len(indices):4d} {100 * inside:10.0f} {pair[0]:14.1f} {pair[1]:14.1f}")
    plain, other = np.mean(means, axis=0)
    print(f"mean over sources: error {plain:.2f} %, corrected by framework {other:.2f} %")


def main(folder: str) -> None:
    rows = predictions(Path(folder))
    found = residuals(rows)
    ship("uncertainty.json", fit(found))
    show(rows, found)
    print(shipped("uncertainty.json"))


if __name__ == "__main__":
    main(sys.argv[1])
