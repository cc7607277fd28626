"""The same jobs in Lumos and in ASTRA-sim: recorded ones and described ones, exported by `lumos convert`, as a page.

    python benchmarks/astra_sim.py -o docs/astra_sim.md [--sources FOLDER | --bin FOLDER] [--data ../shared/data]

With neither FOLDER the page is written from the results in benchmarks/astra_sim.json. `--sources` builds ASTRA-sim from
its sources (benchmarks/build_astra_sim.py says what has to lie there), `--bin` names the folder of its programs; every
job is then exported and run again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from build_astra_sim import PROGRAM, build  # noqa: E402
from chakra_runs import ChakraRun, Transfer  # noqa: E402
from lumos import predict, read_setup  # noqa: E402
from lumos.errors import LumosError  # noqa: E402
from lumos.export.chakra_communication import plan_communication  # noqa: E402
from lumos.export.chakra_writer import write_chakra  # noqa: E402
from lumos.graph.from_trace.build import Execution  # noqa: E402
from lumos.graph.from_trace.build import build as build_graph  # noqa: E402
from lumos.graph.graph import Edges, Floats, Graph, Rule  # noqa: E402
from lumos.graph.simulate import simulate  # noqa: E402
from lumos.program.operators import Collective, Group  # noqa: E402
from lumos.trace.read.astra_sim_log import AstraSimLog, read_astra_sim_log  # noqa: E402
from lumos.trace.read.chakra_format import NodeType  # noqa: E402
from lumos.trace.read.execution_trace import link, read_execution_trace  # noqa: E402
from lumos.trace.read.job import read_job  # noqa: E402
from networks import GIB, ideal_network  # noqa: E402

KEPT = Path(__file__).with_name("astra_sim.json")
PAGE = Path(__file__).with_name("astra_sim_page.txt")
STEADY = 3.0  # the 90th percentile of the bandwidth that transfers reached, over the 10th, by bytes
JOBS = (
    "ddp2_l8", "ddp2_l16", "fsdp2_l8", "tp2_l8", "pp2_mb4", "pp4_mb8", "dp2_tp2_l8",
)  # fmt: skip
PUBLIC = {
    "megatron_tp8_a100": ("megatron_tp8_a100/kineto", ("--et", "megatron_tp8_a100/et")),
    "sglang_decode_b200": ("sglang_decode_b200", ()),
    "torchrec_v100 resnet18": ("torchrec_v100/resnet18", ()),
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
}  # fmt: skip


# ---------------------------------------------------------------------- ASTRA-sim
@dataclass(frozen=True)
class Exported:
    """A job as `lumos convert --for astra-sim` wrote it."""

    folder: Path
    command: list[str]
    network: Path

    @staticmethod
    def of(what: Path, folder: Path, *options: str) -> Exported:
        command = [sys.executable, "-m", "lumos.cli.main", "convert", str(what), "-o", str(folder / "job.et")]
        done = subprocess.run([*command, "--for", "astra-sim", "--json", *options], capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(done.stderr)
        return Exported(folder, shlex.split(json.loads(done.stdout)["command"]), next(folder.glob("*network.yml")))

    def run(self, programs: Path, factor: float = 1.0, eager: bool = False) -> AstraSimLog:
        """What ASTRA-sim prints, as it is; with links that are faster by a factor, or with senders that do not wait."""
        command = [str(programs / PROGRAM), *self.command[1:]]
        log = self.folder / "log"
        if eager:
            command = [part for part in command if "rendezvous" not in part]
        if factor != 1.0:
            values = self.links
            values["bandwidth"] = [factor * one for one in values["bandwidth"]]
            other = self.folder / "other.yml"
            other.write_text(yaml.safe_dump(values, default_flow_style=None))
            command = [part.replace(str(self.network), str(other)) for part in command]
        for old in log.glob("*.log"):
            old.unlink()
        done = subprocess.run([*command, f"--logging-folder={log}"], capture_output=True, text=True, cwd=self.folder)
        (self.folder / "printed.log").write_text(done.stdout)
        return read_astra_sim_log(log if (log / "log.log").exists() else self.folder / "printed.log")

    @property
    def links(self) -> dict[str, Any]:
        values: dict[str, Any] = yaml.safe_load(self.network.read_text())
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
@dataclass(frozen=True)
class Job:
    """A recorded job, and the bytes that one rank moves one after the other in each of its transfers."""

    execution: Execution
    moved: dict[int, float]  # by node of the graph

    @staticmethod
    def of(execution: Execution) -> Job:
        plan = plan_communication(execution, closed=True)
        sizes = {number: len(ranks) for (_, ranks), number in plan.groups.items()}
        moved = {}
        for row, transfers in plan.transfers.items():
            passed = [
                _passed(t.collective, t.bytes, sizes[t.group]) if t.type == NodeType.COMM_COLL else float(t.bytes)
                for t in transfers
            ]
            moved[int(execution.nodes.last_node[row])] = max(passed)
        return Job(execution, moved)

    def rates(self) -> tuple[float, float]:
        """The bandwidth that a tenth of the bytes stayed below, and that a tenth exceeded, in GB/s."""
        duration = self.execution.graph.duration
        pairs = sorted((size / duration[n], size) for n, size in self.moved.items() if duration[n] > 0 and size > 0)
        share = np.cumsum([size for _, size in pairs]) / sum(size for _, size in pairs)
        low, high = (float(pairs[int(np.searchsorted(share, at))][0]) for at in (0.1, 0.9))
        return low, high

    def at(self, gb_s: float) -> Floats:
        """Durations of all nodes with transfers at this bandwidth."""
        duration = self.execution.graph.duration.copy()
        for node, size in self.moved.items():
            duration[node] = size / gb_s
        return duration

    def ms(self, gb_s: float, graph: Graph | None = None) -> float:
        return simulate(graph or self.execution.graph, self.at(gb_s)).span / 1e6

    def one_at_a_time(self, gb_s: float) -> Graph:
        """The graph in which every rank does one collective or send at a time, in the order in which they meet."""
        graph, nodes = self.execution.graph, self.execution.nodes
        start = simulate(graph, self.at(gb_s)).start
        source, target, last = [], [], dict[int, int]()
        for node in sorted(self.moved, key=lambda node: (start[node], node)):
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


def _passed(kind: int, size: int, ranks: int) -> float:
    """The bytes that a rank sends in a ring, one after the other; `size` is what it puts in."""
    share = {0: 2 / ranks, 2: 1.0, 6: 1 / ranks, 7: 1 / ranks}.get(kind, 0.0)
    return share * (ranks - 1) * size


def recorded_job(name: str, path: Path, options: tuple[str, ...], programs: Path) -> dict[str, Any]:
    """One recorded job in both simulators."""
    source = read_job(path)
    if options and not isinstance(source, Execution):
        files = {rank: next(Path(options[1]).glob(f"*{rank}.json*")) for rank in source.ranks}
        source = link(source, {rank: read_execution_trace(file) for rank, file in files.items()}).enrich(source)
    job = Job.of(source if isinstance(source, Execution) else build_graph(source))
    found: dict[str, Any] = {"name": name, "ranks": len(job.execution.trace.ranks), "transfers": len(job.moved)}
    found["recorded_ms"] = simulate(job.execution.graph).span / 1e6
    with tempfile.TemporaryDirectory() as folder:
        exported = Exported.of(path, Path(folder), *options)
        log = exported.run(programs)
        found |= {"astra_ms": _ms(log), "statistics": all(r.compute_ns is not None for r in log.ranks.values())}
        if not any(job.moved.values()):
            return found | {"ours_ms": found["recorded_ms"]}
        gb_s = exported.gb_s[0]
        found |= {"gb_s": gb_s, "rates": job.rates(), "ours_ms": job.ms(gb_s)}
        found["eager_ms"] = _ms(exported.run(programs, eager=True))
        found["one_at_a_time_ms"] = job.ms(gb_s, job.one_at_a_time(gb_s))
        found["others"] = [
            [factor, job.ms(factor * gb_s), _ms(exported.run(programs, factor))] for factor in (0.5, 0.8, 1.25, 2.0)
        ]
        found["bare"] = [job.ms(gb_s, job.bare(turns)) for turns in (True, False)]
        found["whole_graph_ms"] = _whole_graph_ms(job, exported, programs)
    return found


def _whole_graph_ms(job: Job, exported: Exported, programs: Path) -> float | None:
    """All nodes of the graph as they are, host included, in ASTRA-sim."""
    with tempfile.TemporaryDirectory() as folder:
        write_chakra(Path(folder) / "job.et", job.execution)
        ours = ("--workload", "--comm-group")
        command = [
            part.replace(str(exported.folder), folder) if part.startswith(ours) else part for part in exported.command
        ]
        try:
            return _ms(Exported(Path(folder), command, exported.network).run(programs))
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
        took, links, counts = _astra_times(files, log), exported.gb_s, exported.links["npus_count"]
        network = ideal_network(tuple(links))

        def ideal_ns(transfer: Transfer) -> float:
            return 1e3 * network.us(_collective(transfer, counts))

        return {
            "name": name, "setup": text, "ranks": len(log.ranks), "transfers": len(files.transfers),
            "predicted_ms": predict(read_setup(setup)).step_ms,
            "files_ms": files.ms(lambda transfer: transfer.recorded_ns),
            "gb_s": links, "astra_ms": _ms(log), "ideal_ms": files.ms(ideal_ns),
            "lent_ms": files.ms(took.__getitem__), "lent_one_at_a_time_ms": files.ms(took.__getitem__, True),
            "by_kind": _by_kind(files, took, ideal_ns),
        }  # fmt: skip


def _collective(transfer: Transfer, counts: list[int]) -> Collective:
    """A transfer as our network takes it: the whole tensor, and how many of its ranks share each tier."""
    size, held = len(transfer.ranks), []
    for tier in range(len(counts)):
        unit = int(np.prod(counts[: tier + 1]))
        held.append(max(np.bincount(np.array(transfer.ranks) // unit)))
    group = Group(size, int(held[0]), tuple(int(one) for one in held[1:-1]))
    return Collective(transfer.kind, float(transfer.bytes * (size if transfer.kind == "all_gather" else 1)), group)


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


def measure(programs: Path, data: Path) -> dict[str, Any]:
    """All jobs in both simulators, now."""
    jobs = [("example of the package", ROOT / "src/lumos/data/example", ())]
    jobs += [(name, data / "h200/multirank" / name, ()) for name in JOBS]
    jobs += [
        (name, data / "public" / path, tuple(str(data / "public" / one) if "/" in one else one for one in options))
        for name, (path, options) in PUBLIC.items()
    ]
    found: dict[str, Any] = {"jobs": [], "described": []}
    for name, path, options in jobs:
        print(f"{name} …", file=sys.stderr, flush=True)
        if path.exists():
            found["jobs"].append(recorded_job(name, path, options, programs))
    for name, text in SETUPS.items():
        print(f"{name} …", file=sys.stderr, flush=True)
        found["described"].append(described_run(name, text, programs))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--sources", type=Path, metavar="FOLDER")
    parser.add_argument("--build", type=Path, default=ROOT / "out/astra_sim", metavar="FOLDER")
    parser.add_argument("--bin", type=Path, metavar="FOLDER")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data")
    options = parser.parse_args()
    programs = build(options.sources, options.build, 2) if options.sources else options.bin
    if programs is not None:
        if not (programs / PROGRAM).exists():
            raise SystemExit(f"--bin {programs}: no {PROGRAM} in it; --sources FOLDER builds it")
        kept = json.loads(KEPT.read_text()) | measure(programs.resolve(), options.data)
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    written = page(json.loads(KEPT.read_text()))
    if options.output:
        options.output.write_text(written)
    else:
        print(written)


if __name__ == "__main__":
    main()
