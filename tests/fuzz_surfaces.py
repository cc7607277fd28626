"""Surfaces of fuzzing: each makes hostile input in a folder from a source of randomness, and runs commands on it.

`SURFACES` is the list, with how often each is tried; `tests/fuzz.py` runs it.
"""

from __future__ import annotations

import atexit
import contextlib
import gzip
import io
import json
import os
import random
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import polars

import mutations as m
from browser import Browser, find_browser, open_browser
from foreign_traces import et_nodes, write_nsys
from fuzz_command import (
    ROOT,
    UnsoundError,
    check_page,
    check_sound,
    refusal_in,
    run,
    run_apart,
    store,
    unlimited,
)
from lumos.dry_run.recorded_step import write_recording
from support import Event, header, launch, op, small_recording, training_run, write_trace

Random = random.Random
WRITES = ("", "", "", "answer.html", "answer.json", "answer.csv")
SHOWS: tuple[list[str], ...] = (["--json"], [])


# Good input, made once


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    folder = store() / name
    if not folder.exists():
        new = Path(tempfile.mkdtemp(dir=store()))
        with unlimited():
            make(new)
        new.rename(folder)
    return folder


def good_command(folder: Path, *arguments: str) -> None:
    ran = run(folder, *arguments)
    if ran.answer is None:
        raise RuntimeError(f"the input of a target is refused: {arguments}: {ran.refusal}")


SEARCH = ("search", str(ROOT / "examples/one-h200.toml"), "--gpus", "2", "--workers", "1", "--vary",
          "train.recompute=none,full", "--top", "3")  # fmt: skip
MEASURED = (
    "id,source,model_name,gpu,framework,n_gpus,n_layers,hidden,n_heads,ffn_hidden,vocab,seq_len,global_batch,"
    "micro_batch,tp,pp,dp,precision,step_time_s\n"
    "a,here,small,h200,megatron-core,8,8,1024,16,4096,32000,2048,16,2,2,1,4,bf16,0.2\n"
    "b,here,small,a100,pytorch,2,4,1024,16,4096,32000,1024,4,2,1,1,2,bf16,0.1\n"
)


def searched(folder: Path) -> None:
    good_command(folder, *SEARCH, "--json", "--journal", "journal", "-o", "answer.json")


def parts(folder: Path) -> None:
    for shard in ("1/2", "2/2"):
        good_command(folder, *SEARCH, "--shard", shard, "-o", f"search{shard[0]}.json")
        (folder / "runs.csv").write_text(MEASURED)
        good_command(folder, "score", "runs.csv", "--shard", shard, "-o", f"score{shard[0]}.json")


def cost_file(folder: Path) -> None:
    from lumos.costs.hardware_model import encode
    from lumos.costs.operator_model import _shipped

    regressors = dict(list(_shipped("h200").items())[:2])
    (folder / "model.npz").write_bytes(encode("h200", regressors))


def chakra_files(folder: Path) -> None:
    for rank in (0, 1):
        write_trace(folder / f"rank{rank}.json", training_run(rank=rank, steps=1), header(rank, 2))
    good_command(folder, "convert", ".", "-o", "run.et")
    for file in folder.glob("*.json"):
        file.unlink()


@cache
def setup_files() -> list[Path]:
    """Descriptions of every kind that the repository has."""
    return [ROOT / "examples" / name for name in ("one-h200.toml", "config.json", "megatron.sh", "torchtitan.toml")]


# Targets: each makes input in a folder from a source of randomness, and runs commands on it


def mutated_trace(chance: Random, folder: Path) -> Path:
    """A job of one or two ranks, of which one is mutated; the path to name."""
    ranks = chance.choice((1, 1, 2))
    for rank in range(ranks):
        events, head = training_run(rank=rank, steps=chance.choice((1, 2)), layers=2), header(rank, ranks)
        if rank == ranks - 1:
            for _ in range(chance.choice((1, 1, 2, 3))):
                events = chance.choice(m.MUTATIONS)(chance, events) or events[:1]
        path = write_trace(folder / f"rank{rank}.json", events, head, layout=chance.choice(m.LAYOUTS))
    if chance.random() < 0.4:
        mutate = m.mutated_json if chance.random() < 0.3 else m.damaged
        with contextlib.suppress(ValueError):  # what other mutations made is not always JSON
            path.write_bytes(mutate(chance, path.read_bytes()))
    return folder if ranks > 1 else path


def trace_commands(chance: Random, folder: Path) -> None:
    path = str(mutated_trace(chance, folder))
    step = ["--step", chance.choice(["0", "1", "99", "#1", "x"])] if chance.random() < 0.1 else []
    show, output = chance.choice([["--json"], []]), chance.choice(WRITES)
    written = ["-o", output] if output else []
    match chance.randrange(7):
        case 6:
            run(folder, "stragglers", path, *step, *show, *written)
        case 0 | 1:
            run(folder, "replay", path, *step, *show, *written)
        case 2:
            what = chance.choice(["compute", "comm", "cpu", "kernel:.", "kernel:[", "kernel:a{99999999999}"])
            run(folder, "predict", "--from", path, "--scale", f"{what}={chance.choice(m.FACTORS)}", *show, *written)
        case 3:
            run(folder, "check", path, *show)
        case 4:
            write_trace(folder / "good.json", training_run(steps=1), header(0))
            both = [path, "good.json"] if chance.random() < 0.5 else ["good.json", path]
            run(folder, "compare", *both, *show)
        case 5:
            change = f"{chance.choice(m.KEYS)}={chance.choice(m.VALUES)}"
            run(folder, "predict", "--from", path, "--set", change, *show)


def convert_and_back(chance: Random, folder: Path) -> None:
    """What convert writes, replay reads."""
    path = mutated_trace(chance, folder)
    before = run(folder, "replay", str(path), "--json")
    if before.answer is None:
        return
    (folder / "out").mkdir()
    name = chance.choice(["out/x.et", "out/x.{rank}.trace.json"])
    more = chance.choice([[], ["--anonymise"]])
    if run(folder, "convert", str(path), "-o", name, *more, "--json").answer is not None:
        back = run(folder, "replay", "out", "--json")
        if back.answer is None:
            raise UnsoundError(f"replay refuses what convert wrote: {back.refusal}")
        for key in ("recorded_ms", "simulated_ms", "clean_ms"):
            if more and back.answer[key] != before.answer[key]:
                raise UnsoundError(f"anonymised, {key} is {back.answer[key]} in place of {before.answer[key]}")


