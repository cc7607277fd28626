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

FSDP2 holds: parameters outside the blocks gathered from the forward pass to the end of the backward pass, and their
gradients whole until then; the weights of the block at work; in the backward pass those of the next block, gathered
ahead; whole gradients of the block at work, and the previous block's on their way to being divided. What is gathered
ahead comes with the first gradient that enters the model, so not while a loss outside the model runs backward.

The peak is the most over all blocks, forward and backward, and the update. Selective recomputation is taken for none:
what it recomputes is inside fused attention.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod
from typing import NamedTuple

from lumos.data_files import read_table
from lumos.described.described import Program
from lumos.memory.memory import Memory, reserve_of
from lumos.memory.stage_walk import GIB, StageFacts, StageMemory
from lumos.program.op import Op
from lumos.program.sharding import Parameters, Sharding
from lumos.read.op_columns import OpType, RankOps
from lumos.setup.setup import Setup
from lumos.traced.sizes import Sizes
from lumos.traced.tensor_lifetimes import Tape, TensorLife, tape_of

_MATMULS = ("mm", "addmm", "bmm", "_grouped_mm")


class Moment(NamedTuple):
    """Of the backward pass of a segment."""

    activations: float  # beyond what earlier segments keep
    gradients: float  # of its parameters, so far
    begun: bool  # the backward pass has reached the model, and is not in a loss outside it


class Segment(NamedTuple):
    """A block, or what comes before or behind all blocks; bytes of one micro-batch in the other setup."""

    kept: float  # between its forward and its backward pass
    boundary: float  # of that, what recomputation keeps: what the next block reads
    forward: float  # most while it runs, beyond what earlier segments keep
    trained: float  # elements of its parameters, not divided by ZeRO
    frozen: float  # likewise, of those without gradients
    widest: float  # elements of the largest parameter
    is_block: bool
    moments: tuple[Moment, ...]

    @property
    def parameters(self) -> float:
        return self.trained + self.frozen


@dataclass(frozen=True)
class _Parts:
    """All segments of a traced run in the setup that is asked for."""

    first: Segment
    blocks: tuple[Segment, ...]
    last: Segment
    element: float  # bytes of a parameter as it is computed with
    state_element: float  # of a parameter as it is stored
    temporaries: str  # of the update: none, all, one
    adds: bool  # gradients are there before the first backward pass


def cut_memory(ops: RankOps, traced: Setup, target: Setup, tape: Tape | None = None) -> Memory | None:
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
    return tuple(
        max(_Stage(parts, program, index).moments(), key=lambda memory: memory.peak)
        for index in range(setup.parallel.pp)
    )


