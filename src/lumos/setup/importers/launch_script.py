"""Launch scripts: their options, variables and number of GPUs, read as text. Nothing is ever run.

Variables, their defaults, $(( )) and `if` and `case` are followed as far as the text decides; where it does not decide
a condition, all of its branches are read and a note says so.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import NamedTuple

from lumos.errors import InputError
from lumos.setup.gpus import find_gpu
from lumos.setup.importers.foreign_file import Findings
from lumos.setup.messages import listed

_SBATCH = re.compile(r"(?m)^[ \t]*#SBATCH[ \t]+(.*)$")
_COMMENT = re.compile(r"(?m)(^|\s)#.*$")
_CONTINUED = re.compile(r"\\\r?\n")
_COMMAND = re.compile(r"\$\((?!\()(?:\$\(\)|[^()\n])*+\)|`[^`\n]*`")  # may hold commands that are left out already
_BEFORE_NAME = r"[ \t]*(?:(?:export|local|readonly|declare|typeset)[ \t]+)?"
_INNER = r"\$\{[^{}\n]*\}"
_VALUE = rf"(?:{_INNER}|\$\(\([^\n]*?\)\)|\$\(\)|\"(?:{_INNER}|[^\"])*+\"|'[^']*'|[^\s;()\"'`&|<>])*+"
_ASSIGNMENT = re.compile(rf"{_BEFORE_NAME}([A-Za-z_]\w*)=(?!\()({_VALUE})")
_ASSIGNED_TO = re.compile(rf"^{_BEFORE_NAME}[A-Za-z_]\w*\+?=\(?", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{(\w+)(?:(:?[-=])([^{}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([\w\s*/%+()-]{1,200}?)\)\)")
_OPTION = re.compile(r"--([A-Za-z0-9][\w.\-]{0,100})(?:=(.*))?", re.ASCII | re.DOTALL)
_PROGRAM = re.compile(r"(?:^|[\s/\"'=}])([A-Za-z_][\w-]{0,100}\.py)(?=$|[\s\"';)])", re.ASCII | re.MULTILINE)
_QUOTES = str.maketrans("", "", "\"'")
# Words that branch are put on lines of their own: `if X; then A; fi`.
_INLINE = re.compile(r";[ \t]*(?=(?:then|else|elif|fi|esac|done)\b)|(?<=\bthen)[ \t]+(?=\S)|(?<=\belse)[ \t]+(?=\S)")
_CONTROL = re.compile(r"[ \t]*(if|elif|else|fi|then|case|esac)\b[ \t]*([^\n]*)")
_CASE_PATTERN = re.compile(r"[ \t]*\(?([\w.*?|\"' \t-]{1,200})\)(?!\))[ \t]*([^\n]*)")
_SOURCED = re.compile(r"[ \t]*(?:source|\.)[ \t]+([^\s;&|]{1,500})")
_NUMBER = re.compile(r"-?\d{1,18}", re.ASCII)
_TEST = re.compile(r"\[\[?\s(.*?)\s\]\]?")
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt,
    "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le,
}  # fmt: skip
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
# Bounds: a few lines of a script can double each other many times.
_LONGEST = 4 << 20  # characters, with the values of variables
_LONGEST_VARIABLE = 1 << 16
_MOST_FILLED = 16 << 20  # characters in which variables are looked for, in all
_LARGEST_NUMBER = 10**15
_NESTED = 4
_DEEPEST = 100

_PER_NODE = ("GPUS_PER_NODE", "NPROC_PER_NODE", "NUM_GPUS_PER_NODE", "GPU_NUM_PER_NODE", "NGPU", "NUM_GPUS", "NPROC")
_NODES = ("NNODES", "NUM_NODES", "N_NODES", "NNODE", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_MOST_GPUS = 1 << 20

_MOST_SOURCED = 16  # files

Options = Mapping[str, list[str]]
Sourced = Callable[[str], str | None]  # the text of a file next to the script, None if there is none


class Script(NamedTuple):
    """What the text of a script says."""

    options: Options  # --name and the words after it, the last mention; with dashes instead of underscores
    variables: Mapping[str, str] = MappingProxyType({})
    slurm: Options = MappingProxyType({})  # of the lines #SBATCH
    repeated: tuple[str, ...] = ()  # options that are given several values
    notes: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()  # names of the Python files that it starts
    unread: tuple[str, ...] = ()  # files that it sources and that are not next to it


def read_shell(text: str, where: str, sourced: Sourced = lambda name: None) -> Script:
    """The options and variables of a script, or of a line of options; `sourced` reads the files that it sources."""
    reader = _Reader(where, sourced)
    kept = "\n".join(reader.lines(_plain(text)))
    # Quotes are removed, not respected: "${ARGS[@]}" and bash -c "..." hold several words.
    filled = reader.filled(kept, _LONGEST)
    mentions = _mentions(re.sub(r"[\"']", " ", _ASSIGNED_TO.sub("", filled)))
    programs = tuple(dict.fromkeys(match[1] for match in _PROGRAM.finditer(filled)))
    repeated = [name for name, found in mentions.items() if len({words[0] for words in found if words}) > 1]
    notes: tuple[str, ...] = ()
    if reader.undecided:
        conditions = listed(reader.undecided)
        notes = (f"conditions that only running the script decides, so all their branches are read: {conditions}",)
    slurm = _mentions(" ".join(_SBATCH.findall(text)))
    unread = tuple(reader.unread)
    return Script(_last(mentions), reader.variables, _last(slurm), tuple(repeated), notes, programs, unread)


def _plain(text: str) -> str:
    """A script without comments, continued lines and the commands whose output it uses."""
    plain = _CONTINUED.sub(" ", _COMMENT.sub(r"\1", text))
    for _ in range(_NESTED):
        plain = _COMMAND.sub("$()", plain)
    return _INLINE.sub("\n", plain)


def put_cluster(found: Findings, script: Script) -> None:
    """Put cluster.gpus, gpus_per_node and perhaps gpu, as far as torchrun, srun, #SBATCH or variables say them."""
    values, variables = found.values, script.variables
    per_node, gpu = _gpus_per_node(script)
    nodes = [*_first(script.options, "nnodes"), *_first(script.slurm, "nodes"), *(variables.get(n, "") for n in _NODES)]
    if per_node:
        values["cluster.gpus_per_node"] = per_node
        values.setdefault("cluster.gpus", per_node * (_count([*nodes, *_first(script.options, "nodes")]) or 1))
    world = _count([variables.get("WORLD_SIZE", "")])
    if world:
        values.setdefault("cluster.gpus", world)
    if gpu:
        values.setdefault("cluster.gpu", gpu)


