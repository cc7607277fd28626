"""Functions of torch as a GPU runs them, where fake tensors would run something else.

Attention is one fused kernel, recurrent layers are one call of cuDNN, layouts of convolutions are cuDNN's, and weights
are initialised without drawing values.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import flex_attention as flex

from lumos.dry_run.assumed_values import AssumedValues
from lumos.dry_run.fake_gpu import Replacement
from lumos.dry_run.operator_log import OperatorLog, storage_key


def functions_as_on_gpu(log: OperatorLog, values: AssumedValues) -> Iterator[Replacement]:
    """The functions of torch that are replaced while a dry run lasts."""
    functional, cores = torch.nn.functional, torch._VF
    yield functional, "scaled_dot_product_attention", _fused(log, functional.scaled_dot_product_attention)
    yield functional, "ctc_loss", _with_known_lengths(functional.ctc_loss)
    yield torch._C, "_conv_determine_backend_memory_format", _convolution_format
    yield flex, "flex_attention", _one_kernel_if_compiled(flex.flex_attention)
    for kind in _GATES:
        yield cores, kind, _one_call(log, kind, getattr(cores, kind))
    for name in (*_DRAWS, *_FILLS):
        function = getattr(torch.nn.init, name, None)
        if function is not None:
            yield torch.nn.init, name, _without_draws(function, values, name in _FILLS)


def is_local(tensor: Any) -> bool:
    """Whether this is a tensor of the GPU; a DTensor arrives here again with its local tensors."""
    return type(tensor) in (FakeTensor, torch.nn.Parameter) and tensor.device.type == "cuda"


def autocast(tensor: Any) -> Any:
    """A tensor in the type that autocast gives it on the GPU."""
    if torch.is_autocast_enabled("cuda") and tensor.dtype == torch.float32:
        return tensor.to(torch.get_autocast_dtype("cuda"))
    return tensor


def _convolution_format(x: Any, weight: Any, _: Any) -> torch.memory_format:
    """The layout of cuDNN's results (aten/src/ATen/native/ConvUtils.h): channels last if an operand has it."""
    formats = {torch._prims_common.suggest_memory_format(tensor) for tensor in (x, weight)}
    last = (torch.channels_last, torch.channels_last_3d)
    return next((layout for layout in last if layout in formats), torch.contiguous_format)


