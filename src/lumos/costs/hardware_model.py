"""HardwareModel: all that was measured of one machine, as `lumos fit` puts it into a model file.

Operators, collectives, the host, power, and how a whole step differs from its parts. What a file does not have is that
of the package: `lumos.costs.costs.costs_of` asks here first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from lumos.costs.energy import InStepFactors, Joules, in_step_factors, joules_from
from lumos.costs.network import Network
from lumos.costs.operator_model import CostModel, Regressor, arrays_of, fitted_model, header_of
from lumos.costs.sampled_network import SampledNetwork, decode
from lumos.data_files import read_table
from lumos.model_file import CORRUPT, ModelFile, packed, read_model_file
from lumos.setup.frameworks import framework_named
from lumos.setup.gpus import Gpu, gpu_named

VERSION = 1
SECTIONS = ("network", "host", "profiler", "power", "in_step")
_FARTHEST = 10.0  # of a factor from 1, that a file may ask for


@dataclass(frozen=True)
class HardwareModel:
    """A model file, checked: `hardware_model("my_machine.npz").operators(gpu).us(operator)`."""

    file: ModelFile

    @cached_property
    def gpu(self) -> Gpu:
        """The GPU that was measured."""
        return gpu_named(self.file.place)

    def section(self, name: str) -> Mapping[str, Any] | None:
        """One part of the header; None where it was not measured."""
        found = self.file.header.get(name)
        if found is not None and not isinstance(found, dict):
            raise self.file.refused(f"{name} is no table")
        return found

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Which samples it was fitted on, by which release, and when."""
        return self.section("provenance") or {}

    @property
    def missing(self) -> list[str]:
        """What was not measured."""
        return [name for name in SECTIONS if self.section(name) is None]

    def operators(self, chip: Gpu) -> CostModel:
        """What operators cost on the GPU that was measured, or on another."""
        return _operators(self.file, chip)

    def network(self, usual: Network, gpus_per_node: int) -> SampledNetwork | Network:
        """The sampled collectives, on nodes like those that were sampled; `usual` for all that was not."""
        facts = self.section("network")
        if facts is None or facts.get("gpus_per_node") != gpus_per_node:
            return usual
        try:
            return decode(facts, usual)
        except CORRUPT:
            raise self.file.refused("its network makes no sense") from None

    @property
    def host_speed(self) -> float:
        """Of the host that was measured, relative to the typical one."""
        measured = self._numbers("host", 1e-3, 1e5)
        return framework_named("pytorch").host_us / measured["launch_us"] if measured else 1.0

    def factors(self, gpu: Gpu) -> InStepFactors:
        """How a step differs from its parts: as measured, and moved to another GPU as the package moves its own."""
        usual = in_step_factors(gpu)
        measured = self._numbers("in_step", 0.0, 1e4)
        if measured is None:
            return usual
        home = in_step_factors(self.gpu)
        matrix, stream = (min(max(measured[key], 1 / _FARTHEST), _FARTHEST) for key in ("matrix", "stream"))
        return replace(
            usual, matrix=usual.matrix * matrix / home.matrix, stream=usual.stream * stream / home.stream,
            sustained=1.0, launch_gap_us=measured["launch_gap_us"],
        )  # fmt: skip

    def joules(self, chip: Gpu) -> Joules | None:
        """The energies that were measured; None where they were not."""
        power = self.section("power")
        if power is None:
            return None
        try:
            usual = read_table("energy.json")
            table = {key: power.get(key, value) for key, value in usual.items()}
            found = joules_from(table, chip, self.gpu)
            numbers = (found.memory, found.cache, found.active_w, found.update_w, found.most_w, *found.flop.values())
            if not all(0 <= number < 1e6 for number in numbers):
                raise ValueError("no energies")
        except CORRUPT:
            raise self.file.refused("its power makes no sense") from None
        return found

    def _numbers(self, name: str, least: float, most: float) -> Mapping[str, float] | None:
        """A section of plain numbers."""
        found = self.section(name)
        if found is None:
            return None
        known = {"host": ("launch_us",), "in_step": ("matrix", "stream", "launch_gap_us")}[name]
        for key in known:
            value = found.get(key)
            if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
                raise self.file.refused(f"{name}.{key} = {str(value)[:40]} is no measured value")
        return {key: float(found[key]) for key in known}


def hardware_model(path: str) -> HardwareModel:
    """The model file at a path; it is read again where it has changed."""
    return _hardware_model(read_model_file(Path(path)))


@lru_cache(maxsize=8)
def _hardware_model(file: ModelFile) -> HardwareModel:
    return HardwareModel(file)


@lru_cache(maxsize=64)
def _operators(file: ModelFile, chip: Gpu) -> CostModel:
    return fitted_model(file, chip)


def encode(gpu: str, regressors: Mapping[str, Regressor], **sections: Any) -> bytes:
    """A model file: `sections` are those of SECTIONS that were measured, facts of an unknown GPU, and provenance."""
    header = {"version": VERSION, "gpu": gpu, "facts": None, **dict.fromkeys(SECTIONS), **sections}
    return packed({**header, "regressors": header_of(regressors)}, arrays_of(regressors))
