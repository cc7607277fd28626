"""Primitives: the operators that layers are made of, as one rank issues them for one micro-batch.

Each function returns Ops for the sizes of a RankLayout. Element-wise chains are one
memory-bound operator where the framework fuses them, and the sampled eager chains where it does not. How often a chain
passes over its tensor, and how many kernels it launches, is in `data/layer_operators.toml`. What an operator saves for
the backward pass is stated with the operator: time and memory both follow from these blocks.
"""

from __future__ import annotations

from lumos.data_files import read_table
from lumos.dtypes import BYTES
from lumos.program.layout import RankLayout
from lumos.program.op import BESIDE, Op, Ops
from lumos.program.operators import Collective, Group, Operator


def op(
    s: RankLayout, kind: str, *shape: int, launches: int = 1, dtype: str = "", name: str = "", saves: float = 0.0
) -> Op:
    """An operator in the activations' precision, unless another is named."""
    work = Operator(kind, shape, dtype or s.precision)
    return Op(name or kind, work=work, launches=launches, saves=saves)


def stream(s: RankLayout, row: str, elements: float, name: str = "", saves: float = 0.0, count: float = 1.0) -> Op:
    """A memory-bound operator, as the row of `layer_operators.toml` says, `count` times over."""
    facts = read_table("layer_operators.toml")[row]
    size = round(count * (facts.get("passes", 0.0) * elements * s.element + facts.get("bytes", 0.0)))
    launches = round(facts.get("launches", 1) * max(1.0, count))
    return Op(name or row, work=Operator("stream", (size,), s.precision), launches=launches, saves=saves)


def launches_of(row: str) -> int:
    """Kernels of an operator that is priced as one."""
    launches: int = read_table("layer_operators.toml")[row]["launches"]
    return launches


def chain(s: RankLayout, name: str, backward: bool, *shape: int, saves: float = 0.0) -> Op:
    """Element-wise work that was sampled whole, as the framework runs it: `neox_gelu_bwd` is that of GPT-NeoX."""
    kind = f"{s.framework.chains}{name}_{'bwd' if backward else 'fwd'}"
    return op(s, kind, *shape, launches=launches_of(kind), saves=saves)


def host_only(launches: float) -> Ops:
    """What costs the host time and the GPU none."""
    return [Op("host", launches=round(launches))] if launches else []


def joined(block: Ops) -> Ops:
    """A block, and a wait for the collectives beside it, which run one after the other."""
    last = next((back for back, op in enumerate(reversed(block), 1) if op.stream == BESIDE), 0)
    return [*block, Op("wait", launches=0, after=(-last,))] if last else block


def collective(kind: str, size: float, group: Group, stream: int = 0, name: str = "") -> Ops:
    """A collective over a group; nothing if the group is one rank."""
    return [Op(name or kind, work=Collective(kind, size, group), stream=stream)] if group.size > 1 else []


