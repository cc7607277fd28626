"""Another configuration of a traced run: its step, made of the operators of the trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lumos.analysis.kernel_labels import KernelClass, KernelPhase, RankLabels, label
from lumos.analysis.replay import Replay
from lumos.data_files import read_table
from lumos.described.described import Program
from lumos.described.layer import TransformerLayer
from lumos.errors import OptionError
from lumos.memory.memory import Memory
from lumos.program.op import Ops
from lumos.program.operators import Collective
from lumos.read.op_columns import OpType, RankOps, Shape, rank_ops
from lumos.schedules import Phase
from lumos.setup.gpus import find_gpu
from lumos.setup.setup import Setup
from lumos.step.step import Step, assembled
from lumos.trace.names import collective_name
from lumos.traced.cut import CutBlock, CutRank, cut, mean_block, seen, total_us
from lumos.traced.measured_ops import Launch, measured_ops
from lumos.traced.retarget import own_blocks, traced_program, us_by_kind
from lumos.traced.tensor_lifetimes import Tape, tape_of
from lumos.traced.trace_costs import MODES, Learned, TraceCosts, Weights, plain_costs, trace_costs
from lumos.traced.traced_memory import traced_memory

_SHARED_CORES = (
    "assumed: every rank has the cores and the network that it has in the trace; ranks that share cores are slower"
)
_TABLE = read_table("change.json")
_SHARED = 1.5  # times their price, from which on matmuls of several ranks are those of ranks that share a GPU
_NEAR = 0.4  # times what its launches cost on a typical host, or its inverse: the host does little besides
_CLOSED = 1e-3  # of the step that may be left for a time once a step, whatever it is
Times = NDArray[np.float64]


def learned_step(setup: Setup, learned: Learned) -> Step:
    """A step of any setup with what a trace shows, at the clock of the traced run."""
    costs = trace_costs(setup, learned, learned.load)
    return assembled(setup, costs, traced_program(setup, costs)).step()


def loaded_step(setup: Setup, learned: Learned) -> Step:
    """The same, at the clock of the GPU's own load; one correction is enough, as the clock moves the load little."""
    step = learned_step(setup, learned)
    load = min(load_of(step, learned), 1.0)
    if setup.cluster.accelerator.is_cpu or load == learned.load:  # the clock of a CPU is not known to fall
        return step
    costs = step.costs
    assert isinstance(costs, TraceCosts)
    return assembled(setup, costs.at_load(load), step.assembly.program).step()


def load_of(step: Step, learned: Learned) -> float:
    """The share of a step that matmuls and attention run on one GPU, as a mean over pipeline stages."""
    costs = step.costs
    assert isinstance(costs, TraceCosts)
    window = step.us + learned.beyond_us if step.setup.parallel.pp == 1 else _busy_us(step)
    return _matrix_us(step.assembly.program, costs) / max(window, 1e-9)


def _matrix_us(program: Program, costs: TraceCosts) -> float:
    """What matmuls and attention of a step take on one GPU, as a mean over pipeline stages."""
    passes = [(chunk, phase) for row in program.chunks for chunk in row for phase in Phase]
    blocks = [block for chunk, phase in passes for block in program.blocks(chunk, phase)]
    busy = {block.key: costs.matrix_us(block.build()) for block in {block.key: block for block in blocks}.values()}
    return program.rounds * sum(block.times * busy[block.key] for block in blocks) / len(program.chunks)


def _busy_us(step: Step) -> float:
    """How long a stage of a pipeline works, as a mean over stages: in its bubbles the clock does not matter."""
    blocks = [sum(max(block.us, block.host_us) for chunk in row for block in chunk.blocks) for row in step.chunks]
    updates = [step.role_us("optimizer", stage) for stage in range(len(blocks))]
    return step.plan.microbatches * float(np.mean(blocks)) + float(np.mean(updates))


