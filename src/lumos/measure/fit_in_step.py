"""How a whole training step differs from its operators, and what the host pays for one: from steps that were sampled.

The sampled decoders are described by setups, priced with the operators that were just fitted, and simulated. Factors
on matrix and memory-bound kernels then make the steps come out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from lumos.costs.energy import InStepFactors, in_step_factors
from lumos.costs.model_costs import ModelCosts
from lumos.costs.operator_model import CostModel, Floats
from lumos.data_files import read_table
from lumos.errors import LumosError
from lumos.measure.fit_sections import Section, missing
from lumos.measure.sample_file import Row
from lumos.setup.gpus import Gpu, gpu_named
from lumos.setup.setup import Setup
from lumos.step.step import simulate_step

_FEWEST_STEPS = 4
_LARGEST_ERROR_PCT = 10.0
_SANE = (0.5, 2.0)  # of a factor
_HELPFUL = 0.8  # of the error without factors: below, they explain more than noise
_SLOW_US = 1e6
_PRIOR_WEIGHT = 0.002  # of the usual factors, beside one measured step
_AROUND = 1.13  # host time of a decoder of transformers over that of the sampled one, tiny, torch 2.13, 2026-11-16
_PARTS = {"forward", "backward", "optimizer"}
_SIZES = ("layers", "hidden", "ffn", "heads", "seq", "micro_batch", "vocab")


class _Measured(NamedTuple):
    """A sampled step: its time, and what of the predicted one goes with each factor, in microseconds."""

    us: float
    matrix: float
    stream: float
    rest: float


def in_step_section(rows: Sequence[Row], host: Sequence[Row], model: str) -> Section:
    """Factors on isolated costs that make the sampled steps come out; error_pct is that of steps left out.

    `model` is the path of a model file with the operators of the machine. `host` are the rows of tiny steps, which tell
    what passes between two operators of a CPU.
    """
    gpu = gpu_named(model)
    try:
        usual = replace(usual_factors(gpu), launch_gap_us=_gap_us(host, model)) if gpu.is_cpu else usual_factors(gpu)
        steps = [_measured(row, model, usual) for row in rows]
    except (LumosError, KeyError, TypeError) as wrong:
        return Section("in_step", len(rows), None, refused=f"a step cannot be described: {str(wrong).splitlines()[0]}")
    gap = {"launch_gap_us": round(usual.launch_gap_us, 3)}
    found = _factors(steps, usual)
    if found.values is not None:
        return found._replace(values={**found.values, **gap})
    if gpu.is_cpu and usual.launch_gap_us:  # which holds by itself: steps are the sum of their operators and these gaps
        why = found.refused or "no whole steps were sampled"
        said = f"{usual.launch_gap_us:.1f} µs between two operators; factors of 1, because of: {why}"
        return found._replace(values={"matrix": 1.0, "stream": 1.0, **gap, "error_pct": None}, refused="", note=said)
    if not rows:
        usually = "a step is the sum of its operators" if gpu.is_cpu else "the factors of its family are used"
        return missing("in_step", usually)
    return found


def _factors(steps: Sequence[_Measured], usual: InStepFactors) -> Section:
    """What the steps say, and whether to believe it."""
    count = len(steps)
    if count < _FEWEST_STEPS:
        return Section("in_step", count, None, refused=f"fewer than {_FEWEST_STEPS} whole steps")
    matrix, stream = _solved(steps, usual)
    left_out = [_solved([*steps[:i], *steps[i + 1 :]], usual) for i in range(count)]
    errors = [abs(_us(step, *found) / step.us - 1) for step, found in zip(steps, left_out, strict=True)]
    error = 100 * mean(errors)
    alone = 100 * mean(abs(_us(step, usual.matrix, usual.stream) / step.us - 1) for step in steps)
    said = f"matrix {matrix:.3f}, stream {stream:.3f}"
    if error > _LARGEST_ERROR_PCT:
        return Section("in_step", count, None, error, f"{said}: {error:.0f} % off on steps that are left out")
    if not all(_SANE[0] <= factor <= _SANE[1] for factor in (matrix, stream)):
        return Section("in_step", count, None, error, f"{said}: beyond {_SANE[0]:g} to {_SANE[1]:g}")
    if error > _HELPFUL * alone:
        why = f"{said}: {error:.1f} % off on steps that are left out, and {alone:.1f} % without these factors"
        return Section("in_step", count, None, error, why)
    values = {"matrix": round(matrix, 4), "stream": round(stream, 4), "error_pct": round(error, 2)}
    return Section("in_step", count, values, error, note=f"{said}; without them {alone:.1f} % off")


def usual_factors(gpu: Gpu) -> InStepFactors:
    """Those of the GPU's family; on a CPU, operators follow each other without a gap, as fast as they were timed."""
    factors = replace(in_step_factors(gpu), sustained=1.0)
    return replace(factors, matrix=1.0, stream=1.0, launch_gap_us=0.0) if gpu.is_cpu else factors


