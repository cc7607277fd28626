"""One run on several GPUs as cards and tables, from the answer that `lumos predict --gpu A,B --json` prints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lumos.report.table import BEST, Card, Column, Row, Table
from lumos.report.wording import change, count_text, money_text, ms_text, number_text, rate_text, si_text

Answer = Mapping[str, Any]

BOUNDS = {
    "compute": "compute", "memory": "memory bandwidth", "network": "network", "host": "host", "bubble": "bubble",
}  # fmt: skip
"""What a step may be bound by, as readers know it."""

_DAY_MS = 86400e3
_CARDS: tuple[tuple[str, str, Callable[[Answer], str]], ...] = (
    ("fastest", "tokens_per_s", lambda row: f"{ms_text(row['step_ms'])} per step"),
    ("cheapest", "money_per_million_tokens",
     lambda row: f"{money_text(row['money_per_million_tokens'])} for a million tokens"),
    ("least energy", "joules_per_token", lambda row: f"{rate_text(row['joules_per_token'])} J per token"),
)  # fmt: skip
_FEW_FAMILIES = 3
_PLAIN = (
    "gpu", "gpus", "refused", "step_ms", "tokens_per_s", "tokens_per_s_per_gpu", "speedup", "mfu", "peak_gib",
    "reserve_gib", "available_gib", "fits", "advice", "energy_j", "joules_per_token", "watts_per_gpu",
    "power_limit_w", "at_power_limit", "price_per_gpu_hour", "money_per_million_tokens", "bound_by", "costs_from",
)  # fmt: skip
_OF_BUDGET = ("steps", "days", "gpu_hours", "kwh", "money")


def label_of(row: Answer) -> str:
    """The GPU; in a search, where it may be there in several numbers, with how many."""
    several = row["configuration"] or (row["refused"] and row["gpus"])
    return f"{row['gpus']:,} × {row['gpu']}" if several else str(row["gpu"])


def predicted(answer: Answer) -> list[Answer]:
    """The GPUs on which the run is not refused."""
    return [row for row in answer["gpus"] if row["step_ms"] is not None]


def first_of(answer: Answer) -> str:
    """The GPU that others are compared to."""
    return label_of(predicted(answer)[0])


def run_text(answer: Answer) -> str:
    """Which run it is: "llama3-70b, 70.6 B parameters, 8,388,608 tokens per step"."""
    counts = {row["gpus"] for row in predicted(answer)}
    size = count_text(answer["parameters"], "parameters") if answer["parameters"] else ""
    tokens = f"{count_text(answer['tokens_per_step'], 'tokens')} per step" if answer["tokens_per_step"] else ""
    number = "" if len(counts) > 1 else "one GPU" if counts == {1} else f"{counts.pop():,} GPUs"
    return ", ".join(text for text in (answer["model"], size, tokens, number) if text)


def gpu_cards(answer: Answer) -> list[Card]:
    """Which GPU is best in what."""
    rows, cards = predicted(answer), []
    for title, key, form in _CARDS:
        best = [row for row in rows if key in row["best_in"]]
        if not best:
            continue
        against = "" if rows[0] in best or not rows[0][key] else f"; {_against(best[0], rows[0], key)}"
        name = "all alike" if len(best) == len(rows) else ", ".join(label_of(row) for row in best)
        cards.append(Card(title, name, form(best[0]) + against))
    return cards


def _against(row: Answer, first: Answer, key: str) -> str:
    if key == "tokens_per_s":
        return f"{number_text(row['speedup'], 2)} times as fast as {label_of(first)}"
    return f"{change(row[key], first[key])} against {label_of(first)}"


def time_table(answer: Answer) -> Table:
    """Time and throughput; a GPU on which the run is refused says why."""
    first = first_of(answer)
    titles = {
        "step_ms": Column("step", form=ms_text), "interval": Column("80 % interval"),
        "speedup": Column(f"speed, {first} = 1", form=partial(_at_least, digits=2)),
        "tokens_per_s_per_gpu": Column("tokens/s/GPU", form=rate_text),
        "mfu": Column("MFU, %", form=partial(_at_least, digits=1)), "bound_by": Column("bound by"),
        "costs_from": Column("operator times from"), "remark": Column("remark"),
    }  # fmt: skip
    rows = []
    for row in answer["gpus"]:
        interval = " – ".join(ms_text(end) for end in row["interval_ms"] or ())
        mfu = None if row["mfu"] is None else 100 * row["mfu"]
        values = [row["step_ms"], interval, row["speedup"], row["tokens_per_s_per_gpu"], mfu, _bound_text(row),
                  row["costs_from"], _remark(row)]  # fmt: skip
        rows.append(_row(row, values, titles))
    return _without_empty("time", [Column("GPU"), *titles.values()], rows, marks=True)


def _remark(row: Answer) -> str:
    return "refused, see below" if row["refused"] else "does not fit" if row["fits"] is False else ""


def _bound_text(row: Answer) -> str:
    if not row["bound_by"]:
        return ""
    return f"{BOUNDS[row['bound_by']]}, {100 * row['bound_ms'][row['bound_by']] / row['step_ms']:.0f} %"


def resources_table(answer: Answer) -> Table:
    """Memory, power, energy and money."""
    titles = {
        "needs": Column("needs, GiB", 1), "available_gib": Column("has, GiB", 1), "fits": Column("fits"),
        "watts_per_gpu": Column("W per GPU", 0), "power_limit_w": Column("limit, W", 0),
        "joules_per_token": Column("J/token", form=rate_text),
        "price_per_gpu_hour": Column("a GPU-hour", form="{:g}".format),
        "money_per_million_tokens": Column("a million tokens", form=money_text),
        "days": Column("training", form=lambda days: ms_text(days * _DAY_MS)),
        "kwh": Column("energy", form=lambda kwh: si_text(1e3 * kwh, "Wh")),
        "money": Column("money", form=money_text),
    }  # fmt: skip
    rows = []
    for row in predicted(answer):
        budget = row["budget"] or {}
        fits = {True: "yes", False: "no", None: "not known"}[row["fits"]]
        own = {"needs": _sum(row["peak_gib"], row["reserve_gib"]), "fits": fits, "days": budget.get("days"),
               "kwh": budget.get("kwh"), "money": budget.get("money")}  # fmt: skip
        rows.append(_row(row, [own[key] if key in own else row[key] for key in titles], titles))
    return _without_empty("memory, energy and money", [Column("GPU"), *titles.values()], rows)


def bounds_table(answer: Answer) -> Table:
    """What the step is spent on, and the largest families of operators."""
    rows = []
    for row in predicted(answer):
        shares = [100 * row["bound_ms"][key] / row["step_ms"] for key in BOUNDS]
        largest = list(row["operators"].items())[:_FEW_FAMILIES]
        families = ", ".join(f"{name} {100 * share:.0f} %" for name, share in largest)
        rows.append(Row([label_of(row), *shares, families]))
    columns = [Column("GPU"), *(Column(title, 1) for title in BOUNDS.values()), Column("most expensive operators")]
    return Table("what bounds the step, %", columns, rows)


def same_speed_table(answer: Answer) -> Table:
    """How many of each GPU train as fast as the first."""
    first = predicted(answer)[0]
    rows = [Row([one["gpu"], one["gpus"], one["tokens_per_s"]]) for one in answer["same_speed"]]
    columns = [Column("GPU"), Column("GPUs", 0), Column("tokens/s", form=rate_text)]
    missing = any(one["gpus"] is None for one in answer["same_speed"])
    caption = f"how many are as fast as {label_of(first)} ({rate_text(first['tokens_per_s'])} tokens/s)"
    return Table(caption, columns, rows, "–: none of the numbers that were tried" if missing else "")


def refusals(answer: Answer) -> list[str]:
    """Where the run is refused and why, and what to know of the comparison."""
    found = [f"{label_of(row)}: refused: {row['refused']}" for row in answer["gpus"] if row["refused"]]
    return [*found, *answer["warnings"]]


def gpu_notes(answer: Answer) -> list[str]:
    """The same with what to know of each GPU; what holds for several is said once."""
    by_text: dict[str, list[str]] = {}
    for row in predicted(answer):
        for text in row["warnings"]:
            same = re.sub(rf"(?<![\w.-]){re.escape(row['gpu'])}(?![\w.-])", "it", text)
            by_text.setdefault(same, []).append(label_of(row))
    common = {text for text in predicted(answer)[0]["warnings"] if len(by_text.get(text, ())) == len(predicted(answer))}
    first = sorted(by_text, key=lambda text: not text.startswith("does not fit"))
    return [*refusals(answer), *(text if text in common else f"{', '.join(by_text[text])}: {text}" for text in first)]


def flat_rows(answer: Answer) -> list[dict[str, Any]]:
    """One row of a CSV file for every GPU."""
    found = []
    for row in answer["gpus"]:
        flat = {key: row[key] for key in _PLAIN}
        flat["interval_low_ms"], flat["interval_high_ms"] = row["interval_ms"] or (None, None)
        flat |= {f"bound_{key}_ms": row["bound_ms"].get(key) for key in BOUNDS}
        flat |= {f"budget_{key}": (row["budget"] or {}).get(key) for key in _OF_BUDGET}
        found.append(flat | row["configuration"] | {"notes": " | ".join(row["warnings"])})
    return found


def _row(row: Answer, values: Sequence[Any], titles: Mapping[str, Column]) -> Row:
    best = [index for index, key in enumerate(titles, 1) if key in row["best_in"]]
    return Row([label_of(row), *values], best=best)


def _without_empty(caption: str, columns: Sequence[Column], rows: Sequence[Row], marks: bool = False) -> Table:
    """A table without the columns that have nothing to say."""
    kept = [i for i in range(len(columns)) if any(row.values[i] not in (None, "") for row in rows)]
    shown = [Row([row.values[i] for i in kept], best=[kept.index(i) for i in row.best if i in kept]) for row in rows]
    told = f"{BEST} the best of its column" if marks and any(row.best for row in rows) else ""
    return Table(caption, [columns[i] for i in kept], shown, told)


def _at_least(value: float, digits: int) -> str:
    """A number with so many digits, and with more where it would be no more than zero: 1.86, 0.0041."""
    return number_text(value, digits) if value >= 10**-digits else rate_text(value)


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
