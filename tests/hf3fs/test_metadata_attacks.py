"""Spec row H11, as an attacker: who has no token, no manners, or a browser on this machine."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom.hf3fs.metadata.app import Service, Settings
from kvloom.hf3fs.metadata.base import Limits
from kvloom.hf3fs.metadata.embedded import Embedded
from kvloom.hf3fs.metadata.server import make_server
from tests.hf3fs.service import free_port

LIMIT_S = 1.0
CONNECTIONS = 20
BODY = b'{"keys": ["k"]}'


@contextlib.contextmanager
def serving(folder: Path, settings: Settings) -> Iterator[int]:
    """The server in a thread; its port."""
    port = free_port()
    server = make_server(Service(Embedded(folder / "s.db", Limits()), settings), "127.0.0.1", port)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < end, "the service did not start"
        time.sleep(0.02)
    yield port
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    settings = Settings(request_s=LIMIT_S, keep_alive_s=LIMIT_S, max_connections=CONNECTIONS)
    with serving(tmp_path_factory.mktemp("attacks"), settings) as port:
        yield port


def connect(port: int) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port), timeout=30)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def request(*more: bytes, path: bytes = b"/keys/batch_exists", host: bytes = b"localhost") -> bytes:
    lines = [b"POST %s HTTP/1.1" % path, b"Host: %s" % host, b"Content-Type: application/json"]
    return b"\r\n".join([*lines, *more, b"", b""])


def length(body: bytes) -> bytes:
    return b"Content-Length: %d" % len(body)


def rest(peer: socket.socket) -> bytes:
    """All that comes until the service closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := peer.recv(65536):
            parts.append(part)
    return b"".join(parts)


def alive(port: int) -> None:
    end = time.monotonic() + 10
    while True:  # closed connections are counted until the loop has seen them
        with contextlib.suppress(ConnectionError), connect(port) as peer:
            peer.sendall(request(length(BODY), b"Connection: close") + BODY)
            if rest(peer).endswith(b'{"exists":[false]}'):
                return
        assert time.monotonic() < end


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"POST /keys/batch_exists HT",
        request()[:-2],
        request(length(BODY)),
        request(length(BODY)) + BODY[:5],
        request(b"Transfer-Encoding: chunked"),
        request(b"Transfer-Encoding: chunked") + b"f\r\n",
        request(length(BODY), path=b"/clear"),
    ],
)
def test_who_never_ends_a_request_is_cut_off(port: int, start: bytes) -> None:
    with connect(port) as peer:
        began = time.monotonic()
        peer.sendall(start)
        rest(peer)
        assert time.monotonic() - began < 20 * LIMIT_S
    alive(port)


def test_who_drips_is_cut_off(port: int) -> None:
    """Each byte is on time, the request is not."""

    def drip(peer: socket.socket) -> None:
        peer.sendall(request(length(b" " * 10_000)))
        for _ in range(200):
            time.sleep(LIMIT_S / 10)
            peer.sendall(b" ")

    with connect(port) as peer, pytest.raises(ConnectionError):
        drip(peer)
    alive(port)


def test_idle_connections_end_and_busy_ones_do_not(port: int) -> None:
    with connect(port) as peer:
        for _ in range(10):
            peer.sendall(request(length(BODY)) + BODY)
            assert b'{"exists":[false]}' in peer.recv(65536)
            time.sleep(LIMIT_S / 4)
        assert rest(peer) == b""


def test_connections_are_limited_and_come_free(port: int) -> None:
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(connect(port)) for _ in range(3 * CONNECTIONS)]
        time.sleep(LIMIT_S / 4)
        refused = 0
        for peer in peers:
            peer.settimeout(0.01)
            try:
                refused += peer.recv(1) == b""
            except TimeoutError:
                pass
            except ConnectionError:
                refused += 1
        assert refused >= 2 * CONNECTIONS
    alive(port)


def test_who_reads_no_answers_is_not_kept(port: int) -> None:
    keys = b'{"keys": [' + b",".join([b'"k"'] * 60_000) + b"]}"
    with connect(port) as peer:
        peer.settimeout(5)
        with contextlib.suppress(TimeoutError, ConnectionError):
            for _ in range(1000):
                peer.sendall(request(length(keys)) + keys)
    alive(port)


