"""Place: which rank of which job this process is, and what it runs on."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lumos.errors import OptionError

CPU = "cpu"


@dataclass(frozen=True)
class Place:
    """One process of a job."""

    rank: int
    world: int
    backend: str  # of torch.distributed; '' where it is not initialised
    device: str  # as torch names the GPU, or CPU

    @property
    def fake(self) -> bool:
        """Whether the other ranks are not there."""
        return self.backend == "fake"

    @property
    def speaks_for_all(self) -> bool:
        """Whether it writes what is written once a job."""
        return self.rank == 0 or self.fake


def this_place(rank_env: str = "RANK") -> Place:
    """What torch knows of this process, else what its environment says."""
    import torch
    import torch.distributed as dist

    device = torch.cuda.get_device_name() if uses_cuda() else CPU
    if dist.is_available() and dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size(), str(dist.get_backend()), device)
    return Place(_number(rank_env, 0), _number("WORLD_SIZE", 1), "", device)


def uses_cuda() -> bool:
    """Whether this process has work on a GPU; never the first to touch it."""
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())


def synchronise() -> None:
    """Wait for what was launched, so that a time or a recording does not begin in the middle of it."""
    import torch

    if uses_cuda():
        torch.cuda.synchronize()


def require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise OptionError("lumos.capture needs torch: pip install 'lumos-sim[capture]'") from None


def _number(name: str, otherwise: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else otherwise
