"""Readiness: what a trace lacks, which answers that costs, and how to record it.

A finding states a fact about the trace; nothing is guessed, and what is there is not mentioned. Its words are in
`lumos/data/readiness.toml`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lumos.analysis.kernel_labels import RankLabels, label
from lumos.analysis.replay import Replay, replay
from lumos.arguments import checks_arguments
from lumos.data_files import read_table
from lumos.errors import InputError
from lumos.files import read_file
from lumos.read.json_slices import BAD_GZIP, open_bytes
from lumos.setup.toml_text import toml_table
from lumos.tables import frame
from lumos.trace.names import CPU_COMPUTE, CallKind, Category, is_step
from lumos.trace.steps import WHOLE
from lumos.trace.trace import Header, Trace

if TYPE_CHECKING:
    from polars import DataFrame

_CAPTURE = 'lumos.capture("traces") in the script, or: lumos capture -o traces -- COMMAND'
_SLOW_FIRST = 1.5  # times the other steps
_MANY_UNLAUNCHED = 0.02  # of all kernels
_MUCH_UNEXPLAINED = 0.1  # of the step
_DAMAGE = ("ends in the middle", "not valid JSON", "no usable time")
FAKE = "fake"


_SHAPES = re.compile(rb'"Input [Dd]ims"')
_LOOKED_AT = 8 << 20  # bytes of a file, unpacked


@dataclass(frozen=True)
class Finding:
    """One thing that a trace lacks."""

    what: str
    lacks: str
    answers: str  # which suffer, and how
    record: str  # the way out


@dataclass(frozen=True)
class Beside:
    """What the files say that a Trace does not."""

    setup: bool = True  # a setup beside the traces says what was trained
    shapes: bool = False  # operators have their shapes, whatever the header says


@dataclass(frozen=True, repr=False)
class Readiness:
    """What can be asked of a replayed trace, and what cannot."""

    run: Replay
    beside: Beside = Beside()

    def __repr__(self) -> str:
        ready = ", ".join(name for name, can in self.ready.items() if can) or "nothing"
        return f"Readiness({len(self.trace.ranks)} ranks, ready for {ready}, {len(self.findings)} findings)"

    def table(self) -> DataFrame:
        """One row per finding, the most restrictive first."""
        return frame([asdict(finding) for finding in self.findings])

    @property
    def trace(self) -> Trace:
        return self.run.execution.trace

    @cached_property
    def findings(self) -> list[Finding]:
        """Everything that is missing; what costs most answers first."""
        found = (lack for check in _CHECKS for lack in check(self))
        return [_finding(name, values, self.on_cpu) for name, values in found]

    @property
    def ready(self) -> dict[str, bool]:
        """Which kinds of questions can be asked."""
        return {
            "replay": bool(self.run.recorded_steps.mean > 0),
            "scale": self.has_compute,
            "host": self.has_host,
            "multi_rank": len(self.trace.ranks) > 1 and not self.missing_ranks,
            "change": self.has_compute and all(self.attentions),
        }

    @cached_property
    def labels(self) -> RankLabels:
        return label(self.run, most=1)[0]

    @property
    def attentions(self) -> tuple[bool, bool]:
        """Whether layers show in the forward and in the backward pass: by their attention, one a layer."""
        kinds = self.labels.attention
        return bool((kinds == 1).any()), bool((kinds == 2).any())

    @cached_property
    def has_compute(self) -> bool:
        return bool((self.trace.on_gpu & ~self.trace.is_communication).any())

    @cached_property
    def has_host(self) -> bool:
        return self.has_operators or bool((self.trace.category == Category.CALL).any())

    @cached_property
    def has_operators(self) -> bool:
        return bool((self.trace.category == Category.OP).any())

    @property
    def on_cpu(self) -> bool:
        """Whether the run used no GPU, and its operators stand for kernels."""
        return CPU_COMPUTE in self.trace.names

    @property
    def stated_world(self) -> int:
        """The ranks of the job as the files state them; -1 where none does."""
        return max((header.world_size for header in self.trace.headers), default=-1)

    @property
    def world(self) -> int:
        """The ranks of the job, as far as the files tell: at least those of its largest group."""
        groups = (message.group_size for message in self.trace.messages)
        return max([self.stated_world, len(self.trace.ranks), *groups])

    @property
    def missing_ranks(self) -> int:
        return self.world - len(self.trace.ranks)

    @cached_property
    def steps_of_ranks(self) -> dict[int, list[str]]:
        """The steps that every rank has marked."""
        trace, marks = self.trace, np.array([is_step(name) for name in self.trace.names], bool)
        rows = np.flatnonzero(np.isin(trace.category, (Category.NOTE, Category.OP)) & marks[trace.name])
        found: dict[int, set[str]] = {rank: set() for rank in trace.ranks}
        for row in rows.tolist():
            found[int(trace.rank[row])].add(trace.names[trace.name[row]])
        return {rank: sorted(names, key=_number) for rank, names in found.items()}

    def as_dict(self, path: str) -> dict[str, Any]:
        """The answer of `lumos check --json`."""
        return {
            "path": path,
            "ranks": self.trace.ranks,
            "world": self.world,
            "steps": [] if self.run.marks.names == (WHOLE,) else list(self.run.marks.names),
            "findings": [asdict(finding) for finding in self.findings],
            "ready": self.ready,
            "warnings": list(self.run.execution.warnings),
        }


def _number(step: str) -> int:
    return int(step.rpartition("#")[2].strip() or 0)


Lack = tuple[str, dict[str, Any]]
"""A section of readiness.toml, and the values that it mentions."""


def _finding(name: str, values: dict[str, Any], on_cpu: bool) -> Finding:
    """In the words of the table; those of a run on CPUs say nothing of GPUs."""
    texts = read_table("readiness.toml")[name]
    chosen = {key: texts.get(f"{key}_cpu", texts[key]) if on_cpu else texts[key] for key in Finding.__annotations__}
    return Finding(**{key: text.format(capture=_CAPTURE, **values) for key, text in chosen.items()})


def _whole_file(found: Readiness) -> Iterator[Lack]:
    damaged = [w for w in found.trace.warnings if any(text in w for text in _DAMAGE)]
    if damaged:
        more = f" ({len(damaged)} such)" if len(damaged) > 1 else ""
        yield "whole_file", {"damage": damaged[0] + more}


def _activity(found: Readiness) -> Iterator[Lack]:
    if found.on_cpu:
        yield "gpu", {}
    elif not found.has_compute:
        yield "gpu_activity", {}
    if not found.has_host:
        yield "host", {}
    elif not found.has_operators:
        yield "operators", {}


def _ranks(found: Readiness) -> Iterator[Lack]:
    if found.missing_ranks > 0:
        least = "" if found.stated_world == found.world else "at least "
        fake = any(header.backend == FAKE for header in found.trace.headers)
        here = f"{len(found.trace.ranks)} of {least}{found.world} ranks"
        yield "real_peers" if fake else "all_ranks", {"here": here}


def _steps(found: Readiness) -> Iterator[Lack]:
    names, sets = found.run.marks.names, {tuple(marked) for marked in found.steps_of_ranks.values()}
    if names == (WHOLE,):
        partly = any(found.steps_of_ranks.values())
        why = "ranks have no step in common" if partly else "nothing says where a step begins"
        yield "step_marks", {"why": why}
        return
    if len(sets) > 1:
        rank, few = min(found.steps_of_ranks.items(), key=lambda item: len(item[1]))
        many = max(map(len, sets))
        yield "same_steps", {"rank": rank, "few": len(few), "many": many, "shared": len(names)}
    slow = _first_over_others(found.trace.duration[found.run.marks.note].mean(axis=1))  # of the host: GPUs may lag
    if slow > _SLOW_FIRST:
        yield "warm_up", {"why": f"the first step takes {slow:.1f} times the others"}
    elif _number(names[0]) == 0:
        yield "warm_up", {"why": f"{names[0]} was recorded"}
    if len(names) == 1:
        yield "several_steps", {"name": names[0]}


def _first_over_others(times: np.ndarray) -> float:
    return float(times[0] / max(np.median(times[1:]), 1e-9)) if len(times) > 1 else 0.0


def _launches(found: Readiness) -> Iterator[Lack]:
    gpu = np.flatnonzero(found.trace.on_gpu)
    lost = int((found.trace.launch_row[gpu] < 0).sum())
    if found.has_host and lost > _MANY_UNLAUNCHED * len(gpu):
        slow = _first_over_others(found.run.recorded_steps.milliseconds)
        late = f", and the first step takes {slow:.1f} times the others" if slow > _SLOW_FIRST else ""
        yield "launches", {"lost": lost, "kernels": len(gpu), "late": late}


def _explained(found: Readiness) -> Iterator[Lack]:
    step, lost = found.run.simulated_steps.mean, found.run.path_summary.unexplained_ms
    if step > 0 and lost > _MUCH_UNEXPLAINED * step:
        yield "unexplained", {"lost": lost, "step": step}


def _sync_events(found: Readiness) -> Iterator[Lack]:
    trace = found.trace
    waits = int((trace.call == CallKind.STREAM_WAIT).sum())
    on_amd = any(name.startswith("hip") for name in trace.names)
    if waits and not len(trace.syncs.lane) and not on_amd:
        yield "sync_events", {"waits": waits}


def _recording(found: Readiness) -> Iterator[Lack]:
    """Options of the profiler, and CUDA graphs."""
    trace = found.trace
    if found.has_operators and not found.beside.shapes and not any(header.has_shapes for header in trace.headers):
        yield "shapes", {}
    graphs = int((trace.call == CallKind.GRAPH_LAUNCH).sum())
    if graphs:
        yield "cuda_graphs", {"count": graphs}
    frames = int((trace.category == Category.PYTHON).sum())
    if frames or any(header.stacks for header in trace.headers):
        yield "stacks", {"frames": frames}


def _training(found: Readiness) -> Iterator[Lack]:
    if not found.has_compute or not found.has_operators:
        return
    lacking = [name for name, there in zip(("forward", "backward"), found.attentions, strict=True) if not there]
    if lacking:
        yield "layers", {"passes": " or ".join(lacking)}
    elif not any(name.startswith("Optimizer.step") for name in found.trace.names):
        yield "optimizer", {}


def _setup(found: Readiness) -> Iterator[Lack]:
    if not found.beside.setup:
        yield "setup", {}


_CHECKS: tuple[Callable[[Readiness], Iterator[Lack]], ...] = (
    _whole_file, _activity, _ranks, _steps, _launches, _explained, _sync_events, _recording, _training, _setup,
)  # fmt: skip


@checks_arguments
def check(source: Path | str) -> Readiness:
    """List what the traces at a path are missing, what that rules out, and how to record it.

    >>> check("traces/").findings       # doctest: +SKIP
    """
    run = replay(source)
    return Readiness(run, beside(Path(source), run.execution.trace.headers))


def beside(path: Path, headers: tuple[Header, ...]) -> Beside:
    folder = path if path.is_dir() else path.parent
    described = any(_describes_a_model(file) for file in folder.glob("*.toml"))
    return Beside(described, any(header.has_shapes for header in headers) or _has_shapes(headers))


def _describes_a_model(path: Path) -> bool:
    """Whether a setup says what was trained; one that only torch filled in does not."""
    try:
        return bool(toml_table(read_file(path, _LOOKED_AT, "").decode()).get("model"))
    except (InputError, ValueError, RecursionError):  # not ours, or not for reading
        return False


def _has_shapes(headers: tuple[Header, ...]) -> bool:
    """Whether operators have shapes: older files do not say so of themselves."""
    for header in headers[:1]:
        try:
            with open_bytes(Path(header.path)) as file:
                return _SHAPES.search(file.read(_LOOKED_AT)) is not None
        except (InputError, OSError, *BAD_GZIP):  # type: ignore[misc]
            return False
    return False
