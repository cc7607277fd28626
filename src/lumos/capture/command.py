"""A command whose Python processes record themselves: the environment it is given, and what happens inside it.

The script says nothing of its steps: one ends whenever its optimizer has stepped.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from lumos.capture.fake import fake_process_groups, world_environment
from lumos.capture.recording import Plan, Recording
from lumos.errors import OptionError

PLAN = "LUMOS_CAPTURE"  # the variable with the plan of the recording
BY = "LUMOS_CAPTURE_BY"  # the module whose `record_this_process` takes the plan in the process of the command
HOME = "LUMOS_CAPTURE_HOME"  # the folder of Lumos, for a Python that does not have it
PYTHON = "LUMOS_CAPTURE_PYTHON"  # the Python of Lumos, for the commands of a dry run
STARTUP = Path(__file__).parent / "startup"
COMMANDS = Path(__file__).parents[1] / "dry_run/commands"  # what a machine with a GPU has, and this one may not
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 5.0  # for processes below the command to end after it


def run_command(command: Sequence[str], plan: Plan) -> int:
    """Run a command to its end, its processes recording; its exit code, as a shell has it.

    Signals go on to the command and to all processes below it, a second one of a kind as SIGKILL, and none of them is
    left behind.
    """
    with _Forwarding() as forwarding:
        try:
            process = subprocess.Popen(command, env=environment(plan, os.environ))
        except OSError as error:
            raise OptionError(f"{command[0]}: cannot be run ({error.strerror})") from None
        forwarding.start(process.pid)
        code = process.wait()
    return code if code >= 0 else 128 - code


class _Forwarding:
    """Passes signals that this process receives on to the processes of a command."""

    def __init__(self) -> None:
        self.pid = 0
        self.received: list[int] = []
        self.signalled: list[Any] = []  # psutil's processes; some may be there twice

    def __enter__(self) -> _Forwarding:
        import_module("psutil")  # not in a handler, which a second signal may interrupt
        numbers = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores one
        self.before = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def start(self, pid: int) -> None:
        """Pass signals on to this process, also those that came while it was started."""
        self.pid = pid
        for number in self.received:
            self._forward(number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and _is_in_foreground():  # the terminal has sent it to all of them
            return
        self.received.append(number)
        if self.pid:
            self._forward(signal.SIGKILL if self.received.count(number) > 1 else number)

    def _forward(self, number: int) -> None:
        import psutil

        with suppress(psutil.Error):
            first = psutil.Process(self.pid)
            self.signalled.extend([first, *first.children(recursive=True)])
        for process in set(self.signalled):  # to which the next signal may add some meanwhile
            with suppress(psutil.Error):  # it has ended
                process.send_signal(number)

    def __exit__(self, *_: object) -> None:
        """End what outlived the command although it was signalled."""
        if self.signalled:
            import psutil

            for process in psutil.wait_procs(set(self.signalled), timeout=_GRACE_S)[1]:
                with suppress(psutil.Error):
                    process.kill()
        for number, handler in self.before.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    """Whether Ctrl-C in the terminal reaches this process, and so the command too."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def environment(plan: Plan, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of the command, for which Python runs `startup/sitecustomize.py` before anything else."""
    paths = [str(STARTUP), *filter(None, [inherited.get("PYTHONPATH", "")])]
    text = json.dumps(asdict(plan) | {"folder": str(plan.folder), "setup": str(plan.setup or "")})
    ours = {"PYTHONPATH": os.pathsep.join(paths), PLAN: text, BY: plan.by, HOME: str(STARTUP.parents[1])}
    if plan.gpu:
        found = os.pathsep.join(filter(None, [str(COMMANDS), inherited.get("PATH", "")]))
        ours |= {"PATH": found, PYTHON: sys.executable}
    return {**inherited, **ours, **(world_environment(*plan.fake_world) if plan.fake_world else {})}


def record_this_process(text: str) -> None:
    """Called in a process of the command, directly after it has imported torch."""
    values = json.loads(text)
    plan = Plan(**values | {"folder": Path(values["folder"]), "setup": values["setup"] or None}).checked()
    if plan.fake_world:
        fake_process_groups(*plan.fake_world)
    count_optimizer_steps(Recording(plan))


def signal_name(code: int) -> str:
    """The signal behind an exit code of 128 and more; '' for other codes."""
    return {128 + number.value: number.name for number in signal.Signals}.get(code, "")


@dataclass
class _OptimizerSteps:
    """Reports every step of the first optimizer that steps to a recording; other optimizers are part of its step."""

    recording: Recording
    counted: Any = None  # a weak reference to that optimizer

    def stepped(self, optimizer: Any) -> None:
        if self.counted is None:
            self.counted = weakref.ref(optimizer)
            atexit.register(self._close, os.getpid())
        if self.counted() is optimizer:
            self.recording.step()

    def _close(self, process: int) -> None:
        """At the end of the process that stepped, and not of one that was forked off it."""
        if os.getpid() == process:
            self.recording.close()


def count_optimizer_steps(recording: Recording) -> None:
    """Before any optimizer is made: a class of optimizers has its `step` wrapped when the first of it is made.

    The wrapper goes around torch's own, whose annotation of the step must lie inside ours; a hook after the step would
    be called inside it.
    """
    from torch.optim import Optimizer

    steps = _OptimizerSteps(recording)
    wrapped_by_torch = Optimizer.profile_hook_step

    def profile_hook_step(step: Any) -> Any:
        inner = wrapped_by_torch(step)

        @functools.wraps(inner)
        def counted_step(optimizer: Any, *arguments: Any, **options: Any) -> Any:
            result = inner(optimizer, *arguments, **options)
            steps.stepped(optimizer)
            return result

        return counted_step

    Optimizer.profile_hook_step = staticmethod(profile_hook_step)
