"""What is wrong ends in one line that names the value and a way out, exit code 2, and nothing written."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

import lumos as lumos_package
from commands import lumos_here as lumos
from lumos.chakra.astra_log import _NODE
from lumos.chakra.recordings import _ANNOUNCED
from lumos.cli.terminal import busy, progress_bar
from lumos.data_files import read_table
from lumos.errors import InputError, OptionError
from lumos.files import write_files
from lumos.read import formats as memory
from lumos.read import json_slices, kineto
from lumos.read.job import read_job
from lumos.read.kineto import read_kineto
from lumos.setup.importers.megatron import arguments_in_log
from lumos.setup.toml_text import _DEEP_KEY, toml_table
from lumos.trace.names import is_communication
from lumos.traced.tensor_lifetimes import _ATTENTION
from support import PATIENCE_S, header, json_text, op, training_run, write_bytes, write_trace

ONE_GPU = Path(__file__).resolve().parents[1] / "examples/one-h200.toml"


def everything_in(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def refusal(folder: Path, *arguments: str) -> str:
    """Run what must be refused in the way that every mistake is; return the line."""
    before = everything_in(folder)
    done = lumos(*arguments, cwd=folder)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("lumos: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert everything_in(folder) == before, "something was written"
    return done.stderr


# Files. Each maker puts something wrong into a folder and returns what is given to the command.


def missing(folder: Path) -> Path:
    return folder / "missing.json"


def empty_folder(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def folder_of_other_things(folder: Path) -> Path:
    write_bytes(folder / "config.json", b'{"layers": 8}')
    write_bytes(folder / "notes.txt", b"hello")
    return folder


def folder_above(folder: Path) -> Path:
    (folder / "run").mkdir()
    write_trace(folder / "run" / "rank0.json", training_run())
    return folder


def empty_file(folder: Path) -> Path:
    return write_bytes(folder / "empty.json", b"")


def not_json(folder: Path) -> Path:
    return write_bytes(folder / "text.json", b"hello, this is no JSON")


def json_of_something_else(folder: Path) -> Path:
    return write_bytes(folder / "config.json", b'{"layers": 8, "hidden": 2048}')


def list_of_something_else(folder: Path) -> Path:
    return write_bytes(folder / "timeline.json", b"[[1, 2, 3], [4, 5, 6]]")


def execution_trace(folder: Path) -> Path:
    nodes = [{"id": 1, "name": "[pytorch|profiler|execution_trace|process]", "ctrl_deps": 1, "attrs": []}]
    return write_bytes(folder / "rank0.et.json.gz", json.dumps({"schema": "1.1.1", "nodes": nodes}).encode())


def pickled_snapshot(folder: Path) -> Path:
    return write_bytes(folder / "snapshot.pickle", pickle.dumps({"segments": [], "device_traces": [[]]}))


def json_snapshot(folder: Path) -> Path:
    return write_bytes(folder / "snapshot.json", b'{"segments": [{"device": 0}], "device_traces": [[]]}')


def zip_file(folder: Path) -> Path:
    return write_bytes(folder / "model.pt", b"PK\x03\x04" + bytes(64))


def sqlite_file(folder: Path) -> Path:
    with sqlite3.connect(folder / "report.sqlite") as connection:
        connection.execute("create table CUPTI_ACTIVITY_KIND_KERNEL (start integer)")
    return folder / "report.sqlite"


def truncated_gzip(folder: Path) -> Path:
    path = write_trace(folder / "cut.json.gz", training_run(steps=20))
    path.write_bytes(path.read_bytes()[:-200])
    return path


def corrupt_gzip(folder: Path) -> Path:
    path = write_trace(folder / "corrupt.json.gz", training_run(steps=20))
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 64] = bytes(64)
    path.write_bytes(content)
    return path


def folder_with_corrupt_gzip(folder: Path) -> Path:
    corrupt_gzip(folder)
    return folder


def gzip_header_alone(folder: Path) -> Path:
    return write_bytes(folder / "head.json", gzip.compress(b"{}")[:12])


def two_files_of_one_rank(folder: Path) -> Path:
    for pid in (1, 2):
        write_trace(folder / f"host_{pid}.pt.trace.json", training_run(), header(0, 2))
    return folder


def different_jobs(folder: Path) -> Path:
    for rank in (0, 1):
        write_trace(folder / f"rank{rank}.json", training_run(), header(rank, 2 + 2 * rank))
    return folder


def a_minute_apart(folder: Path) -> Path:
    for rank in (0, 1):
        moved = [event | {"ts": event["ts"] + rank * 60e6} for event in training_run() if "ts" in event]
        write_trace(folder / f"rank{rank}.json", moved, header(rank, 2))
    return folder


def ranks_without_numbers(folder: Path) -> Path:
    for name in ("a1.json", "a2.json"):
        write_trace(folder / name, training_run())
    return folder


def no_events(folder: Path) -> Path:
    return write_trace(folder / "none.json", [])


def only_metadata(folder: Path) -> Path:
    return write_trace(folder / "meta.json", [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "x"}}])


def larger_than_memory(folder: Path) -> Path:
    """A sparse file: it takes no space."""
    path = write_bytes(folder / "huge.json", json_text(training_run(), layout="bare list")[:-1])
    os.truncate(path, 4 << 40)
    return path


def good(folder: Path) -> Path:
    return write_trace(folder / "rank0.json", training_run(), header(0))


class Mistake(NamedTuple):
    """A wrong input or option, and what the message must name: the value and the way out."""

    make: Callable[[Path], Path]
    options: str
    value: str
    way_out: str

    @property
    def name(self) -> str:
        return self.make.__name__ if self.make is not good else self.options

    def line(self, folder: Path) -> str:
        """What the command line says to it."""
        command, *options = self.options.split() if self.make is good else ["replay", "-o", "answer.json"]
        path = str(self.make(folder))
        return refusal(folder, *((command, path) if command == "replay" else (command, "--from", path)), *options)


HINT = "give a PyTorch profiler trace"
MISTAKES = (
    Mistake(missing, "", "missing.json", "no such file or folder"),
    Mistake(empty_folder, "", "empty", "give a folder of .json or .json.gz traces"),
    Mistake(folder_of_other_things, "", "none of its 2 files is a Kineto trace", ".json or .json.gz with traceEvents"),
    Mistake(folder_above, "", "no Kineto trace in this folder itself", "did you mean"),
    Mistake(empty_file, "", "empty.json", HINT),
    Mistake(not_json, "", "text.json: not JSON", HINT),
    Mistake(json_of_something_else, "", 'config.json: JSON without "traceEvents"', HINT),
    Mistake(list_of_something_else, "", "timeline.json: a JSON list", HINT),
    Mistake(execution_trace, "", "rank0.et.json.gz: a PyTorch execution trace", "give the Kineto trace"),
    Mistake(pickled_snapshot, "", "snapshot.pickle: a pickle", HINT),
    Mistake(json_snapshot, "", "snapshot.json: a CUDA memory snapshot", HINT),
    Mistake(zip_file, "", "model.pt", HINT),
    Mistake(sqlite_file, "", "report.sqlite: an SQLite file", HINT),
    Mistake(truncated_gzip, "", "cut.json.gz: the gzip stream ends early", "copy the file again"),
    Mistake(corrupt_gzip, "", "corrupt.json.gz: not a readable gzip file", "copy or record it again"),
    Mistake(folder_with_corrupt_gzip, "", "corrupt.json.gz: not a readable gzip file", "copy or record it again"),
    Mistake(gzip_header_alone, "", "head.json: the gzip stream ends early", "copy the file again"),
    Mistake(two_files_of_one_rank, "", "both host_1.pt.trace.json and host_2.pt.trace.json claim rank 0", "--match"),
    Mistake(different_jobs, "", "rank0.json is of a job of 2 ranks and rank1.json of one of 4", "--match"),
    Mistake(a_minute_apart, "", "60 s before rank1.json begins", "--match"),
    Mistake(ranks_without_numbers, "", "a1.json", "--rank-pattern"),
    Mistake(no_events, "", "none.json: no operator, runtime call or kernel", "activities=[CPU, CUDA]"),
    Mistake(only_metadata, "", "meta.json: no operator, runtime call or kernel", "activities=[CPU, CUDA]"),
    Mistake(larger_than_memory, "", "huge.json: about 5324.8 GiB would be needed", "--match"),
    Mistake(good, "replay --step 99", "--step 99", "this trace has ProfilerStep#0, ProfilerStep#1"),
    Mistake(good, "replay -o answer.txt", "-o answer.txt", ".json, .csv, .trace.json, .trace.json.gz"),
    Mistake(good, "replay -o no/such/answer.json", "-o no/such/answer.json", "create it first"),
    Mistake(good, "replay --rank-pattern rank(", "--rank-pattern: 'rank('", "not a regular expression"),
    Mistake(good, "replay --rank-pattern rank", "--rank-pattern 'rank'", "one group for the number"),
    Mistake(good, "replay --rank-pattern (rank)", "--rank-pattern '(rank)'", "must match a number"),
    Mistake(good, "replay --profiler-costs none.json", "none.json", ""),
    Mistake(good, "predict --scale gpu=0.5", "--scale gpu=0.5", "compute, comm, memcpy, cpu, kernel:REGEX"),
    Mistake(good, "predict --scale compute", "--scale compute", "WHAT=FACTOR"),
    Mistake(good, "predict --scale compute=fast", "--scale compute=fast", "a factor from 0 to a million"),
    Mistake(good, "predict --scale compute=-1", "--scale compute=-1", "a factor from 0 to a million"),
    Mistake(good, "predict --scale compute=nan", "--scale compute=nan", "a factor from 0 to a million"),
    Mistake(good, "predict --scale kernel:ge(mm=2", "--scale kernel:ge(mm=2", "not a regular expression"),
    Mistake(good, "predict --scale kernel:no_such=2", "--scale kernel:no_such=2", "no kernel of this trace"),
    Mistake(good, "predict --scale comm=1 -o answer.xml", "-o answer.xml", ".json, .csv"),
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_refused_in_one_line(tmp_path: Path, mistake: Mistake) -> None:
    line = mistake.line(tmp_path)
    assert mistake.value in line
    assert mistake.way_out in line


@pytest.mark.parametrize("make", [not_json, two_files_of_one_rank], ids=lambda make: make.__name__)
def test_predict_refuses_in_the_same_words(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = str(make(tmp_path))
    asked = refusal(tmp_path, "predict", "--from", path, "--scale", "compute=0.5", "-o", "answer.csv")
    assert asked == refusal(tmp_path, "replay", path)


def test_match_that_nothing_matches_is_refused(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank0.json", training_run())
    assert "--match 'node*'" in refusal(tmp_path, "replay", str(tmp_path), "--match", "node*")


def test_a_step_of_a_trace_without_steps_is_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "rank0.json", [op("a", 1, 2)])
    assert "this trace has no step marks" in refusal(tmp_path, "replay", str(path), "--step", "1")


def test_the_same_command_without_a_mistake_succeeds(tmp_path: Path) -> None:
    """Without this, the tables above could pass for the wrong reason."""
    path = write_trace(tmp_path / "rank0.json", training_run(), header(0))
    done = lumos("replay", str(path), "--step", "1", "--json", "-o", "answer.csv", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["steps"][0]["name"] == "ProfilerStep#1"
    assert everything_in(tmp_path) == {"rank0.json", "answer.csv"}


def test_a_folder_is_no_place_for_an_answer(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "rank0.json", training_run(), header(0))
    (tmp_path / "taken.json").mkdir()
    assert "-o taken.json: cannot be written" in refusal(tmp_path, "replay", str(path), "-o", "taken.json")


def test_an_answer_that_was_there_survives_a_mistake(tmp_path: Path) -> None:
    write_bytes(tmp_path / "answer.json", b"before")
    refusal(tmp_path, "replay", str(not_json(tmp_path)), "-o", "answer.json")
    assert (tmp_path / "answer.json").read_bytes() == b"before"


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_what_does_not_fit_into_memory_is_not_even_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    path = write_trace(tmp_path / f"rank0{ending}", training_run())
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 10)
    with pytest.raises(InputError, match=r"GiB would be needed and 0\.0 GiB are free.*--match"):
        read_job(path)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 30)
    assert len(read_job(path)) > 0


def test_the_limit_of_the_process_counts_as_memory() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30));"
        "from lumos.read.formats import available_bytes; print(available_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) <= 3 << 30


def test_the_limit_of_a_container_counts_as_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = write_bytes(tmp_path / "memory.max", b"4096\n")
    monkeypatch.setattr(memory, "_CONTAINER_LIMITS", (tmp_path / "missing", limit))
    assert memory.available_bytes() == 4096
    limit.write_text("max\n")
    assert memory.available_bytes() > 4096


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = good(tmp_path)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"rank0\.json: cannot be read \(Permission denied\); check"):
        read_job(path)


@pytest.mark.data
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("h200/multirank/ddp2_l8/rank0.et.json.gz", "execution trace"),
        ("h200/multirank/ddp2_l8/rank0.json", 'without "traceEvents"'),
        ("public/chakra/json_trace.tar.gz", "an archive of files; unpack it"),
        ("public/hta/memory_analysis/memory_timeline.raw.gz", "memory timeline"),
        ("public/param/resnet_et.json.gz", "execution trace"),
        ("public/torchrec_v100/sst_long_a2a_optimizer_2", "--match"),
        ("public/torchrec_v100", "did you mean"),
    ],
)
def test_real_files_of_other_kinds_are_told_by_what_they_are(shared_data: Path, file: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_job(shared_data / file)


# Names from files on a terminal


@pytest.mark.parametrize("name", ["gemm[/x]", "void gemm<[a], [bold]b>", "gemm[link=x]y", "gemm :warning: b"])
def test_names_from_a_trace_are_printed_as_they_are(tmp_path: Path, name: str) -> None:
    events = [event | {"name": name} if event.get("cat") == "kernel" else event for event in training_run()]
    write_trace(tmp_path / "rank0.json", events, header())
    done = lumos("replay", "rank0.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert name in done.stdout


@pytest.mark.parametrize("name", ["x[/y]", "x[bold]y", "x :warning: y"])
def test_names_of_models_are_printed_as_they_are(tmp_path: Path, name: str) -> None:
    done = lumos("predict", str(ONE_GPU), "--set", f"model.name={name}", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert name in done.stdout


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    name = "x\x1b[31m red"
    events = [event | {"name": name} if event.get("cat") == "kernel" else event for event in training_run()]
    write_trace(tmp_path / "rank0.json", events, header())
    named, wrong = f"model.name={name}", f"model.{name}=1"
    for arguments in (["replay", "rank0.json"], *(["predict", str(ONE_GPU), "--set", one] for one in (named, wrong))):
        done = lumos(*arguments, cwd=tmp_path)
        assert "red" in done.stdout + done.stderr
        assert "\x1b" not in done.stdout + done.stderr


def test_messages_fit_on_a_screen_whatever_they_quote(tmp_path: Path) -> None:
    long, many = "x" * 20_000, "".join(f"key{n} = 1\n" for n in range(2_000))
    write_bytes(tmp_path / "many.toml", f"[train]\n{many}".encode())
    trace, setup = str(good(tmp_path)), str(ONE_GPU)
    commands = (
        [long], ["replay", long], ["replay", trace, "--step", long], ["replay", ".", "--match", long],
        ["predict", "--from", trace, "--scale", f"kernel:{long}=0.5"], ["predict", setup, f"--{long}"],
        ["search", setup, "--objective", "x y " * 5_000], ["predict", "many.toml"],
    )  # fmt: skip
    for arguments in commands:
        done = lumos(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("lumos: ")
        assert len(done.stderr) < 2_500 * done.stderr.count("\n")
        assert done.stderr.count("\n") <= 31
        assert "…" in done.stderr


# Places that cannot be written


def package_copy(folder: Path) -> Path:
    """A copy of the package whose cache of compiled code cannot be written, whoever runs the tests: root may do all."""
    package = folder / "site/lumos"
    shutil.copytree(Path(lumos_package.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "graph/__pycache__").touch()  # a file where numba wants a folder
    return package


def without_a_cache(package: Path, *arguments: str, full: bool = False) -> subprocess.CompletedProcess[str]:
    """The command line of a copy of the package, for a user without a home, or on a disk that is full."""
    places = {"HOME": "/dev/null", "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")} | places
    return subprocess.run(
        [sys.executable, "-m", "lumos.cli.main", *arguments], capture_output=True, text=True, check=False,
        timeout=PATIENCE_S, env=environment, cwd=package.parent,
        preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))) if full else None,
    )  # fmt: skip


def test_a_read_only_package_and_home_cost_nothing_but_time(tmp_path: Path) -> None:
    package = package_copy(tmp_path)
    path = str(write_trace(tmp_path / "rank0.json", training_run(), header(0)))
    for arguments in (["replay", path], ["check", path], ["convert", path, "-o", str(tmp_path / "run.et")]):
        done = without_a_cache(package, *arguments)
        assert (done.returncode, done.stderr) == (0, ""), arguments
    (package / "graph/__pycache__").unlink()  # now numba finds a folder, and no space in it
    done = without_a_cache(package, "replay", path, full=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list((package / "graph/__pycache__").glob("*.nbc"))


def test_processes_that_cannot_be_started_are_done_without(tmp_path: Path) -> None:
    """A full disk has no room for semaphores, as a container without /dev/shm has none."""
    question = (str(ONE_GPU), "--gpus", "2", "--workers", "2", "--json")
    done = without_a_cache(Path(lumos_package.__file__).parent, "search", *question, full=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["results"]


def test_a_damaged_cache_of_compiled_code_is_compiled_again(tmp_path: Path) -> None:
    code = (
        "import numpy as np; from lumos.graph.compiled_loops import pay_debts;"
        "print(pay_debts(np.array([0, 1]), np.ones(1), np.ones(1), 0.5, 1.0))"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert done.stdout == "[0.5]\n"
        files = list(tmp_path.rglob("*.nbi"))
        assert files
        for file in files:
            file.write_bytes(file.read_bytes()[:-10])


# Where the answer goes


def printed(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of the shell, in which $lumos is the command line."""
    environment = os.environ | {"lumos": f"{sys.executable} -m lumos.cli.main"}
    return subprocess.run(["bash", "-c", command, "-", *arguments], capture_output=True, text=True, check=False,
                          timeout=PATIENCE_S, env=environment)  # fmt: skip


