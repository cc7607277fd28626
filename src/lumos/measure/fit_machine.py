"""Fit machine: a model file from samples, with a verdict on each of its parts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from lumos.costs.hardware_model import encode, hardware_model
from lumos.costs.operator_model import Regressor
from lumos.data_files import read_table
from lumos.errors import InputError
from lumos.measure.fit import Verdict, family_of, fit
from lumos.measure.fit_facts import described, facts_of
from lumos.measure.fit_in_step import host_section, in_step_section
from lumos.measure.fit_network import network_facts
from lumos.measure.fit_samples import Samples, check_units, read_samples
from lumos.measure.fit_sections import Section, missing, power_section, profiler_section
from lumos.measure.sample_grid import grid_of
from lumos.setup.gpus import Gpu, gpu_named

_WHOLE_GRID = 0.97  # of its rows: the rest may have been lost

Progress = Callable[[int, int, str], None]


class FittedMachine(NamedTuple):
    """A model file, not yet written, and what there is to say about it."""

    gpu: Gpu
    content: bytes
    families: list[Verdict]
    sections: list[Section]
    warnings: list[str]
    more: str = ""  # how to measure more rows


def fit_machine(paths: Sequence[Path], asked: str = "", progress: Progress | None = None) -> FittedMachine:
    """Everything that the samples tell of a machine; InputError where that is nothing."""
    samples, place = read_samples(paths), str(paths[0])
    gpu = described(samples, asked, place)
    samples = check_units(samples, gpu, place)
    regressors, families = fit(gpu, samples.operators, progress)
    name = gpu.shown if facts_of(gpu) is None or asked else samples.gpu
    common: dict[str, Any] = {"facts": facts_of(gpu), "isolation_us": _isolation_us(samples, gpu)}
    sections = _sections(samples, encode(name, regressors, **common))
    _refuse_nothing(place, regressors, families, sections)
    common["provenance"] = _provenance(samples)
    values = {section.name: section.values for section in sections}
    content = encode(name, regressors, **common, **values)
    none = [] if samples.operators else ["no operators were sampled: predictions use those of the package"]
    return FittedMachine(gpu, content, families, sections, samples.warnings + none, _more(samples, paths[0]))


def _sections(samples: Samples, operators: bytes) -> list[Section]:
    """All parts beside operators, priced with a model file that has operators alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "operators.npz"
        path.write_bytes(operators)
        gpu, model = gpu_named(str(path)), str(path)
        hardware_model(model).operators(gpu)  # whatever is written can be read
        others = samples.others
        return [
            _network(samples, gpu),
            host_section(others["host"], model),
            profiler_section(others["profiler"]),
            power_section(others["power"], gpu, _limit_w(samples)),
            in_step_section(others["step"], others["host"], model),
        ]


def _network(samples: Samples, gpu: Gpu) -> Section:
    if not samples.collectives:
        return missing("network", _links(gpu))
    node = samples.about.get("gpus_per_node")
    facts = network_facts(samples.collectives, node if isinstance(node, int) and 1 <= node <= 1 << 10 else 0)
    if facts is None:
        return Section("network", len(samples.collectives), None, refused="no collective has enough samples")
    refused = facts.get("refused", [])
    note = f"not believed: {refused[0]}" + (f", and {len(refused) - 1} more" if refused[1:] else "") if refused else ""
    return Section("network", len(samples.collectives), facts, facts["error_pct"], note=note)


def _links(gpu: Gpu) -> str:
    """What predictions take the links of a GPU to be where no collective was sampled."""
    if gpu.is_cpu:
        return "what processes of a CPU send each other is a guess"
    near = f"NVLink of {gpu.nvlink_gb_s:g} GB/s" if gpu.nvlink_gb_s else f"PCIe of {gpu.pcie_gb_s:g} GB/s, no NVLink"
    links = f"{near}, nodes of {gpu.gpus_per_node}, {gpu.inter_gb_s:g} GB/s between them"
    if not gpu.assumed:
        return f"the usual links: {links}"
    return f"assumed: {links}; set cluster.nvlink_gb_s, nvlink_domain, gpus_per_node and inter_gb_s"


def _more(samples: Samples, path: Path) -> str:
    """How to measure more rows: the rest of the usual grid where that is not finished, or a finer one."""
    counts = grid_of("cpu" if samples.gpu == "cpu" else "cuda")["counts"]
    sampled = {family_of(sample.operator).partition(":")[0] for sample in samples.operators}
    whole = sum(count for key, count in counts.items() if key.replace("/", ":").partition(":")[0] in sampled)
    others = len(samples.collectives) + sum(map(len, samples.others.values()))
    tried = sum(file["rows"] for file in samples.files) - others  # with those that failed
    if path.is_dir() or tried >= _WHOLE_GRID * whole:
        return "lumos sample --scale 2"
    return f"the same lumos sample goes on ({100 * tried / whole:.0f} % of the usual grid are there)"


def _isolation_us(samples: Samples, gpu: Gpu) -> float:
    """What timing an operator alone adds to it: a pair of events on a GPU, nothing on a CPU."""
    added = read_table("operator_costs.json")["isolation_us"]
    published = any("torch" not in file for file in samples.files)  # spans of a profiler
    return 0.0 if gpu.is_cpu or published else float(added["h200"])


def _limit_w(samples: Samples) -> float | None:
    device = samples.about.get("device")
    limit = device.get("power_limit_w") if isinstance(device, dict) else None
    return float(limit) if isinstance(limit, int | float) and limit > 0 else None


def _refuse_nothing(
    place: str, regressors: dict[str, Regressor], families: list[Verdict], sections: list[Section]
) -> None:
    if regressors or any(section.values for section in sections):
        return
    why = [f"{verdict.family}: {verdict.refused}" for verdict in families]
    why += [f"{section.name}: {section.refused}" for section in sections if section.refused]
    said = "; ".join(why[:3]) + ("; …" if len(why) > 3 else "")
    raise InputError(f"{place}: nothing could be fitted ({said}); sample more with `lumos sample`")


def _provenance(samples: Samples) -> dict[str, Any]:
    try:
        release = version("lumos-sim")
    except PackageNotFoundError:
        release = ""
    return {"samples": samples.files, "lumos": release, "fitted": datetime.now(UTC).date().isoformat()}
