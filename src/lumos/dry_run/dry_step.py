"""DryStep: a recorded step, priced and put on a timeline: one host thread that launches, and the streams that run.

The recording becomes a Trace as a profiler would have written it, with predicted times, so that everything that works
on
traces (graph, simulation, breakdown, critical path, reports) works on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lumos.analysis.run import TracedRun
from lumos.costs.contention import sides
from lumos.costs.kernel_work import base_name, flops_of, matrix_operator, moved_bytes, runs_kernel
from lumos.costs.model_costs import ModelCosts
from lumos.data_files import read_table
from lumos.dry_run.recorded_step import Recording
from lumos.graph.overlap import contended
from lumos.graph.rules.build import build
from lumos.memory.memory import Memory
from lumos.memory.recorded_memory import recorded_memory
from lumos.memory.stage_walk import GIB
from lumos.prediction.approximations import Approximation, approximations
from lumos.prediction.operator_times import OperatorTime
from lumos.prediction.power import Energy
from lumos.program.layout import RankLayout, layout_of
from lumos.program.op import Op
from lumos.program.operators import Collective, Operator
from lumos.setup.setup import Setup
from lumos.trace.names import Category
from lumos.trace.steps import find_steps
from lumos.trace.trace import Header, Lane, Message, Syncs, Trace

_THREAD = 0
_CALL_NS = 1000  # of the host's time for one launch: the runtime's call itself
_SIZED_BY_VALUES = {"nonzero", "repeat_interleave", "_unique2", "unique_dim", "unique_consecutive"}
_COLLECTIVES = {  # those that cost about what another does
    "send": "p2p", "recv": "p2p", "broadcast": "all_gather", "gather": "all_gather", "scatter": "reduce_scatter",
    "reduce": "reduce_scatter", "barrier": "all_reduce",
}  # fmt: skip


@dataclass(frozen=True)
class DryStep:
    """One training step of one rank. `setup` holds what it runs on; its model is a stand-in."""

    setup: Setup
    recording: Recording
    costs: ModelCosts

    @cached_property
    def ops(self) -> list[Op]:
        """The calls of the step; collectives with what determines their cost."""
        layout = layout_of(self.setup)
        return [op._replace(work=_collective(op, layout)) if op.ranks else op for op in self.recording.ops]

    @cached_property
    def calls(self) -> Counter[Op]:
        """Distinct calls, wherever in the step and the model, and how often each is made."""
        return Counter(op._replace(stream=0, after=(), module="") for op in self.ops)

    @cached_property
    def kernels(self) -> list[tuple[Op, float, float]]:
        """What the GPU computes, with its microseconds and FLOPs; collectives are not among it."""
        kernels = ((op, count) for op, count in self.calls.items() if runs_kernel(op))
        return [(op, count * self.costs.cost(op).us, count * flops_of(op)) for op, count in kernels]

    # ------------------------------------------------------------------ time
    @cached_property
    def trace(self) -> Trace:
        """The step as a profiler would have recorded it."""
        return self._timeline.trace

    @cached_property
    def _timeline(self) -> _Timeline:
        return _Timeline(self)

    @cached_property
    def run(self) -> TracedRun:
        """The step as simulated."""
        execution = build(self.trace)
        between = sides(execution, execution.graph)
        graph = execution.graph if between is None else contended(execution.graph, *between)[0]
        return TracedRun(execution, find_steps(execution.trace), graph)

    @cached_property
    def approximations(self) -> list[Approximation]:
        """What part of the step runs on other kernels than in the real run."""
        return approximations(self.kernels)

    @property
    def unknown_sizes(self) -> int:
        """How many results have a size that depends on the values of tensors: places of a mask, distinct values."""
        return sum(base_name(op) in _SIZED_BY_VALUES for op in self.recording.ops)

    @property
    def busy_us(self) -> float:
        """How long the GPU works."""
        return sum(us for _, us, _ in self.kernels)

    @property
    def host_us(self) -> float:
        """How long the host launches."""
        return sum(count * self.costs.cost(op).host_us for op, count in self.calls.items())

    # ------------------------------------------------------------------ work
    @cached_property
    def model_flops(self) -> float:
        """FLOPs of matmuls, convolutions and attention, without what is recomputed.

        The backward pass has twice the work of the forward pass, or less where weights are frozen.
        """
        forward = sum(flops for op, _, flops in self.kernels if op.phase == "forward")
        return min(3.0 * forward, self.hardware_flops)

    @cached_property
    def hardware_flops(self) -> float:
        """The same with what is recomputed."""
        return sum(flops for _, _, flops in self.kernels)

    @cached_property
    def data_parallel(self) -> float:
        """How many ranks have data of their own, as far as collectives tell.

        Ranks that reduce activations in the forward pass share theirs (tensor parallelism, experts); stages of a
        pipeline do so, too. FSDP gathers weights there and reduces nothing.
        """
        ops, world = self.recording.ops, self.recording.world
        reduces = ("all_reduce", "reduce_scatter", "all_to_all")
        shared = max((len(op.ranks) for op in ops if op.phase == "forward" and op.name in reduces), default=1)
        stages = max((len(op.ranks) for op in ops if op.name in ("send", "recv")), default=1)
        return world / min(shared * stages, world)

    def utilisation(self, flops: float, seconds: float) -> float:
        """Of the peak of the precision that most of the work has, or of the mix where faster precisions raise it."""
        peak = max(self.setup.cluster.chip.peak(self.setup.train.precision), self._peak_of_mix)
        return flops / seconds / (peak * 1e12)

    @cached_property
    def _peak_of_mix(self) -> float:
        """TFLOP/s if every matmul ran at the peak of its own precision; without a known one, at that of the setup."""
        chip, usual = self.setup.cluster.chip, self.setup.train.precision
        least = 0.0
        for op, _, flops in self.kernels:
            operator = matrix_operator(op) if flops else None
            dtype = operator.dtype if operator is not None else usual
            least += flops / chip.peak(dtype if chip.supports(dtype) else usual)
        return self.hardware_flops / least if least else 0.0

    @cached_property
    def operators(self) -> list[OperatorTime]:
        """Operators by name and shape, the most expensive first."""
        found: dict[tuple[str, Operator], OperatorTime] = {}
        for op, us, _ in self.kernels:
            cost, name = self.costs.cost(op), base_name(op).strip("_").replace(".", " ")
            work = matrix_operator(op) or Operator("stream", (round(moved_bytes(op)),))
            row = found.get((name, work)) or OperatorTime(name, work, 0, 0.0, cost.bound, cost.source)
            found[name, work] = replace(row, count=row.count + self.calls[op], ms=row.ms + us / 1e3)
        return sorted(found.values(), key=lambda row: -row.ms)

    # ------------------------------------------------------------------ memory and energy
    @cached_property
    def memory(self) -> Memory:
        held = self.recording
        return recorded_memory(self.setup, held.peak_phase, held.held_bytes, held.storages, held.held_by_module)

    @cached_property
    def allocated(self) -> tuple[list[float], list[float]]:
        """Memory over the step: milliseconds, and GiB that are allocated from then on."""
        places, ends = [event.before for event in self.recording.events], self._timeline.ends
        times, now = [0.0], 0.0
        for place in places:
            now = max(now, ends.get(place, 0) / 1e6)
            times.append(now)
        return times, [size / GIB for size in self.recording.allocated]

    def energy(self, seconds: float) -> Energy:
        """As `energy_of` has it for a setup: kernels, what updates take over other kernels, and collectives."""
        work = sum(count * self.costs.cost(op).joules for op, count in self.calls.items())
        idle_w = self.setup.cluster.accelerator.idle_w
        return Energy(seconds, self.recording.world, idle_w, self.costs.joules.most_w, (work,))


def _collective(op: Op, layout: RankLayout) -> Collective:
    moved = max(sum(t.bytes for t in op.inputs), sum(t.bytes for t in op.outputs), 8.0)
    return Collective(_COLLECTIVES.get(op.name, op.name), moved, layout.group_of(op.ranks))


class _Timeline:
    """The rows of the trace: (category, name, lane, start, duration, correlation, message), times in nanoseconds.

    The host issues operators one after the other. A kernel starts when its stream is free and everything that it waits
    for on other streams has ended; a call that waits ends when the work before it has.
    """

    def __init__(self, step: DryStep) -> None:
        self.step = step
        self.names, self.messages = dict[str, int](), dict[Message, int]()
        streams = sorted({op.stream for op in step.recording.ops}, key=lambda stream: (stream < 0, abs(stream)))
        self.lanes = {stream: index + 1 for index, stream in enumerate(streams or [0])}
        self.syncs: list[tuple[int, int, int, int, int]] = []  # lane, correlation, stream, wait_stream, record
        self.now = self.calls = self.taken = 0
        self.free: dict[int, int] = {}  # when a stream has ended all that it was given
        self.ends: dict[int, int] = {}  # of operators, by place
        self.records: dict[int, int] = {}  # correlation of the event that was recorded after an operator
        self.awaited = {place for op in step.recording.ops for place in op.after if not _is_wait(op)}
        self.trace = self._trace()

    def _trace(self) -> Trace:
        rank, gpu = self.step.recording.rank, self.step.setup.cluster.gpu
        columns = np.array(sorted(self._rows(), key=lambda row: (row[3], -row[4])), np.int64).T
        category, name, lane, start, duration, correlation, message = columns
        lanes = [Lane(rank, False, "dry run", "host")]
        lanes += [Lane(rank, True, "dry run", self._label(stream)) for stream in self.lanes]
        header = Header(rank, "dry run", self.step.recording.world, gpu, profiled=False)
        return Trace(
            tuple(self.names), tuple(lanes), tuple(self.messages), (header,), category.astype(np.uint8),
            name.astype(np.int32), lane.astype(np.int32), start, duration, correlation, message.astype(np.int32),
            self._syncs(),
        )  # fmt: skip

    def _label(self, stream: int) -> str:
        return str(self.lanes[stream])  # a number, by which waits name streams

    def _syncs(self) -> Syncs:
        lane, correlation, stream, other, record = np.array(self.syncs or np.zeros((0, 5)), np.int64).reshape(-1, 5).T
        return Syncs(lane.astype(np.int32), correlation, stream, other, record, np.full(len(lane), -1, np.int64))

    def _rows(self) -> Iterator[tuple[int, ...]]:
        for place, op in enumerate(self.step.ops):
            if _is_wait(op):
                yield from self._wait(op)
            elif op.ranks or runs_kernel(op):
                yield from self._launch(place, op)
            else:
                length = self._host_ns(op)
                yield Category.OP, self._name(_label(op)), _THREAD, self.now, length, -1, -1
                self.now += length
        end = max(self.now, *self.ends.values()) if self.ends else max(self.now, 1)
        yield Category.CALL, self._name("cudaDeviceSynchronize"), _THREAD, self.now, end - self.now, self._call(), -1
        yield Category.NOTE, self._name("ProfilerStep#0"), _THREAD, 0, end, -1, -1

    def _host_ns(self, op: Op) -> int:
        return max(2 * _CALL_NS, round(self.step.costs.cost(op).host_us * 1e3))

    def _wait(self, op: Op) -> Iterator[tuple[int, ...]]:
        """The host waits for a stream, or for all of them."""
        end = max([self.now + _CALL_NS, *(self.ends[place] for place in op.after if place in self.ends)])
        call = self._call()
        if len(op.after) == 1 and op.name != "cudaDeviceSynchronize":
            stream = self.step.recording.ops[op.after[0]].stream
            self.syncs.append((_THREAD, call, int(self._label(stream)), -1, -1))
        yield Category.CALL, self._name(op.name), _THREAD, self.now, end - self.now, call, -1
        self.now = end

    def _launch(self, place: int, op: Op) -> Iterator[tuple[int, ...]]:
        began, waits = self.now, [earlier for earlier in op.after if earlier in self.records]
        length = self._host_ns(op) + _CALL_NS * (len(waits) + (place in self.awaited))
        yield Category.OP, self._name(_label(op)), _THREAD, began, length, -1, -1
        self.now = began + length - _CALL_NS * (1 + len(waits) + (place in self.awaited))
        for earlier in waits:
            yield self._stream_wait(op, earlier)
        yield from self._kernel(place, op)
        if place in self.awaited:
            self.records[place] = call = self._call()
            yield Category.CALL, self._name("cudaEventRecord"), _THREAD, self.now, _CALL_NS, call, -1
        self.now = began + length

    def _stream_wait(self, op: Op, earlier: int) -> tuple[int, ...]:
        call, other = self._call(), self.step.recording.ops[earlier].stream
        self.syncs.append((_THREAD, call, int(self._label(op.stream)), int(self._label(other)), self.records[earlier]))
        row = (Category.CALL, self._name("cudaStreamWaitEvent"), _THREAD, self.now, _CALL_NS, call, -1)
        self.now += _CALL_NS
        return row

    def _kernel(self, place: int, op: Op) -> Iterator[tuple[int, ...]]:
        gap = round(self.step.costs.factors.launch_gap_us * 1e3)
        launch = round(read_table("step.json")["launch_us"] * 1e3)
        call, message = self._call(), self._message(op)
        yield Category.CALL, self._name("cudaLaunchKernel"), _THREAD, self.now, _CALL_NS, call, -1
        begin = max(self.free.get(op.stream, -gap) + gap, self.now + launch,
                    *(self.ends[earlier] for earlier in op.after if earlier in self.ends))  # fmt: skip
        length = max(1, round(self.step.costs.cost(op).us * 1e3) - (0 if op.ranks else gap))
        if not op.ranks:  # streams share the GPU: kernels of the others take their time from the first
            length += self.taken if op.stream == 0 else 0
            self.taken = 0 if op.stream == 0 else self.taken + length
        name = f"ncclDevKernel_{op.name}" if op.ranks else _label(op).removeprefix("aten::").lstrip("_")
        yield Category.KERNEL, self._name(name), self.lanes[op.stream], begin, length, call, message
        self.free[op.stream] = self.ends[place] = begin + length
        self.now += _CALL_NS

    def _message(self, op: Op) -> int:
        if not op.ranks:
            return -1
        read, written = (sum(t.elements for t in tensors) for tensors in (op.inputs, op.outputs))
        dtype = op.inputs[0].dtype if op.inputs else ""
        found = Message(op.name, dtype, read, written, group_size=len(op.ranks), ranks=op.ranks)
        return self.messages.setdefault(found, len(self.messages))

    def _call(self) -> int:
        self.calls += 1
        return self.calls

    def _name(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names))


def _is_wait(op: Op) -> bool:
    return op.name.startswith("cuda")


def _label(op: Op) -> str:
    return op.name if op.name.startswith(("dtensor.", "fsdp.")) else f"aten::{base_name(op)}"
