"""Record jobs of several ranks with PyTorch's execution traces, from which other tools make Chakra files.

    python3 calibration/execution_traces_h200.py --out DIR [--budget-s 200]

Ranks share the GPU (NCCL over loopback sockets, under MPS). Of every rank of a job:

    RUN/rankR.json                     milliseconds of clean steps, and which rank was made slow
    RUN/rankR.with_et.pt.trace.json.gz one step as the profiler sees it
    RUN/rankR.et.json.gz               the execution trace of the same step

All are packed into tracesN.tar. It needs torch with CUDA; --dry-run-cpu runs shrunken models without a GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ExecutionTraceObserver, schedule

from measure import STANDARD, clean_steps, save_trace
from models import Shape
from multirank import Job, join_job, rank_environment
from processes import Worker, await_imports, multi_process_service, run_together
from record_h200 import free_ports
from step_times_h200 import Run, rank_step

WARMUP, CLEAN, PROFILER_WARMUP = 6, 10, 2
RUN_LIMIT_S, IMPORT_LIMIT_S, TAR_LIMIT = 60.0, 90.0, 15_500_000


def _run(name: str, mode: str, world: int, shape: Shape, microbatches: int = 1) -> Run:
    return Run(name, "judge", job=Job(name, mode, world, shape, microbatches))


_SMALL, _WIDE = Shape(4, 768, 2048, 12, 8192, 512, 2), Shape(6, 1024, 2816, 16, 16000, 768, 2)
RUNS = [
    _run("ddp2_even", "ddp", 2, _WIDE),
    replace(_run("ddp2_pause", "ddp", 2, _WIDE), slow_rank=0, slow_host_ms=9.0),
    replace(_run("ddp3_work", "ddp", 3, _SMALL), slow_rank=2, slow_matmuls=250),
    _run("fsdp2_even", "fsdp", 2, _WIDE),
    replace(_run("fsdp3_pause", "fsdp", 3, _SMALL), slow_rank=1, slow_host_ms=12.0),
    _run("tp2_even", "tp", 2, _WIDE),
    replace(_run("tp2_pause", "tp", 2, _SMALL), slow_rank=1, slow_host_ms=7.0),
    _run("pp2_even", "pp", 2, _WIDE, microbatches=4),
    _run("pp4_even", "pp", 4, replace(_SMALL, layers=8), microbatches=6),
]


def record(run: Run, rank: int, folder: Path, device: str) -> None:
    """Train as one rank of `run`; the first recorded step has both traces."""
    join_job(device)
    step = rank_step(run, rank, device)
    seconds = clean_steps(step, CLEAN, WARMUP)
    with tempfile.TemporaryDirectory() as name:
        raw = Path(name) / "et.json"
        observer = ExecutionTraceObserver().register_callback(str(raw))
        plan = schedule(wait=0, warmup=PROFILER_WARMUP, active=1, repeat=1)
        with STANDARD.profiler(schedule=plan, execution_trace_observer=observer) as profiler:
            for _ in range(PROFILER_WARMUP + 1):
                step()
                profiler.step()
        save_trace(profiler, folder / f"rank{rank}.with_et.pt.trace.json.gz")
        observer.unregister_callback()
        packed = gzip.compress(raw.read_bytes(), compresslevel=9, mtime=0)
    (folder / f"rank{rank}.et.json.gz").write_bytes(packed)
    said = {"step_ms": [round(1e3 * s, 4) for s in seconds], "rank": rank, "slow_rank": run.slow_rank}
    (folder / f"rank{rank}.json").write_text(json.dumps(said))
    torch.distributed.barrier()
    os._exit(0)  # all is on disk, and tearing NCCL down may hang


def workers(run: Run, port: int, folder: Path, device: str) -> list[Worker]:
    command = [str(Path(__file__)), "--worker", run.name, "--out", str(folder), "--device", device]
    return [
        Worker(
            [*command, "--rank", str(rank)],
            folder / run.name / f"rank{rank}.log",
            rank_environment(rank, run.world, port),
        )
        for rank in range(run.world)
    ]


def record_all(out: Path, folder: Path, device: str, budget_s: float) -> None:
    """All processes import side by side; then each job has the machine for itself."""
    end = time.monotonic() + budget_s
    started = {
        run.name: workers(run, port, folder, device) for run, port in zip(RUNS, free_ports(len(RUNS)), strict=True)
    }
    try:
        await_imports([worker for some in started.values() for worker in some], IMPORT_LIMIT_S)
        for run in RUNS:
            begun, left = time.monotonic(), end - time.monotonic()
            error = run_together(started[run.name], min(RUN_LIMIT_S, left), left) if left > 0 else "no time left"
            found = sorted((folder / run.name).glob("rank*.json"))
            median = sorted(json.loads(found[0].read_text())["step_ms"])[CLEAN // 2] if found else 0.0
            print(f"{run.name:12} {time.monotonic() - begun:5.1f} s, step {median:.2f} ms {error[-600:]}", flush=True)
            pack(out, folder)
    finally:
        for some in started.values():
            for worker in some:
                worker.kill()


def pack(out: Path, folder: Path) -> None:
    """Tar what there is into files of the size that may be brought back."""
    bundles: list[list[Path]] = [[]]
    size = 0
    for path in sorted(p for p in folder.glob("*/*") if p.name.endswith((".gz", ".json"))):
        if size + path.stat().st_size > TAR_LIMIT:
            bundles, size = [*bundles, []], 0
        bundles[-1].append(path)
        size += path.stat().st_size + 2048
    for number, bundle in enumerate(bundles):
        with tarfile.open(out / f"traces{number}.tar", "w") as tar:
            for path in bundle:
                tar.add(path, str(path.relative_to(folder)))


def work(arguments: argparse.Namespace) -> None:
    """One process: import what it needs, wait for the turn, record."""
    run = next(run for run in RUNS if run.name == arguments.worker)
    run = run if arguments.device == "cuda" else run.shrunk()
    folder = arguments.out / run.name
    (folder / f"rank{arguments.rank}.ready").touch()
    if not sys.stdin.readline():
        sys.exit("the recorder has gone")
    record(run, arguments.rank, folder, arguments.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files recorded")
    parser.add_argument("--budget-s", type=float, default=200, help="seconds after which no job is started")
    parser.add_argument("--dry-run-cpu", action="store_true", help="shrunken models on the CPU, to check the script")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = "cpu" if arguments.dry_run_cpu else "cuda"
    with tempfile.TemporaryDirectory() as folder, multi_process_service(device == "cuda"):
        record_all(arguments.out, Path(folder), device, arguments.budget_s)


if __name__ == "__main__":
    main()
