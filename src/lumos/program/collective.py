"""Collective: what ranks do together, the other unit of cost."""

from __future__ import annotations

from typing import NamedTuple


class Group(NamedTuple):
    """The ranks of a collective: how many, and how many of them share a node (an NVLink domain)."""

    size: int
    inside: int

    @property
    def nodes(self) -> int:
        return -(-self.size // self.inside)


class Collective(NamedTuple):
    """A collective; `bytes` is the whole tensor: what is reduced, or what everybody has after gathering."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, p2p
    bytes: float
    group: Group
