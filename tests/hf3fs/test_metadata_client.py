"""Our client: every operation; a service that is gone, hangs, drips, answers garbage (H16)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from kvloom.hf3fs.metadata.base import Location, Status, Written
from kvloom.hf3fs.metadata.client import MetadataClient, NoAnswer
from tests.hf3fs.service import ServiceProcess, free_port, running

LOOKUP_S = 0.3


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with running(tmp_path / "state.db", token="s3cret") as service:
        yield service


@contextlib.contextmanager
def client_of(url: str, **more: object) -> Iterator[MetadataClient]:
    settings = {"token": "s3cret", "probe_interval_s": 0.1, **more}
    client = MetadataClient(url, "ns", "engine-1", **settings)  # type: ignore[arg-type]
    try:
        yield client
    finally:
        client.close()


def wait_until(true: Callable[[], bool], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def assert_nobody_is_asked(client: MetadataClient) -> None:
    for call in (
        lambda: client.exists(["k"]),
        lambda: client.locations(0, ["k"]),
        lambda: client.allocate(0, ["k"]),
        lambda: client.confirm(0, [Written("k", 0, 0)]),
        lambda: client.release(0, [Written("k", 0, 0)]),
        lambda: client.touch(["k"]),
        lambda: client.delete(["k"]),
        lambda: client.initialize(0, 8, 1),
        client.clear,
        client.stats,
        client.audit,
        client.namespaces,
    ):
        with mock.patch.object(client, "_exchange", side_effect=AssertionError("it was asked")):
            answer = call()
        assert isinstance(answer, NoAnswer)
        assert answer.status == 0


def test_every_operation(service: ServiceProcess) -> None:
    with client_of(service.url, lookup_timeout_s=5.0, timeout_s=10.0) as client:
        leases = client.initialize(0, 16, 1)
        assert not isinstance(leases, NoAnswer)
        assert leases.write_lease_s == 60.0
        grants = client.allocate(0, ["a", "b", "c"])
        assert not isinstance(grants, NoAnswer)
        assert [grant.status for grant in grants] == [Status.WRITE] * 3
        written = [
            Written(key, grant.page, grant.generation)
            for key, grant in zip("abc", grants, strict=True)
        ]
        assert client.confirm(0, written[:2]) == [True, True]
        assert client.release(0, written[2:]) == 1
        assert client.exists(["a", "c", "b"], lease=True) == [True, False, True]
        where = [Location(item.page, item.generation) for item in written]
        assert client.locations(0, ["b", "c"]) == [where[1], None]
        assert client.touch(["a", "b", "c"]) == 2
        assert client.delete(["b"]) == 1
        stats = client.stats()
        assert not isinstance(stats, NoAnswer)
        assert (stats.complete, stats.hits) == (1, 1)
        audit = client.audit()
        assert not isinstance(audit, NoAnswer)
        assert (audit.confirmed, audit.cooling, audit.leaked) == (1, 1, 0)
        assert client.namespaces() == ["ns"]
        assert client.clear() is True
        assert client.namespaces() == []


def test_a_refusal_tells_why_and_opens_no_breaker(service: ServiceProcess) -> None:
    with client_of(service.url, lookup_timeout_s=5.0) as client:
        unknown = client.exists(["k"])
        assert isinstance(unknown, NoAnswer)
        assert unknown.status == 404
        client.initialize(0, 16, 1)
        conflict = client.initialize(0, 8, 1)
        assert isinstance(conflict, NoAnswer)
        assert conflict.status == 409
        assert "16 pages" in conflict.reason
        assert client.available
    with client_of(service.url, token="wrong", lookup_timeout_s=5.0) as client:
        refused = client.exists(["k"])
        assert isinstance(refused, NoAnswer)
        assert refused.status == 401


def test_a_forgotten_namespace_is_initialized_again(service: ServiceProcess) -> None:
    with client_of(service.url, lookup_timeout_s=5.0) as client:
        client.initialize(0, 16, 1)
        client.clear()
        assert client.exists(["k"]) == [False]


def test_a_service_that_is_gone_and_comes_back(service: ServiceProcess) -> None:
    with client_of(service.url, lookup_timeout_s=1.0) as client:
        client.initialize(0, 16, 1)
        assert client.exists(["k"]) == [False]
        service.kill()
        assert isinstance(client.exists(["k"]), NoAnswer)
        assert_nobody_is_asked(client)
        service.start()
        wait_until(lambda: client.available)
        assert client.exists(["k"]) == [False]


def test_a_restart_between_two_calls_is_not_noticed(service: ServiceProcess) -> None:
    with client_of(service.url, lookup_timeout_s=5.0) as client:
        client.initialize(0, 16, 1)
        service.kill()
        service.start()
        assert client.exists(["k"]) == [False]


def test_a_service_that_hangs_costs_one_deadline(service: ServiceProcess) -> None:
    with client_of(service.url, lookup_timeout_s=LOOKUP_S) as client:
        client.initialize(0, 16, 1)
        os.kill(service.process.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert isinstance(client.exists(["k"]), NoAnswer)
            assert time.monotonic() - began < 5 * LOOKUP_S
            assert_nobody_is_asked(client)
        finally:
            os.kill(service.process.pid, signal.SIGCONT)
        wait_until(lambda: client.available)


@contextlib.contextmanager
def answering(answer: bytes, pause_s: float = 0.0) -> Iterator[str]:
    """A server that sends the same to everybody; byte by byte with pauses, or at once."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        done = threading.Event()

        def talk(peer: socket.socket) -> None:
            with peer, contextlib.suppress(OSError):
                peer.recv(65536)
                if not pause_s:
                    peer.sendall(answer)
                    return
                for i in range(len(answer)):
                    peer.sendall(answer[i : i + 1])
                    if done.wait(pause_s):
                        return

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    threading.Thread(target=talk, args=(peer,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        done.set()


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\xff\x16garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n{",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        ok(b"no json"),
        ok(b'{"exists": [true, true]}'),
        ok(b'{"exists": "yes"}'),
        ok(b"\xff\xfe"),
        ok(b"[" * 100_000),
    ],
)
def test_garbage_is_no_answer(answer: bytes) -> None:
    # No probe meanwhile: some of these would do as an answer to it.
    with (
        answering(answer) as url,
        client_of(url, lookup_timeout_s=1.0, probe_interval_s=3600) as client,
    ):
        assert isinstance(client.exists(["k"]), NoAnswer)
        assert_nobody_is_asked(client)


def test_dripping_bytes_do_not_stretch_the_deadline() -> None:
    with (
        answering(ok(b'{"exists": [true]}'), pause_s=0.1) as url,
        client_of(url, lookup_timeout_s=LOOKUP_S) as client,
    ):
        began = time.monotonic()
        assert isinstance(client.exists(["k"]), NoAnswer)
        assert 0.1 < time.monotonic() - began < 5 * LOOKUP_S
        assert_nobody_is_asked(client)


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "http://no.such.host.invalid:1", "x"])
def test_an_address_where_nobody_is(url: str) -> None:
    with client_of(url.format(port=free_port())) as client:
        assert isinstance(client.exists(["k"]), NoAnswer)
        assert_nobody_is_asked(client)


def test_threads_share_a_client(service: ServiceProcess) -> None:
    with client_of(service.url, lookup_timeout_s=10.0, timeout_s=10.0) as client:
        client.initialize(0, 4096, 1)
        wrong: list[object] = []

        def work(name: int) -> None:
            for i in range(20):
                keys = [f"{name}-{i}-{j}" for j in range(8)]
                grants = client.allocate(0, keys)
                if isinstance(grants, NoAnswer):
                    wrong.append(grants)
                    return
                written = [
                    Written(k, g.page, g.generation) for k, g in zip(keys, grants, strict=True)
                ]
                if client.confirm(0, written) != [True] * 8 or client.exists(keys) != [True] * 8:
                    wrong.append(keys)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        audit = client.audit()
        assert not isinstance(audit, NoAnswer)
        assert (audit.confirmed, audit.leaked, audit.twice) == (12 * 20 * 8, 0, 0)


def test_a_closed_client_has_no_answers(service: ServiceProcess) -> None:
    with client_of(service.url, lookup_timeout_s=5.0) as client:
        client.initialize(0, 16, 1)
        client.close()
        client.close()
        assert_nobody_is_asked(client)
