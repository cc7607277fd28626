"""How values are written in tables and on pages."""

from __future__ import annotations

from math import floor, log10
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lumos.setup.setup import Setup  # pydantic, for which `lumos replay` does not wait

STEP_PARTS = {
    "exposed_compute_ms": "compute alone", "exposed_comm_ms": "communication alone", "overlapped_ms": "both at once",
    "other_ms": "idle",
}  # fmt: skip


_PREFIXES = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k"}


def ms_text(ms: float, signed: bool = False) -> str:
    """A time; one of seconds is written in seconds."""
    sign = "+" if signed else ""
    digits = 3 if abs(ms) < 1e4 else 2
    text = f"{ms:{sign}.2f} ms" if abs(ms) < 1e3 else f"{ms / 1e3:{sign},.{digits}f} s"
    return text.replace("-", "−")


def si_text(value: float, unit: str) -> str:
    """A number with a prefix that people read, as in 67.1 MB or 18.3 MWh."""
    size, prefix = next(((s, p) for s, p in _PREFIXES.items() if abs(value) >= s), (1.0, ""))
    number = value / size
    digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2
    return f"{number:,.{digits}f} {prefix}{unit}"


def money_text(amount: float) -> str:
    """An amount in any currency, with cents or with three significant digits."""
    digits = 0 if amount >= 1e4 else 2 if amount >= 1 or amount <= 0 else 2 - floor(log10(amount))
    return f"{amount:,.{digits}f}"


def change(after: float, before: float) -> str:
    """By how much a value changes, as in −17.8 %."""
    return f"{100 * (after / before - 1):+.1f} %".replace("-", "−") if before else ""


def parameters_text(total: int, active: int = 0) -> str:
    """The size of a model, as in 30.5 B parameters (3.35 B active)."""
    size = f"{total / 1e9:.3g} B" if total >= 1e8 else f"{total / 1e6:.3g} M"
    return f"{size} parameters" + (f" ({active / 1e9:.3g} B active)" if active else "")


def title_of(setup: Setup, parameters: int | None, shows_parallelism: bool = True) -> str:
    """The model with its parameters, the GPUs, and how they are used."""
    size = parameters_text(parameters or 0, setup.model.active_parameters() if setup.model.experts else 0)
    name = f"{setup.model.name}, {size}" if setup.model.name else size
    p = setup.parallel
    if not shows_parallelism:
        return f"{name} on {setup.cluster.gpus:,} × {setup.cluster.gpu}"
    used = [f"{key} {getattr(p, key)}" for key in ("tp", "pp", "vpp", "cp", "ep", "dp") if getattr(p, key) > 1]
    return f"{name} on {setup.cluster.gpus:,} × {setup.cluster.gpu}" + (f", {', '.join(used)}" if used else "")


def rate_text(value: float) -> str:
    """A rate with three digits that count: 1,234, 12.3, 0.0041."""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 or size == 0 else 2 - floor(log10(size))
    return f"{value:,.{digits}f}"
