"""Search page: the report of a search, from the answer that `lumos search --json` prints."""

from __future__ import annotations

from collections.abc import Sequence

from lumos.report.gpu_comparisons import refusals, same_speed_table
from lumos.report.html.charts import Bars, Points, Scatter, Series
from lumos.report.html.gpu_page import gpu_sections
from lumos.report.html.page import Figure, Page, Section
from lumos.report.html.parts import STEP_PARTS
from lumos.report.searches import (
    NUMBERS,
    Answer,
    bound_note,
    breakdowns_table,
    by_gpu_tables,
    configurations_table,
    families_note,
    keys_of,
    label_of,
    lost_table,
    number_of,
    risk_note,
    search_cards,
    several_types,
    short,
    short_label,
    tried_table,
    variants_table,
)
from lumos.report.table import Card, Column, Row, Table

_MOST_DOTS = 4000
_MOST_BARS = 15
_LONGEST_LABEL = 38  # characters beside a bar; longer ones would be cut
_FIRST = ("step_ms", "p90_ms", "memory_gib", "mfu")  # before the keys, so that they are seen on any screen
_SUBTITLE = (
    "model.name", "model.preset", "model.layers", "cluster.gpus", "cluster.gpu", "train.global_batch", "train.seq",
)  # fmt: skip


def search_page(answer: Answer) -> Page:
    """The page of an answer, which may be that of a merged search."""
    best, front = list(answer.get("families") or answer["results"]), list(answer.get("pareto", ()))
    keys, setup = keys_of([*best, *front]), answer["setup"]
    tried = {key: ", ".join(str(value) for value in values) for key, values in answer.get("tried", {}).items()}
    shown = (f"{short(key)} {tried.get(key) or setup[key]}" for key in _SUBTITLE if setup.get(key) not in (None, ""))
    fixed = [Row([key, str(value)]) for key, value in setup.items() if value not in (None, "", [], ())]
    return Page(
        title=f"Search: {answer['evaluated']:,} configurations bounded, {answer.get('simulated', 0):,} simulated",
        subtitle=" · ".join(shown),
        cards=[*search_cards(answer), *_best_cards(best[:1])],
        sections=[
            _results(answer, best, keys),
            *_by_gpu(answer),
            _pareto(best, front, keys),
            _breakdowns(best[:_MOST_BARS], keys),
            Section("What was tried", " ".join(f"{_sentence(text)}." for text in bound_note(answer)),
                    tables=[tried_table(answer)] if answer.get("tried") else []),
            Section("Setup", "The setup that the search started from.", tables=[
                Table("values of the setup", [Column("key"), Column("value")], fixed)
            ]),
        ],
        notes=[
            *(str(note) for note in answer.get("warnings", ())),
            *(refusals(answer["comparison"]) if several_types(answer) else ()),
        ],
    )  # fmt: skip


def _results(answer: Answer, best: Sequence[Answer], keys: Sequence[str]) -> Section:
    """The best configurations, and why the others lost."""
    said = [
        f"ordered by {answer['objective']}{' at the 90th percentile' if answer.get('risk') else ''}: "
        f"{answer['evaluated']:,} valid configurations got their memory and a lower "
        f"bound on their time, and {answer.get('simulated', 0):,} that might still be among the best were simulated",
        *families_note(answer),
        *risk_note(answer),
    ]  # fmt: skip
    same = [key for key in keys_of(best[:1]) if key not in keys]
    if best and same:
        said.append(f"all have {label_of(best[0], same)}")
    tables = [configurations_table("configurations", best, keys, first=_FIRST, with_variants=False)]
    lost = [lost_table(best, answer["objective"])] if len(best) > 1 else []
    variants = [variants_table(best)] if any(len(row.get("variants", ())) > 1 for row in best) else []
    tables += [*lost, *variants]
    return Section("Best configurations", " ".join(f"{_sentence(text)}." for text in said), tables=tables)


def _by_gpu(answer: Answer) -> list[Section]:
    """The best on each GPU side by side, where several types or numbers were searched."""
    tables = by_gpu_tables(answer)
    if not several_types(answer):
        return [Section("Numbers of GPUs", "The best configuration on each.", tables=tables)] if tables else []
    compared = answer["comparison"]
    own = [tables[0], *([same_speed_table(compared)] if compared["same_speed"] else [])]
    return [Section("GPUs", "The best configuration on each, compared below.", tables=own), *gpu_sections(compared)]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _best_cards(best: Sequence[Answer]) -> list[Card]:
    table = configurations_table("", best, [], [key for key in NUMBERS if key != "step_ms"], with_variants=False)
    shown = zip(table.columns[1:], table.body()[0][1][1:], strict=True) if best else ()
    return [Card(column.title, cell.text, "of the best") for column, cell in shown]


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
    figures = [Figure("throughput against memory", Scatter("peak memory, GiB", "tokens/s/GPU", points))]
    table = configurations_table("the Pareto front", front, keys, first=_FIRST)
    return Section("Pareto front", text, figures if points else [], [table])


def _words(row: Answer, keys: Sequence[str]) -> str:
    numbers = [(NUMBERS[key][0].title, number_of(row, key)) for key in list(NUMBERS)[:4]]
    return " | ".join([label_of(row, keys), *(f"{title} {x:,.1f}" for title, x in numbers if x is not None)])


def _breakdowns(results: Sequence[Answer], keys: Sequence[str]) -> Section:
    if not results:
        return Section("Where the step goes", "No configuration was simulated.")
    series = [
        Series(name, colour, [float(row["breakdown"].get(part, 0.0)) for row in results])
        for part, (name, colour) in STEP_PARTS.items()
    ]
    shown = (short_label(row, _LONGEST_LABEL) or label_of(row, keys) for row in results)
    labels = [f"{rank}. {label}" for rank, label in enumerate(shown, 1)]
    table = breakdowns_table(results, keys)
    bars = Bars(labels, series, "ms per step", named=True)
    title = f"step breakdown of the first {len(results)}"
    return Section("Where the step goes", "Mean over the stages.", [Figure(title, bars)], [table])
