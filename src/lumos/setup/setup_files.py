"""Setup files: reads TOML, or a file of another tool, with the changes of --set; writes TOML."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from pydantic import ValidationError

from lumos.arguments import checks_arguments
from lumos.errors import InputError, LumosError, OptionError
from lumos.files import stamp_of
from lumos.setup.constraints import checked_setup, warnings_in
from lumos.setup.gpus import is_file_name
from lumos.setup.importers.any_file import read_any, read_config, toml_value
from lumos.setup.importers.foreign_file import GPU_KEYS, Note, Reading, Sections
from lumos.setup.messages import nearest, place_of, shown, size_text
from lumos.setup.presets import Preset, find_preset, preset_named, preset_names
from lumos.setup.sections import Model, Section, as_count
from lumos.setup.setup import KEYS, SECTIONS, Setup
from lumos.setup.stated_size import preset_of, size_doubt

_MODEL_SOURCES = ("preset", "hf")
_OF_WHOLE_MODEL = tuple(f"model.{source}" for source in _MODEL_SOURCES)
_ONE_FOLLOWS = (("train.microbatches", "train.global_batch"), ("parallel.dp", "cluster.gpus"))
_ALWAYS_WRITTEN: Mapping[str, tuple[str, ...]] = {
    "model": ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated", "tied"),
    "train": ("seq", "micro_batch", "microbatches", "precision", "recompute", "optimizer", "framework"),
    "parallel": ("tp", "pp", "vpp", "cp", "ep", "zero", "sequence_parallel"),
    "cluster": ("gpu", "gpus", "gpus_per_node"),
}
_NEVER_WRITTEN = ("global_batch", "dp")  # they follow from microbatches and gpus
_CONFIG = "config.json"
_ALIKE = 0.75  # how much of a name must be that of a preset: GLM-4.5 is no llama3-405b
_FILE = re.compile(r"\.[a-zA-Z]{1,8}$")  # the end of a file's name; Qwen2.5-7B is that of a model
_BASES = ("megatron", "torchtitan")  # keys of a setup that name a file of another tool, which the setup changes


_LEAST_BYTES = 6  # of a parameter, with its gradient and the optimizer's state, in the smallest formats


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
    model_names: tuple[str, ...] | None = None  # of a model whose size was read from a file of another tool
    stored_parameters: int = 0
    assumes_gpus: bool = False  # whether a file of another tool leaves the number of GPUs to its launcher

    def over(self, below: Sections) -> Sections:
        """These values on top of others; an override that names another model replaces theirs."""
        if _names_model(self.overrides):
            below = {name: values for name, values in below.items() if name != "model"}
        return _layered(below, self.sections)

    def checked(self, sections: Sections, searched: Collection[str] = ()) -> SetupReading:
        """The setup of completed sections, or an error that lists every mistake that is not about a searched key."""
        setup = checked_setup(sections, self.where, self.mistakes, searched)
        if self.assumes_gpus and not searched:
            _refuse_too_few(setup, self.where)
        is_given = _has(sections, "cluster.gpu") or setup.cluster.model
        assumed = () if is_given else (f"cluster.gpu is not given: assuming {setup.cluster.gpu}",)
        doubt = size_doubt(setup.model, setup.train.seq, self.model_names, self.stored_parameters)
        doubts = (f"{self.where}: {doubt}",) if doubt else ()
        return SetupReading(setup, (*self.notes, *doubts, *assumed, *warnings_in(setup)))


@checks_arguments
def read_setup(path: Path | str, overrides: str | Sequence[str] = ()) -> Setup:
    """The run that a file describes, or an error that lists every mistake.

    The name of a preset, or of a model of the Hugging Face Hub that was downloaded, is as good as a file.

    >>> read_setup("examples/llama3-70b.toml", ["parallel.tp=8", "train.precision=fp8"])
    """
    return read_setup_with_notes(path, overrides).setup


def read_setup_with_notes(path: Path | str, overrides: str | Sequence[str] = ()) -> SetupReading:
    """The same as `read_setup`, with notes on what was assumed, padded, ignored or not recognised."""
    plain = read_plain(path, overrides)
    return plain.checked(plain.sections)


def read_plain(path: Path | str | None, overrides: str | Sequence[str] = ()) -> PlainSetup:
    """The values of a file that need not be complete; without a file, the overrides alone."""
    path = None if path is None else located(path)
    changes = _parsed([overrides] if isinstance(overrides, str) else overrides)
    reading = _read(path) if path is not None else Reading({})
    sections, assumed = _grouped(_layered(reading.sections, changes), reading.copies)
    folder = path.parent if path is not None else Path()
    model, notes, mistakes = _model_from(sections.get("model", {}), folder)
    where = place_of(path) if path is not None else ""
    left = [mistake for mistake in reading.mistakes if not _corrects(changes, mistake.place)]
    if any(mistake.place.startswith("model.") for mistake in left):
        model = None  # it could not be read, and a mistake says so
    stated = (*(mistake.sentence for mistake in left), *mistakes)
    remarks = (*reading.remarks(where, partial(_corrects, changes)), *(f"{where}: {sentence}" for sentence in assumed))
    plain = PlainSetup(sections | {"model": model}, changes, (*remarks, *notes), stated, where)
    is_given = any(_has(changes, key) for key in GPU_KEYS)
    if not changes.get("model"):
        plain = plain._replace(model_names=reading.model_names, stored_parameters=reading.stored_parameters)
    return plain._replace(assumes_gpus=not is_given and any(note.keys == GPU_KEYS for note in reading.notes))


def _refuse_too_few(setup: Setup, where: str) -> None:
    """Raise OptionError where the GPUs that were assumed cannot hold the model's weights and the optimizer's state."""
    parallel, model = setup.parallel, setup.model
    size = model.parameters(setup.train.seq)
    held = size * _LEAST_BYTES / (parallel.tp * parallel.pp * (parallel.ep if model.experts else 1))
    offloaded = setup.train.offload_optimizer or setup.train.offload_weights
    if setup.train.mode != "lora" and not offloaded and held > setup.cluster.accelerator.memory_gib * 2**30:
        raise OptionError(
            f"{where}: the number of GPUs is not given, and {setup.cluster.gpus} × {setup.cluster.gpu} cannot hold "
            f"{size_text(size)} parameters: --set cluster.gpus=NUMBER"
        )


@checks_arguments
def write_setup(setup: Setup) -> str:
    """The setup as TOML that reads back equal. Values that follow from others are omitted."""
    return tomli_w.dumps({name: _written(name, getattr(setup, name)) for name in setup.stated_sections})


def _written(name: str, section: Section) -> dict[str, Any]:
    stated = section.stated()
    written = {}
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        needed = key in stated if key in section.DERIVED else value != field.default
        if key not in _NEVER_WRITTEN and (needed or key in _ALWAYS_WRITTEN.get(name, ())):
            written[key] = value
    return written


# Reading


def located(name: Path | str) -> Path:
    """A path; of a model's folder, or the name of one downloaded from the Hugging Face Hub, that of its config.json."""
    path, folder = Path(name), Path(name)
    if not os.path.lexists(path):
        if find_preset(str(path)) or len(path.parts) != 2 or ".." in path.parts:
            return path
        home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
        folder = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{'--'.join(path.parts)}"
    try:
        found = [folder / _CONFIG, *sorted(folder.glob(f"snapshots/*/{_CONFIG}"), key=stamp_of, reverse=True)]
        return next((config for config in found if config.is_file()), path)
    except (OSError, ValueError):
        return path