def test_an_answer_that_cannot_be_printed_is_said(tmp_path: Path) -> None:
    path = str(good(tmp_path))
    for command in ('$lumos replay "$1" > /dev/full', '$lumos replay "$1" --json > /dev/full'):
        done = printed(command, path)
        assert done.returncode == 2
        assert done.stderr.startswith("lumos: the answer cannot be printed (No space left on device)"), done.stderr
        assert done.stderr.count("\n") == 1
    closed = printed('$lumos replay "$1" -o "$2" <&- >&- 2>&-', path, str(tmp_path / "answer.json"))
    assert closed.returncode == 0
    assert json.loads((tmp_path / "answer.json").read_bytes())["ranks"] == 1


@pytest.mark.parametrize("command", ["--help", "about", "about --json", "replay {}", "convert {} -o {}.et"])
def test_a_reader_that_has_gone_is_no_mistake(tmp_path: Path, command: str) -> None:
    """Neither rich nor click may make exit code 1 of it."""
    text = command.replace("{}", '"$1"')
    done = printed(f"set -o pipefail; {{ sleep 0.5; $lumos {text}; }} | true", str(good(tmp_path)))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_message_that_nobody_reads_leaves_the_exit_code(tmp_path: Path) -> None:
    done = printed('set -o pipefail; { sleep 0.5; $lumos replay "$1" 2>&1; } | true', str(tmp_path / "missing"))
    assert (done.returncode, done.stderr) == (2, "")


