"""AssumedValues: fake tensors have no values, and programs ask for some. Known values are followed, others assumed.

A value is followed as the mean over the elements of a storage: a mask that is full of ones has mean 1, a comparison of
random numbers with 0.15 has mean 0.15 or 0.85, the choice of one of 8 experts equals a given one in 1 of 8 places. The
sizes that depend on data (`mask.nonzero()`, `x[mask]`) and the branches that a script takes follow from it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import prod
from operator import add, mul, sub
from typing import Any, NamedTuple

import torch

from lumos.dry_run.endless_loops import UnknownQuestions
from lumos.dry_run.operator_log import storage_key

ASSUMED = "tensor values are unknown: assuming full masks, no dropped layers and equally loaded experts"
_UNKNOWN = 1.0  # assumed of a loss, a norm, an element of a mask

_SAME = {"_to_copy", "clone", "copy_", "contiguous", "index", "select", "slice", "view", "_unsafe_view", "expand",
         "unsqueeze", "squeeze", "permute", "transpose", "t", "detach", "alias", "cat", "flatten", "reshape", "abs",
         "lift_fresh", "index_select", "repeat"}  # fmt: skip
_CHOICES = {"topk": 1, "sort": 1, "max": 1, "min": 1, "argmax": 0, "argmin": 0, "multinomial": 0, "argsort": 0}
_RANDOM = {"rand", "rand_like", "uniform_", "uniform"}
_MOVED = ("all_to_all", "all_gather", "broadcast")  # collectives that add nothing up


class Known(NamedTuple):
    """Facts about the elements of a storage."""

    mean: float | None = None
    choices: range | None = None  # integers among these, each equally likely
    counting: tuple[float, float] | None = None  # start and step: arange, places of a full mask, sums
    is_uniform: bool = False  # random numbers between 0 and 1


_NOTHING = Known()


class AssumedValues:
    """Facts about storages, from the operators that wrote them."""

    def __init__(self) -> None:
        self.known: dict[int, Known] = {}
        self.asked = False
        self.unknown = UnknownQuestions()

    def forget(self, key: int) -> None:
        """Forget a storage that is gone, or was written by an operator that is not followed."""
        self.known.pop(key, None)

    def learn(self, tensor: torch.Tensor, **known: Any) -> None:
        """Note more about the elements of a tensor."""
        self.known[storage_key(tensor)] = self.of_storage(tensor)._replace(**known)

    def of_storage(self, tensor: Any) -> Known:
        """The facts about a tensor; none about anything else."""
        return self.known.get(storage_key(tensor), _NOTHING) if isinstance(tensor, torch.Tensor) else _NOTHING

    # ------------------------------------------------------------------ answers
    def of(self, tensor: torch.Tensor) -> bool | int | float | complex:
        """The result of `tensor.item()`."""
        constant = self._constant(tensor)
        if constant is not None:
            return constant.item()  # type: ignore[no-any-return]
        mean = self.mean_of(tensor)
        if mean is None:
            self.unknown.add()
            mean = _UNKNOWN
        if tensor.dtype == torch.bool:
            return mean >= 0.5
        if tensor.dtype.is_complex:
            return complex(mean)
        return float(mean) if tensor.dtype.is_floating_point else round(mean)

    def all_of(self, tensor: torch.Tensor) -> Any:
        """The result of `tensor.tolist()`; counts add up to what was counted."""
        constant = self._constant(tensor)
        if constant is not None:
            return constant.tolist()
        flat = self._elements(tensor)
        for size in reversed(tensor.shape[1:]):
            flat = [flat[i : i + size] for i in range(0, len(flat), size)] if size else []
        return flat if tensor.dim() else flat[0]

    def _elements(self, tensor: torch.Tensor) -> list[Any]:
        count, counting = int(tensor.numel()), self.of_storage(tensor).counting
        if counting is not None and tensor.is_contiguous():
            start, step = counting
            numbers = [start + step * (tensor.storage_offset() + i) for i in range(count)]
            return numbers if tensor.dtype.is_floating_point else [round(number) for number in numbers]
        if tensor.dtype == torch.bool or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return [self.of(tensor)] * count
        total = self.total(tensor)
        return [total // count + (i < total % count) for i in range(count)]

    def total(self, tensor: torch.Tensor) -> int:
        """The sum of a tensor of counts."""
        constant = self._constant(tensor)
        if constant is not None:
            return int(constant.sum())
        mean = self.of_storage(tensor).mean
        return round((_UNKNOWN if mean is None else mean) * int(tensor.numel()))

    def _constant(self, tensor: torch.Tensor) -> Any:
        """The real tensor that a fake one stands for, if torch keeps it."""
        self.asked = True
        return getattr(tensor, "constant", None)

    def count_true(self, mask: torch.Tensor) -> int:
        """The number of elements of a mask that are not zero."""
        self.asked = True
        mean = self.mean_of(mask)
        return round(min(max(_UNKNOWN if mean is None else mean, 0.0), 1.0) * int(mask.numel()))

    def count_distinct(self, tensor: torch.Tensor) -> int:
        """The number of different values: as many as equally likely choices give on average, or all."""
        self.asked = True
        count, known = int(tensor.numel()), self.of_storage(tensor)
        if known.choices is not None:
            kinds = len(known.choices)
            return round(kinds * (1.0 - (1.0 - 1.0 / kinds) ** count))
        return count if known.mean is None else min(count, 1)

    def are_equal(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        self.asked = True
        if a.shape != b.shape:
            return False
        mean = self.mean_of(a)
        return storage_key(a) == storage_key(b) or (mean is not None and mean == self.mean_of(b))

    def are_close(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        self.asked = True
        first, second = self.number(a), self.number(b)
        return first is None or second is None or abs(first - second) <= 1e-5 + 1e-5 * abs(second)

    def exchange(self, kind: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Follow a collective: what is moved is known of the result, because ranks hold the same; sums are unknown."""
        sent = [tensor for tensor in inputs if all(tensor is not out for out in outputs)] or inputs
        means = {self.mean_of(tensor) for tensor in sent}
        known = Known(means.pop()) if len(means) == 1 and kind in _MOVED else _NOTHING
        for tensor in outputs:
            self.known[storage_key(tensor)] = known

    # ------------------------------------------------------------------ what operators do
    def follow(self, name: str, args: Any, out: Any) -> None:
        """Note what an operator wrote; `name` is without namespace and overload."""
        if name in _CHOICES and not (name in ("max", "min") and isinstance(out, torch.Tensor)):
            self._choose(name, args, out)
            return
        if not isinstance(out, torch.Tensor) or out.layout != torch.strided:
            return
        before = self.mean_of(out) if name.endswith("_") else None
        if name in _SAME:
            self._copy(name, args, out)
        else:
            self.known[storage_key(out)] = self._written(name, args, out)
        if name.endswith("_"):
            self._blend(out, before)

    def _written(self, name: str, args: Any, out: torch.Tensor) -> Known:
        """The facts about the result of an operator."""
        if name in _RANDOM:
            return Known(is_uniform=True)
        if name in _RANGES:
            return _RANGES[name](self, args)
        return Known(self._mean(name, args, out))

    def _blend(self, out: torch.Tensor, before: float | None) -> None:
        """If only a part of a storage was written, its mean is that of both parts, as far as both are known."""
        share = out.numel() / max(out.untyped_storage().nbytes() // max(out.element_size(), 1), 1)
        if share < 1.0:
            mean = self.of_storage(out).mean
            both = None if mean is None or before is None else share * mean + (1.0 - share) * before
            self.known[storage_key(out)] = Known(both)

    def _choose(self, name: str, args: Any, out: Any) -> None:
        """The indices that such an operator returns point into the dimension it looks at, the last unless stated."""
        places = out[_CHOICES[name]] if isinstance(out, tuple | list) else out
        source: torch.Tensor = args[0]
        if isinstance(places, torch.Tensor) and places.dtype == torch.int64 and source.dim():
            self.known[storage_key(places)] = Known(choices=range(int(source.shape[-1])))

    def _copy(self, name: str, args: Any, out: torch.Tensor) -> None:
        """Whatever was known of the source is known of the copy."""
        source = args[1] if name == "copy_" else args[0][0] if isinstance(args[0], list | tuple) else args[0]
        if not isinstance(source, torch.Tensor) or storage_key(source) == storage_key(out):
            return
        known = self.of_storage(source)._replace(mean=self.mean_of(source))
        if name == "cat" and any(self.mean_of(part) != known.mean for part in args[0]):
            known = known._replace(mean=self._mean("cat", args, out))
        if not (source.is_contiguous() and not source.storage_offset() and source.numel() == out.numel()):
            known = known._replace(counting=None)
        self.known[storage_key(out)] = known

    def _mean(self, name: str, args: Any, out: torch.Tensor) -> float | None:
        rule = _RULES.get(name)
        with suppress(ArithmeticError, IndexError, TypeError):  # infinite numbers, and arguments of other overloads
            return rule(self, args, out) if rule else None
        return None

    def mean_of(self, value: Any) -> float | None:
        """The mean of a tensor, or a number; None if nothing is known."""
        if isinstance(value, bool | int | float):
            return float(value)
        known = self.of_storage(value)
        if known.counting is not None and value.numel() == 1:
            start, step = known.counting
            return start + step * int(value.storage_offset())
        return known.mean

    def number(self, value: Any) -> float | None:
        """As `mean_of`, but an unknown single number is the one that `item` would return."""
        mean = self.mean_of(value)
        if mean is not None or not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
            return mean  # single integers come from comparisons of places, as in the search for packed sequences
        return _UNKNOWN if value.numel() == 1 and not self.of_storage(value).is_uniform else None


# ---------------------------------------------------------------------- the mean of what an operator writes
Rule = Callable[[AssumedValues, Any, torch.Tensor], float | None]


def _constant(value: float) -> Rule:
    return lambda *_: value


def _of_means(count: int, operation: Callable[..., float]) -> Rule:
    """From the means of the first arguments, if all are known."""

    def rule(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
        means = [values.mean_of(args[place]) for place in range(count)]
        return None if None in means else operation(*means)

    return rule


def _opposite(of: Rule) -> Rule:
    """The share of the elements of which another rule does not hold."""

    def rule(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
        share = of(values, args, out)
        return None if share is None else 1.0 - share

    return rule


def _last_of_two(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """The second argument, if there is one: what is filled in, or the probability of ones."""
    return values.mean_of(args[1] if len(args) > 1 else args[0])


def _equal(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """The share of equal elements: one of as many as there are choices, or all or none of known numbers."""
    a, b = args[0], args[1]
    for choice, other in ((a, b), (b, a)):
        choices = values.of_storage(choice).choices
        if choices is not None:
            is_one = not isinstance(other, torch.Tensor) or other.numel() == 1
            mean = values.mean_of(other) if is_one else None
            return 0.0 if mean is not None and mean not in choices else 1.0 / max(len(choices), 1)
    first, second = values.number(a), values.number(b)
    if first is None or second is None:
        return None
    if isinstance(a, torch.Tensor) and a.numel() > 1 and 0.0 < first < 1.0 and second in (0.0, 1.0):  # of a mask
        return first if second == 1.0 else 1.0 - first
    return float(first == second)


def _below(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """Random numbers below a threshold; of choices, those that are below; otherwise whether a known mean is."""
    a, b = args[0], values.number(args[1])
    if b is None or not isinstance(a, torch.Tensor):
        return None
    known = values.of_storage(a)
    if known.is_uniform:
        return min(max(b, 0.0), 1.0)
    if known.choices is not None:
        return min(max((b - known.choices.start) / max(len(known.choices), 1), 0.0), 1.0)
    mean = values.number(a)
    return None if mean is None else float(mean < b)


def _above(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    below, known = _below(values, args, out), values.of_storage(args[0])
    if below is None:
        return None
    if known.is_uniform or known.choices is not None:
        return 1.0 - below
    return float((values.number(args[0]) or 0.0) > (values.number(args[1]) or 0.0))


def _most(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """The largest of choices is the last of them, and of counts their mean."""
    choices = values.of_storage(args[0]).choices
    return values.mean_of(args[0]) if choices is None else float(choices[-1]) if choices else None


def _and(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    means = [mean for arg in args[:2] if (mean := values.mean_of(arg)) is not None]
    return prod(means) if means else None


def _sum(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """Unknown masks are full."""
    mean = values.mean_of(args[0])
    if mean is None and args[0].dtype == torch.bool:
        mean = _UNKNOWN
    return None if mean is None else mean * args[0].numel() / max(out.numel(), 1)


def _counted(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    return args[0].numel() / max(out.numel(), 1)  # type: ignore[no-any-return]


def _scattered(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """Ones at the chosen places of zeros."""
    if len(args) > 3 and values.of_storage(args[2]).choices is not None and values.mean_of(args[0]) == 0.0:
        return args[2].numel() / max(out.numel(), 1)  # type: ignore[no-any-return]
    return None


def _counts(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """`zeros.scatter_add_(dim, places, ones)`: the result contains what is added."""
    before, added = values.mean_of(args[0]), values.mean_of(args[3])
    if before is None or added is None:
        return None
    return before + added * args[3].numel() / max(out.numel(), 1)  # type: ignore[no-any-return]


def _joined(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    known = [(values.mean_of(part), int(part.numel())) for part in args[0]]
    if any(mean is None for mean, _ in known):
        return None
    return sum((mean or 0.0) * count for mean, count in known) / max(int(out.numel()), 1)


def _difference(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    """The difference of means, and of neighbours in running sums: `ends[1:] - ends[:-1]`."""
    a, b = args[0], args[1]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and storage_key(a) == storage_key(b):
        counting = values.of_storage(a).counting
        return None if counting is None else counting[1] * (a.storage_offset() - b.storage_offset())
    return _of_means(2, sub)(values, args, out)


def _clamped(values: AssumedValues, args: Any, out: torch.Tensor) -> float | None:
    mean, low, high = values.mean_of(args[0]), *(values.mean_of(arg) for arg in (*args[1:3], None, None)[:2])
    if mean is None:
        return None
    return min(max(mean, mean if low is None else low), mean if high is None else max(high, low or high))


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero_", "isnan", "isinf", "isneginf", "isposinf"),
                    _constant(0.0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones", "isfinite", "isclose"), _constant(1.0)),
    **dict.fromkeys(("full", "full_like", "fill_", "scalar_tensor", "bernoulli", "bernoulli_"), _last_of_two),
    "new_full": lambda values, args, _: values.mean_of(args[2]),
    "eq": _equal, "ne": _opposite(_equal), "lt": _below, "le": _opposite(_above), "gt": _above, "ge": _opposite(_below),
    **dict.fromkeys(("logical_not", "bitwise_not"), _of_means(1, lambda mean: 1.0 - mean)),
    **dict.fromkeys(("logical_and", "bitwise_and"), _and),
    **dict.fromkeys(("logical_or", "bitwise_or"), _of_means(2, lambda a, b: a + b - a * b)),
    **dict.fromkeys(("any", "_is_any_true"), _of_means(1, lambda mean: float(mean > 0))),
    **dict.fromkeys(("all", "_is_all_true"), _of_means(1, lambda mean: float(mean >= 1))),
    "mean": _of_means(1, float), "sum": _sum, "count_nonzero": _sum, "bincount": _counted, "histc": _counted,
    "scatter": _scattered, "scatter_": _scattered, "scatter_add": _counts, "scatter_add_": _counts,
    "max": _most, "amax": _most, "cat": _joined, "clamp": _clamped, "sub": _difference,
    "add": _of_means(2, add), "mul": _of_means(2, mul), "rsub": _of_means(2, lambda a, b: b - a),
    "div": _of_means(2, lambda a, b: a / b if b else 0.0),
}  # fmt: skip


# ---------------------------------------------------------------------- numbers that count or choose
def _count_from(values: AssumedValues, args: Any) -> Known:
    """`arange(end)`, `arange(start, end)`, `arange(start, end, step)`."""
    if not all(isinstance(arg, int) for arg in args):
        return _NOTHING
    return Known(counting=(0 if len(args) == 1 else args[0], args[2] if len(args) > 2 else 1))


def _choose_from(values: AssumedValues, args: Any) -> Known:
    """`randint(high, size)`, `randint(low, high, size)`, `randint_like(x, high)`, and so on."""
    bounds = [arg for arg in args if isinstance(arg, int)]
    return Known(choices=range(0 if len(bounds) == 1 else bounds[0], bounds[-1])) if bounds else _NOTHING


def _sum_up(values: AssumedValues, args: Any) -> Known:
    """Running sums of a known mean go up by it."""
    mean = values.mean_of(args[0])
    return Known(counting=(mean, mean)) if mean is not None and args[0].dim() == 1 else _NOTHING


def _pad_front(values: AssumedValues, args: Any) -> Known:
    """A zero before running sums, as in `F.pad(lengths.cumsum(0), (1, 0))`."""
    sums = values.of_storage(args[0]).counting
    is_padded = sums is not None and list(args[1]) == [1, 0] and sums[0] == sums[1]
    return Known(counting=(0.0, sums[1])) if sums is not None and is_padded else _NOTHING


_RANGES: dict[str, Callable[[AssumedValues, Any], Known]] = {
    "arange": _count_from, "randint": _choose_from, "randint_like": _choose_from, "random_": _choose_from,
    "cumsum": _sum_up, "constant_pad_nd": _pad_front,
}  # fmt: skip
