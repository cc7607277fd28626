"""A job: one file, or the files of all ranks in a folder under any naming, read in parallel processes.

Kineto traces and exports of Nsight Systems are read as a Trace. Files that are a graph already are an Execution; what
reads them is above this package, which knows it by name alone (`GRAPH_READERS`).
The rank of a file is that of its header, else that in its name, else what the user's pattern finds in the name.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from lumos.arguments import checks_arguments
from lumos.data_files import read_table
from lumos.errors import InputError, OptionError
from lumos.graph.rules.build import Execution
from lumos.patterns import Pattern
from lumos.read import GRAPH_READERS
from lumos.read.formats import (
    Form,
    Recorded,
    available_bytes,
    captures,
    choices,
    form_of,
    head_of,
    is_gzip,
    match_option,
    refuse_events,
    require_memory,
)
from lumos.read.kineto import read_share, whole_number
from lumos.read.nsys import read_nsys
from lumos.trace.messages import with_peers_decoded
from lumos.trace.trace import Header, Trace, concatenate, without_strays
from lumos.workers import Engine, Here, Job, engine_named

_LIMITS = read_table("trace_rules.toml")["reading"]
_TRACE_NAME = re.compile(r"\.(json|trace)(\.gz)?$|\.(et|sqlite)$")
_RANK_OF_CHAKRA = re.compile(r"\.(\d+)\.et$")  # as ASTRA-sim wants it, whatever the name before it holds
_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])(?:rank|tp|worker|gpu|device)[-_ ]?(\d+)", re.IGNORECASE)
_RANK_IN_HEAD = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[\]]*"rank"\s*:\s*(\d+)')
_MOST_NAMED = 16  # workloads of a folder that are listed
_MOST_LOOKED_AT = 10_000  # files below a folder, in search of the one that was meant
_CHAKRA = (Form.CHAKRA, Form.CHAKRA_JSON)
_READABLE = (Form.KINETO, Form.NSYS, Form.CHAKRA, Form.CHAKRA_JSON)

Progress = Callable[[int, int], None]  # bytes read, bytes in all
_Read = TypeVar("_Read")


class RankFile(Protocol):
    """The file of a rank in a format that is a graph already; its rank is -1 if it does not state one."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def path(self) -> Path: ...

    @property
    def rank(self) -> int: ...


_Ranked = TypeVar("_Ranked", bound=RankFile)


class GraphReader(NamedTuple):
    """Reads one file of a format that is a graph already, and the run that the files of its ranks describe."""

    file: Callable[[Path], Any]
    run: Callable[[list[Any]], Trace | Execution]


@checks_arguments
def read_job(
    path: Path | str,
    match: str = "",
    rank_pattern: str = "",
    progress: Progress | None = None,
    workers: int = 0,
    engine: Engine | None = None,
    meanwhile: Callable[[], None] | None = None,
    operators: bool = True,
) -> Trace | Execution:
    """A job from a file or a folder of ranks: `read_job("traces")`.

    `match` chooses files of a folder by name, `rank_pattern` finds the rank in a name. Large files are read in as many
    processes as `workers` (0: one a core), or on an `engine`; `meanwhile` is called while those read. Without
    `operators`, a trace lacks their arguments and what allocators held: a replay needs neither, and reading is faster.
    """
    files, notes = find_files(Path(path), match)
    pattern = _rank_pattern(rank_pattern)
    form = _one_form(files)
    if form.name in GRAPH_READERS:
        module, _, name = GRAPH_READERS[form.name].partition(":")
        reader: GraphReader = getattr(import_module(module), name)
        graph = reader.run(_rank_files(files, reader.file, pattern, progress))
        return replace(graph, warnings=(*notes, *graph.warnings))
    if form == Form.NSYS:
        traces = _collected(files, map(read_nsys, files), progress)
    else:
        need = sum(f.stat().st_size * (_LIMITS["gzip_ratio"] if is_gzip(f) else 1.0) for f in files)
        where = files[0] if len(files) == 1 else files[0].parent
        advice = "read fewer ranks with --match, or record fewer steps"
        require_memory(where, need * _LIMITS["memory_per_json_byte"], advice)
        traces = _collected(files, _kineto_traces(files, workers, engine, meanwhile, operators), progress)
    traces = [_with_rank(without_strays(trace), Path(trace.headers[0].path), pattern, len(files)) for trace in traces]
    _refuse_mixed_jobs(traces)
    traces.sort(key=lambda t: t.headers[0].rank)
    job = with_peers_decoded(concatenate(traces))
    return replace(job, warnings=(*notes, *job.warnings, *_missing_ranks(job)))


