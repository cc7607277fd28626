"""Risk view: the distribution of a step, and what makes it wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lumos.report.html.charts import Bars, Points, Scatter, Series
from lumos.report.html.page import Figure, Page, Section
from lumos.report.risks import causes_table, risk_cards, risk_notes, slow_table
from lumos.report.wording import ms_text
from lumos.risk.monte_carlo import StepRisk

_BINS = 100


def with_risk(page: Page, risk: StepRisk | None, slow: Sequence[Mapping[str, Any]]) -> Page:
    """A page with the risk of its step and with slow parts of the cluster, where they were asked for."""
    sections = list(page.sections)
    if slow:
        text = "What each alone adds to the step; the prediction has all of them."
        sections.insert(0, Section("Slow parts", text, tables=[slow_table(slow)]))
    if risk is None:
        return replace(page, sections=sections)
    sections.insert(0, risk_section(risk))
    cards = [*page.cards, *risk_cards(risk)[1:]]
    return replace(page, cards=cards, sections=sections, notes=[*page.notes, *risk_notes(risk)])


def risk_section(risk: StepRisk) -> Section:
    """A histogram of the step, and the variances that make it wide."""
    text = (
        f"{risk.draws:,} steps were drawn. GPUs, steps, passes, collectives and hosts differ from the typical ones; "
        "ranks that meet wait for the slowest. The longest steps, at most 1 % of them, are not in the picture. "
        f"The typical step is {ms_text(risk.typical_ms)}: {risk.typical_words}."
    )
    figures = [Figure("steps by their length, % of them", _histogram(risk))]
    if risk.causes:
        saved = [max(0.0, risk.p90_ms - one.p90_ms) for one in risk.causes]
        bars = Bars([one.words for one in risk.causes], [Series("less without it", "better", saved)], "ms of the p90")
        figures.append(Figure("what nine of ten steps would gain without each variance", bars))
    return Section("Risk of the step", text, figures, [causes_table(risk)] if risk.causes else [])


def _histogram(risk: StepRisk) -> Scatter:
    low, middle, late, high = (float(edge) for edge in np.quantile(risk.step_ms, [0.001, 0.5, 0.9, 0.99]))
    low, high = min(low, risk.typical_ms), max(high, middle + 3 * (late - middle), risk.typical_ms)
    count, edges = np.histogram(risk.step_ms, bins=_BINS, range=(low, high if high > low else low + 1e-3))
    share = 100 * count / len(risk.step_ms)
    x = np.repeat(edges, 2)
    y = np.concatenate([[0.0], np.repeat(share, 2), [0.0]])
    top = float(share.max(initial=1.0))
    marks = {"typical step": ("plain", risk.typical_ms), "p50": ("better", risk.percentile(50)),
             "p90": ("comm", risk.p90_ms), "p99": ("worse", risk.percentile(99))}  # fmt: skip
    lines = [Points(name, colour, [at, at], [0.0, top], is_bound=True) for name, (colour, at) in marks.items()]
    shape = Points("drawn steps", "compute", x, y, sizes=np.full(len(x), 1.0), joined=True)
    return Scatter("step, ms", "% of the steps", [shape, *lines])
