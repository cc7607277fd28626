"""Read every file of the shared measurements, round-trip jobs through Chakra and Kineto, and write docs/files.md.

    python benchmarks/files.py [--data ../shared/data] [-o docs/files.md]

A file is read, with what it holds, or refused, with the reason that a user would see.
"""

from __future__ import annotations

import argparse
import re
import tarfile
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from lumos.analysis.replay import Replay, replay
from lumos.chakra.file_format import read_chakra_file
from lumos.chakra.foreign_graph import foreign_execution
from lumos.chakra.run_writer import write_chakra
from lumos.errors import LumosError
from lumos.export.chrome_traces import write_kineto
from lumos.graph.rules.build import Execution, build
from lumos.graph.scaling import Scale
from lumos.prediction.prediction import predict
from lumos.read.execution_trace import link, read_execution_trace
from lumos.read.formats import Form, form_of, head_of
from lumos.read.job import read_job
from lumos.trace.steps import find_steps
from lumos.trace.trace import Trace

INTRODUCTION = """# Every file at hand

Written by `benchmarks/files.py`. A file is read, with what it holds, or refused, with the reason that a user sees.
`step` is the mean over the recorded steps and ranks, or the whole of a file that marks none. Of a collective or message
every rank counts its own kernel. A Chakra file of others does not say when its nodes ran; its step is that of running
its graph once. Linked operators of an execution trace are those found, in the same order, in the Kineto trace of the
same run.
"""
THERE_AND_BACK = """Jobs written as Chakra and as Kineto and read again, against the first replay, in percent: of the
step / of the step with kernels twice as fast. *Bare Chakra* is the whole run from the same files without the attributes
of Lumos, run as a simulator of others would: no gaps between kernels, no lags, and one thread, one kernel and one
collective at a time on a rank. That is what puts torchrec off: its threads, which run side by side, queue for one CPU
(tried by hand: with a lane for every thread the two worst are off by 8 and 1). Of pp4_mb8 the turns
of its ranks on one GPU are lost, dp2_tp2_l8 overlaps collectives that take turns there ([Lumos and
ASTRA-sim](astra_sim.md)). *Plain* are communication kernels whose size, peer or counterpart the trace does not have;
they are plain work in Chakra. Of megatron_tp8_a100, `--et` with its execution traces gives all 672 their sizes.
"""
JOBS = (
    "h200/multirank/pp2_mb4", "h200/multirank/tp2_l8", "h200/multirank/fsdp2_l8", "h200/multirank/ddp2_l8",
    "h200/multirank/ddp2_l16", "h200/multirank/dp2_tp2_l8", "h200/multirank/pp4_mb8",
    "public/megatron_tp8_a100/kineto", "public/sglang_decode_b200", "public/torchrec_v100/resnet18",
    "public/torchrec_v100/sst_long_a2a_optimizer_3", "public/torchrec_v100/sst_long_a2a_optimizer_4",
    "public/torchrec_v100/sst_sleep_pl_dense_after_backward_2",
)  # fmt: skip
TWINS = {
    "public/param/linear_et.json.gz": "public/param/linear_kineto.json.gz",
    "public/param/resnet_et.json.gz": "public/param/resnet_kineto.json.gz",
}


def describe(path: Path, shown: str, data: Path) -> list[str]:
    """The rows of a file; an archive has one for itself and one for each member."""
    form = form_of(path, head_of(path))
    if form == Form.ARCHIVE:
        return [f"| {shown} | refused | {refusal(path)} |", *members(path, shown, data)]
    if form == Form.EXECUTION:
        return [f"| {shown} | execution trace | {execution_trace(path, shown, data)} |"]
    try:
        return [f"| {shown} | {form.name.lower()} | {figures(read_job(path))} |"]
    except LumosError as error:
        return [f"| {shown} | refused | {reason(error, path)} |"]


def refusal(path: Path) -> str:
    try:
        read_job(path)
    except LumosError as error:
        return reason(error, path)
    raise AssertionError(f"{path} should have been refused")


def reason(error: LumosError, path: Path) -> str:
    return str(error).replace(f"{path}: ", "").replace(str(path.parent) + "/", "").replace("|", "\\|")


def members(path: Path, shown: str, data: Path) -> list[str]:
    rows = []
    with tempfile.TemporaryDirectory() as folder, tarfile.open(path) as archive:
        for number, member in enumerate(sorted(archive.getmembers(), key=lambda m: m.name)):
            content = archive.extractfile(member) if member.isfile() else None  # never a link, never a path of its own
            if content is not None:
                file = Path(folder) / str(number) / Path(member.name).name
                file.parent.mkdir()
                file.write_bytes(content.read())
                rows += describe(file, f"{shown} → {file.name}", data)
    return rows


