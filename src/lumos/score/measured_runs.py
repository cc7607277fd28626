"""Measured runs: the rows of a table of measurements (docs/scoring.md), each with the Setup that it describes.

Empty columns get defaults that depend on the framework alone, never on the row:

| empty column | default |
|---|---|
| recompute | none |
| zero | the framework's: 1 for Megatron-Core, 3 for llm-foundry and torchtitan, else 0 |
| sequence_parallel | the framework's: on for Megatron-Core and nanotron where tp > 1 |
| network between nodes | what the row's text states; else the GPU's usual one, and EFA for nanotron |
| attention | the framework's, unless the row's text names flash or unfused attention |
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from lumos.data_files import read_table
from lumos.errors import InputError, LumosError
from lumos.setup.constraints import checked_setup
from lumos.setup.frameworks import framework_named, framework_names
from lumos.setup.gpus import find_gpu
from lumos.setup.setup import Setup

_TABLE = read_table("measured_runs.toml")
_NEEDED: list[str] = _TABLE["needed"]
_MOST_BYTES = 1 << 28
_OTHERS = "pytorch"  # as which frameworks are predicted that Lumos does not know

Row = dict[str, str]


@dataclass(frozen=True)
class Run:
    """One measured run."""

    id: str
    source: str
    model: str
    gpus: int
    seconds: float  # measured step time; nan where the row does not state it
    setup: Setup
    notes: tuple[str, ...]  # assumptions that make its prediction less certain
    row: Row


def read_rows(path: Path) -> list[Row]:
    """The rows of a table of measurements."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{path}: larger than {_MOST_BYTES >> 20} MiB; split it")
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [{key: value or "" for key, value in row.items() if key} for row in csv.DictReader(file)]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); name a CSV table of measured runs") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a CSV table: {error}") from None
    missing = [column for column in (*_NEEDED, "gpu", "framework") if rows and column not in rows[0]]
    if not rows or missing:
        lacks = f"column {missing[0]} is missing" if missing else "it has no rows"
        raise InputError(f"{path}: {lacks}; the columns are those of a table of measured runs (docs/scoring.md)")
    return rows


def runs_of(rows: list[Row]) -> Iterator[Run | tuple[str, str]]:
    """Every row as a Run, or (id, reason) where it describes none."""
    for number, row in enumerate(rows, 1):
        name = row.get("id") or f"row {number}"
        try:
            yield run_of(row, name)
        except LumosError as problem:
            yield name, str(problem).splitlines()[0][:200]


def run_of(row: Row, name: str) -> Run:
    """The Run that a row describes."""
    empty = [column for column in _NEEDED if not row.get(column, "").strip()]
    empty = empty or [column for column in _NEEDED if not _int(row, column)]
    if empty:
        raise InputError(f"{', '.join(empty)} not stated")
    notes: list[str] = []
    framework = _framework(row, notes)
    setup = checked_setup(
        {
            "model": _model(row),
            "train": _train(row, framework, notes),
            "parallel": _parallel(row, framework),
            "cluster": _cluster(row, framework, notes),
        }
    )
    seconds = _number(row, "step_time_s", math.nan)
    if seconds <= 0:
        raise InputError(f"step_time_s {row['step_time_s'][:40]!r} is not a time")
    return Run(name, row.get("source", ""), row.get("model_name", ""), setup.cluster.gpus, seconds, setup,
               tuple(notes), row)  # fmt: skip


def _number(row: Row, column: str, default: float = 0.0) -> float:
    """A column as a number; InputError where it is not a finite one."""
    text = row.get(column, "").strip()
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{column} {text[:40]!r} is not a number")
    return number


def _int(row: Row, column: str, default: int = 0) -> int:
    """A column as a whole number; InputError where it is not one."""
    number = _number(row, column, default)
    if number != round(number):
        raise InputError(f"{column} {row[column].strip()[:40]!r} is not a whole number")
    return round(number)


def _flag(row: Row, column: str) -> bool | None:
    text = row.get(column, "").strip().lower()
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text)


def _framework(row: Row, notes: list[str]) -> str:
    """The framework whose name or alias is the longest in the row's text; plain PyTorch where there is none."""
    found = [
        (len(match[0]), exact, framework.name)
        for framework in map(framework_named, framework_names())
        for exact, patterns in ((True, (framework.name, *framework.aliases)), (False, framework.stands_for))
        for pattern in patterns
        if framework.name != _OTHERS and (match := re.search(pattern, row["framework"].lower()))
    ]
    _, exact, name = max(found, default=(0, False, _OTHERS))
    if not exact:
        notes.append(f"framework {row['framework'][:60]!r} is predicted as {name}")
    return name


