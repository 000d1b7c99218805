from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from whippletree.harness import sandbox

needs_bubblewrap = pytest.mark.skipif(bool(sandbox.lacking()), reason=f"no sandbox here: {sandbox.lacking()}")


def boxed(scratch: Path, *command: str, env: dict[str, str] | None = None, **limits: int) -> str:
    """What the command prints inside a sandbox; the socket leads nowhere."""
    (scratch / "home" / "work").mkdir(parents=True)
    (scratch / "gateway.sock").touch()
    arguments = sandbox.started(command, sandbox.Limits(**limits), scratch=scratch, hidden="MARK")
    own = {"PATH": sandbox.PATH, "MARK": "outside", **(env or {})}
    done = subprocess.run(arguments, env=own, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_none_is_none_and_auto_is_what_there_is():
    assert sandbox.found("none") is False
    assert sandbox.found("auto") is not bool(sandbox.lacking())


@pytest.mark.skipif(not sandbox.lacking(), reason="there is a sandbox here")
def test_a_sandbox_that_cannot_be_had_is_refused():
    with pytest.raises(ValueError, match="Install your system's package bubblewrap"):
        sandbox.found("bubblewrap")


@needs_bubblewrap
def test_every_machine_looks_the_same_from_inside(tmp_path: Path):
    said = boxed(tmp_path, "sh", "-c", "hostname; id -un; id -u; pwd; ls -A /tmp; cat /etc/hosts; echo ${MARK-none}")
    assert said == "agent\nagent\n1000\n/agent/work\n127.0.0.1 localhost agent\nnone\n"


@needs_bubblewrap
def test_only_the_home_can_be_written_and_it_is_the_scratch_folders(tmp_path: Path):
    script = "echo mine > note; echo no > /usr/note; echo no > /note; echo no > /etc/passwd; ls -A /tmp"
    said = boxed(tmp_path, "sh", "-c", script)
    assert (tmp_path / "home" / "work" / "note").read_text() == "mine\n"
    assert said.count("Read-only file system") == 2 and "/usr/note" in said and "/etc/passwd" in said
    assert not Path("/note").exists()


@needs_bubblewrap
def test_files_of_this_machine_are_not_there(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("of this machine")
    said = boxed(tmp_path, "sh", "-c", f"cat {secret} /etc/shadow /etc/hostname; ls /etc/ssl")
    assert "of this machine" not in said and said.count("No such file") >= 3
    assert "private" not in said


@needs_bubblewrap
def test_processes_of_this_machine_are_not_there(tmp_path: Path):
    # bubblewrap itself, relay.py and the shell: a handful, where this machine has more
    said = boxed(tmp_path, "sh", "-c", "ls -d /proc/[0-9]* | wc -l; echo $$")
    count, own = map(int, said.split())
    assert count <= 5 and own <= 5


@needs_bubblewrap
def test_there_is_no_network_but_a_loopback_of_its_own(tmp_path: Path):
    script = (
        "import os, socket\n"
        "print(sorted(name for _, name in socket.if_nameindex()))\n"
        "try: socket.create_connection(('192.0.2.1', 80), 5)\n"
        "except OSError as error: print(error.strerror)"
    )
    assert boxed(tmp_path, _python(), "-c", script) == "['lo']\nNetwork is unreachable\n"


@needs_bubblewrap
def test_a_limit_of_memory_holds_inside(tmp_path: Path):
    said = boxed(tmp_path, _python(), "-c", "bytearray(2**30)", memory=2**29)
    assert "MemoryError" in said


@needs_bubblewrap
def test_the_exit_code_is_the_commands(tmp_path: Path):
    (tmp_path / "home" / "work").mkdir(parents=True)
    (tmp_path / "gateway.sock").touch()
    for script, code in (("exit 3", 3), ("kill -9 $$", 137)):  # 128 + 9, as a shell says it
        arguments = sandbox.started(["sh", "-c", script], sandbox.Limits(), scratch=tmp_path, hidden="MARK")
        assert subprocess.run(arguments, env={"PATH": sandbox.PATH}, timeout=60, check=False).returncode == code


def test_without_a_sandbox_the_limits_hold_all_the_same():
    arguments = sandbox.started(
        [_python(), "-c", "bytearray(2**30)"], sandbox.Limits(memory=2**29), scratch=None, hidden="MARK"
    )
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "MemoryError" in done.stderr


def test_a_limit_above_the_systems_own_is_the_systems_own():
    limited = sandbox.started(["sh", "-c", "ulimit -d"], sandbox.Limits(memory=2**40), scratch=None, hidden="MARK")
    done = subprocess.run(
        ["sh", "-c", 'ulimit -d 1048576 && exec "$@"', "sh", *limited], capture_output=True, timeout=60, check=False
    )
    assert done.stdout == b"1048576\n"  # KiB


def _python() -> str:
    return sandbox.own_python()
