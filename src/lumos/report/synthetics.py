"""Synthetic runs as cards and tables, from the answer that `lumos synthesise --json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lumos.report.table import Card, Column, Row, Table
from lumos.report.wording import ms_text, number_text

Answer = Mapping[str, Any]


def size_text(answer: Answer) -> str:
    """ "2 ranks, 2 steps, 8 layers"."""
    return _counted(answer, "ranks", "steps", "layers")


def _counted(numbers: Answer, *names: str) -> str:
    """ "2 ranks, 1 step": those that are not zero."""
    return ", ".join(
        f"{numbers[name]:,} {name if numbers[name] != 1 else name[:-1]}" for name in names if numbers[name]
    )


def synthetic_cards(answer: Answer) -> list[Card]:
    """The step, how far it is from recorded ones, and whether it reproduces an original."""
    note = f"learned from {_counted(answer['learned_from'], 'jobs', 'steps', 'tasks')}"
    cards = [Card("synthetic step", ms_text(answer["step_ms"]), note)]
    for one in answer["distances"][:1]:
        text = f"{ms_text(one['reference_step_ms'])} in {one['reference']}"
        cards.append(Card("against recorded", f"{number_text(one['step_pct'], 1, signed=True)} %", text))
        points = f"{number_text(one['breakdown_points'], 1)} points"
        cards.append(Card("breakdown", points, "the part that differs most"))
    if answer["nearness"]:
        verdict = {False: "no original", True: "nearer than recorded steps are", None: "no yardstick"}
        cards.append(Card("reproduces", verdict[answer["reproduces_an_original"]], _nearness_note(answer)))
    return cards


def _nearness_note(answer: Answer) -> str:
    own, *others = answer["nearness"].values()
    if not others:
        return "a single step was learned from: name another one of the same run with --against"
    return (
        f"{_percent(own['median_distance'])} from the nearest original, recorded steps "
        f"{_percent(others[0]['median_distance'])}"
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def distance_tables(answer: Answer) -> list[Table]:
    """What is preserved."""
    found = answer["distances"]
    if not found:
        return []
    return [_summary(found), _parts(found[0]), _collectives(found[0]), _times(found)]


def _summary(found: list[Answer]) -> Table:
    columns = [
        Column("recorded run"), Column("its step", form=ms_text), Column("synthetic", form=ms_text),
        Column("step, %", 1, signed=True), Column("breakdown, points", 1), Column("critical path, points", 1),
    ]  # fmt: skip
    rows = [
        Row([one["reference"], one["reference_step_ms"], one["step_ms"], one["step_pct"],
             one["breakdown_points"], one["path_points"]])
        for one in found
    ]  # fmt: skip
    return Table("what is preserved", columns, rows)


def _parts(one: Answer) -> Table:
    columns = [Column("part"), Column("synthetic, %", 1), Column("recorded, %", 1)]
    shares = [(f"step: {part['part']}", part) for part in one["breakdown"]]
    shares += [(f"critical path: {part['kind']}", part) for part in one["path"]]
    rows = [
        Row([name, 100 * part["share"], 100 * part["reference_share"]])
        for name, part in shares
        if part["share"] or part["reference_share"]
    ]
    return Table(f"where the time goes, against {one['reference']}", columns, rows)


def _collectives(one: Answer) -> Table:
    columns = [
        Column("collective"), Column("a step", 1), Column("recorded", 1), Column("MB a step", 1),
        Column("MB recorded", 1),
    ]  # fmt: skip
    rows = [
        Row([row["collective"], row["count"], row["reference_count"], row["bytes"] / 1e6, row["reference_bytes"] / 1e6])
        for row in one["collectives"]
    ]
    return Table("collectives of a rank", columns, rows)


def _times(found: list[Answer]) -> Table:
    kinds = sorted({kind for one in found for kind in one["durations_apart"]})
    columns = [Column("kind"), *(Column(one["reference"], 2) for one in found[:4])]
    rows = [Row([kind, *(one["durations_apart"].get(kind) for one in found[:4])]) for kind in kinds]
    return Table("distributions of times apart, from 0 (the same) to 1", columns, rows)


def nearness_table(answer: Answer) -> Table:
    """How near synthetic and recorded steps come to the originals."""
    columns = [
        Column("steps"), Column("distance, %", 1), Column("nearest 1 %, %", 1), Column("new windows, %", 1),
        Column("longest run", 0), Column("equal kernels, %", 2),
    ]  # fmt: skip
    rows = [
        Row([name, *(None if one[key] is None else 100 * one[key] for key in
                     ("median_distance", "nearest_distance", "new_windows")), one["longest_run"],
             100 * one["equal_tasks"]])
        for name, one in answer["nearness"].items()
    ]  # fmt: skip
    return Table("how near to the originals", columns, rows)


def synthetic_notes(answer: Answer) -> list[str]:
    return list(answer["warnings"])
