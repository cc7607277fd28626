"""`torch.compile` in dry runs: dynamo and inductor run as far as inductor's schedule of kernels, which is recorded.

    with compiled_as_kernels(recorder) as notes:
        model = torch.compile(model)
        model(x).sum().backward()

Inside, `torch.compile` (and `module.compile()`, and the decorator) captures graphs with dynamo, differentiates and
partitions them with AOTAutograd, and lowers and schedules them with inductor, all on fake CUDA tensors. Nothing is
generated: a call tells the recorder which kernels would run (`inductor_kernels`), forward and backward. Needs no GPU, no
Triton and no compiler. What cannot be captured runs eagerly, with a note.
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

from lumos.dry_run.inductor_kernels import KernelRecorder

_EAGER = ("eager", "aot_eager", "aot_eager_decomp_partition")
_MOST_GRAPHS = 256  # of one function, before it runs eagerly
_COMPUTE_BOUND = 100.0  # multiplications per element that is moved (torch._inductor.fx_passes.pad_mm)
NOT_CAPTURED = "torch.compile: a graph could not be lowered without a GPU and is taken as eager code"
OPTIMIZER = "torch.compile: a compiled optimizer is taken as an eager one"
AUTOTUNED = "torch.compile: max-autotune is taken as the default mode: matmuls are not fused with what follows"


@contextmanager
def compiled_as_kernels(recorder: KernelRecorder) -> Iterator[dict[str, None]]:
    """While this lasts, compiled functions run as the kernels that inductor would make of them.

    Yields notes: what could not be imitated, each once.
    """
    notes: dict[str, None] = {}
    original = torch.compile
    with ExitStack() as stack:

        @functools.cache
        def prepare() -> Callable[..., Any]:
            """The backend; inductor is imported where it is used, since that takes a second."""
            stack.enter_context(_quiet())
            stack.enter_context(_without_gpu())
            stack.enter_context(_fused_attention())
            return functools.partial(_compile_graph, recorder, notes)

        stack.enter_context(mock.patch.object(torch, "compile", functools.partial(_compile, original, prepare, notes)))
        if isinstance(recorder, TorchDispatchMode):  # dynamo compiles nothing under modes that do not say this
            ignores = classmethod(lambda _: True)
            stack.enter_context(mock.patch.object(type(recorder), "ignore_compile_internals", ignores))
        yield notes


def _compile(
    original: Callable[..., Any], prepare: Callable[[], Any], notes: dict[str, None], model: Any = None, **given: Any
) -> Any:
    """What `torch.compile` is in a dry run."""
    if model is None:
        return functools.partial(_compile, original, prepare, notes, **given)
    backend = given.get("backend", "inductor")
    if given.get("disable") or backend in _EAGER:
        return model
    if isinstance(getattr(model, "__self__", None), torch.optim.Optimizer):
        notes[OPTIMIZER] = None
        return model
    if "max-autotune" in str(given.get("mode")):
        notes[AUTOTUNED] = None
    compiled = original(model, backend=prepare())
    if isinstance(model, torch.nn.Module):
        compiled.forward = _as_the_user_wrote_it(compiled.forward)
        return compiled
    return _as_the_user_wrote_it(compiled)


def _as_the_user_wrote_it(function: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo traces what it meets: the modes and functions with which a dry run imitates a GPU are not the user's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _without_function_modes(), _without_hooks(), _plain_functions():
            return function(*args, **kwargs)

    return call


@contextmanager
def _without_function_modes() -> Iterator[None]:
    from torch.overrides import _pop_mode, _push_mode
    from torch.utils._device import DeviceContext

    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    kept = [mode for mode in reversed(modes) if isinstance(mode, DeviceContext)]
    for mode in kept:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            _pop_mode()
        for mode in reversed(modes):
            _push_mode(mode)


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Hooks on all modules that this package set: they would be traced with every module."""
    from torch.nn.modules import module

    with ExitStack() as stack:
        for hooks in (module._global_forward_pre_hooks, module._global_forward_hooks):
            kept = {key: hook for key, hook in hooks.items() if not _is_ours(hook)}
            stack.enter_context(mock.patch.dict(hooks, kept, clear=True))
        yield


