"""Dry-run scripts, ranks and architectures that were measured on an H200, and write the page docs/dry_runs.md.

    python benchmarks/dry_runs.py [--data ../shared/data] [-o docs/dry_runs.md] [--only NAME ...] [--blind]

Recordings are kept in out/dry and made again when the code that makes them changes. `--blind` adds a chapter on
the scripts and ranks that were kept apart from development; later pages keep that chapter as it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lumos.dry_run.dry_files import read_recording
from lumos.dry_run.dry_prediction import DryPrediction, dry_prediction
from lumos.dry_run.from_config import _setup
from lumos.dry_run.from_script import predict_script
from lumos.prediction.bill import Tariff

ROOT = Path(__file__).resolve().parents[1]
CALIBRATION, KEPT = ROOT / "calibration", ROOT / "out/dry"
PRICING = {  # files of dry_run that no recording depends on
    "aten_prices.py", "aten_work.py", "dry_step.py", "dry_prediction.py", "host_costs.py", "from_script.py",
    "from_config.py", "dry_files.py",
}  # fmt: skip
GPU = "cluster.gpu=h200"
AT_ONCE = 2  # dry runs at the same time
WARM = {"ranks": 4, "architectures": 3, "parallel": 0}  # steps at the beginning that are left out, if all are kept
BUSY, WAITED = 0.9, 0.1  # shares of a step by which the GPU decides it: at work, or awaited by the host at its end

INTRODUCTION = """# Dry runs

Written by `make accuracy`. Training code that was measured on one H200 (torch 2.11, transformers 5.17), against its dry
run on a machine without a GPU (torch {torch}, {cores} cores): `lumos capture --dry` and `lumos predict --from` for
scripts and ranks, `lumos predict config.json` for architectures. No script was changed for it. The measured step is
the median of 6 to 10 steps after warm-up; the measured memory is `torch.cuda.max_memory_allocated()`.

- **Bound by**: the GPU, if it worked for {busy:.0f} % of the measured step, or if the host waited for it at the end of
  the step for {waited:.0f} % of it; else the host. In brackets: not measured, as predicted.
- **Scatter**: the longest measured step minus the shortest, in percent of the median. The host is a virtual machine.
  Steps that it decides scatter by {scatter} within one run; errors smaller than that mean little.
- **Dry run**: seconds and peak memory of the process, from the start of Python on; {at_once} dry runs at a time.
- Ranks were measured with a fake process group: collectives take no time, in the dry runs neither. What is tested is
  the rank's own kernels, host code and memory.

"""
BLIND = """## Blind

