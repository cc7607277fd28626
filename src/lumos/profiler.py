"""The profiler's own cost, and the step without it.

Recording costs the CPU time: some for every operator and annotation, some for every runtime call, and the GPU a
little for every kernel. `data/profiler.json` holds the constants, fitted by calibration/fit_profiler.py on traces
recorded with and without the profiler on an H200 (none of them among those that the accuracy page scores).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np

from lumos.build import Execution
from lumos.errors import InputError
from lumos.graph import Floats, Graph
from lumos.rules.thread import is_pause
from lumos.vocabulary import CallKind, Category


class ProfilerCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Microseconds that recording adds, and the share of host time that stays at least."""

    operator_us: float
    call_us: float
    kernel_gap_us: float
    shapes_us: float = 0.0  # per operator, when shapes are recorded
    stack_us: float = 0.0  # per Python function, when stacks are recorded
    slowdown: float = 1.0  # what is left runs this much faster without the profiler: its caches are its own
    floor: float = 0.1
    error_pct: float = 10.0  # 80 % of held-out traces are within this
    source: str = ""


def load_profiler_cost(path: Path | None = None) -> ProfilerCost:
    """The constants of the package, or those in a file of the same form."""
    text = path.read_bytes() if path else resources.files("lumos").joinpath("data/profiler.json").read_bytes()
    try:
        return msgspec.json.decode(text, type=ProfilerCost)
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: not a file of profiler costs ({error}); see src/lumos/data/profiler.json") from None


@dataclass(frozen=True)
class HostLoad:
    """How many recorded things each node carries."""

    operators: Floats
    calls: Floats
    frames: Floats


def without_profiler(execution: Execution, cost: ProfilerCost) -> Graph:
    """The same graph with the profiler's share taken out of host time and of the gaps between kernels."""
    from lumos.kernels import pay_debts

    graph, nodes = execution.graph, execution.draft
    load = _load(execution)
    per_operator = cost.operator_us + cost.shapes_us * _records_shapes(execution)
    owed = (load.operators * per_operator + load.calls * cost.call_us + load.frames * cost.stack_us) * 1e3
    on_gpu = np.ones(len(graph), bool)
    on_gpu[: len(nodes)] = nodes.on_gpu
    host = pay_debts(graph.first, graph.duration, owed, cost.floor) / cost.slowdown
    duration = np.where(on_gpu, graph.duration, host)
    gap = np.where(on_gpu, np.maximum(graph.gap - cost.kernel_gap_us * 1e3, 0.0), graph.gap)
    return replace(graph.with_durations(duration), gap=gap)


def _load(execution: Execution) -> HostLoad:
    trace, nodes, size = execution.trace, execution.draft, len(execution.graph)

    def count(rows: np.ndarray, at: np.ndarray) -> Floats:
        present = rows[at[rows] >= 0]
        return np.bincount(at[present], minlength=size).astype(np.float64)

    marked = np.flatnonzero(np.isin(trace.category, (Category.OP, Category.NOTE)))
    calls = np.flatnonzero(trace.category == Category.CALL)
    return HostLoad(count(marked, nodes.first_node), count(calls, nodes.last_node), np.zeros(size))


def _records_shapes(execution: Execution) -> bool:
    return any(h.shapes for h in execution.trace.headers)


__all__ = ["CallKind", "ProfilerCost", "is_pause", "load_profiler_cost", "without_profiler"]
