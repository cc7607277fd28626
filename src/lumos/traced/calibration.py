"""Calibration: the blocks of a traced run in another setup, operator by operator, and prices that follow from them.

    time in the new setup = price of the operator there × (measured / price in the traced setup) ^ weight

An operator that does not change keeps its measured time. For one that does, the weight says how much of what the price
missed at the traced size is missed at the other size as well (`data/change.json`, measured on pairs of traces): 1 would
believe the trace alone, 0 the price alone. An operator without shapes follows the description of its block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from math import exp, log, prod

import numpy as np
from numpy.typing import NDArray

from lumos.analysis.kernel_labels import Work
from lumos.costs.aten_prices import AtenPrices
from lumos.costs.in_step import in_step_factors
from lumos.costs.kernel_work import works_of
from lumos.costs.operator_model import cpu_model
from lumos.costs.prices import BlockTime, Prices, time_of
from lumos.data_files import read_table
from lumos.described.described import Program
from lumos.described.embedding_head import embedding, embedding_backward, head, head_backward
from lumos.described.layer import TransformerLayer
from lumos.program.op import Op, Ops, Tensor
from lumos.program.operators import Collective, Operator
from lumos.setup.frameworks import framework_named
from lumos.setup.setup import Setup
from lumos.step.step import prices_of
from lumos.traced.cut import CutBlock, CutOp
from lumos.traced.sizes import Shape, Sizes

_TABLE = read_table("change.json")
_COMPUTE = (Work.MATRIX, Work.ATTENTION, Work.STREAM)
_UNPRICED = (ArithmeticError, LookupError, TypeError, ValueError)  # what prices make of shapes that make no sense
_LAYERS = ("forward", "backward")
MODES = ("drawn", "trace", "factors")
"""Operators by their trace, drawn towards their prices; by their trace alone; blocks by factors on the description."""
_SHORTEST_US = 0.5  # of a kernel
_OTHER_KERNEL = 10.0  # times its price, or its inverse: the price is of something else than what was launched
_LEAST_HOST = 0.2  # of the host's measured time that stays, whatever the description takes away
Times = NDArray[np.float64]


@dataclass(frozen=True)
class Factors:
    """Time in the new setup over the description's, for one group of blocks."""

    gpu: tuple[float, ...] = (1.0,) * len(Work)
    measured: tuple[bool, ...] = (False,) * len(Work)  # whether the trace and the model both have such work
    launch_us: float | None = None  # of the host; None: as modelled


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
class Calibration:
    """What a traced run shows, whatever it is then asked about."""

    traced: Setup
    blocks: dict[str, CutBlock] = field(default_factory=dict)
    weights: Weights = Weights()
    gpu: float = 1.0  # closes what is left of a GPU-bound step: all kernels this much slower
    host: float = 1.0  # and of a host-bound one
    networks: dict[str, float] = field(default_factory=dict)  # measured over modelled, of collectives inside blocks
    data_parallel: float = 1.0
    link: float = 1.0
    fixed_us: float = 0.0  # once a step: what is left between the calibrated model of the traced run and the run
    gpu_bound: bool = False  # the traced run is: what is left is the wait for its host where it begins and ends
    load: float = 0.0  # share of the recorded step that matmuls and attention ran
    shared: bool = False  # ranks share a GPU, so that kernels take longer than their prices say
    beside: bool = False  # kernels were recorded beside communication: what they lost to it is in their times
    mode: str = "drawn"  # one of MODES

    @property
    def name(self) -> str:
        """The same for calibrations that give the same answers."""
        return sha256(repr(self).encode()).hexdigest()

    def slower(self, factor: float) -> Calibration:
        """All that runs on the GPU, this much slower."""
        return replace(self.slower_network(factor), gpu=self.gpu * factor)

    def slower_host(self, factor: float) -> Calibration:
        """All that the host does, this much slower."""
        return replace(self, host=self.host * factor)

    def slower_network(self, factor: float) -> Calibration:
        """All communication, this much slower."""
        networks = {name: value * factor for name, value in self.networks.items()}
        return replace(self, networks=networks, data_parallel=self.data_parallel * factor, link=self.link * factor)

    def with_communication(self, factor: float) -> Calibration:
        """With every collective at this factor of the model's: 0 where a trace has none of its own."""
        networks = dict.fromkeys(self.networks, factor)
        return replace(self, networks=networks, data_parallel=factor, link=factor)

    def described(self, setup: Setup) -> Described:
        return Described(setup, plain_prices(setup))


