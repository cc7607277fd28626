"""Cut: the blocks of a traced step, each a list of the operators in the order they ran, with their measured times.

Every layer has one attention, so what runs from one attention up to the next one is one layer, although shifted by half
a layer. What is left of a pass once its layers are taken away is the embedding, where it runs before the first
attention, and the head, where it runs after the last; in the backward pass it is the other way round.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from lumos.analysis.kernel_labels import KernelPhase, RankLabels
from lumos.errors import OptionError
from lumos.program.op import Measured, Op
from lumos.setup.setup import Setup
from lumos.traced.measured_ops import Launch

Times = NDArray[np.float64]
Key = tuple[object, ...]


@dataclass(frozen=True)
class CutBlock:
    """The operators of one block, and how long the host works on it.

    While a step is cut, equal operators are one, with their calls; at last each is at the places where it ran.
    """

    ops: tuple[Op, ...] = ()
    host_us: float = 0.0
    order: tuple[Key, ...] = ()  # of the operators, in one of the blocks that were cut out

    def us(self, *likes: str) -> float:
        """GPU time of these kinds of work, or of all, on the stream that computes."""
        return sum(total_us(op) for op in self.ops if not op.stream and (not likes or seen(op).like in likes))

    def less(self, other: CutBlock, times: float = 1.0) -> CutBlock:
        """Without what another block runs so many times; nothing becomes negative."""
        there = {_key(op): op for op in other.ops}
        rest = []
        for op in self.ops:
            same = there.get(_key(op))
            if same is None:
                rest.append(op)
            elif (calls := op.calls - times * same.calls) > _HALF:
                # Without shapes, calls of one name take various times.
                us = max(total_us(op) - times * total_us(same), 0.0)
                kernels = max(op.calls * seen(op).kernels - times * same.calls * seen(same).kernels, 0.0)
                rest.append(_measured(op, calls, us, kernels))
        return replace(self, ops=tuple(rest), host_us=max(self.host_us - times * other.host_us, 0.0))

    def placed(self) -> CutBlock:
        """With the calls of equal operators at their places, the last ones if some of them belong to another block."""
        places: dict[Key, list[int]] = {}
        for place, key in enumerate(self.order):
            places.setdefault(key, []).append(place)
        found = []
        for op in self.ops:
            mine = places.get(_key(op), [len(self.order)])[-max(1, round(op.calls)) :]
            found += [(place, op._replace(calls=op.calls / len(mine))) for place in mine]
        return replace(self, ops=tuple(op for _, op in sorted(found, key=itemgetter(0))))


@dataclass(frozen=True)
class CutRank:
    """The blocks of one rank: those of layers and ends are of one micro-batch, the optimizer is of the whole step.

    The host's time of a backward layer is with recomputation, its operators are without.
    """

    rank: int
    blocks: dict[str, CutBlock] = field(default_factory=dict)


_HALF = 0.5  # a call that remains in fewer than half of the blocks is an accident of the subtraction
_ENDS = {KernelPhase.FORWARD: ("embedding", "head"), KernelPhase.BACKWARD: ("head grad", "embedding grad")}
_LAYERS = {KernelPhase.FORWARD: "forward", KernelPhase.BACKWARD: "backward"}


def seen(op: Op) -> Measured:
    """What the trace shows of a call that was cut out of it."""
    assert op.measured is not None
    return op.measured


def total_us(op: Op) -> float:
    """GPU time of all its calls."""
    return op.calls * seen(op).us


def cut(labels: RankLabels, ops: Sequence[Launch], setup: Setup, layers: int) -> CutRank:
    """The blocks of a rank's step; OptionError where the attentions do not match the setup.

    A stage of several chunks runs its layers chunk by chunk: `layers` are those of one chunk.
    """
    train, chunks = setup.train, setup.parallel.vpp
    blocks: dict[str, CutBlock] = {}
    for phase in (KernelPhase.FORWARD, KernelPhase.BACKWARD):
        blocks |= _Pass(labels, ops, phase, layers, train.microbatches, chunks, _dense_layers(setup)).blocks()
    updates = [launch for launch in ops if launch.op.phase == "optimizer"]
    blocks["optimizer"] = CutBlock(_merged(updates, 1.0), labels.optimizer_us, _order(updates))
    for name in [name for name in blocks if name.startswith("forward")]:
        kind = name.removeprefix("forward")
        if setup.train.recompute == "full" and f"backward{kind}" in blocks:
            backward = blocks[f"backward{kind}"]
            again = _common(blocks[name], backward)
            blocks[f"backward{kind}"] = replace(backward.less(again), host_us=backward.host_us)
        else:
            again = _recomputed(blocks[name])
        blocks[f"recompute{kind}"] = again
    return CutRank(labels.rank, {name: block.placed() for name, block in blocks.items()})


def _common(forward: CutBlock, backward: CutBlock) -> CutBlock:
    """What of a forward block runs again in a backward one. Weights that are gathered are gathered for both."""
    there = {_key(op): op.calls for op in backward.ops}
    again = [
        op._replace(calls=min(op.calls, there[_key(op)])) for op in forward.ops if not op.role and _key(op) in there
    ]
    return replace(forward, ops=tuple(again))


def _recomputed(forward: CutBlock) -> CutBlock:
    """What of a forward block would run again: all but its last matmul, whose result no derivative needs.

    `torch.utils.checkpoint` stops once it has what the backward pass asked for. The last matmul is the one that reads
    the widest rows.
    """
    ops = [op for op in forward.ops if not op.role]
    matmuls = [op for op in ops if seen(op).like == "matrix" and len(op.inputs) >= 2 and len(_rows(op)) == 2]
    last = max(matmuls, key=lambda op: _rows(op)[-1], default=None)
    kept = (op._replace(calls=max(op.calls - 1, 0.0)) if op is last else op for op in ops)
    return replace(forward, ops=tuple(op for op in kept if op.calls > 0))


def _rows(op: Op) -> tuple[int, ...]:
    """The shape of what a matmul multiplies by a weight; a bias comes before it."""
    return op.inputs["addmm" in op.name].shape


def _dense_layers(setup: Setup) -> int:
    """Layers without experts that come first on the first stage of a pipeline."""
    return setup.model.dense_layers if setup.model.experts and setup.parallel.pp == 1 else 0


class _Pass:
    """The forward or the backward pass of a rank, micro-batch by micro-batch."""

    def __init__(
        self,
        labels: RankLabels,
        ops: Sequence[Launch],
        phase: KernelPhase,
        layers: int,
        microbatches: int,
        chunks: int,
        dense: int,
    ) -> None:
        self.phase, self.layers, self.passes, self.microbatches = phase, layers, microbatches * chunks, microbatches
        self.dense = dense
        self.ops = [launch for launch in ops if launch.op.phase == phase.name.lower()]
        wanted = 1 if phase == KernelPhase.FORWARD else 2
        marks = [place for place, launch in enumerate(self.ops) if launch.attention == wanted]
        if len(marks) != layers * self.passes:
            raise OptionError(
                f"rank {labels.rank}: {len(marks)} attention kernels in the {phase.name.lower()} pass, and the setup "
                f"says {layers * chunks} layers × {microbatches} micro-batches = {layers * self.passes}: correct "
                "model.layers, train.microbatches or parallel.pp to what was traced, or record with an attention that "
                "can be recognised"
            )
        self.marks = np.array(marks, np.int64).reshape(self.passes, layers)

    @cached_property
    def launched(self) -> Times:
        return np.array([launch.at_us for launch in self.ops])

    def blocks(self) -> dict[str, CutBlock]:
        """One layer, with and without experts where there are both, and the ends."""
        name, ends = _LAYERS[self.phase], _ENDS[self.phase]
        everything = _merged(self.ops, 1 / self.microbatches)
        if self.layers == 1:
            host = float(np.ptp(self.launched)) / self.passes
            return {name: CutBlock(_merged(self.ops, 1 / self.passes), host, _order(self.ops))}
        found = {kind: self._layer(kind == "dense") for kind in ("", "dense") if self._segments(kind == "dense")}
        chunks = self.passes // self.microbatches
        rest = CutBlock(everything)
        for kind, block in found.items():
            rest = rest.less(block, chunks * self._count(kind == "dense"))
        host = self._host_outside(sum(self._count(k == "dense") * b.host_us for k, b in found.items())) * chunks
        parts = self._split(rest.ops)
        total = sum(total_us(op) for part in parts for op in part) or 1.0
        for end, part, order in zip(ends, parts, self._outside, strict=True):
            found[end] = CutBlock(part, host * sum(map(total_us, part)) / total, order)
        return {end if end in ends else f"{name} {end}".strip(): block for end, block in found.items()}

    def _count(self, dense: bool) -> int:
        return self.dense if dense else self.layers - self.dense

    def _segments(self, dense: bool) -> list[tuple[int, int]]:
        """(start, end) of what lies between two attentions, for layers of one kind.

        Forward, a segment ends the layer that its first attention belongs to; backward, it begins the one that its
        second attention belongs to. Both are told by their MLP.
        """
        found = []
        for row in self.marks:
            for place, (start, end) in enumerate(itertools.pairwise(row)):
                layer = place if self.phase == KernelPhase.FORWARD else self.layers - 2 - place
                if (layer < self.dense) == dense:
                    found.append((int(start), int(end)))
        return found

    def _layer(self, dense: bool) -> CutBlock:
        segments = self._segments(dense)
        inside = [launch for start, end in segments for launch in self.ops[start:end]]
        host = float(np.median([self.launched[end] - self.launched[start] for start, end in segments]))
        return CutBlock(_merged(inside, 1 / len(segments)), host, self._usual_order(segments))

    def _usual_order(self, segments: Sequence[tuple[int, int]]) -> tuple[Key, ...]:
        """Most segments run their operators in this order, here from the start of a layer.

        A segment starts at an attention. What it has in common with the operators right before the first attention
        comes before the attention in a layer, too.
        """
        (usual, _), *_ = Counter(_order(self.ops[start:end]) for start, end in segments).most_common(1)
        pairs = zip(reversed(usual), reversed(self._outside[0]), strict=False)
        before = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return usual[len(usual) - before :] + usual[: len(usual) - before]

    @cached_property
    def _outside(self) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
        """What runs before the first attention of the step, and from its last one on."""
        return _order(self.ops[: self.marks[0, 0]]), _order(self.ops[self.marks[-1, -1] :])

    def _split(self, rest: Sequence[Op]) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
        """What is outside the layers: what the step has more of before its first attention, and the rest. What both
        sides have, such as the norm that also ends every layer, is counted as coming last.
        """
        first, last = map(Counter, self._outside)
        early = tuple(op for op in rest if first[_key(op)] > last[_key(op)])
        return early, tuple(op for op in rest if op not in early)

    def _host_outside(self, layers_us: float) -> float:
        """The host's time of a pass outside its layers: the least over passes, as blocking only adds."""
        launched, marks = self.launched, self.marks
        middles = (marks[:-1, -1] + marks[1:, 0]) // 2
        first, last = np.concatenate([[0], middles]), np.concatenate([middles, [len(launched) - 1]])
        return max(0.0, float((launched[last] - launched[first]).min()) - layers_us)


