"""JSON of the nouns that hold functions (`Method`, `Paper`, `Claim`): functions are written as `module:name`."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import ModuleType
from typing import Any


def to_json(value: Any) -> Any:
    """JSON of a noun, with functions as `module:name` and partials with their keywords. Inverse of `from_json`.

    Raises:
        ValueError: a function has no importable name (a lambda, a closure, a method of one object), so it could not be
            found again; or a map has a key that is not a string, which JSON would turn into one.
    """
    if isinstance(value, partial):
        return {"partial": to_json(value.func), "args": to_json(list(value.args)), "keywords": to_json(value.keywords)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, tuple):
        return {"tuple": [to_json(item) for item in value]}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        if changed := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"keys of a map in JSON are strings, but got {changed[:3]!r}: write them as strings")
        return {"map": {key: to_json(item) for key, item in value.items()}}
    if is_dataclass(value) and not isinstance(value, type):
        return {_reference(type(value)): {f.name: to_json(getattr(value, f.name)) for f in fields(value)}}
    if callable(value):
        return {"function": _reference(value)}
    return value


def from_json(value: Any) -> Any:
    """The noun that `to_json` wrote; functions are imported by name, from this package only.

    Raises:
        ValueError: a name points outside the package, so loading it could run foreign code.
    """
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "partial" in value:
        return partial(from_json(value["partial"]), *from_json(value["args"]), **from_json(value["keywords"]))
    ((key, inner),) = value.items()
    plain: dict[str, Callable[[Any], Any]] = {
        "float": float,
        "tuple": lambda items: tuple(from_json(item) for item in items),
        "map": lambda items: {name: from_json(item) for name, item in items.items()},
        "function": _find,
    }
    if key in plain:
        return plain[key](inner)
    noun = _find(key)
    if not (isinstance(noun, type) and is_dataclass(noun)):
        raise ValueError(f"only nouns are made from JSON, but {key!r} is not a dataclass")
    return noun(**{name: from_json(item) for name, item in inner.items()})


def _reference(value: Any) -> str:
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", "<no name>")
    owner = getattr(value, "__self__", None)
    if module is None or "<" in path or not (owner is None or isinstance(owner, type | ModuleType)):
        raise ValueError(
            f"only importable functions can be written as JSON, but {value!r} is a lambda, a closure or a method of "
            f"one object: write it as a function of a module, with functools.partial for its settings"
        )
    return f"{module}:{path}"


def _find(name: str) -> Any:
    package = __name__.split(".")[0]
    module, _, path = name.partition(":")
    found: Any = None
    if module.split(".")[0] == package:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    # what a module of ours merely imported (`codec:importlib.import_module`) is foreign code too
    if str(getattr(found, "__module__", "")).split(".")[0] != package:
        raise ValueError(f"only names of {package} are loaded from JSON, but got {name!r}")
    return found
