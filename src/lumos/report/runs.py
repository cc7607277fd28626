"""Whole runs with failures as cards and tables, for terminal and page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lumos.report.table import Card, Column, Row, Table
from lumos.report.wording import money_text, ms_text, number_text, si_text
from lumos.risk.whole_run import DAY_S, HOUR_S, MINUTE_S, WholeRun, quantiles

PART_NAMES = {
    "productive": "training", "lost": "lost work, done again", "detection": "until failures were noticed",
    "restart": "restarts", "checkpoints": "checkpoints", "waiting": "waiting for repairs",
    "fewer_replicas": "slower with fewer replicas",
}  # fmt: skip
_MINUTE_MS, _HOUR_MS, _DAY_MS = 1e3 * MINUTE_S, 1e3 * HOUR_S, 1e3 * DAY_S


def run_cards(run: WholeRun) -> list[Card]:
    """Days, effective training time, failures, checkpoints, money, the deadline."""
    days, plain = quantiles(run.days), quantiles(run.work_s() / DAY_S)
    cards = [
        Card(
            f"time{_with(run)}", f"{_days(days['p50'])}",
            f"median; {_days(days['p90'])} p90, {_days(days['p99'])} p99; without failures {_days(plain['p50'])}",
        ),
    ]  # fmt: skip
    if run.model.failure_rate:
        share = quantiles(run.effective, falling=True)
        cards += [
            Card(
                "effective training", f"{100 * share['mean']:.1f} %",
                f"of the time; at least {100 * share['p90']:.1f} % in 9 of 10 runs",
            ),
            _interruptions_card(run),
            _checkpoint_card(run),
        ]  # fmt: skip
    hours = quantiles(run.gpu_hours(run.runs.total_s))
    cards.append(Card(f"GPU-hours{_with(run)}", f"{hours['p50']:,.0f}", f"{hours['p90']:,.0f} p90{_spares(run)}"))
    return [*cards, *_money_cards(run), *_deadline_cards(run)]


def _interruptions_card(run: WholeRun) -> Card:
    names = {"failures": "failures", "planned_stops": "planned stops", "returns": "to take nodes back"}
    found = {words: run.runs.mean_count(name) for name, words in names.items()}
    parts = ", ".join(f"{_count(mean)} {words}" for words, mean in found.items() if mean)
    hours = run.failures.mtbf_hours
    words = f"the job fails every {ms_text(hours * _HOUR_MS)} of running, once in {hours * run.job.gpus:,.0f} GPU-hours"
    several = sum(mean > 0 for mean in found.values()) > 1
    return Card("interruptions", _count(sum(found.values())), f"{parts}; {words}" if several else words)


def _money_cards(run: WholeRun) -> list[Card]:
    money, plain = run.money(run.trained_s, run.runs.total_s), run.money(run.work_s(), run.work_s())
    if money is None or plain is None:
        return []
    spent, more = quantiles(money), money_text(float(money.mean() - plain.mean()))
    words = f"{money_text(spent['p90'])} p90, {money_text(spent['p99'])} p99; {more} for failures and checkpoints"
    return [Card(f"money{_with(run)}", money_text(spent["p50"]), words)]


def _deadline_cards(run: WholeRun) -> list[Card]:
    if run.deadline_days is None:
        return []
    share = float((run.days <= run.deadline_days).mean())
    text = "< 0.1 %" if 0 < share < 1e-3 else "> 99.9 %" if 1 - 1e-3 < share < 1 else f"{100 * share:.1f} %"
    return [Card("deadline", text, f"of the runs end within {run.deadline_days:g} days")]


def _checkpoint_card(run: WholeRun) -> Card:
    size = si_text(1e9 * (run.reliability.checkpoint_gb or run.job.checkpoint_gb), "B")
    model, steps = run.model, max(round(run.interval_s / run.job.step_s), 1)
    waits = f"training waits {ms_text(1e3 * model.pause_s)}"
    if model.lag_s:
        waits += f", complete {ms_text(1e3 * model.lag_s)} later"
    words = f"{steps_text(steps)}; {size}, {waits}"
    if run.reliability.checkpoint_minutes is None:
        words += "; the best interval"
    else:
        lost = (run.expected_s - model.expected_s(run.job.work_s, run.best_interval_s)) / DAY_S
        words += f"; the best is {ms_text(1e3 * run.best_interval_s)}, {_days(lost)} less"
    return Card("checkpoint every", ms_text(1e3 * run.interval_s), words)


def steps_text(steps: int) -> str:
    """1 step, 242 steps."""
    return f"{steps:,} step{'s' * (steps != 1)}"


def parts_table(run: WholeRun) -> Table:
    """Where the days of a run go."""
    parts = run.mean_days_by_part
    total = sum(parts.values())
    rows = [Row([PART_NAMES[name], days, 100 * days / total]) for name, days in parts.items() if days > 0]
    rows.append(Row(["run", total, 100.0], is_total=True))
    columns = [Column("part"), Column("days", 2, bar=True), Column("%", 2)]
    return Table(f"where the days go, mean of {run.draws:,} runs", columns, rows)


def buys_table(run: WholeRun) -> Table:
    """What one change would save."""
    found = run.what_it_buys()
    priced = any(row["money_saved"] is not None for row in found)
    columns = [Column("change"), Column("days saved", 2, signed=True), Column("p90 days saved", 2, signed=True)]
    columns += [Column("money saved", 0, signed=True)] if priced else []
    columns += [Column("effective, %", 1), Column("try it: --set")]
    rows = []
    for row in found:
        money = [row["money_saved"]] if priced else []
        how = " ".join(row["set"]) or "leave out reliability.checkpoint_minutes"
        share = 100 * row["effective_training_time"]
        rows.append(Row([row["what"], row["days_saved"], row["p90_days_saved"], *money, share, how]))
    return Table("what it would buy (less than 0: what it would cost)", columns, rows)


def causes_table(run: WholeRun) -> Table:
    """What makes the 90th percentile as long as it is."""
    rows = [Row([one["name"], one["costs_days"], one["p90_days"]]) for one in run.causes()]
    columns = [Column("uncertainty"), Column("costs, days", 1, bar=True), Column("p90 without it, days", 1)]
    return Table("what makes the 90th percentile long", columns, rows)


def failures_table(run: WholeRun) -> Table:
    """How often what interrupts the job, by cause."""
    rows = [
        Row([
            one.name, 1 / one.per_hour, run.mean_in_run(one),
            "stop after a checkpoint" if one.planned else "node is replaced" if one.takes_node else "same nodes",
        ])
        for one in sorted(run.failures.causes, key=lambda one: -one.per_hour)
    ]  # fmt: skip
    columns = [Column("cause"), Column("hours between", 1), Column("in the run", 1, bar=True), Column("then")]
    return Table("what interrupts the job", columns, rows)


def run_tables(run: WholeRun) -> list[Table]:
    """All tables that say something of this run."""
    if not run.failures.causes:
        return [causes_table(run)]
    return [parts_table(run), buys_table(run), causes_table(run), failures_table(run)]


def run_notes(run: WholeRun) -> list[str]:
    """Where the rates are from, and what is assumed."""
    if not run.failures.causes:
        return []
    stated, model = run.reliability, run.model
    assumed = [
        (
            stated.storage_gb_s is None and stated.checkpoint_seconds is None,
            f"checkpoints in {ms_text(1e3 * model.write_s)}",
        ),
        (stated.spare_nodes is None and model.node_rate, "a replacement at once for every node that fails"),
        (stated.detection_minutes is None, f"{ms_text(1e3 * model.detection_s)} until a failure is noticed"),
        (stated.restart_minutes is None, f"restarts in {ms_text(1e3 * model.restart_s)}"),
    ]
    words = ", ".join(text for applies, text in assumed if applies)
    source = run.failures.source.partition(". ")[0]
    assumptions = [f"assumed: {words}; state others in [reliability]"] if words else []
    return [f"failures: {source}", *run.warnings, *assumptions]


def run_row(answer: Mapping[str, Any] | None) -> dict[str, Any]:
    """`run` of the answer as columns of a CSV file."""
    row: dict[str, Any] = {}
    for key, value in (answer or {}).items():
        if isinstance(value, Mapping):
            row |= {f"run_{key}_{name}": one for name, one in value.items() if isinstance(one, bool | int | float)}
        elif isinstance(value, int | float):
            row[f"run_{key}"] = value
    return row


def _days(days: float) -> str:
    return ms_text(days * _DAY_MS)


def _count(mean: float) -> str:
    return number_text(mean, 0 if mean >= 10 else 1)


def _with(run: WholeRun) -> str:
    """After what a prediction without failures also has."""
    return " with failures" if run.failures.causes else ", drawn runs"


def _spares(run: WholeRun) -> str:
    spares = run.held_gpus - run.job.gpus
    return f"; {spares:,} GPUs are spares" if spares else ""