def chakra(chance: Random, folder: Path) -> None:
    shutil.copytree(made_once("chakra", chakra_files), folder, dirs_exist_ok=True)
    file = chance.choice(sorted(folder.glob("*.et")))
    file.write_bytes(m.damaged(chance, file.read_bytes()))
    run(folder, chance.choice(["replay", "check"]), ".", *chance.choice([["--json"], []]))


def setups(chance: Random, folder: Path) -> None:
    source = chance.choice(setup_files())
    text = source.read_bytes()
    if source.suffix == ".json" and chance.random() < 0.7:
        text = m.mutated_json(chance, text)
    elif chance.random() < 0.85:
        text = m.mutated_text(chance, text)
    (folder / source.name).write_bytes(text)
    changes = []
    for _ in range(chance.choice((0, 0, 1, 2))):
        changes += ["--set", f"{chance.choice(m.KEYS)}={chance.choice(m.VALUES)}"]
    bill = ["--price", chance.choice(m.VALUES), "--tokens", chance.choice(m.VALUES)] if chance.random() < 0.2 else []
    show, output = chance.choice([["--json"], []]), chance.choice(WRITES)
    run(folder, "predict", source.name, "--describe", *changes, *bill, *show, *(["-o", output] if output else []))


@cache
def number_keys() -> list[str]:
    """All keys of a setup whose values are numbers, or may be."""
    from lumos.setup.sections import Cluster, Model, Parallel, Train

    sections = {"model": Model, "train": Train, "parallel": Parallel, "cluster": Cluster}
    return [f"{name}.{field}" for name, kind in sections.items() for field in kind.model_fields]


def numbers_of_setups(chance: Random, folder: Path) -> None:
    """Good descriptions with one or two numbers that are nearly right."""
    source = chance.choice(setup_files())
    changes = ["--set", "train.seq=2048"] if source.name == "config.json" else []
    for _ in range(chance.choice((1, 1, 2))):
        value = chance.choice(m.NUMBERS if chance.random() < 0.8 else m.VALUES)
        changes += ["--set", f"{chance.choice(number_keys())}={value}"]
    bill = ["--price", chance.choice(m.NUMBERS), "--tokens", chance.choice(m.NUMBERS)] if chance.random() < 0.3 else []
    output = chance.choice(WRITES)
    show = chance.choice([["--json"], []])
    run(folder, "predict", str(source), "--describe", *changes, *bill, *show, *(["-o", output] if output else []))


def changed_runs(chance: Random, folder: Path) -> None:
    """Another configuration of a traced run, whose setup or question is odd."""
    source = ROOT / "tests/data/capture/fake_world"
    setup = (source / "setup.toml").read_bytes()
    if chance.random() < 0.4:
        setup = m.mutated_text(chance, setup)
    (folder / "setup.toml").write_bytes(setup)
    change = f"{chance.choice(number_keys())}={chance.choice(m.NUMBERS)}"
    run(folder, "predict", "setup.toml", "--from", str(source), "--set", change, *chance.choice([["--json"], []]))


def failing_runs(chance: Random, folder: Path) -> None:
    """Runs that fail at odd rates, with odd checkpoints, spares and deadlines."""
    from lumos.setup.reliability import RATES, Reliability

    options = ["--tokens", chance.choice(["1", "1e6", "1T", "15T", "1e18", "1e24", "x"])]
    for key in chance.sample(list(Reliability.model_fields), chance.choice((1, 2, 3))):
        options += ["--set", f"reliability.{key}={chance.choice(m.NUMBERS if chance.random() < 0.8 else m.VALUES)}"]
    if chance.random() < 0.6:
        options += ["--mtbf", chance.choice([*RATES, "101", "50000", "1e12", *m.VALUES])]
    if chance.random() < 0.3:
        options += ["--deadline", chance.choice([*m.NUMBERS, *m.VALUES])]
    setup = ROOT / "examples/llama3-70b.toml"
    run(folder, "predict", str(setup), *options, *chance.choice([["--json"], []]))


def learned_spreads(chance: Random, folder: Path) -> None:
    """Step times, spreads, operation tables and traces to learn from, mutated; and the risk of mutated traces."""
    show = chance.choice([["--json"], [], ["-o", "answer.html"]])
    few = ["--risk", "--draws", "40"]
    match chance.randrange(4):
        case 0:
            rows = "".join(f"{step},{100 + step % 7},{step % 2}\n" for step in range(12))
            (folder / "file").write_bytes(m.mutated_text(chance, b"step,ms,rank\n" + rows.encode()))
        case 1:
            stated = b'{"gpu": 0.01, "pauses": {"probability": 0.1, "ms": 5, "spread": 0.2}}'
            shipped = (ROOT / "src/lumos/data/variability.json").read_bytes()
            text = chance.choice([b"[10, 11, 12.5, 10, 300]", stated, shipped])
            (folder / "file").write_bytes(chance.choice([m.mutated_json, m.mutated_json, m.damaged])(chance, text))
        case 2:
            (folder / "file").write_bytes(m.mutated_text(chance, (ROOT / "examples/operations.csv").read_bytes()))
            run(folder, "stragglers", "file", "--risk", *show)
        case _:
            path = str(mutated_trace(chance, folder))
            run(folder, "predict", "--from", path, *few, *show)
            return
    run(folder, "predict", str(ROOT / "examples/one-h200.toml"), *few, "--variability", "file", *show)


def slow_parts(chance: Random, folder: Path) -> None:
    """Parts of a cluster that are slow in odd ways."""
    values = (*m.NUMBERS, *m.VALUES, *["0", "0.5", "1.5", "dp", "tp"] * 12)
    options = []
    for _ in range(chance.choice((1, 1, 2))):
        names = [chance.choice(["rank", "link", "group", "share", "share", "x"]), "factor", "gpu"]
        kept = names[: chance.choice((1, 2, 2, 2, 2, 3))]
        options += ["--slow", ",".join(f"{name}={chance.choice(values)}" for name in kept)]
    draws = ["--risk", "--draws", chance.choice(["40", "40", "40", "0", "x", "1e3"])] if chance.random() < 0.7 else []
    run(folder, "predict", str(ROOT / "examples/one-h200.toml"), "--gpus", "8", *options, *draws, *chance.choice(SHOWS))


