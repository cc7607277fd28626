"""Operators that a script brings itself: what they run is recorded, or they are marked as kernels not seen."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from torch.nn import functional

from lumos.dry_run.compiled import compiled_as_kernels
from lumos.dry_run.fake_gpu import replaced
from lumos.dry_run.package_kernels import triton_launches
from lumos.dry_run.record import Recorder, recorded
from lumos.program.op import UNSEEN


@torch.library.custom_op("lumos_tests::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Whose work is in torch's own operators."""
    return functional.linear(x, weight).relu()


@product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("lumos_tests::strange", mutates_args=())
def strange(x: torch.Tensor) -> torch.Tensor:
    """Whose work is in code that takes addresses."""
    return x.clone() if x.data_ptr() + 1 else x


@strange.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lumos_tests::compiled_product", mutates_args=())
def compiled_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Whose work is compiled where it is called."""
    scale = x.new_tensor(0.5, dtype=torch.float32)
    return torch.compile(lambda a, b: (functional.linear(a, b) * scale).relu())(x, weight)


@compiled_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@pytest.fixture(scope="module")
def gpu() -> Iterator[Recorder]:
    with recorded() as recorder, compiled_as_kernels(recorder):
        yield recorder


@pytest.mark.parametrize("compiles", [False, True])
def test_an_operator_in_python_is_what_it_runs(gpu: Recorder, compiles: bool) -> None:
    x, weight = torch.randn(32, 64, device="cuda"), torch.randn(128, 64, device="cuda")

    def step(x: Any) -> Any:
        return product(x * 2, weight) + 1

    run = torch.compile(step) if compiles else step
    run(x)
    gpu.restart()
    run(x)
    names = [op.name for op in gpu.ops]
    assert names.count("aten.mm.default") == 1
    assert names.count("aten.relu.default") == 1
    assert not any(UNSEEN in op.options for op in gpu.ops)


@pytest.mark.parametrize("compiles", [False, True])
def test_an_operator_may_compile_what_it_runs(gpu: Recorder, compiles: bool) -> None:
    x, weight = torch.randn(32, 64, device="cuda"), torch.randn(128, 64, device="cuda")

    def step(x: Any) -> Any:
        return compiled_product(x * 2, weight) + 1

    run = torch.compile(step) if compiles else step
    run(x)
    gpu.restart()
    run(x)
    assert [op.name for op in gpu.ops].count("aten.mm.default") == 1
    assert not any(UNSEEN in op.options for op in gpu.ops)


@pytest.mark.parametrize("compiles", [False, True])
def test_an_operator_that_is_not_known_is_marked(gpu: Recorder, compiles: bool) -> None:
    x = torch.randn(32, 64, device="cuda")

    def step(x: Any) -> Any:
        return strange(x * 2) + 1

    run = torch.compile(step) if compiles else step
    run(x)
    gpu.restart()
    assert run(x).shape == x.shape
    (op,) = [op for op in gpu.ops if UNSEEN in op.options]
    assert op.name == "lumos_tests.strange.default"
    assert op.allocates
    assert sum(t.bytes for t in (*op.inputs, *op.outputs)) == 2 * x.nbytes


def test_compiled_flex_attention_is_one_kernel_each_way_with_a_note_about_its_mask(gpu: Recorder) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    operands = [torch.randn(2, 4, 256, 64, device="cuda", requires_grad=True) for _ in range(3)]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cuda")
    run = torch.compile(flex_attention)
    run(*operands, block_mask=mask).sum().backward()
    gpu.restart()
    run(*operands, block_mask=mask).sum().backward()
    kernels = [op for op in gpu.ops if op.name.startswith("attention.")]
    assert [op.name for op in kernels] == ["attention.forward", "attention.backward"]
    assert all(UNSEEN in op.options for op in kernels)
    assert any("flex_attention" in note for note in gpu.notes)
    largest = max(t.elements for op in gpu.ops for t in op.outputs)
    assert largest == operands[0].numel()  # no scores
    assert all(operand.grad is not None for operand in operands)


def test_compiled_code_can_be_reset_before_anything_is_compiled() -> None:
    code = (
        "import torch\nfrom lumos.dry_run.record import recorded\nwith recorded():\n    torch.compiler.reset()\n"
        "    print(torch.compile(torch.relu, backend='eager')(torch.ones(2, device='cuda')).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("compiles", [False, True])
def test_a_tensor_that_is_pinned_is_made(gpu: Recorder, compiles: bool) -> None:
    def step(x: Any) -> Any:
        return x * torch.tensor([1.0, 2.0], device="cuda")

    x = torch.tensor([1.0, 2.0], pin_memory=True).cuda(non_blocking=True)
    run = torch.compile(step) if compiles else step
    assert run(x).shape == (2,)


class Jitted:
    """As much of Triton's JITFunction as a launch needs: CPU builds of torch do not bring Triton."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.__name__ = fn, getattr(fn, "__name__", "")

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **given: self.run(*args, grid=grid, warmup=False, **given)

    def run(self, *args: Any, **given: Any) -> Any:
        raise AssertionError("libcuda.so cannot be found")


class Autotuned(Jitted):
    def run(self, *args: Any, **given: Any) -> Any:
        raise AssertionError("there is no GPU to try configurations on")


def test_kernels_of_triton_that_a_script_launches_are_marked(gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lumos.dry_run.package_kernels.find_spec", lambda _: True)
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", SimpleNamespace(JITFunction=Jitted))
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", SimpleNamespace(Autotuner=Autotuned))

    def add(x: Any, y: Any, out: Any, size: int) -> None:
        """Its name counts."""

    x, y, out = (torch.ones(1024, device="cuda") for _ in range(3))
    gpu.restart()
    with replaced(triton_launches(gpu)):
        Jitted(add)[(8,)](x, y, out, 1024)
        Autotuned(Jitted(add))[lambda meta: (8,)](x, y, out=out, size=1024)
    assert [(op.name, len(op.inputs), len(op.outputs), op.options) for op in gpu.ops] == [
        ("triton.add", 2, 1, (UNSEEN,))
    ] * 2
