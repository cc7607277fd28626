"""Measured runs: the rows of a table of measurements (docs/scoring.md), each with the Setup that it describes.

Empty columns get defaults that depend on the framework alone, never on the row:

| empty column | default |
|---|---|
| recompute | none; what "selective" keeps is the framework's, unless the row names layers or operators |
| compile | off, unless the row's text names it |
| zero | the framework's: 1 for Megatron-Core, 3 for llm-foundry and torchtitan, else 0 |
| sequence_parallel | the framework's: on for Megatron-Core and nanotron where tp > 1 |
| network between nodes | what the row's text states, or its publication is known for; else the GPU's usual one |
| attention | the framework's, unless the row's text names flash or unfused attention |

What no column can say of a model (latent attention, shared experts, norms of queries and keys) is that of the preset
whose name the row's model has, where hidden size, heads and experts are the same.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

from lumos.data_files import read_table
from lumos.errors import InputError, LumosError
from lumos.files import read_file
from lumos.model_file import read_model_file
from lumos.setup.constraints import checked_setup
from lumos.setup.frameworks import Framework, framework_named, framework_names
from lumos.setup.gpus import Gpu, find_gpu, gpu_named
from lumos.setup.importers.foreign_file import Findings
from lumos.setup.presets import find_preset
from lumos.setup.setup import Setup

_TABLE = read_table("measured_runs.toml")
_NEEDED: list[str] = _TABLE["needed"]
_MOST_BYTES = 1 << 26
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
        text = read_file(path, _MOST_BYTES, "name a CSV table of measured runs, or split it").decode("utf-8-sig")
        table = csv.DictReader(io.StringIO(text, newline=""))
        rows = [{key: value or "" for key, value in row.items() if key} for row in table]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a CSV table: {error}") from None
    missing = [column for column in (*_NEEDED, "gpu", "framework") if rows and column not in rows[0]]
    if not rows or missing:
        lacks = f"column {missing[0]} is missing" if missing else "it has no rows"
        raise InputError(f"{path}: {lacks}; the columns are those of a table of measured runs (docs/scoring.md)")
    return rows


def runs_of(rows: list[Row], model: str = "") -> Iterator[Run | tuple[str, str]]:
    """Every row as a Run, or (id, reason) where it describes none; `model` is a model file for the runs on its GPU."""
    for number, row in enumerate(rows, 1):
        name = row.get("id") or f"row {number}"
        try:
            yield run_of(row, name, model)
        except LumosError as problem:
            yield name, str(problem).splitlines()[0][:200]


def run_of(row: Row, name: str, model: str = "") -> Run:
    """The Run that a row describes, on the machine of a model file where it ran on the GPU of that file."""
    empty = [column for column in _NEEDED if not row.get(column, "").strip()]
    empty = empty or [column for column in _NEEDED if not _int(row, column)]
    if empty:
        raise InputError(f"{', '.join(empty)} not stated")
    found = Findings()
    found.values |= {place: number for place, column in _TABLE["numbers"].items() if (number := _int(row, column))}
    framework = framework_named(_framework(row, found))
    for put in (_put_model, _put_train, _put_parallel, _put_experts, partial(_put_cluster, model=model)):
        put(found, row, framework)
    setup = checked_setup(found.reading().sections)
    seconds = _number(row, "step_time_s", math.nan)
    if seconds <= 0:
        raise InputError(f"step_time_s {row['step_time_s'][:40]!r} is not a time")
    source, model, notes = row.get("source", ""), row.get("model_name", ""), tuple(n.sentence for n in found.notes)
    return Run(name, source, model, setup.cluster.gpus, seconds, setup, notes, row)


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


def _framework(row: Row, found: Findings) -> str:
    """The framework whose name or alias is the longest in the row's text; plain PyTorch where there is none.

    An alias may go on in the framework's version or the name of the source, where a release of its own is described.
    """
    name_ends = len(row["framework"])
    text = " ".join(row.get(column, "") for column in ("framework", "framework_version", "source")).lower()
    matches = [
        (len(match[0]), exact, framework.name)
        for framework in map(framework_named, framework_names())
        for exact, patterns in ((True, (framework.name, *framework.aliases)), (False, framework.stands_for))
        for pattern in patterns
        if framework.name != _OTHERS and (match := re.search(pattern, text)) and match.start() < name_ends
    ]
    _, exact, name = max(matches, default=(0, _OTHERS in text, _OTHERS))
    if not exact:
        found.note(f"framework {row['framework'][:60]!r} is predicted as {name}")
    return name


def _put_model(found: Findings, row: Row, _: Framework) -> None:
    values = found.values
    values.setdefault("model.ffn", 4 * values["model.hidden"])
    values |= {f"model.{key}": bool(_flag(row, column)) for key, column in _TABLE["flags"].items()}
    values["model.name"] = row.get("model_name", "")[:100]
    if "model.experts" in values:
        values.setdefault("model.top_k", 2)
    else:
        values.pop("model.top_k", None)
        values.pop("model.expert_ffn", None)
    _put_what_has_no_column(found, row)


def _put_what_has_no_column(found: Findings, row: Row) -> None:
    """Of a published model that the row names; "deepseek-v3 (w/o MTP)" names deepseek-v3."""
    preset = find_preset(row.get("model_name", "").partition(" (")[0])
    if preset is None:
        return
    keys, values = preset.keys, found.values
    same = ("hidden", "heads", "experts")
    if any(keys.get(key, 0) != values.get(f"model.{key}", 0) for key in same):
        return
    values |= {f"model.{key}": keys[key] for key in _TABLE["without_column"] if key in keys}
    if keys.get("kv_lora_rank"):  # columns state the width of a value as that of a head
        values.pop("model.head_dim", None)


def _says(row: Row, what: str) -> bool | None:
    """Whether the text of a row asks for something, or rules it out; None where it is silent."""
    facts = _TABLE["texts"][what]
    stated = _flag(row, what)
    if stated is not None:
        return stated
    text = " | ".join(row.get(column, "") for column in facts["columns"])
    return next((answer for answer in (False, True) if re.search(facts["yes" if answer else "no"], text, re.I)), None)


def _number_in(row: Row, column: str) -> float:
    """A number that has a column of its own, or is in the text of another; 0 where it is not stated."""
    facts = _TABLE["numbers_in_text"][column]
    text = " | ".join(row.get(other, "") for other in facts["columns"])
    found = re.search(facts["pattern"], text, re.I)
    return _number(row, column, float(found[1]) if found else 0.0)


def _put_precision(found: Findings, row: Row) -> None:
    precision = row.get("precision", "").strip().lower() or "bf16"
    if precision not in _TABLE["precisions"]:
        plain = next((p for p in _TABLE["plain_precisions"] if precision.startswith(p)), None)
        if plain is None:
            raise InputError(f"precision {precision[:40]!r} is not known")
        scaling = _TABLE["scalings"].get(precision.removeprefix(plain).strip(" -_"))
        if scaling and plain == "fp8":
            found.values["train.fp8_scaling"] = scaling
        else:
            found.note(f"precision {precision[:40]!r} is predicted as {plain}")
        precision = plain
    found.values["train.precision"] = precision


def _put_recompute(found: Findings, row: Row, framework: Framework) -> None:
    """What is recomputed: whole layers, all or every n-th, or what the framework calls selective."""
    recompute, every = row.get("recompute", "").strip() or "none", round(_number_in(row, "recompute_every"))
    found.values["train.recompute"] = recompute
    by_operator = _says(row, "by_operator")
    if recompute == "selective" and by_operator:
        found.values["train.recompute_modules"] = ("operators",)
    elif recompute == "selective" and (every or by_operator is False or framework.selective == "layers"):
        found.values["train.recompute"] = "full"
        found.values |= {"train.recompute_every": every} if every else _share_of_layers(found, row)


def _share_of_layers(found: Findings, row: Row) -> dict[str, int]:
    """How many layers are recomputed: as the row's HFU has it, which counts them and MFU does not, or every second."""
    try:
        useful, all_of_it = _number(row, "mfu"), _number(row, "hfu")
    except InputError:  # as text: "46 %"
        useful = all_of_it = 0.0
    if useful <= 0 or all_of_it <= useful:
        found.note("which layers are recomputed is not stated: assuming every second")
        return {"train.recompute_every": 2}
    share = min(1.0, 3 * (all_of_it / useful - 1))  # a forward pass is a third of a step
    return {"train.recompute_layers": round(share * found.values["model.layers"])}


