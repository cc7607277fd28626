"""Comparison page: the report of why one run takes longer than another."""

from __future__ import annotations

from collections.abc import Sequence

from lumos.analysis.comparison import Comparison, Difference
from lumos.report.html.charts import Bars, Series
from lumos.report.html.page import Figure, Page, Section
from lumos.report.html.parts import STEP_PARTS, before_and_after_section
from lumos.report.html.replay_page import subtitle_of
from lumos.report.replays import comparison_cards, device_of, differences_table, parts_table
from lumos.report.table import Column, Row, Table, ms_columns
from lumos.report.wording import ms_text

_MOST_BARS = 20
_PARTS = "As recorded; the changes of the parts add up to the change of the step."
_OPERATORS = "Time of what operators launched, per step and rank; the largest change first."
_COLLECTIVES = "Waiting and transfer together, per step, by kind and size; the largest change first."


def comparison_page(found: Comparison) -> Page:
    before, after, parts = found.before.recorded_steps.mean, found.after.recorded_steps.mean, found.parts
    names = [STEP_PARTS[part.name][0] for part in parts]
    both = [part.before_ms for part in parts], [part.after_ms for part in parts]
    sections = [
        before_and_after_section("Parts of the step", _PARTS, names, *both, parts_table(parts)),
        _ranks(found),
        _differences(f"{device_of(found.before)} time by operator", found.operators, _OPERATORS),
    ]
    if found.collectives:
        sections.append(_differences("Collectives", found.collectives, _COLLECTIVES))
    return Page(
        title=f"Comparison: {ms_text(before)}, then {ms_text(after)} per step",
        subtitle=f"before: {subtitle_of(found.before)} — after: {subtitle_of(found.after)}",
        cards=comparison_cards(found),
        sections=sections,
        notes=list(dict.fromkeys([*found.before.execution.warnings, *found.after.execution.warnings])),
    )


def _ranks(found: Comparison) -> Section:
    """Which ranks changed: computing and idling, where both runs have them."""
    before, after = found.before.recorded_breakdown, found.after.recorded_breakdown
    pairs = {rank: (before[rank], after[rank]) for rank in before if rank in after}
    rows = [
        Row([str(rank), b.compute_ms, a.compute_ms, a.compute_ms - b.compute_ms, b.other_ms, a.other_ms,
             a.other_ms - b.other_ms])
        for rank, (b, a) in pairs.items()
    ]  # fmt: skip
    if not rows:
        return Section("Ranks", "The runs have no rank in common.")
    titles = ("compute before, ms", "after, ms", "change, ms", "idle before, ms", "after, ms", "change, ms")
    columns = [Column("rank"), *ms_columns(titles, rows)]
    return Section("Ranks", tables=[Table("compute and idling of ranks that both runs have", columns, rows)])


def _differences(title: str, parts: Sequence[Difference], text: str) -> Section:
    shown = [part for part in parts[:_MOST_BARS] if part.change_ms]
    chart = Bars([p.name for p in shown], [Series("change", "change", [p.change_ms for p in shown])], "ms per step",
                 named=True)  # fmt: skip
    figures = [Figure(f"{title}: what changed most, ms per step", chart)] if shown else []
    return Section(title, text if shown else "Nothing changed.", figures, [differences_table(title, parts)])
