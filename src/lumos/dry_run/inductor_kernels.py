"""Kernels of a graph that inductor has scheduled: what each reads, writes and frees, and how a call imitates them.

Inductor's own lowering and scheduler decide what is fused, in which order kernels run and which buffers exist; nothing
is generated or compiled. `program_of(graph)` returns the schedule as a `Program`; `Program.run` makes fake tensors for
the buffers that kernels write, as long as they are needed, and records every kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch._inductor import ir, scheduler
from torch._inductor.dependencies import MemoryDep, StarDep
from torch._inductor.utils import get_fused_kernel_name

from lumos.dry_run.gpu_functions import cudnn_uses_tf32, matmuls_use_tf32
from lumos.dry_run.operator_log import OperatorLog
from lumos.dry_run.package_kernels import is_own, name_of
from lumos.program.op import UNSEEN

_COLLECTIVES = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")
_NOT_TENSORS: Any = getattr(ir, "NonTensorObj", ())  # process groups, generators
_BOTH_WAYS: Any = getattr(scheduler, "FusedMixOrderReductions", ())  # one kernel that reduces rows and columns
_PERSISTENT = 1024  # elements of a row that a kernel keeps in registers (torch._inductor.choices)


class View(NamedTuple):
    """A tensor as a kernel sees it: part of a buffer."""

    buffer: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0


class Buffer(NamedTuple):
    """Memory that the compiled code allocates."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    device: Any


class Kernel(NamedTuple):
    """One launch: `fused.pointwise`, `fused.reduction`, `fused.scatter`, or an operator that inductor only calls."""

    name: str
    reads: tuple[View, ...] = ()
    writes: tuple[View, ...] = ()
    options: tuple[str, ...] = ()
    allocates: tuple[str, ...] = ()
    reuses: tuple[tuple[str, str], ...] = ()  # a buffer in place of another, whose last reader this is
    frees: tuple[str, ...] = ()
    node: Any = None  # of a collective or an operator of another library, which is called
    operands: tuple[View | str, ...] = ()  # of it


class Program(NamedTuple):
    """The kernels of one compiled graph, in order."""

    inputs: list[str]
    constants: dict[str, Any]
    buffers: dict[str, Buffer]
    kernels: list[Kernel]
    outputs: list[View | str | int | None]  # by name: objects that are not tensors (a process group)

    def run(self, log: OperatorLog, arguments: list[Any]) -> list[Any]:
        """Run the kernels. `arguments` is emptied, as by compiled code, so that tensors are freed on the way."""
        held: dict[str, Any] = self.constants | dict(zip(self.inputs, arguments, strict=True))
        arguments.clear()
        with torch.no_grad():
            log.add("compiled.call", [], [], ("compiled",))
            for kernel in self.kernels:
                self._launch(log, kernel, held)
            with log.paused():
                return [_seen(held, view) if isinstance(view, View | str) else view for view in self.outputs]

    def _launch(self, log: OperatorLog, kernel: Kernel, held: dict[str, Any]) -> None:
        with log.paused():
            reads = [_seen(held, view) for view in kernel.reads]
            for new, old in kernel.reuses:
                held[new] = held[old].as_strided(self.buffers[new].size, self.buffers[new].stride)
            for name in kernel.allocates:
                made = self.buffers[name]
                held[name] = torch.empty_strided(made.size, made.stride, dtype=made.dtype, device=made.device)
            writes = [_seen(held, view) for view in kernel.writes]
        if kernel.node is not None:
            _call(kernel.node, [_seen(held, operand) for operand in kernel.operands], held)
        elif kernel.name:
            log.add(kernel.name, reads, writes, kernel.options)
        del reads, writes
        for name in kernel.frees:
            held.pop(name, None)


def _seen(held: dict[str, Any], view: View | str) -> Any:
    if isinstance(view, str):
        return held[view]
    tensor = held[view.buffer]
    if tuple(tensor.shape) == view.size and tuple(tensor.stride()) == view.stride and not view.offset:
        return tensor
    return tensor.as_strided(view.size, view.stride, tensor.storage_offset() + view.offset)


