"""Attention: norm, projections, rotary positions, attention proper, output projection, residual; forward and backward.

What is kept for the backward pass, in bytes a token (a query and k key-value heads of size d, 16 bits): query, key,
value and the output of flash attention, 4 (a + k) d, and its log-sum-exp, 4 a. An eager operator keeps what its
backward formula reads, and a tensor that several operators keep is counted once.
"""

from __future__ import annotations

from lumos.described import primitives as ops
from lumos.program.layout import RankLayout
from lumos.program.op import BESIDE, Op, Ops


def attention(s: RankLayout) -> Ops:
    """The forward pass of a layer's first half."""
    out = ops.linear(s, s.tokens, s.model.hidden, _out_width(s), "out", saves=_output_saves(s))
    # One of the two norms' outputs stays in models that are compiled whole, by difference over their layers.
    kept = s.residual_bytes if s.makes_anew else 0.0
    return [
        *ops.norm(s),
        *ops.after_gather(s, projections(s)),
        *ops.head_norm(s),
        *rotary(s),
        *core(s),
        *(out if s.model.parallel_residual else ops.before_reduce(s, out, "attention reduce")),
        *ops.residual(s, kept),
    ]


def attention_backward(s: RankLayout) -> Ops:
    out_inputs, out_weights = ops.linear_backward(s, s.tokens, s.model.hidden, _out_width(s), "out")
    return [
        *ops.residual_backward(s),
        *ops.gather(s, name="gather grads", element=ops.gathered_element(s)),
        *out_inputs,
        *out_weights,
        *core_backward(s),
        *rotary(s, backward=True),
        *ops.head_norm_backward(s),
        *ops.gradients_overlapped(s, *_projections_backward(s)),
        *ops.norm_backward(s),
    ]


# ---------------------------------------------------------------------- projections
def projections(s: RankLayout) -> Ops:
    """Query, key and value; they are kept as attention reads them."""
    m = s.model
    if m.latent:
        sizes = _latent_sizes(s)
        block = [part for n, k, name in sizes for part in ops.linear(s, s.tokens, n, k, name)]
        return [block[0]._replace(saves=_latent_saves(s)), *block[1:]]
    kept = 3 * s.heads * m.head_dim if s.framework.keeps_repeated else _qkv_width(s)
    saves = float(s.element * s.tokens * kept)
    if s.framework.joins_qkv:
        return ops.linear(s, s.tokens, _qkv_width(s), m.hidden, "qkv", saves=saves)
    return [
        *ops.linear(s, s.tokens, s.heads * m.head_dim, m.hidden, "q", saves=saves),
        *ops.linear(s, s.tokens, 2 * s.kv_heads * m.head_dim, m.hidden, "kv", count=2),
    ]


def _projections_backward(s: RankLayout) -> tuple[Ops, Ops]:
    m = s.model
    if m.latent:
        parts = [ops.linear_backward(s, s.tokens, n, k, name) for n, k, name in reversed(_latent_sizes(s))]
        return [p for inputs, _ in parts for p in inputs], [p for _, weights in parts for p in weights]
    if s.framework.joins_qkv:
        return ops.linear_backward(s, s.tokens, _qkv_width(s), m.hidden, "qkv")
    query = ops.linear_backward(s, s.tokens, s.heads * m.head_dim, m.hidden, "q")
    rest = ops.linear_backward(s, s.tokens, 2 * s.kv_heads * m.head_dim, m.hidden, "kv", count=2)
    added = ops.stream(s, "sum qkv grads", s.tokens * m.hidden)
    return [*query[0], *rest[0], added], [*query[1], *rest[1]]


def _qkv_width(s: RankLayout) -> int:
    return (s.heads + 2 * s.kv_heads) * s.model.head_dim


def _latent_sizes(s: RankLayout) -> list[tuple[int, int, str]]:
    """(n, k, name) of the projections of multi-head latent attention, divided over tensor-parallel ranks."""
    m = s.model
    query = s.heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
    sizes = [(m.q_lora_rank, m.hidden, "q down"), (query, m.q_lora_rank, "q up")] if m.q_lora_rank else []
    sizes = sizes or [(query, m.hidden, "q")]
    sizes.append((m.kv_lora_rank + m.qk_rope_head_dim, m.hidden, "kv down"))
    sizes.append((s.heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank, "kv up"))
    return sizes


def _latent_saves(s: RankLayout) -> float:
    """Both low ranks before and after their norms, and the heads."""
    m = s.model
    ranks = 2 * (m.q_lora_rank + m.kv_lora_rank) + m.qk_rope_head_dim
    return float(s.element * s.tokens * ranks) + latent_head_bytes(s)


