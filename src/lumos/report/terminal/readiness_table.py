"""What a trace lacks, as a table."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lumos.analysis.readiness import Finding, Readiness
from lumos.report.terminal.style import make_table, notes

_QUESTIONS = {
    "replay": "where the step goes (lumos replay)",
    "scale": "faster kernels or communication (lumos predict --from --scale)",
    "host": "whether the host decides (--scale cpu)",
    "multi_rank": "which rank is slow, waiting apart from transfer",
    "change": "another configuration (lumos predict --from --set)",
}


def show_readiness(found: Readiness, path: str, console: Console) -> None:
    """Which questions can be asked, then what is missing for better answers."""
    steps = ", ".join(found.run.marks.names)
    parts: list[RenderableType] = [
        Text(f"{path}: {len(found.trace.ranks)} of {found.world} rank(s), {steps}"),
        _questions(found.ready),
    ]
    parts += [_one(finding) for finding in found.findings] or [Text("nothing is missing")]
    console.print(Group(*parts, *notes(found.run.execution.warnings)))


def _questions(ready: dict[str, bool]) -> Table:
    table = make_table("what can be asked", "", "")
    for name, text in _QUESTIONS.items():
        table.add_row(Text("yes", style="green") if ready[name] else Text("no", style="red"), text)
    return table


def _one(finding: Finding) -> Table:
    table = make_table(f"lacks {finding.what}", "", "")
    table.show_header = False
    table.add_row("", finding.lacks)
    table.add_row("costs", finding.answers)
    table.add_row("record", finding.record)
    return table
