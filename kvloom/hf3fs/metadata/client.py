"""MetadataClient: asks the service, on time or not at all (spec rows H5, H16).

Nothing here raises into its caller and nothing waits beyond a deadline, whatever the service does:
hangs, drips bytes, answers garbage, is gone. The first failure opens a circuit breaker; from then
on every call returns at once, while a thread asks for the service's health, until that is good.
"""

from __future__ import annotations

import http.client
import io
import logging
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Struct

from kvloom.hf3fs.metadata import endpoints
from kvloom.hf3fs.metadata.base import (
    Allocation,
    AuditReport,
    Location,
    NamespaceStats,
    Written,
)

logger = logging.getLogger(__name__)

_MAX_ANSWER = 64 * 1024 * 1024  # bytes
_MAX_IDLE = 8  # connections kept
_encode = msgspec.json.Encoder().encode
_Answer = TypeVar("_Answer", bound=Struct)
_Entry = TypeVar("_Entry")


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why there is no answer.

    Attributes:
        status: HTTP status of a request that the service refused; 0: the service is not available,
            and a later call may succeed.
    """

    reason: str
    status: int = 0


class _BadAnswerError(Exception):
    """The service did not answer as it should."""


class MetadataClient:
    """A client of one namespace; thread-safe.

    Args:
        url: ``http://host:port`` or ``https://host:port``.
        writer: names this engine; all its ranks use the same, no other engine does.
        token: the service's bearer token.
        lookup_timeout_s: for ``exists``, ``locations`` and ``touch``: the engine waits for them.
        timeout_s: for all else.
        probe_interval_s: how often an unavailable service is asked for its health.
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        writer: str,
        *,
        token: str | None = None,
        lookup_timeout_s: float = 0.05,
        timeout_s: float = 2.0,
        probe_interval_s: float = 0.5,
    ) -> None:
        self._url = url.rstrip("/")
        self._base = f"/v2/namespaces/{quote(namespace, safe='')}"
        self._writer = writer
        self._lookup_timeout_s = lookup_timeout_s
        self._timeout_s = timeout_s
        self._probe_interval_s = probe_interval_s
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._registered: dict[int, endpoints.Initialize] = {}
        self._down: str | None = None  # why the breaker is open
        self._closed = threading.Event()

    @property
    def available(self) -> bool:
        """Whether the last word of the service was a good one."""
        return self._down is None

    def initialize(self, rank: int, num_pages: int, world_size: int) -> endpoints.Leases | NoAnswer:
        """Make a rank's page file known; repeated by itself for a service that forgot it."""
        request = endpoints.Initialize(num_pages, world_size)
        answer = self._post(f"/ranks/{rank}/initialize", request, endpoints.Leases)
        if not isinstance(answer, NoAnswer) or answer.status == 0:
            self._registered[rank] = request
        return answer

    def allocate(self, rank: int, keys: Sequence[str]) -> list[Allocation] | NoAnswer:
        request = endpoints.Allocate(rank, self._writer, list(keys))
        answer = self._post("/allocate", request, endpoints.Allocations)
        return answer if isinstance(answer, NoAnswer) else self._all(answer.results, keys)

    def confirm(self, rank: int, written: Sequence[Written]) -> list[bool] | NoAnswer:
        request = endpoints.Pages(rank, self._writer, list(written))
        answer = self._post("/confirm", request, endpoints.Confirmed)
        return answer if isinstance(answer, NoAnswer) else self._all(answer.confirmed, written)

    def release(self, rank: int, written: Sequence[Written]) -> int | NoAnswer:
        request = endpoints.Pages(rank, self._writer, list(written))
        answer = self._post("/release", request, endpoints.Released)
        return answer if isinstance(answer, NoAnswer) else answer.released

    def exists(self, keys: Sequence[str], lease: bool = False) -> list[bool] | NoAnswer:
        request = endpoints.Exists(list(keys), lease)
        answer = self._post("/exists", request, endpoints.Existing, self._lookup_timeout_s)
        return answer if isinstance(answer, NoAnswer) else self._all(answer.exists, keys)

    def locations(self, rank: int, keys: Sequence[str]) -> list[Location | None] | NoAnswer:
        request = endpoints.Locations(rank, list(keys))
        answer = self._post("/locations", request, endpoints.Located, self._lookup_timeout_s)
        return answer if isinstance(answer, NoAnswer) else self._all(answer.locations, keys)

    def touch(self, keys: Sequence[str]) -> int | NoAnswer:
        request = endpoints.Keys(list(keys))
        answer = self._post("/touch", request, endpoints.Touched, self._lookup_timeout_s)
        return answer if isinstance(answer, NoAnswer) else answer.touched

    def delete(self, keys: Sequence[str]) -> int | NoAnswer:
        answer = self._post("/delete", endpoints.Keys(list(keys)), endpoints.Deleted)
        return answer if isinstance(answer, NoAnswer) else answer.deleted

    def clear(self) -> bool | NoAnswer:
        answer = self._call("DELETE", self._base, b"", endpoints.NoBody, self._timeout_s)
        return answer if isinstance(answer, NoAnswer) else True

    def stats(self) -> NamespaceStats | NoAnswer:
        path = f"{self._base}/stats"
        return self._call("GET", path, b"", NamespaceStats, self._timeout_s)

    def audit(self) -> AuditReport | NoAnswer:
        path = f"{self._base}/audit"
        return self._call("GET", path, b"", AuditReport, self._timeout_s)

    def namespaces(self) -> list[str] | NoAnswer:
        answer = self._call("GET", "/v2/namespaces", b"", endpoints.Names, self._timeout_s)
        return answer if isinstance(answer, NoAnswer) else answer.namespaces

    def close(self) -> None:
        """Close all connections; every later call has no answer. Idempotent."""
        self._closed.set()
        self._down = "the client is closed"
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _all(self, entries: list[_Entry], keys: Sequence[object]) -> list[_Entry] | NoAnswer:
        """The entries, if there is one for each key."""
        if len(entries) != len(keys):
            return self._break(f"{len(entries)} answers to {len(keys)} keys")
        return entries

    def _post(
        self, path: str, request: Struct, kind: type[_Answer], timeout_s: float | None = None
    ) -> _Answer | NoAnswer:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        path, body = self._base + path, _encode(request)
        answer = self._call("POST", path, body, kind, timeout_s)
        if not (isinstance(answer, NoAnswer) and answer.status == 404 and self._registered):
            return answer
        if isinstance(request, endpoints.Initialize):
            return answer
        # The namespace was cleared, or the service lost its state: begin anew.
        for rank, known in list(self._registered.items()):
            target = f"{self._base}/ranks/{rank}/initialize"
            self._call("POST", target, _encode(known), endpoints.Leases, timeout_s)
        return self._call("POST", path, body, kind, timeout_s)

    def _call(
        self, method: str, path: str, body: bytes, kind: type[_Answer], timeout_s: float
    ) -> _Answer | NoAnswer:
        down = self._down
        if down is not None:
            return NoAnswer(down)
        end = time.monotonic() + timeout_s
        try:
            status, content = self._exchange(method, path, body, end)
            if status >= 500:
                raise _BadAnswerError(f"status {status}: {_detail(content)}")
            if status >= 400:
                return NoAnswer(_detail(content), status)
            return msgspec.json.decode(content or b"{}", type=kind)
        except (OSError, http.client.HTTPException, ValueError, msgspec.MsgspecError) as error:
            return self._break(f"{type(error).__name__}: {error}")
        except _BadAnswerError as error:
            return self._break(str(error))

    def _exchange(self, method: str, path: str, body: bytes, end: float) -> tuple[int, bytes]:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._request(connection, method, path, body, end)
            except (ConnectionError, http.client.BadStatusLine):
                pass  # it was closed while idle; every operation may be sent twice
        return self._request(_Connection(self._url), method, path, body, end)

    def _request(
        self, connection: _Connection, method: str, path: str, body: bytes, end: float
    ) -> tuple[int, bytes]:
        try:
            connection.end = end
            connection.http.request(method, path, body, self._headers)
            response = connection.http.getresponse()
            content = response.read(_MAX_ANSWER)
            if not response.isclosed() and response.read(1):
                raise _BadAnswerError(f"an answer of more than {_MAX_ANSWER} bytes")
        except BaseException:
            connection.close()
            raise
        with self._lock:
            keep = not response.will_close and len(self._idle) < _MAX_IDLE
            if keep and not self._closed.is_set():
                self._idle.append(connection)
                return response.status, content
        connection.close()
        return response.status, content

    def _break(self, reason: str) -> NoAnswer:
        """Open the breaker, and have the service watched until it is healthy."""
        with self._lock:
            if self._down is None:
                self._down = reason
                threading.Thread(
                    target=self._probe, name="kvloom-metadata-probe", daemon=True
                ).start()
                logger.warning(
                    "kvloom: the metadata service %s is not available (%s); going on without it",
                    self._url,
                    reason,
                )
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        return NoAnswer(reason)

    def _probe(self) -> None:
        while not self._closed.wait(self._probe_interval_s):
            try:
                end = time.monotonic() + self._lookup_timeout_s
                connection = _Connection(self._url)
                status, _ = self._request(connection, "GET", "/healthz", b"", end)
            except (OSError, http.client.HTTPException, ValueError, _BadAnswerError):
                continue
            if status == 200:
                with self._lock:
                    if not self._closed.is_set():
                        self._down = None
                logger.warning("kvloom: the metadata service %s is available again", self._url)
                return


