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

from math import ceil, comb, sqrt
from statistics import NormalDist

from lumos.described import primitives as ops
from lumos.described.mlp import activation, activation_bytes, activation_gradient_bytes, dense
from lumos.program.layout import RankLayout
from lumos.program.op import EXCHANGE, Op, Ops
from lumos.program.operators import Operator
from lumos.setup.sections import Model


def moe(s: RankLayout) -> Ops:
    """Norm, router, permutation, all-to-all, experts, all-to-all, back to the tokens' order, residual."""
    return [*ops.norm(s), *moe_inside(s), *ops.residual(s)]


def moe_inside(s: RankLayout) -> Ops:
    """The same without norm and residual."""
    return [
        *_router(s),
        *_dispatch(s),
        *_copies_moved(s, "all_gather", "experts gather"),
        *_experts(s),
        *_copies_moved(s, "reduce_scatter", "experts scatter"),
        *_combine(s),
        *shared(s),
        *_result_joined(s, "experts reduce"),
    ]


def moe_backward(s: RankLayout) -> Ops:
    """The same in reverse; every grouped matmul has two gradients."""
    return [
        *ops.residual_backward(s),
        *_combine_backward(s),
        *_copies_moved(s, "all_gather", "experts gather grads"),
        *_experts_backward(s),
        *_copies_moved(s, "reduce_scatter", "experts scatter grads"),
        *_dispatch_backward(s),
        *_router_backward(s),
        *_shared_backward(s),
        *_result_joined(s, "experts grad reduce"),
        *ops.norm_backward(s),
    ]


def exchanges_first(block: Ops) -> Ops:
    """A layer whose exchanges run beside the work of another micro-batch: they have all of its time.

    In the steady state of 1F1B, the forward pass of one micro-batch alternates with the backward pass of another, and
    each works while the other exchanges (Megatron-Core, combined_1f1b): what counts is which of both takes longer.
    """
    return sorted(block, key=lambda op: op.stream != EXCHANGE)


def is_exchange(op: Op) -> bool:
    """Whether it sends tokens to the ranks of their experts, or results back."""
    return op.kind == "all_to_all" and op.name.startswith("experts ")


def busiest_rank(experts: int, ep: int, imbalance: float) -> float:
    """Copies that the busiest of `ep` ranks gets over their mean, where the busiest expert gets `imbalance` times its.

    Loads of experts are taken as drawn from a normal distribution: the largest of n is about z(n) deviations above the
    mean, and the mean of the experts of one rank deviates less. One rank alone has all copies, whoever gets them; its
    grouped matmuls take as long (within 5 % in calibration/moe_operators_h200.jsonl.xz).
    """
    if ep == 1 or imbalance == 1.0:
        return 1.0
    deviation = (imbalance - 1) / _largest_of(experts) / sqrt(experts / ep)
    return min(1 + deviation * _largest_of(ep), float(ep))


def _largest_of(count: int) -> float:
    """The expected largest of so many standard normal numbers (Blom 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _copies(s: RankLayout, tokens: float) -> int:
    """Copies of tokens, one for every expert that is asked, on the busiest rank: the others wait for it.

    Experts that are filled up to a capacity all have equally many: zeros stand in for tokens that did not come.
    """
    busiest = s.train.capacity or busiest_rank(s.model.experts, s.parallel.ep, s.train.imbalance)
    return max(1, ceil(tokens * s.model.top_k * busiest))


def _own_tokens(s: RankLayout) -> float:
    """Tokens that one rank brings to its expert group."""
    tp = s.parallel.tp
    return s.spread_tokens if s.splits_sequences else s.tokens * min(s.expert_tp, tp) / tp


def _sent(s: RankLayout) -> int:
    """Copies that one rank exchanges with the others of its expert group."""
    return _copies(s, _own_tokens(s))


def gathered_bytes(s: RankLayout) -> float:
    """The tokens of all ranks of an expert group, where each of them gets all; else 0."""
    all_of_them = _own_tokens(s) * s.ep.size * s.model.hidden * s.element
    return all_of_them if s.gathers_tokens and s.ep.size > 1 else 0.0


def routed_copies(s: RankLayout) -> int:
    """Copies that one rank's experts work on."""
    return _copies(s, s.tokens / s.parallel.tp * s.expert_tp)


