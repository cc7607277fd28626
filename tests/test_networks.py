"""Networks: values by hand, laws, tiers and placement, the keys of a setup, and published collectives held apart."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import lumos_here
from lumos import read_setup
from lumos.chakra.file_format import COLLECTIVES, ChakraFile, Node, NodeType
from lumos.chakra.foreign_prediction import ForeignWork
from lumos.costs.costs import costs_of
from lumos.costs.energy import in_step_factors
from lumos.costs.network import Fabric, Network, Tier, network_of
from lumos.data_files import read_table
from lumos.described.transfers import Transfer
from lumos.dry_run.dry_step import DryStep
from lumos.dry_run.recorded_step import Recording
from lumos.prediction.prediction import predict
from lumos.program.layout import RankLayout
from lumos.program.op import Op, Tensor
from lumos.program.operators import Collective, Group
from lumos.setup import Setup, gpu_named, mistakes_in, preset_named
from lumos.setup.constraints import checked_setup, warnings_in
from lumos.setup.frameworks import framework_named
from lumos.step.step import simulate_step
from plain_network import PLAIN_HABITS, plain_network

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "calibration"))
import fit_collectives  # noqa: E402

laws = settings(max_examples=150)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
NODE, ADAPTER = 100.0, 10.0  # bytes per microsecond
groups = st.integers(0, 3).flatmap(
    lambda inside: st.integers(0, 6).map(lambda nodes: Group((1 << inside) * (1 << nodes), 1 << inside))
)
gpus = st.sampled_from(("a100", "h100", "h200", "b200", "gb200", "mi300x", "gh200"))
fabrics = st.sampled_from(tuple(read_table("fabrics.toml")))


def us(network: Network, kind: str, group: Group, size: float = 1000.0) -> float:
    return network.us(Collective(kind, size, group))


def network(gpu: str = "h100", fabric: str = "infiniband", **changes: Any) -> Network:
    """That of a cluster of this GPU, with other keys of `[cluster]`."""
    setup = described(gpu=gpu, fabric=fabric, **changes)
    return network_of(setup.cluster.accelerator, fabric, in_step_factors(gpu_named(gpu)), setup.cluster)


def described(parallel: dict[str, Any] | None = None, **cluster: Any) -> Setup:
    """llama3-8b; what the chosen keys do not say is derived."""
    sections = {
        "model": dict(preset_named("llama3-8b").keys), "train": {"seq": 2048}, "parallel": parallel or {"dp": 64},
        "cluster": {"gpu": "h100"} | cluster,
    }  # fmt: skip
    return checked_setup(sections)


def layout(parallel: dict[str, Any], **cluster: Any) -> RankLayout:
    return RankLayout(described(parallel, **cluster), framework_named("megatron"))


# ---------------------------------------------------------------------- values by hand
def test_a_ring_inside_a_node_passes_all_but_one_part_of_the_tensor() -> None:
    plain = plain_network(NODE, ADAPTER, penalty=2.0)
    assert us(plain, "all_reduce", Group(4, 4)) == pytest.approx(2 * (2 * 3 / 4 * 1000 / 100))
    for kind in ("all_gather", "reduce_scatter"):
        assert us(plain, kind, Group(4, 4)) == pytest.approx(2 * (3 / 4 * 1000 / 100))


def test_every_rank_of_a_node_brings_its_adapter_up_to_the_links_inside() -> None:
    """Bytes per microsecond between nodes: 10 for every rank in a node, at most the 100 that reach them inside."""
    plain = plain_network(NODE, ADAPTER)
    for group, bandwidth in ((Group(4, 2), 20), (Group(32, 16), 100), (Group(2, 1), 10)):
        assert us(plain, "all_gather", group) == pytest.approx((group.size - 1) / group.size * 1000 / bandwidth)


def test_two_nodes_need_only_half_of_what_a_ring_sends_between_them_if_they_are_a_tree() -> None:
    """Each of two domains sends the tensor once; one in the middle of a larger tree sends it twice."""
    trees = plain_network(1e9, ADAPTER, fabric=Fabric())
    assert us(trees, "all_reduce", Group(2, 1)) == pytest.approx(100)
    assert us(trees, "all_reduce", Group(16, 8)) == pytest.approx(1000 / 80)
    rings = plain_network(1e9, ADAPTER)
    assert us(rings, "all_reduce", Group(16, 8)) == pytest.approx(2 * 15 / 16 * 1000 / 80)
    assert us(trees, "all_reduce", Group(64, 8)) == pytest.approx(2 * 63 / 64 * 1000 / 80), "a ring sends less"


def test_a_ring_has_a_step_for_every_rank_and_a_tree_one_for_every_doubling_of_nodes() -> None:
    """What leaves the domain sets the pace of the whole ring: every step waits for the slowest link."""
    slow = PLAIN_HABITS.protocols[0] | {"base_us": 3.0, "ring_us": 5.0, "tree_us": 7.0, "tree_far_us": 13.0}
    habits = dataclasses.replace(PLAIN_HABITS, protocols=(slow,))
    rings, trees = (
        plain_network(1e15, 1e15, habits=habits, fabric=Fabric(trees=trees, relay_us=17.0)) for trees in (False, True)
    )
    assert us(rings, "all_gather", Group(4, 4)) == pytest.approx(3 + 3 * 5)
    assert us(rings, "all_gather", Group(16, 4)) == pytest.approx(3 + 15 * 17)
    assert us(rings, "all_reduce", Group(16, 4)) == pytest.approx(3 + 30 * 17)
    assert us(trees, "all_reduce", Group(16, 4)) == pytest.approx(3 + 2 * 3 * 7 + 2 * 2 * 13)


def test_a_crowded_fabric_slows_all_reduce_with_the_number_of_nodes() -> None:
    crowded = plain_network(1e9, ADAPTER, fabric=Fabric(crowding=0.5))
    for nodes, factor in ((2, 1), (8, 2), (32, 4)):
        sent = 1 if nodes == 2 else 2
        tree = sent * 1000 / 80 * factor
        ring = 2 * (1 - 1 / (8 * nodes)) * 1000 / 80
        assert us(crowded, "all_reduce", Group(8 * nodes, 8)) == pytest.approx(min(tree, ring))


def test_small_messages_have_little_latency_and_large_ones_all_the_bandwidth() -> None:
    """NCCL takes the fastest of its protocols."""
    here = network()
    protocols = here.habits.protocols
    alone = [
        dataclasses.replace(here, habits=dataclasses.replace(here.habits, protocols=(protocol,)))
        for protocol in protocols
    ]
    for size, best in ((1e3, 0), (1e9, 2)):
        each = [us(one, "all_gather", Group(8, 8), size) for one in alone]
        assert us(here, "all_gather", Group(8, 8), size) == min(each)
        assert each.index(min(each)) == best


def test_all_to_all_uses_all_tiers_at_once() -> None:
    """Of eight ranks three more are in the node, and four in others: the slower part decides."""
    assert us(plain_network(NODE, ADAPTER), "all_to_all", Group(8, 4)) == pytest.approx(1000 * 4 / 8 / 10)
    assert us(plain_network(NODE, 1e9), "all_to_all", Group(8, 4)) == pytest.approx(1000 * 3 / 8 / 100)


def test_a_message_inside_a_node_gets_few_channels_up_to_some_size() -> None:
    """B200: 85 GB/s up to 64 MiB, then no more time until the link is full (published, data/network.json)."""
    here = dataclasses.replace(network("b200"), penalty=1.0)
    small, edge, half, full = (
        us(here, "p2p", Group(2, 2), float(size)) for size in (1 << 24, 1 << 26, 1 << 28, 1 << 32)
    )
    assert small == pytest.approx(9.3 + (1 << 24) / 85e3)
    assert edge == half == pytest.approx(9.3 + (1 << 26) / 85e3)
    assert full == pytest.approx(9.3 + (1 << 32) / (900e3 * here.habits.exchange_share))


def test_boards_of_four_have_no_switch() -> None:
    """Two of four A100 have a third of their links to each other: 75 of 225 GB/s as measured (arXiv 2509.22832)."""
    board, switched = network("a100", gpus_per_node=4), network("a100")
    assert [board.near(2), board.near(4)] == pytest.approx([100e3, 300e3])
    assert switched.near(2) == switched.near(8) == pytest.approx(300e3)
    assert network("a100", gpus_per_node=4, nvswitch=True).near(2) == pytest.approx(300e3)
    assert network("mi300x").near(2) == pytest.approx(network("mi300x").near(8) / 7)
    assert network("gb200").mesh == 0, "its domain is a rack with switches"


def test_switches_that_reduce_help_all_reduce_alone() -> None:
    with_them, without = network("h100", sharp=True), network("h100", nvls=False)
    for group in (Group(8, 8), Group(64, 8)):
        assert us(with_them, "all_reduce", group, 1e9) < us(without, "all_reduce", group, 1e9)
        assert us(with_them, "all_gather", group, 1e9) == us(without, "all_gather", group, 1e9)
    assert network("a100").nvls == 0.0
    tree, sharp = network("h100"), network("h100", sharp=True)
    assert us(sharp, "all_reduce", Group(512, 8), 1e6) < us(tree, "all_reduce", Group(512, 8), 1e6), "no rounds"


# ---------------------------------------------------------------------- tiers and placement
def test_a_group_has_the_share_of_the_uplinks_that_its_members_bring() -> None:
    """Two nodes of four under a leaf, uplinks of a quarter: rings of two such nodes have half of the adapters' rate."""
    plain = plain_network(1e9, ADAPTER, ADAPTER / 4)
    for below, rate in ((8, 10 * 8 / 4), (4, 10.0), (16, 40.0), (32, 40.0)):
        group = Group(32, 4, (below,))
        assert us(plain, "all_gather", group) == pytest.approx(31 / 32 * 1000 / rate)
    assert us(plain, "all_to_all", Group(32, 4, (8,))) == pytest.approx(1000 * 24 / 32 / 2.5)
    assert us(plain, "p2p", Group(2, 1, (1,))) == pytest.approx(1000 / 2.5)
    assert us(plain, "p2p", Group(2, 1, (2,))) == pytest.approx(1000 / 10), "both under one leaf"


