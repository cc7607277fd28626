"""Piece: one operator or collective in the order a rank issues it, and the Block that a list of them makes."""

from __future__ import annotations

from typing import NamedTuple

from lumos.program.collective import Collective
from lumos.program.operators import Operator


class Piece(NamedTuple):
    """Work in the order of issue. A collective that is not waited for runs beside what follows, until the next wait."""

    work: Operator | Collective
    launches: int = 1  # kernels, and so launches by the host
    waits: bool = True  # a collective: the next piece needs its result; an operator: always
    joins: bool = False  # first wait for every collective that was left running
    name: str = ""


Block = list[Piece]
"""The pieces of one phase of one layer."""
