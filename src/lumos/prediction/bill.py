"""Bill: what a run costs in energy, time and money. Prices are the user's; without one there is no money."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, nan
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lumos.arguments import check_fields
from lumos.errors import OptionError
from lumos.setup.gpus import gpu_named, is_file_name
from lumos.setup.messages import one_of

_JOULES_PER_KWH = 3.6e6
_HOUR_S, _DAY_S = 3600.0, 86400.0
_LETTERS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_NO_LETTERS: Mapping[str, float] = MappingProxyType({})
_MOST = 1e24  # of anything that is asked for; more is a slip
_RANGES = {"gpu_hour": (0.0, _MOST), "kwh": (0.0, _MOST), "pue": (1.0, 10.0), "tokens": (1.0, _MOST)}


@dataclass(frozen=True)
class Tariff:
    """Price of a GPU-hour and of a kilowatt-hour, in any one currency, and the tokens to train on.

    The two prices add up: leave out that of energy if the GPU-hour includes it.
    """

    gpu_hour: float | None = None
    kwh: float | None = None
    pue: float = 1.0  # power usage effectiveness: energy of the site over that of its GPUs
    tokens: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise OptionError(f"Tariff: {name} = {value:g} is not from {low:g} to {high:g}")


def read_tariff(price: str = "", kwh_price: str = "", pue: str = "", tokens: str = "") -> Tariff:
    """The tariff that options say, "" for those not given; or OptionError."""
    money = "a price: give a number from 0 on, as in 2.5"
    count = "a count of tokens: give one from 1 on, as in 15e12 or 15T"
    return Tariff(
        _number("--price", price, *_RANGES["gpu_hour"], money),
        _number("--kwh-price", kwh_price, *_RANGES["kwh"], money),
        _number("--pue", pue, *_RANGES["pue"], "a factor on the GPUs' energy: give a number from 1 to 10") or 1.0,
        _number("--tokens", tokens, *_RANGES["tokens"], count, _LETTERS),
    )


def read_prices(text: str) -> dict[str, float]:
    """Prices of a GPU-hour as --price gives them: by the name of the GPU or its file; "" is the price of all others.

    `3` is one for all; `h200=3,my_gpu.toml=4` has one for each; `h200=3,4` one for the H200 and another for the rest.
    """
    found: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, equals, amount = part.rpartition("=")
        price = read_tariff(amount.strip()).gpu_hour
        if price is None:
            raise OptionError(f"--price {text[:100]!r}: give a number, or GPU=NUMBER for each type of GPU")
        key = _priced(name.strip()) if equals else ""
        if key in found:
            whose = key or "GPUs without a price of their own"
            both = f"{found[key]:g} and {price:g}"
            raise OptionError(f"--price {text[:100]!r} has two prices for {whose}, {both}: give one")
        found[key] = price
    return found


def _priced(name: str) -> str:
    """The one name of a GPU in --price, or the path of its file."""
    if is_file_name(name):
        return str(Path(name))
    try:
        return gpu_named(name).name
    except OptionError as error:
        raise OptionError(f"--price: {error}") from None


def check_prices(prices: Mapping[str, float], names: Sequence[str]) -> None:
    """Refuse a price of a GPU that the run is not put on: it would be ignored."""
    other = next((name for name in prices if name and name not in names), "")
    if other:
        used = one_of(list(dict.fromkeys(names)))
        raise OptionError(f"--price {other}={prices[other]:g}: the run is not put on it: leave it out, or price {used}")


def _number(
    option: str, text: str, low: float, high: float, what: str, letters: Mapping[str, float] = _NO_LETTERS
) -> float | None:
    """The number that an option says, perhaps with a letter for its size; None where it says nothing."""
    if not text:
        return None
    size = letters.get(text[-1], 0.0)
    try:
        value = float(text[:-1]) * size if size else float(text)
    except ValueError:
        value = nan
    if not low <= value <= high:
        raise OptionError(f"{option} {text[:100]!r} is not {what}")
    return value


@dataclass(frozen=True)
class Bill:
    """One step, and the whole of a token budget."""

    tariff: Tariff
    gpus: int
    step_s: float
    interval_s: tuple[float, float]
    step_tokens: int | None  # None where they are not known
    step_joules: float | None  # of the GPUs; None where their power is not known

    @property
    def step_kwh(self) -> float | None:
        """With what the site draws besides."""
        return _times(self.step_joules, self.tariff.pue / _JOULES_PER_KWH)

    @property
    def step_gpu_hours(self) -> float:
        return self.gpus * self.step_s / _HOUR_S

    @property
    def step_money(self) -> float | None:
        """None without a price: it is never made up."""
        tariff = self.tariff
        if tariff.gpu_hour is None and tariff.kwh is None:
            return None
        return (tariff.gpu_hour or 0.0) * self.step_gpu_hours + (tariff.kwh or 0.0) * (self.step_kwh or 0.0)

    @property
    def steps(self) -> int | None:
        """Whole steps to the token budget."""
        known = self.tariff.tokens is not None and self.step_tokens
        return ceil(self.tariff.tokens / self.step_tokens) if known else None  # type: ignore[operator]

    def as_dict(self) -> dict[str, Any]:
        """The bill as JSON has it."""
        money, joules = self.step_money, self.step_joules
        per_token = 1 / self.step_tokens if self.step_tokens else None
        return {
            "joules_per_step": joules,
            "joules_per_token": _times(joules, per_token),
            "watts_per_gpu": _times(joules, 1 / self.step_s / self.gpus),
            "kwh_per_step": self.step_kwh,
            "gpu_hours_per_step": self.step_gpu_hours,
            "price_per_gpu_hour": self.tariff.gpu_hour,
            "price_per_kwh": self.tariff.kwh,
            "pue": self.tariff.pue,
            "money_per_step": money,
            "money_per_million_tokens": _times(_times(money, 1e6), per_token),
            "budget": None if self.steps is None else self._budget(self.steps),
        }

    def _budget(self, steps: int) -> dict[str, Any]:
        """A run without interruptions."""
        return {
            "tokens": self.tariff.tokens,
            "steps": steps,
            "days": steps * self.step_s / _DAY_S,
            "days_interval": [steps * seconds / _DAY_S for seconds in self.interval_s],
            "gpu_hours": steps * self.step_gpu_hours,
            "kwh": _times(self.step_kwh, steps),
            "money": _times(self.step_money, steps),
        }


def _times(value: float | None, factor: float | None) -> float | None:
    return None if value is None or factor is None else value * factor