def _put_train(found: Findings, row: Row, framework: Framework) -> None:
    _put_precision(found, row)
    _put_recompute(found, row, framework)
    text = row.get("attention_impl", "").lower()
    unfused = "no flash" in text or "unfused" in text
    found.values |= {
        "train.framework": framework.name,
        "train.compile": bool(_says(row, "compile")) and not framework.fused,
        "train.reduce_precision": {True: "fp32", False: "bf16", None: ""}[_says(row, "reduces_fp32")],
        "train.attention": "unfused" if unfused else "flash" if "flash" in text else "",
        "train.mode": row.get("train_mode", "").strip() or "pretrain",
        "train.cuda_graphs": "CUDA_GRAPH=1" in row.get("overlap_or_graph_flags", ""),
    }


def _put_parallel(found: Findings, row: Row, framework: Framework) -> None:
    values, split = found.values, _flag(row, "sequence_parallel")
    overlap = re.search(r"TP_COMM_OVERLAP=(\w+)", row.get("overlap_or_graph_flags", ""))
    if values["parallel.pp"] == 1:
        values.pop("parallel.vpp", None)
    if values.get("parallel.cp", 1) > 1 and framework.cp_type != "p2p":
        values["parallel.cp_type"] = framework.cp_type
    values |= {
        "parallel.zero": _int(row, "zero", framework.zero),
        "parallel.no_sync": bool(_says(row, "no_sync")),
        "parallel.tp_overlap": _says(row, "async_tp") if overlap is None else overlap[1].lower() in ("true", "1"),
        "parallel.sequence_parallel": (framework.sequence_parallel if split is None else split)
        and values["parallel.tp"] > 1,
    }


