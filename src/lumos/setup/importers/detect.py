"""Which kind of description a file is, by its content, and what it says."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from lumos.errors import InputError
from lumos.setup.importers.huggingface import model_keys
from lumos.setup.importers.imported import Findings, Reading
from lumos.setup.importers.launch_script import put_machines
from lumos.setup.importers.megatron import read_megatron
from lumos.setup.importers.megatron_logs import dumped, in_table, in_yaml, read_dump
from lumos.setup.importers.shell import Script, read_shell
from lumos.setup.importers.text_file import beginning_of, place_of, text_of
from lumos.setup.importers.torchtitan import OPTION, config_of, is_torchtitan, read_torchtitan
from lumos.setup.messages import shown

_KINDS = (
    "a setup is a .toml, a Hugging Face config.json, a Megatron script, log or file of arguments, or a torchtitan TOML "
    "or command; this is none of them"
)
_SCRIPTS = (".sh", ".args", ".bash", ".slurm", ".sbatch")


def read_any(path: Path) -> Reading:
    """What a file says about a run, whatever kind it is of, or InputError."""
    where = place_of(path)
    text, whole = beginning_of(path)
    suffix = path.suffix.lower()
    if not whole:  # nothing that describes a run is that long, but a log may be, and begins with the arguments
        pairs = dumped(text)
        if not pairs:
            text_of(path)  # says that it is too large
        return read_dump(pairs)
    if suffix == ".toml":
        return _of_toml(_toml(text, where))
    if text.lstrip()[:1] == "{" or suffix == ".json":
        return _of_table(_json(text, where), where)
    pairs = dumped(text) or ([] if suffix in _SCRIPTS else in_yaml(text))
    if pairs:
        return read_dump(pairs)
    script = read_shell(text, where)
    if script.options and not any(name.startswith("lumos") for name in script.options):
        return _of_script(script, path.parent)
    try:
        return _of_toml(_toml(text, where))
    except InputError:
        raise InputError(f"{where}: {_KINDS}") from None


def read_config(path: Path) -> Reading:
    """What a Hugging Face config.json says, or InputError that says why it is none of a language model."""
    where = place_of(path)
    return _of_config(_json(text_of(path), where), where)


def toml_value(text: str) -> Any:
    """A TOML value, or the text itself where it is a bare word."""
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


def _of_table(content: Any, where: str) -> Reading:
    """JSON: of Hugging Face unless its keys say otherwise."""
    if isinstance(content, dict) and not {"model_type", "architectures"} & set(content):
        if is_torchtitan(content):
            return read_torchtitan(content)
        pairs = in_table(content)
        if pairs:
            return read_dump(pairs)
    return _of_config(content, where)


def _of_config(content: Any, where: str) -> Reading:
    try:
        return model_keys(content)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _of_script(script: Script, folder: Path) -> Reading:
    """A script: torchtitan's where its options are dotted or it names its configuration, else Megatron's."""
    named = (script.options.get("job.config-file") or [script.variables.get("CONFIG_FILE", "")])[0]
    by_config = "config" in script.options and "module" in script.options
    if not (any(OPTION.match(name) for name in script.options) or by_config or named.endswith(".toml")):
        return read_megatron(script)
    found = Findings()
    found.notes += script.notes
    put_machines(found, script)
    config = config_of(script.options, toml_value)
    below = _config_file(named, folder, found) if named else {}
    return read_torchtitan(_over(below, config), found)


def _config_file(name: str, folder: Path, found: Findings) -> dict[str, Any]:
    """The TOML that a command names, where it lies beside the script."""
    for path in (folder / name, folder / Path(name).name):
        try:
            return _toml(text_of(path), place_of(path))
        except InputError:
            continue
    found.notes.append(f"{shown(name)}, which it names, cannot be read from here: only the options given count")
    return {}


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both tables, the values of `above` winning."""
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        merged[key] = _over(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged
