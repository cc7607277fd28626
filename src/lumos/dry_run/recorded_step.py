"""Recording: the operators of one training step and the memory they hold, as a dry run saw them. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class TensorInfo(NamedTuple):
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


class RecordedOp(NamedTuple):
    """One call of an aten operator, or of fused attention."""

    name: str  # aten.mul.Tensor; attention.forward, attention.backward
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    phase: str  # forward, backward, optimizer
    module: str = ""  # of the model, in the forward pass
    allocates: bool = False  # it makes a tensor that was not there; a view does not
    options: tuple[str, ...] = ()  # what matters for the price: causal, masked


@dataclass(frozen=True)
class Recording:
    """One step of one process."""

    ops: list[RecordedOp]
    parameters: int
    trained_parameters: int
    tokens: int
    peak_bytes: float  # most that was allocated at once
    peak_phase: str
    held_bytes: dict[str, float]  # at the peak, by category: weights, gradients, optimizer, activations
    assumptions: list[str] = field(default_factory=list)
