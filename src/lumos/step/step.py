"""Step: the program of a setup, priced and simulated.

Every block of the program has a price. A step's structure (which turns, which gathers and reductions, what waits for
what) depends on counts alone; filled with the costs it is a graph, and the simulator gives its times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from lumos.costs.contention import Beside, kept_rate, kernel_of
from lumos.costs.costs import costs_of
from lumos.costs.energy import InStepFactors
from lumos.costs.host_costs import HostLink, host_link
from lumos.costs.model_costs import ModelCosts
from lumos.costs.network import Network
from lumos.costs.operator_model import CostModel
from lumos.data_files import read_table
from lumos.described.described import Program, Repeated
from lumos.described.experts import is_exchange
from lumos.described.transfers import Transfer, Transfers
from lumos.errors import OptionError
from lumos.graph.graph import Floats, Graph, Times, simulate
from lumos.graph.overlap import Side, contended
from lumos.program.op import EXCHANGE, Op
from lumos.program.operators import Collective, Group, Operator
from lumos.program.sharding import Chunk, Parameters
from lumos.schedules import Phase, schedule_named
from lumos.setup.frameworks import framework_named
from lumos.setup.setup import Setup
from lumos.step.block_timeline import BlockTime, Row, leads_us, summed, time_of
from lumos.step.dualpipe_overlap import Piece, together
from lumos.step.structure import LAUNCH, Plan, Role, StepStructure, step_structure

_PASSES, _TRANSFERS = ("forward", "backward", "weights"), ("gather", "reduce")
_LITTLE = 0.01  # by which a host is made slower, to see whether it decides


class StepTooLargeError(OptionError):
    """A step has more tasks than can be simulated in reasonable time."""


class ChunkTime(NamedTuple):
    """One virtual stage: the price of its blocks for one micro-batch, and the parameters a rank holds of it."""

    forward: BlockTime
    backward: BlockTime  # without the weight gradients, where the schedule gives them turns of their own
    weights: BlockTime
    layers: int
    parameters: Parameters

    @property
    def blocks(self) -> tuple[BlockTime, BlockTime, BlockTime]:
        return self[:3]


class PairTime(NamedTuple):
    """A forward pass and a whole backward pass that run together: the share of each phase, and what runs when."""

    forward: BlockTime
    backward: BlockTime
    weights: BlockTime
    rows: tuple[Row, ...]

    def window(self, what: str) -> tuple[float, float, tuple[Row, ...]]:
        """The shares of the time of both at which the part of a phase begins and ends, and all rows."""
        lengths, index = [block.us for block in self[:3]], _PASSES.index(what)
        total = max(sum(lengths), 1e-9)
        return sum(lengths[:index]) / total, sum(lengths[: index + 1]) / total, self.rows


@dataclass(frozen=True)
class Step:
    """A simulated step: the filled graph, its times, and the priced parts it was made of."""

    setup: Setup
    plan: Plan
    structure: StepStructure
    graph: Graph
    times: Times
    chunks: tuple[tuple[ChunkTime, ...], ...]  # [stage][chunk]
    costs: ModelCosts
    assembly: Assembly

    def __repr__(self) -> str:
        return f"Step({self.us / 1e3:,.2f} ms, {self.setup!r})"

    @cached_property
    def us(self) -> float:
        return self.times.span / 1e3

    def role_us(self, what: str, stage: int) -> float:
        """All nodes of a role on a stage."""
        return sum(self._busy_us[i] for i in self.structure.roles_of.get((what, stage), ()))

    @cached_property
    def _busy_us(self) -> list[float]:
        """Of every role, all its nodes together."""
        totals = np.bincount(self.structure.node_role, self.graph.duration, len(self.structure.roles))
        busy: list[float] = (totals / 1e3).tolist()
        return busy

    @cached_property
    def host_update_us(self) -> float:
        """The host's part of the update, on the stage where it takes longest."""
        return max(self.assembly.host_update_us(stage) for stage in set(self.assembly.program.like))

    @cached_property
    def host_share(self) -> float:
        """The host's time over that of host and GPU together, in the passes of the stage where it is largest."""
        passes = [[pass_ for chunk in row for pass_ in chunk.blocks] for row in self.chunks]
        if not any(one.host_us > one.us for row in passes for one in row):
            return 0.0
        return max(
            sum(one.host_us for one in row) / max(1e-9, sum(max(one.us, one.host_us) for one in row)) for row in passes
        )

    @cached_property
    def host_cost(self) -> float:
        """The share of the step that a host without any delay would save."""
        return 1 - self._with_host(0.0)

    @cached_property
    def host_decides(self) -> bool:
        """Whether the step keeps the host's pace: one that is slower by a little delays it by half of that or more."""
        return self.host_cost > 0 and self._with_host(1 + _LITTLE) > 1 + _LITTLE / 2

    def _with_host(self, delay: float) -> float:
        """The step relative to this one if the host took `delay` times as long for all it does."""
        parts = np.array([self._hosts_part(role) for role in self.structure.roles])
        if not parts.any():
            return 1.0
        changed = (1 + (delay - 1) * parts)[self.structure.node_role] * self.graph.duration
        launch, lag = self.costs.launch_us * 1e3, self.graph.edges.lag
        lags = np.where(self.structure.lag_class == LAUNCH, launch + (lag - launch) * delay, lag)
        return simulate(self.graph.with_lags(lags), changed).span / self.times.span

    def _hosts_part(self, role: Role) -> float:
        """The share of a node's time that the host takes."""
        if role.what.startswith("host"):
            return 1.0
        if role.what not in _PASSES:
            return 0.0
        block = self.assembly.block_of(role)
        return block.waited_us / block.us if block.waited_us else 0.0


