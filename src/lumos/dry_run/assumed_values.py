"""AssumedValues: fake tensors have no values, and programs ask for some. What is known is followed, the rest assumed.

A value is followed as the mean over the elements of a storage: a mask that is full of ones has mean 1, a comparison of
random numbers with 0.15 has mean 0.15 or 0.85, the choice of one of 8 experts equals a given one in 1 of 8 places. From
it follow the sizes that depend on data (`mask.nonzero()`, `x[mask]`) and the branches that a script takes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from lumos.dry_run.endless_loops import UnknownQuestions

ASSUMED = "values of tensors are not known: masks are taken as full, no layer as dropped, experts as equally loaded"
_UNKNOWN = 1.0  # a loss, a norm, an element of a mask of which nothing is known

_SAME = {"_to_copy", "clone", "copy_", "contiguous", "index", "select", "slice", "view", "_unsafe_view", "expand",
         "unsqueeze", "squeeze", "permute", "transpose", "t", "detach", "alias", "cat", "flatten", "reshape", "abs",
         "lift_fresh", "index_select", "repeat"}  # fmt: skip
_CHOICES = {"topk": 1, "sort": 1, "max": 1, "min": 1, "argmax": 0, "argmin": 0, "multinomial": 0, "argsort": 0}
_RANDOM = {"rand", "rand_like", "uniform_", "uniform"}


def storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


Rule = Callable[["AssumedValues", Any, torch.Tensor], float | None]  # the mean of what an operator writes


class AssumedValues:
    """Means of storages, by what is known of the operators that wrote them."""

    def __init__(self) -> None:
        self.mean: dict[int, float] = {}
        self.choices: dict[int, range] = {}  # integers among these, each equally likely
        self.counting: dict[int, tuple[float, float]] = {}  # start and step: arange, places of a full mask, sums
        self.uniform: set[int] = set()  # random numbers between 0 and 1
        self.asked = False
        self.unknown = UnknownQuestions()

    def forget(self, key: int) -> None:
        """A storage is gone, or was written by an operator that is not followed."""
        self.mean.pop(key, None)
        self.choices.pop(key, None)
        self.counting.pop(key, None)
        self.uniform.discard(key)

    # ------------------------------------------------------------------ answers
    def of(self, tensor: torch.Tensor) -> bool | int | float | complex:
        """What `tensor.item()` returns."""
        self.asked = True
        constant = getattr(tensor, "constant", None)
        if constant is not None:
            return constant.item()  # type: ignore[no-any-return]
        mean = self._known(tensor)
        if mean is None:
            self.unknown.add()
            mean = _UNKNOWN
        if tensor.dtype == torch.bool:
            return mean >= 0.5
        if tensor.dtype.is_complex:
            return complex(mean)
        return float(mean) if tensor.dtype.is_floating_point else round(mean)

    def all_of(self, tensor: torch.Tensor) -> Any:
        """What `tensor.tolist()` returns: counts add up to what was counted."""
        self.asked = True
        constant = getattr(tensor, "constant", None)
        if constant is not None:
            return constant.tolist()
        flat = self._elements(tensor)
        for size in reversed(tensor.shape[1:]):
            flat = [flat[i : i + size] for i in range(0, len(flat), size)] if size else []
        return flat if tensor.dim() else flat[0]

    def _elements(self, tensor: torch.Tensor) -> list[Any]:
        count, key = int(tensor.numel()), storage_key(tensor)
        if key in self.counting and tensor.is_contiguous():
            start, step = self.counting[key]
            numbers = [start + step * (tensor.storage_offset() + i) for i in range(count)]
            return numbers if tensor.dtype.is_floating_point else [round(number) for number in numbers]
        if tensor.dtype == torch.bool or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return [self.of(tensor)] * count
        total = self.total(tensor)
        return [total // count + (i < total % count) for i in range(count)]

    def total(self, tensor: torch.Tensor) -> int:
        """The sum of a tensor of counts."""
        self.asked = True
        constant = getattr(tensor, "constant", None)
        if constant is not None:
            return int(constant.sum())
        return round(self.mean.get(storage_key(tensor), _UNKNOWN) * int(tensor.numel()))

    def count_true(self, mask: torch.Tensor) -> int:
        """How many elements of a mask are not zero."""
        self.asked = True
        mean = self._known(mask)
        return round(min(max(_UNKNOWN if mean is None else mean, 0.0), 1.0) * int(mask.numel()))

    def count_distinct(self, tensor: torch.Tensor) -> int:
        """How many different values there are: as many as equally likely choices give on average, or all."""
        self.asked = True
        count, key = int(tensor.numel()), storage_key(tensor)
        if key in self.choices:
            kinds = len(self.choices[key])
            return round(kinds * (1.0 - (1.0 - 1.0 / kinds) ** count))
        return min(count, 1) if key in self.mean else count

    def are_equal(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        self.asked = True
        if a.shape != b.shape:
            return False
        known = self._known(a)
        return storage_key(a) == storage_key(b) or (known is not None and known == self._known(b))

    def are_close(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        self.asked = True
        first, second = self._number(a), self._number(b)
        return first is None or second is None or abs(first - second) <= 1e-5 + 1e-5 * abs(second)

    def exchange(self, kind: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """A collective: what is moved is known of the result; ranks hold the same. What is added up is not known."""
        sent = [tensor for tensor in inputs if all(tensor is not out for out in outputs)] or inputs
        means = {self._known(tensor) for tensor in sent}
        for tensor in outputs:
            self.forget(storage_key(tensor))
            if len(means) == 1 and None not in means and kind in ("all_to_all", "all_gather", "broadcast"):
                self.mean[storage_key(tensor)] = next(iter(means)) or 0.0

    # ------------------------------------------------------------------ what operators do
    def follow(self, name: str, args: Any, out: Any) -> None:
        """Note what an operator wrote; `name` is without namespace and overload."""
        if name in _CHOICES and not (name in ("max", "min") and isinstance(out, torch.Tensor)):
            self._choose(name, args, out)
            return
        if not isinstance(out, torch.Tensor):
            return
        if out.layout != torch.strided:
            return
        key = storage_key(out)
        before = self._known(out) if name.endswith("_") else None
        if name in _RANDOM:
            self.forget(key)
            self.uniform.add(key)
        elif name in _SAME:
            self._copy(name, args, out)
        elif name in _RANGES:
            self.forget(key)
            _RANGES[name](self, args, key)
        else:
            mean = self._mean(name, args, out)
            self.forget(key)
            if mean is not None:
                self.mean[key] = mean
        if name.endswith("_"):
            self._blend(out, before)

    def _blend(self, out: torch.Tensor, before: float | None) -> None:
        """Only a part of a storage was written: its mean is that of both parts, if both are known."""
        key, size = storage_key(out), out.untyped_storage().nbytes() // max(out.element_size(), 1)
        share = out.numel() / max(size, 1)
        if share < 1.0:
            mean = self.mean.get(key)
            self.forget(key)
            if mean is not None and before is not None:
                self.mean[key] = share * mean + (1.0 - share) * before

    def _choose(self, name: str, args: Any, out: Any) -> None:
        """The indices that such an operator returns point into the dimension it looks at, the last unless stated."""
        found = out[_CHOICES[name]] if isinstance(out, tuple | list) else out
        source: torch.Tensor = args[0]
        if isinstance(found, torch.Tensor) and found.dtype == torch.int64 and source.dim():
            self.forget(storage_key(found))
            self.choices[storage_key(found)] = range(int(source.shape[-1]))

    def _copy(self, name: str, args: Any, out: torch.Tensor) -> None:
        """What was known of the source is known of the copy."""
        key = storage_key(out)
        source = args[1] if name == "copy_" else args[0][0] if isinstance(args[0], list | tuple) else args[0]
        if not isinstance(source, torch.Tensor) or storage_key(source) == key:
            return
        origin = storage_key(source)
        mean, choices = self._known(source), self.choices.get(origin)
        if name == "cat" and any(self._known(part) != mean for part in args[0]):
            mean = self._mean("cat", args, out)
        is_whole = source.is_contiguous() and not source.storage_offset() and source.numel() == out.numel()
        counting = self.counting.get(origin) if is_whole else None
        is_random = origin in self.uniform
        self.forget(key)
        if mean is not None:
            self.mean[key] = mean
        if choices is not None:
            self.choices[key] = choices
        if counting is not None:
            self.counting[key] = counting
        if is_random:
            self.uniform.add(key)

    def _mean(self, name: str, args: Any, out: torch.Tensor) -> float | None:
        rule = _RULES.get(name)
        with suppress(ArithmeticError, IndexError, TypeError):  # infinite numbers, and arguments of other overloads
            return rule(self, args, out) if rule else None
        return None

    def _known(self, value: Any) -> float | None:
        """The mean of a tensor, or a number; None if nothing is known."""
        if isinstance(value, bool | int | float):
            return float(value)
        if not isinstance(value, torch.Tensor):
            return None
        key = storage_key(value)
        if key in self.counting and value.numel() == 1:
            start, step = self.counting[key]
            return start + step * int(value.storage_offset())
        return self.mean.get(key)

    def _number(self, value: Any) -> float | None:
        """As `_known`, but a single number of which nothing is known is the one that `item` would return."""
        known = self._known(value)
        if known is not None or not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
            return known  # single integers come from comparisons of places, as in the search for packed sequences
        return _UNKNOWN if value.numel() == 1 and storage_key(value) not in self.uniform else None


def _constant(value: float) -> Rule:
    return lambda *_: value


def _filled(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    return values._known(args[1]) if len(args) > 1 else values._known(args[0])


def _equal(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """How many of the elements are equal: one of as many as there are choices, or all or none of known numbers."""
    a, b = args[0], args[1]
    for choice, other in ((a, b), (b, a)):
        found = values.choices.get(storage_key(choice)) if isinstance(choice, torch.Tensor) else None
        if found is not None:
            is_one = not isinstance(other, torch.Tensor) or other.numel() == 1
            known = values._known(other) if is_one else None
            return 0.0 if known is not None and known not in found else 1.0 / max(len(found), 1)
    first, second = values._number(a), values._number(b)
    if first is None or second is None:
        return None
    if isinstance(a, torch.Tensor) and a.numel() > 1 and 0.0 < first < 1.0 and second in (0.0, 1.0):  # of a mask
        return first if second == 1.0 else 1.0 - first
    return float(first == second)


def _below(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """Random numbers below a threshold; of choices, those that are below; otherwise whether a known mean is."""
    a, b = args[0], values._number(args[1])
    if b is None or not isinstance(a, torch.Tensor):
        return None
    key = storage_key(a)
    if key in values.uniform:
        return min(max(b, 0.0), 1.0)
    if key in values.choices:
        kinds = values.choices[key]
        return min(max((b - kinds.start) / max(len(kinds), 1), 0.0), 1.0)
    mean = values._number(a)
    return None if mean is None else float(mean < b)


def _above(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    below = _below(values, args, out)
    if below is None:
        return None
    key = storage_key(args[0])
    if key in values.uniform or key in values.choices:
        return 1.0 - below
    return float((values._number(args[0]) or 0.0) > (values._number(args[1]) or 0.0))


def _at_most(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    above = _above(values, args, out)
    return None if above is None else 1.0 - above


def _at_least(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    below = _below(values, args, out)
    return None if below is None else 1.0 - below


def _drawn(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """Ones with a given probability: that of the second argument, or the elements of the first."""
    return values._known(args[1]) if len(args) > 1 else values._known(args[0])


def _most(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """The largest of choices is the last of them, and of counts their mean."""
    found = values.choices.get(storage_key(args[0]))
    return values._known(args[0]) if found is None else float(found[-1]) if found else None


def _mean_of(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    return values._known(args[0])


def _count_from(values: AssumedValues, args: Any, key: int) -> None:
    """`arange(end)`, `arange(start, end)`, `arange(start, end, step)`."""
    if all(isinstance(arg, int) for arg in args):
        values.counting[key] = (0 if len(args) == 1 else args[0], args[2] if len(args) > 2 else 1)


def _choose_from(values: AssumedValues, args: Any, key: int) -> None:
    """`randint(high, size)`, `randint(low, high, size)`, `randint_like(x, high)`, and so on."""
    bounds = [arg for arg in args if isinstance(arg, int)]
    if bounds:
        values.choices[key] = range(0 if len(bounds) == 1 else bounds[0], bounds[-1])


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
    """Masks of which nothing is known are full."""
    mean = values._known(args[0])
    if mean is None and args[0].dtype == torch.bool:
        mean = _UNKNOWN
    return None if mean is None else mean * args[0].numel() / max(out.numel(), 1)


def _counted(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    return args[0].numel() / max(out.numel(), 1)  # type: ignore[no-any-return]


def _scattered(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """Ones at the chosen places of zeros."""
    if len(args) > 3 and storage_key(args[2]) in values.choices and values._known(args[0]) == 0.0:
        return args[2].numel() / max(out.numel(), 1)  # type: ignore[no-any-return]
    return None


def _counts(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """`zeros.scatter_add_(dim, places, ones)`: what is added is in the result."""
    before, added = values._known(args[0]), values._known(args[3])
    if before is None or added is None:
        return None
    return before + added * args[3].numel() / max(out.numel(), 1)  # type: ignore[no-any-return]


def _joined(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    known = [(values._known(part), int(part.numel())) for part in args[0]]
    if any(mean is None for mean, _ in known):
        return None
    return sum((mean or 0.0) * count for mean, count in known) / max(int(out.numel()), 1)


def _arithmetic(operation: Callable[[float, float], float]) -> Rule:
    """Of means, where both are known."""

    def rule(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
        a, b = values._known(args[0]), values._known(args[1])
        return None if a is None or b is None else operation(a, b)

    return rule


def _difference(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """Of means, and of neighbours in running sums: `ends[1:] - ends[:-1]`."""
    a, b = args[0], args[1]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and storage_key(a) == storage_key(b):
        counting = values.counting.get(storage_key(a))
        return None if counting is None else counting[1] * (a.storage_offset() - b.storage_offset())
    return _arithmetic(lambda x, y: x - y)(values, args, out)


def _clamped(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    mean, low, high = values._known(args[0]), *(values._known(arg) for arg in (*args[1:3], None, None)[:2])
    if mean is None:
        return None
    return min(max(mean, mean if low is None else low), mean if high is None else max(high, low or high))


def _sum_up(values: AssumedValues, args: Any, key: int) -> None:
    """Running sums of a known mean go up by it."""
    mean = values._known(args[0])
    if mean is not None and args[0].dim() == 1:
        values.counting[key] = (mean, mean)


def _pad_front(values: AssumedValues, args: Any, key: int) -> None:
    """A zero before running sums, as in `F.pad(lengths.cumsum(0), (1, 0))`."""
    found = values.counting.get(storage_key(args[0]))
    if found is not None and list(args[1]) == [1, 0] and found[0] == found[1]:
        values.counting[key] = (0.0, found[1])


_RANGES: dict[str, Callable[[AssumedValues, Any, int], None]] = {
    "arange": _count_from, "randint": _choose_from, "randint_like": _choose_from, "random_": _choose_from,
    "cumsum": _sum_up, "constant_pad_nd": _pad_front,
}  # fmt: skip
_RULES: dict[str, Rule] = {
    "zeros": _constant(0.0), "zeros_like": _constant(0.0), "new_zeros": _constant(0.0), "zero_": _constant(0.0),
    "ones": _constant(1.0), "ones_like": _constant(1.0), "new_ones": _constant(1.0),
    "full": _filled, "full_like": _filled, "new_full": lambda v, a, o: v._known(a[2]), "fill_": _filled,
    "scalar_tensor": _filled, "eq": _equal, "ne": lambda v, a, o: None if (m := _equal(v, a, o)) is None else 1.0 - m,
    "lt": _below, "le": _at_most, "gt": _above, "ge": _at_least, "isnan": _constant(0.0), "isinf": _constant(0.0),
    "isneginf": _constant(0.0), "isposinf": _constant(0.0), "isfinite": _constant(1.0),
    "logical_not": _not, "bitwise_not": _not, "logical_and": _and, "bitwise_and": _and, "logical_or": _or,
    "bitwise_or": _or, "any": _any, "all": _all, "sum": _sum, "bincount": _counted, "histc": _counted,
    "count_nonzero": _sum, "_is_any_true": _any, "_is_all_true": _all,
    "scatter": _scattered, "scatter_": _scattered, "bernoulli": _drawn, "bernoulli_": _drawn, "mean": _mean_of,
    "scatter_add": _counts, "scatter_add_": _counts, "max": _most, "amax": _most, "isclose": _constant(1.0),
    "cat": _joined, "add": _arithmetic(lambda a, b: a + b), "mul": _arithmetic(lambda a, b: a * b),
    "sub": _difference, "rsub": _arithmetic(lambda a, b: b - a), "clamp": _clamped,
    "div": _arithmetic(lambda a, b: a / b if b else 0.0),
}  # fmt: skip
