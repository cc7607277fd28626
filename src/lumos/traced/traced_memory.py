"""Peak memory of a changed run, from the tensors of the trace itself.

The tape of the traced micro-batch (`lumos.traced.tensor_lifetimes`) says which tensors every block makes and keeps.
Their shapes are rewritten to the other setup (`lumos.traced.sizes`), blocks are repeated or left out, and the rest is
put around them:

| part | where it comes from |
|---|---|
| weights, gradients, state | shapes of the gradients that autograd accumulates, block by block, divided as ZeRO says |
| activations | what blocks keep; with full recomputation their inputs, and one block while it is recomputed |
| buffers | gathered weights and gradients on their way (FSDP), buckets (DDP), temporaries of the optimizer |
| framework | cuBLAS workspaces |

The peak is the most over all blocks, forward and backward, and the update. Selective recomputation is taken for none:
what it recomputes is inside fused attention.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

from lumos.data_files import read_table
from lumos.described.described import Program
from lumos.memory.memory import Memory, reserve_of
from lumos.memory.stage_walk import (
    AFTER,
    BEFORE,
    GIB,
    LAYER,
    BlockMemory,
    Moment,
    StageBlocks,
    StageMemory,
    stage_walk,
)
from lumos.program.op import Op
from lumos.program.sharding import Parameters, Sharding
from lumos.read.op_columns import OpType, RankOps
from lumos.setup.setup import Setup
from lumos.traced.sizes import Sizes
from lumos.traced.tensor_lifetimes import Tape, TensorLife, tape_of

_MATMULS = ("mm", "addmm", "bmm", "_grouped_mm")


@dataclass(frozen=True)
class _Parts:
    """All segments of a traced run in the setup that is asked for."""

    first: BlockMemory
    layers: tuple[BlockMemory, ...]
    last: BlockMemory
    computed: float  # bytes of a parameter as it is computed with
    stored: float  # of a parameter as it is stored
    temporaries: str  # of the update: none, all, one
    adds: bool  # gradients are there before the first backward pass

    def of(self, program: Program, stage: int) -> StageBlocks:
        """Those of one stage."""
        starts = list(accumulate(program.layers, initial=0))
        placement = program.schedule.placement(program.setup.parallel.pp, program.setup.parallel.vpp)[stage]
        chunks = []
        for virtual, chunk in zip(placement, program.chunks[stage], strict=True):
            layers = self.layers[starts[virtual] :][: chunk.layers] or self.layers[: chunk.layers]
            row = (*[self.first] * chunk.first, *layers, *[self.last] * chunk.last)
            chunks.append([(block, 1) for block in row])
        every = (self.first, *self.layers, self.last)
        frozen = any(block.parameters.adapters for block in every)
        sharding = Sharding(program.layout, self.computed, self.stored, frozen)
        blocks = [block for chunk in chunks for block, _ in chunk]
        parameters = sum((block.parameters for block in blocks), Parameters(0.0, 0.0))
        more = program.setup.train.optimizer == "muon"  # embedding and head are left to Adam, with a moment more
        ends = (block for block in blocks if block.place != LAYER and more)
        vectors = sum(sharding.trained_number(block.parameters) for block in ends)
        return StageBlocks(chunks, sharding, parameters, vectors, self.temporaries, self.adds)


def traced_memory(ops: RankOps, traced: Setup, target: Setup, tape: Tape | None = None) -> Memory | None:
    """The memory of the other setup; None where the trace does not tell it: no shapes, compiled code, pipelines.

    `tape` is that of the operators, where it was made already.

    Where the profiler recorded what the allocator held, activations are corrected by what the tape of the traced run
    itself is wrong.
    """
    if traced.parallel.pp > 1 or traced.train.compile or target.train.compile:
        return None
    if traced.parallel.sequence_parallel != target.parallel.sequence_parallel:
        return None  # which tensors are divided is not in the trace
    tape = tape or tape_of(ops)
    if tape is None or not tape.gradients:
        return None
    if tape.blocks < 2 and target.model.layers != traced.model.layers:
        return None
    stages = _stages(_parts(tape, ops, traced, target), target)
    if ops.most_bytes:
        own = max(_stages(_parts(tape, ops, traced, traced), traced), key=lambda stage: stage.peak)
        low, high = read_table("memory.json")["tape_correction"]
        factor = min(max(1 + (ops.most_bytes - own.peak) / max(own.activations, 1.0), low), high)
        stages = tuple(stage._replace(activations=factor * stage.activations) for stage in stages)
    worst = max(range(len(stages)), key=lambda index: stages[index].peak)
    usable = target.cluster.accelerator.memory_gib * GIB
    return Memory(worst, stages[worst], reserve_of(target, stages[worst].peak), usable, stages)


def _stages(parts: _Parts, setup: Setup) -> tuple[StageMemory, ...]:
    """Every stage of the pipeline at its own worst moment."""
    program = Program(setup)
    return tuple(stage_walk(program, stage, parts.of(program, stage)) for stage in range(setup.parallel.pp))


# ---------------------------------------------------------------------- segments
def _parts(tape: Tape, ops: RankOps, traced: Setup, target: Setup) -> _Parts:
    sizes = Sizes(traced, target)
    bytes_of = _bytes(tape, sizes)
    segments = _segments(tape, bytes_of, sizes)
    computed = float(max(gradient.info.element for gradient in tape.gradients))
    return _Parts(
        first=segments[0],
        layers=_repeated(segments[1:-1], tape.signatures, traced.model.layers, target.model.layers),
        last=segments[-1],
        computed=computed,
        stored=max(computed, _gathered_from(ops)),
        temporaries=_temporaries(ops),
        adds=tape.adds,
    )


def _bytes(tape: Tape, sizes: Sizes) -> dict[int, float]:
    """Bytes of every tensor in the other setup, by its identity."""
    found: dict[int, float] = {}
    rewritten: dict[int, Op] = {}
    for tensor in tape.tensors:
        if tensor.call not in rewritten:
            call = tape.calls[tensor.call]
            phase = "backward" if call.backward else "forward"
            op = Op(f"aten.{call.name}.default", call.inputs, call.outputs, phase)
            rewritten[tensor.call] = sizes.rewritten(op)
        info = rewritten[tensor.call].outputs[tensor.place]
        found[id(tensor)] = float(info.elements * info.element)
    return found


def _segments(tape: Tape, bytes_of: dict[int, float], sizes: Sizes) -> list[BlockMemory]:
    """Walks over the tape once, with the bytes that are alive at every moment."""
    count = tape.blocks + 2
    alive, parameters = _alive(tape, bytes_of), _parameters(tape, sizes)
    kept = [0.0] * count
    for tensor in tape.tensors:
        if tensor.born < tape.middle <= tensor.dies:
            kept[tensor.segment] += bytes_of[id(tensor)]
    boundary = {segment: bytes_of[id(tensor)] for segment, tensor in _boundaries(tape).items()}
    surplus = _saved_on_keys(sizes, float(parameters[0].bytes / max(parameters[0].elements, 1.0)))
    found = []
    for segment in range(count):
        place = BEFORE if segment == 0 else LAYER if segment <= tape.blocks else AFTER
        before, less = sum(kept[:segment]), surplus if place == LAYER else 0.0
        own = [parameter for parameter in parameters if parameter.segment == segment]
        forward = [alive[t] - before for t in range(tape.middle) if tape.when[t] == segment]
        trained, widest = sum(p.elements for p in own), max((p.elements for p in own), default=0.0)
        frozen = Parameters(_frozen(tape, segment, sizes), 0.0, trained)
        recomputes = place == LAYER and sizes.after.train.recompute == "full"
        found.append(
            BlockMemory(
                place, boundary.get(segment, 0.0) if recomputes else kept[segment] - less,
                max(forward, default=0.0) - less, frozen if tape.frozen else Parameters(trained, 0.0), widest,
                tuple(_moments(tape, segment, [size - before - less for size in alive], own)),
            )
        )  # fmt: skip
    return found


def _moments(tape: Tape, segment: int, alive: list[float], parameters: list[_Parameter]) -> Iterator[Moment]:
    """Over the backward pass of a segment."""
    held, due = 0.0, deque(sorted(parameters))
    begun = tape.loss_inside or segment <= tape.blocks
    for t in range(tape.middle, len(tape.when)):
        if tape.when[t] != segment:
            continue
        while due and due[0].at < t:
            held += due.popleft().bytes
        begun = begun or tape.calls[t].name in _MATMULS
        yield Moment(alive[t], held, begun)
    yield Moment(0.0, held + sum(parameter.bytes for parameter in due), True)


def _alive(tape: Tape, bytes_of: dict[int, float]) -> list[float]:
    """Bytes at every place of the tape; what becomes the gradient of a parameter is counted there from then on."""
    change = [0.0] * (len(tape.when) + 1)
    for tensor in tape.tensors:
        end = tensor.taken if tensor.taken >= 0 else tensor.dies
        change[tensor.born] += bytes_of[id(tensor)]
        change[min(end, len(tape.when) - 1) + 1] -= bytes_of[id(tensor)]
    total, found = 0.0, []
    for step in change[:-1]:
        total += step
        found.append(total)
    return found


def _boundaries(tape: Tape) -> dict[int, TensorLife]:
    """By segment, the last of its tensors that the next one reads."""
    return {t.segment: t for t in tape.tensors if t.crosses and t.born < tape.middle}


class _Parameter(NamedTuple):
    """The gradient of one parameter, whole, in the other setup."""

    at: int
    segment: int
    elements: float
    bytes: float


def _parameters(tape: Tape, sizes: Sizes) -> list[_Parameter]:
    """In the order in which their gradients come."""
    found, squares = [], Counter[int]()
    hidden, attended = sizes.pairs["hidden"], sizes.pairs.get("attended/tp", (0, 0))
    for gradient in tape.gradients:
        shape, segment = gradient.info.shape, gradient.segment
        elements = float(prod(sizes.weight(shape)))
        if len(shape) == 2 and set(shape) == {hidden[0], attended[0]} == {hidden[0]}:
            # Square weights of attention: output, value, key and query, of which tensor parallelism divides one side.
            squares[segment] += 1
            is_key = squares[segment] in (2, 3) and _joins_keys(sizes)
            elements = float(hidden[1] * (_keys(sizes) if is_key else attended[1]))
        found.append(_Parameter(gradient.at, segment, elements, elements * gradient.info.element))
    return found


def _frozen(tape: Tape, segment: int, sizes: Sizes) -> float:
    """Elements of the weights of a segment that nothing trains, as under adapters."""
    return float(sum(prod(sizes.weight(shape)) for at, shape in tape.frozen if at == segment))


def _joins_keys(sizes: Sizes) -> bool:
    """Whether heads have keys of their own before the change and share them after it: shapes cannot tell keys apart."""
    before, after = sizes.before.model, sizes.after.model
    plain = not before.latent and not after.latent
    return plain and before.kv_heads == before.heads and after.kv_heads < after.heads


def _keys(sizes: Sizes) -> int:
    """The width of keys on one rank after the change."""
    model = sizes.after.model
    return max(1, model.kv_heads // sizes.after.parallel.tp) * model.head_dim


def _saved_on_keys(sizes: Sizes, element: float) -> float:
    """Bytes of one block that the rewritten shapes have too many where heads share keys and values from now on."""
    if not _joins_keys(sizes):
        return 0.0
    return 2 * element * sizes.pairs["tokens"][1] * (sizes.pairs["attended/tp"][1] - _keys(sizes))


def _repeated(
    blocks: Sequence[BlockMemory], signatures: Sequence[tuple[str, ...]], before: int, after: int
) -> tuple[BlockMemory, ...]:
    """As many blocks as the other model has: those of the usual kind are repeated or left out, in the middle."""
    wanted = max(1, round(len(blocks) * after / before))
    usual = max(set(signatures), key=list(signatures).count) if signatures else ()
    places = [i for i, signature in enumerate(signatures) if signature == usual] or [0]
    middle = places[len(places) // 2]
    if wanted >= len(blocks):
        return (*blocks[:middle], *[blocks[middle]] * (wanted - len(blocks) + 1), *blocks[middle + 1 :])
    surplus = set(places[1:][: len(blocks) - wanted])
    rest = [block for i, block in enumerate(blocks) if i not in surplus]
    return tuple(rest[:wanted])


# ---------------------------------------------------------------------- what the trace tells besides
def _gathered_from(ops: RankOps) -> float:
    """Bytes of a parameter as FSDP stores it, where it is gathered in a lower precision; else 0."""
    for op in ops.ops:
        if OpType.FSDP in op.scopes and op.name == "aten::_to_copy" and op.tensors:
            info = op.tensors[0]
            if info.dtype == "fp32" and info.elements > 1:
                return 4.0
    return 0.0


def _temporaries(ops: RankOps) -> str:
    """What the update makes for itself: nothing where it is fused, else something for all parameters or for one."""
    names = {op.name for op in ops.ops if OpType.OPTIMIZER in op.scopes}
    if any("_fused_" in name for name in names):
        return "none"
    if "aten::_foreach_sqrt" in names:
        return "all"
    return "one" if "aten::sqrt" in names else "none"