def _preset_of(path: Path) -> Preset | None:
    """The preset that is named in place of a file: llama3-8b, Qwen/Qwen3-8B."""
    return None if os.path.lexists(path) or len(path.parts) > 2 else preset_of(str(path))


def _read(path: Path) -> Reading:
    preset = _preset_of(path)
    if preset is not None:
        note = Note(f"no such file: the preset {preset.name}, with train.seq = {preset.seq}", ("train.seq",))
        return Reading({"model": dict(preset.keys), "train": {"seq": preset.seq}}, (note,))
    if not os.path.lexists(path) and not _FILE.search(path.name):
        guess = nearest(path.name, preset_names(), cutoff=_ALIKE)
        advice = f"did you mean {guess}?" if guess else "give the path of its config.json"
        raise InputError(f"{place_of(path)}: no such file, preset or downloaded model: {advice}")
    reading = _with_files_beside(read_any(path), path.parent)
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


def _grouped(sections: Sections, copies: int) -> tuple[Sections, tuple[str, ...]]:
    """With the replicas that share one of so many copies of the weights; a note where their number is not known."""
    parallel, cluster = sections.get("parallel"), sections.get("cluster", {})
    if copies < 2 or not isinstance(parallel, dict) or not isinstance(cluster, dict) or "shard" in parallel:
        return sections, ()
    replica = math.prod(as_count(parallel.get(key)) or 1 for key in ("tp", "pp", "cp"))
    replicas = as_count(parallel.get("dp")) or as_count(cluster.get("gpus")) // replica
    if replicas:
        return {**sections, "parallel": {**parallel, "shard": max(replicas // copies, 1)}}, ()
    sizes = f"{copies} copies of the weights, and the number of replicas is not given"
    return sections, (f"{sizes}: assuming one copy for all; set cluster.gpus or parallel.shard",)


def _with_files_beside(reading: Reading, folder: Path) -> Reading:
    """With paths of data sheets and model files, which a setup names as they are seen from its own folder."""
    cluster = reading.sections.get("cluster")
    if not isinstance(cluster, dict):
        return reading
    named = {key: cluster.get(key) for key in ("gpu", "model")}
    paths = {key: str(folder / name) for key, name in named.items() if isinstance(name, str) and is_file_name(name)}
    return reading._replace(sections={**reading.sections, "cluster": {**cluster, **paths}}) if paths else reading


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
            notes += _doubts(config, where) if set(stated) <= {"hf", "name"} else ()
            if wrong:
                return None, notes, tuple(f"{where}: {mistake.sentence}" for mistake in wrong)
    except LumosError as error:
        return None, (), (str(error),)
    return keys | {key: value for key, value in stated.items() if key not in _MODEL_SOURCES}, notes, ()


def _doubts(config: Reading, where: str) -> tuple[str, ...]:
    """Whether the size of a config.json contradicts its name or its weights."""
    try:
        doubt = size_doubt(Model(**config.sections["model"]), 0, config.model_names, config.stored_parameters)
    except ValidationError:  # which the checks of the setup report
        return ()
    return (f"{where}: {doubt}",) if doubt else ()


def _layered(below: Sections, above: Sections) -> Sections:
    """Both, the keys of `above` winning.

    Another model replaces the one below, and of two values that follow from each other only the one above counts.
    """
    below = {name: dict(values) if isinstance(values, dict) else values for name, values in below.items()}
    if _names_model(above):
        below.pop("model", None)
    for pair in _ONE_FOLLOWS:
        for stated, other in (pair, pair[::-1]):
            section, _, key = stated.partition(".")
            derived = _has(above, stated) and above[section][key] == 0  # it is to follow from the other, which stays
            if _has(above, stated) and not derived and not _has(above, other) and _has(below, other):
                section, _, key = other.partition(".")
                del below[section][key]
    both_tables = {name for name in above if isinstance(below.get(name), dict) and isinstance(above[name], dict)}
    return below | above | {name: below[name] | above[name] for name in both_tables}


def _corrects(changes: Sections, place: str) -> bool:
    """Whether these values replace the one at this place; all sizes of a model replace its name."""
    sizes = all(_has(changes, f"model.{key}") for key, field in Model.model_fields.items() if field.is_required())
    describes = _names_model(changes) or (sizes and place in _OF_WHOLE_MODEL)
    return _has(changes, place) or (place.startswith("model.") and describes)


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
    if place in KEYS:
        return f"--set {text[:100]}: the value is missing: write {place}=VALUE"
    homes = [key for key in KEYS if key.partition(".")[2] == place] or [nearest(place, KEYS)]
    example = f"did you mean {homes[0]}?" if homes[0] else "as in parallel.tp=2"
    return f"--set {text[:100]}: write SECTION.KEY=VALUE; {example}"