Scripts and ranks that were measured with the others and kept apart: not looked at before, and predicted once, on
{date}, when everything else was finished.
"""
HEAD = (
    "| {what} | bound by | measured, ms | scatter, % | predicted, ms | step, % | measured, GiB | memory, % | "
    "dry run, s | MB |\n|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Case:
    """Something measured, and how to dry-run it: a command for Python, or a config.json with its batch."""

    name: str
    set: str  # the table it belongs to
    step_s: float
    steps_s: Sequence[float]
    peak: float
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    batch: tuple[int, int] = (0, 0)  # sequence, micro-batch
    recompute: bool = False
    busy: float | None = None  # share of the step in which the GPU worked
    waited: float = 0.0  # share of the step in which the host waited at its end
    world: int = 0  # ranks to fake, if the script does not fake them itself

    @property
    def scatter(self) -> float | None:
        """In percent of the step."""
        return 100 * (max(self.steps_s) - min(self.steps_s)) / self.step_s if len(self.steps_s) > 2 else None


LARGE = Case(
    "large", "", 0.0, (), 0.0, world=64,
    command=(str(ROOT / "examples/train_script.py"), "--layers", "80", "--hidden", "8192", "--vocab", "128000"),
)  # fmt: skip


class Result(NamedTuple):
    """A case with its prediction."""

    case: Case
    predicted: DryPrediction
    answer_s: float
    dry_run_s: float
    dry_run_mb: float

    @property
    def bound(self) -> str:
        case = self.case
        if case.busy is None and case.waited < WAITED:
            return f"({'host' if self.predicted.host_bound else 'GPU'})"
        return "GPU" if (case.busy or 0.0) >= BUSY or case.waited >= WAITED else "host"

    @property
    def step_error(self) -> float:
        return 100 * (self.predicted.step_ms / 1e3 / self.case.step_s - 1)

    @property
    def memory_error(self) -> float:
        return 100 * (self.predicted.memory.stages[0].peak / self.case.peak - 1)

    def row(self) -> str:
        case = self.case
        scatter = "" if case.scatter is None else f"{case.scatter:.0f}"
        return (
            f"| {case.name} | {self.bound} | {1e3 * case.step_s:.1f} | {scatter} | {self.predicted.step_ms:.1f} | "
            f"{self.step_error:+.1f} | {case.peak / 2**30:.2f} | {self.memory_error:+.2f} | {self.dry_run_s:.0f} | "
            f"{self.dry_run_mb:.0f} |"
        )


class Failure(NamedTuple):
    """A case that was not predicted."""

    case: Case
    reason: str


# ---------------------------------------------------------------------- what was measured
def _rows(name: str) -> list[dict[str, Any]]:
    path = CALIBRATION / name
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
        return [row for row in json.load(file)["results"] if "error" not in row]


def _shares(row: dict[str, Any]) -> dict[str, Any]:
    busy = row["gpu_busy_us"] / 1e6 / row["step_s"] if "gpu_busy_us" in row else None
    return {"busy": busy, "waited": row.get("wait_s", 0.0) / row["step_s"]}


def scripts(file: str, set_: str) -> Iterator[Case]:
    for row in _rows(file):
        path = CALIBRATION / "scripts" / row["script"]
        yield Case(path.stem, set_, row["step_s"], row["steps_s"], row["peak"], (str(path),), **_shares(row))


def ranks(file: str, set_: str) -> Iterator[Case]:
    for row in _rows(file):
        name, steps = row["case"]["name"], row["steps_s"][WARM["ranks"] :]
        command = (str(CALIBRATION / "ranks_h200.py"), name)
        yield Case(name, set_, row["step_s"], steps, row["peak"], command, **_shares(row))


def architectures(file: str, set_: str) -> Iterator[Case]:
    for row in _rows(file):
        batch = row["batch"]
        shape = (batch.get("input_ids") or batch.get("labels"))[0]
        step = row["step_s_median"]
        yield Case(
            row["name"], set_, step, row["step_s"][WARM["architectures"] :], row["peak_mem_alloc"],
            config=row["config"], batch=(shape[1] if len(shape) > 1 else 1, shape[0]),
            busy=sum(op["us"] for op in row["operators"]) / 1e6 / step,
        )  # fmt: skip


def shared_scripts(data: Path) -> Iterator[Case]:
    folder = data / "h200/scripts"
    table = folder / "measured.json"
    for name, row in (json.loads(table.read_text()) if table.exists() else {}).items():
        compiled = name.endswith("_compiled")
        command = (str(folder / f"{name.removesuffix('_compiled')}.py"),)
        environment = {"COMPILE": "1"} if compiled else {}
        yield Case(f"{name} (shared)", "scripts", row["step_s"], (), row["peak"], command, environment)


def shared_compiled_scripts(data: Path) -> Iterator[Case]:
    folder = data / "h200/compiled"
    table = folder / "measured.json"
    for row in json.loads(table.read_text())["rows"] if table.exists() else ():
        command = (str(folder / f"{row['name']}.py"),)
        yield Case(f"{row['name']} (shared)", "compiled scripts", row["median_ms"] / 1e3, (), row["peak_gib"] * 2**30,
                   command)  # fmt: skip


def shared_ranks(data: Path) -> Iterator[Case]:
    """Cases of parallel.py, which reads what to run from a file."""
    measured = ("step_s", "step_s_median", "peak_mem_alloc", "peak_mem_reserved", "profiled_step_s", "trace")
    for path in sorted((data / "h200/parallel").glob("*.json")):
        row = json.loads(path.read_text())
        asked = KEPT / "cases" / path.name
        asked.parent.mkdir(parents=True, exist_ok=True)
        asked.write_text(json.dumps([{key: value for key, value in row.items() if key not in measured}]))
        command = (str(data / "h200/parallel.py"), str(asked), "--one", "0", "--out", str(KEPT / "cases/out"))
        name = f"{row['name']} (shared)"
        yield Case(name, "ranks", row["step_s_median"], row["step_s"], row["peak_mem_alloc"], command)


def shared_architectures(data: Path) -> Iterator[Case]:
    for path in sorted((data / "h200/zoo").glob("*.config.json")):
        row = json.loads(path.with_name(path.name.replace(".config", "")).read_text())
        yield Case(
            f"{row['name']} (shared)", "architectures", row["step_s_median"], row["step_s"], row["peak_mem_alloc"],
            config=json.loads(path.read_text()), batch=(row["seq"], row["mbs"]), recompute=row["ckpt"],
        )  # fmt: skip


def cases(data: Path, blind: bool) -> Iterator[Case]:
    yield from scripts("scripts_h200.json", "scripts")
    yield from shared_scripts(data)
    yield from scripts("scripts_compiled_h200.json", "compiled scripts")
    yield from shared_compiled_scripts(data)
    yield from ranks("ranks_h200.json.xz", "ranks")
    yield from shared_ranks(data)
    yield from architectures("architectures_h200.json.xz", "architectures")
    yield from shared_architectures(data)
    yield from architectures("architectures_blind_h200.json.xz", "second architectures")
    if blind:
        yield from scripts("scripts_blind_h200.json", "blind scripts")
        yield from ranks("ranks_blind_h200.json", "blind ranks")


# ---------------------------------------------------------------------- dry runs
@cache
def recording_code() -> str:
    """A digest of the code that recordings depend on, as it is when this begins."""
    package = ROOT / "src/lumos"
    files = [*(package / "dry_run").glob("*.py"), *(package / "capture").rglob("*.py")]
    text = b"".join(file.read_bytes() for file in sorted(files) if file.name not in PRICING)
    return hashlib.sha256(text).hexdigest()


def folder_of(case: Case, code: str) -> Path:
    """Where the recording of a case is kept; another one if the code or the case is another."""
    script = Path(case.command[0]).read_text() if case.command else ""
    how = [case.command, case.environment, case.config, case.batch, case.recompute, case.world]
    asked = json.dumps([code, script, *how])
    return KEPT / f"{case.name.split()[0]}-{hashlib.sha256(asked.encode()).hexdigest()[:12]}"


def record(case: Case, folder: Path) -> str:
    """Dry-run a case unless that was done; why it failed, or nothing. Seconds and MB are kept beside the recording."""
    if (folder / "cost.json").exists():
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    if case.config:
        (folder / "config.json").write_text(json.dumps(case.config))
        numbers = [*map(str, case.batch), str(int(case.recompute))]
        command = [sys.executable, __file__, "--record", str(folder), *numbers]
    else:
        lumos = [sys.executable, "-m", "lumos.cli.main", "capture", "--dry", "-o", str(folder), "--gpu", "h200"]
        lumos += ["--world", str(case.world)] if case.world else []
        command = [*lumos, "--", sys.executable, *case.command]
    print(case.name, flush=True)
    began, log = time.perf_counter(), folder / "log.txt"
    with log.open("wb") as output:
        files = [(os.POSIX_SPAWN_DUP2, output.fileno(), 1), (os.POSIX_SPAWN_DUP2, output.fileno(), 2)]
        child = os.posix_spawn(command[0], command, {**os.environ, **case.environment}, file_actions=files)
        _, status, used = os.wait4(child, 0)  # of the command, and of the processes that it waited for
    if status or not list(folder.glob("*.dry.json.gz")):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("lumos: ")]
        return lines[0].removeprefix("lumos: ") if lines else f"exit status {os.waitstatus_to_exitcode(status)}"
    cost = {"seconds": time.perf_counter() - began, "mb": used.ru_maxrss / 1024}
    (folder / "cost.json").write_text(json.dumps(cost))
    return ""


def record_config(folder: Path, seq: int, batch: int, recompute: bool) -> None:
    """What `lumos predict config.json` records, kept as a file."""
    from lumos.dry_run.huggingface_model import builder
    from lumos.dry_run.record import record_step
    from lumos.dry_run.recorded_step import write_recording

    config = json.loads((folder / "config.json").read_text())
    write_recording(folder / "rank0.dry.json.gz", record_step(builder(config, seq, batch, recompute=recompute)))


def predict(case: Case, folder: Path) -> Result:
    began = time.perf_counter()
    if case.config:
        changes = [GPU, f"train.seq={case.batch[0]}", f"train.micro_batch={case.batch[1]}"]
        setup = _setup(folder / "config.json", changes).setup
        found = dry_prediction(read_recording(folder / "rank0.dry.json.gz"), setup, (), Tariff())
    else:
        found = predict_script(folder, [GPU], Tariff())
    _ = found.step_ms, found.memory  # made when asked for
    answer_s = time.perf_counter() - began
    cost = json.loads((folder / "cost.json").read_text())
    return Result(case, found, answer_s, cost["seconds"], cost["mb"])


def evaluated(chosen: list[Case]) -> Iterator[Result | Failure]:
    """Every case, in order.

    All dry runs come first, while this process is small: the memory of a process includes what its parent had.
    """
    code = recording_code()
    folders = [folder_of(case, code) for case in chosen]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        reasons = list(pool.map(record, [*chosen, LARGE], [*folders, folder_of(LARGE, code)]))
    for case, folder, reason in zip(chosen, folders, reasons, strict=False):
        yield Failure(case, reason) if reason else predict(case, folder)


# ---------------------------------------------------------------------- the page
class Section(NamedTuple):
    """A table of the page."""

    title: str
    what: str  # is in its rows
    note: str


SECTIONS = {
    "scripts": Section(
        "Scripts", "script",
        "As people write them (`calibration/scripts/development`), and shared ones. Costs of operators and of host "
        "calls were improved with these errors in sight, and two constants of the host are set by hand from these "
        "scripts and the ranks below (`calibration/fit_host.py`).",
    ),
    "compiled scripts": Section(
        "Compiled scripts", "script",
        "Scripts that use `torch.compile` (`calibration/scripts/compiled`), and shared ones. No price was fitted on "
        "them.",
    ),
    "ranks": Section(
        "One rank of a large job", "rank",
        "FSDP2, DTensor tensor parallelism, pipeline stages, with and without `torch.compile` and checkpointing "
        "(`calibration/ranks_h200.py`), and shared ones. Improved with these errors in sight.",
    ),
    "architectures": Section(
        "Architectures from their config.json", "architecture",
        "Small versions of published models (`calibration/architectures_h200.py`), on which some prices were tuned, "
        "and shared ones.",
    ),
    "second architectures": Section(
        "A second set of architectures", "architecture",
        "Measured later (`calibration/architectures_blind_h200.json.xz`). No price was tuned on these steps. But their "
        "errors have been looked at since, and gradients of biases are fitted on single operators of both sets.",
    ),
    "blind scripts": Section("Blind scripts", "script", "`calibration/scripts/blind`."),
    "blind ranks": Section("Blind ranks", "rank", "The cases called blind in `calibration/ranks_h200.py`."),
}  # fmt: skip


def _summary(results: Sequence[Result]) -> str:
    parts = []
    for title, chosen in (
        ("all", results),
        ("GPU-bound", [r for r in results if "GPU" in r.bound]),
        ("host-bound", [r for r in results if "host" in r.bound]),
    ):
        if chosen:
            errors = [abs(r.step_error) for r in chosen]
            parts.append(f"{title} ({len(errors)}) mean {statistics.mean(errors):.1f} %, worst {max(errors):.1f} %")
    memory = [abs(r.memory_error) for r in results]
    text = "; ".join(parts)
    return f"Step: {text}. Peak memory: mean {statistics.mean(memory):.2f} %, worst {max(memory):.2f} %."


def _overview(found: dict[str, list[Result]]) -> Iterator[str]:
    yield "| | runs | step, mean % | worst % | GPU-bound, mean % | host-bound, mean % | memory, mean % | worst % |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, results in found.items():
        steps, memory = [abs(r.step_error) for r in results], [abs(r.memory_error) for r in results]
        cells = [f"{statistics.mean(steps):.1f}", f"{max(steps):.1f}"]
        for side in ("GPU", "host"):
            errors = [abs(r.step_error) for r in results if side in r.bound]
            cells.append(f"{statistics.mean(errors):.1f} ({len(errors)})" if errors else "")
        cells += [f"{statistics.mean(memory):.2f}", f"{max(memory):.2f}"]
        yield f"| {SECTIONS[name].title} | {len(results)} | {' | '.join(cells)} |"


def page(results: Iterable[Result | Failure]) -> str:
    """Everything but what was kept apart."""
    results = list(results)
    found = _by_set(results)
    everything = [result for members in found.values() for result in members]
    lines = [*_overview(found), "", *_tables(found, "##"), "## Cost of a dry run\n", _cost(everything), ""]
    return _introduction(everything) + "\n".join([*lines, *_failures(results, "##")])


def blind_chapter(results: Iterable[Result | Failure]) -> str:
    """What was kept apart. It is written once; later pages keep it as it was."""
    results = list(results)
    found = _by_set(results)
    head = BLIND.format(date=date.today().isoformat())
    return "\n".join([head, *_overview(found), "", *_tables(found, "###"), *_failures(results, "###")])


def _by_set(results: Iterable[Result | Failure]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in results:
        if isinstance(result, Result):
            found.setdefault(result.case.set, []).append(result)
    return found


def _tables(found: dict[str, list[Result]], level: str) -> Iterator[str]:
    for name, members in found.items():
        title, what, note = SECTIONS[name]
        yield f"{level} {title}\n\n{note}\n\n{_summary(members)}\n\n{HEAD.format(what=what)}"
        yield from (result.row() for result in members)
        yield ""


def _failures(results: Iterable[Result | Failure], level: str) -> Iterator[str]:
    failed = [result for result in results if isinstance(result, Failure)]
    if failed:
        yield f"{level} Not predicted\n\n| | why |\n|---|---|"
        yield from (f"| {case.name} | {reason.replace('|', '/')} |" for case, reason in failed)
        yield ""


def _introduction(results: Sequence[Result]) -> str:
    import torch

    scatter = [r.case.scatter for r in results if r.bound == "host" and r.case.scatter is not None]
    shown = f"{min(scatter):.0f} to {max(scatter):.0f} %" if scatter else "(none measured)"
    return INTRODUCTION.format(
        torch=torch.__version__, cores=os.cpu_count(), busy=100 * BUSY, waited=100 * WAITED, scatter=shown,
        at_once=AT_ONCE,
    )  # fmt: skip


def _cost(results: Sequence[Result]) -> str:
    seconds, mb, answers = ([getattr(r, name) for r in results] for name in ("dry_run_s", "dry_run_mb", "answer_s"))
    return (
        f"{len(results)} dry runs: median {statistics.median(seconds):.0f} s and {statistics.median(mb):,.0f} MB, "
        f"at most {max(seconds):.0f} s and {max(mb):,.0f} MB.\n\nAn answer from a kept dry run, without the start of "
        f"Python: median {statistics.median(answers):.2f} s, at most {max(answers):.2f} s.\n\n{_large()}"
    )


def _large() -> str:
    """The cost of a dry run of a large model, which was not measured."""
    folder = folder_of(LARGE, recording_code())
    reason = record(LARGE, folder)
    if reason:
        return f"{LARGE.name}: {reason}"
    recording = read_recording(folder / "rank0.dry.json.gz")
    cost = json.loads((folder / "cost.json").read_text())
    return (
        f"A model of {recording.parameters / 1e9:.0f} billion parameters, rank 0 of {LARGE.world} "
        f"(`examples/train_script.py {' '.join(LARGE.command[1:])}`): {cost['seconds']:.0f} s and {cost['mb']:,.0f} MB."
    )


def _told(results: Iterator[Result | Failure]) -> Iterator[Result | Failure]:
    """The same, printed as they come."""
    for result in results:
        print(result.row() if isinstance(result, Result) else f"{result.case.name}: {result.reason}", flush=True)
        yield result


def kept_chapter(page: Path | None) -> str:
    """The chapter on what was kept apart, as an earlier page has it."""
    text = page.read_text() if page and page.exists() else ""
    return text[text.index("## Blind\n") :] if "## Blind\n" in text else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names begin so")
    parser.add_argument("--blind", action="store_true", help="also what was kept apart from development")
    parser.add_argument("--record", nargs=4, help=argparse.SUPPRESS)  # a config.json, in a process of its own
    options = parser.parse_args()
    if options.record:
        folder, *numbers = options.record
        seq, batch, recompute = map(int, numbers)
        record_config(Path(folder), seq, batch, bool(recompute))
        return
    chosen = [c for c in cases(options.data, options.blind) if c.name.startswith(tuple(options.only or [""]))]
    results = list(_told(evaluated(chosen)))
    kept_apart = [result for result in results if result.case.set.startswith("blind")]
    chapter = blind_chapter(kept_apart) if options.blind else kept_chapter(options.output)
    text = page([result for result in results if result not in kept_apart]) + (f"\n{chapter}" if chapter else "")
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
