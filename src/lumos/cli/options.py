"""Options that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

TracePath = Annotated[Path, typer.Argument(help="A Kineto trace, or a folder with the ranks of one job.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="Also write it: .html, .json, .csv or .trace.json.gz (Perfetto).")
]
ProfilerCosts = Annotated[
    Path | None, typer.Option(help="A file of profiler costs or of lumos fit, in place of those measured on H200.")
]
Model = Annotated[
    Path | None, typer.Option(help="What lumos fit learnt of your machine; short for --set cluster.model=FILE.")
]

Price = Annotated[str, typer.Option(help="What a GPU-hour costs, in any currency: a number, or GPU=NUMBER,….")]
KwhPrice = Annotated[str, typer.Option(help="What a kilowatt-hour costs, where the GPU-hour does not include it.")]
Pue = Annotated[str, typer.Option(help="What the site draws for every kilowatt-hour of its GPUs, as in 1.2.")]
Tokens = Annotated[str, typer.Option(help="Tokens to train on, as in 15e12 or 15T: days, energy and money to it.")]

EngineName = Annotated[str, typer.Option("--engine", help="Where the work is done: local (processes), or ray.")]
Address = Annotated[str, typer.Option(help="The address of a Ray cluster; one is started here otherwise.")]
Workers = Annotated[int, typer.Option(help="Processes, or cores of the cluster; 0: as many as there are.")]
Shard = Annotated[str, typer.Option(help="I/N: the I-th of N parts of the work, to be put together by lumos merge.")]


@dataclass(frozen=True)
class TraceOptions:
    """How a trace named on the command line is read: options of every command that takes one."""

    step: Annotated[str, typer.Option(help="One step alone, by its number; all recorded steps otherwise.")] = ""
    match: Annotated[
        str, typer.Option(help="Only files of the folder whose names match this pattern, as in 'rank?.json'.")
    ] = ""
    rank_pattern: Annotated[
        str, typer.Option(help="Where the rank stands in a file's name: a regular expression, one group.")
    ] = ""
    engine: EngineName = "local"
    address: Address = ""


@dataclass(frozen=True)
class ReliabilityOptions:
    """How a run fails, and when it should have ended; `[reliability]` of a setup says more."""

    mtbf: Annotated[
        str | None,
        typer.Option(help="With --tokens: GPU-hours between failures, as in 50000, or published rates: llama3, …."),
    ] = None
    deadline: Annotated[
        str | None, typer.Option(help="With --tokens: days in which the run should end: how likely?")
    ] = None


@dataclass(frozen=True)
class RiskOptions:
    """How much steps differ, and what is slow; `[variability]` of a setup says more."""

    risk: Annotated[
        bool, typer.Option("--risk", help="Draw steps whose times differ: p50, p90, p99, and what makes them differ.")
    ] = False
    slow: Annotated[
        list[str] | None,
        typer.Option(help="rank=7,factor=1.3, or link=7,…, group=dp,…, share=0.01,… (of all GPUs). Repeatable."),
    ] = None
    draws: Annotated[int | None, typer.Option(help="Steps that --risk draws; 10,000 by default.")] = None
    variability: Annotated[
        Path | None,
        typer.Option(help="With --risk: learn how much times differ from a trace, an operation table or step times."),
    ] = None


def with_options_apart(command: Callable[..., None]) -> Callable[..., None]:
    """The same command for typer, which knows no groups: in place of one, it has the options of the group."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: one.annotation for name, one in signature.parameters.items() if is_dataclass(one.annotation)
    }
    parameters = []
    for name, one in signature.parameters.items():
        parameters += _options_of(groups[name]) if name in groups else [one.replace(kind=one.KEYWORD_ONLY)]

    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    run.__doc__ = command.__doc__
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _options_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in fields(group)]
