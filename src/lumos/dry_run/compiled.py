"""`torch.compile` in dry runs: dynamo and inductor run as far as inductor's schedule of kernels, which is recorded.

    with compiled_as_kernels(recorder) as notes:
        model = torch.compile(model)
        model(x).sum().backward()

Inside, `torch.compile` (and `module.compile()`, and the decorator) captures graphs with dynamo, differentiates and
partitions them with AOTAutograd, and lowers and schedules them with inductor, all on fake CUDA tensors. No code is
generated: a call tells the recorder which kernels would run (`inductor_kernels`), forward and backward. Needs no GPU,
no Triton and no compiler. What cannot be captured runs eagerly: it is noted, and its operators are marked, so that a
prediction knows how much of the step they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lumos.dry_run.inductor_without_gpu import fused_attention, is_ours, plain_functions, quiet, without_gpu

if TYPE_CHECKING:  # it imports inductor, which takes a second or two
    from lumos.dry_run.inductor_kernels import KernelRecorder, Program

_EAGER = ("eager", "aot_eager", "aot_eager_decomp_partition")
_SAYS = "ignore_compile_internals"  # of a mode under which dynamo compiles, from torch 2.10 on
_GRAPHED = ("reduce-overhead", "max-autotune")
NOT_CAPTURED = "torch.compile: a graph could not be lowered without a GPU and is taken as eager code"
OPTIMIZER = "torch.compile: a compiled optimizer is taken as an eager one"
GRAPHED = "torch.compile: CUDA graphs are not replayed: each kernel is launched by the host, which a real run saves"
AUTOTUNED = "torch.compile: max-autotune is taken as the default mode: matmuls are not fused with what follows"


@contextmanager
def compiled_as_kernels(recorder: KernelRecorder) -> Iterator[dict[str, None]]:
    """While this lasts, compiled functions run as the kernels that inductor would make of them.

    Yields notes: what could not be imitated, each once.
    """
    fallbacks = _Fallbacks(recorder)
    original = torch.compile
    with ExitStack() as stack:

        @functools.cache
        def prepare() -> Callable[..., Any]:
            """The backend; inductor is imported where it is used, since that takes a second."""
            stack.enter_context(quiet())
            stack.enter_context(without_gpu())
            stack.enter_context(fused_attention())
            stack.enter_context(fallbacks.of_frames())
            stack.enter_context(_under_modes())
            return functools.partial(_compile_graph, fallbacks)

        replacement = functools.partial(_compile, original, prepare, fallbacks)
        stack.enter_context(mock.patch.object(torch, "compile", replacement))
        if isinstance(recorder, TorchDispatchMode) and hasattr(recorder, _SAYS):  # dynamo asks modes for it
            ignores = classmethod(lambda _: True)
            stack.enter_context(mock.patch.object(type(recorder), _SAYS, ignores))
        yield fallbacks.notes


def _compile(
    original: Callable[..., Any], prepare: Callable[[], Any], fallbacks: _Fallbacks, model: Any = None, **given: Any
) -> Any:
    """What `torch.compile` is in a dry run."""
    notes = fallbacks.notes
    if model is None:
        return functools.partial(_compile, original, prepare, fallbacks, **given)
    backend = given.get("backend", "inductor")
    if given.get("disable") or backend in _EAGER:
        return model
    if isinstance(getattr(model, "__self__", None), torch.optim.Optimizer):
        notes[OPTIMIZER] = None
        return fallbacks.eager(model)
    if "max-autotune" in str(given.get("mode")):
        notes[AUTOTUNED] = None
    if given.get("mode") in _GRAPHED or (given.get("options") or {}).get("triton.cudagraphs"):
        notes[GRAPHED] = None
    compiled = original(model, backend=prepare())
    if isinstance(model, torch.nn.Module):
        compiled.forward = _as_the_user_wrote_it(compiled.forward, fallbacks)
        return compiled
    return _as_the_user_wrote_it(compiled, fallbacks)


def _as_the_user_wrote_it(function: Callable[..., Any], fallbacks: _Fallbacks) -> Callable[..., Any]:
    """Dynamo traces what it meets: the modes and functions with which a dry run imitates a GPU are not the user's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with fallbacks.recorder.regions.compiled(), _without_function_modes(), _without_hooks(), plain_functions():
            return function(*args, **kwargs)

    return call


