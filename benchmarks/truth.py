"""Errors of predictions for published runs, each source predicted with constants and intervals fitted without it.

    python benchmarks/truth.py TRUTH_FOLDER [--json after.json] [--against before.json] [--constants]

Prints the tables of docs/forecasts.md: for every source the error, the bias (negative where predictions are too fast),
the rank correlation and how often the 80 % interval holds, then which bars are missed. `--json` also writes all that
with the prediction of every run, and `--against` shows what changed since such a file was written. `--constants` adds
what each fitted constant is worth.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "calibration"))

from fit_in_step import START  # noqa: E402
from fit_uncertainty import held_out, residuals  # noqa: E402
from lumos.prediction.interval import Spread  # noqa: E402
from lumos.score.score import rank_correlation  # noqa: E402
from published import SWEEP, Predicted, predictions  # noqa: E402

PEERS = {
    "megatron-sc21-table1": "10.3", "vtrain-multi-node": "15.4", "vtrain-single-node": "38.9", "mlperf": "19.3",
    "mosaicml-llm-foundry": "18.2", SWEEP: "39.6", f"{SWEEP}, erratic too": "59.4",
}  # fmt: skip
USUAL = ("a100", "a100-40", "h100", "h200", "b200")  # GPUs of the overall mean
OVERALL, MEAN, BIAS, EXPERTS, COVERED = 10.0, 15.0, 8.0, 15.0, (70.0, 90.0)  # bars, in percent
FEWEST, FEWEST_TO_COVER = 10, 20  # rows from which a source has bars


class Scored(NamedTuple):
    """A published run, its prediction, and the interval that was fitted without its publication."""

    row: Predicted
    spread: Spread

    @property
    def error(self) -> float:
        return 100 * (self.row.seconds / self.row.run.seconds - 1)

    @property
    def is_inside(self) -> bool:
        low, high = self.spread.of(self.row.seconds)
        return low <= self.row.run.seconds <= high

    def as_dict(self) -> dict[str, Any]:
        run, (low, high) = self.row.run, self.spread.of(self.row.seconds)
        found = {"id": run.id, "source": self.row.source, "measured": run.seconds, "predicted": self.row.seconds}
        return found | {"low": low, "high": high, "erratic": self.row.is_erratic}


def scored_runs(folder: Path) -> list[Scored]:
    rows = predictions(folder)
    return [Scored(*pair) for pair in zip(rows, held_out(residuals(rows)), strict=True)]


def by_source(rows: Sequence[Scored]) -> dict[str, list[Scored]]:
    """The runs of every source; the sweep without its erratic runs, and with them."""
    found: dict[str, list[Scored]] = defaultdict(list)
    for one in rows:
        if not one.row.is_erratic:
            found[one.row.source].append(one)
        if one.row.source == SWEEP:
            found[f"{SWEEP}, erratic too"].append(one)
    return dict(sorted(found.items()))


def summary(rows: Sequence[Scored]) -> dict[str, Any]:
    """Errors in percent; `bias` is that of the geometric mean of predicted over measured."""
    errors = np.array([one.error for one in rows])
    rank = rank_correlation([(r.run.model, r.run.gpus, r.run.seconds, r.seconds) for r, _ in rows])
    return {
        "rows": len(rows),
        "mean": float(np.abs(errors).mean()),
        "median": float(np.median(np.abs(errors))),
        "bias": 100 * (exp(-float(np.mean([one.row.log_error for one in rows]))) - 1),
        "signed_mean": float(errors.mean()),
        "rank": rank if rank == rank else None,
        "inside": 100 * float(np.mean([one.is_inside for one in rows])),
    }


def totals(sources: dict[str, list[Scored]]) -> dict[str, float]:
    """Means over all rows of a kind, the sweep's erratic rows left out."""
    steady = [one for name, part in sources.items() if name != f"{SWEEP}, erratic too" for one in part]
    dense = [one for one in steady if one.row.source == one.row.publication]
    usual = [one for one in dense if one.row.run.setup.cluster.gpu in USUAL]
    experts = [one for one in steady if one.row.run.setup.model.experts]
    parts = {"dense": usual, "every dense run": dense, "experts": experts, "everything": steady}
    found = {name: float(np.abs([one.error for one in part]).mean()) for name, part in parts.items() if part}
    return found | {"sources": float(np.mean([summary(part)["mean"] for part in sources.values()]))}


