"""`torch.compile` in dry runs: dynamo and inductor run as far as inductor's schedule of kernels, which is recorded.

    with compiled_as_kernels(recorder):
        model = torch.compile(model)
        model(x).sum().backward()

Inside, `torch.compile` (and `module.compile()`, and the decorator) captures graphs with dynamo, differentiates and
partitions them with AOTAutograd, and lowers and schedules them with inductor, all on fake CUDA tensors. No code is
generated: a call tells the recorder which kernels would run (`inductor_kernels`), forward and backward. This needs no
GPU, no Triton and no compiler. Code that cannot be captured runs eagerly: it is noted, and its operators are marked, so
that a prediction knows how much of the step they are.

Names inside torch are those of torch 2.13; a name that another release does not have is left alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lumos.dry_run.fake_gpu import Replacement, replaced
from lumos.dry_run.gpu_functions import can_be_fused, mask_values
from lumos.dry_run.operator_log import OperatorLog

if TYPE_CHECKING:  # it imports inductor, which takes a second or two
    from lumos.dry_run.inductor_kernels import Program

_EAGER = ("eager", "aot_eager", "aot_eager_decomp_partition")
_ALLOWS = "ignore_compile_internals"  # of a mode under which dynamo compiles, from torch 2.10 on
_GRAPHED = ("reduce-overhead", "max-autotune")
_MOST_GRAPHS = 256  # of one function, before it runs eagerly
_COMPUTE_BOUND = 100.0  # multiplications per element that is moved (torch._inductor.fx_passes.pad_mm)
NOT_CAPTURED = "torch.compile: a graph could not be lowered without a GPU and runs as eager code"
OPTIMIZER = "torch.compile: a compiled optimizer runs as eager code"
GRAPHED = "torch.compile: CUDA graphs are not replayed: the host launches each kernel, which a real run avoids"
AUTOTUNED = "torch.compile: max-autotune runs as the default mode: matmuls are not fused with later operators"


@contextmanager
def compiled_as_kernels(log: OperatorLog) -> Iterator[dict[str, None]]:
    """While this lasts, compiled functions run as the kernels that inductor would make of them.

    Yields the notes of the log.
    """
    with ExitStack() as stack:

        @functools.cache
        def prepare() -> Callable[..., Any]:
            """Return the backend; inductor is imported when it is used, because that takes a second."""
            stack.enter_context(_inductor_without_gpu())
            stack.enter_context(replaced(_replaced_in_dynamo(log)))
            return functools.partial(_compile_graph, log)

        stack.enter_context(replaced([(torch, "compile", functools.partial(_compile, torch.compile, prepare, log))]))
        if isinstance(log, TorchDispatchMode) and hasattr(log, _ALLOWS):  # dynamo asks modes for it
            stack.enter_context(replaced([(type(log), _ALLOWS, classmethod(lambda _: True))]))
        yield log.notes


def _compile(
    original: Callable[..., Any], prepare: Callable[[], Any], log: OperatorLog, model: Any = None, **options: Any
) -> Any:
    """Stand in for `torch.compile`."""
    if model is None:
        return functools.partial(_compile, original, prepare, log, **options)
    if options.get("disable") or options.get("backend", "inductor") in _EAGER:
        return model
    if isinstance(getattr(model, "__self__", None), torch.optim.Optimizer):
        log.notes[OPTIMIZER] = None
        return _eager(log, model)
    if "max-autotune" in str(options.get("mode")):
        log.notes[AUTOTUNED] = None
    if options.get("mode") in _GRAPHED or (options.get("options") or {}).get("triton.cudagraphs"):
        log.notes[GRAPHED] = None
    compiled = original(model, backend=prepare())
    if isinstance(model, torch.nn.Module):
        compiled.forward = _as_the_user_wrote_it(compiled.forward, log)
        return compiled
    return _as_the_user_wrote_it(compiled, log)


def _as_the_user_wrote_it(function: Callable[..., Any], log: OperatorLog) -> Callable[..., Any]:
    """Hide the modes, hooks and functions that imitate a GPU from dynamo, which traces whatever it meets."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with log.regions.inside("compiled"), _without_function_modes(), _without_hooks(), replaced(_plain_functions()):
            return function(*args, **kwargs)

    return call


