"""Measured runs whose traces predict each other: the cases of a set, their setups, and the predictions to make.

A set is a folder for each kind of case (see calibration/changes_h200.py). The development set and the blind one are
archives beside the calibration; the shared measurements have the same kinds under other names.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "calibration"))

from changes_data import unpack  # noqa: E402
from lumos.setup.setup import Setup  # noqa: E402

KINDS = ("ranks", "single", "architectures", "multirank")
SETS = ("shared", "shared, unchanged", "development", "blind")
DEVELOPMENT, BLIND = ROOT / "calibration/changes_h200.tar.xz", ROOT / "calibration/changes_blind_h200.tar.xz"
TRACE = ".pt.trace.json.gz"
SHARED_SOURCES = ("base_l8_h2048_s2048_b2", "b8", "h4096", "l4", "s4096")  # of single GPUs
ENDLESS = {"cluster.gpus_per_node": 8, "cluster.nvlink_gb_s": 100_000, "cluster.inter_gb_s": 100_000}
ALONE = {"tp": 1, "pp": 1, "vpp": 1, "dp": 1, "zero": 0}
PARALLEL: dict[str, Any] = {  # what differs from that, by mode of a job
    "ddp": lambda c: {"dp": c["world"]}, "fsdp": lambda c: {"dp": c["world"], "zero": 3},
    "tp": lambda c: {"tp": c["world"]}, "pp": lambda c: {"pp": c["pp"]},
    "dp_tp": lambda c: {"tp": c["tp"], "dp": c["world"] // c["tp"], "zero": 3},
    "tp_pp": lambda c: {"tp": c["world"] // c["pp"], "pp": c["pp"]},
    "ipp": lambda c: {"pp": c["pp"], "vpp": c["vpp"], "schedule": "interleaved"},
}  # fmt: skip
IN_CONFIGS = {  # keys of a Hugging Face configuration that mean the same in all models
    "hidden_size": "model.hidden", "num_attention_heads": "model.heads", "num_key_value_heads": "model.kv_heads",
    "vocab_size": "model.vocab", "num_experts_per_tok": "model.top_k", "num_experts": "model.experts",
    "num_local_experts": "model.experts", "n_routed_experts": "model.experts",
    "moe_intermediate_size": "model.expert_ffn",
}  # fmt: skip
Values = dict[str, Any]  # of a setup, by key: {"model.layers": 8, …}


@dataclass(frozen=True, eq=False)
class Case:
    """A measured run: the wall clock without the profiler, peak memory, and a trace of some."""

    name: str
    kind: str
    values: Values = field(repr=False)  # its whole setup; of an architecture, what is written down of it
    step_s: float  # median
    range_s: tuple[float, float]  # fastest and slowest step
    peak: float  # bytes, of the fullest rank
    covered_s: float | None = None  # time in which kernels ran, of a profiled step
    other_host_s: float | None = None  # the step on another host of the same type
    trace: Path | None = None
    config: Path | None = None  # Hugging Face configuration


@dataclass(frozen=True)
class Pair:
    """A prediction to make."""

    set: str
    source: Case
    target: Case
    changes: Values

    @property
    def kind(self) -> str:
        return self.source.kind

    @property
    def what(self) -> str:
        """What changes, in words."""
        before = self.source.values
        parts = [f"{key.split('.')[1]} {before[key]} → {value}" for key, value in self.changes.items()
                 if before.get(key) != value and key != "cluster.gpus"]  # fmt: skip
        return ", ".join(parts) or "nothing"


# ---------------------------------------------------------------------- sets
def unpacked(archive: Path) -> Path:
    """The folder of an archive's cases, which is kept."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:12]
    folder = ROOT / "out/changes" / digest
    if not (folder / "pairs.json").exists():
        unpack(archive, folder)
    return folder


def archived_cases(folder: Path) -> dict[str, dict[str, Case]]:
    """The cases of an unpacked archive by kind and name."""
    readers = {"ranks": _ranks, "single": _single, "architectures": _architectures, "multirank": _multirank}
    return {kind: reader(folder / kind) for kind, reader in readers.items()}


def archived_pairs(name: str, folder: Path) -> Iterator[Pair]:
    """The predictions that an archive asks for."""
    cases = archived_cases(folder)
    asked = json.loads((folder / "pairs.json").read_text())
    for kind in KINDS:
        for source, target, *changes in asked[kind]:
            before, after = cases[kind][source], cases[kind][target]
            yield Pair(name, before, after, changes[0] if changes else differences(before, after))


def shared_cases(data: Path) -> dict[str, dict[str, Case]]:
    """The shared measurements by kind and name."""
    root = data / "h200"
    measured = json.loads((root / "single/measured.json").read_text())["results"]
    single = {row["name"]: _one_gpu(row, root / "single") for row in measured}
    return {
        "ranks": _ranks(root / "parallel"), "single": single, "architectures": _architectures(root / "zoo"),
        "multirank": _multirank(root / "multirank"),
    }  # fmt: skip


def shared_pairs(data: Path) -> Iterator[Pair]:
    """All pairs of ranks and of jobs of one parallelism, one GPU from five sources, architectures as they are.

    Compiled runs and GPT-2 are left out: they differ in what a trace cannot change.
    """
    cases = shared_cases(data)
    plain = {kind: [case for case in some.values() if not case.values.get("train.compile")]
             for kind, some in cases.items()}  # fmt: skip
    llamas = [case for case in plain["single"] if case.values["model.gated"]]
    possible = [
        *itertools.permutations(plain["ranks"], 2),
        *((cases["single"][source], target) for source in SHARED_SOURCES for target in llamas),
        *((case, case) for case in plain["architectures"]),
        *((a, b) for a, b in itertools.permutations(plain["multirank"], 2) if _works_alike(a, b)),
    ]
    for source, target in possible:
        if source.trace is not None and (source is not target or source.kind == "architectures"):
            changes = differences(source, target)
            same = {"train.micro_batch": target.values["train.micro_batch"]}
            yield Pair("shared, unchanged" if source is target else "shared", source, target, changes or same)