def figures(job: Trace | Execution) -> str:
    """What a run holds."""
    trace = job.trace if isinstance(job, Execution) else job
    steps = find_steps(trace).read(trace)
    count = Counter(trace.collective_of(row) for row in np.flatnonzero(trace.is_communication).tolist())
    communication = ", ".join(f"{n} {name}" for name, n in count.most_common())
    facts = [
        f"rank {trace.ranks[0]}" if len(trace.ranks) == 1 else f"{len(trace.ranks)} ranks",
        f"{len(trace):,} events",
        f"{int(trace.on_gpu.sum()):,} on GPUs",
        f"{len(steps.names)} step(s) of {steps.mean:,.2f} ms",
        communication or "no communication kernels",
    ]
    if isinstance(job, Execution):
        facts.append(f"{len(job.graph):,} nodes, {len(job.graph.edges):,} edges between lanes")
    return "; ".join(facts)


def execution_trace(path: Path, shown: str, data: Path) -> str:
    """What an execution trace holds, and how much of it its Kineto twin has."""
    try:
        found = read_execution_trace(path)
    except LumosError as error:
        return f"refused: {reason(error, path)}"
    facts = f"schema {found.schema}; {found.count:,} operators on {len(found.threads)} thread(s)"
    messages = Counter(o.message.collective for t in found.threads.values() for o in t if o.message)
    facts += "".join(f"; {n} {name}" for name, n in messages.most_common())
    twin = twin_of(shown, data)
    if twin is None:
        return f"{facts}; no times, and no Kineto trace of the same run is here: refused for replay"
    try:
        trace = read_job(twin)
        assert isinstance(trace, Trace)
        linked = link(trace, {trace.ranks[0]: found})
    except LumosError as error:
        return f"{facts}; refused with {twin.name}: {reason(error, path)}"
    notes = "".join(f" ({note.split(': ', 1)[-1]})" for note in linked.notes)
    crossing = len(linked.data_edges(build(trace).nodes))
    return f"{facts}; {len(linked.by_row):,} linked with {twin.name}{notes}; {crossing} tensors pass between streams"


def twin_of(shown: str, data: Path) -> Path | None:
    named = TWINS.get(shown) or re.sub(r"/et/(rank\d+)\.et\.json", r"/kineto/\1.json", shown)
    if named == shown:
        named = shown.replace(".et.json", ".with_et.pt.trace.json")
    return data / named if named != shown and (data / named).is_file() else None


def round_trip(folder: Path, shown: str) -> str:
    """A job written as Chakra and as Kineto, and read again."""
    before = replay(read_job(folder))
    with tempfile.TemporaryDirectory() as chakra, tempfile.TemporaryDirectory() as kineto:
        written = write_chakra(Path(chakra) / "job.et", before.execution)
        for rank in before.execution.trace.ranks:
            write_kineto(Path(kineto) / f"rank{rank}.trace.json.gz", before.execution.trace, rank)
        after = [replay(read_job(Path(where))) for where in (chakra, kineto)]
        plainly = as_others_read(written.files)
    off = [f"{error(before, run)} / {what_if_error(before, run)}" for run in after]
    left = sum(int(w.split()[0]) for w in written.warnings)
    foreign = 100 * (plainly.times.span / before.times.span - 1)
    return (
        f"| {shown} | {foreign:+.1f} | {off[0]} | {off[1]} | {before.simulated_steps.mean:,.3f} | "
        f"{len(before.execution.trace.ranks)} | {written.nodes:,} | {written.collectives:,} | {written.messages:,} | "
        f"{written.groups} | {left:,} |"
    )


def as_others_read(files: list[Path]) -> Replay:
    """The same files without the attributes of Lumos: dependencies and whole microseconds alone."""
    bare = [replace(read_chakra_file(file), head={}) for file in files]
    return replay(foreign_execution(bare))


def what_if_error(before: Replay, after: Replay) -> str:
    """The same for kernels twice as fast: a graph that froze every gap would replay as well, and answer otherwise."""
    faster = [predict(run, [Scale("compute", 0.5)]).step_ms for run in (before, after)]
    return f"{100 * (faster[1] / faster[0] - 1):+.4f}"


def error(before: Replay, after: Replay) -> str:
    """How far the replay of what was read again is from the first, in percent."""
    return f"{100 * (after.simulated_steps.mean / before.simulated_steps.mean - 1):+.4f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path(__file__).parent.parent.parent / "shared/data")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    files = sorted(p for part in ("h200", "public") for p in (options.data / part).rglob("*") if p.is_file())
    rows = [row for p in files for row in describe(p, str(p.relative_to(options.data)), options.data)]
    refused = [row for row in rows if "| refused |" in row]
    trips = [round_trip(options.data / job, job) for job in JOBS]
    text = "\n".join(
        [
            INTRODUCTION,
            "## There and back\n",
            THERE_AND_BACK,
            "| job | bare Chakra | Chakra | Kineto | ms | ranks | nodes | collectives | messages | groups | plain |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
            *trips,
            "\n## Files\n",
            f"{len(rows)} files, {len(refused)} of them refused; those first.\n",
            "| file | is | holds, or why not |\n|---|---|---|",
            *refused,
            *(row for row in rows if row not in refused),
            "",
        ]
    )
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
