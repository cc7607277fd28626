"""A stranger's path, scripted and timed: install, capture two ranks on a CPU, check, replay, predict, open the report.

    python benchmarks/stranger.py                        # the path and how right it is, printed
    python benchmarks/stranger.py -o docs/stranger.md    # written
    python benchmarks/stranger.py --here --repeat 0      # with the packages that are there, the path alone

It needs no GPU. The first step makes a virtual environment in a temporary folder and installs Lumos and torch there,
as pip is set up on this machine; nothing outside that folder is touched.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser import find_browser, open_browser

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples/train_tiny.py"
MOST_ERROR_PCT = 5.0  # of a replay
CHANGE = {"parallel.dp": 4, "model.layers": 8}
LEFT_OUT = 5  # steps at the start of a measured run
MEASURED = 10  # steps after them
RECORDED = 6  # steps, where accuracy is measured
PATIENCE = 1200.0
QUIET = 0.08  # of the machine may be taken by other programs while something is measured
TRIES = 3  # after which the least disturbed one counts


@dataclass(frozen=True)
class Stranger:
    """Someone with a Python that has Lumos and torch, and a folder."""

    python: str
    folder: Path

    def lumos(self, *arguments: str, cores: Sequence[int] = ()) -> str:
        return self.run(str(Path(self.python).with_name("lumos")), *arguments, cores=cores)

    def capture(self, name: str, *options: str, steps: int = 2, cores: Sequence[int] = ()) -> Path:
        to = self.folder / name
        command = [self.python, str(SCRIPT), "--nproc", "2", "--steps", str(10 + steps), *options]
        self.lumos("capture", "-o", str(to), "--steps", str(steps), "--", *command, cores=cores)
        return to

    def train(self, *options: str, cores: Sequence[int] = ()) -> str:
        return self.run(self.python, str(SCRIPT), *options, cores=cores)

    def run(self, *arguments: str, cores: Sequence[int] = ()) -> str:
        """What a command prints; a failure ends the script with what it said."""
        pin = (lambda: os.sched_setaffinity(0, cores)) if cores else None
        done = subprocess.run(
            arguments, cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE, preexec_fn=pin
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout


class Stop(NamedTuple):
    """One stop on the path: how long it took, and what came of it."""

    name: str
    seconds: float
    said: str


@dataclass
class Journey:
    """The path, stop after stop."""

    stops: list[Stop] = field(default_factory=list)

    def stop(self, name: str, act: Callable[[], str]) -> None:
        start = time.perf_counter()
        said = act()
        self.stops.append(Stop(name, time.perf_counter() - start, said))
        print(f"{name:42} {self.stops[-1].seconds:7.1f} s   {said}", flush=True)


# The path


def install(folder: Path) -> str:
    """A Python of its own with Lumos and the torch that the project is tested with."""
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv/bin/python")
    (folder / "constraints.txt").write_text(f"{pinned_torch()}\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "-c", str(folder / "constraints.txt"), f"{ROOT}[capture]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise SystemExit(f"pip install failed:\n{done.stderr}")
    return python


def pinned_torch() -> str:
    wanted: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    return next(one for one in wanted if one.startswith("torch=="))


def walk(stranger: Stranger, journey: Journey) -> dict[str, Any]:
    """From a training script to a report; the answers of replay and predict."""
    traces, report = stranger.folder / "traces", stranger.folder / "report.html"
    answers: dict[str, Any] = {}

    def replayed() -> str:
        answers["replay"] = json.loads(stranger.lumos("replay", str(traces), "--json"))
        found = answers["replay"]
        return f"recorded {found['recorded_ms']:.1f} ms, simulated {found['error_pct']:+.2f} % from it"

    def predicted() -> str:
        wanted = [word for key, value in CHANGE.items() for word in ("--set", f"{key}={value}")]
        setup = str(traces / "setup.toml")
        text = stranger.lumos("predict", setup, "--from", str(traces), *wanted, "-o", str(report), "--json")
        answers["predict"] = json.loads(text)
        low, high = answers["predict"]["interval_ms"]
        return f"{answers['predict']['step_ms']:.1f} ms, {low:.1f} – {high:.1f} ms"

    journey.stop("lumos capture, two ranks", lambda: f"{size_kb(stranger.capture('traces'))} KB of traces")
    journey.stop("lumos check", lambda: f"{stranger.lumos('check', str(traces)).count('yes  ')} of 5 questions")
    journey.stop("lumos replay", replayed)
    journey.stop("lumos predict, four ranks, twice the layers", predicted)
    journey.stop("open the report", lambda: opened(report, answers["predict"]["step_ms"]))
    if abs(answers["replay"]["error_pct"]) > MOST_ERROR_PCT:
        raise SystemExit(f"the replay is off by {answers['replay']['error_pct']:.2f} %, more than {MOST_ERROR_PCT} %")
    return answers


def size_kb(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.pt.trace.json.gz")) // 1000


def opened(report: Path, step_ms: float) -> str:
    """The report in a browser, all charts drawn, nothing fetched; without a browser, the file alone."""
    text = report.read_text("utf-8")
    wanted = f"{step_ms:.2f} ms" if step_ms < 1e3 else f"{step_ms / 1e3:.{3 if step_ms < 1e4 else 2}f} s"
    if wanted not in text:
        raise SystemExit(f"{report.name} does not say {wanted}")
    size = f"{report.stat().st_size / 1e6:.1f} MB"
    if not find_browser():
        return f"{size}; there is no browser here, so the file alone was looked at"
    with open_browser() as browser, browser.open(report) as page:
        page.draw_charts()
        seen = page.value("document.body.innerText")
        fetched = [one for one in page.requests if not one.startswith("data:")]
        if wanted not in seen or page.errors or fetched != [report.resolve().as_uri()]:
            raise SystemExit(f"{report.name} in the browser: {page.errors or fetched}, or no {wanted}")
    return f"{size}; all charts drawn, no errors, nothing fetched"


# Accuracy


class Case(NamedTuple):
    """A changed run: how it is asked for, how it is run, and on how many cores; recorded on `recorded_on`."""

    name: str
    asked: dict[str, int]
    options: tuple[str, ...]
    recorded_on: int = 2  # cores


CASES = (
    Case("four ranks that share two cores, recorded with a core each", {"parallel.dp": 4}, ("--nproc", "4")),
    Case("four ranks that share two cores, recorded as two that share one", {"parallel.dp": 4}, ("--nproc", "4"), 1),
    Case("nothing", {}, ()),
    Case("half the layers", {"model.layers": 2}, ("--layers", "2")),
    Case("twice the layers", {"model.layers": 8}, ("--layers", "8")),
    Case("half the sequence", {"train.seq": 64}, ("--seq", "64")),
    Case("twice the sequence", {"train.seq": 256}, ("--seq", "256")),
    Case("twice the batch", {"train.micro_batch": 8}, ("--micro-batch", "8")),
)


class Outcome(NamedTuple):
    """One case in one repetition: the changed step, and the step as recorded, both predicted and measured."""

    predicted_ms: float
    measured_ms: float
    recorded_ms: float
    unchanged_ms: float

    @property
    def predicted_ratio(self) -> float:
        return self.predicted_ms / self.recorded_ms

    @property
    def measured_ratio(self) -> float:
        return self.measured_ms / self.unchanged_ms

    @property
    def ratio_error_pct(self) -> float:
        return 100 * (self.predicted_ratio / self.measured_ratio - 1)

    @property
    def step_error_pct(self) -> float:
        return 100 * (self.predicted_ms / self.measured_ms - 1)


def measured_ms(stranger: Stranger, options: Sequence[str], cores: int) -> float:
    """The lower quartile of steps that never meet the profiler: what disturbs a step makes it longer."""
    count = str(LEFT_OUT + MEASURED)
    printed = stranger.train("--nproc", "2", "--steps", count, *options, cores=range(cores))
    steps = [float(ms) for ms in re.findall(r"([\d.]+) ms$", printed, re.MULTILINE)]
    return statistics.quantiles(steps[LEFT_OUT:], n=4)[0]


def predicted_ms(stranger: Stranger, traces: Path, asked: dict[str, int]) -> tuple[float, float]:
    """(changed, as recorded), both without the profiler."""
    wanted = [word for key, value in asked.items() for word in ("--set", f"{key}={value}")]
    text = stranger.lumos("predict", str(traces / "setup.toml"), "--from", str(traces), *wanted, "--json")
    answer = json.loads(text)
    return float(answer["step_ms"]), float(answer["baseline_ms"])


@dataclass
class Quiet:
    """Does things again while other programs disturb them, and knows how much the ones that count were disturbed."""

    shares: list[float] = field(default_factory=list)  # of the machine, that other programs took

    def best(self, act: Callable[[], Any]) -> Any:
        tries = []
        while len(tries) < TRIES and (not tries or tries[-1][0] > QUIET):
            busy, own, start = busy_s(), own_s(), time.perf_counter()
            found = act()
            room = (time.perf_counter() - start) * (os.cpu_count() or 1)
            tries.append((max(0.0, busy_s() - busy - (own_s() - own)) / room, found))
        share, found = min(tries, key=lambda one: one[0])
        self.shares.append(share)
        return found


def busy_s() -> float:
    """Seconds that all cores together have worked, for anyone."""
    user, nice, system = (int(word) for word in Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """The same, for this script and what it started and waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def repetition(stranger: Stranger, number: int, quiet: Quiet) -> Iterator[tuple[Case, Outcome]]:
    """Every case once, beside the run as recorded, against recordings made in the same minutes."""
    traces = {cores: quiet.best(partial(recorded, stranger, f"{number}-{cores}", cores)) for cores in (1, 2)}
    for case in CASES:
        before = quiet.best(partial(measured_ms, stranger, (), case.recorded_on))
        found = quiet.best(partial(measured_ms, stranger, case.options, 2))
        predicted, baseline = predicted_ms(stranger, traces[case.recorded_on], case.asked)
        yield case, Outcome(predicted, found, baseline, before)


