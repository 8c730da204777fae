"""Requests that are answered where they are parsed.

A scheduler waits for look-ups, and the embedded backend answers them from memory; most changes it
answers without waiting too. What an ASGI server does for every request (a scope, a task, events)
then takes longer than all else. This protocol is uvicorn's own, with a way past that for the
requests that engines make all the time; it hands everything else, and every doubtful request, to
uvicorn and the app, which give the same answers (a test compares them).

It also ends connections whose client is slow: uvicorn waits for ever for the rest of a request, and
a few thousand such connections are all that a server may have.
"""

from __future__ import annotations

import asyncio
import re
from functools import lru_cache
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvloom.hf3fs.metadata.app import RequestError, Service
from kvloom.hf3fs.metadata.endpoints import ENDPOINTS, Endpoint

_LOOK_S = 1.0  # a connection is looked at so often
_PATTERNS = [
    (re.compile(e.path.replace("{namespace}", "(?P<namespace>[A-Za-z0-9._-]+)")), e)
    for e in ENDPOINTS
    if e.kind
]


@lru_cache(4096)
def _find(url: bytes) -> tuple[Endpoint, dict[str, str]] | None:
    text = url.decode("latin-1")
    for pattern, endpoint in _PATTERNS:
        if (match := pattern.fullmatch(text)) is not None:
            return endpoint, match.groupdict()
    return None


@lru_cache(64)
def _head(status: int) -> bytes:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()


def protocol_of(service: Service) -> type[HttpToolsProtocol]:
    """uvicorn's ``http`` class for a service."""
    settings = service.settings

    class ShortcutProtocol(HttpToolsProtocol):
        _found: tuple[Endpoint, dict[str, str]] | None = None
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
            self._deadline = self.loop.time() + settings.request_s

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._deadline = self.loop.time() + settings.keep_alive_s

        def on_headers_complete(self) -> None:
            self._found = self._find_short()
            if self._found is None:
                super().on_headers_complete()
            else:
                self._parts: list[bytes] = []

        def _find_short(self) -> tuple[Endpoint, dict[str, str]] | None:
            found = _find(self.url)
            if found is None or self.parser.get_method() != b"POST":
                return None
            # One at a time and in order: behind a request that is under way uvicorn queues.
            if self.cycle is not None and not self.cycle.response_complete:
                return None
            if self.flow.write_paused or self.expect_100_continue:
                return None
            if self.parser.should_upgrade() or self.parser.get_http_version() != "1.1":
                return None
            try:
                service.check_headers(found[0].path, "POST", self.headers)
            except RequestError:
                return None
            # A chunked body tells no length beforehand; the app counts it.
            if not any(name == b"content-length" for name, _ in self.headers):
                return None
            return found if self._at_once(found[0]) else None

        def _at_once(self, endpoint: Endpoint) -> bool:
            store = service.store
            return store.lookups_at_once if endpoint.kind == "lookup" else store.changes_at_once

        def on_body(self, body: bytes) -> None:
            if self._found is None:
                super().on_body(body)
            else:
                self._parts.append(body)

        def on_message_complete(self) -> None:
            self._deadline = None
            if self._found is None:
                super().on_message_complete()
                return
            endpoint, params = self._found
            client = self.client[0] if self.client else ""
            if self._at_once(endpoint):
                work = service.answer(endpoint, params, client, b"".join(self._parts))
                try:
                    work.send(None)
                except StopIteration as finished:
                    self._answer(*finished.value)
                    return
                work.close()
                raise RuntimeError(f"{endpoint.name} had to wait")
            # The journal became busy while the body came: the long way, from the start.
            super().on_headers_complete()
            for part in self._parts:
                super().on_body(part)
            super().on_message_complete()

        def _answer(self, status: int, content: bytes) -> None:
            head = [_head(status), b"content-type: application/json\r\n"]
            if status != HTTPStatus.NO_CONTENT:
                head.append(b"content-length: %d\r\n" % len(content))
            close = not self.parser.should_keep_alive()
            if close:
                head.append(b"connection: close\r\n")
            self.transport.write(b"".join((*head, b"\r\n", content)))
            if close:
                self.transport.close()
            self.server_state.total_requests += 1
            self._deadline = self.loop.time() + settings.keep_alive_s

    return ShortcutProtocol
