"""`nvidia-smi` in a dry run: the GPUs that the script has, idle and empty.

It runs as a separate program without this package's dependencies. It prints the table, and answers `-L` and queries for
fields of GPUs and of processes, of which there are none; an unknown field is `[N/A]`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

_MOST_GPUS = 8  # of a node
_UNKNOWN, _UNITS = "[N/A]", ("MiB", "%", "W")
_LISTS, _PROCESSES = ("-L", "--list-gpus"), ("--query-compute-apps", "--query-apps", "--query-accounted-apps")


def answer(arguments: Sequence[str], plan: dict[str, Any], world: int) -> str:
    """The text to print; ValueError for an unsupported question."""
    options = _options(arguments)
    chosen = options.pop("-i", options.pop("--id", ""))
    count = max(min(world, _MOST_GPUS), 1)
    gpus = [int(part) for part in chosen.split(",") if part.isdigit() and int(part) < count] if chosen else range(count)
    fields = [_fields(index, count, plan) for index in gpus]
    style = options.pop("--format", "").split(",")
    if not options:
        return _table(fields)
    ((option, asked),) = options.items() if len(options) == 1 else (("several options", ""),)
    if option in _LISTS:
        return "\n".join(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})" for gpu in fields)
    names = [name.strip() for name in asked.split(",")]
    units = [_unit(gpu.get(name, "")) for gpu in (fields or [{}])[:1] for name in names]
    titles = [f"{name} [{unit}]" if unit else name for name, unit in zip(names, units, strict=True)]
    head = [] if "noheader" in style else [", ".join(titles)]
    if option in _PROCESSES:
        return "\n".join(head)
    if option == "--query-gpu":
        rows = [[gpu.get(name, _UNKNOWN) for name in names] for gpu in fields]
        if "nounits" in style:
            rows = [[cell.removesuffix(f" {unit}") for cell, unit in zip(row, units, strict=True)] for row in rows]
        return "\n".join(head + [", ".join(row) for row in rows])
    raise ValueError(option)


def _unit(value: str) -> str:
    """The unit after a number."""
    return next((unit for unit in _UNITS if value.endswith(f" {unit}")), "")


def _options(arguments: Sequence[str]) -> dict[str, str]:
    """Options and their values, written as `--id=0`, `--id 0` or `-i 0`."""
    found, last = {}, ""
    for argument in arguments:
        if argument.startswith("-"):
            last, _, value = argument.partition("=")
            found[last] = value
        elif last and not found[last]:
            found[last] = argument
        else:
            raise ValueError(argument)
    return found


def _fields(index: int, count: int, plan: dict[str, Any]) -> dict[str, str]:
    """The fields that a query can ask for, of one GPU."""
    name, total = str(plan.get("gpu", "GPU")), f"{round(float(plan.get('memory_gib', 0)) * 1024)} MiB"
    capability = ".".join(map(str, plan.get("capability", (9, 0))))
    uuid = f"GPU-00000000-0000-0000-0000-{index:012d}"
    return {
        "index": str(index), "count": str(count), "name": name, "gpu_name": name, "uuid": uuid, "gpu_uuid": uuid,
        "memory.total": total, "memory.free": total, "memory.used": "0 MiB", "compute_cap": capability,
        "utilization.gpu": "0 %", "utilization.memory": "0 %", "temperature.gpu": "30", "power.draw": "0.00 W",
        "power.draw.instant": "0.00 W", "pstate": "P0", "persistence_mode": "Enabled", "compute_mode": "Default",
    }  # fmt: skip


def _table(fields: Sequence[dict[str, str]]) -> str:
    lines = [f"NVIDIA-SMI {_UNKNOWN}  Driver Version: {_UNKNOWN}  CUDA Version: {_UNKNOWN}  (a dry run of lumos)"]
    for gpu in fields:
        used, total = (gpu[name].replace(" ", "") for name in ("memory.used", "memory.total"))
        lines.append(f"| {gpu['index']:>3}  {gpu['name']:<28} | {used} / {total} | {gpu['utilization.gpu']} Default |")
    return "\n".join(lines)


def main() -> None:
    """Print the answer, as nvidia-smi does."""
    plan = json.loads(os.environ["LUMOS_CAPTURE"])
    world = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        printed = answer(sys.argv[1:], plan["gpu"], world)
    except ValueError as error:
        sys.stderr.write(f"nvidia-smi: {error}: a dry run answers a call without options, -L and --query-gpu\n")
        sys.exit(2)
    if printed:
        print(printed)


if __name__ == "__main__":
    main()