def _is_ours(function: Any) -> bool:
    function = getattr(function, "__func__", function)
    return inspect.isfunction(function) and str(function.__globals__["__name__"]).startswith("lumos.")


@contextmanager
def _plain_functions() -> Iterator[None]:
    """Functions of torch.nn.functional that this package replaced are themselves again (`gpu_functions`)."""
    owner = torch.nn.functional
    plain = {
        name: function.__wrapped__
        for name, function in vars(owner).items()
        if _is_ours(function)
    }
    with ExitStack() as stack:
        for name, function in plain.items():
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


# ---------------------------------------------------------------------- from a graph to kernels
def _compile_graph(recorder: KernelRecorder, notes: dict[str, None], module: Any, inputs: list[Any]) -> Any:
    """The backend that dynamo calls with a captured graph."""
    from torch._inductor.compile_fx import compile_fx

    with recorder.paused():
        try:
            return compile_fx(module, inputs, inner_compile=functools.partial(_lower, recorder))
        except Exception as error:  # whatever inductor cannot do without a GPU
            notes[f"{NOT_CAPTURED} ({type(error).__name__}: {str(error).splitlines()[0][:120]})"] = None
            return module.forward


def _lower(recorder: KernelRecorder, module: Any, inputs: list[Any], **given: Any) -> Callable[[list[Any]], list[Any]]:
    """Lower and schedule a forward or backward graph; what `compile_fx_inner` does, without generating code."""
    from torch._inductor import compile_fx
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.utils._python_dispatch import _disable_current_modes

    from lumos.dry_run.inductor_kernels import program_of

    inference, backward = given.get("is_inference", False), given.get("is_backward", False)
    with _disable_current_modes(), compile_fx.DebugContext():
        compile_fx.view_to_reshape(module)
        with torch.no_grad():
            mode = compile_fx.fake_tensor_prop(module, inputs)
        compile_fx._recursive_record_original_output_strides(module)
        with V.set_fake_mode(mode), compile_fx.maybe_disable_comprehensive_padding(inputs):
            compile_fx._recursive_post_grad_passes(module, is_inference=inference)
            shapes = module.shape_env or compile_fx.shape_env_from_inputs(inputs)
            graph = GraphLowering(
                module, example_inputs=inputs, shape_env=shapes, graph_id=given.get("graph_id"),
                is_inference=inference, is_backward=backward,
            )  # fmt: skip
            graph.freeze_runtime_asserts()
            with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
                graph.run(*inputs)
                graph.init_wrapper_code()
                graph._update_scheduler()
                program = program_of(graph)
    _report_strides(program.outputs)

    def run(arguments: list[Any]) -> list[Any]:
        return program.run(recorder, arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _report_strides(outputs: list[Any]) -> None:
    """Tell AOTAutograd how the saved tensors lie in memory, so that the backward graph reads them as they are."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.output_strides is not None and not context.output_strides:
        context.output_strides.extend(getattr(view, "stride", None) for view in outputs)


# ---------------------------------------------------------------------- inductor without a GPU
@contextmanager
def _quiet() -> Iterator[None]:
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
def _without_gpu() -> Iterator[None]:
    """Inductor asks for Triton, for real tensors on the GPU and for its properties: answered here."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.compile_fx  # noqa: F401 (all of inductor)
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


_ASKED_OF_CUDA = ("current_device", "set_device", "device_count", "stream", "current_stream", "set_stream", "synchronize",
                  "get_device_properties", "memory_allocated", "is_bf16_supported")  # fmt: skip


def _know_functions() -> None:
    """Dynamo keeps tables of torch's functions, in which none may occur twice; a fake GPU answers many with the same."""
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    owners = [torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.nvtx, torch.accelerator, torch.nn.functional]
    with ExitStack() as stack:
        for owner in owners:
            for name, function in list(vars(owner).items()):
                if _is_ours(function):
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
def _fused_attention() -> Iterator[None]:
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
    """The choice of aten/native/transformers/cuda/sdp_utils.cpp on a Hopper GPU: cuDNN, flash, memory-efficient, math."""
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
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, grad, dropout_p, is_causal, scale=scale
    )[0]
