"""``kvloom bench metadata``: our metadata service against vLLM's built-in one (spec row H12).

Both run as processes of their own and get the same requests, those of vLLM's client, over the same
connections: one thread keeps one request of each client under way. Rounds alternate between the
services, so that what else the machine does hits both. ``_cpu_us`` is the time a service had of the
cores for each request, the figure to read where others share the machine.
"""

from __future__ import annotations

import contextlib
import json
import re
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvloom.bench.report import Report
from kvloom.bench.services import running_service, serve_metadata
from kvloom.bench.ttft import Progress

LEAST_RATIO = 5.0
MOST_P99_MS = 5.0
_BATCH = 128
_PAGES = 100_000
_CLIENTS = (1, 16)
_LOOKUP_S = 0.6
_WRITES = {1: 40, 16: 160}  # batches in a round
_CONFIRM = b'{"rank":0,"confirmations":%s,"pages_to_release":[]}'
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)

# Without its access log, which would cost it a tenth.
_VLLM = """
import sys, uvicorn
from vllm.distributed.kv_transfer.kv_connector.v1.hf3fs.hf3fs_metadata_server import (
    Hf3fsMetadataServer,
)
uvicorn.run(
    Hf3fsMetadataServer().app, host="127.0.0.1", port=int(sys.argv[1]), access_log=False,
    log_level="warning",
)
"""

Latencies = list[float]  # seconds
Run = tuple[float, float, Latencies]  # keys a second, the service's CPU seconds a request


def run(rounds: int, progress: Progress) -> Report:
    """Look-ups of keys that are there, and allocate + confirm of new ones, 128 keys a request.

    Args:
        rounds: figures are medians over them; as many as the pages allow, since vLLM's service
            never evicts.
    """
    report = Report(f"Metadata service, {_BATCH} keys a request, {_PAGES:,} pages")
    measured: dict[tuple[str, str, int], list[Run]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="kvloom-bench-") as folder,
        contextlib.ExitStack() as up,
    ):
        progress("starting the services")
        services = {
            name: up.enter_context(running_service(command, Path(folder) / f"{name}.log"))
            for name, command in _commands(Path(folder)).items()
        }
        for port, _ in services.values():
            _post(port, "/rank/0/initialize", {"num_pages": _PAGES, "role": "worker"})
        for round_ in range(rounds):
            for name, service in services.items():
                progress(f"round {round_ + 1} of {rounds}: {name}")
                for clients in _CLIENTS:
                    for operation, figures in _round(*service, round_, clients).items():
                        measured.setdefault((operation, name, clients), []).append(figures)
    for operation in ("exists", "locations", "write"):
        for clients in _CLIENTS:
            _add(report, operation, clients, measured)
    return report


def _add(
    report: Report,
    operation: str,
    clients: int,
    measured: dict[tuple[str, str, int], list[Run]],
) -> None:
    rates: dict[str, float] = {}
    costs: dict[str, float] = {}
    for name in ("vllm", "kvloom", "kvloom_disk"):
        if (operation, name, clients) not in measured or (
            name == "kvloom_disk" and operation != "write"
        ):
            continue
        runs = measured[operation, name, clients]
        prefix = f"metadata.{operation}.{clients}.{name}"
        rates[name] = statistics.median(rate for rate, _, _ in runs)
        costs[name] = statistics.median(cost for _, cost, _ in runs)
        report.add(f"{prefix}_keys_per_s", rates[name], "keys/s")
        report.add(f"{prefix}_cpu_us", costs[name] * 1e6, "us")
        p50 = statistics.median(_percentile(times, 0.50) for _, _, times in runs)
        p99 = statistics.median(_percentile(times, 0.99) for _, _, times in runs)
        report.add(f"{prefix}_p50_ms", p50 * 1e3, "ms")
        lookup = name == "kvloom" and operation != "write" and clients == max(_CLIENTS)
        report.at_most(f"{prefix}_p99_ms", p99 * 1e3, "ms", MOST_P99_MS if lookup else None)
    ratio = rates["kvloom"] / rates["vllm"]
    report.at_least(f"metadata.{operation}.{clients}.ratio", ratio, "x", LEAST_RATIO)
    saved = costs["vllm"] / costs["kvloom"]
    report.add(f"metadata.{operation}.{clients}.cpu_ratio", saved, "x")


def _commands(folder: Path) -> dict[str, Callable[[int], list[str]]]:
    """Ours twice: the default durability, and one that outlives power cuts."""

    def ours(durability: str) -> Callable[[int], list[str]]:
        state = folder / f"{durability}.db"
        return lambda port: serve_metadata(state, port, "--durability", durability)

    return {
        "vllm": lambda port: [sys.executable, "-c", _VLLM, str(port)],
        "kvloom": ours("process"),
        "kvloom_disk": ours("disk"),
    }


