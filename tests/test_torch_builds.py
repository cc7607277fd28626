"""Dry runs with builds of torch that have CUDA, on a machine without a GPU: what `make test-torch` tries for real.

Such a build is imitated by what it has beside a build without CUDA: calls of the driver, which fail, and timers.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import lumos  # noqa: E402
from lumos.dry_run import fake_gpu  # noqa: E402
from lumos.dry_run.script import _reason  # noqa: E402
from torch_builds import PAGE, Result, columns, install, kept, launched_as, other_build, page  # noqa: E402

DRIVER = [
    "CUDAAllocator",
    "allocationTraceback",
    "canDeviceAccessPeer",
    "clearCublasWorkspaces",
    "cudaHostAllocator",
    "emptyCache",
    "exchangeDevice",
    "getAllocator",
    "getAllocatorBackend",
    "getArchFlags",
    "getCompiledVersion",
    "getCurrentBlasHandle",
    "getCurrentRawStream",
    "getCurrentStream",
    "getDefaultStream",
    "getDevice",
    "getMemoryFraction",
    "getStreamFromExternal",
    "hostMemoryStats",
    "init",
    "ipc_collect",
    "isCurrentStreamCapturing",
    "maybeExchangeDevice",
    "memorySnapshot",
    "memoryStats",
    "record_memory_history",
    "releasePool",
    "resetAccumulatedMemoryStats",
    "resetPeakMemoryStats",
    "setDevice",
    "setMemoryFraction",
    "setStream",
    "set_sync_debug_mode",
    "sleep",
    "synchronize",
]


class CudaMap(ctypes.Structure):
    """A `std::unordered_map` as torch's libraries have it."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("buckets", "bucket_count", "first", "size")]


class CudaNode(ctypes.Structure):
    """A node of it: timers by type of device."""

    _fields_ = [("next", ctypes.c_void_p), ("key", ctypes.c_int8), ("value", ctypes.c_void_p * 4)]


def made_map(keys: list[int]) -> tuple[CudaMap, list[CudaNode]]:
    nodes = [CudaNode(None, key) for key in keys]
    for node, following in pairwise(nodes):
        node.next = ctypes.addressof(following)
    first = ctypes.addressof(nodes[0]) if nodes else None
    return CudaMap(None, 13, first, len(nodes)), nodes


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Python asks of the driver fails, as in a CUDA build without a GPU."""

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 0, raising=False)  # the one that succeeds
    for name in DRIVER:
        monkeypatch.setattr(torch._C, f"_cuda_{name}", fail, raising=False)
    monkeypatch.setattr("torch._subclasses.fake_tensor.init_gpu_context", fail)  # makes a tensor until torch 2.12


def train(around: Any = lambda model: model) -> None:
    model = around(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.RMSNorm(64), nn.Linear(64, 64)).cuda())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(4):
        torch.cuda.manual_seed(1)
        batch = torch.randn(8, 64, pin_memory=True).to("cuda", non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.utils.checkpoint.checkpoint(model, batch, use_reentrant=False).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_stats()
        assert torch.cuda.mem_get_info()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.usefixtures("no_driver")
def test_no_call_of_the_driver_is_made() -> None:
    with_driver_calls = lumos.dry_run(train)
    assert sum(op.phase == "backward" for op in with_driver_calls.ops) > 4


@pytest.mark.usefixtures("no_driver")
def test_data_parallel_makes_no_call_of_the_driver() -> None:
    def train_in_parallel() -> None:
        torch.distributed.init_process_group("nccl")
        train(nn.parallel.DistributedDataParallel)

    recording = lumos.dry_run(train_in_parallel, world=2)
    assert any(op.name == "all_reduce" for op in recording.ops)


def test_torch_2_8_gets_a_device_guard_and_makes_no_call_of_the_driver_for_convolutions() -> None:
    code = """
import os
import torch

set_guard = torch._C._ensureCUDADeviceGuardSet
del torch._C._ensureCUDADeviceGuardSet  # torch 2.8 does not have it

import lumos
from lumos.dry_run.fake_gpu import install_device

def ask_driver(*args, **kwargs):
    raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

torch._C._select_conv_backend = ask_driver
install_device()
torch._C._ensureCUDADeviceGuardSet = set_guard  # fake tensors of later releases ask for it

