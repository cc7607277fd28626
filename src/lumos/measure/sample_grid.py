"""The sample grid: which operators and collectives `lumos sample` measures, at which shapes.

The shapes are drawn from the values in data/sample_grid.toml, with some odd ones among them. A fixed seed shuffles the
order and spreads every operator over all of it: a run that stops early leaves a smaller grid, not a lopsided one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

from lumos.data_files import read_table

Row = dict[str, int | str]
"""An operator: {"op": "gemm", "m": 4096, "n": 4096, "k": 1024, "layout": "TN", "dtype": "bf16"}."""

_GRID = read_table("sample_grid.toml")
_LAYOUTS = ("TN", "NN", "NT")
_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4, "fp8": 1}
_SLOWER = {"fp32": 16.0, "tf32": 2.0, "fp8": 0.5}  # matmuls, compared with bf16

COUNTS: dict[str, int] = _GRID["counts"]
"""How many shapes of each operator; `:dtype` where it is not bf16."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
COLLECTIVE_BYTES = tuple(1 << power for power in range(10, 31))  # 1 KiB to 1 GiB


def rows(scale: float = 1.0, only: frozenset[str] = frozenset(), seed: int = 0) -> list[Row]:
    """The rows to sample, `scale` times as many as usual, in the order in which they are measured."""
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


def collective_rows(
    gpus: int, sizes: Iterable[int] = COLLECTIVE_BYTES, only: frozenset[str] = frozenset(COLLECTIVES)
) -> list[Row]:
    """The collectives to sample on a machine: among all its GPUs, and among every power of two below."""
    groups = sorted({gpus, *(1 << power for power in range(1, gpus.bit_length()) if 1 << power <= gpus)} - {0, 1})
    return [
        {"op": name, "bytes": size, "ranks": ranks}
        for ranks in groups
        for size in sizes
        for name in COLLECTIVES
        if name in only and (name != "p2p" or ranks == 2)
    ]


def _distinct(operator: str, dtype: str, wanted: int, draw: random.Random) -> Iterator[Row]:
    seen: set[tuple[tuple[str, int | str], ...]] = set()
    for _ in range(20 * wanted):
        row: Row = {"op": operator, **_SHAPES.get(operator, _plane)(draw), "dtype": dtype}
        key = tuple(sorted(row.items()))
        if key not in seen and _affordable(row):
            seen.add(key)
            yield row
            if len(seen) == wanted:
                return


def _affordable(row: Row) -> bool:
    """Whether one call fits into the memory and into a few milliseconds of a GPU."""
    operator, dtype = str(row["op"]), str(row["dtype"])
    size, most_flops, most_bytes = _ELEMENT_BYTES[dtype], _GRID["most_flops"], _GRID["most_bytes"]
    n = {key: value for key, value in row.items() if isinstance(value, int)}
    if operator == "gemm":
        if dtype == "fp8" and any(n[key] % 16 for key in "mnk"):
            return False
        operands = n["m"] * n["k"] + n["n"] * n["k"] + n["m"] * n["n"]
        flops = 2 * n["m"] * n["n"] * n["k"] * _SLOWER.get(dtype, 1)
        return bool(flops < most_flops and operands * size < most_bytes)
    if operator.startswith("sdpa"):
        return bool(4 * n["b"] * n["h"] * n["s"] ** 2 * n["d"] < most_flops / 4 and n["b"] * n["s"] <= 131072)
    if "cross_entropy" in operator:
        return bool(n["t"] * n["v"] * size < most_bytes / 6)
    if "softmax" in operator:
        return bool(n["b"] * n["h"] * n["s"] ** 2 * size < most_bytes / 6)
    return bool("t" not in n or "h" not in n or n["t"] * n["h"] * 4 < most_bytes / 6)


def _tokens(draw: random.Random) -> int:
    return int(draw.choice(_GRID["tokens"]) if draw.random() < 0.75 else 64 * round(2 ** draw.uniform(1, 9)))


def _width(draw: random.Random) -> int:
    if draw.random() < 0.8:
        return int(draw.choice(_GRID["widths"]) // draw.choice(_GRID["splits"]))
    return 8 * round(2 ** draw.uniform(4, 11.5))


def _gemm(draw: random.Random) -> Row:
    """The matmul of a linear layer, or of one of its gradients, whole or split by tensor parallelism."""
    layout = draw.choice(_LAYOUTS)
    inner = draw.choice(_GRID["widths"])
    if draw.random() < 0.06:
        outer, split = draw.choice(_GRID["vocabularies"]), draw.choice(_GRID["splits"])
    else:
        outer, split = round(inner * draw.choice(_GRID["width_factors"]) / 64) * 64, draw.choice(_GRID["splits"])
    if draw.random() < 0.5:
        outer = max(64, outer // split)
    else:
        inner = max(64, inner // split)
    if draw.random() < 0.2:
        inner, outer = _width(draw), _width(draw)
    tokens = _tokens(draw)
    if draw.random() < 0.5:
        inner, outer = outer, inner
    m, n, k = {"TN": (tokens, outer, inner), "NN": (tokens, inner, outer), "NT": (outer, inner, tokens)}[layout]
    return {"m": m, "n": n, "k": k, "layout": layout}


def _heads(draw: random.Random) -> Row:
    seq, head = draw.choice(_GRID["sequences"]), draw.choice(_GRID["head_sizes"])
    return {"b": draw.choice(_GRID["batches"]), "h": draw.choice(_GRID["heads"]), "s": seq, "d": head}


def _unfused(draw: random.Random) -> Row:
    return _heads(draw) | {"s": draw.choice(_GRID["unfused_sequences"])}


def _plane(draw: random.Random) -> Row:
    tokens = _tokens(draw)
    return {"t": tokens, "h": draw.choice(_GRID["widths"]) if draw.random() < 0.75 else _width(draw)}


def _logits(draw: random.Random) -> Row:
    return {"t": _tokens(draw), "v": draw.choice(_GRID["vocabularies"]) // draw.choice(_GRID["vocabulary_splits"])}


def _lookup(draw: random.Random) -> Row:
    return {"t": _tokens(draw), "v": draw.choice(_GRID["vocabularies"]), "h": draw.choice(_GRID["widths"])}


def _parameters(draw: random.Random) -> Row:
    return {"n": round(2 ** draw.uniform(14, 31))}


def _experts(draw: random.Random) -> Row:
    width = draw.choice(_GRID["expert_hidden"])
    ffn = draw.choice(_GRID["expert_ffn"]) // draw.choice(_GRID["expert_splits"])
    return {"e": draw.choice(_GRID["experts"]), "t": _tokens(draw), "n": ffn, "k": width}


_SHAPES: dict[str, Callable[[random.Random], Row]] = {
    "gemm": _gemm, "bmm": _unfused, "sdpa_fwd": _heads, "sdpa_bwd": _heads, "rotary_fwd": _unfused,
    "rotary_bwd": _unfused, "softmax_fwd": _unfused, "softmax_bwd": _unfused, "cross_entropy": _logits,
    "cross_entropy_bwd": _logits, "embedding": _lookup, "embedding_bwd": _lookup, "adamw_fused": _parameters,
    "grouped_gemm": _experts,
}  # fmt: skip
"""How shapes are drawn; operators that are not listed work on a (tokens, width) tensor."""