def _eager(log: OperatorLog, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose operators are marked as running in place of compiled code."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with log.regions.inside("eager"):
            return function(*args, **kwargs)

    return call


def _note_fallback(log: OperatorLog, error: BaseException) -> None:
    """Note that a graph or a function is left to eager code."""
    first = next(iter(str(error).splitlines()), "")
    log.notes[f"{NOT_CAPTURED} ({type(error).__name__}: {first[:120]})"] = None


# ---------------------------------------------------------------------- dynamo without the imitation
def _is_ours(function: Any) -> bool:
    """Whether this package defines a function, to imitate a GPU."""
    function = getattr(function, "__func__", function)
    return inspect.isfunction(function) and str(function.__globals__["__name__"]).startswith("lumos.")


def _plain_functions() -> Iterator[Replacement]:
    """The original functions of torch in place of those of this package."""
    for owner in (torch.nn.functional, torch):
        for name, function in list(vars(owner).items()):
            if _is_ours(function) and hasattr(function, "__wrapped__"):
                yield owner, name, function.__wrapped__


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
    """Hide the hooks that this package registered on all modules: they would be traced with every module."""
    from torch.nn.modules import module

    with ExitStack() as stack:
        for hooks in (module._global_forward_pre_hooks, module._global_forward_hooks):
            kept = {key: hook for key, hook in hooks.items() if not _is_ours(hook)}
            stack.enter_context(mock.patch.dict(hooks, kept, clear=True))
        yield


def _replaced_in_dynamo(log: OperatorLog) -> Iterator[Replacement]:
    from torch._dynamo import convert_frame
    from torch._dynamo.exc import Unsupported, UserError

    message_of = convert_frame.format_error_msg

    @functools.wraps(message_of)
    def noted(error: Exception, *args: Any, **kwargs: Any) -> str:
        """Note frames that dynamo gives up because of an error; those that it never compiles are eager on a GPU."""
        if not isinstance(error, Unsupported | UserError):
            _note_fallback(log, error)
            log.regions.gives_up_frames = True
        return str(message_of(error, *args, **kwargs))

    yield convert_frame, "format_error_msg", noted
    if not hasattr(TorchDispatchMode, _ALLOWS) and hasattr(convert_frame, "is_in_torch_dispatch_mode"):
        yield convert_frame, "is_in_torch_dispatch_mode", lambda *_, **__: False  # it compiled under no mode then


# ---------------------------------------------------------------------- inductor without a GPU and without Triton
@contextmanager
def _inductor_without_gpu() -> Iterator[None]:
    """Inductor asks for Triton, for real tensors on the GPU and for its properties: answered here."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.compile_fx  # before anything is replaced: its modules keep references
    import torch._inductor.config

    _know_functions()
    logger, library = logging.getLogger("torch._dynamo"), torch.library.Library("aten", "IMPL")
    with ExitStack() as stack:
        # Dynamo warns about the hooks of a dry run, and about frames that it leaves to eager code.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        for configured in (
            torch._dynamo.config.patch(
                automatic_dynamic_shapes=False, assume_static_by_default=True, recompile_limit=_MOST_GRAPHS,
                accumulated_recompile_limit=16 * _MOST_GRAPHS, suppress_errors=True,
            ),
            torch._functorch.config.patch(enable_autograd_cache=False),
            torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, compile_threads=1),
            replaced(patch for patch in _replaced_in_inductor() if hasattr(patch[0], patch[1])),
        ):  # fmt: skip
            stack.enter_context(configured)
        stack.callback(library._destroy)
        for key in ("AutogradCUDA", "CUDA"):
            library.impl("scaled_dot_product_attention", _attention, key)
        yield


def _replaced_in_inductor() -> Iterator[Replacement]:
    from torch._dynamo.device_interface import CudaInterface
    from torch._functorch import partitioners
    from torch._inductor import scheduler
    from torch._inductor.fx_passes import joint_graph, pad_mm, post_grad

    for module in (scheduler, pad_mm):
        yield module, "has_triton", lambda *_: True
    for module in (joint_graph, post_grad):
        yield module, "lazy_init", functools.partial(_on_cpu_device, module.lazy_init)
    yield joint_graph, "UniformValueConstantFolder", _folding_on_cpu(joint_graph.UniformValueConstantFolder)
    for name in ("_should_pad", "should_pad_bench"):  # its name before torch 2.12
        yield pad_mm, name, _padding_pays
    yield partitioners, "functionalize_rng_ops", lambda _, forward, backward, *__: (forward, backward)  # no generators
    yield torch.Tensor, "is_pinned", lambda *_, **__: False
    for name in ("exchange_device", "maybe_exchange_device"):
        yield torch.cuda, f"_{name}", lambda _: 0
        yield CudaInterface, name, staticmethod(lambda _: 0)
    for name in ("current_device", "set_device", "device_count", "stream", "current_stream", "set_stream",
                 "synchronize", "get_device_properties", "memory_allocated", "is_bf16_supported"):  # fmt: skip
        yield CudaInterface, name, staticmethod(getattr(torch.cuda, name))


def _know_functions() -> None:
    """Dynamo keeps tables of torch's functions; none may occur twice, and a fake GPU answers many with the same one."""
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    owners = [torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.nvtx, torch.accelerator, torch.nn.functional]
    copies = [
        (owner, name, types.FunctionType(f.__code__, f.__globals__, name, f.__defaults__, f.__closure__))
        for owner in owners for name, f in vars(owner).items() if _is_ours(f)
    ]  # fmt: skip
    with replaced([(torch, "tensor", getattr(torch.tensor, "__wrapped__", torch.tensor)), *copies]):
        TorchInGraphFunctionVariable._get_handlers()
        trace_rules.get_torch_obj_rule_map()


def _on_cpu_device(initialise: Callable[..., Any], *_: Any, **__: Any) -> Any:
    """Patterns are traced with small tensors on a device that exists."""
    return initialise(torch.device("cpu"))


def _padding_pays(match: Any, mat1: Any, mat2: Any, *_: Any, **__: Any) -> bool:
    """Inductor times matmuls of odd sizes with and without padding; padding wins if they are compute-bound."""
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


def _attention(
    q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """The choice of aten/native/transformers/cuda/sdp_utils.cpp on Hopper: cuDNN, flash, memory-efficient or math."""
    aten, drop = torch.ops.aten, (dropout_p, is_causal)
    if not can_be_fused(q, v, attn_mask):
        math = aten._scaled_dot_product_attention_math
        return math(q, k, v, attn_mask, *drop, scale=scale, enable_gqa=enable_gqa)[0]
    truths = mask_values(attn_mask, q)
    mask = torch.where(attn_mask, *truths) if truths else attn_mask
    if mask is not None:
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    half = q.dtype in (torch.float16, torch.bfloat16)
    if half and max(q.shape[-1], v.shape[-1]) <= 128:
        return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, grad, *drop, False, scale=scale)[0]
    if half and mask is None and q.shape[-1] == v.shape[-1]:
        return aten._scaled_dot_product_flash_attention(q, k, v, *drop, False, scale=scale)[0]
    if q.shape[1] != k.shape[1]:
        k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, grad, *drop, scale=scale)[0]


