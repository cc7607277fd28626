"""Predict measured runs from the traces of others, and write the page docs/changes.md.

    python benchmarks/changes.py [--data ../shared/data] [--blind] [-o docs/changes.md]

Truth is the wall clock of the target, measured without the profiler. `--blind` adds a chapter on what was kept apart
from development; later pages keep that chapter as it was. Unpacked archives stay in out/changes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import tomli_w

from change_cases import (
    BLIND,
    DEVELOPMENT,
    KINDS,
    ROOT,
    SETS,
    Case,
    Pair,
    Values,
    archived_cases,
    archived_pairs,
    sections_of,
    shared_cases,
    shared_pairs,
    unpacked,
)
from lumos.analysis.replay import Replay, replay
from lumos.errors import LumosError
from lumos.prediction.prediction import Prediction, predict
from lumos.read.job import read_job
from lumos.setup.setup import Setup
from lumos.setup.setup_files import read_plain, read_setup
from lumos.step.step import simulate_step
from lumos.traced.infer import Findings
from lumos.traced.infer.completion import changed, complete
from lumos.traced.infer.infer import infer
from lumos.traced.learned import CalibratedRun
from lumos.traced.trace_costs import MODES

sys.path.insert(0, str(ROOT / "tests"))

from synthetic_traces import write_synthetic

GPU_BOUND = 0.85  # share of the step in which kernels run, from which on the GPU decides it
DESCRIBED = "described"
WAYS = {  # of predicting, for the ablation
    DESCRIBED: "no trace", "trace": "per operator", "drawn": "per operator, drawn towards the model",
}  # fmt: skip
TITLES = {
    "ranks": "One rank of a large job", "single": "One GPU", "architectures": "Architectures, from their traces alone",
    "multirank": "Several ranks on one GPU",
}  # fmt: skip
NOTES = {
    "ranks": "Recorded alone with a fake process group: other parallelism, recomputation, sizes and batches. The truth "
    "has no communication, so the network is endless in the predictions as well. What is tested is the rank's own "
    "kernels, host code and memory.",
    "single": "Llama-like models of transformers: other sizes, batches and recomputation.",
    "architectures": "No setup file: everything is inferred from the trace. Shared ones have no second configuration; "
    "they are predicted as they are, which tests no change. The description is that of their config.json, where there "
    "is one that it knows.",
    "multirank": "Real NCCL, but every rank is a process on the same GPU: kernels of other ranks run in between, "
    "sockets stand in for NVLink, and steps vary by 10 % from run to run. Other layers and micro-batches.",
}
BARS = {  # what was to be shown, on unseen cases
    "ranks": {"mean": 8.0, "worst": 20.0, "GPU-bound mean": 4.0, "memory mean": 5.0},
    "single": {"GPU-bound mean": 4.0, "GPU-bound worst": 10.0, "host-bound mean": 12.0},
    "architectures": {"mean": 6.0},
    "multirank": {"mean": 6.0, "worst": 15.0},
}
NO_WORSE = 1.0  # percentage points by which the mean may be above that of the description
NOTICED = 0.1  # percentage points of the mean, from which on one way counts as better than another

INTRODUCTION = """# Changed runs, predicted from traces

Written by `make accuracy`. A run is predicted from the trace of another configuration, as
`lumos predict --from TRACE --set …` does; truth is the median step of the target on one H200 without the profiler, and
`torch.cuda.max_memory_allocated()`. Errors are (predicted / measured − 1) in percent; means are of their sizes.

- **Development**: `calibration/changes_h200.tar.xz`. Clock, usual times and weights (`src/lumos/data/change.json`) were
  fitted on its traces by `calibration/fit_changes.py`, and rules were written with its errors in sight.
- **Shared**: measurements that nothing was fitted on, except two numbers about the host: the typical launch of eager
  PyTorch, and how much the host of a GPU-bound trace counts (0.35). Rules were written with them at hand. Of ranks and
  jobs all possible pairs are shown; of one GPU, all targets from five traces.
{blind}- **GPU-bound**: kernels cover at least {bound:.0f} % of the clean step; other steps are host-bound. GPU share in
  brackets: neither measured nor traced, as the description has it. Ranks that share a GPU count as neither.
