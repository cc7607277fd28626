"""Costs of operators: laws that hold for every shape, and files of rows, samples and models."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import lzma
import math
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commands import lumos_here as lumos
from lumos.cli.cost_command import cost_command
from lumos.costs.contention import kernel_of, slowdown
from lumos.costs.energy import Joules, in_step_factors, joules_from, work_of
from lumos.costs.hardware_model import encode
from lumos.costs.model_costs import ModelCosts, OlderKernels, flash_kernels, warmth
from lumos.costs.operator_model import (
    Chip,
    CostModel,
    Regressor,
    Trees,
    _equivalent_of,
    chip_of,
    cost_model,
    features,
    read_cost_model,
    regressors_of,
    roofline_us,
)
from lumos.errors import InputError
from lumos.measure.operator_rows import SIZES, operator_of, operators_of, read_rows
from lumos.model_file import unpacked
from lumos.prediction.power import drawn_w
from lumos.program.op import BESIDE, Measured, Op, Tensor
from lumos.program.operators import KINDS, Collective, Group, Operator
from lumos.report.terminal.costs import cost_answer
from lumos.setup.gpus import gpu_named, gpu_names
from lumos.step.block_timeline import BlockTime, time_of, timeline
from plain_network import plain_network

SAMPLED = ("h200", "a100", "gh200")
MATRIX = ("gemm", "bmm", "grouped_gemm", "sdpa_fwd", "sdpa_bwd")
laws = settings(max_examples=150)
NETWORK = plain_network(100.0, 10.0)


def sizes(most: int = 1 << 40) -> st.SearchStrategy[int]:
    """As many small as large ones."""
    bits = most.bit_length() - 1
    return st.integers(0, bits - 1).flatmap(lambda power: st.integers(1 << power, (2 << power) - 1))


@st.composite
def rows(draw: st.DrawFn, names: tuple[str, ...] = tuple(SIZES), most: int = 1 << 40) -> dict[str, Any]:
    """A row of any operator, with any sizes."""
    name = draw(st.sampled_from(names))
    row: dict[str, Any] = {"op": name} | {size: draw(sizes(most)) for size in SIZES[name]}
    row["dtype"] = draw(st.sampled_from(("bf16", "fp16", "fp32", "tf32", "fp8")))
    return row | ({"layout": draw(st.sampled_from(("TN", "NN", "NT")))} if name == "gemm" else {})


# Energy: values by hand


def joules(name: str = "h200", **changes: float) -> Joules:
    table = {
        "gpu": "h200", "flop_pj": {"bf16": 2.0, "fp8": 1.0, "tf32": 4.0, "fp32": 8.0}, "attention": 1.5,
        "memory_pj": 100.0, "cache_pj": 10.0, "active_w": 50.0, "update_w": 250.0, "talking_w": 5.0, "wire_pj": 300.0,
        "limit_share": 0.9,
    }  # fmt: skip
    return joules_from(table | changes, gpu_named(name))


def test_a_matmul_costs_its_operations_its_bytes_and_its_time() -> None:
    """4096³ in bf16: 2 · 4096³ operations, three matrices of 32 MiB, 76 % of them outside a cache of 50 MB."""
    matmul = Operator("gemm_tn", (4096, 4096, 4096))
    size = 2 * 4096**2
    cold = (math.log2(size / gpu_named("h200").l2_mb / 1e6) + 4) / 4.5
    assert 0.6 < cold < 0.8
    moved = 3 * size * (cold * 100e-12 + (1 - cold) * 10e-12)
    assert joules().operator(matmul, 200.0) == pytest.approx(2 * 4096**3 * 2e-12 + moved + 50 * 200e-6)


def test_attention_pays_its_own_price_for_an_operation() -> None:
    attention = Operator("sdpa_fwd", (4, 32, 4096, 128))
    assert work_of(attention, 60e6)["matmul"] == 0
    plain, dear = (joules(attention=factor).operator(attention, 0.0) for factor in (1.0, 1.5))
    assert dear - plain == pytest.approx(0.5 * attention.flops * 2e-12)


def test_a_memory_bound_operator_costs_bytes_alone() -> None:
    add = Operator("add", (1 << 20, 1024))
    assert work_of(add, 60e6) == {"matmul": 0, "attention": 0, "memory": add.bytes, "cache": 0}
    assert work_of(Operator("add", (1024, 1024)), 60e6 * 1024)["cache"] == Operator("add", (1024, 1024)).bytes
    assert joules().operator(add, 0.0) == pytest.approx(add.bytes * 100e-12)


@given(st.floats(-8, 4))
def test_bytes_are_in_the_cache_or_in_memory(depth: float) -> None:
    """From a sixteenth of the cache to 1.4 times the cache, the share in memory grows with the logarithm."""
    add = Operator("add", (4096, 4096))
    work = work_of(add, add.tensor_bytes / 2**depth)
    assert work["memory"] + work["cache"] == pytest.approx(add.bytes)
    assert work["memory"] / add.bytes == pytest.approx(min(1, max(0, (depth + 4) / 4.5)))


@pytest.mark.parametrize(("kind", "sent"), [("all_reduce", 2 * 7 / 8), ("all_gather", 7 / 8), ("p2p", 1.0)])
def test_a_collective_costs_its_time_and_what_it_sends(kind: str, sent: float) -> None:
    found = joules().collective(Collective(kind, 1e9, Group(8, 8)), 400.0)
    assert found == pytest.approx(5 * 400e-6 + sent * 1e9 * 300e-12)


def test_an_operation_takes_no_less_energy_than_where_it_was_measured() -> None:
    """A B200 has less power for its peak than an H200: an operation costs what it does there, at the highest clock."""
    assert joules("b200").flop["bf16"] == joules("h200").flop["bf16"] == 2e-12


def test_a_gpu_with_more_power_for_its_peak_spends_the_same_share_of_it() -> None:
    """Power above idle of an A100 over that of an H200: (400 - 60) / (700 - 124); peaks: 312 over 989.4 TFLOP/s."""
    a100, h200 = gpu_named("a100"), gpu_named("h200")
    power = (a100.tdp_w - a100.idle_w) / (h200.tdp_w - h200.idle_w)
    moved = joules("a100")
    assert moved.flop["bf16"] == pytest.approx(2e-12 * power * 989.4 / 312)
    assert moved.flop["fp16"] == moved.flop["bf16"]
    assert (moved.memory, moved.cache, moved.wire) == pytest.approx((100e-12, 10e-12, 300e-12))
    assert (moved.active_w, moved.talking_w) == pytest.approx((50 * power, 5 * power))
    assert moved.update_w == pytest.approx(50 * power + 200 * a100.hbm_gb_s / h200.hbm_gb_s)
    assert moved.most_w == pytest.approx(0.9 * a100.tdp_w)
    assert moved.cache_bytes == a100.l2_mb * 1e6
    assert (moved.measured, joules().measured) == (False, True)


@pytest.mark.parametrize(
    ("work_w", "most_w", "drawn"), [(0, 690, 124), (300, 690, 424), (566, 690, 690), (900, 690, 690), (10, 100, 124)]
)
def test_a_board_draws_idle_power_and_its_work_up_to_its_limit_and_never_less_than_idle(
    work_w: float, most_w: float, drawn: float
) -> None:
    assert drawn_w(124, work_w, most_w) == drawn


# Costs of operators by hand


def us(model: str, kind: str, *shape: int, dtype: str = "bf16") -> float:
    return cost_model(model).us(Operator(kind, shape, dtype))


def test_a_family_without_samples_is_priced_by_operators_that_do_the_same_work() -> None:
    """On A100 the two gradients of a linear layer were sampled together, on H200 each on its own."""
    m, n, k = 2048, 1024, 512
    assert us("a100", "gemm_nn", m, n, k) == pytest.approx(0.5 * us("a100", "linear_bwd", m, k, n))
    assert us("a100", "gemm_nt", m, n, k) == pytest.approx(0.5 * us("a100", "linear_bwd", k, m, n))
    both = us("h200", "gemm_nn", m, k, n) + us("h200", "gemm_nt", n, k, m)
    assert us("h200", "linear_bwd", m, n, k) == pytest.approx(both)
    assert us("h200", "bmm_bwd", 8, m, n, k) == pytest.approx(2 * us("h200", "bmm", 8, m, n, k))
    assert us("a100", "grouped_gemm", 8, 8 * m, n, k) == pytest.approx(8 * us("a100", "gemm_tn", m, n, k))
    assert us("h200", "stream", 4 * 4096 * 1000) == pytest.approx(us("h200", "copy", 1000, 4096))


@laws
@given(st.sampled_from(("gemm_nn", "gemm_nt", "linear_bwd", "bmm_bwd", "stream")), sizes(4096), sizes(4096), sizes(512))
def test_equivalent_operators_do_the_same_work(kind: str, m: int, n: int, k: int) -> None:
    shape = {"bmm_bwd": (8, m, n, k), "stream": (m * n * 16384,)}.get(kind, (m, n, k))
    operator = Operator(kind, shape)
    parts = _equivalent_of(operator)
    assert sum(part.flops * factor for part, factor in parts if part.is_matrix) == pytest.approx(operator.flops)
    if kind == "stream":
        assert sum(part.bytes * factor for part, factor in parts) == pytest.approx(operator.bytes)


def test_a_roofline_is_the_larger_of_work_and_bytes_and_the_shortest_kernel() -> None:
    chip = Chip(peak=1000.0, vector=10.0, bandwidth=100.0, processors=100, cache=1e6)
    matmul, add = Operator("gemm_tn", (64, 64, 64)), Operator("add", (64, 64))
    assert roofline_us(matmul, chip) == pytest.approx(2 * 64**3 / 1000 + 2.0)
    assert roofline_us(matmul, chip._replace(peak=1e6)) == pytest.approx(2 * 3 * 64**2 / 100 + 2.0)
    assert roofline_us(add, chip) == pytest.approx(64**2 / 10 + 2.0), "without tensor cores"


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("h200", "bf16", 989.4),
        ("h200", "fp8", 1978.9),
        ("a100", "fp8", 312.0),
        ("a100", "fp32", 19.5),
        ("v100", "bf16", 125),
    ],
)
def test_a_precision_without_tensor_cores_runs_at_the_rate_of_the_next_wider_one(
    name: str, dtype: str, tflops: float
) -> None:
    chip, gpu = chip_of(gpu_named(name), dtype), gpu_named(name)
    assert chip.peak == pytest.approx(tflops * 1e6)
    assert chip[1:] == pytest.approx((gpu.peak_tflops["fp32"] * 1e6, gpu.hbm_gb_s * 1e3, gpu.sms, gpu.l2_mb * 1e6))


def test_a_matmul_is_bound_by_compute_and_an_addition_by_memory() -> None:
    model = cost_model("h200")
    assert model.bound(Operator("gemm_tn", (4096, 4096, 4096))) == "compute"
    assert model.bound(Operator("gemm_tn", (8, 4096, 4096))) == "memory"
    assert model.bound(Operator("add", (4096, 4096))) == "memory"


def test_features_of_a_matmul_say_how_well_tiles_fill_the_chip_and_how_sizes_are_aligned() -> None:
    """384 × 512 on a chip of 10 multiprocessors: 12 tiles of 128 × 128 make 1.2 waves, so that 0.6 of two is of use."""
    chip = Chip(1000.0, 10.0, 100.0, processors=10, cache=1e6)
    values = features(Operator("gemm_tn", (384, 512, 1024)), chip)
    common, logs, tiles, aligned = values[:4], values[4:7], values[7:23], values[23:26]
    assert common[3] == pytest.approx(math.log2(2 * (384 * 1024 + 512 * 1024 + 384 * 512) / 1e6))
    assert common[2] == pytest.approx(common[0] - common[1])
    assert logs == pytest.approx([math.log2(384), 9, 10])
    assert tiles[:2] == pytest.approx([0.6, 1.2])
    padded = 2 * 4 * 256 * 128  # two rows of tiles of 256 hold 384
    assert tiles[4:6] == pytest.approx([0.8 * 384 * 512 / padded, 0.8])
    assert aligned == [7, 8, 8], "halved at most eight times"
    sizes = [(128, 128), (128, 256), (256, 128), (192, 192), (64, 256), (256, 256), (320, 128), (64, 64)]
    waves = [math.ceil(384 / rows) * math.ceil(512 / columns) / 10 for rows, columns in sizes]
    assert tiles[1::2] == pytest.approx(waves)
    use = [w / math.ceil(w) * 384 * 512 / (10 * w * r * c) for w, (r, c) in zip(waves, sizes, strict=True)]
    assert tiles[::2] == pytest.approx(use), "of the last wave, and of the padded output"
    assert values[26:31] == pytest.approx([math.log2(384 / 512), 10 - 0.5 * math.log2(384 * 512), 1024, 512, 384])
    assert values[31:] == [1, 0, 0]


def test_features_of_attention_count_blocks_of_128_queries() -> None:
    chip = Chip(1000.0, 10.0, 100.0, processors=100, cache=1e6)
    even, odd = (features(Operator("sdpa_fwd", (2, 8, s, 64)), chip)[8:] for s in (1024, 1000))
    assert even == pytest.approx([4, 1.28, 0.64, math.log2(0.16), 1])
    assert odd == pytest.approx([*even[:-1], 0])


def test_an_operator_is_put_into_others_only_where_all_of_them_were_sampled() -> None:
    shipped = cost_model("h200")
    half = CostModel(shipped.gpu, "h100", {"gemm_nn": shipped.regressors["gemm"]}, shipped)
    both = Operator("linear_bwd", (2048, 1024, 512))
    assert half.sampled_on(both) == "h200"
    assert half.us(both) == shipped.us(both)


def test_trees_need_the_features_up_to_the_last_they_split_on() -> None:
    def width(*features: int) -> int:
        nodes = len(features)
        trees = Trees(np.zeros(1, np.int32), np.array(features, np.int16), np.zeros(nodes, np.float32),
                      np.zeros(nodes, np.int32), 0.0)  # fmt: skip
        return Regressor(trees, 1.0, 100).width

    assert (width(-1), width(0, -1, -1), width(7, -1, -1)) == (0, 1, 8)


@pytest.mark.parametrize(
    ("kind", "most"),
    [("gemm_tn", 5.0), ("gemm_nn", 5.0), ("gemm_nt", 5.0), ("bmm", 4.2), ("sdpa_fwd", 3.1), ("sdpa_bwd", 2.1),
     ("rms_norm", 5.0), ("gelu", 5.1), ("cross_entropy", 4.9), ("softmax_fwd", 6.5), ("embedding", 2.3)],
)  # fmt: skip
def test_shapes_that_were_not_fitted_are_priced_as_well_as_they_were(kind: str, most: float) -> None:
    """Mean error in percent on shapes drawn with another seed and sampled on another day; docs/forecasts.md."""
    rows = [row for row in held_out() if row[0].kind == kind]
    prices = cost_model("h200").us_of_all([operator for operator, _ in rows])
    errors = [abs(price / measured - 1) for price, (_, measured) in zip(prices, rows, strict=True)]
    assert 100 * sum(errors) / len(errors) < most


@cache
def held_out() -> list[tuple[Operator, float]]:
    with lzma.open(Path(__file__).parents[1] / "calibration/held_out_h200.jsonl.xz", "rt") as file:
        rows = [json.loads(line) for line in file]
    return [(operator_of(row, "row"), row["us"]) for row in rows if "us" in row]


def test_older_attention_kernels_run_at_the_multiprocessors_and_clock_of_the_newer_gpu() -> None:
    """An H100 has 132 multiprocessors at 1.98 GHz, an A100, on which FlashAttention 2 was sampled, 108 at 1.41 GHz."""
    h100, a100, attention = gpu_named("h100"), gpu_named("a100"), Operator("sdpa_fwd", (4, 32, 2048, 128))
    speed = h100.sms * h100.clock_ghz / (108 * 1.41)
    second, first = flash_kernels(h100, "flash-2"), flash_kernels(h100, "flash-1")
    assert second is not None
    assert first is not None
    assert second.us(attention) == pytest.approx(us("a100", *attention[:1], *attention.shape) / speed)
    assert first.us(attention) == pytest.approx(1.8 * second.us(attention))
    assert (second.isolation_us, cost_model("h200").isolation_us) == (0.0, 2.8)
    assert flash_kernels(h100, "native") is None
    assert flash_kernels(a100, "flash-2") is None
    old = flash_kernels(a100, "flash-1")
    assert old is not None
    assert old.us(attention) == pytest.approx(1.8 * us("a100", *attention[:1], *attention.shape))
    scaled = OlderKernels(cost_model("h200"), 2.0)
    assert (scaled.isolation_us, scaled.us(attention)) == (1.4, us("h200", *attention[:1], *attention.shape) / 2)


@pytest.mark.parametrize(
    ("kind", "shape"), [("gemm_tn", (8192, 8192, 8192)), ("add", (1 << 16, 8192)), ("add", (64, 64))]
)
def test_inside_a_step_a_kernel_costs_its_isolated_time_at_the_clock_and_the_cache_of_a_step(
    kind: str, shape: tuple[int, ...]
) -> None:
    """(alone - timer, at least 1 us) · factor · warmth + gap; what fills the cache is cold."""
    gpu, operator = gpu_named("h200"), Operator(kind, shape)
    factors = in_step_factors(gpu)
    prices = ModelCosts(cost_model("h200"), NETWORK, factors, 30.0, 1.0)
    alone = max(1.0, us("h200", kind, *shape) - 2.8)
    factor = factors.matrix if kind == "gemm_tn" else factors.stream
    assert prices.operator_us(operator) == pytest.approx(alone * factor * warmth(operator, gpu.l2_mb) + 1.1)
    assert (warmth(operator, gpu.l2_mb) == 1) == (operator.tensor_bytes > 2 * gpu.l2_mb * 1e6)


@given(st.lists(st.sampled_from(("add", "gather", "gelu")), min_size=1, max_size=12), st.floats(0, 300), st.booleans())
def test_after_the_host_has_waited_a_block_takes_what_host_or_gpu_take_at_least_and_both_at_most(
    names: list[str], host_us: float, syncs: bool
) -> None:
    """It waits for the GPU before the first operator; where it never does, it is always ahead."""
    prices = ModelCosts(cost_model("h200"), NETWORK, in_step_factors(gpu_named("h200")), host_us, 2.0)
    add, gelu, gather = (
        Operator("add", (1024, 1024)),
        Operator("gelu", (64, 64)),
        Collective("all_gather", 1e6, Group(4, 4)),
    )
    works = {"add": Op("add", work=add), "gelu": Op("gelu", work=gelu, launches=4), "gather": Op("gather", work=gather)}
    block = [works[name] for name in names]
    gpu = time_of(block, prices).us
    found = time_of([block[0]._replace(syncs=syncs), *block[1:]], prices)
    if not syncs:
        assert found.us == gpu
        return
    last = 4 if names[-1] == "gelu" else 2 if names[-1] == "gather" else 1  # launches, of which the first may start it
    assert max(gpu, found.host_us - last * host_us) <= found.us * (1 + 1e-9)
    assert found.waited_us == pytest.approx(found.us - gpu)
    assert found.us <= (gpu + found.host_us + host_us + prices.launch_us) * (1 + 1e-9)


def test_equal_calls_are_costed_once_wherever_they_are() -> None:
    """By their work, or by name, tensors and options; places, modules and measured times do not count."""
    costs = ModelCosts(cost_model("h200"), NETWORK, in_step_factors(gpu_named("h200")), 30.0, 0.5)
    x = Tensor((4096, 4096), "bf16", (4096, 1))
    seen = Op("aten.mm.default", (x, x), (x,), "forward", allocates=True)
    stated = Op("up", work=Operator("gemm_nn", (4096, 4096, 4096)))
    for call in (seen, stated):
        known = costs.cost(call)
        assert costs.cost(call._replace(module="model.layers.3", stream=2, after=(7,), saves=1.0)) is known
        assert costs.cost(call._replace(measured=Measured(123.0), calls=0.5, role="layout")) is known
    assert costs.cost(stated._replace(name="down")) is costs.cost(stated)
    assert costs.cost(seen._replace(options=("other",))) is not costs.cost(seen)
    assert costs.cost(stated._replace(launches=3)).host_us == 3 * costs.cost(stated).host_us
    assert costs.cost(seen).us == pytest.approx(costs.cost(stated).us), "one operator has one cost, recorded or stated"


def test_collectives_run_beside_operators_until_somebody_waits() -> None:
    """Two collectives that nobody waits for, one after the other on the network; the last operator joins them.

    The operator beside them is slower, as long as they run.
    """
    prices = ModelCosts(cost_model("h200"), NETWORK, in_step_factors(gpu_named("h200")), 30.0, 0.5)
    add, gather = Operator("add", (1024, 1024)), Collective("all_gather", 1000.0, Group(4, 4))
    one, sent = prices.operator_us(add), prices.collective_us(gather)
    waited, plain = Op("gather", work=gather), Op("add", work=add)
    beside = waited._replace(stream=BESIDE)
    block = [plain, beside, beside, plain._replace(launches=3), plain._replace(after=(-2,))]
    rows = timeline(block, prices)
    factor = slowdown(add, kernel_of(gather, sent), gpu_named("h200"))
    slow = min(factor * one, one + 2 * sent * (1 - 1 / factor))
    joined = one + max(slow, 2 * sent)
    assert [row.start_us for row in rows] == pytest.approx([0, one, one + sent, one, joined])
    assert [row.end_us for row in rows] == pytest.approx([one, one + sent, one + 2 * sent, one + slow, joined + one])
    assert slow > one
    found = time_of(block, prices)
    assert found[:4] == pytest.approx((joined + one, 30 * (1 + 0.5 + 0.5 + 3 + 1), 2 * one + slow, 2 * sent))
    joules = 2 * prices.joules.operator(add, one) + prices.joules.operator(add, slow)
    joules += 2 * prices.joules.collective(gather, sent)
    assert found.joules == pytest.approx(joules)
    assert time_of([waited, plain], prices).us == pytest.approx(sent + one)
    assert time_of([beside], prices).us == pytest.approx(sent), "a block ends with its last collective"
    assert time_of([], prices) == BlockTime() == (0, 0, 0, 0, 0, 0)
    assert prices.operator_us(Operator("stream", (0,))) == 0
    assert found + found == pytest.approx(found.times(2))


@given(st.floats(-12, 4))
def test_the_smaller_a_tensor_the_warmer_it_is(depth: float) -> None:
    """Matmuls gain less than memory-bound kernels, and what is 1.4 times the cache or larger gains nothing."""

    def at(kind: str, depth: float) -> float:
        operator = Operator(kind, (1024, 1024, 1024)[: 3 if kind == "gemm_tn" else 2])
        return warmth(operator, operator.tensor_bytes / 2**depth / 1e6)

    assert 0.5 < at("add", depth) <= at("gemm_tn", depth) <= 1
    assert at("add", depth) <= at("add", depth + 1)
    assert at("add", 0.5) == at("gemm_tn", 0.5) == 1


# Laws of operator prices


@laws
@given(rows(), st.sampled_from(gpu_names()))
def test_every_price_is_positive_and_finite(row: dict[str, Any], gpu: str) -> None:
    assert 0 < cost_model(gpu).us(operator_of(row, "row")) < math.inf


@laws
@given(rows(MATRIX), st.sampled_from(gpu_names()))
def test_no_product_is_faster_than_the_hardware(row: dict[str, Any], gpu: str) -> None:
    """Of 23,700 samples on H200, none came closer than 1.1; the margin is for trees that are asked beyond them."""
    model, operator = cost_model(gpu), operator_of(row, "row")
    chip = chip_of(model.gpu, operator.dtype)
    assert model.us(operator) >= 0.9 * max(operator.flops / chip.peak, operator.bytes / chip.bandwidth)


@laws
@given(st.sampled_from(("TN", "NN", "NT")), st.integers(32, 128), st.integers(16, 144), st.integers(16, 144))
def test_twice_the_tokens_of_a_large_product_take_about_twice_as_long(layout: str, t: int, n: int, k: int) -> None:
    model = cost_model("h200")
    tokens = "k" if layout == "NT" else "m"
    row = {"op": "gemm", "layout": layout, "m": 128 * t, "n": 128 * n, "k": 128 * k}
    if tokens == "k":
        row |= {"m": 128 * k, "k": 128 * t}
    once, twice = (model.us(operator_of(row | {tokens: factor * row[tokens]}, "row")) for factor in (1, 2))
    assert 1.5 < twice / once < 2.5


@settings(max_examples=40)
@given(st.lists(rows(), max_size=30), st.sampled_from(gpu_names()))
def test_many_are_priced_as_one_by_one(chosen: list[dict[str, Any]], gpu: str) -> None:
    operators = operators_of(chosen, "rows")
    shipped = cost_model(gpu)
    together, alone = fresh(shipped), fresh(shipped)
    assert together.us_of_all(operators) == pytest.approx([alone.us(o) for o in operators], rel=1e-12)
    assert together.us_of_all(operators[::-1]) == together.us_of_all(operators)[::-1], "from memory"


def fresh(model: CostModel) -> CostModel:
    """The same model, which remembers nothing."""
    below = model.fallback and fresh(model.fallback)
    return CostModel(model.gpu, model.sampled, model.regressors, below, model.isolation_us)


@laws
@given(rows(most=1 << 16), st.sampled_from(SAMPLED))
def test_trees_look_at_features_that_are_there(row: dict[str, Any], gpu: str) -> None:
    operator = operator_of(row, "row")
    for key, regressor in cost_model(gpu).regressors.items():
        if key == operator.kind:
            assert regressor.width <= len(features(operator, chip_of(gpu_named(gpu), operator.dtype)))


@pytest.mark.parametrize("name", sorted(SIZES))
def test_every_operator_of_a_row_has_work_to_do(name: str) -> None:
    operator = operator_of({"op": name} | dict.fromkeys(SIZES[name], 64), "row")
    assert operator.kind in KINDS
    assert operator.bytes > 0
    assert operator.flops >= 0


def test_an_operator_that_nobody_sampled_costs_its_roofline() -> None:
    model, operator = cost_model("h200"), Operator("neox_softmax_fwd", (4, 8, 512), "bf16")
    assert model.sampled_on(operator) == ""
    assert model.us(operator) == roofline_us(operator, chip_of(model.gpu, "bf16"))


@pytest.mark.parametrize("gpu", ["a100", "gh200"])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "rotary", "gelu", "add"])
def test_a_chain_of_gpt_neox_costs_about_what_eager_models_run_for_it(gpu: str, name: str) -> None:
    """Where both are known: so that a GPU without samples of the chain may take the other."""
    shape = (4, 16, 2048, 128) if name == "rotary" else (8192, 6144)
    model = cost_model(gpu)
    without = dataclasses.replace(
        model, regressors={kind: r for kind, r in model.regressors.items() if not kind.startswith("neox_")}
    )
    times = [[m.us(Operator(f"neox_{name}_{way}", shape, "fp16")) for way in ("fwd", "bwd")] for m in (model, without)]
    assert 0.6 < sum(times[0]) / sum(times[1]) < 1.67


def test_what_was_sampled_in_narrow_numbers_speaks_for_wide_ones() -> None:
    model = cost_model("h200")
    narrow, wide = (model.us(Operator("gelu", (16384, 8192), dtype)) for dtype in ("bf16", "fp32"))
    assert 1.6 < wide / narrow < 2.4


def test_many_rows_cost_as_much_as_each_alone() -> None:
    draw = np.random.default_rng(0)
    shapes = draw.integers(1, 256, (100, 3)) * 64
    operators = [Operator("gemm_tn", (int(m), int(n), int(k))) for m, n, k in shapes]
    single, together = fresh(cost_model("h200")), fresh(cost_model("h200"))
    assert list(together.us_of_all(operators)) == pytest.approx([single.us(operator) for operator in operators])


# Trees and model files


def some_trees(seed: int = 0, features: int = 4) -> tuple[Trees, Any, Any]:
    """Trees grown by scikit-learn on random rows, its own model, and other rows."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'lumos-sim[fit]'")
    from lumos.measure.fit import flatten, regressor

    draw = np.random.default_rng(seed)
    known = draw.normal(size=(300, features)).round(2)
    model = regressor()(max_iter=20, random_state=0).fit(known, known[:, 0] * known[:, 1] + draw.normal(size=300))
    return flatten(model), model, draw.normal(size=(500, features)).round(3) + 1e-4


