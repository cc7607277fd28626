"""Collectives of torch.distributed in a dry run: recorded, and done at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from lumos.dry_run.operator_log import CollectiveCall, OperatorLog, storage_key, tensors_in

_KINDS = {  # parts of operator names, the first that fits
    "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce", "allreduce": "all_reduce",
    "all_gather": "all_gather", "allgather": "all_gather", "all_to_all": "all_to_all", "alltoall": "all_to_all",
    "broadcast": "broadcast", "barrier": "barrier", "send": "send", "recv": "recv", "gather": "gather",
    "scatter": "scatter", "reduce": "reduce", "p2p": "send",
}  # fmt: skip


class Collectives:
    """Runs the operators of torch.distributed on fake tensors."""

    def __init__(self, log: OperatorLog) -> None:
        self.log = log
        self.running: dict[int, int] = {}  # storages that a collective is writing: its mark
        self.works: list[Any] = []  # torch calls into them, and does not keep them

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._opname
        if name == "wait_tensor":
            mark = self.running.pop(storage_key(args[0]), None)
            if mark is not None:
                self.log.wait_for(self.log.stream, mark)
            return args[0]
        kind = next(kind for part, kind in _KINDS.items() if part in name)
        if func.namespace == "c10d":
            return self._in_place(func, kind, args)
        out = func(*args, **kwargs)
        outputs = [out] if isinstance(out, torch.Tensor) else list(out)
        mark = self.log.collective(CollectiveCall(kind, _ranks(args), list(tensors_in(args)), outputs))
        self.running |= {storage_key(tensor): mark for tensor in outputs}
        return out

    def _in_place(self, func: Any, kind: str, args: Any) -> Any:
        writes = list(tensors_in(args[0])) if kind != "barrier" else []
        mark = self.log.collective(CollectiveCall(kind, _ranks(args), list(tensors_in(args)), writes))
        work = _Work(self.log, mark, writes)
        self.works = [*self.works[-63:], work]
        return (args[0], work.boxed()) if len(func._schema.returns) == 2 else work.boxed()


class _Work(dist.Work):  # type: ignore[misc]
    """A collective under way: the stream that waits for it goes on when it has ended."""

    def __init__(self, log: OperatorLog, mark: int, tensors: list[torch.Tensor]) -> None:
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
        future.set_result([alive for tensor in self._tensors if (alive := tensor()) is not None])
        return future


def _ranks(args: Any) -> tuple[int, ...]:
    """The ranks of the group among the arguments: an object, or its name. Reductions are objects and names, too."""
    for ranks in _groups(args):
        return tuple(ranks)
    return tuple(range(dist.get_world_size()))


def _groups(args: Any) -> Iterator[list[int]]:
    from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group

    for arg in args:
        with suppress(RuntimeError, TypeError, LookupError):
            if isinstance(arg, torch.ScriptObject):
                yield dist.get_process_group_ranks(ProcessGroup.unbox(arg))
            elif isinstance(arg, str):
                yield dist.get_process_group_ranks(_resolve_process_group(arg))
