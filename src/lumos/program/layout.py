"""RankLayout: the sizes one rank sees of a model, after tensor, context and expert parallelism have divided it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from math import ceil, gcd

from lumos.program.operators import Group
from lumos.program.rank_places import RankPlaces
from lumos.schedules import Schedule, schedule_named
from lumos.setup.frameworks import Framework, framework_named
from lumos.setup.setup import Setup


def layout_of(setup: Setup) -> RankLayout:
    """The layout of a setup, by the rules of its framework."""
    return RankLayout(setup, framework_named(setup.train.framework, setup.train.precision))


class RankLayout:
    """One rank's part. Groups are laid out from the inside out: tensor, context, data, pipeline.

    So do Megatron, torchtitan, DeepSpeed and nanotron; `parallel.order` can exchange the last two, as Megatron's
    --use-tp-pp-dp-mapping does.
    """

    def __init__(self, setup: Setup, framework: Framework) -> None:
        self.setup, self.framework = setup, framework
        self.model, self.train, self.parallel = setup.model, setup.train, setup.parallel
        if setup.cluster.accelerator.is_other_accelerator:
            self.train = setup.train.with_values({"compile": True})

    @cached_property
    def domain(self) -> int:
        """Ranks of the job that reach each other without the network between nodes: by NVLink, or over PCIe alone."""
        gpu = self.setup.cluster.accelerator
        return max(1, min(gpu.nvlink_domain if gpu.nvlink_domain > 1 else gpu.gpus_per_node, self.setup.cluster.gpus))

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Ranks in one unit of every tier above the domain, except the last tier, which joins all: a node, a leaf.

        The tiers are those of `lumos.costs.network`. With rails, a leaf switch has one NIC of each node, so that
        traffic that leaves a node stays below the spine among as many nodes as a leaf has NICs.
        """
        cluster, gpu = self.setup.cluster, self.setup.cluster.accelerator
        node = (gpu.gpus_per_node,) if 1 < gpu.nvlink_domain < gpu.gpus_per_node else ()
        below = cluster.leaf_gpus * (gpu.gpus_per_node if cluster.rail_aligned else 1)
        return (*node, below) if below else node

    def group(self, size: int, stride: int) -> Group:
        """Ranks of one pipeline stage, `stride` apart among them, and how many of them share each tier.

        Where stages hold copies of each other, the ranks of both: then those count that are farthest apart, of the
        first and the last stage.
        """
        here = min(size, max(1, self.places.of_stage // stride))
        copies = size // here
        counts = []
        for unit in (self.domain, *self.units):
            held = self._in_one(here, stride, unit)
            counts.append(held * copies if copies > 1 and self._share(0, self.parallel.pp - 1, unit) else held)
        return Group(size, counts[0], tuple(counts[1:]), stride)

    def group_of(self, ranks: Sequence[int]) -> Group:
        """The group of ranks that a recording or a foreign graph lists; of each tier, the unit with fewest counts."""
        inside, *above = (min(Counter(rank // unit for rank in ranks).values()) for unit in (
            self.domain, *self.units))  # fmt: skip
        steps = {after - before for before, after in pairwise(ranks)}
        return Group(len(ranks), inside, tuple(above), max(1, steps.pop()) if len(steps) == 1 else 1)

    def _in_one(self, size: int, stride: int, unit: int) -> int:
        """How many of `size` ranks of a stage, `stride` apart among them, are in one unit of so many neighbours.

        Where a node ends in the middle of a group, the smaller part of it. Racks are not told apart so: who runs on
        some takes as many GPUs of each as the groups divide.
        """
        held = _held(size, stride, self._of_stage(unit))
        near, stages = self.places.near, self.places.stages
        apart = stages if size * stride > near else 1  # ranks of other stages lie in between
        block = size * stride * apart
        if held < size or unit >= self.places.world or unit > self.setup.cluster.gpus_per_node:
            return held
        return held if unit % block == 0 else max(1, gcd(unit, block) // (stride * apart))

    @cached_property
    def places(self) -> RankPlaces:
        return RankPlaces.of_setup(self.parallel, self.schedule.copies)

    def _of_stage(self, unit: int) -> int:
        """Ranks of one pipeline stage among so many neighbours."""
        p = self.parallel
        if p.order == "tp-cp-dp-pp":
            return unit
        near = p.tp * p.cp
        return max(unit // (near * p.pp) * near, min(unit, near))

    def leaves(self, rank: int, size: int, stride: int) -> bool:
        """Whether a rank has partners outside its domain in such a group of its stage."""
        return any(other // self.domain != rank // self.domain for other in self.places.members(rank, size, stride))

    def stage_leaves(self, rank: int, way: int) -> bool:
        """Whether messages of a rank to the next stage (1), or to the one before (-1), leave its domain."""
        number, stage = self.places.of(rank)
        other = self.places.rank(number, (stage + way) % self.parallel.pp)
        return other // self.domain != rank // self.domain

    @cached_property
    def tp(self) -> Group:
        return self.group(self.parallel.tp, 1)

    @cached_property
    def cp(self) -> Group:
        return self.group(self.parallel.cp, self.parallel.tp)

    @cached_property
    def dp(self) -> Group:
        """Ranks that hold the same weights: data and context parallel ones, of all stages that have a copy."""
        return self.group(self.schedule.copies * self.parallel.dp * self.parallel.cp, self.parallel.tp)

    @cached_property
    def expert_tp(self) -> int:
        """Ranks that one expert is cut for: as given, or 1 where a rank has several experts, or tp."""
        p = self.parallel
        if p.etp:
            return p.etp
        whole = self.model.experts > p.ep > 1 or (p.dp * p.cp) % p.ep
        return 1 if whole else p.tp  # Megatron-Core's default for one large expert a rank

    @cached_property
    def expert_gather(self) -> Group:
        """Ranks that bring different tokens to an expert that is cut for them all."""
        tp = self.parallel.tp
        if self.splits_sequences or tp == 1:
            return self.group(self.expert_tp, 1)
        return self.group(max(1, self.expert_tp // tp), tp)

    @cached_property
    def cp_heads(self) -> int:
        """Context-parallel ranks among which attention divides the heads, not the sequence."""
        p = self.parallel
        if p.cp_type == "a2a":
            return p.cp
        if p.cp_type != "a2a+p2p":
            return 1
        most = gcd(p.cp, gcd(self.heads, self.kv_heads))
        fit = [n for n in range(1, most + 1) if most % n == 0 and n * p.tp <= self.domain]
        return p.cp_inner or max(fit, default=1)

    @cached_property
    def cp_exchange(self) -> tuple[Group, Group]:
        """The ranks that exchange heads, and those that exchange keys and values; one of them may be alone."""
        inner, tp = self.cp_heads, self.parallel.tp
        return self.group(inner, tp), self.group(self.parallel.cp // inner, tp * inner)

    @cached_property
    def ep(self) -> Group:
        return self.group(self.parallel.ep, self.expert_tp)

    @cached_property
    def expert_dp(self) -> Group:
        """Ranks that hold the same experts."""
        p, inner = self.parallel, self.expert_tp * self.parallel.ep
        return self.group(self.schedule.copies * p.dp * p.cp * p.tp // inner, inner)

    @cached_property
    def sharing(self) -> tuple[Group, Group]:
        """Ranks that divide one copy of the weights, gradients or state, and those that hold the same part."""
        return self._divided(self.dp.size, self.parallel.tp)

    @cached_property
    def experts_sharing(self) -> tuple[Group, Group]:
        return self._divided(self.expert_dp.size, self.parallel.ep * self.expert_tp)

    @cached_property
    def shards(self) -> int:
        """Ranks that divide what the optimizer updates."""
        return self.sharing[0].size if self.parallel.zero else 1

    def _divided(self, size: int, stride: int) -> tuple[Group, Group]:
        """The same for `size` ranks of the replicas, each of which is several where contexts or experts are divided."""
        chosen = self.parallel.shard if self.parallel.zero else 0
        near = max(1, size * chosen // self.parallel.dp) if chosen else size
        return self.group(near, stride), self.group(size // near, stride * near)

    def link(self, one: int, other: int) -> Group:
        """A rank of one stage and its partner in another; of all such pairs of a job, those that are farthest apart.

        All ranks of a stage go at the pace of the slowest, at the latest when they reduce gradients.
        """
        inside, *above = (2 if self._share(one, other, unit) else 1 for unit in (self.domain, *self.units))
        return Group(2, inside, tuple(above))

    def _share(self, one: int, other: int, unit: int) -> bool:
        """Whether every rank of one stage is in the same unit, of so many neighbouring ranks, as its partner."""
        places = self.places
        stages, near = places.stages, places.near
        low, high = sorted((one, other))
        repeats = unit // gcd(unit, stages * near)  # after so many blocks of all stages, units begin with one again
        return all(
            (block * stages + low) * near // unit == ((block * stages + high + 1) * near - 1) // unit
            for block in range(min(repeats, places.of_stage // near))
        )

    @cached_property
    def sequences(self) -> int:
        return self.train.micro_batch

    @cached_property
    def seq(self) -> int:
        return self.train.seq // self.parallel.cp

    @cached_property
    def tokens(self) -> int:
        return self.sequences * self.seq

    @cached_property
    def spread_tokens(self) -> int:
        """Tokens outside the tensor-parallel regions: divided where sequences are."""
        return self.tokens // self.parallel.tp if self.splits_sequences else self.tokens

    @cached_property
    def splits_sequences(self) -> bool:
        return self.parallel.sequence_parallel and self.parallel.tp > 1

    @cached_property
    def heads(self) -> int:
        return max(1, self.model.heads // self.parallel.tp)

    @cached_property
    def kv_heads(self) -> int:
        return max(1, self.model.kv_heads // self.parallel.tp)

    @cached_property
    def vocab(self) -> int:
        """The padded vocabulary of one rank."""
        tp = self.parallel.tp if self.framework.splits_vocab else 1
        return ceil(self.model.vocab / (128 * tp)) * 128 if tp > 1 else self.model.vocab

    @cached_property
    def precision(self) -> str:
        """Of activations and of everything that is not a linear layer."""
        return {"fp8": "bf16", "mxfp8": "bf16", "nvfp4": "bf16", "tf32": "fp32"}.get(
            self.train.precision, self.train.precision
        )

    @cached_property
    def element(self) -> int:
        """Bytes of one activation."""
        return 4 if self.precision == "fp32" else 2

    @cached_property
    def inward(self) -> int:
        """Matrices of an MLP before its activation: up, and the gate."""
        return 2 if self.model.gated else 1

    @cached_property
    def scores(self) -> float:
        """Elements of the attention scores of all heads."""
        return float(self.tokens * self.heads * self.train.seq)

    @cached_property
    def eight_bit(self) -> bool:
        """Linear layers run in 8 bits or fewer, and cast their inputs."""
        return self.train.precision in ("fp8", "mxfp8", "nvfp4")

    @cached_property
    def linear_element(self) -> int:
        """Bytes of one element of a linear layer's input, as it is kept for the backward pass.

        Transformer Engine keeps the copy in 8 bits; torchao keeps the input, and casts it again.
        """
        return 1 if self.eight_bit and self.framework.fused else self.element

    @cached_property
    def caches_fp8(self) -> bool:
        """Some of what the backward pass reads is kept in fewer bits than it was made in."""
        return self.eight_bit and self.framework.caches_fp8

    @cached_property
    def activation_bytes(self) -> float:
        """The hidden states of one micro-batch, whole sequences."""
        return float(self.tokens * self.model.hidden * self.element)

    @cached_property
    def residual_bytes(self) -> float:
        """The residual stream of one micro-batch: divided where sequences are."""
        return float(self.spread_tokens * self.model.hidden * self.element)

    @cached_property
    def divides_inputs(self) -> bool:
        """Layers that are recomputed keep a part of their input on each tensor rank."""
        asked = self.train.partition_activations and self.train.recompute == "full"
        return asked and self.parallel.tp > 1 and not self.splits_sequences

    @cached_property
    def kept_input_bytes(self) -> float:
        """What one rank keeps of the input of a layer that is recomputed."""
        return self.residual_bytes / (self.parallel.tp if self.divides_inputs else 1)

    @cached_property
    def shares_norm(self) -> bool:
        """Attention and MLP read the output of one norm."""
        return self.model.parallel_residual and not self.framework.norm_per_branch

    @cached_property
    def attention(self) -> str:
        unfused = self.model.sinks and not self.framework.fuses_sinks
        return self.train.attention or ("unfused" if unfused else self.framework.attention)

    @cached_property
    def tp_overlap(self) -> bool:
        chosen = self.parallel.tp_overlap
        return self.framework.tp_overlap if chosen is None else chosen

    @cached_property
    def tp_overlap_forward(self) -> bool:
        """Matmuls and their collectives run in step, chunk by chunk: only where it is asked for."""
        return bool(self.parallel.tp_overlap) and self.parallel.tp > 1

    @cached_property
    def sends_once(self) -> bool:
        """A token goes once to every place that holds experts for it, not once for every expert."""
        return self.dispatcher == "flex"

    @cached_property
    def gathers_tokens(self) -> bool:
        """Every expert-parallel rank gets all tokens of its group, and adds its experts' results to all of them."""
        return self.dispatcher == "all_gather"

    @cached_property
    def dispatcher(self) -> str:
        return self.parallel.dispatcher or self.framework.dispatcher

    @cached_property
    def ep_overlap(self) -> bool:
        """Exchanges between experts run beside the work of another micro-batch, where there is one."""
        chosen = self.parallel.ep_overlap
        usual = self.framework.ep_overlap or self.schedule.pairs
        wanted = usual if chosen is None else chosen
        return wanted and self.train.microbatches > 1 and not self.gathers_tokens and self.parallel.ep > 1

    @cached_property
    def overlaps_everywhere(self) -> bool:
        """The same in every pass, because the schedule does not say which of them run together."""
        return self.ep_overlap and not self.schedule.pairs

    @cached_property
    def schedule(self) -> Schedule:
        """One stage alone has nothing to schedule."""
        return schedule_named(self.parallel.schedule if self.parallel.pp > 1 else "1f1b")

    @cached_property
    def zero(self) -> int:
        """The stage of ZeRO that memory and time see.

        FSDP2 has stage 2 as "do not reshard after the forward pass". In a pipeline that is stage 3, where what was
        gathered stays until the last micro-batch has gone back, too.
        """
        p = self.parallel
        return 3 if p.zero == 2 and p.pp > 1 and self.framework.keeps_weights_in_pipeline else p.zero

    @cached_property
    def gathers(self) -> str:
        """When the weights that ZeRO 3 divides are gathered: "never" (they are whole), "every pass", or "once" a step.

        FSDP gathers each layer before its forward and again before its backward pass. In a pipeline of PyTorch it keeps
        what was gathered until the last micro-batch has gone back.
        """
        if self.zero < 3 or self.sharing[0].size == 1:
            return "never"
        return "once" if self.parallel.pp > 1 and self.framework.keeps_weights_in_pipeline else "every pass"

    @cached_property
    def gather_launches(self) -> float:
        """Of the host, for a layer whose weights are gathered in every pass: hooks, copies in and out."""
        return self.framework.gather_launches if self.gathers == "every pass" else 0.0

    @cached_property
    def dtensor_launches(self) -> tuple[float, float]:
        """Of the host, in a layer's forward and backward pass; compiled code has none of DTensor's Python left."""
        return self.framework.dtensor_launches if self.parallel.tp > 1 and not self.train.compile else (0.0, 0.0)

    @cached_property
    def makes_anew(self) -> bool:
        """Whether compiled code makes anew what matmuls of the backward pass read: norms and activations, not matmuls.

        It does where the whole model is compiled, and keeps all of it where layers are compiled one by one (peaks on an
        H200: compile_base, and calibration/checkpointing_h200.json).
        """
        return self.train.compile and not self.framework.compiles_blocks

    @cached_property
    def fused(self) -> bool:
        """Whether element-wise chains run as one kernel: by hand, or by the compiler."""
        return self.framework.fused or self.train.compile


def _held(size: int, stride: int, unit: int) -> int:
    """How many of `size` ranks, `stride` apart, are in one unit of so many neighbouring ranks."""
    return max(1, min(size, unit // stride))
