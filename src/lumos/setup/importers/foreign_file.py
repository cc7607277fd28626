"""Files of other tools: their text, and what an importer read from it."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lumos.errors import InputError
from lumos.files import open_file
from lumos.setup.messages import listed, place_of

Sections = dict[str, Any]
GPU_KEYS = ("cluster.gpus", "parallel.dp")  # one of them says how many GPUs there are

_TOLERATED = 0.01  # of the width of all experts
_LARGEST = 4 << 20  # bytes; a description of a run is a few kilobytes


class Mistake(NamedTuple):
    """A wrong value, in the words of its file."""

    place: str  # the key of a setup that overrides it, as in "parallel.tp"; "" where none does
    sentence: str


class Note(NamedTuple):
    """Something that was assumed, padded or left out."""

    sentence: str
    keys: tuple[str, ...] = ()  # of a setup: it no longer holds once one of them is set


class Reading(NamedTuple):
    """Sections of a setup, unchecked. Notes and mistakes do not name the file."""

    sections: Sections
    notes: tuple[Note, ...] = ()
    mistakes: tuple[Mistake, ...] = ()
    not_recognised: tuple[str, ...] = ()  # keys or options that are neither used nor known to be irrelevant
    model_names: tuple[str, ...] | None = None  # may state the size of the model; None: no name does
    stored_parameters: int = 0  # in the weights next to a config.json; 0 where there are none
    copies: int = 0  # of divided weights: parallel.shard follows from them and the replicas; 0: the file does not say

    def remarks(self, where: str, is_set: Callable[[str], bool] = lambda _: False) -> tuple[str, ...]:
        """The notes that still hold, with the name of the file; keys that were not recognised are one note."""
        notes = [note.sentence for note in self.notes if not any(is_set(key) for key in note.keys)]
        last = [f"not recognised and ignored: {listed(self.not_recognised)}"] if self.not_recognised else []
        return tuple(f"{where}: {sentence}" for sentence in (*notes, *last))


class Findings:
    """Collects values, notes and mistakes while a file is read."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}  # by "section.key"
        self.notes: list[Note] = []
        self.mistakes: list[Mistake] = []
        self.copies = 0  # of divided weights, where their number is given and not the ranks that share one

    def note(self, sentence: str, *keys: str) -> None:
        """Note something that holds until one of these keys of a setup is set."""
        self.notes.append(Note(sentence, keys))

    def note_gpus(self) -> None:
        """Note that the number of GPUs is not given."""
        sentence = "the number of GPUs is not given: assuming one replica; set cluster.gpus"
        self.note(sentence, *GPU_KEYS)

    def mistake(self, place: str, sentence: str) -> None:
        """Note a mistake, once."""
        if Mistake(place, sentence) not in self.mistakes:
            self.mistakes.append(Mistake(place, sentence))

    def reading(self, not_recognised: Iterable[str] = ()) -> Reading:
        """Everything found, as sections of a setup."""
        sections: Sections = {}
        for place, value in self.values.items():
            section, _, key = place.partition(".")
            sections.setdefault(section, {})[key] = value
        notes, mistakes = tuple(self.notes), tuple(self.mistakes)
        return Reading(sections, notes, mistakes, tuple(not_recognised), copies=self.copies)


def shared_experts(found: Findings, shared: int, width: int, experts: int) -> int:
    """A shared expert of this width as a number of experts, which are all equally wide in a setup.

    A small difference is noted; one that changes the size of the model is a mistake.
    """
    count = max(round(shared / width), 1)
    what = f"a shared expert of width {shared} beside experts of width {width}"
    if abs(shared - count * width) > _TOLERATED * (experts * width + shared):
        found.mistake("model.shared_experts", f"{what} cannot be described: --set model.shared_experts=NUMBER")
    elif shared != count * width:
        found.note(f"{what} is modelled as {count} of those", "model.shared_experts")
    return count


def is_ignored(name: str, table: Mapping[str, list[str]]) -> bool:
    """Whether a table of names, prefixes and suffixes says that a key does not matter."""
    prefixes, suffixes = tuple(table["prefixes"]), tuple(table.get("suffixes", ()))
    return name in table["names"] or name.startswith(prefixes) or name.endswith(suffixes)


def flat(config: Mapping[str, Any], depth: int = 4) -> dict[str, Any]:
    """A table of tables as one with dotted names: {"a": {"b": 1}} is {"a.b": 1}."""
    names: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and depth > 1:
            names |= {f"{key}.{inner}": deeper for inner, deeper in flat(value, depth - 1).items()}
        else:
            names[str(key)] = value
    return names


def text_of(path: Path, largest: int = _LARGEST) -> str:
    """The text of a file of at most this many bytes, or InputError."""
    text, complete = beginning_of(path, largest)
    if not complete:
        raise InputError(f"{place_of(path)}: larger than {largest >> 20} MiB, too large for a file of this type")
    return text


def beginning_of(path: Path, largest: int = _LARGEST) -> tuple[str, bool]:
    """The first bytes of a file as text, and whether they are all of it."""
    where = place_of(path)
    try:
        if not path.exists() or path.is_dir():
            folder = "is a folder: name a file in it, or give a folder of traces with --from"
            what = folder if path.is_dir() else "does not exist"
            raise InputError(f"{where}: {what}")
        with open_file(path, "give a plain file", where) as file:
            content = file.read(largest + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise InputError(f"{where}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    complete = len(content) <= largest
    try:
        return codecs.getincrementaldecoder("utf-8-sig")().decode(content[:largest], final=complete), complete
    except UnicodeDecodeError:
        way_out = "; a trace is given with --from" if path.suffix in (".gz", ".et", ".sqlite") else ""
        raise InputError(f"{where}: not a text file in UTF-8{way_out}") from None
