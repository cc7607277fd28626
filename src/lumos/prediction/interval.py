"""The 80 % interval of a predicted step: how far off it may be, from how far off predictions of measured runs were.

For a described run, the variance of the logarithm of measured over predicted time is a sum of parts, one for each
thing that makes a run harder to predict. The parts are fitted on published runs, each source held out in turn
(calibration/fit_uncertainty.py), and scaled so that 80 % of the runs are inside. For a change to a traced run, the
interval is that of measured changes; for a traced run with other durations, it is the error of the profiler's cost.
"""

from __future__ import annotations

from math import exp, log, sqrt
from typing import NamedTuple

from lumos.cost.sampled_network import SampledNetwork
from lumos.data_files import read_table
from lumos.prediction.carried_over import carried_over, transfer_part
from lumos.prediction.operator_times import operator_times
from lumos.prediction.power import limit_part
from lumos.program.operators import Group
from lumos.setup.gpus import gpu_named
from lumos.setup.setup import Setup
from lumos.step.step import Step, host_was_measured

PARTS = (
    "always", "transferred", "other_family", "nodes", "spread_tensor", "pipeline", "host", "experts", "assumed",
    "power",
)  # fmt: skip


class Spread(NamedTuple):
    """Both ends of an interval, as factors on the predicted time."""

    low: float
    high: float

    @staticmethod
    def around(factor: float) -> Spread:
        """As likely too short by a factor as too long."""
        return Spread(1 / factor, factor)

    def of(self, step_ms: float) -> tuple[float, float]:
        return self.low * step_ms, self.high * step_ms


def described_spread(step: Step, assumptions: int = 0) -> Spread:
    """Of a described run, some of whose values had to be assumed."""
    table = read_table("uncertainty.json")
    variance = sum(table["variance"][name] * value for name, value in parts_of(step, assumptions).items())
    return Spread.around(exp(table["scale"] * sqrt(variance)))


def parts_of(step: Step, assumptions: int) -> dict[str, float]:
    """What makes a step hard to predict, each between 0 and about 1."""
    setup = step.setup
    gpus, node = setup.cluster.gpus, setup.cluster.gpus_per_node
    model, gpu = step.prices.model, setup.cluster.accelerator
    complete = not model.transferred and model.fallback is None and gpu.tdp_w == gpu_named(gpu.base).tdp_w
    rows = [] if complete else operator_times(step)
    spread = setup.parallel.tp > max(node, setup.cluster.accelerator.nvlink_domain)
    return {
        "always": 1.0,
        "transferred": transfer_part(carried_over(model, rows)),
        "other_family": float(model.gpu.family not in ("hopper", "ampere", "blackwell")),
        "nodes": float(gpus > node),
        "spread_tensor": float(spread and not _is_sampled(step, step.assembly.layout.tp)),
        "pipeline": float(setup.parallel.pp > 1),
        "host": 0.0 if host_was_measured(setup) else min(1.0, step.host_share),  # fitted on hosts that nobody sampled
        "experts": float(setup.model.experts > 0),
        "assumed": float(min(assumptions, 2)) / 2,
        "power": limit_part(gpu, rows, step.us),
    }


def _is_sampled(step: Step, group: Group) -> bool:
    """Whether collectives were timed on the links that a group uses."""
    network = step.prices.network
    return isinstance(network, SampledNetwork) and network.covers(group)


def changed_spread(traced: Setup, step: Step, without_communication: bool, growth: float = 1.0) -> Spread:
    """Of another configuration of a traced run; wider where the host decides and for what was never measured.

    `growth` is the predicted step over the traced one: measured changes are up to fourfold.
    """
    table, target = read_table("change.json"), step.setup
    host_bound = step.host_share > table["host_bound_share"] or step.host_cost > table["host_cost"]
    spread = table["spread_host_bound" if host_bound else "spread"]
    if target.cluster.chip != traced.cluster.chip:
        spread += table["spread_other_gpu"]
    unmeasured = ("pp", "vpp", "cp", "ep")
    if any(getattr(traced.parallel, way) != getattr(target.parallel, way) for way in unmeasured):
        spread += table["spread_other_parallelism"]
    elif target.cluster.gpus > 1 and (without_communication or _collectives(traced) != _collectives(target)):
        spread += table["spread_network"]
    spread += table["spread_growth"] * max(0.0, abs(log(max(growth, 1e-9))) - log(4))
    return Spread.around(1 + spread)


def _collectives(setup: Setup) -> tuple[int, int, bool]:
    """What decides which kinds of collectives a run has."""
    return setup.parallel.tp, setup.parallel.zero, setup.parallel.dp > 1


def scaled_spread(profiler_error_pct: float) -> Spread:
    """Of a traced run with other durations: only the profiler's cost is not known exactly."""
    error = profiler_error_pct / 100
    return Spread(1 - error, 1 + error)


def dry_spread(transferred: float, host_share: float, power: float = 0.0) -> Spread:
    """Of a dry run on one GPU; wider by `transfer_part`, by `limit_part`, and where the host decides."""
    table = read_table("uncertainty.json")
    parts = table["variance"]
    variance = table["dry_run"] + parts["transferred"] * transferred + parts["host"] * float(host_share > 1.0)
    variance += parts["power"] * power
    return Spread.around(exp(table["scale"] * sqrt(variance)))
