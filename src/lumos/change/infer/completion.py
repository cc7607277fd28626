"""Completion: what a trace tells of its setup, and what a file says of it, as one setup. They may not contradict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lumos.change.infer.inferred_value import Told
from lumos.errors import OptionError
from lumos.setup.gpus import find_gpu
from lumos.setup.setup import SECTIONS, Setup
from lumos.setup.setup_files import PlainSetup, SetupReading

Sections = dict[str, Any]

# What has no default that could be meant, with a file; and what may not be left to its default without one.
_REQUIRED = ("model.layers", "model.hidden", "model.ffn", "model.heads", "model.vocab", "train.seq")
_NOT_ASSUMED = (
    *("model.layers", "model.hidden", "model.ffn", "model.heads", "model.kv_heads", "model.vocab", "model.gated"),
    *("model.tied", "train.seq", "train.micro_batch", "train.microbatches", "train.precision", "train.recompute"),
    *("train.optimizer", "train.compile", "parallel.tp", "parallel.pp", "parallel.cp", "cluster.gpu", "cluster.gpus"),
)
_MOST_LINES = 8
_WITHOUT_SHAPES = " (a trace tells more when it is recorded with record_shapes=True)"


def complete(found: Mapping[str, Told], plain: PlainSetup, has_shapes: bool = True) -> SetupReading:
    """The setup of the traced run, or an error that says what is missing, or what file and trace disagree on."""
    sections = plain.over(_values(found))
    _refuse_contradictions(found, _stated(sections), plain.where)
    missing = _missing(found, sections, plain.where)
    if missing and not plain.mistakes:
        raise OptionError(_incomplete(missing, plain.where) + ("" if has_shapes else _WITHOUT_SHAPES))
    reading = plain.checked(sections)
    _refuse_contradictions(found, reading.setup.model_dump(), plain.where)  # what was derived, this time
    return reading


def changed(found: Mapping[str, Told], plain: PlainSetup) -> SetupReading:
    """The setup that is asked for: the traced run's, with the overrides of `plain` in it."""
    sections = plain.over(_values(found))
    reading = plain.checked(sections)
    return reading if plain.where else SetupReading(reading.setup, (*reading.notes, _assumed(sections, reading.setup)))


def _assumed(sections: Sections, setup: Setup) -> str:
    """What no trace tells, and no file said."""
    matters = {
        "train.framework": True,
        "cluster.gpus_per_node": setup.cluster.gpus > 1,
        "parallel.schedule": setup.parallel.pp > 1,
    }
    said = {f"{name}.{key}" for name, values in _stated(sections).items() for key in values}
    assumed = [key for key, is_asked in matters.items() if is_asked and key not in said]
    values = setup.model_dump()
    shown = (f"{key} = {values[key.partition('.')[0]][key.partition('.')[2]]}" for key in assumed)
    return f"no trace tells, so it was taken: {', '.join(shown)}; a SETUP file says otherwise"


def _values(found: Mapping[str, Told]) -> Sections:
    """The findings as sections, less what follows from others anyway: it must follow a change of those."""
    sections: Sections = {}
    for key, told in found.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = told.value
    if "gpus" in sections.get("cluster", {}):
        sections.get("parallel", {}).pop("dp", None)
    for name, values in sections.items():
        kind = SECTIONS[name]
        again = kind.derived({key: value for key, value in values.items() if key not in kind.DERIVED})
        sections[name] = {key: value for key, value in values.items() if key not in again or again[key] != value}
    return sections


def _missing(found: Mapping[str, Told], sections: Sections, where: str) -> list[str]:
    """Keys that are needed and neither said nor told."""
    needed = [*(_REQUIRED if where else _NOT_ASSUMED)]
    if not where and found.get("parallel.dp", Told(1, "")).value > 1:
        needed.append("parallel.zero")
    said = {f"{name}.{key}" for name, values in sections.items() if isinstance(values, dict) for key in values}
    if "model.expert_ffn" in said:
        said.add("model.ffn")
    return [key for key in needed if key not in said and key not in found]


def _incomplete(missing: list[str], where: str) -> str:
    keys = ", ".join(missing)
    if where:
        return f"{where}: neither this file nor the trace tells {keys}: add it to the file"
    return (
        f"a changed run needs the traced run's setup, and the trace does not tell {keys}: name a SETUP file with at "
        "least these keys, as in lumos predict SETUP --from PATH --set …"
    )


def _stated(sections: Sections) -> Sections:
    return {name: values for name, values in sections.items() if isinstance(values, dict)}


def _refuse_contradictions(found: Mapping[str, Told], sections: Sections, where: str) -> None:
    lines = []
    for key, told in found.items():
        section, _, name = key.partition(".")
        stated = sections.get(section, {}).get(name, told.value)
        if not _agrees(key, stated, told.value):
            lines.append(
                f"{where + ': ' if where else ''}{key} = {_shown(stated)}, and the trace tells {_shown(told.value)} "
                f"({told.evidence}): give the setup of the traced run; changes go into --set"
            )
    if lines:
        raise OptionError("\n".join(lines[:_MOST_LINES]))


def _agrees(key: str, stated: Any, told: Any) -> bool:
    if key == "cluster.gpu":
        known = find_gpu(stated) if isinstance(stated, str) else None
        return known is None or known.name == told
    return type(stated) is not type(told) or bool(stated == told)  # what is of the wrong kind is refused as such


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
