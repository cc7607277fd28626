"""Functions of torch that scripts call around training, and that would need other processes or files."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed
import torch.multiprocessing
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from lumos.dry_run.fake_gpu import refused

ONE_PROCESS = "torch.multiprocessing.spawn: one of {} processes runs; the others are taken to do the same"
_OBJECT = "it waits for an object of another rank: give a PipelineStage its input_args and output_args"
ONE_GPU = "nn.DataParallel is taken as one GPU with the whole batch: use DistributedDataParallel for several"


def script_functions(notes: dict[str, None], rank: int) -> list[tuple[Any, str, Any]]:
    """(owner, name, what stands in for it): data loaders, checkpoints, and processes that a script starts."""
    saved: dict[str, Any] = {}
    load = torch.load

    def save(value: Any, file: Any, *_: Any, **__: Any) -> None:
        """Fake tensors have nothing to save; a script that loads the file again gets them back."""
        if isinstance(file, str | os.PathLike):
            saved[os.fspath(file)] = value

    @functools.wraps(load)
    def loaded(file: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        name = os.fspath(file) if isinstance(file, str | os.PathLike) else ""
        if name not in saved:
            return load(file, map_location, *args, **options)
        place = map_location if isinstance(map_location, str | torch.device) else None

        def copied(tensor: Any) -> Any:
            return tensor.detach().clone().to(place or tensor.device)

        return tree_map_only(torch.Tensor, copied, saved[name])

    def spawn(function: Callable[..., Any], args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        if nprocs > 1:
            notes[ONE_PROCESS.format(nprocs)] = None
        function(rank % max(nprocs, 1), *args)

    def on_one_gpu(parallel: Any, *inputs: Any, **options: Any) -> Any:
        notes[ONE_GPU] = None
        inputs, options = tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda"), (inputs, options))
        return parallel.module(*inputs, **options)

    return [
        (torch.distributed, "is_nccl_available", lambda: True), (torch.cuda.nccl, "version", lambda: (2, 27, 3)),
        (torch.distributed, "recv_object_list", refused(_OBJECT)), (torch.distributed, "send_object_list", _nothing),
        (DataLoader, "__init__", _in_this_process(DataLoader.__init__)), (torch, "save", save), (torch, "load", loaded),
        (torch.multiprocessing, "spawn", spawn), (torch.nn.DataParallel, "forward", on_one_gpu),
    ]  # fmt: skip


def _nothing(*_: Any, **__: Any) -> None: ...


def _in_this_process(make: Any) -> Any:
    """A data loader without workers: fake tensors do not travel between processes."""

    @functools.wraps(make)
    def in_this_process(loader: Any, *args: Any, **options: Any) -> None:
        options |= {"num_workers": 0, "pin_memory": False}
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
            options.pop(name, None)
        make(loader, *args[:5], **options)

    return in_this_process
