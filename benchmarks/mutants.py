"""Mutation testing: which small changes of the code no specification notices.

    python benchmarks/mutants.py [PATH …] [--count 40] [--jobs 2] [--seed 0] [-o docs/testing.md]

Of all mutants of a package (operators swapped, comparisons flipped, numbers changed by 20 % or 1, results dropped)
`--count` are drawn, and each is put into a copy of the repository in which the specifications of its package run until
one fails. Prints the survivors and the share of killed mutants by package; `-o` writes the page. PATHs (files or
folders of src/lumos) are taken instead of PACKAGES.

The copy has no shared measurements beside it, and pages of documentation are not among the specifications: a printed
example that changes says nothing about what is right.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from queue import Queue
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src/lumos"
PACKAGES = {  # what is mutated, and how many mutants each row of the table is drawn from
    "cost": ("cost",),
    "program": ("program",),
    "schedules": ("schedules",),
    "step": ("step",),
    "prediction": ("prediction/power.py", "prediction/interval.py", "prediction/bill.py"),
    "change": ("change/change.py", "change/calibration.py", "change/cut.py"),
}
SPECIFICATIONS = {  # of a folder or file, the most specific name first; what fails soonest comes first
    "cost/energy.py": ("test_costs.py", "test_energy.py"),
    "cost": ("test_costs.py", "test_accuracy.py", "test_forecast.py"),
    "memory": ("test_memory.py", "test_time_and_memory.py", "test_accuracy.py"),
    "program": ("test_program.py", "test_memory.py", "test_time_and_memory.py", "test_accuracy.py"),
    "schedules": ("test_schedules.py", "test_time_and_memory.py", "test_memory.py"),
    "step": ("test_time_and_memory.py", "test_schedules.py", "test_step_trace.py"),
    "prediction/interval.py": ("test_forecast.py", "test_accuracy.py"),
    "prediction": ("test_energy.py",),
    "change": ("test_changes.py", "test_cpu_runs.py"),
}
TIMED = "not well_under_a_second"  # tests of speed fail on a busy machine, whatever the mutant
PRELOADED = ["pytest", "hypothesis.extra.pytestplugin", "numpy", "numba", "polars", "pydantic", "msgspec", "typer"]
LEFT_OUT = (".git", ".venv", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "dist", "out")
SWAPPED: dict[type[ast.AST], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*",
    ast.Lt: ">=", ast.LtE: "<", ast.Gt: "<=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.And: "or", ast.Or: "and",
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "sum": "max", "any": "all", "all": "any", "ceil": "floor"}


EQUIVALENT = {  # (beginning of the file's name, part of the changed line): why it does what the code does
    ("", "strict=⟦True → False⟧"): "a guard: both are equally long",
    ("cost/operator_model.py", "_MOST_BYTES = "): "a limit that no model file comes near",
    (
        "schedules/zero_bubble_v.py",
        "min(microbatches, ⟦3 → 4⟧ * pp)",
    ): "beyond 3 · pp micro-batches a stage holds no more",
    ("schedules/interleaved.py", "chunks = (2, ⟦1 → 2⟧ << 14)"): "a limit that no model comes near",
    ("schedules/interleaved.py", "chunks = (2, 1 << ⟦14 → 15⟧)"): "a limit that no model comes near",
    ("change/calibration.py", "np.where(both, modelled, ⟦1.0 → 1.2⟧)"): "avoids a division by zero; not used",
    ("cost/energy.py", "max(operator.tensor_bytes, ⟦1.0 → 1.2⟧)"): "avoids the logarithm of zero",
    ("cost/operator_model.py", "file.read(_MOST_BYTES + ⟦1 → 2⟧)"): "one byte more shows that a file is too large",
    ("program/rank_layout.py", "if stride⟦ <= → < ⟧self.domain else 1"): "both branches give 1 where they are equal",
    ("step/step.py", "if s.parallel.pp > 1 else ⟦0.0 → 1.0⟧"): "one stage has no links",
}
PAGE = """# Tests