- **Description**: the target predicted from its setup alone, without any trace.

Published for such predictions: 4.2 % mean, 8.4 % worst, for changes of data and pipeline parallelism alone.
"""
BLIND_LINE = """- **[Blind](#blind)**: recorded with the development set, kept apart from development.
"""
BLIND_HEAD = """## Blind

Recorded like the development set (`calibration/changes_h200.py`), with other models, sizes and changes; kept apart, and
first predicted on 2026-11-16, when everything else was finished, and again on {date} with the code of that day. Nothing
was fitted to them in between.
"""
SUMMARY_HEAD = (
    "| | set | predictions | mean | worst | GPU-bound | mean | worst | host-bound | mean | inside its 80 % interval | "
    "memory, mean | worst | description alone, mean |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)
PAIR_HEAD = (
    "| from the trace of | to | what changes | measured, ms | predicted, ms | error, % | description, % | GPU share, % "
    "| memory, % |\n|---|---|---|---|---|---|---|---|---|"
)
ABLATION = """Mean and worst error in percent, of the same targets predicted in three ways:

- no trace: from the description;
- per operator: measured over modelled time of every operator at its traced size;
- per operator, drawn towards the model: the same, less so the further the sizes are apart. This is the default.

The last two have in common how the trace is cut, the clock, the host and the closing of the step: they differ in how
operators are costed, and in nothing else. What a host decides is the same in all of them.
"""
SCATTER = """## How sharp the truth is

Within one run: the slowest measured step over the fastest, minus 1. On another host: how much the median step
differed when the same case was measured again on another machine of the same type. Errors smaller than that mean
little.

| | set | bound by | targets | within one run, median % | largest % | on another host | median % | largest % |
|---|---|---|---|---|---|---|---|---|
"""
INFERRED = """## Setups inferred from traces

`lumos predict --from TRACES --set …` needs no setup file if all values can be inferred from the trace; a file completes
the rest. Inferred wrongly: {wrongs} of {compared} values in {count} traces. The rules were written with these traces at
hand, and all but the last were recorded by scripts of this project, so the figures show that nothing is broken, not how
well other recordings are understood. Rough values are only near, or stand for something that a setup has no key for;
they are marked as such in every answer, and not compared. Unchecked values are inferred, and not written down of that
run. What is written down of our own runs includes what their scripts always do (bf16, AdamW, gated MLPs except gpt2).
parallel.zero of a run without replicas has no meaning and is not inferred.

| trace | wrong | right | rough | unchecked | not inferred |
|---|---|---|---|---|---|
"""
GPT_15B = {
    "model": {"layers": 48, "hidden": 6144, "ffn": 12288, "heads": 48, "vocab": 51200, "gated": False},
    "train": {"seq": 2048, "micro_batch": 1, "microbatches": 8, "framework": "megatron"},
    "parallel": {"tp": 2, "pp": 2, "dp": 4, "tp_overlap": False, "dp_overlap": False},
    "cluster": {"gpu": "h100", "gpus": 16},
}
TARGETS: tuple[dict[str, int], ...] = (
    {}, {"parallel.dp": 8}, {"parallel.dp": 16}, {"parallel.dp": 32}, {"parallel.pp": 4, "parallel.dp": 4},
    {"parallel.pp": 8, "parallel.dp": 4}, {"parallel.pp": 16, "parallel.dp": 4}, {"parallel.pp": 4, "parallel.dp": 8},
    {"model.layers": 96}, {"model.hidden": 12288, "model.ffn": 24576},
)  # fmt: skip
MANY = 512  # ranks of a job whose answers are timed
FAKE_WORLD: Values = {
    "cluster.gpu": "h200", "cluster.gpus": 64, "parallel.tp": 8, "parallel.dp": 8, "parallel.zero": 3, "parallel.pp": 1,
    "parallel.cp": 1, "model.layers": 4, "model.hidden": 8192, "model.ffn": 28672, "model.heads": 64,
    "model.vocab": 32000, "train.seq": 4096, "train.micro_batch": 1,
}  # fmt: skip
MEGATRON: Values = {
    "cluster.gpu": "a100", "cluster.gpus": 8, "parallel.tp": 8, "parallel.pp": 1, "parallel.cp": 1, "parallel.dp": 1,
    "model.layers": 40, "model.hidden": 4096, "train.seq": 2048, "train.micro_batch": 4,
}  # fmt: skip
ASKED = (
    "cluster.gpu", "cluster.gpus", "parallel.tp", "parallel.pp", "parallel.cp", "parallel.dp", "parallel.zero",
    "train.seq", "train.micro_batch", "train.microbatches", "train.precision", "train.recompute", "train.optimizer",
    "train.compile", "model.layers", "model.hidden", "model.ffn", "model.heads", "model.kv_heads", "model.head_dim",
    "model.vocab", "model.gated", "model.tied",
)  # fmt: skip
OF_EXPERTS = ("model.experts", "model.top_k", "model.expert_ffn")


# ---------------------------------------------------------------------- predictions
@dataclass(frozen=True)
class Answer:
    """One way to predict a target."""

    step_ms: float
    interval_ms: tuple[float, float]
    gpu_share: float  # as predicted

    @classmethod
    def of(cls, found: Prediction) -> Answer:
        assert found.step is not None
        return cls(found.step_ms, found.interval_ms, 1 - found.step.host_cost)


@dataclass(frozen=True)
class Result:
    """A pair with its answers by way; a reason where the trace was refused."""

    pair: Pair
    answers: dict[str, Answer]
    peak: float = 0.0  # predicted, in bytes; it is the same however operators are priced
    reason: str = ""
    covered_s: float | None = None  # of the target, from its trace

    @property
    def error(self) -> float:
        error = self.error_by("drawn")
        assert error is not None
        return error

    def error_by(self, way: str) -> float | None:
        answer = self.answers.get(way)
        return None if answer is None else 100 * (answer.step_ms / 1e3 / self.pair.target.step_s - 1)

    @property
    def memory_error(self) -> float:
        return 100 * (self.peak / self.pair.target.peak - 1)

    @property
    def is_inside(self) -> bool:
        """Whether the measured step is inside the predicted 80 % interval."""
        low, high = self.answers["drawn"].interval_ms
        return low <= 1e3 * self.pair.target.step_s <= high

    @property
    def gpu_share(self) -> tuple[float, bool] | None:
        """The share of the target's step in which kernels run, and whether that was measured."""
        target = self.pair.target
        if target.kind == "multirank":
            return None
        covered = target.covered_s or self.covered_s
        if covered is not None:
            return covered / target.step_s, True
        described = self.answers.get(DESCRIBED)
        return None if described is None else (described.gpu_share, False)

    @property
    def bound(self) -> str:
        share = self.gpu_share
        return "" if share is None else "GPU" if share[0] >= GPU_BOUND else "host"

    def row(self) -> str:
        pair, answer, share = self.pair, self.answers["drawn"], self.gpu_share
        percent = f"{100 * min(share[0], 1.0):.0f}" if share else "–"
        return (
            f"| {pair.source.name} | {pair.target.name} | {pair.what} | {1e3 * pair.target.step_s:.1f} | "
            f"{answer.step_ms:.1f} | {self.error:+.1f} | {_signed(self.error_by(DESCRIBED))} | "
            f"{percent if share is None or share[1] else f'({percent})'} | {self.memory_error:+.1f} |"
        )


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1f}"


