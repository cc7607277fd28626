"""Whole training steps of small Llama-like decoders, and what the host pays to issue them.

The model is written with plain torch in the operators that are sampled, as eager models of transformers are: norms and
rotary embeddings of several kernels, fused attention, a gated MLP, the loss in fp32, fused AdamW. `lumos fit` compares
what such a step takes with the sum of its operators.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lumos.measure.time_operators import DTYPES, cpu_clock, error_of
from lumos.measure.time_power import Wattmeter

Row = dict[str, Any]

_WARM_STEPS, _FEWEST_STEPS = 3, 5
_SUSTAINED_S = {"cuda": 1.5, "cpu": 1.0}  # of steps back to back: on a GPU the power limit has acted by then
_HOST_ROUNDS = 25


class _Norm(nn.Module):  # type: ignore[misc]
    """RMS normalisation of several kernels, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class _Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.size)
        q, k, v = (part(x).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.o(out.transpose(1, 2).reshape(x.shape).contiguous())
        return mixed


class _Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, row: Row) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_Norm(row["hidden"]) for _ in range(2))
        self.attention, self.mlp = _Attention(row["hidden"], row["heads"]), _Mlp(row["hidden"], row["ffn"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), cos, sin)
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class _Decoder(nn.Module):  # type: ignore[misc]
    """Tokens to logits."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.embedding = nn.Embedding(row["vocab"], row["hidden"])
        self.layers = nn.ModuleList(_Layer(row) for _ in range(row["layers"]))
        self.norm = _Norm(row["hidden"])
        self.head = nn.Linear(row["hidden"], row["vocab"], bias=False)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


class TrainingStep:
    """One decoder on one device, with its optimizer and a batch of random tokens."""

    def __init__(self, row: Row, device: str) -> None:
        self.device = device
        dtype, size, shape = DTYPES[row["dtype"]], row["hidden"] // row["heads"], (row["micro_batch"], row["seq"])
        with torch.device(device):
            self._model = _Decoder(row).to(dtype)
            self._tokens, self._labels = (torch.randint(row["vocab"], shape) for _ in range(2))
            angle = torch.outer(torch.arange(row["seq"]), 1e4 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self._cos, self._sin = angle.cos().to(dtype), angle.sin().to(dtype)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)

    def forward(self) -> Tensor:
        logits = self._model(self._tokens, self._cos, self._sin)
        return functional.cross_entropy(logits.float().flatten(0, 1), self._labels.flatten())

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def __call__(self) -> None:
        self.forward().backward()
        self.update()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measured_step(row: Row, device: str, meter: Wattmeter | None) -> Row:
    """Microseconds of a step, back to back with others, and what the board draws meanwhile."""
    return _guarded(lambda: _sustained(TrainingStep(row, device), meter), device)


def _sustained(step: TrainingStep, meter: Wattmeter | None) -> Row:
    for _ in range(_WARM_STEPS):
        step()
    if meter is None or not meter.works():
        return _back_to_back(step)
    _back_to_back(step, 0.4)
    with meter.reading():
        found = _back_to_back(step)
    return found | meter.answer()


def _back_to_back(step: TrainingStep, seconds: float | None = None) -> Row:
    """On a GPU the mean of all steps, with one wait in every few so that the host stays ahead; on a CPU the fastest."""
    step.wait()
    wanted = _SUSTAINED_S[step.device] if seconds is None else seconds
    clock = cpu_clock() if step.device == "cpu" else time.perf_counter
    ends = [clock()]
    while len(ends) <= _FEWEST_STEPS or ends[-1] - ends[0] < wanted:
        step()
        if len(ends) % 4 == 0:
            step.wait()
        ends.append(clock())
    step.wait()
    mean = (clock() - ends[0]) / (len(ends) - 1)
    fastest = min(end - begin for begin, end in pairwise(ends))
    return {"us": round(1e6 * (mean if step.device == "cuda" else fastest), 1)}


def measured_host(rows: list[Row], device: str) -> list[Row]:
    """For forward, backward and optimizer: the host's time to issue them where it decides, and their launches."""
    answers: dict[str, Row] = {}

    def measure() -> Row:
        step = TrainingStep(rows[0], device)
        for _ in range(_WARM_STEPS):
            step()
        launches, times = _launches(step), _issuing(step)
        answers.update({what: {"launches": launches[what], "us": round(times[what], 2)} for what in times})
        return {}

    failed = _guarded(measure, device)
    return [row | (failed or answers[row["what"]]) for row in rows]


def _issuing(step: TrainingStep) -> dict[str, float]:
    """Median microseconds of the host in each part of a step, with the GPU idle when it begins."""
    found: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
    clock = cpu_clock() if step.device == "cpu" else time.perf_counter
    for _ in range(_HOST_ROUNDS):
        step.wait()
        start = clock()
        loss = step.forward()
        middle = clock()
        loss.backward()
        late = clock()
        step.update()
        end = clock()
        for name, seconds in zip(found, (middle - start, late - middle, end - late), strict=True):
            found[name].append(seconds * 1e6)
    step.wait()
    return {name: median(values) for name, values in found.items()}


class _Counter(TorchDispatchMode):  # type: ignore[misc]
    """Counts operators that do work: views only change how a tensor is read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func.overloadpacket.__name__ in ("detach", "_unsafe_view"))
        return func(*args, **(kwargs or {}))


def _launches(step: TrainingStep) -> dict[str, int]:
    """How many operators each part of a step launches."""
    found = {}
    with _Counter() as counter:
        loss = step.forward()
        found["forward"] = counter.count
        loss.backward()
        found["backward"] = counter.count - found["forward"]
        step.update()
        found["optimizer"] = counter.count - found["forward"] - found["backward"]
    return found


def _guarded(measure: Callable[[], Row], device: str) -> Row:
    try:
        return measure()
    except (RuntimeError, AttributeError, ValueError, NotImplementedError) as problem:
        return {"error": error_of(problem)}
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()
