"""Recording: by really training, in several processes on the CPU; and what was recorded so on an H200."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import lumos
from lumos import LumosError, read_job, replay
from lumos.capture import Recording
from lumos.capture.command import _Forwarding as Forwarding
from lumos.capture.command import environment
from lumos.capture.recording import Plan
from lumos.capture.setup_file import setup_files
from lumos.errors import OptionError
from support import PATIENCE_S

torch = pytest.importorskip("torch", reason="recording needs torch, the extra [capture]")

ROOT = Path(__file__).resolve().parents[1]
H200 = Path(__file__).parent / "data/capture"
TINY = shlex.split("--layers 2 --hidden 32 --ffn 64 --heads 2 --vocab 64 --seq 16 --micro-batch 2 --steps 9")
TRAIN = [sys.executable, str(ROOT / "examples/train_tiny.py"), *TINY]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LUMOS = [sys.executable, "-m", "lumos.cli.main"]


def run(*command: str, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=ENVIRONMENT | more, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S)


def capture_command(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "lumos.cli.main", "capture", *arguments, **more)


def events(path: Path) -> list[dict[str, Any]]:
    content = json.loads(gzip.decompress(path.read_bytes()))
    return [event for event in content["traceEvents"] if event.get("ph") == "X"]


def step_marks(path: Path) -> list[str]:
    return sorted(event["name"] for event in events(path) if event["name"].startswith("ProfilerStep"))


def work() -> None:
    torch.ones(8, 8) @ torch.ones(8, 8)


def record(folder: Path, loops: int, **options: Any) -> Recording:
    with lumos.capture(folder, **options) as step:
        for _ in range(loops):
            work()
            step()
    return step


# Two ranks that train


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for _ in range(3):  # on a busy machine, the ranks may give up waiting for each other while they start
        folder = tmp_path_factory.mktemp("two_ranks")
        done = run(*TRAIN, "--nproc", "2", "--warmup", "3", "--capture", str(folder))
        if done.returncode == 0:
            return folder
    pytest.fail(done.stderr)


def test_every_rank_writes_a_trace_and_the_first_writes_what_belongs_to_the_job(two_ranks: Path) -> None:
    traces = ["rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz"]
    assert sorted(os.listdir(two_ranks)) == ["capture.json", *traces, "setup.toml"]


def test_the_asked_for_steps_are_marked_and_operators_have_shapes(two_ranks: Path) -> None:
    for trace in two_ranks.glob("rank*"):
        assert step_marks(trace) == ["ProfilerStep#3", "ProfilerStep#4"]
        matmuls = [event for event in events(trace) if event["name"] == "aten::mm"]
        assert all("Input Dims" in event["args"] for event in matmuls)
        assert matmuls


def test_steps_without_the_profiler_were_timed_before_and_after(two_ranks: Path) -> None:
    told = json.loads((two_ranks / "capture.json").read_text())
    assert (told["world"], told["backend"], told["device"], told["steps"]) == (2, "gloo", "cpu", 2)
    clean = told["without_profiler"]
    assert clean["never_profiled"]["steps"] == 1  # of three to warm up, the first is slow, and the last is profiled
    assert clean["after"]["steps"] == 3
    assert clean["after"]["mean_ms"] > 0


def test_the_setup_lies_beside_the_traces(two_ranks: Path) -> None:
    setup = tomllib.loads((two_ranks / "setup.toml").read_text())
    assert setup["model"]["layers"] == 2
    assert setup["parallel"]["dp"] == 2
    assert setup["cluster"] == {"gpu": "cpu"}


def test_a_replay_of_a_cpu_run_is_right_and_knows_its_collectives(two_ranks: Path) -> None:
    replayed = replay(read_job(two_ranks))
    assert abs(replayed.error_pct) < 5
    assert replayed.marks.ranks == (0, 1)
    steps, buckets = 2, 1
    assert [c.collective for c in replayed.collectives] == ["all_reduce"] * steps * buckets
    assert all(part.compute_ms > 0 for part in replayed.recorded_breakdown.values())
    assert replayed.operators()[0].name.startswith("aten::")


# A command to which no line is added


@pytest.mark.slow
def test_a_command_is_recorded_through_its_launcher(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *TRAIN[1:]]
    for _ in range(3):  # on a busy machine, gloo's threads may abort a rank that ends after its peer (SIGABRT)
        done = capture_command("-o", str(tmp_path), "--warmup", "3", "--", *launcher)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    assert "2 traces" in done.stderr
    assert replay(read_job(tmp_path)).marks.names == ("ProfilerStep#3", "ProfilerStep#4")
    told = tomllib.loads((tmp_path / "setup.toml").read_text())
    assert told == {"model": {}, "train": {}, "cluster": {"gpu": "cpu", "gpus": 2}}


def test_the_marks_of_a_command_lie_around_those_of_its_optimizer(tmp_path: Path) -> None:
    """Marks that cross would tear a thread's nesting apart."""
    assert capture_command("-o", str(tmp_path), "--warmup", "2", "--", *TRAIN).returncode == 0
    found = events(tmp_path / "rank0.pt.trace.json.gz")
    spans = {name: [(e["ts"], e["ts"] + e["dur"]) for e in found if e["name"].startswith(name)]
             for name in ("ProfilerStep", "Optimizer.step")}  # fmt: skip
    assert len(spans["Optimizer.step"]) == 2
    for begin, end in spans["Optimizer.step"]:
        assert any(low <= begin and end <= high for low, high in spans["ProfilerStep"])