# ---------------------------------------------------------------------- linear layers
def linear(
    s: RankLayout, m: int, n: int, k: int, name: str, count: int = 1, saves: float = 0.0, wide: bool = False
) -> Ops:
    """The forward pass of a linear layer of n × k, as `count` equal matmuls where the framework does not join them.

    `wide`: it runs in 16 bits where others run in 8, as the output matrix does in every framework.
    """
    casts = _casts(s, m, n, k, name) if s.eight_bit and not wide else _restored(s, n * k, name, wide)
    matmul = op(s, "gemm_tn", m, n // count, k, dtype=_linear_dtype(s, wide), name=name)
    matmuls = [matmul._replace(saves=saves), *[matmul] * (count - 1)]
    if s.model.bias and not s.fused and not s.framework.fused_bias:
        matmuls.append(stream(s, "linear bias", m * n, name=f"{name} bias"))
    return [*casts, *matmuls]


def _linear_dtype(s: RankLayout, wide: bool) -> str:
    return s.precision if wide and s.eight_bit else s.train.precision


def _restored(s: RankLayout, weights: int, name: str, wide: bool) -> Ops:
    """Quantised weights in 16 bits, which every matmul that reads them makes again (bitsandbytes)."""
    row = f"{s.train.weight_precision} weights"
    is_quantised = s.train.weight_precision in ("int8", "nf4") and not wide
    return [stream(s, row, weights, name=f"{name} dequantise")] if is_quantised else []


def _casts(s: RankLayout, m: int, n: int, k: int, name: str) -> Ops:
    """To 8 bits: the input and, where scales are not kept from step to step, the weights."""
    if s.framework.fused:
        return [stream(s, "linear cast", m * k, name=f"{name} cast")]
    tokens = m // s.parallel.tp if _is_gathered_low(s, k) else m
    return [
        stream(s, "dynamic cast", tokens * k, name=f"{name} cast"),
        stream(s, "dynamic weight cast", n * k, name=f"{name} weight cast"),
    ]


def _is_gathered_low(s: RankLayout, k: int) -> bool:
    """Whether an input of this width is gathered in 8 bits: a rank casts its part, with one factor for all of them.

    torchao's Float8ColwiseParallel does so; it has no such gather for factors of rows.
    """
    scaled = s.eight_bit and not s.framework.fused and s.train.fp8_scaling == "tensor"
    return scaled and s.splits_sequences and k == s.model.hidden


def linear_backward(
    s: RankLayout, m: int, n: int, k: int, name: str, count: int = 1, wide: bool = False
) -> tuple[Ops, Ops]:
    """(input gradient, weight gradient) of a linear layer."""
    dtype, low = _linear_dtype(s, wide), s.eight_bit and not wide
    dynamic = low and not s.framework.fused
    inputs = _restored(s, n * k, name, wide)
    if low:
        row = "dynamic grad cast" if dynamic else "linear grad cast"
        inputs.append(stream(s, row, m * n, name=f"{name} grad cast"))
    if dynamic:
        inputs.append(stream(s, "dynamic weight cast", n * k, name=f"{name} weight cast"))
    inputs += [op(s, "gemm_nn", m, k, n // count, dtype=dtype, name=f"{name} dgrad")] * count
    if count > 1:
        inputs.append(stream(s, "linear grad sum", m * k, name=f"{name} sum", count=count - 1))
    if s.train.mode == "lora":  # only the adapters have weight gradients, and they are small
        return inputs, []
    again = "transpose again" if _is_gathered_low(s, k) else "dynamic cast again"
    weights = [stream(s, again, m * k, name=f"{name} cast")] if dynamic else []
    weights += [op(s, "gemm_nt", n // count, k, m, dtype=dtype, name=f"{name} wgrad")] * count
    weights += accumulated(s, n * k, name, count)
    if s.model.bias:
        weights.append(stream(s, "linear bias grad", m * n, name=f"{name} bias grad"))
    return inputs, [part._replace(weight_gradient=True) for part in weights]


def accumulated(s: RankLayout, weights: int, name: str, count: int) -> Ops:
    """A weight gradient added to those of the micro-batches before."""
    if s.framework.accumulates_fp32:
        facts = read_table("layer_operators.toml")[
            "accumulate fp32, fused" if s.framework.fused_accumulation else "accumulate fp32"
        ]
        size = round(weights * facts["bytes"])
        work = Operator("stream", (size,), "fp32")
        return [Op(f"{name} accumulate", work=work, launches=facts["launches"] * count)]
    if s.train.microbatches > 1:
        share = 1 - 1 / s.train.microbatches  # the first micro-batch has nothing to add to
        added = stream(s, "accumulate", share * weights, name=f"{name} accumulate")
        return [added._replace(launches=count)]
    return []


# ---------------------------------------------------------------------- norms and residuals
def norm(s: RankLayout) -> Ops:
    """A norm over the hidden size, with its output, which the linear layers after it keep."""
    return [_norm_op(s, s.spread_tokens, s.model.hidden, _norm_saves(s) + norm_output_bytes(s))]


def head_norm(s: RankLayout) -> Ops:
    """The norms of queries and keys, where the model has them."""
    if not s.model.qk_norm:
        return []
    fused, block = s.fused or s.framework.fused_norm, []
    for heads in (s.heads, s.kv_heads):
        width = heads * s.model.head_dim
        saves = float((s.element if fused else 4 + s.element) * s.tokens * width)
        block.append(_norm_op(s, s.tokens, width, saves))
    return block


def _norm_op(s: RankLayout, tokens: int, width: int, saves: float) -> Op:
    if s.framework.chains:
        return chain(s, f"{s.model.norm}_norm", False, tokens, width, saves=saves)
    if s.model.norm == "layer":
        return op(s, "layer_norm", tokens, width, saves=saves)
    if s.fused or s.framework.fused_norm:
        return op(s, "rms_norm", tokens, width, saves=saves)
    return op(s, "norm_eager_fwd", tokens, width, launches=launches_of("norm"), saves=saves)


def norm_backward(s: RankLayout) -> Ops:
    return [_norm_backward_op(s, s.spread_tokens, s.model.hidden)]


def head_norm_backward(s: RankLayout) -> Ops:
    """The gradients of the norms of queries and keys."""
    if not s.model.qk_norm:
        return []
    return [_norm_backward_op(s, s.tokens, heads * s.model.head_dim) for heads in (s.heads, s.kv_heads)]


def _norm_backward_op(s: RankLayout, tokens: int, width: int) -> Op:
    if s.framework.chains:
        return chain(s, f"{s.model.norm}_norm", True, tokens, width)
    if s.model.norm == "layer":
        return op(s, "layer_norm_bwd", tokens, width, launches=launches_of("fused norm grad"))
    if s.fused or s.framework.fused_norm:
        return op(s, "rms_norm_bwd", tokens, width, launches=launches_of("fused norm grad"))
    return op(s, "norm_eager_bwd", tokens, width, launches=launches_of("norm grad"))


def norm_copies_input(s: RankLayout) -> bool:
    """RMS norm as transformers writes it works on a copy in fp32; the others keep the residual stream itself."""
    return s.model.norm == "rms" and not s.fused and not s.framework.fused_norm


def _norm_saves(s: RankLayout) -> float:
    """What a norm keeps of its input."""
    if norm_copies_input(s):
        # x.float() (kept by pow and by the product), rsqrt, and the normalised x that the weight multiplies.
        return (4.0 + s.element) * s.spread_tokens * s.model.hidden + 4.0 * s.spread_tokens
    statistics = 8.0 if s.model.norm == "layer" else 4.0  # rstd, and the mean, in fp32
    return s.residual_bytes + statistics * s.spread_tokens


def norm_output_bytes(s: RankLayout) -> float:
    """What the linear layers after a norm keep: its output, one tensor for all."""
    gathered = s.framework.keeps_gathered and s.splits_sequences
    tokens = s.tokens if gathered else s.spread_tokens
    return 0.0 if s.makes_anew and not gathered else float(s.linear_element * tokens * s.model.hidden)


def residual(s: RankLayout, extra_bytes: float = 0.0) -> Ops:
    """The addition to the residual stream, after dropout where the framework has it, which keeps its mask."""
    elements = s.spread_tokens * s.model.hidden
    if s.framework.chains:
        return [chain(s, "add", False, s.spread_tokens, s.model.hidden, saves=extra_bytes)]
    added = stream(s, "residual", elements, saves=extra_bytes)
    if not s.framework.dropout:
        return [added]
    return [_widened(added, stream(s, "residual dropout", elements), saves=extra_bytes + elements)]


def residual_backward(s: RankLayout) -> Ops:
    elements = s.spread_tokens * s.model.hidden
    if s.framework.chains:
        return [chain(s, "add", True, s.spread_tokens, s.model.hidden)]
    added = stream(s, "residual grad", elements)
    return [_widened(added, stream(s, "residual grad dropout", elements)) if s.framework.dropout else added]


def _widened(one: Op, other: Op, saves: float = 0.0) -> Op:
    """Two memory-bound operators as one kernel."""
    assert isinstance(one.work, Operator)
    assert isinstance(other.work, Operator)
    return one._replace(work=one.work._replace(shape=(one.work.shape[0] + other.work.shape[0],)), saves=saves)


# ---------------------------------------------------------------------- tensor parallelism
def gather(s: RankLayout, stream: int = 0, name: str = "gather sequence", element: float = 0.0) -> Ops:
    """What a column-parallel linear layer needs before it: the whole sequence, if it is divided.

    `element`: bytes of a value on the network, 0 as in the activations.
    """
    size = s.activation_bytes * (element / s.element if element else 1.0)
    return collective("all_gather", size, s.tp, stream, name) if s.splits_sequences else []


def gathered_element(s: RankLayout, forward: bool = False) -> float:
    """Bytes of a value that linear layers of a layer gather over the sequence.

    Transformer Engine casts inputs and gradients to the precision of its matmuls first (gather_along_first_dim in
    pytorch/module/layernorm_linear.py and base.py); their scales are left out. With adapters,
    which read the same in 16 bits, they are gathered as they are (return_layernorm_output_gathered).
    """
    if s.eight_bit and s.framework.fused and s.train.mode != "lora":
        return BYTES[s.train.precision]
    return 1.0 if forward and _is_gathered_low(s, s.model.hidden) else float(s.element)


def reduce(s: RankLayout, stream: int = 0, name: str = "reduce") -> Ops:
    """What a row-parallel linear layer needs after it."""
    kind = "reduce_scatter" if s.splits_sequences else "all_reduce"
    return collective(kind, s.activation_bytes, s.tp, stream, name)


def after_gather(s: RankLayout, block: Ops) -> Ops:
    """Matmuls that need the whole sequence: after it is gathered, or in step with the gathering."""
    element = gathered_element(s, forward=True)
    if not s.tp_overlap_forward:
        return [*gather(s, element=element), *block]
    return joined([*gather(s, BESIDE, element=element), *block])


def before_reduce(s: RankLayout, block: Ops, name: str) -> Ops:
    """Matmuls whose result is reduced: before the reduction, or in step with it."""
    if not s.tp_overlap_forward:
        return [*block, *reduce(s, name=name)]
    return joined([*reduce(s, BESIDE, name=name), *block])


def gradients_overlapped(s: RankLayout, inputs: Ops, weights: Ops) -> Ops:
    """The input gradient's reduction, behind the weight gradient where the framework overlaps them."""
    element = gathered_element(s)
    stream = BESIDE if s.tp_overlap else 0
    again = gather(s, stream, name="gather inputs again", element=element)
    again = [] if s.framework.keeps_gathered else again
    if not s.tp_overlap:
        return [*again, *inputs, *weights, *reduce(s, name="grad reduce")]
    return joined([*again, *inputs, *reduce(s, BESIDE, name="grad reduce"), *weights])
