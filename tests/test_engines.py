"""Engines: the same work wherever it is done; what is lost with a worker is done again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from lumos.errors import InputError, LumosError, OptionError
from lumos.read.job import read_job
from lumos.trace.trace import Trace
from lumos.workers import Engine, Here, Job, engine_named, fingerprint, read_shard
from support import PATIENCE_S


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    """Workers import the functions of this file by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield


def added(shared: int, chunk: int) -> tuple[int, int]:
    return shared + chunk, os.getpid()


def refused(_: None, chunk: int) -> int:
    if chunk == 3:
        raise InputError(f"chunk {chunk} is wrong")
    return chunk


def killed_once(folder: Path, chunk: int) -> int:
    """Chunk 5 kills the process it first runs in."""
    marker = folder / "killed"
    if chunk == 5 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return chunk * 2


def always_killed(_: None, chunk: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return chunk


def always_terminated(_: None, chunk: int) -> int:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE_S)
    return chunk


def slow(_: None, chunk: int) -> int:
    time.sleep(0.2)
    return chunk


def endless(folder: Path, chunk: int) -> int:
    (folder / str(os.getpid())).touch()
    time.sleep(PATIENCE_S)
    return chunk


def counted(folder: Path, chunk: int) -> int:
    (folder / f"{chunk}-{os.getpid()}-{time.monotonic_ns()}").touch()
    return chunk


def test_answers_come_in_the_order_of_the_chunks_from_other_processes() -> None:
    with engine_named("local", 2) as engine:
        found = list(engine.run(Job(added, 100), list(range(20))))
        again = list(engine.run(Job(added, 7), [1]))
    assert [value for value, _ in found] == [100 + i for i in range(20)]
    assert os.getpid() not in {pid for _, pid in found}
    assert again[0][0] == 8, "a second job is told to the processes anew"


def test_one_worker_is_this_process() -> None:
    with engine_named("local", 1) as engine:
        assert list(engine.run(Job(added, 1), [1])) == [(2, os.getpid())]


def test_a_mistake_in_a_chunk_is_raised_here_in_its_own_words() -> None:
    with engine_named("local", 2) as engine, pytest.raises(InputError, match="chunk 3 is wrong"):
        list(engine.run(Job(refused, None), list(range(8))))


def test_a_killed_worker_costs_its_chunk_and_nothing_else(tmp_path: Path) -> None:
    with engine_named("local", 2) as engine:
        assert list(engine.run(Job(killed_once, tmp_path), list(range(12)))) == [2 * i for i in range(12)]
    assert (tmp_path / "killed").exists()


def test_a_chunk_that_kills_every_worker_ends_in_one_line() -> None:
    """And that line says what happened to the worker, as far as is known."""
    for function, words in ((always_killed, "SIGKILL.*want of memory.*--workers"), (always_terminated, r"\(SIGTERM\)")):
        with engine_named("local", 2) as engine, pytest.raises(LumosError, match=words):
            list(engine.run(Job(function, None, tries=2), [0]))


def test_every_chunk_is_run_once(tmp_path: Path) -> None:
    with engine_named("local", 2) as engine:
        list(engine.run(Job(counted, tmp_path), list(range(30))))
    assert sorted(int(p.name.split("-")[0]) for p in tmp_path.iterdir()) == list(range(30))


def test_giving_up_early_leaves_no_process() -> None:
    with engine_named("local", 2) as engine:
        _, pid = next(engine.run(Job(added, 0), [0]))
        next(engine.run(Job(slow, None), list(range(6))))
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_an_interrupted_run_ends_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, test_engines as t\n"
        "with t.engine_named('local', 2) as engine:\n"
        "    list(engine.run(t.Job(t.endless, pathlib.Path(sys.argv[1])), [0, 1]))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while len(list(tmp_path.iterdir())) < 2 and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: the workers get it, too
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    assert said.rstrip().endswith("KeyboardInterrupt")
    workers = [int(path.name) for path in tmp_path.iterdir()]
    deadline = time.monotonic() + PATIENCE_S
    while any(map(psutil.pid_exists, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, workers))


def test_a_terminated_command_cleans_up_as_an_interrupted_one_does(tmp_path: Path) -> None:
    """As batch systems end commands: no worker stays, and what was being written is removed."""
    code = (
        "import pathlib, sys, test_engines as t, lumos.cli.main as command\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "def app(**_):\n"
        "    try:\n"
        "        with t.engine_named('local', 1) as engine:\n"
        "            list(engine.run(t.Job(t.endless, folder), [0]))\n"
        "    finally:\n"
        "        (folder / 'cleaned').touch()\n"
        "command.app = app\n"
        "command.main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    while not list(tmp_path.iterdir()) and process.poll() is None:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=PATIENCE_S) == 128 + signal.SIGTERM
    (worker,) = (int(path.name) for path in tmp_path.iterdir() if path.name != "cleaned")
    assert (tmp_path / "cleaned").exists()
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("slurm",), "local or ray"),
        (("local", -1), "--workers -1"),
        (("local", 100_000), "at most"),
        (("local", 0, "1.2.3.4:5"), "--engine ray"),
    ],
)
def test_what_no_engine_can_do_is_refused(arguments: tuple[str], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        engine_named(*arguments)


@pytest.mark.parametrize(("text", "wanted"), [("", (0, 1)), ("1/1", (0, 1)), ("3/8", (2, 8))])
def test_a_shard_is_read(text: str, wanted: tuple[int, int]) -> None:
    assert read_shard(text) == wanted


@pytest.mark.parametrize("text", ["0/4", "5/4", "a/b", "1", "1/0", "-1/4", "1/99999999"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--shard"):
        read_shard(text)


def test_fingerprints_tell_questions_apart() -> None:
    assert fingerprint({"a": 1, "b": (2,)}) == fingerprint({"b": (2,), "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


@pytest.fixture(scope="module")
def cluster(_importable: None) -> Iterator[object]:
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield started
    started.shutdown()


@pytest.mark.slow
def test_ray_gives_what_processes_give(cluster: object) -> None:
    """That it outlives a lost node is tested with a whole search."""
    with engine_named("ray", 0, cluster.address) as engine:  # type: ignore[attr-defined]
        assert engine.workers == 1
        assert list(engine.run(Job(slow, None), list(range(4)))) == list(range(4))
        with pytest.raises(InputError, match="chunk 3 is wrong"):
            list(engine.run(Job(refused, None), list(range(8))))


@pytest.mark.slow
def test_ranks_are_read_on_a_cluster_as_they_are_here(cluster: object) -> None:
    folder = Path(__file__).resolve().parents[1] / "src/lumos/data/example"
    here = read_job(folder)
    with engine_named("ray", 0, cluster.address) as engine:  # type: ignore[attr-defined]
        there = read_job(folder, engine=engine)
    assert isinstance(here, Trace)
    assert isinstance(there, Trace)
    assert there.lanes == here.lanes
    assert there.names == here.names
    for column in ("start", "duration", "lane", "name"):
        assert np.array_equal(getattr(there, column), getattr(here, column))


def test_a_ray_cluster_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(LumosError, match="no Ray cluster can be started here"), engine_named("ray"):
        pass


def test_a_ray_address_where_nothing_answers_is_refused() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.raises(OptionError, match="no Ray cluster answers"), engine_named("ray", 0, "127.0.0.1:1"):
        pass


def test_here_is_an_engine() -> None:
    engine: Engine = Here()
    assert engine.workers == 1
