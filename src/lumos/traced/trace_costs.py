"""TraceCosts: costs of another configuration, learned from a traced run.

    time in the new setup = model there × typical × (measured / model in the traced setup / typical) ^ weight

An operator that does not change keeps its measured time. For one that does, the weight says how much of the model's
error at the traced size recurs at the other size (`data/change.json`, measured on pairs of traces): 1 would believe
the trace only, 0 the model only. What the traced run did not do costs what the model says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from math import exp, log, prod
from typing import Any

import numpy as np

from lumos.costs.costs import costs_of
from lumos.costs.energy import in_step_factors
from lumos.costs.kernel_work import works_of
from lumos.costs.model_costs import Cost, ModelCosts
from lumos.costs.operator_model import cpu_model
from lumos.data_files import read_table
from lumos.program.op import Op
from lumos.program.operators import Collective
from lumos.setup.setup import Setup
from lumos.traced.cut import CutBlock, seen
from lumos.traced.sizes import Shape, Sizes

_TABLE = read_table("change.json")
UNPRICED = (ArithmeticError, LookupError, TypeError, ValueError)  # what a model makes of shapes that make no sense
MODES = ("drawn", "trace")
"""Operators by their trace, drawn towards the model; by their trace only."""
_LIKES = ("matrix", "attention", "stream")  # kinds of work of calls that are measured
_SHORTEST_US = 0.5  # of a kernel
_OTHER_KERNEL = 10.0  # times its modelled time, or its inverse: something else was launched than what is modelled


@dataclass(frozen=True)
class Weights:
    """The trained parameters of the traced rank, by shape: those that every layer has, and the others."""

    layers: int = 0
    counts: tuple[tuple[Shape, int], ...] = ()  # of one micro-batch

    @property
    def shapes(self) -> frozenset[Shape]:
        return frozenset(shape for shape, _ in self.counts)

    def elements(self, sizes: Sizes, layers: float) -> tuple[float, float]:
        """(of all layers, of the rest) in the other setup."""
        inside = outside = 0.0
        for shape, count in self.counts:
            size = prod(sizes.weight(shape))
            each, rest = divmod(count, self.layers) if self.layers else (0, count)
            inside, outside = inside + size * each * layers, outside + size * rest
        return inside, outside


@dataclass(frozen=True)
class Learned:
    """What a traced run shows, whatever it is then asked about."""

    traced: Setup
    blocks: Mapping[str, CutBlock] = field(default_factory=dict)
    weights: Weights = Weights()
    gpu: float = 1.0  # closes what is left of a GPU-bound step: all kernels this much slower
    host: float = 1.0  # and of a host-bound one
    network: Mapping[str, float] = field(default_factory=dict)  # measured over modelled: of a block, between ranks, p2p
    beyond_us: float = 0.0  # once a step: what is left between the model of the traced run and the run
    gpu_bound: bool = False  # the traced run is: what is left is the wait for its host where it begins and ends
    load: float = 0.0  # share of the traced step that matmuls and attention ran
    silent: bool = False  # no collectives were recorded
    shared: bool = False  # ranks share a GPU, so that kernels take longer than modelled
    beside: bool = False  # kernels were recorded beside communication: what they lost to it is in their times
    mode: str = "drawn"  # one of MODES

    @property
    def name(self) -> str:
        """The same for runs that give the same results."""
        return sha256(repr(self).encode()).hexdigest()

    @cached_property
    def model(self) -> ModelCosts:
        """Costs of the traced setup before anything is learned."""
        return plain_costs(self.traced)

    def slower(self, factor: float) -> Learned:
        """All that runs on the GPU, this much slower."""
        return replace(self.slower_network(factor), gpu=self.gpu * factor)

    def slower_host(self, factor: float) -> Learned:
        """All that the host does, this much slower."""
        return replace(self, host=self.host * factor)

    def slower_network(self, factor: float) -> Learned:
        """All communication, this much slower."""
        return replace(self, network={name: value * factor for name, value in self.network.items()})

    def with_network(self, factor: float) -> Learned:
        """With all communication at this factor of the model's: 0 if a trace has none of its own."""
        return replace(self, network=dict.fromkeys(self.network, factor))


