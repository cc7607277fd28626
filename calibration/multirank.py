"""Several ranks on one GPU: small training jobs over NCCL, each rank a process of its own."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from measure import SUFFIX, Save, Step, clean_steps, heat_gpu, profiled_steps
from models import Decoder, Shape, token_loss

WARMUP_STEPS, CLEAN_STEPS, STEPS_AFTER = 5, 8, 5
LIMIT_S = 90


@dataclass(frozen=True)
class Job:
    """A training job: its parallelism, its model, and the rank that has twice the batch, if any."""

    name: str
    mode: str  # ddp, fsdp, tp or pp
    world: int
    shape: Shape
    microbatches: int = 1  # of a pipeline
    bucket_mb: float = 25
    straggler: int | None = None
    straggler_passes: int = 1  # its batch in one pass, or in two by accumulation

    def shrunk(self) -> Job:
        return replace(self, shape=self.shape.shrunk())

    def batch(self, rank: int) -> tuple[int, int]:
        """The size of a micro-batch, and how many of them make a step."""
        if rank != self.straggler:
            return self.shape.mbs, self.microbatches
        return 2 * self.shape.mbs // self.straggler_passes, self.straggler_passes


EXAMPLE = Job("example", "ddp", 4, Shape(3, 512, 1408, 8, 4096, 256, 2), bucket_mb=6, straggler=2)
WIDE = Shape(3, 768, 2048, 12, 8192, 512, 2)
JOBS = [
    EXAMPLE,
    replace(EXAMPLE, name="example_accum", straggler_passes=2),
    Job("ddp2_l3", "ddp", 2, WIDE),
    Job("fsdp2_l3", "fsdp", 2, replace(WIDE, mbs=3)),
    Job("tp2_l3", "tp", 2, WIDE),
    Job("pp2_mb3", "pp", 2, Shape(4, 640, 1792, 10, 8192, 512, 2), microbatches=3),
    Job("ddp3_l2", "ddp", 3, Shape(2, 896, 2432, 14, 6144, 384, 2), bucket_mb=12),
]


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What a rank needs to know; with a host name of its own NCCL accepts several ranks on one GPU."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "1",
    }


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with the sharded parameters in a group of their own: fused kernels take no mixture."""
    parameters = list(model.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (True, False)]
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-4, fused=True)


def tensor_parallel(model: Decoder, device: str, world: int) -> nn.Module:
    columns = ["attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"]
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.o", "mlp.down")}
    mesh = init_device_mesh(device, (world,))
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def fully_sharded(model: Decoder, device: str, world: int) -> nn.Module:
    mesh = init_device_mesh(device, (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def parallel_model(job: Job, device: str) -> nn.Module:
    """The whole model, made parallel over the data or over the tensors."""
    with torch.device(device):
        model = Decoder(job.shape).to(torch.bfloat16)
    if job.mode == "tp":
        return tensor_parallel(model, device, job.world)
    if job.mode == "fsdp":
        return fully_sharded(model, device, job.world)
    return DistributedDataParallel(model, device_ids=[0] if device == "cuda" else None, bucket_cap_mb=job.bucket_mb)


def data_step(job: Job, rank: int, device: str) -> Step:
    """A training step of every mode but the pipeline."""
    model = parallel_model(job, device)
    optimizer = adamw(model)
    mbs, passes = job.batch(rank)
    tokens = torch.randint(job.shape.vocab, (mbs, job.shape.seq), device=device)

    def step() -> None:
        for index in range(passes):
            with nullcontext() if index == passes - 1 else model.no_sync():
                token_loss(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def pipeline_step(job: Job, rank: int, device: str) -> Step:
    """A training step of one pipeline stage, one forward and one backward in turn."""
    first, last = rank == 0, rank == job.world - 1
    part = replace(job.shape, layers=job.shape.layers // job.world)
    with torch.device(device):
        model = Decoder(part, embed=first, head=last).to(torch.bfloat16)
    optimizer = adamw(model)
    stage = PipelineStage(model, rank, job.world, torch.device(device, 0))
    schedule = Schedule1F1B(stage, n_microbatches=job.microbatches, loss_fn=token_loss)
    mbs, microbatches = job.batch(rank)
    tokens = torch.randint(job.shape.vocab, (mbs * microbatches, job.shape.seq), device=device)

    def step() -> None:
        schedule.step(*([tokens] if first else []), target=tokens if last else None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def join_job(device: str) -> int:
    """Enter the process group, with its communicator set up; returns the rank."""
    if device == "cuda":
        torch.cuda.set_device(0)
        heat_gpu(0.1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1, device=device))
    torch.manual_seed(0)
    return dist.get_rank()


def run_rank(job: Job, folder: Path, device: str, save: Save) -> None:
    """Train as one rank of `job`: hand its record to `save`, write its trace to `folder`, and leave the process."""
    rank = join_job(device)
    build: Callable[[Job, int, str], Step] = pipeline_step if job.mode == "pp" else data_step
    step = build(job, rank, device)
    record: dict[str, Any] = asdict(job)
    record |= record.pop("shape") | {"rank": rank, "torch": torch.__version__}
    record["mbs"], record["accum"] = job.batch(rank)
    record["step_s"] = clean_steps(step, CLEAN_STEPS, WARMUP_STEPS)
    record["step_s_median"] = statistics.median(record["step_s"])
    record["profiled_step_s"] = profiled_steps(step, folder / f"rank{rank}{SUFFIX}")
    record["step_s_after"] = clean_steps(step, STEPS_AFTER, warmup=1)
    record["peak_mem_alloc"] = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    save(record)
    dist.barrier()  # rank 0 holds the store that the others still look at
    os._exit(0)  # all is on disk, and tearing NCCL down may hang
