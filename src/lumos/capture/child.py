"""A command whose Python processes record themselves: the environment it is given, and what happens inside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lumos.capture.fake import check_world, fake_process_groups, world_environment
from lumos.capture.optimizer_steps import count_optimizer_steps
from lumos.capture.recording import Recording, checked_plan
from lumos.errors import OptionError

ORDER = "LUMOS_CAPTURE"  # the variable that tells a process what to record
HOME = "LUMOS_CAPTURE_HOME"  # where Lumos lies, for a Python that does not have it
STARTUP = Path(__file__).parent / "startup"


@dataclass(frozen=True)
class Order:
    """What every process of the command is told."""

    folder: str
    steps: int
    warmup: int
    setup: str = ""
    rank_env: str = "RANK"
    fake_world: int = 0  # 0: the real one
    rank: int = 0

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The variables of a process, for which Python runs `startup/sitecustomize.py` before anything else."""
        paths = [str(STARTUP), *filter(None, [inherited.get("PYTHONPATH", "")])]
        told = {"PYTHONPATH": os.pathsep.join(paths), ORDER: json.dumps(self.__dict__), HOME: str(STARTUP.parents[1])}
        faked = world_environment(self.rank, self.fake_world) if self.fake_world else {}
        return {**inherited, **told, **faked}


def checked_order(order: Order) -> Order:
    """The order with its paths made absolute, or OptionError; the folder is there afterwards."""
    plan = checked_plan(Path(order.folder), order.steps, order.warmup, order.setup or None)
    if order.fake_world:
        check_world(order.rank, order.fake_world)
    setup = str(plan.setup) if order.setup else ""
    return Order(str(plan.folder), plan.steps, plan.warmup, setup, order.rank_env, order.fake_world, order.rank)


def run_command(command: Sequence[str], order: Order) -> int:
    """Run it to its end; its exit code, as a shell has it."""
    try:
        process = subprocess.Popen(command, env=order.environment(os.environ))
    except OSError as error:
        raise OptionError(f"{command[0]}: cannot be run ({error.strerror})") from None
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # it was told as well; what it records is worth the wait
            continue
        return code if code >= 0 else 128 - code


def obey(text: str) -> None:
    """Called in a process of the command, directly after it has imported torch."""
    order = Order(**json.loads(text))
    if order.fake_world:
        fake_process_groups(order.rank, order.fake_world)
    plan = checked_plan(Path(order.folder), order.steps, order.warmup, order.setup or None, order.rank_env)
    count_optimizer_steps(Recording(plan))


def ended_by(code: int) -> str:
    """What an exit code of 128 and more says."""
    names = {128 + number.value: number.name for number in signal.Signals}
    return names.get(code, "")
