"""Readiness: what a trace is missing, what that rules out, and how to record it.

A finding states a fact about the trace; nothing is guessed, and what is there is not mentioned. The texts are in
`lumos/data/readiness.toml`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lumos.analysis.kernel_labels import label
from lumos.analysis.replay import Replay, replay
from lumos.arguments import checks_arguments
from lumos.data_files import read_table
from lumos.errors import InputError
from lumos.files import read_file
from lumos.graph.rules.cpu_device import is_cpu_run
from lumos.read.json_slices import BAD_GZIP, open_bytes
from lumos.setup.toml_text import toml_table
from lumos.tables import frame
from lumos.trace.names import CallKind, Category
from lumos.trace.steps import WHOLE, step_rows
from lumos.trace.trace import Header, Trace

if TYPE_CHECKING:
    from polars import DataFrame

_CAPTURE = 'lumos.capture("traces") in the script, or: lumos capture -o traces -- COMMAND'
_LIMITS = read_table("analysis.toml")["readiness"]
_DAMAGE = ("ends in the middle", "not valid JSON", "no usable time")
_FAKE_BACKEND = "fake"
_SHAPES = re.compile(rb'"Input [Dd]ims"')
_LOOKED_AT = 8 << 20  # bytes of a file, unpacked


@dataclass(frozen=True)
class Finding:
    """One thing that a trace lacks."""

    what: str
    lacks: str
    answers: str  # which suffer, and how
    record: str  # the fix


Lack = tuple[str, dict[str, Any]]
"""A section of readiness.toml, and the values that it mentions."""


@dataclass(frozen=True, repr=False)
class Readiness:
    """What can be asked of a replayed trace, and what cannot."""

    run: Replay
    setup: bool = True  # a setup next to the traces states what was trained
    shapes: bool = False  # operators have their shapes, whatever the header states

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
        lacks = (*self._parts(), *self._steps(), *self._waits(), *self._records())
        return [self._finding(name, values) for name, values in lacks]

    def _finding(self, name: str, values: dict[str, Any]) -> Finding:
        """In the words of the table; those of a run on CPUs do not mention GPUs."""
        texts = read_table("readiness.toml")[name]
        by_device = texts | {key: texts[f"{key}_cpu"] for key in texts if self.on_cpu and f"{key}_cpu" in texts}
        chosen = {key: by_device[key].format(capture=_CAPTURE, **values) for key in Finding.__annotations__}
        return Finding(**chosen)

    @property
    def ready(self) -> dict[str, bool]:
        """Which kinds of questions can be asked."""
        return {
            "replay": bool(self.run.recorded_steps.mean > 0),
            "scale": self.has_compute,
            "host": self.has_host,
            "multi_rank": len(self.trace.ranks) > 1 and self.world == len(self.trace.ranks),
            "change": self.has_compute and all(self.attentions.values()),
        }

    @cached_property
    def attentions(self) -> dict[str, bool]:
        """Whether layers show in the forward and in the backward pass: by their attention, one per layer."""
        kinds = label(self.run, most=1)[0].attention
        return {name: bool((kinds == kind).any()) for kind, name in ((1, "forward"), (2, "backward"))}

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
        return is_cpu_run(self.trace)

    @property
    def stated_world(self) -> int:
        """The ranks of the job as the files state them; -1 if none does."""
        return max((header.world_size for header in self.trace.headers), default=-1)

    @property
    def world(self) -> int:
        """The ranks of the job, as far as the files show: at least those of its largest group."""
        groups = (message.group_size for message in self.trace.messages)
        return max([self.stated_world, len(self.trace.ranks), *groups])

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

    # ------------------------------------------------------------------ checks
    def _parts(self) -> Iterator[Lack]:
        """Damage, and missing devices and ranks."""
        damaged = [w for w in self.trace.warnings if any(text in w for text in _DAMAGE)]
        if damaged:
            more = f" ({len(damaged)} such)" if len(damaged) > 1 else ""
            yield "whole_file", {"damage": damaged[0] + more}
        if self.on_cpu:
            yield "gpu", {}
        elif not self.has_compute:
            yield "gpu_activity", {}
        if not self.has_operators:
            yield "operators" if self.has_host else "host", {}
        ranks = len(self.trace.ranks)
        if ranks < self.world:
            least = "" if self.stated_world == self.world else "at least "
            fake = any(header.backend == _FAKE_BACKEND for header in self.trace.headers)
            yield "real_peers" if fake else "all_ranks", {"here": f"{ranks} of {least}{self.world} ranks"}

    def _steps(self) -> Iterator[Lack]:
        names, marked = self.run.marks.names, step_rows(self.trace)
        if names == (WHOLE,):
            partly = any(marked.values())
            yield (
                "step_marks",
                {"why": "ranks have no step in common" if partly else "nothing says where a step begins"},
            )
            return
        if len(set(map(frozenset, marked.values()))) > 1:
            rank, few = min(marked.items(), key=lambda item: len(item[1]))
            many = max(map(len, marked.values()))
            yield "same_steps", {"rank": rank, "few": len(few), "many": many, "shared": len(names)}
        slow = _first_over_others(self.trace.duration[self.run.marks.note].mean(axis=1))  # of the host: GPUs may lag
        if slow > _LIMITS["slow_first"]:
            yield "warm_up", {"why": f"the first step takes {slow:.1f} times the others"}
        elif int(names[0].rpartition("#")[2].strip() or 0) == 0:
            yield "warm_up", {"why": f"{names[0]} was recorded"}
        if len(names) == 1:
            yield "several_steps", {"name": names[0]}

    def _waits(self) -> Iterator[Lack]:
        """Kernels without launches, waits without causes, calls without what they wait for."""
        trace, step = self.trace, self.run.simulated_steps.mean
        gpu = np.flatnonzero(trace.on_gpu)
        lost = int((trace.launch_row[gpu] < 0).sum())
        if self.has_host and lost > _LIMITS["many_unlaunched"] * len(gpu):
            slow = _first_over_others(self.run.recorded_steps.milliseconds)
            late = f", and the first step takes {slow:.1f} times the others" if slow > _LIMITS["slow_first"] else ""
            yield "launches", {"lost": lost, "kernels": len(gpu), "late": late}
        if step > 0 and (waits := self.run.path_summary.unexplained_ms) > _LIMITS["much_unexplained"] * step:
            yield "unexplained", {"lost": waits, "step": step}
        calls = int((trace.call == CallKind.STREAM_WAIT).sum())
        on_amd = any(name.startswith("hip") for name in trace.names)
        if calls and not len(trace.syncs.lane) and not on_amd:
            yield "sync_events", {"waits": calls}

    def _records(self) -> Iterator[Lack]:
        """Options of the profiler, CUDA graphs, what a changed setup needs, and the setup itself."""
        trace, headers = self.trace, self.trace.headers
        if self.has_operators and not self.shapes and not any(header.has_shapes for header in headers):
            yield "shapes", {}
        if graphs := int((trace.call == CallKind.GRAPH_LAUNCH).sum()):
            yield "cuda_graphs", {"count": graphs}
        frames = int((trace.category == Category.PYTHON).sum())
        if frames or any(header.stacks for header in headers):
            yield "stacks", {"frames": frames}
        if self.has_compute and self.has_operators:
            lacking = [name for name, shows in self.attentions.items() if not shows]
            if lacking:
                yield "layers", {"passes": " or ".join(lacking)}
            elif not any(name.startswith("Optimizer.step") for name in trace.names):
                yield "optimizer", {}
        if not self.setup:
            yield "setup", {}


def _first_over_others(times: np.ndarray) -> float:
    return float(times[0] / max(np.median(times[1:]), 1e-9)) if len(times) > 1 else 0.0


@checks_arguments
def check(source: Path | str) -> Readiness:
    """List what the traces at a path are missing, what that rules out, and how to record it.

    >>> check("traces/").findings       # doctest: +SKIP
    """
    return readiness(replay(source), Path(source))


def readiness(run: Replay, path: Path) -> Readiness:
    """The readiness of a replayed trace that was read from a path."""
    folder, headers = path if path.is_dir() else path.parent, run.execution.trace.headers
    has_setup = any(_states_a_model(file) for file in folder.glob("*.toml"))
    has_shapes = any(header.has_shapes for header in headers) or any(map(_has_shapes, headers[:1]))
    return Readiness(run, has_setup, has_shapes)


def _states_a_model(path: Path) -> bool:
    """Whether a setup states what was trained; one that only torch filled in does not."""
    try:
        return bool(toml_table(read_file(path, _LOOKED_AT, "").decode()).get("model"))
    except (InputError, ValueError, RecursionError):  # not ours, or not for reading
        return False


def _has_shapes(header: Header) -> bool:
    """Whether operators have shapes: headers of older files do not state it."""
    try:
        with open_bytes(Path(header.path)) as file:
            return _SHAPES.search(file.read(_LOOKED_AT)) is not None
    except (InputError, OSError, *BAD_GZIP):  # type: ignore[misc]
        return False
