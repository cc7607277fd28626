"""Approximation: a part of a dry run's step whose kernels are not those of the real run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lumos.costs.kernel_work import base_name
from lumos.program.op import UNCOMPILED, UNSEEN, Op

WORDS = {
    UNCOMPILED: "runs as eager code, because torch.compile could not be followed",
    UNSEEN: "is in kernels that were not seen: estimated from what they read and write",
}


class Approximation(NamedTuple):
    """Operators of one kind, and how much of the time of all kernels they take."""

    kind: str  # uncompiled: eager instead of compiled; unseen: estimated from operands alone
    share: float
    removable: float  # the share that may be gone in the real run: what torch.compile fuses with other kernels
    operators: tuple[str, ...]  # the most expensive ones first

    @property
    def words(self) -> str:
        names = f" ({', '.join(self.operators)})" if self.kind == UNSEEN else ""
        return f"{100 * self.share:.0f} % of the GPU's time {WORDS[self.kind]}{names}"


def approximations(kernels: Sequence[tuple[Op, float, float]]) -> list[Approximation]:
    """What part of these kernels (call, microseconds, FLOPs) is not as in the real run, by kind."""
    total = sum(us for _, us, _ in kernels) or 1.0
    found = []
    for kind in (UNCOMPILED, UNSEEN):
        times: dict[str, float] = {}
        fused = 0.0
        for op, us, flops in kernels:
            if kind in op.options:
                name = next((o.removeprefix(_OF) for o in op.options if o.startswith(_OF)), base_name(op))
                times[name] = times.get(name, 0.0) + us
                fused += us if not flops else 0.0
        if times:
            names = tuple(sorted(times, key=lambda name: -times[name])[:_MOST_NAMES])
            removable = fused / total if kind == UNCOMPILED else 0.0
            found.append(Approximation(kind, sum(times.values()) / total, removable, names))
    return found


_MOST_NAMES = 5
_OF = "of="  # option that names the kernel which an operator is part of
