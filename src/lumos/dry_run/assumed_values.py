"""AssumedValues: fake tensors have no values, and programs ask for some. What is known is followed, the rest assumed.

A value is followed as the mean over the elements of a storage: a mask that is full of ones has mean 1, a comparison of
random numbers with 0.15 has mean 0.15 or 0.85, the choice of one of 8 experts equals a given one in 1 of 8 places. From
it follow the sizes that depend on data (`mask.nonzero()`, `x[mask]`) and the branches that a script takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ASSUMED = "values of tensors are not known: masks are taken as full, no layer as dropped, experts as equally loaded"

_SAME = {"_to_copy", "clone", "copy_", "contiguous", "index", "select", "slice", "view", "_unsafe_view", "expand",
         "unsqueeze", "squeeze", "permute", "transpose", "t", "detach", "alias", "cat", "flatten", "reshape", "abs",
         "lift_fresh", "index_select", "repeat"}  # fmt: skip
_CHOICES = {"topk": 1, "sort": 1, "max": 1, "min": 1, "argmax": 0, "argmin": 0, "multinomial": 0, "argsort": 0}
_RANDOM = {"rand", "rand_like", "uniform_", "uniform"}


def storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class AssumedValues:
    """Means of storages, by what is known of the operators that wrote them."""

    def __init__(self) -> None:
        self.mean: dict[int, float] = {}
        self.choices: dict[int, int] = {}  # indices into this many places, each equally likely
        self.uniform: set[int] = set()  # random numbers between 0 and 1
        self.asked = False

    def forget(self, key: int) -> None:
        """A storage is gone, or was written by an operator that is not followed."""
        self.mean.pop(key, None)
        self.choices.pop(key, None)
        self.uniform.discard(key)

    # ------------------------------------------------------------------ answers
    def of(self, tensor: torch.Tensor) -> bool | int | float:
        """What `tensor.item()` returns."""
        self.asked = True
        constant = getattr(tensor, "constant", None)
        if constant is not None:
            return constant.item()  # type: ignore[no-any-return]
        mean = self.mean.get(storage_key(tensor), 1.0)
        if tensor.dtype == torch.bool:
            return mean >= 0.5
        return float(mean) if tensor.dtype.is_floating_point else round(mean)

    def all_of(self, tensor: torch.Tensor) -> Any:
        """What `tensor.tolist()` returns: counts add up to what was counted."""
        self.asked = True
        constant = getattr(tensor, "constant", None)
        if constant is not None:
            return constant.tolist()
        mean, count = self.mean.get(storage_key(tensor), 1.0), tensor.numel()
        total = round(mean * count)
        each: Any = self.of(tensor) if tensor.dtype == torch.bool or tensor.dtype.is_floating_point else None
        flat = [each if each is not None else total // count + (i < total % count) for i in range(count)]
        for size in reversed(tensor.shape[1:]):
            flat = [flat[i : i + size] for i in range(0, len(flat), size or 1)]
        return flat if tensor.dim() else flat[0]

    def count_true(self, mask: torch.Tensor) -> int:
        """How many elements of a mask are not zero."""
        self.asked = True
        mean = self.mean.get(storage_key(mask), 1.0)
        return round(min(max(mean, 0.0), 1.0) * int(mask.numel()))

    # ------------------------------------------------------------------ what operators do
    def follow(self, name: str, args: Any, out: Any) -> None:
        """Note what an operator wrote; `name` is without namespace and overload."""
        if name in _CHOICES and isinstance(out, tuple | list | torch.Tensor):
            self._choose(name, args, out)
            return
        if not isinstance(out, torch.Tensor):
            return
        key = storage_key(out)
        if name in _RANDOM:
            self.forget(key)
            self.uniform.add(key)
            return
        if name in _SAME:
            self._copy(name, args, key)
            return
        mean = self._mean(name, args, out)
        self.forget(key)
        if mean is not None:
            self.mean[key] = mean

    def _choose(self, name: str, args: Any, out: Any) -> None:
        """The indices that such an operator returns point into the dimension it looks at, the last unless stated."""
        found = out[_CHOICES[name]] if isinstance(out, tuple | list) else out
        source: torch.Tensor = args[0]
        if isinstance(found, torch.Tensor) and found.dtype == torch.int64 and source.dim():
            self.forget(storage_key(found))
            self.choices[storage_key(found)] = int(source.shape[-1])

    def _copy(self, name: str, args: Any, key: int) -> None:
        """What was known of the source is known of the copy."""
        source = args[1] if name == "copy_" else args[0][0] if isinstance(args[0], list | tuple) else args[0]
        if not isinstance(source, torch.Tensor) or storage_key(source) == key:
            return
        origin = storage_key(source)
        mean, choices = self.mean.get(origin), self.choices.get(origin)
        self.forget(key)
        if mean is not None:
            self.mean[key] = mean
        if choices is not None:
            self.choices[key] = choices

    def _mean(self, name: str, args: Any, out: torch.Tensor) -> float | None:
        rule = _RULES.get(name)
        return rule(self, args, out) if rule else None

    def _known(self, value: Any) -> float | None:
        if isinstance(value, bool | int | float):
            return float(value)
        return self.mean.get(storage_key(value)) if isinstance(value, torch.Tensor) else None


def _constant(value: float) -> Callable[[AssumedValues, Any, torch.Tensor], float]:
    return lambda *_: value


def _filled(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    return values._known(args[1]) if len(args) > 1 else values._known(args[0])


def _equal(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    keys = [storage_key(arg) for arg in args[:2] if isinstance(arg, torch.Tensor)]
    found = [values.choices[key] for key in keys if key in values.choices]
    if found:
        return 1.0 / found[0]
    mask, other = values._known(args[0]), args[1]
    if mask is None or not 0.0 <= mask <= 1.0 or isinstance(other, torch.Tensor) or other not in (0, 1):
        return None
    return mask if other == 1 else 1.0 - mask


def _below(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """Random numbers below a threshold; otherwise only whether a known mean is."""
    a, b = args[0], values._known(args[1])
    if b is None or not isinstance(a, torch.Tensor):
        return None
    if storage_key(a) in values.uniform:
        return min(max(b, 0.0), 1.0)
    mean = values.mean.get(storage_key(a))
    return None if mean is None else float(mean < b)


def _above(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    below = _below(values, args, out)
    if below is None or (isinstance(args[0], torch.Tensor) and storage_key(args[0]) in values.uniform):
        return None if below is None else 1.0 - below
    return float((values.mean.get(storage_key(args[0])) or 0.0) > (values._known(args[1]) or 0.0))


def _not(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    mean = values._known(args[0])
    return None if mean is None else 1.0 - mean


def _and(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    a, b = (values._known(arg) for arg in args[:2])
    return None if a is None and b is None else (1.0 if a is None else a) * (1.0 if b is None else b)


def _or(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    a, b = (values._known(arg) for arg in args[:2])
    return None if a is None or b is None else a + b - a * b


def _any(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    mean = values._known(args[0])
    return None if mean is None else float(mean > 0)


def _all(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    mean = values._known(args[0])
    return None if mean is None else float(mean >= 1)


def _sum(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    mean = values._known(args[0])
    return None if mean is None else mean * args[0].numel() / max(out.numel(), 1)


def _counted(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    return args[0].numel() / max(out.numel(), 1)  # type: ignore[no-any-return]


def _scattered(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """Ones at the chosen places of zeros."""
    if len(args) > 3 and storage_key(args[2]) in values.choices and values._known(args[0]) == 0.0:
        return args[2].numel() / max(out.numel(), 1)  # type: ignore[no-any-return]
    return None


_RULES: dict[str, Callable[[AssumedValues, Any, torch.Tensor], float | None]] = {
    "zeros": _constant(0.0), "zeros_like": _constant(0.0), "new_zeros": _constant(0.0), "zero_": _constant(0.0),
    "ones": _constant(1.0), "ones_like": _constant(1.0), "new_ones": _constant(1.0),
    "full": _filled, "full_like": _filled, "new_full": lambda v, a, o: v._known(a[2]), "fill_": _filled,
    "scalar_tensor": _filled, "eq": _equal, "ne": lambda v, a, o: None if (m := _equal(v, a, o)) is None else 1.0 - m,
    "lt": _below, "le": _below, "gt": _above, "ge": _above, "isnan": _constant(0.0), "isinf": _constant(0.0),
    "isneginf": _constant(0.0), "isposinf": _constant(0.0), "isfinite": _constant(1.0),
    "logical_not": _not, "bitwise_not": _not, "logical_and": _and, "bitwise_and": _and, "logical_or": _or,
    "bitwise_or": _or, "any": _any, "all": _all, "sum": _sum, "bincount": _counted, "histc": _counted,
    "scatter": _scattered, "scatter_": _scattered,
}  # fmt: skip
