"""Measure how right the answers are on the shared measurements, and write the page docs/accuracy.md.

    python benchmarks/accuracy.py [--data ../shared/data] [-o docs/accuracy.md]

Truth is the wall clock of the run (measured.json, rankR.json), or for public traces the step that the trace itself
marks; never what the simulator says. None of these traces was used to fit anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "calibration"))

from changes_data import unpack  # noqa: E402
from lumos.analysis.replay import BETWEEN_STREAMS, Replay, ablate, replay  # noqa: E402  # noqa: E402
from lumos.graph.rules.build import RULE_NAMES, build  # noqa: E402
from lumos.graph.rules.profiler_cost import load_profiler_cost  # noqa: E402
from lumos.graph.scaling import Scale  # noqa: E402
from lumos.prediction.prediction import predict  # noqa: E402
from lumos.read.job import read_job  # noqa: E402
from lumos.trace.steps import find_steps  # noqa: E402

GPU_BOUND = ("h4096", "b8", "s4096")
LAUNCH_BOUND = ("tiny_l2_h512", "h1024")


@dataclass(frozen=True)
class Case:
    """A trace with the wall-clock times measured beside it, in milliseconds."""

    name: str
    run: Replay
    profiled_ms: float
    clean_ms: float
    synchronised: bool = True


def single_cases(data: Path) -> Iterator[Case]:
    root = data / "h200/single"
    for record in json.loads((root / "measured.json").read_text())["results"]:
        path = root / f"{record['name']}.pt.trace.json.gz"
        if path.exists():
            profiled = 1e3 * statistics.mean(record["profiled_step_s"][2:4])
            clean = 1e3 * record["step_s_median"]
            yield Case(record["name"], replay(read_job(path)), profiled, clean, record.get("sync", True))


def multirank_cases(data: Path) -> Iterator[Case]:
    for folder in sorted((data / "h200/multirank").iterdir()):
        if (folder / "rank0.pt.trace.json.gz").exists():
            ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank[0-9].json"))]
            profiled = 1e3 * statistics.mean(statistics.mean(r["profiled_step_s"][2:4]) for r in ranks)
            clean = 1e3 * statistics.mean(r["step_s_median"] for r in ranks)
            yield Case(folder.name, replay(read_job(folder)), profiled, clean)


def public_jobs(data: Path) -> Iterator[tuple[str, Replay]]:
    """Jobs of several ranks recorded by others."""
    rec = data / "public/torchrec_v100"
    yield "Megatron TP8 (8 × A100)", replay(read_job(data / "public/megatron_tp8_a100/kineto"))
    yield "SGLang decode TP8 (8 × B200)", replay(read_job(data / "public/sglang_decode_b200"))
    for folder, match in (
        ("resnet18", ""),
        ("sst_long_a2a_optimizer_2", "*internal_240*"),
        ("sst_long_a2a_optimizer_2", "*internal_26*"),
        ("sst_long_a2a_optimizer_3", ""),
        ("sst_long_a2a_optimizer_4", ""),
        ("sst_sleep_pl_dense_after_backward_2", ""),
    ):
        yield f"TorchRec {folder} {match.strip('*')}".rstrip(), replay(read_job(rec / folder, match))


def percent(predicted: float, truth: float) -> float:
    return 100 * (predicted / truth - 1)


def table(head: list[str], rows: list[list[str]]) -> str:
    line = "| " + " | ".join(head) + " |\n|" + "---|" * len(head) + "\n"
    return line + "".join("| " + " | ".join(row) + " |\n" for row in rows)


def verdict(errors: list[float], mean_bar: float, worst_bar: float | None = None) -> str:
    mean, worst = statistics.mean(map(abs, errors)), max(map(abs, errors))
    text = f"**mean {mean:.2f} %** (bar {mean_bar:g}), worst {worst:.2f} %"
    return text + (f" (bar {worst_bar:g})" if worst_bar else "") + f", {len(errors)} traces\n"


def replay_section(single: list[Case], several: list[Case], public: list[tuple[str, Replay]]) -> str:
    def rows(cases: list[Case]) -> list[list[str]]:
        return [
            [c.name, f"{c.profiled_ms:.2f}", f"{c.run.simulated_steps.mean:.2f}",
             f"{percent(c.run.simulated_steps.mean, c.profiled_ms):+.2f}",
             f"{c.run.path_summary.unexplained_ms:.2f}"]
            for c in cases
        ]  # fmt: skip

    def errors(cases: list[Case]) -> list[float]:
        return [percent(c.run.simulated_steps.mean, c.profiled_ms) for c in cases if c.synchronised]

    head = ["trace", "wall clock ms", "simulated ms", "error %", "unexplained ms"]
    wide = [
        [name, f"{r.recorded_steps.mean:.2f}", f"{r.simulated_steps.mean:.2f}", f"{r.error_pct:+.2f}",
         f"{r.path_summary.unexplained_ms:.2f}"]
        for name, r in public
    ]  # fmt: skip
    return (
        "## Replay\n\nThe graph, simulated, against the recorded wall clock. This shows only that nothing was lost: a "
        "graph that freezes every gap replays perfectly. The unexplained column is the frozen time on the critical "
        "path.\n\n"
        f"One H200: {verdict(errors(single), 1, 3)}\n{table(head, rows(single))}\n"
        f"Several ranks on one H200: {verdict(errors(several), 3, 8)}\n{table(head, rows(several))}\n"
        f"Public jobs: {verdict([r.error_pct for _, r in public], 3)}\n{table(head, wide)}"
    )


def what_if_section(single: list[Case]) -> str:
    rows = []
    for case in single:
        if case.name in GPU_BOUND + LAUNCH_BOUND:
            ratio = predict(case.run, [Scale("compute", 0.5)]).step_ms / case.run.clean_ms
            unexplained = 100 * case.run.path_summary.unexplained_ms / case.run.simulated_steps.mean
            kind = "GPU-bound" if case.name in GPU_BOUND else "launch-bound"
            expected = "0.48–0.60" if case.name in GPU_BOUND else "0.93–1.00"
            rows.append([case.name, kind, f"{ratio:.3f}", expected, f"{unexplained:.2f}"])
    head = ["trace", "kind", "step with kernels twice as fast", "must be", "unexplained, % of the step"]
    return "## What if kernels were twice as fast?\n\n" + table(head, rows)


def questions(data: Path) -> list[tuple[str, Path, str]]:
    """(name, trace, what-if) pairs whose answers hang on different rules."""
    h200, tests = data / "h200", ROOT / "tests/data"
    return [
        ("h4096", h200 / "single/h4096.pt.trace.json.gz", "compute=0.5"),
        ("h1024", h200 / "single/h1024.pt.trace.json.gz", "cpu=0.5"),
        ("full queue", tests / "full_queue.json.gz", "kernel:spin=0.5"),
        ("ddp2_l8", h200 / "multirank/ddp2_l8", "comm=0.5"),
        ("fsdp2_l8", h200 / "multirank/fsdp2_l8", "comm=0.5"),
        ("pp2_mb4", h200 / "multirank/pp2_mb4", "cpu=0.5"),
    ]


def ablation_section(data: Path) -> str:
    """What-ifs with one rule taken away: which rules carry the answers."""
    asked = questions(data)
    traces = [read_job(path) for _, path, _ in asked]
    rows = []
    for rule in ("", *RULE_NAMES):
        cells = [f"without {rule}" if rule else "all rules"]
        for trace, (_, _, scale) in zip(traces, asked, strict=True):
            execution = build(trace, [rule])
            run = Replay(execution, find_steps(execution.trace), load_profiler_cost())
            ratio = predict(run, [Scale.parse(scale)]).step_ms / run.clean_ms
            cells.append(f"{ratio:.3f} ({run.error_pct:+.2f} %)")
        rows.append(cells)
    return (
        "## What each rule is worth\n\nThe share of the step left in a what-if, and in brackets the replay error, "
        "with one rule removed. Replay does not notice; the prediction does.\n\n"
        + table(["rules", *(f"{name}, {scale}" for name, _, scale in asked)], rows)
    )


def fixed_rules_jobs() -> Iterator[tuple[str, Replay]]:
    """Jobs recorded after the dependency rules were fixed (calibration/replays_h200.tar.xz)."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(ROOT / "calibration/replays_h200.tar.xz", Path(folder))
        for job in sorted((Path(folder) / "multirank").iterdir()):
            yield job.name, replay(read_job(job))


