"""A command inside bubblewrap: a read-only system, one scratch home, no network but the gateway, the same names always.

Inside, every run sees the same machine, so that prompts that name it are the same in every rollout: host `agent`, user
`agent` (1000), home `HOME`, work folder `WORK`, gateway at 127.0.0.1:`PORT`, an empty /tmp. The kernel's name and
the list of processors cannot be fixed; the clock can be, see `clock`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from whippletree.harness import relay

Kind = Literal["auto", "bubblewrap", "none"]
HOME, WORK, PORT = "/agent", "/agent/work", 8080
_SOCKET, _OWN = "/gateway.sock", "/relay.py"
PATH = "/usr/local/bin:/usr/bin:/bin"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "magic", "mime.types", "pki", "ssl/certs")
_OWN_ETC = {
    "passwd": f"root:x:0:0:root:/:/bin/sh\nagent:x:1000:1000:agent:{HOME}:/bin/sh\n",
    "group": "root:x:0:\nagent:x:1000:\n",
    "hosts": "127.0.0.1 localhost agent\n",
}


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
    """Whether to run inside bubblewrap. "auto" says yes where it is installed and may make namespaces.

    Raises:
        ValueError: "bubblewrap" was asked for, and it is not installed or may not make namespaces.
    """
    if kind == "none":
        return False
    why = lacking()
    if why and kind == "bubblewrap":
        raise ValueError(
            f"sandbox='bubblewrap' needs a working bwrap, but {why}. Install your system's package bubblewrap and "
            f"allow user namespaces (in a container they are often off), or take sandbox='auto' to run without"
        )
    return not why


def clock(begins: str, *, folders: Sequence[str] = _SYSTEM) -> dict[str, str]:
    """The variables with which programs see a clock that begins at `begins` and goes on, so that no day differs.

    It is libfaketime's, which statically linked programs do not see.

    Raises:
        ValueError: it is not installed.
    """
    places = sorted(path for folder in folders for path in Path(folder).glob("**/faketime/libfaketimeMT.so.1"))
    if not places:
        raise ValueError("a clock of its own needs your system's package faketime, which is not installed")
    return {"LD_PRELOAD": str(places[0]), "FAKETIME": f"@{begins}", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


@cache
def lacking() -> str:
    """Why there is no sandbox here; "" where there is."""
    bwrap = shutil.which("bwrap")
    if sys.platform != "linux" or bwrap is None:
        return "bwrap is not on the PATH"
    true = [bwrap, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    tried = subprocess.run(true, capture_output=True, text=True, timeout=30, check=False)
    return "" if tried.returncode == 0 else tried.stderr.strip() or f"it exited with {tried.returncode}"


def started(
    command: Sequence[str], limits: Limits, *, scratch: Path | None, hidden: str, readable: Sequence[Path] = ()
) -> list[str]:
    """The arguments that run `command` within limits, inside a sandbox where there is a `scratch` folder.

    The environment is the one that these arguments are started with; the variable `hidden` stays outside.
    """
    own = [own_python(), "-I", "-S"]
    if scratch is None:
        return [*own, relay.__file__, json.dumps(limits.settings()), *command]
    settings = json.dumps(limits.settings(port=PORT, socket=_SOCKET))
    return _inside([*own, _OWN, settings, *command], scratch, hidden, readable)


def _inside(command: Sequence[str], scratch: Path, hidden: str, readable: Sequence[Path]) -> list[str]:
    """The command inside bubblewrap.

    `scratch` holds the folder home/ (with work/ in it) and the socket gateway.sock; `readable` are more folders of the
    system that the command needs, seen at their own paths.
    """
    binds: list[str | Path] = []
    for folder in _SYSTEM:
        # /bin is a link to usr/bin on most systems, and stays one
        where = ["--symlink", os.readlink(folder)] if os.path.islink(folder) else ["--ro-bind-try", folder]
        binds += [*where, folder]
    for extra in dict.fromkeys(str(path) for path in (*readable, *_python_folders())):
        binds += ["--ro-bind-try", extra, extra]
    for name in _ETC:  # not all of /etc: the sandbox's user is ours, who may read more there than an agent should
        binds += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name, text in _OWN_ETC.items():
        (scratch / name).write_text(text)
        binds += ["--ro-bind", scratch / name, f"/etc/{name}"]
    binds += ["--ro-bind", Path(relay.__file__), _OWN]
    binds += ["--bind", scratch / "home", HOME, "--bind", scratch / "gateway.sock", _SOCKET]
    return [
        *(
            shutil.which("bwrap") or "bwrap",
            "--unshare-all",
            "--die-with-parent",
            "--uid",
            "1000",
            "--gid",
            "1000",
            "--hostname",
            "agent",
        ),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
        *(str(part) for part in binds),
        *("--unsetenv", hidden, "--chdir", WORK, "--", *command),
    ]


def own_python() -> str:
    """The Python of this process, not as a link: a sandbox shows where it is, and not the environment around it."""
    return os.path.realpath(sys.executable)


def _python_folders() -> set[str]:
    """Where this Python is, which runs `relay.py` in the sandbox, unless the system's folders hold it."""
    return {folder for folder in (sys.base_prefix, sys.base_exec_prefix) if not folder.startswith("/usr")}
