"""Configurations as what is launched: a script for Megatron, a TOML for torchtitan, a JSON for DeepSpeed.

What is written is read back by the importer of that tool and compared with the setup, key by key. What the files do not
say is named in them, so that nothing is dropped without a word.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lumos.errors import OptionError, printable
from lumos.export.deepspeed_config import deepspeed_config
from lumos.export.launch_draft import FILL_IN, Draft, effective, nodes_of
from lumos.export.megatron_script import megatron_script
from lumos.export.torchtitan_config import torchtitan_config
from lumos.files import write_files
from lumos.setup.messages import did_you_mean
from lumos.setup.presets import find_preset
from lumos.setup.sections import Model
from lumos.setup.setup import STEP_SECTIONS, Setup

_WRITERS: Mapping[str, Callable[[Setup], Draft]] = {
    "megatron": megatron_script, "torchtitan": torchtitan_config, "deepspeed": deepspeed_config,
}  # fmt: skip
TOOLS = tuple(_WRITERS)
_NOT_SETTINGS = ("cluster.", "train.imbalance")  # facts about machines and load, which no configuration can set


@dataclass(frozen=True)
class LaunchFiles:
    """The files that launch one configuration with one tool."""

    tool: str
    files: Mapping[str, str]  # texts by name
    main: str  # the file that `lumos predict` is given
    left_out: tuple[str, ...]  # what the files do not say, one sentence each
    remarks: tuple[str, ...]  # what they do not say exactly
    overrides: tuple[str, ...]  # what `lumos predict` needs beside them: "cluster.gpu=h100"

    def as_dict(self) -> dict[str, Any]:
        """The values that --json prints."""
        return {
            "tool": self.tool, "files": dict(self.files), "main": self.main, "left_out": list(self.left_out),
            "remarks": list(self.remarks), "predict_with": list(self.overrides),
        }  # fmt: skip

    def write(self, folder: Path) -> None:
        """Write all files into a folder, which is made if it is not there."""
        check_folder(folder)
        write_files(folder, self.files, "--emit")


def launch_files(setup: Setup, tool: str) -> LaunchFiles:
    """The files that launch a setup with a tool: "megatron", "torchtitan" or "deepspeed".

    >>> launch_files(setup, "megatron").files["run.sh"]   # doctest: +SKIP
    """
    draft = _WRITERS[tool_named(tool)](setup)
    back, overrides = _read_back(setup, draft)
    meant, said = effective(setup), effective(back)
    left_out = [
        f"{key} = {_toml(meant[key])}: {draft.reasons.get(key, draft.otherwise)}" + _instead(said[key])
        for key in meant
        if meant[key] != said[key]
    ]
    if any(text.startswith("model.preset=") or text.startswith("model.layers=") for text in overrides):
        left_out[:0] = [f"the model: {draft.reasons.get('model.preset', draft.otherwise)}"]
    bare = LaunchFiles(tool, draft.files, draft.main, tuple(left_out), draft.remarks, overrides)
    return replace(bare, files={name: _commented(setup, bare, name) for name in bare.files})


def tool_named(name: str) -> str:
    """The name of a tool, or OptionError."""
    if name not in _WRITERS:
        raise OptionError(f"--emit {name[:100]}: not a tool that can be launched: {did_you_mean(name, TOOLS)}")
    return name


def check_folder(folder: Path) -> None:
    """Raise OptionError where a folder cannot be written to."""
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"--emit {folder}: is a file: name a folder for the files")
    if not folder.parent.is_dir():
        raise OptionError(f"--emit {folder}: the folder {folder.parent} does not exist; create it first")
    if not os.access(folder if folder.exists() else folder.parent, os.W_OK):
        raise OptionError(f"--emit {folder}: cannot be written: name another folder")


def suited_to(setup: Setup, tool: str) -> Setup:
    """The setup in the tool's own framework, unless it states another one."""
    if "framework" in setup.train.model_fields_set:
        return setup
    return setup.replaced({"train.framework": tool})


def values_it_has(setup: Setup, tool: str) -> dict[str, list[Any]]:
    """The only values of searched keys that the files of a tool can say, where they cannot say all of them."""
    if tool != "deepspeed":
        return {}
    if setup.train.framework == "megatron-deepspeed":
        return {"parallel.cp": [1], "parallel.ep": [1]}
    return {key: [1] for key in ("parallel.pp", "parallel.cp", "parallel.ep")} | {"parallel.sequence_parallel": [False]}


def _read_back(setup: Setup, draft: Draft) -> tuple[Setup, tuple[str, ...]]:
    """The setup that the files describe, and what had to be added to them: machines, load, perhaps the model."""
    others = {name: getattr(setup, name) for name in setup.stated_sections if name not in STEP_SECTIONS}
    sections = {name: dict(draft.reading.sections.get(name, {})) for name in STEP_SECTIONS} | others
    added: list[str] = []
    if any(mistake.place.startswith("model.") for mistake in draft.reading.mistakes):
        sections["model"] = setup.model.stated()
        added += _model_overrides(setup.model)
    if "seq" not in sections["train"]:
        sections["train"]["seq"] = setup.train.seq
        added.append(f"train.seq={setup.train.seq}")
    back, meant = effective(Setup(**sections)), effective(setup)
    for key in meant:
        if key.startswith(_NOT_SETTINGS) and meant[key] != back[key]:
            section, _, name = key.partition(".")
            sections[section][name] = meant[key]
            added.append(f"{key}={_toml(meant[key])}")
    if "cluster.gpus" in [text.partition("=")[0] for text in added]:
        sections["parallel"].pop("dp", None)
    return Setup(**sections), tuple(added)


def _model_overrides(model: Model) -> list[str]:
    preset = find_preset(model.name) if model.name else None
    if preset is not None and preset.model == model:
        return [f"model.preset={preset.name}"]
    usual = {key: field.default for key, field in Model.model_fields.items() if key not in Model.DERIVED}
    stated = {key: value for key, value in model.stated().items() if key != "name"}
    return [f"model.{key}={_toml(value)}" for key, value in stated.items() if key not in usual or value != usual[key]]


def _toml(value: Any) -> str:
    if value is None:
        return "the framework's default"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def _instead(value: Any) -> str:
    return "" if value is None else f"; as written: {_toml(value)}"


def _commented(setup: Setup, launch: LaunchFiles, name: str) -> str:
    """A file with what has to be known about it at its head. JSON has no comments: the script beside it has them."""
    body = launch.files[name]
    if name.endswith(".json"):
        return body
    model = printable(setup.model.name or f"{setup.model.layers} layers").replace("\n", " ")
    again = " ".join(["lumos predict", launch.main, *(f"--set {shlex.quote(text)}" for text in launch.overrides)])
    comments = [f"{model} on {setup.cluster.gpus} x {setup.cluster.shown}. Predicted again by: {again}"]
    if any(FILL_IN in text for text in launch.files.values()):
        comments.append(f"Replace every {FILL_IN}: a setup knows no data, tokenizer or learning rate.")
    if "torchrun" in body and nodes_of(setup)[0] > 1:
        comments.append("Start it with sbatch, or once on every node with MASTER_ADDR set to the first.")
    comments += [f"Left out: {text}" for text in launch.left_out]
    comments += [f"Not exact: {text}" for text in launch.remarks]
    said = "".join(f"# {comment}\n" for comment in comments)
    head, _, rest = body.partition("\n\n") if body.startswith("#!") else ("", "", body)
    return f"{head}\n{said}\n{rest}".lstrip("\n")
