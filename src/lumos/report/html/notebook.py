"""Notebook: an answer as a few static tables, for `_repr_html_`."""

from __future__ import annotations

from dataclasses import replace

from lumos.analysis.comparison import Comparison
from lumos.analysis.replay import Replay
from lumos.prediction.gpu_comparison import GpuComparison
from lumos.prediction.prediction import Prediction
from lumos.report.html.comparison_page import comparison_page
from lumos.report.html.gpu_page import gpu_page
from lumos.report.html.page import Page, environment
from lumos.report.html.parts import breakdown_section, path_section
from lumos.report.html.prediction_page import prediction_summary
from lumos.report.html.replay_page import replay_title, subtitle_of
from lumos.report.replays import replay_cards
from lumos.report.table import Table

_MOST_ROWS = 8


def replay_snippet(run: Replay) -> str:
    """Cards, and where the step goes."""
    sections = [breakdown_section(run.recorded_breakdown, ""), path_section(run.path_summary)]
    notes = run.execution.warnings
    return _snippet(Page(replay_title(run), subtitle_of(run), replay_cards(run), sections, notes))


def prediction_snippet(found: Prediction) -> str:
    """Cards, where the step goes, and memory."""
    return _snippet(prediction_summary(found))


def comparison_snippet(found: Comparison) -> str:
    page = comparison_page(found)
    return _snippet(replace(page, sections=[s for s in page.sections if s.title != "Ranks"]))


def gpus_snippet(found: GpuComparison) -> str:
    """Cards, what bounds the step on each GPU, time, memory and money."""
    return _snippet(gpu_page(found.as_dict()))


def _snippet(page: Page) -> str:
    tables = [_cut(table) for section in page.sections for table in section.tables[:1]]
    return environment().get_template("snippet.html.j2").render(page=page, tables=tables)


def _cut(table: Table) -> Table:
    """The first rows, and a word about the others."""
    if len(table.rows) <= _MOST_ROWS:
        return table
    kept = [*table.rows[:_MOST_ROWS], *(row for row in table.rows[_MOST_ROWS:] if row.is_total)]
    return replace(table, rows=kept, left_out=f"{len(table.rows) - len(kept):,} rows more")
