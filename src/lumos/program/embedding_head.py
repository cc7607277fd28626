"""Ends: the pieces outside the layers: embedding, final norm, output matrix, loss, optimizer."""

from __future__ import annotations

from lumos.program.block import Block, Piece
from lumos.program.operators import Operator
from lumos.program.rank_layout import Shard
from lumos.program.transformer_layer import Layer, collective, linear, linear_backward, op, stream


def embedding(shard: Shard) -> Block:
    block = [op(shard, "embedding", shard.tokens, shard.vocab, shard.model.hidden)]
    size = float(shard.tokens * shard.model.hidden * shard.element)
    kind = "reduce_scatter" if shard.splits_sequences else "all_reduce"
    return [*block, *collective(kind, size, shard.tp, name="embedding reduce")]


def embedding_backward(shard: Shard) -> Block:
    return [op(shard, "embedding_bwd", shard.tokens, shard.vocab, shard.model.hidden, launches=12)]


def head(shard: Shard) -> Block:
    """Final norm, output matrix and loss."""
    layer = Layer(shard)
    return [
        *layer.norm(),
        *layer.gather(),
        *linear(shard, shard.tokens, shard.vocab, shard.model.hidden, "head"),
        *_loss(shard),
    ]


_SHARDED_PASSES = (9.5, 5.5)  # over fp32 logits: cast, maximum, difference, exponent, sum, quotient; and back


def _loss(shard: Shard) -> Block:
    tokens, vocab = shard.tokens, shard.vocab
    if shard.framework.loss == "fused":
        block = [op(shard, "cross_entropy", tokens, vocab, dtype="bf16", launches=6)]
    elif shard.framework.loss == "sharded":
        block = [_wide_passes(shard, _SHARDED_PASSES[0], 10, "loss")]
    else:
        block = [
            op(shard, "cast_f32", tokens, vocab, name="logits to fp32"),
            op(shard, "cross_entropy", tokens, vocab, dtype="fp32", launches=2),
        ]
    return [*block, *collective("all_reduce", 4.0 * 3 * tokens, shard.tp, name="loss reduce")]


def _wide_passes(shard: Shard, passes: float, launches: int, name: str) -> Piece:
    return Piece(Operator("stream", (round(passes * 4 * shard.tokens * shard.vocab),), "fp32"), launches, name=name)


def _loss_backward(shard: Shard) -> Block:
    tokens, vocab = shard.tokens, shard.vocab
    if shard.framework.loss == "fused":
        return [op(shard, "cross_entropy_bwd", tokens, vocab, dtype="bf16", launches=2)]
    if shard.framework.loss == "sharded":
        return [_wide_passes(shard, _SHARDED_PASSES[1], 5, "loss grad")]
    return [
        op(shard, "cross_entropy_bwd", tokens, vocab, dtype="fp32", launches=3),
        stream(shard, 3.0, tokens * vocab, name="logit grads to bf16"),
    ]


def head_backward(shard: Shard) -> Block:
    layer = Layer(shard)
    inputs, weights = linear_backward(shard, shard.tokens, shard.vocab, shard.model.hidden, "head")
    reduction = layer.reduce(name="head grad reduce")
    return [*_loss_backward(shard), *inputs, *weights, *reduction, *layer.norm_backward()]


def optimizer(shard: Shard, parameters: float, tensors: int = 0) -> Block:
    """The update of `parameters`, those that one rank keeps the state of.

    torch's fused AdamW on low-precision weights is bound by its arithmetic and was sampled; updates of fp32 state are
    bound by memory, so their traffic counts (weights, gradient and two moments read, three written, the copy in low
    precision written, the norm of the gradients read).
    """
    if shard.train.optimizer == "none":
        return []
    framework, size = shard.framework, max(1, round(parameters))
    share = 0.5 if shard.train.optimizer == "sgd" else 1.0
    if framework.state_precision == "training":
        work = Operator("adamw_fused", (max(1, round(size * share)),), "fp32" if shard.element == 4 else "bf16")
    else:
        work = Operator("stream", (round(size * framework.optimizer_traffic * share),), "fp32")
    return [Piece(work, framework.optimizer_launches or max(1, tensors // 2), name="optimizer")]
