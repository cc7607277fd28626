"""Gpu: the properties of a GPU, by name or from a file.

Those of known GPUs are in `data/gpus.toml`, with their sources. A name that ends in `.toml` is the path of a data
sheet, one that ends in `.npz` that of a model file, which knows the GPU it was measured on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from lumos.data_files import read_table
from lumos.errors import InputError, OptionError
from lumos.model_file import CORRUPT, read_model_file
from lumos.setup.data_sheet import DataSheet, read_data_sheet
from lumos.setup.messages import did_you_mean

_VENDOR = re.compile(r"^((nvidia|amd|instinct|geforce)-)+")
_MEMORY = re.compile(r"(?<=-)(\d+)gi?b?(?=-|$)")
_SEPARATORS = re.compile(r"[\s_\-]+")
_FILES = (".toml", ".npz")
_ALIKE = 0.75  # of two names, from which on one may be a slip of the other
_NOT_GPUS = ("tpu", "trainium", "gaudi")  # families of other accelerators


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
    price: float | None = None  # of an hour, in any currency; of a data sheet alone
    like: str = ""  # of a data sheet: the known GPU that it changes
    assumed: Sequence[str] = ()  # of a data sheet: what it does not give
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
    def base(self) -> str:
        """The known GPU that measured factors are taken from: itself, or the one that its data sheet changes."""
        return self.like or self.name

    @property
    def shown(self) -> str:
        """Its name in a report: that of its file, without the folder."""
        return Path(self.name).name if is_file_name(self.name) else self.name

    @property
    def is_cpu(self) -> bool:
        """Whether it stands for the CPU of a run without GPUs: its figures are placeholders (data/gpus.toml)."""
        return self.family == "cpu"

    @property
    def is_other_accelerator(self) -> bool:
        """Whether it is no GPU: known only from its data sheet, and its programs are always compiled graphs."""
        return self.family in _NOT_GPUS

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
        known = did_you_mean(name, gpu_names(), _ALIKE)
        stop = "" if known.endswith("?") else "."
        raise OptionError(f"GPU {name[:100]!r} is not known: {known}{stop} Or name a data sheet, as in my_gpu.toml")
    return gpu


LEAST_POWER = 1.5  # times the idle power: boards allow no lower limit


def too_little_power(power: float, idle: float) -> str:
    """Why a power limit is refused."""
    return f"power_w = {power:g} is less than {LEAST_POWER:g} times the {idle:g} W of the idle GPU"


def is_file_name(name: str) -> bool:
    """Whether a GPU is named by a file: a data sheet or a model file."""
    return name.endswith(_FILES)


def find_gpu(name: str) -> Gpu | None:
    """The GPU of that name or alias, in any case, or of that file; None for another name, InputError for a bad file."""
    if is_file_name(name):
        return _of_data_sheet(Path(name)) if name.endswith(".toml") else _of_model_file(Path(name))
    by_alias = _by_alias()
    return by_alias.get(name) or by_alias.get(_normalized(name))


def gpu_called(name: str) -> Gpu | None:
    """The GPU of that name or alias, never of a file: for names in traces, which must not make us read files."""
    return None if is_file_name(name) else find_gpu(name)


def _of_data_sheet(path: Path) -> Gpu:
    sheet = read_data_sheet(path)
    below = find_gpu(sheet.like) if sheet.like and not is_file_name(sheet.like) else None
    if sheet.like and below is None:
        raise InputError(f"{path}: like = {sheet.like!r} is not a known GPU: {did_you_mean(sheet.like, gpu_names())}")
    power, idle = (given or usual for given, usual in (
        (sheet.power_w, below.tdp_w if below else 0.0), (sheet.idle_w, below.idle_w if below else 0.0),
    ))  # fmt: skip
    if power < LEAST_POWER * idle:
        raise InputError(f"{path}: {too_little_power(power, idle)}; give power_w and idle_w of the board")
    if below is not None:
        peaks: Mapping[str, float] = MappingProxyType(dict(below.peak_tflops) | sheet.peaks)
        facts = sheet.facts
        if below.nvlink_domain == below.gpus_per_node:  # NVLink joins a node, of whatever size
            facts = {"nvlink_domain": facts.get("gpus_per_node", below.nvlink_domain), **facts}
        return replace(below, **facts, name=str(path), like=below.name, aliases=(), peak_tflops=peaks)
    return _described(path, sheet)


def _described(path: Path, sheet: DataSheet) -> Gpu:
    """A GPU that is like no other: what a machine has around its chip may be assumed, the chip may not."""
    given = sheet.facts
    power, node = given["tdp_w"], given.get("gpus_per_node", 8)
    peaks = sheet.peaks
    half = peaks.get("bf16") or peaks.get("fp16")
    if half is None:
        raise InputError(f"{path}: peak_tflops gives neither bf16 nor fp16: add the dense rate of one of them")
    usual = {
        "family": "other", "idle_w": 0.15 * power, "nvlink_gb_s": 0.0, "pcie_gb_s": 63.0, "inter_gb_s": 50.0,
        "gpus_per_node": node, "nvlink_domain": node if given.get("nvlink_gb_s") else 1,
    }  # fmt: skip
    if "fp32" not in peaks:
        usual["peak_tflops.fp32"] = peaks["fp32"] = half / 16
    assumed = tuple(f"{key} = {value:g}" for key, value in usual.items() if key not in given and key != "family")
    usual.pop("peak_tflops.fp32", None)
    return Gpu(**{**usual, **given}, name=str(path), peak_tflops=MappingProxyType(peaks), assumed=assumed)


def _of_model_file(path: Path) -> Gpu:
    """The GPU that a model file was measured on: a known one, or with the facts that the file has of it."""
    file = read_model_file(path)
    facts, name = file.header.get("facts"), file.header["gpu"]
    if facts is None:
        known = _by_alias().get(_normalized(name))
        if known is None:
            raise file.refused(f"fitted on {name[:100]!r}, which is not a known GPU")
        return known
    try:
        checked = {f.name: facts[f.name] for f in fields(Gpu) if f.name in facts}
        peaks = {str(key): float(value) for key, value in checked.pop("peak_tflops").items()}
        found = Gpu(**checked | {"name": str(path), "peak_tflops": MappingProxyType(peaks)})
        values = (*asdict(replace(found, peak_tflops={})).values(), *peaks.values())
        numbers = [value for value in values if isinstance(value, int | float)]
        if not all(0 <= number < 1e9 for number in numbers) or not peaks or found.sms < 1:
            raise ValueError("not a GPU")
    except CORRUPT:
        raise file.refused("the facts of its GPU make no sense") from None
    return found


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
    """Lower case, words joined by one "-", without the vendor: "NVIDIA H100 80GB HBM3" is h100-80-hbm3."""
    return _MEMORY.sub(r"\1", _VENDOR.sub("", _SEPARATORS.sub("-", name[:200].strip().casefold())))