def ablation_table(jobs: list[tuple[str, Replay]]) -> str:
    """Errors of all jobs with nothing frozen, under all rules and without some."""
    found = {name: {", ".join(one.without): one.error_pct for one in run.ablation} for name, run in jobs}
    rows = []
    for name in ("", *RULE_NAMES, ", ".join(BETWEEN_STREAMS)):
        # A rule that states nothing in a job changes nothing there.
        errors = [errors.get(name, errors[""]) for errors in found.values()]
        summary = [f"{statistics.mean(map(abs, errors)):.2f}", f"{max(errors, key=abs):+.2f}"]
        rows.append([f"without {name}" if name else "all rules", *(f"{e:+.2f}" for e in errors), *summary])
    return table(["rules", *found, "mean", "worst"], rows)


def unfrozen_section(several: list[Case], public: list[tuple[str, Replay]]) -> str:
    """Replay with every unexplained wait set to zero, under all rules and without some: `lumos replay --ablate`."""
    others = [[name, f"{next(ablate(run.execution)).error_pct:+.2f}"] for name, run in public]
    return (
        "## Replay with nothing frozen\n\nA graph that keeps every wait as recorded replays perfectly, whatever its "
        "rules say. Here every wait that no rule explains is set to zero, and a synchronising call ends when what it "
        "waits for has ended; what the step lacks then is the error of the replay, in % (`lumos replay --ablate`). "
        "Published, on other jobs: 3.3 % by a graph with all rules, 14 % by one without dependencies between streams "
        "(the last row). Without `thread` or `collective`, a pause or a transfer keeps its recorded time, waiting "
        "included: those rows flatter.\n\nJobs recorded after the rules were fixed; their ranks share one H200 under "
        "MPS:\n\n"
        + ablation_table(list(fixed_rules_jobs()))
        + "\nJobs of the same kind that were looked at while the rules were written:\n\n"
        + ablation_table([(case.name, case.run) for case in several])
        + "\nThe rule `shared_gpu` ties a wait to a kernel of another rank that ran beside it, which need not be the "
        "one that ended it. It states nothing for ranks with GPUs of their own. Public jobs of that kind, all "
        "rules:\n\n" + table(["job", "error %"], others)
    )


