"""Measures what a communication kernel costs the kernels beside it, and what they cost it, on one GPU.

    PYTHONPATH=calibration python3 calibration/contention_h200.py copies OUT_FOLDER [SECONDS]
    PYTHONPATH=calibration python3 calibration/contention_h200.py nccl OUT_FOLDER [SECONDS]
    PYTHONPATH=calibration python3 calibration/contention_h200.py steps OUT_FOLDER

`copies`: a kernel of n blocks of 512 threads, as NCCL's channels are, copies HBM until it is told to stop, at full
speed or with pauses; beside it runs a stream of equal kernels. `nccl`: two processes share the GPU under MPS and reduce
a large tensor over loopback sockets with 1 to 16 channels each, while one of them runs the same streams of kernels.
`steps`: whole training steps beside the copy.

One JSON line for each kernel beside one copy: its time alone and beside, the copy's rate alone and beside (GB/s, read
and written). Kernels of the seed DEVELOPMENT are for fitting; those of the seed BLIND go to a file of their own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # loading a kernel waits for all that runs, the copy included

import torch
import torch.nn.functional as F  # noqa: N812

DEVELOPMENT, BLIND = 16, 17  # seeds
BLOCKS = {DEVELOPMENT: (1, 2, 4, 8, 12, 16, 24, 32, 48), BLIND: (3, 6, 10, 14, 20, 28, 40)}
PAUSED = ((8, 4000), (16, 4000), (16, 16000), (32, 8000), (32, 32000))  # blocks, and clock cycles between two chunks
THREADS = 512
WINDOW_MS = 6.0
COPY = """
extern "C" __global__ void __launch_bounds__(640) copy_until(
    const float4* from, float4* to, unsigned long long* done, volatile int* stop, int length, int pause) {
  unsigned long long moved = 0;
  long long begun = clock64();
  int at = blockIdx.x * 4096;
  __shared__ int over;
  while (true) {
    float4 kept[8];
    for (int i = 0; i < 8; i++) kept[i] = from[at + i * 512 + threadIdx.x];
    for (int i = 0; i < 8; i++) to[at + i * 512 + threadIdx.x] = kept[i];
    at += gridDim.x * 4096;
    if (at + 4096 > length) at = blockIdx.x * 4096;
    moved += 131072;
    if (threadIdx.x == 0) { done[blockIdx.x] = moved; over = *stop || clock64() - begun > 1000000000LL; }
    __syncthreads();
    if (over) return;
    __syncthreads();
    if (pause) { long long since = clock64(); while (clock64() - since < pause) {} }
  }
}
"""
WIDTHS = (1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 10240, 11008, 12288, 14336, 16384, 18432, 28672)
Run = Callable[[int], Any]


class Beside:
    """The copy kernel, while it runs beside others."""

    def __init__(self) -> None:
        self.kernel = torch.cuda._compile_kernel(COPY, "copy_until")
        self.length = 1 << 26  # of float4: 1 GiB
        self.source = torch.zeros(self.length * 4, device="cuda")
        self.target = torch.zeros(self.length * 4, device="cuda")
        self.stop = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.done = torch.zeros(256, dtype=torch.int64, device="cuda")
        self.stream, self.signal = torch.cuda.Stream(), torch.cuda.Stream()
        # A kernel that is used for the first time is loaded, which waits for all that runs: use them before.
        float((self.done.clone() - self.done.clone()).sum())
        self.stop.fill_(1)

    def start(self, blocks: int, pause: int) -> None:
        self.stop.zero_()
        self.done.zero_()
        torch.cuda.synchronize()
        arguments = [self.source, self.target, self.done, self.stop, self.length, pause]
        self.kernel((blocks, 1, 1), (THREADS, 1, 1), arguments, stream=self.stream)
        time.sleep(0.0005)

    def end(self) -> None:
        with torch.cuda.stream(self.signal):
            self.stop.fill_(1)
        torch.cuda.synchronize()


def timed(run: Run, count: int, beside: Beside | None = None) -> tuple[float, float]:
    """Microseconds of one kernel of a stream of `count`, and GB/s that the copy beside it moved meanwhile."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run(0)
    before = beside.done.clone() if beside else None
    begin.record()
    for turn in range(count):
        run(turn)
    end.record()
    after = beside.done.clone() if beside else None
    end.synchronize()
    us = begin.elapsed_time(end) * 1e3
    moved = float((after - before).sum()) if after is not None and before is not None else 0.0
    return us / count, moved / us / 1e3


