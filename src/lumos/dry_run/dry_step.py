"""DryStep: a recorded step, priced and put on a timeline: one host thread that launches, one stream that runs.

The recording becomes a Trace as a profiler would have written it, with predicted times, so that everything that works
on
traces (graph, simulation, breakdown, critical path, reports) works on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lumos.analysis.run import TracedRun
from lumos.cost.prices import Prices
from lumos.data_files import read_table
from lumos.dry_run.aten_prices import AtenPrices, Price, base_name, runs_kernel
from lumos.dry_run.recorded_step import RecordedOp, Recording
from lumos.graph.from_trace.build import build
from lumos.prediction.operator_times import OperatorTime
from lumos.prediction.power import Energy
from lumos.program.memory import Memory, StageMemory, reserve_of, workspaces_of
from lumos.program.operators import Operator
from lumos.setup.gpus import gpu_named
from lumos.setup.setup import Setup
from lumos.trace.names import Category
from lumos.trace.steps import find_steps
from lumos.trace.trace import Header, Lane, Trace

_THREAD, _STREAM = 0, 1
_CALL_NS = 1000  # of the host's time for one launch: the runtime's call itself
_GIB = float(1 << 30)


@dataclass(frozen=True)
class DryStep:
    """One training step of one process on one GPU. `setup` holds how it is trained and on what; its model is a
    stand-in.
    """

    setup: Setup
    recording: Recording
    prices: Prices

    @cached_property
    def aten_prices(self) -> AtenPrices:
        return AtenPrices(self.prices)

    @cached_property
    def kernels(self) -> list[tuple[RecordedOp, Price]]:
        """What the GPU runs, in order, with its price."""
        return [(op, self.aten_prices.of(op)) for op in self.recording.ops if runs_kernel(op)]

    # ------------------------------------------------------------------ time
    @cached_property
    def trace(self) -> Trace:
        """The step as a profiler would have recorded it."""
        return _Rows(self).trace()

    @cached_property
    def run(self) -> TracedRun:
        """The step as simulated."""
        execution = build(self.trace)
        return TracedRun(execution, find_steps(execution.trace), execution.graph)

    @property
    def busy_us(self) -> float:
        """How long the GPU works."""
        return sum(price.us for _, price in self.kernels)

    @property
    def host_us(self) -> float:
        """How long the host launches."""
        return sum(self.host_us_of(op) for op in self.recording.ops)

    def host_us_of(self, op: RecordedOp) -> float:
        """Host time of one operator with the Python around it; the backward pass runs in C++."""
        table = read_table("aten_costs.json")["host"]
        share = table["launch_share" if runs_kernel(op) else "view_share"]
        return float(self.prices.host_us * share * (table["backward_share"] if op.phase == "backward" else 1.0))

    # ------------------------------------------------------------------ work
    @cached_property
    def model_flops(self) -> float:
        """Of matmuls and attention, without what is recomputed: a backward pass has twice the work of its forward
        pass.
        """
        return 3.0 * sum(
            p.operator.flops for op, p in self.kernels if p.operator and op.phase == "forward" and p.operator.is_matrix
        )

    @cached_property
    def hardware_flops(self) -> float:
        """The same with what is recomputed."""
        return sum(p.operator.flops for _, p in self.kernels if p.operator and p.operator.is_matrix)

    def utilisation(self, flops: float, seconds: float) -> float:
        return flops / seconds / (gpu_named(self.setup.cluster.gpu).peak(self.setup.train.precision) * 1e12)

    @cached_property
    def operators(self) -> list[OperatorTime]:
        """Operators by name and shape, the most expensive first."""
        found: dict[tuple[str, Operator], OperatorTime] = {}
        for op, price in self.kernels:
            work = price.operator or Operator("stream", (round(price.bytes),))
            name = base_name(op).strip("_").replace(".", " ")
            row = found.get((name, work)) or OperatorTime(name, work, 0, 0.0, self._bound(price), price.source)
            found[name, work] = replace(row, count=row.count + 1, ms=row.ms + price.us / 1e3)
        return sorted(found.values(), key=lambda row: -row.ms)

    def _bound(self, price: Price) -> str:
        return "memory" if price.operator is None else self.prices.model.bound(price.operator)

    # ------------------------------------------------------------------ memory and energy
    @cached_property
    def memory(self) -> Memory:
        held = self.recording.held_bytes
        stage = StageMemory(
            self.recording.peak_phase, held.get("weights", 0.0), held.get("gradients", 0.0), held.get("optimizer", 0.0),
            held.get("activations", 0.0), 0.0, workspaces_of(self.setup.cluster.gpu),
        )  # fmt: skip
        usable = (self.setup.cluster.memory_gib or gpu_named(self.setup.cluster.gpu).memory_gib) * _GIB
        return Memory(0, stage, reserve_of(self.setup, stage.peak), usable, (stage,))

    def energy(self, seconds: float) -> Energy:
        gpu, joules = self.setup.cluster.accelerator, self.prices.joules
        work = sum(
            joules.operator(price.operator or Operator("stream", (max(1, round(price.bytes)),)), price.us)
            for _, price in self.kernels
        )
        return Energy(seconds, 1, gpu.idle_w, joules.most_w, (work,))


class _Rows:
    """The rows of the trace: (category, name, lane, start, duration, correlation), times in nanoseconds."""

    def __init__(self, step: DryStep) -> None:
        self.step, self.names = step, dict[str, int]()

    def trace(self) -> Trace:
        rows = sorted(self._rows(), key=lambda row: (row[3], -row[4]))
        columns = np.array(rows, np.int64).T
        category, name, lane, start, duration, correlation = columns
        gpu = self.step.setup.cluster.gpu
        return Trace(
            tuple(self.names), (Lane(0, False, "dry run", "host"), Lane(0, True, "dry run", "compute")), (),
            (Header(0, "dry run", 1, gpu),), category.astype(np.uint8), name.astype(np.int32), lane.astype(np.int32),
            start, duration, correlation, np.full(len(start), -1, np.int32),
        )  # fmt: skip

    def _rows(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        step, name = self.step, self._name
        launch_ns = round(read_table("step.json")["launch_us"] * 1e3)
        gap_ns = round(step.prices.factors.launch_gap_us * 1e3)
        now = free = 0
        for index, op in enumerate(step.recording.ops):
            host_ns = max(2 * _CALL_NS, round(step.host_us_of(op) * 1e3))
            label = base_name(op)
            yield Category.OP, name(f"aten::{label}"), _THREAD, now, host_ns, -1
            if runs_kernel(op):
                called = now + host_ns - _CALL_NS
                yield Category.CALL, name("cudaLaunchKernel"), _THREAD, called, _CALL_NS, index
                begin = max(free + gap_ns, called + launch_ns)
                length = max(1, round(step.aten_prices.of(op).us * 1e3) - gap_ns)
                yield Category.KERNEL, name(label.lstrip("_")), _STREAM, begin, length, index
                free = begin + length
            now += host_ns
        yield Category.NOTE, name("ProfilerStep#0"), _THREAD, 0, max(now, 1), -1

    def _name(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names))
