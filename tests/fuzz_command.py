"""A command of a fuzzed case, in this process or in its own, and what makes its answer unsound.

Unsound are: an exception that is no mistake of the user, a number that no run has, control characters on the terminal,
a page or a script that a name has become a part of, and code or files of the case that were run or written elsewhere.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import io
import math
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

from lumos.cli import terminal
from lumos.cli.main import app
from lumos.errors import LumosError
from lumos.files import json_of
from support import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
MOST_SECONDS = 60  # of the processor, not of a busy machine: the largest step that is simulated takes half of them
MOST_BYTES = 3 << 30  # of address space, beyond what the process had before the case
YEAR_MS = 365.0 * 86_400e3
PLANTED = ("loky", "pickle", "random", "sitecustomize", "numba", "torch")  # modules in the folder of every case
MARK = "planted"  # a file of this name says that code of a case ran


class UnsoundError(BaseException):
    """An answer that no run can have, or a deed that no command should do; nothing in the project may catch it."""


class TooSlowError(BaseException):
    """A case that is stopped; nothing in the project may catch it."""


class Ran(NamedTuple):
    """What a command did: its answer, or None where it was refused."""

    answer: dict[str, Any] | None
    refusal: str = ""


# Running a command


def run(folder: Path, *arguments: str) -> Ran:
    """A command in this process and this folder, with everything it prints; an unsound answer raises UnsoundError."""
    answers: list[dict[str, Any]] = []

    def seen(answer: dict[str, Any]) -> bytes:
        answers.append(answer)
        return json_of(answer)

    screen = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="replace")
    (folder / "command.txt").write_text("lumos " + shlex.join(arguments), errors="replace")
    before, streams, terminal.json_of = Path.cwd(), (sys.stdout, sys.stderr), seen
    os.chdir(folder)
    sys.stdout = sys.stderr = screen
    try:
        app(list(arguments), standalone_mode=False)
        screen.flush()
    except SystemExit as done:  # with the exit code of another program
        return Ran({}) if not done.code else Ran(None, f"exit code {done.code}")
    except Exception as refused:
        return Ran(None, refusal_in(refused))
    finally:
        (sys.stdout, sys.stderr), terminal.json_of = streams, json_of
        os.chdir(before)
    _refuse_controls(screen.buffer.getvalue())  # type: ignore[attr-defined]
    for answer in answers:
        check_sound(answer)
    return Ran(answers[-1] if answers else {})


def refusal_in(error: Exception) -> str:
    """What the user is told; raises an exception again that is no mistake of the user."""
    if isinstance(error, OSError) and error.filename is not None:  # a path that may not be read, as `main` says
        return str(error)
    if not isinstance(error, LumosError) and not hasattr(error, "exit_code"):  # typer's have one
        raise error
    said = str(error)
    if isinstance(error, LumosError) and not said.strip():
        raise UnsoundError("refused without a word") from error
    if len(said) > 6000:
        raise UnsoundError(f"a refusal of {len(said):,} characters: {said[:200]}") from error
    return said


def run_apart(folder: Path, home: str, *arguments: str) -> Ran:
    """A command of somebody who can write neither to a home nor beside the package, in a process of its own."""
    (folder / "command.txt").write_text("lumos " + shlex.join(arguments), errors="replace")
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR", "OMP_NUM_THREADS") if name in os.environ}
    command = [*_without_rights(), sys.executable, "-P", "-m", "lumos.cli.main", *arguments]
    with unlimited():
        package = _read_only_package()
    done = subprocess.run(
        command, cwd=folder, env=kept | {"HOME": home, "PYTHONPATH": str(package)}, capture_output=True,
        stdin=subprocess.DEVNULL, timeout=PATIENCE_S,
    )  # fmt: skip
    said = done.stderr.decode(errors="replace")
    if "Traceback" in said or done.returncode not in (0, 2):
        raise UnsoundError(f"exit code {done.returncode}: {said.strip()[-1500:]}")
    _refuse_controls(done.stdout + done.stderr)
    return Ran({}) if done.returncode == 0 else Ran(None, said)


def _without_rights() -> list[str]:
    """What takes from root the right to write everywhere."""
    return ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"] if os.geteuid() == 0 else []


@cache
def _read_only_package() -> Path:
    """A folder with a copy of the package that its owner, too, cannot write to."""
    folder = store() / "package"
    shutil.copytree(ROOT / "src/lumos", folder / "lumos", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return folder


def _refuse_controls(printed: bytes) -> None:
    bad = [byte for byte in printed if byte < 32 and byte not in b"\n"] if b"\x1b" in printed else []
    if bad:
        raise UnsoundError(f"control characters on the terminal: {bad[:5]}")


# Sound numbers


def check_sound(answer: dict[str, Any]) -> None:
    """Numbers are finite, times and sizes are not negative, a step of years is not stated without a warning."""
    for place, number in numbers(answer):
        if not math.isfinite(number):
            raise UnsoundError(f"{place} = {number}")
        name = place.rsplit(".", 1)[-1]
        if number < 0 and name in ("step_ms", "recorded_ms", "simulated_ms", "clean_ms", "tokens_per_second", "mfu"):
            raise UnsoundError(f"{place} = {number}")
    if (answer.get("mfu") or 0.0) > 1.0001 * (answer.get("hfu") or 1.0):
        raise UnsoundError(f"mfu = {answer['mfu']} and hfu = {answer['hfu']}")
    step = max((answer.get(key) or 0.0 for key in ("recorded_ms", "simulated_ms", "step_ms")), default=0.0)
    if isinstance(step, float) and step > YEAR_MS and not (answer.get("warnings") or answer.get("notes")):
        raise UnsoundError(f"a step of {step / YEAR_MS:.1f} years, and no warning")


def numbers(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of an answer, and where they stand."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from numbers(part, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for part in value:
            yield from numbers(part, place)
    elif isinstance(value, float | int):
        yield place, value


# Sound files


class _Parsed(HTMLParser):
    """A page as a browser sees it: what a name must not have become."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.wrong: list[str] = []
        self.scripts = 0
        self._tag = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.scripts += tag == "script"
        if MARK in tag or tag in ("img", "iframe", "object", "embed", "base"):
            self.wrong.append(f"<{tag}>")
        for name, value in attrs:
            if name.startswith("on") or MARK in name:
                self.wrong.append(f"<{tag} {name}>")
            if name in ("href", "src", "action", "xlink:href") and (value or "").strip().lower().startswith(
                "javascript"
            ):
                self.wrong.append(f"<{tag} {name}={value}>")

    handle_startendtag = handle_starttag

    def handle_data(self, data: str) -> None:
        if self._tag in ("script", "style") and "<!--" in data:
            self.wrong.append(f"<!-- in <{self._tag}>")

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_comment(self, data: str) -> None:
        if MARK in data:
            self.wrong.append("<!-- -->")


