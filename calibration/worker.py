"""One task in a process of its own: import what it needs, wait for the turn, do it. record_h200.py starts it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import Save


def saver(path: Path) -> Save:
    """A function that writes a record to `path`, whole or not at all."""

    def save(record: dict[str, Any]) -> None:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1))
        os.replace(partial, path)

    return save


def await_turn(ready: Path) -> float:
    """Say that the imports are done and wait; returns the seconds left to start anything more."""
    ready.touch()
    line = sys.stdin.readline()
    if not line:
        sys.exit("the recorder has gone")
    return float(line)


def prepare(task: str, folder: Path, device: str) -> Callable[[float, Save], None]:
    """What a task is to do, named as its record is: queue, micro, single/CASE, or multirank/JOB/rankR."""
    kind, name = [*task.split("/"), ""][:2]
    if kind == "multirank":
        import multirank

        job = next(job for job in multirank.JOBS if job.name == name)
        job = job if device == "cuda" else job.shrunk()
        return lambda left, save: multirank.run_rank(job, folder / kind / name, device, save)
    if kind == "single":
        from transformers import GPT2LMHeadModel, LlamaForCausalLM, MixtralForCausalLM  # noqa: F401

        import single

        case = next(case for case in single.CASES if case.name == name)
        case = case if device == "cuda" else case.shrunk()
        return lambda left, save: single.run_case(case, folder / kind, device, left, save)
    import launches

    if kind == "queue":
        return lambda left, save: launches.run_queue(folder / "single", save)
    return lambda left, save: launches.run_micro(device, save)


def main() -> None:
    task, folder, device = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    run = prepare(task, folder, device)
    seconds_left = await_turn(folder / f"{task}.ready")
    run(seconds_left, saver(folder / f"{task}.json"))


if __name__ == "__main__":
    main()
