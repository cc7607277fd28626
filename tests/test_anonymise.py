"""`lumos convert --anonymise`: no text of the input passes, every figure stays, and what is still shown is said."""

from __future__ import annotations

import gzip
import json
import random
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import lumos_here
from lumos.analysis import slowdown_jobs
from lumos.analysis.kernel_labels import label
from lumos.analysis.replay import Replay, replay
from lumos.analysis.slowdown import slowdown
from lumos.analysis.slowdown_causes import job_of
from lumos.chakra.run_writer import write_chakra
from lumos.costs import contention
from lumos.errors import LumosError
from lumos.export import public_names
from lumos.export.anonymise import anonymise
from lumos.export.chrome_traces import write_kineto
from lumos.export.public_names import NameMap, roles_of, vocabulary
from lumos.graph.graph import simulate
from lumos.graph.rules.build import Execution, build
from lumos.prediction.prediction import predict
from lumos.read.job import read_job
from lumos.trace.names import Category
from lumos.trace.steps import find_steps
from lumos.trace.trace import Trace
from lumos.traced import traced_operators
from support import call, collective, header, kernel, launch, note, op, span, sync, training_run, write_trace

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "src/lumos/data/example"
SECRET = "zyxwv"  # in no public name
FORMS = ("et", "kineto")


# ---------------------------------------------------------------------- figures
def figures(run: Replay) -> dict[str, Any]:
    """All figures of a run, without names and without warnings, which quote names of files."""
    found: dict[str, Any] = {"replay": bare(run.as_dict())}
    for scale in ("compute=0.5", "comm=2", "cpu=0.7"):
        found[scale] = predict(run, [scale]).step_ms
    try:
        found["stragglers"] = bare(slowdown(job_of(run)).as_dict())
    except LumosError as error:  # one step of one rank
        found["stragglers"] = type(error).__name__
    found["labels"] = [
        [one.us.tolist(), one.launched.tolist(), one.phase.tolist(), one.work.tolist(), one.attention.tolist()]
        for one in label(run)
    ]
    return found


def bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: bare(part) for key, part in value.items() if key not in ("name", "warnings")}
    return [bare(part) for part in value] if isinstance(value, list | tuple) else str(value)


def executed(path: Path, match: str = "") -> Execution:
    source = read_job(path, match)
    return source if isinstance(source, Execution) else build(source)


def written(folder: Path, execution: Execution, form: str) -> Path:
    folder.mkdir(parents=True)
    if form == "et":
        write_chakra(folder / "run.et", execution)
    for rank in execution.trace.ranks if form == "kineto" else ():
        write_kineto(folder / f"rank{rank}.trace.json", execution.trace, rank)
    return folder


def assert_same_figures(path: Path, folder: Path, match: str = "", forms: tuple[str, ...] = FORMS) -> None:
    before = executed(path, match)
    wanted = figures(replay(before))
    hidden = anonymise(before)
    assert hidden.changed_roles == 0
    for form in forms:
        assert figures(replay(read_job(written(folder / form, hidden.execution, form)))) == wanted, form


def test_the_example_replays_to_the_same_figures(tmp_path: Path) -> None:
    assert_same_figures(EXAMPLE, tmp_path)


def test_a_run_with_a_rank_per_file_and_a_time_of_day_replays_to_the_same_figures(tmp_path: Path) -> None:
    for rank in range(2):
        base = {"baseTimeNanoseconds": 1_790_857_026_000_000_123}
        write_trace(
            tmp_path / f"rank{rank}.json", training_run(steps=3, rank=rank, slow=7.0 * rank), header(rank, 2) | base
        )
    assert_same_figures(tmp_path, tmp_path / "out")


def test_where_the_clock_has_its_zero_does_not_matter_to_steps(tmp_path: Path) -> None:
    """A rank whose clock is aligned may begin below zero; if its GPU does nothing, its step ends with the mark."""
    for rank, work in enumerate((launch("gemm", 10, 1), [op("aten::add", 20, 5)])):
        write_trace(tmp_path / f"rank{rank}.json", [note("ProfilerStep#1", 5, 90), *work], header(rank, 2))
    trace = read_job(tmp_path)
    assert isinstance(trace, Trace)
    marks, earlier = find_steps(trace), trace.shifted({0: -10_000_000, 1: -10_000_000})
    assert marks.read(earlier).milliseconds.tolist() == marks.read(trace).milliseconds.tolist() == [0.09]