class Reading(NamedTuple):
    """What was inferred of a trace, beside what is written down of its run."""

    name: str
    found: Findings
    known: Values


@dataclass
class Evidence:
    """All that the page is made of."""

    results: list[Result] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)


def overrides(values: Values) -> list[str]:
    """As `--set` takes them."""
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]


@cache
def described(case: Case) -> Answer | None:
    """The answer without any trace; None where the description does not know such a model."""
    try:
        return Answer.of(predict(_described_setup(case)))
    except LumosError:
        return None


def _described_setup(case: Case) -> Setup:
    if case.kind != "architectures":
        return Setup.model_validate(sections_of(case.values))
    if case.config is None:
        raise LumosError("no configuration that could be described")
    stated = ("train.seq", "train.micro_batch", "train.recompute", "cluster.gpu", "cluster.gpus")
    return read_setup(case.config, overrides({key: case.values[key] for key in stated}))


class Source:
    """A traced run from which others are predicted, on the path of `lumos predict --from`."""

    def __init__(self, case: Case, run: Replay, found: Findings, folder: Path) -> None:
        self.found = found
        self.file: Path | None = None
        if case.kind != "architectures":  # whose setups the trace alone has to show
            self.file = folder / "setup.toml"
            self.file.write_text(tomli_w.dumps(sections_of(case.values)))
        self.stated = read_plain(self.file)
        self.runs = {MODES[0]: CalibratedRun(run, complete(found, self.stated).setup)}

    def in_mode(self, mode: str) -> CalibratedRun:
        """The run, calibrated in this mode; all modes share what was cut out of the trace."""
        if mode not in self.runs:
            first = self.runs[MODES[0]]
            self.runs[mode] = replace(first, mode=mode)
            cut = ("plain", "labels", "ops", "measured", "ranks", "blocks", "weights")
            self.runs[mode].__dict__.update({name: getattr(first, name) for name in cut})
        return self.runs[mode]

    def predicted(self, pair: Pair, mode: str) -> Prediction:
        asked = changed(self.found, read_plain(self.file, overrides(pair.changes)), self.stated)
        return predict(self.in_mode(mode), setup=asked.setup)


