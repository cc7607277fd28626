"""One setup from what a trace shows and what a file states. The two may not contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from lumos.data_files import read_table
from lumos.errors import OptionError
from lumos.setup.gpus import find_gpu
from lumos.setup.setup import SECTIONS, Setup
from lumos.setup.setup_files import PlainSetup, SetupReading
from lumos.traced.infer import Inferred

Sections = dict[str, Any]

_KEYS = read_table("analysis.toml")["infer"]["keys"]
_ERRORS: dict[str, str] = read_table("analysis.toml")["infer"]["errors"]
_MOST_LINES = 8


def complete(findings: Mapping[str, Inferred], plain: PlainSetup, has_shapes: bool = True) -> SetupReading:
    """The setup of the traced run; OptionError with what is missing, or what file and trace disagree on."""
    sections = plain.over(_sections(findings))
    _refuse_contradictions(findings, sections, plain.where)
    missing = _missing(findings, sections, plain.where)
    if missing and not plain.mistakes:
        if not plain.where and {"model.layers", "model.heads", "train.seq"} <= set(missing):
            raise OptionError(_ERRORS["no_transformer" if has_shapes else "no_shapes"])
        text = _ERRORS["missing_in_file" if plain.where else "missing_in_trace"]
        more = "" if has_shapes else _ERRORS["record_shapes"]
        raise OptionError(text.format(where=plain.where, keys=", ".join(missing)) + more)
    reading = plain.checked(sections)
    _refuse_contradictions(findings, reading.setup.model_dump(), plain.where)  # derived values, this time
    return reading


def changed(findings: Mapping[str, Inferred], plain: PlainSetup, traced: PlainSetup | None = None) -> SetupReading:
    """The setup that is asked for: the traced run's, with the overrides of `plain`.

    `traced` is the file about the traced run, without overrides: what it states may be changed.
    """
    _refuse_rough_changes(findings, plain.overrides, dict(_items(traced.sections)) if traced is not None else {})
    sections = plain.over(_sections(findings))
    grown = _with_enough_gpus(findings, sections, plain.overrides)
    reading = plain.checked(sections)
    assumed = [] if plain.where else [_assumed(sections, reading.setup)]
    return SetupReading(reading.setup, (*reading.notes, *grown, *assumed))


def _with_enough_gpus(findings: Mapping[str, Inferred], sections: Sections, overrides: Sections) -> list[str]:
    """More GPUs where the traced ones do not hold the ranks that were asked for, and a note on it."""
    parallel, cluster = sections.get("parallel", {}), sections.get("cluster", {})
    sizes = [parallel.get(key, 1) for key in ("tp", "pp", "cp")]
    traced = findings.get("cluster.gpus")
    asked = "gpus" in overrides.get("cluster", {}) or "dp" in overrides.get("parallel", {})
    sound = all(type(size) is int and size > 0 for size in sizes)  # else a mistake, which is named later
    if traced is None or asked or not sound or cluster.get("gpus") != traced.value:
        return []
    together = prod(sizes)
    if traced.value % together == 0:
        return []
    data = findings["parallel.dp"].value if "parallel.dp" in findings else 1
    sections["cluster"] = {**cluster, "gpus": together * data}
    return [f"on {together * data} GPUs, as tp · pp · cp = {together} does not fit on the traced {traced.value}"]


def _assumed(sections: Sections, setup: Setup) -> str:
    """The values that no trace shows, where no file states them."""
    matters = {
        "train.framework": True,
        "cluster.gpus_per_node": setup.cluster.gpus > 1,
        "parallel.schedule": setup.parallel.pp > 1,
    }
    stated, values = dict(_items(sections)), dict(_items(setup.model_dump()))
    assumed = (f"{key} = {values[key]}" for key, matter in matters.items() if matter and key not in stated)
    return f"assumed (not in the trace): {', '.join(assumed)}; state other values in a SETUP file"


def _items(sections: Sections) -> Iterator[tuple[str, Any]]:
    """("model.layers", 4), …; sections that are no tables are left out."""
    for name, values in sections.items():
        if isinstance(values, dict):
            yield from ((f"{name}.{key}", value) for key, value in values.items())


def _sections(findings: Mapping[str, Inferred]) -> Sections:
    """The inferred values by section, without those that follow from others: they must follow a change of those."""
    sections: Sections = {}
    for key, inferred in findings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = inferred.value
    if "gpus" in sections.get("cluster", {}):
        sections.get("parallel", {}).pop("dp", None)
    for name, values in sections.items():
        kind = SECTIONS[name]
        again = kind.derived({key: value for key, value in values.items() if key not in kind.DERIVED})
        sections[name] = {key: value for key, value in values.items() if key not in again or again[key] != value}
    return sections


def _missing(findings: Mapping[str, Inferred], sections: Sections, where: str) -> list[str]:
    """Keys that are needed, and neither stated nor inferred."""
    needed = list(_KEYS["required" if where else "not_assumed"])
    if not where and findings.get("parallel.dp", Inferred(1, "")).value > 1:
        needed.append("parallel.zero")
    known = {key for key, _ in _items(sections)} | findings.keys()
    if "model.expert_ffn" in known:
        known.add("model.ffn")
    return [key for key in needed if key not in known]


def _refuse_contradictions(findings: Mapping[str, Inferred], sections: Sections, where: str) -> None:
    stated = dict(_items(sections))
    lines = [
        f"{where + ': ' if where else ''}{key} = {_shown(stated[key])}, and the trace shows {_shown(inferred.value)} "
        f"({inferred.evidence}): give the setup of the traced run, and changes to it with --set"
        for key, inferred in findings.items()
        if key in stated and not inferred.rough and not _agrees(key, stated[key], inferred.value)
    ]
    if lines:
        raise OptionError("\n".join(lines[:_MOST_LINES]))


def _refuse_rough_changes(findings: Mapping[str, Inferred], overrides: Sections, stated: Mapping[str, Any]) -> None:
    """A size that is only near has no place in the trace's operators that could be changed."""
    rough = {key: inferred for key, inferred in findings.items() if inferred.rough}
    lines = [
        f"{key} = {_shown(value)}: the trace shows only roughly {_shown(rough[key].value)} ({rough[key].evidence}): "
        f"to change it, state the traced run's {key} in a SETUP file, as in lumos predict SETUP --from PATH --set …"
        for key, value in _items(overrides)
        if key in rough and key not in stated and value != rough[key].value
    ]
    if lines:
        raise OptionError("\n".join(lines[:_MOST_LINES]))


def _agrees(key: str, stated: Any, inferred: Any) -> bool:
    if key == "cluster.gpu":
        known = find_gpu(stated) if isinstance(stated, str) else None
        return known is None or known.name == inferred
    return type(stated) is not type(inferred) or bool(stated == inferred)  # wrong types are refused later


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