SHARED = (  # of every kind of file one; benchmarks/anonymise.py takes all
    "h200/multirank/fsdp2_l8", "h200/single/compile_base.pt.trace.json.gz", "h200/fake_world",
    "public/hta/amd_trace", "public/hta/critical_path/cuda_event_sync_multi_stream", "public/hta/triton_example",
    "public/nsys", "public/torchrec_v100/resnet18", "public/aorta_mi350", "public/hta/mixed_files",
)  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_recorded_runs_replay_to_the_same_figures(shared_data: Path, tmp_path: Path, name: str) -> None:
    assert_same_figures(shared_data / name, tmp_path)


def test_a_chakra_graph_of_another_tool_stays_the_same_graph(shared_data: Path, tmp_path: Path) -> None:
    """As Chakra; written as Kineto it loses its dependencies, with and without --anonymise."""
    assert_same_figures(shared_data / "public/chakra/chakra.0.et", tmp_path, forms=("et",))


# ---------------------------------------------------------------------- canaries
PREFIXES = (
    "", "aten::", "c10d::", "_c10d_functional::", "nccl:", "gloo:", "nccl:all_reduce_", "FSDP::", "FSDP::pre_forward (",
    "FSDP::backward_prefetch for ", "FullyShardedDataParallel.", "DistributedDataParallel.forward", "Optimizer.step#",
    "Optimizer.zero_grad#", "Optimizer.step", "ProfilerStep#", "ProfilerStep#3 ", "Torch-Compiled Region: ",
    "## Call CompiledFxGraph ", "CompiledFunction", "triton_poi_fused_", "triton_red_fused_mm_", "FlashAttn",
    "nn.Module: ", "cpu_", "cpu_gemm_", "cpuCompute", "cuda", "cudaLaunchKernel", "cudaMemcpyAsync", "cuMemcpy", "hip",
    "cudaDeviceSynchronize", "Memcpy HtoD (Pageable -> ", "Memset (", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(",
    "ncclDevKernel_", "ncclKernel_SendRecv_", "nvjet_sm90_", "flash_fwd_kernel<", "void at::native::",
    "autograd::engine::evaluate_function: ", "torch::autograd::", "torch::autograd::CppNode<", "record_param_comms ",
    "enumerate(DataLoader)#", "deep_ep::all_to_all_", "softmax_warp_forward_", "dot_do_o_", "attention_", "rccl_",
    "custom::op_1 ", "gemm_1 ", "thread ", "stream ",
)  # fmt: skip
CATEGORIES = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy", "gpu_memset",
              "python_function", "overhead", "cpu_instant_event", "nvtx", "made_up")  # fmt: skip
KEYS = (
    "Collective name", "dtype", "In msg nelems", "Out msg nelems", "Group size", "Process Group Name",
    "Process Group Description", "Process Group Ranks", "Seq", "Src Rank", "Dst Rank", "Call stack", "Module Hierarchy",
    "Python module id", "Input Dims", "Input type", "Input Strides", "Concrete Inputs", "kernel_file", "kernel_hash",
    "kernel_backend", "Comms Id", "stream", "device", "correlation", "Ev Idx", "pg_desc", "Trace name", "made up",
)  # fmt: skip


def planted() -> Iterator[str]:
    """Secrets that all differ, so that a failure tells where it stood."""
    number = 0
    while True:
        number += 1
        yield f"{SECRET}{number}"


def full_of_secrets(folder: Path, rank: int) -> Path:
    """A rank whose every name, argument and header is secret; also where only numbers should stand."""
    secret, events = planted(), list(training_run(rank=rank))
    at = 10_000.0
    for category in CATEGORIES:
        for prefix in PREFIXES:
            at += 10
            events.append(span(category, f"{prefix}{next(secret)}", at, 5, 100, 1, {"correlation": int(at)}))
    for key in KEYS:
        at += 10
        told = collective("all_reduce") | {"stream": 7, "device": 0, key: next(secret)}
        shapes = {"Input Dims": [[4, 4], [[4], [next(secret)]], next(secret)], "Input type": ["float", next(secret)]}
        events += [
            span("kernel", "gemm", at, 3, 0, 7, told),
            op("aten::mm", at, 5, args=shapes | {key: [next(secret)]}),
        ]
    events.append(span("kernel", "gemm", at + 10, 3, next(secret), next(secret), {"stream": next(secret)}))
    events.append(span("cpu_op", "aten::mm", at + 10, 3, next(secret), next(secret), {next(secret): next(secret)}))
    events.append({"ph": "i", "name": next(secret), "pid": 1, "tid": 1, "ts": 5, "args": {"Bytes": 1}})
    events.append({"ph": "M", "name": "process_name", "pid": 100, "args": {"name": next(secret)}})
    events += launch("ncclDevKernel_AllGather", at + 30, 999_999)
    told = {key: next(secret) for key in ("traceName", "host", "trace_id", "PT_PROFILER_JOB_NAME", next(secret))}
    head = header(rank, 2, base=1_790_857_026_123_456_789) | told
    head["deviceProperties"] = [{"id": 0, "name": next(secret), "uuid": next(secret)}]
    head["distributedInfo"] |= {"backend": next(secret), "pg_config": [{"pg_desc": next(secret), "pg_name": "0"}]}
    return write_trace(folder / f"{SECRET}_rank{rank}.json", events, head)


