"""Truth for predictions of another configuration from a trace: clean steps, peak memory and traces on one GPU.

    python3 calibration/changes_h200.py OUT_DIR SECONDS SET [NAME ...]

Four kinds of cases, each a folder of OUT_DIR:
  ranks           one rank of a large job, its peers faked: a plain decoder with FSDP2 and DTensor tensor parallelism
  architectures   Hugging Face models and a diffusion transformer on one GPU, each with other layers and batches
  single          Llama-like models of transformers on one GPU
  multirank       small jobs over NCCL whose ranks share the GPU

NAME.json holds the case, its clean steps, its peak memory and `gpu_busy_s`, the GPU time of a profiled step;
NAME.pt.trace.json.gz its trace, where it is a source of predictions. pairs.json names the predictions to make.
Every case is a process of its own, forked once the imports are done; what it prints is kept in `logs`. A trace is
written while the next case runs. NAME, where given, chooses cases by the beginning of KIND/NAME.
With CHANGES_DEVICE=cpu, shrunken models run without a GPU, to check the script.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import signal
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from measure import STANDARD, SUFFIX, Step, clean_steps, heat_gpu, save_trace, timed
from multirank import rank_environment
from processes import multi_process_service

DEVICE = os.environ.get("CHANGES_DEVICE", "cuda")
WARMUP_STEPS, CLEAN_STEPS, PROFILER_WARMUP = 3, 8, 2
LIMIT_S = {"ranks": 45.0, "architectures": 45.0, "single": 40.0, "multirank": 60.0}
WAITS = (" Sync", " Wait Event")  # ends of the names of waits, which the profiler puts among the kernels
Release = Callable[[], None]  # tells that the GPU is free for the next case
Changes = dict[str, Any]  # settings of a prediction, such as model.layers


@dataclass(frozen=True)
class Rank:
    """One rank of a job of `world` ranks, or every rank of one where `mode` says how they work together."""

    name: str
    hidden: int
    ffn: int
    heads: int
    kv: int
    layers: int
    vocab: int = 32000
    seq: int = 4096
    mbs: int = 1
    world: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    accum: int = 1
    ckpt: bool = False
    mode: str = ""  # ddp, fsdp, tp, pp, dp_tp, tp_pp
    trace: bool = False


@dataclass(frozen=True)
class Variant:
    """An architecture with some layers and some batch; `config` is what its configuration class takes besides."""

    name: str
    cls: str
    layers: int
    mbs: int
    seq: int
    config: dict[str, Any] = field(default_factory=dict)
    trace: bool = False
    ckpt: bool = False


@dataclass(frozen=True)
class Single:
    """A Llama-like model of transformers on one GPU."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv: int
    vocab: int = 32000
    seq: int = 2048
    mbs: int = 2
    accum: int = 1
    ckpt: bool = False
    trace: bool = False


@dataclass(frozen=True)
class Plan:
    """The cases of a set and the predictions to make: (source, target), for architectures with what changes."""

    ranks: list[Rank]
    rank_pairs: list[tuple[str, str]]
    architectures: dict[str, list[Variant]]
    single: list[Single]
    single_pairs: list[tuple[str, str]]
    multirank: list[Rank]
    multirank_pairs: list[tuple[str, str]]

    def pairs(self) -> dict[str, list[Any]]:
        changed = [
            (variants[0].name, variant.name, changes_to(variants[0], variant))
            for variants in self.architectures.values()
            for variant in variants[1:]
        ]
        return {
            "ranks": self.rank_pairs,
            "architectures": changed,
            "single": self.single_pairs,
            "multirank": self.multirank_pairs,
        }


def changes_to(source: Variant, target: Variant) -> Changes:
    changes = {"model.layers": target.layers} if target.layers != source.layers else {}
    changes |= {"train.micro_batch": target.mbs} if target.mbs != source.mbs else {}
    return changes | ({"train.recompute": "full"} if target.ckpt else {})


def variants(name: str, cls: str, seq: int, config: dict[str, Any], *sizes: tuple[int, int]) -> list[Variant]:
    """The first (layers, micro-batch) with a trace, the others without."""
    return [
        Variant(f"{name}_l{layers}_b{mbs}", cls, layers, mbs, seq, config, trace=index == 0)
        for index, (layers, mbs) in enumerate(sizes)
    ]


def checkpointed(name: str, cls: str, seq: int, config: dict[str, Any], layers: int, *sizes: int) -> list[Variant]:
    """The first micro-batch as a trace; the same and the others with every layer recomputed."""
    first = Variant(f"{name}_l{layers}_b{sizes[0]}", cls, layers, sizes[0], seq, config, trace=True)
    return [first] + [
        replace(first, name=f"{name}_l{layers}_b{mbs}_ckpt", mbs=mbs, trace=False, ckpt=True) for mbs in sizes
    ]


R3B = Rank("", 3072, 8192, 24, 8, 8)
R8B = Rank("", 4096, 14336, 32, 8, 6)
R13B = Rank("", 5120, 13824, 40, 40, 4)
R70B = Rank("", 8192, 28672, 64, 8, 2)
SMALL = Rank("", 1024, 2816, 16, 16, 8, seq=1024, mbs=2)