def latent_head_bytes(s: RankLayout) -> float:
    """What latent attention keeps after its up-projections: whole query and key, value with the rest of key."""
    m = s.model
    query = m.qk_nope_head_dim + m.qk_rope_head_dim
    return float(s.element * s.tokens * s.heads * (2 * query + m.qk_nope_head_dim + m.v_head_dim))


def up_projections(s: RankLayout) -> Ops:
    """Of latent attention: from the low ranks to the heads, with their rotary positions."""
    sizes = [size for size in _latent_sizes(s) if size[2].endswith(" up")]
    return [*(part for n, k, name in sizes for part in ops.linear(s, s.tokens, n, k, name)), *rotary(s)]


def _out_width(s: RankLayout) -> int:
    return s.heads * (s.model.v_head_dim if s.model.latent else s.model.head_dim)


def _output_saves(s: RankLayout) -> float:
    """The output of attention, which its own backward pass reads too; a linear layer in 8 bits keeps its copy."""
    if s.caches_fp8:
        return 1.5 * s.tokens * _out_width(s)
    kept = s.element * s.tokens * _out_width(s)
    is_copied = s.linear_element < s.element
    copy = s.linear_element * s.tokens * s.heads * (s.model.v_head_dim or s.model.head_dim) if is_copied else 0
    return float(kept + copy)


