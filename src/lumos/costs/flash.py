"""Flash: attention kernels of an older generation, which a framework may run on a newer GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from lumos.costs.operator_model import CostModel, cost_model
from lumos.data_files import read_table
from lumos.program.operators import Operator
from lumos.setup.gpus import Gpu, gpu_named


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