@settings(max_examples=5)
@given(st.integers(0, 1000))
def test_trees_answer_as_the_library_that_grew_them(seed: int) -> None:
    trees, model, other = some_trees(seed)
    np.testing.assert_allclose(trees(other), model.predict(other), rtol=1e-5, atol=1e-5)


def model_file(regressors: dict[str, Regressor] | None = None, gpu: str = "h200") -> bytes:
    if regressors is None:
        regressors = {"gelu": cost_model("h200").regressors["gelu"], "gemm": cost_model("h200").regressors["gemm"]}
    return encode(gpu, regressors)


def test_a_model_that_is_written_and_read_is_the_same() -> None:
    shipped = cost_model("a100").regressors
    file = unpacked(encode("a100", shipped), "a100.npz")
    name, regressors = file.header["gpu"], regressors_of(file)
    assert name == "a100"
    assert regressors.keys() == shipped.keys()
    for key, regressor in regressors.items():
        assert (regressor.rows, regressor.error_pct) == (shipped[key].rows, shipped[key].error_pct)
        for read, written in zip(regressor.trees, shipped[key].trees, strict=True):
            np.testing.assert_array_equal(read, written)
            assert np.asarray(read).dtype == np.asarray(written).dtype


@settings(max_examples=100)
@given(st.data())
def test_a_corrupt_model_is_refused_or_was_not_hurt(tmp_path: Path, data: st.DataObject) -> None:
    """A broken file must never be walked: the loop over trees has no bounds."""
    content = bytearray(model_file({"gelu": cost_model("h200").regressors["gelu"]}))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from((len(content), len(content) // 2, 10, 0)))
    path = tmp_path / "model.npz"
    path.write_bytes(content[:cut])
    with suppress(InputError):
        assert 0 < read_cost_model(path).us(Operator("gelu", (1024, 1024))) < math.inf


def changed(**columns: Any) -> bytes:
    """A model file with sound packing and wrong trees."""
    gelu = cost_model("h200").regressors["gelu"]
    return model_file({"gelu": Regressor(gelu.trees._replace(**columns), 1.0, 100)})


def packed(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


GELU = cost_model("h200").regressors["gelu"].trees
WRONG = {
    "root beyond the table": changed(root=GELU.root + len(GELU.left)),
    "negative root": changed(root=GELU.root - 1),
    "a circle": changed(left=np.zeros_like(GELU.left)),
    "children beyond the table": changed(left=GELU.left + len(GELU.left)),
    "columns of different lengths": changed(left=GELU.left[:-1]),
    "two dimensions": changed(root=GELU.root[None]),
    "numbers of another kind": changed(left=GELU.left.astype(np.float64)),
    "not a number": changed(threshold=GELU.threshold * np.float32("nan")),
    "an infinite start": changed(start=math.inf),
    "a GPU that nobody knows": model_file(gpu="abacus"),
    "nothing": b"",
    "text": b"hello",
    "a plain array": packed(lambda file: np.save(file, np.arange(3))),
    "an archive without a header": packed(lambda file: np.savez(file, root=np.arange(3))),
    "an archive of something else": packed(lambda file: zipfile.ZipFile(file, "w").close()),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_model_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "model.npz"
    path.write_bytes(WRONG[what])
    with pytest.raises(InputError, match=r"model\.npz: (not a model file|its trees are damaged|fitted on 'abacus')"):
        read_cost_model(path)


def test_trees_for_other_features_than_ours_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    path.write_bytes(changed(feature=np.where(GELU.feature >= 0, 100, -1).astype(np.int16)))
    with pytest.raises(InputError, match="does not fit gelu; fit it again"):
        read_cost_model(path).us(Operator("gelu", (1024, 1024)))


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    np.savez_compressed(path, header=np.zeros(1 << 28, np.uint8))
    with pytest.raises(InputError, match="not a model file"):
        read_cost_model(path)


def test_a_model_without_a_family_asks_the_shipped_one(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    path.write_bytes(model_file({"gelu": cost_model("h200").regressors["gelu"]}, gpu="h100"))
    model, shipped = read_cost_model(path), cost_model("h100")
    silu, gelu = Operator("silu", (1024, 1024)), Operator("gelu", (1024, 1024))
    assert (model.sampled_on(silu), model.sampled_on(gelu)) == ("h200", "h100")
    assert model.us(silu) == shipped.us(silu)


def test_a_gpu_is_transferred_unless_its_own_samples_speak(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    path.write_bytes(model_file(gpu="h100"))
    assert not read_cost_model(path).transferred
    assert read_cost_model(path, "b200").transferred
    assert [name for name in SAMPLED if cost_model(name).transferred] == []
    assert cost_model("h100").transferred


def test_the_prices_of_one_gpu_are_not_remembered_for_another(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    path.write_bytes(model_file())
    row = Operator("gemm_tn", (4096, 4096, 4096))
    assert read_cost_model(path).us(row) < read_cost_model(path, "a100").us(row)


# Rows


def test_a_row_is_an_operator() -> None:
    gemm = {"op": "gemm", "m": 8, "n": 16, "k": 32, "layout": "NT", "dtype": "fp8", "id": "mine"}
    assert operator_of(gemm, "row") == Operator("gemm_nt", (8, 16, 32), "fp8")
    assert operator_of({"op": "bmm", "b": 2, "h": 3, "s": 5, "d": 7}, "row") == Operator("bmm", (6, 5, 5, 7))


def test_all_mistakes_of_all_rows_are_told_at_once() -> None:
    wrong = [
        {"op": "gem", "m": 1, "n": 1, "k": 1},
        {"op": "gelu", "t": 1, "h": 1},
        {"op": "gemm", "m": 0, "n": 1.5, "layout": "XX", "dtype": "int8"},
        "gemm",
        {"t": 1},
        {"op": "gelu", "t": True, "h": 1 << 40},
        {"op": ["gelu"], "dtype": []},
        {"op": "matmul", "m": 1},
    ]
    with pytest.raises(InputError) as told:
        operators_of(wrong, "r.json")
    assert str(told.value).splitlines() == [
        'r.json: rows[0]: op = "gem" is not known: did you mean gemm? (`lumos cost --help` lists all)',
        'r.json: rows[2]: dtype = "int8" is not known: use bf16, fp16, fp32, tf32 or fp8',
        'r.json: rows[2]: layout = "XX" is not known: use TN, NN or NT',
        "r.json: rows[2]: m = 0 is not a size: give a whole number from 1 to 1099511627775",
        "r.json: rows[2]: n = 1.5 is not a size: give a whole number from 1 to 1099511627775",
        "r.json: rows[2]: k is missing: gemm needs m, n and k",
        'r.json: rows[3]: "gemm" is not a row; give an object such as {"op": "gemm", "m": 4096, "n": 4096, "k": 4096}',
        'r.json: rows[4]: op is missing: give a name, as in {"op": "gemm", "m": 4096, "n": 4096, "k": 4096}',
        "r.json: rows[5]: t = true is not a size: give a whole number from 1 to 1099511627775",
        "r.json: rows[5]: h = 1099511627776 is not a size: give a whole number from 1 to 1099511627775",
        "r.json: rows[6]: dtype = a list of 0 is not known: use bf16, fp16, fp32, tf32 or fp8",
        "r.json: rows[6]: op = a list of 1 is not known: did you mean gelu? (`lumos cost --help` lists all)",
        'r.json: rows[7]: op = "matmul" is not known: did you mean gemm? (`lumos cost --help` lists all)',
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(sorted(SIZES)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(("op", "t", "h", "m", "dtype")), inner),
    max_leaves=12,
)


@laws
@given(JSON)
@example([{"op": "gelu", "t": 1, "h": 1}])
def test_whatever_is_given_is_priced_or_refused_in_words(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(value))
    with suppress(InputError):
        told = read_rows(path)
        answer = cost_answer(cost_model("h200"), told, operators_of(told, str(path)))
        assert all(row["us"] > 0 for row in answer["rows"])


@pytest.mark.parametrize("content", [b"", b"hello", b'{"row": []}', b"3", b"\xff", b"[" * 100_000])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"rows\.json: .*\"op\": \"gemm\""):
        read_rows(path)


def test_the_help_names_every_operator() -> None:
    told = (cost_command.__doc__ or "").split()
    plain = {name for name in SIZES if not name.startswith("neox_")}
    assert plain - set(told) == {f"{name}_bwd" for name in ("rms_norm", "layer_norm", "gelu", "silu")}


def test_prices_that_rest_on_less_than_samples_are_marked() -> None:
    chosen = [{"op": "gemm", "m": 512, "n": 512, "k": 512, "dtype": "fp8"}, {"op": "rms_norm", "t": 512, "h": 512}]
    told = {gpu: cost_answer(cost_model(gpu), chosen, operators_of(chosen, ""))["warnings"] for gpu in gpu_names()}
    assert told["h200"] == []
    assert any("a100 was not sampled for gemm in fp8, rms_norm: the corrections of h200" in w for w in told["a100"])
    assert any("a100 has no fp8" in w for w in told["a100"])
    assert any("b200 was never sampled" in w for w in told["b200"])
    assert not any("never sampled" in w for w in told["a100"])


# The command line


ROWS = [
    {"op": "gemm", "m": 4096, "n": 4096, "k": 4096, "id": "a"},
    {"op": "sdpa_fwd", "b": 1, "h": 32, "s": 4096, "d": 128},
    {"op": "rms_norm", "t": 4096, "h": 4096},
]


def test_cost_answers_the_rows_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps({"rows": ROWS}))
    done = lumos("cost", "rows.json", "--gpu", "H100", "--json", "-o", "prices.csv", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["gpu"] == "h100"
    assert [{k: v for k, v in row.items() if k not in ("us", "bound")} for row in answer["rows"]] == ROWS
    assert [row["bound"] for row in answer["rows"]] == ["compute", "compute", "memory"]
    assert all(row["us"] > 1 for row in answer["rows"])
    assert "never sampled" in answer["warnings"][0]
    with (tmp_path / "prices.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["us"]) for row in table] == [row["us"] for row in answer["rows"]]
    assert list(table[0])[-2:] == ["us", "bound"]


def test_cost_reads_standard_input_and_shows_a_table(tmp_path: Path) -> None:
    done = lumos("cost", "-", "--gpu", "h200", cwd=tmp_path, stdin=json.dumps(ROWS))
    assert (done.returncode, done.stderr) == (0, "")
    assert "m=4096 n=4096 k=4096" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cost", "rows.json"), "--gpu is missing: give a name, as in --gpu h200"),
        (("cost", "rows.json", "--gpu", "hh200"), "did you mean h200?"),
        (("cost", "none.json", "--gpu", "h200"), "none.json: cannot be read (No such file or directory)"),
        (("cost", "rows.json", "--gpu", "h200", "-o", "a.npz"), "-o a.npz: the extension must name the format"),
        (("cost", "rows.json", "--gpu", "h200", "-o", "rows.json"), "-o rows.json: that is the input itself"),
        (("cost", "rows.json", "--model", "rows.json"), "rows.json: not a model file"),
        (("cost", "rows.json", "--model", "none.npz"), "none.npz: cannot be read (No such file or directory)"),
        (("sample", "-o", "s.txt"), "-o s.txt: the extension must name the format; use .jsonl"),
        (("sample", "-o", "s.jsonl", "--only", "gem"), "--only gem: not known"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_refused_in_one_line(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    before = sorted(tmp_path.iterdir())
    done = lumos(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr
    assert sorted(tmp_path.iterdir()) == before
