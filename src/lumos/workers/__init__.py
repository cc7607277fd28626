"""Execution engines: this process, local processes, or a Ray cluster."""

from lumos.workers.engine import Engine, Here, Job, engine_named, fingerprint, read_shard

__all__ = ["Engine", "Here", "Job", "engine_named", "fingerprint", "read_shard"]
