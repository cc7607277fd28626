"""The command line, run by tests in their own process."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lumos.cli.main import main


def lumos_here(
    *arguments: object, cwd: Path | None = None, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """The command line as a process of its own has it, but in this one, which saves a second of imports."""
    streams = sys.argv, sys.stdin, sys.stdout, sys.stderr, Path.cwd()
    paths = list(sys.path)  # without the current folder afterwards
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    command = ["lumos", *map(str, arguments)]
    given = io.TextIOWrapper(io.BytesIO((stdin or "").encode()), "utf-8")
    sys.argv, sys.stdin, sys.stdout, sys.stderr = command, given, out, err
    code: Any = 0
    try:
        os.chdir(cwd or Path.cwd())
        main()
    except SystemExit as done:
        code = done.code
    finally:
        sys.argv, sys.stdin, sys.stdout, sys.stderr = streams[:4]
        os.chdir(streams[4])
        sys.path[:] = paths
    printed = []
    for stream in (out, err):
        stream.flush()
        printed.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(command, code, *printed)