Written by `python benchmarks/mutants.py -o docs/testing.md` (seed {seed}). The tests are specifications: laws that hold
for every setup, values computed by hand from a stated formula, and figures that were measured or published. To see
what they leave open, {count} small changes were made to the code, one at a time: an operator swapped, a comparison
reversed, a number changed by one or by 20 %, a result dropped. A change is found if a specification of its package
fails.

Examples in the documentation do not count: a printed number that changes does not say which one is right. Neither do
tests that need the shared measurements. Equivalent changes do the same as the code does, so that no test can find them.

{table}
{survivors}"""


class Mutant(NamedTuple):
    """A change of one place: the text between two offsets of a file, and what stands there instead."""

    path: Path
    line: int
    begin: int
    end: int
    text: str
    before: str

    @property
    def place(self) -> str:
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def change(self) -> str:
        """The line with what was replaced and what replaces it, as ⟦before → after⟧."""
        source = self.path.read_bytes()
        begin, end = source.rfind(b"\n", 0, self.begin) + 1, source.find(b"\n", self.end)
        changed = f"⟦{self.before} → {self.text}⟧".encode()
        return " ".join((source[begin : self.begin] + changed + source[self.end : end]).decode().split())

    @property
    def reason(self) -> str:
        """Why it does what the code does, if it is known to."""
        known = (why for (file, part), why in EQUIVALENT.items() if self.place.startswith(file) and part in self.change)
        return next(known, "")


# ---------------------------------------------------------------------- mutants of a file
class _Finder(ast.NodeVisitor):
    """Walks a file and notes all its mutants; what is only for readers or for type checkers is passed over."""

    def __init__(self, path: Path) -> None:
        self.path, self.source = path, path.read_bytes()
        starts = [0]
        for line in self.source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self.starts, self.found = starts, list[Mutant]()

    def _span(self, node: ast.AST) -> tuple[int, int]:
        begin = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return begin, end

    def _note(self, node: ast.AST, begin: int, end: int, text: str) -> None:
        line = self.source[:begin].count(b"\n") + 1
        self.found.append(Mutant(self.path, line, begin, end, text, self.source[begin:end].decode()))

    def _swap_between(self, left: ast.AST, right: ast.AST, operator: ast.AST) -> None:
        """The operator is what stands between two operands, parentheses and blanks aside."""
        begin, end = self._span(left)[1], self._span(right)[0]
        between = self.source[begin:end].decode()
        word = between.strip("() \n\t\\")
        text = SWAPPED.get(type(operator))
        if text and "#" not in between and word:
            self._note(left, begin, end, between.replace(word, text, 1))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(isinstance(part, ast.JoinedStr) for part in (node.left, node.right)):
            self._swap_between(node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._swap_between(left, right, node.op)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self._swap_between(left, right, operator)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            begin, end = self._span(node)
            self._note(node, begin, end, f"({self.source[slice(*self._span(node.operand))].decode()})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._note(node, *self._span(node), str(not value))
        elif isinstance(value, int):
            self._note(node, *self._span(node), str(value + 1))
        elif isinstance(value, float):
            self._note(node, *self._span(node), repr(value * 1.2 if value else 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in NAMES:
            self._note(node, *self._span(node.func), NAMES[name])
        if name != "field":
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant | ast.JoinedStr):
            self._note(node, *self._span(node.value), "None")
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.args.defaults, *node.args.kw_defaults, *node.body):
            if part is not None:
                self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Wording is no specification's business here."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """The same."""


def mutants_of(path: Path) -> list[Mutant]:
    finder = _Finder(path)
    finder.visit(ast.parse(finder.source))
    return [mutant for mutant in finder.found if _compiles(mutant)]


def mutated(mutant: Mutant, source: bytes) -> bytes:
    return source[: mutant.begin] + mutant.text.encode() + source[mutant.end :]


def _compiles(mutant: Mutant) -> bool:
    try:
        compile(mutated(mutant, mutant.path.read_bytes()), str(mutant.path), "exec")
    except SyntaxError:
        return False
    return True


# ---------------------------------------------------------------------- running them
def specifications(path: Path) -> tuple[str, ...]:
    """The test files that say what a file of the package has to do."""
    inside = path.relative_to(PACKAGE).as_posix()
    return next(tests for prefix, tests in SPECIFICATIONS.items() if inside.startswith(prefix))


def run(folder: Path, tests: tuple[str, ...], limit_s: float, keep_bytecode: bool = False) -> tuple[str, float]:
    """("" or what failed, seconds) of the tests in a copy of the repository."""
    began = time.monotonic()
    log = folder.parent / "log"
    process = get_context("forkserver").Process(target=_pytest, args=(folder, tests, log, keep_bytecode))
    process.start()
    process.join(limit_s)
    if process.exitcode is None:
        os.killpg(process.ident or 0, signal.SIGKILL)
        process.join()
        return "time limit", time.monotonic() - began
    lines = log.read_text(errors="replace").splitlines()
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "failed")
    return failed[:150] if process.exitcode else "", time.monotonic() - began


def _pytest(folder: Path, tests: tuple[str, ...], log: Path, keep_bytecode: bool) -> None:
    """In a fork of a process that has imported everything but Lumos, which saves seconds for every mutant."""
    os.setsid()
    os.chdir(folder)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path.insert(0, str(folder / "src"))
    os.environ["PYTHONPATH"] = str(folder / "src")
    sys.dont_write_bytecode = not keep_bytecode
    if sys.dont_write_bytecode:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-k", TIMED]
    os._exit(int(pytest.main([*options, *(f"tests/{name}" for name in tests)])))


def copied(source: Path, target: Path, left_out: tuple[str, ...] = ()) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*left_out), symlinks=True)
    return target


def judge(mutant: Mutant, copies: Queue[Path], limits: dict[tuple[str, ...], float]) -> str:
    """What killed a mutant; "" where it survives."""
    tests, folder = specifications(mutant.path), copies.get()
    target = folder / mutant.path.relative_to(ROOT)
    source, status = target.read_bytes(), target.stat()
    try:
        target.write_bytes(mutated(mutant, source))
        return run(folder, tests, limits[tests])[0]
    finally:
        target.write_bytes(source)
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))  # its bytecode is valid again
        copies.put(folder)


def drawn(paths: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of every package, or of the files that were asked for."""
    chosen = []
    for places in [paths] if paths else list(PACKAGES.values()):
        files = sorted(set(_files(places)))
        mutants = [mutant for path in files for mutant in mutants_of(path)]
        some = random.Random(seed).sample(mutants, min(count or len(mutants), len(mutants)))
        print(f"{len(some)} of {len(mutants)} mutants in {' '.join(places)}", flush=True)
        chosen += sorted(some)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="PATH")
    parser.add_argument("--count", type=int, default=40, help="mutants of each package; 0 for all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--journal", type=Path, help="verdicts, kept so that a run can be resumed")
    parser.add_argument("-o", "--output", type=Path, help="write the page, docs/testing.md")
    arguments = parser.parse_args()
    chosen = drawn(arguments.paths, arguments.count, arguments.seed)
    known = Journal(arguments.journal)
    run_all([mutant for mutant in chosen if known.key(mutant) not in known.verdicts], known, arguments.jobs)
    verdicts = [known.verdicts[known.key(mutant)] for mutant in chosen]
    print("\n" + table(chosen, verdicts))
    if arguments.output:
        arguments.output.write_text(page(chosen, verdicts, arguments.seed))


