"""Slow parts of a cluster, as `--slow` and `variability.slow` name them: a GPU, a network adapter, some of the GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lumos.errors import OptionError
from lumos.setup.messages import did_you_mean

_KEYS = ("rank", "link", "share", "group", "factor")
_GROUPS = ("dp", "tp", "pp")
_FORMS = "rank=7,factor=1.3, link=7,factor=2, group=dp,factor=1.5 or share=0.01,factor=1.2"
_MOST = 1e3  # no larger factor
_MOST_PARTS = 64


@dataclass(frozen=True)
class Slow:
    """Something that takes `factor` times as long as it should.

    `rank`: every kernel of one GPU. `link`: what goes through the network adapter of one GPU. `group` alone: all
    communication of data, tensor or pipeline parallelism; with a link, only that of it. `share`: so many of the GPUs.
    """

    factor: float
    rank: int | None = None
    link: int | None = None
    group: str = ""
    share: float = 0.0

    @property
    def text(self) -> str:
        """As it is given."""
        given = {"rank": self.rank, "link": self.link, "group": self.group or None, "share": self.share or None}
        named = [f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in given.items()
                 if value is not None]  # fmt: skip
        return ",".join([*named, f"factor={self.factor:g}"])

    @property
    def words(self) -> str:
        """For a reader."""
        if self.rank is not None:
            return f"rank {self.rank}: every kernel takes {self.factor:g} times as long"
        if self.share:
            return f"{100 * self.share:g} % of the GPUs: every kernel takes {self.factor:g} times as long"
        what = {"dp": "data-parallel communication", "tp": "communication inside passes", "pp": "messages of stages"}
        through = f" through the adapter of rank {self.link}" if self.link is not None else ""
        return f"{what.get(self.group, 'all communication')}{through}: {self.factor:g} times as long"


def read_slow(texts: Sequence[str], gpus: int, option: str = "--slow") -> tuple[Slow, ...]:
    """What these texts name, in a job of so many GPUs; `option` is where they are given."""
    if len(texts) > _MOST_PARTS:
        raise OptionError(f"{option} has {len(texts):,} slow parts, at most {_MOST_PARTS}: use share=… for many GPUs")
    found = tuple(_read_one(text, gpus, f"{option} {text[:100]}") for text in texts)
    for what in ("rank", "link"):
        named = [getattr(one, what) for one in found if getattr(one, what) is not None and not one.group]
        twice = next((one for one in named if named.count(one) > 1), None)
        if twice is not None:
            raise OptionError(f"{option} {what}={twice} is given twice: state one factor for it")
    if sum(bool(one.share) for one in found) > 1:
        raise OptionError(f"{option} share=… is given twice: state one share of slow GPUs")
    return found


def _read_one(text: str, gpus: int, where: str) -> Slow:
    parts = [part.partition("=") for part in text.split(",")]
    values: dict[str, str] = {}
    for name, equals, value in ((n.strip(), e, v.strip()) for n, e, v in parts):
        if not equals or name not in _KEYS:
            raise OptionError(f"{where}: {did_you_mean(name[:50], _KEYS)}; write {_FORMS}")
        if name in values:
            raise OptionError(f"{where}: {name} is given twice")
        values[name] = value
    kinds = [name for name in ("rank", "link", "share") if name in values]
    alone = kinds == ["link"] or not kinds
    if "factor" not in values or len(kinds) > 1 or (not kinds and "group" not in values):
        raise OptionError(f"{where}: names one slow thing and its factor: write {_FORMS}")
    if "group" in values and (not alone or values["group"] not in _GROUPS):
        raise OptionError(f"{where}: group is dp, tp or pp, alone or with a link")
    found: dict[str, Any] = {"factor": _number(where, "factor", values["factor"], _MOST)}
    for name in ("rank", "link"):
        if name in values:
            found[name] = _rank(where, name, values[name], gpus)
    if "share" in values:
        found["share"] = _number(where, "share", values["share"], 1.0)
    return Slow(**found, group=values.get("group", ""))


def _number(where: str, name: str, value: str, most: float) -> float:
    try:
        number = float(value)
    except ValueError:
        raise OptionError(f"{where}: {name} is not a number: {value[:50]}") from None
    if not 0 < number <= most:
        raise OptionError(f"{where}: {name} must be above 0 and at most {most:g}")
    return number


def _rank(where: str, name: str, value: str, gpus: int) -> int:
    if not value.isdecimal() or len(value) > 9:
        raise OptionError(f"{where}: {name} is the number of a rank, from 0 to {gpus - 1}")
    if int(value) >= gpus:
        raise OptionError(f"{where}: the job has ranks 0 to {gpus - 1}")
    return int(value)
