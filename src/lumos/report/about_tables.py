"""What Lumos knows, as cards and tables."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from lumos.analysis.about import About, AboutMachine
from lumos.report.table import Card, Column, Row, Table


def about_cards(found: About) -> list[Card]:
    own = ", ".join(gpu.name for gpu in found.gpus if gpu.own_samples)
    ages = [one.age_days for one in found.costs]
    kinds = [one.kind for one in found.provenance]
    fitted = f"{kinds.count('fitted')} fitted by scripts, {kinds.count('assumed')} assumed"
    base = next(one for one in found.intervals if one["part"] == "always")
    return [
        Card("version", found.version, f"data of {found.oldest} to {found.newest}"),
        Card("GPUs", str(len(found.gpus)), f"with samples of their own: {own}; the others are scaled by their peaks"),
        Card("models", str(len(found.models)), "published sizes, as model.preset"),
        Card("frameworks", str(len(found.frameworks)), ", ".join(one["name"] for one in found.frameworks)),
        Card("cost models", str(len(found.costs)), f"the oldest was fitted {_ago(max(ages, default=0))}"),
        Card("described step", _ends(base), "80 % interval of the simplest run; measured runs, held out"),
        Card("traced step", f"± {found.profiler_error_pct:.0f} %", "80 % interval of the step without the profiler"),
        Card("constants", str(len(kinds)), f"with their sources: {fitted}, the rest documented or by hand"),
    ]


def _ends(interval: dict[str, Any]) -> str:
    return f"−{-interval['low_pct']:.0f} to +{interval['pct']:.0f} %"


def _ago(days: int) -> str:
    return "today" if days < 1 else "1 day ago" if days == 1 else f"{days:,} days ago"


def machine_cards(found: AboutMachine) -> list[Card]:
    rows, facts = sum(one.rows for one in found.families), found.facts
    peaks = facts["peak_tflops"]
    dtype = next((name for name in ("bf16", "fp16") if name in peaks), max(peaks, key=peaks.__getitem__))
    measured = [one.part for one in found.parts if one.measured]
    rates = f"{peaks[dtype]:,.0f} {dtype} TFLOP/s" if peaks[dtype] >= 10 else f"{peaks[dtype]:.2g} {dtype} TFLOP/s"
    power = f", {facts['tdp_w']:,.0f} W" if facts["tdp_w"] else ""  # a CPU's is not known
    return [
        Card("GPU" if facts["tdp_w"] else "CPU", found.gpu, f"{rates}, {facts['hbm_gb_s']:,.0f} GB/s{power}"),
        Card("samples", f"{rows:,}", f"of {len(found.families)} families of operators"),
        Card("also measured", ", ".join(measured) or "nothing", ""),
        Card("fitted", found.fitted or "not stated", f"by lumos {found.lumos}" if found.lumos else ""),
    ]


def machine_families_table(found: AboutMachine) -> Table:
    columns = [Column("operators"), Column("samples", 0), Column("error, %", 1), Column("sizes sampled")]
    rows = [Row([one.family, one.rows or None, one.error_pct, _sizes(one.least, one.most)]) for one in found.families]
    title = "mean error on shapes that were held out; prices beyond twice these sizes are extrapolated"
    return Table(title, columns, rows)


def _sizes(least: list[float], most: list[float]) -> str:
    return " × ".join(f"{low:,.0f}–{high:,.0f}" for low, high in zip(least, most, strict=False)) or "not stated"


def machine_parts_table(found: AboutMachine) -> Table:
    columns = [Column("part"), Column("measured"), Column("error, %", 1), Column("what it holds")]
    rows = [Row([one.part, "yes" if one.measured else "no", one.error_pct, one.words]) for one in found.parts]
    return Table("the rest of the machine", columns, rows)


def machine_samples_table(found: AboutMachine) -> Table:
    names = ("file", "rows", "gpu", "torch", "cuda", "driver", "date", "sha256")
    rows = [Row([str(one.get(name, ""))[:80] for name in names]) for one in found.samples]
    return Table("fitted on", [Column(name) for name in names], rows)


def gpus_table(found: About) -> Table:
    columns = [Column("GPU"), Column("family"), Column("memory, GiB", 1), Column("bf16, TFLOP/s", 0),
               Column("memory, GB/s", 0), Column("power, W", 0), Column("costs from"), Column("energy")]  # fmt: skip
    rows = [
        Row([gpu.name, gpu.family, gpu.memory_gib, gpu.bf16_tflops, gpu.hbm_gb_s, gpu.tdp_w,
             "own samples" if gpu.own_samples else f"{gpu.samples}, scaled",
             "measured" if gpu.own_energy else "scaled"])
        for gpu in found.gpus
    ]  # fmt: skip
    return Table("GPUs (dense peaks)", columns, rows)


def costs_table(found: About) -> Table:
    columns = [Column("cost model"), Column("GPU"), Column("fitted"), Column("days ago", 0), Column("families", 0),
               Column("samples", 0), Column("median error, %", 1), Column("worst, %", 1), Column("of")]  # fmt: skip
    rows = [
        Row([one.name, one.gpu, one.date, one.age_days, len(one.families), one.rows, one.median_error_pct,
             one.worst_error_pct, one.worst])
        for one in found.costs
    ]  # fmt: skip
    return Table("cost models; errors on shapes that were held out", columns, rows)


def families_table(found: About) -> Table:
    columns = [Column("operators"), Column("cost model"), Column("GPU"), Column("samples", 0), Column("error, %", 1)]
    rows = [
        Row([one.family, costs.name, costs.gpu, one.rows or None, one.error_pct])
        for costs in found.costs
        for one in costs.families
    ]
    return Table("mean error of every family of operators, on shapes that were held out", columns, rows)


def intervals_table(found: About) -> Table:
    rows = [Row([one["words"], one["low_pct"], one["pct"]]) for one in found.intervals]
    columns = [Column("run"), Column("from, %", 1), Column("to, %", 1)]
    return Table("80 % interval of described steps, from measured runs", columns, rows)


def models_table(found: About) -> Table:
    """One row a family, with its sizes."""
    families: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in found.models:
        families[one["name"].rpartition("-")[0], one["source"]].append(one["name"])
    rows = [Row([family, ", ".join(names), source]) for (family, source), names in families.items()]
    return Table("models (model.preset)", [Column("family"), Column("names"), Column("source")], rows)


def frameworks_table(found: About) -> Table:
    rows = [Row([one["name"], ", ".join(one["aliases"])]) for one in found.frameworks]
    return Table("frameworks (train.framework)", [Column("name"), Column("also called")], rows)


def provenance_table(found: About) -> Table:
    columns = [Column("file"), Column("constant"), Column("how"), Column("source"), Column("script"), Column("date")]
    rows = [Row([p.file, p.key, p.kind, p.source, p.script, p.date]) for p in found.provenance]
    return Table("where every constant comes from", columns, rows)
