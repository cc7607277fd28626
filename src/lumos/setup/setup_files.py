"""Setup files: reads TOML, or a file of another tool that is recognised by its content; writes TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tomli_w

from lumos.errors import InputError, LumosError, OptionError
from lumos.setup.constraints import checked_setup, warnings_in
from lumos.setup.importers import megatron
from lumos.setup.importers.foreign_file import Findings, Reading, Sections, beginning_of, flat, text_of
from lumos.setup.importers.huggingface import model_keys
from lumos.setup.importers.launch_script import Script, put_cluster, read_shell
from lumos.setup.importers.torchtitan import OPTION, is_torchtitan, keys_of, read_torchtitan
from lumos.setup.messages import nearest, place_of, shown
from lumos.setup.presets import preset_named
from lumos.setup.sections import Section
from lumos.setup.setup import KEYS, SECTIONS, Setup
from lumos.setup.stated_size import size_doubt

_MODEL_SOURCES = ("preset", "hf")
_ONE_FOLLOWS = (("train.microbatches", "train.global_batch"), ("parallel.dp", "cluster.gpus"))
_ALWAYS_WRITTEN: Mapping[str, tuple[str, ...]] = {
    "model": ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated", "tied"),
    "train": ("seq", "micro_batch", "microbatches", "precision", "recompute", "optimizer", "framework"),
    "parallel": ("tp", "pp", "vpp", "cp", "ep", "zero", "sequence_parallel"),
    "cluster": ("gpu", "gpus", "gpus_per_node"),
}
_NEVER_WRITTEN = ("global_batch", "dp")  # they follow from microbatches and gpus
_BASES = ("megatron", "torchtitan")  # keys of a setup that name a file of another tool, which the setup changes
_FORMATS = (
    "a setup is a .toml, a Hugging Face config.json, a Megatron script, log or file of arguments, or a torchtitan TOML "
    "or command; this is none of them"
)
_SCRIPTS = (".sh", ".args", ".bash", ".slurm", ".sbatch")


class SetupReading(NamedTuple):
    """A setup, and notes on how it was read: what was assumed, padded, ignored or not recognised."""

    setup: Setup
    notes: tuple[str, ...]


class PlainSetup(NamedTuple):
    """The plain values of a file, or of none, with its overrides, before what is missing is filled in."""

    sections: Sections
    overrides: Sections
    notes: tuple[str, ...]
    mistakes: tuple[str, ...]
    where: str
    model_names: tuple[str, ...] = ()  # of a model whose size was read from a file of another tool

    def over(self, below: Sections) -> Sections:
        """These values on top of others; an override that names another model replaces theirs."""
        if _names_model(self.overrides):
            below = {name: values for name, values in below.items() if name != "model"}
        return _layered(below, self.sections)

    def checked(self, sections: Sections, searched: Collection[str] = ()) -> SetupReading:
        """The setup of completed sections, or an error that lists every mistake that is not about a searched key."""
        setup = checked_setup(sections, self.where, self.mistakes, searched)
        assumed = () if _has(sections, "cluster.gpu") else (f"cluster.gpu is not given: assuming {setup.cluster.gpu}",)
        doubt = size_doubt(setup.model, setup.train.seq, self.model_names)
        doubts = (f"{self.where}: {doubt}",) if doubt else ()
        return SetupReading(setup, (*self.notes, *doubts, *assumed, *warnings_in(setup)))


def read_setup(path: Path, overrides: Sequence[str] = ()) -> Setup:
    """The run that a file describes, or an error that lists every mistake.

    >>> read_setup(Path("examples/llama3-70b.toml"), ["parallel.tp=8", "train.precision=fp8"])
    """
    return read_setup_with_notes(path, overrides).setup


def read_setup_with_notes(path: Path, overrides: Sequence[str] = ()) -> SetupReading:
    """The same as `read_setup`, with notes on what was assumed, padded, ignored or not recognised."""
    plain = read_plain(path, overrides)
    return plain.checked(plain.sections)


def read_plain(path: Path | None, overrides: Sequence[str] = ()) -> PlainSetup:
    """The values of a file that need not be complete; without a file, the overrides alone."""
    changes = _parsed(overrides)
    reading = _read(path) if path is not None else Reading({})
    sections = _layered(reading.sections, changes)
    folder = path.parent if path is not None else Path()
    model, notes, mistakes = _model_from(sections.get("model", {}), folder)
    where = place_of(path) if path is not None else ""
    left = [mistake for mistake in reading.mistakes if not _corrects(changes, mistake.place)]
    if any(mistake.place.startswith("model.") for mistake in left):
        model = None  # it could not be read, and a mistake says so
    stated = (*(mistake.sentence for mistake in left), *mistakes)
    names = () if changes.get("model") else reading.model_names
    remarks = reading.remarks(where, partial(_corrects, changes))
    return PlainSetup(sections | {"model": model}, changes, (*remarks, *notes), stated, where, names)


def write_setup(setup: Setup) -> str:
    """The setup as TOML that reads back equal. Values that follow from others are omitted."""
    return tomli_w.dumps({name: _written(name, getattr(setup, name)) for name in SECTIONS})


def _written(name: str, section: Section) -> dict[str, Any]:
    stated = section.stated()
    written = {}
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        needed = key in stated if key in section.DERIVED else value != field.default
        if key not in _NEVER_WRITTEN and (needed or key in _ALWAYS_WRITTEN[name]):
            written[key] = value
    return written


# Reading


def _read(path: Path) -> Reading:
    reading = read_any(path)
    base = next((key for key in _BASES if key in reading.sections), None)
    if base is None:
        return reading
    content = {key: value for key, value in reading.sections.items() if key not in _BASES}
    other = reading.sections[base]
    if not isinstance(other, str):
        raise InputError(f"{place_of(path)}: {base} = {shown(other)} is not a file: give its path in quotes")
    try:
        below = read_any(path.parent / other)
    except LumosError as error:
        raise InputError(f"{place_of(path)}: {base} = {shown(other)}: {error}") from None
    left = tuple(mistake for mistake in below.mistakes if not _corrects(content, mistake.place))
    return below._replace(sections=_layered(below.sections, content), mistakes=left)


def _model_from(stated: Any, folder: Path) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
    """The section [model] with the values of its preset and its config.json, notes and mistakes; stated keys win."""
    if not _names_model({"model": stated}):
        return stated, (), ()
    keys: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    try:
        for key in _MODEL_SOURCES:
            if key in stated and not isinstance(stated[key], str):
                raise OptionError(f"model.{key} = {shown(stated[key])} has the wrong type: give it in quotes")
        if "preset" in stated:
            keys |= preset_named(stated["preset"]).keys
        if "hf" in stated:
            config, where = read_config(folder / stated["hf"]), place_of(folder / stated["hf"])
            keys |= config.sections["model"]
            notes = config.remarks(where, lambda place: _has({"model": stated}, place))
            wrong = [mistake for mistake in config.mistakes if not _has({"model": stated}, mistake.place)]
            if wrong:
                return None, notes, tuple(f"{where}: {mistake.sentence}" for mistake in wrong)
    except LumosError as error:
        return None, (), (str(error),)
    return keys | {key: value for key, value in stated.items() if key not in _MODEL_SOURCES}, notes, ()


def _layered(below: Sections, above: Sections) -> Sections:
    """Both, the keys of `above` winning.

    Another model replaces the one below, and of two values that follow from each other only the one above counts.
    """
    below = {name: dict(values) if isinstance(values, dict) else values for name, values in below.items()}
    if _names_model(above):
        below.pop("model", None)
    for pair in _ONE_FOLLOWS:
        for stated, other in (pair, pair[::-1]):
            if _has(above, stated) and not _has(above, other) and _has(below, other):
                section, _, key = other.partition(".")
                del below[section][key]
    both_tables = {name for name in above if isinstance(below.get(name), dict) and isinstance(above[name], dict)}
    return below | above | {name: below[name] | above[name] for name in both_tables}


def _corrects(changes: Sections, place: str) -> bool:
    """Whether these values replace the one at this place."""
    return _has(changes, place) or (place.startswith("model.") and _names_model(changes))


def _names_model(sections: Sections) -> bool:
    return any(_has(sections, f"model.{source}") for source in _MODEL_SOURCES)


def _has(sections: Sections, place: str) -> bool:
    section, _, key = place.partition(".")
    values = sections.get(section)
    return isinstance(values, dict) and key in values


# Overrides


def _parsed(overrides: Sequence[str]) -> Sections:
    """Strings like "section.key=value" as sections, or OptionError with all that are malformed."""
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


# Which tool a file belongs to, by its content


def read_any(path: Path) -> Reading:
    """What a file says about a run, whatever tool it belongs to, or InputError."""
    reading = _read_any(path)
    if reading.model_names:
        folder = (path.absolute().parent.name,) if path.stem == "config" else ()
        reading = reading._replace(model_names=(*reading.model_names, path.stem, *folder))
    return reading


def _read_any(path: Path) -> Reading:
    where = place_of(path)
    text, complete = beginning_of(path)
    suffix = path.suffix.lower()
    if not complete:  # only a log may be that long, and it begins with the arguments
        pairs = megatron.arguments_in_log(text)
        if not pairs:
            text_of(path)  # raises: it is too large
        return megatron.read_arguments(pairs)
    if suffix == ".toml":
        return _of_toml(_toml(text, where))
    if text.lstrip()[:1] == "{" or suffix == ".json":
        return _of_json(_json(text, where), where)
    pairs = megatron.arguments_in_log(text) or ([] if suffix in _SCRIPTS else megatron.arguments_in_yaml(text))
    if pairs:
        return megatron.read_arguments(pairs)
    script = read_shell(text, where)
    if script.options and not any(name.startswith("lumos") for name in script.options):
        return _of_script(script, path.parent)
    try:
        return _of_toml(_toml(text, where))
    except InputError:
        raise InputError(f"{where}: {_FORMATS}") from None


def read_config(path: Path) -> Reading:
    """What a Hugging Face config.json says, or InputError that says why it does not describe a language model."""
    where = place_of(path)
    return _of_config(_json(text_of(path), where), where)


def toml_value(text: str) -> Any:
    """A TOML value, or the text itself where it is a bare word: toml_value("[1, 2]"), toml_value("bf16")."""
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return read["value"] if len(read) == 1 else text


def _json(text: str, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({str(error)[:100]})") from None


def _toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not TOML ({str(error)[:200]})") from None


def _of_toml(content: dict[str, Any]) -> Reading:
    return read_torchtitan(content) if is_torchtitan(content) else Reading(content)


def _of_json(content: Any, where: str) -> Reading:
    """Of Hugging Face unless its keys say otherwise."""
    if isinstance(content, dict) and not {"model_type", "architectures"} & set(content):
        if is_torchtitan(content):
            return read_torchtitan(content)
        pairs = megatron.arguments_in_table(content)
        if pairs:
            return megatron.read_arguments(pairs)
    return _of_config(content, where)


def _of_config(content: Any, where: str) -> Reading:
    try:
        return model_keys(content)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _of_script(script: Script, folder: Path) -> Reading:
    """Of torchtitan where the options are dotted or a configuration is named, else of Megatron."""
    name = (script.options.get("job.config-file") or [script.variables.get("CONFIG_FILE", "")])[0]
    in_python = "config" in script.options and "module" in script.options
    if not (any(OPTION.match(option) for option in script.options) or in_python or name.endswith(".toml")):
        return megatron.read_megatron(script)
    found = Findings()
    for condition in script.notes:
        found.note(condition)
    put_cluster(found, script)
    below = _config_file(name, folder, found) if name else {}
    return read_torchtitan(flat(below) | keys_of(script.options, toml_value), found)


def _config_file(name: str, folder: Path, found: Findings) -> dict[str, Any]:
    """The TOML that a command names, where it is next to the script."""
    for path in (folder / name, folder / Path(name).name):
        try:
            return _toml(text_of(path), place_of(path))
        except InputError:
            continue
    found.note(f"its configuration {shown(name)} is not next to the script: only the options given are used")
    return {}
