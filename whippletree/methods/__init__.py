"""Methods: one file a paper. The folder is the list; a file whose name begins with an underscore is a helper."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from whippletree.types import Json, Method

SLOTS = tuple(f.name for f in fields(Method) if f.name not in {"paper", "needs", "excused", "differs"})
ROOT = Path(__file__).parents[2]


def names() -> list[str]:
    """The methods of this folder, sorted."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if not name.startswith("_") and not name.endswith("_test"))


def load(name: str) -> Method:
    """The `METHOD` of a file of this folder.

    Raises:
        ValueError: there is no such file, or it defines no `METHOD`.
    """
    if name not in names():
        raise ValueError(f"there is no method {name!r}; this folder has {', '.join(names())}")
    method = getattr(importlib.import_module(f"{__name__}.{name}"), "METHOD", None)
    if not isinstance(method, Method):
        raise ValueError(f"a method file defines METHOD = Method(...), but methods/{name}.py has METHOD = {method!r}")
    return method


def discover() -> dict[str, Method]:
    """Every method of this folder by name."""
    return {name: load(name) for name in names()}


def card(name: str) -> Json:
    """What the command line shows of a method: paper, files, parts with `file:line` and settings, departures."""
    method = load(name)
    slots = {slot: [_part(part) for part in _parts(getattr(method, slot))] for slot in SLOTS}
    test = Path(__file__).with_name(f"{name}_test.py")
    return {
        "name": name,
        "paper": asdict(method.paper),
        "file": str(test.with_name(f"{name}.py").relative_to(ROOT)),
        "test": str(test.relative_to(ROOT)) if test.exists() else None,
        "slots": {slot: parts for slot, parts in slots.items() if parts},
        "needs": list(method.needs),
        "excused": list(method.excused),
        "differs": method.differs,
        "claim": getattr(getattr(importlib.import_module(f"{__name__}.{name}"), "CLAIM", None), "says", None),
    }


def _parts(value: Any) -> Iterator[Any]:
    """The functions of a slot, outermost first: those of a tuple, and those a partial holds as keywords."""
    if isinstance(value, tuple):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, partial):
        yield value
        for inner in value.keywords.values():
            yield from _parts(inner)
    elif callable(value):
        yield value


def _part(part: Any) -> Json:
    function = part.func if isinstance(part, partial) else part
    settings = part.keywords if isinstance(part, partial) else {}
    path = Path(inspect.getfile(function)).relative_to(ROOT)
    return {
        "name": function.__name__,
        "at": f"{path}:{inspect.getsourcelines(function)[1]}",
        "settings": {key: value for key, value in settings.items() if not callable(value)},
    }
