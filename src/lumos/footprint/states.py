"""States: bytes that weights, gradients and the optimizer's state take for one parameter, and how ZeRO divides them.

| state_precision | weights | gradients | state of Adam |
|---|---|---|---|
| training | as trained: 2 | as trained: 2 | 2 + 2 |
| mixed | 2 | 4 where the framework accumulates in fp32, else 2 | 4 (master weights) + 4 + 4 |
| fp32 | 4, and copies of 2 for the products | 4 | 4 + 4 |

in 16 bits; all is 4 where training is in fp32. SGD has momentum, as in our recordings: one value instead of two.
ZeRO (Rajbhandari et al. 2020): 1 divides the state, 2 the gradients too, 3 the weights too.
"""

from __future__ import annotations

from typing import NamedTuple

from lumos.blocks.shard import Shard
from lumos.footprint.habits import habits_of
from lumos.footprint.layout import Parameters

_VALUES = {"adamw": 2, "adam": 2, "sgd": 1, "none": 0}


class States(NamedTuple):
    """Bytes on one rank, and the wholes that ZeRO gathers or has not divided yet, per parameter."""

    weights: float
    gradients: float
    optimizer: float


class PerParameter:
    """Bytes for one parameter of this rank before ZeRO divides them, and by how many ranks it does."""

    def __init__(self, shard: Shard) -> None:
        framework, train, parallel = shard.framework, shard.train, shard.parallel
        habits = habits_of(framework)
        e = shard.element
        values = _VALUES[train.optimizer]
        precision = framework.state_precision if e < 4 else "training"
        self.low = float(e)  # of a weight as the products read it
        if precision == "mixed":
            self.weights, self.gradients = float(e), 4.0 if habits.gradient_buffer_fp32 else float(e)
            self.optimizer = 4.0 * (1 + values) if values else 0.0
        elif precision == "fp32":
            self.weights = self.gradients = 4.0
            self.optimizer = 4.0 * values
        else:
            self.weights = self.gradients = float(e)
            self.optimizer = float(e * values)
        self.casts = self.low if precision == "fp32" and parallel.zero < 3 else 0.0  # kept by autocast for the step
        # Adam of "mixed" works on fp32 gradients, of its own part alone.
        self.step = 4.0 if precision == "mixed" and self.gradients < 4.0 else 0.0
        zero = parallel.zero
        replicas = max(1, parallel.dp * parallel.cp)
        spread = max(1, replicas * parallel.tp // parallel.ep) if parallel.ep > 1 else replicas
        ways = parallel.shard or replicas
        self.shards = ways if zero else 1
        self.expert_shards = min(ways, spread) if zero and parallel.shard else spread if zero else 1
        self.zero = zero
        self.frozen = train.mode == "lora"

    def of(self, parameters: Parameters) -> States:
        """What a rank holds of these parameters, everything divided as ZeRO says."""
        common, experts, adapters = parameters
        trained = adapters if self.frozen else common
        trained_experts = 0.0 if self.frozen else experts
        whole = common + experts + adapters
        spread = common / self.shards + experts / self.expert_shards + adapters / self.shards
        divided = trained / self.shards + trained_experts / self.expert_shards
        undivided = trained + trained_experts
        frozen = self.low if self.frozen else self.weights
        return States(
            frozen * (spread if self.zero == 3 else whole),
            self.gradients * (divided if self.zero >= 2 else undivided),
            self.optimizer * divided,
        )