DEVELOPMENT = Plan(
    ranks=[
        replace(R8B, name="r8b_l6_b2", mbs=2, trace=True),
        replace(R8B, name="r8b_l12_b2", layers=12, mbs=2),
        replace(R8B, name="r8b_l6_b6", mbs=6, trace=True),
        replace(R8B, name="r8b_l6_s8192_b1", seq=8192),
        replace(R8B, name="r8b_l6_s2048_b1", seq=2048, trace=True),
        replace(R8B, name="r8b_l6_b2_accum2", mbs=2, accum=2),
        replace(R8B, name="r8b_l6_v128k_b2", vocab=128256, mbs=2),
        replace(R8B, name="r8b_l6_tp2_b4", mbs=4, tp=2, world=2, trace=True),
        replace(R8B, name="r8b_l6_tp4_b8", mbs=8, tp=4, world=4, trace=True),
        replace(R8B, name="r8b_l6_tp8_b8", mbs=8, tp=8, world=8, trace=True),
        replace(R8B, name="r8b_l10_tp2_b1", layers=10, tp=2, world=2, trace=True),
        replace(R8B, name="r8b_l6_fsdp8_b2", mbs=2, world=8, zero=3, trace=True),
        replace(R8B, name="r8b_l6_fsdp64_b2", mbs=2, world=64, zero=3),
        replace(R8B, name="r8b_l10_fsdp16_ckpt_b4", layers=10, mbs=4, world=16, zero=3, ckpt=True, trace=True),
        replace(R8B, name="r8b_l6_fsdp8_b2_accum4", mbs=2, world=8, zero=3, accum=4),
        replace(R8B, name="r8b_l6_ckpt_b4", mbs=4, ckpt=True),
        replace(R8B, name="r8b_l6_tp2_fsdp8_b4", mbs=4, tp=2, world=16, zero=3, trace=True),
        replace(R8B, name="r8b_l8_tp4_fsdp16_ckpt_b8", layers=8, mbs=8, tp=4, world=64, zero=3, ckpt=True),
        replace(R3B, name="r3b_l8_s2048_b2", seq=2048, mbs=2, trace=True),
        replace(R3B, name="r3b_l16_s2048_b8", layers=16, seq=2048, mbs=8),
        replace(R3B, name="r3b_l8_s1024_b8_v128k", seq=1024, mbs=8, vocab=128256),
        replace(R3B, name="r3b_l8_tp4_s1024_b2", seq=1024, mbs=2, tp=4, world=4, trace=True),
        replace(R3B, name="r3b_l16_fsdp32_s1024_b1", layers=16, seq=1024, mbs=1, world=32, zero=3, trace=True),
        replace(R13B, name="r13b_l4_s2048_b4", seq=2048, mbs=4, trace=True),
        replace(R13B, name="r13b_l8_tp2_b4", layers=8, mbs=4, tp=2, world=2),
        replace(R13B, name="r13b_l6_fsdp16_ckpt_b2", layers=6, mbs=2, world=16, zero=3, ckpt=True, trace=True),
        replace(R70B, name="r70b_l2_tp8_b4", mbs=4, tp=8, world=8, trace=True),
        replace(R70B, name="r70b_l4_tp8_fsdp8_ckpt_b4", layers=4, mbs=4, tp=8, world=64, zero=3, ckpt=True),
        replace(R70B, name="r70b_l2_fsdp64_b1", world=64, zero=3),
        replace(R70B, name="r70b_l3_tp4_fsdp8_b4", layers=3, mbs=4, tp=4, world=32, zero=3, trace=True),
    ],
    rank_pairs=[
        ("r8b_l6_b2", "r8b_l12_b2"),
        ("r8b_l6_b2", "r8b_l6_b6"),
        ("r8b_l6_b2", "r8b_l6_s8192_b1"),
        ("r8b_l6_b2", "r8b_l6_b2_accum2"),
        ("r8b_l6_b2", "r8b_l6_v128k_b2"),
        ("r8b_l6_b2", "r8b_l6_tp2_b4"),
        ("r8b_l6_b2", "r8b_l6_fsdp8_b2"),
        ("r8b_l6_b2", "r8b_l6_fsdp64_b2"),
        ("r8b_l6_b2", "r8b_l6_ckpt_b4"),
        ("r8b_l6_b2", "r13b_l4_s2048_b4"),
        ("r8b_l6_b2", "r70b_l2_fsdp64_b1"),
        ("r8b_l6_b2", "r3b_l16_s2048_b8"),
        ("r8b_l6_b6", "r8b_l6_b2"),
        ("r8b_l6_b6", "r70b_l2_tp8_b4"),
        ("r8b_l6_b6", "r8b_l6_s2048_b1"),
        ("r8b_l6_s2048_b1", "r8b_l6_b6"),
        ("r8b_l6_s2048_b1", "r8b_l12_b2"),
        ("r8b_l6_tp2_b4", "r8b_l6_tp4_b8"),
        ("r8b_l6_tp2_b4", "r8b_l6_tp8_b8"),
        ("r8b_l6_tp2_b4", "r8b_l6_b2"),
        ("r8b_l6_tp2_b4", "r8b_l6_tp2_fsdp8_b4"),
        ("r8b_l6_tp2_b4", "r13b_l8_tp2_b4"),
        ("r8b_l6_tp2_b4", "r8b_l10_tp2_b1"),
        ("r8b_l6_tp4_b8", "r8b_l6_tp2_b4"),
        ("r8b_l6_tp4_b8", "r70b_l2_tp8_b4"),
        ("r8b_l6_tp8_b8", "r8b_l6_tp2_b4"),
        ("r8b_l6_tp8_b8", "r8b_l6_tp4_b8"),
        ("r8b_l10_tp2_b1", "r8b_l6_tp2_b4"),
        ("r8b_l10_tp2_b1", "r8b_l6_tp8_b8"),
        ("r8b_l6_fsdp8_b2", "r8b_l6_b2"),
        ("r8b_l6_fsdp8_b2", "r8b_l6_fsdp64_b2"),
        ("r8b_l6_fsdp8_b2", "r8b_l6_fsdp8_b2_accum4"),
        ("r8b_l6_fsdp8_b2", "r8b_l10_fsdp16_ckpt_b4"),
        ("r8b_l6_fsdp8_b2", "r70b_l2_fsdp64_b1"),
        ("r8b_l6_fsdp8_b2", "r8b_l6_tp2_fsdp8_b4"),
        ("r8b_l10_fsdp16_ckpt_b4", "r8b_l6_fsdp8_b2"),
        ("r8b_l10_fsdp16_ckpt_b4", "r13b_l6_fsdp16_ckpt_b2"),
        ("r8b_l10_fsdp16_ckpt_b4", "r8b_l6_ckpt_b4"),
        ("r8b_l6_tp2_fsdp8_b4", "r8b_l8_tp4_fsdp16_ckpt_b8"),
        ("r8b_l6_tp2_fsdp8_b4", "r70b_l3_tp4_fsdp8_b4"),
        ("r8b_l6_tp2_fsdp8_b4", "r8b_l6_fsdp8_b2"),
        ("r3b_l8_s2048_b2", "r3b_l16_s2048_b8"),
        ("r3b_l8_s2048_b2", "r3b_l8_s1024_b8_v128k"),
        ("r3b_l8_s2048_b2", "r3b_l16_fsdp32_s1024_b1"),
        ("r3b_l8_s2048_b2", "r3b_l8_tp4_s1024_b2"),
        ("r3b_l8_s2048_b2", "r8b_l6_b6"),
        ("r3b_l8_tp4_s1024_b2", "r3b_l8_s2048_b2"),
        ("r3b_l8_tp4_s1024_b2", "r8b_l6_tp4_b8"),
        ("r3b_l16_fsdp32_s1024_b1", "r8b_l6_fsdp64_b2"),
        ("r13b_l4_s2048_b4", "r13b_l8_tp2_b4"),
        ("r13b_l4_s2048_b4", "r8b_l6_b2"),
        ("r13b_l6_fsdp16_ckpt_b2", "r13b_l4_s2048_b4"),
        ("r70b_l2_tp8_b4", "r70b_l4_tp8_fsdp8_ckpt_b4"),
        ("r70b_l2_tp8_b4", "r8b_l6_tp8_b8"),
        ("r70b_l3_tp4_fsdp8_b4", "r70b_l4_tp8_fsdp8_ckpt_b4"),
        ("r70b_l3_tp4_fsdp8_b4", "r70b_l2_tp8_b4"),
        ("r70b_l3_tp4_fsdp8_b4", "r70b_l2_fsdp64_b1"),
    ],
    architectures={
        "qwen3_moe": variants(
            "qwen3_moe",
            "Qwen3Moe",
            4096,
            {
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "vocab_size": 151936,
            },
            (4, 2),
            (8, 2),
            (4, 4),
            (6, 1),
        ),
        "mixtral": variants(
            "mixtral",
            "Mixtral",
            2048,
            {
                "hidden_size": 2048,
                "intermediate_size": 7168,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "vocab_size": 32000,
            },
            (4, 4),
            (7, 4),
            (4, 10),
            (6, 2),
        ),
        "olmoe": variants(
            "olmoe",
            "Olmoe",
            2048,
            {
                "hidden_size": 2048,
                "intermediate_size": 1024,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "num_experts": 32,
                "num_experts_per_tok": 4,
                "vocab_size": 50304,
            },
            (6, 2),
            (10, 2),
            (6, 8),
            (4, 1),
        ),
        "deepseek_v3": variants(
            "deepseek_v3",
            "DeepseekV3",
            2048,
            {
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "moe_intermediate_size": 1024,
                "first_k_dense_replace": 1,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "q_lora_rank": 768,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "n_routed_experts": 32,
                "n_shared_experts": 1,
                "num_experts_per_tok": 4,
                "n_group": 4,
                "topk_group": 2,
                "vocab_size": 129280,
            },
            (4, 4),
            (7, 4),
            (4, 8),
            (6, 2),
        ),
        "gemma2": variants(
            "gemma2",
            "Gemma2",
            2048,
            {
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "vocab_size": 256000,
            },
            (6, 2),
            (12, 2),
            (6, 5),
            (8, 1),
        ),
        "falcon": variants(
            "falcon",
            "Falcon",
            2048,
            {
                "hidden_size": 4544,
                "num_attention_heads": 71,
                "alibi": False,
                "multi_query": True,
                "parallel_attn": True,
                "bias": False,
                "vocab_size": 65024,
            },
            (4, 2),
            (7, 2),
            (4, 6),
            (6, 1),
        ),
        "vit": variants(
            "vit",
            "ViT",
            197,
            {
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_attention_heads": 16,
                "image_size": 224,
                "patch_size": 16,
                "num_labels": 1000,
            },
            (12, 96),
            (24, 96),
            (12, 256),
            (18, 16),
        ),
        "dit": variants(
            "dit",
            "DiT",
            256,
            {"hidden_size": 1024, "num_attention_heads": 16, "image_size": 32, "patch_size": 2, "channels": 4},
            (12, 64),
            (24, 64),
            (12, 160),
            (18, 8),
        ),
    },
    single=[
        Single("l6_h2560_b3", 6, 2560, 6912, 20, 20, mbs=3, trace=True),
        Single("l10_h1536_s1024_b2", 10, 1536, 4096, 12, 12, seq=1024, mbs=2, trace=True),
        Single("l5_h3072_kv8_s4096_b2", 5, 3072, 8192, 24, 8, seq=4096, mbs=2, trace=True),
        Single("l13_h2560_b3", 13, 2560, 6912, 20, 20, mbs=3),
        Single("l6_h2560_b9", 6, 2560, 6912, 20, 20, mbs=9),
        Single("l6_h2560_s6144_b1", 6, 2560, 6912, 20, 20, seq=6144, mbs=1),
        Single("l4_h5120_b2", 4, 5120, 13824, 40, 40, mbs=2),
        Single("l20_h1536_s1024_b2", 20, 1536, 4096, 12, 12, seq=1024, mbs=2),
        Single("l10_h1536_s512_b1", 10, 1536, 4096, 12, 12, seq=512, mbs=1),
        Single("l5_h3072_kv8_s4096_b2_ckpt", 5, 3072, 8192, 24, 8, seq=4096, mbs=2, ckpt=True),
        Single("l6_h2560_b3_accum3", 6, 2560, 6912, 20, 20, mbs=3, accum=3),
        Single("l7_h3072_kv8_v128k_b3", 7, 3072, 8192, 24, 8, vocab=128256, mbs=3),
    ],
    single_pairs=[
        (source, target)
        for source, targets in {
            "l6_h2560_b3": (
                "l13_h2560_b3 l6_h2560_b9 l6_h2560_s6144_b1 l4_h5120_b2 l6_h2560_b3_accum3 l20_h1536_s1024_b2 "
                "l5_h3072_kv8_s4096_b2_ckpt l7_h3072_kv8_v128k_b3"
            ),
            "l10_h1536_s1024_b2": "l20_h1536_s1024_b2 l10_h1536_s512_b1 l6_h2560_b9 l5_h3072_kv8_s4096_b2",
            "l5_h3072_kv8_s4096_b2": (
                "l5_h3072_kv8_s4096_b2_ckpt l7_h3072_kv8_v128k_b3 l4_h5120_b2 l13_h2560_b3 l10_h1536_s512_b1"
            ),
        }.items()
        for target in targets.split()
    ],
    multirank=[
        replace(SMALL, name="dp2_tp2_l8", mode="dp_tp", world=4, tp=2, zero=3, trace=True),
        replace(SMALL, name="dp2_tp2_l16", mode="dp_tp", world=4, tp=2, zero=3, layers=16),
        replace(SMALL, name="fsdp2_l8", mode="fsdp", world=2, zero=3, trace=True),
        replace(SMALL, name="fsdp2_l16", mode="fsdp", world=2, zero=3, layers=16),
        replace(SMALL, name="fsdp2_l4", mode="fsdp", world=2, zero=3, layers=4),
        replace(SMALL, name="tp2_pp2_mb4", mode="tp_pp", world=4, tp=2, pp=2, accum=4, trace=True),
        replace(SMALL, name="tp2_pp2_mb8", mode="tp_pp", world=4, tp=2, pp=2, accum=8),
        replace(SMALL, name="ddp2_l8", mode="ddp", world=2, trace=True),
        replace(SMALL, name="ddp2_l8_accum2", mode="ddp", world=2, accum=2),
        replace(SMALL, name="ddp2_l12", mode="ddp", world=2, layers=12),
        replace(SMALL, name="pp2_mb4", mode="pp", world=2, pp=2, accum=4, trace=True),
        replace(SMALL, name="pp2_mb8", mode="pp", world=2, pp=2, accum=8),
    ],
    multirank_pairs=[
        ("dp2_tp2_l8", "dp2_tp2_l16"),
        ("fsdp2_l8", "fsdp2_l16"),
        ("fsdp2_l8", "fsdp2_l4"),
        ("tp2_pp2_mb4", "tp2_pp2_mb8"),
        ("ddp2_l8", "ddp2_l8_accum2"),
        ("ddp2_l8", "ddp2_l12"),
        ("pp2_mb4", "pp2_mb8"),
    ],
)

