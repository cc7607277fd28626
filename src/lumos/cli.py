"""The command line: arguments in, answers out. What is wrong ends in one line and exit code 2."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from lumos.errors import LumosError, OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from lumos.readers.worker import Readers
    from lumos.run import Replay
    from lumos.setups import SetupReading

_WORTH_A_PROCESS = 1 << 20  # bytes on disk
_WORTH_SEVERAL = 4 << 20

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Tells what an LLM training run will do before you pay for it.",
)

TracePath = Annotated[Path, typer.Argument(help="A Kineto trace, or a folder with the ranks of one job.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="Also write it: .json, .csv, .trace.json.gz (for Perfetto).")
]
Match = Annotated[
    str, typer.Option(help="Only files of the folder whose names match this pattern, as in 'rank?.json'.")
]
RankPattern = Annotated[
    str, typer.Option(help="Where the rank stands in a file's name: a regular expression, one group.")
]
Step = Annotated[str, typer.Option(help="One step alone, by its number; all recorded steps otherwise.")]
ProfilerCosts = Annotated[
    Path | None, typer.Option(help="A file of profiler costs, in place of those measured on H200.")
]

Model = Annotated[Path | None, typer.Option(help="A cost model that lumos fit wrote, in place of those shipped.")]


@app.command("replay")
def replay_command(
    path: TracePath,
    as_json: AsJson = False,
    output: Output = None,
    step: Step = "",
    match: Match = "",
    rank_pattern: RankPattern = "",
    profiler_costs: ProfilerCosts = None,
) -> None:
    """Is the graph right, and where does the time go?"""
    from lumos.output.files import check_output

    check_output(output, path)
    run = _load(path, step, match, rank_pattern, profiler_costs)
    if output is not None:
        _write_replay(run, output)
    if as_json:
        _print_json(run.as_dict())
    else:
        from lumos.output.tables import show_replay

        show_replay(run, _console())


@app.command("predict")
def predict_command(
    setup: Annotated[
        Path | None, typer.Argument(help="The run: a setup (TOML), a Hugging Face config.json, a Megatron script.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="The trace, or the folder of ranks, of the run to start from.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="SECTION.KEY=VALUE of the setup, as in parallel.tp=4. Repeatable.")
    ] = None,
    scale: Annotated[
        list[str] | None, typer.Option(help="WHAT=FACTOR on durations: compute, comm, cpu, kernel:REGEX. Repeatable.")
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
    step: Step = "",
    match: Match = "",
    rank_pattern: RankPattern = "",
    profiler_costs: ProfilerCosts = None,
) -> None:
    """What would this run do: from its description, or from a trace of it with some parts faster or slower?"""
    from lumos.output.files import check_output

    check_output(output, source or setup)
    if source is None:
        if step or match or rank_pattern or profiler_costs:
            raise OptionError("--step, --match, --rank-pattern and --profiler-costs work on a trace: add --from")
        _forecast(setup, changes or [], scale or [], as_json, output)
        return
    if setup is None and changes:
        raise OptionError("--set with --from needs the traced run's setup: lumos predict SETUP --from PATH --set …")
    if setup is not None and scale:
        raise OptionError("--scale and a setup together: change the setup with --set, or leave it out and use --scale")
    if setup is not None:
        readings = _readings(setup, changes or [])
        run = _load(source, step, match, rank_pattern, profiler_costs)
        _predict_changed(run, *readings, as_json, output)
        return
    _predict_from(_load(source, step, match, rank_pattern, profiler_costs), scale or [], as_json, output)


def _readings(setup: Path, changes: list[str]) -> tuple[SetupReading, SetupReading]:
    """The setup of the traced run, and the changed one."""
    from lumos.setups import read_setup_with_notes

    return read_setup_with_notes(setup), read_setup_with_notes(setup, changes)


def _predict_changed(
    run: Replay, traced: SetupReading, wanted: SetupReading, as_json: bool, output: Path | None
) -> None:
    from lumos.anchors.edit import Source, change
    from lumos.output.changes import show_change
    from lumos.output.files import write_as, write_csv, write_json
    from lumos.output.forecasts import write_forecast_trace

    found = change(Source(run, traced.setup), wanted.setup, tuple(wanted.notes))
    answer = found.as_dict()
    if output is not None:
        row = {k: v for k, v in answer.items() if isinstance(v, float | bool)} | answer["breakdown"]
        write_as(
            output,
            {
                ".json": lambda to: write_json(to, answer),
                ".csv": lambda to: write_csv(to, [row]),
                ".trace.json": lambda to: write_forecast_trace(to, found.forecast),
                ".trace.json.gz": lambda to: write_forecast_trace(to, found.forecast),
            },
        )
    if as_json:
        _print_json(answer)
    else:
        show_change(found, _console())


def _forecast(setup: Path | None, changes: list[str], scale: list[str], as_json: bool, output: Path | None) -> None:
    from lumos.forecast import forecast
    from lumos.output.files import write_as, write_csv, write_json
    from lumos.output.forecasts import show_forecast, write_forecast_trace
    from lumos.setups import read_setup_with_notes

    if setup is None:
        raise OptionError("nothing to predict: name a setup file, or a trace with --from")
    if scale:
        raise OptionError("--scale works on a trace: add --from, or change the setup with --set")
    reading = read_setup_with_notes(setup, changes)
    found = forecast(reading.setup, tuple(reading.notes))
    answer = found.as_dict()
    if output is not None:
        row = {k: v for k, v in answer.items() if isinstance(v, float | bool)} | answer["breakdown"]
        write_as(
            output,
            {
                ".json": lambda to: write_json(to, answer),
                ".csv": lambda to: write_csv(to, [row]),
                ".trace.json": lambda to: write_forecast_trace(to, found),
                ".trace.json.gz": lambda to: write_forecast_trace(to, found),
            },
        )
    if as_json:
        _print_json(answer)
    else:
        show_forecast(found, _console())


def _predict_from(run: Replay, scale: list[str], as_json: bool, output: Path | None) -> None:
    from lumos.output.files import write_as, write_csv, write_json
    from lumos.run import predict
    from lumos.scenario import Scale

    prediction = predict(run, [Scale.parse(text) for text in scale])
    answer = prediction.as_dict()
    if output is not None:
        from lumos.output.perfetto import write_perfetto

        def perfetto(to: Path) -> None:
            write_perfetto(to, run.execution, run.clean_graph, prediction.times, prediction.trace)

        row = {k: v for k, v in answer.items() if isinstance(v, float)} | answer["breakdown"]
        write_as(
            output,
            {
                ".json": lambda to: write_json(to, answer),
                ".csv": lambda to: write_csv(to, [row]),
                ".trace.json": perfetto,
                ".trace.json.gz": perfetto,
            },
        )
    if as_json:
        _print_json(answer)
    else:
        from lumos.output.tables import show_prediction

        show_prediction(prediction, _console())


@app.command("compare")
def compare_command(
    before: Annotated[Path, typer.Argument(help="The trace, or the folder of ranks, of a run.")],
    after: Annotated[Path, typer.Argument(help="The same of another.")],
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write it: .json or .csv.")] = None,
    step: Step = "",
    match: Match = "",
    rank_pattern: RankPattern = "",
) -> None:
    """Why does one run take longer than another: by part of the step, operator and collective?"""
    from lumos.output.comparisons import show_comparison
    from lumos.output.files import check_output, write_as, write_csv, write_json
    from lumos.reports.comparison import Comparison

    check_output(output, before, (".json", ".csv"))
    check_output(output, after, (".json", ".csv"))
    found = Comparison(*(_load(path, step, match, rank_pattern, None) for path in (before, after)))
    answer = found.as_dict()
    if output is not None:
        rows = [{"table": name} | row for name in ("parts", "operators", "collectives") for row in answer[name]]
        write_as(output, {".json": lambda to: write_json(to, answer), ".csv": lambda to: write_csv(to, rows)})
    if as_json:
        _print_json(answer)
    else:
        show_comparison(found, _console())


@app.command("score")
def score_command(
    table: Annotated[Path, typer.Argument(help="Measured runs: a CSV table, one row a run (docs/scoring.md).")],
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also write id, measured, predicted: .csv or .json.")
    ] = None,
) -> None:
    """How good are the predictions on measured runs?"""
    from lumos.output.files import check_output, write_as, write_csv, write_json
    from lumos.output.forecasts import show_score
    from lumos.scoring.runs import read_rows
    from lumos.scoring.score import score

    check_output(output, table, (".json", ".csv"))
    rows = read_rows(table)
    with _progress() as progress:
        found = score(rows, progress)
    if output is not None:
        writers = {".csv": lambda to: write_csv(to, found.table()), ".json": lambda to: write_json(to, found.as_dict())}
        write_as(output, writers)
    if as_json:
        _print_json(found.as_dict())
    else:
        show_score(found, _console())


@app.command("cost")
def cost_command(
    rows: Annotated[Path, typer.Argument(help="JSON: a list of operators, or an object with one as rows. - is stdin.")],
    gpu: Annotated[str, typer.Option(help="The GPU's name, as in h200; that of --model otherwise.")] = "",
    model: Model = None,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write it: .json or .csv.")] = None,
) -> None:
    """What do single operators cost, alone and from a cold cache?

    \b
    A row is {"op": NAME, its sizes, "dtype": bf16, fp16, fp32, tf32 or fp8}; bf16 where none is given. Names and sizes:
      gemm                                    m n k, and layout TN (forward), NN or NT (gradients of input, weight)
      bmm                                     b h s d: the scores of unfused attention
      grouped_gemm                            e t n k: t tokens over e experts
      sdpa_fwd sdpa_bwd                       b h s d: causal flash attention
      rotary_fwd rotary_bwd                   b h s d
      softmax_fwd softmax_bwd                 b h s
      rms_norm layer_norm gelu silu           t h, and the same with _bwd
      norm_eager_fwd norm_eager_bwd           t h: RMS norm of several kernels
      mul add copy cast_f32 permute           t h
      cross_entropy cross_entropy_bwd         t v
      embedding embedding_bwd                 t v h
      adamw_fused                             n
      neox_...                                what GPT-NeoX runs for it, sizes as above; optimizers: layers width ranks
    """
    from lumos.output.files import check_output, write_as, write_csv, write_json

    check_output(output, rows, (".json", ".csv"))
    answer = _priced(rows, gpu, model)
    if output is not None:
        csv = (answer["rows"], ("us", "bound"))
        write_as(output, {".json": lambda to: write_json(to, answer), ".csv": lambda to: write_csv(to, *csv)})
    if as_json:
        _print_json(answer)
    else:
        from lumos.output.costs import show_costs

        show_costs(answer, _console())


def _priced(path: Path, gpu: str, model: Path | None) -> dict[str, Any]:
    from lumos.costs.model import cost_model, read_cost_model
    from lumos.fitting.rows import operators_of, read_rows
    from lumos.output.costs import cost_answer

    if not gpu and model is None:
        raise OptionError("--gpu is missing: give a name, as in --gpu h200, or a --model file")
    costs = cost_model(gpu) if model is None else read_cost_model(model, gpu)
    rows = read_rows(path)
    return cost_answer(costs, rows, operators_of(rows, str(path)))


@app.command("sample")
def sample_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="The .jsonl file that rows are added to.")],
    scale: Annotated[float, typer.Option(help="How many shapes: a factor on the usual number.")] = 1.0,
    only: Annotated[str, typer.Option(help="Only these operators or collectives, with commas.")] = "",
    seconds: Annotated[float, typer.Option(help="Stop after so long; the same command goes on from there.")] = math.inf,
    seed: Annotated[int, typer.Option(help="Other shapes for another number.")] = 0,
    collectives: Annotated[
        bool | None, typer.Option(help="Collectives of this machine's GPUs too; so where there are several.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure operators on the GPU of this machine (needs torch), to be fitted."""
    from lumos.output.costs import sample_answer, show_samples
    from lumos.output.files import check_output
    from lumos.sampling.sampler import Wish, sample_machine, visible_gpus

    check_output(output, None, (".jsonl",))
    names = frozenset(name.strip() for name in only.split(",") if name.strip())
    wish = Wish(scale, names, seed, seconds, gpus=2).checked()
    gpus = visible_gpus() if collectives is not False else 1
    if collectives and gpus < 2:
        raise OptionError("--collectives needs more than one GPU with NCCL, and torch sees no more than one here")
    with _progress() as progress:
        done = sample_machine(wish._replace(gpus=gpus).checked(), output, progress)
    answer = sample_answer(output, *done)
    if as_json:
        _print_json(answer)
    else:
        show_samples(answer, _console())


