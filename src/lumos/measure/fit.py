"""Fit: a cost model from samples, with its error on held-out shapes; families with too large an error are refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lumos.cost.features import features, roofline_us
from lumos.cost.operator_model import Regressor, chip_of
from lumos.cost.trees import Floats, Trees
from lumos.errors import InputError, OptionError
from lumos.measure.operator_rows import operator_of
from lumos.measure.sample_file import lines_of
from lumos.measure.sample_grid import COLLECTIVES
from lumos.program.operators import Operator
from lumos.setup.gpus import Gpu, find_gpu, gpu_named

FOLDS = 5
_FEWEST_SAMPLES = 40  # of a family
_LARGEST_ERROR_PCT = 25.0  # on held-out shapes
_FAMILY = {"gemm_tn": "gemm", "gemm_nn": "gemm", "gemm_nt": "gemm"}
_MANY = 2000  # rows from which on outliers are tolerated, and several threads pay off
_L2 = 0.1


class Sample(NamedTuple):
    """An operator and its measured time in microseconds."""

    operator: Operator
    us: float


def read_samples(path: Path) -> tuple[str, list[Sample]]:
    """(GPU, samples of operators) in a sample file, without collectives and rows that failed."""
    gpu, samples = "", []
    for place, row in lines_of(path):
        if "gpu" in row:
            gpu = str(row["gpu"])
        elif "us" in row and row.get("op") not in COLLECTIVES:
            us = row["us"]
            if not isinstance(us, int | float) or isinstance(us, bool) or not 0 < us < 1e9:
                raise InputError(f"{place}: us = {us!r:.60} is no time; measure it again, or remove the line")
            samples.append(Sample(operator_of(row, place), float(us)))
    if not samples:
        raise InputError(f"{path}: no samples of operators in it; name a file that `lumos sample` wrote")
    return gpu, samples


class Verdict(NamedTuple):
    """The result for one family: errors on held-out shapes in percent, and why it was refused, if it was."""

    family: str
    rows: int
    error_pct: float
    median_pct: float
    refused: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        errors = {name: getattr(self, name) for name in ("error_pct", "median_pct")}
        known = {name: round(error, 3) if np.isfinite(error) else None for name, error in errors.items()}
        return {"family": self.family, "rows": self.rows, **known, "refused": self.refused}


def family_of(operator: Operator) -> str:
    """The operators that are fitted together: all layouts of a matmul, fp16 with bf16."""
    family = _FAMILY.get(operator.kind, operator.kind)
    return family if operator.dtype in ("bf16", "fp16") else f"{family}:{operator.dtype}"


def fit(
    gpu: Gpu, samples: Iterable[Sample], progress: Callable[[int, int, str], None] | None = None
) -> tuple[dict[str, Regressor], list[Verdict]]:
    """The regressors of the families that pass, and a verdict on every family.

    `progress` is called with rows done, all rows, and the family at work.
    """
    families: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        families[family_of(sample.operator)].append(sample)
    regressors, verdicts = {}, []
    done, total = 0, sum(len(rows) for rows in families.values())
    for family, rows in sorted(families.items()):
        name = _exact_name(family, rows)
        if progress is not None:
            progress(done, total, name)
        done += len(rows)
        regressor, verdict = _fit_family(gpu, name, rows)
        verdicts.append(verdict)
        if regressor is not None:
            regressors[name] = regressor
    return regressors, verdicts


def sampled_gpu(path: Path, name: str, asked: str) -> Gpu:
    """The GPU of a sample file: as asked for, or as the file names it."""
    found = find_gpu(name)
    if found is None and not asked:
        raise InputError(f"{path}: samples of {name[:100]!r}, a GPU that is not known; name the nearest with --gpu")
    return gpu_named(asked) if asked or found is None else found


def _exact_name(family: str, samples: list[Sample]) -> str:
    """The family, or its only member: samples of one matmul layout are not valid for the others."""
    kinds = {sample.operator.kind for sample in samples}
    return family if len(kinds) > 1 else family.replace(family.partition(":")[0], kinds.pop(), 1)


def _fit_family(gpu: Gpu, name: str, samples: list[Sample]) -> tuple[Regressor | None, Verdict]:
    if len(samples) < _FEWEST_SAMPLES:
        return None, Verdict(name, len(samples), np.inf, np.inf, f"fewer than {_FEWEST_SAMPLES} samples")
    chips = [chip_of(gpu, s.operator.dtype) for s in samples]
    rows = np.array([features(s.operator, chip) for s, chip in zip(samples, chips, strict=True)])
    base = np.array([roofline_us(s.operator, chip) for s, chip in zip(samples, chips, strict=True)])
    target = np.log(np.array([s.us for s in samples]) / base)
    fold = np.random.default_rng(0).integers(0, FOLDS, len(samples))
    held = fold == 0
    rounds = 160 if len(samples) < 600 else 320 if len(samples) < 3000 else 640
    errors = 100 * np.abs(np.exp(grow(rows[~held], target[~held], rounds)(rows[held]) - target[held]) - 1)
    verdict = Verdict(name, len(samples), float(errors.mean()), float(np.median(errors)), "")
    if verdict.error_pct > _LARGEST_ERROR_PCT:
        return None, verdict._replace(refused=f"error of {verdict.error_pct:.0f} % on held-out shapes")
    return Regressor(grow(rows, target, rounds), round(verdict.error_pct, 3), len(samples)), verdict


def grow(rows: Floats, target: Floats, rounds: int = 600, leaves: int = 24, rate: float = 0.06) -> Trees:
    """Boosted trees for `target`; since that is a logarithm, they minimise the relative error."""
    model = regressor()(
        loss="absolute_error" if len(rows) >= _MANY else "squared_error", max_iter=rounds, learning_rate=rate,
        max_leaf_nodes=leaves, min_samples_leaf=max(2, min(12, len(rows) // 60)), l2_regularization=_L2,
        max_features=0.5, early_stopping=False, random_state=0,
    )  # fmt: skip
    from threadpoolctl import threadpool_limits

    with threadpool_limits(None if len(rows) >= _MANY else 1):
        return flatten(model.fit(rows, target))


def regressor() -> Any:
    """scikit-learn's class that grows the trees, or OptionError with how to install it."""
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ImportError:
        raise OptionError("fitting needs scikit-learn: pip install 'lumos-sim[fit]'") from None
    return HistGradientBoostingRegressor


def flatten(model: Any) -> Trees:
    """The trees of a fitted model as arrays that need no scikit-learn.

    The nodes of all trees are in one table, the two children of a node side by side and after it.
    """
    nodes: list[tuple[int, float, int]] = []  # feature (-1: a leaf), threshold or value, place of the left child
    roots = []
    for (tree,) in model._predictors:
        roots.append(len(nodes))
        nodes.append((-1, 0.0, 0))
        waiting = [(0, roots[-1])]
        while waiting:
            index, place = waiting.pop()
            node = tree.nodes[index]
            if node["is_leaf"]:
                nodes[place] = (-1, float(node["value"]), 0)
                continue
            left = len(nodes)
            nodes[place] = (int(node["feature_idx"]), float(node["num_threshold"]), left)
            nodes += [(-1, 0.0, 0), (-1, 0.0, 0)]
            waiting += [(int(node["left"]), left), (int(node["right"]), left + 1)]
    feature, threshold, left_child = zip(*nodes, strict=True)
    return Trees(
        np.array(roots, np.int32), np.array(feature, np.int16), np.array(threshold, np.float32),
        np.array(left_child, np.int32), float(model._baseline_prediction[0, 0]),
    )  # fmt: skip