MIDDLE = Rank("", 1280, 3456, 20, 20, 6, seq=768, mbs=3)
BLIND = Plan(
    ranks=[
        replace(R8B, name="b8b_l5_b3", layers=5, mbs=3, trace=True),
        replace(R8B, name="b8b_l14_b2", layers=14, mbs=2),
        replace(R8B, name="b8b_l5_s6144_b2", layers=5, seq=6144, mbs=2),
        replace(R8B, name="b8b_l7_tp4_b6", layers=7, mbs=6, tp=4, world=4, trace=True),
        replace(R8B, name="b8b_l7_tp2_b6", layers=7, mbs=6, tp=2, world=2),
        replace(R8B, name="b8b_l7_tp8_b6", layers=7, mbs=6, tp=8, world=8),
        replace(R8B, name="b8b_l9_fsdp16_b3", layers=9, mbs=3, world=16, zero=3, trace=True),
        replace(R8B, name="b8b_l9_fsdp32_ckpt_b3", layers=9, mbs=3, world=32, zero=3, ckpt=True),
        replace(R8B, name="b8b_l4_fsdp16_b3_accum3", layers=4, mbs=3, world=16, zero=3, accum=3),
        replace(R8B, name="b8b_l4_tp2_fsdp4_b6", layers=4, mbs=6, tp=2, world=8, zero=3, trace=True),
        replace(R8B, name="b8b_l6_tp4_fsdp8_ckpt_b8", layers=6, mbs=8, tp=4, world=32, zero=3, ckpt=True),
        replace(R3B, name="b3b_l10_s1024_b3", layers=10, seq=1024, mbs=3, trace=True),
        replace(R3B, name="b3b_l6_b6_v128k", layers=6, mbs=6, vocab=128256),
        replace(R3B, name="b3b_l12_tp2_s1024_b2", layers=12, seq=1024, mbs=2, tp=2, world=2, trace=True),
        replace(R3B, name="b3b_l20_fsdp8_s2048_b1", layers=20, seq=2048, mbs=1, world=8, zero=3),
        replace(R13B, name="b13b_l5_b1_s6144", layers=5, seq=6144),
        replace(R13B, name="b13b_l6_tp4_b6", layers=6, mbs=6, tp=4, world=4),
        replace(R13B, name="b13b_l5_fsdp64_ckpt_b4", layers=5, mbs=4, world=64, zero=3, ckpt=True, trace=True),
        replace(R70B, name="b70b_l3_tp8_b6", layers=3, mbs=6, tp=8, world=8, trace=True),
        replace(R70B, name="b70b_l2_tp2_fsdp16_b2", mbs=2, tp=2, world=32, zero=3),
        replace(R70B, name="b70b_l3_fsdp32_s2048_b1", layers=3, seq=2048, world=32, zero=3),
    ],
    rank_pairs=[
        ("b8b_l5_b3", "b8b_l14_b2"),
        ("b8b_l5_b3", "b8b_l5_s6144_b2"),
        ("b8b_l5_b3", "b8b_l9_fsdp16_b3"),
        ("b8b_l5_b3", "b13b_l5_b1_s6144"),
        ("b8b_l5_b3", "b70b_l3_fsdp32_s2048_b1"),
        ("b8b_l5_b3", "b8b_l7_tp2_b6"),
        ("b8b_l7_tp4_b6", "b8b_l7_tp2_b6"),
        ("b8b_l7_tp4_b6", "b8b_l7_tp8_b6"),
        ("b8b_l7_tp4_b6", "b13b_l6_tp4_b6"),
        ("b8b_l7_tp4_b6", "b8b_l6_tp4_fsdp8_ckpt_b8"),
        ("b8b_l9_fsdp16_b3", "b8b_l9_fsdp32_ckpt_b3"),
        ("b8b_l9_fsdp16_b3", "b8b_l4_fsdp16_b3_accum3"),
        ("b8b_l9_fsdp16_b3", "b8b_l5_b3"),
        ("b8b_l9_fsdp16_b3", "b70b_l3_fsdp32_s2048_b1"),
        ("b8b_l4_tp2_fsdp4_b6", "b70b_l2_tp2_fsdp16_b2"),
        ("b8b_l4_tp2_fsdp4_b6", "b8b_l6_tp4_fsdp8_ckpt_b8"),
        ("b8b_l4_tp2_fsdp4_b6", "b8b_l7_tp2_b6"),
        ("b3b_l10_s1024_b3", "b3b_l6_b6_v128k"),
        ("b3b_l10_s1024_b3", "b3b_l20_fsdp8_s2048_b1"),
        ("b3b_l10_s1024_b3", "b3b_l12_tp2_s1024_b2"),
        ("b3b_l12_tp2_s1024_b2", "b8b_l7_tp2_b6"),
        ("b3b_l12_tp2_s1024_b2", "b3b_l10_s1024_b3"),
        ("b13b_l5_fsdp64_ckpt_b4", "b8b_l9_fsdp32_ckpt_b3"),
        ("b13b_l5_fsdp64_ckpt_b4", "b13b_l5_b1_s6144"),
        ("b70b_l3_tp8_b6", "b8b_l7_tp8_b6"),
        ("b70b_l3_tp8_b6", "b70b_l2_tp2_fsdp16_b2"),
        ("b70b_l3_tp8_b6", "b13b_l6_tp4_b6"),
    ],
    architectures={
        "qwen3_moe": variants(
            "qwen3_moe_48e",
            "Qwen3Moe",
            2048,
            {
                "hidden_size": 1536,
                "intermediate_size": 4608,
                "moe_intermediate_size": 1024,
                "num_attention_heads": 24,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "num_experts": 48,
                "num_experts_per_tok": 6,
                "vocab_size": 100352,
            },
            (5, 4),
            (9, 4),
            (5, 9),
        ),
        "mixtral": variants(
            "mixtral_16e",
            "Mixtral",
            4096,
            {
                "hidden_size": 2560,
                "intermediate_size": 4096,
                "num_attention_heads": 20,
                "num_key_value_heads": 4,
                "num_local_experts": 16,
                "num_experts_per_tok": 2,
                "vocab_size": 32000,
            },
            (3, 2),
            (6, 2),
            (3, 5),
        ),
        "olmoe": variants(
            "olmoe_48e",
            "Olmoe",
            2048,
            {
                "hidden_size": 1536,
                "intermediate_size": 768,
                "num_attention_heads": 12,
                "num_key_value_heads": 12,
                "num_experts": 48,
                "num_experts_per_tok": 8,
                "vocab_size": 50304,
            },
            (8, 3),
            (5, 3),
            (8, 7),
        ),
        "deepseek_v3": variants(
            "deepseek_v3_64e",
            "DeepseekV3",
            2048,
            {
                "hidden_size": 1536,
                "intermediate_size": 4096,
                "moe_intermediate_size": 512,
                "first_k_dense_replace": 1,
                "num_attention_heads": 12,
                "num_key_value_heads": 12,
                "q_lora_rank": 512,
                "kv_lora_rank": 256,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "n_routed_experts": 64,
                "n_shared_experts": 2,
                "num_experts_per_tok": 6,
                "n_group": 8,
                "topk_group": 4,
                "vocab_size": 65536,
            },
            (5, 4),
            (9, 4),
            (5, 10),
        ),
        "gemma2": variants(
            "gemma2_wide",
            "Gemma2",
            4096,
            {
                "hidden_size": 3584,
                "intermediate_size": 14336,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 256,
                "vocab_size": 256000,
            },
            (4, 1),
            (7, 1),
            (4, 2),
        ),
        "falcon": variants(
            "falcon_1b",
            "Falcon",
            2048,
            {
                "hidden_size": 2048,
                "num_attention_heads": 32,
                "alibi": False,
                "multi_query": True,
                "parallel_attn": True,
                "bias": False,
                "vocab_size": 50304,
            },
            (10, 4),
            (18, 4),
            (10, 9),
        ),
        "vit": variants(
            "vit_h14",
            "ViT",
            257,
            {
                "hidden_size": 1280,
                "intermediate_size": 5120,
                "num_attention_heads": 16,
                "image_size": 224,
                "patch_size": 14,
                "num_labels": 1000,
            },
            (10, 64),
            (20, 64),
            (10, 192),
        ),
        "dit": variants(
            "dit_xl",
            "DiT",
            256,
            {"hidden_size": 1152, "num_attention_heads": 16, "image_size": 32, "patch_size": 2, "channels": 4},
            (14, 48),
            (28, 48),
            (14, 144),
        ),
    },
    single=[
        Single("l7_h2304_b4", 7, 2304, 6144, 18, 18, mbs=4, trace=True),
        Single("l9_h1280_s768_b2", 9, 1280, 3456, 10, 10, seq=768, mbs=2, trace=True),
        Single("l15_h2304_b4", 15, 2304, 6144, 18, 18, mbs=4),
        Single("l7_h2304_b11", 7, 2304, 6144, 18, 18, mbs=11),
        Single("l7_h2304_s5120_b2", 7, 2304, 6144, 18, 18, seq=5120, mbs=2),
        Single("l4_h4096_kv8_s4096_b2", 4, 4096, 14336, 32, 8, seq=4096, mbs=2),
        Single("l18_h1280_s768_b2", 18, 1280, 3456, 10, 10, seq=768, mbs=2),
        Single("l7_h2304_b4_ckpt", 7, 2304, 6144, 18, 18, mbs=4, ckpt=True),
    ],
    single_pairs=[
        ("l7_h2304_b4", "l15_h2304_b4"),
        ("l7_h2304_b4", "l7_h2304_b11"),
        ("l7_h2304_b4", "l7_h2304_s5120_b2"),
        ("l7_h2304_b4", "l4_h4096_kv8_s4096_b2"),
        ("l7_h2304_b4", "l18_h1280_s768_b2"),
        ("l7_h2304_b4", "l7_h2304_b4_ckpt"),
        ("l9_h1280_s768_b2", "l18_h1280_s768_b2"),
        ("l9_h1280_s768_b2", "l7_h2304_b11"),
        ("l9_h1280_s768_b2", "l4_h4096_kv8_s4096_b2"),
    ],
    multirank=[
        replace(MIDDLE, name="fsdp2_l6", mode="fsdp", world=2, zero=3, trace=True),
        replace(MIDDLE, name="fsdp2_l14", mode="fsdp", world=2, zero=3, layers=14),
        replace(MIDDLE, name="tp2_pp2_mb3", mode="tp_pp", world=4, tp=2, pp=2, accum=3, trace=True),
        replace(MIDDLE, name="tp2_pp2_mb7", mode="tp_pp", world=4, tp=2, pp=2, accum=7),
        replace(MIDDLE, name="dp2_tp2_l6", mode="dp_tp", world=4, tp=2, zero=3, trace=True),
        replace(MIDDLE, name="dp2_tp2_l12", mode="dp_tp", world=4, tp=2, zero=3, layers=12),
        replace(MIDDLE, name="ddp2_l6", mode="ddp", world=2, trace=True),
        replace(MIDDLE, name="ddp2_l10", mode="ddp", world=2, layers=10),
        replace(MIDDLE, name="pp2_mb3", mode="pp", world=2, pp=2, accum=3, trace=True),
        replace(MIDDLE, name="pp2_mb6", mode="pp", world=2, pp=2, accum=6),
    ],
    multirank_pairs=[
        ("fsdp2_l6", "fsdp2_l14"),
        ("tp2_pp2_mb3", "tp2_pp2_mb7"),
        ("dp2_tp2_l6", "dp2_tp2_l12"),
        ("ddp2_l6", "ddp2_l10"),
        ("pp2_mb3", "pp2_mb6"),
    ],
)
# Jobs whose traces are replayed with nothing frozen, recorded after the dependency rules were fixed.
SLIM, BROAD = Rank("", 1152, 3072, 18, 18, 3, seq=1024, mbs=2), Rank("", 2048, 5632, 16, 16, 2, seq=512, mbs=6)
REPLAYS = Plan(
    *([], [], {}, [], []),
    multirank=[
        replace(BROAD, name="fsdp4_l4", mode="fsdp", world=4, zero=3, layers=4, trace=True),
        replace(SLIM, name="fsdp2_l5", mode="fsdp", world=2, zero=3, layers=5, trace=True),
        replace(SLIM, name="ddp4_l4", mode="ddp", world=4, layers=4, trace=True),
        replace(BROAD, name="ddp2_l5", mode="ddp", world=2, layers=5, trace=True),
        replace(SLIM, name="pp4_mb4", mode="pp", world=4, pp=4, layers=4, accum=4, trace=True),
        replace(BROAD, name="pp2_mb5", mode="pp", world=2, pp=2, accum=5, trace=True),
        replace(BROAD, name="dp2_tp2_l3", mode="dp_tp", world=4, tp=2, zero=3, layers=3, trace=True),
        replace(SLIM, name="tp2_pp2_mb4", mode="tp_pp", world=4, tp=2, pp=2, layers=2, accum=4, trace=True),
    ],
    multirank_pairs=[],
)


