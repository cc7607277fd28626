"""Parameters: which layers a pipeline stage holds, how many parameters that is on one rank, and how ZeRO divides them.

Bytes for one parameter, in 16 bits; all is 4 where training is in fp32. SGD has momentum: one value instead of two. So
has Muon, for the matrices of the layers; the rest is updated by Adam.

| state_precision | weights | gradients | state of Adam |
|---|---|---|---|
| training | as trained: 2 | as trained: 2 | 2 + 2 |
| mixed | 2 | 4 where the framework accumulates in fp32, else 2 | 4 (master weights) + 4 + 4 |
| fp32 | 4, and copies of 2 for the matmuls | 4 | 4 + 4 |

ZeRO (Rajbhandari et al. 2020): 1 divides the state, 2 the gradients too, 3 the weights too.
"""

from __future__ import annotations

from typing import NamedTuple

from lumos.data_files import read_table
from lumos.program.layout import RankLayout
from lumos.schedules import schedule_named
from lumos.setup.sections import Train
from lumos.setup.setup import Setup

_OPTIMIZER_VALUES = {"adamw": 2, "adam": 2, "sgd": 1, "muon": 1, "none": 0}


class Chunk(NamedTuple):
    """One virtual stage."""

    dense: int
    sparse: int
    first: bool = False  # holds the embedding
    last: bool = False  # holds the final norm, the output matrix and the loss
    predicts: int = 0  # layers among its own that predict further tokens, each with a loss

    @property
    def layers(self) -> int:
        return self.dense + self.sparse


def recomputes_every(train: Train) -> int:
    """Every n-th layer is recomputed: as given, or every second where selective recomputation is of whole layers."""
    by_layer = train.recompute == "selective" and train.modules == ("layers",)
    return 2 if by_layer else train.recompute_every


def recomputed_layers(train: Train, chunk: Chunk) -> tuple[int, int]:
    """The dense and the sparse layers of a virtual stage of which something is recomputed.

    Megatron's method "block" takes the first layers of every virtual stage, torchtitan every n-th layer.
    """
    if train.recompute == "none":
        return 0, 0
    every = recomputes_every(train)
    if train.recompute == "selective" and every == 1:
        return chunk.dense, chunk.sparse
    if every > 1:
        dense = chunk.dense // every
        return dense, chunk.layers // every - dense
    most = chunk.layers if train.recompute_layers is None else train.recompute_layers
    dense = min(chunk.dense, most)
    return dense, min(chunk.sparse, most - dense)


class Parameters(NamedTuple):
    """Of one rank. Experts are replicated over other ranks than the rest."""

    common: float
    experts: float
    adapters: float = 0.0

    def __add__(self, other: Parameters) -> Parameters:  # type: ignore[override]
        return Parameters(*(a + b for a, b in zip(self, other, strict=True)))


def layers_of(setup: Setup, balances: bool = False) -> list[int]:
    """Layers of every virtual stage, in the order of the model: as given, by their work, or as even as it goes."""
    parallel = setup.parallel
    stages = parallel.pp * parallel.vpp
    given = parallel.stage_layers
    if len(given) == stages:
        return list(given)
    if given:
        return _within_stages(setup)
    if balances and stages > 1:
        return _balanced(setup, stages)
    base, rest = divmod(setup.model.layers, stages)
    counts = [base] * stages
    for index in range(rest):  # the first and the last have the embedding and the output besides
        counts[(1 + index) % stages if stages > 2 else index] += 1
    return counts


def _within_stages(setup: Setup) -> list[int]:
    """Layers given by stage, dealt to the chunks of each stage as evenly as it goes."""
    parallel = setup.parallel
    pp, vpp = parallel.pp, parallel.vpp
    counts = [0] * (pp * vpp)
    for stage, row in enumerate(schedule_named(parallel.schedule).placement(pp, vpp)):
        for place, virtual in enumerate(sorted(row)):
            counts[virtual] = (parallel.stage_layers[stage] + vpp - 1 - place) // vpp
    return counts


def _balanced(setup: Setup, stages: int) -> list[int]:
    """Layers by the work of each stage, the output matrix counted as the layers it is worth."""
    model = setup.model
    layer = model.attention_parameters + model.mlp_parameters(model.ffn)
    share = (model.layers + model.vocab * model.hidden / layer) / stages
    ends = [min(model.layers, max(i + 1, round((i + 1) * share))) for i in range(stages - 1)] + [model.layers]
    if model.layers >= stages:
        ends = [min(end, model.layers - (stages - 1 - i)) for i, end in enumerate(ends)]
    return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def chunks_of(setup: Setup, balances: bool = False) -> list[tuple[Chunk, ...]]:
    """[stage][chunk]: the virtual stages, where the schedule puts them."""
    model, parallel = setup.model, setup.parallel
    counts = layers_of(setup, balances)
    if model.experts:
        chunks, done = [], 0
        for count in counts:
            dense = min(max(model.dense_layers - done, 0), count)
            chunks.append(Chunk(dense, count - dense))
            done += count
    else:
        sizes = {count: Chunk(count, 0) for count in set(counts)}  # few: most stages are alike
        chunks = [sizes[count] for count in counts]
    chunks[0] = chunks[0]._replace(first=True)
    end, more = chunks[-1], model.mtp_layers
    sparse = more if model.experts else 0
    chunks[-1] = end._replace(dense=end.dense + more - sparse, sparse=end.sparse + sparse, last=True, predicts=more)
    places = schedule_named(parallel.schedule).placement(parallel.pp, parallel.vpp)
    return [tuple(chunks[virtual] for virtual in row) for row in places]


