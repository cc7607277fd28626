"""The same jobs in Lumos and in ASTRA-sim: recorded ones and described ones, exported by `lumos convert`, as a page.

    python benchmarks/astra_sim.py -o docs/astra_sim.md [--bin FOLDER] [--data ../shared/data]

Without `--bin`, the page is written from the results in benchmarks/astra_sim.json. `--bin` names the folder with the
programs of ASTRA-sim's analytical backend, built by ASTRA-sim's own instructions; every job is then exported and run
again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from chakra_runs import ChakraRun, Transfer
from lumos import predict, read_setup
from lumos.chakra.astra_costs import as_ring, links_apart, transfer_ns
from lumos.chakra.astra_files import Dimension
from lumos.chakra.astra_log import AstraSimLog, read_astra_sim_log
from lumos.chakra.communication import plan_communication
from lumos.chakra.file_format import COLLECTIVES, NodeType
from lumos.chakra.run_writer import write_chakra
from lumos.chakra.tasks import CommNode
from lumos.errors import LumosError
from lumos.graph.graph import Edges, Floats, Graph, Rule, simulate
from lumos.graph.rules.build import Execution
from lumos.graph.rules.build import build as build_graph
from lumos.program.operators import Collective, Group
from lumos.read.execution_trace import link as link_traces
from lumos.read.execution_trace import read_execution_trace
from lumos.read.job import read_job
from networks import GIB, ideal_network

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(__file__).with_name("astra_sim.json")
PAGE = Path(__file__).with_name("astra_sim_page.txt")
PROGRAM = "AstraSim_Analytical_Congestion_Unaware"
STEADY = 3.0  # the 90th percentile of the bandwidth that transfers reached, over the 10th, by bytes
JOBS = (
    "ddp2_l8", "ddp2_l16", "fsdp2_l8", "tp2_l8", "pp2_mb4", "pp4_mb8", "dp2_tp2_l8",
)  # fmt: skip
NEWEST = "ip-172-31-16-248.us-east-2.compute.internal_26*.16989556294*.pt.trace.json.gz"  # of two captures of one job
PUBLIC = {
    "megatron_tp8_a100": ("megatron_tp8_a100/kineto", ("--et", "megatron_tp8_a100/et")),
    "sglang_decode_b200": ("sglang_decode_b200", ()),
    "torchrec_v100 resnet18": ("torchrec_v100/resnet18", ()),
    "torchrec_v100 optimizer_2": ("torchrec_v100/sst_long_a2a_optimizer_2", ("--match", NEWEST)),
    "torchrec_v100 optimizer_3": ("torchrec_v100/sst_long_a2a_optimizer_3", ()),
    "torchrec_v100 optimizer_4": ("torchrec_v100/sst_long_a2a_optimizer_4", ()),
    "torchrec_v100 sleep": ("torchrec_v100/sst_sleep_pl_dense_after_backward_2", ()),
}
MODEL = '[model]\npreset = "{}"\nlayers = {}\n'
TRAIN = '[train]\nseq = 4096\nmicro_batch = 1\nglobal_batch = {}\nframework = "{}"\n'
CLUSTER = '[cluster]\ngpu = "h100"\ngpus = {}\n'
SETUPS = {
    "DDP, Llama 3 8B of 8 layers, 8 GPUs": (
        MODEL.format("llama3-8b", 8) + TRAIN.format(16, "pytorch") + "[parallel]\nzero = 0\n" + CLUSTER.format(8)
    ),
    "FSDP, Llama 3 8B, 16 GPUs": (
        MODEL.format("llama3-8b", 32) + TRAIN.format(32, "torchtitan") + "[parallel]\nzero = 3\n" + CLUSTER.format(16)
    ),
    "TP 4 × PP 2 × DP 2, Llama 3 8B, 16 GPUs": (
        MODEL.format("llama3-8b", 32) + TRAIN.format(32, "megatron")
        + "[parallel]\ntp = 4\npp = 2\nzero = 0\nsequence_parallel = true\n" + CLUSTER.format(16)
    ),
    "TP 8 × PP 4, Llama 3 70B of 16 layers, 32 GPUs": (
        MODEL.format("llama3-70b", 16) + TRAIN.format(16, "megatron")
        + "[parallel]\ntp = 8\npp = 4\nzero = 0\nsequence_parallel = true\n" + CLUSTER.format(32)
    ),
    "MoE with EP 8, Mixtral 8x7B of 8 layers, 8 GPUs": (
        MODEL.format("mixtral-8x7b", 8) + TRAIN.format(16, "megatron")
        + "[parallel]\nep = 8\nzero = 0\n" + CLUSTER.format(8)
    ),
    "TP 8 × DP 4, Llama 3 8B of 16 layers, 32 GPUs": (
        MODEL.format("llama3-8b", 16) + TRAIN.format(32, "megatron")
        + "[parallel]\ntp = 8\nzero = 1\nsequence_parallel = true\n" + CLUSTER.format(32)
    ),
    "MoE with EP 8 × DP 4, Mixtral 8x7B of 8 layers, 32 GPUs": (
        MODEL.format("mixtral-8x7b", 8) + TRAIN.format(32, "megatron")
        + "[parallel]\nep = 8\nzero = 0\n" + CLUSTER.format(32)
    ),
    "MoE with EP 16 × DP 2, Qwen3 30B-A3B of 12 layers, 32 GPUs": (
        MODEL.format("qwen3-30b-a3b", 12) + TRAIN.format(32, "megatron")
        + "[parallel]\nep = 16\nzero = 0\n" + CLUSTER.format(32)
    ),
}  # fmt: skip


# ---------------------------------------------------------------------- ASTRA-sim
@dataclass(frozen=True)
class Exported:
    """A job as `lumos convert --for astra-sim` wrote it into a folder, as job.et."""

    folder: Path

    @staticmethod
    def of(what: Path, folder: Path, *options: str) -> Exported:
        command = [sys.executable, "-m", "lumos.cli.main", "convert", str(what), "-o", str(folder / "job.et")]
        done = subprocess.run([*command, "--for", "astra-sim", *options], capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(done.stderr)
        return Exported(folder)

    def run(self, programs: Path, factor: float = 1.0, eager: bool = False, workload: str = "./job") -> AstraSimLog:
        """What ASTRA-sim makes of it, unchanged; or with faster links, senders that do not wait, another workload."""
        script = (self.folder / "job.run.sh").read_text()
        if eager:
            script = script.replace("--rendezvous-protocol=true", "")
        if factor != 1.0:
            values = self.links
            values["bandwidth"] = [factor * one for one in values["bandwidth"]]
            (self.folder / "other.yml").write_text(yaml.safe_dump(values, default_flow_style=None))
            script = script.replace("./job.network.yml", "./other.yml")
        script = script.replace("-configuration=./job ", f"-configuration={workload} ")
        (self.folder / "this.sh").write_text(script)
        for old in (self.folder / "log").glob("*.log"):
            old.unlink()
        environment = os.environ | {"ASTRA_SIM": str(programs / PROGRAM)}
        subprocess.run(["sh", str(self.folder / "this.sh")], capture_output=True, env=environment)
        return read_astra_sim_log(self.folder / "log")

    @property
    def links(self) -> dict[str, Any]:
        values: dict[str, Any] = yaml.safe_load((self.folder / "job.network.yml").read_text())
        return values

    @property
    def gb_s(self) -> list[float]:
        """Of every dimension, in units of 10⁹; ASTRA-sim's are of 2³⁰."""
        return [GIB * one for one in self.links["bandwidth"]]

    @property
    def files(self) -> ChakraRun:
        return ChakraRun.read(self.folder / "job.et")


