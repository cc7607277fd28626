"""One rank for all: the files of a job of which a single rank was recorded, in a dry run or a trace.

All ranks do what this one does, in groups that are laid out as its own: as many ranks, as far apart. A group whose
ranks are not equally far apart cannot be laid out for the others, and its collectives are plain work.
"""

from __future__ import annotations

from dataclasses import replace

from lumos.chakra.communication import plan_communication
from lumos.chakra.folded_ranks import Folder
from lumos.chakra.rank_files import Stages
from lumos.graph.rules.build import Execution
from lumos.program.rank_places import RankPlaces
from lumos.trace.trace import Message


def repeated_rank(execution: Execution, world: int) -> tuple[Stages, list[str]]:
    """The tasks of all ranks of a job, and what is to be said about them."""
    execution = replace(execution, trace=replace(execution.trace, messages=_as_sent(execution.trace.messages)))
    places, plan = RankPlaces(1, world, world), plan_communication(execution)
    rank = execution.trace.ranks[0]
    kinds = {name: _kind(places, rank, ranks) for (_, ranks), name in plan.groups.items()}
    for row, transfers in list(plan.transfers.items()):
        if any(not kinds.get(transfer.group, "") for transfer in transfers):
            plan.plain["their ranks are not equally far apart, so those of other ranks are not known"].add(row)
            del plan.transfers[row]
    tasks = [
        task
        if task.transfer is None
        else task._replace(transfer=task.transfer._replace(group=kinds[task.transfer.group]))
        for task in Folder(execution, plan).rank(rank)
    ]
    note = f"one rank was recorded: all {world:,} do what rank {rank} does, in groups laid out like its own"
    return Stages(places, (tuple(tasks),)), [note, *plan.warnings]


def _as_sent(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Messages whose inputs do not count an output that was also passed in."""
    found = []
    for message in messages:
        read, written, ranks = message.in_elements, message.out_elements, max(message.group_size, 1)
        if read in (written + written // ranks, written * (ranks + 1)) and ranks > 1:
            read -= written
        found.append(message._replace(in_elements=read))
    return tuple(found)


def _kind(places: RankPlaces, rank: int, ranks: tuple[int, ...]) -> str:
    """A group as SIZExSTRIDE; empty if its ranks are not equally far apart."""
    if len(ranks) < 2:
        return ""
    size, stride = len(ranks), ranks[1] - ranks[0]
    fits = stride > 0 and places.of_stage % (size * stride) == 0
    return f"{size}x{stride}" if fits and places.members(rank, size, stride) == tuple(sorted(ranks)) else ""
