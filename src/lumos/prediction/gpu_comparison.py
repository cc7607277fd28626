"""GpuComparison: one run on several GPUs, side by side: time, memory, energy, money, and what bounds it on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lumos.analysis.answers import GpuAnswer, GpuComparisonAnswer
from lumos.arguments import checks_arguments
from lumos.costs.hardware_model import hardware_model
from lumos.data_files import read_table
from lumos.errors import LumosError, OptionError
from lumos.prediction.bill import Tariff, check_prices
from lumos.prediction.fitting import shortage
from lumos.prediction.prediction import NO_PRICES, Prediction, predict
from lumos.setup.constraints import check
from lumos.setup.gpus import Gpu, gpu_named, is_file_name
from lumos.setup.sections import OF_GPU
from lumos.setup.setup import Setup
from lumos.setup.setup_files import PlainSetup, read_setup_with_notes
from lumos.tables import frame

if TYPE_CHECKING:
    from polars import DataFrame

_GIB = float(1 << 30)
_FAMILIES = {
    "matmuls": ("gemm", "linear", "bmm", "grouped"), "attention": ("sdpa", "softmax", "neox_softmax", "neox_fillmask"),
    "optimizer": ("adamw", "neox_optimizer"), "loss": ("cross_entropy", "neox_loss"),
}  # fmt: skip
_LESS_IS_BETTER = {"step_ms": True, "tokens_per_s": False, "tokens_per_s_per_gpu": False, "mfu": False,
                   "joules_per_token": True, "money_per_million_tokens": True}  # fmt: skip
_OF_BILL = ("joules_per_token", "watts_per_gpu", "price_per_gpu_hour", "money_per_million_tokens", "budget")
_AS_GOOD = 1e-3  # share by which a value may be worse than the best and is marked as best too

Progress = Callable[[int, int, str], None]


class Machine(NamedTuple):
    """What a run is put on: a GPU by its name, by a data sheet (.toml), or as measured, by a model file (.npz)."""

    name: str  # the one name of a known GPU, or the path of the file
    gpu: Gpu

    @property
    def label(self) -> str:
        """In reports: without the folder."""
        return Path(self.name).name if is_file_name(self.name) else self.name

    @property
    def keys(self) -> dict[str, str]:
        """The keys of a setup's cluster that name it."""
        return {"model": self.name} if self.name.endswith(".npz") else {"gpu": self.name}


def machine_named(name: str) -> Machine:
    """The machine of that name or file, or an error that says what is wrong with it."""
    gpu = gpu_named(name)
    return Machine(str(Path(name)) if is_file_name(name) else gpu.name, gpu)


def machine_of(setup: Setup) -> Machine:
    """What a setup states that it runs on."""
    cluster = setup.cluster
    return Machine(str(Path(cluster.model or cluster.gpu)), gpu_named(cluster.gpu))


def machines_named(names: Sequence[str]) -> list[Machine]:
    """Each once, in this order; an unknown name is a mistake, and so are two files of one name."""
    found = list(dict.fromkeys(machine_named(name) for name in names))
    by_label = {machine.label: machine for machine in found}
    for machine in found:
        if by_label[machine.label] != machine:
            raise OptionError(f"--gpu {machine.name} and {by_label[machine.label].name}: rename one of the two files")
    return found


@dataclass(frozen=True)
class OnGpu:
    """The run on one GPU: its prediction, or why it is refused there."""

    machine: Machine
    found: Prediction | None = None
    refused: str = ""
    gpus: int | None = None  # how many were asked for, where nothing is predicted
    configuration: Mapping[str, Any] = field(default_factory=dict)  # of the best one that a search found

    @property
    def counts(self) -> bool:
        """Whether it can run there: only then it can be the best."""
        return self.found is not None and self.found.fits is not False

    @property
    def tokens_per_s(self) -> float | None:
        """Of all GPUs."""
        if self.found is None or self.found.tokens is None:
            return None
        return self.found.tokens / (self.found.step_ms / 1e3)


