"""The learned model: statistics of the tasks of many steps, from which no recorded step can be read off.

A step is a sequence of passes, a pass a sequence of blocks (layers), a block a number of tasks of every state. For each
state the model has how many there are in a block, the distributions of their place in the block, of their times and
sizes, and how these go together. There are no names but those of `vocabulary`, no order of single tasks, and no
recorded value: distributions are smoothed, and means are blurred the more the fewer values they rest on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from lumos.errors import InputError
from lumos.files import read_file, whole_file
from lumos.graph.graph import Floats
from lumos.synthesis.observe import Wait
from lumos.synthesis.vocabulary import KINDS

VERSION = 1
COLUMNS = ("place", "work", "call", "delay", "busy", "bytes")  # of a joint distribution; times in microseconds
LEVELS = (0.0, 0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98, 1.0)  # of the quantiles that are kept
SCHEDULES = ("1f1b", "gpipe")  # that are recognised, and generated
MOST_DEVIATION = 20.0  # of logarithms of times; at more, times of one run would not fit into numbers
PHASES = ("forward", "backward", "optimizer")
PLACES = ("first", "middle", "last")
_LENGTHS = {0, len(LEVELS)}
_MOST_BYTES = 1 << 26
_ADVICE = "name a file that `lumos synthesise --save` wrote"

_Number = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]
_Factor = Annotated[float, msgspec.Meta(ge=1e-3, le=1e3)]
_Deviation = Annotated[float, msgspec.Meta(ge=0.0, le=MOST_DEVIATION)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Some = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class Marginal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The distribution of one column: a share of zeros, quantiles of the rest at `LEVELS`, and the mean of all."""

    zero: _Share
    mean: _Number
    quantiles: list[_Number]

    def at(self, levels: Floats) -> Floats:
        """Values at these levels, scaled so that their mean is that of the distribution."""
        if not self.quantiles:
            return np.zeros(len(levels))
        inside = np.clip((levels - self.zero) / max(1.0 - self.zero, 1e-9), 0.0, 1.0)
        values = np.exp(np.interp(inside, LEVELS, np.log(np.maximum(self.quantiles, 1e-9))))
        values = np.where(levels < self.zero, 0.0, values)
        total = float(values.sum())
        return values * (self.mean * len(values) / total) if total > 0 else values


class StateModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tasks of one state in blocks of one kind."""

    kind: str
    stream: Annotated[int, msgspec.Meta(ge=-1, le=1000)]
    group: Annotated[int, msgspec.Meta(ge=-1, le=1000)]
    waits: list[Wait]
    pause: bool
    count: _Number  # in a block
    per_layer: _Number  # of it, what every layer adds; for blocks that span all layers
    depth: _Share  # in which of its blocks it is: the mean, from 0 (the first) to 1 (the last), …
    depth_spread: _Share  # … and the standard deviation
    operators: _Number  # of the host before each
    columns: dict[str, Marginal]
    correlation: list[list[Annotated[float, msgspec.Meta(ge=-1.0, le=1.0)]]]  # of normal scores, as COLUMNS


class BlockModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks of one kind: of a phase, at a place in the pass, of the last micro-batch or of another one."""

    phase: str
    last: bool
    place: str
    states: list[StateModel]


class RoleModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ranks with the same work do; each stage of a pipeline is a role of its own."""

    repeated: list[str]  # passes that micro-batches repeat
    micro_batches: _Some
    final: list[str]  # passes after them
    layers: dict[str, _Count]  # attentions in a pass, by phase
    start_us: _Number  # when its ranks begin a step, after the earliest rank
    blocks: list[BlockModel]


class RankModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What distinguishes a rank in all steps from others of its role."""

    lead: Marginal  # microseconds of a step that pass before its first task
    host: _Factor  # how much longer its host takes, and its kernels
    gpu: _Factor


class Pipeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pipeline: each stage is a role, and messages go between neighbours."""

    stages: Annotated[int, msgspec.Meta(ge=2, le=10_000)]
    schedule: str
    columns: dict[str, Marginal]  # of a message, or of the host before it


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Standard deviations: of logarithms of host and GPU time over ranks, of both over steps; of when ranks start."""

    host: _Deviation
    gpu: _Deviation
    step: _Deviation
    start_us: _Number


class Learned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much a model was learned from."""

    jobs: _Count
    steps: _Count
    tasks: _Count


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that was learned."""

    version: int
    learned_from: Learned
    ranks: _Some
    world: _Some
    steps: _Some
    micro_batches: _Some
    layers: _Count
    streams: Annotated[int, msgspec.Meta(ge=1, le=1000)]
    groups: list[tuple[_Some, _Some]]  # size and stride
    latency_us: _Number
    shapes: bool
    spread: Spread
    role_of_rank: list[_Count]
    by_rank: list[RankModel]
    pipeline: Pipeline | None
    roles: list[RoleModel]


def save_model(path: Path, model: Model) -> None:
    """Write a model as JSON."""
    with whole_file(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(model), indent=1))


def is_model(path: Path) -> bool:
    """Whether a file claims to be a model, by its beginning."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return b'"learned_from"' in file.read(200)


def read_model(path: Path) -> Model:
    """A model that somebody else may have written: everything in it is checked."""
    try:
        model = msgspec.json.decode(read_file(path, _MOST_BYTES, _ADVICE), type=Model)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not a model of synthetic runs ({error}); {_ADVICE}") from None
    why = _fault(model)
    if why:
        raise InputError(f"{path}: {why}; {_ADVICE}")
    return model


def _fault(model: Model) -> str:
    """What is wrong with a model; '' if nothing is."""
    if model.version != VERSION:
        return f"version {model.version} is not known"
    if not model.roles or any(not role.blocks for role in model.roles):
        return "it has no blocks"
    if not model.role_of_rank or max(model.role_of_rank) >= len(model.roles):
        return "it does not say which rank does what"
    leads = [len(rank.lead.quantiles) for rank in model.by_rank]
    if len(leads) != len(model.role_of_rank) or not _LENGTHS.issuperset(leads):
        return "it does not say how every rank differs from the others"
    if model.pipeline is not None and why_not_pipeline(model, model.pipeline):
        return why_not_pipeline(model, model.pipeline)
    for role in model.roles:
        if not {*role.repeated, *role.final, *role.layers} <= set(PHASES):
            return "it has an unknown phase"
        for block in role.blocks:
            if block.phase not in PHASES or block.place not in PLACES:
                return f"a block is {block.phase!r}, {block.place!r}"
            for state in block.states:
                if why := _fault_of_state(state, model):
                    return why
    return ""


def _fault_of_state(state: StateModel, model: Model) -> str:
    size = len(COLUMNS)
    if state.kind not in KINDS:
        return f"a task is of kind {state.kind!r}, which is not in the vocabulary"
    if state.stream >= model.streams or state.group >= len(model.groups):
        return f"{state.kind!r} is on a stream or in a group that the model does not have"
    if any(wait.ago < 0 or not 0 <= wait.stream < model.streams for wait in state.waits):
        return f"{state.kind!r} waits for a stream that the model does not have"
    lengths = {len(column.quantiles) for column in state.columns.values()}
    if set(state.columns) != set(COLUMNS) or not lengths <= _LENGTHS:
        return f"the distributions of {state.kind!r} are not complete"
    if len(state.correlation) != size or any(len(row) != size for row in state.correlation):
        return f"the correlations of {state.kind!r} are not {size} × {size}"
    return ""


def why_not_pipeline(model: Model, pipeline: Pipeline) -> str:
    """What is wrong with a pipeline; '' if nothing is."""
    if pipeline.schedule not in SCHEDULES:
        return f"the schedule {pipeline.schedule!r} is not one of {', '.join(SCHEDULES)}"
    if pipeline.stages != len(model.roles):
        return f"it has {len(model.roles)} roles for {pipeline.stages} stages"
    return "" if set(pipeline.columns) == set(COLUMNS) else "the distributions of messages are not complete"