def _works_alike(a: Case, b: Case) -> bool:
    keys = {**differences(a, b), **differences(b, a)}  # what one of them states and the other does not counts as well
    return not any(key.startswith(("parallel.", "cluster.")) for key in keys)


def differences(source: Case, target: Case) -> Values:
    """The settings that make the target of the source; cases of one kind have the same keys."""
    return {key: value for key, value in target.values.items() if source.values.get(key) != value}


# ---------------------------------------------------------------------- cases of a kind
def _ranks(folder: Path) -> dict[str, Case]:
    """One rank of a large job, whose collectives took no time: its network is endless."""
    return {row["name"]: _case(row, "ranks", folder, _sizes(row) | _of_rank(row) | ENDLESS) for row in _rows(folder)}


def _of_rank(row: dict[str, Any]) -> Values:
    tp, pp = row.get("tp", 1), row.get("pp", 1)
    parallel = {"tp": tp, "pp": pp, "dp": row["world"] // tp // pp, "zero": row.get("zero", 0)}
    return {f"parallel.{key}": value for key, value in parallel.items()} | {"cluster.gpus": row["world"]}


def _single(folder: Path) -> dict[str, Case]:
    return {row["name"]: _one_gpu(row, folder) for row in _rows(folder)}


def _one_gpu(row: dict[str, Any], folder: Path) -> Case:
    return _case(row, "single", folder, _on_one_gpu(row))


def _on_one_gpu(row: dict[str, Any]) -> Values:
    gpt2 = row.get("kind") == "gpt2"
    return _sizes(row) | {"model.gated": not gpt2, "model.tied": gpt2, "cluster.gpus": 1}


def setup_of(row: dict[str, Any]) -> Setup:
    """The setup of a run measured on one GPU."""
    return Setup.model_validate(sections_of(_on_one_gpu(row)))


def sections_of(values: Values) -> dict[str, dict[str, Any]]:
    """Keys of a setup with dots, by section."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        found.setdefault(section, {})[name] = value
    return found


def _architectures(folder: Path) -> dict[str, Case]:
    return {row["name"]: _case(row, "architectures", folder, _known_of(row)) for row in _rows(folder)}


def _known_of(row: dict[str, Any]) -> Values:
    """What is written down of an architecture, by keys of a setup."""
    config = row["config"]
    found = {IN_CONFIGS[key]: value for key, value in config.items() if key in IN_CONFIGS}
    if "model.experts" not in found and "intermediate_size" in config:
        found["model.ffn"] = config["intermediate_size"]
    return found | {
        "model.layers": config["num_hidden_layers"], "train.seq": row["seq"], "train.micro_batch": row["mbs"],
        "train.recompute": "full" if row.get("ckpt") else "none", "train.compile": bool(row.get("compile")),
        "train.microbatches": 1, "cluster.gpu": "h200", "cluster.gpus": 1,
    }  # fmt: skip


def _multirank(folder: Path) -> dict[str, Case]:
    """Small jobs whose ranks share one GPU; the step is the mean over ranks."""
    found = {}
    for job in sorted(path for path in folder.iterdir() if (path / "rank0.json").exists()):
        rows = [json.loads(path.read_text()) for path in sorted(job.glob("rank[0-9].json"))]
        parallel = {f"parallel.{k}": value for k, value in (ALONE | PARALLEL[rows[0]["mode"]](rows[0])).items()}
        row = rows[0] | {
            "name": job.name, "step_s_median": statistics.mean(row["step_s_median"] for row in rows),
            "peak_mem_alloc": max(row["peak_mem_alloc"] for row in rows),
        }  # fmt: skip
        row.pop("gpu_covered_s", None)  # of one rank beside others
        values = _sizes(row) | parallel | {"cluster.gpus": row["world"], "cluster.gpus_per_node": 8}
        trace = job if (job / f"rank0{TRACE}").exists() else None
        found[job.name] = _case(row, "multirank", folder, values, trace)
    return found


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.json")):
        if not path.name.endswith(".config.json") and path.name != "measured.json":
            row = json.loads(path.read_text())
            if "error" not in row:
                yield row


def _sizes(row: dict[str, Any]) -> Values:
    """Model and batch of a Llama-like model."""
    model = {key: row[key] for key in ("layers", "hidden", "ffn", "heads", "vocab")}
    model["kv_heads"] = row.get("kv") or row["heads"]
    train = {
        "seq": row["seq"], "micro_batch": row["mbs"], "microbatches": row.get("accum", 1),
        "recompute": "full" if row.get("ckpt") else "none", "compile": bool(row.get("compile")),
    }  # fmt: skip
    return (
        {f"model.{key}": value for key, value in model.items()}
        | {f"train.{key}": value for key, value in train.items()}
        | {"cluster.gpu": "h200"}
    )


def _case(row: dict[str, Any], kind: str, folder: Path, values: Values, trace: Path | None = None) -> Case:
    name = row["name"]
    file, config = folder / f"{name}{TRACE}", folder / f"{name}.config.json"
    steps = row.get("step_s") or [row["step_s_min"], row["step_s_max"]]
    return Case(
        name, kind, values, row["step_s_median"], (min(steps), max(steps)), row["peak_mem_alloc"],
        row.get("gpu_covered_s"), row.get("other_host_step_s_median"), trace or (file if file.exists() else None),
        config if config.exists() else None,
    )  # fmt: skip