@dataclass(frozen=True, repr=False)
class GpuComparison:
    """One run on several GPUs, in the order that they were asked for.

    >>> compare_gpus(setup, ["h100", "h200"]).as_dict()["gpus"][1]["speedup"]     # doctest: +SKIP
    """

    runs: tuple[OnGpu, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"GpuComparison({', '.join(row.gpu for row in self.answer.gpus)})"

    def table(self) -> DataFrame:
        """One row per GPU."""
        return frame(self.as_dict()["gpus"])

    def as_dict(self) -> dict[str, Any]:
        """The answer of `lumos predict --gpu A,B --json`."""
        return self.answer.as_dict()

    @cached_property
    def answer(self) -> GpuComparisonAnswer:
        rows = [self._row(run) for run in self.runs]
        for key, less in _LESS_IS_BETTER.items():
            for index in self._best(rows, key, less):
                rows[index].best_in.append(key)
        shown = next(run.found for run in self.runs if run.found is not None)
        return GpuComparisonAnswer(
            model=shown.setup.model.name if shown.setup is not None else "", parameters=shown.parameters,
            tokens_per_step=shown.tokens, gpus=rows, same_speed=self._same_speed(),
            warnings=[*self.notes, *self._other_hosts(), *self._too_close(rows)],
        )  # fmt: skip

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from lumos.report.html.notebook import gpus_snippet

        return gpus_snippet(self)

    def _best(self, rows: Sequence[GpuAnswer], key: str, less: bool) -> list[int]:
        """The rows with the best value of a key, among those that can run; none where there is nothing to compare."""
        values = {index: value for index, row in enumerate(rows) if (value := getattr(row, key)) is not None}
        known = {index: value for index, value in values.items() if self.runs[index].counts}
        if len(values) < 2 or not known:
            return []
        best = min(known.values()) if less else max(known.values())
        return [index for index, value in known.items() if abs(value - best) <= _AS_GOOD * best]

    def _same_speed(self) -> list[dict[str, Any]]:
        """The fewest of each GPU that train as fast as the first; None where none of the numbers does."""
        wanted, names = self._first_speed, list(dict.fromkeys(run.machine.label for run in self.runs))
        if len(names) == len(self.runs) or not wanted:
            return []
        found = []
        for name in names:
            runs = [run for run in self.runs if run.machine.label == name and run.counts]
            enough = [run for run in runs if (run.tokens_per_s or 0.0) >= wanted * (1 - _AS_GOOD)]
            least = min(enough, key=lambda run: run.gpus or 0, default=None)
            speed = None if least is None else least.tokens_per_s
            found.append({"gpu": name, "gpus": None if least is None else least.gpus, "tokens_per_s": speed})
        return found

    def _other_hosts(self) -> list[str]:
        """A note on GPUs whose hosts were measured, beside others: their steps differ by their hosts too."""
        speeds = {run.machine.label: _sampled_host(run) for run in self.runs if run.found and not run.found.is_of_cpu}
        if len(set(speeds.values())) < 2:
            return []
        sampled = [
            f"{label}: a sampled host, {speed:.2f} times as fast as a typical one"
            for label, speed in speeds.items()
            if speed is not None
        ]
        typical = [f"{label}: a typical host" for label, speed in speeds.items() if speed is None]
        return [f"hosts differ ({'; '.join([*sampled, *typical])}): where the host decides, ratios are of hosts too"]

    def _too_close(self, rows: Sequence[GpuAnswer]) -> list[str]:
        """A note on GPUs whose order predictions cannot tell."""
        off = float(read_table("uncertainty.json")["between_gpus"])
        speeds = {rows[i].label: rows[i].tokens_per_s for i, run in enumerate(self.runs) if run.counts}
        known = {label: speed for label, speed in speeds.items() if speed}
        fastest = max(known.values(), default=0.0)
        near = [label for label, speed in known.items() if speed * (1 + off) > fastest]
        if len(near) < 2:
            return []
        return [
            f"{', '.join(near[:-1])} and {near[-1]} are within {100 * off:.0f} % of the fastest: ratios between GPUs "
            "are off by as much on average, so their order is not certain"
        ]

    def _row(self, run: OnGpu) -> GpuAnswer:
        found, name, configuration = run.found, run.machine.label, dict(run.configuration)
        if found is None:
            return GpuAnswer(gpu=name, gpus=run.gpus, refused=run.refused)
        bill = {} if found.bill is None else found.bill.as_dict()
        memory, energy, first = found.memory, found.energy, self._first_speed
        parts, low_high = bound_ms(found), found.interval_ms
        costs: dict[str, Any] = {key: bill.get(key) for key in _OF_BILL}
        return GpuAnswer(
            gpu=name, gpus=found.setup.cluster.gpus if found.setup else None, step_ms=found.step_ms,
            interval_ms=low_high, tokens_per_s=run.tokens_per_s, tokens_per_s_per_gpu=found.tokens_per_s_per_gpu,
            speedup=run.tokens_per_s / first if first and run.tokens_per_s else None, mfu=found.mfu,
            peak_gib=None if memory is None else memory.peak / _GIB,
            reserve_gib=None if memory is None else memory.reserve / _GIB,
            available_gib=None if memory is None else memory.usable / _GIB,
            fits=found.fits, advice=_advice(found), energy_j=found.energy_j,
            power_limit_w=None if energy is None else _limit_w(run.machine, found),
            at_power_limit=None if energy is None else bool(energy.at_limit),
            bound_ms=parts, bound_by=max(parts, key=lambda name: parts[name]), operators=family_shares(found),
            costs_from=costs_from(found), source=found.source, configuration=configuration,
            warnings=found.warnings, **costs,
        )  # fmt: skip

    @cached_property
    def _first_speed(self) -> float | None:
        """Tokens per second of the first GPU that could be predicted, to which the others are compared."""
        return next((run.tokens_per_s for run in self.runs if run.found is not None), None)


def _limit_w(machine: Machine, found: Prediction) -> float:
    """The power limit of the board. What it draws when held there is a little less."""
    return (found.setup.cluster.accelerator if found.setup is not None else machine.gpu).tdp_w


def _sampled_host(run: OnGpu) -> float | None:
    """How fast the host is that was measured with this GPU, relative to a typical one; None where none was."""
    setup = None if run.found is None else run.found.setup
    path = (setup.cluster.model if setup else "") or run.machine.keys.get("model")
    machine = hardware_model(path) if path else None
    return machine.host_speed if machine and machine.section("host") else None


@checks_arguments
def compare_gpus(
    setup: Setup | Path | str, gpus: str | Sequence[str], *, tariff: Tariff = NO_PRICES,
    prices: Mapping[str, float] | None = None,
) -> GpuComparison:  # fmt: skip
    """The same run on several GPUs: known names, data sheets (`my_gpu.toml`) or model files (`my.npz`).

    `prices` are those of a GPU-hour by name, "" for all others; `tariff` has those of energy, and a token budget. A GPU
    on which the run is refused says why; where it is refused on all, OptionError is raised.

    >>> found = compare_gpus("run.toml", ["h100", "h200"])       # doctest: +SKIP
    >>> [(row.gpu, row.step_ms, row.bound_by) for row in found.answer.gpus]        # doctest: +SKIP
    """
    notes: tuple[str, ...] = ()
    if not isinstance(setup, Setup):
        setup, notes = read_setup_with_notes(setup)
    own, stated = setup.cluster.model or setup.cluster.gpu, setup.cluster.stated()
    machines = machines_named([gpus] if isinstance(gpus, str) else gpus)
    tariffs = tariffs_on(machines, tariff, prices or {})

    def on(machine: Machine) -> Prediction:
        again = {} if machine.name == own else {key: empty for key, empty in OF_GPU.items() if key in stated}
        again |= {"gpu": "", "model": ""}
        wanted = setup.replaced({f"cluster.{key}": value for key, value in (again | machine.keys).items()})
        check(wanted)
        return predict(wanted, tariff=tariffs[machine])

    return compared(machines, on, notes)


def compared(
    machines: Sequence[Machine],
    predict_on: Callable[[Machine], Prediction],
    notes: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> GpuComparison:
    """What `predict_on` says of each machine; a run that is refused on some of them says why there."""
    runs = []
    for done, machine in enumerate(machines):
        if progress is not None:
            progress(done, len(machines), f"predicting on {machine.label}")
        try:
            runs.append(OnGpu(machine, predict_on(machine)))
        except LumosError as error:
            runs.append(OnGpu(machine, refused=" ".join(str(error).splitlines())))
    if all(run.found is None for run in runs):
        reasons = dict.fromkeys(run.refused for run in runs)
        by_gpu = "; ".join(f"{run.machine.label}: {run.refused}" for run in runs)
        raise OptionError(next(iter(reasons)) if len(reasons) == 1 else f"refused on every GPU: {by_gpu}")
    return GpuComparison(tuple(runs), notes)


def plain_on(plain: PlainSetup, machine: Machine) -> tuple[PlainSetup, list[str]]:
    """The values of a setup file on another GPU, and the keys that were left out.

    What the file states of its own GPU (its memory, its links) says nothing of others; what --set states holds for all.
    """
    stated, given = plain.sections.get("cluster"), plain.overrides.get("cluster") or {}
    if not isinstance(stated, dict):
        stated = {}  # if there is something else, it is a mistake that the checks name
    own = stated.get("model") or stated.get("gpu")
    is_own = not isinstance(own, str) or machine_named(own).name == machine.name
    left_out = [] if is_own else [key for key in OF_GPU if key in stated and key not in given]
    others = () if "model" in given else ("model",)
    kept = {key: value for key, value in stated.items() if key not in (*left_out, "gpu", *others)}
    return plain._replace(sections=plain.sections | {"cluster": kept | machine.keys}), left_out


def tariffs_on(machines: Sequence[Machine], tariff: Tariff, prices: Mapping[str, float]) -> dict[Machine, Tariff]:
    """The tariff of each machine, with the price of a GPU-hour there; a price that is that of none is a mistake.

    The price is that of the machine's own name, of the GPU that its model file was measured on, of all others (""), or
    that on its data sheet.
    """
    check_prices(prices, [name for machine in machines for name in (machine.name, machine.gpu.name)])
    found = {}
    for machine in machines:
        usual = prices.get("", machine.gpu.price)
        price = prices.get(machine.name, prices.get(machine.gpu.name, usual))
        if prices and price is None:
            raise OptionError(
                f"--price has none for {machine.label}: give {machine.name}=NUMBER too, or one number for all"
            )
        found[machine] = tariff if price is None else replace(tariff, gpu_hour=price)
    return found


def bound_ms(found: Prediction) -> dict[str, float]:
    """What the step is spent on; the parts add up to it.

    Time in which the GPU computes is that of operators bound by compute or by memory bandwidth, in the proportion of
    those of the first rank. Network is communication that nothing hides; host and bubble are idle time: what a host
    without delay would save, and what is left.
    """
    parts, step_ms = found.breakdown, found.step_ms
    by_bound = {"compute": 0.0, "memory": 0.0}
    for row in found.all_operators:
        if row.bound in by_bound:
            by_bound[row.bound] += row.ms
    busy = parts.exposed_compute_ms + parts.overlapped_ms
    memory = busy * by_bound["memory"] / (sum(by_bound.values()) or 1.0)
    host = parts.other_ms
    if found.step is not None and found.step.plan.pp > 1:
        host = min(host, found.step.host_cost * step_ms)
    return {
        "compute": busy - memory, "memory": memory, "network": parts.exposed_comm_ms, "host": host,
        "bubble": parts.other_ms - host,
    }  # fmt: skip


def family_shares(found: Prediction) -> dict[str, float]:
    """Which share of the first rank's work each family of operators has, the largest first."""
    ms: dict[str, float] = {}
    for row in found.all_operators:
        name = next((name for name, kinds in _FAMILIES.items() if row.work.kind.startswith(kinds)), "elementwise")
        name = "collectives" if row.bound == "network" else name
        ms[name] = ms.get(name, 0.0) + row.ms
    total = sum(ms.values()) or 1.0
    return {name: value / total for name, value in sorted(ms.items(), key=lambda item: -item[1])}


def costs_from(found: Prediction) -> str:
    """Whose samples the times of operators come from, in words."""
    traced = found.source["measured"] + found.source["scaled"]
    model = None if found.costs is None else found.costs.model
    if traced >= 0.5 or model is None:
        return "the trace"
    whose = "the model file" if model.measured_on is not None else f"samples of {model.sampled}"
    return f"{whose}, scaled" if model.transferred else whose


def _advice(found: Prediction) -> str:
    """What to do where it does not fit."""
    if found.fits is not False or found.memory is None:
        return ""
    told = next((text for text in found.warnings if text.startswith("does not fit")), "")
    return told or shortage(found.memory)
