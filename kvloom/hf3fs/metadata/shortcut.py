"""Requests that are answered where they arrive.

A scheduler waits for look-ups, and the embedded backend answers them from memory; most changes it
answers without waiting too. What an HTTP parser and an ASGI server do for every request (a call for
each header, a scope, a task, events) then takes longer than all else. Engines send the same few
heads again and again, so this protocol, uvicorn's own otherwise, remembers what a head means and
reads from there on only bodies. It hands everything else, and every doubtful request, to uvicorn
and the app, which give the same answers (a test compares them).

It also ends connections whose client is slow: uvicorn waits for ever for the rest of a request, and
a few thousand such connections are all that a server may have.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvloom.hf3fs.metadata.app import Headers, RequestError, Service
from kvloom.hf3fs.metadata.endpoints import ENDPOINTS, Endpoint

_LOOK_S = 1.0  # a connection is looked at so often
_END = b"\r\n\r\n"
_LONGEST_HEAD = 4096
_HEADS = 1024  # remembered
_PATTERNS = [
    (re.compile(e.path.replace("{namespace}", "(?P<namespace>[A-Za-z0-9._-]+)")), e)
    for e in ENDPOINTS
    if e.kind
]


@dataclass(frozen=True, slots=True)
class _Head:
    """What a head says; ``size``: bytes of the whole request."""

    endpoint: Endpoint
    params: dict[str, str]
    start: int
    size: int
    keep_alive: bool


class _Parsed:
    """A head's fields, as httptools calls them out."""

    def __init__(self, head: bytes) -> None:
        self.url = b""
        self.headers: Headers = []
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(head)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))


def read_head(service: Service, head: bytes) -> _Head | None:
    """What a whole head says; None where uvicorn and the app must see to it."""
    try:
        parsed = _Parsed(head)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    url, parser, fields = parsed.url.decode("latin-1"), parsed.parser, dict(parsed.headers)
    found = ((pattern.fullmatch(url), endpoint) for pattern, endpoint in _PATTERNS)
    match, endpoint = next((each for each in found if each[0]), (None, None))
    if match is None or endpoint is None or parser.get_method() != b"POST":
        return None
    if parser.should_upgrade() or parser.get_http_version() != "1.1" or b"expect" in fields:
        return None
    # A chunked body tells no length beforehand; the app counts it.
    if b"content-length" not in fields or b"transfer-encoding" in fields:
        return None
    try:
        service.check_headers(endpoint.path, "POST", parsed.headers)
    except RequestError:
        return None
    size = len(head) + int(fields[b"content-length"])
    return _Head(endpoint, match.groupdict(), len(head), size, parser.should_keep_alive())


@lru_cache(64)
def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()


def protocol_of(service: Service) -> type[HttpToolsProtocol]:
    """uvicorn's ``http`` class for a service."""
    settings = service.settings
    known = lru_cache(_HEADS)(lambda head: read_head(service, head))

    class ShortcutProtocol(HttpToolsProtocol):
        _head: _Head | None = None  # of the request that comes this way ...
        _parts: list[bytes]  # ... what has come of it ...
        _missing: int  # ... and how many bytes have not
        _parsing = False  # uvicorn has a part of a request
        _deadline: float | None = None  # of the client, while it is its turn

        # One timer looks at the connection now and then: one for each request costs more than the
        # request's look-up.

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > settings.max_connections:
                transport.abort()
            self._deadline = self.loop.time() + settings.request_s
            self._looking = self.loop.call_later(_LOOK_S, self._look)

        def connection_lost(self, exc: Exception | None) -> None:
            self._looking.cancel()
            super().connection_lost(exc)

        def _look(self) -> None:
            if self._deadline is not None and self.loop.time() > self._deadline:
                self.transport.abort()
            else:
                self._looking = self.loop.call_later(_LOOK_S, self._look)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._parsing = True
            self._deadline = self.loop.time() + settings.request_s

        def on_message_complete(self) -> None:
            self._parsing = False
            self._deadline = None
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._deadline = self.loop.time() + settings.keep_alive_s

        def data_received(self, data: bytes) -> None:
            while data and not self.transport.is_closing():
                if self._head is None:
                    self._head = self._known_head(data)
                    if self._head is None:
                        super().data_received(data)
                        return
                    self._unset_keepalive_if_required()
                    self._parts, self._missing = [], self._head.size
                    self._deadline = self.loop.time() + settings.request_s
                self._parts.append(data[: self._missing])
                data = data[self._missing :]
                self._missing -= len(self._parts[-1])
                if not self._missing:
                    head, self._head = self._head, None
                    self._whole(head, b"".join(self._parts))

        def _known_head(self, data: bytes) -> _Head | None:
            # One at a time and in order: behind a request that is under way uvicorn queues.
            busy = self.cycle is not None and not self.cycle.response_complete
            if busy or self._parsing or self.flow.write_paused:
                return None
            end = data.find(_END, 0, _LONGEST_HEAD)
            head = known(data[: end + len(_END)]) if end >= 0 else None
            return head if head is not None and self._at_once(head.endpoint) else None

        def _at_once(self, endpoint: Endpoint) -> bool:
            store = service.store
            return store.lookups_at_once if endpoint.kind == "lookup" else store.changes_at_once

        def _whole(self, head: _Head, request: bytes) -> None:
            # The journal may have become busy while the body came.
            if not self._at_once(head.endpoint):
                super().data_received(request)
                return
            client = self.client[0] if self.client else ""
            work = service.answer(head.endpoint, head.params, client, request[head.start :])
            try:
                work.send(None)
            except StopIteration as finished:
                status, content = finished.value
                self._answer(status, content, head.keep_alive)
                return
            work.close()
            raise RuntimeError(f"{head.endpoint.name} had to wait")

        def _answer(self, status: int, content: bytes, keep_alive: bool) -> None:
            lines = [_status_line(status), b"content-type: application/json\r\n"]
            if status != HTTPStatus.NO_CONTENT:
                lines.append(b"content-length: %d\r\n" % len(content))
            if not keep_alive:
                lines.append(b"connection: close\r\n")
            self.transport.write(b"".join((*lines, b"\r\n", content)))
            if not keep_alive:
                self.transport.close()
            self.server_state.total_requests += 1
            self._deadline = self.loop.time() + settings.keep_alive_s

    return ShortcutProtocol
