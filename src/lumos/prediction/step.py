"""Estimate: one training step of a setup, from nothing but its description."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from lumos.cost.flash import flash_kernels
from lumos.cost.in_step import InStepFactors, in_step_factors
from lumos.cost.network import Network, network_of
from lumos.cost.operator_model import CostModel, cost_model
from lumos.cost.prices import BlockTime, Prices
from lumos.errors import OptionError
from lumos.graph.graph import Graph
from lumos.graph.simulate import Times, simulate
from lumos.prediction.stage import Stage
from lumos.prediction.step_structure import Plan, Role, Skeleton, skeleton
from lumos.program.block import Block
from lumos.program.operators import Collective, Group
from lumos.program.embedding_head import head, head_backward, optimizer
from lumos.program.operators import Operator
from lumos.program.parameters import Chunk, Parameters, Weights, chunks_of, layers_of
from lumos.program.rank_layout import Shard
from lumos.program.transformer_layer import Layer
from lumos.setup.frameworks import Framework, framework_named
from lumos.setup.gpus import Gpu, gpu_named
from lumos.setup.setup import Setup
from lumos.trace.names import Kind

_LAUNCH_US = 8.0  # from the host's call to the kernel's start, on an idle stream
_MOST_TASKS = 3_000_000  # of a step: half a minute
_HIDDEN = 0.8  # of the first forward pass, behind which weights are gathered after an update (ZeRO 1 and 2)
_INPUTS = 0.55  # of a backward pass, the gradients of inputs; the rest is those of weights
_MOST_UNITS = 12  # parts a backward pass is cut into where gradients are reduced beside it


class ChunkTime(NamedTuple):
    """One virtual stage: its blocks, the parameters a rank holds of it."""

    forward: BlockTime
    backward: BlockTime
    layers: int
    parameters: Parameters


class StageWork(NamedTuple):
    """What one rank of a stage does in a step: compute, communication that is waited for, and all communication."""

    compute_us: float
    exposed_us: float
    communication_us: float


class _Alone(NamedTuple):
    """What a stage does whatever the others do, in microseconds."""

    blocks: float  # of one micro-batch
    tail: float  # once its gradients are whole
    other: float  # all that its network or its host has to do


_COMPUTE_ROLES = ("forward", "backward", "weights", "optimizer")


@dataclass(frozen=True)
class Step:
    """A simulated step: the filled graph, its times, and the priced parts it was made of."""

    setup: Setup
    plan: Plan
    structure: Skeleton
    graph: Graph
    times: Times
    chunks: tuple[tuple[ChunkTime, ...], ...]  # [stage][chunk]
    prices: Prices
    assembly: Assembly

    @cached_property
    def us(self) -> float:
        return self.times.span / 1e3

    def stage_work(self) -> list[StageWork]:
        """What a rank of each stage does in the step."""
        count = self.plan.microbatches
        work = []
        for stage, row in enumerate(self.chunks):
            blocks = [block for chunk in row for block in (chunk.forward, chunk.backward)]
            compute = count * sum(b.compute_us for b in blocks) + self.role_us("optimizer", stage)
            inside = count * sum(max(0.0, b.us - b.compute_us) for b in blocks)
            network = count * sum(b.communication_us for b in blocks)
            after = sum(self.role_us(what, stage) for what in ("reduce rest", "publish"))
            beside = sum(self.role_us(what, stage) for what in ("gather", "reduce"))
            late = self._late_us(stage)
            work.append(StageWork(compute, inside + after + late, network + after + beside))
        return work

    def role_us(self, what: str, stage: int) -> float:
        """All nodes of a role on a stage."""
        return sum(self._busy_us[i] for i in self.structure.roles_of.get((what, stage), ()))

    @cached_property
    def _busy_us(self) -> list[float]:
        """Of every role, all its nodes together."""
        totals = np.bincount(self.structure.node_role, self.graph.duration, len(self.structure.roles))
        busy: list[float] = (totals / 1e3).tolist()
        return busy

    def _late_us(self, stage: int) -> float:
        """How long compute stood still for weights or gradients on the network lanes."""
        if not (self.plan.sharded or self.plan.overlapped):
            return 0.0
        roles = [i for i, r in enumerate(self.structure.roles) if r.stage == stage and r.what in _COMPUTE_ROLES]
        rows = np.flatnonzero(np.isin(self.structure.node_role, roles))
        edges = self.graph.edges
        brought = self.graph.kind[edges.source] == Kind.COMM
        arrived = np.zeros(len(self.graph))
        np.maximum.at(arrived, edges.target[brought], self.times.end[edges.source[brought]])
        free = np.concatenate([[0.0], self.times.end[rows[:-1]]])
        late = np.minimum(arrived[rows], self.times.start[rows]) - free
        return float(np.maximum(late, 0.0).sum()) / 1e3

    @cached_property
    def host_share(self) -> float:
        """The host's time over the GPU's, in the blocks of the busiest stage."""
        shares = [
            sum(c.forward.host_us + c.backward.host_us for c in row)
            / max(1e-9, sum(max(b.us, b.host_us) for c in row for b in (c.forward, c.backward)))
            for row in self.chunks
        ]
        return max(shares) if any(c.forward.host_us > c.forward.us for row in self.chunks for c in row) else 0.0

    @cached_property
    def host_cost(self) -> float:
        """The share of the step that a host without any delay would save."""
        if not self.plan.hosted:
            return 0.0
        hosted = np.array([role.what.startswith("host") for role in self.structure.roles])
        free = np.where(hosted[self.structure.node_role], 0.0, self.graph.duration)
        return 1 - simulate(self.graph, free).span / self.times.span

    def operators(self, most: int = 12) -> list[dict[str, object]]:
        """The dearest operators of a step on one rank, with what bounds each."""
        rows = [
            {"name": name, "op": op.kind, "shape": list(op.shape), "count": count,
             "ms": count * self.prices.operator_us(op) / 1e3, "bound": self.prices.model.bound(op)}
            for (name, op), count in self.assembly.counts().items() if not isinstance(op, Collective)
        ]  # fmt: skip
        rows += [
            {"name": name, "op": op.kind, "shape": [int(op.bytes)], "count": count,
             "ms": count * self.prices.collective_us(op) / 1e3, "bound": "network"}
            for (name, op), count in self.assembly.counts().items() if isinstance(op, Collective)
        ]  # fmt: skip
        return sorted(rows, key=lambda row: -float(str(row["ms"])))[:most]


def simulate_step(
    setup: Setup,
    conditions: InStepFactors | None = None,
    model: CostModel | None = None,
    network: Network | None = None,
    make_prices: Callable[..., Prices] = Prices,
) -> Step:
    """Price the blocks of every stage and simulate the step they make."""
    return assembled(setup, prices_of(setup, conditions, model, network, make_prices)).step()


def assembled(setup: Setup, prices: Prices) -> Assembly:
    """The parts of a step, not yet simulated."""
    return Assembly(setup, Shard(setup, framework_named(setup.train.framework)), prices)


def prices_of(
    setup: Setup,
    conditions: InStepFactors | None = None,
    model: CostModel | None = None,
    network: Network | None = None,
    make_prices: Callable[..., Prices] = Prices,
) -> Prices:
    """What operators, collectives and blocks cost in a setup."""
    gpu = setup.cluster.accelerator
    framework = framework_named(setup.train.framework)
    conditions = conditions or in_step_factors(gpu)
    prices = make_prices(
        model or cost_model(gpu.name), network or network_of(_wired(setup, gpu), setup.cluster.fabric, conditions),
        conditions, _host_us(setup, framework), framework.collective_launches,
    )  # fmt: skip
    prices.flash_model = flash_kernels(gpu_named(gpu.name), _flash_generation(setup, framework))
    return prices


def shape_of(setup: Setup) -> Hashable:
    """What the prices of a setup depend on: setups of one shape can share them, blocks that were priced included."""
    p, t, cluster = setup.parallel, setup.train, setup.cluster
    experts = (p.ep, p.dp, p.pp) if setup.model.experts else ()
    sharded = p.zero == 3 and p.dp * p.cp > 1
    added = 0 if framework_named(t.framework).accumulates_fp32 else t.microbatches  # to gradients, but for the first
    return (
        setup.model, t.model_copy(update={"microbatches": added, "global_batch": 0}), cluster,
        p.tp, p.cp, p.sequence_parallel, p.tp_overlap, p.pp > 1, sharded, experts,
    )  # fmt: skip


def _wired(setup: Setup, gpu: Gpu) -> Gpu:
    """The GPU with the links it really uses: inside one node, what NVLink does not join is joined by PCIe."""
    if gpu.nvlink_domain < setup.cluster.gpus <= gpu.gpus_per_node:
        return dataclasses.replace(gpu, inter_gb_s=gpu.pcie_gb_s)
    return gpu


def _flash_generation(setup: Setup, framework: Framework) -> str:
    """Plain PyTorch: compiled models call FlashAttention 2 where eager ones get cuDNN's kernel (torch 2.11 on H200)."""
    return "flash-2" if setup.train.compile and framework.name == "pytorch" else framework.flash


