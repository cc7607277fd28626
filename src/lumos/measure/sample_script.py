"""`lumos sample --script FILE.pyz`: the sampler as one file, for machines that have torch and nothing else.

The file is a zip archive that Python runs: these modules of the package, the grid, and `main`, which has the options of
`lumos sample`. Python 3.10 and torch are all that it needs.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, NoReturn

from lumos.data_files import data_file
from lumos.errors import LumosError, OptionError, printable
from lumos.files import check_output, whole_file
from lumos.measure.sample import SamplePlan, device_of, follow, run_sampling
from lumos.measure.sample_summary import summary_of, text_of

MODULES = (
    "__init__", "errors", "files", "data_files", "dtypes", "safe_path", "measure/__init__", "measure/machine",
    "measure/ranks", "measure/sample", "measure/sample_file", "measure/sample_grid", "measure/sample_script",
    "measure/sample_summary",
    "measure/time_collectives", "measure/time_operators", "measure/time_power", "measure/time_profiler",
    "measure/time_sections", "measure/time_steps",
)  # fmt: skip
_TABLE = "data/sample_grid.json"
_MAIN = (
    "import sys\n\nfrom lumos.measure.sample_script import main\n\nif __name__ == '__main__':\n    sys.exit(main())\n"
)
_CPU_NOTE = "torch sees no GPU here: the CPU is sampled"


def write_script(path: Path) -> None:
    """Write the sampler as one file that `python FILE.pyz -o samples.jsonl` runs."""
    try:
        check_output(path, None, (".pyz",))
    except OptionError as problem:
        raise OptionError(str(problem).replace("-o ", "--script ", 1)) from None
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", _MAIN)
        for name in (*(f"{module}.py" for module in MODULES), _TABLE):
            source = data_file(_TABLE.removeprefix("data/")) if name == _TABLE else _source(name)
            archive.writestr(f"lumos/{name}", source.read_bytes())
    with whole_file(path) as file:
        file.write(content.getvalue())


def _source(name: str) -> Any:
    """A module of the package, also from inside the archive."""
    from importlib import resources

    return resources.files("lumos").joinpath(*name.split("/"))


def interrupted(output: Path) -> str:
    """What to say after Ctrl-C."""
    try:
        rows = max(0, output.read_bytes().count(b"\n") - 1)
    except OSError:
        return "interrupted; nothing was measured yet"
    return f"interrupted; {rows:,} rows in {output}: the same command resumes"


def chosen(only: str) -> frozenset[str]:
    """Names with commas between them."""
    return frozenset(name.strip() for name in only.split(",") if name.strip())


def is_follower() -> bool:
    """Whether this process is a rank that does not talk to the user."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in ("RANK", "SLURM_PROCID"))


def sample_as_told(
    plan: SamplePlan, output: Path, collectives: bool | None, progress: Any, note: Any = None
) -> dict[str, Any]:
    """Everything after the options were read: the answer of rank 0; other ranks follow, and end the process."""
    check_output(output, None, (".jsonl",))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported: NCCL's advice is not for users
    device, was_asked = device_of(plan.device), plan.device != "auto"
    plan = plan._replace(device=device).checked()
    if device == "cpu" and not was_asked and note is not None and not is_follower():
        note(_CPU_NOTE)
    if is_follower():
        from lumos.measure.ranks import run_follower, world_of

        world = world_of(os.environ)
        if world is not None and world.rank:
            raise SystemExit(run_follower(world, device, follow))
    done, plan = run_sampling(plan, output, collectives, progress)
    return summary_of(output, done, plan)


class _Parser(argparse.ArgumentParser):
    """A mistake ends in one line, as everywhere."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, "" if is_follower() else f"lumos: {message}; --help lists the options\n")


def parser() -> argparse.ArgumentParser:
    """The options of `lumos sample`, but for --script."""
    found = _Parser(prog="sample.pyz", description="Measure this machine (needs torch), as input for lumos fit.")
    found.add_argument("-o", "--output", type=Path, required=True, help="The .jsonl file to append rows to.")
    found.add_argument("--device", default="auto", help="cuda or cpu; by default cuda where torch sees a GPU.")
    found.add_argument("--scale", type=float, default=1.0, help="How many shapes: a factor on the usual number.")
    found.add_argument("--only", default="", help="Only these operators, collectives or sections, with commas.")
    found.add_argument("--seconds", type=float, default=float("inf"), help="Stop then; the same command resumes.")
    found.add_argument("--seed", type=int, default=0, help="Another number draws other shapes.")
    found.add_argument(
        "--collectives", action=argparse.BooleanOptionalAction, default=None,
        help="Also sample collectives; by default where there are several GPUs or ranks.",
    )  # fmt: skip
    found.add_argument("--json", action="store_true", help="Print the answer as JSON.")
    return found


def main(arguments: list[str] | None = None) -> int:
    """The front end of the file; the exit status."""
    given = parser().parse_args(arguments)
    plan = SamplePlan(given.scale, chosen(given.only), given.seed, given.seconds, given.device)
    try:
        answer = sample_as_told(plan, given.output, given.collectives, PlainProgress(given.seconds), _say)
    except LumosError as problem:
        if not is_follower():
            _say(f"lumos: {problem}")
        return 2
    except KeyboardInterrupt:
        if not is_follower():
            _say(f"lumos: {interrupted(given.output)}")
        return 130
    print(json.dumps(answer, indent=2) if given.json else printable(text_of(answer)))
    return 0


def _say(line: str) -> None:
    sys.stderr.write(printable(line) + "\n")
    sys.stderr.flush()


class PlainProgress:
    """A line every few seconds: what is measured, how much of it is done, and how long it will take."""

    _EVERY_S = 5.0

    def __init__(self, seconds: float) -> None:
        self._end, self._told, self._part = time.monotonic() + seconds, 0.0, (0, "", 0.0, 0)

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if self._part[0] != total or done <= self._part[3]:
            self._part = (total, what, now, done)
        if now - self._told < self._EVERY_S and done < total:
            return
        self._told = now
        _, _, begin, first = self._part
        told = f"{what}: {done:,} of {total:,}"
        if first < done < total:  # one row, the first of a resumed part as well, does not show a rate
            left = (total - done) * (now - begin) / (done - first)
            told += f", {_span(max(0.0, min(left, self._end - now)))} left"
        _say(told)


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