def _ms(log: AstraSimLog) -> float:
    return log.step_ns / 1e6


def _astra_times(files: ChakraRun, log: AstraSimLog) -> dict[Transfer, float]:
    """How long every transfer took in ASTRA-sim once all its ranks were there: the shortest over its ranks, ns."""
    took = {(node.rank, node.id): node.end_ns - node.start_ns for node in log.nodes}
    return {transfer: float(min(took[place] for place in transfer.nodes)) for transfer in files.transfers}


# ---------------------------------------------------------------------- recorded jobs
class Link(NamedTuple):
    """What a network file of one level states."""

    gb_s: float
    latency_ns: float


@dataclass(frozen=True)
class Job:
    """A recorded job, and its transfers by the node of the graph: each with the number of its ranks."""

    execution: Execution
    transfers: dict[int, list[tuple[CommNode, int]]]

    @staticmethod
    def of(execution: Execution) -> Job:
        plan = plan_communication(execution, closed=True)
        sizes = {number: len(ranks) for (_, ranks), number in plan.groups.items()}
        last = execution.nodes.last_node
        return Job(
            execution,
            {int(last[row]): [(t, sizes.get(t.group, 2)) for t in found] for row, found in plan.transfers.items()},
        )

    def moved(self, node: int) -> float:
        """The bytes that one rank sends one after the other."""
        return max(transfer_ns(t, ranks, 1.0, 0.0, handshake=0) for t, ranks in self.transfers[node])

    def rates(self) -> tuple[float, float]:
        """The bandwidth that a tenth of the bytes stayed below, and that a tenth exceeded, in GB/s."""
        duration = self.execution.graph.duration
        sizes = {node: self.moved(node) for node in self.transfers}
        pairs = sorted((size / duration[n], size) for n, size in sizes.items() if duration[n] > 0 and size > 0)
        share = np.cumsum([size for _, size in pairs]) / sum(size for _, size in pairs)
        low, high = (float(pairs[int(np.searchsorted(share, at))][0]) for at in (0.1, 0.9))
        return low, high

    def at(self, link: Link) -> Floats:
        """Durations of all nodes with transfers over such links."""
        duration = self.execution.graph.duration.copy()
        for node, found in self.transfers.items():
            duration[node] = max(transfer_ns(t, ranks, *link, float(duration[node])) for t, ranks in found)
        return duration

    def ms(self, link: Link, graph: Graph | None = None) -> float:
        return simulate(graph or self.execution.graph, self.at(link)).span / 1e6

    def one_at_a_time(self, link: Link) -> Graph:
        """The graph in which every rank does one collective or send at a time, in the order in which they meet."""
        graph, nodes = self.execution.graph, self.execution.nodes
        start = simulate(graph, self.at(link)).start
        source, target, last = [], [], dict[int, int]()
        for node in sorted(self.transfers, key=lambda node: (start[node], node)):
            rank = int(nodes.rank[node])
            if rank in last:
                source.append(last[rank])
                target.append(node - 1)
            last[rank] = node
        edges = Edges.join([graph.edges, Edges.of(source, target, Rule.CHANNEL)])
        return replace(graph, edges=edges.select(np.argsort(edges.target, kind="stable")))

    def bare(self, turns: bool) -> Graph:
        """What a Chakra file can say of the graph: no gaps, no lags, and no turns of ranks that share a GPU."""
        graph = self.execution.graph
        edges = graph.edges if turns else graph.edges.select(graph.edges.rule != Rule.SHARED_GPU)
        none = np.zeros(len(graph))
        bare = replace(edges, lag=np.zeros(len(edges)), frozen=np.zeros(len(edges)))
        return replace(graph, edges=bare, gap=none, frozen=none)


