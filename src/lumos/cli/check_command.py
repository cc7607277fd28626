"""`lumos check`: what does a trace lack, for which answers, and how is it recorded?"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from lumos.analysis.readiness import Beside, Readiness
from lumos.cli.loading import load_run
from lumos.cli.options import AsJson, TraceOptions, TracePath
from lumos.cli.terminal import deliver
from lumos.errors import InputError
from lumos.files import check_output, read_file, write_csv
from lumos.report.terminal.show import show_readiness
from lumos.trace.read.json_slices import BAD_GZIP, open_bytes
from lumos.trace.trace import Header

_SHAPES = re.compile(rb'"Input [Dd]ims"')
_LOOKED_AT = 8 << 20  # bytes of a file, unpacked


def check_command(
    path: TracePath,
    options: TraceOptions,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write it: .json or .csv.")] = None,
) -> None:
    """What does a trace lack, for which answers, and how is it recorded?"""
    check_output(output, path, (".json", ".csv"))
    run = load_run(path, options)
    found = Readiness(run, _beside(path, run.execution.trace.headers))
    answer = found.as_dict(str(path))
    writers = {".csv": lambda to: write_csv(to, answer["findings"])}
    deliver(answer, lambda _, to: show_readiness(found, str(path), to), as_json, output, writers)


def _beside(path: Path, headers: tuple[Header, ...]) -> Beside:
    folder = path if path.is_dir() else path.parent
    described = any(_describes_a_model(file) for file in folder.glob("*.toml"))
    return Beside(described, any(header.has_shapes for header in headers) or _has_shapes(headers))


def _describes_a_model(path: Path) -> bool:
    """Whether a setup says what was trained; one that only torch filled in does not."""
    try:
        return bool(tomllib.loads(read_file(path, _LOOKED_AT, "").decode()).get("model"))
    except (InputError, ValueError, RecursionError):  # not ours, or not for reading
        return False


def _has_shapes(headers: tuple[Header, ...]) -> bool:
    """Whether operators have shapes: older files do not say so of themselves."""
    for header in headers[:1]:
        try:
            with open_bytes(Path(header.path)) as file:
                return _SHAPES.search(file.read(_LOOKED_AT)) is not None
        except (InputError, OSError, *BAD_GZIP):  # type: ignore[misc]
            return False
    return False
