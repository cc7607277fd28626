"""Collectives of torch.distributed in a dry run: written down, and done at once."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

_KINDS = {  # parts of the names of operators, the first that fits
    "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce", "allreduce": "all_reduce",
    "all_gather": "all_gather", "allgather": "all_gather", "all_to_all": "all_to_all", "alltoall": "all_to_all",
    "broadcast": "broadcast", "barrier": "barrier", "send": "send", "recv": "recv", "gather": "gather",
    "scatter": "scatter", "reduce": "reduce", "p2p": "send",
}  # fmt: skip
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


class CollectiveCall(NamedTuple):
    """One call of a collective."""

    kind: str  # all_reduce, all_gather, …
    group: tuple[int, ...]  # ranks
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


class CollectiveLog(Protocol):
    """What the recorder does with a collective: returns its mark, for which streams can wait."""

    stream: int

    def collective(self, call: CollectiveCall) -> int: ...
    def wait_for(self, stream: int, mark: int) -> None: ...


class Collectives:
    """Runs the operators of torch.distributed on fake tensors."""

    def __init__(self, log: CollectiveLog) -> None:
        self.log = log
        self.running: dict[int, int] = {}  # storages that a collective is writing: its mark
        self.works: list[Any] = []  # torch calls into them, and does not keep them

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._opname
        if name == "wait_tensor":
            self._wait(args[0])
            return args[0]
        kind = next(kind for part, kind in _KINDS.items() if part in name)
        if func.namespace == "c10d":
            return self._in_place(func, kind, args)
        out = func(*args, **kwargs)
        outputs = [out] if isinstance(out, torch.Tensor) else list(out)
        mark = self.log.collective(CollectiveCall(kind, _ranks(args), _tensors(args), outputs))
        for tensor in outputs:
            self.running[_key(tensor)] = mark
        return out

    def _in_place(self, func: Any, kind: str, args: Any) -> Any:
        tensors = _tensors(args)
        writes = _tensors([args[0]]) if kind != "barrier" else []
        mark = self.log.collective(CollectiveCall(kind, _ranks(args), tensors, writes))
        work = _Work(self.log, mark, writes)
        self.works = [*self.works[-63:], work]
        returns = func._schema.returns
        return (args[0], work.boxed()) if len(returns) == 2 else work.boxed()

    def _wait(self, tensor: torch.Tensor) -> None:
        mark = self.running.pop(_key(tensor), None)
        if mark is not None:
            self.log.wait_for(self.log.stream, mark)


class _Work(dist.Work):  # type: ignore[misc]
    """A collective under way: the stream that waits for it goes on when it has ended."""

    def __init__(self, log: CollectiveLog, mark: int, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._log, self._mark = log, mark
        self._tensors = [weakref.ref(tensor) for tensor in tensors]  # whose memory ends with the script's use of them

    def wait(self, *_: Any) -> bool:
        self._log.wait_for(self._log.stream, self._mark)
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result([found for tensor in self._tensors if (found := tensor()) is not None])
        return future


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _ranks(args: Any) -> tuple[int, ...]:
    """The ranks of the group among the arguments: an object, or its name."""
    from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group

    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return tuple(dist.get_process_group_ranks(ProcessGroup.unbox(arg)))
            except (RuntimeError, TypeError):
                continue  # the operation of a reduction is an object, too
        if isinstance(arg, str):
            try:
                return tuple(dist.get_process_group_ranks(_resolve_process_group(arg)))
            except (RuntimeError, LookupError):
                continue  # the name of a reduction
    return tuple(range(dist.get_world_size()))