def _with_known_lengths(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`ctc_loss` takes lengths as numbers of the host; unknown ones are the longest possible."""

    @functools.wraps(plain)
    def ctc_loss(
        log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *args: Any, **options: Any
    ) -> Any:
        longest = (log_probs.shape[0], targets.shape[-1])
        lengths = map(_numbers, (input_lengths, target_lengths), longest)
        return plain(log_probs, targets, *lengths, *args, **options)

    return ctc_loss


def _numbers(values: Any, unknown: int) -> Any:
    if isinstance(values, FakeTensor):
        return [unknown] * int(values.numel())
    return values.tolist() if isinstance(values, torch.Tensor) else values


def trace_only_compiled_code() -> None:
    """Correct transformers, which takes fake tensors for a compiler and makes masks that eager code does without."""
    for name in ("transformers.masking_utils", "transformers.utils.import_utils", "transformers.utils"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "is_tracing"):
            setattr(module, "is_tracing", lambda *_: bool(torch.compiler.is_compiling()))  # noqa: B010


# ---------------------------------------------------------------------- tf32
# Since torch 2.9 every backend has an `fp32_precision`; once a script has set one, the older settings raise when read.
def matmuls_use_tf32() -> bool:
    """Whether the script allows matmuls of fp32 operands to run as tf32."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return bool(torch.get_float32_matmul_precision() != "highest" if precision is None else precision == "tf32")


def cudnn_uses_tf32(operators: str) -> bool:
    """Whether the script allows it for cuDNN's operators: conv or rnn."""
    precision = getattr(getattr(torch.backends.cudnn, operators, None), "fp32_precision", None)
    return bool(torch.backends.cudnn.allow_tf32) if precision is None else precision == "tf32"


# ---------------------------------------------------------------------- attention
def _fused(log: OperatorLog, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def scaled_dot_product_attention(query: Any, *args: Any, **options: Any) -> Any:
        return attention(log, query, *args, **options) if is_local(query) else plain(query, *args, **options)

    return scaled_dot_product_attention


def attention(
    log: OperatorLog, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """`scaled_dot_product_attention` as a GPU runs it."""
    q, k, v = (autocast(tensor) for tensor in (query, key, value))
    is_grouped = enable_gqa and attn_mask is None
    if not can_be_fused(q, v, attn_mask) or not (is_grouped or q.shape[1] == k.shape[1] == v.shape[1]):
        math = torch._scaled_dot_product_attention_math
        return math(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    truths = mask_values(attn_mask, q)
    mask = torch.where(attn_mask, *truths) if truths else attn_mask
    marks = ("causal" if is_causal else "", "masked" if mask is not None else "", "dropout" if dropout_p else "")
    return _Attention.apply(log, q, k, v, mask, tuple(filter(None, marks)))


def can_be_fused(q: Any, v: Any, mask: Any) -> bool:
    """Whether a fused kernel of PyTorch takes operands of these sizes (aten/native/transformers/cuda/sdp_utils.cpp)."""
    fits = q.dim() == 4 and q.shape[-1] % 8 == 0 and max(q.shape[-1], v.shape[-1]) <= 256
    return bool(fits and not (mask is not None and mask.requires_grad))


def mask_values(mask: Any, q: Any) -> tuple[torch.Tensor, ...]:
    """The numbers to add for the truth values of a mask; none for other masks."""
    if mask is None or mask.dtype != torch.bool:
        return ()
    return tuple(torch.full((), value, dtype=q.dtype, device=q.device) for value in (0.0, float("-inf")))


def forward_shapes(query: Any, key: Any, value: Any, is_masked: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, in the layout of the query, and the logarithms of the sums."""
    same = query.shape[-1] == value.shape[-1]
    out = torch.empty_like(query) if same else query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """One kernel forward, one backward; output and log-sum-exp are kept."""

    @staticmethod
    def forward(ctx: Any, log: OperatorLog, q: Any, k: Any, v: Any, mask: Any, options: tuple[str, ...]) -> Any:
        out, lse = forward_shapes(q, k, v)
        ctx.log, ctx.options = log, options
        log.add("attention.forward", [q, k, v], [out, lse], options)
        ctx.save_for_backward(q, k, v, out, lse, *(() if mask is None else (mask,)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, *_ = ctx.saved_tensors
        results = [torch.empty_like(tensor) for tensor in (q, k, v)]
        ctx.log.add("attention.backward", [q, k, v, out, lse, *grads], results, ctx.options)
        return None, *results, None, None


# ---------------------------------------------------------------------- flex_attention
@torch.library.custom_op("lumos::flex_forward", mutates_args=())  # type: ignore[untyped-decorator]
def flex_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_masked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the logarithms of the sums; a recorder runs this (`ValueOperators._op_flex_forward`)."""
    raise NotImplementedError


@torch.library.custom_op("lumos::flex_backward", mutates_args=())  # type: ignore[untyped-decorator]
def flex_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, is_masked: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    raise NotImplementedError


def backward_shapes(gradient: Any, query: Any, key: Any, value: Any, *_: Any) -> tuple[torch.Tensor, ...]:
    """Gradients have the shapes and layouts of their operands."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, ctx.is_masked = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


flex_forward.register_fake(forward_shapes)
flex_backward.register_fake(backward_shapes)
flex_forward.register_autograd(
    lambda ctx, gradient, _: (*flex_backward(gradient, *ctx.saved_tensors, ctx.is_masked), None), setup_context=_save
)


def _one_kernel_if_compiled(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`flex_attention` in compiled code is one kernel forward and one backward, as inductor makes of it on a GPU.

    Outside compiled code PyTorch's own function runs, which materialises all scores on a GPU, too.
    """

    @functools.wraps(plain)
    def flex_attention(
        query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
        enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, **more: Any,
    ) -> Any:  # fmt: skip
        if not torch.compiler.is_compiling() or more.get("return_aux") is not None:
            more = {"kernel_options": kernel_options, **more}
            return plain(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, **more)
        out, lse = torch.ops.lumos.flex_forward(query, key, value, block_mask is not None)
        return (out, lse) if return_lse else out

    return flex_attention


# ---------------------------------------------------------------------- initialisers
# Some draw until every number lies between two bounds, or fill a tensor row by row in Python; on fake tensors neither
# ends soon. Private functions are called by the public ones, to which libraries keep references of their own.
_DRAWS = ("_no_grad_uniform_", "_no_grad_normal_", "_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
_FILLS = ("_no_grad_fill_", "_no_grad_zero_")


def _without_draws(function: Callable[..., Any], values: AssumedValues, fills: bool) -> Callable[..., Any]:
    """An initialiser that does nothing to fake tensors, except for noting the value with which it fills them."""

    @functools.wraps(function)
    def initialise(tensor: Any, *args: Any, **options: Any) -> Any:
        local = getattr(tensor, "_local_tensor", tensor)
        if not isinstance(local, FakeTensor):
            return function(tensor, *args, **options)
        if fills:
            values.follow("fill_", (local, *(args or options.values() or (0.0,))), local)
        else:
            values.forget(storage_key(local))
        return tensor

    return initialise


# ---------------------------------------------------------------------- recurrent layers
# cuDNN multiplies the inputs of all time steps at once, then runs one matmul and one kernel for the gates at every time
# step; PyTorch without cuDNN makes a dozen operators of every time step.
RECURRENT = "recurrent layers: assuming cuDNN without persistent kernels: one matmul and one gate kernel per time step"
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_CELLS = {"lstm": "aten._thnn_fused_lstm_cell", "gru": "aten._thnn_fused_gru_cell"}
_KEPT = 2  # for the backward pass, besides the gates: states and cells of every time step
_LAUNCH = "compiled"  # kernels that C++ launches one after the other, without a call of PyTorch for each


class _Sizes(NamedTuple):
    """Sizes of a recurrent layer's call."""

    kind: str
    layers: int
    directions: int
    hidden: int
    times: int
    batch: int  # sequences per time step, on average
    rows: int  # of inputs, over all times
    weights: int  # tensors of one layer and direction

    @property
    def gates(self) -> int:
        return _GATES[self.kind] * self.hidden

    @property
    def cell(self) -> str:
        return _CELLS.get(self.kind, "aten.tanh")


def _one_call(log: OperatorLog, kind: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a module of `torch.nn` calls for all layers and time steps."""

    @functools.wraps(plain)
    def run(x: Any, second: Any, *rest: Any) -> Any:
        is_packed = isinstance(rest[0], torch.Tensor | tuple) and not isinstance(rest[0][0], torch.nn.Parameter)
        states, weights, has_bias, layers, _, _, bidirectional, *last = rest if is_packed else (second, *rest)
        states = states if isinstance(states, tuple | list) else (states,)
        each, directions = 4 if has_bias else 2, 1 + bidirectional
        if not is_local(x) or len(weights) != each * layers * directions:  # projections
            return plain(x, second, *rest)
        times = len(second) if is_packed else x.shape[1 if last[0] else 0]
        rows = x.shape[0] if is_packed else x.shape[0] * x.shape[1]
        sizes = _Sizes(kind, layers, directions, states[0].shape[-1], times, max(rows // times, 1), rows, each)
        log.notes[RECURRENT] = None
        return _Recurrent.apply(log, sizes, len(states), autocast(x), *map(autocast, (*states, *weights)))

    return run


class _Recurrent(torch.autograd.Function):  # type: ignore[misc]
    """All layers and time steps forward, and all of them backward."""

    @staticmethod
    def forward(ctx: Any, log: OperatorLog, sizes: _Sizes, states: int, x: Any, *rest: Any) -> Any:
        log.on_host("aten._cudnn_rnn.default")
        with log.paused():
            y = x.new_empty((*x.shape[:-1], sizes.directions * sizes.hidden))
            ends = [torch.empty_like(state) for state in rest[:states]]
            kept = sizes.layers * sizes.directions * sizes.rows * (sizes.gates + _KEPT * sizes.hidden)
            reserve = x.new_empty(kept)
        log.add("aten.empty.memory_format", [], [y, *ends, reserve])
        for start in range(states, len(rest), sizes.weights):  # of every layer and direction
            _layer_forward(log, sizes, x, *rest[start : start + 2])
        ctx.log, ctx.sizes, ctx.states = log, sizes, states
        ctx.save_for_backward(x, *rest, y, reserve)
        return (y, *ends)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *rest, _, _ = ctx.saved_tensors
        log, sizes, weights = ctx.log, ctx.sizes, rest[ctx.states :]
        log.on_host("aten._cudnn_rnn_backward.default")
        with log.paused():
            flat = x.new_empty(sum(weight.numel() for weight in weights))  # gradients are parts of one block
            parts = flat.split([weight.numel() for weight in weights])
            gradients = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
            into = [torch.empty_like(tensor) for tensor in (x, *rest[: ctx.states])]
        log.add("aten.zeros.default", [], [flat])
        log.add("aten.empty.memory_format", [], into)
        for start in reversed(range(0, len(weights), sizes.weights)):
            _layer_backward(log, sizes, x, *weights[start : start + 2])
        return None, None, None, *into, *gradients


def _options(tensor: Any) -> tuple[str, ...]:
    return (_LAUNCH, "tf32") if tensor.dtype == torch.float32 and cudnn_uses_tf32("rnn") else (_LAUNCH,)


def _layer_forward(log: OperatorLog, sizes: _Sizes, x: Any, w_ih: Any, w_hh: Any) -> None:
    options = _options(x)
    with log.paused():
        inputs, gates = x.new_empty(sizes.rows, w_ih.shape[1]), x.new_empty(sizes.rows, sizes.gates)
        step, state = gates[: sizes.batch], x.new_empty(sizes.batch, sizes.hidden)
        w_ih, w_hh = w_ih.detach().t(), w_hh.detach().t()
    log.add("aten.mm.default", [inputs, w_ih], [gates], options)
    for _ in range(sizes.times):
        log.add("aten.addmm_.default", [step, state, w_hh], [step], options)
        with log.paused():
            after = torch.empty_like(state)
        log.add(f"{sizes.cell}.default", [step, state], [after], (_LAUNCH,))


def _layer_backward(log: OperatorLog, sizes: _Sizes, x: Any, w_ih: Any, w_hh: Any) -> None:
    options = _options(x)
    with log.paused():
        inputs, gates = x.new_empty(sizes.rows, w_ih.shape[1]), x.new_empty(sizes.rows, sizes.gates)
        states, step = x.new_empty(sizes.rows, sizes.hidden), gates[: sizes.batch]
        state, by_gate = states[: sizes.batch], gates.t()
        d_inputs, d_ih, d_hh = (torch.empty_like(tensor) for tensor in (inputs, w_ih, w_hh))
        w_ih, w_hh = w_ih.detach(), w_hh.detach()
    log.add("aten.empty.memory_format", [], [gates])
    for _ in range(sizes.times):
        with log.paused():
            after = torch.empty_like(step)
        log.add(f"{sizes.cell}_backward.default", [step, state], [after], (_LAUNCH,))
        log.add("aten.addmm_.default", [state, step, w_hh], [state], options)
    log.add("aten.mm.default", [gates, w_ih], [d_inputs], options)
    log.add("aten.mm.default", [by_gate, inputs], [d_ih], options)
    log.add("aten.mm.default", [by_gate, states], [d_hh], options)
