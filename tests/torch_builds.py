"""Dry runs with the builds of torch that people have: an environment per row, a training script per column.

    python tests/torch_builds.py [ROW ...] [--nanogpt DIR] [--llmc DIR] [--data ../shared/data] [--environments DIR]

`make test-torch` runs it. A row is release, build and Python, as in 2.11.0:cuda:3.12; without rows it runs those that
ROWS lists. An environment takes about 6 GB and is deleted after its row, unless --environments names a folder to keep
it in. pip must find the builds: a CUDA build is the release without a local version, a CPU build is release+cpu.

Every cell is the step that is predicted for an H200. Scripts of tests/torch_scripts need nothing but libraries;
nanoGPT and llm.c are run unchanged from checkouts. Scripts that were measured, by calibration/torch_scripts_h200.py or
by the shared data, are compared with their measurement.
Results are kept in tests/data/torch_builds.csv, and docs/torch_builds.md is written from them.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "tests/data/torch_builds.csv", ROOT / "docs/torch_builds.md"
SCRIPTS = ROOT / "tests/torch_scripts"
MEASURED = ROOT / "calibration/torch_scripts_h200.json"
ROWS = ("2.8.0:cuda:3.11", "2.11.0:cuda:3.12", "2.13.0:cuda:3.13", "2.15.0:cuda:3.13", "2.13.0:cpu:3.11")
LIBRARIES = ("transformers>=4.56,<5.18", "accelerate", "lightning", "timm", "peft", "setuptools")
PATIENCE_S = 900.0  # of one dry run
_LLAMA = (str(ROOT / "examples/train_script.py"), "--layers", "4", "--hidden", "2048")
_MAKE_TOKENS = """
import numpy
tokens = numpy.random.default_rng(0).integers(0, 50257, 2_000_000).astype("uint16")
header = numpy.zeros(256, dtype="int32")
header[:3] = 20240520, 1, len(tokens)
open("tokens.bin", "wb").write(header.tobytes() + tokens.tobytes())
for name in ("train", "val"):
    tokens.tofile(f"data/random/{name}.bin")
"""
_TOKENIZER = '''"""Stands in for the tokenizer, whose vocabulary is downloaded; the scripts use it to print samples."""


class Encoding:
    eot_token = 50256


def get_encoding(name):
    return Encoding()
'''
_DECLARE_OPERATORS = """
import torch.library

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
_INTRODUCTION = """# Builds of torch

Written by `make test-torch`. Each row is an environment of its own on a machine without a GPU, and each column a
training script, dry-run by `lumos capture --dry` and predicted for an H200 by `lumos predict --from`: step time and
peak allocated memory. CUDA builds are those that `pip install torch` brings. DDP runs as one of 2 ranks, FSDP2 as one
of 8. nanoGPT and llm.c are run unchanged. In the row of a CPU build, torchvision is the one that pip finds next to it,
for CUDA: its own operators, which do not load there and which no column calls, are only declared. With torch 2.8,
compiled code is taken as eager code, which the result marks as approximated.

"""
_MEASURED = """
## Measured scripts

The same rows for scripts that were measured on one H200 (torch 2.11): error of the step and of the peak memory, in
percent. No constant was fitted on these scripts.

"""
_LONGER = """
## What was measured

The median of seven steps after the first five (`calibration/torch_scripts_h200.py`), and what the shared measurements
say where they have the script, too. Those take the first steps as well, in which moe_loop allocates memory anew for
every new number of tokens per expert. Lightning's step includes loading a batch of 4,096 rows in Python, which no dry
run times. timm and LoRA were GPU-bound (their steps vary by 0.2%) and are predicted as just host-bound: the measured
host was faster than a typical one, and with `cluster.host=1.2` the errors are -1% and +3%. nanogpt is 11 ms too slow,
eager and compiled alike, so the excess is in the matmuls and attention that both run. They are costed at the clock that
the power limit leaves with random numbers; matmuls of zeros run 13% faster.

"""


@dataclass(frozen=True)
class Column:
    """A script, and how it is run: arguments after Python, folder, size of the world, its measurement."""

    name: str
    command: tuple[str, ...]
    world: int = 1
    folder: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    step_ms: float = 0.0  # measured
    peak_gib: float = 0.0


