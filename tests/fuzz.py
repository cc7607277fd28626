"""Fuzzing: hostile input of every kind to every command, within limits of time and memory.

    python tests/fuzz.py --seconds 3600 --seed 7        # `make fuzz` does the same
    python tests/fuzz.py --case 7:pages:12              # that case again, with its traceback

A case is a seed, a surface and a number: they choose what `tests/fuzz_surfaces.py` makes and runs. Sound is an answer
with finite, plausible numbers, or a LumosError. Everything else is a finding: another exception, a case that takes too
long or too much memory, a process that dies, an absurd number, a name that became part of a page or a script, code
of the case that ran. What was wrong, and the files, are kept in a folder; a table at the end counts the cases.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from fuzz_command import MOST_SECONDS, ROOT, check_written, forget_peak, limits, peak, store
from fuzz_surfaces import SURFACES
from support import PATIENCE_S

MOST_OF_A_KIND = 2  # findings that are kept and printed
NAMES = {surface.__name__: surface for surface in SURFACES}


class Case(NamedTuple):
    """What repeats a case."""

    seed: int
    surface: str
    number: int

    def __str__(self) -> str:
        return f"{self.seed}:{self.surface}:{self.number}"


class Finding(NamedTuple):
    """A case that failed."""

    case: Case
    what: str
    trace: str

    @property
    def kind(self) -> str:
        """Findings of one kind have one cause, as a rule: the exception, and the line of the project that raised it."""
        places = [line.strip() for line in self.trace.splitlines() if "/lumos/" in line and ", line " in line]
        return f"{self.case.surface} {self.what.split(':')[0]} {places[-1] if places else self.what[:60]}"


class Tried(NamedTuple):
    """What became of a case."""

    seconds: float
    memory: int  # bytes that the process had at most, beyond what it had before
    finding: Finding | None


def try_case(case: Case, folder: Path, most_seconds: float = MOST_SECONDS) -> Tried:
    """One case in an empty folder."""
    began, before, finding = time.process_time(), forget_peak(), None
    try:
        with limits(folder, most_seconds), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # of numpy: overflow, invalid values
            NAMES[case.surface](random.Random(str(case)), folder)
        check_written(folder)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        what = "".join(traceback.format_exception_only(error)).strip().splitlines()[0][:300]
        finding = Finding(case, what, traceback.format_exc())
    return Tried(time.process_time() - began, max(0, peak() - before), finding)


def first_cases(surface: str, seed: int, count: int, most_seconds: float = MOST_SECONDS) -> list[Finding]:
    """What the first cases of a surface found, in this process."""
    found = []
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="case-", dir=store(), ignore_cleanup_errors=True) as folder:
            found.append(try_case(Case(seed, surface, number), Path(folder), most_seconds).finding)
    return [finding for finding in found if finding is not None]


# An hour of cases, in a process that is replaced when it dies


@dataclass
class Table:
    """What was tried, by surface."""

    cases: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, case: Case, tried: Tried) -> None:
        name = case.surface
        self.cases[name] += 1
        self.seconds[name] = max(self.seconds.get(name, 0.0), tried.seconds)
        self.memory[name] = max(self.memory.get(name, 0), tried.memory)
        if tried.finding is not None:
            self.findings[name] += 1
            self.kinds[tried.finding.kind] += 1

    def lines(self) -> Iterator[str]:
        yield f"{'surface':20} {'cases':>8} {'findings':>8} {'slowest, s':>10} {'most, MiB':>10}"
        for name in NAMES:
            yield (
                f"{name:20} {self.cases[name]:8,} {self.findings[name]:8} {self.seconds.get(name, 0.0):10.1f} "
                f"{self.memory.get(name, 0) >> 20:10,}"
            )
        yield f"{'all':20} {self.cases.total():8,} {self.findings.total():8}"


def cases(seed: int, done: Counter[str], only: str) -> Iterator[Case]:
    """The cases of a seed after those that were done, without end."""
    order = random.Random(f"{seed} {done.total()}")
    chosen = {surface.__name__: weight for surface, weight in SURFACES.items() if only in ("", surface.__name__)}
    counts = Counter(done)
    while True:
        (name,) = order.choices(list(chosen), list(chosen.values()))
        yield Case(seed, name, counts[name])
        counts[name] += 1


def _work(pipe: Any, kept: Path, seed: int, done: Counter[str], only: str) -> None:
    """Try cases, saying so before and after each, until the pipe is closed."""
    kinds: Counter[str] = Counter()
    try:
        for case in cases(seed, done, only):
            folder = Path(tempfile.mkdtemp(prefix="case-", dir=store()))
            pipe.send((case, str(folder), None))
            tried = try_case(case, folder)
            if tried.finding is not None:
                kinds[tried.finding.kind] += 1
                if kinds[tried.finding.kind] <= MOST_OF_A_KIND:
                    keep(tried.finding, folder, kept)
            shutil.rmtree(folder, ignore_errors=True)
            pipe.send((case, "", tried))
    except BrokenPipeError:
        return


def fuzz(seed: int, seconds: float, kept: Path, only: str = "") -> Table:
    """Try cases until the time is over; a process that dies, or does not end a case, is a finding."""
    table, end = Table(), time.monotonic() + seconds
    os.environ["TMPDIR"] = str(store())  # of processes, whose folders are removed with ours
    while time.monotonic() < end:
        ours, theirs = get_context("spawn").Pipe()
        worker = get_context("spawn").Process(target=_work, args=(theirs, kept, seed, table.cases, only))
        worker.start()
        theirs.close()
        case, folder = None, ""
        try:
            while time.monotonic() < end and ours.poll(PATIENCE_S):
                case, folder, tried = ours.recv()
                if tried is not None:
                    table.add(case, tried)
                    case = None
                    if table.cases.total() % 1000 == 0:
                        print(f"{table.cases.total():,} cases, {table.findings.total()} findings", file=sys.stderr)
            what = "" if time.monotonic() >= end else "the process hangs in code that is not Python's"
        except EOFError:
            worker.join()
            what = f"the process died with exit code {worker.exitcode}"
        except KeyboardInterrupt:  # the table of what was tried is shown all the same
            end, what = 0.0, ""
        worker.kill()
        worker.join()
        if case is not None and what:
            finding = Finding(case, what, "")
            table.add(case, Tried(0.0, 0, finding))
            keep(finding, Path(folder), kept)
    return table


def keep(finding: Finding, folder: Path, kept: Path) -> None:
    place = kept / str(finding.case).replace(":", "-")
    shutil.copytree(folder, place, dirs_exist_ok=True, symlinks=True, ignore_dangling_symlinks=True)
    (place / "finding.txt").write_text(f"{finding.case}: {finding.what}\n\n{finding.trace}", errors="replace")
    print(f"{finding.case} {finding.what!a}", flush=True)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    options.add_argument("--seconds", type=float, default=3600.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--keep", type=Path, default=ROOT / "out/fuzz", help="a folder for cases that fail")
    options.add_argument("--case", default="", help="SEED:SURFACE:NUMBER of one case to repeat")
    options.add_argument("--surface", default="", choices=["", *NAMES])
    chosen = options.parse_args()
    if chosen.case:
        seed, surface, number = chosen.case.split(":")
        folder = Path(tempfile.mkdtemp(prefix="case-", dir=store()))
        finding = try_case(Case(int(seed), surface, int(number)), folder).finding
        if finding is not None:
            keep(finding, folder, chosen.keep)
        print(finding.trace if finding else "sound")
        return finding is not None
    table = fuzz(chosen.seed, chosen.seconds, chosen.keep, chosen.surface)
    print("\n".join(table.lines()))
    return bool(table.findings)


if __name__ == "__main__":
    sys.exit(main())
