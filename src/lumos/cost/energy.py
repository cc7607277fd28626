"""Energy of operators and collectives on one GPU, above what the GPU draws idle. The numbers are in data/energy.json.

Energy adds up: a matmul costs its operations and its bytes, whatever else runs, and every kernel some power while it
lasts. Between kernels the board draws no more than idle, however short the gaps are (calibration/power_h200.jsonl).
All of this is at the highest clock; where the sum exceeds the power limit, the clock falls (prediction/power.py).

The H200 was measured. On another GPU a byte costs the same energy, and so does an operation, unless the GPU has more
power for its peak than an H200: then operations at its peak take the same share of its power. No vendor gives a board
more power than its matmuls can use. `clock_of` says what clock the power limit of a board leaves to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import log2
from typing import Any, NamedTuple

from lumos.cost.operator_model import chip_of
from lumos.data_files import read_table
from lumos.program.operators import BYTES, Collective, Operator
from lumos.setup.gpus import Gpu, gpu_named

_MEASURED_AS = {"mxfp8": "fp8", "nvfp4": "fp8", "fp16": "bf16"}  # precisions that were not measured
_LEAST_SHARE = 0.02  # of a power limit near the idle power, left to the work
_PASSES = {"all_reduce": 2.0}  # of a tensor over the wire, in a ring; other collectives send it once


@dataclass(frozen=True)
class Joules:
    """Energy above idle on one GPU at its highest clock, in joules and watts."""

    flop: Mapping[str, float]  # of one operation on tensor cores, by precision
    attention: float  # energy of an operation of attention over that of a matmul
    memory: float  # of one byte read or written in memory
    cache: float  # of one byte read or written in the L2 cache
    cache_bytes: float
    active_w: float  # while any kernel runs
    update_w: float  # while the optimizer runs
    talking_w: float  # while a collective runs, on the few multiprocessors it takes
    wire: float  # of one byte sent and received
    most_w: float  # drawn by the board at its limit
    measured: bool
    _known: dict[Operator, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def operator(self, operator: Operator, us: float) -> float:
        """Energy of an operator that takes `us` microseconds."""
        work = self._known.get(operator)
        if work is None:
            work = self._known[operator] = self._work(operator)
        return work + self.active_w * us * 1e-6

    def collective(self, collective: Collective, us: float) -> float:
        """Energy of one rank in a collective that takes `us` microseconds, without waiting for other ranks."""
        size = collective.group.size
        share = 1.0 if collective.kind == "p2p" else (size - 1) / size * _PASSES.get(collective.kind, 1.0)
        return self.talking_w * us * 1e-6 + self.wire * share * collective.bytes

    def _work(self, operator: Operator) -> float:
        work, flop = work_of(operator, self.cache_bytes), self.flop[operator.dtype]
        operations = work["matmul"] * flop + work["attention"] * flop * self.attention
        return operations + work["memory"] * self.memory + work["cache"] * self.cache


def work_of(operator: Operator, cache_bytes: float) -> dict[str, float]:
    """What the energy of an operator is proportional to: tensor-core operations, and bytes in memory and cache.

    Bytes move from the cache to memory as the operator's tensors outgrow the cache (`warm_depth` to `cold_depth`).
    """
    table = read_table("energy.json")
    depth = log2(max(operator.tensor_bytes, 1.0) / cache_bytes)
    cold = (depth - table["warm_depth"]) / (table["cold_depth"] - table["warm_depth"])
    cold = min(1.0, max(0.0, cold))
    attends = operator.kind.startswith("sdpa")
    flops = operator.flops if operator.is_matrix else 0.0
    return {
        "matmul": 0.0 if attends else flops, "attention": flops if attends else 0.0,
        "memory": operator.bytes * cold, "cache": operator.bytes * (1 - cold),
    }  # fmt: skip


@cache
def joules_for(gpu: Gpu) -> Joules:
    """The measured energies, moved to a GPU by its power and its peaks."""
    return joules_from(read_table("energy.json"), gpu)


def joules_from(table: Mapping[str, Any], gpu: Gpu, measured_on: Gpu | None = None) -> Joules:
    """The energies of a table in the form of data/energy.json, moved to a GPU."""
    home, rated = measured_on or gpu_named(table["gpu"]), gpu_named(gpu.base)
    power = _power(rated, home)
    # Under another power limit than the usual one, the clock and with it the energy of an operation are others too.
    cheaper = (clock_of(gpu).core / clock_of(rated).core) ** (_exponent() - 1) if gpu.tdp_w != rated.tdp_w else 1.0
    flop = {}
    for dtype in BYTES:
        known = _MEASURED_AS.get(dtype, dtype)
        flop[dtype] = 1e-12 * table["flop_pj"][known] * cheaper * _dearer(rated, home, dtype, known)
    active_w = table["active_w"] * power
    update_w = active_w + (table["update_w"] - table["active_w"]) * gpu.hbm_gb_s / home.hbm_gb_s
    return Joules(
        flop, table["attention"], 1e-12 * table["memory_pj"], 1e-12 * table["cache_pj"], gpu.l2_mb * 1e6, active_w,
        update_w, table["talking_w"] * power, 1e-12 * table["wire_pj"], table["limit_share"] * gpu.tdp_w,
        gpu.name == home.name,
    )  # fmt: skip


def _power(rated: Gpu, home: Gpu) -> float:
    """What a GPU may draw above idle, at the power limit that it is sold with, over that of the GPU measured."""
    return _above_idle_w(rated, rated.tdp_w) / _above_idle_w(home, home.tdp_w)


def _dearer(rated: Gpu, home: Gpu, dtype: str, known: str) -> float:
    """Energy of an operation on a GPU over that on the GPU measured, both at their highest clock."""
    return max(1.0, _power(rated, home) * chip_of(home, known).peak / chip_of(rated, dtype).peak)


class Clock(NamedTuple):
    """What the power limit leaves to a GPU whose kernels never pause."""

    core: float  # clock over the highest one, while matmuls run
    stream: float  # time of memory-bound kernels over that at the usual limit


def clock_of(gpu: Gpu) -> Clock:
    """The clock that a GPU holds at its power limit: `clock_of(gpu_named("h200")).core` is 0.77.

    At the highest clock, matmuls would draw more than most boards may. Power falls with a power of the clock (2.0,
    measured on H200), as the voltage falls with it; below a floor of the voltage, it falls with the clock alone. What
    only moves data does not need the clock: it slows down where it would draw more than the limit by itself.
    """
    table = read_table("energy.json")
    home, rated = gpu_named(table["gpu"]), gpu_named(gpu.base)
    spare_w = _above_idle_w(gpu, table["limit_share"] * gpu.tdp_w)
    active_w = table["active_w"] * _power(rated, home)
    flop_pj = table["flop_pj"]["bf16"] * _dearer(rated, home, "bf16", "bf16")
    matmul_w = active_w + table["matmul_reach"] * flop_pj * 1e-6 * chip_of(gpu, "bf16").peak
    core, floor = (spare_w / matmul_w) ** (1 / _exponent()), float(table["clock_floor"])
    if core < floor:
        core = floor * spare_w / (matmul_w * floor ** _exponent())
    stream_w = active_w + table["stream_reach"] * table["memory_pj"] * 1e-3 * rated.hbm_gb_s
    usual_w = _above_idle_w(rated, table["limit_share"] * rated.tdp_w)
    return Clock(min(1.0, core), max(1.0, stream_w / spare_w) / max(1.0, stream_w / usual_w))


def _above_idle_w(gpu: Gpu, limit_w: float) -> float:
    """What a limit leaves to the work of a GPU: something, even where a file says that it idles at its limit."""
    return max(limit_w - gpu.idle_w, _LEAST_SHARE * limit_w, 1.0)


def _exponent() -> float:
    return float(read_table("energy.json")["clock_exponent"])
