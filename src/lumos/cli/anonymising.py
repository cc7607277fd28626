"""`lumos convert --anonymise`: checks its options, and reports what the written files still disclose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from lumos.analysis.replay import replay
from lumos.change.infer.disclosure import Disclosure, disclosures
from lumos.errors import OptionError
from lumos.export.anonymise import DROPS, Anonymised
from lumos.report.table import Column, Row, Table
from lumos.report.terminal.style import rendered

_ALL_ROWS = 1000


def checked_drops(anonymised: bool, drop: str) -> list[str]:
    """The values of --drop; OptionError for one that is none, or that nothing is dropped from."""
    if drop and not anonymised:
        raise OptionError(f"--drop {drop}: says what an anonymised trace leaves out; add --anonymise")
    wanted = [part.strip() for part in drop.split(",") if part.strip()]
    for part in wanted:
        if part not in DROPS:
            raise OptionError(f"--drop {part}: no such part of a trace; it can drop {', '.join(DROPS)}")
    return wanted


def anonymised_answer(hidden: Anonymised, files: Sequence[str], drops: Sequence[str]) -> dict[str, Any]:
    """What was removed, and what Lumos still infers from the files that were written."""
    found = _disclosures(hidden, files)
    answer: dict[str, Any] = {
        "names": {"public": hidden.kept_names, "replaced": hidden.replaced_names},
        "dropped": list(drops),
        "still_shown": [one.as_dict() for one in found],
    }
    if hidden.changed_roles:
        answer["changed_roles"] = hidden.changed_roles
    return answer


def _disclosures(hidden: Anonymised, files: Sequence[str]) -> list[Disclosure]:
    execution = hidden.execution
    of_rank = dict(zip(execution.trace.ranks, files, strict=False)) if len(files) > 1 else {}
    headers = tuple(h._replace(path=of_rank.get(h.rank, files[0])) for h in execution.trace.headers)
    trace = replace(execution.trace, headers=headers)
    return disclosures(replay(replace(execution, trace=trace, nodes=replace(execution.nodes, trace=trace))))


def show_anonymised(answer: dict[str, Any], console: Console) -> None:
    """The table of what is still shown."""
    names = answer["names"]
    text = f"names: {names['public']} public ones kept, {names['replaced']} replaced; times begin at zero"
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    if answer.get("changed_roles"):
        changed = f"{answer['changed_roles']} names are read otherwise than before: compare lumos replay of both"
        console.print(f"warning: {changed}", highlight=False, markup=False, soft_wrap=True)
    rows = [Row([one["what"], one["value"], one["shown_by"], one["drop"] or "–"]) for one in answer["still_shown"]]
    columns = (Column("still shown"), Column("value"), Column("evidence"), Column("--drop"))
    console.print(rendered(Table("what the files still disclose", columns, rows), _ALL_ROWS))
