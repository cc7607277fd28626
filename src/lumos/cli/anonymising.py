"""`lumos convert --anonymise`: checks its options, and reports what the written files still disclose."""

from __future__ import annotations

from collections.abc import KeysView, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lumos.analysis.replay import replay
from lumos.errors import OptionError
from lumos.export.anonymise import DROPS, KEEPS, Anonymised, anonymise
from lumos.graph.rules.build import Execution
from lumos.read.execution_trace import Links
from lumos.read.formats import Form, form_of, head_of
from lumos.read.kineto import read_kineto
from lumos.report.table import Column, Row, Table
from lumos.report.terminal.style import rendered
from lumos.trace.trace import concatenate
from lumos.traced.disclosure import Disclosure, disclosures

_ALL_ROWS = 1000


@dataclass(frozen=True)
class Wishes:
    """What --anonymise, --drop and --keep ask for."""

    anonymise: bool
    drop: tuple[str, ...]
    keep: tuple[str, ...]

    def apply(self, execution: Execution, links: Links | None, output: Path) -> Anonymised | None:
        """The run without names; None where that is not asked for."""
        if not self.anonymise:
            return None
        if self.keep and len(execution.trace.ranks) > 1 and "{rank}" not in output.name:
            raise OptionError(f"-o {output}: --keep shapes needs a file for each rank; put {{rank}} into its name")
        hidden = anonymise(execution, self.drop, links, "shapes" in self.keep)
        if "shapes" in self.keep and not (hidden.execution.trace.argument >= 0).any():
            where = execution.trace.headers[0].path
            raise OptionError(f"--keep shapes: {where} has no shapes of operators; leave it out")
        return hidden


def wishes(anonymised: bool, drop: str, keep: str, output: Path) -> Wishes:
    """The options, checked; OptionError for those that are none, or that contradict each other."""
    found = {"--drop": (drop, DROPS), "--keep": (keep, KEEPS)}
    for option, (text, known) in found.items():
        if text and not anonymised:
            raise OptionError(f"{option} {text}: says what an anonymised trace has in it; add --anonymise")
        for part in _parts(text):
            if part not in known:
                raise OptionError(f"{option} {part}: no such part of a trace; it can {option[2:]} {', '.join(known)}")
    if keep and _parts(drop) & {"sizes", "operators"}:
        raise OptionError(f"--keep {keep} and --drop {drop}: shapes are sizes of named operators; choose one of them")
    if keep and output.name.endswith(".et"):
        raise OptionError(
            f"--keep {keep}: Chakra files have no shapes of operators; use -o 'NAME{{rank}}.trace.json.gz'"
        )
    return Wishes(anonymised, tuple(_parts(drop)), tuple(_parts(keep)))


def _parts(text: str) -> KeysView[str]:
    return dict.fromkeys(part.strip() for part in text.split(",") if part.strip()).keys()


def anonymised_answer(hidden: Anonymised, files: Sequence[str], wanted: Wishes) -> dict[str, Any]:
    """What was removed, and what Lumos still infers from the files that were written."""
    found = _disclosures(hidden, files, wanted.drop)
    answer: dict[str, Any] = {
        "names": {"public": hidden.kept_names, "replaced": hidden.replaced_names},
        "dropped": list(wanted.drop),
        "kept": list(wanted.keep),
        "still_shown": [one._asdict() for one in found],
    }
    if hidden.changed_roles:
        answer["changed_roles"] = hidden.changed_roles
    return answer


def _disclosures(hidden: Anonymised, files: Sequence[str], dropped: Sequence[str]) -> list[Disclosure]:
    written = [read_kineto(path) for path in map(Path, files) if form_of(path, head_of(path)) == Form.KINETO]
    shown = concatenate(written) if written else replace(hidden.execution.trace, arguments=None)
    return disclosures(replay(replace(hidden.execution, before=shown)), dropped)


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