def assert_clean(folder: Path, also: tuple[str, ...] = ()) -> None:
    """No file has a secret in it, in any case, packed or not."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    for file in files:
        content = file.read_bytes()
        content = gzip.decompress(content) if file.name.endswith(".gz") else content
        found = re.findall(rb".{0,60}" + SECRET.encode() + rb".{0,20}", content, re.IGNORECASE | re.DOTALL)
        assert not found, (file.name, found[:3])
        for text in also:
            assert text.encode() not in content, (file.name, text)


OUTPUTS = (
    ("run.et",), ("run.et", "--metadata"), ("run.et", "--fold-host"), ("run.et", "--for", "astra-sim"),
    ("rank{rank}.trace.json.gz",), ("all.trace.json",), ("r{rank}.trace.json", "--keep", "shapes"),
)  # fmt: skip


@pytest.mark.parametrize("output", OUTPUTS)
def test_no_secret_of_a_kineto_trace_passes(tmp_path: Path, output: tuple[str, ...]) -> None:
    source, out = tmp_path / SECRET / "in", tmp_path / SECRET / "out"
    source.mkdir(parents=True)
    out.mkdir()
    for rank in range(2):
        full_of_secrets(source, rank)
    name, *options = output
    done = lumos_here("convert", source, "--anonymise", "-o", out / name, *options)
    assert done.returncode == 0, done.stderr
    assert_clean(out, also=("1790857026",))
    assert "--keep" not in options or "Input Dims" in (out / "r0.trace.json").read_text()


@pytest.mark.parametrize("drop", ["", "gpu,operators,sizes,times"])
def test_no_secret_of_a_chakra_file_passes(tmp_path: Path, drop: str) -> None:
    """Our own files have the whole trace in them."""
    for name in ("source", "chakra", "out"):
        (tmp_path / name).mkdir()
    for rank in range(2):
        full_of_secrets(tmp_path / "source", rank)
    write_chakra(tmp_path / "chakra" / "run.et", executed(tmp_path / "source"))
    with pytest.raises(AssertionError):
        assert_clean(tmp_path / "chakra")  # the secrets are there
    for output in ("run.et", "rank{rank}.trace.json"):
        options = ("--drop", drop) if drop else ()
        done = lumos_here("convert", tmp_path / "chakra", "--anonymise", *options, "-o", tmp_path / "out" / output)
        assert done.returncode == 0, done.stderr
    assert_clean(tmp_path / "out", also=("1790857026",))


def test_no_secret_of_an_execution_trace_passes(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    events = [op("a", 0, 30), *launch("one", 5, 1), op(f"{SECRET}::b", 40, 30), *launch("two", 45, 2, stream=9)]
    events.append(op("record_param_comms", 80, 5))
    trace = write_trace(tmp_path / "rank0.json", events, header(0))
    groups = json.dumps([{"pg_name": SECRET, "pg_desc": SECRET, "ranks": [0, 1], "group_size": 2}])
    tensor = [1, 2, 0, 100, 4, f"cuda:{SECRET}"]
    names = ["a", f"{SECRET}::b", "record_param_comms"]
    nodes: list[dict[str, Any]] = [
        {"name": name, "id": i, "ctrl_deps": 0, "inputs": {"values": [tensor, SECRET], "shapes": [[100], SECRET],
         "types": [f"Tensor({SECRET})", SECRET]}, "outputs": {"values": [tensor], "shapes": [[100]], "types": [SECRET]},
         "attrs": [{"name": "rf_id", "value": i}, {"name": "tid", "value": 1}, {"name": "pg_name", "value": SECRET},
                   {"name": "collective_name", "value": SECRET}, {"name": "dtype", "value": SECRET}]}
        for i, name in enumerate(names, 1)
    ]  # fmt: skip
    first = {"name": "## process_group:init ##", "id": 9, "inputs": {"values": [groups], "shapes": [], "types": []}}
    et = tmp_path / "et.json"
    et.write_text(json.dumps({"schema": SECRET, "pid": SECRET, "nodes": [first, *nodes]}))
    done = lumos_here("convert", trace, "--et", et, "--anonymise", "-o", tmp_path / "out" / "run.et")
    assert done.returncode == 0, done.stderr
    assert "operators linked" in done.stdout
    assert_clean(tmp_path / "out")


def test_no_secret_of_an_nsight_file_passes(tmp_path: Path) -> None:
    path, process = tmp_path / f"{SECRET}.sqlite", 100 << 24
    names = [
        "cudaLaunchKernel_v7000",
        f"void {SECRET}::gemm<{SECRET}>",
        "step 3",
        f"{SECRET} attention",
        f"cuda{SECRET}",
    ]
    tables: dict[str, list[tuple[Any, ...]]] = {
        "StringIds (id INTEGER, value TEXT)": list(enumerate(names)),
        "TARGET_INFO_GPU (name TEXT)": [(SECRET,)],
        "TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT)": [("Hostname", SECRET)],
        "TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER)": [(1_790_857_026_000_000_000,)],
        "CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, correlationId, globalPid, demangledName, "
        "shortName)": [(2000, 5000, 0, 7, 1, process, 1, 1)],
        "CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId)":
            [(1000, 1500, process | 9, 1, 0), (6000, 6100, process | 9, 2, 4)],
        "NVTX_EVENTS (start, end, eventType, text, textId, globalTid)":
            [(500, 9000, 59, None, 2, process | 9), (600, 800, 59, SECRET, None, process | 9),
             (850, 900, 59, None, 3, process | 9)],
    }  # fmt: skip
    with sqlite3.connect(path) as database:
        for table, rows in tables.items():
            database.execute(f"CREATE TABLE {table}")
            marks = ", ".join("?" * len(rows[0]))
            database.executemany(f"INSERT INTO {table.partition(' ')[0]} VALUES ({marks})", rows)
    (tmp_path / "out").mkdir()
    for output in ("run.et", "run.trace.json"):
        done = lumos_here("convert", path, "--anonymise", "-o", tmp_path / "out" / output)
        assert done.returncode == 0, done.stderr
    assert_clean(tmp_path / "out", also=("1790857026",))


# ---------------------------------------------------------------------- names
WORDS = st.tuples(st.text("zyxwv", min_size=3, max_size=6), st.text("ZY_ :.<>()/#01", max_size=6)).map("".join)


@given(
    st.sampled_from(PREFIXES),
    WORDS,
    st.sampled_from(PREFIXES),
    st.sets(st.sampled_from(list(Category)), min_size=1, max_size=2),
)
def test_what_is_not_public_never_passes(prefix: str, word: str, suffix: str, within: set[Category]) -> None:
    name = f"{prefix}{word}{suffix}"
    new = NameMap().of(name, sorted(within))
    private = re.search("[zyxwv]{3,}", word, re.IGNORECASE)
    assert private is not None
    assert private.group().lower() not in new.lower()


@given(st.lists(st.tuples(st.sampled_from(PREFIXES), WORDS), min_size=1, max_size=30, unique=True))
def test_equal_names_stay_equal_and_others_different(parts: list[tuple[str, str]]) -> None:
    names = [prefix + word for prefix, word in parts]
    renamed = NameMap()
    new = [renamed.of(name, [Category.KERNEL]) for name in names]
    again = [renamed.of(name, [Category.KERNEL]) for name in names]
    assert new == again
    assert len(set(new)) == len(set(names))


KERNELS = (
    "gemm", "flash", "bwd", "nccl", "AllReduce", "softmax_warp_forward", "masked_softmax_warp_backward", "dot_do_o",
    "sm90", "tf32", "Pageable", "userbuffers", "nvshmem", "deep_ep", "allreduce_fusion", "sendrecv", "_mm_", "attn",
    "ncclDevKernel", "rccl", "triton_red_fused", "Async", "cudaMemcpy", "hip",
)  # fmt: skip
SCOPES = ("attention", "nccl:", "Optimizer.step#", "Optimizer.zero_grad", "FSDP::", "aten::", "flash_attn::", "mm")


@given(
    st.lists(st.sampled_from(KERNELS), max_size=4),
    st.sampled_from([[Category.KERNEL], [Category.COPY], [Category.CALL], [Category.OP, Category.KERNEL]]),
)
def test_a_kernel_keeps_what_the_analysis_reads_in_its_name(words: list[str], within: list[Category]) -> None:
    name = f"{SECRET}_" + "_".join(words)
    assert roles_of(NameMap().of(name, within), within) == roles_of(name, within)


@given(st.sampled_from(("", *SCOPES)), st.lists(st.sampled_from(SCOPES), max_size=2), st.sampled_from(Category))
def test_a_scope_keeps_what_the_analysis_reads_in_its_name(first: str, words: list[str], category: Category) -> None:
    name = first + SECRET + "_".join(words)
    assert roles_of(NameMap().of(name, [category]), [category]) == roles_of(name, [category])


def test_roles_are_those_that_the_analysis_reads() -> None:
    """Patterns of packages that this one cannot import, or that are their own affair."""
    assert public_names._ON_SMS.pattern == contention._ON_SMS.pattern
    assert public_names._GENERATION.pattern == contention._HOPPER_NAME.pattern
    assert public_names._TF32.pattern == traced_operators._TF32.pattern
    assert public_names._FUSED.pattern == traced_operators._FUSED.pattern
    assert public_names._SENDS == slowdown_jobs._MESSAGES


def test_public_names_are_kept_and_kinds_are_told() -> None:
    names = NameMap()
    kept = {
        Category.OP: ("aten::mm", "MmBackward0", "autograd::engine::evaluate_function: MmBackward0", "c10d::send"),
        Category.CALL: ("cudaLaunchKernel", "hipMemcpyAsync", "cuLaunchKernelEx"),
        Category.NOTE: ("ProfilerStep#12", "Optimizer.step#AdamW.step", "nccl:all_reduce", "FSDP::all_gather"),
        Category.COPY: ("Memcpy HtoD (Pageable -> Device)",),
    }  # fmt: skip
    for category, some in kept.items():
        assert [names.of(name, [category]) for name in some] == list(some)
    kernels = {
        "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN": "gemm_sm90_1",
        "void flash_bwd_kernel<Secret>": "attention_backward_1",
        "triton_poi_fused_secret_add_0": "triton_poi_fused_kernel_1",
        "vectorized_elementwise_kernel<4, Secret>": "elementwise_1",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)":
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        "mine": "kernel_1",
    }  # fmt: skip
    assert {name: names.of(name, [Category.KERNEL]) for name in kernels} == kernels
    assert names.of("FSDP::pre_forward (layers.3.mine)", [Category.NOTE]) == "FSDP::pre_forward (module_1)"
    assert names.of("FSDP::post_forward (layers.3.mine)", [Category.NOTE]) == "FSDP::post_forward (module_1)"
    assert names.of("train_loop", [Category.NOTE]) == "scope_1"
    assert names.of("mylib::mm", [Category.OP]) == "custom::op_1"


def groups_of(pattern: str) -> list[str]:
    """The text of every group of a pattern that is counted."""
    opened: list[tuple[int, int]] = []
    found: dict[int, str] = {}
    for match in re.finditer(r"\\.|\((\?P?[:<])?|\)", pattern):
        if match.group().startswith("("):
            counted = match.group() != "(?:"
            opened.append((match.start(), len(found) + sum(n >= 0 for _, n in opened) if counted else -1))
        elif match.group() == ")":
            start, number = opened.pop()
            if number >= 0:
                found[number] = pattern[start : match.end()]
    return [found[number] for number in sorted(found)]


def test_what_a_rule_keeps_is_one_of_a_few_words_or_digits() -> None:
    for pattern, becomes, _ in vocabulary().rules:
        groups = groups_of(pattern.pattern)
        assert len(groups) == pattern.groups
        for number in map(int, re.findall(r"\{(\d)\}", becomes)):
            assert re.fullmatch(r"[\w|():?*{},\\ ]*", groups[number]), groups[number]
            assert not re.search(r"\\[wWsSD]|P<", groups[number]), groups[number]
    for form in (vocabulary().forms, vocabulary().library_forms):
        assert not re.search(r"\\[wWSD]|(?<!\\)\.[*+]", form.pattern)


# ---------------------------------------------------------------------- the command
def converted(folder: Path, *options: object, output: str = "run.et", source: Path = EXAMPLE) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    done = lumos_here("convert", source, "--anonymise", "-o", folder / output, "--json", *options)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def shown(answer: dict[str, Any]) -> dict[str, str]:
    return {one["what"]: one["value"] for one in answer["anonymised"]["still_shown"]}


@pytest.fixture(scope="module")
def kineto_answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return converted(tmp_path_factory.mktemp("kineto"), output="rank{rank}.trace.json")


def test_it_says_what_can_still_be_inferred(kineto_answer: dict[str, Any]) -> None:
    found = shown(kineto_answer)
    run = replay(read_job(EXAMPLE))
    assert found["step"] == f"{run.recorded_steps.mean:.4g} ms"
    assert found["cluster.gpu"] == "h200"
    assert found["parallel.dp"] == "4"
    assert found["layers × micro-batches"] == "3"
    assert found["parameters, at most"] == "13.83 million a rank"
    sent = {max(message.in_elements, message.out_elements) for message in run.execution.trace.messages}
    assert f"{max(sent):,}" in found["elements of single messages"]
    assert kineto_answer["anonymised"]["names"]["replaced"] > 40


@pytest.mark.parametrize("drop", ["gpu", "operators", "sizes", "times"])
def test_what_it_says_can_be_dropped_is_gone_when_it_is_dropped(
    kineto_answer: dict[str, Any], tmp_path: Path, drop: str
) -> None:
    after = shown(converted(tmp_path / "after", "--drop", drop, output="rank{rank}.trace.json"))
    removable = [one for one in kineto_answer["anonymised"]["still_shown"] if one["drop"] == drop]
    assert removable
    for one in removable:
        assert after.get(one["what"]) != one["value"], one


def test_what_was_dropped_is_not_advised_again(tmp_path: Path, shared_data: Path) -> None:
    source = shared_data / "h200/single/compile_base.pt.trace.json.gz"
    answer = converted(tmp_path / "out", "--drop", "gpu,operators,sizes,times", source=source)
    assert {one["drop"] for one in answer["anonymised"]["still_shown"]} == {""}
    assert "libraries" not in shown(answer)  # not even Triton
    assert shown(answer)["step"].endswith(" ms, scaled by a secret factor")


def test_types_of_messages_go_with_their_sizes() -> None:
    name = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    assert NameMap().of(name, [Category.KERNEL]) == "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"
    hidden = NameMap(types=False)
    assert hidden.of(name, [Category.KERNEL]) == "ncclDevKernel_ReduceScatter_Sum_RING_LL"
    assert hidden.of(name.replace("bf16", "f32"), [Category.KERNEL]) == "ncclDevKernel_ReduceScatter_Sum_RING_LL_1"
    assert (
        hidden.of("ncclKernel_AllReduce_RING_LL_Sum_float(a)", [Category.KERNEL]) == "ncclKernel_AllReduce_RING_LL_Sum"
    )


def test_dropped_times_keep_their_ratios(tmp_path: Path) -> None:
    converted(tmp_path / "scaled", "--drop", "times")
    before, after = replay(read_job(EXAMPLE)), replay(read_job(tmp_path / "scaled"))
    factor = after.recorded_steps.mean / before.recorded_steps.mean
    assert 0.5 <= factor <= 2.0
    assert factor != pytest.approx(1.0, abs=1e-9)
    assert after.simulated_steps.mean / before.simulated_steps.mean == pytest.approx(factor, rel=1e-4)
    for rank, part in before.recorded_breakdown.items():
        assert after.recorded_breakdown[rank].compute_ms == pytest.approx(factor * part.compute_ms, rel=1e-2)


def coherence(times: np.ndarray, tick: float, factors: np.ndarray) -> np.ndarray:
    """How well times are multiples of a scaled tick: 1 if all of them are, about 1 / √(number of times) if none is."""
    return np.array([abs(np.exp(2j * np.pi * times / (tick * factor)).mean()) for factor in factors])


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Execution, dict[str, Execution], float]:
    """The example, the same with dropped times as both kinds of files have it, and the secret factor."""
    before = executed(EXAMPLE)
    hidden = anonymise(before, ["times"]).execution
    folder = tmp_path_factory.mktemp("scaled")
    files = {form: executed(written(folder / form, hidden, form)) for form in FORMS}
    return before, files, float(np.ptp(hidden.trace.end)) / float(np.ptp(before.trace.end))


@pytest.mark.parametrize("form", FORMS)
def test_the_secret_factor_cannot_be_found_by_the_ticks_of_the_clock(
    scaled: tuple[Execution, dict[str, Execution], float], form: str
) -> None:
    """GPUs count in 32 ns, so the factor is the one for which most durations are multiples of 32 ns times it."""
    before, files, factor = scaled
    after, gpu = files[form], before.trace.duration[before.trace.on_gpu]
    nearby = factor * np.linspace(0.999, 1.001, 2001)
    assert coherence(np.rint(gpu * factor), 32, nearby).max() > 0.95  # the attack works where times are only scaled
    busy = after.nodes.on_gpu
    for found in (
        after.trace.duration[after.trace.on_gpu], after.trace.start[after.trace.on_gpu], after.nodes.start[busy],
        after.graph.duration[: len(after.nodes)][busy & (after.graph.duration[: len(after.nodes)] > 0)],
    ):  # fmt: skip
        assert coherence(found, 32, nearby).max() < 0.15
    graph = after.graph
    delays = np.concatenate([graph.gap, graph.frozen, graph.edges.lag, graph.edges.frozen])
    delays = delays[delays != 0] / factor
    assert np.isclose(delays, np.rint(delays / 500) * 500, rtol=0, atol=1e-3).mean() < 0.005  # no scaled usual lags


def test_times_of_a_profiler_that_counts_microseconds_are_blurred_by_as_much(tmp_path: Path) -> None:
    chance, events, at = random.Random(7), [], 0
    for number in range(400):
        length = chance.randint(2, 60)
        events += [call("cudaLaunchKernel", at, 1, number), kernel("gemm", at + 3, length, number)]
        at += 5 + length + chance.randint(0, 9)
    before = executed(write_trace(tmp_path / "rank0.json", events, header(0)))
    after, rows = anonymise(before, ["times"]).execution, before.trace.on_gpu
    factor = float(np.ptp(after.trace.end)) / float(np.ptp(before.trace.end))
    times = (before.trace.start[rows] - before.trace.start.min()) * factor
    nearby = factor * np.linspace(0.99, 1.01, 201)
    assert coherence(times, 1000, nearby).max() > 0.99
    assert coherence(after.trace.start[rows], 1000, nearby).max() < 0.3
    assert np.abs(np.diff(after.trace.start[rows] - times)).max() < 20_000  # no more than that


def test_hidden_times_keep_the_order_of_everything(scaled: tuple[Execution, dict[str, Execution], float]) -> None:
    """What was sooner stays sooner, and what was at one time stays so: tasks do not overlap, nesting and waits stay."""
    before, files, _ = scaled
    after = files["et"]

    def order(execution: Execution) -> list[int]:
        trace, nodes = execution.trace, execution.nodes
        times = np.concatenate([trace.start, trace.end, nodes.start, nodes.end])
        return list(np.unique(times, return_inverse=True)[1].tolist())

    assert order(after) == order(before)
    for column in ("source", "target", "rule", "from_start"):
        assert getattr(after.graph.edges, column).tolist() == getattr(before.graph.edges, column).tolist()
    simulated = simulate(after.graph).end[: len(after.nodes)] + after.origin
    assert np.abs(simulated - after.nodes.end).max() <= 1  # the graph gives the new times back


def test_a_graph_of_another_tool_keeps_its_ratios_with_hidden_times(shared_data: Path) -> None:
    before = executed(shared_data / "public/chakra/chakra.0.et")
    after = anonymise(before, ["times"]).execution
    factor = after.trace.end.max() / float(before.trace.end.max() - before.trace.start.min())
    assert simulate(after.graph).span == pytest.approx(factor * simulate(before.graph).span, rel=1e-3)
    assert coherence(after.trace.duration[after.trace.duration > 0], 1000, np.array([factor])).max() < 0.2


def test_dropped_operators_and_sizes_leave_the_figures(tmp_path: Path) -> None:
    before = replay(read_job(EXAMPLE))
    hidden = anonymise(before.execution, ["operators", "sizes"])
    names = " ".join(hidden.execution.trace.names)
    assert "aten::" not in names
    assert "AdamW" not in names
    after = replay(read_job(written(tmp_path / "k", hidden.execution, "kineto")))
    assert after.answer.clean_ms == before.answer.clean_ms
    assert bare([vars(s) for s in after.stragglers]) == bare([vars(s) for s in before.stragglers])
    assert {one.bytes for one in after.collectives} == {-1}


def test_the_table_is_for_people(tmp_path: Path) -> None:
    done = lumos_here("convert", EXAMPLE, "--anonymise", "-o", tmp_path / "run.et")
    assert "what the files still disclose" in done.stdout
    assert re.search(r"layers × micro-batches +3 +attention kernels", done.stdout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--drop", "gpu"), "--drop gpu: says what an anonymised trace has in it; add --anonymise"),
        (("--keep", "shapes"), "--keep shapes: says what an anonymised trace has in it; add --anonymise"),
        (("--anonymise", "--keep", "names"), "--keep names: no such part of a trace; it can keep shapes"),
        (
            ("--anonymise", "--keep", "shapes"),
            "--keep shapes: Chakra files have no shapes of operators; use -o 'NAME{rank}.trace.json.gz'",
        ),
        (
            ("--anonymise", "--keep", "shapes", "--drop", "sizes"),
            "--keep shapes and --drop sizes: shapes are sizes of named operators; choose one of them",
        ),
        (("--anonymise", "--drop", "x"), "--drop x: no such part of a trace; it can drop gpu, operators, sizes, times"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done = lumos_here("convert", EXAMPLE, "-o", tmp_path / "run.et", *options)
    assert done.returncode == 2
    assert done.stderr.strip() == f"lumos: {message}"
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- what no longer works
def test_another_configuration_needs_shapes_and_says_so(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "h200/single/tiny_l2_h512.pt.trace.json.gz"
    converted(tmp_path / "out", output="run.trace.json.gz", source=source)
    done = lumos_here("predict", "--from", tmp_path / "out" / "run.trace.json.gz", "--set", "model.layers=4")
    assert done.returncode == 2
    assert "not left out by lumos convert" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    done = lumos_here("check", tmp_path / "out" / "run.trace.json.gz")
    assert "operators have no shapes" in done.stdout


def test_with_shapes_another_configuration_is_predicted_as_from_the_trace_itself(
    shared_data: Path, tmp_path: Path
) -> None:
    source = shared_data / "h200/single/tiny_l2_h512.pt.trace.json.gz"
    answer = converted(tmp_path / "out", "--keep", "shapes", output="run.trace.json.gz", source=source)
    assert shown(answer)["model.hidden"] == "512"  # and it says so
    change = ("--set", "model.layers=4", "--set", "train.micro_batch=2", "--json")
    before = json.loads(lumos_here("predict", "--from", source, *change).stdout)
    after = json.loads(lumos_here("predict", "--from", tmp_path / "out" / "run.trace.json.gz", *change).stdout)
    for key in ("step_ms", "interval_ms", "memory_gib", "mfu", "parameters", "breakdown"):
        assert after.get(key) == before.get(key), key
    assert "step_ms" in before


def test_shapes_that_are_not_there_cannot_be_kept(tmp_path: Path) -> None:
    done = lumos_here("convert", EXAMPLE, "--anonymise", "--keep", "shapes", "-o", tmp_path / "all.trace.json")
    assert "--keep shapes needs a file for each rank" in done.stderr
    path = write_trace(tmp_path / "rank0.json", training_run(), header(0))
    done = lumos_here("convert", path, "--anonymise", "--keep", "shapes", "-o", tmp_path / "a.trace.json")
    assert done.returncode == 2
    assert done.stderr.strip() == f"lumos: --keep shapes: {path} has no shapes of operators; leave it out"


def test_warnings_in_words_of_our_own_stay(tmp_path: Path) -> None:
    before = executed(EXAMPLE)
    kept = "3 collectives lack the traces of some participants; their waiting is a lower bound"
    told = replace(before, warnings=(kept, f"{SECRET}.json: ends in the middle"))
    assert anonymise(told).execution.warnings == (kept,)


def test_ids_and_threads_say_nothing_of_the_process(tmp_path: Path) -> None:
    events = [note("ProfilerStep#1", 0, 100, tid=700123), call("cudaLaunchKernel", 5, 5, 900123, tid=700123),
              kernel("gemm", 12, 5, 900123), call("cudaLaunchKernel", 15, 5, 900125, tid=700123)]  # fmt: skip
    hidden = anonymise(executed(write_trace(tmp_path / "rank0.json", events, header(0)))).execution.trace
    assert sorted(hidden.correlation[hidden.correlation >= 0]) == [0, 0, 2]
    assert {(lane.process, lane.label) for lane in hidden.lanes} == {("1", "1"), ("0", "7")}


def test_streams_that_are_addresses_become_numbers_and_syncs_follow_them(tmp_path: Path) -> None:
    stream = 94_211_345_678
    events = [note("ProfilerStep#1", 0, 100), *launch("gemm", 5, 1), call("cudaLaunchKernel", 15, 5, 2),
              kernel("gemm", 40, 5, 2, stream), call("cudaStreamSynchronize", 30, 20, 3),
              sync("Stream Sync", 30, 20, 3, stream)]  # fmt: skip
    before = executed(write_trace(tmp_path / "rank0.json", events, header(0)))
    hidden = anonymise(before).execution
    (label,) = {lane.label for lane in hidden.trace.lanes if lane.is_stream} - {"7"}
    assert hidden.trace.syncs.stream.tolist() == [int(label)]
    assert str(stream) not in "".join(map(str, hidden.trace.lanes))
