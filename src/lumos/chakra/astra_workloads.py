"""What ASTRA-sim is given of a run: its ranks as they are, as they are written, and the network between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lumos.chakra.astra_comparison import AstraEstimate
from lumos.chakra.astra_costs import at_astra_costs, compensated
from lumos.chakra.astra_estimate import estimated
from lumos.chakra.astra_files import Dimension, described_network, needs_parting, traced_network
from lumos.chakra.communication import plan_communication
from lumos.chakra.folded_ranks import other_ranks, recorded_workload
from lumos.chakra.rank_files import Workload
from lumos.chakra.step_tasks import StepTasks
from lumos.graph.rules.build import Execution
from lumos.prediction.described_run import DescribedRun
from lumos.program.layout import layout_of
from lumos.program.rank_places import RankPlaces
from lumos.setup.setup import Setup
from lumos.step.step import prices_of


class AstraWorkload(NamedTuple):
    """A run as it is, as it is written for ASTRA-sim, and the links that are written with it."""

    own: Workload
    written: Workload
    dimensions: list[Dimension]
    warnings: Sequence[str] = ()

    @property
    def estimate(self) -> AstraEstimate | None:
        """How long ASTRA-sim will take for the files."""
        return estimated(self.own, self.written, self.dimensions)


def of_recorded(execution: Execution) -> AstraWorkload:
    """A traced run: written with transfers over the links that the network file states, not as they were recorded."""
    plan, world = plan_communication(execution, closed=True), len(execution.trace.ranks)
    dimensions = traced_network(execution, needs_parting(plan.group_file(), world))
    written = recorded_workload(at_astra_costs(execution, plan, dimensions[0]), plan)
    own, told = recorded_workload(execution, plan), compensated(written, dimensions)
    return AstraWorkload(own, told, dimensions, (*plan.warnings, *other_ranks(execution)))


def of_repeated(execution: Execution, workload: Workload, setup: Setup | None = None) -> AstraWorkload:
    """A job of which one rank was recorded, in a trace, or in a dry run on the cluster of a setup."""
    world = workload.places.world
    parted = needs_parting(workload.groups(), world)
    if setup is None:
        dimensions = traced_network(execution, parted, world)
    else:
        dimensions = described_network(layout_of(setup), prices_of(setup).network, parted)
    return AstraWorkload(workload, compensated(workload, dimensions), dimensions)


def of_described(run: DescribedRun, workload: Workload) -> AstraWorkload:
    """A run that a setup describes."""
    parted = needs_parting(workload.groups(), workload.places.world)
    dimensions = described_network(run.step.assembly.layout, run.step.prices.network, parted)
    return AstraWorkload(workload, compensated(workload, dimensions), dimensions)


def described_workload(run: DescribedRun, operators: bool = False) -> Workload:
    """The tasks of all ranks of a run that a setup describes."""
    found, parallel = StepTasks(run, operators), run.step.setup.parallel
    places = RankPlaces.of_setup(parallel, run.step.assembly.layout.schedule.copies)
    return Workload(places, tuple(tuple(found.tasks(stage)) for stage in range(parallel.pp)))
