"""The risk of a step as cards and tables, for terminal and page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lumos.report.table import Card, Column, Row, Table
from lumos.report.wording import change, ms_text
from lumos.risk.monte_carlo import StepRisk

_NAMES = {
    "gpu": "GPUs", "step": "steps of a GPU", "kernel": "passes", "microbatch": "micro-batches",
    "collective": "collectives", "host": "hosts", "job": "whole steps",
}  # fmt: skip


def risk_cards(risk: StepRisk) -> list[Card]:
    """The percentiles of the step."""
    typical = risk.typical_ms
    slow = ", with what is slow" if risk.slow else ""
    cards = [Card("typical step", ms_text(typical), f"{risk.typical_words}{slow}")]
    for percent, words in ((50, "half of the steps"), (90, "nine of ten steps"), (99, "99 of 100 steps")):
        value = risk.percentile(percent)
        cards.append(Card(f"p{percent}", ms_text(value), f"{change(value, typical)}; {words} are not longer"))
    mean = Card("mean", ms_text(risk.mean_ms), change(risk.mean_ms, typical))
    calm = Card("if nothing differed", ms_text(risk.calm_ms), change(risk.calm_ms, typical))
    return [*cards, mean, *([] if risk.scale == 1 or risk.slow else [calm])]


def causes_table(risk: StepRisk) -> Table:
    """What each variance costs: the same steps drawn without it."""
    sigmas = risk.variability.sigmas
    rows = [
        Row([one.words, _sigma_text(risk, one.name, sigmas), one.p90_ms, one.p90_ms - risk.p90_ms, one.mean_ms])
        for one in risk.causes
    ]
    columns = [Column("what differs"), Column("by about"), Column("p90 without it", form=ms_text),
               Column("change", form=lambda ms: ms_text(ms, signed=True)),
               Column("mean without it", form=ms_text)]  # fmt: skip
    return Table("what makes steps differ, the most expensive first", columns, rows)


def _sigma_text(risk: StepRisk, name: str, sigmas: Mapping[str, float]) -> str:
    if name != "pauses":
        return f"{100 * sigmas[name]:.2g} %"
    pauses = risk.variability.pauses
    return f"{ms_text(pauses.ms)} in 1 of {1 / pauses.probability:,.0f} steps"


def slow_table(slow: Sequence[Mapping[str, Any]]) -> Table:
    """Slow parts of the cluster, each alone."""
    rows = [Row([one["words"], one["delay_ms"], one["step_ms"], one["delays"]]) for one in slow]
    columns = [Column("slow"), Column("adds", form=lambda ms: ms_text(ms, signed=True)),
               Column("step with it alone", form=ms_text), Column("whom it delays")]  # fmt: skip
    return Table("slow parts of the cluster", columns, rows)


def risk_notes(risk: StepRisk) -> list[str]:
    """What the draws rest on."""
    nothing = "" if risk.causes else "nothing: "
    return [f"how much times differ: {nothing}{risk.variability.source}"]


def risk_row(risk: Mapping[str, Any] | None) -> dict[str, Any]:
    """Columns of a CSV file."""
    if not risk:
        return {}
    return {f"risk_{name}_ms": value for name, value in risk["step_ms"].items()} | {"risk_draws": risk["draws"]}
