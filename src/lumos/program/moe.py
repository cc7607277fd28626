"""Experts: the pieces of a mixture-of-experts MLP: router, exchange, grouped products, exchange back.

Over tensor-parallel ranks, tokens or experts are divided:

| experts | sequences divided | a rank sends | a rank's experts work on | tensor-parallel ranks exchange |
|---|---|---|---|---|
| whole | yes | its tokens | its tokens | nothing |
| whole | no | a tp-th of its tokens | a tp-th of its tokens | all-gather of the result |
| cut by tp | yes | its tokens | all tokens | all-gather and reduce-scatter of routed copies |
| cut by tp | no | all tokens | all tokens | all-reduce of the result |
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from lumos.program.block import Block, Piece
from lumos.program.operators import Operator

if TYPE_CHECKING:
    from lumos.program.transformer_layer import Layer


def experts_forward(layer: Layer) -> Block:
    """Router, permutation, all-to-all, experts, all-to-all, and back to the tokens' order; shared experts beside."""
    return [
        *_router(layer, 1),
        *_exchange(layer, "dispatch"),
        *_copies_moved(layer, "all_gather", "experts gather"),
        *_grouped(layer, 1.0),
        *_copies_moved(layer, "reduce_scatter", "experts scatter"),
        *_exchange(layer, "combine"),
        *_shared(layer, backward=False),
        *_result_joined(layer, "experts reduce"),
    ]


def experts_backward(layer: Layer) -> Block:
    """The same in reverse; every grouped product has two gradients."""
    return [
        *_exchange(layer, "combine grad"),
        *_copies_moved(layer, "all_gather", "experts gather grads"),
        *_grouped(layer, 2.0),
        *_copies_moved(layer, "reduce_scatter", "experts scatter grads"),
        *_exchange(layer, "dispatch grad"),
        *_router(layer, 2),
        *_shared(layer, backward=True),
        *_result_joined(layer, "experts grad reduce"),
    ]


def _copies(layer: Layer, tokens: float) -> int:
    """Copies of tokens, one for every expert that is asked: the busiest rank decides, so the imbalance counts."""
    s = layer.shard
    return max(1, ceil(tokens * s.model.top_k * s.train.imbalance))


def _sent(layer: Layer) -> int:
    """Copies that one rank exchanges with the others of its expert group."""
    s = layer.shard
    whole = s.expert_tp == 1 and not s.splits_sequences
    return _copies(layer, s.tokens / s.parallel.tp if whole else s.spread_tokens)


def _worked_on(layer: Layer) -> int:
    """Copies that one rank's experts work on."""
    s = layer.shard
    return _copies(layer, s.tokens / s.parallel.tp * s.expert_tp)


def _copies_moved(layer: Layer, kind: str, name: str) -> Block:
    """Experts that are cut see the copies of all tensor-parallel ranks."""
    from lumos.program.transformer_layer import collective

    s = layer.shard
    if s.expert_tp == 1 or not s.splits_sequences:
        return []
    return collective(kind, float(_worked_on(layer) * layer.hidden * s.element), s.tp, name=name)


def _result_joined(layer: Layer, name: str) -> Block:
    """Where sequences are not divided, every tensor-parallel rank needs the whole result."""
    from lumos.program.transformer_layer import collective

    s = layer.shard
    if s.splits_sequences:
        return []
    kind = "all_reduce" if s.expert_tp > 1 or s.model.shared_experts else "all_gather"
    return collective(kind, float(s.tokens * layer.hidden * s.element), s.tp, name=name)


def _router(layer: Layer, gradients: int) -> Block:
    from lumos.program.transformer_layer import op, stream

    s = layer.shard
    tokens, experts = s.spread_tokens, s.model.experts
    product = op(s, "gemm_tn", tokens, experts, layer.hidden, dtype="fp32" if s.precision == "fp32" else "bf16")
    return [
        *([product] * gradients),
        stream(s, 6.0 * gradients, tokens * experts, launches=8 * gradients, name="top-k"),
    ]


def _exchange(layer: Layer, name: str) -> Block:
    from lumos.program.transformer_layer import collective, op

    s = layer.shard
    copies = _sent(layer)
    size = float(copies * layer.hidden * s.element)
    return [
        op(s, "permute", copies, layer.hidden, launches=2),
        *collective("all_to_all", size, s.ep, name=f"experts {name}"),
        op(s, "permute", copies, layer.hidden, launches=1),
    ]


def _grouped(layer: Layer, gradients: float) -> Block:
    """The experts of one rank over the tokens sent to them."""
    from lumos.program.transformer_layer import stream

    s, m = layer.shard, layer.shard.model
    local = max(1, m.experts // s.parallel.ep)
    ffn = max(1, m.expert_ffn // s.expert_tp)
    copies = _worked_on(layer)
    inward = 2 if m.gated else 1
    dtype = s.train.precision
    joined = s.framework.grouped_experts
    launches = 1 if joined else 5 * local  # a loop over the experts gathers, scatters and asks the GPU for counts
    sizes = [(inward * ffn, layer.hidden, "experts up"), (layer.hidden, ffn, "experts down")]
    block: Block = []
    for n, k, name in sizes:
        for _ in range(int(gradients)):
            block.append(Piece(Operator("grouped_gemm", (local, copies, n, k), dtype), launches, name=name))
    passes = (5.0 if gradients > 1 else 3.0) if m.gated else (3.0 if gradients > 1 else 2.0)
    block.append(stream(s, passes, copies * ffn, launches=launches, name="experts activation"))
    return block


def _shared(layer: Layer, backward: bool) -> Block:
    from lumos.program.transformer_layer import linear_backward

    s, m = layer.shard, layer.shard.model
    if not m.shared_experts:
        return []
    ffn = max(1, m.shared_experts * m.expert_ffn // s.parallel.tp)
    if not backward:
        scatter = layer.reduce(name="shared reduce") if s.splits_sequences else []
        return [*layer.gather(name="shared gather"), *layer.dense(s.tokens, ffn), *scatter]
    inward = 2 if m.gated else 1
    down = linear_backward(s, s.tokens, layer.hidden, ffn, "shared down")
    up = linear_backward(s, s.tokens, inward * ffn, layer.hidden, "shared up")
    scatter = layer.reduce(name="shared grad reduce") if s.splits_sequences else []
    return [
        *layer.gather(name="shared gather grads"),
        *down[0],
        *down[1],
        *layer.activation(s.tokens, ffn, backward=True),
        *up[0],
        *up[1],
        *scatter,
    ]
