"""ValueOperators: operators whose results depend on values that fake tensors do not have, as a GPU runs them.

A recorder looks them up by name: `_op_nonzero` stands in for `aten::nonzero`, and `_raw_is_pinned` for an operator
whose arguments must stay real. They return `NotImplemented` if the operator can run as it is. Sizes come from
`AssumedValues`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from lumos.dry_run.assumed_values import AssumedValues
from lumos.dry_run.gpu_functions import backward_shapes, forward_shapes
from lumos.dry_run.operator_log import OperatorLog
from lumos.program.op import UNSEEN

_MASKS = (torch.bool, torch.uint8)
_WAIT = "cudaStreamSynchronize"
ASSUMED_MASK = "flex_attention: the blocks that its mask leaves out are unknown: assuming a causal mask"


class ValueOperators(OperatorLog, AbstractContextManager[Any]):
    """The part of a recorder that assumes values; the recorder is a dispatch mode, and writes operators down."""

    values: AssumedValues

    def _waited(self, name: str, inputs: list[Any], outputs: list[Any]) -> None:
        """Record an operator whose result the host waits for."""
        mark = self.add(name, inputs, outputs)
        if mark >= 0:
            self.wait_on_host(_WAIT, [mark])

    def _ask(self, name: str, *tensors: torch.Tensor) -> None:
        """Record a question whose answer the host waits for."""
        if tensors[0].device.type == "cuda":
            self._waited(f"aten.{name}.default", list(tensors), [])

    # ------------------------------------------------------------------ single values
    def _op__local_scalar_dense(self, tensor: torch.Tensor) -> bool | int | float | complex:
        self._ask("_local_scalar_dense", tensor)
        return self.values.of(tensor)

    def _op_equal(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Tensors are equal if they are the same memory, or known to hold the same; otherwise they differ."""
        self._ask("equal", a, b)
        return self.values.are_equal(a, b)

    def _op_allclose(self, a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> bool:
        """Known numbers are compared; others are assumed to be close, as a script that asserts it expects."""
        self._ask("allclose", a, b)
        return self.values.are_close(a, b)

    # ------------------------------------------------------------------ masks and places
    def _op_nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        """The host waits for the number of places."""
        count = self.values.count_true(mask)
        places = torch.empty((count, mask.dim()), dtype=torch.int64, device=mask.device)
        self._waited("aten.nonzero.default", [mask], [places])
        if mask.dim() == 1 and count == mask.numel():
            self.values.learn(places, counting=(0, 1))
        return places

    def _op_index(self, x: torch.Tensor, indices: Any) -> Any:
        """A mask among the indices becomes places first, as in a kernel."""
        if not _has_mask(indices):
            return NotImplemented
        with self:
            return torch.ops.aten.index.Tensor(x, _places(indices))

    def _op_index_put_(self, x: torch.Tensor, indices: Any, value: torch.Tensor, accumulate: bool = False) -> Any:
        """One value for the places of a mask is filled in; several need the places."""
        if not _has_mask(indices):
            return NotImplemented
        with self:
            if _is_filled(indices, value) and not accumulate:
                mask = indices[0].view(*indices[0].shape, *[1] * (x.dim() - indices[0].dim()))
                return torch.ops.aten.masked_fill_.Tensor(x, mask, value if value.dim() == 0 else value.view(()))
            return torch.ops.aten.index_put_.default(x, _places(indices), value, accumulate)

    def _op__index_put_impl_(
        self, x: torch.Tensor, indices: Any, value: torch.Tensor, accumulate: bool = False, unsafe: bool = False
    ) -> Any:
        return self._op_index_put_(x, indices, value, accumulate)

    def _op_index_put(self, x: torch.Tensor, indices: Any, value: torch.Tensor, accumulate: bool = False) -> Any:
        if not _has_mask(indices):
            return NotImplemented
        with self:
            return torch.ops.aten.index_put.default(x, _places(indices), value, accumulate)

    def _op_masked_select(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with self:
            x, mask = torch.broadcast_tensors(x, mask)
            return x[mask]

    # ------------------------------------------------------------------ counts
    def _op_repeat_interleave(self, *args: Any, **kwargs: Any) -> Any:
        """There are as many places as the counts say, if no size is given."""
        repeats, size = args[0], kwargs.get("output_size")
        if size is not None or len(args) > 1:
            return NotImplemented
        places = torch.empty(self.values.total(repeats), dtype=repeats.dtype, device=repeats.device)
        self._waited("aten.repeat_interleave.Tensor", [repeats], [places])
        return places

    def _op_bincount(self, x: torch.Tensor, weights: Any = None, minlength: int = 0) -> torch.Tensor:
        """There are as many counts as choices, or as are asked for; the kernel looks for the largest value first."""
        size = max(minlength, len(self.values.of_storage(x).choices or ()), 1)
        dtype = torch.int64 if weights is None else weights.dtype
        counts = torch.empty(size, dtype=dtype, device=x.device)
        self._waited("aten.bincount.default", [x, *([] if weights is None else [weights])], [counts])
        self.values.follow("bincount", (x,), counts)
        return counts

    def _op__unique2(self, x: torch.Tensor, *_: Any, **__: Any) -> Any:
        count = self.values.count_distinct(x)
        return self._unique("aten._unique2.default", x, x.new_empty(count), x.shape, count)

    def _op_unique_dim(self, x: torch.Tensor, dim: int, *_: Any, **__: Any) -> Any:
        """Whole rows are assumed to differ."""
        count = x.shape[dim]
        return self._unique("aten.unique_dim.default", x, torch.empty_like(x), (count,), count)

    def _op_unique_consecutive(
        self, x: torch.Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
    ) -> Any:
        count = x.numel() if dim is None else x.shape[dim]
        values = x.new_empty(count) if dim is None else torch.empty_like(x)
        return self._unique("aten.unique_consecutive.default", x, values, x.shape if dim is None else (count,), count)

    def _unique(self, name: str, x: torch.Tensor, values: torch.Tensor, inverse: Any, count: int) -> Any:
        places = torch.empty(inverse, dtype=torch.int64, device=x.device)
        counts = torch.empty(count, dtype=torch.int64, device=x.device)
        self._waited(name, [x], [values, places, counts])
        self.values.learn(places, choices=range(max(count, 1)))
        self.values.learn(counts, mean=x.numel() / max(values.numel(), 1))
        return values, places, counts

    # ------------------------------------------------------------------ without a kernel, or a shape, on fake tensors
    def _op__safe_softmax(self, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A GPU has no kernel for it: rows without any finite score are found and set to zero."""
        with self:
            out = torch.softmax(x, dim, dtype)
            empty = torch.isneginf(x).all(dim, keepdim=True)
            return torch.where(empty, torch.zeros((), dtype=out.dtype, device=out.device), out)

    def _op__use_cudnn_ctc_loss(self, *_: Any, **__: Any) -> bool:
        return False

    _op__use_miopen_ctc_loss = _op__use_cudnn_ctc_loss

    def run_shaped(self, name: str, args: Any, kwargs: Any) -> Any:
        """Record an operator of `SHAPES`, and return its results."""
        inputs, outputs = SHAPES[name](*args, **kwargs)
        self.add(f"aten.{name}.default", inputs, outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _op__thnn_fused_gru_cell_backward(self, grad: torch.Tensor, kept: torch.Tensor, has_bias: bool) -> Any:
        wide = [grad.new_empty(grad.shape[0], 3 * grad.shape[1]) for _ in range(2)]
        gradients = [*wide, torch.empty_like(grad)]
        self.add("aten._thnn_fused_gru_cell_backward.default", [grad, kept], gradients)
        with self:
            biases = [gates.sum(0) if has_bias else None for gates in wide]
        return (*gradients, *biases)

    def _op_batch_norm_backward_reduce(self, grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
        sums = _statistics(x, x.shape[1], 4)
        self.add("aten.batch_norm_backward_reduce.default", [grad, x], sums)
        return tuple(tensor if wanted else None for tensor, wanted in zip(sums, (True, True, *rest[-2:]), strict=True))

    def _op_flex_forward(self, query: Any, key: Any, value: Any, is_masked: bool) -> Any:
        return self._flex("forward", [query, key, value], forward_shapes(query, key, value), is_masked)

    def _op_flex_backward(self, gradient: Any, *saved: Any) -> Any:
        *tensors, is_masked = saved
        return self._flex("backward", [*tensors, gradient], backward_shapes(gradient, *tensors), is_masked)

    def _flex(self, way: str, inputs: list[Any], outputs: tuple[Any, ...], is_masked: bool) -> Any:
        """`flex_attention`: its cost hangs on the blocks that a mask leaves out, which are values."""
        if is_masked:
            self.notes[ASSUMED_MASK] = None
        options = ("compiled", "causal", UNSEEN) if is_masked else ("compiled",)
        self.add(f"attention.{way}", inputs, list(outputs), options)
        return outputs

    # ------------------------------------------------------------------ real numbers of the host
    def _raw_is_pinned(self, tensor: torch.Tensor, *_: Any, **__: Any) -> bool:
        """Pinned memory of the host is not asked for, and assumed to be there."""
        return bool(tensor.device.type == "cpu")

    def _raw__pack_padded_sequence(self, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        """Rows of all sequences one after the other, and how many sequences go on at every time: real numbers."""
        if isinstance(lengths, FakeTensor):
            known = self.values.all_of(lengths)
        else:
            with unset_fake_temporarily():
                known = lengths.tolist()
        sizes = [sum(length > time for length in known) for time in range(max(known))]
        rows = torch.empty((sum(sizes), *x.shape[2:]), dtype=x.dtype, device=x.device)
        self.add("aten._pack_padded_sequence.default", [x], [rows])
        with unset_fake_temporarily():
            return rows, torch.tensor(sizes)


# ---------------------------------------------------------------------- operators without shapes for fake tensors
def _statistics(x: torch.Tensor, channels: int, count: int) -> list[torch.Tensor]:
    """Statistics of a batch norm over several GPUs: in fp32 for 16-bit inputs."""
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return [x.new_empty(channels, dtype=dtype) for _ in range(count)]


def _ctc_loss(x: torch.Tensor, targets: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Losses and the table of forward probabilities: times × twice the longest target."""
    times, batch = x.shape[0], x.shape[1]
    longest = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // max(batch, 1))
    return [x, targets], [x.new_empty(batch), x.new_empty(batch, times, 2 * longest + 1)]


def _ctc_loss_backward(grad: torch.Tensor, x: torch.Tensor, *rest: Any, **__: Any) -> Any:
    table = next(t for t in rest if isinstance(t, FakeTensor) and t.dim() == 3)
    return [grad, x, table, torch.empty_like(table)], [torch.empty_like(x)]


SHAPES: dict[str, Callable[..., tuple[list[Any], list[Any]]]] = {  # inputs and outputs, from the arguments
    "_thnn_fused_gru_cell": lambda gates, hidden, state, *_: (
        [gates, hidden, state], [torch.empty_like(state), state.new_empty(state.shape[0], 5 * state.shape[1])]
    ),
    "_ctc_loss": _ctc_loss, "_ctc_loss_backward": _ctc_loss_backward,
    "_pack_padded_sequence_backward": lambda grad, size, *_: ([grad], [grad.new_empty(size)]),
    "batch_norm_stats": lambda x, *_: ([x], _statistics(x, x.shape[1], 2)),
    "batch_norm_gather_stats_with_counts": lambda x, mean, deviation, *_: (
        [mean, deviation], _statistics(x, mean.shape[-1], 2)
    ),
    "batch_norm_elemt": lambda x, *rest: (
        [x, *(t for t in rest if isinstance(t, torch.Tensor))], [torch.empty_like(x)]
    ),
    "batch_norm_backward_elemt": lambda grad, x, *_: ([grad, x], [torch.empty_like(x)]),
}  # fmt: skip


def _is_filled(indices: Any, value: torch.Tensor) -> bool:
    """Whether PyTorch fills instead: one number of the host, and one mask."""
    is_number = value.numel() == 1 and value.device.type == "cpu"
    return bool(is_number and len(indices) == 1 and indices[0].dtype == torch.bool)


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, torch.Tensor) and index.dtype in _MASKS for index in indices)


def _places(indices: Any) -> list[Any]:
    """Indices without masks: a mask of several dimensions becomes as many indices."""
    places: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, torch.Tensor) and index.dtype in _MASKS
        places += list(index.nonzero().unbind(1)) if is_mask else [index]
    return places
