"""Code in the current folder, which may be a folder of someone else's traces, never runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from fuzz_command import ROOT
from fuzz_surfaces import MEASURED
from lumos.cli.main import COMMANDS
from lumos.safe_path import drop_current_folder, safe_environment, safe_path
from support import header, training_run, write_trace

EXAMPLES = ROOT / "examples"
SETUP = str(EXAMPLES / "one-h200.toml")
SEARCH = ["search", SETUP, "--gpus", "2", "--vary", "train.recompute=none,full"]
ENTRY = "import json, sys\nfrom lumos.cli.main import main\n"
RUN_ALL = """
for arguments in json.loads(sys.argv[1]) if __name__ == "__main__" else []:
    sys.argv = ["lumos", *arguments]
    try:
        main()
    except SystemExit as done:
        if done.code:
            sys.exit(f"{arguments}: {done.code}")
"""
COMMAND_LINES: dict[str, list[list[str]]] = {
    "replay": [["replay", "."]],
    "predict": [["predict", "--from", ".", "--scale", "compute=0.5"], ["predict", SETUP]],
    "stragglers": [["stragglers", "."]],
    "compare": [["compare", ".", "rank0.json"]],
    "convert": [["convert", ".", "-o", "run.et"]],
    "synthesise": [["synthesise", ".", "-o", "made.et"]],
    "search": [[*SEARCH, "--workers", "2"], *([*SEARCH, "--shard", f"{n}/2", "-o", f"{n}.json"] for n in (1, 2))],
    "merge": [["merge", "1.json", "2.json"]],
    "score": [["score", "runs.csv", "--workers", "2"]],
    "cost": [["cost", str(EXAMPLES / "operators.json"), "--gpu", "h200"]],
    "sample": [["sample", "-o", "samples.jsonl", "--device", "cpu", "--only", "gelu,profiler", "--scale", "0.01"]],
    "fit": [["fit", "fit.jsonl", "-o", "my.npz"]],
    "capture": [],  # in a test of its own: it runs the user's script
    "check": [["check", "."]],
    "about": [["about"]],
    "demo": [["demo"]],
}  # fmt: skip


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A job of 9 MiB beside a file for every module of Python and of the packages; each leaves a mark when it runs."""
    folder, marks = tmp_path / "traces", tmp_path / "marks"
    folder.mkdir()
    marks.mkdir()
    names = {*sys.stdlib_module_names, *packages_distributions(), "sitecustomize", "usercustomize", "lumos"}
    for name in filter(str.isidentifier, names):
        (folder / f"{name}.py").write_text(f"open({str(marks / name)!r}, 'w').close()\nraise SystemExit('planted')\n")
    (folder / ".numba_config.yaml").write_text("cache_dir: planted\n")
    for rank in (0, 1):
        file = write_trace(folder / f"rank{rank}.json", training_run(rank=rank, steps=2), header(rank, 2))
        file.write_bytes(file.read_bytes() + b" " * (9 << 19))
    (folder / "runs.csv").write_text(MEASURED)
    rows = [{"op": "gelu", "t": 64 * n, "h": 512, "dtype": "bf16", "us": 5.0 + n} for n in range(1, 61)]
    (folder / "fit.jsonl").write_text("\n".join(map(json.dumps, [{"gpu": "NVIDIA H200", "torch": "2.11"}, *rows])))
    return folder


def run_in(folder: Path, code: str, *arguments: str, **environment: str) -> None:
    """Run a script of another folder here, as the `lumos` of a virtual environment is run."""
    script = folder.parent / "bin" / "entry_script.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(code)
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    marks = sorted(path.name for path in (folder.parent / "marks").iterdir())
    assert (marks, done.returncode, "Traceback" in done.stderr) == ([], 0, False), done.stderr[-2000:]
    assert not (folder / "planted").exists()


def test_the_trap_catches_a_worker_that_imports_from_its_folder(trap: Path) -> None:
    subprocess.run([sys.executable, "-m", "loky.backend.popen_loky_posix"], cwd=trap, capture_output=True)
    assert list((trap.parent / "marks").iterdir())


