"""Predicts the ten runs of arXiv 2509.22832 from the operator and NCCL samples alone, and says what each part is worth.

    python benchmarks/ten_runs.py

GPT-NeoX with ZeRO-1 on DeepSpeed: five configurations on Perlmutter (A100, four GPUs a node) and on Vista (GH200, one).
The operators' times are those of the cost models a100 and gh200, the collectives' those of the sampled networks. None
of the measured steps was used for anything but the error column.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from lumos.cost.in_step import in_step_factors
from lumos.cost.operator_model import cost_model
from lumos.graph.graph import Edges, Graph, Rule, make_graph
from lumos.graph.simulate import simulate
from lumos.program.operators import Collective, Group, Operator
from lumos.program.rank_layout import RankLayout
from lumos.setup.frameworks import framework_named
from lumos.setup.setup import Setup
from neox import IDLE_HOST, Costs, Details, Host, NeoxLayer, Recipe, Task, Tasks, elapsed_us
from sampled_network import sampled_network

SITES = {"perlmutter": ("a100", 4), "vista": ("gh200", 1)}

# NeoX's configuration files: 20B.yml for GPT-20B; llama/train_config.yml and its like for the others.
GPT = Recipe(rotary_share=0.25, fused_gelu=True, attention_bias=True, partitioned=False)
LLAMA = Recipe(partitioned=True)


class Run(NamedTuple):
    """One configuration, and its measured step and the published prediction on each site, in seconds."""

    name: str
    recipe: Recipe
    layers: tuple[int, int, int]  # of the first, every middle and the last stage
    pp: int
    tp: int
    dp: int
    shape: dict[str, int | str | bool]
    seq: int
    microbatches: int
    measured: dict[str, float]
    published: dict[str, float]


_GPT_20B: dict[str, int | str | bool] = {"hidden": 6144, "heads": 64, "norm": "layer", "parallel_residual": True}
_LLAMA_13B: dict[str, int | str | bool] = {"hidden": 5120, "heads": 40, "norm": "rms", "parallel_residual": False}
_LLEMMA_7B: dict[str, int | str | bool] = {"hidden": 4096, "heads": 32, "norm": "rms", "parallel_residual": False}


def _sites(perlmutter: float, vista: float) -> dict[str, float]:
    return {"perlmutter": perlmutter, "vista": vista}


RUNS = (
    Run("GPT-20B 4-4-8", GPT, (11, 12, 9), 4, 4, 8, _GPT_20B, 2048, 16, _sites(17.370, 7.129), _sites(15.838, 6.476)),
    Run("GPT-20B 4-8-4", GPT, (11, 12, 9), 4, 8, 4, _GPT_20B, 2048, 16, _sites(42.533, 6.350), _sites(44.210, 5.387)),
    Run("GPT-20B 8-4-4", GPT, (5, 6, 3), 8, 4, 4, _GPT_20B, 2048, 16, _sites(9.239, 4.292), _sites(8.696, 3.932)),
    Run("LLaMA-13B 4-8-2", LLAMA, (10, 11, 8), 4, 8, 2, _LLAMA_13B, 2048, 16,
        _sites(48.385, 6.761), _sites(45.989, 6.151)),
    Run("Llemma-7B 4-2-2", LLAMA, (8, 9, 6), 4, 2, 2, _LLEMMA_7B, 4096, 8, _sites(9.575, 5.040), _sites(9.700, 4.779)),
)  # fmt: skip


ALL, PROFILED = Details(), Host()


@dataclass(frozen=True)
class Way:
    """How the step is put together; every field can be turned off to see what it is worth."""

    details: Details = ALL
    host: Host = PROFILED
    exchanges: bool = True  # sends block the sender, too, and what arrives in parts is gathered
    mask: bool = True  # the attention mask travels with the activations, as fp16
    crowded: bool = True  # all GPUs of a node communicate at once
    in_step: bool = True  # matrix products inside a step, against the same alone


PLAIN = Way(Details(*(False for _ in fields(Details))), IDLE_HOST, False, False, False, False)


def setup_of(run: Run, site: str) -> Setup:
    gpu, gpus_per_node = SITES[site]
    first, middle, last = run.layers
    layers = [first, *[middle] * (run.pp - 2), last]
    hidden = int(run.shape["hidden"])
    model = {**run.shape, "layers": sum(layers), "ffn": 4 * hidden, "vocab": 50257, "gated": False}
    attention = "flash" if run.name.startswith("Llemma") else "unfused"
    train = {"seq": run.seq, "micro_batch": 4, "microbatches": run.microbatches, "precision": "fp16"}
    return Setup.model_validate({
        "model": {**model, "positions": "rotary", "activation": "gelu", "tied": False},
        "train": {**train, "recompute": "full", "framework": "neox", "attention": attention},
        "parallel": {"tp": run.tp, "pp": run.pp, "dp": run.dp, "zero": 1, "stage_layers": layers},
        "cluster": {"gpu": gpu, "gpus": run.tp * run.pp * run.dp, "gpus_per_node": gpus_per_node},
    })  # fmt: skip


class Stages:
    """The times of one run's stages, in microseconds."""

    def __init__(self, run: Run, site: str, way: Way) -> None:
        setup = setup_of(run, site)
        gpu = SITES[site][0]
        conditions = in_step_factors(setup.cluster.accelerator)
        self.run, self.way, self.layout = run, way, RankLayout(setup, framework_named("neox"))
        matrix = conditions.matrix if way.in_step else 1.0
        self.costs = Costs(
            cost_model(gpu), sampled_network(site, crowded=way.crowded), matrix, conditions.launch_gap_us
        )
        self.layer = NeoxLayer(self.layout, run.recipe, way.details, self.costs.model)
        self.layers = list(setup.parallel.stage_layers)

    def _once(self, tasks: Tasks, per_launch: float) -> float:
        """Outside the checkpoints nobody waits for the host."""
        return elapsed_us([(tasks, per_launch)], self.costs, self.way.host._replace(boundary=0.0))

    def forward(self, stage: int) -> float:
        layer, host = self.layer, self.way.host
        time = self.layers[stage] * elapsed_us([(layer.forward(), host.python)], self.costs, host)
        if stage == 0:
            time += self._once(layer.embedding(), host.python)
        elif self.way.exchanges:
            time += self._once(layer.exchanged(), host.python)
        if stage == len(self.layers) - 1:
            time += self._once(layer.head(), host.python)
        return time

    def backward(self, stage: int) -> float:
        layer, host = self.layer, self.way.host
        again = [(layer.gathered(), host.python), (layer.forward(), host.python), (layer.backward(), host.autograd)]
        time = self.layers[stage] * elapsed_us(again, self.costs, host)
        if stage == 0:
            time += self._once(layer.embedding_backward(), host.autograd)
        if stage == len(self.layers) - 1:
            time += self._once(layer.head_backward(), host.autograd)
        elif self.way.exchanges:  # the stage's own output, and its gradient
            time += self._once([*layer.exchanged(), *layer.exchanged()], host.python)
        return time

    def _network_us(self, kind: str, size: float, group: Group) -> float:
        return self.costs.network.us(Collective(kind, size, group))

    def _send(self, elements: float) -> float:
        size = float(elements * self.layout.element)
        return self._network_us("p2p", size, self.layout.pp) + self.way.host.python

    def activations(self) -> float:
        """A rank's part of them, and the mask."""
        mask = self._send(self.layout.seq**2) if self.way.mask else 0.0
        return mask + self.gradients()

    def gradients(self) -> float:
        return self._send(self.layout.tokens * self.layout.model.hidden / self.layout.parallel.tp)

    def parameters(self, stage: int) -> float:
        model, tp = self.layout.model, self.layout.parallel.tp
        ends = (stage == 0) + (stage == len(self.layers) - 1)
        layer = (model.attention_parameters + model.mlp_parameters(model.ffn)) / tp + 2 * model.norm_parameters
        return self.layers[stage] * layer + ends * self.layout.vocab * model.hidden

    def reduction(self, stage: int) -> float:
        """Gradients as fp16, nothing beside it: DeepSpeed turns `overlap_comm` off in pipelines."""
        return self._network_us("all_reduce", 2 * self.parameters(stage), self.layout.dp)

    def update(self, stage: int) -> float:
        """Adam on a rank's share of fp32 states, with unscaling, clipping, the norm and both casts: 54 bytes each."""
        share = self.parameters(stage) / self.layout.parallel.dp
        stream = Task(Operator("stream", (round(54 * share),), "fp16"))
        return self.costs.us(stream) + 20 * self.way.host.python

    def publication(self, stage: int) -> float:
        return self._network_us("all_gather", 2 * self.parameters(stage), self.layout.dp)


