"""What an answer takes over from another GPU: which part of a step rests on samples of which, and how well that goes.

Sampled GPUs were predicted from each other's samples (calibration/fit_transfer.py, docs/transfer.md). The errors of
that, by group of operators, widen the interval of a GPU without samples, and are told with its answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lumos.costs.operator_model import CostModel
from lumos.data_files import read_table
from lumos.prediction.operator_times import OperatorTime
from lumos.program.operators import Operator
from lumos.setup.gpus import gpu_named

GROUPS = ("matmuls", "batched matmuls", "attention", "memory-bound kernels")
_BATCHED = ("bmm", "grouped_gemm")
_MATMULS = ("gemm", "linear_bwd")
_ROUGH = "Its compiler and kernels are not modelled: use the result to compare sizes, not to plan a run"
_WORTH_SAYING = 0.02  # of the operators' time
_UNIT_PCT = 10.0  # of the whole step: an error of this size counts as 1 in the interval


class CarriedOver(NamedTuple):
    """A group of operators without samples of the GPU itself."""

    group: str
    sampled: str  # the GPU whose samples they rest on; "" for a roofline estimate
    share: float  # of the operators' time
    error_pct: float  # of single operators, on GPUs that were left out


def group_of(kind: str) -> str:
    """The group of a kind or family of operators."""
    if kind.startswith("sdpa"):
        return "attention"
    if kind.startswith(_BATCHED):
        return "batched matmuls"
    return "matmuls" if kind.startswith(_MATMULS) else "memory-bound kernels"


def carried_over(model: CostModel, rows: Sequence[OperatorTime]) -> list[CarriedOver]:
    """What rests on samples of another GPU, the largest part first; collectives have no samples to rest on."""
    errors = read_table("transfer.json")["error_pct"]
    operators = [(row.work, row.source, row.ms) for row in rows if isinstance(row.work, Operator)]
    total = sum(ms for *_, ms in operators) or 1.0
    shares: dict[tuple[str, str], float] = defaultdict(float)
    for work, source, ms in operators:
        if source in ("transferred", "roofline"):
            shares[group_of(work.kind), model.sampled_on(work)] += ms / total
    found = []
    for (group, sampled), share in shares.items():
        if not sampled:
            error = errors["roofline"]["any"]
        else:
            known = errors[group]
            alike = gpu_named(sampled).family == model.gpu.family
            error = known["same"] if alike and "same" in known else known["other"]
        found.append(CarriedOver(group, sampled, share, error))
    return sorted(found, key=lambda part: -part.share)


def transfer_part(parts: Sequence[CarriedOver]) -> float:
    """The variance that they add to a step, in units of the square of an error of 10 %; groups err independently."""
    return sum((part.share * part.error_pct / _UNIT_PCT) ** 2 for part in parts)


def transfer_note(gpu: str, model: CostModel, parts: Sequence[CarriedOver]) -> str:
    """A sentence on what rests on what; "" where all that matters was sampled on the GPU, or a model file says it."""
    told = [part for part in parts if part.share >= _WORTH_SAYING and part.sampled]
    if not model.transferred and (not told or model.measured_on is not None):
        return ""
    names = list(dict.fromkeys(Path(part.sampled).name for part in told)) or [Path(model.sampled).name]
    begin = "no samples for" if model.transferred else "not everything was sampled on"
    if model.transferred and gpu in names:
        begin = "no samples with these rates of"
    if model.gpu.is_other_accelerator:
        scaled = f"kernel times of {names[0]} are scaled by its peak rates"
        return f"{gpu} is known only from its data sheet: {scaled}. {_ROUGH}"
    text = f"{begin} {gpu}: costs of {' and '.join(names)} are scaled by its peaks, and the interval is wider"
    if not told:  # all is anchored in a trace
        return text
    first, *others = told
    errors = [f"{first.error_pct:.0f} % in {first.group} ({100 * first.share:.0f} % of this step's operators)"]
    errors += [f"{part.error_pct:.0f} % in {part.group} ({100 * part.share:.0f} %)" for part in others]
    return f"{text}. Sampled GPUs that were left out and predicted so were off by {', '.join(errors)}"
