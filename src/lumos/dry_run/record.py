"""Record: run training code on fake tensors and write down every operator. Needs torch (any build).

Fake tensors have shapes, dtypes and strides and no memory, so that a step of any size runs in seconds on a CPU. A
dispatch mode sees every aten operator of the forward pass, the backward pass and the optimizer; finalizers of storages
tell when memory is released.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from math import prod
from time import process_time
from typing import Any

import torch
import torch.utils.checkpoint
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from lumos.dry_run.assumed_values import ASSUMED, AssumedValues, storage_key
from lumos.dry_run.compiled import compiled_as_kernels
from lumos.dry_run.compiled_regions import CompiledRegions
from lumos.dry_run.endless_loops import TooManyOperatorsError, caller, shown
from lumos.dry_run.fake_gpu import ADDRESS, DEFAULT_STREAM, fake_gpu, refused, replaced
from lumos.dry_run.flex_attention import ASSUMED_MASK, backward_shapes, flex_as_on_gpu, forward_shapes
from lumos.dry_run.gpu_functions import convolution_format, functions_as_on_gpu, trace_only_compiled_code
from lumos.dry_run.initialisers import initialisers_without_draws
from lumos.dry_run.memory_ledger import MemoryLedger
from lumos.dry_run.own_operators import implementation_of, is_composite, is_own
from lumos.dry_run.package_kernels import estimated_kernels, modeling_module
from lumos.dry_run.recorded_step import Recording, StorageEvent
from lumos.dry_run.recurrent_layers import recurrent_as_on_gpu
from lumos.dry_run.tensor_float import matmuls_use_tf32
from lumos.dry_run.triton_launches import triton_launches, write_down
from lumos.dry_run.value_operators import ValueOperators
from lumos.dtypes import DTYPES
from lumos.program.op import UNSEEN, Op, Tensor

_DTYPES = {getattr(torch, dtype.torch): dtype.name for dtype in DTYPES if dtype.name != "fp8"}
_MOST_SECONDS, _MOST_OPS = 300.0, 200_000  # of this process; a scan over tokens in Python runs more
_CHECKED_EVERY = 64  # calls of operators
_ENOUGH_OPS, _PASSES, _MARGIN = 10_000, 3.0, 1.5  # to expect more from: a backward pass runs about twice as many
_SMALL, _MANY = 1 << 16, 1 << 23  # elements of CPU tensors that keep their values: of floats, and of other numbers
_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor}
_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "linear", "matmul"}
_ALONG = {"cumsum": 1, "sort": 1, "_softmax": 1, "_log_softmax": 1}  # where the dimension is among the arguments
COLLECTIVES = -1  # the stream of the first process group; others are below it
_NOT_CALLED = {"_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_", "record_stream"}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:  # sparse tensors are known by what they are made of
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _info(tensor: torch.Tensor) -> Tensor:
    dtype = _DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return Tensor(tuple(map(int, tensor.shape)), dtype, tuple(map(int, tensor.stride())), tensor.element_size())


def _on_gpu(tensor: torch.Tensor) -> bool:
    return bool(tensor.device.type == "cuda")


def _is_real(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator is run for real: on small tensors of the CPU, whose values scripts use (schedules)."""
    tensors = [*_tensors(args), *_tensors(kwargs)]
    if tensors:
        return not any(isinstance(t, FakeTensor) for t in tensors) and _is_cpu(kwargs)
    if func.namespace != "aten" or not _is_cpu(kwargs):
        return False
    sizes = next((arg for arg in args if isinstance(arg, list | tuple)), None)
    if sizes is None:  # arange(10), linspace(0, 1, 10), randperm(10)
        return all(abs(arg) <= _SMALL for arg in args if isinstance(arg, int | float))
    dtype = kwargs.get("dtype") or (torch.int64 if "randint" in func._opname else torch.float32)
    return prod(sizes) <= (_SMALL if dtype.is_floating_point else _MANY)


def _is_cpu(kwargs: Any) -> bool:
    device = kwargs.get("device")
    return device is None or device.type == "cpu"


