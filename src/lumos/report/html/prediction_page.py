"""Prediction page: the report of a traced run with some of its tasks faster or slower."""

from __future__ import annotations

from pathlib import Path

from lumos.analysis.breakdown import Breakdown, breakdown_by_rank
from lumos.analysis.replay import Prediction
from lumos.graph.critical_path import critical_path, last_node, summarise
from lumos.graph.simulate import simulate
from lumos.report.html.charts import Bars, Series
from lumos.report.html.execution_view import ExecutionView
from lumos.report.html.page import Card, Figure, Page, Section, write_page
from lumos.report.html.parts import (
    STEP_PARTS,
    breakdown_section,
    mean_parts,
    path_section,
    rank_parts,
    timeline_section,
)
from lumos.report.html.replay_page import FILTERED_KINDS, subtitle_of
from lumos.report.html.table import Column, Row, Table, ms_digits


def write_prediction_page(path: Path, found: Prediction) -> None:
    """The report of a what-if on a trace."""
    write_page(path, prediction_page(found))


def prediction_page(found: Prediction) -> Page:
    run = found.run
    view = _view(found)
    summary = summarise(run.execution, found.times, view.path, len(run.marks.names))
    after = breakdown_by_rank(found.trace, found.steps)
    words = "Predicted, without the profiler; waiting for other ranks counts as communication."
    ranks = [str(rank) for rank in run.marks.ranks]
    return Page(
        title=_title(found),
        subtitle=subtitle_of(run),
        cards=_cards(found),
        sections=[
            _change(before_of(found), after),
            breakdown_section(rank_parts(after), "rank", words, "all ranks, mean"),
            timeline_section(view),
            path_section(summary),
        ],
        notes=run.execution.warnings,
        ranks=ranks,
        kinds=FILTERED_KINDS,
    )


def prediction_summary(found: Prediction) -> Page:
    """The same without what takes time."""
    after = breakdown_by_rank(found.trace, found.steps)
    return Page(_title(found), subtitle_of(found.run), _cards(found), [_change(before_of(found), after)])


def _title(found: Prediction) -> str:
    return f"What if {_scales(found)}: {found.step_ms:,.2f} ms a step"


def before_of(found: Prediction) -> dict[int, Breakdown]:
    """The unchanged run's breakdown, without the profiler as well."""
    run = found.run
    return breakdown_by_rank(run.execution.retime(simulate(run.clean_graph)), run.clean_steps)


def _view(found: Prediction) -> ExecutionView:
    run = found.run
    since = float(found.steps.start.min() - run.execution.origin)
    path = critical_path(run.clean_graph, found.times, last_node(run.execution, run.marks, found.steps), since)
    return ExecutionView(run.execution, run.clean_graph, found.times, found.steps, path)


def _scales(found: Prediction) -> str:
    return ", ".join(f"{scale.what} × {scale.factor:g}" for scale in found.scales) or "nothing changed"


def _cards(found: Prediction) -> list[Card]:
    step, base, error = found.step_ms, found.run.clean_ms, found.run.cost.error_pct / 100
    interval = f"{step * (1 - error):,.2f} – {step * (1 + error):,.2f} ms, for the profiler's cost"
    return [
        Card("changed step", f"{step:,.2f} ms", interval),
        Card("as recorded", f"{base:,.2f} ms", "without the profiler"),
        Card("of it", f"{step / base:.3f}" if base else "–", f"{step - base:+,.2f} ms a step"),
    ]


def _change(before: dict[int, Breakdown], after: dict[int, Breakdown]) -> Section:
    was, becomes = mean_parts(before), mean_parts(after)
    names = [name for name, _ in STEP_PARTS.values()]
    series = [
        Series("as recorded", "plain", [was[key] for key in STEP_PARTS]),
        Series("changed", "compute", [becomes[key] for key in STEP_PARTS]),
    ]
    digits = ms_digits([*was.values(), *becomes.values()])
    columns = [Column("part"), Column("as recorded, ms", digits), Column("changed, ms", digits),
               Column("change, ms", digits, signed=True)]  # fmt: skip
    rows = [
        Row([name, was[key], becomes[key], becomes[key] - was[key]]) for key, (name, _) in STEP_PARTS.items()
    ]  # fmt: skip
    total = [sum(was.values()), sum(becomes.values())]
    rows.append(Row(["step", *total, total[1] - total[0]], is_total=True))
    title = "parts of the step, mean over ranks and steps"
    text = "Both without the profiler. The cards say the typical step, this is the mean of those recorded."
    chart = Bars(names, series, "ms a step", grouped=True)
    return Section("Before and after", text, [Figure(title, chart)], [Table(title, columns, rows)])
