"""Notes on a model file: which parts of an answer it does not cover."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lumos.costs.hardware_model import HardwareModel, hardware_model
from lumos.costs.operator_model import CostModel
from lumos.prediction.operator_times import OperatorTime
from lumos.program.operators import Operator
from lumos.setup.setup import Setup

_WORTH_SAYING = 0.02  # share of the operators' time


def machine_notes(setup: Setup, model: CostModel, rows: Sequence[OperatorTime]) -> list[str]:
    """One sentence for every part of a step that the model file of its setup does not cover."""
    if not setup.cluster.model:
        return []
    machine, name = hardware_model(setup.cluster.model), Path(setup.cluster.model).name
    found = [*_unsampled(name, model, rows), *_beyond(name, model, rows)]
    if setup.cluster.gpus > 1:
        found += _network(name, machine, setup)
    return found


def _operators(rows: Sequence[OperatorTime]) -> list[tuple[Operator, float]]:
    return [(row.work, row.ms) for row in rows if isinstance(row.work, Operator)]


def _unsampled(name: str, model: CostModel, rows: Sequence[OperatorTime]) -> list[str]:
    """Families that the shipped models, or a roofline, stand in for."""
    operators = _operators(rows)
    other = [(work.kind, ms) for work, ms in operators if not model.has_samples_of(work)]
    share = sum(ms for _, ms in other) / max(sum(ms for _, ms in operators), 1e-12)
    if share < _WORTH_SAYING:
        return []
    kinds = list(dict.fromkeys(kind for kind, _ in sorted(other, key=lambda item: -item[1])))
    listed = ", ".join(kinds[:4]) + (" and others" if len(kinds) > 4 else "")
    time = f"{100 * share:.0f} % of the operators' time"
    return [f"{name} has no samples of {listed}: {time} has the package's own prices"]


def _beyond(name: str, model: CostModel, rows: Sequence[OperatorTime]) -> list[str]:
    """Shapes larger or smaller than those sampled."""
    operators = _operators(rows)
    far = [(work, ms) for work, ms in operators if not model.covers(work)]
    share = sum(ms for _, ms in far) / max(sum(ms for _, ms in operators), 1e-12)
    if share < _WORTH_SAYING:
        return []
    work = max(far, key=lambda item: item[1])[0]
    shape = " × ".join(map(str, work.shape))
    return [
        f"{100 * share:.0f} % of the operators' time is of shapes far from those sampled for {name}, as {work.kind} of "
        f"{shape}: their prices are extrapolated"
    ]


def _network(name: str, machine: HardwareModel, setup: Setup) -> list[str]:
    facts, node = machine.section("network"), setup.cluster.gpus_per_node
    if facts is None:
        return [f"{name} has no samples of collectives: they have the prices of the GPU's links and fabric"]
    if machine.gpu.name == setup.cluster.gpu and facts.get("gpus_per_node") != node:
        sampled = str(facts.get("gpus_per_node"))[:20]
        return [
            f"{name} has collectives of nodes with {sampled} GPUs, and these have {node}: they have the prices of the "
            "GPU's links and fabric"
        ]
    return []
