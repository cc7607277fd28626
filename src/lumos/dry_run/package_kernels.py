"""Kernels that are not PyTorch's: of packages that transformers calls, of other libraries, of Triton.

transformers calls mamba-ssm, causal-conv1d and flash-linear-attention if they are installed. Without them it runs a
reference in plain PyTorch, which no one trains with: it is many times slower and holds what a kernel keeps in
registers. A dry run records the matmuls that a kernel consists of instead, and what it reads and writes. The matmuls of
a chunk are those of the papers: Mamba-2 (arXiv:2405.21060, section 6), gated delta networks (arXiv:2412.06464, section
3.3). A backward pass computes two gradients of each, and its states once more.

An operator of `torch.library.custom_op` has an implementation, which runs on fake tensors. Kernels whose work stays
unknown are recorded by what they read and write. Everything estimated here is marked as unseen.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from math import ceil
from types import ModuleType
from typing import Any, NamedTuple

import torch

from lumos.dry_run.fake_gpu import Replacement
from lumos.dry_run.operator_log import OperatorLog
from lumos.program.op import UNSEEN

NOT_INSTALLED = "{} is estimated: kernels of its package replace the reference code in transformers"
_DELTA_CHUNK = 64  # tokens; of flash-linear-attention, whatever the reference takes
_BACKWARD_PASSES = 3
_OF_PYTORCH = frozenset(
    ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional",
     "_dtensor", "fsdp", "quantized", "quantized_decomposed", "inductor", "rngprims", "symm_mem", "mkldnn",
     "higher_order")
)  # fmt: skip


# ---------------------------------------------------------------------- operators of other libraries
def is_own(overload: Any) -> bool:
    """Whether an operator belongs to a library other than PyTorch."""
    return isinstance(overload, torch._ops.OpOverload) and overload.namespace not in _OF_PYTORCH


def is_composite(overload: Any) -> bool:
    """Whether an operator is made of others: autograd takes those apart, below it they arrive whole."""
    if overload.namespace == "prim":  # TorchScript's: the dispatcher does not have them
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has_kernel(overload.name(), "CompositeImplicitAutograd"))


def implementation_of(overload: Any) -> Callable[..., Any] | None:
    """The Python function that an operator runs on a GPU; None if it is unknown."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(overload._schema.name)
    if definition is None:
        return None
    functions = definition._backend_fns
    return functions.get("cuda") or functions.get(None) or definition._init_fn  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- kernels of Triton
def triton_launches(log: OperatorLog) -> Iterator[Replacement]:
    """The functions that launch a script's kernels of Triton; none if Triton is not installed."""
    if find_spec("triton") is None:
        return
    kernel, tuner = import_module("triton.runtime.jit").JITFunction, import_module("triton.runtime.autotuner").Autotuner

    @functools.wraps(kernel.run)
    def launch(self: Any, *args: Any, **options: Any) -> None:
        if not options.get("warmup"):
            record_launch(log, self, [*args, *options.values()])

    @functools.wraps(tuner.run)
    def first_choice(self: Any, *args: Any, **options: Any) -> Any:
        """Run any configuration: the fastest one has the same operands."""
        return self.fn.run(*args, **options)

    yield kernel, "run", launch
    yield tuner, "run", first_choice


def record_launch(log: OperatorLog, kernel: Any, arguments: list[Any]) -> None:
    """Record a launch with tensors among its arguments; the last of them is assumed to be its result."""
    tensors = [value for value in (getattr(a, "base", a) for a in arguments) if isinstance(value, torch.Tensor)]
    if tensors:
        log.add(name_of(kernel), tensors[:-1], tensors[-1:], (UNSEEN,))


def name_of(kernel: Any) -> str:
    """The name of a kernel that the user wrote."""
    kernel = getattr(kernel, "fn", kernel)  # of an autotuned one
    return f"triton.{getattr(kernel, '__name__', '') or getattr(getattr(kernel, 'fn', None), '__name__', 'kernel')}"


# ---------------------------------------------------------------------- kernels of packages for transformers
class Matmul(NamedTuple):
    """A product of two matrices, as often as there are chunks and heads."""

    times: int
    m: int
    n: int
    k: int


class Kernel(NamedTuple):
    """Results and matmuls of one function, from its arguments by name."""

    results: Callable[[dict[str, Any]], tuple[torch.Tensor | None, ...]]
    matmuls: Callable[[dict[str, Any]], list[Matmul]] = lambda _: []


