"""Arguments of public functions: a value of the wrong type is rejected in one line, as a wrong option is.

Only the standard library is needed: a process that records has torch, and perhaps nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache, wraps
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from reprlib import repr as short_repr
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from lumos.errors import OptionError, unreadable

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class _MismatchError(Exception):
    """A value does not fit its annotation."""


def checks_arguments(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Compare arguments with the annotations of a public function before it runs; OptionError if one does not fit.

    Numbers of numpy become Python's, other iterables become lists. Files that cannot be opened are a LumosError, too.
    """
    declared = signature(function)

    @wraps(function)
    def checked(*arguments: _Given.args, **options: _Given.kwargs) -> _Result:
        try:
            given = declared.bind(*arguments, **options)
        except TypeError:  # a missing argument or an unknown name: Python's own message says which
            return function(*arguments, **options)
        hints = _hints_of(function)
        for name, value in given.arguments.items():
            if name in hints and value is not declared.parameters[name].default:
                given.arguments[name] = _checked(f"{function.__name__}: {name}", value, hints[name])
        try:
            return function(*given.args, **given.kwargs)
        except OSError as error:
            if error.filename is None:
                raise
            raise unreadable(error) from error

    return checked


def check_fields(instance: Any) -> None:
    """The same for the fields of a frozen dataclass that users make."""
    kind: Any = type(instance)
    for field in fields(instance):
        value = getattr(instance, field.name)
        checked = _checked(f"{kind.__name__}: {field.name}", value, _hints_of(kind)[field.name])
        object.__setattr__(instance, field.name, checked)


@cache
def _hints_of(function: Any) -> dict[str, Any]:
    return get_type_hints(function)


def _checked(place: str, value: Any, hint: Any) -> Any:
    try:
        return _fitted(value, hint)
    except _MismatchError:
        given = "".join(c if c.isprintable() else " " for c in short_repr(value))
        words = list(dict.fromkeys(_words(hint)))
        expected = " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
        raise OptionError(f"{place} = {given}: expected {expected}, not {type(value).__name__}") from None


def _fitted(value: Any, hint: Any) -> Any:
    """The value as its annotation has it; raises _MismatchError."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return _fitted_to_any(value, inner)
    if hint in (int, float):
        return _number(value, hint)
    if hint is Path and isinstance(value, os.PathLike):
        return Path(value)
    if hint is bool and str(getattr(value, "dtype", "")) == "bool" and value.ndim == 0:
        return bool(value)
    if kind is not None and issubclass(kind, Mapping):
        _require(isinstance(value, Mapping))
        return {_fitted(key, inner[0]): _fitted(one, inner[1]) for key, one in value.items()}
    if _is_list(kind):
        return _items(value, kind, inner)
    _require(hint in (Any, object) or isinstance(value, type(None) if hint is None else kind or hint))
    return value


def _fitted_to_any(value: Any, hints: tuple[Any, ...]) -> Any:
    """As the first annotation that fits; those of plain values come first, so that nothing is taken apart."""
    for hint in sorted(hints, key=lambda hint: get_origin(hint) is not None):
        with suppress(_MismatchError):
            return _fitted(value, hint)
    raise _MismatchError


def _is_list(kind: Any) -> bool:
    return kind is tuple or (kind is not None and kind.__module__ == "collections.abc" and issubclass(kind, Iterable))


def _items(value: Any, kind: Any, inner: tuple[Any, ...]) -> Any:
    """A list or tuple, each of whose items fits."""
    _require(isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping))
    items = list(value)
    if kind is tuple and inner[1:] != (...,):
        _require(len(items) == len(inner))
        return tuple(_fitted(item, hint) for item, hint in zip(items, inner, strict=True))
    found = [_fitted(item, inner[0]) for item in items]
    return tuple(found) if kind is tuple else found


def _number(value: Any, hint: Any) -> int | float:
    """A whole number for int, also if it is written as 1e4; any real number for float."""
    _require(isinstance(value, Real))
    whole = isinstance(value, Integral)
    _require(hint is float or whole or float(value).is_integer())
    try:
        float(value)
    except OverflowError:
        raise _MismatchError from None
    return int(value) if whole or hint is int else float(value)


def _require(fits: bool) -> None:
    if not fits:
        raise _MismatchError


def _words(hint: Any) -> list[str]:
    """What an annotation allows, in words; None goes without saying."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return [word for one in inner for word in _words(one)]
    if hint is None or hint is type(None):
        return []
    if hint in (int, float):
        return ["a whole number" if hint is int else "a number"]
    if kind is Callable:
        return ["a function"]
    if kind is not None and issubclass(kind, Mapping):
        return ["a dictionary"]
    if kind is tuple and inner[1:] != (...,):
        return [f"{len(inner)} values"]
    if _is_list(kind):
        return [f"a list of {_words(inner[0])[0]}" if _words(inner[0]) else "a list"]
    return [getattr(kind or hint, "__name__", str(hint))]
