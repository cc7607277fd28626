"""Peers of sends and receives, recorded as ranks of the job or as indices into their process group.

Jobs of every pair of parallelisms are written rank by rank; pipelines and rings of context parallelism send to single
ranks, the others run collectives. Whatever the convention, the messages that are read must be those that were sent.
"""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import pytest

from chakra_converter import convert_recording
from lumos.chakra.communication import plan_communication
from lumos.graph.rules.build import Execution, build
from lumos.graph.rules.rendezvous import POINT_TO_POINT
from lumos.read.execution_trace import Links, Operator
from lumos.read.job import read_job
from lumos.trace.messages import PeerCall, peers_are_indices
from lumos.trace.trace import Message, Trace
from support import Event, collective, header, launch, note, op, write_trace

PARALLELISMS = ("tp", "cp", "ep", "dp", "pp")
COLLECTIVES = {"tp": "allreduce", "ep": "all_to_allv", "dp": "reduce_scatter", "cp": "allgather", "pp": "allreduce"}
SIZES = ((2, 2), (2, 4), (4, 2))
SLOT = 1000


class Link(NamedTuple):
    """A message from one rank to another within a process group."""

    sender: int
    receiver: int
    group: tuple[int, ...]


class Mesh:
    """A job of two parallelisms: the ranks of the inner one are neighbours."""

    def __init__(self, outer: str, inner: str, sizes: tuple[int, int]) -> None:
        (m, n), self.names = sizes, (outer, inner)
        self.world = m * n
        self.groups = {
            outer: [tuple(range(i, m * n, n)) for i in range(n)],
            inner: [tuple(range(i * n, (i + 1) * n)) for i in range(m)],
        }

    @property
    def links(self) -> list[Link]:
        """All messages of a step, in order of time: pipelines send there and back, rings to their next rank."""
        found = []
        for name in self.names:
            for group in self.groups[name] if name in ("pp", "cp") else ():
                pairs = [(i, i + 1) for i in range(len(group) - 1)]
                if name == "pp":
                    pairs += [(b, a) for a, b in reversed(pairs)]
                else:
                    pairs.append((len(group) - 1, 0))
                found += [Link(group[a], group[b], group) for a, b in pairs]
        return found

    def write(self, folder: Path, by_index: bool, microbatches: int = 2) -> Path:
        folder.mkdir()
        links = self.links * microbatches
        for rank in range(self.world):
            end = SLOT * (len(links) + len(self.names))
            events = [note("ProfilerStep#1", 0, end)]
            for slot, link in enumerate(links):
                events += _message(rank, slot, link, by_index)
            for slot, name in enumerate(self.names, len(links)):
                group = next(group for group in self.groups[name] if rank in group)
                events += _slot(slot, collective(COLLECTIVES[name], **_group(group)))
            write_trace(folder / f"rank{rank}.json", events, header(rank, self.world))
        return folder


def _group(ranks: tuple[int, ...]) -> dict[str, object]:
    return {"Process Group Ranks": str(list(ranks)), "Process Group Name": str(ranks), "Group size": len(ranks)}


def _message(rank: int, slot: int, link: Link, by_index: bool) -> list[Event]:
    if rank not in (link.sender, link.receiver):
        return []
    name, key, peer = ("send", "Dst Rank", link.receiver) if rank == link.sender else ("recv", "Src Rank", link.sender)
    recorded = link.group.index(peer) if by_index else peer
    return _slot(slot, collective(name, 1024 * (slot + 1), **_group(link.group)) | {key: recorded})


def _slot(slot: int, args: dict[str, object]) -> list[Event]:
    """An announced communication that takes up a slot of time, by itself on its stream."""
    time = SLOT * slot
    kernel = "ncclDevKernel_SendRecv" if args["Collective name"] in ("send", "recv") else "ncclDevKernel_AllReduce"
    return [op("record_param_comms", time, 30, args=args), *launch(kernel, time + 10, slot + 1, takes=900, stream=20)]


def messages_of(execution: Execution) -> list[tuple[int, ...]]:
    met = [found for found in execution.rendezvous if found.collective in POINT_TO_POINT]
    return sorted((found.ranks[0], found.ranks[1], found.message.in_elements) for found in met if found.message)


def trace_of(folder: Path) -> Trace:
    trace = read_job(folder)
    assert isinstance(trace, Trace)
    return trace


