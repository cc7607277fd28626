"""Rows of aten_training_h200.jsonl.xz as the operators that a dry run records."""

from __future__ import annotations

import json
import lzma
import math
import re
from pathlib import Path
from typing import Any

from lumos.program.op import Op, Tensor

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4, "fp64": 8, "int64": 8, "int32": 4, "bool": 1, "uint8": 1}
_TENSOR = re.compile(r"(\w+)\[([\d,]*)\](?:\(([\d,]*)\))?")
_VIEWS = ("aten.slice.", "aten.unsqueeze", "aten.squeeze", "aten.split", "aten.as_strided", "aten.empty")
_BY_DIMENSION = ("cumsum", "cumprod", "sort", "topk", "_softmax")


def tensor(text: str) -> Tensor:
    """`bf16[64,3](1,64)` is a tensor of 64 × 3 with these strides; without them it is contiguous."""
    found = _TENSOR.match(text)
    assert found is not None, text
    dtype, shape = found[1], tuple(int(size) for size in found[2].split(",") if size)
    dense = tuple(math.prod(shape[index + 1 :]) for index in range(len(shape)))
    return Tensor(shape, dtype, tuple(map(int, found[3].split(","))) if found[3] else dense, SIZES[dtype])


def options_of(op: dict[str, Any], row: dict[str, Any]) -> tuple[str, ...]:
    """What a dry run notes of arguments that are not tensors."""
    name, args, found = op["name"].split(".")[1], op["args"], []
    if name.startswith("convolution"):
        backward = name.endswith("backward")
        found += ["tf32"] + ["transposed"] * bool(args[7 if backward else 6])
        found += ["mask=" + "".join(str(int(wanted)) for wanted in args[-1])] if backward else []
    if row.get("tf32"):
        found.append("tf32")
    if name == "index_put_" and args[-1] is True:
        found.append("accumulate")
    if name.startswith(("max_pool", "avg_pool")):
        found.append(f"kernel={next(arg for arg in args if isinstance(arg, list))[0]}")
    if name in _BY_DIMENSION:
        numbers = [arg for arg in args[1:] if isinstance(arg, int) and not isinstance(arg, bool)]
        if name == "topk":
            found.append(f"k={numbers.pop(0)}")
        found.append(f"dim={numbers[0] if numbers else -1}")
    return tuple(found)


def operators_of(row: dict[str, Any]) -> list[Op]:
    """The operators of one call; views are left out."""
    if row["family"] == "attention":
        q, k = tensor(row["q"]), tensor(row["k"])
        options = tuple(name for name in ("causal", "masked", "dropout") if row[name])
        return [Op(f"attention.{row['pass']}", (q, k, k), (q,), "", allocates=True, options=options)]
    if row["ops"][-1]["name"].startswith("aten.cudnn_batch_norm_backward"):
        row = row | {"ops": row["ops"][-1:]}  # it copies a small buffer first
    return [
        Op(op["name"], tuple(map(tensor, op["inputs"])), tuple(map(tensor, op["outputs"])), "", allocates=True,
                   options=options_of(op, row))
        for op in row["ops"] if not op["name"].startswith(_VIEWS)
    ]  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Every sampled call."""
    with lzma.open(Path(__file__).parent / "aten_training_h200.jsonl.xz", "rt") as file:
        return [json.loads(line) for line in file][1:]
