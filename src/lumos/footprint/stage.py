"""StageMemory: what the ranks of one pipeline stage hold at their worst moment."""

from __future__ import annotations

from typing import NamedTuple


class StageMemory(NamedTuple):
    """Bytes at the moment of the peak; the parts sum to it."""

    phase: str  # loss, backward, last layer, optimizer
    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    framework: float

    @property
    def peak(self) -> float:
        """As torch.cuda.max_memory_allocated reports it."""
        return sum(self[1:])
