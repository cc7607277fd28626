"""The sample grid: which operators, collectives and small sections `lumos sample` measures, at which shapes.

The shapes are drawn from the values in data/sample_grid.json, with some odd ones among them; a CPU has smaller ones. A
fixed seed shuffles the order and spreads every operator evenly over it, matmuls over all of it and the others over its
beginning: a run that stops early leaves a smaller grid, not a lopsided one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from lumos.data_files import read_table
from lumos.dtypes import BYTES

Row = dict[str, Any]
"""An operator: {"op": "gemm", "m": 4096, "n": 4096, "k": 1024, "layout": "TN", "dtype": "bf16"}."""
Grid = dict[str, Any]

_EARLY = 0.6  # of the order, in which all operators but the one with most rows are done: they gain more by each row
_LAYOUTS = ("TN", "NN", "NT")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
HOST = ("forward", "backward", "optimizer")
PROFILER = (
    "operator", "call", "kernel", "step_fresh", "step_recorded", "step_recorded_no_shapes", "step_stopped",
)  # fmt: skip
SECTIONS = ("host", "step", "power", "profiler")
"""Small sections: a minute or two together."""


def grid_of(device: str) -> Grid:
    """The values of data/sample_grid.json for "cuda" or "cpu"."""
    found: Grid = read_table("sample_grid.json")[device]
    return found


def operators_of(device: str) -> list[str]:
    """The names of the operators that are sampled."""
    return sorted({_operator_of(key) for key in grid_of(device)["counts"]})


def _operator_of(key: str) -> str:
    """The operator of a key of the counts: of "gemm/head:bf16" it is gemm."""
    return key.partition(":")[0].partition("/")[0]


def rows(scale: float = 1.0, only: frozenset[str] = frozenset(), seed: int = 0, device: str = "cuda") -> list[Row]:
    """The operators to sample, `scale` times as many as usual, in the order in which they are measured."""
    placed: list[tuple[float, Row]] = []
    grid = grid_of(device)
    for key, count in grid["counts"].items():
        kind, _, dtype = key.partition(":")
        if only and _operator_of(key) not in only:
            continue
        draw = random.Random(f"{seed}:{key}")
        wanted, pace = max(1, round(count * scale)), 1.0 if key == grid["most_rows"] else _EARLY
        for place, row in enumerate(_distinct(grid, kind, dtype or "bf16", wanted, draw)):
            placed.append((pace * (place + draw.random()) / wanted, row))
    return [row for _, row in sorted(placed, key=lambda item: item[0])]


def section_rows(device: str, only: frozenset[str] = frozenset()) -> list[Row]:
    """The rows of the small sections: host, power, whole steps, profiler."""
    grid, has_kernels = grid_of(device), device == "cuda"
    found = {
        "host": [{"what": what} | grid["host"] for what in HOST],
        "step": grid["steps"],
        "power": grid["power"],
        "profiler": [{"what": what} for what in PROFILER if has_kernels or what not in ("call", "kernel")],
    }
    return [{"op": name} | row for name in SECTIONS if not only or name in only for row in found[name]]


class Layout(NamedTuple):
    """Which GPUs do a collective: `groups` groups at the same moment, of `ranks` GPUs on `nodes` nodes each."""

    ranks: int
    nodes: int = 1
    groups: int = 1

    def members(self, nodes: int, per_node: int) -> list[list[int]]:
        """The ranks of every group on a machine of `nodes` nodes; those of a node have successive numbers."""
        each = self.ranks // self.nodes
        found = [
            [node * per_node + slot * each + i for node in range(begin, begin + self.nodes) for i in range(each)]
            for begin in range(0, nodes - self.nodes + 1, self.nodes)
            for slot in range(per_node // each)
        ]
        return found[: self.groups]


def layout_of(row: Row) -> Layout:
    """The layout that a row of collectives was measured with."""
    return Layout(row["ranks"], row.get("nodes", 1), row.get("groups", 1))


def layouts(nodes: int, per_node: int) -> list[Layout]:
    """Groups inside a node, one GPU a node across nodes, and whole nodes; each alone, and all of a kind at once."""
    shapes = [(1, each) for each in _doubling(per_node)]
    shapes += [(count, each) for each in sorted({1, per_node}) for count in _doubling(nodes)]
    found = []
    for count, each in shapes:
        most = (nodes // count) * (per_node // each)
        found += [Layout(count * each, count, groups) for groups in sorted({1, most})]
    return found


def _doubling(most: int) -> list[int]:
    """2, 4, 8 … up to `most`, and `most` itself."""
    return sorted({most, *(1 << power for power in range(1, most.bit_length()) if 1 << power <= most)} - {0, 1})


def collective_rows(
    per_node: int,
    nodes: int = 1,
    sizes: Iterable[int] = (),
    only: frozenset[str] = frozenset(COLLECTIVES),
    device: str = "cuda",
) -> list[Row]:
    """The collectives to sample on a machine: every second size first, so that half of the rows have all layouts."""
    least, most = grid_of(device)["collective_bytes"]
    wanted = list(sizes) or [1 << power for power in range(least, most + 1)]
    return [
        {"op": name, "bytes": size, "ranks": layout.ranks, **_unless_one(nodes=layout.nodes, groups=layout.groups)}
        for part in (wanted[::2], wanted[1::2])
        for layout in layouts(nodes, per_node)
        for size in part
        for name in COLLECTIVES
        if name in only and (name != "p2p" or layout.ranks == 2)
    ]


def _unless_one(**values: int) -> Row:
    return {name: value for name, value in values.items() if value != 1}


def _distinct(grid: Grid, kind: str, dtype: str, wanted: int, draw: random.Random) -> Iterator[Row]:
    seen: set[tuple[tuple[str, int | str], ...]] = set()
    for _ in range(20 * wanted):
        row: Row = {"op": _operator_of(kind), **_SHAPES.get(kind, _plane)(grid, draw), "dtype": dtype}
        key = tuple(sorted(row.items()))
        if key not in seen and _affordable(grid, row):
            seen.add(key)
            yield row
            if len(seen) == wanted:
                return


def _affordable(grid: Grid, row: Row) -> bool:
    """Whether one call fits into the memory and into a few milliseconds of a GPU."""
    operator, dtype = str(row["op"]), str(row["dtype"])
    size, most_flops, most_bytes = BYTES[dtype], grid["most_flops"], grid["most_bytes"]
    n = {key: value for key, value in row.items() if isinstance(value, int)}
    if operator == "gemm":
        if dtype == "fp8" and any(n[key] % 16 for key in "mnk"):
            return False
        operands = n["m"] * n["k"] + n["n"] * n["k"] + n["m"] * n["n"]
        flops = 2 * n["m"] * n["n"] * n["k"] * grid["slower"].get(dtype, 1)
        return bool(flops < most_flops and operands * size < most_bytes)
    if operator.startswith("sdpa"):
        return bool(4 * n["b"] * n["h"] * n["s"] ** 2 * n["d"] < most_flops / 4 and n["b"] * n["s"] <= 131072)
    if "cross_entropy" in operator:
        return bool(n["t"] * n["v"] * size < most_bytes / 6)
    if "softmax" in operator:
        return bool(n["b"] * n["h"] * n["s"] ** 2 * size < most_bytes / 6)
    return bool("t" not in n or "h" not in n or n["t"] * n["h"] * 4 < most_bytes / 6)


def _tokens(grid: Grid, draw: random.Random) -> int:
    return int(draw.choice(grid["tokens"])) if draw.random() < 0.75 else _odd(grid["odd_tokens"], draw)


def _width(grid: Grid, draw: random.Random) -> int:
    if draw.random() < 0.8:
        return int(draw.choice(grid["widths"]) // draw.choice(grid["splits"]))
    return _odd(grid["odd_widths"], draw)


def _odd(span: list[float], draw: random.Random) -> int:
    """Any multiple of the first number, small ones as likely as large ones."""
    step, least, most = span
    return int(step) * round(2 ** draw.uniform(least, most))


def _gemm(grid: Grid, draw: random.Random) -> Row:
    """The matmul of a linear layer, or of one of its gradients, whole or split by tensor parallelism."""
    layout = draw.choice(_LAYOUTS)
    inner = draw.choice(grid["widths"])
    if draw.random() < 0.06:
        outer, split = draw.choice(grid["vocabularies"]), draw.choice(grid["splits"])
    else:
        outer, split = round(inner * draw.choice(grid["width_factors"]) / 64) * 64, draw.choice(grid["splits"])
    if draw.random() < 0.5:
        outer = max(64, outer // split)
    else:
        inner = max(64, inner // split)
    if draw.random() < 0.2:
        inner, outer = _width(grid, draw), _width(grid, draw)
    tokens = _tokens(grid, draw)
    if draw.random() < 0.5:
        inner, outer = outer, inner
    return _product(layout, tokens, outer, inner)


def _product(layout: str, tokens: int, outer: int, inner: int) -> Row:
    """A linear layer (TN), the gradient of its input (NN), or that of its weight (NT)."""
    m, n, k = {"TN": (tokens, outer, inner), "NN": (tokens, inner, outer), "NT": (outer, inner, tokens)}[layout]
    return {"m": m, "n": n, "k": k, "layout": layout}


def _head(grid: Grid, draw: random.Random) -> Row:
    """The output layer: few shapes of all, but each costs as much as several layers."""
    vocabulary = draw.choice(grid["odd_vocabularies" if draw.random() < 0.5 else "vocabularies"])
    return _product(draw.choice(_LAYOUTS), _tokens(grid, draw), vocabulary, draw.choice(grid["widths"]))


def _heads(grid: Grid, draw: random.Random) -> Row:
    seq, head = draw.choice(grid["sequences"]), draw.choice(grid["head_sizes"])
    return {"b": draw.choice(grid["batches"]), "h": draw.choice(grid["heads"]), "s": seq, "d": head}


def _unfused(grid: Grid, draw: random.Random) -> Row:
    return _heads(grid, draw) | {"s": draw.choice(grid["unfused_sequences"])}


def _plane(grid: Grid, draw: random.Random) -> Row:
    tokens = _tokens(grid, draw)
    return {"t": tokens, "h": draw.choice(grid["widths"]) if draw.random() < 0.75 else _width(grid, draw)}


def _logits(grid: Grid, draw: random.Random) -> Row:
    return {"t": _tokens(grid, draw), "v": draw.choice(grid["vocabularies"]) // draw.choice(grid["vocabulary_splits"])}


def _lookup(grid: Grid, draw: random.Random) -> Row:
    return {"t": _tokens(grid, draw), "v": draw.choice(grid["vocabularies"]), "h": draw.choice(grid["widths"])}


def _parameters(grid: Grid, draw: random.Random) -> Row:
    return {"n": round(2 ** draw.uniform(*grid["parameters"]))}


def _experts(grid: Grid, draw: random.Random) -> Row:
    width = draw.choice(grid["expert_hidden"])
    ffn = draw.choice(grid["expert_ffn"]) // draw.choice(grid["expert_splits"])
    return {"e": draw.choice(grid["experts"]), "t": _tokens(grid, draw), "n": ffn, "k": width}


_SHAPES: dict[str, Callable[[Grid, random.Random], Row]] = {
    "gemm": _gemm, "gemm/head": _head, "bmm": _unfused, "sdpa_fwd": _heads, "sdpa_bwd": _heads, "rotary_fwd": _unfused,
    "rotary_bwd": _unfused, "softmax_fwd": _unfused, "softmax_bwd": _unfused, "cross_entropy": _logits,
    "cross_entropy_bwd": _logits, "embedding": _lookup, "embedding_bwd": _lookup, "adamw_fused": _parameters,
    "grouped_gemm": _experts,
}  # fmt: skip
"""How shapes are drawn; operators that are not listed work on a (tokens, width) tensor."""
