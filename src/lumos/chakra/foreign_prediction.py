"""Chakra files without durations, priced: workloads that were written for simulators, on a GPU and a network of ours.

A node of computation states its operations (`num_ops`) and the bytes it moves (`tensor_size`). One that the tensor
cores do is priced as the matmul with these operations and bytes, anything else by what it moves; collectives and
messages by the ranks of their process group. ASTRA-sim reads `comm_size` as what every rank puts in, and so do we.

The generator STAGE (symbolic_tensor_graph) counts elements in place of bytes and multiply-adds in place of operations,
and lists the sizes of its operands: then the shape of a matmul is known exactly.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lumos.analysis.run import TracedRun
from lumos.chakra.file_format import COLLECTIVE_NAMES, COMMUNICATION, ChakraFile, Node, NodeType
from lumos.chakra.foreign_graph import foreign_execution
from lumos.chakra.process_groups import ProcessGroups
from lumos.costs.costs import costs_of
from lumos.costs.model_costs import Cost, ModelCosts
from lumos.data_files import read_table
from lumos.dtypes import BYTES
from lumos.errors import InputError, OptionError
from lumos.prediction.bill import Tariff
from lumos.prediction.carried_over import carried_over, transfer_note, transfer_part
from lumos.prediction.interval import dry_spread
from lumos.prediction.operator_times import SOURCES, OperatorTime, Work
from lumos.prediction.power import limit_note
from lumos.prediction.prediction import Prediction
from lumos.program.layout import RankLayout, layout_of
from lumos.program.op import Op
from lumos.program.operators import Collective, Operator
from lumos.setup.setup import Setup
from lumos.setup.setup_files import PlainSetup
from lumos.trace.steps import find_steps

_STAND_IN = {"layers": 1, "hidden": 64, "ffn": 64, "heads": 1, "vocab": 64}  # for a model; no size of it is used
_STAGE = "symbolic_tensor_network"  # the schema that STAGE states
_MATRIX_TYPES = ("M", "EINSUM", "GEMM", "MATMUL", "LINEAR", "CONV", "ATTENTION")
_MATRIX_NAME = re.compile(r"gemm|matmul|\bmm\b|bmm|linear|einsum|conv\d?d|attention|sdpa", re.IGNORECASE)
_INTENSITY = read_table("trace_rules.toml")["chakra"]["matrix_intensity"]
_LARGEST = 1 << 62
_ALIKE = {  # collectives that cost about what another does
    "broadcast": "all_gather", "gather": "all_gather", "scatter": "reduce_scatter", "reduce": "reduce_scatter",
    "barrier": "all_reduce", "reduce_scatter_block": "reduce_scatter",
}  # fmt: skip


@dataclass(frozen=True)
class ForeignWork:
    """What the nodes of some files do and cost: `ForeignWork(files, setup, costs).us(file, node)`."""

    files: Sequence[ChakraFile]
    setup: Setup
    costs: ModelCosts

    @cached_property
    def layout(self) -> RankLayout:
        return layout_of(self.setup)

    @cached_property
    def groups(self) -> ProcessGroups:
        return ProcessGroups(self.files)

    def us(self, file: ChakraFile, node: Node) -> float:
        """Microseconds of a node; what its file states has priority."""
        return float(node.duration_us) or self.cost(self.work(file, node)).us

    def cost(self, work: Work | None) -> Cost:
        return self.costs.cost(Op("node", work=work))

    def work(self, file: ChakraFile, node: Node) -> Work | None:
        """What a node does; None for what takes no time."""
        unit = BYTES[self.setup.train.precision] if _is_stage(file) else 1.0
        if node.type == NodeType.COMM_COLL:
            return self._collective(file, node, unit * _number(node, "comm_size"))
        if node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
            return self._message(file, node, unit * _number(node, "comm_size"))
        moved = unit * _number(node, "tensor_size")
        if node.type in (NodeType.MEM_LOAD, NodeType.MEM_STORE):
            return _stream(moved)
        if node.type != NodeType.COMP or node.values.get("is_cpu_op", False):
            return None
        return self._computation(file, node, moved)

    def _computation(self, file: ChakraFile, node: Node, moved: float) -> Operator | None:
        dtype, operations = self.setup.train.precision, _number(node, "num_ops")
        if _is_stage(file):
            sizes = [*_sizes(node, "inputs"), *_sizes(node, "outputs")]
            if node.values.get("op_type") == "M" and len(sizes) == 3:
                return _product(operations, sizes, dtype)
            moved = max(moved, BYTES[dtype] * sum(sizes))
            operations *= 2
        if _is_matrix(node, operations, moved):
            return Operator("gemm_tn", _matmul(operations, moved / BYTES[dtype]), dtype)
        return _stream(moved)

    def _collective(self, file: ChakraFile, node: Node, size: float) -> Collective:
        name = COLLECTIVE_NAMES.get(int(_number(node, "comm_type")), "all_reduce")
        ranks = self.groups.ranks(file.rank, node.group)
        if len(ranks) < 2 and node.group and not self.groups.is_stated(file.rank, node.group):
            raise InputError(
                f"{file.path}: node {node.id} ({node.name[:40]}) is of process group {node.group[:40]!r}, and "
                'nothing says which ranks that has: put the group file beside the traces, as in {"1": [0, 1]}'
            )
        kind = _ALIKE.get(name, name)
        whole = size * len(ranks) if kind == "all_gather" else size
        return Collective(kind, max(whole, 8.0), self.layout.group_of(ranks))

    def _message(self, file: ChakraFile, node: Node, size: float) -> Collective:
        other = node.values.get("comm_dst" if node.type == NodeType.COMM_SEND else "comm_src", file.rank)
        ranks = (file.rank, other if isinstance(other, int) and 0 <= other < 1 << 20 else file.rank)
        return Collective("p2p", max(size, 8.0), self.layout.group_of(ranks))

    @cached_property
    def operators(self) -> list[OperatorTime]:
        """What the first rank does, the most expensive first."""
        done = Counter(self.work(self.files[0], node) for node in self.files[0].nodes if not node.duration_us)
        costs = [(work, count, self.cost(work)) for work, count in done.items() if work is not None]
        rows = [
            OperatorTime(
                work.kind.replace("gemm_tn", "matmul"), work, count, count * cost.us / 1e3, cost.bound, cost.source
            )
            for work, count, cost in costs
            if cost.us
        ]
        return sorted(rows, key=lambda row: -row.ms)


@dataclass(frozen=True)
class GraphPrediction(Prediction):
    """A prediction from files without durations. They say nothing of a model, of tokens, or of memory."""

    foreign: ForeignWork = field(kw_only=True, repr=False)

    @property
    def is_dry(self) -> bool:
        return True

    @property
    def tokens(self) -> None:
        return None

    @property
    def tokens_per_s_per_gpu(self) -> None:
        return None

    @property
    def mfu(self) -> None:
        return None

    @property
    def parameters(self) -> None:
        return None

    @property
    def active_parameters(self) -> None:
        return None

    @cached_property
    def memory(self) -> None:
        return None

    @property
    def costs(self) -> ModelCosts:
        return self.foreign.costs

    @property
    def hfu(self) -> float | None:
        """Operations of the first rank's matmuls over those that its GPU could have done."""
        rows = [row for row in self.all_operators if isinstance(row.work, Operator) and row.work.is_matrix]
        setup = self.foreign.setup
        if self.is_of_cpu or not rows:
            return None
        flops = sum(row.count * row.work.flops for row in rows if isinstance(row.work, Operator))
        return flops / (self.step_ms / 1e3) / (setup.cluster.chip.peak(setup.train.precision) * 1e12)

    @cached_property
    def all_operators(self) -> list[OperatorTime]:
        return self.foreign.operators

    @cached_property
    def source(self) -> dict[str, float]:
        total = sum(row.ms for row in self.all_operators) or 1.0
        return {name: sum(row.ms for row in self.all_operators if row.source == name) / total for name in SOURCES}

    @cached_property
    def warnings(self) -> list[str]:
        model = self.costs.model
        carried = carried_over(model, self.all_operators)
        return [*self.notes, *filter(None, (transfer_note(model.gpu.shown, model, carried), limit_note(model.gpu)))]


