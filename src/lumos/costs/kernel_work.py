"""What recorded operators do: which cost family an aten operator belongs to, and how much work it is.

Every operator is one or several `Work`s: bytes that it moves, elements that it addresses, or the matmul that it amounts
to. Which family an element-wise kernel belongs to follows from its operands, as in PyTorch's TensorIterator: kernels
over dense operands of one dtype are vectorised and bound by memory; those with a broadcast, strided or converted
operand compute an address for every element and are bound by that. Kernels whose time follows no such law have
features, which fitted trees correct the law by (`lumos.costs.model_costs`).
"""

from __future__ import annotations

from math import gcd, log2, prod, sqrt
from typing import NamedTuple

from lumos.dtypes import BYTES
from lumos.program.op import UNSEEN, Op, Tensor
from lumos.program.operators import Operator

_NOTHING = ("empty", "new_empty", "_local_scalar_dense", "lift_fresh", "set_", "resize_", "_record_function", "detach_")
_FILLS = {"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full",
          "fill", "zero", "arange", "scalar_tensor"}  # fmt: skip
_COPIES = {"_to_copy", "clone", "copy", "contiguous", "repeat", "constant_pad_nd"}
REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "min", "all", "any", "linalg_vector_norm", "argmax", "argmin",
               "var", "var_mean", "std", "prod"}  # fmt: skip
_OWN = {
    "_softmax": "softmax", "_softmax_backward_data": "softmax_backward", "_log_softmax": "log_softmax",
    "_log_softmax_backward_data": "log_softmax_backward", "native_layer_norm": "layer_norm",
    "native_layer_norm_backward": "layer_norm_backward", "_fused_rms_norm": "rms_norm",
    "_fused_rms_norm_backward": "rms_norm_backward", "native_group_norm": "group_norm",
    "native_group_norm_backward": "group_norm_backward",
    "native_dropout": "dropout", "cat": "cat", "stack": "cat", "slice_backward": "slice_backward",
    "select_backward": "slice_backward", "embedding": "index", "embedding_dense_backward": "embedding_backward",
    "index": "index", "index_select": "index", "gather": "index", "sort": "sort", "argsort": "sort", "topk": "topk",
    "histc": "histogram", "bincount": "bincount", "cumsum": "cumsum", "cumprod": "cumsum", "logcumsumexp": "cumsum",
    "scatter": "scatter", "index_copy": "scatter", "scatter_add": "scatter_add", "scatter_reduce": "scatter_add",
    "index_add": "index_add", "nonzero": "nonzero", "masked_fill": "masked_fill",
    "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss", "nll_loss_backward": "nll_loss_backward",
    "nll_loss2d_backward": "nll_loss_backward", "gelu": "gelu", "gelu_backward": "gelu_backward",
    "max_pool2d_with_indices": "max_pool", "max_pool2d_with_indices_backward": "max_pool_backward",
    "avg_pool2d": "avg_pool", "avg_pool2d_backward": "avg_pool_backward",
    "_adaptive_avg_pool2d": "adaptive_pool", "_adaptive_avg_pool2d_backward": "adaptive_pool_backward",
    "upsample_nearest2d": "nearest", "upsample_nearest2d_backward": "nearest_backward",
    "upsample_bilinear2d": "bilinear", "upsample_bilinear2d_backward": "bilinear_backward",
    "_upsample_bilinear2d_aa": "bilinear", "upsample_bicubic2d": "bilinear",
    "_upsample_bilinear2d_aa_backward": "bilinear_backward", "upsample_bicubic2d_backward": "bilinear_backward",
    "randn_like": "random", "rand_like": "random", "normal": "random", "uniform": "random", "bernoulli": "random",
    "rand": "random", "randn": "random", "flip": "flip", "roll": "flip", "tril": "flip", "triu": "flip",
}  # fmt: skip
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm", "_batch_norm",
                "batch_norm_backward")  # fmt: skip
