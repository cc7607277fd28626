"""Reads what ASTRA-sim printed about a run: its output on the terminal, or its log (`log/log.log`).

    [2026-11-16 15:16:02.642] [workload] [info] sys[0] finished, 142837421 cycles, exposed communication 27924421 cycles
    [2026-11-16 15:16:02.642] [statistics] [info] sys[0], Wall time: 142837421
    [2026-11-16 15:16:02.642] [statistics] [info] sys[0], GPU time: 114913000
    [2026-11-16 15:16:02.642] [statistics] [info] sys[0], Comm time: 113122421

A cycle is a nanosecond, `sys` is a rank. With `"trace-enabled": 1` in its system file, the log also says when every
node was issued and when it ended. ASTRA-sim appends to its log: the last run in it counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lumos.chakra.file_format import NodeType
from lumos.errors import InputError, printable
from lumos.files import open_file

_ADVICE = "give what ASTRA-sim printed, or its log/log.log"
_LONGEST_LINE = 1 << 16
_MOST_BYTES = 1 << 28  # it starts a new one after 10 MiB
_MOST_RANKS = 1 << 20
_MOST_DIGITS = 18  # of cycles: 31 years

_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
_FINISHED = re.compile(rb"sys\[(\d+)\] finished, (\d+) cycles(?:, exposed communication (\d+) cycles)?")
_STATISTIC = re.compile(rb"sys\[(\d+)\], (Wall|GPU|CPU|Comm) time: (\d+)")
_NODE = re.compile(  # of the first "issue" alone: trying every one takes the square of a line's length
    rb"(?>.*?(issue|callback),\s*sys->id=(\d+), tick=(\d+), node->id=(\d+), node->name=)(.*), node->type=(\d+)"
)
_FAILED = re.compile(rb"\[critical\] (?!warning! a callable)(.*)")
_LOGGED = re.compile(rb"\s*\[\d{4}-\d\d-\d\d[T ][^]]*\] \[[\w:]+\] \[\w+\] ")  # the start of every line that it logs
_END = b"] Exiting"


@dataclass
class SimulatedRank:
    """What was printed about one rank, in nanoseconds; None: not printed."""

    wall_ns: int | None = None
    exposed_ns: int | None = None  # the wall time without the time of compute nodes
    compute_ns: int | None = None


@dataclass(frozen=True)
class SimulatedNode:
    """A node of communication, from its issue to its end."""

    rank: int
    id: int
    name: str
    type: NodeType
    start_ns: int
    end_ns: int


@dataclass
class AstraSimLog:
    """The last run of a log."""

    path: Path
    ranks: dict[int, SimulatedRank] = field(default_factory=dict)
    nodes: list[SimulatedNode] = field(default_factory=list)  # empty: not traced
    has_ended: bool = False
    failure: str = ""  # what it stopped at

    @property
    def step_ns(self) -> int:
        """When the last rank finished."""
        return max(rank.wall_ns or 0 for rank in self.ranks.values())


def looks_like_astra_sim(path: Path) -> bool:
    """Whether a file is the output of ASTRA-sim, by its beginning: every line of it has a time and a logger."""
    if path.is_dir():
        return (path / "log.log").is_file()
    try:
        with open_file(path, _ADVICE) as file:
            head = _COLOUR.sub(b"", file.read(_LONGEST_LINE))
    except InputError:
        return False
    return bool(_FINISHED.search(head) or _LOGGED.match(head))


def read_astra_sim_log(path: Path) -> AstraSimLog:
    """The result in a log, or in the folder of logs that ASTRA-sim writes; InputError where there is none."""
    run, started = AstraSimLog(path), dict[tuple[int, int], int]()
    for line in _lines(path):
        if run.has_ended and not line.endswith(_END) and (_LOGGED.match(line) or _FINISHED.search(line)):
            run, started = AstraSimLog(path), {}
        if (finished := _FINISHED.search(line)) is not None:
            rank = _rank(finished[1], path)
            if rank in run.ranks and run.ranks[rank].wall_ns is not None:  # another run without an end between them
                run, started = AstraSimLog(path), {}
            found = run.ranks.setdefault(rank, SimulatedRank())
            found.wall_ns = _number(finished[2], path)
            found.exposed_ns = None if finished[3] is None else _number(finished[3], path)
        elif (statistic := _STATISTIC.search(line)) is not None:
            found, value = run.ranks.setdefault(_rank(statistic[1], path), SimulatedRank()), _number(statistic[3], path)
            found.compute_ns = value if statistic[2] == b"GPU" else found.compute_ns
        elif (node := _NODE.match(line)) is not None:
            _add_node(run, started, node)
        elif (failed := _FAILED.search(line)) is not None and not run.failure:
            run.failure = printable(failed[1].decode(errors="replace"))[:200]
        elif line.endswith(_END):
            run.has_ended = bool(run.ranks)
    return _checked(run)


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a log, or of a folder's logs from the oldest on: a full one is called log.1.log."""
    older = [path / f"log.{number}.log" for number in range(10, 0, -1)]
    files = [*(file for file in older if file.exists()), path / "log.log"] if path.is_dir() else [path]
    for file in files:
        with open_file(file, _ADVICE) as opened:
            size = 0
            while line := opened.readline(_LONGEST_LINE):
                size += len(line)
                if size > _MOST_BYTES:
                    raise InputError(f"{file}: larger than {_MOST_BYTES >> 20} MiB, too large for a log; {_ADVICE}")
                yield (_COLOUR.sub(b"", line) if b"\x1b" in line else line).rstrip()


def _add_node(run: AstraSimLog, started: dict[tuple[int, int], int], found: re.Match[bytes]) -> None:
    """A line about a node; those of communication are kept once they have ended."""
    rank, node = _rank(found[2], run.path), _number(found[4], run.path)
    tick, kind = _number(found[3], run.path), _number(found[6], run.path)
    if kind not in (NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL):
        return
    if found[1] == b"issue":
        started[rank, node] = tick
    elif (rank, node) in started:
        name = printable(found[5].decode(errors="replace"))
        begin = started.pop((rank, node))
        run.nodes.append(SimulatedNode(rank, node, name, NodeType(kind), begin, max(begin, tick)))


def _rank(text: bytes, path: Path) -> int:
    rank = _number(text, path)
    if rank >= _MOST_RANKS:
        raise InputError(f"{path}: sys[{rank}] is no rank of a job; is the file damaged?")
    return rank


def _number(text: bytes, path: Path) -> int:
    if len(text) > _MOST_DIGITS:
        raise InputError(f"{path}: {text[:20].decode()}… is no number of cycles; is the file damaged?")
    return int(text)


def _checked(run: AstraSimLog) -> AstraSimLog:
    if not any(rank.wall_ns is not None for rank in run.ranks.values()):
        why = f"it stopped: {run.failure}" if run.failure else "no line 'sys[0] finished, … cycles'"
        raise InputError(f"{run.path}: no result of ASTRA-sim in it ({why}); {_ADVICE} of a run that ended")
    lost = [rank for rank, found in run.ranks.items() if found.wall_ns is None]
    missing = sorted(set(range(max(run.ranks) + 1)) - set(run.ranks)) + lost
    if missing:
        raise InputError(f"{run.path}: rank {missing[0]} did not finish; {run.failure or 'run ASTRA-sim to its end'}")
    return run
