"""The process of `math.Judge`: a question a line in, an answer a line out. Imports nothing of this package."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

_SECONDS = 5  # for each of: reading the expected answer, reading the reply, comparing


def equal(expected: str, reply: str) -> bool:
    """Whether the answer found in the reply equals the expected one.

    Raises:
        TimeoutError: one of the steps took too long.
        ValueError: the expected answer is not mathematics.
    """
    library = importlib.import_module("math_verify")
    marked = "$" in expected or "\\boxed" in expected
    known = _limited(library.parse, expected if marked else f"${expected}$", parsing_timeout=_SECONDS)
    if all(isinstance(reading, str) for reading in known):  # text that it could not read
        raise ValueError(f"the expected answer {expected!r:.80} is not mathematics")
    found = _limited(library.parse, reply, parsing_timeout=_SECONDS)
    return bool(found) and bool(_limited(library.verify, known, found, timeout_seconds=_SECONDS))


def _limited(step: Any, *given: Any, **limit: int) -> Any:
    """The step's result; what it cannot read it skips, but a timeout is raised."""
    overtime = importlib.import_module("math_verify.errors").TimeoutException
    try:
        return step(*given, **limit, raise_on_error=True)
    except overtime as error:
        raise TimeoutError(f"math-verify took more than {_SECONDS} s") from error
    except Exception:
        return step(*given, **limit)  # without raising, it goes on to the next candidate


def main() -> None:
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"equal": equal(**json.loads(line))}
        except (TimeoutError, ValueError) as error:
            answer = {"error": type(error).__name__, "reason": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
