"""How torchtitan cuts a model into pipeline stages, as parallel.schedule, vpp and stage_layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from lumos.setup.importers.imported import Findings
from lumos.setup.messages import one_of, shown
from lumos.setup.sections import as_count

_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "zero-bubble",
    "zbvzerobubble": "zero-bubble",
    "dualpipev": "zero-bubble",
}
_NAMES = ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_LAYER = re.compile(r"layers\.(\d{1,5})")
_PARTS = ("parallelism", "training", "experimental")


def put_stages(found: Findings, given: Mapping[str, Any], per_stage: int, weighs_ends: bool) -> None:
    """Put the schedule, the virtual stages and the layers of each, for a run with a pipeline.

    `weighs_ends`: newer versions give the first and the last stage fewer layers, for the embedding and the output.
    """
    values = found.values
    layers, pp = as_count(values.get("model.layers")), as_count(values.get("parallel.pp"))
    stated = _given(given, "pipeline_parallel_schedule") or "1F1B"
    schedule = _SCHEDULES.get(str(stated).casefold(), "")
    if not schedule:
        found.notes.append(f"pipeline_parallel_schedule = {shown(stated)} is not understood: use {one_of(_NAMES)}")
        schedule = "1f1b"
    if schedule == "zero-bubble":
        found.notes.append(f"pipeline_parallel_schedule = {shown(stated)}: its virtual stages are not modelled")
    values["parallel.schedule"] = schedule
    ends = [_less(given, end) for end in ("first", "last")] if weighs_ends else [0, 0]
    stages = _stated(given, layers)
    if not stages and layers:
        looped = schedule == "interleaved"
        count = -(-(layers + sum(ends)) // per_stage) if per_stage else pp * (2 if looped else 1)
        stages = _cut(layers, count if looped else pp, *ends)
    if len(stages) % pp or (len(stages) > pp and schedule != "interleaved") or any(layer < 0 for layer in stages):
        found.notes.append(f"{len(stages)} pipeline stages for {pp} ranks: taken as even as it goes")
        stages = []
    if schedule == "interleaved":
        values["parallel.vpp"] = len(stages) // pp if stages else 2
    if stages and layers and sum(stages) == layers and not _even(stages):
        values["parallel.stage_layers"] = stages


def _even(stages: list[int]) -> bool:
    return min(stages) == max(stages)


def _given(given: Mapping[str, Any], key: str) -> Any:
    return next((given[f"{part}.{key}"] for part in _PARTS if f"{part}.{key}" in given), None)


def _less(given: Mapping[str, Any], end: str) -> int:
    stated = given.get(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1)
    return stated if isinstance(stated, int) and not isinstance(stated, bool) and 0 <= stated <= 1000 else 1


def _stated(given: Mapping[str, Any], layers: int) -> list[int]:
    """Layers of every stage where the file lists its parts or the points between them."""
    parts = _given(given, "module_fqns_per_model_part")
    if isinstance(parts, list) and parts and all(isinstance(part, list) for part in parts):
        return [sum(bool(_LAYER.fullmatch(str(name))) for name in part) for part in parts]
    points = _given(given, "pipeline_parallel_split_points")
    words = points.split(",") if isinstance(points, str) else points if isinstance(points, list) else []
    firsts = [int(match[1]) for word in words if (match := _LAYER.fullmatch(str(word).strip()))]
    edges = [0, *firsts, layers]
    return [after - before for before, after in pairwise(edges)] if firsts and layers else []


def _cut(layers: int, count: int, first: int, last: int) -> list[int]:
    """As many each as it goes, counting the ends as layers of the first and the last stage."""
    if not 0 < count <= layers:
        return []
    each, extra = divmod(layers + first + last, count)
    stages = [each + (index < extra) for index in range(count)]
    stages[0] -= first
    stages[-1] -= last
    return stages
