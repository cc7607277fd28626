"""Networks: published collectives, what-ifs of clusters, and the same topologies in ASTRA-sim, as a page.

    python benchmarks/networks.py -o docs/networks.md [--astra-sim FOLDER]

FOLDER is the `bin` of a build of ASTRA-sim with its analytical backend (build/astra_analytical): its answers are then
computed again and kept in benchmarks/astra_sim.json, which the page is otherwise written from. Whole jobs in ASTRA-sim:
benchmarks/astra_sim.py.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lumos import predict, read_setup
from lumos.chakra.file_format import NodeType, add_value, delimited, schema
from lumos.costs.energy import in_step_factors
from lumos.costs.network import Fabric, Network, Tier, habits, network_of
from lumos.program.operators import Collective, Group
from lumos.setup import Setup, gpu_named, preset_named
from lumos.setup.constraints import checked_setup

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "calibration"))
import fit_collectives  # noqa: E402

KEPT = Path(__file__).with_name("astra_sim.json")
GIB = 2**30 / 1e9  # ASTRA-sim counts its GB in powers of two
COLLECTIVES = {"all_reduce": 0, "all_gather": 2, "all_to_all": 6}  # as Chakra numbers them
SIZES = {"all_reduce": 1 << 28, "all_gather": 1 << 28, "all_to_all": 1 << 26}
CHUNKS = (1, 4, 16)
NVLINK, ADAPTER, HOP_NS = 450.0, 50.0, 500.0


class Topology(NamedTuple):
    """GPUs of each tier, from the inside out, and what one GPU has of it in GB/s."""

    name: str
    counts: tuple[int, ...]
    gb_s: tuple[float, ...]

    @property
    def group(self) -> Group:
        held = [math.prod(self.counts[: i + 1]) for i in range(len(self.counts))]
        return Group(held[-1], held[0], tuple(held[1:-1]))


TOPOLOGIES = (
    Topology("64 GPUs in nodes of 8", (8, 8), (NVLINK, ADAPTER)),
    Topology("half the network between nodes", (8, 8), (NVLINK, ADAPTER / 2)),
    Topology("4 nodes under a leaf, no oversubscription", (8, 4, 2), (NVLINK, ADAPTER, ADAPTER)),
    Topology("4 nodes under a leaf, oversubscription 2", (8, 4, 2), (NVLINK, ADAPTER, ADAPTER / 2)),
    Topology("4 nodes under a leaf, oversubscription 8", (8, 4, 2), (NVLINK, ADAPTER, ADAPTER / 8)),
    Topology("1 node under a leaf, oversubscription 8", (8, 1, 8), (NVLINK, ADAPTER, ADAPTER / 8)),
    Topology("one NVLink domain of 64", (64,), (NVLINK,)),
    Topology("512 GPUs in nodes of 8", (8, 64), (NVLINK, ADAPTER)),
)


# ---------------------------------------------------------------------- ASTRA-sim
def astra_us(folder: Path, topology: Topology, kind: str, size: int) -> float:
    """One collective in ASTRA-sim's analytical backend, in microseconds: with the number of chunks that is best."""
    return min(_astra_us(folder, topology, kind, size, chunks) for chunks in CHUNKS)


def _astra_us(folder: Path, topology: Topology, kind: str, size: int, chunks: int) -> float:
    dims = [(n, gb_s) for n, gb_s in zip(topology.counts, topology.gb_s, strict=True) if n > 1]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        system = {
            "scheduling-policy": "LIFO",
            "endpoint-delay": 10,
            "active-chunks-per-dimension": 1,
            "preferred-dataset-splits": chunks,
            "collective-optimization": "localBWAware",
            "local-mem-bw": 3350,
            "boost-mode": 0,
        } | {f"{what}-implementation": ["ring"] * len(dims) for what in ("all-reduce", "all-gather", "reduce-scatter")}
        system["all-to-all-implementation"] = ["direct1"] * len(dims)
        (work / "system.json").write_text(json.dumps(system))
        (work / "memory.json").write_text('{"memory-type": "NO_MEMORY_EXPANSION"}')
        lines = {
            "topology": ["Switch"] * len(dims), "npus_count": [n for n, _ in dims],
            "bandwidth": [gb_s / GIB for _, gb_s in dims], "latency": [HOP_NS] * len(dims),
        }  # fmt: skip
        (work / "network.yml").write_text(
            "".join(f"{key}: {json.dumps(value).replace(chr(34), '')}\n" for key, value in lines.items())
        )
        ranks = topology.group.size
        for rank in range(ranks):
            _write_workload(work / f"run.{rank}.et", kind, size // ranks if kind == "all_gather" else size)
        files = (
            ("workload", "run"),
            ("system", "system.json"),
            ("remote-memory", "memory.json"),
            ("network", "network.yml"),
        )
        command = [str(folder / "AstraSim_Analytical_Congestion_Unaware")]
        command += [f"--{what}-configuration={work / file}" for what, file in files]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=work).stdout
    return max(int(ns) for ns in re.findall(r"Wall time: (\d+)", printed)) / 1e3