def results_from(case: Case, run: Replay, found: Findings, pairs: Sequence[Pair]) -> Iterator[Result]:
    """All that is predicted from one trace."""
    with tempfile.TemporaryDirectory() as folder:
        source: Source | None = None
        for pair in pairs:
            alone = described(pair.target)
            answers = {} if alone is None else {DESCRIBED: alone}
            peak, reasons = 0.0, {}
            for mode in MODES:
                try:
                    source = source or Source(case, run, found, Path(folder))
                    predicted = source.predicted(pair, mode)
                    answers[mode] = Answer.of(predicted)
                except LumosError as error:
                    reasons[mode] = str(error)
                    continue
                if mode == MODES[0] and predicted.memory is not None:
                    peak = predicted.memory.peak
            yield Result(pair, answers, peak, reasons.get(MODES[0], ""))


def gathered(pairs: Iterable[Pair], recordings: dict[Path, tuple[str, Values]]) -> Evidence:
    """Every trace is read once: to predict from, to infer its setup, and for how busy the GPU was."""
    asked: dict[Path, list[Pair]] = {}
    wanted = dict.fromkeys(recordings)
    for pair in pairs:
        assert pair.source.trace is not None
        asked.setdefault(pair.source.trace, []).append(pair)
        wanted |= {case.trace: None for case in (pair.source, pair.target) if case.trace is not None}
    evidence, covered = Evidence(), {}
    for path in wanted:
        run = replay(read_job(path))
        found = infer(run)
        parts = run.recorded_breakdown.values()
        covered[path] = statistics.mean(part.step_ms - part.other_ms for part in parts) / 1e3
        if path in recordings:
            evidence.readings.append(Reading(recordings[path][0], found, recordings[path][1]))
        for result in results_from(asked[path][0].source, run, found, asked[path]) if path in asked else ():
            print(result.row() if not result.reason else f"{result.pair.target.name}: {result.reason}", flush=True)
            evidence.results.append(result)
    traced = [replace(result, covered_s=covered.get(result.pair.target.trace or Path())) for result in evidence.results]
    return Evidence(traced, evidence.readings)


# ---------------------------------------------------------------------- summary, ablation, scatter
def groups(results: Iterable[Result]) -> Iterator[tuple[str, str, list[Result]]]:
    """(kind, set, its results), kind by kind; what nothing was fitted on first."""
    found: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        found.setdefault((result.pair.kind, result.pair.set), []).append(result)
    for kind, name in product(KINDS, SETS):
        if (kind, name) in found:
            yield kind, name, found[kind, name]


