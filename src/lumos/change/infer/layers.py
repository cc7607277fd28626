"""The layers that one rank runs, from the shapes of its matmuls and attentions in the order of their calls.

    query, key, value │ attention │ output, up (and gate), down │ query, key, value │ attention │ … │ head

Between two attentions there must be the same matmuls everywhere, except for the head where one micro-batch ends and the
next begins. Nothing is inferred from layers that do not repeat like that (experts, layers of several types).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from lumos.change.infer import agreed
from lumos.change.traced_ops import OpType, RankOps, Shape, TracedOp

Weight = tuple[int, int]


class Matmul(NamedTuple):
    """rows × inner times inner × columns."""

    rows: int
    inner: int
    columns: int


@dataclass(frozen=True)
class AttentionShape:
    """One attention on this rank; 0 where the recorded shapes do not show it."""

    batch: int
    seq: int
    heads: int
    dim: int


@dataclass(frozen=True)
class LayerShape:
    """The widths of one layer on this rank."""

    hidden: int
    qkv: tuple[int, ...]  # columns of the matmuls before the attention: query, key and value, or all in one
    attended: int  # width of the attention's output
    ffn: int
    gated: bool


@dataclass(frozen=True)
class RankLayers:
    """What one rank's step shows; None, 0 or "" where it does not."""

    ops: RankOps
    attentions: int  # in the forward pass
    tokens: int  # rows of its matmuls
    dtype: str
    attention: AttentionShape | None
    layer: LayerShape | None
    vocab: int
    microbatches: int  # where this rank has the embedding or the head

    @property
    def has_embedding(self) -> bool:
        return bool(self.ops.forward(OpType.EMBEDDING))

    @property
    def has_loss(self) -> bool:
        return bool(self.ops.forward(OpType.LOSS)) or self.vocab > 0


def read_layers(ops: RankOps) -> RankLayers:
    """The layers of one rank."""
    forward = ops.forward(OpType.MATMUL, OpType.BATCHED_MATMUL, OpType.ATTENTION)
    attentions = _attentions(forward)
    matmuls = {id(op): matmul for op in forward if op.type == OpType.MATMUL and (matmul := _matmul(op))}
    tokens, dtype = _tokens([(op.dtype, matmuls[id(op)]) for op in forward if id(op) in matmuls])
    between: list[list[Weight]] = [[]]  # the weights of the matmuls before, between and after attentions
    for op in forward:
        if id(op) in attentions:
            between.append([])
        elif id(op) in matmuls and matmuls[id(op)].rows == tokens:
            between[-1].append(matmuls[id(op)][1:])
    layer, head, heads = _parse(between)
    microbatches = _microbatches(ops, head, heads)
    return RankLayers(
        ops=ops,
        attentions=len(attentions),
        tokens=tokens,
        dtype=dtype,
        attention=agreed(_attention_shape(op, tokens) for op in forward if id(op) in attentions),
        layer=layer,
        vocab=_vocab(ops, head if microbatches else 0),
        microbatches=microbatches,
    )


def _attentions(forward: list[TracedOp]) -> set[int]:
    """Fused attentions; where there are none, the second batched matmul of unfused ones."""
    fused = {id(op) for op in forward if op.type == OpType.ATTENTION}
    batched = [op for op in forward if op.type == OpType.BATCHED_MATMUL]
    return fused or {id(second) for first, second in pairwise(batched) if _attends(first.factors, second.factors)}


def _attends(first: list[Shape], second: list[Shape]) -> bool:
    """[b, s, d] · [b, d, s], then [b, s, s] · [b, s, d]."""
    if [len(shape) for shape in (*first, *second)] != [3, 3, 3, 3]:
        return False
    b, s, d = first[0]
    return first[1] == (b, d, s) and second == [(b, s, s), (b, s, d)] and s > 1 and d > 1


def _matmul(op: TracedOp) -> Matmul | None:
    left, right = [*op.factors, (), ()][:2]
    return Matmul(*left, right[1]) if len(left) == len(right) == 2 and left[1] == right[0] else None


