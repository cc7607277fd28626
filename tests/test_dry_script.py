"""Dry runs of training scripts and functions: what is promised of devices, memory, values, collectives and errors.

Functions run in this process by `lumos.dry_run`; scripts by the command line, which takes seconds each.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import lumos  # noqa: E402
from lumos.dry_run import record  # noqa: E402
from lumos.dry_run.dry_files import read_recording  # noqa: E402
from lumos.dry_run.from_script import predict_recording  # noqa: E402
from lumos.dry_run.recorded_step import Recording, write_recording  # noqa: E402
from lumos.errors import InputError, LumosError, OptionError  # noqa: E402
from support import PATIENCE_S  # noqa: E402

HEAD = """
import os, torch, torch.nn as nn, torch.distributed as dist
"""
TRAIN = """
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    loss = model(torch.randn(8, 64, device="cuda")).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
ON_CPU = TRAIN.replace(".cuda()", "").replace('"cuda"', '"cpu"')


def recorded(loss_of: Callable[[nn.Module], Any], model: nn.Module | None = None, **options: Any) -> Recording:
    """A dry run of three steps on a model: a linear layer, unless given."""

    def train() -> None:
        net = (model or nn.Linear(64, 64)).cuda()
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(3):
            loss_of(net).backward()
            optimizer.step()
            optimizer.zero_grad()

    return lumos.dry_run(train, **options)


