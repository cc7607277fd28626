"""Engines: the same work in this process, in processes of this machine, or on a Ray cluster."""

from lumos.workers.engine import Engine, Here, Job, engine_named

__all__ = ["Engine", "Here", "Job", "engine_named"]
