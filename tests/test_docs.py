"""Every example in the documentation runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("lumos ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_runs(command: str) -> None:
    (ROOT / "out").mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-m", "lumos.cli", *shlex.split(command)[1:]], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_python_of_the_readme_runs() -> None:
    (code,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_readme_shows_what_the_demo_prints() -> None:
    done = subprocess.run([sys.executable, "-m", "lumos.cli", "demo"], cwd=ROOT, capture_output=True, text=True)
    shown = next(block for block in blocks("text") if "recorded step" in block)
    printed = [re.sub(r"\s+", " ", line).strip() for line in done.stdout.splitlines()]
    for line in shown.splitlines():
        assert re.sub(r"\s+", " ", line).strip() in printed


def test_the_tree_of_the_readme_is_the_tree() -> None:
    tree = next(block for block in blocks("text") if block.startswith("src/lumos"))
    named = set(re.findall(r"^ +(\w+\.py) ", tree, re.MULTILINE))
    there = {p.name for p in (ROOT / "src/lumos").rglob("*.py") if p.parent.name == "lumos" or p.name != "__init__.py"}
    assert named == there


def test_the_public_names_are_these() -> None:
    import lumos

    assert sorted(lumos.__all__) == [
        "LumosError", "Prediction", "Replay", "Scale", "Trace", "predict", "read_job", "replay",
    ]  # fmt: skip
    assert all(getattr(lumos, name) is not None for name in lumos.__all__)


def test_the_readme_shows_what_a_forecast_prints() -> None:
    command = next(c for c in COMMANDS if c.startswith("lumos predict examples/llama3-70b.toml"))
    arguments = [sys.executable, "-m", "lumos.cli", *shlex.split(command)[1:]]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    printed = [re.sub(r"\s+", " ", line).strip() for line in done.stdout.splitlines()]
    shown = next(block for block in blocks("text") if "tokens/s/GPU" in block)
    for line in shown.splitlines():
        assert re.sub(r"\s+", " ", line).strip() in printed
