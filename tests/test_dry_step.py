"""A recorded step on a timeline, its memory, and what the allocator reserves; recordings are written here by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from better_gpus import BETTER_GPUS
from lumos.costs.host_costs import call_us
from lumos.dry_run.dry_files import read_recording
from lumos.dry_run.dry_prediction import DryPrediction
from lumos.dry_run.from_script import predict_recording
from lumos.dry_run.recorded_step import Recording, StorageEvent, write_recording
from lumos.errors import InputError, OptionError
from lumos.memory.recorded_memory import CachingAllocator
from lumos.program.op import UNCOMPILED, UNSEEN, Op, Tensor
from lumos.program.operators import Collective
from lumos.read.job import read_job
from lumos.setup import gpu_named

MIB = 1 << 20
BIG = Tensor((8192, 8192), "bf16", (8192, 1), 2)
SMALL = Tensor((8,), "bf16", (1,), 2)
EIGHT = tuple(range(8))


def matmul(**more: object) -> Op:
    return Op("aten.mm.default", (BIG, BIG), (BIG,), "forward", allocates=True)._replace(**more)


def gather(**more: object) -> Op:
    return Op("all_gather", (BIG,), (BIG,), "forward", stream=-1, ranks=EIGHT)._replace(**more)


def recording(*ops: Op, **more: object) -> Recording:
    values = {"parameters": 10, "trained_parameters": 10, "tokens": 0, "alive": {}, "events": [], "roles": {},
              "places": {}, "most_bytes": 0, "world": 8, "made_by": {"torch": "2.13.0"}}  # fmt: skip
    return Recording(list(ops), **(values | more))  # type: ignore[arg-type]


def predicted(*ops: Op, changes: tuple[str, ...] = ("cluster.gpu=h200",), **more: object) -> DryPrediction:
    return predict_recording(recording(*ops, **more), changes)


# Energy


def test_collectives_and_updates_of_a_dry_run_draw_power_as_those_of_a_setup_do() -> None:
    alone, joined = predicted(matmul()), predicted(matmul(), gather())
    joules = joined.dry.costs.joules
    talk = joined.dry.ops[1]
    assert isinstance(talk.work, Collective)
    assert joined.dry.energy(1.0).work[0] - alone.dry.energy(1.0).work[0] == pytest.approx(
        joules.collective(talk.work, joined.dry.costs.cost(talk).us)
    )
    update = Op("aten._fused_adamw_.default", (BIG,) * 4, (), "optimizer")
    updated = predicted(update)
    ((_, us, _),) = updated.dry.kernels
    assert updated.dry.energy(1.0).work[0] == pytest.approx(joules.update_w * us * 1e-6)


# What it ran on


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_the_denominator_of_mfu_is_the_peak_of_the_matmuls(dtype: str, size: int) -> None:
    tensor = Tensor((8192, 8192), dtype, (8192, 1), size)
    found = predicted(matmul(inputs=(tensor, tensor), outputs=(tensor,)))
    assert found.setup.train.precision == dtype
    assert found.hfu is not None
    assert 0.4 < found.hfu < 1  # of one matmul


@given(st.integers(0, 12), st.integers(0, 12), st.sampled_from(("fp32", "tf32", "bf16", "fp8")))
def test_a_mix_of_precisions_is_not_used_above_its_peak(slow: int, fast: int, dtype: str) -> None:
    other = Tensor((8192, 8192), dtype.replace("tf32", "fp32"), (8192, 1), 4)
    mixed = matmul(inputs=(other, other), outputs=(other,), options=("tf32",) if dtype == "tf32" else ())
    found = predicted(*[mixed] * slow, *[matmul()] * (1 + fast))
    assert found.mfu is not None
    assert found.hfu is not None
    assert 0 < found.mfu <= found.hfu < 1


@settings(deadline=None)
@given(
    st.integers(256, 1024).map(lambda size: 8 * size),
    st.sampled_from((("fp32", 4), ("bf16", 2))),
    st.sampled_from(("aten.add.Tensor", "aten.native_layer_norm.default", "aten.sum.default", "aten.mul.Tensor")),
    st.sampled_from(BETTER_GPUS),
)
def test_a_gpu_with_better_figures_moves_no_tensor_slower(
    size: int, precision: tuple[str, int], name: str, pair: tuple[str, str]
) -> None:
    """Small ones are left out: they take as long as a kernel takes at least, which is no figure of a data sheet."""
    tensor = Tensor((size, size), precision[0], (size, 1), precision[1])
    op = matmul(inputs=(tensor, tensor), outputs=(tensor,))._replace(name=name)
    assume(all(gpu_named(gpu).supports(precision[0]) for gpu in pair))
    times = [predicted(op, changes=(f"cluster.gpu={gpu}",)).step_ms for gpu in pair]
    assert times[1] <= times[0] * 1.001


def test_a_step_without_matmuls_runs_on_a_gpu_without_bf16() -> None:
    wide = Tensor((1024, 1024), "fp32", (1024, 1), 4)
    added = matmul(inputs=(wide, wide), outputs=(wide,))._replace(name="aten.add.Tensor")
    assert predicted(added, changes=("cluster.gpu=v100",)).mfu == 0


def test_the_gpu_that_the_script_found_is_assumed_with_a_note() -> None:
    found = predicted(matmul(), changes=(), made_by={"gpu": "NVIDIA B200"})
    assert found.setup.cluster.gpu == "b200"
    assert "cluster.gpu is not given: assuming b200, which the script found" in found.warnings
    assert "cluster.gpu is not given: assuming h100" in predicted(matmul(), changes=()).warnings


# Time


@given(st.integers(0, 6), st.integers(0, 6))
def test_eager_code_in_place_of_compiled_code_lowers_the_lower_end_alone(eager: int, fused: int) -> None:
    relu = Op("aten.relu.default", (BIG,), (BIG,), "forward", allocates=True)
    plain = predicted(matmul(), *[relu] * (eager + fused))
    found = predicted(matmul(), *[relu._replace(options=(UNCOMPILED,))] * eager, *[relu] * fused)
    assert found.step_ms == pytest.approx(plain.step_ms)
    assert found.interval_ms[1] == pytest.approx(plain.interval_ms[1])
    assert [part["kind"] for part in found.as_dict()["approximations"]] == ["uncompiled"] * (eager > 0)
    without = predicted(matmul(), *[relu] * fused)  # as if torch.compile fused all of them
    assert found.interval_ms[0] <= plain.interval_ms[0] + 1e-9
    assert found.interval_ms[0] == pytest.approx(without.interval_ms[0], rel=0.1)


def test_compiled_code_that_ran_eagerly_is_not_said_to_be_too_large() -> None:
    held = {"alive": {0: 150 << 30}, "most_bytes": 150 << 30}
    assert predicted(matmul(), **held).fits is False
    found = predicted(matmul(options=(UNCOMPILED,)), **held)
    assert found.fits is None
    assert found.as_dict()["fits"] is None
    assert not any(text.startswith("does not fit") for text in found.warnings)


@given(st.integers(0, 4))
def test_kernels_that_were_not_seen_widen_the_interval_both_ways(unseen: int) -> None:
    strange = Op("mine.scan.default", (BIG,), (BIG,), "forward", allocates=True, options=(UNSEEN,))
    fewer, more = (predicted(matmul(), *[strange] * count) for count in (unseen, unseen + 1))
    assert more.interval_ms[0] / more.step_ms < fewer.interval_ms[0] / fewer.step_ms
    assert more.interval_ms[1] / more.step_ms > fewer.interval_ms[1] / fewer.step_ms
    (part,) = more.approximations
    assert part.operators == ("mine.scan.default",)


def test_sizes_that_depend_on_values_raise_the_upper_end_alone_and_are_named() -> None:
    places = Op("aten.nonzero.default", (SMALL,), (SMALL,), "forward", allocates=True)
    few, many = (predicted(matmul(), *[places] * count) for count in (8, 32))
    assert many.interval_ms[0] / many.step_ms == pytest.approx(few.interval_ms[0] / few.step_ms)
    assert many.interval_ms[1] / many.step_ms > 1.5 * few.interval_ms[1] / few.step_ms
    assert any("32 results depend on the values" in text for text in many.warnings)
    assert not any("depend on the values of tensors" in text for text in few.warnings)


def test_matmuls_of_one_stream_follow_each_other() -> None:
    one, four = (predicted(*[matmul()] * count).step_ms for count in (1, 4))
    assert four == pytest.approx(4 * one, rel=0.05)


def test_a_collective_runs_beside_matmuls_unless_one_waits_for_it() -> None:
    beside = predicted(gather(), *[matmul()] * 8).breakdown
    waited = predicted(gather(), matmul(after=(0,)), *[matmul()] * 7).breakdown
    assert beside.exposed_comm_ms < 0.2 * beside.overlapped_ms
    assert waited.overlapped_ms == pytest.approx(0.0, abs=0.01)
    assert waited.exposed_comm_ms > 0


def test_a_collective_between_nodes_takes_longer_than_inside_one() -> None:
    inside = predicted(gather()).step_ms
    between = predicted(gather(), changes=("cluster.gpu=h200", "cluster.gpus_per_node=1")).step_ms
    assert between > 1.5 * inside


def test_kernels_of_a_side_stream_take_their_time_from_the_first() -> None:
    alone = predicted(*[matmul()] * 4).step_ms
    shared = predicted(matmul(stream=1), *[matmul()] * 4).step_ms
    assert shared == pytest.approx(alone * 5 / 4, rel=0.06)


def test_the_host_waits_for_what_it_synchronises_with() -> None:
    wait = Op("cudaStreamSynchronize", (), (), "forward", after=(0,))
    host = [Op("aten.view.default", (SMALL,), (SMALL,), "forward")] * 2000
    free, held = (predicted(matmul(), *middle, *host).step_ms for middle in ((), (wait,)))
    launching = sum(map(call_us, host)) / 1e3
    assert held == pytest.approx(free + predicted(matmul()).step_ms, rel=0.1)
    assert free >= launching


def test_many_small_operators_are_bound_by_the_host_and_a_faster_host_helps() -> None:
    ops = [matmul()._replace(inputs=(SMALL, SMALL), outputs=(SMALL,), name="aten.add.Tensor")] * 500
    slow = predicted(*ops)
    fast = predicted(*ops, changes=("cluster.gpu=h200", "cluster.host=2"))
    assert slow.host_bound
    assert fast.step_ms == pytest.approx(slow.step_ms / 2, rel=0.1)


def test_a_slower_gpu_takes_longer() -> None:
    ops = [matmul()] * 4
    assert predicted(*ops, changes=("cluster.gpu=a100",)).step_ms > 2 * predicted(*ops).step_ms


# What may be changed


@pytest.mark.parametrize(
    ("change", "words"), [("train.seq=5", "sizes of its script"), ("cluster.gpus=64", "--world 64")]
)
def test_what_a_script_has_decided_cannot_be_set(change: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        predicted(matmul(), changes=(change,))


# Memory


def test_the_peak_is_what_is_alive_at_once_and_its_parts_add_up() -> None:
    events = [StorageEvent(0, 3, 4 * MIB), StorageEvent(1, 4, 6 * MIB), StorageEvent(1, 3, -4 * MIB)]
    found = recording(matmul(), matmul(), alive={1: 10 * MIB, 2: MIB}, events=events, roles={1: "weights"},
                      places={3: "blocks.0.mlp.w1", 4: "blocks.1.mlp.w1"})  # fmt: skip
    assert found.peak_bytes == 21 * MIB
    assert found.held_bytes == {"weights": 10 * MIB, "activations": 11 * MIB}
    assert found.held_by_module == {"blocks.1.mlp": 6 * MIB, "blocks.0.mlp": 4 * MIB, "(no module)": MIB}


def test_memory_that_was_held_before_the_step_counts_for_the_peak() -> None:
    found = recording(matmul(), alive={1: MIB}, roles={1: "weights"}, most_bytes=5 * MIB)
    assert found.peak_bytes == 5 * MIB
    assert sum(found.held_bytes.values()) == 5 * MIB


sizes = st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=30)


@given(sizes)
def test_reserved_memory_covers_what_is_allocated(sizes: list[int]) -> None:
    allocator = CachingAllocator().run(enumerate(sizes))
    assert allocator.reserved >= sum(sizes)


@given(sizes)
def test_what_is_released_serves_the_same_requests_again(sizes: list[int]) -> None:
    once = [*enumerate(sizes), *((storage, 0) for storage in range(len(sizes)))]
    assert CachingAllocator().run([*once, *once]).reserved == CachingAllocator().run(once).reserved


@pytest.mark.parametrize(("size", "segment"), [(1, 2), (MIB, 2), (MIB + 1, 20), (11 * MIB, 12), (13 * MIB, 14)])
def test_segments_have_the_sizes_of_pytorch(size: int, segment: int) -> None:
    assert CachingAllocator().run([(0, size)]).reserved == segment * MIB


# Files


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    kept = recording(gather(), matmul(after=(0,)), matmul(), events=[StorageEvent(1, 7, 512)], places={7: "head"})
    write_recording(tmp_path / "rank0.dry.json.gz", kept)
    assert read_recording(tmp_path / "rank0.dry.json.gz") == kept


@pytest.mark.parametrize("content", [b"", b"{}", b"not gzip", b"\x1f\x8b damaged"])
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank0.dry.json.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a dry run"):
        read_recording(path)


def test_a_dry_run_given_as_a_trace_is_named(tmp_path: Path) -> None:
    write_recording(tmp_path / "rank0.dry.json.gz", recording(matmul()))
    for path in (tmp_path, tmp_path / "rank0.dry.json.gz"):
        with pytest.raises(InputError, match=r"a dry run of .* ask lumos predict --from"):
            read_job(path)


def test_an_operator_that_waits_for_a_later_one_is_refused(tmp_path: Path) -> None:
    write_recording(tmp_path / "rank0.dry.json.gz", recording(matmul(after=(1,)), matmul()))
    with pytest.raises(InputError, match="operator 0"):
        read_recording(tmp_path / "rank0.dry.json.gz")