def rotary(s: RankLayout, backward: bool = False) -> Ops:
    """Rotary positions of queries and keys; their product keeps only cosine and sine."""
    m = s.model
    if m.positions != "rotary":
        return []
    if s.framework.chains:  # queries and keys together, as many heads of each
        return [ops.chain(s, "rotary", backward, s.sequences, -(-(s.heads + s.kv_heads) // 2), s.seq, m.head_dim)]
    kind, row = ("rotary_bwd", "rotary grad") if backward else ("rotary_fwd", "rotary")
    if s.fused or s.framework.fused_rotary:
        return [ops.stream(s, "fused rotary", s.tokens * (s.heads + s.kv_heads) * m.head_dim, name=kind)]
    launches = ops.launches_of(row)
    sizes = [(s.sequences, heads, s.seq, m.head_dim) for heads in (s.heads, s.kv_heads)]
    return [ops.op(s, kind, *size, launches=launches) for size in sizes]


# ---------------------------------------------------------------------- attention proper
def core(s: RankLayout) -> Ops:
    """Attention between the projections: what selective recomputation runs again, and does not keep."""
    if s.attention == "unfused":
        return _unfused_core(s)
    lse = 4.0 * s.tokens * s.heads  # log-sum-exp in fp32
    kernel = ops.op(s, "sdpa_fwd", s.sequences, _kernel_heads(s), *_seen(s, _head_size(s)), saves=lse)
    block = [*_repeated(s, "repeat keys and values"), *_exchanged(s, [kernel])]
    if not s.framework.joins_qkv:
        block.append(_copy(s))
    return block


def core_backward(s: RankLayout) -> Ops:
    if s.attention == "unfused":
        return _unfused_core_backward(s)
    launches = ops.launches_of("attention grad")
    kernel = ops.op(s, "sdpa_bwd", s.sequences, _kernel_heads(s), *_seen(s, _head_size(s)), launches=launches)
    block = [*_exchanged(s, [kernel], backward=True), *_repeated(s, "repeat keys and values grad")]
    if not s.framework.joins_qkv:
        block.append(_copy(s))
    elif s.model.positions == "rotary":
        block.append(ops.stream(s, "join qkv grads", s.tokens * _qkv_width(s)))
    return block


def _unfused_core(s: RankLayout) -> Ops:
    batch, (seq, size) = s.sequences * _kernel_heads(s), _span(s, s.model.head_dim)
    softmax = ops.op(s, "softmax_fwd", s.sequences, _kernel_heads(s), seq, saves=s.element * s.scores)
    dropout: Ops = []
    if s.framework.dropout:
        dropout = [ops.stream(s, "attention dropout", batch * seq * seq, saves=(1 + s.element) * s.scores)]
    scores = ops.op(s, "bmm", batch, seq, seq, size, name="scores")
    values = ops.op(s, "bmm", batch, seq, size, seq, name="values")
    sink = _with_sink(s, "sink in scores", batch * seq * seq)
    return [*_exchanged(s, [scores, *sink, softmax, *dropout, values]), _copy(s)]


def _unfused_core_backward(s: RankLayout) -> Ops:
    batch, (seq, size) = s.sequences * _kernel_heads(s), _span(s, s.model.head_dim)
    launches = ops.launches_of("matmul grads")
    block = [
        ops.op(s, "bmm_bwd", batch, seq, size, seq, launches=launches, name="values grad"),
        ops.op(s, "softmax_bwd", s.sequences, _kernel_heads(s), seq),
        ops.op(s, "bmm_bwd", batch, seq, seq, size, launches=launches, name="scores grad"),
    ]
    block[2:2] = _with_sink(s, "sink in scores grad", batch * seq * seq)
    if s.framework.dropout:
        block.insert(1, ops.stream(s, "attention dropout", batch * seq * seq, name="attention dropout grad"))
    copies = ops.stream(s, "attention copies grad", s.tokens * s.heads * s.model.head_dim)
    return [*_exchanged(s, block, backward=True), copies]


def _with_sink(s: RankLayout, row: str, scores: float) -> Ops:
    """What a sink and a mask add to unfused attention, kernel by kernel, where the model has sinks."""
    return [ops.stream(s, row, scores)] if s.model.sinks and not s.fused else []


def _exchanged(s: RankLayout, kernels: Ops, backward: bool = False) -> Ops:
    """The kernels, and what context-parallel ranks exchange around them (`parallel.cp_type`).

    | type | before the kernels | beside them | after them |
    |---|---|---|---|
    | p2p | | keys and values in a ring; backward also their gradients | |
    | all_gather | all keys and values | | backward: their gradients, reduced and scattered |
    | a2a | heads for sequence, of query, key and value (backward: of the output's gradient) | | the other way round |

    a2a+p2p exchanges heads among near ranks, and keys and values in a ring among far ones. A ring is priced as one
    all-gather; the result needs the last part, so attention ends no sooner than the exchange. Known error: only the
    default, a ring, and torchtitan's all-gather were compared with measured runs.
    """
    heads, ring = s.cp_exchange
    keys = keys_and_values_bytes(s)
    if s.parallel.cp_type == "all_gather":
        parts, gradients = (_added_up(s, backward), 2 * keys) if s.framework.cp_in_parts else ([], keys)  # in fp32
        after = ops.collective("reduce_scatter", gradients, s.cp, name="context reduce") if backward else []
        return [*ops.collective("all_gather", keys, s.cp, name="context gather"), *kernels, *parts, *after]
    copies = 2.0 if backward else 1.0
    exchange = ops.collective("all_gather", copies * keys, ring, BESIDE, "context exchange")
    inside = ops.joined([*exchange, *kernels])
    width = s.element * s.tokens * s.model.head_dim
    before, after_it = (float(width * (s.heads + 2 * s.kv_heads)), float(width * s.heads))
    if backward:
        before, after_it = after_it, before
    return [
        *ops.collective("all_to_all", before, heads, name="context heads"),
        *inside,
        *ops.collective("all_to_all", after_it, heads, name="context sequence"),
    ]


def _added_up(s: RankLayout, backward: bool) -> Ops:
    """Attention to the keys of one rank after the other: what is added to the results so far, in fp32."""
    elements = (s.parallel.cp - 1) * s.tokens * s.heads * s.model.head_dim
    return [ops.stream(s, f"context parts{' grad' if backward else ''}", elements)] if elements else []


def keys_and_values_bytes(s: RankLayout) -> float:
    """Of all ranks among which the sequence is divided, for the heads of one, as they are exchanged."""
    heads = s.heads if s.framework.keeps_repeated else s.kv_heads
    return 2.0 * s.tokens * s.parallel.cp * heads // s.cp_heads * s.model.head_dim * s.element


def _kernel_heads(s: RankLayout) -> int:
    return max(1, s.heads // s.cp_heads)


def _repeated(s: RankLayout, row: str) -> Ops:
    """Keys and values copied for every query head that shares them, where kernels do not share by themselves."""
    if s.fused or s.framework.joins_qkv or s.kv_heads == s.heads:
        return []
    return [ops.stream(s, row, s.tokens * s.heads * s.model.head_dim)] * 2


def _copy(s: RankLayout) -> Op:
    return ops.stream(s, "attention copy", s.tokens * s.heads * s.model.head_dim)


def _head_size(s: RankLayout) -> int:
    m = s.model
    return m.qk_nope_head_dim + m.qk_rope_head_dim if m.latent else m.head_dim


def _span(s: RankLayout, head: int) -> tuple[int, int]:
    """(sequence, head) of the attention kernels; ranks that divide the sequence do their share of the square."""
    return round(s.train.seq / (s.parallel.cp // s.cp_heads) ** 0.5), head


def _seen(s: RankLayout, head: int) -> tuple[int, int]:
    """The same for kernels that skip what a window hides: the square with as much work as an average layer has."""
    seq, head = _span(s, head)
    skips = s.framework.skips_windows or s.attention == "flash-3"
    hidden = s.model.hidden_scores(s.train.seq) if skips else 0.0
    return max(1, round(seq * (1 - hidden) ** 0.5)), head