def _model(row: Row) -> dict[str, Any]:
    hidden, heads = _int(row, "hidden"), _int(row, "n_heads")
    model: dict[str, Any] = {
        "layers": _int(row, "n_layers"), "hidden": hidden, "heads": heads, "vocab": _int(row, "vocab"),
        "ffn": _int(row, "ffn_hidden", 4 * hidden), "kv_heads": _int(row, "n_kv_heads", heads),
        "head_dim": _int(row, "head_dim", hidden // max(heads, 1)), "gated": bool(_flag(row, "gated_mlp")),
        "tied": bool(_flag(row, "tied_embeddings")), "name": row.get("model_name", "")[:100],
    }  # fmt: skip
    if _int(row, "moe_experts"):
        model |= {
            "experts": _int(row, "moe_experts"), "top_k": _int(row, "moe_topk", 2),
            "expert_ffn": _int(row, "moe_ffn_hidden", model["ffn"]),
        }  # fmt: skip
    return model


def _train(row: Row, framework: str, notes: list[str]) -> dict[str, Any]:
    precision = row.get("precision", "").strip().lower() or "bf16"
    if precision not in _TABLE["precisions"]:
        plain = next((p for p in _TABLE["plain_precisions"] if precision.startswith(p)), None)
        if plain is None:
            raise InputError(f"precision {precision[:40]!r} is not known")
        notes.append(f"precision {precision[:40]!r} is predicted as {plain}")
        precision = plain
    attention = row.get("attention_impl", "").lower()
    return {
        "seq": _int(row, "seq_len"), "micro_batch": _int(row, "micro_batch"),
        "global_batch": _int(row, "global_batch"), "precision": precision, "framework": framework,
        "recompute": row.get("recompute", "").strip() or "none",
        "attention": "unfused" if "no flash" in attention or "unfused" in attention else "flash" if "flash" in attention
        else "", "mode": row.get("train_mode", "").strip() or "pretrain",
        "cuda_graphs": "CUDA_GRAPH=1" in row.get("overlap_or_graph_flags", ""),
    }  # fmt: skip


def _parallel(row: Row, framework: str) -> dict[str, Any]:
    facts = framework_named(framework)
    tp, pp, cp, vpp, ep = (_int(row, name) or 1 for name in ("tp", "pp", "cp", "vp_interleave", "ep"))
    sequence = _flag(row, "sequence_parallel")
    return {
        "tp": tp, "pp": pp, "vpp": vpp if pp > 1 else 1, "cp": cp, "ep": ep,
        "dp": max(1, _int(row, "n_gpus") // (tp * pp * cp)),
        "zero": _int(row, "zero", facts.zero), "shard": _int(row, "fsdp_shard"),
        "tp_overlap": _stated_overlap(row),
        "sequence_parallel": (facts.sequence_parallel if sequence is None else sequence) and tp > 1,
    }  # fmt: skip


def _stated_overlap(row: Row) -> bool | None:
    stated = re.search(r"TP_COMM_OVERLAP=(\w+)", row.get("overlap_or_graph_flags", ""))
    return None if stated is None else stated[1].lower() in ("true", "1")


def _cluster(row: Row, framework: str, notes: list[str]) -> dict[str, Any]:
    gpu = find_gpu(row["gpu"].strip())
    if gpu is None:
        raise InputError(f"GPU {row['gpu'][:60]!r} is not known")
    if gpu.name == "a100" and row.get("gpu_mem_gb", "").strip() == "40":
        gpu = find_gpu("a100-40") or gpu
    cluster: dict[str, Any] = {"gpu": gpu.name, "gpus": _int(row, "n_gpus")}
    node = _int(row, "gpus_per_node")
    if node:
        cluster["gpus_per_node"] = node
    network = _gbps_per_gpu(row, node or gpu.gpus_per_node)
    if network:
        cluster["inter_gb_s"] = network / 8
    elif _int(row, "n_gpus") > (node or gpu.gpus_per_node):
        cluster["fabric"] = framework_named(framework).network or "infiniband"
        notes.append("the network between nodes is not stated")
    return cluster


def _gbps_per_gpu(row: Row, node: int) -> float:
    """Gbit/s of one GPU between nodes; 0 where the row does not state it."""
    stated = _number(row, "inter_gbps_per_gpu")
    if stated:
        return stated
    for pattern in _TABLE["networks"]:
        found = re.search(pattern, row.get("interconnect_inter", ""))
        if found:
            return prod(map(float, found.groups())) / node
    return 0.0
