"""The service as a process of its own, as users run it."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

START_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServiceProcess:
    """``kvloom serve-metadata`` on a free port; ``options`` are its command line's.

    Its log lies beside ``state``, which is its file unless it keeps its state in Redis.
    """

    def __init__(self, state: Path, *options: str, token: str = "") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "kvloom.cli.main", "serve-metadata"]
        self._command += ["--port", str(self.port), *options]
        if "--redis" not in options:
            self._command += ["--state", str(state)]
        self._log = state.with_suffix(".log")
        self._environment = {**os.environ, "KVLOOM_METADATA_TOKEN": token}
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, env=self._environment, stderr=log)
        end = time.monotonic() + START_S
        while True:
            # Not httpx, which loads certificates for each request: tens of milliseconds.
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                urllib.request.urlopen(f"{self.url}/healthz", timeout=5) as answer,
            ):
                assert answer.status == 200
                return
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise AssertionError(f"the service did not start: {self.log()}")
            time.sleep(0.02)

    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_S)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, **more)


@contextlib.contextmanager
def running(state: Path, *options: str, token: str = "") -> Iterator[ServiceProcess]:
    service = ServiceProcess(state, *options, token=token)
    try:
        yield service
    finally:
        service.kill()
