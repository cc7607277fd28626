"""Search page: the report of a search, from plain values.

    {"setup": {key: value}, "evaluated": int, "seconds": float, "objective": str, "results": [row], "pareto": [row]}

A row has the keys of a setup that were searched ("parallel.tp", …) and what came out: step_ms, mfu, memory_gib,
tokens_per_s_per_gpu, cost_per_mtoken, energy_j, breakdown. What is missing or None is left blank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lumos.report.html.charts import Bars, Points, Scatter, Series
from lumos.report.html.page import Card, Figure, Page, Section, write_page
from lumos.report.html.parts import STEP_PARTS
from lumos.report.html.table import Column, Row, Table, Value

Result = Mapping[str, Any]

_MOST_DOTS = 4000
_MOST_ROWS = 500
_MOST_BARS = 15
_OUTCOMES = {
    "step_ms": Column("step, ms", 1, bar=True), "tokens_per_s_per_gpu": Column("tokens/s/GPU", 0),
    "mfu": Column("MFU, %", 1), "memory_gib": Column("memory, GiB", 1), "cost_per_mtoken": Column("cost a Mtoken", 3),
    "energy_j": Column("energy, kJ a step", 1),
}  # fmt: skip
_TELLING = (
    "model.name", "model.preset", "model.layers", "cluster.gpus", "cluster.gpu", "train.global_batch", "train.seq",
)  # fmt: skip
_SCALED = {"mfu": 100.0, "energy_j": 1e-3}


def write_search_page(path: Path, found: Mapping[str, Any]) -> None:
    """The report of a search."""
    write_page(path, search_page(found))


def search_page(found: Mapping[str, Any]) -> Page:
    results, front = list(found.get("results", ())), list(found.get("pareto", ()))
    keys = _keys([*results, *front])
    sections = [
        _pareto(results, front, keys),
        _breakdowns(results, keys),
        Section("Results", f"Ordered by {_objective(found)}.", tables=[_table("configurations", results, keys)]),
        _setup(found.get("setup", {})),
    ]
    return Page(
        title=f"Search: {_evaluated(found):,} configurations",
        subtitle=_subtitle(found.get("setup", {})),
        cards=_cards(found, results, keys),
        sections=sections,
        notes=[str(note) for note in found.get("warnings", ())],
    )


def _objective(found: Mapping[str, Any]) -> str:
    return str(found.get("objective", "step_ms"))


def _evaluated(found: Mapping[str, Any]) -> int:
    return int(found.get("evaluated", len(found.get("results", ()))))


def _keys(rows: Sequence[Result]) -> list[str]:
    """The searched keys that differ between rows; all of them where none does."""
    keys = list(dict.fromkeys(key for row in rows for key in row if "." in key))
    varying = [key for key in keys if len({str(row.get(key)) for row in rows}) > 1]
    return varying or keys


def label_of(row: Result, keys: Sequence[str]) -> str:
    return ", ".join(f"{key.rsplit('.', 1)[-1]} {row[key]}" for key in keys if row.get(key) not in (None, 1, False, ""))


def _subtitle(setup: Mapping[str, Any]) -> str:
    flat = _flat(setup)
    return " · ".join(f"{key.rsplit('.', 1)[-1]} {flat[key]}" for key in _TELLING if flat.get(key) not in (None, ""))


def _flat(setup: Mapping[str, Any]) -> dict[str, Any]:
    """Keys as users type them, whether the setup came by section or flat."""
    flat: dict[str, Any] = {}
    for name, value in setup.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def _cards(found: Mapping[str, Any], results: Sequence[Result], keys: Sequence[str]) -> list[Card]:
    words = f"in {float(found.get('seconds', 0.0)):,.1f} s, ordered by {_objective(found)}"
    cards = [Card("evaluated", f"{_evaluated(found):,}", words)]
    if not results:
        return [*cards, Card("best", "none", "no configuration is valid and fits")]
    best = results[0]
    cards.append(Card("best step", f"{_number(best, 'step_ms') or 0.0:,.1f} ms", label_of(best, keys)))
    for key, label, form in (
        ("tokens_per_s_per_gpu", "tokens/s/GPU", "{:,.0f}"), ("mfu", "MFU", "{:.1f} %"),
        ("memory_gib", "peak memory", "{:.1f} GiB"), ("cost_per_mtoken", "cost a Mtoken", "{:,.3f}"),
    ):  # fmt: skip
        value = _number(best, key)
        if value is not None:
            cards.append(Card(label, form.format(value), "of the best"))
    return cards


def _number(row: Result, key: str) -> float | None:
    """In the unit of its column; memory may come with its parts."""
    value = row.get(key)
    if isinstance(value, Mapping):
        value = value.get("peak")
    return float(value) * _SCALED.get(key, 1.0) if isinstance(value, int | float) else None


def _pareto(results: Sequence[Result], front: Sequence[Result], keys: Sequence[str]) -> Section:
    dots = [row for row in results if _is_drawn(row)]
    joined = sorted((row for row in front if _is_drawn(row)), key=lambda row: _number(row, "memory_gib") or 0.0)
    points = [
        Points(name, colour, [_number(r, "memory_gib") or 0.0 for r in rows],
               [_number(r, "tokens_per_s_per_gpu") or 0.0 for r in rows], [_words(r, keys) for r in rows],
               [9.0 if line else 6.0] * len(rows), joined=line)
        for name, colour, rows, line in (
            ("evaluated", "plain", dots[:_MOST_DOTS], False), ("Pareto front", "critical path", joined, True)
        ) if rows
    ]  # fmt: skip
    text = (
        "Up is faster, left needs less memory. No configuration beats one of the front in every respect that was "
        "searched for; a front over more than these two may not look like one here."
    )
    if len(dots) > _MOST_DOTS:
        text += f" The first {_MOST_DOTS:,} of {len(dots):,} are drawn."
    chart = Scatter("peak memory, GiB", "tokens/s/GPU", points)
    figures = [Figure("throughput against memory", chart)] if points else []
    return Section("Pareto front", text, figures, [_table("the Pareto front", front, keys)])


def _is_drawn(row: Result) -> bool:
    return _number(row, "memory_gib") is not None and _number(row, "tokens_per_s_per_gpu") is not None


def _words(row: Result, keys: Sequence[str]) -> str:
    words = [label_of(row, keys)]
    for key, form in _SAID.items():
        value = _number(row, key)
        if value is not None:
            words.append(form.format(value))
    return " | ".join(words)


_SAID = {
    "step_ms": "step {:,.1f} ms", "tokens_per_s_per_gpu": "{:,.0f} tokens/s/GPU", "memory_gib": "{:.1f} GiB",
    "mfu": "MFU {:.1f} %",
}  # fmt: skip


def _breakdowns(results: Sequence[Result], keys: Sequence[str]) -> Section:
    shown = [row for row in results if isinstance(row.get("breakdown"), Mapping)][:_MOST_BARS]
    if not shown:
        return Section("Where the step goes", "The search kept no breakdown.")
    series = [
        Series(name, colour, [float(row["breakdown"].get(key, 0.0)) for row in shown])
        for key, (name, colour) in STEP_PARTS.items()
    ]
    columns = [Column("configuration"), *(Column(f"{name}, ms", 1) for name, _ in STEP_PARTS.values())]
    rows = [
        Row([label_of(row, keys), *(float(row["breakdown"].get(key, 0.0)) for key in STEP_PARTS)]) for row in shown
    ]  # fmt: skip
    labels = [f"{i + 1}. {label_of(row, keys)}" for i, row in enumerate(shown)]
    title = f"step breakdown of the first {len(shown)}"
    figure = Figure(title, Bars(labels, series, "ms a step", named=True))
    return Section("Where the step goes", "Mean over the stages.", [figure], [Table(title, columns, rows)])


def _table(caption: str, rows: Sequence[Result], keys: Sequence[str]) -> Table:
    outcomes = {key: column for key, column in _OUTCOMES.items() if any(_number(row, key) is not None for row in rows)}
    searched = [Column(key.rsplit(".", 1)[-1], _digits(rows, key)) for key in keys]
    columns = [Column("#", 0), *searched, *outcomes.values()]
    body = [
        Row([i + 1, *(_plain(row.get(key)) for key in keys), *(_number(row, key) for key in outcomes)])
        for i, row in enumerate(rows[:_MOST_ROWS])
    ]
    more = f"the first {_MOST_ROWS} of {len(rows):,}; --json has them all" if len(rows) > _MOST_ROWS else ""
    return Table(caption, columns, body, more)


def _digits(rows: Sequence[Result], key: str) -> int:
    """Whole numbers stand right, words left."""
    return 0 if all(isinstance(row.get(key), int) and not isinstance(row.get(key), bool) for row in rows) else -1


def _plain(value: Any) -> Value:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str | int | float) or value is None else str(value)


def _setup(setup: Mapping[str, Any]) -> Section:
    rows = [Row([key, str(value)]) for key, value in _flat(setup).items() if value not in (None, "", [], ())]
    table = Table("values of the setup", [Column("key"), Column("value")], rows)
    return Section("Setup", "What was held fixed.", tables=[table])
