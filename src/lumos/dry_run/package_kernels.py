"""Kernels of packages that transformers calls if they are installed: mamba-ssm, causal-conv1d, flash-linear-attention.

Without them transformers runs a reference in plain PyTorch, which nobody trains with: it is many times slower and holds
what a kernel keeps in registers. A dry run records the matmuls that a kernel is made of instead, and what it reads and
writes; all of it is marked as unseen. The matmuls of a chunk are those of the papers: Mamba-2 (arXiv:2405.21060,
section 6), gated delta networks (arXiv:2412.06464, section 3.3). A backward pass computes two gradients of each, and
its states once more.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from math import ceil
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch

from lumos.program.op import UNSEEN

NOT_INSTALLED = "{} is estimated: kernels of its package take the place of the reference code in transformers"
_DELTA_CHUNK = 64  # tokens; of flash-linear-attention, whatever the reference takes
_BACKWARD_PASSES = 3


class KernelRecorder(Protocol):
    """Where kernels are written down (`record.Recorder`)."""

    notes: dict[str, None]

    def add(
        self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], options: tuple[str, ...] = ()
    ) -> Any: ...
    def paused(self) -> AbstractContextManager[None]: ...


class Matmul(NamedTuple):
    """A product of two matrices, as often as there are chunks and heads."""

    times: int
    m: int
    n: int
    k: int


class Kernel(NamedTuple):
    """What is known of one function: its results and its matmuls, from its arguments by name."""

    results: Callable[[dict[str, Any]], Any]
    matmuls: Callable[[dict[str, Any]], list[Matmul]] = lambda _: []


# ---------------------------------------------------------------------- what each function computes
def _mamba2_results(given: dict[str, Any]) -> Any:
    x, b = given["hidden_states"], given["B"]
    out = torch.empty_like(x)
    if not given["return_final_states"]:
        return out
    batch, _, heads, width = x.shape
    return out, x.new_empty((batch, heads, width, b.shape[-1]), dtype=torch.float32)


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


def _scan_results(given: dict[str, Any]) -> Any:
    x = given["hidden_states"]
    out = torch.empty_like(x)
    state = given["A"].shape[-1]
    return (out, x.new_empty((*x.shape[:2], state), dtype=torch.float32)) if given["return_last_state"] else out


def _delta_results(given: dict[str, Any]) -> Any:
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


KERNELS = {
    "mamba_chunk_scan_combined": Kernel(_mamba2_results, _mamba2_matmuls),
    "selective_scan_fn": Kernel(_scan_results),
    "causal_conv1d_fn": Kernel(lambda given: torch.empty_like(given["hidden_states"])),
    "chunk_gated_delta_rule": Kernel(_delta_results, _delta_matmuls),
    "chunk_kda": Kernel(_delta_results, _delta_matmuls),
}  # by the name in its package


# ---------------------------------------------------------------------- in place of the reference
def estimated_kernels(recorder: KernelRecorder, module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement) of the references among the functions of a modeling module of transformers."""
    for name, function in list(vars(module).items()):
        found = _reference(function)
        if found is not None and found[0] in KERNELS:
            yield module, name, _estimated(recorder, *found)


def modeling_module(model: torch.nn.Module) -> ModuleType | None:
    """The module of transformers that defines a class of layers."""
    name = type(model).__module__
    return sys.modules.get(name) if name.startswith("transformers.models.") else None


def _reference(function: Any) -> tuple[str, Callable[..., Any]] | None:
    """Name of the package's function, and the one that runs without the package (`hub_kernels` of transformers)."""
    if not inspect.isfunction(function) or "torch_function" not in function.__code__.co_freevars:
        return None
    cells = inspect.getclosurevars(function).nonlocals
    if cells.get("is_new_implementation", True):
        return None
    return str(cells.get("func_name", "")), cells["torch_function"]


def _estimated(recorder: KernelRecorder, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(reference)

    @functools.wraps(reference)
    def estimate(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if not any(value.device.type == "cuda" for value in given.values() if isinstance(value, torch.Tensor)):
            return reference(*args, **kwargs)
        recorder.notes[NOT_INSTALLED.format(name)] = None
        return _Kernel.apply(recorder, name, given, *given.values())

    return estimate


class _Kernel(torch.autograd.Function):  # type: ignore[misc]
    """Its operands are kept for the backward pass, as kernels keep them; everything else is computed again."""

    @staticmethod
    def forward(ctx: Any, recorder: KernelRecorder, name: str, given: dict[str, Any], *values: Any) -> Any:
        with recorder.paused():
            found = KERNELS[name].results(given)
        ctx.recorder, ctx.name = recorder, name
        ctx.count = len(values)
        ctx.tensors = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
        operands = [values[place] for place in ctx.tensors]
        ctx.save_for_backward(*operands)
        ctx.matmuls = KERNELS[name].matmuls(given)
        _run(recorder, name, ctx.matmuls, operands, [t for t in _listed(found) if t is not None])
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        operands = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[3 + place] for place in ctx.tensors]
        with ctx.recorder.paused():
            found = [torch.empty_like(t) if w else None for t, w in zip(operands, wanted, strict=True)]
        read = [*operands, *(gradient for gradient in gradients if gradient is not None)]
        matmuls = ctx.matmuls * _BACKWARD_PASSES
        _run(ctx.recorder, f"{ctx.name}_backward", matmuls, read, [t for t in found if t is not None])
        placed = dict(zip(ctx.tensors, found, strict=True))
        return None, None, None, *(placed.get(place) for place in range(ctx.count))


def _listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, tuple) else [found]


def _run(recorder: KernelRecorder, name: str, matmuls: list[Matmul], inputs: list[Any], outputs: list[Any]) -> None:
    """Write the kernels of one function down: its matmuls, then what it reads and writes."""
    mark = (UNSEEN, f"of={name}")
    for count, m, n, k in matmuls:
        with recorder.paused():
            a, b, c = (inputs[0].new_empty(shape) for shape in ((count, m, k), (count, k, n), (count, m, n)))
        recorder.add("aten.bmm.default", [a, b], [c], mark)
    recorder.add(f"kernel.{name}", inputs, outputs, mark)