@pytest.mark.parametrize(
    ("parallel", "cluster", "name", "wanted"),
    [
        ({"tp": 8, "dp": 16}, {"leaf_gpus": 32}, "dp", Group(16, 1, (4,))),
        ({"tp": 8, "dp": 16}, {"leaf_gpus": 32, "rail_aligned": True}, "dp", Group(16, 1, (16,))),
        ({"tp": 8, "dp": 4, "pp": 4, "order": "tp-cp-pp-dp"}, {"leaf_gpus": 32}, "dp", Group(4, 1, (1,))),
        ({"tp": 2, "dp": 4, "pp": 4}, {}, "dp", Group(4, 4)),
        ({"tp": 2, "dp": 4, "pp": 4, "order": "tp-cp-pp-dp"}, {}, "dp", Group(4, 1)),
        ({"tp": 4, "dp": 4}, {"gpu": "a100-pcie"}, "tp", Group(4, 2, (4,))),  # NVLink joins two of eight
        ({"tp": 4, "dp": 4}, {"gpu": "a100-pcie"}, "dp", Group(4, 1, (2,))),
    ],
)
def test_ranks_share_the_links_that_their_order_gives_them(
    parallel: dict[str, Any], cluster: dict[str, Any], name: str, wanted: Group
) -> None:
    assert getattr(layout(parallel, **cluster), name)._replace(stride=1) == wanted


