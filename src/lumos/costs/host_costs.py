"""What the host pays for an operator of a recorded step: dispatch, autograd and launch, and the Python around it.

Microseconds per call by kind, measured beside an H200 on tiny tensors, where the GPU never decides
(`data/host_costs.json`, made by calibration/fit_host.py). Hosts differ by a third; `cluster.host` scales all of it.
"""

from __future__ import annotations

from functools import lru_cache

from lumos.costs.kernel_work import base_name, runs_kernel
from lumos.data_files import read_table
from lumos.program.op import Op


def host_us(op: Op) -> float:
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
