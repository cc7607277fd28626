"""Initialisers of weights in a dry run: fake tensors hold no values, so nothing is drawn for them.

Some initialisers draw until every number lies between two bounds, or fill a tensor row by row in Python. Neither ends
soon on fake tensors, and neither is part of a training step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lumos.dry_run.assumed_values import AssumedValues, storage_key

# Private functions stand below the public ones, to which libraries keep references of their own.
_DRAWS = ("_no_grad_uniform_", "_no_grad_normal_", "_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
_FILLS = ("_no_grad_fill_", "_no_grad_zero_")


def initialisers_without_draws(values: AssumedValues) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement) of the functions of torch.nn.init that write more than once, or in a loop."""
    for name in (*_DRAWS, *_FILLS):
        function = getattr(torch.nn.init, name, None)
        if function is not None:
            yield torch.nn.init, name, _on_real_tensors(function, values, name in _FILLS)


def _on_real_tensors(function: Callable[..., Any], values: AssumedValues, fills: bool) -> Callable[..., Any]:
    """A function that leaves fake tensors alone, except for the value that it fills them with."""

    @functools.wraps(function)
    def initialise(tensor: Any, *args: Any, **options: Any) -> Any:
        local = getattr(tensor, "_local_tensor", tensor)
        if not isinstance(local, FakeTensor):
            return function(tensor, *args, **options)
        if fills:
            values.follow("fill_", (local, *(args or options.values() or (0.0,))), local)
        else:
            values.forget(storage_key(local))
        return tensor

    return initialise