@pytest.mark.parametrize("by_index", [False, True], ids=["ranks", "indices"])
@pytest.mark.parametrize(("outer", "inner"), list(permutations(PARALLELISMS, 2)))
def test_messages_of_two_parallelisms_meet_their_peers(tmp_path: Path, outer: str, inner: str, by_index: bool) -> None:
    for sizes in SIZES:
        mesh = Mesh(outer, inner, sizes)
        run = build(trace_of(mesh.write(tmp_path / f"{sizes}", by_index)))
        sent = [(link.sender, link.receiver, 1024 * (slot + 1)) for slot, link in enumerate(mesh.links * 2)]
        assert messages_of(run) == sorted(sent)
        assert not [text for text in run.warnings if "counterpart" in text]
        written = [t for transfers in plan_communication(run).transfers.values() for t in transfers if t.tag > 0]
        ends = Counter((t.source, t.destination, t.tag) for t in written)
        assert all(count == 2 and source != destination for (source, destination, _), count in ends.items())


@pytest.mark.parametrize("recorded_by_index", [False, True], ids=["ranks", "indices"])
@pytest.mark.parametrize("outer", ["tp", "dp", "pp"])
def test_converted_recordings_meet_their_peers(tmp_path: Path, outer: str, recorded_by_index: bool) -> None:
    mesh = Mesh(outer, "pp" if outer != "pp" else "dp", (2, 4))
    run = build(trace_of(mesh.write(tmp_path / "job", False)))
    files = convert_recording(run, tmp_path / "et", peers_by_index=recorded_by_index)
    ends = [sent[:2] for sent in messages_of(build(trace_of(files)))]
    assert ends == [sent[:2] for sent in messages_of(run)]


def test_execution_traces_name_peers_by_index(tmp_path: Path) -> None:
    group = (0, 2, 4)  # rank 4 receives from rank 2, whose index is 1
    write_trace(tmp_path / "rank4.json", [op("record_param_comms", 0, 30)], header(4, 6))
    trace = trace_of(tmp_path)
    announced = Message("recv", ranks=group, source=1)
    linked = Links({0: Operator("record_param_comms", 0, 0, ("",) * 3, ("",) * 3, (), (), announced)}, ())
    (message,) = linked.enrich(trace).messages
    assert message.source == 2


@pytest.mark.parametrize(("peer", "reads"), [(1, 4), (4, 4), (3, 12), (12, 12)])
def test_one_traced_rank_shows_its_convention(tmp_path: Path, peer: int, reads: int) -> None:
    args = collective("send", **_group((0, 4, 8, 12))) | {"Dst Rank": peer}
    write_trace(tmp_path / "rank0.json", _slot(0, args), header(0, 16))
    (message,) = trace_of(tmp_path).messages
    assert message.destination == reads


@pytest.mark.parametrize("otherwise", [False, True])
def test_the_convention_of_the_format_decides_where_both_readings_fit(otherwise: bool) -> None:
    whole_job = (0, 1, 2, 3)
    assert peers_are_indices([PeerCall(0, True, 1, whole_job)], otherwise) == otherwise
    assert peers_are_indices([], otherwise) == otherwise


def test_damaged_records_do_not_change_the_convention() -> None:
    group = (1, 3, 5, 7)
    good = [PeerCall(1, True, 3, group)] * 20 + [PeerCall(3, False, 1, group)] * 20
    damaged = [PeerCall(1, True, 99, group), PeerCall(3, False, 0, group)]
    assert not peers_are_indices(good + damaged, otherwise=True)


def test_a_rank_never_sends_to_itself(tmp_path: Path) -> None:
    for rank in range(2):
        args = collective("send", **_group((0, 1))) | {"Dst Rank": 0}
        write_trace(tmp_path / f"rank{rank}.json", _slot(0, args) + _slot(1, args), header(rank, 2))
    run = build(trace_of(tmp_path))
    assert messages_of(run) == []
    assert any("no counterpart" in text for text in run.warnings)


@pytest.mark.data
def test_a_real_tensor_and_pipeline_parallel_job_meets_its_peers(shared_data: Path) -> None:
    run = build(trace_of(shared_data / "h200/multirank/tp2_pp2_mb4"))
    ends = Counter((sender, receiver) for sender, receiver, _ in messages_of(run))
    assert ends == {(0, 2): 8, (2, 0): 8, (1, 3): 8, (3, 1): 8}
    assert not [text for text in run.warnings if "counterpart" in text]
