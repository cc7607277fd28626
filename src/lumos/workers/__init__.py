"""Engines: the same work in this process, in processes of this machine, or on a Ray cluster."""

from lumos.workers.engine import Engine, Here, Job, engine_named, fingerprint, read_shard

__all__ = ["Engine", "Here", "Job", "engine_named", "fingerprint", "read_shard"]
