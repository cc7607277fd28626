"""Fits what aten operators cost that only move data, and factors of matmuls and attention that the cost model lacks.

    python3 calibration/fit_aten.py

Reads aten_h200.jsonl.xz, writes src/lumos/data/aten_costs.json and prints the error by family on rows held apart (a
fifth of
them, by a hash of the row). A family's time is fixed + max(bytes / rate, elements / rate).
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from lumos.cost.operator_model import cost_model
from lumos.dry_run.aten_prices import Work, isolated_us, matrix_operator, work_of
from lumos.dry_run.recorded_step import RecordedOp, TensorInfo

Detail = dict[tuple[str, str], list[tuple[Work, float]]]
HERE = Path(__file__).parent
TABLE = HERE.parent / "src/lumos/data/aten_costs.json"
SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4, "int64": 8, "bool": 1}
ISOLATION_US = 1.5  # that timing alone adds, with the time of an empty pair of events taken off already
MISALIGNED = {
    "1": {"gemm_tn": 100, "gemm_nn": 138, "gemm_nt": 142},
    "2": {"gemm_tn": 251, "gemm_nn": 269, "gemm_nt": 268},
}
HOST = {"launch_share": 0.66, "view_share": 0.33, "backward_share": 0.5}
_PROFILES = "calibration/architectures_h200.json.xz"
_BY_SCRIPT, _BY_HAND = "calibration/fit_aten.py", "by hand"
SOURCES = {
    "gpu": ("where the samples are from", "documented"),
    "families": (
        "calibration/aten_h200.jsonl.xz (H200, torch 2.11, cold cache): fixed time in us, bytes and elements per us. "
        f"By hand from {_PROFILES}: pointwise.transposed (Whisper's transposed embeddings) and index_put.serial_us, "
        "for each row that is added to the same row of a table (GPT-OSS: 1,024 rows for each of 32 take 2.1 ms)",
        _BY_SCRIPT,
    ),
    "factors": ("the same samples over the shipped cost model", _BY_SCRIPT),
    "held_out_error_pct": ("mean error on a fifth of the samples that is not fitted on", _BY_SCRIPT),
    "misaligned_tflops": (
        f"heads of odd vocabularies in {_PROFILES} (GPT-2, Granite, Whisper; BERT), by the number of elements "
        "that rows are aligned to",
        _BY_HAND,
    ),
    "host": (
        "host time of an operator with a kernel and of a view over host_us of frameworks.toml, and of the backward "
        f"pass (C++) over the forward pass; Whisper and Gemma 3 in {_PROFILES}, whose forward passes wait for the host",
        _BY_HAND,
    ),
}
UNARY = {"silu", "gelu", "gelu_tanh", "neg", "pow", "rsqrt", "tanh", "relu", "sigmoid", "exp", "mul_scalar"}


def tensor(shape: Iterable[int], dtype: str, strides: Iterable[int] | None = None) -> TensorInfo:
    shape = tuple(shape)
    dense = tuple(math.prod(shape[index + 1 :]) for index in range(len(shape)))
    return TensorInfo(shape, dtype, dense if strides is None else tuple(strides), SIZES[dtype])


def moved_heads(shape: list[int], dtype: str, width: int | None = None) -> TensorInfo:
    """(batch, heads, sequence, size) that lie in memory as (batch, sequence, heads, size)."""
    _, a, s, d = shape
    whole = width or d
    return tensor(shape, dtype, (s * a * whole, whole, a * whole, 1))


def recorded(row: dict[str, Any]) -> RecordedOp | None:
    """A sampled row as a dry run would have recorded it."""
    op, shape, dtype, layout = row["op"], row.get("shape"), row["dtype"], row.get("layout", "")
    if op.startswith("_foreach"):
        each = row["elements"] // row["tensors"]
        lists = {
            "_foreach_mul_": 1,
            "_foreach_sqrt": 1,
            "_foreach_norm": 1,
            "_foreach_addcmul_": 3,
            "_foreach_addcdiv_": 3,
        }.get(op, 2)
        one = tensor((each,), dtype)
        outputs = () if op == "_foreach_norm" else (one,) * row["tensors"]
        return RecordedOp(f"aten.{op}.List", (one,) * (lists * row["tensors"]), outputs, "forward", allocates=True)
    x = tensor(shape, dtype)
    name = f"aten.{op}.default"

    def made(
        *inputs: TensorInfo, out: TensorInfo | tuple[TensorInfo, ...] = x, options: tuple[str, ...] = ()
    ) -> RecordedOp:
        return RecordedOp(
            name,
            inputs,
            out if isinstance(out, tuple) and not isinstance(out, TensorInfo) else (out,),
            "forward",
            allocates=True,
            options=options,
        )

    if op in UNARY and layout == "contiguous":
        return made(x)
    if op in (
        "mul",
        "add",
        "div",
        "mul_",
        "add_",
        "div_",
        "where",
        "silu_backward",
        "gelu_backward",
        "threshold_backward",
        "tanh_backward",
        "neg",
    ):
        return _pointwise(row, x, made)
    if op in ("clone", "_to_copy", "cat", "slice_backward", "zeros", "native_dropout"):
        return _copy(row, x, made)
    if op in ("sum", "mean", "amax", "linalg_vector_norm"):
        return made(x, out=_rest(row))
    if op in ("_softmax", "_log_softmax", "cumsum"):
        return made(x)
    if op in ("_softmax_backward_data", "_log_softmax_backward_data"):
        return made(x, x)
    if op in ("native_layer_norm", "_fused_rms_norm"):
        return made(x, tensor(shape[-1:], dtype))
    if op == "native_layer_norm_backward":
        return made(x, x, tensor(shape[-1:], dtype))
    if op == "nll_loss_forward":
        return made(x, tensor(shape[:1], "int64"), out=tensor((), dtype))
    return _indexed(row, x, made)


def _pointwise(row: dict[str, Any], x: TensorInfo, made: Any) -> RecordedOp:
    op, shape, dtype, layout = row["op"], row["shape"], row["dtype"], row.get("layout", "")
    if op == "where":
        return made(tensor(shape, "bool"), x, x)
    if layout == "row vector":
        return made(x, tensor(shape[-1:], dtype))
    if layout == "column vector":
        return made(x, tensor((shape[0], 1), dtype))
    if layout == "mixed with fp32":
        return made(x, tensor(shape, "fp32"), out=tensor(shape, "fp32"))
    if layout == "half rows":
        return made(tensor(shape, dtype, (2 * shape[1], 1)))
    if layout == "mask, broadcast":
        return made(x, tensor((1, 1, *shape[2:]), dtype))
    if layout in ("heads moved, broadcast", "heads, broadcast"):
        heads = moved_heads(shape, dtype) if "moved" in layout else x
        return made(heads, tensor((shape[0], 1, *shape[2:]), dtype), out=heads)
    if layout == "heads moved":
        heads = moved_heads(shape, dtype)
        return made(heads, out=heads)  # the sample adds a tensor to itself
    if layout == "half heads moved":
        return made(moved_heads(shape, dtype, 2 * shape[3]), out=moved_heads(shape, dtype))
    return made(x, x)


def _copy(row: dict[str, Any], x: TensorInfo, made: Any) -> RecordedOp:
    op, shape, dtype, layout = row["op"], row["shape"], row["dtype"], row.get("layout", "")
    if op == "native_dropout":
        return made(x, out=(x, tensor(shape, "bool")))
    if op == "zeros":
        return made()
    if op == "_to_copy":
        other = "bf16" if dtype == "fp32" else "fp32"
        return made(x, out=tensor(shape, other))
    if op == "slice_backward":
        return made(tensor((*shape[:-1], shape[-1] // 2), dtype))
    if op == "cat":
        if layout == "rows":
            half = tensor((shape[0] // 2, *shape[1:]), dtype)
        else:
            half = tensor((*shape[:-1], shape[-1] // 2), dtype, x.strides)
        return made(half, half)
    if layout == "transposed":
        return made(tensor(shape[::-1], dtype, (1, shape[1])), out=tensor(shape[::-1], dtype))
    if layout == "heads moved":
        return made(moved_heads(shape, dtype))
    if layout == "repeated keys":
        b, a, s, d = shape
        return made(
            tensor((b, a // 2, 2, s, d), dtype, (s * a * d, d, 0, a * d, 1)), out=tensor((b, a // 2, 2, s, d), dtype)
        )
    return made(x)


def _rest(row: dict[str, Any]) -> TensorInfo:
    shape, dtype, layout = row["shape"], row["dtype"], row.get("layout", "")
    if layout == "all":
        return tensor((), dtype)
    if layout == "columns":
        return tensor(shape[1:], dtype)
    if layout == "over broadcast heads":
        return tensor((shape[0], 1, *shape[2:]), dtype)
    return tensor((*shape[:-1], 1), dtype)


def _indexed(row: dict[str, Any], x: TensorInfo, made: Any) -> RecordedOp | None:
    op, shape, dtype = row["op"], row.get("shape"), row["dtype"]
    if "rows" in row:
        index, values = tensor((row["rows"],), "int64"), tensor((row["rows"], shape[1]), dtype)
        if op == "index":
            return made(x, index, out=values)
        return made(x, index, values, options=("accumulate",))._replace(name=f"aten.{op.rstrip('_')}_.default")
    if op in ("topk", "sort", "histc"):
        return made(x)
    if op == "embedding":
        return made(tensor(shape[1:], dtype), tensor(shape[:1], "int64"), out=tensor((shape[0], shape[2]), dtype))
    if op == "embedding_dense_backward":
        return made(tensor((shape[0], shape[2]), dtype), tensor(shape[:1], "int64"), out=tensor(shape[1:], dtype))
    if op.startswith("convolution"):
        n, c, size, out, kernel = shape
        a, w, y = (
            tensor((n, c, size, size), dtype),
            tensor((out, c, kernel, kernel), dtype),
            tensor((n, out, size, size), dtype),
        )
        return made(y, a, w, out=(a, w)) if op.endswith("backward") else made(a, w, out=y)
    if op == "native_batch_norm":
        n, c, size, *_ = shape
        a = tensor((n, c, size, size), dtype)
        return made(a, out=a)
    return None


def is_held_out(row: dict[str, Any]) -> bool:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).digest()[0] < 51


def fit(rows: list[tuple[Work, float]]) -> dict[str, float]:
    """Fixed time and two rates with the least mean relative error, by search on a grid that is refined."""
    size = np.array([[w.bytes, w.elements] for w, _ in rows])
    us = np.array([us for _, us in rows])
    large = us >= np.quantile(us, 0.5)
    start = [
        max(0.3, float(np.quantile(us, 0.03)) * 0.8),
        *(np.quantile(size[large, i] / us[large], 0.8) for i in (0, 1)),
    ]

    def error(values: list[float]) -> float:
        fixed, by_bytes, by_elements = values
        found = fixed + np.maximum(size[:, 0] / by_bytes, size[:, 1] / by_elements)
        return float(np.abs(np.log(found / us)).mean())

    best, values, width = error(start), start, 2.0
    while width > 1.004:
        moved = False
        for index in range(3):
            for factor in (width, 1 / width):
                tried = [v * factor if i == index else v for i, v in enumerate(values)]
                if (found := error(tried)) < best:
                    best, values, moved = found, tried, True
        width = width if moved else width**0.6
    return {"fixed_us": round(values[0], 2), "bytes": round(values[1]), "elements": round(values[2])}


def factors(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Time of kernels over what the cost model says of them, by kind and precision; attention by backend and mask
    too.
    """
    model, found = cost_model("h200"), defaultdict(list)
    for row in rows:
        key, op = _matrix_row(row)
        operator = matrix_operator(op) if op else None
        if operator is not None and row["us"] > 20:
            found[key].append((row["us"] + 1.3) / model.us(operator))
    return {key: round(statistics.median(ratios), 3) for key, ratios in sorted(found.items()) if len(ratios) >= 2}


