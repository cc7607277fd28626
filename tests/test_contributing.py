"""CONTRIBUTING.md is true: its paths exist, its layers hold, and doing what it says works.

Every block that begins with the path of a file is applied to a copy of the package:

    # src/lumos/data/gpus.toml                 appended to the file, or a new file
    # src/lumos/program/operators.py, in NAME  put at the beginning of the table NAME; or among the imports
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support import header, launch, memcpy, write_trace

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src/lumos"
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


# ---------------------------------------------------------------------- paths
def rows_under(heading: str) -> list[list[str]]:
    """The rows of the table under a heading, without its head."""
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return rows[2:]


@pytest.mark.parametrize("row", rows_under("Where is it?"), ids=lambda row: row[0])
def test_the_answer_to_a_question_is_where_it_says(row: list[str]) -> None:
    file, names = row[1].strip("`"), re.findall(r"`([\w.]+)`", row[2])
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for name in names:
        assert set(name.split(".")) <= defined, f"{file} does not define {name}"


def test_there_are_twenty_questions_and_more_than_nine_things_to_add() -> None:
    assert len(rows_under("Where is it?")) >= 20
    assert len(rows_under("Where would I add it?")) >= 10


def test_named_files_and_links_exist() -> None:
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    named = re.findall(r"`((?:src|tests|docs|benchmarks|calibration|examples)/[\w./-]*)`", prose)
    headings = [re.sub(r"[^\w ]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", TEXT, re.M)]
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).exists()] == []
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        assert target[1:] in headings if target.startswith("#") else (ROOT / target).exists(), target


# ---------------------------------------------------------------------- layers
def layers() -> dict[str, int]:
    """The height of every package, from the page."""
    block = TEXT.partition("\n## Layers\n")[2].partition("```text\n")[2].partition("```")[0]
    return {name: -number for number, line in enumerate(block.splitlines()) for name in line.split()}


def package_of(module: str) -> str:
    """Of `lumos.costs.network`: costs."""
    return module.split(".")[1]


class Import(NamedTuple):
    """One import of one module of the package by another."""

    source: str
    target: str
    when_loaded: bool  # not inside a function


def imports() -> Iterator[Import]:
    for path in sorted(PACKAGE.rglob("*.py")):
        source = ".".join(("lumos", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        if source == "lumos" or "startup" in source:  # the public names, all of them; a script of its own
            continue
        tree = ast.parse(path.read_text("utf-8"))
        inside = {id(node) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lumos":
                names = [f"lumos.{a.name}" for a in node.names] if node.module == "lumos" else [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("lumos.")]
            else:
                continue
            yield from (Import(source, name, id(node) not in inside) for name in names)


UPWARDS: set[tuple[str, str]] = set()  # cycles between packages that remain


def test_packages_import_downwards_only() -> None:
    height, upwards = layers(), set()
    for source, target, when_loaded in imports():
        here, there = package_of(source), package_of(target)
        assert here in height, f"CONTRIBUTING.md does not place {here}"
        in_notebook = target == "lumos.report.html.notebook" and not when_loaded
        if here != there and height[there] >= height[here] and not in_notebook:
            upwards.add((source, target))
    assert upwards == UPWARDS


def test_modules_do_not_import_each_other_in_circles() -> None:
    needs: dict[str, set[str]] = {}
    for found in imports():
        if found.when_loaded:
            needs.setdefault(found.source, set()).add(found.target)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in needs.get(module, ()):
                visit(other, (*path, module))
            done.add(module)

    for module in needs:
        visit(module, ())


# ---------------------------------------------------------------------- doing what it says
class Copy(NamedTuple):
    """A copy of the package to which blocks of the page can be applied."""

    folder: Path

    def add(self, heading: str) -> None:
        """Do what the section under a heading says."""
        section = TEXT.partition(f"\n### {heading}\n")[2].partition("\n## ")[0].partition("\n### ")[0]
        blocks = re.findall(r"^```\w+\n# src/([\w./]+)(?:, in (\w+))?\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        assert blocks
        for path, table, code in blocks:
            file = self.folder / path
            if not table:
                with file.open("a", encoding="utf-8") as end:
                    end.write(f"\n{code}" if file.exists() and file.stat().st_size else code)
                continue
            start = r"from __future__ import annotations\n" if table == "imports" else rf"{table}\b.*[({{]\n"
            found = re.search(rf"^{start}", text := file.read_text("utf-8"), re.MULTILINE)
            assert found, f"{path} has no {table}"
            file.write_text(text[: found.end()] + code + text[found.end() :], "utf-8")

    def python(self, *arguments: str) -> str:
        """What Python prints that imports this copy."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def lumos(self, *arguments: str) -> Any:
        """The answer of a command as JSON."""
        return json.loads(self.python("-m", "lumos.cli.main", *arguments, "--json"))


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    shutil.copytree(PACKAGE, tmp_path / "lumos", ignore=shutil.ignore_patterns("__pycache__", "example"))
    return Copy(tmp_path)


