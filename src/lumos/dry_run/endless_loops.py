"""Detection of loops that do not end on fake tensors, or not soon; errors name the line that runs them."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
from pathlib import Path
from types import FrameType

import torch

_OURS = (str(Path(__file__).resolve().parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep)
_MOST_QUESTIONS = 200  # of one line, without a module that runs in between
_LOOPS = (ast.While, ast.For, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class TooManyOperatorsError(TimeoutError):
    """A step that exceeds the time or the operators of a dry run; the text names the line."""


class UnknownQuestions:
    """Counts how often one line asks for unknown values: the answer never changes, so a `while` may not end."""

    def __init__(self) -> None:
        self._place, self._count = ("", 0), 0

    def clear(self) -> None:
        """Start again when a module runs: the loop around it is that of training or generation."""
        self._count = 0

    def add(self) -> None:
        frame = caller()
        place = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
        self._count = self._count + 1 if place == self._place else 1
        self._place = place
        loop = _while_around(frame) if self._count == _MOST_QUESTIONS else None
        if loop is not None:
            raise TooManyOperatorsError(
                f"the loop at {shown(loop)} ends when tensors have certain values, and a dry run has no values"
            )


def caller() -> FrameType | None:
    """The innermost frame that belongs neither to torch nor to this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*_OURS, "<")):
        frame = frame.f_back
    return frame


def shown(frame: FrameType | None) -> str:
    """A frame for a message: file, line, function."""
    if frame is None:
        return "an unknown line"
    parts = Path(frame.f_code.co_filename).parts
    return f"{os.sep.join(parts[-2:])}, line {frame.f_lineno} ({frame.f_code.co_name})"


def _while_around(frame: FrameType | None) -> FrameType | None:
    """The frame with the innermost loop, a caller's if necessary, if that loop is a `while`."""
    while frame is not None:
        loop = _innermost_loop(frame.f_code.co_filename, frame.f_lineno)
        if loop is not None:
            return frame if loop is ast.While else None
        frame = frame.f_back
    return None


@functools.cache
def _innermost_loop(filename: str, line: int) -> type[ast.AST] | None:
    """The kind of the innermost loop around a line."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError):
        return None
    loops = [node for node in ast.walk(tree) if isinstance(node, _LOOPS)]
    around = [node for node in loops if node.lineno <= line <= (node.end_lineno or 0)]
    return type(max(around, key=lambda node: node.lineno)) if around else None
