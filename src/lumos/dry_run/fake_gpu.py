"""A GPU that is not there: `torch.cuda` answers, streams and events are written down, and fake tensors live on "cuda".

Works with every build of torch. One without CUDA has no device guard for it, which tensors and autograd ask for; one
that does nothing is put in its place.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from lumos.dry_run.operator_log import OperatorLog

_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"  # at::detail::getCUDAHooks()
_ACCELERATOR = "_ZN2at11accelerator14getAcceleratorEb"  # at::accelerator::getAccelerator(bool)
_TIMERS = "_ZN4c10d13TimerRegistryEv"  # c10d::TimerRegistry()
_FOUND = 0x101  # what it returns: there is one, and it is CUDA
_CUDA, _DEVICE_TYPES = 1, 20  # the index of CUDA among device types, and how many there are at least
_NO_DEVICE = 127
_SLOTS, _HOOK_SLOTS, _HIDDEN = 32, 96, 2  # virtual functions of guards and hooks at most; entries before the first
DEFAULT_STREAM = 0
Replacement = tuple[Any, str, Any]  # owner, attribute, value
ADDRESS = "it passes the address of a tensor, which has no memory here, to code outside of PyTorch"


class _Owned:
    """The log that the classes below share; set while a GPU is faked."""

    log: OperatorLog
    streams = 0


class Stream:
    """A CUDA stream, by number."""

    device_type, device_index, priority = 1, 0, 0

    def __init__(self, device: Any = None, priority: int = 0, **given: Any) -> None:
        number = given.get("stream_id")
        if number is None:
            _Owned.streams += 1
            number = _Owned.streams
        self.stream_id = self.cuda_stream = number
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other: Any) -> None:
        _Owned.log.wait_for(self.stream_id, _Owned.log.mark(other.stream_id))

    def wait_event(self, event: Any) -> None:
        _Owned.log.wait_for(self.stream_id, event.mark)

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        _Owned.log.wait_on_host("cudaStreamSynchronize", [_Owned.log.mark(self.stream_id)])

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        self._before, _Owned.log.stream = _Owned.log.stream, self.stream_id
        return self

    def __exit__(self, *_: object) -> None:
        _Owned.log.stream = self._before

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)


class Event:
    """A CUDA event: a position in its stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.mark = -1

    def record(self, stream: Any = None) -> Event:
        self.mark = _Owned.log.mark(_Owned.log.stream if stream is None else stream.stream_id)
        return self

    def wait(self, stream: Any = None) -> None:
        _Owned.log.wait_for(_Owned.log.stream if stream is None else stream.stream_id, self.mark)

    def synchronize(self) -> None:
        _Owned.log.wait_on_host("cudaEventSynchronize", [self.mark])

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        """A millisecond, because nothing is timed and scripts divide by it."""
        return 1.0


class _StreamContext:
    """The result of `torch.cuda.stream(s)`; it does nothing for None."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._entered = contextlib.nullcontext() if stream is None else stream

    def __enter__(self) -> None:
        self._entered.__enter__()

    def __exit__(self, *_: object) -> None:
        self._entered.__exit__(*_)


class _Generator(torch.Generator):  # type: ignore[misc]
    """A generator for any device: a build without CUDA refuses those of GPUs."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls)


def install_device() -> None:
    """Make tensors and autograd accept "cuda" on a machine, or with a build of torch, that has no such device."""
    if not torch.cuda.is_available() and not _KEPT:
        _install_guard()
        _answer_for_hooks()
        _leave_out_timers()
        _keep_whole("silu_backward", "mish_backward", "_fused_rms_norm")


def _keep_whole(*operators: str) -> None:
    """Keep operators whole that a build without CUDA takes apart, because it lacks the kernel of a GPU."""
    library = torch.library.Library("aten", "IMPL")
    for name in operators:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            library.impl(name, _nothing, "CUDA")  # fake tensors never call it
    _KEPT.append(library)