def test_the_exit_code_is_the_commands_and_nothing_recorded_is_said(tmp_path: Path) -> None:
    done = capture_command("-o", str(tmp_path), "--", sys.executable, "-c", "raise SystemExit(7)")
    assert done.returncode == 7
    assert done.stderr.startswith("lumos: nothing was recorded")
    assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dry", [[], ["--dry"]])
def test_a_full_disk_is_one_line_and_leaves_nothing_behind(tmp_path: Path, dry: list[str]) -> None:
    """A limit on the size of files stands in for the disk: the signal that comes with it is ignored, as on a disk."""
    full = (
        "import os, resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512)); os.execv(sys.argv[1], sys.argv[1:])"
    )
    train = [sys.executable, "-c", full, *TRAIN]
    done = capture_command("-o", str(tmp_path / "full\x1b[2J"), "--warmup", "2", *dry, "--", *train)
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr.replace("USDT", "")
    assert os.listdir(tmp_path / "full\x1b[2J") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_command_and_the_processes_below_it(tmp_path: Path, number: signal.Signals) -> None:
    """The launcher hands nothing on, as a shell script does not."""
    script = "sleep 1000 & sleep 1000 & echo ready; wait"
    line = [*LUMOS, "capture", "-o", str(tmp_path / "out"), "--", "bash", "-c", script]

    def heed() -> None:  # the tests may run under nohup, which makes all processes ignore SIGHUP
        signal.signal(number, signal.SIG_DFL)

    with subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True, text=True, preexec_fn=heed) as process:
        assert process.stdout is not None
        process.stdout.readline()
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        process.wait(PATIENCE_S)
    assert len(below) == 3
    assert not [one for one in below if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_a_command_that_ends_in_its_own_time_after_a_signal_is_waited_for(tmp_path: Path) -> None:
    script = "trap 'sleep 0.5; touch saved; exit 7' TERM; echo ready; while :; do sleep 0.1; done"
    line = [*LUMOS, "capture", "-o", "out", "--", "bash", "-c", script]
    with subprocess.Popen(line, stdout=subprocess.PIPE, cwd=tmp_path, start_new_session=True, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait() == 7
    assert (tmp_path / "saved").exists()


def test_a_second_signal_ends_a_command_that_ignores_the_first(tmp_path: Path) -> None:
    script = "trap 'echo heard' TERM; echo ready; while :; do sleep 0.1; done"
    line = [*LUMOS, "capture", "-o", "out", "--", "bash", "-c", script]
    with subprocess.Popen(line, stdout=subprocess.PIPE, cwd=tmp_path, start_new_session=True, text=True) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
            process.terminate()
        assert process.wait() == 128 + signal.SIGKILL


def test_no_module_is_imported_while_a_signal_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "psutil", raising=False)
    with Forwarding():
        assert "psutil" in sys.modules  # a second signal would find it half imported


def test_a_signal_that_comes_while_another_is_passed_on_reaches_processes_started_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passing, sent = Forwarding(), []

    def send(process: psutil.Process, number: int) -> None:
        sent.append((process.pid, number))
        if len(sent) == 1:
            monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [psutil.Process(os.getppid())])
            passing._receive(signal.SIGHUP, None)

    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [])
    monkeypatch.setattr(psutil.Process, "send_signal", send)
    passing.start(os.getpid())
    passing._receive(signal.SIGTERM, None)
    assert {(os.getpid(), signal.SIGTERM), (os.getppid(), signal.SIGHUP)} <= set(sent)


