"""Errors of predictions for published runs, each source predicted with constants fitted without it.

    python benchmarks/truth.py TRUTH_FOLDER

Prints the tables of docs/accuracy.md: errors by source, what each fitted constant is worth, and how often the 80 %
interval holds.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "calibration"))

from fit_in_step import START, TABLES, factors_with, source_of  # noqa: E402
from fit_uncertainty import by_source, fit, residuals  # noqa: E402
from lumos.data_files import read_table  # noqa: E402
from lumos.score.measured_runs import Run, read_rows, runs_of  # noqa: E402
from lumos.score.score import rank_correlation  # noqa: E402
from lumos.setup import frameworks  # noqa: E402
from lumos.step.step import simulate_step  # noqa: E402

BARS = {
    "megatron-sc21-table1": "8", "vtrain-multi-node": "10", "vtrain-single-node": "15", "mosaicml-llm-foundry": "12",
    "mlperf": "10", "nanotron-playbook-sweep, stable": "15 (median 10)", "nanotron-playbook-sweep, all": "(median 20)",
}  # fmt: skip
PEERS = {
    "megatron-sc21-table1": "10.3", "vtrain-multi-node": "15.4", "vtrain-single-node": "38.9", "mlperf": "19.3",
    "mosaicml-llm-foundry": "18.2", "nanotron-playbook-sweep, stable": "39.6", "nanotron-playbook-sweep, all": "59.4",
}  # fmt: skip
Rows = dict[str, list[tuple[Run, float]]]


def dense(run: Run) -> bool:
    return not run.setup.model.experts and run.row.get("train_mode") == "pretrain" and run.seconds > 0


def predictions(folder: Path, override: dict[str, float] | None = None) -> Rows:
    """(run, predicted seconds) of every dense pretraining run, by source; every source with its held-out constants."""
    held_out = json.loads((HERE.parent / "calibration/held_out.json").read_text())
    rows: Rows = defaultdict(list)
    for table in TABLES:
        for run in runs_of(read_rows(folder / table)):
            if isinstance(run, Run) and dense(run):
                values = held_out[source_of(run)] | (override or {})
                seconds = simulate_step(run.setup, factors_with(run, values)).us / 1e6
                rows[source_of(run)].append((run, seconds))
    sweep = rows.pop("nanotron-playbook-sweep")
    rows["nanotron-playbook-sweep, stable"] = [r for r in sweep if r[0].row.get("stable") == "true"]
    rows["nanotron-playbook-sweep, all"] = sweep
    return rows


def errors(rows: list[tuple[Run, float]]) -> np.ndarray:
    return 100 * np.array([abs(seconds / run.seconds - 1) for run, seconds in rows])


def overall(rows: Rows) -> float:
    """The mean over all rows on A100, H100, H200 and B200, the sweep's erratic rows left out."""
    kept = [
        row for name, part in rows.items() if not name.endswith("all") for row in part
        if row[0].setup.cluster.gpu in ("a100", "a100-40", "h100", "h200", "b200")
    ]  # fmt: skip
    return float(errors(kept).mean())


def show_sweep_without_its_own(folder: Path) -> None:
    """The sweep with nothing that was fitted on it or inferred for it."""
    tables = frameworks._tables()
    known = tables["nanotron"]
    print("\n| nanotron sweep | stable rows, mean % | all rows, median % |\n|---|---|---|")
    efa = read_table("fabrics.toml")["efa"]
    shipped = efa["beside"]
    for name, facts, beside in (
        ("as shipped", known, shipped),
        ("without the share beside kernels", known, 1.0),
        ("and without `pipeline_drag`", replace(known, pipeline_drag=0.0), 1.0),
        ("and on InfiniBand", replace(known, pipeline_drag=0.0, network=""), 1.0),
    ):
        tables["nanotron"], efa["beside"] = facts, beside
        frameworks.framework_named.cache_clear()
        rows = predictions(folder)
        stable, every = (errors(rows[f"nanotron-playbook-sweep, {part}"]) for part in ("stable", "all"))
        print(f"| {name} | {stable.mean():.1f} | {np.median(every):.1f} |")
    tables["nanotron"], efa["beside"] = known, shipped
    frameworks.framework_named.cache_clear()


def show_experts(folder: Path) -> None:
    """Mixtures of experts and adapters, with the shipped constants."""
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs_of(read_rows(folder / "measured_runs.csv")):
        if isinstance(run, Run) and run.seconds > 0 and not dense(run):
            kind = "mixture of experts" if run.setup.model.experts else run.setup.train.mode
            found[f"{kind}, {run.source}"].append(100 * abs(simulate_step(run.setup).us / 1e6 / run.seconds - 1))
    print("\n| other runs | rows | mean error, % | median, % |\n|---|---|---|---|")
    for name, values in sorted(found.items()):
        print(f"| {name} | {len(values)} | {np.mean(values):.1f} | {np.median(values):.1f} |")


def show_coverage(folder: Path) -> None:
    """How often the 80 % interval held, the variances that judge a source fitted without it."""
    parts, logs, sources, _ = residuals(folder)
    weights = by_source(sources)
    inside = np.zeros(len(logs), bool)
    print("\n| source | rows | inside the 80 % interval, % |\n|---|---|---|")
    for name in sorted(set(sources)):
        held = sources == name
        variance, scale = fit(parts[~held], logs[~held], weights[~held])
        inside[held] = np.abs(logs[held]) <= scale * np.sqrt(parts[held] @ variance)
        print(f"| {name} | {held.sum()} | {100 * inside[held].mean():.0f} |")
    print(f"| all rows, mixtures of experts and erratic ones too | {len(logs)} | {100 * inside.mean():.1f} |")


def main(folder: str) -> None:
    rows = predictions(Path(folder))
    print("| source | rows | mean error, % | median, % | rank correlation | best peer | bar |")
    print("|---|---|---|---|---|---|---|")
    for name, part in sorted(rows.items()):
        found = errors(part)
        rank = rank_correlation([(r.model, r.gpus, r.seconds, s) for r, s in part])
        shown = f"{rank:.2f}" if rank == rank else ""
        print(f"| {name} | {len(part)} | {found.mean():.1f} | {np.median(found):.1f} | {shown} | "
              f"{PEERS.get(name, '')} | {BARS.get(name, '')} |")  # fmt: skip
    base = overall(rows)
    print(f"\nAll rows on A100, H100, H200 and B200, the sweep's erratic ones left out: mean {base:.1f} % (bar 12).\n")
    print("| constant | fitted | worth: overall mean without it, % |\n|---|---|---|")
    shipped = json.loads((HERE.parent / "src/lumos/data/in_step.json").read_text())
    for key, start in START.items():
        table, _, name = key.partition(".")
        neutral = 1.0 if key != "h100.matrix" else start
        print(f"| {key} | {shipped[table][name]} | {overall(predictions(Path(folder), {key: neutral})):.1f} |")
    show_sweep_without_its_own(Path(folder))
    show_experts(Path(folder))
    show_coverage(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1])
