"""Stage: what one rank of a pipeline stage runs, priced: the time of each of its blocks on the GPU and on the host."""

from __future__ import annotations

from collections.abc import Iterable

from lumos.cost.prices import BlockTime, Prices
from lumos.program.embedding_head import embedding, embedding_backward, head, head_backward
from lumos.program.rank_layout import Shard
from lumos.program.transformer_layer import Layer


class Stage:
    """The layers of one virtual stage, and the ends of the model where it has them."""

    def __init__(self, shard: Shard, prices: Prices, dense: int, sparse: int, first: bool, last: bool) -> None:
        self.shard, self.prices = shard, prices
        self.dense, self.sparse, self.first, self.last = dense, sparse, first, last

    def _layers(self) -> Iterable[tuple[Layer, int]]:
        for sparse, count in ((False, self.dense), (True, self.sparse)):
            if count:
                yield Layer(self.shard, sparse), count

    def forward(self) -> BlockTime:
        time = BlockTime()
        for layer, count in self._layers():
            time += self.prices.block(("F", layer.sparse), layer.forward).times(count)
        if self.first:
            time += self.prices.block(("embedding",), lambda: embedding(self.shard))
        if self.last:
            time += self.prices.block(("head",), lambda: head(self.shard))
        return time

    def backward(self) -> BlockTime:
        time = BlockTime()
        for layer, count in self._layers():
            time += self.prices.block(("R", layer.sparse), layer.recomputed).times(count)
            time += self.prices.block(("B", layer.sparse), layer.backward).times(count)
        if self.first:
            time += self.prices.block(("embedding grad",), lambda: embedding_backward(self.shard))
        if self.last:
            time += self.prices.block(("head grad",), lambda: head_backward(self.shard))
        return time