def _is_accelerator() -> bool:
    """Whether C++ regards CUDA as the accelerator of this machine."""
    ask = getattr(_library("torch_cpu"), _ACCELERATOR)
    ask.restype, ask.argtypes = ctypes.c_uint16, [ctypes.c_bool]
    return int(ask(False)) == _FOUND


def _install_guard() -> None:
    """Install a device guard that does nothing.

    torch replaces the guard of a CUDA build that finds no GPU by such a one (`ensureCUDADeviceGuardSet`). A build
    without CUDA has no guard to replace, so one that counts no GPU is registered for the moment of that call.
    """
    registry = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(_library("c10"), _REGISTRY)
    if not _SETS_GUARD:
        functions = (ctypes.c_void_p * _SLOTS)(*[_address(_FIRST)] * _SLOTS)
        guard = (ctypes.c_void_p * 1)(ctypes.addressof(functions))
        atexit.register(registry.__setitem__, _CUDA, registry[_CUDA])  # C++ must not call into a Python that is gone
        registry[_CUDA] = ctypes.addressof(guard)
        _KEPT.extend((functions, guard))
    elif not registry[_CUDA]:
        functions = (ctypes.c_void_p * _SLOTS)(*[_address(_NO)] * _SLOTS)
        guard = (ctypes.c_void_p * 1)(ctypes.addressof(functions))
        registry[_CUDA] = ctypes.addressof(guard)
        torch._C._ensureCUDADeviceGuardSet()
        if registry[_CUDA] == ctypes.addressof(guard):
            registry[_CUDA] = None
            raise RuntimeError("this build of torch takes no device guard")
    else:
        torch._C._ensureCUDADeviceGuardSet()


def _answer_for_hooks() -> None:
    """Answer autograd, which asks the hooks of CUDA whether it is built in, and whether a device is in use.

    The hooks get a copy of their table of virtual functions, in which `isBuilt` says yes and `hasPrimaryContext` no.
    The first is found by trying which one decides what the accelerator is, as no other is called by that question; the
    second comes two places after it (ATen/detail/AcceleratorHooksInterface.h).
    """
    get_hooks = getattr(_library("torch_cpu"), _HOOKS)
    get_hooks.restype = ctypes.c_void_p
    hooks = (ctypes.c_void_p * 1).from_address(get_hooks())
    before, word = hooks[0] or 0, ctypes.sizeof(ctypes.c_void_p)
    table = (ctypes.c_void_p * (_HIDDEN + _HOOK_SLOTS)).from_address(before - _HIDDEN * word)
    is_built = _is_accelerator()
    for slot in range(_HIDDEN, _HIDDEN + _HOOK_SLOTS - 2):
        copy = type(table)(*table)
        copy[slot] = _address(_NO if is_built else _YES)
        hooks[0] = ctypes.addressof(copy) + _HIDDEN * word
        if _is_accelerator() != is_built:
            copy[slot], copy[slot + 2] = _address(_YES), _address(_NO)
            _KEPT.append(copy)
            atexit.register(hooks.__setitem__, 0, before)  # C++ must not call into a Python that is gone
            return
        hooks[0] = before
    raise RuntimeError("this build of torch does not take a GPU that is not there")


def _leave_out_timers() -> None:
    """Remove the timer of a CUDA build, which times DistributedDataParallel with CUDA events."""
    get_registry = getattr(_library("torch_cpu"), _TIMERS, None)
    if get_registry is not None:  # built with torch.distributed
        get_registry.restype = ctypes.c_void_p
        for key in _keys_of_map(get_registry()):
            if key.value == _CUDA:
                key.value = _NO_DEVICE  # nothing is found for CUDA then


def _keys_of_map(address: int) -> Iterator[ctypes.c_int8]:
    """The keys of a `std::unordered_map` by type of device.

    It begins with the address of its buckets, their number, its first node and its size; a node begins with the address
    of the next one and its key.
    """
    _, _, node, size = (ctypes.c_void_p * 4).from_address(address)
    for _ in range(size or 0):
        if not node:
            raise RuntimeError("this build of torch keeps its timers otherwise")
        yield ctypes.c_int8.from_address(node + ctypes.sizeof(ctypes.c_void_p))
        node = ctypes.c_void_p.from_address(node).value


