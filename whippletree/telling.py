"""What a command tells: errors that one can act on in their words, and a console for all else."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console


@contextmanager
def told() -> Iterator[None]:
    """Errors that this package raises end with status 1 and their words; any other is a bug and keeps its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        _end("stopped; the same command goes on from what is on disk", status=130)
    except Exception as error:
        words = in_words(error)
        if words is None:
            raise
        _end(words)


def in_words(error: Exception) -> str | None:
    """What a person is told of an error that they can act on; None for a bug. Of a group, the first that is told."""
    if isinstance(error, ExceptionGroup):
        return next(filter(None, map(in_words, error.exceptions)), None)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk is full ({error}): make room and give the same command again; every finished turn is kept"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else None
    if not isinstance(error, ValueError | ArithmeticError | ImportError | RuntimeError):
        return None
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return str(error) if Path(__file__).parent in raised_in.parents else None


def _end(text: str, *, status: int = 1) -> None:
    print(f"whippletree: {text}", file=sys.stderr)
    raise typer.Exit(status)


def screen() -> Console:
    """Standard output as it is now: its width, and whether it has colours."""
    return Console(highlight=False)