@pytest.mark.parametrize(
    ("parallel", "cluster", "wanted"),
    [
        ({"tp": 2, "dp": 2, "pp": 4}, {}, [Group(2, 2), Group(2, 1), Group(2, 2)]),  # two stages in a node
        ({"tp": 2, "dp": 4, "pp": 4, "order": "tp-cp-pp-dp"}, {}, [Group(2, 2)] * 3),
        ({"tp": 2, "dp": 3, "pp": 4}, {}, [Group(2, 1)] * 3),  # of stages of six ranks, two ranks are in the next node
        ({"tp": 2, "dp": 4, "pp": 3, "order": "tp-cp-pp-dp"}, {}, [Group(2, 1)] * 2),  # in one replica or another
        ({"tp": 8, "dp": 4, "pp": 4}, {"leaf_gpus": 32}, [Group(2, 1, (1,))] * 3),
        ({"tp": 8, "dp": 4, "pp": 4, "order": "tp-cp-pp-dp"}, {"leaf_gpus": 32}, [Group(2, 1, (2,))] * 3),
        ({"tp": 8, "pp": 4}, {"leaf_gpus": 16}, [Group(2, 1, (2,)), Group(2, 1, (1,)), Group(2, 1, (2,))]),
        ({"pp": 4}, {"gpu": "a100-pcie"}, [Group(2, 2, (2,)), Group(2, 1, (2,)), Group(2, 2, (2,))]),
    ],
)
def test_messages_between_two_stages_go_through_the_links_between_them(
    parallel: dict[str, Any], cluster: dict[str, Any], wanted: list[Group]
) -> None:
    here = layout(parallel, **cluster)
    assert [here.link(stage, stage + 1) for stage in range(parallel["pp"] - 1)] == wanted
    assert [here.link(stage + 1, stage) for stage in range(parallel["pp"] - 1)] == wanted


