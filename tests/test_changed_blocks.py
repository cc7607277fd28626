"""The blocks of a traced run in another setup, operator by operator: what is kept, what is priced, what follows."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lumos.analysis.kernel_labels import Work
from lumos.analysis.replay import Replay
from lumos.costs.aten_prices import AtenPrices
from lumos.costs.in_step import in_step_factors
from lumos.costs.prices import BlockTime
from lumos.data_files import read_table
from lumos.described.described import Program
from lumos.described.layer import TransformerLayer
from lumos.program.op import Op, Tensor
from lumos.program.operators import Collective, Group, Operator
from lumos.setup.setup import Setup
from lumos.step.step import leads_us, prices_of, simulate_step
from lumos.traced.calibration import (
    MODES,
    BlockingPrices,
    CalibratedPrices,
    Calibration,
    ChangedBlocks,
    Factors,
    Weights,
    drawn,
    modelled_times,
    work_of,
)
from lumos.traced.cut import CutBlock, CutOp
from lumos.traced.learned import CalibratedRun, calibrated_prices, calibrated_step, loaded_step
from lumos.traced.sizes import Sizes

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


MATMUL = CutOp(matmul(), Work.MATRIX, 1.0, 150.0, 1.0)
SILU = CutOp(silu(), Work.STREAM, 2.0, 60.0, 2.0)
UNKNOWN = CutOp(Op("some_kernel", (), (), "forward"), Work.STREAM, 1.0, 30.0, 1.0)
WEIGHTS = Weights(4, (((F, H), 8), ((H, F), 4), ((H, H), 16), ((32000, H), 2)))


def blocks(*ops: CutOp, host: float = 100.0) -> dict[str, CutBlock]:
    """The same operators in every block of a layer, forward and backward; nothing else takes time."""
    layer = CutBlock(ops, host)
    ends = dict.fromkeys(("embedding", "head", "head grad", "embedding grad", "optimizer"), CutBlock((), 0.0))
    return {"forward": layer, "recompute": layer, "backward": layer} | ends


def changed(target: Setup, *ops: CutOp, load: float = 0.0, **keys: Any) -> ChangedBlocks:
    """Blocks of the setup above, in another one."""
    traced = keys.pop("traced", setup())
    return ChangedBlocks(Calibration(traced, blocks(*ops), **keys), target, load)


# ---------------------------------------------------------------------- one operator
@given(
    st.sampled_from(({}, {"model.layers": 9}, {"train.microbatches": 4}, {"train.recompute": "full"})),
    st.floats(1, 999),
)
def test_an_operator_that_does_not_change_keeps_its_measured_time(changes: dict[str, Any], us: float) -> None:
    for op in (MATMUL, SILU, UNKNOWN):
        same = op._replace(us=us)
        assert changed(setup(**changes), same).us("forward", same) == pytest.approx(us)


def test_an_operator_that_does_not_change_keeps_its_time_beside_one_that_does() -> None:
    wider = changed(setup(**{"model.vocab": 64000}), MATMUL)
    assert wider.us("forward", MATMUL) == MATMUL.us
    assert wider.us("head", MATMUL._replace(op=matmul(T, H, 32000))) != MATMUL.us


def test_a_lower_power_limit_slows_matmuls_of_a_trace_and_leaves_what_moves_data() -> None:
    """600 W leave an H200 469 W above idle: enough for memory-bound kernels, which draw 462 W."""
    less = setup(**{"cluster.power_w": 600.0})
    ratio = in_step_factors(less.cluster.accelerator).matrix / in_step_factors(setup().cluster.accelerator).matrix
    assert ratio > 1.08
    found = changed(less, MATMUL)
    assert found.us("forward", MATMUL) == pytest.approx(MATMUL.us * ratio, rel=0.05)
    assert found.us("forward", SILU) == pytest.approx(SILU.us, rel=0.02)


def test_faster_memory_speeds_up_what_moves_data_and_the_update_of_a_trace() -> None:
    faster = changed(setup(**{"cluster.hbm_tb_s": 9.6}), SILU, weights=WEIGHTS)
    assert faster.us("forward", SILU) < 0.8 * SILU.us
    update = CutOp(SILU.op, Work.STREAM, 1.0, 5000.0, 1.0)
    assert faster.us("optimizer", update) == pytest.approx(0.5 * update.us, rel=0.05)
    assert changed(setup(), SILU, weights=WEIGHTS).us("optimizer", update) == pytest.approx(update.us)


def test_an_operator_that_changes_is_its_price_times_what_the_trace_says_of_it() -> None:
    """The ratio is that of `drawn`: between what the trace shows of this operator and what is usual of its family."""
    target = setup(**{"train.micro_batch": 4})
    found = changed(target, MATMUL).us("forward", MATMUL)
    prices, gap = AtenPrices(prices_of(setup())), prices_of(setup()).factors.launch_gap_us
    was, now = (prices.of(op).us - gap for op in (matmul(), matmul(2 * T)))
    usual = [TABLE["usual"][family] for family in ("gemm_nn", "gemm_nn")]
    low, high = sorted((now * MATMUL.us / was, now * usual[1]))
    assert low <= found <= high


@pytest.mark.parametrize("mode", MODES)
def test_the_trace_alone_keeps_the_ratio_of_measured_over_priced_time(mode: str) -> None:
    target = setup(**{"train.micro_batch": 4})
    prices, gap = AtenPrices(prices_of(setup())), prices_of(setup()).factors.launch_gap_us
    was, now = (prices.of(op).us - gap for op in (matmul(), matmul(2 * T)))
    found = changed(target, MATMUL, mode=mode).us("forward", MATMUL)
    assert (found == pytest.approx(MATMUL.us * now / was)) == (mode == "trace")
    assert found == pytest.approx(2 * MATMUL.us, rel=0.25)


@given(st.floats(50, 1000), st.floats(50, 1000), st.floats(0.5, 2.0), st.sampled_from((Work.MATRIX, Work.STREAM)))
def test_the_ratio_lies_between_the_usual_one_and_that_of_the_trace(
    was: float, us: float, usual: float, work: Work
) -> None:
    op = MATMUL._replace(us=us, work=work)
    for now in (was, 2 * was, 0.1 * was):
        low, high = sorted((usual, us / was))
        assert low * 0.999 <= drawn(op, was, now, (usual, usual), 0.0) <= high * 1.001


@given(st.floats(0.6, 1.6))
def test_a_long_kernel_at_the_same_size_is_believed_and_a_short_one_far_away_is_not(ratio: float) -> None:
    """The limits of the weight: 1 and 0."""
    usual = 0.9
    long = MATMUL._replace(us=1e6 * ratio)
    assert drawn(long, 1e6, 1e6, (usual, usual), 0.0) == pytest.approx(ratio, rel=1e-3)
    short = MATMUL._replace(us=0.01 * ratio)
    assert drawn(short, 0.01, 0.01, (usual, usual), 0.0) == pytest.approx(usual, rel=1e-3)
    assert drawn(long, 1e6, 1e3, (usual, usual), 0.0) == pytest.approx(usual, rel=1e-3)
    assert drawn(long, 1e6, 1e3, (usual, usual), 1.0) == pytest.approx(ratio, rel=1e-3), "prices of another GPU"


@given(st.floats(1.01, 8.0), st.floats(1.01, 4.0))
def test_the_farther_the_size_the_less_of_the_trace_is_left(times: float, more: float) -> None:
    op = MATMUL._replace(us=400.0)
    near, far = (drawn(op, 200.0, 200.0 * n, (1.0, 1.0), 0.0) for n in (times, times * more))
    assert 1 <= far <= near <= 2


def test_a_ratio_beyond_ten_compares_two_different_things_and_is_kept() -> None:
    """A price that is of something else than what was launched says only how much it grows."""
    price = AtenPrices(prices_of(setup())).of(matmul()).us
    odd = MATMUL._replace(us=50 * price)
    grown = changed(setup(**{"train.micro_batch": 4}), odd).us("forward", odd)
    assert grown == pytest.approx(2 * odd.us, rel=0.2)


def test_an_operator_without_shapes_follows_the_description_of_its_block() -> None:
    target = setup(**{"train.micro_batch": 4})
    block = changed(target, UNKNOWN)
    before, after = (
        modelled_times(one._build("forward"), one.prices)[0][Work.STREAM] for one in (block.was, block.now)
    )
    assert block.us("forward", UNKNOWN) == pytest.approx(UNKNOWN.us * after / before)


def test_an_operator_that_has_no_price_grows_with_its_bytes() -> None:
    broken = CutOp(Op("aten.mm.default", (tensor(2, 2048, H),), (), "forward"), Work.MATRIX, 1.0, 80.0, 1.0)
    found = changed(setup(**{"train.seq": 4096}), broken).us("forward", broken)
    assert found == pytest.approx(160)


def test_where_keys_and_queries_look_alike_half_of_the_work_is_taken_for_keys() -> None:
    rotated = Op("aten.mul.Tensor", (tensor(2, 16, 2048, 128),), (tensor(2, 16, 2048, 128),), "forward")
    op = CutOp(rotated, Work.STREAM, 2.0, 80.0, 2.0)
    fewer = changed(setup(**{"model.kv_heads": 4}), op).us("forward", op)
    assert 40 < fewer < 80


# ---------------------------------------------------------------------- the GPU's clock
def test_matmuls_take_longer_the_more_of_the_step_they_are_on_a_gpu_at_its_power_limit() -> None:
    def matrix_us(gpu: str, load: float) -> float:
        busy = changed(setup(gpu), MATMUL, SILU, load=load, traced=setup(gpu))
        return float(busy._times["forward"][Work.MATRIX])

    idle, busy = TABLE["clock_load"]
    assert matrix_us("h200", idle) == pytest.approx(MATMUL.us)
    assert matrix_us("h200", busy) == pytest.approx(MATMUL.us * TABLE["clock_factor"]["matrix"][1])
    assert idle < (idle + busy) / 2 < busy
    assert MATMUL.us < matrix_us("h200", (idle + busy) / 2) < matrix_us("h200", busy)
    assert matrix_us("h200", 1.0) == matrix_us("h200", busy), "the clock does not fall for ever"
    assert matrix_us("v100", 1.0) == pytest.approx(MATMUL.us), "no such limit is known of it"


def test_at_the_load_of_the_trace_the_clock_is_that_of_the_trace() -> None:
    for load in (0.1, 0.6, 0.99):
        busy = changed(setup(), MATMUL, load=load, **{"traced": setup()})
        same = ChangedBlocks(replace(busy.calibration, load=load), setup(), load)
        assert same._times["forward"][Work.MATRIX] == pytest.approx(MATMUL.us)


def test_the_load_of_a_step_is_what_its_matmuls_take_of_it() -> None:
    calibration = Calibration(setup(), blocks(MATMUL, SILU))
    step = loaded_step(setup(), calibration)
    assert isinstance(step.prices, CalibratedPrices)
    found = step.prices.changed
    assert found is not None
    assert found.matrix_us() == pytest.approx(8 * found._times["forward"][Work.MATRIX])
    assert found.load == pytest.approx(found.matrix_us() / step.us, rel=0.02)


# ---------------------------------------------------------------------- a block
def test_a_block_takes_its_operators_and_the_gaps_between_kernels() -> None:
    found = changed(setup(), MATMUL, SILU)
    gap = prices_of(setup()).factors.launch_gap_us
    gpu, host = found.time("forward")
    assert gap > 0
    assert gpu == pytest.approx(MATMUL.us + SILU.us + 3 * gap)
    assert host == 100
    assert found.time("no such block") == (0, 0)


def test_what_runs_beside_takes_no_time_of_the_stream_that_computes() -> None:
    beside = MATMUL._replace(beside=True)
    assert changed(setup(), beside).time("forward")[0] == 0


def test_a_slower_gpu_is_slower_at_everything_and_its_host_is_not() -> None:
    known = Calibration(setup(), blocks(MATMUL), networks={"forward": 2.0}, data_parallel=5.0, link=6.0, fixed_us=7.0)
    slow = known.slower(2.0)
    assert (slow.gpu, slow.host, slow.networks) == (2, 1, {"forward": 4})
    assert (slow.data_parallel, slow.link, slow.fixed_us) == (10, 12, 7)
    us = [ChangedBlocks(one, setup(), 0.0)._times["forward"][Work.MATRIX] for one in (known, slow)]
    assert us[1] == pytest.approx(2 * us[0])


def test_a_slower_host_takes_longer_and_the_gpu_does_not() -> None:
    known = Calibration(setup(), blocks(MATMUL))
    slow = known.slower_host(3.0)
    (gpu, host), (same, longer) = (ChangedBlocks(one, setup(), 0.0).time("forward") for one in (known, slow))
    assert (longer, same) == pytest.approx((3 * host, gpu))


def test_communication_that_a_trace_lacks_is_replaced_everywhere() -> None:
    known = Calibration(setup(), networks={"forward": 3.0, "backward": 4.0}, data_parallel=5.0, link=6.0)
    silent = known.with_communication(0.0)
    assert silent.networks == {"forward": 0, "backward": 0}
    assert (silent.data_parallel, silent.link) == (0, 0)
    assert known.slower_network(2.0).networks == {"forward": 6, "backward": 8}


@given(st.floats(1.0, 300.0), st.sampled_from(({}, {"parallel.tp": 4}, {"parallel.tp": 2})))
def test_the_host_keeps_a_part_of_its_measured_time_whatever_is_taken_away(us: float, changes: dict[str, Any]) -> None:
    known = replace(Calibration(setup()), blocks=blocks(MATMUL, host=us))
    assert ChangedBlocks(known, setup(**changes), 0.0).time("forward")[1] >= 0.2 * us


# ---------------------------------------------------------------------- the optimizer
def optimizer(us: float = 1000.0, kernels: float = 4.0) -> dict[str, CutBlock]:
    update = Op("aten._fused_adamw_.default", (tensor(F, H),), (), "optimizer")
    return blocks(MATMUL) | {"optimizer": CutBlock((CutOp(update, Work.STREAM, 1.0, us, kernels),), 50.0)}


def update_us(target: Setup, traced: Setup | None = None) -> float:
    known = Calibration(traced or setup(), optimizer(), WEIGHTS)
    found = ChangedBlocks(known, target, 0.0)
    (op,) = known.blocks["optimizer"].ops
    return found.us("optimizer", op)


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
GATHER = CutOp(
    Op("fsdp.split_with_sizes_copy", (tensor(8, 1 << 20), tensor(8 << 20)), (), "forward"), Work.STREAM, 1.0,
    40.0, 1.0, sharding=True,
)  # fmt: skip


def test_a_run_that_shares_no_weights_does_not_gather_them() -> None:
    shared = setup(**{"parallel.zero": 3, "parallel.dp": 8})
    assert changed(shared, GATHER, traced=shared).us("forward", GATHER) == pytest.approx(40)
    assert changed(setup(), GATHER, traced=shared).us("forward", GATHER) == 0


def test_weights_are_gathered_where_the_traced_run_did_not_share_them() -> None:
    shared = setup(**{"parallel.zero": 3, "parallel.dp": 8})
    alone, gathers = (changed(target, MATMUL, weights=WEIGHTS) for target in (setup(), shared))
    assert gathers.time("forward")[0] > alone.time("forward")[0] + 5
    backward = gathers.time("backward")[0] - alone.time("backward")[0]
    assert backward > gathers.time("forward")[0] - alone.time("forward")[0], "gradients are packed, too"


def test_copies_for_every_peer_are_as_many_as_there_are_peers() -> None:
    shared, more = (setup(**{"parallel.zero": 3, "parallel.dp": ranks}) for ranks in (8, 64))
    flat = tensor(1 << 24)
    op = Op("aten._to_copy.default", (flat,), (flat,), "forward", allocates=True)
    copy = CutOp(op, Work.STREAM, 7.0, 140.0, 7.0, sharding=True, per_peer=True)
    same = changed(shared, copy, traced=shared, weights=WEIGHTS).us("forward", copy)
    assert same == pytest.approx(140)
    spread = changed(more, copy, traced=shared, weights=WEIGHTS).us("forward", copy)
    assert spread == pytest.approx(9 / 8 * same, rel=0.3), "nine times as many, each an eighth"


# ---------------------------------------------------------------------- prices
def test_a_calibration_that_knows_nothing_changes_nothing() -> None:
    nothing = Calibration(setup())
    assert Factors() == Factors((1.0, 1.0, 1.0, 1.0), (False, False, False, False), None)
    step, plain = calibrated_step(setup(), nothing), simulate_step(setup())
    assert step.us * (1 - step.host_cost) == pytest.approx(plain.us * (1 - plain.host_cost), abs=step.prices.launch_us)


def test_the_operators_of_a_block_add_up_to_what_it_takes() -> None:
    known = Calibration(setup(), blocks(MATMUL, SILU), networks={"forward": 4.0}, data_parallel=5.0, link=6.0)
    prices, plain = calibrated_prices(ChangedBlocks(known, setup(), known.load)), prices_of(setup())
    assert isinstance(prices, CalibratedPrices)
    assert prices.changed is not None
    matrix, add = Operator("gemm_tn", (2048, 4096, 4096)), Operator("add", (2048, 4096))
    attention = Operator("sdpa_fwd", (1, 32, 2048, 128))
    reduce, send = (Collective(kind, 1e8, Group(2, 2)) for kind in ("all_reduce", "p2p"))
    assert [work_of(work) for work in (matrix, attention, add, reduce)] == list(Work)
    factors = prices.changed.factors["forward"].gpu
    with prices.inside(("forward", False)):
        assert prices.operator_us(matrix) == pytest.approx(factors[Work.MATRIX] * plain.operator_us(matrix))
        assert prices.collective_us(reduce) == pytest.approx(4 * plain.collective_us(reduce))
    assert prices.operator_us(add) == plain.operator_us(add), "outside of blocks"
    assert prices.collective_us(reduce) == pytest.approx(5 * plain.collective_us(reduce))
    assert prices.collective_us(send) == pytest.approx(6 * plain.collective_us(send))
    assert prices.is_measured(("forward", False), matrix)
    assert not prices.is_measured(("forward", False), attention), "the trace had none"
    layer = TransformerLayer(Program(setup()).layout)
    assert prices.block(("forward", False), layer.forward).us == pytest.approx(prices.changed.time("forward")[0])


@pytest.mark.parametrize("changes", [{}, {"parallel.dp": 8, "parallel.zero": 3}, {"train.micro_batch": 4}])
def test_a_recomputed_block_takes_what_was_cut_out_of_the_trace_for_it(changes: dict[str, Any]) -> None:
    """Recomputation ends before the last matmul in the trace and in the description: it is left out once."""
    target = setup(**changes | {"train.recompute": "full"})
    known = Calibration(setup(), blocks(MATMUL, SILU), WEIGHTS)
    prices = calibrated_prices(ChangedBlocks(known, target, known.load))
    assert isinstance(prices, CalibratedPrices)
    assert prices.changed is not None
    recomputed = TransformerLayer(Program(target).layout).recomputed
    us, host_us = prices.changed.time("recompute")
    found = prices.block(("recompute", False), recomputed)
    assert (found.compute_us, found.host_us) == pytest.approx((us, host_us))


def test_bookkeeping_of_checkpoints_is_as_slow_as_the_launches_of_the_traced_host() -> None:
    target = setup(**{"train.recompute": "full"})
    layers = TransformerLayer(Program(setup()).layout), TransformerLayer(Program(target).layout)
    parts = layers[0].forward(), layers[1].recomputed()
    forward, again = (modelled_times(block, prices_of(setup()))[1] for block in parts)
    for host in (100.0, 900.0):
        slow = ChangedBlocks(Calibration(setup(), blocks(MATMUL, host=host)), target, 0.0)
        assert slow.time("recompute")[1] == pytest.approx(host * again / forward)
        assert slow.time("forward")[1] == pytest.approx(host)


def test_a_block_of_the_host_takes_what_the_trace_says_and_on_a_cpu_it_is_computing_time() -> None:
    ops = [
        Op("add", work=Operator("add", (2048, 4096)), launches=3),
        Op("up", work=Operator("gemm_tn", (2048, 4096, 4096))),
    ]
    known = Calibration(setup(), blocks(MATMUL, SILU))
    prices = calibrated_prices(ChangedBlocks(known, setup(), known.load))
    assert isinstance(prices, CalibratedPrices)
    assert prices.changed is not None
    launch = prices.changed.factors["forward"].launch_us
    assert launch is not None
    found = prices.block(("forward", False), lambda: ops)
    assert found.host_us == pytest.approx(4 * launch)
    blocking = prices_of(setup(), make_prices=BlockingPrices)
    assert isinstance(blocking, BlockingPrices)
    blocking.changed = prices.changed
    same = blocking.block(("forward", False), lambda: ops)
    both = found.us + found.host_us
    assert (same.us, same.compute_us, same.host_us) == pytest.approx((both, both, 0))


def test_operators_of_a_changed_run_are_listed_with_their_time_in_a_step() -> None:
    target = setup(**{"train.micro_batch": 4, "model.layers": 6, "train.microbatches": 2})
    found = changed(target, MATMUL, SILU)
    listed = list(found.operators())
    assert sum(us for _, _, us, _ in listed) == pytest.approx(
        12 * sum(found._times[name].sum() for name in ("forward", "backward"))
    )
    assert {op.inputs[0].shape for op, *_ in listed} == {(2 * T, H), (4, 2048, F)}
    assert not any(same for *_, same in listed)
    again = changed(target.replaced({"train.recompute": "full"}), MATMUL, SILU)
    assert len(list(again.operators())) == len(listed) * 3 / 2


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
    step = calibrated_step(setup(), Calibration(setup(), parts, host=host))
    return step.us - sum(time.us for (chunk,) in step.chunks for time in chunk.blocks) - step.role_us("optimizer", 0)


def test_nothing_waits_for_a_host_that_is_free() -> None:
    parts = {name: replace(block, host_us=0.0) for name, block in blocks(MATMUL, SILU).items()}
    assert held_up_us(parts, host=0.0) == pytest.approx(TABLE_OF_STEPS["launch_us"])


def test_a_gpu_that_waits_for_the_host_in_the_layers_does_not_catch_up_in_the_head() -> None:
    """The host takes 1 ms for each of four layers, the GPU 10 ms for the head: on average the host is quick enough."""
    head = CutBlock((MATMUL._replace(us=10_000.0),), 10.0)
    parts = blocks(MATMUL, host=10.0) | {"forward": CutBlock((MATMUL,), 1000.0), "head": head}
    assert held_up_us(parts) == pytest.approx(4 * (1000 - MATMUL.us), rel=0.05)
    assert held_up_us(parts | {"forward": CutBlock((MATMUL,), 10.0)}) == pytest.approx(0, abs=30)


def test_a_host_without_delay_saves_what_passes_wait_for_it() -> None:
    head = CutBlock((MATMUL._replace(us=10_000.0),), 10.0)
    parts = blocks(MATMUL, host=10.0) | {"forward": CutBlock((MATMUL,), 1000.0), "head": head}
    step = calibrated_step(setup(), Calibration(setup(), parts))
    free = calibrated_step(setup(), Calibration(setup(), parts, host=0.0))
    assert step.us * (1 - step.host_cost) == pytest.approx(free.us, rel=1e-3)


@pytest.mark.parametrize(("order", "stages"), [("tp-cp-dp-pp", [0, 0, 1, 1]), ("tp-cp-pp-dp", [0, 1, 0, 1])])
def test_the_stage_of_a_traced_rank_follows_the_order_of_the_parallelisms(order: str, stages: list[int]) -> None:
    job = setup(**{"parallel.pp": 2, "parallel.dp": 2, "parallel.order": order, "cluster.gpus": 4,
                   "train.microbatches": 2})  # fmt: skip
    run = CalibratedRun(cast(Replay, None), job)
    assert [run._stage_of(rank) for rank in range(4)] == stages