def recorded(stranger: Stranger, name: str, cores: int) -> Path:
    """A recording in a folder of its own: several may be made before one counts."""
    name = f"{name}-{len(list(stranger.folder.glob(name + '-*')))}"
    return stranger.capture(name, steps=RECORDED, cores=range(cores))


def accuracy(stranger: Stranger, repeat: int, quiet: Quiet) -> Iterator[dict[str, list[Outcome]]]:
    """All outcomes so far, after every repetition."""
    found: dict[str, list[Outcome]] = {case.name: [] for case in CASES}
    for number in range(repeat):
        for case, outcome in repetition(stranger, number, quiet):
            found[case.name].append(outcome)
            print(
                f"{case.name}: {outcome}, {outcome.ratio_error_pct:+.1f} %, {outcome.step_error_pct:+.1f} %", flush=True
            )
        yield found


# The page

HEAD = """\
# A stranger's path

Written by `python benchmarks/stranger.py -o docs/stranger.md`. Python, pip and this checkout are all that is needed,
and no GPU. A virtual environment is made, Lumos and torch are installed into it, a small training of two ranks (gloo,
one thread each) is captured, checked and replayed, four ranks with twice the layers are predicted, a report is opened.

```
pip install '.[capture]'
lumos capture -o traces -- python examples/train_tiny.py --nproc 2
lumos check traces
lumos replay traces
lumos predict traces/setup.toml --from traces --set parallel.dp=4 --set model.layers=8 -o report.html
```

The same without `traces/setup.toml` works too: all values of this model can be inferred from the trace.
"""
ABOUT = """\
## Accuracy of such predictions

Predicted from recordings of {recorded} steps, against runs of {measured} steps that never met the profiler (the lower
quartile of each: what disturbs a step makes it longer); {repeat} recordings, the median and the range over them. Beside
every changed run the run as recorded was measured again, and "of it" is the changed step over that one: other programs
on the machine slow both. They took {others} of its cores; what they disturbed was done
again, up to twice. "Nothing" changes nothing, and shows how far two measurements of one run are apart. Nothing was
tuned on these figures.

| changed | predicted, of it | measured, of it | error, % | predicted, ms | measured, ms | error, % |
|---|---|---|---|---|---|---|
{rows}

Four ranks have a core each in the prediction, as the two had in the recording. On two cores they share them, and take
longer: a trace does not say how many cores there are. Recorded as the ranks are to run, two on one core, they can be
compared.
"""