@app.command("fit")
def fit_command(
    samples: Annotated[Path, typer.Argument(help="A file that lumos sample wrote.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .npz file to write, for lumos cost --model.")],
    gpu: Annotated[str, typer.Option(help="The GPU, in place of the one that the samples name.")] = "",
    as_json: AsJson = False,
) -> None:
    """Turn samples into a cost model (needs the extra [fit])."""
    from lumos.output.costs import show_fit
    from lumos.output.files import check_output

    check_output(output, samples, (".npz",))
    answer = _fitted(samples, output, gpu)
    if as_json:
        _print_json(answer)
    else:
        show_fit(answer, _console())


def _fitted(path: Path, output: Path, asked: str) -> dict[str, Any]:
    from lumos.costs.model import encode
    from lumos.fitting.boosting import regressor
    from lumos.fitting.fit import fit, sampled_gpu
    from lumos.fitting.samples import read_samples
    from lumos.output.costs import fit_answer
    from lumos.output.files import whole_file

    regressor()  # without it, reading samples would be in vain
    name, samples = read_samples(path)
    gpu = sampled_gpu(path, name, asked)
    with _progress() as progress:
        regressors, verdicts = fit(gpu, samples, progress)
    answer = fit_answer(path, gpu.name, output, verdicts)
    with whole_file(output) as file:
        file.write(encode(gpu.name, regressors))
    return answer


