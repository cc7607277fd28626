"""Damaged input: every command succeeds with finite, plausible numbers or says what is wrong.

Every case is made by a mutation and a seed, so a failure names what repeats it. `make fuzz` tries more of them.
"""

from __future__ import annotations

import csv
import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuzz
from fuzz_command import MOST_BYTES, ROOT, run
from lumos.analysis.replay import replay
from lumos.errors import LumosError
from lumos.files import write_csv
from lumos.graph.scaling import Scale
from lumos.prediction.prediction import predict
from lumos.read.job import read_job
from lumos.read.json_slices import open_bytes
from mutations import (
    DAMAGES,
    MUTATIONS,
    Damage,
    Mutation,
    cut_middle,
    delete_arguments,
    drop_events,
    duplicate_events,
    exchange_fields,
    flip_bytes,
    jitter_times,
    odd_arguments,
    repeat_middle,
    shuffle_events,
)
from support import (
    PATIENCE_S,
    Event,
    Header,
    header,
    json_text,
    launch,
    note,
    op,
    training_run,
    write_bytes,
    write_trace,
)

pytestmark = pytest.mark.filterwarnings("error")

# The law


def answers(path: Path) -> bool:
    """Whether there is an answer; it must then be sound."""
    try:
        run = replay(read_job(path))
        answer = run.as_dict()
        scaled = predict(run, [Scale("compute", 0.5)]).as_dict()
    except LumosError:
        return False
    assert all(math.isfinite(number) for number in numbers([answer, scaled]))
    assert min(answer["recorded_ms"], answer["simulated_ms"], answer["clean_ms"], scaled["step_ms"]) >= 0
    return True