def simulate_step(
    setup: Setup,
    factors: InStepFactors | None = None,
    model: CostModel | None = None,
    network: Network | None = None,
    make_costs: Callable[..., ModelCosts] = ModelCosts,
) -> Step:
    """Price the blocks of every stage and simulate the step they make."""
    return assembled(setup, costs_of(setup, factors, model, network, make_costs)).step()


def assembled(setup: Setup, costs: ModelCosts, program: Program | None = None) -> Assembly:
    """The parts of a step, not yet simulated; `program` is that of the setup, where it is known already."""
    return Assembly(program or Program(setup), costs)


def shape_of(setup: Setup) -> Hashable:
    """What the costs of a setup depend on: setups of one shape can share them, blocks that were priced included."""
    p, t, cluster = setup.parallel, setup.train, setup.cluster
    exchange = (p.dispatcher, p.ep_overlap, t.microbatches > 1, schedule_named(p.schedule).pairs)
    experts = (p.ep, p.etp, p.dp, p.pp, *exchange) if setup.model.experts else ()
    sharded = p.zero == 3 and p.dp * p.cp > 1
    framework = framework_named(t.framework, t.precision)
    added = 0 if framework.accumulates_fp32 else t.microbatches  # to gradients, but for the first
    return (
        setup.model, t.model_copy(update={"microbatches": added, "global_batch": 0}), cluster,
        p.tp, p.cp, p.cp_type, p.cp_inner, p.sequence_parallel, p.tp_overlap, p.pp > 1, sharded, experts,
        p.pp if t.offload_layers else 0, p.order,
    )  # fmt: skip