def test_no_command_runs_code_of_the_current_folder(trap: Path) -> None:
    assert COMMAND_LINES.keys() == COMMANDS.keys()
    run_in(trap, ENTRY + RUN_ALL, json.dumps([line for lines in COMMAND_LINES.values() for line in lines]))


@pytest.mark.slow
def test_ray_runs_no_code_of_the_current_folder(trap: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    lines = [["replay", ".", "--engine", "ray"], [*SEARCH, "--engine", "ray"]]
    run_in(trap, ENTRY + RUN_ALL, json.dumps(lines))


@pytest.mark.parametrize(("options", "path"), [(["-m", "lumos.cli.main"], ""), (["-P", "-m", "lumos.cli.main"], ":")])
def test_packages_come_from_elsewhere_even_if_python_itself_would_look_in_the_current_folder(
    tmp_path: Path, options: list[str], path: str
) -> None:
    """What Python imports before it starts Lumos is not up to Lumos: such modules are not planted here."""
    names = {*packages_distributions(), "email", "signal", "zipfile"} - {"lumos", "_distutils_hack"}
    for name in filter(str.isidentifier, names):
        (tmp_path / f"{name}.py").write_text("open(__name__ + '.planted', 'w').close()\n")
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, *options, "predict", SETUP]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (list(tmp_path.glob("*.planted")), done.returncode) == ([], 0), done.stderr[-2000:]


def test_workers_of_a_python_program_run_no_code_of_the_current_folder(trap: Path) -> None:
    run_in(trap, "import lumos\nif __name__ == '__main__':\n    print(lumos.replay(lumos.read_job('.')))\n")


def test_a_captured_script_imports_from_its_own_folder_alone(trap: Path) -> None:
    project = trap.parent / "project"
    project.mkdir()
    (project / "helper.py").write_text("print('helped')\n")
    (project / "train.py").write_text("import helper, sys\nassert 'torch' not in sys.modules\n")
    line = ["capture", "-o", "out", "--", sys.executable, str(project / "train.py")]
    run_in(trap, ENTRY + RUN_ALL, json.dumps([line]))
    mine = [*_lumos(), "capture", "-o", str(project / "out"), "--", sys.executable, "-c", "import helper"]
    assert subprocess.run(mine, cwd=project).returncode == 0


@pytest.mark.parametrize("name", ["lumos.py", "lumos/__init__.py", "lumos/capture/__init__.py"])
def test_capture_imports_itself_and_not_what_has_its_name(tmp_path: Path, name: str) -> None:
    """`python -m` puts the current folder on sys.path of the command, and Lumos must not import from there."""
    (tmp_path / "work" / name).parent.mkdir(parents=True)
    for planted in {name, f"{name.split('/')[0]}/__init__.py" if "/" in name else name}:
        (tmp_path / "work" / planted).write_text(f"open({str(tmp_path / 'planted')!r}, 'w').close()\n")
    project = tmp_path / "project"
    project.mkdir()
    (project / "torch.py").write_text("class optim: pass\n")
    (project / "train.py").write_text("import torch\n")
    line = [*_lumos(), "capture", "-o", str(tmp_path / "out"), "--", sys.executable, "-m", "train"]
    environment = os.environ | {"PYTHONPATH": str(project)}
    done = subprocess.run(line, cwd=tmp_path / "work", env=environment, capture_output=True, text=True)
    assert not (tmp_path / "planted").exists()
    assert ("has the name of Lumos: rename it" in done.stderr) == ("capture" not in name), done.stderr


@pytest.mark.parametrize("entry", ["", ".", os.curdir + os.sep])
def test_pythonpath_does_not_name_the_current_folder_for_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    """Python itself would import from there before Lumos starts; it starts, and its workers do not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([entry, "/elsewhere"]))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with safe_path():
        assert {name: os.environ[name] for name in safe_environment()} == {
            "PYTHONSAFEPATH": "1", "PYTHONPATH": "/elsewhere",
        }  # fmt: skip
    assert os.environ["PYTHONPATH"] == os.pathsep.join([entry, "/elsewhere"])
    assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.setattr(sys, "path", ["", entry, str(tmp_path), "/elsewhere"])
    drop_current_folder()
    assert sys.path == ["/elsewhere"]


def _lumos() -> list[str]:
    return [sys.executable, "-P", "-m", "lumos.cli.main"]
