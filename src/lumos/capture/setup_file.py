"""The setup that is written beside traces: the user's, completed by what torch knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lumos.capture.rank_info import RankInfo
from lumos.errors import OptionError

NAME = "setup.toml"
_SECTIONS = ("model", "train", "parallel", "cluster")
_UNKNOWN = """\
# What torch knows of this run. Fill in the rest and remove the #, or name the model's config.json in `hf`.
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


def checked_setup(setup: object) -> object:
    """The setup as it was given, or OptionError where it cannot become a file: before any training has begun."""
    if setup is None or _is_setup(setup):
        return setup
    if isinstance(setup, str | Path):
        return _existing(Path(setup))
    if isinstance(setup, Mapping):
        _toml(_copied(setup))
        return setup
    raise OptionError(f"setup is a {type(setup).__name__}: give a path, a dictionary of sections, or a lumos Setup")


def setup_files(setup: object, info: RankInfo) -> dict[str, str]:
    """The files to write, by name."""
    if setup is None:
        return {NAME: _UNKNOWN + "\n" + _toml(_completed({}, info))}
    if isinstance(setup, Mapping):
        return {NAME: _toml(_completed(_copied(setup), info))}
    if isinstance(setup, Path) and setup.suffix.lower() == ".toml":
        return {NAME: setup.read_text("utf-8")}
    if isinstance(setup, Path):
        return {setup.name: setup.read_text("utf-8")} | (_around_config(info) if setup.suffix == ".json" else {})
    from lumos.setup.setup import Setup
    from lumos.setup.setup_files import write_setup

    assert isinstance(setup, Setup)
    return {NAME: write_setup(setup)}


def _is_setup(setup: object) -> bool:
    """Whether it is a Setup, by name: importing the class needs more than torch."""
    return type(setup).__module__.startswith("lumos.setup") and type(setup).__name__ == "Setup"


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise OptionError(f"setup {path}: no such file; give a setup (TOML), a config.json or a Megatron script")
    return path.absolute()


def _around_config(info: RankInfo) -> dict[str, str]:
    text = _UNKNOWN.replace('# hf = "config.json"', 'hf = "config.json"')
    lines = [line for line in text.splitlines() if not line.startswith(tuple(f"# {key} =" for key in _OF_CONFIG))]
    return {NAME: "\n".join(lines) + "\n\n" + _toml(_completed({}, info))}


_OF_CONFIG = ("layers", "hidden", "ffn", "heads", "vocab")


def _copied(setup: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    """Sections of plain keys; their names are checked here, their values when the setup is read."""
    sections: dict[str, dict[str, Any]] = {}
    for name, values in setup.items():
        if name not in _SECTIONS or not isinstance(values, Mapping):
            raise OptionError(
                f"setup: {name!r} is no section; give dictionaries under {', '.join(_SECTIONS)}, as in "
                '{"model": {"layers": 8}}'
            )
        sections[name] = dict(values)
    return sections


def _completed(sections: dict[str, dict[str, Any]], info: RankInfo) -> dict[str, dict[str, Any]]:
    """With the GPU and the size of the job, unless they are given."""
    cluster = sections.setdefault("cluster", {})
    cluster.setdefault("gpu", info.device)
    if "gpus" not in cluster and "dp" not in sections.get("parallel", {}):
        cluster["gpus"] = info.world
    return sections


def _toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of plain values, which TOML writes as JSON does; this process may have no library for TOML."""
    for name, values in sections.items():
        for key, value in values.items():
            for item in value if isinstance(value, list | tuple) else [value]:
                if not isinstance(item, bool | int | float | str):
                    raise OptionError(
                        f"setup: {name}.{key} is a {type(item).__name__}; give a number, a text, true or false"
                    )
    parts = (
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())])
        for name, values in sections.items()
    )
    return "\n\n".join(parts) + "\n"
