"""The attentions of a forward pass, fused or not, and their shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lumos.read.op_columns import OpType, Shape, TracedOp


class Attention(NamedTuple):
    """One attention: its fused operator, or the second batched matmul of an unfused one, and the first."""

    op: TracedOp
    scores: TracedOp | None = None


@dataclass(frozen=True)
class AttentionShape:
    """One attention on this rank; 0 where the recorded shapes do not show it."""

    batch: int
    seq: int
    heads: int
    dim: int  # of queries and keys
    keys: int = 0  # how many; as many as queries, except in cross-attention
    kv_heads: int = 0  # `heads` also where keys were repeated before the call
    value_dim: int = 0

    def __str__(self) -> str:
        return f"{self.batch} × {self.seq} tokens × {self.heads} heads of {self.dim}"


def find_attentions(ops: Sequence[TracedOp]) -> list[Attention]:
    """Fused attentions; where there are none, pairs of batched matmuls, in the order of their calls."""
    fused = [Attention(op) for op in ops if op.type == OpType.ATTENTION]
    if fused:
        return fused
    attentions: list[Attention] = []
    scores: TracedOp | None = None
    softmax: Shape = ()  # since then
    for op in ops:
        if op.type == OpType.SOFTMAX:
            softmax = op.shapes[0] if op.shapes else ()
        elif op.type == OpType.BATCHED_MATMUL:
            if scores is not None and _attends(scores.factors, op.factors, softmax):
                attentions.append(Attention(op, scores))
                scores = None
            else:
                scores = op
            softmax = ()
    return attentions


def _attends(first: list[Shape], second: list[Shape], softmax: Shape) -> bool:
    """[b, s, d] · [b, d, t], then [b, s, t] · [b, t, e]; a softmax of s × t between them, or else s = t and d = e."""
    if [len(shape) for shape in (*first, *second)] != [3, 3, 3, 3]:
        return False
    b, s, d = first[0]
    t, e = second[1][1:]
    fits = first[1] == (b, d, t) and second == [(b, s, t), (b, t, e)] and min(s, t, d) > 1
    normalised = len(softmax) > 1 and softmax[-2] == s and softmax[-1] >= t  # more than t: a sink next to the keys
    return fits and (normalised or (s, d) == (t, e))


def attention_shape(attention: Attention, tokens: int = 0) -> AttentionShape | None:
    """As far as the operator itself shows it, or, if it is not fused, the tokens over which it runs."""
    op = attention.op
    if attention.scores is not None:
        return _unfused(attention.scores, op, tokens)
    outer = op.outer.shapes if op.outer is not None else []
    padded = bool(outer and op.shapes) and len(outer[0]) == 4 and outer[0][:3] == op.shapes[0][:3]
    shapes = outer if padded else op.shapes  # sizes of heads may be padded for the kernel
    shape = shapes[0] if shapes else ()
    if len(shape) == 3:  # sequences of various lengths, one after another
        return AttentionShape(0, 0, shape[1], shape[2])
    if len(shape) != 4:
        return None
    seq, heads = (2, 1) if op.name.startswith("aten::") else (1, 2)
    query = AttentionShape(shape[0], shape[seq], shape[heads], shape[3])
    key, value = [*shapes[1:3], (), ()][:2]
    if len(key) != 4 or len(value) != 4:
        return query
    return replace(query, keys=key[seq], kv_heads=key[heads], value_dim=value[3])


def _unfused(scores: TracedOp, weighted: TracedOp, tokens: int) -> AttentionShape | None:
    """From the matmuls of four dimensions around those of three, which have one for batch and heads; or from tokens."""
    (both, seq, dim), (_, keys, value_dim) = scores.factors[0], weighted.factors[1]
    batch = tokens // seq if tokens % seq == 0 else 0
    for op in (weighted.parent, scores.parent):
        whole = op.shapes[0] if op is not None and op.shapes else ()
        if len(whole) == 4 and whole[0] * whole[1] == both and whole[2] == seq:
            batch = whole[0]
    heads = both // batch if batch and both % batch == 0 else 0
    return AttentionShape(batch, seq, heads, dim, keys, heads, value_dim) if heads else None


def with_fewest_keys(shapes: Sequence[AttentionShape | None]) -> list[AttentionShape | None]:
    """The same shapes, where some layers repeat keys before the call and others of the same shape do not."""
    fewest: dict[AttentionShape, int] = {}
    for shape in filter(None, shapes):
        rest = replace(shape, kv_heads=0)
        fewest[rest] = min(fewest.get(rest, shape.kv_heads), shape.kv_heads)
    return [shape and replace(shape, kv_heads=fewest[replace(shape, kv_heads=0)]) for shape in shapes]


def main_shape(shapes: Sequence[AttentionShape | None], tokens: int) -> AttentionShape | None:
    """The shape that all attentions have, or else the most frequent of those over `tokens`."""
    if len(set(shapes)) == 1:
        return shapes[0]
    fitting = Counter(shape for shape in shapes if shape and shape.batch * shape.seq == tokens)
    return fitting.most_common(1)[0][0] if fitting else None
