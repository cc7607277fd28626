"""MoE: the mixture-of-experts half of a layer: router, exchange, grouped matmuls, exchange back; shared experts.

Tensor-parallel ranks divide either the tokens or the experts:

| experts | sequences divided | a rank sends | a rank's experts work on | tensor-parallel ranks exchange |
|---|---|---|---|---|
| whole | yes | its tokens | its tokens | nothing |
| whole | no | a tp-th of its tokens | a tp-th of its tokens | all-gather of the result |
| cut by tp | yes | its tokens | all tokens | all-gather and reduce-scatter of routed copies |
| cut by tp | no | all tokens | all tokens | all-reduce of the result |

`parallel.etp` cuts experts for any number of ranks: those that hold different tokens gather their routed copies first,
and add up and divide the results afterwards (the all-to-all dispatcher of Megatron-Core, moe/token_dispatcher.py).
"""

from __future__ import annotations

from math import ceil

from lumos.program import primitives as ops
from lumos.program.block import Block, BlockOp
from lumos.program.mlp import activation, activation_bytes, activation_gradient_bytes, dense
from lumos.program.operators import Operator
from lumos.program.rank_layout import RankLayout


def moe(s: RankLayout) -> Block:
    """Norm, router, permutation, all-to-all, experts, all-to-all, back to the tokens' order, residual."""
    return [*ops.norm(s), *moe_inside(s), *ops.residual(s)]


def moe_inside(s: RankLayout) -> Block:
    """The same without norm and residual."""
    return [
        *_router(s, 1),
        *_exchange(s, "dispatch"),
        *_copies_moved(s, "all_gather", "experts gather"),
        *_grouped_matmuls(s, backward=False),
        *_copies_moved(s, "reduce_scatter", "experts scatter"),
        *_exchange(s, "combine"),
        *shared(s),
        *_result_joined(s, "experts reduce"),
    ]


def moe_backward(s: RankLayout) -> Block:
    """The same in reverse; every grouped matmul has two gradients."""
    return [
        *ops.residual_backward(s),
        *_exchange(s, "combine grad"),
        *_copies_moved(s, "all_gather", "experts gather grads"),
        *_grouped_matmuls(s, backward=True),
        *_copies_moved(s, "reduce_scatter", "experts scatter grads"),
        *_exchange(s, "dispatch grad"),
        *_router(s, 2),
        *_shared_backward(s),
        *_result_joined(s, "experts grad reduce"),
        *ops.norm_backward(s),
    ]


def _copies(s: RankLayout, tokens: float) -> int:
    """Copies of tokens, one for every expert that is asked: the busiest rank decides, so the imbalance counts."""
    return max(1, ceil(tokens * s.model.top_k * s.train.imbalance))


def _sent(s: RankLayout) -> int:
    """Copies that one rank exchanges with the others of its expert group."""
    tp = s.parallel.tp
    return _copies(s, s.spread_tokens if s.splits_sequences else s.tokens * min(s.expert_tp, tp) / tp)


def routed_copies(s: RankLayout) -> int:
    """Copies that one rank's experts work on."""
    return _copies(s, s.tokens / s.parallel.tp * s.expert_tp)