def test_pairs_of_a_node_are_joined_by_pcie_before_the_network() -> None:
    pcie = network("a100-pcie")
    assert [tier.bandwidth for tier in pcie.tiers] == [300e3, 31.5e3, 12.5e3]
    inside, outside = (us(pcie, "all_gather", Group(8, 2, (held,)), 1e9) for held in (8, 4))
    assert inside < outside


# ---------------------------------------------------------------------- laws
@st.composite
def layouts(draw: st.DrawFn) -> RankLayout:
    """Pipelines in both orders, also such that nodes end in the middle of a stage or of a group."""
    pp = draw(st.integers(2, 6))
    parallel = {
        "tp": draw(st.sampled_from((1, 2, 4, 8))), "cp": draw(st.sampled_from((1, 1, 2))), "pp": pp,
        "dp": draw(st.integers(1, 6)), "order": draw(st.sampled_from(("tp-cp-dp-pp", "tp-cp-pp-dp"))),
        "schedule": draw(st.sampled_from(("1f1b", "1f1b", "dualpipe") if pp % 2 == 0 else ("1f1b",))),
    }  # fmt: skip
    more = {"microbatches": 2 * pp, "framework": "megatron"}
    sections = {"model": dict(preset_named("llama3-8b").keys), "train": {"seq": 2048} | more, "parallel": parallel}
    in_node = draw(st.sampled_from((2, 3, 4, 6, 8, 12)))
    setup = checked_setup(sections | {"cluster": {"gpu": "h100", "gpus_per_node": in_node}})
    return RankLayout(setup, framework_named("megatron"))


