"""The files of a job: which are read, which rank each is, and what is left out."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from conftest import Write
from lumos.errors import InputError, LumosError, OptionError
from lumos.read import job
from lumos.read.job import find_files, read_job
from support import Event, assert_same_columns, header, op, training_run, write_bytes, write_trace

RUN = [op("a", 1, 2)]


def ranked(rank: int) -> list[Event]:
    """A trace that shows which file it came from."""
    return [op(f"of file {rank}", 1 + rank, 2)]


def ranks_by_name(folder: Path, **options: Any) -> dict[str, int]:
    """The rank that every file was taken for."""
    return {Path(h.path).name: h.rank for h in read_job(folder, **options).headers}


# Which rank a file is


@pytest.mark.parametrize(
    "naming",
    [
        "rank{}_trace.json.gz",
        "rank-{}.json.gz",
        "rank_{}.json",
        "rank{}.pt.trace.json.gz",
        "rank-{}.Apr_03_18_51_38.1102.pt.trace.json.gz",
        "TP-{}-DECODE.trace.json.gz",
        "worker{}.1623143089861.pt.trace.json",
        "kineto_trace_GPU{}.json",
        "my.run.Rank{}.json",
    ],
)
def test_the_name_says_the_rank_where_the_header_does_not(write: Write, tmp_path: Path, naming: str) -> None:
    for rank in (0, 1, 10):
        write(ranked(rank), name=naming.format(rank))
    assert ranks_by_name(tmp_path) == {naming.format(rank): rank for rank in (0, 1, 10)}


def test_the_header_says_the_rank_of_files_named_after_hosts(write: Write, tmp_path: Path) -> None:
    for rank, pid in ((0, 85867), (1, 85866), (2, 85868)):
        write(RUN, header(rank), name=f"ip-172-31.internal_{pid}.16981079295{pid}.pt.trace.json")
    assert list(ranks_by_name(tmp_path).values()) == [0, 1, 2]
    assert "85867" in read_job(tmp_path).headers[0].path


def test_hosts_of_different_names_are_one_job(write: Write, tmp_path: Path) -> None:
    for rank, host in enumerate(["alpha_1.2", "alpha_3.4", "beta_1.2", "gamma_9.2"]):
        write(RUN, header(rank, 4), name=f"{host}.pt.trace.json")
    trace = read_job(tmp_path)
    assert (trace.ranks, trace.warnings) == ([0, 1, 2, 3], ())


def test_the_header_wins_over_the_name(write: Write, tmp_path: Path) -> None:
    write(RUN, header(3), name="rank7.json")
    assert ranks_by_name(tmp_path) == {"rank7.json": 3}


def test_the_users_pattern_wins_over_the_header(write: Write, tmp_path: Path) -> None:
    write(RUN, header(3), name="node5.json")
    assert ranks_by_name(tmp_path, rank_pattern=r"node(\d+)") == {"node5.json": 5}


def test_a_pattern_finds_ranks_in_any_naming(write: Write, tmp_path: Path) -> None:
    for rank in (0, 1):
        write(RUN, name=f"20240102-x{rank}y.json")
    assert ranks_by_name(tmp_path, rank_pattern=r"x(\d)y") == {"20240102-x0y.json": 0, "20240102-x1y.json": 1}


@pytest.mark.parametrize(
    ("pattern", "error", "words"),
    [
        ("(", OptionError, "not a regular expression"),
        ("rank", OptionError, "one group"),
        (r"(\d)(\d)", OptionError, "one group"),
        (r"node(\d+)", InputError, "finds no rank"),
        ("(rank)", InputError, "must match a number"),
        (r"rank0(\d)?", InputError, "must match a number"),
        (r"((?:[a-z0-9]+)+)!", InputError, "finds no rank"),
        (r"(?=rank)(\d)", OptionError, "look-around"),
        ("\ud800(", OptionError, "not a regular expression"),
    ],
)
def test_a_pattern_that_finds_no_number_is_refused(
    write: Write, tmp_path: Path, pattern: str, error: type[LumosError], words: str
) -> None:
    write(RUN, name="rank0.json")
    with pytest.raises(error, match=words):
        read_job(tmp_path, rank_pattern=pattern)


def test_a_single_file_without_a_rank_is_rank_0(write: Write) -> None:
    trace = read_job(write(RUN, name="trace.json"))
    assert (trace.ranks, trace.lanes[0].rank) == ([0], 0)


def test_of_several_files_each_must_say_its_rank(write: Write, tmp_path: Path) -> None:
    for name in ("a1.json", "a2.json"):
        write(RUN, name=name)
    with pytest.raises(InputError, match="--rank-pattern"):
        read_job(tmp_path)


def test_every_lane_and_header_carries_the_rank(write: Write, tmp_path: Path) -> None:
    for rank in (2, 0, 1):
        write(ranked(rank), name=f"rank{rank}.json")
    trace = read_job(tmp_path)
    assert [h.rank for h in trace.headers] == [0, 1, 2]
    assert {trace.names[n]: int(r) for n, r in zip(trace.name, trace.rank, strict=True)} == {
        f"of file {rank}": rank for rank in range(3)
    }


# Which files are read


def test_a_second_capture_beside_the_first_is_left_out_with_a_note(write: Write, tmp_path: Path) -> None:
    for rank in (0, 1):
        write(RUN, header(rank), name=f"rank{rank}.pt.trace.json.gz")
        write(RUN, header(rank), name=f"rank{rank}.with_et.pt.trace.json.gz")
    files, notes = find_files(tmp_path)
    assert [f.name for f in files] == ["rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz"]
    assert len(notes) == 1
    assert "rank0.with_et.pt.trace.json.gz" in notes[0]
    assert "--match" in notes[0]
    assert read_job(tmp_path).warnings == tuple(notes)


def test_the_larger_capture_is_the_job(write: Write, tmp_path: Path) -> None:
    write(RUN, header(0), name="rank0.json")
    for rank in (0, 1):
        write(RUN, header(rank), name=f"rank{rank}.second.json")
    assert [f.name for f in find_files(tmp_path)[0]] == ["rank0.second.json", "rank1.second.json"]


def test_match_chooses_the_other_capture(write: Write, tmp_path: Path) -> None:
    for rank in (0, 1):
        write(RUN, header(rank), name=f"rank{rank}.json.gz")
        write(RUN, header(rank), name=f"rank{rank}.with_et.json.gz")
    assert list(ranks_by_name(tmp_path, match="*with_et*")) == ["rank0.with_et.json.gz", "rank1.with_et.json.gz"]
    assert ranks_by_name(tmp_path, match="rank1.json.gz") == {"rank1.json.gz": 1}


def test_match_that_nothing_matches_is_refused_by_name(write: Write, tmp_path: Path) -> None:
    write(RUN, name="rank0.json")
    with pytest.raises(InputError, match=r"--match 'node\*'"):
        find_files(tmp_path, match="node*")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rank0.json", b'{"layers": 8, "step_s": [0.1, 0.2], "nested": {"events": []}}'),
        ("rank0.et.json", b'{"schema": "1.1.1", "pid": 1, "nodes": [{"id": 1, "ctrl_deps": 0}]}'),
        ("config.json", b"[1, 2, 3]"),
        ("empty.json", b""),
        ("notes.txt", b"traceEvents"),
        ("rank0.csv", b"a,b"),
        ("snapshot.pickle", b"\x80\x04"),
    ],
)
def test_other_files_of_the_folder_are_ignored(write: Write, tmp_path: Path, name: str, content: bytes) -> None:
    for rank in (0, 1):
        write(RUN, header(rank), name=f"rank{rank}.pt.trace.json.gz")
    write_bytes(tmp_path / name, content)
    files, notes = find_files(tmp_path)
    assert ([f.name for f in files], notes) == (["rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz"], [])


def test_folders_inside_the_folder_are_not_read(write: Write, tmp_path: Path) -> None:
    write(RUN, header(0), name="rank0.json")
    write(RUN, header(1), name="older/rank1.json")
    assert ranks_by_name(tmp_path) == {"rank0.json": 0}


def test_a_folder_that_only_holds_the_right_folder_points_to_it(write: Write, tmp_path: Path) -> None:
    write(RUN, name="deep/inside/rank0.json")
    with pytest.raises(InputError, match=r"did you mean .*inside"):
        find_files(tmp_path)


def test_a_file_whose_header_is_long_is_still_found(write: Write, tmp_path: Path) -> None:
    write(RUN, header(1, comment="x" * 300_000), name="rank1.json")
    write(RUN, header(0, comment="x" * 300_000), name="rank0.json.gz")
    assert read_job(tmp_path).ranks == [0, 1]


def test_a_file_is_read_whatever_it_is_called(write: Write) -> None:
    assert len(read_job(write(RUN, name="download"))) == 1


# Whether they belong together


def test_two_files_of_one_rank_are_refused(write: Write, tmp_path: Path) -> None:
    for pid in (1, 2):
        write(RUN, header(0), name=f"host_{pid}.pt.trace.json")
    with pytest.raises(InputError, match=r"host_1.*host_2.*rank 0.*--match"):
        read_job(tmp_path)


def test_ranks_of_jobs_of_different_sizes_are_refused(write: Write, tmp_path: Path) -> None:
    for rank in (0, 1):
        write(RUN, header(rank, 2 + 2 * rank), name=f"rank{rank}.json")
    with pytest.raises(InputError, match=r"rank0\.json.* 2 ranks.*rank1\.json.* 4"):
        read_job(tmp_path)


@pytest.mark.parametrize(("seconds", "together"), [(1, True), (9, True), (60, False)])
def test_captures_far_apart_in_time_are_refused(write: Write, tmp_path: Path, seconds: int, together: bool) -> None:
    for rank in (0, 1):
        write([op("a", rank * seconds * 1e6, 2)], header(rank, 2), name=f"rank{rank}.json")
    if together:
        assert read_job(tmp_path).ranks == [0, 1]
        return
    with pytest.raises(InputError, match="60 s before"):
        read_job(tmp_path)


def test_missing_ranks_are_told(write: Write, tmp_path: Path) -> None:
    for rank in (0, 3):
        write(RUN, header(rank, 8), name=f"rank{rank}.json")
    (warning,) = read_job(tmp_path).warnings
    assert warning.startswith("2 of 8 ranks are here")


def test_a_whole_job_warns_of_nothing(write: Write, tmp_path: Path) -> None:
    for rank in (0, 1):
        write(training_run(rank=rank), header(rank, 2), name=f"rank{rank}.json")
    assert read_job(tmp_path).warnings == ()


# Reading in parallel


def test_reading_in_processes_gives_what_reading_one_by_one_gives(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(3):
        write(training_run(rank=rank, slow=rank), header(rank, 4), name=f"rank{rank}.json.gz")
    alone = read_job(tmp_path, workers=1)
    monkeypatch.setitem(job._LIMITS, "parallel_from_bytes", 0)
    monkeypatch.setattr(job, "Here", None)  # so that it cannot be what is used
    progress: list[tuple[int, int]] = []
    together = read_job(tmp_path, workers=2, progress=lambda done, total: progress.append((done, total)))
    assert_same_columns(together, alone)
    assert (together.headers, together.warnings) == (alone.headers, alone.warnings)
    total = sum(p.stat().st_size for p in tmp_path.iterdir())
    assert progress[-1] == (total, total)
    assert progress == sorted(progress)


def test_what_is_wrong_with_one_file_comes_out_of_its_process(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(RUN, header(0), name="rank0.json.gz")
    good = write(training_run(), header(1), name="rank1.json.gz")
    good.write_bytes(good.read_bytes()[:-30])
    monkeypatch.setitem(job._LIMITS, "parallel_from_bytes", 0)
    with pytest.raises(InputError, match=r"rank1\.json\.gz.*ends early"):
        read_job(tmp_path, workers=2)


# Real folders


@pytest.mark.data
@pytest.mark.parametrize(
    ("folder", "ranks"),
    [
        ("h200/multirank/ddp2_l8", [0, 1]),
        ("public/torchrec_v100/resnet18", [0, 1]),
        ("public/torchrec_v100/sst_sleep_pl_dense_after_backward_2", [0, 1, 2, 3]),
        ("public/megatron_tp8_a100/kineto", list(range(8))),
        ("public/sglang_decode_b200", list(range(8))),
    ],
)
def test_real_folders_are_whole_jobs(shared_data: Path, folder: str, ranks: list[int]) -> None:
    files, _ = find_files(shared_data / folder)
    assert len(files) == len(ranks)
    assert read_job(shared_data / folder).ranks == ranks


@pytest.mark.data
def test_a_real_folder_of_two_captures_is_refused(shared_data: Path) -> None:
    with pytest.raises(InputError, match=r"both .* and .* claim rank .*--match"):
        read_job(shared_data / "public/torchrec_v100/sst_long_a2a_optimizer_2")


def test_writing_and_reading_a_packed_file_is_the_same_as_a_plain_one(tmp_path: Path) -> None:
    plain = read_job(write_trace(tmp_path / "a.json", training_run()))
    assert_same_columns(read_job(write_trace(tmp_path / "b.json.gz", training_run())), plain)


# Several captures in one folder: the --match that is offered selects each


NAMINGS = {
    "tensorboard": "node7_{pid}.{time}.pt.trace.json",
    "torchrun": "rank{rank}.{time}.pt.trace.json",
    "second": "rank{rank}{again}.json",
    "step": "step{step}_rank{rank}.json.gz",
    "glob": "job[1]_rank{rank}_{time}.json",
}


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("apart_s", [0, 40])
def test_two_captures_in_one_folder_are_offered_by_their_match(tmp_path: Path, naming: str, apart_s: int) -> None:
    for capture in range(2):
        for rank in range(3):
            begin = 1_700_000_000_000 + 1000 * apart_s * capture + 99_000 * capture + 7 * rank
            words = {"pid": 800 + rank, "time": begin, "rank": rank, "step": 10 + 90 * capture}
            name = NAMINGS[naming].format(**words, again="_again" * capture)
            events = [op(f"capture {capture}", 1 + 1e6 * apart_s * capture + rank, 2)]
            write_trace(tmp_path / name, events, header(rank))
    if naming in ("second", "step"):
        found = read_job(tmp_path) if naming == "second" else None  # files with another name are left out, with a note
        if found is not None:
            (note,) = [text for text in found.warnings if "another capture" in text]
            assert {header.rank for header in read_job(tmp_path, match=offered(note)[0]).headers} == {0, 1, 2}
            return
    with pytest.raises(InputError) as caught:
        read_job(tmp_path)
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    assert "2 captures of one job" in said
    patterns = offered(said)
    assert len(patterns) == 2
    assert said.index(patterns[0]) < said.index("(the newest)") < said.index(patterns[1])
    read = [read_job(tmp_path, match=pattern) for pattern in patterns]
    assert [sorted(header.rank for header in job.headers) for job in read] == [[0, 1, 2]] * 2
    names = [{name for name in job.names if name.startswith("capture")} for job in read]
    assert names == [{"capture 1"}, {"capture 0"}]


def offered(said: str) -> list[str]:
    """The patterns in a message, as a shell would hand them over."""
    words = shlex.split(said.replace(";", " "))
    return [words[place + 1] for place, word in enumerate(words) if word == "--match"]


def test_captures_that_no_pattern_tells_apart_are_to_be_moved(tmp_path: Path) -> None:
    for name, rank in (("a.json", 0), ("b.json", 1), ("c.json", 0), ("d.json", 1)):
        write_trace(tmp_path / name, [op("x", 1 + rank, 2)], header(rank))
    with pytest.raises(InputError, match=r"captures of one job.*move the files of each into a folder of its own"):
        read_job(tmp_path)
