"""Score: the error of predictions on measured runs, by source, and how well they rank configurations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lumos.costs.hardware_model import hardware_model
from lumos.errors import InputError, LumosError, OptionError
from lumos.memory.memory import memory_of
from lumos.prediction.prediction import predict
from lumos.score.measured_runs import Run, measured_gpu, runs_of
from lumos.workers import Engine, Here, Job

_FEWEST_TO_RANK = 3  # configurations of one model on one number of GPUs
_ROWS_PER_CHUNK = 32

Row = dict[str, str]
Refused = tuple[str, str]
"""(id, reason)."""


class Scored(NamedTuple):
    """A measured run and its prediction, in plain values; times in seconds."""

    id: str
    source: str
    model: str
    gpus: int
    measured: float | None  # None where the table does not say
    predicted: float
    low: float
    high: float
    fits: bool | None  # None where it is not known, as on a CPU
    peak_gib: float
    notes: tuple[str, ...]

    @property
    def error(self) -> float:
        """Relative error; nan where nothing was measured."""
        return float("nan") if self.measured is None else self.predicted / self.measured - 1


@dataclass(frozen=True)
class Score:
    """The runs of a table that could be predicted, and the reasons why others could not."""

    rows: int
    scored: tuple[Scored, ...]
    refused: tuple[Refused, ...]

    def as_dict(self) -> dict[str, Any]:
        """Errors in percent: mean (mape), median, bias; rank correlation; share inside the interval; all, by source."""
        by_source: dict[str, list[Scored]] = defaultdict(list)
        for item in self.scored:
            if item.measured is not None:
                by_source[item.source].append(item)
        measured = [item for part in by_source.values() for item in part]
        return {
            "rows": self.rows,
            "predicted": len(self.scored),
            **_summary(measured),
            "by_source": {name: _summary(part) for name, part in sorted(by_source.items())},
            "refused": [{"id": name, "reason": reason} for name, reason in self.refused],
        }

    def table(self) -> list[dict[str, Any]]:
        """A row for every predicted run."""
        keys = ("id", "measured", "predicted", "low", "high", "fits", "peak_gib")
        return [{key: getattr(item, key) for key in keys} | {"notes": "; ".join(item.notes)} for item in self.scored]

    def as_part(self, question: str, shard: tuple[int, int]) -> dict[str, Any]:
        """The answer for a shard, with all that `lumos merge` needs."""
        scored = [item._asdict() for item in self.scored]
        return self.as_dict() | {
            "kind": "score", "question": question, "shard": [shard[0] + 1, shard[1]], "scored": scored,
        }  # fmt: skip


def score(
    rows: Sequence[Row],
    progress: Callable[[int, int, str], None] | None = None,
    engine: Engine | None = None,
    shard: tuple[int, int] = (0, 1),
    model: str = "",
) -> Score:
    """Predict every row of a table, or of a shard of it; `model` is a model file for the runs on its GPU.

    >>> score(read_rows(Path("runs.csv"))).as_dict()["mape"]   # doctest: +SKIP
    """
    if model:
        _check_model(model, rows)
    named = [{**row, "id": row.get("id") or f"row {number}"} for number, row in enumerate(rows, 1)]
    mine = named[shard[0] :: shard[1]]
    chunks = [mine[i : i + _ROWS_PER_CHUNK] for i in range(0, len(mine), _ROWS_PER_CHUNK)]
    scored: list[Scored] = []
    refused: list[Refused] = []
    for answers in (engine or Here()).run(Job(score_rows, model), chunks):
        for answer in answers:
            if isinstance(answer, Scored):
                scored.append(answer)
            else:
                refused.append(answer)
        if progress is not None:
            progress(len(scored) + len(refused), len(mine), "predicting")
    return Score(len(mine), tuple(scored), tuple(refused))


def _check_model(model: str, rows: Sequence[Row]) -> None:
    """Refuse, before anything is predicted, a model file that is none or that no row needs."""
    own = hardware_model(model).gpu
    if not any(_ran_on(row, model) for row in rows):
        name = "a CPU" if own.is_cpu else hardware_model(model).file.header["gpu"]
        raise OptionError(f"--model {model} was fitted on {name}, on which no row of the table ran: leave it out")


def _ran_on(row: Row, model: str) -> bool:
    try:
        return measured_gpu(row, model) is not None
    except LumosError:
        return False  # its GPU is refused with the row


def score_rows(model: str, rows: list[Row]) -> list[Scored | Refused]:
    """Predict some rows; a job for an engine."""
    return [_scored(run) if isinstance(run, Run) else run for run in runs_of(rows, model)]


def _scored(run: Run) -> Scored | Refused:
    try:
        found = predict(run.setup, notes=run.notes)
        memory, (low, high) = memory_of(run.setup), found.interval_ms
        seconds = run.seconds if run.seconds == run.seconds else None
        return Scored(
            run.id, run.source, run.model, run.gpus, seconds, found.step_ms / 1e3, low / 1e3, high / 1e3,
            found.fits, memory.gib()["peak"], tuple(run.notes),
        )  # fmt: skip
    except LumosError as problem:
        return run.id, str(problem).splitlines()[0]


def merged_score(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The shards of a score as the answer for the whole table, but for the order of its rows."""
    try:
        scored = tuple(
            Scored(**{key: row[key] for key in Scored._fields} | {"notes": tuple(row["notes"])})
            for part in parts
            for row in part["scored"]
        )
        refused = tuple((str(row["id"]), str(row["reason"])) for part in parts for row in part["refused"])
        whole = Score(sum(int(part["rows"]) for part in parts), scored, refused)
        return whole.as_part(parts[0]["question"], (0, 1))
    except (KeyError, TypeError, ValueError, ArithmeticError) as problem:
        raise InputError(f"a shard of a score is damaged ({problem!r}): score that shard again") from None


def _summary(items: Sequence[Scored]) -> dict[str, Any]:
    """Of some runs; `bias` is that of the geometric mean of predicted over measured, negative if they are too fast."""
    if not items:
        return {"n": 0} | dict.fromkeys(("mape", "median", "bias", "spearman", "inside_interval"))
    errors = np.array([item.error for item in items])
    rank = rank_correlation([(i.model, i.gpus, i.measured or 0.0, i.predicted) for i in items])
    return {
        "n": len(items),
        "mape": 100 * float(np.abs(errors).mean()),
        "median": 100 * float(np.median(np.abs(errors))),
        "bias": 100 * float(np.expm1(np.log1p(errors).mean())),
        "spearman": rank if rank == rank else None,
        "inside_interval": float(np.mean([i.measured is not None and i.low <= i.measured <= i.high for i in items])),
    }


def rank_correlation(rows: Sequence[tuple[str, int, float, float]]) -> float:
    """Spearman's rank correlation within groups of one model and number of GPUs, averaged by group size.

    Rows are (model, GPUs, measured, predicted); nan where no group has enough configurations.
    """
    import polars

    table = polars.DataFrame(rows, ["model", "gpus", "measured", "predicted"], orient="row")
    value = polars.corr("measured", "predicted", method="spearman")
    groups = table.group_by("model", "gpus").agg(value.alias("value"), polars.len().alias("count"))
    ranked = groups.filter(polars.col("count") >= _FEWEST_TO_RANK, polars.col("value").is_finite())
    return float(np.average(ranked["value"], weights=ranked["count"])) if len(ranked) else float("nan")
