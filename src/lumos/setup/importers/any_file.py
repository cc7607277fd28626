"""Which tool a file belongs to, by its content: a file of no known tool is refused, never read in part."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from lumos.dtypes import dtype_called
from lumos.errors import InputError
from lumos.setup.importers import megatron
from lumos.setup.importers.foreign_file import Findings, Reading, beginning_of, flat, text_of
from lumos.setup.importers.huggingface import model_keys
from lumos.setup.importers.keyed_file import table_in_yaml
from lumos.setup.importers.known_tools import WAY_OUT, read_known
from lumos.setup.importers.launch_script import Script, put_cluster, read_shell
from lumos.setup.importers.torchtitan import OPTION, is_torchtitan, keys_of, over, read_torchtitan
from lumos.setup.importers.torchtitan_python import configurations, registry_keys
from lumos.setup.messages import listed, place_of, shown
from lumos.setup.sections import as_count
from lumos.setup.toml_text import toml_table

_FORMATS = (
    "a setup is a .toml, a Hugging Face config.json, a Megatron script, log or file of arguments, a torchtitan TOML or "
    "command, or a file of nanotron, NeMo, GPT-NeoX, DeepSpeed, axolotl or LLaMA-Factory; this is none of them"
)
_SCRIPTS = (".sh", ".args", ".bash", ".slurm", ".sbatch")
_UNKNOWN_FOLDER = re.compile(r"\$\{?\w{1,100}\}?/")
_PYTHON = re.compile(r"^(?:from [\w.]+ import |import \w|def \w+\(|class \w+[(:])", re.MULTILINE)


def read_any(path: Path) -> Reading:
    """What a file says about a run, whatever tool it belongs to, or InputError."""
    where = place_of(path)
    try:
        reading = _read(path, where)
    except InputError as error:
        raise InputError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
    return _with_names(reading, path)


def _with_names(reading: Reading, path: Path) -> Reading:
    """With the name of the file, and that of the folder of a config.json, which may state the size of the model too."""
    if reading.model_names is None:
        return reading
    folder = (path.absolute().parent.name,) if path.stem == "config" else ()
    return reading._replace(model_names=tuple(name for name in (*reading.model_names, path.stem, *folder) if name))


def read_config(path: Path) -> Reading:
    """What a Hugging Face config.json says, or InputError that says why it does not describe a language model."""
    where = place_of(path)
    try:
        content = json_value(text_of(path))
        return _with_names(model_keys(content)._replace(stored_parameters=_stored(content, path.parent)), path)
    except InputError as error:
        raise InputError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None


def toml_value(text: str) -> Any:
    """A TOML value, or the text itself where it is a bare word: toml_value("[1, 2]"), toml_value("bf16")."""
    try:
        read = toml_table(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return read["value"] if len(read) == 1 else text


def _read(path: Path, where: str) -> Reading:
    text, complete = beginning_of(path)
    suffix = path.suffix.lower()
    if not complete:  # only a log may be that long, and it begins with the arguments
        pairs = megatron.arguments_in_log(text)
        if not pairs:
            text_of(path)  # raises: it is too large
        return megatron.read_arguments(pairs)
    if suffix == ".toml":
        return _of_toml(_toml(text))
    if suffix == ".py" or (suffix not in _SCRIPTS and len(_PYTHON.findall(text[:100_000])) >= 3):
        return _of_python(text, path)
    pairs = [] if suffix == ".json" or text.lstrip()[:1] == "{" else megatron.arguments_in_log(text)
    if pairs:
        return megatron.read_arguments(pairs)
    table = None if suffix in _SCRIPTS else _table(text, suffix)
    return _of_text(text, path, where) if table is None else _of_table(table, path)


def _table(text: str, suffix: str) -> Any:
    """What JSON or YAML holds; None where the text is neither."""
    if suffix == ".json":
        return json_value(text)
    if text.lstrip()[:1] == "{":
        try:
            return json_value(text)
        except InputError:
            pass  # GPT-NeoX writes YAML in braces
    return table_in_yaml(text)


def _of_python(text: str, path: Path) -> Reading:
    """A config_registry.py of torchtitan that has one configuration; any other Python is refused."""
    names = configurations(text) if "torchtitan" in text else []
    if len(names) == 1:
        found = Findings()
        return read_torchtitan(registry_keys(text, names[0], path.absolute().parent.name, found), found)
    if names:
        command = f"torchrun -m torchtitan.train --module {path.absolute().parent.name} --config {names[0]}"
        raise InputError(
            f"it has {len(names)} configurations, {listed(names[:5])} among them: put the command into a script next "
            f"to this file, and give that: {command}"
        )
    raise InputError(f"Python is not read: {WAY_OUT}")


def _registry(module: list[str], config: list[str], folder: Path, found: Findings) -> dict[str, Any]:
    """The configuration that --module and --config name, where its config_registry.py is next to the script."""
    if not module or not config:
        return {}
    for place in (".", module[0], f"torchtitan/models/{module[0]}"):
        try:
            text = text_of(folder / place / "config_registry.py")
        except InputError:
            continue
        return registry_keys(text, config[0], module[0], found)
    return {}


def _of_toml(content: dict[str, Any]) -> Reading:
    return read_torchtitan(content) if is_torchtitan(content) else Reading(content)


def _of_table(content: Any, path: Path) -> Reading:
    """JSON or YAML: of a known tool, of torchtitan, arguments of Megatron, or the config.json of a model."""
    if isinstance(content, dict) and not _is_config(content):

        def beside(name: str) -> Mapping[str, Any] | None:
            return _beside(path.parent, name)

        known = read_known(content, beside)
        if known is not None:
            return known
        if is_torchtitan(content):
            return read_torchtitan(content)
        pairs = megatron.arguments_in_table(content)
        if pairs:
            return megatron.read_arguments(pairs)
        if path.suffix.lower() != ".json":
            raise InputError(_FORMATS)
    return model_keys(content)._replace(stored_parameters=_stored(content, path.parent))


def _stored(config: Any, folder: Path) -> int:
    """The parameters in the weights next to a config.json, as far as their index tells; 0 where it does not."""
    metadata = (_beside(folder, "model.safetensors.index.json") or {}).get("metadata")
    if not isinstance(config, dict) or not isinstance(metadata, dict):
        return 0
    dtype = dtype_called(config.get("torch_dtype") or config.get("dtype"))
    if as_count(metadata.get("total_parameters")):
        return as_count(metadata["total_parameters"])
    return as_count(metadata.get("total_size")) // dtype.size if dtype and "quantization_config" not in config else 0


def _is_config(content: Mapping[str, Any]) -> bool:
    """Whether a table is the config.json of a model; axolotl gives the class of its base_model as model_type."""
    named = {"base_model", "model_name_or_path"} & set(content)
    return "architectures" in content or ("model_type" in content and not named)


def _beside(folder: Path, name: str) -> Mapping[str, Any] | None:
    """The table in a file that another one names, by its path or by its name alone."""
    for path in (folder / name, folder / Path(name).name):
        try:
            table = _table(text_of(path), path.suffix.lower())
        except InputError:
            continue
        if isinstance(table, dict):
            return table
    return None


def _of_text(text: str, path: Path, where: str) -> Reading:
    """A launch script or a line of options; or TOML under another name."""
    script = read_shell(text, where, partial(_sourced, path.parent))
    if script.options and not any(name.startswith("lumos") for name in script.options):
        return _of_script(script, path.parent)
    try:
        return _of_toml(_toml(text))
    except InputError:
        raise InputError(_FORMATS) from None


def _sourced(folder: Path, name: str) -> str | None:
    """The text of a file that a script sources, if it is in the script's folder or below."""
    parts = os.path.normpath(_UNKNOWN_FOLDER.sub("", _from_script(name))).strip("/").split("/")
    parts = [part for part in parts if part not in ("", ".", "..")]
    for first in range(len(parts)):  # /root/models/x.sh and ../models/x.sh may be models/x.sh, or x.sh
        try:
            return text_of(folder.joinpath(*parts[first:]))
        except InputError:
            continue
    return None


