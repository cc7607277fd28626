"""TracedOperators: how fast every operator of a traced step ran, against its GPU and against our cost model.

A kernel belongs to the innermost operator around its launch that has tensors. Calls of one operator with the same
tensors in the same phase are one row. FLOPs and bytes follow from the tensors (`lumos.costs.kernel_work`); bytes are
what must at least be read and written once, so an operator whose data is in the cache may exceed the memory's
bandwidth.

    found = traced_operators(replay(read_job(Path("traces"))))
    found.operators[0].tflops, found.operators[0].bound, found.operators[0].gain_ms
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lumos.analysis.kernel_labels import KernelClass, KernelPhase, RankLabels, label
from lumos.analysis.replay import Replay
from lumos.costs.energy import in_step_factors
from lumos.costs.kernel_work import matrix_operator, works_of
from lumos.costs.model_costs import ModelCosts
from lumos.costs.network import network_of
from lumos.costs.operator_model import cost_model
from lumos.data_files import read_table
from lumos.errors import InputError
from lumos.graph.rules.cpu_device import is_cpu_run
from lumos.program.op import Op, Tensor
from lumos.read.op_columns import TracedOp, rank_ops
from lumos.setup.gpus import Gpu, gpu_called
from lumos.trace.trace import Trace
from lumos.traced.measured_ops import is_causal, owners_of, recorded
from lumos.traced.traced_modules import Modules, ModuleTime, module_times

RECORD_SHAPES = (
    "the trace has no shapes of operators: record with lumos capture, or with record_shapes=True of torch.profiler"
)
RECORD_MODULES = (
    "no view by module: the trace has neither Python stacks nor record_function ranges; put "
    "torch.profiler.record_function around modules, or record with with_stack=True of torch.profiler"
)
_TF32 = re.compile(r"tf32|s1688gemm|16816tf")  # kernels that round fp32 operands
_FUSED = re.compile(r"triton_(poi|red|per)_fused")  # kernels of torch.compile
_OPERANDS = {"aten::mm": 2, "aten::bmm": 2, "aten::addmm": 3, "aten::baddbmm": 3}
_ADDING = {"aten::baddbmm": 3, "aten::addmm": 3}  # and the place of beta, by which what is added is multiplied
_MOST_PRICED = 2000  # rows whose work is looked at: a step has some hundred
_MUCH_UNKNOWN = 0.1  # of the time
_NOT_CACHED = 4.0  # times the second-level cache: so many bytes come from memory
_BEYOND_PEAK = 1.2  # of the memory's bandwidth
_NONSENSE = (ArithmeticError, LookupError, TypeError, ValueError)  # from shapes that cannot be


class Effort(NamedTuple):
    """What one call does, and what it takes at the price of the cost model; None: not known."""

    flops: float = 0.0  # of matmuls, attention and convolutions
    bytes: float = 0.0
    elements: float = 0.0  # that an element-wise kernel goes through
    precision: str = ""  # of the matmul
    model_us: float | None = None
    source: str = ""  # of that price: fitted, transferred, roofline


@dataclass(frozen=True)
class TracedOperator:
    """All calls in a step of one operator with the same tensors, in one phase."""

    name: str  # aten::mm; of a kernel, where no operator with tensors launched it
    phase: str
    tensors: tuple[Tensor, ...]
    calls: int
    us: float  # GPU time of one call
    waited_us: float  # that the GPU was idle before one call, because the host launched it late
    kernels: float  # of one call
    kernel: str  # that takes the most time
    effort: Effort
    gpu: Gpu | None
    op: Op | None = None  # as our prices know it
    call: TracedOp | None = field(default=None, repr=False, compare=False)  # one of them, as recorded

    @property
    def ms(self) -> float:
        return self.calls * self.us / 1e3

    @property
    def tflops(self) -> float | None:
        return self.effort.flops / self.us / 1e6 if self.effort.flops and self.us else None

    @property
    def gb_s(self) -> float | None:
        return self.effort.bytes / self.us / 1e3 if self.effort.bytes and self.us else None

    @property
    def intensity(self) -> float | None:
        """FLOPs for every byte; an element-wise kernel is counted with one for every element."""
        work = self.effort.flops or self.effort.elements
        return work / self.effort.bytes if work and self.effort.bytes else None

    @property
    def peak_tflops(self) -> float | None:
        """Of the GPU, in the precision of the operator."""
        peaks = self.gpu.peak_tflops if self.gpu else {}
        return peaks.get(self.effort.precision)

    @property
    def limits_us(self) -> tuple[float, float] | None:
        """What computing and moving would take at the peaks of the GPU."""
        if self.gpu is None or not self.effort.bytes or (self.effort.flops and not self.peak_tflops):
            return None
        computing = self.effort.flops / (self.peak_tflops or 1.0) / 1e6
        return computing, self.effort.bytes / self.gpu.hbm_gb_s / 1e3

    @property
    def peak_share(self) -> float | None:
        """Reached of what bounds the operator: of the matmul peak, or of the memory's bandwidth."""
        return max(self.limits_us) / self.us if self.limits_us and self.us else None

    @property
    def bound(self) -> str:
        """Launch: the GPU waits longer for the host than it computes, or has less to do than a kernel's start takes."""
        if self.waited_us > self.us:
            return "launch"
        if self.limits_us is None:
            return ""
        computing, moving = self.limits_us
        empty_us = read_table("aten_costs.json")["families"]["pointwise.dense"]["fixed_us"]
        if max(computing, moving) < empty_us:
            return "launch"
        return "compute" if computing > moving else "memory"

    @property
    def model_ms(self) -> float | None:
        return None if self.effort.model_us is None else self.calls * self.effort.model_us / 1e3

    @property
    def gain_ms(self) -> float | None:
        """What a step would gain if the operator took what the cost model says; None if that has no samples of it."""
        unknown = self.model_ms is None or self.effort.source == "roofline"
        return None if unknown else max(0.0, self.ms - (self.model_ms or 0.0))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON and CSV have them; what is not known is None."""
        share = self.peak_share
        return {
            "name": self.name, "phase": self.phase, "shapes": [list(t.shape) for t in self.tensors],
            "dtypes": [t.dtype for t in self.tensors], "strides": [list(t.strides) for t in self.tensors],
            "calls": self.calls, "us": self.us, "ms": self.ms, "waited_ms": self.calls * self.waited_us / 1e3,
            "kernel": self.kernel, "kernels": self.kernels, "flops": self.effort.flops or None,
            "bytes": self.effort.bytes or None, "tflops": self.tflops, "gb_s": self.gb_s,
            "intensity": self.intensity, "peak_pct": None if share is None else 100 * share,
            "bound": self.bound or None, "model_ms": self.model_ms, "model_source": self.effort.source or None,
            "gain_ms": self.gain_ms,
        }  # fmt: skip


@dataclass(frozen=True)
class TracedOperators:
    """The operators of one rank's step, the most expensive first; `modules` is empty where the trace shows none."""

    rank: int
    step: str
    gpu: Gpu | None  # None: not known, or a CPU
    device: str  # GPU or CPU
    operators: list[TracedOperator]
    modules: list[ModuleTime]
    warnings: list[str]

    @cached_property
    def ms(self) -> float:
        """GPU time of all of them; communication is not among it."""
        return sum(op.ms for op in self.operators)

    @property
    def gain_ms(self) -> float:
        return sum(op.gain_ms or 0.0 for op in self.operators)

    @property
    def tflops(self) -> float:
        """Of the whole GPU time."""
        work = sum(op.calls * op.effort.flops for op in self.operators)
        return work / self.ms / 1e9 if self.ms else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank, "step": self.step, "gpu": self.gpu.name if self.gpu else None, "ms": self.ms,
            "gain_ms": self.gain_ms if self.gpu else None, "tflops": self.tflops,
            "operators": [op.as_dict() for op in self.operators],
            "modules": [one.as_dict() for one in self.modules], "warnings": self.warnings,
        }  # fmt: skip


