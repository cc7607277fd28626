"""Draft: the files that launch a run, before what they cannot say is written into them; and what all of them share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from lumos.program.layout import RankLayout
from lumos.program.sharding import layers_of
from lumos.setup.frameworks import Framework, framework_named
from lumos.setup.gpus import is_file_name
from lumos.setup.importers.foreign_file import Reading
from lumos.setup.sections import Parallel, Train
from lumos.setup.setup import STEP_SECTIONS, Setup

FILL_IN = "FILL_IN"  # marks what a setup does not know


class Draft(NamedTuple):
    """Files without their comments, and what an importer reads from them."""

    files: dict[str, str]
    main: str  # the file that `lumos predict` is given
    reading: Reading
    otherwise: str  # why the files do not say a key
    reasons: Mapping[str, str] = MappingProxyType({})  # the same, for keys of a setup that have a reason of their own
    remarks: tuple[str, ...] = ()  # about what they say, but not exactly


def nodes_of(setup: Setup) -> tuple[int, int]:
    """Nodes, and the processes on each: as many as it has GPUs, or fewer where the GPUs do not fill whole nodes."""
    gpus, node = setup.cluster.gpus, setup.cluster.gpus_per_node
    each = next(size for size in range(min(gpus, node), 0, -1) if gpus % size == 0)
    return gpus // each, each


def script(setup: Setup, body: str) -> str:
    """A script that asks Slurm for the machines; without Slurm, those lines are comments."""
    nodes, each = nodes_of(setup)
    name = setup.cluster.gpu
    kind = "" if is_file_name(name) else f"{name}:"  # what Slurm calls the GPU of a file is not known
    slurm = (f"nodes={nodes}", "ntasks-per-node=1", f"gpus-per-node={kind}{each}")
    asked = "".join(f"#SBATCH --{option}\n" for option in slurm)
    if nodes == 1:
        body = body.replace("$LAUNCH ", "")
    elif "$LAUNCH" in body:
        body = _UNDER_SLURM + body
    return f"#!/bin/bash\n{asked}\nNNODES={nodes}\nGPUS_PER_NODE={each}\n{body}\n"


# Ranks meet on the first node of the allocation, and srun starts one torchrun on every node.
_UNDER_SLURM = """MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" 2>/dev/null | head -n 1)}
LAUNCH=${SLURM_JOB_ID:+srun}
"""
TORCHRUN = (
    '$LAUNCH torchrun --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" --rdzv-backend c10d \\\n'
    '    --rdzv-endpoint "${MASTER_ADDR:-localhost}:29500" '
)  # the program is to follow


def effective(setup: Setup) -> dict[str, Any]:
    """Every key of a setup that has an effect, with the value that it has in the end.

    Two setups with the same effective values are the same run: a framework's default is as good as the value itself.
    """
    model, train = setup.model, setup.train
    values = {f"{name}.{key}": value for name in STEP_SECTIONS for key, value in getattr(setup, name)}
    for key in ("model.name", "train.microbatches", "parallel.dp"):  # a label, and what follows from others
        del values[key]
    framework = framework_named(train.framework, train.precision)
    by_layer = train.recompute == "full"
    return values | _effective_parallelism(setup, framework) | {
        "model.kv_heads": model.heads if model.latent else model.kv_heads,
        "train.fp8_scaling": train.fp8_scaling if train.precision == "fp8" else "",
        "train.reduce_precision": train.reduce_precision or ("fp32" if framework.reduce_bytes == 4 else "bf16"),
        "train.weight_precision": _stored(train, setup.parallel, framework),
        "train.recompute_modules": sorted(set(train.modules)) if train.recompute == "selective" else [],
        "train.recompute_layers": train.recompute_layers if by_layer else None,
        "train.recompute_every": train.recompute_every if by_layer else 1,
        "train.recompute_group": train.recompute_group if by_layer else 1,
        "train.partition_activations": RankLayout(setup, framework).divides_inputs,
        "train.offload_overlap": train.offload_overlap and train.offload_optimizer > 0,
        "train.attention": RankLayout(setup, framework).attention,
        "train.imbalance": train.imbalance if model.experts and not train.capacity else 1.0,
        "train.capacity": train.capacity if model.experts else 0.0,
    }  # fmt: skip


def _stored(train: Train, parallel: Parallel, framework: Framework) -> str:
    """How layer weights are stored: Megatron keeps them in 8 bits only under a distributed optimizer."""
    eight_bit = train.precision in ("fp8", "mxfp8", "nvfp4") and framework.fused and train.mode != "lora"
    return train.weight_precision or (("fp8" if parallel.zero else "bf16") if eight_bit else "")


def _gathers_beside(parallel: Parallel, overlaps: bool) -> bool:
    """Whether updated weights are gathered behind the next forward pass."""
    reduces = overlaps if parallel.dp_overlap is None else parallel.dp_overlap
    return reduces if parallel.gather_overlap is None else parallel.gather_overlap


def _effective_parallelism(setup: Setup, framework: Framework) -> dict[str, Any]:
    parallel, layout = setup.parallel, RankLayout(setup, framework)
    shared = parallel.dp * parallel.cp > 1
    zero = parallel.zero if shared else 0
    overlaps = framework.reduces_beside(zero, parallel.pp)
    by_itself = None if framework.tp_overlap else False  # beside the backward pass, which only a default can ask for
    return {
        "parallel.etp": layout.expert_tp if setup.model.experts else 0,
        "parallel.dispatcher": (parallel.dispatcher or framework.dispatcher) if setup.model.experts else "",
        "parallel.ep_overlap": layout.ep_overlap if parallel.ep > 1 else None,
        "parallel.cp_type": (parallel.cp_type or "p2p") if parallel.cp > 1 else "",
        "parallel.cp_inner": layout.cp_heads if parallel.cp_type == "a2a+p2p" else 0,
        "parallel.zero": zero,
        "parallel.no_sync": parallel.no_sync and zero == 3 and setup.train.microbatches > 1,
        "parallel.shard": (parallel.shard or parallel.dp) if zero else 0,
        "parallel.stage_layers": layers_of(setup, framework.balances),
        "parallel.schedule": parallel.schedule if parallel.pp > 1 else "1f1b",
        "parallel.sequence_parallel": parallel.sequence_parallel and parallel.tp > 1,
        "parallel.tp_overlap": (by_itself if parallel.tp_overlap is None else parallel.tp_overlap)
        if parallel.tp > 1 else None,
        "parallel.gather_overlap": _gathers_beside(parallel, overlaps) if zero in (1, 2) else None,
        "parallel.dp_overlap": (zero == 3 or overlaps if parallel.dp_overlap is None else parallel.dp_overlap)
        if shared else None,
    }  # fmt: skip
