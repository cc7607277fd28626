"""What `lumos predict` predicts from: a description, a model's own code, a dry run, or a trace.

A source answers for any machine, so that a run can be put on several GPUs and is read, recorded or calibrated once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lumos.analysis.replay import Replay
from lumos.chakra.file_format import ChakraFile
from lumos.chakra.foreign_prediction import needs_prices, predict_graph
from lumos.chakra.run_reader import read_chakra_files
from lumos.cli.options import TraceOptions
from lumos.cli.terminal import busy, progress_bar
from lumos.errors import InputError
from lumos.prediction.bill import Tariff
from lumos.prediction.gpu_comparison import Machine, plain_on
from lumos.prediction.prediction import Prediction, predict
from lumos.read.formats import Form, form_of, head_of
from lumos.read.job import find_files
from lumos.setup.setup_files import PlainSetup, SetupReading, read_plain
from lumos.traced.infer import Inferred
from lumos.traced.infer.completion import changed, complete
from lumos.traced.infer.infer import infer
from lumos.traced.learned import CalibratedRun

if TYPE_CHECKING:
    from lumos.dry_run.recorded_step import Recording


class Source(Protocol):
    """A run that can be predicted on a machine, or on the one that it states itself (None)."""

    def on(self, machine: Machine | None, tariff: Tariff) -> Prediction: ...

    def left_out(self, machine: Machine) -> list[str]:
        """Keys of the cluster that are stated for another machine, and do not hold on this one."""
        ...


@dataclass(frozen=True)
class Described:
    """A run that a file describes."""

    path: Path
    changes: Sequence[str]

    def on(self, machine: Machine | None, tariff: Tariff) -> Prediction:
        reading = self.reading(machine)
        return predict(reading.setup, notes=tuple(reading.notes), tariff=tariff)

    def left_out(self, machine: Machine) -> list[str]:
        return plain_on(self._plain, machine)[1]

    def reading(self, machine: Machine | None) -> SetupReading:
        plain = self._plain if machine is None else plain_on(self._plain, machine)[0]
        return plain.checked(plain.sections)

    @cached_property
    def _plain(self) -> PlainSetup:
        return read_plain(self.path, self.changes)


@dataclass(frozen=True)
class OfConfig:
    """A config.json from the model's own code; from its sizes where a dry run does not cover what is asked for."""

    path: Path
    changes: Sequence[str]

    def on(self, machine: Machine | None, tariff: Tariff) -> Prediction:
        from lumos.dry_run.from_config import INSTALL, count_doubt, predict_config, why_not  # others need none of it

        changes = [*self.changes, *_keys(machine)]
        reason = why_not(self.path, changes)
        if reason is None:
            return predict_config(self.path, changes, tariff, self._recording)
        described = Described(self.path, self.changes)
        try:
            reading = described.reading(machine)
        except InputError as error:
            raise InputError(f"{error}; {INSTALL}" if INSTALL in reason else str(error)) from None
        if any("not recognised" in note or "is not known" in note for note in reading.notes):
            with busy("counting the parameters of the model's own code"):
                doubt = count_doubt(self.path, reading.setup)
            if doubt:
                raise InputError(f"{self.path}: {doubt}")
        found = described.on(machine, tariff)
        return replace(found, notes=(*found.notes, reason)) if reason else found

    def left_out(self, machine: Machine) -> list[str]:
        return []  # all keys of the cluster are those of --set

    @cached_property
    def _recording(self) -> Recording:
        """The step does not depend on the GPU."""
        from lumos.dry_run.from_config import record_config

        with busy("running the model's own code on fake tensors"):
            return record_config(self.path, self.changes)


@dataclass(frozen=True)
class OfScript:
    """A dry run of a user's own script."""

    path: Path
    changes: Sequence[str]

    def on(self, machine: Machine | None, tariff: Tariff) -> Prediction:
        from lumos.dry_run.from_script import slowest_rank  # traces need none of it

        return slowest_rank(self._recordings, [*self.changes, *_keys(machine)], tariff)

    def left_out(self, machine: Machine) -> list[str]:
        return []

    @cached_property
    def _recordings(self) -> list[Recording]:
        from lumos.dry_run.dry_files import read_recordings

        return read_recordings(self.path)


@dataclass(frozen=True)
class OfGraph:
    """Chakra files without durations."""

    files: Sequence[ChakraFile]
    changes: Sequence[str]

    def on(self, machine: Machine | None, tariff: Tariff) -> Prediction:
        return predict_graph(self.files, read_plain(None, [*self.changes, *_keys(machine)]), tariff)

    def left_out(self, machine: Machine) -> list[str]:
        return []


def graph_at(path: Path, options: TraceOptions) -> list[ChakraFile]:
    """The Chakra files at a path, if their times have to be estimated; none if anything else is there."""
    some, _ = find_files(path, options.match)
    if form_of(some[0], head_of(some[0])) not in (Form.CHAKRA, Form.CHAKRA_JSON):
        return []
    with progress_bar() as progress:
        files = read_chakra_files(path, options.match, options.rank_pattern, progress)
    return files if needs_prices(files) else []


@dataclass(frozen=True)
class OfTrace:
    """Another configuration of a traced run, whose own setup is inferred as far as the trace shows it."""

    load: Callable[[], Replay]
    setup: Path | None
    changes: Sequence[str]

    def on(self, machine: Machine | None, tariff: Tariff) -> Prediction:
        asked = self._asked if machine is None else plain_on(self._asked, machine)[0]
        traced = self._calibrated  # first: what it lacks is said better than what is to change
        wanted = changed(self._inferred, asked, self._stated)
        return predict(traced, setup=wanted.setup, notes=tuple(wanted.notes), tariff=tariff, inferred=self._inferred)

    def left_out(self, machine: Machine) -> list[str]:
        return plain_on(self._asked, machine)[1]

    @cached_property
    def _stated(self) -> PlainSetup:
        return read_plain(self.setup)

    @cached_property
    def _asked(self) -> PlainSetup:
        return read_plain(self.setup, self.changes)

    @cached_property
    def _run(self) -> Replay:
        _ = self._stated, self._asked  # mistakes in them are found before the trace is read
        return self.load()

    @cached_property
    def _inferred(self) -> dict[str, Inferred]:
        return dict(infer(self._run))

    @cached_property
    def _calibrated(self) -> CalibratedRun:
        has_shapes = any(header.has_shapes for header in self._run.execution.trace.headers)
        return CalibratedRun(self._run, complete(self._inferred, self._stated, has_shapes).setup)


def _keys(machine: Machine | None) -> list[str]:
    """As --set gives them."""
    return [] if machine is None else [f"cluster.{key}={value}" for key, value in machine.keys.items()]
