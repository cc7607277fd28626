"""OperatorLog: what the imitation of torch writes down, and what a recorder tracks besides operators.

`MemoryLedger` tracks storages, `ModulePaths` modules, and `CompiledRegions` eager code in place of compiled code.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.modules import module as torch_module

from lumos.program.op import UNCOMPILED

_BLOCK = 512  # bytes that the caching allocator rounds to


class CollectiveCall(NamedTuple):
    """One call of a collective."""

    kind: str  # all_reduce, all_gather, …
    group: tuple[int, ...]  # ranks
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


class OperatorLog(Protocol):
    """The log to which kernels, collectives, streams and waits are written (`record.Recorder`)."""

    stream: int  # the current one
    notes: dict[str, None]  # assumptions, each once
    regions: CompiledRegions

    def add(self, name: str, inputs: list[Any], outputs: list[Any], options: tuple[str, ...] = ()) -> int: ...
    def on_host(self, name: str) -> int: ...
    def collective(self, call: CollectiveCall) -> int: ...
    def paused(self) -> AbstractContextManager[None]: ...
    def mark(self, stream: int) -> int: ...
    def marks(self) -> list[int]: ...
    def wait_for(self, stream: int, mark: int) -> None: ...
    def wait_on_host(self, what: str, marks: list[int]) -> None: ...
    def memory(self) -> tuple[int, int]: ...
    def restart_peak(self) -> None: ...


def is_forward() -> bool:
    """Whether no backward pass is running."""
    return bool(torch._C._current_graph_task_id() == -1)


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage while it exists."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments or results; sparse ones are known by what they are made of."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


class MemoryLedger:
    """GPU storages as PyTorch's caching allocator counts them: bytes now, their peak, and changes since `restart`."""

    def __init__(self, forget: Callable[[int], None]) -> None:
        self.ids: dict[int, tuple[int, int]] = {}  # id and bytes of every storage that exists
        self.total = self.most = 0  # bytes now, and their maximum
        self.events: list[tuple[int, int, int]] = []  # (operators before it, id, bytes; negative when released)
        self.places: dict[int, str] = {}  # the module that allocated an id
        self.time = 0  # operators so far
        self._forget, self._next = forget, 0

    def hold(self, tensor: torch.Tensor, place: str = "") -> bool:
        """Count a tensor's storage, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.ids:
            return False
        number, size = self._new_id(), _rounded(storage.nbytes())
        self.ids[key] = (number, size)
        self.places[number] = place
        self._change(number, size)
        weakref.finalize(storage, self._release, key)
        return True

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Count a storage whose size has changed: FSDP frees parameters this way."""
        number, before = self.ids.get(storage._cdata, (0, 0))
        size = _rounded(storage.nbytes())
        if number and size != before:
            self.ids[storage._cdata] = (number, size)
            self._change(number, size - before)

    def touch(self, size: int) -> None:
        """Count a temporary buffer that an operator frees when it ends."""
        number, size = self._new_id(), _rounded(size)
        self._change(number, size)
        self._change(number, -size)

    def id_of(self, tensor: torch.Tensor) -> int:
        return self.ids.get(tensor.untyped_storage()._cdata, (0, 0))[0]

    def restart(self) -> dict[int, int]:
        """Forget all events, and return the bytes that exist by id."""
        self.events.clear()
        self.time = 0
        return dict(self.ids.values())

    def _new_id(self) -> int:
        self._next += 1
        return self._next

    def _change(self, number: int, size: int) -> None:
        self.events.append((self.time, number, size))
        self.total += size
        self.most = max(self.most, self.total)

    def _release(self, key: int) -> None:
        number, size = self.ids.pop(key, (0, 0))
        self._forget(key)
        if number:
            self._change(number, -size)


def _rounded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


class ModulePaths:
    """The module of the model that runs, by hooks on all modules; in the backward pass, the one of the forward pass."""

    def __init__(self, entered: Callable[[Any], object], met: Callable[[Any], object]) -> None:
        self.entered, self.met = entered, met  # called with every module that runs, and with every new model
        self.names: dict[int, str] = {}
        self.running: list[str] = []
        self.roots: dict[int, Any] = {}
        self.by_sequence: dict[int, str] = {}
        self._not_entered: set[int] = set()

    def enter(self, module: Any, _: Any) -> None:
        if not self.running and id(module) not in self.names:
            self.met(module)
            self.roots[id(module)] = module
            parts = {id(part): name for name, part in module.named_modules()}
            self.names |= parts
            self._not_entered |= parts.keys()
        self.running.append(self.names.get(id(module), ""))
        self._not_entered.discard(id(module))
        self.entered(module)

    def leave(self, *_: Any) -> None:
        if self.running:
            self.running.pop()

    def share_entered(self) -> float:
        """The share of all modules that have run at least once."""
        return max(1.0 - len(self._not_entered) / max(len(self.names), 1), 1e-3)

    def current(self) -> str:
        """The path of the module that runs, or whose operator is differentiated."""
        path = self.running[-1] if self.running else ""
        if is_forward():
            if path:
                self.by_sequence[torch._C._autograd._get_sequence_nr()] = path
            return path
        if self.running:  # recomputed
            return path
        node = torch._C._current_autograd_node()
        return self.by_sequence.get(node._sequence_nr(), "") if node is not None else ""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow all modules while this lasts."""
        enter, leave = torch_module.register_module_forward_pre_hook, torch_module.register_module_forward_hook
        with enter(self.enter), leave(self.leave, always_call=True):
            yield


class CompiledRegions:
    """Operators that run eagerly in place of compiled code: which they are, also in the backward pass."""

    def __init__(self) -> None:
        self.gives_up_frames = False  # dynamo has left functions to Python, and will do so again
        self.has_run = False  # a compiled function has, in which no module is seen to be entered
        self._running = Counter[str]()  # calls that are under way
        self._sequence: set[int] = set()

    @contextmanager
    def inside(self, kind: str) -> Iterator[None]:
        """Mark what runs: `compiled` functions, or `eager` operators in place of compiled code."""
        self.has_run |= kind == "compiled"
        self._running[kind] += 1
        try:
            yield
        finally:
            self._running[kind] -= 1

    def marked(self, options: tuple[str, ...]) -> tuple[str, ...]:
        """The options of the operator that runs now, with a mark if it replaces compiled code."""
        return (*options, UNCOMPILED) if "compiled" not in options and self._falls_back() else options

    def _falls_back(self) -> bool:
        if self._running["eager"] or (self._running["compiled"] and self.gives_up_frames):
            if is_forward():
                self._sequence.add(torch._C._autograd._get_sequence_nr())
            return True
        node = None if is_forward() else torch._C._current_autograd_node()
        return node is not None and node._sequence_nr() in self._sequence
