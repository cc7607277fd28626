"""The layers that one rank runs, from the shapes of its matmuls and attentions in the order of their calls.

    query, key, value │ attention │ output, up (and gate), down │ query, key, value │ attention │ … │ head

The matmuls between two attentions are a `LayerPart`. Where all parts repeat as above, except for the head where one
micro-batch ends and the next begins, the widths of a layer are known exactly (`LayerShape`). What layers of other
architectures show is in `widths`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple

from lumos.data_files import read_table
from lumos.read.op_columns import OpType, RankOps, Shape, TracedOp
from lumos.traced.infer import agreed
from lumos.traced.infer.attentions import (
    AttentionShape,
    attention_shape,
    find_attentions,
    main_shape,
    with_fewest_keys,
)

Weight = tuple[int, int]

POINT_TO_POINT = "send_recv"
_LOOKED_AT = (
    OpType.MATMUL, OpType.BATCHED_MATMUL, OpType.GROUPED_MATMUL, OpType.ATTENTION, OpType.SOFTMAX, OpType.TOP_K,
)  # fmt: skip
_MOST_DIGITS = 6
_NARROW: int = read_table("analysis.toml")["infer"]["narrow"]


class TracedMatmul(NamedTuple):
    """rows × inner times inner × columns; of a grouped matmul, the rows of all experts."""

    rows: int
    inner: int
    columns: int
    experts: int = 0  # 0: not grouped

    @property
    def weight(self) -> Weight:
        return self.inner, self.columns


class Choice(NamedTuple):
    """A choice of experts: for every token `chosen` of `options`; 0 where the number chosen was not recorded."""

    options: int
    chosen: int


class Mlp(NamedTuple):
    """An MLP: ffn is the width inside."""

    ffn: int
    gated: bool


class LayerShape(NamedTuple):
    """The widths of one layer on this rank."""

    hidden: int
    qkv: tuple[int, ...]  # columns of the matmuls before the attention: query, key and value, or all in one
    attended: int  # width of the attention's output
    mlp: Mlp


@dataclass(frozen=True)
class LayerPart:
    """What runs in the forward pass between two attentions, before the first, or after the last."""

    weights: tuple[Weight, ...]  # of the matmuls over all tokens, without adapters
    others: tuple[TracedMatmul, ...]  # grouped, or over other rows: of experts, or of one row per sample
    choices: tuple[Choice, ...]

    @property
    def routed(self) -> tuple[TracedMatmul, ...]:
        """The matmuls of experts: grouped ones, or one after another for each expert."""
        grouped = tuple(matmul for matmul in self.others if matmul.experts)
        return grouped or (self.others if self.choices else ())


@dataclass(frozen=True)
class RankLayers:
    """What one rank's step shows; None, 0 or "" where it does not."""

    ops: RankOps
    attentions: int  # in the forward pass
    tokens: int  # rows of its matmuls
    dtype: str
    shapes: tuple[AttentionShape | None, ...]  # of every attention, in order
    attention: AttentionShape | None  # the one that all have, or else the one over the tokens of most matmuls
    parts: tuple[LayerPart, ...]
    has_adapters: bool
    layer: LayerShape | None
    hidden: int
    vocab: int
    microbatches: int  # where this rank has the embedding or the head, or runs forward and backward in turn
    passes: int  # backward passes; 0 where they are mixed with forward passes

    @property
    def has_embedding(self) -> bool:
        return bool(self.ops.forward(OpType.EMBEDDING))

    @property
    def has_loss(self) -> bool:
        return bool(self.ops.forward(OpType.LOSS)) or self.vocab > 0

    @property
    def are_alike(self) -> bool:
        """Whether all attentions have the same shape."""
        return len(set(self.shapes)) == 1

    @property
    def repeats(self) -> bool:
        """Whether the same matmuls run between all attentions of a micro-batch, apart from layers with experts."""
        each = self.attentions // max(self.microbatches, 1)
        inner = {(bool(p.routed), p.weights) for i, p in enumerate(self.parts[1:-1], start=1) if each and i % each}
        return len(inner) == len({routed for routed, _ in inner})


