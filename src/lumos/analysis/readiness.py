"""Readiness: what a trace lacks, which answers that costs, and how to record it.

A finding says what is so of this trace; nothing is guessed. Whatever is there is not mentioned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lumos.analysis.replay import Replay
from lumos.change.kernel_labels import RankLabels, label
from lumos.trace.names import CPU_COMPUTE, CallKind, Category, is_step
from lumos.trace.steps import WHOLE
from lumos.trace.trace import Trace

_CAPTURE = 'lumos.capture("traces") in the script, or: lumos capture -o traces -- COMMAND'
_SLOW_FIRST = 1.5  # times the other steps
_MANY_UNLAUNCHED = 0.02  # of all kernels
_MUCH_UNEXPLAINED = 0.1  # of the step
_DAMAGE = ("ends in the middle", "not valid JSON", "no usable time")
FAKE = "fake"


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


@dataclass(frozen=True)
class Readiness:
    """What can be asked of a replayed trace, and what cannot."""

    run: Replay
    beside: Beside = Beside()

    @property
    def trace(self) -> Trace:
        return self.run.execution.trace

    @cached_property
    def findings(self) -> list[Finding]:
        """Everything that is missing; what costs most answers first."""
        return [finding for check in _CHECKS for finding in check(self)]

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


# The checks; each says what it finds, or nothing.


def _whole_file(found: Readiness) -> list[Finding]:
    damaged = [w for w in found.trace.warnings if any(text in w for text in _DAMAGE)]
    if not damaged:
        return []
    return [
        Finding(
            "the whole file",
            damaged[0] + (f" ({len(damaged)} such)" if len(damaged) > 1 else ""),
            "all: what came after is not in any of them",
            "let the profiler end before the process does; lumos.capture names a file only when it is whole",
        )
    ]


def _gpu(found: Readiness) -> list[Finding]:
    if found.on_cpu:
        return [
            Finding(
                "a GPU",
                "no GPU was used: operators of the CPU stand for kernels",
                "cost models and other GPUs: predict --set cluster.gpu=…",
                "run it on a GPU, with ProfilerActivity.CUDA",
            )
        ]
    if found.has_compute:
        return []
    return [
        Finding(
            "GPU activity",
            "there are calls, and no kernels",
            "all about the GPU: compute, overlap, what-ifs with compute=, changed setups",
            f"torch.profiler.profile(activities=[CPU, CUDA]); {_CAPTURE}",
        )
    ]


def _host(found: Readiness) -> list[Finding]:
    if found.has_host:
        return []
    return [
        Finding(
            "the host",
            "there are kernels, and no calls or operators of the CPU",
            "whether the host decides, --scale cpu, operators, changed setups; gaps keep their length",
            f"torch.profiler.profile(activities=[CPU, CUDA]); {_CAPTURE}",
        )
    ]


def _ranks(found: Readiness) -> list[Finding]:
    if found.missing_ranks <= 0:
        return []
    least = "" if found.stated_world == found.world else "at least "
    here = f"{len(found.trace.ranks)} of {least}{found.world} ranks"
    if any(header.backend == FAKE for header in found.trace.headers):
        return [
            Finding(
                "real peers",
                f"{here}, in a fake process group: collectives moved nothing",
                "replay is without communication; predict SETUP --from takes it from the model",
                "for measured communication record a real job, all ranks",
            )
        ]
    return [
        Finding(
            "all ranks",
            here,
            "waiting cannot be told from transfer; no stragglers; --scale comm scales both",
            f"every rank into one folder: {_CAPTURE}",
        )
    ]


def _step_marks(found: Readiness) -> list[Finding]:
    if found.run.marks.names != (WHOLE,):
        return []
    partly = any(found.steps_of_ranks.values())
    return [
        Finding(
            "step marks",
            "ranks have no step in common" if partly else "nothing says where a step begins",
            "step times are those of the whole trace; --step; clean_ms of a typical step",
            f"profiler.step() after every step, on all ranks; {_CAPTURE}",
        )
    ]


def _same_steps(found: Readiness) -> list[Finding]:
    sets = {tuple(names) for names in found.steps_of_ranks.values()}
    if len(sets) < 2 or found.run.marks.names == (WHOLE,):
        return []
    few = min(found.steps_of_ranks.items(), key=lambda item: len(item[1]))
    return [
        Finding(
            "the same steps on all ranks",
            f"rank {few[0]} has {len(few[1])} marked steps, another has {max(map(len, sets))}",
            f"answers are about the {len(found.run.marks.names)} that all have",
            f"the same schedule on every rank; {_CAPTURE}",
        )
    ]


def _warm_up(found: Readiness) -> list[Finding]:
    names, note = found.run.marks.names, found.run.marks.note
    if names == (WHOLE,):
        return []
    slow = _first_over_others(found.trace.duration[note].mean(axis=1))  # of the host; the GPU may be behind at first
    if slow <= _SLOW_FIRST and _number(names[0]) > 0:
        return []
    said = f"the first step takes {slow:.1f} times the others" if slow > _SLOW_FIRST else f"{names[0]} was recorded"
    return [
        Finding(
            "a warm-up",
            said,
            "recorded_ms and its breakdown are means over all steps; use --step for a later one",
            f"lumos.capture(…, warmup=5), or schedule(wait=3, warmup=2, …); {_CAPTURE}",
        )
    ]


def _first_over_others(times: np.ndarray) -> float:
    return float(times[0] / max(np.median(times[1:]), 1e-9)) if len(times) > 1 else 0.0


def _several_steps(found: Readiness) -> list[Finding]:
    names = found.run.marks.names
    if names == (WHOLE,) or len(names) > 1:
        return []
    return [
        Finding(
            "several steps",
            f"one step, {names[0]}",
            "a disturbed step cannot be told from a typical one",
            "lumos.capture(…, steps=2) or more",
        )
    ]


def _shapes(found: Readiness) -> list[Finding]:
    if not found.has_operators:
        return []
    if found.beside.shapes or any(header.shapes for header in found.trace.headers):
        return []
    return [
        Finding(
            "shapes",
            "operators have no shapes",
            "sizes of the model cannot be read off: predict --from --set needs a complete setup",
            f"torch.profiler.profile(record_shapes=True); {_CAPTURE}",
        )
    ]


def _operators(found: Readiness) -> list[Finding]:
    if found.has_operators or not found.has_host:
        return []
    return [
        Finding(
            "operators",
            "there are calls of the runtime, and no operators of a framework",
            "operators, shapes, phases and layers; changed setups",
            f"torch.profiler.profile(activities=[CPU, CUDA]); {_CAPTURE}",
        )
    ]


def _sync_events(found: Readiness) -> list[Finding]:
    trace = found.trace
    waits = int((trace.call == CallKind.STREAM_WAIT).sum())
    on_amd = any(name.startswith("hip") for name in trace.names)
    if waits == 0 or len(trace.syncs.lane) or on_amd:
        return []
    return [
        Finding(
            "synchronisation events",
            f"{waits:,} calls make a stream wait for another, and which is not recorded",
            "the order between streams is inferred: what-ifs on overlapping streams may be off",
            "experimental_config=torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True); " + _CAPTURE,
        )
    ]


def _launches(found: Readiness) -> list[Finding]:
    gpu = np.flatnonzero(found.trace.on_gpu)
    lost = int((found.trace.launch_row[gpu] < 0).sum())
    if not found.has_host or lost <= _MANY_UNLAUNCHED * len(gpu):
        return []
    slow = _first_over_others(found.run.recorded_steps.milliseconds)
    late = f", and the first step takes {slow:.1f} times the others" if slow > _SLOW_FIRST else ""
    return [
        Finding(
            "the launches of all kernels",
            f"{lost:,} of {len(gpu):,} kernels have no launch in the file{late}",
            "their operator and phase are unknown, and their start is kept as recorded",
            f"synchronise the GPU before recording begins; {_CAPTURE}",
        )
    ]


def _graphs(found: Readiness) -> list[Finding]:
    count = int((found.trace.call == CallKind.GRAPH_LAUNCH).sum())
    if not count:
        return []
    return [
        Finding(
            "operators of CUDA graphs",
            f"{count:,} launches of CUDA graphs: their kernels belong to no operator",
            "operators, phases and layers; changed setups",
            "record a run without CUDA graphs beside this one",
        )
    ]


def _stacks(found: Readiness) -> list[Finding]:
    frames = int((found.trace.category == Category.PYTHON).sum())
    if not frames and not any(header.stacks for header in found.trace.headers):
        return []
    return [
        Finding(
            "an undisturbed host",
            f"recorded with Python stacks ({frames:,} frames), which slows the host",
            "clean_ms and all that is host-bound: the cost of stacks is not known to Lumos",
            f"torch.profiler.profile(with_stack=False); {_CAPTURE}",
        )
    ]


def _training(found: Readiness) -> list[Finding]:
    if not found.has_compute or not found.has_operators:
        return []
    lacking = [name for name, there in zip(("forward", "backward"), found.attentions, strict=True) if not there]
    if lacking:
        return [
            Finding(
                "layers that can be told apart",
                f"no attention is recognised in the {' or '.join(lacking)} pass",
                "changed setups: predict --from --set",
                "a whole training step of a transformer, without CUDA graphs",
            )
        ]
    if any(name.startswith("Optimizer.step") for name in found.trace.names):
        return []
    return [
        Finding(
            "the optimizer",
            "no step of a torch.optim optimizer is in it",
            "changed setups: its kernels count as part of the model",
            "record from one optimizer step to the next",
        )
    ]


def _explained(found: Readiness) -> list[Finding]:
    step, lost = found.run.simulated_steps.mean, found.run.path_summary.unexplained_ms
    if step <= 0 or lost <= _MUCH_UNEXPLAINED * step:
        return []
    return [
        Finding(
            "causes of all waits",
            f"{lost:.2f} ms of a step of {step:.2f} ms are waits that nothing in the trace explains",
            "what-ifs keep them as they are",
            f"all ranks, CPU and GPU activity, synchronisation events; {_CAPTURE}",
        )
    ]


def _setup(found: Readiness) -> list[Finding]:
    if found.beside.setup:
        return []
    return [
        Finding(
            "the setup",
            "no setup.toml beside the trace that says what was trained",
            "predict --from --set: batch and parallelism must be given or guessed; tokens/s; MFU",
            "lumos.capture(…, setup=…) keeps it there; docs/setup.md says what it is",
        )
    ]


_CHECKS: tuple[Callable[[Readiness], list[Finding]], ...] = (
    _whole_file, _gpu, _host, _operators, _ranks, _step_marks, _same_steps, _warm_up, _several_steps, _launches,
    _explained, _sync_events, _shapes, _graphs, _stacks, _training, _setup,
)  # fmt: skip
