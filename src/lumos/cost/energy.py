"""Joules: what work costs in energy on one GPU, over what the GPU draws idle. The numbers are in data/energy.json.

Energy adds up: a product costs its operations and its bytes, whatever else is run, and every kernel some power while it
lasts. Between kernels the board draws no more than idle, however short the gaps are (calibration/power_h200.jsonl).
All of it is for the highest clock; where the sum is more than the board may draw, the clock falls (prediction/power).

The H200 was measured. On another GPU operations at its peak take the same share of its power, a byte costs the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from math import log2
from typing import Any

from lumos.cost.operator_model import chip_of
from lumos.program.collective import Collective
from lumos.program.operators import BYTES, Operator
from lumos.setup.gpus import Gpu, gpu_named

_WARM_DEPTH, _COLD_DEPTH = -4.0, 0.5  # log2 of a tensor over the cache: found there whole, and not at all
_WIRE_FACTOR = {"all_reduce": 2.0}  # what a ring sends of a tensor; others send it once


@dataclass(frozen=True)
class Joules:
    """Energy over idle on one GPU, at its highest clock."""

    flop: Mapping[str, float]  # of one operation on tensor cores, by precision
    attention: float  # an operation of attention, over one of a product
    memory: float  # of one byte read or written in memory
    cache: float  # and in the cache
    cache_bytes: float
    active_w: float  # while a kernel runs, whatever it does
    update_w: float  # while the optimizer runs
    talking_w: float  # while a collective runs, on the few multiprocessors it takes
    wire: float  # of one byte sent and received
    most_w: float  # that the board draws at its limit
    measured: bool
    _known: dict[Operator, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def operator(self, operator: Operator, us: float) -> float:
        """Of an operator that takes so long."""
        work = self._known.get(operator)
        if work is None:
            work = self._known[operator] = self._work(operator)
        return work + self.active_w * us * 1e-6

    def collective(self, collective: Collective, us: float) -> float:
        """Of one rank's part in a collective that takes so long, waiting left out."""
        size = collective.group.size
        share = 1.0 if collective.kind == "p2p" else (size - 1) / size * _WIRE_FACTOR.get(collective.kind, 1.0)
        return self.talking_w * us * 1e-6 + self.wire * share * collective.bytes

    def _work(self, operator: Operator) -> float:
        parts = work_of(operator, self.cache_bytes)
        flop = self.flop[operator.dtype]
        return (
            parts["products"] * flop + parts["attention"] * flop * self.attention
            + parts["memory"] * self.memory + parts["cache"] * self.cache
        )  # fmt: skip


def work_of(operator: Operator, cache_bytes: float) -> dict[str, float]:
    """What an operator's energy goes with: operations of two kinds, and bytes in memory and in the cache."""
    depth = log2(max(operator.tensor_bytes, 1.0) / cache_bytes)
    cold = min(1.0, max(0.0, (depth - _WARM_DEPTH) / (_COLD_DEPTH - _WARM_DEPTH)))
    attends = operator.kind.startswith("sdpa")
    flops = operator.flops if operator.is_matrix else 0.0
    size = operator.bytes
    return {
        "products": 0.0 if attends else flops, "attention": flops if attends else 0.0,
        "memory": size * cold, "cache": size * (1 - cold),
    }  # fmt: skip


@cache
def joules_for(gpu: Gpu) -> Joules:
    """The measured energies, moved to a GPU by its power and its peaks."""
    return joules_from(json.loads(resources.files("lumos").joinpath("data/energy.json").read_text("utf-8")), gpu)


def joules_from(table: Mapping[str, Any], gpu: Gpu) -> Joules:
    """The energies of a table, moved to a GPU."""
    home = gpu_named(table["gpu"])
    power = (gpu.tdp_w - gpu.idle_w) / (home.tdp_w - home.idle_w)
    flop = {}
    for dtype in BYTES:
        known = _MEASURED_AS.get(dtype, dtype)
        strain = chip_of(home, known).peak / chip_of(gpu, dtype).peak
        flop[dtype] = 1e-12 * table["flop_pj"][known] * power * strain
    updates = (table["update_w"] - table["active_w"]) * gpu.hbm_gb_s / home.hbm_gb_s
    return Joules(
        flop, table["attention"], 1e-12 * table["memory_pj"], 1e-12 * table["cache_pj"], gpu.l2_mb * 1e6,
        table["active_w"] * power, table["active_w"] * power + updates, table["talking_w"] * power,
        1e-12 * table["wire_pj"], table["limit_share"] * gpu.tdp_w, gpu.name == home.name,
    )  # fmt: skip


_MEASURED_AS = {"mxfp8": "fp8", "nvfp4": "fp8", "fp16": "bf16"}
