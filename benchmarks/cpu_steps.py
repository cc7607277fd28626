"""How well `lumos sample`, `lumos fit` and `lumos predict` describe training on this machine's own CPU.

    python benchmarks/cpu_steps.py measure STEPS.jsonl [SECONDS]    small models of transformers, SECONDS each
    python benchmarks/cpu_steps.py score STEPS.jsonl MODEL.npz      predicted against measured steps

The models are those of the transformers library, trained eagerly with torch's fused AdamW: code that Lumos did not
write, at sizes that `lumos sample` does not measure as whole steps. Steps and samples must be taken alike: on idle
cores, or on one thread (OMP_NUM_THREADS=1), whose time is then counted without other programs. A time is the fastest of
many steps, because all else on the machine only ever adds to it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple


class Case(NamedTuple):
    """One model and one step of it."""

    kind: str  # llama or gpt2
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv: int
    vocab: int
    seq: int
    micro_batch: int
    dtype: str = "fp32"

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.layers}x{self.hidden}-{self.micro_batch}x{self.seq}-{self.dtype}"


CASES = (
    Case("llama", 4, 256, 688, 4, 4, 8000, 128, 4),
    Case("llama", 2, 512, 1376, 8, 8, 16000, 256, 1),
    Case("llama", 6, 384, 1024, 6, 2, 8000, 256, 4),
    Case("llama", 4, 512, 1408, 8, 2, 32000, 512, 1),
    Case("llama", 8, 512, 2048, 8, 8, 8000, 128, 8),
    Case("llama", 4, 768, 2048, 12, 4, 16000, 512, 2),
    Case("llama", 3, 1024, 2816, 16, 8, 8000, 256, 2),
    Case("gpt2", 4, 256, 1024, 4, 4, 8000, 256, 4),
    Case("gpt2", 6, 512, 2048, 8, 8, 16000, 256, 2),
    Case("gpt2", 3, 768, 3072, 12, 12, 8000, 512, 1),
    Case("llama", 4, 512, 1408, 8, 8, 16000, 256, 2, "bf16"),
    Case("llama", 6, 768, 2048, 12, 4, 8000, 256, 2, "bf16"),
)  # fmt: skip
SECONDS = 12.0  # of steps, for each case
FEWEST = 5


def model_of(case: Case) -> Any:
    """The model of transformers, in training mode."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    if case.kind == "gpt2":
        config: Any = transformers.GPT2Config(
            n_layer=case.layers, n_embd=case.hidden, n_inner=case.ffn, n_head=case.heads, vocab_size=case.vocab,
            n_positions=case.seq, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        model: Any = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=case.layers, hidden_size=case.hidden, intermediate_size=case.ffn,
            num_attention_heads=case.heads, num_key_value_heads=case.kv, vocab_size=case.vocab,
            max_position_embeddings=case.seq, use_cache=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    return model.to(torch.bfloat16 if case.dtype == "bf16" else torch.float32).train()


def measured_us(case: Case, seconds: float = SECONDS) -> dict[str, float]:
    """The fastest and the median step, in microseconds."""
    import torch

    from lumos.measure.time_operators import cpu_clock

    clock = cpu_clock()
    model = model_of(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(case.vocab, (case.micro_batch, case.seq))
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times) < FEWEST:
        start = clock()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(1e6 * (clock() - start))
    kept = sorted(times[2:])
    return {"us": round(kept[0], 1), "median_us": round(kept[len(kept) // 2], 1), "steps": len(times)}


def measure(path: Path, seconds: float = SECONDS) -> None:
    """Measure every case, best of what the file already has."""
    known = {row["name"]: row for row in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    for case in CASES:
        row = {"name": case.name, **case._asdict(), **measured_us(case, seconds)}
        before = known.get(case.name)
        known[case.name] = row if before is None or row["us"] < before["us"] else before
        print(f"{case.name:34} {row['us'] / 1e3:9.2f} ms, median {row['median_us'] / 1e3:9.2f}", flush=True)
        path.write_text("".join(json.dumps(each) + "\n" for each in known.values()))


def setup_of(case: dict[str, Any], model: str) -> Any:
    """The same model as a setup, on the machine of a model file."""
    from lumos.setup.setup import Setup

    gpt2 = case["kind"] == "gpt2"
    decoder = {key: case[key] for key in ("layers", "hidden", "ffn", "heads", "vocab")}
    decoder |= {"kv_heads": case["kv"], "gated": not gpt2, "tied": gpt2}
    train = {key: case[key] for key in ("seq", "micro_batch")} | {"microbatches": 1, "precision": case["dtype"]}
    return Setup.model_validate({"model": decoder, "train": train, "cluster": {"model": model, "gpus": 1}})


def score(steps: Path, model: str) -> None:
    """Predicted against measured steps, and the mean error by precision."""
    from lumos import predict

    errors: dict[str, list[float]] = {}
    for case in map(json.loads, steps.read_text().splitlines()):
        step_ms = predict(setup_of(case, model)).step_ms
        error = 100 * (1e3 * step_ms / case["us"] - 1)
        errors.setdefault(case["dtype"], []).append(abs(error))
        print(f"{case['name']:34} measured {case['us'] / 1e3:9.2f} ms, predicted {step_ms:9.2f} ms, {error:+6.1f} %")
    for dtype, found in errors.items():
        print(f"{dtype}: mean error {sum(found) / len(found):.1f} %, worst {max(found):.1f} % of {len(found)}")


def main(task: str, *paths: str) -> None:
    if task == "measure":
        measure(Path(paths[0]), *map(float, paths[1:]))
    else:
        score(Path(paths[0]), paths[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
