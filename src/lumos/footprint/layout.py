"""Layout: which layers and ends of the model a pipeline stage holds, and how many parameters that is on one rank."""

from __future__ import annotations

from typing import NamedTuple

from lumos.blocks.shard import Shard
from lumos.setups.setup import Setup


class Chunk(NamedTuple):
    """One virtual stage."""

    dense: int
    sparse: int
    first: bool  # holds the embedding
    last: bool  # holds the final norm, the output matrix and the loss


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
        return [given[index % parallel.pp] // parallel.vpp for index in range(stages)]
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


def chunks_of(setup: Setup, balances: bool = False) -> list[list[Chunk]]:
    """[stage][chunk]."""
    model, pp = setup.model, setup.parallel.pp
    counts = layers_of(setup, balances)
    rows: list[list[Chunk]] = [[] for _ in range(pp)]
    done, end = 0, len(counts) - 1
    for virtual, count in enumerate(counts):
        dense = min(max(model.dense_layers - done, 0), count) if model.experts else count
        rows[virtual % pp].append(Chunk(dense, count - dense, virtual == 0, virtual == end))
        done += count
    return rows


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

    def of(self, chunks: list[Chunk]) -> Parameters:
        """All that a stage holds."""
        common = experts = adapters = 0.0
        for chunk in chunks:
            common += chunk.dense * self.dense + chunk.sparse * self.sparse
            experts += chunk.sparse * self.experts
            adapters += (chunk.dense + chunk.sparse) * self.adapters
            if chunk.first:
                common += self.embedding + self.positions
            if chunk.last:
                common += self.output + self.final
        return Parameters(common, experts, adapters)


_LORA_RANK = 16  # of MLPerf's fine-tuning benchmark; peft and NeMo default to 8 and 32


def _adapters(shard: Shard) -> float:
    """Trained parameters of one layer: two thin matrices beside every linear layer of attention."""
    model, tp = shard.model, shard.parallel.tp
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return _LORA_RANK * (4 * model.hidden + 2 * queries + 2 * keys) / tp
