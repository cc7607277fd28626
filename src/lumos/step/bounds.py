"""Bounds: times that no schedule of a step can beat, without building or simulating its graph.

If every pass gathers the weights of its units, passes run at the pace of the network. A unit is gathered two units
ahead, behind the transfers already queued. Let unit k be ready at t[k], compute for c[k], be gathered in g[k], and have
its gradients reduced in r[k]. From t[k] on, the network reduces unit k - 1 and gathers unit k + 1, which takes
n = r[k - 1] + g[k + 1]. Unit k + 1 waits for that and for unit k, which loses the share l of its speed while the
network works:

    t[k + 1] >= t[k] + max(c[k] + l n, n)

So the time of a stage is at least a sum over its units, whatever else it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from lumos.program.sharding import Chunk, Parameters
from lumos.schedules import Phase
from lumos.step.step import Assembly, ChunkTime


class _Unit(NamedTuple):
    """One of the equal units of a pass."""

    us: float
    lost: float  # at least, for every microsecond of communication beside it

    def until_next(self, network: float) -> float:
        """The least time until the next unit is ready."""
        return max(self.us + self.lost * network, network)

    def added(self, network: float) -> float:
        """What the network adds to the unit."""
        return self.until_next(network) - self.us


class PacedPasses(NamedTuple):
    """The passes of a chunk, cut into units, and what the network does for each unit; in microseconds."""

    forward: _Unit
    backward: _Unit
    weights: float  # the whole pass, which gathers nothing
    gather: float
    reduce: float  # of any unit of a backward pass but the last to run
    last_reduce: float
    units: int

    @classmethod
    def of(
        cls, passes: Sequence[float], lost: Sequence[float], gather: float, reduced: tuple[float, float], units: int
    ) -> PacedPasses:
        """`passes` and `lost` by phase; `reduced` are the reductions of a unit and of the last one to run."""
        forward, backward = (_Unit(us / units, share) for us, share in zip(passes[:2], lost[:2], strict=True))
        return cls(forward, backward, passes[2], gather, *reduced, units)

    @property
    def forward_us(self) -> float:
        """Of a pass that its stage has waited for: two units are gathered by then."""
        return self._waited_us(self.forward, self.gather)

    @property
    def backward_us(self) -> float:
        return self._waited_us(self.backward, self.gather + self.reduce)

    def _waited_us(self, unit: _Unit, network: float) -> float:
        return self.units * unit.us + max(0, self.units - 2) * unit.added(network)

    def turn_us(self, is_forward: bool, before: float, gather: float) -> float:
        """A turn until the next turn is ready.

        `before` is the reduction that the turn before it left, `gather` that of the first unit of the next turn.
        """
        unit, reduce = (self.forward, 0.0) if is_forward else (self.backward, self.reduce)
        if self.units == 1:
            return unit.until_next(before + gather)
        between = (self.units - 2) * unit.until_next(reduce + self.gather)
        return unit.until_next(before + self.gather) + between + unit.until_next(reduce + gather)

    @property
    def apart_us(self) -> float:
        """All phases in turns of any order: the last unit of one may wait for no gather of the next."""
        units = (self.forward, self.backward)
        return self.weights + sum(self.units * one.us + (self.units - 1) * one.added(self.gather) for one in units)


class _ChunkBound(NamedTuple):
    """The least that a chunk takes whatever the others do, in microseconds."""

    forward: float  # of one micro-batch, after the stage has waited for it
    backward: float
    passes: tuple[float, ...]  # what every phase computes for one micro-batch
    lost: tuple[float, ...]  # at least, by every phase for every microsecond of communication beside it
    paced: PacedPasses | None  # where every pass gathers its weights
    reduce: float  # one unit's gradients, beside the turns
    network: float  # all that the network does for it in a step
    host: float  # of one micro-batch


class _StageBound(NamedTuple):
    """The least that a stage takes in a step whatever the others do, in microseconds."""

    first: _ChunkBound
    passes: tuple[tuple[float, float], ...]  # what every phase computes, and loses for every microsecond beside it
    network: float  # all communication beside passes
    turns: float  # all turns, each right after another one, at the pace of the network
    path: float  # one micro-batch, forward and backward, through all chunks
    alternating: float  # from its first backward pass to its last forward pass, where it is the last stage
    tail: float  # once its last turn is over
    other: float  # all that its network or its host has to do

    def busy_us(self, network: float) -> float:
        """The passes with so much communication during them, where it costs them least."""
        time = sum(us for us, _ in self.passes)
        for us, lost in sorted(self.passes, key=lambda phase: phase[1]):
            overlapped = min(network, us / (1 - lost))
            time, network = time + lost * overlapped, network - overlapped
        return time + network


class _Bound:
    """The bound of one assembly, stage by stage."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly, self.program, self.transfers = assembly, assembly.program, assembly.transfers
        self.schedule, self.rounds = assembly.program.schedule, assembly.program.rounds

    def stages(self) -> list[_StageBound]:
        known = {stage: self._stage(stage) for stage in set(self.program.like)}
        return [known[stage] for stage in self.program.like]

    def _stage(self, stage: int) -> _StageBound:
        distinct = self.assembly.distinct_chunks(stage)
        known = {chunk: self._chunk(chunk, time) for chunk, time, _ in distinct}
        chunks = [(known[chunk], times) for chunk, _, times in distinct]
        update = self.assembly.update_time(stage)
        end = update.us + self.assembly.network_us("publish", stage)
        if self.transfers.overlap:
            rest = min(chunk.reduce for chunk, _ in chunks)
            network = sum(times * chunk.network for chunk, times in chunks)
        else:
            rest, network = self.assembly.network_us("reduce rest", stage), 0.0
        phases = [
            (
                self.rounds * sum(times * chunk.passes[phase] for chunk, times in chunks),
                min((chunk.lost[phase] for chunk, _ in chunks if chunk.passes[phase]), default=0.0),
            )
            for phase in Phase
        ]
        issued = self.rounds * sum(times * chunk.host for chunk, times in chunks)
        paced = [(chunk.paced, self.rounds * times) for chunk, times in chunks if chunk.paced is not None]
        return _StageBound(
            first=chunks[0][0],
            passes=tuple(phases),
            network=network,
            turns=paced_us(paced, self._ahead(stage)) if paced else 0.0,
            path=sum(times * (chunk.forward + chunk.backward) for chunk, times in chunks),
            alternating=self._alternating_us(stage, known),
            tail=rest + end,
            other=max(network + end if network else 0.0, issued + update.host_us if self.assembly.hosts else 0.0),
        )

    def _alternating_us(self, stage: int, known: Mapping[Chunk, _ChunkBound]) -> float:
        """Turns of the last stage while backward and forward passes alternate."""
        if stage < self.program.setup.parallel.pp - 1 or self._ahead(stage) is None:
            return 0.0
        # As many forward passes of every chunk come before, and as many backward passes after, as are in flight.
        held = zip(self.program.chunks[stage], self.program.in_flight(stage), strict=True)
        turns = [(known[chunk], self.rounds - count) for chunk, count in held if count < self.rounds]
        paced = [(chunk.paced, count) for chunk, count in turns if chunk.paced is not None]
        if paced:
            return paced_us(paced, 0)
        return sum(count * (chunk.passes[0] + chunk.passes[1]) for chunk, count in turns)

    def _ahead(self, stage: int) -> int | None:
        """Forward passes before passes alternate; None for schedules with another order of turns."""
        if self.schedule.splits_backward or self.schedule.pairs:
            return None
        return sum(self.program.in_flight(stage)) - 1

    def _chunk(self, chunk: Chunk, time: ChunkTime) -> _ChunkBound:
        transfers, held = self.transfers, time.parameters
        gathers = {"never": 0, "once": 1, "every pass": 2 * self.rounds}[transfers.gathers]
        gather = self.assembly.unit_us(transfers.gather(held), held) if gathers else 0.0
        reduce = self.assembly.unit_us(transfers.reduce(held), held) if transfers.overlap else 0.0
        reductions = self.rounds if self.assembly.plan.reduces_always else 1
        network = transfers.units * (gathers * gather + reductions * reduce)
        host = sum(block.host_us for block in time.blocks)
        # Paired passes hide all of their own communication at best.
        passes = tuple(block.compute_us if self.schedule.pairs else block.us for block in time.blocks)
        lost = tuple(1 - speed for speed in self.assembly.speeds(chunk)) if network else (0.0, 0.0, 0.0)
        if transfers.gathers != "every pass":
            return _ChunkBound(passes[0], passes[1], passes, lost, None, reduce, network, host)
        reduced = self._reductions_us(chunk, held) if self.assembly.plan.reduces_always else (0.0, 0.0)
        paced = PacedPasses.of(passes, lost, gather, reduced, transfers.units)
        return _ChunkBound(paced.forward_us, paced.backward_us, passes, lost, paced, reduce, network, host)

    def _reductions_us(self, chunk: Chunk, held: Parameters) -> tuple[float, float]:
        """The reduction of a unit of the backward pass, and that of the last unit to run."""
        late = self.transfers.late(0, 0) if chunk.first else 0.0
        usual, last = (self.transfers.reduce(held, late, is_last) for is_last in (False, True))
        return self.assembly.unit_us(usual, held), self.assembly.unit_us(last, held)


