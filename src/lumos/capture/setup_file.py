"""The setup that is written beside traces: what the user gave, and what torch can tell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lumos.capture.place import Place
from lumos.errors import OptionError

NAME = "setup.toml"
_SECTIONS = ("model", "train", "parallel", "cluster")
_UNKNOWN = """\
# What torch could tell of this run. Fill in the rest and take the # away, or name the model's config.json in `hf`.
[model]
# hf = "config.json"
# layers =
# hidden =
# ffn =
# heads =
# vocab =

[train]
# seq =
# micro_batch =
# microbatches = 1
# precision = "bf16"
"""


def checked(setup: object) -> object:
    """The setup as it was given, or OptionError where it cannot become a file: before any training has begun."""
    if setup is None or _is_setup(setup):
        return setup
    if isinstance(setup, str | Path):
        return _existing(Path(setup))
    if isinstance(setup, Mapping):
        _toml(_copied(setup))
        return setup
    raise OptionError(f"setup is a {type(setup).__name__}: give a path, a dictionary of sections, or a lumos Setup")


def setup_files(setup: object, place: Place) -> dict[str, str]:
    """The files to write, by name."""
    if setup is None:
        return {NAME: _UNKNOWN + "\n" + _toml(_told({}, place))}
    if isinstance(setup, Mapping):
        return {NAME: _toml(_told(_copied(setup), place))}
    if isinstance(setup, Path) and setup.suffix.lower() == ".toml":
        return {NAME: setup.read_text("utf-8")}
    if isinstance(setup, Path):
        return {setup.name: setup.read_text("utf-8")} | (_around_config(place) if setup.suffix == ".json" else {})
    from lumos.setup.setup import Setup
    from lumos.setup.setup_files import write_setup

    assert isinstance(setup, Setup)
    return {NAME: write_setup(setup)}


def _is_setup(setup: object) -> bool:
    """A Setup, told by its name: the class itself needs more than torch to be imported."""
    return type(setup).__module__.startswith("lumos.setup") and type(setup).__name__ == "Setup"


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise OptionError(f"setup {path}: no such file; give a setup (TOML), a config.json or a Megatron script")
    return path.absolute()


def _around_config(place: Place) -> dict[str, str]:
    text = _UNKNOWN.replace('# hf = "config.json"', 'hf = "config.json"')
    lines = [line for line in text.splitlines() if not line.startswith(tuple(f"# {key} =" for key in _OF_CONFIG))]
    return {NAME: "\n".join(lines) + "\n\n" + _toml(_told({}, place))}


_OF_CONFIG = ("layers", "hidden", "ffn", "heads", "vocab")


def _copied(setup: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    """Sections of plain keys, checked for their form; what the values must be is for the reader to say."""
    sections: dict[str, dict[str, Any]] = {}
    for name, values in setup.items():
        if name not in _SECTIONS or not isinstance(values, Mapping):
            raise OptionError(
                f"setup: {name!r} is no section; give dictionaries under {', '.join(_SECTIONS)}, as in "
                '{"model": {"layers": 8}}'
            )
        sections[name] = dict(values)
    return sections


def _told(sections: dict[str, dict[str, Any]], place: Place) -> dict[str, dict[str, Any]]:
    """With what torch knows put in where nothing is stated."""
    cluster = sections.setdefault("cluster", {})
    cluster.setdefault("gpu", place.device)
    if "gpus" not in cluster and "dp" not in sections.get("parallel", {}):
        cluster["gpus"] = place.world
    return sections


def _toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    parts = []
    for name, values in sections.items():
        lines = [f"{key} = {_value(f'{name}.{key}', value)}" for key, value in values.items()]
        parts.append("\n".join([f"[{name}]", *lines]) + "\n")
    return "\n".join(parts)


def _value(place: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(place, item) for item in value)}]"
    raise OptionError(f"setup: {place} is a {type(value).__name__}; give a number, a text, true or false")
