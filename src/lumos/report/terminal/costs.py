"""Costs as answers: what operators cost, what was sampled, how well it could be fitted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from lumos.cost.operator_model import CostModel
from lumos.errors import InputError
from lumos.measure.fit.fit import Verdict
from lumos.measure.fit.operator_rows import SIZES
from lumos.measure.sample.sample_file import lines_of
from lumos.program.operators import Operator
from lumos.report.terminal.style import make_table, notes

_MOST_ROWS = 60

Answer = dict[str, Any]


def cost_answer(model: CostModel, rows: list[Answer], operators: list[Operator]) -> Answer:
    """Every row with its price, and what is to be said about the prices."""
    prices = model.us_of_all(operators)
    priced = [
        row | {"us": round(us, 3), "bound": model.bound(operator)}
        for row, operator, us in zip(rows, operators, prices, strict=True)
    ]
    return {"gpu": model.gpu.name, "rows": priced, "warnings": list(_doubts(model, rows, operators))}


def _doubts(model: CostModel, rows: list[Answer], operators: list[Operator]) -> Iterator[str]:
    """Which prices rest on less than samples of this GPU."""
    gpu = model.gpu
    if model.transferred:
        yield (
            f"{gpu.name} was never sampled: these are its rooflines with the corrections of {model.sampled}, and how "
            "far off they are is not known; `lumos sample` and `lumos fit` make a model of its own"
        )
    unsampled: dict[str, set[str]] = defaultdict(set)
    for row, operator in zip(rows, operators, strict=True):
        name = row["op"] if operator.dtype == "bf16" else f"{row['op']} in {operator.dtype}"
        unsampled[model.sampled_on(operator)].add(name)
        if operator.is_matrix and not gpu.supports(operator.dtype):
            unsampled["no such units"].add(operator.dtype)
    for source, names in unsampled.items():
        yield from _doubt(model, source, ", ".join(sorted(names)))


def _doubt(model: CostModel, source: str, names: str) -> Iterator[str]:
    if source == "no such units":
        yield f"{model.gpu.name} has no {names}: products are priced in the nearest wider precision that it has"
    elif not source:
        yield f"nobody sampled {names}: the roofline alone, which is too low"
    elif source != model.sampled:
        yield f"{model.sampled} was not sampled for {names}: the corrections of {source} are used"


def show_costs(answer: Answer, console: Console) -> None:
    """Prices as a table."""
    rows = answer["rows"]
    table = make_table(f"alone and from a cold cache, on {answer['gpu']}", "op", "shape", "µs", "bound")
    for row in rows[:_MOST_ROWS]:
        named = " ".join(str(row[key]) for key in ("op", "layout", "dtype") if key in row)
        shape = " ".join(f"{size}={row[size]}" for size in SIZES[row["op"]])
        table.add_row(named, shape, f"{row['us']:,.1f}", row["bound"])
    if len(rows) > _MOST_ROWS:
        table.caption = f"… of {len(rows):,} rows; --json has them all"
    console.print(Group(table, *notes(answer["warnings"])))


def sample_answer(path: Path, measured: int, left: int) -> Answer:
    """What a file of samples holds by now."""
    times: dict[str, list[float]] = defaultdict(list)
    failed: dict[str, list[str]] = defaultdict(list)
    gpu = ""
    for _, row in lines_of(path):
        if "gpu" in row:
            gpu = str(row["gpu"])
        elif "us" in row:
            times[row["op"]].append(row["us"])
        else:
            failed[row["op"]].append(str(row.get("error")))
    operators = [
        {
            "op": name, "rows": len(times[name]), "failed": len(failed[name]),
            "median_us": round(median(times[name]), 3) if times[name] else None, "why": _commonest(failed[name]),
        }
        for name in sorted({*times, *failed})
    ]  # fmt: skip
    return {"gpu": gpu, "file": str(path), "measured": measured, "left": left, "operators": operators}


def _commonest(words: list[str]) -> str:
    return max(words, key=words.count) if words else ""


def show_samples(answer: Answer, console: Console) -> None:
    """What was sampled, as a table."""
    table = make_table(f"samples of {answer['gpu']}", "op", "rows", "median µs", "failed", "why")
    for part in answer["operators"]:
        middle = "" if part["median_us"] is None else f"{part['median_us']:,.1f}"
        table.add_row(part["op"], f"{part['rows']:,}", middle, str(part["failed"] or ""), Text(part["why"]))
    done = f"{answer['file']}: {answer['measured']:,} rows are new, {answer['left']:,} left to do"
    console.print(Group(table, Text(done)))


def fit_answer(samples: Path, gpu: str, model: Path, verdicts: list[Verdict]) -> Answer:
    """Every family's verdict; InputError where none could be fitted, since that makes no model."""
    refused = [verdict for verdict in verdicts if verdict.refused]
    if len(refused) == len(verdicts):
        why = "; ".join(f"{v.family}: {v.refused}" for v in refused[:3]) + ("; …" if len(refused) > 3 else "")
        raise InputError(f"{samples}: no family could be fitted ({why}); sample more with `lumos sample`")
    warnings = []
    if refused:
        names = ", ".join(verdict.family for verdict in refused)
        warnings.append(f"refused, and so priced by what is shipped: {names}")
    families = [verdict.as_dict() for verdict in verdicts]
    return {"gpu": gpu, "model": str(model), "families": families, "warnings": warnings}


def show_fit(answer: Answer, console: Console) -> None:
    """How well each family could be fitted, as a table."""
    table = make_table("error on shapes held apart, percent", "family", "rows", "mean", "median", "refused")
    for part in answer["families"]:
        mean, middle = (_percent(part[name]) for name in ("error_pct", "median_pct"))
        table.add_row(part["family"], f"{part['rows']:,}", mean, middle, part["refused"])
    written = Text(f"{answer['model']}: what operators cost on {answer['gpu']}")
    console.print(Group(table, written, *notes(answer["warnings"])))


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:.1f}"
