"""Slowdowns by stragglers on a terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType

from lumos.analysis.slowdown_causes import Diagnosis
from lumos.report import slowdowns
from lumos.report.terminal.style import notes, rendered, summary

_FEW = 8


def show_slowdown(found: Diagnosis, console: Console) -> None:
    """Who slows the job down, why, and what mending it would give."""
    lost, job = found.slowdown, found.slowdown.job
    title = f"stragglers of {job.name}: {slowdowns.size_text(job)}"
    parts: list[RenderableType] = [summary(title, slowdowns.slowdown_cards(found))]
    parts += [rendered(slowdowns.causes_table(found)), rendered(slowdowns.fixes_table(found))]
    parts += [rendered(slowdowns.types_table(lost)), rendered(slowdowns.workers_table(lost), _FEW)]
    parts += [rendered(table, _FEW) for table in slowdowns.places_tables(lost)]
    console.print(Group(*parts, rendered(slowdowns.steps_table(lost), _FEW), *notes(job.warnings)))