def captured(tmp_path: Path, script: str, launch: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(HEAD + script)
    command = [sys.executable, "-m", "lumos.cli.main", "capture", "--dry", "-o", "dry", "--"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [*command, *(launch or (sys.executable,)), "train.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


def names(recording: Recording) -> list[str]:
    return [op.name for op in recording.ops]


def wide(recording: Recording, part: str) -> list[tuple[int, ...]]:
    """Shapes of what such operators of the forward pass write."""
    return [op.outputs[0].shape for op in recording.ops if part in op.name and op.phase == "forward" and op.outputs]


# ---------------------------------------------------------------------- devices, streams, memory
def test_a_single_process_has_no_variables_of_a_launcher(tmp_path: Path) -> None:
    script = TRAIN + "    assert 'RANK' not in os.environ and 'WORLD_SIZE' not in os.environ\n"
    assert captured(tmp_path, script).returncode == 0
    run = captured(tmp_path, "rank = os.environ['LOCAL_RANK']\n" + TRAIN)
    assert run.returncode == 2
    assert "the script reads LOCAL_RANK, which a launcher sets: add --world N" in run.stderr


def test_a_function_finds_the_gpu_it_asked_for() -> None:
    seen: dict[str, Any] = {}

    def loss(model: Any) -> Any:
        seen["name"], seen["count"] = torch.cuda.get_device_name(), torch.cuda.device_count()
        seen["free"] = torch.cuda.mem_get_info()[1] >> 30
        seen["at least ampere"] = torch.cuda.get_device_capability() >= (8, 0)
        return model(torch.randn(8, 64, device="cuda:0")).sum()

    recorded(loss, gpu="h200")
    assert "H200" in seen["name"]
    assert (seen["count"], seen["free"], seen["at least ampere"]) == (1, 139, True)


def test_devices_of_other_indices_can_be_chosen() -> None:
    def loss(model: Any) -> Any:
        torch.cuda.set_device(3)
        assert torch.zeros(4, device="cuda").device.index == 3
        with torch.cuda.device(0):
            return model(torch.randn(8, 64, device="cuda")).sum()

    assert "aten.addmm.default" in names(recorded(loss, world=8))


def test_memory_after_a_step_is_what_it_was_before() -> None:
    recording = recorded(lambda model: model(torch.randn(8, 64, device="cuda")).pow(2).mean())
    assert recording.allocated[-1] == sum(recording.alive.values())
    held = recording.held_bytes
    weights = 64 * 64 * 4 + 512  # and the bias, in a block of the allocator
    assert held["weights"] == held["gradients"] == weights
    assert held["optimizer"] == 2 * weights


def test_parameters_keep_their_identity_when_their_data_is_moved() -> None:
    def train() -> None:
        weight = nn.Parameter(torch.randn(64, 64))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.data = weight.data.to("cuda", torch.bfloat16)
        for _ in range(2):
            assert weight.device.type == "cuda"
            (weight @ weight).sum().backward()
            optimizer.step()

    recording = lumos.dry_run(train)
    assert {op.inputs[0].dtype for op in recording.ops if op.name == "aten.mm.default"} == {"bf16"}


def test_a_dry_run_in_python_is_predicted_on_its_own_gpu() -> None:
    recording = recorded(lambda net: net(torch.randn(8, 64, device="cuda")).sum(), gpu="h200")
    prediction = lumos.predict_recording(recording)
    assert prediction.setup is not None
    assert prediction.setup.cluster.gpu == "h200"
    assert all(len(repr(one)) < 120 for one in (recording, prediction))


def test_a_stream_that_waits_for_another_is_written_down() -> None:
    def loss(model: Any) -> Any:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = torch.randn(8, 64, device="cuda").mul(2)
        torch.cuda.current_stream().wait_stream(side)
        return model(x).sum()

    recording = recorded(loss)
    multiplied = next(place for place, op in enumerate(recording.ops) if op.name == "aten.mul.Tensor")
    assert recording.ops[multiplied].stream != 0
    assert any(multiplied in op.after for op in recording.ops if op.stream == 0)


def test_events_have_a_time_by_which_scripts_can_divide() -> None:
    def loss(model: Any) -> Any:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = model(torch.randn(8, 64, device="cuda")).sum()
        end.record()
        torch.cuda.synchronize()
        assert 1.0 / start.elapsed_time(end) > 0
        return result

    assert "cudaDeviceSynchronize" in names(recorded(loss))


# ---------------------------------------------------------------------- values
def test_printing_a_loss_waits_for_the_gpu_and_gives_a_number() -> None:
    def loss(model: Any) -> Any:
        found = model(torch.randn(8, 64, device="cuda")).mean()
        assert f"{found:.2f}" == "1.00"
        assert float(found.detach()) == found.item() == 1.0
        assert torch.isfinite(found.detach())
        assert not torch.isnan(found)
        assert not found > 100
        return found

    recording = recorded(loss)
    assert "cudaStreamSynchronize" in names(recording)
    assert any("tensor values are unknown" in text for text in recording.assumptions)


def test_masks_of_random_numbers_select_the_share_they_stand_for() -> None:
    def loss(model: Any) -> Any:
        x = torch.randn(1000, 64, device="cuda")
        kept = x[torch.rand(1000, device="cuda") < 0.25]
        drawn = x[torch.bernoulli(torch.full((1000,), 0.15, device="cuda")).bool()]
        assert (len(kept), len(drawn)) == (250, 150)
        return model(torch.cat([kept, drawn])).sum()

    assert (400, 64) in wide(recorded(loss), "addmm")


def test_a_mask_that_is_cleared_in_part_is_that_much_less_full() -> None:
    def loss(model: Any) -> Any:
        mask = torch.ones(100, device="cuda", dtype=torch.bool)
        mask[:20] = False
        return model(torch.randn(100, 64, device="cuda")[mask]).sum()

    assert (80, 64) in wide(recorded(loss), "addmm")


def test_labels_that_are_masked_out_leave_some() -> None:
    def loss(model: Any) -> Any:
        labels = torch.randint(0, 50, (100,), device="cuda")
        labels[torch.rand(100, device="cuda") < 0.85] = -100
        assert (labels != -100).sum() != 0
        return model(torch.randn(100, 64, device="cuda")).sum()

    assert "aten.masked_fill_.Tensor" in names(recorded(loss))


class Routed(nn.Module):
    """Eight experts of which two are chosen, each called on its tokens."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.router = style, nn.Linear(64, 8)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Any) -> Any:
        chosen = self.router(x).topk(2).indices
        if self.style == "where":
            return sum(expert(x[torch.where(chosen == i)[0]]).sum() for i, expert in enumerate(self.experts))
        if self.style == "hit":  # as in transformers
            mask = functional.one_hot(chosen, 8).permute(2, 1, 0)
            hit = mask.sum(dim=(-1, -2)).gt(0).nonzero()
            return sum(self.experts[i.item()](x[torch.where(mask[i.item()])[1]]).sum() for i in hit)
        counts = torch.bincount(chosen.flatten(), minlength=8).tolist()
        parts = x[chosen.flatten().argsort() // 2].split(counts)
        return sum(expert(part).sum() for expert, part in zip(self.experts, parts, strict=True))


@pytest.mark.parametrize("style", ["where", "hit", "counts"])
def test_experts_are_equally_loaded_and_all_of_them_trained(style: str) -> None:
    recording = recorded(lambda model: model(torch.randn(256, 64, device="cuda")), Routed(style))
    assert wide(recording, "addmm").count((64, 64)) == 8
    assert sum(recording.alive.values()) > 9 * 4 * 64 * 64 * 3  # weights and both moments of every expert


def test_lengths_that_are_counted_add_up() -> None:
    def loss(model: Any) -> Any:
        lengths = torch.full((8,), 12, device="cuda")
        ends = functional.pad(lengths.cumsum(0), (1, 0))
        assert ends.tolist() == [12 * i for i in range(9)]
        assert (ends[1:] - ends[:-1]).tolist() == [12] * 8
        assert len(torch.repeat_interleave(torch.arange(8, device="cuda"), lengths)) == 96
        assert len(torch.unique(torch.randint(0, 10, (1000,), device="cuda"))) == 10
        return model(torch.randn(int(ends[-1]), 64, device="cuda")).sum()

    assert (96, 64) in wide(recorded(loss), "addmm")


def test_a_loop_until_the_loss_is_small_ends_after_two_steps() -> None:
    def train() -> None:
        model = nn.Linear(64, 1).cuda()
        optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), 1.0
        while loss > 1e-3:
            found = model(torch.randn(8, 64, device="cuda")).pow(2).mean()
            found.backward()
            optimizer.step()
            loss = found.item()

    assert lumos.dry_run(train).trained_parameters == 65


# ---------------------------------------------------------------------- layers as a GPU runs them
def test_a_recurrent_layer_is_a_matmul_of_all_inputs_and_one_per_time_step() -> None:
    layer = nn.LSTM(64, 128)
    recording = recorded(lambda model: model(torch.randn(20, 16, 64, device="cuda"))[0].sum(), layer)
    assert wide(recording, "aten.mm.default") == [(20 * 16, 4 * 128)]
    assert wide(recording, "aten.addmm_") == [(16, 4 * 128)] * 20
    assert names(recording).count("aten._cudnn_rnn.default") == 1
    assert any("recurrent layers" in text for text in recording.assumptions)


def test_sequences_are_packed_by_their_real_lengths() -> None:
    def loss(model: Any) -> Any:
        x = torch.randn(3, 10, 64, device="cuda")
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([10, 6, 2]), batch_first=True)
        assert len(packed.data) == 18
        out, lengths = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        assert lengths.tolist() == [10, 6, 2]
        return out.sum()

    assert wide(recorded(loss, nn.GRU(64, 32, batch_first=True)), "aten.mm.default") == [(18, 96)]


def test_two_optimizers_make_one_step() -> None:
    def train() -> None:
        a, b = (nn.Linear(64, 64).cuda() for _ in range(2))
        first, second = (torch.optim.Adam(model.parameters()) for model in (a, b))
        for _ in range(4):
            b(a(torch.randn(8, 64, device="cuda"))).sum().backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()

    recording = lumos.dry_run(train)
    assert recording.trained_parameters == 2 * (64 * 64 + 64)
    assert not any("zeros_like" in op.name for op in recording.ops if op.phase == "optimizer")  # no state is made anew


def test_a_step_begins_after_the_last_of_the_optimizers_that_step_together() -> None:
    def train() -> None:
        a, b = (nn.Linear(64, 64).cuda() for _ in range(2))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (a, b)]
        for _ in range(4):
            b(a(torch.randn(8, 64, device="cuda"))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    phases = [op.phase for op in lumos.dry_run(train).ops]
    assert phases == sorted(phases, key=["forward", "backward", "optimizer"].index)


def test_an_optimizer_after_a_backward_pass_of_its_own_is_inside_the_step() -> None:
    def train() -> None:
        models = [nn.Linear(64, 64).cuda() for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for step in range(6):
            for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                model(torch.randn(8, 64, device="cuda")).sum().backward()
                if number == 0 or step % 2 == 0:  # the second one steps every other time
                    optimizer.step()
                    optimizer.zero_grad()

    assert sum(op.name == "aten.addmm.default" for op in lumos.dry_run(train).ops) == 2


# ---------------------------------------------------------------------- precision and tokens
@pytest.mark.parametrize("compiled", [False, True])
def test_precision_is_read_however_a_script_sets_it(tmp_path: Path, compiled: bool) -> None:
    """A script of its own: the settings cannot be taken back."""
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("torch before 2.9 has one setting for all")
    script = TRAIN.replace("model(", "run(").replace(
        "optimizer =", f"run = torch.compile(model, disable={not compiled})\noptimizer ="
    )
    done = captured(tmp_path, 'torch.backends.fp32_precision = "tf32"\n' + script)
    assert done.returncode == 0, done.stderr
    recording = read_recording(tmp_path / "dry" / "rank0.dry.json.gz")
    matmuls = [op for op in recording.ops if op.name in ("aten.mm.default", "aten.addmm.default")]
    assert matmuls
    assert all("tf32" in op.options for op in matmuls)
    assert not any("compile" in note for note in recording.assumptions)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_token_that_is_looked_up_in_several_tables_counts_once(compiled: bool) -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(512, 64) for _ in range(3))
            self.mix = nn.Linear(64, 64)

        def forward(self, tokens: Any) -> Any:
            x = 0
            for table in self.tables:
                x = self.mix(x + table(tokens))
            return x.sum()

    def train() -> None:
        model = Tables().cuda()
        run = torch.compile(model) if compiled else model
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            for _ in range(2):
                run(torch.randint(0, 512, (4, 32), device="cuda")).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert lumos.dry_run(train).tokens == 2 * 4 * 32


# ---------------------------------------------------------------------- several ranks
def test_data_parallel_reduces_gradients_over_all_ranks() -> None:
    def train() -> None:
        torch.distributed.init_process_group("nccl")
        model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda(), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    recording = lumos.dry_run(train, world=8, rank=3)
    reductions = [op for op in recording.ops if op.ranks]
    assert [(op.name, op.ranks, op.phase) for op in reductions] == [("all_reduce", tuple(range(8)), "backward")]
    assert reductions[0].inputs[0].elements == 64 * 64 + 64
    assert (recording.rank, recording.world) == (3, 8)


def test_sharded_and_tensor_parallel_ranks_hold_their_parts() -> None:
    def train() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    recording = lumos.dry_run(train, world=4)
    groups = {op.name: op.ranks for op in recording.ops if op.ranks}
    assert groups["all_gather"] == groups["reduce_scatter"] == (0, 2)
    assert groups["all_reduce"] == (0, 1)
    assert (8, 128) in wide(recording, "addmm")
    assert recording.held_bytes["weights"] < 2 * 64 * 256 * 4 / 4 + 4096


def test_a_recording_of_a_function_is_priced() -> None:
    recording = recorded(lambda model: model(torch.randn(8, 64, device="cuda")).sum())
    assert predict_recording(recording, ["cluster.gpu=h200"]).step_ms > 0
    with pytest.raises(OptionError, match=r"cluster\.gpus = 8"):
        predict_recording(recording, ["cluster.gpus=8"])


# ---------------------------------------------------------------------- torch afterwards
def test_torch_is_as_it_was_after_every_dry_run() -> None:
    def state() -> list[Any]:
        tensor, dist = torch.Tensor, torch.distributed
        return [torch.cuda.is_available(), tensor.tolist, tensor.data, tensor.__format__, torch.save, torch.load,
                torch.compile, dist.init_process_group, nn.Parameter.__new__, functional.scaled_dot_product_attention,
                torch.version.cuda, sys.excepthook, os.environ.get("WORLD_SIZE"), dist.is_initialized()]  # fmt: skip

    before = state()
    for _ in range(2):
        recorded(lambda model: model(torch.randn(8, 64, device="cuda")).sum(), world=2)
        assert state() == before
    model = nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    assert model.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_function_that_does_not_train_is_refused() -> None:
    with pytest.raises(LumosError, match="0 of the 2 optimizer steps"):
        lumos.dry_run(lambda: None)
    with pytest.raises(LumosError, match="trains on the CPU"):
        recorded(lambda model: model.cpu()(torch.randn(8, 64)).sum())
    with pytest.raises(OptionError, match="rank 2 of 2"):
        lumos.dry_run(lambda: None, world=2, rank=2)


def test_a_mistake_of_the_function_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="reduction dim"):
        recorded(lambda model: model(torch.randn(8, 63, device="cuda")).sum())
    assert not torch.cuda.is_available()


# ---------------------------------------------------------------------- initialisers and loops
INITIALISERS = {
    "trunc_normal_": lambda weight: nn.init.trunc_normal_(weight, std=0.02),
    "narrow trunc_normal_": lambda weight: nn.init.trunc_normal_(weight, std=1.0, a=-0.1, b=0.1),
    "orthogonal_": lambda weight: nn.init.orthogonal_(weight),
    "sparse_": lambda weight: nn.init.sparse_(weight, 0.9),
    "dirac_": lambda weight: nn.init.dirac_(weight.view(64, 64, 1)),
}


@pytest.mark.parametrize("name", INITIALISERS)
def test_initialisers_end_and_are_no_operators(name: str) -> None:
    with record.recorded() as recorder:
        weight = nn.Parameter(torch.empty(64, 64, device="cuda"))
        before = len(recorder.ops)
        with torch.no_grad():
            INITIALISERS[name](weight)
        assert [op.name for op in recorder.ops[before:] if "view" not in op.name] == []


def test_values_that_an_initialiser_fills_in_stay_known() -> None:
    branches = []

    def loss_of(model: nn.Module) -> Any:
        mask = nn.init.zeros_(torch.empty(1000, 1000, device="cuda"))
        branches.append(bool((mask == 0).all()))
        return model(torch.randn(8, 64, device="cuda")).sum()

    recorded(loss_of)
    assert set(branches) == {True}


def test_an_initialiser_of_the_users_own_that_never_ends_is_named_with_its_line() -> None:
    def draw_again(weight: Any) -> Any:
        return ((weight < -2) | (weight > 2)).any().item()

    def train() -> None:
        weight = torch.empty(1000, 1000, device="cuda").normal_()
        while draw_again(weight):
            weight.normal_()

    with pytest.raises(LumosError, match=r"test_dry_script.py, line \d+ \(train\) ends when tensors"):
        lumos.dry_run(train)


def test_a_loop_over_many_unknown_values_that_ends_is_not_rejected() -> None:
    def loss_of(model: nn.Module) -> Any:
        out = model(torch.randn(8, 64, device="cuda"))
        for value in out.flatten()[:400]:
            if value.isnan() or (value.expand(2) > 3).any():
                continue
        return out.sum()

    assert recorded(loss_of).parameters == 65 * 64


def test_operators_before_the_first_forward_pass_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lumos.dry_run.record._MOST_OPS", 500)
    weights = []

    class Model(nn.Linear):  # type: ignore[misc]
        def reset_parameters(self) -> None:
            for _ in range(200):
                weights.append(self.weight.data.cuda().normal_())

    def train() -> None:
        net = nn.Sequential(*(Model(64, 64) for _ in range(2)))
        optimizer = torch.optim.AdamW(net.cuda().parameters())
        for _ in range(3):
            net(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()

    assert lumos.dry_run(train).parameters == 2 * 65 * 64


def test_a_step_that_is_too_long_is_rejected_when_few_of_its_layers_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lumos.dry_run.record._MOST_OPS", 20_000)
    monkeypatch.setattr("lumos.dry_run.record._ENOUGH_OPS", 500)
    entered = []

    class Scan(nn.Linear):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            entered.append(self)
            for _ in range(100):
                x = x * self.weight[0] + self.bias
            return x

    model = nn.Sequential(*(Scan(64, 64) for _ in range(99)))
    with pytest.raises(LumosError, match=r"too many operators .*test_dry_script.py, line \d+ \(forward\)"):
        recorded(lambda model: model(torch.randn(8, 64, device="cuda")), model)
    assert len(entered) < 20


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_of_many_micro_batches_is_not_taken_for_one_that_is_too_long(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> None:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16))).cuda()
        run = torch.compile(model) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(10):
                run(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    count = len(lumos.dry_run(train).ops)
    monkeypatch.setattr("lumos.dry_run.record._MOST_OPS", round(1.3 * count))
    monkeypatch.setattr("lumos.dry_run.record._ENOUGH_OPS", count // 20)
    assert len(lumos.dry_run(train).ops) == count


def test_an_evaluation_before_the_first_step_is_not_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lumos.dry_run.record._MOST_OPS", 2_000)
    monkeypatch.setattr("lumos.dry_run.record._ENOUGH_OPS", 500)
    evaluated = []

    def loss_of(model: nn.Module) -> Any:
        if not evaluated:
            with torch.no_grad():
                evaluated.extend(model(torch.randn(8, 64, device="cuda")) for _ in range(2_000))
        return model(torch.randn(8, 64, device="cuda")).sum()

    recording = recorded(loss_of, nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    assert len(evaluated) == 2_000
    assert len(recording.ops) < 500


# ---------------------------------------------------------------------- files
def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    recording = recorded(lambda model: model(torch.randn(8, 64, device="cuda")).sum())
    path = tmp_path / "rank0.dry.json.gz"
    write_recording(path, recording)
    assert read_recording(path) == recording


@pytest.mark.parametrize("damage", ["cut", "text", "other format", "an operator is missing"])
def test_a_damaged_recording_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "rank0.dry.json.gz"
    write_recording(path, recorded(lambda model: model(torch.randn(8, 64, device="cuda")).sum()))
    content = json.loads(gzip.decompress(path.read_bytes()))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "text":
        path.write_text("no gzip")
    elif damage == "other format":
        path.write_bytes(gzip.compress(json.dumps(content | {"format": "x"}).encode()))
    else:
        path.write_bytes(gzip.compress(json.dumps(content | {"ops": content["ops"][1:]}).encode()))
    with pytest.raises(InputError, match="make it again"):
        read_recording(path)


# ---------------------------------------------------------------------- scripts
def test_a_script_runs_as_it_is(tmp_path: Path) -> None:
    script = """
import numpy as np
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.from_numpy(np.random.rand(64).astype(np.float32)), i % 10
if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Linear(64, 10).to(device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9), torch.amp.GradScaler("cuda")
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for x, y in DataLoader(Data(), 8, num_workers=4, pin_memory=True, persistent_workers=True):
        x, y = x.to(device, non_blocking=True), y.to(device)
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x); loss = nn.functional.cross_entropy(out, y)
        scaler.scale(loss).backward(); scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer); scaler.update(); optimizer.zero_grad(); plateau.step(loss)
        print(f"{loss:.3f}", (out.argmax(1) == y).float().mean().item())
        torch.save(model.state_dict(), "checkpoint.pt"); model.load_state_dict(torch.load("checkpoint.pt"))
    print("never reached")
"""
    run = captured(tmp_path, script)
    assert run.returncode == 0, run.stderr
    assert "1.000 0.1" in run.stdout
    assert "never reached" not in run.stdout
    assert not (tmp_path / "checkpoint.pt").exists()
    recording = read_recording(tmp_path / "dry" / "rank0.dry.json.gz")
    assert any("h2d" in op.options for op in recording.ops)


def test_torchrun_makes_a_recording_of_every_rank(tmp_path: Path) -> None:
    script = """
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda(), find_unused_parameters=True)
""" + TRAIN.replace("model = nn.Linear(64, 64).cuda()", "")
    launcher = str(Path(sys.executable).with_name("torchrun"))
    run = captured(tmp_path, script, launch=(launcher, "--nproc-per-node", "2"))
    assert run.returncode == 0, run.stderr
    recordings = [read_recording(tmp_path / "dry" / f"rank{rank}.dry.json.gz") for rank in range(2)]
    assert [(r.rank, r.world) for r in recordings] == [(0, 2), (1, 2)]


def test_processes_that_a_script_spawns_are_one_rank(tmp_path: Path) -> None:
    body = TRAIN.strip().replace("\n", "\n    ")
    script = f"""
