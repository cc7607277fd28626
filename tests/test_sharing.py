"""One file read by several readers is the file read by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lumos.errors import InputError
from lumos.read import job
from lumos.read import json_slices as slices
from lumos.read.job import read_job
from lumos.read.json_slices import CannotShareError
from lumos.read.kineto import read_kineto
from lumos.trace.trace import concatenate
from lumos.workers.processes import processes
from support import LAYOUTS, Layout, header, op, rows, training_run, write_trace


@pytest.mark.parametrize("readers", [2, 3, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shares_make_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout, readers: int) -> None:
    path = write_trace(tmp_path / "trace.json", training_run(), header(3, 8), layout)
    whole = read_kineto(path)
    monkeypatch.setattr(slices, "SLICE_BYTES", 2000)
    shares = concatenate([read_kineto(path, share=(index, readers)) for index in range(readers)])
    assert sorted(rows(shares)) == sorted(rows(whole))
    assert sorted(shares.syncs.correlation) == sorted(whole.syncs.correlation)
    assert max(h.rank for h in shares.headers) == max(h.rank for h in whole.headers)


def test_a_file_whose_cuts_are_doubtful_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [op("aten::mm", i, 1, args={"nested": [{"a": 1}, {"b": 2}] * 40}) for i in range(50)]
    path = write_trace(tmp_path / "trace.json", events, layout="one line")
    monkeypatch.setattr(slices, "SLICE_BYTES", 1000)
    with pytest.raises(CannotShareError):
        [read_kineto(path, share=(index, 2)) for index in range(2)]


def test_a_large_file_is_read_by_processes_while_this_one_does_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_trace(tmp_path / "trace.json", training_run(), header(0))
    alone = read_job(path)
    monkeypatch.setitem(job._LIMITS, "shared_from_bytes", {"plain": 0, "gzip": 0})
    done: list[str] = []

    def progress(read: int, total: int) -> None:
        done.append(f"{read} of {total} bytes")

    with processes(2) as engine:
        trace = read_job(path, progress=progress, engine=engine, meanwhile=lambda: done.append("meanwhile"))
    size = path.stat().st_size
    assert done == ["meanwhile", f"{size} of {size} bytes"]
    assert sorted(rows(trace)) == sorted(rows(alone))


def test_a_mistake_in_a_process_is_the_users_mistake(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("not a trace")
    with processes(1) as engine, pytest.raises(InputError, match="not JSON"):
        read_job(path, engine=engine)
