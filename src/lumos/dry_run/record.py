"""Record: run training code on fake tensors and write down every operator. Needs torch (any build).

Fake tensors have shapes, dtypes and strides and no memory, so that a step of any size runs in seconds on a CPU. A
dispatch mode sees every aten operator of the forward pass, the backward pass and the optimizer; finalizers of storages
see when memory is released.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
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

from lumos.dry_run import package_kernels as kernels
from lumos.dry_run.assumed_values import ASSUMED, AssumedValues
from lumos.dry_run.compiled import compiled_as_kernels
from lumos.dry_run.endless_loops import TooManyOperatorsError, caller, shown
from lumos.dry_run.fake_gpu import ADDRESS, DEFAULT_STREAM, Replacement, fake_gpu, refused, replaced
from lumos.dry_run.gpu_functions import functions_as_on_gpu, matmuls_use_tf32, trace_only_compiled_code
from lumos.dry_run.operator_log import (
    CollectiveCall,
    CompiledRegions,
    MemoryLedger,
    ModulePaths,
    is_forward,
    tensors_in,
)
from lumos.dry_run.recorded_step import Recording, StorageEvent
from lumos.dry_run.value_operators import SHAPES, ValueOperators
from lumos.dtypes import DTYPES
from lumos.program.op import UNSEEN, Op, Tensor

_DTYPES = {getattr(torch, dtype.torch): dtype.name for dtype in DTYPES if dtype.name != "fp8"}
_MOST_SECONDS, _MOST_OPS = 300.0, 200_000  # of this process; a scan over tokens in Python runs more
_CHECKED_EVERY = 64  # calls of operators
_ENOUGH_OPS, _PASSES, _MARGIN = 10_000, 3.0, 1.5  # to expect more from: a backward pass runs about twice as many
_SMALL, _MANY = 1 << 16, 1 << 23  # elements of CPU tensors that keep their values: of floats, and of other numbers
_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor}
_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "linear", "matmul"}
_ALONG = {"cumsum": 1, "sort": 1, "_softmax": 1, "_log_softmax": 1}  # the place of the dimension among the arguments
COLLECTIVES = -1  # the stream of the first process group; others are below it
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")  # namespaces
_NOT_CALLED = {"_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_", "record_stream"}
_WAIT = "cudaStreamSynchronize"


def _info(tensors: list[torch.Tensor]) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(
            tuple(map(int, tensor.shape)),
            _DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
            tuple(map(int, tensor.stride())),
            tensor.element_size(),
        )
        for tensor in tensors
    )


def _on_gpu(tensor: torch.Tensor) -> bool:
    return bool(tensor.device.type == "cuda")


def _is_real(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator is run for real: on small tensors of the CPU, whose values scripts use (schedules)."""
    device = kwargs.get("device")
    is_cpu = device is None or device.type == "cpu"
    tensors = list(tensors_in((args, kwargs)))
    if tensors or func.namespace != "aten" or not is_cpu:
        return bool(tensors) and is_cpu and not any(isinstance(t, FakeTensor) for t in tensors)
    sizes = next((arg for arg in args if isinstance(arg, list | tuple)), None)
    if sizes is None:  # arange(10), linspace(0, 1, 10), randperm(10)
        return all(abs(arg) <= _SMALL for arg in args if isinstance(arg, int | float))
    dtype = kwargs.get("dtype") or (torch.int64 if "randint" in func._opname else torch.float32)
    return prod(sizes) <= (_SMALL if dtype.is_floating_point else _MANY)


