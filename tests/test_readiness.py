"""What a trace lacks is said, with the answers that it costs; what is there is not mentioned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import lumos_here
from lumos import read_job, replay
from lumos.analysis.readiness import Readiness
from support import Event, call, header, kernel, note, op, training_run, write_trace

SHARED = Path(__file__).resolve().parents[2] / "shared/data"
H200 = Path(__file__).parent / "data/capture"


def attention(steps: int = 2) -> list[Event]:
    """A forward and a backward attention in every step, and an optimizer: what a training step of a transformer has."""
    found = []
    for step in range(steps):
        at = 1200 * step
        found += [op("autograd::engine::evaluate_function: X", at + 300, 20)]
        for number, name, begin in ((1, "flash_fwd_kernel", at + 30), (2, "flash_bwd_kernel", at + 305)):
            found += [call("cudaLaunchKernel", begin, 2, 90_000 + 10 * step + number)]
            found += [kernel(name, begin + 10, 1, 90_000 + 10 * step + number, 33)]
        found += [note("Optimizer.step#AdamW.step", at + 330, 5)]
    return found


def whole_job(folder: Path, world: int = 2, **head: Any) -> Path:
    """All ranks of a job that lacks nothing: steps 3 and 4, shapes, synchronisation events."""
    for rank in range(world):
        events = _renumbered(training_run(rank=rank) + attention())
        write_trace(folder / f"rank{rank}.json", events, header(rank=rank, world_size=world) | head)
    return folder


def _renumbered(events: list[Event]) -> list[Event]:
    return [e | {"name": e["name"].replace("Step#0", "Step#3").replace("Step#1", "Step#4")} for e in events]


def readiness(path: Path, **files: bool) -> Readiness:
    return Readiness(replay(read_job(path)), **files)


def lacks(path: Path, **files: bool) -> dict[str, str]:
    return {finding.what: finding.lacks for finding in readiness(path, **files).findings}


def rewritten(path: Path, change: Any) -> Path:
    for file in path.glob("rank*.json"):
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | {"traceEvents": change(content["traceEvents"])}))
    return path


def test_a_job_that_has_everything_lacks_nothing(tmp_path: Path) -> None:
    found = readiness(whole_job(tmp_path))
    assert found.findings == []
    assert all(found.ready.values())


def test_a_missing_rank_costs_the_stragglers(tmp_path: Path) -> None:
    (whole_job(tmp_path) / "rank1.json").unlink()
    found = readiness(tmp_path)
    assert {f.what: f.lacks for f in found.findings} == {"all ranks": "1 of 2 ranks"}
    assert not found.ready["multi_rank"]


def test_a_world_that_no_file_states_is_at_least_its_largest_group(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank0.json", _renumbered(training_run() + attention()), header(rank=0))
    assert lacks(tmp_path) == {"all ranks": "1 of at least 2 ranks"}


def test_a_fake_process_group_is_named(tmp_path: Path) -> None:
    info = {"distributedInfo": {"backend": "fake", "rank": 0, "world_size": 64}}
    write_trace(tmp_path / "rank0.json", _renumbered(training_run() + attention()), header() | info)
    assert lacks(tmp_path) == {"real peers": "1 of 64 ranks, in a fake process group: collectives moved nothing"}


def test_shapes_are_found_missing_unless_the_file_has_them(tmp_path: Path) -> None:
    whole_job(tmp_path, record_shapes=0)
    assert set(lacks(tmp_path)) == {"shapes"}
    assert lacks(tmp_path, shapes=True) == {}


def test_streams_that_wait_need_synchronisation_events(tmp_path: Path) -> None:
    whole_job(tmp_path)
    rewritten(tmp_path, lambda events: [e for e in events if e.get("cat") != "cuda_sync"])
    assert lacks(tmp_path)["synchronisation events"].startswith("16 calls")


def test_marks_that_are_not_there_are_missed(tmp_path: Path) -> None:
    rewritten(whole_job(tmp_path), lambda events: [e for e in events if not e["name"].startswith("ProfilerStep")])
    assert lacks(tmp_path)["step marks"] == "nothing says where a step begins"


def test_ranks_with_other_steps_are_named(tmp_path: Path) -> None:
    whole_job(tmp_path)
    file = tmp_path / "rank1.json"
    file.write_text(file.read_text().replace("ProfilerStep#4", "ProfilerStep#9"))
    found = lacks(tmp_path)
    assert "the same steps on all ranks" in found
    assert found["several steps"] == "one step, ProfilerStep#3"


def test_a_first_step_is_no_warm_up(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank0.json", training_run() + attention(), header(world_size=1))
    assert lacks(tmp_path)["a warm-up"] == "ProfilerStep#0 was recorded"


def test_a_first_step_that_is_slow_is_told_by_how_much(tmp_path: Path) -> None:
    marks = [note("ProfilerStep#3", 0, 3000), note("ProfilerStep#4", 3000, 1000)]
    events = [*marks, op("aten::mm", 10, 100), call("cudaLaunchKernel", 20, 5, 1), kernel("gemm", 30, 10, 1),
              op("aten::mm", 3010, 100), call("cudaLaunchKernel", 3020, 5, 2), kernel("gemm", 3030, 10, 2)]  # fmt: skip
    write_trace(tmp_path / "rank0.json", events, header())
    assert lacks(tmp_path)["a warm-up"] == "the first step takes 3.0 times the others"


def test_kernels_from_before_the_recording_are_counted(tmp_path: Path) -> None:
    early = [kernel("gemm", 1 + i, 1, 70_000 + i) for i in range(10)]
    whole_job(tmp_path)
    rewritten(tmp_path, lambda events: events + early)
    assert lacks(tmp_path)["the launches of all kernels"].startswith("20 of ")


def test_calls_without_kernels_and_kernels_without_calls(tmp_path: Path) -> None:
    calls = [op("aten::mm", 0, 50), call("cudaLaunchKernel", 10, 5, 1)]
    write_trace(tmp_path / "calls.json", calls, header())
    assert "GPU activity" in lacks(tmp_path / "calls.json")
    write_trace(tmp_path / "kernels.json", [kernel("gemm", 10, 5, 1)], header())
    found = readiness(tmp_path / "kernels.json")
    assert "the host" in {f.what for f in found.findings}
    assert (found.ready["scale"], found.ready["host"], found.ready["change"]) == (True, False, False)


def test_a_run_on_a_cpu_is_named_and_can_be_asked(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank0.json", [op("aten::mm", 0, 50), op("aten::add", 60, 5)], header())
    found = readiness(tmp_path)
    assert "prices" in {f.what for f in found.findings}
    assert found.ready["scale"]


def test_graphs_and_stacks_are_pointed_out(tmp_path: Path) -> None:
    whole_job(tmp_path, with_stack=1)
    rewritten(tmp_path, lambda events: [*events, call("cudaGraphLaunch", 1, 1, 80_000)])
    assert {"operators of CUDA graphs", "an undisturbed host"} <= set(lacks(tmp_path))


def test_a_file_that_ends_in_the_middle_is_said_first(tmp_path: Path) -> None:
    whole_job(tmp_path)
    file = tmp_path / "rank1.json"
    file.write_bytes(file.read_bytes()[:-4000])
    assert readiness(tmp_path).findings[0].what == "the whole file"


def test_inference_has_no_backward_pass(tmp_path: Path) -> None:
    rewritten(whole_job(tmp_path), lambda events: [e for e in events if "bwd" not in e["name"]])
    assert lacks(tmp_path)["layers that can be told apart"] == "no attention is recognised in the backward pass"
    assert not readiness(tmp_path).ready["change"]


# The command


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lumos.cli.main", "check", *arguments], capture_output=True, text=True)


def test_findings_are_no_failure_and_the_answer_is_json(tmp_path: Path) -> None:
    done = check(str(H200 / "fake_world"), "--json", "-o", str(tmp_path / "found.csv"))
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert {"path", "ranks", "steps", "findings", "ready"} <= set(answer)
    assert [finding["what"] for finding in answer["findings"]] == ["real peers", "several steps"]
    assert (tmp_path / "found.csv").read_text().splitlines()[0] == "what,lacks,answers,record"


def test_a_setup_that_torch_alone_filled_in_says_nothing_of_the_model() -> None:
    found = {name: json.loads(check(str(H200 / name), "--json").stdout)["findings"] for name in ("context", "command")}
    assert [f["what"] for f in found["context"]] == []
    assert [f["what"] for f in found["command"]] == ["several steps", "the setup"]


def test_the_table_says_what_to_do(tmp_path: Path) -> None:
    shown = check(str(H200 / "command")).stdout
    assert "lumos.capture(…, setup=…)" in shown
    assert "yes  where the step goes" in shown


# Real traces: what each is known to lack


@pytest.mark.data
@pytest.mark.parametrize(
    ("path", "lacking"),
    [
        ("h200/single/base_l8_h2048_s2048_b2.pt.trace.json.gz", set()),
        ("h200/multirank/fsdp2_l8", set()),
        ("h200/fake_world", {"real peers", "step marks", "synchronisation events"}),
        (
            "public/megatron_tp8_a100/kineto",
            {"several steps", "synchronisation events", "layers that can be told apart"},
        ),
        ("public/tracelens/mi210/gpu_only_trace", {"operators", "step marks"}),
        ("public/hta/mixed_files", {"prices", "several steps", "layers that can be told apart"}),
    ],
)
def test_a_real_trace_lacks_what_it_is_known_to_lack(path: str, lacking: set[str]) -> None:
    if not (SHARED / path).exists():
        pytest.skip(f"{path} is not among the shared measurements here")
    shapes = path != "public/hta/mixed_files"  # whose header does not say that it has them
    assert set(lacks(SHARED / path, shapes=not shapes)) == lacking


def test_of_many_steps_only_the_first_are_listed(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank0.json", training_run(steps=60), header(0))
    shown = " ".join(lumos_here("check", tmp_path).stdout.split())
    assert "ProfilerStep#39 and 20 more" in shown
    assert "ProfilerStep#40" not in shown
