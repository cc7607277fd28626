"""Fresh processes, what they took, and the environment of the peer.

Every case runs in a process of its own, so that no case profits from what another one imported, cached or freed.
This module imports neither numpy nor lumos: a child counts its parent's pages until it has started its own program,
so a large parent would show up in every peak.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
PEER_PACKAGES = ("HolisticTraceAnalysis==0.5.0", "pandas<3")  # 0.5.0's critical path does not run with pandas 3
_SAMPLE_S = 0.1
_LIMIT_S = 540.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Cost:
    """What one process took. On a machine that does other work too, `cpu` is what would be left without it."""

    wall: float
    cpu: float
    peak_mb: float
    answer: dict[str, Any]  # the JSON it printed; empty where it printed something else
    error: str = ""  # the last line it complained with, where it failed


def run(command: list[str], limit: float = _LIMIT_S) -> Cost:
    """Run a command to its end. The peak is that of the largest moment of its whole family of processes."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as complaints:
        begin = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, stderr=complaints, start_new_session=True)
        family = _Family(child.pid)
        timer = threading.Timer(limit, child.kill)
        timer.start()
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - begin
        timer.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)  # it is reaped: Popen need not look for it
        family.stop()
        peak = max(usage.ru_maxrss / 1024, family.peak_mb)
        cpu = max(usage.ru_utime + usage.ru_stime, sum(family.cpu.values()))
        error = _last_line(_all(complaints)) if child.returncode else ""
        return Cost(wall, cpu, peak, _json(_all(out)), f"stopped after {limit:.0f} s" if wall >= limit else error)


def best_of(times: int, command: list[str]) -> Cost:
    """The fastest of several runs: what the program needs, rather than what the machine was doing."""
    costs = [run(command) for _ in range(times)]
    return min(costs, key=lambda c: (bool(c.error), c.wall))


def inside(*arguments: str, python: str = sys.executable) -> list[str]:
    """The command that runs one function of speed_inside.py."""
    return [python, str(HERE / "speed_inside.py"), *arguments]


def timed_inside(cost: Cost) -> Cost:
    """The time that the process took of itself, for what leaves out its start and its loading."""
    return replace(cost, wall=cost.answer.get("seconds", cost.wall), cpu=cost.answer.get("cpu", cost.cpu))


def peer_python(folder: Path, say: Callable[[str], None]) -> str:
    """The interpreter of the peer's own environment, made where it is not there; '' where it cannot be had."""
    python = folder / "bin" / "python"
    try:
        if not python.exists():
            say(f"installing {' '.join(PEER_PACKAGES)} into {folder}")
            venv.create(folder, with_pip=True)
        if subprocess.run([python, "-c", "import hta"], capture_output=True, check=False).returncode:
            subprocess.run([python, "-m", "pip", "install", "-q", *PEER_PACKAGES], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"the peer is left out: {error}")
        return ""
    return str(python)


class _Family:
    """Looks, every so often, at a process and those it started: wait4 does not know those that others wait for."""

    def __init__(self, session: int) -> None:
        self.peak_mb = 0.0
        self.cpu: dict[str, float] = {}
        self._session, self._done = session, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            pages = 0
            for pid in _members(self._session):
                try:
                    pages += _private_pages(pid)
                    self.cpu[pid] = _cpu_seconds(pid)
                except (OSError, ValueError):
                    continue  # it ended while we looked
            self.peak_mb = max(self.peak_mb, pages * _PAGE / 2**20)


def _members(session: int) -> Iterator[str]:
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.getsid(int(entry)) == session:
                yield entry
        except OSError:
            continue  # it ended while we looked


def _private_pages(pid: str) -> int:
    """Resident pages that are not a file's: the libraries are the same for all."""
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return int(resident) - int(shared)


def _cpu_seconds(pid: str) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _all(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _json(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "no message"