def _call(node: Any, operands: list[Any], held: dict[str, Any]) -> None:
    """Dispatch the operator of a node like those of eager code, so that it is recorded like them."""
    args, kwargs = node.unflatten_args(operands, node.constant_args)
    results = node.op_overload(*args, **kwargs)
    outputs = node.outputs if isinstance(getattr(node, "outputs", None), list | tuple) else []
    for buffer, tensor in zip(outputs, results if isinstance(results, list | tuple) else [results], strict=False):
        held[buffer.get_name()] = tensor
    if not outputs and not node.get_mutation_names():
        held[node.get_name()] = results


# ---------------------------------------------------------------------- what inductor scheduled
def program_of(graph: Any) -> Program:
    """The schedule of a lowered graph (`GraphLowering` whose scheduler has run)."""
    reader = _Reader(graph)
    outputs = [_output(node) for node in graph.graph_outputs]
    kept = {view.buffer if isinstance(view, View) else str(view) for view in outputs}
    outputs = [reader.placed(view) if isinstance(view, View) else view for view in outputs]
    kept |= {view.buffer for view in outputs if isinstance(view, View)}
    kernels = [kernel for node in graph.scheduler.nodes for kernel in reader.kernels(node)]
    kernels = _with_lifetimes(kernels, reader, kept)
    return Program(list(graph.graph_input_names), dict(graph.constants), reader.buffers, kernels, outputs)


def view_of(node: Any) -> Any:
    """The buffer behind a node of inductor's IR, as the node sees it; None if it is not a tensor."""
    while isinstance(node, ir.TensorBox | ir.StorageBox):
        node = node.data
    if not isinstance(node, ir.Buffer | ir.ReinterpretView):
        return None
    layout = node.get_layout() if isinstance(node, ir.ReinterpretView) else _layout(node)
    if layout is None:
        return None
    offset = layout.offset if isinstance(node, ir.ReinterpretView) else 0
    return View(node.get_name(), _ints(layout.size), _ints(layout.stride), int(offset))


def _output(node: Any) -> View | str | int | None:
    if isinstance(node, ir.ShapeAsConstantBuffer):
        return int(node.expr)
    if isinstance(node, _NOT_TENSORS):
        return str(node.get_name())
    return view_of(node)  # type: ignore[no-any-return]


def _layout(buffer: Any) -> Any:
    """Size and stride of a buffer; None if it has none of its own (several outputs, or only effects)."""
    layout = buffer.layout
    if isinstance(layout, ir.NoneLayout | ir.MultiOutputLayout):
        return None
    return layout.real_layout() if isinstance(layout, ir.MutationLayoutSHOULDREMOVE) else layout


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


