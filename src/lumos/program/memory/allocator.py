"""Habits: what a framework does with memory beyond what the fields of Framework say.

A field of the same name in Framework goes before what is written here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from lumos.setup.frameworks import Framework

# Bytes of one logit between the last layer's forward and backward.
# eager: log-softmax, the gradient of the loss in it, the gradient of its input, all fp32 (the logits themselves and
#   their fp32 copy are gone by then). Exact on our H200 recordings.
# compiled: logits, their copy in fp32, log-softmax; by difference on a compiled recording.
# sharded: logits in fp32, and less their maximum, which becomes the softmax and the gradient in place (nanotron,
#   Megatron-LM). fused: logits in 16 bits, their softmax in fp32, which becomes the gradient (Megatron-Core).
_LOSS_BYTES = {"eager": 12.0, "sharded": 8.0, "fused": 6.0}
COMPILED_LOSS_BYTES = 10.0


@dataclass(frozen=True)
class Habits:
    """Facts of one framework."""

    loss_bytes: float
    kept_logit_bytes: float = 0.0  # of the micro-batch before, not let go yet
    half_gradients: bool = False  # 16-bit gradients of all weights lie beside the buffer of fp32
    gradient_buffer_fp32: bool = False
    keeps_gathered: bool = False  # sequence parallel: linear layers keep their input gathered, not divided
    keeps_outputs: bool = False  # the last stage keeps the logits of all micro-batches, to join them
    buckets: bool = False  # DistributedDataParallel: one more copy of the gradients


_KNOWN: dict[str, dict[str, Any]] = {
    # torch.distributed.pipelining merges the outputs of the micro-batches; DDP without gradient_as_bucket_view.
    "pytorch": {"keeps_outputs": True, "buckets": True},
    "torchtitan": {"buckets": True},
    # flash-attn's cross entropy: logits and their gradient, as they are.
    "llm-foundry": {"loss_bytes": 4.0, "buckets": True},
    # optim/gradient_accumulator.py adds the 16-bit gradients after the whole backward; functional.py keeps what was
    # gathered unless tp_recompute_allgather.
    "nanotron": {"kept_logit_bytes": 4.0, "half_gradients": True, "keeps_gathered": True},
    # DeepSpeed, runtime/bf16_optimizer.py: flat gradients of fp32, which ZeRO 1 does not divide.
    "megatron-deepspeed": {"gradient_buffer_fp32": True},
}


@cache
def habits_of(framework: Framework) -> Habits:
    """What is known of a framework, its own fields first."""
    values: dict[str, Any] = {"loss_bytes": _LOSS_BYTES[framework.loss], "gradient_buffer_fp32": False}
    values |= _KNOWN.get(framework.name, {})
    values["gradient_buffer_fp32"] |= framework.accumulates_fp32 and framework.state_precision == "mixed"
    for field in fields(Habits):
        if hasattr(framework, field.name):
            values[field.name] = getattr(framework, field.name)
    return Habits(**values)