def plain_prices(setup: Setup) -> Prices:
    """Prices before anything is learned from a trace."""
    return prices_of(setup, model=cpu_model() if setup.cluster.accelerator.is_cpu else None)


class Described:
    """The blocks of a setup as the description has them, by the names of the cut."""

    def __init__(self, setup: Setup, prices: Prices) -> None:
        self.setup, self.prices, self.program = setup, prices, Program(setup)
        self._known: dict[str, tuple[Times, float]] = {}

    @property
    def shards(self) -> int:
        """Ranks that divide what the optimizer updates."""
        return self.program.layout.shards

    def times(self, name: str) -> tuple[Times, float]:
        """(microseconds by work, launches) of a block."""
        if name not in self._known:
            self._known[name] = modelled_times(self._build(name), self.prices)
        return self._known[name]

    def _build(self, name: str) -> Ops:
        layout = self.program.layout
        sparse = bool(self.setup.model.experts) and not name.endswith("dense")
        if name.startswith("recompute"):
            return TransformerLayer(layout, sparse, "full").recomputed()
        if name.startswith(_LAYERS):
            layer = TransformerLayer(layout, sparse)
            return layer.backward() if name.startswith("backward") else layer.forward()
        if name == "optimizer":
            return self.program.optimizer(0).build()
        builders = {"embedding": embedding, "head": head, "embedding grad": embedding_backward,
                    "head grad": head_backward}  # fmt: skip
        return builders[name](layout)


