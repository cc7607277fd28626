"""Published runs, each predicted with constants fitted without its source.

What `fit_uncertainty.py` fits intervals on, and `benchmarks/truth.py` measures errors on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from math import log
from pathlib import Path
from typing import NamedTuple

from fit_in_step import HERE, START, TABLES, factors_with, source_of
from lumos.costs.energy import InStepFactors
from lumos.errors import LumosError
from lumos.prediction.interval import parts_of
from lumos.score.measured_runs import Row, Run, read_rows, run_of
from lumos.step.step import simulate_step
from shipped import shipped

OURS = (HERE / "published_runs.csv", HERE.parent / "tests/data/accuracy/one_h200.csv")  # tables of the project itself
SWEEP = "nanotron-playbook-sweep"
CHUNK = 64  # rows that a process takes at once; neighbours share prices


class Predicted(NamedTuple):
    """A measured run and its prediction."""

    run: Run
    seconds: float
    parts: dict[str, float]  # what makes it hard to predict

    @property
    def publication(self) -> str:
        """What is held apart together: whoever measured it did so with one set of machines and habits."""
        return source_of(self.run)

    @property
    def source(self) -> str:
        """The source that it is scored with: mixtures of experts and fine-tuning are apart from dense pretraining."""
        setup = self.run.setup
        kind = "experts" if setup.model.experts else "" if setup.train.mode == "pretrain" else setup.train.mode
        return f"{self.publication}, {kind}" if kind else self.publication

    @property
    def is_erratic(self) -> bool:
        """Of the sweep: it ran once, or its repeats disagree."""
        return self.run.row.get("stable", "true") != "true"

    @property
    def log_error(self) -> float:
        """Of measured over predicted: positive where Lumos is too fast."""
        return log(self.run.seconds / self.seconds)


def predictions(folder: Path, override: dict[str, float] | None = None) -> list[Predicted]:
    """Every run that was measured and can be described; `override` replaces fitted constants."""
    rows = sorted(_rows(folder), key=lambda row: (row["source"], row["model_name"], row["n_gpus"], row["tp"]))
    chunks = [rows[i : i + CHUNK] for i in range(0, len(rows), CHUNK)]
    with ProcessPoolExecutor(2) as pool:
        return [one for part in pool.map(_predicted, chunks, [override or {}] * len(chunks)) for one in part]


def _rows(folder: Path) -> Iterator[Row]:
    for path in dict.fromkeys((*(folder / name for name in TABLES), *OURS)):
        if path.exists():
            yield from read_rows(path)


def _predicted(rows: list[Row], override: dict[str, float]) -> list[Predicted]:
    held_out = json.loads((HERE / "held_out.json").read_text())
    found = []
    for row in rows:
        try:
            run = run_of(row, row["id"])
        except LumosError:
            continue
        if run.seconds > 0:
            step = simulate_step(run.setup, _factors(run, held_out, override))
            found.append(Predicted(run, step.us / 1e6, parts_of(step, len(run.notes))))
    return found


def _factors(run: Run, held_out: dict[str, dict[str, float]], override: dict[str, float]) -> InStepFactors:
    """The factors without the run's source; nothing was fitted on a source that is not listed."""
    known = held_out.get(source_of(run)) or _fitted()
    return factors_with(run, known | override)


def _fitted() -> dict[str, float]:
    table = shipped("in_step.json")
    return {key: table[key.partition(".")[0]][key.partition(".")[2]] for key in START}