class Journal:
    """Verdicts of mutants, on disk where a file is named; those of a file that has changed since do not count."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path and path.exists() else []
        self.verdicts: dict[str, str] = dict(json.loads(line) for line in lines)

    @staticmethod
    def key(mutant: Mutant) -> str:
        source = hashlib.sha256(mutant.path.read_bytes()).hexdigest()
        return f"{mutant.path.relative_to(ROOT)} {source[:16]} {mutant.begin}-{mutant.end} {mutant.text}"

    def add(self, mutant: Mutant, verdict: str) -> None:
        self.verdicts[self.key(mutant)] = verdict
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps([self.key(mutant), verdict]) + "\n")


def run_all(mutants: list[Mutant], journal: Journal, jobs: int) -> None:
    """Judge mutants, each in one of `jobs` copies of the repository."""
    get_context("forkserver").set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(jobs) as pool:
        first = copied(ROOT, Path(temporary) / "0" / "lumos", LEFT_OUT)
        limits = _limits(first, {specifications(mutant.path) for mutant in mutants})
        copies: Queue[Path] = Queue()
        copies.put(first)
        for number in range(1, jobs):  # with the bytecode and the compiled loops of the first
            copies.put(copied(first, Path(temporary) / str(number) / "lumos"))
        verdicts = pool.map(lambda mutant: judge(mutant, copies, limits), mutants)
        for number, (mutant, verdict) in enumerate(zip(mutants, verdicts, strict=True), 1):
            journal.add(mutant, verdict)
            _show(number, mutant, verdict)


def _files(paths: Iterable[str]) -> Iterator[Path]:
    for name in paths:
        path = PACKAGE / name if (PACKAGE / name).exists() else Path(name).resolve()
        yield from path.rglob("*.py") if path.is_dir() else [path]


def _limits(folder: Path, suites: set[tuple[str, ...]]) -> dict[tuple[str, ...], float]:
    """Several times as long as the specifications take; they must pass before anything is changed."""
    seconds = {}
    for name in sorted({name for tests in suites for name in tests}):
        failed, seconds[name] = run(folder, (name,), 1800, keep_bytecode=True)
        if failed:
            sys.exit(f"{name} fails without any mutant: {failed}")
        print(f"{seconds[name]:5.0f} s  {name}", flush=True)
    return {tests: 4 * sum(seconds[name] for name in tests) + 30 for tests in suites}  # other mutants run beside it


# ---------------------------------------------------------------------- showing them
def _show(number: int, mutant: Mutant, verdict: str) -> None:
    place = f"{mutant.place}:{mutant.line}"
    print(f"{number:4d} {'killed  ' if verdict else 'SURVIVED'} {place}  {mutant.change}  {verdict}", flush=True)


def table(mutants: list[Mutant], verdicts: list[str]) -> str:
    """Of every package: mutants, how many were found, how many are equivalent, and how many nobody noticed."""
    rows = ["| package | changes | found | equivalent | not found |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(mutant.place.partition("/")[0] for mutant in mutants):
        own = [pair for pair in zip(mutants, verdicts, strict=True) if pair[0].place.startswith(name + "/")]
        killed = sum(bool(verdict) for _, verdict in own)
        equal = sum(not verdict and mutant.reason != "" for mutant, verdict in own)
        share = 100 * killed / len(own)
        rows.append(f"| {name} | {len(own)} | {killed} ({share:.0f} %) | {equal} | {len(own) - killed - equal} |")
    return "\n".join(rows)


def page(mutants: list[Mutant], verdicts: list[str], seed: int) -> str:
    alive = [mutant for mutant, verdict in zip(mutants, verdicts, strict=True) if not verdict]
    rows = "".join(f"| `{mutant.place}` | `{mutant.change}` | {mutant.reason} |\n" for mutant in alive).replace(
        "||", ""
    )
    survivors = f"\n## Changes that were not found\n\n| file | change | equivalent because |\n|---|---|---|\n{rows}"
    return PAGE.format(
        seed=seed, count=len(mutants), table=table(mutants, verdicts), survivors=survivors if alive else ""
    )


if __name__ == "__main__":
    main()
