"""Samples: rows of measured operators, as `lumos sample` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from lumos.costs.operator import KINDS, Operator
from lumos.errors import InputError

_SHAPES = {
    "grouped_gemm": ("e", "t", "n", "k"), "softmax_fwd": ("b", "h", "s"), "softmax_bwd": ("b", "h", "s"),
    "sdpa_fwd": ("b", "h", "s", "d"), "sdpa_bwd": ("b", "h", "s", "d"), "rotary_fwd": ("b", "h", "s", "d"),
    "rotary_bwd": ("b", "h", "s", "d"), "cross_entropy": ("t", "v"), "cross_entropy_bwd": ("t", "v"),
    "embedding": ("t", "v", "h"), "embedding_bwd": ("t", "v", "h"), "adamw_fused": ("n",),
}  # fmt: skip
_LAYOUTS = ("TN", "NN", "NT")


class Sample(NamedTuple):
    """An operator and its time in microseconds."""

    operator: Operator
    us: float


def operator_of(row: dict[str, Any], place: str) -> Operator:
    """The operator that a row describes: `op`, its sizes, and a dtype where it is not bf16."""
    name, dtype = row.get("op"), row.get("dtype", "bf16")
    if not isinstance(dtype, str) or dtype not in ("bf16", "fp16", "fp32", "tf32", "fp8"):
        raise InputError(f"{place}: dtype {dtype!r} is not known; use bf16, fp16, fp32, tf32 or fp8")
    if name == "gemm":
        layout = row.get("layout", "TN")
        if layout not in _LAYOUTS:
            raise InputError(f"{place}: layout {layout!r} is not known; use TN, NN or NT")
        return Operator(f"gemm_{layout.lower()}", _sizes(row, ("m", "n", "k"), place), dtype)
    if name == "bmm":
        batch, heads, seq, head = _sizes(row, ("b", "h", "s", "d"), place)
        return Operator("bmm", (batch * heads, seq, seq, head), dtype)
    if name not in KINDS or name in ("stream", "linear_bwd", "bmm_bwd"):
        raise InputError(f"{place}: op {name!r} is not known; see `lumos cost --help` for those that are")
    return Operator(name, _sizes(row, _SHAPES.get(name, ("t", "h")), place), dtype)


def _sizes(row: dict[str, Any], names: tuple[str, ...], place: str) -> tuple[int, ...]:
    values = [row.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 40:
            raise InputError(f"{place}: {name} = {value!r}; {row.get('op')} needs positive whole {', '.join(names)}")
    return tuple(int(value) for value in values if value is not None)


def read_samples(path: Path) -> tuple[str, list[Sample]]:
    """(GPU, samples) of a file of JSON lines; rows that failed when they were measured are left out."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as samples: {error}") from None
    gpu, samples = "", []
    for number, line in enumerate(lines, 1):
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError:
            raise InputError(f"{place}: not JSON; name a file that `lumos sample` wrote") from None
        if not isinstance(row, dict):
            raise InputError(f"{place}: not a row of samples; name a file that `lumos sample` wrote")
        if "gpu" in row:
            gpu = str(row["gpu"])
        elif "us" in row:
            us = row["us"]
            if not isinstance(us, int | float) or not 0 < us < 1e9:
                raise InputError(f"{place}: us = {us!r} is no time")
            samples.append(Sample(operator_of(row, place), float(us)))
    if not gpu or not samples:
        raise InputError(f"{path}: no samples in it; name a file that `lumos sample` wrote")
    return gpu, samples
