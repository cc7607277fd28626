"""Layout: which layers and ends of the model a pipeline stage holds, and how many parameters that is on one rank."""

from __future__ import annotations

from typing import NamedTuple

from lumos.program.rank_layout import Shard
from lumos.setup.setup import Setup


class Chunk(NamedTuple):
    """One virtual stage."""

    dense: int
    sparse: int
    first: bool = False  # holds the embedding
    last: bool = False  # holds the final norm, the output matrix and the loss


class Parameters(NamedTuple):
    """Of one rank. Experts are replicated over other ranks than the rest."""

    common: float
    experts: float
    adapters: float = 0.0


def layers_of(setup: Setup, balances: bool = False) -> list[int]:
    """Layers of every virtual stage, in the order of the model: as given, by their work, or as even as it goes."""
    parallel = setup.parallel
    stages = parallel.pp * parallel.vpp
    given = parallel.stage_layers
    if len(given) == stages:
        return list(given)
    if given:
        pp, vpp = parallel.pp, parallel.vpp
        return [(given[index % pp] + vpp - 1 - index // pp) // vpp for index in range(stages)]
    if balances and stages > 1:
        return _balanced(setup, stages)
    base, rest = divmod(setup.model.layers, stages)
    counts = [base] * stages
    for index in range(rest):  # the ends have the embedding and the output besides
        counts[(1 + index) % stages if stages > 2 else index] += 1
    return counts


def _balanced(setup: Setup, stages: int) -> list[int]:
    """Layers by the work of each stage, the output matrix counted as the layers it is worth."""
    model = setup.model
    layer = model.attention_parameters + model.mlp_parameters(model.ffn)
    share = (model.layers + model.vocab * model.hidden / layer) / stages
    ends = [min(model.layers, max(i + 1, round((i + 1) * share))) for i in range(stages - 1)] + [model.layers]
    if model.layers >= stages:
        ends = [min(end, model.layers - (stages - 1 - i)) for i, end in enumerate(ends)]
    return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def chunks_of(setup: Setup, balances: bool = False) -> list[tuple[Chunk, ...]]:
    """[stage][chunk]."""
    model, pp = setup.model, setup.parallel.pp
    counts = layers_of(setup, balances)
    if model.experts:
        chunks, done = [], 0
        for count in counts:
            dense = min(max(model.dense_layers - done, 0), count)
            chunks.append(Chunk(dense, count - dense))
            done += count
    else:
        sizes = {count: Chunk(count, 0) for count in set(counts)}  # few: most stages are alike
        chunks = [sizes[count] for count in counts]
    chunks[0] = chunks[0]._replace(first=True)
    chunks[-1] = chunks[-1]._replace(last=True)
    return [tuple(chunks[stage::pp]) for stage in range(pp)]


class Weights:
    """Parameters of one rank, by part of the model."""

    def __init__(self, shard: Shard) -> None:
        model, parallel = shard.model, shard.parallel
        tp = parallel.tp
        every = model.attention_parameters / tp + 2 * model.norm_parameters
        self.dense = every + model.mlp_parameters(model.ffn) / tp
        self.experts = 0.0
        if model.experts:
            expert = model.mlp_parameters(model.expert_ffn)
            # Several small experts of a rank are whole; one large expert is divided again, Megatron-Core's default.
            ways = parallel.ep * (1 if model.experts > parallel.ep > 1 else tp)
            self.experts = model.experts * expert / ways
            self.sparse = every + model.shared_experts * expert / tp + model.router_parameters
        else:
            self.sparse = 0.0
        self.embedding = float(shard.vocab * model.hidden)
        self.positions = float(shard.train.seq * model.hidden) if model.positions == "learned" else 0.0
        self.output = 0.0 if model.tied and parallel.pp == 1 else self.embedding
        self.final = float(model.norm_parameters)
        self.adapters = _adapters(shard) if shard.train.mode == "lora" else 0.0

    def of(self, chunks: tuple[Chunk, ...]) -> Parameters:
        """All that a stage holds."""
        dense = sparse = 0
        for chunk in chunks:
            dense += chunk.dense
            sparse += chunk.sparse
        common = dense * self.dense + sparse * self.sparse
        if chunks[0].first:
            common += self.embedding + self.positions
        if chunks[-1].last:
            common += self.output + self.final
        return Parameters(common, sparse * self.experts, (dense + sparse) * self.adapters)


_LORA_RANK = 16  # of MLPerf's fine-tuning benchmark; peft and NeMo default to 8 and 32


def _adapters(shard: Shard) -> float:
    """Trained parameters of one layer: two thin matrices beside every linear layer of attention."""
    model, tp = shard.model, shard.parallel.tp
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return _LORA_RANK * (4 * model.hidden + 2 * queries + 2 * keys) / tp
