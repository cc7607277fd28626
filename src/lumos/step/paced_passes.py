"""Passes at the pace of the network, where every pass gathers the weights of its units: the least that they take.

The unit after next is gathered once a unit has run, behind what the network has left to do. Let unit k be ready at
t[k], compute for c[k], be gathered in g[k] and have its gradients reduced in r[k]. From t[k] on, the network reduces
unit k - 1 and gathers unit k + 1, for n = r[k - 1] + g[k + 1]. Unit k + 1 waits for that and for unit k, which loses
the share l of its speed while the network works:

    t[k + 1] >= t[k] + max(c[k] + l n, n)

So the time of a stage is at least a sum over its units, whatever it waits for besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