class Call(NamedTuple):
    """One call of an operator: the kernels that it launched one after the other."""

    op: TracedOp | None
    phase: str
    us: float
    waited_us: float
    kernels: tuple[tuple[str, float], ...]  # name, microseconds

    @property
    def name(self) -> str:
        return self.op.name if self.op is not None else self.kernels[0][0]


def traced_operators(run: Replay) -> TracedOperators:
    """The operators of the first rank in the step nearest to the typical one.

    InputError where the trace has no shapes, or is of a format without operators.
    """
    trace = run.execution.trace
    header = next(iter(sorted(trace.headers, key=lambda one: one.rank)), None)
    step = run.marks.names[int(np.argmin(np.abs(run.clean_steps.milliseconds - run.clean_ms)))]
    labels = label(run, most=1)[0]
    path = Path(header.path) if header is not None and header.path else Path()
    ops = rank_ops(run.execution.recorded, labels.rank, step, modules=True)
    if not ops.ops:
        raise InputError(f"{path}: operators with shapes are read from PyTorch profiler traces; this has none")
    if not any(op.tensors for op in ops.ops):
        raise InputError(f"{path}: {RECORD_SHAPES}")
    if not len(labels.row):
        raise InputError(f"{path}: no kernel of {step} was recorded with its launch; choose another step with --step")
    calls = list(_calls(trace, labels, owners_of(trace, labels, ops, any_op=True)))
    named = header.gpu if header is not None else ""
    device, gpu = ("CPU", None) if is_cpu_run(trace) else ("GPU", gpu_called(named))
    rows = _rows(calls, gpu, is_causal(ops))
    modules = Modules(ops.ops)
    times = module_times([(modules.of(one.op), one.phase, one.us) for one in calls]) if modules.known else []
    warnings = [*_warnings(trace, named, gpu, modules), *_unknown(rows)]
    return TracedOperators(labels.rank, step, gpu, device, rows, times, warnings)


