"""Setup files: TOML, or what people have already, recognised by its content; TOML out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lumos.errors import InputError, LumosError, OptionError
from lumos.setup.constraints import warnings_in
from lumos.setup.importers.detect import read_any, read_config
from lumos.setup.importers.detect import toml_value as toml_value
from lumos.setup.importers.imported import Reading, Sections
from lumos.setup.importers.text_file import place_of
from lumos.setup.messages import nearest, shown
from lumos.setup.presets import preset_named
from lumos.setup.sections import Section
from lumos.setup.setup import KEYS, SECTIONS, Setup
from lumos.setup.validate import checked_setup

_MODEL_SOURCES = ("preset", "hf")
_ONE_FOLLOWS = (("train.microbatches", "train.global_batch"), ("parallel.dp", "cluster.gpus"))
_ALWAYS_WRITTEN: Mapping[str, tuple[str, ...]] = {
    "model": ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated", "tied"),
    "train": ("seq", "micro_batch", "microbatches", "precision", "recompute", "optimizer", "framework"),
    "parallel": ("tp", "pp", "vpp", "cp", "ep", "zero", "sequence_parallel"),
    "cluster": ("gpu", "gpus", "gpus_per_node"),
}
_NEVER_WRITTEN = ("global_batch", "dp")  # they follow from microbatches and gpus
_BELOW = ("megatron", "torchtitan")  # keys of a setup that name the file of another kind which it changes


class SetupReading(NamedTuple):
    """A setup, and what its user should know about how it was read."""

    setup: Setup
    notes: tuple[str, ...]


class PlainSetup(NamedTuple):
    """The plain values of a file, or of none, with its overrides: all that is said, before it is completed."""

    sections: Sections
    overrides: Sections
    notes: tuple[str, ...]
    mistakes: tuple[str, ...]
    where: str

    def over(self, below: Sections) -> Sections:
        """What is said, completed by values from elsewhere; an override that names another model replaces theirs."""
        if any(source in _table(self.overrides, "model") for source in _MODEL_SOURCES):
            below = {name: values for name, values in below.items() if name != "model"}
        return _layered(below, self.sections)

    def checked(self, sections: Sections) -> SetupReading:
        """The setup of completed sections, or an error that lists every mistake."""
        setup = checked_setup(sections, self.where, self.mistakes)
        return SetupReading(setup, (*self.notes, *_taken(sections, setup), *warnings_in(setup)))


def read_setup(path: Path, overrides: Sequence[str] = ()) -> Setup:
    """The run that a file describes, with overrides like "parallel.tp=2", or an error that lists every mistake."""
    return read_setup_with_notes(path, overrides).setup


def read_setup_with_notes(path: Path, overrides: Sequence[str] = ()) -> SetupReading:
    """The same, with what was assumed, padded, ignored or not understood."""
    plain = read_plain(path, overrides)
    return plain.checked(plain.sections)


def read_plain(path: Path | None, overrides: Sequence[str] = ()) -> PlainSetup:
    """What a file says that may lack values; without a file, the overrides alone."""
    changes = _parsed(overrides)
    said = _read(path) if path is not None else Reading({})
    sections = _layered(said.sections, changes)
    folder = path.parent if path is not None else Path()
    model, notes, mistakes = _model_from(sections.get("model", {}), folder)
    where = place_of(path) if path is not None else ""
    left = [mistake for mistake in said.mistakes if not _mends(changes, mistake.place)]
    if any(mistake.place.startswith("model.") for mistake in left):
        model = None  # it could not be read, and a mistake says so
    stated = (*(mistake.sentence for mistake in left), *mistakes)
    return PlainSetup(sections | {"model": model}, changes, (*said.remarks(where), *notes), stated, where)


def _mends(changes: Sections, place: str) -> bool:
    """Whether an override says otherwise what was wrong."""
    model = _table(changes, "model")
    return _has(changes, place) or (place.startswith("model.") and any(source in model for source in _MODEL_SOURCES))


def _taken(sections: Sections, setup: Setup) -> tuple[str, ...]:
    """What was taken for a value that is not given and that no rule derives."""
    return () if _has(sections, "cluster.gpu") else (f"cluster.gpu is not given: {setup.cluster.gpu} is taken",)


def write_setup(setup: Setup) -> str:
    """The setup as TOML that reads back equal. What follows from other values is left out."""
    return "\n".join(_written(name, getattr(setup, name)) for name in SECTIONS)


# Reading


def _read(path: Path) -> Reading:
    said = read_any(path)
    given = [key for key in _BELOW if key in said.sections]
    if not given:
        return said
    content = {key: value for key, value in said.sections.items() if key not in _BELOW}
    other = said.sections[given[0]]
    if not isinstance(other, str):
        raise InputError(f"{place_of(path)}: {given[0]} = {shown(other)} is not a file: give its path in quotes")
    try:
        below = read_any(path.parent / other)
    except LumosError as error:
        raise InputError(f"{place_of(path)}: {given[0]} = {shown(other)}: {error}") from None
    left = tuple(mistake for mistake in below.mistakes if not _mends(content, mistake.place))
    return below._replace(sections=_layered(below.sections, content), mistakes=left)


def _model_from(stated: Any, folder: Path) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
    """The section [model] with its preset and its config.json put in below what is stated; notes; mistakes."""
    if not isinstance(stated, dict) or not any(key in stated for key in _MODEL_SOURCES):
        return stated, (), ()
    keys: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    try:
        for key in _MODEL_SOURCES:
            if key in stated and not isinstance(stated[key], str):
                raise OptionError(f"model.{key} = {shown(stated[key])} is of the wrong kind: give it in quotes")
        if "preset" in stated:
            keys |= preset_named(stated["preset"]).keys
        if "hf" in stated:
            config = read_config(folder / stated["hf"])
            keys |= config.sections["model"]
            notes = config.remarks(place_of(folder / stated["hf"]))
            wrong = [mistake for mistake in config.mistakes if not _has({"model": stated}, mistake.place)]
            if wrong:
                where = place_of(folder / stated["hf"])
                return None, notes, tuple(f"{where}: {mistake.sentence}" for mistake in wrong)
    except LumosError as error:
        return None, (), (str(error),)
    return keys | {key: value for key, value in stated.items() if key not in _MODEL_SOURCES}, notes, ()


def _layered(below: Sections, above: Sections) -> Sections:
    """Both, the keys of `above` winning.

    Another model replaces the one below, and of two values that follow from each other the one above counts alone.
    """
    below = {name: dict(values) if isinstance(values, dict) else values for name, values in below.items()}
    if any(source in _table(above, "model") for source in _MODEL_SOURCES):
        below.pop("model", None)
    for pair in _ONE_FOLLOWS:
        for stated, other in (pair, pair[::-1]):
            if _has(above, stated) and not _has(above, other) and _has(below, other):
                section, _, key = other.partition(".")
                del below[section][key]
    both_tables = {name for name in above if isinstance(below.get(name), dict) and isinstance(above[name], dict)}
    return below | above | {name: below[name] | above[name] for name in both_tables}


def _table(sections: Sections, name: str) -> Mapping[str, Any]:
    values = sections.get(name)
    return values if isinstance(values, dict) else {}


def _has(sections: Sections, place: str) -> bool:
    section, _, key = place.partition(".")
    return key in _table(sections, section)


# Overrides


def _parsed(overrides: Sequence[str]) -> Sections:
    """Strings like "section.key=value" as sections; all that are malformed are named."""
    sections: Sections = {}
    mistakes = []
    for text in overrides:
        place, equals, value = text.partition("=")
        section, _, key = place.strip().partition(".")
        if not equals or section not in SECTIONS or not key:
            mistakes.append(_malformed(text, place.strip()))
        elif (section, key) == ("model", "hf"):
            sections.setdefault(section, {})[key] = str(Path(value.strip()).absolute())  # not relative to the file
        else:
            sections.setdefault(section, {})[key] = toml_value(value.strip())
    if mistakes:
        raise OptionError("\n".join(mistakes))
    return sections


def _malformed(text: str, place: str) -> str:
    homes = [key for key in KEYS if key.partition(".")[2] == place] or [nearest(place, KEYS)]
    example = f"did you mean {homes[0]}?" if homes[0] else "as in parallel.tp=2"
    return f"--set {text[:100]}: write SECTION.KEY=VALUE; {example}"


# Writing


def _written(name: str, section: Section) -> str:
    lines = [f"[{name}]"]
    stated = section.stated()
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        telling = key in stated if key in section.DERIVED else value != field.default
        if key not in _NEVER_WRITTEN and (telling or key in _ALWAYS_WRITTEN[name]):
            lines.append(f"{key} = {_as_toml(value)}")
    return "\n".join(lines) + "\n"


def _as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(_as_toml(item) for item in value)}]"
    return repr(value)
