"""ModelCosts: what calls cost inside a training step of one setup: operators, collectives, copies, and the host.

Isolated, cold costs of matmuls, attention and the operators of a setup come from the CostModel. Every other recorded
operator has a law by family (`data/aten_costs.json`): a fixed time, and what the slower of its bytes and its elements
takes. A convolution takes at least the matmul that it amounts to. Where trees were fitted for a family
(`data/costs/aten_h200.npz`, by calibration/fit_aten.py) they correct that time by the shape; `lumos.costs.kernel_work`
says what each operator does.

Inside a step kernels find part of their data in the cache, and run at the clock that the power limit leaves:
`InStepFactors` (`data/in_step.json`) hold those factors, and `data/step.json` the warmth of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib.resources import as_file
from math import exp, log2
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from lumos.costs.contention import Beside, kernel_of, slowdown
from lumos.costs.energy import InStepFactors, joules_for, relief_of
from lumos.costs.host_costs import call_us
from lumos.costs.kernel_work import Work, alignment, in_tiles, matrix_operator, moved_bytes, runs_kernel, works_of
from lumos.costs.network import Network
from lumos.costs.operator_model import CostModel, Regressor, chip_of, cost_model, read_cost_model
from lumos.costs.sampled_network import SampledNetwork
from lumos.data_files import data_file, read_table
from lumos.program.op import Op
from lumos.program.operators import Collective, Operator
from lumos.setup.gpus import Gpu, gpu_named

Kept = TypeVar("Kept")


class Cost(NamedTuple):
    """What one call costs inside a step, with nothing beside it."""

    us: float  # on its stream
    host_us: float  # of the host, to issue it
    joules: float  # over those of an idle GPU, at the highest clock
    source: str  # fitted, transferred, roofline, modelled
    bound: str  # compute, memory, network, host


@dataclass(frozen=True)
class OlderKernels:
    """Kernels built for an older GPU: its times, scaled to the multiprocessors and clock of the GPU they run on."""

    model: CostModel
    speed: float

    @property
    def isolation_us(self) -> float:
        return self.model.isolation_us / self.speed

    def us(self, operator: Operator) -> float:
        return self.model.us(operator) / self.speed


@cache
def flash_kernels(gpu: Gpu, generation: str) -> OlderKernels | None:
    """Flash attention of a generation on a GPU; None where the GPU's own samples are of that generation.

    Frameworks that run FlashAttention 2 on Hopper take cuDNN's kernels on Blackwell.
    """
    newer = gpu.family in ("hopper", "blackwell")
    if generation == "native" or (generation == "flash-2" and gpu.family != "hopper"):
        return None
    older = gpu_named("a100")
    speed = gpu.sms * gpu.clock_ghz / (older.sms * older.clock_ghz) if newer else 1.0
    model = cost_model("a100") if newer else cost_model(gpu)
    slower = read_table("operator_costs.json")["flash_1_factor"] if generation == "flash-1" else 1.0
    return OlderKernels(model, speed / slower)


@lru_cache(maxsize=1 << 16)
def warmth(operator: Operator, cache_mb: float) -> float:
    """Time of a kernel that finds its data in the cache, where the kernel before it left them, over its cold time."""
    constants = read_table("step.json")
    depth = log2(max(operator.tensor_bytes, 1.0) / (cache_mb * 1e6))
    factors = constants["warm_matrix" if operator.is_matrix else "warm_stream"]
    return float(np.interp(depth, constants["warm_depth"], factors))


def block_scaling(kind: str) -> float:
    """Time of an 8-bit matmul with a factor for every block of 128 values over that with one factor."""
    inputs, weights = (float(read_table("step.json")[key]) for key in ("block_scaled", "block_scaled_weights"))
    if kind in ("gemm_nt", "grouped_gemm_nt"):
        return weights
    if kind == "linear_bwd":
        return (inputs + weights) / 2
    return inputs if "gemm" in kind else 1.0


class _Isolated(Protocol):
    """Whatever knows the isolated cost of an operator."""

    @property
    def isolation_us(self) -> float: ...

    def us(self, operator: Operator) -> float: ...


class ModelCosts:
    """The shipped and fitted costs; equal calls are costed once, wherever they are."""

    def __init__(
        self, model: CostModel, network: Network | SampledNetwork, factors: InStepFactors, host_us: float,
        collective_launches: float, host_speed: float = 1.0,
    ) -> None:  # fmt: skip
        self.model, self.network, self.factors = model, network, factors
        self.host_us, self.collective_launches, self.host_speed = host_us, collective_launches, host_speed
        self.joules = joules_for(model.gpu)
        self.flash_model: _Isolated | None = None  # for attention kernels of an older generation
        self.contends = True  # kernels and communication beside each other; not where measured costs hold it already
        self.overlap_blocks = 0  # SMs of collectives beside the operators of a block; 0: NCCL's channels
        self.exchange_blocks = 0  # … of exchanges between experts; 0: the same
        self.block_scaled = False  # 8-bit matmuls have a factor for every block of 128 values
        self.leads = False  # passes wait for the host block by block
        self.leaves_sms = False  # matmuls start as many blocks as communication leaves SMs: none needs a round more
        self._costs: dict[Hashable, Cost] = {}
        self._kept: dict[Hashable, Any] = {}

    # ------------------------------------------------------------------ calls
    def cost(self, op: Op) -> Cost:
        """What a call costs: by its work, or by its name, tensors and options; never by its place or module."""
        key = (op.work, op.launches) if not op.phase else (*op[:4], op.allocates, op.options, op.work)
        found = self._costs.get(key)
        if found is None:
            us = self.us(op)
            found = self._costs[key] = Cost(us, self.host_us_of(op), self.joules_of(op, us), *self.basis_of(op, us))
        return found

    def us(self, op: Op) -> float:
        """The time of `cost`, for simulators, which need nothing else."""
        if isinstance(op.work, Collective):
            return self.network.us(op.work)
        if op.work is not None:
            return self.operator_us(op.work)
        return self.kernel_us(op) if runs_kernel(op) else 0.0

    def host_us_of(self, op: Op) -> float:
        """Per call where calls were recorded, per launch where a setup states them."""
        return call_us(op) / self.host_speed if op.phase else self.host_us * self.launches(op)

    def launches(self, op: Op) -> float:
        """Of the host, for a call that a setup states."""
        return self.collective_launches if isinstance(op.work, Collective) else op.launches

    def joules_of(self, op: Op, us: float) -> float:
        """The energy of a call that takes so long, also beside others."""
        if isinstance(op.work, Collective):
            return self.joules.collective(op.work, us)
        if op.work is not None:
            return self.joules.operator(op.work, us)
        if not us:
            return 0.0
        operator = matrix_operator(op)
        if op.phase == "optimizer" and (operator is None or not operator.is_matrix):
            return self.joules.update_w * us * 1e-6
        return self.joules.operator(operator or Operator("stream", (max(1, round(moved_bytes(op))),)), us)

    def basis_of(self, op: Op, us: float) -> tuple[str, str]:
        """(source, bound) of a cost."""
        work = op.work
        if isinstance(work, Collective):
            sampled = isinstance(self.network, SampledNetwork) and self.network.covers(work.group)
            return "fitted" if sampled else "modelled", "network"
        if not us:
            return "modelled", "host"
        work = work or matrix_operator(op)
        if work is not None:
            return self.source_of(work), self.model.bound(work)
        sampled = all(part.family in self._laws["families"] for part in works_of(op))
        return self.kernel_source if sampled else "roofline", "memory"

    def source_of(self, operator: Operator) -> str:
        """What the cost of an operator rests on."""
        sampled_on = self.model.sampled_on(operator)
        if not sampled_on:
            return "roofline"
        return "transferred" if self.model.transferred or sampled_on != self.model.sampled else "fitted"

    # ------------------------------------------------------------------ operators of a setup
    def operator_us(self, operator: Operator) -> float:
        """One operator: its isolated cost without the timer's own, under the conditions of a step."""
        if operator.kind == "stream" and operator.shape[0] == 0:
            return 0.0
        older = self.flash_model if operator.kind.startswith("sdpa") else None
        model = older or self.model
        alone = max(model.us(operator) - model.isolation_us, read_table("step.json")["shortest_us"])
        if older:  # at half of the rate, it does not reach the power limit: as fast in a step as alone on an H200
            factor = 1.0
        elif operator.is_matrix:
            factor = self.factors.matrix * self.relief(operator)
        else:
            factor = self.factors.stream
        if self.block_scaled and operator.dtype == "fp8":
            factor *= block_scaling(operator.kind)
        us = alone * factor * warmth(operator, self.model.gpu.l2_mb)
        if operator.is_matrix and operator.dtype != "fp32" and self.factors.sustained < 1:
            held = self.factors.sustained * chip_of(self.model.gpu, operator.dtype).peak
            us = max(us, self.relief(operator) * operator.flops / held)
        return float(us + self.factors.launch_gap_us)

    def relief(self, operator: Operator) -> float:
        """Of the clock; small kernels that run in turn wait for their start, not for tensor cores."""
        return relief_of(self.model.kernel(operator), self.model.gpu)

    def collective_us(self, collective: Collective) -> float:
        """One collective, once all its ranks have arrived."""
        return self.network.us(collective)

    # ------------------------------------------------------------------ recorded operators
    @cached_property
    def _laws(self) -> dict[str, Any]:
        """By family of kernels, as measured on one GPU."""
        return read_table("aten_costs.json")

    @cached_property
    def _home(self) -> Gpu:
        return gpu_named(self._laws["gpu"])

    @property
    def kernel_source(self) -> str:
        """What the laws of families rest on for this GPU."""
        return "fitted" if self.model.gpu.name == self._home.name else "transferred"

    def kernel_us(self, op: Op) -> float:
        """The kernels of a recorded call."""
        return self.kept((*op[:3], op.options), lambda: self._kernels_us(op))

    def _kernels_us(self, op: Op) -> float:
        return sum(self._work_us(work) * corrected(work) for work in works_of(op)) + self.factors.launch_gap_us

    def _work_us(self, work: Work) -> float:
        """Without the gap before it: laws and cost models hold for kernels alone, with a cold cache."""
        factors, gpu = self.factors, self.model.gpu
        by_law = by_matmul = 0.0
        if work.family.startswith("transfer"):
            rates = self._laws["transfer"]
            share = rates["pinned_share" if work.family.endswith("pinned") else "pageable_share"]
            return float(rates["fixed_us"] + work.bytes / (gpu.pcie_gb_s * 1e3 * share))
        if work.operator is None or work.family in self._laws["families"]:
            moved, home = gpu.hbm_gb_s / self._home.hbm_gb_s, self._home
            addressed = gpu.sms * gpu.clock_ghz / (home.sms * home.clock_ghz)
            by_law = isolated_us(work, self._laws["families"], moved, addressed)
            by_law *= factors.matrix if work.family.startswith("attention") else factors.stream
            by_law *= warmth(Operator("stream", (max(1, int(work.bytes)),)), gpu.l2_mb)
        if work.operator is not None:
            by_matmul = self._matmul_us(work.operator) - factors.launch_gap_us
            if work.operator.dtype == "fp32":  # without tensor cores a GPU stays below its power limit
                by_matmul /= factors.matrix * self.relief(work.operator)
        return max(by_law, by_matmul)

    def _matmul_us(self, operator: Operator) -> float:
        """Matmuls whose rows begin at odd addresses run on kernels without wide loads."""
        operator = in_tiles(operator)
        rates = self._laws["misaligned_tflops"].get(str(alignment(operator)), {})
        if operator.kind not in rates or operator.dtype in ("fp32", "tf32"):
            return self.operator_us(operator)
        even = operator._replace(shape=tuple(-(-size // 8) * 8 for size in operator.shape))
        peak = self.model.gpu.peak(operator.dtype) / self._home.peak(operator.dtype)
        slow = operator.flops / (rates[operator.kind] * peak) / 1e6
        return max(self.operator_us(even), float(slow))

    # ------------------------------------------------------------------ beside communication
    def running(self, collective: Collective, us: float) -> Beside:
        """A collective of a block that takes so long, as the operators beside it see it."""
        kernel = kernel_of(collective, us)
        blocks = self.exchange_blocks if collective.kind == "all_to_all" else 0
        blocks = blocks or self.overlap_blocks
        return kernel._replace(blocks=blocks) if blocks else kernel

    def slowdown(self, work: Operator, beside: Beside) -> float:
        """Time of an operator beside communication over its time alone."""
        gpu = self.model.gpu
        if self.leaves_sms and work.is_matrix and not work.kind.startswith("sdpa") and not gpu.is_cpu:
            return gpu.sms / max(1, gpu.sms - beside.blocks)
        return slowdown(work, beside, gpu)

    @property
    def launch_us(self) -> float:
        """From the host's call to the start of the kernel on an idle GPU."""
        return float(read_table("step.json")["launch_us"])

    # ------------------------------------------------------------------ kept results
    def kept(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """Whatever else depends on nothing but these costs and a key, made on first use."""
        if key not in self._kept:
            self._kept[key] = make()
        found: Kept = self._kept[key]
        return found


@cache
def corrections() -> dict[str, Regressor]:
    """Trees by family, that correct its law by the shape."""
    with as_file(data_file("costs/aten_h200.npz")) as path:
        return read_cost_model(path).regressors


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
