"""Start Python processes that import nothing from the current folder, which may be a folder of someone else's traces.

loky, multiprocessing and Ray start theirs with `python -m` or `python -c`, which put that folder first on sys.path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_HOME = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # the folder that this package is imported from


def safe_environment() -> dict[str, str]:
    """Variables for a Python process: it adds no current folder to sys.path, and PYTHONPATH does not name it."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(folder for folder in folders if folder and not _is_current(folder)),
    }


@contextmanager
def safe_path() -> Iterator[None]:
    """Start processes inside this block; they inherit `safe_environment`."""
    before = {name: os.environ.get(name) for name in safe_environment()}
    os.environ.update(safe_environment())
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def drop_current_folder() -> None:
    """Import nothing from the current folder from here on."""
    sys.path[:] = [folder for folder in sys.path if not _is_current(folder)]


def _is_current(folder: str) -> bool:
    """Whether a folder on sys.path is the current one, and not the one that Lumos itself is imported from."""
    with suppress(OSError):
        here = folder or os.curdir
        return os.path.samefile(here, os.curdir) and not os.path.samefile(here, _HOME)
    return False
