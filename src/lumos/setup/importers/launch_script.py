"""How many GPUs a launch script asks for: torchrun, srun, #SBATCH, or the usual variables."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lumos.setup.gpus import find_gpu
from lumos.setup.importers.imported import Findings
from lumos.setup.importers.shell import Options, Script

# Of torchrun, srun and sbatch: read here, or of no concern.
LAUNCHER = re.compile(
    r"(nproc-per-node|nnodes|node-rank|master-|rdzv|standalone|max-restarts|monitor-interval|start-method|role|tee|module|"
    r"log-dir|redirects|local-ranks-filter|local-addr|no-python|run-path|nodes|ntasks|gpus|gres|cpus|mem|partition|qos|"
    r"job-name|account|time|exclusive|output|error|container|export|nodelist|exclude|constraint|mpi|kill-on|label|"
    r"unbuffered|signal|requeue|open-mode|chdir|comment|mail|dependency|array|overlap$|wait$)"
)
_PER_NODE = ("GPUS_PER_NODE", "NPROC_PER_NODE", "NUM_GPUS_PER_NODE", "GPU_NUM_PER_NODE", "NGPU", "NUM_GPUS", "NPROC")
_NODES = ("NNODES", "NUM_NODES", "N_NODES", "NNODE", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_LARGEST = 1 << 20


def put_machines(found: Findings, script: Script) -> None:
    """cluster.gpus, gpus_per_node and perhaps gpu, as far as the script says; a note where it does not."""
    values = found.values
    per_node, gpu = _per_node(script)
    nodes = _first(
        [
            *(*_words(script.options, "nnodes"), *_words(script.slurm, "nodes")),
            *(script.variables.get(name, "") for name in _NODES),
            *_words(script.options, "nodes"),
        ]
    )
    if per_node:
        values["cluster.gpus_per_node"] = per_node
        values.setdefault("cluster.gpus", per_node * (nodes or 1))
    world = _first([script.variables.get("WORLD_SIZE", "")])
    if world:
        values.setdefault("cluster.gpus", world)
    if gpu:
        values.setdefault("cluster.gpu", gpu)
    if "cluster.gpus" not in values:
        found.notes.append("it does not say how many GPUs: one replica is taken; set cluster.gpus")


def _per_node(script: Script) -> tuple[int, str]:
    """GPUs of a node, and their kind where Slurm is asked for one."""
    asked = [
        word
        for options in (script.slurm, script.options)
        for name in ("gpus-per-node", "gres", "gpus-per-task")
        for word in _words(options, name)
    ]
    counts = [word.rpartition(":")[2] for word in asked]
    kinds = (part for word in asked for part in word.split(":")[:-1] if part != "gpu")
    gpu = next((known.name for kind in kinds if (known := find_gpu(kind))), "")
    processes = [*_words(script.options, "nproc-per-node"), *_words(script.slurm, "ntasks-per-node")]
    return _first([*processes[:1], *counts, *(script.variables.get(name, "") for name in _PER_NODE), *processes]), gpu


def _words(options: Options, name: str) -> tuple[str, ...]:
    return tuple(options.get(name, ())[:1])


def _first(words: Iterable[str]) -> int:
    """The first that is a count. A range of nodes, as in 4:8, counts as its largest."""
    for word in words:
        last = word.rpartition(":")[2]
        if last.isascii() and last.isdigit() and len(last) <= 7 and 0 < int(last) <= _LARGEST:
            return int(last)
    return 0