@laws
@given(layouts(), st.data())
def test_a_message_stays_in_a_node_if_and_only_if_it_does_on_every_rank(here: RankLayout, data: st.DataObject) -> None:
    one, other = data.draw(st.permutations(range(here.parallel.pp)))[:2]
    places = here.places
    pairs = [(places.rank(number, one), places.rank(number, other)) for number in range(places.of_stage)]
    assert (here.link(one, other).inside == 2) == all(a // here.domain == b // here.domain for a, b in pairs)


@laws
@given(layouts(), st.sampled_from(("tp", "cp", "dp")))
def test_a_collective_stays_in_a_node_if_and_only_if_it_does_on_every_rank(here: RankLayout, name: str) -> None:
    """Also that of two stages which hold the same weights."""
    group: Group = getattr(here, name)
    members = (here.places.members(rank, group.size, group.stride) for rank in range(here.places.world))
    stays = all(len({member // here.domain for member in some}) == 1 for some in members)
    assert (group.nodes == 1) == stays
    assert stays == (not any(here.leaves(rank, group.size, group.stride) for rank in range(here.places.world)))


@laws
@given(gpus, fabrics, st.sampled_from(KINDS), groups, st.floats(1, 1e11), st.floats(1, 100))
def test_more_bytes_never_take_less_time(
    gpu: str, fabric: str, kind: str, group: Group, size: float, factor: float
) -> None:
    here = network(gpu, fabric)
    assert us(here, kind, group, size * factor) >= us(here, kind, group, size) * (1 - 1e-9)


@laws
@given(gpus, fabrics, st.sampled_from(KINDS), groups, st.floats(1, 1e11), st.integers(0, 2), st.floats(1, 100))
def test_more_bandwidth_of_any_tier_is_never_slower(
    gpu: str, fabric: str, kind: str, group: Group, size: float, at: int, factor: float
) -> None:
    here = network(gpu, fabric, leaf_gpus=64, oversubscription=2.0)
    tiers = [
        Tier(tier.bandwidth * (factor if index == at else 1), tier.hop_us) for index, tier in enumerate(here.tiers)
    ]
    group = group._replace(above=(min(group.size, 64),))
    faster = dataclasses.replace(here, tiers=tuple(tiers))
    assert us(faster, kind, group, size) <= us(here, kind, group, size) * (1 + 1e-9)


@laws
@given(fabrics, st.sampled_from(KINDS), groups, st.floats(1, 1e11))
def test_an_oversubscription_of_one_changes_nothing_and_more_is_never_faster(
    fabric: str, kind: str, group: Group, size: float
) -> None:
    flat, same, twice = (
        network("h100", fabric, **more) for more in ({}, {"oversubscription": 1.0}, {"oversubscription": 2.0})
    )
    assert us(flat, kind, group, size) == us(same, kind, group, size)
    assert us(twice, kind, group, size) >= us(flat, kind, group, size)
    if group.nodes == 1:
        assert us(twice, kind, group, size) == us(flat, kind, group, size), "inside a node nobody sees the spine"


@laws
@given(gpus, fabrics, st.booleans(), st.sampled_from(KINDS), st.integers(1, 4), st.integers(0, 5), st.floats(1e3, 1e11))
def test_the_same_ranks_on_more_nodes_are_never_faster(
    gpu: str, fabric: str, reduces: bool, kind: str, inside: int, nodes: int, size: float
) -> None:
    here, ranks = network(gpu, fabric), (1 << inside) * (1 << nodes)
    here = here if reduces else dataclasses.replace(here, nvls=0.0)
    near, far = (us(here, kind, Group(ranks, held), size) for held in (1 << inside, 1 << (inside - 1)))
    assert far >= near * (1 - 1e-9)


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200", "b200"])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("fabric", read_table("fabrics.toml"))
def test_a_second_node_is_never_faster_however_wide_its_adapters(gpu: str, kind: str, fabric: str) -> None:
    """Rings that go on to other nodes are bound by the same links inside as those that stay."""
    here = network(gpu, fabric, inter_gb_s=1000.0)
    one, two = (us(here, kind, Group(size, 8), 544e6) for size in (8, 16))
    assert two >= one


@laws
@given(gpus, fabrics, st.sampled_from(KINDS), groups, st.floats(1, 1e11))
def test_switches_that_reduce_never_make_anything_slower(
    gpu: str, fabric: str, kind: str, group: Group, size: float
) -> None:
    here = network(gpu, fabric)
    without, with_all = dataclasses.replace(here, nvls=0.0), dataclasses.replace(here, sharp=True)
    assert us(with_all, kind, group, size) <= us(here, kind, group, size) <= us(without, kind, group, size)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_send_and_nobody_to_send_to_cost_nothing(kind: str) -> None:
    here = network()
    assert us(here, kind, Group(1, 1)) == us(here, kind, Group(8, 8), 0) == 0
    assert us(here, kind, Group(2, 2), 1.0) > 0


# ---------------------------------------------------------------------- published collectives
def test_collectives_of_sources_held_apart_are_within_an_eighth() -> None:
    """Tables of RDMA networks that nothing was fitted on (docs/networks.md): 10 % on average, none biased by 35 %."""
    model = fit_collectives.Model({})
    rows = [
        row for row in fit_collectives.rows()
        if not row.is_fitted and row.source != "perlmutter" and row.collective.bytes >= fit_collectives.SMALLEST
    ]  # fmt: skip
    assert len({row.table for row in rows}) >= 14
    assert fit_collectives.mean_error(model, rows) < 0.12
    for table in {row.table for row in rows}:
        errors = [model.error(row) for row in rows if row.table == table]
        assert abs(sum(errors) / len(errors)) < math.log(1.35), table


def test_sockets_are_slow_whatever_the_adapters_have() -> None:
    """Perlmutter, 25 GB/s a GPU, without NCCL's plugin: 1.2 GB/s; two clouds: 1.2 and 2.0."""
    model = fit_collectives.Model({})
    rows = [r for r in fit_collectives.rows() if r.source == "perlmutter" and r.collective.group.nodes > 1]
    assert len(rows) > 40
    assert fit_collectives.mean_error(model, rows) < 0.3
    rdma = [row._replace(fabric="infiniband") for row in rows]
    assert fit_collectives.mean_error(model, rdma) > 2


# ---------------------------------------------------------------------- setups
STEP = {"tp": 8, "pp": 4, "dp": 16}


def step_ms(parallel: dict[str, Any] | None = None, **cluster: Any) -> float:
    setup = described((parallel or STEP) | {"zero": 1}, **cluster)
    assert not mistakes_in(setup)
    return predict(setup).step_ms


def test_an_engineers_what_ifs_have_the_expected_sign() -> None:
    usual = step_ms()
    assert step_ms(oversubscription=4.0) > usual
    assert step_ms(leaf_gpus=512, oversubscription=4.0) == pytest.approx(usual), "all replicas are under one leaf"
    one_below, rails = (step_ms(leaf_gpus=32, oversubscription=8.0, rail_aligned=aligned) for aligned in (False, True))
    assert one_below > rails >= usual
    assert step_ms(nvlink_domain=72) < usual
    assert step_ms(inter_gb_s=25.0) > usual
    assert step_ms(fabric="sockets") > 2 * usual
    assert step_ms(fabric="efa") > usual


@pytest.mark.parametrize("fabric", ["tcpxo", "slingshot"])
def test_a_fabric_with_adapters_of_its_own_has_their_bandwidth_unless_another_is_stated(fabric: str) -> None:
    """A3 Mega and Cray systems have 200 Gbit/s a GPU, whatever else H100 has elsewhere."""
    assert network("h100", fabric).tiers[-1].bandwidth == 25e3
    assert network("h100", fabric, inter_gb_s=50.0).tiers[-1].bandwidth == 50e3
    gather = Collective("all_gather", 1e9, Group(64, 8))
    assert network("h100", fabric).us(gather) > 1.3 * network("h100", "infiniband").us(gather)
    [note] = warnings_in(described(fabric=fabric))
    assert "25 GB/s a GPU, not the 50 of h100: set cluster.inter_gb_s" in note
    assert not warnings_in(described(fabric=fabric, inter_gb_s=50.0))
    assert not warnings_in(described({"dp": 8}, fabric=fabric)), "nothing leaves the node"
    assert not warnings_in(described(gpu="a100", fabric=fabric)), "as usual for it"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"fabric": "sockets", "inter_gb_s": 100.0}, "cluster.inter_gb_s = 100 has no effect above 3"),
        ({"leaf_gpus": 12}, "cluster.leaf_gpus = 12 is not a whole number of nodes of 8"),
        ({"nvlink_domain": 6}, "cluster.nvlink_domain = 6 and nodes of 8 do not divide each other"),
        ({"nvlink_domain": 12}, "cluster.nvlink_domain = 12 and nodes of 8 do not divide each other"),
    ],
)
def test_networks_that_nobody_builds_are_noted(keys: dict[str, Any], said: str) -> None:
    [note] = warnings_in(described(**keys))
    assert note.startswith(said)