class _Connection:
    """A connection whose every operation ends before ``end`` (monotonic).

    A socket's own timeout is for each ``recv``: a service that drips bytes would never run into it.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self.end = 0.0
        self.http = http.client.HTTPConnection(
            parts.hostname or "", parts.port or (443 if secure else 80)
        )
        self.http.connect = lambda: self._connect(secure)  # type: ignore[method-assign]

    def _connect(self, secure: bool) -> None:
        host, port = self.http.host, self.http.port
        plain = socket.create_connection((host, port), timeout=self.left())
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if secure:
            plain.settimeout(self.left())
            plain = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
        self.http.sock = _DeadlineSocket(plain, self)

    def left(self) -> float:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the service did not answer in time")
        return left

    def close(self) -> None:
        self.http.close()


class _DeadlineSocket:
    """What ``http.client`` uses of a socket."""

    def __init__(self, plain: socket.socket, connection: _Connection) -> None:
        self._plain = plain
        self._connection = connection

    def sendall(self, data: bytes) -> None:
        self._plain.settimeout(self._connection.left())
        self._plain.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self._plain, self._connection))

    def close(self) -> None:
        self._plain.close()


class _Reader(io.RawIOBase):
    def __init__(self, plain: socket.socket, connection: _Connection) -> None:
        self._plain = plain
        self._raw = plain.makefile("rb", buffering=0)
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._plain.settimeout(self._connection.left())
        return self._raw.readinto(buffer) or 0

    def close(self) -> None:
        super().close()
        self._raw.close()


def _detail(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=endpoints.Problem).detail
    except (msgspec.MsgspecError, ValueError):
        return repr(content[:200])
