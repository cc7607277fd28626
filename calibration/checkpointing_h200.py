"""One FSDP2 rank with each kind of activation checkpointing, eager and compiled, and with float8 linear layers.

    python3 calibration/checkpointing_h200.py OUT.json SECONDS [NAME ...]

A slice of Llama 3 8B as torchtitan trains it: fp32 weights gathered as bf16, gradients reduced in fp32, a rotary
embedding of complex fp32 numbers, keys and values repeated for their queries. The peers are faked, so that a step is
what the rank's own kernels and its own host code take. `op` keeps the results of attention and of every second matmul
and runs the rest again; `layer` checkpoints every second layer; `full` every layer. Float8 is by torch._scaled_mm with
scales found anew every time, one for a tensor or one for a row.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from scripts_h200 import forked, report, summary_of, write

LIMIT_S = 70.0  # of one case
WORLD = 8


@dataclass(frozen=True)
class Case:
    """One rank of eight. `backend` is the attention kernel: flash (FlashAttention 2) or cudnn."""

    name: str
    layers: int = 6
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv: int = 8
    vocab: int = 128256
    seq: int = 8192
    micro: int = 1
    checkpoint: str = "none"  # none, op, layer, full
    compiled: bool = False
    float8: str = ""  # tensor, row
    backend: str = "flash"
    accum: int = 1
    sync: bool = True  # gradients are reduced after every micro-batch, not after the last alone


EAGER, COMPILED = Case("", compiled=False), Case("", compiled=True)
CASES = [
    replace(EAGER, name="eager_none"),
    replace(EAGER, name="eager_op", checkpoint="op"),
    replace(EAGER, name="eager_layer", checkpoint="layer"),
    replace(EAGER, name="eager_full", checkpoint="full"),
    replace(COMPILED, name="compiled_op", checkpoint="op"),
    replace(COMPILED, name="compiled_none"),
    replace(COMPILED, name="compiled_op_tensor", checkpoint="op", float8="tensor"),
    replace(COMPILED, name="compiled_op_row", checkpoint="op", float8="row"),
    replace(COMPILED, name="compiled_full", checkpoint="full"),
    replace(EAGER, name="eager_op_l3", checkpoint="op", layers=3),
    replace(EAGER, name="eager_full_accum_nosync", checkpoint="full", accum=2, sync=False, seq=4096),
    replace(EAGER, name="eager_op_s4096_b2", checkpoint="op", seq=4096, micro=2),
    replace(COMPILED, name="compiled_op_cudnn", checkpoint="op", backend="cudnn"),
    replace(COMPILED, name="compiled_op_b2", checkpoint="op", micro=2, layers=4),
]


# ---------------------------------------------------------------------- float8 linear layers
def to_float8(x: torch.Tensor, dtype: torch.dtype, dims: tuple[int, ...] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(values in 8 bits, the factors that undo their scale): one for the tensor, or one along `dims`."""
    largest = x.abs().amax() if dims is None else x.abs().amax(dims, keepdim=True)
    most = torch.finfo(dtype).max
    scale = most / largest.float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-most, most).to(dtype), scale.reciprocal()


