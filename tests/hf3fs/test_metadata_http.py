"""Spec row H11: who gets in, what is refused and how; health, metrics, OpenAPI, the end."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvloom.cli.main import app
from kvloom.hf3fs.metadata.app import Service, Settings
from kvloom.hf3fs.metadata.base import Limits
from kvloom.hf3fs.metadata.embedded import Embedded
from kvloom.hf3fs.metadata.endpoints import ENDPOINTS, MAX_KEYS
from kvloom.hf3fs.metadata.server import UnsafeAddressError, is_loopback, make_server
from kvloom.hf3fs.metadata.shortcut import read_head
from tests.hf3fs.service import ServiceProcess, free_port, running

TOKEN = "s3cret-" + "x" * 32
GOOD = {"Authorization": f"Bearer {TOKEN}"}
NS = "/v2/namespaces/ns"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running(tmp_path_factory.mktemp("http") / "state.db", token=TOKEN) as service:
        geometry = {"num_pages": 64, "world_size": 1}
        for path in (f"{NS}/ranks/0/initialize", "/rank/0/initialize"):
            service.post(path, geometry, headers=GOOD).raise_for_status()
        yield service


def alive(service: ServiceProcess) -> None:
    assert service.post(f"{NS}/exists", {"keys": ["k"]}, headers=GOOD).json() == {"exists": [False]}


# Who gets in


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "no.such.host.invalid"])
def test_off_loopback_a_token_is_needed(tmp_path: Path, host: str) -> None:
    command = [sys.executable, "-m", "kvloom.cli.main", "serve-metadata", "--host", host]
    environment = {**os.environ, "KVLOOM_METADATA_TOKEN": " "}
    done = subprocess.run(
        [*command, "--port", "0", "--state", str(tmp_path / "s.db")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "give a token, or use 127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr


def test_options_that_can_not_be_meant_are_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for options, text in (
        (["--token-file", tmp_path / "missing"], "No such file"),
        (["--token-file", tmp_path / "empty"], "is empty"),
        (["--redis", "redis://127.0.0.1:1/0", "--state", tmp_path / "s.db"], "one of them"),
    ):
        result = CliRunner().invoke(app, ["serve-metadata", *map(str, options)])
        assert result.exit_code in (1, 2)
        assert text in " ".join(result.output.replace("│", " ").split())
        assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_backend_that_is_away_is_told_at_the_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "kvloom.cli.main", "serve-metadata"]
    command += ["--port", str(free_port()), "--redis", f"redis://127.0.0.1:{free_port()}/0"]
    with log.open("w") as output, subprocess.Popen(command, stderr=output) as process:
        ends = time.monotonic() + 60
        while "until that ends" not in log.read_text() and time.monotonic() < ends:
            time.sleep(0.05)
        process.terminate()
    assert len([line for line in log.read_text().splitlines() if "WARNING" in line]) == 1
    assert "Redis: " in log.read_text()
    assert "Traceback" not in log.read_text()


def test_loopback_and_tokens(tmp_path: Path) -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "::", ""))
    store = Embedded(tmp_path / "s.db", Limits())
    with pytest.raises(UnsafeAddressError):
        make_server(Service(store, Settings()), "0.0.0.0", 0)
    make_server(Service(store, Settings(token="t")), "0.0.0.0", 0)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": TOKEN},
        {"Authorization": f"bearer {TOKEN}"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Basic {TOKEN}"},
        {"X-Token": TOKEN},
    ],
)
def test_nothing_works_without_the_token(service: ServiceProcess, header: dict[str, str]) -> None:
    for endpoint in ENDPOINTS:
        path = endpoint.path.replace("{namespace}", "ns").replace("{rank}", "0")
        answer = httpx.request(endpoint.method, service.url + path, json={}, headers=header)
        assert answer.status_code == 401, endpoint.name
        assert answer.headers["www-authenticate"] == "Bearer"
        assert TOKEN not in answer.text
    for path in ("/metrics", "/openapi.json", "/nothing"):
        assert httpx.get(service.url + path, headers=header).status_code == 401
    assert httpx.get(f"{service.url}/healthz", headers=header).json() == {"status": "ok"}
    alive(service)


def test_clear_needs_the_token(service: ServiceProcess) -> None:
    assert service.post("/clear", {}).status_code == 401
    assert httpx.delete(f"{service.url}{NS}").status_code == 401
    alive(service)


# What is refused


def big(count: int) -> list[str]:
    return [f"k{i}" for i in range(count)]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/keys/batch_exists", {"keys": "k"}, 422),
        ("/keys/batch_exists", {"keys": [1]}, 422),
        ("/keys/batch_exists", {"keys": [None]}, 422),
        ("/keys/batch_exists", {"keys": [""]}, 422),
        ("/keys/batch_exists", {"keys": ["k" * 513]}, 422),
        ("/keys/batch_exists", {"keys": big(MAX_KEYS + 1)}, 422),
        ("/keys/batch_exists", {}, 422),
        ("/keys/batch_exists", [], 422),
        ("/keys/batch_exists", 7, 422),
        ("/keys/get_locations", {"rank": "0", "keys": []}, 422),
        ("/keys/get_locations", {"rank": -1, "keys": []}, 422),
        ("/keys/get_locations", {"rank": 5, "keys": []}, 404),
        ("/keys/get_locations", {"rank": 10**30, "keys": []}, 422),
        ("/keys/get_locations", {"rank": 0.5, "keys": []}, 422),
        ("/keys/get_locations", {"rank": True, "keys": []}, 422),
        ("/keys/batch_allocate", {"rank": 0, "keys": ["k"]}, 422),
        ("/keys/batch_allocate", {"rank": 0, "keys": [["k"]]}, 422),
        ("/keys/batch_allocate", {"rank": 9, "keys": [["k", ""]]}, 404),
        ("/keys/confirm_write", {"rank": 0, "confirmations": [["k", -1]]}, 422),
        ("/keys/confirm_write", {"rank": 0, "confirmations": [["k", "0"]]}, 422),
        ("/keys/confirm_write", {"rank": 0, "confirmations": [], "pages_to_release": [-1]}, 422),
        ("/rank/0/initialize", {"num_pages": 0}, 422),
        ("/rank/0/initialize", {"num_pages": -5}, 422),
        ("/rank/0/initialize", {"num_pages": 10**15}, 409),
        ("/rank/0/initialize", {"num_pages": 65}, 409),
        ("/rank/7/initialize", {"num_pages": 64}, 422),
        ("/rank/-1/initialize", {"num_pages": 64}, 422),
        ("/rank/99999999999999999999/initialize", {"num_pages": 64}, 422),
        ("/rank/x/initialize", {"num_pages": 64}, 422),
        ("/rank/0/initialize", {"num_pages": 64, "role": "king"}, 422),
        (f"{NS}/allocate", {"rank": 0, "keys": ["k"]}, 422),
        (f"{NS}/allocate", {"rank": 0, "writer": "", "keys": ["k"]}, 422),
        (f"{NS}/allocate", {"rank": 0, "writer": "w" * 129, "keys": ["k"]}, 422),
        (f"{NS}/allocate", {"rank": 0, "writer": "w", "keys": ["k"], "more": 1}, 422),
        (f"{NS}/release", {"rank": 0, "writer": "w", "written": [["", 0, 0]]}, 422),
        (f"{NS}/confirm", {"rank": 0, "writer": "w", "written": [["k", "0", 0]]}, 422),
        (f"{NS}/ranks/1/initialize", {"num_pages": 64, "world_size": 1}, 422),
        (f"{NS}/ranks/0/initialize", {"num_pages": 64, "world_size": 2}, 409),
        ("/v2/namespaces/new/ranks/0/initialize", {"num_pages": 10**12, "world_size": 1}, 422),
        ("/v2/namespaces/new/ranks/0/initialize", {"num_pages": 1, "world_size": 10**9}, 422),
        ("/v2/namespaces/nobody/exists", {"keys": ["k"]}, 404),
    ],
)
def test_bad_requests_are_told_what_is_wrong(
    service: ServiceProcess, path: str, body: Any, status: int
) -> None:
    answer = service.post(path, body, headers=GOOD)
    assert answer.status_code == status, answer.text
    assert len(answer.json()["detail"]) > 10
    alive(service)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe\x00",
        b'{"keys": ["\\ud800"]}',
        b'{"keys": ["\xff"]}',
        b"[" * 100_000,
        b'{"keys": ' + b"[" * 50_000,
        b"NaN",
    ],
)
def test_what_is_not_json_is_refused(service: ServiceProcess, body: bytes) -> None:
    headers = {**GOOD, "Content-Type": "application/json"}
    for path in ("/keys/batch_exists", f"{NS}/delete"):
        answer = httpx.post(service.url + path, content=body, headers=headers)
        assert answer.status_code in (400, 422), answer.text
        assert answer.json()["detail"]
    alive(service)


def test_a_form_of_a_web_page_can_not_reach_it(service: ServiceProcess) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {**GOOD, "Content-Type": kind}
        answer = httpx.post(f"{service.url}/clear", content=b"{}", headers=headers)
        assert answer.status_code == 415
    alive(service)


def test_long_bodies_are_refused_before_they_are_read(service: ServiceProcess) -> None:
    body = b" " * (9 * 1024 * 1024)
    headers = {**GOOD, "Content-Type": "application/json"}
    for path in (f"{NS}/exists", f"{NS}/allocate"):
        with socket.create_connection(("127.0.0.1", service.port), timeout=10) as peer:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            peer.sendall(head.encode())
            assert peer.recv(4096).startswith(b"HTTP/1.1 413"), "before a byte of it was sent"

        def chunks() -> Iterator[bytes]:
            for first in range(0, len(body), 65536):
                yield body[first : first + 65536]

        try:
            answer = httpx.post(service.url + path, content=chunks(), headers=headers)
            assert answer.status_code == 413
        except httpx.TransportError:
            pass  # closed while we still sent: refused as well
    alive(service)


@pytest.mark.parametrize(
    "name",
    [
        "..",
        ".",
        "%2e%2e",
        "..%2f..%2fetc",
        "a%2fb",
        "%00",
        "a%00",
        "-a",
        "a b",
        "%20",
        "ä",
        "a" * 129,
        "%0d%0aX-Evil:1",
        "kvloom:x",
        "*",
        "{ns}",
    ],
)
def test_namespaces_are_names_not_paths(service: ServiceProcess, name: str) -> None:
    geometry = json.dumps({"num_pages": 1, "world_size": 1}).encode()
    raw = name.encode("latin-1").replace(b" ", b"%20")
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as peer:
        head = b"POST /v2/namespaces/%s/ranks/0/initialize HTTP/1.1\r\nHost: x\r\n" % raw
        head += b"Authorization: Bearer %s\r\nContent-Type: application/json\r\n" % TOKEN.encode()
        peer.sendall(head + b"Content-Length: %d\r\n\r\n%s" % (len(geometry), geometry))
        status = int(peer.recv(4096).split()[1])
    assert status in (400, 404, 405, 422)
    assert set(httpx.get(f"{service.url}/v2/namespaces", headers=GOOD).json()["namespaces"]) == {
        "default",
        "ns",
    }


def test_odd_keys_are_keys(service: ServiceProcess) -> None:
    keys = ["../../etc/passwd", "\x00", "\n", "ключ", "🔑" * 100, '"; drop table entries; --', "{}"]
    body = {"rank": 0, "writer": "w", "keys": keys}
    results = service.post(f"{NS}/allocate", body, headers=GOOD).json()["results"]
    written = [[key, *result[1:]] for key, result in zip(keys, results, strict=True)]
    body = {"rank": 0, "writer": "w", "written": written}
    assert service.post(f"{NS}/confirm", body, headers=GOOD).json() == {"confirmed": [True] * 7}
    found = service.post(f"{NS}/exists", {"keys": [*keys, "passwd"]}, headers=GOOD).json()
    assert found["exists"] == [True] * 7 + [False]
    service.post(f"{NS}/delete", {"keys": keys}, headers=GOOD).raise_for_status()


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"\x00" * 9000, b"A" * 99_999]
)
def test_what_is_not_http_harms_nobody(service: ServiceProcess, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as peer:
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        peer.settimeout(10)
        try:
            while peer.recv(4096):
                pass
        except (ConnectionError, TimeoutError):
            pass
    alive(service)


def test_wrong_paths_and_methods(service: ServiceProcess) -> None:
    assert httpx.get(f"{service.url}/nothing", headers=GOOD).status_code == 404
    assert httpx.get(f"{service.url}/keys/batch_exists", headers=GOOD).status_code == 405
    assert httpx.delete(f"{service.url}/clear", headers=GOOD).status_code == 405


# The short way of look-ups


def test_the_short_way_answers_as_the_app_does(service: ServiceProcess) -> None:
    """Chunked bodies go through the app, others the short way."""
    headers = {**GOOD, "Content-Type": "application/json"}
    bodies: list[Any] = [
        {"keys": ["a"]},
        {"rank": 0, "keys": ["a"]},
        {"keys": 1},
        {"rank": 9, "keys": []},
    ]
    for path in (
        "/keys/batch_exists",
        "/keys/get_locations",
        f"{NS}/exists",
        f"{NS}/locations",
        f"{NS}/touch",
    ):
        for body in bodies:
            content = json.dumps(body).encode()
            short = httpx.post(service.url + path, content=content, headers=headers)
            long = httpx.post(service.url + path, content=iter([content]), headers=headers)
            assert short.request.headers.get("content-length")
            assert not long.request.headers.get("content-length")
            assert (short.status_code, short.json()) == (long.status_code, long.json())
            assert short.headers["content-type"] == long.headers["content-type"]


def raw(path: str, body: dict[str, Any], *more: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKEN}", *more]
    lines += ["Content-Type: application/json", f"Content-Length: {len(content)}", "", ""]
    return "\r\n".join(lines).encode() + content


def test_which_requests_go_the_short_way(tmp_path: Path) -> None:
    service = Service(Embedded(tmp_path / "s.db", Limits()), Settings(token=TOKEN))

    def goes(request: bytes) -> bool:
        return read_head(service, request[: request.index(b"\r\n\r\n") + 4]) is not None

    for endpoint in ENDPOINTS:
        path = endpoint.path.replace("{namespace}", "ns").replace("{rank}", "0")
        assert goes(raw(path, {})) == bool(endpoint.kind), endpoint.name
    good = raw(f"{NS}/exists", {"keys": ["k"]})
    assert goes(good)
    for wrong, instead in [
        (b"POST", b"GET"),
        (b"1.1", b"1.0"),
        (b"ns/exists", b"ns/exists?a=1"),
        (b"ns/exists", b"a%2fb/exists"),
        (TOKEN.encode(), b"other"),
        (b"application/json", b"text/plain"),
        (b"Content-Length", b"X-Length"),
        (b"Content-Length: ", b"Content-Length: 9999999"),
        (b"Host", b"Transfer-Encoding: chunked\r\nHost"),
        (b"Host", b"Expect: 100-continue\r\nHost"),
        (b"Host", b"Connection: Upgrade\r\nUpgrade: h2c\r\nHost"),
        (b"Host: x", b"Host : x"),
    ]:
        assert wrong in good
        assert not goes(good.replace(wrong, instead)), instead


@pytest.mark.parametrize("seed", range(6))
def test_requests_are_answered_in_order_however_they_are_cut(
    service: ServiceProcess, seed: int
) -> None:
    """Look-ups go a short way; they must not overtake what waits for the journal."""
    random = Random(seed)
    exists = raw(f"{NS}/exists", {"keys": ["p"]})
    allocate = raw(f"{NS}/allocate", {"rank": 0, "writer": "w", "keys": ["p"]})
    stats = raw(f"{NS}/stats", {}).replace(b"POST", b"GET")
    marks = {exists: b"exists", allocate: b"results", stats: b"world_size"}
    sent = [exists, allocate, exists, *random.choices(list(marks), k=57)]
    stream = b"".join(sent)
    cuts = sorted(random.sample(range(1, len(stream)), [0, 3, 30, 300, 300, 300][seed]))
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for first, last in itertools.pairwise([0, *cuts, len(stream)]):
            peer.sendall(stream[first:last])
            time.sleep(0.001)  # else the kernel joins the parts again
        data = b""
        while part := peer.recv(65536):
            data += part
            if data.count(b"HTTP/1.1 200") == len(sent) and data.endswith(b"}"):
                break
    answers = data.split(b"HTTP/1.1 ")[1:]
    assert [marks[request] in answer for request, answer in zip(sent, answers, strict=True)] == (
        [True] * len(sent)
    )


# What it tells


def test_metrics_count_requests_and_pages(service: ServiceProcess) -> None:
    service.post(f"{NS}/locations", {"rank": 0, "keys": ["a", "b"]}, headers=GOOD)
    text = httpx.get(f"{service.url}/metrics", headers=GOOD).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['kvloom_metadata_pages{namespace="ns",rank="0",state="free"}']) > 0
    done = 'kvloom_metadata_requests_total{operation="locations",status="2xx"}'
    assert float(lines[done]) >= 1
    assert float(lines['kvloom_metadata_misses{namespace="ns"}']) >= 2
    assert 'kvloom_metadata_request_seconds_bucket{le="0.001",operation="locations"}' in lines


def test_openapi_describes_every_endpoint(service: ServiceProcess) -> None:
    api = httpx.get(f"{service.url}/openapi.json", headers=GOOD).json()
    assert api["openapi"].startswith("3.")
    for endpoint in ENDPOINTS:
        about = api["paths"][endpoint.path][endpoint.method.lower()]
        assert len(about["summary"]) > 10
        assert {"4XX", "503"} < set(about["responses"])
    text = json.dumps(api)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in api["components"]["schemas"]


def test_stats_and_audit(service: ServiceProcess) -> None:
    stats = httpx.get(f"{service.url}{NS}/stats", headers=GOOD).json()
    assert stats["world_size"] == 1
    assert stats["ranks"][0]["pages"] == 64
    audit = httpx.get(f"{service.url}{NS}/audit", headers=GOOD).json()
    assert audit["leaked"] == audit["twice"] == 0
    assert audit["free"] + audit["allocated"] + audit["confirmed"] + audit["cooling"] == 64


# The end


def test_it_ends_gracefully_and_answers_what_it_has_begun(tmp_path: Path) -> None:
    with running(tmp_path / "state.db") as service:
        service.post(f"{NS}/ranks/0/initialize", {"num_pages": 65536, "world_size": 1})
        statuses: list[int] = []
        started = threading.Event()

        def write(name: int) -> None:
            with httpx.Client(base_url=service.url, timeout=30) as client:
                for i in range(100_000):
                    keys = [f"{name}-{i}-{j}" for j in range(8)]
                    body = {"rank": 0, "writer": "w", "keys": keys}
                    try:
                        statuses.append(client.post(f"{NS}/allocate", json=body).status_code)
                    except httpx.TransportError:
                        return
                    started.set()

        threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        assert started.wait(30)
        time.sleep(0.2)
        assert service.terminate() in (0, -signal.SIGTERM)
        for thread in threads:
            thread.join(30)
        assert set(statuses) == {200}
        assert "Traceback" not in service.log()
        # All it answered is there, under new leases.
        service.start()
        audit = httpx.get(f"{service.url}{NS}/audit").json()
        assert audit["allocated"] == 8 * len(statuses)
        assert audit["leaked"] == 0


def test_a_port_in_use_is_told_in_a_line(service: ServiceProcess, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvloom.cli.main", "serve-metadata"]
    done = subprocess.run(
        [*command, "--port", str(service.port), "--state", str(tmp_path / "s.db")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "address already in use" in done.stderr
    assert "Traceback" not in done.stderr