def read_layers(ops: RankOps) -> RankLayers:
    """The layers of one rank."""
    forward = ops.forward(*_LOOKED_AT)
    attentions = find_attentions(forward)
    matmuls = {id(op): matmul for op in forward if (matmul := _matmul(op))}
    spans = {shape.batch * shape.seq for one in attentions if (shape := attention_shape(one))}
    tokens, dtype = _tokens([(op.dtype, matmuls[id(op)]) for op in forward if id(op) in matmuls], spans)
    shapes = with_fewest_keys([attention_shape(one, tokens) for one in attentions])
    every = tuple(_parts(forward, {id(one.op) for one in attentions}, matmuls, tokens))
    parts = _without_adapters(every, {op.shapes[0] for op in ops.of(OpType.GRADIENT) if op.shapes})
    attention = main_shape(shapes, tokens)
    layer, head, heads = _parse(parts)
    passes = _passes(ops, [one.op for one in attentions])
    microbatches = _microbatches(ops, passes, head, heads)
    return RankLayers(
        ops=ops,
        attentions=len(attentions),
        tokens=tokens,
        dtype=dtype,
        shapes=tuple(shapes),
        attention=attention,
        parts=parts,
        has_adapters=parts != every,
        layer=layer,
        hidden=layer.hidden if layer is not None else _hidden(parts, shapes, attention),
        vocab=_vocab(ops, head if microbatches else 0),
        microbatches=microbatches,
        passes=passes,
    )


def _matmul(op: TracedOp) -> TracedMatmul | None:
    left, right = [*op.factors, (), ()][:2]
    if op.type == OpType.GROUPED_MATMUL:
        fits = len(left) == 2 and len(right) == 3 and left[1] == right[1]
        return TracedMatmul(left[0], left[1], right[2], right[0]) if fits else None
    fits = op.type == OpType.MATMUL and len(left) == len(right) == 2 and left[1] == right[0]
    inside = OpType.GROUPED_MATMUL in op.scopes  # one expert of it, where the GPU has no grouped kernel
    return TracedMatmul(left[0], left[1], right[1]) if fits and not inside else None


def _tokens(matmuls: list[tuple[str, TracedMatmul]], spans: Collection[int]) -> tuple[int, str]:
    """The rows of most matmul work, and the dtype of most weights there; (0, "") where no shapes were recorded.

    `spans` are the tokens of the attentions: where matmuls have as many rows, others (of experts) do not count.
    """
    plain = [(dtype, matmul) for dtype, matmul in matmuls if not matmul.experts]
    wanted = {matmul.rows for _, matmul in plain} & set(spans)
    work: Counter[int] = Counter()
    for _, (rows, inner, columns, _) in plain:
        work[rows] += rows * inner * columns if not wanted or rows in wanted else 0
    tokens = work.most_common(1)[0][0] if work else 0
    weights: Counter[str] = Counter()
    for dtype, (rows, inner, columns, _) in plain:
        weights[dtype] += inner * columns if rows == tokens else 0
    return tokens, next((dtype for dtype, weight in weights.items() if 2 * weight > weights.total()), "")


# ---------------------------------------------------------------------- what runs between attentions


def _parts(
    forward: Sequence[TracedOp], attentions: Collection[int], matmuls: dict[int, TracedMatmul], tokens: int
) -> Iterator[LayerPart]:
    weights: list[Weight] = []
    others: list[TracedMatmul] = []
    choices: list[Choice] = []
    for op in forward:
        matmul = matmuls.get(id(op))
        if id(op) in attentions:
            yield LayerPart(tuple(weights), tuple(others), tuple(choices))
            weights, others, choices = [], [], []
        elif matmul is not None and (matmul.experts or matmul.rows != tokens):
            others.append(matmul)
        elif matmul is not None:
            weights.append(matmul.weight)
        elif op.type == OpType.TOP_K and (choice := _choice(op, tokens)):
            choices.append(choice)
    yield LayerPart(tuple(weights), tuple(others), tuple(choices))


def _choice(op: TracedOp, tokens: int) -> Choice | None:
    """A choice that every token makes, with the number chosen as the second argument of the call."""
    shape = op.shapes[0] if op.shapes else ()
    if len(shape) < 2 or prod(shape[:-1]) != tokens:
        return None
    values = op.args.values
    text = values[1] if len(values) > 1 and isinstance(values[1], str) else ""
    return Choice(shape[-1], int(text) if text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS else 0)


def _without_adapters(parts: tuple[LayerPart, ...], gradients: Collection[Shape]) -> tuple[LayerPart, ...]:
    """Without low-rank adapters: x·W, then x·A and A's result times B, where B is as wide as W and W is frozen."""

    def kept(weights: tuple[Weight, ...]) -> Iterator[Weight]:
        place = 0
        while place < len(weights):
            yield weights[place]
            place += 3 if _is_adapted(weights[place : place + 3], gradients) else 1

    return tuple(LayerPart(tuple(kept(part.weights)), part.others, part.choices) for part in parts)


def _is_adapted(weights: Sequence[Weight], gradients: Collection[Shape]) -> bool:
    if len(weights) < 3:
        return False
    (inner, columns), (left, rank), (again, right) = weights
    narrow = rank == again and (left, right) == (inner, columns) and _NARROW * rank <= min(inner, columns)
    is_trained = {(inner, columns), (columns, inner)} & set(gradients)
    return narrow and bool(gradients) and not is_trained