def clean_section(single: list[Case], several: list[Case]) -> str:
    def rows(cases: list[Case]) -> list[list[str]]:
        return [
            [c.name, f"{c.profiled_ms:.2f}", f"{c.clean_ms:.2f}", f"{c.run.clean_ms:.2f}",
             f"{percent(c.run.clean_ms, c.clean_ms):+.1f}", f"{percent(c.run.never_profiled_ms, c.clean_ms):+.1f}"]
            for c in cases
        ]  # fmt: skip

    head = ["trace", "profiled ms", "measured clean ms", "clean_ms", "error %", "error % of never_profiled_ms"]
    return (
        "## The step without the profiler\n\nConstants from `calibration/fit_profiler.py`, fitted on other recordings. "
        "Hosts vary by 5–10 % from moment to moment (`base` and `nosync_base` are one model), several ranks on one "
        "GPU by 10 %: that is the floor of these figures.\n\n"
        f"One H200: {verdict([percent(c.run.clean_ms, c.clean_ms) for c in single], 5)}\n{table(head, rows(single))}\n"
        f"Several ranks on one H200: {verdict([percent(c.run.clean_ms, c.clean_ms) for c in several], 10)}\n"
        f"{table(head, rows(several))}"
    )


def page(data: Path) -> str:
    single, several, public = list(single_cases(data)), list(multirank_cases(data)), list(public_jobs(data))
    parts: list[Callable[[], str]] = [
        lambda: "# Accuracy\n\nWritten by `make accuracy` (benchmarks/accuracy.py); edit nothing here by hand.\n",
        lambda: replay_section(single, several, public),
        lambda: unfrozen_section(several, public),
        lambda: what_if_section(single),
        lambda: ablation_section(data),
        lambda: clean_section(single, several),
    ]
    return "\n".join(part() for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        sys.exit(f"{arguments.data}: the shared measurements are not here; say where with --data")
    text = page(arguments.data)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
