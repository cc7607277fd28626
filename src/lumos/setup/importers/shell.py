"""The options in a shell script, read as text: variables are put in where they stand, and nothing is ever run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from lumos.errors import InputError
from lumos.setup.importers.arithmetic import worth
from lumos.setup.importers.branches import Walk, unfolded
from lumos.setup.importers.imported import listed

_SBATCH = re.compile(r"(?m)^[ \t]*#SBATCH[ \t]+(.*)$")
_COMMENT = re.compile(r"(?m)(^|\s)#.*$")
_CONTINUED = re.compile(r"\\\r?\n")
_COMMANDS = re.compile(r"\$\((?!\()[^()\n]*\)|`[^`\n]*`")
_BEFORE_NAME = r"[ \t]*(?:(?:export|local|readonly|declare|typeset)[ \t]+)?"
_INNER = r"\$\{[^{}\n]*\}"
_VALUE = rf"(?:{_INNER}|\$\(\([^\n]*?\)\)|\$\(\)|\"(?:{_INNER}|[^\"])*+\"|'[^']*'|[^\s;()\"'`&|<>])*+"
_ASSIGNMENT = re.compile(rf"{_BEFORE_NAME}([A-Za-z_]\w*)=(?!\()({_VALUE})")
_ASSIGNED_TO = re.compile(rf"^{_BEFORE_NAME}[A-Za-z_]\w*\+?=\(?", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{(\w+)(?:(:?[-=])([^{}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([\w\s*/%+()-]{1,200}?)\)\)")
_OPTION = re.compile(r"--([A-Za-z0-9][\w.\-]{0,100})(?:=(.*))?", re.ASCII | re.DOTALL)
_LONGEST = 4 << 20  # characters, after variables are put in: a few lines can double each other many times
_LONGEST_VARIABLE = 1 << 16
_NESTED = 4

Options = Mapping[str, list[str]]


class Script(NamedTuple):
    """What the text of a script tells without running it."""

    options: Options  # --name and the words after it, the last mention counting; dashes in the place of underscores
    variables: Mapping[str, str]
    slurm: Options  # of the lines #SBATCH
    repeated: Mapping[str, list[str]]  # options that stand there with several values
    notes: tuple[str, ...]


def read_shell(text: str, where: str) -> Script:
    """The options and variables of a script, or of a line of options. Branches that are not taken do not count."""
    slurm, _ = _options(" ".join(_SBATCH.findall(text)))
    plain = _CONTINUED.sub(" ", _COMMENT.sub(r"\1", text))
    for _ in range(_NESTED):
        plain = _COMMANDS.sub("$()", plain)
    variables: dict[str, str] = {}

    def filled(piece: str) -> str:
        return _filled_in(piece, variables, _LONGEST_VARIABLE, where)

    walk = Walk(filled)
    kept = "\n".join(_walked(unfolded(plain), walk, variables, filled))
    whole = _filled_in(kept, variables, _LONGEST, where)
    options, mentions = _options(re.sub(r"[\"']", " ", _ASSIGNED_TO.sub("", whole)))
    repeated = {name: values for name, values in mentions.items() if len(set(values)) > 1}
    notes: tuple[str, ...] = ()
    if walk.undecided:
        notes = (f"conditions that its text does not decide, so every branch counts: {listed(walk.undecided)}",)
    return Script(options, variables, slurm, repeated, notes)


def _walked(text: str, walk: Walk, variables: dict[str, str], filled: Callable[[str], str]) -> Iterator[str]:
    """The lines that count. A value in quotes may go over several, so assignments are looked for in what follows."""
    at = 0
    quoted_to = 0  # up to here the text belongs to an assignment that was read already
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        line = text[at:end]
        if at < quoted_to:
            if walk.taken:
                yield line
        else:
            kept = walk.line(line)
            yield kept
            if kept:
                quoted_to = _assign(text, end - len(kept), variables, filled)
        at = end + 1


def _assign(text: str, at: int, variables: dict[str, str], filled: Callable[[str], str]) -> int:
    """NAME=value, several on a line perhaps; each may use those before it. Answers where the last one ends."""
    found = _ASSIGNMENT.match(text, at)
    while found:
        variables[found[1]] = filled(found[2].replace('"', "").replace("'", ""))
        at = found.end()
        found = _ASSIGNMENT.match(text, at) if text[at : at + 1] in (" ", "\t", ";") else None
        if found is None and text[at : at + 1] == ";":
            found = _ASSIGNMENT.match(text, at + 1)
    return at


def _options(text: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The options, and the first words of all their mentions."""
    options: dict[str, list[str]] = {}
    mentions: dict[str, list[str]] = {}
    values: list[str] = []
    name = ""
    for word in text.split():
        word = word.rstrip(";,") if "(" in word else word.rstrip(";,)")
        option = _OPTION.fullmatch(word)
        if option:
            name = option[1].replace("_", "-")
            values = [option[2]] if option[2] else []
            options[name] = values
            mentions.setdefault(name, []).extend(values)
        elif word:
            if name and not values:
                mentions[name].append(word)
            values.append(word)
    return options, mentions


def _filled_in(text: str, variables: Mapping[str, str], longest: int, where: str) -> str:
    """The text with variables, their defaults and whole-number arithmetic put in. What is not known stays."""

    length = 0

    def value(match: re.Match[str]) -> str:
        nonlocal length
        name, default = match[1] or match[4], match[3]
        found = variables.get(name)
        if default is not None and (found is None or (found == "" and match[2].startswith(":"))):
            found = default.replace('"', "").replace("'", "")
        if found is None:
            return match[0]
        length += len(found)
        if length > longest:
            raise InputError(f"{where}: its variables grow beyond {longest >> 10} KiB")
        return found

    def result(match: re.Match[str]) -> str:
        number = worth(match[1], variables)
        return match[0] if number is None else str(number)

    for _ in range(_NESTED):  # a default may hold a variable with a default
        length = len(text)
        before, text = text, _ARITHMETIC.sub(result, _VARIABLE.sub(value, text))
        if text == before:
            break
    return text
