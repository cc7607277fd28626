"""One process, one model: its step without the profiler, with it, and without it again."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from measure import STANDARD, SUFFIX, Options, Save, Step, clean_steps, heat_gpu, profiled_steps, summary
from models import PLAIN, Shape, build_model, token_loss

WARMUP_STEPS, CLEAN_STEPS = 5, 25
VARIANTS = {
    "noshapes": Options(shapes=False),
    "nosyncevents": Options(sync_events=False),
    "stack": Options(stack=True),
}


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and which other profiler options its step is also recorded with."""

    name: str
    kind: str
    shape: Shape
    optimizer: str = "adamw_fused"
    accum: int = 1
    checkpoint: bool = False
    compile: bool = False
    variants: tuple[str, ...] = ()
    cycles: int = 1  # how often the step is recorded in the standard way, clean steps in between
    limit_s: float = 60

    def shrunk(self) -> Case:
        return replace(self, shape=self.shape.shrunk(), compile=False)


BOTH = ("noshapes", "nosyncevents")
CASES = [
    # Bound by the launches of the host.
    Case("llama_l3_h768_s256", "llama", Shape(3, 768, 2048, 6, 8000, 256, 1), variants=(*BOTH, "stack")),
    Case("llama_l4_h896_s384", "llama", Shape(4, 896, 2432, 7, 16000, 384, 2), variants=(*BOTH, "stack")),
    Case("gpt2_l4_h768", "gpt2", Shape(4, 768, 3072, 12, 16384, 512, 2)),
    Case("plain_l4_h640", "plain", Shape(4, 640, 1792, 10, 8192, 512, 2)),
    Case("foreach_l3_h1152", "llama", Shape(3, 1152, 3072, 9, 16000, 512, 2), optimizer="adamw_foreach"),
    Case("sgd_l4_h1152", "llama", Shape(4, 1152, 3072, 9, 16000, 768, 1), optimizer="sgd"),
    Case("accum2_l2_h1280", "llama", Shape(2, 1280, 3456, 10, 16000, 768, 2), accum=2),
    Case("mixtral_l2_h768", "mixtral", Shape(2, 768, 1536, 6, 8000, 512, 2, kv=3)),
    # Near the boundary.
    Case("llama_l4_h1536_s1536_b3", "llama", Shape(4, 1536, 4096, 12, 24000, 1536, 3), variants=BOTH),
    Case("llama_l3_h2560_s1024_b3", "llama", Shape(3, 2560, 6912, 20, 24000, 1024, 3)),
    Case("gqa_l4_h1792_s1280_b3", "llama", Shape(4, 1792, 4864, 14, 24000, 1280, 3, kv=2)),
    Case("ckpt_l3_h1536_s1536_b4", "llama", Shape(3, 1536, 4096, 12, 16000, 1536, 4), checkpoint=True),
    Case("plain_simple_l3_h1280_s768_b4", "plain_simple", Shape(3, 1280, 3456, 10, 16000, 768, 4)),
    # Bound by the GPU.
    Case("llama_l3_h3072_s2048_b4", "llama", Shape(3, 3072, 8192, 24, 24000, 2048, 4), variants=BOTH),
    Case("llama_l2_h1536_s3072_b6", "llama", Shape(2, 1536, 4096, 12, 24000, 3072, 6)),
    # Deeper, recorded several times over: hosts vary more from moment to moment than one recording shows.
    Case("llama_l6_h1280_s1024", "llama", Shape(6, 1280, 3456, 10, 16000, 1024, 1), cycles=4),
    Case("llama_l10_h768_s512_b2", "llama", Shape(10, 768, 2048, 6, 16000, 512, 2), cycles=4),
    Case("llama_l6_h1664_s1024_b2", "llama", Shape(6, 1664, 4480, 13, 24000, 1024, 2), cycles=4),
    Case("llama_l7_h2304_s1536_b2", "llama", Shape(7, 2304, 6144, 18, 24000, 1536, 2), cycles=4),
    Case("gpt2_l8_h896_s768_b4", "gpt2", Shape(8, 896, 3584, 14, 24576, 768, 4), cycles=4),
    Case("gpt2_l6_h1280_s512_b2", "gpt2", Shape(6, 1280, 5120, 20, 16384, 512, 2), cycles=4),
    Case("ckpt_l6_h1024_s768_b2", "llama", Shape(6, 1024, 2816, 8, 16000, 768, 2), checkpoint=True, cycles=4),
    Case("accum3_l4_h1024_s768_b1", "llama", Shape(4, 1024, 2816, 8, 16000, 768, 1), accum=3, cycles=4),
    Case("mixtral_l3_h1024_s512", "mixtral", Shape(3, 1024, 2048, 8, 8000, 512, 2, kv=4), cycles=4),
    Case("compile_l3_h1024_s512", "llama", Shape(3, 1024, 2816, 8, 16000, 512, 2), compile=True, limit_s=120),
]


def build_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    fused = kind == "adamw_fused"
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused, foreach=not fused)


def training_step(case: Case, model: nn.Module, device: str) -> Step:
    """The function that trains `model` one step on a fixed batch."""
    shape = case.shape
    optimizer = build_optimizer(case.optimizer, model)
    tokens = torch.randint(shape.vocab, (shape.mbs, shape.seq), device=device)
    runner = torch.compile(model, dynamic=False) if case.compile else model

    def loss() -> torch.Tensor:
        if case.kind in PLAIN:
            return token_loss(runner(tokens), tokens)
        return runner(input_ids=tokens, labels=tokens).loss

    def step() -> None:
        for _ in range(case.accum):
            (loss() / case.accum if case.accum > 1 else loss()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def profile_variant(name: str, step: Step, trace: Path, options: Options) -> dict[str, Any]:
    """A recording of `step` with `options`, and the clean steps after it."""
    seconds = profiled_steps(step, trace, options)
    print(f"{name}: profiled", flush=True)
    return {
        "options": asdict(options),
        "profiled_step_s": seconds,
        **summary("clean_after", clean_steps(step, CLEAN_STEPS)),
        "trace": trace.name,
        "trace_gz_bytes": trace.stat().st_size,
    }


def run_case(case: Case, folder: Path, device: str, seconds_left: float, save: Save) -> None:
    """Hand everything results.json holds of one case to `save`, as it grows; its traces are written to `folder`."""
    end = time.monotonic() + seconds_left
    if device == "cuda":
        heat_gpu()
    model = build_model(case.kind, case.shape, device)
    if case.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    step = training_step(case, model, device)
    record = asdict(case)
    record |= record.pop("shape") | {"variants": {}, "n_params": sum(p.numel() for p in model.parameters())}
    record |= summary("clean_before", clean_steps(step, CLEAN_STEPS, WARMUP_STEPS))
    save(record)
    record |= profile_variant(case.name, step, folder / f"{case.name}{SUFFIX}", STANDARD)
    for cycle in range(2, case.cycles + 1):
        name = f"{case.name}.cycle{cycle}"
        record["variants"][f"cycle{cycle}"] = profile_variant(name, step, folder / f"{name}{SUFFIX}", STANDARD)
    if device == "cuda":
        record["peak_mem_alloc"] = torch.cuda.max_memory_allocated()
    save(record)
    for variant in case.variants:
        if time.monotonic() > end:
            break
        trace = folder / f"{case.name}.{variant}{SUFFIX}"
        record["variants"][variant] = profile_variant(f"{case.name}.{variant}", step, trace, VARIANTS[variant])
        save(record)
