"""The report of one job in Lumos and in ASTRA-sim, for terminal and page."""

from __future__ import annotations

from rich.console import Console, Group

from lumos.chakra.astra_comparison import AstraComparison
from lumos.report.html.charts import Bars, Series
from lumos.report.html.page import Figure, Page, Section
from lumos.report.table import Card, Column, Row, Table, left_out, ms_columns
from lumos.report.terminal.style import notes, rendered, summary
from lumos.report.wording import ms_text, number_text

_MOST_RANKS = 200
_MOST_BARS = 64
_RANKS = (
    "From the start until the rank ends. Work is everything that the rank does itself, the host included; exposed "
    "communication is the time in which it waits for communication and does nothing else."
)
_KINDS = "From the issue to the end, waiting for other ranks included; the sum over a rank's calls, mean over ranks."


def show_astra_comparison(found: AstraComparison, console: Console) -> None:
    """One job in both simulators."""
    tables = [ranks_table(found)]
    if found.kinds:
        tables.append(kinds_table(found))
    shown = (rendered(table, 64) for table in tables)
    cards = summary("one job in two simulators", astra_cards(found))
    console.print(Group(cards, *shown, *notes(found.notes)))


def astra_page(found: AstraComparison) -> Page:
    pairs = found.ranks[:_MOST_BARS]
    series = [
        Series("Lumos", "compute", [pair.ours_ms for pair in pairs]),
        Series("ASTRA-sim", "plain", [pair.astra_ms for pair in pairs]),
    ]
    numbers = [str(pair.rank) for pair in pairs]
    chart = Bars([f"rank {number}" for number in numbers], series, "ms", numbers, grouped=True)
    sections = [Section("Ranks", _RANKS, [Figure("time of every rank, ms", chart)], [ranks_table(found)])]
    if found.kinds:
        sections.append(Section("Collectives and messages", _KINDS, tables=[kinds_table(found)]))
    return Page(
        title=f"Lumos and ASTRA-sim: {ms_text(found.ours_ms)} and {ms_text(found.astra_ms)}",
        subtitle=f"{len(found.ranks):,} ranks, rank by rank",
        cards=astra_cards(found),
        sections=sections,
        notes=found.notes,
    )


def astra_cards(found: AstraComparison) -> list[Card]:
    worst = max(found.ranks, key=lambda pair: abs(pair.difference_pct))
    count = len(found.ranks)
    return [
        Card("Lumos", ms_text(found.ours_ms), f"until the last of {count} ranks ends"),
        Card("ASTRA-sim", ms_text(found.astra_ms), "as it printed"),
        Card("difference", _percent(found.difference_pct), ms_text(found.astra_ms - found.ours_ms, signed=True)),
        Card("largest of a rank", _percent(worst.difference_pct), f"rank {worst.rank}"),
    ]


def ranks_table(found: AstraComparison) -> Table:
    """Every rank: the run, its own work, and what it waits for communication."""
    rows = [
        Row(
            [str(p.rank), p.ours_ms, p.astra_ms, p.difference_pct, p.ours_work_ms, p.astra_work_ms,
             p.ours_exposed_ms, p.astra_exposed_ms],
            rank=str(p.rank),
        )
        for p in found.ranks[:_MOST_RANKS]
    ]  # fmt: skip
    titles = ("Lumos, ms", "ASTRA-sim, ms", "work, ms", "ASTRA-sim, ms", "exposed comm., ms", "ASTRA-sim, ms")
    plain = [Row([*row.values[:3], *row.values[4:]]) for row in rows]
    ours, theirs, *others = ms_columns(titles, plain)
    columns = [Column("rank"), ours, theirs, Column("difference, %", 1, signed=True), *others]
    return Table("ranks in both simulators", columns, rows, left_out(_MOST_RANKS, found.ranks))


def kinds_table(found: AstraComparison) -> Table:
    """Collectives and messages by kind."""
    rows = [Row([k.kind, k.calls, k.ours_ms, k.astra_calls, k.astra_ms, k.astra_ms - k.ours_ms]) for k in found.kinds]
    ours, theirs, by = ms_columns(("Lumos, ms", "ASTRA-sim, ms", "difference, ms"), rows)
    whole = all(float(calls).is_integer() for k in found.kinds for calls in (k.calls, k.astra_calls))
    calls = Column("calls", 0 if whole else 1)
    columns = [Column("communication"), calls, ours, calls, theirs, by._replace(bar=True)]
    return Table("communication per rank, from its issue to its end, waiting included", columns, rows)


def _percent(value: float) -> str:
    return f"{number_text(value, 1, signed=True)} %"
