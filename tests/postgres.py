"""A PostgreSQL server for tests: in a temporary folder, reached through a socket in there, without a password."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

READY = 30.0  # seconds that a server may take to start
UNSAFE = ("fsync=off", "full_page_writes=off", "listen_addresses=", "max_connections=50")  # fast, and no network


def program(name: str) -> str | None:
    """The path of a program of PostgreSQL, also where Debian keeps it."""
    places = map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *places]))


class Server:
    """A server of an own cluster. It refuses to run as root, so there it runs as `nobody`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.user: dict[str, Any] = {}
        if os.geteuid() == 0:
            self.user = {"user": "nobody", "group": "nogroup", "extra_groups": ()}
            shutil.chown(folder, "nobody", "nogroup")
        self._schemas = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._run(
            "initdb", "--no-sync", "--auth=trust", "--username=tester", "--encoding=UTF8", f"--pgdata={self.data}"
        )

    def start(self) -> None:
        """Start it, and return when it can be asked."""
        settings = [part for setting in UNSAFE for part in ("-c", setting)]
        command = [program("postgres") or "", "-D", str(self.data), "-k", str(self.folder), *settings]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, **self.user)
        deadline = time.monotonic() + READY
        while subprocess.run([program("pg_isready") or "", "-q", "-h", str(self.folder)], check=False).returncode:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.05)

    def stop(self) -> None:
        """End it and all its connections at once; what was committed stays."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(timeout=READY)
            self._process = None

    def address(self) -> str:
        """A place in it where nothing is yet."""
        schema = f"place{next(self._schemas)}"
        self._run("psql", "-q", "-h", str(self.folder), "-U", "tester", "-c", f"CREATE SCHEMA {schema}", "postgres")
        return f"postgresql://tester@/postgres?host={self.folder}&options=-csearch_path%3D{schema}"

    def _run(self, name: str, *arguments: str) -> None:
        command = [program(name) or "", *arguments]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True, timeout=60, **self.user)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A running server."""
    missing = [name for name in ("initdb", "postgres", "pg_isready", "psql") if program(name) is None]
    if missing:
        pytest.skip(f"PostgreSQL is not installed here: no {missing[0]}; apt-get install postgresql")
    pytest.importorskip("psycopg")
    with tempfile.TemporaryDirectory(prefix="whippletree-postgres-") as folder:
        server = Server(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()
