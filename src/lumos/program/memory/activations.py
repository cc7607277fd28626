"""Saved: what autograd keeps of one layer between its forward and its backward pass, and what the backward adds.

Eager models (transformers) are counted operator by operator: an operator keeps what its backward formula reads, and a
tensor that several operators keep is counted once. Fused and compiled chains keep their inputs only. Bytes a token,
with h hidden, f ffn, a query and k key-value heads of d, in 16 bits with flash attention:

| | eager Llama | eager GPT-2 | fused, gated |
|---|---|---|---|
| two norms, with their outputs | 16 h + 8 | 8 h + 16 | 8 h + 8 |
| attention | 4 (a + k) d + 4 a | 4 (a + k) d + 4 a | 4 (a + k) d + 4 a |
| MLP | 8 f | 10 f | 6 f |

Known error on one H200, by differences over layers, batch, sequence and vocabulary: the allocator's rounding, 0.1 to
1 % of the peak, up to 3 % of models under 1 GiB.
"""

from __future__ import annotations

from typing import NamedTuple

from lumos.program.memory.allocator import Habits
from lumos.program.rank_layout import Shard

_LOW = frozenset({"fp8", "mxfp8", "nvfp4"})


class Saved(NamedTuple):
    """Bytes of one layer and one micro-batch."""

    kept: float  # between forward and backward
    backward: float  # alive at the worst moment of the backward, beyond `kept`


class Sizes:
    """The sizes of one rank that the formulas share, computed once."""

    def __init__(self, shard: Shard, habits: Habits) -> None:
        self.shard, self.habits = shard, habits
        model, framework = shard.model, shard.framework
        self.e = shard.element
        # A linear layer in 8 bits keeps its input in them.
        self.linear = 1 if shard.train.precision in _LOW else self.e
        self.tokens, self.spread = shard.tokens, shard.spread_tokens
        self.hidden = model.hidden
        self.compiled = shard.train.compile
        self.fused = shard.fused
        self.written_out = framework.eager_gelu and not self.fused and not model.gated  # GELU as eight operators
        self.dropout = framework.dropout
        # Adapters sit beside the linear layers of attention, as in MLPerf's fine-tuning: frozen ones keep no input.
        self.frozen_mlp = shard.train.mode == "lora"

    def stream(self) -> float:
        """The residual stream, in the activations' precision."""
        return self.e * self.spread * self.hidden


def norm(sizes: Sizes) -> float:
    """A norm over the hidden size, without its output, which belongs to the operator that reads it."""
    if norm_copies_input(sizes):
        # x.float() (kept by pow and by the product), rsqrt, and the normalised x that the weight multiplies.
        return (4 + sizes.e) * sizes.spread * sizes.hidden + 4 * sizes.spread
    statistics = 8 if sizes.shard.model.norm == "layer" else 4  # rstd, and the mean, in fp32
    return sizes.stream() + statistics * sizes.spread


def norm_copies_input(sizes: Sizes) -> bool:
    """RMS norm as transformers writes it works on a copy in fp32; the others keep the residual stream itself."""
    return sizes.shard.model.norm == "rms" and not sizes.fused and not sizes.shard.framework.fused_norm


def norm_output(sizes: Sizes) -> float:
    """What the linear layers after a norm keep: its output, one tensor for all. The compiler makes it anew."""
    tokens = sizes.tokens if sizes.habits.keeps_gathered else sizes.spread
    return 0.0 if sizes.compiled else float(sizes.linear * tokens * sizes.hidden)


def attention(sizes: Sizes) -> float:
    """Between the norm and the residual: projections, rotary, attention proper, output projection."""
    shard, model = sizes.shard, sizes.shard.model
    if model.latent:
        kept = _latent(sizes)
    else:
        # q and k after rotary (whose product keeps only cos and sin), v, and the output, also kept by the linear.
        kept = sizes.e * sizes.tokens * 2 * (shard.heads + shard.kv_heads) * model.head_dim
    if model.qk_norm:
        each = sizes.e if sizes.fused or shard.framework.fused_norm else 4 + sizes.e
        kept += each * sizes.tokens * (shard.heads + shard.kv_heads) * model.head_dim
    if sizes.linear < sizes.e:  # flash attention keeps the output as it is, the linear its 8-bit copy
        kept += sizes.linear * sizes.tokens * shard.heads * (model.v_head_dim or model.head_dim)
    if sizes.compiled:  # one of the two norms' outputs stays, by difference over layers of a compiled model
        kept += sizes.stream()
    return kept + _dropout_mask(sizes)


def core(sizes: Sizes) -> float:
    """Attention proper beyond its operands: what selective recomputation drops."""
    shard = sizes.shard
    if shard.attention != "unfused":
        return 4.0 * sizes.tokens * shard.heads  # log-sum-exp in fp32
    # softmax output (read by its own backward and by the product with v); dropout: its mask and its output.
    return (sizes.e + (1 + sizes.e if sizes.dropout else 0)) * scores(sizes)