# ---------------------------------------------------------------------- segments
def _parts(tape: Tape, ops: RankOps, traced: Setup, target: Setup) -> _Parts:
    sizes = Sizes(traced, target)
    bytes_of = _bytes(tape, sizes)
    segments = _segments(tape, bytes_of, sizes)
    element = float(max(gradient.info.element for gradient in tape.gradients))
    return _Parts(
        first=segments[0],
        blocks=_repeated(segments[1:-1], tape.signatures, traced.model.layers, target.model.layers),
        last=segments[-1],
        element=element,
        state_element=max(element, _gathered_from(ops)),
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


def _segments(tape: Tape, bytes_of: dict[int, float], sizes: Sizes) -> list[Segment]:
    """Walks over the tape once, with the bytes that are alive at every moment."""
    count = tape.blocks + 2
    alive, parameters = _alive(tape, bytes_of), _parameters(tape, sizes)
    kept, boundary = [0.0] * count, [0.0] * count
    for tensor in tape.tensors:
        if tensor.born < tape.middle <= tensor.dies:
            kept[tensor.segment] += bytes_of[id(tensor)]
    for segment, tensor in _boundaries(tape).items():
        boundary[segment] = bytes_of[id(tensor)]
    surplus = _saved_on_keys(sizes, float(parameters[0].bytes / max(parameters[0].elements, 1.0)))
    found = []
    for segment in range(count):
        before = sum(kept[:segment])
        less = surplus if 0 < segment <= tape.blocks else 0.0
        own = [parameter for parameter in parameters if parameter.segment == segment]
        forward = [alive[t] - before for t in range(tape.middle) if tape.when[t] == segment]
        found.append(
            Segment(
                kept[segment] - less, boundary[segment], max(forward, default=0.0) - less,
                sum(p.elements for p in own), _frozen(tape, segment, sizes),
                max((p.elements for p in own), default=0.0), 0 < segment <= tape.blocks,
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
    blocks: Sequence[Segment], signatures: Sequence[tuple[str, ...]], before: int, after: int
) -> tuple[Segment, ...]:
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


# ---------------------------------------------------------------------- one stage
class _Stage(StageFacts):
    """One stage of the pipeline: its segments, and every moment that may be the worst."""

    def __init__(self, parts: _Parts, program: Program, index: int) -> None:
        self.parts, chunks = parts, program.chunks[index]
        starts = list(accumulate(program.layers, initial=0))
        placement = program.schedule.placement(program.setup.parallel.pp, program.setup.parallel.vpp)[index]
        firsts = [(starts[virtual], chunk.layers) for virtual, chunk in zip(placement, chunks, strict=True)]
        self.blocks = [block for start, count in firsts
                       for block in parts.blocks[start : start + count] or parts.blocks[:count]]  # fmt: skip
        first = [parts.first] if any(chunk.first for chunk in chunks) else []
        last = [parts.last] if any(chunk.last for chunk in chunks) else []
        self.order, self.root = [*first, *self.blocks, *last], [*first, *last]
        frozen = sum(segment.frozen for segment in self.order)
        sharding = Sharding(program.layout, parts.element, parts.state_element, frozen=frozen > 0)
        trained = sum(segment.trained for segment in self.order)
        parameters = Parameters(frozen, 0.0, trained) if sharding.frozen else Parameters(trained, 0.0)
        ends = sum(segment.frozen if sharding.frozen else segment.trained for segment in self.root)
        more = program.setup.train.optimizer == "muon"  # embedding and head are left to Adam, with a moment more
        vectors = sum(segment.trained for segment in self.root) if more else 0.0
        super().__init__(program, index, sharding, parameters, ends, vectors)
        self.recomputes = program.setup.train.recompute == "full"
        self.is_sharded = sharding.gathers == "every pass"

    @property
    def stays(self) -> bool:
        """Gradients are there before the backward pass: an earlier micro-batch left them, or the buckets hold them.

        Of DistributedDataParallel this is measured: its peak is the same with and without accumulation.
        """
        buffer = self.has_buckets or self.framework.gradient_buffer_fp32
        return self.parts.adds or buffer or self.rounds > self.most

    def whole(self, *segments: Segment) -> float:
        """Bytes of gathered weights, as they are computed with."""
        return self.parts.element * sum(segment.parameters for segment in segments)

    def kept(self, segment: Segment) -> float:
        return segment.boundary if self.recomputes and segment.is_block else segment.kept

    def _in_flight(self) -> float:
        """What all micro-batches keep that the stage holds of its chunks."""
        total, start = 0.0, 0
        for chunk, count in zip(self.chunks, self.counts, strict=True):
            total += count * sum(map(self.kept, self.blocks[start : start + chunk.layers]))
            total += count * (chunk.first * self.kept(self.parts.first) + chunk.last * self.kept(self.parts.last))
            start += chunk.layers
        return total

    # ------------------------------------------------------------------ moments
    def moments(self) -> Iterator[StageMemory]:
        """Every segment forward and backward, and the update."""
        yield self._update()
        before, done = self._in_flight(), 0.0
        for place in range(len(self.order) - 1, -1, -1):
            segment = self.order[place]
            before -= self.kept(segment)
            gathered = 2 * self.whole(segment) if self.is_sharded and segment.is_block else 0.0
            yield self._held("forward", self._there(0.0), before + segment.forward, gathered)
            if self.is_sharded:
                yield from self._sharded_backward(place, before, done)
                done += segment.trained if segment.is_block else 0.0
            else:
                for moment in segment.moments:
                    there = self._there(done, moment.gradients)
                    yield self._held("backward", there, before + moment.activations)
                done += segment.trained

    def _held(self, phase: str, gradients: float, activations: float, buffers: float = 0.0) -> StageMemory:
        return self.memory(phase, gradients, activations, self.always + buffers)

    def _there(self, done: float, begun: float = 0.0) -> float:
        """Gradients of the parameters that have theirs, and those of the segment at work, still whole."""
        sharding = self.sharding
        divided = sharding.shards if sharding.zero >= 2 else 1
        return self.states.gradients if self.stays else sharding.gradients * done / divided + begun

    def _sharded_backward(self, place: int, before: float, done: float) -> Iterator[StageMemory]:
        """While gradients come that are whole on their way; those outside the blocks are divided at the very end."""
        segment = self.order[place]
        ahead = sum(self.whole(other) for other in self.order[max(place - 1, 0) : place] if other.is_block)
        behind = sum(self.whole(other) for other in self.order[place + 1 : place + 2] if other.is_block)
        share = self.framework.reduce_bytes / self.parts.element
        head = self.parts.element * self.parts.last.trained if self.last and segment is not self.parts.last else 0.0
        there, gathered = self._there(done), ahead + (self.whole(segment) if segment.is_block else 0.0)
        for moment in segment.moments:
            buffers = moment.begun * gathered + share * behind + moment.gradients + head
            yield self._held("backward", there, before + moment.activations, buffers)
        if segment.is_block:
            own = self.parts.element * segment.trained
            yield self._held("reduce", there, before, own * (1 + share) + ahead + head)
        elif place == 0:
            own = self.parts.element * sum(part.trained for part in self.root)
            yield self._held("reduce", there, before, own * (1 + share) - self.gathered)

    def _update(self) -> StageMemory:
        """The optimizer, with what it makes for itself: roots of all second moments, or of one after another."""
        each, extra = self.parts.state_element / self.sharding.shards, self.half_gradients - self.gathered
        if self.parts.temporaries == "all":
            extra += each * self.trained
        elif self.parts.temporaries == "one":
            extra += 2 * ceil(each * max(segment.widest for segment in self.order))
        return self._held("optimizer", self.states.gradients, 0.0, extra)