def _write_workload(path: Path, kind: str, size: int) -> None:
    """A rank that runs one collective."""
    known = schema()
    head, node = known.metadata(), known.node()
    head.version = "0.0.4"
    node.id, node.name, node.type = 0, kind, NodeType.COMM_COLL
    add_value(node.attr, "is_cpu_op", "bool_val", False)
    add_value(node.attr, "comm_type", "int64_val", COLLECTIVES[kind])
    add_value(node.attr, "comm_size", "int64_val", size)
    with path.open("wb") as file:
        file.write(delimited(head))
        file.write(delimited(node))


def astra_answers(folder: Path | None) -> dict[str, Any]:
    """Microseconds by topology and kind: computed now, or as kept."""
    if folder is not None:
        found = {
            topology.name: {kind: astra_us(folder, topology, kind, size) for kind, size in SIZES.items()}
            for topology in TOPOLOGIES
        }
        kept = json.loads(KEPT.read_text()) | {"collectives": found}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    collectives: dict[str, Any] = json.loads(KEPT.read_text())["collectives"]
    return collectives


# ---------------------------------------------------------------------- Lumos on the same topology
def lumos_us(topology: Topology, kind: str, ideal: bool) -> float:
    """The same collective here: as NCCL runs it, or over links that give all they have, as ASTRA-sim's do."""
    usual = network_of(gpu_named("h100"), "infiniband", in_step_factors(gpu_named("h100")))
    tiers = tuple(Tier(gb_s * 1e3) for gb_s in topology.gb_s)
    network = ideal_network(topology.gb_s) if ideal else replace(usual, tiers=tiers, penalty=1.0)
    return network.us(Collective(kind, float(SIZES[kind]), topology.group))


def ideal_network(gb_s: Sequence[float], hop_ns: Sequence[float] = (HOP_NS,)) -> Network:
    """Links that give all they have, as those of ASTRA-sim do: bandwidth of one GPU and time of a hop in every tier."""
    simple = habits().protocols[-1] | dict.fromkeys(("base_us",), 0.0)
    step, far = 2 * hop_ns[0] / 1e3, 2 * hop_ns[-1] / 1e3
    simple |= {"ring_us": step, "tree_us": step, "ring_far_us": far, "tree_far_us": far}
    full = replace(
        habits(), protocols=(simple,), inside_share=1.0, gather_share=1.0, exchange_share=1.0, overhead_us=0.0,
        send_us=step, send_far_us=far, peer_us=0.0, peer_far_us=0.0, peer_gb_s=math.inf, fill_inside=0.0,
        fill_between=0.0, fill_exchange=0.0,
    )  # fmt: skip
    return Network(tuple(Tier(one * 1e3) for one in gb_s), Fabric(trees=False, relay_us=far), habits=full)


def astra_section(answers: Mapping[str, Any]) -> Iterator[str]:
    head = (
        "topology",
        "collective",
        "ASTRA-sim ms",
        "ideal links ms",
        "Lumos ms",
        "effect: ASTRA-sim",
        "ideal",
        "Lumos",
    )
    yield "| " + " | ".join(head) + " |"
    yield "|---|---|---|---|---|---|---|---|"
    for kind, size in SIZES.items():
        base: list[float] = []
        for topology in TOPOLOGIES:
            ms = [answers[topology.name][kind] / 1e3]
            ms += [lumos_us(topology, kind, ideal) / 1e3 for ideal in (True, False)]
            base = base or ms
            effects = [f"{value / first:.2f} x" for value, first in zip(ms, base, strict=True)]
            name = f"{kind.replace('_', '-')} of {size >> 20} MiB"
            yield f"| {topology.name} | {name} | " + " | ".join([*(f"{value:.2f}" for value in ms), *effects]) + " |"


# ---------------------------------------------------------------------- what-ifs of whole runs
def runs() -> dict[str, Setup]:
    """A dense pipeline, a sharded run, replicas and a mixture of experts, all on H100."""

    def described(preset: str, gpus: int, train: dict[str, Any], parallel: dict[str, Any]) -> Setup:
        cluster, model = {"gpu": "h100", "gpus": gpus}, dict(preset_named(preset).keys)
        return checked_setup({"model": model, "train": train, "parallel": parallel, "cluster": cluster})

    short, replicas = {"seq": 4096, "global_batch": 512}, {"tp": 2, "zero": 0}
    return {
        "llama3-70b, pipeline, 512 GPUs": read_setup(ROOT / "examples/llama3-70b.toml"),
        "llama3-8b, FSDP, 512": described("llama3-8b", 512, short | {"framework": "torchtitan"}, {"zero": 3}),
        "llama3-8b, 256 replicas, 512": described("llama3-8b", 512, short | {"framework": "megatron"}, replicas),
        "deepseek-v3, 64 expert ranks, 1024": described(
            "deepseek-v3", 1024, {"seq": 4096, "global_batch": 2048, "recompute": "full", "framework": "megatron"},
            {"pp": 16, "ep": 64, "zero": 1},
        ),
    }  # fmt: skip