class Float8Matmul(torch.autograd.Function):
    """The three matmuls of a linear layer in 8 bits; it keeps input and weight as they are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, rows: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        a, a_scale = to_float8(x, torch.float8_e4m3fn, (1,) if rows else None)
        b, b_scale = to_float8(weight, torch.float8_e4m3fn, (1,) if rows else None)
        b_scale = b_scale.reshape(1, -1) if rows else b_scale
        return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        rows = ctx.rows
        kind = torch.float8_e4m3fn if rows else torch.float8_e5m2
        g, g_scale = to_float8(grad, kind, (1,) if rows else None)
        w, w_scale = to_float8(weight, torch.float8_e4m3fn, (0,) if rows else None)
        columns = w.t().contiguous().t()
        inputs = torch._scaled_mm(g, columns, g_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=False)
        if rows:
            g, g_scale = to_float8(grad, kind, (0,))
            g_scale = g_scale.reshape(-1, 1)
        y, y_scale = to_float8(x, torch.float8_e4m3fn, (0,) if rows else None)
        left, right = g.t().contiguous(), y.t().contiguous().t()
        weights = torch._scaled_mm(left, right, g_scale, y_scale, out_dtype=torch.bfloat16, use_fast_accum=False)
        return inputs, weights, None


class Float8Linear(nn.Linear):
    rows = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = Float8Matmul.apply(x.reshape(-1, x.shape[-1]), self.weight, self.rows)
        return flat.view(*x.shape[:-1], -1)


class RowwiseLinear(Float8Linear):
    rows = True


# ---------------------------------------------------------------------- the model
class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        linear = {"": nn.Linear, "tensor": Float8Linear, "row": RowwiseLinear}[case.float8]
        self.size, self.repeats = case.hidden // case.heads, case.heads // case.kv
        self.norm1, self.norm2 = nn.RMSNorm(case.hidden, eps=1e-5), nn.RMSNorm(case.hidden, eps=1e-5)
        self.wq = linear(case.hidden, case.hidden, bias=False)
        self.wk = linear(case.hidden, case.kv * self.size, bias=False)
        self.wv = linear(case.hidden, case.kv * self.size, bias=False)
        self.wo = linear(case.hidden, case.hidden, bias=False)
        self.w1 = linear(case.hidden, case.ffn, bias=False)
        self.w3 = linear(case.hidden, case.ffn, bias=False)
        self.w2 = linear(case.ffn, case.hidden, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), turns)
        y = self.norm2(x)
        return x + self.w2(functional.silu(self.w1(y)) * self.w3(y))

    def attention(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, -1, self.size) for f in (self.wq, self.wk, self.wv))
        q, k = turned(q, turns), turned(k, turns)
        k, v = k.repeat_interleave(self.repeats, 2), v.repeat_interleave(self.repeats, 2)
        y = functional.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary positions, as products of complex numbers in fp32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(3).type_as(x)


class Decoder(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(case.vocab, case.hidden)
        self.blocks = nn.ModuleList([Block(case) for _ in range(case.layers)])
        self.norm = nn.RMSNorm(case.hidden, eps=1e-5)
        self.head = nn.Linear(case.hidden, case.vocab, bias=False)

    def forward(self, ids: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x))


# ---------------------------------------------------------------------- checkpointing
def keep_every_second() -> Any:
    """Contexts that keep attention and every second matmul of a block."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    matmuls = (aten.mm.default, aten._scaled_mm.default)
    others = (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    )
    counts: Counter[bool] = Counter()

    def policy(ctx: Any, operator: Any, *_: Any, **__: Any) -> Any:
        if operator in matmuls:
            counts[ctx.is_recompute] += 1
            keeps = counts[ctx.is_recompute] % 2 == 1
        else:
            keeps = operator in others
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def checkpointed(block: nn.Module, index: int, how: str) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    if how == "op":
        return checkpoint_wrapper(block, context_fn=keep_every_second, preserve_rng_state=False)
    if how == "full" or (how == "layer" and index % 2 == 1):
        return checkpoint_wrapper(block, preserve_rng_state=False)
    return block


def build(case: Case, device: str) -> nn.Module:
    """Checkpointing, compilation, FSDP2: in the order that torchtitan uses."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    with torch.device("meta"):
        model = Decoder(case)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpointed(block, index, case.checkpoint)
        if case.compiled:
            model.blocks[index].compile()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, block in enumerate(model.blocks):
        fully_shard(block, mp_policy=policy, reshard_after_forward=index < case.layers - 1)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


def step_of(case: Case, device: str) -> Callable[[], None]:
    model = build(case, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, case.vocab, (case.micro * case.accum, case.seq), device=device)
    size = case.hidden // case.heads
    angles = torch.outer(torch.arange(case.seq), 500000.0 ** (-torch.arange(0, size, 2) / size))
    turns = torch.polar(torch.ones_like(angles), angles).to(device)

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        logits = model(part, turns)
        return functional.cross_entropy(logits.flatten(0, 1).float(), part.flatten())

    def step() -> None:
        parts = ids.split(case.micro)
        for index, part in enumerate(parts):
            model.set_requires_gradient_sync(case.sync or index == len(parts) - 1)
            loss_of(part).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(case: Case) -> dict[str, Any]:
    """Clean steps, memory (of the step, and what stays after it), and one profiled step."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    kernel = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[case.backend]
    times, waits = [], []
    with sdpa_kernel([kernel, SDPBackend.MATH] if device == "cpu" else [kernel]):
        step = step_of(case, device)
        for _ in range(9):
            start = time.perf_counter()
            step()
            issued = time.perf_counter()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            waits.append(time.perf_counter() - issued)
        found = {"step_s": statistics.median(times[4:]), "steps_s": times, "wait_s": statistics.median(waits[4:])}
        if device == "cuda":
            found["peak"], found["peak_reserved"] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            found["after"] = torch.cuda.memory_allocated()
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=kinds, record_shapes=True) as profiler:
                step()
                torch.cuda.synchronize()
            found |= summary_of(profiler)
    return {"case": asdict(case), **found, "run_s": round(time.perf_counter() - began, 1)}


def main(output: str, seconds: str, *names: str) -> None:
    """Runs the cases, or some of them, and writes what is there after each."""
    import torch.distributed.algorithms._checkpoint.checkpoint_wrapper
    import torch.distributed.fsdp  # noqa: F401

    stop = time.monotonic() + float(seconds)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        left = stop - time.monotonic()
        if (names and case.name not in names) or left < 5:
            continue
        row = {"case": asdict(case), **forked(functools.partial(measure, case), min(LIMIT_S, left))}
        report(case.name, row)
        rows.append(row)
        write(output, rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
