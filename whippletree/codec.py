"""JSON of the nouns that hold functions (`Method`, `Paper`, `Claim`): functions are written as `module:name`."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any


def to_json(value: Any) -> Any:
    """JSON of a noun, with functions as `module:name` and partials with their keywords. Inverse of `from_json`.

    Raises:
        ValueError: a function has no importable name (a lambda or a closure), so it could not be found again.
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
    return _find(key)(**{name: from_json(item) for name, item in inner.items()})


def _reference(value: Any) -> str:
    name = f"{value.__module__}:{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)
    if "<" in name:
        raise ValueError(f"only importable functions can be written as JSON, but {name} is a lambda or a closure")
    return name


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    if module.split(".")[0] != __name__.split(".")[0]:
        raise ValueError(f"only names of {__name__.split('.')[0]} are loaded from JSON, but got {name!r}")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
