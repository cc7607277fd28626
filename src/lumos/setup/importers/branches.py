"""Which branches of a shell script are taken, as far as its text alone decides. Nothing is ever run."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

_INLINE = re.compile(r";[ \t]*(?=(?:then|else|elif|fi|esac|done)\b)|(?<=\bthen)[ \t]+(?=\S)|(?<=\belse)[ \t]+(?=\S)")
_CONTROL = re.compile(r"[ \t]*(if|elif|else|fi|then|case|esac)\b[ \t]*([^\n]*)")
_PATTERN = re.compile(r"[ \t]*\(?([\w.*?|\"' \t-]{1,200})\)(?!\))[ \t]*([^\n]*)")
_WORDS = re.compile(r"\"[^\"]*\"|'[^']*'|[^\s\"']+")
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt,
    "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le,
}  # fmt: skip
_DEEPEST = 100


@dataclass
class _Branch:
    """One `if` or `case` that is open."""

    outer: bool  # whether what surrounds it is taken
    taken: bool  # whether the present branch is
    done: bool  # whether a branch was taken for certain, so that no other is
    subject: str | None = None  # of a `case`


class Walk:
    """A script line by line. `line` answers what is left of it, "" where its branch is not taken."""

    def __init__(self, filled: Callable[[str], str]) -> None:
        self._filled = filled  # puts variables in, as they are known so far
        self._open: list[_Branch] = []
        self.undecided: list[str] = []

    @property
    def taken(self) -> bool:
        """Whether the present line is, as far as is known."""
        return not self._open or self._open[-1].taken

    def line(self, text: str) -> str:
        """The line as far as it belongs to a branch that is taken, without the words that branch."""
        control = _CONTROL.match(text)
        if control:
            self._branch(control[1], control[2])
            return ""
        if self._open and self._open[-1].subject is not None:
            text = self._arm(text)
        return text if self.taken else ""

    def _branch(self, word: str, rest: str) -> None:
        if word in ("if", "case") and len(self._open) < _DEEPEST:
            outer = self.taken
            subject = rest.rpartition(" in")[0].strip() if word == "case" else None
            self._open.append(_Branch(outer, False, False, subject))
            if word == "if":
                self._decide(self._open[-1], rest)
        elif not self._open:
            return
        elif word == "elif":
            self._decide(self._open[-1], rest)
        elif word == "else":
            self._open[-1].taken = self._open[-1].outer and not self._open[-1].done
        elif word in ("fi", "esac"):
            self._open.pop()

    def _decide(self, branch: _Branch, condition: str) -> None:
        branch.taken = branch.outer and not branch.done
        if not branch.taken:
            return
        answer = holds(self._filled(condition))
        branch.taken, branch.done = answer is not False, answer is True
        if answer is None:
            self.undecided.append(condition.rstrip("; \t"))

    def _arm(self, text: str) -> str:
        """A line inside `case`: a new pattern, or what belongs to the present one."""
        branch = self._open[-1]
        arm = _PATTERN.match(text)
        if not arm:
            return text
        subject = self._filled(branch.subject or "").strip("\"'")
        known = "$" not in subject
        patterns = [pattern.strip(" \t\"'") for pattern in arm[1].split("|")]
        matches = not known or any(fnmatchcase(subject, pattern) for pattern in patterns)
        branch.taken = branch.outer and not branch.done and matches
        branch.done = branch.done or (known and branch.taken)
        return arm[2]


def unfolded(text: str) -> str:
    """The script with every word that branches on a line of its own."""
    return _INLINE.sub("\n", text)


def holds(condition: str) -> bool | None:
    """Whether a test is true; None where its text does not tell."""
    text = condition.strip().rstrip(";").strip()
    for word, decided in ((" || ", True), (" && ", False)):
        if word in text:
            answers = [holds(part) for part in text.split(word)]
            return decided if decided in answers else None if None in answers else not decided
    if text.startswith("! "):
        answer = holds(text[2:])
        return None if answer is None else not answer
    inner = re.fullmatch(r"\[\[?\s(.*?)\s\]\]?", text)
    if not inner:
        return None
    words = [word.strip("\"'") for word in _WORDS.findall(inner[1])]
    return None if any("$" in word for word in words) else _test(words)


def _test(words: list[str]) -> bool | None:
    if words and words[0] == "!":
        answer = _test(words[1:])
        return None if answer is None else not answer
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[0] == "-z") == (not words[1])
    if len(words) != 3:
        return None
    left, how, right = words
    if how in _COMPARISONS and all(re.fullmatch(r"-?\d{1,18}", word, re.ASCII) for word in (left, right)):
        return _COMPARISONS[how](int(left), int(right))
    if how in ("=", "==", "!=") and not set(right) & set("*?["):
        return (left == right) == (how != "!=")
    return None
