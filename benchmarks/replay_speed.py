"""How fast, and in how much memory: every promise of the project about speed, measured in one run.

    .venv/bin/python benchmarks/replay_speed.py [--data DIR] [--out fragment.md] [--only abcdef] [--ranks 512]

Prints one table and writes it as a Markdown fragment. Nothing is asserted: the table says what holds. Times in brackets
are processor seconds, which other work on the machine disturbs less. The peer is HolisticTraceAnalysis (HTA).
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from speed_processes import HERE, Cost, best_of, inside, peer_python, run, timed_inside

ROOT = HERE.parent
REAL_TRACE = "public/hta/df_index_resolver/df_index_resolver.json.gz"
LONG_SOURCE = "h200/multirank/dp2_tp2_l8/rank0.pt.trace.json.gz"
JOB_SOURCE = "h200/multirank/ddp2_l8"
LONG_MEGABYTES = 600
TASKS, EDGES, SCENARIOS = 10_000_000, 25_000_000, 100
TITLE = "# Speed\n\nWritten by `make bench` (benchmarks/replay_speed.py); edit nothing here by hand.\n\n"
COLUMNS = ("case", "ours s", "ours peak MB", "peer s", "peer peak MB", "bar", "holds?")


@dataclass(frozen=True)
class Bar:
    """What was promised: seconds, and megabytes where memory is part of it."""

    seconds: float = 0.0
    megabytes: float = 0.0

    def __str__(self) -> str:
        time = f"{1e3 * self.seconds:g} ms" if self.seconds < 0.1 else f"{self.seconds:g} s"
        parts = [f"≤ {time}" if self.seconds else "", f"≤ {self.megabytes:g} MB" if self.megabytes else ""]
        return ", ".join(p for p in parts if p) or "—"

    def holds(self, cost: Cost) -> str:
        """Whether a cost is within the bar; where only the machine's other work is in the way, that is said."""
        if not self.seconds:
            return "—"
        small = not self.megabytes or cost.peak_mb <= self.megabytes
        if small and cost.wall <= self.seconds:
            return "yes"
        if small and cost.cpu <= self.seconds:
            return "no; in CPU time yes"
        missed = [n for n, bad in (("time", cost.wall > self.seconds), ("memory", not small)) if bad]
        return f"no ({' and '.join(missed)})"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    case: str
    ours: Cost
    peer: Cost | None = None
    bar: Bar = Bar()

    def cells(self) -> tuple[str, ...]:
        if self.ours.error:
            return (self.case, f"failed: {self.ours.error}", "", "", "", str(self.bar), "no")
        peer_time, peer_memory = "", ""
        if self.peer is not None and self.peer.error:
            peer_time = f"failed: {self.peer.error}"
        elif self.peer is not None:
            peer_time = f"{_seconds(self.peer)}, {self.peer.wall / self.ours.wall:.1f} times"
            peer_memory = f"{self.peer.peak_mb:,.0f}, {self.peer.peak_mb / self.ours.peak_mb:.1f} times"
        ours = (_seconds(self.ours), f"{self.ours.peak_mb:,.0f}")
        return (self.case, *ours, peer_time, peer_memory, str(self.bar), self.bar.holds(self.ours))


@dataclass(frozen=True)
class Setting:
    """Where things are in this run."""

    data: Path
    work: Path
    peer: str  # the peer's interpreter, '' where it is left out
    ranks: int

    def file(self, name: str) -> Path | None:
        """A file or folder of the shared data; None, and a line that says so, where it is not there."""
        path = self.data / name
        if path.exists():
            return path
        say(f"skipped: {name} is not in the data folder")
        return None

    def run_peer(self, path: Path, how: str, times: int) -> Cost | None:
        """The peer on the same file, as often as we run ours."""
        return best_of(times, inside("peer", str(path), how, python=self.peer)) if self.peer else None


def real_trace(setting: Setting) -> Iterator[Row]:
    """a. A real trace of 216,092 events, from the file to the answer."""
    if (path := setting.file(REAL_TRACE)) is None:
        return
    ours = best_of(3, lumos("replay", str(path), "--json"))
    name = f"a. replay, 216,092 events ({_tasks(ours)} tasks)"
    yield Row(name + "; peer: load only", ours, setting.run_peer(path, "load", 3), Bar(2, 300))
    if setting.peer:
        yield Row("a. the same; peer: load + critical path", ours, setting.run_peer(path, "critical-path", 3))


def long_trace(setting: Setting) -> Iterator[Row]:
    """b. A trace of 600 MB, plain and packed."""
    if (source := setting.file(LONG_SOURCE)) is None:
        return
    plain = setting.work / "long.json"
    packed = plain.with_name("long.json.gz")
    if not packed.exists():
        say(f"making a trace of {LONG_MEGABYTES} MB")
        run([sys.executable, str(HERE / "speed_data.py"), "long", str(source), str(plain), str(LONG_MEGABYTES)])
    peer = setting.run_peer(packed, "load", 1)
    for path, label in ((plain, "JSON"), (packed, "JSON.gz")):
        yield Row(f"b. read only, 600 MB of {label}; peer: load", timed_inside(run(inside("read", str(path)))), peer)
        ours = run(lumos("replay", str(path), "--json"))
        yield Row(f"b. replay, 600 MB of {label} ({_tasks(ours)} tasks)", ours, None, Bar(8, 500))


