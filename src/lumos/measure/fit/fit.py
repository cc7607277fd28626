"""Fit: samples to a cost model, with the error on shapes held apart; a family that fails it is refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lumos.cost.features import features, roofline_us
from lumos.cost.operator_model import Regressor, chip_of
from lumos.errors import InputError
from lumos.measure.fit.boosting import grow
from lumos.measure.fit.samples import Sample
from lumos.program.operators import Operator
from lumos.setup.gpus import Gpu, find_gpu, gpu_named

FOLDS = 5
_FEWEST = 40  # rows of a family; fewer are not fitted
_BAR_PCT = 25.0  # a family whose held-out error is larger is refused
_FAMILY = {"gemm_tn": "gemm", "gemm_nn": "gemm", "gemm_nt": "gemm"}


class Verdict(NamedTuple):
    """What became of one family: held-out errors in percent, and why it was refused, if it was."""

    family: str
    rows: int
    error_pct: float
    median_pct: float
    refused: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in which there is no infinity."""
        errors = {name: getattr(self, name) for name in ("error_pct", "median_pct")}
        known = {name: round(error, 3) if np.isfinite(error) else None for name, error in errors.items()}
        return {"family": self.family, "rows": self.rows, **known, "refused": self.refused}


def family_of(operator: Operator) -> str:
    """The name under which operators are fitted together."""
    family = _FAMILY.get(operator.kind, operator.kind)
    return family if operator.dtype in ("bf16", "fp16") else f"{family}:{operator.dtype}"


def fit(
    gpu: Gpu, samples: Iterable[Sample], progress: Callable[[int, int, str], None] | None = None
) -> tuple[dict[str, Regressor], list[Verdict]]:
    """The regressors that pass, and a verdict on every family; `progress` is told rows done, all rows, the family."""
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
    """The GPU that samples are of: as asked, or as the file says it."""
    found = find_gpu(name)
    if found is None and not asked:
        raise InputError(f"{path}: samples of {name[:100]!r}, a GPU that is not known; say the nearest with --gpu")
    return gpu_named(asked) if asked or found is None else found


def _rounds(samples: int) -> int:
    """Trees that a family of this size is worth."""
    return 160 if samples < 600 else 320 if samples < 3000 else 640


def _exact_name(family: str, samples: list[Sample]) -> str:
    """The family, or its only member: products of one layout do not speak for the others."""
    kinds = {sample.operator.kind for sample in samples}
    return family if len(kinds) > 1 else family.replace(family.partition(":")[0], kinds.pop(), 1)


def _fit_family(gpu: Gpu, name: str, samples: list[Sample]) -> tuple[Regressor | None, Verdict]:
    if len(samples) < _FEWEST:
        return None, Verdict(name, len(samples), np.inf, np.inf, f"fewer than {_FEWEST} samples")
    chips = [chip_of(gpu, s.operator.dtype) for s in samples]
    rows = np.array([features(s.operator, chip) for s, chip in zip(samples, chips, strict=True)])
    base = np.array([roofline_us(s.operator, chip) for s, chip in zip(samples, chips, strict=True)])
    target = np.log(np.array([s.us for s in samples]) / base)
    fold = np.random.default_rng(0).integers(0, FOLDS, len(samples))
    held = fold == 0
    rounds = _rounds(len(samples))
    errors = 100 * np.abs(np.exp(grow(rows[~held], target[~held], rounds)(rows[held]) - target[held]) - 1)
    verdict = Verdict(name, len(samples), float(errors.mean()), float(np.median(errors)), "")
    if verdict.error_pct > _BAR_PCT:
        return None, verdict._replace(refused=f"off by {verdict.error_pct:.0f} % on shapes held apart")
    return Regressor(grow(rows, target, rounds), round(verdict.error_pct, 3), len(samples)), verdict