def expert_width(s: RankLayout) -> int:
    """The inner width of one expert on one rank."""
    return max(1, s.model.expert_ffn // s.expert_tp)


def local_experts(s: RankLayout) -> int:
    return max(1, s.model.experts // s.parallel.ep)


def _copies_moved(s: RankLayout, kind: str, name: str) -> Ops:
    """Experts that are cut see the copies of all ranks that they are cut for, or their tokens before these are copied.

    Tokens are those of all expert groups: a gather among expert-parallel ranks comes before.
    """
    rows = s.tokens / s.parallel.tp * s.expert_tp * s.ep.size if s.gathers_tokens else routed_copies(s)
    return ops.collective(kind, float(rows * s.model.hidden * s.element), s.expert_gather, name=name)


def _result_joined(s: RankLayout, name: str) -> Ops:
    """Where sequences are not divided, every tensor-parallel rank needs the whole result."""
    if s.splits_sequences:
        return []
    kind = "all_reduce" if s.expert_tp > 1 or s.model.shared_experts else "all_gather"
    return ops.collective(kind, s.activation_bytes, s.tp, name=name)


# ---------------------------------------------------------------------- router
def _router(s: RankLayout) -> Ops:
    """Logits and top-k; logits and probabilities are kept in fp32."""
    choices = s.spread_tokens * s.model.experts
    row = "top-k" if s.fused else "eager top-k"
    return [_logits(s), ops.stream(s, row, choices, name="top-k", saves=8.0 * choices)]


def _router_backward(s: RankLayout) -> Ops:
    choices = s.spread_tokens * s.model.experts
    if s.fused:
        return [*[_logits(s)] * 2, ops.stream(s, "top-k", choices, count=2)]
    return [*[_logits(s)] * 2, ops.stream(s, "eager top-k grad", choices, name="top-k grad")]


def _logits(s: RankLayout) -> Op:
    dtype = "fp32" if s.precision == "fp32" else "bf16"
    return ops.op(s, "gemm_tn", s.spread_tokens, s.model.experts, s.model.hidden, dtype=dtype, name="router")


# ---------------------------------------------------------------------- between the order of tokens and of experts
def _dispatch(s: RankLayout) -> Ops:
    """Copies of the tokens, in the order of their experts, on the ranks that hold these."""
    if _permutes_fused(s):
        return [*_counted(s), *_exchanged(s, "dispatch")]
    copies = _sent(s)
    order = ops.stream(s, "sort choices", copies)
    return [order, _permuted(s, copies), *_sent_over(s, "dispatch")]


def _combine(s: RankLayout) -> Ops:
    """What the experts return, weighted, in the order of the tokens, and added up."""
    if _permutes_fused(s):
        return _exchanged(s, "combine")[::-1]
    copies = _sent(s)
    size = float(copies * s.model.hidden)
    weighed, added = ops.stream(s, "weigh rows", size), ops.stream(s, "add up copies", size)
    return [*_sent_over(s, "combine"), weighed, _permuted(s, copies), added]


def _combine_backward(s: RankLayout) -> Ops:
    if _permutes_fused(s):
        return _exchanged(s, "combine grad")
    rows = ("add up copies grad", "scatter rows", "weigh rows grad")
    spread = [ops.stream(s, row, float(_sent(s) * s.model.hidden)) for row in rows]
    return [*spread, *_sent_over(s, "combine grad")]


def _dispatch_backward(s: RankLayout) -> Ops:
    if _permutes_fused(s):
        return _exchanged(s, "dispatch grad")[::-1]
    return [*_sent_over(s, "dispatch grad"), ops.stream(s, "scatter rows", float(_sent(s) * s.model.hidden))]


def _permutes_fused(s: RankLayout) -> bool:
    """By the framework, or by a dispatcher that brings its own kernels into any framework."""
    return s.fused or (s.sends_once and s.ep.size > 1)


def _exchanged(s: RankLayout, name: str) -> Ops:
    """To the experts: permuted by fused kernels, before the exchange by rank and after it by expert.

    What sends a token once for all experts of a rank (DeepEP, HybridEP, a gather) makes the copies where they arrive.
    """
    moved, permuted = _sent_over(s, name), _permuted(s, _sent(s))
    if (s.sends_once or s.gathers_tokens) and moved:
        return [*moved, permuted]
    return [permuted, *moved, *([permuted] if moved and local_experts(s) > 1 else [])]


def _counted(s: RankLayout) -> Ops:
    """How many tokens every rank and expert gets: counted, gathered, and waited for by the host.

    It needs the sizes for what it sends, and for the matmul of every expert where each is a call of its own.
    """
    counted = ops.stream(s, "count tokens", s.spread_tokens * s.model.experts)
    sizes = ops.collective("all_gather", 8.0 * s.model.experts * s.ep.size, s.ep, name="experts counts")
    needed = s.ep.size > 1 or s.framework.expert_launches > 0
    known = ops.host_only(ops.launches_of("known counts")) if needed else []
    return [counted, *sizes, *(op._replace(syncs=True) for op in known)]


def _permuted(s: RankLayout, copies: int) -> Op:
    return ops.op(s, "permute", copies, s.model.hidden)


def _sent_over(s: RankLayout, name: str) -> Ops:
    """Beside the work of another micro-batch, where it is asked for; or gathered, and added up on the way back."""
    if s.gathers_tokens:
        kind = "all_gather" if name in ("dispatch", "combine grad") else "reduce_scatter"
        return ops.collective(kind, gathered_bytes(s), s.ep, name=f"experts {name}")
    size = float(_sent_copies(s) * s.model.hidden * _sent_element(s, name))
    stream = EXCHANGE if s.overlaps_everywhere else 0
    return ops.collective("all_to_all", size, s.ep, stream, f"experts {name}")


def _sent_copies(s: RankLayout) -> float:
    """Copies that leave for the experts of all ranks: one for every expert that is asked, or fewer.

    DeepEP and HybridEP send a token once to every node, where NVLink spreads it, or to every rank of a node. Of n
    places, k choices among many experts hit n (1 - (1 - 1/n)^k); n are those that its groups of experts lie in.
    """
    if not s.sends_once:
        return _sent(s)
    places, k = reached(s.model, s.ep.nodes if s.ep.nodes > 1 else s.ep.size), s.model.top_k
    return _sent(s) / k * places * (1 - (1 - 1 / places) ** k)


def reached(model: Model, places: int) -> float:
    """Of the places that experts lie in, those that a token may go to, on average; all, unless its groups are limited.

    Groups lie in the places one after the other. Of g groups a token takes m: where a place has g / n of them, it is
    none of those m with a chance of C(g - g/n, m) / C(g, m).
    """
    groups, taken = model.expert_groups, model.top_k_groups
    if not groups or not 0 < taken < groups:
        return float(places)
    if places >= groups:
        return places * taken / groups
    here = groups // places
    return places * (1 - comb(groups - here, taken) / comb(groups, taken))


def _sent_element(s: RankLayout, name: str) -> float:
    """Bytes of one value on its way: in 8 bits with a factor for every 128 values, where tokens are cast before."""
    casts = s.eight_bit and s.framework.dispatches_fp8 and name in ("dispatch", "combine grad")
    return 1 + 4 / 128 if casts else float(s.element)


# ---------------------------------------------------------------------- experts
def _experts(s: RankLayout) -> Ops:
    """The experts of one rank over the copies sent to them.

    Kept: the copies as the experts read them, what the experts return (for the gradient of the weights that scale it),
    and the inside of the MLP.
    """
    copies, (up, down) = routed_copies(s), _grouped_matmuls(s)
    saves = float(copies * (s.linear_element + (0 if s.framework.weighs_inside else s.element)) * s.model.hidden)
    return [
        *_cleared(s, "clear rows", s.model.hidden),
        *_cast(s, "linear cast", s.model.hidden),
        up._replace(saves=saves),
        *_bias(s, "expert bias", s.inward * expert_width(s)),
        *_cleared(s, "clear rows of a copy", s.inward * expert_width(s)),
        *experts_activation(s),
        *_cast(s, "linear cast", expert_width(s)),
        down,
        *_bias(s, "expert bias", s.model.hidden),
        *_cleared(s, "clear rows of a copy", s.model.hidden),
    ]


def _experts_backward(s: RankLayout) -> Ops:
    up, down = _grouped_matmuls(s)
    inner = s.inward * expert_width(s)
    return [
        *_cleared(s, "clear rows of a copy", s.model.hidden),
        *_bias_backward(s),
        *_cast(s, "linear grad cast", s.model.hidden),
        *_gradients(s, down),
        *experts_activation(s, backward=True),
        *_cleared(s, "clear rows of a copy", inner),
        *_bias_backward(s),
        *_cast(s, "linear grad cast", inner),
        *_gradients(s, up),
        *_cleared(s, "clear rows of a copy", s.model.hidden),
    ]


def _cast(s: RankLayout, row: str, width: int) -> Ops:
    """Of what the experts read, to 8 bits."""
    return [ops.stream(s, row, float(routed_copies(s) * width), name=f"experts {row[7:]}")] if s.eight_bit else []


def _gradients(s: RankLayout, matmul: Op) -> Ops:
    """Of the tokens and of the weights of a grouped matmul.

    Every micro-batch adds to the gradients of all experts of the rank, however few tokens they got.
    """
    forward = matmul.work
    assert isinstance(forward, Operator)
    inputs = matmul._replace(work=forward._replace(kind="grouped_gemm_nn"))
    if s.train.mode == "lora":
        return [inputs]
    experts, _, n, k = forward.shape
    weights = matmul._replace(work=forward._replace(kind="grouped_gemm_nt"))
    later = [weights, *ops.accumulated(s, experts * n * k, matmul.name, 1)]
    return [inputs, *(op._replace(weight_gradient=True) for op in later)]


def _grouped_matmuls(s: RankLayout) -> tuple[Op, Op]:
    """Those before and after the activation; where experts run in a loop, each has its own."""
    copies, ffn, hidden = routed_copies(s), expert_width(s), s.model.hidden
    launches = _expert_launches(s)
    up = Operator("grouped_gemm", (local_experts(s), copies, s.inward * ffn, hidden), s.train.precision)
    down = Operator("grouped_gemm", (local_experts(s), copies, hidden, ffn), s.train.precision)
    return Op("experts up", work=up, launches=launches), Op("experts down", work=down, launches=launches)


def _expert_launches(s: RankLayout) -> int:
    """Of the host, for a grouped matmul: one, or some for every expert where they run one after the other."""
    each = s.framework.expert_launches if s.framework.grouped_experts else ops.launches_of("expert loop")
    return max(1, round(each * local_experts(s)))


def _cleared(s: RankLayout, row: str, width: int) -> Ops:
    """Rows of other ranks' experts, which a grouped matmul leaves as they are."""
    if _permutes_fused(s) or not s.framework.clears_experts:
        return []
    return [ops.stream(s, row, float(routed_copies(s) * width), name="clear rows")]


def _bias(s: RankLayout, row: str, width: int) -> Ops:
    return [] if s.fused or not s.model.bias else [ops.stream(s, row, float(routed_copies(s) * width))]


def _bias_backward(s: RankLayout) -> Ops:
    if s.fused or not s.model.bias:
        return []
    return [ops.stream(s, "expert bias grad", routed_copies(s) / local_experts(s))]


def experts_activation(s: RankLayout, backward: bool = False) -> Ops:
    """The activation function of the experts; it stands for all that they keep of their inner width."""
    size = routed_copies(s) * expert_width(s)
    launches = 1 if s.framework.grouped_experts else ops.launches_of("expert loop") * local_experts(s)
    row = f"{'gated' if s.model.gated else 'plain'} activation"
    if s.model.gated and not s.fused and not s.framework.fused_activation:
        row = "clamped activation of halves" if _clamped(s) else "gated activation of halves"
    kept = 0.0 if backward else (activation_bytes(s) + (4.0 * s.element if _clamped(s) else 0.0)) * size
    part = ops.stream(s, row + " grad" * backward, size, name="experts activation", saves=kept)
    return [part._replace(launches=launches * part.launches)]


def _clamped(s: RankLayout) -> bool:
    """GPT-OSS in eager kernels, which keep four results more: both clamped halves, the sigmoid, and up + 1."""
    return s.model.activation == "clamped_silu" and not s.fused and not s.framework.fused_activation


# ---------------------------------------------------------------------- shared experts
def _shared_width(s: RankLayout) -> int:
    return max(1, s.model.shared_experts * s.model.expert_ffn // s.parallel.tp)


def shared(s: RankLayout) -> Ops:
    """The shared experts, which see every token."""
    if not s.model.shared_experts:
        return []
    inward, down = dense(s, s.tokens, _shared_width(s))
    scatter = ops.reduce(s, name="shared reduce") if s.splits_sequences else []
    return [*ops.gather(s, name="shared gather", element=ops.gathered_element(s)), *inward, *down, *scatter]


def _shared_backward(s: RankLayout) -> Ops:
    if not s.model.shared_experts:
        return []
    ffn, hidden = _shared_width(s), s.model.hidden
    down = ops.linear_backward(s, s.tokens, hidden, ffn, "shared down")
    up = ops.linear_backward(s, s.tokens, s.inward * ffn, hidden, "shared up")
    scatter = ops.reduce(s, name="shared grad reduce") if s.splits_sequences else []
    inner = activation(s, s.tokens, ffn, backward=True)
    gathered = ops.gather(s, name="shared gather grads", element=ops.gathered_element(s))
    return [*gathered, *down[0], *down[1], *inner, *up[0], *up[1], *scatter]


def expert_gradient_bytes(s: RankLayout) -> float:
    """At the backward pass of the experts' activation, beyond what is kept."""
    copies, hidden = routed_copies(s), s.model.hidden
    added = activation_gradient_bytes(s) * copies * expert_width(s) + s.element * copies * hidden
    if s.framework.grouped_experts:
        return added
    # A loop over the experts: the gradient of one expert's slice is a tensor of zeros as large as all of them.
    return added / local_experts(s) + s.element * local_experts(s) * 2.0 * hidden * expert_width(s)