# ---------------------------------------------------------------------- from a graph to kernels
def _compile_graph(log: OperatorLog, module: Any, inputs: list[Any]) -> Any:
    """The backend that dynamo calls with a captured graph."""
    from torch._inductor.compile_fx import compile_fx
    from torch.utils._python_dispatch import _disable_current_modes

    with log.paused(), _disable_current_modes():  # parts that DDPOptimizer makes of a graph have modes
        try:
            return compile_fx(module, inputs, inner_compile=functools.partial(_compile_one_way, log))
        except Exception as error:  # whatever inductor cannot do without a GPU
            _note_fallback(log, error)
            return _eager(log, module.forward)


def _compile_one_way(log: OperatorLog, module: Any, inputs: list[Any], **options: Any) -> Callable[[list[Any]], Any]:
    """Compile the forward or the backward graph; stands in for inductor's `compile_fx_inner`."""
    backward, inference = (bool(options.get(name, False)) for name in ("is_backward", "is_inference"))
    try:
        with log.paused():
            program = _lower(module, inputs, backward, inference, options.get("graph_id"))
    except Exception as error:
        if not backward:
            raise
        _note_fallback(log, error)  # the forward pass is compiled: its counterpart must take what that saves
        return _boxed(_eager(log, lambda arguments: module(*arguments)))
    # AOTAutograd learns the layout of saved tensors, so that the backward graph reads them as they are.
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.output_strides is not None and not context.output_strides:
        context.output_strides.extend(getattr(view, "stride", None) for view in program.outputs)
    return _boxed(functools.partial(program.run, log))


def _boxed(function: Any) -> Callable[[list[Any]], Any]:
    """Mark a function as one that takes its arguments as a list, which it may empty."""
    function._boxed_call = True
    return function  # type: ignore[no-any-return]


def _lower(module: Any, inputs: list[Any], backward: bool, inference: bool, graph_id: int | None) -> Program:
    """Lower and schedule a graph as `compile_fx_inner` does, without generating code."""
    from torch._inductor import compile_fx
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.utils._python_dispatch import _disable_current_modes

    from lumos.dry_run.inductor_kernels import program_of

    with _disable_current_modes(), compile_fx.DebugContext():
        compile_fx.view_to_reshape(module)
        with torch.no_grad():
            mode = compile_fx.fake_tensor_prop(module, inputs)
        compile_fx._recursive_record_original_output_strides(module)
        with V.set_fake_mode(mode), compile_fx.maybe_disable_comprehensive_padding(inputs):
            compile_fx._recursive_post_grad_passes(module, is_inference=inference)
            shapes = module.shape_env or compile_fx.shape_env_from_inputs(inputs)
            graph = GraphLowering(
                module, example_inputs=inputs, shape_env=shapes, graph_id=graph_id,
                is_inference=inference, is_backward=backward,
            )  # fmt: skip
            graph.freeze_runtime_asserts()
            with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
                graph.run(*inputs)
                graph.init_wrapper_code()
                graph._update_scheduler()
                return program_of(graph)
