"""Inference: the setup of a traced run, as far as its trace shows it, every value with its evidence."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)


class Inferred(NamedTuple):
    """A value of a setup that a trace shows: Inferred(4, "4 attentions in 1 micro-batch")."""

    value: Any
    evidence: str  # one short phrase


Findings = dict[str, Inferred]
"""Inferred values by setup key: {"model.layers": Inferred(…), …}."""


def agreed(values: Iterable[T]) -> T | None:
    """The one value that all agree on; None where they differ, or where there is none."""
    found = set(values)
    return found.pop() if len(found) == 1 else None
