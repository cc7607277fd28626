"""The blocks of a traced run in another setup, operator by operator: what is kept, what is priced, what follows."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lumos.analysis.replay import Replay
from lumos.costs.costs import costs_of
from lumos.costs.energy import in_step_factors
from lumos.data_files import read_table
from lumos.described.described import Program
from lumos.prediction.operator_times import operator_times
from lumos.program.op import Measured, Op, Tensor, part_of
from lumos.program.operators import Collective, Group
from lumos.schedules import Phase
from lumos.setup.setup import Setup
from lumos.step.block_timeline import BlockTime, time_of
from lumos.step.step import leads_us, simulate_step
from lumos.traced.cut import CutBlock
from lumos.traced.learned import CalibratedRun, learned_step, loaded_step
from lumos.traced.retarget import TracedBlocks, own_blocks, us_by_kind
from lumos.traced.sizes import Sizes
from lumos.traced.trace_costs import MODES, Learned, TraceCosts, Weights, drawn, trace_costs

TABLE, TABLE_OF_STEPS = read_table("change.json"), read_table("step.json")
T, H, F = 4096, 2048, 5632


def setup(gpu: str = "h200", **changes: Any) -> Setup:
    """Four layers on one GPU: 2 × 2048 tokens."""
    given: dict[str, dict[str, Any]] = {
        "model": {"layers": 4, "hidden": H, "ffn": F, "heads": 16, "vocab": 32000},
        "train": {"seq": 2048, "micro_batch": 2, "microbatches": 1},
        "parallel": {},
        "cluster": {"gpu": gpu},
    }
    return Setup.model_validate(given).replaced(changes)


def tensor(*shape: int) -> Tensor:
    return Tensor(shape, "bf16", tuple(prod(shape[i + 1 :]) for i in range(len(shape))))


def matmul(rows: int = T, inner: int = H, columns: int = F) -> Op:
    return Op(
        "aten.mm.default", (tensor(rows, inner), tensor(inner, columns)), (tensor(rows, columns),), "forward",
        allocates=True,
    )  # fmt: skip


def silu(rows: int = 2048) -> Op:
    return Op("aten.silu.default", (tensor(2, rows, F),), (tensor(2, rows, F),), "forward", allocates=True)


def cut(op: Op, like: str, calls: float, us: float, kernels: float = 1.0) -> Op:
    """An operator that the trace has so many times, each time for so long."""
    return op._replace(calls=calls, measured=Measured(us, kernels, like=like))


def slower(op: Op, us: float) -> Op:
    assert op.measured is not None
    return op._replace(measured=op.measured._replace(us=us))


MATMUL_US, SILU_US, UNKNOWN_US = 150.0, 30.0, 30.0
MATMUL = cut(matmul(), "matrix", 1.0, MATMUL_US)
SILU = cut(silu(), "stream", 2.0, SILU_US)
UNKNOWN = cut(Op("some_kernel", (), (), "forward"), "stream", 1.0, UNKNOWN_US)
WEIGHTS = Weights(4, (((F, H), 8), ((H, F), 4), ((H, H), 16), ((32000, H), 2)))


def blocks(*ops: Op, host: float = 100.0) -> dict[str, CutBlock]:
    """The same operators in every block of a layer, forward and backward; nothing else takes time."""
    layer = CutBlock(ops, host)
    ends = dict.fromkeys(("embedding", "head", "head grad", "embedding grad", "optimizer"), CutBlock((), 0.0))
    return {"forward": layer, "recompute": layer, "backward": layer} | ends


class Changed:
    """The blocks of a traced run in another setup, and what they cost there."""

    def __init__(self, learned: Learned, target: Setup, load: float = 0.0) -> None:
        self.costs = trace_costs(target, learned, load)
        self.blocks = TracedBlocks(self.costs)
        self.program = Program(target).made_by(self.blocks.block)
        self.gap = self.costs.factors.launch_gap_us

    def ops(self, name: str) -> list[Op]:
        chunk = self.program.chunks[0][0]
        phases = (Phase.FORWARD, Phase.BACKWARD)
        every = [*(b for phase in phases for b in self.program.blocks(chunk, phase)), self.program.optimizer(0)]
        return next(block.build() for block in every if block.name == name)

    def us(self, name: str) -> float:
        """Of the GPU, without gaps between kernels, and without what the traced run did not do."""
        measured = [op for op in self.ops(name) if op.measured is not None]
        return sum(self.costs.cost(op).us - op.calls * op.measured.kernels * self.gap for op in measured if op.measured)

    def time(self, name: str) -> BlockTime:
        return time_of(self.ops(name), self.costs)


def changed(target: Setup, *ops: Op, load: float = 0.0, **keys: Any) -> Changed:
    """Blocks of the setup above, in another one."""
    traced = keys.pop("traced", setup())
    return Changed(Learned(traced, blocks(*ops), **keys), target, load)


# ---------------------------------------------------------------------- one operator
@given(
    st.sampled_from(({}, {"model.layers": 9}, {"train.microbatches": 4}, {"train.recompute": "full"})),
    st.floats(1, 999),
)
def test_an_operator_that_does_not_change_keeps_its_measured_time(changes: dict[str, Any], us: float) -> None:
    for op in (MATMUL, SILU, UNKNOWN):
        assert changed(setup(**changes), slower(op, us)).us("forward") == pytest.approx(op.calls * us)


def test_an_operator_that_does_not_change_keeps_its_time_beside_one_that_does() -> None:
    head = cut(matmul(T, H, 32000), "matrix", 1.0, MATMUL_US)
    wider = changed(setup(**{"model.vocab": 64000}), MATMUL, head)
    (same, other) = (op for op in wider.ops("forward") if op.measured is not None)
    assert wider.costs.cost(same).us == pytest.approx(MATMUL_US + wider.gap)
    assert wider.costs.cost(other).us > 1.5 * MATMUL_US
    assert (wider.costs.is_measured(same), wider.costs.is_measured(other)) == (True, False)


def test_a_lower_power_limit_slows_matmuls_of_a_trace_and_leaves_what_moves_data() -> None:
    """600 W leave an H200 469 W above idle: enough for memory-bound kernels, which draw 462 W."""
    less = setup(**{"cluster.power_w": 600.0})
    ratio = in_step_factors(less.cluster.accelerator).matrix / in_step_factors(setup().cluster.accelerator).matrix
    assert ratio > 1.08
    assert changed(less, MATMUL).us("forward") == pytest.approx(MATMUL_US * ratio, rel=0.05)
    assert changed(less, SILU).us("forward") == pytest.approx(2 * SILU_US, rel=0.02)


def test_faster_memory_speeds_up_what_moves_data_and_the_update_of_a_trace() -> None:
    faster = setup(**{"cluster.hbm_tb_s": 9.6})
    assert changed(faster, SILU, weights=WEIGHTS).us("forward") < 0.8 * 2 * SILU_US
    assert update_us(faster, us=5000.0) == pytest.approx(0.5 * 5000, rel=0.05)
    assert update_us(setup(), us=5000.0) == pytest.approx(5000)


def test_an_operator_that_changes_is_its_price_times_what_the_trace_says_of_it() -> None:
    """The ratio is that of `drawn`: between what the trace shows of this operator and what is usual of its family."""
    target = setup(**{"train.micro_batch": 4})
    found = changed(target, MATMUL).us("forward")
    prices, gap = costs_of(setup()), costs_of(setup()).factors.launch_gap_us
    was, now = (prices.kernel_us(op) - gap for op in (matmul(), matmul(2 * T)))
    usual = [TABLE["usual"][family] for family in ("gemm_nn", "gemm_nn")]
    low, high = sorted((now * MATMUL_US / was, now * usual[1]))
    assert low <= found <= high


@pytest.mark.parametrize("mode", MODES)
def test_the_trace_alone_keeps_the_ratio_of_measured_over_priced_time(mode: str) -> None:
    target = setup(**{"train.micro_batch": 4})
    prices, gap = costs_of(setup()), costs_of(setup()).factors.launch_gap_us
    was, now = (prices.kernel_us(op) - gap for op in (matmul(), matmul(2 * T)))
    found = changed(target, MATMUL, mode=mode).us("forward")
    assert (found == pytest.approx(MATMUL_US * now / was)) == (mode == "trace")
    assert found == pytest.approx(2 * MATMUL_US, rel=0.25)


@given(st.floats(50, 1000), st.floats(50, 1000), st.floats(0.5, 2.0), st.sampled_from(("matrix", "stream")))
def test_the_ratio_lies_between_the_usual_one_and_that_of_the_trace(
    was: float, us: float, usual: float, like: str
) -> None:
    for now in (was, 2 * was, 0.1 * was):
        low, high = sorted((usual, us / was))
        assert low * 0.999 <= drawn(like, us, was, now, (usual, usual), 0.0) <= high * 1.001


@given(st.floats(0.6, 1.6))
def test_a_long_kernel_at_the_same_size_is_believed_and_a_short_one_far_away_is_not(ratio: float) -> None:
    """The limits of the weight: 1 and 0."""
    usual = 0.9
    long, short = ("matrix", 1e6 * ratio), ("matrix", 0.01 * ratio)
    assert drawn(*long, 1e6, 1e6, (usual, usual), 0.0) == pytest.approx(ratio, rel=1e-3)
    assert drawn(*short, 0.01, 0.01, (usual, usual), 0.0) == pytest.approx(usual, rel=1e-3)
    assert drawn(*long, 1e6, 1e3, (usual, usual), 0.0) == pytest.approx(usual, rel=1e-3)
    assert drawn(*long, 1e6, 1e3, (usual, usual), 1.0) == pytest.approx(ratio, rel=1e-3), "prices of another GPU"


@given(st.floats(1.01, 8.0), st.floats(1.01, 4.0))
def test_the_farther_the_size_the_less_of_the_trace_is_left(times: float, more: float) -> None:
    near, far = (drawn("matrix", 400.0, 200.0, 200.0 * n, (1.0, 1.0), 0.0) for n in (times, times * more))
    assert 1 <= far <= near <= 2


def test_a_ratio_beyond_ten_compares_two_different_things_and_is_kept() -> None:
    """A price that is of something else than what was launched says only how much it grows."""
    price = costs_of(setup()).kernel_us(matmul())
    grown = changed(setup(**{"train.micro_batch": 4}), slower(MATMUL, 50 * price)).us("forward")
    assert grown == pytest.approx(2 * 50 * price, rel=0.2)


def test_an_operator_without_shapes_follows_the_description_of_its_block() -> None:
    target = setup(**{"train.micro_batch": 4})
    before, after = (
        us_by_kind(own_blocks(Program(one), ())["forward"], costs_of(one))["stream"] for one in (setup(), target)
    )
    assert changed(target, UNKNOWN).us("forward") == pytest.approx(UNKNOWN_US * after / before)


def test_an_operator_that_has_no_price_grows_with_its_bytes() -> None:
    broken = cut(Op("aten.mm.default", (tensor(2, 2048, H),), (), "forward"), "matrix", 1.0, 80.0)
    assert changed(setup(**{"train.seq": 4096}), broken).us("forward") == pytest.approx(160)


def test_where_keys_and_queries_look_alike_half_of_the_work_is_taken_for_keys() -> None:
    rotated = Op("aten.mul.Tensor", (tensor(2, 16, 2048, 128),), (tensor(2, 16, 2048, 128),), "forward")
    fewer = changed(setup(**{"model.kv_heads": 4}), cut(rotated, "stream", 2.0, 40.0)).us("forward")
    assert 40 < fewer < 80


# ---------------------------------------------------------------------- the GPU's clock
def test_matmuls_take_longer_the_more_of_the_step_they_are_on_a_gpu_at_its_power_limit() -> None:
    def matrix_us(gpu: str, load: float) -> float:
        busy = changed(setup(gpu), MATMUL, SILU, load=load, traced=setup(gpu))
        matmuls = [op for op in busy.ops("forward") if op.name == MATMUL.name]
        return sum(busy.costs.cost(op).us for op in matmuls) - busy.gap

    idle, busy = TABLE["clock_load"]
    assert matrix_us("h200", idle) == pytest.approx(MATMUL_US)
    assert matrix_us("h200", busy) == pytest.approx(MATMUL_US * TABLE["clock_factor"]["matrix"][1])
    assert idle < (idle + busy) / 2 < busy
    assert MATMUL_US < matrix_us("h200", (idle + busy) / 2) < matrix_us("h200", busy)
    assert matrix_us("h200", 1.0) == matrix_us("h200", busy), "the clock does not fall for ever"
    assert matrix_us("v100", 1.0) == pytest.approx(MATMUL_US), "no such limit is known of it"


def test_at_the_load_of_the_trace_the_clock_is_that_of_the_trace() -> None:
    for load in (0.1, 0.6, 0.99):
        same = Changed(Learned(setup(), blocks(MATMUL), load=load), setup(), load)
        assert same.us("forward") == pytest.approx(MATMUL_US)


def test_the_load_of_a_step_is_what_its_matmuls_take_of_it() -> None:
    step = loaded_step(setup(), Learned(setup(), blocks(MATMUL, SILU)))
    assert isinstance(step.costs, TraceCosts)
    program = step.assembly.program
    (layer, *_) = program.blocks(program.chunks[0][0], Phase.FORWARD)
    assert step.costs.load == pytest.approx(8 * step.costs.matrix_us(layer.build()) / step.us, rel=0.03)


# ---------------------------------------------------------------------- a block
def test_a_block_takes_its_operators_and_the_gaps_between_kernels() -> None:
    found = changed(setup(), MATMUL, SILU)
    assert found.gap > 0
    assert found.time("forward").us == pytest.approx(MATMUL_US + 2 * SILU_US + 3 * found.gap)
    assert found.time("forward").host_us == pytest.approx(100)


def test_what_a_trace_does_not_show_is_the_setups_own_block() -> None:
    shown = {name: block for name, block in blocks(MATMUL).items() if name != "head"}
    found, own = Changed(Learned(setup(), shown), setup()), own_blocks(Program(setup()), ())
    assert found.ops("head") == own["head"]
    assert found.ops("forward") != own["forward"]
    assert not found.time("embedding").us, "it ran nothing"


def test_what_runs_beside_takes_no_time_of_the_stream_that_computes() -> None:
    found = changed(setup(), MATMUL, SILU._replace(stream=1))
    assert found.time("forward").us == pytest.approx(MATMUL_US + found.gap)


def test_a_slower_gpu_is_slower_at_everything_and_its_host_is_not() -> None:
    known = Learned(setup(), blocks(MATMUL), network={"forward": 2.0, "ranks": 5.0, "p2p": 6.0})
    slow = known.slower(2.0)
    assert (slow.gpu, slow.host, slow.network) == (2, 1, {"forward": 4, "ranks": 10, "p2p": 12})
    us = [Changed(one, setup()).us("forward") for one in (known, slow)]
    assert us[1] == pytest.approx(2 * us[0])


def test_a_slower_host_takes_longer_and_the_gpu_does_not() -> None:
    known = Learned(setup(), blocks(MATMUL))
    one, other = (Changed(some, setup()).time("forward") for some in (known, known.slower_host(3.0)))
    assert (other.host_us, other.us) == pytest.approx((3 * one.host_us, one.us))


def test_communication_that_a_trace_lacks_is_replaced_everywhere() -> None:
    known = Learned(setup(), network={"forward": 3.0, "backward": 4.0, "ranks": 5.0, "p2p": 6.0})
    assert set(known.with_network(0.0).network.values()) == {0}
    assert known.slower_network(2.0).network == {"forward": 6, "backward": 8, "ranks": 10, "p2p": 12}


@given(st.floats(1.0, 300.0), st.sampled_from(({}, {"parallel.tp": 4}, {"parallel.tp": 2})))
def test_the_host_keeps_a_part_of_its_measured_time_whatever_is_taken_away(us: float, changes: dict[str, Any]) -> None:
    known = Learned(setup(), blocks(MATMUL, host=us))
    assert Changed(known, setup(**changes)).time("forward").host_us >= 0.2 * us * 0.999


# ---------------------------------------------------------------------- the optimizer
def update_us(target: Setup, traced: Setup | None = None, us: float = 1000.0) -> float:
    update = cut(Op("aten._fused_adamw_.default", (tensor(F, H),), (), "optimizer"), "stream", 1.0, us, 4.0)
    parts = blocks(MATMUL) | {"optimizer": CutBlock((update,), 50.0)}
    return Changed(Learned(traced or setup(), parts, WEIGHTS), target).us("optimizer")


def test_the_update_follows_the_elements_that_are_updated() -> None:
    fixed = 4 * TABLE["update"]["kernel_us"]
    same = Sizes(setup(), setup())
    inside, outside = WEIGHTS.elements(same, 4)
    assert inside == 4 * (3 * F * H + 4 * H * H)
    assert outside == 2 * 32000 * H
    assert update_us(setup()) == pytest.approx(1000)
    twice = update_us(setup(**{"model.layers": 8}))
    assert twice == pytest.approx(fixed + (1000 - fixed) * (2 * inside + outside) / (inside + outside))
    wide = update_us(setup(**{"model.vocab": 64000}))
    assert wide == pytest.approx(fixed + (1000 - fixed) * (inside + 2 * outside) / (inside + outside))


def test_the_update_does_not_follow_the_tokens() -> None:
    assert update_us(setup(**{"train.micro_batch": 8, "train.microbatches": 4})) == pytest.approx(1000)


@given(st.sampled_from((2, 4, 8, 16)))
def test_ranks_that_share_the_state_update_a_part_of_it(ranks: int) -> None:
    shared = {"parallel.zero": 3, "parallel.dp": ranks}
    fixed = 4 * TABLE["update"]["kernel_us"]
    slower = TABLE["update"]["sharded"]
    assert update_us(setup(**shared)) == pytest.approx(fixed + (1000 - fixed) / ranks * slower)
    more = shared | {"parallel.dp": 2 * ranks}
    assert update_us(setup(**more), setup(**shared)) == pytest.approx(fixed + (1000 - fixed) / 2)


def test_ranks_of_a_divided_copy_share_the_state_among_themselves() -> None:
    hybrid = {"parallel.zero": 3, "parallel.dp": 8, "parallel.shard": 4}
    fixed = 4 * TABLE["update"]["kernel_us"]
    assert update_us(setup(**hybrid)) == pytest.approx(fixed + (1000 - fixed) / 4 * TABLE["update"]["sharded"])
    shape = Sizes(setup(**{"parallel.zero": 3, "parallel.dp": 8}), setup(**hybrid)).weight((F // 8, H), sharded=True)
    assert shape == (F // 4, H)


def test_replicas_update_all_of_it() -> None:
    assert update_us(setup(**{"parallel.dp": 4, "parallel.zero": 0})) == pytest.approx(1000)


# ---------------------------------------------------------------------- weights that are shared
_COPY = Op("fsdp.split_with_sizes_copy", (tensor(8, 1 << 20), tensor(8 << 20)), (), "forward", role="layout")
GATHER = cut(_COPY, "stream", 1.0, 40.0)


def test_a_run_that_shares_no_weights_does_not_gather_them() -> None:
    shared = setup(**{"parallel.zero": 3, "parallel.dp": 8})
    assert changed(shared, GATHER, traced=shared).us("forward") == pytest.approx(40)
    assert changed(setup(), GATHER, MATMUL, traced=shared).us("forward") == pytest.approx(MATMUL_US)


def test_weights_are_gathered_where_the_traced_run_did_not_share_them() -> None:
    shared = setup(**{"parallel.zero": 3, "parallel.dp": 8})
    alone, gathers = (changed(target, MATMUL, weights=WEIGHTS) for target in (setup(), shared))
    forward, backward = (gathers.time(name).us - alone.time(name).us for name in ("forward", "backward"))
    assert forward > 5
    assert backward > forward, "gradients are packed, too"


def test_copies_for_every_peer_are_as_many_as_there_are_peers() -> None:
    shared, more = (setup(**{"parallel.zero": 3, "parallel.dp": ranks}) for ranks in (8, 64))
    flat = tensor(1 << 24)
    op = Op("aten._to_copy.default", (flat,), (flat,), "forward", allocates=True, role="peer")
    copy = cut(op, "stream", 7.0, 20.0)
    same = changed(shared, copy, traced=shared, weights=WEIGHTS).us("forward")
    assert same == pytest.approx(140)
    spread = changed(more, copy, traced=shared, weights=WEIGHTS).us("forward")
    assert spread == pytest.approx(9 / 8 * same, rel=0.3), "nine times as many, each an eighth"


# ---------------------------------------------------------------------- whole programs
def test_a_run_that_knows_nothing_changes_nothing() -> None:
    step, plain = learned_step(setup(), Learned(setup())), simulate_step(setup())
    assert step.us * (1 - step.host_cost) == pytest.approx(plain.us * (1 - plain.host_cost), abs=step.costs.launch_us)


def test_collectives_take_the_traced_share_of_their_modelled_time() -> None:
    known = Learned(setup(), blocks(MATMUL), network={"forward": 4.0, "ranks": 5.0, "p2p": 6.0})
    costs, plain = trace_costs(setup(), known, 0.0), costs_of(setup())
    reduce, send = (Collective(kind, 1e8, Group(2, 2)) for kind in ("all_reduce", "p2p"))
    assert costs.cost(Op("reduce", work=reduce, module="forward")).us == pytest.approx(4 * plain.collective_us(reduce))
    assert costs.cost(Op("reduce", work=reduce, module="backward")).us == pytest.approx(plain.collective_us(reduce))
    assert costs.collective_us(reduce) == pytest.approx(5 * plain.collective_us(reduce))
    assert costs.collective_us(send) == pytest.approx(6 * plain.collective_us(send))


@pytest.mark.parametrize("tp", [2, 4])
def test_collectives_of_a_layout_are_after_the_same_share_of_compute(tp: int) -> None:
    target = setup(**{"parallel.tp": tp, "cluster.gpus": tp})
    found, own = changed(target, MATMUL, SILU), own_blocks(Program(target), ())["forward"]

    def shares(ops: list[Op]) -> list[float]:
        us = [0.0 if isinstance(op.work, Collective) else found.costs.cost(op).us for op in ops]
        talks = [place for place, op in enumerate(ops) if isinstance(op.work, Collective)]
        return [sum(us[:place]) / sum(us) for place in talks]

    before, after = shares(own), shares(found.ops("forward"))
    assert len(after) == len(before) > 0
    longest = max(MATMUL_US, SILU_US) / found.us("forward")
    assert np.allclose(before, after, atol=longest + 0.01)


@pytest.mark.parametrize("changes", [{}, {"parallel.dp": 8, "parallel.zero": 3}, {"train.micro_batch": 4}])
def test_halves_of_a_split_backward_pass_add_up_to_it(changes: dict[str, Any]) -> None:
    target = setup(**changes)
    found = changed(target, MATMUL, SILU, MATMUL._replace(weight_gradient=True), weights=WEIGHTS)
    ops = found.ops("backward")
    halves = [part_of(ops, [op.weight_gradient == later for op in ops]) for later in (False, True)]
    whole, (first, second) = time_of(ops, found.costs), (time_of(half, found.costs) for half in halves)
    assert 0.2 * whole.us < second.us < 0.6 * whole.us
    assert (first.us + second.us, first.host_us + second.host_us) == pytest.approx((whole.us, whole.host_us))


@pytest.mark.parametrize("changes", [{}, {"parallel.dp": 8, "parallel.zero": 3}, {"train.micro_batch": 4}])
def test_a_recomputed_block_takes_what_was_cut_out_of_the_trace_for_it(changes: dict[str, Any]) -> None:
    target = setup(**changes | {"train.recompute": "full"})
    again = changed(target, MATMUL, SILU, weights=WEIGHTS)
    assert again.us("recompute") == pytest.approx(again.us("forward"))


def test_bookkeeping_of_checkpoints_is_as_slow_as_the_launches_of_the_traced_host() -> None:
    target = setup(**{"train.recompute": "full"})
    own, wanted = (own_blocks(Program(one), ()) for one in (setup(), target))
    forward, again = (sum(map(costs_of(setup()).launches, part)) for part in (own["forward"], wanted["recompute"]))
    for host in (100.0, 900.0):
        slow = Changed(Learned(setup(), blocks(MATMUL, host=host)), target)
        assert slow.time("recompute").host_us == pytest.approx(host * again / forward)
        assert slow.time("forward").host_us == pytest.approx(host)


def test_on_a_cpu_the_host_computes() -> None:
    cpu = setup("cpu")
    found = changed(cpu, UNKNOWN, traced=cpu)
    assert (found.time("forward").us, found.time("forward").host_us) == pytest.approx((UNKNOWN_US + 100, 0))


def test_operators_of_a_changed_run_are_listed_with_their_time_in_a_step() -> None:
    target = setup(**{"train.micro_batch": 4, "model.layers": 6, "train.microbatches": 2})
    listed = operator_times(learned_step(target, Learned(setup(), blocks(MATMUL, SILU))))
    scaled = {row.name: row for row in listed if row.source == "scaled"}
    assert set(scaled) == {"mm", "silu"}
    assert (scaled["mm"].count, scaled["silu"].count) == (2 * 6 * 2, 2 * 6 * 2 * 2)


# ---------------------------------------------------------------------- what the host holds up
@given(st.lists(st.lists(st.tuples(st.floats(0, 2000), st.floats(0, 2000)), min_size=1, max_size=6), max_size=4))
def test_waiting_before_a_pass_ends_it_when_waiting_inside_does(passes: list[list[tuple[float, float]]]) -> None:
    """Blocks of (GPU, host) time, one pass after the other: a block waits for its first launch, and ends with its host.

    A pass that starts by its lead after its host ends at the same time.
    """
    launch, host, gpu, lumped = 8.0, 0.0, 0.0, 0.0
    for blocks_of_pass in passes:
        times = [BlockTime(us, issued) for us, issued in blocks_of_pass]
        lumped = max(lumped, host + leads_us(times, launch)[0]) + sum(us for us, _ in blocks_of_pass)
        for us, issued in blocks_of_pass:
            gpu = max(gpu, host + launch) + us
            host += issued
            gpu = max(gpu, host)
        assert lumped == pytest.approx(gpu)


def held_up_us(parts: dict[str, CutBlock], host: float = 1.0) -> float:
    step = learned_step(setup(), Learned(setup(), parts, host=host))
    return step.us - sum(time.us for (chunk,) in step.chunks for time in chunk.blocks) - step.role_us("optimizer", 0)


def test_nothing_waits_for_a_host_that_is_free() -> None:
    parts = {name: replace(block, host_us=0.0) for name, block in blocks(MATMUL, SILU).items()}
    assert held_up_us(parts, host=0.0) == pytest.approx(TABLE_OF_STEPS["launch_us"])


def test_a_gpu_that_waits_for_the_host_in_the_layers_does_not_catch_up_in_the_head() -> None:
    """The host takes 1 ms for each of four layers, the GPU 10 ms for the head: on average the host is quick enough."""
    head = CutBlock((slower(MATMUL, 10_000.0),), 10.0)
    parts = blocks(MATMUL, host=10.0) | {"forward": CutBlock((MATMUL,), 1000.0), "head": head}
    assert held_up_us(parts) == pytest.approx(4 * (1000 - MATMUL_US), rel=0.05)
    assert held_up_us(parts | {"forward": CutBlock((MATMUL,), 10.0)}) == pytest.approx(0, abs=30)


def test_a_host_without_delay_saves_what_passes_wait_for_it() -> None:
    head = CutBlock((slower(MATMUL, 10_000.0),), 10.0)
    parts = blocks(MATMUL, host=10.0) | {"forward": CutBlock((MATMUL,), 1000.0), "head": head}
    step = learned_step(setup(), Learned(setup(), parts))
    free = learned_step(setup(), Learned(setup(), parts, host=0.0))
    assert step.us * (1 - step.host_cost) == pytest.approx(free.us, rel=1e-3)


@pytest.mark.parametrize(("order", "stages"), [("tp-cp-dp-pp", [0, 0, 1, 1]), ("tp-cp-pp-dp", [0, 1, 0, 1])])
def test_the_stage_of_a_traced_rank_follows_the_order_of_the_parallelisms(order: str, stages: list[int]) -> None:
    job = setup(**{"parallel.pp": 2, "parallel.dp": 2, "parallel.order": order, "cluster.gpus": 4,
                   "train.microbatches": 2})  # fmt: skip
    run = CalibratedRun(cast(Replay, None), job)
    assert [run._stage_of(rank) for rank in range(4)] == stages
