"""Pipeline schedules, one per file."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from lumos.errors import OptionError
from lumos.schedules.schedule import Phase, Schedule, Turn, Turns

__all__ = ["Phase", "Schedule", "Turn", "Turns", "names", "schedule_named", "schedules_of"]


@cache
def _all() -> dict[str, Schedule]:
    modules = (import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__))
    return {module.SCHEDULE.name: module.SCHEDULE for module in modules if hasattr(module, "SCHEDULE")}


def names() -> tuple[str, ...]:
    """Of all schedules, in alphabetical order."""
    return tuple(sorted(_all()))


def schedule_named(name: str) -> Schedule:
    """The schedule of that name, or OptionError."""
    if name not in _all():
        raise OptionError(f"schedule {name[:100]!r} is not known: use one of {', '.join(names())}")
    return _all()[name]


@cache
def schedules_of(framework: str) -> tuple[str, ...]:
    """The schedules that a framework has; none if it has no pipelines."""
    return tuple(name for name in names() if framework in _all()[name].frameworks)