LEAVES = {"cluster.leaf_gpus": 32, "cluster.oversubscription": 4.0}
WHAT_IFS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as it is", {}),
    ("`cluster.oversubscription=2`", {"cluster.oversubscription": 2.0}),
    ("half the adapters: `cluster.inter_gb_s=25`", {"cluster.inter_gb_s": 25.0}),
    ("`cluster.leaf_gpus=32`, `cluster.oversubscription=4`", LEAVES),
    ("the same with `cluster.rail_aligned=true`", LEAVES | {"cluster.rail_aligned": True}),
    ("the same leaves, `parallel.order=tp-cp-pp-dp`", LEAVES | {"parallel.order": "tp-cp-pp-dp"}),
    ("`parallel.order=tp-cp-pp-dp`", {"parallel.order": "tp-cp-pp-dp"}),
    ("`cluster.nvlink_domain=72`", {"cluster.nvlink_domain": 72}),
    ("`cluster.sharp=true`", {"cluster.sharp": True}),
    ("`cluster.nvls=false`", {"cluster.nvls": False}),
    ("`cluster.fabric=roce`", {"cluster.fabric": "roce"}),
    ("`cluster.fabric=efa`", {"cluster.fabric": "efa"}),
    ("`cluster.fabric=tcpxo`, 25 GB/s a GPU", {"cluster.fabric": "tcpxo"}),
    ("`cluster.fabric=sockets`", {"cluster.fabric": "sockets"}),
)


def what_if_section() -> Iterator[str]:
    setups = runs()
    yield "| change | " + " | ".join(f"{name}, s" for name in setups) + " |"
    yield "|---|" + "---|" * len(setups)
    base: list[float] = []
    for name, changes in WHAT_IFS:
        seconds = [predict(setup.replaced(changes)).step_ms / 1e3 for setup in setups.values()]
        base = base or seconds
        cells = [f"{s:.3g} ({100 * (s / b - 1):+.1f} %)" for s, b in zip(seconds, base, strict=True)]
        yield f"| {name} | " + " | ".join(cells) + " |"


# ---------------------------------------------------------------------- the page
def collectives_section() -> Iterator[str]:
    model = fit_collectives.Model({})
    chosen = [row for row in fit_collectives.rows() if row.collective.bytes >= fit_collectives.SMALLEST]
    tables = defaultdict(list)
    for row in chosen:
        tables[not row.is_fitted, *row.table].append((row, model.error(row)))
    yield "| used to | source | network | collective | ranks, in a domain | sizes | mean error % | bias % |"
    yield "|---|---|---|---|---|---|---|---|"
    for (held, source, kind, group), found in sorted(tables.items(), key=lambda item: item[0]):
        errors = [error for _, error in found]
        mean, bias = (100 * math.expm1(sum(v) / len(v)) for v in ([abs(e) for e in errors], errors))
        where = found[0][0].fabric if group.nodes > 1 else "one domain"
        cells = ("check" if held else "fit", source, where, kind.replace("_", "-"))
        yield "| " + " | ".join(cells) + f" | {group.size}, {group.inside} | {len(errors)} | {mean:.0f} | {bias:+.0f} |"
    held = [row for row in chosen if not row.is_fitted]
    parts = (
        [row for row in chosen if row.is_fitted],
        held,
        [row for row in held if row.source != "perlmutter"],
        [row for row in held if row.source == "perlmutter" and row.collective.group.nodes > 1],
        [row for row in held if row.source == "perlmutter" and row.collective.group.nodes == 1],
    )
    means = [100 * math.expm1(fit_collectives.mean_error(model, part)) for part in parts]
    yield (
        "\nMean over tables: {:.0f} % on those fitted, {:.0f} % on all held apart: **{:.0f} %** on RDMA networks and "
        "their nodes, {:.0f} % on the sockets of Perlmutter, and {:.0f} % on gathers inside its boards.".format(*means)
    )


def page(answers: Mapping[str, Any]) -> str:
    text = Path(__file__).with_name("networks_page.txt").read_text()
    parts = {"COLLECTIVES": collectives_section(), "WHAT_IFS": what_if_section(), "ASTRA_SIM": astra_section(answers)}
    for name, lines in parts.items():
        text = text.replace("{" + name + "}", "\n".join(lines))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--astra-sim", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    written = page(astra_answers(options.astra_sim))
    if options.output:
        options.output.write_text(written)
    else:
        print(written)


if __name__ == "__main__":
    main()
