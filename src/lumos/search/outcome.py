"""Outcome: what is said about a finished search. Rows are plain values, so that those of shards can be merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lumos.prediction.bill import Tariff
from lumos.prediction.forecasting import Forecast
from lumos.search.front import Found
from lumos.search.search import Search
from lumos.search.space import AXES
from lumos.setup.setup import Setup

Row = dict[str, Any]
KEYS = (*AXES, "parallel.dp", "train.microbatches")
COLUMNS = (
    *KEYS, "step_ms", "bound_ms", "memory_gib", "tokens_per_s_per_gpu", "energy_j", "gpu_hours_per_mtoken",
    "cost_per_mtoken", "pareto",
)  # fmt: skip
_PARTS = {
    "computing": ("exposed_compute_ms", "overlapped_ms"), "exposed communication": ("exposed_comm_ms",),
    "waiting for other stages or the host": ("other_ms",),
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """A finished search, and the time it took."""

    search: Search
    seconds: float
    question: str  # what was asked, as a fingerprint: parts of one question can be merged
    notes: tuple[str, ...] = ()

    @cached_property
    def results(self) -> list[Row]:
        return explained([self._row(found) for found in self.search.front.best])

    @cached_property
    def pareto(self) -> list[Row]:
        """From fast to slow."""
        return [self._row(found) for found in self.search.front.pareto]

    def as_dict(self) -> dict[str, Any]:
        """The answer as JSON has it."""
        search = self.search
        index, count = search.task.shard
        return {
            "kind": "search",
            "question": self.question,
            "shard": [index + 1, count],
            "objective": search.task.objective.name,
            "setup": flat(search.task.space.setup),
            "evaluated": search.valid,
            "fitting": search.fitting,
            "simulated": len(search.simulated),
            "seconds": self.seconds,
            "top": search.top,
            "bound_ms": search.least_seconds * 1e3 if search.fitting else None,
            "results": self.results,
            "pareto": self.pareto,
            "warnings": list(self.warnings),
        }

    @property
    def warnings(self) -> list[str]:
        search, found = self.search, list(self.notes)
        if not search.valid:
            found.append("no valid configuration is in this shard")
        elif not search.fitting:
            found.append(f"none of {search.valid:,} valid configurations fits into memory: more GPUs, or larger ones")
        elif not search.front.best:
            found.append("none of the configurations that fit meets the deadline: more days, or more GPUs")
        else:
            found += [text for text in self._best.warnings if text not in found]
            found += self._late()
        return found

    @cached_property
    def _best(self) -> Forecast:
        """What is forecast of the first."""
        task = self.search.task
        setup = task.space.setup_of(task.space.candidate(self.search.front.best[0].number))
        return Forecast(setup, task.estimator.step(setup))

    def _late(self) -> list[str]:
        """Whether a deadline that the first meets is within its interval."""
        objective, first = self.search.task.objective, self.search.front.best[0]
        days = objective.days(self._best.setup, first.seconds) if objective.deadline_days else 0.0
        most = days * self._best.interval_ms[1] / self._best.step_ms
        if most <= objective.deadline_days or not objective.deadline_days:
            return []
        return [f"the first takes {days:.1f} days, but one time in ten over {most:.1f}: the deadline may be missed"]

    def table(self) -> list[Row]:
        """A row for every simulated configuration, the best first; few columns, for many rows."""
        space, front = self.search.task.space, {row.number for row in self.search.front.pareto}
        rows = []
        for found in sorted(self.search.simulated, key=lambda row: (row.value, row.number)):
            setup = space.setup_of(space.candidate(found.number))
            rows.append(
                chosen(setup) | {
                    "step_ms": found.seconds * 1e3, "bound_ms": found.bound * 1e3, "memory_gib": found.memory / 2**30,
                    "tokens_per_s_per_gpu": setup.tokens / found.seconds / setup.cluster.gpus,
                    "energy_j": found.joules,
                    "gpu_hours_per_mtoken": found.seconds * setup.cluster.gpus / 3600 / setup.tokens * 1e6,
                    "cost_per_mtoken": found.cost * 1e6 if self.search.task.objective.priced else None,
                    "pareto": found.number in front,
                }
            )  # fmt: skip
        return rows

    def _row(self, found: Found) -> Row:
        task = self.search.task
        setup = task.space.setup_of(task.space.candidate(found.number))
        objective = task.objective
        tariff = Tariff(objective.price(setup) if objective.priced else None, None, 1.0, objective.tokens or None)
        forecast = Forecast(setup, task.estimator.step(setup), (), tariff)
        slower = found.seconds * 1e3 / forecast.step_ms  # what a trace adds once a step
        low, high = forecast.interval_ms
        return chosen(setup) | {
            "number": found.number,
            "value": found.value,
            "step_ms": found.seconds * 1e3,
            "interval_ms": [low * slower, high * slower],
            "bound_ms": found.bound * 1e3,
            "tokens_per_s_per_gpu": forecast.tokens_per_s_per_gpu / slower,
            "mfu": forecast.mfu / slower,
            "memory_gib": found.memory / 2**30,
            "breakdown": forecast.breakdown,
            "bubble": forecast.bubble,
            "energy_j": found.joules,
            "joules_per_token": found.joules / setup.tokens,
            "gpu_hours_per_mtoken": found.seconds * setup.cluster.gpus / 3600 / setup.tokens * 1e6,
            "cost_per_mtoken": found.cost * 1e6 if objective.priced else None,
            "days": objective.days(setup, found.seconds) if objective.tokens else None,
            "money": found.cost * objective.tokens if objective.tokens and objective.priced else None,
        }


def explained(rows: Sequence[Row]) -> list[Row]:
    """Rows from the best on, each with why it is not the best."""
    return [row | {"lost_by": _lost_by(rows[0], row) if index else ""} for index, row in enumerate(rows)]


def _lost_by(best: Row, row: Row) -> str:
    """What is done otherwise, and where the time goes that this costs."""
    other = [f"{key.partition('.')[2]} {row[key]}, not {best[key]}" for key in KEYS if row[key] != best[key]]
    parts = {
        name: sum(row["breakdown"][key] - best["breakdown"][key] for key in keys) for name, keys in _PARTS.items()
    }
    told = [f"{name} {ms:+,.1f} ms" for name, ms in sorted(parts.items(), key=lambda item: -item[1]) if abs(ms) >= 0.05]
    return f"{'; '.join(other)}: {', '.join(told) or 'the same time'}"


def chosen(setup: Setup) -> Row:
    """The keys of a setup that a search decides."""
    everything = flat(setup)
    return {key: everything[key] for key in KEYS}


def flat(setup: Setup) -> dict[str, Any]:
    """Every key of a setup: {"parallel.tp": 2}."""
    sections: Mapping[str, Any] = {name: getattr(setup, name) for name in ("model", "train", "parallel", "cluster")}
    return {
        f"{name}.{key}": list(value) if isinstance(value, tuple) else value
        for name, section in sections.items()
        for key, value in section
    }