def missed(sources: dict[str, dict[str, Any]], overall: dict[str, float]) -> Iterator[str]:
    """The bars that are not met, in words."""
    if overall["dense"] > OVERALL:
        yield f"dense runs: mean error {overall['dense']:.1f} % (bar {OVERALL:g})"
    if overall.get("experts", 0.0) > EXPERTS:
        yield f"mixtures of experts: mean error {overall['experts']:.1f} % (bar {EXPERTS:g})"
    for name, one in sources.items():
        if name != f"{SWEEP}, erratic too" and one["rows"] >= FEWEST:
            if one["mean"] > MEAN:
                yield f"{name}: mean error {one['mean']:.1f} % (bar {MEAN:g})"
            if abs(one["bias"]) > BIAS:
                yield f"{name}: bias {one['bias']:+.1f} % (bar ±{BIAS:g})"
        if one["rows"] >= FEWEST_TO_COVER and not COVERED[0] <= one["inside"] <= COVERED[1]:
            yield f"{name}: {one['inside']:.0f} % inside the interval (bar {COVERED[0]:g} to {COVERED[1]:g})"


def show(answer: dict[str, Any], before: dict[str, Any]) -> None:
    """The table of sources, the means, and the bars that are missed; what changed goes in brackets."""
    print("| source | rows | mean error, % | median, % | bias, % | signed mean, % | rank correlation "
          "| inside the 80 % interval, % | best peer, mean % |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for name, one in answer["sources"].items():
        was = before.get("sources", {}).get(name, {})
        cells = [_cell(one, was, key, form) for key, form in
                 (("mean", ".1f"), ("median", ".1f"), ("bias", "+.1f"), ("signed_mean", "+.1f"), ("rank", ".2f"),
                  ("inside", ".0f"))]  # fmt: skip
        print(f"| {name} | {one['rows']} | {' | '.join(cells)} | {PEERS.get(name, '')} |")
    mean, was = answer["means"], before.get("means", {})
    words = {
        "dense": "dense pretraining on A100, H100, H200 and B200", "every dense run": "on every GPU",
        "experts": "mixtures of experts", "everything": "all rows", "sources": "all sources alike",
    }  # fmt: skip
    told = [f"{words[key]} {_cell(mean, was, key, '.1f')} %" for key in words if key in mean]
    print(f"\nMean error, the sweep's erratic runs left out: {'; '.join(told)}.\n")
    print("Bars that are missed:\n" if answer["missed"] else "No bar is missed.")
    for text in answer["missed"]:
        print(f"- {text}")


def _cell(now: dict[str, Any], before: dict[str, Any], key: str, form: str) -> str:
    value, was = now[key], before.get(key)
    if value is None:
        return ""
    shown = f"{value:{form}}"
    return shown if was is None or f"{was:{form}}" == shown else f"{shown} (was {was:{form}})"


def show_constants(folder: Path, base: float) -> None:
    """What each fitted constant is worth."""
    print("\n| constant | fitted | overall mean with it, % | without it, % |\n|---|---|---|---|")
    shipped = json.loads((HERE.parent / "src/lumos/data/in_step.json").read_text())
    for key, start in START.items():
        table, _, name = key.partition(".")
        neutral = 1.0 if key != "h100.matrix" else start
        rows = [Scored(row, Spread(1.0, 1.0)) for row in predictions(folder, {key: neutral})]
        print(f"| {key} | {shipped[table][name]} | {base:.1f} | {totals(by_source(rows))['dense']:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--constants", action="store_true")
    options = parser.parse_args()
    before = json.loads(options.against.read_text()) if options.against else {}
    rows = scored_runs(options.folder)
    sources = by_source(rows)
    answer: dict[str, Any] = {"sources": {name: summary(part) for name, part in sources.items()}}
    answer["means"] = totals(sources)
    answer["missed"] = list(missed(answer["sources"], answer["means"]))
    show(answer, before)
    if options.json:
        runs = [one.as_dict() for one in rows]
        options.json.write_text(json.dumps(answer | {"runs": runs}, indent=1) + "\n")
    if options.constants:
        show_constants(options.folder, answer["means"]["dense"])


if __name__ == "__main__":
    main()
