"""Worker processes that import first, wait for their turn, and are stopped when they take too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

MPS_CONTROL = "nvidia-cuda-mps-control"


class Worker:
    """A process that does one task once told to."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env={**os.environ, **(environment or {}), "PYTHONUNBUFFERED": "1"},
            )

    def ready(self) -> bool:
        return self.log.with_suffix(".ready").exists() or self.process.poll() is not None

    def go(self, seconds_left: float) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{seconds_left}\n")
            self.process.stdin.flush()
        except OSError:  # it has died already, which its exit status tells
            pass

    def kill(self) -> None:
        """End the process and what it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace").rstrip()[-1500:]


def await_imports(workers: Sequence[Worker], limit_s: float) -> None:
    """Wait until every worker is ready or has died, so that no import disturbs what is measured."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and not all(worker.ready() for worker in workers):
        time.sleep(0.1)


def run_together(workers: Sequence[Worker], limit_s: float, seconds_left: float) -> str:
    """Let the workers go and wait for all of them; returns what went wrong, or nothing."""
    end = time.monotonic() + limit_s
    for worker in workers:
        worker.go(seconds_left)
    error = ""
    while not error and any(worker.process.poll() is None for worker in workers):
        time.sleep(0.1)
        if time.monotonic() > end:
            error = f"stopped after {limit_s:.0f} s"
        elif any(worker.process.poll() for worker in workers):
            error = "a process failed"
            time.sleep(1)  # the others may fail of the same cause, and say so
    error = error or ("a process failed" if any(worker.process.poll() for worker in workers) else "")
    for worker in workers:
        worker.kill()
    tails = [worker.log_tail() for worker in workers if worker.process.returncode]
    return "\n".join([error, *tails]) if error else ""


@contextmanager
def multi_process_service(wanted: bool) -> Iterator[None]:
    """Let the kernels of several processes run on the GPU at once, as far as NVIDIA's service can be started."""
    started = wanted and _mps("-d") == 0
    if wanted:
        print(f"multi-process service: {'started' if started else 'not available'}", flush=True)
    try:
        yield
    finally:
        if started:
            _mps(commands="quit\n")


def _mps(*arguments: str, commands: str = "") -> int:
    """Run the service's control program; its output is not caught, as the daemon would keep the pipe open."""
    quiet = subprocess.DEVNULL
    try:
        command = [MPS_CONTROL, *arguments]
        done = subprocess.run(command, check=False, input=commands, text=True, stdout=quiet, stderr=quiet, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as problem:
        print(f"{MPS_CONTROL}: {problem}", flush=True)
        return 1
    return done.returncode
