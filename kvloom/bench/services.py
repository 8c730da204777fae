"""Services that benchmarks start, as processes of their own on free ports of this machine."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_START_S = 120.0


def serve_metadata(state: Path, port: int, *options: str) -> list[str]:
    """The command that runs our metadata service."""
    command = [sys.executable, "-m", "kvloom.cli.main", "serve-metadata", "--state", str(state)]
    return [*command, "--port", str(port), *options]


@contextlib.contextmanager
def running_service(command: Callable[[int], list[str]], log: Path) -> Iterator[tuple[int, int]]:
    """Its port and process id.

    Args:
        command: what to run, given the port.
        log: where its output goes.

    Raises:
        RuntimeError: it ended, or did not listen in time; the text has its output.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with log.open("wb") as out:
        process = subprocess.Popen(command(port), stdout=out, stderr=out)
    try:
        end = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{' '.join(command(port))} did not start: {log.read_text()}")
            time.sleep(0.1)
        yield port, process.pid
    finally:
        process.kill()
        process.wait()