def test_too_few_steps_are_said_with_their_number(tmp_path: Path) -> None:
    done = capture_command("-o", str(tmp_path), "--warmup", "20", "--", *TRAIN)
    assert done.returncode == 0
    assert "the loop ended after 9 steps, and 20 come before" in done.stderr


def test_gradient_accumulation_is_one_step_and_a_second_optimizer_is_part_of_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "models = [torch.nn.Linear(4, 4) for _ in range(2)]\n"
        "optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]\n"
        "for step in range(4):\n"
        "    for micro in range(3):\n"
        "        models[1](models[0](torch.ones(2, 4))).sum().backward()\n"
        "    for optimizer in optimizers:\n"
        "        optimizer.step()\n"
    )
    folder = tmp_path / "traces"
    done = capture_command("-o", str(folder), "--warmup", "2", "--steps", "1", "--", sys.executable, str(script))
    assert done.returncode == 0
    names = [event["name"] for event in events(folder / "rank0.pt.trace.json.gz")]
    assert (names.count("ProfilerStep#2"), names.count("Optimizer.step#SGD.step")) == (1, 2)
    assert sum(name.startswith("autograd::engine") and "AddmmBackward" in name for name in names) == 6


def test_a_sitecustomize_of_the_machine_is_still_run(tmp_path: Path) -> None:
    says = "import os\nif 'LUMOS_CAPTURE' in os.environ: print('the machine’s own')\n"
    (tmp_path / "sitecustomize.py").write_text(says)
    done = capture_command("-o", str(tmp_path / "t"), "--", sys.executable, "-c", "pass", PYTHONPATH=str(tmp_path))
    assert done.stdout == "the machine’s own\n"


def test_a_python_without_lumos_records_with_ours() -> None:
    """Only Lumos itself is lent to it, not the folder in which it lies."""
    variables = environment(Plan(Path("/nowhere"), 1, 1), {"PYTHONPATH": "theirs"})
    assert variables["PYTHONPATH"].split(os.pathsep) == [str(ROOT / "src/lumos/capture/startup"), "theirs"]
    code = "import sitecustomize; sitecustomize._load_lumos(); import lumos.capture.command; print(lumos.__file__)"
    done = run(sys.executable, "-S", "-c", code, **variables)
    assert done.stdout.strip() == str(ROOT / "src/lumos/__init__.py"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--steps", "0", "--", "true"], "steps = 0"),
        (["--warmup", "0", "--", "true"], "warmup = 0"),
        (["--rank", "1", "--", "true"], "--world"),
        (["--fake-world", "4", "--rank", "4", "--", "true"], "rank 4 of 4"),
        (["--setup", "missing.toml", "--", "true"], "missing.toml: no such file"),
        (["--", "no-such-command"], "no-such-command: cannot be run"),
    ],
)
def test_a_wrong_option_is_one_line_before_anything_runs(tmp_path: Path, arguments: list[str], says: str) -> None:
    done = capture_command("-o", str(tmp_path / "traces"), *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert says in done.stderr


# A world of which one rank is there


def test_a_command_is_one_rank_of_a_fake_world(tmp_path: Path) -> None:
    done = capture_command("-o", str(tmp_path), "--warmup", "2", "--fake-world", "64", "--rank", "5", "--", *TRAIN)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "capture.json").read_text())
    assert (told["rank"], told["world"], told["backend"]) == (5, 64, "fake")
    header = read_job(tmp_path).headers[0]
    assert (header.rank, header.world_size) == (5, 64)
    assert any(event["name"] == "c10d::allreduce_" for event in events(tmp_path / "rank5.pt.trace.json.gz"))