def recorded_job(name: str, path: Path, options: tuple[str, ...], programs: Path) -> dict[str, Any]:
    """One recorded job in both simulators."""
    given = dict(zip(options[::2], options[1::2], strict=True))
    source = read_job(path, given.get("--match", ""))
    if "--et" in given and not isinstance(source, Execution):
        files = {rank: next(Path(given["--et"]).glob(f"rank{rank}.*")) for rank in source.ranks}
        source = link_traces(source, {rank: read_execution_trace(file) for rank, file in files.items()}).enrich(source)
    job = Job.of(source if isinstance(source, Execution) else build_graph(source))
    found: dict[str, Any] = {"name": name, "ranks": len(job.execution.trace.ranks), "transfers": len(job.transfers)}
    found["recorded_ms"] = simulate(job.execution.graph).span / 1e6
    with tempfile.TemporaryDirectory() as folder:
        exported = Exported.of(path, Path(folder), *options)
        log = exported.run(programs)
        found |= {"astra_ms": _ms(log), "statistics": all(r.compute_ns is not None for r in log.ranks.values())}
        if not job.transfers:
            return found | {"ours_ms": found["recorded_ms"]}
        link = Link(exported.gb_s[0], float(exported.links["latency"][0]))
        found |= {"gb_s": link.gb_s, "rates": job.rates(), "ours_ms": job.ms(link)}
        found["eager_ms"] = _ms(exported.run(programs, eager=True))
        found["one_at_a_time_ms"] = job.ms(link, job.one_at_a_time(link))
        found["others"] = [
            [factor, job.ms(link._replace(gb_s=factor * link.gb_s)), _ms(exported.run(programs, factor))]
            for factor in (0.5, 0.8, 1.25, 2.0)
        ]
        found["bare"] = [job.ms(link, job.bare(turns)) for turns in (True, False)]
        found["whole_graph_ms"] = _whole_graph_ms(job, exported, programs)
    return found


