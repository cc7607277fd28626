"""Space: all configurations that a search looks at, in an order that never changes.

A layout says how many GPUs of which kind there are and how they are divided; every layout has its variants. A candidate
is named by the two numbers (layout, variant), so that chunks, shards and journals need not hold the candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from lumos.errors import OptionError
from lumos.setup.constraints import mistakes_in
from lumos.setup.frameworks import framework_named
from lumos.setup.gpus import gpu_named
from lumos.setup.messages import did_you_mean
from lumos.setup.setup import Setup

LAYOUT = ("cluster.gpu", "cluster.gpus", "parallel.tp", "parallel.cp", "parallel.pp", "parallel.ep")
VARIANT = (
    "parallel.vpp", "parallel.schedule", "parallel.zero", "parallel.sequence_parallel", "train.recompute",
    "train.micro_batch",
)  # fmt: skip
AXES = (*LAYOUT, *VARIANT)
FOLLOWING = {"parallel.dp": "parallel.tp, pp and cp", "train.microbatches": "train.micro_batch or global_batch"}

_LONGEST = 64  # ranks that share a sequence, unless more are asked for
_LARGEST_MICRO_BATCH = 64
_MOST_LAYOUTS = 1 << 20
_VARIANT_BITS = 24


class Candidate(NamedTuple):
    """One configuration: the number of its layout and of its variant, and the values of all axes in order."""

    layout: int
    variant: int
    values: tuple[Any, ...]

    @property
    def number(self) -> int:
        """One number for both."""
        return self.layout << _VARIANT_BITS | self.variant

    @property
    def kind(self) -> tuple[Any, ...]:
        """All but the size of micro-batches, by which candidates of one kind are sorted."""
        return self.values[:-1]

    def keys(self) -> dict[str, Any]:
        return dict(zip(AXES, self.values, strict=True))


class Space:
    """The values of every axis: those that were asked for, else all that make sense for the setup."""

    def __init__(self, setup: Setup, choices: Mapping[str, tuple[Any, ...]]) -> None:
        self.setup, self.choices = setup, choices

    @cached_property
    def layouts(self) -> list[tuple[Any, ...]]:
        """Every division of the GPUs, valid or not in all its variants."""
        found = []
        for gpu, gpus in product(self._values("cluster.gpu"), self._values("cluster.gpus")):
            for tp, cp in product(self._tensor_ways(gpu, gpus), self._context_ways(gpus)):
                for pp in self._stages(gpus):
                    if gpus % (tp * cp * pp) == 0 and self.setup.train.global_batch % (gpus // (tp * cp * pp)) == 0:
                        found += [(gpu, gpus, tp, cp, pp, ep) for ep in self._experts(gpus // pp)]
        if len(found) > _MOST_LAYOUTS:
            raise OptionError(f"{len(found):,} ways to divide the GPUs are too many: fix a key with --set")
        return found

    def candidates(self, layout: int) -> Iterator[Candidate]:
        """The valid configurations of a layout, in order."""
        kinds, batches = self._variants(self.layouts[layout])
        for variant in range(len(kinds) * len(batches)):
            found = Candidate(layout, variant, (*self.layouts[layout], *self._chosen(kinds, batches, variant)))
            if self._whole(found) and not mistakes_in(self.setup_of(found)):
                yield found

    def candidate(self, number: int) -> Candidate:
        """The configuration of that number."""
        layout, variant = divmod(number, 1 << _VARIANT_BITS)
        values = self.layouts[layout]
        return Candidate(layout, variant, (*values, *self._chosen(*self._variants(values), variant)))

    def setup_of(self, candidate: Candidate) -> Setup:
        """The whole setup; types need no check, they are ours."""
        gpu, gpus, tp, cp, pp, ep, vpp, schedule, zero, sequence_parallel, recompute, micro_batch = candidate.values
        base, dp = self.setup, gpus // (tp * cp * pp)
        sizes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "vpp": vpp, "dp": dp}
        stage_layers = base.parallel.stage_layers if (pp, vpp) == (base.parallel.pp, base.parallel.vpp) else ()
        parallel = base.parallel.model_copy(update={
            **sizes, "zero": zero, "sequence_parallel": sequence_parallel, "schedule": schedule,
            "stage_layers": stage_layers, "shard": base.parallel.shard if base.parallel.dp == dp else 0,
        })  # fmt: skip
        count = base.train.global_batch // (micro_batch * dp)
        train = base.train.model_copy(
            update={"micro_batch": micro_batch, "microbatches": count, "recompute": recompute}
        )
        return Setup.model_construct(
            model=base.model, train=train, parallel=parallel, cluster=self._clusters[gpu, gpus]
        )

    # ------------------------------------------------------------------ the values of every axis
    @property
    def kinds(self) -> tuple[str, ...]:
        """Of GPU."""
        return self._values("cluster.gpu")

    @cached_property
    def _clusters(self) -> dict[tuple[str, int], Any]:
        cluster, found = self.setup.cluster, {}
        for gpu, gpus in product(self._values("cluster.gpu"), self._values("cluster.gpus")):
            values = {"gpus": gpus} | ({"gpu": gpu, "gpus_per_node": 0} if gpu != cluster.gpu else {})
            found[gpu, gpus] = cluster.with_values(values)
        return found

    def _values(self, key: str) -> tuple[Any, ...]:
        section, _, name = key.partition(".")
        return self.choices.get(key, (getattr(getattr(self.setup, section), name),))

    def _tensor_ways(self, gpu: str, gpus: int) -> Sequence[int]:
        """As far as NVLink reaches: beyond, every layer would wait for the network between nodes."""
        most = self._clusters[gpu, gpus].accelerator.nvlink_domain
        heads = self.setup.model.heads
        return self.choices.get("parallel.tp") or [n for n in _divisors(gpus, most) if heads % n == 0]

    def _context_ways(self, gpus: int) -> Sequence[int]:
        half = self.setup.train.seq // 2
        return self.choices.get("parallel.cp") or [n for n in _divisors(gpus, _LONGEST) if half % n == 0]

    def _stages(self, gpus: int) -> Sequence[int]:
        if "parallel.pp" in self.choices:
            return self.choices["parallel.pp"]
        has = framework_named(self.setup.train.framework).schedules
        return _divisors(gpus, self.setup.model.layers) if has else (1,)

    def _experts(self, ranks: int) -> Sequence[int]:
        experts = self.setup.model.experts
        if not experts:
            return (1,)
        return [n for n in self.choices.get("parallel.ep") or _divisors(experts, ranks) if ranks % n == 0]

    def _variants(self, layout: tuple[Any, ...]) -> tuple[list[tuple[Any, ...]], list[int]]:
        """Kinds of a layout's configurations, and sizes of micro-batches from small to large."""
        _, gpus, tp, cp, pp, _ = layout
        dp = gpus // (tp * cp * pp)
        per_replica = self.setup.train.global_batch // dp
        batches = self.choices.get("train.micro_batch") or _divisors(per_replica, _LARGEST_MICRO_BATCH)
        recomputes = self.choices.get("train.recompute", ("none", "selective", "full"))
        kinds = product(self._orders(pp), self._zeros(dp * cp, pp), self._splits(tp), recomputes)
        return list(kinds), sorted(size for size in batches if per_replica % size == 0)

    def _chosen(self, kinds: list[tuple[Any, ...]], batches: list[int], variant: int) -> tuple[Any, ...]:
        kind, batch = divmod(variant, len(batches))
        (vpp, schedule), zero, split, recompute = kinds[kind]
        return vpp, schedule, zero, split, recompute, batches[batch]

    def _whole(self, candidate: Candidate) -> bool:
        """Interleaved stages take whole rounds of micro-batches; the rules say so too, but slowly."""
        _, gpus, tp, cp, pp, _, vpp, *_, micro_batch = candidate.values
        count = self.setup.train.global_batch // (gpus // (tp * cp * pp) * micro_batch)
        return bool(vpp == 1 or count % pp == 0)

    def _orders(self, pp: int) -> Iterator[tuple[int, str]]:
        """Virtual stages and schedule."""
        layers, has = self.setup.model.layers, framework_named(self.setup.train.framework).schedules
        schedules = self.choices.get("parallel.schedule") or has or ("1f1b",)
        if pp == 1:
            yield 1, "1f1b"
            return
        whole = [n for n in _divisors(layers // pp, layers) if layers % (pp * n) == 0] or [1]
        for vpp in self.choices.get("parallel.vpp") or whole:
            for schedule in schedules:
                if (schedule == "interleaved") == (vpp > 1):
                    yield vpp, schedule

    def _zeros(self, ranks: int, pp: int) -> Sequence[int]:
        """Stages of ZeRO; gradients cannot stay divided while a pipeline accumulates them (DeepSpeed refuses it)."""
        asked = self.choices.get("parallel.zero") or framework_named(self.setup.train.framework).zeros
        return [zero for zero in asked if (zero == 0 or ranks > 1) and not (zero == 2 and pp > 1)]

    def _splits(self, tp: int) -> Sequence[bool]:
        return self.choices.get("parallel.sequence_parallel") or ((False, True) if tp > 1 else (False,))


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def checked_choices(setup: Setup, choices: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """The values of axes that a user named, each checked against the setup's own types."""
    found: dict[str, tuple[Any, ...]] = {}
    for key, values in choices.items():
        if key in FOLLOWING:
            raise OptionError(f"{key} follows from the other keys: fix or vary {FOLLOWING[key]} instead")
        if key not in AXES:
            raise OptionError(f"--vary {key}: a search does not vary that: {did_you_mean(key, AXES)}")
        if not values:
            raise OptionError(f"--vary {key}= names no value: list some, as in {key}=1,2,4")
        for value in values:
            setup.replaced({key: value})
            if key == "cluster.gpus" and value < 1:
                raise OptionError(f"cluster.gpus = {value}: a search needs at least 1 GPU")
        if key == "cluster.gpu":
            values = [gpu_named(value).name for value in values]
        found[key] = tuple(dict.fromkeys(values))
    return found