@app.command("demo")
def demo_command(as_json: AsJson = False, output: Output = None) -> None:
    """Replay the example in the package: four ranks that trained on one H200, one of them slow."""
    from lumos.example import example_path

    with example_path() as path:
        replay_command(path, as_json=as_json, output=output)


def _load(path: Path, step: str, match: str, rank_pattern: str, profiler_costs: Path | None) -> Replay:
    with _readers_for(path) as started:
        return _load_with(started, path, step, match, rank_pattern, profiler_costs)


def _load_with(
    started: Readers | None, path: Path, step: str, match: str, rank_pattern: str, profiler_costs: Path | None
) -> Replay:
    from lumos.profiler import load_profiler_cost
    from lumos.readers.job import read_job
    from lumos.run import replay
    from lumos.steps import keep_step

    cost = load_profiler_cost(profiler_costs)
    with _progress() as progress:
        trace = read_job(path, match, rank_pattern, progress, started=started, meanwhile=_load_kernels)
    with _busy("building and simulating; the first run also compiles, for some seconds"):
        run = replay(keep_step(trace, step) if step else trace, cost)
        _ = run.path_summary, run.clean_ms, run.never_profiled_ms  # what takes time; it is kept for what is shown
    return run


@contextmanager
def _readers_for(path: Path) -> Iterator[Readers | None]:
    """Processes for reading what is large, started before this one imports what it needs itself."""
    from lumos.readers.worker import readers

    try:
        files = path.iterdir() if path.is_dir() else [path]
        size = sum(f.stat().st_size for f in files)
    except OSError:
        size = 0  # reading it will say what is wrong
    if size < _WORTH_A_PROCESS:
        yield None
        return
    cores = os.cpu_count() or 1
    with readers(1 if path.is_file() and size < _WORTH_SEVERAL else cores) as started:
        yield started


