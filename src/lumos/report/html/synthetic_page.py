"""The report of `lumos synthesise`: what a synthetic run preserves, and that it reproduces no original."""

from __future__ import annotations

from lumos.report.html.charts import Bars, Series
from lumos.report.html.page import Figure, Page, Section
from lumos.report.synthetics import (
    Answer,
    distance_tables,
    nearness_table,
    size_text,
    synthetic_cards,
    synthetic_notes,
)

_COLOURS = {
    "exposed compute": "compute", "exposed communication": "comm", "overlapped": "series-2", "other": "idle",
}  # fmt: skip
_PRESERVED = (
    "The synthetic run beside recorded ones: first those that were kept aside (--against), then those that were "
    "learned from. Distributions are compared by the largest distance between them."
)
_NEAR = (
    "Windows of six consecutive kernels of the same kinds: by which factor, less 1, their times and the host work "
    "before them differ from the nearest original, in the median. Steps of one run resemble each other: a synthetic "
    "step that comes no nearer to the originals than another recorded step shows nothing of any one of them. The "
    "longest run is of consecutive kernels that agree with an original in kind, and in both times within 1 %."
)


def synthetic_page(answer: Answer) -> Page:
    """The page of a synthetic run."""
    sections = []
    if answer["distances"]:
        sections.append(Section("What is preserved", _PRESERVED, [_breakdown(answer)], distance_tables(answer)))
    if answer["nearness"]:
        sections.append(Section("Is an original reproduced?", _NEAR, [], [nearness_table(answer)]))
    return Page("Synthetic run", size_text(answer), synthetic_cards(answer), sections, synthetic_notes(answer))


def _breakdown(answer: Answer) -> Figure:
    found = answer["distances"]
    labels = ["synthetic", *(one["reference"] for one in found)]
    series = []
    for i, part in enumerate(found[0]["breakdown"]):
        own = part["share"] * found[0]["step_ms"]
        others = [one["breakdown"][i]["reference_share"] * one["reference_step_ms"] for one in found]
        series.append(Series(part["part"], _COLOURS[part["part"]], [own, *others]))
    return Figure("where the step goes, ms", Bars(labels, series, "ms per step", named=True))
