"""TOML: plain values written so that `tomllib` reads back equal ones, and `a.b=c` settings put into a table."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from datetime import date, time
from typing import Any


def dump(table: Mapping[str, Any]) -> str:
    """A table as TOML; `tomllib.loads` gives an equal one, with lists for tuples.

    Raises:
        TypeError: a value is of a type that TOML does not have.
    """
    return "\n".join(_table((), table)).strip() + "\n"


def change(table: dict[str, Any], setting: str) -> None:
    """Apply `a.b=c` to a table in place; c is read as TOML, and as plain text where it looks like none.

    Raises:
        ValueError: it has no path or no `=`, its path leads through a value, or c is broken TOML.
    """
    path, equals, text = setting.partition("=")
    *tables, key = (name.strip() for name in path.split("."))
    if not equals or not all([*tables, key]):
        raise ValueError(f"a setting must look like update.learning_rate=1e-5, but got {setting!r}")
    value = _read(text.strip(), setting)
    here: Any = table
    for name in tables:
        if isinstance(here, list):  # an array of tables: `harness.1.timeout=60`
            here = here[int(name)] if name.isdecimal() and int(name) < len(here) else None
        else:
            here = here.setdefault(name, {})
        if not isinstance(here, dict) and not (isinstance(here, list) and name != tables[-1]):
            raise ValueError(f"{setting!r} sets a key inside {name}, which is not a table: set {name} as a whole")
    here[key] = value


def _read(text: str, setting: str) -> Any:
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in ("[", "{", '"', "'"):
            raise ValueError(
                f"{setting!r} is not valid TOML: {error}. Strings in arrays and tables need quotes, and the whole "
                f"setting quotes of the shell: --set 'sinks=[\"tensorboard\"]'"
            ) from None
        return text
    return read["value"] if len(read) == 1 else text


def _table(path: tuple[str, ...], table: Mapping[str, Any]) -> list[str]:
    """Lines of a table: values first, since they end at the next header, then tables, then arrays of tables."""
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    arrays = {key: value for key, value in table.items() if _all_tables(value)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if key not in tables | arrays]
    for key, value in tables.items():
        lines += ["", f"[{_name(*path, key)}]", *_table((*path, key), value)]
    for key, values in arrays.items():
        for value in values:
            lines += ["", f"[[{_name(*path, key)}]]", *_table((*path, key), value)]
    return lines


def _all_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _name(*path: str) -> str:
    return ".".join(map(_key, path))


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's, but for DEL


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, -inf, nan
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise TypeError(f"TOML has no type for {value!r}")
