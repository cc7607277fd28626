"""Mutation testing: which small changes of the code no specification notices.

    python benchmarks/mutants.py [--count 100] [--jobs 2] [--seed 0] [PATH …]

PATHs are files or folders of src/lumos (default: cost, program, schedules, prediction, change). Of all mutants of
their files (operators swapped, comparisons flipped, numbers changed by 20 % or 1, results dropped) `--count` are
drawn, and each is put into a copy of the repository in which the specifications of its folder run until one fails.
Prints the survivors and the share of killed mutants by file. The copy has no shared measurements beside it, and pages
of documentation are not among the specifications: a printed example that changes says nothing about what is right.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src/lumos"
FOLDERS = ("cost", "program", "schedules", "prediction", "change")
ALL = ("test_forecast.py", "test_laws.py", "test_search.py", "test_scoring.py", "test_accuracy.py")
SPECIFICATIONS = {  # of a folder or file, the most specific name first; what fails soonest comes first
    "cost/energy.py": ("test_costs.py", "test_energy.py", "test_calibration.py"),
    "cost/in_step.py": ("test_costs.py", "test_forecast.py", "test_calibration.py"),
    "cost": ("test_costs.py", "test_forecast.py", "test_sampling.py", "test_accuracy.py"),
    "program/memory": ("test_memory.py", "test_time_and_memory.py", "test_accuracy.py"),
    "program": ("test_program.py", "test_time_and_memory.py", "test_memory.py", *ALL),
    "schedules": ("test_schedules.py", "test_time_and_memory.py", *ALL),
    "prediction/power.py": ("test_energy.py", "test_costs.py"),
    "prediction/bill.py": ("test_energy.py",),
    "prediction": ("test_forecast.py", "test_schedules.py", "test_energy.py", *ALL[1:]),
    "change/infer": ("test_inference.py", "test_changes.py"),
    "change": ("test_changes.py", "test_inference.py"),
}
LEFT_OUT = (".git", ".venv", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "dist")
SWAPPED: dict[type[ast.AST], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*",
    ast.Lt: ">=", ast.LtE: "<", ast.Gt: "<=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.And: "or", ast.Or: "and",
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "sum": "max", "any": "all", "all": "any", "ceil": "floor"}


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
        return f"{self.path.relative_to(PACKAGE)}:{self.line}"


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
        if node.value is not None and not isinstance(node.value, ast.Constant):
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
def specifications(path: Path) -> list[str]:
    """The test files that say what a file of the package has to do."""
    inside = path.relative_to(PACKAGE).as_posix()
    names = next((tests for prefix, tests in SPECIFICATIONS.items() if inside.startswith(prefix)), ALL)
    return [f"tests/{name}" for name in dict.fromkeys(names) if (ROOT / "tests" / name).is_file()]


def run(folder: Path, tests: list[str], limit_s: float) -> tuple[str, float]:
    """("" or what failed, seconds) of the tests in a copy of the repository."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return "time limit", time.monotonic() - began
    failed = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "failed")
    return failed[:150] if done.returncode else "", time.monotonic() - began


def copied(folder: Path) -> Path:
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    return folder


def judge(mutant: Mutant, copies: Queue[Path], limits: dict[tuple[str, ...], float]) -> str:
    """What killed a mutant; "" where it survives."""
    tests, folder = specifications(mutant.path), copies.get()
    target = folder / mutant.path.relative_to(ROOT)
    source = target.read_bytes()
    try:
        target.write_bytes(mutated(mutant, source))
        return run(folder, tests, limits[tuple(tests)])[0]
    finally:
        target.write_bytes(source)
        copies.put(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=FOLDERS, metavar="PATH")
    parser.add_argument("--count", type=int, default=100, help="mutants; 0 for all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    files = sorted(set(_files(arguments.paths)))
    mutants = [mutant for path in files for mutant in mutants_of(path)]
    chosen = mutants
    if 0 < arguments.count < len(mutants):
        chosen = sorted(random.Random(arguments.seed).sample(mutants, arguments.count))
    print(f"{len(chosen)} of {len(mutants)} mutants in {len(files)} files", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        copies: Queue[Path] = Queue()
        for number in range(arguments.jobs):
            copies.put(copied(Path(temporary) / str(number) / "lumos"))
        limits = _limits(copies, {tuple(specifications(mutant.path)) for mutant in chosen})
        with ThreadPoolExecutor(arguments.jobs) as pool:
            verdicts = []
            for mutant, verdict in zip(chosen, pool.map(lambda m: judge(m, copies, limits), chosen), strict=True):
                verdicts.append(verdict)
                _show(len(verdicts), mutant, verdict)
    _summary(chosen, verdicts)


def _files(paths: list[str]) -> Iterator[Path]:
    for name in paths:
        path = PACKAGE / name if (PACKAGE / name).exists() else Path(name).resolve()
        yield from path.rglob("*.py") if path.is_dir() else [path]


def _limits(copies: Queue[Path], suites: set[tuple[str, ...]]) -> dict[tuple[str, ...], float]:
    """Several times as long as the specifications take; they must pass before anything is changed."""
    folder, limits = copies.get(), {}
    for tests in sorted(suites):
        failed, seconds = run(folder, list(tests), 1800)
        if failed:
            sys.exit(f"{' '.join(tests)} fail without any mutant: {failed}")
        limits[tests] = 5 * seconds + 60  # on a machine that is busy with other mutants
        print(f"{seconds:5.0f} s  {' '.join(tests)}", flush=True)
    copies.put(folder)
    return limits


def _show(number: int, mutant: Mutant, verdict: str) -> None:
    change = f"{mutant.before.strip()!r} -> {mutant.text.strip()!r}".replace("\n", " ")[:120]
    print(f"{number:4d} {'killed  ' if verdict else 'SURVIVED'} {mutant.place}  {change}  {verdict}", flush=True)


def _summary(mutants: list[Mutant], verdicts: list[str]) -> None:
    by_file: dict[str, list[bool]] = defaultdict(list)
    for mutant, verdict in zip(mutants, verdicts, strict=True):
        by_file[str(mutant.path.relative_to(PACKAGE))].append(bool(verdict))
    print("\n| file | mutants | killed |\n|---|---|---|")
    for name, killed in sorted(by_file.items()):
        print(f"| {name} | {len(killed)} | {100 * sum(killed) / len(killed):.0f} % |")
    total = sum(bool(verdict) for verdict in verdicts)
    print(f"\nkilled {total} of {len(verdicts)} ({100 * total / max(len(verdicts), 1):.0f} %)")


if __name__ == "__main__":
    main()
