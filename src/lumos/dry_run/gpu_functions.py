"""Functions as a GPU runs them: attention is fused, where fake tensors take it apart; layouts are cuDNN's."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

Add = Callable[[str, list[torch.Tensor], list[torch.Tensor], tuple[str, ...]], object]


def functions_as_on_gpu(add: Add) -> dict[str, Callable[..., Any]]:
    """Functions of torch.nn.functional by name: attention is one operator, lengths of sequences are known."""
    functional = torch.nn.functional
    plain_attention = functional.scaled_dot_product_attention

    @functools.wraps(plain_attention)
    def scaled_dot_product_attention(query: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_local(query):
            return plain_attention(query, *args, **kwargs)
        return attention(add, query, *args, **kwargs)

    plain_ctc = functional.ctc_loss

    @functools.wraps(plain_ctc)
    def ctc_loss(
        log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *args: Any, **given: Any
    ) -> Any:
        """Lengths are numbers of the host; those that nobody knows are the longest there can be."""
        longest = (log_probs.shape[0], targets.shape[-1])
        lengths = (_numbers(*pair) for pair in zip((input_lengths, target_lengths), longest, strict=True))
        return plain_ctc(log_probs, targets, *lengths, *args, **given)

    return {"scaled_dot_product_attention": scaled_dot_product_attention, "ctc_loss": ctc_loss}


def convolution_format(x: Any, weight: Any, _: Any) -> torch.memory_format:
    """How cuDNN lays results out (aten/src/ATen/native/ConvUtils.h): channels last if the input or the weights are."""
    formats = {torch._prims_common.suggest_memory_format(tensor) for tensor in (x, weight)}
    last = (torch.channels_last, torch.channels_last_3d)
    return next((found for found in last if found in formats), torch.contiguous_format)


def trace_only_compiled_code() -> None:
    """transformers takes fake tensors for a compiler at work, and makes masks that it leaves out in eager code."""
    for name in ("transformers.masking_utils", "transformers.utils.import_utils", "transformers.utils"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "is_tracing"):
            setattr(module, "is_tracing", _is_compiled)  # noqa: B010


def _is_compiled(*_: Any) -> bool:
    return bool(torch.compiler.is_compiling())


def _numbers(values: Any, unknown: int) -> Any:
    if isinstance(values, FakeTensor):
        return [unknown] * int(values.numel())
    return values.tolist() if isinstance(values, torch.Tensor) else values


def is_local(tensor: Any) -> bool:
    """Whether this is a tensor of the GPU; DTensors come here again with their local tensors."""
    return type(tensor) in (FakeTensor, torch.nn.Parameter) and tensor.device.type == "cuda"


def attention(
    add: Add, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """`scaled_dot_product_attention` as a GPU runs it."""
    q, k, v = (autocast(tensor) for tensor in (query, key, value))
    mask = attn_mask
    if not _fuses(q, k, v, mask, enable_gqa):
        math = torch._scaled_dot_product_attention_math
        return math(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    if mask is not None and mask.dtype == torch.bool:  # it becomes one that is added, and is kept
        zero, never = (torch.full((), value, dtype=q.dtype, device=q.device) for value in (0.0, float("-inf")))
        mask = torch.where(mask, zero, never)
    marks = ("causal" if is_causal else "", "masked" if mask is not None else "", "dropout" if dropout_p else "")
    return _Attention.apply(add, q, k, v, mask, tuple(filter(None, marks)))


def autocast(tensor: Any) -> Any:
    if torch.is_autocast_enabled("cuda") and tensor.dtype == torch.float32:
        return tensor.to(torch.get_autocast_dtype("cuda"))
    return tensor


def _fuses(q: Any, k: Any, v: Any, mask: Any, enable_gqa: bool) -> bool:
    """Whether a fused kernel of PyTorch takes these operands (aten/native/transformers/cuda/sdp_utils.cpp)."""
    if q.dim() != 4 or (mask is not None and mask.requires_grad):
        return False
    heads = (q.shape[1], k.shape[1], v.shape[1])
    if len(set(heads)) > 1 and not (enable_gqa and mask is None):
        return False
    return bool(max(q.shape[-1], v.shape[-1]) <= 256 and q.shape[-1] % 8 == 0)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """One kernel forward, one backward; output and log-sum-exp are kept."""

    @staticmethod
    def forward(ctx: Any, add: Add, q: Any, k: Any, v: Any, mask: Any, options: tuple[str, ...]) -> torch.Tensor:
        same = q.shape[-1] == v.shape[-1]
        out = torch.empty_like(q) if same else q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.add, ctx.options = add, options
        add("attention.forward", [q, k, v], [out, lse], options)
        ctx.save_for_backward(q, k, v, out, lse, *(() if mask is None else (mask,)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, *_ = ctx.saved_tensors
        found = [torch.empty_like(tensor) for tensor in (q, k, v)]
        ctx.add("attention.backward", [q, k, v, out, lse, *grads], found, ctx.options)
        return None, *found, None, None
