"""Bill: what a run costs in energy, time and money. Prices are the user's; without one there is no money."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any

from lumos.errors import OptionError

_JOULES_PER_KWH = 3.6e6
_HOUR_S, _DAY_S = 3600.0, 86400.0
_AMOUNT = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([kKMBT]?)")
_LETTERS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_MOST = 1e24  # of anything that is asked for; more is a slip


@dataclass(frozen=True)
class Tariff:
    """Price of a GPU-hour and of a kilowatt-hour, in any one currency, and the tokens to train on.

    The two prices add up: leave out that of energy if the GPU-hour includes it.
    """

    gpu_hour: float | None = None
    kwh: float | None = None
    pue: float = 1.0  # power usage effectiveness: energy of the site over that of its GPUs
    tokens: float | None = None


def read_tariff(price: str = "", kwh_price: str = "", pue: str = "", tokens: str = "") -> Tariff:
    """The tariff that options say, "" for those not given; or OptionError."""
    return Tariff(
        _price("--price", price),
        _price("--kwh-price", kwh_price),
        _pue(pue) if pue else 1.0,
        _tokens(tokens) if tokens else None,
    )


def _price(option: str, text: str) -> float | None:
    if not text:
        return None
    value = _number(text)
    if value is None or value < 0:
        raise OptionError(f"{option} {text[:100]!r} is not a price: give a number from 0 on, as in 2.5")
    return value


def _pue(text: str) -> float:
    value = _number(text)
    if value is None or not 1 <= value <= 10:
        raise OptionError(f"--pue {text[:100]!r} is not a factor on the GPUs' energy: give a number from 1 to 10")
    return value


def _tokens(text: str) -> float:
    found = _AMOUNT.fullmatch(text)
    count = (_number(found[1]) or 0.0) * _LETTERS[found[2]] if found else 0.0
    if not 1 <= count <= _MOST:
        raise OptionError(f"--tokens {text[:100]!r} is not a count of tokens: give one from 1 on, as in 15e12 or 15T")
    return count


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) and abs(value) <= _MOST else None


@dataclass(frozen=True)
class Bill:
    """One step, and the whole of a token budget."""

    tariff: Tariff
    gpus: int
    step_s: float
    interval_s: tuple[float, float]
    step_tokens: int
    step_joules: float | None  # of the GPUs; None where their power is not known

    @property
    def step_kwh(self) -> float | None:
        """With what the site draws besides."""
        return None if self.step_joules is None else self.step_joules * self.tariff.pue / _JOULES_PER_KWH

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
        return None if self.tariff.tokens is None else ceil(self.tariff.tokens / self.step_tokens)

    def as_dict(self) -> dict[str, Any]:
        """The bill as JSON has it."""
        money, joules = self.step_money, self.step_joules
        return {
            "joules_per_step": joules,
            "joules_per_token": None if joules is None else joules / self.step_tokens,
            "watts_per_gpu": None if joules is None else joules / self.step_s / self.gpus,
            "kwh_per_step": self.step_kwh,
            "gpu_hours_per_step": self.step_gpu_hours,
            "price_per_gpu_hour": self.tariff.gpu_hour,
            "price_per_kwh": self.tariff.kwh,
            "pue": self.tariff.pue,
            "money_per_step": money,
            "money_per_million_tokens": None if money is None else 1e6 * money / self.step_tokens,
            "budget": self._budget(),
        }

    def _budget(self) -> dict[str, Any] | None:
        """A run without interruptions."""
        steps, money = self.steps, self.step_money
        if steps is None:
            return None
        return {
            "tokens": self.tariff.tokens,
            "steps": steps,
            "days": steps * self.step_s / _DAY_S,
            "days_interval": [steps * seconds / _DAY_S for seconds in self.interval_s],
            "gpu_hours": steps * self.step_gpu_hours,
            "kwh": None if self.step_kwh is None else steps * self.step_kwh,
            "money": None if money is None else steps * money,
        }
