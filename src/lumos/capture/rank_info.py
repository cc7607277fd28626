"""RankInfo: which rank of which job this process is, and what it runs on."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lumos.errors import OptionError

CPU = "cpu"


@dataclass(frozen=True)
class RankInfo:
    """One process of a job."""

    rank: int
    world: int
    backend: str  # of torch.distributed; '' if it is not initialised
    device: str  # as torch names the GPU, or CPU

    @property
    def writes_job_files(self) -> bool:
        """Whether it writes the files that exist once a job: the first rank does, and the only one of a fake world."""
        return self.rank == 0 or self.backend == "fake"


def rank_info(rank_env: str = "RANK") -> RankInfo:
    """What torch knows of this process, else what its environment says."""
    import torch
    import torch.distributed as dist

    device = torch.cuda.get_device_name() if uses_cuda() else CPU
    if dist.is_available() and dist.is_initialized():
        return RankInfo(dist.get_rank(), dist.get_world_size(), str(dist.get_backend()), device)
    rank, world = (os.environ.get(name, "") for name in (rank_env, "WORLD_SIZE"))
    return RankInfo(int(rank) if rank.isdecimal() else 0, int(world) if world.isdecimal() else 1, "", device)


def uses_cuda() -> bool:
    """Whether this process has work on a GPU; never initialises CUDA itself."""
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())


def synchronise() -> None:
    """Wait for launched work, so that a time or a recording does not begin in the middle of it."""
    import torch

    if uses_cuda():
        torch.cuda.synchronize()


def require_torch() -> None:
    """Refuse in one line if torch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise OptionError("lumos.capture needs torch: pip install 'lumos-sim[capture]'") from None
