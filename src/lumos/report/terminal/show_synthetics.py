"""Synthetic runs on a terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType

from lumos.report.synthetics import (
    Answer,
    distance_tables,
    nearness_table,
    size_text,
    synthetic_cards,
    synthetic_notes,
)
from lumos.report.terminal.style import notes, rendered, summary


def show_synthetic(answer: Answer, console: Console) -> None:
    """What was generated, what it preserves, how near it comes to originals."""
    parts: list[RenderableType] = [summary(f"synthetic run: {size_text(answer)}", synthetic_cards(answer))]
    parts += [rendered(table) for table in distance_tables(answer) if table.rows]
    if answer["nearness"]:
        parts.append(rendered(nearness_table(answer)))
    for name in ("files", "model"):
        if answer[name]:
            files = answer[name] if isinstance(answer[name], list) else [answer[name]]
            shown = files[0] if len(files) == 1 else f"{files[0]} … {files[-1]}, {len(files)} files"
            parts.append(f"{name}: {shown}")
    console.print(Group(*parts, *notes(synthetic_notes(answer))))
