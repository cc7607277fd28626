"""Run view: a drawn run with failures over its days, and when runs end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lumos.graph.graph import Floats
from lumos.report.html.charts import Bars, Line, Lines, Series
from lumos.report.html.page import Figure, Page, Section
from lumos.report.runs import PART_NAMES, run_cards, run_notes, run_tables
from lumos.report.wording import ms_text
from lumos.risk.whole_run import DAY_S, HOUR_S, WholeRun

_WORDS = {  # the factors of WholeRun
    "prediction error": "how far off the predicted step may be", "variation of steps": "how much steps vary",
}  # fmt: skip
_PERIODS = 60  # of the run that is drawn over time
_POINTS = 100
_COLOURS = {  # in the order of run_loops.PARTS
    "productive": "compute", "lost": "unexplained", "detection": "wait", "restart": "comm", "checkpoints": "optimizer",
    "waiting": "idle", "fewer_replicas": "series-3",
}  # fmt: skip


def with_run(page: Page, run: WholeRun | None) -> Page:
    """A page with the whole run, if it was asked for."""
    if run is None:
        return page
    sections = [run_section(run), *page.sections]
    return replace(page, cards=[*page.cards, *run_cards(run)], sections=sections, notes=[*page.notes, *run_notes(run)])


def run_section(run: WholeRun) -> Section:
    """The end of thousands of runs, one of them over time, and the tables."""
    text = f"{run.draws:,} runs to the token budget were drawn. They differ by when they fail, and by "
    text += " and ".join(_WORDS[factor] for factor in run.factors) + "."
    if len(run.factors) < len(_WORDS):
        text += f" With --risk, they differ also by {_WORDS['variation of steps']}."
    figures = [Figure("runs that have ended by this day", _ends(run))]
    if run.failures.causes:
        figures += _periods(run)
    return Section("The whole run", text, figures, run_tables(run))


def _ends(run: WholeRun) -> Lines:
    """Cumulative shares, with failures and without."""
    at = np.linspace(0.0, 1.0, _POINTS + 1)
    curves = {"with failures": ("compute", run.days), "without failures": ("idle", run.work_s() / DAY_S)}
    lines = [
        Line(name, colour, np.quantile(days, at), 100 * at, dashed=name != "with failures")
        for name, (colour, days) in curves.items()
    ]
    if run.deadline_days is not None:
        lines.append(Line("deadline", "worse", [run.deadline_days] * 2, [0.0, 100.0]))
    return Lines("days", "% of runs", lines)


def _periods(run: WholeRun) -> list[Figure]:
    """Where the hours of one run went, period by period; then without its training, which hides the rest."""
    attempts = run.typical_attempts()
    total = float(attempts.sum())
    hours = hours_by_period(attempts, total / _PERIODS)[:_PERIODS]
    size, unit = (DAY_S, "day") if total > 3 * DAY_S else (HOUR_S, "hour")
    ends = [f"{total * i / _PERIODS / size:.1f}" for i in range(_PERIODS + 1)]
    labels = [f"{unit} {ends[i]} to {ends[i + 1]}" for i in range(_PERIODS)]
    series = [
        Series(PART_NAMES[name], _COLOURS[name], hours[:, i]) for i, name in enumerate(_COLOURS) if hours[:, i].any()
    ]
    title = f"one drawn run, of median length, {ms_text(1e3 * total)}"
    figures = [Figure(title, Bars(labels, series, "hours"))]
    if len(series) > 1:
        figures.append(Figure(f"{title}: all but training", Bars(labels, series[1:], "hours")))
    return figures


def hours_by_period(attempts: Floats, period_s: float) -> Floats:
    """Hours by part (columns, as in PARTS) in equal periods (rows) of a run of these attempts.

    An attempt trains, with checkpoints in between, then loses work, waits, is noticed and restarted.
    """
    groups = ((0, 4, 6), (1,), (5,), (2,), (3,))
    lengths = np.column_stack([attempts[:, group].sum(axis=1) for group in groups])
    ends = np.cumsum(lengths.ravel()).reshape(lengths.shape)
    edges = np.arange(np.ceil(ends[-1, -1] / period_s - 1e-9) + 1) * period_s
    found = np.zeros((len(edges) - 1, attempts.shape[1]))
    for place, group in enumerate(groups):
        times = np.column_stack([ends[:, place] - lengths[:, place], ends[:, place]]).ravel()
        for part in group:
            done = np.cumsum(attempts[:, part])
            so_far = np.column_stack([done - attempts[:, part], done]).ravel()
            found[:, part] = np.diff(np.interp(edges, times, so_far)) / HOUR_S
    return found
