"""Learning how much times of a run differ: from a trace, an operation table, or a table of step times.

A few recorded steps say little about rare ones: what they show is weighed against the usual figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lumos.analysis.replay import Replay
from lumos.analysis.run import TracedRun
from lumos.data_files import read_table
from lumos.errors import InputError
from lumos.files import read_file
from lumos.graph.graph import Floats
from lumos.prediction.prediction import Prediction
from lumos.read.formats import Form, form_of, head_of
from lumos.read.operation_table import is_operation_table, read_operation_table
from lumos.risk.drawn_steps import DRAWS
from lumos.risk.monte_carlo import StepRisk
from lumos.risk.operation_steps import OperationSteps
from lumos.risk.recurring_tasks import KERNEL, TRANSFER, RecurringTasks
from lumos.risk.step_times import read_step_times
from lumos.risk.traced_steps import CAUSES_OF_PART, TracedSteps
from lumos.risk.variability import CAUSES, NONE, SCORES, Spread, Variability, usual_of_traces, usual_variability

_RANKS_TO_TRUST = 8.0
_SAME_WORK = 0.01  # ranks are compared if their numbers of kernels differ by no more
_MOST_BYTES = 1 << 22
_LONGEST_PAUSE_MS = 3.6e6
_WIDEST = 2.0  # sigma of what a file may state, as in a setup


def learn(path: Path, load: Callable[[Path], Replay]) -> Variability:
    """From whatever is at a path; `load` reads and replays a trace."""
    if path.is_file():
        if is_operation_table(path):
            table = read_operation_table(path)
            return OperationSteps(table, np.ones(len(table), bool)).variability
        head = head_of(path)
        if head is not None and _states_spreads(head):
            return _stated(path)
        if head is not None and form_of(path, head) in (Form.OTHER, Form.JSON_LIST):
            return learn_step_times(path)
    return learn_trace(load(path), path.name)


# ---------------------------------------------------------------------- step times
def learn_step_times(path: Path) -> Variability:
    """From a table of step times. Of one rank, whole steps differ; of several, GPUs and their steps are told apart."""
    times, late = read_step_times(path)
    ranks, steps = times.shape
    left = np.log(times)
    gpu = np.median(left, axis=1) - np.median(left)
    left = left - np.median(left, axis=1)[:, None]
    job = np.median(left, axis=0)
    text = f"learned from {path.name}: {steps:,} step times"
    text += f" of {ranks} ranks" if ranks > 1 else ", without telling causes apart"
    text += f", {late} slow ones at the beginning left out" if late else ""
    if ranks == 1:
        return Variability(job=_spread(job), source=text, whole_steps=True)
    step = _spread((left - job).ravel())
    return Variability(gpu=_spread(gpu), step=step, job=_spread(job), source=text, whole_steps=True)


def _spread(logs: Floats) -> Spread:
    return Spread.of(np.exp(logs)) if len(logs) > 2 and float(np.std(logs)) > 0 else NONE


# ---------------------------------------------------------------------- traces
def learn_trace(replay: Replay, name: str = "the trace", whole_steps: bool = False) -> Variability:
    """From a trace: what its steps and ranks showed, weighed against the usual figures, of passes or of whole steps."""
    usual, steps = usual_of_traces() if whole_steps else usual_variability(), TracedSteps(replay)
    tasks = steps.tasks
    if tasks.steps < 2:
        return replace(usual, source=f"{name} has a single step, which shows no variance; {usual.source}")
    found: dict[str, Any] = {
        cause: _mixed(usual.spread(cause), float(steps.shown[part]), float(steps.weights[part]))
        for part, cause in CAUSES_OF_PART.items()
        if steps.shown[part] > 0
    }
    gpu = _rank_factors(tasks)
    if gpu is not None:
        found["gpu"] = _mixed(usual.gpu, float(gpu.std()), len(gpu) / (len(gpu) + _RANKS_TO_TRUST))
    of = f"{tasks.steps} steps" + (f" of {tasks.ranks} ranks" if tasks.ranks > 1 else " of one rank")
    return replace(usual, **found, source=f"learned from {name}: {of}, weighed against figures {usual.source}")


def traced_risk(found: Prediction, learned: Variability | None = None, draws: int = DRAWS, seed: int = 0) -> StepRisk:
    """The risk of a traced step, perhaps scaled. Its ranks and passes stay as recorded: GPUs are not drawn."""
    run, replayed = found.run, found.replayed
    assert isinstance(run, TracedRun)
    assert replayed is not None
    recorded = replayed.clean_graph.duration
    scale = None
    if found.scales and run.duration is not None:
        scale = np.where(recorded > 0, run.duration / np.maximum(recorded, 1e-9), 1.0)
    steps = TracedSteps(replayed, scale)
    differs = replace(learned or learn_trace(replayed, whole_steps=True), gpu=NONE, kernel=NONE, microbatch=NONE)
    if steps.tasks.ranks == 1 and not steps.shown[TRANSFER]:
        differs = replace(differs, collective=NONE)
    return StepRisk(steps, found.step_ms, differs, min(draws, steps.most_draws), seed, (), steps.tasks.ranks)


def _rank_factors(tasks: RecurringTasks) -> Floats | None:
    """Logarithms of the time of every rank's kernels against the median rank, if all run the same ones."""
    chosen = (tasks.part == KERNEL) & (tasks.step >= 0) & (tasks.task >= 0)
    count = np.bincount(tasks.rank[chosen], minlength=tasks.ranks)
    spent = np.bincount(tasks.rank[chosen], tasks.typical_duration[chosen], tasks.ranks)
    if tasks.ranks < 2 or not spent.all() or count.max() > (1 + _SAME_WORK) * count.min():
        return None
    return np.asarray(np.log(spent / np.median(spent)))


