"""About: what Lumos knows, where its numbers come from, how old they are, and how far off they were.

Everything is read from the files in `lumos/data`; nothing is stated here.

    about(date.today()).costs[0].median_error_pct
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from math import exp, sqrt
from statistics import median
from typing import Any

from lumos.costs.aten_prices import corrections
from lumos.costs.operator_model import cost_model
from lumos.data_files import read_table
from lumos.setup.frameworks import framework_names
from lumos.setup.gpus import Gpu, gpu_named, gpu_names
from lumos.setup.presets import preset_named, preset_names

_TABLES = ("operator_costs", "aten_costs", "in_step", "step", "memory", "energy", "host_costs", "uncertainty", "change")
_NOT_FITTED = ("assumed", "documented", "by hand")
_INTERVALS = {  # words for the parts of data/uncertainty.json
    "always": "the GPU always computes, and has samples of its own",
    "transferred": "and costs of another GPU, scaled",
    "other_family": "and a GPU of a family that no run was measured on",
    "other_accelerator": "and an accelerator that is not a GPU, known from its data sheet only",
    "waiting": "and a step that only waits: for network, host or other stages",
    "experts": "and a mixture of experts",
    "fine_tuning": "and fine-tuning",
    "assumed": "and values that had to be assumed",
    "power": "and another power limit than the usual one",
}


@dataclass(frozen=True)
class KnownGpu:
    """A GPU, and what stands behind its costs."""

    name: str
    family: str
    memory_gib: float
    bf16_tflops: float | None
    hbm_gb_s: float
    tdp_w: float
    samples: str  # the GPU whose samples its costs are from
    own_samples: bool
    own_energy: bool  # measured on itself
    source: str


@dataclass(frozen=True)
class CostFamily:
    """One family of operators in a fitted cost model."""

    family: str
    rows: int  # samples; 0 where the file does not say
    error_pct: float  # mean, on shapes that were held out


@dataclass(frozen=True)
class KnownCosts:
    """A shipped cost model: fitted on samples of one GPU."""

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
    """Where one constant comes from."""

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
    intervals: list[dict[str, Any]]  # of a described step: words, pct upwards and low_pct downwards
    profiler_error_pct: float
    provenance: list[Provenance]
    newest: str
    oldest: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def about(today: date) -> About:
    """What this installation knows; ages are counted up to `today`."""
    provenance = list(_provenance())
    dates = sorted({one.date for one in provenance if one.date})
    return About(
        version=version("lumos-sim"),
        gpus=[_gpu(gpu_named(name)) for name in gpu_names()],
        models=[_model(name) for name in preset_names()],
        frameworks=[
            {"name": name, "aliases": list(read_table("frameworks.toml")[name].get("aliases", []))}
            for name in framework_names()
        ],
        fabrics=[{"name": name, "source": facts["source"]} for name, facts in read_table("fabrics.toml").items()],
        costs=list(_costs(today)),
        intervals=list(_intervals()),
        profiler_error_pct=float(read_table("profiler.json")["error_pct"]),
        provenance=provenance,
        newest=dates[-1] if dates else "",
        oldest=dates[0] if dates else "",
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
    """The fitted models, and the laws of aten operators."""
    table = read_table("operator_costs.json")
    when = table["sources"]["samples_of"]["date"]
    for name in dict.fromkeys(table["samples_of"].values()):
        families = [
            CostFamily(family, found.rows, found.error_pct) for family, found in cost_model(name).regressors.items()
        ]
        yield _known_costs("operators of training", name, when, today, families)
    aten = read_table("aten_costs.json")
    known = corrections()
    families = [
        CostFamily(family, known[family].rows if family in known else 0, float(error))
        for family, error in aten["held_out_error_pct"].items()
    ]
    yield _known_costs("aten operators", aten["gpu"], aten["sources"]["families"]["date"], today, families)


def _known_costs(name: str, gpu: str, when: str, today: date, families: list[CostFamily]) -> KnownCosts:
    worst = max(families, key=lambda one: one.error_pct)
    return KnownCosts(
        name, gpu, when, (today - date.fromisoformat(when)).days, sum(one.rows for one in families),
        median(one.error_pct for one in families), worst.error_pct, worst.family, families,
    )  # fmt: skip


def _intervals() -> Iterator[dict[str, Any]]:
    """How wide the 80 % interval of a described step is: by what makes it harder to predict, and by framework."""
    table = read_table("uncertainty.json")
    always = table["variance"]["always"]

    def row(part: str, words: str, variance: float, width: float = 1.0) -> dict[str, Any]:
        size = sqrt(variance) * width
        low, high = (100 * (exp(table[end] * size) - 1) for end in ("low", "high"))
        return {"part": part, "words": words, "pct": high, "low_pct": low}

    for part, variance in table["variance"].items():
        yield row(part, _INTERVALS[part], always if part == "always" else always + variance)
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