import torch.multiprocessing as mp
def work(rank, world):
    dist.init_process_group("nccl", rank=rank, world_size=world)
    {body}
if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
"""
    run = captured(tmp_path, script)
    assert run.returncode == 0, run.stderr
    assert read_recording(tmp_path / "dry" / "rank0.dry.json.gz").world == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("import ctypes; ctypes.string_at(model.weight.data_ptr(), 4)", "the address of a tensor"),
        ("graph = torch.cuda.CUDAGraph()", "CUDA graphs are not recorded"),
    ],
)
def test_what_a_dry_run_cannot_do_is_named_with_its_line(tmp_path: Path, line: str, reason: str) -> None:
    run = captured(tmp_path, TRAIN.replace("    optimizer.zero_grad()", f"    {line}\n    optimizer.zero_grad()"))
    assert run.returncode == 2
    message = next(text for text in run.stderr.splitlines() if "train.py" in text)
    assert message.startswith(f"lumos: train.py, line 8: {line}")
    assert reason in message
    assert "LUMOS_DRY_RUN is set, or record on a GPU" in message


def test_a_mistake_of_the_script_ends_as_ever(tmp_path: Path) -> None:
    run = captured(tmp_path, TRAIN.replace("randn(8, 64", "randn(8, 63"))
    assert run.returncode == 1
    assert "RuntimeError" in run.stderr
    assert "LUMOS_DRY_RUN" not in run.stderr


@pytest.mark.parametrize(
    ("script", "reason"),
    [("model = nn.Linear(64, 64).cuda()", "made two steps"), (ON_CPU, "on the CPU")],
)
def test_a_script_that_does_not_train_on_a_gpu_is_told_so(tmp_path: Path, script: str, reason: str) -> None:
    run = captured(tmp_path, script)
    assert run.returncode == 2
    assert reason in run.stderr


def test_a_dry_run_after_a_backward_pass_on_the_cpu_says_what_to_do() -> None:
    """In a process of its own: torch starts the threads of backward passes once."""
    code = (
        "import torch, lumos\n"
        "torch.ones(2, requires_grad=True).sum().backward()\n"
        "def train():\n"
        "    layer = torch.nn.Linear(4, 4).cuda()\n"
        "    optimizer = torch.optim.SGD(layer.parameters())\n"
        "    for _ in range(3):\n"
        "        layer(torch.ones(2, 4, device='cuda')).sum().backward()\n"
        "        optimizer.step()\n"
        "try:\n"
        "    lumos.dry_run(train)\n"
        "except lumos.LumosError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "dry-run first, or in a process of its own" in done.stdout, done.stderr