@pytest.mark.parametrize(
    "head",
    [
        request(b"Content-Length: 5", b"Content-Length: 50"),
        request(length(BODY), b"Transfer-Encoding: chunked"),
        request(b"Transfer-Encoding: chunked", length(BODY)),
        request(b"Transfer-Encoding: xchunked", length(BODY)),
        request(b"Transfer-Encoding: chunked, identity"),
        request(b"Content-Length : 15"),
        request(b"Content-Length: +15"),
        request(b"Content-Length: 0x0f"),
        request(b"Content-Length: 15, 15"),
        request(b"Content-Length: -1"),
        request(b"Content-Length: " + b"9" * 30),
        request(b"Content-Length: " + b"9" * 6000),
        request(b"X: a\nContent-Length: 3"),
        request(b"X: a\rY: b", length(BODY)),
        request(b"X: \x00", length(BODY)),
    ],
)
def test_where_a_request_ends_is_never_in_doubt(port: int, head: bytes) -> None:
    """Else a proxy before the service could be made to see other requests than the service does."""
    hidden = request(length(b"{}"), path=b"/clear") + b"{}"
    with connect(port) as peer:
        peer.sendall(head + BODY + hidden)
        answers = rest(peer)
    assert b" 204 " not in answers, "the hidden request was obeyed"
    statuses = [line.split()[1] for line in answers.split(b"\r\n") if line.startswith(b"HTTP/1.1")]
    assert set(statuses) <= {b"400", b"413"}, answers
    alive(port)


@pytest.mark.parametrize(
    "host",
    [b"evil.example", b"evil.example:18000", b"localhost.evil.example", b"127.0.0.1.x", b"["],
)
@pytest.mark.parametrize("path", [b"/keys/batch_exists", b"/clear", b"/openapi.json"])
def test_a_web_page_whose_name_stands_for_this_machine_gets_nothing(
    port: int, host: bytes, path: bytes
) -> None:
    """DNS rebinding: to the browser the service is the page's own, so it may send JSON."""
    with connect(port) as peer:
        peer.sendall(request(length(BODY), b"Connection: close", path=path, host=host) + BODY)
        assert rest(peer).startswith(b"HTTP/1.1 403 ")
    alive(port)


@pytest.mark.parametrize(
    "host", [b"localhost", b"LOCALHOST:1", b"127.0.0.1:18000", b"[::1]:18000", b"10.0.0.7", b""]
)
def test_addresses_are_answered(port: int, host: bytes) -> None:
    with connect(port) as peer:
        peer.sendall(request(length(BODY), b"Connection: close", host=host) + BODY)
        assert rest(peer).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "given",
    [b"Bearer", b"Bearer ", b"Bearer \xff\xfe", b"Bearer " + b"x" * 60_000, b"Bearer t\x00ken"],
)
def test_odd_tokens_are_wrong_tokens(tmp_path: Path, given: bytes) -> None:
    with serving(tmp_path, Settings(token="t\u00f6ken")) as port, connect(port) as peer:
        head = request(length(BODY), b"Authorization: " + given, b"Connection: close")
        peer.sendall(head + BODY)
        assert rest(peer).split()[1] in (b"400", b"401")
        with connect(port) as other:
            good = b"Authorization: Bearer " + "t\u00f6ken".encode()
            other.sendall(request(length(BODY), good, b"Connection: close") + BODY)
            assert rest(other).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("number", [2**53 + 1, 2**63, 2**64, 10**400])
@pytest.mark.parametrize("field", ["page", "generation"])
def test_numbers_that_fit_nowhere_are_refused(port: int, number: int, field: str) -> None:
    page, generation = (number, 0) if field == "page" else (0, number)
    if field == "generation" and number < 2**63:
        return
    path = b"/v2/namespaces/ns/confirm"
    body = b'{"rank":0,"writer":"w","written":[["k",%d,%d]]}' % (page, generation)
    with connect(port) as peer:
        peer.sendall(request(length(body), b"Connection: close", path=path) + body)
        assert rest(peer).split()[1] in (b"400", b"422")