def read_rank_files(
    path: Path,
    readers: Mapping[Form, Callable[[Path], _Ranked]],
    match: str = "",
    rank_pattern: str = "",
    progress: Progress | None = None,
) -> list[_Ranked]:
    """The files of a job, by rank, before they become a run; none if they are of a format without a reader here."""
    files, _ = find_files(path, match)
    read = readers.get(_one_form(files))
    return [] if read is None else _rank_files(files, read, _rank_pattern(rank_pattern), progress)


def _rank_files(
    files: list[Path], read: Callable[[Path], _Ranked], pattern: Pattern | None, progress: Progress | None
) -> list[_Ranked]:
    found = _collected(files, map(read, files), progress)
    ranked = [replace(file, rank=_rank(file.path, file.rank, pattern, len(files))) for file in found]
    _refuse_equal_ranks([Recorded(file.rank, file.path, file.path.stat().st_mtime) for file in ranked])
    return sorted(ranked, key=lambda file: file.rank)


def _one_form(files: list[Path]) -> Form:
    """The format of all files; a mixture is refused, and so is a format that cannot be replayed."""
    forms = {file: form_of(file, head_of(file)) for file in files}
    kinds = {form: file for file, form in forms.items()}
    if len(kinds) > 1:
        (a, x), (b, y) = list(kinds.items())[:2]
        raise InputError(f"{x.parent}: {x.name} is {a.value} and {y.name} is {b.value}; choose one kind with --match")
    form, file = next(iter(kinds.items()))
    if form in _REFUSED:
        raise InputError(f"{file}: {form.value} {_REFUSED[form]}")
    packed = next((file for file in files if form in (Form.CHAKRA, Form.NSYS) and is_gzip(file)), None)
    if packed is not None:
        raise InputError(f"{packed}: {form.value}, but packed; unpack it first, as with gzip -d")
    return form


_REFUSED = {
    Form.ARCHIVE: "of files; unpack it, and give what is inside",
    Form.EXECUTION: "(it has nodes, not times); give the Kineto trace of the same run, and this with --et to convert",
    Form.TIMELINE: "for Perfetto: all ranks in one view, without launches; give the trace or setup it was made from",
    Form.JSON_LIST: "of something else than trace events; give a PyTorch profiler trace",
}