def evaluate(expression: str, variables: Mapping[str, str]) -> int | None:
    """The value of shell arithmetic on whole numbers (+ - * / %), or None: evaluate("TP * 2", {"TP": "4"}) is 8."""
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, variables)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, variables: Mapping[str, str]) -> int:
    match node:
        case ast.Constant(value=int() as value):
            pass
        case ast.Name(id=name):
            value = int(variables.get(name, "")[:20])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand, variables)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_value(left, variables), _value(right, variables))
        case _:
            raise ValueError("not whole-number arithmetic")
    if abs(value) > _LARGEST_NUMBER:
        raise ValueError("too large")
    return value


def is_true(condition: str) -> bool | None:
    """Whether a shell condition holds, or None where its text does not decide: is_true("[ 2 -gt 1 ]") is True."""
    text = condition.strip().rstrip(";").strip()
    for word, decisive in ((" || ", True), (" && ", False)):
        if word in text:
            answers = [is_true(part) for part in text.split(word)]
            return decisive if decisive in answers else None if None in answers else not decisive
    negated = text.startswith("! ")
    test = _TEST.fullmatch(text.removeprefix("! "))
    try:
        words = shlex.split(test[1]) if test else []
    except ValueError:  # a quote that is not closed
        return None
    if words[:1] == ["!"]:
        negated, words = not negated, words[1:]
    answer = None if any("$" in word for word in words) else _holds(words)
    return None if answer is None else answer != negated