# ---------------------------------------------------------------------- the pipeline, as DeepSpeed runs it
class Order(NamedTuple):
    """One instruction of a stage."""

    what: str  # forward, backward, send …, receive …
    microbatch: int


def orders_of(stage: int, stages: int, microbatches: int) -> list[Order]:
    """DeepSpeed's TrainSchedule: 1F1B in lockstep, gradients exchanged before activations at every step."""
    orders: list[Order] = []
    before = -1
    for step in range(2 * (microbatches + stages - 1)):
        now, is_forward = _slot(step, stage, stages)
        valid, was_valid = 0 <= now < microbatches, 0 <= before < microbatches
        if is_forward and stage > 0:
            orders += [Order("send gradients", before)] * was_valid + [Order("receive activations", now)] * valid
        if not is_forward and stage + 1 < stages:
            orders += [Order("receive gradients", now)] * valid + [Order("send activations", before)] * was_valid
        if valid:
            orders.append(Order("forward" if is_forward else "backward", now))
        before = now
    return orders


def _slot(step: int, stage: int, stages: int) -> tuple[int, bool]:
    """Which micro-batch a stage works on, and whether forward."""
    if (step - stage) % 2 == 0:
        return (step - stage) // 2, True
    return (step + stage + 1) // 2 - stages, False