def figures(results: Sequence[Result]) -> dict[str, float]:
    """Means and worst of |error| in percent."""
    parts = {"": results} | {f"{side}-bound ": [r for r in results if r.bound == side] for side in ("GPU", "host")}
    found: dict[str, float] = {}
    for name, members in parts.items():
        if members:
            sizes = [abs(result.error) for result in members]
            found |= {f"{name}mean": statistics.mean(sizes), f"{name}worst": max(sizes), f"{name}count": len(sizes)}
    memory = [abs(result.memory_error) for result in results]
    return found | {"memory mean": statistics.mean(memory), "memory worst": max(memory)}


def missed(results: Sequence[Result]) -> Iterator[str]:
    """Bars that do not hold, and traces that make answers worse."""
    for kind, name, members in groups(results):
        found = figures(members)
        for what, bar in BARS[kind].items():
            if found.get(what, 0.0) > bar:
                yield f"{TITLES[kind]}, {name}: {what} {found[what]:.2f} % (bar {bar:g} %)"
        for side in ("GPU", "host"):
            both = [(abs(r.error), abs(alone)) for r in members
                    if r.bound == side and (alone := r.error_by(DESCRIBED)) is not None]  # fmt: skip
            means = [statistics.mean(part) for part in zip(*both, strict=True)]
            if means and means[0] > means[1] + NO_WORSE:
                yield (
                    f"{TITLES[kind]}, {name}, {side}-bound: {means[0]:.2f} % with a trace, {means[1]:.2f} % without "
                    f"(bar: no more than {NO_WORSE:g} point worse)"
                )


def summary(results: Sequence[Result], refused: Sequence[Result]) -> Iterator[str]:
    bad = [*missed(results), *(f"not predicted: {_named(r)}: {_cell(r.reason)}" for r in refused)]
    yield "Bars that were missed:\n" if bad else "No bar was missed, and nothing refused.\n"
    yield from (f"- {line}" for line in bad)
    yield ("\n" if bad else "") + SUMMARY_HEAD
    for kind, name, members in groups(results):
        found = figures(members)
        inside = 100 * statistics.mean(result.is_inside for result in members)
        alone = [abs(error) for r in members if (error := r.error_by(DESCRIBED)) is not None]
        few = f" ({len(alone)})" if len(alone) < len(members) else ""
        cells = [
            _number(found.get(key), digits) for key, digits in (
                ("count", 0), ("mean", 1), ("worst", 1), ("GPU-bound count", 0), ("GPU-bound mean", 1),
                ("GPU-bound worst", 1), ("host-bound count", 0), ("host-bound mean", 1),
            )
        ]  # fmt: skip
        cells += [f"{inside:.0f} %", _number(found["memory mean"]), _number(found["memory worst"])]
        yield f"| {TITLES[kind]} | {name} | {' | '.join(cells)} | {_mean(alone)}{few} |"


def compared(results: Sequence[Result]) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """(which targets, |errors| by way), for the targets that the GPU decides and for all."""
    for kind, name, members in groups(results):
        for title, chosen in (("GPU-bound", [r for r in members if r.bound == "GPU"]), ("all", members)):
            sizes = {way: [abs(error) for r in chosen if (error := r.error_by(way)) is not None] for way in WAYS}
            if chosen:
                yield f"{TITLES[kind]} | {name} | {title} ({len(chosen)})", sizes


def ablation(results: Sequence[Result]) -> Iterator[str]:
    """Mean and worst |error| of every way to predict the same targets; first, where the default is not the best."""
    rows, beaten = [], []
    for targets, sizes in compared(results):
        default, cells = sizes[MODES[0]], []
        for way, title in WAYS.items():
            few = f" ({len(sizes[way])} answered)" if 0 < len(sizes[way]) < len(default) else ""
            cells.append(f"{_mean(sizes[way])}, {max(sizes[way]):.1f}{few}" if sizes[way] else "–")
            better = statistics.mean(default) - statistics.mean(sizes[way] or default)
            if better >= NOTICED and not few:
                beaten.append(f"- {targets.replace(' | ', ', ')}: {title} is better by {better:.1f} points")
        rows.append(f"| {targets} | {' | '.join(cells)} |")
    yield "The default is not the best way everywhere:\n" if beaten else "No way is better than the default anywhere.\n"
    yield from [*beaten, ""] if beaten else []
    yield "| | set | targets | " + " | ".join(WAYS.values()) + " |\n|---|---|---|---|---|---|"
    yield from rows


