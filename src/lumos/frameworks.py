"""Framework: what a training framework runs around the same mathematics. The facts are in `data/frameworks.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from lumos.errors import OptionError


@dataclass(frozen=True)
class Framework:
    """Which kernels are fused or joined, what overlaps, which precisions are kept, how dear a launch is."""

    name: str
    attention: str = "flash"
    fused: bool = False  # element-wise chains are one kernel
    fused_norm: bool = False
    fused_rotary: bool = False
    fused_activation: bool = False
    fused_bias: bool = False  # the bias is added by the product itself or by the next kernel
    fused_loss: bool = False  # the loss works on the logits as they are, without a copy in fp32
    eager_gelu: bool = False  # GELU written out as eight operators
    joins_qkv: bool = False  # one product for query, key and value
    joins_gate: bool = False  # one product for both inward halves of a gated MLP
    dropout: bool = False
    accumulates_fp32: bool = False  # weight gradients are added to a buffer of fp32
    fused_accumulation: bool = False  # by the product itself
    tp_overlap: bool = False
    dp_overlap: bool = False
    sequence_parallel: bool = False
    zero: int = 0
    reduce_bytes: int = 2  # of one gradient on the network
    gather_bytes: int = 2  # of one weight on the network
    state_precision: str = "training"  # of weights and optimizer state: training, mixed, fp32
    optimizer_traffic: float = 28.0  # bytes read and written for one parameter
    optimizer_launches: int = 60
    grouped_experts: bool = False
    host_us: float = 6.6  # of the host for one launch, on the reference host


@cache
def framework_named(name: str) -> Framework:
    """The framework of that name, or OptionError."""
    tables = _tables()
    if name not in tables:
        raise OptionError(f"framework {name[:100]!r} is not known: use one of {', '.join(tables)}")
    return tables[name]


@cache
def _tables() -> dict[str, Framework]:
    text = resources.files("lumos").joinpath("data/frameworks.toml").read_text("utf-8")
    return {name: Framework(name=name, **facts) for name, facts in tomllib.loads(text).items()}
