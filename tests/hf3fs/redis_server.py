"""A real Redis (or Valkey) server on a free loopback port, its files in a folder."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.hf3fs.service import free_port

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(
    PROGRAM is None, reason="no redis-server here: apt-get install redis-server"
)


class RedisServer:
    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        assert PROGRAM is not None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        options += ["--appendonly", "yes", "--save", "", "--logfile", "redis.log"]
        self._process = subprocess.Popen([PROGRAM, *options], stdout=subprocess.DEVNULL)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.02)
        raise AssertionError((self._folder / "redis.log").read_text())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
