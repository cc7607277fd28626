"""Fits the in-step factors that published runs determine, and the same without each source in turn.

    python calibration/fit_in_step.py TRUTH_FOLDER

Writes two factors of src/lumos/data/in_step.json and calibration/held_out.json: for every source, the factors fitted
on all the others, with which benchmarks/truth.py scores it. What was measured on a GPU (hopper.matrix, launch gaps) is
left as it is; there is no factor for a family of GPUs without published runs, such as AMD's.
"""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import log, sqrt
from pathlib import Path
from statistics import mean, stdev

from lumos.costs.energy import InStepFactors, in_step_factors
from lumos.score.measured_runs import Run, read_rows, runs_of
from lumos.step.step import simulate_step
from shipped import ship

HERE = Path(__file__).parent
TABLES = ("measured_runs.csv", "nanotron_sweep.csv", "vtrain_single_node.csv")
PUBLISHED = HERE / "published_runs.csv"
ROWS = 40  # of each source
CLIP = 0.4  # of the logarithm of predicted over measured: an erratic run must not pull
START = {"ampere.sustained": 0.8, "all.penalty": 1.1}
STEPS = (0.08, 0.03)


def chosen_runs(folder: Path) -> dict[str, list[Run]]:
    """Up to ROWS dense pretraining runs of every source; MLPerf's rounds count as one."""
    by_source: dict[str, list[Run]] = {}
    for table in (*(folder / name for name in TABLES), PUBLISHED):
        for run in runs_of(read_rows(table)):
            if isinstance(run, Run) and is_scored(run):
                by_source.setdefault(source_of(run), []).append(run)
    draw = random.Random(0)
    return {name: draw.sample(runs, min(ROWS, len(runs))) for name, runs in sorted(by_source.items())}


def source_of(run: Run) -> str:
    return "mlperf" if run.source.startswith("mlperf") else run.source


def is_scored(run: Run) -> bool:
    """Dense pretraining on A100, H100, H200 or B200; of the sweep, configurations whose repeats agree."""
    gpu = run.setup.cluster.gpu in ("a100", "a100-40", "h100", "h200", "b200")
    dense = not run.setup.model.experts and run.row.get("train_mode") == "pretrain"
    return gpu and dense and run.row.get("stable", "true") == "true" and run.seconds > 0


def factors_with(run: Run, values: dict[str, float]) -> InStepFactors:
    """The factors of a run's GPU, with these in place of the shipped ones."""
    gpu = run.setup.cluster.accelerator
    known = in_step_factors(gpu)
    changes = {"penalty": values["all.penalty"]}
    if gpu.family == "ampere":
        changes["sustained"] = values["ampere.sustained"]
    return replace(known, **changes)


def errors(runs: dict[str, list[Run]], values: dict[str, float]) -> list[float]:
    """The mean error of every source."""
    means = []
    for rows in runs.values():
        logs = [abs(log(simulate_step(r.setup, factors_with(r, values)).us / 1e6 / r.seconds)) for r in rows]
        means.append(mean(min(CLIP, e) for e in logs))
    return means


def is_better(trial: list[float], best: list[float]) -> bool:
    """Whether errors fall by more than the standard error of the difference, so that noise moves nothing."""
    gains = [before - after for before, after in zip(best, trial, strict=True)]
    return mean(gains) > stdev(gains) / sqrt(len(gains))


def fit(runs: dict[str, list[Run]]) -> dict[str, float]:
    """Coordinate descent in factors."""
    values, best = dict(START), errors(runs, START)
    for step in STEPS:
        for key in START:
            for factor in (1 + step, 1 / (1 + step)):
                while True:
                    trial = values | {key: round(values[key] * factor, 4)}
                    score = errors(runs, trial)
                    if not is_better(score, best):
                        break
                    values, best = trial, score
    return values


def without(job: tuple[str, dict[str, list[Run]]]) -> tuple[str, dict[str, float]]:
    name, runs = job
    values = fit({source: rows for source, rows in runs.items() if source != name})
    print(name or "all", values, flush=True)
    return name, values


def main(folder: str) -> None:
    runs = chosen_runs(Path(folder))
    with ProcessPoolExecutor(2) as pool:
        fitted = dict(pool.map(without, [("", runs), *((name, runs) for name in runs)]))
    ship("in_step.json", fitted.pop(""))
    (HERE / "held_out.json").write_text(json.dumps(fitted, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
