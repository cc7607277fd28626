"""ValueOperators: operators whose results depend on values that fake tensors do not have, as a GPU runs them.

A recorder looks them up by name: `_op_nonzero` stands in for `aten::nonzero`. They return `NotImplemented` where the
operator can run as it is. Sizes come from `AssumedValues`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from lumos.dry_run.assumed_values import AssumedValues, storage_key

_MASKS = (torch.bool, torch.uint8)
_WAIT = "cudaStreamSynchronize"


class ValueOperators(AbstractContextManager[Any]):
    """The part of a recorder that answers for values; the recorder is a dispatch mode, and writes operators down."""

    values: AssumedValues

    def add(self, name: str, inputs: list[Any], outputs: list[Any], options: tuple[str, ...] = ()) -> int:
        raise NotImplementedError

    def wait_on_host(self, what: str, marks: list[int]) -> None:
        raise NotImplementedError

    def _waited(self, name: str, inputs: list[Any], outputs: list[Any]) -> None:
        """An operator whose result the host waits for."""
        mark = self.add(name, inputs, outputs)
        if mark >= 0:
            self.wait_on_host(_WAIT, [mark])

    # ------------------------------------------------------------------ single values
    def _op__local_scalar_dense(self, tensor: torch.Tensor) -> bool | int | float | complex:
        if tensor.device.type == "cuda":
            self._waited("aten._local_scalar_dense.default", [tensor], [])
        return self.values.of(tensor)

    def _op_equal(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Tensors are equal if they are the same memory, or known to hold the same; otherwise they differ."""
        if a.device.type == "cuda":
            self._waited("aten.equal.default", [a, b], [])
        return self.values.are_equal(a, b)

    def _op_allclose(self, a: torch.Tensor, b: torch.Tensor, *tolerances: Any, **__: Any) -> bool:
        """Known numbers are compared; others are taken to be close, as a script that asserts it expects."""
        if a.device.type == "cuda":
            self._waited("aten.allclose.default", [a, b], [])
        return self.values.are_close(a, b)

    # ------------------------------------------------------------------ masks and places
    def _op_nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        """The host waits for the number of places."""
        count = self.values.count_true(mask)
        found = torch.empty((count, mask.dim()), dtype=torch.int64, device=mask.device)
        self._waited("aten.nonzero.default", [mask], [found])
        if mask.dim() == 1 and count == mask.numel():
            self.values.counting[storage_key(found)] = (0, 1)
        return found

    def _op_index(self, x: torch.Tensor, indices: Any) -> Any:
        """A mask among the indices is made to places first, as in a kernel."""
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
        """As many places as the counts say, where no size is given."""
        repeats, size = args[0], kwargs.get("output_size")
        if size is not None or len(args) > 1:
            return NotImplemented
        found = torch.empty(self.values.total(repeats), dtype=repeats.dtype, device=repeats.device)
        self._waited("aten.repeat_interleave.Tensor", [repeats], [found])
        return found

    def _op_bincount(self, x: torch.Tensor, weights: Any = None, minlength: int = 0) -> torch.Tensor:
        """As many counts as there are choices, or as are asked for; the kernel looks for the largest value first."""
        size = max(minlength, len(self.values.choices.get(storage_key(x), ())), 1)
        dtype = torch.int64 if weights is None else weights.dtype
        found = torch.empty(size, dtype=dtype, device=x.device)
        self._waited("aten.bincount.default", [x, *([] if weights is None else [weights])], [found])
        self.values.follow("bincount", (x,), found)
        return found

    def _op__unique2(
        self, x: torch.Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
    ) -> Any:
        count = self.values.count_distinct(x)
        return self._unique("aten._unique2.default", x, x.new_empty(count), x.shape, count)

    def _op_unique_dim(
        self, x: torch.Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
    ) -> Any:
        """Whole rows are taken to differ."""
        count = x.shape[dim]
        return self._unique("aten.unique_dim.default", x, torch.empty_like(x), (count,), count)

    def _op_unique_consecutive(
        self, x: torch.Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
    ) -> Any:
        count = x.numel() if dim is None else x.shape[dim]
        found = x.new_empty(count) if dim is None else torch.empty_like(x)
        return self._unique("aten.unique_consecutive.default", x, found, x.shape if dim is None else (count,), count)

    def _unique(self, name: str, x: torch.Tensor, found: torch.Tensor, inverse: Any, count: int) -> Any:
        places = torch.empty(inverse, dtype=torch.int64, device=x.device)
        counts = torch.empty(count, dtype=torch.int64, device=x.device)
        self._waited(name, [x], [found, places, counts])
        self.values.choices[storage_key(places)] = range(max(count, 1))
        self.values.mean[storage_key(counts)] = x.numel() / max(found.numel(), 1)
        return found, places, counts

    # ------------------------------------------------------------------ without shapes for fake tensors
    def _op__safe_softmax(self, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A GPU has no kernel for it: rows without any finite score are found and set to zero."""
        with self:
            out = torch.softmax(x, dim, dtype)
            empty = torch.isneginf(x).all(dim, keepdim=True)
            return torch.where(empty, torch.zeros((), dtype=out.dtype, device=out.device), out)

    def _op__use_cudnn_ctc_loss(self, *_: Any, **__: Any) -> bool:
        return False

    _op__use_miopen_ctc_loss = _op__use_cudnn_ctc_loss

    def _op__thnn_fused_gru_cell(self, gates: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor, *_: Any) -> Any:
        found = (torch.empty_like(state), state.new_empty(state.shape[0], 5 * state.shape[1]))
        self.add("aten._thnn_fused_gru_cell.default", [gates, hidden, state], list(found))
        return found

    def _op__thnn_fused_gru_cell_backward(self, grad: torch.Tensor, kept: torch.Tensor, has_bias: bool) -> Any:
        wide = [grad.new_empty(grad.shape[0], 3 * grad.shape[1]) for _ in range(2)]
        found = [*wide, torch.empty_like(grad)]
        self.add("aten._thnn_fused_gru_cell_backward.default", [grad, kept], found)
        with self:
            biases = [gates.sum(0) if has_bias else None for gates in wide]
        return (*found, *biases)

    def _op__ctc_loss(self, x: torch.Tensor, targets: torch.Tensor, *lengths: Any, **__: Any) -> Any:
        """Losses and the table of forward probabilities: times × twice the longest target."""
        times, batch = x.shape[0], x.shape[1]
        longest = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // max(batch, 1))
        found = (x.new_empty(batch), x.new_empty(batch, times, 2 * longest + 1))
        self.add("aten._ctc_loss.default", [x, targets], list(found))
        return found

    def _op__ctc_loss_backward(self, grad: torch.Tensor, x: torch.Tensor, *rest: Any, **__: Any) -> torch.Tensor:
        found = torch.empty_like(x)
        table = next(t for t in rest if isinstance(t, FakeTensor) and t.dim() == 3)
        self.add("aten._ctc_loss_backward.default", [grad, x, table, torch.empty_like(table)], [found])
        return found

    # ------------------------------------------------------------------ batch norm over several GPUs
    def _op_batch_norm_stats(self, x: torch.Tensor, eps: float) -> Any:
        found = [x.new_empty(x.shape[1], dtype=_wide(x)) for _ in range(2)]
        self.add("aten.batch_norm_stats.default", [x], found)
        return tuple(found)

    def _op_batch_norm_gather_stats_with_counts(self, x: torch.Tensor, mean: torch.Tensor, *rest: Any) -> Any:
        found = [x.new_empty(mean.shape[-1], dtype=_wide(x)) for _ in range(2)]
        self.add("aten.batch_norm_gather_stats_with_counts.default", [mean, rest[0]], found)
        return tuple(found)

    def _op_batch_norm_elemt(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        found = torch.empty_like(x)
        self.add("aten.batch_norm_elemt.default", [x, *(t for t in rest if isinstance(t, torch.Tensor))], [found])
        return found

    def _op_batch_norm_backward_reduce(self, grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
        found = [x.new_empty(x.shape[1], dtype=_wide(x)) for _ in range(4)]
        self.add("aten.batch_norm_backward_reduce.default", [grad, x], found)
        return tuple(tensor if wanted else None for tensor, wanted in zip(found, (True, True, *rest[-2:]), strict=True))

    def _op_batch_norm_backward_elemt(self, grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        found = torch.empty_like(x)
        self.add("aten.batch_norm_backward_elemt.default", [grad, x], [found])
        return found

    # ------------------------------------------------------------------ real numbers of the host
    def _raw_is_pinned(self, tensor: torch.Tensor, *_: Any, **__: Any) -> bool:
        """Pinned memory of the host is not asked for, and taken to be there."""
        return bool(tensor.device.type == "cpu")

    def _raw__pack_padded_sequence(self, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        """Rows of all sequences one after the other, and how many sequences go on at every time: real numbers."""
        if isinstance(lengths, FakeTensor):
            known = self.values.all_of(lengths)
        else:
            with unset_fake_temporarily():
                known = lengths.tolist()
        sizes = [sum(length > time for length in known) for time in range(max(known))]
        found = torch.empty((sum(sizes), *x.shape[2:]), dtype=x.dtype, device=x.device)
        self.add("aten._pack_padded_sequence.default", [x], [found])
        with unset_fake_temporarily():
            return found, torch.tensor(sizes)

    def _op__pack_padded_sequence_backward(
        self, grad: torch.Tensor, size: Any, batch_sizes: torch.Tensor, batch_first: bool
    ) -> torch.Tensor:
        found = grad.new_empty(size)
        self.add("aten._pack_padded_sequence_backward.default", [grad], [found])
        return found


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """In which statistics are kept."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def _is_filled(indices: Any, value: torch.Tensor) -> bool:
    """Whether PyTorch fills instead: one number of the host, and one mask."""
    is_number = value.numel() == 1 and value.device.type == "cpu"
    return bool(is_number and len(indices) == 1 and indices[0].dtype == torch.bool)


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, torch.Tensor) and index.dtype in _MASKS for index in indices)


def _places(indices: Any) -> list[Any]:
    """Indices without masks: a mask of several dimensions becomes as many indices."""
    found: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, torch.Tensor) and index.dtype in _MASKS
        found += list(index.nonzero().unbind(1)) if is_mask else [index]
    return found