def searches(chance: Random, folder: Path) -> None:
    """Searches with odd questions; bounded by a small space."""
    options = {
        "--memory": chance.choice(m.VALUES), "--top": chance.choice(["1", "3", "0", "-1", "1000000"]),
        "--deadline": chance.choice(m.VALUES), "--price": chance.choice(m.VALUES),
        "--objective": chance.choice(["time", "cost", "energy", "gpus", "x"]),
        "--set": f"{chance.choice(m.KEYS)}={chance.choice(m.VALUES)}",
    }  # fmt: skip
    chosen = chance.sample(sorted(options), chance.choice((1, 2)))
    asked = [x for name in chosen for x in (name, options[name])]
    run(folder, *SEARCH, *asked, *chance.choice([["--json"], []]))


def journals(chance: Random, folder: Path) -> None:
    """A damaged journal is mended or refused; it never changes the answer."""
    shutil.copytree(made_once("searched", searched), folder, dirs_exist_ok=True)
    files = sorted(file for file in (folder / "journal").rglob("*") if file.is_file())
    contents = {file: file.read_bytes() for file in files}
    for file in chance.sample(files, min(len(files), chance.choice((1, 1, 2)))):
        match chance.randrange(5):
            case 0:
                file.unlink()
            case 1:
                file.write_bytes(b"")
            case 2:
                file.write_bytes(contents[chance.choice(files)])
            case _:
                file.write_bytes(m.damaged(chance, file.read_bytes()))
    again = run(folder, *SEARCH, "--json", "--journal", "journal").answer
    if again is not None:
        truth = json.loads((folder / "answer.json").read_bytes())
        if [row["step_ms"] for row in again["results"]] != [row["step_ms"] for row in truth["results"]]:
            raise UnsoundError("a damaged journal changed the answer")


def merges(chance: Random, folder: Path) -> None:
    kind = chance.choice(["search", "score"])
    names = [f"{kind}1.json", f"{kind}2.json"]
    for name in names:
        shutil.copy(made_once("parts", parts) / name, folder / name)
    one = folder / chance.choice(names)
    mutate = m.mutated_json if chance.random() < 0.8 else m.damaged
    one.write_bytes(mutate(chance, one.read_bytes()))
    output = chance.choice(["", "", "answer.html", "answer.csv"]) if kind == "search" else ""
    run(folder, "merge", *names, *chance.choice([["--json"], []]), *(["-o", output] if output else []))


def tables(chance: Random, folder: Path) -> None:
    (folder / "runs.csv").write_bytes(m.mutated_text(chance, MEASURED.encode()))
    run(folder, "score", "runs.csv", *chance.choice([["--json"], []]))


def operation_tables(chance: Random, folder: Path) -> None:
    text = (ROOT / "examples/operations.csv").read_bytes()
    name, mutate = "operations.csv", chance.choice([m.mutated_text, m.mutated_text, m.damaged])
    content = mutate(chance, text)
    if chance.random() < 0.3:
        packed = io.BytesIO()
        polars.read_csv(text).write_parquet(packed)
        name, content = "operations.parquet", m.damaged(chance, packed.getvalue())
    (folder / name).write_bytes(content)
    output = chance.choice(WRITES)
    run(folder, "stragglers", name, *chance.choice([["--json"], []]), *(["-o", output] if output else []))


def costs(chance: Random, folder: Path) -> None:
    rows, model = (ROOT / "examples/operators.json").read_bytes(), made_once("cost", cost_file) / "model.npz"
    packed = model.read_bytes()
    if chance.random() < 0.5:
        rows = chance.choice([m.mutated_json, m.damaged])(chance, rows)
    else:
        packed = m.damaged_npz(chance, packed)
    (folder / "rows.json").write_bytes(rows)
    (folder / "model.npz").write_bytes(packed)
    run(folder, "cost", "rows.json", "--model", "model.npz", *chance.choice([["--json"], []]))


SHEET = b"""like = "h100"
power_w = 500
hbm_tb_s = 2.0
sms = 120
price = 2.5
nvlink_domain = 8

[peak_tflops]
bf16 = 800
fp8 = 1500
"""


def data_sheets(chance: Random, folder: Path) -> None:
    (folder / "gpu.toml").write_bytes(m.mutated_text(chance, SHEET))
    gpus = chance.choice(["gpu.toml", "gpu.toml", "h200,gpu.toml"])
    example = str(ROOT / "examples/one-h200.toml")
    run(folder, "predict", example, "--gpu", gpus, *chance.choice([["--json"], [], ["-o", "answer.html"]]))


def _model_with_header(path: Path, change: Callable[[Any], Any]) -> None:
    """A model file whose trees are sound and whose header is changed."""
    from lumos.costs.hardware_model import encode
    from lumos.costs.operator_model import _shipped
    from lumos.model_file import packed, unpacked

    sections = {
        "host": {"launch_us": 30.0, "error_pct": 2.0}, "isolation_us": 2.8,
        "in_step": {"matrix": 1.1, "stream": 1.0, "launch_gap_us": 1.0, "error_pct": 3.0},
        "power": {"flop_pj": {"bf16": 1.0, "fp8": 0.6, "tf32": 2.0, "fp32": 9.0}, "memory_pj": 120.0},
        "provenance": {"samples": [{"file": "a", "rows": 3}], "lumos": "0", "fitted": "2026-01-01"},
    }  # fmt: skip
    whole = unpacked(encode("h200", dict(list(_shipped("h200").items())[:2]), **sections), "model.npz")
    path.write_bytes(packed(change(whole.header), whole.arrays))


def model_headers(chance: Random, folder: Path) -> None:
    """What a model file says of its machine and of its making is something else."""

    def change(header: Any) -> Any:
        return json.loads(m.mutated_json(chance, json.dumps(header).encode()))

    with contextlib.suppress(ValueError):  # no JSON any more, which other surfaces try
        _model_with_header(folder / "model.npz", change)
    if (folder / "model.npz").exists():
        example = str(ROOT / "examples/one-h200.toml")
        run(folder, *chance.choice([("about", "model.npz"), ("predict", example, "--model", "model.npz")]), "--json")