def _load_kernels() -> None:
    from lumos.kernels import load

    load()


def _write_replay(run: Replay, output: Path) -> None:
    from lumos.output.files import write_as, write_csv, write_json
    from lumos.output.perfetto import write_perfetto

    def perfetto(to: Path) -> None:
        write_perfetto(to, run.execution, run.execution.graph, run.times, run.simulated, run.path)

    write_as(
        output,
        {
            ".json": lambda to: write_json(to, run.as_dict()),
            ".csv": lambda to: write_csv(to, run.as_dict()["per_rank"]),
            ".trace.json": perfetto,
            ".trace.json.gz": perfetto,
        },
    )


class Reporter(Protocol):
    """Is told how much is done, of how much, and what is at work."""

    def __call__(self, done: int, total: int, what: str = "reading") -> None: ...


@contextmanager
def _progress() -> Iterator[Reporter | None]:
    """A progress bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def show(done: int, total: int, what: str = "reading") -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield show


@contextmanager
def _busy(text: str) -> Iterator[None]:
    """A sign of life on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def _print_json(answer: dict[str, object]) -> None:
    import orjson

    sys.stdout.buffer.write(orjson.dumps(answer, option=orjson.OPT_INDENT_2) + b"\n")


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 140)


def main() -> None:
    """The entry point of `lumos`."""
    try:
        app()
    except LumosError as error:
        sys.stderr.write(f"lumos: {error}\n")
        sys.exit(2)
    except MemoryError:
        sys.stderr.write("lumos: out of memory; read fewer ranks with --match, or record fewer steps\n")
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(0)
    except KeyboardInterrupt:
        sys.stderr.write("lumos: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
