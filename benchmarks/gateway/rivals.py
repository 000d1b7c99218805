"""Each gateway that is compared, as a process that samples from the same upstream, and the routes of its sessions."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from benchmarks.gateway.load import Gateway, Route

ROOT = Path(__file__).parent.parent.parent
RIVALS = ROOT / ".venv-rivals"
KEY = f"sk-{secrets.token_hex(16)}"
CHAT = "/v1/chat/completions"
LIBRARIES = ("litellm", "agentlightning", "uvicorn", "uvloop", "httptools", "h11", "fastapi", "httpx", "aiohttp")
VERSIONS = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"


class Side(Protocol):
    """One gateway."""

    @property
    def streams(self) -> bool:
        """Whether it can stream."""

    @property
    def pid(self) -> int: ...

    def versions(self) -> dict[str, str]:
        """Of what stands between a request and the upstream."""

    def begin(self, *, stream: bool) -> None:
        """Before a round: how clients will ask."""

    def opened(self, names: Sequence[str]) -> contextlib.AbstractContextManager[list[Route]]: ...


@dataclass(frozen=True)
class Ours:
    """Our gateway, with whichever engine."""

    gateway: Gateway
    streams: bool = True

    @property
    def pid(self) -> int:
        return self.gateway.process.pid

    def versions(self) -> dict[str, str]:
        found: dict[str, str] = self.gateway.about["versions"]
        return found

    def begin(self, *, stream: bool) -> None:
        self.gateway.order(pace=0.0, streams=stream)

    def opened(self, names: Sequence[str]) -> contextlib.AbstractContextManager[list[Route]]:
        return self.gateway.opened(names)


class Served:
    """A rival's server, started in a folder of its own by a program of its environment, which listens on `port`.

    Raises:
        RuntimeError: it ended before it answered, or did not answer within `patience` seconds.
    """

    name, environment, streams = "", "", True
    port = 0

    def __init__(self, folder: Path, program: str, given: Sequence[str], *, health: str, patience: float = 120) -> None:
        self.log = folder / "log"
        command = [str(RIVALS / self.environment / "bin" / program), *given]
        quiet = {**os.environ, "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"}
        quiet |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DISABLE_ADMIN_UI": "True", "PYTHONWARNINGS": "ignore"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=quiet)
        end = time.monotonic() + patience
        while not self._answers(health):
            if self.process.poll() is not None or time.monotonic() > end:
                self.close()
                tail = self.log.read_text()[-2000:]
                raise RuntimeError(f"a rival must answer, but {' '.join(command)} did not:\n{tail}")
            time.sleep(0.2)

    @property
    def pid(self) -> int:
        return self.process.pid

    def versions(self) -> dict[str, str]:
        python = RIVALS / self.environment / "bin" / "python"
        all_of_it = json.loads(subprocess.check_output([python, "-c", VERSIONS]))
        about = subprocess.check_output([python, "-V"], text=True).split()[1]
        return {"python": about, **{name: all_of_it[name] for name in LIBRARIES if name in all_of_it}}

    def begin(self, *, stream: bool) -> None:
        """Nothing: it does what each request says."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def opened(self, names: Sequence[str]) -> contextlib.AbstractContextManager[list[Route]]:
        """Routes of new sessions. This one knows none."""
        return contextlib.nullcontext([Route(name, f"http://127.0.0.1:{self.port}{CHAT}", KEY) for name in names])

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Status and body of one request with the server's key."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _answers(self, path: str) -> bool:
        try:
            return self.ask("GET", path)[0] == 200
        except OSError:
            return False


class LiteLLM(Served):
    """LiteLLM's proxy: one worker, no database, a master key, no telemetry."""

    name, environment = "LiteLLM", "litellm"

    def __init__(self, folder: Path, upstream: str) -> None:
        model = {"model": "openai/dummy", "api_base": f"{upstream}/v1", "api_key": "none"}
        config: dict[str, Any] = {"model_list": [{"model_name": "dummy", "litellm_params": model}]}
        config |= {"general_settings": {"master_key": KEY}, "litellm_settings": {"telemetry": False}}
        (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
        self.port = free_port()
        given = ["--config", "config.yaml", "--host", "127.0.0.1", "--port", str(self.port), "--num_workers", "1"]
        super().__init__(folder, "litellm", given, health="/health/liveliness")


class AgentLightning(Served):
    """Agent Lightning's server with its store in memory. It refuses to stream."""

    name, environment, streams = "Agent Lightning", "agentlightning", False

    def __init__(self, folder: Path, upstream: str) -> None:
        self.port = free_port()
        given = ["host=127.0.0.1", f"port={self.port}", f"key={KEY}", "default_proxy.model_name=dummy"]
        super().__init__(folder, "agl-server", given, health="/healthz")
        self._done("POST", "/api/models", [{"model": "dummy", "endpoint": f"{upstream}/v1"}])

    @contextlib.contextmanager
    def opened(self, names: Sequence[str]) -> Iterator[list[Route]]:
        """A rollout each; deleted afterwards, so that it need not keep them all."""
        self._done("POST", "/api/rollouts", [{"input": {}, "rollout_id": name} for name in names])
        server = f"http://127.0.0.1:{self.port}/proxy/rollout"
        yield [Route(name, f"{server}/{name}/attempt/0/mode/train/openai{CHAT}", KEY) for name in names]
        for name in names:
            self._done("DELETE", f"/api/rollouts/{name}")

    def _done(self, method: str, path: str, body: Any = None) -> None:
        status, answer = self.ask(method, path, body)
        assert status < 300, (method, path, status, answer[:500])


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