class _Reader:
    """Reads scheduler nodes as kernels; knows which buffers are views of others."""

    def __init__(self, graph: Any) -> None:
        self.graph, self.scheduler = graph, graph.scheduler
        self.buffers: dict[str, Buffer] = {}
        self.views: dict[str, View] = {}
        self.summed: set[str] = set()  # nodes that add partial sums up
        self.parts: dict[str, list[Any]] = {}  # outputs of an operator that has several
        for buffer in graph.buffers:
            self._read_buffer(buffer)

    def _read_buffer(self, buffer: Any) -> None:
        name, layout = buffer.get_name(), buffer.layout
        if isinstance(buffer, ir.MultiOutput):
            self.parts.setdefault(buffer.inputs[0].get_name(), []).append(buffer)
        if isinstance(layout, ir.MutationLayoutSHOULDREMOVE):
            target = layout.get_buffer()
            self.views[name] = View(target.get_name(), _ints(layout.size), _ints(layout.stride))
        elif isinstance(layout, ir.NonOwningLayout):
            self.views[name] = view_of(layout.view)
        elif not isinstance(layout, ir.NoneLayout | ir.MultiOutputLayout):
            device = torch.device(layout.device)
            self.buffers[name] = Buffer(_ints(layout.size), _ints(layout.stride), layout.dtype, device)

    def placed(self, view: View) -> View:
        """A view as one of the buffer that owns the memory."""
        while view.buffer in self.views:
            owner = self.views[view.buffer]
            view = view._replace(buffer=owner.buffer, offset=view.offset + owner.offset)
        real = self.scheduler.mutation_real_name.get(view.buffer)
        return self.placed(view._replace(buffer=real)) if real and real != view.buffer else view

    # ------------------------------------------------------------------ kinds of nodes
    def kernels(self, node: Any) -> Iterator[Kernel]:
        """The kernels that a node of the schedule launches."""
        if isinstance(node, scheduler.NopKernelSchedulerNode):
            return
        if isinstance(node, scheduler.GroupedSchedulerNode | scheduler.ForeachKernelSchedulerNode):
            for part in getattr(node, "snodes", ()):
                yield from self.kernels(part)
        elif isinstance(node, scheduler.ExternKernelSchedulerNode):
            if not isinstance(node.node, ir.MultiOutput):
                yield self._called(node.node)
        else:
            yield self._fused(node)
            self._follow_partial_sums(node)

    def _follow_partial_sums(self, node: Any) -> None:
        """A kernel that reduces rows and columns at once leaves partial sums, which PyTorch's own kernel adds up."""
        if isinstance(node, _BOTH_WAYS):
            parts = (part for part in node.node2.get_nodes() if part.is_reduction())
            users = (user for part in parts for buffer in part.get_outputs() for user in buffer.users)
            self.summed |= {user.get_name() for user in users if user.node.is_reduction()}

    def _called(self, node: Any) -> Kernel:
        """An operator that inductor calls as it is: matmuls, convolutions, attention, sorting."""
        overload = getattr(node, "op_overload", None)
        if getattr(overload, "namespace", "") in _COLLECTIVES or is_own(overload):
            views = ((tensor, view_of(tensor)) for tensor in node.inputs)
            operands = tuple(str(tensor.get_name()) if view is None else self.placed(view) for tensor, view in views)
            reads = tuple(view for view in operands if isinstance(view, View))
            return Kernel(str(overload), reads, node=node, operands=operands)
        if isinstance(node, ir.UserDefinedTritonKernel):
            return self._launched(node)
        own = [node.get_name()] if node.get_name() in self.buffers else []
        parts = [part.get_name() for part in self.parts.get(node.get_name(), ())]
        changed = [name for name in node.get_mutation_names() if name not in own]
        writes = tuple(self.placed(self._whole(name)) for name in (*own, *parts, *changed))
        reads = tuple(self.placed(view) for tensor in node.inputs if (view := view_of(tensor)) is not None)
        name, given = _operator_name(node, overload), _arguments(node)
        options = ("compiled", *_precision(name, self, reads), *_marks(given))
        if "scaled_dot_product" in name:
            name, reads = self._attention(name, given)
        allocates = tuple(name for name in (*own, *parts) if name in self.buffers and name not in self.views)
        return Kernel(name, reads, writes, options, allocates)

    def _launched(self, node: Any) -> Kernel:
        """A kernel of Triton that the user wrote."""
        changed = [view for tensor in node.mutable_args if (view := view_of(tensor)) is not None]
        reads = [view for tensor in node.inputs if (view := view_of(tensor)) is not None and view not in changed]
        read, written = (tuple(map(self.placed, views)) for views in (reads, changed))
        return Kernel(name_of(node.get_kernel_and_metadata()[0]), read, written, ("compiled", UNSEEN))

    def _attention(self, name: str, given: dict[str, Any]) -> tuple[str, tuple[View, ...]]:
        """Whichever kernel it is, its name and operands are those of `gpu_functions.attention`."""
        backward = name.split(".")[1].endswith("_backward")
        wanted = ["query", "key", "value", *(("out", "logsumexp", "grad_out", "grad_out_") if backward else ())]
        reads = tuple(self.placed(view_of(given[key])) for key in wanted if given.get(key) is not None)
        return f"attention.{'backward' if backward else 'forward'}", reads

    def _whole(self, name: str) -> View:
        name = self.scheduler.mutation_real_name.get(name, name)
        buffer = self.buffers.get(name)
        if buffer is None:
            tensor = self.graph.graph_inputs.get(name)
            view = self.views.get(name) or view_of(self.graph.get_buffer(name) if tensor is None else tensor)
            return View(name, view.size, view.stride)
        return View(name, buffer.size, buffer.stride)

    def _fused(self, node: Any) -> Kernel:
        """A Triton kernel: buffers that only it uses stay in registers."""
        inside = node.get_operation_names()
        kept = [name for name in node.get_buffer_names()
                if not self.scheduler.can_buffer_be_removed_through_fusion(name, inside)]  # fmt: skip
        writes = node.read_writes.writes
        reads = [dep for dep in node.read_writes.reads if dep.name not in node.get_buffer_names()]
        written = tuple(self._touched(name, writes) for name in kept)
        moved = dict.fromkeys(dep.name for dep in reads if isinstance(dep, MemoryDep | StarDep))
        read = tuple(self._touched(name, reads) for name in moved)
        atomic = (dep.name for dep in writes if getattr(dep, "mode", None) == "atomic_add")
        added_to = {self.placed(self._whole(name)).buffer for name in atomic}
        if added_to:  # of what is added to, only the places that are written are read
            read = tuple(view for view in read if view.buffer not in added_to)
            read += tuple(view for view in written if view.buffer in added_to)
        kind = "scatter" if added_to else "reduction" if node.is_reduction() else "pointwise"
        owned = tuple(name for name in kept if name in self.buffers and name not in self.views)
        reuses = tuple(self._reuses(node, owned))
        if node.get_name() in self.summed:
            return Kernel("aten.sum.dim_IntList", read, written, ("compiled",), owned)
        return Kernel(f"fused.{kind}", read, written, ("compiled", _triton_name(node)), owned, reuses)

    def _touched(self, name: str, deps: Any) -> View:
        """The part of a buffer that a kernel reads or writes: all of it, or as many elements as its loops have."""
        whole = self.placed(self._whole(name))
        count = prod(size for size, stride in zip(whole.size, whole.stride, strict=True) if stride)
        touched = sum(_elements(dep, count) for dep in deps if dep.name == name)
        return whole if touched >= count else View(whole.buffer, (touched,), (1,), whole.offset)

    def _reuses(self, node: Any, owned: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Buffers that are written in place of one that is read (`BaseSchedulerNode.decide_inplace_update`)."""
        taken, inside = set[str](), set(node.get_buffer_names())
        for part in node.get_nodes():
            for new in (buffer.get_name() for buffer in part.get_outputs() if buffer.get_name() in owned):
                for read in part.read_writes.reads:
                    old = read.name
                    is_free = old not in taken | inside and part.can_inplace(read) and _reads_last(node, part, old)
                    if is_free and self._can_replace(old, new):
                        taken.add(old)
                        yield new, old
                        break

    def _can_replace(self, old: str, new: str) -> bool:
        """Whether a buffer fits in the memory of another, which the compiled code owns or may overwrite."""
        buffer, wanted = self.buffers.get(old), self.buffers[new]
        if buffer is not None:
            return old not in self.views and (prod(buffer.size), buffer.dtype) == (prod(wanted.size), wanted.dtype)
        if old not in self.scheduler.name_to_donated_buffer:
            return False
        donated = self.graph.graph_inputs[old]
        return bool(prod(view_of(donated).size) == prod(wanted.size) and donated.get_dtype() == wanted.dtype)


def _reads_last(node: Any, part: Any, name: str) -> bool:
    """Whether a part of a fused kernel is the last to read a buffer, and all parts read it at the same places."""
    deps = [(other, dep) for other in node.get_nodes() for dep in other.read_writes.reads_and_writes()]
    touching = [(other, dep) for other, dep in deps if dep.name == name]
    others = {other.get_name() for other, _ in touching} - {part.get_name()}
    return len({dep for _, dep in touching}) == 1 and others <= set(part.ancestors)


def _elements(dep: Any, everything: int) -> int:
    if not isinstance(dep, MemoryDep):
        return everything
    if dep.is_indirect():  # rows of a table, by their numbers
        return min(everything, prod(_ints(dep.size)))
    return min(everything, int(dep.get_numel()))


def _arguments(node: Any) -> dict[str, Any]:
    """Arguments of an operator by name, where inductor keeps them all."""
    schema = getattr(getattr(node, "op_overload", None), "_schema", None)
    if schema is None or not hasattr(node, "unflatten_args"):
        return {}
    args, kwargs = node.unflatten_args(node.inputs, node.constant_args)
    return {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}


def _marks(given: dict[str, Any]) -> tuple[str, ...]:
    """Options that the cost of an operator depends on besides its tensors (as `record._options`)."""
    masked = any(given.get(key) is not None for key in ("attn_bias", "attn_mask"))
    wanted = "".join(str(int(part)) for part in given.get("output_mask") or ())
    marks = {
        "causal": given.get("is_causal"), "masked": masked, "dropout": given.get("dropout_p"),
        "accumulate": given.get("accumulate"), f"mask={wanted}": "weight" in given and wanted,
    }  # fmt: skip
    return tuple(mark for mark, applies in marks.items() if applies)


def _operator_name(node: Any, overload: Any) -> str:
    if overload is not None and hasattr(overload, "_opname"):
        return f"{overload.namespace}.{overload._opname}.default"
    called = str(getattr(node, "python_kernel_name", None) or type(node).__name__)
    return f"aten.{called.removeprefix('extern_kernels.').removeprefix('aten.').split('.')[0]}.default"


def _precision(name: str, reader: _Reader, reads: Sequence[View]) -> tuple[str, ...]:
    """Whether fp32 operands are multiplied as tf32."""
    if name.startswith(("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")):
        allowed = matmuls_use_tf32()
    else:
        allowed = name.startswith("aten.convolution") and cudnn_uses_tf32("conv")
    return ("tf32",) if allowed and reads and reader.graph.get_dtype(reads[-1].buffer) == torch.float32 else ()


def _triton_name(node: Any) -> str:
    """The name that inductor gives the kernel, without its number: triton_poi, _red (a loop), _per (in registers)."""
    kind = "poi"
    if node.is_reduction():
        rows = [part.group[1][1] for part in node.get_nodes() if part.is_reduction()]
        kind = "per" if rows and all(int(row) <= _PERSISTENT for row in rows) else "red"
        kind = "per" if isinstance(node, _BOTH_WAYS) else kind
    return f"triton_{kind}_{get_fused_kernel_name(node.get_nodes(), 'original_aten')}"


# ---------------------------------------------------------------------- lifetimes
def _with_lifetimes(kernels: list[Kernel], reader: _Reader, kept: set[str]) -> list[Kernel]:
    """Free every buffer after the kernel that uses it last, and overwrite none that is needed later."""
    last: dict[str, int] = {}
    for place, kernel in enumerate(kernels):
        last |= dict.fromkeys({view.buffer for view in (*kernel.reads, *kernel.writes)} | set(kernel.allocates), place)
    complete = []
    made: set[str] = set()
    for place, kernel in enumerate(kernels):
        reuses = tuple((new, old) for new, old in kernel.reuses if last[old] == place and old not in kept)
        replaced = {new for new, _ in reuses}
        # the memory of a concatenation exists from the first of its parts on, and views need their owner
        needed = {view.buffer for view in kernel.writes} | set(kernel.allocates)
        allocates = tuple(sorted((needed & reader.buffers.keys()) - replaced - made))
        made |= needed
        frees = tuple(name for name, at in last.items() if at == place and name not in kept)
        complete.append(kernel._replace(reuses=reuses, allocates=allocates, frees=frees))
    return complete
