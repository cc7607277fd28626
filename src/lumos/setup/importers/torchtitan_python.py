"""torchtitan's configurations in Python (config_registry.py): literal values, read from the syntax tree and never run.

A configuration is a function without arguments that returns `Trainer.Config(...)`, or the result of another one with
some attributes set.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from lumos.errors import InputError
from lumos.setup.importers.foreign_file import Findings, flat
from lumos.setup.importers.launch_script import evaluate
from lumos.setup.messages import did_you_mean, listed

_READ = ("training", "parallelism", "compile")
_CLASS = "class"  # the key under which a table holds the name of the class it was made by
_RECOMPUTE = {"FullAC.Config": "full", "SelectiveAC.Config": "selective"}
_CONVERTERS = {"Float8": "float8", "MXFP8": "mx"}
_DEEPEST = 8
_NOT_LITERAL = object()


def configurations(text: str) -> list[str]:
    """The names of the configurations in a file."""
    return [name for name, function in _functions(text).items() if "Config" in ast.unparse(function.returns or _NONE)]


def registry_keys(text: str, name: str, module: str, found: Findings) -> dict[str, Any]:
    """The keys of one configuration as a torchtitan TOML has them; what is not literal is noted."""
    functions = _functions(text)
    if name not in functions:
        raise InputError(f"--config {name[:60]} is not in config_registry.py: {did_you_mean(name, list(functions))}")
    try:
        config = _Reader(functions).result(name)
    except RecursionError:  # an expression of thousands of terms
        config = None
    if not isinstance(config, dict):
        raise InputError(f"{name[:60]} in config_registry.py does not return a configuration with literal values")
    keys = flat({section: config[section] for section in _READ if isinstance(config.get(section), dict)})
    unknown = [key for key, value in keys.items() if value is _NOT_LITERAL]
    if unknown:
        found.note(f"not literal in {name[:60]}, so taken as the defaults: {listed(unknown)}")
    keys = {key: value for key, value in keys.items() if value is not _NOT_LITERAL and not key.endswith(f".{_CLASS}")}
    recompute = config.get("activation_checkpoint")
    made_by = recompute.get(_CLASS) if isinstance(recompute, dict) else None
    keys["activation_checkpoint.mode"] = _RECOMPUTE.get(str(made_by), "none")
    keys.setdefault("activation_checkpoint.selective_ac_option", "op")
    model = config.get("model_spec")
    if not isinstance(model, dict) or not isinstance(model.get("flavor"), str):
        raise InputError(f"{name[:60]} in config_registry.py does not name its model by a literal")
    keys |= {"model.name": module, "model.flavor": model["flavor"], "model.converters": model["converters"]}
    return keys


_NONE = ast.Constant(None)


def _functions(text: str) -> dict[str, ast.FunctionDef]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


class _Reader:
    """Follows the statements of functions as far as they assign and return literals."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef]) -> None:
        self._functions = functions
        self._depth = 0

    def result(self, name: str) -> Any:
        """What a function returns."""
        if self._depth >= _DEEPEST:
            return _NOT_LITERAL
        self._depth += 1
        names: dict[str, Any] = {}
        try:
            for statement in self._functions[name].body:
                if isinstance(statement, ast.Return):
                    return self._value(statement.value or _NONE, names)
                if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                    self._assign(statement.targets[0], self._value(statement.value, names), names)
        finally:
            self._depth -= 1
        return _NOT_LITERAL

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        path = ast.unparse(target).split(".")
        table: Any = names
        for key in path[:-1]:
            if not isinstance(table.get(key), dict):
                table[key] = {}
            table = table[key]
        table[path[-1]] = value

    def _value(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return names.get(name, _NOT_LITERAL)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return [self._value(element, names) for element in elements]
            case ast.BinOp() | ast.UnaryOp():
                number = evaluate(ast.unparse(node), {})
                return _NOT_LITERAL if number is None else number
            case ast.Call(func=ast.Name(id=name), args=[]) if name in self._functions and not node.keywords:
                return self.result(name)
            case ast.Call(func=function, args=arguments):
                return self._made(ast.unparse(function), arguments, node.keywords, names)
        return _NOT_LITERAL

    def _made(self, name: str, arguments: list[ast.expr], keywords: list[ast.keyword], names: Mapping[str, Any]) -> Any:
        """A table of the arguments of a configuration's class; of a model, its flavour and converters."""
        given = {word.arg: self._value(word.value, names) for word in keywords if word.arg}
        if name.endswith("model_registry"):
            flavor = self._value(arguments[0], names) if arguments else given.get("flavor")
            made = given.get("converters")
            classes = [str(one.get(_CLASS)) for one in made if isinstance(one, dict)] if isinstance(made, list) else []
            known = [word for made_by in classes for start, word in _CONVERTERS.items() if made_by.startswith(start)]
            return {"flavor": flavor, "converters": known if len(known) == len(classes) else [*known, *classes]}
        return given | {_CLASS: name} if name.endswith("Config") else _NOT_LITERAL
