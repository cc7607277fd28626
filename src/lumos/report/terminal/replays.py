"""Replays as tables."""

from __future__ import annotations

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lumos.analysis.breakdown import Breakdown, mean_breakdown
from lumos.analysis.collectives import group_collectives
from lumos.analysis.replay import Replay
from lumos.graph.from_trace.cpu_device import is_cpu_run
from lumos.report.terminal.style import make_table, notes
from lumos.report.wording import STEP_PARTS, ms_text

_BARS = " ▁▂▃▄▅▆▇█"
_MOST_RANKS = 16


def show_replay(run: Replay, console: Console) -> None:
    """The whole answer of a replay."""
    parts: list[RenderableType] = [_summary(run)]
    if len(run.marks.ranks) > 1:
        parts.append(_stragglers(run))
    parts += [_breakdown(run), _steps(run), _path(run), _hot(f"{_device(run)} time by operator", run, True)]
    parts.append(_hot(f"{_device(run)} time by kernel", run, False))
    if run.collectives:
        parts.append(_collectives(run))
    parts += [_utilisation(run), *notes(run.execution.warnings)]
    console.print(Group(*parts))


def _device(run: Replay) -> str:
    return "CPU" if is_cpu_run(run.execution.trace) else "GPU"


def _summary(run: Replay) -> Table:
    recorded, simulated = run.recorded_steps.mean, run.simulated_steps.mean
    table = make_table(f"replay of {len(run.marks.ranks)} rank(s), {len(run.execution.graph):,} tasks", "", "ms", "")
    table.add_row("recorded step", f"{recorded:.3f}", f"mean of {len(run.marks.names)} step(s)")
    table.add_row("simulated step", f"{simulated:.3f}", f"{run.error_pct:+.2f} % from the recorded one")
    table.add_row(
        "without the profiler", f"{run.clean_ms:.3f}", f"± {run.cost.error_pct:.0f} % (80 % interval); the typical step"
    )
    table.add_row(
        "in a process never profiled", f"{run.never_profiled_ms:.3f}", "CUPTI stays attached once it was used"
    )
    share = 100 * run.path_summary.unexplained_ms / simulated if simulated else 0.0
    table.add_row(
        "unexplained", f"{run.path_summary.unexplained_ms:.3f}", f"{share:.1f} % of the step, on the critical path"
    )
    return table


def _stragglers(run: Replay) -> Table:
    table = make_table("which rank is slow", "rank", "costs the others", "last in", "compute", "idle", "why")
    for s in run.stragglers[:_MOST_RANKS]:
        table.add_row(
            str(s.rank), f"{s.costs_others_ms:.2f} ms", f"{s.last_in} of {s.of}",
            f"{s.compute_ms:.2f} ms", f"{s.idle_ms:.2f} ms", s.why,
        )  # fmt: skip
    return _shortened(table, len(run.stragglers))


def _breakdown(run: Replay) -> Table:
    table = make_table("where the step goes, as recorded (ms)", "rank", *STEP_PARTS.values(), "step")
    for rank, part in list(run.recorded_breakdown.items())[:_MOST_RANKS]:
        table.add_row(str(rank), *_parts(part))
    if len(run.marks.ranks) > 1:
        mean = mean_breakdown(list(run.recorded_breakdown.values()))
        table.add_row("mean", *_parts(mean))
    simulated = mean_breakdown(list(run.simulated_breakdown.values()))
    table.add_row("simulated", *_parts(simulated))
    return _shortened(table, len(run.marks.ranks))


def _parts(part: Breakdown) -> list[str]:
    return [f"{value:.2f}" for value in (*(getattr(part, key) for key in STEP_PARTS), part.step_ms)]


def _steps(run: Replay) -> Table:
    table = make_table("steps", "step", "recorded ms", "simulated ms")
    recorded, simulated = run.recorded_steps.milliseconds, run.simulated_steps.milliseconds
    for name, r, s in zip(run.marks.names, recorded, simulated, strict=True):
        table.add_row(name, f"{r:.3f}", f"{s:.3f}")
    return table


def _path(run: Replay) -> Table:
    summary = run.path_summary
    title = f"critical path, {ms_text(summary.total_ms)} per step (from the first rank's start to the last one's end)"
    table = make_table(title, "kind", "ms", "share", "mostly")
    total = summary.total_ms or 1.0
    for kind, value in summary.by_kind.items():
        mostly = [f"{_short(n, 28)} {v:.2f}" for k, n, v in summary.by_operator if k == kind][:3]
        table.add_row(kind, f"{value:.3f}", f"{100 * value / total:.1f} %", ", ".join(mostly))
    return table


def _hot(title: str, run: Replay, by_operator: bool) -> Table:
    table = make_table(f"{title}, per step and rank", "name", "calls", "ms", "mean µs")
    for h in (run.operators() if by_operator else run.kernels())[:8]:
        table.add_row(_short(h.name, 70), f"{h.calls:.0f}", f"{h.ms:.3f}", f"{h.mean_us:.1f}")
    return table


def _collectives(run: Replay) -> Table:
    table = make_table("collectives", "collective", "ranks", "MB", "count", "wait ms", "transfer ms", "bus GB/s")
    for g in group_collectives(run.collectives)[:10]:
        size = f"{g.bytes / 1e6:.2f}" if g.bytes >= 0 else "?"
        bus = f"{g.bus_gb_s:.1f}" if g.bus_gb_s else "?"
        table.add_row(g.collective, str(g.ranks), size, str(g.count), f"{g.wait_ms:.3f}", f"{g.transfer_ms:.3f}", bus)
    return table


def _utilisation(run: Replay) -> Text:
    use = run.utilisation
    share = use.share.mean(axis=0)
    width = 80
    if len(share) > width:
        share = np.array([part.mean() for part in np.array_split(share, width)])
    bars = "".join(_BARS[round(float(s) * (len(_BARS) - 1))] for s in share)
    return Text(f"{_device(run)} busy {100 * use.mean:.0f} %  {bars}")


def _shortened(table: Table, rows: int) -> Table:
    if rows > _MOST_RANKS:
        table.caption = f"… of {rows} ranks; --json has them all"
    return table


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
