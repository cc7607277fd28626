"""Whether PyTorch multiplies fp32 operands as tf32, by whichever of its settings the script allowed that.

Since torch 2.9 every backend has an `fp32_precision`; once a script has set one, the older settings raise when they are
read.
"""

from __future__ import annotations

import torch


def matmuls_use_tf32() -> bool:
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return bool(torch.get_float32_matmul_precision() != "highest" if precision is None else precision == "tf32")


def convolutions_use_tf32() -> bool:
    return _cudnn_uses_tf32("conv")


def recurrent_layers_use_tf32() -> bool:
    return _cudnn_uses_tf32("rnn")


def _cudnn_uses_tf32(operators: str) -> bool:
    precision = getattr(getattr(torch.backends.cudnn, operators, None), "fp32_precision", None)
    return bool(torch.backends.cudnn.allow_tf32) if precision is None else precision == "tf32"
