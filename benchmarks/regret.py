"""How much slower the configuration that we rank first is than the best that was measured.

    python benchmarks/regret.py TRUTH_FOLDER

For every group of measured runs of one model, number of GPUs and batch: the measured step time of the configuration
with the shortest predicted one, over the shortest measured. Constants come from the other sources
(calibration/held_out.json).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from lumos.score.measured_runs import Run

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "calibration"))

from published import SWEEP, predictions  # noqa: E402

Rows = dict[str, list[tuple[Run, float]]]
BARS = {"vtrain-multi-node": "1.3", f"{SWEEP}, stable": "5"}
STALL_S = 0.3  # for every turn of a pipeline: far beyond what any message takes

Group = tuple[str, int, int]


def predicted(folder: Path) -> Rows:
    """(run, predicted seconds) of every dense pretraining run, by source; of the sweep all and the stable ones."""
    rows: Rows = defaultdict(list)
    for one in predictions(folder):
        if one.source != SWEEP:
            rows[one.source].append((one.run, one.seconds))
            continue
        rows[f"{SWEEP}, all"].append((one.run, one.seconds))
        if not one.is_erratic:
            rows[f"{SWEEP}, stable"].append((one.run, one.seconds))
    return rows


def groups_of(rows: list[tuple[Run, float]]) -> dict[Group, list[tuple[Run, float]]]:
    found: dict[Group, list[tuple[Run, float]]] = defaultdict(list)
    for run, seconds in rows:
        found[run.model, run.gpus, run.setup.train.global_batch].append((run, seconds))
    return {group: part for group, part in found.items() if len(part) > 1}


def regret(part: list[tuple[Run, float]]) -> float:
    chosen = min(part, key=lambda row: row[1])[0]
    return 100 * (chosen.seconds / min(run.seconds for run, _ in part) - 1)


def stalled(run: Run, seconds: float) -> bool:
    """Whether a run took so much longer that something stood still at every turn."""
    turns = run.setup.train.microbatches + run.setup.parallel.pp - 1
    return run.seconds - seconds > STALL_S * turns


def show(name: str, groups: dict[Group, list[tuple[Run, float]]]) -> None:
    print("\n| group | configurations | regret, % | a random one, % |\n|---|---|---|---|")
    for (model, gpus, batch), part in sorted(groups.items()):
        best = min(run.seconds for run, _ in part)
        typical = 100 * (np.median([run.seconds for run, _ in part]) / best - 1)
        print(f"| {name}: {model}, {gpus} GPUs, batch {batch} | {len(part)} | {regret(part):.1f} | {typical:.0f} |")


def main(folder: str) -> None:
    rows = predicted(Path(folder))
    print("| source | groups | mean regret, % | median, % | worst, % | bar |\n|---|---|---|---|---|---|")
    for name in (f"{SWEEP}, all", f"{SWEEP}, stable", "vtrain-multi-node", "vtrain-single-node"):
        found = [regret(part) for part in groups_of(rows[name]).values()]
        print(f"| {name} | {len(found)} | {np.mean(found):.1f} | {np.median(found):.1f} | {max(found):.1f} | "
              f"{BARS.get(name, '')} |")  # fmt: skip
    sound = [row for row in rows[f"{SWEEP}, all"] if not stalled(*row)]
    found = [regret(part) for part in groups_of(sound).values()]
    print(f"| {SWEEP}, all that did not stall | {len(found)} | {np.mean(found):.1f} | {np.median(found):.1f} | "
          f"{max(found):.1f} | |")  # fmt: skip
    lost = [row for row in rows[f"{SWEEP}, all"] if stalled(*row)]
    extra = [1e3 * (run.seconds - s) / (run.setup.train.microbatches + run.setup.parallel.pp - 1) for run, s in lost
             if run.setup.parallel.pp > 2]  # fmt: skip
    low, high = np.percentile(extra, 10), np.percentile(extra, 90)
    print(
        f"\n{len(lost)} of {len(rows[f'{SWEEP}, all'])} runs of the sweep stalled: with over two stages they ran "
        f"{low:.0f} to {high:.0f} ms longer for every turn, whatever the model, the micro-batch and the division."
    )
    show("vTrain", groups_of(rows["vtrain-multi-node"]))
    show("sweep, stable", groups_of(rows[f"{SWEEP}, stable"]))


if __name__ == "__main__":
    main(sys.argv[1])
