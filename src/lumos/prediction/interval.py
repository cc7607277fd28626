"""The 80 % interval of a predicted step: how far off it may be, from how far off predictions of measured runs were.

For a described run, the logarithm of measured over predicted time has a variance that is a sum of parts, one for each
thing that makes a run harder to predict, and a width that depends on the framework and the family of GPUs: some are
known from several publications, others from none. Both are fitted on published runs. Which multiples of the resulting
spread hold 80 % of the runs is read off runs whose publication was left out of the fit; they differ upwards and
downwards (calibration/fit_uncertainty.py).

For a change to a traced run, the interval is that of measured changes; for a traced run with other durations, it is the
error of the profiler's cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, hypot, log, sqrt
from typing import Any, NamedTuple

from lumos.costs.costs import host_was_measured
from lumos.costs.sampled_network import SampledNetwork
from lumos.data_files import read_table
from lumos.prediction.approximations import Approximation
from lumos.prediction.carried_over import carried_over, transfer_part
from lumos.prediction.operator_times import operator_times
from lumos.prediction.power import limit_part
from lumos.program.op import UNSEEN
from lumos.setup.gpus import gpu_named
from lumos.setup.setup import Setup
from lumos.step.step import Step

UNKNOWN = "its framework"
STANDS_IN = "is predicted as"  # in notes of rows that name a framework or a precision that is not known
PARTS = (
    "always", "transferred", "other_family", "other_accelerator", "waiting", "experts", "fine_tuning", "assumed",
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


def described_spread(step: Step, notes: Sequence[str] = ()) -> Spread:
    """Of a described run; `notes` are what had to be assumed of it."""
    names = framework_of(step.setup, notes), step.setup.cluster.accelerator.family
    return spread_of(read_table("uncertainty.json"), parts_of(step, len(notes)), *names)


def framework_of(setup: Setup, notes: Sequence[str]) -> str:
    """The framework of a run; none that is known where the stated one had to be replaced."""
    return UNKNOWN if any(STANDS_IN in note for note in notes) else setup.train.framework


def spread_of(table: Mapping[str, Any], parts: Mapping[str, float], framework: str, family: str) -> Spread:
    """The interval of a run that is as hard to predict as its parts, its framework and its GPUs make it."""
    size = size_of(table, parts, framework, family)
    return Spread(exp(table["low"] * size), exp(table["high"] * size))


def size_of(table: Mapping[str, Any], parts: Mapping[str, float], framework: str, family: str) -> float:
    """The typical size of the logarithm of measured over predicted time."""
    variance = sum(table["variance"][name] * value for name, value in parts.items())
    return sqrt(variance) * width_of(table, "frameworks", framework) * width_of(table, "families", family)


def width_of(table: Mapping[str, Any], kind: str, name: str) -> float:
    """How much wider than usual the interval is under a framework or on a family of GPUs; widest if never measured."""
    widest: float = table["unseen"][kind]
    known = table[kind].get(name)
    return widest if known is None else min(widest, float(known["width"]))


def parts_of(step: Step, assumptions: int) -> dict[str, float]:
    """What makes a step hard to predict, each between 0 and about 1; shares are squared, as variances are."""
    setup, model = step.setup, step.costs.model
    gpu = setup.cluster.accelerator
    complete = not model.transferred and model.fallback is None and gpu.tdp_w == gpu_named(gpu.base).tdp_w
    rows = [] if complete else operator_times(step)
    assumptions += setup.train.optimizer == "muon"  # of which no step was measured
    return {
        "always": 1.0,
        "transferred": min(1.0, transfer_part(carried_over(model, rows))),
        "other_family": float(model.gpu.family not in read_table("uncertainty.json")["families"]),
        "other_accelerator": float(gpu.is_other_accelerator),
        "waiting": _unsampled_waiting(step) ** 2,
        "experts": float(setup.model.experts > 0),
        "fine_tuning": float(setup.train.mode != "pretrain"),
        "assumed": float(min(assumptions, 2)) / 2,
        "power": limit_part(gpu, rows, step.us),
    }


def waiting_share(step: Step) -> float:
    """The share of the step in which the busiest stage computes nothing: it waits for network, host or other stages."""
    repeats = step.assembly.program.rounds
    computing = max(
        repeats * sum(block.compute_us for chunk in chunks for block in chunk.blocks) + step.role_us("optimizer", stage)
        for stage, chunks in enumerate(step.chunks)
    )
    return max(0.0, 1 - computing / step.us)


def _unsampled_waiting(step: Step) -> float:
    """What is left of it without what a model file knows: the host, or the collectives of the groups that there are."""
    waits = waiting_share(step)
    if not step.setup.cluster.model:
        return waits
    layout, network = step.assembly.layout, step.costs.network
    links = (layout.link(*stages) for stages in step.structure.links)
    groups = [group for group in (layout.tp, layout.dp, *links) if group.size > 1]
    if isinstance(network, SampledNetwork) and all(map(network.covers, groups)):
        waits = min(waits, step.host_cost)
    return max(0.0, waits - step.host_cost) if host_was_measured(step.setup) else waits


def basis_of(setup: Setup, notes: Sequence[str] = ()) -> str:
    """What the interval of a described run rests on, in a sentence."""
    table = read_table("uncertainty.json")
    framework, gpu = framework_of(setup, notes), setup.cluster.accelerator
    kind = "accelerators" if gpu.is_other_accelerator else "GPUs"
    counts = {
        framework: table["frameworks"].get(framework, {}).get("publications", 0),
        f"{gpu.family} {kind}": table["families"].get(gpu.family, {}).get("publications", 0),
    }
    known = ", ".join(f"{count} source{'s' * (count > 1)} of {name}" for name, count in counts.items() if count)
    lacking = " or ".join(name for name, count in counts.items() if not count)
    if lacking:
        rest = f", and rests on {known}" if known else ""
        return f"no published runs of {lacking}: the 80 % interval is wider{rest}"
    return f"the 80 % interval rests on published runs: {known}"


def changed_spread(traced: Setup, step: Step, without_communication: bool, growth: float = 1.0) -> Spread:
    """Of another configuration of a traced run; wider where the host decides and for what was never measured.

    `growth` is the predicted step over the traced one: measured changes are up to fourfold.
    """
    table, target = read_table("change.json"), step.setup
    host_bound = step.host_share > table["host_bound_share"] or step.host_cost > table["host_cost"]
    spread = table["spread_host_bound" if host_bound else "spread"]
    if target.cluster.chip != traced.cluster.chip:
        spread += table["spread_other_gpu"]
    if target.cluster.accelerator.is_other_accelerator:
        spread += sqrt(read_table("uncertainty.json")["variance"]["other_accelerator"])
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


def dry_spread(
    transferred: float,
    host_share: float,
    power: float = 0.0,
    approximated: Sequence[Approximation] = (),
    sizes_vary: bool = False,
) -> Spread:
    """Of a dry run on one GPU; wider by `transfer_part`, by `limit_part`, by what is approximated, and where the host
    decides. What torch.compile may remove can be gone at the lower end. Tensors whose sizes vary need new memory, which
    only takes time.
    """
    table = read_table("uncertainty.json")
    dry = table["dry_run"]
    variance = dry["always"] + dry["transferred"] * transferred + dry["host"] * float(host_share > 1.0)
    variance += table["variance"]["power"] * power
    variance += dry["unseen"] * sum(part.share for part in approximated if part.kind == UNSEEN) ** 2
    size = dry["scale"] * sqrt(variance)
    removable = sum(part.removable for part in approximated)
    return Spread(exp(-size) * (1 - removable), exp(hypot(size, dry["sizes"] * sizes_vary)))