def _warnings(trace: Trace, name: str, gpu: Gpu | None, modules: Modules) -> Iterator[str]:
    if is_cpu_run(trace):
        yield "a run on CPUs: peaks are not known, so there is no roofline and no price of the cost model"
    elif gpu is None:
        named = f"{name[:80]!r} is not known" if name else "the trace does not name its GPU"
        yield f"{named}: no roofline and no price of the cost model; lumos about lists the GPUs that have them"
    if len(trace.ranks) > 1:
        ranks = f"rank {trace.ranks[0]}, one of {len(trace.ranks)} ranks"
        yield f"rates of operators and time by module are those of {ranks}; --match selects the file of another"
    if not modules.known:
        yield RECORD_MODULES


def _unknown(rows: Sequence[TracedOperator]) -> Iterator[str]:
    """How much of the time belongs to nothing whose work is known, if that is much."""
    total = sum(row.ms for row in rows)
    share = sum(row.ms for row in rows if not row.effort.bytes) / total if total else 0.0
    if share > _MUCH_UNKNOWN:
        yield (
            f"{100 * share:.0f} % of the time is in kernels of no operator with shapes, such as those of CUDA graphs, "
            "compiled code and lists of very many tensors: their rates are not known"
        )


def _calls(trace: Trace, labels: RankLabels, owners: Sequence[TracedOp | None]) -> Iterator[Call]:
    """Kernels of the step joined to calls; communication is left out."""
    waited = np.zeros(len(labels.row)) if is_cpu_run(trace) else _waited_us(trace, labels)
    last: TracedOp | None = None
    call: Call | None = None
    for i, owner in enumerate(owners):
        if labels.work[i] == KernelClass.COMM:
            continue
        kernel = trace.names[trace.name[labels.row[i]]], float(labels.us[i])
        if call is not None and owner is not None and owner is last:
            call = call._replace(
                us=call.us + kernel[1], waited_us=call.waited_us + waited[i], kernels=(*call.kernels, kernel)
            )
            continue
        if call is not None:
            yield call
        call = Call(owner, KernelPhase(int(labels.phase[i])).name.lower(), kernel[1], float(waited[i]), (kernel,))
        last = owner
    if call is not None:
        yield call


def _waited_us(trace: Trace, labels: RankLabels) -> np.ndarray:
    """How long the GPU was idle before every kernel although all before it had ended: its launch came late."""
    start, end = trace.start[labels.row], trace.end[labels.row]
    order = np.argsort(start, kind="stable")
    before = np.concatenate([start[order][:1], np.maximum.accumulate(end[order])[:-1]])
    launched = trace.start[trace.launch_row[labels.row]][order]
    found = np.zeros(len(start))
    found[order] = np.where(launched > before, np.maximum(start[order] - before, 0), 0) / 1e3
    return found


def _rows(calls: Sequence[Call], gpu: Gpu | None, causal: bool) -> list[TracedOperator]:
    """Equal calls together, the most expensive first."""
    groups: dict[tuple[Any, ...], list[Call]] = defaultdict(list)
    for call in calls:
        rounds = _is_fp32(call.op) and any(_TF32.search(name) for name, _ in call.kernels)
        groups[call.name, call.phase, call.op.tensors if call.op else (), rounds].append(call)
    prices = None if gpu is None else _prices(gpu)
    longest = sorted(groups.items(), key=lambda item: -sum(call.us for call in item[1]))
    found = []
    for place, ((_, phase, tensors, rounds), some) in enumerate(longest):
        traced = some[0].op if tensors and place < _MOST_PRICED else None
        op = None if traced is None else _recorded(traced, phase, causal, rounds)
        found.append(_row(some, tensors, op, prices, gpu))
    return sorted(found, key=lambda row: -row.ms)


