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

from lumos.program.memory.allocator import Habits
from lumos.program.parameters import Parameters
from lumos.program.rank_layout import Shard

_VALUES = {"adamw": 2, "adam": 2, "sgd": 1, "none": 0}
_LOW = frozenset({"fp8", "mxfp8", "nvfp4"})


class States(NamedTuple):
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float


class PerParameter:
    """Bytes for one parameter of this rank before ZeRO divides them, and by how many ranks it does."""

    def __init__(self, shard: Shard, habits: Habits) -> None:
        train, parallel, e = shard.train, shard.parallel, float(shard.element)
        values = _VALUES[train.optimizer]
        precision = shard.framework.state_precision if e < 4 else "training"
        self.low = e  # of a weight as the products read it
        self.weights = self.gradients = 4.0 if precision == "fp32" else e
        self.optimizer = self.weights * values
        self.casts = self.step = 0.0
        if precision == "mixed":
            self.gradients = 4.0 if habits.gradient_buffer_fp32 else e
            self.optimizer = 4.0 * (1 + values) if values else 0.0
            self.step = 4.0 - self.gradients  # Adam works on fp32 gradients, of its own part alone
        elif precision == "fp32" and parallel.zero < 3:
            self.casts = self.low  # kept by autocast from forward to backward
        self.frozen = train.mode == "lora"
        if self.frozen:  # nothing updates them: as the products read them
            self.weights = 1.0 if train.precision in _LOW else self.low
            self.casts = 0.0
        self._divide(shard)

    def _divide(self, shard: Shard) -> None:
        parallel = shard.parallel
        self.zero = parallel.zero
        self.replicas = max(1, parallel.dp * parallel.cp)
        ways = parallel.shard or self.replicas
        # Whole experts are spread over the tensor-parallel ranks too.
        whole = shard.model.experts > parallel.ep > 1
        expert_ways = max(1, self.replicas * (parallel.tp if whole else 1) // parallel.ep)
        self.shards = ways if self.zero else 1
        self.expert_shards = min(ways, expert_ways) if self.zero and parallel.shard else expert_ways if self.zero else 1

    def trained(self, parameters: Parameters) -> float:
        """How many of them have gradients."""
        return parameters.adapters if self.frozen else parameters.common + parameters.experts

    def of(self, parameters: Parameters) -> States:
        """What a rank holds of these parameters, divided as ZeRO says."""
        common, experts, adapters = parameters
        whole = common + experts + adapters
        spread = (common + adapters) / self.shards + experts / self.expert_shards
        divided = adapters / self.shards if self.frozen else spread
        return States(
            self.weights * (spread if self.zero == 3 else whole),
            self.gradients * (divided if self.zero >= 2 else self.trained(parameters)),
            self.optimizer * divided,
        )

    @property
    def divides_weights(self) -> bool:
        """FSDP: weights are gathered when they are needed."""
        return self.zero == 3 and self.shards > 1