def scatter(results: Sequence[Result]) -> Iterator[str]:
    for kind, name, members in groups(results):
        for side in ("GPU", "host", ""):
            targets = list(dict.fromkeys(result.pair.target for result in members if result.bound == side))
            within = [100 * (case.range_s[1] / case.range_s[0] - 1) for case in targets]
            others = [100 * abs(case.other_host_s / case.step_s - 1) for case in targets if case.other_host_s]
            if targets:
                again = (str(len(others)), _median(others), _number(max(others, default=None)))
                cells = (side or "–", str(len(targets)), _median(within), _number(max(within)), *again)
                yield f"| {TITLES[kind]} | {name} | {' | '.join(cells)} |"


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _mean(values: Sequence[float]) -> str:
    return _number(statistics.mean(values) if values else None)


def _median(values: Sequence[float]) -> str:
    return _number(statistics.median(values) if values else None)


def _named(result: Result) -> str:
    return f"{result.pair.source.name} → {result.pair.target.name}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


# ---------------------------------------------------------------------- pairs
def verdict(name: str, results: Sequence[Result]) -> str:
    """All figures of a table in a sentence."""
    found = figures(results)
    inside = 100 * statistics.mean(abs(result.error) <= 10 for result in results)
    parts = [f"mean {found['mean']:.1f} %, worst {found['worst']:.1f} %, within 10 %: {inside:.0f} %"]
    for side in ("GPU-bound", "host-bound"):
        if f"{side} count" in found:
            parts.append(
                f"{side} ({found[f'{side} count']:.0f}) mean {found[f'{side} mean']:.1f} %, worst "
                f"{found[f'{side} worst']:.1f} %"
            )
    parts.append(f"peak memory mean {found['memory mean']:.1f} %, worst {found['memory worst']:.1f} %")
    return f"{name.capitalize()}: {'; '.join(parts)}."


def pair_tables(results: Sequence[Result], level: str, prefix: str = "") -> Iterator[str]:
    """Every prediction, the worst first; a chapter for each kind."""
    last = ""
    for kind, name, members in groups(results):
        if kind != last:
            title = f"{prefix}{TITLES[kind][0].lower() + TITLES[kind][1:]}" if prefix else TITLES[kind]
            yield f"{level} {title}\n\n{NOTES[kind]}\n"
        last = kind
        yield f"{verdict(name, members)}\n\n{PAIR_HEAD}"
        yield from (result.row() for result in sorted(members, key=lambda result: -abs(result.error)))
        yield ""


# ---------------------------------------------------------------------- setups inferred
def recordings(data: Path, development: Path) -> dict[Path, tuple[str, Values]]:
    """Traces, each with a name and what is written down of its setup, apart from the trace itself."""
    found: dict[Path, tuple[str, Values]] = {}
    for name, cases in (("shared", shared_cases(data)), ("development", archived_cases(development))):
        for case in (case for some in cases.values() for case in some.values()):
            if case.trace is not None:
                found[case.trace] = f"{name}, {case.kind}: {case.name}", _written(case)
    found[data / "h200/fake_world/rank0_of_64_tp8_dp8.pt.trace.json.gz"] = "shared: rank 0 of 64", FAKE_WORLD
    found[data / "public/megatron_tp8_a100/kineto"] = "public: Megatron, TP8 on A100", MEGATRON
    return {path: known for path, known in found.items() if path.exists()}


def _written(case: Case) -> Values:
    if case.kind == "architectures":
        return case.values
    setup = Setup.model_validate(sections_of(case.values))
    return {key: getattr(getattr(setup, key.split(".")[0]), key.split(".")[1]) for key in ASKED}


