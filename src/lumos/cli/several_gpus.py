"""`lumos predict --gpu A,B`: one run on several GPUs, from whatever it is predicted from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lumos.cli.prediction_sources import Source
from lumos.cli.terminal import deliver, progress_bar
from lumos.errors import OptionError
from lumos.files import write_csv
from lumos.prediction.bill import Tariff
from lumos.prediction.gpu_comparison import GpuComparison, Machine, compared, machines_named, tariffs_on
from lumos.report.gpu_comparisons import flat_rows
from lumos.report.terminal.show_searches import show_gpus

_UNNAMED = "--gpu names none: give a GPU, as in h200, or a file that describes one; several with commas"
COMPARED = (".html", ".json", ".csv")  # formats of a comparison


def listed_gpus(text: str | None) -> list[str]:
    """The names in --gpu; none where it is not given, a mistake where it is and has none."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if text is not None and not names:
        raise OptionError(_UNNAMED)
    return names


def compare_sources(run: Source, names: Sequence[str], tariff: Tariff, prices: Mapping[str, float]) -> GpuComparison:
    """One run on each of the named GPUs."""
    machines = machines_named(names)
    if len(machines) < 2:
        once = machines[0].name
        raise OptionError(f"--gpu {','.join(names)[:100]} names one GPU only: add another, or name {once} once")
    tariffs = tariffs_on(machines, tariff, prices)
    with progress_bar() as progress:
        return compared(machines, lambda machine: run.on(machine, tariffs[machine]), _notes(run, machines), progress)


def _notes(run: Source, machines: Sequence[Machine]) -> tuple[str, ...]:
    keys = list(dict.fromkeys(key for machine in machines for key in run.left_out(machine)))
    if not keys:
        return ()
    shown = ", ".join(f"cluster.{key}" for key in keys)
    return (f"{shown}: stated for the setup's own GPU, so the others have their usual values; --set holds for all",)


def deliver_comparison(found: GpuComparison, as_json: bool, output: Path | None) -> None:
    """As tables, as JSON, and as the file that was asked for."""
    answer = found.as_dict()
    deliver(answer, show_gpus, as_json, output, {
        ".csv": lambda to: write_csv(to, flat_rows(answer)),
        ".html": lambda to: _write_page(to, answer),
    })  # fmt: skip


def _write_page(path: Path, answer: dict[str, object]) -> None:
    from lumos.report.html.gpu_page import gpu_page  # jinja2, for which an answer without a page does not wait
    from lumos.report.html.page import write_page

    write_page(path, gpu_page(answer))