class Assembly:
    """Turns the blocks of a program into the graph of a step."""

    def __init__(self, program: Program, costs: ModelCosts) -> None:
        self.program, self.costs = program, costs
        self.setup, self.layout, self.framework = program.setup, program.layout, program.framework
        self._distinct: dict[int, list[tuple[Chunk, ChunkTime, int]]] = {}  # by the first of the stages that are alike

    def step(self) -> Step:
        """Simulated."""
        graph = self.graph()
        between = self._contention() if self.transfers.overlap and self.costs.contends else None
        graph, times = (graph, simulate(graph)) if between is None else contended(graph, *between)
        return Step(self.setup, self.plan, self.structure, graph, times, self.chunks, self.costs, self)

    # ------------------------------------------------------------------ what each stage runs
    @cached_property
    def chunks(self) -> tuple[tuple[ChunkTime, ...], ...]:
        """[stage][chunk]."""
        return tuple(tuple(self._chunk_time(chunk) for chunk in row) for row in self.program.chunks)

    def distinct_chunks(self, stage: int) -> list[tuple[Chunk, ChunkTime, int]]:
        """The chunks of a stage, the first one first, and how many of each it has."""
        first = self.program.like[stage]
        if first not in self._distinct:
            counts = Counter(self.program.chunks[first])
            self._distinct[first] = [(chunk, self._chunk_time(chunk), count) for chunk, count in counts.items()]
        return self._distinct[first]

    def _chunk_time(self, chunk: Chunk) -> ChunkTime:
        """Priced once for all setups that share the costs."""
        return self.costs.kept((chunk, self.program.schedule.splits_backward), partial(self._priced, chunk))

    def _priced(self, chunk: Chunk) -> ChunkTime:
        forward, backward, weights = (self._phase_time(chunk, phase) for phase in Phase)
        return ChunkTime(forward, backward, weights, chunk.layers, self.program.parameters.of((chunk,)))

    def _phase_time(self, chunk: Chunk, phase: Phase) -> BlockTime:
        time = BlockTime()
        for block in self.program.blocks(chunk, phase):
            time += self.block_time(block).times(block.times)
        copies = self._activation_copies_us(chunk, phase)
        return time._replace(us=max(time.us, copies), communication_us=time.communication_us + copies)

    def block_of(self, role: Role) -> BlockTime:
        """The price of a pass, alone or together with another."""
        source = self.chunks[role.stage][role.chunk] if role.partner < 0 else self.pair_of(role)
        found: BlockTime = getattr(source, role.what)
        return found

    def pair_of(self, role: Role) -> PairTime:
        """The two passes that a role is a part of; priced once for all setups that share the costs."""
        chunks = self.program.chunks[role.stage]
        forward, backward = chunks[role.chunk], chunks[role.partner]
        if role.what != "forward":
            forward, backward = backward, forward
        return self.costs.kept(("pair", forward, backward), partial(self._paired, forward, backward))

    def _paired(self, begun: Chunk, ended: Chunk) -> PairTime:
        """The forward pass of one chunk, and the backward pass of the other."""
        pieces = self._pieces(begun, Phase.FORWARD), self._pieces(ended, Phase.BACKWARD)
        rows = together(*pieces, self.costs)
        times = [summed((row for part, row in rows if part == phase), self.costs) for phase in Phase]
        length = max((row.end_us for _, row in rows), default=0.0)
        work = sum(time.compute_us for time in times) or 1.0
        forward, backward, weights = (time._replace(us=length * time.compute_us / work) for time in times)
        return PairTime(forward, backward, weights, tuple(row for _, row in rows))

    def _pieces(self, chunk: Chunk, phase: Phase) -> list[Piece]:
        """What a pass runs, one after the other."""
        found = []
        for block in self.program.in_order(chunk, phase, whole=True):
            found += [self._piece(op, phase) for op in block.build()]
        return found

    def _piece(self, op: Op, phase: Phase) -> Piece:
        if op.weight_gradient and self.program.schedule.splits_backward:
            phase = Phase.WEIGHTS
        hidden = self.layout.ep_overlap and is_exchange(op)
        return Piece(op._replace(stream=EXCHANGE if hidden else 0), self.costs.us(op), phase)

    def _activation_copies_us(self, chunk: Chunk, phase: Phase) -> float:
        """Activations go to the host behind the forward pass and come back behind the backward pass, spread over it."""
        if phase == Phase.WEIGHTS or not self.program.offloaded_share:
            return 0.0
        return self.host.copy_us(self.program.offloaded_bytes(chunk))

    def block_time(self, block: Repeated) -> BlockTime:
        return self.costs.kept(("block", block.key), lambda: time_of(block.build(), self.costs))

    # ------------------------------------------------------------------ the network's work
    @cached_property
    def transfers(self) -> Transfers:
        return Transfers(self.program)

    def transfer_us(self, transfer: Transfer) -> float:
        """A transfer, all times that it runs."""
        parts = self.transfers.collectives(transfer)
        return transfer.times * sum(times * self.costs.collective_us(collective) for collective, times in parts)

    def unit_us(self, transfer: Transfer, held: Parameters) -> float:
        """A transfer of one unit of a chunk, with the copies of offloaded weights or gradients."""
        return self.host.copy_us(self.transfers.offloaded_bytes(transfer, held)) + self.transfer_us(transfer)

    @cached_property
    def plan(self) -> Plan:
        p, transfers = self.setup.parallel, self.transfers
        always = transfers.overlap and self.program.sharding.reduces_every_microbatch
        in_turn = transfers.gathers != "never" and p.dp_overlap is False
        return Plan(
            self.program.schedule.name, p.pp, p.vpp, self.setup.train.microbatches, transfers.units, transfers.gathers,
            transfers.overlap, self.hosts, always, self.costs.leads, in_turn,
        )  # fmt: skip

    @cached_property
    def hosts(self) -> bool:
        """The host has a lane where it might decide."""
        share = read_table("step.json")["host_bound_share"]
        chunks = {chunk for row in self.program.chunks for chunk in row}
        blocks = (block for chunk in chunks for block in self._chunk_time(chunk).blocks)
        return self.costs.leads or any(block.host_us > share * block.us for block in blocks)

    @cached_property
    def structure(self) -> StepStructure:
        most = read_table("step.json")["most_tasks"]
        if self.plan.tasks > most:
            count = self.setup.train.microbatches
            raise StepTooLargeError(
                f"train.microbatches = {count} makes a step of {self.plan.tasks:,} tasks: predict one of "
                f"{count * most // self.plan.tasks} or fewer, and add the time of the rest"
            )
        return step_structure(self.plan)

    def graph(self) -> Graph:
        """The structure filled with times, in nanoseconds."""
        alike: dict[Hashable, float] = {}  # stages that hold the same
        durations = np.empty(len(self.structure.roles))
        for index, role in enumerate(self.structure.roles):
            key = (role.what, self.program.like[role.stage], role.chunk, role.unit, role.partner)
            if key not in alike:
                alike[key] = self._duration(role) * 1e3
            durations[index] = alike[key]
        messages = [self.link_us(*stages) * 1e3 for stages in self.structure.links]
        return self.structure.filled(durations, self._leads(), messages)

    def _leads(self) -> Floats | float:
        """By role and place of a unit, how much later than its host it starts, in nanoseconds."""
        if not self.costs.leads:
            return self.costs.launch_us * 1e3
        leads = np.full((len(self.structure.roles), self.transfers.units), self.costs.launch_us * 1e3)
        for index, role in enumerate(self.structure.roles):
            if role.what in _PASSES and role.partner < 0:
                units = self.transfers.units if role.unit >= 0 else 1
                leads[index, :units] = self._pass_leads(self.program.chunks[role.stage][role.chunk], role.what, units)
        return leads

    def _pass_leads(self, chunk: Chunk, what: str, units: int) -> list[float]:
        """In nanoseconds."""
        blocks = [self.block_time(block) for block in self.program.in_order(chunk, Phase[what.upper()])]
        return [1e3 * us for us in leads_us(blocks, self.costs.launch_us, units)]

    # ------------------------------------------------------------------ what runs at the same time
    def _contention(self) -> tuple[Side, Side] | None:
        """Passes, and what the network does for data-parallel ranks beside them; None where neither disturbs."""
        roles, known = self.structure.roles, dict[Hashable, float]()
        speed = np.ones(len(roles))
        for index, role in enumerate(roles):
            key = (role.what, self.program.like[role.stage], role.chunk)
            if key not in known:
                known[key] = self._speed_beside(role)
            speed[index] = known[key]
        if (speed == 1).all():
            return None
        stage = np.array([role.stage for role in roles])[self.structure.node_role]

        def side(whats: tuple[str, ...]) -> Side:
            nodes = np.flatnonzero(np.array([role.what in whats for role in roles])[self.structure.node_role])
            return Side(nodes, stage[nodes], speed[self.structure.node_role[nodes]])

        return side(_PASSES), side(_TRANSFERS)

    def _speed_beside(self, role: Role) -> float:
        """What a pass keeps of its speed beside the network's work, and that beside passes."""
        beside = self._disturbing
        if beside is None or (role.what not in _PASSES and role.what not in _TRANSFERS):
            return 1.0
        if role.what in _TRANSFERS:
            return self._kept_beside[_TRANSFERS.index(role.what)]
        return self.speeds(self.program.chunks[role.stage][role.chunk])[_PASSES.index(role.what)]

    def speeds(self, chunk: Chunk) -> tuple[float, ...]:
        """What each pass of a chunk keeps of its speed beside communication; worked out once, as costs are."""
        beside = self._disturbing
        if beside is None:
            return 1.0, 1.0, 1.0
        key = ("speeds", chunk, self.program.schedule.splits_backward, beside)
        return self.costs.kept(key, lambda: tuple(self._speed(chunk, phase, beside) for phase in Phase))

    def _speed(self, chunk: Chunk, phase: Phase, beside: Beside) -> float:
        us = self._chunk_time(chunk).blocks[phase].us
        blocks = self.program.blocks(chunk, phase)
        more = sum(block.times * self.disturbed_us(block, beside) for block in blocks)
        return us / (us + more) if us > 0 else 1.0

    def disturbed_us(self, block: Repeated, beside: Beside) -> float:
        """How much longer a block takes beside communication, priced once."""
        key = ("disturbed", block.key, beside)
        return self.costs.kept(key, lambda: self._longer_us(block, beside))

    def _longer_us(self, block: Repeated, beside: Beside) -> float:
        works = [(op, op.work) for op in block.build() if isinstance(op.work, Operator)]
        return sum(self.costs.us(op) * (self.costs.slowdown(work, beside) - 1) for op, work in works)

    @cached_property
    def _disturbing(self) -> Beside | None:
        """The kernel of the collective that runs beside passes; None where there is none."""
        collective = self.transfers.concurrent
        if collective is None or not self.costs.contends:
            return None
        found = kernel_of(collective, self.costs.collective_us(collective))
        return found._replace(gb_s=round(found.gb_s, -2))  # few different ones, which are priced once

    @cached_property
    def _kept_beside(self) -> tuple[float, float]:
        """What gathers and reductions keep of their speed; groups that divide one copy reduce with the others, too."""
        first, network, (near, far) = self.transfers.concurrent, self.costs.network, self.layout.sharing
        if first is None:
            return 1.0, 1.0
        gather = network.kept(first, kept_rate())
        if first.group != near or far.size < 2:
            return gather, gather
        then = Collective("all_reduce", first.bytes / near.size, far)
        alone = network.us(first), network.us(then)
        return gather, sum(alone) / (alone[0] / gather + alone[1] / network.kept(then, kept_rate()))

    # ------------------------------------------------------------------ messages between stages
    def link_us(self, one: int, other: int) -> float:
        """Activations or their gradients, from one stage to another."""
        stages = (one, other) if one < other else (other, one)
        if stages not in self._message_us:
            self._message_us[stages] = self._sent_us(self.layout.link(*stages))
        return self._message_us[stages]

    @cached_property
    def _message_us(self) -> dict[tuple[int, int], float]:
        """By the stages that messages go between, as far as they were asked for."""
        return {}

    def _sent_us(self, group: Group) -> float:
        s = self.layout
        if not self.framework.sends_parts or s.splits_sequences:
            return self.costs.collective_us(Collective("p2p", s.residual_bytes, group))
        part = Collective("p2p", s.residual_bytes / s.parallel.tp, group)
        return self.costs.collective_us(part) + self.costs.collective_us(
            Collective("all_gather", s.activation_bytes, s.tp)
        )

    # ------------------------------------------------------------------ durations of nodes
    def _duration(self, role: Role) -> float:
        chunk = self.chunks[role.stage][role.chunk]
        if role.what in _PASSES:
            block = self.block_of(role)
            return block.us if role.unit < 0 else block.us / self.transfers.units
        if role.what.startswith("host"):
            what = role.what.removeprefix("host ")
            host: BlockTime = self.update_time(role.stage) if what == "optimizer" else getattr(chunk, what)
            return host.host_us
        return self.network_us(role.what, role.stage, role.chunk, role.unit)

    @cached_property
    def host(self) -> HostLink:
        return host_link(self.setup)

    def update_time(self, stage: int) -> BlockTime:
        """The update: by the GPU, and at the same time by the host of what is there."""
        on_gpu = self.block_time(self.program.optimizer(stage))
        return on_gpu._replace(us=max(on_gpu.us, self.waited_us("optimizer", stage)))

    def waited_us(self, what: str, stage: int, chunk: int = 0) -> float:
        """What a pass or the update takes at least, because of the host; where the GPU is done sooner, it waits."""
        if what != "optimizer":
            return self._activation_copies_us(self.program.chunks[stage][chunk], Phase[what.upper()])
        if self.setup.train.optimizer == "muon":  # many small kernels: the host may take longer to issue them
            return self.block_time(self.program.optimizer(stage)).host_us
        return self.host_update_us(stage)

    def host_update_us(self, stage: int) -> float:
        """What the host takes for its part of the update, with copies there and back; 0 where it has none."""
        sharding, train = self.program.sharding, self.setup.train
        if sharding.stays == 1 or train.optimizer == "none":
            return 0.0
        size = (1 - sharding.stays) * sharding.updated(self.program.stage_parameters(stage))
        # Gradients and weights that are on the host anyway are copied after their reduction and before their gather.
        copied, returned = (0.0, 0.0) if sharding.offloads_weights else (sharding.gradients, sharding.low)
        return self.host.update_us(size, copied, returned, train.offload_overlap)

    def network_us(self, what: str, stage: int, chunk: int = -1, unit: int = -1) -> float:
        """A node of data-parallel communication, or the update."""
        transfers = self.transfers
        if what == "optimizer":
            return self.update_time(stage).us
        if what in _TRANSFERS:
            held = self.chunks[stage][chunk].parameters
            return self.unit_us(transfers.of(what, stage, held, chunk, unit), held)
        if what == "reduce rest":
            return 0.0 if transfers.overlap else self.transfer_us(transfers.reduce_rest(stage))
        if what != "publish" or self.program.sharding.zero not in (1, 2):
            return 0.0
        gather = self.transfer_us(transfers.publish(stage))
        hidden = min(gather, self._hidden_us(stage))  # during a forward pass, which it slows
        return gather - hidden * self.speeds(self.program.chunks[stage][0])[Phase.FORWARD]

    def _hidden_us(self, stage: int) -> float:
        """How long weights can be gathered behind the first forward pass after an update (ZeRO 1 and 2)."""
        if not self.transfers.hides_publishing:
            return 0.0
        forward = sum(n * max(c.forward.us, c.forward.host_us) for _, c, n in self.distinct_chunks(stage))
        return float(read_table("step.json")["hidden_share"] * forward)
