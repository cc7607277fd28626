"""Reliability: what interrupts a training run, and how it goes on. The section `[reliability]` of a setup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from lumos.data_files import read_table
from lumos.setup.sections import Section

Hours = Annotated[float, Field(gt=0, le=1e12)]
Minutes = Annotated[float, Field(ge=0, le=1e6)]

RATES = tuple(read_table("failures.toml")["rates"])

if TYPE_CHECKING:
    Rates = str
else:
    Rates = Literal[("", *RATES)]


class Reliability(Section):
    """Failures, checkpoints, spares. A value that is None is that of the named rates, or of `data/failures.toml`.

    >>> Reliability(rates="llama3", spare_nodes=4).repair_hours
    """

    rates: Rates = ""  # published rates by component; "": none
    mtbf_gpu_hours: Hours | None = None  # GPU-hours between two failures: those of a job come GPUs times as often
    mtbf_job_hours: Hours | None = None  # hours between two failures of this job, whatever its size
    detection_minutes: Minutes | None = None  # from a failure until it is noticed
    restart_minutes: Minutes | None = None  # from there to the next step, without reading the checkpoint
    checkpoint_gb: Annotated[float, Field(gt=0, le=1e9)] | None = None  # of the whole job; None: weights and optimizer
    storage_gb_s: Annotated[float, Field(gt=0, le=1e9)] | None = None  # of the whole job, to write and to read
    checkpoint_seconds: Annotated[float, Field(ge=0, le=1e6)] | None = None  # to write one, in place of gb / gb_s
    checkpoint_minutes: Annotated[float, Field(gt=0, le=1e7)] | None = None  # training between two; None: the best
    async_checkpoints: bool = False  # training waits for a copy in host memory alone, and goes on while that is written
    spare_nodes: Annotated[int, Field(ge=0, le=1 << 20)] | None = None  # that wait for a failure; None: always one more
    repair_hours: Annotated[float, Field(ge=0, le=1e5)] | None = None  # until a failed node is back
    elastic: bool = False  # without a spare, train on with fewer replicas until the node is back

    DERIVED: ClassVar[tuple[str, ...]] = ("rates", "mtbf_gpu_hours", "mtbf_job_hours", "checkpoint_minutes")

    def stated(self) -> dict[str, Any]:
        """The values that say something."""
        return {key: value for key, value in super().stated().items() if value is not None and value != ""}

    @property
    def is_stated(self) -> bool:
        """Whether it says what fails: without that, the rest of the section has no effect."""
        return bool(self.rates or self.mtbf_gpu_hours or self.mtbf_job_hours)
