"""Networks of round numbers, for times by hand: no latencies, and every share is 1."""

from __future__ import annotations

import math
from typing import Any

from lumos.costs.network import Fabric, Habits, Network, Tier

PLAIN_HABITS = Habits(
    protocols=(
        dict.fromkeys(("base_us", "ring_us", "tree_us", "ring_far_us", "tree_far_us"), 0.0)
        | {"share": 1.0, "far_bytes": math.inf},
    ),
    inside_share=1.0, gather_share=1.0, exchange_share=1.0, nvls_us=0.0, nvls_member_us=0.0, sharp_us=0.0,
    overhead_us=0.0, send_us=0.0, send_far_us=0.0, peer_us=0.0, peer_far_us=0.0, peer_gb_s=math.inf, peer_bytes=0.0,
    fill_inside=0.0, fill_between=0.0, fill_exchange=0.0,
)  # fmt: skip
RINGS = Fabric(trees=False)


def plain_network(*bandwidths: float, fabric: Fabric = RINGS, habits: Habits = PLAIN_HABITS, **more: Any) -> Network:
    """Tiers of these bytes per microsecond, from the inside out; all-reduce is a ring unless a fabric has trees."""
    return Network(tuple(Tier(bandwidth) for bandwidth in bandwidths), fabric, habits=habits, **more)
