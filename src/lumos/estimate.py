"""Estimate: one training step of a setup, from nothing but its description."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lumos.blocks.ends import head, head_backward, optimizer
from lumos.blocks.layer import Layer
from lumos.blocks.shard import Shard
from lumos.costs.collective import Collective
from lumos.costs.conditions import Conditions, conditions_for
from lumos.costs.flash import flash_kernels
from lumos.costs.model import CostModel, cost_model
from lumos.costs.network import Network, network_of
from lumos.costs.operator import Operator
from lumos.costs.prices import BlockTime, Prices, time_of
from lumos.frameworks import Framework, framework_named
from lumos.graph import Graph
from lumos.setups.gpus import gpu_named
from lumos.setups.setup import Setup
from lumos.simulate import Times, simulate
from lumos.skeleton import Plan, Role, Skeleton, skeleton
from lumos.stage import Stage

_LAUNCH_US = 8.0  # from the host's call to the kernel's start, on an idle stream
_MOST_UNITS = 12  # parts a backward pass is cut into where gradients are reduced beside it


class ChunkTime(NamedTuple):
    """One virtual stage: its blocks, the parameters a rank holds of it."""

    forward: BlockTime
    backward: BlockTime
    layers: int
    parameters: float


class StageWork(NamedTuple):
    """What one rank of a stage does in a step: compute, communication that is waited for, and all communication."""

    compute_us: float
    exposed_us: float
    communication_us: float


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
            compute = count * sum(b.compute_us for b in blocks) + self._role_us("optimizer", stage)
            inside = count * sum(max(0.0, b.us - b.compute_us) for b in blocks)
            network = count * sum(b.communication_us for b in blocks)
            after = sum(self._role_us(what, stage) for what in ("reduce rest", "publish"))
            beside = sum(self._role_us(what, stage) for what in ("gather", "reduce"))
            hidden = max(0.0, self._late_us(stage))
            work.append(StageWork(compute, inside + after + hidden, network + after + beside))
        return work

    def _role_us(self, what: str, stage: int) -> float:
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
        idle = self.times.start[rows[1:]] - self.times.end[rows[:-1]]
        return float(np.maximum(idle, 0.0).sum()) / 1e3 if self.plan.pp == 1 else 0.0

    @cached_property
    def host_share(self) -> float:
        """The host's time over the GPU's, in the blocks of the busiest stage."""
        shares = [
            sum(c.forward.host_us + c.backward.host_us for c in row)
            / max(1e-9, sum(max(b.us, b.host_us) for c in row for b in (c.forward, c.backward)))
            for row in self.chunks
        ]
        return max(shares) if any(c.forward.host_us > c.forward.us for row in self.chunks for c in row) else 0.0

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
    setup: Setup, conditions: Conditions | None = None, model: CostModel | None = None, network: Network | None = None
) -> Step:
    """Price the blocks of every stage and simulate the step they make."""
    gpu = setup.cluster.accelerator
    framework = framework_named(setup.train.framework)
    shard = Shard(setup, framework)
    conditions = conditions or conditions_for(gpu)
    prices = Prices(
        model or cost_model(gpu.name), network or network_of(gpu, setup.cluster.fabric, conditions), conditions,
        _host_us(setup, framework),
        framework.collective_launches,
    )  # fmt: skip
    prices.flash_model = flash_kernels(gpu_named(gpu.name), framework.flash)
    assembly = Assembly(setup, shard, prices)
    graph = assembly.graph()
    times = simulate(graph)
    return Step(
        setup, assembly.plan, assembly.structure, graph, times, assembly.chunks, prices, assembly
    )  # fmt: skip


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

    # ------------------------------------------------------------------ what each stage holds
    @cached_property
    def layers(self) -> list[int]:
        """Layers of every virtual stage, in the order of the model."""
        p = self.setup.parallel
        stages = p.pp * p.vpp
        given = list(p.stage_layers)
        if len(given) == stages:
            return given
        if given:
            return [given[i % p.pp] // p.vpp for i in range(stages)]
        if self.shard.framework.balances and stages > 1:
            return self._balanced(stages)
        base, rest = divmod(self.setup.model.layers, stages)
        counts = [base] * stages
        for i in range(rest):  # the ends have the embedding and the head besides
            counts[(1 + i) % stages if stages > 2 else i] += 1
        return counts

    def _balanced(self, stages: int) -> list[int]:
        """Layers by the work of each stage, the head counted as the layers it is worth."""
        m = self.setup.model
        layer = m.attention_parameters + m.mlp_parameters(m.ffn)
        share = (m.layers + m.vocab * m.hidden / layer) / stages
        ends = [min(m.layers, max(i + 1, round((i + 1) * share))) for i in range(stages - 1)] + [m.layers]
        ends = [min(end, m.layers - (stages - 1 - i)) if m.layers >= stages else end for i, end in enumerate(ends)]
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    @cached_property
    def chunks(self) -> tuple[tuple[ChunkTime, ...], ...]:
        p, m = self.setup.parallel, self.setup.model
        stages = p.pp * p.vpp
        begins = np.concatenate([[0], np.cumsum(self.layers)])
        rows: list[list[ChunkTime]] = [[] for _ in range(p.pp)]
        for virtual, count in enumerate(self.layers):
            dense = int(np.clip(m.dense_layers - begins[virtual], 0, count)) if m.experts else count
            stage = Stage(self.shard, self.prices, dense, count - dense, virtual == 0, virtual == stages - 1)
            parameters = self._parameters(dense, count - dense, virtual == 0, virtual == stages - 1)
            rows[virtual % p.pp].append(ChunkTime(stage.forward(), stage.backward(), count, parameters))
        return tuple(tuple(row) for row in rows)

    def _parameters(self, dense: int, sparse: int, first: bool, last: bool) -> float:
        """Parameters that one rank holds of a virtual stage."""
        m, p = self.setup.model, self.setup.parallel
        layer = (m.attention_parameters + 2 * m.norm_parameters * p.tp) / p.tp
        total = dense * (layer + m.mlp_parameters(m.ffn) / p.tp) if dense else 0.0
        if sparse:
            experts = m.experts / p.ep * m.mlp_parameters(m.expert_ffn)
            shared = m.shared_experts * m.mlp_parameters(m.expert_ffn)
            total += sparse * (layer + experts + shared / p.tp + m.router_parameters)
        ends = (1.0 if first else 0.0) + (1.0 if last and not (m.tied and first) else 0.0)
        return total + ends * m.vocab * m.hidden / p.tp

    def counts(self) -> dict[tuple[str, Operator | Collective], int]:
        """How often a rank of the first stage runs each piece in one step."""
        found: dict[tuple[str, Operator | Collective], int] = {}
        per_step = self.setup.train.microbatches
        sparse = bool(self.setup.model.experts)
        layers = sum(chunk.layers for chunk in self.chunks[0])
        layer = Layer(self.shard, sparse)
        blocks = [(layer.forward(), layers), (layer.recomputed(), layers), (layer.backward(), layers)]
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
        chosen = self.setup.parallel.dp_overlap
        wanted = self.shard.framework.dp_overlap if chosen is None else chosen
        return wanted and self.shard.dp.size > 1 and self.setup.parallel.schedule != "zero-bubble"

    def _data_parallel_us(self, kind: str, size: float) -> float:
        bucket = self.shard.framework.bucket_mb * 1e6
        parts = max(1.0, size / bucket) if bucket and kind != "all_gather" else 1.0
        return parts * self.prices.collective_us(Collective(kind, size / parts, self.shard.dp))

    @cached_property
    def units(self) -> int:
        if self.shards_weights:
            return max(1, max(self.layers))
        return max(1, min(_MOST_UNITS, max(self.layers))) if self.overlaps else 1

    @cached_property
    def plan(self) -> Plan:
        p, t = self.setup.parallel, self.setup.train
        return Plan(
            p.schedule if p.pp > 1 else "1f1b", p.pp, p.vpp, t.microbatches, self.units, self.shards_weights,
            self.shards_weights, self.overlaps, self._hosted,
        )  # fmt: skip

    @cached_property
    def _hosted(self) -> bool:
        """The host has a lane where it might decide."""
        blocks = [b for row in self.chunks for c in row for b in (c.forward, c.backward)]
        return any(block.host_us > 0.5 * block.us for block in blocks)

    @cached_property
    def structure(self) -> Skeleton:
        return skeleton(self.plan)

    def graph(self) -> Graph:
        """The skeleton filled with times, in nanoseconds."""
        durations = np.array([self._duration(role) for role in self.structure.roles]) * 1e3
        lags = np.array([0.0, self._link_us(), _LAUNCH_US]) * 1e3
        return self.structure.filled(durations, lags)

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
                block = block.times(0.55)
            return block.us if role.unit < 0 else block.us / self.units
        if role.what == "weights":
            return chunk.backward.us * 0.45
        if role.what.startswith("host"):
            return self._host_us(role.what.removeprefix("host "), chunk, role.stage)
        return self._network_us(role.what, role.stage, chunk)

    def _host_us(self, what: str, chunk: ChunkTime, stage: int) -> float:
        if what == "forward":
            return chunk.forward.host_us
        if what == "backward":
            return chunk.backward.host_us
        if what == "optimizer":
            return self._optimizer(stage).host_us
        return 0.0

    def _stage_parameters(self, stage: int) -> float:
        return sum(chunk.parameters for chunk in self.chunks[stage])

    def _optimizer(self, stage: int) -> BlockTime:
        zero = self.setup.parallel.zero
        share = self._stage_parameters(stage) / (self._shards if zero else 1)
        return time_of(optimizer(self.shard, share), self.prices)

    @cached_property
    def _shards(self) -> int:
        return self.setup.parallel.shard or self.shard.dp.size

    @cached_property
    def _reduction(self) -> str:
        zero = self.setup.parallel.zero
        return "reduce_scatter" if zero == 3 or (zero and self.shard.framework.scatters) else "all_reduce"

    def _network_us(self, what: str, stage: int, chunk: ChunkTime) -> float:
        framework, zero = self.shard.framework, self.setup.parallel.zero
        parameters = self._stage_parameters(stage)
        if what == "gather":
            return self._data_parallel_us("all_gather", chunk.parameters / self.units * framework.gather_bytes)
        if what == "reduce":
            kind = self._reduction
            return self._data_parallel_us(kind, chunk.parameters / self.units * framework.reduce_bytes)
        if what == "reduce rest":
            if self.overlaps or self.shards_weights:
                return 0.0
            kind = self._reduction
            return self._data_parallel_us(kind, parameters * framework.reduce_bytes)
        if what == "optimizer":
            return self._optimizer(stage).us
        if what == "publish":
            if zero in (1, 2):
                gather = self._data_parallel_us("all_gather", parameters * framework.gather_bytes)
                hidden = 0.8 * self.chunks[stage][0].forward.us * self.setup.parallel.vpp if self.overlaps else 0.0
                return max(gather - hidden, 0.0)
            return 0.0
        return 0.0