def scores(sizes: Sizes) -> float:
    """Elements of the attention scores of all heads."""
    shard = sizes.shard
    return float(sizes.tokens * shard.heads * shard.train.seq)


def _latent(sizes: Sizes) -> float:
    """Multi-head latent attention: both low ranks before and after their norms, whole q and k, and v with k's rest."""
    shard, model = sizes.shard, sizes.shard.model
    query = model.qk_nope_head_dim + model.qk_rope_head_dim
    ranks = 2 * (model.q_lora_rank + model.kv_lora_rank) + model.qk_rope_head_dim
    heads = shard.heads * (2 * query + model.qk_nope_head_dim + 2 * model.v_head_dim)
    return float(sizes.e * sizes.tokens * (ranks + heads))


def _dropout_mask(sizes: Sizes) -> float:
    """Of the dropout before a residual: one byte an element."""
    return float(sizes.spread * sizes.hidden) if sizes.dropout else 0.0


def mlp_bytes(sizes: Sizes) -> float:
    """Of one token and one unit of the MLP's inner width."""
    model, e = sizes.shard.model, sizes.e
    if sizes.compiled or sizes.frozen_mlp:
        return 2.0 * e if model.gated else float(e)  # the inputs of the activation; its output is made anew
    fused = sizes.fused or sizes.shard.framework.fused_activation
    if model.gated:
        # gate, up, and the product that the last linear reads; eager: also silu(gate), which the product reads.
        return 2.0 * e + sizes.linear + (0 if fused else e)
    if model.activation == "relu":
        return float(sizes.linear)  # relu keeps its output, the input of the linear after it
    if sizes.written_out and model.activation == "gelu":
        return 5.0 * e  # x, tanh, x / 2, 1 + tanh, and their product
    return float(e + sizes.linear)


def dense(sizes: Sizes) -> Saved:
    """A layer with a dense MLP."""
    shard = sizes.shard
    width = shard.model.ffn // shard.parallel.tp
    mlp = mlp_bytes(sizes) * sizes.tokens * width
    return _layer(sizes, mlp + _dropout_mask(sizes), _activation_gradients(sizes) * sizes.tokens * width)


def sparse(sizes: Sizes) -> Saved:
    """A layer with experts. The busiest rank decides."""
    shard, model = sizes.shard, sizes.shard.model
    copies = sizes.spread * model.top_k * shard.train.imbalance
    shared = model.shared_experts * model.expert_ffn
    # Copies of the tokens as the experts read them, what the experts return (for the gradient of the weights that
    # scale it), the MLP's inside, and the router's logits and probabilities in fp32.
    kept = copies * (sizes.linear + sizes.e) * sizes.hidden + 8.0 * sizes.spread * model.experts
    kept += mlp_bytes(sizes) * (copies * model.expert_ffn + sizes.spread * shared)
    added = _activation_gradients(sizes) * copies * model.expert_ffn + sizes.e * copies * sizes.hidden
    if not shard.framework.grouped_experts:
        # A loop over the experts: the gradient of one expert's slice is a tensor of zeros as large as all of them.
        share = added / max(1, model.experts // shard.parallel.ep)
        added = share + sizes.e * model.experts / shard.parallel.ep * 2 * model.hidden * model.expert_ffn
    return _layer(sizes, kept, added)


def _activation_gradients(sizes: Sizes) -> float:
    """Bytes of a token and unit of inner width at the activation's backward.

    The gradients of the MLP's product and of both its factors, less the product itself, which the last linear has let
    go. Plain activations: the gradients of output and input, less the output. Spelled out, as if gated.
    """
    return 2.0 * sizes.e if sizes.shard.model.gated or sizes.written_out else float(sizes.e)


def _layer(sizes: Sizes, mlp: float, mlp_gradients: float) -> Saved:
    model, recompute = sizes.shard.model, sizes.shard.train.recompute
    norms = 1 if model.parallel_residual else 2
    inside = core(sizes)
    kept = norms * (norm(sizes) + norm_output(sizes)) + attention(sizes) + mlp
    backward = mlp_gradients + sizes.stream()  # and the gradient of the residual stream
    if sizes.shard.splits_sequences:
        backward += sizes.e * sizes.tokens * sizes.hidden  # gathered over the tensor-parallel ranks
    if sizes.shard.attention == "unfused":
        # The gradients before and after the softmax; the MLP's part is free by then.
        backward = max(backward, 2 * sizes.e * scores(sizes) - mlp)
    if recompute == "none":
        return Saved(kept + inside, backward)
    if recompute == "selective":
        if sizes.shard.attention == "unfused":
            backward = max(backward, inside + 2 * sizes.e * scores(sizes) - mlp)
        return Saved(kept, backward)
    # A norm that keeps its input as it is keeps the layer's entry: not twice.
    shared = 0.0 if norm_copies_input(sizes) else sizes.stream()
    return Saved(sizes.stream(), kept + inside + backward - shared)
