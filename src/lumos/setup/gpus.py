"""Gpu: the properties of a GPU, by name. They are in `data/gpus.toml`, with their sources."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from lumos.data_files import read_table
from lumos.errors import OptionError
from lumos.setup.messages import did_you_mean

_VENDOR = re.compile(r"^((nvidia|amd|instinct|geforce)-)+")
_SEPARATORS = re.compile(r"[\s_\-]+")


@dataclass(frozen=True)
class Gpu:
    """One GPU and the machine it usually sits in. Bandwidths are per GPU and in one direction, peaks are dense."""

    name: str
    family: str
    memory_gib: float  # as torch reports it
    hbm_gb_s: float
    peak_tflops: Mapping[str, float]  # by precision; what it does not support is absent
    sms: int
    l2_mb: float
    clock_ghz: float  # the highest boost clock
    tdp_w: float
    idle_w: float
    nvlink_gb_s: float  # or Infinity Fabric; 0 where there is none
    nvlink_domain: int
    pcie_gb_s: float
    inter_gb_s: float
    gpus_per_node: int
    host_gb_s: float = 0.0  # to the memory of the host, where that is not by PCIe
    aliases: Sequence[str] = ()
    source: str = ""

    def __hash__(self) -> int:
        return hash(self.name)

    def supports(self, precision: str) -> bool:
        """Whether it has matmuls in this precision."""
        return precision in self.peak_tflops

    def peak(self, precision: str) -> float:
        """Dense TFLOP/s of matmuls in this precision, or OptionError: `gpu_named("h100").peak("bf16")` is 989."""
        if not self.supports(precision):
            raise OptionError(f"{self.name} has no {precision}: use {', '.join(self.precisions)}")
        return self.peak_tflops[precision]

    @property
    def precisions(self) -> tuple[str, ...]:
        """What `train.precision` may be on it."""
        return tuple(precision for precision in self.peak_tflops if precision != "fp4")

    @property
    def is_cpu(self) -> bool:
        """Whether it stands for the CPU of a run without GPUs: its figures are placeholders (data/gpus.toml)."""
        return self.family == "cpu"

    @property
    def local_gb_s(self) -> float:
        """Bandwidth to the other GPUs of the node: NVLink, or PCIe where there is none."""
        return self.nvlink_gb_s or self.pcie_gb_s

    @property
    def to_host_gb_s(self) -> float:
        """Bandwidth to the memory of the host: NVLink-C2C, or PCIe."""
        return self.host_gb_s or self.pcie_gb_s


def gpu_named(name: str) -> Gpu:
    """The GPU of that name or alias, in any case, or OptionError with the nearest name: `gpu_named("H100-SXM5")`."""
    gpu = find_gpu(name)
    if gpu is None:
        raise OptionError(f"GPU {name[:100]!r} is not known: {did_you_mean(name, gpu_names())}")
    return gpu


def find_gpu(name: str) -> Gpu | None:
    """The GPU of that name or alias, in any case, or None."""
    by_alias = _by_alias()
    return by_alias.get(name) or by_alias.get(_normalized(name))


def gpu_names() -> tuple[str, ...]:
    """The names without the aliases. A CPU is not among them: only a trace can describe one."""
    return tuple(gpu.name for gpu in _gpus() if not gpu.is_cpu)


@cache
def _gpus() -> tuple[Gpu, ...]:
    return tuple(
        Gpu(**{**facts, "name": name, "peak_tflops": MappingProxyType(facts["peak_tflops"])})
        for name, facts in read_table("gpus.toml").items()
    )


@cache
def _by_alias() -> Mapping[str, Gpu]:
    return {_normalized(alias): gpu for gpu in _gpus() for alias in (gpu.name, *gpu.aliases)}


def _normalized(name: str) -> str:
    """Lower case, words joined by one "-", without the vendor: "NVIDIA H100 80GB HBM3" is h100-80gb-hbm3."""
    return _VENDOR.sub("", _SEPARATORS.sub("-", name[:200].strip().casefold()))
