"""How values are written in tables and on pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lumos.setup.setup import Setup  # pydantic, for which `lumos replay` does not wait

STEP_PARTS = {
    "exposed_compute_ms": "compute alone", "exposed_comm_ms": "communication alone", "overlapped_ms": "both at once",
    "other_ms": "idle",
}  # fmt: skip


def ms_text(ms: float, signed: bool = False) -> str:
    """A time; one of seconds is written in seconds."""
    sign = "+" if signed else ""
    digits = 3 if abs(ms) < 1e4 else 2
    text = f"{ms:{sign}.2f} ms" if abs(ms) < 1e3 else f"{ms / 1e3:{sign},.{digits}f} s"
    return text.replace("-", "−")


def energy_text(joules: float) -> str:
    """An energy; from ten kilojoules on in kilojoules."""
    return f"{joules / 1e3:,.1f} kJ" if joules >= 1e4 else f"{joules:,.1f} J"


def change(after: float, before: float) -> str:
    """By how much a value changes, as in −17.8 %."""
    return f"{100 * (after / before - 1):+.1f} %".replace("-", "−") if before else ""


def title_of(setup: Setup) -> str:
    """The model, the GPUs, and how they are used."""
    name = setup.model.name or f"{setup.model.parameters(setup.train.seq) / 1e9:.2f} B parameters"
    p = setup.parallel
    used = [f"{key} {getattr(p, key)}" for key in ("tp", "pp", "vpp", "cp", "ep", "dp") if getattr(p, key) > 1]
    return f"{name} on {setup.cluster.gpus:,} × {setup.cluster.gpu}" + (f", {', '.join(used)}" if used else "")