_NO = ctypes.CFUNCTYPE(ctypes.c_int8)(lambda: 0)
_YES = ctypes.CFUNCTYPE(ctypes.c_int8)(lambda: 1)
_FIRST = ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: _CUDA)  # CUDA as a type, its first device, its default stream, one
_KEPT: list[Any] = []  # what C++ points to
_SETS_GUARD = hasattr(torch._C, "_ensureCUDADeviceGuardSet")  # since torch 2.9


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


def _library(name: str) -> ctypes.CDLL:
    suffix = "dylib" if os.uname().sysname == "Darwin" else "so"
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}.{suffix}"))


@contextlib.contextmanager
def fake_gpu(log: OperatorLog, name: str, memory_bytes: int, capability: tuple[int, int], count: int) -> Iterator[None]:
    """While this lasts, this process has `count` GPUs of that name, and runs on the first."""
    install_device()
    _Owned.log = log
    with replaced(_Gpu(log, name, memory_bytes, (capability[0], capability[1]), count).replacements()):
        yield


@contextlib.contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Replace attributes of modules and classes while this lasts."""
    with contextlib.ExitStack() as undo:
        for owner, attribute, value in replacements:
            if attribute in vars(owner):
                undo.callback(setattr, owner, attribute, vars(owner)[attribute])
            else:  # inherited, or new
                undo.callback(delattr, owner, attribute)
            setattr(owner, attribute, value)
        yield


_CONSTANT: dict[str, Any] = {  # answers of `torch.cuda`, whatever the arguments
    "is_available": True, "is_initialized": True, "is_bf16_supported": True, "is_tf32_supported": True,
    "can_device_access_peer": True, "_check_bf16_tensor_supported": True, "utilization": 100, "memory_usage": 50,
    "temperature": 50, "power_draw": 500_000, "clock_rate": 1500, "is_current_stream_capturing": False,
    "memory_summary": "a dry run", "initial_seed": 0,
}  # fmt: skip
_IDLE = (  # functions of `torch.cuda` that do nothing
    "init", "_lazy_init", "_lazy_call", "_sleep", "empty_cache", "ipc_collect", "set_per_process_memory_fraction",
    "manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all",
)  # fmt: skip


@dataclass
class _Gpu:
    """The answers of `torch.cuda` and its neighbours; each method yields replacements of one kind."""

    log: OperatorLog
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    count: int
    index: int = 0  # of the current device

    def replacements(self) -> Iterator[Replacement]:
        """Everything that is replaced."""
        cuda = torch.cuda
        constant = {name: _always(value) for name, value in _CONSTANT.items()} | dict.fromkeys(_IDLE, _nothing)
        for attribute, answer in (constant | self._devices_and_streams() | self._memory_and_seeds()).items():
            value = _own(answer)
            for owner in (cuda, cuda.memory, cuda.random):
                if owner is cuda or hasattr(owner, attribute):
                    yield owner, attribute, value
        for attribute, kind in (("Stream", Stream), ("Event", Event), ("StreamContext", _StreamContext)):
            yield cuda, attribute, kind
        for attribute in ("range_push", "range_pop", "mark", "range_start", "range_end"):
            yield cuda.nvtx, attribute, _own(_nothing)
        for attribute in ("_record_memory_history", "_dump_snapshot"):
            yield cuda.memory, attribute, _own(_nothing)
        yield from self._around()
        yield from self._accelerator()
        yield from _refusals()
        yield from _tensors_and_lists()

    def _devices_and_streams(self) -> dict[str, Callable[..., Any]]:
        major, minor = self.capability
        properties = SimpleNamespace(
            name=self.name, major=major, minor=minor, total_memory=self.memory_bytes, multi_processor_count=132,
            warp_size=32, max_threads_per_multi_processor=2048, L2_cache_size=50 << 20, is_integrated=0,
            is_multi_gpu_board=0, regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448, gcnArchName="",
            uuid="GPU-dry-run", pci_bus_id=0,
        )  # fmt: skip
        return {
            "device_count": lambda: self.count, "current_device": lambda: self.index, "set_device": self.set_device,
            "_exchange_device": self.exchange_device, "_maybe_exchange_device": self.exchange_device,
            "_get_device": torch.device, "get_device_name": lambda _=None: self.name,
            "get_device_capability": lambda _=None: (major, minor), "get_arch_list": lambda: [f"sm_{major}{minor}"],
            "get_device_properties": lambda _=None: properties, "cudart": _Cudart, "stream": _StreamContext,
            "synchronize": self.synchronize, "current_stream": self.current_stream,
            "default_stream": lambda _=None: Stream(stream_id=DEFAULT_STREAM),
            "set_stream": lambda stream: setattr(self.log, "stream", stream.stream_id),
        }  # fmt: skip

    def exchange_device(self, which: int) -> int:
        before, self.index = self.index, self.index if which < 0 else which
        return before

    def set_device(self, which: Any) -> None:
        index = which if isinstance(which, int) else torch.device(which).index
        self.exchange_device(-1 if index is None else index)

    def current_stream(self, _: Any = None) -> Stream:
        return Stream(stream_id=self.log.stream)

    def synchronize(self, _: Any = None) -> None:
        self.log.wait_on_host("cudaDeviceSynchronize", self.log.marks())

    def _memory_and_seeds(self) -> dict[str, Callable[..., Any]]:
        log, at_most = self.log, ("max_memory_allocated", "memory_reserved", "max_memory_reserved")
        return dict.fromkeys(at_most, lambda _=None: log.memory()[1]) | {
            "memory_allocated": lambda _=None: log.memory()[0], "memory_stats": lambda _=None: _stats(log),
            "reset_peak_memory_stats": lambda _=None: log.restart_peak(),
            "reset_max_memory_allocated": lambda _=None: log.restart_peak(),
            "mem_get_info": lambda _=None: (self.memory_bytes - log.memory()[0], self.memory_bytes),
            "memory_snapshot": list, "get_rng_state_all": list,
            "get_rng_state": lambda _=None: torch.empty(16, dtype=torch.uint8),
        }  # fmt: skip

    def _around(self) -> Iterator[Replacement]:
        """Versions, back ends and classes outside `torch.cuda`."""
        yield torch.version, "cuda", torch.version.cuda or "12.8"  # extensions compare it with their own
        yield torch.backends.cuda, "is_built", lambda: True
        yield torch.jit._state._enabled, "enabled", False  # TorchScript cannot compile what we replace
        for name in ("_cuda_CUDAAllocator_AllocatorState", "_set_cached_tensors_enabled"):  # of a CUDA build: imported
            if not hasattr(torch._C, name):  # by torch.compiler.reset()
                yield torch._C, name, _nothing
        yield torch.backends.cudnn, "is_available", lambda: True
        yield torch.backends.cudnn, "is_acceptable", lambda _: False  # flattened weights are views: nothing changes
        yield torch.backends.cudnn, "version", lambda: 91002
        yield torch.backends.mha, "get_fastpath_enabled", lambda: False  # fused evaluation knows no fake tensors
        yield torch.compiler, "cudagraph_mark_step_begin", _own(_nothing)
        yield torch, "Generator", _Generator
        yield torch, "Event", Event
        yield torch._C, "_get_accelerator", lambda *_: torch.device("cuda")
        if not _SETS_GUARD:  # the choice asks the driver for the GPU's properties
            yield torch._C, "_select_conv_backend", lambda *_, **__: torch._C._ConvBackend.Cudnn

    def _accelerator(self) -> Iterator[Replacement]:
        accelerator = getattr(torch, "accelerator", None)
        if accelerator is None:
            return
        answers: dict[str, Any] = {
            "is_available": lambda: True, "device_count": lambda: self.count, "synchronize": self.synchronize,
            "current_accelerator": lambda *_, **__: torch.device("cuda"), "current_stream": self.current_stream,
            "current_device_index": lambda: self.index, "current_device_idx": lambda: self.index,
            "set_device_index": self.set_device, "set_device_idx": self.set_device,
        }  # fmt: skip
        yield from ((accelerator, attribute, _own(answer)) for attribute, answer in answers.items())


def _refusals() -> Iterator[Replacement]:
    """Functions that a dry run cannot imitate."""
    yield torch.cuda, "make_graphed_callables", refused("CUDA graphs are not recorded")
    for attribute in ("CUDAGraph", "graph"):
        yield torch.cuda, attribute, _refused_class("CUDA graphs are not recorded")
    for owner, attribute in ((torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack"), (torch._C, "_to_dlpack")):
        if hasattr(owner, attribute):
            yield owner, attribute, refused(ADDRESS)


def _tensors_and_lists() -> Iterator[Replacement]:
    """Fake tensors are moved like real ones, and are among the types whose loops are fused."""
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        owner = sys.modules[module]
        yield owner, "_foreach_supported_types", [*owner._foreach_supported_types, FakeTensor]
    swap = _move_parameter(torch.utils.swap_tensors)
    yield torch.utils, "swap_tensors", swap
    yield torch.Tensor, "data", _data(swap)
    yield fake_tensor, "init_gpu_context", _nothing  # it makes a real tensor


def _nothing(*_: Any, **__: Any) -> None: ...


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


class NotInDryRunError(NotImplementedError):
    """A script asks for something that fake tensors and a fake GPU cannot do; the text names it."""


def refused(reason: str) -> Callable[..., Any]:
    """A function that a dry run cannot imitate."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotInDryRunError(reason)

    return refuse


