"""About a machine: what a model file knows of it, how far off that was, and where it may be trusted.

about_machine("my_machine.npz").families[0].error_pct
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lumos.costs.hardware_model import SECTIONS, HardwareModel, hardware_model
from lumos.costs.operator_model import regressors_of
from lumos.setup.gpus import Gpu

_WORDS = {
    "network": ("collectives", "those of the GPU's links and fabric"),
    "host": ("host", "a typical one"),
    "profiler": ("profiler", "as measured beside an H200"),
    "power": ("power", "that of an H200, scaled by peaks and power limit"),
    "in_step": ("whole steps", "differ from their operators as those of the nearest measured GPU"),
}
_CPU_WORDS = {  # what differs on a CPU, where nothing stands in for what was not sampled
    "network": "what processes send each other is a guess",
    "host": "none: operators of a CPU are timed with their dispatch",
    "power": "none: the power of a CPU is not known",
    "in_step": "taken as the sum of their operators",
}


@dataclass(frozen=True)
class SampledFamily:
    """A family of operators: samples, mean error on held-out shapes, and the sizes that were sampled."""

    family: str
    rows: int
    error_pct: float
    least: list[float]
    most: list[float]


@dataclass(frozen=True)
class MeasuredPart:
    """One part of a machine beside its operators."""

    part: str
    measured: bool
    error_pct: float | None
    words: str  # what it holds, or what stands in for it


@dataclass(frozen=True)
class AboutMachine:
    """The answer of `lumos about FILE`."""

    file: str
    gpu: str
    facts: dict[str, Any]
    fitted: str
    lumos: str
    samples: list[dict[str, Any]]  # file, sha256, rows, gpu, torch, cuda, driver, date
    families: list[SampledFamily]
    parts: list[MeasuredPart]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def about_machine(path: str) -> AboutMachine:
    """What is in a model file; InputError where it is none."""
    machine = hardware_model(path)
    known, regressors = machine.provenance, regressors_of(machine.file)
    samples = known.get("samples")
    return AboutMachine(
        file=path,
        gpu=machine.gpu.shown,
        facts=_facts(machine.gpu),
        fitted=str(known.get("fitted", ""))[:40],
        lumos=str(known.get("lumos", ""))[:40],
        samples=[dict(one) for one in samples if isinstance(one, dict)] if isinstance(samples, list) else [],
        families=[
            SampledFamily(name, one.rows, one.error_pct, list(one.least), list(one.most))
            for name, one in sorted(regressors.items(), key=lambda item: -item[1].rows)
        ],
        parts=[_part(machine, name) for name in SECTIONS],
    )


def _facts(gpu: Gpu) -> dict[str, Any]:
    names = ("memory_gib", "hbm_gb_s", "sms", "l2_mb", "clock_ghz", "tdp_w", "gpus_per_node")
    facts = {name: getattr(gpu, name) for name in names}
    if gpu.is_cpu:  # placeholders: it has no board, and its cache is not described
        facts |= {"tdp_w": None, "l2_mb": None}
    return {"peak_tflops": dict(gpu.peak_tflops), **facts}


def _part(machine: HardwareModel, name: str) -> MeasuredPart:
    title, usual = _WORDS[name]
    found = machine.section(name)
    if found is None:
        said = _CPU_WORDS.get(name, usual) if machine.gpu.is_cpu else usual
        return MeasuredPart(title, False, None, said if said.startswith("none") else f"not sampled: {said}")
    # That of the profiler is the interval of the package's recordings: none were measured on this machine.
    error = found.get("error_pct") if name != "profiler" else None
    number = float(error) if isinstance(error, int | float) and not isinstance(error, bool) else None
    return MeasuredPart(title, True, number, _held(name, found))


def _held(name: str, found: Any) -> str:
    """The main figures of a part."""
    if name == "network":
        tables = found.get("tables") or []
        groups = {(t.get("nodes"), t.get("inside")) for t in tables if isinstance(t, dict)}
        return f"{len(tables)} tables of collectives for {len(groups)} kinds of groups"
    keys = {
        "host": ("launch_us",), "profiler": ("operator_us", "call_us", "kernel_gap_us"),
        "power": ("active_w", "memory_pj"), "in_step": ("matrix", "stream", "launch_gap_us"),
    }[name]  # fmt: skip
    return ", ".join(f"{key} {found[key]:.4g}" for key in keys if isinstance(found.get(key), int | float))