def _holds(words: list[str]) -> bool | None:
    match words:
        case ["-z" | "-n" as how, word]:
            return (how == "-z") == (not word)
        case [left, ("=" | "==" | "!=") as how, right] if not set(right) & set("*?["):
            return (left == right) == (how != "!=")
        case [left, how, right] if how in _COMPARISONS and _NUMBER.fullmatch(left) and _NUMBER.fullmatch(right):
            return _COMPARISONS[how](int(left), int(right))
    return None


@dataclass
class _Branch:
    """An `if` or `case` that is open."""

    outer: bool  # whether what surrounds it is read
    subject: str | None = None  # of a `case`
    taken: bool = False  # whether the present branch is read
    done: bool = False  # whether an earlier branch is certain to run, so that no other does


class _Reader:
    """Walks through a script: which lines are read, and the variables that were assigned so far."""

    def __init__(self, where: str, sourced: Sourced) -> None:
        self.variables: dict[str, str] = {}
        self.unread: list[str] = []  # files that are sourced and not there
        self._sourced, self._sources, self._sourced_characters = sourced, 0, 0
        self.undecided: dict[str, None] = {}  # conditions, in order
        self._open: list[_Branch] = []
        self._where = where
        self._filled = 0

    @property
    def _taken(self) -> bool:
        return not self._open or self._open[-1].taken

    def lines(self, text: str) -> Iterator[str]:
        """The lines that are read, without the words that branch."""
        at = quoted_to = 0  # up to quoted_to, the text belongs to an assignment: a quoted value may have several lines
        while at < len(text):
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            line = text[at:end]
            if at < quoted_to:
                yield line if self._taken else ""
            else:
                line = self._kept(line)
                yield line
                if line:
                    quoted_to = self._assign(text, end - len(line))
                    sourced = self._source(line)
                    text = f"{text[:end]}\n{sourced}{text[end:]}" if sourced else text
            at = end + 1

    def _source(self, line: str) -> str:
        """The file that a line sources, in place of the line."""
        sourcing = _SOURCED.match(line)
        if sourcing is None or self._sources >= _MOST_SOURCED:
            return ""
        self._sources += 1
        name = self.filled(sourcing[1].translate(_QUOTES))
        text = self._sourced(name)
        self._sourced_characters += len(text or "")
        if text is None or self._sourced_characters > _LONGEST:
            self.unread.append(name)
            return ""
        return _plain(text)

    def filled(self, text: str, longest: int = _LONGEST_VARIABLE) -> str:
        """The text with the values of variables, their defaults and arithmetic. What is not known stays."""
        length = 0

        def value(match: re.Match[str]) -> str:
            nonlocal length
            found, default = self.variables.get(match[1] or match[4]), match[3]
            if default is not None and (found is None or (found == "" and match[2].startswith(":"))):
                found = default.translate(_QUOTES)
            if found is None:
                return match[0]
            length += len(found)
            if length > longest:
                raise InputError(f"{self._where}: its variables grow beyond {longest >> 10} KiB")
            return found

        def result(match: re.Match[str]) -> str:
            number = evaluate(match[1], self.variables)
            return match[0] if number is None else str(number)

        for _ in range(_NESTED):  # a default may hold a variable with a default
            length = len(text)
            self._filled += length
            if self._filled > _MOST_FILLED:
                raise InputError(f"{self._where}: its variables grow beyond {_MOST_FILLED >> 20} MiB in all")
            before, text = text, _ARITHMETIC.sub(result, _VARIABLE.sub(value, text))
            if text == before:
                break
        return text

    def _kept(self, line: str) -> str:
        """What is left of a line: nothing where its branch does not run or where it is a word that branches."""
        control = _CONTROL.match(line)
        if control:
            self._control(control[1], control[2])
            return ""
        pattern = _CASE_PATTERN.match(line) if self._open and self._open[-1].subject is not None else None
        if pattern:
            subject = self._open[-1].subject or ""
            value = self.filled(subject).translate(_QUOTES)
            matches = any(fnmatchcase(value, word.strip(" \t\"'")) for word in pattern[1].split("|"))
            self._enter(None if "$" in value else matches, f"case {subject}")
            line = pattern[2]
        return line if self._taken else ""

    def _control(self, word: str, rest: str) -> None:
        match word:
            case "if" if len(self._open) < _DEEPEST:
                self._open.append(_Branch(self._taken))
                self._enter(is_true(self.filled(rest)), rest)
            case "case" if len(self._open) < _DEEPEST:
                self._open.append(_Branch(self._taken, rest.rpartition(" in")[0].strip()))
            case "elif" if self._open:
                self._enter(is_true(self.filled(rest)), rest)
            case "else" if self._open:
                self._enter(True, rest)
            case "fi" | "esac" if self._open:
                self._open.pop()

    def _enter(self, answer: bool | None, condition: str) -> None:
        """Begin a branch that runs, does not run or perhaps runs (None)."""
        branch = self._open[-1]
        branch.taken = branch.outer and not branch.done and answer is not False
        if branch.taken:
            branch.done = answer is True
            if answer is None:
                self.undecided.setdefault(condition.rstrip("; \t"))

    def _assign(self, text: str, at: int) -> int:
        """Read NAME=value at this place, or several, each of which may use those before. Returns where they end."""
        found = _ASSIGNMENT.match(text, at)
        while found:
            self.variables[found[1]] = self.filled(found[2].translate(_QUOTES))
            at = found.end()
            found = _ASSIGNMENT.match(text, at + 1) if text[at : at + 1] in (" ", "\t", ";") else None
        return at


