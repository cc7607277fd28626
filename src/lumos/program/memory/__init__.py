"""Footprint: the memory a training run takes on every pipeline stage, and whether it fits."""

from lumos.program.memory.peak import Footprint, footprint
from lumos.program.memory.phases import StageMemory

__all__ = ["Footprint", "StageMemory", "footprint"]
