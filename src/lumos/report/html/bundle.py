"""Bundle: plotly's script as the plotly package ships it, packed for a page that unpacks it itself."""

from __future__ import annotations

import base64
import gzip
import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lumos.errors import InputError

_SCRIPT = Path("package_data") / "plotly.min.js"


@cache
def packed_plotly() -> str:
    """The script, gzip and base64: 4.9 MB become 2."""
    return base64.b64encode(gzip.compress(plotly_script().encode(), 6, mtime=0)).decode()


@cache
def plotly_script() -> str:
    """The script as text."""
    return _path().read_bytes().decode("utf-8")


@cache
def plotly_digest() -> str:
    return digest(plotly_script())


def digest(script: str) -> str:
    """By which a page's policy knows a script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _path() -> Path:
    spec = find_spec("plotly")  # found, not imported: only the file is wanted
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / _SCRIPT).is_file():
            return Path(folder) / _SCRIPT
    raise InputError("plotly, which draws the charts of an .html report, is not installed whole: pip install plotly")