def layered_graph(setting: Setting) -> Iterator[Row]:
    """c. One pass over ten million tasks."""
    cost = best_of(2, inside("simulate", str(TASKS), str(EDGES)))
    size = f"{cost.answer.get('tasks', 0) / 1e6:.0f} M tasks, {cost.answer.get('edges', 0) / 1e6:.1f} M edges"
    yield Row(f"c. one simulate() pass, {size}", timed_inside(cost), None, Bar(1))
    order = cost.answer.get("order_seconds", 0.0)
    yield Row("c. its topological order, once a graph", Cost(order, order, cost.peak_mb, {}, cost.error))


def scale_answer(setting: Setting) -> Iterator[Row]:
    """d. What a what-if costs once a trace is loaded."""
    if (path := setting.file(REAL_TRACE)) is None:
        return
    cost = best_of(3, inside("scale", str(path), str(SCENARIOS)))
    tasks = f"{cost.answer.get('tasks', 0):,} tasks"
    yield Row(f"d. --scale compute=0.5 after loading, {tasks}", timed_inside(cost), None, Bar(0.05))
    many, cpu = cost.answer.get("many_seconds", 0.0), cost.answer.get("many_cpu", 0.0)
    yield Row(f"d. {SCENARIOS} scenarios in one simulate_many", Cost(many, cpu, cost.peak_mb, {}, cost.error))


def help_text(setting: Setting) -> Iterator[Row]:
    """e. How long a user waits for the command to say anything at all."""
    yield Row("e. lumos --help", best_of(3, lumos("--help")), None, Bar(0.3))


def many_ranks(setting: Setting) -> Iterator[Row]:
    """f. A job of 512 ranks."""
    if (source := setting.file(JOB_SOURCE)) is None:
        return
    folder = setting.work / f"job{setting.ranks}"
    if not folder.exists():
        say(f"making a job of {setting.ranks} ranks")
        files = [str(source / f"rank{r}.pt.trace.json.gz") for r in (0, 1)]
        run([sys.executable, str(HERE / "speed_data.py"), "job", str(folder), str(setting.ranks), *files])
    yield Row(f"f. read only, {setting.ranks} ranks", timed_inside(run(inside("read", str(folder)))))
    ours = run(lumos("replay", str(folder), "--json"))
    bar = Bar(90, 16_384) if setting.ranks == 512 else Bar()
    yield Row(f"f. replay, {setting.ranks} ranks ({_tasks(ours)} tasks)", ours, None, bar)
    again = timed_inside(run(inside("resimulate", str(folder))))
    yield Row(f"f. one simulate() pass of that job ({_tasks(ours)} tasks)", again, None, Bar(1))


CASES: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "a": real_trace,
    "b": long_trace,
    "c": layered_graph,
    "d": scale_answer,
    "e": help_text,
    "f": many_ranks,
}


def lumos(*arguments: str) -> list[str]:
    """The command as a user types it, from the environment that runs this."""
    return [str(Path(sys.executable).with_name("lumos")), *arguments]


def warm_up(setting: Setting) -> None:
    """Fill numba's cache on disk: a user compiles once, not in every run."""
    for name in (JOB_SOURCE, LONG_SOURCE):
        if (path := setting.data / name).exists():
            run(lumos("replay", str(path), "--json"))


def markdown(rows: list[Row]) -> str:
    """The table, and on what machine it was measured."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(c.replace('|', '/') for c in row.cells())} |" for row in rows]
    load = "/".join(f"{x:.1f}" for x in os.getloadavg())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    lines += [
        "",
        f"{os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}; load average {load} at the "
        "end. Wall seconds, processor seconds in brackets; `n times` is the peer's figure over ours. Each figure is "
        "of a fresh process with numba's cache filled; peaks are of all its processes together.",
    ]
    return "\n".join(lines) + "\n"


def say(text: str) -> None:
    """Progress goes beside the table, not into it."""
    print(text, file=sys.stderr, flush=True)


def _seconds(cost: Cost) -> str:
    digits = 3 if cost.wall < 1 else 2 if cost.wall < 10 else 1
    return f"{cost.wall:.{digits}f} ({cost.cpu:.{digits}f})"


def _tasks(cost: Cost) -> str:
    return f"{cost.answer.get('tasks', 0):,}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="the shared measurements")
    parser.add_argument("--out", type=Path, help="write the table here as well")
    parser.add_argument("--only", default="".join(CASES), help="the cases to run, as in 'ae'")
    parser.add_argument("--ranks", type=int, default=512, help="size of the job of case f")
    parser.add_argument("--work", type=Path, help="keep the large inputs here; a temporary folder otherwise")
    parser.add_argument("--peer-venv", type=Path, default=ROOT / ".venv-hta", help="the peer's own environment")
    parser.add_argument("--no-peer", action="store_true", help="leave the peer out")
    return parser.parse_args()


def main() -> None:
    """Run the cases one after the other; they would disturb each other."""
    options = _arguments()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        wanted = not options.no_peer and set(options.only) & set("ab")
        peer = peer_python(options.peer_venv, say) if wanted else ""
        setting = Setting(options.data, work, peer, options.ranks)
        warm_up(setting)
        rows: list[Row] = []
        for letter in options.only:
            for row in CASES[letter](setting):
                say("  ".join(row.cells()))
                rows.append(row)
    table = markdown(rows)
    print(table)
    if options.out is not None:
        options.out.write_text(TITLE + table)


if __name__ == "__main__":
    main()
