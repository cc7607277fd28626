"""The search space: every configuration that a search considers, in a fixed order.

A *layout* is a GPU type, a number of GPUs, and the sizes of tensor, context, pipeline and expert parallelism. Every
layout has *variants*: schedule, ZeRO stage, sequence parallelism, recomputation and micro-batch size; and, only where
that is asked for, how experts are cut, how context-parallel ranks attend and how many layers are recomputed. A
configuration is identified by its layout and variant indices, packed into one number, so that worker chunks, shards and
journals never hold the configurations themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from math import ceil
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lumos.errors import OptionError
from lumos.schedules import schedule_named, schedules_of
from lumos.setup.constraints import mistakes_in
from lumos.setup.frameworks import framework_named
from lumos.setup.gpus import gpu_named
from lumos.setup.messages import did_you_mean
from lumos.setup.sections import OF_GPU, Parallel
from lumos.setup.setup import KEYS, Setup

LAYOUT = ("cluster.gpu", "cluster.gpus", "parallel.tp", "parallel.cp", "parallel.pp", "parallel.ep")
VARIANT = (
    "parallel.vpp", "parallel.schedule", "parallel.zero", "parallel.sequence_parallel", "parallel.etp",
    "parallel.cp_type", "train.recompute_layers", "train.recompute", "train.micro_batch",
)  # fmt: skip
AXES = (*LAYOUT, *VARIANT)
DERIVED = {"parallel.dp": "parallel.tp, pp and cp", "train.microbatches": "train.micro_batch or global_batch"}

_MOST_CONTEXT_RANKS, _LEAST_TOKENS = 64, 1024  # tried by default; --vary parallel.cp can ask for more
_LARGEST_MICRO_BATCH = 64
_LAYOUTS_EACH = 100  # about; of a cluster
_MOST_COMBINATIONS = 5_000_000  # valid or not
VARIANT_BITS = 24  # of a configuration's number; the others are those of its layout

Layout = tuple[Any, ...]
_Parts = dict[tuple[Any, ...], Any]
Variant = tuple[Any, ...]


class Candidate(NamedTuple):
    """One configuration: the indices of its layout and variant, and the values of all axes, in the order of AXES."""

    layout: int
    variant: int
    values: tuple[Any, ...]

    @property
    def number(self) -> int:
        """Both indices in one number, which identifies the candidate within its space."""
        return self.layout << VARIANT_BITS | self.variant

    def keys(self) -> dict[str, Any]:
        """The values by their setup keys, as in {"parallel.tp": 8, …}."""
        return dict(zip(AXES, self.values, strict=True))


class Space:
    """All configurations of a setup: for every axis the values in `choices`, or else all that make sense.

    >>> space = Space(setup, {"cluster.gpus": (16,)})                          # doctest: +SKIP
    >>> [c.keys() for i in range(len(space.layouts)) for c, _ in space.candidates(i)]   # doctest: +SKIP
    """

    def __init__(
        self,
        setup: Setup,
        choices: Mapping[str, tuple[Any, ...]],
        holds_for_all: Collection[str] = (),
        batches: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.setup, self.choices = setup, choices
        self.batches = batches  # by number of GPUs: for layouts whose replicas cannot share the setup's batch evenly
        self._holds_for_all = holds_for_all  # keys of the cluster that count on every type of GPU, not on its own alone
        self.gpu_types = self._stated("cluster.gpu")
        self._framework = framework_named(setup.train.framework)
        self._own_schedules = schedules_of(setup.train.framework)

    @cached_property
    def layouts(self) -> list[Layout]:
        """Every way to lay the model out on the GPUs; some may have no valid variant."""
        self._refuse_if_too_many("ways to divide the GPUs", sum(
            len(self._tp_sizes(gpu, gpus)) * len(self._cp_sizes(gpus)) * len(self._pp_sizes(gpus)) * self._most_eps
            for gpu, gpus in self._clusters
        ))  # fmt: skip
        found: list[Layout] = []
        for gpu, gpus in self._clusters:
            for tp, cp, pp in product(self._tp_sizes(gpu, gpus), self._cp_sizes(gpus), self._pp_sizes(gpus)):
                if gpus % (tp * cp * pp) == 0 and self._batch(gpus, gpus // (tp * cp * pp)):
                    found += [(gpu, gpus, tp, cp, pp, ep) for ep in self._ep_sizes(gpus // pp)]
        self._refuse_if_too_many("combinations", sum(self._count_variants(layout) for layout in found))
        return found

    @staticmethod
    def _refuse_if_too_many(what: str, count: int) -> None:
        """Before time or memory is spent on them."""
        if count > _MOST_COMBINATIONS:
            raise OptionError(
                f"{count:,} {what} are too many (more than {_MOST_COMBINATIONS:,}): name fewer values with --vary, or "
                "fix some keys with --set"
            )

    @cached_property
    def families(self) -> NDArray[np.int64]:
        """The family of every layout: those with the same GPUs, TP, PP and EP lay the weights out in the same way.

        Data and context parallelism divide tokens instead, and one can often take the other's place.
        """
        first: dict[tuple[Any, ...], int] = {}
        keys = ((gpu, gpus, tp, pp, ep) for gpu, gpus, tp, _, pp, ep in self.layouts)
        return np.array([first.setdefault(key, len(first)) for key in keys], np.int64)

    def candidates(self, layout: int) -> Iterator[tuple[Candidate, Setup]]:
        """The valid configurations of a layout, in order; micro-batch sizes vary fastest, from small to large."""
        values = self.layouts[layout]
        _, gpus, tp, cp, pp, _ = values
        dp = gpus // (tp * cp * pp)
        per_replica = self._batch(gpus, dp) // dp
        is_valid: dict[tuple[Any, ...], bool] = {}  # constraints do not depend on ZeRO and recomputation
        parts: _Parts = {}
        for index, variant in enumerate(self._variants(values)):
            vpp, schedule, _, *parallel, _, _, micro_batch = variant
            count = per_replica // micro_batch
            key = vpp, schedule, *parallel, count
            if is_valid.get(key) is False or schedule_named(schedule).problem(pp, vpp, count):
                continue
            found = Candidate(layout, index, (*values, *variant))
            setup = self.setup_of(found, parts)
            if key not in is_valid:
                is_valid[key] = not mistakes_in(setup)
            if is_valid[key]:
                yield found, setup

    def candidate(self, number: int) -> Candidate:
        """The configuration with that number."""
        layout, variant = divmod(number, 1 << VARIANT_BITS)
        values = self.layouts[layout]
        return Candidate(layout, variant, (*values, *self._variants(values)[variant]))

    def setup_of(self, candidate: Candidate, parts: _Parts | None = None) -> Setup:
        """The complete setup of a configuration. Its values come from this space, so their types are not checked.

        Setups that are made with the same `parts` share their sections where these are equal.
        """
        parts = {} if parts is None else parts
        gpu, gpus, *sizes, layers, recompute, micro_batch = candidate.values
        key = tuple(sizes)
        if key not in parts:
            parts[key] = self._parallel(gpus, *sizes)
        parallel = parts[key]
        key = layers, recompute, micro_batch, parallel.dp
        if key not in parts:
            batch = self._batch(gpus, parallel.dp)
            count = batch // (micro_batch * parallel.dp)
            changes = {"micro_batch": micro_batch, "microbatches": count, "recompute": recompute}
            parts[key] = self.setup.train.model_copy(
                update=changes | {"recompute_layers": layers, "global_batch": batch}
            )
        train = parts[key]
        cluster = self._clusters[gpu, gpus]
        base = self.setup
        return Setup.model_construct(
            model=base.model, train=train, parallel=parallel, cluster=cluster, reliability=base.reliability,
            variability=base.variability,
        )  # fmt: skip

    def _parallel(
        self, gpus: int, tp: int, cp: int, pp: int, ep: int, vpp: int, schedule: str, zero: int, split: bool,
        etp: int, cp_type: str,
    ) -> Parallel:  # fmt: skip
        base, dp = self.setup.parallel, gpus // (tp * cp * pp)
        return base.model_copy(update={
            "tp": tp, "cp": cp, "pp": pp, "ep": ep, "vpp": vpp, "dp": dp, "zero": zero, "schedule": schedule,
            "sequence_parallel": split, "etp": etp, "cp_type": cp_type, "shard": base.shard if base.dp == dp else 0,
            "stage_layers": base.stage_layers if (pp, vpp) == (base.pp, base.vpp) else (),
        })  # fmt: skip

    def tried(self) -> dict[str, list[Any]]:
        """The values that are tried for every axis, in some layout or other: a bound holds for these and no others."""
        found: dict[str, dict[Any, None]] = {key: {} for key in AXES}
        for layout in self.layouts:
            _, gpus, tp, cp, pp, _ = layout
            for key, value in zip(LAYOUT, layout, strict=True):
                found[key][value] = None
            for vpp, schedule in self._schedules(pp):
                found["parallel.vpp"][vpp] = found["parallel.schedule"][schedule] = None
            dp = gpus // (tp * cp * pp)
            found["parallel.zero"] |= dict.fromkeys(self._zero_stages(dp * cp, pp))
            found["parallel.sequence_parallel"] |= dict.fromkeys(self._splits(tp))
            found["parallel.etp"] |= dict.fromkeys(self._expert_cuts(tp))
            found["parallel.cp_type"] |= dict.fromkeys(self._cp_types(cp))
            found["train.micro_batch"] |= dict.fromkeys(self._micro_batches(gpus, dp))
        for layers, recompute in self._recomputations if self.layouts else ():
            found["train.recompute_layers"][layers] = found["train.recompute"][recompute] = None
        return {key: sorted(values, key=lambda value: (value is not None, value)) for key, values in found.items()}

    # ------------------------------------------------------------------ the values of every axis
    @cached_property
    def _clusters(self) -> dict[tuple[str, int], Any]:
        cluster, found = self.setup.cluster, {}
        types, counts = self.gpu_types, self._stated("cluster.gpus")
        self._refuse_if_too_many("ways to divide the GPUs", len(types) * len(counts) * _LAYOUTS_EACH)
        stated = cluster.stated()
        usual = {key: value for key, value in OF_GPU.items() if key in stated and key not in self._holds_for_all}
        for gpu, gpus in product(types, counts):
            other = {} if gpu == cluster.gpu else {"gpu": gpu, "gpus_per_node": 0, **usual}
            found[gpu, gpus] = cluster.with_values({"gpus": gpus, **other})
        return found

    @cached_property
    def cluster_of(self) -> NDArray[np.int64]:
        """Which GPUs and how many every layout is on: an index into `clusters`."""
        index = {cluster: number for number, cluster in enumerate(self.clusters)}
        return np.array([index[layout[:2]] for layout in self.layouts], np.int64)

    @cached_property
    def batch_of(self) -> NDArray[np.int64]:
        """The global batch of every layout."""
        return np.array(
            [self._batch(gpus, gpus // (tp * cp * pp)) for _, gpus, tp, cp, pp, _ in self.layouts], np.int64
        )

    @property
    def clusters(self) -> list[tuple[str, int]]:
        """(GPU type, number of GPUs), in the order in which they were asked for."""
        return list(self._clusters)

    def _stated(self, key: str) -> tuple[Any, ...]:
        """The choices for a key, or else the setup's own value."""
        section, _, name = key.partition(".")
        return self.choices.get(key, (getattr(getattr(self.setup, section), name),))

    def _tp_sizes(self, gpu: str, gpus: int) -> Sequence[int]:
        """Within one NVLink domain: beyond it, every layer would wait for the network between nodes."""
        most, heads = self._clusters[gpu, gpus].accelerator.nvlink_domain, self.setup.model.heads
        return self.choices.get("parallel.tp") or [n for n in _divisors(gpus, most) if heads % n == 0]

    def _cp_sizes(self, gpus: int) -> Sequence[int]:
        """Down to a thousand tokens of a sequence on a rank: with fewer, matmuls are too small to be worth it."""
        seq = self.setup.train.seq
        most = min(_MOST_CONTEXT_RANKS, max(seq // _LEAST_TOKENS, 1))
        return self.choices.get("parallel.cp") or [n for n in _divisors(gpus, most) if seq // 2 % n == 0]

    def _pp_sizes(self, gpus: int) -> Sequence[int]:
        default = _divisors(gpus, self.setup.model.layers) if self._own_schedules else (1,)
        return self.choices.get("parallel.pp") or default

    def _ep_sizes(self, ranks: int) -> Sequence[int]:
        experts = self.setup.model.experts
        if not experts:
            return (1,)
        return [n for n in self.choices.get("parallel.ep") or _divisors(experts, ranks) if ranks % n == 0]

    @property
    def _most_eps(self) -> int:
        experts = self.setup.model.experts
        return max(len(self.choices.get("parallel.ep") or _divisors(experts, experts)), 1)

    def _variants(self, layout: Layout) -> list[Variant]:
        """The variants of a layout, in the order of VARIANT, whether valid or not."""
        _, gpus, tp, cp, pp, _ = layout
        dp = gpus // (tp * cp * pp)
        axes = product(self._schedules(pp), self._zero_stages(dp * cp, pp), self._splits(tp), self._expert_cuts(tp),
                       self._cp_types(cp), self._recomputations, self._micro_batches(gpus, dp))  # fmt: skip
        return [(*schedule, *others, *again, size) for schedule, *others, again, size in axes]

    def _count_variants(self, layout: Layout) -> int:
        """How many there are, without making them."""
        _, gpus, tp, cp, pp, _ = layout
        dp = gpus // (tp * cp * pp)
        schedules, zeros = sum(1 for _ in self._schedules(pp)), len(self._zero_stages(dp * cp, pp))
        asked_for = len(self._expert_cuts(tp)) * len(self._cp_types(cp))
        both = len(self._recomputations) * len(self._micro_batches(gpus, dp))
        return schedules * zeros * len(self._splits(tp)) * asked_for * both

    @cached_property
    def _recomputations(self) -> Sequence[tuple[int | None, str]]:
        """(layers that are recomputed, how); the first counts where whole layers are, and is None elsewhere."""
        words, layers = self.choices.get("train.recompute", ("none", "selective", "full")), "train.recompute_layers"
        return [(n, word) for word in words for n in (self._stated(layers) if word == "full" else (None,))]

    def _expert_cuts(self, tp: int) -> Sequence[int]:
        """As in the setup, unless others are asked for; experts that are cut by tp, as Megatron's are, stay so."""
        base = self.setup.parallel
        return self.choices.get("parallel.etp") or (tp if base.etp == base.tp > 1 else base.etp,)

    def _cp_types(self, cp: int) -> Sequence[str]:
        return self._stated("parallel.cp_type") if cp > 1 else ("",)

    def _splits(self, tp: int) -> Sequence[bool]:
        """Without and with sequence parallelism."""
        return self.choices.get("parallel.sequence_parallel") or ((False, True) if tp > 1 else (False,))

    def _batch(self, gpus: int, dp: int) -> int:
        """The batch of layouts with so many replicas: the setup's where they can share it; 0 where there is none."""
        batches = (self.setup.train.global_batch, self.batches.get(gpus, 0))
        return next((batch for batch in batches if batch % dp == 0), 0)

    def _micro_batches(self, gpus: int, dp: int) -> list[int]:
        per_replica = self._batch(gpus, dp) // dp
        sizes = self.choices.get("train.micro_batch") or _divisors(per_replica, _LARGEST_MICRO_BATCH)
        return sorted(size for size in sizes if per_replica % size == 0)

    def _schedules(self, pp: int) -> Iterator[tuple[int, str]]:
        """(virtual stages, schedule)."""
        if pp == 1:
            yield 1, "1f1b"
            return
        schedules = self.choices.get("parallel.schedule") or self._own_schedules or ("1f1b",)
        for vpp, schedule in product(self.choices.get("parallel.vpp") or self._vpp_sizes(pp), schedules):
            fewest, most = schedule_named(schedule).chunks
            if fewest <= vpp <= most:
                yield vpp, schedule

    def _vpp_sizes(self, pp: int) -> list[int]:
        """For every number of layers that a virtual stage may hold, the fewest virtual stages that hold no more.

        Layers need not divide evenly: 126 of them on 16 stages make up to 2, 3 or 4 virtual stages of 4, 3 or 2 layers.
        """
        layers = self.setup.model.layers
        sizes = {ceil(layers / (pp * most)) for most in range(1, ceil(layers / pp) + 1)}
        return sorted(size for size in sizes if pp * size <= layers) or [1]

    def _zero_stages(self, ranks: int, pp: int) -> Sequence[int]:
        """ZeRO 2 shards gradients, which pipeline stages accumulate: only some frameworks combine the two."""
        stages = self.choices.get("parallel.zero") or self._framework.zeros
        both = pp == 1 or self._framework.zero2_with_pipeline
        return [zero for zero in stages if (zero == 0 or ranks > 1) and (zero != 2 or both)]


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def checked_choices(setup: Setup, choices: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The values that a user named for axes, each checked against the setup's own types."""
    found: dict[str, tuple[Any, ...]] = {}
    for key, named in choices.items():
        values: list[Any] = [named] if named is None or isinstance(named, str | int | float) else list(named)
        if key in DERIVED:
            raise OptionError(f"{key} follows from other keys: fix or vary {DERIVED[key]} instead")
        if key not in AXES and key in KEYS:
            raise OptionError(f"--vary {key}: a search cannot vary this key: use --set, one search for each value")
        if key not in AXES:
            raise OptionError(f"--vary {key}: a search cannot vary this key: {did_you_mean(key, AXES)}")
        if not values:
            raise OptionError(f"--vary {key}= names no value: list some, as in {key}=1,2,4")
        for value in values:
            setup.replaced({key: value})
            if key == "cluster.gpus" and value < 1:
                raise OptionError(f"cluster.gpus = {value}: a search needs at least 1 GPU")
        if key == "cluster.gpu":
            files = [value for value in values if value.endswith(".npz")]
            if files:
                raise OptionError(f"--gpu {files[0]}: a search takes a model file as --model {files[0]}")
            values = [gpu_named(value).name for value in values]
        found[key] = tuple(dict.fromkeys(values))
    return found
