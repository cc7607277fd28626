"""Fits what work costs in energy, and writes src/lumos/data/energy.json.

    python calibration/fit_energy.py [SHARED_DATA]

Three constants are read off single loops of calibration/power_h200.jsonl: what any kernel draws, what the optimizer
draws, and how the cost of an operation falls with the clock. Five are fitted on the other loops and on training steps
together (calibration/steps_h200.jsonl, the steps of power_h200.jsonl, and those of the shared measurements where they
are beside the checkout): an operation in bf16, attention's over it, a byte in memory and in the cache, and the share
of its limit that a board reaches. benchmarks/energy.py fits them again without each case, and without each source.
Three say how the clock follows from power, again read off the loops: those of large matmuls and of copies.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from fit_steps import setup_of
from lumos.costs.energy import joules_from, work_of
from lumos.costs.model_costs import ModelCosts
from lumos.costs.operator_model import chip_of
from lumos.measure.operator_rows import SIZES, operator_of
from lumos.prediction.power import drawn_w, energy_of
from lumos.program.operators import Operator
from lumos.setup.gpus import gpu_named
from lumos.setup.setup import Setup
from lumos.step.step import simulate_step
from shipped import ship

HERE = Path(__file__).parent
SHARED = HERE.parent.parent / "shared/data"
GPU = gpu_named("h200")
TOP_MHZ = 1980.0
BUSY_W = 600.0  # a board that draws less waits for its host
START = (1.05, 1.4, 112.0, 45.0, 0.99)
LOOP_WEIGHT = 0.2  # of a loop, beside a step: operators of one kind differ more than steps, which mix them
ROBUST = 0.03  # errors beyond this count less than squared
LARGE_FLOPS, HELD = 5e10, 0.85  # matmuls that fill the GPU, held by the power limit below this share of the clock
PASSES, LINK_PJ = 3.0, 80.0  # a collective reads, reduces and writes each byte it sends; the links are recalled


class Case(NamedTuple):
    """A measured training step, and what its energy goes with."""

    source: str
    name: str
    seconds: float
    joules: float
    predicted_s: float
    matmul: float
    attention: float
    memory: float
    cache: float
    active_s: float
    update_s: float

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


class Loop(NamedTuple):
    """An operator in a steady loop: joules of one call over idle, at the highest clock."""

    name: str
    joules: float
    matmul: float
    attention: float
    memory: float
    cache: float
    active_s: float


class Fixed(NamedTuple):
    """What is read off single loops."""

    idle_w: float
    active_w: float
    update_w: float
    talking_w: float
    copied_pj: float  # of a byte, by a kernel as small as a collective's
    slope: float  # the energy of an operation goes with this power of the clock


class Constants(NamedTuple):
    """What is fitted: picojoules, and the share of the limit."""

    flop: float
    attention: float  # over flop
    memory: float
    cache: float
    limit_share: float


# ---------------------------------------------------------------------- loops
def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fixed_of(rows: list[dict[str, Any]]) -> Fixed:
    by_name = {row["name"]: row for row in rows}
    idle = mean(row["watts"] for row in rows if row["name"] in ("idle_context", "idle_after"))
    over = {name: row["watts"] - idle for name, row in by_name.items()}
    gemm = "gemm_4096_2048_2048_bf16"
    free = mean(over[f"{gemm}_every_{us}"] * us for us in (100, 200, 400))  # alone, these never reach the limit
    slope = log(over[gemm] * by_name[gemm]["us"] / free) / log(by_name[gemm]["clock_mhz"] / TOP_MHZ)
    copy = by_name["copy_24"]
    copied = (over["copy_24"] - over["spin_24"]) * copy["us"] / copy["bytes"] * 1e6
    update = mean([over["adamw_fused_400M"], over["adamw_fused_400M_fp32"]])
    return Fixed(idle, over["spin_132"], update, over["spin_24"], copied, slope)


def operator_in(row: dict[str, Any]) -> Operator:
    sizes = {key: row[key] for key in (*SIZES[row["op"]], "layout") if key in row}
    return operator_of({"op": row["op"], "dtype": row["dtype"], **sizes}, row["name"])


def top_joules(row: dict[str, Any], fixed: Fixed) -> float:
    """Of one call over idle, had the clock not fallen."""
    return float((row["watts"] - fixed.idle_w) * row["us"] * 1e-6 * (TOP_MHZ / row["clock_mhz"]) ** fixed.slope)


def loops_of(rows: list[dict[str, Any]], fixed: Fixed) -> list[Loop]:
    """The loops that are fitted on: steady, in bf16 or only moving data."""
    loops = []
    for row in rows:
        if row["op"] not in SIZES or row["op"] == "adamw_fused" or "period_us" in row:
            continue
        operator = operator_in(row)
        if operator.is_matrix and operator.dtype not in ("bf16", "fp16"):
            continue
        cold = row.get("copies", 1) > 1  # operands that take turns find nothing in the cache
        work = work_of(operator, 1.0 if cold else GPU.l2_mb * 1e6)
        loops.append(Loop(row["name"], top_joules(row, fixed), *work.values(), row["us"] * 1e-6))
    return loops


def precisions_of(rows: list[dict[str, Any]], fixed: Fixed, found: Constants) -> dict[str, float]:
    """Picojoules of an operation in every precision: matmuls in it, less their bytes and the kernel's own draw."""
    answer = {"bf16": found.flop}
    for dtype in ("fp8", "tf32", "fp32"):
        values = []
        for row in rows:
            if row["op"] == "gemm" and row["dtype"] == dtype:
                operator = operator_in(row)
                work = work_of(operator, GPU.l2_mb * 1e6)
                moved_pj = work["memory"] * found.memory + work["cache"] * found.cache
                left = top_joules(row, fixed) - fixed.active_w * row["us"] * 1e-6 - moved_pj * 1e-12
                values.append(left / operator.flops * 1e12)
        answer[dtype] = mean(values)
    return answer


