"""Stack: the layers that one rank runs, read off the sizes of its products and attentions in the order of their calls.

    query, key, value │ attention │ output, inward (twice if gated), down │ query, key, value │ attention │ … │ head

What lies between two attentions must be the same everywhere, but for the head where one micro-batch ends and the next
begins. A stack that does not repeat like that (experts, layers of several kinds) is not understood, and tells nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from lumos.change.infer.recorded_shapes import Dims, Op, RankOps, What


class Product(NamedTuple):
    """rows × inner times inner × columns."""

    rows: int
    inner: int
    columns: int

    @property
    def weight(self) -> tuple[int, int]:
        return self.inner, self.columns


@dataclass(frozen=True)
class Heads:
    """What one attention works on, on this rank; 0 where its sizes do not say."""

    batch: int
    seq: int
    heads: int
    dim: int


@dataclass(frozen=True)
class Layer:
    """The sizes of one layer on this rank."""

    hidden: int
    query: tuple[int, ...]  # columns of the products before the attention: query, key, value, or all in one
    attended: int  # what comes out of the attention
    ffn: int
    gated: bool


@dataclass(frozen=True)
class Stack:
    """What one rank's step says; None or 0 where it does not."""

    ops: RankOps
    attentions: int  # in the forward pass
    tokens: int  # rows of its products
    dtype: str
    heads: Heads | None
    layer: Layer | None
    vocab: int  # 0: not told
    passes: int  # micro-batches, where this rank has an end of the model; 0: not told

    @property
    def embeds(self) -> bool:
        return any(op.forward for op in self.ops.of(What.EMBEDDING))

    @property
    def loses(self) -> bool:
        return any(op.forward for op in self.ops.of(What.LOSS)) or self.vocab > 0


def read_stack(ops: RankOps) -> Stack:
    """The stack of one rank."""
    forward = [op for op in ops.of(What.PRODUCT, What.BATCHED, What.ATTENTION) if op.forward]
    attention = _attentions(forward)
    products = [(op, _product(op)) for op in forward if op.what == What.PRODUCT]
    tokens, dtype = _tokens([(op, product) for op, product in products if product is not None])
    order = [p for op in forward for p in _step(op, attention, tokens)]
    layer, head, boundaries = _parse(order)
    passes = _passes(ops, head, boundaries)
    return Stack(
        ops=ops,
        attentions=len(attention),
        tokens=tokens,
        dtype=dtype,
        heads=_heads([op for op in forward if id(op) in attention], tokens),
        layer=layer,
        vocab=_vocab(ops, head if passes else 0),
        passes=passes,
    )


def _attentions(forward: list[Op]) -> set[int]:
    """Fused attentions; where there are none, the second product of those that are not."""
    fused = {id(op) for op in forward if op.what == What.ATTENTION}
    if fused:
        return fused
    batched = [op for op in forward if op.what == What.BATCHED]
    return {id(second) for first, second in pairwise(batched) if _attends(operands(first), operands(second))}


def _attends(first: list[Dims], second: list[Dims]) -> bool:
    """[b, s, d] · [b, d, s], then [b, s, s] · [b, s, d]."""
    if len(first) < 2 or len(second) < 2 or any(len(d) != 3 for d in (*first[:2], *second[:2])):
        return False
    (b, s, d), scores, values = first[0], second[0], second[1]
    return first[1] == (b, d, s) and scores == (b, s, s) and values == (b, s, d) and s > 1 and d > 1


def operands(op: Op) -> list[Dims]:
    """The two factors: what is added or scaled stands before or after them."""
    return op.dims[1:3] if op.name.endswith(("addmm", "baddbmm")) else op.dims[:2]


def _product(op: Op) -> Product | None:
    left, right = ([*operands(op), (), ()])[:2]
    if len(left) != 2 or len(right) != 2 or left[1] != right[0]:
        return None
    return Product(*left, right[1])


def _tokens(products: list[tuple[Op, Product]]) -> tuple[int, str]:
    """The rows of the products that matter, and the type of those; (0, "") where sizes were not recorded."""
    work: Counter[int] = Counter()
    types: Counter[str] = Counter()
    for _, product in products:
        work[product.rows] += product.rows * product.inner * product.columns
    tokens = work.most_common(1)[0][0] if work else 0
    for op, product in products:
        if product.rows == tokens:
            types[op.dtype] += product.inner * product.columns
    alike = [dtype for dtype, weight in types.items() if 2 * weight > types.total()]
    return tokens, alike[0] if alike else ""