def architecture_of(plan: Plan, name: str) -> dict[str, Any]:
    return plan.architectures[name][0].config


QWEN3 = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
LLAMA = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
# What adding activation checkpointing to a traced run does, to architectures and to one rank of a large job.
CHECKPOINTING = Plan(
    ranks=[
        replace(R8B, name="c8b_l6_fsdp8_b2", mbs=2, world=8, zero=3, trace=True),
        replace(R8B, name="c8b_l6_fsdp8_ckpt_b2", mbs=2, world=8, zero=3, ckpt=True),
        replace(R70B, name="c70b_l3_tp8_fsdp8_b2", layers=3, mbs=2, tp=8, world=64, zero=3, trace=True),
        replace(R70B, name="c70b_l3_tp8_fsdp8_ckpt_b2", layers=3, mbs=2, tp=8, world=64, zero=3, ckpt=True),
        replace(R70B, name="c70b_l2_fsdp64_ckpt_b2", layers=2, mbs=2, world=64, zero=3, ckpt=True),
        replace(R3B, name="c3b_l8_s1024_b2", seq=1024, mbs=2, trace=True),
        replace(R3B, name="c3b_l8_s1024_ckpt_b2", seq=1024, mbs=2, ckpt=True),
    ],
    rank_pairs=[
        ("c8b_l6_fsdp8_b2", "c8b_l6_fsdp8_ckpt_b2"),
        ("c8b_l6_fsdp8_b2", "c70b_l2_fsdp64_ckpt_b2"),
        ("c70b_l3_tp8_fsdp8_b2", "c70b_l3_tp8_fsdp8_ckpt_b2"),
        ("c70b_l3_tp8_fsdp8_b2", "c70b_l2_fsdp64_ckpt_b2"),
        ("c3b_l8_s1024_b2", "c3b_l8_s1024_ckpt_b2"),
        ("c3b_l8_s1024_b2", "c8b_l6_fsdp8_ckpt_b2"),
    ],
    architectures={
        "gemma2": checkpointed("gemma2", "Gemma2", 2048, architecture_of(DEVELOPMENT, "gemma2"), 6, 2, 5),
        "mixtral": checkpointed("mixtral", "Mixtral", 2048, architecture_of(DEVELOPMENT, "mixtral"), 4, 4, 10),
        "qwen3_moe": checkpointed("qwen3_moe", "Qwen3Moe", 4096, architecture_of(DEVELOPMENT, "qwen3_moe"), 4, 2, 4),
        "qwen3": checkpointed("qwen3", "Qwen3", 4096, QWEN3, 6, 2, 4),
        "llama_host": checkpointed("llama_host", "Llama", 512, LLAMA, 8, 1),
    },
    single=[],
    single_pairs=[],
    multirank=[],
    multirank_pairs=[],
)
CHECKPOINTING_BLIND = Plan(
    ranks=[
        replace(R13B, name="d13b_l4_fsdp16_b2", mbs=2, world=16, zero=3, trace=True),
        replace(R13B, name="d13b_l6_fsdp32_ckpt_b3", layers=6, mbs=3, world=32, zero=3, ckpt=True),
        replace(R70B, name="d70b_l2_tp4_fsdp16_b2", layers=2, mbs=2, tp=4, world=64, zero=3, trace=True),
        replace(R70B, name="d70b_l4_tp4_fsdp16_ckpt_b2", layers=4, mbs=2, tp=4, world=64, zero=3, ckpt=True),
        replace(R70B, name="d70b_l2_fsdp64_ckpt_b1", layers=2, world=64, zero=3, ckpt=True),
        replace(R70B, name="d70b_l2_fsdp64_s8192_ckpt_b1", layers=2, seq=8192, world=64, zero=3, ckpt=True),
        replace(R3B, name="d3b_l6_s2048_b3", layers=6, seq=2048, mbs=3, trace=True),
        replace(R3B, name="d3b_l12_fsdp64_s2048_ckpt_b3", layers=12, seq=2048, mbs=3, world=64, zero=3, ckpt=True),
    ],
    rank_pairs=[
        ("d13b_l4_fsdp16_b2", "d13b_l6_fsdp32_ckpt_b3"),
        ("d13b_l4_fsdp16_b2", "d70b_l2_fsdp64_ckpt_b1"),
        ("d70b_l2_tp4_fsdp16_b2", "d70b_l4_tp4_fsdp16_ckpt_b2"),
        ("d70b_l2_tp4_fsdp16_b2", "d70b_l2_fsdp64_ckpt_b1"),
        ("d3b_l6_s2048_b3", "d3b_l12_fsdp64_s2048_ckpt_b3"),
        ("d3b_l6_s2048_b3", "d70b_l2_fsdp64_s8192_ckpt_b1"),
    ],
    architectures={
        "gemma2": checkpointed("gemma2_wide", "Gemma2", 4096, architecture_of(BLIND, "gemma2"), 4, 1, 2),
        "mixtral": checkpointed("mixtral_16e", "Mixtral", 4096, architecture_of(BLIND, "mixtral"), 3, 2, 5),
        "qwen3_moe": checkpointed("qwen3_moe_48e", "Qwen3Moe", 2048, architecture_of(BLIND, "qwen3_moe"), 5, 4, 9),
        "qwen3": checkpointed(
            "qwen3_wide", "Qwen3", 2048, QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288}, 4, 3, 6
        ),
        "deepseek_v3": checkpointed("deepseek_v3", "DeepseekV3", 2048, architecture_of(BLIND, "deepseek_v3"), 5, 4),
    },
    single=[],
    single_pairs=[],
    multirank=[],
    multirank_pairs=[],
)
PLANS = {
    "development": DEVELOPMENT,
    "blind": BLIND,
    "replays": REPLAYS,
    "checkpointing": CHECKPOINTING,
    "checkpointing-blind": CHECKPOINTING_BLIND,
}


