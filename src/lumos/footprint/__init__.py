"""Footprint: the memory a training run takes on every pipeline stage, and whether it fits."""

from lumos.footprint.peak import Footprint, footprint
from lumos.footprint.phases import StageMemory

__all__ = ["Footprint", "StageMemory", "footprint"]
