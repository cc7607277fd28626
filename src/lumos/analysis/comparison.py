"""Comparison: why one run takes longer than another, by part of the step, operator and collective."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lumos.analysis.breakdown import mean_breakdown
from lumos.analysis.replay import Replay, replay
from lumos.arguments import checks_arguments
from lumos.tables import frame

if TYPE_CHECKING:
    from polars import DataFrame

_ALL = 1_000_000


@dataclass(frozen=True)
class Difference:
    """One thing in both runs: milliseconds per step, and how often."""

    name: str
    before_ms: float
    after_ms: float
    before_calls: float
    after_calls: float

    @property
    def change_ms(self) -> float:
        return self.after_ms - self.before_ms


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two replayed runs side by side, as recorded."""

    before: Replay
    after: Replay

    def __repr__(self) -> str:
        before, after = (run.recorded_steps.mean for run in self._runs)
        return f"Comparison({before:,.2f} ms before, {after:,.2f} ms after)"

    @property
    def _runs(self) -> tuple[Replay, Replay]:
        return self.before, self.after

    def table(self) -> DataFrame:
        """One row per operator, the largest change first."""
        return frame([_row(part) for part in self.operators])

    @cached_property
    def parts(self) -> list[Difference]:
        """Of the step: they add up to its change."""
        before, after = (mean_breakdown(list(run.recorded_breakdown.values())).as_dict() for run in self._runs)
        return [Difference(name, before[name], after[name], 0.0, 0.0) for name in before]

    @cached_property
    def operators(self) -> list[Difference]:
        """GPU time of what operators launched, the largest change first."""
        return _differences(*({spot.name: (spot.ms, spot.calls) for spot in run.operators(_ALL)} for run in self._runs))

    @cached_property
    def collectives(self) -> list[Difference]:
        """Waiting and transfer of collectives, by kind and size."""
        return _differences(*map(_collective_times, self._runs))

    def as_dict(self, most: int = 20) -> dict[str, Any]:
        before, after = (run.recorded_steps.mean for run in self._runs)
        shown = {"parts": self.parts, "operators": self.operators[:most], "collectives": self.collectives[:most]}
        return {
            "before_ms": before,
            "after_ms": after,
            "change_ms": after - before,
            **{name: [_row(part) for part in parts] for name, parts in shown.items()},
            "warnings": [warning for run in self._runs for warning in run.execution.warnings],
        }

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from lumos.report.html.notebook import comparison_snippet

        return comparison_snippet(self)


def _row(part: Difference) -> dict[str, Any]:
    return asdict(part) | {"change_ms": part.change_ms}


Times = dict[str, tuple[float, float]]  # milliseconds and calls per step, mean over ranks


def _collective_times(run: Replay) -> Times:
    steps, times = max(len(run.marks.names), 1), dict[str, list[float]]()
    for one in run.collectives:
        size = f"{one.bytes / 1e6:,.1f} MB" if one.bytes >= 1e5 else f"{one.bytes:,} bytes"
        name = f"{one.collective}, {one.ranks} ranks, {size if one.bytes >= 0 else 'size unknown'}"
        times.setdefault(name, []).append(one.wait_ms + one.transfer_ms)
    return {name: (sum(ms) / steps, len(ms) / steps) for name, ms in times.items()}


def _differences(before: Times, after: Times) -> list[Difference]:
    none = (0.0, 0.0)
    columns = ((name, before.get(name, none), after.get(name, none)) for name in before | after)
    rows = [Difference(name, was, becomes, calls, then) for name, (was, calls), (becomes, then) in columns]
    return sorted(rows, key=lambda row: -abs(row.change_ms))


@checks_arguments
def compare(before: Replay | Path | str, after: Replay | Path | str) -> Comparison:
    """Why one run takes longer than another; each is a replay, or the path of traces."""
    return Comparison(*(run if isinstance(run, Replay) else replay(run) for run in (before, after)))