def _matrix_row(row: dict[str, Any]) -> tuple[str, RecordedOp | None]:
    op, shape, dtype = row["op"], row.get("shape"), row["dtype"]
    if op.startswith("sdpa"):
        q = tensor(shape, dtype)
        how = "masked" if row["masked"] else "causal" if row["causal"] else "full"
        name = "attention.forward" if op == "sdpa_fwd" else "attention.backward"
        if (
            (row["backend"] == "efficient") != (dtype == "fp32")
            or row["backend"] == "flash"
            or (how == "causal" and dtype != "fp32")
        ):
            return "", None  # not what PyTorch chooses on this GPU, or what the cost model has samples of
        return f"{op}.{row['backend']}.{how}", RecordedOp(name, (q, q, q), (q,), "forward", options=(how,))
    if op in ("mm", "addmm"):
        m, n, k = shape
        return f"gemm_tn.{dtype}", RecordedOp(
            "aten.mm.default", (tensor((m, k), dtype), tensor((k, n), dtype, (1, k))), (), "forward"
        )
    if op == "bmm":
        b, m, n, k = shape
        return f"bmm.{dtype}", RecordedOp(
            "aten.bmm.default", (tensor((b, m, k), dtype), tensor((b, k, n), dtype)), (), "forward"
        )
    return "", None


