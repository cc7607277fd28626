"""Writes the measured part of docs/goodput.md: published outcomes, and the best checkpoint interval against simulation.

    python benchmarks/goodput.py -o docs/goodput.md

What is above the heading MEASURED in that page is kept. Facts of published runs are in RUNS, with their sources.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from lumos.prediction.prediction import NO_PRICES
from lumos.risk.fault_model import FaultModel
from lumos.risk.planned_run import PlannedRun, fault_model_of
from lumos.risk.whole_run import DAY_S, HOUR_S, WholeRun, draw_runs
from lumos.setup.reliability import RATES, Reliability

MEASURED = "## Checked against published runs\n"
STEP_S = 10.0
OPT_DAYS = 4.30e23 / (992 * 147e12) / DAY_S  # of training, at the published rate: 34.1
OPT_SEEN_DAYS = 0.17 * OPT_DAYS  # from 10 % to 27 %, 17 November to 3 December, 40 restarts in 16 days
BLOOM_DAYS = (94767 - 12695) * 105 / DAY_S  # iterations from 18 March to 4 July, of 105 s


@dataclass(frozen=True)
class PublishedRun:
    """A run whose effective training time is known."""

    name: str
    gpus: int
    days: float  # of training
    observed: str  # in per cent
    low: float  # what the prediction must reach to agree
    high: float
    section: dict[str, Any]  # [reliability], of published figures
    taken: str  # from where


RUNS = (
    PublishedRun(
        "Llama 3 405B, H100", 16384, 0.9 * 54, "> 90", 90, 95,
        {"rates": "llama3", "storage_gb_s": 2000.0, "checkpoint_gb": 5682.0},
        "its 466 interruptions by cause; 2 TB/s of its storage; size of the checkpoint from the memory model",
    ),
    PublishedRun(
        "OPT-175B, A100, all 56 days", 992, OPT_DAYS, f"{100 * OPT_DAYS / 56:.1f}", 100 * OPT_DAYS / 56 - 3,
        100 * OPT_DAYS / 56 + 3, {"rates": "opt-175b", "checkpoint_seconds": 0.0, "checkpoint_minutes": 1.0},
        "its 90 restarts; 6.1 hours lost by each, as in 16 of the 56 days",
    ),
    PublishedRun(
        "OPT-175B, the other 40 days", 992, OPT_DAYS - OPT_SEEN_DAYS, f"{100 * (OPT_DAYS - OPT_SEEN_DAYS) / 40:.1f}",
        100 * (OPT_DAYS - OPT_SEEN_DAYS) / 40 - 3, 100 * (OPT_DAYS - OPT_SEEN_DAYS) / 40 + 3,
        {
            "mtbf_job_hours": (40 * 24 - 50 * 306 / 60) / 50, "detection_minutes": 306.0, "restart_minutes": 60.0,
            "checkpoint_seconds": 0.0, "checkpoint_minutes": 1.0,
        },
        "50 restarts; 6.1 hours lost by each, as in the 16 days that are left out here",
    ),
    PublishedRun(
        "MegaScale, 175B, Ampere", 12288, 28.0, "> 90", 90, 95,
        {"rates": "llama3", "detection_minutes": 10.0, "restart_minutes": 15.0, "checkpoint_gb": 2450.0},
        "rates of llama3; its own, at most 10 minutes to detect and diagnose and 15 to catch up (arXiv 2402.15627)",
    ),
    PublishedRun(
        "ByteRobust, three months", 9600, 85.0, "97", 94, 100,
        {"rates": "llama3", "async_checkpoints": True, "checkpoint_gb": 2450.0},
        "rates and downtime of llama3; nothing but the number of GPUs is its own (arXiv 2509.16293)",
    ),
    PublishedRun(
        "BLOOM, A100, 18 March to 4 July", 384, BLOOM_DAYS, f"{100 * BLOOM_DAYS / 108:.1f}",
        100 * BLOOM_DAYS / 108 - 3, 100 * BLOOM_DAYS / 108 + 3,
        {"rates": "bloom", "checkpoint_seconds": 40.0, "checkpoint_minutes": 175.0},
        "a GPU a week; its checkpoints of 40 s every 100 iterations",
    ),
    PublishedRun(
        "Olmo Hybrid 7B, B200", 512, 6.0, "97", 94, 100,
        {"rates": "b200-504", "restart_minutes": 4.0, "checkpoint_gb": 100.0},
        "failures of 504 B200 elsewhere; its own recovery of 4 minutes (Lambda, March 2026)",
    ),
    PublishedRun(
        "Meta, synchronous, about 100,000 GPUs", 100_000, 20.0, "44", 41, 47,
        {"rates": "meta-rsc1", "storage_gb_s": 2000.0, "checkpoint_gb": 5682.0},
        "rates of meta-rsc1; its own 10 minutes (arXiv 2602.00277); checkpoints of Llama 3",
    ),
    PublishedRun(
        "Meta, fault-tolerant, about 100,000 GPUs", 100_000, 20.0, "80", 77, 83,
        {
            "rates": "meta-rsc1", "detection_minutes": 0.0, "restart_minutes": 3.0, "checkpoint_seconds": 0.0,
            "checkpoint_minutes": 0.2,
        },
        "rates of meta-rsc1; its own stall of 3 minutes, and next to no lost work (arXiv 2602.00277)",
    ),
)  # fmt: skip

PAGE = """
Written by `benchmarks/goodput.py`. Effective training time: the share of the run in which training got ahead, without
lost work, checkpoints, detection, restarts and waiting. Rates are counts that others published
(`src/lumos/data/failures.toml`). Nothing was fitted on the outcomes; what is known of
OPT-175B's restarts is from a part of its own run.

