"""Comparison page: the report of why one run takes longer than another."""

from __future__ import annotations

from collections.abc import Sequence

from lumos.analysis.comparison import Comparison, Difference
from lumos.report.html.charts import Bars, Series
from lumos.report.html.page import Card, Figure, Page, Section
from lumos.report.html.parts import STEP_PARTS
from lumos.report.html.replay_page import subtitle_of
from lumos.report.html.table import Column, Row, Table, ms_digits
from lumos.report.wording import ms_text

_MOST_BARS = 20
_MOST_ROWS = 300


def comparison_page(found: Comparison) -> Page:
    before, after = found.before.recorded_steps.mean, found.after.recorded_steps.mean
    sections = [_parts(found), _ranks(found), _differences("GPU time by operator", found.operators, _OPERATORS)]
    if found.collectives:
        sections.append(_differences("Collectives", found.collectives, _COLLECTIVES))
    return Page(
        title=f"Comparison: {ms_text(before)}, then {ms_text(after)} per step",
        subtitle=f"before: {subtitle_of(found.before)} — after: {subtitle_of(found.after)}",
        cards=_cards(before, after, found),
        sections=sections,
        notes=list(dict.fromkeys([*found.before.execution.warnings, *found.after.execution.warnings])),
    )


_OPERATORS = "Time of what operators launched, per step and rank; the largest change first."
_COLLECTIVES = "Waiting and transfer together, per step, by kind and size; the largest change first."


def _cards(before: float, after: float, found: Comparison) -> list[Card]:
    worst = max(found.parts, key=lambda part: abs(part.change_ms))
    name = STEP_PARTS[worst.name][0] if worst.name in STEP_PARTS else worst.name
    share = f"{100 * (after / before - 1):+.1f} %" if before else ""
    return [
        Card("before", ms_text(before), f"mean of {len(found.before.marks.names)} recorded"),
        Card("after", ms_text(after), f"mean of {len(found.after.marks.names)} recorded"),
        Card("change", ms_text(after - before, signed=True), share),
        Card("mostly", ms_text(worst.change_ms, signed=True), name),
    ]


def _parts(found: Comparison) -> Section:
    names = [STEP_PARTS[part.name][0] if part.name in STEP_PARTS else part.name for part in found.parts]
    series = [
        Series("before", "plain", [part.before_ms for part in found.parts]),
        Series("after", "compute", [part.after_ms for part in found.parts]),
    ]
    digits = ms_digits(value for part in found.parts for value in (part.before_ms, part.after_ms))
    columns = [Column("part"), Column("before, ms", digits), Column("after, ms", digits),
               Column("change, ms", digits, signed=True)]  # fmt: skip
    rows = [
        Row([name, part.before_ms, part.after_ms, part.change_ms])
        for name, part in zip(names, found.parts, strict=True)
    ]
    total = [sum(part.before_ms for part in found.parts), sum(part.after_ms for part in found.parts)]
    rows.append(Row(["step", *total, total[1] - total[0]], is_total=True))
    figure = Figure("parts of the step, mean over ranks", Bars(names, series, "ms per step", grouped=True))
    text = "As recorded; the changes of the parts add up to the change of the step."
    return Section("Parts of the step", text, [figure], [Table("parts of the step, mean over ranks", columns, rows)])


def _ranks(found: Comparison) -> Section:
    """Which ranks changed: computing and idling, where both runs have them."""
    before, after = found.before.recorded_breakdown, found.after.recorded_breakdown
    both = [rank for rank in before if rank in after]
    change = Column("change, ms", 3, signed=True)
    columns = [Column("rank"), Column("compute before, ms", 3), Column("after, ms", 3), change,
               Column("idle before, ms", 3), Column("after, ms", 3), change]  # fmt: skip
    rows = [
        Row([str(rank), b.compute_ms, a.compute_ms, a.compute_ms - b.compute_ms, b.other_ms, a.other_ms,
             a.other_ms - b.other_ms])
        for rank, b, a in ((rank, before[rank], after[rank]) for rank in both)
    ]  # fmt: skip
    if not both:
        return Section("Ranks", "The runs have no rank in common.")
    return Section("Ranks", tables=[Table("compute and idling of ranks that both runs have", columns, rows)])


def _differences(title: str, parts: Sequence[Difference], text: str) -> Section:
    shown = [part for part in parts[:_MOST_BARS] if part.change_ms]
    series = [Series("change", "change", [p.change_ms for p in shown])]
    chart = Bars([p.name for p in shown], series, "ms per step", named=True)
    digits = ms_digits(value for part in parts for value in (part.before_ms, part.after_ms))
    columns = [Column("name"), Column("before, ms", digits), Column("calls", 1), Column("after, ms", digits),
               Column("calls", 1), Column("change, ms", digits, bar=True, signed=True)]  # fmt: skip
    rows = [
        Row([p.name, p.before_ms, p.before_calls, p.after_ms, p.after_calls, p.change_ms]) for p in parts[:_MOST_ROWS]
    ]
    more = f"the first {_MOST_ROWS} of {len(parts):,}" if len(parts) > _MOST_ROWS else ""
    figures = [Figure(f"{title}: what changed most, ms per step", chart)] if shown else []
    table = Table(f"{title}, before and after", columns, rows, more)
    return Section(title, text if shown else "Nothing changed.", figures, [table])
