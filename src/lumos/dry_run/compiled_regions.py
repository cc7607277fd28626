"""Which operators belong to compiled code that a dry run could not lower: they run eagerly here, and are marked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lumos.program.op import UNCOMPILED


class CompiledRegions:
    """The part of a recorder that knows what runs in place of compiled code, and which nodes of autograd that made."""

    def __init__(self) -> None:
        self.gives_up_frames = False  # dynamo has left functions to Python, and will do so again
        self.has_run = False  # a compiled function has, in which no module is seen to be entered
        self._compiled = self._eager = 0  # calls that are under way
        self._sequence: set[int] = set()

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """While this lasts, a compiled function runs."""
        self.has_run = True
        self._compiled += 1
        try:
            yield
        finally:
            self._compiled -= 1

    @contextmanager
    def eager(self) -> Iterator[None]:
        """While this lasts, operators stand in for compiled code."""
        self._eager += 1
        try:
            yield
        finally:
            self._eager -= 1

    def marked(self, options: tuple[str, ...]) -> tuple[str, ...]:
        """The options of the operator that runs now, with the mark of a fallback."""
        return (*options, UNCOMPILED) if "compiled" not in options and self._falls_back() else options

    def _falls_back(self) -> bool:
        is_forward = torch._C._current_graph_task_id() == -1
        if self._eager or (self._compiled and self.gives_up_frames):
            if is_forward:
                self._sequence.add(torch._C._autograd._get_sequence_nr())
            return True
        node = None if is_forward else torch._C._current_autograd_node()
        return node is not None and node._sequence_nr() in self._sequence