class _Fallbacks:
    """What `torch.compile` would have compiled on a GPU, and runs eagerly here."""

    def __init__(self, recorder: KernelRecorder) -> None:
        self.recorder = recorder
        self.notes: dict[str, None] = {}

    def add(self, error: BaseException) -> None:
        """A graph or a function is left to eager code."""
        first = next(iter(str(error).splitlines()), "")
        self.notes[f"{NOT_CAPTURED} ({type(error).__name__}: {first[:120]})"] = None

    def eager(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose operators are marked as those of a fallback."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.recorder.regions.eager():
                return function(*args, **kwargs)

        return call

    def of_frames(self) -> AbstractContextManager[Any]:
        """Frames that dynamo gives up because of an error; those that it never compiles are eager on a GPU, too."""
        from torch._dynamo import convert_frame
        from torch._dynamo.exc import Unsupported, UserError

        message_of = convert_frame.format_error_msg

        @functools.wraps(message_of)
        def noted(error: Exception, *args: Any, **kwargs: Any) -> str:
            if not isinstance(error, Unsupported | UserError):
                self.add(error)
                self.recorder.regions.gives_up_frames = True
            return str(message_of(error, *args, **kwargs))

        return mock.patch.object(convert_frame, "format_error_msg", noted)


def _under_modes() -> AbstractContextManager[Any]:
    """Before modes could say so, dynamo compiled nothing under any of them."""
    from torch._dynamo import convert_frame

    if hasattr(TorchDispatchMode, _SAYS) or not hasattr(convert_frame, "is_in_torch_dispatch_mode"):
        return nullcontext()
    return mock.patch.object(convert_frame, "is_in_torch_dispatch_mode", return_value=False)


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
            kept = {key: hook for key, hook in hooks.items() if not is_ours(hook)}
            stack.enter_context(mock.patch.dict(hooks, kept, clear=True))
        yield


# ---------------------------------------------------------------------- from a graph to kernels
def _compile_graph(fallbacks: _Fallbacks, module: Any, inputs: list[Any]) -> Any:
    """The backend that dynamo calls with a captured graph."""
    from torch._inductor.compile_fx import compile_fx
    from torch.utils._python_dispatch import _disable_current_modes

    with fallbacks.recorder.paused(), _disable_current_modes():  # parts that DDPOptimizer makes of a graph have modes
        try:
            return compile_fx(module, inputs, inner_compile=functools.partial(_compile_one_way, fallbacks))
        except Exception as error:  # whatever inductor cannot do without a GPU
            fallbacks.add(error)
            return fallbacks.eager(module.forward)


def _compile_one_way(fallbacks: _Fallbacks, module: Any, inputs: list[Any], **given: Any) -> Callable[[list[Any]], Any]:
    """What runs for the forward or the backward graph; stands in for inductor's `compile_fx_inner`."""
    backward, recorder = bool(given.get("is_backward", False)), fallbacks.recorder
    try:
        with recorder.paused():
            program = _lower(module, inputs, backward, bool(given.get("is_inference", False)), given.get("graph_id"))
    except Exception as error:
        if not backward:
            raise
        fallbacks.add(error)  # the forward pass is compiled: its counterpart must take what that saves
        return _boxed(fallbacks.eager(lambda arguments: module(*arguments)))
    _report_strides(program.outputs)
    return _boxed(functools.partial(program.run, recorder))


def _boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A function that takes its arguments as a list, which it may empty."""

    def run(arguments: list[Any]) -> Any:
        return function(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


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


def _report_strides(outputs: list[Any]) -> None:
    """Tell AOTAutograd how the saved tensors lie in memory, so that the backward graph reads them as they are."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.output_strides is not None and not context.output_strides:
        context.output_strides.extend(getattr(view, "stride", None) for view in outputs)