_UNSAMPLED = (
    "grid_sampler", "_fft", "linalg_", "_linalg", "cholesky", "_ctc", "im2col", "col2im", "_embedding_bag", "_cdist",
    "_pdist", "max_pool3d", "avg_pool3d", "upsample", "_cudnn_rnn", "_thnn", "multinomial", "unique", "_unique",
    "triangular", "searchsorted", "bucketize", "kthvalue", "median", "mode", "masked_select", "masked_scatter",
    "reflection_pad", "replication_pad", "unfold_backward", "_weight_norm", "renorm",
)  # fmt: skip
_KERNEL = 3  # of pooling, unless a recording says otherwise
_ON_ALL = {"sort", "topk", "histogram", "bincount", "cumsum", "nonzero", "scatter_add", "index_add", "scatter"}


class Work(NamedTuple):
    """What a kernel does that takes time: bytes it moves, elements it addresses, updates of one place after another."""

    family: str
    bytes: float
    elements: float
    serial: float = 0.0
    features: tuple[float, ...] = ()  # that trees of the family know
    operator: Operator | None = None  # of the cost model: what it is, or what it amounts to
    flops: float = 0.0  # of a convolution


def base_name(op: Op) -> str:
    """The operator without namespace, overload and the mark of working in place: `aten.add_.Tensor` is add."""
    name = op.name.split(".")[1] if op.name.startswith("aten.") else op.name
    return name[:-1] if name.endswith("_") and not name.startswith("_f") else name


def runs_kernel(op: Op) -> bool:
    """Whether the GPU has anything to do: views and empty tensors are made by the host alone."""
    name = op.name.removeprefix("aten.")
    if "cpu" in op.options:
        return False
    if op.name.startswith(("attention.", "fsdp.", "fused.")):
        return True
    if not op.name.startswith("aten."):
        return op.allocates or UNSEEN in op.options  # an operator of the user's own
    if name.startswith(_NOTHING):
        return False
    return op.allocates or name.split(".")[0].endswith("_")


def works_of(op: Op) -> list[Work]:
    """Everything that one call does, kernel by kernel where they differ in kind."""
    name = base_name(op)
    operator = matrix_operator(op)
    if operator is not None:
        found = [_matrix_work(op, operator)]
        if name == "baddbmm":  # what is added is copied into the output first
            found.append(_element_wise(op._replace(inputs=_as_wide(op.inputs[0], op.outputs[0])), "copy", 0.0))
        return found
    if name.startswith(("convolution", "cudnn_convolution", "_convolution")):
        return _convolution(op, name)
    if name == "select_backward" and op.inputs[0].shape == op.outputs[0].shape[1:]:  # zeros, and a part of them copied
        part = _contiguous(op.inputs[0])
        zeros = op._replace(name="aten.zeros.default", inputs=())
        return [work_of(zeros), work_of(op._replace(name="aten.clone.default", inputs=op.inputs[:1], outputs=(part,)))]
    work = work_of(op)
    copies = [op._replace(name="aten.clone.default", inputs=(t,), outputs=(_contiguous(t),)) for t in op.inputs
              if work.family.startswith(_NEED_CONTIGUOUS) and not _is_contiguous(t)]  # fmt: skip
    if name == "masked_fill" and not op.name.startswith("aten.masked_fill_"):  # fills a copy
        copies.append(op._replace(name="aten.clone.default", inputs=op.inputs[:1]))
    return [work, *map(work_of, copies)]


def moved_bytes(op: Op) -> float:
    """What the kernels of a call read and write."""
    return sum(work.bytes for work in works_of(op))


def flops_of(op: Op) -> float:
    """Of a matmul, attention or a convolution."""
    operator = matrix_operator(op)
    if operator is not None:
        return operator.flops if operator.is_matrix else 0.0
    return sum(work.flops for work in works_of(op))


_WIDE_ROW = 256  # elements next to each other, from which on a row is copied as fast as a whole tensor
_NEED_CONTIGUOUS = ("layer_norm", "softmax", "log_softmax")  # kernels that copy what is not