def test_workers_start_where_standard_error_is_closed(tmp_path: Path) -> None:
    command = '$lumos search "$1" --gpus 2 --vary train.recompute=none,full --workers 2 --json 2>&-'
    done = printed(command, str(ONE_GPU))
    assert done.returncode == 0
    assert json.loads(done.stdout)["results"]


@contextmanager
def bar(text: str) -> Iterator[None]:
    with progress_bar() as show:
        assert show is not None
        show(1, 2, text)
        yield


@pytest.mark.parametrize("show", [busy, bar])
def test_names_of_files_neither_move_the_cursor_nor_are_markup_in_a_line_of_progress(
    show: Callable[[str], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    with show("reading a\x1b]0;title\x07\nb[/no][red]c"):
        pass
    assert "\x1b]" not in terminal.getvalue()
    assert "reading a ]0;title  b[/no][red]c" in terminal.getvalue()


def test_a_terminal_without_unicode_gets_what_it_can_show(tmp_path: Path) -> None:
    done = printed('PYTHONIOENCODING=ascii $lumos replay "$1"', str(good(tmp_path)))
    assert (done.returncode, done.stderr) == (0, "")
    assert "replay of 1 rank" in done.stdout


def test_files_keep_their_permissions_and_links(tmp_path: Path) -> None:
    path, answer = str(good(tmp_path)), tmp_path / "answer.json"
    printed('umask 077; $lumos replay "$1" -o "$2"', path, str(answer))
    assert answer.stat().st_mode & 0o777 == 0o600
    answer.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(answer)
    answer.write_bytes(b"before")
    printed('$lumos replay "$1" -o "$2"', path, str(link))
    assert link.is_symlink()
    assert json.loads(answer.read_bytes())["ranks"] == 1
    assert answer.stat().st_mode & 0o777 == 0o640


def test_of_the_files_of_a_folder_all_are_written_or_none(tmp_path: Path) -> None:
    texts, folder = {"a.py": "new", "b.py": "new"}, tmp_path / "scripts"
    (tmp_path / "old/b.py").mkdir(parents=True)
    write_bytes(tmp_path / "old/a.py", b"old")
    with pytest.raises(OptionError, match=r"--emit .*old: cannot be written \(b.py is not a file\)"):
        write_files(tmp_path / "old", texts, "--emit")
    assert (tmp_path / "old/a.py").read_text() == "old"
    with pytest.raises(OptionError, match=r"--reproduce .*scripts: cannot be written"):
        write_files(folder, texts | {"x" * 300: ""}, "--reproduce")
    assert not folder.exists()


def test_files_that_the_user_did_not_name_replace_links_and_do_not_follow_them(tmp_path: Path) -> None:
    """Whoever shared a folder may have put links into it."""
    victim = write_bytes(tmp_path / "victim", b"mine")
    places = [tmp_path / "out" / name for name in ("run.sh", "01_mm.py", "x.0.et")]
    places[0].parent.mkdir()
    for place in places:
        place.symlink_to(victim)
    write_files(places[0].parent, {place.name: "text" for place in places[:2]}, "--emit")
    assert lumos("convert", str(good(tmp_path)), "-o", str(tmp_path / "out/x.et")).returncode == 0
    assert victim.read_text() == "mine"
    assert not [place for place in places if place.is_symlink()]


# Files that never end, or grow


PATHS = (  # every option and argument that takes a file; {} is the path
    "replay {}", "replay rank0.json --profiler-costs {}", "predict {}", "predict --from {}", "check {}", "score {}",
    "merge {}", "about {}", "cost {} --gpu h200", "cost rows.json --model {}", "convert {} -o x.et", "fit {} -o x.npz",
    "convert rank0.json --et {} -o x.et", "search {} --gpus 2",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_refused_wherever_a_path_is_taken(tmp_path: Path, kind: str) -> None:
    good(tmp_path)
    write_bytes(tmp_path / "rows.json", b"[]")
    endless = Path("/dev/zero")
    if kind == "pipe":
        endless = tmp_path / "pipe.json"
        os.mkfifo(endless)
        os.symlink(endless, tmp_path / "setup.toml")  # beside a trace, which `check` looks at
        assert lumos("check", "rank0.json", cwd=tmp_path).returncode == 0
    told = [refusal(tmp_path, *text.format(endless, endless).split()) for text in PATHS]
    assert all(str(endless) in line for line in told)


def packed(path: Path, parts: list[tuple[bytes, int]]) -> Path:
    """A gzip file of parts, each repeated so often."""
    with path.open("wb") as file:
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        for part, count in parts:
            for _ in range(count):
                file.write(packer.compress(part))
        file.write(packer.flush())
    return path


EVENT = b'{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":5}'
START = b'{"traceEvents":[' + EVENT
BOMBS = {
    "spaces": ([(START, 1), (b" " * (1 << 20), 40), (b"]}", 1)], "no trace events found"),
    "one long name": ([(START + b',{"ph":"X","name":"', 1), (b"a" * (1 << 20), 40), (b'"}]}', 1)], "no trace events"),
    "a long header": ([(b'{"x":"', 1), (b"a" * (1 << 20), 100), (b'",' + START[1:] + b"]}", 1)], "without"),
    "many events": ([(START, 1), (b"," + EVENT + b',{"ph":"M"}' * 1000, 3000), (b"]}", 1)], "200 times its size"),
    "deep": ([(START + b',{"args":', 1), (b"[" * (1 << 20), 40)], "no trace events found"),
    "damage": ([(START, 1), (b',{"ph":x}' * 1000, 2000), (b"]}", 1)], "100,000 events are not valid JSON"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_unpacks_without_end_is_refused_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    parts, words = BOMBS[name]
    monkeypatch.setattr(json_slices, "_ALWAYS_UNPACKED", 0 if name == "many events" else 1 << 30)
    path = packed(tmp_path / "rank0.json.gz", parts)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for share in ((0, 1),) if name == "damage" else ((0, 1), (0, 2)):  # what is damaged is not shared
        with pytest.raises(InputError, match=words):
            read_kineto(path, share)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


def test_more_events_than_memory_can_hold_are_refused_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed(tmp_path / "rank0.json.gz", [(START, 1), (b"," + EVENT, 100_000), (b"]}", 1)])
    monkeypatch.setattr("lumos.read.kineto.available_bytes", lambda: 30 << 20)
    with pytest.raises(InputError, match=r"has about 100,001 events, too many for the 0\.0 GiB.*--match"):
        read_job(path)


def test_a_file_is_refused_by_its_first_events_if_the_rest_can_only_be_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed(tmp_path / "rank0.json.gz", [(START, 1), (b"," + EVENT, 100_000), (b"]}", 1)])
    monkeypatch.setattr(json_slices, "SLICE_BYTES", 1 << 16)
    slices, free = [], 10 << 20
    monkeypatch.setattr("lumos.read.kineto.available_bytes", lambda: free)
    refuse = kineto.refuse_events
    monkeypatch.setattr(kineto, "refuse_events", lambda *given: slices.append(given) or refuse(*given))
    with pytest.raises(InputError, match=r"has about (9\d|10\d),\d{3} events"):
        read_job(path)
    assert len(slices) == 1
    slices.clear()
    free = 28 << 20  # not clearly too little
    with pytest.raises(InputError, match="too many"):
        read_job(path)
    assert len(slices) > 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["predict", "--gpuz", "h100"], "no such option: --gpuz (Possible options: --gpu, --gpus, --pue)"),
        (["search", "--deadline", "10d", "examples/one-h200.toml"], "invalid value for '--deadline'"),
        (["replay"], "missing argument 'path'"),
        (["nonsense"], "no such command 'nonsense'"),
    ],
)
def test_a_wrong_option_or_argument_is_one_line(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = lumos(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert "--help lists the options" in done.stderr
    assert everything_in(tmp_path) == set()


ARGUMENTS = "\n".join(f" layers_{n} ...... 4" for n in range(4))
MEASURED_RUNS = read_table("measured_runs.toml")
SLOW_TEXTS: dict[str, tuple[Callable[[str], object], str, str]] = {
    "namespaces": (arguments_in_log, "", "Namespace("),
    "open lists": (arguments_in_log, "Namespace(a=1)\nNamespace(", "a=[,"),
    "open quotes": (arguments_in_log, "Namespace(a=1)\nNamespace(", "a='b, c=\","),
    "dashes": (arguments_in_log, ARGUMENTS + "\n", "-"),
    "nodes": (lambda t: _NODE.match(t.encode()), "", "issue, sys->id=1, tick=1, node->id=1, node->name="),
    "announcements": (_ANNOUNCED.search, "", "1, 1, 1, 'a', ["),
    "attention": (_ATTENTION.search, "", "flash_attn"),
    **{
        f"{text} in a cell, {pattern}": (re.compile(pattern, re.IGNORECASE).search, "", text)
        for pattern in (*MEASURED_RUNS["networks"], MEASURED_RUNS["texts"]["async_tp"]["no"])
        for text in ("0", "8x", "async")
    },
    "kernel names": (is_communication, "", "symm_mem"),
    "parts of a key": (lambda t: _DEEP_KEY.search(t.replace(".a", ".a ", 1)), "a", ".a"),
    "strings": (_DEEP_KEY.search, "", '"a".\'b\' "c'),
    "torchtitan": (re.compile(read_table("frameworks.toml")["torchtitan-2024"]["aliases"][0]).search, "", "torchtitan"),
}


@pytest.mark.parametrize("name", SLOW_TEXTS)
def test_reading_a_text_does_not_take_the_square_of_its_length(name: str) -> None:
    read, head, repeated = SLOW_TEXTS[name]

    def cpu_s(count: int) -> float:
        """The least time of several, of this thread alone: other work on the machine does not count."""
        text, times = head + repeated * count + "\n", []
        for _ in range(5):
            begin = time.thread_time()
            read(text)
            times.append(time.thread_time() - begin)
        return min(times)

    count = 16_000 // len(repeated)
    assert cpu_s(8 * count) / cpu_s(count) < 24  # 8 if linear, 64 if quadratic


def test_keys_of_thousands_of_parts_are_refused(tmp_path: Path) -> None:
    key = " . ".join(["a", '"b.c"', "'d'"] * 10_000)
    for line in (f"{key} = 1", f"[{key}]", f"x = {{{key} = 1}}"):
        (tmp_path / "run.toml").write_text(line)
        assert "a key of more than 100 parts" in refusal(tmp_path, "predict", "run.toml")
    assert toml_table("a.b.c = 1.5\nd = '" + "x." * 90 + "'")["a"] == {"b": {"c": 1.5}}
