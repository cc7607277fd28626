"""Retarget: the blocks of a traced run in another setup, operator by operator.

Operators that were cut out of the trace get the shapes of the other setup. What a layout adds to a block is stated
here: collectives, where the setup's own block has them; copies of FSDP; and the host's work for hooks, checkpoints and
DTensors. A setup's own blocks leave out copies and DTensors on purpose: compiled code and other frameworks have none.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate

from lumos.costs.kernel_work import matrix_operator
from lumos.costs.model_costs import ModelCosts
from lumos.data_files import read_table
from lumos.described.described import Key, Program
from lumos.program.op import Measured, Op, Ops, Tensor
from lumos.program.operators import Collective, Operator
from lumos.schedules import Phase
from lumos.setup.frameworks import framework_named
from lumos.setup.setup import Setup
from lumos.traced.cut import seen
from lumos.traced.sizes import Sizes
from lumos.traced.trace_costs import UNPRICED, TraceCosts, bare, bytes_of

_TABLE = read_table("change.json")
_LAYERS = ("forward", "backward")
_LEAST_HOST = 0.2  # of the host's measured time that stays, whatever a layout takes away


class TracedBlocks:
    """Makes the blocks of a setup of those of a traced run: `Program(setup).made_by(TracedBlocks(costs).block)`."""

    def __init__(self, costs: TraceCosts) -> None:
        self.blocks, self.costs, self.learned = costs.learned.blocks, costs, costs.learned
        traced, target = costs.learned.traced, costs.target
        self.was, self.now = Program(traced), Program(target)
        self.traced, self.target = traced, target
        self.sizes = Sizes(traced, target, costs.learned.weights.shapes)
        self.on_cpu = target.cluster.accelerator.is_cpu
        self._known: dict[Key, Ops] = {}

    def block(self, key: Key, build: Callable[[], Ops]) -> Ops:
        """The block of a key; `build` makes the setup's own one, which stands in for what the trace does not show."""
        if key not in self._known:
            self._known[key] = self._block(key, build())
        return self._known[key]

    def _block(self, key: Key, own: Ops) -> Ops:
        name = _name_of(key, self.blocks)
        cut = self.blocks.get(name)
        selective = name.startswith("recompute") and self.target.train.recompute != "full"
        if cut is None or selective:
            return own
        if name == "optimizer":
            share = self._update_growth * self._size_of(key) / max(self._size_of(self.now.optimizer(0).key), 1)
            ops = [_grown(op, fixed, rest * share) for op, fixed, rest in self._updates]
        else:
            ops = [*self._added(name), *(new for op in cut.ops for new in self._retargeted(name, op))]
        return self._hosted(self._among(ops, own, name), self.host_us(name, own))

    # ------------------------------------------------------------------ operators
    def _retargeted(self, name: str, op: Op) -> Iterator[Op]:
        """An operator in the other setup; nothing of collectives and of what runs on other streams."""
        measured = seen(op)
        if op.stream or measured.like == "comm" or (op.role and not _gathers(self.target)):
            return
        if self.on_cpu or not op.inputs:
            growth = self._own_growth(name, measured.like)
            yield op._replace(work=_work_of(op), measured=measured._replace(us=measured.us * growth))
            return
        call = bare(op)
        calls = op.calls * (self._peers if op.role == "peer" else 1.0)
        if op.role:
            others = [self._copied(name, op)]
        else:  # as much work on keys and values as on queries, if shapes do not distinguish them
            others = list(dict.fromkeys((self.sizes.rewritten(call), self.sizes.keys.rewritten(call))))
        for new in others:
            changed = measured._replace(before=None if new == call else call)
            yield op._replace(
                inputs=new.inputs, outputs=new.outputs, calls=calls / len(others), measured=changed, work=_work_of(new)
            )

    def _own_growth(self, name: str, like: str) -> float:
        """How the setup's own block grows, for one kind of work; what is recomputed grows like the forward pass."""
        name = name.replace("recompute", "forward")
        before = us_by_kind(self._traced_own.get(name, []), self.costs.was)
        after = us_by_kind(self._target_own.get(name, []), self.costs)
        if before.get(like, 0.0) > 0:
            return after.get(like, 0.0) / before[like]
        old, new = (sum(us for kind, us in times.items() if kind != "comm") for times in (before, after))
        return new / old if old > 0 else 1.0

    def _copied(self, name: str, op: Op) -> Op:
        """A copy of flat weights, all of a unit or the share of one rank."""
        inside, outside = self._unit_growth
        growth = inside if name.startswith(_LAYERS) else outside
        if op.role == "peer" or ("copy" in op.name and "split" not in op.name):
            growth *= self.was.layout.shards / self.now.layout.shards

        def grown(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
            return tuple(t._replace(shape=(*t.shape[:-1], max(1, round(t.shape[-1] * growth)))) if t.shape else t
                         for t in tensors)  # fmt: skip

        call = bare(op)
        return call._replace(inputs=grown(op.inputs), outputs=grown(op.outputs)) if growth != 1.0 else call

    @cached_property
    def _unit_growth(self) -> tuple[float, float]:
        """Weights of a layer, and of embedding and head, over those of the traced run."""
        weights, same = self.learned.weights, Sizes(self.traced, self.traced)
        old, new = (weights.elements(sizes, weights.layers) for sizes in (same, self.sizes))
        return tuple(b / a if a else 1.0 for a, b in zip(old, new, strict=True))  # type: ignore[return-value]

    @cached_property
    def _peers(self) -> float:
        """Other ranks that share the weights, over those of the traced run."""
        return max(1, self.now.layout.shards - 1) / max(1, self.was.layout.shards - 1)

    # ------------------------------------------------------------------ the update
    @cached_property
    def _update_growth(self) -> float:
        """Of what this rank updates: its parameters, or its share of them."""
        weights, before, after = self.learned.weights, self.traced, self.target
        own_growth = self._own_growth("optimizer", "stream")
        if not weights.counts or self.on_cpu or before.train.optimizer != after.train.optimizer:
            return own_growth
        stages = after.model.layers / after.parallel.pp, before.model.layers / before.parallel.pp
        old = sum(weights.elements(Sizes(before, before), weights.layers))
        new = sum(weights.elements(self.sizes, weights.layers * stages[0] / stages[1]))
        if not old:
            return own_growth
        kinds = _TABLE["update"]
        kind = kinds[_update_kind(after)] / kinds[_update_kind(before)]
        return float(new / old * kind * self.costs.memory_growth * self.was.layout.shards / self.now.layout.shards)

    @cached_property
    def _updates(self) -> list[tuple[Op, float, float]]:
        """The optimizer's calls, with the time that each takes whatever it updates, and the rest."""
        ops = [op._replace(work=_work_of(op)) for op in self.blocks["optimizer"].ops]
        ops = [op for op in ops if not op.stream and seen(op).like != "comm"]
        least = [min(seen(op).us, seen(op).kernels * _TABLE["update"]["kernel_us"]) for op in ops]
        return [(op, fixed, seen(op).us - fixed) for op, fixed in zip(ops, least, strict=True)]

    @staticmethod
    def _size_of(key: Key) -> int:
        """Elements that the block of an optimizer updates."""
        assert isinstance(key[1], int)
        return key[1]

    # ------------------------------------------------------------------ what a layout adds
    def _added(self, name: str) -> Iterator[Op]:
        """Copies of FSDP, if the traced run had none."""
        weights = self.learned.weights
        ends = ("embedding", "embedding grad")
        if self.on_cpu or not weights.counts or not (name.startswith(_LAYERS) or name in ends):
            return
        inside, outside = weights.elements(self.sizes, max(1, weights.layers))
        size = inside / max(1, weights.layers) if name.startswith(_LAYERS) else outside
        if size < 1 or not _gathers(self.target) or _gathers(self.traced):
            return
        flat = Tensor((int(size),), "bf16", (1,), 2)
        backward = name.startswith("backward") or name == "embedding grad"
        for copy, phase in (("split_with_sizes_copy", "forward"), ("chunk_cat", "backward"))[: 1 + backward]:
            op = Op(f"fsdp.{copy}", (flat, flat), (), phase, allocates=True, role="layout")
            yield op._replace(work=_work_of(op))

    def _among(self, ops: list[Op], own: Ops, name: str) -> Ops:
        """With the collectives of the setup's own block and what waits for them, after the same shares of compute."""
        if not any(isinstance(op.work, Collective) or op.syncs for op in own):
            return ops
        ends = list(accumulate((self._compute_us(op) for op in own), initial=0.0))
        starts = list(accumulate((self.costs.us(op) for op in ops), initial=0.0))
        scale = starts[-1] / ends[-1] if ends[-1] > 0 else 0.0
        found: Ops = []
        place: dict[int, int] = {}  # of calls of the setup's block that are here, too
        rest = iter(zip(starts, ops, strict=False))
        following = next(rest, None)
        for at, op in enumerate(own):
            if not isinstance(op.work, Collective) and not op.after and not op.syncs:
                continue
            while following is not None and following[0] < ends[at] * scale * (1 - 1e-9):
                found.append(following[1])
                following = next(rest, None)
            waited = (at + other if other < 0 else other for other in op.after)
            place[at] = len(found)
            after = tuple(place[other] - len(found) for other in waited)
            if isinstance(op.work, Collective):
                found.append(op._replace(after=after, module=name))
            else:
                found.append(Op("host" if op.syncs else "wait", launches=0.0, after=after, syncs=op.syncs))
        return [*found, *([following[1]] if following is not None else []), *(op for _, op in rest)]

    def _compute_us(self, op: Op) -> float:
        return self.costs.us(op) if isinstance(op.work, Operator) else 0.0

    def _hosted(self, ops: Ops, host_us: float) -> Ops:
        """With the host's time, divided among calls by their kernels; on a CPU, it computes in that time."""
        if self.on_cpu:
            host = Op("host", measured=Measured(host_us / self.learned.gpu, 0.0, like="stream"))
            return [*ops, host._replace(work=Operator("stream", (1,)))]
        if not self.costs.host_us:
            return ops
        launches = host_us / self.costs.host_us - sum(map(self.costs.launches, (op for op in ops if not op.measured)))
        kernels = sum(op.calls * op.measured.kernels for op in ops if op.measured)
        if not kernels:
            return [*ops, Op("host", launches=max(launches, 0.0))]
        each = max(launches, 0.0) / kernels
        return [op._replace(launches=each * op.calls * op.measured.kernels) if op.measured else op for op in ops]

    # ------------------------------------------------------------------ the host
    def host_us(self, name: str, own: Ops) -> float:
        """The host's time for a block: as measured, with what layouts add or take away.

        The optimizer's grows with the tensors it updates, that of recomputation with what it does besides.
        """
        # A layer that the traced run does not recompute takes this host as long as its forward pass, with bookkeeping
        # at the cost of its own launches; what DTensors add to those is counted among them.
        recomputes = self.traced.train.recompute == "full"
        same_as = name if recomputes else name.replace("recompute", "forward")
        measured = self.blocks[name].host_us
        before = self._launches(self._traced_own.get(same_as, []))
        if not before:
            return self.learned.host * measured
        before += _dtensor_launches(name, self.was)
        after = self._launches(own) + _dtensor_launches(name, self.now)
        same = _is_dtensor(self.target) == _is_dtensor(self.traced)
        in_proportion = same and (name == "optimizer" or same_as != name)
        changed = measured * after / before if in_proportion else measured + (after - before) * self.costs.host_us
        return self.learned.host * max(changed, _LEAST_HOST * measured)

    def _launches(self, own: Ops) -> float:
        return sum(ModelCosts.launches(self.costs, op) for op in own)

    @cached_property
    def _traced_own(self) -> dict[str, Ops]:
        """The traced setup's own blocks, by name."""
        return self.costs.was.kept("own blocks", lambda: own_blocks(self.was, self.blocks))

    @cached_property
    def _target_own(self) -> dict[str, Ops]:
        return own_blocks(self.now, self.blocks)


def own_blocks(program: Program, names: Container[str]) -> dict[str, Ops]:
    """The setup's own blocks by the names of blocks that were cut."""
    found = {"optimizer": program.optimizer(0).build()}
    for chunk in {chunk for row in program.chunks for chunk in row}:
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            for block in program.blocks(chunk, phase, whole=True):
                found.setdefault(_name_of(block.key, names), block.build())
    return found


def _name_of(key: Key, names: Container[str]) -> str:
    """The name of the cut's block that a block of the program corresponds to."""
    name = str(key[0])
    dense = f"{name} dense"
    return dense if key[1:2] == (False,) and dense in names else name


def traced_program(setup: Setup, costs: TraceCosts) -> Program:
    """The program of a setup with the blocks of a traced run."""
    return Program(setup).made_by(TracedBlocks(costs).block)


def _grown(op: Op, fixed: float, rest: float) -> Op:
    """A kernel of the optimizer takes some time whatever it updates."""
    return op._replace(measured=seen(op)._replace(us=fixed + rest))


def _work_of(op: Op) -> Operator:
    """What energy and contention depend on: matmuls and attention by their shapes, other operators by their bytes."""
    try:
        work = matrix_operator(op) if op.inputs else None
    except UNPRICED:
        work = None
    return work or Operator("stream", (max(1, round(bytes_of(op))),))


def us_by_kind(own: Sequence[Op], costs: ModelCosts) -> dict[str, float]:
    """Microseconds of a setup's own block, by kind of work."""
    found: dict[str, float] = {}
    for op in own:
        if op.work is not None:
            kind = _kind_of(op.work)
            found[kind] = found.get(kind, 0.0) + costs.us(op)
    return found


def _kind_of(work: Operator | Collective) -> str:
    if isinstance(work, Collective):
        return "comm"
    return "attention" if work.kind.startswith("sdpa") else "matrix" if work.is_matrix else "stream"


def _gathers(setup: Setup) -> bool:
    return setup.parallel.zero >= 3 and setup.parallel.dp * setup.parallel.cp > 1


def _is_dtensor(setup: Setup) -> bool:
    framework = framework_named(setup.train.framework, setup.train.precision)
    return setup.parallel.tp > 1 and framework.dtensor_updates > 0


def _update_kind(setup: Setup) -> str:
    """One fused kernel after another over whole tensors or over FSDP's shards; DTensors one by one."""
    if _is_dtensor(setup):
        return "dtensor"
    return "sharded" if _gathers(setup) else "whole"


def _dtensor_launches(name: str, program: Program) -> float:
    """Launches' worth of Python around the operators of DTensors, in a block."""
    if not _is_dtensor(program.setup):
        return 0.0
    if name == "optimizer":
        return program.layout.framework.dtensor_updates * program.tensors(0)
    if not name.startswith((*_LAYERS, "recompute")):
        return 0.0
    return program.layout.dtensor_launches[name.startswith("backward")]