def _mentions(text: str) -> dict[str, list[list[str]]]:
    """The options of a text, each with the words after every mention of it."""
    mentions: dict[str, list[list[str]]] = {}
    words: list[str] = []
    for word in text.split():
        word = word.rstrip(";,") if "(" in word else word.rstrip(";,)")
        option = _OPTION.fullmatch(word)
        if option:
            words = [option[2]] if option[2] else []
            mentions.setdefault(option[1].replace("_", "-"), []).append(words)
        elif word:
            words.append(word)
    return mentions


def _last(mentions: Mapping[str, list[list[str]]]) -> Options:
    return {name: found[-1] for name, found in mentions.items()}


def _gpus_per_node(script: Script) -> tuple[int, str]:
    """GPUs of a node, and their name where Slurm is asked for it, as in --gres=gpu:h100:8."""
    names = ("gpus-per-node", "gres", "gpus-per-task")
    asked = [word for options in (script.slurm, script.options) for name in names for word in _first(options, name)]
    parts = (part for word in asked for part in word.split(":")[:-1] if part != "gpu")
    gpu = next((known.name for part in parts if (known := find_gpu(part))), "")
    processes = [*_first(script.options, "nproc-per-node"), *_first(script.slurm, "ntasks-per-node")]
    variables = (script.variables.get(name, "") for name in _PER_NODE)
    return _count([*processes[:1], *asked, *variables, *processes]), gpu


def _first(options: Options, name: str) -> list[str]:
    return options.get(name, [])[:1]


def _count(words: Iterable[str]) -> int:
    """The first word that is a count. A range of nodes, as in 4:8, counts as its largest."""
    lasts = (word.rpartition(":")[2] for word in words)
    numbers = (int(last) for last in lasts if last.isascii() and last.isdigit() and len(last) <= 7)
    return next((number for number in numbers if 0 < number <= _MOST_GPUS), 0)
