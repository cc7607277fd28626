"""Times aten operators that no other sample covers: element-wise by layout, reductions, indexing, convolutions.

    python3 calibration/aten_h200.py OUT.jsonl SECONDS [SEED]

Needs torch and a GPU, nothing else. One JSON line a row: the family, the shapes (with strides where they matter),
dtypes
and the median time in microseconds, from a cold L2 cache, the timer's own time taken off. Sizes are drawn at random
on a
logarithmic scale, so that another seed gives other shapes to hold apart.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as functional

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Row = tuple[str, dict[str, Any], Callable[[], Any]]
_FLUSH: list[torch.Tensor] = []


def timed(call: Callable[[], Any], repeats: int = 7) -> float:
    """Median microseconds of a call from a cold cache, with whatever the events cost."""
    if not _FLUSH:
        _FLUSH.append(torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE))
    call()
    times = []
    for _ in range(repeats):
        _FLUSH[0].zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def draw(low: float, high: float, of: int = 8) -> int:
    """A whole number, log-uniform, a multiple of `of`."""
    return max(of, round(low * (high / low) ** random.random() / of) * of)


def tokens_and_width() -> tuple[int, int]:
    return draw(256, 32768), random.choice(
        [512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 11008, 14336]
    )


def heads() -> tuple[int, int, int, int]:
    """(batch, sequence, heads, head size)."""
    return (
        random.choice([1, 1, 2, 4, 8]),
        draw(256, 8192, 64),
        random.choice([8, 12, 16, 24, 32]),
        random.choice([64, 80, 96, 128, 256]),
    )


def name_of(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]


# ---------------------------------------------------------------------- families
def elementwise() -> Iterator[Row]:
    unary: dict[str, Callable[[torch.Tensor], Any]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "neg": torch.neg,
        "pow": lambda x: x.pow(2),
        "rsqrt": torch.rsqrt,
        "tanh": torch.tanh,
        "relu": torch.relu,
        "sigmoid": torch.sigmoid,
        "exp": torch.exp,
        "mul_scalar": lambda x: x * 0.5,
    }
    binary: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
        "mul": torch.mul,
        "add": torch.add,
        "div": torch.div,
    }
    while True:
        t, h = tokens_and_width()
        dtype = random.choice([BF16, BF16, FP32, FP16])
        which = random.choice(list(unary))
        x = rand(t, h, dtype=dtype)
        yield (
            f"{which}",
            {"shape": [t, h], "dtype": name_of(dtype), "layout": "contiguous"},
            lambda unary=unary, which=which, x=x: unary[which](x),
        )
        which2 = random.choice(list(binary))
        y, v, r, wide = rand(t, h, dtype=dtype), rand(h, dtype=dtype), rand(t, 1, dtype=dtype), rand(t, h, dtype=FP32)
        facts = {"shape": [t, h], "dtype": name_of(dtype)}
        yield (
            which2,
            facts | {"layout": "contiguous"},
            lambda binary=binary, which2=which2, x=x, y=y: binary[which2](x, y),
        )
        yield (
            which2,
            facts | {"layout": "row vector"},
            lambda binary=binary, v=v, which2=which2, x=x: binary[which2](x, v),
        )
        yield (
            which2,
            facts | {"layout": "column vector"},
            lambda binary=binary, r=r, which2=which2, x=x: binary[which2](x, r),
        )
        yield (
            which2,
            facts | {"layout": "mixed with fp32"},
            lambda binary=binary, which2=which2, wide=wide, x=x: binary[which2](x, wide),
        )
        yield which2 + "_", facts | {"layout": "contiguous"}, lambda x=x, y=y: x.add_(y)
        half = x[:, : h // 2]
        yield "mul", facts | {"layout": "half rows", "shape": [t, h // 2]}, lambda half=half: half * 0.5
        mask = torch.rand(t, h, device=DEVICE) > 0.5
        yield "where", facts | {"layout": "contiguous"}, lambda mask=mask, x=x, y=y: torch.where(mask, x, y)
        yield "silu_backward", facts | {"layout": "contiguous"}, lambda x=x, y=y: torch.ops.aten.silu_backward(y, x)
        yield "gelu_backward", facts | {"layout": "contiguous"}, lambda x=x, y=y: torch.ops.aten.gelu_backward(y, x)
        yield (
            "native_dropout",
            facts | {"layout": "contiguous"},
            lambda x=x: torch.ops.aten.native_dropout(x, 0.1, True),
        )
        yield (
            "threshold_backward",
            facts | {"layout": "contiguous"},
            lambda x=x, y=y: torch.ops.aten.threshold_backward(y, x, 0),
        )
        yield "tanh_backward", facts | {"layout": "contiguous"}, lambda x=x, y=y: torch.ops.aten.tanh_backward(y, x)


def by_heads() -> Iterator[Row]:
    while True:
        b, s, a, d = heads()
        dtype = random.choice([BF16, BF16, BF16, FP32, FP16])
        base = rand(b, s, a, d, dtype=dtype)
        moved, cos = base.transpose(1, 2), rand(b, 1, s, d, dtype=dtype)
        facts = {"shape": [b, a, s, d], "dtype": name_of(dtype)}
        yield "mul", facts | {"layout": "heads moved, broadcast"}, lambda cos=cos, moved=moved: moved * cos
        whole = moved.contiguous()
        yield "mul", facts | {"layout": "heads, broadcast"}, lambda cos=cos, whole=whole: whole * cos
        yield "add", facts | {"layout": "heads moved"}, lambda moved=moved: moved + moved
        yield "clone", facts | {"layout": "heads moved"}, lambda moved=moved: moved.contiguous()
        low, high = moved[..., : d // 2], moved[..., d // 2 :]
        yield "neg", facts | {"layout": "half heads moved", "shape": [b, a, s, d // 2]}, lambda high=high: -high
        yield (
            "cat",
            facts | {"layout": "halves of heads moved"},
            lambda high=high, low=low: torch.cat((high, low), dim=-1),
        )
        yield (
            "cat",
            facts | {"layout": "halves of heads"},
            lambda d=d, whole=whole: torch.cat((whole[..., d // 2 :], whole[..., : d // 2]), dim=-1),
        )
        half = rand(b, a, s, d // 2, dtype=dtype)
        yield (
            "slice_backward",
            facts,
            lambda a=a, b=b, d=d, half=half, s=s: torch.ops.aten.slice_backward(half, [b, a, s, d], 3, 0, d // 2, 1),
        )
        groups = random.choice([2, 4, 8])
        if a % groups == 0:
            few = moved[:, : a // groups]
            yield (
                "clone",
                facts | {"layout": "repeated keys"},
                lambda a=a, b=b, d=d, few=few, groups=groups, s=s: (
                    few[:, :, None].expand(b, a // groups, groups, s, d).reshape(b, a, s, d)
                ),
            )
        yield "sum", facts | {"layout": "over broadcast heads"}, lambda whole=whole: whole.sum(1, keepdim=True)


def copies() -> Iterator[Row]:
    while True:
        t, h = tokens_and_width()
        x, w = rand(t, h), rand(t, h, dtype=FP32)
        facts = {"shape": [t, h]}
        yield "_to_copy", facts | {"dtype": "bf16", "to": "fp32", "layout": "contiguous"}, lambda x=x: x.float()
        yield "_to_copy", facts | {"dtype": "fp32", "to": "bf16", "layout": "contiguous"}, lambda w=w: w.bfloat16()
        yield "clone", facts | {"dtype": "bf16", "layout": "contiguous"}, lambda x=x: x.clone()
        yield "clone", facts | {"dtype": "bf16", "layout": "transposed"}, lambda x=x: x.t().contiguous()
        yield "clone", facts | {"dtype": "fp32", "layout": "transposed"}, lambda w=w: w.t().contiguous()
        yield "zeros", facts | {"dtype": "bf16"}, lambda x=x: torch.zeros_like(x)
        parts = x.split(h // 2, dim=1)
        yield "cat", facts | {"dtype": "bf16", "layout": "columns"}, lambda parts=parts: torch.cat(parts, dim=1)
        yield (
            "cat",
            facts | {"dtype": "bf16", "layout": "rows"},
            lambda t=t, x=x: torch.cat([x[: t // 2], x[t // 2 :]], dim=0),
        )


def reductions() -> Iterator[Row]:
    while True:
        t, h = tokens_and_width()
        dtype = random.choice([BF16, FP32])
        x = rand(t, h, dtype=dtype)
        facts = {"shape": [t, h], "dtype": name_of(dtype)}
        yield "sum", facts | {"layout": "rows"}, lambda x=x: x.sum(1, keepdim=True)
        yield "sum", facts | {"layout": "columns"}, lambda x=x: x.sum(0)
        yield "sum", facts | {"layout": "all"}, lambda x=x: x.sum()
        yield "mean", facts | {"layout": "rows"}, lambda x=x: x.mean(1, keepdim=True)
        yield "amax", facts | {"layout": "rows"}, lambda x=x: x.amax(1)
        yield "cumsum", facts | {"layout": "rows"}, lambda x=x: x.cumsum(1)
        yield "linalg_vector_norm", facts | {"layout": "all"}, lambda x=x: torch.linalg.vector_norm(x)
        y = torch.softmax(x, dim=-1)
        yield "_softmax", facts, lambda x=x: torch.softmax(x, dim=-1)
        yield (
            "_softmax_backward_data",
            facts,
            lambda dtype=dtype, x=x, y=y: torch.ops.aten._softmax_backward_data(x, y, -1, dtype),
        )
        weight = rand(h, dtype=dtype)
        yield (
            "native_layer_norm",
            facts,
            lambda h=h, weight=weight, x=x: torch.ops.aten.native_layer_norm(x, [h], weight, weight, 1e-5),
        )
        out, mean, rstd = torch.ops.aten.native_layer_norm(x, [h], weight, weight, 1e-5)
        yield (
            "native_layer_norm_backward",
            facts,
            lambda h=h, mean=mean, out=out, rstd=rstd, weight=weight, x=x: torch.ops.aten.native_layer_norm_backward(
                x, out, [h], mean, rstd, weight, weight, [True, True, True]
            ),
        )
        yield (
            "_fused_rms_norm",
            facts,
            lambda h=h, weight=weight, x=x: torch.ops.aten._fused_rms_norm(x, [h], weight, 1e-6),
        )
        v = random.choice([32000, 50304, 65024, 128256, 151936])
        n = draw(256, 4096)
        logits = rand(n, v, dtype=dtype)
        logp, target = torch.log_softmax(logits, -1), torch.randint(v, (n,), device=DEVICE)
        wide = {"shape": [n, v], "dtype": name_of(dtype)}
        yield "_log_softmax", wide, lambda logits=logits: torch.log_softmax(logits, -1)
        yield (
            "_log_softmax_backward_data",
            wide,
            lambda dtype=dtype, logits=logits, logp=logp: torch.ops.aten._log_softmax_backward_data(
                logits, logp, -1, dtype
            ),
        )
        yield "nll_loss_forward", wide, lambda logp=logp, target=target: functional.nll_loss(logp, target)


def attention_scores() -> Iterator[Row]:
    while True:
        b, a, s, d = (
            random.choice([1, 2, 4, 8]),
            random.choice([8, 12, 16, 32]),
            draw(128, 4096, 64),
            random.choice([64, 80, 128]),
        )
        dtype = random.choice([BF16, FP32, FP16])
        if b * a * s * s > 1 << 30:
            continue
        q, scores = rand(b * a, s, d, dtype=dtype), rand(b, a, s, s, dtype=dtype)
        facts = {"dtype": name_of(dtype)}
        yield "bmm", facts | {"shape": [b * a, s, s, d], "layout": "nt"}, lambda q=q: torch.bmm(q, q.transpose(1, 2))
        flat = scores.view(b * a, s, s)
        yield "bmm", facts | {"shape": [b * a, s, d, s], "layout": "nn"}, lambda flat=flat, q=q: torch.bmm(flat, q)
        yield (
            "bmm",
            facts | {"shape": [b * a, s, d, s], "layout": "tn"},
            lambda flat=flat, q=q: torch.bmm(flat.transpose(1, 2), q),
        )
        yield "_softmax", facts | {"shape": [b, a, s, s]}, lambda scores=scores: torch.softmax(scores, -1)
        mask = torch.zeros(1, 1, s, s, device=DEVICE, dtype=dtype)
        yield (
            "add",
            facts | {"shape": [b, a, s, s], "layout": "mask, broadcast"},
            lambda mask=mask, scores=scores: scores + mask,
        )
        yield (
            "_to_copy",
            facts | {"shape": [b, a, s, s], "to": "fp32"},
            lambda dtype=dtype, scores=scores: scores.to(FP32 if dtype != FP32 else BF16),
        )


def fused_attention() -> Iterator[Row]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    while True:
        b, s, a, d = heads()
        dtype = random.choice([BF16, BF16, FP16, FP32])
        name = random.choice(list(backends)) if dtype != FP32 else "efficient"
        causal, masked = random.choice([(True, False), (False, False), (False, True)])
        if b * a * s * s > 1 << 33 or (masked and (name == "flash" or s * s > 1 << 26)):
            continue
        q, k, v = (rand(b, a, s, d, dtype=dtype).requires_grad_() for _ in range(3))
        mask = torch.zeros(1, 1, s, s, device=DEVICE, dtype=dtype) if masked else None
        facts = {"shape": [b, a, s, d], "dtype": name_of(dtype), "backend": name, "causal": causal, "masked": masked}

        def forward(
            backends: Any = backends,
            causal: Any = causal,
            k: Any = k,
            mask: Any = mask,
            name: Any = name,
            q: Any = q,
            v: Any = v,
        ) -> torch.Tensor:
            with sdpa_kernel([backends[name]]):
                return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)

        yield "sdpa_fwd", facts, forward
        try:
            out = forward()
        except RuntimeError:
            continue
        grad = torch.randn_like(out)
        yield (
            "sdpa_bwd",
            facts,
            lambda grad=grad, k=k, out=out, q=q, v=v: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
        )


def indexing() -> Iterator[Row]:
    while True:
        t, h = draw(512, 32768), random.choice([512, 1024, 2048, 4096])
        e, k = random.choice([8, 16, 64, 128]), random.choice([2, 4, 8])
        x, index = rand(t, h), torch.randint(t, (t * k,), device=DEVICE)
        facts = {"shape": [t, h], "rows": t * k, "dtype": "bf16"}
        yield "index", facts, lambda index=index, x=x: x[index]
        copies = rand(t * k, h)
        yield (
            "index_add_",
            facts,
            lambda copies=copies, index=index, x=x: torch.zeros_like(x).index_add_(0, index, copies),
        )
        yield (
            "scatter_add",
            facts,
            lambda copies=copies, h=h, index=index, x=x: torch.zeros_like(x).scatter_add_(
                0, index[:, None].expand(-1, h), copies
            ),
        )
        yield (
            "index_put",
            facts | {"accumulate": True},
            lambda copies=copies, index=index, x=x: torch.zeros_like(x).index_put_((index,), copies, accumulate=True),
        )
        logits = rand(t, e, dtype=FP32)
        yield (
            "topk",
            {"shape": [t, e], "k": k, "dtype": "fp32"},
            lambda k=k, logits=logits: torch.topk(logits, k, dim=-1),
        )
        flat = torch.randint(e, (t * k,), device=DEVICE)
        yield "sort", {"shape": [t * k], "dtype": "int64"}, lambda flat=flat: torch.sort(flat)
        yield (
            "histc",
            {"shape": [t * k], "dtype": "fp32"},
            lambda e=e, flat=flat: torch.histc(flat.float(), bins=e, min=0, max=e - 1),
        )
        table = rand(random.choice([32000, 128256]), h)
        ids = torch.randint(table.shape[0], (t,), device=DEVICE)
        yield (
            "embedding",
            {"shape": [t, table.shape[0], h], "dtype": "bf16"},
            lambda ids=ids, table=table: functional.embedding(ids, table),
        )
        yield (
            "embedding_dense_backward",
            {"shape": [t, table.shape[0], h], "dtype": "bf16"},
            lambda ids=ids, table=table, x=x: torch.ops.aten.embedding_dense_backward(
                x, ids, table.shape[0], -1, False
            ),
        )


def grouped() -> Iterator[Row]:
    while True:
        e, t, n, k = (
            random.choice([8, 16, 32, 64, 128]),
            draw(1024, 65536, 64),
            random.choice([768, 1024, 1408, 2048, 4096, 14336]),
            random.choice([1024, 2048, 4096]),
        )
        uneven = random.choice([0.0, 0.3, 1.0])
        load = torch.rand(e) * uneven + 1
        ends = ((load / load.sum()).cumsum(0) * t).round().int().to(DEVICE)
        a, w = rand(t, k), rand(e, k, n)
        facts = {"shape": [e, t, n, k], "dtype": "bf16", "uneven": uneven}
        yield "_grouped_mm", facts, lambda a=a, ends=ends, w=w: torch._grouped_mm(a, w, offs=ends)
        g = rand(t, n)
        yield (
            "_grouped_mm",
            facts | {"layout": "weight gradient"},
            lambda a=a, ends=ends, g=g: torch._grouped_mm(a.t(), g, offs=ends),
        )


def matmuls() -> Iterator[Row]:
    while True:
        m, n, k = draw(256, 16384), draw(256, 16384), draw(256, 16384)
        if m * n * k > 1 << 39:
            continue
        kind, dtype = random.choice([("fp16", FP16), ("fp32", FP32), ("tf32", FP32)])
        a, w = rand(m, k, dtype=dtype), rand(n, k, dtype=dtype)
        torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
        yield "mm", {"shape": [m, n, k], "dtype": kind, "layout": "tn"}, lambda a=a, w=w: a @ w.t()
        bias = rand(n, dtype=dtype)
        yield (
            "addmm",
            {"shape": [m, n, k], "dtype": kind, "layout": "tn"},
            lambda a=a, bias=bias, w=w: torch.addmm(bias, a, w.t()),
        )


def convolutions() -> Iterator[Row]:
    while True:
        batch, channels, out = (
            random.choice([16, 32, 64, 128, 256]),
            random.choice([3, 64, 128, 256, 512, 1024]),
            random.choice([64, 128, 256, 512, 1024, 2048]),
        )
        size, kernel = random.choice([7, 14, 28, 56, 112, 224]), random.choice([1, 1, 3, 3, 7])
        if batch * max(channels, out) * size * size > 1 << 29:
            continue
        dtype, last = random.choice([BF16, FP16, FP32]), random.random() < 0.6
        torch.backends.cudnn.allow_tf32 = True
        layout = torch.channels_last if last else torch.contiguous_format
        x = rand(batch, channels, size, size, dtype=dtype).to(memory_format=layout)
        w = rand(out, channels, kernel, kernel, dtype=dtype).to(memory_format=layout)
        facts = {
            "shape": [batch, channels, size, out, kernel],
            "dtype": name_of(dtype),
            "layout": "channels last" if last else "channels first",
        }
        yield "convolution", facts, lambda kernel=kernel, w=w, x=x: functional.conv2d(x, w, padding=kernel // 2)
        y = functional.conv2d(x, w, padding=kernel // 2)
        pad, one = [kernel // 2] * 2, [1, 1]
        yield (
            "convolution_backward",
            facts,
            lambda one=one, pad=pad, w=w, x=x, y=y: torch.ops.aten.convolution_backward(
                y, x, w, None, one, pad, one, False, [0, 0], 1, [True, True, False]
            ),
        )
        weight = torch.ones(channels, device=DEVICE)
        yield (
            "native_batch_norm",
            facts,
            lambda weight=weight, x=x: functional.batch_norm(x, None, None, weight, weight, training=True),
        )


def optimizers() -> Iterator[Row]:
    while True:
        count, size = random.choice([20, 60, 150, 400]), draw(1e4, 2e7)
        if count * size > 1 << 31:
            continue
        dtype = random.choice([BF16, FP32])
        lists = [[rand(size, dtype=dtype) for _ in range(count)] for _ in range(4)]
        facts = {"tensors": count, "elements": count * size, "dtype": name_of(dtype)}
        for kind, call in {
            "_foreach_mul_": lambda lists=lists: torch._foreach_mul_(lists[0], 0.999),
            "_foreach_lerp_": lambda lists=lists: torch._foreach_lerp_(lists[1], lists[0], 0.1),
            "_foreach_addcmul_": lambda lists=lists: torch._foreach_addcmul_(lists[2], lists[0], lists[0], 0.001),
            "_foreach_sqrt": lambda lists=lists: torch._foreach_sqrt(lists[3]),
            "_foreach_addcdiv_": lambda lists=lists: torch._foreach_addcdiv_(lists[0], lists[1], lists[2], -1e-9),
            "_foreach_norm": lambda lists=lists: torch._foreach_norm(lists[1]),
            "_foreach_add_": lambda lists=lists: torch._foreach_add_(lists[0], lists[1], alpha=1e-9),
        }.items():
            yield kind, facts, call


FAMILIES: dict[str, tuple[Callable[[], Iterator[Row]], int]] = {
    "elementwise": (elementwise, 900),
    "by_heads": (by_heads, 600),
    "copies": (copies, 300),
    "reductions": (reductions, 500),
    "attention_scores": (attention_scores, 240),
    "fused_attention": (fused_attention, 300),
    "indexing": (indexing, 270),
    "grouped": (grouped, 160),
    "matmuls": (matmuls, 240),
    "convolutions": (convolutions, 240),
    "optimizers": (optimizers, 210),
}


def main(output: str, seconds: str, seed: str = "0") -> None:
    random.seed(int(seed))
    torch.manual_seed(0)
    stop, empty = time.monotonic() + float(seconds), timed(lambda: None)
    nothing = timed(lambda: torch.empty(1, device=DEVICE).zero_())
    with open(output, "w") as file:
        about = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "seed": int(seed),
            "empty_us": empty,
            "tiny_kernel_us": nothing,
        }
        file.write(json.dumps({"about": about}) + "\n")
        for family, (rows, most) in FAMILIES.items():
            done, failed, began = 0, 0, time.monotonic()
            share = (stop - began) / (len(FAMILIES) - list(FAMILIES).index(family))
            for kind, facts, call in rows():
                if done + failed >= most or time.monotonic() - began > share:
                    break
                try:
                    us = timed(call) - empty
                except (RuntimeError, TypeError, torch.OutOfMemoryError) as error:
                    failed += 1
                    if failed < 4:
                        print(f"  {family} {kind} {facts}: {str(error)[:150]}", flush=True)
                    continue
                file.write(json.dumps({"op": kind, **facts, "us": round(us, 3)}) + "\n")
                done += 1
            print(f"{family}: {done} rows, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
