"""`flex_attention` in compiled code: one kernel forward, one backward, as inductor makes of it on a GPU.

Its cost hangs on the blocks that a mask leaves out, which are values: a mask is taken as causal, and the kernels are
marked as unseen. Outside compiled code PyTorch's own function runs, which materialises all scores on a GPU, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import flex_attention as module

ASSUMED_MASK = "flex_attention: the blocks that its mask leaves out are not known: it is taken as causal"


@torch.library.custom_op("lumos::flex_forward", mutates_args=())  # type: ignore[untyped-decorator]
def flex_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_masked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the logarithms of the sums; a recorder runs this (`ValueOperators` finds `_op_flex_forward`)."""
    raise NotImplementedError


@torch.library.custom_op("lumos::flex_backward", mutates_args=())  # type: ignore[untyped-decorator]
def flex_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, is_masked: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    raise NotImplementedError


def forward_shapes(query: Any, key: Any, value: Any, is_masked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The output has the layout of the query."""
    same = query.shape[-1] == value.shape[-1]
    out = torch.empty_like(query) if same else query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def backward_shapes(
    gradient: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, is_masked: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Those of the operands."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


flex_forward.register_fake(forward_shapes)
flex_backward.register_fake(backward_shapes)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, ctx.is_masked = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, gradient: Any, _: Any) -> tuple[Any, ...]:
    return *flex_backward(gradient, *ctx.saved_tensors, ctx.is_masked), None


flex_forward.register_autograd(_gradients, setup_context=_save)


def flex_as_on_gpu() -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement) of `torch.nn.attention.flex_attention.flex_attention`."""
    plain = module.flex_attention

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

    yield module, "flex_attention", flex_attention
