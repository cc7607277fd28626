"""Fits what aten operators cost that the shipped cost model has no samples of.

    python3 calibration/fit_aten.py

Reads aten_h200.jsonl.xz and aten_training_h200.jsonl.xz, writes src/lumos/data/aten_costs.json (the laws) and
src/lumos/data/costs/aten_h200.npz (trees that correct them), and prints the error by family on calls held apart: a
fifth of them, by a hash of their shapes. The law of a family is fixed + max(bytes / rate, elements / rate). A family
gets trees if they lower its error in cross-validation over the calls that are not held apart.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aten_rows import operators_of
from aten_rows import rows as training_rows
from lumos.costs.hardware_model import encode
from lumos.costs.kernel_work import Work, works_of
from lumos.costs.model_costs import isolated_us
from lumos.costs.operator_model import Regressor, cost_model
from lumos.measure.fit import grow
from lumos.program.op import Op, Tensor

HERE = Path(__file__).parent
TABLE = HERE.parent / "src/lumos/data/aten_costs.json"
TREES = HERE.parent / "src/lumos/data/costs/aten_h200.npz"
SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4, "int64": 8, "bool": 1}
ISOLATION_US = 1.5  # that timing alone adds, with the time of an empty pair of events taken off already
COMPILED = {  # kernels that torch.compile fuses: fixed time, bytes and elements per us
    "fused.pointwise": {"fixed_us": 0.9, "bytes": 4450000, "elements": 1000000000},
    "fused.pointwise.sine": {"fixed_us": 0.9, "bytes": 1250000, "elements": 1000000000},
    "fused.reduction": {"fixed_us": 1.5, "bytes": 4050000, "elements": 1000000000},
    "fused.reduction.softmax": {"fixed_us": 1.5, "bytes": 4050000, "elements": 580000},
    "fused.scatter": {"fixed_us": 2.0, "bytes": 2700000, "elements": 1000000000},
}
MISALIGNED = {
    "1": {"gemm_tn": 100, "gemm_nn": 138, "gemm_nt": 142},
    "2": {"gemm_tn": 251, "gemm_nn": 269, "gemm_nt": 268},
}
TRANSFER = {"fixed_us": 8.0, "pinned_share": 0.87, "pageable_share": 0.25}
_PROFILES = "calibration/architectures_h200.json.xz"
_BY_SCRIPT, _BY_HAND = "calibration/fit_aten.py", "by hand"
SOURCES = {
    "gpu": ("where the samples are from", "documented"),
    "families": (
        "calibration/aten_h200.jsonl.xz and aten_training_h200.jsonl.xz (H200, torch 2.11, cold cache): fixed time in "
        f"us, bytes and elements per us; gradients of biases from {_PROFILES} and architectures_blind_h200.json.xz. "
        f"By hand from {_PROFILES}: pointwise.transposed (Whisper's transposed embeddings) and index_put.serial_us, "
        "for each row that is added to the same row of a table (GPT-OSS: 1,024 rows for each of 32 take 2.1 ms). "
        "By hand: fused.*, read off the kernels of two traces of compiled steps on an H200",
        _BY_SCRIPT,
    ),
    "held_out_error_pct": (
        "mean error on a fifth of the calls that neither laws nor trees were fitted on, of those above 20 us",
        _BY_SCRIPT,
    ),
    "misaligned_tflops": (
        f"heads of odd vocabularies in {_PROFILES} (GPT-2, Granite, Whisper; BERT), by the number of elements "
        "that rows are aligned to",
        _BY_HAND,
    ),
    "transfer": (
        "copies between host and device: share of the PCIe bandwidth that pinned and pageable memory reach; only one "
        "was measured (250 kB from pageable memory in 23 us, calibration/aten_training_h200.jsonl.xz)",
        "assumed",
    ),
}
CONVOLUTION = {"fixed_us": 2.0, "bytes": 3_800_000, "elements": 1_000_000_000}  # a roofline: trees do the rest
FEWEST, FEWEST_FOR_TREES = 8, 40  # calls of a family
# Sampled again: there with the time of a fill, or of a host that was late.
REPLACED = ("convolution", "native_batch_norm", "_foreach", "mm", "addmm", "bmm", "_grouped_mm", "sdpa", "index_add",
            "scatter_add", "index_put")  # fmt: skip
UNARY = {"silu", "gelu", "gelu_tanh", "neg", "pow", "rsqrt", "tanh", "relu", "sigmoid", "exp", "mul_scalar"}


def tensor(shape: Iterable[int], dtype: str, strides: Iterable[int] | None = None) -> Tensor:
    shape = tuple(shape)
    dense = tuple(math.prod(shape[index + 1 :]) for index in range(len(shape)))
    return Tensor(shape, dtype, dense if strides is None else tuple(strides), SIZES[dtype])


def moved_heads(shape: list[int], dtype: str, width: int | None = None) -> Tensor:
    """(batch, heads, sequence, size) that lie in memory as (batch, sequence, heads, size)."""
    _, a, s, d = shape
    whole = width or d
    return tensor(shape, dtype, (s * a * whole, whole, a * whole, 1))


def recorded(row: dict[str, Any]) -> Op | None:
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
        return Op(f"aten.{op}.List", (one,) * (lists * row["tensors"]), outputs, "forward", allocates=True)
    x = tensor(shape, dtype)
    name = f"aten.{op}.default"

    def made(*inputs: Tensor, out: Tensor | tuple[Tensor, ...] = x, options: tuple[str, ...] = ()) -> Op:
        return Op(
            name,
            inputs,
            out if isinstance(out, tuple) and not isinstance(out, Tensor) else (out,),
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


def _pointwise(row: dict[str, Any], x: Tensor, made: Any) -> Op:
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


def _copy(row: dict[str, Any], x: Tensor, made: Any) -> Op:
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


def _rest(row: dict[str, Any]) -> Tensor:
    shape, dtype, layout = row["shape"], row["dtype"], row.get("layout", "")
    if layout == "all":
        return tensor((), dtype)
    if layout == "columns":
        return tensor(shape[1:], dtype)
    if layout == "over broadcast heads":
        return tensor((shape[0], 1, *shape[2:]), dtype)
    return tensor((*shape[:-1], 1), dtype)


def _indexed(row: dict[str, Any], x: Tensor, made: Any) -> Op | None:
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
    return None


class Call(NamedTuple):
    """One sampled call: what it does, how long it took, and whether it is held apart from fitting."""

    works: list[Work]
    us: float
    held: bool
    label: str


def is_held_out(key: object) -> bool:
    return hashlib.sha256(repr(key).encode()).digest()[0] < 51


def calls() -> list[Call]:
    """All samples; a convolution is held apart together with its gradients."""
    found = []
    with lzma.open(HERE / "aten_h200.jsonl.xz", "rt") as file:
        older = [json.loads(line) for line in file][1:]
    for row in older:
        op = None if row["op"].startswith(REPLACED) else recorded(row)
        if op is not None:
            key = json.dumps(row, sort_keys=True)
            found.append(Call(works_of(op), max(row["us"] - ISOLATION_US, 1.0), is_held_out(key), op.name))
    for row in training_rows():
        if row["family"] == "transfer" or (row["family"] == "attention" and len(row["ops"]) > 1):
            continue  # a mask that is converted first
        ops = operators_of(row)
        backward = ops[0].name.startswith("aten.convolution_backward")
        key = ops[0].inputs[1:3] if backward else ops[0].inputs[:2] if row["family"] == "convolution" else ops
        works = [work for op in ops for work in works_of(op)]
        found.append(Call(works, max(row["us"] - ISOLATION_US, 1.0), is_held_out(key), ops[-1].name))
    return found + bias_gradients()


def bias_gradients() -> list[Call]:
    """Sums over the rows of matrices in profiled steps, which are longer and narrower than those sampled."""
    found = []
    for name in ("architectures_h200", "architectures_blind_h200"):
        with lzma.open(HERE / f"{name}.json.xz", "rt") as file:
            models = json.load(file)["results"]
        for row in (row for model in models for row in model.get("operators", ())):
            shape = json.loads(row["shapes"])[0] if row["op"] == "aten::sum" else ()
            if len(shape) == 2 and shape[0] > 64 * shape[1] ** 0.5:
                op = Op("aten.sum.dim_IntList", (tensor(shape, "bf16"),), (tensor((1, shape[1]), "bf16"),), "")
                found.append(Call(works_of(op), row["us"] / row["calls"], is_held_out(shape), op.name))
    return found


def fit(rows: list[tuple[Work, float]]) -> dict[str, float]:
    """Fixed time, two rates and the time of a serial step, by search on a grid that is refined."""
    size = np.array([[w.bytes, w.elements, w.serial] for w, _ in rows])
    us = np.array([us for _, us in rows])
    large = us >= np.quantile(us, 0.5)
    start = [
        max(0.3, float(np.quantile(us, 0.03)) * 0.8),
        *(max(1.0, float(np.quantile(size[large, i] / us[large], 0.8))) for i in (0, 1)),
        float(np.quantile(us / np.maximum(size[:, 2], 1e-9), 0.2)) if size[:, 2].any() else 0.0,
    ]

    def error(values: list[float]) -> float:
        fixed, by_bytes, by_elements, serial = values
        found = fixed + np.maximum(np.maximum(size[:, 0] / by_bytes, size[:, 1] / by_elements), size[:, 2] * serial)
        return float(np.abs(np.log(found / us)).mean())

    best, values, width = error(start), start, 2.0
    while width > 1.004:
        moved = False
        for index in range(4):
            for factor in (width, 1 / width):
                tried = [v * factor if i == index else v for i, v in enumerate(values)]
                if (found := error(tried)) < best:
                    best, values, moved = found, tried, True
        width = width if moved else width**0.6
    law = {"fixed_us": round(values[0], 2), "bytes": round(values[1]), "elements": round(values[2])}
    return law | ({"serial_us": float(f"{values[3]:.3g}")} if values[3] else {})


class Model:
    """Laws and trees, fitted on calls: `us` is the time of a call alone."""

    def __init__(self, fitted_on: list[Call], with_trees: bool = True) -> None:
        self.costs = cost_model("h200")
        alone: dict[str, list[tuple[Work, float]]] = defaultdict(list)
        for call in fitted_on:
            if len(call.works) == 1 and call.works[0].operator is None:
                alone[call.works[0].family].append((call.works[0], call.us))
        self.laws = {name: fit(rows) for name, rows in sorted(alone.items()) if len(rows) >= FEWEST}
        self.laws |= {"convolution": CONVOLUTION}
        self.laws["index_put"]["serial_us"] = 2.0
        self.laws["pointwise.transposed"] = self.laws["pointwise.strided"] | {"elements": 200_000}
        self.laws |= {name: fit(rows) for name, rows in self.never_alone(fitted_on).items() if len(rows) >= FEWEST}
        self.trees: dict[str, Regressor] = {}
        for family, rows in sorted(self.residuals(fitted_on).items()) if with_trees else ():
            if len(rows) >= FEWEST_FOR_TREES and trees_help(rows):
                features, target = arrays(rows)
                self.trees[family] = Regressor(grown(features, target), 0.0, len(rows))

    def never_alone(self, some: list[Call]) -> dict[str, list[tuple[Work, float]]]:
        """Works without a law, each with the time that others of its call leave it."""
        found: dict[str, list[tuple[Work, float]]] = defaultdict(list)
        for call in some:
            new = [work for work in call.works if work.operator is None and work.family not in self.laws]
            if len(new) == 1:
                rest = sum(self.base_us(work) for work in call.works if work is not new[0])
                found[new[0].family].append((new[0], max(1.0, call.us - rest)))
        return found

    def base_us(self, work: Work) -> float:
        by_law = 0.0
        if work.operator is None or work.family in self.laws:
            by_law = isolated_us(work, self.laws)
        if work.operator is None:
            return by_law
        return max(by_law, self.costs.us(work.operator) - self.costs.isolation_us, 1.0)

    def us(self, work: Work) -> float:
        trees = self.trees.get(work.family) if work.features else None
        factor = 1.0 if trees is None else math.exp(float(trees.trees(np.array([work.features]))[0]))
        return self.base_us(work) * factor

    def residuals(self, some: list[Call]) -> dict[str, list[Residual]]:
        """Measured over modelled time, by family, of calls in which one work has features or is all there is."""
        found: dict[str, list[Residual]] = defaultdict(list)
        for call in some:
            marked = [work for work in call.works if work.features]
            if len(marked) == 1:
                rest = sum(self.base_us(work) for work in call.works if work is not marked[0])
                if call.us > 1.5 * rest:
                    ratio = (call.us - rest) / self.base_us(marked[0])
                    found[marked[0].family].append((marked[0].features, math.log(ratio)))
        return found


Residual = tuple[tuple[float, ...], float]


def arrays(rows: list[Residual]) -> tuple[Any, Any]:
    return np.array([features for features, _ in rows], np.float64), np.array([target for _, target in rows])


def grown(features: Any, target: Any) -> Any:
    return grow(features, target, rounds=120 if len(target) < 600 else 320, leaves=12 if len(target) < 300 else 24)


def trees_help(rows: list[Residual]) -> bool:
    """Whether trees lower the error of what they were not grown on by a tenth at least."""
    features, target = arrays(rows)
    fold, before, after = np.random.default_rng(0).integers(0, 4, len(rows)), [], []
    for held in (fold == index for index in range(4)):
        found = grown(features[~held], target[~held])(features[held])
        before += list(np.abs(np.exp(-target[held]) - 1))
        after += list(np.abs(np.exp(found - target[held]) - 1))
    return float(np.mean(after)) < 0.9 * float(np.mean(before))


def errors_of(model: Model, some: list[Call]) -> dict[str, list[float]]:
    """Relative errors of calls above 20 us by their families."""
    found: dict[str, list[float]] = defaultdict(list)
    for call in some:
        if call.us > 20:
            names = sorted({work.family for work in call.works if work.features or len(call.works) == 1})
            us = sum(model.us(work) for work in call.works)
            found["+".join(names) or call.label].append(us / call.us - 1)
    return found


def derived_laws() -> dict[str, dict[str, float]]:
    """The laws of all families, without the trees that correct them, which take a minute."""
    return Model(calls(), with_trees=False).laws | COMPILED


def main() -> None:
    everything = calls()
    judged = Model([call for call in everything if not call.held])
    errors, held = errors_of(judged, [call for call in everything if call.held]), {}
    for name, found in sorted(errors.items()):
        sizes = [100 * abs(error) for error in found]
        held[name] = round(statistics.mean(sizes), 1)
        how = "trees" if name in judged.trees else "law"
        print(f"{name:34s} {how:5s} held out {len(found):4d}: mean {held[name]:6.1f} %, median "
              f"{statistics.median(sizes):5.1f} %, bias {100 * statistics.median(found):+6.1f} %")  # fmt: skip
    shipped = Model(everything)
    today = str(date.today())
    sources = {key: {"source": text, "script": script, "date": today} for key, (text, script) in SOURCES.items()}
    held = {name: error for name, error in held.items() if name in shipped.laws or name in shipped.trees}
    table = {"gpu": "h200", "families": shipped.laws | COMPILED, "transfer": TRANSFER,
             "misaligned_tflops": MISALIGNED,
             "held_out_error_pct": held, "sources": sources}  # fmt: skip
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    trees = {name: replace(one, error_pct=held.get(name, 0.0)) for name, one in shipped.trees.items()}
    TREES.write_bytes(encode("h200", trees))


if __name__ == "__main__":
    main()
