"""Grid: which operators are sampled, and at which shapes.

The shapes follow what decoders of 0.1 to 400 billion parameters run on one rank of 1 to 16, with odd ones strewn in.
The order is shuffled by a fixed seed, every operator spread over the whole: a run that stops early is a smaller grid,
not a lopsided one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

Row = dict[str, int | str]

_TOKENS = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
_WIDTHS = (
    512, 640, 768, 896, 1024, 1152, 1280, 1536, 1664, 1792, 2048, 2304, 2560, 3072, 3584, 4096, 4608, 5120, 5376, 6144,
    6656, 7168, 8192, 9216, 10240, 12288, 14336, 16384, 18432, 20480,
)  # fmt: skip
_FACTORS = (1.0, 1.0, 1.25, 1.5, 2.0, 2.6875, 2.75, 3.0, 3.5, 4.0)  # output width over input width, before splitting
_SPLITS = (1, 1, 1, 2, 4, 8)
_VOCABULARIES = (8000, 16000, 24000, 32000, 50257, 50304, 51200, 64000, 100352, 128256, 131072, 151936, 152064)
_LAYOUTS = ("TN", "NN", "NT")
_MOST_FLOPS = 1.2e13  # about 17 ms on an H200
_MOST_BYTES = 24e9
_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4, "fp8": 1}

COUNTS = {
    "gemm": 12000, "gemm:fp16": 500, "gemm:tf32": 400, "gemm:fp32": 250, "gemm:fp8": 1500, "bmm": 500,
    "sdpa_fwd": 1100, "sdpa_bwd": 1100, "rms_norm": 300, "layer_norm": 300, "gelu": 250, "silu": 250, "mul": 250,
    "add": 250, "cast_f32": 250, "copy": 150, "rms_norm_bwd": 250, "layer_norm_bwd": 250, "gelu_bwd": 200,
    "silu_bwd": 200, "norm_eager_fwd": 250, "norm_eager_bwd": 250, "rotary_fwd": 250, "rotary_bwd": 250,
    "softmax_fwd": 200, "softmax_bwd": 200, "cross_entropy": 300, "cross_entropy:fp32": 250, "cross_entropy_bwd": 200,
    "cross_entropy_bwd:fp32": 200, "embedding": 250, "embedding_bwd": 200, "adamw_fused": 150, "adamw_fused:fp32": 100,
    "grouped_gemm": 250, "permute": 150,
}  # fmt: skip
"""How many shapes of each operator; `:dtype` where it is not bf16."""


def rows(scale: float = 1.0, only: frozenset[str] = frozenset(), seed: int = 0) -> list[Row]:
    """The rows to sample, `scale` times as many as usual, in the order they are measured."""
    placed: list[tuple[float, Row]] = []
    for key, count in COUNTS.items():
        operator, _, dtype = key.partition(":")
        if only and operator not in only:
            continue
        draw = random.Random(f"{seed}:{key}")
        wanted = max(1, round(count * scale))
        for place, row in enumerate(_distinct(operator, dtype or "bf16", wanted, draw)):
            placed.append(((place + draw.random()) / wanted, row))
    return [row for _, row in sorted(placed, key=lambda item: item[0])]


def _distinct(operator: str, dtype: str, wanted: int, draw: random.Random) -> Iterator[Row]:
    seen: set[tuple[tuple[str, int | str], ...]] = set()
    for _ in range(20 * wanted):
        row: Row = {"op": operator, **_SHAPES[operator](draw), "dtype": dtype}
        key = tuple(sorted(row.items()))
        if key not in seen and _affordable(row):
            seen.add(key)
            yield row
            if len(seen) == wanted:
                return


def _affordable(row: Row) -> bool:
    size = _SIZES[str(row["dtype"])]
    n = {key: value for key, value in row.items() if isinstance(value, int)}
    if row["op"] == "gemm":
        slow = {"fp32": 16, "tf32": 2, "fp8": 0.5}.get(str(row["dtype"]), 1)
        if row["dtype"] == "fp8" and (n["n"] % 16 or n["k"] % 16 or n["m"] % 16):
            return False
        operands = n["m"] * n["k"] + n["n"] * n["k"] + n["m"] * n["n"]
        return 2 * n["m"] * n["n"] * n["k"] * slow < _MOST_FLOPS and operands * size < _MOST_BYTES
    if str(row["op"]).startswith("sdpa"):
        return 4 * n["b"] * n["h"] * n["s"] ** 2 * n["d"] < _MOST_FLOPS / 4 and n["b"] * n["s"] <= 131072
    if "cross_entropy" in str(row["op"]):
        return n["t"] * n["v"] * size < _MOST_BYTES / 6
    if "softmax" in str(row["op"]):
        return n["b"] * n["h"] * n["s"] ** 2 * size < _MOST_BYTES / 6
    if "t" in n and "h" in n:
        return n["t"] * n["h"] * 4 < _MOST_BYTES / 6
    return True


def _tokens(draw: random.Random) -> int:
    if draw.random() < 0.75:
        return draw.choice(_TOKENS)
    return 64 * round(2 ** draw.uniform(1, 9))


def _width(draw: random.Random) -> int:
    if draw.random() < 0.8:
        return draw.choice(_WIDTHS) // draw.choice(_SPLITS)
    return 8 * round(2 ** draw.uniform(4, 11.5))


def _gemm(draw: random.Random) -> Row:
    layout = draw.choice(_LAYOUTS)
    inner = draw.choice(_WIDTHS)
    if draw.random() < 0.06:
        outer, split = draw.choice(_VOCABULARIES), draw.choice(_SPLITS)
    else:
        outer, split = round(inner * draw.choice(_FACTORS) / 64) * 64, draw.choice(_SPLITS)
    if draw.random() < 0.5:
        outer = max(64, outer // split)
    else:
        inner = max(64, inner // split)
    if draw.random() < 0.2:
        inner, outer = _width(draw), _width(draw)
    tokens = _tokens(draw)
    if draw.random() < 0.5:
        inner, outer = outer, inner
    if layout == "TN":
        return {"m": tokens, "n": outer, "k": inner, "layout": layout}
    if layout == "NN":
        return {"m": tokens, "n": inner, "k": outer, "layout": layout}
    return {"m": outer, "n": inner, "k": tokens, "layout": layout}


def _heads(draw: random.Random) -> Row:
    seq = draw.choice((256, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384, 32768))
    head = draw.choice((64, 64, 80, 96, 128, 128, 128, 128))
    return {
        "b": draw.choice((1, 1, 2, 3, 4, 6, 8, 16)),
        "h": draw.choice((1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96)),
        "s": seq,
        "d": head,
    }


def _unfused(draw: random.Random) -> Row:
    row = _heads(draw)
    return row | {"s": draw.choice((256, 512, 1024, 1536, 2048, 3072, 4096))}


def _plane(draw: random.Random) -> Row:
    return {"t": _tokens(draw), "h": draw.choice(_WIDTHS) if draw.random() < 0.75 else _width(draw)}


def _logits(draw: random.Random) -> Row:
    return {"t": _tokens(draw), "v": draw.choice(_VOCABULARIES) // draw.choice((1, 1, 1, 2, 4, 8))}


def _lookup(draw: random.Random) -> Row:
    return {"t": _tokens(draw), "v": draw.choice(_VOCABULARIES), "h": draw.choice(_WIDTHS)}


def _parameters(draw: random.Random) -> Row:
    return {"n": round(2 ** draw.uniform(14, 31))}


def _experts(draw: random.Random) -> Row:
    width = draw.choice((1024, 2048, 3072, 4096, 6144, 7168))
    ffn = draw.choice((768, 1024, 1408, 1536, 2048, 4096, 14336)) // draw.choice((1, 1, 2, 4))
    return {"e": draw.choice((2, 4, 8, 16, 32, 64)), "t": _tokens(draw), "n": ffn, "k": width}


_SHAPES: dict[str, Callable[[random.Random], Row]] = {
    "gemm": _gemm, "bmm": _unfused, "sdpa_fwd": _heads, "sdpa_bwd": _heads, "rotary_fwd": _unfused,
    "rotary_bwd": _unfused, "softmax_fwd": _unfused, "softmax_bwd": _unfused, "cross_entropy": _logits,
    "cross_entropy_bwd": _logits, "embedding": _lookup, "embedding_bwd": _lookup, "adamw_fused": _parameters,
    "grouped_gemm": _experts,
    **dict.fromkeys(
        ("rms_norm", "layer_norm", "gelu", "silu", "mul", "add", "cast_f32", "copy", "rms_norm_bwd", "layer_norm_bwd",
         "gelu_bwd", "silu_bwd", "norm_eager_fwd", "norm_eager_bwd", "permute"), _plane),
}  # fmt: skip
