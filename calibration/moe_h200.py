"""Mixtures of experts on one GPU: whole training steps of published shapes, and the operators that experts consist of.

    python3 calibration/moe_h200.py OUT_DIR SECONDS [steps|operators]

Whole steps are Hugging Face models of real widths with few layers: built from random weights in bf16, trained with
fused AdamW, measured without a profiler. Those of DEVELOPMENT are profiled once more, for GPU time by operator; those
of BLIND are written to a file of their own, which nothing is fitted on. Both record how many tokens each expert gets.

Operators are timed alone with a cold cache: grouped matmuls in their three layouts (forward, gradient of the input,
gradient of the weights) with balanced and unbalanced experts, the same as one matmul an expert on four streams, and
what moves tokens between their order and that of the experts.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional

from architectures_h200 import profiled

Row = dict[str, Any]
Call = Callable[[], Any]

_MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
}  # fmt: skip
_QWEN3 = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151936,
}  # fmt: skip
_OLMOE = {
    "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50304,
}  # fmt: skip
_GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088,
}  # fmt: skip
_DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 1, "vocab_size": 129280,
}  # fmt: skip
_SMALL = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16}


def _case(name: str, layers: int, seq: int, batch: int, base: Row, **more: Any) -> Row:
    extra = {key: more.pop(key, default) for key, default in (("experts", "grouped_mm"), ("checkpointing", False))}
    return {"name": name, "seq": seq, "batch": batch, **extra, "config": base | {"num_hidden_layers": layers} | more}


DEVELOPMENT = [
    _case("mixtral_8x7b_l2", 2, 4096, 2, _MIXTRAL),
    _case("qwen3_30b_l4", 4, 4096, 2, _QWEN3),
    _case("olmoe_l6", 6, 4096, 4, _OLMOE),
    _case("gpt_oss_20b_l4", 4, 2048, 2, _GPT_OSS),
    _case("deepseek_v3_l3_e64", 3, 2048, 2, _DEEPSEEK, n_routed_experts=64),
    _case("qwen3_235b_l2", 2, 4096, 1, _QWEN3, hidden_size=4096, moe_intermediate_size=1536, num_attention_heads=64),
    _case("mixtral_small_loop", 8, 2048, 2, _MIXTRAL | _SMALL, experts="eager"),
    _case("olmoe_l8_short", 8, 2048, 1, _OLMOE),
]
BLIND = [
    _case("mixtral_8x7b_l4", 4, 2048, 4, _MIXTRAL),
    _case("mixtral_8x22b_l2", 2, 4096, 1, _MIXTRAL, hidden_size=6144, intermediate_size=16384, num_attention_heads=48),
    _case("qwen3_30b_l6", 6, 2048, 2, _QWEN3),
    _case("olmoe_l16_checkpointed", 16, 4096, 2, _OLMOE, checkpointing=True),
    _case("gpt_oss_120b_l2", 2, 4096, 1, _GPT_OSS, num_local_experts=128),
    _case("qwen3_30b_l3_loop", 3, 4096, 2, _QWEN3, experts="eager"),
    _case("mixtral_small_l12", 12, 2048, 2, _MIXTRAL | _SMALL),
    _case("deepseek_v3_l2_e192", 2, 4096, 1, _DEEPSEEK, n_routed_experts=192),
]


def steps(cases: list[Row], output: Path, stop: float, profile: bool) -> None:
    """Measure the cases that there is time for; one that fails does not end the others."""
    found: list[Row] = []
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__}
    for case in cases:
        if time.monotonic() > stop:
            print("time is up before", case["name"], flush=True)
            break
        began = time.monotonic()
        try:
            row = case | _trained(case, profile)
            shown = (
                f"{1e3 * row['step_s_median']:9.2f} ms {row['peak_mem_alloc'] / 2**30:7.2f} GiB" if profile else "blind"
            )
            print(f"{case['name']:24s} {shown} {row['attention']} {time.monotonic() - began:.0f} s", flush=True)
        except Exception as error:
            row = case | {"error": f"{type(error).__name__}: {error}"[:500]}
            print(case["name"], row["error"], flush=True)
        found.append(row)
        gc.collect()
        torch.cuda.empty_cache()
        output.write_text(json.dumps({"about": about, "results": found}))


def _trained(case: Row, profile: bool) -> Row:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**case["config"])
    config.use_cache = False
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation=case["experts"]
        )
    model.train()
    if case["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, config.vocab_size, (case["batch"], case["seq"]), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    before = _loads(model, ids)
    times = _step_times(step)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    begin = time.perf_counter()
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "attention": model.config._attn_implementation,
        "experts_used": model.config._experts_implementation,
        "step_s_median": statistics.median(times[3:]),
        "step_s": [round(seconds, 6) for seconds in times],
        "back_to_back_s": (time.perf_counter() - begin) / 5,
        "peak_mem_alloc": peak,
        "peak_mem_reserved": reserved,
        "tokens_by_expert": {"before": before, "after": _loads(model, ids)},
        "operators": profiled(step, 200) if profile else [],
    }


def _step_times(step: Call) -> list[float]:
    times = []
    for index in range(13):
        torch.cuda.synchronize()
        if index == 2:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return times


def _loads(model: torch.nn.Module, ids: torch.Tensor) -> list[list[int]]:
    """How many tokens each expert of each layer gets."""
    found: list[list[int]] = []

    def count(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        chosen = next(a for a in (*arguments, *named.values()) if not a.is_floating_point())
        found.append(torch.bincount(chosen.reshape(-1), minlength=module.num_experts).tolist())

    experts = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    hooks = [module.register_forward_pre_hook(count, with_kwargs=True) for module in experts]
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return found


_HIDDEN = (1024, 1536, 2048, 2880, 4096, 5120, 6144, 7168)
_FFN = (512, 704, 768, 1024, 1408, 1536, 2048, 2880, 4096, 6400, 8192, 14336)
_EXPERTS = (2, 4, 8, 16, 32, 60, 64, 96, 128, 256)
_SPREADS = (0.0, 0.0, 1e6, 50.0, 10.0, 3.0)  # balanced; otherwise the concentration that shares are drawn with
_MOST_WEIGHTS, _MOST_VALUES = 3_000_000_000, 2_000_000_000


def operator_rows(seed: int = 0) -> Iterator[Row]:
    """Grouped matmuls without end, among them what moves tokens and, rarely, one matmul an expert."""
    draw = random.Random(seed)
    while True:
        for index in range(12):
            if index == 0:
                yield _drawn_loop(draw)
            elif index % 3 == 1:
                yield _drawn_move(draw)
            else:
                yield _drawn_grouped(draw)


def _drawn_grouped(draw: random.Random) -> Row:
    while True:
        experts, hidden, ffn = draw.choice(_EXPERTS), draw.choice(_HIDDEN), draw.choice(_FFN)
        tokens = max(1, round(experts * 2 ** draw.uniform(3, 13)))
        n, k = (2 * ffn, hidden) if draw.random() < 0.5 else (hidden, ffn)
        if draw.random() < 0.5:  # most batches are round
            tokens = max(256, 256 * round(tokens / 256))
        if experts * n * k <= _MOST_WEIGHTS and tokens * max(n, k) <= _MOST_VALUES and tokens <= 262144:
            return {
                "op": "grouped", "layout": draw.choice(("tn", "nn", "nt")), "e": experts, "t": tokens, "n": n, "k": k,
                "spread": draw.choice(_SPREADS), "seed": draw.randrange(1000), "dtype": "bf16",
            }  # fmt: skip


def _drawn_loop(draw: random.Random) -> Row:
    row = _drawn_grouped(draw)
    while row["e"] > 64 or row["t"] / row["e"] < 64:
        row = _drawn_grouped(draw)
    return row | {"op": "loop", "layout": "tn", "spread": 0.0, "dtype": draw.choice(("bf16", "fp8"))}


def _drawn_move(draw: random.Random) -> Row:
    return {
        "op": draw.choice(tuple(_MOVES)), "t": 1024 * draw.choice((1, 2, 4, 8, 16)), "h": draw.choice(_HIDDEN),
        "top_k": draw.choice((1, 2, 4, 6, 8)), "e": draw.choice(_EXPERTS[2:]), "dtype": "bf16",
    }  # fmt: skip


def counts_of(row: Row) -> list[int]:
    """Tokens of each expert: equal, or drawn with the shares of a Dirichlet distribution."""
    experts, tokens = row["e"], row["t"]
    if not row["spread"]:
        ends = [(index + 1) * tokens // experts for index in range(experts)]
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    draw = random.Random(row["seed"])
    shares = [draw.gammavariate(row["spread"], 1.0) for _ in range(experts)]
    counts = [0] * experts
    for chosen in draw.choices(range(experts), shares, k=tokens):
        counts[chosen] += 1
    return counts


def _grouped(row: Row, device: str) -> Call:
    """x (t, k) by weights (e, n, k): forward, gradient of x, gradient of the weights."""
    experts, tokens, n, k = row["e"], row["t"], row["n"], row["k"]
    offsets = torch.tensor(counts_of(row), device=device).cumsum(0).to(torch.int32)
    if row["layout"] == "nt":
        gradient, x = _random(tokens, n, device=device), _random(tokens, k, device=device)
        return lambda: torch._grouped_mm(gradient.t(), x, offs=offsets)
    weight = _random(experts, n, k, device=device)
    if row["layout"] == "nn":
        gradient = _random(tokens, n, device=device)
        return lambda: torch._grouped_mm(gradient, weight, offs=offsets)
    x = _random(tokens, k, device=device)
    return lambda: torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets)


def _loop(row: Row, device: str) -> Call:
    """One matmul an expert, on four streams by turns, as Transformer Engine runs its grouped linear layers."""
    weights = [_random(row["n"], row["k"], device=device) for _ in range(row["e"])]
    inputs = [_random(count, row["k"], device=device) for count in counts_of(row)]
    streams = [torch.cuda.Stream() for _ in range(4)]
    one = torch.ones((), device=device)
    if row["dtype"] == "fp8":
        weights = [weight.to(torch.float8_e4m3fn) for weight in weights]
        inputs = [torch.cat((x, x[: -len(x) % 16])).to(torch.float8_e4m3fn) for x in inputs]

    def call() -> None:
        main = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(main)
        for index, (x, weight) in enumerate(zip(inputs, weights, strict=True)):
            with torch.cuda.stream(streams[index % 4]):
                if row["dtype"] == "fp8":
                    torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
                else:
                    torch.mm(x, weight.t())
        for stream in streams:
            main.wait_stream(stream)

    return call


def _random(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _choice(row: Row, device: str) -> torch.Tensor:
    """The experts of every token, in the order of the tokens."""
    return torch.rand(row["t"], row["e"], device=device).topk(min(row["top_k"], row["e"]), dim=-1)[1]


def _gather(row: Row, device: str) -> Call:
    x, rows = _random(row["t"], row["h"], device=device), _choice(row, device).reshape(-1).sort()[1] // row["top_k"]
    return lambda: x[rows]


def _gather_gradient(row: Row, device: str) -> Call:
    """What autograd runs for x[rows]: rows of one token are added up."""
    rows = _choice(row, device).reshape(-1).sort()[1] // row["top_k"]
    gradient = _random(len(rows), row["h"], device=device)
    return lambda: torch.zeros(row["t"], row["h"], device=device, dtype=gradient.dtype).index_put_(
        (rows,), gradient, accumulate=True
    )


def _unsort(row: Row, device: str) -> Call:
    order = _choice(row, device).reshape(-1).sort()[1]
    x = _random(len(order), row["h"], device=device)
    return lambda: x[order]


def _index_add(row: Row, device: str) -> Call:
    rows = _choice(row, device).reshape(-1).sort()[1] // row["top_k"]
    x, out = _random(len(rows), row["h"], device=device), _random(row["t"], row["h"], device=device)
    return lambda: out.index_add_(0, rows, x)


def _sum_copies(row: Row, device: str) -> Call:
    x = _random(row["t"], row["top_k"], row["h"], device=device)
    return lambda: x.sum(dim=1)


def _sort(row: Row, device: str) -> Call:
    chosen = _choice(row, device).reshape(-1)
    return lambda: torch.sort(chosen)


def _histogram(row: Row, device: str) -> Call:
    chosen = _choice(row, device).reshape(-1).int()
    return lambda: torch.histc(chosen, bins=row["e"], min=0, max=row["e"] - 1)


def _router(row: Row, device: str) -> Call:
    x, weight = _random(row["t"], row["h"], device=device), _random(row["e"], row["h"], device=device)
    return lambda: functional.softmax(functional.linear(x, weight).float(), dim=-1).topk(min(row["top_k"], row["e"]))


def _top_k(row: Row, device: str) -> Call:
    scores = torch.rand(row["t"], row["e"], device=device)
    return lambda: scores.topk(min(row["top_k"], row["e"]), dim=-1)


def _scale_copies(row: Row, device: str) -> Call:
    x = _random(row["t"] * row["top_k"], row["h"], device=device)
    weights = _random(row["t"] * row["top_k"], 1, device=device)
    return lambda: x * weights


_MOVES: dict[str, Callable[[Row, str], Call]] = {
    "gather": _gather, "gather_gradient": _gather_gradient, "unsort": _unsort, "index_add": _index_add,
    "sum_copies": _sum_copies, "sort": _sort, "histogram": _histogram, "router": _router, "top_k": _top_k,
    "scale_copies": _scale_copies,
}  # fmt: skip
_CALLS = _MOVES | {"grouped": _grouped, "loop": _loop}


class Timer:
    """Median microseconds of a call on the GPU, with a cold second-level cache."""

    def __init__(self) -> None:
        self.flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")

    def __call__(self, call: Call, lead: int = 600_000) -> float:
        call()
        shortest = min(self._repeated(call, 2, lead))
        return statistics.median(self._repeated(call, max(5, min(15, round(1e4 / (shortest + 120)))), lead))

    def _repeated(self, call: Call, count: int, lead: int) -> list[float]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for begin, end in events:
            self.flush.zero_()
            torch.cuda._sleep(lead)
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in events]


def operators(output: Path, stop: float) -> None:
    """Time operators until there is no time left; one line each."""
    timer, done, failed = Timer(), 0, 0
    with output.open("w") as file:
        for row in operator_rows():
            if time.monotonic() > stop:
                break
            lead = 6_000_000 if row["op"] == "loop" else 600_000  # so that the host is ahead of all launches
            answer: Row
            try:
                answer = {"us": round(timer(_CALLS[row["op"]](row, "cuda"), lead), 2)}
            except Exception as error:
                answer, failed = {"error": str(error).splitlines()[0][:120]}, failed + 1
                torch.cuda.empty_cache()
            file.write(json.dumps(row | answer) + "\n")
            done += 1
            if done % 200 == 0:
                file.flush()
                print(f"{done} operators, {failed} failed", flush=True)
    print(f"{done} operators, {failed} failed", flush=True)


def main(output: str, seconds: str, what: str = "all") -> None:
    stop, folder = time.monotonic() + float(seconds), Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    if what != "operators":
        share = stop if what == "steps" else stop - 0.45 * float(seconds)
        steps(DEVELOPMENT, folder / "moe_h200.json", share, profile=True)
        steps(BLIND, folder / "moe_blind_h200.json", share, profile=False)
    if what != "steps":
        operators(folder / "moe_operators_h200.jsonl", stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