def _from_script(name: str) -> str:
    """A path from the script's folder, which SCRIPT_DIR=$(…) is."""
    return name.rpartition("$()/")[2] or name


def _of_script(script: Script, folder: Path) -> Reading:
    """Of torchtitan where the options are dotted or a configuration is named, of Megatron where its options say so."""
    name = (script.options.get("job.config-file") or [script.variables.get("CONFIG_FILE", "")])[0]
    in_python = "config" in script.options and "module" in script.options
    if not (any(OPTION.match(option) for option in script.options) or in_python or name.endswith(".toml")):
        if script.unread and "num-layers" not in script.options:
            files = listed(map(_from_script, script.unread))
            raise InputError(f"it sources {files}, which is not next to it: put the file into the script's folder")
        if not megatron.is_megatron(script):
            raise InputError(_of_another(script))
        return megatron.read_megatron(script)
    found = Findings()
    for condition in script.notes:
        found.note(condition)
    put_cluster(found, script)
    below = _config_file(name, folder, found) if name else {}
    if in_python and not name:
        below = _registry(script.options["module"][:1], script.options["config"][:1], folder, found)
    return read_torchtitan(over(flat(below), keys_of(script.options, toml_value)), found)


def _of_another(script: Script) -> str:
    """What to say of a script that starts neither Megatron nor torchtitan."""
    configs = [word for words in script.options.values() for word in words if word.endswith((".yaml", ".yml", ".json"))]
    called = f"it starts {listed(script.programs[:3])}, and " if script.programs else ""
    what = f"{called}has too few options of Megatron or torchtitan to describe a run"
    return f"{what}: give its configuration, {shown(configs[0])}, instead" if configs else f"{what}: {WAY_OUT}"


def _config_file(name: str, folder: Path, found: Findings) -> dict[str, Any]:
    """The TOML that a command names, where it is next to the script."""
    for path in (folder / name, folder / Path(name).name):
        try:
            return _toml(text_of(path))
        except InputError:
            continue
    found.note(f"its configuration {shown(name)} is not next to the script: only the options given are used")
    return {}


def json_value(text: str) -> Any:
    """What JSON holds, with Infinity and NaN, as Python writes them, or InputError."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        wrong = str(error)[:100]
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # half a character is no text
    except (ValueError, RecursionError):
        raise InputError(f"not JSON ({wrong})") from None
    return value


def _toml(text: str) -> dict[str, Any]:
    try:
        return toml_table(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not TOML ({str(error)[:200]})") from None