def _step(op: Op, attention: set[int], tokens: int) -> list[Product | None]:
    """An operator in the order of the stack: a product, None for an attention, nothing for what is neither."""
    if id(op) in attention:
        return [None]
    product = _product(op) if op.what == What.PRODUCT else None
    return [product] if product is not None and product.rows == tokens else []


def _parse(order: list[Product | None]) -> tuple[Layer | None, int, int]:
    """The layer, the columns of the head (0: none), and how many heads were passed."""
    parts: list[list[tuple[int, int]]] = [[]]
    for product in order:
        if product is None:
            parts.append([])
        else:
            parts[-1].append(product.weight)
    if len(parts) < 2 or not parts[0] or len(parts[-1]) < 3:
        return None, 0, 0
    found = [parsed for size in (3, 4) if (parsed := _parse_as(parts, size)) is not None]
    return found[0] if len(found) == 1 else (None, 0, 0)


def _parse_as(parts: list[list[tuple[int, int]]], size: int) -> tuple[Layer, int, int] | None:
    """The same, with so many products after the attention of a layer."""
    query, *between, last = parts
    body = last[:size]
    layer = _layer(query, body) if len(body) == size else None
    if layer is None or any(part[:size] != body or part[len(part) - len(query) :] != query for part in between):
        return None
    ends = [*(part[size : len(part) - len(query)] for part in between), last[size:]]
    heads = [end for end in ends if end]
    if not heads:
        return layer, 0, 0
    is_head = all(end == heads[0] for end in heads) and len(heads[0]) == 1 and heads[0][0][0] == layer.hidden
    return (layer, heads[0][0][1], len(heads)) if is_head else None


def _layer(query: list[tuple[int, int]], body: list[tuple[int, int]]) -> Layer | None:
    """A layer of these products, or None where they do not make one."""
    (attended, hidden), *inward, (ffn, out) = body
    columns = tuple(width for _, width in query)
    wide = [width for _, width in inward]
    fits = {hidden} == {out} | {inner for inner, _ in (*query, *inward)} and len(query) in (1, 3)
    if not fits or wide not in ([ffn], [ffn, ffn], [2 * ffn]):
        return None
    return Layer(hidden, columns, attended, ffn, wide != [ffn])


def _heads(attentions: list[Op], tokens: int) -> Heads | None:
    """What all attentions agree on."""
    found = {_heads_of(op, tokens) for op in attentions}
    return found.pop() if len(found) == 1 else None


def _heads_of(op: Op, tokens: int) -> Heads | None:
    if op.what == What.BATCHED:
        both, seq, dim = ([*operands(op), ()])[1]
        batch = tokens // seq
        return Heads(batch, seq, both // batch, dim) if batch and batch * seq == tokens and both % batch == 0 else None
    first = op.dims[0] if op.dims else ()
    if len(first) == 3:  # sequences of any length, one after another
        return Heads(0, 0, first[1], first[2])
    if len(first) != 4:
        return None
    batch, heads, seq, dim = first if op.name.startswith("aten::") else (first[0], first[2], first[1], first[3])
    return Heads(batch, seq, heads, dim)


def _vocab(ops: RankOps, head: int) -> int:
    """Columns of the loss or of the output matrix, where they do not disagree."""
    losses = {op.dims[0][-1] for op in ops.of(What.LOSS) if op.forward and op.dims and len(op.dims[0]) == 2}
    found = losses | ({head} if head else set())
    return found.pop() if len(found) == 1 else 0


def _passes(ops: RankOps, head: int, boundaries: int) -> int:
    """Micro-batches: embeddings, losses and heads, as far as they are there, must tell the same number.

    A product that looks like a head is not enough: a lookup of any kind, or a compiled region, has to be as frequent.
    """
    looked_up = [op for op in ops.of(What.EMBEDDING) if op.forward]
    tables = Counter(op.dims[0][0] for op in looked_up if op.dims and len(op.dims[0]) == 2)
    embedded = tables[head] if head else max(tables.values()) if len(tables) == 1 else 0
    losses = sum(op.forward for op in ops.of(What.LOSS))
    found = {count for count in (embedded, losses, boundaries) if count}
    confirmed = embedded or losses or boundaries in {*tables.values(), _regions(ops)}
    return found.pop() if len(found) == 1 and confirmed else 0


def _regions(ops: RankOps) -> int:
    """How often compiled code is entered in the forward pass."""
    entered = (op for op in ops.ops if op.what == What.COMPILED and op.forward and What.COMPILED not in op.scopes)
    return sum(not op.name.startswith("triton") for op in entered)