def page(journey: Journey, found: dict[str, list[Outcome]], quiet: Quiet) -> str:
    rows = [f"| {stop.name} | {stop.seconds:.1f} | {stop.said} |" for stop in journey.stops]
    total = sum(stop.seconds for stop in journey.stops)
    load = os.getloadavg()[0]
    table = "\n".join(["| what | seconds | what came of it |", "|---|---|---|", *rows, f"| all | {total:.1f} | |"])
    said = f"{os.cpu_count()} cores, load {load:.1f} at the end. How long the installation takes is up to pip's cache."
    parts = [HEAD, f"{table}\n\n{said}\n"]
    if found:
        repeat = len(found[CASES[0].name])
        lines = "\n".join(row(name, outcomes) for name, outcomes in found.items())
        about = ABOUT.format(recorded=RECORDED, measured=MEASURED, repeat=repeat, rows=lines, others=others(quiet))
        parts.append(about)
    return "\n".join(parts)


def others(quiet: Quiet) -> str:
    shares = [100 * share for share in quiet.shares]
    return f"{statistics.median(shares):.0f} % (median; up to {max(shares):.0f} %)"


COLUMNS = {
    "predicted_ratio": ".2f", "measured_ratio": ".2f", "ratio_error_pct": "+.1f",
    "predicted_ms": ".0f", "measured_ms": ".0f", "step_error_pct": "+.1f",
}  # fmt: skip