def _key(op: Op) -> Key:
    """Calls are equal whatever pass they run in: recomputation runs those of the forward pass again."""
    return op._replace(phase="", calls=1.0, measured=None, weight_gradient=False), seen(op).like


def _order(launches: Iterable[Launch]) -> tuple[Key, ...]:
    return tuple(_key(launch.op) for launch in launches)


def _merged(launches: Iterable[Launch], share: float) -> tuple[Op, ...]:
    """Equal calls together; `share` of them belong to one block."""
    return tuple(_joined((launch.op for launch in launches), share))


def mean_block(blocks: Sequence[CutBlock]) -> CutBlock:
    """Of the same block on several ranks, in the order of the first."""
    host = float(np.mean([block.host_us for block in blocks])) if blocks else 0.0
    ops = _joined((op for block in blocks for op in block.ops), 1 / max(len(blocks), 1))
    return CutBlock(tuple(ops), host, blocks[0].order if blocks else ()).placed()


def _joined(ops: Iterable[Op], share: float) -> Iterator[Op]:
    found: dict[Key, list[Op]] = {}
    for op in ops:
        found.setdefault(_key(op), []).append(op)
    for same in found.values():
        kernels = sum(op.calls * seen(op).kernels for op in same)
        calls = sum(op.calls for op in same)
        yield _measured(same[0], calls, sum(map(total_us, same)), kernels)._replace(calls=calls * share)


def _measured(op: Op, calls: float, us: float, kernels: float) -> Op:
    """So many calls of an operator, which take so long together."""
    return op._replace(calls=calls, measured=seen(op)._replace(us=us / calls, kernels=kernels / calls))