def host_section(rows: Sequence[Row], model: str) -> Section:
    """What one launch costs the host: the time to issue tiny steps, over the launches that a description counts."""
    if not rows:
        return missing("host", "a typical host is assumed")
    if gpu_named(model).is_cpu:
        return Section("host", len(rows), None, note="none beside a CPU: in_step has what passes between operators")
    whole = _whole(rows)
    if not whole:
        return Section("host", len(rows), None, refused="no step with its forward pass, backward pass and optimizer")
    try:
        each = [_AROUND * sum(row["us"] for row in parts) / _launches(_setup(parts[0], model)) for parts in whole]
    except (LumosError, KeyError, TypeError) as wrong:
        return Section("host", len(rows), None, refused=f"a step cannot be described: {str(wrong).splitlines()[0]}")
    middle = median(each)
    error = 100 * mean(abs(value / middle - 1) for value in each) if len(each) > 1 else None
    usual = float(read_table("frameworks.toml")["pytorch"]["host_us"])
    note = f"{middle:.1f} µs a launch, {usual:g} on a typical host"
    values = {"launch_us": round(middle, 3), "error_pct": None if error is None else round(error, 2)}
    return Section("host", len(rows), values, error, note=note)


def _whole(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of every tiny step that was timed from forward pass to optimizer."""
    steps: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        steps[tuple(row.get(size) for size in (*_SIZES, "dtype"))].append(row)
    return [parts for parts in steps.values() if {row.get("what") for row in parts} >= _PARTS]


def _gap_us(rows: Sequence[Row], model: str) -> float:
    """What passes between two operators of a CPU: Python and autograd, which tiny steps mostly consist of."""
    gaps = []
    for parts in _whole(rows):
        setup, factors = _setup(parts[0], model), usual_factors(gpu_named(model))
        operators, more = (_step_us(setup, replace(factors, launch_gap_us=gap), 0.0) for gap in (0.0, 1.0))
        gaps.append((_AROUND * sum(row["us"] for row in parts) - operators) / (more - operators))
    return max(0.0, median(gaps)) if gaps else 0.0


# ---------------------------------------------------------------------- described steps
def _setup(row: Mapping[str, Any], model: str) -> Setup:
    """A sampled decoder on the machine of a model file."""
    decoder = {key: row[key] for key in ("layers", "hidden", "ffn", "heads", "vocab")}
    train = {"seq": row["seq"], "micro_batch": row["micro_batch"], "microbatches": 1}
    train["precision"] = row.get("dtype", "bf16")
    return Setup.model_validate({"model": decoder, "train": train, "cluster": {"model": model, "gpus": 1}})


def _step_us(setup: Setup, factors: InStepFactors, host_us: float) -> float:
    """The described step, where one launch costs the host so much."""

    def make(model: CostModel, network: Any, factors: InStepFactors, _: float, *host: float) -> ModelCosts:
        return ModelCosts(model, network, factors, host_us, *host)

    return simulate_step(setup, factors, make_costs=make).us


def _launches(setup: Setup) -> float:
    """Of a described step: what it takes in units of a launch so slow that nothing else counts."""
    return _step_us(setup, usual_factors(setup.cluster.accelerator), _SLOW_US) / _SLOW_US


def _measured(row: Row, model: str, usual: InStepFactors) -> _Measured:
    """A step where the GPU decides is linear in both factors."""
    setup = _setup(row, model)
    once, more, longer = (
        _step_us(setup, replace(usual, matrix=matrix, stream=stream), 0.0)
        for matrix, stream in ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0))
    )
    return _Measured(float(row["us"]), more - once, longer - once, 3 * once - more - longer)


def _us(step: _Measured, matrix: float, stream: float) -> float:
    return matrix * step.matrix + stream * step.stream + step.rest


def _solved(steps: Sequence[_Measured], usual: InStepFactors) -> tuple[float, float]:
    """(matrix, stream) of the least squared relative error; where steps do not tell them apart, as usual."""
    rows: Floats = np.array([[step.matrix / step.us, step.stream / step.us] for step in steps])
    wanted: Floats = np.array([1 - step.rest / step.us for step in steps])
    weight = np.sqrt(_PRIOR_WEIGHT)
    held = np.concatenate([wanted, [weight * usual.matrix, weight * usual.stream]])
    found = np.linalg.lstsq(np.vstack([rows, weight * np.eye(2)]), held, rcond=None)[0]
    return float(found[0]), float(found[1])