def _mamba2_results(given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    x = given["hidden_states"]
    batch, _, heads, width = x.shape
    return _with_state(x, given["return_final_states"], (batch, heads, width, given["B"].shape[-1]))


def _scan_results(given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    x = given["hidden_states"]
    return _with_state(x, given["return_last_state"], (*x.shape[:2], given["A"].shape[-1]))


def _with_state(x: Any, is_wanted: bool, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """A result like the input, and the last state if it is wanted."""
    return torch.empty_like(x), *([x.new_empty(shape, dtype=torch.float32)] if is_wanted else [])


def _mamba2_matmuls(given: dict[str, Any]) -> list[Matmul]:
    (batch, length, heads, width), chunk = given["hidden_states"].shape, int(given["chunk_size"])
    groups, state = given["B"].shape[2:]
    chunks = batch * ceil(length / chunk)
    return [
        Matmul(chunks * groups, chunk, chunk, state),  # C by B
        Matmul(chunks * heads, chunk, width, chunk),  # inside a chunk
        Matmul(chunks * heads, width, state, chunk),  # the state that a chunk leaves
        Matmul(chunks * heads, chunk, width, state),  # what earlier chunks add
    ]


def _delta_results(given: dict[str, Any]) -> tuple[torch.Tensor | None, ...]:
    key, value = given["key"], given["value"]
    batch, _, heads, width = value.shape
    state = key.new_empty((batch, heads, key.shape[-1], width), dtype=torch.float32)
    return torch.empty_like(value), state if given["output_final_state"] else None


def _delta_matmuls(given: dict[str, Any]) -> list[Matmul]:
    (batch, length, heads, width), inner = given["value"].shape, given["key"].shape[-1]
    count, chunk = batch * heads * ceil(length / _DELTA_CHUNK), _DELTA_CHUNK
    return [
        Matmul(count, chunk, chunk, inner),  # keys by keys
        Matmul(count, chunk, inner + width, chunk),  # its inverse by keys and values
        Matmul(count, chunk, width, inner),  # what the state says of the keys
        Matmul(count, inner, width, chunk),  # the state that a chunk leaves
        Matmul(count, chunk, chunk, inner),  # queries by keys
        Matmul(count, chunk, width, chunk),  # inside a chunk
        Matmul(count, chunk, width, inner),  # what earlier chunks add
    ]


KERNELS = {  # by the name in its package
    "mamba_chunk_scan_combined": Kernel(_mamba2_results, _mamba2_matmuls),
    "selective_scan_fn": Kernel(_scan_results),
    "causal_conv1d_fn": Kernel(lambda given: (torch.empty_like(given["hidden_states"]),)),
    "chunk_gated_delta_rule": Kernel(_delta_results, _delta_matmuls),
    "chunk_kda": Kernel(_delta_results, _delta_matmuls),
}


def estimated_kernels(log: OperatorLog, module: ModuleType) -> Iterator[Replacement]:
    """The references among the functions of a modeling module of transformers."""
    for name, function in list(vars(module).items()):
        package_name, reference = _reference(function)
        if package_name in KERNELS:
            yield module, name, _estimated(log, package_name, reference)


def modeling_modules(model: torch.nn.Module) -> list[ModuleType]:
    """The modules of transformers that define the classes of a model's layers."""
    names = sorted({type(part).__module__ for part in model.modules()})
    return [sys.modules[name] for name in names if name.startswith("transformers.models.") and name in sys.modules]


def _reference(function: Any) -> tuple[str, Any]:
    """Name of the package's function, and the one that runs without the package (`hub_kernels` of transformers)."""
    if not inspect.isfunction(function) or "torch_function" not in function.__code__.co_freevars:
        return "", None
    cells = inspect.getclosurevars(function).nonlocals
    if cells.get("is_new_implementation", True):
        return "", None
    return str(cells.get("func_name", "")), cells["torch_function"]


def _estimated(log: OperatorLog, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(reference)

    @functools.wraps(reference)
    def estimate(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if not any(value.device.type == "cuda" for value in given.values() if isinstance(value, torch.Tensor)):
            return reference(*args, **kwargs)
        log.notes[NOT_INSTALLED.format(name)] = None
        return _Kernel.apply(log, name, given, *given.values())

    return estimate


class _Kernel(torch.autograd.Function):  # type: ignore[misc]
    """Its operands are kept for the backward pass, as kernels keep them; everything else is computed again."""

    @staticmethod
    def forward(ctx: Any, log: OperatorLog, name: str, given: dict[str, Any], *values: Any) -> Any:
        with log.paused():
            results = KERNELS[name].results(given)
        ctx.log, ctx.name, ctx.count, ctx.matmuls = log, name, len(values), KERNELS[name].matmuls(given)
        ctx.places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
        operands = [values[place] for place in ctx.places]
        ctx.save_for_backward(*operands)
        _record(log, name, ctx.matmuls, operands, results)
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        operands = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[3 + place] for place in ctx.places]
        with ctx.log.paused():
            results = [torch.empty_like(t) if w else None for t, w in zip(operands, wanted, strict=True)]
        _record(ctx.log, f"{ctx.name}_backward", ctx.matmuls * _BACKWARD_PASSES, [*operands, *gradients], results)
        by_place = dict(zip(ctx.places, results, strict=True))
        return None, None, None, *map(by_place.get, range(ctx.count))


def _record(log: OperatorLog, name: str, matmuls: list[Matmul], inputs: list[Any], outputs: Any) -> None:
    """Record the kernels of one function: its matmuls, then what it reads and writes."""
    mark = (UNSEEN, f"of={name}")
    for count, m, n, k in matmuls:
        with log.paused():
            a, b, c = (inputs[0].new_empty(shape) for shape in ((count, m, k), (count, k, n), (count, m, n)))
        log.add("aten.bmm.default", [a, b], [c], mark)
    read, written = ([tensor for tensor in tensors if tensor is not None] for tensors in (inputs, outputs))
    log.add(f"kernel.{name}", read, written, mark)