def inferred(readings: Sequence[Reading]) -> str:
    """What is inferred of the setups of traces, beside what is written down of them."""
    rows, wrongs, compared = [], 0, 0
    for name, found, known in readings:
        exact = {key: one.value for key, one in found.items() if not one.rough}
        wrong = [f"{key} = {exact[key]} (is {known[key]})" for key in known if exact.get(key, known[key]) != known[key]]
        right = sum(key in exact and exact[key] == known[key] for key in known)
        rough = [f"{key} ≈ {one.value}" for key, one in found.items() if one.rough]
        unchecked = [key for key in (*ASKED, *OF_EXPERTS) if key in exact and key not in known]
        silent = [key for key in ASKED if key not in found]
        wrongs, compared = wrongs + len(wrong), compared + len(wrong) + right
        cells = (
            ", ".join(wrong) or "0", str(right), ", ".join(rough) or "0", str(len(unchecked)), ", ".join(silent) or "0"
        )  # fmt: skip
        rows.append((-len(wrong), f"| {name} | {' | '.join(cells)} |"))
    rows.sort(key=lambda row: row[0])
    text = "\n".join(row for _, row in rows)
    return INFERRED.format(wrongs=wrongs, compared=compared, count=len(rows)) + text + "\n"


# ---------------------------------------------------------------------- synthetic traces, speed
def one_story() -> str:
    """A synthetic trace of GPT-3 15B at TP2·PP2·DP4, edited, beside the description's own answer."""
    base = Setup.model_validate(GPT_15B)
    with tempfile.TemporaryDirectory() as folder:
        write_synthetic(simulate_step(base), Path(folder))
        source = CalibratedRun(replay(read_job(Path(folder))), base)
        rows, worst = [], 0.0
        for changes in TARGETS:
            target = base.replaced(changes | {"train.microbatches": 8})
            edited, direct = predict(source, setup=target).step_ms, simulate_step(target).us / 1e3
            worst = max(worst, abs(100 * (edited / direct - 1)))
            name = ", ".join(f"{key} = {value}" for key, value in changes.items()) or "as traced"
            rows.append(f"| {name} | {edited:.1f} | {direct:.1f} | {100 * (edited / direct - 1):+.2f} |")
    head = "| GPT-3 15B, TP2·PP2·DP4, changed to | from its trace, ms | described, ms | % |\n|---|---|---|---|"
    title = "## From a trace and from the description"
    return f"{title}\n\nWorst {worst:.1f} % (bar 3).\n\n{head}\n" + "\n".join(rows) + "\n"


def speed(data: Path) -> str:
    """How long answers take once a trace is loaded, that is, read and replayed."""
    case = shared_cases(data)["single"]["base_l8_h2048_s2048_b2"]
    assert case.trace is not None
    setup = Setup.model_validate(sections_of(case.values))
    first, next_, loading = _timed(case.trace, setup, "model.layers", range(2, 22))
    with tempfile.TemporaryDirectory() as folder:
        many = _many_ranks(Path(folder))
        times = _timed(Path(folder), many, "parallel.dp", (256, 1024, 2048))
    rows = (
        ("one GPU, 8 layers", next_, 0.05, first, loading),
        (f"{MANY} ranks, written from a description, without shapes", times[1], 1.0, times[0], times[2]),
    )
    slow = [f"Bar missed: {name}, {1e3 * a:.0f} ms an answer.\n\n" for name, a, bar, *_ in rows if a > bar]
    head = "| trace | an answer, ms | bar, ms | the first answer, ms | loading, s |\n|---|---|---|---|---|"
    lines = [f"| {name} | {1e3 * a:.0f} | {1e3 * bar:.0f} | {1e3 * b:.0f} | {c:.1f} |" for name, a, bar, b, c in rows]
    note = (
        "Loading is reading and replaying; the first answer also reads the operators, cuts the trace into blocks and "
        "calibrates them. An answer has everything that `lumos predict --json` prints."
    )
    return f"## Speed\n\n{''.join(slow)}{note}\n\n{head}\n" + "\n".join(lines) + "\n"


