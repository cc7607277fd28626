"""Scale: a what-if on durations, as in `--scale compute=0.5 --scale kernel:gemm=2`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lumos.arguments import check_fields, checks_arguments
from lumos.errors import OptionError
from lumos.graph.graph import Floats
from lumos.graph.rules.build import Execution
from lumos.patterns import Pattern
from lumos.trace.names import Kind

_KINDS = {"compute": Kind.COMPUTE, "comm": Kind.COMM, "memcpy": Kind.COPY, "cpu": Kind.CPU}
NAMES = "compute, comm, memcpy, cpu, kernel:REGEX"

_MOST = 1e6  # a factor
_LONGEST_NS = 1e18  # all tasks together: beyond, times do not fit into nanoseconds


@dataclass(frozen=True)
class Scale:
    """One factor on the durations of some tasks."""

    what: str
    factor: float

    @staticmethod
    @checks_arguments
    def parse(text: str) -> Scale:
        """From WHAT=FACTOR."""
        what, found, number = text.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not found or not 0 <= factor <= _MOST:
            raise OptionError(
                f"--scale {text}: write WHAT=FACTOR with a factor from 0 to a million, as in compute=0.5 ({NAMES})"
            )
        return Scale(what, factor)

    def __post_init__(self) -> None:
        check_fields(self)
        text = f"--scale {self.what}={self.factor:g}"
        if not 0 <= self.factor <= _MOST:
            raise OptionError(f"{text}: the factor must be from 0 to a million")
        if self.what not in _KINDS and not self.what.startswith("kernel:"):
            raise OptionError(f"{text}: {self.what!r} is not known; use one of {NAMES}")
        if self.what.startswith("kernel:"):
            Pattern.parse(self.what.removeprefix("kernel:"), text)

    def applies_to(self, execution: Execution) -> np.ndarray:
        """The nodes that this scales."""
        if self.what in _KINDS:
            return np.equal(execution.graph.kind, _KINDS[self.what])
        pattern = Pattern.parse(self.what.removeprefix("kernel:"), f"--scale {self.what}")
        trace, nodes = execution.trace, execution.nodes
        named = pattern.is_in(trace.names)
        hit = np.zeros(len(execution.graph), bool)
        hit[: len(nodes)] = nodes.on_gpu & named[trace.name[nodes.row]]
        if not hit.any():
            raise OptionError(f"--scale {self.what}={self.factor:g}: no kernel of this trace has such a name")
        return hit


def scaled_durations(execution: Execution, duration: Floats, scales: list[Scale]) -> Floats:
    """Durations with every scale applied, one after the other."""
    scaled = duration.copy()
    for scale in scales:
        scaled[scale.applies_to(execution)] *= scale.factor
        if scaled.sum() > _LONGEST_NS:
            raise OptionError(f"--scale {scale.what}={scale.factor:g}: that takes decades; use a smaller factor")
    return scaled
