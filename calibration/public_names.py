"""Writes src/lumos/data/torch_names.json: names that PyTorch itself gives operators and autograd nodes.

They are public, so that an anonymised trace may keep them. Run it where a newer PyTorch is installed:

    .venv/bin/python calibration/public_names.py
"""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path

import torch
import torch.distributed  # registers the operators of c10d
import torch.optim

TARGET = Path(__file__).parents[1] / "src/lumos/data/torch_names.json"
NAMESPACES = ("aten", "c10d", "_c10d_functional", "_c10d_functional_autograd", "prims", "quantized", "symm_mem")
NODES = "include/torch/csrc/autograd/generated/Functions.h"


def operators() -> list[str]:
    """Operators that are registered when torch is imported."""
    schemas = torch._C._jit_get_all_schemas()
    names = {str(schema.name) for schema in schemas}
    return sorted(name for name in names if name.partition("::")[0] in NAMESPACES)


def autograd_nodes() -> list[str]:
    """Nodes of the backward pass, as the header that torch is built with declares them."""
    header = (Path(torch.__file__).parent / NODES).read_text("utf-8")
    return sorted(set(re.findall(r"struct TORCH_API (\w+Backward\w*)", header)))


def optimizers() -> list[str]:
    found = (value for value in vars(torch.optim).values() if isinstance(value, type))
    return sorted(cls.__name__ for cls in found if issubclass(cls, torch.optim.Optimizer))


def main() -> None:
    names = {"operators": operators(), "autograd_nodes": autograd_nodes(), "optimizers": optimizers()}
    origin = {
        "source": f"names that PyTorch {torch.__version__.partition('+')[0]} registers or declares",
        "script": "calibration/public_names.py",
        "date": date.today().isoformat(),
    }
    table = {**names, "sources": dict.fromkeys(names, origin)}
    TARGET.write_text(json.dumps(table, indent=0, ensure_ascii=False) + "\n", "utf-8")
    print({key: len(value) for key, value in names.items()})


if __name__ == "__main__":
    main()
