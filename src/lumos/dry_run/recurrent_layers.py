"""Recurrent layers as cuDNN runs them: `nn.LSTM`, `nn.GRU` and `nn.RNN` are one call of the host on a GPU.

PyTorch without cuDNN makes a dozen operators of every time step. cuDNN multiplies the inputs of all time steps at once,
then runs one matmul and one kernel for the gates at every time step. That is how a layer is written down here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from lumos.dry_run.gpu_functions import autocast, is_local
from lumos.dry_run.tensor_float import recurrent_layers_use_tf32

NOTE = "recurrent layers: taken as cuDNN without persistent kernels: one matmul and one gate kernel per time step"
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_CELLS = {"lstm": "aten._thnn_fused_lstm_cell", "gru": "aten._thnn_fused_gru_cell"}
_KEPT = 2  # for the backward pass, beside the gates: states and cells of every time step
_LAUNCH = "compiled"  # kernels that C++ launches one after the other, without a call of PyTorch for each


class RecurrentLog(Protocol):
    """Where kernels are written down (`record.Recorder`)."""

    notes: dict[str, None]

    def add(self, name: str, inputs: list[Any], outputs: list[Any], options: tuple[str, ...] = ()) -> int: ...
    def on_host(self, name: str) -> int: ...
    def paused(self) -> AbstractContextManager[None]: ...


class _Sizes(NamedTuple):
    kind: str
    layers: int
    directions: int
    hidden: int
    times: int
    batch: int  # sequences that go on at a time, on average
    rows: int  # of inputs, over all times
    weights: int  # tensors of one layer and direction

    @property
    def gates(self) -> int:
        return _GATES[self.kind] * self.hidden

    @property
    def cell(self) -> str:
        return _CELLS.get(self.kind, "aten.tanh")


def recurrent_as_on_gpu(log: RecurrentLog) -> dict[str, Callable[..., Any]]:
    """Functions of torch._VF by name, which the modules call."""
    return {kind: _function(log, kind, getattr(torch._VF, kind)) for kind in _GATES}


def _function(log: RecurrentLog, kind: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def run(x: Any, second: Any, *rest: Any) -> Any:
        is_packed = isinstance(rest[0], torch.Tensor | tuple) and not isinstance(rest[0][0], torch.nn.Parameter)
        states, weights, has_bias, layers, _, _, bidirectional, *last = rest if is_packed else (second, *rest)
        states = states if isinstance(states, tuple | list) else (states,)
        each = 4 if has_bias else 2
        if not is_local(x) or len(weights) != each * layers * (1 + bidirectional):  # projections
            return plain(x, second, *rest)
        times = len(second) if is_packed else x.shape[1 if last[0] else 0]
        rows = x.shape[0] if is_packed else x.shape[0] * x.shape[1]
        hidden = states[0].shape[-1]
        sizes = _Sizes(kind, layers, 1 + bidirectional, hidden, times, max(rows // times, 1), rows, each)
        log.notes[NOTE] = None
        return _Recurrent.apply(log, sizes, len(states), autocast(x), *map(autocast, (*states, *weights)))

    return run


class _Recurrent(torch.autograd.Function):  # type: ignore[misc]
    """All layers and time steps forward, and all of them backward."""

    @staticmethod
    def forward(ctx: Any, log: RecurrentLog, sizes: _Sizes, states: int, x: Any, *rest: Any) -> Any:
        log.on_host("aten._cudnn_rnn.default")
        with log.paused():
            y = x.new_empty((*x.shape[:-1], sizes.directions * sizes.hidden))
            ends = [torch.empty_like(state) for state in rest[:states]]
            kept = sizes.layers * sizes.directions * sizes.rows * (sizes.gates + _KEPT * sizes.hidden)
            reserve = x.new_empty(kept)
        log.add("aten.empty.memory_format", [], [y, *ends, reserve])
        for w_ih, w_hh in _weights(rest[states:], sizes):
            _layer_forward(log, sizes, x, w_ih, w_hh)
        ctx.log, ctx.sizes, ctx.states = log, sizes, states
        ctx.save_for_backward(x, *rest, y, reserve)
        return (y, *ends)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *rest, y, _ = ctx.saved_tensors
        log, sizes, weights = ctx.log, ctx.sizes, rest[ctx.states :]
        log.on_host("aten._cudnn_rnn_backward.default")
        with log.paused():
            flat = x.new_empty(sum(weight.numel() for weight in weights))  # gradients are parts of one block
            parts = flat.split([weight.numel() for weight in weights])
            found = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
            into = [torch.empty_like(tensor) for tensor in (x, *rest[: ctx.states])]
        log.add("aten.zeros.default", [], [flat])
        log.add("aten.empty.memory_format", [], into)
        for w_ih, w_hh in reversed(list(_weights(weights, sizes))):
            _layer_backward(log, sizes, x, y, w_ih, w_hh)
        return None, None, None, *into, *found


def _weights(weights: Any, sizes: _Sizes) -> Iterator[tuple[Any, Any]]:
    """Of every layer and direction: those of the inputs, and those of the states."""
    for start in range(0, len(weights), sizes.weights):
        yield weights[start], weights[start + 1]


def _options(tensor: Any) -> tuple[str, ...]:
    tf32 = tensor.dtype == torch.float32 and recurrent_layers_use_tf32()
    return (_LAUNCH, "tf32") if tf32 else (_LAUNCH,)


def _layer_forward(log: RecurrentLog, sizes: _Sizes, x: Any, w_ih: Any, w_hh: Any) -> None:
    options = _options(x)
    with log.paused():
        inputs, gates = x.new_empty(sizes.rows, w_ih.shape[1]), x.new_empty(sizes.rows, sizes.gates)
        step, state = gates[: sizes.batch], x.new_empty(sizes.batch, sizes.hidden)
        w_ih, w_hh = w_ih.detach().t(), w_hh.detach().t()
    log.add("aten.mm.default", [inputs, w_ih], [gates], options)
    for _ in range(sizes.times):
        log.add("aten.addmm_.default", [step, state, w_hh], [step], options)
        with log.paused():
            after = torch.empty_like(state)
        log.add(f"{sizes.cell}.default", [step, state], [after], (_LAUNCH,))


def _layer_backward(log: RecurrentLog, sizes: _Sizes, x: Any, y: Any, w_ih: Any, w_hh: Any) -> None:
    options = _options(x)
    with log.paused():
        inputs, gates = x.new_empty(sizes.rows, w_ih.shape[1]), x.new_empty(sizes.rows, sizes.gates)
        states, step = x.new_empty(sizes.rows, sizes.hidden), gates[: sizes.batch]
        state, by_gate = states[: sizes.batch], gates.t()
        d_inputs, d_ih, d_hh = (torch.empty_like(tensor) for tensor in (inputs, w_ih, w_hh))
        w_ih, w_hh = w_ih.detach(), w_hh.detach()
    log.add("aten.empty.memory_format", [], [gates])
    for _ in range(sizes.times):
        with log.paused():
            after = torch.empty_like(step)
        log.add(f"{sizes.cell}_backward.default", [step, state], [after], (_LAUNCH,))
        log.add("aten.addmm_.default", [state, step, w_hh], [state], options)
    log.add("aten.mm.default", [gates, w_ih], [d_inputs], options)
    log.add("aten.mm.default", [by_gate, inputs], [d_ih], options)
    log.add("aten.mm.default", [by_gate, states], [d_hh], options)
