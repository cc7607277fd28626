"""Search page: the report of a search, from the answer that `lumos search --json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lumos.report.html.charts import Bars, Points, Scatter, Series
from lumos.report.html.page import Figure, Page, Section
from lumos.report.html.parts import STEP_PARTS
from lumos.report.table import Card, Column, Row, Table, Value

Answer = Mapping[str, Any]

_MOST_DOTS = 4000
_MOST_ROWS = 500
_MOST_BARS = 15
_SUBTITLE = (
    "model.name", "model.preset", "model.layers", "cluster.gpus", "cluster.gpu", "train.global_batch", "train.seq",
)  # fmt: skip


class _Number(NamedTuple):
    """How a number of a configuration is shown: in tables, and in words."""

    column: Column
    words: str
    scale: float = 1.0

    def of(self, row: Answer, key: str) -> float | None:
        return None if row.get(key) is None else self.scale * float(row[key])


_NUMBERS = {
    "step_ms": _Number(Column("step, ms", 1, bar=True), "step {:,.1f} ms"),
    "tokens_per_s_per_gpu": _Number(Column("tokens/s/GPU", 0), "{:,.0f} tokens/s/GPU"),
    "memory_gib": _Number(Column("memory, GiB", 1), "{:.1f} GiB"),
    "mfu": _Number(Column("MFU, %", 1), "MFU {:.1f} %", 100.0),
    "cost_per_mtoken": _Number(Column("cost per Mtoken", 3), "{:,.3f} per Mtoken"),
    "energy_j": _Number(Column("energy, kJ per step", 1), "{:,.1f} kJ", 1e-3),
}


def search_page(answer: Answer) -> Page:
    """The page of an answer, which may be that of a merged search."""
    results, front = list(answer["results"]), list(answer.get("pareto", ()))
    keys, setup, objective = _keys([*results, *front]), answer["setup"], answer["objective"]
    shown = (f"{_short(key)} {setup[key]}" for key in _SUBTITLE if setup.get(key) not in (None, ""))
    fixed = [Row([key, str(value)]) for key, value in setup.items() if value not in (None, "", [], ())]
    table = Table("values of the setup", [Column("key"), Column("value")], fixed)
    sections = [
        _pareto(results, front, keys),
        _breakdowns(results, keys),
        Section("Results", f"Ordered by {objective}.", tables=[_table("configurations", results, keys)]),
        Section("Setup", "The setup that the search started from.", tables=[table]),
    ]
    return Page(
        title=f"Search: {answer['evaluated']:,} configurations",
        subtitle=" · ".join(shown),
        cards=_cards(answer, keys),
        sections=sections,
        notes=[str(note) for note in answer.get("warnings", ())],
    )


def _keys(rows: Sequence[Answer]) -> list[str]:
    """The searched keys that differ between rows; all of them where none does."""
    keys = list(dict.fromkeys(key for row in rows for key in row if "." in key))
    return [key for key in keys if len({str(row.get(key)) for row in rows}) > 1] or keys


def _short(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def label_of(row: Answer, keys: Sequence[str]) -> str:
    """A configuration in words: "tp 8, pp 4"."""
    return ", ".join(f"{_short(key)} {row[key]}" for key in keys if row.get(key) not in (None, 1, False, ""))


def _cards(answer: Answer, keys: Sequence[str]) -> list[Card]:
    words = f"in {answer['seconds']:,.1f} s, ordered by {answer['objective']}"
    cards = [Card("evaluated", f"{answer['evaluated']:,}", words)]
    if not answer["results"]:
        return [*cards, Card("best", "none", "no configuration is valid and fits")]
    best = answer["results"][0]
    cards.append(Card("best step", f"{best['step_ms']:,.1f} ms", label_of(best, keys)))
    for key, label, form in (
        ("tokens_per_s_per_gpu", "tokens/s/GPU", "{:,.0f}"), ("mfu", "MFU", "{:.1f} %"),
        ("memory_gib", "peak memory", "{:.1f} GiB"), ("cost_per_mtoken", "cost per Mtoken", "{:,.3f}"),
    ):  # fmt: skip
        value = _NUMBERS[key].of(best, key)
        if value is not None:
            cards.append(Card(label, form.format(value), "of the best"))
    return cards


def _pareto(results: Sequence[Answer], front: Sequence[Answer], keys: Sequence[str]) -> Section:
    dots, joined = results[:_MOST_DOTS], sorted(front, key=lambda row: row["memory_gib"])
    points = [
        Points(name, colour, [row["memory_gib"] for row in rows], [row["tokens_per_s_per_gpu"] for row in rows],
               [_words(row, keys) for row in rows], [9.0 if line else 6.0] * len(rows), joined=line)
        for name, colour, rows, line in (
            ("best configurations", "plain", dots, False), ("Pareto front", "critical path", joined, True)
        ) if rows
    ]  # fmt: skip
    text = (
        "Up is faster, left needs less memory. No configuration beats one on the front in time, memory and cost at "
        "once; drawn by two of the three, the front need not look like one."
    )
    if len(results) > _MOST_DOTS:
        text += f" The first {_MOST_DOTS:,} of {len(results):,} are drawn."
    chart = Scatter("peak memory, GiB", "tokens/s/GPU", points)
    figures = [Figure("throughput against memory", chart)] if points else []
    return Section("Pareto front", text, figures, [_table("the Pareto front", front, keys)])


def _words(row: Answer, keys: Sequence[str]) -> str:
    shown = list(_NUMBERS.items())[:4]
    values = [(number, value) for key, number in shown if (value := number.of(row, key)) is not None]
    return " | ".join([label_of(row, keys), *(number.words.format(value) for number, value in values)])


def _breakdowns(results: Sequence[Answer], keys: Sequence[str]) -> Section:
    shown = results[:_MOST_BARS]
    if not shown:
        return Section("Where the step goes", "No configuration was simulated.")
    parts = [{key: float(row["breakdown"].get(key, 0.0)) for key in STEP_PARTS} for row in shown]
    series = [Series(name, colour, [part[key] for part in parts]) for key, (name, colour) in STEP_PARTS.items()]
    columns = [Column("configuration"), *(Column(f"{name}, ms", 1) for name, _ in STEP_PARTS.values())]
    labels = [label_of(row, keys) for row in shown]
    rows = [Row([label, *part.values()]) for label, part in zip(labels, parts, strict=True)]
    title = f"step breakdown of the first {len(shown)}"
    bars = Bars([f"{rank}. {label}" for rank, label in enumerate(labels, 1)], series, "ms per step", named=True)
    return Section("Where the step goes", "Mean over the stages.", [Figure(title, bars)], [Table(title, columns, rows)])


def _table(caption: str, rows: Sequence[Answer], keys: Sequence[str]) -> Table:
    numbers = {key: number for key, number in _NUMBERS.items() if any(row.get(key) is not None for row in rows)}
    searched = [Column(_short(key), 0 if all(type(row.get(key)) is int for row in rows) else -1) for key in keys]
    body = [
        Row([rank, *(_plain(row.get(key)) for key in keys), *(number.of(row, key) for key, number in numbers.items())])
        for rank, row in enumerate(rows[:_MOST_ROWS], 1)
    ]
    more = f"the first {_MOST_ROWS} of {len(rows):,}; --json lists all" if len(rows) > _MOST_ROWS else ""
    return Table(caption, [Column("#", 0), *searched, *(number.column for number in numbers.values())], body, more)


def _plain(value: Any) -> Value:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str | int | float) or value is None else str(value)
