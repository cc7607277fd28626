"""MLP: the dense second half of a layer, forward and backward."""

from __future__ import annotations

from lumos.described import primitives as ops
from lumos.program.layout import RankLayout
from lumos.program.op import Ops


def mlp(s: RankLayout) -> Ops:
    """Norm, up (and gate), activation, down, residual."""
    return [*([] if s.shares_norm else ops.norm(s)), *mlp_inside(s), *ops.residual(s)]


def mlp_inside(s: RankLayout) -> Ops:
    """The same without norm and residual."""
    inward, down = dense(s, s.tokens, s.model.ffn // s.parallel.tp)
    return [*ops.after_gather(s, inward), *ops.before_reduce(s, down, "mlp reduce")]


def mlp_backward(s: RankLayout) -> Ops:
    ffn = s.model.ffn // s.parallel.tp
    down_inputs, down_weights = ops.linear_backward(s, s.tokens, s.model.hidden, ffn, "down")
    up = ops.linear_backward(s, s.tokens, s.inward * ffn, s.model.hidden, "up", count=_parts(s))
    return [
        *ops.residual_backward(s),
        *ops.gather(s, name="gather grads", element=ops.gathered_element(s)),
        *down_inputs,
        *down_weights,
        *activation(s, s.tokens, ffn, backward=True),
        *ops.gradients_overlapped(s, *up),
        *([] if s.shares_norm else ops.norm_backward(s)),
    ]


def dense(s: RankLayout, tokens: int, ffn: int) -> tuple[Ops, Ops]:
    """(up and activation, down) of an MLP of this width."""
    up = ops.linear(s, tokens, s.inward * ffn, s.model.hidden, "up", count=_parts(s))
    return [*up, *activation(s, tokens, ffn)], ops.linear(s, tokens, s.model.hidden, ffn, "down")


def _parts(s: RankLayout) -> int:
    return 1 if s.framework.joins_gate else s.inward


def activation(s: RankLayout, tokens: int, ffn: int, backward: bool = False) -> Ops:
    """The activation function; it stands for all that the MLP keeps of its inner width."""
    saves = 0.0 if backward else activation_bytes(s) * tokens * ffn
    grad = " grad" if backward else ""
    if s.framework.chains and s.model.activation == "gelu" and not s.model.gated:
        return [ops.chain(s, "gelu", backward, tokens, ffn, saves=saves)]
    if s.fused or s.framework.fused_activation:
        row = f"{'gated' if s.model.gated else 'plain'} activation{grad}"
        return [ops.stream(s, row, tokens * ffn, name="activation", saves=saves)]
    if s.model.gated and backward:
        return [ops.op(s, kind, tokens, ffn) for kind in ("mul", "mul", "silu_bwd")]
    if s.model.gated:
        return [ops.op(s, "silu", tokens, ffn, saves=saves), ops.op(s, "mul", tokens, ffn)]
    if s.framework.eager_gelu:
        launches = ops.launches_of(f"eager gelu{grad}")
        each = ops.stream(s, f"eager gelu{grad}", tokens * ffn / launches, name="gelu")._replace(launches=1)
        return [each._replace(saves=saves), *[each] * (launches - 1)]
    return [ops.op(s, "gelu_bwd" if backward else "gelu", tokens, ffn, saves=saves)]


def activation_bytes(s: RankLayout) -> float:
    """Kept for one token and one unit of the inner width: 8 eager Llama, 10 eager GPT-2, 6 fused and gated."""
    e, gated = float(s.element), s.model.gated
    if s.makes_anew or s.train.mode == "lora":
        # The inputs of the activation; its output is made anew. Adapters sit beside attention (as in MLPerf's
        # fine-tuning): the frozen linear layers of the MLP keep no input.
        return 2 * e if gated else e
    if gated:
        # gate, up, and the product that the last linear layer reads; eager: also silu(gate), which the product reads.
        return activation_input_bytes(s) + s.linear_element + (0.0 if s.fused or s.framework.fused_activation else e)
    if s.model.activation == "relu":
        return float(s.linear_element)  # relu keeps its output, the input of the linear layer after it
    if writes_out_gelu(s) and s.model.activation == "gelu":
        return 5 * e  # x, tanh, x / 2, 1 + tanh, and their product
    return e + s.linear_element


def activation_input_bytes(s: RankLayout) -> float:
    """The part of `activation_bytes` that the activation reads; the rest can be made anew from it."""
    return float((1 if s.caches_fp8 else s.element) * s.inward)


def writes_out_gelu(s: RankLayout) -> bool:
    """GELU as eight operators."""
    return s.framework.eager_gelu and not s.fused and not s.model.gated


def activation_gradient_bytes(s: RankLayout) -> float:
    """Bytes of one token and one unit of the inner width at the activation's backward pass, beyond what is kept.

    The gradients of the MLP's product and of both its factors, less the product itself, which the last linear layer has
    released. Plain activations: the gradients of output and input, less the output. Written out, as if gated.
    """
    return 2.0 * s.element if s.model.gated or writes_out_gelu(s) else float(s.element)