SCRIPTS = 3  # of a page: its data, its code, and the packed library of charts


def check_page(text: str, scripts: int = SCRIPTS) -> None:
    """No name has become a part of a page."""
    seen = _Parsed(text)
    if seen.wrong or seen.scripts != scripts:
        raise UnsoundError(f"a name became part of the page: {seen.wrong[:3]}, {seen.scripts} scripts")


def check_written(folder: Path) -> None:
    """What a case wrote is text where it should be text, and no code of the case ran."""
    for path in sorted(folder.rglob("*")):
        if path.name.startswith(MARK):
            raise UnsoundError(f"code of the case ran: {path.name}")
        if path.name == "answer.html" and path.is_file():
            check_page(path.read_text("utf-8"))
        elif path.suffix == ".csv" and path.name == "answer.csv":
            _check_cells(path.read_text("utf-8"))
    for script in folder.glob("emitted/*.sh"):
        _check_shell(script, folder)
    for script in folder.glob("reproduced/*.py"):
        _check_python(script)


def _check_cells(text: str) -> None:
    import csv

    for row in csv.reader(io.StringIO(text)):
        for cell in row:
            if cell.startswith(("=", "@", "\t", "\r")) or (cell.startswith(("+", "-")) and not _is_number(cell)):
                raise UnsoundError(f"a spreadsheet would calculate {cell[:60]!r}")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _check_shell(script: Path, folder: Path) -> None:
    """Run by a shell that finds no program, so that only what a name smuggled in could leave a mark."""
    shell = [shutil.which("bash") or "/bin/bash", "--noprofile", "--norc", str(script)]
    subprocess.run(shell, cwd=folder, env={"PATH": "/nowhere"}, capture_output=True, timeout=20)
    if any(path.name.startswith(MARK) for path in folder.iterdir()):
        raise UnsoundError(f"{script.name} runs a part of a name")


