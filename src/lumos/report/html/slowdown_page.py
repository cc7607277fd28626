"""Slowdown page: the report of what a job loses to stragglers."""

from __future__ import annotations

import numpy as np

from lumos.analysis.slowdown import Slowdown
from lumos.analysis.slowdown_causes import Diagnosis
from lumos.report.html.charts import Bars, HeatMap, Line, Lines, Series
from lumos.report.html.page import Figure, Page, Section
from lumos.report.slowdowns import (
    causes_table,
    fixes_table,
    places_tables,
    size_text,
    slowdown_cards,
    steps_table,
    types_table,
    workers_table,
)

_MOST_WORKERS, _MOST_STEPS = 64, 120
_LEAST_HIGH = 1.1  # where the scale of a heat map ends at the earliest
_CAUSES = "Each cause with what the mean step would gain without it. Causes overlap: gains do not add up."
_WORKERS = (
    "A cell is what one step would take if only this worker were as recorded and all else were balanced, over the "
    "balanced step. A slow machine is a dark row, a disturbance a dark column or cell."
)
_PLACES = "The lesser of the slowdowns of a replica and of a stage, which is what is published for such jobs."
_STEPS = "As recorded, and balanced: every operation takes the mean of its type, and every transfer the median."


def slowdown_page(found: Diagnosis) -> Page:
    lost = found.slowdown
    job, tables = lost.job, places_tables(found.slowdown)
    gains = [fix for fix in found.fixes if fix.gain_ms > 0]
    chart = Bars([fix.name for fix in gains], [Series("gain", "better", [f.gain_pct for f in gains])], "% of the step")
    types = [(name, 100 * (value - 1)) for name, value in lost.by_type.items()]
    by_type = Bars([name for name, _ in types], [Series("longer", "worse", [v for _, v in types])], "% longer")
    sections = [
        Section("Causes", _CAUSES, [Figure("what mending would give", chart)] if gains else [],
                [causes_table(found), fixes_table(found)]),
        Section("Workers", _WORKERS, [Figure("slowdown by worker and step", _over_steps(lost))], [workers_table(lost)]),
        *([Section("Replicas and stages", _PLACES, [_grid(lost)], tables)] if lost.by_stage else []),
        Section("Types of operations", "Only these as recorded, all else balanced.",
                [Figure("slowdown by type of operation", by_type)], [types_table(lost)]),
        Section("Steps", _STEPS, [Figure("step by step", _steps_chart(lost))], [steps_table(lost)]),
    ]  # fmt: skip
    title = f"Stragglers of {job.name}: {lost.slowdown:.2f} times the balanced step"
    ranks = [str(worker.rank) for worker in job.workers]
    return Page(title, size_text(job), slowdown_cards(found), sections, list(job.warnings), ranks)


def _over_steps(lost: Slowdown) -> HeatMap:
    """Workers over steps; of many, the slowest workers, and the worst of adjacent steps."""
    chosen = np.sort(lost.slowest[:_MOST_WORKERS])
    parts = np.array_split(np.arange(len(lost.job.steps)), min(len(lost.job.steps), _MOST_STEPS))
    values = np.stack([lost.alone[np.ix_(chosen, part)].max(axis=1) for part in parts], axis=1)
    columns = [lost.job.steps[int(part[0])].removeprefix("ProfilerStep") for part in parts]
    labels = [lost.job.workers[worker].label for worker in chosen.tolist()]
    high = max(_LEAST_HIGH, float(np.nanmax(values, initial=1.0)))
    return HeatMap("step", "worker", columns, labels, values.ravel(), 1.0, high, "times the balanced step")


def _grid(lost: Slowdown) -> Figure:
    """Replicas over stages."""
    workers = lost.job.workers
    replicas = sorted({int(w.dp_rank or 0) for w in workers})
    stages = sorted({int(w.stage or 0) for w in workers})
    values = np.full((len(stages), len(replicas)), np.nan)
    for worker, value in zip(workers, lost.of_worker.tolist(), strict=True):
        values[stages.index(int(worker.stage or 0)), replicas.index(int(worker.dp_rank or 0))] = value
    if len(replicas) > _MOST_STEPS:
        worst = np.sort(np.argsort(-np.nanmax(values, axis=0), kind="stable")[:_MOST_STEPS])
        values, replicas = values[:, worst], [replicas[i] for i in worst.tolist()]
    chart = HeatMap(
        "replica (dp rank)", "stage", [str(r) for r in replicas], [f"stage {s}" for s in stages], values.ravel(), 1.0,
        max(_LEAST_HIGH, float(np.nanmax(values))), "times the balanced step",
    )  # fmt: skip
    return Figure("slowdown by replica and stage", chart)


def _steps_chart(lost: Slowdown) -> Lines:
    order = list(range(len(lost.job.steps)))
    lines = [
        Line("recorded", "plain", order, lost.job.recorded_ms, dashed=True),
        Line("without delays of launches", "worse", order, lost.base_ms),
        Line("balanced", "better", order, lost.ideal_ms),
    ]
    return Lines("step, in the order of the table", "ms", lines)