def samples(chance: Random, folder: Path) -> None:
    """Few rows, so that what is fitted is done at once."""
    lines = [json.dumps({"gpu": "NVIDIA H200", "torch": "2.11"})]
    for number in range(60):
        lines.append(json.dumps({"op": "gelu", "t": 64 * (number + 1), "h": 512, "dtype": "bf16", "us": 5.0 + number}))
    (folder / "samples.jsonl").write_bytes(m.mutated_text(chance, "\n".join(lines).encode() + b"\n"))
    run(folder, "fit", "samples.jsonl", "-o", "my.npz", "--json")


def dry_recording(folder: Path) -> None:
    write_recording(folder / "rank0.dry.json.gz", small_recording())


def dry_recordings(chance: Random, folder: Path) -> None:
    """Recordings of dry runs in which any value is another one, or which are damaged."""
    content = gzip.decompress((made_once("dry", dry_recording) / "rank0.dry.json.gz").read_bytes())
    mutate = chance.choice([m.mutated_leaves, m.mutated_leaves, m.mutated_json, m.damaged])
    packed = gzip.compress(mutate(chance, content), 1)
    if chance.random() < 0.1:
        packed = m.damaged(chance, packed)
    (folder / "rank0.dry.json.gz").write_bytes(packed)
    gpu = chance.choice([[], ["--gpu", "h200"], ["--gpu", "a100,h200"]])
    output = chance.choice(WRITES)
    written = ["-o", output] if output else []
    run(folder, "predict", "--from", ".", *gpu, *chance.choice([["--json"], []]), *written)


def profiler_costs(chance: Random, folder: Path) -> None:
    write_trace(folder / "good.json", training_run(steps=1), header(0))
    text = (ROOT / "src/lumos/data/profiler.json").read_bytes()
    (folder / "costs.json").write_bytes(chance.choice([m.mutated_json, m.damaged])(chance, text))
    run(folder, "replay", "good.json", "--profiler-costs", "costs.json", *chance.choice([["--json"], []]))


# Formats of other tools


def chakra_fields(chance: Random, folder: Path) -> None:
    """Chakra files whose messages are well-formed, and in which single fields are others."""
    from lumos.chakra.file_format import _delimited, delimited, schema

    shutil.copytree(made_once("chakra", chakra_files), folder, dirs_exist_ok=True)
    path = chance.choice(sorted(folder.glob("*.et")))
    with path.open("rb") as file:
        head, *nodes = _delimited(file, path)
    messages = [schema().metadata.FromString(head), *map(schema().node.FromString, nodes)]
    for message in chance.sample(messages, min(len(messages), chance.choice((1, 2, 5)))):
        _change_field(chance, message)
    with path.open("wb") as file:
        for message in messages:
            file.write(delimited(message))
    command = chance.choice([["replay"], ["check"], ["predict", "--gpu", "h100", "--from"], ["stragglers"]])
    run(folder, *command, ".", *chance.choice(SHOWS))


def _change_field(chance: Random, message: Any) -> None:
    """Of a protobuf message, or of a message within it."""
    fields = message.DESCRIPTOR.fields
    present = [field for field, _ in message.ListFields()]
    field = chance.choice(present or fields)
    value = getattr(message, field.name)
    if field.message_type is not None:
        part = value if not hasattr(value, "add") else chance.choice(value) if len(value) else value.add()
        _change_field(chance, part)
    elif hasattr(value, "append"):
        chance.choice([lambda: value.append(value[0] if len(value) else 0), lambda: value.__delitem__(slice(1))])()
    elif isinstance(value, str):
        setattr(
            message, field.name, chance.choice([t for t in m.HOSTILE_TEXT if "\ud800" not in t] + ["[[0, false], ['0'"])
        )
    else:
        for number in (chance.choice((0, 1, -1, 7, 2**31, 2**53, 2**61, 2**63 - 1, 2**64 - 1)), 3):
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                setattr(message, field.name, number)
                break


def _message(number: int, kind: int, source: int) -> dict[str, Any]:
    ends = {"comm_src": source, "comm_dst": 1 - source, "comm_tag": source, "comm_size": 64}
    return {"Id": number, "Name": "message", "NodeType": kind, "ctrlDeps": [3]} | ends


CHAKRA_JSON = {
    "workload_graph": [
        {"Id": 1, "Name": "a", "NodeType": 4, "num_ops": 10**10, "tensor_size": 10**7, "is_cpu_op": False},
        {"Id": 2, "NodeType": 7, "data_deps": [1], "comm_type": 0, "comm_size": 1 << 20, "pg_name": "0"},
        {"Id": 3, "Name": "c", "NodeType": 4, "data_deps": [2], "runtime": 50, "stream": 7},
        _message(4, 5, 0),
        _message(5, 6, 1),
    ]
}


def chakra_json(chance: Random, folder: Path) -> None:
    """The other format of Chakra, with sizes and links that no run has, and with groups beside it."""
    text = json.dumps(CHAKRA_JSON).encode()
    for rank in range(chance.choice((1, 2, 2))):
        mutate = chance.choice([m.mutated_leaves, m.mutated_leaves, m.mutated_json, m.damaged])
        (folder / f"job.{rank}.json").write_bytes(mutate(chance, text) if rank == 0 or chance.random() < 0.3 else text)
    if chance.random() < 0.3:
        groups = json.dumps({"0": [0, 1], "1": [0]}).encode()
        (folder / "job.json").write_bytes(chance.choice([m.mutated_json, m.damaged])(chance, groups))
    name = chance.choice([".", "job.0.json"])
    commands = (["predict", "--gpu", "h100", "--from", name], ["replay", name], ["check", name], ["stragglers", name])
    written = ["-o", "answer.html"] if chance.random() < 0.2 else []
    run(folder, *chance.choice(commands), *chance.choice(SHOWS), *(written if "check" not in commands else []))


