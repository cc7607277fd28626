"""The files that ASTRA-sim needs beside a workload: its system, its network, its memory, and how to start it.

The network has a dimension for every tier of the cluster: an NVLink domain, a leaf, the spine. Bandwidth and latency of
each are those that the model of the network gives an all-gather there, so that both simulators know the same network;
of a traced job, they are what its own transfers reached. ASTRA-sim counts a GB as 2^30 bytes, and passes a switch in
two hops.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lumos.analysis.collectives import bus_factor, message_bytes
from lumos.chakra.rank_files import group_file_of
from lumos.costs.network import Network
from lumos.costs.sampled_network import SampledNetwork
from lumos.files import whole_file
from lumos.graph.rules.build import Execution
from lumos.graph.rules.rendezvous import POINT_TO_POINT
from lumos.program.layout import RankLayout
from lumos.program.operators import Collective, Group

_GIB = float(1 << 30)
_LARGE, _SMALL = float(1 << 28), 8192.0  # bytes of gathers that show bandwidth and latency
_LARGE_ENOUGH = 1 << 20  # of a recorded transfer, to show bandwidth
_LEAST_GB_S, _USUAL_GB_S, _USUAL_NS = 1e-3, 100.0, 500.0
_HOPS = 4  # of every step of a ring: the receiver's word that it is there, and the message, each through a switch
_FREE_GB_S = 1_000_000  # it adds every reduction to its message, from this bandwidth; NCCL reduces while data arrive
LONGEST_MESSAGE = (1 << 31) - 1  # bytes, if its sender waits: it has 32 bits for them; half a tensor, at most
_CHUNKS = 4  # that a collective of all ranks is cut into, so that dimensions work at the same time
# Its sibling with congestion stores every message at a switch and sends it on from there, which takes twice as long.
_PROGRAM = "AstraSim_Analytical_Congestion_Unaware"  # the other knows networks of one dimension alone


Groups = Mapping[str, Sequence[int]]  # members by number


class Dimension(NamedTuple):
    """Ranks that are joined at one level: how many, what one of them sends in GB/s, and the time of one hop."""

    ranks: int
    gb_s: float
    latency_ns: float


class AstraFiles(NamedTuple):
    """What was written, and the command that runs it."""

    files: list[Path]
    command: str


def described_network(layout: RankLayout, network: Network | SampledNetwork, parted: bool) -> list[Dimension]:
    """The tiers of a described cluster. With `parted`, at least two where that is possible (see `parted_network`)."""
    world, units = layout.setup.cluster.gpus, (layout.domain, *layout.units)
    bounds = [1]
    for unit in (*units, world):
        if bounds[-1] < unit <= world and unit % bounds[-1] == 0 and world % unit == 0:
            bounds.append(unit)
    if bounds[-1] != world:
        bounds = [1, world]
    found = []
    for stride, above in pairwise(bounds):
        size = above // stride
        inside, *rest = (max(1, min(size, unit // stride)) for unit in units)
        found.append(_dimension(network, Group(size, inside, tuple(rest), stride)))
    return parted_network(found) if parted else found


def _dimension(network: Network | SampledNetwork, group: Group) -> Dimension:
    moved = (group.size - 1) / group.size
    small = max(network.us(Collective("all_gather", _SMALL, group)), 0.01)
    large = max(network.us(Collective("all_gather", _LARGE, group)) - small, 1e-3)
    return Dimension(group.size, moved * _LARGE / large / 1e3, 1e3 * small / (_HOPS * (group.size - 1)))


def traced_network(execution: Execution, parted: bool, world: int = 0) -> list[Dimension]:
    """One level that joins all ranks, as fast as the transfers of the run were on average."""
    moved = time = 0.0
    shortest = float("inf")
    for kind, ranks, size, ns in _transfers(execution):
        if size > 0 and ns > 0:
            shortest = min(shortest, ns)
            if size >= _LARGE_ENOUGH:
                moved += bus_factor(kind, ranks) * size
                time += ns
    gb_s = max(moved / time, _LEAST_GB_S) if time else _USUAL_GB_S
    latency = min(shortest / 4, _USUAL_NS) if shortest < float("inf") else _USUAL_NS
    one = [Dimension(world or len(execution.trace.ranks), gb_s, latency)]
    return parted_network(one) if parted else one


def shows_bandwidth(execution: Execution) -> bool:
    """Whether a run has transfers that are large enough to tell how fast its network was."""
    return any(size >= _LARGE_ENOUGH and ns > 0 for _, _, size, ns in _transfers(execution))


def _transfers(execution: Execution) -> Iterator[tuple[str, int, int, float]]:
    """Kind, ranks, bytes and time of every transfer; of a single rank, as it saw them."""
    trace, last, duration = execution.trace, execution.nodes.last_node, execution.graph.duration
    for found in execution.rendezvous:
        kind = "send" if found.collective in POINT_TO_POINT else found.collective
        # Waiting is left out of durations; the shortest has the least of what is left of it.
        yield kind, len(found.rows), message_bytes(found.message), float(np.min(duration[last[found.rows]]))
    for row in np.flatnonzero(trace.is_communication & (trace.message >= 0)) if not execution.rendezvous else ():
        message = trace.messages[trace.message[row]]
        yield message.collective, message.group_size, message_bytes(message), float(duration[last[row]])


def parted_network(dimensions: list[Dimension]) -> list[Dimension]:
    """One level as two with the same links, if it can be halved.

    ASTRA-sim aborts at its end, with all results printed, where ranks of a network of one dimension are in several
    groups that are not the whole world: it frees the implementation of a collective once for each.
    """
    if len(dimensions) > 1:
        return dimensions
    one = dimensions[0]
    inner = next((n for n in range(int(one.ranks**0.5), 1, -1) if one.ranks % n == 0), 0)
    if not inner:
        return dimensions
    return [one._replace(ranks=one.ranks // inner), one._replace(ranks=inner)]


def needs_parting(groups: Groups, world: int) -> bool:
    """Whether a rank is in several groups that are not the whole world."""
    seen: set[int] = set()
    for members in groups.values():
        if 1 < len(members) < world:
            if not seen.isdisjoint(members):
                return True
            seen.update(members)
    return False


def write_astra_files(path: Path, dimensions: list[Dimension], groups: Groups, largest: int = 0) -> AstraFiles:
    """Write them beside `path`, NAME.et, as NAME.system.json and so on: all of them or none.

    `largest` is the size of the largest tensor of a collective, in bytes.
    """
    name = path.name.removesuffix(".et")
    contents = {
        "system.json": json.dumps(_system(dimensions, groups, largest), indent=1) + "\n",
        "network.yml": _network_text(dimensions),
        "memory.json": json.dumps({"memory-type": "NO_MEMORY_EXPANSION"}) + "\n",
    }
    command = _command(name, group_file_of(path).name if groups else "")
    contents["run.sh"] = (
        "#!/bin/sh\n# Runs ASTRA-sim on these files; name its program in ASTRA_SIM if it is not on the PATH.\n"
        f'cd "$(dirname "$0")" && exec {command}\n'
    )
    files = [path.with_name(f"{name}.{ending}") for ending in contents]
    with ExitStack() as stack:
        for file, text in zip(files, contents.values(), strict=True):
            stack.enter_context(whole_file(file, follow=False)).write(text.encode())
    files[-1].chmod(0o755)
    return AstraFiles(files, f"sh {shlex.quote(str(files[-1]))}")


def read_network(rank_file: Path) -> list[Dimension] | None:
    """The links in the NAME.network.yml next to NAME.RANK.et; None if there is none that can be read."""
    import yaml  # here, because few runs have such a file and a cold start counts

    path = rank_file.with_name(rank_file.name.rsplit(".", 2)[0] + ".network.yml")
    try:
        values = yaml.safe_load(path.read_text())
        columns = zip(values["npus_count"], values["bandwidth"], values["latency"], strict=True)
        found = [Dimension(int(ranks), float(gib) * _GIB / 1e9, float(ns)) for ranks, gib, ns in columns]
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError, yaml.YAMLError):
        return None
    return found if all(one.ranks > 0 and one.gb_s > 0 and one.latency_ns >= 0 for one in found) else None


def _system(dimensions: list[Dimension], groups: Groups, largest: int) -> dict[str, object]:
    """Rings, and exchanges with one peer after the other: `direct` alone gives each the whole bandwidth at once.

    Chunks let dimensions work at the same time, which those that stand for one level must not. A group of some ranks
    is one ring whatever the dimensions, and would only pay the latency of every chunk; but it waits for ever for
    messages that are too long.
    """
    ring = ["ring"] * len(dimensions)
    return {
        "scheduling-policy": "FIFO",
        "endpoint-delay": 10,
        "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": dataset_splits(dimensions, groups, largest),
        "all-reduce-implementation": ring,
        "all-gather-implementation": ring,
        "reduce-scatter-implementation": ring,
        "all-to-all-implementation": ["direct1"] * len(dimensions),
        "collective-optimization": "localBWAware",
        "local-mem-bw": _FREE_GB_S,
        "boost-mode": 0,
        "trace-enabled": 1,  # its log then has every node, for `lumos compare`
    }


def dataset_splits(dimensions: Sequence[Dimension], groups: Groups, largest: int) -> int:
    """How many chunks a collective is cut into."""
    world = prod(one.ranks for one in dimensions)
    has_parts = any(1 < len(members) < world for members in groups.values())  # some are not of all ranks
    is_one_level = has_parts or len({one.gb_s for one in dimensions}) == 1
    return max(1 if is_one_level else _CHUNKS, -(-largest // (2 * LONGEST_MESSAGE)))


def _network_text(dimensions: list[Dimension]) -> str:
    """YAML with one list a key; bandwidth in 2^30 bytes per second, latency in nanoseconds."""
    lines: dict[str, list[object]] = {
        "topology": ["Switch"] * len(dimensions),
        "npus_count": [one.ranks for one in dimensions],
        "bandwidth": [round(one.gb_s * 1e9 / _GIB, 3) for one in dimensions],
        "latency": [round(one.latency_ns, 1) for one in dimensions],
    }
    return "".join(f"{key}: [ {', '.join(map(str, values))} ]\n" for key, values in lines.items())


def _command(name: str, group_file: str) -> str:
    """Seen from the folder of the files."""
    parts = {
        "workload": name,
        "system": f"{name}.system.json",
        "remote-memory": f"{name}.memory.json",
        "network": f"{name}.network.yml",
    } | ({"comm-group": group_file} if group_file else {})
    given = " ".join(f"--{what}-configuration={shlex.quote('./' + file)}" for what, file in parts.items())
    # As NCCL does, a sender waits for its receiver.
    return f'"${{ASTRA_SIM:-{_PROGRAM}}}" {given} --rendezvous-protocol=true'
