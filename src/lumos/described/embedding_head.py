"""Embedding, head and optimizer: the blocks of a model outside its layers."""

from __future__ import annotations

from lumos.data_files import read_table
from lumos.described import primitives as ops
from lumos.program.layout import RankLayout
from lumos.program.op import Op, Ops
from lumos.program.operators import Operator


def embedding(s: RankLayout) -> Ops:
    """A row of the table for every token; the dropout after it keeps its mask."""
    mask = float(s.spread_tokens * s.model.hidden) if s.framework.dropout else 0.0
    shape = (s.tokens, s.vocab, s.model.hidden)
    if s.framework.chains:
        lookup = ops.chain(s, "embedding", False, *shape, saves=mask)
    else:
        lookup = ops.op(s, "embedding", *shape, saves=mask)
    kind = "reduce_scatter" if s.splits_sequences else "all_reduce"
    return [lookup, *ops.collective(kind, s.activation_bytes, s.tp, name="embedding reduce")]


def embedding_backward(s: RankLayout) -> Ops:
    shape = (s.tokens, s.vocab, s.model.hidden)
    if s.framework.chains:
        return [ops.chain(s, "embedding", True, *shape)]
    return [ops.op(s, "embedding_bwd", *shape, launches=ops.launches_of("embedding grad"))]


def head(s: RankLayout) -> Ops:
    """Final norm, output matrix and loss; the same again for every further token, after what its layer reads."""
    output = ops.linear(s, s.tokens, s.vocab, s.model.hidden, "head", wide=True)
    once = [*ops.norm(s), *ops.gather(s), *output, *_loss(s)]
    joined = ops.linear(s, s.spread_tokens, s.model.hidden, 2 * s.model.hidden, "join tokens")
    return once + s.model.mtp_layers * [*ops.norm(s), *ops.norm(s), *joined, *once]


def head_backward(s: RankLayout) -> Ops:
    inputs, weights = ops.linear_backward(s, s.tokens, s.vocab, s.model.hidden, "head", wide=True)
    reduction = ops.reduce(s, name="head grad reduce")
    once = [*_loss_backward(s), *inputs, *weights, *reduction, *ops.norm_backward(s)]
    if not s.model.mtp_layers:
        return once
    joined = ops.linear_backward(s, s.spread_tokens, s.model.hidden, 2 * s.model.hidden, "join tokens")
    before = [*joined[0], *joined[1], *ops.norm_backward(s), *ops.norm_backward(s)]
    return once + s.model.mtp_layers * [*once, *before]


def _loss(s: RankLayout) -> Ops:
    tokens, vocab = s.tokens, s.vocab
    if s.framework.loss == "fused":
        block = [ops.op(s, "cross_entropy", tokens, vocab, dtype="bf16", launches=ops.launches_of("fused loss"))]
    elif s.framework.loss == "sharded":
        block = [_fp32_stream(s, "sharded loss", "loss")]
    else:
        cast = [] if _is_wide(s) else [ops.op(s, "cast_f32", tokens, vocab, name="logits to fp32")]
        launches = ops.launches_of("eager loss")
        block = [*cast, ops.op(s, "cross_entropy", tokens, vocab, dtype="fp32", launches=launches)]
    return [*block, *ops.collective("all_reduce", 4.0 * 3 * tokens, s.tp, name="loss reduce")]


def _loss_backward(s: RankLayout) -> Ops:
    tokens, vocab = s.tokens, s.vocab
    if s.framework.loss == "fused":
        launches = ops.launches_of("fused loss grad")
        return [ops.op(s, "cross_entropy_bwd", tokens, vocab, dtype="bf16", launches=launches)]
    if s.framework.loss == "sharded":
        return [_fp32_stream(s, "sharded loss grad", "loss grad")]
    cast = [] if _is_wide(s) else [ops.stream(s, "logit grads to bf16", tokens * vocab)]
    launches = ops.launches_of("eager loss grad")
    return [ops.op(s, "cross_entropy_bwd", tokens, vocab, dtype="fp32", launches=launches), *cast]


def _is_wide(s: RankLayout) -> bool:
    """Logits are fp32 as they come: there is nothing to cast."""
    return s.element == 4


def _fp32_stream(s: RankLayout, row: str, name: str) -> Op:
    """Passes over fp32 logits."""
    facts = read_table("layer_operators.toml")[row]
    size = round(facts["passes"] * 4 * s.tokens * s.vocab)
    return Op(name, work=Operator("stream", (size,), "fp32"), launches=facts["launches"])


def optimizer(s: RankLayout, parameters: float, tensors: int = 0) -> Ops:
    """The update of `parameters`, those that one rank keeps the state of.

    torch's fused AdamW on low-precision weights is bound by its arithmetic and was sampled; updates of fp32 state are
    bound by memory, so their traffic counts (weights, gradient and two moments read, three written, the copy in low
    precision written, the norm of the gradients read).
    """
    if s.train.optimizer == "none":
        return []
    framework, size = s.framework, max(1, round(parameters))
    # One moment instead of two: sampled as half of the work; of Muon, most of what Adam reads and writes is left.
    share = {"sgd": 0.5, "muon": 0.75}.get(s.train.optimizer, 1.0)
    if framework.state_precision == "training":
        work = Operator("adamw_fused", (max(1, round(size * share)),), "fp32" if s.element == 4 else "bf16")
    else:
        work = Operator("stream", (round(size * framework.optimizer_traffic * share),), "fp32")
    return [Op("optimizer", work=work, launches=framework.optimizer_launches or max(1, tensors // 2))]