_OTHER_SIDE = {"send activations": ("receive activations", 1), "send gradients": ("receive gradients", -1)}


def pipeline(stages: Stages) -> Graph:
    """A lane a stage. Both sides of a transfer start together and last equally long; all meet before the update."""
    way, count = stages.way, len(stages.layers)
    lanes = [orders_of(stage, count, stages.run.microbatches) for stage in range(count)]
    size = [len(lane) + 3 for lane in lanes]  # and: reduce, update, publish
    first = np.concatenate([[0], np.cumsum(size)])
    at = {(stage, order): int(first[stage]) + i for stage, lane in enumerate(lanes) for i, order in enumerate(lane)}
    transfer = {"activations": stages.activations(), "gradients": stages.gradients()}
    duration: list[float] = []
    edges: list[tuple[int, int]] = []
    for stage, lane in enumerate(lanes):
        turns = {"forward": stages.forward(stage), "backward": stages.backward(stage)}
        for order in lane:
            verb, _, load = order.what.partition(" ")
            blocks = bool(load) and (way.exchanges or verb == "receive")
            duration.append(turns[order.what] if not load else transfer[load] if blocks else 0.0)
            if order.what in _OTHER_SIDE:
                what, step = _OTHER_SIDE[order.what]
                here, there = at[stage, order], at[stage + step, Order(what, order.microbatch)]
                edges.append((here - 1, there))
                if way.exchanges:
                    edges.append((there - 1, here))
        duration += [stages.reduction(stage), stages.update(stage), stages.publication(stage)]
    reduced, updated = first[1:] - 3, first[1:] - 2
    edges += [(int(r), int(u)) for i, r in enumerate(reduced) for j, u in enumerate(updated) if i != j]
    started = [(s, t) for s, t in edges if s not in first[:-1] - 1]  # nothing comes before the first instruction
    source, target = np.array(started).T
    return make_graph(first, 1e3 * np.array(duration), Edges.of(source, target, Rule.EVENT))


def predict_s(run: Run, site: str, way: Way | None = None) -> float:
    """The predicted step, in seconds."""
    return simulate(pipeline(Stages(run, site, way or Way()))).span / 1e9


# ---------------------------------------------------------------------- the tables
def _without(way: Way, part: str) -> Way:
    if part == "host":
        return replace(way, host=IDLE_HOST)
    if part in {field.name for field in fields(Details)}:
        return replace(way, details=replace(way.details, **{part: False}))
    return replace(way, **{part: False})  # type: ignore[arg-type]


PARTS = {
    "host": "the host between and inside synchronised layers",
    "exchanges": "transfers that block both stages, gathers of what they bring",
    "mask": "the attention mask that travels along",
    "crowded": "all GPUs of a node on the network at once",
    "in_step": "matrix products inside a step, against alone",
    "small_kernels": "copies, bias adds and sums that were not sampled",
    "accumulation": "weight gradients added up over micro-batches",
    "rotary": "rotary positions as run, not as sampled",
    "narrow_norm": "RMS norm with fp16 weights",
    "causal": "flash attention with its mask",
    "gathered": "layer inputs kept in parts",
}


def error_pct(run: Run, site: str, way: Way | None = None) -> float:
    return 100 * (predict_s(run, site, way) / run.measured[site] - 1)


def _mean(site: str, way: Way) -> float:
    return float(np.mean([abs(error_pct(run, site, way)) for run in RUNS]))


def main() -> None:
    print("| site | run (PP-TP-DP) | measured s | predicted s | error % | published error % |")
    print("|---|---|---|---|---|---|")
    for site in SITES:
        for run in RUNS:
            predicted, measured = predict_s(run, site), run.measured[site]
            published = 100 * (run.published[site] / measured - 1)
            error = 100 * (predicted / measured - 1)
            print(f"| {site} | {run.name} | {measured:.3f} | {predicted:.3f} | {error:+.1f} | {published:+.1f} |")
    for site in SITES:
        published = float(np.mean([abs(100 * (run.published[site] / run.measured[site] - 1)) for run in RUNS]))
        print(f"| {site} | **mean** | | | **{_mean(site, Way()):.2f}** | {published:.2f} |")
    print("\n| left out | " + " | ".join(f"{site}, mean error % (runs)" for site in SITES) + " |\n|---|---|---|")
    for name, way in [
        ("nothing", Way()),
        *((text, _without(Way(), part)) for part, text in PARTS.items()),
        ("all of them", PLAIN),
    ]:
        cells = []
        for site in SITES:
            errors = " ".join(f"{error_pct(run, site, way):+.1f}" for run in RUNS)
            cells.append(f"{_mean(site, way):.2f} ({errors})")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
