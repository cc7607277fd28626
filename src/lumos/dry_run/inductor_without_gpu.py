"""Inductor on a machine without a GPU and without Triton: what it asks of them while it lowers and schedules graphs.

Everything here replaces attributes of torch while a context lasts. The names are those of torch 2.13; what another
release does not have is left alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MOST_GRAPHS = 256  # of one function, before it runs eagerly
_COMPUTE_BOUND = 100.0  # multiplications per element that is moved (torch._inductor.fx_passes.pad_mm)


def is_ours(function: Any) -> bool:
    """Whether this package replaced it, to imitate a GPU."""
    function = getattr(function, "__func__", function)
    return inspect.isfunction(function) and str(function.__globals__["__name__"]).startswith("lumos.")


@contextmanager
def plain_functions() -> Iterator[None]:
    """Functions of torch that this package replaced are themselves again (`gpu_functions`, `recorded`)."""
    with ExitStack() as stack:
        for owner in (torch.nn.functional, torch):
            for name, function in list(vars(owner).items()):
                if is_ours(function) and hasattr(function, "__wrapped__"):
                    stack.enter_context(mock.patch.object(owner, name, function.__wrapped__))
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Dynamo warns about the hooks of a dry run, and about frames that it leaves to eager code."""
    logger = logging.getLogger("torch._dynamo")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


@contextmanager
def without_gpu() -> Iterator[None]:
    """Inductor asks for Triton, for real tensors on the GPU and for its properties: answered here."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.compile_fx
    import torch._inductor.config
    from torch._dynamo.device_interface import CudaInterface
    from torch._functorch import partitioners
    from torch._inductor import scheduler
    from torch._inductor.fx_passes import joint_graph, pad_mm, post_grad

    _know_functions()
    configured = (
        torch._dynamo.config.patch(
            automatic_dynamic_shapes=False, assume_static_by_default=True, recompile_limit=_MOST_GRAPHS,
            accumulated_recompile_limit=16 * _MOST_GRAPHS, suppress_errors=True,
        ),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, compile_threads=1),
    )  # fmt: skip
    replaced: list[tuple[Any, str, Any]] = [
        (scheduler, "has_triton", lambda *_: True),
        (joint_graph, "lazy_init", functools.partial(_on_cpu_device, joint_graph.lazy_init)),
        (post_grad, "lazy_init", functools.partial(_on_cpu_device, post_grad.lazy_init)),
        (joint_graph, "UniformValueConstantFolder", _folding_on_cpu(joint_graph.UniformValueConstantFolder)),
        (pad_mm, "has_triton", lambda *_: True),
        (pad_mm, "_should_pad", _padding_pays),
        (pad_mm, "should_pad_bench", _padding_pays),  # its name before torch 2.12
        (partitioners, "functionalize_rng_ops", lambda _, forward, backward, *__: (forward, backward)),  # no generators
        (torch.Tensor, "is_pinned", lambda *_, **__: False),
        (torch.cuda, "_exchange_device", lambda _: 0),
        (torch.cuda, "_maybe_exchange_device", lambda _: 0),
        (CudaInterface, "exchange_device", staticmethod(lambda _: 0)),
        (CudaInterface, "maybe_exchange_device", staticmethod(lambda _: 0)),
        *((CudaInterface, name, staticmethod(getattr(torch.cuda, name))) for name in _ASKED_OF_CUDA),
    ]
    with ExitStack() as stack:
        for context in configured:
            stack.enter_context(context)
        for owner, name, value in replaced:
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, value))
        yield


_ASKED_OF_CUDA = ("current_device", "set_device", "device_count", "stream", "current_stream", "set_stream",
                  "synchronize", "get_device_properties", "memory_allocated", "is_bf16_supported")  # fmt: skip


def _know_functions() -> None:
    """Dynamo keeps tables of torch's functions; none may occur twice, and a fake GPU answers many with the same one."""
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    owners = [torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.nvtx, torch.accelerator, torch.nn.functional]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "tensor", getattr(torch.tensor, "__wrapped__", torch.tensor)))
        for owner in owners:
            for name, function in list(vars(owner).items()):
                if is_ours(function):
                    copy = types.FunctionType(
                        function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
                    )
                    stack.enter_context(mock.patch.object(owner, name, copy))
        TorchInGraphFunctionVariable._get_handlers()
        trace_rules.get_torch_obj_rule_map()


def _on_cpu_device(initialise: Callable[..., Any], *_: Any, **__: Any) -> Any:
    """Patterns are traced with small tensors on a device that exists."""
    return initialise(torch.device("cpu"))


def _padding_pays(match: Any, mat1: Any, mat2: Any, *_: Any, **__: Any) -> bool:
    """Inductor times matmuls of odd sizes with and without padding; padding wins where arithmetic is the limit."""
    m, k, n = int(mat1.shape[-2]), int(mat1.shape[-1]), int(mat2.shape[-1])
    return m * k * n > _COMPUTE_BOUND * (m * k + k * n + m * n)


def _folding_on_cpu(folder: Any) -> Any:
    """Constants are folded with real tensors."""

    class OnCpu(folder):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with _CpuInstead():
                super().__init__(*args, **kwargs)

        def run(self) -> Any:
            with _CpuInstead():
                return super().run()

    return OnCpu


class _CpuInstead(TorchDispatchMode):  # type: ignore[misc]
    """Operators that ask for a GPU make their tensors on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils._pytree import tree_map_only

        cpu = torch.device("cpu")
        args, kwargs = tree_map_only(torch.device, lambda _: cpu, (args, kwargs or {}))
        return func(*args, **kwargs)


# ---------------------------------------------------------------------- attention
@contextmanager
def fused_attention() -> Iterator[None]:
    """`scaled_dot_product_attention` of CUDA tensors is one of PyTorch's fused operators, as on a GPU."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCUDA", "CUDA"):
        library.impl("scaled_dot_product_attention", _attention, key)
    try:
        yield
    finally:
        library._destroy()


def _attention(
    q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """The choice of aten/native/transformers/cuda/sdp_utils.cpp on Hopper: cuDNN, flash, memory-efficient or math."""
    aten = torch.ops.aten
    widest = max(q.shape[-1], v.shape[-1])
    if q.dim() != 4 or q.shape[-1] % 8 or widest > 256 or (attn_mask is not None and attn_mask.requires_grad):
        return aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zero, never = (torch.full((), value, dtype=q.dtype, device=q.device) for value in (0.0, float("-inf")))
        attn_mask = torch.where(attn_mask, zero, never)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    half = q.dtype in (torch.float16, torch.bfloat16)
    if half and widest <= 128:
        return aten._scaled_dot_product_cudnn_attention(
            q, k, v, attn_mask, grad, dropout_p, is_causal, False, scale=scale
        )[0]
    if half and attn_mask is None and q.shape[-1] == v.shape[-1]:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    if q.shape[1] != k.shape[1]:
        k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    return aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, grad, dropout_p, is_causal, scale=scale)[0]
