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
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lumos.capture.fake import fake_process_groups, world_environment
from lumos.capture.recording import Plan, Recording
from lumos.errors import OptionError

PLAN = "LUMOS_CAPTURE"  # the variable with the plan of the recording
BY = "LUMOS_CAPTURE_BY"  # the module whose `record_this_process` takes the plan in the process of the command
HOME = "LUMOS_CAPTURE_HOME"  # the folder of Lumos, for a Python that does not have it
STARTUP = Path(__file__).parent / "startup"


def run_command(command: Sequence[str], plan: Plan) -> int:
    """Run a command to its end, its processes recording; its exit code, as a shell has it."""
    try:
        process = subprocess.Popen(command, env=environment(plan, os.environ))
    except OSError as error:
        raise OptionError(f"{command[0]}: cannot be run ({error.strerror})") from None
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the command got it as well; its recording is worth the wait
            continue
        return code if code >= 0 else 128 - code


def environment(plan: Plan, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of the command, for which Python runs `startup/sitecustomize.py` before anything else."""
    paths = [str(STARTUP), *filter(None, [inherited.get("PYTHONPATH", "")])]
    text = json.dumps(asdict(plan) | {"folder": str(plan.folder), "setup": str(plan.setup or "")})
    ours = {"PYTHONPATH": os.pathsep.join(paths), PLAN: text, BY: plan.by, HOME: str(STARTUP.parents[1])}
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