def row(name: str, outcomes: Sequence[Outcome]) -> str:
    cells = []
    for key, form in COLUMNS.items():
        values = [getattr(one, key) for one in outcomes]
        cells.append(f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", dest="output", type=Path, help="write the page here")
    parser.add_argument("--here", action="store_true", help="with this Python's packages, nothing installed")
    parser.add_argument("--repeat", type=int, default=3, help="measure the changes so often; 0: not at all")
    parser.add_argument("--keep", type=Path, help="a folder for traces and report; a temporary one otherwise")
    options = parser.parse_args()
    journey = Journey()
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        python = sys.executable
        if not options.here:
            journey.stop(f"pip install .[capture], {pinned_torch()}", lambda: installed(folder))
            python = str(folder / "venv/bin/python")
        stranger = Stranger(python, folder.absolute())
        walk(stranger, journey)
        quiet = Quiet()
        text = page(journey, {}, quiet)
        save(options.output, text)  # what comes next takes long, and may be interrupted
        for found in accuracy(stranger, options.repeat, quiet):
            text = page(journey, found, quiet)
            save(options.output, text)
    print(text)


def save(to: Path | None, text: str) -> None:
    if to is not None:
        to.write_text(text, "utf-8")


def installed(folder: Path) -> str:
    install(folder)
    size = sum(path.stat().st_size for path in (folder / "venv").rglob("*") if path.is_file())
    return f"{size / 1e9:.1f} GB in a virtual environment"


if __name__ == "__main__":
    main()
