"""Costs of recorded operators: what each of them does, and what that costs inside a step."""

from __future__ import annotations

import pytest

from lumos.costs.energy import in_step_factors
from lumos.costs.kernel_work import flops_of, matrix_operator, work_of, works_of
from lumos.costs.model_costs import ModelCosts, corrections
from lumos.costs.network import network_of
from lumos.costs.operator_model import cost_model
from lumos.data_files import read_table
from lumos.program.op import Op, Tensor
from lumos.setup.gpus import gpu_named

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "int64": 8, "bool": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
         "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1}  # fmt: skip


def tensor(*shape: int, dtype: str = "bf16", last: bool = False) -> Tensor:
    strides, step = [0] * len(shape), 1
    order = [1, *range(len(shape) - 1, 1, -1), 0] if last else range(len(shape) - 1, -1, -1)
    for index in order:
        strides[index], step = step, step * shape[index]
    return Tensor(shape, dtype, tuple(strides), SIZES[dtype])


def op(name: str, *inputs: Tensor, out: tuple[Tensor, ...], options: tuple[str, ...] = ()) -> Op:
    return Op(f"aten.{name}", inputs, out, "forward", allocates=True, options=options)


def convolution(*, n: int = 64, c: int = 256, k: int = 256, size: int = 14, groups: int = 1, last: bool = False,
                dtype: str = "bf16") -> Op:  # fmt: skip
    x, y = tensor(n, c, size, size, dtype=dtype, last=last), tensor(n, k, size, size, dtype=dtype, last=last)
    return op("convolution.default", x, tensor(k, c // groups, 3, 3, dtype=dtype, last=last), out=(y,))


def backward(of: Op, mask: str) -> Op:
    x, w = of.inputs
    return op("convolution_backward.default", of.outputs[0], x, w, out=(x, w), options=(f"mask={mask}",))


@pytest.fixture(scope="module")
def costs() -> ModelCosts:
    return on("h200")


def on(name: str) -> ModelCosts:
    gpu = gpu_named(name)
    factors = in_step_factors(gpu)
    return ModelCosts(cost_model(name), network_of(gpu, "infiniband", factors), factors, 5.0, 1.0)


# ---------------------------------------------------------------------- convolutions
def test_a_convolution_amounts_to_a_matmul_over_all_places() -> None:
    (work,) = works_of(convolution(n=64, c=256, k=512, size=14))
    assert work.operator is not None
    assert work.operator.shape == (64 * 14 * 14, 512, 256 * 9)


def test_flops_of_a_convolution_are_those_of_its_matmul_and_twice_that_backward(costs: ModelCosts) -> None:
    of = convolution(n=64, c=256, k=512, size=14)
    assert flops_of(of) == 2 * 64 * 14 * 14 * 512 * 256 * 9
    assert flops_of(backward(of, "110")) == 2 * flops_of(of)


def test_a_backward_pass_computes_the_gradients_that_are_asked_for(costs: ModelCosts) -> None:
    of = convolution()
    only_input, only_weight, both = (costs.cost(backward(of, mask)).us for mask in ("100", "010", "110"))
    gap = costs.factors.launch_gap_us
    assert both == pytest.approx(only_input + only_weight - gap)
    assert costs.cost(backward(of, "111")).us > both


def test_without_a_mask_gradients_follow_from_the_outputs() -> None:
    of = convolution(k=512)
    x, w = of.inputs
    image = op("convolution_backward.default", of.outputs[0], x, w, out=(w,))
    assert len(works_of(image)) == 1
    assert works_of(image) == works_of(backward(of, "010"))


def test_depthwise_convolutions_are_bound_by_memory_not_by_a_matmul() -> None:
    (work,) = works_of(convolution(c=256, k=256, groups=256))
    assert work.operator is None


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("last", [False, True])
def test_twice_the_images_take_longer_and_at_most_twice_as_long(costs: ModelCosts, dtype: str, last: bool) -> None:
    few, many = (costs.cost(convolution(n=n, size=28, last=last, dtype=dtype)).us for n in (64, 256))
    assert 2 * few < many < 8 * few


def test_a_transposed_convolution_is_the_gradient_of_an_ordinary_one() -> None:
    small, large, w = tensor(8, 64, 16, 16), tensor(8, 32, 32, 32), tensor(64, 32, 2, 2)
    (up,) = works_of(op("convolution.default", small, w, out=(large,), options=("transposed",)))
    (gradient,) = works_of(op("convolution_backward.default", small, large, w, out=(), options=("mask=100",)))
    assert up.operator == gradient.operator


# ---------------------------------------------------------------------- precision
def test_fp32_matmuls_use_tensor_cores_only_where_allowed(costs: ModelCosts) -> None:
    a = tensor(4096, 4096, dtype="fp32")
    exact, rounded = (op("mm.default", a, a, out=(a,), options=options) for options in ((), ("tf32",)))
    kinds = [matrix_operator(one) for one in (exact, rounded)]
    assert [kind and kind.dtype for kind in kinds] == ["fp32", "tf32"]
    assert costs.cost(exact).us > 3 * costs.cost(rounded).us


def test_attention_that_the_cost_model_has_no_samples_of_has_its_own_family() -> None:
    q = tensor(2, 16, 1024, 64)
    of = Op("attention.forward", (q, q, q), (q,), "forward")
    assert works_of(of._replace(options=("causal",)))[0].family == "sdpa_fwd"
    assert works_of(of)[0].family == works_of(of._replace(options=("causal", "dropout")))[0].family == "attention.half"


def test_dropout_and_masks_make_attention_slower(costs: ModelCosts) -> None:
    q = tensor(8, 16, 1024, 64)
    plain, dropped, masked = (
        costs.cost(Op("attention.forward", (q, q, q), (q,), "forward", options=options)).us
        for options in ((), ("dropout",), ("masked",))
    )
    assert plain < dropped
    assert plain < masked


# ---------------------------------------------------------------------- normalisation, optimizers
@pytest.mark.parametrize("name", ["native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit",
                                  "_batch_norm_with_update", "batch_norm_backward", "native_batch_norm_backward",
                                  "cudnn_batch_norm_backward"])  # fmt: skip
def test_batch_norms_are_recognised_by_all_their_names(name: str) -> None:
    x, w = tensor(32, 64, 28, 28, dtype="fp32"), tensor(64, dtype="fp32")
    expected = "batch_norm_backward.cudnn" if "backward" in name else "batch_norm.cudnn"
    assert work_of(op(f"{name}.default", x, w, w, out=(x,))).family == expected
    half = tensor(32, 64, 28, 28)
    assert work_of(op(f"{name}.default", half, w, w, out=(half,))).family.endswith("native")


def test_few_channels_are_slow_in_batch_norm_unless_they_are_last(costs: ModelCosts) -> None:
    w = tensor(64)
    first, last = (
        costs.cost(op("native_batch_norm.default", x, w, w, out=(x,))).us
        for x in (tensor(128, 64, 112, 112), tensor(128, 64, 112, 112, last=True))
    )
    assert first > 1.5 * last


def test_optimizers_over_lists_move_every_list_once() -> None:
    some = (tensor(1024, 1024, dtype="fp32"),) * 10
    moved = {
        name: work_of(op(name, *some * lists, out=())).bytes / sum(t.bytes for t in some)
        for name, lists in (("_foreach_mul_.Scalar", 1), ("_foreach_add_.List", 2), ("_foreach_addcdiv_.Scalar", 3),
                            ("_foreach_norm.Scalar", 1), ("_foreach_zero_.default", 1),
                            ("_fused_sgd_.default", 3))
    }  # fmt: skip
    assert list(moved.values()) == [2, 3, 4, 1, 1, 5]


def test_a_fused_optimizer_is_cheaper_than_its_steps(costs: ModelCosts) -> None:
    some = (tensor(1024, 1024, dtype="fp32"),) * 100
    fused = costs.cost(op("_fused_adamw_.default", *some * 4, out=())).us
    steps = (("_foreach_lerp_.Scalar", 2), ("_foreach_mul_.Scalar", 1), ("_foreach_addcmul_.Scalar", 3),
             ("_foreach_sqrt.default", 1), ("_foreach_addcdiv_.Scalar", 3))  # fmt: skip
    assert fused < sum(costs.cost(op(name, *some * lists, out=())).us for name, lists in steps)


# ---------------------------------------------------------------------- sources
def test_what_has_no_samples_is_a_roofline_and_says_so(costs: ModelCosts) -> None:
    x = tensor(8, 64, 32, 32)
    assert costs.cost(op("grid_sampler_2d.default", x, tensor(8, 32, 32, 2), out=(x,))).source == "roofline"
    assert costs.cost(op("relu.default", x, out=(x,))).source == "fitted"
    assert on("h100").cost(op("relu.default", x, out=(x,))).source == "transferred"


def test_copies_from_the_host_cross_pcie(costs: ModelCosts) -> None:
    x = tensor(64 << 20, dtype="uint8")
    pinned, pageable = (
        costs.cost(op("_to_copy.default", x, out=(x,), options=options)) for options in (("h2d", "pinned"), ("h2d",))
    )
    assert 1000 < pinned.us < pageable.us
    assert pinned.source == "roofline"


def test_trees_know_only_families_that_operators_have() -> None:
    of = convolution()
    widths = {"convolution": len(works_of(of)[0].features)}
    assert corrections()["convolution"].width <= widths["convolution"]
    known = set(read_table("aten_costs.json")["families"]) | {"bmm", "gemm.fp32", "gemm.tf32"}
    assert set(corrections()) <= known


def test_a_gpu_with_half_the_bandwidth_is_slower_for_everything() -> None:
    here, there = on("h200"), on("a100")
    w = tensor(256)
    for one in (
        convolution(),
        op("native_batch_norm.default", tensor(64, 256, 28, 28), w, w, out=(tensor(64, 256, 28, 28),)),
        op("sort.default", tensor(1 << 20, dtype="fp32"), out=(tensor(1 << 20, dtype="fp32"),)),
    ):
        assert there.cost(one).us > here.cost(one).us


def test_grouped_matmuls_are_told_from_their_gradients_by_the_layout_of_the_weights() -> None:
    """Weights of 8 experts as (8, n, k), read transposed forward; 100 tokens of k = 64 become n = 128."""
    x, gradient = tensor(100, 64), tensor(100, 128)
    weights = tensor(8, 128, 64)
    turned = Tensor((8, 64, 128), "bf16", (8192, 1, 64), 2)
    forward = op("_grouped_mm.default", x, turned, out=(gradient,))
    inputs = op("_grouped_mm.default", gradient, weights, out=(x,))
    of_weights = op("_grouped_mm.default", tensor(128, 100), x, out=(weights,))
    kinds = [matrix_operator(one) for one in (forward, inputs, of_weights)]
    assert [one.kind for one in kinds if one] == ["grouped_gemm", "grouped_gemm_nn", "grouped_gemm_nt"]
    assert {one.shape for one in kinds if one} == {(8, 100, 128, 64)}
    assert {works_of(one)[0].family for one in (forward, inputs, of_weights)} == {"grouped_gemm"}


def test_the_gradient_of_one_expert_of_many_is_zeros_and_a_copy_of_it() -> None:
    part, whole = tensor(256, 64), tensor(8, 256, 64)
    zeros, copy = works_of(op("select_backward.default", part, out=(whole,)))
    assert (zeros.family, zeros.bytes) == ("fill", whole.bytes)
    assert copy.family.startswith("copy")
    assert copy.bytes == 2 * part.bytes
    assert len(works_of(op("select_backward.default", tensor(8, 64), out=(whole,)))) == 1, "not next to each other"


# ---------------------------------------------------------------------- 8 and 4 bits
@pytest.mark.parametrize(
    ("of", "scale", "packed", "dtype"),
    [
        ("float8_e4m3fn", "fp32", 1, "fp8"),
        ("float8_e5m2", "fp32", 1, "fp8"),
        ("float8_e4m3fn", "float8_e8m0fnu", 1, "mxfp8"),
        ("float4_e2m1fn_x2", "float8_e4m3fn", 2, "nvfp4"),
    ],
)
@pytest.mark.parametrize("version", ["_scaled_mm", "_scaled_mm_v2"])
def test_a_matmul_with_scales_is_a_matmul_of_its_precision(
    version: str, of: str, scale: str, packed: int, dtype: str, costs: ModelCosts
) -> None:
    m, n, k = 8192, 4096, 2048
    a, b = tensor(m, k // packed, dtype=of), tensor(n, k // packed, dtype=of)
    scales = (tensor(m, dtype=scale), tensor(n, dtype=scale))
    turned = b._replace(shape=b.shape[::-1], strides=b.strides[::-1])
    scaled = op(f"{version}.default", a, turned, *scales, out=(tensor(m, n),))
    (work,) = works_of(scaled)
    assert work.operator is not None
    assert (work.operator.shape, work.operator.dtype) == ((m, n, k), dtype)
    plain = op("mm.default", tensor(m, k), tensor(k, n), out=(tensor(m, n),))
    assert flops_of(scaled) == flops_of(plain)
    assert 0.3 < costs.cost(scaled).us / costs.cost(plain).us < 1.0


def test_grouped_matmuls_with_scales_are_those_of_fp8(costs: ModelCosts) -> None:
    tokens, inward, outward, experts = 8192, 2048, 1024, 16
    weights = tensor(experts, inward, outward)
    plain = op("_grouped_mm.default", tensor(tokens, inward), weights, out=(tensor(tokens, outward),))
    narrow = tuple(t._replace(dtype="float8_e4m3fn", element=1) for t in plain.inputs)
    scaled = plain._replace(name="aten._scaled_grouped_mm.default", inputs=(*narrow, tensor(tokens, dtype="fp32")))
    assert matrix_operator(plain) is not None
    assert matrix_operator(scaled) == matrix_operator(plain)._replace(dtype="fp8")
    assert flops_of(scaled) == flops_of(plain)