def train():
    model = torch.nn.Conv2d(3, 8, 3).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        with torch.cuda.stream(torch.cuda.Stream()):
            model(torch.randn(8, 3, 16, 16, device="cuda")).sum().backward()
        optimizer.step()

print(sum(op.phase == "backward" for op in lumos.dry_run(train).ops) > 1, flush=True)
os._exit(0)  # as dry-run scripts end: a thread of autograd that still runs would abort the process
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_shapes_of_dtensors_are_propagated_on_the_fakes_of_the_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.8 makes fakes of its own for that, and rejects an operator that meets both kinds."""
    propagation = pytest.importorskip("torch.distributed.tensor._sharding_prop")
    made: list[bool] = []
    own = propagation.FakeTensorMode
    monkeypatch.setattr(propagation, "FakeTensorMode", lambda: made.append(True) or own())
    monkeypatch.setattr(propagation, "detect_fake_mode", lambda *_: None, raising=False)

    def train_sharded() -> None:
        torch.distributed.init_process_group("nccl")
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        fully_shard(model).to_empty(device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()

    assert any(op.name == "reduce_scatter" for op in lumos.dry_run(train_sharded, world=8).ops)
    assert not made


@given(st.lists(st.integers(0, 19), unique=True, max_size=8))
def test_keys_of_a_map_are_walked_and_can_be_replaced(keys: list[int]) -> None:
    timers, nodes = made_map(keys)
    found = list(fake_gpu._keys_of_map(ctypes.addressof(timers)))
    assert [key.value for key in found] == keys
    for key in found:
        key.value = 127
    assert [node.key for node in nodes] == [127] * len(keys)


def test_a_map_that_is_laid_out_otherwise_is_rejected() -> None:
    timers, _ = made_map([0, 1])
    timers.size = 3
    with pytest.raises(RuntimeError, match="timers"):
        list(fake_gpu._keys_of_map(ctypes.addressof(timers)))


def test_timers_of_gpus_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    timers, nodes = made_map([1, 0])  # as a CUDA build has them

    class Library:
        @staticmethod
        def made() -> int:
            return ctypes.addressof(timers)

    monkeypatch.setattr(fake_gpu, "_library", lambda _: type("Library", (), {fake_gpu._TIMERS: Library.made}))
    fake_gpu._leave_out_timers()
    assert [node.key for node in nodes] == [fake_gpu._NO_DEVICE, 0]


def test_this_build_keeps_its_timers_as_expected() -> None:
    find = getattr(fake_gpu._library("torch_cpu"), fake_gpu._TIMERS)
    find.restype = ctypes.c_void_p
    keys = [key.value for key in fake_gpu._keys_of_map(find())]
    assert 0 in keys
    assert set(keys) <= {0, 1, fake_gpu._NO_DEVICE}


@pytest.mark.parametrize("built_for", [None, "11.8", "13.2"])
def test_extensions_find_the_version_of_cuda_that_torch_was_built_for(
    built_for: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    seen = []

    def asks() -> None:
        seen.append(torch.version.cuda)
        train()

    lumos.dry_run(asks)
    assert seen[0]
    assert seen == [built_for or seen[0]]
    assert torch.version.cuda == built_for


# ---------------------------------------------------------------------- nvidia-smi
def asked(tmp_path: Path, *arguments: str, launch: tuple[str, ...] = ("--world", "4")) -> tuple[int, str]:
    """Exit code and output of `nvidia-smi` as a script of a dry run finds it."""
    script = f"""