def bound_us(assembly: Assembly) -> float:
    """A time that the simulated step cannot be below.

    Every stage takes its turns one after the other, after the first micro-batch has come to it through the stages
    before, and before the last one has gone back through them; network and host have their own work to do. The first
    micro-batch has to go through all stages and the last one has to go back, and between the two the last stage has
    turns.
    """
    program, schedule = assembly.program, assembly.program.schedule
    pp = program.setup.parallel.pp
    links = [assembly.link_us(stage, stage + 1) for stage in range(pp - 1)]
    stages = _Bound(assembly).stages()
    arrivals = _arrivals(stages, links)
    if schedule.copies > 1:  # the first micro-batch may come from either end
        arrivals = [min(ways) for ways in zip(arrivals, _arrivals(stages, links[::-1])[::-1], strict=True)]
    after = longest = 0.0
    for index, (stage, before) in enumerate(zip(stages, arrivals, strict=True)):
        first, back = stage.first, after + stages[0].tail if index and not schedule.splits_backward else 0.0
        after_turns = max(stage.tail, back)
        # Transfers run during passes and slow them, except those that fit before the first and after the last pass.
        busy = stage.busy_us(max(0.0, stage.network - before - after_turns))
        longest = max(longest, before + max(stage.turns, busy) + after_turns, stage.other)
        after += first.backward + sum(links[index : index + 1])
    path = sum(stage.path for stage in stages) / schedule.copies
    path += 2 * sum(assembly.link_us(*pair) for pair in schedule.crossings(pp, program.setup.parallel.vpp))
    return max(longest, path + stages[-1].alternating + stages[0].tail)


