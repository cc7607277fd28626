"""Writes docs/api.md: every public name with its real signature and what its docstring says."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import lumos

PAGE = Path(__file__).parent / "api.md"
_GROUPS = {
    "Predictions": ("predict", "Prediction", "compare_gpus", "GpuComparison", "Scale", "Tariff"),
    "Traces": ("read_job", "replay", "Replay", "compare", "stragglers", "check", "Trace"),
    "Descriptions": ("read_setup", "write_setup", "Setup", "search", "Objective"),
    "Recording": ("capture", "dry_run", "Recording"),
    "Risk": ("step_risk", "StepRisk", "whole_run", "WholeRun"),
    "Mistakes": ("LumosError",),
}


class _Ellipsis:
    """A default that is too long to be shown."""

    def __repr__(self) -> str:
        return "…"


_ELLIPSIS = _Ellipsis()
_HEAD = """# Python

Written by `make docs` (docs/api_page.py); edit nothing here by hand. Everything is imported from `lumos`; what is not
listed here may change without notice. Names are loaded when they are first used, so `import lumos` costs nothing.
"""


def page() -> str:
    """The whole page."""
    listed = [name for names in _GROUPS.values() for name in names]
    others = tuple(sorted(set(lumos.__all__) - set(listed)))
    groups = {**_GROUPS, **({"Others": others} if others else {})}
    parts = [_HEAD]
    for title, names in groups.items():
        parts.append(f"## {title}\n")
        parts += [_entry(name) for name in names if name in lumos.__all__]
    return "\n".join(parts)


def _entry(name: str) -> str:
    thing = getattr(lumos, name)
    if inspect.ismodule(thing):  # called as its function of the same name
        thing = getattr(thing, name)
    text = f"### {name}\n\n```\n{_signature(name, thing)}\n```\n\n{_text(thing)}\n"
    rows = _members(thing) if inspect.isclass(thing) else []
    if rows:
        text += "\n| | |\n|---|---|\n" + "".join(f"| `{member}` | {says} |\n" for member, says in rows)
    return text


def _signature(name: str, thing: Any) -> str:
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return f"class {name}({thing.__bases__[0].__name__})"
    try:
        signature = _unquoted(inspect.signature(thing))
    except (TypeError, ValueError):
        signature = ""
    if inspect.isclass(thing):
        return _folded(f"class {name}{signature.removesuffix(' -> None')}")
    return _folded(f"{name}{signature}")


def _unquoted(signature: inspect.Signature) -> str:
    """Annotations as they were written, and short defaults."""
    brief = [
        p.replace(default=_ELLIPSIS) if p.default is not p.empty and len(repr(p.default)) > 20 else p
        for p in signature.parameters.values()
    ]
    signature = signature.replace(parameters=brief)
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(signature))


def _folded(line: str) -> str:
    """An argument a line where one line is too long."""
    if len(line) <= 110:
        return line
    name, _, rest = line.partition("(")
    inside, _, answer = rest.rpartition(")")
    return f"{name}(\n" + "".join(f"    {part},\n" for part in _arguments(inside)) + f"){answer}"


def _arguments(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[begin:at].strip())
            begin = at + 1
    return [*parts, text[begin:].strip()]


def _text(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "")


def _members(thing: type) -> list[tuple[str, str]]:
    """Public properties and methods that say what they are, those of the class itself."""
    rows = []
    fields = {f.name for f in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
    for name, member in vars(thing).items():
        if name.startswith("_") or name in fields:
            continue
        if isinstance(member, (property, cached_property)):
            getter: Any = member.func if isinstance(member, cached_property) else member.fget
            rows.append((f"{name}: {inspect.signature(getter).return_annotation}", _first_line(member)))
        elif inspect.isfunction(member) or isinstance(member, staticmethod | classmethod):
            function = member if inspect.isfunction(member) else member.__func__
            rows.append((f"{name}{_unquoted(inspect.signature(function))}", _first_line(function)))
    return [(_cell(member), says) for member, says in rows if says]


def _cell(text: str) -> str:
    return text.replace("(self, ", "(").replace("(self)", "()").replace("'", "").replace("|", "\\|")


def _first_line(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "").partition("\n")[0].replace("|", "\\|")


if __name__ == "__main__":
    text = page()
    PAGE.write_text(text, "utf-8")
    sys.stdout.write(f"{PAGE.name}: {len(lumos.__all__)} names\n")
