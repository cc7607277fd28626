"""Measures what carries over from one GPU to another: each sampled GPU, predicted from the samples of the others.

    python calibration/fit_transfer.py OPERATORS

OPERATORS is the folder of published samples (arXiv 2509.22832), with Perlmutter and Vista in it. Writes
src/lumos/data/transfer.json; benchmarks/transfer.py writes the page.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fit_costs import h200_samples, published_samples
from lumos.costs.operator_model import CostModel, chip_of, cost_model, roofline_us
from lumos.measure.fit import family_of
from lumos.measure.fit_samples import Sample
from lumos.prediction.carried_over import GROUPS, group_of
from lumos.program.operators import Operator
from lumos.setup.gpus import gpu_named
from shipped import ship

PUBLISHED = {"a100": "Perlmutter", "gh200": "Vista"}
ROWS = 1500  # of a family, drawn: more change no figure by a point
SHORTEST_US = 1.0
FEWEST = 20  # shapes that two GPUs must have in common
Floats = NDArray[np.float64]
Ranges = dict[str, tuple[Any, Any]]
# The same kernels of PyTorch under two names. Other operators of GPT-NeoX are several kernels, sampled as one.
SAME_CODE = {
    "neox_add_fwd": "add", "neox_add_bwd": "add", "neox_gelu_fwd": "gelu", "neox_gelu_bwd": "gelu_bwd",
    "add": "neox_add_fwd", "gelu": "neox_gelu_fwd", "gelu_bwd": "neox_gelu_bwd",
}  # fmt: skip
OTHER_CODE = ("softmax_fwd", "softmax_bwd")  # with a mask in the published samples, without one in ours


class Errors(NamedTuple):
    """Of predicted over measured time, in percent."""

    mean: float
    median: float
    bias: float  # of the mean of the logarithms
    rows: int

    @classmethod
    def of(cls, predicted: Floats, measured: Floats) -> Errors:
        sizes = 100 * np.abs(predicted / measured - 1)
        bias = 100 * (np.exp(np.log(predicted / measured).mean()) - 1)
        return cls(float(sizes.mean()), float(np.median(sizes)), float(bias), len(measured))


class Cell(NamedTuple):
    """One family of operators of one GPU, predicted in every way; `sources` by the GPU whose samples were used."""

    target: str
    family: str
    rows: int
    own_pct: float  # held-out error of its own model
    roofline: Errors
    sources: dict[str, Errors]
    both: Errors | None  # the geometric mean of two sources

    @property
    def group(self) -> str:
        return group_of(self.family)


def samples_of(folder: Path) -> dict[str, list[Sample]]:
    found = {"h200": list(h200_samples())}
    return found | {gpu: list(published_samples(folder / site)) for gpu, site in PUBLISHED.items()}


def families_of(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Samples by family, at most ROWS of each."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        found[family_of(sample.operator)].append(sample)
    draw = np.random.default_rng(0)
    return {
        name: [rows[i] for i in draw.choice(len(rows), min(ROWS, len(rows)), replace=False)]
        for name, rows in sorted(found.items())
    }


def cells(samples: dict[str, list[Sample]]) -> Iterator[Cell]:
    """Every family of every GPU; errors are those of shapes that both it and the source were sampled near."""
    sampled = {gpu: ranges_of(rows) for gpu, rows in samples.items()}
    for target, rows in samples.items():
        own, gpu = cost_model(target), gpu_named(target)
        for family, chosen in families_of(rows).items():
            measured = np.array([max(sample.us - own.isolation_us, SHORTEST_US) for sample in chosen])
            base = np.array([roofline_us(s.operator, chip_of(gpu, s.operator.dtype)) for s in chosen])
            found, near = {}, np.ones(len(chosen), bool)
            for source in samples:
                predicted = _predicted(source, target, [sample.operator for sample in chosen])
                if predicted is not None and source != target:
                    found[source] = predicted
                    near &= [_is_near(sample.operator, sampled[source]) for sample in chosen]
            near = near if near.sum() >= FEWEST else np.ones(len(chosen), bool)
            both = np.sqrt(np.prod([*found.values()], axis=0)) if len(found) == 2 else None
            regressor = own.regressors.get(family) or own.regressors.get(family.replace("gemm", "gemm_tn", 1))
            yield Cell(
                target, family, len(chosen), regressor.error_pct if regressor else np.nan,
                Errors.of(base[near], measured[near]),
                {source: Errors.of(predicted[near], measured[near]) for source, predicted in found.items()},
                None if both is None else Errors.of(both[near], measured[near]),
            )  # fmt: skip


def ranges_of(samples: Sequence[Sample]) -> Ranges:
    """The smallest and largest sampled size of every dimension, by family."""
    shapes: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for sample in samples:
        shapes[family_of(sample.operator)].append(sample.operator.shape)
    return {name: (np.min(rows, axis=0), np.max(rows, axis=0)) for name, rows in shapes.items()}


def _is_near(operator: Operator, ranges: Ranges) -> bool:
    family = family_of(operator)
    known = ranges.get(family) or ranges.get(_other_name(operator).kind)
    return known is None or bool(np.all(operator.shape >= known[0]) and np.all(operator.shape <= known[1]))


def _other_name(operator: Operator) -> Operator:
    return operator._replace(kind=SAME_CODE.get(operator.kind, operator.kind))


def _predicted(source: str, target: str, operators: Sequence[Operator]) -> Floats | None:
    """Kernel times on a GPU by the samples of another, moved as the package does; None where it has no such samples."""
    home, kind = cost_model(source), operators[0].kind
    if kind in OTHER_CODE and "h200" in (source, target):
        return None
    model = CostModel(gpu_named(target), source, home.regressors, None, home.isolation_us)
    if kind not in home.regressors and kind in SAME_CODE:
        operators = [_other_name(operator) for operator in operators]
    elif kind.startswith("neox") and kind not in home.regressors:
        return None
    if not all(model.sampled_on(operator) == source for operator in operators):
        return None
    return np.array([max(us - home.isolation_us, SHORTEST_US) for us in model.us_of_all(operators)])


def table_of(found: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """The error of every group: the median over its families of their means, for GPUs of one family and for others."""
    table: dict[str, dict[str, float]] = {}
    for group in GROUPS:
        errors: dict[str, list[float]] = defaultdict(list)
        for cell in found:
            for source, error in cell.sources.items():
                if cell.group == group and not cell.family.startswith("grouped"):  # no other GPU has samples of them
                    errors[relation(source, cell.target)].append(error.mean)
        same, other = (median(errors[name]) for name in ("same", "other"))
        if same >= other:  # other things decide: which library, which kernels
            same = other = median([*errors["same"], *errors["other"]])
        table[group] = {"same": round(same, 1), "other": round(other, 1)}
    table["roofline"] = {"any": round(median(cell.roofline.mean for cell in found), 1)}
    return table


def relation(source: str, target: str) -> str:
    return "same" if gpu_named(source).family == gpu_named(target).family else "other"


def main(folder: str) -> None:
    table = table_of(list(cells(samples_of(Path(folder)))))
    print(table)
    ship("transfer.json", {"error_pct": table})


if __name__ == "__main__":
    main(sys.argv[1])
