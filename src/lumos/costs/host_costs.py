"""What the host costs: to issue recorded calls, to move data to its memory, and to update parameters there.

A call costs dispatch, autograd and launch, and the Python around it: microseconds per call by kind, measured beside an
H200 on tiny tensors, where the GPU never decides (`data/host_costs.json`, by calibration/fit_host.py). Hosts differ by
a third; `cluster.host` scales all of it.

The rates of copies and updates are in `data/step.json`. Copies from pinned memory and torch's fused Adam were measured
on one H200 with its share of a host (calibration/offload_h200.py). The GPUs of a node share the memory of their host,
whose bandwidth is assumed: known error of the update, a factor of two on other hosts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from lumos.costs.kernel_work import base_name, runs_kernel
from lumos.data_files import read_table
from lumos.program.op import Op
from lumos.setup.setup import Setup


def call_us(op: Op) -> float:
    """Of one call."""
    costs = _costs()
    kind = kind_of(op)
    each = costs["tensor_of_list"] * len(op.inputs) if kind == "list" else 0.0
    return costs[kind] + each


@lru_cache(maxsize=1)
def _costs() -> dict[str, float]:
    return dict(read_table("host_costs.json")["us"])


def kind_of(op: Op) -> str:
    """The kind of call that a price is known for."""
    name, costs = base_name(op), _costs()
    if op.name.startswith(("python.", "dtensor.", "fsdp.", "c10d.", "compiled.")):
        space = op.name.split(".")[0]
        exact = f"{op.name.removesuffix('.default')}"
        if exact in costs:
            return exact
        return f"{space}, optimizer" if op.phase == "optimizer" and f"{space}, optimizer" in costs else space
    if op.ranks:
        return "collective"
    if op.name.startswith("cuda"):
        return "wait"
    if "cpu" in op.options:
        return "cpu"
    if "compiled" in op.options:
        return "compiled"
    if name.startswith(("_foreach", "_fused", "_amp_foreach")) and "rms" not in name:
        return "list"
    if name == "detach":
        return "gradient" if op.phase == "backward" else "view"
    if not runs_kernel(op):
        return "view"
    exact = f"{name}, {op.phase}"
    return exact if exact in costs else f"kernel, {op.phase}"


class HostLink(NamedTuple):
    """Rates that one GPU has while the others of its node do the same."""

    copied_bytes_us: float  # in one direction
    updated_us: float  # parameters

    def copy_us(self, size: float) -> float:
        """Bytes from or to the host."""
        return size / self.copied_bytes_us

    def update_us(self, size: float, copied: float, returned: float, overlaps: bool) -> float:
        """The update of so many parameters by the host: gradients there, Adam, weights back.

        `copied` and `returned` are bytes for one parameter. Where they overlap, tensor by tensor, the longest decides.
        """
        parts = (self.copy_us(size * copied), size / self.updated_us, self.copy_us(size * returned))
        return max(parts) if overlaps else sum(parts)


def host_link(setup: Setup) -> HostLink:
    """The link of one GPU of a setup: PCIe, or NVLink-C2C where the GPU has that."""
    table, gpu = read_table("step.json"), setup.cluster.accelerator
    sharing = min(gpu.gpus_per_node, setup.cluster.gpus)
    shared = table["host_memory_gb_s"] / table["host_adam_bytes"] / sharing
    rate = min(table["host_adam_gparams_s"], shared) * setup.cluster.host
    return HostLink(gpu.to_host_gb_s * table["host_copy_share"] * 1e3, rate * 1e3)
