"""Several captures in one folder: which files belong together, and the --match that selects each."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from glob import escape
from itertools import groupby, takewhile
from pathlib import Path
from typing import NamedTuple

_CHUNK = re.compile(r"\d+|\D+")
_MOST_OFFERED = 3


class Recorded(NamedTuple):
    """A trace file, the rank it is of, and when it begins, on any clock that all of them share."""

    rank: int
    path: Path
    begin: float


def captures(files: Iterable[Recorded]) -> list[list[Recorded]]:
    """Files as captures, the oldest first, by when they begin, or by their names where that mixes them."""
    ordered = sorted(files, key=lambda file: (file.begin, file.path.name))
    names = [file.path.name for file in ordered]
    by_time = _rounds(ordered)
    by_name = _rounds(sorted(ordered, key=lambda file: (_CHUNK.sub(_padded, file.path.name), file.begin)), in_turn=True)
    return by_name if not _can_be_chosen(by_time, names) and _can_be_chosen(by_name, names) else by_time


def _rounds(files: Iterable[Recorded], in_turn: bool = False) -> list[list[Recorded]]:
    """A new capture begins where a rank comes again; or in turn, with the n-th file of every rank."""
    found: list[list[Recorded]] = []
    seen: Counter[int] = Counter()
    for file in files:
        place = seen[file.rank] if in_turn else max(len(found) - 1, 0)
        if not in_turn and found and any(other.rank == file.rank for other in found[-1]):
            place += 1
        seen[file.rank] += 1
        found += [[] for _ in range(place + 1 - len(found))]
        found[place].append(file)
    return found


def _padded(chunk: re.Match[str]) -> str:
    """Numbers in the order of their values."""
    return chunk[0].zfill(20) if chunk[0].isdecimal() else chunk[0]


def _can_be_chosen(groups: Sequence[Sequence[Recorded]], names: Collection[str]) -> bool:
    mine = [[file.path.name for file in group] for group in groups[-_MOST_OFFERED:]]
    return all(pattern_of(group, [name for name in names if name not in group]) for group in mine)


def choices(groups: Sequence[Sequence[Path]], names: Collection[str]) -> str:
    """The --match of every group, the newest first; `names` are those of all traces in the folder."""
    offered = []
    newest = list(reversed(groups[-_MOST_OFFERED:]))
    for place, group in enumerate(newest):
        mine = [path.name for path in group]
        pattern = pattern_of(mine, [name for name in names if name not in mine])
        if pattern:
            offered.append(f"--match {shlex.quote(pattern)}" + (" (the newest)" if place == 0 else ""))
    more = len(groups) - _MOST_OFFERED
    words = " or ".join(offered) + (f", or one of {more} more" if more > 0 else "")
    return words if len(offered) == len(newest) else "move the files of each into a folder of its own"


def pattern_of(mine: Sequence[str], others: Collection[str]) -> str:
    """A pattern that matches all of these names and none of the others, or ""."""
    for pattern in _patterns(mine):
        if all(fnmatchcase(name, pattern) for name in mine) and not any(fnmatchcase(name, pattern) for name in others):
            return pattern
    return ""


def _patterns(names: Sequence[str]) -> Iterator[str]:
    """Simple ones first: the name itself, what names have in common by numbers and words, by their ends."""
    if len(names) == 1:
        yield escape(names[0])
        return
    columns = list(zip(*(_CHUNK.findall(name) for name in names), strict=False))
    if len({len(_CHUNK.findall(name)) for name in names}) == 1:
        for in_common in (_any_end, _any_digits):
            yield re.sub(r"\*+", "*", "".join(_column(column, in_common) for column in columns))
    end = _beginning([name[::-1] for name in names])[::-1]
    yield f"{escape(_beginning(names))}*{escape(end)}"


def _column(words: Sequence[str], in_common: Callable[[Sequence[str]], str]) -> str:
    return escape(words[0]) if len(set(words)) == 1 else in_common(words)


def _any_end(words: Sequence[str]) -> str:
    return f"{escape(_beginning(words))}*"


def _beginning(words: Sequence[str]) -> str:
    """What all words begin with."""
    columns = zip(*words, strict=False)
    return "".join(letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, columns))


def _any_digits(words: Sequence[str]) -> str:
    """As many digits as all of these numbers have."""
    lengths = {len(word) for word in words}
    return "[0-9]" * lengths.pop() if len(lengths) == 1 and all(word.isdecimal() for word in words) else "*"


def by_value(files: Iterable[tuple[int, Path]]) -> list[list[Path]]:
    """Files with the same number, as groups in the order of that number."""
    ordered = sorted(files, key=lambda file: file[0])
    return [[path for _, path in group] for _, group in groupby(ordered, key=lambda file: file[0])]
