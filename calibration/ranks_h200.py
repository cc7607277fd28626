"""One rank of a large job on one GPU, its peers faked: clean steps, peak memory, GPU time by operator.

    python3 calibration/ranks_h200.py OUT.json SECONDS development|blind [NAME ...]

The fake process group answers every collective at once and moves nothing, so a step is what the rank's own kernels and
its own host code take. Stock PyTorch: FSDP2, DTensor tensor and sequence parallelism, `torch.distributed.pipelining`.
Each case is a process of its own; `python3 calibration/ranks_h200.py NAME` runs one alone and prints its step, as a
user's script would.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from scripts_h200 import forked, report, summary_of, write

LIMIT_S = 75.0  # of one case


@dataclass(frozen=True)
class Case:
    """One rank of one job. `tp` × `dp` × `pp` ranks; FSDP2 over `dp` where it is more than one."""

    name: str
    kind: str  # llama: RMSNorm, rotary positions, gated MLP; gpt: LayerNorm, learned positions, biases, GELU
    hidden: int
    ffn: int
    heads: int
    kv: int
    layers: int
    vocab: int
    seq: int
    micro: int
    tp: int = 1
    dp: int = 1
    pp: int = 1
    stage: int = 0
    accum: int = 1
    sequence_parallel: bool = False
    checkpoint: bool = False
    compiled: bool = False
    mixed: bool = False  # fp32 weights under a mixed-precision policy; without it, bf16 weights
    reshard: bool = True  # FSDP2 frees a block's parameters after its forward pass
    optimizer: str = "fused"  # fused, foreach, loop
    clip: bool = False


LLAMA_2B = Case("", "llama", 2048, 5632, 16, 8, 16, 32000, 2048, 4)
LLAMA_7B = Case("", "llama", 4096, 14336, 32, 8, 6, 32000, 4096, 1)
LLAMA_13B = Case("", "llama", 5120, 13824, 40, 40, 4, 32000, 4096, 1)
GPT_2B = Case("", "gpt", 2048, 8192, 16, 16, 12, 50304, 2048, 4)
GPT_7B = Case("", "gpt", 4096, 16384, 32, 32, 6, 50304, 2048, 2)
PIPELINE = replace(LLAMA_7B, layers=16, pp=4, accum=8, vocab=64000)

CASES = {
    "development": [
        replace(LLAMA_13B, name="llama_fsdp64", dp=64),
        replace(LLAMA_7B, name="llama_tp4_sp", tp=4, sequence_parallel=True, micro=2, optimizer="foreach"),
        replace(LLAMA_7B, name="llama_tp2_fsdp8_ckpt", tp=2, dp=8, checkpoint=True, optimizer="loop"),
        replace(GPT_2B, name="gpt_fsdp8_mixed", dp=8, mixed=True, optimizer="foreach", clip=True),
        replace(GPT_7B, name="gpt_tp8", tp=8, optimizer="loop"),
        replace(LLAMA_2B, name="llama_fsdp8_mixed_compiled", dp=8, mixed=True, compiled=True),
        replace(PIPELINE, name="llama_pp4_first", stage=0),
        replace(PIPELINE, name="llama_pp4_last", stage=3),
        replace(LLAMA_2B, name="llama_fsdp16_small", dp=16, layers=20, seq=512, micro=2),
    ],
    "blind": [
        replace(PIPELINE, name="llama_pp4_middle", stage=2, accum=6, micro=2, seq=2048),
        replace(GPT_2B, name="gpt_fsdp8_accum4", dp=8, accum=4, reshard=False, mixed=True),
        replace(LLAMA_7B, name="llama_tp2_fsdp8_compiled", tp=2, dp=8, compiled=True, micro=2, optimizer="loop"),
        replace(LLAMA_13B, name="llama_tp8", tp=8, optimizer="loop"),
        replace(GPT_7B, name="gpt_tp4_sp_fsdp8", tp=4, dp=8, sequence_parallel=True, micro=4, clip=True),
        replace(GPT_2B, name="gpt_fsdp64_ckpt", dp=64, checkpoint=True, micro=8),
        replace(GPT_2B, name="gpt_tp2", tp=2, layers=8, optimizer="loop"),
        replace(LLAMA_2B, name="llama_fsdp32_loop", dp=32, seq=1024, micro=1, layers=24, optimizer="loop"),
    ],
}


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on (batch, heads, sequence, size)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.size, bias = case.hidden // case.heads, case.kind == "gpt"
        self.wq = nn.Linear(case.hidden, case.hidden, bias=bias)
        self.wk = nn.Linear(case.hidden, case.kv * self.size, bias=bias)
        self.wv = nn.Linear(case.hidden, case.kv * self.size, bias=bias)
        self.wo = nn.Linear(case.hidden, case.hidden, bias=bias)

    def forward(self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        batch, length = q.shape[:2]
        q, k, v = (y.view(batch, length, -1, self.size).transpose(1, 2) for y in (q, k, v))
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = k.shape[1] != q.shape[1]
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        bias = case.kind == "gpt"
        self.w1 = nn.Linear(case.hidden, case.ffn, bias=bias)
        self.w2 = nn.Linear(case.ffn, case.hidden, bias=bias)
        self.w3 = None if bias else nn.Linear(case.hidden, case.ffn, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.w3 is None:
            return self.w2(functional.gelu(self.w1(x), approximate="tanh"))
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


def norm_of(case: Case) -> nn.Module:
    return nn.LayerNorm(case.hidden) if case.kind == "gpt" else nn.RMSNorm(case.hidden, eps=1e-5)


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm_of(case), norm_of(case)
        self.attention, self.mlp = Attention(case), Mlp(case)

    def forward(self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """The layers of one pipeline stage, with embedding and head where the stage has them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        first, last = case.stage == 0, case.stage == case.pp - 1
        self.seq, self.size, self.gpt = case.seq, case.hidden // case.heads, case.kind == "gpt"
        self.embed = nn.Embedding(case.vocab, case.hidden) if first else None
        self.position = nn.Embedding(case.seq, case.hidden) if first and self.gpt else None
        self.blocks = nn.ModuleList([Block(case) for _ in range(case.layers // case.pp)])
        self.norm = norm_of(case) if last else None
        self.head = nn.Linear(case.hidden, case.vocab, bias=False) if last else None

    def rotary(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self.gpt:
            return None, None
        steps = torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32)
        places = torch.arange(self.seq, device=x.device, dtype=torch.float32)
        angles = torch.outer(places, 10000.0 ** (-steps / self.size))
        kind = torch.get_default_dtype() if x.dtype == torch.long else x.dtype
        return angles.cos().to(kind), angles.sin().to(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x
        if self.embed is not None:
            x = self.embed(ids)
        cos, sin = self.rotary(x)
        if self.position is not None:
            x = x + self.position(torch.arange(self.seq, device=ids.device)[None].expand(ids.shape[0], -1))
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def shard_tensors(model: Decoder, mesh: DeviceMesh, case: Case) -> None:
    """Tensor parallelism by DTensor; with sequence parallelism, every parameter is a DTensor."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    plan |= {f"mlp.{name}": ColwiseParallel() for name in (("w1",) if case.kind == "gpt" else ("w1", "w3"))}
    if not case.sequence_parallel:
        plan |= {"attention.wo": RowwiseParallel(), "mlp.w2": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
        return
    gathered = (Shard(1), None, None), (Replicate(), None, None)
    plan |= {
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=gathered[0], desired_input_layouts=gathered[1]),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "mlp.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    ends: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    if case.kind == "gpt":
        ends["position"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(model, mesh, ends)


def build(case: Case, device: str) -> tuple[nn.Module, DeviceMesh]:
    """The rank's part of the model, in the order torchtitan uses: tensors, checkpointing, compilation, FSDP2."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world, rank = case.tp * case.dp * case.pp, case.stage * case.dp * case.tp
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    mesh = init_device_mesh(device, (case.pp, case.dp, case.tp), mesh_dim_names=("pp", "dp", "tp"))
    torch.set_default_dtype(torch.float32 if case.mixed else torch.bfloat16)
    with torch.device("meta"):
        model = Decoder(case)
    if case.tp > 1:
        shard_tensors(model, mesh["tp"], case)
    for index, block in enumerate(model.blocks):
        if case.checkpoint:
            model.blocks[index] = checkpoint_wrapper(block)
        if case.compiled:
            model.blocks[index].compile()
    if case.dp > 1:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mp_policy": policy} if case.mixed else {}
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=case.reshard, **options)
        fully_shard(model, mesh=mesh["dp"], **options)
    model.to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model, mesh


def step_of(case: Case, device: str) -> Callable[[], None]:
    """A function that trains one step of the rank."""
    model, mesh = build(case, device)
    flags = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False, "fused": False}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **flags[case.optimizer])
    ids = torch.randint(0, case.vocab, (case.micro * case.accum, case.seq), device=device)

    def update() -> None:
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    if case.pp > 1:
        run = pipeline_of(case, model, mesh, ids)
    else:

        def run() -> None:
            for part in ids.split(case.micro):
                (loss_of(model(part), part) / case.accum).backward()

    def step() -> None:
        run()
        update()

    return step


def pipeline_of(case: Case, model: nn.Module, mesh: DeviceMesh, ids: torch.Tensor) -> Callable[[], None]:
    """The rank's turns of a 1F1B pipeline."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    first, last = case.stage == 0, case.stage == case.pp - 1
    between = (case.micro, case.seq, case.hidden)
    after = (case.micro, case.seq, case.vocab) if last else between
    example = ids[: case.micro] if first else torch.zeros(between, device=ids.device, requires_grad=True)
    result = torch.zeros(after, device=ids.device, requires_grad=True)
    stage = PipelineStage(
        model, case.stage, case.pp, ids.device, input_args=(example,), output_args=result, group=mesh.get_group("pp")
    )
    schedule = Schedule1F1B(stage, n_microbatches=case.accum, loss_fn=loss_of)

    def run() -> None:
        if first:
            schedule.step(ids)
        elif last:
            schedule.step(target=ids)
        else:
            schedule.step()

    return run


def measure(case: Case, profiled: bool) -> dict[str, Any]:
    """Clean steps, the wait of the host at their end, peak memory, and, if asked, one profiled step."""
    began = time.perf_counter()
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    step = step_of(case, "cuda")
    times, waits = [], []
    for _ in range(12):
        start = time.perf_counter()
        step()
        issued = time.perf_counter()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        waits.append(time.perf_counter() - issued)
    found = {
        "case": asdict(case),
        "step_s": statistics.median(times[4:]),
        "steps_s": [round(t, 6) for t in times],
        "wait_s": round(statistics.median(waits[4:]), 6),
        "peak": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }
    if profiled:
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds, record_shapes=True) as profiler:
            step()
            torch.cuda.synchronize()
        found |= summary_of(profiler)
    return {**found, "run_s": round(time.perf_counter() - began, 1)}


def main(output: str, seconds: str, which: str, *names: str) -> None:
    """Runs the cases of a set, or some of them, and writes what is there after each."""
    import torch.distributed.algorithms._checkpoint.checkpoint_wrapper
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # noqa: F401

    stop = time.monotonic() + float(seconds)
    found: list[dict[str, Any]] = []
    for case in CASES[which]:
        if names and case.name not in names:
            continue
        task = functools.partial(measure, case, which == "development")
        row = {"case": asdict(case), **forked(task, min(LIMIT_S, max(stop - time.monotonic(), 1.0)))}
        report(case.name, row)
        found.append(row)
        write(output, found)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        chosen = next(case for cases in CASES.values() for case in cases if case.name == sys.argv[1])
        measured = measure(chosen, profiled=False)
        print(json.dumps({"step_s": measured["step_s"], "peak": measured["peak"]}), flush=True)
    else:
        main(*sys.argv[1:])
