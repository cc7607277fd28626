"""Op: one call that a rank makes, and Block: the calls of one phase of a layer or of a whole step, in order.

Setups, traces and dry runs all state what a rank runs as Ops. Needs no other package, as dry runs write Ops in the
user's process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from lumos.program.operators import Collective, Operator

UNCOMPILED = "uncompiled"  # option of an operator that torch.compile would fuse with others on a GPU
BESIDE, EXCHANGE = 1, 2  # streams of a setup: collectives beside operators, and exchanges between experts
UNSEEN = "unseen"  # option of an operator whose kernel is not known, only what it reads and writes


class Tensor(NamedTuple):
    """One operand, as the kernel sees it."""

    shape: tuple[int, ...]
    dtype: str  # bf16, fp16, fp32, int64, bool …
    strides: tuple[int, ...] = ()
    element: int = 2  # bytes

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def distinct(self) -> int:
        """Elements that differ in memory: a broadcast dimension has stride 0."""
        count = 1
        for size, stride in zip(self.shape, self.strides or self.shape, strict=True):
            count *= size if stride else 1
        return count

    @property
    def bytes(self) -> float:
        """What is read or written of it at least."""
        return float(self.distinct * self.element)

    @property
    def is_dense(self) -> bool:
        """Its elements fill a block of memory, in whatever order of dimensions."""
        expected = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True


class Measured(NamedTuple):
    """What a trace shows of a call: means over equal places of like blocks."""

    us: float  # GPU time without the gap before it
    kernels: float = 1.0
    before: Op | None = None  # the call as traced, if it was rewritten to another setup
    like: str = ""  # kernel class whose growth it follows if it has no shapes (compiled code, CUDA graphs)


class Op(NamedTuple):
    """One call of one rank: a kernel, a copy, a collective, or work of the host only.

    Calls on stream 0 run one after the other, collectives included. A call on another stream begins no sooner than
    stream 0 is done with those before it.
    """

    name: str  # aten.mul.Tensor; attention.forward; all_reduce; cudaStreamSynchronize; of a setup, what it is for
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    phase: str = ""  # forward, backward, optimizer: of recorded calls, whose host cost depends on it
    module: str = ""  # of the model
    allocates: bool = False  # it makes a new tensor; otherwise it is a view, and runs no kernel
    options: tuple[str, ...] = ()  # what else the cost depends on: causal, masked, tf32, cpu, h2d
    stream: int = 0
    ranks: tuple[int, ...] = ()  # of a recorded collective
    after: tuple[int, ...] = ()  # places of calls on other streams that it waits for; below 0, counted from its own
    work: Operator | Collective | None = None  # of a setup; otherwise the tensors determine the cost
    launches: float = 1.0  # kernels that the host launches
    calls: float = 1.0  # fractional only if a trace's blocks differ
    syncs: bool = False  # the host waits for the GPU before it issues this, and no longer runs ahead
    saves: float = 0.0  # bytes that it keeps for the backward pass
    weight_gradient: bool = False  # schedules that split the backward pass may run it later
    role: str = ""  # layout: added by sharding, tensor parallelism or checkpointing; peer: once per other rank
    measured: Measured | None = None

    @property
    def kind(self) -> str:
        """The kind of its work, as far as a setup states it."""
        return self.work.kind if self.work is not None else ""


Ops = list[Op]
"""Calls of a part of a block, in order."""


class Block(NamedTuple):
    """Calls in the order in which the host issues them."""

    ops: tuple[Op, ...]
    host_us: float | None = None  # measured for the whole block; None: the sum over its calls


def saved_bytes(ops: Iterable[Op]) -> float:
    """What a forward block keeps until its backward pass."""
    return sum(op.saves for op in ops)


def part_of(ops: Ops, belongs: Sequence[bool]) -> Ops:
    """The calls of a block that belong to a part, with those of their waits that are in it."""
    number = list(accumulate(belongs, initial=0))  # of calls of the part that come before

    def moved(at: int, op: Op) -> Op:
        waited = (at + other if other < 0 else other for other in op.after)
        return op._replace(after=tuple(number[other] - number[at] for other in waited if belongs[other]))

    return [moved(at, op) if op.after else op for at, op in enumerate(ops) if belongs[at]]
