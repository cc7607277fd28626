"""Gpu: what a GPU can do, by name. The facts are in `data/gpus.toml`, with their sources."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

from lumos.errors import OptionError
from lumos.setup.messages import did_you_mean

_MAKERS = re.compile(r"^(nvidia|amd|instinct|geforce)-")
_SEPARATORS = re.compile(r"[\s_\-]+")
_STORED_AS = {"mxfp8": "fp8", "nvfp4": "fp4"}  # formats that run at the speed of a plainer one
_ONLY_ON = {"mxfp8": ("blackwell", "cdna4"), "nvfp4": ("blackwell",)}


@dataclass(frozen=True)
class Gpu:
    """One GPU and the machine it usually sits in. Bandwidths are per GPU and in one direction, peaks are dense."""

    name: str
    family: str
    memory_gib: float  # as torch reports it
    hbm_gb_s: float
    peak_tflops: Mapping[str, float]  # by precision: fp32, tf32, fp16, bf16, fp8, fp4; what it lacks is absent
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
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __hash__(self) -> int:
        return hash(self.name)

    def supports(self, precision: str) -> bool:
        """Whether matrix products can run in it."""
        families = _ONLY_ON.get(precision, (self.family,))
        return self.family in families and _STORED_AS.get(precision, precision) in self.peak_tflops

    def peak(self, precision: str) -> float:
        """Dense TFLOP/s of matrix products in it, or OptionError."""
        if not self.supports(precision):
            raise OptionError(f"{self.name} has no {precision}: use {', '.join(self.precisions)}")
        return self.peak_tflops[_STORED_AS.get(precision, precision)]

    @property
    def precisions(self) -> tuple[str, ...]:
        """What `train.precision` may be on it."""
        return tuple(p for p in ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4") if self.supports(p))

    @property
    def is_cpu(self) -> bool:
        """No GPU at all, but what stands for one in a run without: its figures are placeholders (data/gpus.toml)."""
        return self.family == "cpu"

    @property
    def local_gb_s(self) -> float:
        """To the other GPUs of the node: NVLink, or PCIe where there is none."""
        return self.nvlink_gb_s or self.pcie_gb_s


def gpu_named(name: str) -> Gpu:
    """The GPU of that name or alias, in any case, or OptionError with the nearest name."""
    gpu = find_gpu(name)
    if gpu is None:
        raise OptionError(f"GPU {name[:100]!r} is not known: {did_you_mean(name, gpu_names())}")
    return gpu


def find_gpu(name: str) -> Gpu | None:
    """The GPU of that name or alias, in any case, or None."""
    by_alias = _by_alias()
    return by_alias.get(name) or by_alias.get(_plain(name))


def gpu_names() -> tuple[str, ...]:
    """The names without the aliases. A CPU is not among them: it is known from its trace alone."""
    return tuple(gpu.name for gpu in _gpus() if not gpu.is_cpu)


@cache
def _gpus() -> tuple[Gpu, ...]:
    text = resources.files("lumos").joinpath("data/gpus.toml").read_text("utf-8")
    return tuple(
        Gpu(
            name=name,
            peak_tflops=MappingProxyType(facts.pop("peak_tflops")),
            aliases=tuple(facts.pop("aliases", ())),
            **facts,
        )
        for name, facts in tomllib.loads(text).items()
    )


@cache
def _by_alias() -> Mapping[str, Gpu]:
    return MappingProxyType({_plain(alias): gpu for gpu in _gpus() for alias in (gpu.name, *gpu.aliases)})


def _plain(name: str) -> str:
    """Lower case, words joined by one "-", without the maker: "NVIDIA H100 80GB HBM3" is h100-80gb-hbm3."""
    plain = _SEPARATORS.sub("-", name[:200].strip().casefold())
    while _MAKERS.match(plain):
        plain = _MAKERS.sub("", plain)
    return plain