def clocks_of(rows: list[dict[str, Any]], fixed: Fixed, found: Constants) -> dict[str, float]:
    """How the clock follows from the power limit (lumos.costs.energy.clock_of)."""
    pj = precisions_of(rows, fixed, found)
    exponents, reaches, streams = [], [], []
    for row in rows:
        if row["op"] not in SIZES or "period_us" in row:
            continue
        operator, clock, over_w = operator_in(row), row["clock_mhz"] / TOP_MHZ, row["watts"] - fixed.idle_w
        if not operator.is_matrix:
            streams.append(over_w)
        elif row["op"] == "gemm" and operator.flops > LARGE_FLOPS and clock < HELD:
            rate = operator.flops / (row["us"] * clock)  # a microsecond, at the highest clock
            reaches.append(rate / chip_of(GPU, operator.dtype).peak)
            known = "bf16" if operator.dtype == "fp16" else operator.dtype
            moved = work_of(operator, GPU.l2_mb * 1e6)
            moved_w = (moved["memory"] * found.memory + moved["cache"] * found.cache) * 1e-6 / (row["us"] * clock)
            top_w = fixed.active_w + rate * pj[known] * 1e-6 + moved_w
            exponents.append(log(over_w / top_w) / log(clock))
    bandwidth_w = found.memory * 1e-3 * GPU.hbm_gb_s
    return {
        "clock_exponent": round(median(exponents), 2),
        "matmul_reach": round(median(reaches), 2),
        "stream_reach": round((mean(streams) - fixed.active_w) / bandwidth_w, 2),
    }


# ---------------------------------------------------------------------- steps
ZERO = {
    "gpu": "h200", "flop_pj": dict.fromkeys(("bf16", "fp8", "tf32", "fp32"), 0.0), "attention": 0.0, "memory_pj": 0.0,
    "cache_pj": 0.0, "active_w": 0.0, "update_w": 0.0, "talking_w": 0.0, "wire_pj": 0.0, "limit_share": 1.0,
}  # fmt: skip
ONES = dict.fromkeys(("bf16", "fp8", "tf32", "fp32"), 1e12)
UNITS: dict[str, dict[str, Any]] = {
    "matmul": {"flop_pj": ONES}, "both": {"flop_pj": ONES, "attention": 1.0}, "memory": {"memory_pj": 1e12},
    "cache": {"cache_pj": 1e12}, "active_s": {"active_w": 1.0}, "update_s": {"update_w": 1.0},
}  # fmt: skip


def case_of(source: str, row: dict[str, Any], seconds: float, joules: float) -> Case:
    """The step's energy is linear in the constants: with one of them 1 and the others 0 it says what goes with each."""
    whole = {"accum": 1, "kv": None, "compile": False, "checkpoint": bool(row.get("ckpt")), **row}
    setup = setup_of(whole)
    setup = setup.model_copy(update={"cluster": setup.cluster.model_copy(update={"host": 1.0})})
    parts = {name: _work(setup, unit) for name, unit in UNITS.items()}
    parts["attention"] = parts.pop("both") - parts["matmul"]
    return Case(source, row["name"], seconds, joules, simulate_step(setup).us * 1e-6, **parts)