def _check_python(script: Path) -> None:
    """Its code is the same whatever the names are: none of them is called or imported."""
    for node in ast.walk(ast.parse(script.read_text("utf-8"))):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if MARK in name or name in ("__import__", "system", "popen", "eval", "exec"):
            raise UnsoundError(f"{script.name} runs a part of a name: {name}")


# Limits, and what must not be done


_watched: str = ""  # the folder of the case that runs


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Of the audit hooks of Python: code of a case's folder, programs, unpickled functions, files elsewhere."""
    if not _watched:
        return
    if event == "exec" and str(getattr(arguments[0], "co_filename", "")).startswith(_watched):
        raise UnsoundError(f"ran {arguments[0].co_filename}")
    if event == "os.system" or (event == "pickle.find_class" and arguments[0] in ("os", "posix", "subprocess", "pty")):
        raise UnsoundError(f"{event} {arguments[:2]}")
    if event == "open" and isinstance(arguments[0], str) and isinstance(arguments[2], int):
        writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and not _may_be_written(arguments[0]):
            raise UnsoundError(f"writes {arguments[0][:200]}")


def _may_be_written(path: str) -> bool:
    place = os.path.realpath(path)
    inside = place.startswith(_watched) or not place.startswith((str(store()), str(ROOT)))
    return inside or "__pycache__" in place


sys.addaudithook(_watch)


@contextlib.contextmanager
def limits(folder: Path, seconds: float = MOST_SECONDS) -> Iterator[None]:
    """For one case: time, address space, and where it may write. What is started inside inherits the memory."""
    global _watched

    def stop(*_: object) -> None:
        raise TooSlowError(f"more than {seconds:g} s of the processor")

    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(folder / MARK)!r}, 'w').close()\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)
    if had := _status("VmSize"):
        resource.setrlimit(resource.RLIMIT_AS, (had + MOST_BYTES, hard))
    _watched = str(folder.resolve())
    try:
        yield
    finally:
        _watched = ""
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)


@contextlib.contextmanager
def unlimited() -> Iterator[None]:
    """For what is made, or started, inside of a case and stays for all of them."""
    global _watched
    (soft, hard), watched = resource.getrlimit(resource.RLIMIT_AS), _watched
    left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    _watched = ""
    try:
        yield
    finally:
        _watched = watched
        signal.setitimer(signal.ITIMER_PROF, left, 1)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _status(name: str) -> int:
    """Bytes of this process, as Linux counts them; 0 elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0


def forget_peak() -> int:
    """Begin to count the most memory anew; how much is used now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """The most memory that this process had since then."""
    return _status("VmHWM")


@cache
def store() -> Path:
    """A folder for what is made once and copied for every case."""
    folder = Path(tempfile.mkdtemp(prefix="lumos-fuzz-")).resolve()
    atexit.register(_remove, folder)
    return folder


def _remove(folder: Path) -> None:
    for path in folder.rglob("package/**/"):
        path.chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)
