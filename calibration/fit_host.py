"""Derives what the host pays for one call of a kind from the measurements of calibration/host_h200.py.

    python3 calibration/fit_host.py

Reads host_h200.json and writes src/lumos/data/host_costs.json. Two constants below, STEP_FACTOR and WRAPPED_US, are set
by hand from whole steps: the development rows of scripts_h200.json and ranks_h200.json.xz.
"""

from __future__ import annotations

import json
import statistics
from datetime import date
from pathlib import Path

HERE = Path(__file__).parent
TABLE = HERE.parent / "src/lumos/data/host_costs.json"
POINTWISE = ("add", "mul", "mul by number", "gelu", "silu", "relu", "softmax", "where", "to dtype", "clone", "sum")
FORWARD = {"mm": ("mm", "bf16 mm", "linear"), "addmm": ("linear with bias",), "bmm": ("bmm",),
           "native_layer_norm": ("layer_norm",), "_fused_rms_norm": ("rms_norm",), "native_dropout": ("dropout",),
           "embedding": ("embedding",), "cat": ("cat",), "attention.forward": ("attention",),
           "convolution": ("conv2d",), "native_batch_norm": ("batch_norm",),
           "native_group_norm": ("group_norm",)}  # fmt: skip
STEP_FACTOR = 1.34  # host time of whole steps over the sum of their calls, each measured in a loop: caches are colder
WHOLE = ("fsdp.all_gather_copy_in", "fsdp.chunk_cat", "python.checkpoint")  # measured in whole passes, not in loops
OPERATORS_IN_INDEX_PUT = 14  # where rows are added: places are sorted first (profile of experts in a Python loop)
WRAPPED_US = 295.0  # of entering and leaving a DTensor with its backward pass, before that factor
VIEWS = ("view", "transpose", "permute", "slice", "select", "unsqueeze")


def derived() -> dict[str, float]:
    """Microseconds of a call by kind."""
    measured = json.loads((HERE / "host_h200.json").read_text())
    us: dict[str, float] = measured["us"]

    def mean(names: tuple[str, ...], where: str) -> float:
        return statistics.fmean(us[f"{name}, {where}"] for name in names)

    backward = statistics.fmean(us[f"{name}, backward"] for name in ("mul by number", "mul by tensor", "mm"))
    adamw = {kind: us[f"AdamW {kind}, step of 200 parameters"] / 200 for kind in ("loop", "foreach", "fused")}
    loop_calls, list_operands = 12, 16  # of AdamW: calls for a parameter; tensors of a parameter over all lists
    gather = (us["FSDP2, 8 blocks of 1 parameters, forward"] - us["plain, 8 blocks of 1 parameters, forward"]) / 8
    both = (us["FSDP2, 8 blocks of 1 parameters, backward"] - us["plain, 8 blocks of 1 parameters, backward"]) / 8
    dtensor = statistics.fmean(
        us[f"DTensor {name}, no grad"] - us[f"{name}, no grad"] for name in ("mm", "add", "mul", "silu", "view")
    )
    found = {
        "kernel, forward": mean(POINTWISE, "forward"),
        "kernel, backward": backward,
        "kernel, optimizer": adamw["loop"] / loop_calls,
        "attention.backward, backward": us["attention, backward"],
        **{f"{op}, forward": mean(names, "forward") for op, names in FORWARD.items()},
        "view": mean(VIEWS, "forward"),
        "gradient": us["mul and AccumulateGrad that keeps, backward"] - us["mul by tensor, backward"],
        "list": mean(("add", "mul"), "no grad"),
        "tensor_of_list": 0.5 * (adamw["foreach"] / list_operands + adamw["fused"] / 5),
        "python": us["nn.Module call, per level"],
        "python.module": us["nn.Module call, per level"],
        "python.checkpoint": us["checkpoint not re-entrant of one mul, forward"]
        + us["checkpoint not re-entrant of one mul, backward"] - us["one mul and sum, backward"],
        "dtensor": dtensor,
        "dtensor, optimizer": us["DTensor AdamW loop, per parameter of 50"] / loop_calls - adamw["loop"] / loop_calls,
        "dtensor.from_local": WRAPPED_US,
        "dtensor.to_local": WRAPPED_US,
        "index_put, backward": OPERATORS_IN_INDEX_PUT * mean(("add", "mul"), "no grad"),
        "nonzero, forward": us["nonzero (waits)"],
        "compiled.call": us["compiled, 1 mm and 1 fused kernels, no grad"] - 2 * us["kernel launch alone"],
        "fsdp": mean(("add", "mul"), "no grad"),
        "fsdp.all_gather_copy_in": gather,
        "fsdp.chunk_cat": max(both - gather, 0.0),
        "c10d": us["functional all_reduce and wait"],
        "collective": us["functional all_reduce and wait"],
        "wait": us["synchronize, idle GPU"],
        "cpu": us["Python: a function call"] + us["detach, forward"],
        "compiled": us["kernel launch alone"],
    }  # fmt: skip
    return {name: round(value * (1.0 if name in WHOLE else STEP_FACTOR), 2) for name, value in found.items()}


def main() -> None:
    source = {"source": "calibration/host_h200.json: host time of one call on tiny tensors beside an H200, torch 2.11",
              "script": "calibration/fit_host.py", "date": date.today().isoformat()}  # fmt: skip
    steps = {"source": "medians over the development rows of calibration/scripts_h200.json and ranks_h200.json.xz, "
             "step less the wait at its end: factor 0.9 to 1.6, DTensor 190 to 470 us", "script": "by hand",
             "date": date.today().isoformat()}  # fmt: skip
    table = {"us": derived(), "step_factor": STEP_FACTOR, "sources": {"us": source, "step_factor": steps}}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps(table["us"], indent=1))


if __name__ == "__main__":
    main()