def _put_experts(found: Findings, row: Row, _: Framework) -> None:
    """How tokens reach their experts: as the row says, or else as its suite of benchmarks is known to run."""
    if not found.values.get("model.experts"):
        return
    for recipe in _TABLE["recipes"]:
        if all(re.search(pattern, row.get(column, ""), re.I) for column, pattern in recipe["where"].items()):
            found.values |= recipe["keys"]
    flex, overlap = _says(row, "flex"), _says(row, "ep_overlap")
    if flex is not None:
        found.values["parallel.dispatcher"] = "flex" if flex else "all_to_all"
    if overlap is not None:
        found.values["parallel.ep_overlap"] = overlap


def measured_gpu(row: Row, model: str) -> Gpu | None:
    """The GPU of a model file, where the row's run was on one of that kind: of that name, or both a CPU."""
    stated, measured = _stated_gpu(row), gpu_named(model)
    if stated is None:
        own = str(read_model_file(Path(model)).header["gpu"])
        return measured if row["gpu"].strip().casefold() == own.casefold() else None
    return measured if stated.name == measured.name or (stated.is_cpu and measured.is_cpu) else None


def _stated_gpu(row: Row) -> Gpu | None:
    """The known GPU that a row names."""
    is_small = row.get("gpu_mem_gb", "").strip() == "40"
    gpu = find_gpu(row["gpu"].strip())
    return find_gpu("a100-40") if gpu and gpu.name == "a100" and is_small else gpu


def _put_cluster(found: Findings, row: Row, framework: Framework, model: str) -> None:
    values, measured = found.values, measured_gpu(row, model) if model else None
    gpu = measured or _stated_gpu(row)
    if gpu is None:
        raise InputError(f"GPU {row['gpu'][:60]!r} is not known")
    values["cluster.gpu"] = gpu.name
    board = _TABLE["boards"].get(gpu.name, {})
    usual = board if row.get("gpu_mem_gb", "").strip() in board.get("gpu_mem_gb", ()) else {}
    for key in ("power_w", "hbm_tb_s"):
        stated = _number_in(row, key) or usual.get(key)
        if stated:
            values[f"cluster.{key}"] = float(stated)
    if measured:
        values["cluster.model"] = model
    node = values.get("cluster.gpus_per_node", gpu.gpus_per_node)
    network = _gbps_per_gpu(row, node)
    fabric = _fabric(row)
    if fabric:
        values["cluster.fabric"] = fabric["fabric"]
    if network:
        values["cluster.inter_gb_s"] = network / 8
    if values["cluster.gpus"] <= node:
        return
    if fabric.get("note"):
        found.note(fabric["note"])
    if not network:
        own = read_table("fabrics.toml")[fabric["fabric"]].get("gb_s") if fabric else None
        rate = f"{8 * own:g} Gbit/s of {fabric['fabric']}" if own else f"{8 * gpu.inter_gb_s:g} Gbit/s of {gpu.shown}"
        has_number = re.search(r"\d\s*G", row.get("interconnect_inter", ""))
        state = "that of a node or of a GPU" if has_number else "not stated"
        found.note(f"the bandwidth between nodes is {state}: assuming {rate}")


def _fabric(row: Row) -> dict[str, str]:
    """The kind of network between nodes, where a row or its publication names it, and what that leaves open."""
    for known in _TABLE["fabrics"]:
        if all(re.search(pattern, row.get(column, ""), re.I) for column, pattern in known["where"].items()):
            return {key: known[key] for key in ("fabric", "note") if key in known}
    return {}


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
