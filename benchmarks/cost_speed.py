"""Calls costed per second, as the event loop of a serving engine asks for them.

    python benchmarks/cost_speed.py

Two rates: calls that were costed before, which are looked up by their work, and new ones, a decode step of other
lengths every time. Process time, so that a busy machine changes little.
"""

from __future__ import annotations

from collections.abc import Callable
from time import process_time

from lumos import read_setup
from lumos.costs.costs import costs_of
from lumos.described.described import Program
from lumos.program.op import Op, Ops
from lumos.program.operators import Operator
from lumos.schedules import Phase

_LEAST_S = 0.5


def layer() -> tuple[Ops, Callable[[Op], object]]:
    """The calls of a layer's forward pass, and what costs them."""
    setup = read_setup("llama3-8b", ["cluster.gpu=h100", "parallel.tp=2", "cluster.gpus=2"])
    program = Program(setup)
    blocks = program.blocks(program.chunks[0][0], Phase.FORWARD)
    return next(block.build() for block in blocks if block.name == "forward"), costs_of(setup).cost


def decoding(count: int) -> Ops:
    """Matmuls of decode steps with other numbers of tokens."""
    return [Op("up", work=Operator("gemm_tn", (tokens, 14336, 4096))) for tokens in range(1, count + 1)]


def per_second(calls: Ops, cost: Callable[[Op], object]) -> float:
    began, count = process_time(), 0
    while process_time() - began < _LEAST_S:
        for call in calls:
            cost(call)
        count += len(calls)
    return count / (process_time() - began)


def main() -> None:
    calls, cost = layer()
    for call in calls:
        cost(call)
    print(f"calls that were costed before: {per_second(calls, cost):,.0f} per second")
    new, began = decoding(500), process_time()
    for call in new:
        cost(call)
    print(f"new shapes: {len(new) / (process_time() - began):,.0f} per second")


if __name__ == "__main__":
    main()
