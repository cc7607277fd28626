"""The answers of `lumos cost` and `lumos fit`, and their tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from lumos.analysis.about import About, AboutMachine
from lumos.costs.operator_model import CostModel
from lumos.measure.fit_machine import FittedMachine
from lumos.measure.operator_rows import SIZES
from lumos.program.operators import Operator
from lumos.report import about_tables
from lumos.report.terminal.style import make_table, notes, rendered, summary

_MOST_ROWS = 60
_MOST_ADVICE = 3  # families of which is said what more rows would buy
_WORTHWHILE_PCT = 0.5

Answer = dict[str, Any]


def cost_answer(model: CostModel, rows: list[Answer], operators: list[Operator]) -> Answer:
    """Every row with its time ("us") and what limits it ("bound"), and warnings about the times."""
    prices = model.us_of_all(operators)
    priced = [
        row | {"us": round(us, 3), "bound": model.bound(operator)}
        for row, operator, us in zip(rows, operators, prices, strict=True)
    ]
    return {"gpu": model.gpu.name, "rows": priced, "warnings": list(_warnings(model, rows, operators))}


def _warnings(model: CostModel, rows: list[Answer], operators: list[Operator]) -> Iterator[str]:
    """Which times are not based on samples of this GPU."""
    gpu = model.gpu
    if model.transferred:
        yield (
            f"{gpu.name} was never sampled: roofline estimates with the corrections of {model.sampled}, of unknown "
            "accuracy; `lumos sample` and `lumos fit` make a model of its own"
        )
    by_source: dict[str, set[str]] = defaultdict(set)
    for row, operator in zip(rows, operators, strict=True):
        name = row["op"] if operator.dtype == "bf16" else f"{row['op']} in {operator.dtype}"
        by_source[model.sampled_on(operator)].add(name)
    for source, names in by_source.items():
        listed = ", ".join(sorted(names))
        if not source:
            yield f"no samples for {listed}; roofline estimate, which is too low"
        elif source != model.sampled:
            yield f"{model.sampled} was not sampled for {listed}: the corrections of {source} are used"
    missing = sorted({op.dtype for op in operators if op.is_matrix and not gpu.supports(op.dtype)})
    if missing:
        yield f"{gpu.name} has no {', '.join(missing)}: matmuls are priced in the nearest wider precision that it has"


def show_costs(answer: Answer, console: Console) -> None:
    """The times of operators as a table."""
    rows = answer["rows"]
    table = make_table(f"isolated and from a cold cache, on {answer['gpu']}", "op", "shape", "µs", "bound")
    for row in rows[:_MOST_ROWS]:
        named = " ".join(str(row[key]) for key in ("op", "layout", "dtype") if key in row)
        shape = " ".join(f"{size}={row[size]}" for size in SIZES[row["op"]])
        table.add_row(named, shape, f"{row['us']:,.1f}", row["bound"])
    if len(rows) > _MOST_ROWS:
        table.caption = f"first {_MOST_ROWS} of {len(rows):,} rows; --json lists all"
    console.print(Group(table, *notes(answer["warnings"])))


def fit_answer(machine: FittedMachine, model: Path) -> Answer:
    """The verdict on every family of operators and every other part, and what more rows would buy."""
    gpu = machine.gpu
    warnings = list(machine.warnings)
    if gpu.assumed:
        warnings.append(f"not known of {gpu.shown}, and assumed: {', '.join(gpu.assumed)}")
    refused = [verdict.family for verdict in machine.families if verdict.refused]
    if refused:
        instead = "a bare roofline is used" if gpu.is_cpu else "the shipped model is used"
        warnings.append(f"refused; {instead} for {', '.join(refused)}")
    return {
        "gpu": gpu.shown, "model": str(model), "peak_tflops": dict(gpu.peak_tflops), "hbm_gb_s": gpu.hbm_gb_s,
        "families": [verdict.as_dict() for verdict in machine.families],
        "sections": [section.as_dict() for section in machine.sections], "warnings": warnings,
        "finer_grid": list(_finer_grid(machine)), "more": machine.more,
    }  # fmt: skip


def _finer_grid(machine: FittedMachine) -> Iterator[str]:
    """What twice the rows would buy, of the families where that is most."""
    kept = [v for v in machine.families if not v.refused and isfinite(v.twice_pct)]
    gain = {v.family: v.error_pct - v.twice_pct for v in kept}
    for v in sorted(kept, key=lambda v: -gain[v.family])[:_MOST_ADVICE]:
        if gain[v.family] >= _WORTHWHILE_PCT:
            yield f"twice the rows would bring {v.family} from {v.error_pct:.1f} to about {v.twice_pct:.1f} %"


def show_fit(answer: Answer, console: Console) -> None:
    """The accuracy of each family and of each other part as tables."""
    table = make_table("operators: error on held-out shapes, %", "family", "rows", "mean", "median", "refused")
    for part in answer["families"]:
        mean, middle = ("" if part[key] is None else f"{part[key]:.1f}" for key in ("error_pct", "median_pct"))
        table.add_row(part["family"], f"{part['rows']:,}", mean, middle, part["refused"])
    others = make_table("the rest of the machine", "part", "rows", "error, %", "")
    for part in answer["sections"]:
        error = "" if part["error_pct"] is None else f"{part['error_pct']:.1f}"
        said = f"refused: {part['refused']}" if part["refused"] else part["note"]
        others.add_row(part["section"], f"{part['rows']:,}" if part["rows"] else "", error, Text(said))
    written = Text(f"{answer['model']}: model of {answer['gpu']}; use it with --model")
    more = [Text(f"{line}: {answer['more']}") for line in answer["finer_grid"]]
    tables = [table] if answer["families"] else []
    console.print(Group(*tables, others, written, *more, *notes(answer["warnings"])))


def show_about(found: About, console: Console) -> None:
    """What is known, how old it is, and how far off it was."""
    shown = [about_tables.costs_table(found), about_tables.intervals_table(found), about_tables.gpus_table(found)]
    shown += [about_tables.models_table(found), about_tables.frameworks_table(found)]
    title = "lumos: predicts what training runs of large models do"
    more = Text("where every constant comes from: --json, or -o about.html")
    cards = summary(title, about_tables.about_cards(found))
    console.print(Group(cards, *(rendered(table, len(table.rows)) for table in shown), more))


def show_machine(found: AboutMachine, console: Console) -> None:
    """What a model file knows of a machine."""
    shown = [about_tables.machine_families_table(found), about_tables.machine_parts_table(found)]
    shown += [about_tables.machine_samples_table(found)] if found.samples else []
    cards = summary(f"{found.file}: what was measured of a machine", about_tables.machine_cards(found))
    console.print(Group(cards, *(rendered(table, len(table.rows)) for table in shown)))
