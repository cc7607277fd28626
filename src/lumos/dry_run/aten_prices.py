"""Prices of recorded operators: which cost family an aten operator belongs to, and its time inside a training step.

Matmuls, fused attention and the fused AdamW are kinds of the shipped cost model (`lumos.cost.prices`). Everything
else moves
data: its family has a fixed time, a rate of bytes and a rate of elements (`data/aten_costs.json`, fitted by
calibration/fit_aten.py), and takes what the slower of the two takes. Which family an element-wise kernel belongs to
follows
from its operands, as in PyTorch's TensorIterator: kernels over dense operands of one dtype are vectorised and bound by
memory; those with a broadcast, strided or converted operand compute an address for every element and are bound by that.
"""

from __future__ import annotations

from math import gcd, prod, sqrt
from typing import NamedTuple

from lumos.cost.operator_model import CostModel
from lumos.cost.prices import Prices, warmth
from lumos.data_files import read_table
from lumos.dry_run.recorded_step import RecordedOp, TensorInfo
from lumos.program.operators import BYTES, Operator
from lumos.setup.gpus import gpu_named

_NOTHING = ("empty", "new_empty", "_local_scalar_dense", "lift_fresh", "set_", "resize_", "_record_function", "detach_")
_FILLS = {"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full",
          "fill", "zero",
          "arange", "scalar_tensor", "nll_loss_backward", "nll_loss2d_backward"}  # fmt: skip
_COPIES = {"_to_copy", "clone", "copy", "contiguous", "repeat", "constant_pad_nd"}
_REDUCTIONS = {
    "sum",
    "mean",
    "amax",
    "amin",
    "max",
    "min",
    "all",
    "any",
    "linalg_vector_norm",
    "argmax",
    "var",
    "var_mean",
    "prod",
}
_OWN = {
    "_softmax": "softmax", "_softmax_backward_data": "softmax_backward", "_log_softmax": "log_softmax",
    "_log_softmax_backward_data": "log_softmax_backward", "native_layer_norm": "layer_norm",
    "native_layer_norm_backward": "layer_norm_backward", "_fused_rms_norm": "rms_norm",
    "_fused_rms_norm_backward": "layer_norm_backward",
    "native_group_norm": "layer_norm", "native_group_norm_backward": "layer_norm_backward",
    "native_batch_norm": "batch_norm", "native_batch_norm_backward": "batch_norm",
    "_native_batch_norm_legit": "batch_norm",
    "native_dropout": "dropout", "cat": "cat", "stack": "cat", "slice_backward": "slice_backward",
    "select_backward": "slice_backward", "embedding": "embedding", "embedding_dense_backward": "embedding_backward",
    "index": "index", "index_select": "index", "gather": "index", "sort": "sort", "topk": "topk", "histc": "histogram",
    "bincount": "histogram", "cumsum": "cumsum", "scatter": "index", "scatter_add": "scatter_add",
    "index_add": "index_add",
    "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss", "gelu": "gelu", "gelu_backward": "gelu_backward",
}  # fmt: skip


_NEED_CONTIGUOUS = ("layer_norm", "softmax", "log_softmax")  # kernels that copy what is not


class Work(NamedTuple):
    """What a kernel does that takes time: bytes it moves, elements it addresses, updates of one place after another."""

    family: str
    bytes: float
    elements: float
    serial: float = 0.0


class Price(NamedTuple):
    """Microseconds of one call inside a step, and where they came from."""

    us: float
    source: str  # fitted, transferred, roofline
    operator: Operator | None = None  # of the cost model
    bytes: float = 0.0


def base_name(op: RecordedOp) -> str:
    """The operator without namespace, overload and the mark of working in place: `aten.add_.Tensor` is add."""
    name = op.name.split(".")[1] if op.name.startswith("aten.") else op.name
    return name[:-1] if name.endswith("_") and not name.startswith("_f") else name


def runs_kernel(op: RecordedOp) -> bool:
    """Whether the GPU has anything to do: views and empty tensors are made by the host alone."""
    name = op.name.removeprefix("aten.")
    if op.name.startswith("attention."):
        return True
    if not op.name.startswith("aten.") or name.startswith(_NOTHING):
        return False
    return op.allocates or name.split(".")[0].endswith("_")