class ChangedBlocks:
    """The blocks of a traced run in another setup."""

    def __init__(self, calibration: Calibration, target: Setup, load: float) -> None:
        self.calibration, self.target = calibration, target
        before = calibration.traced
        self.sizes = Sizes(before, target, calibration.weights.shapes)
        self.was, self.now = calibration.described(before), calibration.described(target)
        self.on_cpu = target.cluster.accelerator.is_cpu
        self.load = load

    @cached_property
    def traced_strain(self) -> Times:
        """By kind of work, at the clock of the traced run."""
        before = self.calibration.traced
        return np.array([_strain(work, before, self.calibration.load) for work in Work])

    @cached_property
    def strain(self) -> Times:
        """The target's over the traced run's; prices of a GPU that was never traced hold its usual clock."""
        own = self.on_cpu or self._same_gpu or self._new_prices.source == "fitted"
        return np.array([_strain(work, self.target, self.load) if own else 1.0 for work in Work]) / self.traced_strain

    @cached_property
    def _old_prices(self) -> AtenPrices:
        return AtenPrices(self.was.prices)

    @cached_property
    def _new_prices(self) -> AtenPrices:
        return AtenPrices(self.now.prices)

    @cached_property
    def factors(self) -> dict[str, Factors]:
        """By name of block."""
        return {name: self._factors(name, block) for name, block in self.calibration.blocks.items()}

    @cached_property
    def _at_traced_clock(self) -> dict[str, Times]:
        """GPU time of every block by kind of work, at the clock of the traced run."""
        found = {}
        for name, block in self.calibration.blocks.items():
            found[name] = us = np.zeros(len(Work))
            for op in block.ops:
                if op.work != Work.COMM and not op.beside:
                    us[op.work] += self.us(name, op)
        return found

    @cached_property
    def _times(self) -> dict[str, Times]:
        """The same at the clock of the target's load."""
        factor = self.strain * self.calibration.gpu
        return {name: us * factor for name, us in self._at_traced_clock.items()}

    def at_load(self, load: float) -> ChangedBlocks:
        """The same blocks at the clock of another load; what does not depend on it is kept."""
        self._at_traced_clock  # noqa: B018  worked out once for all loads
        other = copy(self)
        for name in ("strain", "_times", "_with_gaps", "factors"):
            other.__dict__.pop(name, None)
        other.load = load
        return other

    def operators(self) -> Iterator[tuple[Op, float, float, bool]]:
        """(operator, calls, microseconds, whether it does not change) of every block, in one step of one rank."""
        train, model = self.target.train, self.target.model
        layers = train.microbatches * model.layers / self.target.parallel.pp
        dense = model.dense_layers / model.layers if "forward dense" in self.calibration.blocks else 0.0
        for name, block in self.calibration.blocks.items():
            if name.startswith("recompute") and train.recompute != "full":
                continue
            times = 1.0 if name == "optimizer" else float(train.microbatches)
            if name.startswith((*_LAYERS, "recompute")):
                times = layers * (dense if name.endswith("dense") else 1 - dense)
            for op in block.ops:
                us = float(self.us(name, op) * self.strain[op.work] * self.calibration.gpu)
                if us > 0 and op.work != Work.COMM and not op.beside:
                    new = self.sizes.rewritten(op.op) if name != "optimizer" and not op.sharding else op.op
                    yield new, times * op.calls, times * us, new == op.op and self._same_gpu

    def matrix_us(self) -> float:
        """What matmuls and attention of a step take on one GPU, as a mean over pipeline stages."""
        train, model = self.target.train, self.target.model

        def each(name: str) -> float:
            return float(self._times[name][[Work.MATRIX, Work.ATTENTION]].sum()) if name in self._times else 0.0

        def layer(kind: str) -> float:
            again = each(f"recompute{kind}") if train.recompute == "full" else 0.0
            return each(f"forward{kind}") + each(f"backward{kind}") + again

        ends = sum(map(each, ("embedding", "head", "embedding grad", "head grad")))
        dense = min(model.dense_layers, model.layers) if "forward dense" in self._times else 0
        layers = (model.layers - dense) * layer("") + dense * layer(" dense")
        return train.microbatches * (layers + ends) / self.target.parallel.pp

    @cached_property
    def _with_gaps(self) -> dict[str, Times]:
        """The same with gaps between kernels, and with what the traced run did not do."""
        found = {}
        for name, block in self.calibration.blocks.items():
            found[name] = us = self._times[name].copy()
            us[Work.STREAM] += sum(self._new_prices.of(op).us for op in self._added(name)) + self._gaps_us(block)
        return found

    def time(self, name: str) -> tuple[float, float]:
        """(GPU, host) of a block, in microseconds; nothing where the trace has no such block."""
        if name not in self.calibration.blocks:
            return 0.0, 0.0
        return float(self._with_gaps[name].sum()), self._host_us(name, self.calibration.blocks[name])

    def _factors(self, name: str, block: CutBlock) -> Factors:
        modelled, launches = self.now.times(name)
        us = self._with_gaps[name]
        host = self._host_us(name, block)
        return _spread(us, modelled, self.calibration.networks.get(name, 1.0), host / launches if launches else None,
                       self.on_cpu)  # fmt: skip

    # ------------------------------------------------------------------ one operator
    def us(self, name: str, op: CutOp) -> float:
        """GPU time of equal calls in the new setup."""
        if op.sharding and not self._gathers(self.target):
            return 0.0
        if name == "optimizer":
            fixed = min(op.us, op.kernels * _TABLE["update"]["kernel_us"])
            return float(fixed + (op.us - fixed) * self._optimizer_growth)
        if self.on_cpu or not op.op.inputs or self.calibration.mode == "factors":
            return op.us * self._described_growth(name, op.work)
        calls = op.calls * (self._peers if op.per_peer else 1.0)
        if op.sharding:
            return self._op_us(op, self._sharding_op(name, op), calls)
        queries, keys = self.sizes.rewritten(op.op), self.sizes.keys.rewritten(op.op)
        if queries == keys:
            return self._op_us(op, queries, calls)
        return (self._op_us(op, queries, calls) + self._op_us(op, keys, calls)) / 2  # as many work on keys and values

    def _op_us(self, op: CutOp, new: Op, calls: float) -> float:
        if new == op.op and self._same_gpu:
            return op.us / op.calls * calls
        try:
            before, after = self._old_prices.of(op.op).us, self._new_prices.of(new).us
            strain = float(self.traced_strain[op.work])
            usual = self._usual(op.op, self._old_prices) * strain, self._usual(new, self._new_prices) * strain
        except _UNPRICED:  # it scales with the bytes it moves
            return op.us / op.calls * calls * _bytes(new) / max(_bytes(op.op), 1.0)
        gap = self.was.prices.factors.launch_gap_us
        was, now = max(before - gap, _SHORTEST_US), max(after - gap, _SHORTEST_US)
        each = op.us / op.calls
        known = new == op.op and self._same_base  # the same kernel under another limit, or with other memory
        if known or self.calibration.mode == "trace" or not was / _OTHER_KERNEL < each < was * _OTHER_KERNEL:
            return float(calls * now * each / was)
        return float(calls * now * drawn(op, was, now, usual, self._far))

    def _usual(self, op: Op, prices: AtenPrices) -> float:
        """Known of the GPU that was sampled and traced; of another one, the trace itself has to tell."""
        usual = _TABLE["usual"]
        known = prices.source == "fitted" and not self.calibration.shared
        return float(usual.get(works_of(op)[0].family, usual["other"])) if known else 1.0

    @cached_property
    def _far(self) -> float:
        """How much of a price's error is the same at all sizes: more on a GPU whose prices are those of another one."""
        known = self._old_prices.source == "fitted" and not self.calibration.shared
        return 0.0 if known else float(_TABLE["far_transferred"])

    @cached_property
    def _same_gpu(self) -> bool:
        """The same chip under the same power limit."""
        return self.target.cluster.chip == self.calibration.traced.cluster.chip

    @property
    def _same_base(self) -> bool:
        """The same kind of GPU, whatever was changed of it."""
        return self.target.cluster.chip.base == self.calibration.traced.cluster.chip.base

    @cached_property
    def _memory_growth(self) -> float:
        """Time of a byte over that on the traced GPU."""
        before, after = self.calibration.traced.cluster.chip, self.target.cluster.chip
        slower = self.now.prices.factors.stream / self.was.prices.factors.stream
        return 1.0 if self._same_gpu else before.hbm_gb_s / after.hbm_gb_s * slower

    def _described_growth(self, name: str, work: Work) -> float:
        """What the description makes of the change, for one kind of work in a block."""
        before, after = self.was.times(name)[0], self.now.times(name)[0]
        if before[work] > 0:
            return float(after[work] / before[work])
        total = before[list(_COMPUTE)].sum()
        return float(after[list(_COMPUTE)].sum() / total) if total > 0 else 1.0

    # ------------------------------------------------------------------ parameters
    @cached_property
    def _optimizer_growth(self) -> float:
        """Of what this rank updates: its parameters, or its share of them."""
        weights, before = self.calibration.weights, self.calibration.traced
        stages = self.target.model.layers / self.target.parallel.pp, before.model.layers / before.parallel.pp
        layers = weights.layers * stages[0] / stages[1]
        if not weights.counts or self.on_cpu:
            return self._described_growth("optimizer", Work.STREAM)
        old = sum(weights.elements(Sizes(before, before), weights.layers))
        new = sum(weights.elements(self.sizes, layers))
        if not old or before.train.optimizer != self.target.train.optimizer:
            return self._described_growth("optimizer", Work.STREAM)
        kinds = _TABLE["update"]
        kind = kinds[self._update_kind(self.target)] / kinds[self._update_kind(before)]
        return float(new / old * kind * self._memory_growth * self.was.shards / self.now.shards)

    def _update_kind(self, setup: Setup) -> str:
        """One fused kernel after another over whole tensors or over FSDP's shards; DTensors one by one."""
        if self._is_dtensor(setup):
            return "dtensor"
        return "sharded" if self._gathers(setup) else "whole"

    def _gathers(self, setup: Setup) -> bool:
        return setup.parallel.zero >= 3 and setup.parallel.dp * setup.parallel.cp > 1

    @cached_property
    def _peers(self) -> float:
        """Other ranks that share the weights, over those of the traced run."""
        before, after = (max(1, described.shards - 1) for described in (self.was, self.now))
        return after / before

    def _sharding_op(self, name: str, op: CutOp) -> Op:
        """A copy of flat weights, all of a unit or the share of one rank."""
        inside, outside = self._unit_growth
        growth = inside if name.startswith(_LAYERS) else outside
        if op.per_peer or ("copy" in op.op.name and "split" not in op.op.name):
            growth *= self.was.shards / self.now.shards

        def grown(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
            return tuple(t._replace(shape=(*t.shape[:-1], max(1, round(t.shape[-1] * growth)))) if t.shape else t
                         for t in tensors)  # fmt: skip

        return op.op._replace(inputs=grown(op.op.inputs), outputs=grown(op.op.outputs)) if growth != 1.0 else op.op

    @cached_property
    def _unit_growth(self) -> tuple[float, float]:
        """Weights of a layer, and of embedding and head, over those of the traced run."""
        weights, same = self.calibration.weights, Sizes(self.calibration.traced, self.calibration.traced)
        old, new = (weights.elements(sizes, weights.layers) for sizes in (same, self.sizes))
        return tuple(b / a if a else 1.0 for a, b in zip(old, new, strict=True))  # type: ignore[return-value]

    # ------------------------------------------------------------------ what the traced run did not do
    def _added(self, name: str) -> Iterator[Op]:
        """Copies of FSDP where the traced run had none, and gradients that are added to those of earlier batches."""
        if self.on_cpu or not self.calibration.weights.counts:
            return
        backward = name.startswith("backward") or name == "embedding grad"
        if not (name.startswith(_LAYERS) or name in ("embedding", "embedding grad")):
            return
        inside, outside = self.calibration.weights.elements(self.sizes, max(1, self.calibration.weights.layers))
        size = inside / max(1, self.calibration.weights.layers) if name.startswith(_LAYERS) else outside
        if size < 1:
            return
        flat = Tensor((int(size),), "bf16", (1,), 2)
        if self._gathers(self.target) and not self._gathers(self.calibration.traced):
            yield Op("fsdp.split_with_sizes_copy", (flat, flat), (), "forward", allocates=True)
            if backward:
                yield Op("fsdp.chunk_cat", (flat, flat), (), "backward", allocates=True)

    def _gaps_us(self, block: CutBlock) -> float:
        """Between kernels that the GPU runs one after the other."""
        if self.on_cpu:
            return 0.0
        gathers = self._gathers(self.target)
        kernels = sum(op.kernels for op in block.ops if not op.beside and (gathers or not op.sharding))
        return float(kernels * self.now.prices.factors.launch_gap_us)

    def _host_us(self, name: str, block: CutBlock) -> float:
        """The host's time: as measured, with what the description and DTensors add or take away.

        The optimizer's grows with the tensors it updates, that of recomputation with what it does besides.
        """
        # A layer that the traced run does not recompute takes this host as long as its forward pass, with bookkeeping
        # at the cost of its own launches; what DTensors add to those is counted among them.
        recomputes = self.calibration.traced.train.recompute == "full"
        same_as = name if recomputes else name.replace("recompute", "forward")
        before, after = self.was.times(same_as)[1], self.now.times(name)[1]
        measured = block.host_us
        if not before:
            return self.calibration.host * measured
        before, after = (
            launches + self._dtensor_launches(name, described)
            for launches, described in ((before, self.was), (after, self.now))
        )
        same = self._is_dtensor(self.target) == self._is_dtensor(self.calibration.traced)
        in_proportion = same and (name == "optimizer" or same_as != name)
        own = measured * after / before if in_proportion else measured + (after - before) * self.now.prices.host_us
        return self.calibration.host * max(own, _LEAST_HOST * measured)

    def _dtensor_launches(self, name: str, described: Described) -> float:
        """Launches' worth of Python around the operators of DTensors, in a block.

        A description does not have them: compiled code and other frameworks run without.
        """
        setup, layout = described.setup, described.program.layout
        if not self._is_dtensor(setup):
            return 0.0
        if name == "optimizer":
            return layout.framework.dtensor_updates * described.program.tensors(0)
        if not name.startswith((*_LAYERS, "recompute")):
            return 0.0
        return layout.dtensor_launches[name.startswith("backward")]

    @staticmethod
    def _is_dtensor(setup: Setup) -> bool:
        framework = framework_named(setup.train.framework, setup.train.precision)
        return setup.parallel.tp > 1 and framework.dtensor_updates > 0


def drawn(op: CutOp, was: float, now: float, usual: tuple[float, float], far: float) -> float:
    """Measured over priced time in the new setup: what the trace says of it, drawn towards what is usual.

    `usual` is the mean of measured over priced time, by family of operators, over other traces, at the clock of this
    one: of the traced call and of the new one. How much of the rest is found again at another size falls with the
    distance between the sizes, to `far` at least, and is little for short kernels.
    """
    table = _TABLE["weight"][op.work.name.lower()]
    far = max(far, table["far"])
    each = max(op.us, 1e-3) / op.calls
    near = exp(-abs(log(now / was)) / table["distance"])
    weight = (far + (1 - far) * near) / (1 + (table["short_us"] / each) ** 2)
    return float(usual[1] * (each / was / usual[0]) ** weight)


def _bytes(op: Op) -> float:
    return sum(t.bytes for t in (*op.inputs, *op.outputs))


def _strain(work: Work, setup: Setup, load: float) -> float:
    """Time of kernels beside so much work for the matrix units over that of a GPU far from its power limit.

    Matrix units draw most of the power: the more of a step they work, the lower the clock. Known error: 3 % (standard
    deviation over 45 traces of an H200, data/change.json).
    """
    factors = _TABLE["clock_factor"].get(work.name.lower())
    limited = in_step_factors(setup.cluster.accelerator).matrix > 1
    return float(np.interp(load, _TABLE["clock_load"], factors)) if factors and limited else 1.0


def _spread(us: Times, modelled: Times, network: float, launch_us: float | None, placeholders: bool) -> Factors:
    """The operators of the description, scaled so that each kind of work takes what it should.

    Work that the description does not have is spread over what it has. `placeholders` says that modelled times mean
    nothing, as on a CPU: what was not measured is nothing.
    """
    compute = list(_COMPUTE)
    both = modelled > 1e-3
    missing = float(us[compute][~both[compute]].sum())
    there = float(modelled[compute][both[compute] & (us[compute] > 1e-3)].sum())
    ratio = np.where(both, us / np.where(both, modelled, 1.0), 1.0)
    if missing and there:
        ratio[compute] += np.where(us[compute] > 1e-3, missing / there, 0.0)
    if not placeholders and not us[compute].sum():
        ratio[compute] = 1.0
    ratio[Work.COMM] = network
    seen = both & (us > 1e-3)
    return Factors(tuple(float(r) for r in ratio), tuple(seen.tolist()), launch_us)


def work_of(work: Operator | Collective) -> Work:
    """The kind of work of an operator."""
    if isinstance(work, Collective):
        return Work.COMM
    if work.kind.startswith("sdpa"):
        return Work.ATTENTION
    return Work.MATRIX if work.is_matrix else Work.STREAM


def modelled_times(block: Ops, prices: Prices) -> tuple[Times, float]:
    """(microseconds by work, launches) of a block as the model has it."""
    us = np.zeros(len(Work))
    for op in block:
        if op.work is not None:
            us[work_of(op.work)] += prices.us(op)
    launches = time_of(block, prices).host_us / prices.host_us if prices.host_us else 0.0
    return us, launches


class CalibratedPrices(Prices):
    """Prices of a setup whose blocks take what those of a traced run would take in it."""

    changed: ChangedBlocks | None = None
    _inside: Factors | None = None  # the factors of the block that is being priced; None between blocks

    def operator_us(self, operator: Operator) -> float:
        modelled = super().operator_us(operator)
        return modelled if self._inside is None else modelled * self._inside.gpu[work_of(operator)]

    def collective_us(self, collective: Collective) -> float:
        modelled = super().collective_us(collective)
        if self._inside is not None:
            return modelled * self._inside.gpu[Work.COMM]
        if self.changed is None:
            return modelled
        known = self.changed.calibration
        return modelled * (known.link if collective.kind == "p2p" else known.data_parallel)

    def _factors_of(self, key: Hashable) -> Factors:
        if self.changed is None:
            return Factors()
        return self.changed.factors.get(self._name_of(key), Factors())

    def _name_of(self, key: Hashable) -> str:
        """The name of the cut's block that a block of the program corresponds to."""
        name, *rest = key if isinstance(key, tuple) and key else (str(key),)
        if name in ("forward", "recompute", "backward"):
            dense = rest and rest[0] is False and f"{name} dense" in (self.changed.factors if self.changed else {})
            return f"{name} dense" if dense else name
        return str(name)

    def is_measured(self, key: Hashable, work: Operator | Collective) -> bool:
        """Whether the time of an operator in the block of this key rests on the trace."""
        return self._factors_of(key).measured[work_of(work)]

    @contextmanager
    def inside(self, key: Hashable) -> Iterator[None]:
        before, self._inside = self._inside, self._factors_of(key)
        try:
            yield
        finally:
            self._inside = before

    def block(self, key: Hashable, build: Callable[[], Ops]) -> BlockTime:
        group = self._factors_of(key)
        with self.inside(key):
            found = super().block(key, build)
        if group.launch_us is None or not self.host_us:
            return found
        return found._replace(host_us=found.host_us / self.host_us * group.launch_us)


class BlockingPrices(CalibratedPrices):
    """The same on a CPU: its host is what computes, so that a block takes the time of both."""

    def block(self, key: Hashable, build: Callable[[], Ops]) -> BlockTime:
        found = super().block(key, build)
        return found._replace(us=found.us + found.host_us, compute_us=found.compute_us + found.host_us, host_us=0.0)
