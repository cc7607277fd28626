"""Preset: a published model by name, as in `preset = "llama3-8b"`. They are in `data/models.toml`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from lumos.data_files import read_table
from lumos.errors import OptionError
from lumos.setup.messages import did_you_mean
from lumos.setup.sections import Model

_SEPARATORS = re.compile(r"[\s_\-]+")
_FAMILY_KEYS = ("source", "also", "common", "offered")  # every other key of a family is a size


@dataclass(frozen=True)
class Preset:
    """One size of a model family, as its authors published it."""

    name: str
    keys: Mapping[str, Any]  # of [model]
    seq: int  # the context it was trained with
    published_b: float  # parameters, in billions; 0 where they are not published
    active_b: float  # parameters that one token uses; 0 for a dense model
    source: str
    aliases: tuple[str, ...]
    offered: bool  # whether it is among the names that are suggested

    @property
    def model(self) -> Model:
        """Its [model] section."""
        return Model(**self.keys)


def preset_named(name: str) -> Preset:
    """The preset of that name or alias, in any case, or OptionError with the nearest name."""
    preset = find_preset(name)
    if preset is None:
        raise OptionError(f"model preset {name[:100]!r} is not known: {did_you_mean(name, preset_names())}")
    return preset


def find_preset(name: str) -> Preset | None:
    """The preset of that name or alias, or None."""
    return _by_name().get(_normalized(name))


def preset_names() -> tuple[str, ...]:
    """The names that are suggested, without the aliases."""
    return tuple(preset.name for preset in _presets() if preset.offered)


@cache
def _presets() -> tuple[Preset, ...]:
    families = read_table("models.toml").items()
    return tuple(preset for family, facts in families for preset in _sizes_of(family, facts))


def _sizes_of(family: str, facts: Mapping[str, Any]) -> Iterator[Preset]:
    for size, row in facts.items():
        if size in _FAMILY_KEYS:
            continue
        keys = facts["common"] | row | {"name": f"{family}-{size}"}
        others = [f"{other}-{size}" for other in facts.get("also", ())]
        yield Preset(
            name=keys["name"],
            seq=keys.pop("seq"),
            published_b=keys.pop("published_b", 0.0),
            active_b=keys.pop("active_b", 0.0),
            aliases=(*others, *keys.pop("aliases", ())),
            source=facts["source"],
            offered=facts.get("offered", True),
            keys=keys,
        )


@cache
def _by_name() -> Mapping[str, Preset]:
    return {_normalized(name): preset for preset in _presets() for name in (preset.name, *preset.aliases)}


def _normalized(name: str) -> str:
    """Llama-3.1-8B, meta-llama/Llama-3.1-8B and llama3.1_8b are the same."""
    return _SEPARATORS.sub("", name[:200].rpartition("/")[2].casefold())