def find_files(path: Path, match: str = "") -> tuple[list[Path], list[str]]:
    """The trace files at a path, and notes on what was left out."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if not path.is_file() and not path.is_dir():
        raise InputError(f"{path}: neither a file nor a folder; name a Kineto trace, or the folder of a job's ranks")
    if path.is_file():
        return [path], []
    inside = sorted(p for p in path.iterdir() if p.is_file())
    named = [p for p in inside if _TRACE_NAME.search(p.name) and fnmatch.fnmatch(p.name, match or "*")]
    heads = {p: head_of(p) for p in named}
    files = {p: head for p, head in heads.items() if form_of(p, head) in _READABLE}
    if not files:
        raise InputError(_nothing_found(path, inside, match))
    return _one_capture(files) if not match else (list(files), [])


def _nothing_found(path: Path, inside: list[Path], match: str) -> str:
    if match:
        return f"{path}: no file here matches --match {match!r}, a pattern as *.et"
    walk = ((folder, name) for folder, inner, names in os.walk(path) if not inner.sort() for name in sorted(names))
    candidates = (Path(folder, name) for folder, name in islice(walk, _MOST_LOOKED_AT) if _TRACE_NAME.search(name))
    deeper = next((p.parent for p in candidates if p.is_file() and form_of(p, head_of(p)) in _READABLE), None)
    if deeper is not None:
        return f"{path}: no Kineto trace in this folder itself; did you mean {deeper}?"
    if not inside:
        return f"{path}: the folder is empty; give a folder of .json or .json.gz traces"
    if any(p.name.endswith(".dry.json.gz") for p in inside):
        return f"{path}: a dry run of lumos capture --dry, not a trace; ask lumos predict --from {path}"
    return f"{path}: none of its {len(inside)} files is a Kineto trace (.json or .json.gz with traceEvents)"


def _one_capture(files: dict[Path, bytes | None]) -> tuple[list[Path], list[str]]:
    """Of files named alike but for their numbers, the largest set: `rank0.json` beside `rank0.with_et.json` are two.

    Sets that hold other ranks belong to the same capture: files may be named after their hosts.
    """
    sets: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        sets[re.sub(r"\d+", "#", file.name)].append(file)
    kept: list[Path] = []
    ranks: set[int] = set()
    for name in sorted(sets, key=lambda name: (-len(sets[name]), len(name), name)):
        found = [_rank_hint(file, files[file]) for file in sets[name]]
        if not kept or (-1 not in found and ranks.isdisjoint(found)):
            kept += sets[name]
            ranks.update(found)
    left_out = [file.name for file in files if file not in kept]
    if not left_out or sum("#" in name for name in sets) < 2:
        return list(files), []
    if all(form_of(file, head) in _CHAKRA for file, head in files.items()):
        raise InputError(_several_workloads(list(sets.values()), [file.name for file in files]))
    shown = ", ".join(left_out[:2]) + (", …" if len(left_out) > 2 else "")
    option = match_option(left_out, [file.name for file in files])
    choose = f"choose them with {option}" if option else "choose with --match"
    return sorted(kept), [f"{len(left_out)} files of another capture were left out ({shown}); {choose}"]


def _several_workloads(sets: list[list[Path]], names: list[str]) -> str:
    """What to say about a folder of Chakra files that are not ranks of one job."""
    named = {file.name: [other.name for other in workload] for workload in sets for file in workload[:1]}
    shown = ", ".join(list(named)[:_MOST_NAMED]) + (", …" if len(named) > _MOST_NAMED else "")
    option = match_option(next(iter(named.values())), names)
    choose = f"choose one with --match, as {option}" if option else "choose one with --match"
    return f"{sets[0][0].parent}: {len(named)} different Chakra workloads, not the ranks of one job ({shown}); {choose}"


def _rank_hint(path: Path, head: bytes | None) -> int:
    """The rank in the beginning of a file, or in its name; -1 if neither has one."""
    found = _RANK_IN_HEAD.search(head or b"")
    return whole_number(found.group(1)) if found else rank_in_name(path)


def rank_in_name(path: Path) -> int:
    """The rank in the name of a file; -1 if there is none."""
    found = _RANK_OF_CHAKRA.search(path.name) or _RANK_IN_NAME.search(path.name)
    return whole_number(found.group(1)) if found else -1


def _kineto_traces(
    files: list[Path], workers: int, engine: Engine | None, meanwhile: Callable[[], None] | None, operators: bool
) -> Iterator[Trace]:
    """The traces of files, in their order; several processes share one large file."""
    sizes = [file.stat().st_size for file in files]
    free, events = available_bytes(), 0
    workers = workers or min(len(files), os.cpu_count() or 1)
    parallel = workers > 1 and sum(sizes) >= _LIMITS["parallel_from_bytes"]
    started = engine_named("local", workers) if parallel else nullcontext(Here())
    with started if engine is None else nullcontext(engine) as readers:
        paths = [file.absolute() if readers.remote else file for file in files]
        shares = [_shares(path, size, readers.workers // len(files)) for path, size in zip(paths, sizes, strict=True)]
        job = Job(read_share, operators, tries=1, advice="read fewer ranks with --match")
        answers = readers.run(job, [share for of_file in shares for share in of_file])
        if meanwhile is not None and not isinstance(readers, Here):
            meanwhile()
        for path, of_file, done in zip(paths, shares, accumulate(sizes), strict=True):
            trace = _joined([next(answers) for _ in of_file]) or next(readers.run(job, [(path, 0, 1)]))
            events += len(trace)
            refuse_events(path if len(paths) == 1 else path.parent, events, free, done / sum(sizes))
            yield trace


def _shares(path: Path, size: int, readers: int) -> list[tuple[Path, int, int]]:
    """The shares by which a file is read: several if it is large."""
    large = size >= _LIMITS["shared_from_bytes"]["gzip" if path.suffix == ".gz" else "plain"]
    count = max(1, readers) if large else 1
    return [(path, index, count) for index in range(count)]


def _joined(parts: Sequence[Trace | None]) -> Trace | None:
    """The shares of one file as one trace; None if it must be read as a whole."""
    traces = [part for part in parts if part is not None]
    whole = concatenate(traces) if len(traces) == len(parts) else None
    if whole is None or len(whole) == 0:
        return None  # reading an empty one as a whole says what is wrong with it
    header = max(whole.headers, key=lambda header: header.rank)  # the keys after the events are in the last share alone
    return _of_rank(whole, header)


def _of_rank(trace: Trace, header: Header) -> Trace:
    """A trace with this header, and lanes of its rank."""
    return replace(trace, headers=(header,), lanes=tuple(lane._replace(rank=header.rank) for lane in trace.lanes))


def _collected(files: list[Path], found: Iterable[_Read], progress: Progress | None) -> list[_Read]:
    """What is read from each file, with its progress."""
    sizes = [file.stat().st_size for file in files]
    collected = []
    for done, item in zip(accumulate(sizes), found, strict=True):
        collected.append(item)
        if progress is not None:
            progress(done, sum(sizes))
    return collected


def _rank_pattern(text: str) -> Pattern | None:
    if not text:
        return None
    pattern = Pattern.parse(text, "--rank-pattern")
    if pattern.groups != 1:
        raise OptionError(f"--rank-pattern {text!r}: needs one group for the number, as in 'node(\\d+)'")
    return pattern


def _with_rank(trace: Trace, path: Path, pattern: Pattern | None, files: int) -> Trace:
    if len(trace.headers) > 1:  # one file of several processes
        return trace
    header = trace.headers[0]
    return _of_rank(trace, header._replace(rank=_rank(path, header.rank, pattern, files)))


def _rank(path: Path, in_header: int, pattern: Pattern | None, files: int) -> int:
    """The rank of a file by the user's pattern, its header, or its name."""
    if pattern is not None:
        found = pattern.first_group(path.name)
        rank = whole_number(found) if found.isdecimal() else -1
        if rank < 0:
            raise InputError(
                f"{path}: --rank-pattern {pattern.text!r} finds no rank here; its group must match a number"
            )
        return rank
    rank = in_header if in_header >= 0 else rank_in_name(path)
    if rank < 0 and files > 1:
        raise InputError(
            f"{path}: neither its header nor its name says which rank it is; say how with --rank-pattern 'REGEX(\\d+)'"
        )
    return max(rank, 0)