def expert_width(s: RankLayout) -> int:
    """The inner width of one expert on one rank."""
    return max(1, s.model.expert_ffn // s.expert_tp)


def local_experts(s: RankLayout) -> int:
    return max(1, s.model.experts // s.parallel.ep)


def _copies_moved(s: RankLayout, kind: str, name: str) -> Block:
    """Experts that are cut see the copies of all ranks that they are cut for."""
    return ops.collective(kind, float(routed_copies(s) * s.model.hidden * s.element), s.expert_gather, name=name)


def _result_joined(s: RankLayout, name: str) -> Block:
    """Where sequences are not divided, every tensor-parallel rank needs the whole result."""
    if s.splits_sequences:
        return []
    kind = "all_reduce" if s.expert_tp > 1 or s.model.shared_experts else "all_gather"
    return ops.collective(kind, s.activation_bytes, s.tp, name=name)


def _router(s: RankLayout, gradients: int) -> Block:
    """Logits and top-k; logits and probabilities are kept in fp32."""
    tokens, experts = s.spread_tokens, s.model.experts
    dtype = "fp32" if s.precision == "fp32" else "bf16"
    matmul = ops.op(s, "gemm_tn", tokens, experts, s.model.hidden, dtype=dtype)
    choice = ops.stream(s, "top-k", tokens * experts, count=gradients, saves=8.0 * tokens * experts)
    return [*[matmul] * gradients, choice if gradients == 1 else choice._replace(saves=0.0)]


def _exchange(s: RankLayout, name: str) -> Block:
    copies = _sent(s)
    return [
        ops.op(s, "permute", copies, s.model.hidden, launches=ops.launches_of("dispatch permute")),
        *ops.collective("all_to_all", float(copies * s.model.hidden * s.element), s.ep, name=f"experts {name}"),
        ops.op(s, "permute", copies, s.model.hidden),
    ]


def _grouped_matmuls(s: RankLayout, backward: bool) -> Block:
    """The experts of one rank over the copies sent to them.

    Kept: the copies as the experts read them, what the experts return (for the gradient of the weights that scale it),
    and the inside of the MLP.
    """
    m, copies, ffn = s.model, routed_copies(s), expert_width(s)
    launches = 1 if s.framework.grouped_experts else ops.launches_of("expert loop") * local_experts(s)
    saves = 0.0 if backward else float(copies * (s.linear_element + s.element) * m.hidden)
    up, down = (
        BlockOp(Operator("grouped_gemm", (local_experts(s), copies, n, k), s.train.precision), launches, name=name)
        for n, k, name in ((s.inward * ffn, m.hidden, "experts up"), (m.hidden, ffn, "experts down"))
    )
    inner = [op._replace(launches=launches) for op in experts_activation(s, backward)]
    if not backward:
        return [up._replace(saves=saves), down, *inner]
    matmuls = [up, up._replace(weight_gradient=True), down, down._replace(weight_gradient=True)]
    return [*matmuls, *inner]


def experts_activation(s: RankLayout, backward: bool = False) -> Block:
    """The activation function of the experts; it stands for all that they keep of their inner width."""
    size = routed_copies(s) * expert_width(s)
    row = f"{'gated' if s.model.gated else 'plain'} activation{' grad' if backward else ''}"
    kept = 0.0 if backward else activation_bytes(s) * size
    return [ops.stream(s, row, size, name="experts activation", saves=kept)]


def _shared_width(s: RankLayout) -> int:
    return max(1, s.model.shared_experts * s.model.expert_ffn // s.parallel.tp)


def shared(s: RankLayout) -> Block:
    """The shared experts, which see every token."""
    if not s.model.shared_experts:
        return []
    inward, down = dense(s, s.tokens, _shared_width(s))
    scatter = ops.reduce(s, name="shared reduce") if s.splits_sequences else []
    return [*ops.gather(s, name="shared gather"), *inward, *down, *scatter]


def _shared_backward(s: RankLayout) -> Block:
    if not s.model.shared_experts:
        return []
    ffn, hidden = _shared_width(s), s.model.hidden
    down = ops.linear_backward(s, s.tokens, hidden, ffn, "shared down")
    up = ops.linear_backward(s, s.tokens, s.inward * ffn, hidden, "shared up")
    scatter = ops.reduce(s, name="shared grad reduce") if s.splits_sequences else []
    inner = activation(s, s.tokens, ffn, backward=True)
    return [*ops.gather(s, name="shared gather grads"), *down[0], *down[1], *inner, *up[0], *up[1], *scatter]


def expert_gradient_bytes(s: RankLayout) -> float:
    """At the backward pass of the experts' activation, beyond what is kept."""
    copies, hidden = routed_copies(s), s.model.hidden
    added = activation_gradient_bytes(s) * copies * expert_width(s) + s.element * copies * hidden
    if s.framework.grouped_experts:
        return added
    # A loop over the experts: the gradient of one expert's slice is a tensor of zeros as large as all of them.
    return added / local_experts(s) + s.element * local_experts(s) * 2.0 * hidden * expert_width(s)
