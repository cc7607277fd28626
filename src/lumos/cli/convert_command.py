"""`lumos convert`: a run in another form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lumos.analysis.replay import replay
from lumos.cli.anonymising import anonymised_answer, show_anonymised, wishes
from lumos.cli.chakra_output import ChakraWishes, show_written, write_execution, write_prediction
from lumos.cli.loading import load_source
from lumos.cli.options import AsJson, TraceOptions
from lumos.cli.prediction_sources import Described, OfConfig, OfScript, Source
from lumos.cli.terminal import deliver
from lumos.dry_run.dry_files import dry_files
from lumos.errors import InputError, OptionError
from lumos.export.chrome_traces import write_kineto, write_timeline
from lumos.files import check_output, form_of
from lumos.graph.rules.build import Execution, build
from lumos.prediction.bill import Tariff
from lumos.read.execution_trace import Links, link, read_execution_trace
from lumos.read.formats import Form, head_of
from lumos.read.formats import form_of as form_of_file
from lumos.read.job import rank_in_name
from lumos.trace.trace import Trace

FORMS = (".et", ".trace.json", ".trace.json.gz")
_RANK = "{rank}"
_OUTPUT = "NAME.et writes NAME.RANK.et; .trace.json[.gz], for Perfetto, one a rank with {rank}."


def convert_command(
    path: Annotated[Path, typer.Argument(help="A trace, a folder of ranks, a setup, a config.json, or a dry run.")],
    output: Annotated[Path, typer.Option("-o", "--output", help=_OUTPUT)],
    options: TraceOptions,
    as_json: AsJson = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="SECTION.KEY=VALUE of a setup or dry run. Repeatable.")
    ] = None,
    et: Annotated[
        Path | None, typer.Option("--et", help="The PyTorch execution trace of the same run, or a folder of them.")
    ] = None,
    simulator: Annotated[
        str, typer.Option("--for", help="astra-sim: Chakra with all files it needs, and the command that runs it.")
    ] = "",
    fold_host: Annotated[
        bool, typer.Option("--fold-host", help="Chakra without the host: a chain of work a rank, and its transfers.")
    ] = False,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="Chakra with PyTorch's node of process groups; ASTRA-sim stops at it.")
    ] = False,
    operators: Annotated[
        bool, typer.Option("--operators", help="Chakra of a description, with every operator as a node of its own.")
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
    chakra = ChakraWishes(simulator, fold_host, metadata, operators)
    chakra.check(output)
    wanted = wishes(anonymised, drop, keep, output)
    if (source := _predictable(path, changes or [])) is not None:
        _refuse_for_predicted(path, options, et, anonymised)
        deliver(_write_predicted(output, source, chakra), show_written, as_json)
        return
    if changes:
        raise OptionError(f"--set: {path} is a trace; lumos predict --from {path} --set … -o {output} changes it")
    execution, links = _load(path, options, et, "shapes" in wanted.keep)
    hidden = wanted.apply(execution, links, output)
    if hidden is not None:
        execution, links = hidden.execution, hidden.links
    if form_of(output, FORMS) == ".et":
        answer = _answer(execution, links, write_execution(output, execution, chakra, links))
    else:
        answer = _write(output, execution, links)
    if hidden is not None:
        answer["anonymised"] = anonymised_answer(hidden, answer["files"], wanted)
    deliver(answer, _show, as_json)


def _show(answer: dict[str, Any], console: Console) -> None:
    show_written({name: value for name, value in answer.items() if name != "anonymised"}, console)
    if "anonymised" in answer:
        show_anonymised(answer["anonymised"], console)


def _predictable(path: Path, changes: list[str]) -> Source | None:
    """What is no trace: a dry run, or a file that describes a run."""
    if dry_files(path):
        return OfScript(path, changes)
    if not path.is_file() or form_of_file(path, head_of(path)) != Form.OTHER:
        return None
    return OfConfig(path, changes) if path.suffix.lower() == ".json" else Described(path, changes)


def _refuse_for_predicted(path: Path, options: TraceOptions, et: Path | None, anonymised: bool) -> None:
    given = {"--et": et, "--anonymise": anonymised, "--step": options.step, "--match": options.match,
             "--rank-pattern": options.rank_pattern}  # fmt: skip
    wrong = next((name for name, value in given.items() if value), "")
    if wrong:
        raise OptionError(f"{wrong}: works on a trace, and {path} is none; leave it out")


def _write_predicted(output: Path, source: Source, chakra: ChakraWishes) -> dict[str, Any]:
    found = source.on(None, Tariff())
    if form_of(output, FORMS) == ".et":
        answer = write_prediction(output, found, chakra)
        warnings = [*answer.pop("warnings"), *found.warnings]
        return answer | {"step_ms": found.step_ms, "warnings": warnings}
    write_timeline(output, found.run)
    return {"files": [str(output)], "step_ms": found.step_ms, "warnings": found.warnings}


def _load(path: Path, options: TraceOptions, et: Path | None, shapes: bool) -> tuple[Execution, Links | None]:
    source = load_source(path, options, operators=shapes)
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


def _write(output: Path, execution: Execution, links: Links | None) -> dict[str, Any]:
    """A timeline: one file with all ranks, or one a rank."""
    trace = execution.trace
    if len(trace.ranks) > 1 and _RANK not in output.name:
        files = [output]
        write_timeline(output, replay(execution).run)  # all ranks in one file, with arrows; it is for looking at
    else:
        files = [output.with_name(output.name.replace(_RANK, str(rank))) for rank in trace.ranks]
        for file, rank in zip(files, trace.ranks, strict=True):
            write_kineto(file, trace, rank)
    return _answer(execution, links, {"files": [str(file) for file in files], "warnings": []})


def _answer(execution: Execution, links: Links | None, written: dict[str, Any]) -> dict[str, Any]:
    """What was written, and what of."""
    trace = execution.trace
    notes = [] if links is None else [f"{len(links.by_row):,} operators linked with execution traces", *links.notes]
    answer = {"files": written["files"], "ranks": len(trace.ranks), "events": len(trace)}
    answer |= {name: value for name, value in written.items() if name != "warnings"}
    return answer | {"notes": notes, "warnings": [*execution.warnings, *written["warnings"]]}
