"""Prediction page: the report of a predicted run, from a description, a trace, or a trace of another configuration."""

from __future__ import annotations

from lumos.graph.critical_path import SLOW_PARTS
from lumos.prediction.prediction import Prediction
from lumos.report import predictions
from lumos.report.html.memory_view import dry_memory_section, memory_section
from lumos.report.html.page import Page, Section
from lumos.report.html.parts import (
    STEP_PARTS,
    before_and_after_section,
    breakdown_section,
    collectives_section,
    path_section,
    timeline_section,
)
from lumos.report.html.replay_page import subtitle_of
from lumos.report.html.roofline import roofline_section
from lumos.report.html.timeline import run_timeline
from lumos.report.table import Column, Row, Table
from lumos.report.wording import ms_text, title_of
from lumos.setup.setup import Setup

_UNDERSTOOD = "Phases and layers as they were recognised; what is predicted rests on these times."


def prediction_page(found: Prediction) -> Page:
    """The whole report."""
    timeline = run_timeline(found.run)
    if found.setup is not None:  # there is no other step, and no profiler
        timeline = timeline._replace(step="predicted step")
    words = "Predicted, without a profiler. Waiting for other ranks counts as communication."
    if found.traced is not None:
        words = (
            "As modelled: one rank stands for all ranks of its pipeline stage. Before and after, above, takes the "
            "recorded parts and changes them as the model does."
        )
    elif found.step is not None:
        words = "One rank stands for all ranks of its pipeline stage. Idle is the pipeline's bubble and the host."
    if SLOW_PARTS in found.critical_path.by_kind:
        words += " Waiting for slow parts of the cluster is idle, too."
    sections = [
        *_before_and_after(found),
        breakdown_section(found.run.breakdown_by_rank, words),
        timeline_section(timeline),
        path_section(found.critical_path),
        collectives_section(found.run.collectives, max(len(found.run.steps.names), 1)),
        *_of_setup(found),
    ]
    return _page(found, sections, timeline.kinds)


def prediction_summary(found: Prediction) -> Page:
    """The same without charts, for a notebook."""
    sections = [*_before_and_after(found), breakdown_section(found.run.breakdown_by_rank, "")]
    return _page(found, [*sections, *([memory_section(found)] if found.step is not None else [])], [])


def _page(found: Prediction, sections: list[Section], kinds: list[str]) -> Page:
    ranks = [str(rank) for rank in found.run.trace.ranks]
    cards = [*predictions.prediction_cards(found), *predictions.cost_cards(found)]
    return Page(_title(found), _subtitle(found), cards, sections, found.warnings, ranks, kinds=kinds)


def _title(found: Prediction) -> str:
    if found.setup is None:
        scales = ", ".join(f"{scale.what} × {scale.factor:g}" for scale in found.scales) or "nothing changed"
        return f"What if {scales}: {ms_text(found.step_ms)} per step"
    title = title_of(found.setup, found.parameters, not found.is_dry)
    return f"{'Prediction' if found.traced is None else 'Changed run'}: {title}"


def _subtitle(found: Prediction) -> str:
    if found.setup is None:
        return subtitle_of(found.replayed) if found.replayed else ""
    train = found.setup.train
    if found.is_dry:
        return f"dry run; {found.tokens:,} tokens per step and rank" if found.tokens else "dry run"
    return f"{train.framework}, {train.precision}, sequences of {train.seq:,} tokens, {train.global_batch:,} per step"


def _before_and_after(found: Prediction) -> list[Section]:
    """Parts of the traced step and of the predicted one."""
    before, after = found.baseline_breakdown, found.breakdown
    if before is None:
        return []
    names = [name for name, _ in STEP_PARTS.values()]
    was, now = ([getattr(parts, key) for key in STEP_PARTS] for parts in (before, after))
    text = "Both without the profiler."
    return [before_and_after_section("Before and after", text, names, was, now, predictions.parts_of_step_table(found))]


def _of_setup(found: Prediction) -> list[Section]:
    """What only a run without a trace has."""
    if found.setup is None:
        return []
    if found.step is None:  # a dry run
        return [dry_memory_section(found), Section("Operators", tables=[predictions.operators_table(found)])]
    sections = [memory_section(found), *([] if found.is_of_cpu else [roofline_section(found)])]
    sections.append(setup_section(found.setup))
    if found.traced is not None:
        tables = [predictions.understood_table(found.traced.understood)]
        tables += [predictions.inferred_table(found.inferred)] if found.inferred else []
        sections.append(Section("What was understood of the trace", _UNDERSTOOD, tables=tables))
    return sections


def setup_section(setup: Setup) -> Section:
    """Every value, so that the report says what it is about."""
    rows = [
        Row([f"{name}.{key}", predictions.value_text(value)])
        for name in setup.stated_sections
        for key, value in getattr(setup, name).stated().items()
        if value not in (None, "", (), [])
    ]
    return Section("Setup", tables=[Table("values of the setup", [Column("key"), Column("value")], rows)])