# ---------------------------------------------------------------------- matmuls and attention
def matrix_operator(op: RecordedOp) -> Operator | None:
    """The kind of the cost model that an operator is, with its shape; None for what is not a matmul, attention or
    AdamW.
    """
    name = base_name(op)
    if name in ("mm", "addmm", "linear"):
        a, b = op.inputs[-2:] if name != "linear" else op.inputs[:2]
        return _matmul(a, b, name == "linear")
    if name in ("bmm", "baddbmm"):
        a, b = op.inputs[-2:]
        return Operator("bmm", (a.shape[0], a.shape[1], b.shape[2], a.shape[2]), _dtype(a))
    if name == "_grouped_mm":
        return _grouped(op)
    if name == "_fused_adamw_":
        held = sum(t.elements for t in op.inputs if t.shape)  # weights, gradients and two moments
        return Operator("adamw_fused", (max(1, held // 4),), _dtype(op.inputs[0]))
    if name.startswith("attention."):
        return _attention(op)
    return None


def _dtype(tensor: TensorInfo) -> str:
    return tensor.dtype if tensor.dtype in BYTES else "fp32"


def _matmul(a: TensorInfo, b: TensorInfo, is_linear: bool) -> Operator:
    k = a.shape[-1]
    m, n = a.elements // max(k, 1), b.shape[0] if is_linear else b.shape[-1]
    if is_linear or (_is_transposed(b) and not _is_transposed(a)):
        kind = "gemm_tn"
    else:
        kind = "gemm_nt" if _is_transposed(a) else "gemm_nn"
    return Operator(kind, (m, n, k), _dtype(a))


def _is_transposed(tensor: TensorInfo) -> bool:
    return len(tensor.strides) >= 2 and tensor.strides[-1] != 1


def _grouped(op: RecordedOp) -> Operator:
    a, b = op.inputs[:2]
    if len(b.shape) == 3:  # tokens times the weights of their expert
        return Operator("grouped_gemm", (b.shape[0], a.shape[0], b.shape[2], a.shape[1]), _dtype(a))
    experts = op.outputs[0].shape[0]  # the gradient of the weights
    return Operator("grouped_gemm", (experts, a.shape[1], b.shape[1], a.shape[0]), _dtype(a))


def _attention(op: RecordedOp) -> Operator:
    """Priced as causal attention over a square; what is not has twice the work, or that of its rectangle."""
    q, k, v = op.inputs[:3]
    work = q.shape[2] * k.shape[2] * (1.0 if "causal" in op.options else 2.0)
    width = round((q.shape[3] + v.shape[3]) / 2)
    kind = "sdpa_fwd" if op.name.endswith("forward") else "sdpa_bwd"
    return Operator(kind, (q.shape[0], q.shape[1], max(1, round(sqrt(work))), width), _dtype(q))


# ---------------------------------------------------------------------- everything else
def work_of(op: RecordedOp) -> Work:
    """The family of an operator that moves data, and how much of it."""
    name = base_name(op)
    inputs, outputs = op.inputs, op.outputs
    read, written = sum(t.bytes for t in inputs), sum(t.bytes for t in outputs)
    elements = float(max((t.elements for t in outputs), default=0))
    if name in _FILLS:
        return Work("fill", written, elements)
    if name == "index_put":
        return _index_put(op)
    if name.startswith("convolution"):
        return _convolution(op, name, read + written)
    if name.startswith("_foreach"):
        return Work("foreach", read + written, float(sum(t.elements for t in inputs)))
    if name in _REDUCTIONS and inputs and inputs[0].elements > elements:
        return Work(f"reduce.{_reduced(inputs[0], outputs[0])}", read + written, float(inputs[0].elements))
    if name in _OWN:
        return _own(op, name, read, written, elements)
    return _element_wise(op, name, elements)


def _own(op: RecordedOp, name: str, read: float, written: float, elements: float) -> Work:
    """Families of their own; what a kernel reads of a table is as much as it writes."""
    family = _OWN[name]
    if family in ("index", "embedding"):
        return Work(family, 2 * written, elements)
    if family == "embedding_backward":
        return Work(family, op.inputs[0].bytes + written, float(op.inputs[0].elements))
    if family in ("scatter_add", "index_add"):
        return Work(family, read + written, float(max(t.elements for t in op.inputs)))
    if family == "nll_loss":
        return Work(family, 64.0 * op.inputs[0].shape[0], float(op.inputs[0].shape[0]))
    if family in ("sort", "topk", "histogram", "cumsum"):
        elements = float(max(t.elements for t in op.inputs))
    if family.startswith("softmax"):  # rows of up to 1,024 elements stay in registers
        family += ".long" if op.outputs[0].shape[-1:] > (1024,) else ".short"
    if family.startswith("layer_norm"):
        family += ".fp32" if op.inputs[0].element == 4 else ".half"
    if family == "cat":
        inner = op.inputs[-1].shape[-1:] != op.outputs[0].shape[-1:]
        family = "cat.inner" if inner else "cat.outer"
    return Work(family, read + written, elements)


def _index_put(op: RecordedOp) -> Work:
    """Adding rows to a table: rows that go to the same place follow one another."""
    table, values = op.inputs[0], op.inputs[-1]
    copied = 0.0 if op.name.startswith("aten.index_put_") else 2 * table.bytes
    if "accumulate" not in op.options:
        return Work("index", 2 * values.bytes + copied, float(values.elements))
    width = prod(table.shape[1:]) or 1
    rows = values.elements / width
    return Work("index_put", 3 * values.bytes + copied, float(values.elements), rows / max(table.shape[0], 1))


def _convolution(op: RecordedOp, name: str, moved: float) -> Work:
    """Its elements are multiplications: those of the weights for every place of the output."""
    backward = name.endswith("backward")
    weight = op.inputs[2] if backward else op.inputs[1]
    out = op.inputs[0] if backward else op.outputs[0]
    flops = 2.0 * out.elements * prod(weight.shape[1:]) * (2.0 if backward else 1.0)
    return Work(f"convolution.{'fp32' if out.element == 4 else 'half'}{'.backward' if backward else ''}", moved, flops)


def _reduced(whole: TensorInfo, rest: TensorInfo) -> str:
    """Whether the dimension that is next in memory is reduced (rows), all are, or only others (columns)."""
    if rest.elements == 1:
        return "all"
    fast = whole.strides.index(1) if 1 in whole.strides else len(whole.shape) - 1
    if len(rest.shape) == len(whole.shape):
        by_rows = rest.shape[fast] == 1 and whole.shape[fast] > 1
    else:
        by_rows = rest.shape[-1:] != whole.shape[-1:]
    if by_rows:
        return "rows"
    return "columns" if whole.elements >= 64 * rest.elements else "middle"


def _element_wise(op: RecordedOp, name: str, elements: float) -> Work:
    writes_only = name in _COPIES and op.name.split(".")[1].endswith("_")
    inputs = op.inputs[1:] if writes_only else op.inputs
    operands = [t for t in (*inputs, *op.outputs) if t.elements > 1 or t.shape == op.outputs[0].shape]
    if not operands:
        return Work("pointwise.dense", 4.0, elements)
    moved = sum(t.bytes for t in operands)
    kind = "copy" if name in _COPIES else "pointwise"
    return Work(f"{kind}.{_layout(operands, kind)}", moved, elements)


def _layout(operands: list[TensorInfo], kind: str) -> str:
    """How an element-wise kernel goes through its operands; the last is what it writes."""
    out = operands[-1]
    full = [t for t in operands if t.shape == out.shape]
    fast = _fastest(out)
    if any(fast is not None and t.strides[fast] not in (0, 1) for t in full):
        return "transposed"
    if (
        len(full) < len(operands)
        or any(t.strides != out.strides and not _same_order(t, out) for t in full)
        or not out.is_dense
    ):
        return "strided"
    if any(not t.is_dense for t in full):
        return "strided"
    elements = {t.element for t in operands}
    if len({t.dtype for t in operands if t.dtype != "bool"}) <= 1:
        return "dense"
    if kind == "copy" and len(elements) > 1:
        return "widen" if operands[0].element < out.element else "narrow"
    return "mixed"


def _fastest(tensor: TensorInfo) -> int | None:
    """The dimension whose elements are next to each other in memory."""
    for index, (size, stride) in enumerate(zip(tensor.shape, tensor.strides, strict=True)):
        if size > 1 and stride == 1:
            return index
    return None


def _same_order(a: TensorInfo, b: TensorInfo) -> bool:
    return all(x == y for size, x, y in zip(a.shape, a.strides, b.strides, strict=True) if size > 1)


def _contiguous(tensor: TensorInfo) -> TensorInfo:
    return tensor._replace(strides=tuple(prod(tensor.shape[index + 1 :]) for index in range(len(tensor.shape))))


def _is_contiguous(tensor: TensorInfo) -> bool:
    return _same_order(tensor, _contiguous(tensor))


def _as_wide(narrow: TensorInfo, wide: TensorInfo) -> tuple[TensorInfo, ...]:
    """A tensor that is broadcast to the shape of another."""
    return (wide,) if narrow.shape == wide.shape else (narrow, wide)


def _alignment(operator: Operator) -> int:
    """The largest power of two, up to 8, that divides the rows in memory of all operands of a matmul."""
    if not operator.kind.startswith("gemm"):
        return 8
    m, n, k = operator.shape
    rows = {"gemm_tn": (k, n), "gemm_nn": (k, n), "gemm_nt": (m, n)}[operator.kind]
    return gcd(8, *rows)


# ---------------------------------------------------------------------- inside a step
class AtenPrices:
    """What recorded operators cost inside a step of one GPU: `AtenPrices(prices).of(op)`."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.model = prices, prices.model
        self.table = read_table("aten_costs.json")
        self.home = home = gpu_named(self.table["gpu"])
        gpu = self.model.gpu
        self.moved = gpu.hbm_gb_s / home.hbm_gb_s
        self.addressed = gpu.sms * gpu.clock_ghz / (home.sms * home.clock_ghz)
        self.source = "fitted" if gpu.name == home.name else "transferred"
        self._known: dict[RecordedOp, Price] = {}

    def of(self, op: RecordedOp) -> Price:
        """The price of one call; equal calls are priced once."""
        op = op._replace(phase="", module="")
        if op not in self._known:
            operator = matrix_operator(op)
            self._known[op] = self._moved(op) if operator is None else self._matrix(op, operator)
        return self._known[op]

    def _matrix(self, op: RecordedOp, operator: Operator) -> Price:
        us = self._matmul_us(operator) * self._factor(op, operator)
        if base_name(op) == "baddbmm":  # what is added is copied into the output first
            us += self._moved(op._replace(name="aten.copy.default", inputs=_as_wide(op.inputs[0], op.outputs[0]))).us
        return Price(us, _source(self.model, operator), operator, operator.bytes)

    def _matmul_us(self, operator: Operator) -> float:
        """Matmuls whose rows begin at odd addresses run on kernels without wide loads."""
        alignment = _alignment(operator)
        rates = self.table["misaligned_tflops"].get(str(alignment), {})
        if operator.kind not in rates:
            return self.prices.operator_us(operator)
        even = operator._replace(shape=tuple(-(-size // 8) * 8 for size in operator.shape))
        slow = (
            operator.flops
            / (rates[operator.kind] * self.model.gpu.peak(operator.dtype) / self.home.peak(operator.dtype))
            / 1e6
        )
        return max(self.prices.operator_us(even), float(slow))

    def _factor(self, op: RecordedOp, operator: Operator) -> float:
        """Of kernels that the cost model has no samples of: masked attention, matmuls in other precisions."""
        factors = self.table["factors"]
        if operator.kind.startswith("sdpa"):
            backend = "efficient" if operator.dtype == "fp32" else "cudnn"
            how = "masked" if "masked" in op.options else "causal" if "causal" in op.options else "full"
            return float(factors.get(f"{operator.kind}.{backend}.{how}", 1.0))
        return float(factors.get(f"{operator.kind}.{operator.dtype}", 1.0))

    def _moved(self, op: RecordedOp) -> Price:
        work = work_of(op)
        us = isolated_us(work, self.table["families"], self.moved, self.addressed)
        factors = self.prices.factors
        warm = warmth(Operator("stream", (max(1, int(work.bytes)),)), self.model.gpu.l2_mb)
        sampled = work.family in self.table["families"]
        if work.family.startswith(_NEED_CONTIGUOUS):
            copies = [
                op._replace(name="aten.clone.default", inputs=(t,), outputs=(_contiguous(t),))
                for t in op.inputs
                if not _is_contiguous(t)
            ]
            us += sum(isolated_us(work_of(copy), self.table["families"], self.moved, self.addressed) for copy in copies)
        return Price(
            us * factors.stream * warm + factors.launch_gap_us, self.source if sampled else "roofline", None, work.bytes
        )


def isolated_us(work: Work, families: dict[str, dict[str, float]], moved: float = 1.0, addressed: float = 1.0) -> float:
    """Microseconds of a kernel alone; rates are per microsecond."""
    rates = families.get(work.family) or families["pointwise.strided"]
    by_bytes = work.bytes / (rates["bytes"] * moved)
    by_elements = work.elements / (rates["elements"] * addressed)
    return rates["fixed_us"] + max(by_bytes, by_elements, work.serial * rates.get("serial_us", 0.0))


def _source(model: CostModel, operator: Operator) -> str:
    if not model.sampled_on(operator):
        return "roofline"
    return "transferred" if model.transferred else "fitted"
