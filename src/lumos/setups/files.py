"""Setup files: TOML, a Hugging Face config.json or a Megatron script in, TOML out."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lumos.errors import InputError, LumosError, OptionError
from lumos.setups.check import checked_setup
from lumos.setups.huggingface import read_config
from lumos.setups.megatron import read_script
from lumos.setups.presets import preset_named
from lumos.setups.rules import warnings_in
from lumos.setups.section import Section
from lumos.setups.setup import KEYS, SECTIONS, Setup
from lumos.setups.source import text_of
from lumos.setups.wording import nearest, shown

_SCRIPTS = (".sh", ".args", ".txt")
_MODEL_SOURCES = ("preset", "hf")
_ONE_FOLLOWS = (("train.microbatches", "train.global_batch"), ("parallel.dp", "cluster.gpus"))
_ALWAYS_WRITTEN: Mapping[str, tuple[str, ...]] = {
    "model": ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated", "tied"),
    "train": ("seq", "micro_batch", "microbatches", "precision", "recompute", "optimizer", "framework"),
    "parallel": ("tp", "pp", "vpp", "cp", "ep", "zero", "sequence_parallel"),
    "cluster": ("gpu", "gpus", "gpus_per_node"),
}
_NEVER_WRITTEN = ("global_batch", "dp")  # they follow from microbatches and gpus

Sections = dict[str, Any]


class SetupReading(NamedTuple):
    """A setup, and what its user should know about how it was read."""

    setup: Setup
    notes: tuple[str, ...]


class _Draft(NamedTuple):
    """What a file says, before it is checked."""

    sections: Sections
    notes: tuple[str, ...] = ()
    mistakes: tuple[str, ...] = ()


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
    changes = _parsed(overrides)
    draft = _read(path)
    sections = _layered(draft.sections, changes)
    model, notes, mistakes = _model_from(sections.get("model", {}), path.parent)
    setup = checked_setup(sections | {"model": model}, str(path), (*draft.mistakes, *mistakes))
    return SetupReading(setup, (*draft.notes, *notes, *_taken(sections, setup), *warnings_in(setup)))


def read_plain(path: Path | None, overrides: Sequence[str] = ()) -> PlainSetup:
    """What a file says that may lack values; without a file, the overrides alone."""
    changes = _parsed(overrides)
    draft = _read(path) if path is not None else _Draft({})
    sections = _layered(draft.sections, changes)
    model, notes, mistakes = _model_from(sections.get("model", {}), path.parent if path is not None else Path())
    where = str(path) if path is not None else ""
    return PlainSetup(sections | {"model": model}, changes, (*draft.notes, *notes), (*draft.mistakes, *mistakes), where)


def _taken(sections: Sections, setup: Setup) -> tuple[str, ...]:
    """What was taken for a value that is not given and that no rule derives."""
    return () if _has(sections, "cluster.gpu") else (f"cluster.gpu is not given: {setup.cluster.gpu} is taken",)


def write_setup(setup: Setup) -> str:
    """The setup as TOML that reads back equal. What follows from other values is left out."""
    return "\n".join(_written(name, getattr(setup, name)) for name in SECTIONS)


# Reading


def _read(path: Path) -> _Draft:
    suffix = path.suffix.lower()
    if suffix == ".toml":
        return _read_toml(path)
    if suffix == ".json":
        keys, notes = read_config(path)
        return _Draft({"model": keys}, notes)
    if suffix in _SCRIPTS:
        script = read_script(path)
        return _Draft(dict(script.sections), script.notes)
    raise InputError(
        f"{path}: a setup is a .toml, a Hugging Face config.json or a Megatron script ({', '.join(_SCRIPTS)})"
    )


def _read_toml(path: Path) -> _Draft:
    try:
        content = tomllib.loads(text_of(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not TOML ({str(error)[:200]})") from None
    script = content.pop("megatron", None)
    if script is None:
        return _Draft(content)
    if not isinstance(script, str):
        return _Draft(content, mistakes=(f"megatron = {shown(script)} is not a file: give its path in quotes",))
    try:
        below = read_script(path.parent / script)
    except LumosError as error:
        return _Draft(content, mistakes=(f"megatron = {shown(script)}: {error}",))
    return _Draft(_layered(dict(below.sections), content), below.notes)


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
            keys, notes = keys | config.keys, config.notes
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


def toml_value(text: str) -> Any:
    """A TOML value, or the text itself where it is a bare word."""
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return read["value"] if len(read) == 1 else text


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