def _whole_graph_ms(job: Job, exported: Exported, programs: Path) -> float | None:
    """All nodes of the graph as they are, host included, in ASTRA-sim."""
    write_chakra(exported.folder / "whole.et", job.execution)
    try:
        return _ms(exported.run(programs, workload="./whole"))
    except LumosError:
        return None


# ---------------------------------------------------------------------- described runs
def described_run(name: str, text: str, programs: Path) -> dict[str, Any]:
    """One described run in both simulators."""
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        setup = folder / "setup.toml"
        setup.write_text(text)
        exported = Exported.of(setup, folder)
        log, files = exported.run(programs), exported.files
        took, gb_s, latency = _astra_times(files, log), exported.gb_s, exported.links["latency"]
        links = [Dimension(*one) for one in zip(exported.links["npus_count"], gb_s, latency, strict=True)]
        network = ideal_network(gb_s, latency)

        def ideal_ns(transfer: Transfer) -> float:
            return 1e3 * network.us(_collective(transfer, links))

        return {
            "name": name, "setup": text, "ranks": len(log.ranks), "transfers": len(files.transfers),
            "predicted_ms": predict(read_setup(setup)).step_ms,
            "files_ms": files.ms(lambda transfer: transfer.recorded_ns),
            "gb_s": gb_s, "astra_ms": _ms(log), "ideal_ms": files.ms(ideal_ns),
            "lent_ms": files.ms(took.__getitem__), "lent_one_at_a_time_ms": files.ms(took.__getitem__, True),
            "by_kind": _by_kind(files, took, ideal_ns),
        }  # fmt: skip