@pytest.mark.parametrize(
    "keys",
    [{}, {"fabric": "sockets", "inter_gb_s": 1.0}, {"leaf_gpus": 32}, {"leaf_gpus": 12, "rail_aligned": True},
     {"nvlink_domain": 72}, {"gpu": "gb200"}, {"nvlink_domain": 4}],
)  # fmt: skip
def test_usual_networks_are_not_noted(keys: dict[str, Any]) -> None:
    assert not warnings_in(described(**keys))


def test_megatrons_other_order_of_ranks_and_switches_that_reduce_are_read(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    sizes = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --padded-vocab-size 1024"
    ranks = "--world-size 32 --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 32"
    found = []
    for option in ("", " --use-tp-pp-dp-mapping", " --use-sharp"):
        script.write_text(f"torchrun pretrain_gpt.py {sizes} {ranks}{option}\n")
        setup = read_setup(script)
        found.append((setup.parallel.order, setup.cluster.sharp))
    assert found == [("tp-cp-dp-pp", False), ("tp-cp-pp-dp", False), ("tp-cp-dp-pp", True)]


def test_the_command_line_takes_the_keys_and_names_the_way_out_of_mistakes() -> None:
    def asked(*changes: str) -> str:
        arguments = [part for change in changes for part in ("--set", change)]
        done = lumos_here("predict", ROOT / "examples/llama3-70b.toml", *arguments)
        assert done.returncode == (2 if done.stderr else 0)
        return done.stderr or done.stdout

    assert "predicted step" in asked("cluster.leaf_gpus=32", "cluster.oversubscription=2", "cluster.sharp=true")
    assert "set cluster.rail_aligned = true, else at least 8" in asked("cluster.leaf_gpus=4")
    assert "needs cluster.leaf_gpus" in asked("cluster.rail_aligned=true")
    assert "InfiniBand switches" in asked("cluster.sharp=true", "cluster.fabric=roce")
    assert "does not reduce: leave it out" in asked("cluster.nvls=true", "cluster.gpu=a100")
    assert "at least 1" in asked("cluster.oversubscription=0.5")
    assert "use infiniband, roce, efa, tcpxo, slingshot or sockets" in asked("cluster.fabric=token-ring")


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_reduced_in_buckets_only_during_the_backward_pass(zero: int) -> None:
    """nanotron: DDP's buckets without ZeRO, one reduction of the whole buffer after the backward pass with it."""
    sections = {
        "model": dict(preset_named("llama3-8b").keys), "train": {"seq": 2048, "framework": "nanotron"},
        "parallel": {"tp": 2, "dp": 192, "zero": zero}, "cluster": {"gpu": "h100", "gpus": 384, "fabric": "efa"},
    }  # fmt: skip
    assembly = simulate_step(checked_setup(sections)).assembly
    bucket = framework_named("nanotron").bucket_bytes(assembly.transfers.overlap)
    assert bucket == (0.0 if zero else framework_named("nanotron").bucket_mb * 1e6)
    size = 4.0 * assembly.program.stage_parameters(0).common
    whole = assembly.costs.collective_us(Collective("all_reduce", size, assembly.layout.dp))
    transfer = Transfer("all_reduce", assembly.program.stage_parameters(0), 4.0)
    reduced = assembly.transfer_us(transfer)
    assert reduced == pytest.approx(whole) if zero else reduced > 1.2 * whole


def test_deepspeed_reduces_in_buckets_after_the_backward_pass_too() -> None:
    deepspeed = framework_named("deepspeed")
    assert deepspeed.bucket_bytes(beside=False) == deepspeed.bucket_mb * 1e6 > 0


# ---------------------------------------------------------------------- one collective, one cost
@pytest.mark.parametrize("gpu", ["h100", "h100-pcie", "gb200", "gh200", "mi300x"])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_collective_costs_the_same_in_a_setup_a_dry_run_and_a_chakra_file(gpu: str, kind: str) -> None:
    setup, size, ranks = described({"dp": 16}, gpu=gpu), 1 << 26, tuple(range(16))
    prices, layout = costs_of(setup), RankLayout(setup, framework_named("pytorch"))
    expected = prices.cost(Op(kind, work=Collective(kind, float(size), layout.dp))).us
    assert prices.collective_us(Collective(kind, float(size), layout.dp)) == expected

    tensor = Tensor((size // 2,), "bf16", (1,), 2)
    call = Op(kind, (tensor,), (tensor,), "forward", stream=-1, ranks=ranks)
    dry = DryStep(setup, Recording([call], 0, 0, 0, {}, [], {}, {}, 0, world=16), prices)
    assert dry.costs.cost(dry.ops[0]).us == pytest.approx(expected)

    put_in = size // 16 if kind == "all_gather" else size
    node = Node(1, kind, NodeType.COMM_COLL, (), (), 0, 0, "", "1",
                {"comm_type": COLLECTIVES[kind], "comm_size": put_in})  # fmt: skip
    file = ChakraFile(Path("job.0.et"), 0, {}, [node])
    graph = ForeignWork([file], setup, prices)
    graph.__dict__["groups"] = type("Groups", (), {"ranks": lambda *_: ranks, "is_stated": lambda *_: True})()
    assert graph.us(file, node) == pytest.approx(expected)


@given(gpus, st.integers(0, 3), st.integers(0, 2), st.integers(0, 3))
def test_listed_ranks_are_the_group_that_a_layout_makes_of_them(gpu: str, tp: int, cp: int, dp: int) -> None:
    setup = described({"tp": 1 << tp, "cp": 1 << cp, "dp": 1 << dp}, gpu=gpu)
    layout = RankLayout(setup, framework_named("pytorch"))
    for size, stride in ((1 << tp, 1), (1 << cp, 1 << tp), (1 << dp, 1 << tp + cp)):
        block = size * stride
        if size > 1 and (layout.domain % block == 0 or block % layout.domain == 0):  # no domain ends inside the group
            assert layout.group_of(layout.places.members(0, size, stride)) == layout.group(size, stride)