def copies_of(size: float) -> int:
    """How many sets of operands make sure that the cache holds none of them."""
    return int(max(1, min(16, 3e8 // max(size, 1.0))))


def matmul(layout: str, m: int, n: int, k: int, dtype: str = "bf16") -> Run:
    kind = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[dtype]
    element = 2 if dtype == "bf16" else 1
    sets = []
    for _ in range(copies_of(element * (m * k + n * k) + 2 * m * n)):
        a = (
            torch.randn(k, m, device="cuda").to(kind).t()
            if layout == "NT"
            else torch.randn(m, k, device="cuda").to(kind)
        )
        b = (
            torch.randn(n, k, device="cuda").to(kind).t()
            if layout == "TN"
            else torch.randn(k, n, device="cuda").to(kind)
        )
        sets.append((a, b, torch.empty(m, n, device="cuda", dtype=torch.bfloat16)))
    if dtype == "fp8":
        one = torch.ones((), device="cuda")
        return lambda i: torch._scaled_mm(
            sets[i % len(sets)][0], sets[i % len(sets)][1], one, one, out_dtype=torch.bfloat16
        )
    return lambda i: torch.mm(sets[i % len(sets)][0], sets[i % len(sets)][1], out=sets[i % len(sets)][2])


def attention(batch: int, heads: int, kv: int, seq: int, dim: int, backward: bool) -> Run:
    def tensor(count: int) -> torch.Tensor:
        return torch.randn(batch, count, seq, dim, device="cuda", dtype=torch.bfloat16, requires_grad=backward)

    q, k, v = tensor(heads), tensor(kv), tensor(kv)
    if not backward:
        return lambda i: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv < heads)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv < heads)
    up = torch.randn_like(out)
    return lambda i: torch.autograd.grad(out, (q, k, v), up, retain_graph=True)


def stream_kernel(what: str, rows: int, width: int) -> Run:
    sets = [
        tuple(torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        for _ in range(copies_of(6 * rows * width))
    ]
    weight = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    state = [torch.zeros(rows * width, device="cuda") for _ in range(4)] if what == "adamw" else []
    step = torch.ones((), device="cuda")

    def adamw(i: int) -> None:
        torch._fused_adamw_(
            [state[0]], [state[1]], [state[2]], [state[3]], [], [step],
            lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    runs: dict[str, Run] = {
        "add": lambda i: torch.add(*sets[i % len(sets)][:2], out=sets[i % len(sets)][2]),
        "silu": lambda i: F.silu(sets[i % len(sets)][0]),
        "gelu": lambda i: F.gelu(sets[i % len(sets)][0]),
        "cast": lambda i: sets[i % len(sets)][0].float(),
        "rms_norm": lambda i: F.rms_norm(sets[i % len(sets)][0], (width,), weight),
        "layer_norm": lambda i: F.layer_norm(sets[i % len(sets)][0], (width,), weight, weight),
        "softmax": lambda i: torch.softmax(sets[i % len(sets)][0], -1),
        "transpose": lambda i: sets[i % len(sets)][0].t().contiguous(),
        "adamw": adamw,
    }
    return runs[what]


def kernels(seed: int) -> Iterator[tuple[dict[str, Any], Callable[[], Run]]]:
    """What is measured: a description and how to make it."""
    draw = random.Random(seed)
    count = {DEVELOPMENT: 240, BLIND: 60}[seed]
    known = (
        [("TN", 4096, 4096, 4096), ("TN", 4096, 14336, 4096), ("TN", 8192, 8192, 8192)] if seed == DEVELOPMENT else []
    )
    for index in range(count):
        if index < len(known):
            layout, m, n, k = known[index]
        else:
            layout = draw.choice(("TN", "TN", "NN", "NT"))
            m = draw.choice((1024, 2048, 4096, 8192, 16384, 64 * draw.randint(8, 256)))
            n, k = (draw.choice((*WIDTHS, 128 * draw.randint(4, 128))) for _ in range(2))
            if layout == "NT":
                m, k = k, m
        if 2.0 * m * n * k > 6e12:
            continue
        yield (
            {"op": "gemm", "layout": layout, "m": m, "n": n, "k": k, "dtype": "bf16"},
            lambda a=(layout, m, n, k): matmul(*a),
        )
    for _ in range(count // 10):
        m, n, k = 2048 * draw.randint(1, 8), draw.choice(WIDTHS), draw.choice(WIDTHS)
        yield (
            {"op": "gemm", "layout": "TN", "m": m, "n": n, "k": k, "dtype": "fp8"},
            lambda a=("TN", m, n, k): matmul(*a, dtype="fp8"),
        )
    for _ in range(count // 12):
        heads, seq = draw.choice((8, 16, 32, 40, 64)), draw.choice((1024, 2048, 4096, 8192))
        shape = {
            "batch": draw.randint(1, 4),
            "heads": heads,
            "kv": heads // draw.choice((1, 1, 4, 8)),
            "seq": seq,
            "dim": draw.choice((64, 128, 128)),
        }
        for backward in (False, True):
            what = dict(op="sdpa", backward=backward, **shape)
            yield what, lambda a=(shape, backward): attention(**a[0], backward=a[1])
    for what in ("add", "silu", "gelu", "cast", "rms_norm", "layer_norm", "softmax", "transpose", "adamw"):
        for _ in range(3 if seed == DEVELOPMENT else 1):
            rows, width = draw.choice((1024, 2048, 4096, 8192, 16384)), draw.choice(WIDTHS[2:14])
            yield {"op": what, "rows": rows, "width": width}, lambda a=(what, rows, width): stream_kernel(*a)


def launched(run: Run) -> list[dict[str, Any]]:
    """The kernels that one call launches, with their grids."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        run(0)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    rows = []
    for event in events:
        if event.get("cat") == "kernel":
            args = event["args"]
            rows.append({
                "name": event["name"][:120], "grid": args.get("grid"), "block": args.get("block"), "us": event["dur"],
                "registers": args.get("registers per thread"), "shared": args.get("shared memory"),
            })  # fmt: skip
    return rows


def measure_copies(folder: Path, limit_s: float) -> None:
    beside, begun = Beside(), time.monotonic()
    alone_rate = {}
    for blocks, pause in [(b, 0) for s in BLOCKS.values() for b in s] + list(PAUSED):
        beside.start(blocks, pause)
        before = beside.done.clone()
        since = time.perf_counter()
        torch.cuda.current_stream().synchronize()
        time.sleep(0.005)
        after = beside.done.clone()
        torch.cuda.current_stream().synchronize()
        alone_rate[blocks, pause] = float((after - before).sum()) / (time.perf_counter() - since) / 1e9
        beside.end()
    print("copy alone, GB/s:", {f"{b}/{p}": round(v) for (b, p), v in alone_rate.items()}, flush=True)
    for seed, name in ((DEVELOPMENT, "contention_h200.jsonl"), (BLIND, "contention_blind_h200.jsonl")):
        with (folder / name).open("w") as out:
            share = limit_s * (0.75 if seed == DEVELOPMENT else 1.0)
            for what, make in kernels(seed):
                if time.monotonic() - begun > share:
                    print("out of time at", what)
                    break
                try:
                    row = one_kernel(what, make(), beside, BLOCKS[seed], alone_rate)
                except Exception as problem:  # a kernel that this GPU does not have
                    row = {**what, "error": str(problem)[:200]}
                out.write(json.dumps(row) + "\n")
                out.flush()
                if seed == DEVELOPMENT:
                    print(shown(row), flush=True)


def one_kernel(
    what: dict[str, Any], run: Run, beside: Beside, blocks: tuple[int, ...], alone_rate: dict[tuple[int, int], float]
) -> dict[str, Any]:
    for turn in range(3):
        run(turn)
    rough, _ = timed(run, 5)
    count = int(max(4, min(400, WINDOW_MS * 1e3 / rough)))
    firsts = timed(run, count)[0]
    found = []
    for number, pause in [(b, 0) for b in blocks] + list(PAUSED):
        beside.start(number, pause)
        us, rate = timed(run, count, beside)
        beside.end()
        found.append([number, pause, round(us, 3), round(rate, 1), round(alone_rate[number, pause], 1)])
    alone = (firsts + timed(run, count)[0]) / 2
    return {**what, "us": round(alone, 3), "first_us": round(firsts, 3), "beside": found, "kernels": launched(run)}


def shown(row: dict[str, Any]) -> str:
    head = " ".join(str(v) for k, v in row.items() if k not in ("us", "first_us", "beside", "kernels", "error"))
    if "error" in row:
        return f"{head}: {row['error'][:80]}"
    return f"{head}: {row['us']:.1f} us; " + " ".join(
        f"{n}{'p' if p else ''}:{us / row['us']:.2f}" for n, p, us, *_ in row["beside"]
    )


# ---------------------------------------------------------------------- whole steps
STEPS = {  # layers, hidden, ffn, heads, vocab, seq, micro-batch of a decoder
    "l4_h4096_s4096_b1": (4, 4096, 14336, 32, 32000, 4096, 1),
    "l6_h2048_s2048_b8": (6, 2048, 5632, 16, 32000, 2048, 8),
    "l2_h8192_s4096_b1": (2, 8192, 28672, 64, 32000, 4096, 1),
    "l5_h3072_s2048_b4": (5, 3072, 8192, 24, 32000, 2048, 4),
}
STEP_BLOCKS = (0, 4, 16, 24, 0)


def _train(model: Any, optimizer: Any, tokens: torch.Tensor, loss: Callable[..., torch.Tensor]) -> None:
    loss(model(tokens), tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure_steps(folder: Path) -> None:
    """Training steps beside the copy kernel, which runs through all of a step."""
    from models import Shape, build_model, token_loss

    beside, rows = Beside(), []
    for name, sizes in STEPS.items():
        shape = Shape(*sizes)
        model = build_model("plain", shape, "cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        tokens = torch.randint(0, shape.vocab, (shape.mbs, shape.seq), device="cuda")

        step = partial(_train, model, optimizer, tokens, token_loss)
        for _ in range(6):
            step()
        torch.cuda.synchronize()
        for blocks in STEP_BLOCKS:
            times, rates = [], []
            for _ in range(8):
                if blocks:
                    beside.start(blocks, 0)
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                before = beside.done.clone()
                begin.record()
                step()
                end.record()
                after = beside.done.clone()
                end.synchronize()
                times.append(begin.elapsed_time(end))
                rates.append(float((after - before).sum()) / times[-1] / 1e6)
                beside.end()
            middle = len(times) // 2
            told = {"name": name, "sizes": sizes, "blocks": blocks}
            rows.append(told | {"ms": sorted(times)[middle], "gb_s": sorted(rates)[middle]})
            print(rows[-1], flush=True)
            (folder / "contention_steps_h200.json").write_text(json.dumps(rows, indent=1))
        del model, optimizer, step


# ---------------------------------------------------------------------- two processes, real NCCL
def nccl_rank(folder: Path, channels: int, limit_s: float) -> None:
    """One of two processes: both reduce, the first one runs kernels beside it."""
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    rank, begun, host = dist.get_rank(), time.monotonic(), dist.new_group(backend="gloo")
    size = 96 << 20
    tensor = torch.zeros(size, device="cuda", dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    since = time.perf_counter()
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    alone_s = time.perf_counter() - since
    grids = launched(lambda _: dist.all_reduce(tensor))
    chosen = list(kernels(DEVELOPMENT))[::9][:34]
    rows = []
    for what, make in chosen:
        go = torch.tensor([int(rank == 0 and time.monotonic() - begun < limit_s)], dtype=torch.int32)
        dist.all_reduce(go, group=host)
        if not int(go):
            break
        if rank == 1:
            dist.barrier(group=host)  # the other one has timed the kernel alone
            dist.all_reduce(tensor)
            torch.cuda.synchronize()
            continue
        try:
            run: Run | None = make()
        except Exception:  # measured without NCCL already: an error says nothing new
            run = None
        alone = 0.0
        if run is not None:
            for turn in range(3):
                run(turn)
            rough, _ = timed(run, 5)
            count = int(max(4, min(400, WINDOW_MS * 1e3 / rough)))
            alone = timed(run, count)[0]
        dist.barrier(group=host)
        since = time.perf_counter()
        work = dist.all_reduce(tensor, async_op=True)
        time.sleep(0.02)
        us = timed(run, count)[0] if run is not None else 0.0
        still = not work.is_completed()
        work.wait()
        torch.cuda.synchronize()
        if run is not None:
            rows.append(
                {
                    **what,
                    "channels": channels,
                    "us": alone,
                    "beside_us": us,
                    "still": still,
                    "nccl_s": time.perf_counter() - since,
                    "nccl_alone_s": alone_s,
                }
            )
    if rank == 0:
        with (folder / "contention_nccl_h200.jsonl").open("a") as out:
            out.write(
                json.dumps({"channels": channels, "bytes": size * 2, "alone_s": alone_s, "kernels": grids}) + "\n"
            )
            out.writelines(json.dumps(row) + "\n" for row in rows)
        for row in rows:
            print(
                channels,
                row["op"],
                row.get("m", row.get("rows", row.get("seq"))),
                row.get("n", ""),
                row.get("k", ""),
                f"{row['us']:.1f} us, beside {row['beside_us'] / row['us']:.2f}",
                row["still"],
                flush=True,
            )
    dist.destroy_process_group()


def measure_nccl(folder: Path, limit_s: float) -> None:
    from multirank import rank_environment

    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
    try:
        for place, channels in enumerate((1, 2, 4, 8, 16)):
            started = []
            for rank in range(2):
                limits = {"NCCL_MIN_NCHANNELS": str(channels), "NCCL_MAX_NCHANNELS": str(channels)}
                environment = {**os.environ, **rank_environment(rank, 2, 29600 + place), **limits}
                command = [sys.executable, __file__, "rank", str(folder), str(channels), str(limit_s / 5 - 10)]
                started.append(subprocess.Popen(command, env=environment))
            for process in started:
                try:
                    process.wait(limit_s / 5 + 10)
                except subprocess.TimeoutExpired:
                    process.kill()
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False)


def main(what: str, folder: str, *rest: str) -> None:
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if what == "rank":
        nccl_rank(place, int(rest[0]), float(rest[1]))
    elif what == "steps":
        measure_steps(place)
    elif what == "nccl":
        measure_nccl(place, float(rest[0]) if rest else 120.0)
    else:
        measure_copies(place, float(rest[0]) if rest else 240.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