def _mixed(usual: Spread, sigma: float, weight: float) -> Spread:
    """The usual spread with a variance between its own and what was seen."""
    target = float(np.sqrt(weight * sigma**2 + (1 - weight) * usual.sigma**2))
    return Spread.lognormal(target) if usual.is_none else usual.scaled(target / usual.sigma)


# ---------------------------------------------------------------------- files of spreads
def _states_spreads(head: bytes) -> bool:
    named = any(f'"{name}"'.encode() in head for name in (*CAUSES, "pauses"))
    return head[:1] == b"{" and named and b'"traceEvents"' not in head


def _stated(path: Path) -> Variability:
    """A file as `Variability.to_data` writes it: numbers are the sigmas of lognormal spreads. The rest is as usual."""
    advice = f"give numbers from 0 to {_WIDEST:g} for some of {', '.join(CAUSES)}, or pauses (docs/risk.md)"
    try:
        data = json.loads(read_file(path, _MOST_BYTES, advice))
        data = data["usual"] if isinstance(data.get("usual"), dict) else data
        unknown = [key for key in data if key not in (*CAUSES, "pauses", "source")]
        named = ", ".join(key for key in data if key != "source")
        source = f"{named} as stated in {path.name}; else {usual_variability().source}"
        found = Variability.from_data(read_table("variability.json")["usual"] | {"source": source} | data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise InputError(f"{path}: not a file of spreads ({str(error)[:100]}); {advice}") from None
    if unknown:
        raise InputError(f"{path}: {str(unknown[0])[:40]!r} is not a name of a spread; {advice}")
    for name, spread in (*((name, found.spread(name)) for name in CAUSES), ("pauses", found.pauses.spread)):
        is_far = not np.abs(spread.logs).max() <= _WIDEST * SCORES[-1]
        if is_far or spread.sigma > _WIDEST or (np.diff(spread.logs) < 0).any():
            raise InputError(f"{path}: {name} is not a spread; {advice}")
    if not 0 <= found.pauses.probability <= 1 or not 0 <= found.pauses.ms <= _LONGEST_PAUSE_MS:
        raise InputError(f"{path}: pauses are a probability from 0 to 1, ms, and a spread; {advice}")
    return found