def _round(port: int, pid: int, round_: int, clients: int) -> dict[str, Run]:
    batches = [
        [f"{round_:x}{clients:x}{batch:06x}{i:056x}" for i in range(_BATCH)]
        for batch in range(_WRITES[clients])
    ]
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(_Peer(port)) for _ in range(clients)]
        write = _costed(pid, lambda: _write(peers, batches))
        exists = [_request("/keys/batch_exists", {"keys": keys}) for keys in batches]
        where = [_request("/keys/get_locations", {"rank": 0, "keys": keys}) for keys in batches]
        return {
            "write": write,
            "exists": _costed(pid, lambda: _look_up(peers, exists, b"false")),
            "locations": _costed(pid, lambda: _look_up(peers, where, b"null")),
        }


def _costed(pid: int, work: Callable[[], tuple[float, Latencies]]) -> Run:
    before = _cpu_seconds(pid)
    rate, times = work()
    return rate, (_cpu_seconds(pid) - before) / len(times), times


def _cpu_seconds(pid: int) -> float:
    """What all threads of a process had of the cores."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


class _Peer:
    """A client's connection, one request under way at a time."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answer = b""
        self.sent = 0.0
        self.allocates = False  # what is under way

    def __enter__(self) -> _Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, request: bytes) -> None:
        self._answer = b""
        self.sent = time.perf_counter()
        self.socket.sendall(request)

    def receive(self) -> bytes | None:
        """The answer's body when it is whole."""
        part = self.socket.recv(1 << 18)
        if not part:
            raise RuntimeError("the service closed the connection")
        self._answer += part
        end = self._answer.find(b"\r\n\r\n")
        if end < 0:
            return None
        if not self._answer.startswith(b"HTTP/1.1 20"):
            raise RuntimeError(f"the service answered {self._answer!r}")
        length = _LENGTH.search(self._answer, 0, end)
        size = int(length[1]) if length else 0
        return self._answer[end + 4 :] if len(self._answer) >= end + 4 + size else None


def _request(path: str, body: dict[str, object]) -> bytes:
    return _post_json(path, json.dumps(body, separators=(",", ":")).encode())


def _post_json(path: str, content: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def _answers(peers: list[_Peer]) -> Iterator[tuple[_Peer, bytes]]:
    """Answers as they come, until every peer has been left without a request."""
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer.socket, selectors.EVENT_READ, peer)
        while any(peer.sent for peer in peers):
            for key, _ in selector.select():
                answered: _Peer = key.data
                body = answered.receive()
                if body is not None:
                    yield answered, body


def _look_up(peers: list[_Peer], requests: list[bytes], wrong: bytes) -> tuple[float, Latencies]:
    times: Latencies = []
    began = time.perf_counter()
    for number, peer in enumerate(peers):
        peer.send(requests[number % len(requests)])
    number = len(peers)
    for peer, body in _answers(peers):
        now = time.perf_counter()
        times.append(now - peer.sent)
        if wrong in body:
            raise RuntimeError(f"a key that was written is not found: {body[:200]!r}")
        peer.sent = 0.0
        if now - began < _LOOKUP_S:
            peer.send(requests[number % len(requests)])
            number += 1
    return len(times) * _BATCH / (time.perf_counter() - began), times


def _write(peers: list[_Peer], batches: list[list[str]]) -> tuple[float, Latencies]:
    times: Latencies = []
    waiting = iter(
        [
            _request("/keys/batch_allocate", {"rank": 0, "keys": [(key, "") for key in keys]})
            for keys in batches
        ]
    )

    def allocate(peer: _Peer) -> None:
        request = next(waiting, None)
        peer.sent, peer.allocates = 0.0, request is not None
        if request is not None:
            peer.send(request)

    began = time.perf_counter()
    for peer in peers:
        allocate(peer)
    for peer, body in _answers(peers):
        times.append(time.perf_counter() - peer.sent)
        if not peer.allocates:
            allocate(peer)
            continue
        # What was given is confirmed as it stands: the same pairs, the same JSON.
        pairs = body[body.index(b"[[") : body.rindex(b"]]") + 2]
        if b"-1]" in pairs:
            raise RuntimeError("no page was to be had")
        peer.allocates = False
        peer.send(_post_json("/keys/confirm_write", _CONFIRM % pairs))
    return len(batches) * _BATCH / (time.perf_counter() - began), times


def _post(port: int, path: str, body: dict[str, object]) -> None:
    with _Peer(port) as peer:
        peer.send(_request(path, body))
        while peer.receive() is None:
            pass


def _percentile(times: Latencies, share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]
