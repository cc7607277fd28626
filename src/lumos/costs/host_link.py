"""HostLink: what moving data to the memory of the host costs, and an update of parameters there.

The rates are in `data/step.json`. Copies from pinned memory and torch's fused Adam were measured on one H200 with its
share of a host (calibration/offload_h200.py). The GPUs of a node share the memory of their host, whose bandwidth is
assumed: known error of the update, a factor of two on other hosts.
"""

from __future__ import annotations

from typing import NamedTuple

from lumos.data_files import read_table
from lumos.setup.setup import Setup


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
