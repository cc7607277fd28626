"""search(): which configuration of a run is best? The answer is rows of plain values, so that shards can be merged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lumos.arguments import checks_arguments
from lumos.data_files import read_table
from lumos.errors import OptionError
from lumos.prediction.bill import Tariff
from lumos.prediction.described_run import DescribedRun
from lumos.prediction.gpu_comparison import GpuComparison, OnGpu, machine_named
from lumos.prediction.prediction import Prediction, predicted_step
from lumos.risk.monte_carlo import slowed
from lumos.search.batch import Batch, shared_batches, with_batch
from lumos.search.branch_and_bound import Progress, Search, Task
from lumos.search.estimator import Estimator
from lumos.search.gpu_counts import counts_between, estimated_gpus, skipped_rows
from lumos.search.journal import open_journal
from lumos.search.ranking import Front, Objective, Simulated, tolerance
from lumos.search.space import AXES, Space, checked_choices
from lumos.setup.constraints import mistakes_in
from lumos.setup.gpus import gpu_named
from lumos.setup.setup import Setup
from lumos.setup.setup_files import read_setup_with_notes
from lumos.tables import frame
from lumos.workers import Engine, Here, fingerprint

Row = dict[str, Any]
KEYS = (*AXES, "parallel.dp", "train.microbatches", "train.global_batch")
COLUMNS = (
    *KEYS, "step_ms", "p90_ms", "run_ms", "bound_ms", "memory_gib", "tokens_per_s_per_gpu", "energy_j",
    "gpu_hours_per_mtoken", "cost_per_mtoken", "pareto",
)  # fmt: skip

if TYPE_CHECKING:
    from polars import DataFrame
COUNTS = ("evaluated", "fitting", "simulated", "too_large", "seconds")  # of an answer; those of shards are added up
_PARTS = {
    "compute": ("exposed_compute_ms", "overlapped_ms"), "communication alone": ("exposed_comm_ms",),
    "idle": ("other_ms",),
}  # fmt: skip
_SAME = 1e-3
_NOTHING_FITS = "none of the configurations is valid, fits into memory and meets the deadline"
_BY_TIME = Objective()


@checks_arguments
def search(
    setup: Setup | Path | str,
    vary: Mapping[str, Any] | None = None,
    *,
    objective: Objective | str = _BY_TIME,
    top: int = 10,
    memory_gib: float = 0.0,
    estimator: Estimator | None = None,
    engine: Engine | None = None,
    shard: tuple[int, int] = (0, 1),
    journal: Path | str | None = None,
    exhaustive: bool = False,
    progress: Progress | None = None,
    notes: Sequence[str] = (),
    holds_for_all: Collection[str] = (),
    keeps_batch: bool = False,
) -> SearchResult:
    """The best configurations of a run.

    `vary` gives the values of axes, as in {"cluster.gpus": [256, 512], "parallel.tp": [8]}. Other axes take all values
    that make sense; the GPUs are the setup's unless varied. A global batch that the setup does not state is chosen for
    that many GPUs (`lumos.search.batch`). `memory_gib` limits the memory of a GPU below what it has.
    A search for the fewest GPUs tries numbers of its own unless `vary` names some, and numbers that cannot share the
    stated batch take one near it, unless it `keeps_batch`.
    What the setup states of its own GPU (its memory, its links) counts on other types where `holds_for_all` names it.
    `shard` is (index, count) of the part to search. With a `journal` folder, an interrupted search can be resumed.

    >>> search("run.toml", {"cluster.gpus": [64]}).as_dict()["results"][0]   # doctest: +SKIP
    """
    if top < 1:
        raise OptionError(f"--top {top}: give at least 1")
    if not 0 <= shard[0] < shard[1]:
        raise OptionError(f"shard = {shard}: give the index of a part, from 0, and the number of parts, as in (0, 8)")
    if not 0 <= memory_gib < 1e6:
        raise OptionError(f"--memory {memory_gib:g}: give GiB, more than 0")
    if not isinstance(setup, Setup):
        setup, read = read_setup_with_notes(setup)
        notes = (*read, *notes)
    objective = Objective(objective) if isinstance(objective, str) else objective
    choices = checked_choices(setup, vary or {})
    objective.check(choices.get("cluster.gpu", (setup.cluster.gpu,)))
    adapts = objective.name == "gpus" and not keeps_batch
    folder = None if journal is None else Path(journal)
    asked = _Asked(setup, objective, top, memory_gib, estimator or Estimator(), engine or Here(), shard, folder,
                   exhaustive, progress, tuple(notes), frozenset(holds_for_all), adapts)  # fmt: skip
    if objective.name == "gpus" and "cluster.gpus" not in choices:
        return _of_fewest_gpus(asked, choices)
    return asked.result(choices)


@dataclass(frozen=True)
class _Asked:
    """What a search is asked, but for the values of its axes."""

    setup: Setup
    objective: Objective
    top: int
    memory_gib: float
    estimator: Estimator
    engine: Engine
    shard: tuple[int, int]
    journal: Path | None
    exhaustive: bool
    progress: Progress | None
    notes: tuple[str, ...]
    holds_for_all: frozenset[str]
    adapts_batch: bool
    refuses_invalid: bool = True  # a search without any valid combination

    def result(self, choices: Mapping[str, tuple[Any, ...]]) -> SearchResult:
        setup, batch = with_batch(self.setup, choices)
        counts = choices.get("cluster.gpus", (setup.cluster.gpus,))
        near = shared_batches(batch.sequences, counts)
        space = Space(setup, choices, self.holds_for_all, near if self.adapts_batch else {})
        objective, estimator = self.objective, self.estimator
        task = Task(space, objective, estimator, self.memory_gib, self.shard, self.exhaustive)
        question = fingerprint(
            _version(), flat(setup), space.choices, objective, self.memory_gib, estimator.name, self.top,
            self.exhaustive, sorted(self.holds_for_all), sorted(space.batches.items()), *_of_risk(setup),
        )  # fmt: skip
        begin = monotonic()
        kept = open_journal(self.journal, f"{question} {self.shard}")
        slack = read_table("search.toml")["risk"]["slack"] if objective.risk else 0.0
        front = Front(self.top, space.families, space.cluster_of if len(space.clusters) > 1 else None, slack)
        found = Search(task, self.engine, kept, front, self.progress).run()
        if not found.valid and self.shard == (0, 1) and self.refuses_invalid:
            raise OptionError(f"no combination is valid: {_first_mistake(setup, space.choices)}")
        return SearchResult(found, monotonic() - begin, question, batch, self.notes, near)


def _of_fewest_gpus(asked: _Asked, choices: Mapping[str, tuple[Any, ...]]) -> SearchResult:
    """Of numbers of GPUs around an estimate, and of the next ones as long as none of them meets the deadline."""
    limits, objective = read_table("search.toml")["gpu_counts"], asked.objective
    rough = replace(asked, objective=Objective(tokens=objective.tokens), top=1, shard=(0, 1), journal=None)

    def gpu_days(count: int) -> float | None:
        try:
            found = rough.result({**choices, "cluster.gpus": (count,)})
        except OptionError:  # no combination is valid
            return None
        if not found.search.front.best:
            return None
        best = found.search.front.best[0]
        return count * objective.days(found._setup(best), best.run)

    estimate, fitting = estimated_gpus(asked.setup, objective, gpu_days)
    types = choices.get("cluster.gpu", (asked.setup.cluster.gpu,))
    node = min(gpu_named(gpu).gpus_per_node for gpu in types)
    low, high = estimate * limits["below"], estimate * limits["above"]
    tried: list[_Tried] = []
    while True:
        counts = counts_between(low, high, node)
        tried.append(_on_counts(asked, choices, counts))
        if tried[-1].has_answer or asked.shard != (0, 1):
            break
        if len(tried) >= limits["rounds"] and counts[-1] >= fitting:
            break
        low, high = counts[-1] + 1, counts[-1] * (1 + limits["above"] - limits["below"])
    return _with_counts(asked, choices, _of_still_fewer(asked, choices, tried, node))


class _Tried(NamedTuple):
    """A search on numbers of GPUs."""

    counts: list[int]
    found: SearchResult

    @property
    def has_answer(self) -> bool:
        return bool(self.found.search.front.best)


def _on_counts(asked: _Asked, choices: Mapping[str, tuple[Any, ...]], counts: list[int]) -> _Tried:
    journal = asked.journal and asked.journal / f"gpus-{counts[0]}-{counts[-1]}"
    on_these = replace(asked, journal=journal, refuses_invalid=False)
    return _Tried(counts, on_these.result({**choices, "cluster.gpus": tuple(counts)}))


def _of_still_fewer(
    asked: _Asked, choices: Mapping[str, tuple[Any, ...]], tried: list[_Tried], node: int
) -> list[_Tried]:
    """All searches, that with the answer last: while the least number meets the deadline, fewer are tried.

    The estimate is too high where the batch suits the number of GPUs badly that the estimate is from.
    """
    limits = read_table("search.toml")["gpu_counts"]
    share, least = 1 - limits["above"] + limits["below"], min(one.counts[0] for one in tried)
    for _ in range(limits["rounds"]):
        last = tried[-1]
        if asked.shard != (0, 1) or not last.has_answer or last.found.results[0]["cluster.gpus"] > least:
            break  # shards have to try the same numbers
        counts = [count for count in counts_between(least * share, least - 1, node) if count < least]
        if not counts:
            break
        least, fewer = counts[0], _on_counts(asked, choices, counts)
        tried = [*tried, fewer] if fewer.has_answer else [fewer, *tried]
    return tried


def _with_counts(asked: _Asked, choices: Mapping[str, tuple[Any, ...]], tried: Sequence[_Tried]) -> SearchResult:
    """The result of the last search with the numbers of GPUs that the others tried in vain, and a note on all."""
    *others, last = tried
    if not last.found.search.valid and asked.shard == (0, 1):
        asked.result({**choices, "cluster.gpus": tuple(last.counts)})  # raises what is wrong
    counts = sorted(count for one in tried for count in one.counts)
    span = f"{counts[0]:,} to {counts[-1]:,}" if len(counts) > 1 else f"{counts[0]:,}"
    note = f"{span} GPUs were tried: name other numbers with --gpus"
    in_vain = [one for one in others if one.counts[0] < last.counts[0]]
    before = [row for one in in_vain for row in one.found.tried_clusters]
    before.sort(key=lambda row: int(row["cluster.gpus"]))
    return replace(last.found, notes=(*asked.notes, note), tried_before=tuple(before))


def _of_risk(setup: Setup) -> list[str]:
    """What the setup states of risk: nothing, where it states none."""
    return [section.model_dump_json() for section in (setup.reliability, setup.variability) if section.model_fields_set]


def _version() -> str:
    """Of this package: another one may give other answers, which must not be mixed."""
    try:
        return version("lumos-sim")
    except PackageNotFoundError:
        return ""


def _first_mistake(setup: Setup, choices: Mapping[str, tuple[Any, ...]]) -> str:
    """What is wrong with the first of the values that were asked for, as `lumos predict` would report it."""
    mistakes = mistakes_in(setup.replaced({key: values[0] for key, values in choices.items()}))
    named = [text for text in mistakes if any(key in text for key in choices if key != "cluster.gpus")]
    return next(iter(named or mistakes), "vary fewer keys, or take another batch or number of GPUs")


@dataclass(frozen=True, repr=False)
class SearchResult:
    """A finished search."""

    search: Search
    seconds: float  # that it took
    question: str  # fingerprint of the options: only shards of the same search can be merged
    batch: Batch
    notes: tuple[str, ...] = ()
    near_batches: Mapping[int, int] = field(default_factory=dict)  # by number of GPUs that cannot share the batch
    tried_before: tuple[Row, ...] = ()  # rows of `tried_clusters` from searches for fewer GPUs, which had no answer
    _rows: dict[int, Row] = field(default_factory=dict)  # by number: a configuration may be in several lists

    def __repr__(self) -> str:
        best = f"best {self.results[0]['step_ms']:,.2f} ms" if self.results else "none fits"
        return f"SearchResult({self.search.valid:,} configurations, {best})"

    def table(self) -> DataFrame:
        """Every simulated configuration, best first, one per row."""
        return frame(self.rows())

    @cached_property
    def results(self) -> list[Row]:
        """The best configurations, best first, each with the reason why it is not the best."""
        return explained([self._row(found) for found in self.search.front.best], self.search.task.objective.name)

    @cached_property
    def families(self) -> list[Row]:
        """The best families, best first: the best member of each, with its variants and the values that they differ in.

        A family lays the weights out in one way. Its variants are within the tolerance of its best, which is less than
        predictions can tell apart.
        """
        rows = [self._family(members) for members in self.search.front.families]
        return explained(rows, self.search.task.objective.name)

    def _family(self, members: Sequence[Simulated]) -> Row:
        rows = [self._values(member, self._setup(member)) for member in members]
        differ = {key: list(dict.fromkeys(row[key] for row in rows)) for key in KEYS}
        variants = [
            {key: row[key] for key in KEYS if len(differ[key]) > 1}
            | {"step_ms": row["step_ms"], "memory_gib": row["memory_gib"]}
            for row in rows
        ]
        return self._row(members[0]) | {
            "variants": variants, "differ": {key: values for key, values in differ.items() if len(values) > 1},
        }  # fmt: skip

    @cached_property
    def pareto(self) -> list[Row]:
        """The Pareto front of time, memory and cost, and by risk of the 90th percentile, from fast to slow."""
        return [self._row(found) for found in self.search.front.pareto]

    @cached_property
    def best_by_gpu(self) -> list[Row]:
        """The best configuration on each type and number of GPUs, where several were searched."""
        leaders = self.search.front.leaders
        return [self._row(leaders[index]) for index in range(len(self.search.task.space.clusters)) if index in leaders]

    @cached_property
    def tried_clusters(self) -> list[Row]:
        """Every GPU type and number that was tried, what fits on it and, with a deadline, the least days it takes."""
        search, objective = self.search, self.search.task.objective
        space = search.task.space
        layouts = np.bincount(space.cluster_of, minlength=len(space.clusters)).tolist()
        per_day = objective.tokens / space.setup.train.seq / 86_400
        return [*self.tried_before] + [
            {
                "cluster.gpu": gpu, "cluster.gpus": gpus, "layouts": count, "fitting": fitting,
                "least_days": pace * per_day if fitting and objective.deadline_days else None,
                "batch": self.batch.sequences, "near_batch": self.near_batches.get(gpus),
            }
            for (gpu, gpus), count, (fitting, pace) in zip(space.clusters, layouts, search.on_clusters, strict=True)
        ]  # fmt: skip

    @cached_property
    def skipped(self) -> list[Row]:
        """The GPU types and numbers without an answer, and why."""
        rows = [*self.best_by_gpu, *self.results]
        return skipped_rows(self.tried_clusters, {(row["cluster.gpu"], row["cluster.gpus"]) for row in rows})

    @cached_property
    def comparison(self) -> GpuComparison | None:
        """The same side by side, with what bounds each; None for one cluster, for a shard, or where nothing fits."""
        space, leaders = self.search.task.space, self.search.front.leaders
        if not leaders or self.search.task.shard != (0, 1):
            return None
        runs = []
        for index, (gpu, gpus) in enumerate(space.clusters):
            setup = self._setup(leaders[index]) if index in leaders else None
            found = None if setup is None else self._whole_prediction(setup)
            chosen = {} if setup is None else {key: flat(setup)[key] for key in KEYS}
            runs.append(OnGpu(machine_named(gpu), found, "" if found else _NOTHING_FITS, gpus, chosen))
        return GpuComparison(tuple(runs))

    def as_dict(self) -> dict[str, Any]:
        """The answer that --json prints."""
        search = self.search
        index, count = search.task.shard
        return {
            "kind": "search",
            "question": self.question,
            "shard": [index + 1, count],
            "objective": search.task.objective.name,
            "risk": search.task.objective.risk,
            "parameters": search.task.space.setup.model.parameters(search.task.space.setup.train.seq),
            "active_parameters": search.task.space.setup.model.active_parameters(search.task.space.setup.train.seq),
            "global_batch": self.batch.as_dict(),
            "setup": flat(search.task.space.setup),
            "tried": search.task.space.tried(),
            "evaluated": search.valid,
            "fitting": search.fitting,
            "simulated": len(search.simulated),
            "too_large": len(search.too_large),
            "seconds": self.seconds,
            "top": search.front.top,
            "tolerance": tolerance(),
            "bound_ms": search.least_seconds * 1e3 if search.fitting else None,
            "families": self.families,
            "results": self.results,
            "pareto": self.pareto,
            "best_by_gpu": self.best_by_gpu,
            "tried_clusters": self.tried_clusters,
            "skipped": self.skipped,
            "comparison": None if self.comparison is None else self.comparison.as_dict(),
            "warnings": self.warnings,
        }

    def rows(self) -> list[Row]:
        """Every simulated configuration, best first, with the columns COLUMNS."""
        on_front = {row.number for row in self.search.front.pareto}
        rows = []
        simulated = (row for row in self.search.simulated if row.seconds < inf)
        for found in sorted(simulated, key=lambda row: (row.value, row.number)):
            values = self._values(found, self._setup(found)) | {"pareto": found.number in on_front}
            rows.append({key: values[key] for key in COLUMNS})
        return rows

    @property
    def warnings(self) -> list[str]:
        search, found = self.search, list(self.notes)
        if search.journal.damaged:
            found.append(f"{len(search.journal.damaged)} damaged pieces of the journal were done again")
        if not search.valid:
            return [*found, "no valid configuration is in this shard"]
        if not search.fitting:
            return [*found, f"none of {search.valid:,} valid configurations fits into memory: use more or larger GPUs"]
        if search.too_large:
            found.append(_too_large(search.too_large))
        if not search.front.best and search.simulated and len(search.too_large) == len(search.simulated):
            return [*found, "no configuration could be simulated: use a smaller global batch"]
        if not search.front.best:
            return [*found, "none of the configurations that fit meets the deadline: allow more days, or more GPUs"]
        best = search.front.best[0]
        setup = self._setup(best)
        predicted = self._prediction(setup)
        found += [text for text in predicted.warnings if text not in found]
        stated = search.task.space.setup.train.global_batch
        if setup.train.global_batch != stated:
            found.append(
                f"{setup.parallel.dp:,} replicas cannot share a batch of {stated:,} sequences: the best has "
                f"train.global_batch = {setup.train.global_batch:,}; --set train.global_batch={stated} keeps it"
            )
        deadline = search.task.objective.deadline_days
        days = search.task.objective.days(setup, best.run) if deadline else 0.0
        latest = days * predicted.interval_ms[1] / predicted.step_ms
        if setup.reliability.is_stated and not search.task.objective.tokens:
            found.append("failures do not count: how often a run fails depends on how long it is; add --tokens")
        if latest > deadline > 0:
            found.append(
                f"the best takes {days:.1f} days, and with a probability of 10 % more than {latest:.1f}: the deadline "
                "may be missed"
            )
        return found

    def _setup(self, found: Simulated) -> Setup:
        space = self.search.task.space
        return space.setup_of(space.candidate(found.number))

    def _prediction(self, setup: Setup) -> Prediction:
        task = self.search.task
        price = task.objective.price(setup) if task.objective.priced else None
        tariff = Tariff(price, None, 1.0, task.objective.tokens or None)
        return slowed(predicted_step(task.estimator.step(setup), tariff=tariff))[0]

    def _whole_prediction(self, setup: Setup) -> Prediction:
        """The same with the price of energy, and with what a calibrated estimator adds once per step."""
        found, estimator, objective = self._prediction(setup), self.search.task.estimator, self.search.task.objective
        price = objective.price(setup) if objective.gpu_hour else None
        found = replace(found, tariff=Tariff(price, objective.kwh or None, 1.0, objective.tokens or None))
        step = found.step
        beyond = 0.0 if step is None else estimator.us(step) - step.us
        if not beyond or not isinstance(found.run, DescribedRun):
            return found
        return replace(found, run=replace(found.run, fixed_us=found.run.fixed_us + beyond))

    def _values(self, found: Simulated, setup: Setup) -> Row:
        """The searched keys of a configuration, and what its simulation gave."""
        everything, objective, drawn = flat(setup), self.search.task.objective, found.number in self.search.drawn
        return {key: everything[key] for key in KEYS} | {
            "step_ms": found.seconds * 1e3,
            "p90_ms": found.p90 * 1e3 if drawn else None,
            "run_ms": found.run * 1e3 if drawn or objective.counts_failures(setup) else None,
            "bound_ms": found.bound * 1e3,
            "memory_gib": found.memory / 2**30,
            "tokens_per_s_per_gpu": setup.tokens / found.seconds / setup.cluster.gpus,
            "energy_j": found.joules,
            "gpu_hours_per_mtoken": objective.gpu_hours(setup, found.run) / setup.tokens * 1e6,
            "cost_per_mtoken": found.cost * 1e6 if objective.priced else None,
        }

    def _row(self, found: Simulated) -> Row:
        """The values of a configuration with its breakdown and interval."""
        if found.number not in self._rows:
            self._rows[found.number] = self._complete_row(found)
        return self._rows[found.number]

    def _complete_row(self, found: Simulated) -> Row:
        setup, objective = self._setup(found), self.search.task.objective
        predicted = self._prediction(setup)
        slower = found.seconds * 1e3 / predicted.step_ms  # a calibrated estimator adds time once per step
        low, high = predicted.interval_ms
        return self._values(found, setup) | {
            "number": found.number,
            "value": found.value,
            "interval_ms": [low * slower, high * slower],
            "mfu": None if predicted.mfu is None else predicted.mfu / slower,
            "breakdown": predicted.breakdown.as_dict(),
            "bubble": predicted.bubble,
            "joules_per_token": found.joules / setup.tokens,
            "days": objective.days(setup, found.run) if objective.tokens else None,
            "gpu_hours": objective.gpu_hours(setup, found.run) / setup.tokens * objective.tokens or None,
            "money": found.cost * objective.tokens if objective.tokens and objective.priced else None,
        }


def explained(rows: Sequence[Row], objective: str) -> list[Row]:
    """Rows, best first, with `lost_by`: what differs from the best, and which part of the step takes longer."""
    return [row | {"lost_by": _lost_by(rows[0], row, objective) if index else ""} for index, row in enumerate(rows)]


def _lost_by(best: Row, row: Row, objective: str) -> str:
    other = [f"{key.partition('.')[2]} {row[key]}, not {best[key]}" for key in AXES if row[key] != best[key]]
    mine, theirs = row["breakdown"], best["breakdown"]
    scale, words = _same_work(best, row, objective)
    parts = {
        name: sum(scale * mine.get(key, 0.0) - theirs.get(key, 0.0) for key in keys) for name, keys in _PARTS.items()
    }
    ranked = sorted(parts.items(), key=lambda item: -item[1])
    longer = [f"{name} {ms:+,.1f} ms".replace("-", "−") for name, ms in ranked if abs(ms) >= 0.05]
    return f"{'; '.join(other)}: {', '.join(longer) or 'the same time'}{words}"


def _same_work(best: Row, row: Row, objective: str) -> tuple[float, str]:
    """What the times of a row are multiplied by to be compared with the best step, and the words for it.

    Steps of different batches train on different numbers of tokens; what costs money or energy is the time of all GPUs.
    """
    tokens = [one["tokens_per_s_per_gpu"] * one["cluster.gpus"] * one["step_ms"] for one in (best, row)]
    scale, words = tokens[0] / tokens[1], []
    if abs(scale - 1) > _SAME:
        words.append("for the same tokens")
    if objective in ("cost", "energy") and row["cluster.gpus"] != best["cluster.gpus"]:
        scale *= row["cluster.gpus"] / best["cluster.gpus"]
        words.append(f"times {row['cluster.gpus'] / best['cluster.gpus']:.3g} for the number of GPUs")
    prices = [one["cost_per_mtoken"] and one["cost_per_mtoken"] / one["gpu_hours_per_mtoken"] for one in (best, row)]
    if objective == "cost" and all(prices) and abs(prices[1] / prices[0] - 1) > _SAME:
        words.append(f"and a GPU-hour costs {prices[1] / prices[0]:.3g} times as much")
    return scale, f" ({', '.join(words)})" if words else ""


def _too_large(rows: Sequence[Simulated]) -> str:
    """What is known of configurations that could not be simulated."""
    least = min(row.bound for row in rows) * 1e3
    return (
        f"{len(rows):,} configurations are not ranked: their steps have too many micro-batches to be simulated; none "
        f"of them takes less than {least:,.1f} ms"
    )


def flat(setup: Setup) -> dict[str, Any]:
    """Every key of a setup: {"parallel.tp": 2, …}."""
    return {
        f"{name}.{key}": list(value) if isinstance(value, tuple) else value
        for name in ("model", "train", "parallel", "cluster")
        for key, value in getattr(setup, name)
    }
