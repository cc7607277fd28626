"""The pieces of one transformer layer, forward and backward.

Every function returns what a rank issues for one micro-batch. Element-wise chains are one `stream` piece where the
framework fuses them, and the sampled eager chains where it does not.
"""

from __future__ import annotations

from lumos.program.block import Block, Piece
from lumos.program.collective import Collective, Group
from lumos.program.operators import Operator
from lumos.program.rank_layout import Shard

_FP8 = frozenset({"fp8", "mxfp8", "nvfp4"})


def op(shard: Shard, kind: str, *shape: int, launches: int = 1, dtype: str = "", name: str = "") -> Piece:
    """An operator in the activations' precision, unless another is named."""
    return Piece(Operator(kind, shape, dtype or shard.precision), launches, name=name or kind)


def stream(shard: Shard, passes: float, elements: float, launches: int = 1, name: str = "") -> Piece:
    """A kernel that reads and writes `passes` times so many elements."""
    return Piece(Operator("stream", (round(passes * elements * shard.element),), shard.precision), launches, name=name)


def linear(shard: Shard, m: int, n: int, k: int, name: str, count: int = 1) -> Block:
    """The forward of a linear layer of n × k, as `count` equal parts where the framework does not join them."""
    low = shard.train.precision in _FP8
    block = [stream(shard, 1.5, m * k, name=f"{name} cast")] if low else []
    piece = op(shard, "gemm_tn", m, n // count, k, dtype=shard.train.precision, name=name)
    block += [piece] * count
    if shard.model.bias and not shard.fused and not shard.framework.fused_bias:
        block.append(stream(shard, 0.0, m * n, launches=0, name=f"{name} bias"))
    return block


def linear_backward(shard: Shard, m: int, n: int, k: int, name: str, count: int = 1) -> tuple[Block, Block]:
    """(input gradient, weight gradient) of a linear layer."""
    low, dtype = shard.train.precision in _FP8, shard.train.precision
    frozen = shard.train.mode == "lora"  # only the adapters have weight gradients, and they are small
    inputs = [stream(shard, 2.5, m * n, name=f"{name} grad cast")] if low else []
    inputs += [op(shard, "gemm_nn", m, k, n // count, dtype=dtype, name=f"{name} dgrad")] * count
    weights = [op(shard, "gemm_nt", n // count, k, m, dtype=dtype, name=f"{name} wgrad")] * count
    if shard.framework.accumulates_fp32:
        # The weight gradient is added to a buffer of fp32: read, and written wider than the product alone writes.
        extra = 6 if shard.framework.fused_accumulation else 12
        weights.append(
            Piece(
                Operator("stream", (n * k * extra,), "fp32"),
                0 if shard.framework.fused_accumulation else 3 * count,  # a hook in Python: convert, add, release
                name=f"{name} accumulate",
            )
        )
    elif shard.train.microbatches > 1:
        added = 1 - 1 / shard.train.microbatches  # the first micro-batch has nothing to add to
        weights.append(stream(shard, 3.0 * added, n * k, launches=count, name=f"{name} accumulate"))
    if count > 1:
        inputs.append(stream(shard, 3.0 * (count - 1), m * k, launches=count - 1, name=f"{name} sum"))
    if shard.model.bias:
        weights.append(stream(shard, 1.0, m * n, name=f"{name} bias grad"))
    return inputs, [] if frozen else weights


def collective(kind: str, size: float, group: Group, waits: bool = True, name: str = "") -> Block:
    return [Piece(Collective(kind, size, group), 1, waits, name=name or kind)] if group.size > 1 else []


class Layer:
    """The blocks of one layer of a shard."""

    def __init__(self, shard: Shard, sparse: bool = False) -> None:
        self.shard, self.sparse = shard, sparse
        self.hidden = shard.model.hidden

    # ------------------------------------------------------------------ shared parts
    @property
    def _activation_bytes(self) -> float:
        return float(self.shard.tokens * self.hidden * self.shard.element)

    def norm(self) -> Block:
        s = self.shard
        if s.model.norm == "layer":
            return [op(s, "layer_norm", s.spread_tokens, self.hidden)]
        if s.fused or s.framework.fused_norm:
            return [op(s, "rms_norm", s.spread_tokens, self.hidden)]
        return [op(s, "norm_eager_fwd", s.spread_tokens, self.hidden, launches=8)]

    def norm_backward(self) -> Block:
        s = self.shard
        if s.model.norm == "layer":
            return [op(s, "layer_norm_bwd", s.spread_tokens, self.hidden, launches=3)]
        if s.fused or s.framework.fused_norm:
            return [op(s, "rms_norm_bwd", s.spread_tokens, self.hidden, launches=3)]
        return [op(s, "norm_eager_bwd", s.spread_tokens, self.hidden, launches=15)]

    def residual(self) -> Block:
        s = self.shard
        passes = 3.0 + (1.5 if s.framework.dropout else 0.0)
        return [stream(s, passes, s.spread_tokens * self.hidden, name="residual")]

    def residual_backward(self) -> Block:
        s = self.shard
        passes = 3.0 + (2.5 if s.framework.dropout else 0.0)
        return [stream(s, passes, s.spread_tokens * self.hidden, name="residual grad")]

    def gather(self, waits: bool = True, name: str = "gather sequence") -> Block:
        """What a column-parallel linear needs before it: the whole sequence, where it was divided."""
        s = self.shard
        return collective("all_gather", self._activation_bytes, s.tp, waits, name) if s.splits_sequences else []

    def reduce(self, waits: bool = True, name: str = "reduce") -> Block:
        """What a row-parallel linear needs after it."""
        s = self.shard
        kind = "reduce_scatter" if s.splits_sequences else "all_reduce"
        return collective(kind, self._activation_bytes, s.tp, waits, name)

    # ------------------------------------------------------------------ attention
    def _qkv_width(self) -> int:
        s = self.shard
        return (s.heads + 2 * s.kv_heads) * s.model.head_dim

    def projections(self) -> Block:
        s, m = self.shard, self.shard.model
        if m.latent:
            return self._latent_projections()
        if s.framework.joins_qkv:
            return linear(s, s.tokens, self._qkv_width(), self.hidden, "qkv")
        return [
            *linear(s, s.tokens, s.heads * m.head_dim, self.hidden, "q"),
            *linear(s, s.tokens, 2 * s.kv_heads * m.head_dim, self.hidden, "kv", count=2),
        ]

    def _latent_sizes(self) -> list[tuple[int, int, str]]:
        """(n, k, name) of the projections of multi-head latent attention, divided over tensor parallel ranks."""
        s, m = self.shard, self.shard.model
        query = s.heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
        sizes = [(m.q_lora_rank, self.hidden, "q down"), (query, m.q_lora_rank, "q up")] if m.q_lora_rank else []
        sizes = sizes or [(query, self.hidden, "q")]
        sizes.append((m.kv_lora_rank + m.qk_rope_head_dim, self.hidden, "kv down"))
        sizes.append((s.heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank, "kv up"))
        return sizes

    def _latent_projections(self) -> Block:
        s = self.shard
        return [piece for n, k, name in self._latent_sizes() for piece in linear(s, s.tokens, n, k, name)]

    def rotary(self, backward: bool = False) -> Block:
        s, m = self.shard, self.shard.model
        if m.positions != "rotary":
            return []
        kind = "rotary_bwd" if backward else "rotary_fwd"
        heads = s.heads + s.kv_heads
        if s.fused or s.framework.fused_rotary:
            return [stream(s, 2.0, s.tokens * heads * m.head_dim, launches=2, name=kind)]
        launches = 10 if backward else 5
        return [
            op(s, kind, s.sequences, s.heads, s.seq, m.head_dim, launches=launches),
            op(s, kind, s.sequences, s.kv_heads, s.seq, m.head_dim, launches=launches),
        ]

    def core(self) -> Block:
        """Attention proper, between the projections."""
        s, m = self.shard, self.shard.model
        if s.attention == "unfused":
            return self._unfused_core()
        head = m.qk_nope_head_dim + m.qk_rope_head_dim if m.latent else m.head_dim
        block = [*self._repeated(2.0), *self._ring(1.0), op(s, "sdpa_fwd", s.sequences, s.heads, *self._span(head))]
        if not s.framework.joins_qkv:
            block.append(stream(s, 2.0, s.tokens * s.heads * m.head_dim, name="attention copy"))
        return block

    def core_backward(self) -> Block:
        s, m = self.shard, self.shard.model
        if s.attention == "unfused":
            return self._unfused_core_backward()
        head = m.qk_nope_head_dim + m.qk_rope_head_dim if m.latent else m.head_dim
        block = [*self._ring(2.0), op(s, "sdpa_bwd", s.sequences, s.heads, *self._span(head), launches=4)]
        block += self._repeated(1.5)
        if not s.framework.joins_qkv:
            block.append(stream(s, 2.0, s.tokens * s.heads * m.head_dim, name="attention copy"))
        elif m.positions == "rotary":
            block.append(stream(s, 2.0, s.tokens * self._qkv_width(), name="join qkv grads"))
        return block

    def _repeated(self, passes: float) -> Block:
        """Keys and values copied for every query head that shares them, where kernels do not share by themselves."""
        s = self.shard
        if s.fused or s.framework.joins_qkv or s.kv_heads == s.heads:
            return []
        return [stream(s, passes, s.tokens * s.heads * s.model.head_dim, name="repeat keys and values")] * 2

    def _span(self, head: int) -> tuple[int, int]:
        """(sequence, head) of the attention kernels; a context-parallel rank does a 1/cp share of the square."""
        s = self.shard
        return round(s.train.seq / s.parallel.cp**0.5), head

    def _ring(self, copies: float) -> Block:
        """Keys and values that go round between context-parallel ranks, behind the attention of the part at hand."""
        s = self.shard
        size = copies * 2.0 * s.tokens * s.parallel.cp * s.kv_heads * s.model.head_dim * s.element
        return collective("all_gather", size, s.cp, waits=False, name="context exchange")

    def _unfused_core(self) -> Block:
        s, m = self.shard, self.shard.model
        batch, (seq, _) = s.sequences * s.heads, self._span(m.head_dim)
        block = [
            *self._ring(1.0),
            op(s, "bmm", batch, seq, seq, m.head_dim, name="scores"),
            op(s, "softmax_fwd", s.sequences, s.heads, seq),
            op(s, "bmm", batch, seq, m.head_dim, seq, name="values"),
            stream(s, 2.0, s.tokens * s.heads * m.head_dim, name="attention copy"),
        ]
        if s.framework.dropout:
            block.insert(-2, stream(s, 2.5, batch * seq * seq, name="attention dropout"))
        return block

    def _unfused_core_backward(self) -> Block:
        s, m = self.shard, self.shard.model
        batch, (seq, _) = s.sequences * s.heads, self._span(m.head_dim)
        block = [
            *self._ring(2.0),
            op(s, "bmm_bwd", batch, seq, m.head_dim, seq, launches=2, name="values grad"),
            op(s, "softmax_bwd", s.sequences, s.heads, seq),
            op(s, "bmm_bwd", batch, seq, seq, m.head_dim, launches=2, name="scores grad"),
            stream(s, 4.0, s.tokens * s.heads * m.head_dim, launches=2, name="attention copy"),
        ]
        if s.framework.dropout:
            block.insert(-3, stream(s, 2.5, batch * seq * seq, name="attention dropout grad"))
        return block

    def _out_width(self) -> int:
        s, m = self.shard, self.shard.model
        return s.heads * (m.v_head_dim if m.latent else m.head_dim)

    def attention(self) -> Block:
        s = self.shard
        out = linear(s, s.tokens, self.hidden, self._out_width(), "out")
        return [
            *self.norm(),
            *self._after_gather(self.projections()),
            *self.rotary(),
            *self.core(),
            *(out if s.model.parallel_residual else self._before_reduce(out, "attention reduce")),
            *self.residual(),
        ]

    def _after_gather(self, products: Block) -> Block:
        """Products that need the whole sequence: after it is gathered, or in step with the gathering."""
        if not self.shard.tp_overlap_forward:
            return [*self.gather(), *products]
        return [*self.gather(waits=False), *products, *_join(self.shard)]

    def _before_reduce(self, products: Block, name: str) -> Block:
        """Products whose result is reduced: before the reduction, or in step with it."""
        if not self.shard.tp_overlap_forward:
            return [*products, *self.reduce(name=name)]
        return [*self.reduce(waits=False, name=name), *products, *_join(self.shard)]

    def attention_backward(self) -> Block:
        s = self.shard
        out_inputs, out_weights = linear_backward(s, s.tokens, self.hidden, self._out_width(), "out")
        inputs, weights = self._projections_backward()
        return [
            *self.residual_backward(),
            *self.gather(name="gather grads"),
            *out_inputs,
            *out_weights,
            *self.core_backward(),
            *self.rotary(backward=True),
            *self._overlapped(inputs, weights),
            *self.norm_backward(),
        ]

    def _projections_backward(self) -> tuple[Block, Block]:
        s, m = self.shard, self.shard.model
        if m.latent:
            parts = [linear_backward(s, s.tokens, n, k, name) for n, k, name in reversed(self._latent_sizes())]
            return [p for inputs, _ in parts for p in inputs], [p for _, weights in parts for p in weights]
        if s.framework.joins_qkv:
            return linear_backward(s, s.tokens, self._qkv_width(), self.hidden, "qkv")
        query = linear_backward(s, s.tokens, s.heads * m.head_dim, self.hidden, "q")
        rest = linear_backward(s, s.tokens, 2 * s.kv_heads * m.head_dim, self.hidden, "kv", count=2)
        join = [stream(s, 3.0, s.tokens * self.hidden, name="sum qkv grads")]
        return [*query[0], *rest[0], *join], [*query[1], *rest[1]]

    def _overlapped(self, inputs: Block, weights: Block) -> Block:
        """The input gradient's reduction, behind the weight gradient where the framework overlaps them."""
        again = self.gather(waits=not self.shard.tp_overlap, name="gather inputs again")
        if not self.shard.tp_overlap:
            return [*again, *inputs, *weights, *self.reduce(name="grad reduce")]
        return [*again, *inputs, *self.reduce(waits=False, name="grad reduce"), *weights, *_join(self.shard)]

    # ------------------------------------------------------------------ MLP
    def mlp(self) -> Block:
        if self.sparse:
            from lumos.program.moe import experts_forward

            return [*self.norm(), *experts_forward(self), *self.residual()]
        s = self.shard
        ffn = s.model.ffn // s.parallel.tp
        *inward, down = self.dense(s.tokens, ffn)
        return [
            *([] if s.model.parallel_residual else self.norm()),
            *self._after_gather(inward),
            *self._before_reduce([down], "mlp reduce"),
            *self.residual(),
        ]

    def dense(self, tokens: int, ffn: int) -> Block:
        s = self.shard
        inward = 2 if s.model.gated else 1
        parts = 1 if s.framework.joins_gate else inward
        return [
            *linear(s, tokens, inward * ffn, self.hidden, "up", count=parts),
            *self.activation(tokens, ffn),
            *linear(s, tokens, self.hidden, ffn, "down"),
        ]

    def activation(self, tokens: int, ffn: int, backward: bool = False) -> Block:
        s, model = self.shard, self.shard.model
        if s.fused or s.framework.fused_activation:
            passes = (5.0 if backward else 3.0) if model.gated else (3.0 if backward else 2.0)
            return [stream(s, passes, tokens * ffn, name="activation")]
        if model.gated:
            if backward:
                return [
                    op(s, "mul", tokens, ffn), op(s, "mul", tokens, ffn), op(s, "silu_bwd", tokens, ffn),
                ]  # fmt: skip
            return [op(s, "silu", tokens, ffn), op(s, "mul", tokens, ffn)]
        if s.framework.eager_gelu:
            passes, launches = (28.0, 11) if backward else (18.0, 8)
            return [stream(s, passes / launches, tokens * ffn, name="gelu")] * launches
        return [op(s, "gelu_bwd" if backward else "gelu", tokens, ffn)]

    def mlp_backward(self) -> Block:
        if self.sparse:
            from lumos.program.moe import experts_backward

            return [*self.residual_backward(), *experts_backward(self), *self.norm_backward()]
        s = self.shard
        ffn = s.model.ffn // s.parallel.tp
        down_inputs, down_weights = linear_backward(s, s.tokens, self.hidden, ffn, "down")
        inward = 2 if s.model.gated else 1
        parts = 1 if s.framework.joins_gate else inward
        inputs, weights = linear_backward(s, s.tokens, inward * ffn, self.hidden, "up", count=parts)
        return [
            *self.residual_backward(),
            *self.gather(name="gather grads"),
            *down_inputs,
            *down_weights,
            *self.activation(s.tokens, ffn, backward=True),
            *self._overlapped(inputs, weights),
            *([] if s.model.parallel_residual else self.norm_backward()),
        ]

    # ------------------------------------------------------------------ the whole
    def forward(self) -> Block:
        more = _host_only(self.shard, self.shard.framework.layer_launches + self.shard.gather_launches)
        return [*self.attention(), *self.mlp(), *more]

    def backward(self) -> Block:
        more = _host_only(self.shard, 2 * self.shard.framework.layer_launches + self.shard.gather_launches)
        return [*self.mlp_backward(), *self.attention_backward(), *more]

    def recomputed(self) -> Block:
        """What is run again before the backward pass."""
        recompute = self.shard.train.recompute
        kept = _host_only(self.shard, self.shard.framework.checkpoint_launches)
        if recompute == "full":
            return [*self.forward(), *kept]
        if recompute == "selective":
            return [*self.core(), *kept]
        return []


def _host_only(shard: Shard, launches: float) -> Block:
    """What costs the host time and the GPU none."""
    return [Piece(Operator("stream", (0,), shard.precision), round(launches), name="host")] if launches else []


def _join(shard: Shard) -> Block:
    return [Piece(Operator("stream", (0,), shard.precision), 0, joins=True, name="wait")]