def plain_costs(setup: Setup) -> ModelCosts:
    """Costs before anything is learned from a trace."""
    return costs_of(setup, model=_model_of(setup))


def _model_of(setup: Setup) -> Any:
    return cpu_model() if setup.cluster.accelerator.is_cpu else None


class TraceCosts(ModelCosts):
    """Costs of a setup in which calls of a traced run are made again; see `trace_costs`."""

    learned: Learned
    target: Setup
    load: float  # share of the step that matrix units work: it sets the clock

    def cost(self, op: Op) -> Cost:
        """What a call costs here: those of a trace differ by their measured times, collectives by their block."""
        found = self._costs.get(op)
        if found is None:
            us = self.us(op)
            source, bound = self.basis_of(op, us)
            traced = op.measured is not None or self.is_measured(op)
            source = ("measured" if self.is_measured(op) else "scaled") if traced else source
            found = self._costs[op] = Cost(us, self.host_us_of(op), self.joules_of(op, us), source, bound)
        return found

    def host_us_of(self, op: Op) -> float:
        """The blocks of a trace state launches."""
        return self.host_us * self.launches(op)

    def us(self, op: Op) -> float:
        if isinstance(op.work, Collective):
            return self.network.us(op.work) * self.learned.network.get(op.module, 1.0)
        if op.measured is None:
            return op.calls * self.kernel_us(op) if op.inputs else super().us(op)
        gap = 0.0 if self._on_cpu else op.measured.kernels * self.factors.launch_gap_us
        return op.calls * (self.traced_us(op) * self._strain[op.measured.like] * self.learned.gpu + gap)

    def matrix_us(self, block: Iterable[Op]) -> float:
        """What matmuls and attention of a block take, without gaps between kernels."""
        ops = [op for op in block if op.measured is not None and op.measured.like in ("matrix", "attention")]
        return sum(op.calls * self.traced_us(op) * self._strain[seen(op).like] * self.learned.gpu for op in ops)

    def traced_us(self, op: Op) -> float:
        """One call at the clock of the traced run, without gaps between kernels."""
        if op not in self._known:
            self._known[op] = self._traced_us(op)
        return self._known[op]

    def launches(self, op: Op) -> float:
        """A CPU is its own host: blocks hold what that takes as an operator."""
        return 0.0 if self._on_cpu else super().launches(op)

    def collective_us(self, collective: Collective) -> float:
        """Outside blocks."""
        kind = "p2p" if collective.kind == "p2p" else "ranks"
        return super().collective_us(collective) * self.learned.network.get(kind, 1.0)

    def is_measured(self, op: Op) -> bool:
        """Whether the trace has the same call; otherwise it has it in another size."""
        if isinstance(op.work, Collective):
            return self.learned.network.get(op.module, 1.0) != 1.0
        return op.measured is not None and op.measured.before is None and self._same_gpu

    # ------------------------------------------------------------------ one operator
    def _traced_us(self, op: Op) -> float:
        measured = seen(op)
        before, each = measured.before or op, measured.us
        if measured.before is None and (self._same_gpu or not op.inputs):
            return each
        try:
            old, new = self.was.kernel_us(before), self.kernel_us(op)
            strain = self._traced_strain[measured.like]
            typical = self._typical(before, self.was) * strain, self._typical(op, self) * strain
        except UNPRICED:  # it scales with the bytes it moves
            return each * bytes_of(op) / max(bytes_of(before), 1.0)
        gap = self.was.factors.launch_gap_us
        was, now = max(old - gap, _SHORTEST_US), max(new - gap, _SHORTEST_US)
        known = measured.before is None and self._same_base  # the same kernel under another limit or with other memory
        if known or self.learned.mode == "trace" or not was / _OTHER_KERNEL < each < was * _OTHER_KERNEL:
            return now * each / was
        return now * drawn(measured.like, each, was, now, typical, self._far)

    def _typical(self, op: Op, costs: ModelCosts) -> float:
        """Known of the GPU that was sampled and traced; of another one, the trace itself has to tell."""
        table = _TABLE["usual"]
        known = costs.kernel_source == "fitted" and not self.learned.shared
        return float(table.get(works_of(op)[0].family, table["other"])) if known else 1.0

    @cached_property
    def _far(self) -> float:
        """How much of a model's error is the same at all sizes: more on a GPU whose costs are those of another one."""
        known = self.was.kernel_source == "fitted" and not self.learned.shared
        return 0.0 if known else float(_TABLE["far_transferred"])

    # ------------------------------------------------------------------ the clock
    @cached_property
    def _strain(self) -> dict[str, float]:
        """The target's over the traced run's; costs of a GPU that was never traced hold its typical clock."""
        own = self._on_cpu or self._same_gpu or self.kernel_source == "fitted"
        now = {like: _strain(like, self.target, self.load) if own else 1.0 for like in _LIKES}
        return {like: now[like] / before for like, before in self._traced_strain.items()}

    @cached_property
    def _traced_strain(self) -> dict[str, float]:
        return {like: _strain(like, self.learned.traced, self.learned.load) for like in _LIKES}

    # ------------------------------------------------------------------ both setups
    @property
    def was(self) -> ModelCosts:
        return self.learned.model

    @cached_property
    def _known(self) -> dict[Op, float]:
        return {}

    @cached_property
    def _on_cpu(self) -> bool:
        return self.target.cluster.accelerator.is_cpu

    @cached_property
    def _same_gpu(self) -> bool:
        """The same chip under the same power limit."""
        return self.target.cluster.chip == self.learned.traced.cluster.chip

    @cached_property
    def _same_base(self) -> bool:
        """The same kind of GPU, whatever was changed of it."""
        return self.target.cluster.chip.base == self.learned.traced.cluster.chip.base

    @cached_property
    def memory_growth(self) -> float:
        """Time of a byte over that on the traced GPU."""
        before, after = self.learned.traced.cluster.chip, self.target.cluster.chip
        slower = self.factors.stream / self.was.factors.stream
        return 1.0 if self._same_gpu else before.hbm_gb_s / after.hbm_gb_s * slower

    def at_load(self, load: float) -> TraceCosts:
        """The same at the clock of another load; what does not depend on it is kept."""
        other = trace_costs(self.target, self.learned, load)
        other._known = self._known
        return other


