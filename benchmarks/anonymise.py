"""Writes the measured part of docs/sharing.md: whether anonymised traces replay to the same figures.

    python benchmarks/anonymise.py -o docs/sharing.md

Every trace of ../shared/data and of the package is anonymised, written as Chakra and as Kineto, read again and compared
with itself: all figures of `lumos replay`, `predict --scale` and `stragglers`, and the labels of kernels. What is above
the heading MEASURED and below the next one is kept.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lumos import read_job, replay
from lumos.analysis.kernel_labels import label
from lumos.analysis.replay import Replay
from lumos.analysis.slowdown import slowdown
from lumos.analysis.slowdown_causes import job_of
from lumos.chakra.run_writer import write_chakra
from lumos.errors import LumosError
from lumos.export.anonymise import anonymise
from lumos.export.chrome_traces import write_kineto
from lumos.graph.rules.build import Execution
from lumos.prediction.prediction import predict

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
MEASURED = "## Checked on recorded traces\n"
JOBS = (
    "h200/multirank/*/",
    "public/megatron_tp8_a100/kineto/",
    "public/torchrec_v100/*/",
    "public/sglang_decode_b200/",
)
FILES = ("h200/single/*.gz", "h200/zoo/*.gz", "h200/parallel/*.gz", "h200/fake_world/*.gz", "public/**/*.json.gz",
         "public/**/*.sqlite", "public/**/*.et")  # fmt: skip
SCALES = ("compute=0.5", "comm=2", "cpu=0.7")


class Checked(NamedTuple):
    """One trace: how many names were replaced, and how many figures differ, as Chakra and as Kineto.

    `plain` are the figures that differ from those of the same file written without --anonymise, where any differ.
    """

    name: str
    ranks: int
    public: int
    replaced: int
    differ: dict[str, int]
    plain: dict[str, int]


def traces() -> Iterator[Path]:
    """Jobs as folders, then single files."""
    yield ROOT / "src/lumos/data/example"
    jobs = [path for pattern in JOBS for path in sorted(DATA.glob(pattern))]
    yield from jobs
    for path in (path for pattern in FILES for path in sorted(DATA.glob(pattern))):
        if path.parent not in jobs and ".et.json" not in path.name:
            yield path


def figures(run: Replay) -> dict[str, str]:
    """Every figure by its place."""
    found: dict[str, Any] = {"replay": run.as_dict()}
    found |= {scale: predict(run, [scale]).step_ms for scale in SCALES}
    try:
        found["stragglers"] = slowdown(job_of(run)).as_dict()
    except LumosError as error:
        found["stragglers"] = type(error).__name__
    found["labels"] = [[one.us.tolist(), one.phase.tolist(), one.work.tolist(), one.attention.tolist()]
                       for one in label(run)]  # fmt: skip
    return dict(_leaves(found, ""))


def _leaves(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, part in value.items():
            if key not in ("name", "warnings"):
                yield from _leaves(part, f"{place}/{key}")
    elif isinstance(value, list | tuple):
        yield f"{place}/length", str(len(value))
        for number, part in enumerate(value):
            yield from _leaves(part, f"{place}/{number}")
    else:
        yield place, repr(value)


def check(path: Path) -> Checked | None:
    """None for what Lumos does not read."""
    try:
        before = replay(read_job(path))
    except LumosError:
        return None
    wanted, hidden = figures(before), anonymise(before.execution)
    differ, plain = {}, {}
    for form in ("Chakra", "Kineto"):
        after = _read_back(hidden.execution, form)
        differ[form] = _differences(after, wanted)
        plain[form] = _differences(after, _read_back(before.execution, form)) if differ[form] else 0
    base = ROOT if ROOT in path.parents else DATA
    ranks = len(before.execution.trace.ranks)
    return Checked(str(path.relative_to(base)), ranks, hidden.kept_names, hidden.replaced_names, differ, plain)


def _differences(one: dict[str, str], other: dict[str, str]) -> int:
    return sum(one.get(key) != other.get(key) for key in one.keys() | other.keys())


def _read_back(execution: Execution, form: str) -> dict[str, str]:
    """The figures of a run, written and read again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if form == "Chakra":
            write_chakra(folder / "run.et", execution)
        else:
            for rank in execution.trace.ranks:
                write_kineto(folder / f"rank{rank}.trace.json", execution.trace, rank)
        return figures(replay(read_job(folder)))


def section(found: list[Checked]) -> str:
    same = [one for one in found if not any(one.differ.values())]
    replaced, public = sum(one.replaced for one in found), sum(one.public for one in found)
    lines = [
        MEASURED,
        f"By `benchmarks/anonymise.py`: {len(found)} traces of the package and of others (PyTorch on NVIDIA and AMD "
        "GPUs, Nsight Systems, Chakra; 1 to 8 ranks), each anonymised, written, read again and compared with itself "
        "in\nevery figure of `lumos replay --json`, three `predict --scale` and `lumos stragglers --json`, and in the "
        "phase and kind\nof every kernel.",
        "",
        f"**{len(same)} of {len(found)} are the same in every digit**, as Chakra and as Kineto. Of their names, "
        f"{100 * replaced / (replaced + public):.0f} % were replaced.",
        "",
    ]
    others = [one for one in found if any(one.differ.values())]
    if others:
        lines += [
            "| not the same | figures that differ as Chakra | as Kineto | of these, because of `--anonymise` |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {one.name} | {one.differ['Chakra']} | {one.differ['Kineto']} | {sum(one.plain.values())} |"
            for one in others
        ]
        lines += [
            "",
            "A Chakra graph of another tool loses its dependencies when it is written as Kineto; they are found again "
            "by rules.\nThe file that is written without `--anonymise` gives the same answers in every digit.",
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    found = []
    for path in traces():
        one = check(path)
        if one is not None:
            print(*one, flush=True)
            found.append(one)
    text = section(found)
    print(text)
    if options.output is not None:
        before, _, rest = options.output.read_text("utf-8").partition(MEASURED)
        _, heading, after = rest.partition("\n## ")
        options.output.write_text(before + text + heading + after, "utf-8")


if __name__ == "__main__":
    main()
