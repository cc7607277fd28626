"""Detection: which tool a file belongs to, by its content, and what it says about a run."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from lumos.errors import InputError
from lumos.setup.importers import megatron
from lumos.setup.importers.foreign_file import Findings, Reading, beginning_of, flat, text_of
from lumos.setup.importers.huggingface import model_keys
from lumos.setup.importers.launch_script import Script, put_cluster, read_shell
from lumos.setup.importers.torchtitan import OPTION, is_torchtitan, keys_of, read_torchtitan
from lumos.setup.messages import place_of, shown

_FORMATS = (
    "a setup is a .toml, a Hugging Face config.json, a Megatron script, log or file of arguments, or a torchtitan TOML "
    "or command; this is none of them"
)
_SCRIPTS = (".sh", ".args", ".bash", ".slurm", ".sbatch")


def read_any(path: Path) -> Reading:
    """What a file says about a run, whatever tool it belongs to, or InputError."""
    where = place_of(path)
    text, complete = beginning_of(path)
    suffix = path.suffix.lower()
    if not complete:  # only a log may be that long, and it begins with the arguments
        pairs = megatron.arguments_in_log(text)
        if not pairs:
            text_of(path)  # raises: it is too large
        return megatron.read_arguments(pairs)
    if suffix == ".toml":
        return _of_toml(_toml(text, where))
    if text.lstrip()[:1] == "{" or suffix == ".json":
        return _of_json(_json(text, where), where)
    pairs = megatron.arguments_in_log(text) or ([] if suffix in _SCRIPTS else megatron.arguments_in_yaml(text))
    if pairs:
        return megatron.read_arguments(pairs)
    script = read_shell(text, where)
    if script.options and not any(name.startswith("lumos") for name in script.options):
        return _of_script(script, path.parent)
    try:
        return _of_toml(_toml(text, where))
    except InputError:
        raise InputError(f"{where}: {_FORMATS}") from None


def read_config(path: Path) -> Reading:
    """What a Hugging Face config.json says, or InputError that says why it does not describe a language model."""
    where = place_of(path)
    return _of_config(_json(text_of(path), where), where)


def toml_value(text: str) -> Any:
    """A TOML value, or the text itself where it is a bare word: toml_value("[1, 2]"), toml_value("bf16")."""
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return read["value"] if len(read) == 1 else text


def _json(text: str, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({str(error)[:100]})") from None


def _toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not TOML ({str(error)[:200]})") from None


def _of_toml(content: dict[str, Any]) -> Reading:
    return read_torchtitan(content) if is_torchtitan(content) else Reading(content)


def _of_json(content: Any, where: str) -> Reading:
    """Of Hugging Face unless its keys say otherwise."""
    if isinstance(content, dict) and not {"model_type", "architectures"} & set(content):
        if is_torchtitan(content):
            return read_torchtitan(content)
        pairs = megatron.arguments_in_table(content)
        if pairs:
            return megatron.read_arguments(pairs)
    return _of_config(content, where)


def _of_config(content: Any, where: str) -> Reading:
    try:
        return model_keys(content)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _of_script(script: Script, folder: Path) -> Reading:
    """Of torchtitan where the options are dotted or a configuration is named, else of Megatron."""
    name = (script.options.get("job.config-file") or [script.variables.get("CONFIG_FILE", "")])[0]
    in_python = "config" in script.options and "module" in script.options
    if not (any(OPTION.match(option) for option in script.options) or in_python or name.endswith(".toml")):
        return megatron.read_megatron(script)
    found = Findings()
    found.notes += script.notes
    put_cluster(found, script)
    below = _config_file(name, folder, found) if name else {}
    return read_torchtitan(flat(below) | keys_of(script.options, toml_value), found)


def _config_file(name: str, folder: Path, found: Findings) -> dict[str, Any]:
    """The TOML that a command names, where it is next to the script."""
    for path in (folder / name, folder / Path(name).name):
        try:
            return _toml(text_of(path), place_of(path))
        except InputError:
            continue
    found.notes.append(f"its configuration {shown(name)} is not next to the script: only the options given are used")
    return {}
