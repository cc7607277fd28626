"""Prices of recorded operators: the time of an aten operator inside a training step.

Matmuls, fused attention and the fused AdamW are kinds of the shipped cost model (`lumos.costs.prices`). Everything else
has a law by family (`data/aten_costs.json`): a fixed time, and what the slower of its bytes and its elements takes. A
convolution takes at least the matmul that it amounts to. Where trees were fitted for a family
(`data/costs/aten_h200.npz`, by calibration/fit_aten.py) they correct that time by the shape; `lumos.costs.kernel_work`
says what each operator does.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import as_file
from math import exp
from typing import NamedTuple

import numpy as np

from lumos.costs.kernel_work import (
    Work,
    alignment,
    base_name,
    in_tiles,
    matrix_operator,
    runs_kernel,
    work_of,
    works_of,
)
from lumos.costs.operator_model import CostModel, Regressor, read_cost_model
from lumos.costs.prices import Prices, warmth
from lumos.data_files import data_file, read_table
from lumos.program.op import Op
from lumos.program.operators import Operator
from lumos.setup.gpus import gpu_named

__all__ = [
    "AtenPrices", "Price", "Work", "base_name", "corrections", "isolated_us", "matrix_operator", "runs_kernel",
    "work_of", "works_of",
]  # fmt: skip


class Price(NamedTuple):
    """Microseconds of one call inside a step, and where they came from."""

    us: float
    source: str  # fitted, transferred, roofline
    operator: Operator | None = None  # of the cost model
    bytes: float = 0.0
    flops: float = 0.0  # of matmuls, attention and convolutions


@cache
def corrections() -> dict[str, Regressor]:
    """Trees by family, that correct its law by the shape."""
    with as_file(data_file("costs/aten_h200.npz")) as path:
        return read_cost_model(path).regressors


class AtenPrices:
    """What recorded operators cost inside a step of one GPU: `AtenPrices(prices).of(op)`."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.model = prices, prices.model
        self.table = read_table("aten_costs.json")
        self.home = home = gpu_named(self.table["gpu"])
        gpu = self.model.gpu
        self.moved = gpu.hbm_gb_s / home.hbm_gb_s
        self.addressed = gpu.sms * gpu.clock_ghz / (home.sms * home.clock_ghz)
        self.source = "fitted" if gpu.name == home.name else "transferred"
        self._known: dict[Op, Price] = {}

    def of(self, op: Op) -> Price:
        """The price of one call; equal calls are priced once."""
        op = op._replace(phase="", module="")
        if op not in self._known:
            self._known[op] = self._price(op)
        return self._known[op]

    def _price(self, op: Op) -> Price:
        works = works_of(op)
        us = sum(self._in_step_us(work) * corrected(work) for work in works) + self.prices.factors.launch_gap_us
        operator = matrix_operator(op)
        moved = sum(work.bytes for work in works)
        if operator is not None:
            flops = operator.flops if operator.is_matrix else 0.0
            return Price(us, _source(self.model, operator), operator, moved, flops)
        sampled = all(work.family in self.table["families"] for work in works)
        return Price(us, self.source if sampled else "roofline", None, moved, sum(work.flops for work in works))

    def _in_step_us(self, work: Work) -> float:
        """Without the gap before it: laws and cost models hold for kernels alone, with a cold cache."""
        factors = self.prices.factors
        by_law = by_matmul = 0.0
        if work.family.startswith("transfer"):
            rates = self.table["transfer"]
            share = rates["pinned_share" if work.family.endswith("pinned") else "pageable_share"]
            return float(rates["fixed_us"] + work.bytes / (self.model.gpu.pcie_gb_s * 1e3 * share))
        if work.operator is None or work.family in self.table["families"]:
            by_law = isolated_us(work, self.table["families"], self.moved, self.addressed)
            by_law *= factors.matrix if work.family.startswith("attention") else factors.stream
            by_law *= warmth(Operator("stream", (max(1, int(work.bytes)),)), self.model.gpu.l2_mb)
        if work.operator is not None:
            by_matmul = self._matmul_us(work.operator) - factors.launch_gap_us
            if work.operator.dtype == "fp32":  # without tensor cores a GPU stays below its power limit
                by_matmul /= factors.matrix * self.prices.relief(work.operator)
        return max(by_law, by_matmul)

    def _matmul_us(self, operator: Operator) -> float:
        """Matmuls whose rows begin at odd addresses run on kernels without wide loads."""
        operator = in_tiles(operator)
        rates = self.table["misaligned_tflops"].get(str(alignment(operator)), {})
        if operator.kind not in rates or operator.dtype in ("fp32", "tf32"):
            return self.prices.operator_us(operator)
        even = operator._replace(shape=tuple(-(-size // 8) * 8 for size in operator.shape))
        peak = self.model.gpu.peak(operator.dtype) / self.home.peak(operator.dtype)
        slow = operator.flops / (rates[operator.kind] * peak) / 1e6
        return max(self.prices.operator_us(even), float(slow))


def corrected(work: Work) -> float:
    """What trees make of the time of a work; 1 where its family has none."""
    regressor = corrections().get(work.family) if work.features else None
    if regressor is None:
        return 1.0
    return exp(float(regressor.trees(np.array([work.features], np.float64))[0]))


def isolated_us(work: Work, families: dict[str, dict[str, float]], moved: float = 1.0, addressed: float = 1.0) -> float:
    """Microseconds of a kernel alone, by the law of its family; rates are per microsecond."""
    rates = families.get(work.family) or families["pointwise.strided"]
    by_bytes = work.bytes / (rates["bytes"] * moved)
    by_elements = work.elements / (rates["elements"] * addressed)
    return rates["fixed_us"] + max(by_bytes, by_elements, work.serial * rates.get("serial_us", 0.0))


def _source(model: CostModel, operator: Operator) -> str:
    if not model.sampled_on(operator):
        return "roofline"
    return "transferred" if model.transferred else "fitted"
