"""Preset: a published model by name, as in `preset = "llama3-8b"`. The facts are in `data/models.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from lumos.errors import OptionError
from lumos.setup.messages import did_you_mean
from lumos.setup.model import Model

_SEPARATORS = re.compile(r"[\s_\-]+")
_BESIDE_SIZES = ("source", "also", "common", "offered")


@dataclass(frozen=True)
class Preset:
    """What a family's authors published about one size."""

    name: str
    keys: Mapping[str, Any]  # of [model]
    seq: int  # the context it was trained with
    published_b: float  # parameters, in billions; 0 where nobody states them
    active_b: float  # those that one token meets; 0 for a dense model
    source: str
    aliases: tuple[str, ...]
    offered: bool  # whether it is among the names that are suggested

    @property
    def model(self) -> Model:
        """The model itself."""
        return Model(**self.keys)


def preset_named(name: str) -> Preset:
    """The preset of that name or alias, in any case, or OptionError with the nearest name."""
    preset = _by_name().get(_plain(name))
    if preset is None:
        raise OptionError(f"model preset {name[:100]!r} is not known: {did_you_mean(name, preset_names())}")
    return preset


def preset_names() -> tuple[str, ...]:
    """The names that are offered, without the aliases."""
    return tuple(preset.name for preset in _presets() if preset.offered)


@cache
def _presets() -> tuple[Preset, ...]:
    text = resources.files("lumos").joinpath("data/models.toml").read_text("utf-8")
    families = tomllib.loads(text)
    return tuple(preset for family, facts in families.items() for preset in _sizes_of(family, facts))


def _sizes_of(family: str, facts: dict[str, Any]) -> Iterator[Preset]:
    for size, row in facts.items():
        if size in _BESIDE_SIZES:
            continue
        name, keys = f"{family}-{size}", facts["common"] | row
        others = [f"{other}-{size}" for other in facts.get("also", ())]
        yield Preset(
            name=name,
            seq=keys.pop("seq"),
            published_b=keys.pop("published_b", 0.0),
            active_b=keys.pop("active_b", 0.0),
            aliases=(*others, *keys.pop("aliases", ())),
            source=facts["source"],
            offered=facts.get("offered", True),
            keys=MappingProxyType(keys | {"name": name}),
        )


@cache
def _by_name() -> Mapping[str, Preset]:
    return MappingProxyType({_plain(name): preset for preset in _presets() for name in (preset.name, *preset.aliases)})


def _plain(name: str) -> str:
    """Llama-3.1-8B, meta-llama/Llama-3.1-8B and llama3.1_8b are the same."""
    return _SEPARATORS.sub("", name[:200].rpartition("/")[2].casefold())