# A plain decoder, the model of ranks and multirank.


class Attention(nn.Module):
    def __init__(self, case: Rank) -> None:
        super().__init__()
        self.size = case.hidden // case.heads
        self.wq = nn.Linear(case.hidden, case.hidden, bias=False)
        self.wk = nn.Linear(case.hidden, case.kv * self.size, bias=False)
        self.wv = nn.Linear(case.hidden, case.kv * self.size, bias=False)
        self.wo = nn.Linear(case.hidden, case.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.size).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        grouped = k.shape[1] != q.shape[1]
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, case: Rank) -> None:
        super().__init__()
        self.w1 = nn.Linear(case.hidden, case.ffn, bias=False)
        self.w3 = nn.Linear(case.hidden, case.ffn, bias=False)
        self.w2 = nn.Linear(case.ffn, case.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, case: Rank) -> None:
        super().__init__()
        self.n1, self.attn, self.n2, self.mlp = (
            nn.RMSNorm(case.hidden),
            Attention(case),
            nn.RMSNorm(case.hidden),
            Mlp(case),
        )
        self.ckpt = case.ckpt

    def run(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.ckpt else self.run(x)


class Decoder(nn.Module):
    """The layers of one pipeline stage, with embedding and head where the stage has them."""

    def __init__(self, case: Rank, stage: int) -> None:
        super().__init__()
        last = stage == case.pp - 1
        self.emb = nn.Embedding(case.vocab, case.hidden) if stage == 0 else None
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.layers // case.pp))
        self.norm = nn.RMSNorm(case.hidden) if last else None
        self.head = nn.Linear(case.hidden, case.vocab, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.emb is not None:
            x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def mesh_of(case: Rank, every: bool) -> DeviceMesh | None:
    """The ranks by pipeline, data and tensor parallelism; dimensions of one rank only where `every` asks for them."""
    sizes = {"pp": case.pp, "dp": case.world // case.tp // case.pp, "tp": case.tp}
    kept = {name: size for name, size in sizes.items() if every or size > 1}
    if not every and len(kept) == 1 and ("pp" in kept or case.mode == "ddp"):
        return None  # the default group is the one
    return init_device_mesh(DEVICE, tuple(kept.values()), mesh_dim_names=tuple(kept))


def shard_tensors(model: Decoder, mesh: DeviceMesh) -> None:
    columns = ("attn.wq", "attn.wk", "attn.wv", "mlp.w1", "mlp.w3")
    for block in model.blocks:
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("attn.wo", "mlp.w2")}
        parallelize_module(block, mesh, plan)


def rank_step(case: Rank, stage: int, mesh: DeviceMesh | None) -> Step:
    """The function that trains one step of a rank."""
    with torch.device("meta"):
        decoder = Decoder(case, stage)
    if case.tp > 1 and mesh is not None:
        shard_tensors(decoder, mesh["tp"])
    if case.zero == 3 and mesh is not None:
        for block in decoder.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(decoder, mesh=mesh["dp"])
    decoder.to_empty(device=DEVICE)
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.02)
    model: nn.Module = decoder
    if case.world > case.tp * case.pp and case.zero < 3:
        model = DistributedDataParallel(decoder, device_ids=[0] if DEVICE == "cuda" else None)
    fused: dict[str, Any] = {"fused": True} if case.tp == 1 else {"foreach": False, "fused": False}
    optimizer = torch.optim.AdamW(model.parameters(), **fused)
    ids = torch.randint(0, case.vocab, (case.mbs * case.accum, case.seq), device=DEVICE)
    turns = pipeline_turns(case, stage, model, mesh, ids) if case.pp > 1 else None

    def step() -> None:
        if turns is not None:
            turns()
        else:
            for part in ids.split(case.mbs):
                loss_of(model(part), part).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipeline_turns(case: Rank, stage: int, model: nn.Module, mesh: DeviceMesh | None, ids: Tensor) -> Step:
    """The turns of one stage of a 1F1B pipeline."""
    first, last = stage == 0, stage == case.pp - 1
    between = (case.mbs, case.seq, case.hidden)
    example = ids[: case.mbs] if first else torch.zeros(between, device=DEVICE, requires_grad=True)
    after = (case.mbs, case.seq, case.vocab) if last else between
    result = torch.zeros(after, device=DEVICE, requires_grad=True)
    group = None if mesh is None else mesh.get_group("pp")
    place = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
    part = PipelineStage(model, stage, case.pp, place, input_args=(example,), output_args=result, group=group)
    turns = Schedule1F1B(part, n_microbatches=case.accum, loss_fn=loss_of)
    return lambda: turns.step(*([ids] if first else []), target=ids if last else None)


# The other models.


class Diffusion(nn.Module):
    """A diffusion transformer on latent images, its layers modulated by time and class (adaLN-Zero)."""

    def __init__(self, layers: int, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, patch, channels = config["hidden_size"], config["patch_size"], config["channels"]
        self.tokens = (config["image_size"] // patch) ** 2
        self.patches = nn.Conv2d(channels, hidden, patch, stride=patch)
        self.places = nn.Parameter(torch.zeros(1, self.tokens, hidden), requires_grad=False)
        self.time = nn.Sequential(nn.Linear(256, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.kind = nn.Embedding(1001, hidden)
        self.layers = nn.ModuleList(DiffusionBlock(hidden, config["num_attention_heads"]) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden))
        self.out = nn.Linear(hidden, patch * patch * channels)

    def forward(self, x: Tensor, times: Tensor, kinds: Tensor, noise: Tensor) -> Tensor:
        halves = torch.exp(-9.21034 * torch.arange(128, device=x.device, dtype=torch.float32) / 128)
        angles = times[:, None].float() * halves[None]
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1).to(x.dtype)) + self.kind(kinds)
        y = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            y = layer(y, condition)
        shift, scale = self.modulation(condition).chunk(2, dim=1)
        y = self.out(self.norm(y) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1))
        return functional.mse_loss(y.float(), noise.float())


class DiffusionBlock(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(approximate="tanh"), nn.Linear(4 * hidden, hidden)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        return self.proj(y.transpose(1, 2).reshape(batch, length, hidden))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            part.unsqueeze(1) for part in self.modulation(condition).chunk(6, dim=1)
        )
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


def architecture(case: Variant) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    """The model in bf16, its configuration and a batch for it."""
    settings = dict(case.config)
    torch.set_default_dtype(torch.bfloat16)
    if case.cls == "DiT":
        with torch.device(DEVICE):
            model: nn.Module = Diffusion(case.layers, settings)
        latents = (case.mbs, settings["channels"], settings["image_size"], settings["image_size"])
        target = (case.mbs, case.seq, settings["patch_size"] ** 2 * settings["channels"])
        batch = {
            "x": torch.randn(latents, device=DEVICE),
            "times": torch.randint(0, 1000, (case.mbs,), device=DEVICE),
            "kinds": torch.randint(0, 1000, (case.mbs,), device=DEVICE),
            "noise": torch.randn(target, device=DEVICE),
        }
        config = None
    elif case.cls == "ViT":
        config = transformers.ViTConfig(num_hidden_layers=case.layers, **settings)
        with torch.device(DEVICE):
            model = transformers.ViTForImageClassification(config)
        images = (case.mbs, 3, settings["image_size"], settings["image_size"])
        batch = {
            "pixel_values": torch.randn(images, device=DEVICE),
            "labels": torch.randint(0, settings["num_labels"], (case.mbs,), device=DEVICE),
        }
    else:
        sizes = {"num_hidden_layers": case.layers, "max_position_embeddings": case.seq, "use_cache": False}
        config = getattr(transformers, f"{case.cls}Config")(**sizes, **settings)
        with torch.device(DEVICE):
            model = getattr(transformers, f"{case.cls}ForCausalLM")(config)
        ids = torch.randint(0, settings["vocab_size"], (case.mbs, case.seq), device=DEVICE)
        batch = {"input_ids": ids, "labels": ids}
    torch.set_default_dtype(torch.float32)
    if case.ckpt:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train(), config, batch


def architecture_step(model: nn.Module, batch: dict[str, Tensor]) -> Step:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step() -> None:
        found = model(**batch)
        (found if isinstance(found, Tensor) else found.loss).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def single_step(case: Single) -> tuple[Step, int]:
    """The function that trains one step, and the number of parameters."""
    config = transformers.LlamaConfig(
        num_hidden_layers=case.layers,
        hidden_size=case.hidden,
        intermediate_size=case.ffn,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv,
        max_position_embeddings=case.seq,
        vocab_size=case.vocab,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device(DEVICE):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    if case.ckpt:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, case.vocab, (case.mbs, case.seq), device=DEVICE)

    def step() -> None:
        for _ in range(case.accum):
            (model(input_ids=ids, labels=ids).loss / case.accum).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, sum(p.numel() for p in model.parameters())


# Measuring.


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The time that at least one of the spans covers."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def gpu_times(profiler: profile, steps: int) -> dict[str, Any]:
    """GPU time per recorded step: the sum of its kernels and copies, what they cover, and collectives apart."""
    spans: list[tuple[float, float]] = []
    collectives = 0.0
    inner = profiler.profiler
    for event in inner.kineto_results.events() if inner is not None else ():
        if "CUDA" not in str(event.device_type()) or event.is_user_annotation() or event.name().endswith(WAITS):
            continue
        begin, seconds = event.start_ns() / 1e9, event.duration_ns() / 1e9
        if event.name().startswith("nccl"):
            collectives += seconds
        else:
            spans.append((begin, begin + seconds))
    return {
        "gpu_busy_s": sum(end - begin for begin, end in spans) / steps,
        "gpu_covered_s": covered(spans) / steps,
        "gpu_collectives_s": collectives / steps,
        "gpu_kernels": len(spans) / steps,
    }


def profiled(step: Step, active: int) -> tuple[list[float], profile]:
    """Seconds of two warm-up steps, the recorded ones and one after; and the profiler that holds the recording."""
    plan = schedule(wait=0, warmup=PROFILER_WARMUP, active=active, repeat=1)
    seconds = []
    with STANDARD.profiler(schedule=plan) as profiler:
        for _ in range(PROFILER_WARMUP + active + 1):
            seconds.append(timed(step))
            profiler.step()
    return seconds, profiler


def glance(step: Step) -> profile:
    """A recording of one step, of which no trace is kept."""
    with STANDARD.profiler() as profiler:
        timed(step)
    return profiler


def measured(step: Step, trace: bool, active: int) -> tuple[dict[str, Any], profile]:
    """Clean steps, peak memory, GPU time of a profiled step; and the profiler, to save its trace from."""
    times = clean_steps(step, CLEAN_STEPS, WARMUP_STEPS)
    found: dict[str, Any] = {"step_s": times, "step_s_median": statistics.median(times)}
    found |= {"step_s_min": min(times), "step_s_max": max(times)}
    if DEVICE == "cuda":
        found["peak_mem_alloc"] = torch.cuda.max_memory_allocated()
        found["peak_mem_reserved"] = torch.cuda.max_memory_reserved()
    waits = []
    for _ in range(3):  # for how long the host waits for the GPU at the end of a step: next to nothing if it is late
        step()
        began = time.perf_counter()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        waits.append(time.perf_counter() - began)
    found["wait_s"] = statistics.median(waits)
    if trace:
        seconds, profiler = profiled(step, active)
        found["profiled_step_s"] = seconds
    else:
        profiler = glance(step)
    return found | gpu_times(profiler, active if trace else 1), profiler


def versions() -> dict[str, str]:
    gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else "none"
    return {"torch": torch.__version__, "transformers": transformers.__version__, "gpu": gpu}


def write_json(path: Path, record: Any) -> None:
    """Write a record whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, default=str))
    partial.replace(path)


def free_memory() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def measure_rank(case: Rank, out: Path, release: Release) -> None:
    """One rank alone, with the fake process group."""
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world)
    step = rank_step(case, 0, mesh_of(case, every=True))
    found, profiler = measured(step, case.trace, active=1)
    record = {key: value for key, value in asdict(case).items() if key != "mode"}
    write_json(out / "ranks" / f"{case.name}.json", record | found | versions())
    del step
    free_memory()
    release()
    if case.trace:
        save_trace(profiler, out / "ranks" / f"{case.name}{SUFFIX}")


def measure_architecture(case: Variant, out: Path, release: Release) -> None:
    torch.manual_seed(0)
    folder = out / "architectures"
    model, config, batch = architecture(case)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = architecture_step(model, batch)
    found, profiler = measured(step, case.trace, active=1)
    record = asdict(case) | {"compile": False, "n_params": sum(p.numel() for p in model.parameters())}
    record["config"] = case.config | {"num_hidden_layers": case.layers}
    if config is not None:
        write_json(folder / f"{case.name}.config.json", config.to_dict())
        record["attn"] = getattr(config, "_attn_implementation", None)
        record["experts"] = getattr(config, "_experts_implementation", None)
    write_json(folder / f"{case.name}.json", record | found | versions())
    del model, batch, step
    free_memory()
    release()
    if case.trace:
        save_trace(profiler, folder / f"{case.name}{SUFFIX}")


def measure_single(case: Single, out: Path, release: Release) -> None:
    torch.manual_seed(0)
    step, parameters = single_step(case)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found, profiler = measured(step, case.trace, active=2)
    record = {"kind": "llama", **asdict(case), "n_params": parameters}
    write_json(out / "single" / f"{case.name}.json", record | found | versions())
    del step
    free_memory()
    release()
    if case.trace:
        save_trace(profiler, out / "single" / f"{case.name}{SUFFIX}")


def measure_member(case: Rank, rank: int, out: Path, release: Release) -> None:
    """One of the ranks of a job that share the GPU."""
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
        heat_gpu(0.1)
    torch.set_default_dtype(torch.bfloat16)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1, device=DEVICE))
    torch.manual_seed(0)
    stage = rank // (case.world // case.pp)
    step = rank_step(case, stage, mesh_of(case, every=False))
    found, profiler = measured(step, case.trace, active=2)
    record = {key: value for key, value in asdict(case).items() if key not in ("zero", "trace")}
    if case.trace:
        record["trace"] = 1
    folder = out / "multirank" / case.name
    write_json(folder / f"rank{rank}.json", record | {"rank": rank} | found | versions())
    dist.barrier()  # rank 0 holds the store that the others still look at
    release()
    if case.trace:
        save_trace(profiler, folder / f"rank{rank}{SUFFIX}")


# Small versions of the cases, for a machine without a GPU.


def shrunk_rank(case: Rank) -> Rank:
    return replace(case, hidden=8 * case.heads, ffn=128, vocab=256, seq=32, layers=min(case.layers, 4), mbs=1)


def shrunk_variant(case: Variant) -> Variant:
    words = ("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "lora_rank", "nope_head_dim")
    config = {
        key: value // 16 if key.endswith((*words, "rope_head_dim", "v_head_dim")) else value
        for key, value in case.config.items()
    }
    if "vocab_size" in config:
        return replace(case, config=config | {"vocab_size": 512}, seq=64, mbs=1, layers=min(case.layers, 3))
    config["hidden_size"] = 8 * config["num_attention_heads"]
    return replace(case, config=config, mbs=2, layers=min(case.layers, 3))


def shrunk_single(case: Single) -> Single:
    return replace(case, hidden=16 * case.heads, ffn=128, vocab=256, seq=32, mbs=1)


# Processes.


@dataclass
class Child:
    """A forked process: what it measures, since when, and by when it must be done."""

    label: str
    pid: int
    free: Path  # the file it makes once the GPU is free
    log: Path
    stop: float
    ended: bool = False
    failed: bool = False

    def poll(self) -> None:
        """See whether it has ended, and end it where it takes too long."""
        if self.ended:
            return
        found, status = os.waitpid(self.pid, os.WNOHANG)
        if found:
            self.ended, self.failed = True, status != 0
        elif time.monotonic() > self.stop:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.ended = self.failed = True
            with self.log.open("a") as file:
                file.write("took too long\n")

    def busy(self) -> bool:
        """Whether it still needs the GPU."""
        self.poll()
        return not (self.ended or self.free.exists())


def fork(label: str, task: Callable[[Release], None], limit_s: float, out: Path, environment: dict[str, str]) -> Child:
    """Run a task in a fork of this process, which has imported what takes long and has not touched the GPU."""
    free, log = out / "logs" / f"{label}.free", out / "logs" / f"{label}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid:
        return Child(label, pid, free, log, time.monotonic() + limit_s)
    status = 1
    try:
        os.setsid()  # so that what it starts ends with it
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.update(environment)

        def release() -> None:
            free.touch()
            os.nice(10)  # what follows runs beside the next case

        if DEVICE == "cuda":
            torch.cuda.set_device(0)
        task(release)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Recorder:
    """Runs the cases of a plan in turn, as far as the time allows."""

    def __init__(self, out: Path, seconds: float, which: str, names: Sequence[str]) -> None:
        self.out, self.which, self.names = out, which, names
        self.began = time.monotonic()
        self.stop = self.began + seconds
        self.writing: list[Child] = []

    def wanted(self, kind: str, name: str) -> bool:
        return not self.names or any(f"{kind}/{name}".startswith(chosen) for chosen in self.names)

    def run(self, kind: str, name: str, tasks: Sequence[Callable[[Release], None]]) -> None:
        """Run the processes of a case, and go on once the GPU is free again."""
        if not self.wanted(kind, name):
            return
        began = time.monotonic()
        if began > self.stop:
            print("time is up before", kind, name, flush=True)
            return
        port = free_port()
        children = []
        for rank, task in enumerate(tasks):
            several = len(tasks) > 1
            label = f"{kind}.{name}.{rank}" if several else f"{kind}.{name}"
            environment = rank_environment(rank, len(tasks), port) if several else {}
            children.append(fork(label, task, LIMIT_S[kind], self.out, environment))
        while any(child.busy() for child in children):
            if any(child.failed for child in children):
                for child in children:  # the others would wait for the one that failed
                    child.stop = min(child.stop, time.monotonic() + 2)
            time.sleep(0.02)
        self.writing += children
        self.report(kind, name, time.monotonic() - began)
        for child in children:
            if child.failed:
                print(child.label, "FAILED", child.log.read_text(errors="replace")[-700:], flush=True)

    def report(self, kind: str, name: str, seconds: float) -> None:
        """What was measured; of the blind set without its numbers."""
        words = f"[{time.monotonic() - self.began:4.0f} s] {kind}/{name} took {seconds:.1f} s"
        print(words, flush=True)
        path = self.out / kind / (f"{name}/rank0.json" if kind == "multirank" else f"{name}.json")
        if self.which == "development" and path.exists():
            found = json.loads(path.read_text())
            print(
                f"    {1e3 * found['step_s_min']:8.2f} {1e3 * found['step_s_median']:8.2f} "
                f"{1e3 * found['step_s_max']:8.2f} ms, busy {1e3 * found['gpu_busy_s']:8.2f} ms, waits "
                f"{1e3 * found['wait_s']:7.2f} ms, {found.get('peak_mem_alloc', 0) / 2**30:6.2f} GiB",
                flush=True,
            )

    def finish(self) -> None:
        """Wait for the traces, and put the results of `single` into one file, too."""
        stop = time.monotonic() + 40
        while time.monotonic() < stop and not all(child.ended for child in self.writing):
            for child in self.writing:
                child.poll()
            time.sleep(0.05)
        for child in self.writing:
            child.stop = 0
            child.poll()
            child.free.unlink(missing_ok=True)
        failed = [child.label for child in self.writing if child.failed]
        print(f"{time.monotonic() - self.began:.0f} s in all; failed: {failed}", flush=True)
        rows = [json.loads(path.read_text()) for path in sorted((self.out / "single").glob("*_*.json"))]
        if rows:
            write_json(self.out / "single" / "measured.json", {"results": rows})

    def run_all(self, plan: Plan) -> None:
        small = DEVICE == "cpu"
        for case in plan.ranks:
            case = shrunk_rank(case) if small else case
            self.run("ranks", case.name, [functools.partial(measure_rank, case, self.out)])
        for shown in itertools.chain(*plan.architectures.values()):
            shown = shrunk_variant(shown) if small else shown
            self.run("architectures", shown.name, [functools.partial(measure_architecture, shown, self.out)])
        for chosen in plan.single:
            chosen = shrunk_single(chosen) if small else chosen
            self.run("single", chosen.name, [functools.partial(measure_single, chosen, self.out)])
        jobs = [case for case in plan.multirank if self.wanted("multirank", case.name)]
        with multi_process_service(DEVICE == "cuda" and bool(jobs)):
            for case in jobs:
                case = shrunk_rank(case) if small else case
                tasks = [functools.partial(measure_member, case, rank, self.out) for rank in range(case.world)]
                self.run("multirank", case.name, tasks)


def free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])


def main(output: str, seconds: str, which: str, *names: str) -> None:
    transformers.logging.set_verbosity_error()
    for name in ("LlamaForCausalLM", "ViTForImageClassification", "Qwen3MoeForCausalLM", "MixtralForCausalLM"):
        getattr(transformers, name)  # imports the module, once for all
    for name in ("OlmoeForCausalLM", "DeepseekV3ForCausalLM", "Gemma2ForCausalLM", "FalconForCausalLM"):
        getattr(transformers, name)
    plan = PLANS[which]
    recorder = Recorder(Path(output), float(seconds), which, names)
    write_json(recorder.out / "pairs.json", plan.pairs())
    try:
        recorder.run_all(plan)
    finally:
        recorder.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
