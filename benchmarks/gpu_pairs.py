"""Errors of comparisons between GPUs: published runs that differ in nothing but the GPU.

    python benchmarks/gpu_pairs.py TRUTH_FOLDER

The ratio of two predicted step times against that of the measured ones; every source with constants fitted without it.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "calibration"))

from fit_in_step import factors_with, source_of  # noqa: E402
from lumos.score.measured_runs import Run, read_rows, runs_of  # noqa: E402
from lumos.step.step import simulate_step  # noqa: E402


class Pair(NamedTuple):
    """One run on two GPUs: how much faster the second is."""

    gpus: tuple[str, str]
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)

    @property
    def same_winner(self) -> bool:
        return (self.predicted > 1) == (self.measured > 1)


def pairs(folder: Path) -> list[Pair]:
    """All pairs of runs of one source with the same model, training, parallelism and number of GPUs.

    Where a run was measured several times on a GPU, the fastest counts.
    """
    held_out = json.loads((HERE.parent / "calibration/held_out.json").read_text())
    groups: dict[str, dict[str, Run]] = defaultdict(dict)
    for run in runs_of(read_rows(folder / "measured_runs.csv")):
        if isinstance(run, Run) and run.seconds > 0:
            setup = run.setup
            same = (setup.model, setup.train, setup.parallel, setup.cluster.gpus)
            on = groups[f"{source_of(run)} {[getattr(part, 'model_dump', lambda part=part: part)() for part in same]}"]
            known = on.get(setup.cluster.gpu)
            on[setup.cluster.gpu] = run if known is None or run.seconds < known.seconds else known
    found = []
    for on in groups.values():
        for first, second in combinations(sorted(on), 2):
            a, b = on[first], on[second]
            seconds = [simulate_step(run.setup, factors_with(run, held_out[source_of(run)])).us / 1e6 for run in (a, b)]
            found.append(Pair((first, second), a.seconds / b.seconds, seconds[0] / seconds[1]))
    return found


def main(folder: str) -> None:
    by_gpus: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs(Path(folder)):
        by_gpus[pair.gpus].append(pair)
    everything = [pair for part in by_gpus.values() for pair in part]
    print("| GPUs | pairs | mean error of the ratio, % | largest, % | faster one right |\n|---|---|---|---|---|")
    rows = {f"{a}, {b}": part for (a, b), part in sorted(by_gpus.items())} | {"**all**": everything}
    for name, part in rows.items():
        errors = 100 * np.array([pair.error for pair in part])
        right = sum(pair.same_winner for pair in part)
        print(f"| {name} | {len(part)} | {errors.mean():.1f} | {errors.max():.1f} | {right} of {len(part)} |")


if __name__ == "__main__":
    main(sys.argv[1])
