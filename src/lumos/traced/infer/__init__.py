"""The setup of a traced run, inferred from the trace with evidence."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)


class Inferred(NamedTuple):
    """A value of a setup that a trace shows: Inferred(4, "4 attentions in 1 micro-batch").

    A rough one is only near, or stands for something that a setup has no key for, such as the classes of an image model
    in place of a vocabulary. It fills a gap, contradicts no file, and cannot be changed.
    """

    value: Any
    evidence: str  # one short phrase
    rough: bool = False


Findings = dict[str, Inferred]
"""Inferred values by setup key: {"model.layers": Inferred(…), …}."""


def agreed(values: Iterable[T]) -> T | None:
    """The one value that all agree on; None if they differ or there are none."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None
