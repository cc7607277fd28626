"""Experts: the pieces of a mixture-of-experts MLP: router, exchange, grouped products, exchange back."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from lumos.blocks.piece import Block, Piece
from lumos.costs.operator import Operator

if TYPE_CHECKING:
    from lumos.blocks.layer import Layer


def experts_forward(layer: Layer) -> Block:
    """Router, permutation, all-to-all, experts, all-to-all, and back to the tokens' order; shared experts beside."""
    s = layer.shard
    return [
        *_router(layer, 1),
        *_exchange(layer, "dispatch"),
        *_grouped(layer, 1.0),
        *_exchange(layer, "combine"),
        *_shared(layer, backward=False),
        *(layer.reduce(name="experts reduce") if s.parallel.tp > 1 else []),
    ]


def experts_backward(layer: Layer) -> Block:
    """The same in reverse; every grouped product has two gradients."""
    s = layer.shard
    return [
        *_exchange(layer, "combine grad"),
        *_grouped(layer, 2.0),
        *_exchange(layer, "dispatch grad"),
        *_router(layer, 2),
        *_shared(layer, backward=True),
        *(layer.reduce(name="experts grad reduce") if s.parallel.tp > 1 else []),
    ]


def _routed_tokens(layer: Layer) -> int:
    """Token copies that one rank's experts work on: the busiest rank decides, so the imbalance counts in full."""
    s = layer.shard
    return max(1, ceil(s.spread_tokens * s.model.top_k * s.train.imbalance))


def _router(layer: Layer, gradients: int) -> Block:
    from lumos.blocks.layer import op, stream

    s = layer.shard
    tokens, experts = s.spread_tokens, s.model.experts
    product = op(s, "gemm_tn", tokens, experts, layer.hidden, dtype="fp32" if s.precision == "fp32" else "bf16")
    return [
        *([product] * gradients),
        stream(s, 6.0 * gradients, tokens * experts, launches=8 * gradients, name="top-k"),
    ]


def _exchange(layer: Layer, name: str) -> Block:
    from lumos.blocks.layer import collective, op

    s = layer.shard
    copies = _routed_tokens(layer)
    size = float(copies * layer.hidden * s.element)
    return [
        op(s, "permute", copies, layer.hidden, launches=2),
        *collective("all_to_all", size, s.ep, name=f"experts {name}"),
        op(s, "permute", copies, layer.hidden, launches=1),
    ]


def _grouped(layer: Layer, gradients: float) -> Block:
    """The experts of one rank over the tokens sent to them."""
    from lumos.blocks.layer import stream

    s, m = layer.shard, layer.shard.model
    local = max(1, m.experts // s.parallel.ep)
    ffn = m.expert_ffn
    copies = _routed_tokens(layer)
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
    from lumos.blocks.layer import linear_backward

    s, m = layer.shard, layer.shard.model
    ffn = m.shared_experts * m.expert_ffn
    if not ffn:
        return []
    if not backward:
        return layer.dense(s.spread_tokens, ffn)
    inward = 2 if m.gated else 1
    down = linear_backward(s, s.spread_tokens, layer.hidden, ffn, "shared down")
    up = linear_backward(s, s.spread_tokens, inward * ffn, layer.hidden, "shared up")
    return [*down[0], *down[1], *layer.activation(s.spread_tokens, ffn, backward=True), *up[0], *up[1]]
