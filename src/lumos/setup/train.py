"""Train: batch, precision and everything else about one step that is neither model nor machine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lumos.setup.section import MaybeSize, Section, Size, Ways

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
Recompute = Literal["none", "selective", "full"]
Optimizer = Literal["adamw", "adam", "sgd", "none"]
Attention = Literal["", "flash", "unfused"]  # "": what the framework does by itself
Mode = Literal["pretrain", "lora", "sft"]


class Train(Section):
    """One training step. `microbatches` (per replica) and `global_batch` follow from each other in a Setup."""

    seq: Size
    micro_batch: Ways = 1
    microbatches: MaybeSize = 0
    global_batch: MaybeSize = 0
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    optimizer: Optimizer = "adamw"
    compile: bool = False
    framework: Annotated[str, Field(max_length=100)] = "pytorch"
    attention: Attention = ""
    mode: Mode = "pretrain"
    imbalance: Annotated[float, Field(ge=1, le=1e4)] = 1.0  # the busiest expert's load over the mean
    cuda_graphs: bool = False
