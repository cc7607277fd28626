"""PlannedRun: what a run is made of, as a prediction has it, and how it fails and recovers: its FaultModel."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from lumos.data_files import read_table
from lumos.described.described import Program
from lumos.errors import OptionError
from lumos.prediction.prediction import Prediction
from lumos.risk.failures import HOUR_S, Failures, failures_of
from lumos.risk.fault_model import ALWAYS, FaultModel
from lumos.setup.reliability import Reliability
from lumos.setup.setup import Setup

_GB = 1e9
_DRY_BYTES = 12.0  # of a parameter of a dry run: fp32 weights and Adam's two moments


@dataclass(frozen=True)
class PlannedRun:
    """A run to a token budget, without anything that interrupts it."""

    gpus: int
    gpus_per_node: int
    replicas: int
    steps: int
    step_s: float
    interval_s: tuple[float, float]  # 80 % of runs are expected within it
    checkpoint_gb: float  # of the whole job

    @classmethod
    def of(cls, found: Prediction) -> PlannedRun:
        """That of a prediction with a token budget, or OptionError."""
        setup, bill = found.setup, found.bill
        if setup is None or bill is None:
            raise OptionError("failures need the setup of a run: name a setup file, or what is to change with --set")
        if bill.steps is None:
            if bill.tariff.tokens is None:
                raise OptionError("how often a run fails depends on how long it is: add --tokens N, as in --tokens 15T")
            raise OptionError("the tokens of a step are not known, and so neither is the number of steps")
        size = _DRY_BYTES * (found.parameters or 0) if found.is_dry else checkpoint_bytes(setup)
        cluster = setup.cluster
        return cls(
            bill.gpus, cluster.accelerator.gpus_per_node, max(setup.parallel.dp, 1), bill.steps, bill.step_s,
            bill.interval_s, size / _GB,
        )  # fmt: skip

    @property
    def work_s(self) -> float:
        return self.steps * self.step_s

    @property
    def replica_gpus(self) -> int:
        return max(self.gpus // self.replicas, 1)


def checkpoint_bytes(setup: Setup) -> float:
    """What a checkpoint holds: weights as the framework keeps them and the optimizer's state, each once.

    Of LoRA, the adapters alone. BLOOM: 2.47 TB, of which 2.3 TB were written; the difference is not published.
    """
    program = Program(setup)
    sharding = program.sharding
    if sharding.frozen:
        stages = (program.stage_parameters(stage) for stage in range(len(program.chunks)))
        trained = sum(sum(sharding.trained(parameters)) for parameters in stages) * setup.parallel.tp
    else:
        trained = float(setup.model.parameters(setup.train.seq))
    return trained * (sharding.weights + sharding.optimizer)


def fault_model_of(reliability: Reliability, job: PlannedRun) -> tuple[FaultModel, Failures]:
    """How a job fails and goes on, and the rates by cause that this rests on."""
    usual = read_table("failures.toml")["defaults"]
    failures = failures_of(reliability, job.gpus, job.gpus_per_node)
    shared = max(usual["storage_gb_s_per_gpu"] * job.gpus, usual["least_storage_gb_s"])
    bandwidth = reliability.storage_gb_s or shared
    size = reliability.checkpoint_gb or job.checkpoint_gb
    write = size / bandwidth if reliability.checkpoint_seconds is None else reliability.checkpoint_seconds
    copy = min(size / (usual["snapshot_gb_s_per_gpu"] * job.gpus), write)
    repair = usual["repair_hours"] if reliability.repair_hours is None else reliability.repair_hours
    node, other = (failures.per_hour(planned=False, takes_node=takes) / HOUR_S for takes in (True, False))
    model = FaultModel(
        node_rate=node,
        other_rate=other,
        planned_rate=failures.per_hour(planned=True) / HOUR_S,
        detection_s=failures.detection_s,
        restart_s=failures.restart_s + write,  # it is read as fast as it is written
        pause_s=copy if reliability.async_checkpoints else write,
        lag_s=write if reliability.async_checkpoints else 0.0,
        spares=ALWAYS if reliability.spare_nodes is None else reliability.spare_nodes,
        repair_s=HOUR_S * repair,
        replicas=job.replicas if reliability.elastic else 0,
        lost_replicas=ceil(job.gpus_per_node / job.replica_gpus) if job.replica_gpus < job.gpus_per_node else 1,
    )
    return model, failures
