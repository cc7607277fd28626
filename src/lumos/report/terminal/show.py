"""Replays, comparisons, predictions, stragglers and checks on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from lumos.analysis.breakdown import mean_breakdown
from lumos.analysis.collectives import group_collectives
from lumos.analysis.comparison import Comparison
from lumos.analysis.readiness import Readiness
from lumos.analysis.replay import Replay
from lumos.analysis.slowdown_causes import Diagnosis
from lumos.errors import printable
from lumos.export.launch_files import LaunchFiles
from lumos.prediction.prediction import Prediction
from lumos.report import operator_rates, predictions, replays, risks, runs, slowdowns
from lumos.report.terminal.style import make_table, notes, rendered, summary
from lumos.report.wording import title_of
from lumos.risk.monte_carlo import StepRisk
from lumos.risk.whole_run import WholeRun
from lumos.setup.messages import listed
from lumos.traced.traced_operators import TracedOperators

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 80  # characters of the utilisation
_FEW = 8  # rows of operators, kernels and collectives
_MOST_OPERATORS = 24
_QUESTIONS = {
    "replay": "where the step goes (lumos replay)",
    "scale": "faster kernels or communication (lumos predict --from --scale)",
    "host": "whether the host decides (--scale cpu)",
    "multi_rank": "which rank is slow, waiting apart from transfer",
    "change": "another configuration (lumos predict --from --set)",
}


def show_replay(run: Replay, console: Console, ablate: bool = False) -> None:
    """Is the graph right, and where does the time go?"""
    device, steps = replays.device_of(run), max(len(run.marks.names), 1)
    title = f"replay of {len(run.marks.ranks)} rank(s), {len(run.execution.graph):,} tasks"
    simulated = mean_breakdown(list(run.simulated_breakdown.values()))
    parts: list[RenderableType] = [summary(title, replays.replay_cards(run))]
    if len(run.marks.ranks) > 1:
        parts.append(rendered(replays.stragglers_table(run)))
    parts.append(rendered(replays.sensitivities_table(run), _FEW))
    parts.append(rendered(replays.breakdown_table(run.recorded_breakdown, simulated)))
    parts += [rendered(replays.steps_table(run)), rendered(replays.path_table(run.path_summary))]
    if ablate:
        parts.append(rendered(replays.ablation_table(run)))
    for what, spots in (("operator", run.operators(replays.MOST_ROWS)), ("kernel", run.kernels(replays.MOST_ROWS))):
        if spots:
            parts.append(rendered(replays.hot_table(spots, f"{device} time by {what}"), _FEW))
    if run.collectives:
        parts.append(rendered(replays.groups_table(group_collectives(run.collectives), steps), _FEW))
    console.print(Group(*parts, _utilisation(run, device), *notes(run.execution.warnings)))


def _utilisation(run: Replay, device: str) -> Text:
    share = run.utilisation.share.mean(axis=0)
    if len(share) > _WIDTH:
        share = np.array([part.mean() for part in np.array_split(share, _WIDTH)])
    bars = "".join(_BARS[round(float(s) * (len(_BARS) - 1))] for s in share)
    return Text(f"{device} busy over time  {bars}")


def show_comparison(found: Comparison, console: Console) -> None:
    """What makes the second run differ from the first."""
    operators = f"{replays.device_of(found.before)} time by operator"
    tables = [replays.parts_table(found.parts), replays.differences_table(operators, found.operators)]
    if found.collectives:
        tables.append(replays.differences_table("collectives, waiting and transfer", found.collectives))
    warnings = [*found.before.execution.warnings, *found.after.execution.warnings]
    shown = (rendered(table, 12) for table in tables)
    console.print(Group(summary("step, as recorded", replays.comparison_cards(found)), *shown, *notes(warnings)))


def show_prediction(found: Prediction, console: Console) -> None:
    """The whole answer, whatever it was predicted from."""
    title = "without the profiler" if found.setup is None else title_of(found.setup, found.parameters, not found.is_dry)
    costs = predictions.cost_cards(found)
    tables = [predictions.parts_of_step_table(found)]
    if found.memory is not None:
        tables += [predictions.memory_table(found.memory), predictions.operators_table(found)]
    if found.traced is not None:
        tables += [predictions.understood_table(found.traced.understood), predictions.inferred_table(found.inferred)]
    parts = [summary(title, predictions.prediction_cards(found)), *([summary("cost", costs)] if costs else [])]
    console.print(Group(*parts, *(rendered(table, 64) for table in tables), *notes(found.warnings)))


def show_risk(risk: StepRisk | None, slow: Sequence[Mapping[str, Any]], console: Console) -> None:
    """The distribution of the step, and what slow parts of the cluster cost; nothing where neither was asked for."""
    parts: list[RenderableType] = [rendered(risks.slow_table(slow))] if slow else []
    if risk is not None:
        parts += [summary(f"risk of the step: {risk.draws:,} steps drawn", risks.risk_cards(risk))]
        parts += [rendered(risks.causes_table(risk))] if risk.causes else []
        parts += notes(risks.risk_notes(risk))
    if parts:
        console.print(Group(*parts))


def show_run(run: WholeRun, console: Console) -> None:
    """The whole run with failures."""
    title = f"the whole run, {runs.steps_text(run.job.steps)}: {run.draws:,} runs drawn"
    tables = (rendered(table) for table in runs.run_tables(run))
    console.print(Group(summary(title, runs.run_cards(run)), *tables, *notes(runs.run_notes(run))))


def show_launch(launch: LaunchFiles, console: Console) -> None:
    """The files that launch a configuration, each under its name; long lines stay whole, to be copied."""
    for name, text in launch.files.items():
        console.print(Text(f"{name}\n", style="bold"), end="")
        console.print(Text(text), soft_wrap=True)


def show_readiness(found: Readiness, path: str, console: Console) -> None:
    """Which questions can be asked, then what is missing for better answers."""
    steps = listed(found.run.marks.names)
    questions = make_table("what can be asked", "", "")
    for name, text in _QUESTIONS.items():
        questions.add_row(Text("yes", style="green") if found.ready[name] else Text("no", style="red"), text)
    parts: list[RenderableType] = [
        Text(f"{path}: {len(found.trace.ranks)} of {found.world} rank(s), {steps}"), questions,
    ]  # fmt: skip
    for one in found.findings:
        table = make_table(f"lacks {one.what}", "", "")
        table.show_header = False
        for row in (("", one.lacks), ("costs", one.answers), ("record", one.record)):
            table.add_row(*row)
        parts.append(table)
    nothing = [] if found.findings else [Text("nothing is missing")]
    console.print(Group(*parts, *nothing, *notes(found.run.execution.warnings)))


def show_operators(found: TracedOperators, console: Console, said: Sequence[str] = ()) -> None:
    """How fast the operators of a traced step ran, and in which modules."""
    title = f"operators of {found.step}" + (f" on {found.gpu.name}" if found.gpu else "")
    parts: list[RenderableType] = [summary(title, operator_rates.operator_cards(found))]
    parts.append(rendered(operator_rates.rates_table(found), _MOST_OPERATORS))
    if found.modules:
        parts.append(rendered(operator_rates.modules_time_table(found), _MOST_OPERATORS))
    console.print(Group(*parts, *notes(found.warnings), *(Text(printable(one)) for one in said)))


def show_slowdown(found: Diagnosis, console: Console) -> None:
    """Who slows the job down, why, and what mending it would give."""
    lost, job = found.slowdown, found.slowdown.job
    title = f"stragglers of {job.name}: {slowdowns.size_text(job)}"
    parts: list[RenderableType] = [summary(title, slowdowns.slowdown_cards(found))]
    parts += [rendered(slowdowns.causes_table(found)), rendered(slowdowns.fixes_table(found))]
    parts += [rendered(slowdowns.types_table(lost)), rendered(slowdowns.workers_table(lost), _FEW)]
    parts += [rendered(table, _FEW) for table in slowdowns.places_tables(lost)]
    console.print(Group(*parts, rendered(slowdowns.steps_table(lost), _FEW), *notes(job.warnings)))
