"""Everything of one device that can be timed: its operators, and the small sections."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from lumos.measure.sample_grid import grid_of
from lumos.measure.time_operators import Stopwatch
from lumos.measure.time_power import Wattmeter, measured_power
from lumos.measure.time_profiler import measured_profiler
from lumos.measure.time_steps import measured_host, measured_step

Row = dict[str, Any]


class MachineTimer(Stopwatch):
    """Times single operators, and the rows of the sections: host, step, power, profiler."""

    @cached_property
    def _meter(self) -> Wattmeter | None:
        return Wattmeter() if self.device == "cuda" else None

    def section(self, name: str, rows: list[Row]) -> Iterator[Row]:
        """The rows of one section, each as it is measured; host and profiler are measured as a whole."""
        if name == "host":
            yield from measured_host(rows, self.device)
        elif name == "profiler":
            yield from measured_profiler(rows, grid_of(self.device)["host"], self.device)
        elif name == "step":
            yield from (row | measured_step(row, self.device, self._meter) for row in rows)
        elif self._meter is not None:
            yield from (row | measured_power(row, self._meter) for row in rows)