def _host_us(setup: Setup, framework: Framework) -> float:
    """What one launch costs the host."""
    if setup.train.cuda_graphs:
        return 0.0
    p = setup.parallel
    drag = 1 + framework.pipeline_drag * (p.tp - 1) if p.pp > 1 else 1.0
    return framework.host_us * drag / setup.cluster.host


class Assembly:
    """Turns priced blocks into the times of a skeleton."""

    def __init__(self, setup: Setup, shard: Shard, prices: Prices) -> None:
        self.setup, self.shard, self.prices = setup, shard, prices

    def step(self) -> Step:
        """Simulated."""
        graph = self.graph()
        return Step(self.setup, self.plan, self.structure, graph, simulate(graph), self.chunks, self.prices, self)

    # ------------------------------------------------------------------ what each stage holds
    @cached_property
    def layers(self) -> list[int]:
        """Layers of every virtual stage, in the order of the model."""
        return layers_of(self.setup, self.shard.framework.balances)

    @cached_property
    def chunks(self) -> tuple[tuple[ChunkTime, ...], ...]:
        """[stage][chunk]. What depends on nothing else is priced once for all setups that share the prices."""
        p = self.setup.parallel
        return self.prices.kept((p.pp, p.vpp, p.stage_layers), self._all_priced)

    def _all_priced(self) -> tuple[tuple[ChunkTime, ...], ...]:
        rows = chunks_of(self.setup, self.shard.framework.balances)
        return tuple(tuple(self.prices.kept(chunk, partial(self._priced, chunk)) for chunk in row) for row in rows)

    def _priced(self, chunk: Chunk) -> ChunkTime:
        stage, weights = Stage(self.shard, self.prices, *chunk), Weights(self.shard).of((chunk,))
        return ChunkTime(stage.forward(), stage.backward(), chunk.dense + chunk.sparse, weights)

    @cached_property
    def like(self) -> list[int]:
        """For every stage, the first that holds the same: what is known of the one is known of the other."""
        p = self.setup.parallel
        return self.prices.kept(("like", p.pp, p.vpp, p.stage_layers), self._compared)

    def _compared(self) -> list[int]:
        first: dict[tuple[int, ...], int] = {}
        return [first.setdefault(tuple(id(chunk) for chunk in row), stage) for stage, row in enumerate(self.chunks)]

    def counts(self) -> dict[tuple[str, Operator | Collective], int]:
        """How often a rank of the first stage runs each piece in one step."""
        found: dict[tuple[str, Operator | Collective], int] = {}
        per_step = self.setup.train.microbatches
        layers = sum(chunk.layers for chunk in self.chunks[0])
        dense = layers if not self.setup.model.experts else min(self.setup.model.dense_layers, layers)
        blocks: list[tuple[Block, int]] = []
        for count, sparse in ((dense, False), (layers - dense, True)):
            layer = Layer(self.shard, sparse)
            parts = (layer.forward, layer.recomputed, layer.backward) if count else ()
            blocks += [(part(), count) for part in parts]
        if self.setup.parallel.pp == 1:
            blocks += [(head(self.shard), 1), (head_backward(self.shard), 1)]
        for block, times in blocks:
            for piece in block:
                key = (piece.name, piece.work)
                found[key] = found.get(key, 0) + times * per_step
        return found

    # ------------------------------------------------------------------ the network's work
    @cached_property
    def shards_weights(self) -> bool:
        return self.setup.parallel.zero == 3 and self.shard.dp.size > 1

    @cached_property
    def overlaps(self) -> bool:
        chosen, framework = self.setup.parallel.dp_overlap, self.shard.framework
        by_itself = framework.dp_overlap and (framework.overlaps_sharded or self.setup.parallel.zero not in (1, 2))
        wanted = by_itself if chosen is None else chosen
        return wanted and self.shard.dp.size > 1 and self._schedule != "zero-bubble"

    @cached_property
    def _schedule(self) -> str:
        """One stage alone has nothing to schedule."""
        p = self.setup.parallel
        return p.schedule if p.pp > 1 else "1f1b"

    def _data_parallel_us(self, kind: str, parameters: Parameters, element: float) -> float:
        """A collective over the ranks that hold the same weights; experts have ranks of their own.

        Where only some of the replicas share what is divided, they reduce their part with the others afterwards.
        """
        time = 0.0
        groups = (self.shard.sharing, self.shard.experts_sharing)
        for size, (near, far) in zip((parameters.common, parameters.experts), groups, strict=True):
            time += self._bucketed_us(kind, size * element, near)
            if kind != "all_gather":
                time += self._bucketed_us("all_reduce", size * element / near.size, far)
        return time

    def _bucketed_us(self, kind: str, size: float, group: Group) -> float:
        bucket = self.shard.framework.bucket_mb * 1e6
        parts = max(1.0, size / bucket) if bucket and kind != "all_gather" else 1.0
        return parts * self.prices.collective_us(Collective(kind, size / parts, group))

    @cached_property
    def units(self) -> int:
        if self.shards_weights:
            return max(1, max(self.layers))
        return max(1, min(_MOST_UNITS, max(self.layers))) if self.overlaps else 1

    @cached_property
    def plan(self) -> Plan:
        p, t = self.setup.parallel, self.setup.train
        return Plan(
            self._schedule, p.pp, p.vpp, t.microbatches, self.units, self.shards_weights, self.shards_weights,
            self.overlaps, self._hosted, self.overlaps and self.shard.framework.reduces_always,
        )  # fmt: skip

    @cached_property
    def _hosted(self) -> bool:
        """The host has a lane where it might decide."""
        blocks = [b for stage in set(self.like) for c in self.chunks[stage] for b in (c.forward, c.backward)]
        return any(block.host_us > 0.5 * block.us for block in blocks)

    @cached_property
    def structure(self) -> Skeleton:
        if self.plan.tasks > _MOST_TASKS:
            count = self.setup.train.microbatches
            raise OptionError(
                f"train.microbatches = {count} makes a step of {self.plan.tasks:,} tasks: predict one of "
                f"{count * _MOST_TASKS // self.plan.tasks} or fewer, and add the time of the rest"
            )
        return skeleton(self.plan)

    def graph(self) -> Graph:
        """The skeleton filled with times, in nanoseconds."""
        alike: dict[tuple[str, int, int, int], float] = {}  # stages that hold the same
        durations = np.empty(len(self.structure.roles))
        for index, role in enumerate(self.structure.roles):
            key = (role.what, self.like[role.stage], role.chunk, role.unit)
            if key not in alike:
                alike[key] = self._duration(role) * 1e3
            durations[index] = alike[key]
        lags = np.array([0.0, self._link_us(), _LAUNCH_US]) * 1e3
        return self.structure.filled(durations, lags)

    # ------------------------------------------------------------------ what no schedule can beat
    def bound_us(self) -> float:
        """A time that the simulated step cannot be below, found without building or simulating its graph.

        Every stage runs its blocks one after the other, after the first micro-batch has come to it through the stages
        before, and before the last one has gone back through them; network and host have their own work to do; and one
        micro-batch has to go through all stages and back.
        """
        link, count = self._link_us(), self.setup.train.microbatches
        before = after = longest = 0.0
        alone = {stage: self._alone(stage) for stage in set(self.like)}
        for stage, row in enumerate(self.chunks):
            blocks, tail, other = alone[self.like[stage]]
            back = after + alone[0].tail if stage and self._schedule != "zero-bubble" else 0.0
            longest = max(longest, before + count * blocks + max(tail, back), other)
            before, after = before + row[0].forward.us + link, after + row[0].backward.us + link
        return max(longest, self._path_us(link) + alone[0].tail)

    def _alone(self, stage: int) -> _Alone:
        row = self.chunks[stage]
        blocks = sum(chunk.forward.us + chunk.backward.us for chunk in row)
        other = max(self._network_bound_us(stage, row), self._host_bound_us(stage, row))
        return _Alone(blocks, self._tail_us(stage), other)

    def _tail_us(self, stage: int) -> float:
        """What a stage does once its gradients are whole."""
        chunk = self.chunks[stage][0]
        return sum(self._network_us(what, stage, chunk) for what in ("reduce rest", "optimizer", "publish"))

    def _network_bound_us(self, stage: int, row: tuple[ChunkTime, ...]) -> float:
        """All that the network does beside the blocks of a stage, and the update that waits for it."""
        if not (self.shards_weights or self.overlaps):
            return 0.0
        gather = reduce = 0.0
        for chunk, times in Counter(row).items():
            gather += times * self._network_us("gather", stage, chunk) if self.shards_weights else 0.0
            reduce += times * self._network_us("reduce", stage, chunk)
        count = self.setup.train.microbatches
        often = count if self.shards_weights or self.shard.framework.reduces_always else 1
        work = self.units * (2 * count * gather + often * reduce)
        return work + sum(self._network_us(what, stage, row[0]) for what in ("optimizer", "publish"))

    def _host_bound_us(self, stage: int, row: tuple[ChunkTime, ...]) -> float:
        if not self._hosted:
            return 0.0
        issued = self.setup.train.microbatches * sum(chunk.forward.host_us + chunk.backward.host_us for chunk in row)
        return issued + self._optimizer(stage).host_us

    def _path_us(self, link: float) -> float:
        """One micro-batch, forward and back."""
        share = _INPUTS if self._schedule == "zero-bubble" else 1.0
        blocks = sum(chunk.forward.us + share * chunk.backward.us for row in self.chunks for chunk in row)
        return blocks + 2 * link * (self.setup.parallel.pp * self.setup.parallel.vpp - 1)

    def _link_us(self) -> float:
        """Activations to the next stage."""
        s = self.shard
        size = float(s.spread_tokens * s.model.hidden * s.element)
        return self.prices.collective_us(Collective("p2p", size, s.pp)) if s.parallel.pp > 1 else 0.0

    def _duration(self, role: Role) -> float:
        chunk = self.chunks[role.stage][role.chunk]
        if role.what in ("forward", "backward"):
            block = chunk.forward if role.what == "forward" else chunk.backward
            if self.plan.schedule == "zero-bubble" and role.what == "backward":
                block = block.times(_INPUTS)
            return block.us if role.unit < 0 else block.us / self.units
        if role.what == "weights":
            return chunk.backward.us * (1 - _INPUTS)
        if role.what.startswith("host"):
            return self._host_us(role.what.removeprefix("host "), chunk, role.stage)
        if role.what == "reduce" and self.overlaps:
            return self._reduced_beside_us(role, chunk)
        return self._network_us(role.what, role.stage, chunk)

    def _reduced_beside_us(self, role: Role, chunk: ChunkTime) -> float:
        """Gradients of one unit; those of the embedding are whole when the backward pass is over, in the last unit."""
        mine = self._trained(chunk.parameters)
        late = self._embedding if role.stage == role.chunk == 0 and self.setup.train.mode != "lora" else 0.0
        common = (mine.common - late) / self.units + (late if role.unit == 0 else 0.0)
        part = Parameters(common, mine.experts / self.units)
        alone = self._data_parallel_us(self._reduction, part, self.shard.framework.reduce_bytes)
        return alone / (self.prices.network.beside if self.shard.dp.nodes > 1 else 1.0)

    @cached_property
    def _embedding(self) -> float:
        """Parameters of the embedding on one rank."""
        return Weights(self.shard).embedding

    def _host_us(self, what: str, chunk: ChunkTime, stage: int) -> float:
        if what == "forward":
            return chunk.forward.host_us
        if what == "backward":
            return chunk.backward.host_us
        if what == "optimizer":
            return self._optimizer(stage).host_us
        return 0.0

    def _trained(self, parameters: Parameters) -> Parameters:
        """Those that have gradients: adapters alone, where there are some."""
        if self.setup.train.mode == "lora":
            return Parameters(parameters.adapters, 0.0)
        return parameters

    def _stage_parameters(self, stage: int) -> Parameters:
        p = self.setup.parallel
        key = ("parameters", p.pp, p.vpp, p.stage_layers, self.like[stage])
        return self.prices.kept(key, partial(self._added_up, stage))

    def _added_up(self, stage: int) -> Parameters:
        columns = zip(*(chunk.parameters for chunk in self.chunks[stage]), strict=True)
        return Parameters(*(sum(column) for column in columns))

    def stage_state(self, stage: int) -> float:
        """Parameters that one rank of a stage keeps the optimizer's state of."""
        common, experts, _ = self._trained(self._stage_parameters(stage))
        if self.setup.parallel.zero:
            common, experts = common / self.shard.sharing[0].size, experts / self.shard.experts_sharing[0].size
        return common + experts

    def stage_tensors(self, stage: int) -> int:
        """Parameter tensors that one rank of a stage updates."""
        m = self.setup.model
        linears = 4 + (3 if m.gated else 2)
        in_layer = linears * (2 if m.bias else 1) + (4 if m.norm == "layer" and m.bias else 2)
        return in_layer * sum(chunk.layers for chunk in self.chunks[stage]) + 3

    def _optimizer(self, stage: int) -> BlockTime:
        size = self.stage_state(stage)
        tensors = self.stage_tensors(stage)
        return self.prices.block(("optimizer", round(size), tensors), lambda: optimizer(self.shard, size, tensors))

    @cached_property
    def _reduction(self) -> str:
        zero = self.setup.parallel.zero
        return "reduce_scatter" if zero == 3 or (zero and self.shard.framework.scatters) else "all_reduce"

    def _network_us(self, what: str, stage: int, chunk: ChunkTime) -> float:
        framework = self.shard.framework
        if what == "gather":
            return self._data_parallel_us("all_gather", chunk.parameters, framework.gather_bytes / self.units)
        if what == "reduce":
            mine = self._trained(chunk.parameters)
            return self._data_parallel_us(self._reduction, mine, framework.reduce_bytes / self.units)
        if what == "reduce rest" and not (self.overlaps or self.shards_weights):
            trained = self._trained(self._stage_parameters(stage))
            return self._data_parallel_us(self._reduction, trained, framework.reduce_bytes)
        if what == "optimizer":
            return self._optimizer(stage).us
        if what == "publish" and self.setup.parallel.zero in (1, 2):
            trained = self._trained(self._stage_parameters(stage))
            gather = self._data_parallel_us("all_gather", trained, framework.gather_bytes)
            forward = sum(max(chunk.forward.us, chunk.forward.host_us) for chunk in self.chunks[stage])
            return max(gather - (_HIDDEN * forward if self.overlaps else 0.0), 0.0)
        return 0.0
