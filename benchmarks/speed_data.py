"""Large inputs made from small real ones: a long trace, and a job of many ranks.

Both are made of text, not of parsed events, so that they look as torch writes them, spaces and all.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

from isal import igzip

_LEVEL = 2  # of igzip: as large as gzip's 6 within a tenth, and ten times faster
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_ABBREVIATED_FROM = 30  # ranks of a process group; torch writes "[0, 1, …, 28, ..., 511]" for more

# What must differ between two copies of an event: its time, the ids that join it to others, the number of the step.
_MOVING = re.compile(
    r'("ts": |"correlation": |"External id": |"wait_on_cuda_event_record_corr_id": |"ph": "[sf]", "id": |ProfilerStep#)'
    r"(\d+)"
)


def make_long_trace(source: Path, plain: Path, megabytes: int) -> int:
    """Repeat a trace one after the other up to a size; writes `plain` and `plain`.gz, returns the number of events."""
    text = _text(source)
    begin, end = _EVENTS.search(text).end(), text.rindex("]")  # type: ignore[union-attr]
    pieces = _MOVING.split(text[begin:end].rstrip())
    labels, numbers, rests = pieces[1::3], [int(n) for n in pieces[2::3]], pieces[3::3]
    stride = _strides(labels, numbers)
    copies = max(1, round((megabytes << 20) / (end - begin)))
    packed = plain.with_name(plain.name + ".gz")
    with plain.open("wb") as file, igzip.open(packed, "wb", _LEVEL) as gz:  # type: ignore[no-untyped-call]
        for copy in range(copies):
            parts = [text[:begin] if copy == 0 else ",", pieces[0]]
            for label, number, rest in zip(labels, numbers, rests, strict=True):
                parts += (label, str(number + copy * stride[label]) if number > 0 else "0", rest)
            parts.append("\n  " + text[end:] if copy == copies - 1 else "")
            chunk = "".join(parts).encode()
            file.write(chunk)
            gz.write(chunk)
    return copies * len(json.loads(text)["traceEvents"])


def make_job(sources: list[Path], folder: Path, ranks: int) -> None:
    """Copy the ranks of a small job round and round; every collective is then one of all ranks.

    A copy differs from its source by its rank, by the size of its groups, and by some microseconds of its clock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = [_widened(_text(source), ranks) for source in sources]
    for rank in range(ranks):
        text = re.sub(r'("distributedInfo": \{[^{]*?"rank": |"Rank": )\d+', rf"\g<1>{rank}", texts[rank % len(texts)])
        drift = (rank * 7919) % 20_000  # ns: below what a collective's own ends differ by
        base = re.search(r'"baseTimeNanoseconds": (\d+)', text)
        if base is not None:
            text = text[: base.start(1)] + str(int(base[1]) + drift) + text[base.end(1) :]
        (folder / f"rank{rank}.pt.trace.json.gz").write_bytes(igzip.compress(text.encode(), _LEVEL))


def _text(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()


def _strides(labels: list[str], numbers: list[int]) -> dict[str, int]:
    """How far the number after each label moves from copy to copy; ids may name the same thing, so they move alike."""
    known = sorted(set(labels))
    family = {label: label if label in ('"ts": ', "ProfilerStep#") else "id" for label in known}
    found: dict[str, list[int]] = {f: [] for f in family.values()}
    for label, number in zip(labels, numbers, strict=True):
        if number > 0:
            found[family[label]].append(number)
    pause = {'"ts": ': 1000}  # microseconds between two copies
    return {label: max(found[f]) - min(found[f]) + pause.get(f, 1) for label, f in family.items()}


def _widened(text: str, ranks: int) -> str:
    """The text of a rank with all process groups made as large as the job."""
    everyone = ", ".join(map(str, range(ranks)))
    short = ", ".join(map(str, range(_ABBREVIATED_FROM - 1)))
    listed = everyone if ranks <= _ABBREVIATED_FROM else f"{short}, ..., {ranks - 1}"
    text = re.sub(r'("world_size": |"pg_size": |"Group size": )\d+', rf"\g<1>{ranks}", text)
    text = re.sub(r'"ranks": \[[^]]*\]', f'"ranks": [{everyone}]', text)
    return re.sub(r'"Process Group Ranks": "[^"]*"', f'"Process Group Ranks": "[{listed}]"', text)


def main() -> None:
    """`long SOURCE PLAIN MEGABYTES` or `job FOLDER RANKS SOURCE…`; in a process of its own, for its memory."""
    what, *rest = sys.argv[1:]
    if what == "long":
        print(json.dumps({"events": make_long_trace(Path(rest[0]), Path(rest[1]), int(rest[2]))}))
    else:
        make_job([Path(p) for p in rest[2:]], Path(rest[0]), int(rest[1]))


if __name__ == "__main__":
    main()