| run | GPUs | published, % | predicted, % | taken from |
|---|---|---|---|---|
"""
AFTER = """
What this shows, and what it does not:

- Llama 3's and MegaScale's outcomes are bounds. Of Llama 3, the downtime after a failure is not published. MegaScale's
  times are bounds as well: with the most that they allow, the prediction is below 90 %.
- OPT-175B's loss by restart (6.1 hours, lost work included) is from 17 November to 3 December 2021, when progress and
  the number of restarts were published together. The other 40 days, with 50 restarts, had no part in it. Training is
  4.30e23 FLOP at 147 TFLOP/s on each of 992 GPUs: 34.1 days.
- BLOOM lost more than its GPUs explain: hangs of the software (35 hours in three incidents), evaluation (0.7 %), a slow
  GPU (5 % for some days) and maintenance are in the published share, and not in the rate of its GPUs.
- On 100,000 GPUs the prediction is optimistic, as more fails there than in proportion to the GPUs.

Rates differ by a factor of eight between clusters. A job fails every so many hours:

"""
INTERVALS = """
## Checked: the best checkpoint interval

A search over {tried} intervals by simulation ({runs} runs each, the same failures for all), against the interval that
Lumos takes from its formula, and against Young's. {cases} settings: a job that fails every 5 minutes to every 90 days,
checkpoints of a second to four hours, written while training waits or in the background; settings in which less than
2 % of the run would be productive are left out. How much longer a run takes than with the best interval of the search:

| interval | mean, % | worst, % | settings more than 2 % off |
|---|---|---|---|
"""


def run_of(one: PublishedRun) -> WholeRun:
    job = PlannedRun(one.gpus, 8, 1, max(round(one.days * DAY_S / STEP_S), 1), STEP_S, (STEP_S, STEP_S), 1.0)
    return WholeRun(job, Reliability(**one.section), {}, NO_PRICES)


def predicted_pct(one: PublishedRun) -> float:
    """The mean over drawn runs."""
    return 100 * float(run_of(one).effective.mean())


def outcomes() -> Iterator[str]:
    for one in RUNS:
        yield f"| {one.name} | {one.gpus:,} | {one.observed} | {predicted_pct(one):.1f} | {one.taken} |"


def rates() -> Iterator[str]:
    sizes = (64, 512, 4096, 16384, 131072)
    yield "| rates | " + " | ".join(f"{size:,} GPUs" for size in sizes) + " |"
    yield "|---|" + "---|" * len(sizes)
    for name in RATES:
        runs = (PlannedRun(n, 8, 1, 1, 1.0, (1.0, 1.0), 1.0) for n in sizes)
        models = (fault_model_of(Reliability(rates=name), run)[1] for run in runs)
        yield f"| {name} | " + " | ".join(f"{hours_text(model.mtbf_hours)}" for model in models) + " |"


def hours_text(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def settings() -> Iterator[FaultModel]:
    """From minutes to months, from a second to hours."""
    mtbfs = (300.0, 1800.0, 2 * HOUR_S, 10 * HOUR_S, 5 * DAY_S, 90 * DAY_S)
    for mtbf, write, background in product(mtbfs, (1.0, 30.0, 600.0, 4 * HOUR_S), (False, True)):
        pause, lag = (min(write / 20, 5.0), write) if background else (write, 0.0)
        model = FaultModel(other_rate=1 / mtbf, detection_s=120.0, restart_s=480.0, pause_s=pause, lag_s=lag)
        work = 60 * mtbf
        if work / model.expected_s(work, model.best_interval_s(work)) > 0.02:
            yield model


TRIED, RUNS_EACH = 60, 400


def excess(model: FaultModel, runs: int = RUNS_EACH) -> tuple[float, float]:
    """How much longer than with the best interval of a search, in per cent: Lumos' interval, and Young's."""
    work = 60 / model.failure_rate
    least = min(max(1.0, model.lag_s - model.pause_s), work)
    tried = [*np.geomspace(least, work, TRIED), model.best_interval_s(work), float(np.clip(model.young_s, least, work))]
    works = np.full(runs, work)
    means = [
        float(draw_runs(model, works, interval).total_s.mean())
        for interval in tried
        if affordable(model, work, interval)
    ]
    best = min(means)
    young = means[-1] if affordable(model, work, tried[-1]) else float("inf")
    own = means[-2] if affordable(model, work, tried[-1]) else means[-1]
    return 100 * (own / best - 1), 100 * (young / best - 1)


def affordable(model: FaultModel, work: float, interval: float) -> bool:
    """Whether the run ends within a hundred times the best: others are not the best."""
    return model.expected_s(work, interval) < 100 * model.expected_s(work, model.best_interval_s(work))


def intervals() -> Iterator[str]:
    found = np.array([excess(model) for model in settings()])
    yield INTERVALS.format(tried=TRIED, runs=RUNS_EACH, cases=len(found)).rstrip("\n")
    for name, column in zip(("Lumos", "Young"), found.T, strict=True):
        worst = f"{column.max():.1f}" if np.isfinite(column.max()) else "does not end"
        mean = column[np.isfinite(column)].mean()
        yield f"| {name} | {mean:.2f} | {worst} | {int((column > 2).sum())} |"


def measured() -> str:
    return (
        MEASURED
        + PAGE
        + "\n".join(outcomes())
        + "\n"
        + AFTER
        + "\n".join(rates())
        + "\n"
        + "\n".join(intervals())
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    path = parser.parse_args().output
    text = measured()
    if path is None:
        print(text)
        return
    kept = path.read_text("utf-8").partition(MEASURED)[0] if path.exists() else ""
    path.write_text(kept + text, "utf-8")


if __name__ == "__main__":
    main()
