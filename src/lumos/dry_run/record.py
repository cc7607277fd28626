"""Record: run a training step on fake tensors and write down every operator. Needs torch (any build).

Fake tensors have shapes, dtypes and strides and no memory, so that a step of any size runs in seconds on a CPU. A
dispatch
mode sees every aten operator of the forward pass, the backward pass and the optimizer; finalizers of storages tell when
memory is released.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lumos.dry_run.recorded_step import RecordedOp, Recording, TensorInfo

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
           torch.int64: "int64",
           torch.int32: "int32", torch.bool: "bool", torch.uint8: "uint8", torch.int8: "int8"}  # fmt: skip
_CATEGORIES = {"build": "weights", "forward": "activations", "backward": "gradients", "optimizer": "optimizer"}
_MOST_SECONDS, _MOST_OPS = 300.0, 60_000  # a scan over tokens in Python runs more
_BLOCK = 512  # bytes that the caching allocator rounds to


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _info(tensor: torch.Tensor) -> TensorInfo:
    dtype = _DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return TensorInfo(tuple(map(int, tensor.shape)), dtype, tuple(map(int, tensor.stride())), tensor.element_size())


class _MemoryLedger:
    """Bytes that are alive, by category, and the most there ever were."""

    def __init__(self) -> None:
        self.alive: dict[int, tuple[float, str]] = {}
        self.by_category: dict[str, float] = {}
        self.total = self.peak = 0.0
        self.at_peak: tuple[str, dict[str, float]] = ("", {})

    def hold(self, tensor: torch.Tensor, category: str, phase: str = "") -> bool:
        """Count a tensor's storage, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return False
        size = float(-(-storage.nbytes() // _BLOCK) * _BLOCK)
        self.alive[key] = (size, category)
        self.by_category[category] = self.by_category.get(category, 0.0) + size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, (phase, dict(self.by_category))
        weakref.finalize(storage, self._release, key)
        return True

    def touch(self, like: torch.Tensor, category: str, phase: str) -> None:
        """Count a temporary tensor as large as another one."""
        size = float(-(-like.untyped_storage().nbytes() // _BLOCK) * _BLOCK)
        if self.total + size > self.peak:
            held = self.by_category | {category: self.by_category.get(category, 0.0) + size}
            self.peak, self.at_peak = self.total + size, (phase, held)

    def _release(self, key: int) -> None:
        size, category = self.alive.pop(key, (0.0, ""))
        self.total -= size
        if category:
            self.by_category[category] -= size

    def restart(self) -> None:
        """Forget the peak, not what is alive."""
        self.peak = self.total


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Writes down operators; answers questions about values that fake tensors do not have."""

    def __init__(self, ledger: _MemoryLedger) -> None:
        super().__init__()
        self.ledger, self.ops, self.phase = ledger, list[RecordedOp](), "build"
        self.assumptions: dict[str, None] = {}
        self.until = monotonic() + _MOST_SECONDS
        self.drawn: set[int] = set()  # storages of random numbers, and of what was compared with them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if monotonic() > self.until or len(self.ops) > _MOST_OPS:
            raise TimeoutError
        if name == "aten._local_scalar_dense.default":
            return self._value_of(args[0])
        if name == "aten._safe_softmax.default":
            return self._safe_softmax(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if not name.startswith("prim"):
            accumulates = name.startswith("aten.index_put") and (args[3:4] or [(kwargs or {}).get("accumulate")])[0]
            options = ("accumulate",) if accumulates else ()
            self.add(name, [*_tensors(args), *_tensors(kwargs or {})], list(_tensors(out)), options)
            self._follow_random(name, args, out)
        return out

    def _safe_softmax(self, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A GPU has no kernel for it: rows without any finite score are found and set to zero."""
        with self:
            out = torch.softmax(x, dim, dtype)
            empty = torch.isneginf(x).all(dim, keepdim=True)
            return torch.where(empty, torch.zeros((), dtype=out.dtype), out)

    def _follow_random(self, name: str, args: Any, out: Any) -> None:
        """Remember single random numbers: whatever hangs on one (layers that are dropped) is taken as not happening."""
        if isinstance(out, torch.Tensor) and out.dim() == 0:
            inputs = (tensor.untyped_storage()._cdata for tensor in _tensors(args))
            if "rand" in name or "uniform" in name or any(key in self.drawn for key in inputs):
                self.drawn.add(out.untyped_storage()._cdata)

    def add(
        self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], options: tuple[str, ...] = ()
    ) -> None:
        category = _CATEGORIES[self.phase]
        new = [self.ledger.hold(tensor, category, self.phase) for tensor in outputs]
        if name == "aten._softmax_backward_data.default":  # the CUDA kernel multiplies its operands first
            self.ledger.touch(outputs[0], category, self.phase)
        infos = (tuple(map(_info, inputs)), tuple(map(_info, outputs)))
        self.ops.append(RecordedOp(name, *infos, self.phase, allocates=any(new), options=options))

    def _value_of(self, tensor: torch.Tensor) -> bool | int | float:
        """Fake tensors have no values: masks are full, nothing is dropped at random, counts are one."""
        self.assumptions["values of tensors are not known: masks are taken as full, and no layer as dropped"] = None
        if tensor.dtype == torch.bool:
            return tensor.untyped_storage()._cdata not in self.drawn
        return 1.0 if tensor.dtype.is_floating_point else 1


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """Fused attention as a GPU runs it: one kernel forward, one backward; output and log-sum-exp are kept."""

    @staticmethod
    def forward(ctx: Any, recorder: _Recorder, q: Any, k: Any, v: Any, mask: Any, causal: bool) -> torch.Tensor:
        same = q.shape[-1] == v.shape[-1]
        out = torch.empty_like(q) if same else q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.recorder, ctx.options = recorder, _attention_options(mask, causal)
        recorder.add("attention.forward", [q, k, v], [out, lse], ctx.options)
        ctx.save_for_backward(q, k, v, out, lse, *(() if mask is None else (mask,)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, *_ = ctx.saved_tensors
        found = [torch.empty_like(tensor) for tensor in (q, k, v)]
        ctx.recorder.add("attention.backward", [q, k, v, out, lse, *grads], found, ctx.options)
        return None, *found, None, None


def _attention_options(mask: Any, causal: bool) -> tuple[str, ...]:
    return (*(("causal",) if causal else ()), *(("masked",) if mask is not None else ()))


class _AsOnGpu(TorchFunctionMode):  # type: ignore[misc]
    """Functions that PyTorch runs otherwise on a GPU than on a CPU: attention is fused, dropout keeps a mask of
    bytes.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is torch.nn.functional.dropout:
            return self._dropout(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(input, p, True)[0] if training and p > 0 else input

    def _attention(self, q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
                   scale: float | None = None, enable_gqa: bool = False) -> Any:  # fmt: skip
        if not _fuses(q, k, v, attn_mask, enable_gqa):
            math = torch._scaled_dot_product_attention_math
            return math(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # it becomes one that is added, and is kept
            zero, never = (torch.full((), value, dtype=q.dtype) for value in (0.0, float("-inf")))
            attn_mask = torch.where(attn_mask, zero, never)
        return _Attention.apply(self.recorder, q, k, v, attn_mask, is_causal)


def _fuses(q: Any, k: Any, v: Any, mask: Any, enable_gqa: bool) -> bool:
    """Whether a fused kernel of PyTorch takes these operands (aten/native/transformers/cuda/sdp_utils.cpp)."""
    if q.dim() != 4 or (mask is not None and mask.requires_grad):
        return False
    heads = (q.shape[1], k.shape[1], v.shape[1])
    if len(set(heads)) > 1 and not (enable_gqa and mask is None):
        return False
    return bool(max(q.shape[-1], v.shape[-1]) <= 256 and q.shape[-1] % 8 == 0)


Build = Callable[[], tuple[torch.nn.Module, Callable[[], torch.Tensor], int]]


def record_step(build: Build, optimizer: str = "adamw", microbatches: int = 1) -> Recording:
    """Run two steps of a model that `build` makes, and record the second.

    `build` is called under fake tensors and returns the model, a function that runs a forward pass and returns the
    loss, and the tokens (or samples) of one micro-batch. The first step makes the optimizer's state.
    """
    ledger = _MemoryLedger()
    recorder = _Recorder(ledger)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with recorder:  # models ask for values while they are built, too
            model, loss_of, tokens = build()
        for tensor in (*model.parameters(), *model.buffers()):
            ledger.hold(tensor, "weights")
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        update = _optimizer(optimizer, trained)
        for _ in range(2):
            recorder.ops.clear()
            ledger.restart()
            with _AsOnGpu(recorder), recorder:
                _step(recorder, loss_of, update, microbatches)
        phase, held = ledger.at_peak
        return Recording(
            list(recorder.ops), sum(p.numel() for p in model.parameters()), sum(p.numel() for p in trained),
            tokens * microbatches, ledger.peak, phase, held, list(recorder.assumptions),
        )  # fmt: skip


def _step(
    recorder: _Recorder, loss_of: Callable[[], torch.Tensor], update: torch.optim.Optimizer, microbatches: int
) -> None:
    for _ in range(microbatches):
        recorder.phase = "forward"
        loss = loss_of()
        recorder.phase = "backward"
        loss.backward()
        del loss
    recorder.phase = "optimizer"
    update.step()
    update.zero_grad(set_to_none=True)


def _optimizer(kind: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=True)
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
