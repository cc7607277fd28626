"""`torch.compile` in dry runs: dynamo and inductor run as far as inductor's schedule of kernels, which is recorded.

    with compiled_as_kernels(recorder) as notes:
        model = torch.compile(model)
        model(x).sum().backward()

Inside, `torch.compile` (and `module.compile()`, and the decorator) captures graphs with dynamo, differentiates and
partitions them with AOTAutograd, and lowers and schedules them with inductor, all on fake CUDA tensors. No code is
generated: a call tells the recorder which kernels would run (`inductor_kernels`), forward and backward. Needs no GPU,
no Triton and no compiler. What cannot be captured runs eagerly, with a note.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lumos.dry_run.inductor_without_gpu import fused_attention, is_ours, quiet, without_gpu

if TYPE_CHECKING:  # it imports inductor, which takes a second or two
    from lumos.dry_run.inductor_kernels import KernelRecorder, Program

_EAGER = ("eager", "aot_eager", "aot_eager_decomp_partition")
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
            stack.enter_context(quiet())
            stack.enter_context(without_gpu())
            stack.enter_context(fused_attention())
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
            kept = {key: hook for key, hook in hooks.items() if not is_ours(hook)}
            stack.enter_context(mock.patch.dict(hooks, kept, clear=True))
        yield


@contextmanager
def _plain_functions() -> Iterator[None]:
    """Functions of torch.nn.functional that this package replaced are themselves again (`gpu_functions`)."""
    owner = torch.nn.functional
    plain = {name: function.__wrapped__ for name, function in vars(owner).items() if is_ours(function)}
    with ExitStack() as stack:
        for name, function in plain.items():
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


# ---------------------------------------------------------------------- from a graph to kernels
def _compile_graph(recorder: KernelRecorder, notes: dict[str, None], module: Any, inputs: list[Any]) -> Any:
    """The backend that dynamo calls with a captured graph."""
    from torch._inductor.compile_fx import compile_fx
    from torch.utils._python_dispatch import _disable_current_modes

    with recorder.paused(), _disable_current_modes():  # the parts that DDPOptimizer splits a graph into come with modes
        try:
            return compile_fx(module, inputs, inner_compile=functools.partial(_compile_one_way, recorder, notes))
        except Exception as error:  # whatever inductor cannot do without a GPU
            _note_failure(notes, error)
            return module.forward


def _note_failure(notes: dict[str, None], error: Exception) -> None:
    first = next(iter(str(error).splitlines()), "")
    notes[f"{NOT_CAPTURED} ({type(error).__name__}: {first[:120]})"] = None


def _compile_one_way(
    recorder: KernelRecorder, notes: dict[str, None], module: Any, inputs: list[Any], **given: Any
) -> Callable[[list[Any]], Any]:
    """What runs for the forward or the backward graph; stands in for inductor's `compile_fx_inner`."""
    backward = bool(given.get("is_backward", False))
    try:
        with recorder.paused():
            program = _lower(module, inputs, backward, bool(given.get("is_inference", False)), given.get("graph_id"))
    except Exception as error:
        if not backward:
            raise
        _note_failure(notes, error)  # the forward pass is compiled: its counterpart must take what that saves
        return _boxed(lambda arguments: module(*arguments))
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
