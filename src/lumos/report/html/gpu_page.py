"""GPU page: the report that compares GPUs for one run, from the answer that `lumos predict --gpu A,B --json` prints."""

from __future__ import annotations

from collections.abc import Sequence

from lumos.report.gpu_comparisons import (
    BOUNDS,
    Answer,
    bounds_table,
    first_of,
    gpu_cards,
    gpu_notes,
    label_of,
    predicted,
    resources_table,
    run_text,
    time_table,
)
from lumos.report.html.charts import Bars, Series
from lumos.report.html.page import Figure, Page, Section

_COLOURS = {"compute": "compute", "memory": "series-2", "network": "comm", "host": "series-3", "bubble": "idle"}
_TIME = (
    "Compute and memory bandwidth are the time in which the GPU works, by what its operators are bound by: only a GPU "
    "with a higher peak, or with faster memory, makes that part shorter. Network is communication that nothing hides. "
    "In the rest the GPU waits: for its host, which issues the work, or for other pipeline stages (bubble)."
)
_SURE = (
    "The interval holds 80 % of measured runs. Times of operators come from samples: those of the GPU itself, or those "
    "of another one, scaled by peaks and bandwidths, which is less certain."
)
_MEMORY = "Of the fullest GPU. A run fits if its peak and a reserve, for what PyTorch does not count, are within it."


def gpu_page(answer: Answer) -> Page:
    """The page of a comparison."""
    rows = answer["gpus"]
    return Page(
        title=f"One run on {len(rows)} GPUs: {', '.join(label_of(row) for row in rows)}",
        subtitle=run_text(answer),
        cards=gpu_cards(answer),
        sections=gpu_sections(answer),
        notes=gpu_notes(answer),
    )


def gpu_sections(answer: Answer) -> list[Section]:
    """Time, memory, energy and money, for this page or that of a search."""
    return [_time(answer), _throughput(answer), _memory(answer), *_costs(answer)]


def _bars(rows: Sequence[Answer], series: Sequence[Series], unit: str, grouped: bool = False) -> Bars:
    return Bars([label_of(row) for row in rows], series, unit, grouped=grouped, named=True)


def _time(answer: Answer) -> Section:
    rows = predicted(answer)
    series = [
        Series(title, _COLOURS[key], [row["bound_ms"][key] for row in rows])
        for key, title in BOUNDS.items()
        if any(row["bound_ms"][key] > 0 for row in rows)
    ]
    figure = Figure("the step by what bounds it, ms", _bars(rows, series, "ms per step"))
    return Section("What bounds the step", _TIME, [figure], [bounds_table(answer)])


def _throughput(answer: Answer) -> Section:
    rows = predicted(answer)
    first = first_of(answer)
    series = [Series("speed", "compute", [row["speedup"] or 0.0 for row in rows])]
    figures = [Figure(f"tokens per second, {first} = 1", _bars(rows, series, f"times {first}"))] if all(
        row["speedup"] for row in rows
    ) else []  # fmt: skip
    return Section("Time and throughput", _SURE, figures, [time_table(answer)])


def _memory(answer: Answer) -> Section:
    rows = [row for row in predicted(answer) if row["peak_gib"] is not None]
    series = [
        Series("peak and reserve", "compute", [row["peak_gib"] + row["reserve_gib"] for row in rows]),
        Series("what the GPU has", "idle", [row["available_gib"] for row in rows]),
    ]
    figure = Figure("memory of a GPU, GiB", _bars(rows, series, "GiB", grouped=True))
    return Section("Memory, energy and money", _MEMORY, [figure], [resources_table(answer)])


def _costs(answer: Answer) -> list[Section]:
    """Energy, and money where there are prices."""
    figures = []
    for key, title, unit in (
        ("money_per_million_tokens", "money for a million tokens", "in the currency of the prices"),
        ("joules_per_token", "energy of a token, J", "J per token"),
    ):
        rows = [row for row in predicted(answer) if row[key] is not None]
        if rows:
            figures.append(Figure(title, _bars(rows, [Series(title, "compute", [row[key] for row in rows])], unit)))
    text = "The GPUs alone, at the power that their work draws; the power limit of the board is the most."
    return [Section("Cost of a token", text, figures)] if figures else []
