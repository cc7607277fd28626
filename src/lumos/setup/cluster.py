"""Cluster: the machines. Networks and memory come with the GPU and can be overridden."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lumos.setup.gpus import Gpu, find_gpu, gpu_named
from lumos.setup.section import MaybeWays, Section, Ways

_USUAL_NODE = 8
Bandwidth = Annotated[float, Field(ge=1e-3, le=1e6)]


class Cluster(Section):
    """GPUs in nodes. What is None is as the GPU's preset says."""

    gpu: Annotated[str, Field(max_length=100)] = "h200"
    gpus: MaybeWays = 0  # derived in a Setup: tp * pp * cp * dp
    gpus_per_node: MaybeWays = 0  # derived: as usual for the GPU
    nvlink_gb_s: Bandwidth | None = None  # per GPU, one direction
    nvlink_domain: Ways | None = None
    inter_gb_s: Bandwidth | None = None  # per GPU, one direction
    fabric: Literal["infiniband", "efa"] = "infiniband"  # between nodes; RoCE counts as InfiniBand
    memory_gib: Annotated[float, Field(gt=0, le=1e5)] | None = None
    host: Annotated[float, Field(gt=0, le=1e3)] = 1.0  # speed of the host; 1: the one Lumos was calibrated on

    DERIVED: ClassVar[tuple[str, ...]] = ("gpus_per_node",)

    @classmethod
    def derived(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The GPU's usual node; an unknown GPU is for the checks to refuse."""
        name = given.get("gpu", "h200")
        gpu = find_gpu(name) if isinstance(name, str) else None
        return {"gpus_per_node": gpu.gpus_per_node if gpu else _USUAL_NODE}

    @property
    def accelerator(self) -> Gpu:
        """The GPU as it is in this cluster, overrides applied."""
        gpu = gpu_named(self.gpu)
        return dataclasses.replace(
            gpu,
            gpus_per_node=self.gpus_per_node,
            nvlink_gb_s=self.nvlink_gb_s or gpu.nvlink_gb_s,
            nvlink_domain=self.nvlink_domain or self._domain_of(gpu),
            inter_gb_s=self.inter_gb_s or gpu.inter_gb_s,
            memory_gib=self.memory_gib or gpu.memory_gib,
        )

    def _domain_of(self, gpu: Gpu) -> int:
        """NVLink ends at the node, except where it joins the nodes of a rack."""
        beyond_the_node = gpu.nvlink_domain > gpu.gpus_per_node
        return gpu.nvlink_domain if beyond_the_node else min(gpu.nvlink_domain, self.gpus_per_node)