@pytest.mark.slow
def test_the_example_of_a_fake_world_divides_a_model_by_tensor_and_data_parallelism(tmp_path: Path) -> None:
    sizes = shlex.split("--world 8 --tp 2 --layers 2 --hidden 64 --ffn 128 --heads 4 --vocab 128 --seq 16")
    done = run(sys.executable, str(ROOT / "examples/record_fake_world.py"), *sizes, "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert read_job(tmp_path).headers[0].world_size == 8
    assert tomllib.loads((tmp_path / "setup.toml").read_text())["parallel"] == {"tp": 2, "dp": 4, "zero": 3}


# The loop and its recording


def test_step_is_called_or_named(tmp_path: Path) -> None:
    recording = lumos.capture(tmp_path, steps=1, warmup=1)
    for _ in range(3):
        work()
        recording.step()
    recording.close()
    assert step_marks(tmp_path / "rank0.pt.trace.json.gz") == ["ProfilerStep#1"]


def test_a_loop_that_ends_early_leaves_its_whole_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, 5, steps=8, warmup=2)
    assert step_marks(tmp_path / "rank0.pt.trace.json.gz") == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    assert "ended after 3 of 8 steps" in capsys.readouterr().err
    assert len(replay(read_job(tmp_path)).marks.names) == 3


@pytest.mark.parametrize("loops", [0, 1, 2, 3])
def test_a_loop_without_a_step_to_record_says_so(
    tmp_path: Path, loops: int, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, loops, warmup=3)
    assert f"no step was recorded: the loop ended after {loops} steps" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
    record(tmp_path, 9, warmup=2)  # and the profiler is free again
    assert (tmp_path / "rank0.pt.trace.json.gz").exists()


def test_an_error_in_the_loop_stays_what_it_is(tmp_path: Path) -> None:
    def train() -> None:
        with lumos.capture(tmp_path, steps=4, warmup=1) as step:
            for number in range(4):
                work()
                step()
                1 / (2 - number)

    with pytest.raises(ZeroDivisionError):
        train()
    assert step_marks(tmp_path / "rank0.pt.trace.json.gz") == ["ProfilerStep#1", "ProfilerStep#2"]


def test_after_its_steps_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = record(tmp_path, 12, steps=1, warmup=2)
    assert recording.over
    monkeypatch.setattr(recording, "_advance", lambda: pytest.fail("it still counts"))
    recording.step()


@pytest.mark.parametrize("moment", ["prepare", "begin", "next_step", "end", "save"])
def test_a_failing_profiler_is_one_line_and_the_training_goes_on(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = lumos.capture(tmp_path, warmup=2)
    monkeypatch.setattr(recording.profiler, moment, _failing)
    with recording as step:
        for _ in range(9):
            step()
    said = [line for line in capsys.readouterr().err.splitlines() if "lumos" in line]
    assert said == ["lumos capture: recording failed, and the training goes on without it (RuntimeError: no luck)"]
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    record(tmp_path, 9, warmup=2)  # the profiler was let go
    assert (tmp_path / "rank0.pt.trace.json.gz").exists()


def test_a_profiler_of_the_scripts_own_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        record(tmp_path, 9, warmup=2)
    assert "another profiler of torch is recording" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
    assert sum(event.count for event in own.key_averages() if event.key == "aten::mm") == 9


def _failing(*_: object) -> None:
    raise RuntimeError("no luck")


def test_traces_of_a_larger_job_are_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank7.pt.trace.json.gz").write_bytes(b"")
    record(tmp_path, 4, steps=1, warmup=1)
    assert "rank7.pt.trace.json.gz, of a job of more than 1 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 0}, "steps = 0"),
        ({"warmup": 0}, "warmup = 0"),
        ({"setup": "missing.toml"}, "missing.toml: no such file"),
        ({"setup": 3}, "setup is a int"),
        ({"setup": {"modle": {}}}, "'modle' is no section"),
        ({"setup": {"model": {"layers": object()}}}, "model.layers is a object"),
        ({"fake_world": (4, 4)}, "rank 4 of 4"),
    ],
)
def test_wrong_arguments_raise_before_the_training(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        lumos.capture(tmp_path, **options)


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LumosError, match="cannot be a folder"):
        lumos.capture(tmp_path / "file")


