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
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from math import log2
from typing import Any, NamedTuple

from lumos.costs.operator_model import chip_of, rated_gpu
from lumos.data_files import read_table
from lumos.dtypes import BYTES
from lumos.program.operators import Collective, Operator
from lumos.setup.gpus import Gpu, gpu_named, is_file_name

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
    home, rated = measured_on or gpu_named(table["gpu"]), rated_gpu(gpu)
    power = _power(rated, home)
    # Under another power limit than the usual one, the clock and with it the energy of an operation are others too.
    floor = read_table("energy.json")["clock_floor"]
    slower = max(clock_of(gpu).core, floor) / max(clock_of(rated).core, floor)
    cheaper = slower ** (_exponent() - 1) if gpu.tdp_w != rated.tdp_w else 1.0
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
    only moves data does not need the clock: it slows down where it would draw more than the limit by itself, and no
    further than the clock's floor.
    """
    table = read_table("energy.json")
    home, rated = gpu_named(table["gpu"]), rated_gpu(gpu)
    spare_w = _above_idle_w(gpu, table["limit_share"] * gpu.tdp_w)
    stream_w = table["active_w"] * _power(rated, home)
    stream_w += table["stream_reach"] * table["memory_pj"] * 1e-3 * rated.hbm_gb_s
    usual_w = _above_idle_w(rated, table["limit_share"] * rated.tdp_w)
    slower = max(1.0, min(stream_w, usual_w) / spare_w)  # at its own limit, every board streams as fast as rated
    return Clock(_core(gpu, chip_of(gpu, "bf16").peak), min(slower, 1 / table["clock_floor"]))


def _core(gpu: Gpu, peak: float, dtype: str = "bf16") -> float:
    """The clock at which matmuls of a precision fit under the power limit of a GPU, if it had this peak in it.

    A higher peak lowers the clock by less than it gains: `peak * _core(gpu, peak)` never falls.
    """
    table = read_table("energy.json")
    home, rated = gpu_named(table["gpu"]), rated_gpu(gpu)
    power, floor = _power(rated, home), float(table["clock_floor"])
    spare_w = _above_idle_w(gpu, table["limit_share"] * gpu.tdp_w)
    dearer = 1.0 if _is_new(gpu) else _dearer(rated, home, dtype, dtype)
    fed = max(peak, _fed_peak(gpu)) if _is_new(gpu) else peak
    matmul_w = table["active_w"] * power + table["matmul_reach"] * table["flop_pj"][dtype] * 1e-6 * dearer * fed
    core = float((spare_w / matmul_w) ** (1 / _exponent()))
    if core < floor:
        core = floor * spare_w / (matmul_w * floor ** _exponent())
    return min(1.0, core)


def _is_new(gpu: Gpu) -> bool:
    """Whether a GPU is like no other that is known: its own peak is then not the one that factors were measured at."""
    return is_file_name(gpu.base)


def _fed_peak(gpu: Gpu) -> float:
    """The bf16 peak that factors of a step belong to: that of a known GPU, or what the power of a new one feeds."""
    home, rated = gpu_named(read_table("energy.json")["gpu"]), rated_gpu(gpu)
    return chip_of(home, "bf16").peak * _power(rated, home) if _is_new(gpu) else chip_of(rated, "bf16").peak


def relief_of(operator: Operator, gpu: Gpu) -> float:
    """The slowdown by the clock of a matmul or attention, over that of bf16 matmuls that keep the tensor cores busy.

    It is 1 on the GPU that the factors of a step were measured on, where they hold for all matmuls. With a higher peak,
    those that wait for memory draw no more power than before: their clock is that of the peak that just suffices them,
    and never below the floor. So more peak, power or bandwidth does not slow any of them down.
    """
    rated = rated_gpu(gpu)
    usual = _relief_of_precision(rated, operator.dtype)
    if gpu.tdp_w == rated.tdp_w and gpu.peak_tflops == rated.peak_tflops and not _is_new(gpu):
        return usual
    chip, like = chip_of(gpu, operator.dtype), _reference(gpu)
    peak = chip_of(like, "bf16").peak * chip.peak / chip_of(like, operator.dtype).peak  # in terms of bf16
    compute_us, memory_us = operator.flops / chip.peak, operator.bytes / chip.bandwidth
    enough = max(_fed_peak(gpu), peak * compute_us / max(memory_us, 1e-9))
    floor, start_us = read_table("energy.json")["clock_floor"], read_table("operator_costs.json")["shortest_us"]
    slowed = max(compute_us / _core(gpu, peak), memory_us / max(_core(gpu, enough), floor))
    slowed += start_us / max(_core(gpu, _fed_peak(gpu)), floor)
    return float(usual * slowed * clock_of(gpu).core / (max(compute_us, memory_us) + start_us))


@cache
def _relief_of_precision(rated: Gpu, dtype: str) -> float:
    """How much less the clock slows matmuls of a precision than bf16 ones, over the same on the GPU of the factors.

    A GPU whose peaks in two precisions are further apart than there has power to spare in the slower one. If they are
    closer together, 1: what an operation of such a GPU costs was not measured.
    """
    home = gpu_named(measured_on(rated))
    if dtype not in read_table("energy.json")["flop_pj"] or _is_new(rated) or home.name == rated.name:
        return 1.0

    def lower(gpu: Gpu) -> float:
        return _core(gpu, chip_of(gpu, "bf16").peak) / _core(gpu, chip_of(gpu, dtype).peak, dtype)

    return min(1.0, lower(rated) / lower(home)) if rated.supports(dtype) and home.supports(dtype) else 1.0


def measured_on(gpu: Gpu) -> str:
    """The GPU whose steps gave the factors of another (data/in_step.json)."""
    table = read_table("in_step.json")
    return str((table["all"] | table.get(gpu.family, {}) | table.get(gpu.base, {}))["measured_on"])


def _reference(gpu: Gpu) -> Gpu:
    """The GPU whose precisions stand in a usual relation to each other."""
    return gpu_named(read_table("energy.json")["gpu"]) if _is_new(gpu) else rated_gpu(gpu)


def _above_idle_w(gpu: Gpu, limit_w: float) -> float:
    """What a limit leaves to the work of a GPU: something, even where a file says that it idles at its limit."""
    return max(limit_w - gpu.idle_w, _LEAST_SHARE * limit_w, 1.0)


def _exponent() -> float:
    return float(read_table("energy.json")["clock_exponent"])


# ---------------------------------------------------------------------- what a step changes
@dataclass(frozen=True)
class InStepFactors:
    """Factors on isolated costs inside a training step."""

    matrix: float  # time of matmuls and attention inside a step, over the same kernels alone
    sustained: float  # of the tensor cores' peak, held for a whole step: beyond it the power limit lowers the clock
    stream: float  # the same factor for memory-bound kernels
    launch_gap_us: float  # between two kernels of one stream
    penalty: float  # time of collectives inside a step, over the same collectives alone


@lru_cache(maxsize=256)
def in_step_factors(gpu: Gpu) -> InStepFactors:
    """The factors for a GPU at its power limit: `in_step_factors(gpu_named("h100")).matrix`.

    Matmuls are slower in a step than alone because the power limit lowers the clock. The factor that was measured on
    one GPU holds on another, or under another limit, at the clock that is left there (`clock_of`): a factor of its own
    stays as it is at the usual limit. Known error on Blackwell: a few percent of the step (docs/transfer.md).
    """
    known = _factors_of(gpu.family, gpu.base)
    there, here = clock_of(gpu_named(measured_on(gpu))), clock_of(gpu)
    faster = here.core / there.core
    return replace(
        known,
        matrix=known.matrix / faster,
        sustained=min(1.0, known.sustained * faster) if known.sustained < 1 else 1.0,
        stream=known.stream * here.stream / there.stream,
    )


@cache
def _factors_of(family: str, name: str) -> InStepFactors:
    """The factors common to all GPUs, with those of a family and then those of a GPU in their place."""
    table = read_table("in_step.json")
    chosen = table["all"] | table.get(family, {}) | table.get(name, {})
    return InStepFactors(**{field.name: float(chosen[field.name]) for field in fields(InStepFactors)})
