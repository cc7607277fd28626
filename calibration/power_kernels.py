"""Kernels that occupy as many multiprocessors as they have programs, as those of collectives do."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spinning(target, rounds):
    """Arithmetic that waits for itself, and never for memory."""
    value = tl.program_id(0).to(tl.float32)
    for _ in range(rounds):
        value = value * 0.999 + 0.5
    tl.store(target + tl.program_id(0), value)


@triton.jit
def copying(source, target, size, share, block: tl.constexpr):
    """Each program copies its share."""
    begin = tl.program_id(0).to(tl.int64) * share
    for offset in range(0, share, block):
        index = begin + offset + tl.arange(0, block)
        inside = index < size
        tl.store(target + index, tl.load(source + index, mask=inside), mask=inside)
