"""RecordedOp: one call of an operator as it ran, in a dry run or in a trace, with the tensors that it worked on."""

from __future__ import annotations

from typing import NamedTuple

UNCOMPILED = "uncompiled"  # option of an operator that torch.compile would fuse with others on a GPU
UNSEEN = "unseen"  # option of an operator whose kernel is not known, only what it reads and writes


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
    """One call of an aten operator, of fused attention, of a collective, or a wait of the host."""

    name: str  # aten.mul.Tensor; attention.forward; all_reduce; cudaStreamSynchronize
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    phase: str  # forward, backward, optimizer
    module: str = ""  # of the model
    allocates: bool = False  # it makes a tensor that was not there; a view does not
    options: tuple[str, ...] = ()  # what matters for the price: causal, masked, tf32, cpu, h2d
    stream: int = 0
    group: tuple[int, ...] = ()  # ranks of a collective
    after: tuple[int, ...] = ()  # places in the step of operators on other streams that it waits for