def derived(show: bool = False) -> dict[str, Any]:
    """The whole table, without its sources."""
    with lzma.open(HERE / "aten_h200.jsonl.xz", "rt") as file:
        rows = [json.loads(line) for line in file][1:]
    kept: dict[str, list[tuple[Work, float]]] = defaultdict(list)
    apart: dict[str, list[tuple[Work, float]]] = defaultdict(list)
    detail: Detail = defaultdict(list)
    for row in rows:
        if row["op"] in ("mm", "addmm", "bmm", "_grouped_mm", "sdpa_fwd", "sdpa_bwd"):
            continue
        op = recorded(row)
        if op is None:
            continue
        work, us = work_of(op), max(row["us"] - ISOLATION_US, 1.0)
        (apart if is_held_out(row) else kept)[work.family].append((work, us))
        detail[work.family, f"{row['op']} {row.get('layout', '')} {row['dtype']}"].append((work, us))
    families = {name: fit(found) for name, found in sorted(kept.items())}
    errors = {}
    for name, found in sorted(apart.items()):
        errors[name] = round(100 * statistics.mean(abs(isolated_us(w, families) / us - 1) for w, us in found), 1)
        if show:
            print(f"{name:26s} {families[name]} rows {len(kept[name])} held out {len(found)}: {errors[name]} %")
            _show_members(detail, name, families)
    families["index_put"]["serial_us"] = 2.0
    families["pointwise.transposed"] = families["pointwise.strided"] | {"elements": 200_000}
    return {
        "gpu": "h200", "host": HOST, "families": families, "factors": factors(rows), "misaligned_tflops": MISALIGNED,
        "held_out_error_pct": errors,
    }  # fmt: skip


def _show_members(detail: Detail, name: str, families: dict[str, dict[str, float]]) -> None:
    """How well the operators of one family agree."""
    for (family, which), some in sorted(detail.items()):
        ratio = [us / isolated_us(work, families) for work, us in some if us > 15]
        if family == name and ratio:
            print(f"      {which:50s} {len(some):4d} measured/fitted {statistics.median(ratio):.2f}")


def main() -> None:
    today = str(date.today())
    sources = {key: {"source": text, "script": script, "date": today} for key, (text, script) in SOURCES.items()}
    TABLE.write_text(json.dumps(derived(show=True) | {"sources": sources}, indent=1) + "\n")


if __name__ == "__main__":
    main()