def _arrivals(stages: Sequence[_StageBound], links: Sequence[float]) -> list[float]:
    """When the first micro-batch can be at every stage, if all stages before it take it at once."""
    steps = (stage.first.forward + link for stage, link in zip(stages, links, strict=False))
    return list(accumulate(steps, initial=0.0))


def paced_us(chunks: Sequence[tuple[PacedPasses, int]], ahead: int | None) -> float:
    """All turns of a stage: its chunks, with the turns that each phase of a chunk takes in a step.

    `ahead` forward passes come before forward and backward passes alternate; None where the order is another.
    """
    gather, reduce = min(chunk.gather for chunk, _ in chunks), min(chunk.last_reduce for chunk, _ in chunks)
    # Two units are gathered while the first input of a step is awaited.
    begin = max(chunk.forward.added(max(gather, chunk.gather)) for chunk, _ in chunks)
    if ahead is None:
        return sum(times * chunk.apart_us for chunk, times in chunks) - begin
    pairs = sum(times for _, times in chunks) - ahead
    # As if every turn came after a forward pass; then what turns after a backward pass take longer, at least.
    total = sum(
        times * (chunk.turn_us(True, 0.0, gather) + chunk.turn_us(False, 0.0, gather)) for chunk, times in chunks
    )
    for is_forward, count in ((True, pairs - 1), (False, ahead)):
        total += count * min(
            chunk.turn_us(is_forward, reduce, gather) - chunk.turn_us(is_forward, 0.0, gather) for chunk, _ in chunks
        )
    # After the last unit of a step, nothing is gathered.
    return total - begin - max(chunk.backward.added(chunk.reduce + chunk.last_reduce + gather) for chunk, _ in chunks)
