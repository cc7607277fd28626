"""Operators of a traced step: how fast they ran, what bounds them, in which modules; scripts that time them alone."""

from __future__ import annotations

import ast
import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lumos.analysis.replay import replay
from lumos.cli.main import app
from lumos.data_files import read_table
from lumos.errors import InputError, OptionError
from lumos.read.job import read_job
from lumos.report.reproducers import NotReproducibleError, script_of, write_reproducers
from lumos.setup.gpus import gpu_named
from lumos.trace.steps import keep_step
from lumos.trace.trace import Trace
from lumos.traced.traced_operators import TracedOperators, traced_operators
from support import Event, call, header, kernel, note, op, span, write_trace

BF16 = "c10::BFloat16"
ROOT = Path(__file__).parent.parent
MAIN, ENGINE = 1, 2


def lumos(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


class Recording:
    """A step whose operators run one after the other, inside modules or ranges."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now, self.correlation = 20.0, 0

    def module(self, name: str, start: float) -> None:
        """A call of an nn.Module around everything since `start`."""
        self.events.append(span("python_function", f"nn.Module: {name}", start, self.now - start, 100, MAIN, {}))

    def range(self, name: str, start: float) -> None:
        """A record_function range around everything since `start`."""
        self.events.append(note(name, start, self.now - start))

    def run(
        self, name: str, *shapes: list[int], us: float = 100.0, late: float = 0.0, thread: int = MAIN, **more: Any
    ) -> float:
        """An operator with one kernel, which starts right after the one before unless the host is late."""
        start = self.now + late
        self.correlation += 1
        args = {
            "Input Dims": list(shapes), "Input type": more.pop("types", [BF16] * len(shapes)),
            "Concrete Inputs": more.pop("values", [""] * len(shapes)), **more,
        }  # fmt: skip
        self.events.append(op(name, start, 12 + us, thread, args))
        self.events.append(call("cudaLaunchKernel", start + 1, 2, self.correlation, thread))
        self.events.append(kernel(f"kernel_of_{name}", start + 4, us, self.correlation))
        self.now = start + 13 + us
        return start

    def write(self, folder: Path, gpu: str = "NVIDIA H200") -> Path:
        events = [note("ProfilerStep#5", 1, self.now + 100), *self.events]
        head = header(deviceProperties=[{"id": 0, "name": gpu}])
        return write_trace(folder / "rank0.json", events, head)

    def operators(self, folder: Path, gpu: str = "NVIDIA H200") -> TracedOperators:
        return traced_operators(replay(read_job(self.write(folder, gpu))))


# ---------------------------------------------------------------------- rates, peaks and bounds
def test_a_matmul_runs_at_its_flops_and_bytes_over_its_time(tmp_path: Path) -> None:
    step = Recording()
    for _ in range(3):
        step.run("aten::mm", [4096, 2048], [2048, 8192], us=200.0)
    (found,) = step.operators(tmp_path).operators
    assert found.calls == 3
    assert found.us == pytest.approx(200.0)
    assert found.ms == pytest.approx(0.6)
    assert found.tflops == pytest.approx(2 * 4096 * 2048 * 8192 / 200e-6 / 1e12)
    assert found.gb_s == pytest.approx(2 * (4096 * 2048 + 2048 * 8192 + 4096 * 8192) / 200e-6 / 1e9)
    assert found.bound == "compute"
    assert found.tflops is not None
    assert found.peak_share == pytest.approx(found.tflops / gpu_named("h200").peak("bf16"))


def test_an_addition_is_bound_by_memory_and_has_no_flops_that_count(tmp_path: Path) -> None:
    step = Recording()
    step.run("aten::add", [8192, 8192], [8192, 8192], us=120.0)
    (found,) = step.operators(tmp_path).operators
    assert (found.tflops, found.bound) == (None, "memory")
    assert found.gb_s == pytest.approx(3 * 2 * 8192 * 8192 / 120e-6 / 1e9)
    assert found.gb_s is not None
    assert found.peak_share == pytest.approx(found.gb_s / gpu_named("h200").hbm_gb_s)


def test_an_operator_that_the_gpu_waits_for_longer_than_it_runs_is_bound_by_its_launch(tmp_path: Path) -> None:
    step = Recording()
    step.run("aten::mm", [4096, 2048], [2048, 8192], us=200.0)
    step.run("aten::mm", [4096, 2048], [2048, 4096], us=100.0, late=500.0)
    waiting, prompt = (step.operators(tmp_path).operators[i] for i in (1, 0))
    assert waiting.tensors[1].shape == (2048, 4096)
    assert waiting.waited_us > 500
    assert waiting.bound == "launch"
    assert prompt.bound == "compute"


def test_an_operator_with_less_to_do_than_a_kernel_takes_to_start_is_bound_by_its_launch(tmp_path: Path) -> None:
    step = Recording()
    step.run("aten::add", [64], [64], us=2.0)
    (found,) = step.operators(tmp_path).operators
    assert found.bound == "launch"


def test_what_an_operator_takes_beyond_the_price_of_the_cost_model_is_to_be_gained(tmp_path: Path) -> None:
    step = Recording()
    step.run("aten::mm", [4096, 2048], [2048, 8192], us=2000.0)
    found = step.operators(tmp_path)
    (slow,) = found.operators
    assert slow.model_ms is not None
    assert 0.1 < slow.model_ms < 0.4
    assert slow.gain_ms == pytest.approx(2.0 - slow.model_ms) == found.gain_ms


def test_the_same_operator_is_one_row_for_each_of_its_shapes(tmp_path: Path) -> None:
    step = Recording()
    for width in (1024, 2048, 1024):
        step.run("aten::mm", [4096, 2048], [2048, width])
    assert sorted((o.tensors[1].shape[1], o.calls) for o in step.operators(tmp_path).operators) == [
        (1024, 2),
        (2048, 1),
    ]


def test_a_trace_that_was_cut_to_one_step_has_the_operators_of_that_step(tmp_path: Path) -> None:
    step = Recording()
    for number, width in ((5, 1024), (6, 2048)):
        begin = step.now
        step.now += 1
        for _ in range(3):
            step.run("aten::mm", [4096, 512], [512, width])
        step.now += 50
        step.events.append(note(f"ProfilerStep#{number}", begin, step.now - begin))
        step.now += 1000
    trace = read_job(write_trace(tmp_path / "rank0.json", step.events, header()))
    assert isinstance(trace, Trace)
    for number, width in (("5", 1024), ("6", 2048)):
        (found,) = traced_operators(replay(keep_step(trace, number))).operators
        assert (found.calls, found.tensors[1].shape) == (3, (512, width))


def test_the_output_that_compiled_code_names_is_no_factor_of_a_matmul(tmp_path: Path) -> None:
    step = Recording()
    step.run("aten::mm", [4096, 2048], [2048, 8192], [4096, 8192], us=200.0)
    (found,) = step.operators(tmp_path).operators
    assert found.effort.flops == 2 * 4096 * 2048 * 8192


@pytest.mark.parametrize(("beta", "reads"), [("0.", False), ("1", True)])
def test_what_is_added_times_zero_is_not_read(tmp_path: Path, beta: str, reads: bool) -> None:
    step = Recording()
    types, values = [BF16] * 3 + ["Scalar"] * 2, ["", "", "", beta, "0.125"]
    shapes: list[list[int]] = [[32, 1024, 1024], [32, 1024, 64], [32, 64, 1024], [], []]
    step.run("aten::baddbmm", *shapes, types=types, values=values)
    (found,) = step.operators(tmp_path).operators
    least = 2 * 32 * (1024 * 1024 + 2 * 1024 * 64)
    assert (found.effort.bytes > 1.5 * least) == reads
    assert found.effort.flops == 2 * 32 * 1024 * 1024 * 64


def test_kernels_of_no_operator_are_said_to_have_no_rates(tmp_path: Path) -> None:
    step = Recording()
    step.run("aten::mm", [512, 512], [512, 512], us=50.0)
    step.run("cudaGraphLaunch", us=50.0)
    assert any("50 % of the time" in text for text in step.operators(tmp_path).warnings)


@pytest.mark.parametrize(("causal", "share"), [("True", 1.0), ("False", 2.0)])
def test_attention_has_half_the_flops_if_it_is_causal(tmp_path: Path, causal: str, share: float) -> None:
    step = Recording()
    shape = [2, 16, 2048, 128]
    values, types = ["", "", "", "0.", causal, "False", ""], [BF16] * 3 + ["Scalar"] * 3 + [""]
    dims: list[list[int]] = [shape, shape, shape, [], [], [], []]
    step.run("aten::_scaled_dot_product_flash_attention", *dims, values=values, types=types)
    (found,) = step.operators(tmp_path).operators
    assert found.effort.flops == pytest.approx(share * 2 * 2 * 16 * 2048 * 2048 * 128, rel=0.01)


def test_attention_over_sequences_laid_end_to_end_has_no_rates(tmp_path: Path) -> None:
    """Their lengths are values, which a trace does not have; by its bytes alone it would look bound by the memory."""
    step = Recording()
    step.run("flash_attn_3::bwd", *[[16384, 6, 128]] * 5)
    (found,) = step.operators(tmp_path).operators
    assert (found.tflops, found.gb_s, found.bound, found.gain_ms) == (None, None, "", None)


def test_a_kernel_that_seems_to_move_more_than_the_memory_can_has_no_rates(tmp_path: Path) -> None:
    """It reads a part of what it is given. What fits into the cache may be faster than the memory."""
    step = Recording()
    step.run("triton_red_fused_add_0", [65536, 4096], us=20.0)
    step.run("triton_poi_fused_mul_1", [1024, 1024], us=0.5)
    rates = {one.name: one.gb_s for one in step.operators(tmp_path).operators}
    assert rates["triton_red_fused_add_0"] is None
    assert rates["triton_poi_fused_mul_1"] == pytest.approx(2 * 1024 * 1024 / 0.5 / 1e3, rel=0.01)


@pytest.mark.parametrize("gpu", ["", "An Unheard Of GPU 9000"])
def test_a_gpu_that_is_not_known_has_rates_but_no_peaks(tmp_path: Path, gpu: str) -> None:
    step = Recording()
    step.run("aten::mm", [4096, 2048], [2048, 8192], us=200.0)
    found = step.operators(tmp_path, gpu)
    assert found.operators[0].tflops
    assert found.operators[0].peak_share is None
    assert found.operators[0].gain_ms is None
    assert any("no roofline" in text for text in found.warnings)


def test_a_trace_without_shapes_says_how_to_record_them(tmp_path: Path) -> None:
    events = [
        note("ProfilerStep#5", 0, 500),
        op("aten::mm", 10, 50),
        call("cudaLaunchKernel", 12, 2, 1),
        kernel("k", 20, 9, 1),
    ]
    path = write_trace(tmp_path / "rank0.json", events, header())
    with pytest.raises(InputError, match=r"record_shapes=True"):
        traced_operators(replay(read_job(path)))


@pytest.mark.parametrize("shapes", [[[4, 5], [6, 7]], [[3], [3, 3, 3]], [[0, 0], [0, 0]], [[1 << 60, 2], [2, 3]], []])
def test_shapes_that_cannot_be_have_a_time_and_nothing_else(tmp_path: Path, shapes: list[list[int]]) -> None:
    step = Recording()
    step.run("aten::add", [64, 64], [64, 64])
    for name in (
        "aten::mm",
        "aten::bmm",
        "aten::_grouped_mm",
        "aten::convolution",
        "aten::cat",
        "aten::native_batch_norm",
    ):
        step.run(name, *shapes, us=50.0)
    assert sum(o.ms for o in step.operators(tmp_path).operators) == pytest.approx(0.4)


# ---------------------------------------------------------------------- modules
def _two_layers(step: Recording, scope: str, numbers: list[int]) -> None:
    """Two layers of an MLP with forward and backward pass, inside modules or ranges."""
    inside = step.module if scope == "module" else step.range
    begin = step.now
    for layer in (0, 1):
        step.now += 1
        outer = step.now - 0.5
        start = step.run("aten::mm", [512, 512], [512, 512], us=30.0, **{"Sequence number": numbers[layer]})
        inside(f"MLP_{layer}", start - 0.25)
        inside(f"Block_{layer}", outer)
    inside("Net_0", begin)
    for layer in (1, 0):
        start = step.now
        step.now += 1
        step.run("aten::mm", [512, 512], [512, 512], us=60.0, thread=ENGINE)
        name, number = "autograd::engine::evaluate_function: MmBackward0", {"Sequence number": numbers[layer]}
        step.events.append(op(name, start, step.now - start, ENGINE, number))


@pytest.mark.parametrize("scope", ["module", "range"])
def test_layers_are_counted_together_and_the_backward_pass_belongs_to_them(tmp_path: Path, scope: str) -> None:
    step = Recording()
    _two_layers(step, scope, [7, 9])
    modules = {" › ".join(one.path): one for one in step.operators(tmp_path).modules}
    assert set(modules) == {"Net", "Net › Block", "Net › Block › MLP"}
    block = modules["Net › Block"]
    assert len(block.instances) == 2
    assert block.ms["forward"] == pytest.approx(0.06)
    assert block.ms["backward"] == pytest.approx(0.12)


def test_a_module_that_is_recomputed_is_where_it_was_called_first(tmp_path: Path) -> None:
    step = Recording()
    _two_layers(step, "module", [7, 9])
    start = step.run("aten::mm", [512, 512], [512, 512], us=30.0, thread=ENGINE)
    step.events.append(span("python_function", "nn.Module: Block_1", start - 1, 60, 100, ENGINE, {}))
    modules = {" › ".join(one.path): one for one in step.operators(tmp_path).modules}
    assert set(modules) == {"Net", "Net › Block", "Net › Block › MLP"}
    assert modules["Net › Block"].total_ms == pytest.approx(0.06 + 0.12 + 0.03)


def test_an_operator_outside_of_modules_is_said_to_be(tmp_path: Path) -> None:
    step = Recording()
    _two_layers(step, "module", [7, 9])
    step.run("aten::add", [512, 512], [512, 512], us=40.0)
    outside = next(one for one in step.operators(tmp_path).modules if one.path == ("outside of modules",))
    assert outside.total_ms == pytest.approx(0.04)


def test_scopes_of_the_framework_are_no_modules(tmp_path: Path) -> None:
    step = Recording()
    start = step.run("aten::mm", [64, 64], [64, 64])
    for name in ("FSDP::pre_forward", "DistributedDataParallel.forward", "Optimizer.step#Adam.step", "nccl:all_reduce"):
        step.range(name, start - 1)
    assert step.operators(tmp_path).modules == []


def test_a_trace_without_modules_says_how_to_record_them(tmp_path: Path) -> None:
    step = Recording()
    step.run("aten::mm", [64, 64], [64, 64])
    found = step.operators(tmp_path)
    assert found.modules == []
    assert any("with_stack=True" in text for text in found.warnings)


# ---------------------------------------------------------------------- the command
def _trace(folder: Path) -> Path:
    step = Recording()
    _two_layers(step, "module", [7, 9])
    step.run("aten::add", [8192, 8192], [8192, 8192], [], us=2000.0, types=[BF16, BF16, "Scalar"], values=["", "", "1"])
    return step.write(folder)


def test_the_answer_exists_as_table_json_csv_and_page(tmp_path: Path) -> None:
    path = _trace(tmp_path)
    table = lumos("replay", path, "--operators")
    assert "8192×8192 8192×8192" in table
    assert "bound by memory" in table
    assert "Net › Block › MLP" in table
    answer = json.loads(lumos("replay", path, "--operators", "--json", "-o", tmp_path / "rates.csv"))
    first = answer["operators"][0]
    assert (first["name"], first["bound"], first["calls"]) == ("aten::add", "memory", 1)
    with (tmp_path / "rates.csv").open() as file:
        assert [row["name"] for row in csv.DictReader(file)] == [row["name"] for row in answer["operators"]]
    lumos("replay", str(path), "--operators", "-o", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert "Rates of operators" in page
    assert "roofline of the operators on h200" in page
    assert "Net › Block › MLP" in page


# ---------------------------------------------------------------------- scripts
def test_the_script_of_an_operator_runs_and_times_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    step = Recording()
    types, values = [BF16, BF16, "Scalar"], ["", "", "1"]
    more: dict[str, Any] = {"types": types, "values": values, "Input Strides": [[1, 64], [1, 1], []]}
    step.run("aten::add", [64, 32], [64, 1], [], **more)
    written, _ = write_reproducers(tmp_path / "scripts", step.operators(tmp_path))
    assert written == ["01_add.py"]
    script = tmp_path / "scripts" / "01_add.py"
    assert "tensor((64, 32), (1, 64), torch.bfloat16)" in script.read_text()
    done = subprocess.run(
        [sys.executable, str(script), "--seconds", "0.01"], capture_output=True, text=True, check=True
    )
    assert re.search(r"µs a call, .* GB/s\n100.0 µs in the trace", done.stdout)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_attention_becomes_a_call_of_scaled_dot_product_attention(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("torch")
    step = Recording()
    name = "aten::_scaled_dot_product_flash_attention" + ("_backward" if kind == "backward" else "")
    shapes = [[1, 2, 16, 8]] * (5 if kind == "backward" else 3)
    step.run(name, *shapes)
    script = script_of(step.operators(tmp_path).operators[0])
    (tmp_path / "one.py").write_text(script)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "one.py"), "--seconds", "0.01"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ("autograd.grad" in script) == (kind == "backward")


EVIL = [
    "aten::mm(); import os #", "aten::mm\nimport os", "aten::__class__", "aten::../../etc/passwd", "aten::from_file",
    "os::system", "aten::mm'''", "aten::MM", "mm", "aten::aten::mm", "aten::attention.forward",
]  # fmt: skip


@pytest.mark.parametrize("name", EVIL)
def test_no_name_of_a_trace_gets_into_a_script(tmp_path: Path, name: str) -> None:
    step = Recording()
    step.run(name, [64, 64], [64, 64])
    found = step.operators(tmp_path)
    with pytest.raises(NotReproducibleError):
        script_of(found.operators[0])
    written, reasons = write_reproducers(tmp_path / "scripts", found)
    assert written == []
    assert reasons
    assert list((tmp_path / "scripts").iterdir()) == []


@pytest.mark.parametrize(
    "value", ["__import__('os')", "1;2", "[1, exit()]", "1_0", "0x10", "nan()", "[[1]]", {}, "'a'", "1" * 30]
)
def test_no_value_of_a_trace_gets_into_a_script_but_numbers(tmp_path: Path, value: Any) -> None:
    step = Recording()
    step.run("aten::add", [64, 64], [64, 64], [], types=[BF16, BF16, "Scalar"], values=["", "", value])
    with pytest.raises(NotReproducibleError):
        script_of(step.operators(tmp_path).operators[0])


@pytest.mark.parametrize("gpu", ['H200"""\nimport os\n"""', "@body@"])
def test_the_name_of_a_gpu_is_never_that_of_the_trace(tmp_path: Path, gpu: str) -> None:
    step = Recording()
    step.run("aten::mm", [64, 64], [64, 64])
    script = script_of(step.operators(tmp_path, gpu).operators[0])
    imported = {
        name.name for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Import) for name in node.names
    }
    assert imported == {"argparse", "time", "torch"}
    assert "@" not in script


def test_the_operators_of_the_example_have_scripts_that_compile(tmp_path: Path) -> None:
    found = traced_operators(replay(read_job(ROOT / "src/lumos/data/example")))
    written, _ = write_reproducers(tmp_path / "scripts", found)
    assert len(written) == 10
    for name in written:
        compile((tmp_path / "scripts" / name).read_text(), name, "exec")


def test_every_operator_that_scripts_are_written_for_exists_in_torch() -> None:
    torch = pytest.importorskip("torch")
    names = [
        name for kind, some in read_table("reproducible_operators.toml").items() if kind != "attention" for name in some
    ]
    assert [name for name in names if not hasattr(torch.ops.aten, name)] == []


def test_a_folder_for_scripts_that_is_a_file_ends_in_one_line(tmp_path: Path) -> None:
    path = _trace(tmp_path)
    done = CliRunner().invoke(app, ["replay", str(path), "--reproduce", str(path)])
    assert isinstance(done.exception, OptionError)
    assert "that is a file" in str(done.exception)
