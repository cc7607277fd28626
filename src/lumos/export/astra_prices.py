"""What transfers take in ASTRA-sim over links of one bandwidth, so that a run can be simulated with its prices.

A run is exported as the chain of work that it is at some length of its transfers (`folded_ranks`). ASTRA-sim prices
transfers by its network file. If the recorded ones were longer or shorter than that, work that waited for one and not
for another would be cut in the wrong places; so the run is simulated at the prices first.
"""

from __future__ import annotations

from dataclasses import replace

from lumos.export.chakra_communication import Communication, Transfer
from lumos.graph.from_trace.build import Execution
from lumos.trace.read.chakra_format import COLLECTIVES, NodeType

HANDSHAKE = 8192  # bytes with which a receiver tells a sender that it is there, if both wait for each other
_HOPS = 2  # to a switch and on


def at_astra_prices(execution: Execution, plan: Communication, gb_s: float, latency_ns: float) -> Execution:
    """The run with transfers as long as ASTRA-sim makes them between ranks that one switch joins."""
    sizes = {number: len(ranks) for (_, ranks), number in plan.groups.items()}
    duration = execution.graph.duration.copy()
    for row, transfers in plan.transfers.items():
        node = int(execution.nodes.last_node[row])
        found = [transfer_ns(t, sizes.get(t.group, 2), gb_s, latency_ns, float(duration[node])) for t in transfers]
        duration[node] = max(found)  # messages of one kernel move at the same time
    return replace(execution, graph=execution.graph.with_times(duration, execution.graph.gap))


def transfer_ns(
    transfer: Transfer, ranks: int, gb_s: float, latency_ns: float, recorded_ns: float = 0.0,
    handshake: int = HANDSHAKE,
) -> float:  # fmt: skip
    """The time of one transfer once all its ranks are there; kinds that ASTRA-sim does not price keep their own."""
    if transfer.type != NodeType.COMM_COLL:
        steps, size = 1, float(transfer.bytes)
    elif transfer.collective == COLLECTIVES["all_reduce"]:
        steps, size = 2 * (ranks - 1), transfer.bytes / ranks
    elif transfer.collective == COLLECTIVES["all_gather"]:
        steps, size = ranks - 1, float(transfer.bytes)
    elif transfer.collective in (COLLECTIVES["reduce_scatter"], COLLECTIVES["all_to_all"]):
        steps, size = ranks - 1, transfer.bytes / ranks
    else:
        return recorded_ns
    return steps * (2 * _HOPS * latency_ns + (size + handshake) / gb_s)
