"""StatedVariability: how much times of a run differ, as its user states it. The section `[variability]` of a setup."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lumos.setup.sections import Section

Sigma = Annotated[float, Field(ge=0, le=2)]


class StatedVariability(Section):
    """Standard deviations of the logarithm of a time, so 0.02 for 2 %. None: as measured, or of the package's data.

    >>> StatedVariability(gpu=0.03, slow=("rank=7,factor=1.3",)).stated_sigmas
    {'gpu': 0.03}
    """

    gpu: Sigma | None = None  # one GPU against the typical one, the whole run
    step: Sigma | None = None  # one GPU in one step, against its own usual
    kernel: Sigma | None = None  # one pass against the rest of its step
    microbatch: Sigma | None = None  # work of one micro-batch of one replica: lengths of sequences
    collective: Sigma | None = None  # one collective
    host: Sigma | None = None  # the host's work for one pass
    job: Sigma | None = None  # all ranks of one step together
    slow: Annotated[tuple[str, ...], Field(strict=False, max_length=1 << 12)] = ()  # as --slow takes them

    @property
    def stated_sigmas(self) -> dict[str, float]:
        """By name."""
        return {key: value for key, value in self.__dict__.items() if isinstance(value, float)}
