"""Ending a command and everything it started."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

_POLL = 0.02  # seconds between two looks
_LOOKS = 50  # looks at a killed process before it is left to the system (it hangs in the kernel)


async def end_all(leader: int | None, *, mark: str, grace: float) -> None:
    """Ask every process of the leader's group and session, or with `mark` in its environment, to end; then kill it.

    SIGTERM, up to `grace` seconds, SIGKILL; cancelled while it waits, it kills at once. A process that left the group
    and the session is found by its mark, a `NAME=value` that no other process has, where the system has /proc.
    """
    if not alive(leader, mark=mark):
        return
    try:
        _send(leader, mark, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while alive(leader, mark=mark):
                    await asyncio.sleep(_POLL)
    finally:
        for _ in range(_LOOKS):  # more than once: one may have been forking while we looked
            if not _send(leader, mark, signal.SIGKILL):
                break
            await asyncio.sleep(_POLL)


def alive(leader: int | None, *, mark: str) -> set[int]:
    """Ids of the running processes that belong to the leader; a negative id stands for a whole group."""
    assert "=" in mark, f"the mark {mark!r} is no NAME=value, and would fit processes that are not ours"
    if not Path("/proc/self/stat").exists():
        with suppress(ProcessLookupError, PermissionError):
            if leader is not None:
                os.kill(-leader, 0)
                return {-leader}
        return set()
    found = set()
    for entry in os.scandir("/proc"):
        # a process may end while we read it, or be another user's
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if entry.name.isdigit() and _belongs(Path(entry.path), leader, mark.encode()):
                found.add(int(entry.name))
    return found


def _belongs(process: Path, leader: int | None, mark: bytes) -> bool:
    # pid (name) state parent group session ...; the name may hold spaces and brackets
    state, _, group, session = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
    if state in "ZX":
        return False
    return str(leader) in (group, session) or mark in (process / "environ").read_bytes().split(b"\0")


def _send(leader: int | None, mark: str, number: int) -> int:
    """Signal them all; how many there were."""
    members = alive(leader, mark=mark)
    for member in members:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(member, number)
    return len(members)
