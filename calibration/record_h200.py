"""Record on one GPU what the profiler and the launch queue cost, and traces of small training runs.

    python3 calibration/record_h200.py --out DIR

In this order, each task in a process of its own, so that none inherits another's profiler or failure:
  queue       how many launches the host may be ahead of the GPU                     -> queue.json
  micro       what the profiler adds to single calls and kernels                     -> results.json, "micro"
  multirank   jobs of 2 to 4 ranks that share the GPU                                -> multirank.tar
  single      a model's step without the profiler, with it, and without it again     -> single.tar, results.json

All files are brought up to date after every task. No task is started once --budget-s is spent.
It needs torch with CUDA and transformers; --dry-run-cpu runs shrunken models without a GPU, to check the script.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import multirank
import single
from processes import Worker, await_imports, multi_process_service, run_together

TAR_LIMIT = 14_500_000
LAUNCHES_LIMIT_S = 60
GRACE_S = 60  # what a task may take beyond the budget
MULTIRANK_SHARE = 0.55  # of the budget, after which no job is started, so that hanging ones leave time for the rest
IMPORT_LIMIT_S = 60
WORKER = Path(__file__).with_name("worker.py")


def first_line_with(path: str, word: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if word in line), "")


def machine() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, check=False, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    gpu, _, driver = answer.partition(",")
    return {
        "gpu": gpu,
        "driver": driver.strip(),
        "cpu": first_line_with("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Recorder:
    """Runs the tasks in turn, within the budget, and keeps the files in `out` up to date."""

    def __init__(self, out: Path, folder: Path, device: str, budget_s: float) -> None:
        self.out, self.folder, self.device, self.budget_s = out, folder, device, budget_s
        self.started = time.monotonic()
        self.machine = machine()
        self.problems: dict[str, str] = {}
        print(json.dumps(self.machine), flush=True)

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def worker(self, task: str, environment: Mapping[str, str] | None = None) -> Worker:
        command = [str(WORKER), task, str(self.folder), self.device]
        return Worker(command, self.folder / f"{task}.log", environment)

    def run(self, task: str, workers: list[Worker], limit_s: float, until_s: float) -> None:
        """Run one task, unless it is too late; note what went wrong with it, and save what there is."""
        began = self.elapsed()
        if began >= until_s:
            self.problems[task] = "not started: the time was spent"
            return
        left = self.budget_s - began
        error = run_together(workers, min(limit_s, left + GRACE_S), left)
        if error:
            self.problems[task] = error
        self.save()
        print(f"[{self.elapsed():5.0f} s] {task}: {self.elapsed() - began:.1f} s {error[-800:] or 'ok'}", flush=True)

    def run_in_turn(self, tasks: Mapping[str, list[Worker]], limits: Mapping[str, float], until_s: float) -> None:
        """Run tasks whose workers have been started all at once, so that they import side by side."""
        try:
            await_imports([worker for workers in tasks.values() for worker in workers], IMPORT_LIMIT_S)
            for task, workers in tasks.items():
                self.run(task, workers, limits[task], until_s)
        finally:
            for workers in tasks.values():
                for worker in workers:
                    worker.kill()

    def run_alone(self, limits: Mapping[str, float]) -> None:
        self.run_in_turn({task: [self.worker(task)] for task in limits}, limits, self.budget_s)

    def run_jobs(self) -> None:
        tasks, limits = {}, {}
        for job, port in zip(multirank.JOBS, free_ports(len(multirank.JOBS)), strict=True):
            task = f"multirank/{job.name}"
            environments = [multirank.rank_environment(rank, job.world, port) for rank in range(job.world)]
            tasks[task] = [self.worker(f"{task}/rank{rank}", each) for rank, each in enumerate(environments)]
            limits[task] = multirank.LIMIT_S
        self.run_in_turn(tasks, limits, MULTIRANK_SHARE * self.budget_s)

    def run_launches(self) -> None:
        tasks = ["queue", "micro"] if self.device == "cuda" else ["micro"]
        self.run_alone(dict.fromkeys(tasks, LAUNCHES_LIMIT_S))

    def run_multirank(self) -> None:
        with multi_process_service(self.device == "cuda"):
            self.run_jobs()

    def run_single(self) -> None:
        self.run_alone({f"single/{case.name}": case.limit_s for case in single.CASES})

    def run_all(self) -> None:
        for part in (self.run_launches, self.run_multirank, self.run_single):
            try:
                part()
            except Exception:  # whatever it is, the other parts are still worth recording
                self.problems[part.__name__] = traceback.format_exc()

    def records(self, pattern: str) -> dict[str, Any]:
        """The records under the folder that match, by their path without the ending."""
        paths = sorted(self.folder.glob(pattern))
        return {str(path.relative_to(self.folder).with_suffix("")): json.loads(path.read_text()) for path in paths}

    def save(self) -> None:
        results = {
            "machine": self.machine,
            "elapsed_s": self.elapsed(),
            "problems": self.problems,
            "micro": self.records("micro.json").get("micro"),
            "single": {record["name"]: record for record in self.records("single/*.json").values()},
        }
        (self.out / "results.json").write_text(json.dumps(results, indent=1))
        (self.out / "queue.json").write_text(json.dumps(self.records("queue.json").get("queue"), indent=1))
        traces = sorted((self.folder / "single").glob("*.gz"), key=lambda path: (".stack." in path.name, path.name))
        self.pack("single.tar", self.folder / "single", traces)
        jobs = self.folder / "multirank"
        self.pack("multirank.tar", jobs, sorted([*jobs.glob("*/*.gz"), *jobs.glob("*/*.json")]))

    def pack(self, name: str, root: Path, files: list[Path]) -> None:
        """Tar the files up to the size that may be brought back; what is left out is a problem noted."""
        with tarfile.open(self.out / name, "w") as tar:
            for path in files:
                if tar.offset + path.stat().st_size > TAR_LIMIT:
                    self.problems[f"{name}:{path.name}"] = "left out: the tar file would be too large"
                else:
                    tar.add(path, str(path.relative_to(root)))

    def print_summary(self) -> None:
        for name, found in (self.records("queue.json").get("queue") or {}).get("experiments", {}).items():
            rounds = [(each["first_blocked"], each["longest"]) for each in found.get("rounds", [])]
            print(f"queue {name:20} first and longest blocked call {rounds}")
        micro = self.records("micro.json").get("micro") or {}
        for part in ("host_us_per_call", "gpu_us_per_kernel"):
            for mode, loops in micro.get(part, {}).items():
                print(part, mode, {name: round(loop["us_median"], 2) for name, loop in loops.items()})
        for name, record in self.records("multirank/*/rank*.json").items():
            print(f"{name:32}", step_line(record, "step_s_median", "step_s_after"))
        for record in self.records("single/*.json").values():
            print(f"{record['name']:32}", step_line(record, "clean_before_median", "clean_after"))
        for task, problem in self.problems.items():
            print(f"PROBLEM {task}:", *dict.fromkeys([problem.splitlines()[0], problem.splitlines()[-1]]))
        for path in sorted(self.out.iterdir()):
            print(f"{path.stat().st_size:>10} {path.name}")
        print(f"{self.elapsed():.0f} s in all", flush=True)


def step_line(record: Mapping[str, Any], before: str, after: str) -> str:
    """Milliseconds of a step before, while and after it is profiled."""
    profiled, later = record.get("profiled_step_s", []), record.get(after, [])
    times = [record[before], *profiled[2:4], *sorted(later)[len(later) // 2 :][:1]]
    return " ".join(f"{1e3 * seconds:8.2f}" for seconds in times) + " ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files recorded")
    parser.add_argument("--budget-s", type=float, default=430, help="seconds after which no task is started")
    parser.add_argument("--dry-run-cpu", action="store_true", help="shrunken models on the CPU, to check the script")
    arguments = parser.parse_args()
    device = "cpu" if arguments.dry_run_cpu else "cuda"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(arguments.out, Path(folder), device, arguments.budget_s)
        try:
            recorder.run_all()
        finally:
            recorder.save()
            recorder.print_summary()


if __name__ == "__main__":
    main()