def execution_traces(chance: Random, folder: Path) -> None:
    """PyTorch's execution traces beside a profile of the same run, and alone."""
    names = ["aten::mm", "aten::add", "aten::mm"]
    text = json.dumps(et_nodes(names)).encode()
    mutate = chance.choice([m.mutated_leaves, m.mutated_leaves, m.mutated_json, m.damaged])
    (folder / "et").mkdir()
    packed = gzip.compress(mutate(chance, text), 1) if chance.random() < 0.5 else mutate(chance, text)
    (folder / "et" / "rank0.json").write_bytes(packed)
    events = [(op(name, 40 * i, 30), *launch("gemm", 40 * i + 5, i + 1)) for i, name in enumerate(names)]
    write_trace(folder / "rank0.json", list(chain.from_iterable(events)), header(0))
    given = chance.choice(["et", "et/rank0.json"])
    run(folder, "convert", "rank0.json", "--et", given, "-o", "run.et", *chance.choice([["--anonymise"], [], []]))
    run(folder, "replay", given)


def nsight(chance: Random, folder: Path) -> None:
    """Exports of Nsight Systems in which anything stands in any column."""
    path = write_nsys(folder / "x.sqlite", processes=chance.choice((1, 1, 3)))
    if chance.random() < 0.9:
        m.mutated_sqlite(chance, path)
    if chance.random() < 0.15:
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            name = chance.choice(["CAST(x'ff' AS TEXT)", "'a\"b'", "'x;--'", "''"])
            database.execute("PRAGMA writable_schema = ON")
            database.execute(f"UPDATE sqlite_master SET name = {name}, tbl_name = {name} WHERE rowid = 2")
    if chance.random() < 0.25:
        path.write_bytes(m.damaged(chance, path.read_bytes()))
    out = chance.choice(WRITES)
    command = chance.choice([["replay"], ["stragglers"], ["check"], ["predict", "--scale", "compute=0.5", "--from"]])
    written = ["-o", out] if out and command != ["check"] else []
    run(folder, *command, "x.sqlite", *chance.choice(SHOWS), *written)


def astra_logs(chance: Random, folder: Path) -> None:
    """What ASTRA-sim printed, damaged, beside the run."""
    log = (ROOT / "tests/data/astra_sim/example.log").read_bytes()
    text = chance.choice([m.mutated_text, m.mutated_text, m.damaged])(chance, log)
    if chance.random() < 0.5:
        text = text.replace(b"node->name=work", b"node->name=" + chance.choice(m.INJECTIONS).encode())
    (folder / "log.log").write_bytes(text)
    written = chance.choice([[], ["-o", "answer.html"], ["-o", "answer.csv"]])
    run(folder, "compare", str(ROOT / "src/lumos/data/example"), "log.log", *chance.choice(SHOWS), *written)


def nested_tables(chance: Random, folder: Path) -> None:
    """Operation tables as Parquet whose columns are nested, of another type or missing."""
    frame = polars.read_csv(ROOT / "examples/operations.csv")
    if chance.random() < 0.2:  # few operations: one all-gather and one pass
        frame = frame.head(chance.choice((1, 2, 3, 4, 9)))
    m.odd_columns(chance, frame).write_parquet(folder / "operations.parquet")
    output = chance.choice(WRITES)
    risk = ["--risk"] if chance.random() < 0.3 else []
    layers = ["--layers", chance.choice(["0", "-1", "1", "32", "99999999"])] if chance.random() < 0.2 else []
    written = ["-o", output] if output else []
    run(folder, "stragglers", "operations.parquet", *risk, *layers, *chance.choice(SHOWS), *written)


# Traces that are given away


def anonymise(chance: Random, folder: Path) -> None:
    """Names of every form, hostile and deeply nested, are hidden; what is written can be read."""
    events, head = training_run(layers=2), header(0, 1)
    kinds = ("kernel<%s>", "void %s()", "std::%s", "a(%s)", "(%s)", "x::%s::y", "autograd::%s", "nccl%s", "%s[0]")
    for event in chance.sample(events, 6):
        name = str(event.get("name", "x"))
        for _ in range(chance.choice((1, 5, 100, 600))):
            name = chance.choice(kinds).replace("%s", name)
        event["name"] = name[:50_000] if chance.random() < 0.9 else m.hostile_file_name(chance, "")
    events = m.injected(chance, events, keep=("ph", "cat"), share=0.1)
    if chance.random() < 0.3:
        events = chance.choice(m.MUTATIONS)(chance, events) or events[:1]
    write_trace(folder / "rank0.json", events, m.injected(chance, head))
    (folder / "out").mkdir()
    more = chance.choice(
        [[], ["--keep", "shapes"], ["--drop", chance.choice(["gpu", "operators,sizes", "times", "x", ""])]]
    )
    name = chance.choice(["out/x.et", "out/x.{rank}.trace.json", "out/x.trace.json.gz"])
    if run(folder, "convert", "rank0.json", "-o", name, "--anonymise", *more, *chance.choice(SHOWS)).answer is not None:
        for path in (folder / "out").iterdir():
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            if b"planted" in content:
                raise UnsoundError(f"{path.name} shows a name")


def learned_run(folder: Path) -> None:
    for rank in (0, 1):
        write_trace(folder / f"rank{rank}.json", training_run(rank=rank, steps=3, layers=2), header(rank, 2))
    good_command(folder, "synthesise", ".", "--save", "model.json", "--json")


def synthesised(chance: Random, folder: Path) -> None:
    """Learning from mutated traces, and sizes that no run has."""
    sizes = []
    for option in chance.sample(
        ["--ranks", "--steps", "--layers", "--micro-batches", "--seed"], chance.choice((0, 1, 2))
    ):
        sizes += [option, chance.choice(["-1", "0", "1", "2", "3", "16", "x", "1e3", "9" * 25, "100000", "2147483648"])]
    if chance.random() < 0.5:
        source = str(mutated_trace(chance, folder))
    else:
        shutil.copytree(made_once("learned", learned_run), folder, dirs_exist_ok=True)
        source = chance.choice([".", "model.json"])
        shutil.move(folder / "model.json", folder / "given") if source == "." else None
    outputs = [["-o", "run.et"], ["--save", "kept.json"], ["--report", "answer.html"], []]
    run(folder, "synthesise", source, *sizes, *chance.choice(outputs), *chance.choice(SHOWS))