def _work(setup: Setup, unit: dict[str, Any]) -> float:
    joules = joules_from(ZERO | unit, GPU)

    def make(*parts: Any) -> ModelCosts:
        prices = ModelCosts(*parts)
        prices.joules = joules
        return prices

    return energy_of(simulate_step(setup, make_costs=make)).work[0]


def own_cases() -> list[Case]:
    """Those described by a setup: models of transformers with the usual optimizer."""
    found = []
    for row in read_rows(HERE / "steps_h200.jsonl"):
        if row["kind"] in ("llama", "gpt2") and row["optimizer"] == "adamw_fused":
            found.append(case_of("steps", row, row["joules_per_step"] / row["watts"], row["joules_per_step"]))
    for row in read_rows(HERE / "power_h200.jsonl"):
        if row["op"] == "step":
            found.append(case_of("launch-bound", row, row["us"] * 1e-6, row["watts"] * row["us"] * 1e-6))
    return found


def shared_cases(data: Path) -> list[Case]:
    """Those of the shared measurements; none where they are not on this machine."""
    folder = data / "h200/single"
    if not folder.is_dir():
        return []
    sizes = {row["name"]: row for row in json.loads((folder / "measured.json").read_text())["results"]}
    energies = json.loads((folder / "energy.json").read_text())
    return [case_of("shared", sizes[e["name"]], e["step_s"], e["joules_per_step"]) for e in energies]


# ---------------------------------------------------------------------- the fit
def work_in(case: Case | Loop, found: Constants) -> float:
    """Joules that the fitted constants account for."""
    operations = found.flop * (case.matmul + found.attention * case.attention)
    return 1e-12 * (operations + found.memory * case.memory + found.cache * case.cache)


def joules_in(case: Case, found: Constants, fixed: Fixed, seconds: float) -> float:
    """A step of that length; the idle power is that of the preset, as in a forecast."""
    work = work_in(case, found) + fixed.active_w * case.active_s + fixed.update_w * case.update_s
    return drawn_w(GPU.idle_w, work / seconds, found.limit_share * GPU.tdp_w) * seconds


def fit(cases: Sequence[Case], loops: Sequence[Loop], fixed: Fixed) -> Constants:
    """The constants that leave the smallest relative errors, single outliers counting little."""

    def errors(values: np.ndarray) -> np.ndarray:
        found = Constants(*(exp(value) for value in values))
        steps = [joules_in(case, found, fixed, case.seconds) / case.joules - 1 for case in cases]
        alone = [(work_in(loop, found) + fixed.active_w * loop.active_s) / loop.joules - 1 for loop in loops]
        return np.array([*steps, *(LOOP_WEIGHT * error for error in alone)])

    best = least_squares(errors, np.log(START), loss="soft_l1", f_scale=ROBUST, diff_step=1e-4)
    return Constants(*(float(value) for value in np.exp(best.x)))


def table_of(found: Constants, fixed: Fixed, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The shipped table."""
    wire = PASSES * fixed.copied_pj + LINK_PJ
    return {
        "gpu": GPU.name,
        "flop_pj": {dtype: round(pj, 3) for dtype, pj in precisions_of(rows, fixed, found).items()},
        "attention": round(found.attention, 3),
        "memory_pj": round(found.memory, 1),
        "cache_pj": round(found.cache, 1),
        "active_w": round(fixed.active_w, 1),
        "update_w": round(fixed.update_w, 1),
        "talking_w": round(fixed.talking_w, 1),
        "wire_pj": round(wire, 1),
        "limit_share": round(found.limit_share, 4),
        **clocks_of(rows, fixed, found),
    }


def main(data: str = str(SHARED)) -> None:
    rows = read_rows(HERE / "power_h200.jsonl")
    fixed = fixed_of(rows)
    cases = own_cases() + shared_cases(Path(data))
    found = fit(cases, loops_of(rows, fixed), fixed)
    print(fixed, found, sep="\n")
    table = table_of(found, fixed, rows)
    ship("energy.json", table)


if __name__ == "__main__":
    main(*sys.argv[1:])
