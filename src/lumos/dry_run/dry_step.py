"""DryStep: a recorded step, priced and put on a timeline: one host thread that launches, and the streams that run.

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
from lumos.costs.aten_prices import AtenPrices, Price
from lumos.costs.host_costs import host_us
from lumos.costs.kernel_work import base_name, runs_kernel
from lumos.costs.overlapped_kernels import sides
from lumos.costs.prices import Prices
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
from lumos.step.step import host_speed
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
    prices: Prices

    @cached_property
    def layout(self) -> RankLayout:
        return layout_of(self.setup)

    @cached_property
    def aten_prices(self) -> AtenPrices:
        return AtenPrices(self.prices)

    @cached_property
    def kernels(self) -> list[tuple[Op, Price]]:
        """What the GPU computes, in order, with its price; collectives are not among it."""
        return [(op, self.aten_prices.of(op)) for op in self.recording.ops if self.runs(op)]

    @staticmethod
    def runs(op: Op) -> bool:
        """Whether the GPU computes or copies something."""
        return not op.ranks and not _is_wait(op) and "cpu" not in op.options and runs_kernel(op)

    def kernel_us(self, op: Op) -> float:
        """The time of an operator or a collective on its stream."""
        return self.collective_us(op) if op.ranks else self.aten_prices.of(op).us

    def collective_us(self, op: Op) -> float:
        """The time of a collective once all its ranks have arrived."""
        return self.prices.collective_us(self.collective(op))

    def collective(self, op: Op) -> Collective:
        """What determines the cost of a recorded collective."""
        moved = max(sum(t.bytes for t in op.inputs), sum(t.bytes for t in op.outputs), 8.0)
        return Collective(_COLLECTIVES.get(op.name, op.name), moved, self.layout.group_of(op.ranks))

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
        return sum(price.us for _, price in self.kernels)

    @property
    def host_us(self) -> float:
        """How long the host launches."""
        return sum(self.host_us_of(op) for op in self.recording.ops)

    def host_us_of(self, op: Op) -> float:
        """Host time of one operator with the Python around it, on the host of the setup."""
        return host_us(op) / host_speed(self.setup)

    # ------------------------------------------------------------------ work
    @cached_property
    def model_flops(self) -> float:
        """FLOPs of matmuls, convolutions and attention, without what is recomputed.

        The backward pass has twice the work of the forward pass, or less where weights are frozen.
        """
        forward = sum(price.flops for op, price in self.kernels if op.phase == "forward")
        return min(3.0 * forward, self.hardware_flops)

    @cached_property
    def hardware_flops(self) -> float:
        """The same with what is recomputed."""
        return sum(price.flops for _, price in self.kernels)

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
        for _, price in self.kernels:
            dtype = price.operator.dtype if price.operator is not None else usual
            least += price.flops / chip.peak(dtype if chip.supports(dtype) else usual)
        return self.hardware_flops / least if least else 0.0

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
        gpu, joules = self.setup.cluster.accelerator, self.prices.joules
        work = sum(self._kernel_joules(op, price) for op, price in self.kernels)
        calls = (op for op in self.recording.ops if op.ranks)
        work += sum(joules.collective(self.collective(op), self.collective_us(op)) for op in calls)
        return Energy(seconds, self.recording.world, gpu.idle_w, joules.most_w, (work,))

    def _kernel_joules(self, op: Op, price: Price) -> float:
        joules, operator = self.prices.joules, price.operator
        if op.phase == "optimizer" and (operator is None or not operator.is_matrix):
            return joules.update_w * price.us * 1e-6
        return joules.operator(operator or Operator("stream", (max(1, round(price.bytes)),)), price.us)


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
        for place, op in enumerate(self.step.recording.ops):
            if _is_wait(op):
                yield from self._wait(op)
            elif op.ranks or self.step.runs(op):
                yield from self._launch(place, op)
            else:
                length = self._host_ns(op)
                yield Category.OP, self._name(_label(op)), _THREAD, self.now, length, -1, -1
                self.now += length
        end = max(self.now, *self.ends.values()) if self.ends else max(self.now, 1)
        yield Category.CALL, self._name("cudaDeviceSynchronize"), _THREAD, self.now, end - self.now, self._call(), -1
        yield Category.NOTE, self._name("ProfilerStep#0"), _THREAD, 0, end, -1, -1

    def _host_ns(self, op: Op) -> int:
        return max(2 * _CALL_NS, round(self.step.host_us_of(op) * 1e3))

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
        gap = round(self.step.prices.factors.launch_gap_us * 1e3)
        launch = round(read_table("step.json")["launch_us"] * 1e3)
        call, message = self._call(), self._message(op)
        yield Category.CALL, self._name("cudaLaunchKernel"), _THREAD, self.now, _CALL_NS, call, -1
        begin = max(self.free.get(op.stream, -gap) + gap, self.now + launch,
                    *(self.ends[earlier] for earlier in op.after if earlier in self.ends))  # fmt: skip
        length = max(1, round(self.step.kernel_us(op) * 1e3) - (0 if op.ranks else gap))
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
