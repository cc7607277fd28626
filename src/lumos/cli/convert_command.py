"""`lumos convert`: a run in another form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lumos.analysis.replay import replay
from lumos.cli.anonymising import anonymised_answer, show_anonymised, wishes
from lumos.cli.loading import load_source
from lumos.cli.options import AsJson, TraceOptions
from lumos.cli.terminal import busy, deliver
from lumos.errors import InputError, OptionError
from lumos.export.chakra_writer import write_chakra
from lumos.export.chrome_traces import write_kineto, write_timeline
from lumos.export.kept_shapes import Arguments
from lumos.files import check_output, form_of
from lumos.graph.from_trace.build import Execution, build
from lumos.trace.read.execution_trace import Links, link, read_execution_trace
from lumos.trace.read.formats import Form, head_of
from lumos.trace.read.formats import form_of as form_of_file
from lumos.trace.read.job import rank_in_name
from lumos.trace.trace import Trace

FORMS = (".et", ".trace.json", ".trace.json.gz")
_RANK = "{rank}"
_OUTPUT = "NAME.et writes NAME.RANK.et; .trace.json[.gz], for Perfetto, one a rank with {rank}."


def convert_command(
    path: Annotated[
        Path, typer.Argument(help="A Kineto trace, a Chakra .et, a Nsight Systems .sqlite, or a folder of ranks.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help=_OUTPUT)],
    options: TraceOptions,
    as_json: AsJson = False,
    et: Annotated[
        Path | None, typer.Option("--et", help="The PyTorch execution trace of the same run, or a folder of them.")
    ] = None,
    fold_host: Annotated[
        bool, typer.Option("--fold-host", help="Chakra without the host: a chain of work a rank, and its transfers.")
    ] = False,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="Chakra with PyTorch's node of process groups; ASTRA-sim stops at it.")
    ] = False,
    anonymised: Annotated[
        bool, typer.Option("--anonymise", help="Without names, paths and times of day; says what is still shown.")
    ] = False,
    drop: Annotated[
        str, typer.Option("--drop", help="With --anonymise, leave out more: gpu, operators, sizes, times, by commas.")
    ] = "",
    keep: Annotated[
        str, typer.Option("--keep", help="With --anonymise: shapes, for predict --set; they show sizes of the model.")
    ] = "",
) -> None:
    """Write a run in another format: Chakra, Kineto or Perfetto.

    Chakra is for simulators; Perfetto shows all ranks in one view.
    """
    check_output(output, path, FORMS)
    _check_chakra_options(output, fold_host, metadata, et)
    wanted = wishes(anonymised, drop, keep, output)
    execution, links = _load(path, options, et)
    hidden = wanted.apply(execution, links, output)
    if hidden is not None:
        execution, links = hidden.execution, hidden.links
    with busy("writing"):
        if form_of(output, FORMS) == ".et":
            answer = _write_chakra(output, execution, links, metadata, fold_host)
        else:
            answer = _write(output, execution, links, {} if hidden is None else hidden.arguments)
    if hidden is not None:
        answer["anonymised"] = anonymised_answer(hidden, answer["files"], wanted)
    deliver(answer, _show, as_json)


def _show(answer: dict[str, Any], console: Console) -> None:
    for name, value in answer.items():
        if name == "anonymised":
            show_anonymised(value, console)
            continue
        shown = "\n".join(map(str, value)) if isinstance(value, list) else str(value)
        if shown:
            console.print(f"{name}: {shown}", highlight=False, markup=False, soft_wrap=True)


def _load(path: Path, options: TraceOptions, et: Path | None) -> tuple[Execution, Links | None]:
    source = load_source(path, options)
    if isinstance(source, Execution):
        if et is not None:
            raise OptionError(f"--et {et}: goes with the Kineto trace of the same run, and {path} is a Chakra graph")
        return source, None
    if et is None:
        return build(source), None
    files = _execution_traces(source, et)
    links = link(source, {rank: read_execution_trace(file) for rank, file in files.items()})
    return build(links.enrich(source)), links


def _execution_traces(trace: Trace, et: Path) -> dict[int, Path]:
    """The execution trace of every rank, by the rank in its name; a single one needs none."""
    if not et.exists():
        raise InputError(f"--et {et}: no such file or folder")
    inside = sorted(et.iterdir()) if et.is_dir() else [et]
    files = [file for file in inside if file.is_file() and form_of_file(file, head_of(file)) == Form.EXECUTION]
    if not files:
        raise InputError(f"--et {et}: no PyTorch execution trace; record one with torch.profiler's observer")
    if len(files) == 1 and len(trace.ranks) == 1:
        return {trace.ranks[0]: files[0]}
    by_rank = {rank_in_name(file): file for file in files}
    missing = [rank for rank in trace.ranks if rank not in by_rank]
    if missing:
        raise InputError(f"--et {et}: no execution trace of rank {missing[0]}, by the names of its {len(files)} files")
    return {rank: by_rank[rank] for rank in trace.ranks}


def _check_chakra_options(output: Path, fold_host: bool, metadata: bool, et: Path | None) -> None:
    """Refuse options that contradict each other, or the format."""
    given = [name for name, there in (("--fold-host", fold_host), ("--metadata", metadata)) if there]
    if given and form_of(output, FORMS) != ".et":
        raise OptionError(f"{given[0]}: shapes Chakra files; name one with -o NAME.et, not {output.name}")
    if len(given) > 1:
        raise OptionError("--fold-host and --metadata: files without the host are for ASTRA-sim, which stops at it")
    if fold_host and et is not None:
        raise OptionError(f"--et {et}: adds tensors to operators, which --fold-host leaves out; choose one of them")


def _write_chakra(
    output: Path, execution: Execution, links: Links | None, metadata: bool, fold_host: bool
) -> dict[str, Any]:
    found = write_chakra(output, execution, links, metadata, fold_host)
    counts: dict[str, Any] = {key: getattr(found, key) for key in ("nodes", "collectives", "messages", "groups")}
    counts["group_file"] = "" if found.group_file is None else str(found.group_file)
    return _answer(found.files, execution, links, found.warnings, counts)


def _write(
    output: Path, execution: Execution, links: Links | None, arguments: dict[int, dict[int, Arguments]]
) -> dict[str, Any]:
    """A timeline: one file with all ranks, or one a rank."""
    trace = execution.trace
    if len(trace.ranks) > 1 and _RANK not in output.name:
        files = [output]
        write_timeline(output, replay(execution).run)  # all ranks in one file, with arrows; it is for looking at
    else:
        files = [output.with_name(output.name.replace(_RANK, str(rank))) for rank in trace.ranks]
        for file, rank in zip(files, trace.ranks, strict=True):
            write_kineto(file, trace, rank, arguments.get(rank, {}))
    return _answer(files, execution, links, [], {})


def _answer(
    files: list[Path], execution: Execution, links: Links | None, warnings: list[str], counts: dict[str, Any]
) -> dict[str, Any]:
    """What was written."""
    trace = execution.trace
    notes = [] if links is None else [f"{len(links.by_row):,} operators linked with execution traces", *links.notes]
    answer = {"files": [str(file) for file in files], "ranks": len(trace.ranks), "events": len(trace), **counts}
    return answer | {"notes": notes, "warnings": [*execution.warnings, *warnings]}
