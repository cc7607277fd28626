"""Laws of the sampled networks, of the synchronised layers of GPT-NeoX, and of DeepSpeed's pipeline."""

from __future__ import annotations

import csv
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lumos.cost.operator_model import cost_model
from lumos.errors import OptionError
from lumos.program.operators import Collective, Group, Operator

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import ten_runs
from neox import IDLE_HOST, Costs, Host, Task, elapsed_us
from sampled_network import SampledNetwork, sampled_network, sampled_networks

GROUPS = {
    "perlmutter": [Group(2, 2), Group(4, 4), Group(2, 1), Group(8, 4), Group(8, 1), Group(16, 4), Group(16, 1)],
    "vista": [Group(2, 1), Group(4, 1), Group(8, 1), Group(16, 1), Group(64, 1)],
}
CASES = [
    (name, kind, group)
    for name, groups in GROUPS.items()
    for group in groups
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "p2p")
    if kind != "p2p" or group.size == 2
]


# ---------------------------------------------------------------------- the networks
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize(("name", "kind", "group"), CASES)
def test_more_bytes_take_longer(name: str, kind: str, group: Group, crowded: bool) -> None:
    network = sampled_network(name, crowded)
    times = [network.us(Collective(kind, size, group)) for size in np.geomspace(1e3, 1e11, 200)]
    assert times[0] > 0
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(times))


@pytest.mark.parametrize("name", sampled_networks())
def test_sampled_medians_are_met(name: str) -> None:
    network = sampled_network(name)
    for (kind, nodes, inside), table in network.tables.items():
        for size, us in zip(table.bytes, table.us, strict=True):
            assert network.us(Collective(kind, size, Group(nodes * inside, inside))) == pytest.approx(us, rel=0.001)


@pytest.mark.parametrize("name", sampled_networks())
def test_rings_explain_the_all_reduces(name: str) -> None:
    """The formula for configurations that were not sampled, on those that were."""
    network = sampled_network(name)
    formula = SampledNetwork(name, network.gpus_per_node, {}, network.rings)
    for (kind, nodes, inside), table in network.tables.items():
        if kind == "all_reduce":
            group = Group(nodes * inside, inside)
            ratio = [formula.us(Collective(kind, b, group)) / t for b, t in zip(table.bytes, table.us, strict=True)]
            assert np.median(ratio) == pytest.approx(1, abs=0.1)


def test_a_rank_alone_and_an_empty_tensor_are_free() -> None:
    network = sampled_network("perlmutter")
    assert network.us(Collective("all_reduce", 1e9, Group(1, 1))) == 0
    assert network.us(Collective("all_reduce", 0.0, Group(8, 4))) == 0


def test_only_groups_that_share_their_nodes_are_crowded() -> None:
    alone, crowded = sampled_network("perlmutter"), sampled_network("perlmutter", crowded=True)
    for group, shares in [(Group(4, 4), False), (Group(8, 4), False), (Group(8, 1), True), (Group(4, 2), True)]:
        work = Collective("all_reduce", 1e9, group)
        assert (crowded.us(work) > 1.01 * alone.us(work)) == shares


def test_a_network_that_was_not_sampled_is_refused() -> None:
    with pytest.raises(OptionError, match="perlmutter, vista"):
        sampled_network("../gpus")


# ---------------------------------------------------------------------- layers
TASKS = [
    Task(Operator("gemm_tn", (8192, 1536, 6144), "fp16")),
    Task(Operator("neox_rotary_fwd", (4, 16, 2048, 96), "fp16"), 4),
    Task(Collective("all_reduce", 1e8, Group(4, 4))),
    Task(Operator("stream", (10**8,), "fp16"), 2, 0.5),
]


@given(st.lists(st.sampled_from(TASKS), min_size=1, max_size=12), st.floats(0, 300), st.floats(0, 1000))
def test_a_layer_takes_what_host_or_gpu_take_at_least_and_both_at_most(
    tasks: list[Task], per_launch: float, boundary: float
) -> None:
    costs = Costs(cost_model("a100"), sampled_network("perlmutter"))
    gpu = sum(costs.us(task) for task in tasks)
    issue = boundary + per_launch * sum(task.launches for task in tasks)
    elapsed = elapsed_us([(tasks, per_launch)], costs, Host(boundary, per_launch, per_launch, 0.0))
    assert max(gpu, issue) <= elapsed * (1 + 1e-9)
    assert elapsed <= (gpu + issue) * (1 + 1e-9)
    assert elapsed_us([(tasks, 0.0)], costs, IDLE_HOST) == pytest.approx(gpu)


# ---------------------------------------------------------------------- the pipeline
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (4, 16), (8, 16), (5, 4)])
def test_every_microbatch_passes_every_stage_once(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        orders = ten_runs.orders_of(stage, stages, microbatches)
        assert len(set(orders)) == len(orders)
        for what in ("forward", "backward"):
            assert [o.microbatch for o in orders if o.what == what] == list(range(microbatches))
        in_flight = np.cumsum([(o.what == "forward") - (o.what == "backward") for o in orders])
        assert 0 <= in_flight.min() <= in_flight.max() <= stages - stage
        sent = [o.microbatch for o in orders if o.what == "send activations"]
        assert sent == (list(range(microbatches)) if stage + 1 < stages else [])


def test_the_ten_runs_are_predicted() -> None:
    """Better than published: 4.98 % and 9.38 %."""
    for site, most in (("perlmutter", 4.0), ("vista", 8.0)):
        errors = [abs(ten_runs.error_pct(run, site)) for run in ten_runs.RUNS]
        assert np.mean(errors) <= most


def test_a_step_lies_between_its_busiest_stage_and_the_sum_of_all() -> None:
    run = ten_runs.RUNS[2]
    for site in ten_runs.SITES:
        stages = ten_runs.Stages(run, site, ten_runs.Way())
        busiest = max(stages.forward(stage) + stages.backward(stage) for stage in range(run.pp))
        step = 1e6 * ten_runs.predict_s(run, site)
        assert run.microbatches * busiest < step < ten_runs.pipeline(stages).duration.sum() / 1e3


@pytest.mark.data
@pytest.mark.parametrize(("site", "file", "kind", "group"), [
    ("Perlmutter", "allreduce_fp16_2_4", "all_reduce", Group(8, 4)),
    ("Perlmutter", "allreduce_large_fp16_8_1", "all_reduce", Group(8, 1)),
    ("Vista", "allreduce_fp16_8_1", "all_reduce", Group(8, 1)),
    ("Vista", "p2p_fp16_2_1", "p2p", Group(2, 1)),
])  # fmt: skip
def test_samples_are_met(shared_data: Path, site: str, file: str, kind: str, group: Group) -> None:
    network = sampled_network(site.lower())
    with (shared_data / "operators" / site / "nccl" / f"{file}.csv").open() as rows:
        ratios = [
            network.us(Collective(kind, 2 * float(row["shape"]), group)) / float(row["dur(us)"])
            for row in csv.DictReader(rows)
        ]
    assert np.median(ratios) == pytest.approx(1, abs=0.02)
    assert np.mean(np.abs(np.array(ratios) - 1)) < 0.06