class RankParameters:
    """Parameters of one rank, by part of the model."""

    def __init__(self, layout: RankLayout) -> None:
        model, tp = layout.model, layout.parallel.tp
        every = model.attention_parameters / tp + 2 * model.norm_parameters
        self.dense = every + model.mlp_parameters(model.ffn) / tp
        self.experts = self.sparse = 0.0
        if model.experts:
            expert = model.mlp_parameters(model.expert_ffn)
            self.experts = model.experts * expert / (layout.parallel.ep * layout.expert_tp)
            self.sparse = every + model.shared_experts * expert / tp + model.router_parameters
        self.embedding = float(layout.vocab * model.hidden)
        self.positions = float(layout.train.seq * model.hidden) if model.positions == "learned" else 0.0
        self.output = 0.0 if model.tied and layout.parallel.pp == 1 else self.embedding
        self.final_norm = float(model.norm_parameters)
        self.predictor = float(model.predictor_parameters)
        self.adapters = _adapters(layout) if layout.train.mode == "lora" else 0.0

    def of_layer(self, sparse: bool) -> Parameters:
        """One layer."""
        return (
            Parameters(self.sparse, self.experts, self.adapters)
            if sparse
            else Parameters(self.dense, 0.0, self.adapters)
        )

    def of(self, chunks: tuple[Chunk, ...]) -> Parameters:
        """All that a stage holds."""
        dense = sparse = 0
        for chunk in chunks:
            dense += chunk.dense
            sparse += chunk.sparse
        common = dense * self.dense + sparse * self.sparse
        if any(chunk.first for chunk in chunks):
            common += self.embedding + self.positions
        if any(chunk.last for chunk in chunks):
            common += self.output + self.final_norm + sum(chunk.predicts for chunk in chunks) * self.predictor
        return Parameters(common, sparse * self.experts, (dense + sparse) * self.adapters)


def _adapters(layout: RankLayout) -> float:
    """Trained parameters of one layer: two thin matrices beside every linear layer of attention."""
    model, rank = layout.model, read_table("memory.json")["lora_rank"]
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return float(rank * (4 * model.hidden + 2 * queries + 2 * keys) / layout.parallel.tp)


class States(NamedTuple):
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float


class StateBytes(NamedTuple):
    """Bytes per trained parameter before sharding; frozen weights count as weights."""

    weights: float
    gradients: float
    master_weights: float
    moments: float


