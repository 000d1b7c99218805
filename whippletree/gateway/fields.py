"""Fields of a request's body, read with clear errors; what every API needs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from whippletree.gateway.errors import bad_request
from whippletree.types import Json

MOST_CHOICES = 128
Neutral = tuple[Any, ...]


def json_object(body: bytes) -> Json:
    """The request's body.

    Raises:
        ApiError: it is no JSON object, or holds a number that is none: NaN, Infinity, or one as large (400).
    """
    try:
        request = json.loads(body, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise bad_request(f"a request body is one JSON object, but this one cannot be read: {error}") from error
    if not isinstance(request, dict):
        raise bad_request(f"a request body is one JSON object, but this one is a {type(request).__name__}")
    return request


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.50} is no number of JSON, or too large")
    return number


def refuse(request: Json, table: Mapping[str, Neutral]) -> None:
    """Refuse parameters that change what is sampled and that no engine here honours.

    `table` gives for each the values that ask for nothing.

    Raises:
        ApiError: one has another value (400, by name).
    """
    for name, neutral in table.items():
        value = request.get(name)
        if value is not None and value not in neutral:
            allowed = f" other than {' or '.join(json.dumps(x) for x in neutral)}" if neutral else ""
            raise bad_request(
                f"`{name}`{allowed} is not supported, and it is never ignored, but it is {json.dumps(value)[:200]}; "
                f"leave it out",
                param=name,
                code="unsupported_parameter",
            )


def value(
    request: Json, name: str, kinds: tuple[type, ...], fits: Callable[[Any], bool] = lambda x: True, rule: str = ""
) -> Any:
    """The field if it is there, of one of these kinds, and fits; a bool is no number."""
    found = request.get(name)
    if found is None or (isinstance(found, kinds) and isinstance(found, bool) == (bool in kinds) and fits(found)):
        return found
    wanted = " or ".join(kind.__name__ for kind in kinds) + (f", {rule}" if rule else "")
    raise bad_request(f"`{name}` is a value of type {wanted}, but it is {json.dumps(found)[:200]}", param=name)


def temperature_of(request: Json, name: str = "temperature") -> float | None:
    """0 or more; `None` where it is not said."""
    found = value(request, name, (int, float), lambda x: 0 <= x <= sys.float_info.max, "0 or more")
    return None if found is None else float(found)


def top_p_of(request: Json, name: str = "top_p") -> float:
    """Above 0 and at most 1; 1 where it is not said."""
    found = value(request, name, (int, float), lambda x: 0 < x <= 1, "above 0 and at most 1")
    return 1.0 if found is None else float(found)


def count_of(request: Json, name: str) -> int | None:
    """A whole number of 1 or more; `None` where it is not said."""
    found: int | None = value(request, name, (int,), lambda x: x >= 1, "1 or more")
    return found


def flag_of(request: Json, name: str) -> bool:
    """True or false; false where it is not said."""
    return bool(value(request, name, (bool,)))


def objects_of(request: Json, name: str) -> tuple[Json, ...]:
    """A list of one or more objects."""
    found = request.get(name)
    if not isinstance(found, list) or not found or not all(isinstance(item, dict) for item in found):
        raise bad_request(
            f"`{name}` is a list of one or more objects, but it is {json.dumps(found)[:200]}",
            param=name,
        )
    return tuple(found)


def stop_of(request: Json, name: str = "stop") -> tuple[str, ...]:
    """A string or a list of strings, none empty."""
    found = request.get(name)
    marks = [] if found is None else [found] if isinstance(found, str) else found
    if not isinstance(marks, list) or not all(isinstance(mark, str) and mark for mark in marks):
        raise bad_request(f"`{name}` is a string or a list of strings, none empty, but got {found!r:.200}", param=name)
    return tuple(marks)
