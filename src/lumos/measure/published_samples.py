"""Published samples: folders of CSV files as arXiv 2509.22832 published them, read as rows of a sample file.

    FOLDER/operator/linear1_fp16.csv          mp,b,l,dim,F_dur(us),B_dur(us)
    FOLDER/nccl/allreduce_fp16_2_4.csv        shape,nodes,GPUsPerNode,dur(us)

`mp` is the number of tensor-parallel ranks, b × l tokens of `dim` with `h` heads. What `shape` means was found by
looking: elements of fp16, of the tensor that is reduced or sent, and of the part that one rank contributes for the
all-gather (of two ranks it then takes as long as the all-reduce of the same shape, and of n ranks n - 1 times as long).
Files of collectives without nodes and GPUs in their names hold the others once more, and are not read.
`data/published_samples.toml` has the GPU of each folder, and what is not believed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any

from lumos.data_files import read_table
from lumos.errors import InputError
from lumos.files import read_file

Row = dict[str, Any]
Values = Mapping[str, int]

_VOCABULARY = 50257
_MOST_BYTES = 1 << 26  # of a file
_LARGEST = 1 << 40  # of a size
_LONGEST_US = 1e6  # of an operator; longer ones are failures
_WAY_OUT = "name a file that `lumos sample` wrote, or a folder with operator/NAME_fp16.csv and nccl/NAME_fp16_N_G.csv"
_COLLECTIVES = {
    "allreduce": "all_reduce", "allreduce_large": "all_reduce", "allgather_large": "all_gather", "p2p": "p2p",
}  # fmt: skip


def _linear(r: Values, n: int, k: int) -> Row:
    return {"m": r["b"] * r["l"], "n": n, "k": k}


def _padded(r: Values) -> int:
    """The vocabulary of one rank."""
    return ceil(_VOCABULARY / (128 * r["mp"])) * 128


def _plane(r: Values) -> Row:
    return {"t": r["b"] * r["l"], "h": r["dim"]}


def _heads(r: Values) -> int:
    return max(1, r["h"] // r["mp"])


def _scores(r: Values) -> Row:
    return {"b": r["b"], "h": _heads(r), "s": r["l"]}


def _heads_of(r: Values) -> Row:
    return {**_scores(r), "d": r["dim"] // r["h"]}


def _batched(r: Values, n: int, k: int) -> Row:
    return {"batch": r["b"] * _heads(r), "m": r["l"], "n": n, "k": k}


def _stage(r: Values) -> Row:
    return {"layers": r["encoders"], "width": r["dim"], "ranks": r["mp"]}


_FILES: dict[str, tuple[str, str, Callable[[Values], Row]]] = {  # operators of the forward and backward times, sizes
    "linear1": ("gemm", "linear_bwd", lambda r: _linear(r, 3 * r["dim"] // r["mp"], r["dim"])),
    "linear2": ("gemm", "linear_bwd", lambda r: _linear(r, r["dim"], r["dim"] // r["mp"])),
    "linear3": ("gemm", "linear_bwd", lambda r: _linear(r, 4 * r["dim"] // r["mp"], r["dim"])),
    "linear4": ("gemm", "linear_bwd", lambda r: _linear(r, r["dim"], 4 * r["dim"] // r["mp"])),
    "linear_final": ("gemm", "linear_bwd", lambda r: _linear(r, _padded(r), r["dim"])),
    "flash_atten": ("sdpa_fwd", "sdpa_bwd", _heads_of),
    "baddbmm": ("batched_gemm", "batched_gemm_bwd", lambda r: _batched(r, r["l"], r["dim"] // r["h"])),
    "bmm": ("batched_gemm", "batched_gemm_bwd", lambda r: _batched(r, r["dim"] // r["h"], r["l"])),
    "ScaledUpperTriangMaskedSoftmax": ("softmax_fwd", "softmax_bwd", _scores),
    "softmax": ("neox_softmax_fwd", "neox_softmax_bwd", _scores),
    "fillmask": ("neox_fillmask_fwd", "neox_fillmask_bwd", _scores),
    "RoPE": ("neox_rotary_fwd", "neox_rotary_bwd", _heads_of),
    "layernorm": ("neox_layer_norm_fwd", "neox_layer_norm_bwd", _plane),
    "RMSlayernorm": ("neox_rms_norm_fwd", "neox_rms_norm_bwd", _plane),
    "res_add": ("neox_add_fwd", "neox_add_bwd", _plane),
    "gelu": ("neox_gelu_fwd", "neox_gelu_bwd", lambda r: {"t": r["b"] * r["l"], "h": 4 * r["dim"] // r["mp"]}),
    "embedding": (
        "neox_embedding_fwd", "neox_embedding_bwd", lambda r: {"t": r["b"] * r["l"], "v": _padded(r), "h": r["dim"]}
    ),
    "parallel_cross_entropy_128": (
        "neox_loss_fwd", "neox_loss_bwd", lambda r: {"t": r["b"] * r["l"], "v": _padded(r)}
    ),
    "firstStage_optimizer": ("neox_optimizer_first", "", _stage),
    "middleStage_optimizer": ("neox_optimizer_middle", "", _stage),
    "lastStage_optimizer": ("neox_optimizer_last", "", _stage),
}  # fmt: skip


def published_rows(folder: Path) -> Iterator[tuple[str, Row]]:
    """(place, row) of a folder, the first of which names the GPU; InputError where it is no such folder."""
    known = read_table("published_samples.toml").get(folder.resolve().name, {})
    files = published_files(folder)
    yield str(folder), {key: known[key] for key in ("gpu", "gpus_per_node") if key in known} or {"gpu": folder.name}
    for path in files:
        if path.parent.name == "nccl":
            yield from _collectives(path)
        else:
            yield from _operators(path, known.get("refused", {}))


def published_files(folder: Path) -> list[Path]:
    """The files of a folder that are read, in order."""
    operators = [path for name in _FILES if (path := folder / "operator" / f"{name}_fp16.csv").exists()]
    found = operators + [path for path in sorted(folder.glob("nccl/*.csv")) if _named(path)]
    if not found:
        raise InputError(f"{folder}: no samples in it; {_WAY_OUT}")
    return found


def _operators(path: Path, refused: Mapping[str, str]) -> Iterator[tuple[str, Row]]:
    forward, backward, sizes_of = _FILES[path.stem.removesuffix("_fp16")]
    causal = read_table("published_samples.toml")["causal"]["share"]
    for place, row in _lines(path):
        sizes = {"mp": 1} | {name: _size(place, name, value) for name, value in row.items() if "dur" not in name}
        shape = _shape(place, sizes_of, sizes)
        for kind, column in ((forward, "F_dur(us)"), (backward, "B_dur(us)"), (forward, "dur(us)")):
            us = _us(place, column, row.get(column))
            if kind and kind not in refused and 0 < us < _LONGEST_US:
                share = causal if kind.startswith("sdpa") else 1.0
                yield place, {"op": kind, **shape, "dtype": "fp16", "us": us * share}


def _shape(place: str, sizes_of: Callable[[Values], Row], sizes: Values) -> Row:
    try:
        return sizes_of(sizes)
    except KeyError as missing:
        raise InputError(f"{place}: no column {missing}; {_WAY_OUT}") from None


def _collectives(path: Path) -> Iterator[tuple[str, Row]]:
    kind, nodes, inside = _named(path) or ("", 1, 1)
    parts = nodes * inside if kind == "all_gather" else 1
    for place, row in _lines(path):
        size, us = _size(place, "shape", row.get("shape")), _us(place, "dur(us)", row.get("dur(us)"))
        if us > 0:
            yield place, {"op": kind, "bytes": 2 * parts * size, "ranks": nodes * inside, "nodes": nodes, "us": us}


def _named(path: Path) -> tuple[str, int, int] | None:
    """(kind, nodes, GPUs a node) of a file of collectives."""
    found = re.fullmatch(r"(\w+?)_fp16_([1-9]\d{0,5})_([1-9]\d{0,5})", path.stem)
    if not found or found[1] not in _COLLECTIVES:
        return None
    return _COLLECTIVES[found[1]], int(found[2]), int(found[3])


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, str | None]]]:
    text = read_file(path, _MOST_BYTES, _WAY_OUT).decode("utf-8", "replace")
    try:
        for number, row in enumerate(csv.DictReader(text.splitlines()), 2):
            yield (
                f"{path}:{number}",
                {str(name): value if isinstance(value, str) else None for name, value in row.items()},
            )
    except csv.Error as error:
        raise InputError(f"{path}: not a table ({error}); {_WAY_OUT}") from None


def _size(place: str, name: str, value: str | None) -> int:
    try:
        size = int(float(value or ""))
    except (ValueError, OverflowError):
        size = 0
    if not 0 < size < _LARGEST:
        raise InputError(f"{place}: {name} = {str(value)[:40]!r} is not a size; {_WAY_OUT}")
    return size


def _us(place: str, name: str, value: str | None) -> float:
    try:
        return float(value or 0)
    except ValueError:
        raise InputError(f"{place}: {name} = {str(value)[:40]!r} is no time; {_WAY_OUT}") from None