def _refuse_mixed_jobs(traces: list[Trace]) -> None:
    begins = [(int(trace.start.min()), trace) for trace in traces]
    recorded = [Recorded(one.rank, Path(one.path), begin) for begin, trace in begins for one in trace.headers]
    _refuse_equal_ranks(recorded)
    begin_of = {file.path: file.begin for file in recorded}
    of_size: dict[int, list[Path]] = defaultdict(list)
    for header in sorted((trace.headers[0] for trace in traces), key=lambda header: header.world_size):
        if header.world_size > 0:
            of_size[header.world_size].append(Path(header.path))
    jobs = sorted(of_size.items(), key=lambda job: max(begin_of[path] for path in job[1]))
    if len(jobs) > 1:
        (size, (x, *_)), (other, (y, *_)) = jobs[:2]
        raise InputError(
            f"{x.name} is of a job of {size} ranks and {y.name} of one of {other}: these are different jobs; "
            f"choose one: {choices([files for _, files in jobs], _names_in(x.parent))}"
        )
    spans = sorted((int(t.start.min()), int(t.end.max()), Path(t.headers[0].path)) for t in traces)
    for index, ((_, end, x), (start, _, y)) in enumerate(pairwise(spans), 1):
        if start - end > _LIMITS["different_captures_s"] * 1e9:
            halves = [[path for *_, path in spans[:index]], [path for *_, path in spans[index:]]]
            raise InputError(
                f"{x.name} ends {(start - end) / 1e9:.0f} s before {y.name} begins: these are different captures; "
                f"choose one: {choices(halves, _names_in(x.parent))}"
            )


def _refuse_equal_ranks(files: list[Recorded]) -> None:
    """Raise InputError where a rank is there twice, with the --match of each capture."""
    found = captures(files)
    if len(found) > 1:
        second = found[1][0]
        first = next(file for file in found[0] if file.rank == second.rank)
        folder = second.path.parent
        choice = choices([[file.path for file in group] for group in found], _names_in(folder))
        raise InputError(
            f"{folder}: {len(found)} captures of one job, as both {first.path.name} and {second.path.name} claim rank "
            f"{second.rank}; choose one: {choice}; or give ranks with --rank-pattern"
        )


def _names_in(folder: Path) -> list[str]:
    """The names of all files in a folder that --match is applied to."""
    return [path.name for path in folder.iterdir() if path.is_file() and _TRACE_NAME.search(path.name)]


def _missing_ranks(job: Trace) -> list[str]:
    world = max(h.world_size for h in job.headers)
    here = len(job.headers)
    if world <= here or world < 2:
        return []
    return [f"{here} of {world} ranks are here; waiting for the others cannot be told from transfer"]