@dataclass(frozen=True)
class Result:
    """A cell: what was predicted, or the line that says why not."""

    release: str
    build: str
    python: str
    column: str
    date: str
    step_ms: float = 0.0
    peak_gib: float = 0.0
    measured_ms: float = 0.0
    measured_gib: float = 0.0
    outcome: str = ""

    @property
    def row(self) -> tuple[str, str, str]:
        return self.release, self.build, self.python

    def __str__(self) -> str:
        return self.outcome or f"{self.step_ms:.2f} ms, {self.peak_gib:.2f} GiB"


def columns(nanogpt: Path | None, llmc: Path | None, data: Path) -> Iterator[Column]:
    """All columns, with what was measured of them; those whose checkout is not given have no command."""
    measured = measurements()
    for column in (*_library_columns(nanogpt, llmc), *_shared_columns(data)):
        step_ms, peak_gib = measured.get(column.name, (0.0, 0.0))
        yield column if column.step_ms else replace(column, step_ms=step_ms, peak_gib=peak_gib)


def measurements() -> dict[str, tuple[float, float]]:
    """Step in ms and peak in GiB of each script, as calibration/torch_scripts_h200.py measured them."""
    results = json.loads(MEASURED.read_text())["results"]
    return {name: (result["step_ms"], result["peak_gib"]) for name, result in results.items()}


def _library_columns(nanogpt: Path | None, llmc: Path | None) -> Iterator[Column]:
    train = ("train.py", "--dataset=random", "--gradient_accumulation_steps=4", "--eval_iters=2")
    for name, compiled in (("nanoGPT", "False"), ("nanoGPT compiled", "True")):
        yield Column(name, (*train, f"--compile={compiled}") if nanogpt else (), folder=nanogpt)
    tokens = ("--input_bin=tokens.bin", "--batch_size=16", "--sequence_length=1024", "--total_batch_size=32768")
    train = ("train_gpt2.py", *tokens, "--model=d12", "--write_tensors=0", "--flash=1", "--dtype=bfloat16")
    yield Column("llm.c", train if llmc else (), folder=llmc)
    yield Column("DDP", (str(SCRIPTS / "ddp.py"),), world=2)
    yield Column("FSDP2", _LLAMA, world=8)
    yield Column("FSDP2 compiled", (*_LLAMA, "--compile"), world=8)
    scripts = {"Trainer": "trainer", "Lightning": "lightning_fit", "timm": "timm_vit", "LoRA": "lora"}
    for name, script in scripts.items():
        yield Column(name, (str(SCRIPTS / f"{script}.py"),))


def _shared_columns(shared: Path) -> Iterator[Column]:
    data = shared / "h200"
    if not (data / "scripts/measured.json").exists():
        return
    for name, truth in json.loads((data / "scripts/measured.json").read_text()).items():
        script, _, compiled = name.partition("_compiled")
        given = {"COMPILE": "1"} if name != script or compiled else {}
        path = data / f"scripts/{script}.py"
        step_ms, peak_gib = truth["step_s"] * 1e3, truth["peak"] / 2**30
        yield Column(name, (str(path),), environment=given, step_ms=step_ms, peak_gib=peak_gib)
    for row in json.loads((data / "compiled/measured.json").read_text())["rows"]:
        path = data / f"compiled/{row['name']}.py"
        yield Column(f"{row['name']} compiled", (str(path),), step_ms=row["median_ms"], peak_gib=row["peak_gib"])


# ---------------------------------------------------------------------- one row
def python_of(version: str) -> Path | None:
    """An interpreter of that version: on the path, or among those of pyenv."""
    found = shutil.which(f"python{version}")
    installed = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    for path in [*([Path(found)] if found else []), *reversed(installed)]:
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return None


