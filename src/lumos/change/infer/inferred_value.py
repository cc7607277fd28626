"""Told: one value of a setup that a trace tells, and by what."""

from __future__ import annotations

from typing import Any, NamedTuple


class Told(NamedTuple):
    """A value with its evidence, one short phrase."""

    value: Any
    evidence: str