def beyond_us(step: Step, learned: Learned) -> float:
    """What a step takes beyond its simulated time: what the traced run took once a step.

    A GPU-bound run waits for its host where it begins and ends. A host-bound one does that work anyway.
    """
    if not learned.gpu_bound or learned.beyond_us <= 0:
        return learned.beyond_us
    return max(0.0, learned.beyond_us - step.us * step.host_cost)


def _inside_blocks_us(step: Step, stage: int) -> float:
    """All communication inside the blocks of a stage, in one step."""
    blocks = (block for chunk in step.chunks[stage] for block in chunk.blocks)
    return step.plan.microbatches * sum(block.communication_us for block in blocks)


@dataclass(frozen=True)
class CalibratedRun:
    """A traced run with its setup: the blocks that were cut out of it, and how they are priced elsewhere.

    `mode` is one of MODES; all but the first are for comparison.
    """

    run: Replay
    setup: Setup
    mode: str = MODES[0]

    @cached_property
    def plain(self) -> Step:
        """The model of the traced run, before anything is learned from it."""
        return assembled(self.setup, plain_costs(self.setup)).step()

    @cached_property
    def labels(self) -> list[RankLabels]:
        return label(self.run)

    @cached_property
    def ops(self) -> dict[int, RankOps]:
        """The operators of every rank that is looked at; none where a file has none."""
        step = self.run.marks.names[int(np.argmin(np.abs(self.run.clean_steps.milliseconds - self.run.clean_ms)))]
        ranks = [labels.rank for labels in self.labels]
        if self.on_cpu:
            return {rank: RankOps(rank, (), True) for rank in ranks}
        return {rank: rank_ops(self.run.execution.trace, rank, step) for rank in ranks}

    @cached_property
    def measured(self) -> list[list[Launch]]:
        """The operators of every rank that launched kernels."""
        return [measured_ops(self.run.execution.trace, labels, self.ops[labels.rank]) for labels in self.labels]

    @cached_property
    def ranks(self) -> list[CutRank]:
        """The blocks of every rank."""
        found = []
        for labels, ops in zip(self.labels, self.measured, strict=True):
            chunks = [chunk.layers for chunk in self.plain.chunks[self._stage_of(labels.rank)]]
            if len(set(chunks)) > 1:
                raise OptionError(f"chunks of {chunks} layers on one stage: a trace of unlike chunks cannot be cut yet")
            found.append(cut(labels, ops, self.setup, chunks[0]))
        return found

    def _stage_of(self, rank: int) -> int:
        places = self.plain.assembly.layout.places
        return places.of(min(rank, places.world - 1))[1]

    @cached_property
    def blocks(self) -> dict[str, CutBlock]:
        """Means over the ranks that have them: only the first stage has an embedding, only the last a head."""
        last = self.setup.parallel.pp - 1
        found: dict[str, list[CutBlock]] = {}
        for rank in self.ranks:
            stage = self._stage_of(rank.rank)
            for name, block in rank.blocks.items():
                place = 0 if name.startswith("embedding") else last if name.startswith("head") else stage
                if place == stage:
                    found.setdefault(name, []).append(block)
        return self._without_recomputation({name: mean_block(blocks) for name, blocks in found.items()})

    def _without_recomputation(self, blocks: dict[str, CutBlock]) -> dict[str, CutBlock]:
        """The host's time for a recomputed layer, shared out by the launches of the description:
        checkpointing makes the forward pass slower and the two passes cannot be told apart.
        """
        if self.setup.train.recompute != "full":
            return blocks
        layer = TransformerLayer(self.plain.assembly.layout, bool(self.setup.model.experts))
        parts = {"forward": layer.forward(), "recompute": layer.recomputed(), "backward": layer.backward()}
        launches = {name: sum(map(self.plain.costs.launches, block)) for name, block in parts.items()}
        each = (blocks["forward"].host_us + blocks["backward"].host_us) / max(sum(launches.values()), 1.0)
        shared = {name: replace(blocks[name], host_us=each * launches[name]) for name in ("forward", "backward")}
        return blocks | shared | {"recompute": replace(blocks["recompute"], host_us=each * launches["recompute"])}

    @cached_property
    def weights(self) -> Weights:
        """The parameters that got a gradient in one micro-batch, on the first rank that shows them."""
        for labels, measured in zip(self.labels, self.measured, strict=True):
            ops = self.ops[labels.rank]
            shapes = Counter(op.shapes[0] for op in ops.of(OpType.GRADIENT) if op.shapes and op.shapes[0])
            count, stage = self.setup.train.microbatches, self._stage_of(labels.rank)
            layers = sum(chunk.layers for chunk in self.plain.chunks[stage])
            if shapes:
                local = _local(shapes, measured, self.setup.parallel.tp)
                return Weights(layers, tuple((shape, max(1, n // count)) for shape, n in local.items()))
        return Weights()

    @property
    def has_shapes(self) -> bool:
        """Whether most of the kernels' time is that of operators with shapes."""
        ops = [launch.op for rank in self.measured for launch in rank if launch.measured.like != "comm"]
        return sum(total_us(op) for op in ops if op.inputs) > sum(map(total_us, ops)) / 2

    @cached_property
    def learned(self) -> Learned:
        """The blocks first, then what runs outside them, then the whole."""
        self._refuse_misfits()
        network = {name: self._network(name, block) for name, block in self.blocks.items()}
        network |= {"ranks": self._data_parallel(), "p2p": self._link()}
        found = Learned(
            self.setup, self.blocks, self.weights, network=network, load=self.recorded_load, silent=self.silent,
            shared=self.slowdown > _SHARED, mode=self.mode, beside=self.setup.cluster.gpus > 1 and not self.silent,
        )  # fmt: skip
        if self.silent:
            found = found.with_network(0.0)
        step = learned_step(self.setup, found)
        explained = step.us / 1e3
        unexplained = _TABLE["most_unexplained"]
        if not 1 - unexplained < explained / self.run.clean_ms < 1 / (1 - unexplained):
            raise OptionError(
                f"the setup does not describe this trace: it explains {explained:.1f} ms of a step of "
                f"{self.run.clean_ms:.1f} ms; correct the setup to what was traced"
            )
        closed = self._closed(found, step)
        return closed.with_network(1.0) if self.silent else closed

    def memory(self, target: Setup) -> Memory | None:
        """Peak memory of another configuration from the trace's own tensors; None where it does not show them."""
        return traced_memory(self.ops[self.labels[0].rank], self.setup, target, self._tape)

    @cached_property
    def _tape(self) -> Tape | None:
        return tape_of(self.ops[self.labels[0].rank])

    @property
    def on_cpu(self) -> bool:
        return self.setup.cluster.accelerator.is_cpu

    @cached_property
    def silent(self) -> bool:
        """The run has collectives and the trace has no kernels of them: a fake process group stood for the peers."""
        outside = ("gather", "reduce", "reduce rest", "publish")
        expected = any(
            _inside_blocks_us(self.plain, stage) + sum(self.plain.role_us(what, stage) for what in outside) > 0
            for stage in range(self.setup.parallel.pp)
        )
        return expected and not any((labels.work == KernelClass.COMM).any() for labels in self.labels)

    @cached_property
    def slowdown(self) -> float:
        """Measured over priced time of the matmuls of several ranks; 1 for a single rank, and where no shapes tell."""
        if len(self.labels) < 2 or self.on_cpu or not self.has_shapes:
            return 1.0
        prices, measured, priced = self.plain.costs, 0.0, 0.0
        for op in (op for block in self.blocks.values() for op in block.ops if op.name == "aten.mm.default"):
            measured, priced = measured + total_us(op), priced + op.calls * prices.kernel_us(op)
        return measured / priced if priced else 1.0

    @property
    def notes(self) -> tuple[str, ...]:
        if self.on_cpu:
            return (_SHARED_CORES,)
        if self.slowdown > _SHARED:
            return (
                f"matmuls take {self.slowdown:.1f} times what they take alone: ranks that share a GPU (MPS) were "
                "traced, and the answer is for ranks that share one in the same way",
            )
        if not self.silent:
            return ()
        return (
            "the trace has no communication kernels (a fake process group): collectives are modelled, and the recorded "
            "step is without them",
        )

    def _closed(self, learned: Learned, step: Step) -> Learned:
        """Close the rest by a time once a step: it begins and ends with waiting, which does not grow with it.

        What is more than that is taken for the speed of the host, or, where ranks wait for each other, of what decides.
        All of it at the clock of the recording, which no model has to find.
        """
        clean = self.run.clean_ms * 1e3
        decides: Callable[[Learned, float], Learned] = Learned.slower_host
        if self.on_cpu:
            decides = _slower_core
        else:
            if step.host_share <= _TABLE["host_bound_share"]:
                decides = Learned.slower
                learned = replace(learned, blocks=self._tempered(learned.blocks), gpu_bound=True)
                step = learned_step(self.setup, learned)
            talks = any((labels.work == KernelClass.COMM).any() for labels in self.labels)  # and waits in every layer
            little = abs(clean - step.us) < _TABLE["most_fixed_share"] * clean
            if not talks and (decides == Learned.slower or little):
                return self._fixed(learned, step)
        for change in (decides, Learned.slower_network):
            if abs(clean - step.us) > _CLOSED * clean:
                learned, step = self._scaled(learned, step, change)
        return self._fixed(learned, step)

    def _fixed(self, learned: Learned, step: Step) -> Learned:
        """With what is left as a time once a step; see `beyond_us`."""
        rest = self.run.clean_ms * 1e3 - step.us
        if learned.gpu_bound and rest > 0:
            rest += step.us * step.host_cost
        learned = replace(learned, beyond_us=rest)
        return replace(learned, load=min(load_of(step, learned), 1.0))

    def _scaled(
        self, learned: Learned, step: Step, change: Callable[[Learned, float], Learned]
    ) -> tuple[Learned, Step]:
        """With something made slower or faster until the step takes as long as recorded; unchanged where that fails.

        It may take much of it before anything happens, where something else is awaited: that much is tried first. If it
        is too much, the rest is found along the line between too little and too much, in rounds.
        """
        clean = self.run.clean_ms * 1e3
        low, high, most = (_TABLE[key] for key in ("least_correction", "most_correction", "correction_power"))
        little, much = 1.0, min(max(clean / step.us, low), high) ** most
        found, steps = {little: learned, much: change(learned, much)}, {little: step}
        steps[much] = learned_step(self.setup, found[much])
        for _ in range(_TABLE["rounds"]):
            before, after = steps[little].us - clean, steps[much].us - clean
            if before * after >= 0:
                break
            factor = little - before * (much - little) / (after - before)
            found[factor] = change(learned, factor)
            steps[factor] = learned_step(self.setup, found[factor])
            little, much = (factor, much) if (steps[factor].us - clean) * before > 0 else (little, factor)
        best = min(steps, key=lambda factor: abs(clean - steps[factor].us))
        enough = abs(clean - steps[best].us) < abs(clean - step.us) / 2
        return (found[best], steps[best]) if enough else (learned, step)

    @property
    def recorded_load(self) -> float:
        """The share of the recorded step that matmuls and attention ran, as a mean over ranks.

        In a pipeline it is their share of the kernels: a bubble is long enough for the clock to be itself again.
        """
        kinds = ("matrix", "attention")
        ranks = [[launch.op for launch in launches if not launch.op.stream] for launches in self.measured]
        busy = [sum(total_us(op) for op in ops if seen(op).like in kinds) for ops in ranks]
        if self.setup.parallel.pp == 1:
            return float(np.mean(busy)) / 1e3 / self.run.recorded_steps.mean
        every = [sum(map(total_us, ops)) for ops in ranks]
        return float(np.mean([part / max(whole, 1e-9) for part, whole in zip(busy, every, strict=True)]))

    def _tempered(self, blocks: Mapping[str, CutBlock]) -> dict[str, CutBlock]:
        """The host most of the way to a typical one, in ratio.

        A GPU-bound step does not show whether its host was quick for a moment: the same host took 20 to 39 us for a
        launch within a day. A host-bound step does show it, and keeps its host.
        """
        seen, each = _TABLE["host_weight"], self.plain.costs.host_us

        def tempered(name: str, block: CutBlock) -> CutBlock:
            typical = each * sum(op.calls for op in block.ops)
            layer = name.startswith(("forward", "recompute", "backward"))
            if not layer or not _NEAR < block.host_us / max(typical, 1e-9) < 1 / _NEAR:
                return block  # another kind of host's work than launches
            return replace(block, host_us=block.host_us**seen * typical ** (1 - seen))

        return {name: tempered(name, block) for name, block in blocks.items()}

    def _refuse_misfits(self) -> None:
        """A setup whose matmuls take far more or less time than those of the trace is not the traced one's.

        How long they should take on a CPU is not known; its layers are checked all the same. A trace with shapes has
        been compared with the setup size by size.
        """
        if self.on_cpu:
            return
        traced = next((h.gpu for h in self.run.execution.trace.headers if h.gpu), "")
        known, stated = find_gpu(traced), self.setup.cluster.accelerator.name
        if known is not None and known.name != stated:
            raise OptionError(f"the trace is of {traced}, and cluster.gpu = {stated}: give the setup of the traced run")
        for name in ("forward", "backward"):
            modelled = self._modelled(name).get("matrix", 0.0)
            factor = self.blocks[name].us("matrix") / modelled if modelled > 0 and not self.has_shapes else 1.0
            most = _TABLE["most_matrix_factor" if len(self.labels) == 1 else "most_matrix_factor_shared"]
            if not _TABLE["least_matrix_factor"] < factor < most:
                raise OptionError(
                    f"the setup does not describe this trace: matmuls of a layer's {name} pass take {factor:.2f} "
                    "times what their sizes suggest; correct hidden, ffn, seq, micro_batch or tp to what was traced"
                )

    def _network(self, name: str, block: CutBlock) -> float:
        """Measured over modelled, of the collectives inside a block; 1 where only one of the two has any.

        Beside embedding and head, those of the whole step end up.
        """
        inside = name.startswith(("forward", "backward"))
        modelled = self._modelled(name).get("comm", 0.0)
        measured = sum(total_us(op) for op in block.ops if seen(op).like == "comm")
        most = _TABLE["most_network_factor" if inside else "most_network_factor_outside_layers"]
        ratio = measured / modelled if modelled > 1e-3 and measured > 1e-3 else 1.0
        return ratio if 1 / most < ratio < most else 1.0

    def _modelled(self, name: str) -> dict[str, float]:
        """Microseconds of a block of the setup itself, by kind of work."""
        own = self._own_blocks.get(name) or self._own_blocks.get(name.replace("recompute", "forward"), [])
        return us_by_kind(own, self.plain.costs)

    @cached_property
    def _own_blocks(self) -> dict[str, Ops]:
        return own_blocks(self.plain.assembly.program, self.blocks)

    def _communication(self) -> Times:
        """All communication of a step, as a mean over ranks, in microseconds."""
        return np.array([labels.us[labels.work == KernelClass.COMM].sum() for labels in self.labels])

    def _data_parallel(self) -> float:
        """Measured over modelled, of collectives that are in no layer."""
        if self.plain.assembly.layout.dp.size <= 1 or self.setup.parallel.pp > 1:
            return 1.0
        modelled = sum(self.plain.role_us(what, 0) for what in ("gather", "reduce", "reduce rest"))
        inside = _inside_blocks_us(self.plain, 0) + self.plain.role_us("publish", 0)
        measured = float(self._communication().mean())
        share = modelled / max(modelled + max(inside, 0.0), 1e-9)
        return measured * share / modelled if modelled > 0 and measured > 0 else 1.0

    def _link(self) -> float:
        """Measured over modelled, of what goes from stage to stage."""
        p, shard = self.setup.parallel, self.plain.assembly.layout
        if p.pp == 1:
            return 1.0
        names = self.run.execution.trace.names
        sends = np.array([collective_name(name) == "send_recv" for name in names], bool)
        kernel = self.run.execution.trace.name
        found = [labels.us[(labels.work == KernelClass.COMM) & sends[kernel[labels.row]]] for labels in self.labels]
        typical = float(np.median(np.concatenate(found))) if any(len(part) for part in found) else 0.0
        size = float(shard.spread_tokens * shard.model.hidden * shard.element)
        links = (Collective("p2p", size, shard.link(*stages)) for stages in self.plain.structure.links)
        modelled = float(np.median([self.plain.costs.collective_us(link) for link in links]))
        return typical / modelled if typical > 0 and modelled > 0 else 1.0

    @cached_property
    def understood(self) -> list[dict[str, Any]]:
        """What was recognised of every rank: tasks and GPU time by phase, one layer, embedding and head."""
        ends = {KernelPhase.FORWARD: ("embedding", "head"), KernelPhase.BACKWARD: ("embedding grad", "head grad"),
                KernelPhase.OPTIMIZER: ("optimizer",)}  # fmt: skip
        return [self._understood(*pair, phase, ends[phase]) for pair in zip(self.labels, self.ranks, strict=True)
                for phase in KernelPhase]  # fmt: skip

    def _understood(self, labels: RankLabels, rank: CutRank, phase: KernelPhase, ends: Sequence[str]) -> dict[str, Any]:
        tasks, name = labels.of(phase), phase.name.lower()
        layer = rank.blocks.get(name, CutBlock()) if phase != KernelPhase.OPTIMIZER else CutBlock()
        return {
            "rank": labels.rank, "phase": name, "tasks": int(tasks.sum()),
            "gpu_ms": float(labels.us[tasks].sum()) / 1e3,
            "layer_ms": layer.us() / 1e3, "layer_host_ms": layer.host_us / 1e3,
            "ends_ms": sum(rank.blocks.get(end, CutBlock()).us() for end in ends) / 1e3,
        }  # fmt: skip


def _local(shapes: Counter[Shape], measured: Sequence[Launch], tp: int) -> Counter[Shape]:
    """The part of each parameter that this rank holds: a DTensor shows the shape of the whole.

    Its matmul shows the part: the gradient of a weight is what it returns.
    """
    if tp == 1:
        return shapes
    made = {op.outputs[0].shape for op, *_ in measured if op.name == "aten.mm.default" and op.phase == "backward"}
    found: Counter[Shape] = Counter()
    for shape, count in shapes.items():
        parts = [(shape[0] // tp, *shape[1:]), (*shape[:-1], shape[-1] // tp)] if len(shape) == 2 else []
        whole = shape in made or not parts
        part = next((part for part in parts if part in made), shape)
        if whole and part != shape and part in made and shape[0] == shape[-1]:
            whole = False  # of a square one, other matmuls of that shape return activations
        found[shape if whole else part] += count
    return found


def _slower_core(calibration: Learned, factor: float) -> Learned:
    """A CPU computes and is its own host."""
    return calibration.slower(factor).slower_host(factor)


def changed_step(source: CalibratedRun, target: Setup) -> tuple[Step, tuple[str, ...]]:
    """The step of another configuration of a traced run, and what to know about it; or OptionError."""
    refuse(source.setup, target)
    if source.on_cpu:
        _refuse_on_cpu(source, target)
    learned = source.learned.slower_host(source.setup.cluster.host / target.cluster.host)
    return loaded_step(target, learned), (*source.notes, *_notes(source, target))


def _notes(source: CalibratedRun, target: Setup) -> list[str]:
    """What the trace does not show of a target."""
    found = []
    ways = [f"parallel.{way}" for way in ("pp", "vpp", "cp", "ep") if getattr(source.setup.parallel, way)
            != getattr(target.parallel, way)]  # fmt: skip
    if ways:
        found.append(f"not as in the traced run: {', '.join(ways)}; no such change was measured; wider interval")
    host = source.plain.costs.host_us * sum(Program(target).layout.dtensor_launches)
    if host and source.setup.parallel.tp == 1:
        found.append(
            f"tensor parallelism by DTensor, as eager PyTorch runs it: about {host / 1e3:.0f} ms of the host for a "
            "layer; compiled code and Megatron have none of that"
        )
    before, after = source.setup.parallel, target.parallel
    if not source.silent and source.setup.cluster.gpus > 1 and (before.tp, before.zero) != (after.tp, after.zero):
        found.append("collectives that the traced run did not have are those of the network model, not of its network")
    if source.has_shapes or source.on_cpu:
        return found
    return [*found, "the trace has no shapes: operators follow the description; record with record_shapes=True"]


def _refuse_on_cpu(source: CalibratedRun, target: Setup) -> None:
    """What the trace of a CPU does not have cannot be predicted: there is no typical CPU to take it from."""
    if source.silent:
        raise OptionError(
            "the trace has no communication (a fake process group), and that of CPUs is only known from a trace: "
            "record two or more ranks with gloo"
        )
    for way in ("dp", "tp", "pp", "cp", "ep"):
        before, after = getattr(source.setup.parallel, way), getattr(target.parallel, way)
        if before == 1 < after:
            raise OptionError(
                f"parallel.{way} = {after}: the traced run had none, and how CPUs talk is only known from a trace: "
                f"record one with parallel.{way} of 2 or more"
            )


def refuse(before: Setup, after: Setup) -> None:
    """Refuse changes that a trace says nothing about, with the reason."""
    if before.cluster.accelerator.is_cpu != after.cluster.accelerator.is_cpu:
        raise OptionError(
            f"cluster.gpu = {after.cluster.gpu} cannot be predicted from a trace of {before.cluster.gpu}: they run "
            "other kernels; leave it out, or predict from a setup alone"
        )
    if before.train.compile and after.parallel.tp != before.parallel.tp:
        raise OptionError(
            "parallel.tp cannot be changed from a compiled trace: its kernels are fused beyond recognition; record the "
            "run without compile, or predict from the setup alone"
        )
    keys = (
        "compile", "framework", "precision", "attention", "mode", "recompute_modules", "recompute_layers",
        "recompute_every", "recompute_group", "offload_optimizer", "offload_weights", "offload_layers",
    )  # fmt: skip
    fixed = [f"train.{key}" for key in keys if getattr(before.train, key) != getattr(after.train, key)]
    fixed += [
        f"parallel.{key}" for key in ("etp", "cp_type") if getattr(before.parallel, key) != getattr(after.parallel, key)
    ]
    if bool(before.model.experts) != bool(after.model.experts) or before.model.gated != after.model.gated:
        fixed.append("the kind of MLP")
    if before.train.optimizer != after.train.optimizer and "muon" in (before.train.optimizer, after.train.optimizer):
        fixed.append("train.optimizer")
    if before.model.tied != after.model.tied:
        fixed.append("model.tied")
    if fixed:
        raise OptionError(f"{fixed[0]} cannot be changed from a trace: other kernels would run; predict from the setup")
