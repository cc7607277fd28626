"""How values are written in tables and on pages."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, isfinite, log10
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lumos.setup.setup import Setup  # pydantic, for which `lumos replay` does not wait

STEP_PARTS = {
    "exposed_compute_ms": "compute alone", "exposed_comm_ms": "communication alone", "overlapped_ms": "both at once",
    "other_ms": "idle",
}  # fmt: skip


_PREFIXES = {1e18: "E", 1e15: "P", 1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k"}
_COUNTS = {1e12: "T", 1e9: "B", 1e6: "M"}
_LARGE_COUNT = 1e8
_MANY_SECONDS = 120  # from which on minutes are read more easily
_DAY, _SOME_DAYS, _MANY_DAYS = 86400.0, 2, 1000


def number_text(value: float, digits: int, signed: bool = False) -> str:
    """A number with a true minus sign and commas between thousands; what rounds to zero has no minus."""
    text = f"{abs(value):,.{digits}f}"
    is_zero = not any(c in "123456789" for c in text)
    return ("−" if value < 0 and not is_zero else "+" if signed else "") + text


def ms_text(ms: float, signed: bool = False) -> str:
    """A time, given in milliseconds, in the unit that people use: 4.20 µs, 117.84 ms, 14.89 s, 3 h 11 min 49 s."""
    size = abs(ms)
    if not isfinite(ms):
        return "–"
    if size < 1e3:
        return f"{number_text(1e3 * ms, 2, signed)} µs" if 5e-6 <= size < 0.01 else f"{number_text(ms, 2, signed)} ms"
    if size < _MANY_SECONDS * 1e3:
        return f"{number_text(ms / 1e3, 3 if size < 1e4 else 2, signed)} s"
    sign = "−" if ms < 0 else "+" if signed else ""
    return sign + _long_time_text(size / 1e3)


def _long_time_text(seconds: float) -> str:
    """A time of minutes or more; of days and years with their parts."""
    if seconds >= _MANY_DAYS * _DAY:
        return f"{number_text(seconds / _DAY / 365.25, 1)} years"
    if seconds >= _SOME_DAYS * _DAY:
        return f"{number_text(seconds / _DAY, 1)} days"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min {rest:02d} s" if hours else f"{minutes} min {rest:02d} s"


def si_text(value: float, unit: str) -> str:
    """A number with a prefix that people read, as in 67.1 MB or 18.3 MWh."""
    return _with_prefix(value, _PREFIXES) + unit


def count_text(count: float, unit: str) -> str:
    """A number of tokens or parameters, as in 15.0 T tokens or 1.64 B tokens; smaller ones in full."""
    if abs(count) < _LARGE_COUNT:
        return f"{number_text(count, 0)} {unit.removesuffix('s') if count == 1 else unit}"
    return f"{_with_prefix(count, _COUNTS)} {unit}"


def _with_prefix(value: float, prefixes: Mapping[float, str]) -> str:
    size, prefix = next(((s, p) for s, p in prefixes.items() if abs(value) >= s), (1.0, ""))
    number = value / size
    digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2
    return f"{number_text(number, digits)} {prefix}"


def gib_text(gib: float) -> str:
    """Memory, given in GiB: 51.3 GiB, 9.79 TiB."""
    return f"{number_text(gib, 1)} GiB" if abs(gib) < 1000 else f"{number_text(gib / 1024, 2)} TiB"


def money_text(amount: float) -> str:
    """An amount in any currency, with cents or with three significant digits."""
    digits = 0 if amount >= 1e4 else 2 if amount >= 1 or amount <= 0 else 2 - floor(log10(amount))
    return number_text(amount, digits)


def change(after: float, before: float) -> str:
    """By how much a value changes, as in −17.8 %."""
    return f"{number_text(100 * (after / before - 1), 1, signed=True)} %" if before else ""


def parameters_text(total: int, active: int = 0) -> str:
    """The size of a model, as in 30.5 B parameters (3.35 B active)."""
    from lumos.setup.messages import size_text  # here, for it imports pydantic, for which `lumos replay` does not wait

    return f"{size_text(total)} parameters" + (f" ({size_text(active)} active)" if active else "")


def title_of(setup: Setup, parameters: int | None, shows_parallelism: bool = True) -> str:
    """The model with its parameters, the GPUs, and how they are used."""
    on = f"{setup.cluster.gpus:,} × {setup.cluster.shown}"
    if parameters is None:
        return on
    size = parameters_text(parameters, setup.model.active_parameters() if setup.model.experts else 0)
    name = f"{setup.model.name}, {size}" if setup.model.name else size
    p, title = setup.parallel, f"{name} on {on}"
    if not shows_parallelism:
        return title
    used = p.used
    if p.cp > 1 and p.cp_type:
        used = [f"{text} ({p.cp_type})" if text.startswith("cp ") else text for text in used]
    return title + (f", {', '.join(used)}" if used else "")


def rate_text(value: float) -> str:
    """A rate with three digits that count: 1,234, 12.3, 0.0041."""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 or size == 0 else 2 - floor(log10(size))
    return number_text(value, digits)