class Recorder(TorchDispatchMode, ValueOperators):  # type: ignore[misc]
    """Records operators, streams and memory, and assumes the values that fake tensors do not have."""

    supports_higher_order_operators = True

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes
        self.values = AssumedValues()
        self.ledger = MemoryLedger(self.values.forget)
        self.ops: list[Op] = []
        self.stream = DEFAULT_STREAM
        self.in_optimizer = False
        self.modules = ModulePaths(self._enter_module, self._meet_model)
        self.regions = CompiledRegions()
        self.started, self._calls = process_time(), 0
        self._has_run = self._trains = self._has_passed = False  # any module, with gradients, and its backward pass
        self.alive: dict[int, int] = {}
        self.later = ExitStack()  # undoes what is replaced on the way
        self.notes: dict[str, None] = {}  # assumptions, each once
        self.paused_depth = 0
        self._first = 0  # the mark of the first operator of this step
        self._last: dict[int, int] = {}  # mark of the last operator on a stream
        self._waits: dict[int, set[int]] = {}  # marks that the next operator on a stream waits for
        self._groups: dict[tuple[int, ...], int] = {}  # the stream of a process group
        self._collectives: Any = None
        self.peers_are_faked = False  # by the script itself: its gathers copy, and nothing else happens
        self._knows_dtensor = False
        self._in_own_operator = False

    def restart(self) -> None:
        """Begin a step: forget the operators before it."""
        self._forget()
        self.started = process_time()

    def _forget(self) -> None:
        self._first += len(self.ops)
        self.ops.clear()
        self.alive = self.ledger.restart()

    def _meet_model(self, model: Any) -> None:
        """Before the first call of a model: replace functions of the modules that define its layers."""
        trace_only_compiled_code()
        for module in kernels.modeling_modules(model):
            self.later.enter_context(replaced(kernels.estimated_kernels(self, module)))

    def _enter_module(self, module: Any) -> None:
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
        """Reject a step that is too long as early as the share of its modules that have run shows it."""
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
        if func.namespace in _COLLECTIVES:
            return self._run_collective(func, args, kwargs)
        kwargs = {**kwargs, "pin_memory": None} if kwargs.get("pin_memory") else kwargs
        if self._in_own_operator and kernels.is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        raw = getattr(self, f"_raw_{func._opname}", None)
        if raw is not None:
            return raw(*args, **kwargs)
        if _is_real(func, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return self._run_on_fakes(func, *self._faked((args, kwargs)))

    def _run_on_fakes(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._opname
        special = getattr(self, f"_op_{name}", None)
        result = NotImplemented if special is None else special(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if name in SHAPES:
            return self.run_shaped(name, args, kwargs)
        if kernels.is_own(func):
            return self._own_operator(func, args, kwargs)
        out = None if name in _NOT_CALLED else func(*args, **kwargs)
        if func.namespace not in ("prim", "profiler"):
            inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(out))
            options = _options(name, args, kwargs, inputs, outputs)
            self.add(f"{func.namespace}.{name}.{func._overloadname or 'default'}", inputs, outputs, options)
            self.values.follow(name, args, out)
        return out

    def _faked(self, value: Any) -> Any:
        """Make real tensors among arguments fake."""
        if isinstance(value, FakeTensor):
            return value
        if isinstance(value, torch.Tensor):
            fake = self.fakes.from_tensor(value)
            if value.device.type == "cpu" and (value.numel() == 1 or not value.dtype.is_floating_point):
                with unset_fake_temporarily():
                    self.values.learn(fake, mean=float(value.float().mean()) if value.numel() else 0.0)
            return fake
        if isinstance(value, list | tuple) and any(True for _ in tensors_in(value)):
            return type(value)(map(self._faked, value))
        return {k: self._faked(v) for k, v in value.items()} if isinstance(value, dict) else value

    def _leave_out_propagation(self) -> None:
        """Do not record the operators by which DTensor learns the shapes of results."""
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
        to_local, from_local = (_marked(self, f"dtensor.{f.__name__}", f) for f in (api.to_local, api.from_local))
        same_fakes = (module, "FakeTensorMode", lambda: self.fakes)  # torch 2.8 makes others, which must not mix
        marked = [(api, "to_local", to_local), (api, "from_local", staticmethod(from_local))]
        self.later.enter_context(replaced([(propagator, propagate.__name__, paused), same_fakes, *marked]))

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record kernels of Triton in code that torch.compile leaves to Python, and draw random numbers of DTensors
        without the offsets of a generator.
        """
        if func.name().startswith("triton_kernel_wrapper"):
            table = import_module("torch._higher_order_ops.triton_kernel_wrap").kernel_side_table
            kernels.record_launch(self, table.get_kernel(kwargs["kernel_idx"]), list(kwargs["kwargs"].values()))
        if func.name() == "run_dtensor_rng_op":
            position = next(index for index, arg in enumerate(args) if isinstance(arg, torch._ops.OpOverload))
            with self:
                return args[position](*args[position + 1 :], **kwargs)
        return func(*args, **kwargs)

    def _own_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record what the implementation of another library's operator runs, or what it reads and writes."""
        implementation = kernels.implementation_of(func)
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
        inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(out))
        self.add(f"{func.namespace}.{func._opname}.default", inputs, outputs, (UNSEEN,))
        return out

    def add(
        self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], options: tuple[str, ...] = ()
    ) -> int:
        """Record an operator on the current stream, and return its mark, for which other streams can wait."""
        if self._is_unseen:
            return -1
        if not any(map(_on_gpu, (*outputs, *inputs))):
            return self.on_host(name)
        place = self.modules.current()
        allocates = self._hold(outputs, place)
        if name == "aten._softmax_backward_data.default":  # the CUDA kernel multiplies its operands first
            self.ledger.touch(outputs[0].untyped_storage().nbytes())
        options = self.regions.marked(options)
        op = Op(name, _info(inputs), _info(outputs), self.phase, place, allocates, options)
        mark = self._append(op, self.stream)
        if "waits" in options:
            self.wait_on_host(_WAIT, [mark])
        return mark

    def on_host(self, name: str) -> int:
        """Record something that takes host time only."""
        if not self._is_unseen:
            self.ops.append(Op(name, (), (), self.phase, options=("cpu",)))
            self.ledger.time = len(self.ops)
        return -1

    def _hold(self, tensors: list[torch.Tensor], place: str) -> bool:
        """Count the memory of tensors, and return whether any of it is new."""
        new = [self.ledger.hold(tensor, place) for tensor in tensors if _on_gpu(tensor)]
        return any(new)

    def _append(self, op: Op, stream: int) -> int:
        waits = self._waits.pop(stream, set())
        mark = self._first + len(self.ops)
        self.ops.append(op._replace(stream=stream, after=self._places(waits)))
        self.ledger.time = len(self.ops)
        self._last[stream] = mark
        return mark

    def _places(self, marks: set[int]) -> tuple[int, ...]:
        """The places in this step of operators by their marks."""
        return tuple(sorted(mark - self._first for mark in marks if mark >= self._first))

    @property
    def phase(self) -> str:
        if self.in_optimizer:
            return "optimizer"
        return "forward" if is_forward() else "backward"

    @property
    def _is_unseen(self) -> bool:
        """Whether operators are not the step's: recording is paused, or torch.compile traces a graph."""
        return self.paused_depth > 0 or torch._guards.TracingContext.try_get() is not None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run operators without recording them or counting their memory."""
        self.paused_depth += 1
        try:
            yield
        finally:
            self.paused_depth -= 1

    # ------------------------------------------------------------------ streams and memory
    def mark(self, stream: int) -> int:
        return self._last.get(stream, -1)

    def marks(self) -> list[int]:
        return list(self._last.values())

    def wait_for(self, stream: int, mark: int) -> None:
        if mark >= self._first and mark != self._last.get(stream):
            self._waits.setdefault(stream, set()).add(mark)

    def wait_on_host(self, what: str, marks: list[int]) -> None:
        self.ops.append(Op(what, (), (), self.phase, after=self._places(set(marks))))

    def memory(self) -> tuple[int, int]:
        return self.ledger.total, self.ledger.most

    def restart_peak(self) -> None:
        self.ledger.most = self.ledger.total

    # ------------------------------------------------------------------ collectives
    def _run_collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._collectives is None:
            from lumos.dry_run.collective_ops import Collectives  # it imports torch.distributed

            self._collectives = Collectives(self)
        return self._collectives.run(func, args, kwargs)

    def collective(self, call: CollectiveCall) -> int:
        """Record a collective: it waits for the current stream, and runs on the stream of its group."""
        self.values.exchange(call.kind, call.inputs, call.outputs)
        if self.peers_are_faked:
            return self._fake_collective(call)
        place = self.modules.current()
        stream = self._groups.setdefault(call.group, COLLECTIVES - len(self._groups))
        self._hold(call.outputs, place)
        self.wait_for(stream, self.mark(self.stream))
        op = Op(call.kind, _info(call.inputs), _info(call.outputs), self.phase, place, ranks=call.group)
        return self._append(op, stream)

    def _fake_collective(self, call: CollectiveCall) -> int:
        """Record what torch's fake process group runs: its all-gathers copy the input to the place of every rank."""
        self.on_host(f"c10d.{call.kind}")
        if call.kind == "all_gather" and call.outputs:
            self._hold(call.outputs, self.modules.current())
            source = min(call.inputs, key=lambda tensor: tensor.numel())
            for _ in call.group:
                self.add("aten.copy_.default", [source, source], [source])
        return self.mark(self.stream)

    # ------------------------------------------------------------------ values
    def methods(self) -> Iterator[Replacement]:
        """Methods of tensors that read values, or ask for memory of the host."""

        def tolist(tensor: torch.Tensor) -> Any:
            if _on_gpu(tensor):
                self.wait_on_host(_WAIT, [self.add("aten._to_copy.default", [tensor], [])])
            return self.values.all_of(tensor)

        def array(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
            import numpy as np

            return np.array(tolist(tensor)).reshape(tuple(tensor.shape))

        def formatted(tensor: torch.Tensor, form: str) -> str:
            return format(tensor.item(), form) if tensor.dim() == 0 else format(str(tensor), form)

        of_fakes: dict[str, Any] = {"tolist": tolist, "numpy": array, "__array__": array, "__format__": formatted}
        of_all = {
            "pin_memory": lambda tensor, *_, **__: tensor, "share_memory_": lambda tensor, *_, **__: tensor,
            "is_pinned": lambda tensor, *_, **__: not _on_gpu(tensor), "record_stream": lambda *_: None,
            "data_ptr": lambda tensor: Address(self.ledger.id_of(tensor), tensor), "__dlpack__": refused(ADDRESS),
            "__cuda_array_interface__": property(refused(ADDRESS)),
        }  # fmt: skip
        chosen = {name: _if_fake(getattr(torch.Tensor, name), method) for name, method in of_fakes.items()}
        yield from ((torch.Tensor, name, method) for name, method in (chosen | of_all).items())


def _if_fake(plain: Callable[..., Any], of_fake: Callable[..., Any]) -> Callable[..., Any]:
    def method(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        return (of_fake if isinstance(tensor, FakeTensor) else plain)(tensor, *args, **options)

    return method


def _options(name: str, args: Any, kwargs: Any, inputs: list[Any], outputs: list[Any]) -> tuple[str, ...]:
    """Options that the cost of an operator depends on besides its operands."""
    options = []
    if name.startswith("index_put") and (args[3:4] or [kwargs.get("accumulate")])[0]:
        options.append("accumulate")
    if name in _MATMULS and inputs[0].dtype == torch.float32 and matmuls_use_tf32():
        options.append("tf32")
    if name.startswith("convolution"):
        if name == "convolution_backward":
            options.append("mask=" + "".join(str(int(wanted)) for wanted in args[-1]))
        options += ["transposed"] * bool(args[7 if name == "convolution_backward" else 6])
    if name in _ALONG and len(args) > _ALONG[name] and isinstance(args[_ALONG[name]], int):
        options.append(f"dim={args[_ALONG[name]] % max(inputs[0].dim(), 1)}")
    if name == "topk":
        options.append(f"k={args[1]}")
    if "pool2d" in name:
        options += [f"kernel={size}" for size in next((a for a in args if isinstance(a, list)), [])[:1]]
    is_copy = name in ("_to_copy", "copy_") and inputs and outputs
    if is_copy and _on_gpu(inputs[-1]) != _on_gpu(outputs[0]):  # the host waits, unless the script asks it not to and
        is_free = bool(kwargs.get("non_blocking")) or args[2:3] == (True,)  # its memory is pinned, as is assumed
        options += ["d2h" if _on_gpu(inputs[-1]) else "h2d", "pinned" if is_free else "waits"]
    return tuple(options)


class Address:
    """The address of a fake tensor, which distinguishes tensors and is good for nothing else."""

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


# ---------------------------------------------------------------------- what is replaced in torch
@contextmanager
def recorded(
    gpu: str = "NVIDIA H100 80GB HBM3", memory_gib: float = 80.0, capability: tuple[int, int] = (9, 0), gpus: int = 8
) -> Iterator[Recorder]:
    """While this lasts, everything runs on fake tensors and a fake GPU, and is recorded."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(fakes)
    with (
        recorder.later,
        fakes,  # before the GPU is faked: it asks for GPUs itself
        fake_gpu(recorder, gpu, round(memory_gib * 2**30), capability, gpus),
        recorder.modules.followed(),
        replaced(_replacements(recorder)),
        recorder,
    ):
        yield recorder


def _replacements(recorder: Recorder) -> Iterator[Replacement]:
    checkpoint = torch.utils.checkpoint
    yield from recorder.methods()
    yield from _storages_resized(recorder.ledger)
    yield checkpoint, "checkpoint", _marked(recorder, "python.checkpoint", checkpoint.checkpoint)
    yield torch.nn.Parameter, "__new__", staticmethod(_fake_parameter(recorder))
    yield torch, "tensor", _without_pinning(torch.tensor)
    yield from functions_as_on_gpu(recorder, recorder.values)
    yield from kernels.triton_launches(recorder)


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


def _storages_resized(ledger: MemoryLedger) -> Iterator[Replacement]:
    """FSDP frees and allocates parameters by giving their storages another size."""
    resize, address = torch.UntypedStorage.resize_, torch.UntypedStorage.data_ptr

    @functools.wraps(resize)
    def resize_(storage: Any, size: int) -> Any:
        resized = resize(storage, size)
        ledger.resize(storage)
        return resized

    yield torch.UntypedStorage, "resize_", resize_
    # Addresses distinguish storages.
    yield torch.UntypedStorage, "data_ptr", lambda s: int(s._cdata if s.device.type == "meta" else address(s))


def _marked(recorder: Recorder, name: str, function: Any) -> Any:
    """A Python function that takes host time besides the operators that it runs."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        recorder.on_host(name)
        return function(*args, **kwargs)

    return marked


# ---------------------------------------------------------------------- steps of training
class StepCounter:
    """Follows the optimizer of a training loop, whose step ends a step of training."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.ended = recorder, 0
        self.roles: dict[int, str] = {}
        self.trained: dict[int, torch.Tensor] = {}  # by identity: several optimizers may have the same

    def begin(self, optimizer: Any) -> None:
        """Before an optimizer steps: note what it trains, and the gradients."""
        self.recorder.in_optimizer = True
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        self.trained |= {id(p): p for p in trained}
        self._note(trained, "weights")
        self._note([p.grad for p in trained if p.grad is not None], "gradients")

    def end(self, optimizer: Any, ends_step: bool = True) -> None:
        """After an optimizer has stepped: note its state. One of several optimizers ends the step of training."""
        self.recorder.in_optimizer = False
        self._note([t for state in optimizer.state.values() for t in tensors_in(state)], "optimizer")
        self.ended += ends_step

    def _note(self, tensors: list[Any], role: str) -> None:
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            with suppress(RuntimeError, NotImplementedError):  # tensors without a storage
                self.roles[self.recorder.ledger.id_of(local)] = role

    def recording(self, tokens: int = 0, microbatches: int = 1, rank: int = 0, world: int = 1) -> Recording:
        """The step that has just ended."""
        recorder, ledger = self.recorder, self.recorder.ledger
        models = list(recorder.modules.roots.values())
        parameters = {id(p): p for model in models for p in model.parameters()}
        for model in models:
            self._note([*model.parameters(), *model.buffers()], "weights")
        known = {event[1] for event in ledger.events} | set(recorder.alive)
        return Recording(
            list(recorder.ops),
            sum(p.numel() for p in (parameters | self.trained).values()),
            sum(p.numel() for p in self.trained.values()),
            tokens,
            recorder.alive,
            [StorageEvent(*event) for event in ledger.events],
            {storage: role for storage, role in self.roles.items() if storage in known},
            {storage: place for storage, place in ledger.places.items() if place and storage in known},
            ledger.most,
            rank,
            world,
            microbatches,
            [*recorder.notes, *([ASSUMED] if recorder.values.asked else [])],
            {"torch": torch.__version__},
        )


Build = Callable[[], tuple[torch.nn.Module, Callable[[], torch.Tensor], int]]


def record_step(build: Build, optimizer: str = "adamw", microbatches: int = 1, compiles: bool = False) -> Recording:
    """Run two steps of a model that `build` makes, and record the second.

    `build` returns the model, a function that runs a forward pass and returns the loss, and the tokens (or samples) of
    one micro-batch. The first step makes the optimizer's state. `compiles` runs the model by torch.compile.
    """
    with recorded() as recorder, compiled_as_kernels(recorder), torch.device("cuda"):
        with recorder.paused():
            model, loss_of, tokens = build()
        if compiles:
            model.compile()
        for tensor in (*model.parameters(), *model.buffers()):
            recorder.ledger.hold(tensor)
        update = _optimizer(optimizer, [parameter for parameter in model.parameters() if parameter.requires_grad])
        counter = StepCounter(recorder)
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