import subprocess, sys, torch
done = subprocess.run({["nvidia-smi", *arguments]!r}, capture_output=True, text=True)
open("answer", "w").write(f"{{done.returncode}} {{done.stdout or done.stderr}}")
"""
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "lumos.cli.main", "capture", "--dry", "--gpu", "h200", *launch, "-o", "dry", "--"]
    subprocess.run([*command, sys.executable, "train.py"], cwd=tmp_path, capture_output=True, timeout=120, check=False)
    code, _, printed = (tmp_path / "answer").read_text().partition(" ")
    return int(code), printed.rstrip("\n")


def test_a_script_finds_its_gpus_by_nvidia_smi(tmp_path: Path) -> None:
    query = ("--query-gpu=count,name,memory.total,compute_cap,fan.speed", "--format=csv,noheader,nounits")
    code, printed = asked(tmp_path, *query, launch=("--world", "64"))
    assert code == 0
    rows = [line.split(", ") for line in printed.splitlines()]
    assert [(row[0], row[1], row[3], row[4]) for row in rows] == [("8", "NVIDIA H200", "9.0", "[N/A]")] * 8
    assert 130_000 < int(rows[0][2]) < 150_000


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ((), 3),
        (("-L",), 2),
        (("--query-gpu", "index,memory.used", "--format", "csv"), 3),
        (("--query-gpu=index", "--format=csv,noheader", "--id=1"), 1),
        (("--query-compute-apps=pid,used_memory", "--format=csv"), 1),
        (("topo", "-m"), 0),
        (("-q", "-x"), 0),
        (("--query-gpu=index", "-L"), 0),
    ],
)
def test_nvidia_smi_answers_or_says_that_it_does_not(arguments: tuple[str, ...], lines: int) -> None:
    from lumos.dry_run.nvidia_smi import answer

    plan = {"gpu": "NVIDIA L4", "memory_gib": 22.5, "capability": [8, 9]}
    if not lines:
        with pytest.raises(ValueError, match=r"topo|several|-q"):
            answer(arguments, plan, 2)
        return
    assert len(answer(arguments, plan, 2).splitlines()) == lines


def test_the_stand_in_of_nvidia_smi_is_of_dry_runs_alone(tmp_path: Path) -> None:
    from lumos.capture.command import environment
    from lumos.capture.recording import Plan

    plan = Plan(tmp_path, 2, 5, None, "RANK", None)
    assert environment(plan, {"PATH": "/bin"})["PATH"] == "/bin"
    with_gpu = Plan(tmp_path, 2, 5, None, "RANK", None, gpu={"gpu": "NVIDIA L4"})
    assert environment(with_gpu, {"PATH": "/bin"})["PATH"].split(os.pathsep)[1:] == ["/bin"]


# ---------------------------------------------------------------------- environments of rows
@pytest.mark.parametrize(("build", "cuda"), [("cpu", "None"), ("cuda", "13.0")])
@pytest.mark.parametrize("brought", ["2.11.0", "2.15.0"])
def test_libraries_leave_the_build_of_a_row_alone(
    build: str, cuda: str, brought: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[list[str]] = []

    def run(command: list[Any], **_: Any) -> subprocess.CompletedProcess[str]:
        if "venv" in command:
            tmp_path.joinpath("row").mkdir()
        if "install" in command:
            installed.append([str(part) for part in command])
        return subprocess.CompletedProcess(command, 0, stdout=f"{brought}+local {cuda}", stderr="")

    monkeypatch.setattr("torch_builds.subprocess.run", run)
    failed = install(tmp_path / "row", "2.11.0", build, "3.11")
    pin = "torch===2.11.0" if build == "cuda" else "torch==2.11.0+cpu"
    assert [pin in command for command in installed] == [True, True]
    assert failed == install(tmp_path / "row", "2.11.0", build, "3.11")  # once more, as it is there now
    assert ("2.15.0" in failed) == (brought == "2.15.0")
    assert other_build(tmp_path / "row", brought, "cuda" if build == "cpu" else "cpu")


def test_scripts_measured_on_one_gpu_are_dry_run_without_a_launcher(tmp_path: Path) -> None:
    of = {column.name: column for column in columns(None, None, tmp_path)}
    assert launched_as(of["DDP"]) == ["--world", "2"]
    assert not any(launched_as(column) for column in of.values() if column.step_ms)


# ---------------------------------------------------------------------- the page
def test_the_page_of_builds_is_what_was_found() -> None:
    assert PAGE.read_text() == page(kept())


def test_an_operator_that_fails_on_fake_tensors_is_reported_with_the_release_of_torch() -> None:
    assert f"torch {torch.__version__} (RuntimeError: no such kernel)" in _reason(RuntimeError("no such kernel"))


def test_a_cell_says_what_was_predicted_how_wrong_it_is_or_why_there_is_none() -> None:
    row = ("2.8.0", "cuda", "3.11")
    text = page([
        Result(*row, "DDP", "2026-01-01", 10.0, 2.0),
        Result(*row, "vit", "2026-01-02", 11.0, 2.0, 10.0, 2.0),
        Result(*row, "timm", "2026-01-01", outcome="rejected: a|b"),
    ])  # fmt: skip
    for shown in ("10.00 ms, 2.00 GiB", "+10.0 / +0.0", "no (1)", "1. rejected: a/b", "2026-01-02"):
        assert shown in text