class Recorder(TorchDispatchMode, ValueOperators):  # type: ignore[misc]
    """Writes down operators, streams and memory; answers questions about values that fake tensors do not have."""

    supports_higher_order_operators = True

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes
        self.values = AssumedValues()
        self.ledger = MemoryLedger(self.values.forget)
        self.ops: list[Op] = []
        self.stream = DEFAULT_STREAM
        self.in_optimizer = False
        self.modules = ModulePaths(self._enter_module)
        self.regions = CompiledRegions()
        self.started, self._calls = process_time(), 0
        self._has_run = self._trains = self._has_passed = False  # any module, with gradients, and its backward pass
        self.alive: dict[int, int] = {}
        self.later = ExitStack()  # undoes what is replaced on the way
        self.notes: dict[str, None] = {}  # what was assumed, each once
        self.paused_depth = 0
        self._first = 0  # the mark of the first operator of this step
        self._last: dict[int, int] = {}  # mark of the last operator on a stream
        self._waits: dict[int, set[int]] = {}  # marks that the next operator on a stream waits for
        self._groups: dict[tuple[int, ...], int] = {}  # the stream of a process group
        self._collectives: Any = None
        self.peers_are_faked = False  # by the script itself: its gathers copy, and nothing else happens
        self._knows_dtensor = False
        self._in_own_operator = False
        self._estimated: set[int] = set()  # models whose kernels were looked for

    def restart(self) -> None:
        """A step begins here: forget the operators before it."""
        self._forget()
        self.started = process_time()

    def _forget(self) -> None:
        self._first += len(self.ops)
        self.ops.clear()
        self.alive = self.ledger.restart()

    def _estimate_kernels(self, model: Any) -> None:
        """Layers of transformers whose packages are not installed run kernels of these packages all the same."""
        kinds = {module for part in model.modules() if (module := modeling_module(part)) is not None}
        for kind in sorted(kinds, key=lambda module: module.__name__):
            self.later.enter_context(replaced(estimated_kernels(self, kind)))

    def _enter_module(self, module: Any) -> None:
        if id(module) in self.modules.roots and id(module) not in self._estimated:
            self._estimated.add(id(module))
            self._estimate_kernels(module)
        if not self._has_run:  # what made the model is not part of its step
            self._has_run = True
            self.restart()
        if torch.is_grad_enabled():
            self._trains = True
        elif not self._trains and len(self.ops) > _ENOUGH_OPS:  # an evaluation before the first step is not, either
            self._forget()
        self.values.unknown.clear()
        self.on_host("python.module")

    def _check_limits(self) -> None:
        """End a step that is too long as soon as that can be seen, by how many of its modules have run so far."""
        if not self._has_run:
            if len(self.ops) > _ENOUGH_OPS:  # of what makes the model, nothing is needed later
                self.restart()
            return
        expected = len(self.ops)
        self._has_passed |= self.phase == "backward"  # whatever comes later is another micro-batch
        can_tell = torch.is_grad_enabled() and not (self._has_passed or self.regions.has_run)
        if expected > _ENOUGH_OPS and can_tell:
            expected = max(expected, round(_PASSES / _MARGIN * expected / self.modules.share_entered()))
        if process_time() - self.started > _MOST_SECONDS or expected > _MOST_OPS:
            raise TooManyOperatorsError(
                f"its step runs too many operators for a dry run: a loop over tokens, or chunks of them, in Python? It "
                f"was at {shown(caller())}"
            )

    # ------------------------------------------------------------------ operators
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        if any(kind not in _PLAIN for kind in types):  # a DTensor: it comes here again with its local tensors
            self._leave_out_propagation()
            self.on_host(f"dtensor.{func._opname}")
            return NotImplemented
        self._calls += func.namespace == "aten"
        if self._calls >= _CHECKED_EVERY and func.namespace == "aten":  # C++ ends the process on errors of `prim`
            self._calls = 0
            self._check_limits()
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"):
            return self._run_collective(func, args, kwargs)
        kwargs = {**kwargs, "pin_memory": None} if kwargs.get("pin_memory") else kwargs
        if self._in_own_operator and is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        raw = getattr(self, f"_raw_{func._opname}", None)
        if raw is not None:
            return raw(*args, **kwargs)
        if _is_real(func, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        args, kwargs = self._faked((args, kwargs))
        special = getattr(self, f"_op_{func._opname}", None)
        if special is not None:
            found = special(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if is_own(func):
            return self._own_operator(func, args, kwargs)
        out = None if func._opname in _NOT_CALLED else func(*args, **kwargs)
        if func.namespace not in ("prim", "profiler"):
            self._write_down(func, args, kwargs, out)
        return out

    def _faked(self, value: Any) -> Any:
        """Real tensors among arguments become fake ones."""
        if isinstance(value, FakeTensor):
            return value
        if isinstance(value, torch.Tensor):
            fake = self.fakes.from_tensor(value)
            if value.device.type == "cpu" and (value.numel() == 1 or not value.dtype.is_floating_point):
                with unset_fake_temporarily():
                    self.values.mean[storage_key(fake)] = float(value.float().mean()) if value.numel() else 0.0
            return fake
        if isinstance(value, list | tuple) and any(True for _ in _tensors(value)):
            return type(value)(map(self._faked, value))
        return {k: self._faked(v) for k, v in value.items()} if isinstance(value, dict) else value

    def _leave_out_propagation(self) -> None:
        """DTensor runs operators on fake tensors of its own to learn the shapes of their results."""
        module = sys.modules.get("torch.distributed.tensor._sharding_prop")
        if module is None or self._knows_dtensor:
            return
        self._knows_dtensor = True
        propagator = module.ShardingPropagator
        propagate = propagator._propagate_tensor_meta_non_cached

        @functools.wraps(propagate)
        def paused(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                return propagate(*args, **kwargs)

        api = sys.modules["torch.distributed.tensor"].DTensor
        names = ("from_local", "to_local")
        marked = [(api, name, _marked(self, f"dtensor.{name}", getattr(api, name))) for name in names]
        same_fakes = (module, "FakeTensorMode", lambda: self.fakes)  # torch 2.8 makes others, which must not mix
        self.later.enter_context(replaced([(propagator, propagate.__name__, paused), same_fakes, *marked]))

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Random numbers of DTensors come with offsets of a generator that nobody needs here; kernels of Triton are
        written down in code that torch.compile leaves to Python.
        """
        if func.name().startswith("triton_kernel_wrapper"):
            table = import_module("torch._higher_order_ops.triton_kernel_wrap").kernel_side_table
            write_down(self.add, table.get_kernel(kwargs["kernel_idx"]), list(kwargs["kwargs"].values()))
        if func.name() == "run_dtensor_rng_op":
            position = next(index for index, arg in enumerate(args) if isinstance(arg, torch._ops.OpOverload))
            with self:
                return args[position](*args[position + 1 :], **kwargs)
        return func(*args, **kwargs)

    def _op_flex_forward(self, query: Any, key: Any, value: Any, is_masked: bool) -> tuple[Any, Any]:
        found = forward_shapes(query, key, value, is_masked)
        self._flex("forward", [query, key, value], list(found), is_masked)
        return found

    def _op_flex_backward(
        self, gradient: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, is_masked: bool
    ) -> tuple[Any, ...]:
        found = backward_shapes(gradient, query, key, value, out, lse, is_masked)
        self._flex("backward", [query, key, value, out, lse, gradient], list(found), is_masked)
        return found

    def _flex(self, way: str, inputs: list[Any], outputs: list[Any], is_masked: bool) -> None:
        if is_masked:
            self.notes[ASSUMED_MASK] = None
        options = ("compiled", "causal", UNSEEN) if is_masked else ("compiled",)
        self.add(f"attention.{way}", inputs, outputs, options)

    def _own_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator of another library: what its implementation runs, or what it reads and writes."""
        implementation = implementation_of(func)
        began, outer = len(self.ops), self._in_own_operator
        if implementation is not None:
            self._in_own_operator = True
            try:
                with self:
                    return implementation(*args, **kwargs)
            except TooManyOperatorsError:
                raise
            except Exception:  # it asks for what fake tensors do not have
                del self.ops[began:]
            finally:
                self._in_own_operator = outer
        out = func(*args, **kwargs)
        inputs = [*_tensors(args), *_tensors(kwargs)]
        self.add(f"{func.namespace}.{func._opname}.default", inputs, list(_tensors(out)), (UNSEEN,))
        return out

    def _write_down(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        inputs, outputs = [*_tensors(args), *_tensors(kwargs)], list(_tensors(out))
        name = f"{func.namespace}.{func._opname}.{func._overloadname or 'default'}"
        self.add(name, inputs, outputs, self._options(func._opname, args, kwargs, inputs, outputs))
        self.values.follow(func._opname, args, out)

    def _options(self, name: str, args: Any, kwargs: Any, inputs: list[Any], outputs: list[Any]) -> tuple[str, ...]:
        """What the price of an operator hangs on, beside its operands."""
        found = []
        if name.startswith("index_put") and (args[3:4] or [kwargs.get("accumulate")])[0]:
            found.append("accumulate")
        if name in _MATMULS and inputs[0].dtype == torch.float32 and matmuls_use_tf32():
            found.append("tf32")
        if name.startswith("convolution"):
            if name == "convolution_backward":
                found.append("mask=" + "".join(str(int(wanted)) for wanted in args[-1]))
            found += ["transposed"] * bool(args[7 if name == "convolution_backward" else 6])
        if name in _ALONG and len(args) > _ALONG[name] and isinstance(args[_ALONG[name]], int):
            found.append(f"dim={args[_ALONG[name]] % max(inputs[0].dim(), 1)}")
        if name == "topk":
            found.append(f"k={args[1]}")
        if "pool2d" in name:
            found += [f"kernel={size}" for size in next((a for a in args if isinstance(a, list)), [])[:1]]
        return (*found, *self._copy_options(name, args, kwargs, inputs, outputs))

    def _copy_options(
        self, name: str, args: Any, kwargs: Any, inputs: list[Any], outputs: list[Any]
    ) -> tuple[str, ...]:
        """Between host and GPU; the host waits, unless it is told not to and its memory is pinned, as is assumed."""
        if name not in ("_to_copy", "copy_") or not inputs or not outputs or _on_gpu(inputs[-1]) == _on_gpu(outputs[0]):
            return ()
        direction = "d2h" if _on_gpu(inputs[-1]) else "h2d"
        is_free = bool(kwargs.get("non_blocking")) or args[2:3] == (True,)
        return (direction, "pinned") if is_free else (direction, "waits")

    def add(
        self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], options: tuple[str, ...] = ()
    ) -> int:
        """Write an operator down on the current stream; its mark, for which other streams can wait."""
        if self._is_unseen:
            return -1
        if not any(map(_on_gpu, (*outputs, *inputs))):
            return self.on_host(name)
        place = self.modules.current()
        new = [self.ledger.hold(tensor, place) for tensor in outputs if _on_gpu(tensor)]
        if name == "aten._softmax_backward_data.default":  # the CUDA kernel multiplies its operands first
            self.ledger.touch(outputs[0].untyped_storage().nbytes())
        options = self.regions.marked(options)
        infos = (tuple(map(_info, inputs)), tuple(map(_info, outputs)))
        mark = self._append(Op(name, *infos, self.phase, place, any(new), options), self.stream)
        if "waits" in options:
            self.wait_on_host("cudaStreamSynchronize", [mark])
        return mark

    def on_host(self, name: str) -> int:
        """Write down something that takes the host time alone."""
        if not self._is_unseen:
            self.ops.append(Op(name, (), (), self.phase, options=("cpu",)))
            self.ledger.time = len(self.ops)
        return -1

    def _append(self, op: Op, stream: int) -> int:
        waits = self._waits.pop(stream, set())
        after = tuple(sorted(mark - self._first for mark in waits if mark >= self._first))
        mark = self._first + len(self.ops)
        self.ops.append(op._replace(stream=stream, after=after))
        self.ledger.time = len(self.ops)
        self._last[stream] = mark
        return mark

    @property
    def phase(self) -> str:
        if self.in_optimizer:
            return "optimizer"
        return "forward" if torch._C._current_graph_task_id() == -1 else "backward"

    @property
    def _is_unseen(self) -> bool:
        """Whether operators are not the step's: it is paused, or torch.compile traces a graph and learns its shapes."""
        return self.paused_depth > 0 or torch._guards.TracingContext.try_get() is not None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operators in here are run on fake tensors and neither written down nor counted as memory."""
        self.paused_depth += 1
        try:
            yield
        finally:
            self.paused_depth -= 1

    # ------------------------------------------------------------------ streams
    def mark(self, stream: int) -> int:
        return self._last.get(stream, -1)

    def marks(self) -> list[int]:
        return list(self._last.values())

    def wait_for(self, stream: int, mark: int) -> None:
        if mark >= self._first and mark != self._last.get(stream):
            self._waits.setdefault(stream, set()).add(mark)

    def wait_on_host(self, what: str, marks: list[int]) -> None:
        after = tuple(sorted({mark - self._first for mark in marks if mark >= self._first}))
        self.ops.append(Op(what, (), (), self.phase, after=after))

    def memory(self) -> tuple[int, int]:
        return self.ledger.total, self.ledger.most

    def restart_peak(self) -> None:
        self.ledger.most = self.ledger.total

    # ------------------------------------------------------------------ collectives
    def _run_collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._collectives is None:
            from lumos.dry_run.collective_ops import Collectives  # torch.distributed, where it is used

            self._collectives = Collectives(self)
        return self._collectives.run(func, args, kwargs)

    def collective(self, call: Any) -> int:
        """Write a collective down: it waits for the current stream, and runs on the stream of its group."""
        self.values.exchange(call.kind, call.inputs, call.outputs)
        if self.peers_are_faked:
            return self._fake_collective(call)
        stream = self._groups.setdefault(call.group, COLLECTIVES - len(self._groups))
        for tensor in call.outputs:
            if _on_gpu(tensor):
                self.ledger.hold(tensor, self.modules.current())
        self.wait_for(stream, self.mark(self.stream))
        infos = (tuple(map(_info, call.inputs)), tuple(map(_info, call.outputs)))
        return self._append(Op(call.kind, *infos, self.phase, self.modules.current(), ranks=call.group), stream)

    def _fake_collective(self, call: Any) -> int:
        """What torch's fake process group does: its gathers copy the input to every rank's place."""
        self.on_host(f"c10d.{call.kind}")
        if call.kind == "all_gather" and call.outputs:
            for tensor in call.outputs:
                if _on_gpu(tensor):
                    self.ledger.hold(tensor, self.modules.current())
            source = min(call.inputs, key=lambda tensor: tensor.numel())
            for _ in call.group:
                self.add("aten.copy_.default", [source, source], [source])
        return self.mark(self.stream)

    # ------------------------------------------------------------------ values
    def methods(self) -> dict[str, Any]:
        """Methods of tensors that read values, or ask for memory of the host."""
        plain_list, plain_numpy, plain_array = torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__
        plain_format = torch.Tensor.__format__

        def tolist(tensor: torch.Tensor) -> Any:
            if not isinstance(tensor, FakeTensor):
                return plain_list(tensor)
            if _on_gpu(tensor):
                self.wait_on_host("cudaStreamSynchronize", [self.add("aten._to_copy.default", [tensor], [])])
            return self.values.all_of(tensor)

        def numpy(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if not isinstance(tensor, FakeTensor):
                return plain_numpy(tensor, *args, **options)
            return _array(tensor)

        def array(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            return _array(tensor) if isinstance(tensor, FakeTensor) else plain_array(tensor, *args, **options)

        def _array(tensor: torch.Tensor) -> Any:
            import numpy as np

            return np.array(tolist(tensor)).reshape(tuple(tensor.shape))

        def formatted(tensor: torch.Tensor, form: str) -> str:
            if not isinstance(tensor, FakeTensor):
                return str(plain_format(tensor, form))
            return format(tensor.item(), form) if tensor.dim() == 0 else format(str(tensor), form)

        def itself(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return tensor

        return {
            "tolist": tolist, "numpy": numpy, "__array__": array, "pin_memory": itself, "share_memory_": itself,
            "is_pinned": lambda tensor, *_, **__: not _on_gpu(tensor), "record_stream": lambda *_: None,
            "data_ptr": lambda tensor: Address(self.ledger.id_of(tensor), tensor), "__format__": formatted,
            "__dlpack__": refused(ADDRESS), "__cuda_array_interface__": property(refused(ADDRESS)),
        }  # fmt: skip


class Address:
    """Where a fake tensor lies: good for telling tensors apart, and for nothing else."""

    def __init__(self, storage: int, tensor: torch.Tensor) -> None:
        self._place = (storage or id(tensor), int(tensor.storage_offset() * tensor.element_size()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and other._place == self._place

    def __hash__(self) -> int:
        return hash(self._place)

    def __mod__(self, _: int) -> int:
        """Tensors are aligned."""
        return self._place[1] % 512

    def __bool__(self) -> bool:
        return True

    __index__ = __int__ = __add__ = __sub__ = refused(ADDRESS)


class ModulePaths:
    """Which module of the model runs, by hooks on all modules; in the backward pass, which one made the operator."""

    def __init__(self, called: Callable[[Any], object]) -> None:
        self.called = called
        self.names: dict[int, str] = {}
        self.running: list[str] = []
        self.roots: dict[int, Any] = {}
        self.by_sequence: dict[int, str] = {}
        self._not_entered: set[int] = set()

    def enter(self, module: Any, _: Any) -> None:
        if not self.running and id(module) not in self.names:
            trace_only_compiled_code()
            self.roots[id(module)] = module
            parts = {id(part): name for name, part in module.named_modules()}
            self.names |= parts
            self._not_entered |= parts.keys()
        self.running.append(self.names.get(id(module), ""))
        self._not_entered.discard(id(module))
        self.called(module)

    def share_entered(self) -> float:
        """The share of all modules that have run at least once."""
        return max(1.0 - len(self._not_entered) / max(len(self.names), 1), 1e-3)

    def leave(self, *_: Any) -> None:
        if self.running:
            self.running.pop()

    def current(self) -> str:
        """The path of the module that runs, or whose operator is differentiated."""
        if torch._C._current_graph_task_id() == -1:
            path = self.running[-1] if self.running else ""
            if path:
                self.by_sequence[torch._C._autograd._get_sequence_nr()] = path
            return path
        if self.running:  # recomputed
            return self.running[-1]
        node = torch._C._current_autograd_node()
        return self.by_sequence.get(node._sequence_nr(), "") if node is not None else ""

    @contextmanager
    def followed(self) -> Iterator[None]:
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        enter, leave = register_module_forward_pre_hook, register_module_forward_hook
        hooks = (enter(self.enter), leave(self.leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def recorded(
    gpu: str = "NVIDIA H100 80GB HBM3", memory_gib: float = 80.0, capability: tuple[int, int] = (9, 0), gpus: int = 8
) -> Iterator[Recorder]:
    """Everything in here runs on fake tensors and a fake GPU, and is written down."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(fakes)
    with ExitStack() as stack:
        stack.enter_context(recorder.later)
        stack.enter_context(fakes)  # first: it asks for GPUs itself
        stack.enter_context(fake_gpu(recorder, gpu, round(memory_gib * 2**30), capability, gpus))
        stack.enter_context(recorder.modules.followed())
        stack.enter_context(_storages_resized(recorder.ledger))
        stack.enter_context(_checkpoints_marked(recorder))
        stack.enter_context(replaced((torch.Tensor, name, value) for name, value in recorder.methods().items()))
        stack.enter_context(replaced([(torch.nn.Parameter, "__new__", staticmethod(_fake_parameter(recorder)))]))
        stack.enter_context(replaced([(torch, "tensor", _without_pinning(torch.tensor))]))
        stack.enter_context(replaced(initialisers_without_draws(recorder.values)))
        stack.enter_context(replaced(flex_as_on_gpu()))
        stack.enter_context(replaced(triton_launches(recorder.add)))
        stack.enter_context(replaced([(torch._C, "_conv_determine_backend_memory_format", convolution_format)]))
        functions = functions_as_on_gpu(recorder.add).items()
        stack.enter_context(replaced((torch.nn.functional, name, value) for name, value in functions))
        stack.enter_context(replaced((torch._VF, name, value) for name, value in recurrent_as_on_gpu(recorder).items()))
        stack.enter_context(recorder)
        yield recorder


def _without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.tensor` pins memory in C++, which asks for the driver."""

    @functools.wraps(make)
    def tensor(data: Any, **options: Any) -> Any:
        return make(data, **{name: value for name, value in options.items() if name != "pin_memory"})

    return tensor


def _fake_parameter(recorder: Recorder) -> Callable[..., Any]:
    """Parameters are fake from the start, small ones as well: moving them to the GPU must keep their identity."""
    make = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if cls is torch.nn.Parameter and type(data) is torch.Tensor and data.device.type == "cpu":
            data = recorder.fakes.from_tensor(data)
        return make(cls, data, requires_grad)

    return new


def _storages_resized(ledger: MemoryLedger) -> Any:
    """FSDP frees and allocates parameters by giving their storages another size."""
    resize, address = torch.UntypedStorage.resize_, torch.UntypedStorage.data_ptr

    @functools.wraps(resize)
    def resize_(storage: Any, size: int) -> Any:
        found = resize(storage, size)
        ledger.resize(storage)
        return found

    def data_ptr(storage: Any) -> int:
        """By which storages are told apart."""
        return int(storage._cdata if storage.device.type == "meta" else address(storage))

    return replaced([(torch.UntypedStorage, "resize_", resize_), (torch.UntypedStorage, "data_ptr", data_ptr)])


def _marked(recorder: Recorder, name: str, function: Any) -> Any:
    """A function of Python that takes the host time of its own, beside the operators that it runs."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        recorder.on_host(name)
        return function(*args, **kwargs)

    return staticmethod(marked) if name == "dtensor.from_local" else marked


def _checkpoints_marked(recorder: Recorder) -> Any:
    """Activation checkpointing takes the host time of its own, beside what it runs again."""
    module = sys.modules["torch.utils.checkpoint"]
    return replaced([(module, "checkpoint", _marked(recorder, "python.checkpoint", module.checkpoint))])


class StepCounter:
    """Follows the optimizer of a training loop: a step of it ends a step of training."""

    def __init__(self, recorder: Recorder, notes: Iterable[str] = ()) -> None:
        self.recorder, self.ended, self.notes = recorder, 0, notes
        self.roles: dict[int, str] = {}
        self.trained: dict[int, torch.Tensor] = {}  # by identity: several optimizers may have the same

    def begin(self, optimizer: Any) -> None:
        """Before an optimizer steps: what it trains, and the gradients."""
        self.recorder.in_optimizer = True
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        self.trained |= {id(p): p for p in trained}
        self._note(trained, "weights")
        self._note([p.grad for p in trained if p.grad is not None], "gradients")

    def end(self, optimizer: Any, ends_step: bool = True) -> None:
        """After it; of several optimizers one ends the step of training."""
        self.recorder.in_optimizer = False
        self._note([t for state in optimizer.state.values() for t in _tensors(state)], "optimizer")
        self.ended += ends_step

    def _note(self, tensors: list[Any], role: str) -> None:
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            with suppress(RuntimeError, NotImplementedError):  # tensors without a storage
                self.roles[self.recorder.ledger.id_of(local)] = role

    def recording(self, tokens: int = 0, microbatches: int = 1, rank: int = 0, world: int = 1) -> Recording:
        """The step that has just ended."""
        recorder, modules = self.recorder, self.recorder.modules
        models = list(modules.roots.values())
        parameters = {id(p): p for model in models for p in model.parameters()}
        for model in models:
            self._note([*model.parameters(), *model.buffers()], "weights")
        known = {event[1] for event in recorder.ledger.events} | set(recorder.alive)
        return Recording(
            list(recorder.ops),
            sum(p.numel() for p in (parameters | self.trained).values()),
            sum(p.numel() for p in self.trained.values()),
            tokens,
            recorder.alive,
            [StorageEvent(*event) for event in recorder.ledger.events],
            {storage: role for storage, role in self.roles.items() if storage in known},
            {storage: place for storage, place in recorder.ledger.places.items() if place and storage in known},
            recorder.ledger.most,
            rank,
            world,
            microbatches,
            [*self.notes, *recorder.notes, *([ASSUMED] if recorder.values.asked else [])],
            {"torch": torch.__version__},
        )


Build = Callable[[], tuple[torch.nn.Module, Callable[[], torch.Tensor], int]]


def record_step(build: Build, optimizer: str = "adamw", microbatches: int = 1, compiles: bool = False) -> Recording:
    """Run two steps of a model that `build` makes, and record the second.

    `build` returns the model, a function that runs a forward pass and returns the loss, and the tokens (or samples) of
    one micro-batch. The first step makes the optimizer's state. `compiles` runs the model by torch.compile.
    """
    with recorded() as recorder, compiled_as_kernels(recorder) as notes, torch.device("cuda"):
        with recorder.paused():
            model, loss_of, tokens = build()
        if compiles:
            model.compile()
        for tensor in (*model.parameters(), *model.buffers()):
            recorder.ledger.hold(tensor)
        update = _optimizer(optimizer, [parameter for parameter in model.parameters() if parameter.requires_grad])
        counter = StepCounter(recorder, notes)
        for _ in range(2):
            recorder.restart()
            recorder.ledger.most = 0
            for _ in range(microbatches):
                loss_of().backward()
            counter.begin(update)
            update.step()
            counter.end(update)
            update.zero_grad(set_to_none=True)
        return counter.recording(tokens * microbatches, microbatches)


def _optimizer(kind: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=True)
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