def _refused_class(reason: str) -> Any:
    return type("NotInDryRun", (), {"__init__": refused(reason)})


class _Cudart:
    """The CUDA runtime: all its functions succeed, and do nothing."""

    def __getattr__(self, _: str) -> Callable[..., int]:
        return _always(0)


def _own(answer: Callable[..., Any]) -> Callable[..., Any]:
    """A separate function for every name: dynamo keeps a rule for every function of torch."""

    def answered(*args: Any, **kwargs: Any) -> Any:
        return answer(*args, **kwargs)

    return answered


def _stats(log: OperatorLog) -> dict[str, int]:
    now, most = log.memory()
    kinds = {"current": now, "peak": most, "allocated": most, "freed": most - now}
    places = ("allocated_bytes", "reserved_bytes", "active_bytes")
    stats = {f"{place}.all.{kind}": value for place in places for kind, value in kinds.items()}
    return stats | {"num_alloc_retries": 0, "num_ooms": 0}


def _move_parameter(swap: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Move fake parameters for `module.to("cuda")`, whose swap fails for those that are referred to weakly.

    A plain one gets the data of the other instead, as a real parameter does.
    """

    def swap_tensors(kept: Any, moved: Any) -> None:
        if not (isinstance(kept, FakeTensor) and isinstance(moved, FakeTensor)):
            swap(kept, moved)
            return
        if kept.device.type == "meta" or moved.device.type == "meta":
            torch._C._swap_tensor_impl(kept, moved)
        else:
            kept.data = moved
        kept.fake_device = moved.fake_device

    return swap_tensors


def _data(swap: Callable[[Any, Any], None]) -> property:
    """`tensor.data = other`: a fake tensor gets the device of the other, and a real one becomes fake, too."""
    plain = torch._C.TensorBase.data

    def give(tensor: Any, value: Any) -> None:
        if isinstance(value, FakeTensor) and not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu":
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            alias = value.detach()
            swap(tensor, torch.nn.Parameter(alias, tensor.requires_grad) if is_parameter else alias)
            return
        plain.__set__(tensor, value)
        if isinstance(tensor, FakeTensor) and isinstance(value, FakeTensor):
            tensor.fake_device = value.fake_device

    return property(lambda tensor: plain.__get__(tensor), give)
