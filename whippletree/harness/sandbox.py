"""A command inside bubblewrap: a read-only system, one scratch home, no network but the gateway, the same names always.

Inside, every run sees the same machine, so that prompts that name it are the same in every rollout: host `agent`, user
`agent` (1000), home `HOME`, work folder `WORK`, gateway at 127.0.0.1:`PORT`, an empty /tmp. The clock, the kernel's
name and the list of processors cannot be fixed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whippletree.harness import relay

Kind = Literal["auto", "bubblewrap", "none"]
HOME, WORK, PORT = "/agent", "/agent/work", 8080
_SOCKET, _OWN = "/gateway.sock", "/relay.py"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc")
_PASSWD = f"root:x:0:0:root:/:/bin/sh\nagent:x:1000:1000:agent:{HOME}:/bin/sh\n"
_GROUP = "root:x:0:\nagent:x:1000:\n"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one run may use, beside its time.

    `memory` limits the data of each process (RLIMIT_DATA): the address space cannot be limited, as Node.js reserves far
    more of it than it uses. `processes` counts all of the user's, and is not kept by the system for root.
    """

    memory: int | None = None  # bytes
    processes: int | None = None

    def settings(self, **more: object) -> dict[str, object]:
        """What `relay.py` is told."""
        return {"data": self.memory, "processes": self.processes, **more}


def found(kind: Kind) -> bool:
    """Whether to run inside bubblewrap.

    Raises:
        ValueError: it was asked for and is not installed.
    """
    there = sys.platform == "linux" and shutil.which("bwrap") is not None
    if kind == "bubblewrap" and not there:
        raise ValueError(
            "sandbox='bubblewrap' needs the program bwrap on the PATH, which is not there. Install the package "
            "bubblewrap of your system (Debian: apt-get install bubblewrap), or take sandbox='auto' to run without"
        )
    return there and kind != "none"


def started(
    command: Sequence[str], limits: Limits, *, scratch: Path | None, hidden: str, readable: Sequence[Path] = ()
) -> list[str]:
    """The arguments that run `command` within limits, inside a sandbox where there is a `scratch` folder.

    The environment is the one that these arguments are started with; the variable `hidden` stays outside.
    """
    own = [os.path.realpath(sys.executable), "-I", "-S"]
    if scratch is None:
        return [*own, relay.__file__, json.dumps(limits.settings()), *command]
    settings = json.dumps(limits.settings(port=PORT, socket=_SOCKET))
    return _inside([*own, _OWN, settings, *command], scratch, hidden, readable)


def _inside(command: Sequence[str], scratch: Path, hidden: str, readable: Sequence[Path]) -> list[str]:
    """The command inside bubblewrap.

    `scratch` holds the folder home/ (with work/ in it) and the socket gateway.sock; `readable` are more folders of the
    system that the command needs, seen at their own paths.
    """
    (scratch / "passwd").write_text(_PASSWD)
    (scratch / "group").write_text(_GROUP)
    binds: list[str | Path] = []
    for folder in _SYSTEM:
        # /bin is a link to usr/bin on most systems, and stays one
        where = ["--symlink", os.readlink(folder)] if os.path.islink(folder) else ["--ro-bind-try", folder]
        binds += [*where, folder]
    for extra in dict.fromkeys(str(path) for path in (*readable, *_python_folders())):
        binds += ["--ro-bind-try", extra, extra]
    binds += ["--ro-bind", scratch / "passwd", "/etc/passwd", "--ro-bind", scratch / "group", "/etc/group"]
    binds += ["--ro-bind", Path(relay.__file__), _OWN]
    binds += ["--bind", scratch / "home", HOME, "--bind", scratch / "gateway.sock", _SOCKET]
    return [
        *("bwrap", "--unshare-all", "--die-with-parent", "--uid", "1000", "--gid", "1000", "--hostname", "agent"),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
        *(str(part) for part in binds),
        *("--unsetenv", hidden, "--chdir", WORK, "--", *command),
    ]


def _python_folders() -> set[str]:
    """Where this Python is, which runs `relay.py` in the sandbox, unless the system's folders hold it."""
    return {folder for folder in (sys.base_prefix, sys.base_exec_prefix) if not folder.startswith("/usr")}
