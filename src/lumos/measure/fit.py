"""Fit: operators from samples, with the error on held-out shapes; families with too large an error are refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lumos.costs.operator_model import Floats, Regressor, Trees, chip_of, features, roofline_us
from lumos.errors import OptionError
from lumos.measure.fit_samples import Sample
from lumos.program.operators import Operator
from lumos.setup.gpus import Gpu

Progress = Callable[[int, int, str], None]

FOLDS = 5
_FEWEST_SAMPLES = 16  # of a family
_FEW_SAMPLES = 600  # of a family: below, its error is that over several folds
_SMALL_FOLDS = 3
_ROBUST_SAMPLES = 100  # of a CPU, which other programs disturb: from here on outliers count less
_FEWER_SAMPLES = 200  # of a family: below, small trees err less
_LARGEST_ERROR_PCT = 25.0  # on held-out shapes: from here on, the model of another GPU is better
# There is no other model of a CPU. In the middle of all shapes: where tensors outgrow what malloc keeps, times jump
# tenfold, and single shapes on the wrong side of that say little about the rest.
_LARGEST_CPU_ERROR_PCT = 60.0
_FAMILY = {
    "gemm_tn": "gemm", "gemm_nn": "gemm", "gemm_nt": "gemm", "grouped_gemm_nn": "grouped_gemm",
    "grouped_gemm_nt": "grouped_gemm",
}  # fmt: skip
_ROWS_PER_LEAF = 750  # as many rows take as long as what every leaf of a tree takes besides them
_MANY = 2000  # rows from which on outliers are tolerated
# Threads wait for each other in every round: on two busy cores they take 40 times as long as one thread for 5,000 rows.
_THREADED = 200_000  # rows from which on several threads pay off
_L2 = 0.1
_FEW_LEAVES, _LEAVES = 4, 24  # of a tree


class Verdict(NamedTuple):
    """The result for one family: errors on held-out shapes in percent, and why it was refused, if it was."""

    family: str
    rows: int
    error_pct: float
    median_pct: float
    refused: str
    twice_pct: float = np.inf  # the mean error to be expected of twice the rows, by the error of half of them

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        errors = {name: getattr(self, name) for name in ("error_pct", "median_pct", "twice_pct")}
        known = {name: round(error, 3) if np.isfinite(error) else None for name, error in errors.items()}
        return {"family": self.family, "rows": self.rows, **known, "refused": self.refused}


def family_of(operator: Operator) -> str:
    """The operators that are fitted together: all layouts of a matmul, fp16 with bf16."""
    family = _FAMILY.get(operator.kind, operator.kind)
    return family if operator.dtype in ("bf16", "fp16") else f"{family}:{operator.dtype}"


def fit(
    gpu: Gpu, samples: Iterable[Sample], progress: Progress | None = None
) -> tuple[dict[str, Regressor], list[Verdict]]:
    """The regressors of the families that pass, and a verdict on every family.

    `progress` is called with the work done, all work, and the family at work. Small families come first, so that the
    time that all take can be told early.
    """
    families: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        families[family_of(sample.operator)].append(sample)
    fitted = {}
    done, total = 0, sum(_work(len(rows)) for rows in families.values())
    for family, rows in sorted(families.items(), key=lambda item: (len(item[1]), item[0])):
        name = _exact_name(family, rows)
        fitted[family] = name, *_fit_family(gpu, name, rows, partial(_report, progress, name, done, total))
        done += _work(len(rows))
    ordered = [fitted[family] for family in sorted(fitted)]
    regressors = {name: regressor for name, regressor, _ in ordered if regressor is not None}
    return regressors, [verdict for _, _, verdict in ordered]


def _report(progress: Progress | None, name: str, before: int, total: int, done: int) -> None:
    if progress is not None:
        progress(before + done, total, name)


def _work(rows: int) -> int:
    """How much work a family of so many rows is, in rows of one round."""
    return sum(_work_of(count) for count in _growths(rows)) if rows >= _FEWEST_SAMPLES else 0


def _growths(rows: int) -> list[int]:
    """How many rows the trees of a family are grown from, one time after the other: all of them at last."""
    folds, of = (_SMALL_FOLDS, _SMALL_FOLDS) if rows < _FEW_SAMPLES else (1, FOLDS)
    learnt = rows - rows // of
    return [*([learnt, learnt // 2] * folds), rows]


def _work_of(rows: int) -> int:
    leaves = _FEW_LEAVES if rows < _FEWER_SAMPLES else _LEAVES
    return _rounds(rows) * (rows + leaves * _ROWS_PER_LEAF)


def _rounds(rows: int) -> int:
    if rows < _FEWER_SAMPLES:
        return 80
    return 160 if rows < _FEW_SAMPLES else 320 if rows < 3000 else 640


def _exact_name(family: str, samples: list[Sample]) -> str:
    """The family, or its only member: samples of one matmul layout are not valid for the others."""
    kinds = {sample.operator.kind for sample in samples}
    return family if len(kinds) > 1 else family.replace(family.partition(":")[0], kinds.pop(), 1)


def _fit_family(
    gpu: Gpu, name: str, samples: list[Sample], report: Callable[[int], None]
) -> tuple[Regressor | None, Verdict]:
    report(0)
    if len(samples) < _FEWEST_SAMPLES:
        return None, Verdict(name, len(samples), np.inf, np.inf, f"fewer than {_FEWEST_SAMPLES} samples")
    chips = [chip_of(gpu, s.operator.dtype) for s in samples]
    rows = np.array([features(s.operator, chip) for s, chip in zip(samples, chips, strict=True)])
    base = np.array([roofline_us(s.operator, chip) for s, chip in zip(samples, chips, strict=True)])
    target = np.log(np.array([s.us for s in samples]) / base)
    errors, errors_of_half = _held_out(rows, target, gpu.is_cpu, report)
    error, half = float(errors.mean()), float(errors_of_half.mean())
    verdict = Verdict(name, len(samples), error, float(np.median(errors)), "", error * min(1.0, error / half))
    if gpu.is_cpu and verdict.median_pct > _LARGEST_CPU_ERROR_PCT:
        return None, verdict._replace(refused=f"median error of {verdict.median_pct:.0f} % on held-out shapes")
    if not gpu.is_cpu and error > _LARGEST_ERROR_PCT:
        return None, verdict._replace(refused=f"error of {error:.0f} % on held-out shapes")
    sizes = np.array([s.operator.shape for s in samples], float)
    least, most = tuple(sizes.min(0).tolist()), tuple(sizes.max(0).tolist())
    return Regressor(_grown(rows, target, gpu.is_cpu), round(error, 3), len(samples), least, most), verdict


def _grown(rows: Floats, target: Floats, disturbed: bool) -> Trees:
    """As many and as large trees as so many rows can tell; `disturbed` rows may be far too slow, some of them."""
    robust = disturbed and len(rows) >= _ROBUST_SAMPLES
    if len(rows) < _FEWER_SAMPLES:
        return grow(rows, target, _rounds(len(rows)), leaves=_FEW_LEAVES, rate=0.12, robust=robust)
    return grow(rows, target, _rounds(len(rows)), robust=robust)


def _held_out(rows: Floats, target: Floats, disturbed: bool, report: Callable[[int], None]) -> tuple[Floats, Floats]:
    """Errors in percent on shapes that were held apart, with all the others to learn from, and with half of them.

    Large families lose one fold of shapes; small ones lose every fold in turn.
    """
    draw = np.random.default_rng(0)
    small = len(rows) < _FEW_SAMPLES
    fold = draw.integers(0, FOLDS, len(rows)) if not small else draw.permutation(len(rows)) % _SMALL_FOLDS
    found: tuple[list[Floats], list[Floats]] = ([], [])
    done, parts = 0, iter(_growths(len(rows)))
    for held_fold in range(_SMALL_FOLDS if small else 1):
        held = fold == held_fold
        learnt = np.flatnonzero(~held)
        for errors, some in zip(found, (learnt, learnt[::2]), strict=True):
            guess = _grown(rows[some], target[some], disturbed)(rows[held])
            errors.append(100 * np.abs(np.exp(guess - target[held]) - 1))
            done += _work_of(next(parts))
            report(done)
    return np.concatenate(found[0]), np.concatenate(found[1])


def grow(
    rows: Floats, target: Floats, rounds: int = 600, leaves: int = _LEAVES, rate: float = 0.06, robust: bool = False
) -> Trees:
    """Boosted trees for `target`; since that is a logarithm, they minimise the relative error."""
    model = regressor()(
        loss="absolute_error" if robust or len(rows) >= _MANY else "squared_error", max_iter=rounds, learning_rate=rate,
        max_leaf_nodes=leaves, min_samples_leaf=max(2, min(12, len(rows) // 60)), l2_regularization=_L2,
        max_features=0.5, early_stopping=False, random_state=0,
    )  # fmt: skip
    from threadpoolctl import threadpool_limits

    with threadpool_limits(None if len(rows) >= _THREADED else 1):
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
