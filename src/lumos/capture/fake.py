"""A fake world: one process that poses as one rank of a large job. Its kernels are real, its peers do not exist.

PyTorch's fake process group completes every collective at once and moves nothing, so results are wrong and times of
compute are right. Lumos takes the times of collectives from its network model.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from lumos.arguments import checks_arguments
from lumos.capture.rank_info import require_torch
from lumos.errors import OptionError


@checks_arguments
def fake_world(rank: int, world: int) -> None:
    """Make this process rank `rank` of `world`; a later `init_process_group` finds it done."""
    check_world(rank, world)
    require_torch()
    import torch.distributed as dist

    if dist.is_initialized():
        if str(dist.get_backend()) == "fake" and (dist.get_rank(), dist.get_world_size()) == (rank, world):
            return
        raise OptionError(
            "a process group exists already: call lumos.capture.fake_world(rank, world) before init_process_group"
        )
    os.environ.update(world_environment(rank, world))
    fake_process_groups(rank, world)
    dist.init_process_group()


def check_world(rank: int, world: int) -> None:
    """Refuse a rank that such a world does not have."""
    if not (isinstance(world, int) and isinstance(rank, int) and world >= 1 and 0 <= rank < world):
        raise OptionError(f"fake world: rank {rank} of {world}: a rank is 0 to {max(int(world), 1) - 1} here")


def world_environment(rank: int, world: int) -> dict[str, str]:
    """The variables a launcher would have set; the process has the node's first GPU."""
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29500}
    return {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1"}


def fake_process_groups(rank: int, world: int, faked_by_script: Callable[[], None] | None = None) -> Callable[[], None]:
    """From here on every process group of this process is a fake one, whatever backend is asked for.

    A script that asks for a fake one itself gets what it asks for, and the last argument is called. A world of one
    takes the size that the script states, as one does whose processes it starts itself. A single process that no
    launcher started gets none of a launcher's variables: scripts choose by them whether to train in parallel. Returns
    what undoes it.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before = {name: os.environ.get(name) for name in world_environment(rank, world)}
    if world > 1 or "RANK" in os.environ:
        os.environ.update(world_environment(rank, world))
    initialise, make_group = dist.init_process_group, dist.new_group

    def init_process_group(backend: Any = None, *args: Any, **options: Any) -> None:
        if backend == "fake":
            if faked_by_script is not None:
                faked_by_script()
            initialise(backend, *args, **options)
        elif not dist.is_initialized():
            stated = int(options.get("world_size", -1))
            place = (int(options.get("rank", 0)), stated) if world == 1 and stated > 1 else (rank, world)
            initialise("fake", rank=place[0], world_size=place[1], store=FakeStore())

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        return make_group(ranks, timeout, "fake", **{k: v for k, v in options.items() if k != "pg_options"})

    replaced: dict[str, Callable[..., Any]] = _of_one_rank()
    replaced |= {"init_process_group": init_process_group, "new_group": new_group}
    undo = [_replace_everywhere(getattr(dist, name), function, name) for name, function in replaced.items()]
    undo += _complete_data_parallel()

    def undo_all() -> None:
        for step in reversed(undo):
            step()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})

    return undo_all


def _of_one_rank() -> dict[str, Callable[..., Any]]:
    """Exchanges of Python objects: the peers are taken to hold what this rank holds."""

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def broadcast_object_list(object_list: list[Any], *_: Any, **__: Any) -> None:
        """The list stays as it is: a source other than this rank sends nothing."""

    def scatter_object_list(output: list[Any], inputs: list[Any] | None = None, *_: Any, **__: Any) -> None:
        output[:1] = inputs[:1] if inputs else [None]

    functions = (all_gather_object, gather_object, broadcast_object_list, scatter_object_list)
    return {function.__name__: function for function in functions}


def _complete_data_parallel() -> list[Callable[[], None]]:
    """DistributedDataParallel needs the gradients that an all-reduce returns, and a fake one returns nothing.

    Nor are there peers whose parameters could be compared with those of this rank.
    """
    import torch.distributed as dist
    import torch.distributed.utils as utils
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.parallel import distributed as module_of_it

    def all_reduce(bucket: Any) -> Any:
        dist.all_reduce(bucket.buffer(), async_op=True)
        answer: Any = Future()
        answer.set_result(bucket.buffer())
        return answer

    forward = DistributedDataParallel.forward

    def first_forward(module: Any, *arguments: Any, **options: Any) -> Any:
        if not getattr(module, "_comm_hooks", None):  # a script's own hook stays
            module.register_comm_hook(None, lambda _, bucket: all_reduce(bucket))
        return forward(module, *arguments, **options)

    DistributedDataParallel.forward = first_forward
    name = "_verify_param_shape_across_processes"
    log = dist.Logger.set_runtime_stats_and_log
    dist.Logger.set_runtime_stats_and_log = lambda *_: None  # asks for timers, which a build without CUDA has not
    undo: list[Callable[[], None]] = [
        functools.partial(setattr, DistributedDataParallel, "forward", forward),
        functools.partial(setattr, dist.Logger, "set_runtime_stats_and_log", log),
    ]
    for owner in (utils, module_of_it):
        if hasattr(owner, name):
            undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
            setattr(owner, name, lambda *_, **__: True)
    return undo


def _replace_everywhere(before: Callable[..., Any], after: Callable[..., Any], name: str) -> Callable[[], None]:
    """Replace a function in all modules of torch.distributed, each of which holds its own reference; what undoes it."""
    modules = [module for path, module in list(sys.modules.items())
               if path.startswith("torch.distributed") and getattr(module, name, None) is before]  # fmt: skip
    for module in modules:
        setattr(module, name, after)

    def undo() -> None:
        for module in modules:
            setattr(module, name, before)

    return undo