SMALL = "examples/one-h200.toml"
BUSY = ("--set", "train.micro_batch=16")  # the GPU decides, not the host
PIPELINE = ("--set", "cluster.gpus=4", "--set", "train.global_batch=16")


def test_a_gpu_is_added_in_one_table(copy: Copy) -> None:
    copy.add("A GPU")
    answer = copy.lumos("predict", SMALL, *BUSY, "--set", "cluster.gpu=Example GPU 100GB")
    assert answer["step_ms"] > copy.lumos("predict", SMALL, *BUSY)["step_ms"]  # of an H200, whose peaks are higher
    assert answer["memory_gib"]["available"] == 100.0
    assert "no samples for Example GPU 100GB" in " ".join(answer["warnings"])


def test_a_model_preset_is_added_in_one_table(copy: Copy, tmp_path: Path) -> None:
    copy.add("A model preset")
    run = tmp_path / "run.toml"
    run.write_text('[model]\npreset = "example-1b"\n[train]\nseq = 4096\n[cluster]\ngpu = "h200"\ngpus = 1\n')
    assert copy.lumos("predict", str(run))["parameters"] == pytest.approx(1.10e9, rel=0.01)


def test_a_framework_is_added_in_one_table(copy: Copy) -> None:
    copy.add("A framework")
    before = copy.lumos("predict", SMALL)
    after = copy.lumos("predict", SMALL, "--set", "train.framework=example-framework")
    assert after["step_ms"] < before["step_ms"]  # it fuses
    assert after["memory_gib"]["optimizer"] == pytest.approx(3 * before["memory_gib"]["optimizer"])  # 12 bytes, not 4


def test_a_schedule_is_added_in_one_file(copy: Copy) -> None:
    copy.add("A pipeline schedule")
    four = (*PIPELINE, "--set", "parallel.pp=4")
    eager = copy.lumos("predict", SMALL, *four, "--set", "parallel.schedule=eager-1f1b")
    usual = copy.lumos("predict", SMALL, *four)
    assert eager["step_ms"] <= usual["step_ms"] * 1.001
    assert eager["memory_gib"]["activations"] > usual["memory_gib"]["activations"]
    axes = ("parallel.pp=4", "parallel.tp=1", "parallel.zero=0", "train.recompute=none")
    vary = [word for axis in axes for word in ("--vary", axis)]
    found = copy.lumos("search", SMALL, *PIPELINE, *vary, "--exhaustive", "--top", "50")
    assert "eager-1f1b" in json.dumps(found["results"])


def test_an_operator_is_added_in_one_line_and_costs_its_roofline(copy: Copy, tmp_path: Path) -> None:
    copy.add("An operator")
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{"op": "relu_squared", "t": 8192, "h": 8192}]))
    answer = copy.lumos("cost", str(rows), "--gpu", "h200")
    assert answer["rows"][0]["us"] == pytest.approx(2 * 2 * 8192**2 / 4.8e6 + 2, rel=0.02)  # bytes over GB/s
    assert "no samples for relu_squared" in answer["warnings"][0]


def test_a_dependency_rule_is_added_in_one_file_and_one_list(copy: Copy, tmp_path: Path) -> None:
    copy.add("A dependency rule")
    events = [
        *launch("first", 0, 1, stream=7), *launch("second", 5, 2, stream=8),
        memcpy(100, 50, 3, stream=7), memcpy(150, 50, 4, stream=8),
    ]  # fmt: skip
    write_trace(tmp_path / "trace.json", events, header(0, 1))
    code = f"""
from pathlib import Path
from lumos.graph.rules.build import build
from lumos.graph.graph import Rule
from lumos.read.job import read_job
edges = build(read_job(Path({str(tmp_path / "trace.json")!r}))).graph.edges
print(int((edges.rule == Rule.CHANNEL).sum()))
"""
    assert copy.python("-c", code).strip() == "1"


# ---------------------------------------------------------------------- the front page
def test_figures_of_the_readme_are_on_the_pages_that_it_links_to() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    rows = re.findall(r"^\|([^|]*)\|([^|]*)\| \[\w+\]\((docs/\w+\.md)\) \|$", readme, re.MULTILINE)
    assert len(rows) >= 6
    for question, figures, page in rows:
        there = set(re.findall(r"\d+\.\d+", (ROOT / page).read_text("utf-8")))
        assert set(re.findall(r"\d+\.\d+", figures)) <= there, f"{question.strip()}: not in {page}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) < 900
