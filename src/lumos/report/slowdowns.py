"""Slowdowns by stragglers as cards and tables, for terminal and page."""

from __future__ import annotations

import numpy as np

from lumos.analysis.slowdown import Slowdown, SlowdownJob
from lumos.analysis.slowdown_causes import Diagnosis
from lumos.report.table import PROSE, Card, Column, Row, Table, Value, left_out, ms_columns
from lumos.report.wording import ms_text, number_text

MOST_ROWS = 200
_WORTH_SHARING = 1.01  # slowdown from which on shares of the lost time mean something
_OF_DELAYS = ("launch delays",)  # a loss beside that to stragglers
_SLOWDOWN = Column("slowdown", 3, bar=True)


def size_text(job: SlowdownJob) -> str:
    counts = {"GPU": job.gpus, "worker": len(job.workers), "step": len(job.steps)}
    return ", ".join(f"{count:,} {word}{'' if count == 1 else 's'}" for word, count in counts.items())


def slowdown_cards(found: Diagnosis) -> list[Card]:
    lost, job = found.slowdown, found.slowdown.job
    base, ideal = float(lost.base_ms.mean()), float(lost.ideal_ms.mean())
    off = f"{number_text(lost.error_pct, 2, signed=True)} % from the recorded one"
    if lost.held_out_error_pct is not None:
        off += f"; {number_text(lost.held_out_error_pct, 2, signed=True)} % with delays of launches of other steps"
    several = len(job.workers) > 1
    alike, who = ("workers, stages and steps", "stragglers") if several else ("steps", "steps that differ")
    by_stragglers = f"{ms_text(found.lost_ms)} a step lost to {who}" if base >= ideal else f"nothing lost to {who}"
    late_ms = float(job.recorded_ms.mean()) - base
    if lost.launch_slowdown > 1 + 1e-9 and base >= ideal:
        by_stragglers += f", {ms_text(late_ms)} to late launches"
    alike_text = "with each operation at the mean of its type" if job.passes else f"with all {alike} alike"
    usual = f"over the balanced step of {ms_text(ideal)}, {alike_text}"
    cards = [
        Card("recorded step", ms_text(float(job.recorded_ms.mean())), f"mean of {len(job.steps)}"),
        Card("simulated step", ms_text(float(job.replayed_ms.mean())), off),
        Card("ideal step", ms_text(found.attainable_ms), f"if all {alike} were alike: {by_stragglers}"),
        Card("slowdown", f"{lost.slowdown:.3f}", usual),
    ]
    if lost.launch_slowdown > 1 + 1e-9:
        text = "by launches that came later than they could"
        cards.append(Card("slowdown by delays", f"{lost.launch_slowdown:.3f}", text))
    worst = next((cause for cause in found.causes if not cause.after), None)
    if worst is not None and base >= found.attainable_ms * _WORTH_SHARING and worst.kind not in _OF_DELAYS:
        share = 100 * worst.gain_ms / found.lost_ms
        cards.append(Card(worst.kind, f"{number_text(share, 0)} %", f"of the lost time: {worst.name}"))
    return cards


def causes_table(found: Diagnosis) -> Table:
    names = [f"{c.name}, once the {c.after} is mended" if c.after else c.name for c in found.causes]
    rows = [Row([c.kind, name, c.gain_ms, c.gain_pct, c.evidence]) for c, name in zip(found.causes, names, strict=True)]
    (cost,) = ms_columns(("costs, ms",), rows)
    columns = [Column("cause"), Column("where"), cost, Column("of the step, %", 1, bar=True),
               Column("evidence", longest=PROSE)]  # fmt: skip
    return Table("why it is slow", columns, rows, "" if rows else "nothing that costs 1 % of the step")


def fixes_table(found: Diagnosis) -> Table:
    rows = [Row([fix.name, fix.step_ms, fix.gain_ms, fix.gain_pct]) for fix in found.fixes]
    step, gain = ms_columns(("step, ms", "gain, ms"), rows)
    return Table("what mending it would give", [Column("if"), step, gain, Column("gain, %", 1, bar=True)], rows)


def types_table(lost: Slowdown) -> Table:
    rows = [Row([name, value]) for name, value in lost.by_type.items()]
    return Table("slowdown by type of operation", [Column("only these as recorded"), _SLOWDOWN], rows)


def workers_table(lost: Slowdown) -> Table:
    """The slowest first; of jobs with stages, the published estimate and the worker simulated alone."""
    rows = []
    for worker in lost.slowest[:MOST_ROWS].tolist():
        one, alone = lost.job.workers[worker], lost.alone_slowdown(worker)
        why = lost.job.why.get(one.rank, "")
        places: list[Value] = (
            [] if one.stage is None else [str(one.dp_rank), str(one.stage), float(lost.of_worker[worker])]
        )
        rows.append(Row([str(one.rank), *places, alone, *([why] if lost.job.why else [])], rank=str(one.rank)))
    several = bool(lost.by_stage)
    places_columns = [Column("dp rank"), Column("stage"), _SLOWDOWN] if several else []
    exact = Column("alone" if several else "slowdown", 3, bar=not several)
    columns = [Column("rank"), *places_columns, exact, *([Column("why")] if lost.job.why else [])]
    return Table("slowdown by worker", columns, rows, left_out(MOST_ROWS, lost.job.workers))


def places_tables(lost: Slowdown) -> list[Table]:
    """By stage and by replica, where a job has them."""
    found = []
    for title, word, values in (
        ("slowdown by stage", "stage", lost.by_stage),
        ("slowdown by replica", "dp rank", lost.by_dp_rank),
    ):
        if len(values) > 1:
            rows = [Row([str(place), value]) for place, value in sorted(values.items())]
            found.append(Table(title, [Column(word), _SLOWDOWN], rows[:MOST_ROWS], left_out(MOST_ROWS, rows)))
    return found


def steps_table(lost: Slowdown) -> Table:
    """Every step, with the worker that costs it most."""
    job, rows = lost.job, []
    slowdown = lost.base_ms / np.where(lost.ideal_ms > 0, lost.ideal_ms, np.nan)
    for step, name in enumerate(job.steps[:MOST_ROWS]):
        known = np.nan_to_num(lost.alone[:, step])
        worst = job.workers[int(np.argmax(known))]
        times = [float(job.recorded_ms[step]), float(job.replayed_ms[step]), float(lost.ideal_ms[step])]
        rows.append(Row([name, *times, float(slowdown[step]), worst.label, float(known.max())]))
    times_columns = ms_columns(("recorded, ms", "simulated, ms", "balanced, ms"), rows)
    columns = [Column("step"), *times_columns, _SLOWDOWN, Column("costs most"), Column("alone", 3)]
    return Table("steps", columns, rows, left_out(MOST_ROWS, job.steps))