class Sharding:
    """How ZeRO divides weights, gradients and optimizer state: the one statement that time and memory both use.

    A trace shows the bytes of a weight as it is `computed` with and as it is `stored`, and whether weights are frozen.
    """

    def __init__(self, layout: RankLayout, computed: float = 0.0, stored: float = 0.0, frozen: bool = False) -> None:
        train, framework, e = layout.train, layout.framework, computed or float(layout.element)
        self.layout = layout
        self.zero, self.frozen = layout.zero, frozen or train.mode == "lora"
        self.shards = layout.sharing[0].size if self.zero else 1
        self.expert_shards = layout.experts_sharing[0].size if self.zero else 1
        self.moments = values = _OPTIMIZER_VALUES[train.optimizer]
        precision = framework.state_precision if e < 4 else "training"
        if stored and precision != "mixed":
            precision = "fp32" if stored > e else "training"
        self.low = e  # bytes of a weight as the matmuls read it
        self.weights = self.gradients = 4.0 if precision == "fp32" else e
        self.moment = self.weights  # bytes of one value that the optimizer keeps
        self.optimizer = self.weights * values
        self.casts = self.step = 0.0
        if precision == "mixed":
            self.gradients = 4.0 if framework.gradient_buffer_fp32 else e
            self.moment = 4.0
            self.optimizer = 4.0 * (1 + values) if values else 0.0
            self.step = 4.0 - self.gradients  # Adam works on fp32 gradients, of its own part alone
        elif precision == "fp32" and self.zero < 3:
            self.casts = self.low  # kept by autocast from forward to backward
        if self.frozen:  # nothing updates them: as the matmuls read them
            self.weights = 1.0 if layout.eight_bit else self.low
            self.casts = 0.0
        self.layer_weights = self.weights  # bytes of a weight of a layer
        if train.weight_precision:
            # Transformer Engine keeps 8-bit copies of layer weights from the first micro-batch to the update. They are
            # the weights themselves if those are stored in 8 bits.
            copies = _low_copies(layout) if layout.eight_bit and framework.fused and self.zero < 3 else 0.0
            stored = read_table("memory.json")["weight_bytes"][train.weight_precision]
            self.layer_weights = stored + copies if stored > 1 else max(stored, copies)

    @property
    def state_bytes(self) -> StateBytes:
        moments = self.moment * self.moments
        return StateBytes(self.layer_weights, self.gradients, self.optimizer - moments, moments)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights."""
        return self.layout.dp.size

    @property
    def divides_gradients(self) -> bool:
        """Whether ZeRO leaves a rank a part of the gradients."""
        return self.zero >= 2 and max(self.shards, self.expert_shards) > 1

    @property
    def gathers(self) -> str:
        """When divided weights are gathered; see RankLayout."""
        return self.layout.gathers

    @property
    def reduces_every_microbatch(self) -> bool:
        """Gradients are reduced after every micro-batch, not after the last alone."""
        if self.gathers != "never":
            return self.gathers == "every pass" and not self.accumulates_whole
        framework = self.layout.framework
        at_the_end = framework.keeps_weights_in_pipeline and self.layout.parallel.pp > 1
        always = framework.reduces_always and not at_the_end
        return always or (framework.reduces_divided and self.zero == 2)

    @property
    def accumulates_whole(self) -> bool:
        """Gradients that ZeRO 3 would divide are added up whole, and divided after the last micro-batch (`no_sync`)."""
        asked = self.layout.parallel.no_sync and self.gathers == "every pass"
        return asked and self.layout.train.microbatches > 1

    @property
    def reduction(self) -> str:
        """The collective that adds up gradients."""
        whole = self.layout.train.optimizer == "muon" and self.zero == 1  # its matrices are shared out, not cut
        scatters = self.zero == 3 or (self.zero and self.layout.framework.scatters and not whole)
        return "reduce_scatter" if scatters else "all_reduce"

    def trained(self, parameters: Parameters) -> Parameters:
        """Those that have gradients: adapters alone, where there are some."""
        return Parameters(parameters.adapters, 0.0) if self.frozen else Parameters(*parameters[:2])

    def updated(self, parameters: Parameters) -> float:
        """How many of them one rank updates, and keeps the optimizer's state of."""
        common, experts, _ = self.trained(parameters)
        return common / self.shards + experts / self.expert_shards

    def held(self, parameters: Parameters) -> float:
        """How many of them one rank holds between steps."""
        common, experts, adapters = parameters
        if self.zero < 3:
            return common + experts + adapters
        return (common + adapters) / self.shards + experts / self.expert_shards

    def trained_number(self, parameters: Parameters) -> float:
        """How many have gradients."""
        return parameters.adapters if self.frozen else parameters.common + parameters.experts

    def gradient_bytes(self, parameters: Parameters) -> float:
        """Bytes of their gradients that a rank holds on the GPU, once ZeRO has divided them."""
        if self.zero >= 2:
            return self.gradients * self.stays * self.updated(parameters)
        return self.gradients * self.trained_number(parameters)

    @property
    def stays(self) -> float:
        """The share of the optimizer's state that is on the GPU, not on the host."""
        return 0.0 if self.offloads_weights else 1.0 - self.layout.train.offload_optimizer

    @property
    def offloads_weights(self) -> bool:
        """Weights, with gradients and state, are on the host between their gathers."""
        return self.layout.train.offload_weights and self.gathers != "never"

    def states(self, parameters: Parameters, vectors: float = 0.0, root: float = 0.0) -> States:
        """Bytes that a rank holds of these parameters on the GPU.

        `vectors` of them have one moment more; `root` of them, the embedding and the output matrix, are in no layer.

        Gradients that ZeRO divides go to the host together with the state (ZeRO-Offload, FSDP); those that it does not
        divide stay in their buffer (Megatron).
        """
        return States(
            0.0 if self.offloads_weights else self._weight_bytes(parameters, root),
            self.gradient_bytes(parameters),
            self.optimizer * self.stays * self.updated(parameters) + self.moment * self.stays * vectors / self.shards,
        )

    def _weight_bytes(self, parameters: Parameters, root: float) -> float:
        outside = Parameters(root, 0.0, parameters.adapters)
        layers = Parameters(parameters.common - root, parameters.experts)
        return self.layer_weights * self.held(layers) + max(self.weights, self.low) * self.held(outside)


def _low_copies(layout: RankLayout) -> float:
    """Bytes of the 8-bit copies of one weight: one per direction, unless the GPU multiplies either from one copy."""
    by_tensor = layout.train.precision == "fp8" and layout.train.fp8_scaling == "tensor"
    return 1.0 if by_tensor and layout.setup.cluster.accelerator.family == "blackwell" else 2.0