def learned_models(chance: Random, folder: Path) -> None:
    """Models that somebody else gave away, with other values in them."""
    model = (made_once("learned", learned_run) / "model.json").read_bytes()
    mutate = chance.choice([m.mutated_leaves, m.mutated_leaves, m.mutated_json, m.damaged])
    (folder / "model.json").write_bytes(mutate(chance, model))
    output = chance.choice([["-o", "run.et"], ["--report", "answer.html"], []])
    run(folder, "synthesise", "model.json", *output, *chance.choice(SHOWS))


# Options, pages and Python


def patterns(chance: Random, folder: Path) -> None:
    """Globs and regular expressions, on names that make them slow."""
    for rank in range(2):
        events = training_run(rank=rank, steps=1, layers=2)
        for event in events:
            if event.get("cat") == "kernel" and chance.random() < 0.5:
                event["name"] = chance.choice(
                    ["a" * 5000, "a" * 40 + "!", "ab" * 2000, "gemm", "\ud800", "x" * 100_000]
                )
        name = chance.choice([f"rank{rank}.json", f"{'a' * 60}{rank}.json", f"rank{rank}-{'a' * 40}!.json"])
        write_trace(folder / name, events, header(chance.choice((rank, None)), 2))
    glob = ["--match", chance.choice(m.GLOBS)] if chance.random() < 0.5 else []
    rank_pattern = ["--rank-pattern", chance.choice(m.PATTERNS)] if chance.random() < 0.4 else []
    pattern = chance.choice(m.PATTERNS)
    commands = (
        ["predict", "--from", ".", "--scale", f"kernel:{pattern}={chance.choice(m.FACTORS)}"], ["replay", "."],
        ["check", "."], ["stragglers", "."], ["convert", ".", "-o", "run.et"], ["predict", "--from", "."],
    )  # fmt: skip
    run(folder, *chance.choice(commands), *glob, *rank_pattern)


def pages(chance: Random, folder: Path) -> None:
    """Markup and scripts in every name that a page shows, those of files too; a browser opens some of them."""
    command = chance.choice(PAGES)(chance, folder)
    run(folder, *command, *([] if "--report" in command else ["-o", "answer.html"]))
    if (folder / "answer.html").exists() and chance.random() < 0.1 and find_browser():
        with _browser().open(folder / "answer.html") as page:
            page.draw_charts()
            asked = [address for address in page.requests[1:] if not address.startswith("data:")]
            if page.errors or asked:
                raise UnsoundError(f"the page: {page.errors[:2]}, asks for {asked[:2]}")