def trace_costs(setup: Setup, learned: Learned, load: float) -> TraceCosts:
    """Costs of a setup at the clock of a load, learned from a traced run."""
    found = costs_of(setup, model=_model_of(setup), make_costs=TraceCosts)
    assert isinstance(found, TraceCosts)
    found.target, found.learned, found.load = setup, learned, load
    found.contends = not learned.beside
    found.leads = not setup.cluster.accelerator.is_cpu
    return found


def drawn(like: str, each: float, was: float, now: float, typical: tuple[float, float], far: float) -> float:
    """Measured over modelled time in the new setup: what the trace says of it, drawn towards what is typical.

    `typical` is the mean of measured over modelled time, by family of operators, over other traces, at the clock of
    this one: of the traced call and of the new one. How much of the rest is found again at another size falls with the
    distance between the sizes, to `far` at least, and is little for short kernels.
    """
    table = _TABLE["weight"][like]
    far = max(far, table["far"])
    near = exp(-abs(log(now / was)) / table["distance"])
    weight = (far + (1 - far) * near) / (1 + (table["short_us"] / max(each, 1e-3)) ** 2)
    return float(typical[1] * (max(each, 1e-3) / was / typical[0]) ** weight)


def bare(op: Op) -> Op:
    """The call only, wherever it runs and however long it took."""
    return Op(op.name, op.inputs, op.outputs, op.phase, allocates=op.allocates, options=op.options)


def bytes_of(op: Op) -> float:
    """What all its operands have, at least read or written."""
    return sum(t.bytes for t in (*op.inputs, *op.outputs))


def _strain(like: str, setup: Setup, load: float) -> float:
    """Time of kernels beside so much work for the matrix units over that of a GPU far from its power limit.

    Matrix units draw most of the power: the more of a step they work, the lower the clock. Known error: 3 % (standard
    deviation over 45 traces of an H200, data/change.json).
    """
    factors = _TABLE["clock_factor"].get(like)
    limited = in_step_factors(setup.cluster.accelerator).matrix > 1
    return float(np.interp(load, _TABLE["clock_load"], factors)) if factors and limited else 1.0
