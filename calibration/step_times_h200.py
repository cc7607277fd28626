"""Record how step times vary: traces of a dozen steps, and hundreds of steps of the same runs without the profiler.

    python3 calibration/step_times_h200.py --out DIR [--set NAME] [--budget-s 400]

Training runs of one process, then jobs of two to four ranks that share the GPU (NCCL over loopback sockets, under MPS).
Each records clean steps, profiled steps (saved as a trace) and clean steps again. A step ends when the host has read
the loss, or has waited for the GPU, as in a user's loop; its time is the distance between two such ends.

    steps.json    of every run and rank: milliseconds of each step by the host's clock, before, while and after it is
                  recorded, and by CUDA events after; whether figures may be fitted on the run ("fit") or not ("judge")
    tracesN.tar   RUN/rankR.pt.trace.json.gz

Both are brought up to date after every run. It needs torch with CUDA and transformers; --dry-run-cpu runs shrunken
models without a GPU, to check the script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import schedule

from measure import SUFFIX, Options, heat_gpu, save_trace, synchronize
from models import PLAIN, Shape, build_model, token_loss
from multirank import Job, data_step, join_job, pipeline_step, rank_environment
from processes import Worker, await_imports, multi_process_service, run_together
from record_h200 import free_ports, machine
from single import build_optimizer

Batch = torch.Tensor
OPTIONS = Options(shapes=False)
WARMUP, BEFORE, PROFILER_WARMUP = 8, 40, 3
TAR_LIMIT = 15_500_000
RUN_LIMIT_S, IMPORT_LIMIT_S, GRACE_S = 60.0, 90.0, 30.0


@dataclass(frozen=True)
class Run:
    """A training run of one process, or of the ranks of `job`."""

    name: str
    use: str  # fit or judge
    kind: str = ""
    shape: Shape | None = None
    job: Job | None = None
    compile: bool = False
    optimizer: str = "adamw_fused"
    accum: int = 1
    data: str = "fixed"  # one batch; "loader": a DataLoader in Python; "lengths": batches as long as their longest text
    traced_steps: int = 12
    slow_rank: int = -1  # one that takes longer than it should
    slow_host_ms: float = 0.0  # by a pause of its host in every step
    slow_matmuls: int = 0  # by kernels that the others do not run
    clean_s: float = 9.0  # clean steps after recording: at least 120, then until this time or 500

    @property
    def world(self) -> int:
        return self.job.world if self.job else 1

    def shrunk(self) -> Run:
        shape = self.shape.shrunk() if self.shape else None
        job = self.job.shrunk() if self.job else None
        return replace(self, shape=shape, job=job, compile=False, clean_s=1.0)


def _ranks(name: str, use: str, mode: str, world: int, shape: Shape, **more: Any) -> Run:
    return Run(name, use, job=Job(name, mode, world, shape, **more), traced_steps=12, clean_s=11.0)


DEVELOPMENT = [
    Run("llama_gpu", "fit", "llama", Shape(3, 2048, 5632, 16, 16000, 2048, 4)),
    Run("llama_host", "fit", "llama", Shape(3, 512, 1408, 8, 8000, 256, 1)),
    Run("compiled", "fit", "llama", Shape(3, 1024, 2816, 8, 16000, 1024, 4), compile=True),
    Run("loader", "fit", "gpt2", Shape(3, 768, 3072, 12, 16384, 512, 4), data="loader"),
    Run("experts", "fit", "mixtral", Shape(2, 768, 1536, 6, 8000, 512, 2, kv=3), traced_steps=10),
    Run("gpt2_mid", "judge", "gpt2", Shape(4, 1024, 4096, 16, 16384, 1024, 4)),
    Run("accum4", "judge", "llama", Shape(2, 1280, 3456, 10, 16000, 1024, 2), accum=4, traced_steps=10),
    Run("long_context", "judge", "llama", Shape(2, 1536, 4096, 12, 16000, 4096, 3)),
    Run("lengths", "judge", "llama", Shape(3, 1024, 2816, 8, 16000, 2048, 4), data="lengths"),
    Run("foreach_host", "judge", "gpt2", Shape(3, 512, 2048, 8, 8192, 256, 2), optimizer="adamw_foreach"),
    _ranks("ddp2", "fit", "ddp", 2, Shape(3, 768, 2048, 12, 8192, 512, 2)),
    _ranks("fsdp2", "fit", "fsdp", 2, Shape(3, 768, 2048, 12, 8192, 512, 3)),
    _ranks("pp2", "fit", "pp", 2, Shape(4, 640, 1792, 10, 8192, 512, 2), microbatches=3),
    _ranks("ddp4", "judge", "ddp", 4, Shape(2, 768, 2048, 12, 8192, 512, 2)),
    _ranks("tp2", "judge", "tp", 2, Shape(3, 1024, 2816, 16, 8192, 512, 2)),
    _ranks("fsdp3", "judge", "fsdp", 3, Shape(3, 640, 1792, 10, 8192, 512, 2)),
]
BLIND = [
    # Decided by the GPU.
    Run("blind_llama_gpu", "judge", "llama", Shape(2, 2560, 6912, 20, 24000, 2048, 4)),
    Run("blind_gpt2_gpu", "judge", "gpt2", Shape(3, 1536, 6144, 24, 16384, 1024, 8)),
    Run("blind_compiled", "judge", "gpt2", Shape(3, 1280, 5120, 20, 24576, 1024, 8), compile=True),
    Run("blind_simple", "judge", "plain_simple", Shape(2, 2048, 5632, 16, 16000, 1024, 6)),
    Run("blind_sgd", "judge", "llama", Shape(2, 1792, 4864, 14, 16000, 2048, 6), optimizer="sgd"),
    # Decided by the host.
    Run("blind_gpt2_host", "judge", "gpt2", Shape(4, 640, 2560, 10, 8192, 384, 1)),
    Run("blind_loader", "judge", "llama", Shape(2, 896, 2432, 7, 16000, 768, 3), data="loader"),
    Run("blind_experts", "judge", "mixtral", Shape(2, 640, 1280, 5, 8000, 384, 2, kv=5), traced_steps=10),
    # Several ranks.
    _ranks("blind_ddp3", "judge", "ddp", 3, Shape(3, 896, 2432, 14, 6144, 384, 2), bucket_mb=12),
    _ranks("blind_ddp2", "judge", "ddp", 2, Shape(4, 1024, 2816, 16, 8192, 768, 2)),
    _ranks("blind_fsdp2", "judge", "fsdp", 2, Shape(4, 896, 2432, 14, 8192, 384, 3)),
    _ranks("blind_tp2", "judge", "tp", 2, Shape(2, 1280, 3456, 20, 8192, 768, 2)),
    _ranks("blind_pp2", "judge", "pp", 2, Shape(4, 768, 2048, 12, 8192, 384, 2), microbatches=4),
]
LAST = [  # recorded once everything that draws steps was fixed
    Run("last_llama_gpu", "judge", "llama", Shape(2, 3072, 8192, 24, 16000, 1024, 6)),
    Run("last_gpt2_gpu", "judge", "gpt2", Shape(2, 2048, 8192, 32, 16384, 1024, 8)),
    Run("last_mid", "judge", "llama", Shape(3, 1408, 3840, 11, 12000, 896, 4)),
    Run("last_host", "judge", "llama", Shape(4, 448, 1216, 7, 6000, 320, 2)),
    Run("last_compiled", "judge", "llama", Shape(2, 1536, 4096, 12, 12000, 1024, 5), compile=True),
    _ranks("last_ddp2", "judge", "ddp", 2, Shape(2, 1152, 3072, 18, 6144, 640, 3)),
    _ranks("last_ddp4", "judge", "ddp", 4, Shape(2, 640, 1792, 10, 6144, 384, 2)),
    _ranks("last_fsdp2", "judge", "fsdp", 2, Shape(3, 1152, 3072, 18, 6144, 512, 2)),
    _ranks("last_tp2", "judge", "tp", 2, Shape(3, 896, 2432, 14, 6144, 640, 3)),
    _ranks("last_pp2", "judge", "pp", 2, Shape(4, 896, 2432, 14, 6144, 448, 2), microbatches=3),
]
_DDP2, _DDP3 = Shape(3, 896, 2432, 14, 6144, 512, 2), Shape(2, 896, 2432, 14, 6144, 384, 2)
_FSDP2, _PP2 = Shape(3, 896, 2432, 14, 6144, 448, 2), Shape(4, 768, 2048, 12, 6144, 448, 2)
STRAGGLERS = [  # the same job with and without a slow rank: what mending it gives
    _ranks("ddp2_even", "judge", "ddp", 2, _DDP2),
    replace(_ranks("ddp2_pause", "judge", "ddp", 2, _DDP2), slow_rank=1, slow_host_ms=12.0),
    replace(_ranks("ddp2_work", "judge", "ddp", 2, _DDP2), slow_rank=0, slow_matmuls=300),
    _ranks("ddp3_even", "judge", "ddp", 3, _DDP3),
    replace(_ranks("ddp3_pause", "judge", "ddp", 3, _DDP3), slow_rank=2, slow_host_ms=15.0),
    _ranks("fsdp2_even", "judge", "fsdp", 2, _FSDP2),
    replace(_ranks("fsdp2_pause", "judge", "fsdp", 2, _FSDP2), slow_rank=0, slow_host_ms=15.0),
    _ranks("pp2_even", "judge", "pp", 2, _PP2, microbatches=3),
    replace(_ranks("pp2_pause", "judge", "pp", 2, _PP2, microbatches=3), slow_rank=1, slow_host_ms=8.0),
]
_DDP4, _FSDP3 = Shape(2, 768, 2048, 12, 6144, 448, 2), Shape(2, 896, 2432, 14, 6144, 384, 2)
_DDP2B = Shape(2, 1152, 3072, 18, 6144, 448, 2)
STRAGGLERS_BLIND = [  # recorded once it was fixed how ranks are compared
    _ranks("ddp4_even", "judge", "ddp", 4, _DDP4),
    replace(_ranks("ddp4_pause", "judge", "ddp", 4, _DDP4), slow_rank=1, slow_host_ms=10.0),
    replace(_ranks("ddp4_work", "judge", "ddp", 4, _DDP4), slow_rank=3, slow_matmuls=250),
    _ranks("fsdp3_even", "judge", "fsdp", 3, _FSDP3),
    replace(_ranks("fsdp3_pause", "judge", "fsdp", 3, _FSDP3), slow_rank=1, slow_host_ms=20.0),
    _ranks("ddp2b_even", "judge", "ddp", 2, _DDP2B),
    replace(_ranks("ddp2b_pause", "judge", "ddp", 2, _DDP2B), slow_rank=0, slow_host_ms=8.0),
]
_SIBLINGS = {  # of every kind two depths, and the first of them once more
    "gpu": Run("", "judge", "llama", Shape(3, 1792, 4864, 14, 12000, 1536, 4)),
    "host": Run("", "judge", "gpt2", Shape(4, 576, 2304, 9, 8192, 320, 2)),
    "ddp2": _ranks("", "judge", "ddp", 2, Shape(3, 960, 2560, 15, 6144, 512, 2)),
    "fsdp2": _ranks("", "judge", "fsdp", 2, Shape(3, 960, 2560, 15, 6144, 448, 2)),
    "tp2": _ranks("", "judge", "tp", 2, Shape(3, 1024, 2816, 16, 6144, 512, 2)),
    "ddp3": _ranks("", "judge", "ddp", 3, Shape(2, 768, 2048, 12, 6144, 384, 3)),
}


def _siblings() -> Iterator[Run]:
    """Recorded one right after the other, so that their hosts and links are as alike as they can be."""
    for kind, run in _SIBLINGS.items():
        shape = run.job.shape if run.job else run.shape
        assert shape is not None
        for layers, again in ((shape.layers, ""), (2 * shape.layers, ""), (shape.layers, "_again")):
            name, deep = f"{kind}_l{layers}{again}", replace(shape, layers=layers)
            job = replace(run.job, name=name, shape=deep) if run.job else None
            yield replace(run, name=name, job=job, shape=None if job else deep, traced_steps=6, clean_s=2.0)


SETS = {
    "development": DEVELOPMENT, "blind": BLIND, "last": LAST, "stragglers": STRAGGLERS,
    "stragglers-blind": STRAGGLERS_BLIND, "siblings": list(_siblings()),
}  # fmt: skip


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Documents that are cut into tokens in plain Python: some are many times as long as others."""

    def __init__(self, vocab: int, seq: int) -> None:
        self.vocab, self.seq = vocab, seq

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Batch:
        draw = random.Random(index)
        words = int(min(60 * self.seq, self.seq * draw.lognormvariate(0.0, 0.8)))
        tokens = [hash((index, word)) % self.vocab for word in range(words)]
        return torch.tensor((tokens * (self.seq // max(len(tokens), 1) + 1))[: self.seq])


def batches(run: Run, shape: Shape, device: str) -> Iterator[Batch]:
    """The tokens of each micro-batch, without end."""
    if run.data == "loader":
        loader = torch.utils.data.DataLoader(Texts(shape.vocab, shape.seq), batch_size=shape.mbs, num_workers=1)
        for batch in loader:
            yield batch.to(device)
    draw = random.Random(1)
    fixed = torch.randint(shape.vocab, (shape.mbs, shape.seq), device=device)
    while True:
        if run.data == "lengths":
            longest = max(int(shape.seq * min(1.0, draw.lognormvariate(-1.0, 0.5))) for _ in range(shape.mbs))
            yield fixed[:, : max(8, longest // 8 * 8)].contiguous()
        else:
            yield fixed


def single_step(run: Run, device: str) -> Callable[[], object]:
    """A step as a training loop has it: batches, passes, optimizer, and the loss read by the host."""
    assert run.shape is not None
    model = build_model(run.kind, run.shape, device)
    optimizer = build_optimizer(run.optimizer, model)
    runner = torch.compile(model, dynamic=False) if run.compile else model
    source = batches(run, run.shape, device)

    def step() -> float:
        for _ in range(run.accum):
            tokens = next(source)
            if run.kind in PLAIN:
                loss = token_loss(runner(tokens), tokens)
            else:
                loss = runner(input_ids=tokens, labels=tokens).loss
            (loss / run.accum if run.accum > 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return step


def rank_step(run: Run, rank: int, device: str) -> Callable[[], object]:
    assert run.job is not None
    job = run.job
    build = pipeline_step if job.mode == "pp" else data_step
    step = build(job, rank, device)
    slow = rank == run.slow_rank
    more = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16) if slow and run.slow_matmuls else None

    def waited() -> None:
        if slow and run.slow_host_ms:
            time.sleep(run.slow_host_ms / 1e3)
        for _ in range(run.slow_matmuls if more is not None else 0):
            torch.mm(more, more)
        step()
        synchronize()

    return waited


class Clock:
    """Milliseconds between ends of steps, by the host and by CUDA events."""

    def __init__(self, step: Callable[[], object], device: str) -> None:
        self.step, self.device = step, device

    def ends(self, count: int, seconds: float = 0.0, at_most: int = 0) -> tuple[list[float], list[float]]:
        """Times of `count` steps, and of more until `seconds` have passed or `at_most` were made."""
        host, marks = [], [self.mark()]
        last = begun = time.perf_counter()
        while len(host) < count or (len(host) < at_most and last - begun < seconds):
            self.step()
            marks.append(self.mark())
            now = time.perf_counter()
            host.append(round(1e3 * (now - last), 4))
            last = now
        synchronize()
        pairs = itertools.pairwise(marks)
        return host, [round(a.elapsed_time(b), 4) for a, b in pairs if a is not None and b is not None]

    def mark(self) -> torch.cuda.Event | None:
        if self.device != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def profiled(self, count: int, trace: Path) -> list[float]:
        """Times of `count` recorded steps, which are saved as `trace`."""
        plan = schedule(wait=0, warmup=PROFILER_WARMUP, active=count, repeat=1)
        host = []
        with OPTIONS.profiler(schedule=plan) as profiler:
            last = time.perf_counter()
            for _ in range(PROFILER_WARMUP + count):
                self.step()
                now = time.perf_counter()
                host.append(round(1e3 * (now - last), 4))
                last = now
                profiler.step()
        save_trace(profiler, trace)
        return host[PROFILER_WARMUP:]


def agreed(run: Run, seconds_a_step: float, device: str) -> int:
    """How many clean steps are made: the same number on every rank."""
    count = torch.tensor(max(120, min(500, int(run.clean_s / max(seconds_a_step, 1e-4)))), device=device)
    if run.job:
        torch.distributed.broadcast(count, 0)
    return int(count)


def record(run: Run, rank: int, folder: Path, device: str) -> None:
    """Train as one rank of `run`, and write its times and its trace."""
    if run.job:
        join_job(device)
        step = rank_step(run, rank, device)
    else:
        if device == "cuda":
            heat_gpu()
        step = single_step(run, device)
    clock = Clock(step, device)
    clock.ends(WARMUP)
    found: dict[str, Any] = {"before_ms": clock.ends(BEFORE)[0]}
    found["profiled_ms"] = clock.profiled(run.traced_steps, folder / f"rank{rank}{SUFFIX}")
    clock.ends(WARMUP)  # the profiler is gone, and what it allocated
    count = agreed(run, sum(found["before_ms"]) / 1e3 / BEFORE, device)
    found["after_ms"], found["after_gpu_ms"] = clock.ends(count)
    partial = folder / f"rank{rank}.partial"
    partial.write_text(json.dumps(found))
    partial.replace(folder / f"rank{rank}.json")
    if run.job:
        torch.distributed.barrier()
    os._exit(0)  # all is on disk, and tearing NCCL or loaders down may hang


class Recorder:
    """Runs everything in turn, and keeps the files in `out` up to date."""

    def __init__(self, runs: list[Run], out: Path, folder: Path, device: str, budget_s: float) -> None:
        self.runs, self.out, self.folder, self.device = runs, out, folder, device
        self.end = time.monotonic() + budget_s
        self.machine, self.problems = machine(), dict[str, str]()
        print(json.dumps(self.machine), flush=True)

    def workers(self, run: Run, port: int) -> list[Worker]:
        command = [str(Path(__file__)), "--worker", run.name, "--out", str(self.folder), "--device", self.device]
        return [
            Worker(
                [*command, "--rank", str(rank)],
                self.folder / run.name / f"rank{rank}.log",
                rank_environment(rank, run.world, port) if run.job else {"CUDA_VISIBLE_DEVICES": "0"},
            )
            for rank in range(run.world)
        ]

    def run_all(self, runs: list[Run]) -> None:
        """All processes import side by side; then each run has the machine for itself."""
        ports = free_ports(len(runs))
        started = {run.name: self.workers(run, port) for run, port in zip(runs, ports, strict=True)}
        try:
            await_imports([worker for workers in started.values() for worker in workers], IMPORT_LIMIT_S)
            for run in runs:
                self.run_one(run, started[run.name])
        finally:
            for workers in started.values():
                for worker in workers:
                    worker.kill()

    def run_one(self, run: Run, workers: list[Worker]) -> None:
        left = self.end - time.monotonic()
        begun = time.monotonic()
        error = "not started: the time was spent"
        if left > 0:
            error = run_together(workers, min(RUN_LIMIT_S, left + GRACE_S), left)
        if error:
            self.problems[run.name] = error
        self.save()
        print(f"{run.name:18} {time.monotonic() - begun:5.1f} s {self.summary(run)} {error[-600:]}", flush=True)

    def found(self, run: Run) -> list[dict[str, Any]]:
        paths = [self.folder / run.name / f"rank{rank}.json" for rank in range(run.world)]
        return [json.loads(path.read_text()) for path in paths if path.exists()]

    def summary(self, run: Run) -> str:
        ranks = self.found(run)
        if not ranks:
            return ""
        parts = []
        for key in ("before_ms", "profiled_ms", "after_ms"):
            times = sorted(ranks[0][key])
            p50, p90 = times[len(times) // 2], times[int(0.9 * len(times))]
            parts.append(f"{key} n={len(times)} p50 {p50:.2f} p90/p50 {p90 / p50:.3f}")
        return "; ".join(parts)

    def save(self) -> None:
        records = [asdict(run) | {"ranks": self.found(run)} for run in self.runs if self.found(run)]
        result = {"machine": self.machine, "problems": self.problems, "runs": records}
        (self.out / "steps.json").write_text(json.dumps(result))
        self.pack(sorted(self.folder.glob(f"*/*{SUFFIX}")))

    def pack(self, paths: list[Path]) -> None:
        """Tar the traces into files of the size that may be brought back."""
        size, number = 0, 0
        bundles: dict[int, list[Path]] = {}
        for path in paths:
            if size + path.stat().st_size > TAR_LIMIT:
                size, number = 0, number + 1
            size += path.stat().st_size + 2048
            bundles.setdefault(number, []).append(path)
        for number, bundle in bundles.items():
            with tarfile.open(self.out / f"traces{number}.tar", "w") as tar:
                for path in bundle:
                    tar.add(path, str(path.relative_to(self.folder)))


def work(arguments: argparse.Namespace) -> None:
    """One process of one run: import what it needs, wait for the turn, record."""
    run = next(run for runs in SETS.values() for run in runs if run.name == arguments.worker)
    run = run if arguments.device == "cuda" else run.shrunk()
    if run.kind and run.kind not in PLAIN:
        from transformers import GPT2LMHeadModel, LlamaForCausalLM, MixtralForCausalLM  # noqa: F401
    folder = arguments.out / run.name
    (folder / f"rank{arguments.rank}.ready").touch()
    if not sys.stdin.readline():
        sys.exit("the recorder has gone")
    record(run, arguments.rank, folder, arguments.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files recorded")
    parser.add_argument("--set", choices=list(SETS), default="development")
    parser.add_argument("--budget-s", type=float, default=400, help="seconds after which no run is started")
    parser.add_argument("--only", nargs="*", help="names of runs")
    parser.add_argument("--dry-run-cpu", action="store_true", help="shrunken models on the CPU, to check the script")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    runs = [run for run in SETS[arguments.set] if not arguments.only or run.name in arguments.only]
    device = "cpu" if arguments.dry_run_cpu else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(runs, arguments.out, Path(folder), device, arguments.budget_s)
        recorder.run_all([run for run in runs if not run.job])
        with multi_process_service(device == "cuda"):
            recorder.run_all([run for run in runs if run.job])


if __name__ == "__main__":
    main()
