"""Searches as cards and tables, for terminal and page, from the answer that `lumos search --json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lumos.report.gpu_comparisons import bounds_table, resources_table, same_speed_table, time_table
from lumos.report.table import PROSE, Card, Column, Row, Table, left_out
from lumos.report.wording import STEP_PARTS, ms_text, parameters_text

Answer = Mapping[str, Any]

NUMBERS = {
    "step_ms": (Column("step, ms", 1, bar=True), 1.0),
    "p90_ms": (Column("p90, ms", 1), 1.0),
    "tokens_per_s_per_gpu": (Column("tokens/s/GPU", 0), 1.0),
    "mfu": (Column("MFU, %", 1), 100.0),
    "memory_gib": (Column("memory, GiB", 1), 1.0),
    "joules_per_token": (Column("J/token", form="{:.3g}".format), 1.0),
    "cost_per_mtoken": (Column("cost per Mtoken", form="{:,.4g}".format), 1.0),
    "gpu_hours_per_mtoken": (Column("GPU-hours/Mtoken", form="{:.4g}".format), 1.0),
    "days": (Column("days", 1), 1.0),
    "gpu_hours": (Column("GPU-hours", 0), 1.0),
    "money": (Column("total cost", form="{:,.0f}".format), 1.0),
}  # of a configuration: how it is shown, and times what
_SHORT = {"sequence_parallel": "sp", "micro_batch": "mb", "microbatches": "n"}
_FOLLOW = ("parallel.dp", "train.microbatches")  # from other keys: they need not be said
_OF_CLUSTER = ("cluster.gpu", "cluster.gpus")
_OF_CLUSTERS_BEST = ("step_ms", "p90_ms", "memory_gib", "cost_per_mtoken", "days", "gpu_hours", "money")
_NONE = (None, 0, 1, "")  # values of an axis that need not be said: no such parallelism
_MOST_ROWS = 500
_LEAST = {"time": "least time per token", "cost": "least cost per token", "energy": "least energy per token",
          "gpus": "fewest GPUs"}  # fmt: skip


def search_cards(answer: Answer) -> list[Card]:
    batch, total, active = answer["global_batch"], answer.get("parameters", 0), answer.get("active_parameters", 0)
    size, _, rest = parameters_text(total, active if active < total else 0).partition(" parameters")
    cards = [
        Card("parameters", size, rest.strip(" ()")),
        Card("global batch", f"{batch['sequences']:,}", f"{batch['tokens']:,} tokens; {batch['why']}"),
        Card("valid configurations", f"{answer['evaluated']:,}", f"bounded in {answer['seconds']:,.1f} s"),
        Card("fit into memory", f"{answer.get('fitting', 0):,}"),
        Card("simulated", f"{answer.get('simulated', 0):,}", "all that bounds do not rule out"),
    ]
    if not answer["results"]:
        return [*cards, Card("best", "none", "no configuration is valid, fits and meets the deadline")]
    best = answer["results"][0]
    why = f"{_LEAST.get(answer['objective'], answer['objective'])}{' (90th percentile)' if answer.get('risk') else ''}"
    return [*cards, Card("best", f"{ms_text(best['step_ms'])} per step", f"{why}: {label_of(best, keys_of([best]))}")]


def bound_note(answer: Answer) -> list[str]:
    """How far the best is from the least that any of the configurations could take."""
    if not (answer["results"] and answer.get("bound_ms") and answer["objective"] == "time"):
        return []
    best, bound, own = answer["results"][0]["step_ms"], answer["bound_ms"], answer["results"][0]["bound_ms"]
    gap, own_gap = 100 * (best / bound - 1), 100 * (best / own - 1)
    return [
        f"of the {answer['fitting']:,} configurations that were tried and fit, none can take less than "
        f"{ms_text(bound)}; the best takes {ms_text(best)} (+{gap:.1f} %), {own_gap:.1f} % more than its own lower "
        "bound. Other values can be tried with --vary"
    ]


def risk_note(answer: Answer) -> list[str]:
    """What cost and days are of, where they are not of the typical step."""
    rows = answer["results"]
    if answer.get("risk"):
        return ["p90: nine of ten steps are not longer; GPU-hours, cost and days: nine of ten runs do not need more"]
    if rows and rows[0].get("run_ms") is not None:
        return ["GPU-hours, cost and days are those of a run with its failures, on average; step, ms is without them"]
    return []


def keys_of(rows: Sequence[Answer]) -> list[str]:
    """The searched keys that differ between rows; all of them where none does."""
    keys = list(dict.fromkeys(key for row in rows for key in row if "." in key))
    return [key for key in keys if len({str(row.get(key)) for row in rows}) > 1] or keys


def short(key: str) -> str:
    """parallel.sequence_parallel is sp, cluster.gpus is gpus."""
    name = key.rpartition(".")[2]
    return _SHORT.get(name, name)


def label_of(row: Answer, keys: Sequence[str]) -> str:
    """A configuration in words: "tp 8, pp 4"."""
    return ", ".join(f"{short(key)} {row[key]}" for key in keys if row.get(key) not in _NONE)


def short_label(row: Answer, most: int) -> str:
    """The sizes of a configuration, for the axis of a chart: "tp 8 cp 2 pp 8 dp 128"; at most so many characters."""
    sizes = ("tp", "cp", "pp", "vpp", "ep", "dp", "gpus", "gpu")
    values = ((name, row.get(f"{'cluster' if name.startswith('gpu') else 'parallel'}.{name}")) for name in sizes)
    text = ""
    for name, value in values:
        longer = f"{text} {name} {value}".strip()
        if value not in (None, 1, "") and len(longer) <= most:
            text = longer
    return text


def number_of(row: Answer, key: str) -> float | None:
    return None if row.get(key) is None else NUMBERS[key][1] * float(row[key])


def configurations_table(
    caption: str,
    rows: Sequence[Answer],
    keys: Sequence[str],
    numbers: Sequence[str] = tuple(NUMBERS),
    first: Sequence[str] = (),
    with_variants: bool = True,
) -> Table:
    """Configurations with the values of these keys and numbers; a number that none of them has is left out.

    Numbers in `first` stand before the keys. Families also say how many variants they have, and what those differ in.
    """
    families = with_variants and any("variants" in row for row in rows)
    before, after = ([key for key in group if any(row.get(key) is not None for row in rows)]
                     for group in (first, [key for key in numbers if key not in first]))  # fmt: skip
    searched = [Column(short(key), 0 if all(type(row.get(key)) is int for row in rows) else -1) for key in keys]
    body = [
        Row([
            rank, *(number_of(row, key) for key in before), *(_plain(row.get(key)) for key in keys),
            *(number_of(row, key) for key in after), *([variants_of(row)] if families else []),
        ])
        for rank, row in enumerate(rows[:_MOST_ROWS], 1)
    ]  # fmt: skip
    columns = [Column("#", 0), *(NUMBERS[key][0] for key in before), *searched, *(NUMBERS[key][0] for key in after)]
    columns += [Column("variants", longest=PROSE)] if families else []
    return Table(caption, columns, body, left_out(_MOST_ROWS, rows))


def tried_table(answer: Answer) -> Table:
    """The values that were tried for every key, and the one that is best."""
    best = answer["results"][0] if answer["results"] else {}
    body = [
        Row([key, ", ".join(str(_plain(value)) for value in values), str(_plain(best.get(key, "")))])
        for key, values in answer.get("tried", {}).items()
    ]
    return Table("values that were tried", [Column("key"), Column("values"), Column("best")], body)


def variants_of(family: Answer) -> str:
    """How many variants a family has, and what they differ in: "4: zero 1, 2; mb 1, 2"."""
    count = len(family.get("variants", ()))
    differ = "; ".join(
        f"{short(key)} {', '.join(str(_plain(value)) for value in values)}"
        for key, values in family.get("differ", {}).items()
        if key not in _FOLLOW
    )
    return f"{count}: {differ}" if count > 1 else str(count)


def variants_table(rows: Sequence[Answer]) -> Table:
    """The variants of each family, in a table of its own."""
    body = [Row([rank, *variants_of(row).partition(": ")[::2]]) for rank, row in enumerate(rows, 1)]
    return Table("variants", [Column("#", 0), Column("variants"), Column("they differ in", longest=PROSE)], body)


def families_note(answer: Answer) -> list[str]:
    """What the variants of a family are."""
    if all(len(family["variants"]) < 2 for family in answer.get("families", ())):
        return []
    return [
        f"the variants of a row lay the weights out in the same way and are within {100 * answer['tolerance']:g} % of "
        "it, which is less than predictions can tell apart: choose among them by memory, or by what is simpler; --json "
        "has them all"
    ]


def breakdowns_table(rows: Sequence[Answer], keys: Sequence[str]) -> Table:
    columns = [Column("#", 0), *(Column(name, 1) for name in STEP_PARTS.values()), Column("configuration")]
    body = [
        Row([rank, *(float(row["breakdown"].get(part, 0.0)) for part in STEP_PARTS), label_of(row, keys)])
        for rank, row in enumerate(rows, 1)
    ]
    return Table("where the step goes, ms", columns, body)


def by_gpu_tables(answer: Answer) -> list[Table]:
    """The best on each type and number of GPUs, and the same compared; none where there is one alone."""
    best, compared = answer.get("best_by_gpu") or [], answer.get("comparison")
    skipped = _skipped_tables(answer)
    if not best:
        return skipped
    keys = [key for key in keys_of(best) if key not in _OF_CLUSTER and any(row.get(key) not in _NONE for row in best)]
    caption = "the best on each GPU" if several_types(answer) else "the best on each number of GPUs"
    found = [configurations_table(caption, best, [*_OF_CLUSTER, *keys], _OF_CLUSTERS_BEST), *skipped]
    if not compared or not several_types(answer):
        return found
    found += [time_table(compared), resources_table(compared), bounds_table(compared)]
    return [*found, same_speed_table(compared)] if compared["same_speed"] else found


def _skipped_tables(answer: Answer) -> list[Table]:
    """The GPUs without an answer, and why."""
    rows = answer.get("skipped") or []
    body = [Row([row["cluster.gpu"], str(row["cluster.gpus"]), row["why"]]) for row in rows]
    return [Table("GPUs without an answer", [Column("gpu"), Column("gpus"), Column("why")], body)] if body else []


def several_types(answer: Answer) -> bool:
    """Whether GPUs of several types were compared."""
    compared = answer.get("comparison")
    return compared is not None and len({row["gpu"] for row in compared["gpus"]}) > 1


def lost_table(rows: Sequence[Answer], objective: str) -> Table:
    """Why the others are not the best; of equally many GPUs, the fewest of which are wanted, by days."""
    best = rows[0] if rows else {}
    by_days = objective == "gpus"

    def lost_by(row: Answer) -> float | None:
        key = "days" if by_days and row["cluster.gpus"] == best["cluster.gpus"] else "value"
        return 100 * (row[key] / best[key] - 1) if key == "days" or not by_days else None

    more = [Column("more GPUs", 0)] if by_days else []
    body = [
        Row([
            rank, *([row["cluster.gpus"] - best["cluster.gpus"]] if by_days else []), lost_by(row),
            str(row.get("lost_by", "")),
        ])
        for rank, row in enumerate(rows[1:], 2)
    ]  # fmt: skip
    by = Column("more days, %" if by_days else "by, %", 2)
    return Table("why the others lost", [Column("#", 0), *more, by, Column("why", longest=PROSE)], body)


def _plain(value: Any) -> str | float | None:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str | int | float) or value is None else str(value)
