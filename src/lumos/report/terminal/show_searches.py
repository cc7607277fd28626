"""Searches, scores and comparisons of GPUs on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group
from rich.text import Text

from lumos.report.gpu_comparisons import (
    bounds_table,
    gpu_cards,
    gpu_notes,
    refusals,
    resources_table,
    run_text,
    time_table,
)
from lumos.report.searches import (
    Answer,
    bound_note,
    breakdowns_table,
    by_gpu_tables,
    configurations_table,
    families_note,
    keys_of,
    lost_table,
    risk_note,
    search_cards,
    several_types,
)
from lumos.report.terminal.style import make_table, notes, rendered, summary

_OF_BEST = (
    "step_ms", "p90_ms", "mfu", "memory_gib", "joules_per_token", "cost_per_mtoken", "days", "gpu_hours", "money",
)  # fmt: skip
_FEW, _MOST_ON_FRONT = 5, 12
_MOST_REASONS = 5


def show_search(answer: Answer, console: Console) -> None:
    """The best families of configurations, why the others lost, and the Pareto front."""
    best, front = answer["families"], answer["pareto"]
    tables = []
    if best:
        priced = front[0]["cost_per_mtoken"] is not None
        on_front = ("step_ms", "p90_ms", "memory_gib", "cost_per_mtoken" if priced else "gpu_hours_per_mtoken")
        by_risk = answer.get("risk")
        caption = f"the best by {answer['objective']}{', at the 90th percentile' if by_risk else ''}"
        title = f"Pareto front of time, memory{', cost and risk' if by_risk else ' and cost'}"
        tables = [
            rendered(configurations_table(caption, best, _keys(best), _OF_BEST), len(best)),
            rendered(breakdowns_table(best[:_FEW], keys_of(best))),
            *([rendered(lost_table(best[:_FEW], answer["objective"]))] if len(best) > 1 else []),
            rendered(configurations_table(title, front, _keys(front), on_front), _MOST_ON_FRONT),
        ]
    tables[-1:-1] = [rendered(table, 64) for table in by_gpu_tables(answer)]
    remarks = [*families_note(answer), *risk_note(answer), *bound_note(answer), *answer["warnings"]]
    remarks += refusals(answer["comparison"]) if several_types(answer) else []
    console.print(Group(summary("configurations", search_cards(answer)), *tables, *notes(remarks)))


def show_gpus(answer: Answer, console: Console) -> None:
    """One run on several GPUs."""
    tables = (rendered(table, 64) for table in (time_table(answer), resources_table(answer), bounds_table(answer)))
    title = Text(run_text(answer), style="bold")
    console.print(Group(title, summary("", gpu_cards(answer)), *tables, *notes(gpu_notes(answer))))


def _keys(rows: Sequence[Answer]) -> list[str]:
    """The setup keys that differ between rows, or say of all that they are parallel in some way."""
    keys = [key for key in rows[0] if "." in key]
    silent = {"train.global_batch": [rows[0].get("train.global_batch")]}  # the summary has it, if there is only one
    return [
        key for key in keys
        if len({row[key] for row in rows}) > 1 or rows[0][key] not in silent.get(key, (1, False, 0, "", None))
    ]  # fmt: skip


def show_score(answer: Answer, console: Console) -> None:
    """Errors by source, and what was refused."""
    title = f"{answer['predicted']} of {answer['rows']} rows predicted"
    heads = ("mean error, %", "median, %", "bias, %", "rank correlation", "in the interval, %")
    table = make_table(title, "source", "rows", *heads)
    for name, part in [*answer["by_source"].items(), ("all", answer)]:
        inside = part["inside_interval"]
        cells = [part["mape"], part["median"], part["bias"], part["spearman"], None if inside is None else 100 * inside]
        forms = ("{:.2f}", "{:.2f}", "{:+.2f}", "{:.2f}", "{:.0f}")
        shown = ("" if cell is None else form.format(cell) for form, cell in zip(forms, cells, strict=True))
        table.add_row(name, str(part["n"]), *shown)
    reasons = Counter(row["reason"] for row in answer["refused"])
    inside, more = answer["inside_interval"], len(reasons) - _MOST_REASONS
    remarks = [] if inside is None else [f"{100 * inside:.0f} % of the measured runs are inside their 80 % interval"]
    for reason, count in reasons.most_common(_MOST_REASONS):
        remarks.append(f"{count} {'row' if count == 1 else 'rows'} refused: {reason}")
    if more > 0:
        remarks.append(f"rows were refused for {more} more reasons; --json has them all")
    console.print(Group(table, *notes([*remarks, *answer.get("warnings", ())])))
