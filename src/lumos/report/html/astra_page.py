"""The report of one job in Lumos and in ASTRA-sim."""

from __future__ import annotations

from lumos.analysis.astra_comparison import AstraComparison
from lumos.report.astra_comparisons import astra_cards, kinds_table, ranks_table
from lumos.report.html.charts import Bars, Series
from lumos.report.html.page import Figure, Page, Section
from lumos.report.wording import ms_text

_MOST_BARS = 64
_RANKS = (
    "From the start until the rank ends. Work is everything that the rank does itself, the host included; exposed "
    "communication is the time in which it waits for communication and does nothing else."
)
_KINDS = "From the issue to the end, waiting for other ranks included; the sum over a rank's calls, mean over ranks."


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
