"""Parts of a model file that need operators alone: what recording costs, and the power of the board.

Each is fitted by a function from rows to a `Section`, which says what was found and how far off it is, or why it was
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from lumos.costs.energy import joules_for, work_of
from lumos.costs.operator_model import Floats
from lumos.data_files import read_table
from lumos.errors import InputError
from lumos.measure.operator_rows import operator_of
from lumos.measure.sample_file import Row
from lumos.program.operators import Operator
from lumos.setup.gpus import Gpu

_LARGEST_POWER_PCT = 20.0
_FEWEST_LOOPS = 4
_PRIOR_WEIGHT = 0.05  # of what is known of other GPUs, beside one measured loop
_CLOCK_POWER = 1.11  # the energy of an operation goes with this power of the clock (H200, calibration/fit_energy.py)
_AT_LIMIT = 0.93  # of the power limit: from here on the board lowers its clock


class Section(NamedTuple):
    """One part of a model file: its values, or why there are none."""

    name: str
    rows: int
    values: dict[str, Any] | None
    error_pct: float | None = None
    refused: str = ""
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        error = None if self.error_pct is None else round(self.error_pct, 2)
        return {
            "section": self.name, "rows": self.rows, "error_pct": error, "refused": self.refused, "note": self.note,
            "values": self.values,
        }  # fmt: skip


def missing(name: str, how: str) -> Section:
    """A part that was not sampled."""
    return Section(name, 0, None, note=f"not sampled: {how}")


# ---------------------------------------------------------------------- profiler
_BOUNDS = {"operator": "operator_us", "call": "call_us"}
_SHARES = {  # of a recorded step, that a step without recording takes: (without, with)
    "kept_share": ("step_stopped", "step_recorded"),
    "no_shapes_kept_share": ("step_stopped", "step_recorded_no_shapes"),
    "fresh_kept_share": ("step_fresh", "step_recorded"),
}
_LEAST_SHARE = 0.25
_DEARER = 1.2  # a step that was never recorded, over the same afterwards: recording makes steps slower, not faster


def profiler_section(rows: Sequence[Row]) -> Section:
    """What recording costs here; what was not sampled of it is that of the package."""
    if not rows:
        return missing("profiler", "what recording costs beside an H200 is assumed")
    found = {str(row.get("what")): float(row["us"]) for row in rows if "us" in row}
    values = {key: value for key, value in read_table("profiler.json").items() if key != "source"}
    shares = {key: found[less] / found[more] for key, (less, more) in _SHARES.items() if {less, more} <= set(found)}
    if not shares:
        return Section("profiler", len(rows), None, refused="no step that was timed both with and without recording")
    fresh, stopped = (found.get(name, 0.0) / 1e3 for name in ("step_fresh", "step_stopped"))
    if fresh > _DEARER * stopped or min(shares.values()) < _LEAST_SHARE:
        said = f"a step took {fresh:.1f} ms before recording and {stopped:.1f} ms after it: the machine was not idle"
        return Section("profiler", len(rows), None, refused=said)
    values |= {key: round(min(share, 1.0), 3) for key, share in shares.items()}
    # Recording less does not cost more, whatever a short measurement says.
    values["no_shapes_kept_share"] = max(values["no_shapes_kept_share"], values["kept_share"])
    # The shipped bounds lie well above what a warm loop shows; a loop that shows more raises them.
    values |= {key: max(values[key], round(found[name], 3)) for name, key in _BOUNDS.items() if name in found}
    if "kernel" in found:
        values["kernel_gap_us"] = round(found["kernel"], 3)
    note = f"{100 / values['kept_share'] - 100:.0f} % more host time while recording"
    return Section("profiler", len(rows), values, note=note)


# ---------------------------------------------------------------------- power
class _Loop(NamedTuple):
    """An operator in a steady loop: joules of one call over idle at the highest clock, and what they go with."""

    name: str
    operator: Operator
    joules: float
    parts: dict[str, float]  # by constant: what of it one call has


def power_section(rows: Sequence[Row], gpu: Gpu, limit_w: float | None) -> Section:
    """What work costs in energy: least squares over the loops, held where they say nothing to what is known."""
    if not rows:
        return missing("power", "the energies measured on an H200 are moved to this GPU")
    idle = [row["watts"] for row in rows if row.get("what") == "idle"]
    if not idle:
        return Section("power", len(rows), None, refused="nothing says what the board draws idle")
    idle_w = median(idle)
    try:
        loops = _loops(rows, idle_w, gpu)
    except InputError as wrong:
        return Section("power", len(rows), None, refused=str(wrong).splitlines()[0])
    if len(loops) < _FEWEST_LOOPS:
        return Section("power", len(rows), None, refused=f"fewer than {_FEWEST_LOOPS} loops of operators")
    usual = _usual(gpu)
    found = _solved(loops, usual)
    error = 100 * mean(_left_out(loops, usual, index) for index in range(len(loops)))
    if error > _LARGEST_POWER_PCT:
        return Section("power", len(rows), None, error, f"loops are {error:.0f} % off where they are left out")
    sampled = {name for loop in loops for name, amount in loop.parts.items() if amount}
    kept = sorted(set(found) - sampled)
    note = f"idle {idle_w:.0f} W" + (f"; not sampled, as on an H200: {', '.join(kept)}" if kept else "")
    values = _energies(found, rows, idle_w, gpu, limit_w) | {"error_pct": round(error, 2)}
    return Section("power", len(rows), values, error, note=note)


def _loops(rows: Sequence[Row], idle_w: float, gpu: Gpu) -> list[_Loop]:
    top = max((float(row["clock_mhz"]) for row in rows if row.get("clock_mhz")), default=0.0)
    loops = []
    for row in rows:
        name = str(row.get("operator") or row.get("what"))
        if name in ("idle", "spin", "adamw_fused", "adamw") or "us" not in row:
            continue
        operator = operator_of({**row, "op": name}, f"the loop {row.get('what')}")
        clock = float(row.get("clock_mhz") or top or 1.0)
        fallen = (top / clock) ** _CLOCK_POWER if top else 1.0
        joules = (row["watts"] - idle_w) * row["us"] * 1e-6 * fallen
        if joules > 0:
            loops.append(_Loop(name, operator, joules, _parts(operator, row["us"], gpu)))
    return loops


def _parts(operator: Operator, us: float, gpu: Gpu) -> dict[str, float]:
    """What one call has of everything that costs energy."""
    work = work_of(operator, gpu.l2_mb * 1e6)
    dtype = {"fp16": "bf16", "mxfp8": "fp8", "nvfp4": "fp8"}.get(operator.dtype, operator.dtype)
    return {
        f"flop {dtype}": work["matmul"], "attention": work["attention"], "memory": work["memory"],
        "cache": work["cache"], "active": us * 1e-6,
    }  # fmt: skip


def _usual(gpu: Gpu) -> dict[str, float]:
    """What the package expects of this GPU, in joules for one of each."""
    known = joules_for(gpu)
    flops = {f"flop {dtype}": known.flop[dtype] for dtype in ("bf16", "fp8", "tf32", "fp32")}
    attention = known.flop["bf16"] * known.attention
    return {**flops, "attention": attention, "memory": known.memory, "cache": known.cache, "active": known.active_w}


def _solved(loops: Sequence[_Loop], usual: Mapping[str, float]) -> dict[str, float]:
    """The energies that explain the loops, none of them negative.

    Every loop is one equation in units of its own energy, every constant one more that holds it to the usual value.
    A constant that would be negative is zero, and the others are solved for again.
    """
    names = list(usual)
    scale = np.array([usual[name] for name in names])
    measured: Floats = np.array([[loop.parts.get(name, 0.0) for name in names] for loop in loops]) * scale
    measured /= np.array([[loop.joules] for loop in loops])
    rows = np.vstack([measured, np.sqrt(_PRIOR_WEIGHT) * np.eye(len(names))])
    wanted = np.concatenate([np.ones(len(loops)), np.full(len(names), np.sqrt(_PRIOR_WEIGHT))])
    factors, free = np.zeros(len(names)), np.ones(len(names), bool)
    while free.any():
        found = np.linalg.lstsq(rows[:, free], wanted, rcond=None)[0]
        if (found >= 0).all():
            factors[free] = found
            break
        free[np.flatnonzero(free)[found.argmin()]] = False
    return dict(zip(names, (factors * scale).tolist(), strict=True))


def _left_out(loops: Sequence[_Loop], usual: Mapping[str, float], index: int) -> float:
    """How far the energy of one loop is off, by the others."""
    found = _solved([*loops[:index], *loops[index + 1 :]], usual)
    return abs(sum(found[name] * amount for name, amount in loops[index].parts.items()) / loops[index].joules - 1)


def _energies(
    found: Mapping[str, float], rows: Sequence[Row], idle_w: float, gpu: Gpu, limit_w: float | None
) -> dict[str, Any]:
    """In the units of data/energy.json."""
    usual, known = read_table("energy.json"), joules_for(gpu)
    updates = [row["watts"] - idle_w for row in rows if str(row.get("operator", row.get("what"))).startswith("adamw")]
    limit = limit_w or gpu.tdp_w
    reached = [row["watts"] / limit for row in rows if row["watts"] > _AT_LIMIT * limit]
    return {
        "flop_pj": {dtype: round(1e12 * found[f"flop {dtype}"], 4) for dtype in ("bf16", "fp8", "tf32", "fp32")},
        "attention": round(found["attention"] / max(found["flop bf16"], 1e-15), 3),
        "memory_pj": round(1e12 * found["memory"], 2),
        "cache_pj": round(1e12 * found["cache"], 2),
        "active_w": round(found["active"], 2),
        "update_w": round(median(updates) if updates else known.update_w, 2),
        "talking_w": round(known.talking_w, 2),
        "wire_pj": round(1e12 * known.wire, 2),
        "limit_share": round(min(1.0, median(reached)), 4) if reached else usual["limit_share"],
        "idle_w": round(idle_w, 2),
    }