def _hidden(parts: Sequence[LayerPart], shapes: Sequence[AttentionShape | None], main: AttentionShape | None) -> int:
    """Columns of the matmul that takes what the heads of an attention return; 0 where it is not the same for all."""
    if main is None:
        return 0
    widest = main.heads * (main.value_dim or main.dim)
    after = [part.weights[:1] for shape, part in zip(shapes, parts[1:], strict=True) if shape == main]
    outputs = {weights[0] for weights in after if weights}
    # Values may be padded for the attention, but not to more than twice their size.
    fits = all(after) and all(inner % main.heads == 0 and inner <= widest <= 2 * inner for inner, _ in outputs)
    hidden = agreed(columns for _, columns in outputs) or 0 if fits else 0
    is_read = any(inner == hidden for part in parts for inner, _ in part.weights)  # a router's choices are not
    return hidden if is_read else 0


# ---------------------------------------------------------------------- layers that all look alike


def _parse(parts: Sequence[LayerPart]) -> tuple[LayerShape | None, int, int]:
    """(layer, columns of the head or 0, number of heads), where there is exactly one way to read the matmuls."""
    between = [list(part.weights) for part in parts]
    if len(between) < 2 or not between[0] or len(between[-1]) < 3 or any(part.routed for part in parts):
        return None, 0, 0
    parsed = [one for size in (3, 4) if (one := _parse_as(between, size)) is not None]
    return parsed[0] if len(parsed) == 1 else (None, 0, 0)


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
    is_head = all(head == heads[0] for head in heads) and heads[0][0][0] == layer.hidden
    return (layer, heads[0][-1][1], len(heads)) if is_head else None


def _layer(qkv: list[Weight], after: list[Weight]) -> LayerShape | None:
    """The layer that these matmuls make up, or None where they do not."""
    (attended, hidden), *inside = after
    mlp = mlp_of(inside, hidden)
    if mlp is None or len(qkv) not in (1, 3) or any(inner != hidden for inner, _ in qkv):
        return None
    return LayerShape(hidden, tuple(width for _, width in qkv), attended, mlp)


def mlp_of(weights: Iterable[Weight], hidden: int) -> Mlp | None:
    """The MLP that these matmuls make up, or None where they do not."""
    *up, down = weights or [(0, 0)]
    ffn, out = down
    widths = [columns for inner, columns in up if inner == hidden]
    if out != hidden or len(widths) != len(up) or widths not in ([ffn], [ffn, ffn], [2 * ffn]):
        return None
    return Mlp(ffn, widths != [ffn])


def _vocab(ops: RankOps, head: int) -> int:
    """Columns of the loss and of the head, where they agree."""
    losses = {columns for _, columns in matrices(ops, OpType.LOSS)}
    return agreed(losses | ({head} if head else set())) or 0


def matrices(ops: RankOps, op_type: OpType) -> list[Shape]:
    """The first operands of a type of operators in the forward pass: tables that are looked up, inputs of the loss."""
    return [op.shapes[0] for op in ops.forward(op_type) if op.shapes and len(op.shapes[0]) == 2]


def _microbatches(ops: RankOps, passes: int, head: int, heads: int) -> int:
    """Forward passes of the step.

    Embeddings, losses and heads, as far as there are any, must agree on their number. A matmul that looks like a head
    is not enough: some lookup, or a compiled region, has to be as frequent. Without pipelines, every run of attentions
    that a backward pass follows is a forward pass, which decides where only one of the others is there.
    """
    tables = Counter(rows for rows, _ in matrices(ops, OpType.EMBEDDING))
    embeddings = tables[head] if head else max(tables.values()) if len(tables) == 1 else 0
    losses = len(ops.forward(OpType.LOSS))
    regions = sum(
        op.type == OpType.COMPILED and op.forward and OpType.COMPILED not in op.scopes
        and not op.name.startswith("triton") for op in ops.ops
    )  # fmt: skip
    confirmed = embeddings or losses or heads in {*tables.values(), regions}
    counts = [count for count in (embeddings, losses, heads) if count]
    stated = agreed(counts) or 0 if confirmed else 0
    return stated if not passes or (len(counts) > 1 and stated and stated % passes == 0) else passes


def _passes(ops: RankOps, attentions: Sequence[TracedOp]) -> int:
    """Runs of as many attentions each, with a backward pass after each; 0 where forward and backward are mixed."""
    if any(call.collective == POINT_TO_POINT for _, call in ops.collectives):
        return 0
    forward = [(op.start, True) for op in attentions]
    backward = [(op.start, False) for op in ops.ops if op.type == OpType.BACKWARD]
    runs = [(key, len(list(run))) for key, run in groupby(sorted(forward + backward), key=lambda item: item[1])]
    if not runs or runs[-1][0]:
        return 0
    lengths = [length for is_forward, length in runs if is_forward]
    return len(lengths) if agreed(lengths) else 0
