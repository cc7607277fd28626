"""Fuzzing: mutated files of every kind, through the command line in this process, within limits of time and memory.

    python tests/fuzz.py --seconds 3600 --seed 7        # `make fuzz` does the same
    python tests/fuzz.py --case 7:1234                  # that case again, with its traceback

A case is a seed and a number: they choose a target, which makes good input, mutates it and runs a command. Sound is
an answer with finite, plausible numbers, or a LumosError. Everything else is a finding: another exception, a case that
takes longer than `MOST_SECONDS` or more than `MOST_BYTES`, numbers that are not finite, a negative time, or a step of
more than a year without a warning. What was wrong, and the files, are kept in a folder.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import math
import os
import random
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import polars

import mutations as m
from lumos.cli import terminal
from lumos.cli.main import app
from lumos.dry_run.recorded_step import write_recording
from lumos.errors import LumosError
from lumos.files import json_of
from support import header, small_recording, training_run, write_trace

ROOT = Path(__file__).resolve().parents[1]
MOST_SECONDS = 60  # the largest step that is simulated takes half a minute
MOST_BYTES = 6 << 30  # of address space
YEAR_MS = 365.0 * 86_400e3
MOST_OF_A_KIND = 2  # findings that are kept and printed
WRITES = ("", "", "", "answer.html", "answer.json", "answer.csv")


class UnsoundError(Exception):
    """An answer that no run can have."""


class TooSlowError(BaseException):
    """A case that is stopped; nothing in the project may catch it."""


# Running a command


class Ran(NamedTuple):
    """What a command did: its answer, or None where it was refused."""

    answer: dict[str, Any] | None
    refusal: str = ""


def run(folder: Path, *arguments: str) -> Ran:
    """A command in this process and this folder, with everything it prints; an unsound answer raises UnsoundError."""
    answers: list[dict[str, Any]] = []

    def seen(answer: dict[str, Any]) -> bytes:
        answers.append(answer)
        return json_of(answer)

    screen = io.TextIOWrapper(io.BytesIO(), "utf-8")
    (folder / "command.txt").write_text("lumos " + shlex.join(arguments), errors="replace")
    before, stdout, terminal.json_of = Path.cwd(), sys.stdout, seen
    os.chdir(folder)
    sys.stdout = screen
    try:
        app(list(arguments), standalone_mode=False)
        screen.flush()
    except Exception as refused:
        if not isinstance(refused, LumosError) and not hasattr(refused, "exit_code"):  # typer's have one
            raise
        if isinstance(refused, LumosError) and not str(refused).strip():
            raise UnsoundError("refused without a word") from refused
        return Ran(None, str(refused))
    finally:
        sys.stdout, terminal.json_of = stdout, json_of
        os.chdir(before)
    _refuse_controls(screen.buffer.getvalue())  # type: ignore[attr-defined]
    page = folder / "answer.html"
    if page.exists() and b"<script>x</script>" in page.read_bytes():
        raise UnsoundError("a name became part of the page")
    for answer in answers:
        check_sound(answer)
    return Ran(answers[-1] if answers else {})


def _refuse_controls(printed: bytes) -> None:
    bad = [byte for byte in printed if byte < 32 and byte not in b"\n"] if b"\x1b" in printed else []
    if bad:
        raise UnsoundError(f"control characters on the terminal: {bad[:5]}")


def check_sound(answer: dict[str, Any]) -> None:
    """Numbers are finite, times and sizes are not negative, a step of years is not stated without a warning."""
    for place, number in numbers(answer):
        if not math.isfinite(number):
            raise UnsoundError(f"{place} = {number}")
        name = place.rsplit(".", 1)[-1]
        if number < 0 and name in ("step_ms", "recorded_ms", "simulated_ms", "clean_ms", "tokens_per_second", "mfu"):
            raise UnsoundError(f"{place} = {number}")
    if (answer.get("mfu") or 0.0) > 1.0001 * (answer.get("hfu") or 1.0):
        raise UnsoundError(f"mfu = {answer['mfu']} and hfu = {answer['hfu']}")
    step = max((answer.get(key) or 0.0 for key in ("recorded_ms", "simulated_ms", "step_ms")), default=0.0)
    if isinstance(step, float) and step > YEAR_MS and not (answer.get("warnings") or answer.get("notes")):
        raise UnsoundError(f"a step of {step / YEAR_MS:.1f} years, and no warning")


def numbers(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of an answer, and where they stand."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from numbers(part, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for part in value:
            yield from numbers(part, place)
    elif isinstance(value, float | int):
        yield place, value


# Good input, made once


@cache
def store() -> Path:
    """A folder for what is made once and copied for every case."""
    return Path(tempfile.mkdtemp(prefix="lumos-fuzz-"))


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    folder = store() / name
    if not folder.exists():
        new = Path(tempfile.mkdtemp(dir=store()))
        make(new)
        new.rename(folder)
    return folder


def good_command(folder: Path, *arguments: str) -> None:
    ran = run(folder, *arguments)
    if ran.answer is None:
        raise RuntimeError(f"the input of a target is refused: {arguments}: {ran.refusal}")


SEARCH = ("search", str(ROOT / "examples/one-h200.toml"), "--gpus", "2", "--workers", "1", "--vary",
          "train.recompute=none,full", "--top", "3")  # fmt: skip
MEASURED = (
    "id,source,model_name,gpu,framework,n_gpus,n_layers,hidden,n_heads,ffn_hidden,vocab,seq_len,global_batch,"
    "micro_batch,tp,pp,dp,precision,step_time_s\n"
    "a,here,small,h200,megatron-core,8,8,1024,16,4096,32000,2048,16,2,2,1,4,bf16,0.2\n"
    "b,here,small,a100,pytorch,2,4,1024,16,4096,32000,1024,4,2,1,1,2,bf16,0.1\n"
)


def searched(folder: Path) -> None:
    good_command(folder, *SEARCH, "--json", "--journal", "journal", "-o", "answer.json")


def parts(folder: Path) -> None:
    for shard in ("1/2", "2/2"):
        good_command(folder, *SEARCH, "--shard", shard, "-o", f"search{shard[0]}.json")
        (folder / "runs.csv").write_text(MEASURED)
        good_command(folder, "score", "runs.csv", "--shard", shard, "-o", f"score{shard[0]}.json")


def cost_file(folder: Path) -> None:
    from lumos.cost.hardware_model import encode
    from lumos.cost.operator_model import _shipped

    regressors = dict(list(_shipped("h200").items())[:2])
    (folder / "model.npz").write_bytes(encode("h200", regressors))


def chakra_files(folder: Path) -> None:
    for rank in (0, 1):
        write_trace(folder / f"rank{rank}.json", training_run(rank=rank, steps=1), header(rank, 2))
    good_command(folder, "convert", ".", "-o", "run.et")
    for file in folder.glob("*.json"):
        file.unlink()


@cache
def setup_files() -> list[Path]:
    """Descriptions of every kind that the repository has."""
    return [ROOT / "examples" / name for name in ("one-h200.toml", "config.json", "megatron.sh", "torchtitan.toml")]


# Targets: each makes input in a folder from a source of randomness, and runs commands on it


Random = random.Random


def mutated_trace(chance: Random, folder: Path) -> Path:
    """A job of one or two ranks, of which one is mutated; the path to name."""
    ranks = chance.choice((1, 1, 2))
    for rank in range(ranks):
        events, head = training_run(rank=rank, steps=chance.choice((1, 2)), layers=2), header(rank, ranks)
        if rank == ranks - 1:
            for _ in range(chance.choice((1, 1, 2, 3))):
                events = chance.choice(m.MUTATIONS)(chance, events) or events[:1]
        path = write_trace(folder / f"rank{rank}.json", events, head, layout=chance.choice(m.LAYOUTS))
    if chance.random() < 0.4:
        mutate = m.mutated_json if chance.random() < 0.3 else m.damaged
        with contextlib.suppress(ValueError):  # what other mutations made is not always JSON
            path.write_bytes(mutate(chance, path.read_bytes()))
    return folder if ranks > 1 else path


def trace_commands(chance: Random, folder: Path) -> None:
    path = str(mutated_trace(chance, folder))
    step = ["--step", chance.choice(["0", "1", "99", "#1", "x"])] if chance.random() < 0.1 else []
    show, output = chance.choice([["--json"], []]), chance.choice(WRITES)
    written = ["-o", output] if output else []
    match chance.randrange(7):
        case 6:
            run(folder, "stragglers", path, *step, *show, *written)
        case 0 | 1:
            run(folder, "replay", path, *step, *show, *written)
        case 2:
            what = chance.choice(["compute", "comm", "cpu", "kernel:.", "kernel:[", "kernel:a{99999999999}"])
            run(folder, "predict", "--from", path, "--scale", f"{what}={chance.choice(m.FACTORS)}", *show, *written)
        case 3:
            run(folder, "check", path, *show)
        case 4:
            write_trace(folder / "good.json", training_run(steps=1), header(0))
            both = [path, "good.json"] if chance.random() < 0.5 else ["good.json", path]
            run(folder, "compare", *both, *show)
        case 5:
            change = f"{chance.choice(m.KEYS)}={chance.choice(m.VALUES)}"
            run(folder, "predict", "--from", path, "--set", change, *show)


def convert_and_back(chance: Random, folder: Path) -> None:
    """What convert writes, replay reads."""
    path = mutated_trace(chance, folder)
    before = run(folder, "replay", str(path), "--json")
    if before.answer is None:
        return
    (folder / "out").mkdir()
    name = chance.choice(["out/x.et", "out/x.{rank}.trace.json"])
    more = chance.choice([[], ["--anonymise"]])
    if run(folder, "convert", str(path), "-o", name, *more, "--json").answer is not None:
        back = run(folder, "replay", "out", "--json")
        if back.answer is None:
            raise UnsoundError(f"replay refuses what convert wrote: {back.refusal}")
        for key in ("recorded_ms", "simulated_ms", "clean_ms"):
            if more and back.answer[key] != before.answer[key]:
                raise UnsoundError(f"anonymised, {key} is {back.answer[key]} in place of {before.answer[key]}")


def chakra(chance: Random, folder: Path) -> None:
    shutil.copytree(made_once("chakra", chakra_files), folder, dirs_exist_ok=True)
    file = chance.choice(sorted(folder.glob("*.et")))
    file.write_bytes(m.damaged(chance, file.read_bytes()))
    run(folder, chance.choice(["replay", "check"]), ".", *chance.choice([["--json"], []]))


def setups(chance: Random, folder: Path) -> None:
    source = chance.choice(setup_files())
    text = source.read_bytes()
    if source.suffix == ".json" and chance.random() < 0.7:
        text = m.mutated_json(chance, text)
    elif chance.random() < 0.85:
        text = m.mutated_text(chance, text)
    (folder / source.name).write_bytes(text)
    changes = []
    for _ in range(chance.choice((0, 0, 1, 2))):
        changes += ["--set", f"{chance.choice(m.KEYS)}={chance.choice(m.VALUES)}"]
    bill = ["--price", chance.choice(m.VALUES), "--tokens", chance.choice(m.VALUES)] if chance.random() < 0.2 else []
    show, output = chance.choice([["--json"], []]), chance.choice(WRITES)
    run(folder, "predict", source.name, "--describe", *changes, *bill, *show, *(["-o", output] if output else []))


@cache
def number_keys() -> list[str]:
    """All keys of a setup whose values are numbers, or may be."""
    from lumos.setup.sections import Cluster, Model, Parallel, Train

    sections = {"model": Model, "train": Train, "parallel": Parallel, "cluster": Cluster}
    return [f"{name}.{field}" for name, kind in sections.items() for field in kind.model_fields]


def numbers_of_setups(chance: Random, folder: Path) -> None:
    """Good descriptions with one or two numbers that are nearly right."""
    source = chance.choice(setup_files())
    changes = ["--set", "train.seq=2048"] if source.name == "config.json" else []
    for _ in range(chance.choice((1, 1, 2))):
        value = chance.choice(m.NUMBERS if chance.random() < 0.8 else m.VALUES)
        changes += ["--set", f"{chance.choice(number_keys())}={value}"]
    bill = ["--price", chance.choice(m.NUMBERS), "--tokens", chance.choice(m.NUMBERS)] if chance.random() < 0.3 else []
    output = chance.choice(WRITES)
    show = chance.choice([["--json"], []])
    run(folder, "predict", str(source), "--describe", *changes, *bill, *show, *(["-o", output] if output else []))


def changed_runs(chance: Random, folder: Path) -> None:
    """Another configuration of a traced run, whose setup or question is odd."""
    source = ROOT / "tests/data/capture/fake_world"
    setup = (source / "setup.toml").read_bytes()
    if chance.random() < 0.4:
        setup = m.mutated_text(chance, setup)
    (folder / "setup.toml").write_bytes(setup)
    change = f"{chance.choice(number_keys())}={chance.choice(m.NUMBERS)}"
    run(folder, "predict", "setup.toml", "--from", str(source), "--set", change, *chance.choice([["--json"], []]))


def failing_runs(chance: Random, folder: Path) -> None:
    """Runs that fail at odd rates, with odd checkpoints, spares and deadlines."""
    from lumos.setup.reliability import RATES, Reliability

    options = ["--tokens", chance.choice(["1", "1e6", "1T", "15T", "1e18", "1e24", "x"])]
    for key in chance.sample(list(Reliability.model_fields), chance.choice((1, 2, 3))):
        options += ["--set", f"reliability.{key}={chance.choice(m.NUMBERS if chance.random() < 0.8 else m.VALUES)}"]
    if chance.random() < 0.6:
        options += ["--mtbf", chance.choice([*RATES, "101", "50000", "1e12", *m.VALUES])]
    if chance.random() < 0.3:
        options += ["--deadline", chance.choice([*m.NUMBERS, *m.VALUES])]
    setup = ROOT / "examples/llama3-70b.toml"
    run(folder, "predict", str(setup), *options, *chance.choice([["--json"], []]))


def learned_spreads(chance: Random, folder: Path) -> None:
    """Step times, spreads, operation tables and traces to learn from, mutated; and the risk of mutated traces."""
    show = chance.choice([["--json"], [], ["-o", "answer.html"]])
    few = ["--risk", "--draws", "40"]
    match chance.randrange(4):
        case 0:
            rows = "".join(f"{step},{100 + step % 7},{step % 2}\n" for step in range(12))
            (folder / "file").write_bytes(m.mutated_text(chance, b"step,ms,rank\n" + rows.encode()))
        case 1:
            stated = b'{"gpu": 0.01, "pauses": {"probability": 0.1, "ms": 5, "spread": 0.2}}'
            shipped = (ROOT / "src/lumos/data/variability.json").read_bytes()
            text = chance.choice([b"[10, 11, 12.5, 10, 300]", stated, shipped])
            (folder / "file").write_bytes(chance.choice([m.mutated_json, m.mutated_json, m.damaged])(chance, text))
        case 2:
            (folder / "file").write_bytes(m.mutated_text(chance, (ROOT / "examples/operations.csv").read_bytes()))
            run(folder, "stragglers", "file", "--risk", *show)
        case _:
            path = str(mutated_trace(chance, folder))
            run(folder, "predict", "--from", path, *few, *show)
            return
    run(folder, "predict", str(ROOT / "examples/one-h200.toml"), *few, "--variability", "file", *show)


def searches(chance: Random, folder: Path) -> None:
    """Searches with odd questions; bounded by a small space."""
    options = {
        "--memory": chance.choice(m.VALUES), "--top": chance.choice(["1", "3", "0", "-1", "1000000"]),
        "--deadline": chance.choice(m.VALUES), "--price": chance.choice(m.VALUES),
        "--objective": chance.choice(["time", "cost", "energy", "gpus", "x"]),
        "--set": f"{chance.choice(m.KEYS)}={chance.choice(m.VALUES)}",
    }  # fmt: skip
    chosen = chance.sample(sorted(options), chance.choice((1, 2)))
    asked = [x for name in chosen for x in (name, options[name])]
    run(folder, *SEARCH, *asked, *chance.choice([["--json"], []]))


def journals(chance: Random, folder: Path) -> None:
    """A damaged journal is mended or refused; it never changes the answer."""
    shutil.copytree(made_once("searched", searched), folder, dirs_exist_ok=True)
    files = sorted(file for file in (folder / "journal").rglob("*") if file.is_file())
    contents = {file: file.read_bytes() for file in files}
    for file in chance.sample(files, min(len(files), chance.choice((1, 1, 2)))):
        match chance.randrange(5):
            case 0:
                file.unlink()
            case 1:
                file.write_bytes(b"")
            case 2:
                file.write_bytes(contents[chance.choice(files)])
            case _:
                file.write_bytes(m.damaged(chance, file.read_bytes()))
    again = run(folder, *SEARCH, "--json", "--journal", "journal").answer
    if again is not None:
        truth = json.loads((folder / "answer.json").read_bytes())
        if [row["step_ms"] for row in again["results"]] != [row["step_ms"] for row in truth["results"]]:
            raise UnsoundError("a damaged journal changed the answer")


def merges(chance: Random, folder: Path) -> None:
    kind = chance.choice(["search", "score"])
    names = [f"{kind}1.json", f"{kind}2.json"]
    for name in names:
        shutil.copy(made_once("parts", parts) / name, folder / name)
    one = folder / chance.choice(names)
    mutate = m.mutated_json if chance.random() < 0.8 else m.damaged
    one.write_bytes(mutate(chance, one.read_bytes()))
    output = chance.choice(["", "", "answer.html", "answer.csv"]) if kind == "search" else ""
    run(folder, "merge", *names, *chance.choice([["--json"], []]), *(["-o", output] if output else []))


def tables(chance: Random, folder: Path) -> None:
    (folder / "runs.csv").write_bytes(m.mutated_text(chance, MEASURED.encode()))
    run(folder, "score", "runs.csv", *chance.choice([["--json"], []]))


def operation_tables(chance: Random, folder: Path) -> None:
    text = (ROOT / "examples/operations.csv").read_bytes()
    name, mutate = "operations.csv", chance.choice([m.mutated_text, m.mutated_text, m.damaged])
    content = mutate(chance, text)
    if chance.random() < 0.3:
        packed = io.BytesIO()
        polars.read_csv(text).write_parquet(packed)
        name, content = "operations.parquet", m.damaged(chance, packed.getvalue())
    (folder / name).write_bytes(content)
    output = chance.choice(WRITES)
    run(folder, "stragglers", name, *chance.choice([["--json"], []]), *(["-o", output] if output else []))


def costs(chance: Random, folder: Path) -> None:
    rows, model = (ROOT / "examples/operators.json").read_bytes(), made_once("cost", cost_file) / "model.npz"
    packed = model.read_bytes()
    if chance.random() < 0.5:
        rows = chance.choice([m.mutated_json, m.damaged])(chance, rows)
    else:
        packed = m.damaged_npz(chance, packed)
    (folder / "rows.json").write_bytes(rows)
    (folder / "model.npz").write_bytes(packed)
    run(folder, "cost", "rows.json", "--model", "model.npz", *chance.choice([["--json"], []]))


SHEET = b"""like = "h100"
power_w = 500
hbm_tb_s = 2.0
sms = 120
price = 2.5
nvlink_domain = 8