# What is written beside


def info(**more: Any) -> Any:
    return SimpleNamespace(**{"rank": 0, "world": 4, "backend": "nccl", "device": "NVIDIA H200"} | more)


def test_a_dictionary_keeps_what_it_says_and_gets_what_torch_knows() -> None:
    given = {"model": {"layers": 2, "gated": True}, "train": {"framework": 'a "quoted" name'}, "parallel": {"tp": 2}}
    written = tomllib.loads(setup_files(given, info())["setup.toml"])
    assert written == {**given, "cluster": {"gpu": "NVIDIA H200", "gpus": 4}}


def test_a_setup_is_written_as_it_is(tmp_path: Path) -> None:
    from lumos.setup import read_setup

    setup = read_setup(ROOT / "examples/one-h200.toml")
    (tmp_path / "setup.toml").write_text(setup_files(setup, info())["setup.toml"])
    assert read_setup(tmp_path / "setup.toml") == setup


def test_files_are_kept_under_names_that_lumos_reads(tmp_path: Path) -> None:
    toml = ROOT / "examples/one-h200.toml"
    assert setup_files(toml, info()) == {"setup.toml": toml.read_text()}
    (tmp_path / "config.json").write_text("{}")
    written = setup_files(tmp_path / "config.json", info())
    assert written["config.json"] == "{}"
    assert tomllib.loads(written["setup.toml"])["model"] == {"hf": "config.json"}


# How it is called


def test_it_needs_torch_and_nothing_else() -> None:
    """It runs on training machines, where none of Lumos' own dependencies is installed."""
    code = "import sys, lumos; lumos.capture.fake_world; print(*{m.partition('.')[0] for m in sys.modules})"
    loaded = set(run(sys.executable, "-c", code).stdout.split())
    assert not loaded & {"numpy", "pydantic", "rich", "typer", "msgspec", "orjson", "numba", "torch"}


@pytest.mark.parametrize(
    "first", ["import lumos", "from lumos.capture import fake_world\nimport lumos", "import lumos.capture"]
)
def test_it_is_called_by_the_name_of_its_package(first: str) -> None:
    code = f"{first}\nassert callable(lumos.capture) and callable(lumos.capture.fake_world)"
    assert run(sys.executable, "-c", code).stderr == ""


# Recorded on an H200 by calibration/capture_h200.py, where none of Lumos' dependencies but torch was installed


@pytest.mark.parametrize("form", ["context", "command", "fake_command", "fake_world"])
def test_what_was_recorded_on_a_gpu_replays(form: str) -> None:
    trace = read_job(H200 / form)
    replayed = replay(trace)
    assert abs(replayed.error_pct) < 1
    assert trace.headers[0].gpu == "NVIDIA H200"
    assert trace.headers[0].shapes
    assert len(trace.syncs.lane) > 0
    told = json.loads((H200 / form / "capture.json").read_text())
    assert (told["rank"], told["steps"]) == (trace.ranks[0], len(replayed.marks.names))
    measured = told["without_profiler"]["after"]["mean_ms"]
    assert 0.8 < replayed.clean_ms / measured < 1.25


@pytest.mark.parametrize("form", ["context", "command"])
def test_no_kernel_on_a_gpu_lacks_its_launch(form: str) -> None:

    trace = read_job(H200 / form)
    assert (trace.launch_row[trace.on_gpu] >= 0).all()


# ---------------------------------------------------------------------- torch is not there


def test_a_python_without_torch_is_named_with_what_installs_it(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    script = tmp_path / "train.py"
    command = [sys.executable, "-m", "lumos.cli.main", "capture", "-o", str(tmp_path / "t"), "--", python, script]
    for text, code in (("import torch", 1), ("pass", 2)):
        script.write_text(text)
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == code
        assert f"{python} -m pip install torch" in done.stderr
        assert "--warmup" not in done.stderr


def test_a_launcher_of_torch_that_is_missing_says_what_it_comes_with(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lumos.cli.main", "capture", "-o", str(tmp_path / "t"), "--", "torchrun", "train.py"],
        capture_output=True, text=True, env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "torchrun: cannot be run" in done.stderr
    assert "pip install torch" in done.stderr