def _collective(transfer: Transfer, links: list[Dimension]) -> Collective:
    """A transfer as our network takes it: the whole tensor, and how many of its ranks share each tier."""
    size, held = len(transfer.ranks), []
    for tier in range(len(links)):
        unit = int(np.prod([link.ranks for link in links[: tier + 1]]))
        held.append(max(np.bincount(np.array(transfer.ranks) // unit)))
    group, moved = Group(size, int(held[0]), tuple(int(one) for one in held[1:-1])), float(transfer.bytes)
    is_part = len(links) > 1 and size < np.prod([link.ranks for link in links])
    if transfer.kind == "all_to_all" and is_part and size > 2:
        told = CommNode(NodeType.COMM_COLL, 1 << 30, COLLECTIVES["all_to_all"])
        told = as_ring(told, size, transfer.ranks[1] - transfer.ranks[0], links)
        return Collective(transfer.kind, moved * (1 << 30) / told.bytes, group)
    if is_part:  # what ASTRA-sim is told is more than what is sent
        moved /= links_apart(transfer.ranks, links)
    return Collective(transfer.kind, moved * (size if transfer.kind == "all_gather" else 1), group)


def _by_kind(files: ChakraRun, took: dict[Transfer, float], ideal_ns: Any) -> list[list[Any]]:
    """Kind, ranks, how many, and their milliseconds over ideal links here and in ASTRA-sim."""
    found: dict[tuple[str, int], list[float]] = {}
    for transfer in files.transfers:
        row = found.setdefault((transfer.kind, len(transfer.ranks)), [0, 0.0, 0.0])
        row[:] = [row[0] + 1, row[1] + ideal_ns(transfer) / 1e6, row[2] + took[transfer] / 1e6]
    return [[*key, *row] for key, row in found.items()]


# ---------------------------------------------------------------------- the page
def recorded_section(jobs: list[dict[str, Any]]) -> Iterator[str]:
    head = ("job", "ranks", "transfers", "GB/s (10–90 % of bytes)", "recorded", "Lumos", "ASTRA-sim", "difference")
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for job in jobs:
        low, high = job.get("rates", (0.0, 0.0))
        rates = f"{job['gb_s']:.2f} ({low:.2f}–{high:.2f})" if "gb_s" in job else "sizes not recorded"
        times = [f"{job[key]:.2f}" for key in ("recorded_ms", "ours_ms", "astra_ms")]
        cells = [
            job["name"],
            str(job["ranks"]),
            str(job["transfers"]),
            rates,
            *times,
            _off(job["astra_ms"], job["ours_ms"]),
        ]
        yield f"| {' | '.join(cells)} |"


def rules_section(jobs: list[dict[str, Any]]) -> Iterator[str]:
    head = ("job", "Lumos", "one transfer at a time", "ASTRA-sim", "from that", "with senders that do not wait")
    yield f"| {' | '.join(head)} |"
    yield "|---|---|---|---|---|---|"
    for job in (job for job in jobs if "gb_s" in job):
        keys = ("ours_ms", "one_at_a_time_ms", "astra_ms")
        cells = [job["name"], *(f"{job[key]:.1f}" for key in keys), _off(job["astra_ms"], job["one_at_a_time_ms"])]
        yield f"| {' | '.join(cells)} | {_off(job['eager_ms'], job['astra_ms'])} |"


def whole_graph_section(jobs: list[dict[str, Any]]) -> Iterator[str]:
    yield "| job | Lumos | no gaps, no lags | no turns on the GPU either | ASTRA-sim | from that | from Lumos |"
    yield "|---|---|---|---|---|---|---|"
    for job in (job for job in jobs if job.get("whole_graph_ms")):
        times = [job["ours_ms"], *job["bare"], job["whole_graph_ms"]]
        off = [_off(job["whole_graph_ms"], base) for base in (job["bare"][1], job["ours_ms"])]
        yield f"| {job['name']} | " + " | ".join([*(f"{time:.1f}" for time in times), *off]) + " |"


def others_section(jobs: list[dict[str, Any]]) -> Iterator[str]:
    jobs = [job for job in jobs if "others" in job]
    factors = [f"{factor:g} ×" for factor, _, _ in jobs[0]["others"]] if jobs else []
    yield f"| job | {' | '.join(factors)} |"
    yield "|---|" + "---|" * len(factors)
    for job in jobs:
        cells = [f"{ours:.1f}, {_off(theirs, ours)}" for _, ours, theirs in job["others"]]
        yield f"| {job['name']} | {' | '.join(cells)} |"


def described_section(runs: list[dict[str, Any]]) -> Iterator[str]:
    head = (
        "run", "transfers", "GB/s of a GPU", "predicted ms", "Lumos, same links", "ASTRA-sim", "difference",
        "Lumos with its transfer times", "and one at a time", "difference",
    )  # fmt: skip
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for run in runs:
        lent, chained = run["lent_ms"], run["lent_one_at_a_time_ms"]
        cells = [
            run["name"], str(run["transfers"]), ", ".join(f"{one:.0f}" for one in run["gb_s"]),
            f"{run['predicted_ms']:.1f}", f"{run['ideal_ms']:.1f}", f"{run['astra_ms']:.1f}",
            _off(run["astra_ms"], run["ideal_ms"]), f"{lent:.1f}", f"{chained:.1f}", _off(run["astra_ms"], chained),
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def kinds_section(runs: list[dict[str, Any]]) -> Iterator[str]:
    yield "| run | communication | ranks | times | Lumos, same links, ms | ASTRA-sim, ms | difference |"
    yield "|---|---|---|---|---|---|---|"
    for run in runs:
        for kind, ranks, count, ours, theirs in run["by_kind"]:
            name = kind.replace("_", "-")
            yield f"| {run['name']} | {name} | {ranks} | {count} | {ours:.2f} | {theirs:.2f} | {_off(theirs, ours)} |"


def _off(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.1f} %".replace("-", "−") if base else "–"


def page(kept: dict[str, Any]) -> str:
    jobs, runs = kept["jobs"], kept["described"]
    steady = [job for job in jobs if "rates" in job and job["rates"][1] <= STEADY * job["rates"][0]]
    worst = max((100 * abs(job["astra_ms"] / job["ours_ms"] - 1) for job in steady), default=0.0)
    text = PAGE.read_text()
    parts = {
        "RECORDED": recorded_section(jobs), "RULES": rules_section(jobs), "WHOLE_GRAPH": whole_graph_section(jobs),
        "OTHERS": others_section(jobs), "DESCRIBED": described_section(runs), "KINDS": kinds_section(runs),
        "STEADY": iter([f"{len(steady)} of {len(jobs)}"]), "WORST": iter([f"{worst:.1f} %"]),
    }  # fmt: skip
    for name, lines in parts.items():
        text = text.replace("{" + name + "}", "\n".join(lines))
    return text


def measure(programs: Path, data: Path, only: str) -> None:
    """All jobs in both simulators, now; or those with `only` in their names."""
    jobs = [("example of the package", ROOT / "src/lumos/data/example", ())]
    jobs += [(name, data / "h200/multirank" / name, ()) for name in JOBS]
    jobs += [
        (name, data / "public" / path, tuple(str(data / "public" / one) if "/" in one else one for one in options))
        for name, (path, options) in PUBLIC.items()
    ]
    for name, path, options in jobs:
        if only in name and path.exists():
            _keep("jobs", [name for name, _, _ in jobs], recorded_job(name, path, options, programs))
    for name, text in SETUPS.items():
        if only in name:
            _keep("described", list(SETUPS), described_run(name, text, programs))


def _keep(table: str, order: list[str], found: dict[str, Any]) -> None:
    """Put one result in its place among those that are kept."""
    print(f"{found['name']}: {found['astra_ms']:.2f} ms in ASTRA-sim", file=sys.stderr, flush=True)
    kept = json.loads(KEPT.read_text())
    rows = {row["name"]: row for row in kept.get(table, [])} | {found["name"]: found}
    kept[table] = [rows[name] for name in order if name in rows]
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--bin", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="NAME", help="run again only jobs with this in their names")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data")
    options = parser.parse_args()
    programs = options.bin
    if programs is not None:
        if not (programs / PROGRAM).exists():
            raise SystemExit(f"--bin {programs}: {PROGRAM} is missing; build ASTRA-sim by its own instructions")
        measure(programs.resolve(), options.data, options.only)
    written = page(json.loads(KEPT.read_text()))
    if options.output:
        options.output.write_text(written)
    else:
        print(written)


if __name__ == "__main__":
    main()
