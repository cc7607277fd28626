"""Files of dry runs: what cannot have been recorded is rejected in one line, with its place and value."""

from __future__ import annotations

import functools
import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mutations
from lumos.dry_run.dry_files import read_recording, read_recordings
from lumos.dry_run.from_script import predict_recording
from lumos.dry_run.recorded_step import StorageEvent, write_recording
from lumos.errors import InputError, LumosError
from lumos.program.op import Op
from support import operand, small_recording


def changed_file(path: Path, **values: Any) -> Path:
    """A file of a small recording with other values."""
    write_recording(path, replace(small_recording(), **values))
    return path


def with_op(at: int, **fields: Any) -> list[Op]:
    ops = list(small_recording().ops)
    ops[at] = ops[at]._replace(**fields)
    return ops


def test_a_small_recording_is_read_and_predicted(tmp_path: Path) -> None:
    path = changed_file(tmp_path / "rank1.dry.json.gz")
    assert read_recording(path) == small_recording()
    assert predict_recording(read_recording(path)).step_ms > 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"world": 0}, "world = 0 is not between 1 and"),
        ({"rank": 2**63}, "rank = 9223372036854775808 is not between 0 and 3"),
        ({"tokens": -256}, "tokens = -256"),
        ({"parameters": -1, "trained_parameters": -2}, "parameters = -1"),
        ({"most_bytes": 2**60}, "most_bytes = 1152921504606846976"),
        ({"ops": with_op(1, ranks=(0, 1))}, r"operator 1, aten.mm.default: has ranks, and is not a collective"),
        ({"ops": with_op(15, ranks=(0, 9))}, "operator 15, all_reduce: rank of its group = 9"),
        ({"ops": with_op(15, ranks=())}, "operator 15, all_reduce: is a collective without ranks"),
        ({"ops": with_op(3, inputs=(operand(2, 8, 128, 64),))}, r"operator 3, attention.forward: operands of shapes"),
        ({"ops": with_op(1, inputs=())}, "operator 1, aten.mm.default: operands of shapes none do not fit it"),
        ({"ops": with_op(1, phase="sideways")}, "operator 1, aten.mm.default: phase 'sideways'"),
        ({"ops": with_op(1, inputs=(operand(2**40, 2**40),) * 2)}, "operator 1, aten.mm.default: elements ="),
        ({"ops": with_op(1, inputs=(operand(-5, 4),) * 2)}, "operator 1, aten.mm.default: size = -5"),
        ({"ops": with_op(4, after=(4,))}, "operator 4, aten.convolution.default: waits for operator 4"),
        ({"events": [StorageEvent(1, 3, -512)]}, "events: entry 0: bytes of storage 3 = -512"),
        ({"events": [StorageEvent(99, 3, 512)]}, "events: entry 0: operator = 99"),
        ({"roles": {1: "decoration"}}, "roles: storage 1 holds 'decoration'"),
    ],
)
def test_a_recording_with_an_impossible_value_is_rejected_by_its_place(
    tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=rf"rank0.dry.json.gz: .*{words}"):
        read_recording(changed_file(tmp_path / "rank0.dry.json.gz", **values))


def test_every_value_of_a_recording_may_be_any_other(tmp_path: Path) -> None:
    """Each is rejected in one line, or gives a prediction with finite numbers."""
    chance, path = random.Random(7), tmp_path / "rank0.dry.json.gz"
    content = json.loads(gzip.decompress(changed_file(path).read_bytes()))
    answered, lines = 0, set()
    for place in mutations.leaves_of(content):
        old = functools.reduce(lambda value, key: value[key], place, content)
        new = mutations.with_leaf(content, place, mutations.odd_leaf(chance, old))
        path.write_bytes(gzip.compress(json.dumps(new).encode(errors="surrogatepass"), 1))
        try:
            answer = predict_recording(read_recording(path)).as_dict()
        except LumosError as error:
            lines.add(len(str(error).splitlines()))
            continue
        answered += 1
        assert answer["step_ms"] > 0, place
        assert (answer["mfu"] or 0.0) <= 1.0001 * (answer["hfu"] or 1.0), place
    assert lines == {1}
    assert answered > 20


def test_a_recording_that_unpacks_to_millions_of_values_is_rejected_before_they_are_made(tmp_path: Path) -> None:
    path = changed_file(tmp_path / "rank0.dry.json.gz")
    whole = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(whole.replace(b'"ops": [', b'"ops": [' + b"[]," * 7_000_000, 1), 1))
    with pytest.raises(InputError, match="larger than any dry run"):
        read_recording(path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"assumptions": ["equal"] * 1001}, "number of assumptions = 1001"),
        ({"made_by": {"torch": "2" * 1001}}, "a text of 1001 characters"),
        ({"places": {3: "layer" * 201}}, "a text of 1005 characters"),
        ({"ops": with_op(1, module="layer" * 201)}, "operator 1, aten.mm.default: a text of 1005 characters"),
        ({"ops": with_op(17, after=(1,) * 1_000_001)}, "100000[0-9] waits, more than 1000000"),
        ({"events": [StorageEvent(0, 3, 0)] * 1_600_001}, "1600001 events, more than 1600000"),
    ],
)
def test_a_small_file_does_not_become_a_large_recording(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_recording(changed_file(tmp_path / "rank0.dry.json.gz", **values))


def test_recordings_of_different_jobs_in_one_folder_are_rejected(tmp_path: Path) -> None:
    changed_file(tmp_path / "rank1.dry.json.gz")
    other = changed_file(tmp_path / "rank2.dry.json.gz")
    with pytest.raises(InputError, match=r"rank2.dry.json.gz: rank 1, as .*rank1.dry.json.gz"):
        read_recordings(tmp_path)
    changed_file(other, rank=2, world=8)
    with pytest.raises(InputError, match=r"rank2.dry.json.gz: it is of a job of 8"):
        read_recordings(tmp_path)


def test_frozen_weights_do_not_raise_the_model_flops_above_what_the_gpu_computes() -> None:
    ops = [op for op in small_recording().ops if op.phase != "backward" or op.name == "aten.mm.default"]
    step = predict_recording(replace(small_recording(), ops=[op._replace(after=()) for op in ops], events=[]))
    assert step.mfu is not None
    assert step.hfu is not None
    assert step.mfu <= step.hfu


def test_a_gpu_that_a_recording_names_is_never_read_from_a_file(tmp_path: Path) -> None:
    sheet = tmp_path / "gpu.toml"
    sheet.write_text('like = "h100"\nname = "other"\n')
    recording = replace(small_recording(), made_by={"gpu": str(sheet)})
    assert "assuming h100" in predict_recording(recording).notes[0]
    sheet.write_text("not a data sheet")
    assert predict_recording(recording).notes[0] == "cluster.gpu is not given: assuming h100"
