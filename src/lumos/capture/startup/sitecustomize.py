"""Run by Python at its start, before the script of `lumos capture -- COMMAND`: torch's import starts the recording.

Everything else stays as it was: a sitecustomize of the machine's own is run as well, and any failure here is one line
on stderr.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch(MetaPathFinder):
    """Finds torch as the other finders do, and starts the recording once torch is loaded."""

    def __init__(self, plan: str) -> None:
        self.plan = plan

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        loader: Any = spec and spec.loader
        if loader:
            loader.exec_module = functools.partial(self._load, loader.exec_module)
        return spec

    def _load(self, load: Any, module: ModuleType) -> None:
        if self in sys.meta_path:  # not before: a script may ask whether torch is there, and import it later
            sys.meta_path.remove(self)
        load(module)
        _guarded(_record, self.plan)


def _record(plan: str) -> None:
    if "lumos" not in sys.modules:
        _load_lumos()
    importlib.import_module(os.environ["LUMOS_CAPTURE_BY"]).record_this_process(plan)


def _load_lumos() -> None:
    """Import Lumos alone, not its neighbours: this Python may have other versions of everything.

    It comes from where `lumos capture` is, and never from sys.path, on which `python -m` has put the current folder.
    """
    _refuse_other("lumos")
    home = os.environ["LUMOS_CAPTURE_HOME"]
    init = os.path.join(home, "__init__.py")
    spec = importlib.util.spec_from_file_location("lumos", init, submodule_search_locations=[home])
    if spec is None or spec.loader is None:
        raise ImportError(f"no Lumos in {home}")
    module = sys.modules["lumos"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _refuse_other(name: str) -> None:
    """Do not take the place of a module of the script's own, which has the name of ours by chance."""
    spec = PathFinder.find_spec(name)
    if spec is None or spec.origin is None:  # none, or a mere folder
        return
    places = spec.submodule_search_locations or []
    if not any(os.path.isdir(os.path.join(place, "capture")) for place in places):
        raise ImportError(f"{spec.origin} has the name of Lumos: rename it")


def _run_next_sitecustomize() -> None:
    """Run the sitecustomize that this file hides."""
    others = [path for path in sys.path if os.path.abspath(path or os.curdir) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _guarded(act: Any, *arguments: Any) -> None:
    try:
        act(*arguments)
    except Exception as problem:
        sys.stderr.write(f"lumos capture: cannot record this process ({type(problem).__name__}: {problem})\n")


if "LUMOS_CAPTURE" in os.environ:
    sys.meta_path.insert(0, _AfterTorch(os.environ["LUMOS_CAPTURE"]))
_guarded(_run_next_sitecustomize)