@cache
def _browser() -> Browser:
    """One for all cases, until this process ends."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    with unlimited():
        return stack.enter_context(open_browser())


def _with_shapes(events: list[Event]) -> list[Event]:
    """Operators with the tensors that they take."""
    shapes = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["c10::BFloat16"] * 2, "Concrete Inputs": ["", ""]}
    return [e | {"args": e["args"] | shapes} if e.get("cat") == "cpu_op" else e for e in events]


def _injected_trace(chance: Random, folder: Path, rank: int = 0) -> str:
    plain = _with_shapes(training_run(rank=rank, steps=2, layers=2))
    events = m.injected(chance, plain, keep=("ph", "cat", "s", "Input type"))
    head = m.injected(chance, header(rank, None, traceName="t", host="h"))
    name = m.hostile_file_name(chance, f"rank{rank}.json")
    write_trace(folder / name, events, head)
    return "./" + name


def _page_of_trace(chance: Random, folder: Path) -> list[str]:
    path = _injected_trace(chance, folder)
    commands = (["replay", path], ["replay", path, "--operators"], ["stragglers", path], ["predict", "--from", path,
                "--scale", "kernel:.=0.5"], ["predict", "--from", path, "--risk", "--draws", "40"])  # fmt: skip
    return chance.choice(commands)


def _page_of_job(chance: Random, folder: Path) -> list[str]:
    for rank in (0, 1):
        _injected_trace(chance, folder, rank)
    return [chance.choice(["replay", "stragglers"]), "."]


def _page_of_two(chance: Random, folder: Path) -> list[str]:
    (folder / "a").mkdir()
    return ["compare", _injected_trace(chance, folder), _injected_trace(chance, folder / "a").replace("./", "./a/", 1)]


def _page_of_table(chance: Random, folder: Path) -> list[str]:
    frame = polars.read_csv(ROOT / "examples/operations.csv")
    odd, kind = "gc" + chance.choice(m.INJECTIONS), polars.col("optype")
    name = m.hostile_file_name(chance, ".csv")
    types = polars.when(kind == "optimizer").then(polars.lit(odd)).otherwise(kind)
    (folder / name).write_text(frame.with_columns(types.alias("optype")).write_csv(), "utf-8")
    return ["stragglers", "./" + name, *chance.choice([[], ["--risk"]])]


def _page_of_setup(chance: Random, folder: Path) -> list[str]:
    text = (ROOT / "examples/one-h200.toml").read_text()
    name, sheet = m.hostile_file_name(chance, ".toml"), m.hostile_file_name(chance, ".toml")
    named = json.dumps("a model" + chance.choice(m.INJECTIONS))
    (folder / name).write_text(text.replace("[model]", f"[model]\nname = {named}", 1), "utf-8")
    gpus = []
    if chance.random() < 0.6:
        (folder / "gpus").mkdir()
        (folder / "gpus" / sheet).write_bytes(SHEET)
        gpus = ["--gpu", chance.choice(["", "h200,"]) + "gpus/" + sheet]
    space = ["--gpus", "2", "--workers", "1", "--vary", "train.recompute=none,full"]
    commands = (["predict", "./" + name, *gpus], ["predict", "./" + name, *gpus, "--risk", "--draws", "40"],
                ["search", "./" + name, *gpus, *space])  # fmt: skip
    return chance.choice(commands)


def _page_of_dry_run(chance: Random, folder: Path) -> list[str]:
    content = json.loads(gzip.decompress((made_once("dry", dry_recording) / "rank0.dry.json.gz").read_bytes()))
    known = {text for one in small_recording().ops for text in (one.name, one.phase, *one.options)}
    known |= {"format", "bf16", "fp32", "int64", "bool", "weights", "gradients", "optimizer"}
    odd = m.injected(chance, content, keep=known, share=chance.choice((0.1, 0.5)))
    (folder / "rank0.dry.json.gz").write_bytes(gzip.compress(json.dumps(odd).encode(), 1))
    return ["predict", "--from", "."]


def _page_of_log(chance: Random, folder: Path) -> list[str]:
    log = (ROOT / "tests/data/astra_sim/example.log").read_bytes()
    words = chance.choice(m.INJECTIONS).encode()
    name = m.hostile_file_name(chance, ".log")
    (folder / name).write_bytes(log.replace(b"node->name=", b"node->name=" + words.replace(b"\n", b"")))
    return ["compare", str(ROOT / "src/lumos/data/example"), "./" + name]


def _page_of_machine(chance: Random, folder: Path) -> list[str]:
    name = m.hostile_file_name(chance, ".npz")
    _model_with_header(
        folder / name, lambda header: m.injected(chance, header, keep=("kind", "format", "version"), share=0.3)
    )
    return ["about", "./" + name]


def _page_of_shards(chance: Random, folder: Path) -> list[str]:
    names = ["search1.json", "search2.json"]
    for name in names:
        shard = json.loads((made_once("parts", parts) / name).read_bytes())
        (folder / name).write_text(json.dumps(m.injected(chance, shard, share=0.02)))
    return ["merge", *names]


def _page_of_synthesis(chance: Random, folder: Path) -> list[str]:
    path = _injected_trace(chance, folder)
    (folder / "b").mkdir()
    against = _injected_trace(chance, folder / "b").replace("./", "./b/", 1)
    return ["synthesise", path, "--against", against, "--report", "answer.html"]


PAGES: tuple[Callable[[Random, Path], list[str]], ...] = (
    _page_of_trace, _page_of_job, _page_of_two, _page_of_table, _page_of_setup, _page_of_dry_run, _page_of_log,
    _page_of_machine, _page_of_shards, _page_of_synthesis,
)  # fmt: skip


def written_scripts(chance: Random, folder: Path) -> None:
    """Scripts that Lumos writes for others: names of models, traces and paths stay names in them."""
    if chance.random() < 0.4:
        events = _with_shapes(training_run(steps=1, layers=2))
        for event in events:
            if event.get("cat") == "cpu_op" and chance.random() < 0.5:
                event["args"] = m.injected(chance, event["args"], share=0.3)
            if chance.random() < 0.3 and event.get("cat") in ("kernel", "user_annotation"):
                event["name"] += chance.choice(m.INJECTIONS)
        name = m.hostile_file_name(chance, ".json")
        write_trace(folder / name, events, m.injected(chance, header()))
        run(folder, "replay", "./" + name, "--operators", "--reproduce", "reproduced")
        return
    text = (ROOT / "examples/one-h200.toml").read_text()
    named = json.dumps("a" + chance.choice(m.INJECTIONS))
    (folder / "run.toml").write_text(text.replace("[model]", f"[model]\nname = {named}", 1), "utf-8")
    tool = chance.choice(["megatron", "torchtitan", "deepspeed"])
    framework = chance.choice(["megatron", "pytorch", "deepspeed", "torchtitan"])
    run(folder, "predict", "run.toml", "--set", f"train.framework={framework}", "--emit", f"{tool}=emitted")


def python(chance: Random, folder: Path) -> None:
    """The functions of the package, with values that the command line would not let through."""
    import lumos

    plain = lumos.read_setup(chance.choice(setup_files()[:1]))
    sections = {name: getattr(plain, name).model_dump() for name in ("model", "train", "parallel", "cluster")}
    for _ in range(chance.choice((1, 1, 2, 3))):
        section = sections[chance.choice(sorted(sections))]
        key = chance.choice(sorted(section))
        section[key] = chance.choice([2, 3, 4, 8, 64, 0, m.odd_leaf(chance, section[key])])
    for name in ("parallel", "cluster"):
        sections[name] = {k: v for k, v in sections[name].items() if k not in ("dp", "gpus") or chance.random() < 0.5}
    with _refusals():
        setup = lumos.Setup(**sections)
        found = lumos.predict(setup)
        check_sound(found.as_dict())
        check_page(found._repr_html_(), scripts=0)
        match chance.randrange(6):
            case 0:
                lumos.step_risk(
                    found, draws=chance.choice((0, -1, 1, 40)), slow=chance.sample(["x", "rank=0,factor=2"], 1)
                )
            case 1:
                lumos.compare_gpus(setup, chance.sample(["h100", "a100", "x", "", "h200"], 2))
            case 2:
                tokens = chance.choice((0.0, -1.0, 1e9, 1e12, float("nan"), float("inf")))
                lumos.whole_run(
                    found, tokens=tokens, deadline_days=chance.choice((None, 0.0, -1.0, 30.0, float("nan")))
                )
            case 3:
                lumos.search(
                    setup, {chance.choice(m.KEYS): [chance.choice((0, 1, 2, "x", None))]}, top=chance.choice((0, 3))
                )
            case 4:
                (folder / "again.toml").write_text(lumos.write_setup(setup))
                if lumos.predict(folder / "again.toml").step_ms != found.step_ms:
                    raise UnsoundError("a setup that was written and read is another one")
            case _:
                lumos.predict(
                    setup.replaced({chance.choice(number_keys()): chance.choice((0, 1, 2, 7, -1, "x", None, 1e300))})
                )


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Mistakes in Python are our errors, or those of pydantic for values of wrong types."""
    from pydantic import ValidationError

    try:
        yield
    except ValidationError:
        return
    except Exception as error:
        refusal_in(error)


# Processes of their own


def ray_jobs(chance: Random, folder: Path) -> None:
    """The same input through workers on a Ray cluster: they refuse it as this process does."""
    if not _ray_is_here():
        return
    options = ["--engine", "ray"]
    if chance.random() < 0.15:
        odd = ["x", "", "127.0.0.1:1", "ray://", "ray://127.0.0.1:99999", "http://x", "\x00", "[::1]:1", "auto:0", "-1"]
        options += ["--address", chance.choice(odd)]
    if chance.random() < 0.6:
        for rank in range(2):
            write_trace(folder / f"rank{rank}.json", training_run(rank=rank, steps=1, layers=2), header(rank, 2))
        path = chance.choice(sorted(folder.glob("rank*.json")))
        path.write_bytes(chance.choice([m.damaged, m.mutated_json])(chance, path.read_bytes()))
        command = [chance.choice(["replay", "check", "stragglers"]), "."]
    else:
        setup = m.mutated_text(chance, (ROOT / "examples/one-h200.toml").read_bytes())
        (folder / "run.toml").write_bytes(
            setup if chance.random() < 0.5 else (ROOT / "examples/one-h200.toml").read_bytes()
        )
        command = ["search", "run.toml", "--gpus", "2", "--vary", "train.recompute=none,full", "--workers",
                   chance.choice(["1", "1", "0", "2", "-1", "99999999"])]  # fmt: skip
    there = run(folder, *command, *options, "--json")
    if "--address" not in options:
        here = run(folder, *command, "--json")
        if (there.answer is None) != (here.answer is None):
            raise UnsoundError(
                f"Ray answers otherwise: {there.refusal or 'an answer'}; here: {here.refusal or 'an answer'}"
            )


