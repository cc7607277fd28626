"""Operators that are not PyTorch's: what they run is recorded where it is Python, and marked as unseen where it is not.

Fake tensors run the function that a library registers for shapes. An operator of `torch.library.custom_op` has its
implementation beside it, which tells what it does: the same operators run on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_OF_PYTORCH = frozenset(
    ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional",
     "_dtensor", "fsdp", "quantized", "quantized_decomposed", "inductor", "rngprims", "symm_mem", "mkldnn",
     "higher_order")
)  # fmt: skip


def is_own(overload: Any) -> bool:
    """Whether an operator belongs to a library other than PyTorch."""
    return isinstance(overload, torch._ops.OpOverload) and overload.namespace not in _OF_PYTORCH


def is_composite(overload: Any) -> bool:
    """Whether an operator is made of others: autograd takes those apart, below it they arrive whole."""
    if overload.namespace == "prim":  # TorchScript's: the dispatcher does not have them
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has_kernel(overload.name(), "CompositeImplicitAutograd"))


def implementation_of(overload: Any) -> Callable[..., Any] | None:
    """The Python function that an operator runs on a GPU; None if it is not known."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(overload._schema.name)
    if definition is None:
        return None
    functions = definition._backend_fns
    return functions.get("cuda") or functions.get(None) or definition._init_fn  # type: ignore[no-any-return]
