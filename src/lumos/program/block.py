"""Block: the operators that a rank issues for one phase of one layer, in order, and the tensors that stay alive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lumos.program.operators import Collective, Operator


class BlockOp(NamedTuple):
    """One operator or collective of a block.

    A collective that nobody waits for runs beside the operators after it, until one of them joins it.
    """

    work: Operator | Collective
    launches: int = 1  # kernels, and so launches by the host
    waits: bool = True  # a collective: the next operator needs its result
    joins: bool = False  # an operator: first wait for every collective that was left running
    syncs: bool = False  # the host waits for the GPU before it issues this, and so runs no longer ahead of it
    name: str = ""
    saves: float = 0.0  # bytes that stay alive for the backward pass because of it
    weight_gradient: bool = False  # may be computed later, by schedules that split the backward pass


Block = list[BlockOp]
"""The operators of one phase of one layer."""


def saved_bytes(block: Iterable[BlockOp]) -> float:
    """What stays alive after a forward block until its backward pass."""
    return sum(op.saves for op in block)


def input_gradients(block: Block) -> Block:
    """A backward block without what may be computed later."""
    return [op for op in block if not op.weight_gradient]


def weight_gradients(block: Block) -> Block:
    """The part of a backward block that may be computed later."""
    return [op for op in block if op.weight_gradient]
