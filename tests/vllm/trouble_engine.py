"""An engine whose metadata service is in trouble: what test_trouble runs in its own process.

Prints a JSON line: for every trouble the answers meanwhile, the seconds that each scheduling step
spent in our hooks once the service was known to be down, and the answer afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hf3fs.front import Front, Trouble
from tests.hf3fs.service import ServiceProcess, running

from .hf3fs_engine import Hf3fsEngine
from .soak import VOCABULARY, make_tiny_model

REQUESTS = 6
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "get_kv_connector_stats",
)


def late(connection: socket.socket) -> None:
    time.sleep(0.4)
    connection.sendall(b'HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\n{"exists":[true]}')


def dripping(connection: socket.socket) -> None:
    for byte in b"HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\n" * 2:
        connection.sendall(bytes([byte]))
        time.sleep(0.01)


def garbage(connection: socket.socket) -> None:
    connection.sendall(b"\x00\xff\x16garbage\r\n\r\n" * 100)


def no_json(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\nno json")


def failing(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n")


def silent(connection: socket.socket) -> None:
    """Ends the connection without a word."""


class Watched:
    """An engine, its prompt, and the time that each step spends in our scheduler hooks."""

    def __init__(self, folder: Path, url: str) -> None:
        make_tiny_model(folder / "model")
        self.engine = Hf3fsEngine(
            str(folder / "model"), str(folder), url, skip_tokenizer_init=True, block_size=32
        )
        self.client = self.engine.connector._metadata_client
        self.prompt = [(7 * i * i + i) % (VOCABULARY - 2) + 2 for i in range(200)]
        self.steps: list[list[Any]] = []  # the service was known to be down, seconds
        scheduler = self.engine.core.scheduler
        schedule = scheduler.schedule

        def schedule_and_begin(*args: Any) -> Any:
            self.steps.append([not self.client.available, 0.0])
            return schedule(*args)

        scheduler.schedule = schedule_and_begin
        for name in HOOKS:
            setattr(self.engine.connector, name, self.timed(getattr(self.engine.connector, name)))

    def timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return hook(*args)
            finally:
                if self.steps:
                    self.steps[-1][1] += time.perf_counter() - began

        return call

    def go_through(self, trouble: contextlib.AbstractContextManager[Any]) -> dict[str, Any]:
        with trouble:
            self.steps.clear()
            answers = [self.engine.ask(self.prompt, tokens=6)[0] for _ in range(REQUESTS)]
            steps = list(self.steps)
        return {
            "tokens": [answer["tokens"] for answer in answers],
            "exact": [answer["exact"] for answer in answers],
            "before_s": [seconds for down, seconds in steps if not down],
            "after_s": [seconds for down, seconds in steps if down],
            "recovered": self.ask_for_a_hit(),
        }

    def ask_for_a_hit(self) -> dict[str, Any]:
        """The first answer from the store. On a busy machine even a good service may be late."""
        ends = time.monotonic() + 30
        while True:
            answer = self.engine.ask(self.prompt, tokens=6)[0]
            if answer["exact"] or time.monotonic() > ends:
                return answer
            time.sleep(0.2)


@contextlib.contextmanager
def stopped(service: ServiceProcess) -> Iterator[None]:
    os.kill(service.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(service.process.pid, signal.SIGCONT)


@contextlib.contextmanager
def killed(service: ServiceProcess) -> Iterator[None]:
    service.kill()
    try:
        yield
    finally:
        service.start()


def main() -> None:
    folder = Path(sys.argv[1])
    troubles: list[Trouble] = [late, dripping, garbage, no_json, failing, silent]
    with running(folder / "state") as service, contextlib.closing(Front(service.port)) as front:
        watched = Watched(folder, front.url)
        found: dict[str, Any] = {"cold": watched.engine.cold(watched.prompt, tokens=6)[0]}
        watched.engine.ask(watched.prompt, tokens=6)
        found["hit"] = watched.ask_for_a_hit()
        found["troubles"] = {
            "stopped": watched.go_through(stopped(service)),
            "killed": watched.go_through(killed(service)),
            **{one.__name__: watched.go_through(front.troubled(one)) for one in troubles},
        }
        found["left"] = watched.engine.left
    print("RESULT" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
