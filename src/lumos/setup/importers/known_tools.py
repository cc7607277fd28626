"""Which tool a table of YAML or JSON belongs to: read, or refused by name with the way out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lumos.errors import InputError
from lumos.setup.importers.finetuning import (
    Beside,
    is_axolotl,
    is_deepspeed,
    is_trainer,
    read_axolotl,
    read_deepspeed,
    read_trainer,
)
from lumos.setup.importers.foreign_file import Reading
from lumos.setup.importers.nanotron import is_nanotron, read_nanotron
from lumos.setup.importers.nemo import is_nemo, read_nemo
from lumos.setup.importers.neox import is_neox, read_neox

Table = Mapping[str, Any]

WAY_OUT = (
    "describe the run in a setup (docs/setup.md), where model.hf may name the config.json of the model, or dry-run its "
    "script: lumos capture --dry -- COMMAND"
)
_READERS: tuple[tuple[Callable[[Table], bool], Callable[[Table, Beside], Reading]], ...] = (
    (is_nemo, lambda table, _: read_nemo(table)),
    (is_nanotron, lambda table, _: read_nanotron(table)),
    (is_axolotl, read_axolotl),
    (is_trainer, read_trainer),
    (is_neox, lambda table, _: read_neox(table)),
    (is_deepspeed, read_deepspeed),
)


def read_known(table: Table, beside: Beside) -> Reading | None:
    """What the file of a known tool says; None where none is recognised, InputError for a tool that is not read."""
    for is_it, read in _READERS:
        if is_it(table):
            return read(table, beside)
    for tool, is_it in _REFUSED.items():
        if is_it(table):
            raise InputError(f"a file of {tool}, which is not read: {WAY_OUT}")
    return None


def _has(table: Table, *names: str) -> bool:
    return all(name in table for name in names)


def _tables_in(table: Table, name: str) -> list[Table]:
    inner = table.get(name)
    return [value for value in inner.values() if isinstance(value, dict)] if isinstance(inner, dict) else []


def _names_objects(table: Table, key: str, depth: int = 6) -> bool:
    """Whether a table, or one inside it, names a Python object under this key."""
    inner = (value for value in table.values() if isinstance(value, dict))
    return key in table or (depth > 1 and any(_names_objects(value, key, depth - 1) for value in inner))


_REFUSED: Mapping[str, Callable[[Table], bool]] = {
    "torchtune": lambda table: _names_objects(table, "_component_"),
    "NeMo 2 or Megatron Bridge": lambda table: _names_objects(table, "_target_"),
    "Primus": lambda table: any(_has(module, "framework", "config") for module in _tables_in(table, "modules")),
    "llm-foundry": lambda table: (
        any("max_seq_len" in part for part in (table, table.get("variables")) if isinstance(part, dict))
        and ("model" in table or "variables" in table)
    ),
    "OLMo": lambda table: (
        _has(table, "model", "device_train_microbatch_size") or _has(table, "model", "max_sequence_length")
    ),
    "LitGPT": lambda table: _has(table, "train", "data") and ("checkpoint_dir" in table or "model_name" in table),
    "accelerate": lambda table: "distributed_type" in table and "num_processes" in table,
    "Levanter": lambda table: _has(table, "trainer", "model") and "data" in table and "optimizer" in table,
}