def _tokens(matmuls: list[tuple[str, Matmul]]) -> tuple[int, str]:
    """The rows of most matmul work, and the dtype of most weights there; (0, "") where no shapes were recorded."""
    work: Counter[int] = Counter()
    for _, (rows, inner, columns) in matmuls:
        work[rows] += rows * inner * columns
    tokens = work.most_common(1)[0][0] if work else 0
    weights: Counter[str] = Counter()
    for dtype, (rows, inner, columns) in matmuls:
        weights[dtype] += inner * columns if rows == tokens else 0
    return tokens, next((dtype for dtype, weight in weights.items() if 2 * weight > weights.total()), "")


def _parse(between: list[list[Weight]]) -> tuple[LayerShape | None, int, int]:
    """(layer, columns of the head or 0, number of heads), where there is exactly one way to read the matmuls."""
    if len(between) < 2 or not between[0] or len(between[-1]) < 3:
        return None, 0, 0
    found = [parsed for size in (3, 4) if (parsed := _parse_as(between, size)) is not None]
    return found[0] if len(found) == 1 else (None, 0, 0)


def _parse_as(between: list[list[Weight]], size: int) -> tuple[LayerShape, int, int] | None:
    """The same, with `size` matmuls after the attention of a layer."""
    qkv, *middle, last = between
    after = last[:size]
    layer = _layer(qkv, after) if len(after) == size else None
    if layer is None or any(part[:size] != after or part[len(part) - len(qkv) :] != qkv for part in middle):
        return None
    heads = [*(part[size : len(part) - len(qkv)] for part in middle), last[size:]]
    heads = [head for head in heads if head]
    if not heads:
        return layer, 0, 0
    is_head = all(head == heads[0] for head in heads) and len(heads[0]) == 1 and heads[0][0][0] == layer.hidden
    return (layer, heads[0][0][1], len(heads)) if is_head else None


def _layer(qkv: list[Weight], after: list[Weight]) -> LayerShape | None:
    """The layer that these matmuls make up, or None where they do not."""
    (attended, hidden), *up, (ffn, out) = after
    widths = [width for _, width in up]
    fits = {hidden} == {out} | {inner for inner, _ in (*qkv, *up)} and len(qkv) in (1, 3)
    if not fits or widths not in ([ffn], [ffn, ffn], [2 * ffn]):
        return None
    return LayerShape(hidden, tuple(width for _, width in qkv), attended, ffn, widths != [ffn])


def _attention_shape(op: TracedOp, tokens: int) -> AttentionShape | None:
    if op.type == OpType.BATCHED_MATMUL:
        both, seq, dim = op.factors[1]
        batch = tokens // seq
        fits = batch and batch * seq == tokens and both % batch == 0
        return AttentionShape(batch, seq, both // batch, dim) if fits else None
    shape = op.shapes[0] if op.shapes else ()
    if len(shape) == 3:  # sequences of various lengths, one after another
        return AttentionShape(0, 0, shape[1], shape[2])
    if len(shape) != 4:
        return None
    batch, heads, seq, dim = shape if op.name.startswith("aten::") else (shape[0], shape[2], shape[1], shape[3])
    return AttentionShape(batch, seq, heads, dim)


def _vocab(ops: RankOps, head: int) -> int:
    """Columns of the loss and of the head, where they agree."""
    losses = {op.shapes[0][-1] for op in ops.forward(OpType.LOSS) if op.shapes and len(op.shapes[0]) == 2}
    return agreed(losses | ({head} if head else set())) or 0


def _microbatches(ops: RankOps, head: int, heads: int) -> int:
    """Embeddings, losses and heads, as far as there are any, must agree on the number of micro-batches.

    A matmul that looks like a head is not enough: some lookup, or a compiled region, has to be as frequent.
    """
    tables = Counter(op.shapes[0][0] for op in ops.forward(OpType.EMBEDDING) if op.shapes and len(op.shapes[0]) == 2)
    embeddings = tables[head] if head else max(tables.values()) if len(tables) == 1 else 0
    losses = len(ops.forward(OpType.LOSS))
    regions = sum(
        op.type == OpType.COMPILED and op.forward and OpType.COMPILED not in op.scopes
        and not op.name.startswith("triton") for op in ops.ops
    )  # fmt: skip
    confirmed = embeddings or losses or heads in {*tables.values(), regions}
    return agreed(count for count in (embeddings, losses, heads) if count) or 0 if confirmed else 0
