"""Failures: how often a job is interrupted, by cause, from published rates or a stated mean time between failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lumos.data_files import read_table
from lumos.setup.reliability import Reliability

HOUR_S = 3600.0
MINUTE_S = 60.0


@dataclass(frozen=True)
class Cause:
    """What interrupts a job, and how often."""

    name: str
    per_hour: float  # of the whole job, while its processes run
    takes_node: bool = False  # the node has to be repaired or replaced
    planned: bool = False  # a checkpoint is written first, so that no work is lost


@dataclass(frozen=True)
class Failures:
    """Everything that interrupts one job.

    >>> failures_of(Reliability(rates="llama3"), gpus=16384, gpus_per_node=8).mtbf_hours
    """

    causes: tuple[Cause, ...]
    detection_s: float
    restart_s: float  # without reading the checkpoint
    source: str

    @property
    def mtbf_hours(self) -> float:
        """Hours of running between two failures of the job; planned stops are no failures."""
        rate = self.per_hour(planned=False)
        return 1 / rate if rate else float("inf")

    def per_hour(self, *, planned: bool, takes_node: bool | None = None) -> float:
        """Interruptions of one sort in an hour."""
        return sum(
            one.per_hour
            for one in self.causes
            if one.planned == planned and takes_node in (None, one.takes_node)
        )  # fmt: skip


def failures_of(reliability: Reliability, gpus: int, gpus_per_node: int) -> Failures:
    """What interrupts a job of so many GPUs; nothing, where the section does not say how often."""
    table = read_table("failures.toml")
    found, source = table["rates"].get(reliability.rates), ""
    causes: tuple[Cause, ...] = ()
    if found is not None:
        causes = _published(found, gpus, gpus_per_node)
        source = f"{reliability.rates}: {' '.join(found['source'].split())}"
    elif reliability.mtbf_gpu_hours:
        causes = (Cause("failures", gpus / reliability.mtbf_gpu_hours, takes_node=True),)
        source = f"stated: {reliability.mtbf_gpu_hours:,.6g} GPU-hours between failures"
    elif reliability.mtbf_job_hours:
        causes = (Cause("failures", 1 / reliability.mtbf_job_hours, takes_node=True),)
        source = f"stated: {reliability.mtbf_job_hours:,.6g} hours between failures of the job"
    usual = found or table["defaults"]
    detection, restart = (
        MINUTE_S * (usual[key] if getattr(reliability, key) is None else getattr(reliability, key))
        for key in ("detection_minutes", "restart_minutes")
    )
    return Failures(causes, detection, restart, source)


def _published(rates: dict[str, Any], gpus: int, gpus_per_node: int) -> tuple[Cause, ...]:
    """Published counts as rates of a job of this size."""
    every = sum(cause["count"] for cause in rates["causes"].values())
    unnoticed = every * rates["detection_minutes"] / 60
    hours = rates["hours"] - unnoticed
    units = {"gpu": gpus / rates["gpus"], "node": gpus / gpus_per_node / (rates["gpus"] / rates["gpus_per_node"])}
    return tuple(
        Cause(
            name, cause["count"] / hours * units[cause["per"]], cause.get("takes_node", False),
            cause.get("planned", False),
        )
        for name, cause in rates["causes"].items()
    )  # fmt: skip