# ---------------------------------------------------------------------- matmuls and attention
def matrix_operator(op: Op) -> Operator | None:
    """The kind of the cost model that an operator is, with its shape; None for what is not a matmul, attention or
    AdamW, or has nothing to multiply.
    """
    operator = _sized_operator(op)
    return operator if operator is not None and all(operator.shape) else None


def _sized_operator(op: Op) -> Operator | None:
    name = base_name(op)
    if name in ("mm", "addmm", "linear"):
        a, b = op.inputs[-2:] if name != "linear" else op.inputs[:2]
        return _matmul(a, b, name == "linear", _precision(op, a))
    if name in ("bmm", "baddbmm"):
        a, b = op.inputs[-2:]
        return Operator("bmm", (a.shape[0], a.shape[1], b.shape[2], a.shape[2]), _precision(op, a))
    if name in ("_scaled_mm", "_scaled_mm_v2"):
        return _scaled_matmul(op)
    if name in ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"):
        return _grouped(op)
    if name in ("_fused_adamw_", "_fused_adam_"):
        held = sum(t.elements for t in op.inputs if t.shape)  # weights, gradients and two moments
        return Operator("adamw_fused", (max(1, held // 4),), _dtype(op.inputs[0]))
    if name.startswith("attention."):
        return _attention(op)
    return None


def _dtype(tensor: Tensor) -> str:
    if tensor.dtype.startswith("float8"):
        return "fp8"
    return tensor.dtype if tensor.dtype in BYTES else "fp32"


def _precision(op: Op, tensor: Tensor) -> str:
    """The precision that tensor cores work in: fp32 operands may be rounded to tf32."""
    dtype = _dtype(tensor)
    return "tf32" if dtype == "fp32" and "tf32" in op.options else dtype


def _matmul(a: Tensor, b: Tensor, is_linear: bool, dtype: str) -> Operator:
    k = a.shape[-1]
    m, n = a.elements // max(k, 1), b.shape[0] if is_linear else b.shape[-1]
    if is_linear or (_is_transposed(b) and not _is_transposed(a)):
        kind = "gemm_tn"
    else:
        kind = "gemm_nt" if _is_transposed(a) else "gemm_nn"
    return Operator(kind, (m, n, k), dtype)


def _scaled_matmul(op: Op) -> Operator:
    """In 8 or 4 bits: cuBLAS has one layout for them. Two numbers of 4 bits are one element of a tensor."""
    a, b, *scales = op.inputs
    packed = 2 if a.dtype.startswith("float4") else 1
    dtype = "nvfp4" if packed == 2 else "mxfp8" if any("e8m0" in t.dtype for t in scales) else _dtype(a)
    return Operator("gemm_tn", (a.shape[0], b.shape[-1], packed * a.shape[-1]), dtype)


def _is_transposed(tensor: Tensor) -> bool:
    return len(tensor.strides) >= 2 and tensor.strides[-1] != 1


def _grouped(op: Op) -> Operator:
    a, b = op.inputs[:2]
    if len(b.shape) == 2:  # the gradient of the weights
        return Operator("grouped_gemm_nt", (op.outputs[0].shape[0], a.shape[1], a.shape[0], b.shape[1]), _dtype(a))
    experts, inward, outward = b.shape  # tokens times the weights of their expert
    if _is_transposed(b):
        return Operator("grouped_gemm", (experts, a.shape[0], outward, inward), _dtype(a))
    return Operator("grouped_gemm_nn", (experts, a.shape[0], inward, outward), _dtype(a))


def _attention(op: Op) -> Operator:
    """Priced as causal attention over a square; what is not has twice the work, or that of its rectangle."""
    q, k, v = op.inputs[:3]
    work = q.shape[2] * k.shape[2] * (1.0 if "causal" in op.options else 2.0)
    width = round((q.shape[3] + v.shape[3]) / 2)
    kind = "sdpa_fwd" if op.name.endswith("forward") else "sdpa_bwd"
    return Operator(kind, (q.shape[0], q.shape[1], max(1, round(sqrt(work))), width), _dtype(q))


def _matrix_work(op: Op, operator: Operator) -> Work:
    """A kind of the cost model, or a family of its own where the cost model has no samples of it."""
    if operator.kind.startswith("sdpa"):
        is_sampled = "causal" in op.options and op.inputs[0].element == 2 and "dropout" not in op.options
        return Work(operator.kind, operator.bytes, 0.0, operator=operator) if is_sampled else _attention_work(op)
    if operator.kind == "adamw_fused":
        tensors = [t for t in op.inputs if t.shape]
        moved = sum(t.bytes for t in tensors) * 7 / 4  # three of the four lists are written, too
        return Work(f"adamw_fused.{'fp32' if tensors[0].element == 4 else 'half'}", moved, operator.shape[0],
                    0.0, _list_features(tensors, moved))  # fmt: skip
    if operator.kind == "bmm":
        a, b = op.inputs[-2:]
        count, m, n, k = operator.shape
        layout = (float(_is_transposed(a)), float(_is_transposed(b)), float(a.element), float(operator.dtype == "tf32"))
        tiles = (_log(-(-m // 128) * -(-n // 128) * count), _log(-(-m // 64) * -(-n // 64) * count))
        features = (*map(_log, operator.shape), *layout, *tiles, gcd(8, n, k), gcd(8, m), _log(operator.flops),
                    _log(operator.bytes))  # fmt: skip
        return Work("bmm", operator.bytes, 0.0, 0.0, features, operator)
    if operator.kind.startswith("grouped_gemm"):
        return Work("grouped_gemm", operator.bytes, 0.0, 0.0, (), operator)
    if operator.dtype in ("fp32", "tf32"):
        m, n, k = operator.shape
        squares = [_log(-(-m // size) * -(-n // size)) for size in (64, 128, 256)]
        which = ("gemm_tn", "gemm_nn", "gemm_nt").index(operator.kind)
        features = (*map(_log, (m, n, k)), *squares, float(which), gcd(8, n), gcd(8, k), gcd(8, m), gcd(128, m),
                    gcd(128, n), _log(operator.flops), _log(operator.bytes))  # fmt: skip
        return Work(f"gemm.{operator.dtype}", operator.bytes, 0.0, 0.0, features, operator)
    return Work(operator.kind, operator.bytes, 0.0, 0.0, (), operator)


def _attention_work(op: Op) -> Work:
    """Attention that is not causal, has a mask or dropout, or is in fp32: whole tiles of 128 queries by 128 keys."""
    q, k, v = op.inputs[:3]
    forward = op.name.endswith("forward")
    tiles = q.shape[0] * q.shape[1] * -(-q.shape[2] // 128) * -(-k.shape[2] // 128)
    share = 0.5 + 0.5 / -(-q.shape[2] // 128) if "causal" in op.options else 1.0
    flops = 2.0 * tiles * share * 128 * 128 * (q.shape[3] + v.shape[3]) * (1.0 if forward else 2.5)
    moved = (q.bytes + k.bytes + v.bytes + q.bytes) * (1.0 if forward else 2.25)
    how = [float(option in op.options) for option in ("causal", "masked", "dropout")]
    features = (*how, float(q.shape[3]), _log(q.shape[2]), _log(k.shape[2]), _log(tiles), _log(flops), _log(moved),
                float(gcd(8, k.shape[2])), _log(q.shape[0] * q.shape[1]))  # fmt: skip
    name = f"attention{'' if forward else '_backward'}.{'fp32' if q.element == 4 else 'half'}"
    return Work(name, moved, flops, 0.0, features)


def _log(value: float) -> float:
    return log2(max(value, 1.0))


# ---------------------------------------------------------------------- convolutions
def _convolution(op: Op, name: str) -> list[Work]:
    """An implicit matmul: forward, gradient of the input and of the weight, each a kernel of its own; then the bias."""
    backward = name.endswith("backward")
    y, x, w = op.inputs[:3] if backward else (op.outputs[0], *op.inputs[:2])
    mask = next((option[5:] for option in op.options if option.startswith("mask=")), "")
    shapes = {t.shape for t in op.outputs}
    mask = mask or "".join(str(int(shape in shapes)) for shape in (x.shape, w.shape, (y.shape[1],)))
    kinds = [kind for kind, wanted in zip(("dgrad", "wgrad"), mask, strict=False) if wanted == "1"]
    is_transposed = "transposed" in op.options or (not backward and w.shape[0] == x.shape[1] != y.shape[1])
    if is_transposed:  # the forward pass of one is the gradient of the input of the other
        kinds = [{"dgrad": "forward"}.get(kind, kind) for kind in kinds] if backward else ["dgrad"]
    elif not backward:
        kinds = ["forward"]
    large, small = (y, x) if is_transposed else (x, y)
    works = [_implicit_matmul(kind, large, small, w, is_transposed) for kind in kinds]
    ones = (1,) * (len(y.shape) - 2)
    bias = Tensor((1, y.shape[1], *ones), y.dtype, (y.shape[1], 1, *ones), y.element)
    if not backward and len(op.inputs) > 2 and len(op.inputs[2].shape) == 1:
        works.append(work_of(op._replace(name="aten.add_.Tensor", inputs=(y, bias), outputs=(y,))))
    if backward and mask[2:3] == "1":
        works.append(work_of(op._replace(name="aten.sum.dim_IntList", inputs=(y,), outputs=(bias,))))
    return works


def _implicit_matmul(kind: str, large: Tensor, small: Tensor, w: Tensor, is_transposed: bool) -> Work:
    """One pass of a convolution from `large` (N, C, H, W) to `small`; of a transposed one the other way."""
    cin, cout, places = large.shape[1], small.shape[1], prod(w.shape[2:])
    groups = max(1, cin // w.shape[1])
    into, out = max(1, cin // groups), max(1, cout // groups)
    rows, wide_rows = (t.shape[0] * prod(t.shape[2:]) for t in (small, large))
    depth = {"forward": (rows, out, into * places), "dgrad": (wide_rows, into, round(out * places * rows / wide_rows)),
             "wgrad": (out, into * places, rows)}[kind]  # fmt: skip
    dtype = _dtype(large) if large.element == 2 else "tf32"
    matmul = Operator("gemm_nt" if kind == "wgrad" else "gemm_tn", tuple(max(8, -(-n // 8) * 8) for n in depth), dtype)
    flops, moved = 2.0 * rows * cout * into * places, large.bytes + small.bytes + w.bytes
    last = len(large.shape) > 3 and any(t.strides[1] == 1 < t.shape[1] for t in (large, small))
    stride = max(1, round(large.shape[2] / max(1, small.shape[2])))
    features = (
        {"forward": 0.0, "dgrad": 1.0, "wgrad": 2.0}[kind], float(large.element), float(large.dtype == "bf16"),
        float(last), float(len(large.shape)), float(is_transposed), _log(rows), _log(large.shape[0]), _log(into),
        _log(out), _log(places), _log(groups), float(into == out == 1), float(stride), float(stride == w.shape[2] > 1),
        float(gcd(8, cin)), float(gcd(8, cout)), float(gcd(8, into)), float(gcd(8, out)), _log(flops), _log(moved),
        _log(flops) - _log(moved), _log(wide_rows), _log(small.shape[-1]), float(w.shape[2]), float(w.shape[-1]),
        _log(large.elements), _log(small.elements), _log(w.elements), _log(rows / 128) + _log(out / 128) + _log(groups),
        _log(cin * places / 128) + _log(cout / 128), float(groups > 1), float(places == 1),
    )  # fmt: skip
    return Work("convolution", moved, 0.0, 0.0, features, None if groups > 1 else matmul, flops)


# ---------------------------------------------------------------------- everything else
def work_of(op: Op) -> Work:
    """The family of an operator that moves data, and how much of it."""
    name = base_name(op)
    inputs, outputs = op.inputs, op.outputs
    read, written = sum(t.bytes for t in inputs), sum(t.bytes for t in outputs)
    elements = float(max((t.elements for t in outputs), default=0))
    if op.name.startswith("fsdp."):
        return _sharding_copy(op)
    if op.name.startswith("fused."):
        return _fused(op, read + written)
    if name in _FILLS:
        return Work("fill", written, elements)
    if name == "index_put":
        return _index_put(op)
    if name.startswith(("_foreach", "_fused_sgd", "_amp_foreach", "_fused_adagrad")):
        return _list_work(op, name)
    if name in REDUCTIONS and inputs and inputs[0].elements > elements:
        return Work(f"reduce.{_reduced(inputs[0], outputs[0])}", read + written, float(inputs[0].elements),
                    0.0, _reduction_features(inputs[0], outputs[0]))  # fmt: skip
    if name.startswith(_BATCH_NORMS):
        return _batch_norm(op, name)
    if "h2d" in op.options or "d2h" in op.options:  # between host and device
        return Work("transfer.pinned" if "pinned" in op.options else "transfer", max(written, 1.0), elements)
    if name in _OWN:
        return _own(op, name, read, written, elements)
    is_known = op.name.startswith("aten.") and not name.startswith(_UNSAMPLED)
    if not is_known or (name not in _COPIES and any(t.elements > elements for t in inputs)):
        return Work("unsampled", read + written, elements)
    return _element_wise(op, name, elements)


def _fused(op: Op, moved: float) -> Work:
    """A kernel of torch.compile, whose name says what is in it: sines and exponentials take longer than their bytes."""
    label = " ".join(op.options)
    inside = ".softmax" if op.name == "fused.reduction" and "softmax" in label else ""
    inside = ".sine" if op.name == "fused.pointwise" and ("_sin_" in label or "_cos_" in label) else inside
    return Work(op.name + inside, moved, float(max((t.elements for t in (*op.inputs, *op.outputs)), default=0)))


def _sharding_copy(op: Op) -> Work:
    """FSDP's copies between parameters and the buffers of its collectives; the last of the operands is a buffer."""
    *parts, last = op.inputs
    moved = 2.0 * sum(t.bytes for t in parts) if "all_gather_copy_in" in op.name else sum(t.bytes for t in op.inputs)
    return Work("copy.dense", moved, moved / last.element / 2)


def _features(op: Op, moved: float) -> tuple[float, ...]:
    """Sizes and layout of the largest operand, as trees know them."""
    inputs, outputs = op.inputs or op.outputs, op.outputs or op.inputs
    x, out = (max(some, key=lambda t: t.elements) for some in (inputs, outputs))
    dims = [*x.shape, 1, 1, 1][:2]
    options = dict(option.split("=", 1) for option in op.options if "=" in option)
    dim = int(options.get("dim", -1))
    along = x.shape[dim] if x.shape and -len(x.shape) <= dim < len(x.shape) else 1
    return (
        _log(moved), _log(x.elements), _log(out.elements), float(x.element), float(x.dtype == "bf16"),
        _log((x.shape or (1,))[-1]), _log(dims[0]), _log(dims[1]), _log(prod(x.shape[2:])),
        float(len(x.strides) > 1 and x.strides[1] == 1 < x.shape[1]), float(len(op.inputs)), _log(along),
        float(dim in (-1, len(x.shape) - 1)), float(options.get("k", 0)), _log(moved) - _log(x.elements),
        float(min((t.element for t in op.inputs if t.dtype.startswith(("bf", "fp"))), default=0)),
        float((x.shape or (1,))[-1] % 8), _log(x.elements / max(out.elements, 1)),
        _log(outputs[1].elements) if len(outputs) > 1 else 0.0, float(options.get("kernel", _KERNEL)),
    )  # fmt: skip


def _reduction_features(whole: Tensor, rest: Tensor) -> tuple[float, ...]:
    return (_log(whole.elements), _log(rest.elements), _log(whole.elements / max(1, rest.elements)),
            float(whole.element), _log((whole.shape or (1,))[-1]), float(_is_contiguous(whole)))  # fmt: skip


def _list_work(op: Op, name: str) -> Work:
    """Kernels over lists of tensors: a launch takes 320 chunks of 65,536 elements, and some dozens of tensors."""
    tensors = [t for t in op.inputs if t.shape] or list(op.inputs)
    lists = _lists(op, name)
    one = sum(t.bytes for t in tensors) / lists
    if name.startswith("_foreach_norm"):
        family, moved = "foreach_norm", one
    elif name.startswith("_fused_sgd"):
        family, moved = "fused_sgd", one * (2 * lists - 1)
    elif name.startswith(("_foreach_zero", "_foreach_copy")):
        family, moved = "foreach", one * lists
    else:
        family, moved = "foreach", one * (lists + 1)
    scalars = {t.dtype for t in op.inputs if not t.shape} - {tensors[0].dtype}  # another dtype: one kernel a tensor
    features = (*_list_features(tensors, moved, lists), float(bool(scalars)))
    return Work(family, moved, float(sum(t.elements for t in tensors)), 0.0, features)


def _lists(op: Op, name: str) -> int:
    """How many lists of tensors an operator takes."""
    if name.startswith(("_foreach_addc", "_fused_sgd")):
        return 3
    if name.startswith("_foreach_lerp"):
        return 3 if op.name.endswith(".List") else 2
    return 2 if op.name.endswith(".List") or name.startswith("_foreach_copy") else 1


def _list_features(tensors: list[Tensor], moved: float, lists: int = 4) -> tuple[float, ...]:
    sizes = [t.elements for t in tensors]
    chunks = sum(-(-size // 65536) for size in sizes) / lists
    return (_log(moved), _log(sum(sizes)), _log(len(sizes) / lists), _log(chunks), _log(chunks / 320),
            _log(max(sizes)), float(tensors[0].element), _log(moved / chunks), float(lists))  # fmt: skip


def _batch_norm(op: Op, name: str) -> Work:
    """cuDNN takes fp32, and fp16 with parameters in fp32; PyTorch's own kernels take the rest.

    Those give every channel to one block of threads, unless channels are last: few channels are slow.
    """
    backward = "backward" in name
    images = [t for t in op.inputs if len(t.shape) > 1] or list(op.inputs)
    x = max(images, key=lambda t: t.elements)
    weight = next((t for t in op.inputs if len(t.shape) == 1), x)
    cudnn = weight.dtype == "fp32" and x.dtype in ("fp32", "fp16")
    moved = x.bytes * (5.0 if backward else 3.0)
    family = f"batch_norm{'_backward' if backward else ''}.{'cudnn' if cudnn else 'native'}"
    last = float(len(x.shape) > 2 and x.strides[1] == 1 < x.shape[1])
    sizes = (_log(x.shape[0]), _log(x.shape[1]), _log(prod(x.shape[2:])))
    features = (_log(x.elements), *sizes, last, float(x.element), float(weight.element), sizes[0] + sizes[2])
    serial = 0.0 if cudnn or last else x.elements / max(1, x.shape[1])
    return Work(family, moved, float(x.elements), serial, features)


def _own(op: Op, name: str, read: float, written: float, elements: float) -> Work:
    """Families of their own; what a kernel reads of a table is as much as it writes."""
    family, moved = _OWN[name], read + written
    if family == "index" and any(t.dtype == "bool" for t in op.inputs):
        family = "masked_index"
    elif family == "index":
        moved = 2 * written
    elif family in ("embedding_backward", "scatter"):
        moved, elements = op.inputs[0].bytes + written, float(op.inputs[0].elements)
    elif family == "nll_loss":
        moved, elements = 64.0 * op.inputs[0].shape[0], float(op.inputs[0].shape[0])
    elif family == "nll_loss_backward":
        moved = written
    elif family == "masked_fill":
        moved = 2 * op.inputs[0].bytes + op.inputs[1].bytes
        family += ".dense" if op.inputs[1].shape == op.inputs[0].shape else ".broadcast"
    elif family == "cat":
        inner = op.inputs[-1].shape[-1:] != op.outputs[0].shape[-1:] and op.inputs[-1].shape[-1:] < (_WIDE_ROW,)
        family = "cat.inner" if inner else "cat.outer"
    if family in _ON_ALL:
        elements = float(max(t.elements for t in op.inputs))
    if family.startswith("softmax"):  # rows of up to 1,024 elements stay in registers
        family += ".long" if op.outputs[0].shape[-1:] > (1024,) else ".short"
    if family.startswith(("layer_norm", "rms_norm")):
        family += ".fp32" if op.inputs[0].element == 4 else ".half"
    return Work(family, moved, elements, 0.0, _features(op, moved))


def _index_put(op: Op) -> Work:
    """Adding rows to a table: rows that go to the same place follow one another."""
    table, values = op.inputs[0], op.inputs[-1]
    copied = 0.0 if op.name.startswith("aten.index_put_") else 2 * table.bytes
    if "accumulate" not in op.options:
        moved = 2 * values.bytes + copied
        return Work("scatter", moved, float(values.elements), 0.0, _features(op, moved))
    width = prod(table.shape[1:]) or 1
    rows = values.elements / width
    return Work("index_put", 3 * values.bytes + copied, float(values.elements), rows / max(table.shape[0], 1))


def _reduced(whole: Tensor, rest: Tensor) -> str:
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


def _element_wise(op: Op, name: str, elements: float) -> Work:
    writes_only = name in _COPIES and op.name.split(".")[1].endswith("_")
    inputs = op.inputs[1:] if writes_only else op.inputs
    operands = [t for t in (*inputs, *op.outputs) if t.elements > 1 or t.shape == op.outputs[0].shape]
    if not operands:
        return Work("pointwise.dense", 4.0, elements)
    moved = sum(t.bytes for t in operands)
    kind = "copy" if name in _COPIES else "pointwise"
    return Work(f"{kind}.{_layout(operands, kind)}", moved, elements)


def _layout(operands: list[Tensor], kind: str) -> str:
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


def _fastest(tensor: Tensor) -> int | None:
    """The dimension whose elements are next to each other in memory."""
    for index, (size, stride) in enumerate(zip(tensor.shape, tensor.strides, strict=True)):
        if size > 1 and stride == 1:
            return index
    return None


def _same_order(a: Tensor, b: Tensor) -> bool:
    return all(x == y for size, x, y in zip(a.shape, a.strides, b.strides, strict=True) if size > 1)


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor._replace(strides=tuple(prod(tensor.shape[index + 1 :]) for index in range(len(tensor.shape))))


def _is_contiguous(tensor: Tensor) -> bool:
    return _same_order(tensor, _contiguous(tensor))


def _as_wide(narrow: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
    """A tensor that is broadcast to the shape of another."""
    return (wide,) if narrow.shape == wide.shape else (narrow, wide)


def in_tiles(operator: Operator) -> Operator:
    """With the dimension that is no row in memory rounded up to 8: kernels work in tiles, and a token more fits in."""
    if not operator.kind.startswith("gemm"):
        return operator
    m, n, k = operator.shape
    shape = (m, n, -(-k // 8) * 8) if operator.kind == "gemm_nt" else (-(-m // 8) * 8, n, k)
    return operator._replace(shape=shape)


def alignment(operator: Operator) -> int:
    """The largest power of two, up to 8, that divides the rows in memory of all operands of a matmul."""
    if not operator.kind.startswith("gemm"):
        return 8
    m, n, k = operator.shape
    rows = {"gemm_tn": (k, n), "gemm_nn": (k, n), "gemm_nt": (m, n)}[operator.kind]
    return gcd(8, *rows)