def numbers(value: Any) -> Iterable[float]:
    """All numbers of an answer."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from numbers(part)
    elif isinstance(value, float | int):
        yield value


# Every kind of input, through the command line


STARTED = ("ray_jobs", "read_only_homes")  # processes that take seconds to start
EACH = [pytest.param(name, marks=pytest.mark.slow if name in STARTED else ()) for name in fuzz.NAMES]


@pytest.fixture(scope="module", autouse=True)
def _no_cluster_stays() -> Iterator[None]:
    """Other tests start Ray themselves."""
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.mark.parametrize("surface", EACH)
def test_the_first_cases_of_every_surface_are_answered_or_refused(surface: str) -> None:
    """The same cases on every machine; the limit of time only ends a case that hangs, however busy the machine is."""
    findings = fuzz.first_cases(surface, 0, 1 if surface in STARTED else 4, PATIENCE_S)
    assert findings == [], "\n".join(f"python tests/fuzz.py --case {one.case}: {one.what}" for one in findings)


def test_what_a_case_must_not_do_is_found(tmp_path: Path) -> None:
    """Each of the watched deeds is a finding; a harness that sees nothing would pass every case."""

    def tried(deed: Callable[[Random, Path], Any]) -> str:
        name = deed.__name__
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(fuzz.NAMES, name, deed)
            folder = tmp_path / name
            folder.mkdir()
            found = fuzz.try_case(fuzz.Case(0, name, 0), folder).finding
        return "" if found is None else found.what

    def page(_: Random, folder: Path) -> None:
        (folder / "answer.html").write_text("<script></script>" * 3 + "<p title='' onclick=planted()>")

    def mark(_: Random, folder: Path) -> None:
        (folder / "planted").touch()

    def module(_: Random, folder: Path) -> None:
        exec(compile((folder / "loky.py").read_text(), folder / "loky.py", "exec"), {})

    def elsewhere(_: Random, folder: Path) -> None:
        (fuzz.store() / "other").touch()
        (fuzz.store() / "other").write_text("")

    def shell(_: Random, folder: Path) -> None:
        (folder / "emitted").mkdir()
        (folder / "emitted" / "train.sh").write_text("echo $(>planted)\n")

    def memory(_: Random, folder: Path) -> None:
        bytearray(MOST_BYTES * 2)

    expected = {page: "part of the page", mark: "code of the case ran", module: "ran", elsewhere: "writes",
                shell: "runs a part of a name", memory: "MemoryError"}  # fmt: skip
    for deed, words in expected.items():
        assert words in tried(deed), deed.__name__


# Synthetic traces


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_a_job_with_one_mutated_rank_is_answered_or_refused(tmp_path: Path, mutation: Mutation, seed: int) -> None:
    mutated = mutation(random.Random(seed), training_run(rank=1, slow=20))
    write_trace(tmp_path / "rank0.json", training_run(), header(0, 2))
    write_trace(tmp_path / "rank1.json", mutated, header(1, 2))
    answers(tmp_path)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_damaged_bytes_are_answered_or_refused(tmp_path: Path, damage: Damage, seed: int) -> None:
    whole = json_text(training_run(), header(0), layout="event a line")
    answers(write_bytes(tmp_path / "trace.json", damage(random.Random(seed), whole)))


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_damaged_gzip_is_answered_or_refused(tmp_path: Path, damage: Damage) -> None:
    path = write_trace(tmp_path / "trace.json.gz", training_run())
    whole = path.read_bytes()
    for seed in range(4):
        path.write_bytes(damage(random.Random(seed), whole))
        answers(path)


@pytest.mark.parametrize(
    "mutation",
    [drop_events, duplicate_events, shuffle_events, delete_arguments, jitter_times],
    ids=lambda m: m.__name__,
)
def test_what_is_still_a_trace_is_answered(tmp_path: Path, mutation: Mutation) -> None:
    """Refusing everything would pass the tests above."""
    for seed in range(3):
        assert answers(write_trace(tmp_path / "trace.json", mutation(random.Random(seed), training_run())))


@pytest.mark.parametrize("damage", [cut_middle, flip_bytes, repeat_middle], ids=lambda d: d.__name__)
def test_damage_to_a_few_bytes_does_not_cost_the_answer(tmp_path: Path, damage: Damage) -> None:
    whole = json_text(training_run(), header(0))
    for seed in range(5):
        damaged = whole[:500] + damage(random.Random(seed), whole[500:])
        assert answers(write_bytes(tmp_path / "trace.json", damaged)), seed


def test_the_order_of_events_in_a_file_does_not_matter(tmp_path: Path) -> None:
    ordered = replay(read_job(write_trace(tmp_path / "trace.json", training_run()))).as_dict()
    for seed in range(5):
        events = shuffle_events(random.Random(seed), training_run())
        shuffled = replay(read_job(write_trace(tmp_path / "trace.json", events))).as_dict()
        assert shuffled == ordered


names = st.sampled_from(
    ["aten::mm", "ProfilerStep#1", "cudaLaunchKernel", "cudaGraphLaunch", "cudaMemcpy", "cudaDeviceSynchronize",
     "cudaStreamSynchronize", "cudaEventSynchronize", "cudaEventRecord", "cudaStreamWaitEvent", "cudaEventQuery",
     "ncclDevKernel_AllReduce_Sum", "ncclDevKernel_SendRecv", "nccl:all_reduce", "record_param_comms", "gemm"]
)  # fmt: skip
categories = st.sampled_from(
    ["cpu_op", "cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy", "gpu_memset", "cuda_sync", "user_annotation",
     "python_function", "overhead"]
)  # fmt: skip
arguments = st.fixed_dictionaries(
    {},
    optional={
        "correlation": st.integers(-1, 6),
        "stream": st.sampled_from([0, 7, 20, -1, 4294967295]),
        "device": st.integers(0, 1),
        "Collective name": st.sampled_from(["allreduce", "_allgather_base", "send", "recv", "wait", "other"]),
        "In msg nelems": st.integers(-1, 4),
        "Group size": st.integers(-1, 3),
        "Process Group Name": st.sampled_from(["0", "1", ""]),
        "Process Group Ranks": st.sampled_from(["[0, 1]", "[0]", "", "[0, ..., 7]"]),
        "Src Rank": st.integers(-1, 2),
        "Dst Rank": st.integers(-1, 2),
        "dtype": st.sampled_from(["Float", "BFloat16", "Strange", ""]),
        "wait_on_stream": st.sampled_from([-1, 7, 20]),
        "wait_on_cuda_event_record_corr_id": st.integers(-1, 6),
        "wait_on_cuda_event_id": st.integers(-1, 2),
    },
)
spans = st.fixed_dictionaries(
    {
        "ph": st.just("X"),
        "cat": categories,
        "name": names,
        "pid": st.integers(0, 1),
        "tid": st.integers(1, 3),
        "ts": st.integers(0, 400),
        "dur": st.sampled_from([0, 1, 3, 50, 300]),
        "args": arguments,
    }
)


@settings(max_examples=80)
@given(ranks=st.lists(st.lists(spans, min_size=1, max_size=25), min_size=1, max_size=3))
def test_any_small_job_is_answered_or_refused(
    tmp_path_factory: pytest.TempPathFactory, ranks: list[list[Event]]
) -> None:
    folder = tmp_path_factory.mktemp("job")
    for rank, events in enumerate(ranks):
        write_trace(folder / f"rank{rank}.json", events, header(rank, len(ranks)))
    answers(folder)


# Real traces


@cache
def beginning(path: Path, count: int) -> tuple[Header, list[Event]]:
    """The first events of a file by time: its order is operators first, kernels last."""
    with open_bytes(path) as file:
        content = json.loads(file.read())
    events = sorted(
        (e for e in content.pop("traceEvents") if isinstance(e.get("ts"), float | int)), key=lambda e: e["ts"]
    )
    return content, events[:count]


REAL = (
    ("h200/multirank/ddp2_l8", "rank0.pt.trace.json.gz"),
    ("public/hta/critical_path/alexnet", "*.json.gz"),
    ("public/torchrec_v100/resnet18", "*_85866.*.json.gz"),
)
each_real_trace = pytest.mark.parametrize("seed", range(len(REAL)), ids=[folder for folder, _ in REAL])


def real_trace(shared_data: Path, index: int) -> tuple[Header, list[Event]]:
    folder, pattern = REAL[index]
    (path,) = (shared_data / folder).glob(pattern)
    return beginning(path, 2000)


@pytest.mark.data
@each_real_trace
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_mutated_real_traces_are_answered_or_refused(
    shared_data: Path, tmp_path: Path, mutation: Mutation, seed: int
) -> None:
    head, events = real_trace(shared_data, seed)
    mutated = mutation(random.Random(seed), events)
    answers(write_trace(tmp_path / "trace.json", mutated, head, layout="one line"))


@pytest.mark.data
@each_real_trace
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_damaged_real_traces_are_answered_or_refused(
    shared_data: Path, tmp_path: Path, damage: Damage, seed: int
) -> None:
    head, events = real_trace(shared_data, seed)
    damaged = damage(random.Random(seed), json_text(events, head))
    answers(write_bytes(tmp_path / "trace.json", damaged))


@pytest.mark.data
@each_real_trace
def test_the_beginnings_of_real_traces_are_answered(shared_data: Path, tmp_path: Path, seed: int) -> None:
    head, events = real_trace(shared_data, seed)
    assert answers(write_trace(tmp_path / "trace.json", events, head))


@pytest.mark.data
@pytest.mark.parametrize(
    "mutation", [drop_events, exchange_fields, odd_arguments, jitter_times], ids=lambda m: m.__name__
)
def test_a_real_job_with_one_mutated_rank_is_answered_or_refused(
    shared_data: Path, tmp_path: Path, mutation: Mutation
) -> None:
    folder = shared_data / "public/torchrec_v100/resnet18"
    for rank, path in enumerate(sorted(folder.glob("*.json.gz"))):
        head, events = beginning(path, 3000)
        mutated = mutation(random.Random(1), events) if rank == 0 else events
        write_trace(tmp_path / f"rank{rank}.json", mutated, head, layout="one line")
    answers(tmp_path)


# What was found once


def with_head(**head: Any) -> bytes:
    return json.dumps(head | {"traceEvents": training_run(steps=1)}).encode()


def with_event(name: str, **fields: Any) -> bytes:
    events = training_run(steps=1)
    kernel = next(event for event in events if event.get("cat") == "kernel")
    return json.dumps({"traceEvents": [*events, kernel | {"name": name} | fields]}).encode()


FOUND = {
    "rank of 19 digits": with_head(distributedInfo={"rank": 10**18, "world_size": 2}),
    "rank above int32": with_head(distributedInfo={"rank": 2**31, "world_size": 2**31}),
    "digits of 4,301 places": with_event(
        "k", args={"stream": 7, "Collective name": "allreduce", "Process Group Ranks": f"[{'9' * 4301}]"}
    ),
    "deep header": b'{"x":' + b"[" * 1100 + b"]" * 1100 + b"," + with_head()[1:],
    "deep arguments": with_event("k")[:-2] + b',{"args":' + b"[" * 1100 + b"]" * 1100 + b"}]}",
    "half a step": with_event("ProfilerStep#1.5", cat="user_annotation"),
    "half a character": with_event("\ud800"),
    "stray time": with_event("k", ts=1.7e15),
    "names like markup": with_event("gemm[/x]\x1b[31m"),
    "endless step number": with_event("ProfilerStep#" + "9" * 4301, cat="user_annotation"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_stays_mended(tmp_path: Path, name: str) -> None:
    write_bytes(tmp_path / "rank0.json", FOUND[name])
    for arguments in (["replay", "--json"], ["replay"], ["check"]):
        assert run(tmp_path, arguments[0], "rank0.json", *arguments[1:]).answer is not None
    run(tmp_path, "convert", "rank0.json", "-o", "run.et")
    assert run(tmp_path, "replay", "run.0.et", "--json").answer is not None


def test_a_stray_time_is_left_out_with_a_warning(tmp_path: Path) -> None:
    write_bytes(tmp_path / "rank0.json", FOUND["stray time"])
    answer = run(tmp_path, "replay", "rank0.json", "--json").answer or {}
    assert answer["recorded_ms"] < 1000
    assert any("1 events are more than a day from the others" in text for text in answer["warnings"])


def test_steps_that_no_run_has_are_doubted(tmp_path: Path) -> None:
    hours = [op("aten::mm", 0, 5), op("aten::mm", 2 * 3.6e9, 5)]
    moment = [note("ProfilerStep#1", 0, 1), op("aten::mm", 0, 1)]
    for events, words in ((hours, "a step of 2.0 hours"), (moment, "no training step is as short")):
        write_trace(tmp_path / "rank0.json", events, header())
        answer = run(tmp_path, "replay", "rank0.json", "--json").answer or {}
        assert any(words in text for text in answer["warnings"]), answer["warnings"]
    write_trace(tmp_path / "rank0.json", [note("ProfilerStep#1", 5, 0), op("aten::mm", 5, 0)], header())
    assert "nothing in it takes any time" in run(tmp_path, "replay", "rank0.json").refusal


def test_cells_that_spreadsheets_would_calculate_are_text(tmp_path: Path) -> None:
    names = ["=1+1", "+x", "-x", "@x", "\tx", "\rx", "-1.5", "plain"]
    write_csv(tmp_path / "table.csv", [{"name": name, "ms": -1.5} for name in names])
    with (tmp_path / "table.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["name"] for row in found] == ["'=1+1", "'+x", "'-x", "'@x", "' x", "' x", "-1.5", "plain"]
    assert {row["ms"] for row in found} == {"-1.5"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict", "--set", "cluster.host=1e-300"], "cluster.host = 1e-300 is out of range"),
        (["predict", "--set", "cluster.host=nan"], "cluster.host = nan"),
        (["search", "--gpus", "2", "--memory", "nan"], "--memory nan"),
        (["search", "--gpus", "2", "--memory", "inf"], "--memory inf"),
        (["search", "--gpus", "2", "--deadline", "nan", "--tokens", "1e9"], "--deadline"),
        (["search", "--gpus", "2", "--workers", "100000"], "--workers 100000"),
    ],
)
def test_numbers_that_no_run_has_are_refused(tmp_path: Path, arguments: list[str], words: str) -> None:
    command, *options = arguments
    assert words in run(tmp_path, command, str(ROOT / "examples/one-h200.toml"), *options).refusal


def test_a_factor_that_makes_a_run_take_decades_is_refused(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank0.json", [op("aten::mm", 0, 8e10)], header())
    told = run(tmp_path, "predict", "--from", "rank0.json", "--scale", "compute=1e6").refusal
    assert "--scale compute=1e+06: that takes decades; use a smaller factor" in told


@pytest.mark.parametrize("pattern", ["(?:a+)+", "(?:a|aa)+", "(?:.*a){20}"])
def test_no_pattern_takes_longer_than_the_names_are_long(tmp_path: Path, pattern: str) -> None:
    """Python's own engine would try every way to divide the name."""
    write_trace(tmp_path / f"{'a' * 60}0.json", [op("aten::mm", 0, 50), *launch("a" * 2000, 10, 1)], header())
    scaled = run(tmp_path, "predict", "--from", ".", "--scale", f"kernel:{pattern}b=2")
    ranked = run(tmp_path, "replay", ".", "--rank-pattern", f"({pattern})b")
    assert "no kernel of this trace" in scaled.refusal
    assert "finds no rank" in ranked.refusal
