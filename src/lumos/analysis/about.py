"""Capabilities: what Lumos or a model file knows, where its numbers come from, how old they are, and how far off.

Everything is read from the files in `lumos/data`, or from a file that `lumos fit` wrote; nothing is stated here.

    about(date.today()).costs[0].median_error_pct
    about_machine("my_machine.npz").families[0].error_pct
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from math import exp, sqrt
from statistics import median
from typing import Any

from lumos.costs.hardware_model import SECTIONS, HardwareModel, hardware_model
from lumos.costs.model_costs import corrections
from lumos.costs.operator_model import cost_model, regressors_of
from lumos.data_files import read_table
from lumos.setup.frameworks import framework_names
from lumos.setup.gpus import Gpu, gpu_named, gpu_names
from lumos.setup.presets import preset_named, preset_names

_TABLES = ("operator_costs", "aten_costs", "in_step", "step", "memory", "energy", "host_costs", "uncertainty", "change")
_NOT_FITTED = ("assumed", "documented", "by hand")
_FACTS = ("memory_gib", "hbm_gb_s", "sms", "l2_mb", "clock_ghz", "tdp_w", "gpus_per_node")


@dataclass(frozen=True)
class KnownGpu:
    """A GPU, and the samples that its costs are from."""

    name: str
    family: str
    memory_gib: float
    bf16_tflops: float | None
    hbm_gb_s: float
    tdp_w: float
    samples: str  # the sampled GPU
    own_samples: bool
    own_energy: bool  # measured on this GPU
    source: str


@dataclass(frozen=True)
class CostFamily:
    """One family of operators in a fitted cost model."""

    family: str
    rows: int  # samples; 0 if the file does not state them
    error_pct: float  # mean on held-out shapes


@dataclass(frozen=True)
class SampledFamily(CostFamily):
    """A family of operators in a model file, and the sizes that were sampled."""

    least: list[float]
    most: list[float]


@dataclass(frozen=True)
class KnownCosts:
    """A bundled cost model, fitted on samples of one GPU."""

    name: str
    gpu: str
    date: str
    age_days: int
    rows: int
    median_error_pct: float
    worst_error_pct: float
    worst: str
    families: list[CostFamily]


@dataclass(frozen=True)
class Provenance:
    """The source of one constant."""

    file: str
    key: str
    kind: str  # fitted, by hand, documented, assumed
    source: str
    script: str
    date: str


@dataclass(frozen=True)
class About:
    """The answer of `lumos about`."""

    version: str
    gpus: list[KnownGpu]
    models: list[dict[str, Any]]  # name, parameters_b, active_b, seq, source
    frameworks: list[dict[str, Any]]  # name, aliases
    fabrics: list[dict[str, Any]]  # name, source
    costs: list[KnownCosts]
    intervals: list[dict[str, Any]]  # of a step predicted from a setup: words, pct upwards and low_pct downwards
    profiler_error_pct: float
    provenance: list[Provenance]
    newest: str
    oldest: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class MeasuredPart:
    """One part of a machine besides its operators."""

    part: str
    measured: bool
    error_pct: float | None
    words: str  # what it holds, or what replaces it


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


def about(today: date) -> About:
    """What this installation knows; ages are counted up to `today`."""
    provenance = list(_provenance())
    dates = [one.date for one in provenance if one.date]
    frameworks = read_table("frameworks.toml")
    return About(
        version=version("lumos-sim"),
        gpus=[_gpu(gpu_named(name)) for name in gpu_names()],
        models=[_model(name) for name in preset_names()],
        frameworks=[{"name": name, "aliases": frameworks[name].get("aliases", [])} for name in framework_names()],
        fabrics=[{"name": name, "source": facts["source"]} for name, facts in read_table("fabrics.toml").items()],
        costs=list(_costs(today)),
        intervals=list(_intervals()),
        profiler_error_pct=float(read_table("profiler.json")["error_pct"]),
        provenance=provenance,
        newest=max(dates, default=""),
        oldest=min(dates, default=""),
    )


def _gpu(gpu: Gpu) -> KnownGpu:
    model = cost_model(gpu.name)
    return KnownGpu(
        gpu.name, gpu.family, gpu.memory_gib, gpu.peak_tflops.get("bf16"), gpu.hbm_gb_s, gpu.tdp_w, model.sampled,
        not model.transferred, gpu.name == read_table("energy.json")["gpu"], gpu.source,
    )  # fmt: skip


def _model(name: str) -> dict[str, Any]:
    preset = preset_named(name)
    size = {"parameters_b": preset.published_b or None, "active_b": preset.active_b or None}
    return {"name": preset.name, **size, "seq": preset.seq, "source": preset.source}


def _costs(today: date) -> Iterator[KnownCosts]:
    """The fitted models of operators, and the corrections of aten operators."""
    table, aten, known = read_table("operator_costs.json"), read_table("aten_costs.json"), corrections()
    for name in dict.fromkeys(table["samples_of"].values()):
        families = [CostFamily(key, one.rows, one.error_pct) for key, one in cost_model(name).regressors.items()]
        yield _known_costs("operators of training", name, table["sources"]["samples_of"]["date"], today, families)
    families = [
        CostFamily(key, known[key].rows if key in known else 0, float(error))
        for key, error in aten["held_out_error_pct"].items()
    ]
    yield _known_costs("aten operators", aten["gpu"], aten["sources"]["families"]["date"], today, families)


def _known_costs(name: str, gpu: str, when: str, today: date, families: list[CostFamily]) -> KnownCosts:
    worst = max(families, key=lambda one: one.error_pct)
    return KnownCosts(
        name, gpu, when, (today - date.fromisoformat(when)).days, sum(one.rows for one in families),
        median(one.error_pct for one in families), worst.error_pct, worst.family, families,
    )  # fmt: skip


def _intervals() -> Iterator[dict[str, Any]]:
    """The 80% interval of a step predicted from a setup, by what makes it harder to predict and by framework."""
    table, words_of = read_table("uncertainty.json"), read_table("analysis.toml")["about"]["intervals"]
    always = table["variance"]["always"]

    def row(part: str, words: str, variance: float, width: float = 1.0) -> dict[str, Any]:
        size = sqrt(variance) * width
        low, high = (100 * (exp(table[end] * size) - 1) for end in ("low", "high"))
        return {"part": part, "words": words, "pct": high, "low_pct": low}

    for part, variance in table["variance"].items():
        yield row(part, words_of[part], always if part == "always" else always + variance)
    for name, known in table["frameworks"].items():
        count = known["publications"]
        words = f"the first of these under {name}, with {count} publication{'s' * (count > 1)}"
        yield row(name, words, always, known["width"])
    yield row("unseen", "the same under a framework without published runs", always, table["unseen"]["frameworks"])


def _provenance() -> Iterator[Provenance]:
    for name in _TABLES:
        for key, one in read_table(f"{name}.json").get("sources", {}).items():
            script = str(one.get("script", ""))
            kind = script if script in _NOT_FITTED else "fitted"
            yield Provenance(f"{name}.json", key, kind, str(one.get("source", "")), script, str(one.get("date", "")))
    yield Provenance("profiler.json", "all", "fitted", read_table("profiler.json")["source"], "", "")


def about_machine(path: str) -> AboutMachine:
    """What a model file holds; InputError if the file is not one."""
    machine = hardware_model(path)
    known, samples = machine.provenance, machine.provenance.get("samples")
    regressors = sorted(regressors_of(machine.file).items(), key=lambda item: -item[1].rows)
    facts = {name: getattr(machine.gpu, name) for name in _FACTS}
    if machine.gpu.is_cpu:  # placeholders: it has no board, and its cache is not stated
        facts |= {"tdp_w": None, "l2_mb": None}
    return AboutMachine(
        file=path,
        gpu=machine.gpu.shown,
        facts={"peak_tflops": dict(machine.gpu.peak_tflops), **facts},
        fitted=str(known.get("fitted", ""))[:40],
        lumos=str(known.get("lumos", ""))[:40],
        samples=[dict(one) for one in samples if isinstance(one, dict)] if isinstance(samples, list) else [],
        families=[SampledFamily(k, v.rows, v.error_pct, list(v.least), list(v.most)) for k, v in regressors],
        parts=[_part(machine, name) for name in SECTIONS],
    )


def _part(machine: HardwareModel, name: str) -> MeasuredPart:
    texts, section = read_table("analysis.toml")["about"]["parts"][name], machine.section(name)
    if section is None:
        instead = texts.get("cpu", texts["otherwise"]) if machine.gpu.is_cpu else texts["otherwise"]
        words = instead if instead.startswith("none") else f"not sampled: {instead}"
        return MeasuredPart(texts["title"], False, None, words)
    # That of the profiler is the interval of the package's recordings: none were measured on this machine.
    error = section.get("error_pct") if name != "profiler" else None
    number = float(error) if isinstance(error, int | float) and not isinstance(error, bool) else None
    return MeasuredPart(texts["title"], True, number, _main_figures(name, section, texts["figures"]))


def _main_figures(name: str, section: Any, keys: list[str]) -> str:
    if name == "network":
        tables = section.get("tables") or []
        groups = {(table.get("nodes"), table.get("inside")) for table in tables if isinstance(table, dict)}
        return f"{len(tables)} tables of collectives for {len(groups)} kinds of groups"
    return ", ".join(f"{key} {section[key]:.4g}" for key in keys if isinstance(section.get(key), int | float))