def needs_prices(files: Sequence[ChakraFile]) -> bool:
    """Whether these are files of other tools in which nothing, or no communication, has a duration."""
    if any(file.is_own for file in files):
        return False
    nodes = [node for file in files for node in file.nodes]
    talk = [node for node in nodes if node.type in COMMUNICATION]
    return not any(node.duration_us for node in (talk or nodes))


def predict_graph(files: Sequence[ChakraFile], plain: PlainSetup, tariff: Tariff) -> GraphPrediction:
    """Price the nodes of files for the cluster that is asked for, and run them."""
    if tariff.tokens is not None:
        raise OptionError("--tokens: Chakra files do not say how many tokens a step has; leave it out")
    groups = ProcessGroups(files)
    setup, notes = _cluster(plain, groups.world)
    work = ForeignWork(files, setup, costs_of(setup))
    execution = foreign_execution(files, work.us)
    run = TracedRun(execution, find_steps(execution.trace), execution.graph)
    transferred = transfer_part(carried_over(work.costs.model, work.operators))
    told = [*notes, *_assumptions(files, groups)]
    spread = dry_spread(transferred, 0.0)
    return GraphPrediction(run, spread, setup, notes=tuple(told), tariff=tariff, foreign=work)


def _cluster(plain: PlainSetup, world: int) -> tuple[Setup, list[str]]:
    """The setup that a workload runs on; its model is a stand-in."""
    sections = {name: dict(values) for name, values in plain.sections.items() if values}
    train = sections.pop("train", {})
    wrong = next((f"{name}.{key}" for name, values in sections.items() if name != "cluster" for key in values), "")
    wrong = wrong or next((f"train.{key}" for key in train if key != "precision"), "")
    if wrong:
        raise OptionError(
            f"{wrong}: a workload of Chakra files has the sizes of its files; keys of cluster and train.precision "
            "can be set"
        )
    cluster, notes = sections.get("cluster", {}), []
    if cluster.setdefault("gpus", world) != world:
        raise OptionError(f"cluster.gpus = {cluster['gpus']}: the files are of a job of {world} ranks")
    if "gpu" not in cluster and not cluster.get("model"):
        cluster["gpu"] = "h100"
        notes.append("cluster.gpu is not given: assuming h100")
    reading = plain.checked(
        {"model": _STAND_IN, "train": {"seq": 1} | train, "parallel": {"dp": world}, "cluster": cluster}
    )
    return reading.setup, [*reading.notes, *notes]