@cache
def _ray_is_here() -> bool:
    """One small cluster for all cases, started outside their limits of memory."""
    try:
        import ray
    except ImportError:
        return False
    from lumos.safe_path import safe_path

    with safe_path(), contextlib.chdir(store()), unlimited():
        try:
            alone = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
            ray.init(num_cpus=1, object_store_memory=100 << 20, log_to_driver=False, **alone)
        except Exception as problem:  # on a busy machine
            print(f"Ray does not start: {problem}", file=sys.stderr)
            return False
    return True


def sampling(chance: Random, folder: Path) -> None:
    """`lumos sample` with odd options, and with files to go on with that others wrote."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return
    values = {
        "--only": [*m.VALUES[:8], "gelu", "gelu,gelu", "profiler", "gelu,x", ",", "gemm" * 1000, "all_reduce"],
        "--scale": [*m.VALUES, *m.NUMBERS], "--seconds": [*m.VALUES, *m.NUMBERS], "--seed": [*m.VALUES, *m.NUMBERS],
        "--device": ["cpu", "cuda", "x", "", "cpu:1", "mps", "meta", "auto"],
    }  # fmt: skip
    given = {"--only": "gelu", "--scale": "0.001", "--seconds": "0.5", "--device": "cpu"}
    for name in chance.sample(sorted(values), chance.choice((0, 1, 1, 2))):
        given[name] = chance.choice(values[name])
    if given["--seconds"] not in ("0.5", "nan", "-1"):  # what measures for minutes is no hang
        given["--seconds"] = given["--seconds"] if given["--seconds"] in ("x", "", "0", "1e-300", "inf", "[]") else "1"
    if given["--seconds"] == "inf":
        given |= {"--only": "gelu", "--scale": "0.001"}
    if chance.random() < 0.5:
        lines = [json.dumps({"gpu": "cpu", "torch": "2"})]
        lines += [json.dumps({"op": "gelu", "t": 64 * n, "h": 512, "dtype": "bf16", "us": 5.0}) for n in range(1, 5)]
        mutate = chance.choice([m.mutated_text, m.damaged])
        (folder / "samples.jsonl").write_bytes(mutate(chance, "\n".join(lines).encode() + b"\n"))
    outputs = ["samples.jsonl"] * 8 + [".", "no/such/x.jsonl", "", "-", "/dev/null", "x\x00"]
    script = ["--script", chance.choice(["s.pyz", ".", "no/x.pyz"])] if chance.random() < 0.05 else []
    run(folder, "sample", "-o", chance.choice(outputs), *(word for pair in given.items() for word in pair), *script)


def captures(chance: Random, folder: Path) -> None:
    """`lumos capture` with odd options, of a command that ends at once."""
    values = ("-1", "0", "1", "2", "x", "", "1e3", "9" * 25, "2147483648", "h200", "../x", "RANK", "A=B", "\x00")
    options = []
    names = ["--steps", "--warmup", "--setup", "--rank-env", "--world", "--rank", "--gpu"]
    for name in chance.sample(names, chance.choice((1, 2, 3))):
        options += [name, chance.choice(values)]
    output = chance.choice(["out", "out", "out", "", ".", "no/such", "command.txt", "/dev/null", "x\x00"])
    run(
        folder, "capture", "-o", output, *options, *chance.choice([[], ["--dry"]]), "--", *chance.choice([["true"], []])
    )


def read_only_homes(chance: Random, folder: Path) -> None:
    """Commands of somebody who can write nowhere but into this folder, without caches of any kind."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:  # root may write everywhere
        return
    for rank in range(2):
        write_trace(folder / f"rank{rank}.json", training_run(rank=rank, steps=1, layers=2), header(rank, 2))
    path = folder / "rank1.json"
    if chance.random() < 0.5:
        path.write_bytes(m.damaged(chance, path.read_bytes()))
    example = str(ROOT / "examples/one-h200.toml")
    commands = (
        ["replay", "."], ["stragglers", ".", "-o", "answer.html"], ["predict", example, "-o", "answer.html"],
        ["search", example, "--gpus", "2", "--vary", "train.recompute=none,full", "--workers", "2"],
        ["predict", str(ROOT / "examples/config.json"), "--set", "train.seq=512"], ["demo"], ["about"],
        ["predict", example, "--risk", "--draws", "40"], ["synthesise", ".", "-o", "run.et"],
        ["predict", example, "--tokens", "1e9", "--mtbf", "llama3"],
    )  # fmt: skip
    run_apart(folder, chance.choice(["/nonexistent", "/", "/proc/1", "/dev/null"]), *chance.choice(commands))


# The list


SURFACES: dict[Callable[[Random, Path], None], int] = {
    trace_commands: 40, convert_and_back: 15, anonymise: 10, patterns: 10, chakra: 10, chakra_fields: 10,
    chakra_json: 15, execution_traces: 8, nsight: 15, astra_logs: 5, setups: 25, numbers_of_setups: 25, python: 15,
    changed_runs: 3, failing_runs: 4, slow_parts: 6, learned_spreads: 15, searches: 10, journals: 10, merges: 15,
    tables: 10, operation_tables: 15, nested_tables: 15, costs: 10, data_sheets: 8, model_headers: 8, samples: 3,
    sampling: 4, profiler_costs: 5, dry_recordings: 20, synthesised: 8, learned_models: 10, pages: 20,
    written_scripts: 8, captures: 2, ray_jobs: 2, read_only_homes: 1,
}  # fmt: skip
"""How often each is tried. Those that start processes take seconds."""