def install(folder: Path, release: str, build: str, python: str) -> str:
    """Make the environment of a row, unless it is there; why that failed, or nothing."""
    if (folder / ".installed").exists():
        return other_build(folder, release, build)
    interpreter = python_of(python)
    if interpreter is None:
        return f"no Python {python} here"
    wanted = f"torch==={release}" if build == "cuda" else f"torch=={release}+cpu"
    subprocess.run([interpreter, "-m", "venv", folder], check=True)
    for packages in ([wanted], [wanted, *LIBRARIES, "-e", str(ROOT)]):  # libraries would bring a newer release
        command = [folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"pip: {done.stderr.strip().splitlines()[-1][:200]}"
    look = [folder / "bin/python", "-c", "import torchvision"]
    if subprocess.run(look, capture_output=True, check=False).returncode:  # it is for a CUDA build of torch
        for module in (folder / "lib" / f"python{python}").glob("site-packages/torchvision/_meta_registrations.py"):
            module.write_text(module.read_text().replace("\nimport torch.library\n", _DECLARE_OPERATORS, 1))
    (folder / ".installed").touch()
    return other_build(folder, release, build)


def other_build(folder: Path, release: str, build: str) -> str:
    """What is wrong with the torch of an environment, or nothing."""
    look = [folder / "bin/python", "-c", "import torch; print(torch.__version__, torch.version.cuda)"]
    installed = subprocess.run(look, capture_output=True, text=True, check=True).stdout.split()
    version, cuda = installed[0].partition("+")[0], installed[1]
    if version == release and (cuda == "None") == (build == "cpu"):
        return ""
    return f"the environment has torch {installed[0]} (CUDA {cuda}): delete it, and run the row again"


def predicted(environment: Path, column: Column, work: Path) -> tuple[float, float, str]:
    """Step in ms and peak in GiB, or the last line that says why there is none."""
    if not column.command:
        return 0.0, 0.0, "no checkout here"
    folder = work / "checkout"
    if column.folder is not None:
        shutil.copytree(column.folder, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git"))
        (folder / "tiktoken.py").write_text(_TOKENIZER)
        (folder / "data/random").mkdir(parents=True, exist_ok=True)
        subprocess.run([environment / "bin/python", "-c", _MAKE_TOKENS], cwd=folder, check=True)
    folder.mkdir(exist_ok=True)
    lumos, dry = environment / "bin/lumos", work / "dry"
    capture = [lumos, "capture", "--dry", "--gpu", "h200", *launched_as(column), "-o", dry, "--"]
    for command in ([*capture, environment / "bin/python", *column.command],
                    [lumos, "predict", "--from", dry, "--set", "cluster.gpu=h200", "--json"]):  # fmt: skip
        try:
            done = subprocess.run(
                command, cwd=folder, env=os.environ | column.environment, capture_output=True, text=True,
                timeout=PATIENCE_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 0.0, 0.0, f"no answer in {PATIENCE_S:.0f} s"
        if done.returncode:
            return 0.0, 0.0, _reason(done.stderr)
    answer = json.loads(done.stdout)
    return answer["step_ms"], answer["memory_gib"]["peak"], ""


def launched_as(column: Column) -> list[str]:
    """Options of a job. A world of one rank is one, too: nanoGPT and llm.c then wrap their models, and hold more."""
    return ["--world", str(column.world)] if column.world > 1 else []


def _reason(printed: str) -> str:
    """Of what a failing command printed, our line before the last one, or the script's own error."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith("lumos: the command ended")]
    text = re.sub(r"\S*/(examples|tests/torch_scripts)/", r"\1/", told[-1].removeprefix("lumos: "))
    return ("rejected: " if told[-1].startswith("lumos: ") else "error: ") + text[:240]


def run_row(row: str, every: list[Column], environments: Path) -> None:
    """All cells of a row, each kept as soon as it is known."""
    release, build, python = row.split(":")
    environment = environments / f"{build}-{release}-py{python}"
    failed = install(environment, release, build, python)
    for column in every:
        with tempfile.TemporaryDirectory() as work:
            answer = (0.0, 0.0, failed) if failed else predicted(environment, column, Path(work))
        today = datetime.now(UTC).date().isoformat()
        measured = (column.step_ms, column.peak_gib)
        result = Result(release, build, python, column.name, today, *answer[:2], *measured, answer[2])
        keep(result)
        print(f"{row} {column.name}: {result}", flush=True)


# ---------------------------------------------------------------------- what is kept
def kept() -> list[Result]:
    """The cells of earlier runs."""
    if not RESULTS.exists():
        return []
    types = {entry.name: float if entry.type == "float" else str for entry in fields(Result)}
    with RESULTS.open(newline="") as file:
        return [Result(**{name: types[name](value) for name, value in line.items()}) for line in csv.DictReader(file)]


def keep(found: Result) -> None:
    """Write a cell down, in place of an earlier one; then the page."""
    cell = (*found.row, found.column)
    every = [result for result in kept() if (*result.row, result.column) != cell] + [found]
    every.sort(key=lambda result: (result.build, [int(part) for part in result.release.split(".")], result.python))
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, [entry.name for entry in fields(Result)], lineterminator="\n")
        writer.writeheader()
        for result in every:
            cells = asdict(result).items()
            writer.writerow({name: round(value, 4) if isinstance(value, float) else value for name, value in cells})
    PAGE.write_text(page(kept()))


def page(every: list[Result]) -> str:
    """The tables in Markdown: predictions, their errors where the script was measured, and the measurements."""
    notes: dict[str, int] = {}
    measured = [result for result in every if result.measured_ms]
    own = {column.name for column in _library_columns(None, None)}
    text = _INTRODUCTION + _table([result for result in every if result.column in own], notes, _prediction)
    if measured:
        text += _MEASURED + _table(measured, notes, _error) + _LONGER + _measured_table(measured)
    return text + "".join(f"\n{number}. {reason}" for reason, number in notes.items()) + ("\n" if notes else "")


def _prediction(cell: Result) -> str:
    return f"{cell.step_ms:.2f} ms, {cell.peak_gib:.2f} GiB"


def _error(cell: Result) -> str:
    return f"{100 * (cell.step_ms / cell.measured_ms - 1):+.1f} / {100 * (cell.peak_gib / cell.measured_gib - 1):+.1f}"


def _measured_table(every: list[Result]) -> str:
    """Measured steps and peaks: ours, and the shared ones that errors refer to where there are any."""
    ours = measurements()
    lines = ["| script | step, ms | peak, GiB | shared: step, ms | peak, GiB |", "|---" * 5 + "|"]
    for name, truth in {cell.column: (cell.measured_ms, cell.measured_gib) for cell in every}.items():
        mine = ours.get(name)
        shared = None if truth == mine else truth
        cells = [f"{value:.2f}" for value in mine] if mine else ["", ""]
        lines.append(f"| {name} | {' | '.join([*cells, *([f'{v:.2f}' for v in shared] if shared else ['', ''])])} |")
    return "\n".join(lines) + "\n"


def _table(every: list[Result], notes: dict[str, int], show: Callable[[Result], str]) -> str:
    """A row per build; reasons of cells without a prediction become numbered notes."""
    names = list(dict.fromkeys(result.column for result in every))
    lines = ["| torch | build | Python | date | " + " | ".join(names) + " |", "|---" * (len(names) + 4) + "|"]
    for row in dict.fromkeys(result.row for result in every):
        cells = {result.column: result for result in every if result.row == row}
        shown = []
        for name in names:
            cell = cells.get(name)
            reason = cell.outcome.replace("|", "/") if cell else ""
            value = show(cell) if cell else ""
            shown.append(f"no ({notes.setdefault(reason, len(notes) + 1)})" if reason else value)
        date = max(result.date for result in cells.values())
        lines.append(f"| {' | '.join(row)} | {date} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("rows", nargs="*", default=ROWS, metavar="ROW")
    options.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    options.add_argument("--llmc", type=Path, help="a checkout of llm.c")
    options.add_argument("--data", type=Path, default=ROOT.parent / "shared/data", help="the shared measurements")
    options.add_argument("--environments", type=Path, help="a folder in which environments are kept")
    options.add_argument("--columns", nargs="+", help="these columns alone")
    given = options.parse_args()
    every = list(columns(given.nanogpt, given.llmc, given.data))
    if given.columns:
        every = [column for column in every if column.name in given.columns]
    for row in given.rows:
        with tempfile.TemporaryDirectory() as passing:
            run_row(row, every, (given.environments or Path(passing)).resolve())


if __name__ == "__main__":
    sys.exit(main())