def _row(
    calls: Sequence[Call], tensors: tuple[Tensor, ...], op: Op | None, prices: ModelCosts | None,
    gpu: Gpu | None,
) -> TracedOperator:  # fmt: skip
    """Equal calls as one row; `op` is what their work follows from, None if that is not to be looked at."""
    first, count = calls[0], len(calls)
    us = sum(call.us for call in calls) / count
    effort = Effort() if op is None else _effort(op, prices)
    if op is not None and not _is_believable(first.name, op, effort, us, gpu):
        effort = Effort()
    by_kernel: dict[str, float] = defaultdict(float)
    for kernel, spent in (one for call in calls for one in call.kernels):
        by_kernel[kernel] += spent
    return TracedOperator(
        first.name, first.phase, tensors, count, us, sum(call.waited_us for call in calls) / count,
        sum(len(call.kernels) for call in calls) / count, max(by_kernel, key=lambda kernel: by_kernel[kernel]), effort,
        gpu, op, first.op,
    )  # fmt: skip


def _is_believable(name: str, op: Op, effort: Effort, us: float, gpu: Gpu | None) -> bool:
    """Whether a call can have done what its shapes suggest.

    Attention over sequences laid end to end does not show their lengths. A kernel of compiled code may read a part of a
    tensor that it is given: then it seems to move more than the memory could.
    """
    if ("flash_attn" in name or "attention" in name) and not op.name.startswith("attention."):
        return False
    if gpu is None or effort.flops or effort.bytes < _NOT_CACHED * gpu.l2_mb * 1e6:
        return True
    return effort.bytes / max(us, 1e-9) / 1e3 < _BEYOND_PEAK * gpu.hbm_gb_s


def _recorded(traced: TracedOp, phase: str, causal: bool, rounds: bool) -> Op:
    """The call as our prices know it; `rounds`: to tf32."""
    if fused := _FUSED.match(traced.name):  # what it writes is among its tensors
        name = "fused.pointwise" if fused[1] == "poi" else "fused.reduction"
        return Op(name, traced.tensors, (), phase, allocates=True, options=(traced.name,))
    masked, causal = _masks(traced, causal)
    op = recorded(traced, phase, causal)
    if traced.name in _ADDING and _is_zero(traced, _ADDING[traced.name]):  # what would be added is not even read
        op = op._replace(name=op.name.replace("badd", "").replace("addmm", "mm"), inputs=op.inputs[1:])
        traced = replace(traced, name=traced.name.replace("badd", "").replace("addmm", "mm"))
    options = (*op.options, *["tf32"] * rounds, *["masked"] * (masked and op.name.startswith("attention.")))
    count = _OPERANDS.get(traced.name, len(op.inputs))  # compiled code names the tensor that is written: out=
    outputs = op.inputs[count : count + 1] or op.outputs
    return op._replace(inputs=op.inputs[:count], outputs=outputs, options=options)


def _is_fp32(op: TracedOp | None) -> bool:
    return op is not None and bool(op.tensors) and op.tensors[0].dtype == "fp32"


def _is_zero(op: TracedOp, place: int) -> bool:
    """Whether an argument was recorded to be zero."""
    values = op.args.values
    return place < len(values) and str(values[place]) in ("0", "0.", "0.0")


def _masks(traced: TracedOp, causal: bool) -> tuple[bool, bool]:
    """Whether an attention has a mask, and is causal, by its own arguments or those of the call around it."""
    op: TracedOp | None = traced
    while op is not None:
        mask, place = read_table("operator_names.toml")["attention_arguments"].get(op.name, (-1, -1))
        values, types = op.args.values, op.args.types
        if 0 <= place < len(values):
            return 0 <= mask < len(types) and types[mask] != "", values[place] == "True"
        op = op.parent
    return False, causal


def _prices(gpu: Gpu) -> ModelCosts:
    """Costs of single operators: no network and no host."""
    factors = in_step_factors(gpu)
    return ModelCosts(cost_model(gpu.name), network_of(gpu, "infiniband", factors), factors, 0.0, 0.0)


def _effort(op: Op, prices: ModelCosts | None) -> Effort:
    """Work and price of one call; nothing where the shapes make no sense."""
    try:
        operator, works = matrix_operator(op), works_of(op)
        matrix = operator if operator is not None and operator.is_matrix else None
        flops = matrix.flops if matrix else sum(work.flops for work in works)
        moved = sum(work.bytes for work in works)
        elements = 0.0 if flops else max((work.elements for work in works), default=0.0)
        implicit = next((work.operator for work in works if work.operator is not None), None)
        precision = (matrix or implicit).dtype if flops and (matrix or implicit) else ""  # type: ignore[union-attr]
        if prices is None:
            return Effort(flops, moved, elements, precision)
        cost = prices.cost(op)
    except _NONSENSE:
        return Effort()
    us = max(0.0, cost.us - prices.factors.launch_gap_us)  # kernels are recorded without the gaps between them
    return Effort(flops, moved, elements, precision, us, cost.source)