[peak_tflops]
bf16 = 800
fp8 = 1500
"""


def data_sheets(chance: Random, folder: Path) -> None:
    (folder / "gpu.toml").write_bytes(m.mutated_text(chance, SHEET))
    gpus = chance.choice(["gpu.toml", "gpu.toml", "h200,gpu.toml"])
    example = str(ROOT / "examples/one-h200.toml")
    run(folder, "predict", example, "--gpu", gpus, *chance.choice([["--json"], [], ["-o", "answer.html"]]))


def model_headers(chance: Random, folder: Path) -> None:
    """A model file whose trees are sound and whose header is not."""
    from lumos.cost.hardware_model import encode
    from lumos.cost.operator_model import _shipped
    from lumos.model_file import packed, unpacked

    sections = {
        "host": {"launch_us": 30.0, "error_pct": 2.0}, "isolation_us": 2.8,
        "in_step": {"matrix": 1.1, "stream": 1.0, "launch_gap_us": 1.0, "error_pct": 3.0},
        "power": {"flop_pj": {"bf16": 1.0, "fp8": 0.6, "tf32": 2.0, "fp32": 9.0}, "memory_pj": 120.0},
        "provenance": {"samples": [{"file": "a", "rows": 3}], "lumos": "0", "fitted": "2026-01-01"},
    }  # fmt: skip
    whole = unpacked(encode("h200", dict(list(_shipped("h200").items())[:2]), **sections), "model.npz")
    header = m.mutated_json(chance, json.dumps(whole.header).encode())
    try:
        (folder / "model.npz").write_bytes(packed(json.loads(header), whole.arrays))
    except ValueError:  # no JSON any more, which other targets try
        return
    example = str(ROOT / "examples/one-h200.toml")
    run(folder, *chance.choice([("about", "model.npz"), ("predict", example, "--model", "model.npz")]), "--json")


def samples(chance: Random, folder: Path) -> None:
    """Few rows, so that what is fitted is done at once."""
    lines = [json.dumps({"gpu": "NVIDIA H200", "torch": "2.11"})]
    for number in range(60):
        lines.append(json.dumps({"op": "gelu", "t": 64 * (number + 1), "h": 512, "dtype": "bf16", "us": 5.0 + number}))
    (folder / "samples.jsonl").write_bytes(m.mutated_text(chance, "\n".join(lines).encode() + b"\n"))
    run(folder, "fit", "samples.jsonl", "-o", "my.npz", "--json")


def dry_recording(folder: Path) -> None:
    write_recording(folder / "rank0.dry.json.gz", small_recording())


def dry_recordings(chance: Random, folder: Path) -> None:
    """Recordings of dry runs in which any value is another one, or which are damaged."""
    content = gzip.decompress((made_once("dry", dry_recording) / "rank0.dry.json.gz").read_bytes())
    mutate = chance.choice([m.mutated_leaves, m.mutated_leaves, m.mutated_json, m.damaged])
    packed = gzip.compress(mutate(chance, content), 1)
    if chance.random() < 0.1:
        packed = m.damaged(chance, packed)
    (folder / "rank0.dry.json.gz").write_bytes(packed)
    gpu = chance.choice([[], ["--gpu", "h200"], ["--gpu", "a100,h200"]])
    output = chance.choice(WRITES)
    written = ["-o", output] if output else []
    run(folder, "predict", "--from", ".", *gpu, *chance.choice([["--json"], []]), *written)


def profiler_costs(chance: Random, folder: Path) -> None:
    write_trace(folder / "good.json", training_run(steps=1), header(0))
    text = (ROOT / "src/lumos/data/profiler.json").read_bytes()
    (folder / "costs.json").write_bytes(chance.choice([m.mutated_json, m.damaged])(chance, text))
    run(folder, "replay", "good.json", "--profiler-costs", "costs.json", *chance.choice([["--json"], []]))


TARGETS: tuple[tuple[Callable[[Random, Path], None], int], ...] = (
    (trace_commands, 40), (convert_and_back, 15), (chakra, 10), (setups, 25), (numbers_of_setups, 25), (searches, 10),
    (journals, 10), (merges, 15), (tables, 10), (costs, 10), (profiler_costs, 5), (changed_runs, 3),
    (data_sheets, 8), (model_headers, 8), (samples, 3), (operation_tables, 15), (failing_runs, 10),
    (learned_spreads, 15), (dry_recordings, 15),
)  # fmt: skip


# Cases, and what is kept of those that fail


class Finding(NamedTuple):
    """A case that failed."""

    case: str
    target: str
    what: str
    trace: str

    @property
    def kind(self) -> str:
        """Findings of one kind have one cause, as a rule: the exception, and the line of the project that raised it."""
        places = [line.strip() for line in self.trace.splitlines() if "/lumos/" in line and ", line " in line]
        return f"{self.target} {self.what.split(':')[0]} {places[-1] if places else self.what[:60]}"


def try_case(
    seed: int, number: int, folder: Path, only: str = "", most_seconds: float = MOST_SECONDS
) -> Finding | None:
    """One case in an empty folder, of a target by chance or of the `only` one."""
    chance = Random(f"{seed}:{number}")
    chosen = [(target, weight) for target, weight in TARGETS if only in ("", target.__name__)]
    target = chance.choices(*zip(*chosen, strict=True))[0]
    try:
        with time_limit(most_seconds), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # of numpy: overflow, invalid values
            target(chance, folder)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        what = "".join(traceback.format_exception_only(error)).strip().splitlines()[0][:300]
        return Finding(f"{seed}:{number}", target.__name__, what, traceback.format_exc())
    return None


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooSlowError(f"more than {seconds:g} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def fuzz(
    seed: int, kept: Path | None, only: str = "", seconds: float = math.inf, cases: float = math.inf,
    most_seconds: float = MOST_SECONDS,
) -> tuple[int, list[Finding]]:  # fmt: skip
    """Try cases until there are enough or the time is over; (how many were tried, what was found)."""
    findings: list[Finding] = []
    kinds: Counter[str] = Counter()
    end, number = time.monotonic() + seconds, 0
    while number < cases and time.monotonic() < end:
        folder = Path(tempfile.mkdtemp(prefix="case-", dir=store()))
        finding = try_case(seed, number, folder, only, most_seconds)
        if finding is not None:
            findings.append(finding)
            kinds[finding.kind] += 1
            if kept is not None and kinds[finding.kind] <= MOST_OF_A_KIND:
                keep(finding, folder, kept)
        shutil.rmtree(folder, ignore_errors=True)
        number += 1
        if kept is not None and number % 1000 == 0:
            print(f"seed {seed}: {number:,} cases, {len(findings)} findings", file=sys.stderr, flush=True)
    return number, findings


def keep(finding: Finding, folder: Path, kept: Path) -> None:
    place = kept / finding.case.replace(":", "-")
    shutil.copytree(folder, place, dirs_exist_ok=True, symlinks=True)
    (place / "finding.txt").write_text(f"{finding.target}: {finding.what}\n\n{finding.trace}")
    print(f"{finding.case} {finding.target}: {finding.what}", flush=True)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    options.add_argument("--seconds", type=float, default=3600.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--keep", type=Path, default=ROOT / "out/fuzz", help="a folder for cases that fail")
    options.add_argument("--case", default="", help="SEED:NUMBER of one case to repeat")
    options.add_argument("--target", default="", choices=["", *(target.__name__ for target, _ in TARGETS)])
    chosen = options.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    try:
        if chosen.case:
            seed, number = map(int, chosen.case.split(":"))
            folder = Path(tempfile.mkdtemp(prefix="lumos-case-"))
            finding = try_case(seed, number, folder, chosen.target)
            print(f"{folder}\n{finding.trace if finding else 'sound'}")
            return finding is not None
        tried, findings = fuzz(chosen.seed, chosen.keep, chosen.target, chosen.seconds)
    finally:
        shutil.rmtree(store(), ignore_errors=True)
    print(f"seed {chosen.seed}: {tried:,} cases, {len(findings)} findings" + (f" in {chosen.keep}" if findings else ""))
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