def _timed(path: Path, setup: Setup, key: str, values: Iterable[int]) -> tuple[float, float, float]:
    """Seconds: of the first answer, of a later one, of loading."""
    loading, run = _seconds(lambda: replay(read_job(path)))
    run.clean_ms  # noqa: B018 - a part of replaying, made when asked for
    source = CalibratedRun(run, setup)
    times = [_seconds(partial(_answered, source, setup.replaced({key: value})))[0] for value in values]
    return times[0], statistics.mean(times[1:]), loading


def _answered(source: CalibratedRun, target: Setup) -> dict[str, Any]:
    return predict(source, setup=target).as_dict()


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    answer = work()
    return time.perf_counter() - start, answer


def _many_ranks(folder: Path) -> Setup:
    """A job of many ranks, all of them recorded and alike."""
    values = {
        "model": {"layers": 4, "hidden": 2048, "ffn": 5632, "heads": 16, "vocab": 32000},
        "train": {"seq": 2048, "micro_batch": 1, "framework": "megatron"},
        "parallel": {"dp": MANY, "zero": 0, "dp_overlap": False}, "cluster": {"gpu": "h200", "gpus": MANY},
    }  # fmt: skip
    setup = Setup.model_validate(values)
    (path,) = write_synthetic(simulate_step(setup), folder)
    contents = orjson.loads(path.read_bytes())
    for rank in range(1, MANY):
        contents["distributedInfo"]["rank"] = rank
        (folder / f"rank{rank}.json").write_bytes(orjson.dumps(contents))
    return setup


# ---------------------------------------------------------------------- the page
def page(evidence: Evidence, data: Path, has_blind: bool) -> str:
    """Everything but what was kept apart."""
    results = [result for result in evidence.results if not result.reason]
    refused = [result for result in evidence.results if result.reason]
    lines = [
        INTRODUCTION.format(bound=100 * GPU_BOUND, blind=BLIND_LINE if has_blind else ""), "## Summary\n",
        *summary(results, refused), "", *_ablation("## What the trace is worth", results),
        SCATTER + "\n".join(scatter(results)), "", *pair_tables(results, "##"), inferred(evidence.readings),
        one_story(), speed(data),
    ]  # fmt: skip
    return "\n".join(lines)


def blind_chapter(results: Sequence[Result]) -> str:
    """What was kept apart. It is written once; later pages keep it as it was."""
    answered, refused = ([r for r in results if bool(r.reason) == fails] for fails in (False, True))
    head = BLIND_HEAD.format(date=date.today().isoformat())
    lines = [head, *summary(answered, refused), "", *_ablation("### Blind: what the trace is worth", answered)]
    return "\n".join([*lines, *pair_tables(answered, "###", "Blind: ")])


def _ablation(title: str, results: Sequence[Result]) -> Iterator[str]:
    yield f"{title}\n\n{ABLATION}"
    yield from ablation(results)
    yield ""


def kept_chapter(page: Path | None) -> str:
    """The chapter on what was kept apart, as an earlier page has it."""
    text = page.read_text() if page and page.exists() else ""
    return text[text.index("## Blind\n") :] if "\n## Blind\n" in text else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--blind", type=Path, nargs="?", const=BLIND, metavar="ARCHIVE",
                        help="also what was kept apart from development")  # fmt: skip
    options = parser.parse_args()
    if options.blind and kept_chapter(options.output):
        parser.error(f"{options.output} has a chapter on what was kept apart, which is predicted once: remove it first")
    development = unpacked(DEVELOPMENT)
    pairs = [*archived_pairs("development", development), *shared_pairs(options.data)]
    if options.blind:
        kept_apart = gathered(archived_pairs("blind", unpacked(options.blind)), {})
        chapter = blind_chapter(kept_apart.results)
    else:
        chapter = kept_chapter(options.output)
    evidence = gathered(pairs, recordings(options.data, development))
    text = page(evidence, options.data, bool(chapter)) + (f"\n{chapter}" if chapter else "")
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
