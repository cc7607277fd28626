"""Operators and collectives: the two units of work that have a cost.

An Operator is one thing a GPU does, with the shape that one rank sees. `data/operators.toml` lists the kinds of
operators with the sizes in their shapes, and what each computes and moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

from lumos.data_files import read_table
from lumos.dtypes import BYTES


class Operator(NamedTuple):
    """What is run, on which shape, in which precision."""

    kind: str
    shape: tuple[int, ...]
    dtype: str = "bf16"

    @property
    def flops(self) -> float:
        """Multiplications and additions, each counted as one."""
        return _value(_kinds()[self.kind].flops, self.shape)

    @property
    def bytes(self) -> float:
        """What must at least be read and written once."""
        kind = _kinds()[self.kind]
        return (1.0 if kind.in_bytes else BYTES[self.dtype]) * _value(kind.moved, self.shape)

    @property
    def tensor_bytes(self) -> float:
        """Of the tensor that the next kernel reads: what may be found in the cache."""
        kind = _kinds()[self.kind]
        if kind.tensor_share:
            return kind.tensor_share * self.bytes
        return BYTES[self.dtype] * max((_value((term,), self.shape) for term in kind.tensor), default=prod(self.shape))

    @property
    def is_matrix(self) -> bool:
        """Whether the tensor cores do the work."""
        return self.kind in MATRIX


class Group(NamedTuple):
    """The ranks of a collective: how many, and how many of them share each link.

    `inside` of them are in one NVLink domain. Where the network between domains has several tiers (PCIe, leaf
    switches, spine), `above` has the members in one unit of each but the last, from the inside out.
    """

    size: int
    inside: int
    above: tuple[int, ...] = ()
    stride: int = 1  # from one member to the next, among the ranks of a stage

    @property
    def nodes(self) -> int:
        """NVLink domains that have members: nodes, unless NVLink joins a rack or only a part of a node."""
        return -(-self.size // self.inside)


class Collective(NamedTuple):
    """What ranks do together; `bytes` is the whole tensor: what is reduced, or what every rank has after gathering."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, p2p
    bytes: float
    group: Group


_Term = tuple[float, tuple[int, ...], tuple[int, ...]]  # coefficient, places of its factors, and of its divisors


class _Kind(NamedTuple):
    """A row of data/operators.toml."""

    sizes: str
    flops: tuple[_Term, ...]
    moved: tuple[_Term, ...]
    tensor: tuple[_Term, ...]
    tensor_share: float
    in_bytes: bool


def _value(terms: Sequence[_Term], shape: Sequence[int]) -> float:
    total = 0.0
    for coefficient, factors, divisors in terms:
        for place in factors:
            coefficient *= shape[place]
        for place in divisors:
            coefficient /= shape[place]
        total += coefficient
    return total


def _terms(sizes: str, polynomial: Mapping[str, float]) -> tuple[_Term, ...]:
    places = {size: place for place, size in enumerate(sizes)}

    def term(key: str, value: float) -> _Term:
        over, _, under = key.partition("/")
        return float(value), tuple(places[size] for size in over), tuple(places[size] for size in under)

    return tuple(term(key, value) for key, value in polynomial.items())


@cache
def _rows() -> Mapping[str, Mapping[str, Any]]:
    rows = read_table("operators.toml")
    return {name: rows[row.get("same_as", name)] for name, row in rows.items()}


@cache
def _kinds() -> Mapping[str, _Kind]:
    return {
        name: _Kind(
            row["sizes"], _terms(row["sizes"], row.get("flops", {})), _terms(row["sizes"], row["moved"]),
            _terms(row["sizes"], dict.fromkeys(row.get("tensor", ()), 1.0)), row.get("tensor_share", 0.0),
            row.get("bytes", False),
        )
        for name, row in _rows().items()
    }  # fmt: skip


def sizes_of(kind: str) -> str:
    """The sizes in the shapes of a kind, one letter each: "mnk" for a matmul."""
    return _kinds()[kind].sizes


def stand_in(kind: str) -> tuple[str, float] | None:
    """The operator whose samples serve where a kind has none, and the ratio of their times."""
    like = _rows()[kind].get("like")
    return (like["operator"], like["ratio"]) if like else None


KINDS = frozenset(_rows())
MATRIX = frozenset(name for name, row in _rows().items() if row.get("matrix"))