def _assumptions(files: Sequence[ChakraFile], groups: ProcessGroups) -> list[str]:
    told = [
        "priced from the sizes in the files; host time, and contention between kernels and communication, are not "
        "included"
    ]
    if any(_is_stage(file) for file in files):
        told.append("files of STAGE: sizes are elements, and operations multiply-adds")
    if len(files) < groups.world:
        told.append(f"{len(files)} of {groups.world} ranks are here: the others are taken to arrive at the same time")
    return told


def _is_stage(file: ChakraFile) -> bool:
    return file.head.get("schema") == _STAGE


def _number(node: Node, name: str) -> float:
    value = node.values.get(name, 0)
    return float(value) if isinstance(value, int | float) and 0 <= value < _LARGEST else 0.0


def _sizes(node: Node, name: str) -> list[float]:
    """The sizes in a list of names and sizes, which alternate."""
    listed = node.values.get(name, ())
    texts = [str(text) for text in listed[1::2]] if isinstance(listed, list) else []
    found = [float(text) if re.fullmatch(r"\d{1,18}(\.\d{1,9})?", text) else 0.0 for text in texts]
    return found if all(found) else []


def _is_matrix(node: Node, operations: float, moved: float) -> bool:
    """Whether the tensor cores do a node: by its type or name, or as it does much more than it moves."""
    if not operations:
        return False
    if str(node.values.get("op_type", "")).upper() in _MATRIX_TYPES or _MATRIX_NAME.search(node.name[:200]):
        return True
    return bool(operations >= _INTENSITY * moved)


def _product(multiplied: float, sizes: Sequence[float], dtype: str) -> Operator:
    """The product of two matrices from the elements of both and of the result, and from its multiply-adds."""
    left, right, result = sizes
    shape = (multiplied / right, multiplied / left, multiplied / result)
    return Operator("gemm_tn", tuple(max(1, min(round(size), 1 << 40)) for size in shape), dtype)


def _matmul(operations: float, elements: float) -> tuple[int, int, int]:
    """m, n and k of the matmul of square result that has about these operations and moves about so many elements.

    If no such matmul moves as few, the elements are taken for those of its result; without any, it is a cube. Sides are
    those of whole tiles: nobody trains with odd ones, which are slow.
    """
    half = max(operations / 2, 1.0)
    cube = half ** (1 / 3)
    if elements <= 0:
        side = cube
    elif elements <= 3 * cube * cube:
        side = min(elements**0.5, half**0.5)
    else:  # the larger root of 2 half / m + m² = elements, between the cube and the root of all elements
        low, high = cube, elements**0.5
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if 2 * half / middle + middle * middle < elements else (low, middle)
        side = min(low, half**0.5)
    m = _in_tiles(side)
    return m, m, _in_tiles(half / m / m, (32, 8))


def _in_tiles(side: float, tiles: Sequence[int] = (256, 64, 8)) -> int:
    tile = next((tile for tile in tiles if side >= 4 * tile), 1)
    return max(1, min(tile * round(side / tile), 1 << 30))


def _stream(moved: float) -> Operator | None:
    return Operator("stream", (round(moved),)) if moved >= 1 else None
