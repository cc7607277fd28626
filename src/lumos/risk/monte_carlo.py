"""Monte Carlo over a step: its distribution, what makes it wide, and what slow parts of a cluster cost."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from lumos.analysis.replay import replay
from lumos.arguments import checks_arguments
from lumos.errors import OptionError, check_seed
from lumos.graph.graph import Floats
from lumos.prediction.described_run import DescribedRun
from lumos.prediction.prediction import Prediction, predicted_step
from lumos.risk.drawn_steps import DRAWS, drawn_ms, typical_ms
from lumos.risk.lanes import Lanes, lanes_of, lanes_of_rank, whom_words
from lumos.risk.variability import CAUSES, Variability, usual_variability
from lumos.setup.slow import Slow, read_slow
from lumos.step.step import Step

_FEW_DRAWS, _FEW_SHARE = 200, 0.1  # for each cause, at least: the same draws as the first of all
_MOST_WORK = 5e8  # nodes that are simulated: beyond it, fewer steps are drawn
_FEWEST_DRAWS = 500
_NO_DELAY = 1e-9  # of the step: rounding
_FLEETS, _STEPS = 400, 4  # drawn runs at most, and steps of each, that say how runs differ
_WORDS = {
    "gpu": "GPUs differ",
    "step": "steps of one GPU differ",
    "kernel": "passes of one step differ",
    "microbatch": "micro-batches differ in work",
    "collective": "collectives differ",
    "host": "hosts differ from pass to pass",
    "job": "whole steps differ",
    "pauses": "ranks pause now and then",
}


class DrawnSteps(Protocol):
    """Something whose steps can be drawn."""

    def drawn_ms(self, variability: Variability, draws: int, seed: int, without: str = "") -> Floats:
        """Lengths of so many steps, with the same random numbers `without` one of the causes."""
        ...


@dataclass(frozen=True)
class LaneSteps:
    """Steps of a described run."""

    lanes: Lanes
    slow: tuple[Slow, ...] = ()
    _drawn: dict[Hashable, Floats] = field(default_factory=dict, repr=False, compare=False)

    def drawn_ms(self, variability: Variability, draws: int, seed: int, without: str = "", same: int = 1) -> Floats:
        """Steps are drawn once for one question: the same ones say what is usual and what is asked."""
        differs = variability.without(without) if without else variability
        key = differs, draws, seed, same
        if key not in self._drawn:
            self._drawn[key] = drawn_ms(self.lanes, differs, self.slow, draws, seed, same)
        return self._drawn[key]


class Cause(NamedTuple):
    """One variance, and the step without it."""

    name: str
    words: str
    mean_ms: float  # of the step without it
    p90_ms: float
    share: float  # of what the 90th percentile is above the step in which nothing differs, that goes away with it


@dataclass(frozen=True, repr=False)
class StepRisk:
    """Thousands of drawn steps.

    >>> step_risk(predict(setup)).percentile(90)          # doctest: +SKIP
    """

    steps: DrawnSteps = field(repr=False)
    typical_ms: float  # the predicted step, or what `typical_words` says
    variability: Variability
    draws: int = DRAWS
    seed: int = 0
    slow: tuple[dict[str, Any], ...] = ()  # what each slow part costs, as in the JSON
    ranks: int = 1
    scale: float = 1.0  # what the step would be if nothing differed, over the typical one
    typical_words: str = "as predicted, of runs that differ as usual"  # what the typical step is

    def __repr__(self) -> str:
        p50, p90, p99 = (self.percentile(share) for share in (50, 90, 99))
        return f"StepRisk(p50 {p50:,.2f} ms, p90 {p90:,.2f} ms, p99 {p99:,.2f} ms)"

    @cached_property
    def step_ms(self) -> Floats:
        """Of every drawn step."""
        return self.scale * self.steps.drawn_ms(self.variability, self.draws, self.seed)

    @property
    def calm_ms(self) -> float:
        """The step if nothing differed: shorter than the typical one, where somebody is always the slowest."""
        return self.scale * self.typical_ms

    @property
    def mean_ms(self) -> float:
        return float(self.step_ms.mean())

    @property
    def p90_ms(self) -> float:
        return self.percentile(90)

    @checks_arguments
    def percentile(self, percent: float) -> float:
        """So many percent of the steps are not longer, in milliseconds."""
        if not 0 <= percent <= 100:
            raise OptionError(f"percentile {percent:g}: give a number from 0 to 100")
        return float(np.quantile(self.step_ms, percent / 100))

    @cached_property
    def causes(self) -> list[Cause]:
        """What each variance costs, the most expensive first: the same draws without it."""
        few = min(self.draws, max(_FEW_DRAWS, round(_FEW_SHARE * self.draws)))
        together = self.step_ms[:few]
        base, excess = float(np.quantile(together, 0.9)), self.percentile(90) - self.calm_ms
        found = []
        for name in self._present:
            alone = self.scale * self.steps.drawn_ms(self.variability, few, self.seed, name)
            saved, less = base - float(np.quantile(alone, 0.9)), float(together.mean() - alone.mean())
            share = saved / excess if excess > 0 else 0.0
            found.append(Cause(name, self._words(name), self.mean_ms - less, self.percentile(90) - saved, share))
        return sorted(found, key=lambda one: one.p90_ms)

    @property
    def _present(self) -> list[str]:
        names = [name for name in CAUSES if not self.variability.spread(name).is_none]
        return names if self.variability.pauses.is_none else [*names, "pauses"]

    def _words(self, name: str) -> str:
        slowest = f" (the slowest of {self.ranks:,} decides)" if name == "gpu" and self.ranks > 1 else ""
        return _WORDS[name] + slowest

    @checks_arguments
    def run_factors(self, runs: int) -> Floats:
        """Of so many drawn runs: the mean step of a run over the predicted one.

        GPUs stay the same in a run; what changes from step to step is averaged. A few steps are drawn for each of some
        hundred sets of GPUs; the part of their difference that is due to single steps is taken out again.
        """
        if runs < 1:
            raise OptionError(f"runs = {runs}: draw at least one run")
        if not isinstance(self.steps, LaneSteps):
            return np.full(runs, self.mean_ms / self.typical_ms)
        fleets = max(2, min(_FLEETS, self.draws // _STEPS))
        drawn = self.scale * self.steps.drawn_ms(self.variability, fleets * _STEPS, self.seed + 1, same=_STEPS)
        sets = drawn.reshape(fleets, _STEPS)
        means, within = sets.mean(axis=1), float(sets.var(axis=1, ddof=1).mean()) / _STEPS
        total = float(means.var(ddof=1))
        kept = np.sqrt(max(0.0, total - within) / total) if total > 0 else 0.0
        factors = np.sort((drawn.mean() + kept * (means - drawn.mean())) / self.typical_ms)
        places = np.random.default_rng([self.seed, runs]).random(runs) * (fleets - 1)
        return np.asarray(np.interp(places, np.arange(fleets), factors))

    def as_dict(self) -> dict[str, Any]:
        """`risk` of the JSON."""
        step = {"mean": self.mean_ms, **{f"p{percent}": self.percentile(percent) for percent in (50, 90, 99)}}
        pauses = self.variability.pauses
        return {
            "draws": self.draws,
            "seed": self.seed,
            "step_ms": {**step, "typical": self.typical_ms, "calm": self.calm_ms},
            "causes": [one._asdict() for one in self.causes],
            "variability": self.variability.sigmas,
            "pauses": None if pauses.is_none else {"probability": pauses.probability, "ms": pauses.ms},
            "source": self.variability.source,
            "slow": [dict(one) for one in self.slow],
        }


@checks_arguments
def step_risk(
    what: Prediction | Step,
    variability: Variability | Path | str | None = None,
    slow: str | Sequence[str] = (),
    draws: int = DRAWS,
    seed: int = 0,
) -> StepRisk:
    """The risk of a step that was predicted without slow parts.

    `variability` is what was learned of the cluster, or a path to learn it from; what the setup states comes first.
    `slow` is as `--slow` gives it, beside that of the setup.

    Predictions rest on measured runs, in which GPUs and steps differed as usual, and are centred on them from 8 to
    4,096 GPUs: the median of steps that differ as usual is the predicted step. What is learned, stated or slow counts
    from there. Step times of the run itself say how far steps are from its own median.
    """
    check_seed(seed)
    if draws < 1:
        raise OptionError(f"draws = {draws}: draw at least one step")
    if isinstance(variability, Path | str):
        from lumos.risk.learn import learn  # which imports this module

        variability = learn(Path(variability), replay)
    found = predicted_step(what) if isinstance(what, Step) else what
    lanes, setup = lanes_of_prediction(found), found.setup
    parts = _slow_parts(found, slow, lanes)
    typical = typical_ms(lanes, parts) if parts else found.step_ms
    most = max(_FEWEST_DRAWS, int(_MOST_WORK / max(1, len(lanes.graph) * lanes.simulated)))
    stated = {} if setup is None else setup.variability.stated_sigmas
    differs, draws = variability or usual_variability(), min(draws, most)
    costs = tuple(_slow_costs(found, lanes, parts))
    usual = differs if differs.whole_steps else usual_variability()
    plain = LaneSteps(lanes)
    scale = found.step_ms / float(np.median(plain.drawn_ms(usual, max(draws, _FEWEST_DRAWS), seed)))
    # What is slow is so against the predicted pace, and not against that of a cluster in which nothing differs.
    slower = tuple(replace(one, factor=one.factor / scale) for one in parts if one.factor != 1)
    steps = LaneSteps(lanes, slower) if slower else plain
    return StepRisk(steps, typical, differs.stated(stated), draws, seed, costs, lanes.gpus, scale)


def lanes_of_prediction(found: Prediction) -> Lanes:
    """What is simulated for a prediction."""
    if isinstance(found.run, DescribedRun):
        return lanes_of(found.run.step, found.run.fixed_us / 1e3)
    return lanes_of_rank(found)


def slowed(found: Prediction, slow: Sequence[str] = ()) -> tuple[Prediction, list[dict[str, Any]]]:
    """The prediction with its slow parts, of its setup and of `slow`, and what each costs. All others wait for them."""
    stated = found.setup.variability.slow if found.setup is not None else ()
    if not stated and not slow:
        return found, []
    if not isinstance(found.run, DescribedRun):
        raise OptionError("--slow needs a described run: a setup, or a trace with what is to change (--set)")
    lanes = lanes_of_prediction(found)
    parts = _slow_parts(found, slow, lanes)
    before, after = (typical_ms(lanes, one) for one in ((), parts))
    added_us = (after - before) * 1e3
    run = replace(found.run, fixed_us=found.run.fixed_us + added_us, slow_us=added_us)
    return replace(found, run=run), _slow_costs(found, lanes, parts)


def _slow_parts(found: Prediction, texts: str | Sequence[str], lanes: Lanes) -> tuple[Slow, ...]:
    """What is slow, by the setup and by the command line."""
    stated = found.setup.variability.slow if found.setup is not None else ()
    return read_slow([*stated, *([texts] if isinstance(texts, str) else texts)], lanes.gpus)


def _slow_costs(found: Prediction, lanes: Lanes, slow: tuple[Slow, ...]) -> list[dict[str, Any]]:
    """Of every slow part: what it alone adds to the step, and whom it delays."""
    rows, fast = [], typical_ms(lanes) if slow else 0.0
    for one in slow:
        delayed = typical_ms(lanes, (one,))
        rows.append({
            "slow": one.text, "words": one.words, "delay_ms": delayed - fast, "step_ms": delayed,
            "delays": _delays(found, lanes, one) if delayed > (1 + _NO_DELAY) * fast else "nobody",
        })  # fmt: skip
    return rows


def _delays(found: Prediction, lanes: Lanes, one: Slow) -> str:
    return "all ranks" if found.setup is None or found.is_dry else whom_words(found.setup, lanes, one)
